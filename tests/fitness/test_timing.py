"""Timing blocks: interleaved, fresh, checked, and not to be fooled by a clock."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import numpy as np
import pytest

from evotune.fitness.gate import CaseBook, Session
from evotune.fitness.outcome import Failed, Failure, Stage
from evotune.fitness.racing import Racing
from evotune.fitness.runner import Call, Runner
from evotune.fitness.timing import (
    BaselineFault,
    Target,
    Timed,
    Timer,
    TimingPlan,
    Waits,
    _Block,
    _Problems,
    _Sample,
)
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


def test_a_hopeless_kernel_is_stopped_early_and_keeps_its_estimate(bench: Bench) -> None:
    """On the workload that has a bar; the other one is timed in full."""
    raced = replace(timer(replace(PLAN, samples=20)), racing=Racing(0.05))
    with bench.session(_TWICE) as candidate, bench.session(SOURCE) as baseline:
        timed = raced.time(candidate, baseline, {WORKLOAD.name: 1.5})
    assert isinstance(timed, Timed)
    stopped, whole = timed.measurements
    assert 2 <= len(stopped.samples_us) == len(stopped.baseline_samples_us) < 20
    assert len(whole.samples_us) == 20
    assert stopped.speedup < 0.5
    assert timed.saved_s > 0
    with bench.session(SOURCE) as candidate, bench.session(SOURCE) as baseline:
        timed = raced.time(candidate, baseline, {WORKLOAD.name: 0.5})
    assert isinstance(timed, Timed)
    assert [len(m.samples_us) for m in timed.measurements] == [20, 20]
    assert timed.saved_s == 0


def watch(session: Session[Runner], event: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Tell of a session's "start", "call" and "end", when the process that served the calls makes room."""
    start = session.start

    def starting() -> Runner:
        event("start")
        runner = start()
        call, renew = runner.call, runner.renew

        def calling(index, placement, timeout_s, *, repeat=1):  # type: ignore[no-untyped-def]
            event("call")
            return call(index, placement, timeout_s, repeat=repeat)

        def renewing() -> None:
            event("end")
            renew()

        monkeypatch.setattr(runner, "call", calling)
        monkeypatch.setattr(runner, "renew", renewing)
        return runner

    monkeypatch.setattr(session, "start", starting)


