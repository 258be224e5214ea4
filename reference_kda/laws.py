"""Laws that hold without a reference: answers of a kernel compared with its own answers to related questions.

A tolerance is the sum of the bounds (largest error, per chunk and head) of the cases a law relates: where
each answer may be off by its bound, their difference may be off by both. Bounds need solved cases; a `Bank`
draws a few random shapes, solves them once, and gives them out in fresh numbers.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import numpy as np

from evotune.reference_kda.case import KdaCase, KdaDiscrepancy, Question, case_of, solve
from evotune.reference_kda.namespace import Array
from evotune.reference_kda.problem import activate
from evotune.reference_kda.regimes import LOGIT_LIMIT
from evotune.reference_kda.smaller import Asked, smaller
from evotune.reference_kda.symmetry import Symmetry
from evotune.reference_kda.tolerance import ROWS, Real
from evotune.reference_kda.workload import Workload

Call = Callable[[Any], Mapping[str, Array]]
Rng = np.random.Generator

SHAPES_PER_LAW = {"screen": 2, "full": 6}
LONGEST = {"screen": 48, "full": 150}


@dataclass(frozen=True)
class Bank:
    """Solved cases of random shapes for one specialization, solved when first asked for.

    `base` fixes dims, dtype and contract; lengths, heads and regime are drawn, unless it is `whole`.
    """

    base: Workload
    shapes: int
    longest: int
    _solved: dict[tuple[str, int], tuple[KdaCase, ...]] = field(default_factory=dict)
    whole: bool = False

    def on(self, workload: Workload) -> "Bank":
        """A bank of this very workload alone."""
        return Bank(workload, 1, self.longest, whole=True)

    def drawn(self, law: str) -> tuple[Workload, ...]:
        """What `draw` gave this law until now, or may give again."""
        return tuple(cases[0].workload for (of, _), cases in self._solved.items() if of == law)

    def draw(
        self, law: str, regimes: tuple[str, ...], rng: Rng, related: "Related | None" = None
    ) -> tuple[KdaCase, ...]:
        """A case (and those that `related` makes of it), all under one fresh symmetry."""
        key = law, int(rng.integers(self.shapes))
        if key not in self._solved:
            first = solve(self._shape(regimes, rng), int(rng.integers(2**31)))
            others = related(first, rng) if related else ()
            self._solved[key] = (first, *others)
        cases = self._solved[key]
        w = cases[0].workload
        symmetry = Symmetry.draw(w.heads, w.value_heads, w.K, w.V, rng)
        return tuple(case.transformed(symmetry) for case in cases)

    def _shape(self, regimes: tuple[str, ...], rng: Rng) -> Workload:
        if self.whole:
            return self.base
        heads, group = int(rng.integers(1, 3)), int(rng.integers(1, 3))
        lengths = (int(rng.integers(2, self.longest)), int(rng.integers(0, 20)), int(rng.integers(1, 20)))
        return replace(
            self.base,
            lengths=tuple(lengths[i] for i in rng.permutation(3)),
            heads=heads,
            value_heads=heads * group,
            regime=regimes[int(rng.integers(len(regimes)))],
            initial_state=True,
        )


Related = Callable[[KdaCase, Rng], tuple[KdaCase, ...]]


def laws_of(base: Workload, level: str) -> tuple["KdaLaw", ...]:
    """All laws over one bank."""
    bank = Bank(base, SHAPES_PER_LAW[level], LONGEST[level])
    return (Split(bank), Linearity(bank), Heads(bank), Causality(bank), PureDecay(bank))


@dataclass(frozen=True)
class _Law:
    """What the laws share: a bank's problems, under the law's `key`, in its `regimes`, the plainest first."""

    key: ClassVar[str]
    regimes: ClassVar[tuple[str, ...]]
    bank: Bank

    @property
    def drawn(self) -> tuple[Workload, ...]:
        """The workloads that `check` has asked about."""
        return self.bank.drawn(self.key)

    def on(self, workload: Workload) -> Self:
        """The same law, on problems of this workload alone."""
        return replace(self, bank=self.bank.on(workload))

    def smaller(self, workload: Workload) -> Asked:
        """As `smaller.smaller`, of problems that the law speaks of: those bring a state and want one."""
        return smaller(workload, self.regimes, states=False)


@dataclass(frozen=True)
class Split(_Law):
    """Cutting every sequence anywhere and carrying the state changes nothing."""

    key = "split"
    regimes = ("mixed", "weak", "correlated_keys")
    name: str = "splitting a sequence and carrying the state changes nothing"

    def check(self, call: Call, rng: Rng) -> KdaDiscrepancy:
        (whole,) = self.bank.draw(self.key, self.regimes, rng)
        cu = whole.workload.cu_seqlens
        cuts = [int(rng.integers(a, b + 1)) for a, b in zip(cu[:-1], cu[1:], strict=True)]
        before = [np.arange(a, c) for a, c in zip(cu[:-1], cuts, strict=True)]
        after = [np.arange(c, b) for c, b in zip(cuts, cu[1:], strict=True)]
        expected = call(whole)
        first = call(excerpt(whole, before, whole.inputs["initial_state"]))
        second = call(excerpt(whole, after, first["final_state"]))
        joined = np.empty_like(expected["o"])
        joined[np.concatenate(before)], joined[np.concatenate(after)] = first["o"], second["o"]
        found = {"o": joined, "final_state": second["final_state"]}
        told = difference(found, expected, (whole, whole))
        return replace(told, detail=f"{told.detail}; cut after {_listed(map(len, before))} tokens")


@dataclass(frozen=True)
class Linearity(_Law):
    """With q, k, g, beta fixed, outputs are linear in (v, initial state).

    Each token's v is shared between two questions as 1 + 0, 0 + 1, 2 − 1 or −1 + 2 times itself, the state as
    2 − 1: the shares add up without rounding, and neither a clipped nor a bent v passes.
    """

    key = "linearity"
    regimes = ("mixed", "weak", "strong")
    name: str = "outputs are linear in v and the initial state"

    def check(self, call: Call, rng: Rng) -> KdaDiscrepancy:
        cases = self.bank.draw(self.key, self.regimes, rng, self._parts)
        both, one, other = (call(case) for case in cases)
        total = {name: _double(one[name]) + _double(other[name]) for name in ("o", "final_state")}
        return difference(total, both, cases)

    @staticmethod
    def _parts(whole: KdaCase, rng: Rng) -> tuple[KdaCase, ...]:
        v, state = whole.inputs["v"], whole.inputs["initial_state"]
        assert v is not None
        assert state is not None
        share = rng.choice([1, 0, 2, -1], len(v))
        parts = []
        for of_v, of_state in ((share, 2), (1 - share, -1)):
            part = v * of_v[:, None, None].astype(v.dtype)
            inputs = {**whole.inputs, "v": part, "initial_state": of_state * state}
            parts.append(case_of(whole.workload, inputs, int(rng.integers(2**31))))
        return tuple(parts)


@dataclass(frozen=True)
class Heads(_Law):
    """Permuting heads permutes outputs."""

    key = "heads"
    regimes = ("mixed", "strong")
    name: str = "permuting heads permutes outputs"

    def check(self, call: Call, rng: Rng) -> KdaDiscrepancy:
        (case,) = self.bank.draw(self.key, self.regimes, rng)
        w = case.workload
        permutation = Symmetry.of_heads(w.heads, w.value_heads, w.K, w.V, rng)
        permuted = case.transformed(permutation)
        answer, found = call(case), call(permuted)
        expected = {
            "o": permutation.output(answer["o"]),
            "final_state": permutation.state(answer["final_state"]),
        }
        return difference(found, expected, (permuted, permuted))


@dataclass(frozen=True)
class Causality(_Law):
    """The future never changes the past.

    Not bitwise: a form that anchors a chunk's decays in its middle is allowed, and rounds the past
    differently when the future's gates change. The regimes have gates as strong as the changed future's, so
    that the bound knows such rounding.
    """

    key = "causality"
    regimes = ("strong", "alternating", "saturated")
    name: str = "the future never changes the past"

    def check(self, call: Call, rng: Rng) -> KdaDiscrepancy:
        (case,) = self.bank.draw(self.key, self.regimes, rng)
        cu = case.workload.cu_seqlens
        future = np.zeros(case.workload.tokens, bool)
        for start, stop in zip(cu[:-1], cu[1:], strict=True):
            future[int(rng.integers(start, stop + 1)) : stop] = True
        changed = replace(case, inputs=_other_future(dict(case.inputs), future, case.workload.contract, rng))
        expected, found = call(case), call(changed)
        past = np.flatnonzero(~future)
        return _worst_row(found["o"], expected["o"], 2 * _allowed_output(case), past)


def _other_future(
    inputs: dict[str, Array | None], future: Array, contract: str, rng: Rng
) -> dict[str, Array | None]:
    """Later tokens replaced: huge values, keys and queries turned round, gates at either end."""
    for name in ("q", "k", "v", "g", "beta"):
        array = inputs[name]
        assert array is not None
        inputs[name] = array = array.copy()
        later = array[future]
        if name == "v":
            later = later * np.asarray(1024, later.dtype)
        elif name in ("q", "k"):
            later = np.roll(-later, 1, axis=-1)
        else:
            ends = np.asarray([-LOGIT_LIMIT, LOGIT_LIMIT] if contract == "production" else [0, 1])
            sign = -5 if name == "g" and contract == "plain" else 1
            later = (sign * rng.choice(ends, later.shape)).astype(later.dtype)
        array[future] = later
    return inputs


@dataclass(frozen=True)
class PureDecay(_Law):
    """With beta = 0 nothing is written: S_t = exp(g_1 + … + g_t) S_0, o_t = scale S_tᵀ q_t."""

    key = "decay"
    regimes = ("beta_zero",)
    name: str = "beta = 0 is pure decay"

    def check(self, call: Call, rng: Rng) -> KdaDiscrepancy:
        (case,) = self.bank.draw(self.key, self.regimes, rng)
        return difference(call(case), pure_decay(case), (case,))


def pure_decay(case: Question) -> dict[str, Array]:
    """The closed form above, in float64: {"o": [T, HV, V], "final_state": [N, HV, V, K]}."""
    p = activate(case.inputs, case.workload.contract, case.workload.scale, np.float64)
    q, state = p.q[:, p.head_of], p.initial_state
    assert state is not None
    o, final = np.zeros(p.v.shape), state.copy()
    for n, (start, stop) in enumerate(zip(p.cu_seqlens[:-1], p.cu_seqlens[1:], strict=True)):
        decay = np.exp(np.cumsum(p.g[start:stop], axis=0))  # [tokens, HV, K]
        o[start:stop] = p.scale * np.einsum("hvk,thk->thv", state[n], decay * q[start:stop])
        if stop > start:
            final[n] = state[n] * decay[-1][:, None, :]
    return {"o": o, "final_state": final}


KdaLaw = Split | Linearity | Heads | Causality | PureDecay


def excerpt(case: Question, spans: list[Array], initial_state: Array | None) -> Question:
    """The same tokens, only those rows of each sequence; the final state is wanted."""
    rows = np.concatenate(spans)
    inputs = dict(case.inputs)
    for name in ("q", "k", "v", "g", "beta"):
        array = inputs[name]
        assert array is not None
        inputs[name] = np.ascontiguousarray(array[rows])
    lengths = tuple(len(span) for span in spans)
    workload = replace(
        case.workload,
        lengths=lengths,
        slack=0,
        initial_state=initial_state is not None,
        final_state=True,
    )
    inputs["initial_state"] = initial_state
    inputs["cu_seqlens"] = np.asarray(workload.cu_seqlens, np.int64)
    return Question(f"{case.name}, excerpt", workload, inputs)


def difference(
    found: Mapping[str, Array], expected: Mapping[str, Array], bounds: tuple[KdaCase, ...]
) -> KdaDiscrepancy:
    """Worst difference between answers, over the sum of the bounds of `bounds`."""
    allowed = sum((_allowed_output(case) for case in bounds[1:]), _allowed_output(bounds[0]))
    output = _worst_row(found["o"], expected["o"], allowed, np.arange(len(allowed)))
    limits = sum((_allowed_state(case) for case in bounds[1:]), _allowed_state(bounds[0]))
    gap = _Gap.between(found["final_state"], expected["final_state"], limits)
    n, head, row = gap.place
    state = KdaDiscrepancy(
        gap.ratio, f"final_state, sequence {n}, value head {head}, V row {row}: {gap.text}"
    )
    worst, other = sorted((output, state), key=lambda d: d.ratio, reverse=True)
    return replace(worst, detail=f"{worst.detail}; {other.detail}") if other.ratio > 1 else worst


def _worst_row(found: Array, expected: Array, allowed: Real, rows: Array) -> KdaDiscrepancy:
    """Over [T, HV, V], in the given rows; `allowed` [T, HV]."""
    if not len(rows):
        return KdaDiscrepancy(0.0, "o: nothing to compare")
    gap = _Gap.between(found[rows], expected[rows], allowed[rows])
    row, head = gap.place
    return KdaDiscrepancy(gap.ratio, f"o, token row {rows[row]}, value head {head}: {gap.text}")


@dataclass(frozen=True)
class _Gap:
    """The worst place of two answers: largest difference along the last axis beside what is allowed there."""

    place: tuple[int, ...]
    apart: float
    allowed: float

    @classmethod
    def between(cls, found: Array, expected: Array, allowed: Real) -> Self:
        with np.errstate(invalid="ignore"):
            apart = np.abs(_double(found) - _double(expected)).max(-1)
        apart = np.where(np.isfinite(apart), apart, np.inf)
        place = tuple(int(i) for i in np.unravel_index(int(np.argmax(apart / allowed)), apart.shape))
        return cls(place, float(apart[place]), float(allowed[place]))

    @property
    def ratio(self) -> float:
        """Inf where not finite."""
        return self.apart / self.allowed

    @property
    def text(self) -> str:
        if np.isinf(self.apart):
            return "not finite"
        return (
            f"answers differ by {self.apart:.3g}, their bounds allow {self.allowed:.3g} "
            f"({self.ratio:.3g} of it)"
        )


def _listed(counts: Iterable[int]) -> str:
    return ", ".join(map(str, counts))


def _double(x: Array) -> Real:
    return np.asarray(x, np.float64)


def _allowed_output(case: KdaCase) -> Real:
    """Largest honest error of each row and value head, [T, HV]."""
    return np.asarray(np.repeat(case.bound.o_max, case.places.counts, axis=0))


def _allowed_state(case: KdaCase) -> Real:
    """Largest honest error of each row of the final state, [N, HV, V]."""
    return np.asarray(np.repeat(case.bound.state_max, ROWS, axis=2)[:, :, : case.workload.V])
