"""What the tests promise, by exact enumeration where the space is small and by simulation where it is not."""

import itertools
import math
from collections.abc import Iterator, Sequence
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evotune.fitness.sequential import (
    ALPHA,
    LEAST_EVIDENCE,
    MOST_BLOCKS,
    QUAD,
    RACE_TAILS,
    NoiseLaw,
    PairedTest,
    Race,
    estimate,
    evidence,
    level,
    order_interval,
    power,
    quad,
    spending,
    wins_needed,
)

LOG_RATIOS = st.floats(-1, 1).map(lambda x: round(x, 6))
SIGNS = (1.0, -1.0, 0.0)


def after(log_ratios: Sequence[float], alpha: float = ALPHA, margin: float = 0.0) -> PairedTest:
    test = PairedTest(alpha, margin)
    for log_ratio in log_ratios:
        test.update(log_ratio)
    return test


def at_most(rate: float, trials: int) -> int:
    """Successes that a rate of at most this exceeds in fewer than one run in a million (Bernstein)."""
    slack = 6 * math.log(10)
    return math.ceil(rate * trials + math.sqrt(2 * slack * rate * (1 - rate) * trials) + slack)


class Adversary:
    """A null that depends on the past: chances of winning, losing and tying, a win never the likelier."""

    def __init__(self, chances: Sequence[tuple[float, float]]) -> None:
        self._chances = chances

    def __call__(self, past: tuple[float, ...]) -> tuple[float, float, float]:
        index = sum(3**i * SIGNS.index(sign) for i, sign in enumerate(past)) + len(past)
        total, share = self._chances[index % len(self._chances)]
        return total * share, total * (1 - share), 1 - total


ADVERSARIES = st.lists(st.tuples(st.floats(0, 1), st.floats(0, 0.5)), min_size=1, max_size=24).map(Adversary)


def histories(adversary: Adversary, blocks: int) -> Iterator[tuple[tuple[float, ...], float]]:
    """All sequences of signs with their probability."""
    for signs in itertools.product(SIGNS, repeat=blocks):
        chance = 1.0
        for i, sign in enumerate(signs):
            chance *= adversary(signs[:i])[SIGNS.index(sign)]
        if chance:
            yield signs, chance


@given(ADVERSARIES)
def test_evidence_is_expected_at_most_1_whatever_the_null_does(adversary: Adversary) -> None:
    expected = sum(chance * after(signs).evidence for signs, chance in histories(adversary, 5))
    assert expected <= 1 + 1e-12


@given(ADVERSARIES, st.sampled_from([0.5, 0.2, 0.1]))
def test_a_true_null_is_ever_rejected_with_probability_alpha_at_most(
    adversary: Adversary, alpha: float
) -> None:
    rejected = sum(chance for signs, chance in histories(adversary, 5) if after(signs, alpha).rejected)
    assert rejected <= alpha


@pytest.mark.parametrize("k", [1, 2, 5, 20])
def test_an_equal_challenger_is_promoted_below_its_level_within_the_blocks_there_are(k: int) -> None:
    alpha = spending(ALPHA, k)
    assert alpha / 20 < power(0.5, alpha) <= alpha


SLOTS = st.lists(st.floats(-5, 5), min_size=4, max_size=4)


def coin_outcomes(
    slots: Sequence[Sequence[float]], slower: Sequence[Sequence[float]]
) -> Iterator[list[float]]:
    """Log-ratios of blocks for every way their coins can fall; a slot's log-time is what it is either way.

    `slower`: what the challenger takes beyond that.
    """
    for orders in itertools.product(QUAD, repeat=len(slots)):
        yield [
            sum(
                -(time + extra) / 2 if mine else time / 2
                for mine, time, extra in zip(order, block, worse, strict=True)
            )
            for order, block, worse in zip(orders, slots, slower, strict=True)
        ]


@given(st.lists(SLOTS, min_size=1, max_size=6))
def test_the_coin_alone_makes_identical_kernels_a_fair_game(slots: list[list[float]]) -> None:
    """Whatever the times were: outliers, drift and memory play no part."""
    equal = [[0.0] * 4 for _ in slots]
    outcomes = [after(ratios).evidence for ratios in coin_outcomes(slots, equal)]
    assert sum(outcomes) / len(outcomes) == pytest.approx(1)


