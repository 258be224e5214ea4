"""How much workspace a kernel needs, as data: a sum of products of a call's sizes.

A template says it as code, which an exported directory cannot carry. What it says is a polynomial in the
sizes, each at most once in a product, up to roundings ("⌊T/16⌋ + N chunks for each of HV heads"): its
coefficients are read off where no rounding shows, and what roundings add elsewhere is bounded by one more
term, taken from many sizes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, product

import numpy as np
import numpy.typing as npt

from evotune.errors import StudyError
from evotune.manifest import LARGEST, WorkspaceTerm

Sizes = Mapping[str, int]

_GRAIN = 1 << 14  # a multiple of every chunk length, and of every alignment over an element's bytes
_SMALL = (0, 1, 2, 3, 5, 15, 16, 17, 31, 33, 63, 64, 65, 96, 127, 129, 1000, 4095, 8192, 65537)
_SAMPLES = 4000
_WASTE, _WASTE_BYTES = 1.1, 1 << 16  # of what is needed, and beside it, where sizes are 1024 and more


def terms(needs: Callable[[Sizes], int], names: Sequence[str]) -> tuple[WorkspaceTerm, ...]:
    """A bound of `needs` over the sizes `names`; nowhere far above it.

    Raises StudyError when the sizes do not determine it in this way.
    """
    found = [t for t in (_coefficient(needs, names, group) for group in _groups(names)) if t.bytes]
    large = [{name: int(x) for name, x in zip(names, row, strict=True)} for row in _drawn(10, len(names))]
    samples = [*_troublesome(names), *large]
    excess = [needs(s) - _total(found, s) for s in samples]
    if max(excess) > 0:
        found.append(_rounding(found, samples, excess))
    too_little = (s for s in samples if _total(found, s) < needs(s))
    too_much = (s for s in large if _total(found, s) > _WASTE * needs(s) + _WASTE_BYTES)
    for sizes in (*too_little, *too_much):
        raise StudyError(
            f"the workspace is no sum of products of sizes: {needs(sizes)} bytes at {sizes}, "
            f"where {_total(found, sizes)} were expected"
        )
    return tuple(found)


def _groups(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Every product, shortest first."""
    for length in range(len(names) + 1):
        yield from combinations(names, length)


def _coefficient(
    needs: Callable[[Sizes], int], names: Sequence[str], group: tuple[str, ...]
) -> WorkspaceTerm:
    """Of one product, by inclusion and exclusion over the corners of a cube of side `_GRAIN`."""
    total = 0
    for corner in _groups(group):
        sign = (-1) ** (len(group) - len(corner))
        total += sign * needs({name: _GRAIN if name in corner else 0 for name in names})
    return WorkspaceTerm(bytes=max(0, -(-total // _GRAIN ** len(group))), sizes=group)


def _troublesome(names: Sequence[str]) -> Iterator[Sizes]:
    """All pairs of values that chunks and alignments round, the other sizes 1; then any small ones."""
    for pair in combinations(names, 2):
        for values in product(_SMALL, repeat=2):
            yield dict.fromkeys(names, 1) | dict(zip(pair, values, strict=True))
    for row in _drawn(0, len(names)):
        yield {name: int(x) for name, x in zip(names, row, strict=True)}


def _drawn(least: int, count: int) -> npt.NDArray[np.float64]:
    """[samples, count] sizes from 2^least to 2^24, log-uniform, the same every time."""
    exponents = np.random.default_rng(0).uniform(least, 24, (_SAMPLES, count))
    return np.floor(2.0**exponents)


def _rounding(
    found: Sequence[WorkspaceTerm], samples: Sequence[Sizes], excess: Sequence[int]
) -> WorkspaceTerm:
    """The product that covers the excess at the least waste: a product of `found` without one of its sizes,
    which was rounded up. Raises StudyError when none does."""
    candidates = {tuple(n for n in term.sizes if n != gone) for term in found for gone in term.sizes} | {()}
    covers: list[tuple[int, WorkspaceTerm]] = []
    for group in candidates:
        unit = WorkspaceTerm(bytes=1, sizes=group)
        ones = [_total([unit], s) for s in samples]
        if any(e > 0 and not one for e, one in zip(excess, ones, strict=True)):
            continue
        most = max(-(-e // one) for e, one in zip(excess, ones, strict=True) if one)
        if most > LARGEST:
            continue
        covers.append((most * sum(ones), WorkspaceTerm(bytes=most, sizes=group)))
    if not covers:
        raise StudyError("the workspace is no sum of products of sizes: it grows faster")
    return min(covers, key=lambda cover: cover[0])[1]


def _total(found: Sequence[WorkspaceTerm], sizes: Sizes) -> int:
    return sum(term.of(sizes) for term in found)
