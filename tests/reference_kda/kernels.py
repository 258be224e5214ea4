"""Kernels written plainly in numpy: honest ones outside the tolerance's ensemble, and broken ones.

Each works on a `Problem` in float32 and answers with a `Result`; `answer` runs one
as a compiled kernel would be.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from evotune.reference_kda import Form, KdaCase, Problem, Question, Result, activate, chunked, recurrence
from evotune.reference_kda.namespace import DTYPES, Array, to_bfloat16

Kernel = Callable[[Problem], Result]


def answer(kernel: Kernel, question: Question) -> dict[str, Array]:
    """Outputs by name, stored in their C types."""
    w = question.workload
    with np.errstate(all="ignore"):
        result = kernel(activate(question.inputs, w.contract, w.scale, np.float32))
        o = result.o.astype(DTYPES[w.dtype])
        return {"o": o, "final_state": np.ascontiguousarray(result.final_state, np.float32)}


def ratio(kernel: Kernel, case: KdaCase) -> float:
    return case.worst(answer(kernel, case)).ratio


def _per_sequence(p: Problem) -> Iterator[tuple[int, slice]]:
    for n, (start, stop) in enumerate(zip(p.cu_seqlens[:-1], p.cu_seqlens[1:], strict=True)):
        yield n, slice(start, stop)


def _expanded(x: Array, p: Problem) -> Array:
    """[T, H, K] to [HV, T, K], each value head beside its q/k head."""
    return np.ascontiguousarray(x[:, p.head_of].swapaxes(0, 1))


@dataclass(frozen=True)
class TokenLoop:
    """The recurrence with every decision a field; the defaults are right."""

    gate_shift: int = 0
    decay_last: bool = False
    beta_power: int = 1
    scaled: bool = True
    read_before_update: bool = False
    undecayed_correction: bool = False
    state_dtype: str = "float32"
    reset: bool = True
    swap_heads: bool = False
    reverse_channels: bool = False
    stop_early: int = 0
    carries_state_in: bool = True

    def __call__(self, p: Problem) -> Result:
        if self.swap_heads:
            H, HV = p.q.shape[1], p.v.shape[1]
            tiled = [hv % H for hv in range(HV)]
            p = replace(p, q=p.q[:, tiled], k=p.k[:, tiled])
        if self.reverse_channels:
            r = self._run(
                replace(p, q=p.q[..., ::-1], k=p.k[..., ::-1], g=p.g[..., ::-1], initial_state=_flip(p))
            )
            return Result(r.o, r.final_state[..., ::-1])
        return self._run(p)

    def _run(self, p: Problem) -> Result:
        q, k, v, g = _expanded(p.q, p), _expanded(p.k, p), p.v.swapaxes(0, 1), p.g.swapaxes(0, 1)
        o, final = np.zeros_like(p.v), p.initial(np)
        if not self.carries_state_in:
            final[:] = 0
        S = final[0] if len(final) else None
        for n, rows in _per_sequence(p):
            S = final[n] if self.reset or S is None else S
            for t in range(rows.start, rows.stop):
                gate = g[:, max(t - self.gate_shift, rows.start)]
                S = self._token(S, q[:, t], k[:, t], v[:, t], gate, p.beta[t], o[t], p.scale)
                if t < rows.stop - self.stop_early:
                    final[n] = S
        return Result(o, final.swapaxes(-1, -2))

    def _token(self, S, q, k, v, g, beta, o, scale):  # type: ignore[no-untyped-def]
        before = S
        if not self.decay_last:
            S = S * np.exp(g)[..., None]
        seen = before if self.undecayed_correction else S
        u = (v - _read(k, seen)) * (beta**self.beta_power)[:, None]
        if self.read_before_update:
            o[:] = _read(q, S)
        S = S + k[..., None] * u[:, None, :]
        if self.decay_last:
            S = S * np.exp(g)[..., None]
        if self.state_dtype == "bfloat16":
            S = to_bfloat16(S, np)
        if not self.read_before_update:
            o[:] = _read(q, S)
        if self.scaled:
            o *= np.float32(scale)
        return S


def _flip(p: Problem) -> Array | None:
    return None if p.initial_state is None else p.initial_state[..., ::-1]


def _read(x: Array, S: Array) -> Array:
    """Sᵀ x by the BLAS, in whatever order it likes."""
    return np.matmul(x[:, None, :], S)[:, 0]


@dataclass(frozen=True)
class ChunkLoop:
    """Chunks of C with start anchors, decays as running products rather than exponentials of sums."""

    C: int = 16
    neumann: int | None = None
    drops_inter: bool = False
    drops_correction: bool = False
    diagonal: bool = True
    last_only: bool = False
    final_one_early: bool = False
    tail_decay: bool = True

    def __call__(self, p: Problem) -> Result:
        q, k, v, g = _expanded(p.q, p), _expanded(p.k, p), p.v.swapaxes(0, 1), p.g.swapaxes(0, 1)
        o, final = np.zeros_like(p.v), p.initial(np)
        for n, rows in _per_sequence(p):
            S = final[n].copy()
            for start in range(rows.start, rows.stop, self.C):
                at = slice(start, min(start + self.C, rows.stop))
                is_last = at.stop == rows.stop
                if self.final_one_early and is_last:
                    final[n] = S
                beta = p.beta[at].T[..., None]
                out, S = self._chunk(q[:, at] * np.float32(p.scale), k[:, at], v[:, at], g[:, at], beta, S)
                o[at] = 0 if self.last_only and not is_last else out.swapaxes(0, 1)
            if not (self.final_one_early and rows.stop > rows.start):
                final[n] = S
        return Result(o, final.swapaxes(-1, -2))

    def _chunk(self, q, k, v, g, beta, S):  # type: ignore[no-untyped-def]
        D = np.cumprod(np.exp(g), axis=1)
        kk = np.tril((k * D) @ (k / D).swapaxes(-1, -2), -1) * beta
        qk = np.tril((q * D) @ (k / D).swapaxes(-1, -2), 0 if self.diagonal else -1)
        corrected = v if self.drops_correction else v - (k * D) @ S
        u = self._inverse(kk) @ (beta * corrected)
        out = qk @ u if self.drops_inter else (q * D) @ S + qk @ u
        end = D[:, -1:] if self.tail_decay else np.ones_like(D[:, -1:])
        return out, end.swapaxes(-1, -2) * S + (k * (end / D)).swapaxes(-1, -2) @ u

    def _inverse(self, L: Array) -> Array:
        eye = np.broadcast_to(np.eye(L.shape[-1], dtype=L.dtype), L.shape)
        if self.neumann is None:
            return np.linalg.inv(eye + L)
        total = term = eye
        for _ in range(self.neumann):
            term = -term @ L
            total = total + term
        return total


def in_form(**fields: object) -> Kernel:
    form = Form(**fields)  # type: ignore[arg-type]
    return lambda p: chunked(p, form)


HONEST_FLOAT32: dict[str, Kernel] = {
    "recurrence, sums by BLAS": TokenLoop(),
    "recurrence, channels backwards": TokenLoop(reverse_channels=True),
    "running products, chunks of 16": ChunkLoop(),
    "running products, chunks of 8": ChunkLoop(C=8),
    "chunks of 4": in_form(chunk=4, block=4, anchor="before"),
    "chunks of 16, pairwise": in_form(chunk=16, block=1),
    "chunks of 32, middle anchor": in_form(chunk=32, block=32, anchor="middle", exponential="2"),
    "chunks of 32 in blocks of 16": in_form(chunk=32, block=16, anchor="before"),
    "chunks of 64, pairwise": in_form(chunk=64, block=1, exponential="2"),
}

HONEST_BFLOAT16: dict[str, Kernel] = {
    **HONEST_FLOAT32,
    "bfloat16, chunks of 8": in_form(chunk=8, block=8, anchor="before", operands="bfloat16"),
    "bfloat16, chunks of 16, pairwise": in_form(chunk=16, block=1, operands="bfloat16"),
    "bfloat16, chunks of 32, middle anchor": in_form(
        chunk=32, block=32, anchor="middle", operands="bfloat16"
    ),
    "bfloat16, chunks of 32 in blocks of 16": in_form(
        chunk=32, block=16, exponential="2", operands="bfloat16"
    ),
    "bfloat16, chunks of 64, pairwise": in_form(chunk=64, block=1, operands="bfloat16"),
    "tf32, chunks of 16": in_form(chunk=16, block=16, operands="tfloat32"),
    "tf32, chunks of 64": in_form(chunk=64, block=16, operands="tfloat32"),
}


def _zeros(p: Problem) -> Result:
    return Result(np.zeros_like(p.v), p.initial(np).swapaxes(-1, -2))


def _transposed_state(p: Problem) -> Result:
    r = recurrence(p)
    N, HV, V, K = r.final_state.shape
    return Result(r.o, r.final_state.swapaxes(-1, -2).reshape(N, HV, V, K))


def _transposed_initial_state(p: Problem) -> Result:
    s = p.initial_state
    return recurrence(
        replace(p, initial_state=None if s is None else s.swapaxes(-1, -2).reshape(s.shape).copy())
    )


def _nan_in_one_place(p: Problem) -> Result:
    r = recurrence(p)
    r.o[-1, -1, -1] = np.nan
    return r


def _gates_of_first_head(p: Problem) -> Result:
    return recurrence(replace(p, g=np.broadcast_to(p.g[:, :1], p.g.shape)))


MUTANTS: dict[str, Kernel] = {
    "zeros": _zeros,
    "one NaN": _nan_in_one_place,
    "only the last chunk": ChunkLoop(last_only=True),
    "no inter-chunk term": ChunkLoop(drops_inter=True),
    "no correction by the state": ChunkLoop(drops_correction=True),
    "token does not see itself": ChunkLoop(diagonal=False),
    "state not decayed over a chunk": ChunkLoop(tail_decay=False),
    "final state one chunk early": ChunkLoop(final_one_early=True),
    "final state one token early": TokenLoop(stop_early=1),
    "gate of the token before": TokenLoop(gate_shift=1),
    "decay after the update": TokenLoop(decay_last=True),
    "correction reads the undecayed state": TokenLoop(undecayed_correction=True),
    "read before the update": TokenLoop(read_before_update=True),
    "beta ignored": TokenLoop(beta_power=0),
    "beta twice": TokenLoop(beta_power=2),
    "no scale": TokenLoop(scaled=False),
    "grouped heads interleaved": TokenLoop(swap_heads=True),
    "state runs on into the next sequence": TokenLoop(reset=False),
    "initial state ignored": TokenLoop(carries_state_in=False),
    "final state transposed": _transposed_state,
    "initial state transposed": _transposed_initial_state,
    "every head gated as the first": _gates_of_first_head,
}