@given(st.lists(st.tuples(SLOTS, st.lists(st.floats(0, 2), min_size=4, max_size=4)), min_size=1, max_size=6))
def test_a_kernel_that_is_slower_in_every_slot_has_a_losing_game(
    blocks: list[tuple[list[float], list[float]]],
) -> None:
    slots, slower = zip(*blocks, strict=True)
    outcomes = [after(ratios).evidence for ratios in coin_outcomes(slots, slower)]
    assert sum(outcomes) / len(outcomes) <= 1 + 1e-9


def test_the_coin_is_fair_and_each_kernel_comes_first_and_last() -> None:
    rng = np.random.default_rng(0)
    drawn = [quad(rng) for _ in range(1000)]
    assert abs(drawn.count(QUAD[0]) - 500) < 100
    assert set(drawn) == set(QUAD)
    for order in QUAD:
        place = sum(i if mine else -i for i, mine in enumerate(order))
        assert place == 0, "linear drift cancels"


@given(st.lists(LOG_RATIOS, max_size=20), st.floats(1e-3, 1e3))
def test_the_unit_of_log_ratios_is_irrelevant_at_no_margin(ratios: list[float], unit: float) -> None:
    assert after([unit * r for r in ratios]).evidence == after(ratios).evidence


@given(st.lists(LOG_RATIOS, min_size=1, max_size=20), st.data())
def test_evidence_never_falls_when_a_block_is_better(ratios: list[float], data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(ratios) - 1))
    better = [*ratios[:index], ratios[index] + data.draw(st.floats(0, 1)), *ratios[index + 1 :]]
    assert after(better).evidence >= after(ratios).evidence


@given(st.lists(LOG_RATIOS, max_size=20), st.floats(0, 0.5))
def test_evidence_never_rises_with_the_margin(ratios: list[float], margin: float) -> None:
    assert after(ratios, margin=margin).evidence <= after(ratios).evidence


@given(st.lists(LOG_RATIOS, max_size=12), st.randoms())
def test_order_of_blocks_is_irrelevant_to_the_evidence(ratios: list[float], random: object) -> None:
    shuffled = list(ratios)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert after(shuffled).evidence == pytest.approx(after(ratios).evidence)


@pytest.mark.parametrize("size", [0.001, 0.7, 50.0])
def test_one_bad_block_costs_at_most_nine_tenths_of_the_evidence(size: float) -> None:
    good, bad = after([0.05] * 6), after([*[0.05] * 6, -size])
    assert bad.evidence >= good.evidence / 10.01
    assert after([*[0.05] * 6, -size, *[0.05] * 8], alpha=0.002).rejected


def test_a_rejection_stays() -> None:
    test = after([0.05] * 5, alpha=0.1)
    assert test.rejected
    for _ in range(10):
        test.update(-1.0)
    assert test.rejected
    assert test.over
    assert not test.hopeless


@given(st.lists(st.sampled_from(SIGNS), max_size=14), st.integers(1, 14), st.sampled_from([0.2, 0.05, 0.002]))
def test_a_test_is_given_up_only_when_winning_the_rest_would_not_do_or_evidence_is_little(
    signs: list[float], most_blocks: int, alpha: float
) -> None:
    test = PairedTest(alpha, most_blocks=most_blocks)
    for sign in signs[:most_blocks]:
        test.update(sign)
    if test.rejected:
        return
    rest = PairedTest(alpha, most_blocks=most_blocks)
    for sign in [*signs[:most_blocks], *[1.0] * (most_blocks - test.blocks)]:
        rest.update(sign)
    assert test.hopeless == (not rest.rejected or test.evidence < LEAST_EVIDENCE)
    assert test.over == (test.hopeless or test.blocks == most_blocks)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_block_without_a_finite_ratio_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        PairedTest(0.05).update(value)


@pytest.mark.parametrize("alpha", [0.0, 1.0, -1.0, 2.0])
def test_a_level_that_is_no_probability_is_refused(alpha: float) -> None:
    with pytest.raises(ValueError, match="probability"):
        PairedTest(alpha)


