"""Compiles, links and judges single kernels outside a study: for `verify` and `diagnose`.

Nothing comes from a cache: every object here was just compiled, or just handed in and inspected. `Workbench`
is the host's; a GPU's is `evotune.cuda_workbench`.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from evotune.errors import SandboxError
from evotune.fitness.gate import Gate, GateLimits, Session
from evotune.fitness.host_toolchain import Compiler, HostToolchain
from evotune.fitness.inspection import inspect_object
from evotune.fitness.link import Linker
from evotune.fitness.operator import Operator, Parameter
from evotune.fitness.outcome import Failed
from evotune.fitness.runner import Loadable, Runner, kinds, timing_cpu
from evotune.fitness.sandbox import Limits, Sandbox
from evotune.fitness.toolchain import CompileError, Toolchain
from evotune.manifest import KernelManifest, this_cpu
from evotune.search_space.template import Specialization, Unit

Libraries = Mapping[Specialization, bytes]
Workspaces = Mapping[Specialization, Callable[[Mapping[str, int]], int]]
"""Bytes of workspace from the sizes of a call."""


@dataclass(frozen=True)
class Unable:
    """Why a machine cannot run, link or compile kernels of a target, a line each; "" where it can."""

    run: str = ""
    link: str = ""
    compile: str = ""


@dataclass(frozen=True)
class Adoption:
    """What a machine says of a library that was shipped with its object.

    Attributes:
        problem: why it must not be judged; "" when it may.
        same: whether our own link of the object gives it byte for byte; None when nothing could be linked.
    """

    problem: str = ""
    same: bool | None = True


class Bench(Protocol):
    """What `verify` asks of a machine. A machine without the device still has something to say."""

    @property
    def operator(self) -> Operator: ...
    @property
    def gate(self) -> Gate:
        """With cases of its own."""
        ...

    @property
    def unable(self) -> Unable: ...
    @property
    def toolchain_id(self) -> str:
        """Of the compiler, as manifests record it; "" without one."""
        ...

    def misplaced(self, manifest: KernelManifest) -> str:
        """Why a kernel does not run on this machine, with the mend; "" when it does."""
        ...

    def adopt(self, object_: bytes, library: bytes, manifest: KernelManifest) -> Adoption:
        """Whether both are what honest ones are, and the library is the object's.

        Raises SandboxError for trouble that is not theirs.
        """
        ...

    def compile(self, unit: Unit) -> bytes | Failed:
        """The unit's object file, inspected. Raises SandboxError for trouble that is not the unit's."""
        ...

    def session(
        self, libraries: Libraries, entry: str, workspaces: Workspaces
    ) -> AbstractContextManager[Session[Any]]:
        """A judging session over libraries, in the order of the mapping; for one thread."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Workbench:
    """This machine's compiler and walls, and a gate with cases of its own. Implements `Bench`."""

    operator: Operator
    gate: Gate
    toolchain: HostToolchain
    sandbox: Sandbox
    limits: GateLimits
    unable: Unable = Unable()

    @classmethod
    def open(
        cls,
        operator: Operator,
        *,
        limits: GateLimits | None = None,
        compiler: str = "",
        unsafe: bool = False,
    ) -> Self:
        """With the compiler of that name, "" for the first there is.

        Raises SandboxError where no walls hold, StudyError where no compiler works.
        """
        sandbox = Sandbox.detect(unsafe=unsafe)
        toolchain = HostToolchain(sandbox, Compiler.find(compiler or None))
        return cls(operator, Gate(operator), toolchain, sandbox, limits or GateLimits())

    @property
    def toolchain_id(self) -> str:
        return self.toolchain.id

    def misplaced(self, manifest: KernelManifest) -> str:
        """The objects hold every instruction of the processor they were built on (-march=native)."""
        here, built = this_cpu(), manifest.cpu
        missing = sorted(set(built.flags) - set(here.flags))
        if built.machine == here.machine and not missing:
            return ""
        return (
            f"built for {built.model} ({built.machine}), this is {here.model} ({here.machine})"
            f"{'; missing here: ' + ' '.join(missing[:8]) if missing else ''}: export again on this machine"
        )

    def adopt(self, object_: bytes, library: bytes, manifest: KernelManifest) -> Adoption:
        """The library must be, byte for byte, what our own link makes of the inspected object."""
        linked = self.link(object_, manifest.entry)
        if isinstance(linked, Failed):
            return Adoption(linked.told)
        if linked == library:
            return Adoption()
        exported, here = manifest.toolchain.split(";")[0], self.toolchain.version
        return Adoption(f"is not what linking its object gives (exported with {exported}, here {here})")

    def compile(self, unit: Unit) -> bytes | Failed:
        """See `Bench.compile`."""
        return compiled(self.toolchain, unit, self.sandbox)

    def link(self, object_: bytes, entry: str) -> bytes | Failed:
        """Our own link of an object, which is inspected first and whose library is inspected afterwards."""
        found = inspect_object(object_, entry)
        if isinstance(found, Failed):
            return found
        return Linker(self.toolchain, self.sandbox).link_bytes(object_, entry)

    @contextmanager
    def session(
        self, libraries: Libraries, entry: str, workspaces: Workspaces | None = None
    ) -> Iterator[Session[Runner]]:
        """See `Bench.session`; host libraries tell themselves what workspace they need."""
        signatures = [self.operator.signature(spec) for spec in libraries]
        with tempfile.TemporaryDirectory(prefix="evotune-judged-") as folder:
            loadables = loadable(libraries, entry, signatures, Path(folder))

            def start() -> Runner:
                arena_bytes = self.limits.arena_mib << 20
                return Runner(loadables, self.sandbox, arena_bytes=arena_bytes, cpu=timing_cpu())

            session = Session(start, signatures, self.limits)
            try:
                yield session
            finally:
                session.close()

    def close(self) -> None:
        """Nothing is held."""


def compiled(toolchain: Toolchain, unit: Unit, sandbox: Sandbox) -> bytes | Failed:
    """See `Bench.compile`."""
    with sandbox.scratch() as scratch:
        found = toolchain.compile(unit, scratch, sandbox, Limits())
    if isinstance(found, CompileError):
        if not found.repeatable:
            raise SandboxError(found.failed.detail)
        return found.failed
    problem = toolchain.inspect(unit, found)
    return problem if isinstance(problem, Failed) else found.object


def loadable(
    libraries: Libraries, entry: str, signatures: Sequence[Sequence[Parameter]], folder: Path
) -> list[Loadable]:
    """The libraries as files in `folder`, in order."""
    found = []
    for i, (data, signature) in enumerate(zip(libraries.values(), signatures, strict=True)):
        path = folder / f"object{i}.so"
        path.write_bytes(data)
        found.append(Loadable(path, entry, kinds(signature)))
    return found
