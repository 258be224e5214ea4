"""What happened in a study, read off its records: branches, candidates, outcomes."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from evotune.errors import StudyError
from evotune.fitness.objectives import Column
from evotune.fitness.outcome import Failed, Passed, Retry
from evotune.journal import read
from evotune.records import (
    Asked,
    BranchAdded,
    Confirmation,
    Contest,
    Judged,
    Record,
    Refusal,
    StudyBegun,
)
from evotune.search_space.branch import Candidate
from evotune.search_space.space import Space


@dataclass(frozen=True)
class Entry:
    """A candidate that was asked for. `judged` is None while it is in flight or waits for another try."""

    asked: Asked
    judged: Judged | None

    @property
    def passed(self) -> Passed | None:
        outcome = self.judged.outcome if self.judged else None
        return outcome if isinstance(outcome, Passed) else None

    @property
    def failed(self) -> Failed | None:
        outcome = self.judged.outcome if self.judged else None
        return outcome if isinstance(outcome, Failed) else None


@dataclass(frozen=True)
class History:
    """State of a study.

    Attributes:
        begun: the study's first record.
        branches: every branch that was ever added, in order.
        entries: candidates by index, in order; for a retried one its last ask.
        refusals: proposals that came to nothing.
        retries: how often each candidate met trouble that was not its own, by index.
        steps: the number of steps begun.
        contests, confirmations: of champions, in order.
        in_flight: the step whose results are not to be looked at yet, if there is one.
    """

    begun: StudyBegun
    branches: tuple[BranchAdded, ...]
    entries: tuple[Entry, ...]
    refusals: tuple[Refusal, ...]
    retries: Mapping[int, int] = field(default_factory=dict)
    steps: int = 0
    contests: tuple[Contest, ...] = ()
    confirmations: tuple[Confirmation, ...] = ()
    in_flight: int | None = None

    @property
    def columns(self) -> Sequence[Column]:
        return self.begun.columns

    @property
    def judged(self) -> list[Entry]:
        """Candidates with a verdict, in the order of their index."""
        return [entry for entry in self.entries if entry.passed or entry.failed]

    @property
    def flying(self) -> frozenset[int]:
        """Trials of the step in flight."""
        return frozenset(e.asked.trial for e in self.entries if e.asked.step == self.in_flight)

    @property
    def elapsed_s(self) -> float:
        """Running time of the study so far, all sessions together."""
        told = [entry.judged.elapsed_s for entry in self.entries if entry.judged]
        told += [contest.elapsed_s for contest in self.contests]
        told += [confirmation.elapsed_s for confirmation in self.confirmations]
        return max(told, default=0.0)

    def added(self, branch: str) -> BranchAdded:
        """The record of a branch. Raises StudyError when there is none."""
        for record in self.branches:
            if record.id == branch:
                return record
        raise StudyError(f"the journal names a branch {branch} that was never added")

    def candidate(self, entry: Entry, space: Space) -> Candidate:
        """What was asked for, as a judge takes it. Raises StudyError where its branch was never added."""
        return Candidate(self.added(entry.asked.branch).branch, space.decode(entry.asked.knobs))

    def of(self, branch: str) -> list[Entry]:
        """Candidates of a branch."""
        return [entry for entry in self.entries if entry.asked.branch == branch]

    def lives(self, branch: str) -> bool:
        """Whether the branch's first candidate passed."""
        mine = self.of(branch)
        return bool(mine) and mine[0].passed is not None

    def living(self) -> list[BranchAdded]:
        return [branch for branch in self.branches if self.lives(branch.id)]

    def relatives(self, branch: str) -> tuple[str, ...]:
        """Ancestors that lived, nearest first; a second parent beside the first."""
        found: list[str] = []
        queue = [branch]
        while queue:
            added = self.added(queue.pop(0))
            for parent in (added.parent, added.other_parent):
                if parent is not None and parent not in found and parent != branch:
                    found.append(parent)
                    queue.append(parent)
        return tuple(name for name in found if self.lives(name))

    def failures(self) -> Counter[str]:
        """Failed candidates by class."""
        return Counter(entry.failed.failure.value for entry in self.entries if entry.failed)


def value_of(passed: Passed, column: str) -> float:
    """Raises StudyError when the evaluator left the objective out."""
    for value in passed.values:
        if value.name == column:
            return value.value
    raise StudyError(f"the evaluator gave no value for objective {column}")


def primary(columns: Sequence[Column]) -> list[int]:
    """Indices of the columns that the search is for: the speedups, or all where there are none."""
    speeds = [i for i, column in enumerate(columns) if column.name.startswith("speedup")]
    return speeds or list(range(len(columns)))


def load(directory: Path) -> History:
    """The state of the study that lies in a directory. Raises StudyError when there is none."""
    records = read(directory).records
    if not records:
        raise StudyError(f"the study in {directory} never began; `python -m evotune run` begins it")
    return fold(records)


def fold(records: Sequence[Record], before_step: int | None = None, in_flight: int | None = None) -> History:
    """The state that the records tell, or told at the beginning of a step, another one being in flight: its
    results are left out, and the contests and confirmations that followed them.

    Raises StudyError when the first record is not the study's.
    """
    if not records or not isinstance(records[0], StudyBegun):
        raise StudyError("the journal does not begin with a study record")
    branches: list[BranchAdded] = []
    refusals: list[Refusal] = []
    asked: dict[int, Asked] = {}
    judged: dict[int, Judged] = {}
    retries: Counter[int] = Counter()
    contests: list[Contest] = []
    confirmations: list[Confirmation] = []
    steps = 0
    for record in records:
        step = getattr(record, "step", None)
        if before_step is not None and step is not None and step >= before_step:
            continue
        if isinstance(record, Judged | Contest | Confirmation) and record.step == in_flight:
            continue
        steps = max(steps, step + 1) if step is not None else steps
        match record:
            case BranchAdded():
                branches.append(record)
            case Refusal():
                refusals.append(record)
            case Asked():
                asked[record.index] = record
            case Judged(outcome=Retry()):
                retries[record.index] += 1
            case Judged():
                judged[record.index] = record
            case Contest():
                contests.append(record)
            case Confirmation():
                confirmations.append(record)
    entries = tuple(Entry(asked[i], judged.get(i)) for i in sorted(asked))
    return History(
        records[0],
        tuple(branches),
        entries,
        tuple(refusals),
        retries,
        steps,
        tuple(contests),
        tuple(confirmations),
        in_flight,
    )
