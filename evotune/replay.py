"""A recorded study as a device and as mutators: the loop runs again and finds the same candidates.

`run_in_memory` also compares samplers on a recorded sweep.
"""

import json
import tempfile
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from optuna.storages import InMemoryStorage

from evotune.controller import Plan, randomness
from evotune.errors import ProposalError, StudyError
from evotune.fitness.evaluation import Comparison, Evaluation, Evaluator, Fallen, Purpose
from evotune.fitness.outcome import Failed, Outcome
from evotune.fitness.racing import NO_BARS, Bars
from evotune.fitness.timing import Timed
from evotune.history import History, fold
from evotune.journal import Journal, Lock, read
from evotune.mutators.mutator import Mutator, Proposal, Request
from evotune.opening import Opened, first_records
from evotune.promoter import Schedule
from evotune.promotion import BASELINE, Defence, Turn, matches, titles
from evotune.records import Asked, BranchAdded, Confirmation, Contest, Judged, Record, Refusal
from evotune.search_space.branch import Candidate
from evotune.search_space.space import Space
from evotune.setup import Setup, from_header
from evotune.structures import proposal_of
from evotune.study import Decisions, Planner, StudyRun, plan_next
from evotune.trials import TrialBook, quiet

Key = tuple[str, str]
Pairing = tuple[Key, Key, str, str]
"""Challenger, incumbent, group, purpose."""


class ReplayEvaluator:
    """Answers from records, each outcome of a candidate once and in order; the last one again after that.

    So with comparisons, whose blocks must be enough where they were enough before.
    """

    def __init__(
        self,
        space: Space,
        outcomes: Mapping[Key, Sequence[Outcome]],
        comparisons: Sequence[tuple[Pairing, Contest | Confirmation]] = (),
    ) -> None:
        self._space = space
        self._outcomes = {key: deque(found) for key, found in outcomes.items()}
        self._comparisons: defaultdict[Pairing, deque[Contest | Confirmation]] = defaultdict(deque)
        for pairing, record in comparisons:
            self._comparisons[pairing].append(record)

    @classmethod
    def of(cls, records: Sequence[Record], space: Space) -> "ReplayEvaluator":
        """What a journal's candidates came to."""
        branches = {record.id: record.branch for record in records if isinstance(record, BranchAdded)}
        asked = {record.trial: record for record in records if isinstance(record, Asked)}
        keys = {
            ask.index: _key(space, Candidate(branches[ask.branch], space.decode(ask.knobs)))
            for ask in asked.values()
        }
        outcomes: defaultdict[Key, list[Outcome]] = defaultdict(list)
        comparisons: list[tuple[Pairing, Contest | Confirmation]] = []
        for record in records:
            match record:
                case Judged():
                    outcomes[keys[record.index]].append(record.outcome)
                case Contest():
                    pair = keys[record.challenger], keys[record.champion]
                    comparisons.append(((*pair, record.group, "promotion"), record))
                case Confirmation():
                    pair = keys[record.champion], keys[BASELINE]
                    comparisons.append(((*pair, record.group, "confirmation"), record))
        return cls(space, outcomes, comparisons)

    def submit(self, candidate: Candidate, bars: Bars = NO_BARS) -> Future[Evaluation]:
        """A future that is done. Raises StudyError for a candidate that was not recorded."""
        found = self._outcomes.get(_key(self._space, candidate))
        if found is None:
            raise StudyError(f"the journal has no result for {candidate.branch.id} with {candidate.knobs}")
        future: Future[Evaluation] = Future()
        future.set_result(Evaluation(found.popleft() if len(found) > 1 else found[0]))
        return future

    def compare(
        self,
        challenger: Candidate,
        incumbent: Candidate,
        enough: Callable[[Timed], bool],
        *,
        group: str,
        purpose: Purpose,
    ) -> Comparison | Fallen | Failed:
        """What was measured. Raises StudyError for a comparison that was not recorded, or ends elsewhere."""
        mine, theirs = (_key(self._space, candidate) for candidate in (challenger, incumbent))
        waiting = self._comparisons[mine, theirs, group, purpose]
        if not waiting:
            raise StudyError(f"the journal has no {purpose} of {challenger.branch.id} on {group}")
        record = waiting.popleft()
        if record.failed is not None:
            return record.failed
        if isinstance(record, Contest) and record.fallen:
            return Fallen(record.fallen)
        blocks = tuple(Timed(block, 0.0, 0.0) for block in record.blocks)
        if [enough(block) for block in blocks] != [False] * (len(blocks) - 1) + [True]:
            raise StudyError(f"a {purpose} on {group} is not decided after the blocks that were recorded")
        return Comparison(blocks, 0.0, record.seconds)

    def close(self) -> None:
        """Nothing runs."""


