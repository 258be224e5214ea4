"""What a run says while it runs: one line that renews itself in a terminal, now and then a line elsewhere."""

import sys
import time

from rich.console import Console
from rich.status import Status

from evotune.history import Entry, History
from evotune.notes import champion
from evotune.promotion import BASELINE, Match, Turn, titles
from evotune.records import Confirmation, Contest
from evotune.report import progress
from evotune.study import End, StudyRun

_PLAIN_EVERY_S = 10.0


class _Console(Console):
    """A console whose reader may go away: rich would end the process, here it falls silent."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


class LiveLine:
    """An observer of a run: best, candidates per minute, failures by class, time left. Writes to stderr.

    A closed stderr silences it; the study goes on.
    """

    def __init__(self, trials: int, time_limit_s: float | None) -> None:
        self._trials = trials
        self._time_limit_s = time_limit_s
        self._console = _Console(file=sys.stderr)
        self._status: Status | None = None
        self._begun = time.monotonic()
        self._count = 0
        self._told = (0.0, "")

    def __enter__(self) -> "LiveLine":
        if self._console.is_terminal:
            self._status = self._console.status("preparing the default kernel")
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def say(self, text: str) -> None:
        """One line of its own."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def judged(self, history: History, entry: Entry) -> None:
        """See `study.Observer`."""
        self._count += 1
        line = self._line(history)
        if self._status is not None:
            self._status.update(line)
            return
        best, now = progress(history), time.monotonic()
        if best != self._told[1] or now - self._told[0] >= _PLAIN_EVERY_S:
            self._told = (now, best)
            self.say(line)

    def meets(self, history: History, due: Turn) -> None:
        """See `study.Observer`."""
        if self._status is not None:
            self._status.update(f"{self._line(history)} · {_meeting(due)}")

    def met(self, history: History, record: Contest | Confirmation) -> None:
        """See `study.Observer`."""
        if self._status is not None:
            self._status.update(self._line(history))
        title = next(title for title in titles(history) if title.group == record.group)
        self.say(f"{record.group}: {champion(history, title)}")

    def finished(self, run: StudyRun, end: End) -> None:
        """See `study.Observer`."""

    def _line(self, history: History) -> str:
        done = len(history.judged)
        rate = self._count / max(time.monotonic() - self._begun, 1e-3)
        failures = ", ".join(f"{name} {count}" for name, count in history.failures().most_common())
        left = (self._trials - done) / rate if rate else 0.0  # 0: a session that only promotes
        if self._time_limit_s is not None:
            left = min(left, self._time_limit_s - history.elapsed_s)
        living = len(history.living())
        proven = [title for title in titles(history) if title.champion != BASELINE]
        champions = ", ".join(f"{title.group} #{title.champion}" for title in proven)
        parts = [
            f"{done}/{self._trials}",
            f"best {progress(history)}",
            f"champions {champions}" if champions else "no champions yet",
            f"{living} {'branch' if living == 1 else 'branches'}",
            f"{rate * 60:.0f}/min",
            f"failed {failures}" if failures else "none failed",
            f"{_clock(left)} left",
        ]
        return " · ".join(parts)


def _meeting(due: Turn) -> str:
    if isinstance(due, Match):
        return f"{due.group}: #{due.challenger} meets #{due.champion}"
    return f"{due.group}: #{due.champion} is confirmed"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(max(int(seconds), 0), 60)
    return f"{minutes}:{rest:02}"
