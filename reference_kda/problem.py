"""What the oracles take and give: activated inputs of one packed batch, outputs and final states."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from evotune.reference_kda.namespace import Array, Namespace

LOWER_BOUND = -5.0
"""The bounded gate's floor per token, in nats; also the floor promised by the plain contract's log decay."""

L2_EPSILON = 1e-6


@dataclass(frozen=True)
class Problem:
    """One packed batch with gate, beta and norm already applied.

    Attributes:
        q, k: [T, H, K].
        v: [T, HV, V]; value head hv reads q/k head hv // (HV // H).
        g: [T, HV, K], natural log of the decay, <= 0.
        beta: [T, HV], in [0, 1].
        initial_state: [N, HV, V, K] or None for zeros.
        cu_seqlens: N + 1 row numbers; sequence n is rows cu_seqlens[n] to cu_seqlens[n + 1]. Rows past the
            last one belong to no sequence and are never read.
        scale: factor on q.
    """

    q: Array
    k: Array
    v: Array
    g: Array
    beta: Array
    initial_state: Array | None
    cu_seqlens: tuple[int, ...]
    scale: float

    @property
    def sequences(self) -> int:
        return len(self.cu_seqlens) - 1

    @property
    def value_heads(self) -> int:
        return int(self.v.shape[1])

    @property
    def head_of(self) -> list[int]:
        """The q/k head of every value head."""
        group = self.value_heads // int(self.q.shape[1])
        return [hv // group for hv in range(self.value_heads)]

    def initial(self, xp: Namespace) -> Array:
        """[N, HV, K, V], K-first, a fresh copy."""
        if self.initial_state is not None:
            return swap_state_layout(self.initial_state)
        shape = (self.sequences, self.value_heads, self.k.shape[2], self.v.shape[2])
        return xp.zeros(shape, dtype=self.v.dtype, device=self.v.device)


@dataclass(frozen=True)
class Result:
    """`o` [T, HV, V] (zero in rows of no sequence) and `final_state` [N, HV, V, K]."""

    o: Array
    final_state: Array


def swap_state_layout(state: Array) -> Array:
    """[N, HV, V, K] (V-first: ours and FlashKDA's) to [N, HV, K, V] (fla's default), and back. A copy."""
    swapped = state.swapaxes(-1, -2)
    return np.ascontiguousarray(swapped) if isinstance(state, np.ndarray) else swapped.contiguous()


def activate(
    inputs: Mapping[str, Array | None], contract: str, scale: float, dtype: object, xp: Namespace = np
) -> Problem:
    """Kernel arguments by name to a `Problem` in `dtype`, arithmetic included.

    The plain contract takes q, k, g, beta done. The production contract (Kimi Linear with the bounded gate)
    computes, in `dtype`: q, k ← x · rsqrt(Σ x² + 1e-6); g ← LOWER_BOUND · sigmoid(exp(A_log) (g + dt_bias));
    beta ← sigmoid(beta).
    """
    cu = inputs["cu_seqlens"]
    assert cu is not None
    given = {
        name: _cast(x, dtype, xp) for name, x in inputs.items() if x is not None and name != "cu_seqlens"
    }
    q, k, g, beta = given["q"], given["k"], given["g"], given["beta"]
    if contract == "production":
        q, k = _unit(q, xp), _unit(k, xp)
        rate = xp.exp(given["A_log"])[:, None]
        g = LOWER_BOUND * _sigmoid(rate * (g + given["dt_bias"]), xp)
        beta = _sigmoid(beta, xp)
    rows = tuple(int(c) for c in cu)
    return Problem(q, k, given["v"], g, beta, given.get("initial_state"), rows, scale)


def _unit(x: Array, xp: Namespace) -> Array:
    return x / xp.sqrt((x * x).sum(-1) + L2_EPSILON)[..., None]


def _cast(x: Array, dtype: object, xp: Namespace) -> Array:
    return x.astype(dtype) if xp is np else x.to(dtype)


def _sigmoid(x: Array, xp: Namespace) -> Array:
    """1 / (1 + e^-x), through e^-|x| so that nothing overflows."""
    e = xp.exp(-abs(x))
    return xp.where(x >= 0, 1 / (1 + e), e / (1 + e))
