"""Host timing: candidate and baseline interleaved in one block, on inputs that neither has seen.

Per workload, `TimingPlan.samples` problems are drawn after the candidate was built and laid out in both
arenas, each in its own buffers. Then, with builds paused, each kernel is called twice to warm up on one more
problem, and the pairs of timed calls run, half of them candidate first, in random order. The number of calls
is fixed beforehand: nothing a kernel does can stop the block early but a fault. Afterwards the outputs of
every call are compared with the truth and its buffers looked at: what was timed is what was right.

A runner's clock is its own. The parent waits for every answer, so no time can be longer than it waited
(`Runner.call`). Nor can the median of the reported times be much shorter than the *shortest* wait: noise only
lengthens a wait, and to move a median a forger must lie in half of the calls while the work still takes its
time in all of them. A candidate that is below by more than `clock_slack_us` + `clock_slack` x its reported
time, what the baseline's shortest answer takes beyond its own time allowed for, in two blocks of two, is
FORGED. So is a time below the operator's physical floor.
"""

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from evotune.fitness.arena import Placement
from evotune.fitness.gate import CaseBook, Session
from evotune.fitness.operator import Case, Operator, Workload, specialization
from evotune.fitness.outcome import Failed, Failure, Measurement, Stage
from evotune.fitness.runner import Call, Fault, Runner

Quiet = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class TimingPlan:
    """How a candidate is timed; fixed before anything runs.

    Attributes:
        samples: timed calls of each kernel per workload.
        slowest: a timed call that takes this many times the baseline's is given up as TIMEOUT.
        shortest_timeout_s: but no call is given up before this.
        empty_calls: calls on an empty problem for the host cost of one.
        bandwidth_gb_s: what no core exceeds, for the physical floor: two 64-byte loads a cycle at 3.5 GHz.
        clock_slack_us: how much of a call the runner may hide, plus
        clock_slack: this part of the reported time.
    """

    samples: int = 8
    slowest: float = 20.0
    shortest_timeout_s: float = 0.1
    empty_calls: int = 64
    bandwidth_gb_s: float = 450.0
    clock_slack_us: float = 200.0
    clock_slack: float = 0.1


@dataclass(frozen=True)
class Target:
    """What is timed: a workload, and the index of its object in candidate's and baseline's sessions alike."""

    workload: Workload
    index: int


@dataclass(frozen=True)
class Timed:
    """A block that came to its end. `worst_error` is the largest error over bound of the outputs compared."""

    measurements: tuple[Measurement, ...]
    worst_error: float
    host_call_us: float


class BaselineFault(Exception):
    """The baseline misbehaved, not the candidate. Never leaves the package."""


@contextmanager
def _blaming_baseline() -> Iterator[None]:
    try:
        yield
    except Fault as fault:
        raise BaselineFault(fault.detail) from fault


@dataclass
class _Side:
    """One kernel's half of a block: a placement per problem, the last for warming up, and the timed calls."""

    session: Session[Runner]
    index: int
    placements: list[Placement] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Not asked for again: a runner that died takes the placements along, and its successor has none.
        self.runner = self.session.runner

    def lay_out(self, cases: Sequence[Case], begin: int) -> int:
        """Place problems one after another from `begin` on and map their pages; where they end."""
        for case in cases:
            self.placements.append(self.session.place(self.index, case, begin=begin))
            begin = self.placements[-1].end
            self.runner.touch(self.placements[-1])
        return begin

    def warm_up(self, timeout_s: float) -> Call:
        return self.runner.call(self.index, self.placements[-1], timeout_s)

    def call(self, number: int, timeout_s: float) -> None:
        self.calls.append(self.runner.call(self.index, self.placements[number], timeout_s))

    @property
    def samples_us(self) -> tuple[float, ...]:
        return tuple(call.inside_ns / 1e3 for call in self.calls)


