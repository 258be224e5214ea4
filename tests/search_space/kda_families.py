"""The families of inputs and uses that KDA kernels have been seen to fail on, and what is asked in each.

A `Case` has a truth; a `Use` asks a kernel several times and compares its answers with each other. Both are
named after the mistake they are for; numbers such as fla#1240 are issues of public KDA kernels.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from evotune.reference_kda.case import KdaCase, case_of
from evotune.reference_kda.gate_cases import gate_cases
from evotune.reference_kda.namespace import Array
from evotune.reference_kda.problem import LOWER_BOUND
from evotune.reference_kda.workload import Workload, draw_inputs
from evotune.search_space.template import Specialization

Inputs = dict[str, Array | None]
Edit = Callable[[Inputs, Workload], None]

ADVERSARIAL = frozenset(
    {"identical_keys", "correlated_keys", "one_hot_keys", "zero_keys", "small_scale", "large_scale", "ones"}
)
RANDOM_LIMIT, ADVERSARIAL_LIMIT = 0.006, 0.03
"""Largest |error| / |truth|, L2 norms of a whole output, in bfloat16. Norms of a few tokens are single random
numbers, which only the derived bound can judge: from 64 tokens on."""
JUDGED_TOKENS = 64


@dataclass(frozen=True)
class Case:
    """One problem with a truth.

    Attributes:
        edit: name in `EDITS` of what is changed in the inputs after they are drawn.
        reports: public bug reports whose trigger this is.
        adversarial: whether it is so for another reason than its regime.
    """

    family: str
    name: str
    workload: Workload
    edit: str = ""
    reports: tuple[str, ...] = ()
    adversarial: bool = False

    @property
    def hard(self) -> bool:
        """Whether the larger limit of the relative error holds."""
        return self.adversarial or self.workload.regime in ADVERSARIAL

    @property
    def limit(self) -> float:
        return ADVERSARIAL_LIMIT if self.hard else RANDOM_LIMIT

    @property
    def cost(self) -> int:
        """Token-heads, what solving it takes time for."""
        return sum(self.workload.lengths) * self.workload.value_heads

    @property
    def seed(self) -> int:
        return sum(self.workload.lengths) + 7

    def solve(self) -> KdaCase:
        """Inputs, float64 truth and derived bound; deterministic."""
        inputs = draw_inputs(self.workload, self.seed)
        if self.edit:
            EDITS[self.edit](inputs, self.workload)
        return case_of(replace(self.workload, name=self.name), inputs, self.seed)


def _set(inputs: Inputs, name: str, value: Any) -> None:
    array = inputs[name]
    assert array is not None
    inputs[name] = np.ascontiguousarray(
        np.broadcast_to(np.asarray(value, np.float64), array.shape), array.dtype
    )


def _raw_gate(value: float) -> Edit:
    """A raw gate with A_log and dt_bias of zero: a log decay of −5 sigmoid(value) in both contracts."""

    def edit(inputs: Inputs, workload: Workload) -> None:
        if workload.contract == "production":
            for name in ("A_log", "dt_bias"):
                _set(inputs, name, 0.0)
            _set(inputs, "g", value)
        else:
            _set(inputs, "g", LOWER_BOUND / (1 + np.exp(-value)))

    return edit


def _log_decay(value: Any) -> Edit:
    """A log decay in the plain contract, the raw gate next to it in the production one (bias 0, rate 1)."""

    def edit(inputs: Inputs, workload: Workload) -> None:
        share = np.clip(
            np.asarray(value(workload) if callable(value) else value) / LOWER_BOUND, 1e-13, 1 - 1e-7
        )
        if workload.contract == "production":
            for name in ("A_log", "dt_bias"):
                _set(inputs, name, 0.0)
            _set(inputs, "g", np.log(share / (1 - share)))
        else:
            _set(inputs, "g", share * LOWER_BOUND)

    return edit


def _half_channels(workload: Workload) -> Array:
    return np.where(np.arange(workload.K) % 2, LOWER_BOUND, 0.0)


def _beta_logit(value: float) -> Edit:
    def edit(inputs: Inputs, workload: Workload) -> None:
        signs = np.where(np.arange(workload.tokens)[:, None] % 3, 1.0, -1.0)
        logits = np.broadcast_to(signs * value, (workload.tokens, workload.value_heads))
        _set(inputs, "beta", logits if workload.contract == "production" else 1 / (1 + np.exp(-logits)))

    return edit


def _constant_keys(inputs: Inputs, workload: Workload) -> None:
    """FlashKDA#34: q, k constant, raw gate −12, beta logit 8."""
    for name in ("q", "k"):
        unit = workload.K**-0.5 if workload.contract == "plain" else 1.0
        _set(inputs, name, unit)
    _raw_gate(-12.0)(inputs, workload)
    _set(inputs, "beta", 8.0 if workload.contract == "production" else 1 / (1 + np.exp(-8.0)))


