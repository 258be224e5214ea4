"""The judge for kernels on an NVIDIA GPU: one owner per GPU, a disposable sandboxed process per candidate.

Builds run on all cores beside it. Several lanes each take a candidate from its objects to its verdict: one
is timed, others are gated, laid out or compared meanwhile, so that the GPU seldom waits (`turns.Turns`,
`cuda_timing.Shared`). The baseline has a process of its own that stays alive. After a fault, a hang or an
error of the device the process is thrown away, and before the next candidate is timed the baseline must
reproduce the time it had when the study began: within `CANARY_BAND`, else in a fresh process, else the device
counts as lost. A candidate that took too long while the baseline's answers were late too is not blamed for
it.
"""

import os
import re
import secrets
import shutil
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from evotune.errors import DeviceLost, SandboxError, StudyError
from evotune.fitness.build import Builder, BuildPlan, default_cache_directory
from evotune.fitness.cache import Cache
from evotune.fitness.cuda_link import CudaLinker, runtime_library
from evotune.fitness.cuda_runner import Checker, CudaCell, CudaProcess, Workspace, in_trouble
from evotune.fitness.cuda_timing import (
    BURST,
    Bands,
    Canary,
    CudaTimer,
    Pools,
    Room,
    Shared,
    Solvers,
    has_work,
)
from evotune.fitness.cute_toolchain import CuteToolchain
from evotune.fitness.evaluation import Evaluation
from evotune.fitness.gate import Gate, GateLimits, Session
from evotune.fitness.judge import Artifacts, Builds, CompiledEvaluator, Problem, Round, collected
from evotune.fitness.lease import Gpu, Lease, any_free
from evotune.fitness.link import Linker
from evotune.fitness.objectives import Objective
from evotune.fitness.operator import DeviceOperator, DeviceParameter
from evotune.fitness.operator import Level as GateLevel
from evotune.fitness.outcome import Artifact, Failed, Failure, Retry, Stage
from evotune.fitness.racing import Bars
from evotune.fitness.runner import Fault, Loadable
from evotune.fitness.sandbox import Level, Sandbox
from evotune.fitness.spares import Spares
from evotune.fitness.timing import BaselineFault, Timed, TimingPlan, blaming_baseline
from evotune.fitness.toolchain import Toolchain, read_output
from evotune.fitness.turns import Usage
from evotune.fitness.utilization import Utilization
from evotune.search_space.branch import Candidate
from evotune.search_space.template import Specialization

CANARY_BAND = 0.1
LATE = 0.25
"""The machine is overloaded when an answer of the baseline, of milliseconds, takes this part of a timeout."""

SANITIZERS = ("memcheck", "racecheck", "synccheck")
_SANITIZER_S = 60.0
_LONGEST = 400  # of a complaint: a kernel's mangled name may have thousands of letters
_SWITCH_S = 0.0005
_T = TypeVar("_T")
_MEMORY_FAILED = "the GPU's memory met an error that ECC could not correct"


