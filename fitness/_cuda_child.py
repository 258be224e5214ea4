"""The disposable process that loads a candidate's objects and calls them on a GPU.

Runs as a script of its own inside the sandbox, `python -I -S _cuda_child.py SPEC`, with torch and tvm_ffi
from the directories that SPEC names. SPEC is JSON: {"arena": fd, "arena_bytes": n, "requests": fd,
"replies": fd, "paths": [site directories], "runtime": path of the DSL's runtime library}.

It starts in two steps, so that a spare one can stand ready: it imports torch, and on OPEN it makes its
context and touches everything that is slow the first time. No byte of a candidate is in it before LOAD.

Like the host's runner it knows no truth and decides nothing. A gate call mirrors the shared arena: what lies
there, guards included, is copied to the GPU at the same offsets, the kernel is called on it, everything is
copied back, and the parent looks. Timed problems are too large for that: their inputs are gathered here from
a small solved problem (PREPARE), and the parent fetches what it compares (FETCH).

The candidate's launch code runs in this process, so what it says is checked by the parent where it can be:
see `evotune.fitness.cuda_timing`.
"""

import ctypes
import gc
import hashlib
import json
import mmap
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from time import perf_counter_ns, thread_time_ns
from types import ModuleType
from typing import Any


def beside(path: str, name: str) -> ModuleType:
    """A script beside another, which is no package's module where it runs."""
    spec = spec_from_file_location(name, Path(path).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    found = module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


_wire = beside(__file__, "_runner_child")

REPORT_BYTES = 1 << 16
"""At the end of the arena: the JSON that goes with a reply whose value is its length."""

OPEN, LOAD, CALL, PREPARE, ARM, SAMPLE, CHECK, FETCH, RELEASE, HOST, COPY, APART = range(16, 28)
OK, RAISED = 0, 3
Job = dict[str, Any]
Report = dict[str, Any]

_SLEEP_CYCLES = 400_000  # 0.2 ms at 2 GHz: the host has issued a call before the GPU wakes up
_LONGEST_SLEEP_CYCLES = 20_000_000
_CYCLES_PER_US = 2000
_ROW_WORDS = 4096
_RAISES = (RuntimeError, TypeError, ValueError, AttributeError, MemoryError, OSError, LookupError)


class Cuda:
    """What this process needs of torch and CUDA; the tests put the processor in its place."""

    name = "cuda"

    def __init__(self, runtime: str) -> None:
        import torch
        import tvm_ffi

        self.torch: Any = torch
        self._ffi: Any = tvm_ffi
        self._runtime = runtime
        self._cycles = _SLEEP_CYCLES

    def open(self) -> Report:
        """Make the context and the harness's own stream, which waits for no other."""
        ctypes.CDLL(self._runtime, mode=ctypes.RTLD_GLOBAL)
        self.stream = self.torch.cuda.Stream()
        found = self.torch.cuda.get_device_properties(0)
        self._cold = self.torch.zeros(2 * found.L2_cache_size // 4, dtype=self.torch.int32, device="cuda")
        with self.on_stream():
            self.elapsed_us(self.chill)
            self._ffi.get_global_func("testing.echo")(self._cold)  # how tensors pass is found out once
        return {"device": found.name, "l2_bytes": found.L2_cache_size}

    def function(self, path: str, entry: str) -> Callable[..., object]:
        found: Callable[..., object] = self._ffi.load_module(path).get_function(entry)
        return found

    def on_stream(self) -> AbstractContextManager[Any]:
        """tvm-ffi gives kernels torch's current stream."""
        stream: AbstractContextManager[Any] = self.torch.cuda.stream(self.stream)
        return stream

    def synchronize(self) -> None:
        """Wait for the harness's stream alone."""
        self.stream.synchronize()

    def chill(self) -> None:
        """Read twice the L2's size: nothing of a problem is left in it, and nothing waits to be written."""
        self._cold.amax()

    def elapsed_us(self, work: Callable[[], object]) -> float:
        """Device time of `work`, which the host issues while the GPU sleeps."""
        start, stop = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.torch.cuda._sleep(self._cycles)
        start.record()
        work()
        stop.record()
        stop.synchronize()
        return float(start.elapsed_time(stop)) * 1e3

    def sleep_past(self, issue_us: float) -> None:
        """Let the GPU sleep for twice the time that issuing a call was seen to take."""
        cycles = int(2 * issue_us * _CYCLES_PER_US)
        self._cycles = max(_SLEEP_CYCLES, min(cycles, _LONGEST_SLEEP_CYCLES))

    def capture(self, work: Callable[[], object]) -> tuple[Callable[[], object], int]:
        """(replay, number of kernels) of a graph of `work`; its launches must be on the current stream."""
        graph = self.torch.cuda.CUDAGraph(keep_graph=True)
        graph.capture_begin(capture_error_mode="global")
        try:
            work()
        finally:
            graph.capture_end()
        kernels = _kernels(graph.raw_cuda_graph())
        graph.instantiate()
        return graph.replay, kernels


def _kernels(graph: int) -> int:
    """Kernel nodes of a cudaGraph_t, which is the driver's CUgraph."""
    driver = ctypes.CDLL("libcuda.so.1")
    handle, count = ctypes.c_void_p(graph), ctypes.c_size_t()
    if driver.cuGraphGetNodes(handle, None, ctypes.byref(count)):
        raise RuntimeError("cuGraphGetNodes failed")
    nodes = (ctypes.c_void_p * max(count.value, 1))()
    driver.cuGraphGetNodes(handle, nodes, ctypes.byref(count))
    found, kind = 0, ctypes.c_int()
    for node in nodes[: count.value]:
        driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind))
        found += kind.value == 0  # CU_GRAPH_NODE_TYPE_KERNEL
    return found


