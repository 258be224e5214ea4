"""The study loop: decide, ask, judge, record, tell.

A step asks for a batch, submits all of it, lets a mutator work while the device does, and collects in order.
Each result is in the journal, synced, before Optuna is told, and notes and artifacts are attached before
that, since a finished trial is immutable. After an interruption the last step is taken up where it stopped:
what was asked is asked again with the same knobs, so a resumed study finds what an uninterrupted one would.
"""

import importlib.metadata
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from optuna.storages import BaseStorage

from evotune import __version__, notes
from evotune.config import changes, parse
from evotune.controller import SEED_BRANCH, Plan, Propose, Repair, Slot, decide, randomness
from evotune.errors import DeviceLost, EvotuneError, PatchError, ProposalError, SandboxError, StudyError
from evotune.fitness.evaluation import Evaluation, Evaluator
from evotune.fitness.outcome import Failed, Outcome, Retry, Stage
from evotune.history import Entry, History, fold
from evotune.journal import FILE, Journal, Lock, read, writing
from evotune.mutators.mutator import Mutator, Proposal, Request, Standing
from evotune.pareto import ranked
from evotune.records import Asked, BranchAdded, Judged, Record, Refusal, SessionBegun, StudyBegun
from evotune.search_space.branch import Candidate, frame
from evotune.search_space.sampler import Focus
from evotune.search_space.template import digest
from evotune.setup import Setup, from_header
from evotune.trials import JOURNAL_FILE, TrialBook, mend, quiet, storage_at

# A candidate that met trouble which was not its own this often ends the run: the trouble is here to stay.
_MOST_RETRIES = 3
_VERSIONED = ("numpy", "optuna", "nvidia-cutlass-dsl")


class End(StrEnum):
    """Why a run came to its end."""

    TRIALS = "all trials are done"
    TIME = "the time limit is reached"
    EXHAUSTED = "every legal configuration was tried"
    STOPPED = "it was interrupted"


class Observer(Protocol):
    """Watches a run: the live line, the study-level plots."""

    def judged(self, history: History, entry: Entry) -> None:
        """A candidate was judged and told."""
        ...

    def finished(self, run: "StudyRun", end: End) -> None:
        """The loop ended; the evaluator is still there, the storage is open."""
        ...


@dataclass
class Stop:
    """Set by the first signal: what is in flight is finished, then the loop ends. `signal` is its number."""

    signal: int = 0

    @property
    def requested(self) -> bool:
        return self.signal != 0


@dataclass(frozen=True)
class Opened:
    """A study directory in our hands: locked, its journal open, its storage checked."""

    setup: Setup
    lock: Lock
    journal: Journal
    records: list[Record]
    book: TrialBook
    notes: tuple[str, ...] = ()

    def append(self, record: Record) -> None:
        self.journal.append(record)
        self.records.append(record)

    def close(self) -> None:
        self.journal.close()
        self.lock.release()


def begin(setup: Setup) -> Opened:
    """Make the study directory and its first records. Raises StudyError; then nothing new is left behind."""
    directory = setup.directory
    quiet()
    with writing(directory), _new_directory(directory), _locked(directory) as lock:
        if (directory / FILE).exists() and _began(read(directory).records):
            raise StudyError(
                f"{directory} already holds a study; `python -m evotune resume {directory}` continues it, "
                "or give another --directory"
            )
        for left_by_a_kill in directory.glob(f"{JOURNAL_FILE}*"):
            left_by_a_kill.unlink()
        storage = storage_at(directory, setup.storage_url)
        journal = Journal(directory)
        records = first_records(setup)
        try:
            for record in records:
                journal.append(record)
            book = TrialBook.create(storage, setup.config.study.name, setup.space, setup.columns, directory)
        except StudyError:
            (directory / FILE).unlink()
            raise
    return _session(Opened(setup, lock, journal, records, book))


def _began(records: Sequence[Record]) -> bool:
    """Whether all of `first_records` were written before a process died."""
    return any(isinstance(record, BranchAdded) for record in records)


