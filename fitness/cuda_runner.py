"""The parent's side of a judge process on a GPU.

A process serves one candidate and is thrown away: CUDA cannot be forked, and after a fault nothing in a
context can be trusted. Several stand on one GPU (`turns`), a few of them ahead of their use (`spares`).
"""

import importlib.util
import json
import math
import os
import reprlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from evotune.errors import DeviceError, SandboxError
from evotune.fitness import _cuda_child as child
from evotune.fitness import _runner_child, seccomp
from evotune.fitness.arena import ALIGN, NULL, Buffer, Placement, dtype_of, lay_out
from evotune.fitness.build import default_cache_directory
from evotune.fitness.bytecode import reading, stored
from evotune.fitness.cell import Cell, Limits
from evotune.fitness.operator import Array, DeviceParameter, Spread
from evotune.fitness.outcome import Failure
from evotune.fitness.runner import Call, Fault, Loadable, Worker
from evotune.fitness.sandbox import Child, Sandbox, python_paths
from evotune.fitness.turns import Usage

_SCRIPT = Path(child.__file__).resolve()
_WIRE = Path(_runner_child.__file__).resolve()
_START_S = 120.0
_OPEN_S = 60.0
_LOAD_S = 30.0
_SETUP_S = 60.0
_COPY_S = 10.0
_PACKAGES = ("torch", "tvm_ffi", "numpy", "typing_extensions")
# Words of CUDA's messages that speak of the device, not of the kernel.
_TROUBLE = ("uncorrectable", "ecc error", "nvlink", "devices unavailable", "out of memory", "no device")
_CAPTURE = ("capture", "capturing")
_LEAST_US = 0.1  # no kernel starts and ends in less
# What starts kernels, or allocates gigabytes.
_IN_TURN = frozenset(
    {
        *(child.GROW, child.CALL, child.APART, child.FILL, child.ARM),
        *(child.SAMPLE, child.CHECK, child.HOST, child.COPY),
    }
)

KINDS = ("graph", "plain")
"""How a timed call is made: the replay of a captured graph, or as a user calls it."""

Workspace = Callable[[Mapping[str, int]], int]
"""Bytes of workspace an object needs, from the sizes of a call by name."""


@dataclass(frozen=True)
class Facts:
    """What a process says of its GPU."""

    device: str
    l2_bytes: int
    memory_bytes: int


@dataclass(frozen=True)
class Prepared:
    """Laid-out problems of one workload.

    Attributes:
        placement: where their arguments lie, alike in all.
        digests: of the inputs of each, by set number.
    """

    placement: Placement
    digests: Mapping[int, list[str]]


@dataclass(frozen=True)
class Armed:
    """A captured call: kernels in the graph, time of a replay, and what issuing a plain one takes."""

    kernels: float
    us: float
    issue_us: float


@dataclass(frozen=True)
class Burst:
    """Timed calls made in a row, in us, and how long the parent waited for all of them."""

    graph_us: tuple[float, ...]
    plain_us: tuple[float, ...]
    waited_us: float

    @property
    def reported_us(self) -> float:
        return sum(self.graph_us) + sum(self.plain_us)


@dataclass(frozen=True)
class Checker:
    """A tool that a judge process runs under, such as compute-sanitizer, and what that needs of the cell."""

    command: tuple[str, ...]
    scratch: Path | None
    filter: bytes | None
    environment: Mapping[str, str]