class _Set:
    """One prepared problem: its memory, arguments and, once armed, its graph."""

    def __init__(self, memory: Any, job: Job) -> None:
        self.memory = memory
        self.object = int(job["object"])
        self.given = job["arguments"]
        self.inputs: list[tuple[str, int, int]] = [tuple(item) for item in job["inputs"]]
        self.poisoned: list[tuple[int, int]] = [tuple(item) for item in job["poisoned"]]
        self.gaps: list[tuple[int, int]] = [tuple(item) for item in job["gaps"]]
        self.outputs: dict[str, tuple[int, list[int], str]] = {n: tuple(o) for n, o in job["outputs"].items()}
        self.digests: dict[str, str] = {}
        self.arguments: list[Any] = []
        self.replay: Callable[[], object] | None = None


class Server:
    """Answers requests; every operation takes and gives JSON."""

    def __init__(self, arena: mmap.mmap, device: Any) -> None:
        self.device = device
        self.torch = device.torch
        self.size = len(arena) - REPORT_BYTES
        self.host = self.torch.frombuffer(arena, dtype=self.torch.uint8)[: self.size]
        self.functions: list[Callable[..., object]] = []
        self.sets: dict[int, _Set] = {}
        self.operations: dict[int, Callable[[Job], Report]] = {
            OPEN: self.open,
            LOAD: self.load,
            CALL: self.call,
            APART: self.call_apart,
            PREPARE: self.prepare,
            ARM: self.arm,
            SAMPLE: self.sample,
            CHECK: self.check,
            FETCH: self.fetch,
            RELEASE: self.release,
            HOST: self.host_cost,
            COPY: self.copy_bandwidth,
        }

    def answer(self, operation: int, job: Job) -> tuple[int, Report]:
        try:
            with self.device.on_stream() if operation != OPEN else _nothing():
                return OK, self.operations[operation](job)
        except _RAISES as error:
            return RAISED, {"error": f"{type(error).__name__}: {error}"[:2000]}

    def open(self, job: Job) -> Report:
        facts: Report = self.device.open()
        self.mirror = self.torch.empty(self.size, dtype=self.torch.uint8, device=self.device.name)
        with self.device.on_stream():
            self.rehearse()
        return facts

    def rehearse(self) -> None:
        """Everything that a timed problem does, once: the first time costs CUDA the loading of its code."""
        memory = self.torch.zeros(1 << 16, dtype=self.torch.uint8, device=self.device.name)
        index = self.torch.arange(64, dtype=self.torch.int32, device=self.device.name)
        for dtype in ("bfloat16", "float32"):
            source, target = (self.view(memory, start, [64, 64], dtype) for start in (0, 1 << 15))
            self.torch.index_select(source, 1, index, out=target)
            target.mul_(source[0].to(target.dtype))
        self.digest(memory)
        memory.view(self.torch.int64).fill_(-1)
        self.device.chill()
        self.device.capture(lambda: memory.fill_(255))[0]()
        self.device.synchronize()

    def load(self, job: Job) -> Report:
        """Objects come through the arena; tvm_ffi wants a file that ends in .so."""
        for i, (at, size, entry) in enumerate(job["objects"]):
            path = f"{job['folder']}/evotune-{os.getpid()}-object{i}.so"
            with open(path, "wb") as file:
                file.write(bytes(self.host[at : at + size].numpy()))
            self.functions.append(self.device.function(path, entry))
        return {}

    def tensors(self, memory: Any, arguments: list[list[Any]]) -> list[Any]:
        """["t", first byte, shape, dtype] of `memory`, ["e", shape, dtype] an empty one, ["v", value]."""
        found: list[Any] = []
        for kind, *rest in arguments:
            if kind == "t":
                found.append(self.view(memory, *rest))
            elif kind == "e":
                shape, dtype = rest
                found.append(
                    self.torch.empty(shape, dtype=getattr(self.torch, dtype), device=self.device.name)
                )
            else:
                found.append(rest[0])
        return found

    def view(self, memory: Any, start: int, shape: list[int], dtype: str) -> Any:
        kind = getattr(self.torch, dtype)
        size = kind.itemsize
        for extent in shape:
            size *= extent
        return memory[start : start + size].view(kind).view(shape)

    def call(self, job: Job) -> Report:
        """Mirror bytes [begin, end) to the GPU, call, mirror them back; how long the call took, in ns."""
        part = slice(job["begin"], job["end"])
        self.mirror[part].copy_(self.host[part])
        arguments = self.tensors(self.mirror, job["arguments"])
        self.device.synchronize()
        start = perf_counter_ns()
        self.functions[job["object"]](*arguments)
        self.device.synchronize()
        ns = perf_counter_ns() - start
        self.host[part].copy_(self.mirror[part])
        return {"ns": ns}

    def call_apart(self, job: Job) -> Report:
        """As `call`, every buffer an allocation of its own, so that a memory checker knows its bounds."""
        part = slice(job["begin"], job["end"])
        self.mirror[part].copy_(self.host[part])
        arguments = self.tensors(self.mirror, job["arguments"])
        apart = [a.clone() if isinstance(a, self.torch.Tensor) else a for a in arguments]
        self.functions[job["object"]](*apart)
        self.device.synchronize()
        for inside, outside in zip(arguments, apart, strict=True):
            if isinstance(inside, self.torch.Tensor):
                inside.copy_(outside)
        self.host[part].copy_(self.mirror[part])
        return {"ns": 0}

    def prepare(self, job: Job) -> Report:
        """Lay out one timed problem in memory of its own and gather its inputs."""
        memory = self.torch.empty(job["bytes"], dtype=self.torch.uint8, device=self.device.name)
        made = _Set(memory, job)
        begin = 0
        at = job["guards"]
        guards = self.host[at : at + job["guard_bytes"]].to(self.device.name)
        for start, end in made.gaps:
            memory[start:end].copy_(guards[begin : begin + end - start])
            begin += end - start
        for build in job["builds"]:
            self.gather(memory, build)
        made.arguments = self.tensors(memory, made.given)
        made.digests = {name: self.digest(memory[s : s + n]) for name, s, n in made.inputs}
        self.sets[job["set"]] = made
        return {}

    def gather(self, memory: Any, build: Job) -> None:
        """rows[:, index] · factor of a source, or the source as it is, into one input."""
        source = self.view(self.host, build["source"], build["rows"], build["dtype"]).to(self.device.name)
        target = self.view(memory, build["start"], build["target"], build["dtype"])
        if build["index"] is None:
            target.copy_(source)
            return
        width = build["target"][1]
        index = self.view(self.host, build["index"], [width], "int32").to(self.device.name)
        self.torch.index_select(source, 1, index, out=target)
        if build["factor"] is not None:
            factor = self.view(self.host, build["factor"], [width], "float32").to(self.device.name)
            target.mul_(factor.to(target.dtype))

    def digest(self, part: Any) -> str:
        """Of device memory that is read whole; sums over rows and over columns, hashed."""
        words = part[: part.numel() // 4 * 4].view(self.torch.int32)
        whole = words.numel() // _ROW_WORDS * _ROW_WORDS
        table = words[:whole].view(-1, _ROW_WORDS)
        pieces = [
            table.sum(0, dtype=self.torch.int64).view(self.torch.uint8),
            table.sum(1, dtype=self.torch.int64).view(self.torch.uint8),
            words[whole:].view(self.torch.uint8),
            part[part.numel() // 4 * 4 :],
        ]
        return hashlib.sha256(bytes(self.torch.cat(pieces).cpu().numpy())).hexdigest()

    def poison(self, made: _Set) -> None:
        for start, size in made.poisoned:
            whole = size // 8 * 8
            made.memory[start : start + whole].view(self.torch.int64).fill_(-1)
            made.memory[start + whole : start + size].fill_(255)

    def arm(self, job: Job) -> Report:
        """Call twice to warm up, then capture one call in a graph and replay that once."""
        made = self.sets[job["set"]]
        function = self.functions[made.object]

        def work() -> None:
            function(*made.arguments)

        self.poison(made)
        work()
        self.device.synchronize()
        start = perf_counter_ns()
        work()
        issue_us = (perf_counter_ns() - start) / 1e3
        self.device.sleep_past(issue_us)
        self.device.synchronize()
        made.replay, kernels = self.device.capture(work)
        self.poison(made)
        usual_us = self.device.elapsed_us(made.replay)
        return {"kernels": kernels, "issue_us": issue_us, "us": usual_us}

    def sample(self, job: Job) -> Report:
        """Device time of the graph's replay and of a plain call, each from a cold L2 and poisoned outputs."""
        made = self.sets[job["set"]]
        function = self.functions[made.object]

        def plain() -> None:
            function(*made.arguments)

        times: Report = {}
        for name in job["order"]:
            self.poison(made)
            self.device.chill()
            times[name] = self.device.elapsed_us(plain if name == "plain" else made.replay)
        return times

    def check(self, job: Job) -> Report:
        """Names of inputs whose bits changed; the guards' bytes go to the arena for the parent."""
        made = self.sets[job["set"]]
        guards = self.torch.cat([made.memory[start:end] for start, end in made.gaps])
        self.host[job["at"] : job["at"] + guards.numel()].copy_(guards)
        changed = [
            n for n, s, size in made.inputs if self.digest(made.memory[s : s + size]) != made.digests[n]
        ]
        return {"changed": changed}

    def fetch(self, job: Job) -> Report:
        """Part of an output to the arena: [begin, end) of one axis, all of the others."""
        made = self.sets[job["set"]]
        found = self.view(made.memory, *made.outputs[job["name"]])
        part = found.narrow(job["axis"], job["begin"], job["end"] - job["begin"]).contiguous()
        flat = part.view(-1).view(self.torch.uint8)
        self.host[job["at"] : job["at"] + flat.numel()].copy_(flat)
        return {"bytes": flat.numel()}

    def release(self, job: Job) -> Report:
        """Free all prepared problems."""
        self.device.synchronize()
        self.sets.clear()
        gc.collect()
        return {}

    def host_cost(self, job: Job) -> Report:
        """Of one call in a row of many, least of all rounds: ns of wall and of this thread's CPU time."""
        part = slice(job["begin"], job["end"])
        self.mirror[part].copy_(self.host[part])
        arguments = self.tensors(self.mirror, job["arguments"])
        function, repeat = self.functions[job["object"]], job["repeat"]
        wall, cpu = [], []
        for _ in range(job["rounds"]):
            self.device.synchronize()
            start, start_cpu = perf_counter_ns(), thread_time_ns()
            for _ in range(repeat):
                function(*arguments)
            wall.append((perf_counter_ns() - start) / repeat)
            cpu.append((thread_time_ns() - start_cpu) / repeat)
        self.device.synchronize()
        return {"wall_ns": min(wall), "cpu_ns": min(cpu)}

    def copy_bandwidth(self, job: Job) -> Report:
        """Bytes per us of a copy within the device, read and written counted; the best of all rounds."""
        source, target = (
            self.torch.ones(job["bytes"], dtype=self.torch.uint8, device=self.device.name) for _ in range(2)
        )
        best_us = min(self.device.elapsed_us(lambda: target.copy_(source)) for _ in range(job["rounds"]))
        return {"bytes_per_us": 2 * job["bytes"] / best_us}


class _nothing(AbstractContextManager[None]):  # noqa: N801 - reads like contextlib's own
    def __exit__(self, *_: object) -> None:
        return None


def serve(make: Callable[[Job], Any]) -> None:
    """Reply 0: the process is up; reply 1: torch is imported; then one reply per request."""
    spec = json.loads(sys.argv[1])
    requests, replies = spec["requests"], spec["replies"]
    arena = mmap.mmap(spec["arena"], spec["arena_bytes"])
    os.close(spec["arena"])
    os.write(replies, _wire.REPLY.pack(0, OK, 0))
    sys.path += spec["paths"]
    server = Server(arena, make(spec))
    os.write(replies, _wire.REPLY.pack(1, OK, 0))
    while True:
        sequence, operation, _, count = _wire.REQUEST.unpack(_wire.read_exactly(requests, _wire.REQUEST.size))
        status, report = server.answer(operation, json.loads(_wire.read_exactly(requests, 8 * count)))
        data = json.dumps(report).encode()
        arena[server.size : server.size + len(data)] = data
        os.write(replies, _wire.REPLY.pack(sequence, status, len(data)))


if __name__ == "__main__":
    serve(lambda spec: Cuda(spec["runtime"]))
