"""A problem of more than 2³¹ elements in every tensor, from a small one whose truth is known.

All pairs of heads hold the same numbers, so that each pair must answer as a call with that pair alone does,
whose offsets fit in 32 bits; that answer is compared with float64 arithmetic on the GPU.
"""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from evotune.reference_kda.chunked import Form, chunked
from evotune.reference_kda.problem import LOWER_BOUND, Problem, Result, activate
from evotune.reference_kda.recurrent import recurrence
from evotune.reference_kda.workload import Workload
from evotune.search_space.template import Specialization
from tests.search_space.kda_calls import same, wait
from tests.search_space.kda_families import RANDOM_LIMIT
from tests.search_space.kda_objects import Kernel
from tests.search_space.kda_table import Finding
from tests.search_space.kda_uses import NAMES, Use

TOKENS, HEADS, PAIR = 262_160, 64, 2
_SLICE = 16_384  # tokens compared at a time
_EXACT = Form(chunk=16, block=16, anchor="before")


class Wide:
    """Inputs, and the truth of one pair of heads."""

    def __init__(
        self, spec: Specialization, tokens: int = TOKENS, heads: int = HEADS, device: str = "cuda"
    ) -> None:
        self.workload = Workload(
            "wide",
            "gate",
            (tokens,),
            heads=PAIR,
            value_heads=PAIR,
            K=spec.integer("K"),
            V=spec.integer("V"),
            dtype=spec.dtype,
            contract=str(spec["contract"]),
            initial_state=True,
        )
        self._copies = heads // PAIR
        self.narrow = drawn(self.workload, 3, device)
        self.truth = solved_on_gpu(self.workload, self.narrow)
        self._wide = {name: self._copied(name, x) for name, x in self.narrow.items()}

    def _copied(self, name: str, x: Tensor) -> Tensor:
        if name == "cu_seqlens":
            return x
        axis = 0 if name in ("A_log", "dt_bias") else 1
        repeats = [1] * x.dim()
        repeats[axis] = self._copies
        return x.repeat(repeats)

    @property
    def use(self) -> Use:
        name = f"{self.workload.tokens:,} tokens of {self._copies * PAIR} heads"
        return Use("9 index width", name, self.ask, ("fla#1080", "vllm#51039"))

    def ask(self, kernel: Kernel) -> Finding:
        narrow = called(kernel, self.workload, self.narrow, 1)
        relative = max(_relative(narrow[name], getattr(self.truth, name)) for name in ("o", "final_state"))
        failure = "" if relative <= RANDOM_LIMIT else f"relative error {relative:.4f} above {RANDOM_LIMIT}"
        wide = called(kernel, self.workload, self._wide, self._copies)
        return Finding(failure or self._difference(narrow, wide), 0.0, relative)

    def _difference(self, narrow: dict[str, Tensor], wide: dict[str, Tensor]) -> str:
        for first in range(0, len(narrow["o"]), _SLICE):
            rows = slice(first, first + _SLICE)
            if not same(narrow["o"][rows].repeat(1, self._copies, 1), wide["o"][rows]):
                return f"o differs from that of two heads alone in tokens from {first} on"
        if not same(narrow["final_state"].repeat(1, self._copies, 1, 1), wide["final_state"]):
            return "the final state differs from that of two heads alone"
        return ""


def drawn(w: Workload, seed: int, device: str) -> dict[str, Tensor]:
    """Inputs drawn where they are used: unit keys in the plain contract, log decays of −0.026 to 0."""
    rng = torch.Generator(device).manual_seed(seed)
    T, io = w.tokens, getattr(torch, w.dtype)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng, device=device)

    production = w.contract == "production"
    q, k = normal(T, w.heads, w.K), normal(T, w.heads, w.K)
    decay = 0.026 * torch.rand(T, w.value_heads, w.K, generator=rng, device=device)
    beta = torch.rand(T, w.value_heads, generator=rng, device=device)
    found = {
        "q": (q if production else q / q.norm(dim=-1, keepdim=True)).to(io),
        "k": (k if production else k / k.norm(dim=-1, keepdim=True)).to(io),
        "v": normal(T, w.value_heads, w.V).to(io),
        "g": torch.logit(-decay / LOWER_BOUND, 1e-6).to(io) if production else -decay,
        "beta": torch.logit(beta, 1e-6).to(io) if production else beta,
        "initial_state": normal(len(w.lengths), w.value_heads, w.V, w.K) / 4,
        "cu_seqlens": torch.tensor(w.cu_seqlens, dtype=torch.int32, device=device),
    }
    if production:
        found["A_log"] = torch.zeros(w.value_heads, device=device)
        found["dt_bias"] = torch.zeros(w.value_heads, w.K, device=device)
    return found


def solved_on_gpu(w: Workload, inputs: dict[str, Tensor]) -> Result:
    """In float64, where the inputs are; the recurrence would take a launch for every token."""
    return chunked(problem(w, inputs), _EXACT, torch)


def disagreement(spec: Specialization, device: str, tokens: int = 1000) -> float:
    """Largest difference between the form above on a device and the recurrence on the processor, relative."""
    wide = Wide(spec, tokens, PAIR, device)
    here = {name: x.cpu() for name, x in wide.narrow.items()}
    exact = recurrence(problem(wide.workload, here), torch)
    pairs = ((wide.truth.o, exact.o), (wide.truth.final_state, exact.final_state))
    return max(float((a.cpu() - b).abs().max() / b.abs().max()) for a, b in pairs)


def problem(w: Workload, inputs: dict[str, Tensor]) -> Problem:
    return activate(
        {**inputs, "cu_seqlens": np.asarray(w.cu_seqlens)}, w.contract, w.scale, torch.float64, torch
    )


def called(
    kernel: Kernel, w: Workload, inputs: dict[str, Tensor], copies: int, *, poison: bool = True
) -> dict[str, Tensor]:
    """Outputs, which start as NaN or as nothing; `copies` times the workload's heads."""
    w = replace(w, heads=w.heads * copies, value_heads=w.value_heads * copies)
    N, HV, device = len(w.lengths), w.value_heads, inputs["q"].device
    sizes = {"N": N, "T": w.tokens, "H": w.heads, "HV": HV}
    shapes = {
        "o": ((w.tokens, HV, w.V), getattr(torch, w.dtype)),
        "final_state": ((N, HV, w.V, w.K), torch.float32),
        "workspace": ((kernel.configuration.workspace_bytes(sizes),), torch.uint8),
    }
    made = {n: torch.empty(shape, dtype=dtype, device=device) for n, (shape, dtype) in shapes.items()}
    if poison:
        for tensor in made.values():
            tensor.view(-1).view(torch.uint8).fill_(255)
    tensors = {**inputs, **made}
    kernel.function(*(tensors.get(name) for name in NAMES), *sizes.values(), w.scale, LOWER_BOUND)
    wait("cuda" if device.type == "cuda" else "cpu")
    return made


def _relative(answer: Tensor, truth: Tensor) -> float:
    apart = answer.double() - truth
    value = float(apart.norm() / truth.norm())
    return value if np.isfinite(value) else float("inf")