def resume(directory: Path, setup: Setup | None = None) -> Opened:
    """Take a study up again, after an orderly end or a crash.

    `setup` is what the study file says now; None for what it said then. Raises StudyError when there is no
    study, another process has it, or the study file or the storage changed.
    """
    quiet()
    reading = read(directory)
    if not _began(reading.records):
        raise StudyError(f"the study in {directory} never began; `python -m evotune run` begins it")
    history = fold(reading.records)
    if setup is None:
        setup = from_header(history.begun.config, history.begun.base, directory)
    # Parsed, so that a key which a later version added has its default on both sides.
    then = parse(history.begun.config, str(directory))
    changed = changes(then.as_json(), setup.config.as_json())
    if changed:
        raise StudyError(
            f"the study file changed since the study began: {'; '.join(changed)}; only trials, time_limit_s, "
            "directory, max_cost_usd and cache_mib may change. Undo it, or begin again in another directory"
        )
    with writing(directory), _locked(directory) as lock:
        reading = read(directory)
        asked = [record for record in reading.records if isinstance(record, Asked)]
        if not setup.storage_url:
            if asked and not (directory / JOURNAL_FILE).exists():
                raise StudyError(f"{directory / JOURNAL_FILE} is gone; restore it, or begin again elsewhere")
            mend(directory)
        book = _book(setup, storage_at(directory, setup.storage_url), directory, bool(asked))
        opened = Opened(
            setup, lock, Journal(directory, reading), list(reading.records), book, _told(reading.note)
        )
        _reconcile(opened, asked)
    return _session(opened)


def first_records(setup: Setup) -> list[Record]:
    """How every journal begins: the study and its seed branch."""
    versions = {"evotune": __version__, "python": platform.python_version()}
    for name in _VERSIONED:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return [
        StudyBegun(setup.config.as_json(), str(setup.base.resolve()), setup.columns, versions),
        BranchAdded(-1, SEED_BRANCH, setup.template.source, None, "seed", "the template as shipped"),
    ]


Furnish = Callable[[Setup, History, Asked, Judged], tuple[str, Mapping[str, str]]]


def furnish(setup: Setup, history: History, asked: Asked, judged: Judged) -> tuple[str, Mapping[str, str]]:
    """Note and files of a trial."""
    knobs = setup.space.decode(asked.knobs)
    branch = history.added(asked.branch).branch
    spec = setup.specializations[0]
    files = notes.source_file(setup.template, branch, asked, spec, knobs) | notes.log_file(judged.outcome)
    return notes.note(history, asked, judged), files


Planner = Callable[[Setup, History], Plan]


def plan_next(setup: Setup, history: History) -> Plan:
    """The step that follows a history."""
    return decide(setup.settings, history, setup.space.legal_count())


