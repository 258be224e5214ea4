"""The judge's own link of a CuTe-DSL object: the object, the DSL's runtime library by name, nothing else.

The runtime library comes from the installed wheel and is loaded by the judge process; it is never copied or
bundled (its licence). tvm-ffi's symbols are bound at load, from the copy that the process imported.
"""

import ctypes
import importlib.util
import subprocess
import sys
from dataclasses import replace
from functools import cache, cached_property
from pathlib import Path

from evotune.errors import SandboxError, StudyError
from evotune.fitness import elf
from evotune.fitness.cute_inspection import CALLS
from evotune.fitness.elf import Elf, ElfError
from evotune.fitness.host_toolchain import Compiler
from evotune.fitness.inspection import refused
from evotune.fitness.link import Linker
from evotune.fitness.outcome import Failed
from evotune.fitness.sandbox import Limits, Sandbox
from evotune.fitness.toolchain import read_output

RUNTIME = "libcute_dsl_runtime.so"
_LIMITS = Limits(wall_s=30.0)
_FLAGS = (
    *("-shared", "-nostartfiles", "-nostdlib", "-s", "-Wl,-z,now", "-Wl,-z,relro", "-Wl,-z,noexecstack"),
    *("-Wl,--no-as-needed", "-Wl,--build-id=none", "-o", "kernel.so", "kernel.o"),
)
_DT_NEEDED, _PT_INTERP, _PT_TLS = 1, 3, 7
_REFUSED_TAGS = {
    12: "DT_INIT",
    15: "DT_RPATH",
    22: "DT_TEXTREL",
    25: "DT_INIT_ARRAY",
    29: "DT_RUNPATH",
    32: "DT_PREINIT_ARRAY",
    0x6FFFFEFC: "DT_AUDIT",
    0x6FFFFEFB: "DT_DEPAUDIT",
    0x7FFFFFFD: "DT_AUXILIARY",
    0x7FFFFFFF: "DT_FILTER",
}


@cache
def runtime_library() -> Path:
    """Where the installed DSL keeps its runtime library. Raises StudyError.

    Asked in a process of its own: the module that knows imports the whole compiler.
    """
    command = [sys.executable, "-m", "cutlass.cute.export.aot_config", "--ldflags"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise StudyError(f"nvidia-cutlass-dsl does not say where its runtime library is: {error}") from error
    folders = [Path(word[2:]) for word in said.split() if word.startswith("-L")]
    found = next((folder / RUNTIME for folder in folders if (folder / RUNTIME).exists()), None)
    if found is None:
        raise StudyError(f"{RUNTIME} is not in {', '.join(map(str, folders)) or 'the installed wheel'}")
    return found.resolve()


@cache
def share_runtime() -> None:
    """Load the DSL's runtime library into this process for objects to bind to: the installed wheel's, else
    where the loader looks. Raises StudyError, OSError."""
    installed = importlib.util.find_spec("cutlass") is not None
    ctypes.CDLL(str(runtime_library()) if installed else RUNTIME, mode=ctypes.RTLD_GLOBAL)


class CudaLinker(Linker):
    """See the module. Raises StudyError without a compiler driver or the DSL's runtime library."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        folder = runtime_library().parent
        compiler = Compiler.find()
        if compiler.is_zig:
            raise StudyError("kernels for a GPU are linked by gcc or clang: install one (apt install gcc)")
        self._compiler = replace(compiler, read_only=(*compiler.read_only, folder))
        self._flags = [*_FLAGS, f"-L{folder}", "-lcute_dsl_runtime"]

    @cached_property
    def version(self) -> str:
        """Of the linker, such as "GNU ld (GNU Binutils for Debian) 2.40": what a link's bytes depend on.

        Raises SandboxError when it does not say.
        """
        with self._sandbox.scratch() as scratch:
            done = self._compiler.run(["-nostdlib", "-Wl,--version"], scratch, self._sandbox, _LIMITS)
        said = done.stdout.text.strip().splitlines()
        if not done.ok or not said:
            raise SandboxError(f"the linker does not say its version: {done.stderr.text.strip()[:200]}")
        return said[0]

    @property
    def identity(self) -> str:
        """The compiler driver, its linker and what they are told; the object itself names no compiler."""
        return " ".join([*self._compiler.command, self.version, *self._flags])

    def link_bytes(self, source: bytes, entry: str) -> bytes | Failed:
        """A checked shared object from an object that `CuteToolchain.inspect` let pass."""
        with self._sandbox.scratch() as scratch:
            (scratch / "kernel.o").write_bytes(source)
            done = self._compiler.run(self._flags, scratch, self._sandbox, _LIMITS)
            if done.stopped or done.signal is not None:
                raise SandboxError(f"the linker did not end by itself: {done.stopped or done.signal}")
            data = read_output(scratch / "kernel.so", _LIMITS.file_bytes) if done.ok else None
        if data is None:
            said = done.stderr.text.strip().splitlines() or ["no message"]
            return refused(f"it does not link: {said[-1]}")
        problem = why_not_loaded(data, entry)
        return data if problem is None else refused(f"after the link: {problem}")


def why_not_loaded(data: bytes, entry: str) -> str | None:
    """Why a linked object must not be loaded: what it needs, what would run at once, what it lacks."""
    try:
        parsed = Elf(data)
        if parsed.type != elf.DYN:
            return "not a shared object"
        for segment in parsed.segments:
            if segment.type in (_PT_INTERP, _PT_TLS):
                return f"program header of type {segment.type}"
            if segment.flags & 3 == 3:
                return "memory that is writable and executable"
        for tag, value in parsed.dynamic():
            if tag in _REFUSED_TAGS:
                return f"dynamic tag {_REFUSED_TAGS[tag]}"
            if tag == _DT_NEEDED and parsed.dynamic_name(value) != RUNTIME:
                return f"it needs the library {parsed.dynamic_name(value)}"
        symbols = parsed.symbols(elf.DYNSYM)
    except ElfError as error:
        return str(error)
    foreign = sorted(s.name for s in symbols if s.section == elf.UNDEFINED and not _known(s.name))
    if foreign:
        return f"foreign symbols: {', '.join(foreign[:5])}"
    shown = {symbol.name for symbol in symbols if symbol.section != elf.UNDEFINED}
    return None if f"__tvm_ffi_{entry}" in shown else f"it does not export {entry}"


def _known(name: str) -> bool:
    """Whether honest objects call it; the first dynamic symbol has no name."""
    return not name or name in CALLS
