"""Small samples of configurations in which every legal pair of values meets.

Mistakes that hide in one value or in two values together cannot hide from such a sample, and it grows with
the logarithm of the space's size, not with the size. Greedy, after AETG (Cohen et al., 1997): each row is the
best of a few random ones that hold a pair which no row has yet.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from evotune.search_space.template import Constant

Row = dict[str, Constant]
Item = tuple[str, Constant]
Pair = tuple[Item, Item]

_CANDIDATES = 20  # rows to choose the best of
_LED = 100  # every other one of so many is led by what no row has yet
_TRIES = 1000  # random rows before a pair is taken for one that no legal row holds; 125 were needed so far


@dataclass(frozen=True)
class Covering:
    """`rows` are legal and hold every pair of values but `impossible`, which no legal row was met with."""

    rows: tuple[Row, ...]
    impossible: frozenset[Pair]


def pairs_of(row: Mapping[str, Constant]) -> set[Pair]:
    """All pairs of a row's values, names in the row's order."""
    return set(combinations(row.items(), 2))


def covering(
    factors: Mapping[str, Sequence[Constant]],
    legal: Callable[[Row], bool],
    start: Iterable[Row] = (),
    hub: str | None = None,
    seed: int = 0,
) -> Covering:
    """A covering sample, the same for the same arguments.

    Args:
        factors: values by name.
        legal: whether a full row may be taken.
        start: rows to begin with, such as the default.
        hub: only pairs with a value of this factor count: every value meets each of the hub's.
        seed: of the random rows.
    """
    search = _Search(factors, legal, np.random.default_rng(seed))
    missing = {
        ((a, x), (b, y))
        for a, b in combinations(factors, 2)
        if hub in (None, a, b)
        for x in factors[a]
        for y in factors[b]
    }
    rows = [dict(row) for row in start]
    for row in rows:
        missing -= pairs_of(row)
    impossible = set()
    while missing:
        pair = min(missing, key=repr)
        found = search.best(pair, missing)
        if found is None:
            fresh = {item for item in pair if not any(row[item[0]] == item[1] for row in rows)}
            hopeless = {item for item in fresh if search.best((item,), missing, 1) is None}
            lost = {pair} | {other for other in missing if hopeless & set(other)}
            impossible |= lost
            missing -= lost
        else:
            rows.append(found)
            missing -= pairs_of(found)
    return Covering(tuple(rows), frozenset(impossible))


@dataclass(frozen=True)
class _Search:
    factors: Mapping[str, Sequence[Constant]]
    legal: Callable[[Row], bool]
    rng: np.random.Generator

    def best(self, fixed: tuple[Item, ...], missing: set[Pair], candidates: int = _CANDIDATES) -> Row | None:
        """The legal row with what is fixed that has most of what is missing; None when none was met."""
        found: list[Row] = []
        for number in range(_TRIES):
            # Some are led by what is missing, which is dear; legality may forbid all of those.
            led = number % 2 and number < _LED
            row = self._led(fixed, missing) if led else self._random(fixed)
            if self.legal(row):
                found.append(row)
                if len(found) == candidates:
                    break
        return max(found, key=lambda row: len(pairs_of(row) & missing), default=None)

    def _random(self, fixed: tuple[Item, ...]) -> Row:
        given = dict(fixed)
        return {name: given.get(name, self._pick(name)) for name in self.factors}

    def _led(self, fixed: tuple[Item, ...], missing: set[Pair]) -> Row:
        """Factors in random order, each the value that is in most missing pairs with those before it."""
        chosen = dict(fixed)
        names = [name for name in self.factors if name not in chosen]
        rank = {name: i for i, name in enumerate(self.factors)}
        for i in self.rng.permutation(len(names)):
            name = names[i]
            gains = []
            for value in self.factors[name]:
                ordered = [
                    (other, (name, value)) if rank[other[0]] < rank[name] else ((name, value), other)
                    for other in chosen.items()
                ]
                gains.append(sum(each in missing for each in ordered))
            best = [v for v, gain in zip(self.factors[name], gains, strict=True) if gain == max(gains)]
            chosen[name] = best[int(self.rng.integers(len(best)))] if max(gains) else self._pick(name)
        return {name: chosen[name] for name in self.factors}

    def _pick(self, name: str) -> Constant:
        values = self.factors[name]
        return values[int(self.rng.integers(len(values)))]
