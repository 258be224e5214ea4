"""New structures for a study: mutators are asked, answers checked and recorded as branches or refusals."""

from collections.abc import Mapping, Sequence
from typing import Any

from evotune.controller import Plan, Propose, Repair, randomness
from evotune.errors import PatchError, ProposalError
from evotune.fitness.outcome import Failed
from evotune.history import History
from evotune.mutators.mutator import Mutator, Proposal, Request, Standing
from evotune.opening import Opened
from evotune.pareto import ranked
from evotune.records import BranchAdded, Record, Refusal
from evotune.search_space.branch import SEED_BRANCH, frame
from evotune.search_space.space import Space
from evotune.search_space.template import digest
from evotune.setup import Setup


class Structures:
    """Asks a study's mutators."""

    def __init__(self, opened: Opened, mutators: Mapping[str, Mutator]) -> None:
        self._opened = opened
        self._setup = opened.setup
        self._mutators = mutators

    def take(self, plan: Plan, before: History, earlier: Sequence[Record]) -> None:
        """Do what a step plans, unless its records so far, `earlier`, already have it."""
        if any(isinstance(record, BranchAdded) for record in earlier):
            return
        refused = {record.operator for record in earlier if isinstance(record, Refusal)}
        match plan.mutation:
            case Repair(branch=broken) if broken.operator not in refused:
                self._repair(plan.step, before, broken)
            case Propose(operators=operators):
                for name in operators:
                    if name not in refused and self._propose(plan.step, before, name):
                        return
            case _:
                return

    def _propose(self, step: int, before: History, operator: str) -> bool:
        """Whether the operator gave a new structure."""
        try:
            request = self._request(step, before, operator)
            proposal = self._mutators[operator].propose(request)
            _check(proposal, before, request)
        except (ProposalError, PatchError) as error:
            self._opened.append(Refusal(step, operator, _problem(error), str(error)))
            return False
        self._opened.append(self._added(step, before, operator, proposal, None))
        return True

    def _repair(self, step: int, before: History, broken: BranchAdded) -> None:
        failed = before.of(broken.id)[0].failed
        mutator = self._mutators.get(broken.operator)
        proposal = None
        problem, detail = "no_repair", "the operator does not repair"
        try:
            if mutator is not None and failed is not None:
                request = self._request(step, before, broken.operator)
                proposal = mutator.repair(request, proposal_of(broken, self._setup.space), failed)
            if proposal is not None:
                _check(proposal, before, request)
        except (ProposalError, PatchError) as error:
            proposal = None
            problem, detail = _problem(error), str(error)
        if proposal is None:
            self._opened.append(Refusal(step, broken.operator, problem, detail, broken.id))
        else:
            self._opened.append(self._added(step, before, broken.operator, proposal, broken.id))

    def _request(self, step: int, before: History, operator: str) -> Request:
        return Request(
            template=self._setup.template,
            specializations=self._setup.specializations,
            standings=standings(self._setup, before),
            tried=frozenset(branch.branch.digest for branch in before.branches),
            seed=randomness(self._setup.config.study.seed, "mutation", step, operator),
        )

    def _added(
        self, step: int, before: History, operator: str, proposal: Proposal, repairs: str | None
    ) -> BranchAdded:
        space = self._setup.space
        legal = proposal.start is not None and space.why_not(proposal.start) is None
        return BranchAdded(
            step=step,
            id=f"b{len(before.branches):02}",
            source=proposal.source,
            parent=proposal.parent,
            origin=proposal.origin,
            note=proposal.note,
            operator=operator,
            other_parent=proposal.other_parent,
            start=space.encode(proposal.start) if legal else None,
            repairs=repairs,
            cost_usd=proposal.cost_usd,
            reference=proposal.reference,
            extra=dict(proposal.extra),
        )


def proposal_of(added: BranchAdded, space: Space) -> Proposal:
    """A recorded branch as its mutator proposed it."""
    return Proposal(
        source=added.source,
        parent=added.parent or SEED_BRANCH,
        origin=added.origin,
        note=added.note,
        other_parent=added.other_parent,
        start=space.decode(added.start) if added.start is not None else None,
        cost_usd=added.cost_usd,
        reference=added.reference,
        extra=added.extra,
    )


def standings(setup: Setup, history: History) -> tuple[Standing, ...]:
    """Living branches for a mutator, the one with the best candidate first."""
    best = ranked(history, history.entries)
    order = dict.fromkeys(entry.asked.branch for entry in best)
    return tuple(_standing(setup, history, branch) for branch in order if history.lives(branch))


def _standing(setup: Setup, history: History, branch: str) -> Standing:
    mine = history.of(branch)
    decode = setup.space.decode
    failures: list[tuple[Any, Failed]] = [(decode(e.asked.knobs), e.failed) for e in mine if e.failed]
    return Standing(
        branch=history.added(branch).branch,
        best=tuple((decode(e.asked.knobs), e.passed) for e in ranked(history, mine) if e.passed),
        failures=tuple(reversed(failures)),
        trials=len(mine),
    )


def _check(proposal: Proposal, before: History, request: Request) -> None:
    """What holds for every structure, whoever proposed it. Raises PatchError or ProposalError."""
    if digest(proposal.source) in request.tried:
        raise ProposalError("the proposed source was tried before", "repeated")
    known = {branch.id for branch in before.branches}
    for parent in (proposal.parent, proposal.other_parent):
        if parent is not None and parent not in known:
            raise ProposalError(f"the proposal's parent {parent} is unknown", "unknown_parent")
    if frame(proposal.source) != frame(before.added(proposal.parent).source):
        raise PatchError("the proposal changes text outside the evolvable stages")


def _problem(error: ProposalError | PatchError) -> str:
    """One word to count by."""
    return error.kind if isinstance(error, ProposalError) else "patch"
