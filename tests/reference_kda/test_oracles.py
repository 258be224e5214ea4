"""The recurrence and the chunk form agree, in every regime, contract and shape, with numpy and with torch."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evotune.reference_kda import (
    PAIRWISE,
    REGIMES,
    Form,
    Problem,
    Workload,
    activate,
    chunked,
    draw_inputs,
    recurrence,
    swap_state_layout,
)

FORMS = (
    Form(chunk=64, block=16),
    Form(chunk=16, block=16, anchor="before", exponential="2"),
    Form(chunk=32, block=32, anchor="middle"),
    Form(chunk=64, block=1, exponential="2"),
)


def problem(regime: str, contract: str, **fields: object) -> Problem:
    shape = {"lengths": (70, 0, 1, 33), "heads": 2, "value_heads": 4, "K": 24, "V": 20, "initial_state": True}
    workload = Workload("w", "g", contract=contract, regime=regime, **{**shape, **fields})  # type: ignore[arg-type]
    return activate(draw_inputs(workload, 0), contract, workload.scale, np.float64)


def apart(a: Problem, form: Form = PAIRWISE) -> float:
    """Largest difference of recurrence and chunk form, relative to the largest output."""
    one, two = recurrence(a), chunked(a, form)
    gaps = []
    for x, y in ((one.o, two.o), (one.final_state, two.final_state)):
        gaps.append(np.abs(x - y).max(initial=0) / max(np.abs(x).max(initial=0), 1e-30))
    return float(max(gaps))


def plain_definition(p: Problem) -> tuple[np.ndarray, np.ndarray]:
    """The formulas of the package's docstring, one head and token at a time, states K-first."""
    o, N, HV = np.zeros(p.v.shape), len(p.cu_seqlens) - 1, p.v.shape[1]
    states = np.zeros((N, HV, p.k.shape[2], p.v.shape[2]))
    for n in range(N):
        for hv in range(HV):
            h = hv // (HV // p.q.shape[1])
            S = states[n, hv] if p.initial_state is None else p.initial_state[n, hv].T.copy()
            for t in range(p.cu_seqlens[n], p.cu_seqlens[n + 1]):
                S = np.diag(np.exp(p.g[t, hv])) @ S
                u = p.beta[t, hv] * (p.v[t, hv] - S.T @ p.k[t, h])
                S = S + np.outer(p.k[t, h], u)
                o[t, hv] = p.scale * S.T @ p.q[t, h]
            states[n, hv] = S
    return o, states


@pytest.mark.parametrize("state", [True, False])
def test_recurrence_is_the_definition(state: bool) -> None:
    p = problem("mixed", "plain", lengths=(5, 0, 3), K=6, V=4, initial_state=state)
    o, states = plain_definition(p)
    result = recurrence(p)
    np.testing.assert_allclose(result.o, o, rtol=0, atol=1e-14)
    np.testing.assert_allclose(swap_state_layout(result.final_state), states, rtol=0, atol=1e-14)


@pytest.mark.parametrize("contract", ["plain", "production"])
@pytest.mark.parametrize("regime", REGIMES)
def test_forms_agree_in_every_regime(regime: str, contract: str) -> None:
    p = problem(regime, contract)
    assert max(apart(p, form) for form in (PAIRWISE, *FORMS)) < 1e-10


@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), (128, 64)])
def test_forms_agree_at_head_dims(dims: tuple[int, int]) -> None:
    assert apart(problem("mixed", "plain", K=dims[0], V=dims[1])) < 1e-10


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), max_size=4),
    heads=st.integers(1, 3),
    group=st.integers(1, 3),
    K=st.integers(1, 9),
    V=st.integers(1, 9),
    chunk=st.integers(1, 20),
    regime=st.sampled_from(sorted(REGIMES)),
    state=st.booleans(),
)
def test_forms_agree_on_any_shape(
    lengths: list[int], heads: int, group: int, K: int, V: int, chunk: int, regime: str, state: bool
) -> None:
    shape = {"lengths": tuple(lengths), "heads": heads, "value_heads": heads * group, "K": K, "V": V}
    p = problem(regime, "plain", **shape, initial_state=state)
    assert apart(p, Form(chunk=chunk, block=1)) < 1e-10


def test_pairwise_form_takes_any_gate() -> None:
    p = problem("strong", "plain")
    p = replace(p, g=p.g * 500)  # a released checkpoint has gates down to -2661 a token
    assert apart(p, PAIRWISE) < 1e-10


def test_production_contract_is_the_plain_one_after_activation() -> None:
    workload = Workload("w", "g", (9,), K=8, V=8, contract="production", regime="strong")
    x = draw_inputs(workload, 1)
    p = activate(x, "production", 1.0, np.float64)
    q, g, beta = (np.asarray(x[name], np.float64) for name in ("q", "g", "beta"))
    rate, bias = np.exp(np.asarray(x["A_log"], np.float64)), np.asarray(x["dt_bias"], np.float64)
    np.testing.assert_allclose(p.q, q / np.sqrt((q**2).sum(-1, keepdims=True) + 1e-6), rtol=1e-12)
    np.testing.assert_allclose(p.g, -5 / (1 + np.exp(-rate[:, None] * (g + bias))), rtol=1e-12)
    np.testing.assert_allclose(p.beta, 1 / (1 + np.exp(-beta)), rtol=1e-12)


def test_rows_after_the_last_sequence_are_not_read() -> None:
    workload = Workload("w", "g", (5, 3), K=8, V=8, slack=4)
    inputs = draw_inputs(workload, 0)
    assert np.isnan(np.asarray(inputs["v"])[8:]).all()
    p = activate(inputs, "plain", 1.0, np.float64)
    for result in (recurrence(p), chunked(p)):
        assert np.isfinite(result.o).all()
        assert np.isfinite(result.final_state).all()


@pytest.mark.parametrize("contract", ["plain", "production"])
@pytest.mark.parametrize("state", [True, False])
def test_torch_serves_as_well_as_numpy(contract: str, state: bool) -> None:
    torch = pytest.importorskip("torch")
    workload = Workload("w", "g", (40, 0, 3), 1, 2, 16, 12, contract=contract, initial_state=state)
    inputs = draw_inputs(workload, 0)
    tensors = {name: None if x is None else torch.from_numpy(x) for name, x in inputs.items()}
    p = activate(inputs, contract, workload.scale, np.float64)
    t = activate(tensors, contract, workload.scale, torch.float64, torch)
    truth = recurrence(p)
    low = Form(chunk=16, block=16, operands="bfloat16")
    for found, expected in (
        (recurrence(t, torch), truth),
        (chunked(t, Form(), torch), truth),
        (chunked(t, low, torch), chunked(p, low)),
    ):
        np.testing.assert_allclose(found.o.numpy(), expected.o, rtol=0, atol=1e-12)
        np.testing.assert_allclose(found.final_state.numpy(), expected.final_state, rtol=0, atol=1e-12)


def test_operands_are_rounded_as_said() -> None:
    p = problem("weak", "plain")
    single = replace(p, **{n: getattr(p, n).astype(np.float32) for n in ("q", "k", "v", "g", "beta")})
    single = replace(single, initial_state=p.initial_state.astype(np.float32))  # type: ignore[union-attr]
    truth = recurrence(p).o
    errors = {
        kind: np.abs(chunked(single, Form(operands=kind)).o - truth).max()
        for kind in ("full", "tfloat32", "bfloat16")
    }
    assert errors["full"] * 100 < errors["tfloat32"] < errors["bfloat16"] / 2