@dataclass(frozen=True)
class CudaCell:
    """How judge processes are started: walls, script, device nodes, site directories, runtime library."""

    sandbox: Sandbox
    arena_bytes: int
    runtime: Path
    devices: tuple[Path, ...]
    script: Path = _SCRIPT
    usage: Usage = field(default_factory=Usage)
    checker: "Checker | None" = None
    packages: tuple[str, ...] = _PACKAGES

    @property
    def paths(self) -> tuple[Path, ...]:
        """Directories that torch, tvm_ffi and what they import are found in."""
        found = []
        for name in self.packages:
            spec = importlib.util.find_spec(name)
            if spec is None or spec.origin is None:
                raise DeviceError(
                    f"{name} is not installed: pip install 'evotune[cuda]' and torch for your GPU"
                )
            origin = Path(spec.origin).resolve()
            found.append(origin.parent.parent if origin.name == "__init__.py" else origin.parent)
        return tuple(dict.fromkeys(found))

    def launch(self, spec: Mapping[str, Any], fds: tuple[int, ...]) -> Child:
        """Start the script. Raises SandboxError, OSError."""
        paths = [str(path) for path in self.paths]
        spec = {**spec, "paths": paths, "runtime": str(self.runtime)}
        checker = self.checker or Checker((), None, _filter(), {})
        bytecode = stored(self.packages, default_cache_directory())
        python = [sys.executable, *reading(bytecode), "-I", "-S"]
        command = [*checker.command, *python, str(self.script), json.dumps(spec)]
        shown = [*python_paths(), _SCRIPT, _WIRE, self.script, self.runtime.parent, *self.paths]
        if bytecode is not None:
            shown.append(bytecode)
        if self.devices:
            shown.append(Path("/sys"))  # without it cuInit finds no GPU
        libraries = os.environ.get("LD_LIBRARY_PATH")
        environment = {
            "HOME": "/tmp",
            "OMP_NUM_THREADS": "1",
            "CUDA_CACHE_DISABLE": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            **({"LD_LIBRARY_PATH": libraries} if libraries else {}),
            **checker.environment,
        }
        cell = Cell(
            scratch=checker.scratch,
            read_only=tuple(dict.fromkeys(path for path in shown if not path.is_relative_to("/usr"))),
            devices=self.devices,
            environment=environment,
            pass_fds=fds,
            filter=checker.filter,
            limits=_limits(),
        )
        return self.sandbox.popen(command, cell, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _filter() -> bytes | None:
    """cuInit makes a socket and gives up, with error 304, when that is refused (seen on driver 580)."""
    return seccomp.build_filter(sockets=True) if seccomp.supported() else None


def _limits() -> Limits:
    """CUDA maps far more addresses than it uses, and starts threads of its own."""
    return Limits(cpu_s=24 * 3600, memory_bytes=None, processes=512, files=1024, file_bytes=1 << 30)


class CudaProcess(Worker):
    """One judge process, without a candidate until `load`. See `gate.Judged` for what the gate asks of it."""

    repeats = 16  # a barrier left out showed within 20 calls on an H200, and not in one

    def __init__(self, cell: CudaCell) -> None:
        """Raises SandboxError when the process does not come up. It dies with the thread that makes it."""
        super().__init__(cell.arena_bytes)
        self._usage = cell.usage
        self._apart = cell.checker is not None
        self._signatures: list[Sequence[DeviceParameter]] = []
        self._workspaces: list[Workspace] = []
        self._waited_s = 0.0
        self._mirrored = child.MIRROR_BYTES
        try:
            self._process = self._start(cell)
            for number in (0, 1):
                self._reply(number, _START_S)
        except Fault as fault:
            self.close()
            raise SandboxError(f"the judge process for the GPU did not start: {fault.detail}") from fault
        except BaseException:
            self.close()
            raise

    def _start(self, cell: CudaCell) -> Child:
        self._replies, reply_end = os.pipe()
        request_end, self._requests = os.pipe()
        spec = {
            "arena": self.arena.fd,
            "arena_bytes": self.arena.size,
            "requests": request_end,
            "replies": reply_end,
        }
        try:
            return cell.launch(spec, (self.arena.fd, request_end, reply_end))
        finally:
            os.close(request_end)
            os.close(reply_end)

    def open(self) -> Facts:
        """Make the context. Raises SandboxError: nothing of a candidate is there to blame."""
        try:
            said = self.ask(child.OPEN, {}, _OPEN_S)
            return Facts(str(said["device"]), int(said["l2_bytes"]), int(said["memory_bytes"]))
        except (Fault, KeyError, TypeError, ValueError) as error:
            self.close()
            raise SandboxError(f"no CUDA context in the sandbox: {error}") from error

    def load(
        self,
        objects: Sequence[Loadable],
        signatures: Sequence[Sequence[DeviceParameter]],
        workspaces: Sequence[Workspace],
    ) -> None:
        """Load a candidate's objects; from here on the process is its own. Raises Fault."""
        at, places = 0, []
        for item in objects:
            data = np.frombuffer(item.path.read_bytes(), np.uint8)
            places.append([at, data.size, item.entry])
            at = self.arena.write(at, data)
        self._signatures, self._workspaces = list(signatures), list(workspaces)
        try:
            self.ask(child.LOAD, {"objects": places, "folder": "/tmp"}, _LOAD_S)
        except Fault as fault:
            if fault.failure is not Failure.FAULT:
                raise
            raise Fault(Failure.REFUSED, f"an object cannot be loaded: {fault.detail}") from fault

    def close(self) -> None:
        """Kill the process and free the arena. Nobody waits while the driver ends the context."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            threading.Thread(target=_reap, args=(process,), name="reap").start()
        super().close()

    # What the gate asks for

    def workspace_bytes(self, index: int, sizes: Sequence[int], timeout_s: float) -> int:
        names = [p.name for p in self._signatures[index] if p.role == "size"]
        return self._workspaces[index](dict(zip(names, sizes, strict=True)))

    def call(self, index: int, placement: Placement, timeout_s: float) -> Call:
        """Call object `index` on a placed case. Raises Fault."""
        job = {
            "object": index,
            "begin": placement.begin,
            "end": placement.end,
            "arguments": arguments(self._signatures[index], placement),
        }
        if self._apart:
            return self._called(child.APART, job, timeout_s)
        if placement.end > self._mirrored:
            self._mirrored = 2 * placement.end
            self.ask(child.GROW, {"bytes": self._mirrored}, _SETUP_S)
        copying_s = max(timeout_s, _COPY_S)  # nothing of the candidate's runs then
        self.ask(child.BRING, job, copying_s)
        call = self._called(child.CALL, {"object": index}, timeout_s)
        self.ask(child.TAKE, {}, copying_s)
        return call

    def _called(self, operation: int, job: Mapping[str, Any], timeout_s: float) -> Call:
        inside_ns = self._number(self.ask(operation, job, timeout_s), "ns")
        return Call(int(inside_ns), int(self._waited_s * 1e9))

    def fence(self, placement: Placement) -> None:
        """Nothing to take away: GPU memory has no rights by the page. Guards hold NaNs; see `sanitize`."""

    def unfence(self, placement: Placement) -> None:
        """See `fence`."""

    # What the timer asks for

    def prepare(
        self, numbers: Sequence[int], index: int, spreads: Sequence[Spread], workspace_bytes: int
    ) -> Prepared:
        """Lay out large problems of one workload in GPU memory as the sets of these numbers.

        Raises Fault, StudyError.
        """
        placement = self._upload(numbers, index, spreads, workspace_bytes)
        return Prepared(placement, dict(zip(numbers, self._filled(numbers, placement), strict=True)))

    def successor(self, number: int, index: int, spread: Spread, workspace_bytes: int) -> None:
        """Bring another problem of a set's shapes to the GPU, for `succeed`. Starts no kernel there.

        Raises Fault, StudyError.
        """
        self._upload([-1 - number], index, [spread], workspace_bytes, takes=number)

    def succeed(self, number: int, prepared: Prepared) -> Prepared:
        """Other values in the very memory of a set, whose captured call stays; what `look` needs to know.

        Raises Fault.
        """
        (digests,) = self._filled([-1 - number], prepared.placement)
        return Prepared(prepared.placement, {**prepared.digests, number: digests})

    def _filled(self, numbers: Sequence[int], placement: Placement) -> list[list[str]]:
        said = self.ask(child.FILL, {"sets": list(numbers)}, _SETUP_S)
        return self._digests(said.get("digests"), len(numbers), len(_inputs(placement)))

    def _upload(
        self,
        numbers: Sequence[int],
        index: int,
        spreads: Sequence[Spread],
        workspace_bytes: int,
        takes: int | None = None,
    ) -> Placement:
        """Sources and tables of some problems; where their arguments will lie."""
        signature = self._signatures[index]
        placement = lay_out(signature, spreads[0], workspace_bytes=workspace_bytes, flush="start")
        guards = self.arena.guard_bytes(placement)
        at = self.arena.write(0, guards)
        inputs = _inputs(placement)
        sources = {}
        for buffer in inputs:
            if buffer.size:
                source = spreads[0].sources[buffer.name]
                assert source is not None  # it has a buffer
                sources[buffer.name] = at
                at = self.arena.write(at, np.ascontiguousarray(source, dtype=dtype_of(buffer.ctype)))
        sets = []
        for number, spread in zip(numbers, spreads, strict=True):
            builds = []
            for buffer in inputs:
                if buffer.size:
                    build, at = self._build(buffer, spread, sources[buffer.name], at)
                    builds.append(build)
            sets.append([number, builds])
        job = {
            "sets": sets,
            "object": index,
            "bytes": placement.end,
            "guards": 0,
            "guard_bytes": guards.size,
            "gaps": placement.gaps,
            "inputs": [(b.start, b.size) for b in inputs],
            "poisoned": [(b.start, b.size) for b in placement.buffers if b.role != "input"],
            "outputs": {b.name: (b.start, b.shape, b.ctype) for b in placement.buffers if b.role == "output"},
            "arguments": arguments(signature, placement),
            "takes": takes,
        }
        self.ask(child.PREPARE, job, _SETUP_S)
        return placement

    def _build(self, buffer: Buffer, spread: Spread, source_at: int, at: int) -> tuple[dict[str, Any], int]:
        """How to gather one input, its tables in the arena from `at` on; where the next may lie."""
        source, gather = spread.sources[buffer.name], spread.gathers.get(buffer.name)
        assert source is not None  # it has a buffer
        build = {"start": buffer.start, "dtype": buffer.ctype, "source": source_at}
        if gather is None:
            return {**build, "rows": source.shape, "target": source.shape, "index": None, "factor": None}, at
        rows = int(np.prod(source.shape[: gather.lead], dtype=np.int64))
        build |= {"rows": (rows, source.size // max(rows, 1)), "target": (rows, len(gather.index))}
        build |= {"index": at, "factor": None}
        at = self.arena.write(at, gather.index)
        if gather.factor is not None:
            build["factor"] = at
            at = self.arena.write(at, gather.factor)
        return build, at

    def arm(self, number: int, sleep_us: float, timeout_s: float) -> Armed:
        """Warm up and capture. Raises Fault."""
        try:
            said = self.ask(child.ARM, {"set": number, "sleep_us": sleep_us}, timeout_s)
        except Fault as fault:
            if fault.failure is Failure.FAULT and any(word in fault.detail.lower() for word in _CAPTURE):
                detail = f"does not launch on the stream it was given: {fault.detail}"
                raise Fault(Failure.FORGED, detail) from fault
            raise
        return Armed(*(self._number(said, name) for name in ("kernels", "us", "issue_us")))

    def sample(self, number: int, order: Sequence[str], sleep_us: float, timeout_s: float) -> Burst:
        """Timed calls in a row, each "graph" or "plain", ahead of whoever waits for a turn. Raises Fault."""
        job = {"set": number, "order": list(order), "sleep_us": sleep_us}
        us = self.ask(child.SAMPLE, job, timeout_s).get("us")
        waited_us = self._waited_s * 1e6
        if not isinstance(us, list) or len(us) != len(order):
            self.close()
            raise Fault(Failure.FORGED, f"answered {len(order)} calls with {reprlib.repr(us)}")
        times = [self._number({"us": value}, "us") for value in us]
        if min(times) < _LEAST_US or sum(times) > waited_us:
            self.close()
            detail = f"reported {', '.join(f'{t:.4g}' for t in times)} us within {waited_us:.1f} us"
            raise Fault(Failure.FORGED, detail)
        by_kind = [tuple(t for t, k in zip(times, order, strict=True) if k == kind) for kind in KINDS]
        return Burst(by_kind[0], by_kind[1], waited_us)

    def look(
        self, number: int, prepared: Prepared, places: Mapping[str, tuple[int, int, int]]
    ) -> tuple[str | None, dict[str, Array]]:
        """What the calls on a set changed without a right to, and parts of its outputs.

        `places` and the parts go by output: name → (axis, begin, end). Raises Fault.
        """
        placement = prepared.placement
        said = self.ask(child.CHECK, {"set": number, "parts": places}, _SETUP_S)
        inputs = _inputs(placement)
        (digests,) = self._digests([said.get("digests")], 1, len(inputs))
        guards = Buffer("", "guards", 0, 0, (sum(end - start for start, end in placement.gaps),), "uint8")
        parts = [guards, *(_part(b, *places[b.name]) for b in placement.buffers if b.name in places)]
        sizes = [math.prod(part.shape) * dtype_of(part.ctype).itemsize for part in parts]
        spots = np.cumsum([0, *(-(-size // ALIGN) * ALIGN for size in sizes)]).tolist()
        job = {"set": number, "places": {part.name: at for part, at in zip(parts, spots, strict=False)}}
        self.ask(child.FETCH, job, _SETUP_S)
        found = {
            part.name: self.arena.read(at, size).view(dtype_of(part.ctype)).reshape(part.shape)
            for part, at, size in zip(parts, spots, sizes, strict=False)
        }
        held = found.pop("")
        if digests != prepared.digests[number]:
            pairs = zip(inputs, digests, prepared.digests[number], strict=True)
            return f"input {next(b.name for b, now, then in pairs if now != then)} was changed", found
        return self.arena.strayed(placement, held), found

    def release(self) -> None:
        """Free all sets. Raises Fault."""
        self.ask(child.RELEASE, {}, _SETUP_S)

    def _digests(self, said: object, sets: int, inputs: int) -> list[list[str]]:
        """What was said, if it is so many sets' digests of so many inputs. Raises Fault."""
        if isinstance(said, list) and len(said) == sets:
            found = [digests for digests in said if isinstance(digests, list) and len(digests) == inputs]
            if len(found) == sets and all(isinstance(each, str) for digests in found for each in digests):
                return found
        self.close()
        raise Fault(Failure.FORGED, f"answered with digests {reprlib.repr(said)}")

    def host_cost_us(self, index: int, placement: Placement, repeat: int) -> float:
        """Time of one call among many on a placed case. Raises Fault."""
        job = {
            "object": index,
            "begin": placement.begin,
            "end": placement.end,
            "arguments": arguments(self._signatures[index], placement),
            "repeat": repeat,
            "rounds": 5,
        }
        ns = self._number(self.ask(child.HOST, job, _SETUP_S), "ns")
        if ns <= 0:
            self.close()
            raise Fault(Failure.FORGED, f"reported {ns:.4g} ns for a call")
        return ns / 1e3

    def copy_bytes_per_us(self) -> float:
        """Bandwidth of a copy within the GPU, reads and writes counted. Raises Fault."""
        return self._number(self.ask(child.COPY, {"bytes": 1 << 30, "rounds": 5}, _SETUP_S), "bytes_per_us")

    def finish(self, timeout_s: float) -> None:
        """Let the process end by itself, so that a tool it runs under can say its last word."""
        os.close(self._requests)
        self._requests = -1
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired, SandboxError):
                self._process.wait(timeout_s)

    # Frames

    def ask(self, operation: int, job: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send a request, wait for its report. Raises Fault."""
        data = json.dumps(job).encode()
        data += b" " * (-len(data) % 8)
        if operation not in _IN_TURN:
            return self._report(self._answered(operation, data, timeout_s))
        with self._usage.turns.turn(first=operation == child.SAMPLE):
            start = time.perf_counter()
            busy_us = 0.0
            try:
                size = self._answered(operation, data, timeout_s)
                self._waited_s = time.perf_counter() - start
                said = self._report(size)
                busy_us = self._number({"busy_us": 0.0, **said}, "busy_us")
            finally:
                self._usage.add(time.perf_counter() - start, busy_us / 1e6)
        return said

    def _answered(self, operation: int, data: bytes, timeout_s: float) -> int:
        """The reply's value. Raises Fault, and counts it when it may have hurt the device."""
        try:
            return self._ask(operation, 0, data, timeout_s)
        except (Fault, SandboxError):
            self._usage.fault()
            raise

    def _report(self, size: int) -> dict[str, Any]:
        """What lies behind a reply's value. Raises Fault when it is no report."""
        begin = self.arena.size - child.REPORT_BYTES
        try:
            if not 0 <= size <= child.REPORT_BYTES:
                raise ValueError(f"a report of {size} bytes")
            found = json.loads(self.arena.read(begin, size).tobytes())
            if not isinstance(found, dict):
                raise ValueError("a report that is no table")
        except (ValueError, RecursionError) as error:
            self.close()
            raise Fault(Failure.FORGED, f"answered with {error}") from error
        return found

    def _number(self, said: Mapping[str, Any], name: str) -> float:
        value = said.get(name)
        with suppress(OverflowError):  # an integer beyond every float
            if isinstance(value, int | float) and math.isfinite(value):
                return float(value)
        self.close()
        raise Fault(Failure.FORGED, f"answered with {name} = {reprlib.repr(value)}")

    def _refusal(self, status: int, value: int) -> Fault:
        if status != child.RAISED:
            return super()._refusal(status, value)
        error = self._report(value).get("error")
        if not isinstance(error, str):
            return Fault(Failure.FORGED, f"answered with an error of {reprlib.repr(error)}")
        return Fault(Failure.FAULT, " ".join(error.split())[:300])


def in_trouble(message: str) -> bool:
    """Whether a message of CUDA's speaks of the device. A candidate's launch code can give any message."""
    return any(word in message.lower() for word in _TROUBLE)


def _reap(process: Child) -> None:
    with suppress(SandboxError):
        process.wait()


def _inputs(placement: Placement) -> list[Buffer]:
    """Those that digests are made of, in their order."""
    return [buffer for buffer in placement.buffers if buffer.role == "input"]


def _part(buffer: Buffer, axis: int, begin: int, end: int) -> Buffer:
    """[begin, end) of an axis of an output; where it lies says nothing."""
    shape = (*buffer.shape[:axis], end - begin, *buffer.shape[axis + 1 :])
    return replace(buffer, shape=shape)


def arguments(signature: Sequence[DeviceParameter], placement: Placement) -> list[list[Any]]:
    """A call's arguments as the judge process makes tensors of them; see `_cuda_child.Server.tensors`."""
    buffers = {buffer.name: buffer for buffer in placement.buffers}
    sizes = {
        p.name: int.from_bytes(word, "little", signed=True)
        for p, word in zip(signature, placement.words, strict=True)
        if p.role == "size"
    }
    found: list[list[Any]] = []
    for parameter, word in zip(signature, placement.words, strict=True):
        buffer = buffers.get(parameter.name)
        if parameter.role == "size":
            found.append(["v", sizes[parameter.name]])
        elif parameter.role == "scalar":
            found.append(["v", float(np.frombuffer(word, np.float64)[0])])
        elif buffer is not None:
            found.append(["t", buffer.start, list(buffer.shape), buffer.ctype])
        elif parameter.absent is not None:
            assert int.from_bytes(word, "little") == NULL
            found.append(["e", [sizes.get(str(e), e) for e in parameter.absent], parameter.ctype])
        else:
            found.append(["v", None])
    return found
