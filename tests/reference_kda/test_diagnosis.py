"""The first wrong place is named, and the stage that made it."""

import numpy as np
import pytest

from evotune.reference_kda import KdaCase, Workload, activate, solve
from evotune.reference_kda.chunked import Form
from evotune.reference_kda.diagnosis import (
    STAGES,
    _intermediates,
    diagnose,
    first_departure,
    first_stage,
    intermediates,
)
from tests.reference_kda.kernels import MUTANTS, ChunkLoop, TokenLoop, answer


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def case(request: pytest.FixtureRequest) -> KdaCase:
    w = Workload("w", "g", (50, 0, 37), 1, 2, 64, 64, request.param, "plain", "mixed", initial_state=True)
    return solve(w, 0)


def honest(case: KdaCase, chunk: int = 16) -> dict[str, np.ndarray]:
    """As a debug build would write them: float32."""
    p = activate(case.inputs, case.workload.contract, case.workload.scale, np.float32)
    found = _intermediates(p, Form(chunk=chunk, block=min(chunk, 16), exponential="2"))
    return {name: x.astype(np.float32) for name, x in found.items()}


def test_honest_kernel_departs_nowhere(case: KdaCase) -> None:
    found = diagnose(case, answer(TokenLoop(), case), honest(case))
    assert (found.output, found.growth, found.stage) == (None, (), None)
    assert found.text == "all outputs are inside their bounds"


def test_first_wrong_token_is_named(case: KdaCase) -> None:
    outputs = answer(TokenLoop(), case)
    outputs["o"][50 + 20, 1] += np.asarray(1, outputs["o"].dtype)  # sequence 2, token 20
    outputs["o"][45, 0] += np.asarray(1, outputs["o"].dtype)  # sequence 0, chunk 2: later in time
    found = first_departure(case, outputs)
    assert found is not None
    assert (found.what, found.sequence, found.head, found.chunk, found.token) == ("o", 2, 1, 1, 20)
    assert found.text.startswith("o first departs at sequence 2, value head 1, chunk 1, token 20: error ")


def test_final_state_alone(case: KdaCase) -> None:
    found = diagnose(case, answer(MUTANTS["final state transposed"], case))
    assert found.output is not None
    assert found.output.what == "final_state"
    assert found.trend == "is in the final state alone"


def test_lost_inter_chunk_term_shows_at_once_with_a_state(case: KdaCase) -> None:
    found = diagnose(case, answer(ChunkLoop(drops_inter=True), case))
    assert found.output is not None
    assert (found.output.chunk, found.output.token) == (0, 0)
    assert len(found.growth) == 4


def test_nan_is_reported_as_such(case: KdaCase) -> None:
    found = diagnose(case, answer(MUTANTS["one NaN"], case))
    assert found.output is not None
    assert "not finite" in found.output.text
    assert found.trend == "turns non-finite"


@pytest.mark.parametrize("stage", STAGES)
def test_first_wrong_stage_is_named(stage: str, case: KdaCase) -> None:
    """The mistake is planted in the second chunk of sequence 0; all later stages and chunks carry it."""
    given = honest(case)
    for later in STAGES[STAGES.index(stage) :]:
        at = slice(1, 4) if later == "state" else slice(20, 50)
        given[later][at] *= np.float32(1.5)
    found = first_stage(case, given)
    assert found is not None
    assert (found.what, found.sequence, found.chunk) == (stage, 0, 1)
    assert found.token == (None if stage == "state" else 20)


def test_stages_may_be_missing(case: KdaCase) -> None:
    given = {"u": honest(case)["u"] * np.float32(2)}
    found = first_stage(case, given)
    assert found is not None
    assert (found.what, found.token) == ("u", 0)


@pytest.mark.parametrize("chunk", [8, 64])
def test_other_chunk_lengths(chunk: int, case: KdaCase) -> None:
    truth = intermediates(case, chunk)
    assert truth["state"].shape == (87 // chunk + 3, 2, 64, 64)
    last = (50 + 36 // chunk * chunk) // chunk + 2
    np.testing.assert_allclose(truth["state"][last], case.truth.final_state[2], rtol=0, atol=1e-12)
    assert first_stage(case, honest(case, chunk), chunk) is None
