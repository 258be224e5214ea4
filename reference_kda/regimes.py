"""What values the inputs take. Each regime is one way in which KDA kernels have been seen to go wrong.

A regime is stated on activated values: unit keys, log decay in [LOWER_BOUND, 0], beta in [0, 1]. Inputs of
the production contract are drawn so that activation gives those values, up to the rounding of the io dtype.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from evotune.reference_kda.problem import LOWER_BOUND

Real = npt.NDArray[np.float64]
Rng = np.random.Generator

LOGIT_LIMIT = 30.0
"""Logits are clipped here: sigmoid(30) is 1 in float32, sigmoid(-30) is 1e-13."""


@dataclass(frozen=True)
class Extents:
    T: int
    H: int
    HV: int
    K: int
    V: int


@dataclass(frozen=True)
class Values:
    """Activated inputs, float64: q, k [T, H, K], v [T, HV, V], g [T, HV, K], beta [T, HV]."""

    q: Real
    k: Real
    v: Real
    g: Real
    beta: Real


def unit_rows(x: Real) -> Real:
    """Rows of norm 1; zero rows stay zero."""
    norm = np.linalg.norm(x, axis=-1, keepdims=True)
    return np.asarray(x / np.where(norm > 0, norm, 1))


def _gate(decay: Callable[[Rng, tuple[int, int, int]], Real]) -> Callable[[Values, Extents, Rng], Values]:
    def with_gate(base: Values, e: Extents, rng: Rng) -> Values:
        return Values(base.q, base.k, base.v, decay(rng, (e.T, e.HV, e.K)), base.beta)

    return with_gate


def _beta(value: float) -> Callable[[Values, Extents, Rng], Values]:
    def with_beta(base: Values, e: Extents, rng: Rng) -> Values:
        return Values(base.q, base.k, base.v, base.g, np.full((e.T, e.HV), value))

    return with_beta


def _memory_spans(rng: Rng, shape: tuple[int, int, int]) -> Real:
    """Per channel a memory of 4 to 1e5 tokens, log-uniform, with each token's decay off by up to half."""
    memory = 10 ** rng.uniform(np.log10(4), 5, shape[1:])
    return np.asarray(-rng.uniform(0.5, 1.5, shape) / memory)


def _alternating(rng: Rng, shape: tuple[int, int, int]) -> Real:
    token = np.arange(shape[0]) + int(rng.integers(2))
    return np.broadcast_to(np.where(token % 2 == 0, 0.0, LOWER_BOUND)[:, None, None], shape)


