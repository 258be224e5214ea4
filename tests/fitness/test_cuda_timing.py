"""When a GPU's times are believed."""

import pytest

from evotune.fitness.arena import lay_out
from evotune.fitness.cuda_runner import arguments
from evotune.fitness.cuda_timing import Bands, disagreement, floor_us
from evotune.fitness.operator import specialization
from evotune.reference_kda.operator import KdaOperator
from evotune.reference_kda.workload import Workload

BANDS = Bands()
HONEST = [(100.0, 105.0, 900.0), (101.0, 103.0, 1400.0), (99.0, 104.0, 880.0)]
Samples = list[tuple[float, float, float]]


def test_honest_samples_are_believed_however_late_the_answers() -> None:
    late: Samples = [(g, p, waited + 5000) for g, p, waited in HONEST[:2]] + HONEST[2:]
    assert disagreement(late, HONEST, BANDS) is None


@pytest.mark.parametrize(
    ("mine", "told"),
    [
        ([(20.0, 104.0, 900.0)] * 3, "quarantined: 20.0 us as a graph, 104.0 us as a plain call"),
        ([(200.0, 100.0, 900.0)] * 3, "quarantined"),
        ([(10.0, 10.0, 1500.0)] * 3, "its clock leaves out 803 us"),
    ],
    ids=["shorter as a graph", "longer as a graph", "works outside the events"],
)
def test_a_clock_that_lies_is_not_believed(mine: Samples, told: str) -> None:
    said = disagreement(mine, HONEST, BANDS)
    assert said is not None
    assert told in said


def test_the_floor_leaves_out_what_the_l2_holds() -> None:
    assert floor_us(1e6, 50_000_000, 4e6) == 0
    assert floor_us(1e9, 50_000_000, 4e6) == pytest.approx(0.95e9 / 4.8e6)


def test_arguments_are_as_a_gpu_entry_takes_them() -> None:
    """cu_seqlens is int32, states that a call does without are empty, gate parameters None."""
    operator = KdaOperator()
    workload = Workload("few", "few", (3, 2), 1, 2, K=64, V=96, final_state=False)
    signature = operator.device_signature(specialization(operator, workload))
    case = operator.solve(workload, 0)
    placement = lay_out(signature, case, workspace_bytes=256, flush="start")
    given = dict(zip([p.name for p in signature], arguments(signature, placement), strict=True))
    assert given["q"] == ["t", 4096, [5, 1, 64], "float32"]
    assert given["A_log"] == given["dt_bias"] == ["v", None]
    assert given["initial_state"] == given["final_state"] == ["e", [0, 2, 96, 64], "float32"]
    assert given["cu_seqlens"][2:] == [[3], "int32"]
    assert given["workspace"][2:] == [[256], "uint8"]
    assert given["T"] == ["v", 5]
    assert given["scale"] == ["v", workload.scale]
    starts = [b.start for b in placement.buffers]
    assert all(start % 4096 == 0 for start in starts)
    assert sum(b.size for b in placement.buffers if b.name == "cu_seqlens") == 12
