"""The system's C compiler (gcc, clang, or zig from PyPI) as a toolchain, and the linker that comes with it.

Flags, and why these:
- `-O3 -march=native`: an object is for the CPU that times it; its features are part of the toolchain id.
- `-ffp-contract=fast -fno-math-errno -fno-trapping-math`: fused multiply-add, and no bookkeeping for errno or
  exception flags that nobody reads. None of them changes the order of operations.
- Not `-ffast-math`: `-fassociative-math` would undo the rounding tricks of a fast exponential, and
  `-ffinite-math-only` removes the tests by which a kernel keeps NaN a NaN. A stage that wants a reduction
  reordered says so with `#pragma omp simd reduction`, which `-fopenmp-simd` honours without any library.
- `-fvisibility=hidden`, no stack protector, no unwind tables, `_FORTIFY_SOURCE` off: distributions (and
  zig, sanitizers) add these by default; each brings a symbol or section that inspection would have to allow.
"""

import platform
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path

from evotune.errors import StudyError
from evotune.fitness.inspection import inspect_object
from evotune.fitness.outcome import Failed, Failure, Resources, Stage
from evotune.fitness.sandbox import Cell, Completed, Limits, Sandbox
from evotune.fitness.toolchain import Compiled, CompileError, arguments, read_output
from evotune.search_space.template import Language, Unit, digest

_FLAGS = (
    *("-std=gnu11", "-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"),
    *("-fopenmp-simd", "-fPIC", "-fvisibility=hidden", "-fno-stack-protector", "-U_FORTIFY_SOURCE"),
    *("-g0", "-fno-asynchronous-unwind-tables", "-fno-ident", "-Werror=implicit-function-declaration"),
    *("-fdiagnostics-color=never", "-pipe"),
)
# Not every compiler knows these; each is used where it is accepted.
_OPTIONAL_FLAGS = (
    "-fcf-protection=none",
    "-fstack-usage",
    "-fmax-errors=5",
    "-ferror-limit=5",
    "-fno-sanitize=all",
)
_SOURCE, _OBJECT, _STACK_USAGE = "kernel.c", "kernel.o", "kernel.su"
_ZIG_LINK_FLAGS = ("-shared", "-z", "relro", "-z", "now", "-z", "noexecstack", "--hash-style=gnu")
_LINK_FLAGS = (
    *("-shared", "-nostartfiles", "-nostdlib", "-fno-lto"),
    "-Wl,-z,relro,-z,now,-z,noexecstack,--hash-style=gnu,--build-id=none",
)
_MAX_STACK_USAGE_BYTES = 1 << 20
_PROBE = "int kernel_probe(int x) { return x + 1; }\n"

_DIAGNOSTIC = re.compile(
    r"^(?P<place>[^\s:]+:\d+(:\d+)?): (?P<kind>fatal error|[Ee]rror|warning|note): (?P<text>.*)"
)
_CONTEXT = re.compile(
    r"^(In file included from|\s+from |[^\s:]+: (In function|At top level|Assembler messages))"
)
_TRIMMED_LINES, _TRIMMED_BYTES = 30, 2000


