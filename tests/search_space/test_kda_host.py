"""The host template against the float64 recurrence, within the bounds that reference_kda derives."""

import dataclasses
import itertools
import random
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evotune.reference_kda.case import KdaCase, solve
from evotune.reference_kda.problem import activate
from evotune.reference_kda.recurrent import recurrence
from evotune.reference_kda.workload import Workload
from evotune.search_space.branch import stages
from evotune.search_space.space import choices_of
from evotune.search_space.templates.kda_host import TEMPLATE, KdaHostKnobs
from tests.search_space.host_kernel import Kernel, compile_all, compile_unit, kernel, spec

CHOICES = choices_of(KdaHostKnobs)
RAGGED = Workload("ragged", "ragged", (3, 0, 1, 70, 33), heads=1, value_heads=2, initial_state=True)
CHUNKED = dataclasses.replace(KdaHostKnobs(), algorithm="chunked", value_tile=16)
RECURRENT = dataclasses.replace(KdaHostKnobs(), value_tile=16)
VARIANTS = (
    {},
    {"contract": "production", "K": 64, "V": 96},
    {"dtype": "bfloat16", "K": 96, "V": 64, "initial_state": False},
    {"contract": "production", "dtype": "bfloat16", "final_state": False, "heads": 2, "value_heads": 2},
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@cache
def solved(workload: Workload) -> KdaCase:
    return solve(workload, 7)


def legal(facts: Any) -> Iterator[KdaHostKnobs]:
    for values in itertools.product(*CHOICES.values()):
        knobs = KdaHostKnobs(*values)
        if TEMPLATE.why_not(knobs, facts) is None:
            yield knobs


def covering(seed: int, count: int) -> list[tuple[KdaHostKnobs, KdaCase]]:
    """`count` legal configurations in which every choice of every knob appears, over the four variants."""
    cases = [solved(dataclasses.replace(RAGGED, **changes)) for changes in VARIANTS]
    rng = random.Random(seed)
    missing = {(name, value) for name, values in CHOICES.items() for value in values}
    found: list[tuple[KdaHostKnobs, KdaCase]] = []
    while len(found) < count or missing:
        case = cases[len(found) % len(cases)]
        w = case.workload
        drawn = [KdaHostKnobs(**{n: rng.choice(c) for n, c in CHOICES.items()}) for _ in range(300)]
        facts = spec(w.K, w.V, w.contract, w.dtype)
        allowed = [k for k in drawn if TEMPLATE.why_not(k, facts) is None]
        best = max(allowed, key=lambda k: len(missing & set(dataclasses.asdict(k).items())))
        missing -= set(dataclasses.asdict(best).items())
        found.append((best, case))
    return found


@pytest.fixture(scope="module")
def covered(folder: Path) -> list[tuple[KdaHostKnobs, KdaCase]]:
    """Compiled on all processors."""
    found = covering(3, 20)
    units = [
        TEMPLATE.unit(TEMPLATE.source, knobs, spec(w.K, w.V, w.contract, w.dtype))
        for knobs, w in ((knobs, case.workload) for knobs, case in found)
    ]
    compile_all(units, folder)
    return found


@pytest.mark.parametrize("index", range(20))
def test_every_choice_is_right_somewhere(
    index: int, covered: list[tuple[KdaHostKnobs, KdaCase]], folder: Path
) -> None:
    assert len(covered) == 20
    knobs, case = covered[index]
    worst = case.worst(kernel(knobs, case, folder)(case).outputs)
    assert worst.ratio <= 1, f"{knobs}: {worst.detail}"


@pytest.mark.parametrize("knobs", [RECURRENT, CHUNKED], ids=["recurrent", "chunked"])
@pytest.mark.parametrize(
    "regime", ["saturated", "split", "alternating", "identical_keys", "zero_keys", "large_scale"]
)
def test_hard_regimes(knobs: KdaHostKnobs, regime: str, folder: Path) -> None:
    w = Workload(
        "hard", "ragged", (65, 18), K=64, V=96, contract="production", regime=regime, initial_state=True
    )
    knobs = dataclasses.replace(knobs, chunk=32, exp="polynomial")
    case = solved(w)
    worst = case.worst(kernel(knobs, case, folder)(case).outputs)
    assert worst.ratio <= 1, worst.detail


@pytest.mark.parametrize("exp", CHOICES["exp"])
@pytest.mark.parametrize("pair_block", CHOICES["pair_block"])
def test_no_gate_overflows(exp: str, pair_block: int, folder: Path) -> None:
    """Unbounded gates reach thousands of nats a token (sgl-project/sglang#27488). The state is then what one
    token wrote, so an output errs by no more than the rounding of sums over K, of K terms each."""
    case = solved(dataclasses.replace(RAGGED, regime="strong"))
    inputs = dict(case.inputs)
    assert inputs["g"] is not None
    inputs["g"] = inputs["g"] * np.float32(600.0)
    strong = dataclasses.replace(case, inputs=inputs)
    truth = recurrence(activate(inputs, case.workload.contract, case.workload.scale, np.float64))
    knobs = dataclasses.replace(CHUNKED, chunk=64, exp=exp, pair_block=pair_block)
    o = kernel(knobs, case, folder)(strong).outputs["o"]
    assert np.abs(o - truth.o).max() <= 2 * case.workload.K * 2.0**-24 * np.abs(truth.o).max()


@pytest.mark.parametrize("knobs", [RECURRENT, CHUNKED], ids=["recurrent", "chunked"])
@pytest.mark.parametrize("lengths", [(), (0,), (0, 0, 5), (1,)], ids=str)
def test_small_packs(knobs: KdaHostKnobs, lengths: tuple[int, ...], folder: Path) -> None:
    case = solved(dataclasses.replace(RAGGED, lengths=lengths, initial_state=False))
    answer = kernel(knobs, case, folder)(case)
    assert case.worst(answer.outputs).ratio <= 1


def test_rows_after_the_last_sequence_are_left_alone(folder: Path) -> None:
    case = solved(dataclasses.replace(RAGGED, slack=5))
    for knobs in (RECURRENT, CHUNKED):
        answer = kernel(dataclasses.replace(knobs, prefetch=1), case, folder)(case)
        assert case.worst(answer.outputs).ratio <= 1
        assert np.isnan(answer.outputs["o"][-5:]).all()


def test_the_stages_of_the_seed() -> None:
    expected = "exponential key_row decay_row load_state store_state prefetch_rows delta update"
    expected += " scores factors residual solve output advance"
    assert list(stages(TEMPLATE.source)) == expected.split()


def test_default_is_legal_for_every_head_dim() -> None:
    for K, V in itertools.product((8, 64, 72, 96, 128), (8, 24, 64, 96, 128)):
        assert TEMPLATE.why_not(TEMPLATE.default(spec(K, V)), spec(K, V)) is None
    assert TEMPLATE.default(spec()) == KdaHostKnobs()


def test_enough_is_legal() -> None:
    assert len(list(itertools.islice(legal(spec()), 2000))) == 2000


@pytest.mark.parametrize(
    ("changes", "facts", "reason"),
    [
        ({}, spec(K=100), "K = 100 is not a positive multiple of 8"),
        ({}, spec(V=60), "V = 60 is not a positive multiple of 8"),
        ({"value_tile": 128}, spec(V=96), "value_tile 128 does not divide V = 96"),
        ({"lanes": 16}, spec(K=72), "16 lanes do not divide K = 72"),
        ({"value_tile": 8, "lanes": 16}, spec(), "narrower than a vector"),
        ({"key_unroll": 8, "value_tile": 64}, spec(), "64 accumulators do not fit 32"),
        ({"algorithm": "chunked", "row_block": 8}, spec(), "64 accumulators do not fit 32"),
        ({"chunk": 8, "pair_block": 16}, spec(), "pair_block 16 is larger than the chunk of 8"),
    ],
)
def test_legality_names_the_reason(changes: dict[str, Any], facts: Any, reason: str) -> None:
    why = TEMPLATE.why_not(dataclasses.replace(KdaHostKnobs(), **changes), facts)
    assert why is not None
    assert reason in why


def test_equal_code_is_equal_bytes(folder: Path) -> None:
    """What the next test relies on: a knob of the chunked form leaves a recurrent object as it was."""
    units = [
        TEMPLATE.unit(TEMPLATE.source, dataclasses.replace(RECURRENT, row_block=rows), spec())
        for rows in (1, 2)
    ]
    first, second = (compile_unit(unit, folder) for unit in units)
    assert first != second
    assert first.read_bytes() == second.read_bytes()


def test_every_knob_changes_the_object(folder: Path) -> None:
    base = dataclasses.replace(CHUNKED, chunk=32)
    changed = [base]
    for name, values in CHOICES.items():
        others = (dataclasses.replace(base, **{name: v}) for v in values if v != getattr(base, name))
        changed.append(next(knobs for knobs in others if TEMPLATE.why_not(knobs, spec()) is None))
    units = [TEMPLATE.unit(TEMPLATE.source, knobs, spec()) for knobs in changed]
    assert len({path.read_bytes() for path in compile_all(units, folder)}) == len(CHOICES) + 1


@pytest.mark.parametrize("exp", CHOICES["exp"])
def test_the_object_needs_libm_and_memory_copies_only(exp: str, folder: Path) -> None:
    facts = spec(contract="production", dtype="bfloat16")
    unit = TEMPLATE.unit(TEMPLATE.source, dataclasses.replace(CHUNKED, exp=exp), facts)
    listed = subprocess.run(
        ["nm", "-P", str(compile_unit(unit, folder))], check=True, capture_output=True, text=True
    ).stdout
    symbols = {tuple(line.split()[:2]) for line in listed.splitlines()}
    undefined = {name for name, kind in symbols if kind == "U"}
    assert undefined <= {"expf", "exp2f", "sqrtf", "memcpy", "memset", "memmove", "_GLOBAL_OFFSET_TABLE_"}
    assert {name for name, kind in symbols if kind in "TDBC"} == {"kda_forward", "kda_forward_workspace"}


@pytest.mark.parametrize("state", CHOICES["state"])
@pytest.mark.parametrize("factors", CHOICES["factors"])
@pytest.mark.parametrize("algorithm", CHOICES["algorithm"])
def test_the_budget_is_what_the_object_asks_for(
    algorithm: str, factors: str, state: str, folder: Path
) -> None:
    knobs = dataclasses.replace(CHUNKED, algorithm=algorithm, factors=factors, state=state)
    unit = TEMPLATE.unit(TEMPLATE.source, knobs, spec(64, 96))
    asked = Kernel(unit, folder).workspace_bytes({"N": 1, "T": knobs.chunk, "H": 1, "HV": 1})
    assert asked == TEMPLATE.budget(knobs, spec(64, 96))["workspace_bytes"]


@pytest.mark.parametrize("knobs", [RECURRENT, CHUNKED], ids=["recurrent", "chunked"])
def test_a_debug_build_leaves_the_intermediates(knobs: KdaHostKnobs, folder: Path) -> None:
    w = Workload("debug", "long", (35, 20), heads=1, value_heads=2, K=64, V=96, initial_state=True)
    case = solved(w)
    answer = kernel(knobs, case, folder, debug=True)(case)
    assert case.worst(answer.outputs).ratio <= 1
    regions = {r.name: r for r in TEMPLATE.debug_regions(knobs, spec(64, 96), case.sizes)}
    found = {
        name: answer.workspace[r.offset : r.offset + 4 * int(np.prod(r.shape))]
        .view(np.float32)
        .reshape(r.shape)
        for name, r in regions.items()
    }
    gates = case.inputs["g"]
    assert gates is not None
    np.testing.assert_allclose(found["decay"], np.exp(gates), rtol=1e-6)
    last = [34 // knobs.chunk + 0, (35 + 19 // knobs.chunk * knobs.chunk) // knobs.chunk + 1]
    np.testing.assert_array_equal(found["state"][last], answer.outputs["final_state"])
    first, keys, beta = case.inputs["initial_state"], case.inputs["k"], case.inputs["beta"]
    values = case.inputs["v"]
    assert first is not None
    assert keys is not None
    assert beta is not None
    assert values is not None
    decayed = first[0] * np.exp(gates[0])[:, None, :]
    u = beta[0, :, None] * (values[0] - decayed @ keys[0, 0])
    np.testing.assert_allclose(found["u"][0], u, rtol=1e-4, atol=1e-5)


def test_bfloat16_is_rounded_to_nearest_even(folder: Path) -> None:
    """One token, k = 0: o is exactly S^T q, so what is seen is the store's rounding."""
    w = Workload("round", "long", (1,), K=16, V=8, dtype="bfloat16", regime="zero", initial_state=True)
    case = solved(w)
    quarters = np.float32(1.0) + np.arange(8, dtype=np.float32) * np.float32(2.0**-9)  # of a bfloat16 step
    inputs = dict(case.inputs)
    state = np.zeros((1, 1, 8, 16), np.float32)
    state[0, 0, :, 0] = quarters
    query = np.zeros_like(inputs["q"])
    query[..., 0] = 1
    inputs |= {"initial_state": state, "q": query, "k": np.zeros_like(inputs["k"])}
    exact = dataclasses.replace(case, inputs=inputs)
    rounded = kernel(dataclasses.replace(RECURRENT, value_tile=8), case, folder)(exact).outputs["o"][0, 0]
    assert w.scale == 0.25
    np.testing.assert_array_equal(rounded, (quarters * np.float32(0.25)).astype(rounded.dtype))


def test_layouts_follow_the_knobs() -> None:
    tile_outer = TEMPLATE.layouts(RECURRENT, spec())
    assert "[K=128][2 vectors of 8]" in tile_outer
    assert tile_outer.index("for tile in 8") < tile_outer.rindex("for block of 16 tokens")
    block_outer = TEMPLATE.layouts(dataclasses.replace(CHUNKED, order="block_outer", state="rows"), spec())
    assert "row stride 128 floats" in block_outer
    assert block_outer.rindex("for block of 16 tokens") < block_outer.index("for tile in 8")


@pytest.mark.skipif(shutil.which("clang") is None, reason="needs clang")
@pytest.mark.parametrize("knobs", [RECURRENT, CHUNKED], ids=["recurrent", "chunked"])
def test_clang_compiles_it(knobs: KdaHostKnobs, folder: Path) -> None:
    case = solved(dataclasses.replace(RAGGED, dtype="bfloat16", contract="production"))
    unit = TEMPLATE.unit(TEMPLATE.source, knobs, spec(contract="production", dtype="bfloat16"))
    answer = Kernel(unit, folder, ("clang",))(case)
    assert case.worst(answer.outputs).ratio <= 1
