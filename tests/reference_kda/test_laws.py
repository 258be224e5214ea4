"""Each law holds for honest kernels and is broken by the mistake it is there for."""

from collections.abc import Mapping

import numpy as np
import pytest

from evotune.reference_kda import KDA, Question
from evotune.reference_kda.laws import laws_of
from evotune.reference_kda.namespace import Array
from evotune.reference_kda.operator import _base
from evotune.search_space.template import Specialization
from tests.reference_kda.kernels import (
    HONEST_BFLOAT16,
    HONEST_FLOAT32,
    MUTANTS,
    ChunkLoop,
    Kernel,
    TokenLoop,
    answer,
)

SPECS = {
    (dtype, contract): Specialization("kda", dtype, (("K", 64), ("V", 64), ("contract", contract)))
    for dtype in ("float32", "bfloat16")
    for contract in ("plain", "production")
}
LAWS = {law.name: i for i, law in enumerate(KDA.laws(SPECS["float32", "plain"], "screen"))}
SPLIT, LINEARITY, HEADS, CAUSALITY, DECAY = LAWS


def ratios(law: str, kernel: Kernel, spec: Specialization, times: int = 6) -> list[float]:
    rng = np.random.default_rng(7)
    found = KDA.laws(spec, "screen")[LAWS[law]]
    return [found.check(lambda q: answer(kernel, q), rng).ratio for _ in range(times)]


@pytest.mark.parametrize("key", SPECS, ids="-".join)
@pytest.mark.parametrize("law", LAWS)
def test_law_holds_for_honest_kernels(law: str, key: tuple[str, str]) -> None:
    honest = HONEST_FLOAT32 if key[0] == "float32" else HONEST_BFLOAT16
    for name, kernel in honest.items():
        assert max(ratios(law, kernel, SPECS[key], 3)) <= 1, name


@pytest.mark.parametrize(
    ("law", "mutant"),
    [
        (SPLIT, "initial state ignored"),
        (SPLIT, "final state one token early"),
        (SPLIT, "final state transposed"),
        (HEADS, "every head gated as the first"),
        (DECAY, "initial state ignored"),
        (DECAY, "gate of the token before"),
        (DECAY, "one NaN"),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_law_catches(law: str, mutant: str, dtype: str) -> None:
    assert max(ratios(law, MUTANTS[mutant], SPECS[dtype, "plain"])) > 3


def _clamped(question: Question) -> Mapping[str, Array]:
    """Not linear in v: values are clipped."""
    v = question.inputs["v"]
    assert v is not None
    clipped = Question(question.name, question.workload, {**question.inputs, "v": np.minimum(v, 0)})
    return answer(TokenLoop(), clipped)


def _looks_ahead(question: Question) -> Mapping[str, Array]:
    """Adds a little of the next row's output to every row."""
    outputs = answer(ChunkLoop(), question)
    outputs["o"][:-1] += outputs["o"][1:] * np.asarray(2**-3, outputs["o"].dtype)
    return outputs


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("law", "call"), [(LINEARITY, _clamped), (CAUSALITY, _looks_ahead)])
def test_law_catches_what_no_mutant_does(law: str, call: object, dtype: str) -> None:
    rng = np.random.default_rng(7)
    found = KDA.laws(SPECS[dtype, "plain"], "screen")[LAWS[law]]
    worst = max((found.check(call, rng) for _ in range(6)), key=lambda d: d.ratio)  # type: ignore[arg-type]
    assert worst.ratio > 3
    assert worst.detail.startswith(("o, token row", "final_state, sequence"))


def test_shapes_are_drawn_and_solved_once() -> None:
    first, *_ = laws_of(_base(SPECS["float32", "plain"]), "screen")
    rng, shapes, values = np.random.default_rng(0), set(), []

    def call(question: Question) -> Mapping[str, Array]:
        shapes.add((question.workload.lengths, question.workload.value_heads))
        values.append(float(np.sum(question.inputs["v"])))
        return answer(TokenLoop(), question)

    for _ in range(8):
        first.check(call, rng)
    assert len(first.bank._solved) == first.bank.shapes
    assert len(shapes) > 8
    assert len(set(values)) > 16
