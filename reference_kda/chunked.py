"""The chunk (WY) form, derived apart from the recurrence; also the emulation of honest low-precision kernels.

With G_i the inclusive cumulative log decay inside a chunk of C tokens and S the state that enters it:

    P_ij = Σ_c a_ic b_jc exp(G_ic − G_jc), i >= j                    `decayed_products`
    L = strict lower part of Diag(beta) P(k, k),   M = P(scale q, k), lower part with its diagonal
    X = (I + L)⁻¹                                                    by forward substitution
    U = X Diag(beta) (V − (k e^G) S)
    O = (scale q e^G) S + M U
    S ← Diag(e^{G_C}) S + (k e^{G_C − G})ᵀ U

(Kimi Linear, section 3; Yang et al. 2024, "Parallelizing linear transformers with the delta rule".) Rows of
one product share an anchor A per channel, exp(G_i − A) exp(A − G_j), since a per-channel decay cannot be
factored out afterwards; how many rows share one decides what overflows. 16 rows at −5 a token reach e^80,
which float32 and bfloat16 hold; one row (pairwise) never has a positive exponent.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from evotune.reference_kda.namespace import Array, Namespace, to_bfloat16, to_tfloat32
from evotune.reference_kda.packing import Packing
from evotune.reference_kda.problem import Problem, Result

LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class Form:
    """How a chunked kernel arranges and rounds its arithmetic.

    Attributes:
        chunk: C, tokens per chunk.
        block: rows that share an anchor; 1 is pairwise and safe for any gate.
        anchor: the row whose cumulative decay is the anchor: the one before the block, its first, its middle.
        exponential: e^x, or 2^x of decays scaled by log2(e) before they are summed.
        operands: what matrix products round their operands to; sums and state keep the dtype of the problem.
    """

    chunk: int = 64
    block: int = 16
    anchor: Literal["before", "first", "middle"] = "first"
    exponential: Literal["e", "2"] = "e"
    operands: Literal["full", "tfloat32", "bfloat16"] = "full"


PAIRWISE = Form(chunk=16, block=1)
"""No positive exponent anywhere: the form for float64 and for any gate."""


@dataclass(frozen=True)
class Intermediates:
    """Named quantities in the order in which a chunked kernel makes them, chunks as `packing` orders them.

    Attributes:
        decay: [chunks, HV, C, K], G.
        kk: [chunks, HV, C, C], L.
        qk: [chunks, HV, C, C], M.
        inverse: [chunks, HV, C, C], X.
        u: [chunks, HV, C, V].
        state: [chunks, HV, K, V], the state after the chunk.
    """

    packing: Packing
    decay: Array
    kk: Array
    qk: Array
    inverse: Array
    u: Array
    state: Array


def chunked(problem: Problem, form: Form = PAIRWISE, xp: Namespace = np) -> Result:
    """The chunk form in the dtype of the problem's arrays; see `Form` for what may vary."""
    result, _ = chunked_with_intermediates(problem, form, xp)
    return result


