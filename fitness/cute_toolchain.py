"""The CuTe-DSL as a `Toolchain`: Python source to a linkable object for sm_90a, on a machine with no GPU.

Compiles go to sandboxed processes that hold the DSL ready and fork for every job (`_cute_zygote.py`): a fork
costs milliseconds, the import 0.6 s and 330 MB. Each serves one job at a time; as many are started as threads
call `compile` at once.

What the object needs is read from the object, its device code by cuobjdump; its launch from the DSL's lowered
IR.
"""

import base64
import importlib.metadata
import importlib.util
import json
import os
import re
import selectors
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from evotune.errors import SandboxError, StudyError
from evotune.fitness import _cute_zygote
from evotune.fitness.build import default_cache_directory
from evotune.fitness.bytecode import reading, stored
from evotune.fitness.cute_inspection import why_refused
from evotune.fitness.elf import Elf, ElfError
from evotune.fitness.outcome import Failed, Failure, Resources, Stage
from evotune.fitness.sandbox import Cell, Child, Level, Limits, Sandbox, directory_bytes, python_paths
from evotune.fitness.toolchain import Compiled, CompileError
from evotune.search_space.template import Language, Unit, digest

OPTIONS = "--enable-tvm-ffi --gpu-arch=sm_90a --keep-cubin --keep-ptx"
_JOBS_PER_ZYGOTE = 200  # then a fresh one: whatever leaks in the parent of the forks stays bounded
_CORES = os.cpu_count() or 1
_LLVM_THREADS = 16 * _CORES
_LLVM_THREAD_BYTES = 256 << 20  # addresses of a stack and a heap; on 16 cores pthread_create failed without
_START_S = 60.0
_STARTS_AT_ONCE = 8
_GRACE_S = 5.0  # beyond the job's own limit before the whole sandbox is killed
_ANSWER_BYTES = 128 << 20
_LOG_LINES, _LINE_CHARACTERS = 30, 400
_LAUNCH = ("shared_bytes", "threads")
_RAISED = re.compile(r"[\w.]+(Error|Exception|Exit|Interrupt)\b")

# Compute capability 9.0, CUDA C++ programming guide, "Technical specifications per compute capability".
_SM_THREADS, _SM_BLOCKS, _SM_REGISTERS, _SM_SHARED_BYTES = 2048, 32, 65536, 228 * 1024
_REGISTER_GRAIN, _BLOCK_RESERVED_BYTES = 256, 1024  # registers are given to warps in units of 256


def missing() -> str | None:
    """One line on what this machine lacks to compile for Hopper, with the mend; None when nothing."""
    for module, package in (("cutlass", "nvidia-cutlass-dsl"), ("tvm_ffi", "apache-tvm-ffi")):
        if importlib.util.find_spec(module) is None:
            return f"{package} is not installed; pip install 'evotune[cuda]'"
    if _cuobjdump() is None:
        return "cuobjdump is not installed; pip install 'evotune[cuda]' (nvidia-cuda-cuobjdump)"
    return None