@pytest.mark.parametrize(("k", "win", "least"), [(1, 0.8, 0.8), (5, 0.87, 0.8), (10, 0.999, 0.999)])
def test_the_power_that_is_stated(k: int, win: float, least: float) -> None:
    assert power(win, spending(ALPHA, k)) >= least


def test_power_is_the_share_of_simulated_tests_that_reject() -> None:
    rng, alpha, found = np.random.default_rng(1), spending(ALPHA, 3), 0
    for _ in range(2000):
        test = PairedTest(alpha)
        while not test.over:
            test.update(1.0 if rng.random() < 0.85 else -1.0)
        found += test.rejected
    assert found / 2000 == pytest.approx(power(0.85, alpha), abs=0.05)


def test_five_percent_over_noise_of_one_and_a_half_is_found_within_twelve_blocks() -> None:
    win = NormalDist().cdf(math.log(1.05) / 0.015)
    assert power(win, spending(ALPHA, 5), most_blocks=12) > 0.95


@pytest.mark.parametrize("k", [1, 8])
def test_the_wins_that_are_needed_give_the_power_that_is_wanted(k: int) -> None:
    alpha = spending(ALPHA, k)
    assert power(wins_needed(alpha, 0.8), alpha) == pytest.approx(0.8, abs=0.002)


@given(st.floats(0.001, 0.5), st.integers(1, 500))
def test_shares_sum_to_alpha_at_most(alpha: float, tests: int) -> None:
    assert sum(spending(alpha, k) for k in range(1, tests + 1)) == pytest.approx(
        alpha * (1 - 1 / (tests + 1))
    )


def test_tests_are_counted_from_one() -> None:
    with pytest.raises(ValueError, match="from 1"):
        spending(0.05, 0)


@given(st.lists(st.sampled_from(["equal", "better, found", "better, missed"]), max_size=60))
def test_levels_of_true_nulls_sum_to_alpha_at_most_until_one_is_rejected(kinds: list[str]) -> None:
    """Only rejections of false nulls pass levels on before the first false rejection."""
    rejections = [kind == "better, found" for kind in kinds]
    levels = [level(ALPHA, rejections[:k]) for k in range(len(kinds))]
    assert sum(x for x, kind in zip(levels, kinds, strict=True) if kind == "equal") <= ALPHA + 1e-12
    assert all(spending(ALPHA, k) <= x <= ALPHA for k, x in enumerate(levels, start=1))


@pytest.mark.parametrize("n", range(1, 11))
@pytest.mark.parametrize("confidence", [0.8, 0.95])
def test_the_interval_covers_as_often_as_it_says(n: int, confidence: float) -> None:
    """Over all signs that the coins can give to magnitudes, which may be anything."""
    magnitudes = [0.5**i for i in range(n)]
    low, high, coverage = order_interval(n, confidence)
    held = 0
    for signs in itertools.product((1, -1), repeat=n):
        ordered = sorted(s * m for s, m in zip(signs, magnitudes, strict=True))
        held += ordered[low] < 0 < ordered[high]
    assert held / 2**n == pytest.approx(coverage)
    narrower = 1 - 2 * sum(math.comb(n, i) for i in range(low + 2)) / 2**n
    assert coverage >= confidence or low == 0
    assert narrower < confidence or low + 1 > high - 1, "the narrowest that does"


def test_an_estimate_is_the_median_as_a_factor() -> None:
    found = estimate([math.log(x) for x in (1.1, 1.0, 1.3, 1.2, 1.25, 1.15, 9.0)])
    assert found.median == pytest.approx(1.2)
    assert (found.low, found.high) == (pytest.approx(1.0), pytest.approx(9.0))
    assert found.coverage == 1 - 2**-6


def test_an_estimate_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a block"):
        estimate([])


def pairs(rng: np.random.Generator, centre: float, count: int) -> list[float]:
    """Log speed-ups of pairs of calls: heavy-tailed calls with 2 % of them twice as long."""
    calls = 0.01 * rng.standard_t(3, (count, 2)) + np.log(2) * (rng.random((count, 2)) < 0.02)
    return list(centre + calls[:, 0] - calls[:, 1])


