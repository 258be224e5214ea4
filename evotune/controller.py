"""What a study does next: which branches get candidates, and whether a mutator is asked.

`decide` is a pure function of the settings, the seed and the history before the step; nothing here knows a
clock, a device or Optuna. That is why a journal replays to the same candidates.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from evotune.bandit import Bandit
from evotune.history import Entry, History, primary, value_of
from evotune.pareto import ranked
from evotune.records import BranchAdded, Knobs, Purpose
from evotune.search_space.branch import SEED_BRANCH

# A new best counts against stagnation when it is this much better: twice the noise of a screening time.
_PROGRESS = 1.02


@dataclass(frozen=True)
class Settings:
    """The part of a study file that decides.

    Attributes:
        batch: candidates a step.
        warmup: candidates a new branch gets before it must compete.
        operators: names of mutators, asked in turn.
        every: judged candidates between proposals; 0 for never on this ground.
        stagnation: judged candidates without progress that call for a proposal; 0 likewise.
        max_branches: living branches that compete; the worst beyond rest.
        trials: candidates in all.
    """

    seed: int
    batch: int
    warmup: int
    operators: tuple[str, ...]
    every: int
    stagnation: int
    max_branches: int
    trials: int


@dataclass(frozen=True)
class Slot:
    """One candidate of a step. `start` gives its knobs; None leaves them to the sampler."""

    index: int
    branch: str
    purpose: Purpose
    start: Knobs | None = None


@dataclass(frozen=True)
class Propose:
    """Ask these mutators in turn until one gives a new structure."""

    operators: tuple[str, ...]


@dataclass(frozen=True)
class Repair:
    """Ask the mutator that made it for a second try at a branch whose first candidate failed."""

    branch: BranchAdded


@dataclass(frozen=True)
class Plan:
    """A step. No slots and no mutation: nothing is left to do."""

    step: int
    slots: tuple[Slot, ...]
    mutation: Propose | Repair | None = None


def randomness(seed: int, *where: int | str) -> int:
    """63 bits that depend on the study's seed and the place alone."""
    text = "/".join(str(part) for part in (seed, *where))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def decide(settings: Settings, history: History, legal_count: int | None = None) -> Plan:
    """The next step. A branch has `legal_count` configurations, None for more than anybody tries."""
    step = history.steps
    if not history.entries:
        return Plan(step, (Slot(0, SEED_BRANCH, "baseline"),))
    slots = [
        Slot(entry.asked.index, entry.asked.branch, "retry", entry.asked.knobs)
        for entry in history.entries
        if entry.judged is None and entry.asked.step != history.in_flight
    ]
    left = settings.trials - len(history.entries)
    for branch in history.branches:
        if left > 0 and not history.of(branch.id):
            slots.append(Slot(len(history.entries) + _new(slots), branch.id, "first", start(history, branch)))
            left -= 1
    slots += _tuned(settings, history, slots, left, legal_count)
    mutation = _mutation(settings, history) if left > 0 else None
    return Plan(step, tuple(slots), mutation)


def start(history: History, branch: BranchAdded) -> Knobs | None:
    """Knobs of a branch's first candidate: what the proposal asks for, else the best of a parent."""
    if branch.start is not None:
        return branch.start
    for parent in (branch.parent, branch.other_parent):
        found = ranked(history, history.of(parent)) if parent else []
        if found:
            return found[0].asked.knobs
    return None


def _new(slots: Sequence[Slot]) -> int:
    return sum(slot.purpose != "retry" for slot in slots)


def _tuned(
    settings: Settings, history: History, taken: Sequence[Slot], left: int, legal_count: int | None
) -> list[Slot]:
    """Fill the batch with candidates that the bandit hands out."""
    first = len(history.entries) + _new(taken)
    bandit = Bandit(history, _competing(settings, history), settings.warmup, legal_count)
    slots = []
    for index in range(first, first + min(settings.batch - len(taken), left)):
        branch = bandit.choose(np.random.default_rng(randomness(settings.seed, "branch", index)))
        if branch is None:
            break
        slots.append(Slot(index, branch, "tune"))
    return slots


def _competing(settings: Settings, history: History) -> list[str]:
    """Living branches without the worst beyond `max_branches`; newcomers in warm-up always compete.

    Beside the default kernel the seed branch is taken to live: the study ends where it does not.
    """
    living = [branch.id for branch in history.living()]
    if not living and history.in_flight == history.entries[0].asked.step:
        return [SEED_BRANCH]
    if len(living) <= settings.max_branches:
        return living
    order = Bandit(history, living, settings.warmup).order()
    kept = set(order[: settings.max_branches])
    return [b for b in living if b in kept or len(history.of(b)) < settings.warmup]


def _mutation(settings: Settings, history: History) -> Propose | Repair | None:
    if not settings.operators or not history.living():
        return None
    broken = _to_repair(history)
    if broken is not None:
        return Repair(broken)
    waiting = any(not history.of(branch.id) for branch in history.branches)
    if waiting or not _due(settings, history):
        return None
    turn = len(_proposal_steps(history)) % len(settings.operators)
    return Propose(settings.operators[turn:] + settings.operators[:turn])


def _to_repair(history: History) -> BranchAdded | None:
    """The first branch whose first candidate failed, that is no repair and was not tried to be repaired."""
    tried = {branch.repairs for branch in history.branches} | {
        refusal.repairs for refusal in history.refusals
    }
    for branch in history.branches:
        mine = history.of(branch.id)
        first_failed = bool(mine) and mine[0].failed is not None
        if first_failed and branch.operator and branch.repairs is None and branch.id not in tried:
            return branch
    return None


def _proposal_steps(history: History) -> list[int]:
    """Steps in which a new structure (not a repair) was asked for."""
    asked: list[Any] = [branch for branch in history.branches if branch.operator and branch.repairs is None]
    asked += [refusal for refusal in history.refusals if refusal.repairs is None]
    return sorted({record.step for record in asked})


def _due(settings: Settings, history: History) -> bool:
    judged = history.judged
    steps = _proposal_steps(history)
    since = sum(entry.asked.step >= steps[-1] for entry in judged) if steps else len(judged)
    if settings.every and since >= settings.every:
        return True
    return bool(settings.stagnation) and min(since, _without_progress(history, judged)) >= settings.stagnation


def _without_progress(history: History, judged: Sequence[Entry]) -> int:
    """Judged candidates since one of the primary columns got a clearly better best."""
    best: dict[str, float] = {}
    last = -1
    for position, entry in enumerate(judged):
        for j in primary(history.columns):
            column = history.columns[j]
            if entry.passed is None:
                continue
            value = value_of(entry.passed, column.name)
            known = best.get(column.name)
            gain = _gain(value, known, column.maximize) if known is not None else None
            if gain is None or gain >= _PROGRESS:
                best[column.name] = value
                last = position
    return len(judged) - 1 - last


def _gain(value: float, known: float, maximize: bool) -> float:
    """How many times better; 0 where a ratio says nothing."""
    better, worse = (value, known) if maximize else (known, value)
    return better / worse if worse > 0 else 0.0
