"""How fast a study judged, and what never came to the device."""

from dataclasses import replace

import pytest

from evotune.fitness.outcome import Failed, Failure, Outcome, Passed, Stage
from evotune.history import History, fold
from evotune.records import Asked, BranchAdded, Judged, Record, StudyBegun
from evotune.throughput import line, throughput

PASSED = Passed("screen", 0.5, (), 10.0, (), {})
SLOW = Failed(Failure.WRONG, Stage.SMOKE, "wrong")
UNBUILT = Failed(Failure.BUILD_ERROR, Stage.BUILD, "no")
LARGE = Failed(Failure.OVER_BUDGET, Stage.INSPECT, "too large")


def history(*outcomes: Outcome, used: bool = True) -> History:
    """Candidates judged two seconds apart, the GPU at work for 1.5 s by events and 1.8 s by the driver."""
    records: list[Record] = [
        StudyBegun({"study": {"name": "s", "trials": 9}}, "", (), {}),
        BranchAdded(-1, "b00", "", None, "seed", ""),
    ]
    seconds = {"all_events": 1.5, "all_driver": 1.8} if used else {}
    for index, outcome in enumerate(outcomes):
        records.append(Asked(index, index, index, "b00", {}, "tune"))
        records.append(Judged(index, index, index, outcome, seconds, {}, elapsed_s=30.0 + 2 * index))
    return fold(records)


def test_rates_count_from_the_first_result() -> None:
    found = throughput(history(PASSED, PASSED, SLOW, UNBUILT, LARGE), legal_share=0.25)
    assert found["per_minute"] == pytest.approx(30.0)
    assert found["gpu_busy"] == {"events": pytest.approx(0.75), "driver": pytest.approx(0.9)}
    kept = found["kept_off"]
    assert (kept["illegal"], kept["build"], kept["inspect"]) == (0.75, 0.05, 0.05)
    assert kept["all"] == pytest.approx(0.85)
    assert line(found) == (
        "30 candidates judged a minute; GPU busy 75% by its own events, 90% by the driver; kept off the "
        "device 85% of proposals (illegal 75%, not built 5%, over budget or refused 5%)"
    )


def test_a_device_without_a_clock_tells_its_rate_alone() -> None:
    found = throughput(history(PASSED, PASSED, used=False))
    assert found["gpu_busy"] == {}
    assert line(found) == "30 candidates judged a minute"


def test_one_result_has_no_rate() -> None:
    assert line(throughput(history(PASSED))) == ""
    assert line(throughput(replace(history(), entries=()))) == ""
