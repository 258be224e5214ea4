"""A solved problem: what a kernel is called with, and where its answer departs from the truth."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from evotune.reference_kda.chunked import PAIRWISE, chunked
from evotune.reference_kda.namespace import DTYPES, Array
from evotune.reference_kda.problem import LOWER_BOUND, Result, activate
from evotune.reference_kda.recurrent import recurrence
from evotune.reference_kda.symmetry import Symmetry
from evotune.reference_kda.tolerance import (
    CHUNK,
    ROWS,
    Extent,
    Places,
    Real,
    derive,
    output_extent,
    state_extent,
)
from evotune.reference_kda.workload import Workload, draw_inputs

AGREEMENT = 1e-10
"""The recurrence and the chunk form in float64 differ by less, relative to the largest output."""


@dataclass(frozen=True)
class KdaDiscrepancy:
    """The worst place of an answer: error over bound (inf when not finite) and a line that says where."""

    ratio: float
    detail: str


@dataclass(frozen=True)
class Question:
    """One call of a kernel: arguments by name in their C types, and what it is to write."""

    name: str
    workload: Workload
    inputs: Mapping[str, Array | None]

    @property
    def outputs(self) -> Mapping[str, tuple[tuple[int, ...], str] | None]:
        w = self.workload
        state = (len(w.lengths), w.value_heads, w.V, w.K)
        return {
            "o": ((w.tokens, w.value_heads, w.V), w.dtype),
            "final_state": (state, "float32") if w.final_state else None,
        }

    @property
    def sizes(self) -> Mapping[str, int]:
        w = self.workload
        return {"N": len(w.lengths), "T": w.tokens, "H": w.heads, "HV": w.value_heads}

    @property
    def scalars(self) -> Mapping[str, float]:
        return {"scale": self.workload.scale, "lower_bound": LOWER_BOUND}


@dataclass(frozen=True)
class KdaCase(Question):
    """A question with its answer.

    Attributes:
        truth: float64, from the recurrence.
        bound: what honest arithmetic costs on these inputs; see `tolerance`.
    """

    truth: Result
    bound: Extent
    places: Places

    def worst(self, outputs: Mapping[str, Array]) -> KdaDiscrepancy:
        """Compare "o" (and "final_state" where it is wanted) with the truth, in every place."""
        found = self._worst_output(outputs["o"])
        if not self.workload.final_state:
            return found
        return max(found, self._worst_state(outputs["final_state"]), key=lambda d: d.ratio)

    def fresh(self, rng: np.random.Generator) -> "KdaCase":
        """The same problem in other numbers, by a random exact symmetry: no new solution, no new bound."""
        w = self.workload
        return self.transformed(Symmetry.draw(w.heads, w.value_heads, w.K, w.V, rng))

    def transformed(self, symmetry: Symmetry) -> "KdaCase":
        return replace(self.answer(symmetry), inputs=symmetry.inputs(dict(self.inputs)))

    def answer(self, symmetry: Symmetry) -> "KdaCase":
        """Truth and bound of the transformed case, with this one's inputs."""
        truth = Result(symmetry.output(self.truth.o), symmetry.state(self.truth.final_state))
        return replace(self, truth=truth, bound=symmetry.bound(self.bound))

    def output_gap(self, o: Array) -> "Gap":
        """Errors of [T, HV, V] beside their bounds, [chunks, HV]."""
        rms, largest = output_extent(_difference(o, self.truth.o), self.places)
        return Gap(rms, largest, self.bound.o_rms, self.bound.o_max)

    def state_gap(self, state: Array) -> "Gap":
        """Errors of [N, HV, V, K] beside their bounds, [N, HV, blocks of V rows]."""
        rms, largest = state_extent(_difference(state, self.truth.final_state))
        return Gap(rms, largest, self.bound.state_rms, self.bound.state_max)

    def _worst_output(self, o: Array) -> KdaDiscrepancy:
        gap = self.output_gap(o)
        if gap.place is None:
            return KdaDiscrepancy(0.0, "o is exact")
        chunk, head = gap.place
        sequence, index = int(self.places.sequence[chunk]), int(self.places.index[chunk])
        first, last = index * CHUNK, index * CHUNK + int(self.places.counts[chunk]) - 1
        where = f"o, sequence {sequence}, value head {head}, chunk {index} (tokens {first} to {last})"
        return KdaDiscrepancy(gap.worst, f"{where}: {gap.text}")

    def _worst_state(self, state: Array) -> KdaDiscrepancy:
        gap = self.state_gap(state)
        if gap.place is None:
            return KdaDiscrepancy(0.0, "final_state is exact")
        sequence, head, block = gap.place
        first, last = block * ROWS, min(self.workload.V, (block + 1) * ROWS) - 1
        where = f"final_state, sequence {sequence}, value head {head}, V rows {first} to {last}"
        return KdaDiscrepancy(gap.worst, f"{where}: {gap.text}")