@dataclass(frozen=True)
class Compiler:
    """A C compiler driver: the command that starts it, and what its cell must show beside the system."""

    command: tuple[str, ...]
    read_only: tuple[Path, ...] = ()

    @classmethod
    def find(cls, name: str | None = None) -> "Compiler":
        """The one called `name` (a program in PATH, a path, or "zig"); else the first of cc, gcc, clang, zig.

        Raises StudyError that names the mend.
        """
        for candidate in [name] if name else ["cc", "gcc", "clang", "zig"]:
            found = shutil.which(candidate)
            if candidate == "zig":
                found = _zig()
            if found:
                return cls.at(Path(found))
        wanted = f"the compiler {name!r} was not found" if name else "no C compiler was found"
        raise StudyError(f"{wanted}: install gcc or clang (apt install gcc), or pip install ziglang")

    @classmethod
    def at(cls, path: Path) -> "Compiler":
        """The driver at a path; what lies outside /usr is shown with its prefix."""
        path = path.absolute()
        command = (str(path), "cc") if path.name == "zig" else (str(path),)
        places = {path.parent if path.name == "zig" else path.parent.parent, path.resolve().parent.parent}
        outside = sorted(place for place in places if not place.is_relative_to("/usr") and place != Path("/"))
        return cls(command, tuple(outside))

    @property
    def is_zig(self) -> bool:
        return len(self.command) > 1

    @property
    def environment(self) -> Mapping[str, str]:
        """zig keeps caches and finds no home inside the walls."""
        caches = {"ZIG_GLOBAL_CACHE_DIR": "/tmp/zig", "ZIG_LOCAL_CACHE_DIR": "/tmp/zig"}
        return caches if self.is_zig else {}

    def run(self, arguments: list[str], scratch: Path, sandbox: Sandbox, limits: Limits) -> Completed:
        """The driver with these arguments, inside the walls, in `scratch`. Raises SandboxError, OSError."""
        return sandbox.run([*self.command, *arguments], self._cell(scratch, limits))

    def link(self, arguments: list[str], scratch: Path, sandbox: Sandbox, limits: Limits) -> Completed:
        """Make a shared object that may need libm and libmvec only. Raises SandboxError, OSError.

        zig's driver adds its own C library and start-up code, so its linker is called directly.
        """
        if self.is_zig:
            line = [
                self.command[0],
                "ld.lld",
                *_ZIG_LINK_FLAGS,
                *arguments,
                "--as-needed",
                *_math_libraries(),
            ]
        else:
            line = [*self.command, *_LINK_FLAGS, *arguments, "-Wl,--as-needed", "-lm"]
        return sandbox.run(line, self._cell(scratch, limits))

    def _cell(self, scratch: Path, limits: Limits) -> Cell:
        return Cell(
            scratch=scratch, read_only=self.read_only, environment=dict(self.environment), limits=limits
        )


def _math_libraries() -> list[str]:
    """Paths of glibc's libm and libmvec, for a linker that is called without a driver that knows them."""
    machine = platform.machine()
    places = [
        Path(f"/usr/lib/{machine}-linux-gnu"),
        Path("/usr/lib64"),
        Path("/usr/lib"),
        Path(f"/lib/{machine}-linux-gnu"),
    ]
    found = [place / name for name in ("libm.so.6", "libmvec.so.1") for place in places]
    return list({path.name: str(path) for path in reversed(found) if path.exists()}.values())


def _zig() -> str | None:
    found = find_spec("ziglang")
    if found is None or not found.submodule_search_locations:
        return shutil.which("zig")
    return str(Path(found.submodule_search_locations[0]) / "zig")


class HostToolchain:
    """Compiles C units for this machine's CPU."""

    target = "host"
    language: Language = "c"

    def __init__(self, sandbox: Sandbox, compiler: Compiler | None = None) -> None:
        """Asks the compiler for its version and flags, inside the walls.

        Raises StudyError when it does not compile a trivial function, SandboxError.
        """
        self.compiler = compiler or Compiler.find()
        self._sandbox = sandbox
        self.flags = self._accepted_flags()
        self.id = f"host {self.version}; {' '.join(self.flags)}; {cpu()}"

    @cached_property
    def version(self) -> str:
        """First line of `--version`, such as "gcc (Debian 12.2.0-14) 12.2.0"."""
        with self._sandbox.scratch() as scratch:
            done = self.compiler.run(["--version"], scratch, self._sandbox, Limits(wall_s=60))
        lines = done.stdout.text.splitlines()
        if not done.ok or not lines:
            raise StudyError(f"{' '.join(self.compiler.command)} does not start: {done.stderr.text.strip()}")
        return lines[0]

    def _accepted_flags(self) -> tuple[str, ...]:
        """All flags if the compiler takes them together, else the optional ones it takes alone."""
        optional = [flag for flag in _OPTIONAL_FLAGS if not self._problem([*_FLAGS, "-Werror", flag])]
        flags = [*_FLAGS, *optional]
        problem = self._problem(flags)
        if problem:
            raise StudyError(
                f"{' '.join(self.compiler.command)} does not compile a trivial function: {problem}"
            )
        return tuple(flags)

    def _problem(self, flags: list[str]) -> str:
        with self._sandbox.scratch() as scratch:
            (scratch / _SOURCE).write_text(_PROBE)
            command = [*flags, "-c", _SOURCE, "-o", _OBJECT]
            done = self.compiler.run(command, scratch, self._sandbox, Limits(wall_s=60))
        return "" if done.ok else done.stderr.text.strip() or f"status {done.returncode}"

    def compile(self, unit: Unit, scratch: Path, sandbox: Sandbox, limits: Limits) -> Compiled | CompileError:
        """See `Toolchain.compile`."""
        (scratch / _SOURCE).write_text(unit.text, encoding="utf-8")
        command = [*self.flags, *arguments(unit.constants), f"-DDEBUG={int(unit.debug)}"]
        done = self.compiler.run([*command, "-c", _SOURCE, "-o", _OBJECT], scratch, sandbox, limits)
        log = done.stderr.text + done.stdout.text
        if not done.ok:
            return _refusal(done, log, limits)
        data = read_output(scratch / _OBJECT, limits.file_bytes)
        if data is None:
            return CompileError(_failed("the compiler left no object file", log), log)
        usage = read_output(scratch / _STACK_USAGE, _MAX_STACK_USAGE_BYTES)
        return Compiled(data, {} if usage is None else {".su": usage}, log)

    def inspect(self, unit: Unit, compiled: Compiled) -> Resources | Failed:
        """`code_bytes`, `rodata_bytes` from the object; `stack_bytes`: the deepest frame gcc reports."""
        found = inspect_object(compiled.object, unit.entry)
        if isinstance(found, Failed) or ".su" not in compiled.files:
            return found
        return Resources(
            {**found.values, "stack_bytes": deepest_frame(compiled.files[".su"].decode(errors="replace"))}
        )

    def link(self, objects: list[str], output: str, scratch: Path, limits: Limits) -> Completed:
        """Link relocatable objects in `scratch` into a shared object that may need libm and libmvec only."""
        return self.compiler.link(["-o", output, *objects], scratch, self._sandbox, limits)

    def close(self) -> None:
        """Nothing is kept warm."""


