"""The correctness gate: five rungs over any `Operator`, cheap and telling first.

    smoke, edges, regimes   outputs of a compiled object against solved cases
    laws                    outputs against outputs, no reference
    integrity               what no comparison of values sees: inputs changed or bytes written outside the
                            buffers in any earlier call, reads outside them, two equal calls that differ

A case is solved once per judge and every use draws a fresh variant of it (`Case.fresh`) with randomness
from the operating system taken after the candidate was built, so nothing about a judged input can have been
known to it. A breach seen early is held back until its own rung, so that the rung a candidate stopped at
says how far its values were right.
"""

import math
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from evotune.errors import StudyError
from evotune.fitness.arena import (
    GUARD,
    POISON,
    Arena,
    Flush,
    Placement,
    changed_bits,
    nan_word,
    unwritten,
)
from evotune.fitness.operator import (
    Array,
    Case,
    GateCase,
    GateEntry,
    Law,
    Level,
    Operator,
    Parameter,
    Placeable,
    Workload,
    specialization,
)
from evotune.fitness.outcome import Failed, Failure, Stage
from evotune.fitness.runner import Call, Fault
from evotune.search_space.template import Specialization

_CASE_RUNGS = (Stage.SMOKE, Stage.EDGES, Stage.REGIMES)
_REPEATED_CASES: Mapping[Level, int] = {"screen": 1, "full": 4}
_QUERY_TIMEOUT_S = 1.0


@dataclass(frozen=True)
class GateLimits:
    """What a judged call may use.

    Attributes:
        call_timeout_s: one call on a gate case; gate cases take an honest kernel milliseconds.
        arena_mib: memory shared with the runner, touched only as needed.
        workspace_mib: the largest workspace a kernel may ask for on any case.
    """

    call_timeout_s: float = 2.0
    arena_mib: int = 1024
    workspace_mib: int = 64


@dataclass(frozen=True)
class CaseResult:
    """One thing that was looked at. `failure` is None when it was right; `ratio` is error over bound."""

    stage: Stage
    case: str
    ratio: float = 0.0
    failure: Failure | None = None
    detail: str = ""


@dataclass(frozen=True)
class GateReport:
    """Everything looked at, in order; ends at the first failure unless the gate was asked to explain."""

    level: Level
    results: tuple[CaseResult, ...]

    @property
    def failed(self) -> Failed | None:
        """The first failure, or None: passed."""
        for result in self.results:
            if result.failure is not None:
                return Failed(result.failure, result.stage, result.detail, case=result.case)
        return None

    @property
    def worst_error(self) -> float:
        """The largest error over bound against solved cases."""
        return max((result.ratio for result in self.results if result.stage in _CASE_RUNGS), default=0.0)

    def failures(self, stage: Stage) -> list[CaseResult]:
        return [r for r in self.results if r.stage == stage and r.failure is not None]


class CaseBook:
    """Cases solved once, from seeds of the operating system, and fresh variants of them. For any thread."""

    def __init__(self, operator: Operator) -> None:
        self._operator = operator
        self._solved: dict[str, Case] = {}
        self._begun: dict[str, Future[Case]] = {}
        self._solving = threading.Lock()

    def begin(self, workload: Workload, elsewhere: Executor) -> None:
        """Have it solved in another process; `solved` waits for that."""
        with self._solving:
            if workload.name not in self._solved and workload.name not in self._begun:
                seed = secrets.randbits(31)
                self._begun[workload.name] = elsewhere.submit(_solve, self._operator, workload, seed)

    def solved(self, workload: Workload) -> Case:
        """The case whose variants `fresh` gives; costs a solution only the first time. Raises StudyError when
        it was begun in a process that ended before it."""
        with self._solving:
            case = self._solved.get(workload.name)
            if case is None:
                begun = self._begun.pop(workload.name, None)
                case = _result(begun) if begun else self._operator.solve(workload, secrets.randbits(31))
                self._solved[workload.name] = case
        return case

    def fresh(self, workload: Workload, rng: np.random.Generator) -> Case:
        """A variant nobody has seen."""
        return self.solved(workload).fresh(rng)


