"""Stages from two branches, preferably of parents that are good at different workload groups."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations
from random import Random

from evotune.errors import ProposalError
from evotune.fitness.outcome import Failed
from evotune.mutators.mutator import Proposal, Request, Standing
from evotune.mutators.speed import group_speedups
from evotune.search_space.branch import frame, replace_stage, stages
from evotune.search_space.template import digest

# All subsets of up to ten differing stages; of more, so many are drawn.
_MAX_SUBSETS = 1024


@dataclass(frozen=True)
class _Pair:
    """`receiver` keeps its frame and most stages, `donor` gives some. `weight` is how promising they are."""

    receiver: Standing
    donor: Standing
    weight: float


class Crossover:
    """Puts some of one branch's stages into another. Needs no key and no device."""

    name = "crossover"

    def propose(self, request: Request) -> Proposal:
        rng = Random(request.seed)
        for pair in _shuffled(_pairs(request.standings), rng):
            for names, source in _children(pair, rng):
                if digest(source) not in request.tried:
                    return _proposal(pair, names, source, rng)
        raise ProposalError("crossover: every mixture of the living branches was tried")

    def repair(self, request: Request, proposal: Proposal, failed: Failed) -> Proposal | None:
        """None: a mixture that fails says nothing about how to mend it."""
        return None


def complementarity(one: Mapping[str, float], other: Mapping[str, float]) -> float:
    """What two branches are worth together beyond the better one: mean over groups of log speedup, >= 0.

    0 when one branch is at least as fast in every group; (log 2) / 2 when each is twice as fast as the other
    in half of the groups.
    """
    groups = sorted(one.keys() & other.keys())
    if not groups:
        return 0.0
    both = sum(math.log(max(one[g], other[g])) for g in groups)
    alone = max(sum(math.log(side[g]) for g in groups) for side in (one, other))
    return (both - alone) / len(groups)


def _pairs(standings: Sequence[Standing]) -> Iterator[_Pair]:
    """Ordered pairs with one frame; the weight falls with the rank of the worse parent."""
    speeds = [group_speedups(standing) for standing in standings]
    for i, j in permutations(range(len(standings)), 2):
        receiver, donor = standings[i], standings[j]
        if frame(receiver.branch.source) == frame(donor.branch.source):
            promise = complementarity(speeds[i], speeds[j])
            rank = 1.0 / (1 + max(i, j))
            yield _Pair(receiver, donor, rank + 4.0 * promise)


def _shuffled(pairs: Iterator[_Pair], rng: Random) -> list[_Pair]:
    """In random order, likely pairs first (Efraimidis and Spirakis 2006: sort by u^(1/weight))."""
    keyed = [(rng.random() ** (1.0 / pair.weight), n, pair) for n, pair in enumerate(pairs)]
    return [pair for _, _, pair in sorted(keyed, key=lambda entry: entry[:2], reverse=True)]


def _children(pair: _Pair, rng: Random) -> Iterator[tuple[tuple[str, ...], str]]:
    """(donated stages, source) of proper mixtures, in random order."""
    mine, theirs = stages(pair.receiver.branch.source), stages(pair.donor.branch.source)
    differing = [name for name in mine if mine[name] != theirs[name]]
    for names in _subsets(differing, rng):
        source = pair.receiver.branch.source
        for name in names:
            source = replace_stage(source, name, theirs[name])
        yield names, source


def _subsets(names: Sequence[str], rng: Random) -> list[tuple[str, ...]]:
    """Subsets that are neither empty nor whole: either would be one of the parents again."""
    if 2 ** len(names) <= _MAX_SUBSETS:
        found = [subset for size in range(1, len(names)) for subset in combinations(names, size)]
        rng.shuffle(found)
        return found
    drawn = (tuple(name for name in names if rng.random() < 0.5) for _ in range(_MAX_SUBSETS))
    return [subset for subset in drawn if 0 < len(subset) < len(names)]


def _proposal(pair: _Pair, names: tuple[str, ...], source: str, rng: Random) -> Proposal:
    """Starts from either parent's best knobs: one parent's may leave out the stages that the other gave."""
    receiver, donor = pair.receiver.branch, pair.donor.branch
    best = rng.choice((pair.receiver, pair.donor)).best
    return Proposal(
        source,
        receiver.id,
        "crossover",
        f"{', '.join(names)} of {donor.id} in {receiver.id}",
        other_parent=donor.id,
        start=best[0][0] if best else None,
    )