def _zeros(inputs: Inputs, workload: Workload) -> None:
    for name in ("q", "k", "v", "g", "beta"):
        _set(inputs, name, 0.0)


def _period_one(inputs: Inputs, workload: Workload) -> None:
    """The same token again and again; half the heads never forget."""
    for name in ("q", "k", "v", "beta"):
        array = inputs[name]
        assert array is not None
        inputs[name] = np.ascontiguousarray(np.broadcast_to(array[:1], array.shape))
    heads = np.arange(workload.value_heads)[:, None] % 2
    _log_decay(lambda w: np.where(heads, -0.01, 0.0))(inputs, workload)


def _extreme_raw(inputs: Inputs, workload: Workload) -> None:
    """Raw gates and logits far beyond where any sigmoid bends: ±300, so that exponentials overflow inside."""
    rng = np.random.default_rng(5)
    if workload.contract == "production":
        _set(inputs, "A_log", np.log(16.0))
        g, beta = inputs["g"], inputs["beta"]
        assert g is not None
        assert beta is not None
        _set(inputs, "g", rng.choice([-300.0, 300.0], g.shape))
        _set(inputs, "beta", rng.choice([-300.0, 300.0], beta.shape))


EDITS: Mapping[str, Edit] = {
    "gate −1e-4": _log_decay(-1e-4),
    "gate −2.5": _log_decay(-2.5),
    "half −5, half 0": _log_decay(_half_channels),
    "beta ±8": _beta_logit(8.0),
    "beta ±30": _beta_logit(30.0),
    "constant keys": _constant_keys,
    "zeros": _zeros,
    "period one": _period_one,
    "extreme raw": _extreme_raw,
}

LENGTHS = (1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129, 500, 1000, 1500)
LONG_LENGTHS = (8191, 8192, 16224)


def cases(spec: Specialization, *, main: bool) -> tuple[Case, ...]:
    """All cases with a truth for one specialization; `main` has the long ones too."""
    base = Workload(
        "",
        "gate",
        (),
        heads=2,
        value_heads=2,
        K=spec.integer("K"),
        V=spec.integer("V"),
        dtype=spec.dtype,
        contract=str(spec["contract"]),
    )
    found = [*_lengths(base, main), *_packs(base, main), *_gates(base), *_keys(base), *_screen(base)]
    if main:
        found += _long_reports(base)
    return tuple(found)


def cases_of_float32(spec: Specialization) -> tuple[Case, ...]:
    """Of a specialization whose bounds are dear to derive: packs and the gate's own cases."""
    return tuple(case for case in cases(spec, main=False) if case.family in ("2 packs", "10 screen gate"))


def _lengths(base: Workload, main: bool) -> Iterator[Case]:
    for T in (*LENGTHS, *(LONG_LENGTHS if main else ())):
        grouped = 4 if T % 4 == 1 and T < 1000 else 2
        reports = {1500: ("cuLA#43",), 500: ("cuLA#38",), 63: ("cuLA#38",), 17: ("fla#624",)}.get(T, ())
        for state in (False, True):
            w = replace(base, lengths=(T,), value_heads=grouped, initial_state=state)
            layout = ("vllm#40956",) if state else ()  # a state in and out that is not symmetric
            yield Case("1 lengths", f"{T} tokens{', h0' if state else ''}", w, reports=reports + layout)


