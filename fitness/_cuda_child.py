"""The disposable process that loads a candidate's objects and calls them on a GPU.

Runs as a script of its own inside the sandbox, `python -I -S _cuda_child.py SPEC`, with torch and tvm_ffi
from the directories that SPEC names. SPEC is JSON: {"arena": fd, "arena_bytes": n, "requests": fd,
"replies": fd, "paths": [site directories], "runtime": path of the DSL's runtime library}.

It starts in two steps, so that a spare one can stand ready: it imports torch, and on OPEN it makes its
context and touches everything that is slow the first time. No byte of a candidate is in it before LOAD.

Like the host's runner it knows no truth and decides nothing. A gate call mirrors the shared arena: what lies
there, guards included, is copied to the GPU at the same offsets (BRING), the kernel is called on it (CALL),
everything is copied back (TAKE), and the parent looks. Timed problems are too large for that: their inputs
are gathered here from a small solved problem (PREPARE, FILL), and the parent fetches what it compares
(FETCH).

Other judge processes share the GPU. BRING, TAKE, PREPARE and FETCH copy and start no kernel, so that they
may run while another's calls are timed; for what starts kernels the parent gives each process a turn of its
own. Each report of such an operation says how long the GPU was at work for it, by events: "busy_us".

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
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from time import perf_counter_ns
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

MIRROR_BYTES = 64 << 20
"""Of the arena that calls are mirrored from, at first: the gate's cases seldom take more."""

OPEN, LOAD, GROW, BRING, CALL, TAKE, APART = range(16, 23)
PREPARE, FILL, ARM, SAMPLE, CHECK, FETCH, RELEASE, HOST, COPY = range(23, 32)
OK, RAISED = 0, 3
Job = dict[str, Any]
Report = dict[str, Any]

