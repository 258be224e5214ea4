"""The laws on generated shapes, regimes and contracts, and how a failure shrinks to what can be read."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, find, given, settings
from hypothesis import strategies as st

from evotune.reference_kda import REGIMES, KdaCase, Workload, solve
from evotune.reference_kda.laws import Bank, Causality, Heads, KdaLaw, Linearity, PureDecay, Split
from evotune.reference_kda.smaller import Asked, smaller
from tests.reference_kda.kernels import MUTANTS, ChunkLoop, Kernel, TokenLoop, answer, in_form, ratio

QUICK = settings(
    max_examples=20, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
LAWS = {"split": Split, "linearity": Linearity, "heads": Heads, "causality": Causality, "decay": PureDecay}
FORMS: dict[str, Kernel] = {
    "recurrence": TokenLoop(),
    "chunks of 16": in_form(chunk=16, block=16),
    "chunks of 5, pairwise": in_form(chunk=5, block=1),
}


@st.composite
def workloads(draw: st.DrawFn, regimes: tuple[str, ...] = tuple(REGIMES), tokens: int = 24) -> Workload:
    """Any pack of up to three sequences, empty ones too."""
    heads = draw(st.integers(1, 2))
    return Workload(
        "generated",
        "generated",
        lengths=tuple(draw(st.lists(st.integers(0, tokens), min_size=1, max_size=3))),
        heads=heads,
        value_heads=heads * draw(st.integers(1, 2)),
        K=draw(st.sampled_from((8, 16))),
        V=draw(st.sampled_from((8, 24))),
        dtype=draw(st.sampled_from(("float32", "bfloat16"))),
        contract=draw(st.sampled_from(("plain", "production"))),
        regime=draw(st.sampled_from(regimes)),
        initial_state=True,
    )


def law_on(name: str, case: KdaCase, rng: np.random.Generator) -> KdaLaw:
    """The law with a bank that holds this case alone."""
    others = Linearity._parts(case, rng) if name == "linearity" else ()
    return LAWS[name](Bank(case.workload, 1, 2, {(name, 0): (case, *others)}))


@pytest.mark.parametrize("law", ["split", "linearity", "heads"])
@QUICK
@given(workload=workloads(), form=st.sampled_from(sorted(FORMS)), seed=st.integers(0, 2**31 - 1))
def test_a_law_holds_on_every_shape_and_regime(law: str, workload: Workload, form: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    found = law_on(law, solve(workload, seed), rng).check(lambda q: answer(FORMS[form], q), rng)
    assert found.ratio <= 1, found.detail


@QUICK
@given(
    workload=workloads(("strong", "alternating", "saturated")),
    form=st.sampled_from(sorted(FORMS)),
    seed=st.integers(0, 2**31 - 1),
)
def test_the_future_never_changes_the_past(workload: Workload, form: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    law = law_on("causality", solve(workload, seed), rng)
    found = law.check(lambda q: answer(FORMS[form], q), rng)
    assert found.ratio <= 1, found.detail


@QUICK
@given(
    workload=workloads(("beta_zero",)), form=st.sampled_from(sorted(FORMS)), seed=st.integers(0, 2**31 - 1)
)
def test_without_writes_the_state_decays(workload: Workload, form: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    found = law_on("decay", solve(workload, seed), rng).check(lambda q: answer(FORMS[form], q), rng)
    assert found.ratio <= 1, found.detail


@pytest.mark.parametrize(
    ("mutant", "lengths", "heads"),
    [
        ("gate of the token before", (2,), (1, 1)),
        ("grouped heads interleaved", (1,), (2, 4)),
        ("no scale", (1,), (1, 1)),
        ("final state one chunk early", (1,), (1, 1)),
    ],
)
def test_a_failure_shrinks_to_the_smallest_problem_that_shows_it(
    mutant: str, lengths: tuple[int, ...], heads: tuple[int, int]
) -> None:
    plain = workloads(("mixed",), tokens=6).map(lambda w: replace(w, dtype="float32", contract="plain"))
    smallest = find(
        plain,
        lambda w: ratio(MUTANTS[mutant], solve(w, 1)) > 1,
        settings=settings(QUICK, max_examples=200, database=None),
    )
    assert smallest.lengths == lengths
    assert (smallest.heads, smallest.value_heads) == heads


def test_a_law_broken_by_one_kernel_names_the_place() -> None:
    rng = np.random.default_rng(0)
    case = solve(replace(Workload("w", "w", (20,), K=16, V=16, initial_state=True), heads=1), 3)
    late = law_on("split", case, rng).check(lambda q: answer(ChunkLoop(final_one_early=True), q), rng)
    assert late.ratio > 1
    assert late.detail.startswith(("o, token row", "final_state, sequence 0"))


def smallest(law: KdaLaw, workload: Workload, kernel: Kernel) -> Workload:
    """What is left of a workload on which a kernel breaks a law, if any of six checks shows it."""
    rng = np.random.default_rng(0)

    def broken(w: Workload) -> bool:
        there = law.on(w)
        return any(there.check(lambda q: answer(kernel, q), rng).ratio > 1 for _ in range(6))

    assert broken(workload)
    return _left(law.smaller(workload), broken, workload)


def _left(asked: Asked, fails: Callable[[Workload], bool], left: Workload) -> Workload:
    try:
        tried = next(asked)
        while True:
            failed = fails(tried)
            left = tried if failed else left
            tried = asked.send(failed)
    except StopIteration:
        return left


@pytest.mark.parametrize(
    ("law", "mutant", "left"),
    [
        (Split, "initial state ignored", {"lengths": (1,), "heads": 1, "value_heads": 1, "regime": "mixed"}),
        (Heads, "every head gated as the first", {"lengths": (1,), "heads": 1, "value_heads": 2}),
        (PureDecay, "gate of the token before", {"lengths": (2,), "heads": 1, "regime": "beta_zero"}),
    ],
)
def test_a_broken_law_shrinks_to_what_it_needs(
    law: type[KdaLaw], mutant: str, left: dict[str, object]
) -> None:
    start = Workload(
        "start", "", (17, 0, 6), 2, 4, K=16, V=16, regime=str(law.regimes[-1]), initial_state=True
    )
    found = smallest(law(Bank(start, 1, 2)), start, MUTANTS[mutant])
    assert {key: getattr(found, key) for key in left} == left
    assert (found.initial_state, found.final_state) == (True, True)


@pytest.mark.parametrize("longest", [1, 2, 3, 17, 40, 300])
def test_every_threshold_is_found(longest: int) -> None:
    """An error that begins at any length is pinned to it, in few questions."""
    start = Workload("start", "", (500, 3, 0), heads=3, value_heads=6, regime="zero", initial_state=True)
    asked: list[Workload] = []

    def fails(w: Workload) -> bool:
        asked.append(w)
        return max(w.lengths) >= longest

    left = _left(smaller(start), fails, start)
    assert (left.lengths, left.heads, left.value_heads, left.regime) == ((longest,), 1, 1, "ones")
    assert len(set(asked)) <= 30


def test_a_law_tells_what_it_was_broken_on() -> None:
    rng = np.random.default_rng(0)
    law = Split(Bank(Workload("base", "", (), K=16, V=16), 2, 8))
    assert law.drawn == ()
    for _ in range(8):
        law.check(lambda q: answer(TokenLoop(), q), rng)
    assert len(law.drawn) == 2
    assert {len(w.lengths) for w in law.drawn} == {3}
