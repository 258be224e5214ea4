"""What this machine has of what a study needs, and the mend for each lack."""

import importlib.metadata
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from evotune.errors import SandboxError, StudyError
from evotune.fitness.build import default_cache_directory
from evotune.fitness.device import absent
from evotune.fitness.host_toolchain import Compiler, HostToolchain, cpu
from evotune.fitness.sandbox import Sandbox

if TYPE_CHECKING:
    from rich.table import Table

# A quickstart leaves some 30 MB of objects and journal; a build needs room beside it.
_LEAST_FREE_MIB = 512
# Names only; the values are never read.
_KEY_SUFFIX = "_API_KEY"
_DSL = "nvidia-cutlass-dsl"


class State(StrEnum):
    """OK; WEAK: works, with a limit that is told; OPTIONAL: absent, needed for some studies; LACKING."""

    OK = "ok"
    WEAK = "weak"
    OPTIONAL = "optional"
    LACKING = "lacking"


@dataclass(frozen=True)
class Check:
    """One line of the table: what was found, and the mend ("" where there is nothing to mend)."""

    name: str
    state: State
    found: str
    mend: str = ""

    def as_json(self) -> dict[str, str]:
        return {"name": self.name, "state": self.state.value, "found": self.found, "mend": self.mend}


def checks(directory: Path) -> Iterator[Check]:
    """Look at everything; `directory` is where studies would lie. Starts a compiler behind the walls, sends
    nothing anywhere."""
    sandbox, wall = sandbox_check()
    yield wall
    yield compiler_check(sandbox)
    yield from disk_checks(directory)
    yield processor_check()
    yield gpu_check()
    yield dsl_check()
    yield torch_check()
    yield key_check()


def healthy(found: Sequence[Check]) -> bool:
    """Whether a study for the host target would run."""
    return all(check.state is not State.LACKING for check in found)


def sandbox_check() -> tuple[Sandbox | None, Check]:
    try:
        sandbox = Sandbox.detect()
    except SandboxError as error:
        mend = "install bubblewrap (apt install bubblewrap, or pip install 'evotune[sandbox]')"
        return None, Check("sandbox", State.LACKING, str(error), mend)
    told = sandbox.describe()
    found = "; ".join([f"{told.level} {told.detail}".strip(), *told.weaker])
    return sandbox, Check("sandbox", State.WEAK if told.weaker else State.OK, found, told.mend)


def compiler_check(sandbox: Sandbox | None) -> Check:
    """Whether a compiler builds a trivial function behind the walls."""
    mend = "install gcc (apt install gcc libc6-dev), or pip install 'evotune[zig]'"
    try:
        compiler = Compiler.find()
        if sandbox is None:
            found = f"{' '.join(compiler.command)}, not tried: there is no sandbox"
            return Check("compiler", State.WEAK, found, "mend the sandbox first")
        return Check("compiler", State.OK, HostToolchain(sandbox, compiler).version)
    except (StudyError, SandboxError, OSError) as error:
        return Check("compiler", State.LACKING, str(error), mend)


def disk_checks(directory: Path) -> Iterator[Check]:
    """Room, and whether it can be written, where studies, objects and scratch files go."""
    places = {
        "disk, studies": directory,
        "disk, objects": default_cache_directory(),
        "disk, scratch": Path(tempfile.gettempdir()),
    }
    for name, place in places.items():
        existing = next(p for p in (place.absolute(), *place.absolute().parents) if p.exists())
        free_mib = shutil.disk_usage(existing).free >> 20
        found = f"{free_mib} MiB free at {place}"
        if not os.access(existing, os.W_OK):
            yield Check(name, State.LACKING, f"{existing} cannot be written", "choose another directory")
        elif free_mib < _LEAST_FREE_MIB:
            yield Check(name, State.LACKING, found, f"free at least {_LEAST_FREE_MIB} MiB")
        else:
            yield Check(name, State.OK, found)


def processor_check() -> Check:
    """Timing pins a kernel to one core and wants another for everything else."""
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    found = f"{cpu()}, {cores} cores, load {load:.1f}"
    if cores < 2:
        mend = "give it a second core: builds and timing share one, and times will be noisy"
        return Check("processor", State.WEAK, found, mend)
    if load > cores / 2 + 0.5:
        return Check("processor", State.WEAK, found, "end what else runs: times will be noisy")
    return Check("processor", State.OK, f"{found}; kernels are pinned to core {max(os.sched_getaffinity(0))}")


def gpu_check() -> Check:
    reason = absent("sm_90a")
    if reason is None:
        return Check("GPU", State.OK, _nvidia_smi() or "compute capability 9.0")
    mend = "only for sm_90a studies; `run --dry-run` builds and inspects them without one"
    return Check("GPU", State.OPTIONAL, reason, mend)


def _nvidia_smi() -> str:
    """Name and driver of the GPUs; "" where nvidia-smi does not answer."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return "; ".join(done.stdout.split("\n")).strip("; ")


def dsl_check() -> Check:
    return _package("CuTe-DSL", _DSL, "cutlass", "only for sm_90a studies: pip install 'evotune[cuda]'")


def torch_check() -> Check:
    return _package("torch", "torch", "torch", "only to run kernels on a GPU: pip install 'evotune[cuda]'")


def _package(name: str, distribution: str, module: str, mend: str) -> Check:
    """By its metadata: importing torch takes seconds."""
    try:
        version = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return Check(name, State.OPTIONAL, "not installed", mend)
    if find_spec(module) is None:
        return Check(name, State.WEAK, f"{version} is installed but {module} cannot be found", mend)
    return Check(name, State.OK, version)


def key_check() -> Check:
    """Names of variables that look like keys; never a value."""
    names = sorted(name for name, value in os.environ.items() if name.endswith(_KEY_SUFFIX) and value)
    if names:
        return Check("LLM key", State.OK, f"set: {', '.join(names)}")
    mend = "only for the llm operator: set the variable that [mutation.llm] names; `rules` needs no key"
    return Check("LLM key", State.OPTIONAL, f"no variable ends in {_KEY_SUFFIX}", mend)


def table(found: Sequence[Check]) -> "Table":
    """For a terminal."""
    from rich.table import Table
    from rich.text import Text

    view = Table("", "state", "found", "mend")
    for check in found:
        # As Text: in a plain string rich would take [mutation.llm] for markup.
        view.add_row(*(Text(cell) for cell in (check.name, check.state.value, check.found, check.mend)))
    return view