def learned(rng: np.random.Generator, kernels: int = 100) -> NoiseLaw:
    law = NoiseLaw()
    for _ in range(kernels):
        law.learn(pairs(rng, rng.normal(), 8))
    return law


def stopped(rng: np.random.Generator, short_by: float, law: NoiseLaw, samples: int = 8) -> Race:
    """A race of a candidate whose true speed-up is the bar times 0.95 over exp(short_by)."""
    race = Race(bar=2.0, noise=law)
    for x in pairs(rng, math.log(2.0 * 0.95) - short_by, samples):
        race.update(x)
        if race.hopeless:
            break
    return race


@pytest.mark.parametrize("samples", [8, 64])
def test_a_candidate_within_the_margin_is_stopped_no_oftener_than_stated(samples: int) -> None:
    """At the very edge of the margin, each race with a law of its own, learned from 20 kernels."""
    rng, races = np.random.default_rng(2), 1500
    laws = [learned(rng, 20) for _ in range(30)]
    wrong = sum(stopped(rng, 0.0, laws[i % 30], samples).hopeless for i in range(races))
    assert wrong <= at_most(0.05, races)


def test_without_a_law_the_stated_error_is_exact_over_all_signs() -> None:
    wrong, n = 0, 12
    for signs in itertools.product((1, -1), repeat=n):
        race = Race(bar=1.0, margin=0.01)
        for sign in signs:
            race.update(math.log(0.99) + sign * 0.3)
        wrong += race.hopeless
    assert 0 < wrong / 2**n <= 0.05


def test_a_hopeless_candidate_is_stopped_after_two_samples_once_the_noise_is_known() -> None:
    rng = np.random.default_rng(3)
    law = learned(rng)
    taken = [stopped(rng, math.log(2), law).samples for _ in range(200)]
    assert sorted(taken)[180] == 2
    assert stopped(rng, math.log(2), NoiseLaw()).samples == 5


def test_a_candidate_at_the_bar_is_hardly_ever_stopped() -> None:
    rng = np.random.default_rng(4)
    law = learned(rng)
    assert sum(stopped(rng, math.log(0.95), law).hopeless for _ in range(500)) <= 5


def test_one_sample_stops_nothing() -> None:
    race = Race(bar=100.0, noise=learned(np.random.default_rng(5)), delta=0.3)
    race.update(0.0)
    assert not race.hopeless
    race.update(0.0)
    assert race.hopeless


@pytest.mark.parametrize("tail", [t for t in RACE_TAILS if t < 0.5])
def test_noise_reaches_farther_no_oftener_than_stated(tail: float) -> None:
    rng = np.random.default_rng(6)
    reach = learned(rng, 60).reach(tail)
    assert reach is not None
    beyond = np.mean(np.array(pairs(rng, 0.0, 20000)) < -reach)
    assert 0.2 * tail < beyond <= tail


def test_a_law_says_nothing_before_it_has_seen_enough_and_forgets_the_oldest() -> None:
    law = NoiseLaw(size=200)
    law.learn([0.0, 1.0])
    assert law.reach(1 / 4) is None
    assert law.reach(1 / 2) == 0.0
    for _ in range(20):
        law.learn([0.0, 1.0] * 5)
    assert law.reach(1 / 4) == 1.0
    for _ in range(20):
        law.learn([0.0] * 10)
    assert law.reach(1 / 4) == 0.0


def test_no_kernel_is_more_of_a_law_than_others() -> None:
    """One that was timed 200 times as often, and is calm, beside thirty that are not."""
    law = NoiseLaw()
    law.learn([0.0] * 1600)
    for _ in range(30):
        law.learn([0.0, 1.0] * 4)
    assert law.reach(1 / 4) == 1.0


def test_evidence_takes_arrays() -> None:
    wins, losses = np.array([[0, 3], [5, 7]]), np.array([[0, 1], [0, 7]])
    found = evidence(wins, losses)
    assert found.shape == (2, 2)
    assert found[0, 0] == 1
    assert found[1, 1] == pytest.approx(after([1.0, -1.0] * 7).evidence)
    assert MOST_BLOCKS >= 7
