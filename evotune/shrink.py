"""The smallest problem on which a kernel still fails, found by trying smaller ones in the judge's session.

Against the truth of each, under its derived bound; or under the law that was broken, or twice behind fences,
as the gate did. What is smaller is the operator's to say (`Shrinks`, `ShrinkingLaw`).
"""

import json
import math
import secrets
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from evotune.fitness.gate import (
    CaseResult,
    Gate,
    GateReport,
    Session,
    against_law,
    against_truth,
    called_twice,
)
from evotune.fitness.operator import Case, GateEntry, Law, ShrinkingLaw, Shrinks
from evotune.fitness.outcome import Failure, Stage
from evotune.fitness.runner import Fault
from evotune.search_space.template import Specialization

TRIES = 40
SECONDS = 20.0
# Fresh variants of a problem that are tried: some mistakes show in most inputs, not in all.
_VARIANTS = 8


@dataclass(frozen=True)
class Smallest:
    """The smallest failing problem that was found.

    Attributes:
        case: the gate's case, or law, that it is a small form of.
        result: what fails there.
        workload: it, as a `[[workload]]` table.
        tries: smaller problems that were tried.
        complete: whether none smaller was left to try, rather than tries or time.
    """

    case: str
    result: CaseResult
    workload: Mapping[str, Any]
    tries: int
    complete: bool

    def as_json(self) -> dict[str, Any]:
        ratio, failure = self.result.ratio, self.result.failure
        return {
            "case": self.case,
            "rung": self.result.stage.value,
            "failure": None if failure is None else failure.value,
            "ratio": ratio if math.isfinite(ratio) else None,
            "detail": self.result.detail,
            "workload": dict(self.workload),
            "tries": self.tries,
            "complete": self.complete,
        }

    @property
    def text(self) -> str:
        """One line; the table is TOML."""
        kind = f"that breaks {self.case!r}" if self.result.stage is Stage.LAWS else "that fails"
        table = ", ".join(f"{key} = {json.dumps(value)}" for key, value in self.workload.items())
        ended = "" if self.complete else f" (of {self.tries} tried; a smaller one may be)"
        return f"Smallest workload {kind}{ended}: {{ {table} }}: {self.result.detail}"


@dataclass(frozen=True)
class _Question:
    """A failure as it can be asked about on any workload.

    Attributes:
        starts: workloads on which it was seen, or may have been.
        smaller: from one of them, as `Shrinks.smaller`.
        ask: whether it shows on one; None when it does not.
    """

    starts: Sequence[Any]
    smaller: Callable[[Any], Generator[Any, bool, None]]
    ask: Callable[[Any], CaseResult | None]


