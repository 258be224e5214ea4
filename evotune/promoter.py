"""Holds the contests and confirmations that `promotion` calls for, on a device, as records.

One that a kill cuts short is held again from its first block at the same level: what ended it was not its
evidence.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from evotune import calibrate
from evotune.errors import DeviceError, SandboxError
from evotune.fitness.evaluation import Comparison, Evaluator, Fallen, Purpose
from evotune.fitness.outcome import Failed, Retry
from evotune.fitness.sequential import PairedTest
from evotune.fitness.timing import Timed
from evotune.history import History
from evotune.promotion import BASELINE, Defence, Match, Turn, log_ratio, turn
from evotune.records import Blocks, Confirmation, Contest
from evotune.setup import Setup

MOST_RETRIES = 3
"""What met trouble that was not its own so often ends the run: the trouble is here to stay."""

_Enough = TypeVar("_Enough", bound=Callable[[Timed], bool])
Schedule = Callable[[Setup, History, bool], Turn | None]
"""(setup, history, whether the search is over) → what is due."""


def by_share(setup: Setup, history: History, over: bool) -> Turn | None:
    """As a study's settings say; see `promotion.turn`."""
    return turn(history, setup.promotion, over=over, limit_s=setup.config.study.time_limit_s)


class Promoter:
    """Of one run. Raises what `Evaluator.compare` raises, and SandboxError for trouble that stays."""

    def __init__(self, setup: Setup, evaluator: Evaluator, elapsed_s: Callable[[], float]) -> None:
        """`elapsed_s` tells the running time of the study."""
        self._setup = setup
        self._plan = setup.promotion
        self._evaluator = evaluator
        self._elapsed_s = elapsed_s

    def hold(self, history: History, due: Turn) -> Contest | Confirmation:
        """The record of it, after the last step of the history."""
        return self._contest(history, due) if isinstance(due, Match) else self._confirmation(history, due)

    def _contest(self, history: History, match: Match) -> Contest:
        begun_s = time.monotonic()
        found, decided = self._compared(
            history,
            (match.challenger, match.champion),
            lambda: _Deciding(match.test(self._plan)),
            match.group,
            "promotion",
        )
        return Contest(
            step=history.steps - 1,
            group=match.group,
            challenger=match.challenger,
            champion=match.champion,
            level=match.level,
            evidence=decided.test.evidence,
            promoted=decided.test.rejected and isinstance(found, Comparison),
            blocks=_blocks(found),
            failed=found if isinstance(found, Failed) else None,
            fallen=found.detail if isinstance(found, Fallen) else "",
            seconds=_seconds(found, begun_s),
            elapsed_s=self._elapsed_s(),
        )

    def _confirmation(self, history: History, due: Defence) -> Confirmation:
        begun_s = time.monotonic()
        found, _ = self._compared(
            history,
            (due.champion, BASELINE),
            lambda: _Counting(self._plan.confirmation_blocks),
            due.group,
            "confirmation",
        )
        return Confirmation(
            step=history.steps - 1,
            group=due.group,
            champion=due.champion,
            blocks=_blocks(found),
            failed=found if isinstance(found, Failed) else None,
            seconds=_seconds(found, begun_s),
            elapsed_s=self._elapsed_s(),
            resolution=self._resolution(due.group),
        )

    def _resolution(self, group: str) -> float | None:
        """Of the judge's device, where it was measured well enough to say."""
        try:
            found = calibrate.load(self._setup, self._evaluator)
        except DeviceError:
            return None
        resolution = found.resolution(group, self._plan) if found else math.inf
        return resolution if math.isfinite(resolution) else None

    def _compared(
        self,
        history: History,
        pair: tuple[int, int],
        stopping: Callable[[], _Enough],
        group: str,
        purpose: Purpose,
    ) -> tuple[Comparison | Fallen | Failed, _Enough]:
        """Challenger against incumbent, and what ended it; after trouble that is neither's once more."""
        space = self._setup.space
        mine, theirs = (history.candidate(history.entries[index], space) for index in pair)
        reason = ""
        for _ in range(MOST_RETRIES):
            enough = stopping()
            found = self._evaluator.compare(mine, theirs, enough, group=group, purpose=purpose)
            if isinstance(found, Fallen) and pair[1] == BASELINE:
                found = Retry(f"the template's default: {found.detail}")
            if not isinstance(found, Retry):
                return found, enough
            reason = found.reason
        raise SandboxError(
            f"the {purpose} of candidate {pair[0]} met trouble {MOST_RETRIES} times that was not its own: "
            f"{reason}; `python -m evotune doctor` looks for the cause"
        )


@dataclass
class _Deciding:
    """Enough once a test is over."""

    test: PairedTest

    def __call__(self, timed: Timed) -> bool:
        self.test.update(log_ratio(timed.measurements))
        return self.test.over


@dataclass
class _Counting:
    """Enough after so many blocks."""

    left: int

    def __call__(self, timed: Timed) -> bool:
        self.left -= 1
        return self.left <= 0


def _seconds(found: Comparison | Fallen | Failed, begun_s: float) -> float:
    """Without the wait for candidates that were asked for before."""
    return found.seconds if isinstance(found, Comparison) else time.monotonic() - begun_s


def _blocks(found: Comparison | Fallen | Failed) -> Blocks:
    return tuple(timed.measurements for timed in found.blocks) if isinstance(found, Comparison) else ()