def _split_channels(rng: Rng, shape: tuple[int, int, int]) -> Real:
    """Half of the channels forget at once, half hardly ever."""
    return np.broadcast_to(np.where(rng.permutation(shape[2]) < shape[2] // 2, LOWER_BOUND, -1e-4), shape)


def _one_reset(rng: Rng, shape: tuple[int, int, int]) -> Real:
    """No decay but for one token, late."""
    g = np.zeros(shape)
    g[shape[0] * 3 // 4 :][:1] = LOWER_BOUND
    return g


def _identical_keys(base: Values, e: Extents, rng: Rng) -> Values:
    """beta near 1 and hardly a decay: I + L is all ones, whose inverse is benign and whose powers are not."""
    k = np.broadcast_to(base.k[:1], base.k.shape)
    return Values(base.q, k, base.v, np.full((e.T, e.HV, e.K), -1e-4), np.full((e.T, e.HV), 0.9997))


def _correlated_keys(base: Values, e: Extents, rng: Rng) -> Values:
    """Cosine 0.9 between any two keys (NVIDIA/cudnn-frontend#1051)."""
    common = unit_rows(rng.standard_normal((1, e.H, e.K)))
    k = unit_rows(np.sqrt(0.9) * common + np.sqrt(0.1) * base.k)
    g = -rng.uniform(0.012, 0.034, (e.T, e.HV, e.K))
    return Values(base.q, k, base.v, g, np.full((e.T, e.HV), 0.98))


def _one_hot_keys(base: Values, e: Extents, rng: Rng) -> Values:
    k = np.zeros_like(base.k)
    np.put_along_axis(k, rng.integers(0, min(e.K, 24), (e.T, e.H, 1)), 1.0, axis=-1)
    return Values(base.q, k, base.v, base.g, base.beta)


def _zero_keys(base: Values, e: Extents, rng: Rng) -> Values:
    """Every third key, on average, is zero, and so is every fifth query: norms meet their epsilon."""
    k = np.where(rng.random((e.T, e.H, 1)) < 1 / 3, 0.0, base.k)
    q = np.where(rng.random((e.T, e.H, 1)) < 1 / 5, 0.0, base.q)
    return Values(q, k, base.v, base.g, base.beta)


def _scaled(norm: float, value: float) -> Callable[[Values, Extents, Rng], Values]:
    """Queries of another norm, values of another size; keys too where the contract normalises them."""

    def scaled(base: Values, e: Extents, rng: Rng) -> Values:
        return Values(base.q * norm, base.k, base.v * value, base.g, base.beta)

    return scaled


def _ones(base: Values, e: Extents, rng: Rng) -> Values:
    """The first thing a person tries: constant inputs, a constant gate."""
    q, v = np.full((e.T, e.H, e.K), e.K**-0.5), np.ones((e.T, e.HV, e.V))
    return Values(q, q, v, np.full((e.T, e.HV, e.K), -0.5), np.full((e.T, e.HV), 0.5))


_STRETCH = 24
_HOSTILE = (
    *("zero", "identical_keys", "saturated", "split", "alternating", "one_hot_keys", "zero_keys"),
    *("correlated_keys", "mixed"),
)


def _gauntlet(base: Values, e: Extents, rng: Rng) -> Values:
    """One regime after the other in random order, a stretch of tokens each: for shapes tried once.

    Stretches are shorter where there are too few tokens for all regimes: every one must have its turn.
    """
    stretch = min(_STRETCH, max(1, e.T // len(_HOSTILE)))
    rounds = -(-e.T // (stretch * len(_HOSTILE)))
    order = rng.permuted(np.tile(np.arange(len(_HOSTILE)), (rounds, 1)), axis=1).reshape(-1)
    whose = np.repeat(order, stretch)[: e.T]
    found = {name: array.copy() for name, array in vars(base).items()}
    for number, regime in enumerate(_HOSTILE):
        drawn = vars(REGIMES[regime](base, e, rng))
        for name, array in found.items():
            array[whose == number] = drawn[name][whose == number]
    return Values(**found)


REGIMES: Mapping[str, Callable[[Values, Extents, Rng], Values]] = {
    "strong": _gate(lambda rng, shape: -rng.uniform(1, 5, shape)),
    "weak": _gate(lambda rng, shape: -rng.uniform(0, 0.026, shape)),
    "zero": _gate(lambda rng, shape: np.zeros(shape)),
    "moderate": _gate(lambda rng, shape: np.full(shape, -0.7)),
    "saturated": _gate(lambda rng, shape: np.full(shape, LOWER_BOUND)),
    "mixed": _gate(_memory_spans),
    "split": _gate(_split_channels),
    "alternating": _gate(_alternating),
    "one_reset": _gate(_one_reset),
    "identical_keys": _identical_keys,
    "correlated_keys": _correlated_keys,
    "one_hot_keys": _one_hot_keys,
    "zero_keys": _zero_keys,
    "small_scale": _scaled(1e-4, 1e-3),
    "large_scale": _scaled(1e2, 1e3),
    "beta_zero": _beta(0.0),
    "beta_one": _beta(1.0),
    "ones": _ones,
    "gauntlet": _gauntlet,
}


def draw(regime: str, extents: Extents, rng: Rng) -> Values:
    """Activated values of a regime; what it does not speak of is random, gates as in "mixed"."""
    e = extents
    base = Values(
        q=unit_rows(rng.standard_normal((e.T, e.H, e.K))),
        k=unit_rows(rng.standard_normal((e.T, e.H, e.K))),
        v=rng.standard_normal((e.T, e.HV, e.V)),
        g=_memory_spans(rng, (e.T, e.HV, e.K)),
        beta=rng.random((e.T, e.HV)),
    )
    return REGIMES[regime](base, e, rng)


def deactivate(values: Values, regime: str, rng: Rng) -> dict[str, Real]:
    """Arguments of the production contract whose activation gives `values`.

    q and k get norms around sqrt(K) / 2 (1e-4 and 1e4 in the scale regimes), A_log = log U(1, 16) and dt_bias
    as a trained model has them, and raw gates and beta logits that undo both, clipped at ±LOGIT_LIMIT.
    """
    T, HV, K = values.g.shape
    norm = {"small_scale": 1e-4, "large_scale": 1e4}.get(regime, K**0.5 / 2)
    length = norm * rng.uniform(0.5, 1.5, (T, values.k.shape[1], 1))
    A_log = np.log(rng.uniform(1, 16, HV))
    dt_bias = rng.uniform(-1, 1, (HV, K))
    raw = _logit(values.g / LOWER_BOUND) / np.exp(A_log)[:, None] - dt_bias
    return {
        "q": values.q * length,
        "k": values.k * length,
        "v": values.v,
        "g": raw,
        "beta": _logit(values.beta),
        "A_log": A_log,
        "dt_bias": dt_bias,
    }


def _logit(p: Real) -> Real:
    tiny = np.exp(-LOGIT_LIMIT)
    odds = np.log(np.maximum(p, tiny)) - np.log(np.maximum(1 - p, tiny))
    return np.asarray(np.clip(odds, -LOGIT_LIMIT, LOGIT_LIMIT))
