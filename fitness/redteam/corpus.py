"""Runs the corpus through the real pipeline: build, inspect, link, gate, time; and says what came of it."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from evotune.fitness.evaluation import Evaluation
from evotune.fitness.gate import GateLimits, GateReport
from evotune.fitness.host import HostEvaluator, HostSettings, Problem
from evotune.fitness.objectives import OBJECTIVES
from evotune.fitness.outcome import RUNGS, Failed, Failure, Outcome, Passed, Stage
from evotune.fitness.redteam.entry import Base, Entry, Kind
from evotune.fitness.sandbox import Sandbox
from evotune.fitness.timing import TimingPlan
from evotune.reference_kda.operator import KDA
from evotune.reference_kda.workload import Workload
from evotune.search_space.templates.kda_host import TEMPLATE

PAYS = 2.0
"""A trick that passes is accepted when it makes its kernel this many times as fast. Skipping the work of the
timed problem pays tenfold and more; two honest builds of one source differ by less than a half."""

_SETTINGS = HostSettings(level="full", gate=GateLimits(call_timeout_s=1.0), timing=TimingPlan(samples=8))
_DEADLY = frozenset({Failure.TIMEOUT, Failure.FAULT})  # the same in each case of every rung


@dataclass(frozen=True)
class Row:
    """What became of one entry.

    Attributes:
        speedup: baseline over candidate on the timed problem, None when it was not timed.
        paid: speedup over that of the honest kernel it was made from, None when that was not timed.
        rungs: failing cases by rung of a gate that goes on after a failure; None when it was not asked to.
        seconds: of the evaluation, by phase.
    """

    entry: Entry
    outcome: Outcome
    speedup: float | None = None
    paid: float | None = None
    rungs: Mapping[Stage, int] | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """caught, elsewhere (not where it should), accepted, no gain, passed, rejected or unknown."""
        entry, outcome = self.entry, self.outcome
        if isinstance(outcome, Failed):
            if entry.kind is Kind.VARIANT:
                return "rejected"
            right = outcome.stage in entry.caught and outcome.failure in (entry.failures or {outcome.failure})
            return "caught" if right else "elsewhere"
        if not isinstance(outcome, Passed):
            return "unknown"
        if entry.kind is Kind.VARIANT:
            return "passed"
        harmless = entry.may_pass and self.paid is not None and self.paid < PAYS
        return "no gain" if harmless else "accepted"

    @property
    def where(self) -> str:
        """The stage and the failure, or why there is none."""
        if isinstance(self.outcome, Failed):
            return f"{self.outcome.stage}: {self.outcome.failure}"
        return "passed" if isinstance(self.outcome, Passed) else self.outcome.reason


@dataclass(frozen=True)
class Findings:
    """All rows, in the order of the corpus."""

    rows: tuple[Row, ...]
    seconds: float

    def of(self, *kinds: Kind) -> list[Row]:
        return [row for row in self.rows if row.entry.kind in kinds]

    @property
    def accepted(self) -> list[Row]:
        """Mutants and cheats that got through."""
        return [row for row in self.rows if row.verdict == "accepted"]

    @property
    def rejected(self) -> list[Row]:
        """Honest variants that did not."""
        return [row for row in self.rows if row.verdict == "rejected"]

    @property
    def false_rejections(self) -> float:
        """Share of the honest variants."""
        variants = self.of(Kind.VARIANT)
        return len(self.rejected) / len(variants) if variants else 0.0

    @property
    def held(self) -> bool:
        """No exploit accepted, at most one honest kernel in twenty refused, nothing left undecided."""
        undecided = any(row.verdict == "unknown" for row in self.rows)
        return not self.accepted and self.false_rejections <= 0.05 and not undecided

    def catches(self) -> dict[Stage, int]:
        """How many mutants and cheats each stage stopped first."""
        stopped = [row.outcome.stage for row in self.rows if isinstance(row.outcome, Failed)]
        return {stage: stopped.count(stage) for stage in Stage}

    def alone(self) -> dict[Stage, list[str]]:
        """By rung, the mutants and cheats that no other rung sees; needs rows with `rungs`."""
        only: dict[Stage, list[str]] = {stage: [] for stage in RUNGS}
        for row in self.of(Kind.MUTANT, Kind.CHEAT):
            seen = [stage for stage, count in (row.rungs or {}).items() if count]
            if len(seen) == 1:
                only[seen[0]].append(row.entry.name)
        return only


def workload(dtype: str, contract: str) -> Workload:
    """The timed problem: long enough that skipping it pays, ragged, grouped heads."""
    return Workload(
        f"{dtype} {contract}",
        "timed",
        lengths=(300, 57),
        heads=1,
        value_heads=2,
        K=64,
        V=64,
        dtype=dtype,
        contract=contract,
        initial_state=True,
    )


class Bench:
    """One evaluator per dtype and contract, made when first needed; each solves its cases once."""

    def __init__(self, cache: Path, *, unsafe: bool = False) -> None:
        """Raises SandboxError where no walls hold."""
        self._cache = cache
        self._sandbox = Sandbox.detect(unsafe=unsafe)
        self._evaluators: dict[tuple[str, str], HostEvaluator] = {}

    def evaluator(self, entry: Entry) -> HostEvaluator:
        """Raises StudyError without a working compiler."""
        key = entry.dtype, entry.contract
        if key not in self._evaluators:
            self._evaluators[key] = HostEvaluator(
                Problem(TEMPLATE, KDA, (workload(*key),)),
                list(OBJECTIVES.values()),
                settings=_SETTINGS,
                cache=self._cache,
                sandbox=self._sandbox,
            )
        return self._evaluators[key]

    def judge(self, entries: Sequence[Entry], *, full: bool) -> Iterator[Row]:
        """Rows in order; builds run ahead. `full` also asks every rung about every wrong kernel."""
        twins = {key: _honest(*key) for key in {(e.base, e.dtype, e.contract) for e in entries if e.may_pass}}
        pending = [self._submit(entry) for entry in (*twins.values(), *entries)]
        speedups: dict[tuple[Base, str, str], float | None] = {}
        for key, (_, future) in zip(twins, pending, strict=False):
            speedups[key] = _speedup(future.result().outcome)
        for entry, future in pending[len(twins) :]:
            evaluation = future.result()
            mine, twin = _speedup(evaluation.outcome), speedups.get((entry.base, entry.dtype, entry.contract))
            yield Row(
                entry,
                evaluation.outcome,
                mine,
                mine / twin if mine and twin else None,
                self._rungs(entry, evaluation) if full else None,
                evaluation.seconds,
            )

    def _submit(self, entry: Entry) -> tuple[Entry, Future[Evaluation]]:
        evaluator = self.evaluator(entry)
        return entry, evaluator.submit(entry.candidate(evaluator.problem.specializations[0]))

    def _rungs(self, entry: Entry, evaluation: Evaluation) -> Mapping[Stage, int] | None:
        """Failing cases by rung; None for what never comes to a rung, or dies in each of them."""
        outcome = evaluation.outcome
        judged = isinstance(outcome, Passed) or (isinstance(outcome, Failed) and outcome.stage not in _BEFORE)
        if entry.kind is Kind.VARIANT or not judged or (entry.failures and entry.failures <= _DEADLY):
            return None
        evaluator = self.evaluator(entry)
        report = evaluator.explain(entry.candidate(evaluator.problem.specializations[0]), "full")
        if not isinstance(report, GateReport):
            return None
        return {stage: len(report.failures(stage)) for stage in RUNGS}

    def close(self) -> None:
        for evaluator in self._evaluators.values():
            evaluator.close()


_BEFORE = (Stage.BUILD, Stage.INSPECT)


def _honest(base: Base, dtype: str, contract: str) -> Entry:
    return Entry(f"honest {base}", Kind.VARIANT, "unchanged", base=base, dtype=dtype, contract=contract)


def _speedup(outcome: Outcome) -> float | None:
    return outcome.measurements[0].speedup if isinstance(outcome, Passed) else None


@contextmanager
def bench(cache: Path, *, unsafe: bool = False) -> Iterator[Bench]:
    opened = Bench(cache, unsafe=unsafe)
    try:
        yield opened
    finally:
        opened.close()


def run(
    entries: Iterable[Entry],
    cache: Path,
    *,
    full: bool = False,
    unsafe: bool = False,
    say: Callable[[Row], None] = lambda row: None,
) -> Findings:
    """Judge every entry. Raises SandboxError, StudyError; ValueError for an entry that cannot be made."""
    started, rows = time.monotonic(), []
    with bench(cache, unsafe=unsafe) as opened:
        for row in opened.judge(tuple(entries), full=full):
            say(row)
            rows.append(row)
    return Findings(tuple(rows), time.monotonic() - started)
