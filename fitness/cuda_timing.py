"""GPU timing: candidate and baseline, each in its own process, take turns on inputs that neither has seen.

Per workload, `SETS` problems are drawn after the candidate was built and laid out in its process. A *burst*
is a few calls in a row, replays of a captured graph of one call and plain calls in random order, each behind
a kernel that waits until the host has issued it, between two events, from a cold L2 and with poisoned outputs
and workspace. Bursts of candidate and baseline alternate, every two pairs of them as ABBA or BAAB by a coin
of their own; a process whose turn it is not has nothing on the GPU. The graphs' times are the samples; all
are kept. A race may end a workload early (`racing.py`). Then one problem's inputs are replaced in place, and
the captured call is replayed once more: memory outlives calls in a process that cannot be forked, and a
kernel that answers from memory it should not have is either wrong there or slower than it was. Afterwards
guards, inputs and a random copy of the pool in each problem's outputs are compared: what was timed is what
was right. Before a promotion hostile values take the same place once, not timed: a kernel can know a timed
problem by its shape.

The baseline is the template's own kernel, which has nothing to learn from a problem: its problems, drawn like
the candidate's, are laid out and captured once and stay for as long as its process. A candidate gets problems
that nobody has seen.

One candidate is timed at a time (`Shared.window`). Others are built, gated, laid out and compared meanwhile.

The candidate's launch code runs in the process that reads the events, so what it reports is cross-checked:

- a graph without kernels means launches on another stream, outside the events;
- no report can exceed what the parent waited;
- no time can lie below what moving the workload's bytes takes at the device's own copy bandwidth, what the L2
  may hold left out;
- graph and plain call may differ by `us` and `part` of the time, in the median: else it is "quarantined";
- the shortest wait beyond a burst's report cannot exceed the baseline's by more than `hidden_us` a call and
  `hidden` of the time;
- nor may a replay on values that were not seen before take `unseen` of the median longer.

All of these are FORGED: the first three at once, the others (`Bands`) when they fail in two blocks of two,
the second without a race.
"""

import multiprocessing
import os
import secrets
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from evotune.fitness.arena import lay_out
from evotune.fitness.cuda_runner import KINDS, Armed, Burst, CudaProcess, Prepared
from evotune.fitness.gate import CaseBook, Session
from evotune.fitness.operator import Case, DeviceOperator, Spread, Workload, specialization
from evotune.fitness.outcome import Failed, Failure, Measurement, Stage
from evotune.fitness.racing import NO_BARS, Bars, Heat, Racing
from evotune.fitness.runner import Fault
from evotune.fitness.timing import Target, Timed, TimingPlan, blaming_baseline, candidate_first

SETS = 2
"""Problems of one workload, taken in turn. Every timed call starts from a cold L2 anyway."""

BURST = 8
"""Replays in a row. A change of sides costs 0.3 ms, and 2 ms on a busy machine, in which the GPU has nothing
to do; eight calls of the shortest workload take 3 ms."""

_FASTEST = 1.2  # of the copy bandwidth: what reading alone may reach beyond it
_SHORTEST_SLEEP_US = 100.0
_LONGEST_SLEEP_US = 10_000.0


@dataclass(frozen=True)
class Bands:
    """How far clocks may disagree.

    Attributes:
        us, part: between the median of graphs and that of plain calls; `part` is of the graphs'.
        hidden_us, hidden: by how much a burst's shortest wait beyond its report may exceed the baseline's:
            so much a call, and this part of the reported times.
        unseen: by how much longer than the median a replay on values just put there may take, plus `us`.
    """

    us: float = 10.0
    part: float = 0.15
    hidden_us: float = 250.0
    hidden: float = 0.1
    unseen: float = 0.3

    def hold(self, graph_us: float, plain_us: float) -> bool:
        return abs(graph_us - plain_us) <= self.us + self.part * graph_us


def floor_us(bytes_moved: float, l2_bytes: int, copy_bytes_per_us: float) -> float:
    """No call that moves so many bytes takes less; what the L2 holds need not have left it."""
    return max(0.0, bytes_moved - l2_bytes) / (_FASTEST * copy_bytes_per_us)


