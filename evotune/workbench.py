"""Compiles, links and judges single kernels outside a study: for `verify` and `diagnose`.

Nothing comes from a cache: every object here was just compiled, or just handed in and inspected.
"""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from evotune.errors import SandboxError
from evotune.fitness.gate import Gate, GateLimits, Session
from evotune.fitness.host_toolchain import Compiler, HostToolchain
from evotune.fitness.inspection import inspect_object
from evotune.fitness.link import Linker
from evotune.fitness.operator import Operator
from evotune.fitness.outcome import Failed
from evotune.fitness.runner import Loadable, Runner, kinds, timing_cpu
from evotune.fitness.sandbox import Limits, Sandbox
from evotune.fitness.toolchain import CompileError
from evotune.search_space.template import Specialization, Unit


@dataclass(frozen=True)
class Workbench:
    """This machine's compiler and walls, and a gate with cases of its own."""

    operator: Operator
    gate: Gate
    toolchain: HostToolchain
    sandbox: Sandbox
    limits: GateLimits

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

    def compile(self, unit: Unit) -> bytes | Failed:
        """The unit's object file, inspected. Raises SandboxError for trouble that is not the unit's."""
        with self.sandbox.scratch() as scratch:
            compiled = self.toolchain.compile(unit, scratch, self.sandbox, Limits())
        if isinstance(compiled, CompileError):
            if not compiled.repeatable:
                raise SandboxError(compiled.failed.detail)
            return compiled.failed
        problem = self.toolchain.inspect(unit, compiled)
        return problem if isinstance(problem, Failed) else compiled.object

    def link(self, object_: bytes, entry: str) -> bytes | Failed:
        """Our own link of an object, which is inspected first and whose library is inspected afterwards."""
        found = inspect_object(object_, entry)
        if isinstance(found, Failed):
            return found
        return Linker(self.toolchain, self.sandbox).link_bytes(object_, entry)

    @contextmanager
    def session(self, libraries: Mapping[Specialization, bytes], entry: str) -> "Iterator[Session[Runner]]":
        """A judging session over libraries made by `link`, in the order of the mapping; for one thread."""
        signatures = [self.operator.signature(spec) for spec in libraries]
        with tempfile.TemporaryDirectory(prefix="evotune-judged-") as folder:
            loadables = []
            for i, data in enumerate(libraries.values()):
                path = Path(folder) / f"object{i}.so"
                path.write_bytes(data)
                loadables.append(Loadable(path, entry, kinds(signatures[i])))

            def start() -> Runner:
                arena_bytes = self.limits.arena_mib << 20
                return Runner(loadables, self.sandbox, arena_bytes=arena_bytes, cpu=timing_cpu())

            session = Session(start, signatures, self.limits)
            try:
                yield session
            finally:
                session.close()
