"""Inspects, links and judges kernels for a GPU outside a study, as far as this machine can: for `verify`.

Without the GPU nothing is run, without the DSL nothing is built, without either no linker is asked; what
could not be done is said (`Unable`).
"""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from evotune.errors import DeviceError, SandboxError, StudyError
from evotune.fitness.cuda_link import CudaLinker, runtime_library, why_not_loaded
from evotune.fitness.cuda_runner import CudaCell, CudaProcess
from evotune.fitness.cute_inspection import why_refused
from evotune.fitness.cute_toolchain import CuteToolchain, missing
from evotune.fitness.device import absent, capability, lacking
from evotune.fitness.gate import Gate, GateLimits, Session
from evotune.fitness.lease import any_free
from evotune.fitness.link import Linker
from evotune.fitness.operator import DeviceOperator
from evotune.fitness.outcome import Failed
from evotune.fitness.runner import Fault
from evotune.fitness.sandbox import Level, Sandbox
from evotune.fitness.toolchain import Toolchain
from evotune.manifest import KernelManifest
from evotune.search_space.template import Unit
from evotune.workbench import Adoption, Libraries, Unable, Workspaces, compiled, loadable

TARGET = "sm_90a"


@dataclass
class CudaWorkbench:
    """Implements `Bench` for sm_90a. What is None is what `unable` gives the reason for.

    Attributes:
        refusal: why an object must not be linked; None when it may.
        held: what ends with the bench, such as the GPU's lease.
    """

    operator: DeviceOperator
    gate: Gate
    sandbox: Sandbox
    limits: GateLimits
    unable: Unable = Unable()
    toolchain: Toolchain | None = None
    linker: Linker | None = None
    linker_id: str = ""
    cell: CudaCell | None = None
    refusal: Callable[[bytes, str], str | None] = why_refused
    library_refusal: Callable[[bytes, str], str | None] = why_not_loaded
    held: ExitStack = field(default_factory=ExitStack)

    @classmethod
    def open(cls, operator: DeviceOperator, *, unsafe: bool = False) -> Self:
        """With whatever this machine has; the first free GPU is taken until `close`.

        Raises SandboxError where no walls hold.
        """
        sandbox = Sandbox.detect(unsafe=unsafe)
        bench = cls(operator, Gate(operator), sandbox, GateLimits())
        no_compiler, no_linker = missing() or "", ""
        if not no_compiler:
            bench.toolchain = CuteToolchain()
            bench.held.callback(bench.toolchain.close)
        try:
            linker = CudaLinker(sandbox)
            bench.linker, bench.linker_id = linker, linker.version
        except StudyError as error:
            no_linker = str(error)
        bench.unable = Unable(run=bench._raise_cell(), link=no_linker, compile=no_compiler)
        return bench

    def _raise_cell(self) -> str:
        """Take a GPU and say where judge processes run; or why that cannot be."""
        reason = absent(TARGET) or lacking()
        if reason is None and self.sandbox.level is Level.LANDLOCK:
            reason = (
                "on a GPU kernels are judged behind bubblewrap alone: install it (apt install bubblewrap)"
            )
        if reason is not None:
            return reason
        try:
            lease = any_free()
        except DeviceError as error:
            return str(error)
        self.held.callback(lease.close)
        self.cell = CudaCell(self.sandbox, self.limits.arena_mib << 20, runtime_library(), lease.gpu.nodes)
        return ""

    @property
    def toolchain_id(self) -> str:
        return self.toolchain.id if self.toolchain else ""

    def misplaced(self, manifest: KernelManifest) -> str:
        """Code for an arch-specific target runs on GPUs of its very compute capability; see `unable.run`."""
        if manifest.target != TARGET or manifest.gpu is None:
            return f"its target is {manifest.target}, and it does not say for which GPU; wanted {TARGET}"
        wanted = capability(TARGET)
        if manifest.gpu.compute_capability == wanted:
            return ""
        return (
            f"judged on a GPU of compute capability {manifest.gpu.compute_capability}; {TARGET} is {wanted}"
        )

    def adopt(self, object_: bytes, library: bytes, manifest: KernelManifest) -> Adoption:
        """Object and library are inspected. Linkers differ in the bytes they write: one that is the
        manifest's must give the library again, another one's is judged as it was shipped."""
        problem = self.refusal(object_, manifest.entry) or self.library_refusal(library, manifest.entry)
        if problem is not None:
            return Adoption(f"refused at inspect: {problem}")
        if self.linker is None:
            return Adoption(same=None)
        linked = self.linker.link_bytes(object_, manifest.entry)
        if isinstance(linked, Failed):
            return Adoption(linked.told)
        if linked == library:
            return Adoption(same=True)
        exported = manifest.versions.get("linker", "")
        if exported == self.linker_id:
            return Adoption(f"is not what linking its object gives with the very linker, {exported}")
        return Adoption(same=False)

    def compile(self, unit: Unit) -> bytes | Failed:
        """See `Bench.compile`."""
        assert self.toolchain is not None  # `unable` was asked
        return compiled(self.toolchain, unit, self.sandbox)

    @contextmanager
    def session(
        self, libraries: Libraries, entry: str, workspaces: Workspaces
    ) -> Iterator[Session[CudaProcess]]:
        """See `Bench.session`."""
        cell = self.cell
        assert cell is not None  # `unable` was asked
        signatures = [self.operator.device_signature(spec) for spec in libraries]
        with tempfile.TemporaryDirectory(prefix="evotune-judged-") as folder:
            loadables = loadable(libraries, entry, signatures, Path(folder))

            def start() -> CudaProcess:
                process = CudaProcess(cell)
                try:
                    process.open()
                    process.load(loadables, signatures, [workspaces[spec] for spec in libraries])
                except (Fault, SandboxError):
                    process.close()
                    raise
                return process

            session = Session(start, signatures, self.limits)
            try:
                yield session
            finally:
                session.close()

    def close(self) -> None:
        """Give the GPU back, end the compiler's processes."""
        self.held.close()
