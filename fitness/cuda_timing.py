"""GPU timing: candidate and baseline, each in its own process, take turns on inputs that neither has seen.

Per workload, `SETS` problems are drawn after the candidate was built and laid out for both kernels. A timed
pair is a replay of a captured graph of one call and a plain call, each behind a kernel that sleeps until the
host has issued everything, between two events, from a cold L2 and with poisoned outputs and workspace. Pairs
of candidate and baseline alternate in balanced random order; a process that is not asked has nothing on the
GPU. The graph's time is the sample. All raw samples are kept. Afterwards guards, inputs and a random copy of
the pool in each problem's outputs are compared: what was timed is what was right.

The candidate's launch code runs in the process that reads the events, so what it reports is cross-checked:

- a graph without kernels means launches on another stream, outside the events: FORGED;
- graph and plain call may differ by `us` and `part` of the time, in the median: else FORGED, by name
  "quarantined";
- no report can exceed what the parent waited, and the shortest wait beyond a report cannot exceed the
  baseline's by more than `hidden_us` and `hidden` of the time: else FORGED;
- nor can a time lie below what moving the workload's bytes takes at the device's own copy bandwidth, what
  the L2 may hold left out.

The middle two (`Bands`) must fail in two blocks of two.
"""

import multiprocessing
import secrets
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np

from evotune.fitness.arena import Placement
from evotune.fitness.cuda_runner import CudaProcess
from evotune.fitness.gate import CaseBook, Session
from evotune.fitness.operator import Case, DeviceOperator, Spread, Workload, specialization
from evotune.fitness.outcome import Failed, Failure, Measurement, Stage
from evotune.fitness.runner import Fault
from evotune.fitness.timing import Target, Timed, TimingPlan, blaming_baseline

SETS = 2
"""Problems of one workload, taken in turn. Every timed call starts from a cold L2 anyway."""

_KINDS = ("graph", "plain")
_FASTEST = 1.2  # of the copy bandwidth: what reading alone may reach beyond it


@dataclass(frozen=True)
class Bands:
    """How far clocks may disagree.

    Attributes:
        us, part: between the median of graphs and that of plain calls; `part` is of the graphs'.
        hidden_us, hidden: by how much a pair's shortest wait beyond its report may exceed the baseline's;
            `hidden` is of the two reported times.
    """

    us: float = 10.0
    part: float = 0.15
    hidden_us: float = 500.0
    hidden: float = 0.1

    def hold(self, graph_us: float, plain_us: float) -> bool:
        return abs(graph_us - plain_us) <= self.us + self.part * graph_us


def floor_us(bytes_moved: float, l2_bytes: int, copy_bytes_per_us: float) -> float:
    """No call that moves so many bytes takes less; what the L2 holds need not have left it."""
    return max(0.0, bytes_moved - l2_bytes) / (_FASTEST * copy_bytes_per_us)


def _solved(operator: DeviceOperator, workload: Workload, seed: int) -> Case:
    return operator.solve(workload, seed)


class Pools:
    """The small solved problems behind each workload, from seeds of the operating system.

    Solving takes seconds to a minute each: all start at once, each in a process of its own.
    """

    def __init__(self, operator: DeviceOperator, workloads: Sequence[Workload], processes: int) -> None:
        self._operator = operator
        context = multiprocessing.get_context("spawn")
        self._executor = ProcessPoolExecutor(max(1, min(processes, len(workloads))), mp_context=context)
        self._solved: dict[str, Future[Case]] = {
            w.name: self._executor.submit(_solved, operator, operator.pool(w), secrets.randbits(31))
            for w in workloads
        }

    def pool(self, workload: Workload) -> Case:
        return self._solved[workload.name].result()

    def spread(self, workload: Workload, rng: np.random.Generator) -> Spread:
        """A fresh problem of a workload; waits for its pool the first time."""
        return self._operator.spread(workload, self.pool(workload), rng)

    def close(self) -> None:
        """End what is still being solved."""
        for process in list((getattr(self._executor, "_processes", None) or {}).values()):
            process.terminate()
        self._executor.shutdown(cancel_futures=True)


