"""The door to the judge: candidates in, outcomes out, in whatever parallelism the device allows."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal, Protocol

from evotune.fitness.outcome import Artifact, Failed, Outcome, Retry
from evotune.fitness.racing import NO_BARS, Bars
from evotune.fitness.timing import Timed
from evotune.search_space.branch import Candidate


@dataclass(frozen=True)
class Evaluation:
    """What happened to one candidate.

    Attributes:
        outcome: `Passed`, `Failed` or `Retry`.
        artifacts: objects that were built, by specialization label; empty when the build failed.
        seconds: wall time by phase: "build", "gate", "time"; a device may add its own, see its evaluator.
        saved_s: timing that a race left out, see `racing`.
    """

    outcome: Outcome
    artifacts: Mapping[str, Artifact] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    saved_s: float = 0.0


Purpose = Literal["promotion", "confirmation"]


@dataclass(frozen=True)
class Comparison:
    """A challenger that passed the full gate, timed in blocks against an incumbent instead of the default.

    Attributes:
        blocks: in order, as `sequential` has them; `baseline_samples_us` are the incumbent's.
        worst_error: of the challenger, over its bound, gate and timed calls together.
        seconds: wall time since the judge had room for it.
    """

    blocks: tuple[Timed, ...]
    worst_error: float
    seconds: float


@dataclass(frozen=True)
class Fallen:
    """It was the incumbent that failed, while it was timed or built again: it is no longer one."""

    detail: str


class Evaluator(Protocol):
    """Builds, judges and times. Implementations: the real device, and the replay of a journal."""

    def submit(self, candidate: Candidate, bars: Bars = NO_BARS) -> Future[Evaluation]:
        """Queue a candidate. Builds of several run at once, and judging begins in the order of submission;
        where a device judges several at once, they may end in any other.

        On a workload with a bar, timing may end early when the candidate is hopelessly below it.
        The future raises only DeviceLost, SandboxError or a bug of ours; a candidate's failure is a result.
        """
        ...

    def compare(
        self,
        challenger: Candidate,
        incumbent: Candidate,
        enough: Callable[[Timed], bool],
        *,
        group: str,
        purpose: Purpose,
    ) -> Comparison | Fallen | Failed | Retry:
        """The full gate of the challenger, then blocks against the incumbent on a group's workloads.

        Both in fresh processes, on inputs that chose neither: a purpose's problems serve it alone. Each block
        is shown to `enough`, which says when to stop. `Failed` is the challenger's. Waits for the end.
        Raises DeviceLost, SandboxError.
        """
        ...

    def close(self) -> None:
        """Stop what runs, wait for it, remove what was temporary."""
        ...
