"""How far from the truth an honest kernel may be, on this very input.

**Where a bound applies.** `o`: each 16-token chunk of a sequence, each value head (over its V channels).
`final_state`: each sequence, each value head, each block of 16 V rows (over K). In each place two bounds, one
for the root mean square of the error and one for its maximum.

**Where it comes from.** Honest arithmetic is run on the input, in several forms that share no order of
operations, and its errors against the float64 truth are measured in every place:

    float32 io     the float32 recurrence, strictly in channel order, no fused multiply-add; in seven random
                   orders too where a sequence has fewer than four tokens
                   chunks of 16 anchored at their start, decays as powers of two, and
                   chunks of 64 in sub-blocks of 16, both with the channels summed in eight random orders
                   exact arithmetic on operands perturbed at random by two units of float32 roundoff,
                   16 times for short problems, such sequences and keys that repeat, where a place's error
                   may be one random number
    bfloat16 io    the float32 recurrence, in as many orders
                   chunks of 16 and of 64 as above, matrix operands in bfloat16, sums and state in float32
                   exact arithmetic on operands perturbed by one unit of bfloat16 roundoff, as often

The last of each list matters where special values (ones, one-hot keys, powers of two) make particular orders
exact by luck: perturbation knows no luck. Equal operands are perturbed alike, as they round alike: channels
of constant inputs err together, no sum averages that away, and a place's error is one random number again.
With a perturbation for each element instead, 3 of 200 honest kernels were called wrong on ones (1.07 of the
bound). Two units in float32: one for exp (libm promises < 1 ulp), one for the product made with it; under the
production contract four more for each row's norm, which all its channels share (a sum of 128 squares in order
errs by 4.6, halved by the root; half a unit each for root, division and product). One in bfloat16: an operand
is rounded once. The random orders matter where keys repeat: then all scores of a chunk round alike, and one
run in one order shows a single random number. With one order each, honest chunked kernels on repeated keys
went beyond the bound (1.25 of it) in 7 of 720 draws; with eight, once (1.04) in 1,800. The production
contract's norm, gate and sigmoid run in float32; q and k are rounded to bfloat16 after their norm where io is
bfloat16, as every implementation does. `o` is rounded to the io dtype, the final state stays float32.

**The margin** is 2 bits, fixed before any kernel was measured against it:
  - 1 bit for honest orders outside the ensemble. A sum of n = 128 products has a relative error near
    sqrt(n / 6) = 4.6 units when taken in order, as a member does, near 2 with eight lanes, and less with
    fused multiply-add, so orders cost less than a member shows. Chunk lengths and anchors differ more: the
    widest known gap between neighbouring members is 3.3 (chunks of 16 and 64, repeated keys), so one
    doubling beyond the outermost member is still honest.
  - 1 bit because both sides are samples. A place of many tokens has an error of many random numbers, whose
    RMS hardly varies. The first token of a sequence has one (that of q · k, shared by all V channels): the
    chance that one normal number exceeds four times the largest of 4 others is 5e-3, of 19 others 1e-6,
    whence the 16 perturbed runs. A sequence of one token is such a place in a pack of any length: with the
    three runs of its 302 tokens, one of 240 honest kernels was called wrong (1.38 of the bound).

For the maximum, the larger of the ensemble's own maximum and sqrt(2 ln 2n) times its RMS, the expected
extreme of n normal numbers, before the same margin.

Added to the margin: half a unit of the output's dtype at the size of the place's truth (an ensemble may hit
representable values exactly), and 2^-100 absolutely: kernels may flush what is below float32's normal range,
2^-126, and K such products may meet a factor.

Outside: chunks beyond 64 tokens that exponentiate float32 sums. A sum of 128 strong gates reaches −384, and
e^x has a relative error of |x| units, up to three of these bounds.

A kernel with its state in bfloat16 under float32 io errs 2^9 times the bound or more; leaving out a term, a
token, a chunk or a head errs by the size of the output.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from evotune.reference_kda.chunked import Form, chunked
from evotune.reference_kda.namespace import Array, to_bfloat16
from evotune.reference_kda.problem import Problem, Result, activate
from evotune.reference_kda.recurrent import recurrence

CHUNK = 16
ROWS = 16
MARGIN_BITS = 2
ABSOLUTE_FLOOR = 2.0**-100
ORDERS = 8
PERTURBED = 16
FEW = 4
"""A sequence of fewer tokens has errors of few random numbers, however long the problem round it."""

ROUNDOFF = {"float32": 2.0**-24, "bfloat16": 2.0**-9}

FORMS = (Form(chunk=16, block=16, anchor="before", exponential="2"), Form(chunk=64, block=16))

EXACT = Form(chunk=16, block=16, anchor="before")
"""In float64, for perturbed operands: five times as fast as the recurrence. On the gate's cases it gives a
perturbation's effect to 1e-8 of itself in every place."""

