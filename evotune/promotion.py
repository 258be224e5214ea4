"""Who is champion of a workload group, who may challenge, and when: a pure function of what was recorded.

Screening may be noisy, and the best of hundreds of noisy values is mostly luck: of 300 equally fast ones
timed once at noise sigma the apparent best beats the truth by 2.9 sigma. So a screening value makes a
*challenger*, no more. A champion is made by a test (`sequential.PairedTest`) in paired blocks against the
champion before it, the first of which is the template's default; the probability that a study ever promotes a
challenger which is no faster is at most `alpha`, over all its tests and groups together (`sequential.level`).
What is published of a champion is measured afterwards, against the default, on data that chose nothing.

Which candidates are tried is decided by screening alone, so that a study asks for the same ones whatever its
promotions cost. One thing is fed back: who was found wrong sets no bar any more that others are timed
against.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import median

from evotune.fitness.outcome import Measurement, Passed
from evotune.fitness.racing import Bars, log_speedup
from evotune.fitness.sequential import ALPHA, MOST_BLOCKS, Estimate, PairedTest, estimate, level
from evotune.history import Entry, History
from evotune.records import Blocks, Confirmation, Contest

BASELINE = 0
"""Index of the candidate that is the template's default: the first champion of every group."""

_MAD = 1.4826  # median absolute deviation to standard deviation, for a normal law
_MEDIAN = 1.2533  # standard error of a median over that of a mean, likewise
# What things cost in candidates judged: solving the full gate's cases, which the first contest waits for
# (7 where two processors are idle, 20 where they are not), and the rest of a contest or a confirmation.
_SOLVING, _MEETING = 12, 3
_MOST_REFUSED = 3
_KEPT = 1 << 16  # measurements: every step looks at all of a study's again, of which few are new


@dataclass(frozen=True)
class PromotionPlan:
    """How champions are made.

    Attributes:
        alpha: bound on the probability that a study ever promotes a challenger that is no faster.
        share: part of the running time that promotions and confirmations may take; 0 for no champions. At
            most half of it goes while the search runs; under a time limit the rest is kept for the end.
        within: how many standard errors of the difference a candidate's screening value may fall short of the
            champion's and still challenge.
        most_blocks: a test that is not decided by then leaves the champion where it is.
        confirmation_blocks: blocks of a champion against the default, for the published value.
    """

    alpha: float = field(default=ALPHA, metadata={"gt": 0.0, "lt": 1.0})
    share: float = field(default=0.1, metadata={"ge": 0.0, "le": 1.0})
    within: float = field(default=2.0, metadata={"ge": 0.0})
    most_blocks: int = MOST_BLOCKS
    confirmation_blocks: int = 20


@dataclass(frozen=True)
class Title:
    """How a group's championship stands.

    Attributes:
        champion: candidate by index; `BASELINE` until a challenger won.
        won: the contest that made the champion; None for the default.
        contests: all of the group.
        confirmation: of this champion.
    """

    group: str
    champion: int
    won: Contest | None
    contests: tuple[Contest, ...]
    confirmation: Confirmation | None

    @property
    def published(self) -> Estimate | None:
        """The default's time over the champion's, from confirmation blocks alone; None before them."""
        return estimate(log_ratios(self.confirmation.blocks)) if self.confirmation else None

    @property
    def resolved(self) -> bool | None:
        """Whether its gain may be claimed: the interval excludes none, and it is no less than what the
        machine can tell. None before there is a value."""
        if self.published is None or self.confirmation is None:
            return None
        least = self.confirmation.resolution or 0.0
        return self.published.low > 1 and math.log(self.published.median) >= least


@dataclass(frozen=True)
class Match:
    """A contest to be held.

    Attributes:
        level: of its test.
        hope: log-ratio of the two screening values.
    """

    group: str
    challenger: int
    champion: int
    level: float
    hope: float

    def test(self, plan: PromotionPlan) -> PairedTest:
        return PairedTest(self.level, most_blocks=plan.most_blocks)


@dataclass(frozen=True)
class Defence:
    """A confirmation to be made."""

    group: str
    champion: int


Turn = Match | Defence