def chunked_with_intermediates(
    problem: Problem, form: Form = PAIRWISE, xp: Namespace = np
) -> tuple[Result, Intermediates]:
    """As `chunked`, with what a debug build would write."""
    packing = Packing.of(problem.cu_seqlens, form.chunk)
    head_of, exp, product = problem.head_of, _exponential(form, xp), _product(form, xp)
    q = _heads_first(packing.pack(problem.q[:, head_of], xp)) * problem.scale  # [chunks, HV, C, K]
    k = _heads_first(packing.pack(problem.k[:, head_of], xp))
    v = _heads_first(packing.pack(problem.v, xp))  # [chunks, HV, C, V]
    beta = packing.pack(problem.beta, xp).swapaxes(1, 2)[..., None]  # [chunks, HV, C, 1]
    unit = LOG2_E if form.exponential == "2" else 1.0
    G = xp.cumsum(_heads_first(packing.pack(problem.g, xp)) * unit, 2)
    kk, qk = decayed_products((k, q), k, G, form, xp)
    kk = xp.tril(beta * kk, -1)
    X = inverse_of_unit_lower(kk, xp)
    to_start, to_end, whole = exp(G), exp(G[:, :, -1:] - G), exp(G[:, :, -1])[..., None]
    q_in, k_in, k_out = q * to_start, k * to_start, (k * to_end).swapaxes(-1, -2)
    S = packing.sort(problem.initial(xp), xp)  # [N, HV, K, V]
    o, u = (
        xp.zeros(v.shape, dtype=v.dtype, device=v.device),
        xp.zeros(v.shape, dtype=v.dtype, device=v.device),
    )
    states = xp.zeros((k.shape[0], *S.shape[1:]), dtype=v.dtype, device=v.device)
    for step in packing.steps:
        n = step.stop - step.start
        u[step] = product(X[step], beta[step] * (v[step] - product(k_in[step], S[:n])))
        o[step] = product(q_in[step], S[:n]) + product(qk[step], u[step])
        S[:n] = whole[step] * S[:n] + product(k_out[step], u[step])
        states[step] = S[:n]
    rows = packing.unpack(o.swapaxes(1, 2), problem.v.shape[0], xp)
    result = Result(rows, packing.unsort(S, xp).swapaxes(-1, -2))
    return result, Intermediates(packing, G / unit, kk, qk, X, u, states)


def decayed_products(
    lefts: Sequence[Array], b: Array, G: Array, form: Form, xp: Namespace = np
) -> list[Array]:
    """P_ij = Σ_c a_ic b_jc exp(G_ic − G_jc) for i >= j, zero above, for several a: [B, HV, C, K] to
    [B, HV, C, C] each. What they share is computed once."""
    C, exp, product = b.shape[2], _exponential(form, xp), _product(form, xp)
    out = [xp.zeros((*b.shape[:3], C), dtype=b.dtype, device=b.device) for _ in lefts]
    for first in range(0, C, form.block):
        last = min(first + form.block, C)
        anchor = _anchor(G, first, last, form)
        rise = exp(G[:, :, first:last] - anchor)
        right = (b[:, :, :last] * exp(anchor - G[:, :, :last])).swapaxes(-1, -2)
        for a, found in zip(lefts, out, strict=True):
            found[:, :, first:last, :last] = product(a[:, :, first:last] * rise, right)
    return [xp.tril(found) for found in out]


def _anchor(G: Array, first: int, last: int, form: Form) -> Array:
    """[B, HV, 1, K]."""
    row = {"before": first - 1, "first": first, "middle": (first + last) // 2}[form.anchor]
    return G[:, :, row : row + 1] if row >= 0 else 0 * G[:, :, :1]


def inverse_of_unit_lower(L: Array, xp: Namespace = np) -> Array:
    """(I + L)⁻¹ for strictly lower L [B, HV, C, C], row by row: X_i = e_i − Σ_{j<i} L_ij X_j.

    Forward substitution is backward stable; powers of L (Neumann, Newton) reach binomial size when keys
    repeat.
    """
    X = xp.zeros(L.shape, dtype=L.dtype, device=L.device)
    for i in range(L.shape[-1]):
        X[..., i, i] = 1
        X[..., i, :i] = -xp.matmul(L[..., i : i + 1, :i], X[..., :i, :i])[..., 0, :]
    return X


def _heads_first(x: Array) -> Array:
    return x.swapaxes(1, 2)


def _exponential(form: Form, xp: Namespace) -> Callable[[Array], Array]:
    exponential: Callable[[Array], Array] = xp.exp2 if form.exponential == "2" else xp.exp
    return exponential


def _product(form: Form, xp: Namespace) -> Callable[[Array, Array], Array]:
    """Matrix product with both operands rounded as the form says."""
    if form.operands == "full":
        multiply: Callable[[Array, Array], Array] = xp.matmul
        return multiply
    rounded = to_bfloat16 if form.operands == "bfloat16" else to_tfloat32
    return lambda a, b: xp.matmul(rounded(a, xp), rounded(b, xp))
