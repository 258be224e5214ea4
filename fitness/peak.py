"""What one core of this machine moves at most, measured: the floor under a timed call rests on it.

A constant would be wrong somewhere: peaks taken 2.5 times too low have made a benchmark's check for results
"faster than physics" meaningless, and one too high never fires. Blocks that lie in the nearest caches are
copied, many times over, and the best is taken, which a busy machine cannot make faster than it is.
"""

import time
from functools import cache

import numpy as np

BEYOND = 2.0
"""Reading alone, or with wider instructions than numpy's, may reach so many times a copy's rate."""

_BLOCK_BYTES = tuple(1 << power for power in range(14, 20))  # 16 KiB to 512 KiB
_BURST_BYTES = 4 << 20
_BURSTS = 20


@cache
def copy_gb_s() -> float:
    """The best rate of a copy within the caches, bytes read and written counted; takes some 20 ms, once."""
    return max(_copy_gb_s(size) for size in _BLOCK_BYTES)


def bandwidth_gb_s() -> float:
    """What no kernel on one core of this machine exceeds."""
    return BEYOND * copy_gb_s()


def _copy_gb_s(size: int) -> float:
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    repeats = range(max(1, _BURST_BYTES // size))
    best_s = float("inf")
    for _ in range(_BURSTS):
        start = time.perf_counter()
        for _ in repeats:
            np.copyto(target, source)
        best_s = min(best_s, time.perf_counter() - start)
    return 2 * size * len(repeats) / best_s / 1e9