def _result(begun: "Future[Case]") -> Case:
    """Such a process begins with its parent's script: where that has no guard, it runs it all again, and
    dies. Raises StudyError."""
    try:
        return begun.result()
    except BrokenProcessPool as error:
        raise StudyError(
            "a process that solved a problem ended early; a script that calls evotune does so under "
            '`if __name__ == "__main__":`, since such processes begin with it'
        ) from error


def _solve(operator: Operator, workload: Workload, seed: int) -> Case:
    return operator.solve(workload, seed)


@dataclass(frozen=True)
class Called:
    """What one call left behind. `poison` is the word that its outputs held before it."""

    outputs: Mapping[str, Array]
    breach: str | None
    poison: int
    call: Call


class Judged(Protocol):
    """A process with a candidate's objects, on any device; `runner.Runner` is the host's.

    Whatever memory the kernel works on, before a call it holds what the arena holds, and after it the other
    way round, guards included: so the parent looks at its own arena alone.
    """

    @property
    def arena(self) -> Arena: ...
    @property
    def alive(self) -> bool: ...
    @property
    def repeats(self) -> int:
        """How often the calls that must give equal bits are made once more: races need their luck."""
        ...

    def call(self, index: int, placement: Placement, timeout_s: float) -> Call: ...
    def workspace_bytes(self, index: int, sizes: Sequence[int], timeout_s: float) -> int: ...
    def fence(self, placement: Placement) -> None:
        """Take the rights to the guard pages away, where a device can."""
        ...

    def unfence(self, placement: Placement) -> None: ...
    def close(self) -> None: ...


Process = TypeVar("Process", bound=Judged)


@dataclass
class Session(Generic[Process]):
    """One candidate under judgement: its signatures, and a runner that is replaced after a fault.

    Attributes:
        start: makes a runner with all of the candidate's objects; see `Runner` for what it raises.
        signatures: of each object, in the order in which `start` loads them.
    """

    start: Callable[[], Process]
    signatures: Sequence[Sequence[Parameter]]
    limits: GateLimits
    _runner: Process | None = None
    _workspaces: dict[tuple[int, tuple[int, ...]], int] = field(default_factory=dict)

    @property
    def runner(self) -> Process:
        """A living runner. Raises Fault when the objects cannot be loaded, SandboxError when nothing can."""
        if self._runner is None or not self._runner.alive:
            self.close()
            self._runner = self.start()
        return self._runner

    def workspace_bytes(self, index: int, case: Placeable) -> int:
        """What object `index` asks for on this case. Raises Fault when that is negative or too much."""
        sizes = tuple(case.sizes[p.name] for p in self.signatures[index] if p.role == "size")
        wanted = self._workspaces.get((index, sizes))
        if wanted is None:
            wanted = self.runner.workspace_bytes(index, sizes, _QUERY_TIMEOUT_S)
            if not 0 <= wanted <= self.limits.workspace_mib << 20:
                raise Fault(
                    Failure.OVER_BUDGET,
                    f"asks for a workspace of {wanted} bytes, allowed are {self.limits.workspace_mib} MiB",
                )
            self._workspaces[index, sizes] = wanted
        return wanted

    def place(
        self, index: int, case: Case, *, begin: int = 0, flush: Flush = "end", poison: int = POISON
    ) -> Placement:
        """Lay a case out in the runner's arena. Raises Fault."""
        return self.place_in(self.runner, index, case, begin=begin, flush=flush, poison=poison)

    def place_in(
        self,
        runner: Process,
        index: int,
        case: Case,
        *,
        begin: int = 0,
        flush: Flush = "end",
        poison: int = POISON,
    ) -> Placement:
        """The same for a process of one's own. Raises Fault."""
        workspace_bytes = self.workspace_bytes(index, case)
        return runner.arena.place(
            self.signatures[index],
            case,
            begin=begin,
            workspace_bytes=workspace_bytes,
            flush=flush,
            poison=poison,
        )

    def call(self, index: int, case: Case) -> Called:
        """Place a case, call object `index` on it, look at everything it left. Raises Fault."""
        placement = self.place(index, case)
        call = self.runner.call(index, placement, self.limits.call_timeout_s)
        return self.look(placement, case, call, POISON)

    def call_fenced(self, index: int, case: Case, begin: int, flush: Flush, poison: int) -> Called:
        """As `call`, with no rights to the pages round each buffer. Raises Fault."""
        placement = self.place(index, case, begin=begin, flush=flush, poison=poison)
        self.runner.fence(placement)
        call = self.runner.call(index, placement, self.limits.call_timeout_s)
        self.runner.unfence(placement)
        return self.look(placement, case, call, poison)

    def look(self, placement: Placement, case: Case, call: Call, poison: int = POISON) -> Called:
        arena = self.runner.arena
        return Called(arena.outputs(placement), arena.breach(placement, case), poison, call)

    def close(self) -> None:
        if self._runner is not None:
            self._runner.close()
            self._runner = None


