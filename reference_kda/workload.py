"""A problem shape with a regime: what a study names in `[[workload]]` and what the gate is made of."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import numpy as np

from evotune.errors import StudyError
from evotune.reference_kda.namespace import DTYPES, Array
from evotune.reference_kda.regimes import REGIMES, Extents, deactivate, draw

CONTRACTS = ("plain", "production")
HEAD_DIMS = (64, 96, 128)
KEYS = (
    *("name", "group", "lengths", "batch", "length", "heads", "value_heads", "K", "V"),
    *("dtype", "contract", "regime", "initial_state", "final_state"),
)


@dataclass(frozen=True)
class Workload:
    """Shapes, types and regime of one call; inputs follow from it and a seed.

    Attributes:
        lengths: tokens of each sequence, packed one after the other; 0 is allowed.
        heads, value_heads: H and HV, HV a multiple of H.
        K, V: head dims of keys and of values.
        dtype: io dtype, "float32" or "bfloat16".
        contract: "plain" or "production"; see `problem.activate`.
        initial_state, final_state: whether the call brings and wants them.
        slack: rows after the last sequence, filled with NaN; no output may depend on them.
        offset: what is added to the K^-0.5 scale's exponent of two, so that a kernel that hard-codes it
            fails.
    """

    name: str
    group: str
    lengths: tuple[int, ...]
    heads: int = 1
    value_heads: int = 1
    K: int = 128
    V: int = 128
    dtype: str = "float32"
    contract: str = "plain"
    regime: str = "mixed"
    initial_state: bool = False
    final_state: bool = True
    slack: int = 0
    offset: int = 0

    @property
    def constants(self) -> Mapping[str, int | float | str]:
        return {"K": self.K, "V": self.V, "contract": self.contract}

    @property
    def tokens(self) -> int:
        """Rows of every [T, …] argument, slack included."""
        return sum(self.lengths) + self.slack

    @property
    def scale(self) -> float:
        """Exactly a float32, as the compiled entry takes it."""
        return float(np.float32(self.K**-0.5)) * 2.0**self.offset

    @property
    def cu_seqlens(self) -> tuple[int, ...]:
        return (0, *(int(c) for c in np.cumsum(self.lengths, dtype=np.int64)))

    @property
    def table(self) -> dict[str, Any]:
        """As a `[[workload]]` table has it; `slack` and `offset`, which none may have, where not 0."""
        known = {key: getattr(self, key) for key in KEYS if key not in ("group", "batch", "length")}
        own = {key: value for key in ("slack", "offset") if (value := getattr(self, key))}
        return known | own


def draw_inputs(workload: Workload, seed: int) -> dict[str, Array | None]:
    """Kernel arguments by name in their C types, deterministic in (workload, seed).

    q, k [T, H, K], v [T, HV, V] in the io dtype; g [T, HV, K], beta [T, HV] in float32 (plain) or the io
    dtype (production); A_log [HV], dt_bias [HV, K] (production); initial_state [N, HV, V, K]; cu_seqlens [N +
    1] int64.
    """
    w = workload
    rng = np.random.default_rng([seed, crc32(repr(w).encode())])
    values = draw(w.regime, Extents(w.tokens, w.heads, w.value_heads, w.K, w.V), rng)
    io, single = DTYPES[w.dtype], np.dtype(np.float32)
    gate = io if w.contract == "production" else single
    raw = deactivate(values, w.regime, rng) if w.contract == "production" else vars(values)
    types = {"q": io, "k": io, "v": io, "g": gate, "beta": gate, "A_log": single, "dt_bias": single}
    inputs: dict[str, Array | None] = {
        name: np.ascontiguousarray(raw[name], dtype=types[name]) if name in raw else None for name in types
    }
    for name in ("q", "k", "v", "g", "beta"):
        array = inputs[name]
        assert array is not None
        array[sum(w.lengths) :] = np.nan
    shape = (len(w.lengths), w.value_heads, w.V, w.K)
    size = np.abs(values.v).mean() if w.tokens and np.any(values.v) else 1.0
    inputs["initial_state"] = (
        (rng.standard_normal(shape) * size / 4).astype(np.float32) if w.initial_state else None
    )
    inputs["cu_seqlens"] = np.asarray(w.cu_seqlens, np.int64)
    return inputs


def parse_workload(table: Mapping[str, Any]) -> Workload:
    """From a `[[workload]]` table. Raises StudyError that names the key and the mend."""
    for key in table:
        if key not in KEYS:
            mend = _nearest(key, KEYS) or f"; known are {', '.join(KEYS)}"
            raise StudyError(f"workload: unknown key {key!r}{mend}")
    name = _string(table, "name", None)
    where = f"workload {name!r}"
    lengths = _lengths(table, where)
    heads = _integer(table, "heads", 1, where)
    value_heads = _integer(table, "value_heads", heads, where)
    if value_heads % heads:
        raise StudyError(f"{where}: value_heads = {value_heads} is no multiple of heads = {heads}")
    K = _choice(table, "K", HEAD_DIMS, 128, where)
    V = _choice(table, "V", HEAD_DIMS, 128, where)
    return Workload(
        name=name,
        group=_string(table, "group", default_group(lengths, value_heads)),
        lengths=lengths,
        heads=heads,
        value_heads=value_heads,
        K=K,
        V=V,
        dtype=_choice(table, "dtype", tuple(DTYPES), "float32", where),
        contract=_choice(table, "contract", CONTRACTS, "plain", where),
        regime=_choice(table, "regime", tuple(REGIMES), "mixed", where),
        initial_state=_choice(table, "initial_state", (True, False), False, where),
        final_state=_choice(table, "final_state", (True, False), True, where),
    )


def default_group(lengths: tuple[int, ...], value_heads: int) -> str:
    """Which dispatch a shape belongs to: "ragged", "many-heads" (8 chains or more), or "long"."""
    if len(set(lengths)) > 1:
        return "ragged"
    return "many-heads" if len(lengths) * value_heads >= 8 else "long"


def _lengths(table: Mapping[str, Any], where: str) -> tuple[int, ...]:
    if "lengths" in table:
        if "batch" in table or "length" in table:
            raise StudyError(f"{where}: give lengths, or batch and length, not both")
        lengths = table["lengths"]
        if not isinstance(lengths, list | tuple) or not lengths:
            raise StudyError(f"{where}: lengths must be a list of token counts, such as [128, 0, 512]")
        if any(type(n) is not int or n < 0 for n in lengths):
            raise StudyError(f"{where}: lengths = {list(lengths)} must hold integers >= 0")
        return tuple(lengths)
    if "length" not in table:
        raise StudyError(f"{where}: length (with batch), or lengths, is missing")
    return (_integer(table, "length", None, where),) * _integer(table, "batch", 1, where)


def _integer(table: Mapping[str, Any], key: str, default: int | None, where: str) -> int:
    value = table.get(key, default)
    if type(value) is not int or value < 1:
        raise StudyError(f"{where}: {key} = {value!r} must be an integer >= 1")
    return value


def _string(table: Mapping[str, Any], key: str, default: str | None) -> str:
    value = table.get(key, default)
    if not isinstance(value, str) or not value:
        raise StudyError(f"workload: {key} = {value!r} must be a non-empty string")
    return value


def _choice(table: Mapping[str, Any], key: str, known: tuple[Any, ...], default: Any, where: str) -> Any:
    value = table.get(key, default)
    if value in known and type(value) is type(known[0]):
        return value
    listed = ", ".join(repr(k).lower() if isinstance(k, bool) else repr(k) for k in known)
    raise StudyError(f"{where}: {key} = {value!r}{_nearest(value, known) or f' is none of {listed}'}")


def _nearest(value: object, known: tuple[Any, ...]) -> str:
    near = difflib.get_close_matches(str(value), [str(k) for k in known], 1)
    return f"; did you mean {near[0]!r}?" if near and isinstance(value, str) else ""