def log_ratio(block: Sequence[Measurement]) -> float:
    """Log of the incumbent's time over the challenger's, by the fastest call of each; mean over workloads."""
    logs = [log_speedup(min(m.baseline_samples_us), min(m.samples_us)) for m in block]
    return sum(logs) / len(logs)


def log_ratios(blocks: Blocks) -> list[float]:
    return [log_ratio(block) for block in blocks]


def robust_sigma(deviations: Iterable[float]) -> float:
    """Standard deviation, from deviations of either sign about the middle: their tails do not count."""
    return _MAD * median(map(abs, deviations))


def titles(history: History) -> tuple[Title, ...]:
    """Of every workload group, in the study's order; none before the default passed."""
    out = disqualified(history)
    return tuple(_title(history, group, out) for group in _groups(history))


def _title(history: History, group: str, out: frozenset[int]) -> Title:
    contests = tuple(contest for contest in history.contests if contest.group == group)
    wins = [c for c in contests if c.promoted and c.challenger not in out]
    won = wins[-1] if wins else None
    champion = won.challenger if won else BASELINE
    confirmed = [c for c in history.confirmations if (c.group, c.champion) == (group, champion) and c.blocks]
    return Title(group, champion, won, contests, confirmed[-1] if confirmed else None)


def disqualified(history: History) -> frozenset[int]:
    """Candidates found wrong after screening, by a full gate or when timed: out of every group for good."""
    out = {contest.challenger for contest in history.contests if contest.failed is not None}
    out |= {contest.champion for contest in history.contests if contest.fallen}
    out |= {c.champion for c in history.confirmations if c.failed is not None}
    return frozenset(out)


def standing(history: History) -> list[Entry]:
    """Candidates that passed and were not found wrong since: what may be shown as good, or exported."""
    out = disqualified(history)
    return [entry for entry in history.judged if entry.passed and entry.asked.index not in out]


def matches(history: History, plan: PromotionPlan) -> list[Match]:
    """The next contest of each group that has a challenger, most hopeful first."""
    noise = _pair_noise(history)
    next_level = level(plan.alpha, [c.promoted for c in history.contests if c.tested])
    out = disqualified(history)
    found = []
    for title in titles(history):
        best = _challenger(history, plan, title, noise, out)
        if best is not None:
            challenger, hope = best
            found.append(Match(title.group, challenger.asked.index, title.champion, next_level, hope))
    return sorted(found, key=lambda match: -match.hope)


def turn(history: History, plan: PromotionPlan, *, over: bool, limit_s: float | None = None) -> Turn | None:
    """What is due now: while the search runs, or once it is `over` under a time limit."""
    if not plan.share:
        return None
    spent_s, next_s = spent(history), _expected_s(history)
    if not over and spent_s + next_s > plan.share / 2 * history.elapsed_s:
        return None
    waiting = matches(history, plan)
    if not over:
        return next(iter(waiting), None)
    unconfirmed = [
        Defence(title.group, title.champion)
        for title in titles(history)
        if title.champion != BASELINE and title.confirmation is None
    ]
    # Every group has its front-runner tested, whatever the share says: a short study has champions too.
    due = [match for match in waiting if _untested(history, match.group)]
    within_s = plan.share * max(history.elapsed_s, limit_s or 0.0)
    if not due and spent_s + next_s * (1 + len(unconfirmed)) <= within_s:
        due = waiting
    return due[0] if due else next(iter(unconfirmed), None)


def reserve_s(history: History, plan: PromotionPlan, limit_s: float) -> float:
    """How much of the time limit the search must leave to promotions and confirmations: what is left of their
    share, and in any case what a contest and a confirmation of each group will take."""
    if not plan.share:
        return 0.0
    solving = 0 if history.contests else _SOLVING
    least_s = (solving + 2 * _MEETING * len(_groups(history))) * _candidate_s(history)
    return min(max(plan.share * limit_s - spent(history), least_s), limit_s / 2)


def spent(history: History) -> float:
    """Seconds that promotions and confirmations took."""
    contests = sum(contest.seconds for contest in history.contests)
    return contests + sum(confirmation.seconds for confirmation in history.confirmations)