class Gate:
    """Judges candidates of one operator; keeps the solved cases.

    `timed` are the workloads that candidates are timed on: at level full they are also tried on hostile
    values of exactly those shapes, since a kernel can know a timed problem by its shape.
    """

    def __init__(self, operator: Operator, timed: Sequence[Workload] = ()) -> None:
        self.operator = operator
        self.cases = CaseBook(operator)
        self._timed = timed

    def entries(self, spec: Specialization, level: Level) -> list[GateEntry]:
        """All cases of the rungs smoke, edges, regimes, in order."""
        found = list(self.operator.gate_cases(spec, level))
        for workload in self._timed if level == "full" else ():
            hostile = self.operator.hostile(workload)
            if hostile is not None and specialization(self.operator, workload) == spec:
                found.append(GateCase("regimes", hostile.name, hostile))
        return found

    def prepare(
        self, specs: Sequence[Specialization], level: Level, elsewhere: Executor | None = None
    ) -> None:
        """Solve the cases of a level now, such as while the first objects are being built.

        In processes `elsewhere` without waiting for them, or else here, in a thread for each processor: numpy
        lets go of the interpreter for most of it.
        """
        with ExitStack() as stack:
            if elsewhere is None:
                elsewhere = stack.enter_context(ThreadPoolExecutor(os.cpu_count()))
            for spec in specs:
                for entry in self.entries(spec, level):
                    self.cases.begin(entry.workload, elsewhere)

    def judge(
        self, session: Session[Any], specs: Sequence[Specialization], level: Level, *, explain: bool = False
    ) -> GateReport:
        """Run the rungs over one session, whose object i is for `specs[i]`.

        Stops at the first failure; `explain` goes on to the end. Raises SandboxError and StudyError only.
        """
        results: list[CaseResult] = []
        for result in _Judgement(self, session, specs, level).results():
            results.append(result)
            if result.failure is not None and not explain:
                break
        return GateReport(level, tuple(results))


class _Judgement:
    """One pass of one candidate through the rungs."""

    def __init__(
        self, gate: Gate, session: Session[Any], specs: Sequence[Specialization], level: Level
    ) -> None:
        self.gate = gate
        self.session = session
        self.specs = specs
        self.level: Level = level
        self.rng = np.random.default_rng(secrets.randbits(128))
        self.breaches: list[tuple[str, str]] = []
        self.cases = [gate.entries(spec, level) for spec in specs]

    def results(self) -> Iterator[CaseResult]:
        for stage in _CASE_RUNGS:
            for index, cases in enumerate(self.cases):
                for entry in cases:
                    if entry.rung == stage.value:
                        yield self._against_truth(stage, index, entry)
        for index, spec in enumerate(self.specs):
            for law in self.gate.operator.laws(spec, self.level):
                yield self._law(index, law)
        yield self._buffers("buffers")
        for index in range(len(self.specs)):
            for _ in range(_REPEATED_CASES[self.level]):
                yield self._repeated(index)
        yield self._buffers("buffers, called twice")

    def _name(self, index: int, name: str) -> str:
        return name if len(self.specs) == 1 else f"{name} [{self.specs[index].label}]"

    def _call(self, index: int, case: Case, name: str) -> Called:
        called = self.session.call(index, case)
        if called.breach is not None:
            self.breaches.append((name, called.breach))
        return called

    def _against_truth(self, stage: Stage, index: int, entry: GateEntry) -> CaseResult:
        name = self._name(index, entry.name)
        case = self.gate.cases.fresh(entry.workload, self.rng)
        return against_truth(stage, name, case, lambda case: self._call(index, case, name))

    def _law(self, index: int, law: Law) -> CaseResult:
        name = self._name(index, law.name)
        return against_law(name, law, lambda case: self._call(index, case, name), self.rng)

    def _telling(self, index: int) -> Case:
        """A fresh case of a random rung but smoke that has something to compute, where there is one."""
        entries = [entry for entry in self.cases[index] if entry.rung != "smoke"] or self.cases[index]
        for at in self.rng.permutation(len(entries)):
            case = self.gate.cases.fresh(entries[int(at)].workload, self.rng)
            if any(extent and 0 not in extent[0] for extent in case.outputs.values()):
                break
        return case

    def _repeated(self, index: int) -> CaseResult:
        """Call A, B, A, the A behind fences: they differ in place, alignment beyond 64 bytes, and poison."""
        case, other = self._telling(index), self._telling(index)
        name = self._name(index, f"{case.name}, called twice")
        result, breaches = called_twice(self.session, index, name, (case, other), self.rng)
        self.breaches += [(name, breach) for breach in breaches]
        return result

    def _buffers(self, name: str) -> CaseResult:
        """The first breach since this was last asked."""
        if not self.breaches:
            return CaseResult(Stage.INTEGRITY, name)
        name, breach = self.breaches[0]
        self.breaches.clear()
        return CaseResult(Stage.INTEGRITY, name, math.inf, Failure.WRONG, breach)