class Solvers:
    """Processes that solve problems ahead.

    `nice` lets builds and what is judged go first: eight that solved for later comparisons at the priority of
    those halved the rate of a study on 16 cores for 25 s.
    """

    def __init__(self, processes: int, nice: int = 0) -> None:
        context = multiprocessing.get_context("spawn")
        self.executor = ProcessPoolExecutor(
            processes, mp_context=context, initializer=os.nice, initargs=(nice,)
        )

    def close(self) -> None:
        """End what is still being solved."""
        for process in list((getattr(self.executor, "_processes", None) or {}).values()):
            process.terminate()
        self.executor.shutdown(cancel_futures=True)


class Pools:
    """The small solved problems behind each workload, from seeds of the operating system.

    Solving takes seconds to a minute each: all start at once, each in a process of its own.
    """

    def __init__(
        self,
        operator: DeviceOperator,
        workloads: Sequence[Workload],
        solvers: Executor,
        *,
        hostile: bool = False,
    ) -> None:
        """`hostile`: also a pool of hostile values for each workload that has such."""
        self._operator = operator
        self._cases = CaseBook(operator)
        self._examples: dict[str, Spread] = {}
        self._hostile: dict[str, Workload] = {}
        for workload in workloads:
            self._cases.begin(operator.pool(workload), solvers)
        for workload in workloads if hostile else ():
            other = operator.hostile(workload)
            if other is not None:
                self._hostile[workload.name] = other
                self._cases.begin(operator.pool(other), solvers)

    def pool(self, workload: Workload) -> Case:
        return self._cases.solved(self._operator.pool(workload))

    def spread(self, workload: Workload, rng: np.random.Generator) -> Spread:
        """A fresh problem of a workload; waits for its pool the first time."""
        return self._operator.spread(workload, self.pool(workload), rng)

    def hostile(self, workload: Workload, rng: np.random.Generator) -> Spread | None:
        """A fresh problem of its shapes with hostile values; None where these pools have no such."""
        other = self._hostile.get(workload.name)
        return None if other is None else self.spread(other, rng)

    def example(self, workload: Workload) -> Spread:
        """A problem of a workload's shapes, always the same one."""
        if workload.name not in self._examples:
            self._examples[workload.name] = self.spread(workload, np.random.default_rng(0))
        return self._examples[workload.name]


class Room:
    """GPU memory for the problems of candidates: whoever would exceed it waits, but never for nobody."""

    def __init__(self, total_bytes: int) -> None:
        self._total = total_bytes
        self._taken = 0
        self._changed = threading.Condition()

    @contextmanager
    def of(self, wanted: int) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._taken or self._taken + wanted <= self._total)
            self._taken += wanted
        try:
            yield
        finally:
            with self._changed:
                self._taken -= wanted
                self._changed.notify_all()


@dataclass
class _Posed:
    """One workload's problems in a kernel's process, and its captured calls on them."""

    target: Target
    numbers: Sequence[int]
    spreads: list[Spread]
    prepared: Prepared
    unseen: Spread | None = None
    tried: bool = False
    armed: list[Armed] = field(default_factory=list)

    @property
    def poisoned_bytes(self) -> int:
        """What is written before each timed call."""
        return sum(b.size for b in self.prepared.placement.buffers if b.role != "input")

    def bring(self, process: CudaProcess, spread: Spread) -> None:
        """Have a problem ready to take the first one's place. Raises Fault."""
        roles = {b.role: b.size for b in self.prepared.placement.buffers}
        process.successor(self.numbers[0], self.target.index, spread, roles.get("workspace", 0))
        self.unseen = spread

    def succeed(self, process: CudaProcess, timeout_s: float) -> float:
        """Let it take that place; us of one replay on values that were never there. Raises Fault."""
        assert self.unseen is not None
        number = self.numbers[0]
        self.prepared = process.succeed(number, self.prepared)
        self.spreads[0], self.unseen = self.unseen, None
        return process.sample(number, KINDS[:1], _SHORTEST_SLEEP_US, timeout_s).graph_us[0]


