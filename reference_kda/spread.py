"""A problem of many heads whose answer is known without solving it: each head is an image of a solved one.

A timed workload has 64 heads of 8,192 tokens; the float64 truth of all would take minutes, their numbers
700 MB. So a *pool* of one or two heads is solved, and the problem is made of `copies` of it, each under a
symmetry of its own (see `symmetry`). Where the kernel runs, its arguments are gathered from the pool's by
tables of a few MB, and any copy's outputs can be compared with the pool's truth under that copy's symmetry.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from evotune.reference_kda.case import KdaCase, KdaDiscrepancy, Question
from evotune.reference_kda.namespace import Array
from evotune.reference_kda.symmetry import Symmetry
from evotune.reference_kda.workload import Workload

_HEAD_AXIS = {"o": 1, "final_state": 1}
_LARGEST_POOL = 2


@dataclass(frozen=True)
class KdaGather:
    """New element j of each row is old element `index[j]` of it, times `factor[j]`.

    A row is what follows `lead` axes, flattened: tokens for [T, H, K], nothing for dt_bias [HV, K].

    Attributes:
        index: int32 [elements of a new row].
        factor: ± powers of two, float32 of the same shape, or None for ones.
    """

    lead: int
    index: npt.NDArray[np.int32]
    factor: npt.NDArray[np.float32] | None = None


def pool_of(workload: Workload) -> Workload:
    """The small problem that a large one is made of: two q/k heads where H is even, else one."""
    heads = _LARGEST_POOL if workload.heads % _LARGEST_POOL == 0 else 1
    group = workload.value_heads // workload.heads
    return replace(workload, name=f"{workload.name} pool", heads=heads, value_heads=heads * group)


@dataclass(frozen=True)
class KdaSpread(Question):
    """A large question and, copy by copy, its answer. `inputs` have shapes and types only: all their elements
    are one and the same in memory."""

    pool: KdaCase
    symmetries: tuple[Symmetry, ...]

    @classmethod
    def draw(cls, workload: Workload, pool: KdaCase, rng: np.random.Generator) -> "KdaSpread":
        """Fresh symmetries for every copy. `pool` solves `pool_of(workload)`."""
        p = pool.workload
        copies = workload.heads // p.heads
        symmetries = tuple(Symmetry.draw(p.heads, p.value_heads, p.K, p.V, rng) for _ in range(copies))
        return cls(workload.name, workload, _blanks(workload, pool.inputs), pool, symmetries)

    @property
    def copies(self) -> int:
        return len(self.symmetries)

    @property
    def sources(self) -> Mapping[str, Array | None]:
        """The pool's arguments, which `gathers` pick from; those without a gather are taken as they are."""
        return self.pool.inputs

    @cached_property
    def gathers(self) -> Mapping[str, KdaGather]:
        """By name, for the arguments that have heads."""
        K, V = self.workload.K, self.workload.V
        each = [_tables(symmetry, K, V) for symmetry in self.symmetries]
        found = {}
        for name, (lead, _, factor) in each[0].items():
            if self.pool.inputs[name] is None:
                continue
            index = np.concatenate([tables[name][1] for tables in each]).astype(np.int32)
            factors = None if factor is None else np.concatenate([tables[name][2] for tables in each])
            found[name] = KdaGather(lead, index, factors)
        return found

    def copy(self, number: int) -> KdaCase:
        """One copy as a case of its own."""
        return self.pool.transformed(self.symmetries[number])

    def worst(self, number: int, outputs: Mapping[str, Array]) -> KdaDiscrepancy:
        """Compare a copy's outputs with its truth, as `copy(number).worst` does; its inputs are not made."""
        return self.pool.answer(self.symmetries[number]).worst(outputs)

    def place(self, number: int) -> Mapping[str, tuple[int, int, int]]:
        """Where a copy's outputs lie in the large problem's: name → (axis, begin, end)."""
        width = self.pool.workload.value_heads
        wanted = [name for name, extent in self.outputs.items() if extent is not None]
        return {name: (_HEAD_AXIS[name], number * width, (number + 1) * width) for name in wanted}


def _tables(
    symmetry: Symmetry, K: int, V: int
) -> dict[str, tuple[int, npt.NDArray[np.int64], npt.NDArray[np.float32] | None]]:
    """name → (lead axes, index into the pool's row, factor), flat, for one copy: `Symmetry.inputs` again."""
    s = symmetry
    key = (s.head[:, None] * K + s.k_channel).reshape(-1)
    value = (s.value_head[:, None] * V + s.v_channel).reshape(-1)
    gate = (s.value_head[:, None] * K + s.k_channel).reshape(-1)
    state = ((s.value_head[:, None, None] * V + s.v_channel[:, None]) * K + s.k_channel).reshape(-1)
    state_factor = s.v_factor[:, :, None] * s.k_sign[s.head_of][:, None, :]
    return {
        "q": (1, key, s.k_sign.reshape(-1)),
        "k": (1, key, s.k_sign.reshape(-1)),
        "v": (1, value, s.v_factor.reshape(-1)),
        "g": (1, gate, None),
        "beta": (1, s.value_head, None),
        "A_log": (0, s.value_head, None),
        "dt_bias": (0, gate, None),
        "initial_state": (1, state, state_factor.reshape(-1)),
    }


def _blanks(workload: Workload, pool: Mapping[str, Array | None]) -> dict[str, Array | None]:
    w = workload
    shapes: dict[str, tuple[int, ...]] = {
        "q": (w.tokens, w.heads, w.K),
        "k": (w.tokens, w.heads, w.K),
        "v": (w.tokens, w.value_heads, w.V),
        "g": (w.tokens, w.value_heads, w.K),
        "beta": (w.tokens, w.value_heads),
        "A_log": (w.value_heads,),
        "dt_bias": (w.value_heads, w.K),
        "initial_state": (len(w.lengths), w.value_heads, w.V, w.K),
    }
    blanks = {
        name: None if array is None else np.broadcast_to(np.zeros((), array.dtype), shapes[name])
        for name, array in pool.items()
        if name in shapes
    }
    return {**pool, **blanks}