@dataclass(frozen=True)
class Shrinker:
    """Shrinks failures of one candidate, whose objects `session` holds in the order of `specs`.

    Attributes:
        tries: smaller problems that are tried at most.
        seconds: after which no other one is begun; a large one alone may take some.
    """

    gate: Gate
    session: Session[Any]
    specs: Sequence[Specialization]
    tries: int = TRIES
    seconds: float = SECONDS
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(secrets.randbits(128)))

    def smallest(self, report: GateReport) -> Smallest | None:
        """Of the first failure in the report that shows again.

        None when none does, or the operator does not say what is smaller. Raises SandboxError.
        """
        operator = self.gate.operator
        if not isinstance(operator, Shrinks):
            return None
        deadline = time.monotonic() + self.seconds
        for wrong in report.results:
            if wrong.failure is None:
                continue
            for question in self._questions(operator, wrong):
                for start in question.starts:
                    if time.monotonic() > deadline:
                        return None
                    seen = question.ask(start)
                    if seen is not None:
                        return self._shrunk(operator, wrong, question, (start, seen), deadline)
        return None

    def _shrunk(
        self,
        operator: Shrinks,
        wrong: CaseResult,
        question: _Question,
        found: tuple[Any, CaseResult],
        deadline: float,
    ) -> Smallest:
        answers: dict[Any, bool] = {}
        smaller = question.smaller(found[0])
        complete = False
        try:
            tried = next(smaller)
            while tried in answers or (len(answers) < self.tries and time.monotonic() < deadline):
                if tried not in answers:
                    seen = question.ask(tried)
                    answers[tried] = seen is not None
                    if seen is not None:
                        found = tried, seen
                tried = smaller.send(answers[tried])
        except StopIteration:
            complete = True
        workload, seen_there = found
        return Smallest(wrong.case, seen_there, operator.table(workload), len(answers), complete)

    def _questions(self, operator: Shrinks, wrong: CaseResult) -> Iterator[_Question]:
        """What a failure may be asked as: at most one, but for cases of one name."""
        for index, spec in enumerate(self.specs):
            suffix = "" if len(self.specs) == 1 else f" [{spec.label}]"
            if wrong.stage is Stage.LAWS:
                for law in self.gate.operator.laws(spec, "full"):
                    if law.name + suffix == wrong.case and isinstance(law, ShrinkingLaw):
                        yield self._of_law(index, law, wrong)
            for entry in self.gate.entries(spec, "full"):
                question = self._of_entry(operator, index, entry, suffix, wrong)
                if question is not None:
                    yield question

    def _of_law(self, index: int, law: ShrinkingLaw, wrong: CaseResult) -> _Question:
        def check(workload: Any) -> Iterator[CaseResult]:
            there: Law = law.on(workload)
            for _ in range(_VARIANTS):
                yield against_law(wrong.case, there, lambda case: self.session.call(index, case), self.rng)

        return _Question(law.drawn, law.smaller, lambda workload: _first(check(workload), wrong))

    def _of_entry(
        self, operator: Shrinks, index: int, entry: GateEntry, suffix: str, wrong: CaseResult
    ) -> _Question | None:
        """None when the failure is not of this entry."""
        named = entry.name + suffix == wrong.case
        twice = f"{entry.workload.name}, called twice{suffix}" == wrong.case
        if wrong.stage.value == entry.rung and named:
            look = self._truth
        elif wrong.stage is Stage.INTEGRITY and named:
            look = self._buffers
        elif wrong.stage is Stage.INTEGRITY and twice:
            look = self._twice
        else:
            return None

        def ask(workload: Any) -> CaseResult | None:
            if workload == entry.workload:
                solved = self.gate.cases.solved(workload)
            else:  # not by its name, which smaller ones share
                solved = self.gate.operator.solve(workload, secrets.randbits(31))
            variants = (solved.fresh(self.rng) for _ in range(_VARIANTS))
            return _first(look(index, wrong, variants), wrong)

        return _Question([entry.workload], operator.smaller, ask)

    def _truth(self, index: int, wrong: CaseResult, cases: Iterator[Case]) -> Iterator[CaseResult]:
        for case in cases:
            yield against_truth(wrong.stage, wrong.case, case, lambda case: self.session.call(index, case))

    def _buffers(self, index: int, wrong: CaseResult, cases: Iterator[Case]) -> Iterator[CaseResult]:
        for case in cases:
            try:
                breach = self.session.call(index, case).breach
            except Fault as fault:
                yield CaseResult(Stage.INTEGRITY, wrong.case, math.inf, fault.failure, fault.detail)
                continue
            if breach is not None:
                yield _breached(wrong, breach)

    def _twice(self, index: int, wrong: CaseResult, cases: Iterator[Case]) -> Iterator[CaseResult]:
        """Bits that differ, and buffers that were changed; a call between is on numbers of its own."""
        for case in cases:
            pair = case, case.fresh(self.rng)
            result, breaches = called_twice(self.session, index, wrong.case, pair, self.rng)
            yield result
            yield from (_breached(wrong, breach) for breach in breaches)


def _breached(wrong: CaseResult, breach: str) -> CaseResult:
    return CaseResult(Stage.INTEGRITY, wrong.case, math.inf, Failure.WRONG, breach)


def _first(results: Iterator[CaseResult], wrong: CaseResult) -> CaseResult | None:
    """The first that fails as the gate's did: another failure is another mistake."""
    return next((result for result in results if result.failure is wrong.failure), None)
