"""What every mutator keeps to. A test class for a mutator inherits it and brings two fixtures."""

import dataclasses
from collections.abc import Callable

import pytest

from evotune.errors import ProposalError
from evotune.mutators.mutator import Mutator, Proposal, Request
from evotune.search_space.branch import frame, stages
from evotune.search_space.template import digest
from tests.mutators.toys import failed


class MutatorContract:
    """Fixtures a subclass defines: `make` builds the mutator anew, `asked` is a request with an answer.

    `limit` bounds how many answers there can be.
    """

    limit = 3000

    def test_equal_seeds_give_equal_proposals(self, make: Callable[[], Mutator], asked: Request) -> None:
        assert make().propose(asked) == make().propose(asked)

    def test_every_proposal_is_sound_and_new_until_none_is_left(
        self, make: Callable[[], Mutator], asked: Request
    ) -> None:
        mutator, request = make(), asked
        for _ in range(self.limit):
            try:
                proposal = mutator.propose(request)
            except ProposalError:
                break
            self.check(mutator, request, proposal)
            tried = request.tried | {digest(proposal.source)}
            request = dataclasses.replace(request, tried=tried, seed=request.seed + 1)
        assert request != asked
        with pytest.raises(ProposalError, match=r"\w"):
            mutator.propose(request)

    def test_a_repair_is_sound_and_the_only_one(self, make: Callable[[], Mutator], asked: Request) -> None:
        mutator = make()
        proposal = mutator.propose(asked)
        request = dataclasses.replace(asked, tried=asked.tried | {digest(proposal.source)})
        repaired = mutator.repair(request, proposal, failed())
        if repaired is not None:
            self.check(mutator, request, repaired)
            assert mutator.repair(request, repaired, failed()) is None

    @staticmethod
    def check(mutator: Mutator, request: Request, proposal: Proposal) -> None:
        parents = {s.branch.id: s.branch for s in request.standings}
        parent = parents[proposal.parent]
        assert proposal.other_parent is None or proposal.other_parent in parents
        assert proposal.origin == mutator.name
        assert digest(proposal.source) not in request.tried
        assert frame(proposal.source) == frame(parent.source)
        assert list(stages(proposal.source)) == list(stages(parent.source))
        assert proposal.note
        assert proposal.note.isprintable()
        assert proposal.cost_usd >= 0
        if proposal.start is not None:
            assert isinstance(proposal.start, request.template.knobs)
            assert all(request.template.why_not(proposal.start, s) is None for s in request.specializations)
