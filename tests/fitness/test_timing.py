"""Timing blocks: interleaved, fresh, checked, and not to be fooled by a clock."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import numpy as np
import pytest

from evotune.fitness.gate import CaseBook, Session
from evotune.fitness.outcome import Failed, Failure, Stage
from evotune.fitness.runner import Runner
from evotune.fitness.timing import BaselineFault, Target, Timed, Timer, TimingPlan
from tests.fitness.compiled import WORKLOAD, Bench
from tests.rmsnorm import RMS_OPERATOR, SOURCE, RmsOperator, RmsWorkload

PLAN = TimingPlan(samples=6)
_HEAD = "float *factors = workspace;"
_TWICE = SOURCE.replace(_HEAD, f"{_HEAD} for (volatile int i = 0; i < 300000; i++) {{}}")
_LARGE = RmsWorkload(rows=300, D=64, group="large")


def timer(plan: TimingPlan = PLAN, operator: RmsOperator = RMS_OPERATOR) -> Timer:
    targets = [Target(WORKLOAD, 0), Target(_LARGE, 0)]
    return Timer(operator, CaseBook(operator), targets, plan, nullcontext)


def time_source(bench: Bench, source: str, timer: Timer) -> Timed | Failed:
    with bench.session(source) as candidate, bench.session(SOURCE) as baseline:
        return timer.time(candidate, baseline)


def test_samples_are_kept_and_a_slow_kernel_is_slow(bench: Bench) -> None:
    timed = time_source(bench, _TWICE, timer())
    assert isinstance(timed, Timed)
    assert [m.workload for m in timed.measurements] == [WORKLOAD.name, _LARGE.name]
    assert [m.group for m in timed.measurements] == ["rows", "large"]
    for measurement in timed.measurements:
        assert len(measurement.samples_us) == len(measurement.baseline_samples_us) == PLAN.samples
        assert measurement.speedup < 0.5
    assert 0 < timed.worst_error <= 1
    assert timed.host_call_us > 0


def test_a_candidate_may_be_timed_again_in_the_same_session(bench: Bench) -> None:
    with bench.session(SOURCE) as candidate, bench.session(SOURCE) as baseline:
        assert isinstance(timer().time(candidate, baseline), Timed)
        assert isinstance(timer().time(candidate, baseline), Timed)


@dataclass
class _Recorder:
    """Notes which runner was asked what, in order."""

    order: list[int]

    def watch(self, session: Session[Runner], name: int, monkeypatch: pytest.MonkeyPatch) -> None:
        runner, original = session.runner, session.runner.call

        def call(index, placement, timeout_s, *, repeat=1):  # type: ignore[no-untyped-def]
            self.order.append(name)
            return original(index, placement, timeout_s, repeat=repeat)

        monkeypatch.setattr(runner, "call", call)


def test_calls_alternate_in_balanced_order(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = _Recorder([])
    with bench.session(SOURCE) as candidate, bench.session(SOURCE) as baseline:
        recorder.watch(candidate, 1, monkeypatch)
        recorder.watch(baseline, 0, monkeypatch)
        one = replace(timer(replace(PLAN, samples=20)), targets=[Target(WORKLOAD, 0)])
        assert isinstance(one.time(candidate, baseline), Timed)
    pairs = np.array(recorder.order[4 : 4 + 40]).reshape(20, 2)  # after two warm-ups of each
    assert (pairs.sum(axis=1) == 1).all()
    assert pairs[:, 0].sum() == 10
    assert len(set(map(tuple, pairs.tolist()))) == 2


def test_quiet_holds_while_kernels_run_and_not_while_inputs_are_drawn(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    @contextmanager
    def quiet() -> Iterator[None]:
        events.append("quiet")
        yield
        events.append("loud")

    with bench.session(SOURCE) as candidate, bench.session(SOURCE) as baseline:
        place = candidate.place

        def noting(index, case, **kwargs):  # type: ignore[no-untyped-def]
            events.append("place")
            return place(index, case, **kwargs)

        monkeypatch.setattr(candidate, "place", noting)
        _Watched(events).watch(candidate.runner, monkeypatch)
        assert isinstance(replace(timer(), quiet=quiet).time(candidate, baseline), Timed)
    inside = events[events.index("quiet") : events.index("loud")]
    assert "call" in inside
    assert "call" not in events[: events.index("quiet")]
    assert inside.count("place") == 1  # the empty problem


@dataclass(frozen=True)
class _Watched:
    events: list[str]

    def watch(self, runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
        original = runner.call

        def call(index, placement, timeout_s, *, repeat=1):  # type: ignore[no-untyped-def]
            self.events.append("call")
            return original(index, placement, timeout_s, repeat=repeat)

        monkeypatch.setattr(runner, "call", call)


def test_wrong_only_when_timed_is_still_wrong(bench: Bench) -> None:
    """Right on every size but the timed one."""
    source = SOURCE.replace("factors[r]);", f"rows == {WORKLOAD.rows} ? 1 : factors[r]);")
    failed = time_source(bench, source, timer())
    assert isinstance(failed, Failed)
    assert (failed.stage, failed.failure, failed.case) == (Stage.TIME, Failure.WRONG, WORKLOAD.name)


@pytest.mark.parametrize("statement", ["y[rows * D] = 1;", "((float *)x)[0] = 1;"])
def test_a_breach_while_timed_is_wrong(bench: Bench, statement: str) -> None:
    source = SOURCE.replace(_HEAD, f"{_HEAD} if (rows == 300) {statement}")
    failed = time_source(bench, source, timer())
    assert isinstance(failed, Failed)
    assert (failed.stage, failed.failure, failed.case) == (Stage.TIME, Failure.WRONG, _LARGE.name)


def test_replayed_outputs_are_wrong(bench: Bench) -> None:
    source = SOURCE.replace(
        "EXPORT int64_t rmsnorm_workspace",
        "static float kept[1 << 16]; static int64_t kept_rows;\nEXPORT int64_t rmsnorm_workspace",
        1,
    ).replace(
        _HEAD,
        f"{_HEAD} int64_t total = rows == kept_rows ? rows * D : 0; kept_rows = rows;"
        "for (int64_t i = 0; i < total; i++) y[i] = kept[i]; if (total) return;",
    )
    row = "scale_row(x + r * D, weight, y + r * D, factors[r]);"
    source = source.replace(row, f"{row} for (int64_t d = 0; d < D; d++) kept[r * D + d] = y[r * D + d];")
    failed = time_source(bench, source, timer())
    assert isinstance(failed, Failed)
    assert failed.failure is Failure.WRONG


def test_a_fault_or_a_crawl_while_timed(bench: Bench) -> None:
    trap = time_source(bench, SOURCE.replace(_HEAD, f"{_HEAD} if (rows == 300) __builtin_trap();"), timer())
    assert isinstance(trap, Failed)
    assert (trap.stage, trap.failure) == (Stage.TIME, Failure.FAULT)
    crawl = SOURCE.replace(_HEAD, f"{_HEAD} for (volatile long i = 0; i < 400000000L; i++) {{}}")
    slow = time_source(bench, crawl, timer())
    assert isinstance(slow, Failed)
    assert (slow.stage, slow.failure) == (Stage.TIME, Failure.TIMEOUT)


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="system call numbers of x86_64")
def test_a_clock_that_leaves_out_the_work_is_forged(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runner says 5 us less than nothing was done; the parent waited a millisecond."""
    with bench.session(_TWICE) as candidate, bench.session(SOURCE) as baseline:
        original = candidate.runner.call

        def call(index, placement, timeout_s, *, repeat=1):  # type: ignore[no-untyped-def]
            return replace(original(index, placement, timeout_s, repeat=repeat), inside_ns=5000)

        monkeypatch.setattr(candidate.runner, "call", call)
        failed = timer().time(candidate, baseline)
    assert isinstance(failed, Failed)
    assert (failed.stage, failed.failure) == (Stage.TIME, Failure.FORGED)
    assert "its clock leaves out" in failed.detail


