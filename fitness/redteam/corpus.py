"""Runs a corpus through the real pipeline: build, inspect, link, gate, time; and says what came of it.

The corpus for Hopper does so on a machine with such a GPU. On any other, kernels are built, inspected and
linked: what has to be stopped by then is judged, the rest counts as not run.
"""

import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from evotune.fitness.build import Builder, BuildPlan
from evotune.fitness.cache import Cache
from evotune.fitness.cuda import CudaEvaluator, CudaSettings
from evotune.fitness.cuda_link import CudaLinker
from evotune.fitness.cute_toolchain import CuteToolchain
from evotune.fitness.device import absent
from evotune.fitness.evaluation import Evaluation
from evotune.fitness.gate import GateLimits, GateReport
from evotune.fitness.host import HostEvaluator, HostSettings
from evotune.fitness.judge import CompiledEvaluator, Problem
from evotune.fitness.objectives import OBJECTIVES
from evotune.fitness.operator import specialization
from evotune.fitness.outcome import RUNGS, Artifact, Failed, Failure, Outcome, Passed, Stage
from evotune.fitness.redteam.entry import BEFORE, Base, Entry, Kind
from evotune.fitness.sandbox import Limits, Sandbox
from evotune.fitness.timing import TimingPlan
from evotune.reference_kda.operator import KDA
from evotune.reference_kda.workload import Workload
from evotune.search_space.template import Specialization

PAYS = 2.0
"""A trick that passes is accepted when it makes its kernel this many times as fast. Skipping the work of the
timed problem pays tenfold and more; two honest builds of one source differ by less than a half."""

_SETTINGS = HostSettings(level="full", gate=GateLimits(call_timeout_s=1.0), timing=TimingPlan(samples=8))
_CUTE_BUILD = BuildPlan(workers=os.cpu_count() or 2, limits=Limits(wall_s=20.0))
_CUDA_SETTINGS = CudaSettings(
    level="full", gate=GateLimits(call_timeout_s=1.0), timing=TimingPlan(samples=8), build=_CUTE_BUILD
)
_DEADLY = frozenset({Failure.TIMEOUT, Failure.FAULT})  # the same in each case of every rung


@dataclass(frozen=True)
class Row:
    """What became of one entry.

    Attributes:
        outcome: an `Artifact` where no device was there to go further.
        speedup: baseline over candidate on the timed problem, None when it was not timed.
        paid: speedup over that of the honest kernel it was made from, None when that was not timed.
        rungs: failing cases by rung of a gate that goes on after a failure; None when it was not asked to.
        seconds: of the evaluation, by phase.
    """

    entry: Entry
    outcome: Outcome | Artifact
    speedup: float | None = None
    paid: float | None = None
    rungs: Mapping[Stage, int] | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """caught, elsewhere (not where due), accepted, no gain; passed, rejected; not run, unknown."""
        entry, outcome = self.entry, self.outcome
        if isinstance(outcome, Failed):
            if entry.kind is Kind.VARIANT:
                return "rejected"
            return "caught" if _as_it_should(entry, outcome) else "elsewhere"
        if isinstance(outcome, Artifact):
            return "not run" if entry.needs_device else "accepted"
        if not isinstance(outcome, Passed):
            return "unknown"
        if entry.kind is Kind.VARIANT:
            return "passed"
        harmless = entry.may_pass and self.paid is not None and self.paid < PAYS
        return "no gain" if harmless else "accepted"

    @property
    def due(self) -> str:
        """The stage that its entry names; "" for an honest kernel."""
        return " or ".join(stage for stage in Stage if stage in self.entry.caught)

    @property
    def where(self) -> str:
        """The stage and the failure, or why there is none."""
        if isinstance(self.outcome, Failed):
            return f"{self.outcome.stage}: {self.outcome.failure}"
        if isinstance(self.outcome, Artifact):
            return "built"
        return "passed" if isinstance(self.outcome, Passed) else self.outcome.reason


def _as_it_should(entry: Entry, failed: Failed) -> bool:
    right = failed.stage in entry.caught and failed.failure in (entry.failures or {failed.failure})
    return right and re.search(entry.told, failed.detail) is not None


@dataclass(frozen=True)
class Findings:
    """All rows, in the order of the corpus; `lacking` is why some were not run, "" where all were."""

    rows: tuple[Row, ...]
    seconds: float
    lacking: str = ""

    def of(self, *kinds: Kind) -> list[Row]:
        return [row for row in self.rows if row.entry.kind in kinds]

    @property
    def accepted(self) -> list[Row]:
        """Mutants and cheats that got through."""
        return [row for row in self.rows if row.verdict == "accepted"]

    @property
    def elsewhere(self) -> list[Row]:
        """Mutants and cheats that were stopped, but not by the stage, or not for the failure, that is due."""
        return [row for row in self.rows if row.verdict == "elsewhere"]

    @property
    def rejected(self) -> list[Row]:
        """Honest variants that did not."""
        return [row for row in self.rows if row.verdict == "rejected"]

    @property
    def not_run(self) -> list[Row]:
        """Built and inspected; what becomes of them takes a device."""
        return [row for row in self.rows if row.verdict == "not run"]

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


def workload(dtype: str, contract: str, target: str = "host") -> Workload:
    """The timed problem: long enough that skipping it pays, ragged, grouped heads; on a GPU more of them."""
    heads = 1 if target == "host" else 4
    return Workload(
        f"{dtype} {contract}",
        "timed",
        lengths=(300, 57),
        heads=heads,
        value_heads=2 * heads,
        K=64,
        V=64,
        dtype=dtype,
        contract=contract,
        initial_state=True,
    )