@dataclass
class ReplayMutator:
    """Gives what a mutator gave, by the seed that it was asked with.

    Attributes:
        proposals, repairs: records by request seed.
    """

    name: str
    space: Space
    proposals: dict[int, BranchAdded | Refusal] = field(default_factory=dict)
    repairs: dict[int, BranchAdded | Refusal] = field(default_factory=dict)

    def propose(self, request: Request) -> Proposal:
        match self.proposals.get(request.seed):
            case BranchAdded() as added:
                return proposal_of(added, self.space)
            case Refusal() as refusal:
                raise ProposalError(refusal.detail, refusal.problem)
            case _:
                raise ProposalError(f"{self.name} was not asked here when the journal was written", "replay")

    def repair(self, request: Request, proposal: Proposal, failed: Failed) -> Proposal | None:
        match self.repairs.get(request.seed):
            case BranchAdded() as added:
                return proposal_of(added, self.space)
            case Refusal(problem=problem, detail=detail) if problem != "no_repair":
                raise ProposalError(detail, problem)
            case _:
                return None


def mutators_of(records: Sequence[Record], space: Space, seed: int) -> dict[str, ReplayMutator]:
    """The mutators of a journal by operator name."""
    found: dict[str, ReplayMutator] = {}
    for record in records:
        if isinstance(record, BranchAdded | Refusal) and record.operator:
            mutator = found.setdefault(record.operator, ReplayMutator(record.operator, space))
            place = mutator.proposals if record.repairs is None else mutator.repairs
            place[randomness(seed, "mutation", record.step, record.operator)] = record
    return found


def replay(directory: Path) -> tuple[Record, ...]:
    """Run a recorded study again from its journal alone and return the records of the second run.

    A last step that was cut short is left out. Raises StudyError when the loop asks for something that was
    not recorded: what decides has changed since.
    """
    records = _whole_steps(read(directory).records)
    history = fold(records)
    setup = from_header(history.begun.config, history.begun.base, directory)
    config = setup.config
    study = config.study.model_copy(update={"trials": len(history.entries), "time_limit_s": None})
    setup = replace(setup, config=config.model_copy(update={"study": study}))
    mutators: dict[str, Any] = mutators_of(records, setup.space, study.seed)
    for name in config.mutation.operators:
        mutators.setdefault(name, ReplayMutator(name, setup.space))
    evaluator = ReplayEvaluator.of(records, setup.space)
    decisions = Decisions(_planned_as_recorded(records), _promoted_as_recorded(records))
    return run_in_memory(setup, evaluator, mutators, decisions)


def run_in_memory(
    setup: Setup,
    evaluator: Evaluator,
    mutators: Mapping[str, Mutator],
    decisions: Decisions | None = None,
) -> tuple[Record, ...]:
    """The loop without a study directory or notes: for replays and for comparing samplers. The records."""
    quiet()
    with tempfile.TemporaryDirectory(prefix="evotune-replay-") as folder:
        directory = Path(folder)
        book = TrialBook.create(InMemoryStorage(), "replay", setup.space, setup.columns, directory)
        opened = Opened(setup, Lock(directory), Journal(directory), [], book)
        for record in first_records(setup):
            opened.append(record)
        StudyRun(opened, evaluator, mutators, furnishing=_nothing, decisions=decisions).run()
        opened.close()
    return tuple(opened.records)


def _whole_steps(records: Sequence[Record]) -> tuple[Record, ...]:
    """Records without the last step if one of its candidates has no result."""
    asked = {record.trial: record for record in records if isinstance(record, Asked)}
    judged = {record.trial for record in records if isinstance(record, Judged)}
    # A candidate that a killed process left behind was asked for again in the same step, under another trial.
    done = {(ask.step, ask.index) for trial, ask in asked.items() if trial in judged}
    cut = [ask.step for ask in asked.values() if (ask.step, ask.index) not in done]
    end = min(cut, default=None)
    return tuple(r for r in records if end is None or getattr(r, "step", -1) < end)


def _planned_as_recorded(records: Sequence[Record]) -> Planner:
    """Plan as the loop does, but no further than each step went: a study may have been given more trials."""
    slots = {(record.step, record.index) for record in records if isinstance(record, Asked)}
    proposals = {record.step for record in records if isinstance(record, BranchAdded | Refusal)}

    def plan(setup: Setup, history: History) -> Plan:
        full = plan_next(setup, history)
        kept = tuple(slot for slot in full.slots if (full.step, slot.index) in slots)
        return Plan(full.step, kept, full.mutation if full.step in proposals else None)

    return plan


def _promoted_as_recorded(records: Sequence[Record]) -> Schedule:
    """When and in which group as recorded, which is the clock's business; who meets whom as decided now."""
    recorded = [record for record in records if isinstance(record, Contest | Confirmation)]

    def promote(setup: Setup, history: History, over: bool) -> Turn | None:
        done = len(history.contests) + len(history.confirmations)
        due = recorded[done] if done < len(recorded) else None
        if due is None or due.step != history.steps - 1:
            return None
        if isinstance(due, Confirmation):
            return Defence(due.group, next(t.champion for t in titles(history) if t.group == due.group))
        found = [match for match in matches(history, setup.promotion) if match.group == due.group]
        if not found:
            raise StudyError(f"the journal has a promotion on {due.group} where nobody may challenge")
        return found[0]

    return promote


def _nothing(setup: Setup, history: History, asked: Asked, judged: Judged) -> tuple[str, Mapping[str, str]]:
    return "", {}


def _key(space: Space, candidate: Candidate) -> Key:
    return candidate.branch.digest, json.dumps(space.encode(candidate.knobs), sort_keys=True)
