"""Host timing: candidate and baseline interleaved in one block, on inputs that neither has seen.

Per workload, `TimingPlan.samples` pairs of timed calls run with builds paused, every two of them in the order
ABBA or BAAB by a coin of their own; fewer where a race finds the candidate hopeless (`racing.py`). Each of a
candidate's timed calls is the last thing a process of its own does: a new runner warms up on a small problem
of the gate, only then the inputs of the timed one are written into its memory, and once it has answered they
are looked at, its outputs are copied and the process is ended. So there is nothing to work ahead on, nothing
to put off to a call that is not timed, nothing that survives to the next problem (a symmetric image of this
one, see `Case.fresh`), and nothing of the candidate alive while the baseline runs. Kernels that did each of
these were 7 to 24 times as fast as their honest twins when one process served all calls
(`evotune.fitness.redteam.cheats`).
The outputs of every timed call are compared with the truth: what was timed is what was right.

A runner's clock is its own. The parent waits for every answer, so no time can be longer than it waited
(`Runner.call`). Nor can any be shorter than the *shortest* wait, less what the baseline's shortest answer
takes beyond its own time: noise only lengthens a wait. Times below that are raised to it, so that a forged
clock gains nothing; the more calls there were, the closer the bound, so that it is kept over all blocks of a
comparison (`Waits`). Where the median of the reported times is shorter by more than `clock_slack_us` +
`clock_slack` x itself in two blocks of two, the candidate is FORGED; so is a time below the operator's
physical floor.
"""

import math
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from evotune.fitness import peak
from evotune.fitness.gate import CaseBook, Session
from evotune.fitness.operator import Array, Case, Operator, Workload, specialization
from evotune.fitness.outcome import Failed, Failure, Measurement, Stage
from evotune.fitness.racing import NO_BARS, Bars, Heat, Racing
from evotune.fitness.runner import Call, Fault, Runner
from evotune.fitness.sequential import quad

Quiet = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class TimingPlan:
    """How a candidate is timed; fixed before anything runs.

    Attributes:
        samples: timed calls of each kernel per workload, at most.
        race_error: bound on the probability that a candidate which comes within 5 % of its group's best on a
            workload is timed with fewer calls there; 0 times all with all.
        slowest: a timed call that takes this many times the baseline's is given up as TIMEOUT.
        shortest_timeout_s: but no call is given up before this.
        empty_calls: calls on an empty problem for the host cost of one.
        bandwidth_gb_s: what no core exceeds, for the physical floor; 0: as measured here, see `peak`.
        clock_slack_us: how much of a call the runner may seem to hide, plus
        clock_slack: this part of the reported time. Beside a compiler on two cores an honest kernel's clock
            seemed to leave out 660 us once in 40 kernels.
    """

    samples: int = 8
    race_error: float = field(default=0.05, metadata={"ge": 0.0, "lt": 1.0})
    slowest: float = 20.0
    shortest_timeout_s: float = 0.1
    empty_calls: int = 64
    bandwidth_gb_s: float = field(default=0.0, metadata={"ge": 0.0})
    clock_slack_us: float = 2000.0
    clock_slack: float = 0.5


@dataclass(frozen=True)
class Target:
    """What is timed: a workload, and the index of its object in candidate's and baseline's sessions alike."""

    workload: Workload
    index: int


@dataclass(frozen=True)
class Timed:
    """A block that came to its end.

    Attributes:
        worst_error: the largest error over bound of the outputs compared.
        saved_s: what the pairs that a race left out would have taken.
    """

    measurements: tuple[Measurement, ...]
    worst_error: float
    host_call_us: float
    saved_s: float = 0.0


class BaselineFault(Exception):
    """The baseline misbehaved, not the candidate. Never leaves the package."""


@contextmanager
def blaming_baseline() -> Iterator[None]:
    """Whatever goes wrong inside is the baseline's fault, not the candidate's."""
    try:
        yield
    except Fault as fault:
        raise BaselineFault(fault.detail) from fault


def candidate_first(pairs: int, rng: np.random.Generator) -> list[bool]:
    """Who begins each pair: every two pairs are ABBA or BAAB by a fair coin, see `sequential.quad`."""
    order = [first for _ in range(0, pairs, 2) for first in quad(rng)[::2]]
    return order[:pairs]


@dataclass(frozen=True)
class _Sample:
    """One timed call: how long, what it left, and what it broke."""

    call: Call
    outputs: Mapping[str, Array]
    breach: str | None