Real = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Places:
    """Where errors are gathered.

    Attributes:
        starts: [chunks], first row of each chunk; `counts` its tokens, `sequence` and `index` whose it is.
        tokens: rows that belong to a sequence.
    """

    starts: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    sequence: npt.NDArray[np.int64]
    index: npt.NDArray[np.int64]
    tokens: int

    @classmethod
    def of(cls, cu_seqlens: tuple[int, ...]) -> "Places":
        spans = [
            (first, min(CHUNK, stop - first), n, (first - start) // CHUNK)
            for n, (start, stop) in enumerate(zip(cu_seqlens[:-1], cu_seqlens[1:], strict=True))
            for first in range(start, stop, CHUNK)
        ]
        columns = np.asarray(spans, np.int64).reshape(-1, 4).T
        return cls(columns[0], columns[1], columns[2], columns[3], cu_seqlens[-1])


@dataclass(frozen=True)
class Extent:
    """RMS and maximum of a difference in every place; as a bound, what they may be.

    Attributes:
        o_rms, o_max: [chunks, HV].
        state_rms, state_max: [N, HV, ceil(V / 16)].
    """

    o_rms: Real
    o_max: Real
    state_rms: Real
    state_max: Real


def output_extent(difference: Array, places: Places) -> tuple[Real, Real]:
    """RMS and maximum over each chunk of [T, HV, V]: two arrays [chunks, HV]."""
    difference = difference[: places.tokens]
    if not len(places.starts):
        empty = np.zeros((0, difference.shape[1]))
        return empty, empty
    squares = np.einsum("thv,thv->th", difference, difference)
    entries = places.counts[:, None] * difference.shape[2]
    rms = np.sqrt(np.add.reduceat(squares, places.starts, axis=0) / entries)
    return rms, np.maximum.reduceat(_largest(difference), places.starts, axis=0)


def state_extent(difference: Array) -> tuple[Real, Real]:
    """RMS and maximum over each block of 16 V rows of [N, HV, V, K]: two arrays [N, HV, blocks]."""
    V, K = difference.shape[2:]
    starts = np.arange(0, V, ROWS)
    squares = np.einsum("nhvk,nhvk->nhv", difference, difference)
    entries = np.diff(np.append(starts, V)) * K
    rms = np.sqrt(np.add.reduceat(squares, starts, axis=2) / entries)
    return rms, np.maximum.reduceat(_largest(difference), starts, axis=2)


def _largest(x: Array) -> Real:
    """Largest absolute value along the last axis, without a copy of `x`."""
    return np.asarray(np.maximum(x.max(-1), -x.min(-1)))


def extent(o: Array, state: Array, places: Places) -> Extent:
    return Extent(*output_extent(o, places), *state_extent(state))


def derive(
    inputs: Mapping[str, Array | None], contract: str, dtype: str, scale: float, truth: Result, seed: int
) -> Extent:
    """The bound on these kernel arguments; see the module for what it is."""
    cu = inputs["cu_seqlens"]
    assert cu is not None
    places = Places.of(tuple(int(c) for c in cu))
    members = [
        extent(
            _stored(r.o, dtype) - truth.o, np.asarray(r.final_state, np.float64) - truth.final_state, places
        )
        for r in honest_results(inputs, contract, dtype, scale, seed)
    ]
    sizes = extent(truth.o, truth.final_state, places)
    o_entries = (places.counts * truth.o.shape[2])[:, None]
    V, K = truth.final_state.shape[2:]
    state_entries = np.minimum(ROWS, V - np.arange(0, V, ROWS)) * K
    o_unit, state_unit = ROUNDOFF[dtype], ROUNDOFF["float32"]
    o_rms, o_max = _envelope([(m.o_rms, m.o_max) for m in members], o_entries)
    state_rms, state_max = _envelope([(m.state_rms, m.state_max) for m in members], state_entries)
    return Extent(
        o_rms + o_unit * sizes.o_rms,
        o_max + o_unit * sizes.o_max,
        state_rms + state_unit * sizes.state_rms,
        state_max + state_unit * sizes.state_max,
    )


def _envelope(members: list[tuple[Real, Real]], entries: npt.NDArray[np.int64]) -> tuple[Real, Real]:
    """RMS and maximum of all members, with the margin and the floor."""
    rms = np.max([m[0] for m in members], axis=0)
    largest = np.maximum(np.max([m[1] for m in members], axis=0), rms * np.sqrt(2 * np.log(2 * entries)))
    factor = 2.0**MARGIN_BITS
    return factor * rms + ABSOLUTE_FLOOR, factor * largest + ABSOLUTE_FLOOR


def honest_results(
    inputs: Mapping[str, Array | None], contract: str, dtype: str, scale: float, seed: int
) -> list[Result]:
    """The ensemble: every member's outputs before they are stored."""
    single = activate(inputs, contract, scale, np.float32)
    rng = np.random.default_rng(seed)
    lengths = np.diff(single.cu_seqlens)
    short = bool(np.any((lengths > 0) & (lengths < FEW)))
    results = [recurrence(single)]
    results += [in_other_order(single, recurrence, rng) for _ in range(ORDERS - 1 if short else 0)]
    if dtype == "bfloat16":
        rounded = round_keys(single) if contract == "production" else single
        results += [chunked(rounded, replace(form, operands="bfloat16")) for form in FORMS]
    else:
        forms = [partial(chunked, form=form) for form in FORMS]
        results += [in_other_order(single, solve, rng) for solve in forms for _ in range(ORDERS)]
    exact = activate(inputs, contract, scale, np.float64)
    size = ROUNDOFF["bfloat16"] if dtype == "bfloat16" else 2 * ROUNDOFF["float32"]
    runs = PERTURBED if short or repetitive(exact.k[:512]) else samples(exact.v.shape[0])
    norm = 4 * ROUNDOFF["float32"] if contract == "production" else 0.0
    return results + [chunked(perturbed(exact, size, rng, norm), EXACT) for _ in range(runs)]


def in_other_order(problem: Problem, solve: Callable[[Problem], Result], rng: np.random.Generator) -> Result:
    """A form's answer with its sums over K taken in a random order of the channels."""
    order = rng.permutation(problem.q.shape[-1])
    state = problem.initial_state
    permuted = replace(
        problem,
        q=problem.q[..., order],
        k=problem.k[..., order],
        g=problem.g[..., order],
        initial_state=None if state is None else state[..., order],
    )
    result = solve(permuted)
    return Result(result.o, result.final_state[..., np.argsort(order)])


def samples(tokens: int) -> int:
    """How often operands are perturbed: 16 times for short problems, twice from 512 tokens on."""
    return min(PERTURBED, max(2, 1024 // max(tokens, 1)))


def repetitive(x: Array) -> bool:
    """Whether values recur so much that errors do not average: fewer than one in fifty is new."""
    return bool(50 * len(np.unique(x)) < x.size)


def round_keys(problem: Problem) -> Problem:
    """q and k rounded to bfloat16, as after a fused norm."""
    return replace(problem, q=to_bfloat16(problem.q, np), k=to_bfloat16(problem.k, np))


def perturbed(problem: Problem, size: float, rng: np.random.Generator, norm: float = 0.0) -> Problem:
    """Every operand times 1 + δ, δ uniform within ±size, equal ones alike; exp(g) as well as g.

    Rows of q and k also by a factor of their own within ±norm: a fused norm rounds once for all channels.
    g itself and exp(g) are float32 quantities in every honest kernel, whatever the io dtype.
    """

    def shaken(x: Array, by: float) -> Array:
        return x * (1 + by * by_value(x, rng))

    def row(x: Array) -> Array:
        return x * (1 + norm * by_value((x * x).sum(-1, keepdims=True), rng))

    gate = 2 * ROUNDOFF["float32"]
    g = shaken(problem.g, gate) + gate * by_value(problem.g, rng)
    state = problem.initial_state
    return Problem(
        q=row(shaken(problem.q, size)),
        k=row(shaken(problem.k, size)),
        v=shaken(problem.v, size),
        g=g,
        beta=shaken(problem.beta, size),
        initial_state=None if state is None else shaken(state, size),
        cu_seqlens=problem.cu_seqlens,
        scale=problem.scale,
    )


def by_value(x: Array, rng: np.random.Generator) -> Real:
    """Numbers that look uniform in [-1, 1), the same ones wherever a float64 array has the same value."""
    words = np.ascontiguousarray(x, np.float64).view(np.uint64) ^ rng.integers(1 << 63, dtype=np.uint64)
    for odd in (0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93):
        words = words * np.uint64(odd)
        words = words ^ (words >> np.uint64(32))
    return np.asarray((words >> np.uint64(11)) * 2.0**-52 - 1)


def _stored(o: Array, dtype: str) -> Real:
    """`o` as the kernel would leave it in memory, in float64."""
    kept = o.astype(np.float32)
    return np.asarray(to_bfloat16(kept, np) if dtype == "bfloat16" else kept, np.float64)