@dataclass
class Laid:
    """A kernel's problems of all workloads of a round, in a process of its own."""

    pools: Pools
    posed: list[_Posed]

    def holds(self, pools: Pools, targets: Sequence[Target]) -> bool:
        return pools is self.pools and list(targets) == [posed.target for posed in self.posed]


@dataclass
class Shared:
    """What the timers of one GPU have in common.

    Attributes:
        checks: where outputs are compared with the truth.
        room: what candidates' problems may take of the GPU's memory.
        window: held while a candidate is timed, and by whoever asks the baseline's process anything.
        standing: problems that stay laid out, by process.
        usual_us: the baseline's time by workload, for timeouts.
        l2_bytes, copy_bytes_per_us: of the device, for the physical floor.
    """

    checks: Executor
    room: Room
    l2_bytes: int
    copy_bytes_per_us: float
    bands: Bands
    racing: Racing
    window: Any = field(default_factory=threading.RLock)
    standing: WeakKeyDictionary[CudaProcess, Laid] = field(default_factory=WeakKeyDictionary)
    usual_us: dict[str, float] = field(default_factory=dict)
    _laws: Any = field(default_factory=threading.Lock)

    def heat(self, workload: str, planned: int, bars: Bars) -> Heat:
        """See `Racing.heat`."""
        with self._laws:
            return self.racing.heat(workload, planned, bars)

    def learn(self, heats: Sequence[Heat]) -> None:
        """See `Heat.learn`."""
        with self._laws:
            for heat in heats:
                heat.learn()


@dataclass
class _Side:
    """One kernel's bursts on one workload."""

    process: CudaProcess
    posed: _Posed
    copy_bytes_per_us: float
    bursts: list[Burst] = field(default_factory=list)
    beyond_us: list[float] = field(default_factory=list)

    def sample(self, turn: int, order: Sequence[str], sleep_us: float, timeout_s: float) -> float:
        """One burst; the median of its replays. Raises Fault.

        What poisoning takes is known and differs with the workspace: it is no part of what was waited for.
        """
        number = self.posed.numbers[turn % len(self.posed.numbers)]
        burst = self.process.sample(number, order, sleep_us, timeout_s)
        poisoning_us = len(order) * self.posed.poisoned_bytes / (self.copy_bytes_per_us / 2)
        self.bursts.append(burst)
        self.beyond_us.append(burst.waited_us - burst.reported_us - poisoning_us)
        return median(burst.graph_us)

    @property
    def graph_us(self) -> tuple[float, ...]:
        return tuple(us for burst in self.bursts for us in burst.graph_us)

    @property
    def plain_us(self) -> tuple[float, ...]:
        return tuple(us for burst in self.bursts for us in burst.plain_us)


@dataclass
class _Block:
    """One workload's samples, and the checks of its outputs."""

    mine: _Side
    theirs: _Side
    heat: Heat
    unseen_us: float = 0.0
    checks: list[Future[Any]] = field(default_factory=list)
    breach: str | None = None

    @property
    def target(self) -> Target:
        return self.mine.posed.target

    @property
    def measurement(self) -> Measurement:
        workload = self.target.workload
        return Measurement(workload.name, workload.group, self.mine.graph_us, self.theirs.graph_us)


def disagreement(mine: _Side, theirs: _Side, unseen_us: float, bands: Bands) -> str | None:
    """Why a candidate's bursts are not believed beside the baseline's, and beside a call on unseen values."""
    graph_us, plain_us = median(mine.graph_us), median(mine.plain_us)
    if not bands.hold(graph_us, plain_us):
        return f"quarantined: {graph_us:.1f} us as a graph, {plain_us:.1f} us as a plain call"
    if unseen_us > bands.us + (1 + bands.unseen) * graph_us:
        return f"takes {unseen_us:.1f} us on values it has not seen, {graph_us:.1f} us on those it has"
    beyond_us = min(mine.beyond_us) - min(theirs.beyond_us)
    longest = max(mine.bursts, key=lambda burst: burst.reported_us)
    calls = len(longest.graph_us) + len(longest.plain_us)
    if beyond_us > bands.hidden_us * calls + bands.hidden * longest.reported_us:
        return f"its clock leaves out {beyond_us:.0f} us of {calls} calls, more than the slack allows"
    return None


