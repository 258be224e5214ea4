"""The protocol of what proposes new branches. A mutator sees plain outcomes and never a device."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from evotune.fitness.outcome import Failed, Passed
from evotune.search_space.branch import Branch
from evotune.search_space.template import Specialization, Template


@dataclass(frozen=True)
class Standing:
    """How a branch is doing.

    Attributes:
        best: its passed candidates, best first, as (knobs, outcome).
        failures: its recent failures, newest first, as (knobs, outcome).
        trials: how many candidates of it were judged.
    """

    branch: Branch
    best: Sequence[tuple[Any, Passed]] = ()
    failures: Sequence[tuple[Any, Failed]] = ()
    trials: int = 0


@dataclass(frozen=True)
class Request:
    """What a mutator is asked.

    Attributes:
        standings: all living branches, best first; never empty.
        tried: digests of every source that ever was a branch or failed as a proposal.
        seed: all randomness of the proposal comes from it, so that a journal replays.
    """

    template: Template
    specializations: Sequence[Specialization]
    standings: Sequence[Standing]
    tried: frozenset[str]
    seed: int


@dataclass(frozen=True)
class Proposal:
    """A new structure. Enters the study as a branch after its first candidate passes the gate.

    Attributes:
        start: knobs to try first; None for the parent's best.
        cost_usd: what it cost to get; 0 without an LLM.
        reference: where the conversation is kept, relative to the study directory; "" without one.
    """

    source: str
    parent: str
    origin: str
    note: str
    other_parent: str | None = None
    start: Any | None = None
    cost_usd: float = 0.0
    reference: str = ""
    extra: Mapping[str, str] = field(default_factory=dict)


class Mutator(Protocol):
    """Proposes branches."""

    @property
    def name(self) -> str: ...

    def propose(self, request: Request) -> Proposal:
        """A source that is not in `request.tried`. Raises ProposalError when there is none to give."""
        ...

    def repair(self, request: Request, proposal: Proposal, failed: Failed) -> Proposal | None:
        """A second try after the first candidate failed, at most once per proposal; None to give up.

        Raises what `propose` raises.
        """
        ...
