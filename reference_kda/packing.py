"""Packed variable-length rows regrouped so that one array operation serves all sequences."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from evotune.reference_kda.namespace import Array, Namespace


@dataclass(frozen=True)
class Packing:
    """Every sequence cut into chunks of C rows; chunk c of all sequences that have one is contiguous.

    Sequences are taken longest first, so those still running at step c are a prefix of them.

    Attributes:
        rows: [chunks, C], the row of each token, -1 where a last chunk is padded.
        steps: for step c the slice of `rows`; its length is the number of sequences still running.
        order: [N], sequences longest first.
    """

    rows: npt.NDArray[np.int64]
    steps: tuple[slice, ...]
    order: npt.NDArray[np.int64]

    @classmethod
    def of(cls, cu_seqlens: tuple[int, ...], C: int) -> "Packing":
        starts = np.asarray(cu_seqlens[:-1], np.int64)
        lengths = np.diff(np.asarray(cu_seqlens, np.int64))
        order = np.argsort(-lengths, kind="stable")
        counts = -(-lengths[order] // C)
        rows, steps, done = [np.zeros((0, C), np.int64)], [], 0
        for c in range(int(counts[0]) if len(counts) else 0):
            running = order[: int(np.count_nonzero(counts > c))]
            token = c * C + np.arange(C)
            rows.append(np.where(token < lengths[running, None], starts[running, None] + token, -1))
            steps.append(slice(done, done + len(running)))
            done += len(running)
        return cls(np.concatenate(rows), tuple(steps), order)

    def pack(self, x: Array, xp: Namespace) -> Array:
        """[T, …] to [chunks, C, …]; padding is zero."""
        mask = (self.rows >= 0).reshape(self.rows.shape + (1,) * (x.ndim - 1))
        taken = x[_like(np.maximum(self.rows, 0), x, xp)]
        return xp.where(_like(mask, x, xp), taken, xp.zeros((), dtype=x.dtype, device=x.device))

    def unpack(self, y: Array, T: int, xp: Namespace) -> Array:
        """[chunks, C, …] to [T, …]; rows of no sequence are zero."""
        flat_rows = self.rows.reshape(-1)
        real = np.flatnonzero(flat_rows >= 0)
        out = xp.zeros((T, *y.shape[2:]), dtype=y.dtype, device=y.device)
        flat = y.reshape(-1, *y.shape[2:])
        out[_like(flat_rows[real], y, xp)] = flat[_like(real, y, xp)]
        return out

    def sort(self, states: Array, xp: Namespace) -> Array:
        """[N, …] in the callers' order to longest first."""
        return states[_like(self.order, states, xp)]

    def unsort(self, states: Array, xp: Namespace) -> Array:
        return states[_like(np.argsort(self.order), states, xp)]


def _like(index: npt.NDArray[np.generic], x: Array, xp: Namespace) -> Array:
    return index if xp is np else xp.asarray(index, device=x.device)
