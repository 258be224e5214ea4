"""How fast a branch is, by workload group: what mutators look at and tell."""

import math
from collections import defaultdict
from statistics import mean

from evotune.fitness.outcome import Passed
from evotune.mutators.mutator import Standing


def speedups(passed: Passed) -> dict[str, float]:
    """Speedup over the default kernel by workload group: the geometric mean over the group's workloads."""
    logs: defaultdict[str, list[float]] = defaultdict(list)
    for measurement in passed.measurements:
        logs[measurement.group].append(math.log(measurement.speedup))
    return {group: math.exp(mean(values)) for group, values in logs.items()}


def group_speedups(standing: Standing) -> dict[str, float]:
    """The best of `speedups` by group; groups may owe theirs to different candidates of the branch."""
    best: dict[str, float] = {}
    for _, passed in standing.best:
        for group, speedup in speedups(passed).items():
            best[group] = max(best.get(group, speedup), speedup)
    return best
