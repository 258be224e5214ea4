"""`kda_forward`: Kimi Delta Attention on numpy arrays, computed by the verified kernels beside this file.

    from pareto import kda_forward
    o, final_state = kda_forward(q, k, v, g, beta, initial_state=state, output_final_state=True)

Argument names, defaults and layouts are those of flash-linear-attention's `chunk_kda`. Per value head, with
state S [K, V]:  S <- diag(exp(g_t)) S;  u = beta_t (v_t - S^T k_t);  S <- S + k_t u^T;  o_t = scale S^T q_t.

Two contracts, each available when kernels were exported for it (`available()` lists them):

    plain        g is the log decay (<= 0) and beta is in [0, 1]; no *_in_kernel flag is set.
    production   all three *_in_kernel flags are set and lower_bound is given: q and k are L2-normalised,
                 g <- lower_bound * sigmoid(exp(A_log) * (g + dt_bias)), beta <- sigmoid(beta).

A call goes to the kernel that was fastest on the nearest measured workload of its specialization (dtype, K,
V, contract): the smallest sum of squared differences of log2(1 + number of sequences), log2(1 + mean length)
and log2(1 + value heads); the first listed wins a tie.

Needs numpy, and for bfloat16 arrays ml_dtypes; evotune is not imported. Kernels run on one thread; calls from
several threads run side by side. A library is loaded at its first use, after its sha256 was compared.
"""

import ctypes
import math
import platform
import threading
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from evotune.dropin_kda import (
    Choice,
    Extents,
    available,
    choose,
    contract_of,
    scale_of,
    shipped,
)

__all__ = ["available", "kda_forward"]

Array = npt.NDArray[Any]

_ALIGNMENT = 64
_POINTERS, _SIZES, _SCALARS = 12, 4, 2


def kda_forward(  # noqa: PLR0913 - the argument list is fla's
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    scale: float | None = None,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Array | Sequence[int] | None = None,
    *,
    A_log: Array | None = None,
    dt_bias: Array | None = None,
    kernel: str | None = None,
) -> tuple[Array, Array | None]:
    """Outputs and, when asked for, final states.

    Args:
        q, k: [B, T, H, K], float32 or bfloat16.
        v: [B, T, HV, V], same dtype; HV is a multiple of H, value head hv reads q/k head hv // (HV // H).
        g: [B, T, HV, K]. Plain: log decay <= 0, float32 (bfloat16 is widened). Production: raw, dtype of q.
        beta: [B, T, HV], likewise.
        scale: factor on q; K ** -0.5 by default.
        initial_state: float32 [N, HV, K, V], or [N, HV, V, K] with `state_v_first`; zeros by default.
        safe_gate: a promise about g that the kernels here do not need; accepted.
        cu_seqlens: [N + 1] ascending from 0 to T, with B = 1: sequences packed along T. N = B without it.
        A_log: float32 [HV]; zeros by default. Production only, like `dt_bias`, float32 [HV, K] or [HV * K].
        kernel: id of the kernel to use, in place of the dispatch.

    Returns:
        o [B, T, HV, V] in the dtype of q, and final_state, float32 in the layout of `initial_state`, or None.

    Raises:
        TypeError, ValueError: an argument has a wrong type, dtype, shape or value, or asks for what no kernel
            here was verified for.
        RuntimeError: a library is not the one that was exported, or this processor cannot run it.
    """
    if allow_neg_eigval:
        raise ValueError("allow_neg_eigval: no exported kernel was verified for beta above 1")
    flags = (use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel)
    contract = contract_of(flags, lower_bound, A_log, dt_bias)
    shape, packed = _checked(q, k, v, g, beta, cu_seqlens)
    choice = choose(shape, contract, lower_bound, kernel)
    gate_dtype = q.dtype if contract == "production" else np.dtype(np.float32)
    state_shape = (shape.N, shape.HV, shape.V, shape.K)
    o = _empty(v.shape, q.dtype)
    final_state = _empty(state_shape, np.float32) if output_final_state else None
    _library(choice)(
        pointers=(
            *(_aligned(x, q.dtype) for x in (q, k, v)),
            _gate("g", g, gate_dtype, contract),
            _gate("beta", beta, gate_dtype, contract),
            _per_head("A_log", A_log, (shape.HV,), contract),
            _per_head("dt_bias", dt_bias, (shape.HV, shape.K), contract),
            _initial(initial_state, state_shape, state_v_first),
            _aligned(packed, np.dtype(np.int64)),
            o,
            final_state,
        ),
        sizes=(shape.N, shape.T, shape.H, shape.HV),
        scalars=(scale_of(scale, shape.K), 0.0 if lower_bound is None else lower_bound),
    )
    if final_state is None or state_v_first:
        return o, final_state
    return o, np.ascontiguousarray(final_state.swapaxes(-1, -2))