@dataclass
class _Block:
    """The problems of one workload, laid out for both kernels."""

    target: Target
    cases: Sequence[Case]
    mine: _Side
    theirs: _Side

    def run(self, plan: TimingPlan, rng: np.random.Generator) -> None:
        """Warm up, then the timed pairs in balanced random order. Raises Fault, BaselineFault."""
        patience_s = self.mine.session.limits.call_timeout_s
        with _blaming_baseline():
            self.theirs.warm_up(patience_s)
            usual_s = self.theirs.warm_up(patience_s).outside_ns / 1e9
        timeout_s = max(plan.shortest_timeout_s, plan.slowest * usual_s)
        self.mine.warm_up(timeout_s)
        self.mine.warm_up(timeout_s)
        mine_first = np.arange(plan.samples) % 2 == 0
        rng.shuffle(mine_first)
        for number, first in enumerate(mine_first):
            if first:
                self.mine.call(number, timeout_s)
            with _blaming_baseline():
                self.theirs.call(number, patience_s)
            if not first:
                self.mine.call(number, timeout_s)

    @property
    def measurement(self) -> Measurement:
        workload = self.target.workload
        return Measurement(workload.name, workload.group, self.mine.samples_us, self.theirs.samples_us)

    def hidden_us(self, plan: TimingPlan) -> float:
        """By how much the shortest wait exceeds what the candidate's times explain; negative: all is well."""
        reported_us = median(self.mine.samples_us)
        passing_us = min(call.outside_ns - call.inside_ns for call in self.theirs.calls) / 1e3
        waited_us = min(call.outside_ns for call in self.mine.calls) / 1e3
        return waited_us - passing_us - reported_us * (1 + plan.clock_slack) - plan.clock_slack_us

    def judge(self) -> tuple[float, Failed | None]:
        """Look at all buffers and all outputs: (largest error over bound, failure)."""
        worst, name = 0.0, self.target.workload.name
        arena = self.mine.runner.arena
        for case, placement in zip(self.cases, self.mine.placements, strict=True):
            found = case.worst(arena.outputs(placement))
            if not found.ratio <= 1:
                return worst, Failed(Failure.WRONG, Stage.TIME, found.detail, case=name)
            breach = arena.breach(placement, case)
            if breach is not None:
                return worst, Failed(Failure.WRONG, Stage.TIME, breach, case=name)
            worst = max(worst, found.ratio)
        return worst, None


@dataclass(frozen=True)
class Timer:
    """Times candidates against a baseline session that stays alive between them.

    `quiet` pauses what else runs on the machine on our behalf.
    """

    operator: Operator
    cases: CaseBook
    targets: Sequence[Target]
    plan: TimingPlan
    quiet: Quiet

    def time(self, candidate: Session[Runner], baseline: Session[Runner]) -> Timed | Failed:
        """One block per workload; all of them a second time when the first one's clocks disagree.

        Raises BaselineFault, SandboxError, StudyError.
        """
        rng = np.random.default_rng(secrets.randbits(128))
        for _ in range(2):
            try:
                blocks, host_call_us = self._measure(candidate, baseline, rng)
            except Fault as fault:
                return Failed(fault.failure, Stage.TIME, fault.detail)
            late = max(blocks, key=lambda block: block.hidden_us(self.plan))
            hidden_us = late.hidden_us(self.plan)
            if hidden_us <= 0:
                return self._accept(blocks, host_call_us)
        detail = f"its clock leaves out {hidden_us:.0f} us of a call more than the slack allows"
        return Failed(Failure.FORGED, Stage.TIME, detail, case=late.target.workload.name)

    def _measure(
        self, candidate: Session[Runner], baseline: Session[Runner], rng: np.random.Generator
    ) -> tuple[list[_Block], float]:
        """Blocks that ran to their end, and the candidate's host cost of a call."""
        blocks, mine_end, theirs_end = [], 0, 0
        for target in self.targets:
            cases = [self.cases.fresh(target.workload, rng) for _ in range(self.plan.samples + 1)]
            mine = _Side(candidate, target.index)
            mine_end = mine.lay_out(cases, mine_end)
            with _blaming_baseline():
                theirs = _Side(baseline, target.index)
                theirs_end = theirs.lay_out(cases, theirs_end)
            blocks.append(_Block(target, cases, mine, theirs))
        with self.quiet():
            for block in blocks:
                block.run(self.plan, rng)
            host_call_us = self._host_call_us(candidate, mine_end)
        return blocks, host_call_us

    def _host_call_us(self, candidate: Session[Runner], begin: int) -> float:
        """The dearest object's cost of a call on an empty problem; the first calls warm up."""
        costs = []
        for target in {target.index: target for target in self.targets}.values():
            case = self.operator.empty(specialization(self.operator, target.workload))
            placement = candidate.place(target.index, case, begin=begin)
            repeat, patience_s = self.plan.empty_calls, candidate.limits.call_timeout_s
            candidate.runner.call(target.index, placement, patience_s)
            calls = [
                candidate.runner.call(target.index, placement, patience_s, repeat=repeat) for _ in range(3)
            ]
            costs.append(median(call.inside_ns for call in calls) / repeat / 1e3)
        return max(costs)

    def _accept(self, blocks: Sequence[_Block], host_call_us: float) -> Timed | Failed:
        """Outputs right and times above the floor, or the failure."""
        worst_error = 0.0
        for block in blocks:
            worst, failed = block.judge()
            if failed is not None:
                return failed
            worst_error = max(worst_error, worst)
            workload = block.target.workload
            floor_us = self.operator.floor_us(workload, self.plan.bandwidth_gb_s * 1e3)
            fastest_us = min(block.mine.samples_us)
            if fastest_us < floor_us:
                detail = f"{fastest_us:.3g} us, below the {floor_us:.3g} us that moving its bytes takes"
                return Failed(Failure.FORGED, Stage.TIME, detail, case=workload.name)
        return Timed(tuple(block.measurement for block in blocks), worst_error, host_call_us)
