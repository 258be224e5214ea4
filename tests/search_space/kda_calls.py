"""Calls of a kernel on torch tensors, every buffer between guard bands, and the answers judged on the device.

One call's arguments lie in two stretches of memory: what the kernel reads, and what it may write (outputs and
workspace, poisoned before every call). 64 KiB of guard lie before, between and behind the buffers; they hold
NaN bit patterns or 1e30, so that a read outside shows in the outputs and a write outside in the guards.

Truths and bounds are those of `reference_kda`, computed on the processor; only the comparison is done where
the answers are.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evotune.reference_kda.case import KdaCase, Question
from evotune.reference_kda.namespace import DTYPES
from evotune.reference_kda.operator import KDA
from evotune.reference_kda.tolerance import CHUNK, ROWS
from tests.search_space.kda_objects import Kernel

GUARD_BYTES = 64 << 10
ALIGNMENT_BYTES = 1024
NAN, HUGE, ZERO = -1, 0x7149F2CA7149F2CA, 0
"""Words of poison: NaN in bfloat16 and float32; 1e30 in float32, ±1e30 in bfloat16; zeros."""

HANG_S = 20.0


class Hang(RuntimeError):
    """A kernel did not end; the device is lost to this process."""


class Memory:
    """Named buffers in one stretch of device memory, guards round each."""

    def __init__(
        self, shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]], device: str, word: int
    ) -> None:
        self.word = word
        self._places: dict[str, tuple[int, int, tuple[int, ...], torch.dtype]] = {}
        self._gaps: list[tuple[int, int]] = []
        end = 0
        for name, (shape, dtype) in shapes.items():
            start = -(-(end + GUARD_BYTES) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            self._gaps.append((end, start))
            size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
            self._places[name] = (start, size, shape, dtype)
            end = start + size
        total = -(-(end + GUARD_BYTES) // 8) * 8
        self._gaps.append((end, total))
        self.flat = torch.empty(total, dtype=torch.uint8, device=device)
        self.poison()

    def poison(self) -> None:
        self.flat.view(torch.int64).fill_(self.word)

    def __getitem__(self, name: str) -> Tensor:
        start, size, shape, dtype = self._places[name]
        return self.flat[start : start + size].view(dtype).view(shape)

    def __contains__(self, name: str) -> bool:
        return name in self._places

    @property
    def strayed(self) -> Tensor:
        """Whether a guard was written to, a scalar on the device; for buffers of whole words."""
        words = self.flat.view(torch.int64)
        gaps = torch.cat([words[-(-start // 8) : end // 8] for start, end in self._gaps])
        return (gaps != self.word).any()


def as_tensor(array: Any, device: str) -> Tensor:
    """A numpy array of the oracle as a tensor of the same bits."""
    array = np.ascontiguousarray(array)
    if array.dtype == DTYPES["bfloat16"]:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).to(device)
    return torch.from_numpy(array).to(device)


class Arguments:
    """A question on the device, in memory with guards; `values` may be changed in place between calls."""

    def __init__(self, question: Question, device: str, word: int = NAN) -> None:
        self.question = question
        self.device = device
        w = question.workload
        arrays = {name: array for name, array in question.inputs.items() if array is not None}
        arrays["cu_seqlens"] = arrays["cu_seqlens"].astype(np.int32)
        tensors = {name: as_tensor(array, "cpu") for name, array in arrays.items()}
        self.values = Memory({n: (tuple(t.shape), t.dtype) for n, t in tensors.items()}, device, word)
        for name, tensor in tensors.items():
            self.values[name].copy_(tensor)
        self._given = self.values.flat.clone()
        self.sizes = dict(question.sizes)
        self.scalars = dict(question.scalars)
        self.state_shape = (len(w.lengths), w.value_heads, w.V, w.K)
        self.o_shape = (w.tokens, w.value_heads, w.V)
        self.io: torch.dtype = getattr(torch, w.dtype)

    def refill(self, question: Question) -> None:
        """Other values of the same shapes, in place."""
        for name, array in question.inputs.items():
            if array is not None:
                self.values[name].copy_(as_tensor(array, "cpu"))
        self._given = self.values.flat.clone()

    @property
    def changed(self) -> Tensor:
        """Whether inputs or the guards round them are not as they were given, a scalar on the device."""
        return (self.values.flat != self._given).any()

    def outputs(self, kernel: Kernel, *, final_state: bool = True, word: int = NAN) -> Memory:
        """Fresh poisoned memory for one call of a kernel."""
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"o": (self.o_shape, self.io)}
        if final_state:
            shapes["final_state"] = (self.state_shape, torch.float32)
        shapes["workspace"] = ((kernel.configuration.workspace_bytes(self.sizes),), torch.uint8)
        return Memory(shapes, self.device, word)

    def bind(self, outputs: Memory) -> list[Any]:
        """The entry's arguments in order."""
        spec = _Spec.of(self.question)
        found: list[Any] = []
        for p in KDA.device_signature(spec):
            if p.role == "size":
                found.append(self.sizes[p.name])
            elif p.role == "scalar":
                found.append(self.scalars[p.name])
            elif p.name in self.values:
                found.append(self.values[p.name])
            elif p.name in outputs:
                found.append(outputs[p.name])
            elif p.absent is None:
                found.append(None)
            else:
                shape = [self.sizes.get(str(e), e) for e in p.absent]
                found.append(torch.empty(shape, dtype=torch.float32, device=self.device))
        return found