def _packs(base: Workload, main: bool) -> Iterator[Case]:
    with_state = replace(base, initial_state=True)
    packs: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
        "one token": ((1,), ()),
        "one empty": ((0,), ("FlashKDA#32",)),
        "two empty": ((0, 0), ("FlashKDA#32", "flashinfer#3536")),
        "no sequence": ((), ()),
        "full, empty, full": ((128, 0, 128), ("vllm-ascend#11893", "FlashKDA#24")),
        "four of one token": ((1, 1, 1, 1), ()),
        "short": ((4, 8, 12), ()),
        "three ragged": ((17, 33, 65), ()),
    }
    for name, (lengths, reports) in packs.items():
        yield Case("2 packs", name, replace(with_state, lengths=lengths), reports=reports)
        yield Case("2 packs", f"{name}, no h0", replace(base, lengths=lengths), reports=reports)
    strong = replace(with_state, lengths=(63, 65), regime="saturated")
    yield Case("2 packs", "63 and 65, strong gates", strong, reports=("sglang-jax#1587",))
    padded = replace(with_state, lengths=(2, 285, 95), slack=2)
    yield Case("2 packs", "384 rows, NaN behind the last sequence", padded, reports=("tokenspeed#969",))
    if main:
        seven = replace(with_state, lengths=(1238, 1199, 1240, 1216, 1187, 1203, 519), value_heads=2, heads=1)
        yield Case("2 packs", "seven of 1,200", seven, reports=("flashinfer#3565",))
        long_short = replace(with_state, lengths=(8191, 1))
        yield Case("2 packs", "8,191 and 1", long_short, reports=("cudnn-frontend#1013",))


def _gates(base: Workload) -> Iterator[Case]:
    w = replace(base, lengths=(200, 57), initial_state=True)
    for regime in ("zero", "moderate", "saturated", "split", "alternating", "strong", "weak", "mixed"):
        reports = {"saturated": ("TIRx-kernels#214",), "strong": ("tt-metal#56550",)}.get(regime, ())
        yield Case("3 gates", regime, replace(w, regime=regime), reports=reports)
    for edit in ("gate −1e-4", "gate −2.5", "half −5, half 0"):
        yield Case("3 gates", edit, w, edit)
    reset = replace(w, lengths=(1336,), regime="one_reset")  # token 1,002 forgets all
    yield Case("3 gates", "−5 after 1,000 tokens of 0", reset)
    yield Case("3 gates", "raw gates and logits of ±300", w, "extreme raw")


def _keys(base: Workload) -> Iterator[Case]:
    w = replace(base, lengths=(300, 81), initial_state=True)
    for regime in (*sorted(ADVERSARIAL), "beta_one", "beta_zero"):
        yield Case("4 keys and beta", regime, replace(w, regime=regime))
    for edit in ("beta ±8", "beta ±30"):
        yield Case("4 keys and beta", edit, w, edit)
    yield Case("4 keys and beta", "one token again and again", w, "period one", ("tokenspeed",), True)


def _screen(base: Workload) -> Iterator[Case]:
    """What every configuration must pass before it is timed."""
    for entry in gate_cases(replace(base, name="gate", heads=1, value_heads=1), "screen"):
        name = entry.workload.name.removeprefix("gate, ")
        yield Case("10 screen gate", name, entry.workload)


def _long_reports(base: Workload) -> Iterator[Case]:
    one = replace(base, heads=1, value_heads=1)
    constant = replace(one, lengths=(16384,))
    yield Case("4 keys and beta", "16,384 constant keys", constant, "constant keys", ("FlashKDA#34",), True)
    correlated = replace(base, lengths=(8192,), regime="correlated_keys")
    yield Case("4 keys and beta", "8,192 keys of cosine 0.9", correlated, reports=("cudnn-frontend#1051",))
    nothing = replace(one, lengths=(16224,), regime="zero")
    yield Case("1 lengths", "16,224 tokens of zeros", nothing, "zeros", ("cudnn-frontend#1052",))
    yield Case("1 lengths", "4,000 tokens that never forget", replace(base, lengths=(4000,), regime="zero"))
