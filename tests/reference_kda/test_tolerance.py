"""The derived bound lets honest arithmetic through and nothing else."""

import numpy as np
import pytest

from evotune.reference_kda import KDA, REGIMES, KdaCase, Workload, solve
from evotune.reference_kda.tolerance import by_value, honest_results
from evotune.reference_kda.workload import draw_inputs
from evotune.search_space.template import Specialization
from tests.reference_kda.kernels import (
    HONEST_BFLOAT16,
    HONEST_FLOAT32,
    MUTANTS,
    ChunkLoop,
    TokenLoop,
    answer,
    ratio,
)

HONEST = {"float32": HONEST_FLOAT32, "bfloat16": HONEST_BFLOAT16}


def case(regime: str, dtype: str, contract: str = "plain", seed: int = 0) -> KdaCase:
    """Ragged, grouped heads, asymmetric states, more than two chunks."""
    w = Workload("w", "g", (37, 0, 1, 50), 2, 4, 64, 64, dtype, contract, regime, True, True)
    return solve(w, seed)


@pytest.mark.parametrize("dtype", HONEST)
@pytest.mark.parametrize("contract", ["plain", "production"])
@pytest.mark.parametrize("regime", REGIMES)
def test_honest_kernels_are_inside(regime: str, contract: str, dtype: str) -> None:
    solved = case(regime, dtype, contract)
    ratios = {name: ratio(kernel, solved) for name, kernel in HONEST[dtype].items()}
    assert max(ratios.values()) <= 1, ratios


@pytest.mark.parametrize("dtype", HONEST)
@pytest.mark.parametrize("length", [1, 2, 17])
def test_honest_kernels_are_inside_on_few_tokens(length: int, dtype: str) -> None:
    """Where an error is one random number, bounds are at their shakiest."""
    for seed, regime in enumerate(REGIMES):
        solved = solve(Workload("w", "g", (length,), K=64, V=64, dtype=dtype, regime=regime), seed)
        ratios = {name: ratio(kernel, solved) for name, kernel in HONEST[dtype].items()}
        assert max(ratios.values()) <= 1, (regime, ratios)


def test_equal_operands_are_perturbed_alike() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal(20_000)
    x[1::2] = x[::2]
    found = by_value(x, rng)
    assert np.array_equal(found[1::2], found[::2])
    assert abs(found[::2].mean()) < 0.03
    assert found[::2].var() == pytest.approx(1 / 3, rel=0.05)
    assert np.abs(np.corrcoef(found[::2], x[::2])[0, 1]) < 0.05
    assert not np.array_equal(by_value(x, rng), found)


@pytest.mark.parametrize("seed", range(4))
def test_constant_inputs_have_errors_that_no_sum_averages_away(seed: int) -> None:
    """All channels and late tokens are equal, and so are their errors: one random number for all of them."""
    w = Workload("w", "g", (200, 57), 1, 2, 64, 64, regime="ones", initial_state=True)
    solved = solve(w, seed)
    late = slice(10 * 16, 12 * 16)
    size = np.sqrt((solved.truth.o[late] ** 2).mean())
    assert np.all(solved.bound.o_rms[10:12] > 8 * 2**-24 * size)
    ratios = {name: ratio(kernel, solved) for name, kernel in HONEST_FLOAT32.items()}
    assert max(ratios.values()) <= 0.6, ratios


@pytest.mark.parametrize("dtype", HONEST)
def test_a_token_alone_has_as_many_witnesses_in_a_long_pack(dtype: str) -> None:
    def members(*lengths: int) -> int:
        w = Workload("w", "g", lengths, K=64, V=64, dtype=dtype)
        return len(honest_results(draw_inputs(w, 0), w.contract, dtype, w.scale, 0))

    assert members(1, 600) == members(1) > members(601)


@pytest.fixture(scope="module")
def telling() -> dict[str, list[KdaCase]]:
    return {d: [case(r, d) for r in ("mixed", "strong", "alternating", "correlated_keys")] for d in HONEST}