@dataclass(frozen=True)
class _Problems:
    """What one workload is timed on: a problem for each pair of calls, and one to warm up on."""

    target: Target
    warming: Case
    cases: Sequence[Case]

    def once(self, session: Session[Runner], number: int, timeout_s: float) -> _Sample:
        """In a process that has seen nothing and ends here: warm up twice, then a timed call on problem
        `number`, which is written after that. Raises Fault."""
        index, case, runner = self.target.index, self.cases[number], session.runner
        ready = session.place_in(runner, index, self.warming)
        for _ in range(2):
            runner.call(index, ready, session.limits.call_timeout_s)
        placement = session.place_in(runner, index, case)
        runner.touch(placement)
        call = runner.call(index, placement, timeout_s)
        sample = _Sample(call, runner.arena.outputs(placement), runner.arena.breach(placement, case))
        runner.renew()
        return sample


@dataclass
class Waits:
    """The shortest waits for two kernels on one workload, over all their calls so far.

    From the eight calls of a single block an honest kernel's least time came out 2 % too long on a busy
    machine, from those of twenty blocks still half a percent. So the baseline's times are held to the same
    bound, from its own calls: what equal kernels are raised by is equal in the mean.

    Attributes:
        mine_us, theirs_us: for an answer of the candidate, of the baseline.
        passing_us: what the baseline's answers took beyond its own time.
    """

    mine_us: float = math.inf
    theirs_us: float = math.inf
    passing_us: float = math.inf

    def take(self, mine: Iterable[_Sample], theirs: Sequence[_Sample]) -> None:
        passing = ((s.call.outside_ns - s.call.inside_ns) / 1e3 for s in theirs)
        self.mine_us = min(self.mine_us, *(s.call.outside_ns / 1e3 for s in mine))
        self.theirs_us = min(self.theirs_us, *(s.call.outside_ns / 1e3 for s in theirs))
        self.passing_us = min(self.passing_us, *passing)

    @property
    def least_us(self) -> float:
        """No call of the candidate took less."""
        return self.mine_us - self.passing_us

    @property
    def baseline_least_us(self) -> float:
        return self.theirs_us - self.passing_us


AllWaits = dict[str, Waits]
"""By workload name."""


@dataclass
class _Block:
    """The timed calls of one workload."""

    problems: _Problems
    heat: Heat
    waits: Waits
    mine: dict[int, _Sample] = field(default_factory=dict)
    theirs: dict[int, _Sample] = field(default_factory=dict)

    def run(
        self,
        candidate: Session[Runner],
        baseline: Session[Runner],
        plan: TimingPlan,
        rng: np.random.Generator,
    ) -> None:
        """The timed pairs, until a race ends them. Raises Fault, BaselineFault."""
        patience_s = candidate.limits.call_timeout_s
        with blaming_baseline():
            usual_ns = self.problems.once(baseline, 0, patience_s).call.outside_ns
        self.heat.start()
        timeout_s = max(plan.shortest_timeout_s, plan.slowest * usual_ns / 1e9)
        for number, first in enumerate(candidate_first(plan.samples, rng)):
            if first:
                self.mine[number] = self.problems.once(candidate, number, timeout_s)
            with blaming_baseline():
                self.theirs[number] = self.problems.once(baseline, number, patience_s)
            if not first:
                self.mine[number] = self.problems.once(candidate, number, timeout_s)
            pair = self.theirs[number], self.mine[number]
            if self.heat.pair(*(sample.call.inside_ns / 1e3 for sample in pair)):
                break
        self.waits.take(self.mine.values(), list(self.theirs.values()))

    @property
    def samples_us(self) -> tuple[float, ...]:
        """The candidate's times, none shorter than the parent's clock allows."""
        return _raised(self.mine, self.waits.least_us)

    @property
    def measurement(self) -> Measurement:
        workload = self.problems.target.workload
        theirs = _raised(self.theirs, self.waits.baseline_least_us)
        return Measurement(workload.name, workload.group, self.samples_us, theirs)

    def hidden_us(self, plan: TimingPlan) -> float:
        """What the reported times leave out beyond the slack; negative: all is well."""
        reported_us = median(s.call.inside_ns for s in self.mine.values()) / 1e3
        return self.waits.least_us - (1 + plan.clock_slack) * reported_us - plan.clock_slack_us

    def judge(self) -> tuple[float, Failed | None]:
        """Look at all outputs: (largest error over bound, failure)."""
        worst, name = 0.0, self.problems.target.workload.name
        for number, sample in self.mine.items():
            found = self.problems.cases[number].worst(sample.outputs)
            if not found.ratio <= 1:
                return worst, Failed(Failure.WRONG, Stage.TIME, found.detail, case=name)
            if sample.breach is not None:
                return worst, Failed(Failure.WRONG, Stage.TIME, sample.breach, case=name)
            worst = max(worst, found.ratio)
        return worst, None