@dataclass
class _Side:
    """One kernel's half of a block."""

    process: CudaProcess
    copy_bytes_per_us: float
    placements: list[Placement] = field(default_factory=list)
    samples: list[tuple[float, float, float]] = field(default_factory=list)

    def prepare(self, session: Session[CudaProcess], index: int, spreads: Sequence[Spread]) -> None:
        for number, spread in enumerate(spreads):
            workspace_bytes = session.workspace_bytes(index, spread)
            self.placements.append(self.process.prepare(number, index, spread, workspace_bytes))

    def arm(self, timeout_s: float) -> float:
        """Warm up and capture every set; the slowest replay in us. Raises Fault."""
        said = [self.process.arm(number, timeout_s) for number in range(len(self.placements))]
        if min(report["kernels"] for report in said) < 1:
            self.process.close()
            raise Fault(Failure.FORGED, "launches nothing on the stream it was given")
        return max(report["us"] for report in said)

    def sample(self, turn: int, order: Sequence[str], timeout_s: float) -> None:
        """One timed pair. What poisoning takes is known and differs with the workspace: it is left out."""
        number = turn % len(self.placements)
        graph_us, plain_us, waited_us = self.process.sample(number, order, timeout_s)
        poisoned = sum(b.size for b in self.placements[number].buffers if b.role != "input")
        poisoning_us = 2 * poisoned / (self.copy_bytes_per_us / 2)
        self.samples.append((graph_us, plain_us, waited_us - poisoning_us))

    @property
    def graph_us(self) -> tuple[float, ...]:
        return tuple(graph for graph, _, _ in self.samples)


@dataclass
class _Block:
    """One workload's samples, and the checks of its outputs, which go on while the next one is timed."""

    target: Target
    mine: _Side
    theirs: _Side
    checks: list[Future[Any]] = field(default_factory=list)
    breach: str | None = None

    @property
    def measurement(self) -> Measurement:
        workload = self.target.workload
        return Measurement(workload.name, workload.group, self.mine.graph_us, self.theirs.graph_us)


def disagreement(
    mine: Sequence[tuple[float, float, float]],
    theirs: Sequence[tuple[float, float, float]],
    bands: Bands,
) -> str | None:
    """Why samples (graph, plain, waited; us) of a candidate are not believed beside the baseline's."""
    graph_us, plain_us = (median(sample[i] for sample in mine) for i in (0, 1))
    if not bands.hold(graph_us, plain_us):
        return f"quarantined: {graph_us:.1f} us as a graph, {plain_us:.1f} us as a plain call"
    beyond, usual = (min(w - g - p for g, p, w in samples) for samples in (mine, theirs))
    slack_us = bands.hidden_us + bands.hidden * (graph_us + plain_us)
    if beyond - usual > slack_us:
        return f"its clock leaves out {beyond - usual:.0f} us of a call, more than the slack allows"
    return None


