"""`kda_forward`: Kimi Delta Attention on CUDA tensors of torch, by the verified kernels beside this file.

    from pareto import kda_forward
    o, final_state = kda_forward(q, k, v, g, beta, initial_state=state, output_final_state=True)

Argument names, order, defaults and layouts are those of flash-linear-attention's `chunk_kda`. Per value
head, with state S [K, V]:

    S <- diag(exp(g_t)) S;  u = beta_t (v_t - S^T k_t);  S <- S + k_t u^T;  o_t = scale S^T q_t.

Two contracts, each available when kernels were exported for it (`available()` lists them):

    plain        g is the log decay, in [-5, 0], and beta is in [0, 1]; no *_in_kernel flag is set.
    production   all three *_in_kernel flags are set and lower_bound is given: q and k are L2-normalised,
                 g <- lower_bound * sigmoid(exp(A_log) * (g + dt_bias)), beta <- sigmoid(beta).

A call goes to the kernel that was fastest on the nearest measured workload of its specialization (dtype, K,
V, contract): the smallest sum of squared differences of log2(1 + number of sequences), log2(1 + mean length)
and log2(1 + value heads); the first listed wins a tie.

Nothing here waits for the GPU, and values on it are not looked at unless `check_values` asks for it. Work
goes to torch's current stream. A workspace is kept for every thread, device and stream that called, as large
as its largest call needed (`free_workspaces` gives it back), and a graph has one of its own in its pool: no
two calls that may run at once share one. Call once before a graph is captured, so that the kernel is loaded.
Under torch.compile a call is one opaque operator. There is no backward pass: tensors that require grad are
refused.

Cheapest for the host: `state_v_first` (else states are transposed on their way), int32 `cu_seqlens` (int64
are converted by a launch of its own), and in the plain contract float32 g and beta.

Needs torch with CUDA, apache-tvm-ffi and nvidia-cutlass-dsl, whose runtime library the kernels call; evotune
is not imported. A library is loaded at its first use, after its sha256 was compared.
"""

import ctypes
import importlib.metadata
import importlib.util
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from operator import attrgetter
from pathlib import Path
from threading import get_ident
from typing import Any

import torch
from torch import Tensor

from evotune.dropin_frame import (
    Frame,
    frame_library,
)
from evotune.dropin_kda import (
    HERE,
    Choice,
    Extents,
    Shipped,
    available,
    choose,
    contract_of,
    scale_of,
    shipped,
)

__all__ = ["available", "free_workspaces", "kda_forward"]

_DEVICE = "cuda"
_RUNTIME = "libcute_dsl_runtime.so"
_DSL = "nvidia-cutlass-dsl"
_ALIGNMENT = 16
_WORKSPACE_ALIGNMENT = 128
_DTYPES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}
_LONGEST = 2**31 - 1  # cu_seqlens are int32 inside
_KEPT = 4096
_KEPT_WORKSPACES = 64
_KEPT_FRAMES = 64