@pytest.mark.parametrize("dtype", HONEST)
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_outside(name: str, dtype: str, telling: dict[str, list[KdaCase]]) -> None:
    worst = max(ratio(MUTANTS[name], solved) for solved in telling[dtype])
    assert worst > (1000 if dtype == "float32" else 3)


@pytest.mark.parametrize("dtype", HONEST)
@pytest.mark.parametrize("order", [1, 3])
def test_truncated_inverse_shows_on_repeated_keys(order: int, dtype: str) -> None:
    assert ratio(ChunkLoop(neumann=order), case("identical_keys", dtype)) > 100


def test_truncated_inverse_hides_on_random_keys() -> None:
    """Why the gate has regimes: at bfloat16 a third-order series passes where keys are random."""
    assert ratio(ChunkLoop(neumann=3), case("strong", "bfloat16")) <= 1


@pytest.mark.parametrize("regime", ["zero", "mixed", "strong"])
def test_bfloat16_state_is_outside_under_float32_io(regime: str) -> None:
    assert ratio(TokenLoop(state_dtype="bfloat16"), case(regime, "float32")) > 500


def test_bound_is_near_what_honest_arithmetic_costs() -> None:
    """A bound that everything passes says nothing: it stays within a few units of roundoff of the output."""
    for dtype, most in (("float32", 64 * 2**-24), ("bfloat16", 16 * 2**-9)):
        solved = case("mixed", dtype)
        size = np.sqrt((solved.truth.o[:16] ** 2).mean(axis=(0, 2)))
        assert (solved.bound.o_rms[0] / size).max() < most


@pytest.mark.parametrize("spoil", [np.nan, np.inf, -np.inf, 3e38])
@pytest.mark.parametrize("name", ["o", "final_state"])
def test_what_is_not_finite_or_huge_is_outside(name: str, spoil: float) -> None:
    solved = case("mixed", "float32")
    outputs = answer(TokenLoop(), solved)
    outputs[name][-1, -1, -1] = spoil
    found = solved.worst(outputs)
    assert found.ratio > 1e6
    assert (found.ratio == np.inf) == (not np.isfinite(spoil))
    assert found.detail.startswith(name)


def test_discrepancy_names_the_place() -> None:
    solved = case("mixed", "float32")
    outputs = answer(TokenLoop(), solved)
    outputs["o"][37 + 1 + 35, 2, 5] += 1  # sequence 3, token 35
    assert solved.worst(outputs).detail.startswith(
        "o, sequence 3, value head 2, chunk 2 (tokens 32 to 47): largest"
    )
    outputs = answer(TokenLoop(), solved)
    outputs["final_state"][2, 1, 33] += 1
    assert solved.worst(outputs).detail.startswith(
        "final_state, sequence 2, value head 1, V rows 32 to 47: largest"
    )


def test_exact_zeros_are_in_bound() -> None:
    """Nothing in, nothing out: the bound of an all-zero output is the absolute floor, and zero passes."""
    w = Workload("w", "g", (20,), K=64, V=64, regime="beta_zero")
    solved = solve(w, 0)
    assert (solved.truth.o == 0).all()
    outputs = answer(TokenLoop(), solved)
    assert solved.worst(outputs).ratio == 0
    outputs["o"][3] = 1e-20
    assert solved.worst(outputs).ratio > 1


@pytest.mark.parametrize("dtype", HONEST)
@pytest.mark.parametrize("contract", ["plain", "production"])
def test_honest_kernel_passes_the_whole_screen(contract: str, dtype: str) -> None:
    spec = Specialization("kda", dtype, (("K", 64), ("V", 64), ("contract", contract)))
    rng = np.random.default_rng(0)
    for entry in KDA.gate_cases(spec, "screen"):
        solved = KDA.solve(entry.workload, 1).fresh(rng)
        found = solved.worst(answer(ChunkLoop(), solved))
        assert found.ratio <= 1, (entry.name, found.detail)