def _checked(
    q: Array, k: Array, v: Array, g: Array, beta: Array, cu: Array | Sequence[int] | None
) -> tuple[Extents, Array]:
    """Extents of a call, and cu_seqlens [N + 1] int64. Raises TypeError, ValueError."""
    for name, array, axes in (("q", q, "BTHK"), ("k", k, "BTHK"), ("v", v, "BTHV"), ("g", g, "BTHK")):
        _require_axes(name, array, axes)
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    _require_shape("k", k, (B, T, H, K), "q")
    _require_shape("v", v, (B, T, HV, V), "q")
    _require_shape("g", g, (B, T, HV, K), "q and v")
    _require_shape("beta", beta, (B, T, HV), "v")
    for name, array in (("q", q), ("k", k), ("v", v)):
        if array.dtype.name not in ("float32", "bfloat16") or array.dtype != q.dtype:
            raise ValueError(
                f"{name} is {array.dtype}; q, k and v must all be float32 or all bfloat16 (ml_dtypes)"
            )
    packed = _cu_seqlens(cu, B, T)
    return Extents(q.dtype.name, len(packed) - 1, B * T, H, HV, K, V), packed


def _require_axes(name: str, array: Array, axes: str) -> None:
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{name} must be a numpy array, not {type(array).__name__}")
    if array.ndim != len(axes):
        raise ValueError(f"{name} has shape {array.shape}; wanted [{', '.join(axes)}]")


def _require_shape(name: str, array: Array, shape: tuple[int, ...], reference: str = "") -> None:
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{name} must be a numpy array, not {type(array).__name__}")
    if array.shape != shape:
        beside = f" beside {reference}" if reference else ""
        raise ValueError(f"{name} has shape {array.shape}; wanted {shape}{beside}")


def _cu_seqlens(cu: Array | Sequence[int] | None, B: int, T: int) -> Array:
    if cu is None:
        return np.arange(B + 1, dtype=np.int64) * T
    given = np.asarray(cu)
    if B != 1:
        raise ValueError(f"cu_seqlens needs B = 1, the sequences packed along T; B = {B}")
    if given.ndim != 1 or given.size < 1 or given.dtype.kind not in "iu":
        raise ValueError(f"cu_seqlens must be integers [N + 1], not {given.dtype} {given.shape}")
    packed = given.astype(np.int64)
    if packed[0] != 0 or packed[-1] != T or np.any(packed[1:] < packed[:-1]):
        raise ValueError(f"cu_seqlens must ascend from 0 to T = {T}")
    return packed


def _gate(name: str, array: Array, dtype: npt.DTypeLike, contract: str) -> Array:
    dtype = np.dtype(dtype)
    widened = contract == "plain" and array.dtype.name == "bfloat16"
    if array.dtype != dtype and not widened:
        raise ValueError(f"{name} is {array.dtype}; the {contract} contract takes {dtype}")
    if contract == "plain" and array.size:
        least, most = float(array.min()), float(array.max())
        if name == "g" and not most <= 0:
            raise ValueError(f"g reaches {most}; a log decay is <= 0 (raw gates need use_gate_in_kernel)")
        if name == "beta" and not (least >= 0 and most <= 1):
            raise ValueError(
                f"beta spans {least} to {most}; wanted [0, 1] (logits need the production contract)"
            )
    return _aligned(array, dtype)


