"""What the journal of a study holds. Everything else about a study follows from these records.

A step asks for a batch of candidates and, when one is due, for a proposal. Its records come in this order:

    ask ask …   branch | refusal (if a proposal was due)   result result …   promotion | confirmation …

so that a step with a result has all its asks, and what a step decided depends on earlier steps only. Where
steps are asked ahead, the asks and the proposal of one come before the first result of the step before it,
which it does not depend on then.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, TypeAdapter

from evotune.fitness.objectives import Column
from evotune.fitness.outcome import Failed, Measurement, Outcome, Passed, Retry, Stage
from evotune.search_space.branch import Branch
from evotune.search_space.template import Constant

Knobs = Mapping[str, Constant]
Purpose = Literal["baseline", "first", "tune", "retry"]


def _tag(outcome: Any) -> str:
    """Which outcome it is, as an object or as JSON, by the fields that only one of them has."""
    has = outcome.__contains__ if isinstance(outcome, Mapping) else lambda name: hasattr(outcome, name)
    return "passed" if has("measurements") else "failed" if has("failure") else "retry"


@dataclass(frozen=True)
class StudyBegun:
    """The first record.

    Attributes:
        config: `StudyConfig.as_json()`.
        base: directory of the study file, from which relative names count.
        columns: Optuna's directions, in order.
        versions: of what a result may depend on.
    """

    config: Mapping[str, Any]
    base: str
    columns: tuple[Column, ...]
    versions: Mapping[str, str]
    kind: Literal["study"] = "study"


@dataclass(frozen=True)
class SessionBegun:
    """A process took the study up. `at` is local time in ISO form."""

    at: str
    pid: int
    kind: Literal["session"] = "session"


@dataclass(frozen=True)
class BranchAdded:
    """A structure that may become a living branch: it lives once its first candidate passed.

    Attributes:
        operator: the mutator that was asked; "" for the seed.
        start: knobs of its first candidate; None for the parent's best.
        repairs: id of the dead branch this one mends.
        cost_usd, reference, extra: as in `Proposal`.
    """

    step: int
    id: str
    source: str
    parent: str | None
    origin: str
    note: str
    operator: str = ""
    other_parent: str | None = None
    start: Mapping[str, Any] | None = None
    repairs: str | None = None
    cost_usd: float = 0.0
    reference: str = ""
    extra: Mapping[str, str] = field(default_factory=dict)
    kind: Literal["branch"] = "branch"

    @property
    def branch(self) -> Branch:
        return Branch(self.id, self.source, self.parent, self.origin, self.note, self.other_parent)


@dataclass(frozen=True)
class Refusal:
    """A mutator that was asked gave nothing. `problem` is one word to count by, `repairs` as above."""

    step: int
    operator: str
    problem: str
    detail: str
    repairs: str | None = None
    kind: Literal["refusal"] = "refusal"


@dataclass(frozen=True)
class Asked:
    """A candidate is about to be judged.

    Attributes:
        index: number of the candidate in the study, from 0; a retry keeps it.
        trial: its Optuna trial; a retry and a resumed candidate get another.
    """

    step: int
    index: int
    trial: int
    branch: str
    knobs: Mapping[str, Any]
    purpose: Purpose
    kind: Literal["ask"] = "ask"


@dataclass(frozen=True)
class Judged:
    """What became of a candidate; written before Optuna is told.

    Attributes:
        seconds: wall time by phase.
        saved_s: timing that a race left out.
        artifacts: digests of its objects by specialization label.
        elapsed_s: running time of the study so far, all sessions together.
    """

    step: int
    index: int
    trial: int
    outcome: Annotated[
        Annotated[Passed, Tag("passed")] | Annotated[Failed, Tag("failed")] | Annotated[Retry, Tag("retry")],
        Discriminator(_tag),
    ]
    seconds: Mapping[str, float]
    artifacts: Mapping[str, str]
    elapsed_s: float
    saved_s: float = 0.0
    kind: Literal["result"] = "result"


Blocks = tuple[tuple[Measurement, ...], ...]
"""Raw times: by block, by workload of the group."""


@dataclass(frozen=True)
class Contest:
    """A challenger met the champion of a workload group; see `promotion`.

    Attributes:
        step: the step after which it was held.
        challenger, champion: candidates by index.
        level: bound on the probability that a challenger which is no faster is promoted.
        evidence: the test's e-value at its end.
        promoted: whether the challenger is the champion now.
        blocks: `baseline_samples_us` are the champion's.
        failed: why the challenger is out for good; None when it holds.
        fallen: why the champion is out for good; "" when it holds.
        seconds: wall time.
        elapsed_s: as in `Judged`.
    """

    step: int
    group: str
    challenger: int
    champion: int
    level: float
    evidence: float
    promoted: bool
    blocks: Blocks
    failed: Failed | None
    fallen: str
    seconds: float
    elapsed_s: float
    kind: Literal["promotion"] = "promotion"

    @property
    def tested(self) -> bool:
        """Whether evidence was seen, so that the level is spent."""
        failed = self.failed
        return bool(self.blocks) or bool(self.fallen) or (failed is not None and failed.stage is Stage.TIME)


@dataclass(frozen=True)
class Confirmation:
    """A champion timed against the default kernel on data that chose nothing: what is published.

    Attributes:
        blocks: `baseline_samples_us` are the default's; empty when it failed.
        failed: why the champion is out for good; None when it holds.
        resolution: the least log-ratio that the machine tells from none; None where that was not measured.
    """

    step: int
    group: str
    champion: int
    blocks: Blocks
    failed: Failed | None
    seconds: float
    elapsed_s: float
    resolution: float | None = None
    kind: Literal["confirmation"] = "confirmation"


Record = StudyBegun | SessionBegun | BranchAdded | Refusal | Asked | Judged | Contest | Confirmation
_ADAPTER: TypeAdapter[Record] = TypeAdapter(Annotated[Record, Field(discriminator="kind")])


def to_json(record: Record) -> dict[str, Any]:
    """A record as plain JSON values."""
    data: dict[str, Any] = _ADAPTER.dump_python(record, mode="json")
    return data


def from_json(data: Mapping[str, Any]) -> Record:
    """Inverse of `to_json`. Raises pydantic's ValidationError (a ValueError)."""
    return _ADAPTER.validate_python(data)


def verdict(outcome: Outcome) -> str:
    """ "passed", the failure's class, or "retry": one word for tables and counts."""
    if isinstance(outcome, Passed):
        return "passed"
    return "retry" if isinstance(outcome, Retry) else outcome.failure.value