@dataclass(frozen=True)
class Gap:
    """Measured errors beside their bounds, four arrays of one shape, one entry per place."""

    rms: Real
    largest: Real
    rms_bound: Real
    largest_bound: Real

    @cached_property
    def ratios(self) -> Real:
        """Error over bound in each place; inf where it is not finite."""
        ratios = np.maximum(self.rms / self.rms_bound, self.largest / self.largest_bound)
        return np.where(np.isfinite(ratios), ratios, np.inf)

    @cached_property
    def place(self) -> tuple[int, ...] | None:
        """Index of the largest ratio, the first of several; None where nothing differs."""
        if not self.ratios.any():
            return None
        return tuple(int(i) for i in np.unravel_index(int(np.argmax(self.ratios)), self.ratios.shape))

    @property
    def worst(self) -> float:
        return float(self.ratios.max(initial=0))

    @property
    def text(self) -> str:
        at = self.place
        if np.isinf(self.worst):
            return "not finite"
        largest = f"largest error {self.largest[at]:.3g} (bound {self.largest_bound[at]:.3g})"
        rms = f"RMS {self.rms[at]:.3g} (bound {self.rms_bound[at]:.3g})"
        return f"{largest}, {rms}, {self.worst:.3g} of the bound"


def _difference(answer: Array, truth: Array) -> Real:
    """float64; a NaN or inf in the answer stays one."""
    with np.errstate(invalid="ignore"):
        return np.asarray(np.subtract(_float64(answer), truth))


def _float64(x: Array) -> Real:
    """Exact. ml_dtypes converts bf16 at a fifth of this speed, and holds the interpreter meanwhile."""
    if x.dtype == DTYPES["bfloat16"]:
        x = (np.ascontiguousarray(x).view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    wide: Real = x.astype(np.float64)
    return wide


def solve(workload: Workload, seed: int) -> KdaCase:
    """Draw inputs and solve them. Deterministic in (workload, seed)."""
    return case_of(workload, draw_inputs(workload, seed), seed)


def case_of(workload: Workload, inputs: Mapping[str, Array | None], seed: int) -> KdaCase:
    """Truth (the float64 recurrence, checked by the float64 chunk form) and bound of given inputs.

    `seed` is for the bound's perturbed member alone. Raises ArithmeticError when the two oracles disagree.
    """
    problem = activate(inputs, workload.contract, workload.scale, np.float64)
    truth = recurrence(problem)
    _check_agreement(truth, chunked(problem, PAIRWISE), workload.name)
    bound = derive(inputs, workload.contract, workload.dtype, workload.scale, truth, seed)
    return KdaCase(workload.name, workload, inputs, truth, bound, Places.of(workload.cu_seqlens))


def _check_agreement(a: Result, b: Result, name: str) -> None:
    for x, y in ((a.o, b.o), (a.final_state, b.final_state)):
        apart, size = np.abs(x - y).max(initial=0), np.abs(x).max(initial=0)
        if not apart <= AGREEMENT * max(size, 1e-30):
            raise ArithmeticError(
                f"{name}: the recurrence and the chunk form differ by {apart:g} of {size:g}"
            )
