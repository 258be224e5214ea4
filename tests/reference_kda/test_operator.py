"""KDA satisfies the judge's protocols and keeps to its budget of time."""

import time

import numpy as np
import pytest

from evotune.fitness.operator import Case, Operator, specialization
from evotune.reference_kda import KDA, Workload, solve
from evotune.reference_kda.gate_cases import FULL_REGIMES
from evotune.reference_kda.regimes import REGIMES
from evotune.search_space.template import Specialization

SPEC = Specialization("kda", "bfloat16", (("K", 128), ("V", 128), ("contract", "production")))
PLAIN = Specialization("kda", "float32", (("K", 64), ("V", 96), ("contract", "plain")))


def test_protocols_hold_for_the_type_checker() -> None:
    operator: Operator = KDA
    case: Case = solve(Workload("w", "g", (3,), K=16, V=16), 0)
    assert operator.name == "kda"
    assert case.name == "w"


def test_signature_is_the_entry() -> None:
    names = [p.name for p in KDA.signature(SPEC)]
    inputs = ["q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens"]
    outputs = ["o", "final_state", "workspace"]
    assert names == [*inputs, *outputs, "N", "T", "H", "HV", "scale", "lower_bound"]
    types = {p.name: p.ctype for p in KDA.signature(SPEC)}
    assert {types[n] for n in ("q", "k", "v", "g", "beta", "o")} == {"bfloat16"}
    assert {types[n] for n in ("A_log", "dt_bias", "initial_state", "final_state")} == {"float32"}
    assert {p.ctype for p in KDA.signature(PLAIN) if p.name in ("g", "beta")} == {"float32"}


@pytest.mark.parametrize("level", ["screen", "full"])
@pytest.mark.parametrize("spec", [SPEC, PLAIN])
def test_cases_belong_to_the_specialization(spec: Specialization, level: str) -> None:
    cases = list(KDA.gate_cases(spec, level))  # type: ignore[arg-type]
    assert all(specialization(KDA, c.workload) == spec for c in cases)
    names = [c.workload.name for c in cases]
    assert len(set(names)) == len(names)
    rungs = [c.rung for c in cases]
    assert rungs == sorted(rungs, key=["smoke", "edges", "regimes"].index)
    assert all(spec.label in name for name in names)


def test_levels_cover_what_they_promise() -> None:
    screen, full = (list(KDA.gate_cases(PLAIN, level)) for level in ("screen", "full"))  # type: ignore[arg-type]
    assert {c.name for c in screen if c.rung != "regimes"} < {c.name for c in full}
    assert set(FULL_REGIMES) == set(REGIMES)
    assert {c.workload.regime for c in full} == set(REGIMES)
    for cases in (screen, full):
        w = [c.workload for c in cases]
        assert any(0 in x.lengths and 1 in x.lengths for x in w)
        assert any(x.heads > 1 and x.value_heads > x.heads for x in w)
        assert {x.initial_state for x in w} == {x.final_state for x in w} == {True, False}
        assert len({x.scale for x in w}) > 1
    assert any(c.workload.slack for c in full)


def test_inputs_and_outputs_are_named_as_the_signature() -> None:
    case = solve(Workload("w", "g", (3, 0), 1, 2, 16, 8, final_state=False, slack=2), 0)
    roles = {p.name: p.role for p in KDA.signature(PLAIN)}
    assert set(case.inputs) == {n for n, role in roles.items() if role == "input"}
    assert set(case.outputs) == {n for n, role in roles.items() if role == "output"}
    assert dict(case.sizes) == {"N": 2, "T": 5, "H": 1, "HV": 2}
    assert dict(case.scalars) == {"scale": 0.25, "lower_bound": -5.0}
    assert dict(case.outputs) == {"o": ((5, 2, 8), "float32"), "final_state": None}
    assert case.inputs["initial_state"] is None


def test_empty_problem_has_nothing_to_do() -> None:
    case = KDA.empty(SPEC)
    assert dict(case.sizes) == {"N": 0, "T": 0, "H": 1, "HV": 1}
    outputs = {"o": np.zeros((0, 1, 128)), "final_state": np.zeros((0, 1, 128, 128))}
    assert case.worst(outputs).ratio == 0


def test_yardsticks() -> None:
    w = Workload("w", "g", (100, 28), 2, 4, 64, 64, initial_state=True)
    assert KDA.work(w) == (512.0, "token-heads")
    rows = 128 * (2 * 2 * 64 * 4 + 4 * (2 * 64 * 4 + 65 * 4))
    assert KDA.floor_us(w, 1000.0) == (rows + 2 * 2 * 4 * 64 * 64 * 4) / 1000
    assert 50 < KDA.naive_time_us(solve(w, 0)) < 5e6


def test_solving_follows_workload_and_seed() -> None:
    w = Workload("w", "g", (20,), K=16, V=16)
    a, b, c = solve(w, 1), solve(w, 1), solve(w, 2)
    np.testing.assert_array_equal(a.truth.o, b.truth.o)
    np.testing.assert_array_equal(a.bound.o_rms, b.bound.o_rms)
    assert (a.truth.o != c.truth.o).any()


def test_comparison_is_cheap() -> None:
    """Compared once per timed call. Measured alone at K = V = 128: 7 ms for the whole screen."""
    rng = np.random.default_rng(0)
    cases = [KDA.solve(c.workload, 0) for c in KDA.gate_cases(PLAIN, "screen")]
    outputs = [{"o": c.truth.o.astype(np.float32), "final_state": c.truth.final_state} for c in cases]
    start = time.process_time()
    for case, answered in zip(cases, outputs, strict=True):
        case.worst(answered)
        case.fresh(rng)
    assert time.process_time() - start < 0.5