def bars(history: History, workloads: Sequence[str] = ()) -> Bars:
    """What a candidate must come near on each workload to be timed in full: see `racing`.

    Before anybody passed it is the default's own speed on `workloads`, by which all are measured.
    """
    found = dict.fromkeys(workloads, 1.0)
    passed = [entry.passed for entry in standing(history) if entry.passed]
    for group in _groups(history):
        best = max(passed, key=lambda candidate: screened(candidate, group))
        found |= {m.workload: m.speedup for m in best.measurements if m.group == group}
    return found


def screened(passed: Passed, group: str) -> float:
    """Log of the default's time over the candidate's in screening, the mean over the group's workloads."""
    logs = [_screened(m) for m in passed.measurements if m.group == group]
    return sum(logs) / len(logs)


@lru_cache(_KEPT)
def _screened(measured: Measurement) -> float:
    return math.log(measured.speedup)


@lru_cache(_KEPT)
def _residuals(measured: Measurement) -> tuple[float, ...]:
    """How far each timed pair's log-ratio is from their median, as if that were the truth."""
    pairs = zip(measured.baseline_samples_us, measured.samples_us, strict=True)
    logs = [log_speedup(theirs_us, mine_us) for theirs_us, mine_us in pairs]
    if len(logs) < 2:
        return ()
    middle, few = median(logs), math.sqrt(len(logs) / (len(logs) - 1))
    return tuple(few * abs(log - middle) for log in logs)


def _groups(history: History) -> tuple[str, ...]:
    default = history.entries[BASELINE].passed if history.entries else None
    return tuple(dict.fromkeys(m.group for m in default.measurements)) if default else ()


def _challenger(
    history: History, plan: PromotionPlan, title: Title, noise: Mapping[str, float], out: frozenset[int]
) -> tuple[Entry, float] | None:
    """The best screened candidate that may challenge, and by how much it is ahead; nobody meets a standing
    champion twice."""
    champion = history.entries[title.champion].passed
    assert champion is not None  # only what passed was ever a challenger, and the default must
    # The default was beaten by the first champion, also where that is out since: to beat it is no gain.
    barred = out | {title.champion, BASELINE}
    for contest in title.contests:
        winner, loser = contest.challenger, contest.champion
        if not contest.promoted:
            winner, loser = loser, winner
        barred |= {loser} if winner not in out else set()
    theirs, uncertain = screened(champion, title.group), _error(champion, title.group, noise)
    best: tuple[Entry, float] | None = None
    for entry in history.judged:
        if entry.passed is None or entry.asked.index in barred:
            continue
        hope = screened(entry.passed, title.group) - theirs
        if best is not None and hope <= best[1]:
            continue
        if hope >= -plan.within * math.hypot(_error(entry.passed, title.group, noise), uncertain):
            best = entry, hope
    return best


def _pair_noise(history: History) -> dict[str, float]:
    """By workload the standard deviation of a timed pair's log-ratio, robustly, over all that passed."""
    residuals: dict[str, list[float]] = {}
    for entry in history.judged:
        for measured in entry.passed.measurements if entry.passed else ():
            residuals.setdefault(measured.workload, []).extend(_residuals(measured))
    return {workload: robust_sigma(values) for workload, values in residuals.items() if values}


def _error(passed: Passed, group: str, noise: Mapping[str, float]) -> float:
    """Standard error of `screened`."""
    mine = [m for m in passed.measurements if m.group == group]
    errors = [_MEDIAN * noise.get(m.workload, 0.0) / math.sqrt(len(m.samples_us)) for m in mine]
    return math.hypot(*errors) / len(mine)


def _expected_s(history: History) -> float:
    """What the next contest will take: as long as the last."""
    if history.contests:
        return history.contests[-1].seconds
    return (_SOLVING + _MEETING) * _candidate_s(history)


def _candidate_s(history: History) -> float:
    """What a candidate takes of the running time, on average; several may be judged at once."""
    return (history.elapsed_s - spent(history)) / max(len(history.judged), 1)


def _untested(history: History, group: str) -> bool:
    """Whether no challenger of the group saw a test; a few that fail the full gate are passed over."""
    contests = [contest for contest in history.contests if contest.group == group]
    return not any(contest.tested for contest in contests) and len(contests) < _MOST_REFUSED
