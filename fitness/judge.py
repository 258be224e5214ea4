"""What every judge of compiled kernels does: build, gate, time, record; the device is a subclass's.

Builds of several candidates run at once in the builder's processes. Judging happens in *lanes*, threads that
each take the next candidate in the order of submission: one where judging needs the machine to itself,
several where only timing does. It is against a baseline process that stays alive: the template's default
knobs on its seed source. A candidate's objects, one per specialization, share one disposable process.
"""

import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import numpy as np

from evotune.errors import SandboxError, StudyError
from evotune.fitness.build import Builder
from evotune.fitness.evaluation import Comparison, Evaluation, Fallen, Purpose
from evotune.fitness.gate import Gate, GateLimits, GateReport, Process, Session
from evotune.fitness.link import Linker
from evotune.fitness.objectives import Evidence, Objective, values
from evotune.fitness.operator import Level, Operator, Parameter, Workload, specialization
from evotune.fitness.outcome import Artifact, Failed, Failure, Outcome, Passed, Retry, Stage
from evotune.fitness.racing import NO_BARS, Bars, Racing
from evotune.fitness.runner import Loadable, kinds
from evotune.fitness.sequential import BLOCK_PAIRS
from evotune.fitness.timing import AllWaits, BaselineFault, Target, Timed, TimingPlan
from evotune.search_space.branch import Branch, Candidate, seed
from evotune.search_space.template import Specialization, Template

Artifacts = Mapping[Specialization, Artifact]
Builds = Mapping[Specialization, "Future[Artifact | Failed | Retry]"]
_T = TypeVar("_T")


@dataclass(frozen=True)
class Problem:
    """What is tuned: a template for an operator on some workloads."""

    template: Template
    operator: Operator
    workloads: tuple[Workload, ...]

    @property
    def specializations(self) -> tuple[Specialization, ...]:
        """The objects that a candidate needs, in the order of the workloads."""
        return tuple(dict.fromkeys(specialization(self.operator, workload) for workload in self.workloads))

    @property
    def groups(self) -> tuple[str, ...]:
        """Workload groups in order of first appearance."""
        return tuple(dict.fromkeys(workload.group for workload in self.workloads))

    @property
    def targets(self) -> tuple[Target, ...]:
        specs = self.specializations
        return tuple(Target(w, specs.index(specialization(self.operator, w))) for w in self.workloads)

    @property
    def seed(self) -> Branch:
        """The template's own source as a branch."""
        return seed(self.template.source)


@dataclass(frozen=True)
class Confirmation:
    """A candidate judged and timed anew, on problems that screening never saw.

    Attributes:
        artifacts: what was built and judged; see `CompiledEvaluator.library`.
        blocks: against the baseline, each on problems of its own.
        naive_us: time of the operator's numpy form by workload name, measured after each block.
    """

    artifacts: Artifacts
    report: GateReport
    blocks: tuple[Timed, ...]
    naive_us: tuple[Mapping[str, float], ...]


@dataclass(frozen=True)
class Round:
    """What is to be timed now.

    Attributes:
        gate: whose solved problems are timed on, so that others' cannot have been learned from.
        targets: the workloads.
        bars: where a candidate's timing may end early.
        waits: of these two kernels, over all that is timed in this round.
        moving: whether every block goes on in other processes with other memory (see `timing.Timer`).
    """

    gate: Gate
    targets: Sequence[Target]
    plan: TimingPlan
    bars: Bars = field(default_factory=dict)
    waits: AllWaits = field(default_factory=dict)
    moving: bool = False


class _Stop(Exception):
    """Carries what ended a judgement early up to the method that was asked for it."""

    def __init__(self, outcome: Failed | Retry) -> None:
        super().__init__(str(outcome))
        self.outcome = outcome


class _Fell(Exception):
    """The incumbent failed, not the challenger."""


