"""What can become of a candidate. Speed exists only inside `Passed`.

Stages in order; the constraint told to Optuna is the number of stages left to pass:

    build → inspect → smoke → edges → regimes → laws → integrity → (timed)
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from statistics import median


class Stage(StrEnum):
    """Where a candidate stands; the five gate rungs carry the names users see."""

    BUILD = "build"
    INSPECT = "inspect"
    SMOKE = "smoke"
    EDGES = "edges"
    REGIMES = "regimes"
    LAWS = "laws"
    INTEGRITY = "integrity"
    TIME = "time"

    @property
    def left_to_pass(self) -> int:
        """Stages still unpassed when a candidate fails here: 8 at build, 1 while timed."""
        order = list(Stage)
        return len(order) - order.index(self)


RUNGS = (Stage.SMOKE, Stage.EDGES, Stage.REGIMES, Stage.LAWS, Stage.INTEGRITY)


class Failure(StrEnum):
    """Why a candidate failed."""

    BUILD_ERROR = "build_error"  # the toolchain refused it
    REFUSED = "refused"  # the object has what no honest kernel needs: constructors, foreign symbols
    OVER_BUDGET = "over_budget"  # above the study's limits: registers, object size, workspace
    WRONG = "wrong"  # outputs outside the derived bound, inputs or guard bands changed
    UNSTABLE = "unstable"  # two equal calls, different bits
    FAULT = "fault"  # a signal: segmentation fault, illegal instruction
    TIMEOUT = "timeout"  # the build or a call took too long
    FORGED = "forged"  # its own clock and ours disagree, or a time below the physical floor


@dataclass(frozen=True)
class Resources:
    """What the built object needs, read from it or from the compiler, never predicted.

    `values` has integers by name with the unit in the name: `code_bytes`, `stack_bytes`, `registers`,
    `spill_bytes`, `shared_bytes`, `threads`.
    """

    values: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Artifact:
    """A built object. `digest` names it: unit, target and toolchain together."""

    digest: str
    object_path: Path
    entry: str
    target: str
    toolchain: str
    resources: Resources
    build_s: float


@dataclass(frozen=True)
class Measurement:
    """Raw times of one workload, candidate and baseline interleaved in one block.

    Attributes:
        workload: its name.
        group: its workload group.
        samples_us: candidate, one per timed call, in call order.
        baseline_samples_us: the baseline in the same block, likewise.
    """

    workload: str
    group: str
    samples_us: tuple[float, ...]
    baseline_samples_us: tuple[float, ...]

    @property
    def time_us(self) -> float:
        return median(self.samples_us)

    @property
    def baseline_time_us(self) -> float:
        return median(self.baseline_samples_us)

    @property
    def speedup(self) -> float:
        """Baseline time over candidate time."""
        return self.baseline_time_us / self.time_us


@dataclass(frozen=True)
class Value:
    """One objective's value; every objective says in its name what is measured and in `unit` the unit."""

    name: str
    value: float
    unit: str
    maximize: bool


@dataclass(frozen=True)
class Passed:
    """Through the gate and timed.

    Attributes:
        level: how much of the gate it passed: "screen" or "full".
        worst_error: the largest error over its derived bound, seen in any case; at most 1.
        host_call_us: host cost of one call, measured on an empty problem.
    """

    level: str
    worst_error: float
    measurements: tuple[Measurement, ...]
    host_call_us: float
    values: tuple[Value, ...]
    resources: Mapping[str, Resources]  # by specialization label


@dataclass(frozen=True)
class Failed:
    """Data, not an exception. Has no field for a speed.

    Attributes:
        case: the gate case, such as "odd T, one head"; "" outside the gate.
        detail: one line that says where and how much.
        log: what a compiler or a crashed worker printed, trimmed; the full text is kept beside the artifact.
    """

    failure: Failure
    stage: Stage
    detail: str
    case: str = ""
    log: str = ""
    resources: Mapping[str, Resources] = field(default_factory=dict)

    @property
    def told(self) -> str:
        """ "wrong at edges (odd T): o, head 0, chunk 1 …" """
        case = f" ({self.case})" if self.case else ""
        return f"{self.failure.value} at {self.stage.value}{case}: {self.detail}"


@dataclass(frozen=True)
class Retry:
    """Trouble that is not the candidate's: sandbox, disk, lost device. Queued again, never charged."""

    reason: str


Outcome = Passed | Failed | Retry