@dataclass(frozen=True)
class CudaTimer:
    """Times candidates against a baseline session that stays alive between them.

    Attributes:
        checks: where outputs are compared with the truth.
        quiet: keeps others from the GPU while something is timed.
        l2_bytes, copy_bytes_per_us: of the device, for the physical floor.
    """

    operator: DeviceOperator
    cases: CaseBook
    pools: Pools
    targets: Sequence[Target]
    plan: TimingPlan
    checks: Executor
    quiet: Callable[[], AbstractContextManager[None]]
    l2_bytes: int
    copy_bytes_per_us: float
    bands: Bands

    def time(self, candidate: Session[CudaProcess], baseline: Session[CudaProcess]) -> Timed | Failed:
        """One block per workload; all of them a second time when the first one's clocks disagree.

        Raises BaselineFault, SandboxError, StudyError.
        """
        rng = np.random.default_rng(secrets.randbits(128))
        for _ in range(2):
            try:
                blocks = [self._block(target, candidate, baseline, rng) for target in self.targets]
                host_call_us = self._host_call_us(candidate, rng)
            except Fault as fault:
                return Failed(fault.failure, Stage.TIME, fault.detail)
            doubts = [doubt for block in blocks if (doubt := self._doubt(block)) is not None]
            if not doubts:
                return self._accept(blocks, host_call_us)
        return doubts[0]

    def _doubt(self, block: _Block) -> Failed | None:
        reason = disagreement(block.mine.samples, block.theirs.samples, self.bands)
        name = block.target.workload.name
        return None if reason is None else Failed(Failure.FORGED, Stage.TIME, reason, case=name)

    def canary_us(self, baseline: Session[CudaProcess]) -> float:
        """The baseline's median time on the first workload, alone on the GPU. Raises BaselineFault."""
        rng = np.random.default_rng(secrets.randbits(128))
        target = self.targets[0]
        with blaming_baseline():
            side = _Side(baseline.runner, self.copy_bytes_per_us)
            side.prepare(baseline, target.index, [self.pools.spread(target.workload, rng)])
            with self.quiet():
                side.arm(self._patience_s(baseline))
                for turn in range(self.plan.samples):
                    side.sample(turn, _KINDS, self._patience_s(baseline))
            side.process.release()
        return median(side.graph_us)

    @staticmethod
    def _patience_s(session: Session[CudaProcess]) -> float:
        return 10 * session.limits.call_timeout_s

    def _block(
        self,
        target: Target,
        candidate: Session[CudaProcess],
        baseline: Session[CudaProcess],
        rng: np.random.Generator,
    ) -> _Block:
        """Draw, lay out, time, fetch. Raises Fault, BaselineFault."""
        drawn = rng.spawn(SETS)
        spreads = list(self.checks.map(self.pools.spread, [target.workload] * SETS, drawn))
        list(self.checks.map(lambda spread: spread.gathers, spreads))  # made once, for both sides
        mine, theirs = (_Side(s.runner, self.copy_bytes_per_us) for s in (candidate, baseline))
        mine.prepare(candidate, target.index, spreads)
        with blaming_baseline():
            theirs.prepare(baseline, target.index, spreads)
        block = _Block(target, mine, theirs)
        with self.quiet():
            self._run(block, self._patience_s(baseline), rng)
        self._look(block, spreads, rng)
        mine.process.release()
        with blaming_baseline():
            theirs.process.release()
        return block

    def _run(self, block: _Block, patience_s: float, rng: np.random.Generator) -> None:
        """The timed pairs. Raises Fault, BaselineFault."""
        with blaming_baseline():
            usual_us = block.theirs.arm(patience_s)
        # Two plain calls, a replay and, the first time, the loading of device code.
        timeout_s = 1.0 + 4 * max(self.plan.shortest_timeout_s, self.plan.slowest * usual_us / 1e6)
        block.mine.arm(timeout_s)
        for turn, first in enumerate(_balanced(self.plan.samples, rng)):
            order = [_KINDS[i] for i in rng.permutation(2)]
            if first:
                block.mine.sample(turn, order, timeout_s)
            with blaming_baseline():
                block.theirs.sample(turn, order, patience_s)
            if not first:
                block.mine.sample(turn, order, timeout_s)

    def _look(self, block: _Block, spreads: Sequence[Spread], rng: np.random.Generator) -> None:
        """Buffers of all sets; a random copy's outputs of each go to be compared. Raises Fault."""
        for number, spread in enumerate(spreads):
            placement = block.mine.placements[number]
            block.breach = block.breach or block.mine.process.breach(number, placement)
            copy = int(rng.integers(spread.copies))
            outputs = block.mine.process.fetch(number, placement, spread.place(copy))
            block.checks.append(self.checks.submit(_compared, spread, copy, outputs))

    def _host_call_us(self, candidate: Session[CudaProcess], rng: np.random.Generator) -> float:
        """The dearest object's host cost of a call on the gate's first problem that has work.

        On an empty problem kernels are not even launched. Builds run beside it, so it is the least of rounds.
        """
        costs = []
        for target in {target.index: target for target in self.targets}.values():
            spec = specialization(self.operator, target.workload)
            entries = self.operator.gate_cases(spec, "screen")
            cases = (self.cases.fresh(entry.workload, rng) for entry in entries)
            case = next(case for case in cases if _has_work(case))
            placement = candidate.place(target.index, case)
            wall_us, _ = candidate.runner.host_cost_us(target.index, placement, self.plan.empty_calls)
            costs.append(wall_us)
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
            floor = floor_us(moved, self.l2_bytes, self.copy_bytes_per_us)
            if min(block.mine.graph_us) < floor:
                detail = f"{min(block.mine.graph_us):.3g} us, below the {floor:.3g} us that its bytes take"
                return Failed(Failure.FORGED, Stage.TIME, detail, case=name)
        return Timed(tuple(block.measurement for block in blocks), worst_error, host_call_us)


def _compared(spread: Spread, copy: int, outputs: dict[str, Any]) -> Any:
    return spread.copy(copy).worst(outputs)


def _has_work(case: Case) -> bool:
    return all(0 not in shape for shape, _ in filter(None, case.outputs.values()))


def _balanced(count: int, rng: np.random.Generator) -> Iterator[bool]:
    """Half of them true, in random order."""
    order = np.arange(count) % 2 == 0
    rng.shuffle(order)
    return (bool(item) for item in order)
