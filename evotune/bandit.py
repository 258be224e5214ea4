"""Which living branch gets the next candidate.

Newcomers are served first until each had `warmup` candidates; then upper confidence bounds decide. A
branch is worth what its three best candidates are, by rank among all passed ones under a goal drawn for this
pull (all speed objectives alike, or one of them, so that specialists of a workload group live on), plus an
allowance for branches that were tried little. Ranks make the worth independent of units and of outliers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from evotune.history import History, primary
from evotune.pareto import losses
from evotune.search_space.forest import Floats
from evotune.search_space.ranks import ranks

_BEST = 3
# Rank units. At 8 candidates of 200 the allowance is 0.2, at 100 of 200 it is 0.06.
_ALLOWANCE = 0.25


@dataclass(frozen=True)
class Arm:
    """A living branch.

    Attributes:
        pulls: candidates asked for, judged or not.
        rows: indices of its passed candidates in the table of losses.
    """

    branch: str
    pulls: int
    rows: tuple[int, ...]


class Bandit:
    """Arms of one step; `choose` pulls them one after another, counting its own pulls."""

    def __init__(
        self, history: History, branches: Sequence[str], warmup: int, legal_count: int | None = None
    ) -> None:
        """Each of `branches` has `legal_count` configurations and a passed candidate, or none yet."""
        passed = [entry for entry in history.entries if entry.passed]
        self._ranks = ranks(losses(history.columns, passed))
        self._primary = primary(history.columns)
        self._warmup = warmup
        self._legal_count = legal_count
        self._arms = [
            Arm(
                branch,
                len(history.of(branch)),
                tuple(i for i, entry in enumerate(passed) if entry.asked.branch == branch),
            )
            for branch in branches
        ]
        self._pulls = {arm.branch: arm.pulls for arm in self._arms}

    def choose(self, rng: np.random.Generator) -> str | None:
        """The branch of the next candidate; None when every branch has tried all it has."""
        full = self._legal_count
        arms = [arm for arm in self._arms if full is None or self._pulls[arm.branch] < full]
        if not arms:
            return None
        young = [arm for arm in arms if self._pulls[arm.branch] < self._warmup or not arm.rows]
        if young:
            chosen = min(young, key=lambda arm: self._pulls[arm.branch])
        else:
            worth = self._worth(rng)
            log_total = np.log(sum(self._pulls.values()))
            chosen = max(
                arms,
                key=lambda arm: worth[arm.branch] + _ALLOWANCE * np.sqrt(log_total / self._pulls[arm.branch]),
            )
        self._pulls[chosen.branch] += 1
        return chosen.branch

    def order(self) -> list[str]:
        """Branches by their worth with all speed objectives alike, best first."""
        worth = self._values(self._primary)
        return sorted((arm.branch for arm in self._arms), key=lambda branch: -worth[branch])

    def _worth(self, rng: np.random.Generator) -> Mapping[str, float]:
        alike = rng.random() < 0.5
        return self._values(self._primary if alike else [self._primary[rng.integers(len(self._primary))]])

    def _values(self, goal: Sequence[int]) -> Mapping[str, float]:
        scores: Floats = 1.0 - self._ranks[:, list(goal)].mean(axis=1)
        return {arm.branch: float(np.sort(scores[list(arm.rows)])[-_BEST:].mean()) for arm in self._arms}
