"""When a GPU's times are believed, and who may use it."""

import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from evotune.fitness.arena import lay_out
from evotune.fitness.cuda_runner import Burst, arguments
from evotune.fitness.cuda_timing import Bands, Room, _order, _Side, _sizes, disagreement, floor_us
from evotune.fitness.operator import specialization
from evotune.reference_kda.operator import KdaOperator
from evotune.reference_kda.workload import Workload

BANDS = Bands()


def side(*bursts: tuple[tuple[float, ...], tuple[float, ...], float]) -> _Side:
    """Of bursts as (graphs, plain calls, what the parent waited beyond them)."""
    found = _Side(None, None, 1.0)  # type: ignore[arg-type]  # nothing is asked of a process
    for graph_us, plain_us, beyond_us in bursts:
        burst = Burst(graph_us, plain_us, 0.0)
        found.bursts.append(replace(burst, waited_us=burst.reported_us + beyond_us))
        found.beyond_us.append(beyond_us)
    return found


HONEST = side(((100.0, 101.0), (105.0,), 700.0), ((99.0, 100.0), (103.0,), 1200.0))


def test_honest_samples_are_believed_however_late_the_answers() -> None:
    late = side(((100.0, 101.0), (105.0,), 5700.0), ((99.0, 100.0), (103.0,), 690.0))
    assert disagreement(late, HONEST, 130.0, BANDS) is None


@pytest.mark.parametrize(
    ("mine", "told"),
    [
        (((20.0, 20.0), (104.0,), 700.0), "quarantined: 20.0 us as a graph, 104.0 us as a plain call"),
        (((200.0, 200.0), (100.0,), 700.0), "quarantined"),
        (((10.0, 10.0), (10.0,), 1500.0), "its clock leaves out 800 us of 3 calls"),
    ],
    ids=["shorter as a graph", "longer as a graph", "works outside the events"],
)
def test_a_clock_that_lies_is_not_believed(
    mine: tuple[tuple[float, ...], tuple[float, ...], float], told: str
) -> None:
    said = disagreement(side(mine, mine), HONEST, 10.0, BANDS)
    assert said is not None
    assert told in said


def test_a_kernel_that_is_slower_on_what_it_has_not_seen_is_not_believed() -> None:
    said = disagreement(HONEST, HONEST, 142.0, BANDS)
    assert said == "takes 142.0 us on values it has not seen, 100.0 us on those it has"
    assert disagreement(HONEST, HONEST, 20.0, BANDS) is None


@pytest.mark.parametrize(
    ("samples", "sizes"), [(1, [1]), (2, [1, 1]), (8, [4, 4]), (20, [7, 7, 6]), (160, [8] * 20)]
)
def test_samples_come_in_bursts(samples: int, sizes: list[int]) -> None:
    assert _sizes(samples) == sizes
    order = _order(sizes[0], np.random.default_rng(0))
    assert order.count("graph") == sizes[0]
    assert order.count("plain") == (sizes[0] + 1) // 2


def test_room_is_shared_and_the_largest_is_let_in_alone() -> None:
    room, inside, done = Room(100), threading.Event(), threading.Event()

    def small() -> None:
        with room.of(60):
            inside.set()
            done.wait(5)

    def large() -> None:
        with room.of(1000):
            late.append(done.is_set())

    late: list[bool] = []
    threads = [threading.Thread(target=small), threading.Thread(target=large)]
    threads[0].start()
    assert inside.wait(5)
    with room.of(40):
        pass
    threads[1].start()
    time.sleep(0.05)
    assert not late
    done.set()
    for thread in threads:
        thread.join()
    assert late == [True]


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
