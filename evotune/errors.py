"""Every exception evotune raises on purpose. A leaf: all packages may import it.

EvotuneError
├── StudyError        the user's file, directory or command line; printed as one line, exit code 2
│   └── LegalityError     no legal configuration exists
├── PatchError        a proposed edit does not apply; the proposal is recorded as failed
├── ProposalError     a mutator could not produce a branch; recorded, the study goes on
├── SandboxError      the sandbox itself failed to start or to hold; never charged to a candidate
└── DeviceError       the device is missing
    └── DeviceLost        it was there and is gone; what was in flight is queued again

A candidate that fails to build, to be right or to end in time is not an exception: see
`evotune.fitness.outcome.Failed`.
"""


class EvotuneError(Exception):
    """Root of the tree above."""


class StudyError(EvotuneError):
    """A mistake in what the user gave; the message names the thing and the mend."""


class LegalityError(StudyError):
    """A template has no legal configuration for the asked specialization."""


class PatchError(EvotuneError):
    """An edit that does not apply: missing text, text outside an evolvable stage, an ambiguous match."""


class ProposalError(EvotuneError):
    """A mutator gave up: refusal, nonsense, an exhausted budget, an unreachable service.

    `kind` is one word to count by: "exhausted" when nothing new is left, else what went wrong ("refusal").
    """

    def __init__(self, message: str, kind: str = "exhausted") -> None:
        super().__init__(message)
        self.kind = kind


class SandboxError(EvotuneError):
    """The walls around a build or a judged kernel could not be raised."""


class DeviceError(EvotuneError):
    """The device a study names is not on this machine."""


class DeviceLost(DeviceError):
    """The device or its process vanished while it was in use."""
