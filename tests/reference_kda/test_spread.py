"""A spread problem is right: what its gathers give, solved whole, has the truth of its copies."""

from dataclasses import replace

import numpy as np
import pytest

from evotune.reference_kda.case import KdaCase, _float64, case_of
from evotune.reference_kda.namespace import DTYPES, Array
from evotune.reference_kda.operator import KDA
from evotune.reference_kda.spread import KdaSpread
from evotune.reference_kda.workload import Workload

GROUPED = Workload(
    "six heads",
    "few",
    lengths=(19, 0, 5),
    heads=6,
    value_heads=12,
    K=64,
    V=96,
    dtype="bfloat16",
    contract="production",
    initial_state=True,
)
ODD = Workload("three heads", "few", lengths=(7,), heads=3, value_heads=3, K=64, V=64, final_state=False)


def spread_of(workload: Workload) -> KdaSpread:
    pool = KDA.solve(KDA.pool(workload), 5)
    return KDA.spread(workload, pool, np.random.default_rng(6))


def gathered(spread: KdaSpread) -> dict[str, Array | None]:
    """All arguments, made as a device makes them."""
    inputs = dict(spread.sources)
    for name, gather in spread.gathers.items():
        source = spread.sources[name]
        assert source is not None
        rows = source.reshape(*source.shape[: gather.lead], -1)[..., gather.index]
        if gather.factor is not None:
            rows = rows * gather.factor.astype(rows.dtype)
        blank = spread.inputs[name]
        assert blank is not None
        assert rows.dtype == blank.dtype
        inputs[name] = rows.reshape(blank.shape)
    return inputs


@pytest.mark.parametrize("workload", [GROUPED, ODD], ids=lambda w: w.name)
def test_the_gathered_problem_has_the_truth_of_its_copies(workload: Workload) -> None:
    spread = spread_of(workload)
    whole: KdaCase = case_of(workload, gathered(spread), 0)
    for number in range(spread.copies):
        copy = spread.copy(number)
        for name, truth in (("o", whole.truth.o), ("final_state", whole.truth.final_state)):
            axis, begin, end = spread.place(number).get(name, (1, 0, 0))
            if end:
                part = truth.take(range(begin, end), axis=axis)
                np.testing.assert_allclose(part, getattr(copy.truth, name), rtol=0, atol=1e-9)


def test_two_draws_differ_everywhere() -> None:
    workload = replace(GROUPED, lengths=(40,))
    pool = KDA.solve(KDA.pool(workload), 5)
    rng = np.random.default_rng(7)
    first, second = (gathered(KDA.spread(workload, pool, rng)) for _ in range(2))
    for name in ("q", "v", "g", "initial_state"):
        one, two = first[name], second[name]
        assert one is not None
        assert two is not None
        assert (one != two).mean() > 0.5, name


def test_outputs_that_are_not_wanted_have_no_place() -> None:
    assert set(spread_of(ODD).place(0)) == {"o"}
    assert set(spread_of(GROUPED).place(0)) == {"o", "final_state"}


def test_outputs_are_compared_without_a_copys_inputs() -> None:
    spread = spread_of(GROUPED)
    rng = np.random.default_rng(7)
    for number in range(spread.copies):
        copy = spread.copy(number)
        outputs = {
            "o": (copy.truth.o + rng.normal(0, 1e-2, copy.truth.o.shape)).astype(DTYPES["bfloat16"]),
            "final_state": copy.truth.final_state.astype(np.float32),
        }
        found, wanted = spread.worst(number, outputs), copy.worst(outputs)
        assert (found.ratio, found.detail) == (wanted.ratio, wanted.detail)
        assert found.ratio > 0
    outputs["o"][3, 1, 2] = np.nan
    assert spread.worst(number, outputs).ratio == np.inf


def test_every_bf16_number_is_widened_exactly() -> None:
    every = np.arange(1 << 16, dtype=np.uint16).view(DTYPES["bfloat16"])
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(_float64(every[::-1]), every[::-1].astype(np.float64))