def kda_forward(  # noqa: PLR0913 - the argument list is fla's
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: None = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    kernel: str | None = None,
    check_values: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Outputs and, when asked for, final states. All tensors are on one CUDA device and contiguous.

    Args:
        q, k: [B, T, H, K], bfloat16 or float32.
        v: [B, T, HV, V], same dtype; HV is a multiple of H, value head hv reads q/k head hv // (HV // H).
        g: [B, T, HV, K]. Plain: log decay, float32 (bfloat16 is widened). Production: raw, dtype of q.
        beta: [B, T, HV], likewise.
        scale: factor on q; K ** -0.5 by default.
        initial_state: float32 [N, HV, K, V], or [N, HV, V, K] with `state_v_first`; zeros by default. Of a
            K-first one any strides are taken.
        cu_seqlens: int32 or int64 [N + 1] ascending from 0, with B = 1: sequences packed along T, empty ones
            allowed. Rows of o after the last sequence are not written. N = B without it.
        A_log: float32 [HV]; zeros by default. Production only, like `dt_bias`, float32 [HV, K] or [HV * K].
        kernel: id of the kernel to use, in place of the dispatch.
        check_values: wait for the GPU and refuse values outside of what was verified.
        safe_gate, disable_recompute, cu_seqlens_cpu, use_graph, max_num_seqs: nothing here needs them;
            accepted.

    Returns:
        o [B, T, HV, V] in the dtype of q, and final_state, float32 in the layout of `initial_state`, or None.

    Raises:
        TypeError, ValueError: an argument has a wrong type, dtype, shape, stride or device, or asks for what
            no kernel here was verified for; the message names it and the mend.
        RuntimeError: a library is not the one that was exported, this GPU cannot run it, the DSL's runtime
            library is not installed.
    """
    if allow_neg_eigval or return_intermediate_states or cp_context is not None:
        raise ValueError(_not_offered(allow_neg_eigval, return_intermediate_states))
    flags = (use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel)
    if torch.compiler.is_compiling():
        production = contract_of(flags, lower_bound, A_log, dt_bias) == "production"
        tensors = (q, k, v, g, beta, initial_state, cu_seqlens, A_log, dt_bias)
        facts = (scale, lower_bound, production, output_final_state, state_v_first, kernel, check_values)
        o, final_state = _operator(*tensors, *facts)
        return o, final_state if output_final_state else None
    try:  # what a plan follows from; most calls find theirs
        sequences = None if cu_seqlens is None else cu_seqlens.shape
        gate = (flags, lower_bound, A_log is None, dt_bias is None)
        key = (q.shape, v.shape, q.dtype, q.device, sequences, gate, kernel)
    except AttributeError:
        _refuse_others(q=q, v=v, cu_seqlens=cu_seqlens)
        raise
    plan = _plans.get(key)
    if plan is None:
        _refuse_others(q=q, v=v, cu_seqlens=cu_seqlens)
        contract = contract_of(flags, lower_bound, A_log, dt_bias)
        plan = _Plan.of(q, v, sequences, contract, lower_bound, kernel)
        if len(_plans) >= _KEPT:
            _plans.clear()
        _plans[key] = plan
    given = (q, k, v, g, beta, initial_state, cu_seqlens, A_log, dt_bias)
    if check_values:
        plan.check_values(given, state_v_first)
    if plan.index == _current_device():
        return plan.run(given, scale, output_final_state, state_v_first)
    with torch.cuda.device(plan.device):
        return plan.run(given, scale, output_final_state, state_v_first)


def _not_offered(allow_neg_eigval: bool, return_intermediate_states: bool) -> str:
    if allow_neg_eigval:
        return "allow_neg_eigval: no exported kernel was verified for beta above 1"
    if return_intermediate_states:
        return "return_intermediate_states: no exported kernel keeps the states between chunks"
    return "cp_context: a call computes whole sequences on one GPU"


def _refuse_others(**given: Any) -> None:
    """Raises TypeError for what is neither a tensor nor None."""
    for name, x in given.items():
        if not isinstance(x, Tensor | None):
            raise TypeError(f"{name} must be a torch tensor, not {type(x).__name__}")


Given = tuple[Any, ...]
"""q, k, v, g, beta, and tensors or None: initial_state, cu_seqlens, A_log, dt_bias."""

Inputs = Sequence[Tensor]
"""Of the kernel: q, k, v, g, beta, A_log and dt_bias (production alone), initial_state, cu_seqlens."""

_REQUIRES_GRAD = attrgetter("requires_grad")


@dataclass(frozen=True, slots=True)
class _Plan:
    """All that follows from the shapes and options of a call.

    Attributes:
        gate: dtype of g and beta as the kernel takes them.
        rows: shapes of q, k, v, g and beta with batch and time as one axis, as the kernel takes them.
        sizes: N, T, H, HV.
        state: [N, HV, V, K].
        absent: stands for a state that is not given or not wanted.
        lower_bound: of the gate in the kernel; 0 in the plain contract.
        least: the strongest log decay a token that was verified.
        fits: facts of inputs that the careful way took, without an initial state and with one.
        frames: calls of the kernel, by thread and by the states that are there, where TVM FFI is one that
            frames are made for.
    """

    function: Callable[..., object]
    contract: str
    device: torch.device
    index: int
    dtype: torch.dtype
    gate: torch.dtype
    q: tuple[int, ...]
    v: tuple[int, ...]
    g: tuple[int, ...]
    beta: tuple[int, ...]
    rows: tuple[tuple[int, ...], ...]
    sizes: tuple[int, int, int, int]
    state: tuple[int, int, int, int]
    K: int
    absent: Tensor
    workspace_bytes: int
    lower_bound: float
    least: float
    fits: dict[bool, Any] = field(default_factory=dict)
    frames: dict[tuple[int, bool, bool], Frame] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        q: Tensor,
        v: Tensor,
        sequences: tuple[int, ...] | None,
        contract: str,
        lower_bound: float | None,
        kernel: str | None,
    ) -> "_Plan":
        """Raises ValueError, RuntimeError as `kda_forward` does."""
        for name, x, axes in (("q", q, "B, T, H, K"), ("v", v, "B, T, HV, V")):
            if x.dim() != 4:
                raise ValueError(f"{name} has shape {tuple(x.shape)}; wanted [{axes}]")
        if q.device.type != _DEVICE:
            raise ValueError(
                f"q is on {q.device}; these kernels run on {_DEVICE} tensors: pass q.{_DEVICE}()"
            )
        if q.dtype not in _DTYPES:
            raise ValueError(f"q is {q.dtype}; q, k and v must all be bfloat16 or all float32")
        B, T, H, K = q.shape
        HV, V = v.shape[2:]
        N = B if sequences is None else _sequences(sequences, B)
        if B * T > _LONGEST:
            raise ValueError(f"B T = {B * T} tokens are more than {_LONGEST}, which a call takes at most")
        choice = choose(Extents(_DTYPES[q.dtype], N, B * T, H, HV, K, V), contract, lower_bound, kernel)
        found = _ready(choice, q.device)
        sizes = {"N": N, "T": B * T, "H": H, "HV": HV}
        gate = q.dtype if contract == "production" else torch.float32
        q_rows, v_rows, g_rows = (B * T, H, K), (B * T, HV, V), (B * T, HV, K)
        return cls(
            function=found.function,
            contract=contract,
            device=q.device,
            index=q.get_device(),
            dtype=q.dtype,
            gate=gate,
            q=q.shape,
            v=(B, T, HV, V),
            g=(B, T, HV, K),
            beta=(B, T, HV),
            rows=(q_rows, q_rows, v_rows, g_rows, (B * T, HV)),
            sizes=(N, B * T, H, HV),
            state=(N, HV, V, K),
            K=K,
            absent=torch.empty((0, HV, V, K), dtype=torch.float32, device=q.device),
            workspace_bytes=found.workspace_bytes(sizes),
            lower_bound=0.0 if lower_bound is None else lower_bound,
            least=_least(choice.label),
        )

    def run(
        self, given: Given, scale: float | None, output_final_state: bool, state_v_first: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The call, on the current stream of the current device, which is `device`.

        What comes most often fits as the call before it did; else the careful way says what is wrong in one
        line, or finds that nothing is.
        """
        try:
            inputs, framed = self._quick(given, state_v_first), True
        except (AttributeError, TypeError, RuntimeError, _Unfit):
            inputs, framed = self._careful(given, state_v_first), False  # a frame pays from two calls on
        if torch.is_grad_enabled() and any(map(_REQUIRES_GRAD, inputs)):
            _refuse_grad(given)
        o, final = torch.empty_like(inputs[2]), self.absent
        if output_final_state:
            final = self._final(inputs[-2])
        if self.state[0]:
            stream = _stream(self.index)
            outputs = (o, final, self._workspace(stream))
            scalars = (scale_of(scale, self.K), self.lower_bound)
            if not (framed and self._framed(inputs, outputs, scalars, stream)):
                try:
                    self._plainly(inputs, outputs, scalars)
                except (TypeError, ValueError):
                    self._plainly(self._careful(given, state_v_first), outputs, scalars)
        if not output_final_state:
            return o, None
        return o, final if state_v_first else final.mT.contiguous()

    def _final(self, initial: Tensor) -> Tensor:
        """For the final state: torch makes one like another sooner than one of some sizes, and that sooner
        than one of a tuple. Compact, whatever strides the other's axes of one element have."""
        if initial is not self.absent:
            return torch.empty_like(initial, memory_format=torch.contiguous_format)
        return torch.empty(*self.state, dtype=torch.float32, device=self.device)

    def _framed(self, inputs: Inputs, outputs: Inputs, scalars: tuple[float, float], stream: int) -> bool:
        """Whether a frame made the call: the kernel's function looks at its arguments before it launches
        anything, and of those a frame leaves only the addresses' alignment to it."""
        given, wanted = inputs[-2] is not self.absent, outputs[1] is not self.absent
        key = (get_ident(), given, wanted)
        frame = self.frames.get(key)
        if frame is None:
            library = frame_library()
            if library is None or not hasattr(self.function, "__chandle__"):
                return False
            if len(self.frames) >= _KEPT_FRAMES:
                self.frames.clear()
            frame = self.frames[key] = self._frame(library, given, wanted)
        return frame.call([*map(Tensor.data_ptr, inputs), *map(Tensor.data_ptr, outputs)], scalars, stream)

    def _frame(self, library: ctypes.CDLL, given: bool, wanted: bool) -> Frame:
        """With a state that is given or not, and another that is wanted or not."""
        N, _, _, HV = self.sizes
        io, whole = self.dtype, torch.float32
        q, k, v, g, beta = self.rows
        states = [(self.state if there else tuple(self.absent.shape), whole) for there in (given, wanted)]
        gates = [((HV,), whole), ((HV, self.K), whole)] if self.contract == "production" else []
        inputs = [(q, io), (k, io), (v, io), (g, self.gate), (beta, self.gate), *gates, states[0]]
        outputs = ((v, io), states[1], ((self.workspace_bytes,), torch.uint8))
        tensors = [*self._whole([*inputs, ((N + 1,), torch.int32)]), *outputs]
        return Frame(self.function, library, tensors, self.sizes, 2, self.device)

    def _plainly(self, inputs: Inputs, outputs: Inputs, scalars: tuple[float, float]) -> None:
        """The call by TVM FFI's Python layer. Raises TypeError, ValueError as that does."""
        rows = [x.view(shape) for x, shape in zip(inputs, self.rows, strict=False)]
        o, final, workspace = outputs
        more = (o.view(self.rows[2]), final, workspace, *self.sizes, *scalars)
        self.function(*self._whole([*rows, *inputs[len(rows) :]]), *more)

    def _whole(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """With None in the places of what the plain contract has not."""
        many = len(self.rows)
        return inputs if self.contract == "production" else [*inputs[:many], None, None, *inputs[many:]]

    def _quick(self, given: Given, state_v_first: bool) -> Inputs:
        """The kernel's inputs, where all is as in a call that the careful way took. Raises _Unfit, or what
        comes of something that is no tensor."""
        inputs = self._completed(given, state_v_first)
        if self._facts(inputs) != self.fits.get(inputs[-2] is not self.absent):
            raise _Unfit
        if not all(map(Tensor.is_contiguous, inputs)):
            raise _Unfit
        return inputs

    def _completed(self, given: Given, state_v_first: bool) -> Inputs:
        """With something in the place of what may be left out, in the layouts that the kernel takes."""
        *inputs, initial, cu, A_log, dt_bias = given
        if initial is None:
            initial = self.absent
        elif not state_v_first:
            initial = initial.mT.contiguous()
        if cu is None:
            cu = self._regular()
        elif cu.dtype is torch.int64:
            cu = cu.to(torch.int32)
        if self.contract == "production":
            A_log = self._zeros(self.g[2:3]) if A_log is None else A_log
            dt_bias = self._zeros(self.g[2:]) if dt_bias is None else dt_bias
            inputs += (A_log, dt_bias.view(self.g[2:]) if dt_bias.dim() == 1 else dt_bias)
        inputs += (initial, cu)
        return inputs

    def _facts(self, inputs: Inputs) -> tuple[Any, ...]:
        """What a frame does not look at again, but for strides; the plan was found by what is not here.

        Spelt out: a loop takes half as long again, 1 us of the 9 that a call takes beside its launches.
        """
        if self.contract == "production":
            _, k, v, g, beta, A_log, dt_bias, initial, cu = inputs
            more: tuple[Any, ...] = (
                *(A_log.shape, dt_bias.shape, A_log.dtype, dt_bias.dtype),
                *(A_log.device, dt_bias.device),
            )
        else:
            (_, k, v, g, beta, initial, cu), more = inputs, ()
        return (
            *(k.shape, g.shape, beta.shape, initial.shape, cu.shape),
            *(k.dtype, v.dtype, g.dtype, beta.dtype, initial.dtype, cu.dtype),
            *(k.device, v.device, g.device, beta.device),
            *(initial.device, cu.device, more),
        )

    def _careful(self, given: Given, state_v_first: bool) -> Inputs:
        """The kernel's inputs, each looked at. Raises TypeError, ValueError for the first that is wrong."""
        q, k, v, g, beta, initial, cu, A_log, dt_bias = given
        names = ("q", "k", "v", "g", "beta", "initial_state", "cu_seqlens", "A_log", "dt_bias")
        _refuse_others(**dict(zip(names, given, strict=True)))
        if self.contract == "plain":
            g, beta = (x.float() if x.dtype is torch.bfloat16 else x for x in (g, beta))
        self._check("q", q, self.q, self.dtype)
        self._check("k", k, self.q, self.dtype)
        self._check("v", v, self.v, self.dtype)
        self._check("g", g, self.g, self.gate)
        self._check("beta", beta, self.beta, self.gate, alignment=1)
        if initial is not None:
            initial = self._initial(initial, state_v_first)
        if cu is not None:
            cu = self._packed(cu)
        if self.contract == "production":
            HV, K = self.g[2:]
            if A_log is not None:
                self._check("A_log", A_log, (HV,), torch.float32, alignment=4)
            if dt_bias is not None:
                dt_bias = dt_bias.view(HV, K) if dt_bias.shape == (HV * K,) else dt_bias
                self._check("dt_bias", dt_bias, (HV, K), torch.float32, alignment=4)
        inputs = self._completed((q, k, v, g, beta, initial, cu, A_log, dt_bias), True)
        self.fits[initial is not None] = self._facts(inputs)
        return inputs

    def _check(
        self, name: str, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype, alignment: int = _ALIGNMENT
    ) -> None:
        """Raises ValueError for a tensor that the kernel cannot take."""
        _refuse_others(**{name: x})
        if x.shape != shape:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; wanted {tuple(shape)} beside q and v")
        if x.dtype is not dtype:
            raise ValueError(f"{name} is {x.dtype}; the {self.contract} contract takes {dtype} here")
        if x.device != self.device:
            raise ValueError(f"{name} is on {x.device}, q on {self.device}")
        if not x.is_contiguous():
            raise ValueError(f"{name} is not contiguous (strides {x.stride()}): pass {name}.contiguous()")
        if x.data_ptr() % alignment:
            raise ValueError(f"{name} does not begin at a multiple of {alignment} bytes: pass {name}.clone()")

    def _initial(self, x: Tensor, v_first: bool) -> Tensor:
        """[N, HV, V, K], whatever the caller's layout is."""
        if not v_first:
            N, HV, V, K = self.state
            if x.shape != (N, HV, K, V):
                raise ValueError(f"initial_state has shape {tuple(x.shape)}; wanted {(N, HV, K, V)}")
            x = x.mT.contiguous()
        self._check("initial_state", x, self.state, torch.float32)
        return x.view(self.state)  # strides of axes of one element may be anything; the kernel's are not

    def _packed(self, cu: Tensor) -> Tensor:
        if cu.dtype is torch.int64:
            cu = cu.to(torch.int32)
        elif cu.dtype is not torch.int32:
            raise ValueError(f"cu_seqlens is {cu.dtype}; wanted int32 or int64")
        self._check("cu_seqlens", cu, (self.sizes[0] + 1,), torch.int32, alignment=4)
        return cu

    def _zeros(self, shape: tuple[int, ...]) -> Tensor:
        def make() -> Tensor:
            return torch.zeros(shape, dtype=torch.float32, device=self.device)

        return _kept(("zeros", shape), self.index, make)

    def _regular(self) -> Tensor:
        """cu_seqlens of a batch of equal lengths."""
        B, T = self.q[:2]

        def make() -> Tensor:
            return torch.arange(B + 1, dtype=torch.int32, device=self.device) * T

        return _kept(("regular", B, T), self.index, make)

    def _workspace(self, stream: int) -> Tensor:
        """At least what the kernel needs, of this thread and stream alone; a graph's own while one is
        captured. The last one is kept: to make one costs more than all else here."""
        if torch.cuda.is_current_stream_capturing():
            return torch.empty(self.workspace_bytes, dtype=torch.uint8, device=self.device)
        place = (get_ident(), self.index, stream)
        found = _workspaces.get(place)
        if found is None or found.numel() < self.workspace_bytes:
            if len(_workspaces) >= _KEPT_WORKSPACES:
                _workspaces.clear()
            _workspaces.pop(place, None)
            found = torch.empty(self.workspace_bytes, dtype=torch.uint8, device=self.device)
            _workspaces[place] = found
        return found

    def check_values(self, given: Given, state_v_first: bool) -> None:
        """Raises TypeError, ValueError. Waits for the GPU."""
        _, _, _, g, beta, *_, packed = self._careful(given, state_v_first)
        ends = packed.tolist()
        tokens = self.sizes[1]
        if ends[0] != 0 or ends[-1] > tokens or any(b < a for a, b in zip(ends, ends[1:], strict=False)):
            raise ValueError(f"cu_seqlens must ascend from 0 to T = {tokens} at most")
        if self.contract == "plain" and ends[-1] > 0:
            for name, x, bounds in (("g", g, (self.least, 0.0)), ("beta", beta, (0.0, 1.0))):
                found = x.flatten(0, 1)[: ends[-1]]
                least, most = float(found.min()), float(found.max())
                if not (least >= bounds[0] and most <= bounds[1]):
                    raise ValueError(f"{name} spans {least} to {most}; verified are {list(bounds)}")


_plans: dict[Any, _Plan] = {}


@cache
def _least(label: str) -> float:
    """The strongest log decay a token that kernels of a specialization were verified for."""
    return float(min(row["scalars"]["lower_bound"] for row in available() if row["label"] == label))


class _Unfit(Exception):
    """Something does not fit; the careful way finds out what."""


def _sequences(shape: tuple[int, ...], B: int) -> int:
    """N, from the shape of cu_seqlens."""
    if len(shape) != 1 or shape[0] < 1:
        raise ValueError(f"cu_seqlens has shape {tuple(shape)}; wanted [N + 1]")
    if B != 1:
        raise ValueError(f"cu_seqlens needs B = 1, the sequences packed along T; B = {B}")
    return shape[0] - 1


def _refuse_grad(given: Given) -> None:
    """Raises ValueError for the first tensor that requires grad."""
    for i, x in enumerate(given):
        if isinstance(x, Tensor) and x.requires_grad:
            name = ("q", "k", "v", "g", "beta", "initial_state", "cu_seqlens", "A_log", "dt_bias")[i]
            raise ValueError(
                f"{name} requires grad and there is no backward pass: call under torch.no_grad(), "
                f"or pass {name}.detach()"
            )


_workspaces: dict[tuple[int, int, int], Tensor] = {}
_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", None) or (
    lambda index: int(torch.cuda.current_stream(index).cuda_stream)
)
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", None) or torch.cuda.current_device


def free_workspaces() -> None:
    """Give the kept workspaces back to torch's allocator. What is under way on the GPU still ends well."""
    _workspaces.clear()


_constants: dict[Any, Tensor] = {}


def _kept(key: tuple[Any, ...], index: int, make: Callable[[], Tensor]) -> Tensor:
    """A constant of the stream that it was made on: on another one it might not be written yet.

    A graph makes its own: what is kept here may be dropped while the graph still reads it.
    """
    if torch.cuda.is_current_stream_capturing():
        return make()
    place = (key, index, _stream(index))
    found = _constants.get(place)
    if found is None:
        if len(_constants) >= _KEPT:
            _constants.clear()
        found = _constants[place] = make()
    return found


# Loading


@dataclass(frozen=True)
class _Loaded:
    """A kernel's function, and its entry in the manifest."""

    function: Callable[..., object]
    built: Any

    def workspace_bytes(self, sizes: dict[str, int]) -> int:
        total = 0
        for term in self.built["workspace"]:
            product = term["bytes"]
            for name in term["sizes"]:
                product *= sizes[name]
            total += product
        return -(-total // _WORKSPACE_ALIGNMENT) * _WORKSPACE_ALIGNMENT  # as it was judged with


@cache
def _ready(choice: Choice, device: torch.device) -> _Loaded:
    """A kernel that may run on the device. Raises RuntimeError."""
    kernel = shipped(choice)
    _check_gpu(kernel.manifest["gpu"], device)
    return _load(choice, kernel.manifest["entry"])


@cache
def _load(choice: Choice, entry: str) -> _Loaded:
    kernel = shipped(choice)
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("call kda_forward once before a graph is captured: its kernel is not loaded yet")
    _check_versions(kernel)
    return _Loaded(_function(kernel.library, entry), kernel.built)


def _function(library: Path, entry: str) -> Callable[..., object]:
    try:
        import tvm_ffi
    except ImportError as error:
        raise RuntimeError(
            "apache-tvm-ffi, which calls the kernels, is not installed: pip install apache-tvm-ffi"
        ) from error
    _runtime()
    found: Callable[..., object] = tvm_ffi.load_module(str(library)).get_function(entry)
    return found


@cache
def _runtime() -> ctypes.CDLL:
    """The runtime library of the installed DSL, which the kernels' libraries ask for by its name."""
    path = _runtime_path()
    try:
        return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise RuntimeError(f"{path} cannot be loaded: {error}") from error


def _runtime_path() -> Path:
    """As the DSL itself looks: CUTE_DSL_LIBS, then its package. Of two CUDA versions torch's own."""
    named = [Path(name) for name in os.environ.get("CUTE_DSL_LIBS", "").split(":")]
    package = importlib.util.find_spec("nvidia_cutlass_dsl")
    places = [Path(place) for place in (package and package.submodule_search_locations) or ()]
    own = f"cu{(torch.version.cuda or '').split('.')[0]}"
    found = sorted(
        (path for place in places for path in (*place.glob("cu*/lib"), place / "lib")),
        key=lambda path: (path.parent.name == own, path.parent.name),
        reverse=True,
    )
    for path in (*named, *(folder / _RUNTIME for folder in found)):
        if path.name == _RUNTIME and path.is_file():
            return path
    raise RuntimeError(
        f"{_RUNTIME}, which the kernels call, was not found: pip install {_DSL} "
        "(or name the file in CUTE_DSL_LIBS)"
    )


def _check_versions(kernel: Shipped) -> None:
    """The runtime library is the installed DSL's; the kernels were judged with the one of their manifest."""
    exported = kernel.manifest["versions"].get(_DSL)
    try:
        here = importlib.metadata.version(_DSL)
    except importlib.metadata.PackageNotFoundError:
        return
    if here != exported:
        warnings.warn(
            f"kernels were judged with {_DSL} {exported}, installed is {here}: "
            f"pip install {_DSL}=={exported}, or judge them anew: python -m evotune verify {HERE}",
            stacklevel=2,
        )


def _check_gpu(judged_on: dict[str, str], device: torch.device) -> None:
    """Code for an arch-specific target runs on GPUs of its very compute capability."""
    major, minor = torch.cuda.get_device_capability(device)
    name, wanted = torch.cuda.get_device_name(device), judged_on["compute_capability"]
    if f"{major}.{minor}" != wanted:
        raise RuntimeError(
            f"these kernels are for compute capability {wanted} ({judged_on['name']}); "
            f"{device} is {name}, {major}.{minor}"
        )
    if name != judged_on["name"]:
        warnings.warn(f"kernels were timed on {judged_on['name']}, this is {name}", stacklevel=2)


# torch.compile


def _eager(  # noqa: PLR0913 - the schema below
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    scale: float | None,
    lower_bound: float | None,
    production: bool,
    output_final_state: bool,
    state_v_first: bool,
    kernel: str | None,
    check_values: bool,
) -> tuple[Tensor, Tensor]:
    o, final_state = kda_forward(
        *(q, k, v, g, beta),
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=production,
        use_gate_in_kernel=production,
        use_beta_sigmoid_in_kernel=production,
        lower_bound=lower_bound,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        A_log=A_log,
        dt_bias=dt_bias,
        kernel=kernel,
        check_values=check_values,
    )
    return o, q.new_empty(0) if final_state is None else final_state


def _traced(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Shapes and types of what `_eager` gives."""
    cu_seqlens, output_final_state, state_v_first = rest[1], rest[7], rest[8]
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    K, (HV, V) = q.shape[3], v.shape[2:]
    o = torch.empty_like(v, memory_format=torch.contiguous_format)
    if not output_final_state:
        return o, q.new_empty(0)
    return o, q.new_empty((N, HV, V, K) if state_v_first else (N, HV, K, V), dtype=torch.float32)


# Two exports in one process are two operators.
_operator: Any = torch.library.custom_op(
    f"evotune_{sha256(str(HERE).encode()).hexdigest()[:12]}::kda_forward",
    _eager,
    mutates_args=(),
    schema=(
        "(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? initial_state, Tensor? cu_seqlens, "
        "Tensor? A_log, Tensor? dt_bias, float? scale, float? lower_bound, bool production, "
        "bool output_final_state, bool state_v_first, str? kernel, bool check_values) -> (Tensor, Tensor)"
    ),
)
_operator.register_fake(_traced)
