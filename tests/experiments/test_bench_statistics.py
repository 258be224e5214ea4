"""The short form of the simulated studies. Right code misses a bound on a count once in a million runs."""

import math
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))

import bench_statistics as bench  # noqa: E402

from evotune.fitness.sequential import order_interval  # noqa: E402

STUDIES = 16


@pytest.fixture(scope="module")
def equals() -> list[bench.AA]:
    return [bench.equal(noise, STUDIES, seed) for seed, noise in enumerate(bench.NOISES)]


def tail(hits: int, trials: int, rate: float) -> float:
    """P(Binomial(trials, rate) >= hits)."""
    chances = (math.comb(trials, i) * rate**i * (1 - rate) ** (trials - i) for i in range(hits, trials + 1))
    return sum(chances)


def test_studies_of_equals_promote_in_one_of_twenty_at_most(equals: list[bench.AA]) -> None:
    for found in equals:
        assert tail(found.false.hits, found.false.trials, bench.PLAN.alpha) > 1e-6, found
    hits = sum(found.false.hits for found in equals)
    assert tail(hits, STUDIES * len(equals), bench.PLAN.alpha) > 1e-6


def test_what_is_published_is_right_within_a_percent_where_the_best_screening_value_is_not(
    equals: list[bench.AA],
) -> None:
    for found in equals:
        assert abs(found.bias.mean) <= 0.01, found
        assert found.naive > 0.015, found


def test_published_intervals_cover_as_often_as_they_say(equals: list[bench.AA]) -> None:
    missed = sum(found.covered.trials - found.covered.hits for found in equals)
    _, _, coverage = order_interval(bench.PLAN.confirmation_blocks, 0.95)
    assert tail(missed, STUDIES * len(equals), 1 - coverage) > 1e-6


def test_a_gain_of_several_times_the_noise_is_found_and_published_as_it_is() -> None:
    found = bench.unequal(bench.NOISES[1], 0.1, 12, 1)
    assert found.found.hits == 12
    assert found.bias is not None
    assert abs(found.bias.mean) <= 0.01


def test_races_save_half_of_the_calls_and_stop_few_that_are_near() -> None:
    found = bench.races(bench.NOISES[3], 2, 1)
    assert found.saved > 0.4
    assert tail(found.edge.hits, found.edge.trials, bench.RACE_ERROR) > 1e-6
    assert found.edge.trials > 400


def test_noise_has_the_shape_that_its_name_says() -> None:
    rng = np.random.default_rng(0)
    drawn = {noise.name: noise.draw(rng, 40, 2000) for noise in bench.NOISES}
    assert all(series.shape == (40, 2000) for series in drawn.values())
    sd = drawn["autoregression 0.95"].std()
    assert sd == pytest.approx(math.hypot(0.04, 0.01 * math.sqrt(3)), rel=0.15)
    assert (drawn["5 % of calls twice as long"] > 0.5).mean() == pytest.approx(0.05, abs=0.01)


def test_a_rate_has_the_interval_of_wilson() -> None:
    assert bench.Rate(0, 100).interval == (0.0, pytest.approx(0.03699, abs=1e-4))
    assert bench.Rate(50, 100).interval == (pytest.approx(0.4038, abs=1e-4), pytest.approx(0.5962, abs=1e-4))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_full_form() -> None:
    for seed, noise in enumerate(bench.NOISES):
        found = bench.equal(noise, 500, 1000 + seed)
        assert tail(found.false.hits, 500, bench.PLAN.alpha) > 1e-6, found
        assert abs(found.bias.mean) <= 0.01, found