def against_truth(stage: Stage, name: str, case: Case, call: Callable[[Case], Called]) -> CaseResult:
    """One call beside its solution; a fault is a result too."""
    try:
        called = call(case)
    except Fault as fault:
        return CaseResult(stage, name, math.inf, fault.failure, fault.detail)
    return compared(stage, name, case, called)


def against_law(name: str, law: Law, call: Callable[[Case], Called], rng: np.random.Generator) -> CaseResult:
    """One check of a law; a fault is a result too."""
    try:
        worst = law.check(lambda case: call(case).outputs, rng)
    except Fault as fault:
        return CaseResult(Stage.LAWS, name, math.inf, fault.failure, fault.detail)
    if worst.ratio <= 1:
        return CaseResult(Stage.LAWS, name, worst.ratio)
    return CaseResult(Stage.LAWS, name, worst.ratio, Failure.WRONG, worst.detail)


def called_twice(
    session: Session[Any], index: int, name: str, cases: tuple[Case, Case], rng: np.random.Generator
) -> tuple[CaseResult, list[str]]:
    """Call A, B, A, the A behind fences: they differ in place, alignment beyond 64 bytes, and poison.

    Also gives what was breached in any of the calls.
    """
    case, other = cases
    elsewhere = GUARD * int(rng.integers(1, 64))
    try:
        once = session.call_fenced(index, case, 0, "end", POISON)
        between = session.call(index, other)
        poison = nan_word(rng)
        again = session.call_fenced(index, case, elsewhere, "start", poison)
        later = [session.call(index, case) for _ in range(session.runner.repeats)]
    except Fault as fault:
        return CaseResult(Stage.INTEGRITY, name, math.inf, fault.failure, _fenced(fault)), []
    breaches = [c.breach for c in (once, between, again, *later) if c.breach is not None]
    repeated = ((again, poison), *((called, POISON) for called in later))
    for called, word in repeated:
        differs = changed_bits(once.outputs, called.outputs, (POISON, word))
        if differs is not None:
            return CaseResult(Stage.INTEGRITY, name, math.inf, Failure.UNSTABLE, differs), breaches
    return CaseResult(Stage.INTEGRITY, name), breaches


def compared(stage: Stage, name: str, case: Case, called: Called) -> CaseResult:
    """Outputs against truth. A ratio that is not a number fails."""
    worst = case.worst(called.outputs)
    if worst.ratio <= 1:
        return CaseResult(stage, name, worst.ratio)
    left = unwritten(called.outputs, called.poison)
    detail = worst.detail if left is None else f"{worst.detail}; {left}"
    return CaseResult(stage, name, worst.ratio, Failure.WRONG, detail)


def _fenced(fault: Fault) -> str:
    if fault.failure is Failure.FAULT and fault.detail.startswith("SIGSEGV"):
        return "SIGSEGV: read or wrote outside its buffers, where a guard page without rights was"
    return fault.detail
