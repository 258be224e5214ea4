"""Workloads: seeded inputs, and tables of study.toml with one clear line for each mistake."""

from typing import Any

import numpy as np
import pytest

from evotune.errors import StudyError
from evotune.reference_kda import REGIMES, Workload, activate, draw_inputs, parse_workload
from evotune.reference_kda.namespace import DTYPES
from evotune.reference_kda.regimes import Extents, draw

GOOD: dict[str, Any] = {"name": "w", "batch": 2, "length": 8, "heads": 2, "value_heads": 4, "K": 64}


def test_parse_fills_what_is_left_out() -> None:
    w = parse_workload(GOOD)
    assert (w.lengths, w.heads, w.value_heads, w.K, w.V) == ((8, 8), 2, 4, 64, 128)
    assert (w.dtype, w.contract, w.regime, w.group) == ("float32", "plain", "mixed", "many-heads")
    assert w.constants == {"K": 64, "V": 128, "contract": "plain"}
    assert parse_workload({"name": "w", "lengths": [3, 0, 9]}).group == "ragged"
    assert parse_workload({"name": "w", "length": 900}).group == "long"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"heds": 2}, "unknown key 'heds'; did you mean 'heads'"),
        ({"zzz": 2}, "known are name, group"),
        ({"name": ""}, "name = '' must be a non-empty string"),
        ({"length": 0}, "length = 0 must be an integer >= 1"),
        ({"length": True}, "length = True must be an integer"),
        ({"length": 2.5}, "length = 2.5 must be an integer"),
        ({"lengths": [1]}, "give lengths, or batch and length, not both"),
        ({"value_heads": 3}, "value_heads = 3 is no multiple of heads = 2"),
        ({"K": 100}, "K = 100 is none of 64, 96, 128"),
        ({"dtype": "bfloat"}, "dtype = 'bfloat'; did you mean 'bfloat16'"),
        ({"dtype": "int8"}, "dtype = 'int8' is none of 'float32', 'bfloat16'"),
        ({"regime": "saturate"}, "did you mean 'saturated'"),
        ({"contract": 3}, "contract = 3 is none of 'plain', 'production'"),
        ({"initial_state": 1}, "initial_state = 1 is none of true, false"),
    ],
)
def test_parse_names_the_key_and_the_mend(change: dict[str, Any], says: str) -> None:
    with pytest.raises(StudyError) as error:
        parse_workload({**GOOD, **change})
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("lengths", [[], [-1], [1.5], 4, ["a"]])
def test_parse_refuses_lengths(lengths: object) -> None:
    with pytest.raises(StudyError, match="lengths"):
        parse_workload({"name": "w", "lengths": lengths})


def test_parse_misses_length() -> None:
    with pytest.raises(StudyError, match=r"length \(with batch\), or lengths, is missing"):
        parse_workload({"name": "w"})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("contract", ["plain", "production"])
def test_inputs_have_the_types_of_the_entry(contract: str, dtype: str) -> None:
    w = Workload("w", "g", (5, 0, 2), 2, 4, 8, 6, dtype, contract, "mixed", initial_state=True)
    x = draw_inputs(w, 3)
    io = DTYPES[dtype]
    gate = io if contract == "production" else np.float32
    types = {name: (None if a is None else (a.shape, a.dtype)) for name, a in x.items()}
    parameters = contract == "production"
    assert types == {
        "q": ((7, 2, 8), io),
        "k": ((7, 2, 8), io),
        "v": ((7, 4, 6), io),
        "g": ((7, 4, 8), gate),
        "beta": ((7, 4), gate),
        "A_log": ((4,), np.float32) if parameters else None,
        "dt_bias": ((4, 8), np.float32) if parameters else None,
        "initial_state": ((3, 4, 6, 8), np.float32),
        "cu_seqlens": ((4,), np.int64),
    }
    assert all(a is None or a.flags.c_contiguous for a in x.values())


def test_inputs_follow_workload_and_seed() -> None:
    w = Workload("w", "g", (5,), K=8, V=8)
    one, same, other = (np.asarray(draw_inputs(w, seed)["v"]) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one, same)
    assert (one != other).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("contract", ["plain", "production"])
@pytest.mark.parametrize("regime", REGIMES)
def test_regimes_keep_their_promise(regime: str, contract: str, dtype: str) -> None:
    """Gates within [-5, 0], beta within [0, 1], keys of norm at most 1, whatever the contract."""
    w = Workload("w", "g", (64,), 2, 2, 64, 64, dtype, contract, regime)
    p = activate(draw_inputs(w, 0), contract, w.scale, np.float64)
    assert p.g.min() >= -5
    assert p.g.max() <= 0
    assert p.beta.min() >= 0
    assert p.beta.max() <= 1
    assert np.linalg.norm(p.k, axis=-1).max() <= 1 + 2**-8
    near = 0.05 if contract == "production" else 1e-6
    expected = {"saturated": -5.0, "zero": 0.0, "moderate": -0.7}
    if regime in expected:
        assert np.abs(p.g - expected[regime]).max() <= near
    if regime == "identical_keys":
        assert (p.k @ p.k.swapaxes(-1, -2)).min() > -1  # finite
        assert np.abs(np.einsum("thk,hk->th", p.k, p.k[0])).min() > 0.99
        assert p.beta.min() > 0.99
    if regime == "correlated_keys":
        cosine = np.einsum("thk,hk->th", p.k, p.k[0])[1:]
        assert 0.8 < cosine.mean() < 0.97
    if regime.startswith("beta_"):
        assert np.abs(p.beta - (regime == "beta_one")).max() < 1e-6
    if regime == "mixed":
        assert p.g.min() < -0.1
        assert p.g.max() > -1e-3


@pytest.mark.parametrize("tokens", [9, 40, 82, 300])
def test_a_gauntlet_meets_every_regime_however_short(tokens: int) -> None:
    """A timed shape is tried on hostile values once: one left out there is asked about by nobody."""
    for seed in range(40):
        values = draw("gauntlet", Extents(T=tokens, H=1, HV=2, K=8, V=4), np.random.default_rng(seed))
        assert (values.g < -4.99).all(axis=(1, 2)).any(), "saturated"
        assert (values.g == 0).all(axis=(1, 2)).any(), "zero"
        assert (values.beta == 0.98).all(axis=1).any(), "identical keys"
        assert ((values.k != 0).sum(axis=2) == 1).all(axis=1).any(), "one-hot keys"
