"""The study loop: decide, ask, judge, record, tell.

A step asks for a batch, submits all of it, lets a mutator work while the device does, and collects in order;
where the study says so, the next step is asked for before that, without a look at results on their way.
Each result is in the journal, synced, before Optuna is told, and notes and artifacts are attached before
that, since a finished trial is immutable. Between steps, and at the end, challengers meet champions. After an
interruption the last step is taken up where it stopped: what was asked is asked again with the same knobs, so
a resumed study finds what an uninterrupted one would.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

from evotune import notes, promotion
from evotune.controller import Plan, Slot, decide
from evotune.errors import EvotuneError, SandboxError, StudyError
from evotune.fitness.evaluation import Evaluation, Evaluator
from evotune.fitness.outcome import Failed, Outcome, Retry, Stage
from evotune.fitness.racing import NO_BARS
from evotune.history import Entry, History, fold
from evotune.journal import writing
from evotune.mutators.mutator import Mutator
from evotune.opening import Furnish, Opened, furnish
from evotune.promoter import MOST_RETRIES, Promoter, Schedule, by_share
from evotune.promotion import Turn
from evotune.records import Asked, Confirmation, Contest, Judged
from evotune.search_space.branch import Candidate
from evotune.search_space.sampler import Focus
from evotune.setup import Setup
from evotune.structures import Structures


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

    def meets(self, history: History, due: Turn) -> None:
        """A challenger is about to meet a champion, or a champion to be confirmed: it may take a minute."""
        ...

    def met(self, history: History, record: Contest | Confirmation) -> None:
        """That is recorded."""
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


Flight = tuple[Asked, Future[Evaluation]]
Planner = Callable[[Setup, History], Plan]


def plan_next(setup: Setup, history: History) -> Plan:
    """The step that follows a history."""
    return decide(setup.settings, history, setup.space.legal_count())


@dataclass(frozen=True)
class Decisions:
    """What a run does next. A replay decides as was recorded."""

    plan: Planner = plan_next
    promote: Schedule = by_share


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
        decisions: Decisions | None = None,
    ) -> None:
        self.opened = opened
        self.setup = opened.setup
        self._evaluator = evaluator
        self._structures = Structures(opened, mutators)
        self._promoter = Promoter(opened.setup, evaluator, lambda: self.elapsed_s)
        self._observers = observers
        self._stop = stop or Stop()
        self._furnish = furnishing
        self._decisions = decisions or Decisions()
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
            end = self._search()
            if end is not End.STOPPED:
                self._promote(self.history.steps, over=True)
                end = End.STOPPED if self._stop.requested else end
            for observer in self._observers:
                observer.finished(self, end)
        return end

    def _search(self) -> End:
        # The last steps may have been cut short: one, or two where one was asked ahead.
        step = max(self.history.steps - (2 if self._ahead else 1), 0)
        while True:
            self._refuse_broken_baseline()
            end = self._cut_short()
            flights = self._begin(step, landed=True) if end is None else None
            if flights is None:
                return end or self._finished()
            while flights is not None:
                step += 1
                following = None
                if self._ahead and self._cut_short() is None:
                    following = self._begin(step, landed=False)
                self._land(flights)
                self._refuse_broken_baseline()
                if flights or not self._ahead:  # else the step after it may have results, too
                    self._promote(step, over=False)
                flights = following

    @property
    def _ahead(self) -> bool:
        return self.setup.config.search.ahead

    def _cut_short(self) -> End | None:
        """Why nothing more is to be asked for, if so."""
        if self._stop.requested:
            return End.STOPPED
        return End.TIME if self._out_of_time() else None

    def _finished(self) -> End:
        done = len(self.history.entries) >= self.setup.config.study.trials
        return End.TRIALS if done else End.EXHAUSTED

    def _begin(self, step: int, *, landed: bool) -> list[Flight] | None:
        """Ask for a step and submit it, or what is left of it; None when there is nothing to do.

        With steps asked ahead it never depends on results of the step before it, whether they are there or
        not, so that an interruption changes nothing. Only where nothing can be planned without them, and the
        step before has `landed`, it does.
        """
        views = [step - 1] if self._ahead else []
        for in_flight in (*views, *([None] if landed else [])):
            before = fold(self.opened.records, before_step=step, in_flight=in_flight)
            plan = self._decisions.plan(self.setup, before)
            if plan.slots or plan.mutation is not None:
                return self._launch(Plan(step, plan.slots, plan.mutation), before)
        return None

    def _out_of_time(self) -> bool:
        """Whether what the time limit leaves belongs to the last promotions."""
        limit_s = self.setup.config.study.time_limit_s
        if limit_s is None:
            return False
        return self.elapsed_s >= limit_s - promotion.reserve_s(self.history, self.setup.promotion, limit_s)

    def _promote(self, steps: int, *, over: bool) -> None:
        """Contests and confirmations that are due after so many steps, in the search or after it.

        A step that was asked ahead is none yet: what it was asked for tells nothing.
        """
        while not self._stop.requested:
            history = replace(self.history, steps=steps)
            due = self._decisions.promote(self.setup, history, over)
            if due is None:
                return
            for observer in self._observers:
                observer.meets(history, due)
            record = self._promoter.hold(history, due)
            self.opened.append(record)
            history = self.history
            self.opened.book.publish(notes.championship(history))
            for observer in self._observers:
                observer.met(history, record)

    def _launch(self, plan: Plan, before: History) -> list[Flight]:
        """Ask for what a step plans, submit it, and let a mutator work."""
        earlier = [record for record in self.opened.records if getattr(record, "step", None) == plan.step]
        asked = {record.index: record for record in earlier if isinstance(record, Asked)}
        judged = {record.index for record in earlier if isinstance(record, Judged)}
        # With a result in the journal, or a later ask, all asks of the step are there too, and the proposal
        # if one was due, whatever the plan says now that the study may have been given more trials.
        later = any(isinstance(record, Asked) and record.step > plan.step for record in self.opened.records)
        whole = bool(judged) or later
        slots = [slot for slot in plan.slots if slot.index in asked or not whole]
        missing = [slot for slot in slots if slot.index not in judged]
        # Each is submitted as soon as it is asked for: the first ones build while the sampler thinks on.
        bars = promotion.bars(before, [workload.name for workload in self.setup.workloads])
        flights = []
        for slot in missing:
            ask, candidate = self._ask(plan.step, slot, asked.get(slot.index), before)
            # The default is what others are measured by: it is timed in full.
            near = NO_BARS if slot.index == promotion.BASELINE else bars
            flights.append((ask, self._evaluator.submit(candidate, near)))
        if plan.mutation is not None and not whole:
            self._structures.take(plan, before, earlier)
        return flights

    def _land(self, flights: Sequence[Flight]) -> None:
        """Collect a step's results. Raises what ends the run, once all are recorded and told; at once what
        keeps them from being recorded."""
        trouble: EvotuneError | None = None
        for ask, future in flights:
            met = self._collect(ask, future)
            trouble = trouble or met  # later ones follow from the first
        if trouble is not None:
            raise trouble

    def _ask(self, step: int, slot: Slot, earlier: Asked | None, before: History) -> tuple[Asked, Candidate]:
        space = self.setup.space
        given = earlier.knobs if earlier else slot.start
        start = space.decode(given) if given is not None else None
        if slot.purpose == "baseline" or (slot.purpose == "first" and start is None):
            start = space.default()
        focus = Focus(slot.branch, slot.index, before.relatives(slot.branch), start, before.flying)
        trial, knobs = self.opened.book.ask(focus)
        asked = Asked(step, slot.index, trial, slot.branch, knobs, slot.purpose)
        self.opened.append(asked)
        return asked, Candidate(before.added(slot.branch).branch, space.decode(knobs))

    def _collect(self, asked: Asked, future: Future[Evaluation]) -> EvotuneError | None:
        """Record and tell one result; returns what must end the run once the step is collected."""
        trouble: EvotuneError | None = None
        try:
            evaluation = future.result()
        except EvotuneError as error:  # none of them is the candidate's fault: it is asked for again
            evaluation, trouble = Evaluation(Retry(str(error))), error
        judged = Judged(
            step=asked.step,
            index=asked.index,
            trial=asked.trial,
            outcome=_charged(asked, evaluation.outcome),
            seconds=dict(evaluation.seconds),
            artifacts={label: artifact.digest for label, artifact in evaluation.artifacts.items()},
            elapsed_s=self.elapsed_s,
            saved_s=evaluation.saved_s,
        )
        self.opened.append(judged)
        history = self.history
        self.opened.book.finish(asked, judged, *self._furnish(self.setup, history, asked, judged))
        for observer in self._observers:
            observer.judged(history, history.entries[asked.index])
        if isinstance(judged.outcome, Retry) and history.retries[asked.index] >= MOST_RETRIES:
            return trouble or SandboxError(
                f"candidate {asked.index} met trouble {MOST_RETRIES} times that was not its own: "
                f"{judged.outcome.reason}; `python -m evotune doctor` looks for the cause"
            )
        return trouble

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
