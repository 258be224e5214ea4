"""Where a wrong kernel goes wrong: from a case, its outputs and a debug build's intermediates to one place.

Functions from data to data; nothing here runs a kernel.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from evotune.reference_kda.case import KdaCase
from evotune.reference_kda.chunked import Form, chunked_with_intermediates
from evotune.reference_kda.namespace import Array
from evotune.reference_kda.packing import Packing
from evotune.reference_kda.problem import Problem, activate
from evotune.reference_kda.tolerance import ABSOLUTE_FLOOR, MARGIN_BITS, ROUNDOFF, Real, perturbed, round_keys

STAGES = ("decay", "kk", "qk", "u", "state")
"""Intermediates in the order in which a chunk makes them; see `intermediates` for their shapes."""

PERTURBED_RUNS = 4


@dataclass(frozen=True)
class Departure:
    """The first place where something leaves its bound.

    Attributes:
        what: "o", "final_state", or one of STAGES.
        sequence, head: which, the value head.
        chunk: index within the sequence; None for the final state.
        token: index within the sequence of the first wrong row; None where there are no rows (states).
        error, bound: largest error there and what honest arithmetic is allowed; error inf when not finite.
    """

    what: str
    sequence: int
    head: int
    chunk: int | None
    token: int | None
    error: float
    bound: float

    @property
    def text(self) -> str:
        where = [f"sequence {self.sequence}", f"value head {self.head}"]
        where += [] if self.chunk is None else [f"chunk {self.chunk}"]
        where += [] if self.token is None else [f"token {self.token}"]
        size = (
            "not finite" if np.isinf(self.error) else f"error {self.error:.3g}, honest up to {self.bound:.3g}"
        )
        return f"{self.what} first departs at {', '.join(where)}: {size}"


@dataclass(frozen=True)
class Diagnosis:
    """What `diagnose` found.

    Attributes:
        output: the first wrong output, None when all are inside their bounds.
        growth: RMS error over RMS bound, chunk by chunk, of the sequence and head where `output` departs.
        stage: the first wrong intermediate; None when none was given or none departs.
    """

    output: Departure | None
    growth: tuple[float, ...]
    stage: Departure | None

    @property
    def trend(self) -> str:
        """How the error moves along the sequence after it appeared, in words."""
        wrong = [r for r in self.growth if r > 1]
        if any(np.isinf(r) for r in wrong):
            return "turns non-finite"
        if len(wrong) < 2:
            return "is confined to one chunk" if wrong else "is in the final state alone"
        per_chunk = float((wrong[-1] / wrong[0]) ** (1 / (len(wrong) - 1)))
        if per_chunk > 1.5:
            return f"grows {per_chunk:.2g}-fold a chunk"
        return f"fades {1 / per_chunk:.2g}-fold a chunk" if per_chunk < 1 / 1.5 else "stays level"

    @property
    def text(self) -> str:
        if self.output is None:
            return "all outputs are inside their bounds"
        lines = [self.output.text, f"the error {self.trend}"]
        return "; ".join(lines + ([] if self.stage is None else [self.stage.text]))


def diagnose(
    case: KdaCase,
    outputs: Mapping[str, Array],
    given: Mapping[str, Array] | None = None,
    chunk: int = 16,
) -> Diagnosis:
    """Name the first wrong output and, where a debug build's intermediates are given, the first wrong stage.

    `given` has any of STAGES in the layout of `intermediates`, made with chunks of `chunk` tokens.
    """
    output = first_departure(case, outputs)
    growth = () if output is None else _growth(case, outputs["o"], output)
    return Diagnosis(output, growth, first_stage(case, given, chunk) if given else None)


def first_departure(case: KdaCase, outputs: Mapping[str, Array]) -> Departure | None:
    """The earliest chunk in which `o` is wrong, else the first wrong block of the final state."""
    gap = case.output_gap(outputs["o"])
    wrong = np.argwhere(gap.ratios > 1)
    if len(wrong):
        chunk, head = min(((int(c), int(h)) for c, h in wrong), key=lambda p: (case.places.index[p[0]], p))
        start, count = int(case.places.starts[chunk]), int(case.places.counts[chunk])
        sequence, bound = int(case.places.sequence[chunk]), float(gap.largest_bound[chunk, head])
        errors = _errors(outputs["o"][start : start + count, head], case.truth.o[start : start + count, head])
        over = np.flatnonzero(errors > bound)
        token = int(over[0]) if len(over) else int(np.argmax(errors))
        index = int(case.places.index[chunk])
        first = start - case.workload.cu_seqlens[sequence]
        return Departure("o", sequence, head, index, first + token, float(errors.max()), bound)
    if not case.workload.final_state:
        return None
    gap = case.state_gap(outputs["final_state"])
    wrong = np.argwhere(gap.ratios > 1)
    if not len(wrong):
        return None
    at = (int(wrong[0][0]), int(wrong[0][1]), int(wrong[0][2]))
    error = float(gap.largest[at]) if np.isfinite(gap.largest[at]) else np.inf
    return Departure("final_state", at[0], at[1], None, None, error, float(gap.largest_bound[at]))


def _growth(case: KdaCase, o: Array, at: Departure) -> tuple[float, ...]:
    ratios = case.output_gap(o).ratios[case.places.sequence == at.sequence, at.head]
    return tuple(float(r) for r in ratios)


def _errors(found: Array, truth: Array) -> Real:
    """Largest error of each row; inf where not finite."""
    with np.errstate(invalid="ignore"):
        errors = np.abs(found.astype(np.float64) - truth).max(-1)
    return np.where(np.isfinite(errors), errors, np.inf)


def intermediates(case: KdaCase, chunk: int = 16) -> dict[str, Real]:
    """What a right kernel has on the way, in float64, by name:

    decay [T, HV, K], exp(g); kk, qk [T, HV, C], row i of L and M of the token's chunk; u [T, HV, V];
    state [T // C + N, HV, V, K] after each chunk: that of sequence n starting at row t has index t // C + n,
    and entries of no chunk are NaN.
    """
    w = case.workload
    return _intermediates(activate(case.inputs, w.contract, w.scale, np.float64), Form(chunk=chunk, block=1))


def _intermediates(problem: Problem, form: Form) -> dict[str, Real]:
    _, found = chunked_with_intermediates(problem, form)
    T = problem.v.shape[0]

    def rows(x: Array) -> Real:
        return np.asarray(found.packing.unpack(x.swapaxes(1, 2), T, np), np.float64)

    total = T // form.chunk + problem.sequences
    state = np.full((total, *found.state.swapaxes(-1, -2).shape[1:]), np.nan)
    state[_state_index(found.packing, problem.cu_seqlens)] = found.state.swapaxes(-1, -2)
    decay = np.exp(problem.g.astype(np.float64))
    return {"decay": decay, "kk": rows(found.kk), "qk": rows(found.qk), "u": rows(found.u), "state": state}


def _state_index(packing: Packing, cu_seqlens: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """Index of each of the packing's chunks among the states of `intermediates`."""
    starts = packing.rows[:, 0]
    sequence = np.searchsorted(np.asarray(cu_seqlens[1:]), starts, side="right")
    return np.asarray(starts // packing.rows.shape[1] + sequence)


def first_stage(case: KdaCase, given: Mapping[str, Array], chunk: int = 16) -> Departure | None:
    """The first of the given intermediates that departs: by chunk, then by the order of STAGES.

    Bounds are made as `tolerance` makes them, per chunk and head, from chunk forms of this very length.
    """
    truth = intermediates(case, chunk)
    members = [_intermediates(problem, form) for problem, form in _honest(case, chunk)]
    chunks = list(_chunks(case.workload.cu_seqlens, chunk))
    for index, sequence, rows in chunks:
        for stage in STAGES:
            if stage not in given:
                continue
            state_at = slice(rows.start // chunk + sequence, rows.start // chunk + sequence + 1)
            at = state_at if stage == "state" else rows
            found, right = given[stage][at], truth[stage][at]
            if stage in ("kk", "qk"):
                found = np.where(right == 0, 0, found)
            error = _by_head(found, right)
            bound = _bound([_by_head(m[stage][at], right) for m in members], right)
            head = int(np.argmax(error / bound))
            if error[head] > bound[head]:
                over = np.flatnonzero(
                    _errors(found[:, head].reshape(len(found), -1), _flat(right, head)) > bound[head]
                )
                token = None if stage == "state" else index * chunk + int(over[0])
                return Departure(stage, sequence, head, index, token, float(error[head]), float(bound[head]))
    return None


def _flat(x: Array, head: int) -> Array:
    return x[:, head].reshape(len(x), -1)


def _honest(case: KdaCase, chunk: int) -> Iterator[tuple[Problem, Form]]:
    """Chunk forms of this length in float32 (operands in bfloat16 where io is), and perturbed exact ones."""
    w = case.workload
    single = activate(case.inputs, w.contract, w.scale, np.float32)
    low = w.dtype == "bfloat16"
    block = min(chunk, 16)
    yield single, Form(chunk=chunk, block=1)
    yield single, Form(chunk=chunk, block=block, anchor="before", exponential="2")
    if low:
        rounded = round_keys(single) if w.contract == "production" else single
        yield rounded, Form(chunk=chunk, block=block, operands="bfloat16")
    exact = activate(case.inputs, w.contract, w.scale, np.float64)
    size = ROUNDOFF["bfloat16"] if low else 2 * ROUNDOFF["float32"]
    rng = np.random.default_rng(0)
    for _ in range(PERTURBED_RUNS):
        yield perturbed(exact, size, rng), Form(chunk=chunk, block=1)


def _bound(errors: list[Real], truth: Real) -> Real:
    """[HV]: the largest honest error with the margin, and a float32 unit of the stage's own size."""
    unit = ROUNDOFF["float32"] * np.abs(truth).max(axis=(0, *range(2, truth.ndim)))
    return np.asarray(2.0**MARGIN_BITS * np.max(errors, axis=0) + unit + ABSOLUTE_FLOOR)


def _by_head(found: Array, truth: Array) -> Real:
    """Largest error of each value head, [HV], over rows and channels of [rows, HV, …]."""
    with np.errstate(invalid="ignore"):
        error = np.abs(found.astype(np.float64) - truth).max(axis=(0, *range(2, truth.ndim)))
    return np.where(np.isfinite(error), error, np.inf)


def _chunks(cu_seqlens: tuple[int, ...], chunk: int) -> Iterator[tuple[int, int, slice]]:
    """(index within the sequence, sequence, rows), in the order of time."""
    spans = [
        ((first - start) // chunk, n, slice(first, min(first + chunk, stop)))
        for n, (start, stop) in enumerate(zip(cu_seqlens[:-1], cu_seqlens[1:], strict=True))
        for first in range(start, stop, chunk)
    ]
    return iter(sorted(spans, key=lambda s: (s[0], s[1])))
