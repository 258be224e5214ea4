"""Early stop of hopeless candidates: what a timer asks after each timed pair of calls, on any device.

A candidate that is far from the best of its workload group needs no exact time. Its estimate from fewer pairs
stays: a stopped candidate is data for the sampler, never discarded. How sure "hopeless" is, and what it
assumes, is `sequential.Race`'s business; the noise laws that it needs live here, one for each workload, and
learn from every kernel that was timed.
"""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from evotune.fitness.sequential import NoiseLaw, Race

Bars = Mapping[str, float]
"""By workload name the speed-up that the best known candidate of the workload's group has on it.

By workload and not by group: one group may hold workloads whose speed-ups differ by far."""

NO_BARS: Bars = {}
_TICK_US = 1e-3  # of the clocks: a time of zero has no logarithm


def log_speedup(baseline_us: float, mine_us: float) -> float:
    """Of one pair of timed calls; finite whatever the clocks say."""
    return math.log(max(baseline_us, _TICK_US) / max(mine_us, _TICK_US))


@dataclass
class Heat:
    """The timed pairs of one kernel on one workload.

    Attributes:
        planned: pairs to time when nothing ends it early.
        race: None where there is no bar to come near.
    """

    planned: int
    law: NoiseLaw
    race: Race | None
    log_speedups: list[float] = field(default_factory=list)
    _begun_s: float = 0.0
    _spent_s: float = 0.0

    def start(self) -> None:
        """The first pair comes next."""
        self._begun_s = time.perf_counter()

    def pair(self, baseline_us: float, mine_us: float) -> bool:
        """Take a pair of timed calls. Whether the pairs that are left may be left out."""
        self.log_speedups.append(log_speedup(baseline_us, mine_us))
        self._spent_s = time.perf_counter() - self._begun_s
        if self.race is None:
            return False
        self.race.update(self.log_speedups[-1])
        return self.race.hopeless

    @property
    def saved_s(self) -> float:
        """What the pairs that were left out would have taken, at the pace of those that were timed."""
        done = len(self.log_speedups)
        return (self.planned - done) * self._spent_s / done if done else 0.0

    def learn(self) -> None:
        """Let the workload's noise law know these pairs. For kernels that turned out right."""
        self.law.learn(self.log_speedups)


class Racing:
    """The races of one judge, for the timers to start heats from. Without a bar a heat runs to its end."""

    def __init__(self, error: float = 0.0) -> None:
        """`error` bounds the probability that a candidate within the margin of the bar is stopped on a
        workload; 0 stops nothing."""
        self._error = error
        self._laws: dict[str, NoiseLaw] = {}

    def heat(self, workload: str, planned: int, bars: Bars = NO_BARS) -> Heat:
        """Of one kernel on one workload; `start` it right before the first of the planned pairs."""
        law = self._laws.setdefault(workload, NoiseLaw())
        bar = bars.get(workload)
        race = Race(bar, noise=law, delta=self._error) if bar is not None and self._error > 0 else None
        return Heat(planned, law, race)
