"""What a judge process on a GPU reports is data about a hostile process."""

import json
from collections import deque
from typing import Any

import numpy as np
import pytest

from evotune.fitness import _cuda_child as child
from evotune.fitness.arena import lay_out
from evotune.fitness.cuda_runner import CudaProcess, Prepared, in_trouble
from evotune.fitness.operator import specialization
from evotune.fitness.outcome import Failure
from evotune.fitness.runner import Fault, Worker
from evotune.fitness.turns import Usage
from evotune.reference_kda.operator import KdaOperator
from evotune.reference_kda.workload import Workload

OPERATOR = KdaOperator()
WORKLOAD = Workload("few", "few", (3, 2), 1, 2, K=64, V=64)
SIGNATURE = OPERATOR.device_signature(specialization(OPERATOR, WORKLOAD))
PLACEMENT = lay_out(SIGNATURE, OPERATOR.solve(WORKLOAD, 0), workspace_bytes=256, flush="start")
DIGESTS = [b.name for b in PLACEMENT.buffers if b.role == "input"]
REPEAT = 4


class Forger(CudaProcess):
    """A process that answers every request with the next of some reports, nothing behind it."""

    def __init__(self, *reports: bytes) -> None:
        Worker.__init__(self, 1 << 20)
        self._usage, self._apart, self._waited_s = Usage(), False, 0.0
        self._mirrored = child.MIRROR_BYTES
        self._signatures = [SIGNATURE]
        self._reports = deque(reports)

    def said(self, report: bytes) -> int:
        self.arena.write(self.arena.size - child.REPORT_BYTES, np.frombuffer(report, np.uint8))
        return len(report)

    def _answered(self, operation: int, data: bytes, timeout_s: float) -> int:
        return self.said(self._reports.popleft())


@pytest.mark.parametrize(
    "report",
    [
        b'{"ns": 1%s}' % (b"0" * 400),  # beyond every float
        b'{"ns": 1%s}' % (b"0" * 5000),  # beyond what Python reads as an integer
        b'{"ns": NaN}',
        b'{"ns": -Infinity}',
        b'{"ns": "1"}',
        b'{"ns": %s}' % (b"[" * 200 + b"]" * 200),
        b"{}",
        b"[1]",
        b"\xff",
        b"[" * 60_000,
        b'{"ns":' * 10_000,
    ],
    ids=lambda report: report[:12].decode(errors="replace"),
)
def test_a_report_that_is_none_is_forged(report: bytes) -> None:
    assert len(report) <= child.REPORT_BYTES
    forger = Forger(b"{}", report)
    with pytest.raises(Fault) as told:
        forger.call(0, PLACEMENT, 1.0)
    assert told.value.failure is Failure.FORGED
    assert len(told.value.detail) < 300
    assert not forger.alive


@pytest.mark.parametrize("us", [[2**64, 1.0], [0.0, 0.0], [-1.0, 1.0], [1e-320, 1.0], [1.0], None, "ab"])
def test_times_that_no_calls_take_are_forged(us: object) -> None:
    with pytest.raises(Fault) as told:
        Forger(json.dumps({"us": us}).encode()).sample(0, ["graph", "plain"], 0.0, 1.0)
    assert told.value.failure is Failure.FORGED


@pytest.mark.parametrize("ns", [0, -1e9])
def test_a_call_costs_the_host_something(ns: float) -> None:
    with pytest.raises(Fault, match="for a call") as told:
        Forger(json.dumps({"ns": ns}).encode()).host_cost_us(0, PLACEMENT, REPEAT)
    assert told.value.failure is Failure.FORGED


@pytest.mark.parametrize(
    "said",
    [DIGESTS[:-1], [], [*DIGESTS, "one more"], [*DIGESTS[:-1], 1], [*DIGESTS[:-1], [[]]], "digests", None],
    ids=["a prefix", "none", "one more", "a number", "a list", "a word", "null"],
)
def test_digests_that_are_none_are_forged(said: Any) -> None:
    prepared = Prepared(PLACEMENT, {0: DIGESTS})
    with pytest.raises(Fault, match="answered with digests") as told:
        Forger(json.dumps({"digests": said}).encode(), b"{}").look(0, prepared, {})
    assert told.value.failure is Failure.FORGED
    with pytest.raises(Fault, match="answered with digests") as told:
        Forger(json.dumps({"digests": [said]}).encode()).succeed(0, prepared)
    assert told.value.failure is Failure.FORGED


def test_a_digest_that_differs_names_its_input() -> None:
    changed = [*DIGESTS[:1], "other", *DIGESTS[2:]]
    breach, _ = Forger(json.dumps({"digests": changed}).encode(), b"{}").look(
        0, Prepared(PLACEMENT, {0: DIGESTS}), {}
    )
    assert breach == f"input {DIGESTS[1]} was changed"


def test_an_error_is_the_candidates_word() -> None:
    """It can say that the device is in trouble; who believes that is for the judge to find out."""
    forger = Forger()
    fault = forger._refusal(
        child.RAISED, forger.said(b'{"error": "RuntimeError: CUDA error: out of memory"}')
    )
    assert fault.failure is Failure.FAULT
    assert in_trouble(fault.detail)
    fault = forger._refusal(child.RAISED, forger.said(b'{"error": [[[1]]]}'))
    assert fault.failure is Failure.FORGED