_CYCLES_PER_US = 2000
_ROW_WORDS = 4096
_FEW = 16  # up to so many columns torch's index_select takes 30 ms for 32,768 rows (2.11, H200)
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

    def open(self) -> Report:
        """Make the context and the harness's own stream, which waits for no other."""
        ctypes.CDLL(self._runtime, mode=ctypes.RTLD_GLOBAL)
        self.stream = self.torch.cuda.Stream()
        found = self.torch.cuda.get_device_properties(0)
        self._cold = self.torch.zeros(2 * found.L2_cache_size // 4, dtype=self.torch.int32, device="cuda")
        with self.on_stream():
            self.chill()
            self.sleep(1.0)
            self._ffi.get_global_func("testing.echo")(self._cold)  # how tensors pass is found out once
        return {
            "device": found.name,
            "l2_bytes": found.L2_cache_size,
            "memory_bytes": found.total_memory,
        }

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

    def sleep(self, us: float) -> None:
        """Let the GPU wait, so that the host issues a call before it begins."""
        self.torch.cuda._sleep(int(us * _CYCLES_PER_US))

    def mark(self) -> Any:
        """A point in the stream's time."""
        event = self.torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between_us(self, start: Any, stop: Any) -> float:
        """From one mark to another; both must have been reached."""
        return float(start.elapsed_time(stop)) * 1e3

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

    def __init__(self, job: Job, guards: Any, builds: list[Job]) -> None:
        self.size = int(job["bytes"])
        self.given: list[list[Any]] = job["arguments"]
        self.memory: Any = None
        self.object = int(job["object"])
        self.inputs: list[tuple[int, int]] = [tuple(item) for item in job["inputs"]]
        self.poisoned: list[tuple[int, int]] = [tuple(item) for item in job["poisoned"]]
        self.gaps: list[tuple[int, int]] = [tuple(item) for item in job["gaps"]]
        self.outputs: dict[str, tuple[int, list[int], str]] = {n: tuple(o) for n, o in job["outputs"].items()}
        self.guards = guards
        self.builds = builds
        self.arguments: list[Any] = []
        self.replay: Callable[[], object] | None = None
        self.takes: int | None = None
        self.kept: dict[str, Any] = {}


class Server:
    """Answers requests; every operation takes and gives JSON."""

    def __init__(self, arena: mmap.mmap, device: Any) -> None:
        self.device = device
        self.torch = device.torch
        self.size = len(arena) - REPORT_BYTES
        self.host = self.torch.frombuffer(arena, dtype=self.torch.uint8)[: self.size]
        self.functions: list[Callable[..., object]] = []
        self.sets: dict[int, _Set] = {}
        self.brought: tuple[slice, list[Any]] = slice(0), []
        self.spans: list[tuple[Any, Any]] = []
        self.operations: dict[int, Callable[[Job], Report]] = {
            OPEN: self.open,
            LOAD: self.load,
            GROW: self.grow,
            BRING: self.bring,
            CALL: self.call,
            TAKE: self.take,
            APART: self.call_apart,
            PREPARE: self.prepare,
            FILL: self.fill,
            ARM: self.arm,
            SAMPLE: self.sample,
            CHECK: self.check,
            FETCH: self.fetch,
            RELEASE: self.release,
            HOST: self.host_cost,
            COPY: self.copy_bandwidth,
        }

    def answer(self, operation: int, job: Job) -> tuple[int, Report]:
        self.spans = []
        try:
            with self.device.on_stream() if operation != OPEN else _nothing():
                report = self.operations[operation](job)
                if self.spans:
                    self.device.synchronize()
                    report["busy_us"] = sum(self.device.between_us(*span) for span in self.spans)
                return OK, report
        except _RAISES as error:
            return RAISED, {"error": f"{type(error).__name__}: {error}"[:2000]}

    @contextmanager
    def working(self) -> Iterator[None]:
        """Count the time of what is launched inside as the GPU's work."""
        start = self.device.mark()
        yield
        self.spans.append((start, self.device.mark()))

    def open(self, job: Job) -> Report:
        facts: Report = self.device.open()
        self.mirror = self.bytes_on_device(min(self.size, MIRROR_BYTES))
        with self.device.on_stream():
            self.rehearse()
        # All that torch imported is never looked through again: one collection of it takes 0.1 s.
        gc.collect()
        gc.freeze()
        return facts

    def rehearse(self) -> None:
        """Everything that a timed problem does, once: the first time costs CUDA the loading of its code."""
        memory = self.torch.zeros(1 << 16, dtype=self.torch.uint8, device=self.device.name)
        index = self.torch.arange(64, dtype=self.torch.int32, device=self.device.name)
        for dtype in ("bfloat16", "float32"):
            source, target = (self.view(memory, start, [64, 64], dtype) for start in (0, 1 << 15))
            self.torch.index_select(source, 1, index, out=target)
            target.copy_(source[:, index])
            target.mul_(source[0].to(target.dtype))
            target.narrow(1, 0, 32).contiguous()
        self.sums(memory).cpu()
        self.fill_with_nan(memory, 8, 1 << 15)
        self.device.chill()
        replay, _ = self.device.capture(lambda: memory.fill_(255))
        start = self.device.mark()
        replay()
        stop = self.device.mark()
        self.device.synchronize()
        self.device.between_us(start, stop)

    def load(self, job: Job) -> Report:
        """Objects come through the arena; tvm_ffi wants a file that ends in .so."""
        for i, (at, size, entry) in enumerate(job["objects"]):
            path = f"{job['folder']}/evotune-{os.getpid()}-object{i}.so"
            with open(path, "wb") as file:
                file.write(bytes(self.host[at : at + size].numpy()))
            self.functions.append(self.device.function(path, entry))
        return {}

    def bytes_on_device(self, size: int) -> Any:
        return self.torch.empty(size, dtype=self.torch.uint8, device=self.device.name)

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

    def mirrored(self, job: Job) -> tuple[slice, list[Any]]:
        """Copy bytes [begin, end) of the arena to the same place on the GPU; they, and a call's arguments."""
        if self.mirror.numel() < job["end"]:
            self.grow({"bytes": job["end"]})
        part = slice(job["begin"], job["end"])
        self.mirror[part].copy_(self.host[part])
        return part, self.tensors(self.mirror, job["arguments"])

    def grow(self, job: Job) -> Report:
        """A mirror of so many bytes; to allocate them disturbs what is timed meanwhile."""
        self.mirror = self.bytes_on_device(min(self.size, job["bytes"]))
        return {}

    def bring(self, job: Job) -> Report:
        """Mirror bytes [begin, end) to the GPU for a call. No kernel."""
        self.brought = self.mirrored(job)
        return {}

    def call(self, job: Job) -> Report:
        """Call on what was brought; how long that took, in ns."""
        _, arguments = self.brought
        self.device.synchronize()
        start = perf_counter_ns()
        with self.working():
            self.functions[job["object"]](*arguments)
        self.device.synchronize()
        return {"ns": perf_counter_ns() - start}

    def take(self, job: Job) -> Report:
        """Mirror what was brought back to the arena. No kernel."""
        part, _ = self.brought
        self.host[part].copy_(self.mirror[part])
        return {}

    def call_apart(self, job: Job) -> Report:
        """All three at once, each buffer an allocation of its own: a memory checker knows its bounds."""
        part, arguments = self.mirrored(job)
        apart = [a.clone() if isinstance(a, self.torch.Tensor) else a for a in arguments]
        self.functions[job["object"]](*apart)
        self.device.synchronize()
        for inside, outside in zip(arguments, apart, strict=True):
            if isinstance(inside, self.torch.Tensor):
                inside.copy_(outside)
        self.host[part].copy_(self.mirror[part])
        return {"ns": 0}

    def prepare(self, job: Job) -> Report:
        """Bring what the inputs of some problems of one workload are gathered from to the GPU. No kernel.

        The problems share their sources.
        """
        uploaded: dict[int, Any] = {}

        def upload(at: int | None, shape: list[int], dtype: str) -> Any:
            if at is not None and at not in uploaded:
                uploaded[at] = self.view(self.host, at, shape, dtype).to(self.device.name, copy=True)
            return None if at is None else uploaded[at]

        guards = upload(job["guards"], [job["guard_bytes"]], "uint8")
        for number, builds in job["sets"]:
            for build in builds:
                width = [build["target"][-1]]
                build["source"] = upload(build["source"], build["rows"], build["dtype"])
                build["index"] = upload(build["index"], width, "int32")
                build["factor"] = upload(build["factor"], width, "float32")
            self.sets[number] = _Set(job, guards, builds)
            self.sets[number].takes = job.get("takes")
        return {}

    def fill(self, job: Job) -> Report:
        """Give prepared problems memory, write guards and gather inputs; digests of the inputs.

        One that takes another's place gets its memory as it is, and with it the graph of the call on it.
        """
        digests = []
        for number in job["sets"]:
            made, begin = self.sets[number], 0
            if made.takes is None:
                made.memory = self.bytes_on_device(made.size)
                made.arguments = self.tensors(made.memory, made.given)
            else:
                before = self.sets[made.takes]
                made.memory, made.arguments, made.replay = before.memory, before.arguments, before.replay
                self.sets[made.takes] = self.sets.pop(number)
            with self.working():
                for start, end in made.gaps:
                    made.memory[start:end].copy_(made.guards[begin : begin + end - start])
                    begin += end - start
                for build in made.builds:
                    self.gather(made.memory, build)
            made.guards, made.builds = None, []
            digests.append(self.digests(made))
        return {"digests": digests}

    def gather(self, memory: Any, build: Job) -> None:
        """rows[:, index] · factor of a source, or the source as it is, into one input."""
        target = self.view(memory, build["start"], build["target"], build["dtype"])
        if build["index"] is None:
            target.copy_(build["source"])
            return
        if len(build["index"]) > _FEW:
            self.torch.index_select(build["source"], 1, build["index"], out=target)
        else:
            target.copy_(build["source"][:, build["index"]])
        if build["factor"] is not None:
            target.mul_(build["factor"].to(target.dtype))

    def digests(self, made: _Set) -> list[str]:
        """Of each input as it lies in device memory, which is read whole."""
        with self.working():
            sums = [self.sums(made.memory[start : start + size]) for start, size in made.inputs]
        return [hashlib.sha256(bytes(found.cpu().numpy())).hexdigest() for found in sums]

    def sums(self, part: Any) -> Any:
        """Over rows and over columns of 32-bit words, and what is left over."""
        words = part[: part.numel() // 4 * 4].view(self.torch.int32)
        whole = words.numel() // _ROW_WORDS * _ROW_WORDS
        table = words[:whole].view(-1, _ROW_WORDS)
        pieces = [
            table.sum(0, dtype=self.torch.int64).view(self.torch.uint8),
            table.sum(1, dtype=self.torch.int64).view(self.torch.uint8),
            words[whole:].view(self.torch.uint8),
            part[part.numel() // 4 * 4 :],
        ]
        return self.torch.cat(pieces)

    def poison(self, made: _Set) -> None:
        for start, size in made.poisoned:
            self.fill_with_nan(made.memory, start, size)

    def fill_with_nan(self, memory: Any, start: int, size: int) -> None:
        """All bits set; `start` is a multiple of eight."""
        whole = size // 8 * 8
        memory[start : start + whole].view(self.torch.int64).fill_(-1)
        if whole < size:
            memory[start + whole : start + size].fill_(255)

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
        self.device.synchronize()
        made.replay, kernels = self.device.capture(work)
        with self.working():
            self.poison(made)
        self.device.sleep(job["sleep_us"])
        with self.working():
            made.replay()
        self.device.synchronize()
        return {"kernels": kernels, "issue_us": issue_us, "us": self.device.between_us(*self.spans[-1])}

    def sample(self, job: Job) -> Report:
        """Device time of replays and of plain calls in the order asked for, each from a cold L2 and poisoned
        outputs. The host issues them all without waiting, so that the GPU goes from one to the next."""
        made = self.sets[job["set"]]
        function, replay = self.functions[made.object], made.replay
        if replay is None:
            raise ValueError("a problem that was never captured")
        calls = []
        for name in job["order"]:
            with self.working():
                self.poison(made)
                self.device.chill()
            self.device.sleep(job["sleep_us"])
            with self.working():
                if name == "plain":
                    function(*made.arguments)
                else:
                    replay()
            calls.append(self.spans[-1])
        self.device.synchronize()
        return {"us": [self.device.between_us(*call) for call in calls]}

    def check(self, job: Job) -> Report:
        """Digests of a problem's inputs; keeps guards and [begin, end) of an axis of outputs for `fetch`."""
        made = self.sets[job["set"]]
        with self.working():
            made.kept = {"": self.torch.cat([made.memory[start:end] for start, end in made.gaps])}
            for name, (axis, begin, end) in job["parts"].items():
                found = self.view(made.memory, *made.outputs[name])
                made.kept[name] = found.narrow(axis, begin, end - begin).contiguous()
        return {"digests": self.digests(made)}

    def fetch(self, job: Job) -> Report:
        """What `check` kept, to where it belongs in the arena; "" stands for the guards. No kernel."""
        made = self.sets[job["set"]]
        for name, at in job["places"].items():
            flat = made.kept[name].view(-1).view(self.torch.uint8)
            self.host[at : at + flat.numel()].copy_(flat)
        made.kept = {}
        return {}

    def release(self, job: Job) -> Report:
        """Free all prepared problems."""
        self.device.synchronize()
        self.sets.clear()
        return {}

    def host_cost(self, job: Job) -> Report:
        """Of one call in a row of many, in ns; the least of all rounds."""
        _, arguments = self.mirrored(job)
        function, repeat = self.functions[job["object"]], job["repeat"]
        rounds = []
        for _ in range(job["rounds"]):
            self.device.synchronize()
            start = perf_counter_ns()
            for _ in range(repeat):
                function(*arguments)
            rounds.append((perf_counter_ns() - start) / repeat)
        self.device.synchronize()
        return {"ns": min(rounds)}

    def copy_bandwidth(self, job: Job) -> Report:
        """Bytes per us of a copy within the device, read and written counted; the best of all rounds."""
        source, target = (self.bytes_on_device(job["bytes"]).fill_(1) for _ in range(2))
        for _ in range(job["rounds"]):
            with self.working():
                target.copy_(source)
        self.device.synchronize()
        best_us = min(self.device.between_us(*span) for span in self.spans)
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