class StudyRun:
    """One run of the loop over an opened study."""

    def __init__(
        self,
        opened: Opened,
        evaluator: Evaluator,
        mutators: Mapping[str, Mutator],
        *,
        observers: Sequence[Observer] = (),
        stop: Stop | None = None,
        furnishing: Furnish = furnish,
        planner: Planner = plan_next,
    ) -> None:
        self.opened = opened
        self.setup = opened.setup
        self._evaluator = evaluator
        self._mutators = mutators
        self._observers = observers
        self._stop = stop or Stop()
        self._furnish = furnishing
        self._planner = planner
        self._before_s = self.history.elapsed_s
        self._begun = time.monotonic()
        config = self.setup.config
        opened.book.use_sampler(config.search.sampler, config.study.seed)

    @property
    def history(self) -> History:
        """Everything recorded so far."""
        return fold(self.opened.records)

    @property
    def elapsed_s(self) -> float:
        """Running time of the study, all sessions together."""
        return self._before_s + time.monotonic() - self._begun

    def run(self) -> End:
        """Run to the end. Raises StudyError, DeviceLost, SandboxError; what was recorded stays recorded."""
        with writing(self.setup.directory, "; mend that, then resume"):
            end = self._loop()
            for observer in self._observers:
                observer.finished(self, end)
        return end

    def _loop(self) -> End:
        step = max(self.history.steps - 1, 0)  # the last step may have been cut short
        while True:
            self._refuse_broken_baseline()
            if self._stop.requested:
                return End.STOPPED
            limit = self.setup.config.study.time_limit_s
            if limit is not None and self.elapsed_s >= limit:
                return End.TIME
            before = fold(self.opened.records, before_step=step)
            plan = self._planner(self.setup, before)
            if not plan.slots and plan.mutation is None:
                done = len(before.entries) >= self.setup.config.study.trials
                return End.TRIALS if done else End.EXHAUSTED
            self._take(Plan(step, plan.slots, plan.mutation), before)
            step += 1

    def _take(self, plan: Plan, before: History) -> None:
        """One step, or what is left of it."""
        earlier = [record for record in self.opened.records if getattr(record, "step", None) == plan.step]
        asked = {record.index: record for record in earlier if isinstance(record, Asked)}
        judged = {record.index for record in earlier if isinstance(record, Judged)}
        # With a result in the journal all asks of the step are there too, and the proposal if one was due,
        # whatever the plan says now that the study may have been given more trials.
        slots = [slot for slot in plan.slots if slot.index in asked or not judged]
        missing = [slot for slot in slots if slot.index not in judged]
        # Each is submitted as soon as it is asked for: the first ones build while the sampler thinks on.
        flights = [self._launch(plan.step, slot, asked.get(slot.index), before) for slot in missing]
        if plan.mutation is not None and not judged:
            self._mutate(plan, before, earlier)
        trouble: EvotuneError | None = None
        for ask, future in flights:
            trouble = self._collect(ask, future) or trouble
        if trouble is not None:
            raise trouble

    def _launch(
        self, step: int, slot: Slot, earlier: Asked | None, before: History
    ) -> tuple[Asked, Future[Evaluation]]:
        space = self.setup.space
        given = earlier.knobs if earlier else slot.start
        start = space.decode(given) if given is not None else None
        if slot.purpose == "baseline" or (slot.purpose == "first" and start is None):
            start = space.default()
        focus = Focus(slot.branch, slot.index, before.relatives(slot.branch), start)
        trial, knobs = self.opened.book.ask(focus)
        asked = Asked(step, slot.index, trial, slot.branch, knobs, slot.purpose)
        self.opened.append(asked)
        candidate = Candidate(before.added(slot.branch).branch, space.decode(knobs))
        return asked, self._evaluator.submit(candidate)

    def _collect(self, asked: Asked, future: Future[Evaluation]) -> EvotuneError | None:
        """Record and tell one result; returns what must end the run once the step is collected."""
        trouble: EvotuneError | None = None
        try:
            evaluation = future.result()
        except (DeviceLost, SandboxError) as error:
            evaluation, trouble = Evaluation(Retry(str(error))), error
        judged = Judged(
            step=asked.step,
            index=asked.index,
            trial=asked.trial,
            outcome=_charged(asked, evaluation.outcome),
            seconds=dict(evaluation.seconds),
            artifacts={label: artifact.digest for label, artifact in evaluation.artifacts.items()},
            elapsed_s=self.elapsed_s,
        )
        self.opened.append(judged)
        history = self.history
        self.opened.book.finish(asked, judged, *self._furnish(self.setup, history, asked, judged))
        for observer in self._observers:
            observer.judged(history, history.entries[asked.index])
        if isinstance(judged.outcome, Retry) and history.retries[asked.index] >= _MOST_RETRIES:
            return trouble or SandboxError(
                f"candidate {asked.index} met trouble {_MOST_RETRIES} times that was not its own: "
                f"{judged.outcome.reason}; `python -m evotune doctor` looks for the cause"
            )
        return trouble

    def _mutate(self, plan: Plan, before: History, earlier: Sequence[Record]) -> None:
        """Ask for a proposal, unless the journal already has this step's."""
        if any(isinstance(record, BranchAdded) for record in earlier):
            return
        refused = {record.operator for record in earlier if isinstance(record, Refusal)}
        match plan.mutation:
            case Repair(branch=broken) if broken.operator not in refused:
                self._repair(plan.step, before, broken)
            case Propose(operators=operators):
                for name in operators:
                    if name not in refused and self._propose(plan.step, before, name):
                        return
            case _:
                return

    def _propose(self, step: int, before: History, operator: str) -> bool:
        """Whether the operator gave a new structure."""
        try:
            request = self._request(step, before, operator)
            proposal = self._mutators[operator].propose(request)
            self._check(proposal, before, request)
        except (ProposalError, PatchError) as error:
            problem = error.kind if isinstance(error, ProposalError) else "patch"
            self.opened.append(Refusal(step, operator, problem, str(error)))
            return False
        self.opened.append(self._added(step, before, operator, proposal, None))
        return True

    def _repair(self, step: int, before: History, broken: BranchAdded) -> None:
        failed = before.of(broken.id)[0].failed
        mutator = self._mutators.get(broken.operator)
        proposal = None
        problem, detail = "no_repair", "the operator does not repair"
        try:
            if mutator is not None and failed is not None:
                request = self._request(step, before, broken.operator)
                proposal = mutator.repair(request, self._proposal(broken), failed)
            if proposal is not None:
                self._check(proposal, before, request)
        except (ProposalError, PatchError) as error:
            proposal = None
            problem, detail = (error.kind if isinstance(error, ProposalError) else "patch"), str(error)
        if proposal is None:
            self.opened.append(Refusal(step, broken.operator, problem, detail, broken.id))
        else:
            self.opened.append(self._added(step, before, broken.operator, proposal, broken.id))

    def _request(self, step: int, before: History, operator: str) -> Request:
        return Request(
            template=self.setup.template,
            specializations=self.setup.specializations,
            standings=standings(self.setup, before),
            tried=frozenset(branch.branch.digest for branch in before.branches),
            seed=randomness(self.setup.config.study.seed, "mutation", step, operator),
        )

    def _check(self, proposal: Proposal, before: History, request: Request) -> None:
        """What holds for every structure, whoever proposed it. Raises PatchError or ProposalError."""
        if digest(proposal.source) in request.tried:
            raise ProposalError("the proposed source was tried before", "repeated")
        if proposal.parent not in {branch.id for branch in before.branches}:
            raise ProposalError(f"the proposal's parent {proposal.parent} is unknown", "unknown_parent")
        if frame(proposal.source) != frame(before.added(proposal.parent).source):
            raise PatchError("the proposal changes text outside the evolvable stages")

    def _added(
        self, step: int, before: History, operator: str, proposal: Proposal, repairs: str | None
    ) -> BranchAdded:
        space = self.setup.space
        legal = proposal.start is not None and space.why_not(proposal.start) is None
        return BranchAdded(
            step=step,
            id=f"b{len(before.branches):02}",
            source=proposal.source,
            parent=proposal.parent,
            origin=proposal.origin,
            note=proposal.note,
            operator=operator,
            other_parent=proposal.other_parent,
            start=space.encode(proposal.start) if legal else None,
            repairs=repairs,
            cost_usd=proposal.cost_usd,
            reference=proposal.reference,
            extra=dict(proposal.extra),
        )

    def _proposal(self, branch: BranchAdded) -> Proposal:
        """A recorded branch as its mutator proposed it."""
        return Proposal(
            source=branch.source,
            parent=branch.parent or SEED_BRANCH,
            origin=branch.origin,
            note=branch.note,
            other_parent=branch.other_parent,
            start=self.setup.space.decode(branch.start) if branch.start is not None else None,
            cost_usd=branch.cost_usd,
            reference=branch.reference,
            extra=branch.extra,
        )

    def _refuse_broken_baseline(self) -> None:
        entries = self.history.entries
        failed = entries[0].failed if entries else None
        if failed is not None:
            raise StudyError(
                f"the default of template {self.setup.template.name} does not pass, so there is no speed to "
                f"compare with: {notes.headline(failed)}"
            )


