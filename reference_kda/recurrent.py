"""The definition of KDA, token by token. In float64 it is the truth that kernels are judged by."""

import numpy as np

from evotune.reference_kda.namespace import Array, Namespace
from evotune.reference_kda.packing import Packing
from evotune.reference_kda.problem import Problem, Result


def recurrence(problem: Problem, xp: Namespace = np) -> Result:
    """Run the recurrence in the dtype of the problem's arrays.

    Per sequence and value head, S [K, V]:

        S ← Diag(exp(g_t)) S
        u ← beta_t (v_t − Sᵀ k_t)          the correction reads the decayed state
        S ← S + k_t uᵀ
        o_t ← Sᵀ (scale · q_t)             read after the update: token t sees itself

    (Kimi Linear, equation 1; fla `ops/kda/naive.py`.) With numpy every sum over K runs in channel order
    without fused multiply-add, which makes the float32 form the plain C loop that rounds most among honest
    ones.
    """
    packing = Packing.of(problem.cu_seqlens, 1)
    head_of = problem.head_of
    q = packing.pack(problem.q[:, head_of], xp)[:, 0, :, :, None] * problem.scale  # [tokens, HV, K, 1]
    k = packing.pack(problem.k[:, head_of], xp)[:, 0, :, :, None]
    v = packing.pack(problem.v, xp)[:, 0]  # [tokens, HV, V]
    decay = xp.exp(packing.pack(problem.g, xp)[:, 0, :, :, None])
    beta = packing.pack(problem.beta, xp)[:, 0, :, None]
    S = packing.sort(problem.initial(xp), xp)  # [N, HV, K, V]
    o = xp.zeros(v.shape, dtype=v.dtype, device=v.device)
    for step in packing.steps:
        running = S[: step.stop - step.start]
        running *= decay[step]
        u = beta[step] * (v[step] - _contract(k[step], running))
        running += k[step] * u[:, :, None, :]
        o[step] = _contract(q[step], running)
    final = packing.unsort(S, xp).swapaxes(-1, -2)
    return Result(packing.unpack(o[:, None], problem.v.shape[0], xp), final)


def _contract(x: Array, S: Array) -> Array:
    """Sᵀ x: [n, HV, K, 1] and [n, HV, K, V] to [n, HV, V]."""
    return (x * S).sum(-2)
