"""Crossover: the contract, what it prefers, what it skips."""

import math
from collections import Counter
from collections.abc import Callable

import pytest

from evotune.errors import ProposalError
from evotune.mutators.crossover import Crossover, complementarity
from evotune.mutators.mutator import Mutator, Request
from evotune.search_space.branch import stages
from evotune.search_space.template import digest
from tests.mutators.contract import MutatorContract
from tests.mutators.toys import SEED, ToyKnobs, child, request, standing

ONE = child("b01", load="// load 1\n", scale="// scale 1\n")
TWO = child("b02", scale="// scale 2\n", store="// store 2\n")


class TestContract(MutatorContract):
    @pytest.fixture
    def make(self) -> Callable[[], Mutator]:
        return Crossover

    @pytest.fixture
    def asked(self) -> Request:
        return request(3, standing(ONE, long=2.0), standing(TWO, long=1.5), standing(SEED, long=1.0))


def test_a_child_has_stages_of_both_parents_and_names_them() -> None:
    proposal = Crossover().propose(request(0, standing(ONE), standing(TWO)))
    parts, one, two = stages(proposal.source), stages(ONE.source), stages(TWO.source)
    assert all(body in (one[name], two[name]) for name, body in parts.items())
    assert parts not in (one, two)
    assert {proposal.parent, proposal.other_parent} == {"b01", "b02"}
    assert str(proposal.other_parent) in proposal.note


def test_all_mixtures_of_two_branches_are_found_and_then_none() -> None:
    asked = request(0, standing(ONE), standing(TWO))
    tried, mutator = set(asked.tried), Crossover()
    for seed in range(6):  # three differing stages: 2^3 mixtures, two of which are the parents
        proposal = mutator.propose(request(seed, *asked.standings, tried=frozenset(tried)))
        tried.add(digest(proposal.source))
    assert len(tried) == 8
    with pytest.raises(ProposalError, match="was tried") as raised:
        mutator.propose(request(9, *asked.standings, tried=frozenset(tried)))
    assert raised.value.kind == "exhausted"


def test_one_branch_has_nothing_to_mix_with() -> None:
    with pytest.raises(ProposalError):
        Crossover().propose(request(0, standing(SEED, long=1.0)))


def test_branches_of_another_frame_are_left_alone() -> None:
    other = child("b02", scale="// scale 2\n", store="// store 2\n")
    foreign = type(other)("b02", other.source.replace("stdint.h", "inttypes.h"), "b00", "rules", "foreign")
    with pytest.raises(ProposalError):
        Crossover().propose(request(0, standing(ONE), standing(foreign)))


def test_parents_good_at_different_groups_are_preferred() -> None:
    third = child("b03", load="// load 3\n", store="// store 3\n")
    standings = (
        standing(ONE, long=4.0, many=1.0),
        standing(TWO, long=3.9, many=1.0),
        standing(third, long=1.0, many=4.0),
    )
    parents: Counter[frozenset[str | None]] = Counter()
    for seed in range(200):
        proposal = Crossover().propose(request(seed, *standings))
        parents[frozenset((proposal.parent, proposal.other_parent))] += 1
    alike = parents[frozenset(("b01", "b02"))]
    assert parents[frozenset(("b01", "b03"))] > 1.5 * alike
    assert alike > 0


def test_children_start_from_the_best_knobs_of_either_parent() -> None:
    mine, theirs = ToyKnobs(unroll=2), ToyKnobs(mode="fused")
    asked = (standing(ONE, mine, long=2.0), standing(TWO, theirs, long=1.5))
    starts = {Crossover().propose(request(seed, *asked)).start for seed in range(20)}
    assert starts == {mine, theirs}


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ({"a": 2.0, "b": 1.0}, {"a": 1.0, "b": 2.0}, math.log(2) / 2),
        ({"a": 2.0, "b": 2.0}, {"a": 1.0, "b": 1.0}, 0.0),
        ({"a": 2.0}, {"b": 2.0}, 0.0),
    ],
)
def test_complementarity(one: dict[str, float], other: dict[str, float], expected: float) -> None:
    assert complementarity(one, other) == pytest.approx(expected)
    assert complementarity(other, one) == pytest.approx(expected)


def test_many_differing_stages_are_sampled_not_listed() -> None:
    text = "".join(f"// EVOLVE-BEGIN s{i}\nold\n// EVOLVE-END s{i}\n" for i in range(40))
    one = type(SEED)("b01", text, None, "seed", "")
    two = type(SEED)("b02", text.replace("old", "new"), "b01", "rules", "")
    source = Crossover().propose(request(0, standing(one), standing(two))).source
    assert 5 < source.count("new") < 35