@dataclass(frozen=True)
class _Spec:
    dtype: str
    constants: Mapping[str, int | float | str]

    @classmethod
    def of(cls, question: Question) -> "_Spec":
        return cls(question.workload.dtype, question.workload.constants)

    @property
    def label(self) -> str:
        return f"{self.dtype} {dict(self.constants)}"

    def __getitem__(self, name: str) -> int | float | str:
        return self.constants[name]


def call(kernel: Kernel, arguments: Arguments, *, final_state: bool = True, word: int = NAN) -> Memory:
    """Call on poisoned memory and wait. Raises Hang, and what the kernel raises."""
    outputs = arguments.outputs(kernel, final_state=final_state, word=word)
    kernel.function(*arguments.bind(outputs))
    wait(arguments.device)
    return outputs


def wait(device: str) -> None:
    """Until the device's current stream has ended. Raises Hang after `HANG_S` seconds."""
    if device != "cuda":
        return
    event, deadline = torch.cuda.Event(), time.monotonic() + HANG_S
    event.record()
    while not event.query():
        if time.monotonic() > deadline:
            raise Hang(f"the kernel has not ended after {HANG_S:g} s")


@dataclass(frozen=True)
class Judgement:
    """What an answer was worth.

    Attributes:
        ratio: worst error over its derived bound; inf where the answer is not finite.
        relative: |error| over |truth|, L2 norms of all of `o`, then of the final state.
        breach: what the call did without a right to, "" for nothing.
        where: the output and head with the worst ratio.
    """

    ratio: float
    relative: tuple[float, float]
    breach: str
    where: str