@dataclass(frozen=True)
class CudaSettings:
    """All that a study may set about judging on a GPU.

    Attributes:
        lanes: candidates that are judged at once; one of them is timed.
        comparing: candidates will also be compared with one another, so that what this takes is solved ahead.
        spares: processes that stand ready ahead of their use; each takes a core for 4 s.
    """

    level: GateLevel = "screen"
    gate: GateLimits = field(default_factory=GateLimits)
    timing: TimingPlan = field(default_factory=TimingPlan)
    build: BuildPlan = field(default_factory=BuildPlan)
    lanes: int = 6
    comparing: bool = False
    spares: int = field(default_factory=lambda: max(2, (os.cpu_count() or 2) // 2))
    bands: Bands = Bands()


@dataclass(frozen=True)
class Sanitized:
    """What compute-sanitizer said of a candidate: tool → "" (clean), or its first complaint, with which the
    rest was not run any more.

    `absent` says in a line why it was not run at all.
    """

    found: Mapping[str, str] = field(default_factory=dict)
    absent: str = ""

    @property
    def clean(self) -> bool:
        return not self.absent and not any(self.found.values())


class CudaEvaluator(CompiledEvaluator[CudaProcess]):
    """See `CompiledEvaluator`; the operator is a `DeviceOperator`."""

    _solves_whole = False  # but see `Pools.hostile`

    def __init__(
        self,
        problem: Problem,
        objectives: Sequence[Objective],
        *,
        settings: CudaSettings | None = None,
        cache: Path | None = None,
        sandbox: Sandbox | None = None,
    ) -> None:
        """Takes the first free GPU for as long as the evaluator lives.

        Raises StudyError without compiler or linker, DeviceError without a free GPU, SandboxError, OSError.
        """
        self._settings = settings or CudaSettings()
        with ExitStack() as made:
            self._make(problem, objectives, cache, sandbox or Sandbox.detect(), made)
            self._closing = made.pop_all()

    def _make(
        self,
        problem: Problem,
        objectives: Sequence[Objective],
        cache: Path | None,
        sandbox: Sandbox,
        made: ExitStack,
    ) -> None:
        """All that `__init__` does; what must be closed is known to `made`, the GPU let go of last."""
        toolchain, linker = self._tools(sandbox)
        self._lease = made.enter_context(closing(self._leased()))
        self._cell = self._judge_cell(sandbox)
        super().__init__(
            problem,
            objectives,
            level=self._settings.level,
            limits=self._settings.gate,
            timing=self._settings.timing,
            builder=Builder(
                toolchain,
                sandbox,
                Cache(cache or default_cache_directory(), self._settings.build.cache_mib << 20),
                self._settings.build,
                linker,
            ),
            linker=linker,
        )
        self._operator: DeviceOperator = problem.operator  # type: ignore[assignment]  # sm_90a has such alone
        self._pools: dict[int, Pools] = {}
        self._pools_change = threading.Lock()
        cores = os.cpu_count() or 2
        self._solvers = made.enter_context(closing(Solvers(max(1, cores // 2))))
        self._later = made.enter_context(closing(Solvers(max(1, cores // 4), nice=19)))
        self._pools_of(self._gate)
        self._gate.prepare(self._specs, self._level, self._solvers.executor)
        self._checks = ThreadPoolExecutor(max(2, cores // 2), thread_name_prefix="check")
        made.callback(self._checks.shutdown, cancel_futures=True)
        self._utilization = made.enter_context(closing(Utilization(self._lease.gpu.uuid)))
        self._spares = made.enter_context(
            closing(Spares(lambda: CudaProcess(self._cell), self._settings.spares))
        )
        self._workspace_of: dict[str, Workspace] = {}
        self._shared: Shared | None = None
        self._canary: Canary | None = None
        self._doubted = False
        self._faults_seen = 0
        self._told_s: dict[str, float] = {}
        self._telling = threading.Lock()
        # A lane that waits for its process wakes up in time: what holds the interpreter lets go after 0.5 ms.
        made.callback(sys.setswitchinterval, sys.getswitchinterval())
        sys.setswitchinterval(_SWITCH_S)

    @property
    def _lanes(self) -> int:
        return self._settings.lanes

    # What the tests put others in the place of

    def _tools(self, sandbox: Sandbox) -> tuple[Toolchain, Linker]:
        return CuteToolchain(), CudaLinker(sandbox)

    def _leased(self) -> Lease:
        return any_free()

    def _judge_cell(self, sandbox: Sandbox) -> CudaCell:
        if sandbox.level is Level.LANDLOCK:
            mend = "install it (apt install bubblewrap)"
            raise SandboxError(f"on a GPU kernels are judged behind bubblewrap alone: {mend}")
        arena_bytes = self._settings.gate.arena_mib << 20
        return CudaCell(sandbox, arena_bytes, runtime_library(), self._lease.gpu.nodes)

    @property
    def gpu(self) -> Gpu:
        """The one that is judged on."""
        return self._lease.gpu

    def close(self) -> None:
        """See `Evaluator.close`."""
        super().close()
        self._closing.close()

    def sanitize(self, candidate: Candidate) -> Sanitized | Failed:
        """Run compute-sanitizer's memcheck, racecheck and synccheck over some gate cases of a finalist."""
        tool = _compute_sanitizer()
        if tool is None:
            return Sanitized(absent="compute-sanitizer is not installed (it comes with the CUDA toolkit)")
        builds = self._start_builds(candidate)

        def work() -> Sanitized:
            artifacts = collected(builds)
            found: dict[str, str] = {}
            # At once: most of what a tool takes is to start a process with torch under it.
            with ThreadPoolExecutor(len(SANITIZERS), thread_name_prefix="sanitizer") as tools:
                asked = {name: tools.submit(self._complaint, tool, name, artifacts) for name in SANITIZERS}
                for name, said in asked.items():
                    found[name] = said.result()
                    if found[name]:
                        break  # trouble of the machine at a later tool must not hide it
            return Sanitized(found)

        found = self._ask(work)
        return Sanitized(absent=found.reason) if isinstance(found, Retry) else found

    def _complaint(self, tool: Path, name: str, artifacts: Artifacts) -> str:
        """What a tool has to say of a few gate cases; "" when nothing. Raises _Stop, SandboxError."""
        loadables = self._loadables(artifacts)
        built = [artifacts[spec] for spec in self._specs]
        with self._cell.sandbox.scratch() as scratch:
            checker = Checker(
                (str(tool), "--tool", name, "--log-file", "report.txt"),
                scratch,
                None,  # the tool talks with its target over sockets, which the filter forbids; the walls stay
                {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
            )
            process = CudaProcess(replace(self._cell, usage=Usage(self._cell.usage.turns), checker=checker))
            with closing(process):
                process.open()
                limits = replace(self._limits, call_timeout_s=_SANITIZER_S)
                signatures = [self._signature(spec) for spec in self._specs]
                session = Session(lambda: self._loaded(process, loadables, built), signatures, limits)
                try:
                    self._some_calls(session)
                except Fault as fault:
                    return f"{fault.failure}: {fault.detail}"
                process.finish(_SANITIZER_S)
            report = read_output(scratch / "report.txt", 1 << 20)
        if not report:
            raise SandboxError(f"compute-sanitizer's {name} wrote no report")
        return complaint(report.decode(errors="replace"))

    def _some_calls(self, session: Session[CudaProcess]) -> None:
        """Of each object the first gate case of every rung that has work."""
        rng = np.random.default_rng(secrets.randbits(128))
        for index, spec in enumerate(self._specs):
            seen: set[str] = set()
            for entry in self._operator.gate_cases(spec, "screen"):
                if entry.rung in seen:
                    continue
                case = self._gate.cases.fresh(entry.workload, rng)
                if has_work(case):
                    seen.add(entry.rung)
                    session.call(index, case)

    def _signature(self, spec: Specialization) -> Sequence[DeviceParameter]:
        return self._operator.device_signature(spec)

    def _start_process(self, loadables: Sequence[Loadable], artifacts: Sequence[Artifact]) -> CudaProcess:
        return self._loaded(self._spares.take(), loadables, artifacts)

    def _loaded(
        self, process: CudaProcess, loadables: Sequence[Loadable], artifacts: Sequence[Artifact]
    ) -> CudaProcess:
        """The process with a candidate in it. Raises Fault."""
        signatures = [self._signature(spec) for spec in self._specs]
        workspaces = [self._workspace_of.get(artifact.digest, _no_workspace) for artifact in artifacts]
        try:
            process.load(loadables, signatures, workspaces)
        except Fault:
            process.close()
            raise
        return process

    def _start(self, knobs: Mapping[Specialization, Any], source: str) -> Builds:
        """As the base does; remembers how much workspace each object needs, which the template knows."""
        template = self.problem.template
        needs = getattr(template, "workspace_bytes", None)
        if needs is not None:
            for spec, chosen in knobs.items():
                name = self._builder.name(template.unit(source, chosen, spec))
                self._workspace_of[name] = partial(needs, chosen, spec)
        return super()._start(knobs, source)

    def _evaluate(self, candidate: Candidate, builds: Builds, bars: Bars) -> Evaluation:
        """As the base does; of the GPU's time, in seconds:

        "gpu": this candidate's turns and the baseline's beside it; "gpu_busy": of these, kernels at work;
        "all_events", "all_driver": what the GPU did in all since the evaluation that ended before this one,
        by its own events and as the driver counts.
        """
        self._lease.renew()
        before, errors = self._cell.usage.mine, self._utilization.memory_errors
        try:
            evaluation = super()._evaluate(candidate, builds, bars)
        except StudyError:
            if not self._memory_failed(errors):
                raise
            evaluation = Evaluation(Retry(_MEMORY_FAILED))
        else:
            if self._memory_failed(errors):
                evaluation = replace(evaluation, outcome=Retry(_MEMORY_FAILED))
        self._solve_ahead()
        spent = self._cell.usage.mine - before
        seconds = {**evaluation.seconds, "gpu": spent.held_s, "gpu_busy": spent.busy_s, **self._used_s()}
        return replace(evaluation, seconds=seconds)

    def _solve_ahead(self) -> None:
        """Begin what the first comparison would wait for, once the first candidate has all it needs."""
        if self._settings.comparing and id(self._third_gate) not in self._pools:
            self._second_gate.prepare(self._specs, "full", self._later.executor)
            for gate in (self._second_gate, self._third_gate):
                self._pools_of(gate)

    def _used_s(self) -> dict[str, float]:
        """By two clocks, since this was last asked."""
        with self._telling:
            now = {"all_events": self._cell.usage.total.busy_s}
            if self._utilization.used_s is not None:
                now["all_driver"] = self._utilization.used_s
            told, self._told_s = self._told_s, now
        return {name: seconds - told.get(name, 0.0) for name, seconds in now.items()}

    def _blamed(self, failed: Failed) -> Failed | Retry:
        """Not a candidate that took too long, or told of a device in trouble, when others tell the same."""
        if failed.stage in (Stage.BUILD, Stage.INSPECT):
            return failed  # nothing ran on the GPU
        if failed.failure is Failure.TIMEOUT:
            return self._late(failed)
        if failed.failure in (Failure.FAULT, Failure.REFUSED) and in_trouble(failed.detail):
            return self._troubled(failed)
        return failed

    def _late(self, failed: Failed) -> Failed | Retry:
        """Not the candidate's fault when the baseline's answers are late right now."""
        try:
            found = self._canary_now()
        except (BaselineFault, SandboxError, OSError) as error:
            return Retry(f"took too long, and the default kernel does not answer either: {error}")
        if found is None or found.longest_us / 1e6 <= LATE * self._limits.call_timeout_s:
            return failed
        longest_s = found.longest_us / 1e6
        return Retry(f"took too long while the default kernel's answer took {longest_s:.2g} s: overloaded")

    def _troubled(self, failed: Failed) -> Failed | Retry:
        """Not the candidate's fault when the baseline fails too, or a fresh process of nobody's."""
        try:
            self._canary_now()
            with closing(CudaProcess(self._cell)) as process:
                process.open()
                process.copy_bytes_per_us()
        except (BaselineFault, Fault, SandboxError, OSError) as error:
            return Retry(f"the GPU is in trouble: {failed.detail}; without the candidate: {error}")
        return failed

    def _canary_now(self) -> Canary | None:
        """How the baseline does, where there is one yet. Raises BaselineFault, SandboxError."""
        baseline = self._baseline
        if baseline is None:
            return None
        turn = Round(self._gate, self.problem.targets, self._timing)
        return self._timer(baseline, turn).canary(baseline)

    def _time(self, session: Session[CudaProcess], turn: Round) -> Timed:
        """As the base does. Trouble that the baseline tells of is believed: SandboxError, for a retry."""
        try:
            return super()._time(session, turn)
        except StudyError as error:
            if not in_trouble(str(error)):
                raise
            raise SandboxError(f"the GPU is in trouble: {error}") from error

    def _ask(self, work: Callable[[], _T]) -> _T | Failed | Retry:
        """As the base does; again, when the GPU's memory failed meanwhile."""
        errors = self._utilization.memory_errors
        found = super()._ask(work)
        if self._memory_failed(errors):
            self._held.clear()
            return Retry(_MEMORY_FAILED)
        return found

    def _memory_failed(self, before: int | None) -> bool:
        """Whether the GPU's memory met an error that ECC could not correct since there were so many.

        What was in it then is nobody's fault. Before anything is timed again the baseline must be as fast as
        ever; CUDA ends the processes that the error is in.
        """
        now = self._utilization.memory_errors
        if now is None or before is None or now == before:
            return False
        self._cell.usage.fault()
        return True

    def _timed(
        self, session: Session[CudaProcess], baseline: Session[CudaProcess], turn: Round
    ) -> Timed | Failed:
        self._lease.renew()
        if baseline is not self._baseline:  # an incumbent, block after block
            turn = replace(turn, plan=replace(turn.plan, samples=BURST * turn.plan.samples))
            return self._timer(baseline, turn).time(session, baseline, keep=True)
        timer = self._timer(baseline, turn)
        self._ask_canary(timer, baseline)
        return timer.time(session, baseline, turn.bars)

    def _timer(self, baseline: Session[CudaProcess], turn: Round) -> CudaTimer:
        return CudaTimer(
            self._operator,
            turn.gate.cases,
            self._pools_of(turn.gate),
            turn.targets,
            turn.plan,
            self._shared or self._measured(baseline),
        )

    def _measured(self, baseline: Session[CudaProcess]) -> Shared:
        """What timing needs to know of the device, found out once. Raises BaselineFault."""
        with self._baseline_changes:
            if self._shared is None:
                facts = self._spares.facts
                assert facts is not None  # the baseline's process was one of them
                with blaming_baseline():
                    copy_bytes_per_us = baseline.runner.copy_bytes_per_us()
                self._shared = Shared(
                    self._checks,
                    Room(facts.memory_bytes // 2),
                    facts.l2_bytes,
                    copy_bytes_per_us,
                    self._settings.bands,
                    self._racing,
                )
            return self._shared

    def _ask_canary(self, timer: CudaTimer, baseline: Session[CudaProcess]) -> None:
        """After a fault the baseline must be as fast as ever. Raises BaselineFault, DeviceLost.

        A BaselineFault makes the base class replace the baseline's process and ask again, once.
        """
        with timer.shared.window:
            faults = self._cell.usage.faults
            if self._canary is not None and faults == self._faults_seen:
                return
            found = timer.canary(baseline)
            if self._canary is None:
                self._canary = found
            elif abs(found.us - self._canary.us) > CANARY_BAND * self._canary.us:
                said = f"the default kernel takes {found.us:.1f} us where it took {self._canary.us:.1f} us"
                if self._doubted:
                    raise DeviceLost(f"the GPU is not what it was: {said}, in a fresh process too")
                self._doubted = True
                raise BaselineFault(said)
            self._doubted, self._faults_seen = False, faults

    def _pools_of(self, gate: Gate) -> Pools:
        """Confirmations have pools of their own, which never chose a candidate, solved when first wanted."""
        with self._pools_change:
            if id(gate) not in self._pools:
                executor = (self._solvers if gate is self._gate else self._later).executor
                hostile = self._level == "full" or gate is self._second_gate
                self._pools[id(gate)] = Pools(
                    self._operator, self.problem.workloads, executor, hostile=hostile
                )
            return self._pools[id(gate)]

    def _naive_us(self, gate: Gate) -> dict[str, float]:
        """The numpy form's time on a pool, times the copies of it: on all heads it would take minutes."""
        rng = np.random.default_rng(secrets.randbits(128))
        found = {}
        for workload in self.problem.workloads:
            pools = self._pools_of(gate)
            copies = pools.spread(workload, rng).copies
            found[workload.name] = copies * self._operator.naive_time_us(pools.pool(workload))
        return found


def complaint(report: str) -> str:
    """The first line of compute-sanitizer's report that speaks of an error; "" when it counted none."""
    lines = [line.removeprefix("=========").strip() for line in report.splitlines()]
    summary = next((line for line in lines if "SUMMARY:" in line), None)
    if summary is None:
        return "ended without a summary"
    if re.search(r"SUMMARY: 0 (errors|hazards)", summary):
        return ""
    told = [
        line for line in lines if line and not line.startswith(("COMPUTE-SANITIZER", "Target application"))
    ]
    return next(iter(told), summary)[:_LONGEST]


def _compute_sanitizer() -> Path | None:
    found = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    return Path(found) if found else None


def _no_workspace(sizes: Mapping[str, int]) -> int:
    return 0