def _failed(detail: str, log: str, failure: Failure = Failure.BUILD_ERROR) -> Failed:
    return Failed(failure, Stage.BUILD, detail, log=trim(log))


def _refusal(done: Completed, log: str, limits: Limits) -> CompileError:
    """Why a compile did not succeed; only what the source alone decides is `repeatable`."""
    if done.stopped == "wall time":
        detail = f"the compiler took more than {limits.wall_s:g} s"
        return CompileError(_failed(detail, log, Failure.TIMEOUT), log, repeatable=False)
    if done.stopped:
        detail = f"the compiler passed its limit: {done.stopped}"
        return CompileError(_failed(detail, log, Failure.OVER_BUDGET), log, repeatable=False)
    if re.search(r"out of memory|memory exhausted|[Cc]annot allocate memory|size limit exceeded|Killed", log):
        detail = "the compiler ran out of its memory, time or file size"
        return CompileError(_failed(detail, log, Failure.OVER_BUDGET), log, repeatable=False)
    if done.signal is not None:
        return CompileError(_failed(f"the compiler died of signal {done.signal}", log), log, repeatable=False)
    return CompileError(_failed(first_error(log), log), log)


def first_error(log: str) -> str:
    """One line that says what is wrong and where."""
    for line in log.splitlines():
        match = _DIAGNOSTIC.match(line)
        if match and match["kind"].lower().endswith("error"):
            return f"{match['place']}: {match['text']}"[:300]
    return next(
        (line.strip()[:300] for line in log.splitlines() if line.strip()), "the compiler failed silently"
    )


def trim(log: str) -> str:
    """The errors with their place and the source lines under them; at most 30 lines and 2 kB.

    Warnings, notes and include chains are dropped. A log without a recognizable error keeps its end.
    """
    kept: list[str] = []
    keeping = False
    for line in log.splitlines():
        match = _DIAGNOSTIC.match(line)
        if match:
            keeping = match["kind"].lower().endswith("error")
        elif _CONTEXT.match(line):
            keeping = False
        if keeping:
            kept.append(line[:200])
    kept = kept[:_TRIMMED_LINES] or [line[:200] for line in log.splitlines()[-_TRIMMED_LINES:]]
    return "\n".join(kept).encode()[:_TRIMMED_BYTES].decode(errors="ignore")


def deepest_frame(stack_usage: str) -> int:
    """Bytes of the largest stack frame in gcc's `-fstack-usage` listing (place TAB bytes TAB kind)."""
    sizes = [line.split("\t")[1] for line in stack_usage.splitlines() if line.count("\t") >= 2]
    return max((int(size) for size in sizes if size.isdigit()), default=0)


def cpu() -> str:
    """Model of this machine's CPU and a digest of its features: what `-march=native` depends on."""
    facts: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        facts.setdefault(name.strip(), value.strip())
    features = facts.get("flags") or facts.get("Features") or ""
    model = facts.get("model name") or f"{facts.get('CPU implementer', '?')}/{facts.get('CPU part', '?')}"
    return f"{platform.machine()} {model} {digest(*sorted(features.split()))[:12]}"
