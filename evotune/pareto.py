"""Fronts and orders over candidates that passed."""

from collections.abc import Sequence

import numpy as np

from evotune.fitness.objectives import Column
from evotune.history import Entry, History, primary, value_of
from evotune.search_space.forest import Floats
from evotune.search_space.ranks import ranks


def losses(columns: Sequence[Column], entries: Sequence[Entry]) -> Floats:
    """[entries, columns]: values with the sign that makes smaller better. All entries must have passed."""
    rows = [
        [-value_of(e.passed, c.name) if c.maximize else value_of(e.passed, c.name) for c in columns]
        for e in entries
        if e.passed
    ]
    return np.array(rows, dtype=np.float64).reshape(-1, len(columns))


def front(columns: Sequence[Column], entries: Sequence[Entry]) -> list[Entry]:
    """Passed candidates that no other dominates: none is at least as good everywhere and better somewhere.

    Of candidates with equal values the first stays.
    """
    passed = [entry for entry in entries if entry.passed]
    table = losses(columns, passed)
    kept = []
    for i, row in enumerate(table):
        no_worse = (table <= row).all(axis=1)
        better = (table < row).any(axis=1)
        earlier_equal = (table[:i] == row).all(axis=1).any()
        if not (no_worse & better).any() and not earlier_equal:
            kept.append(passed[i])
    return kept


def best_per_column(columns: Sequence[Column], entries: Sequence[Entry]) -> dict[str, Entry]:
    """The best passed candidate of each column by name; empty when none passed."""
    passed = [entry for entry in entries if entry.passed]
    if not passed:
        return {}
    table = losses(columns, passed)
    return {column.name: passed[int(table[:, j].argmin())] for j, column in enumerate(columns)}


def ranked(history: History, entries: Sequence[Entry]) -> list[Entry]:
    """Passed candidates, best first, by their mean rank over the primary columns."""
    passed = [entry for entry in entries if entry.passed]
    if not passed:
        return []
    table = losses(history.columns, passed)[:, primary(history.columns)]
    order = np.argsort(ranks(table).mean(axis=1), kind="stable")
    return [passed[i] for i in order]
