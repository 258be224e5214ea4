"""What differs between targets once a study is done: who judges again, what is recorded, who can verify.

`export` and `verify` know a `Target`; a target's own things, such as the GPU it ran on, are looked up here.
"""

from abc import ABC, abstractmethod
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evotune import devices
from evotune.fitness.operator import Operator
from evotune.fitness.outcome import Failed
from evotune.manifest import Gpu, SanitizerEntry, WorkspaceTerm
from evotune.search_space.branch import Candidate
from evotune.search_space.template import Language, Specialization
from evotune.setup import Setup
from evotune.versions import installed
from evotune.workbench import Bench

if TYPE_CHECKING:
    from evotune.fitness.judge import CompiledEvaluator

_LICENCE = (
    "Source: the template of evotune (Apache-2.0, see its LICENSE) with the stages of this branch, which "
    "came from {origin}. Objects: machine code of that source; "
)


class Target(ABC):
    """One target.

    Attributes:
        source: file name of a kernel's source in an export.
        distributions: packages whose versions the result depends on.
    """

    name: str
    language: Language
    source: str
    distributions: tuple[str, ...]
    _objects_licence: str

    def licence(self, origin: str) -> str:
        """Of a kernel whose branch came from `origin`."""
        return _LICENCE.format(origin=origin) + self._objects_licence

    @abstractmethod
    def evaluator(self, setup: Setup, cache: Path) -> "CompiledEvaluator[Any]":
        """A judge that builds into `cache`. Raises DeviceError where the device is not."""

    @abstractmethod
    def bench(self, operator: Any, unsafe: bool) -> Bench:
        """What this machine can do for kernels of the target. Raises SandboxError where no walls hold."""

    def gpu(self, evaluator: Any) -> Gpu | None:
        """The GPU that one of `evaluator`'s judges on. Raises DeviceError."""
        return None

    def workspace(self, setup: Setup, knobs: Any, spec: Specialization) -> tuple[WorkspaceTerm, ...] | None:
        """What a caller must hand over, as data; None where the library tells it. Raises StudyError."""
        return None

    def sanitized(self, evaluator: Any, candidate: Candidate) -> SanitizerEntry | Failed | None:
        """What a tool that watches memory and threads says of a candidate that `evaluator` confirmed; None
        where the target has no such tool, Failed where it does not build."""
        return None

    def versions(self) -> dict[str, str]:
        """Of evotune, Python and `distributions`."""
        return installed(self.distributions)


class Host(Target):
    """This machine's own processor."""

    name = "host"
    language: Language = "c"
    source = "kernel.c"
    distributions = ("numpy", "ml_dtypes", "optuna")
    _objects_licence = "they call the system's libm and libmvec and hold no code of the compiler."

    def evaluator(self, setup: Setup, cache: Path) -> "CompiledEvaluator[Any]":
        return devices.host(setup, cache)

    def bench(self, operator: Operator, unsafe: bool) -> Bench:
        from evotune.workbench import Workbench

        return Workbench.open(operator, unsafe=unsafe)


class Hopper(Target):
    """An NVIDIA GPU of compute capability 9.0."""

    name = "sm_90a"
    language: Language = "cute"
    source = "kernel.py"
    distributions = ("torch", "apache-tvm-ffi", "nvidia-cutlass-dsl", "numpy", "optuna")
    _objects_licence = (
        "nvidia-cutlass-dsl wrote them, whose licence is for systems with NVIDIA GPUs, and they call its "
        "runtime library, which is not part of this directory."
    )

    def evaluator(self, setup: Setup, cache: Path) -> "CompiledEvaluator[Any]":
        return devices.sm_90a(setup, cache)

    def bench(self, operator: Any, unsafe: bool) -> Bench:
        from evotune.cuda_workbench import CudaWorkbench

        return CudaWorkbench.open(operator, unsafe=unsafe)

    def gpu(self, evaluator: Any) -> Gpu | None:
        from evotune.fitness.device import described

        return Gpu(**vars(described(evaluator.gpu.uuid)))

    def sanitized(self, evaluator: Any, candidate: Candidate) -> SanitizerEntry | Failed | None:
        found = evaluator.sanitize(candidate)
        if isinstance(found, Failed):
            return found
        return SanitizerEntry(found=dict(found.found), absent=found.absent)

    def workspace(self, setup: Setup, knobs: Any, spec: Specialization) -> tuple[WorkspaceTerm, ...] | None:
        """From the template, which alone knows; one that says nothing needs nothing."""
        from evotune.workspace import terms

        needs = getattr(setup.template, "workspace_bytes", None)
        if needs is None:
            return ()
        sizes = [p.name for p in setup.operator.signature(spec) if p.role == "size"]
        return terms(partial(needs, knobs, spec), sizes)

    def versions(self) -> dict[str, str]:
        from evotune.fitness.cuda_link import CudaLinker
        from evotune.fitness.sandbox import Sandbox

        return super().versions() | {"linker": CudaLinker(Sandbox.detect()).version}


HOST: Target = Host()
SM_90A: Target = Hopper()