def _charged(asked: Asked, outcome: Outcome) -> Outcome:
    """The outcome, but trouble of the machine when the default kernel failed while timed against itself:
    nothing it did can be told apart from what the default did."""
    if asked.index == 0 and isinstance(outcome, Failed) and outcome.stage is Stage.TIME:
        return Retry(f"the default kernel cannot be timed against itself ({notes.headline(outcome)})")
    return outcome


def standings(setup: Setup, history: History) -> tuple[Standing, ...]:
    """Living branches for a mutator, the one with the best candidate first."""
    best = ranked(history, history.entries)
    order = dict.fromkeys(entry.asked.branch for entry in best)
    return tuple(_standing(setup, history, branch) for branch in order if history.lives(branch))


def _standing(setup: Setup, history: History, branch: str) -> Standing:
    mine = history.of(branch)
    decode = setup.space.decode
    failures: list[tuple[Any, Failed]] = [(decode(e.asked.knobs), e.failed) for e in mine if e.failed]
    return Standing(
        branch=history.added(branch).branch,
        best=tuple((decode(e.asked.knobs), e.passed) for e in ranked(history, mine) if e.passed),
        failures=tuple(reversed(failures)),
        trials=len(mine),
    )


def _book(setup: Setup, storage: BaseStorage, directory: Path, begun: bool) -> TrialBook:
    """The Optuna study again; made now if the run died before its first ask."""
    name = setup.config.study.name
    try:
        return TrialBook.load(storage, name, setup.space, setup.columns, directory)
    except StudyError:
        if begun:
            raise
    return TrialBook.create(storage, name, setup.space, setup.columns, directory)


def _reconcile(opened: Opened, asked: Sequence[Asked]) -> None:
    """Tell Optuna the results that it missed."""
    judged = [record for record in opened.records if isinstance(record, Judged)]
    untold = opened.book.reconcile(asked, judged)
    by_trial = {ask.trial: ask for ask in asked}
    history = fold(opened.records)
    for result in untold:
        ask = by_trial[result.trial]
        opened.book.finish(ask, result, *furnish(opened.setup, history, ask, result))


def _session(opened: Opened) -> Opened:
    opened.append(SessionBegun(datetime.now().astimezone().isoformat(timespec="seconds"), os.getpid()))
    return opened


def _told(note: str) -> tuple[str, ...]:
    return (note,) if note else ()


@contextmanager
def _locked(directory: Path) -> Iterator[Lock]:
    """A lock that is kept when the body ends well and given back when it fails."""
    lock = Lock(directory)
    try:
        yield lock
    except BaseException:
        lock.release()
        raise


@contextmanager
def _new_directory(directory: Path) -> Iterator[None]:
    """Make the directory, and unmake it when it was not there before and the body fails."""
    existed = directory.exists()
    directory.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        if not existed:
            shutil.rmtree(directory, ignore_errors=True)
        raise
