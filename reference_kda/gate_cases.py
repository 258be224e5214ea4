"""The rungs smoke, edges and regimes: which problems a kernel meets before it may be timed.

Cheap and telling first. The full lists are drawn from bug reports on public KDA kernels; each comment names
one.
Lengths stay short where the mistake does not need long ones: float64 truths at K = V = 128 cost about 1 ms
per 16 tokens and head.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from evotune.reference_kda.workload import Workload

Rung = Literal["smoke", "edges", "regimes"]
Fields = dict[str, Any]
Entries = dict[str, Fields]

SCREEN_REGIMES = (
    *("zero", "saturated", "split", "identical_keys", "strong", "alternating", "correlated_keys"),
    *("zero_keys", "beta_one", "small_scale", "large_scale"),
)
FULL_REGIMES = (
    *SCREEN_REGIMES,
    *("weak", "moderate", "mixed", "one_reset", "one_hot_keys", "beta_zero", "ones", "gauntlet"),
)


@dataclass(frozen=True)
class KdaGateCase:
    """One entry of a rung."""

    rung: Rung
    name: str
    workload: Workload


def gate_cases(base: Workload, level: str) -> Iterator[KdaGateCase]:
    """All cases of a level in order; `base` fixes dims, dtype and contract, its name starts every name."""
    yield from _entries(base, "smoke", SMOKE)
    yield from _entries(base, "edges", SCREEN_EDGES if level == "screen" else SCREEN_EDGES | FULL_EDGES)
    yield from _entries(base, "regimes", _regimes(level))


def hostile(workload: Workload) -> Workload:
    """A problem of exactly these shapes whose values are everything that kernels are known to fail at."""
    return replace(workload, name=f"{workload.name}, hostile values", regime="gauntlet")


def _entries(base: Workload, rung: Rung, entries: Entries) -> Iterator[KdaGateCase]:
    for name, fields in entries.items():
        yield KdaGateCase(rung, name, replace(base, name=f"{base.name}, {name}", **fields))


SMOKE: Entries = {
    "one token of ones": {"lengths": (1,), "regime": "ones"},
    "one chunk of ones": {"lengths": (16,), "regime": "ones"},
    "one token, state carried in": {"lengths": (1,), "regime": "strong", "initial_state": True},
    "one chunk, state carried in": {"lengths": (16,), "initial_state": True},
}

SCREEN_EDGES: Entries = {
    "two tokens": {"lengths": (2,), "regime": "strong"},
    "a chunk less one": {"lengths": (15,), "initial_state": True},
    "a chunk and one": {"lengths": (17,), "regime": "weak"},
    "odd length, grouped value heads": {
        "lengths": (33,),
        "heads": 2,
        "value_heads": 4,
        "initial_state": True,
    },
    "prime length, three heads, final state not wanted": {
        "lengths": (37,),
        "heads": 3,
        "value_heads": 3,
        "final_state": False,
    },
    "several tiles and one": {"lengths": (129,), "regime": "weak", "initial_state": True},
    # vllm-project/vllm-ascend#11893, MoonshotAI/FlashKDA#32
    "ragged with empty sequences": {"lengths": (0, 1, 63, 0, 17), "value_heads": 2, "initial_state": True},
    "all sequences empty": {"lengths": (0, 0), "initial_state": True},
    "another scale": {"lengths": (20,), "offset": 1},
}

FULL_EDGES: Entries = {
    **{f"{T} tokens": {"lengths": (T,), "initial_state": T % 4 == 3} for T in (16, 31, 63, 64, 65, 127, 500)},
    "no sequence": {"lengths": ()},
    "1000 tokens, weak decay": {"lengths": (1000,), "regime": "weak", "initial_state": True},
    "one long sequence": {"lengths": (2049,), "regime": "mixed", "final_state": True},
    "four sequences of one token": {"lengths": (1, 1, 1, 1), "initial_state": True},
    "short sequences": {"lengths": (4, 8, 12), "value_heads": 2},
    "a full, an empty, a full one": {"lengths": (128, 0, 128), "initial_state": True},
    # sgl-project/sglang-jax#1587: cumulative gate reset before masking
    "two sequences in one tile, strong gates": {"lengths": (63, 65), "regime": "saturated"},
    "a long one, then one token": {"lengths": (511, 1), "initial_state": True},  # NVIDIA/cudnn-frontend#1013
    "three ragged": {"lengths": (17, 33, 65), "heads": 2, "value_heads": 4, "initial_state": True},
    # lightseekorg/tokenspeed#969: rows past the last sequence hold NaN
    "rows after the last sequence": {"lengths": (2, 185, 45), "slack": 24, "initial_state": True},
    "seven ragged": {"lengths": (138, 99, 140, 116, 87, 103, 19)},  # flashinfer#3565, a tenth as long
    "a hundred short ones": {"lengths": (1, 2, 3, 1) * 25, "initial_state": True},
    "eight value heads of one": {"lengths": (50,), "value_heads": 8, "initial_state": True},
    "no state in, none out": {"lengths": (100,), "heads": 2, "value_heads": 2, "final_state": False},
}


def _regimes(level: str) -> Entries:
    if level == "screen":
        return {f"regime {r}": {"lengths": (81,), "regime": r, "initial_state": True} for r in SCREEN_REGIMES}
    entries: Entries = {}
    for i, r in enumerate(FULL_REGIMES):
        shape = {"lengths": (200, 57), "heads": 1, "value_heads": 2}
        entries[f"regime {r}"] = {**shape, "regime": r, "initial_state": True}
        if i < len(SCREEN_REGIMES):
            entries[f"regime {r}, 400 tokens, no state"] = {"lengths": (400,), "regime": r}
    return entries