class CompiledEvaluator(ABC, Generic[Process]):
    """Implements `Evaluator`. All but `close` may be called from any thread."""

    _solves_whole = True
    """Whether timed problems are small enough to be solved as they are."""

    def __init__(
        self,
        problem: Problem,
        objectives: Sequence[Objective],
        *,
        level: Level,
        limits: GateLimits,
        timing: TimingPlan,
        builder: Builder,
        linker: Linker,
    ) -> None:
        """`level` is the gate before timing. The builder is closed with the evaluator."""
        self.problem = problem
        self._objectives = objectives
        self._level: Level = level
        self._limits = limits
        self._timing = timing
        self._racing = Racing(timing.race_error)
        self._builder = builder
        self._linker = linker
        whole = problem.workloads if self._solves_whole else ()
        self._gate = Gate(problem.operator, whole)
        # Screening never saw its cases. Solving them takes seconds, so that all full gates share them.
        self._second_gate = Gate(problem.operator, whole)
        # Only timed on, so that what a promotion is confirmed with chose nothing at all.
        self._third_gate = Gate(problem.operator)
        self._baseline: Session[Process] | None = None
        self._baseline_changes = threading.RLock()
        self._ending = threading.Event()
        self._held: dict[str, GateReport] = {}
        self._default_builds: Builds | None = None
        # A process dies with the thread that started it, and these live as long as the evaluator.
        self._judge = ThreadPoolExecutor(self._lanes, thread_name_prefix="judge")
        # What is asked for beside the stream of candidates waits for none of them where lanes are many.
        self._beside = self._judge if self._lanes == 1 else ThreadPoolExecutor(1, thread_name_prefix="ask")

    @property
    def _lanes(self) -> int:
        """Candidates that are judged at once."""
        return 1

    @abstractmethod
    def _signature(self, spec: Specialization) -> Sequence[Parameter]:
        """Arguments of the entry as this device takes them."""

    @abstractmethod
    def _start_process(self, loadables: Sequence[Loadable], artifacts: Sequence[Artifact]) -> Process:
        """A process with these objects loaded, which were linked from these artifacts.

        Both in the order of `Problem.specializations`. Raises Fault, SandboxError, OSError.
        """

    @abstractmethod
    def _timed(self, session: Session[Process], baseline: Session[Process], turn: Round) -> Timed | Failed:
        """Time a candidate against a baseline. Raises BaselineFault, SandboxError, StudyError."""

    def _blamed(self, failed: Failed) -> Failed | Retry:
        """A candidate's failure, unless it was the device's."""
        return failed

    def submit(self, candidate: Candidate, bars: Bars = NO_BARS) -> Future[Evaluation]:
        """See `Evaluator.submit`. The future also raises StudyError when the baseline itself fails."""
        if self._baseline is None and self._default_builds is None:
            self._default_builds = self._start_default()
        return self._judge.submit(self._evaluate, candidate, self._start_builds(candidate), bars)

    def explain(self, candidate: Candidate, level: Level = "full") -> GateReport | Failed | Retry:
        """Every rung to its end, for a person; `Failed` or `Retry` when there is no object to judge."""
        builds = self._start_builds(candidate)

        def work() -> GateReport:
            with closing(self._session(collected(builds))) as session:
                return self._gate.judge(session, self._specs, level, explain=True)

        return self._ask(work)

    def verify(self, artifacts: Artifacts, level: Level = "full") -> GateReport | Failed | Retry:
        """Judge objects that were built elsewhere, one for each specialization of the problem.

        In a process of their own, on cases that screening never saw; every full gate shares them.
        """

        def work() -> GateReport:
            with closing(self._session(artifacts)) as session:
                return self._second_gate.judge(session, self._specs, level)

        return self._ask(work)

    def confirm(self, candidate: Candidate, blocks: int = 3) -> Confirmation | Failed | Retry:
        """The full gate, then a re-timing, of a candidate in a fresh process.

        On cases that screening never saw. They are solved once: every full gate shares them, and comparisons
        for a promotion are timed on the same ones, each time in fresh variants.
        """
        builds = self._start_builds(candidate)

        def work() -> Confirmation:
            gate, artifacts = self._second_gate, collected(builds)
            with closing(self._session(artifacts)) as session:
                report = gate.judge(session, self._specs, "full")
                if report.failed is not None:
                    raise _Stop(report.failed)
                timed, naive_us = [], []
                turn = Round(gate, self.problem.targets, self._timing, moving=True)
                for _ in range(blocks):
                    timed.append(self._time(session, turn))
                    naive_us.append(self._naive_us(gate))
            return Confirmation(artifacts, report, tuple(timed), tuple(naive_us))

        return self._ask(work)

    def compare(
        self,
        challenger: Candidate,
        incumbent: Candidate,
        enough: Callable[[Timed], bool],
        *,
        group: str,
        purpose: Purpose,
    ) -> Comparison | Fallen | Failed | Retry:
        """See `Evaluator.compare`."""
        builds, theirs = self._start_builds(challenger), self._start_builds(incumbent)
        targets = [target for target in self.problem.targets if target.workload.group == group]
        gate = self._second_gate if purpose == "promotion" else self._third_gate
        turn = Round(gate, targets, replace(self._timing, samples=BLOCK_PAIRS), moving=True)

        def work() -> Comparison | Fallen:
            begun_s = time.monotonic()
            with closing(self._session(collected(builds))) as session:
                report = self._full_gate(challenger, session)
                try:
                    with closing(self._incumbent(theirs)) as holder:
                        blocks = list(self._blocks(session, holder, turn, enough))
                except _Fell as fell:
                    return Fallen(str(fell))
            worst_error = max(report.worst_error, *(block.worst_error for block in blocks))
            return Comparison(tuple(blocks), worst_error, time.monotonic() - begun_s)

        return self._ask(work)

    def library(self, artifact: Artifact) -> bytes:
        """The linked form of an object that was judged here. Raises SandboxError, OSError."""
        linked = self._linker.link(artifact)
        if isinstance(linked, Failed):
            raise SandboxError(f"an object that linked before does not any more: {linked.detail}")
        return linked.read_bytes()

    def close(self) -> None:
        """See `Evaluator.close`. A judgement in progress ends first: calls are bounded by their timeouts. So
        does the block of a comparison."""
        self._ending.set()
        for threads in (self._judge, self._beside):
            threads.shutdown(wait=False, cancel_futures=True)
        self._builder.close()
        for threads in (self._judge, self._beside):
            threads.shutdown()
        self._drop_baseline()

    @property
    def _specs(self) -> tuple[Specialization, ...]:
        return self.problem.specializations

    def _full_gate(self, candidate: Candidate, session: Session[Process]) -> GateReport:
        """Of a challenger. One that held before, in another group or for its promotion, need not hold again:
        what is timed of it is compared with the truth in any case. Raises _Stop."""
        report = self._held.get(candidate.digest)
        if report is None:
            report = self._second_gate.judge(session, self._specs, "full")
            if report.failed is not None:
                raise _Stop(report.failed)
            self._held[candidate.digest] = report
        return report

    def _incumbent(self, builds: Builds) -> Session[Process]:
        """Its session. Raises _Fell, _Stop for a retry."""
        try:
            return self._session(collected(builds))
        except _Stop as stop:
            if isinstance(stop.outcome, Failed):
                raise _Fell(f"it does not build any more: {stop.outcome.detail}") from None
            raise

    def _blocks(
        self,
        session: Session[Process],
        holder: Session[Process],
        turn: Round,
        enough: Callable[[Timed], bool],
    ) -> Iterator[Timed]:
        """Timed until it is enough; one that the incumbent fails in is repeated once. Raises _Stop, _Fell."""
        failed_before = False
        while not self._ending.is_set():
            try:
                timed = self._timed(session, holder, turn)
            except BaselineFault as fault:
                if failed_before:
                    blamed = self._blamed(Failed(Failure.FAULT, Stage.TIME, str(fault)))
                    if isinstance(blamed, Retry):
                        raise _Stop(blamed) from fault
                    raise _Fell(f"it fails while it is timed: {fault}") from fault
                failed_before = True
                continue
            if isinstance(timed, Failed):
                raise _Stop(timed)
            failed_before = False
            yield timed
            if enough(timed):
                return
        raise _Stop(Retry("the judge was closed"))

    def _ask(self, work: Callable[[], _T]) -> _T | Failed | Retry:
        """Do it beside the lanes, or in the only one once what is queued is done."""

        def guarded() -> _T | Failed | Retry:
            try:
                return work()
            except _Stop as stop:
                return self._outcome(stop)
            except (SandboxError, OSError) as error:
                return Retry(str(error))

        return self._beside.submit(guarded).result()

    def _outcome(self, stop: _Stop) -> Failed | Retry:
        return self._blamed(stop.outcome) if isinstance(stop.outcome, Failed) else stop.outcome

    def _start_builds(self, candidate: Candidate) -> Builds:
        """Queue the candidate's units, one per specialization."""
        return self._start(dict.fromkeys(self._specs, candidate.knobs), candidate.branch.source)

    def _start(self, knobs: Mapping[Specialization, Any], source: str) -> Builds:
        unit = self.problem.template.unit
        return {
            spec: self._builder.build(unit(source, chosen, spec), spec.label)
            for spec, chosen in knobs.items()
        }

    def _evaluate(self, candidate: Candidate, builds: Builds, bars: Bars) -> Evaluation:
        """In a lane: wait for the builds, judge, time."""
        self._gate.prepare(self._specs, self._level)
        clock = _Stopwatch()
        artifacts: Artifacts = {}
        saved_s = 0.0
        try:
            artifacts = collected(builds)
            clock.lap("build")
            report, timed = self._judge_built(artifacts, bars, clock)
            outcome: Outcome = self._passed(candidate, artifacts, report, timed)
            saved_s = timed.saved_s
        except _Stop as stop:
            outcome = self._outcome(stop)
        except (SandboxError, OSError) as error:
            outcome = Retry(str(error))
        resources = {spec.label: artifact.resources for spec, artifact in artifacts.items()}
        if isinstance(outcome, Failed) and resources:
            outcome = replace(outcome, resources=resources)
        return Evaluation(outcome, {s.label: a for s, a in artifacts.items()}, clock.seconds, saved_s)

    def _judge_built(self, artifacts: Artifacts, bars: Bars, clock: "_Stopwatch") -> tuple[GateReport, Timed]:
        """Gate, then time. Raises _Stop."""
        with closing(self._session(artifacts)) as session:
            report = self._gate.judge(session, self._specs, self._level)
            clock.lap("gate")
            if report.failed is not None:
                raise _Stop(report.failed)
            timed = self._time(session, Round(self._gate, self.problem.targets, self._timing, bars))
            clock.lap("time")
        return report, timed

    def _passed(self, candidate: Candidate, artifacts: Artifacts, report: GateReport, timed: Timed) -> Passed:
        worst_error = max(report.worst_error, timed.worst_error)
        language = self.problem.template.language
        source = candidate.branch.source
        evidence = Evidence(timed.measurements, worst_error, timed.host_call_us, source, language)
        return Passed(
            level=report.level,
            worst_error=worst_error,
            measurements=timed.measurements,
            host_call_us=timed.host_call_us,
            values=values(self._objectives, evidence),
            resources={spec.label: artifact.resources for spec, artifact in artifacts.items()},
        )

    def _session(self, artifacts: Artifacts) -> Session[Process]:
        """Objects linked and ready for a process of their own. Raises _Stop."""
        loadables = self._loadables(artifacts)
        signatures = [self._signature(spec) for spec in self._specs]
        built = [artifacts[spec] for spec in self._specs]
        return Session(lambda: self._start_process(loadables, built), signatures, self._limits)

    def _loadables(self, artifacts: Artifacts) -> list[Loadable]:
        """Linked, in the order of `Problem.specializations`. Raises _Stop."""
        found = []
        for spec in self._specs:
            linked = self._linker.link(artifacts[spec])
            if isinstance(linked, Failed):
                raise _Stop(linked)
            found.append(Loadable(linked, artifacts[spec].entry, kinds(self._signature(spec))))
        return found

    def _time(self, session: Session[Process], turn: Round) -> Timed:
        """Against the baseline; one that misbehaves is replaced once. Raises _Stop, StudyError."""
        baseline = self._living_baseline()
        try:
            timed = self._timed(session, baseline, turn)
        except BaselineFault:
            self._drop_baseline(baseline)
            try:
                timed = self._timed(session, self._living_baseline(), turn)
            except BaselineFault as fault:
                raise StudyError(f"the template's default kernel fails while it is timed: {fault}") from fault
        if isinstance(timed, Failed):
            raise _Stop(timed)
        return timed

    def _living_baseline(self) -> Session[Process]:
        """The default kernel's session, through the screen gate when it is new. Raises StudyError, _Stop."""
        with self._baseline_changes:
            if self._baseline is None:
                session = self._session(self._default_artifacts())
                failed = self._gate.judge(session, self._specs, "screen").failed
                if failed is not None:
                    session.close()
                    raise StudyError(_default_fails(failed))
                self._baseline = session
            return self._baseline

    def _start_default(self) -> Builds:
        """Queue the template's own source with its default knobs for each specialization."""
        template = self.problem.template
        return self._start({spec: template.default(spec) for spec in self._specs}, template.source)

    def _default_artifacts(self) -> Artifacts:
        """Of the default kernel. Raises StudyError, _Stop."""
        builds, self._default_builds = self._default_builds or self._start_default(), None
        try:
            return collected(builds)
        except _Stop as stop:
            if isinstance(stop.outcome, Failed):
                raise StudyError(_default_fails(stop.outcome)) from None
            raise

    def _drop_baseline(self, faulty: Session[Process] | None = None) -> None:
        """End it; only if it is this one still, which another lane may have replaced."""
        with self._baseline_changes:
            if self._baseline is not None and (faulty is None or faulty is self._baseline):
                self._baseline.close()
                self._baseline = None

    def _naive_us(self, gate: Gate) -> dict[str, float]:
        """The numpy form's time on each workload, builds paused."""
        rng = np.random.default_rng(secrets.randbits(128))
        cases = [gate.cases.fresh(workload, rng) for workload in self.problem.workloads]
        with self._builder.quiet():
            return {case.name: self.problem.operator.naive_time_us(case) for case in cases}


def collected(builds: Builds) -> dict[Specialization, Artifact]:
    """Wait for all builds. Raises _Stop with the first one that gave no artifact."""
    artifacts = {}
    for spec, future in builds.items():
        result = future.result()
        if not isinstance(result, Artifact):
            raise _Stop(result)
        artifacts[spec] = result
    return artifacts


def _default_fails(failed: Failed) -> str:
    where = f" ({failed.case})" if failed.case else ""
    return f"the template's default kernel fails at {failed.stage}{where}: {failed.failure}, {failed.detail}"


class _Stopwatch:
    """Seconds by phase, each since the end of the one before."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._since = time.perf_counter()

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase], self._since = now - self._since, now