def specialization_of(entry: Entry) -> Specialization:
    """The object that the timed problem needs."""
    return specialization(KDA, workload(entry.dtype, entry.contract, entry.target))


class Bench(ABC):
    """Where a corpus is judged. Closed when done."""

    lacking = ""

    @abstractmethod
    def judge(self, entries: Sequence[Entry], *, full: bool) -> Iterator[Row]:
        """Rows in order; builds run ahead. `full` also asks every rung about every wrong kernel."""

    @abstractmethod
    def close(self) -> None: ...


Key = tuple[str, str, str]


class JudgingBench(Bench):
    """One evaluator per template, dtype and contract, made when first needed; each solves its cases once."""

    def __init__(self, cache: Path, sandbox: Sandbox) -> None:
        self._cache = cache
        self._sandbox = sandbox
        self._evaluators: dict[Key, CompiledEvaluator[Any]] = {}

    def evaluator(self, entry: Entry) -> CompiledEvaluator[Any]:
        """Raises StudyError without a working compiler, DeviceError without a free GPU."""
        key = _key(entry)
        if key not in self._evaluators:
            table = workload(entry.dtype, entry.contract, entry.target)
            self._evaluators[key] = self._made(Problem(entry.template, KDA, (table,)))
        return self._evaluators[key]

    def _made(self, problem: Problem) -> CompiledEvaluator[Any]:
        return HostEvaluator(
            problem,
            list(OBJECTIVES.values()),
            settings=_SETTINGS,
            cache=self._cache,
            sandbox=self._sandbox,
        )

    def judge(self, entries: Sequence[Entry], *, full: bool) -> Iterator[Row]:
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
        return entry, self.evaluator(entry).submit(entry.candidate(specialization_of(entry)))

    def _rungs(self, entry: Entry, evaluation: Evaluation) -> Mapping[Stage, int] | None:
        """Failing cases by rung; None for what never comes to a rung, or dies in each of them."""
        outcome = evaluation.outcome
        judged = isinstance(outcome, Passed) or (isinstance(outcome, Failed) and outcome.stage not in BEFORE)
        if entry.kind is Kind.VARIANT or not judged or (entry.failures and entry.failures <= _DEADLY):
            return None
        report = self.evaluator(entry).explain(entry.candidate(specialization_of(entry)), "full")
        if not isinstance(report, GateReport):
            return None
        return {stage: len(report.failures(stage)) for stage in RUNGS}

    def close(self) -> None:
        for evaluator in self._evaluators.values():
            evaluator.close()


class CudaBench(JudgingBench):
    """On a GPU, which has one owner: one evaluator at a time."""

    def judge(self, entries: Sequence[Entry], *, full: bool) -> Iterator[Row]:
        for _, group in groupby(entries, _key):
            yield from super().judge(tuple(group), full=full)
            self.close()
            self._evaluators.clear()

    def _made(self, problem: Problem) -> CompiledEvaluator[Any]:
        return CudaEvaluator(
            problem,
            list(OBJECTIVES.values()),
            settings=_CUDA_SETTINGS,
            cache=self._cache,
            sandbox=self._sandbox,
        )


class BuildBench(Bench):
    """Without a GPU: kernels for Hopper are built, inspected and linked."""

    def __init__(self, cache: Path, sandbox: Sandbox, lacking: str) -> None:
        """Raises StudyError without the DSL or a linker."""
        self.lacking = lacking
        linker = CudaLinker(sandbox)
        self._builder = Builder(CuteToolchain(), sandbox, Cache(cache), _CUTE_BUILD, linker)

    def judge(self, entries: Sequence[Entry], *, full: bool) -> Iterator[Row]:
        pending = [(entry, self._builder.build(_unit(entry))) for entry in entries]
        for entry, future in pending:
            yield Row(entry, future.result())

    def close(self) -> None:
        self._builder.close()


def _unit(entry: Entry) -> Any:
    spec = specialization_of(entry)
    candidate = entry.candidate(spec)
    return entry.template.unit(candidate.branch.source, candidate.knobs, spec)


def _key(entry: Entry) -> Key:
    return entry.template.name, entry.dtype, entry.contract


def _honest(base: Base, dtype: str, contract: str) -> Entry:
    return Entry(f"honest {base}", Kind.VARIANT, "unchanged", base=base, dtype=dtype, contract=contract)


def _speedup(outcome: Outcome) -> float | None:
    return outcome.measurements[0].speedup if isinstance(outcome, Passed) else None


def bench(cache: Path, target: str = "host", *, unsafe: bool = False) -> Bench:
    """The best this machine has for a target. Raises SandboxError without walls, StudyError."""
    sandbox = Sandbox.detect(unsafe=unsafe)
    if target == "host":
        return JudgingBench(cache, sandbox)
    lacking = absent(target)
    return CudaBench(cache, sandbox) if lacking is None else BuildBench(cache, sandbox, lacking)


def run(
    entries: Iterable[Entry],
    opened: Bench,
    *,
    full: bool = False,
    say: Callable[[Row], None] = lambda row: None,
) -> Findings:
    """Judge every entry, then close the bench. Raises SandboxError, StudyError, DeviceError; ValueError for
    an entry that cannot be made."""
    started, rows = time.monotonic(), []
    with closing(opened):
        for row in opened.judge(tuple(entries), full=full):
            say(row)
            rows.append(row)
    return Findings(tuple(rows), time.monotonic() - started, opened.lacking)
