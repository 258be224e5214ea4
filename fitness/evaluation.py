"""The door to the judge: candidates in, outcomes out, in whatever parallelism the device allows."""

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from evotune.fitness.outcome import Artifact, Outcome
from evotune.search_space.branch import Candidate


@dataclass(frozen=True)
class Evaluation:
    """What happened to one candidate.

    Attributes:
        outcome: `Passed`, `Failed` or `Retry`.
        artifacts: objects that were built, by specialization label; empty when the build failed.
        seconds: wall time by phase: "build", "gate", "time".
    """

    outcome: Outcome
    artifacts: Mapping[str, Artifact] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)


class Evaluator(Protocol):
    """Builds, judges and times. Implementations: the real device, and the replay of a journal."""

    def submit(self, candidate: Candidate) -> Future[Evaluation]:
        """Queue a candidate. Builds of several run at once; judging and timing keep the order of submission.

        The future raises only DeviceLost, SandboxError or a bug of ours; a candidate's failure is a result.
        """
        ...

    def close(self) -> None:
        """Stop what runs, wait for it, remove what was temporary."""
        ...
