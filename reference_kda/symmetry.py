"""Exact symmetries of KDA: from one solved problem many, with truths and bounds that follow without rounding.

- K channels of a q/k head permuted, and their signs flipped, together in q, k, the state (and g, dt_bias, by
  permutation alone): o is unchanged, the final state follows.
- V channels of a value head permuted, signs flipped, v and the state scaled by one power of two: o and the
  final state follow. Whole blocks of 16 rows are permuted, and rows within a block, so bounds follow too.
- q/k heads permuted with their groups of value heads, value heads permuted within a group.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from evotune.reference_kda.namespace import Array
from evotune.reference_kda.tolerance import ROWS, Extent

Index = npt.NDArray[np.int64]
Factor = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Symmetry:
    """New head h is old head `head[h]`, new channel c of it old channel `k_channel[c]`, and so on.

    Attributes:
        head: [H]; value_head: [HV].
        k_channel: [K], shared by all heads; k_sign: [H, K], by new head and new channel.
        v_block: [ceil(V / 16)], v_channel: [V], shared by all heads.
        v_factor: [HV, V], a sign times the value head's power of two.
    """

    head: Index
    value_head: Index
    k_channel: Index
    k_sign: Factor
    v_block: Index
    v_channel: Index
    v_factor: Factor

    @classmethod
    def of_heads(cls, H: int, HV: int, K: int, V: int, rng: np.random.Generator) -> "Symmetry":
        """Heads and nothing else."""
        head, group = rng.permutation(H), HV // H
        within = np.stack([rng.permutation(group) for _ in range(H)])
        return cls(
            head=head,
            value_head=(head[:, None] * group + within).reshape(-1),
            k_channel=np.arange(K),
            k_sign=np.ones((H, K), np.float32),
            v_block=np.arange(-(-V // ROWS)),
            v_channel=np.arange(V),
            v_factor=np.ones((HV, V), np.float32),
        )

    @classmethod
    def draw(cls, H: int, HV: int, K: int, V: int, rng: np.random.Generator) -> "Symmetry":
        v_block = _block_permutation(V, rng)
        v_channel = np.concatenate(
            [rng.permutation(np.arange(b * ROWS, min(V, (b + 1) * ROWS))) for b in v_block]
        )
        exponent = rng.integers(-1, 2, (HV, 1))
        return replace(
            cls.of_heads(H, HV, K, V, rng),
            k_channel=rng.permutation(K),
            k_sign=_signs((H, K), rng),
            v_block=v_block,
            v_channel=v_channel,
            v_factor=_signs((HV, V), rng) * np.float32(2) ** exponent.astype(np.float32),
        )

    @property
    def head_of(self) -> Index:
        """New q/k head of every new value head."""
        HV, H = len(self.value_head), len(self.head)
        return np.arange(HV) // (HV // H)

    def inputs(self, inputs: dict[str, Array | None]) -> dict[str, Array | None]:
        """Kernel arguments transformed; dtypes kept, arrays contiguous, None stays None."""
        out = dict(inputs)
        for name in ("q", "k"):
            out[name] = _times(self._pick(inputs[name], self.head, self.k_channel), self.k_sign)
        out["v"] = _times(self._pick(inputs["v"], self.value_head, self.v_channel), self.v_factor)
        for name in ("g", "dt_bias"):
            if inputs[name] is not None:
                out[name] = self._pick(inputs[name], self.value_head, self.k_channel)
        for name in ("beta", "A_log"):
            array = inputs[name]
            out[name] = None if array is None else np.ascontiguousarray(array[..., self.value_head])
        if inputs["initial_state"] is not None:
            out["initial_state"] = self.state(inputs["initial_state"])
        return out

    def output(self, o: Array) -> Array:
        """[T, HV, V]."""
        return _times(self._pick(o, self.value_head, self.v_channel), self.v_factor)

    def state(self, state: Array) -> Array:
        """[N, HV, V, K]."""
        N, HV, V, K = state.shape
        index = (self.value_head[:, None, None] * V + self.v_channel[:, None]) * K + self.k_channel
        moved = state.reshape(N, HV * V * K).take(index.reshape(-1), axis=1).reshape(N, HV, V, K)
        factor = self.v_factor[:, :, None] * self.k_sign[self.head_of][:, None, :]
        return _times(moved, factor)

    def bound(self, bound: Extent) -> Extent:
        size = np.abs(self.v_factor[:, 0]).astype(np.float64)  # [HV]
        blocks = np.ix_(np.arange(len(bound.state_rms)), self.value_head, self.v_block)
        return Extent(
            bound.o_rms[:, self.value_head] * size,
            bound.o_max[:, self.value_head] * size,
            bound.state_rms[blocks] * size[:, None],
            bound.state_max[blocks] * size[:, None],
        )

    @staticmethod
    def _pick(x: Array, heads: Index, channels: Index) -> Array:
        """[…, heads, channels] gathered in one pass over the last two axes."""
        lead, (h, c) = x.shape[:-2], x.shape[-2:]
        index = (heads[:, None] * c + channels).reshape(-1)
        return x.reshape(*lead, h * c).take(index, axis=-1).reshape(*lead, len(heads), len(channels))


def _times(x: Array, factor: Factor) -> Array:
    """Exact: factors are ± powers of two."""
    return x * factor.astype(x.dtype)


def _signs(shape: tuple[int, ...], rng: np.random.Generator) -> Factor:
    return (1 - 2 * rng.integers(0, 2, shape)).astype(np.float32)


def _block_permutation(V: int, rng: np.random.Generator) -> Index:
    """Whole blocks of 16 rows permuted; a last, partial one stays."""
    whole, partial = divmod(V, ROWS)
    return np.append(rng.permutation(whole), [whole] * bool(partial)).astype(np.int64)