class CuteToolchain:
    """See the module. Raises StudyError when the extra `cuda` is not installed."""

    target = "sm_90a"
    language: Language = "cute"

    def __init__(self) -> None:
        lack = missing()
        if lack is not None:
            raise StudyError(lack)
        self._version = importlib.metadata.version("nvidia-cutlass-dsl")
        self._lock = threading.Lock()
        self._idle: list[_Zygote] = []
        # A sandbox dies with the thread that started it; these live as long as the toolchain.
        self._starters = ThreadPoolExecutor(_STARTS_AT_ONCE, thread_name_prefix="cute-zygote")

    @property
    def id(self) -> str:
        return f"nvidia-cutlass-dsl {self._version}; {OPTIONS}"

    def compile(self, unit: Unit, scratch: Path, sandbox: Sandbox, limits: Limits) -> Compiled | CompileError:
        job = {
            "text": unit.text,
            "entry": unit.entry,
            "constants": {**dict(unit.constants), "DEBUG": int(unit.debug)},
            "wall_s": limits.wall_s,
            "flood_bytes": limits.flood_bytes,
        }
        zygote = self._take(sandbox, limits)
        try:
            answer = zygote.answer(job)
        except SandboxError:
            zygote.close()
            raise
        if answer.get("reusable") and zygote.jobs < _JOBS_PER_ZYGOTE:
            with self._lock:
                self._idle.append(zygote)
        else:
            zygote.close()
        if answer["status"] != "built":
            return _refusal(answer, limits)
        return _compiled(answer, scratch, sandbox)

    def inspect(self, unit: Unit, compiled: Compiled) -> Resources | Failed:
        problem = why_refused(compiled.object, unit.entry)
        if problem is not None:
            return Failed(Failure.REFUSED, Stage.INSPECT, problem)
        launches = json.loads(compiled.files[".launches.json"])
        usage = resource_usage(compiled.files[".resources"].decode(errors="replace"))
        if not launches or not usage:
            return Failed(Failure.REFUSED, Stage.INSPECT, "the object launches no kernel of a static shape")
        registers = max(kernel["REG"] for kernel in usage)
        stack = max(kernel["STACK"] + kernel["LOCAL"] for kernel in usage)
        threads = max(launch["threads"] for launch in launches)
        # cuobjdump counts 1,024 reserved bytes as SHARED; beyond them it is static shared memory.
        static = max(kernel["SHARED"] for kernel in usage) - _BLOCK_RESERVED_BYTES
        shared = max(launch["shared_bytes"] for launch in launches) + max(static, 0)
        return Resources(
            {
                "registers": registers,
                "stack_bytes": stack,
                "spill_bytes": stack,  # stages have no arrays of their own: what is on the stack was spilled
                "shared_bytes": shared,
                "threads": threads,
                "blocks_per_sm": blocks_per_sm(threads, registers, shared),
                "kernels": len(usage),
                "code_bytes": _code_bytes(compiled.object),
            }
        )

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for zygote in idle:
            zygote.close()
        self._starters.shutdown()

    def _take(self, sandbox: Sandbox, limits: Limits) -> "_Zygote":
        with self._lock:
            for i, zygote in enumerate(self._idle):
                if zygote.sandbox is sandbox and zygote.limits == limits:
                    return self._idle.pop(i)
        return self._starters.submit(_Zygote, sandbox, limits).result()