@dataclass(frozen=True)
class CudaTimer:
    """Times candidates on the workloads of a round against a session that stays alive between them."""

    operator: DeviceOperator
    cases: CaseBook
    pools: Pools
    targets: Sequence[Target]
    plan: TimingPlan
    shared: Shared

    def time(
        self,
        candidate: Session[CudaProcess],
        baseline: Session[CudaProcess],
        bars: Bars = NO_BARS,
        *,
        keep: bool = False,
    ) -> Timed | Failed:
        """One block per workload; all of them a second time when the first one's clocks disagree.

        `keep` leaves the candidate's problems where they are, for the next block of a comparison.
        Raises BaselineFault, SandboxError, StudyError.
        """
        rng = np.random.default_rng(secrets.randbits(128))
        for raced in (bars, NO_BARS):
            try:
                with self.shared.room.of(0 if keep else self._bytes(candidate)):
                    blocks, host_call_us = self._measured(candidate, baseline, raced, keep, rng)
            except Fault as fault:
                return Failed(fault.failure, Stage.TIME, fault.detail)
            doubts = [doubt for block in blocks if (doubt := self._doubt(block)) is not None]
            if not doubts:
                return self._accept(blocks, host_call_us)
        return doubts[0]

    def _measured(
        self,
        candidate: Session[CudaProcess],
        baseline: Session[CudaProcess],
        bars: Bars,
        keep: bool,
        rng: np.random.Generator,
    ) -> tuple[list[_Block], float]:
        """Blocks that ran to their end, and the host cost of a call. Raises Fault, BaselineFault."""
        process = candidate.runner
        mine = self._standing(process, candidate, rng) if keep else self._laid(process, candidate, rng)
        if not all(target.workload.name in self.shared.usual_us for target in self.targets):
            with self.shared.window:
                self._baselines(baseline, rng)
        for posed in mine.posed:
            self._arm(process, posed, self._timeout_s(posed.target))
            posed.bring(process, self.pools.spread(posed.target.workload, rng))
        with self.shared.window:
            blocks = self._blocks(process, mine, baseline, bars, rng)
        for block in blocks:
            for number in range(SETS):
                self._look(block, number, rng)
            if not block.mine.posed.tried:
                self._try_hostile(block, rng)
        return blocks, self._host_call_us(candidate, rng)

    def _doubt(self, block: _Block) -> Failed | None:
        reason = disagreement(block.mine, block.theirs, block.unseen_us, self.shared.bands)
        name = block.target.workload.name
        return None if reason is None else Failed(Failure.FORGED, Stage.TIME, reason, case=name)

    def canary(self, baseline: Session[CudaProcess]) -> "Canary":
        """The baseline's medians on the first workload, nobody else timed. Raises BaselineFault."""
        rng = np.random.default_rng(secrets.randbits(128))
        with self.shared.window:
            process, theirs = self._baselines(baseline, rng)
            side = _Side(process, theirs.posed[0], self.shared.copy_bytes_per_us)
            with blaming_baseline():
                for turn, size in enumerate(_sizes(self.plan.samples)):
                    side.sample(turn, _order(size, rng), _SHORTEST_SLEEP_US, _patience_s(baseline))
        return Canary(median(side.graph_us), max(burst.waited_us for burst in side.bursts))

    def _bytes(self, session: Session[CudaProcess]) -> int:
        """What the problems of all workloads take on the GPU. Raises Fault."""
        total = 0
        for target in self.targets:
            shapes = self.pools.example(target.workload)
            workspace_bytes = session.workspace_bytes(target.index, shapes)
            signature = session.signatures[target.index]
            total += SETS * lay_out(signature, shapes, workspace_bytes=workspace_bytes).end
        return total

    def _laid(self, process: CudaProcess, session: Session[CudaProcess], rng: np.random.Generator) -> Laid:
        """Fresh problems of all workloads in a kernel's process instead of what it held. Raises Fault."""
        process.release()
        posed = []
        for i, target in enumerate(self.targets):
            drawn = rng.spawn(SETS)
            spreads = list(self.shared.checks.map(self.pools.spread, [target.workload] * SETS, drawn))
            list(self.shared.checks.map(lambda spread: spread.gathers, spreads))
            numbers = range(i * SETS, (i + 1) * SETS)
            workspace_bytes = session.workspace_bytes(target.index, spreads[0])
            prepared = process.prepare(numbers, target.index, spreads, workspace_bytes)
            posed.append(_Posed(target, numbers, spreads, prepared))
        return Laid(self.pools, posed)

    def _standing(
        self, process: CudaProcess, session: Session[CudaProcess], rng: np.random.Generator
    ) -> Laid:
        """Problems of this round that the process holds already, else fresh ones. Raises Fault."""
        found = self.shared.standing.get(process)
        if found is None or not found.holds(self.pools, self.targets):
            found = self.shared.standing[process] = self._laid(process, session, rng)
        return found

    def _baselines(
        self, baseline: Session[CudaProcess], rng: np.random.Generator
    ) -> tuple[CudaProcess, Laid]:
        """The baseline's process and problems, its calls captured. In the window. Raises BaselineFault."""
        with blaming_baseline():
            process = baseline.runner
            found = self._standing(process, baseline, rng)
            for posed in found.posed:
                self._arm(process, posed, _patience_s(baseline))
                self.shared.usual_us[posed.target.workload.name] = max(armed.us for armed in posed.armed)
        return process, found

    def _arm(self, process: CudaProcess, posed: _Posed, timeout_s: float) -> None:
        """Warm up and capture, unless that was done. Raises Fault."""
        if posed.armed:
            return
        armed = [process.arm(n, _SHORTEST_SLEEP_US, timeout_s) for n in posed.numbers]
        if min(one.kernels for one in armed) < 1:
            process.close()
            raise Fault(Failure.FORGED, "launches nothing on the stream it was given")
        posed.armed = armed

    def _timeout_s(self, target: Target) -> float:
        """For a burst, and for two plain calls, a replay and, the first time, the loading of device code."""
        usual_s = self.shared.usual_us[target.workload.name] / 1e6
        return 1.0 + 2 * BURST * max(self.plan.shortest_timeout_s, self.plan.slowest * usual_s)

    def _blocks(
        self,
        process: CudaProcess,
        mine: Laid,
        baseline: Session[CudaProcess],
        bars: Bars,
        rng: np.random.Generator,
    ) -> list[_Block]:
        """One for each workload. In the window. Raises Fault, BaselineFault."""
        other, theirs = self._baselines(baseline, rng)
        bursts, blocks = len(_sizes(self.plan.samples)), []
        for posed, usual in zip(mine.posed, theirs.posed, strict=True):
            heat = self.shared.heat(posed.target.workload.name, bursts, bars)
            bandwidth = self.shared.copy_bytes_per_us
            blocks.append(_Block(_Side(process, posed, bandwidth), _Side(other, usual, bandwidth), heat))
            self._run(blocks[-1], rng)
            blocks[-1].unseen_us = posed.succeed(process, self._timeout_s(posed.target))
        return blocks

    def _run(self, block: _Block, rng: np.random.Generator) -> None:
        """The timed bursts on one workload, until a race ends them. Raises Fault, BaselineFault."""
        mine, theirs, heat = block.mine, block.theirs, block.heat
        issue_us = max(armed.issue_us for side in (mine, theirs) for armed in side.posed.armed)
        sleep_us = min(max(2 * issue_us, _SHORTEST_SLEEP_US), _LONGEST_SLEEP_US)  # alike for both
        timeout_s, sizes = self._timeout_s(block.target), _sizes(self.plan.samples)
        heat.start()
        for turn, (size, first) in enumerate(zip(sizes, candidate_first(len(sizes), rng), strict=True)):
            order, mine_us = _order(size, rng), 0.0
            if first:
                mine_us = mine.sample(turn, order, sleep_us, timeout_s)
            with blaming_baseline():
                theirs_us = theirs.sample(turn, order, sleep_us, 10 * timeout_s)
            if not first:
                mine_us = mine.sample(turn, order, sleep_us, timeout_s)
            if heat.pair(theirs_us, mine_us):
                return

    def _look(self, block: _Block, which: int, rng: np.random.Generator) -> None:
        """One problem's buffers; a random copy's outputs go to be compared. Raises Fault."""
        posed = block.mine.posed
        spread = posed.spreads[which]
        copy = int(rng.integers(spread.copies))
        breach, outputs = block.mine.process.look(posed.numbers[which], posed.prepared, spread.place(copy))
        block.breach = block.breach or breach
        block.checks.append(self.shared.checks.submit(_compared, spread, copy, outputs))

    def _try_hostile(self, block: _Block, rng: np.random.Generator) -> None:
        """One replay on hostile values in the first problem's memory, where there are any. Raises Fault."""
        process, posed = block.mine.process, block.mine.posed
        posed.tried, timeout_s = True, self._timeout_s(posed.target)
        spread = self.pools.hostile(posed.target.workload, rng)
        if spread is None:
            return
        posed.bring(process, spread)
        posed.succeed(process, timeout_s)
        self._look(block, 0, rng)
        # The next block of a comparison is timed on the study's own values again.
        posed.bring(process, self.pools.spread(posed.target.workload, rng))
        posed.succeed(process, timeout_s)

    def _host_call_us(self, candidate: Session[CudaProcess], rng: np.random.Generator) -> float:
        """The dearest object's host cost of a call on the gate's first problem that has work.

        On an empty problem kernels are not even launched. Builds run beside it, so it is the least of rounds.
        """
        costs = []
        for target in {target.index: target for target in self.targets}.values():
            spec = specialization(self.operator, target.workload)
            entries = self.operator.gate_cases(spec, "screen")
            cases = (self.cases.fresh(entry.workload, rng) for entry in entries)
            case = next(case for case in cases if has_work(case))
            placement = candidate.place(target.index, case)
            costs.append(candidate.runner.host_cost_us(target.index, placement, self.plan.empty_calls))
        return max(costs)

    def _accept(self, blocks: Sequence[_Block], host_call_us: float) -> Timed | Failed:
        """Outputs right and times above the floor, or the failure."""
        worst_error = 0.0
        for block in blocks:
            name = block.target.workload.name
            for found in [future.result() for future in block.checks]:
                if not found.ratio <= 1:
                    return Failed(Failure.WRONG, Stage.TIME, found.detail, case=name)
                worst_error = max(worst_error, found.ratio)
            if block.breach is not None:
                return Failed(Failure.WRONG, Stage.TIME, block.breach, case=name)
            moved = self.operator.floor_us(block.target.workload, 1.0)
            floor = floor_us(moved, self.shared.l2_bytes, self.shared.copy_bytes_per_us)
            if min(block.mine.graph_us) < floor:
                detail = f"{min(block.mine.graph_us):.3g} us, below the {floor:.3g} us that its bytes take"
                return Failed(Failure.FORGED, Stage.TIME, detail, case=name)
        self.shared.learn([block.heat for block in blocks])
        saved_s = sum(block.heat.saved_s for block in blocks)
        return Timed(tuple(block.measurement for block in blocks), worst_error, host_call_us, saved_s)


@dataclass(frozen=True)
class Canary:
    """How the baseline does now: device time of a call, and the longest wait of the parent for a burst."""

    us: float
    longest_us: float


def _patience_s(session: Session[CudaProcess]) -> float:
    return 10 * session.limits.call_timeout_s


def _compared(spread: Spread, copy: int, outputs: dict[str, Any]) -> Any:
    return spread.worst(copy, outputs)


def has_work(case: Case) -> bool:
    """Whether no output is empty."""
    return all(0 not in shape for shape, _ in filter(None, case.outputs.values()))


def _sizes(samples: int) -> list[int]:
    """Replays of each burst: as even as can be, two bursts at least where there are two samples."""
    bursts = max(min(samples, 2), -(-samples // BURST))
    return [samples // bursts + (i < samples % bursts) for i in range(bursts)]


def _order(size: int, rng: np.random.Generator) -> list[str]:
    """Of a burst's calls: so many replays and half as many plain calls, whose times only cross-check."""
    graph, plain = KINDS
    calls = [graph] * size + [plain] * (-(-size // 2))
    return [calls[i] for i in rng.permutation(len(calls))]