def _per_head(name: str, array: Array | None, shape: tuple[int, ...], contract: str) -> Array | None:
    if contract == "plain":
        return None
    if array is None:
        return _aligned(np.zeros(shape, np.float32), np.dtype(np.float32))
    if not isinstance(array, np.ndarray) or array.dtype != np.float32 or array.size != math.prod(shape):
        raise ValueError(f"{name} must be float32 with {shape} values")
    return _aligned(array.reshape(shape), np.dtype(np.float32))


def _initial(state: Array | None, shape: tuple[int, ...], v_first: bool) -> Array | None:
    """[N, HV, V, K], whatever the caller's layout is."""
    if state is None:
        return None
    N, HV, V, K = shape
    _require_shape("initial_state", state, shape if v_first else (N, HV, K, V))
    if state.dtype != np.float32:
        raise ValueError(f"initial_state is {state.dtype}; states are float32")
    return _aligned(state if v_first else state.swapaxes(-1, -2), np.dtype(np.float32))


def _empty(shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
    """Like np.empty, starting on a 64-byte boundary as the kernels may assume."""
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def _aligned(array: Array, dtype: npt.DTypeLike) -> Array:
    """The array itself when it is contiguous, aligned and of the dtype; else a copy that is."""
    if array.dtype == dtype and array.flags.c_contiguous and array.ctypes.data % _ALIGNMENT == 0:
        return array
    copy = _empty(array.shape, dtype)
    copy[...] = array
    return copy


class _Library:
    """A loaded kernel. Calls may come from several threads: each has a workspace of its own."""

    def __init__(self, path: Path, entry: str) -> None:
        library = ctypes.CDLL(str(path))
        self._entry = getattr(library, entry)
        self._entry.restype = None
        self._entry.argtypes = [
            *[ctypes.c_void_p] * _POINTERS,
            *[ctypes.c_int64] * _SIZES,
            *[ctypes.c_float] * _SCALARS,
        ]
        self._workspace_bytes = getattr(library, f"{entry}_workspace")
        self._workspace_bytes.restype = ctypes.c_int64
        self._workspace_bytes.argtypes = [ctypes.c_int64] * _SIZES
        self._local = threading.local()

    def __call__(
        self,
        *,
        pointers: tuple[Array | None, ...],
        sizes: tuple[int, int, int, int],
        scalars: tuple[float, float],
    ) -> None:
        workspace = self._workspace(self._workspace_bytes(*sizes))
        addresses = (None if x is None else x.ctypes.data for x in pointers)
        self._entry(*addresses, workspace.ctypes.data, *sizes, *scalars)

    def _workspace(self, size: int) -> Array:
        kept: Array | None = getattr(self._local, "workspace", None)
        if kept is None or kept.size < size:
            kept = self._local.workspace = _empty((max(size, 1),), np.uint8)
        return kept


_loading = threading.Lock()


def _library(choice: Choice) -> _Library:
    with _loading:
        return _load(choice)


@cache
def _load(choice: Choice) -> _Library:
    kernel = shipped(choice)
    _check_processor(kernel.manifest["cpu"])
    return _Library(kernel.library, kernel.manifest["entry"])


def _check_processor(built_for: Mapping[str, Any]) -> None:
    """The objects hold every instruction of the processor they were built on (-march=native)."""
    machine, model, flags = _processor()
    missing = sorted(set(built_for["flags"]) - flags) if flags else []
    unknown = not flags and model != built_for["model"]
    if machine != built_for["machine"] or missing or unknown:
        lacks = f", which has {' '.join(missing[:8])} that this one lacks" if missing else ""
        raise RuntimeError(
            f"these kernels were built for {built_for['model']} ({built_for['machine']}){lacks}; "
            f"this is {model} ({machine}): export again on this machine"
        )
    if model != built_for["model"]:
        warnings.warn(f"kernels were built and timed on {built_for['model']}, this is {model}", stacklevel=5)


@cache
def _processor() -> tuple[str, str, frozenset[str]]:
    """(machine, model, instruction set flags; empty where the system does not tell)."""
    model, flags = platform.processor() or "unknown", frozenset[str]()
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text(encoding="utf-8") if cpuinfo.exists() else ""
    for line in text.split("\n\n")[0].splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            model = value.strip()
        elif key.strip() in ("flags", "Features"):
            flags = frozenset(value.split())
    return platform.machine(), model, flags