class _Zygote:
    """One sandboxed process of `_cute_zygote.py`. Raises SandboxError when it does not come up."""

    def __init__(self, sandbox: Sandbox, limits: Limits) -> None:
        self.sandbox, self.limits = sandbox, limits
        self.jobs = 0
        self._stack = ExitStack()
        self._scratch = self._stack.enter_context(sandbox.scratch())
        script = Path(_cute_zygote.__file__).resolve()
        alone = "1" if sandbox.level is Level.BUBBLEWRAP else "0"
        imported = (*_cute_zygote.IMPORTED, *(["torch"] if importlib.util.find_spec("torch") else []))
        bytecode = stored(imported, default_cache_directory())
        command = [sys.executable, *reading(bytecode), "-I", str(script), alone, OPTIONS]
        shown = [*python_paths(), *_outside(script, _origin("cutlass"), _origin("tvm_ffi"))]
        cell = Cell(
            scratch=self._scratch,
            read_only=(*shown, *filter(None, [bytecode])),
            environment={
                "HOME": "/tmp",
                "CUTE_DSL_DISABLE_FILE_CACHING": "1",
                "MALLOC_ARENA_MAX": "2",
                "PYTHONDONTWRITEBYTECODE": "1",
            },
            hidden=_drivers(),
            limits=_with_threads(limits),
        )
        self._child: Child = self._stack.enter_context(
            sandbox.popen(command, cell, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
        )
        try:
            if "ready" not in self._receive(time.monotonic() + _START_S):
                raise SandboxError("the CuTe compiler process did not start")
        except (SandboxError, EOFError, TimeoutError) as error:
            self.close()
            raise SandboxError(f"the CuTe compiler process did not start: {error}") from error

    def answer(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Send a job, wait for its answer. What a job does to this process is the job's failure."""
        self.jobs += 1
        deadline = time.monotonic() + self.limits.wall_s + _GRACE_S
        try:
            self._send(json.dumps(job).encode())
            return self._receive(deadline)
        except (EOFError, BrokenPipeError):
            return {"status": "died", "detail": "the compiler process was killed from within", "log": ""}
        except TimeoutError:
            return {"status": "timeout", "detail": "", "log": ""}
        except _ScratchFull:
            detail = f"wrote more than {self.limits.scratch_bytes} bytes"
            return {"status": "died", "detail": detail, "log": ""}

    def close(self) -> None:
        self._stack.close()

    def _send(self, data: bytes) -> None:
        assert self._child.stdin is not None
        view = memoryview(struct.pack(">Q", len(data)) + data)
        while view:
            view = view[os.write(self._child.stdin.fileno(), view) :]

    def _receive(self, deadline: float) -> dict[str, Any]:
        """One frame. Raises EOFError, TimeoutError, _ScratchFull."""
        header = self._exactly(8, deadline)
        size = struct.unpack(">Q", header)[0]
        if size > _ANSWER_BYTES:
            raise EOFError(f"an answer of {size} bytes")
        data = self._exactly(size, deadline)
        try:
            found: dict[str, Any] = json.loads(data)
        except ValueError as error:
            raise EOFError(f"an answer that is no JSON: {error}") from error
        return found

    def _exactly(self, size: int, deadline: float) -> bytes:
        assert self._child.stdout is not None
        fd, data = self._child.stdout.fileno(), bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(fd, selectors.EVENT_READ)
            while len(data) < size:
                if time.monotonic() > deadline:
                    raise TimeoutError("no answer in time")
                if not selector.select(0.1):
                    if directory_bytes(self._scratch, self.limits.scratch_bytes) > self.limits.scratch_bytes:
                        raise _ScratchFull
                    continue
                chunk = os.read(fd, min(1 << 16, size - len(data)))
                if not chunk:
                    raise EOFError("it ended")
                data += chunk
        return bytes(data)


class _ScratchFull(Exception):
    """A job filled its directory."""


def _refusal(answer: Mapping[str, Any], limits: Limits) -> CompileError:
    """A job's failure, told so that a person or a model can mend it."""
    log = re.sub(r"\x1b\[[0-9;]*m", "", answer["log"])
    if answer["status"] == "timeout":
        detail = f"the compile took more than {limits.wall_s:g} s"
        return CompileError(
            Failed(Failure.TIMEOUT, Stage.BUILD, detail, log=trimmed(log)), log, repeatable=False
        )
    detail = answer["detail"]
    if answer["status"] == "died":
        detail = f"the compile ended without an object: {detail}"
    return CompileError(Failed(Failure.BUILD_ERROR, Stage.BUILD, detail, log=trimmed(log)), log)


def trimmed(log: str) -> str:
    """The lines that help: frames of the candidate's own file and what follows the last of them.

    A traceback of the DSL has some 40 frames of its own; the candidate's are in kernel.py.
    """
    lines = [line.rstrip()[:_LINE_CHARACTERS] for line in log.splitlines() if line.strip()]
    frames = [i for i, line in enumerate(lines) if 'kernel.py"' in line or "kernel.py:" in line]
    kept: list[str] = []
    for i in frames:
        kept += [line for line in lines[i : i + 2] if line not in kept]
    raised = [i for i, line in enumerate(lines) if _RAISED.match(line)]
    end = lines[raised[-1] :] if raised else lines[-_LOG_LINES:]
    return "\n".join([*kept[-_LOG_LINES:], *(line for line in end[:_LOG_LINES] if line not in kept)])


def _compiled(answer: Mapping[str, Any], scratch: Path, sandbox: Sandbox) -> Compiled | CompileError:
    """Decode the answer and let cuobjdump read the device code that is inside the object."""
    log = answer["log"]
    try:
        code, ptx = (base64.b64decode(answer["files"][suffix]) for suffix in (".o", ".ptx"))
        launches = [{name: int(launch[name]) for name in _LAUNCH} for launch in answer["launches"]]
    except (KeyError, TypeError, ValueError) as error:  # the candidate wrote it, not the DSL
        detail = f"the compile left a forged result: {error!r}"
        return CompileError(Failed(Failure.BUILD_ERROR, Stage.BUILD, detail, log=trimmed(log)), log)
    device = embedded_cubin(code)
    if device is None:
        failed = Failed(Failure.BUILD_ERROR, Stage.BUILD, "the object holds no device code", log=trimmed(log))
        return CompileError(failed, log)
    (scratch / "kernel.cubin").write_bytes(device)
    tool = _cuobjdump()
    assert tool is not None  # missing() was asked
    cell = Cell(scratch=scratch, read_only=(tool,), limits=Limits(wall_s=20))
    done = sandbox.run([str(tool), "--dump-resource-usage", "kernel.cubin"], cell)
    if not done.ok:
        said = (done.stderr.text or done.stdout.text).strip()
        detail = f"cuobjdump cannot read the device code: {said}"[:300]
        return CompileError(Failed(Failure.BUILD_ERROR, Stage.BUILD, detail), said)
    files = {
        ".ptx": ptx,
        ".cubin": device,
        ".resources": done.stdout.head,
        ".launches.json": json.dumps(launches).encode(),
    }
    return Compiled(code, files, log)


def embedded_cubin(code: bytes) -> bytes | None:
    """The device ELF file that the DSL stores in its object, up to the object's end; None without one."""
    start = code.find(b"\x7fELF", 1)
    while start != -1:
        if code[start + 18 : start + 20] == (190).to_bytes(2, "little"):  # e_machine of CUDA
            return code[start:]
        start = code.find(b"\x7fELF", start + 1)
    return None


def resource_usage(text: str) -> list[dict[str, int]]:
    """cuobjdump's REG, STACK, SHARED, LOCAL per kernel."""
    wanted = ("REG", "STACK", "SHARED", "LOCAL")
    return [
        {name: int(value) for name, value in re.findall(r"(\w+)(?:\[\d+\])?:(\d+)", line) if name in wanted}
        for line in text.splitlines()
        if "REG:" in line
    ]


def blocks_per_sm(threads: int, registers: int, shared_bytes: int) -> int:
    """Blocks that one multiprocessor of compute capability 9.0 holds at once; 0 when none fits."""
    warps = -(-threads // 32)
    per_warp = -(-registers * 32 // _REGISTER_GRAIN) * _REGISTER_GRAIN
    by_registers = _SM_REGISTERS // max(per_warp, 1) // warps
    by_shared = _SM_SHARED_BYTES // (shared_bytes + _BLOCK_RESERVED_BYTES)
    return min(_SM_THREADS // (warps * 32), _SM_BLOCKS, by_registers, by_shared)


def ptx_digest(ptx: str) -> str:
    """Equal for sources that differ in names, comments or order of text only: entry names are masked."""
    for i, name in enumerate(re.findall(r"\.entry\s+(\w+)", ptx)):
        ptx = ptx.replace(name, f"kernel{i}")
    return digest(ptx)


def _code_bytes(code: bytes) -> int:
    """Instructions of all kernels."""
    device = embedded_cubin(code)
    if device is None:
        return 0
    try:
        return sum(section.size for section in Elf(device).sections if section.name.startswith(".text."))
    except ElfError:
        return 0


def _with_threads(limits: Limits) -> Limits:
    """LLVM starts a thread per core in every compile, whatever the study allows a compiler."""
    memory = limits.memory_bytes
    return replace(
        limits,
        processes=limits.processes + _LLVM_THREADS,
        memory_bytes=None if memory is None else memory + _CORES * _LLVM_THREAD_BYTES,
    )


def _drivers() -> tuple[Path, ...]:
    """NVIDIA driver libraries that the loader would find. Without a device in its cell the DSL does not need
    one, and asks it all the same: cuInit then ended compiles with SIGSEGV on a machine that has a GPU."""
    lines = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=False).stdout
    found = {line.split("=>")[1].strip() for line in lines.splitlines() if "libcuda.so" in line}
    return tuple(sorted({Path(name).resolve() for name in found if Path(name).exists()}))


def _cuobjdump() -> Path | None:
    with suppress(importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.files("nvidia-cuda-cuobjdump") or ():
            if file.name in ("cuobjdump", "cuobjdump.exe"):
                return Path(str(file.locate())).resolve()
    found = shutil.which("cuobjdump")
    return Path(found).resolve() if found else None


def _origin(module: str) -> Path:
    """The directory of an importable package."""
    spec = importlib.util.find_spec(module)
    assert spec is not None  # missing() was asked
    assert spec.origin is not None
    return Path(spec.origin).resolve().parent


def _outside(*paths: Path) -> tuple[Path, ...]:
    """Those that neither the system's directories nor the interpreter's show already."""
    shown: Sequence[Path] = (Path("/usr"), *python_paths())
    return tuple(path for path in paths if not any(path.is_relative_to(place) for place in shown))