def test_below_the_physical_floor_is_quarantined(bench: Bench) -> None:
    @dataclass(frozen=True)
    class Heavy(RmsOperator):
        def floor_us(self, workload: RmsWorkload, bytes_per_us: float) -> float:
            return 1e6

    failed = time_source(bench, SOURCE, timer(operator=Heavy()))
    assert isinstance(failed, Failed)
    assert (failed.stage, failed.failure) == (Stage.TIME, Failure.FORGED)
    assert "below the" in failed.detail


def test_the_baselines_fault_is_not_the_candidates(bench: Bench) -> None:
    broken = SOURCE.replace(_HEAD, f"{_HEAD} __builtin_trap();")
    with (
        bench.session(SOURCE) as candidate,
        bench.session(broken) as baseline,
        pytest.raises(BaselineFault, match="SIGILL"),
    ):
        timer().time(candidate, baseline)


def test_all_timed_problems_differ(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bytes] = []
    with bench.session(SOURCE) as candidate, bench.session(SOURCE) as baseline:
        place = candidate.place

        def noting(index, case, **kwargs):  # type: ignore[no-untyped-def]
            seen.append(case.inputs["x"].tobytes())
            return place(index, case, **kwargs)

        monkeypatch.setattr(candidate, "place", noting)
        timer().time(candidate, baseline)
    timed: Sequence[bytes] = [data for data in seen if data]
    assert len(timed) == len(set(timed)) == 2 * (PLAN.samples + 1)