class Truth:
    """A solved case's answer and bounds on the device; see `tolerance.Extent` for the places."""

    def __init__(self, case: KdaCase, device: str) -> None:
        self.tokens = case.places.tokens
        places = case.places
        offsets = np.arange(CHUNK)
        rows = np.where(offsets < places.counts[:, None], places.starts[:, None] + offsets, -1)
        self._rows = torch.from_numpy(np.maximum(rows, 0)).to(device)
        self._mask = torch.from_numpy((rows >= 0).astype(np.float64)).to(device)[:, :, None, None]
        self._entries = torch.from_numpy(places.counts.astype(np.float64)).to(device)[:, None]
        self.o = torch.from_numpy(np.ascontiguousarray(case.truth.o)).to(device)
        self.state = torch.from_numpy(np.ascontiguousarray(case.truth.final_state)).to(device)
        self._o_bounds = self._pair(case.bound.o_rms, case.bound.o_max, device)
        self._state_bounds = self._pair(case.bound.state_rms, case.bound.state_max, device)

    @staticmethod
    def _pair(rms: Any, largest: Any, device: str) -> tuple[Tensor, Tensor]:
        return tuple(torch.from_numpy(np.ascontiguousarray(x)).to(device) for x in (rms, largest))  # type: ignore[return-value]

    @cached_property
    def _norms(self) -> tuple[Tensor, Tensor]:
        return self.o[: self.tokens].norm(), self.state.norm()

    def output(self, o: Tensor) -> tuple[Tensor, Tensor]:
        """(error over bound by [chunks, HV], relative error) of an answer [T, HV, V]."""
        apart = o[: self.tokens].double() - self.o[: self.tokens]
        relative = apart.norm() / self._norms[0].clamp_min(1e-300)
        if not len(self._rows):
            return torch.zeros(1, 1, device=o.device), relative.nan_to_num(nan=0.0)
        placed = apart[self._rows] * self._mask
        rms = (placed.square().sum((1, 3)) / (self._entries * o.shape[2])).sqrt()
        return _ratios(rms, placed.abs().amax((1, 3)), self._o_bounds), relative

    def final_state(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """(error over bound by [N, HV, blocks of V rows], relative error) of [N, HV, V, K]."""
        apart = state.double() - self.state
        relative = apart.norm() / self._norms[1].clamp_min(1e-300)
        N, HV, V, K = apart.shape
        if not apart.numel():
            return torch.zeros(1, 1, 1, device=state.device), relative.nan_to_num(nan=0.0)
        placed = apart.view(N, HV, V // ROWS, ROWS * K)
        rms = placed.square().mean(3).sqrt()
        return _ratios(rms, placed.abs().amax(3), self._state_bounds), relative

    def judge(self, arguments: Arguments, outputs: Memory) -> Judgement:
        """One transfer to the host."""
        o_ratios, o_relative = self.output(outputs["o"])
        wanted = "final_state" in outputs
        if wanted:
            state_ratios, state_relative = self.final_state(outputs["final_state"])
        else:
            state_ratios, state_relative = torch.zeros(1, device=o_ratios.device), o_relative * 0
        tail = outputs["o"][self.tokens :].view(-1).view(torch.int64)
        said = torch.stack(
            [
                o_ratios.amax().double(),
                state_ratios.amax().double(),
                o_relative.double(),
                state_relative.double(),
                outputs.strayed.double(),
                arguments.changed.double(),
                (tail != outputs.word).any().double(),
                o_ratios.argmax().double(),
                state_ratios.argmax().double(),
            ]
        ).tolist()
        breaches = (
            "wrote outside its outputs and workspace",
            "changed an input",
            "wrote to rows of o that belong to no sequence",
        )
        breach = next((text for text, found in zip(breaches, said[4:7], strict=True) if found), "")
        place = _place("o, chunk {} head {}", o_ratios, said[7])
        if said[1] > said[0]:
            place = _place("final_state, sequence {} head {} block {}", state_ratios, said[8])
        return Judgement(max(said[:2]), (said[2], said[3]), breach, place)


def _ratios(rms: Tensor, largest: Tensor, bounds: tuple[Tensor, Tensor]) -> Tensor:
    ratios = torch.maximum(rms / bounds[0], largest / bounds[1])
    return torch.nan_to_num(ratios, nan=torch.inf, posinf=torch.inf)


def _place(text: str, ratios: Tensor, flat: float) -> str:
    return text.format(*(int(i) for i in np.unravel_index(int(flat), tuple(ratios.shape))))


def same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit; NaNs of the same bits are equal."""
    return a.shape == b.shape and bool(
        (a.contiguous().view(torch.uint8) == b.contiguous().view(torch.uint8)).all()
    )


def excerpt(question: Question, rows: slice, initial_state: Any = None) -> Question:
    """One sequence made of some rows of a question with one sequence."""
    w = question.workload
    inputs = dict(question.inputs)
    for name in ("q", "k", "v", "g", "beta"):
        inputs[name] = np.ascontiguousarray(np.asarray(inputs[name])[rows])
    length = len(np.asarray(inputs["q"]))
    workload = replace(w, lengths=(length,), slack=0, initial_state=initial_state is not None)
    inputs["initial_state"] = initial_state
    inputs["cu_seqlens"] = np.asarray(workload.cu_seqlens, np.int64)
    return Question(question.name, workload, inputs)
