"""Ever smaller problems on which a failure may still show, until none of the smaller ones shows it.

A generator of workloads that is sent, for each, whether the failure still shows there. What it is told last
to have failed is the smallest. A workload may be asked about twice: whoever answers keeps the answers.
"""

from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import replace
from functools import partial

from evotune.reference_kda.workload import Workload

Asked = Generator[Workload, bool, None]
Steps = Generator[Workload, bool, Workload]

SIMPLEST = ("ones", "mixed")
"""Regimes from the plainest on; any other is given up for one of these where that shows the failure too."""

_NAME = "smallest"
_SHORT = (1, 2, 3)
_CHUNK = 16
_DROPPED_ONE_BY_ONE = 8
_HEADS_ONE_BY_ONE = 8


def smaller(workload: Workload, regimes: tuple[str, ...] = SIMPLEST, *, states: bool = True) -> Asked:
    """Fewer sequences, heads and tokens, no states, a plainer regime; dims, type and contract stay.

    `regimes`, plainest first, are those that the failure may be shown in. With `states` false the problem
    keeps its initial and final state.
    """
    # Heads first: what follows is solved for few of them, and a solution costs as many times one head's.
    steps: list[Callable[[Workload], Steps]] = [_fewer_heads, _fewer_sequences]
    steps += [_no_states] if states else []
    steps += [partial(_plainer, regimes), _fewer_tokens, _no_slack]
    now, before = replace(workload, name=_NAME, group=_NAME), workload
    while now != before:
        before = now
        for step in steps:
            now = yield from step(now)


def _first(now: Workload, tries: Iterable[Workload]) -> Steps:
    """The first of these that fails too, else the workload as it is."""
    for found in tries:
        if found != now and (yield found):
            return found
    return now


def _fewer_sequences(now: Workload) -> Steps:
    """Either half, or all but one."""
    while len(now.lengths) > 1:
        count = len(now.lengths)
        parts = [now.lengths[: count // 2], now.lengths[count // 2 :]]
        if 2 < count <= _DROPPED_ONE_BY_ONE:
            parts += [now.lengths[:i] + now.lengths[i + 1 :] for i in range(count)]
        found = yield from _first(now, (replace(now, lengths=part) for part in parts))
        if found == now:
            break
        now = found
    return now


def _fewer_heads(now: Workload) -> Steps:
    """The fewest value heads, and of those the fewest q/k heads."""
    pairs = ((h, hv) for hv in _counts(now.value_heads) for h in sorted({1, now.heads, hv}))
    fits = ((h, hv) for h, hv in pairs if h <= now.heads and hv % h == 0)
    return (yield from _first(now, (replace(now, heads=h, value_heads=hv) for h, hv in fits)))


def _counts(most: int) -> Iterator[int]:
    """1, 2, … one by one, then doubling, then `most`."""
    count = 1
    while count < most:
        yield count
        count += 1 if count < _HEADS_ONE_BY_ONE else count
    yield most


def _fewer_tokens(now: Workload) -> Steps:
    """All sequences cut to one length, then each by itself."""

    def capped(w: Workload, most: int) -> Workload:
        return replace(w, lengths=tuple(min(length, most) for length in w.lengths))

    now = yield from _shortest(now, max(now.lengths, default=0), capped)
    for i in range(len(now.lengths) if len(now.lengths) > 1 else 0):
        now = yield from _shortest(now, now.lengths[i], partial(_with_length, i))
    return now


def _with_length(i: int, w: Workload, length: int) -> Workload:
    return replace(w, lengths=(*w.lengths[:i], length, *w.lengths[i + 1 :]))


def _shortest(now: Workload, length: int, at: Callable[[Workload, int], Workload]) -> Steps:
    """The least length that fails: from a few tokens up over the borders of chunks, then by bisection.

    Upwards, as short problems are the ones that are quickly solved; even and odd ones, as an error may be in
    one of the two alone.
    """
    right = 0
    for border in _borders(length):
        found = at(now, border)
        if (yield found):
            now, length = found, border
            break
        right = border
    while length - right > 1:
        middle = (right + length) // 2
        found = at(now, middle)
        if (yield found):
            now, length = found, middle
        else:
            right = middle
    return now


def _borders(length: int) -> Iterator[int]:
    """Lengths below this one at which kernels take another path."""
    yield from (short for short in _SHORT if short < length)
    chunk = _CHUNK
    while chunk < length:
        yield from (border for border in (chunk, chunk + 1) if border < length)
        chunk *= 2


def _no_slack(now: Workload) -> Steps:
    now = yield from _first(now, [replace(now, slack=0)])
    return (yield from _first(now, [replace(now, offset=0)]))


def _no_states(now: Workload) -> Steps:
    now = yield from _first(now, [replace(now, initial_state=False)])
    return (yield from _first(now, [replace(now, final_state=False)]))


def _plainer(regimes: tuple[str, ...], now: Workload) -> Steps:
    rank = regimes.index(now.regime) if now.regime in regimes else len(regimes)
    return (yield from _first(now, (replace(now, regime=regime) for regime in regimes[:rank])))
