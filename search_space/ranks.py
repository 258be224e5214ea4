"""Losses of several objectives on one scale."""

import numpy as np

from evotune.search_space.forest import Floats


def ranks(losses: Floats) -> Floats:
    """[candidates, objectives] losses → ranks in [0, 1] per column, 0 best, equal losses equal ranks."""
    found = np.empty_like(losses)
    for j, column in enumerate(losses.T):
        levels, where = np.unique(column, return_inverse=True)
        found[:, j] = where / max(len(levels) - 1, 1)
    return found