def _move(session: Session[Runner]) -> None:
    """Go on in another process with other memory. Raises Fault, SandboxError.

    Where a process and its inputs come to lie makes it fast or slow for life: of 18 comparisons of a kernel
    with itself, two processes each, one was won by 7.1 % in 24 blocks of 24 and one lost by 2.2 % in 23.
    Drawn anew for every block of a comparison it is noise like any other. 40 ms. In screening the baseline
    stays where it is: what its place adds to every candidate's ratio alike does not change their order, and
    drawn anew it would.
    """
    session.close()
    _ = session.runner


def _renew(session: Session[Runner]) -> None:
    session.runner.renew()


def _raised(samples: Mapping[int, _Sample], least_us: float) -> tuple[float, ...]:
    """Times in call order, in us, none below `least_us`."""
    return tuple(max(samples[n].call.inside_ns / 1e3, least_us) for n in range(len(samples)))


@dataclass(frozen=True)
class Timer:
    """Times candidates against a baseline session that stays alive between them.

    Attributes:
        quiet: pauses what else runs on the machine on our behalf.
        waits: of the same two kernels' calls before; take in these.
        moving: whether both kernels first go on in other processes with other memory, see `_move`.
    """

    operator: Operator
    cases: CaseBook
    targets: Sequence[Target]
    plan: TimingPlan
    quiet: Quiet
    racing: Racing = field(default_factory=Racing)
    waits: AllWaits = field(default_factory=dict)
    moving: bool = False

    def time(
        self, candidate: Session[Runner], baseline: Session[Runner], bars: Bars = NO_BARS
    ) -> Timed | Failed:
        """One block per workload; all of them a second time when the first one's clocks disagree.

        Raises BaselineFault, SandboxError, StudyError.
        """
        rng = np.random.default_rng(secrets.randbits(128))
        for _ in range(2):
            try:
                blocks, host_call_us = self._measure(candidate, baseline, bars, rng)
            except Fault as fault:
                return Failed(fault.failure, Stage.TIME, fault.detail)
            late = max(blocks, key=lambda block: block.hidden_us(self.plan))
            hidden_us = late.hidden_us(self.plan)
            if hidden_us <= 0:
                return self._accept(blocks, host_call_us)
        detail = f"its clock leaves out {hidden_us:.0f} us of a call more than the slack allows"
        return Failed(Failure.FORGED, Stage.TIME, detail, case=late.problems.target.workload.name)

    def _measure(
        self, candidate: Session[Runner], baseline: Session[Runner], bars: Bars, rng: np.random.Generator
    ) -> tuple[list[_Block], float]:
        """Blocks that ran to their end, and the candidate's host cost of a call."""
        problems = [self._problems(target, rng) for target in self.targets]
        anew = _move if self.moving else _renew
        with blaming_baseline():
            anew(baseline)
        anew(candidate)
        blocks = []
        with self.quiet():
            for posed in problems:
                heat = self.racing.heat(posed.target.workload.name, self.plan.samples, bars)
                waits = self.waits.setdefault(posed.target.workload.name, Waits())
                blocks.append(_Block(posed, heat, waits))
                blocks[-1].run(candidate, baseline, self.plan, rng)
            host_call_us = self._host_call_us(candidate)
        return blocks, host_call_us

    def _problems(self, target: Target, rng: np.random.Generator) -> _Problems:
        """Fresh images of the timed problem, and the largest problem of the screen gate to warm up on."""
        spec = specialization(self.operator, target.workload)
        entries = [entry.workload for entry in self.operator.gate_cases(spec, "screen")]
        warming = max(entries, key=lambda workload: self.operator.work(workload)[0])
        cases = [self.cases.fresh(target.workload, rng) for _ in range(self.plan.samples)]
        return _Problems(target, self.cases.fresh(warming, rng), cases)

    def _host_call_us(self, session: Session[Runner]) -> float:
        """The dearest object's cost of a call on an empty problem; the first call warms up."""
        costs, runner = [], session.runner
        for target in {target.index: target for target in self.targets}.values():
            case = self.operator.empty(specialization(self.operator, target.workload))
            placement = session.place_in(runner, target.index, case)
            repeat, patience_s = self.plan.empty_calls, session.limits.call_timeout_s
            runner.call(target.index, placement, patience_s)
            calls = [runner.call(target.index, placement, patience_s, repeat=repeat) for _ in range(3)]
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
            workload = block.problems.target.workload
            bandwidth_gb_s = self.plan.bandwidth_gb_s or peak.bandwidth_gb_s()
            floor_us = self.operator.floor_us(workload, bandwidth_gb_s * 1e3)
            fastest_us = min(block.samples_us)
            if fastest_us < floor_us:
                detail = f"{fastest_us:.3g} us, below the {floor_us:.3g} us that moving its bytes takes"
                return Failed(Failure.FORGED, Stage.TIME, detail, case=workload.name)
        for block in blocks:
            block.heat.learn()
        saved_s = sum(block.heat.saved_s for block in blocks)
        return Timed(tuple(block.measurement for block in blocks), worst_error, host_call_us, saved_s)
