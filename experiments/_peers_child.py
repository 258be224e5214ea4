"""One implementation of KDA on the GPU, or the truth, as a process that does what `bench_peers.py` says.

Requests are JSON lines on stdin; answers go, one line each, to the stdout the process was started with, which
is then given to stderr so that nothing that a library prints can be taken for an answer. An implementation
serves `prepare`, `select`, `arm`, `sample`, `host`, `finish`, in this order for each problem; the truth
serves `solve` and `compare`. Only a process that was asked has anything on the GPU.
"""

import json
import math
import os
import sys
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from importlib import import_module, metadata
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from evotune.fitness.cuda_link import share_runtime
from evotune.reference_kda import LOWER_BOUND, Problem, activate, recurrence
from evotune.search_space.template import Specialization

Tensor = Any
Outputs = tuple[Tensor, Tensor]
"""o [T, H, 128] (or [B, T / B, H, 128]) and the final state [N, H, V, K]."""

Call = Callable[[], Outputs]
DIM = 128
_NORM_EPSILON = 1e-6
_SLEEP_HZ = 2e9
_PLAIN_EVERY = 3
_HOST_CALLS = 30


class AbsentError(Exception):
    """An implementation whose package or device is not here."""


@dataclass(frozen=True)
class Case:
    """Sequences of `lengths` tokens, `heads` heads; `batch` when they are a rectangle [batch, length]."""

    name: str
    lengths: tuple[int, ...]
    heads: int
    batch: int | None

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def offsets(self) -> tuple[int, ...]:
        return tuple(sum(self.lengths[:n]) for n in range(len(self.lengths) + 1))

    @property
    def sampled(self) -> list[int]:
        """The heads that are compared with the truth."""
        return sorted({0, self.heads // 2, self.heads - 1})

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "Case":
        return cls(given["name"], tuple(given["lengths"]), given["heads"], given["batch"])


@dataclass(frozen=True)
class Arguments:
    """What a call is given, packed: q, k, v, g [T, H, 128], beta [T, H], state [N, H, V, K].

    Production: raw bfloat16 gate and beta logits with A_log [H], dt_bias [H, 128]. Plain: unit q and k, a
    float32 log decay, a float32 beta, and no A_log or dt_bias.
    """

    case: Case
    contract: str
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    A_log: Tensor | None
    dt_bias: Tensor | None
    initial_state: Tensor

    def tensors(self) -> dict[str, Tensor]:
        names = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
        return {name: x for name in names if (x := getattr(self, name)) is not None}

    def rectangle(self, x: Tensor) -> Tensor:
        """[T, …] as [batch, length, …], or as one packed row [1, T, …]."""
        return x.view(self.case.batch or 1, -1, *x.shape[1:])

    def offsets(self, dtype: Any, device: str | None = None) -> Tensor:
        """cu_seqlens [N + 1]."""
        import torch

        return torch.tensor(self.case.offsets, dtype=dtype, device=device or self.q.device)

    def checksum(self) -> int:
        """Equal for equal tensors, whatever process drew them."""
        import torch

        total = 0
        for x in self.tensors().values():
            bits = x.contiguous().view(torch.int16 if x.element_size() == 2 else torch.int32)
            total = zlib.crc32(str(int(bits.sum(dtype=torch.int64))).encode(), total)
        return total

    def some(self, heads: Sequence[int]) -> "Arguments":
        """The problem of these heads alone."""
        picked = {
            name: x[heads] if name in ("A_log", "dt_bias") else x[:, heads]
            for name, x in self.tensors().items()
        }
        return replace(self, **picked)


def draw(case: Case, contract: str, regime: str, seed: int, number: int, device: str) -> Arguments:
    """Problem `number` of a case and regime. Both contracts are drawn alike; plain is then activated."""
    import torch

    said = f"{case.name} {regime} {seed} {number}"
    generator = torch.Generator(device=device).manual_seed(zlib.crc32(said.encode()))

    def normal(*shape: int, factor: float = 1.0, shift: float = 0.0) -> Tensor:
        x = torch.randn(*shape, generator=generator, device=device)
        return (factor * x + shift).to(torch.bfloat16)

    T, H = case.tokens, case.heads
    q, k, v = (normal(T, H, DIM, factor=0.5) for _ in range(3))
    beta = normal(T, H, factor=0.5)
    factor, shift = {"strong": (1.0, 0.0), "weak": (0.5, -6.0), "zero": (0.5, -24.0), "mixed": (0.25, 0.0)}[
        regime
    ]
    g = normal(T, H, DIM, factor=factor, shift=shift)
    A_log, dt_bias = _gate_parameters(regime, torch.rand(H, DIM + 1, generator=generator, device=device))
    state = 0.25 * torch.randn(len(case.lengths), H, DIM, DIM, generator=generator, device=device)
    raw = Arguments(case, "production", q, k, v, g, beta, A_log, dt_bias, state)
    return raw if contract == "production" else _activated(raw)


def _gate_parameters(regime: str, uniform: Tensor) -> Outputs:
    """A_log [H] and dt_bias [H, 128] that with the raw gate of `draw` give the regime's decay.

    strong: a log decay of -3.2 a token in the mean. weak: -0.013. zero: above -1e-8. mixed: each head
    remembers 4 to 1e5 tokens, log-uniform.
    """
    import torch

    if regime == "strong":
        return uniform[:, 0].contiguous(), uniform[:, 1:].contiguous()
    zeros = torch.zeros_like(uniform)
    if regime != "mixed":
        return zeros[:, 0].contiguous(), zeros[:, 1:].contiguous()
    memory = 4.0 * (1e5 / 4.0) ** uniform[:, :1]
    part = (1.0 / memory / -LOWER_BOUND).clamp(max=0.99)
    bias = torch.log(part / (1.0 - part)) + zeros[:, 1:]
    return zeros[:, 0].contiguous(), bias.contiguous()


def _activated(raw: Arguments) -> Arguments:
    import torch

    def unit(x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt((wide * wide).sum(-1, keepdim=True) + _NORM_EPSILON)).to(x.dtype)

    assert raw.A_log is not None
    g = LOWER_BOUND * torch.sigmoid(raw.A_log.exp()[:, None] * (raw.g.float() + raw.dt_bias))
    return replace(
        raw,
        contract="plain",
        q=unit(raw.q),
        k=unit(raw.k),
        g=g,
        beta=torch.sigmoid(raw.beta.float()),
        A_log=None,
        dt_bias=None,
    )


class Truth:
    """The recurrence in float64 on sampled heads, for all regimes and contracts of a case in one pass."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._found: dict[tuple[str, str], Outputs] = {}

    def solve(
        self, case: Mapping[str, Any], regimes: Sequence[str], contracts: Sequence[str], seed: int
    ) -> dict[str, Any]:
        """Solve problem 0 of each regime and contract; checksums of its inputs by "regime contract"."""
        import torch

        this = Case.of(case)
        pairs = list(product(regimes, contracts))
        problems, checksums = [], {}
        for regime, contract in pairs:
            drawn = draw(this, contract, regime, seed, 0, self._device)
            checksums[f"{regime} {contract}"] = drawn.checksum()
            inputs = {**drawn.some(this.sampled).tensors(), "cu_seqlens": this.offsets}
            problems.append(activate(inputs, contract, DIM**-0.5, torch.float64, torch))
        found = recurrence(_side_by_side(problems), torch)
        each = len(this.sampled)
        split = zip(found.o.split(each, 1), found.final_state.split(each, 1), strict=True)
        self._found = dict(zip(pairs, split, strict=True))
        if self._device != "cpu":
            torch.cuda.empty_cache()
        return {"inputs": checksums}

    def compare(self, path: str, regime: str, contract: str) -> dict[str, float]:
        """Relative L2 errors of what is saved at `path`: of o, of the final state, of the worst head."""
        import torch

        got = torch.load(path, map_location=self._device, weights_only=True)
        Path(path).unlink()
        o, state = self._found[regime, contract]
        pairs = ((got["o"].double(), o), (got["state"].double(), state))
        heads = [_relative(x[:, h], y[:, h]) for x, y in pairs for h in range(x.shape[1])]
        return {"o": _relative(*pairs[0]), "state": _relative(*pairs[1]), "worst_head": max(heads)}


def _relative(x: Tensor, truth: Tensor) -> float:
    """Infinite when anything is not finite: a NaN compares with nothing."""
    error = float((x - truth).norm() / truth.norm())
    return error if math.isfinite(error) else math.inf


def _side_by_side(problems: Sequence[Problem]) -> Problem:
    """Problems of one packing as the heads of a single one."""
    import torch

    names = ("q", "k", "v", "g", "beta", "initial_state")
    joined = {name: torch.cat([getattr(p, name) for p in problems], 1) for name in names}
    return replace(problems[0], **joined)


class Peer(Protocol):
    """An implementation: which contracts it has, which variants of itself, and how one is called."""

    @property
    def contracts(self) -> Sequence[str]: ...

    @property
    def packages(self) -> Sequence[str]: ...

    def variants(self, contract: str) -> Sequence[str]: ...

    def bind(self, variant: str, given: Arguments) -> Call:
        """A call on these arguments. Whatever need be done once for them is done here."""
        ...


def _fresh_outputs(given: Arguments) -> Outputs:
    import torch

    return torch.full_like(given.v, math.nan), torch.full_like(given.initial_state, math.nan)


class Evotune:
    """Objects built from the Hopper templates: a directory with a manifest, per configuration a library."""

    contracts = ("production", "plain")
    packages = ("apache-tvm-ffi",)

    def __init__(self, directory: str, labels: Sequence[str]) -> None:
        import tvm_ffi

        folder = Path(directory).resolve()
        if not (folder / "manifest.json").is_file():
            raise AbsentError(f"{directory}: no manifest.json")
        entries = json.loads((folder / "manifest.json").read_text())
        self._entries = {
            e["label"]: e
            for e in entries
            if (e["K"], e["V"], e["debug"]) == (DIM, DIM, False) and (not labels or e["label"] in labels)
        }
        if unknown := set(labels) - set(self._entries):
            raise AbsentError(f"no such objects in {directory}: {', '.join(sorted(unknown))}")
        share_runtime()
        self._modules = {label: tvm_ffi.load_module(str(folder / f"{label}.so")) for label in self._entries}
        self._workspace: Tensor | None = None

    def variants(self, contract: str) -> Sequence[str]:
        return [label for label, entry in self._entries.items() if entry["contract"] == contract]

    def bind(self, variant: str, given: Arguments) -> Call:
        import torch

        entry = self._modules[variant].get_function("kda_forward")
        case, (o, state), cu = given.case, _fresh_outputs(given), given.offsets(torch.int32)
        work = self._poisoned(self._workspace_bytes(self._entries[variant], case))
        sizes = (len(case.lengths), case.tokens, case.heads, case.heads)
        inputs = (given.q, given.k, given.v, given.g, given.beta, given.A_log, given.dt_bias)

        def call() -> Outputs:
            entry(*inputs, given.initial_state, cu, o, state, work, *sizes, DIM**-0.5, LOWER_BOUND)
            return o, state

        return call

    def _workspace_bytes(self, entry: Mapping[str, Any], case: Case) -> int:
        name = entry.get("template", "kda_sm90_chunked")
        template = import_module(f"evotune.search_space.templates.{name}").TEMPLATE
        constants = (("K", DIM), ("V", DIM), ("contract", entry["contract"]))
        spec = Specialization("kda", "bfloat16", constants)
        knobs = template.knobs(**entry["knobs"])
        sizes = {"N": len(case.lengths), "T": case.tokens, "HV": case.heads}
        return int(template.workspace_bytes(knobs, spec, sizes))

    def _poisoned(self, size: int) -> Tensor:
        """One workspace for all variants, as a caller would keep one."""
        import torch

        if self._workspace is None or self._workspace.numel() < size:
            self._workspace = None
            self._workspace = torch.empty(size, dtype=torch.uint8, device="cuda")
        self._workspace.fill_(255)
        return self._workspace[:size]


class FlashKda:
    """`flash_kda.fwd`: gate and norm fused, the state bfloat16 inside.

    Wheels after 0.0.1.post20260729 misread torch 2.11's tensors.
    """

    contracts = ("production",)
    packages = ("tokenspeed-flashkda",)

    def __init__(self) -> None:
        self._forward = import_module("flash_kda").fwd

    def variants(self, contract: str) -> Sequence[str]:
        return ["fwd"]

    def bind(self, variant: str, given: Arguments) -> Call:
        import torch

        o, state = _fresh_outputs(given)
        q, k, v, g, beta, out = map(given.rectangle, (given.q, given.k, given.v, given.g, given.beta, o))
        cu = None if given.case.batch else given.offsets(torch.int64)
        options = {"A_log": given.A_log, "dt_bias": given.dt_bias, "lower_bound": LOWER_BOUND}
        options |= {"initial_state": given.initial_state, "final_state": state, "cu_seqlens": cu}

        def call() -> Outputs:
            self._forward(q, k, v, g, beta, DIM**-0.5, out, **options)
            return o, state

        return call


class Fla:
    """fla-core's `chunk_kda` in Triton. Autotunes for minutes."""

    contracts = ("production", "plain")
    packages = ("fla-core", "triton")

    def __init__(self) -> None:
        os.environ["FLA_FLASH_KDA"] = "0"  # it would time FlashKDA under fla's name where that is installed
        self._forward = import_module("fla.ops.kda").chunk_kda

    def variants(self, contract: str) -> Sequence[str]:
        return ["chunk_kda"]

    def bind(self, variant: str, given: Arguments) -> Call:
        import torch

        inputs = [given.rectangle(x) for x in (given.q, given.k, given.v, given.g, given.beta)]
        options: dict[str, Any] = {"safe_gate": True, "state_v_first": True, "output_final_state": True}
        if given.contract == "production":
            assert given.dt_bias is not None
            fused = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel")
            options |= dict.fromkeys(fused, True)
            options |= {"A_log": given.A_log, "dt_bias": given.dt_bias.view(-1), "lower_bound": LOWER_BOUND}
        if not given.case.batch:
            options["cu_seqlens"] = given.offsets(torch.int64)
            options["cu_seqlens_cpu"] = given.offsets(torch.int64, "cpu")

        def call() -> Outputs:
            o, state = self._forward(*inputs, scale=DIM**-0.5, initial_state=given.initial_state, **options)
            return o, state

        return call


class Cudnn:
    """cuDNN's operator with one of its plans; the CuTe-DSL plan fuses nothing, so it is plain alone."""

    packages = ("nvidia-cudnn-frontend", "nvidia-cudnn-cu13", "nvidia-cutlass-dsl")

    def __init__(self, plan: str, contracts: Sequence[str]) -> None:
        if plan == "kda_hopper":
            import_module("cutlass.cute")
        self._forward = import_module("cudnn.linear_attention").kimi_delta_attention
        self._plan, self.contracts = plan, contracts

    def variants(self, contract: str) -> Sequence[str]:
        return [self._plan]

    def bind(self, variant: str, given: Arguments) -> Call:
        import torch

        options: dict[str, Any] = {}
        if given.contract == "production":
            fused = ("use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel", "safe_gate")
            options |= dict.fromkeys(fused, True)
            options |= {"gate_lower_bound": LOWER_BOUND, "a_log": given.A_log, "dt_bias": given.dt_bias}
        inputs = (given.q, given.k, given.v, given.g, given.beta, given.offsets(torch.int32))

        def call() -> Outputs:
            o, state = self._forward(
                *inputs,
                scale=DIM**-0.5,
                initial_state=given.initial_state,
                output_final_state=True,
                plan_name=variant,
                **options,
            )[:2]
            return o, state

        return call


class CudnnDslDirect:
    """The CuTe-DSL kernel's own entry, without cuDNN's graph layer."""

    contracts = ("plain",)
    packages = Cudnn.packages

    def __init__(self) -> None:
        self._run = import_module("cudnn.linear_attention.hopper.kernel.kda_prefill_sm90").run

    def variants(self, contract: str) -> Sequence[str]:
        return ["run"]

    def bind(self, variant: str, given: Arguments) -> Call:
        import torch

        o, state = _fresh_outputs(given)
        inputs = (given.q, given.k, given.v, given.g, given.beta, given.offsets(torch.int32))

        def call() -> Outputs:
            self._run(*inputs, given.initial_state, o, state)
            return o, state

        return call


PEERS: Mapping[str, Callable[[Mapping[str, Any]], Peer]] = {
    "evotune": lambda given: Evotune(given["directory"], given["labels"]),
    "flashkda": lambda given: FlashKda(),
    "fla": lambda given: Fla(),
    "cudnn_cuda": lambda given: Cudnn("kda_hopper_cuda", ("production", "plain")),
    "cudnn_dsl": lambda given: Cudnn("kda_hopper", ("plain",)),
    "cudnn_dsl_direct": lambda given: CudnnDslDirect(),
}


class Clock:
    """Device time between two events, from a cold L2, while the host has already issued everything."""

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self.l2_bytes = int(torch.cuda.get_device_properties(0).L2_cache_size)
        self._other = torch.ones(2 * self.l2_bytes // 4, dtype=torch.int32, device="cuda")

    def us(self, work: Callable[[], object], poison: Callable[[], object], issue_us: float) -> float:
        """Poison, read twice the L2 of other data, and time `work`, which the host issues in `issue_us`."""
        first, last = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        poison()
        self._other.sum()
        self._torch.cuda._sleep(int((50 + 2 * issue_us) * _SLEEP_HZ / 1e6))
        first.record()
        work()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) * 1e3


@dataclass
class Bound:
    """A call on one set of arguments: its last outputs and, once captured, its graph."""

    call: Call
    outputs: Outputs | None
    graph: Any = None
    graph_outputs: Outputs | None = None

    def plain(self) -> None:
        self.outputs = self.call()

    def poison(self) -> None:
        """NaN into what a plain call will write; an operator that allocates most likely gets this memory."""
        outputs, self.outputs = self.outputs, None
        for x in outputs or ():
            x.fill_(math.nan)

    def poison_graph(self) -> None:
        for x in self.graph_outputs or ():
            x.fill_(math.nan)

    def last(self) -> Outputs:
        """What the last timed call of the kind that is reported left."""
        found = self.outputs if self.graph is None else self.graph_outputs
        assert found is not None
        return found


class Implementation:
    """Serves the requests for one peer on the GPU."""

    def __init__(self, name: str, given: Mapping[str, Any], folder: Path) -> None:
        import torch

        if not torch.cuda.is_available():
            raise AbsentError("no CUDA device")
        self._torch, self._name, self._folder = torch, name, folder
        self._stream = torch.cuda.Stream()
        self._clock = Clock()
        self._peer = PEERS[name](given)
        self._turn = self._saved = 0
        self._issue_us = 500.0
        self._bound: list[Bound] = []

    def on_stream(self) -> AbstractContextManager[Any]:
        return self._torch.cuda.stream(self._stream)  # type: ignore[no-any-return]

    def about(self) -> dict[str, Any]:
        found = {}
        for package in ("torch", *self._peer.packages):
            try:
                found[package] = metadata.version(package)
            except metadata.PackageNotFoundError:
                continue
        device = self._torch.cuda.get_device_properties(0)
        return {
            "versions": found,
            "device": device.name,
            "multiprocessors": device.multi_processor_count,
            "l2_bytes": self._clock.l2_bytes,
            "contracts": list(self._peer.contracts),
        }

    def prepare(self, case: Mapping[str, Any], contract: str, regime: str, seed: int) -> dict[str, Any]:
        """Draw the problems and call every variant once, from poisoned outputs, on the one that is judged."""
        self._release()
        self._what = (Case.of(case), contract, regime, seed)
        first = draw(*self._what, 0, "cuda")
        size = sum(x.numel() * x.element_size() for x in first.tensors().values())
        count = max(2, math.ceil(2 * self._clock.l2_bytes / size))
        self._sets = [first, *(draw(*self._what, n, "cuda") for n in range(1, count))]
        variants = {}
        for variant in self._peer.variants(contract):
            start = time.perf_counter()
            call = self._peer.bind(variant, first)
            outputs = call()
            self._torch.cuda.synchronize()
            variants[variant] = self._save(outputs) | {"first_s": time.perf_counter() - start}
        return {"inputs": first.checksum(), "sets": count, "variants": variants}

    def _save(self, outputs: Outputs) -> dict[str, Any]:
        """Sampled heads to a file for the truth's process; whether everything was written and is finite."""
        case = self._what[0]
        o, state = outputs
        o = o.reshape(case.tokens, case.heads, DIM)
        finite = bool(self._torch.isfinite(o).all()) and bool(self._torch.isfinite(state).all())
        path = self._folder / f"{self._name}-{self._saved}.pt"
        self._saved += 1
        self._torch.save({"o": o[:, case.sampled].clone(), "state": state[:, case.sampled].clone()}, path)
        return {"path": str(path), "finite": finite}

    def select(self, variants: Sequence[str], samples: int) -> dict[str, Any]:
        """Median us of each variant by turns on problems of another seed, which nothing else is timed on."""
        case, contract, regime, seed = self._what
        other = [draw(case, contract, regime, seed + 1_000_003, n, "cuda") for n in range(2)]
        bound = {name: [self._bind(name, given) for given in other] for name in variants}
        times: dict[str, list[float]] = {name: [] for name in variants}
        for turn in range(samples):
            for name in variants:
                this = bound[name][turn % 2]
                times[name].append(self._clock.us(this.plain, this.poison, self._issue_us))
        return {"us": {name: median(found) for name, found in times.items()}}

    def _bind(self, variant: str, given: Arguments) -> Bound:
        call = self._peer.bind(variant, given)
        return Bound(call, call())

    def arm(self, variant: str) -> dict[str, Any]:
        """Bind every problem to the variant, warm up, capture graphs; `graph` is why one was refused."""
        self._bound = [self._bind(variant, given) for given in self._sets]
        self._issue_us = self._host_us()
        for bound in self._bound:
            graph = self._torch.cuda.CUDAGraph()
            try:
                with self._torch.cuda.graph(graph, stream=self._stream):
                    bound.graph_outputs = bound.call()
            except RuntimeError as error:
                return {"graph": str(error).splitlines()[0]}
            bound.graph = graph
            graph.replay()
        self._torch.cuda.synchronize()
        return {"graph": None}

    def sample(self, count: int) -> dict[str, Any]:
        """`count` timed replays after one that is not counted, and every third time a plain call."""
        graphs, plains = [], []
        for number in range(count + 1):
            bound = self._bound[self._turn % len(self._bound)]
            self._turn += 1
            if bound.graph is not None:
                graphs.append(self._clock.us(bound.graph.replay, bound.poison_graph, 20.0))
            if number % _PLAIN_EVERY == 0 or bound.graph is None:
                plains.append(self._clock.us(bound.plain, bound.poison, self._issue_us))
        return {"graph_us": graphs[1:], "plain_us": plains if len(plains) == 1 else plains[1:]}

    def _host_us(self) -> float:
        """Median time for the host to issue a call; far fewer are issued than a stream's queue holds."""
        times = []
        self._torch.cuda.synchronize()
        for _ in range(_HOST_CALLS):
            start = time.perf_counter()
            self._bound[0].plain()
            times.append((time.perf_counter() - start) * 1e6)
        self._torch.cuda.synchronize()
        return median(times)

    def host(self) -> dict[str, Any]:
        return {"host_us": self._host_us()}

    def finish(self) -> dict[str, Any]:
        """The judged problem's outputs as the last timed call left them; then everything is let go."""
        saved = self._save(self._bound[0].last())
        self._release()
        return saved

    def _release(self) -> None:
        self._bound, self._sets = [], []
        self._turn = 0
        self._torch.cuda.synchronize()
        self._torch.cuda.empty_cache()


def _serve_implementation(name: str, given: Mapping[str, Any], answers: Any) -> None:
    import torch

    served = Implementation(name, given, Path(given["folder"]))
    with torch.inference_mode(), served.on_stream():
        _serve({name: getattr(served, name) for name in _SERVED}, answers, greeting=served.about())


_SERVED = ("prepare", "select", "arm", "sample", "host", "finish")


def _serve_truth(device: str, answers: Any) -> None:
    import torch

    truth = Truth(device)
    with torch.inference_mode():
        _serve({"solve": truth.solve, "compare": truth.compare}, answers, greeting={})


def _serve(
    served: Mapping[str, Callable[..., dict[str, Any]]], answers: Any, greeting: Mapping[str, Any]
) -> None:
    answers.write(json.dumps(greeting) + "\n")
    for line in sys.stdin:
        request = json.loads(line)
        answers.write(json.dumps(served[request.pop("do")](**request)) + "\n")


def main() -> None:
    """NAME JSON: serve implementation NAME, or "truth", until stdin ends; an error is the last answer."""
    name, given = sys.argv[1], json.loads(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    try:
        if name == "truth":
            _serve_truth(given["device"], answers)
        else:
            _serve_implementation(name, given, answers)
    except (AbsentError, ImportError) as error:
        answers.write(json.dumps({"absent": f"{type(error).__name__}: {error}"}) + "\n")
    except Exception as error:  # noqa: BLE001 - packages of others raise what they like; the parent restarts us
        lines = str(error).strip().splitlines() or [""]
        answers.write(json.dumps({"error": f"{type(error).__name__}: {lines[0][:300]}"}) + "\n")


if __name__ == "__main__":
    main()
