"""Fresh cases: truths follow exactly, bounds stay bounds."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evotune.reference_kda import KdaCase, Workload, activate, recurrence, solve
from evotune.reference_kda.tolerance import extent
from tests.reference_kda.kernels import ChunkLoop, TokenLoop, answer


def rederived(case: KdaCase) -> tuple[np.ndarray, np.ndarray]:
    w = case.workload
    result = recurrence(activate(case.inputs, w.contract, w.scale, np.float64))
    return result.o, result.final_state


def relative(found: np.ndarray, truth: np.ndarray) -> float:
    return float(np.abs(found - truth).max(initial=0) / max(np.abs(truth).max(initial=0), 1e-30))


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 20), max_size=3),
    heads=st.integers(1, 3),
    group=st.integers(1, 3),
    V=st.sampled_from([5, 16, 40, 64]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    contract=st.sampled_from(["plain", "production"]),
    state=st.booleans(),
    seed=st.integers(0, 99),
)
def test_truth_of_a_fresh_case_is_its_solution(
    lengths: list[int], heads: int, group: int, V: int, dtype: str, contract: str, state: bool, seed: int
) -> None:
    w = Workload("w", "g", tuple(lengths), heads, heads * group, 12, V, dtype, contract, "mixed", state)
    fresh = solve(w, seed).fresh(np.random.default_rng(seed))
    o, final = rederived(fresh)
    assert relative(o, fresh.truth.o) < 1e-13
    assert relative(final, fresh.truth.final_state) < 1e-13


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fresh_inputs_differ_in_value_and_keep_their_form(dtype: str) -> None:
    case = solve(Workload("w", "g", (33, 2), 2, 4, 64, 64, dtype, "production", initial_state=True), 0)
    fresh = case.fresh(np.random.default_rng(1))
    for name, before in case.inputs.items():
        after = fresh.inputs[name]
        assert before is not None
        assert after is not None
        assert (after.shape, after.dtype) == (before.shape, before.dtype)
        assert after.flags.c_contiguous
        same = np.mean(after == before)
        assert same == 1 if name == "cu_seqlens" else same < 0.6, name
    assert fresh.outputs == case.outputs
    assert fresh.sizes == case.sizes


def test_bound_follows_its_place() -> None:
    """In every place the carried bound has the same ratio to the carried truth."""
    case = solve(Workload("w", "g", (33, 5), 2, 4, 64, 72, initial_state=True), 0)
    rng = np.random.default_rng(2)
    fresh = case.fresh(rng)
    outputs = answer(TokenLoop(), case)
    gap = case.output_gap(outputs["o"])
    again = case.fresh(np.random.default_rng(2))
    np.testing.assert_array_equal(fresh.truth.o, again.truth.o)
    moved = extent(fresh.truth.o, fresh.truth.final_state, case.places)
    still = extent(case.truth.o, case.truth.final_state, case.places)
    for name in ("o_rms", "o_max", "state_rms", "state_max"):
        ratios = (
            getattr(bound, name) / getattr(size, name)
            for bound, size in ((case.bound, still), (fresh.bound, moved))
        )
        before, after = (np.sort(r, axis=None) for r in ratios)
        np.testing.assert_allclose(before, after, rtol=1e-9)
    assert gap.worst <= 1


def test_honest_kernel_stays_inside_on_fresh_cases() -> None:
    case = solve(Workload("w", "g", (40,), 2, 2, 64, 64, regime="identical_keys", initial_state=True), 0)
    rng = np.random.default_rng(3)
    for _ in range(10):
        case = case.fresh(rng)
        assert case.worst(answer(ChunkLoop(), case)).ratio <= 1


def test_slack_rows_stay_poisoned() -> None:
    case = solve(Workload("w", "g", (3,), K=16, V=16, slack=2), 0).fresh(np.random.default_rng(0))
    assert np.isnan(np.asarray(case.inputs["v"])[3:]).all()
    kept = replace(case, inputs={**case.inputs})
    assert kept.worst(answer(TokenLoop(), case)).ratio <= 1