def test_calls_alternate_in_balanced_order(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two calls to warm up, then the timed one; a kernel's process ends before the other's turn."""
    order: list[str] = []
    with bench.session(SOURCE) as candidate, bench.session(SOURCE) as baseline:
        watch(candidate, lambda event: order.append(f"my {event}"), monkeypatch)
        watch(baseline, lambda event: order.append(f"their {event}"), monkeypatch)
        one = replace(timer(replace(PLAN, samples=20)), targets=[Target(WORKLOAD, 0)])
        assert isinstance(one.time(candidate, baseline), Timed)
    turns = " ".join(order).replace("my call my call my call my end", "mine")
    turns = turns.replace("their call their call their call their end", "theirs")
    *before, first, _ = turns.partition("theirs")
    assert before == ["their start their end my start my end "]
    assert first == "theirs"
    timed = turns.split()[9:49]
    pairs = [tuple(timed[i : i + 2]) for i in range(0, 40, 2)]
    assert pairs.count(("mine", "theirs")) == pairs.count(("theirs", "mine")) == 10
    assert all(set(pairs[i : i + 2]) == {("mine", "theirs"), ("theirs", "mine")} for i in range(0, 20, 2))


@pytest.mark.parametrize("moving", [True, False])
def test_two_kernels_are_timed_in_other_memory_if_they_are_moving(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, moving: bool
) -> None:
    """However often they were timed before: in screening the baseline stays where it is for all."""
    order: list[str] = []
    with bench.session(SOURCE) as candidate, bench.session(SOURCE) as baseline:
        watch(candidate, lambda event: order.append(f"my {event}"), monkeypatch)
        watch(baseline, lambda event: order.append(f"their {event}"), monkeypatch)
        assert baseline.runner.alive
        assert candidate.runner.alive
        again = replace(timer(), moving=moving)
        for starts in (2, 3) if moving else (1, 1):
            assert isinstance(again.time(candidate, baseline), Timed)
            assert order.count("my start") == order.count("their start") == starts


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
        watch(candidate, events.append, monkeypatch)
        timed = replace(timer(), quiet=quiet)
        fresh = timed.cases.fresh

        def drawing(workload, rng):  # type: ignore[no-untyped-def]
            events.append("draw")
            return fresh(workload, rng)

        monkeypatch.setattr(timed.cases, "fresh", drawing)
        assert isinstance(timed.time(candidate, baseline), Timed)
    inside = events[events.index("quiet") : events.index("loud")]
    assert "call" in inside
    assert "draw" not in inside
    assert "call" not in events[: events.index("quiet")]


def test_inputs_are_written_after_the_last_call_before_them(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process sees one timed problem, and nothing of it before its turn."""
    events: list[str] = []
    with bench.session(SOURCE) as candidate, bench.session(SOURCE) as baseline:
        watch(candidate, events.append, monkeypatch)
        place = candidate.place_in

        def placing(runner, index, case, **kwargs):  # type: ignore[no-untyped-def]
            events.append("timed" if case.workload.rows in (WORKLOAD.rows, _LARGE.rows) else "small")
            return place(runner, index, case, **kwargs)

        monkeypatch.setattr(candidate, "place_in", placing)
        assert isinstance(timer().time(candidate, baseline), Timed)
    lives = " ".join(events).removeprefix("start end").split("end")
    assert [life.split() for life in lives[: 2 * PLAN.samples]] == [
        ["small", "call", "call", "timed", "call"]
    ] * (2 * PLAN.samples)


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


def test_kept_outputs_do_not_pay(bench: Bench) -> None:
    """A kernel with memory from call to call answers a size that it has seen with what it answered then."""
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
    timed = time_source(bench, source, timer())
    assert isinstance(timed, Timed)
    assert max(measurement.speedup for measurement in timed.measurements) < 2


def test_a_fault_or_a_crawl_while_timed(bench: Bench) -> None:
    trap = time_source(bench, SOURCE.replace(_HEAD, f"{_HEAD} if (rows == 300) __builtin_trap();"), timer())
    assert isinstance(trap, Failed)
    assert (trap.stage, trap.failure) == (Stage.TIME, Failure.FAULT)
    crawl = SOURCE.replace(_HEAD, f"{_HEAD} for (volatile long i = 0; i < 400000000L; i++) {{}}")
    slow = time_source(bench, crawl, timer())
    assert isinstance(slow, Failed)
    assert (slow.stage, slow.failure) == (Stage.TIME, Failure.TIMEOUT)


def _lying(session: Session[Runner], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its runners say 5 us whatever they did."""
    start = session.start

    def lying() -> Runner:
        runner = start()
        call = runner.call
        monkeypatch.setattr(
            runner, "call", lambda *given, **named: replace(call(*given, **named), inside_ns=5000)
        )
        return runner

    monkeypatch.setattr(session, "start", lying)


def test_a_clock_that_leaves_out_the_work_is_forged(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some 15 ms of work, far beyond what a busy machine adds to every one of the baseline's answers."""
    slow = SOURCE.replace(_HEAD, f"{_HEAD} for (volatile int i = 0; i < 60000000; i++) {{}}")
    plan = replace(PLAN, samples=4, shortest_timeout_s=0.4, empty_calls=1)
    with bench.session(slow) as candidate, bench.session(SOURCE) as baseline:
        _lying(candidate, monkeypatch)
        failed = replace(timer(plan), targets=[Target(WORKLOAD, 0)]).time(candidate, baseline)
    assert isinstance(failed, Failed)
    assert (failed.stage, failed.failure) == (Stage.TIME, Failure.FORGED)
    assert "its clock leaves out" in failed.detail


def test_a_clock_that_leaves_out_a_little_gains_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below the slack what is missing is charged: twice the work stays slower than the baseline."""
    with bench.session(_TWICE) as candidate, bench.session(SOURCE) as baseline:
        _lying(candidate, monkeypatch)
        timed = timer().time(candidate, baseline)
    assert isinstance(timed, Timed)
    assert all(measurement.speedup < 0.5 for measurement in timed.measurements)


def sample(inside_us: float, outside_us: float) -> _Sample:
    return _Sample(Call(round(1e3 * inside_us), round(1e3 * outside_us)), {}, None)


def test_shortest_waits_are_kept_from_block_to_block() -> None:
    waits = Waits()
    waits.take([sample(100, 190), sample(100, 230)], [sample(90, 130), sample(90, 120)])
    assert waits.least_us == 190 - 30
    waits.take([sample(100, 140)], [sample(90, 150)])
    assert waits.least_us == 140 - 30
    waits.take([sample(100, 900)], [sample(90, 900)])
    assert waits.least_us == 140 - 30


def test_times_are_raised_to_what_the_parents_clock_allows_and_no_others() -> None:
    block = _Block(_Problems(Target(WORKLOAD, 0), None, ()), Racing().heat("", 3), Waits())  # type: ignore[arg-type]
    block.mine = dict(enumerate([sample(5, 150), sample(100, 140), sample(180, 220)]))
    block.theirs = dict(enumerate([sample(90, 110), sample(90, 120), sample(90, 130)]))
    block.waits.take(block.mine.values(), list(block.theirs.values()))
    assert block.measurement.samples_us == (120, 120, 180)
    assert block.measurement.baseline_samples_us == (90, 90, 90)


def test_equal_kernels_are_raised_alike() -> None:
    """Whichever of them is the candidate: half of the blocks are its, over noise of every size."""
    rng, ahead = np.random.default_rng(0), 0
    for _ in range(400):
        drawn = [[sample(t, t + p) for t, p in 100 + 50 * rng.exponential(size=(4, 2))] for _ in range(2)]
        block = _Block(_Problems(Target(WORKLOAD, 0), None, ()), Racing().heat("", 4), Waits())  # type: ignore[arg-type]
        block.mine, block.theirs = (dict(enumerate(samples)) for samples in drawn)
        block.waits.take(block.mine.values(), list(block.theirs.values()))
        ahead += min(block.measurement.samples_us) < min(block.measurement.baseline_samples_us)
    assert ahead == pytest.approx(200, abs=50)


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
        place = candidate.place_in

        def noting(runner, index, case, **kwargs):  # type: ignore[no-untyped-def]
            if case.workload.rows in (WORKLOAD.rows, _LARGE.rows):
                seen.append(case.inputs["x"].tobytes())
            return place(runner, index, case, **kwargs)

        monkeypatch.setattr(candidate, "place_in", noting)
        timer().time(candidate, baseline)
    assert len(seen) == len(set(seen)) == 2 * PLAN.samples
