"""The chunked Hopper template: layouts by lane, legality without a compiler, samples through the real one."""

import itertools
import math
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from evotune.search_space.branch import replace_stage
from evotune.search_space.space import Space, choices_of
from evotune.search_space.templates.kda_sm90_chunked import TEMPLATE, KdaSm90ChunkedKnobs
from evotune.search_space.templates.kda_sm90_chunked_plan import (
    SHARED_LIMIT_BYTES,
    SPAN,
    TILE,
    WARP,
    Plan,
)
from tests.search_space.sm90 import Build, code, imported, methods_of_stages, spec

Real = npt.NDArray[np.float64]
LANES = range(WARP)

SIZES = {"N": 3, "T": 100, "HV": 4}


OBJECTS = Path(__file__).parents[2] / "experiments" / "kda_h200" / "objects.toml"
SPECS = (spec(), spec("plain"), spec(K=64, V=64), spec("plain", K=64, V=128))


def plan(*, debug: bool = False, K: int = 128, **knobs: Any) -> Plan:
    constants = dict(TEMPLATE.unit("", replace(KdaSm90ChunkedKnobs(), **knobs), spec(K=K)).constants)
    return Plan.of({**constants, "DEBUG": int(debug)})


# What the instructions do, from the PTX ISA (ldmatrix, stmatrix, mma.m16n8k16): an oracle for the layouts.


def ldmatrix(memory: Real, addresses: Sequence[int], *, transpose: bool) -> Real:
    """[lanes, 8]: four 8 × 8 matrices, rows where the lanes point; `memory` by element of 2 bytes."""
    assert all(address % 16 == 0 for address in addresses)
    rows = np.array([memory[address // 2 : address // 2 + 8] for address in addresses])
    matrices = rows.reshape(4, 8, 8)
    if transpose:
        matrices = matrices.transpose(0, 2, 1)
    return np.array(
        [[matrices[i, lane // 4, lane % 4 * 2 + c] for i in range(4) for c in (0, 1)] for lane in LANES]
    )


def mma(left: Real, right: Real) -> Real:
    """[lanes, 4, 2]: the product of a left operand [lanes, 8] and two right ones [lanes, 8]."""
    a, b, c = np.zeros((16, 16)), np.zeros((16, 16)), np.zeros((WARP, 4, 2))
    for lane in LANES:
        for register in range(4):
            for half in range(2):
                row, k = lane // 4 + register % 2 * 8, lane % 4 * 2 + half + register // 2 * 8
                a[row, k] = left[lane, 2 * register + half]
                n, k = lane // 4 + register // 2 * 8, lane % 4 * 2 + half + register % 2 * 8
                b[k, n] = right[lane, 2 * register + half]
    product = a @ b
    for lane in LANES:
        for e in range(4):
            for j in range(2):
                c[lane, e, j] = product[lane // 4 + e // 2 * 8, 8 * j + lane % 4 * 2 + e % 2]
    return c


def accumulators(p: Plan, matrix: Real) -> Real:
    """[lanes, 4, columns / 8] of a [16, columns] matrix."""
    blocks = range(matrix.shape[1] // 8)
    return np.array(
        [
            [[matrix[p.product_row(lane, e), p.product_column(lane, e, j)] for j in blocks] for e in range(4)]
            for lane in LANES
        ]
    )


def as_left(acc: Real, kk: int) -> Real:
    """The kernel's `rounded`: 8 neighbouring accumulators, elements fastest, are a left operand."""
    return acc.transpose(0, 2, 1).reshape(WARP, -1)[:, 8 * kk : 8 * kk + 8]


def stored(byte: Callable[[int, int], int], matrix: Real, size: int) -> Real:
    """Memory of `size` bytes that holds a matrix, each element where `byte` says."""
    memory = np.full(size // 2, np.nan)
    for row, column in np.ndindex(matrix.shape):
        memory[byte(row, column) // 2] = matrix[row, column]
    return memory


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def rows_of(block: Real, s: int) -> Real:
    """Accumulators (4, 2) of the s-th 16 columns."""
    return block[:, :, 2 * s : 2 * s + 2]


@pytest.mark.parametrize("chunk", [16, 32])
@pytest.mark.parametrize("K", [64, 128])
class TestLanes:
    """Every matrix product of the kernels as its lanes see it, against the product of whole matrices."""

    def test_the_state_times_keys(self, rng: np.random.Generator, K: int, chunk: int) -> None:
        p = plan(K=K, chunk=chunk)
        state, keys = rng.normal(size=(TILE, K)), rng.normal(size=(chunk, K))
        memory = stored(p.panel_byte, keys, p.panels * chunk * 128)
        assert not np.isnan(memory).any()
        want = accumulators(p, state @ keys.T)
        for s in range(p.spans):
            found = np.zeros((WARP, 4, 2))
            for kk in range(K // TILE):
                at = [p.panel_byte(p.right_row(lane), kk * TILE + p.right_column(lane)) for lane in LANES]
                left = as_left(accumulators(p, state), kk)
                found += mma(left, ldmatrix(memory, shifted(at, s * SPAN * 128), transpose=False))
            np.testing.assert_allclose(found, rows_of(want, s), atol=1e-12)

    def test_corrections_times_keys_update_the_state(
        self, rng: np.random.Generator, K: int, chunk: int
    ) -> None:
        p = plan(K=K, chunk=chunk)
        u, keys = rng.normal(size=(TILE, chunk)), rng.normal(size=(chunk, K))
        memory = stored(p.panel_byte, keys, p.panels * chunk * 128)
        want = accumulators(p, u @ keys)
        for jj in range(K // TILE):
            at = [p.panel_byte(p.left_row(lane), jj * TILE + p.left_column(lane)) for lane in LANES]
            found = np.zeros((WARP, 4, 2))
            for s in range(p.spans):
                left = as_left(accumulators(p, u), s)
                found += mma(left, ldmatrix(memory, shifted(at, s * SPAN * 128), transpose=True))
            np.testing.assert_allclose(found, rows_of(want, jj), atol=1e-12)

    def test_the_gram_matrix_of_two_spans(self, rng: np.random.Generator, K: int, chunk: int) -> None:
        """The last span's rows, in an array of all the chunk's, times 16 in an array of their own."""
        p = plan(K=K, chunk=chunk)
        a, b = rng.normal(size=(chunk, K)), rng.normal(size=(SPAN, K))
        wide = stored(p.panel_byte, a, p.panels * chunk * 128)
        narrow = stored(lambda row, column: p.panel_byte(row, column, SPAN), b, p.panels * SPAN * 128)
        found = np.zeros((WARP, 4, 2))
        for kk in range(K // TILE):
            left = [p.panel_byte(p.left_row(lane), kk * TILE + p.left_column(lane)) for lane in LANES]
            right = [
                p.panel_byte(p.right_row(lane), kk * TILE + p.right_column(lane), SPAN) for lane in LANES
            ]
            found += mma(
                ldmatrix(wide, shifted(left, (p.spans - 1) * SPAN * 128), transpose=False),
                ldmatrix(narrow, right, transpose=False),
            )
        np.testing.assert_allclose(found, accumulators(p, a[-SPAN:] @ b.T), atol=1e-12)

    def test_squares_and_patches(self, rng: np.random.Generator, K: int, chunk: int) -> None:
        p = plan(K=K, chunk=chunk)
        r, x = rng.normal(size=(2, 16, 16))
        memory = stored(p.square_byte, x, 512)
        at = [p.square_byte(p.right_row(lane), p.right_column(lane)) for lane in LANES]
        found = mma(as_left(accumulators(p, r), 0), ldmatrix(memory, at, transpose=False))
        np.testing.assert_allclose(found, accumulators(p, r @ x.T), atol=1e-12)
        turned = ldmatrix(memory, at, transpose=True)  # a patch [tokens, values] as rows of values
        np.testing.assert_array_equal(turned, as_left(accumulators(p, x.T), 0))

    def test_the_merge_of_inverses(self, rng: np.random.Generator, K: int, chunk: int) -> None:
        """A block as left operand, and blocks stored by rows as right ones."""
        p = plan(K=K, chunk=chunk)
        a, b, c = rng.normal(size=(3, 16, 16))
        upright = [p.square_byte(p.left_row(lane), p.left_column(lane)) for lane in LANES]
        left = ldmatrix(stored(p.square_byte, a, 512), upright, transpose=False)
        product = mma(left, ldmatrix(stored(p.square_byte, b, 512), upright, transpose=True))
        found = mma(as_left(product, 0), ldmatrix(stored(p.square_byte, c, 512), upright, transpose=True))
        np.testing.assert_allclose(found, accumulators(p, a @ b @ c), atol=1e-12)

    def test_eight_rows_touch_every_bank_once(self, K: int, chunk: int) -> None:
        p = plan(K=K, chunk=chunk)
        for column in range(0, K, 8):
            assert sorted(p.panel_byte(row, column) // 16 % 8 for row in range(8)) == list(range(8))
        for rows in (range(8), range(8, 16)):
            for half in (0, 8):
                assert len({p.square_byte(row, half) // 16 % 8 for row in rows}) == 8


def shifted(addresses: Sequence[int], by: int) -> list[int]:
    return [address + by for address in addresses]


class TestSharedKeys:
    """What warps that share the keys of a strip tell each other, where a chunk has two spans or more."""

    PLANS = (plan(chunk=32, key_warps=2), replace(plan(chunk=32, key_warps=2), chunk=64))

    @pytest.mark.parametrize("p", PLANS, ids=lambda p: f"{p.spans} spans")
    def test_every_span_is_one_warps_own(self, p: Plan) -> None:
        owned = [p.turned(s, share) for share in range(p.key_warps) for s in range(p.own_spans)]
        assert sorted(owned) == list(range(p.spans))

    @pytest.mark.parametrize("p", PLANS, ids=lambda p: f"{p.spans} spans")
    def test_each_reads_what_the_other_told_of_its_own_spans(self, p: Plan) -> None:
        for share in range(p.key_warps):
            for s in range(p.own_spans):
                told = p.told(s, 1)
                assert p.turned(told, share ^ 1) == p.turned(s, share)
                assert told >= p.own_spans  # the teller keeps what is its own

    @pytest.mark.parametrize("p", PLANS, ids=lambda p: f"{p.spans} spans")
    def test_places_do_not_overlap_and_fill_what_is_reserved(self, p: Plan) -> None:
        places = [p.partial_sum(s) for s in range(p.spans)]
        places += [p.partial_output(s) for s in range(p.own_spans, p.spans)]
        assert places == list(range(0, p.partial_bytes, SPAN * TILE * 4))


def as_bfloat16(x: Real) -> Real:
    return x.astype(ml_dtypes.bfloat16).astype(np.float64)


@pytest.mark.parametrize(
    ("spread", "beta"),
    [(math.inf, 0.5), (0.0, 0.9997), (0.3, 0.98)],
    ids=["random keys", "identical keys", "similar keys"],
)
def test_the_merged_inverse_is_as_good_as_its_rounding(
    rng: np.random.Generator, spread: float, beta: float
) -> None:
    """−X₁₁ A X₀₀ in bf16 parts, as `merge` has it, against float64: an error like that of rounding X."""
    keys = rng.normal(size=(32, 128))
    if spread < math.inf:
        keys = keys[:1] + spread * keys
    keys = as_bfloat16(keys / np.linalg.norm(keys, axis=1, keepdims=True))
    gram = keys @ keys.T
    exact = np.linalg.inv(np.eye(32) + beta * np.tril(gram, -1)) * beta
    x00, x11 = as_bfloat16(exact[:16, :16]), as_bfloat16(exact[16:, 16:])
    across = gram[16:, :16].astype(np.float32).astype(np.float64)
    high = as_bfloat16(across)
    product = x11 @ (high + as_bfloat16(across - high))
    high = as_bfloat16(product)
    merged = as_bfloat16(-(high + as_bfloat16(product - high)) @ x00)
    rounding = np.linalg.norm(as_bfloat16(exact) - exact)
    assert np.linalg.norm(merged - exact[16:, :16]) < 2 * rounding


class TestSlots:
    @pytest.mark.parametrize("chunk", [16, 32])
    def test_every_chunk_has_a_place_of_its_own(self, rng: np.random.Generator, chunk: int) -> None:
        p = plan(chunk=chunk)
        for _ in range(200):
            lengths = rng.integers(0, 70, int(rng.integers(1, 30))) * rng.integers(0, 2)
            cu = np.concatenate([[0], np.cumsum(lengths)]).tolist()
            taken = [
                p.first_slot(n, cu[n]) + index
                for n, length in enumerate(lengths.tolist())
                for index in range(-(-length // chunk))
            ]
            firsts = [p.first_slot(n, cu[n]) for n in range(len(lengths))]
            assert len(set(taken)) == len(taken)
            assert firsts == sorted(set(firsts))  # what the search in `locate` needs
            assert all(0 <= slot < p.slots(len(lengths), cu[-1]) for slot in taken)
            # `reference_kda.diagnosis` finds the state after a chunk of sequence n from row t at t // C + n.
            assert taken == [
                (cu[n] + index * chunk) // chunk + n
                for n, length in enumerate(lengths.tolist())
                for index in range(-(-length // chunk))
            ]

    def test_the_workspace_has_room_for_all(self) -> None:
        for chunk, record in ((16, 13824), (32, 28160)):
            slots, knobs = 100 // chunk + 3, replace(KdaSm90ChunkedKnobs(), chunk=chunk)
            placed = plan(chunk=chunk).workspace(3, 100, 4)
            assert placed["order"] == slots * 4 * record
            assert placed["end"] == placed["order"] + 1024
            debug = plan(debug=True, chunk=chunk).workspace(3, 100, 4)
            assert debug["state"] - debug["u"] == slots * 4 * chunk * 128 * 4
            assert debug["end"] - debug["state"] == slots * 4 * 128 * 128 * 4
            assert TEMPLATE.workspace_bytes(knobs, spec(), SIZES) == placed["end"]
            assert TEMPLATE.workspace_bytes(knobs, spec(), SIZES, debug=True) == debug["end"]

    def test_a_record_is_dense_and_aligned_for_bulk_copies(self) -> None:
        for K, chunk in ((64, 16), (128, 16), (64, 32), (128, 32)):
            p = plan(K=K, chunk=chunk)
            used = np.zeros(p.record_bytes, int)
            for name in ("kw", "qg", "kg"):
                for row, column in np.ndindex(chunk, K):
                    first = p.record_offsets[name] + p.panel_byte(row, column)
                    used[first : first + 2] += 1
            blocks = [(i, j) for i in range(p.spans) for j in range(i + 1)]
            for name, (i, j) in itertools.product(("x", "m"), blocks):
                for row, column in np.ndindex(SPAN, SPAN):
                    first = p.record_offsets[name] + p.block_byte(i, j) + p.square_byte(row, column)
                    used[first : first + 2] += 1
            used[p.record_offsets["end"] :] += 1
            assert (used == 1).all()
            assert p.record_bytes % 128 == 0


class TestLegality:
    def test_the_default_is_legal_for_all(self) -> None:
        assert [TEMPLATE.why_not(TEMPLATE.default(each), each) for each in SPECS] == [None] * len(SPECS)

    def test_the_space_is_large_and_not_all_legal(self) -> None:
        space = Space(TEMPLATE, SPECS[:2])
        widths = [len(values) for values in space.choices]
        cells = np.random.default_rng(2).integers(widths, size=(2000, len(widths))).tolist()
        share = sum(space.is_legal(tuple(cell)) for cell in cells) / len(cells)
        assert 0.05 < share < 0.7
        assert share * space.size > 5_000

    def test_the_kernel_reads_the_same_plan_from_its_constants(self) -> None:
        space = Space(TEMPLATE, SPECS[:1])
        for cell in space.sample_cells(np.random.default_rng(4), 20):
            for each in SPECS:
                knobs = space.at(cell)
                same = Plan.of(dict(TEMPLATE.unit("", knobs, each).constants))
                assert TEMPLATE.why_not(knobs, each) == same.why_not()
                assert TEMPLATE.budget(knobs, each)["shared_bytes"] == same.shared_bytes

    @pytest.mark.parametrize(
        ("knobs", "where", "reason"),
        [
            ({}, {"dtype": "float32"}, "the matrix products take bfloat16"),
            ({}, {"K": 96}, "K = 96 is neither 64 nor 128"),
            ({"value_tile": 128}, {"V": 64}, "value_tile 128 does not divide V = 64"),
            ({"copy": "cp.async"}, {}, "loader must be inline"),
            ({"chunk": 16, "key_warps": 2}, {}, "each writes whole spans, and a chunk has 1"),
            ({"key_warps": 2, "fetch": "before"}, {}, "fetch must be behind"),
            ({"units": 2}, {}, "prepare: 4 blocks"),
            ({"prepare_blocks": 8}, {}, "prepare: 8 blocks"),
            ({"value_tile": 128, "recurrence_blocks": 2}, {}, "recurrence: 2 blocks"),
            ({"stages": 8}, {}, "bytes of shared memory exceed"),
        ],
    )
    def test_a_refusal_names_the_reason(
        self, knobs: dict[str, Any], where: dict[str, Any], reason: str
    ) -> None:
        why = TEMPLATE.why_not(replace(KdaSm90ChunkedKnobs(), **knobs), spec("plain", **where))
        assert why is not None
        assert reason in why

    def test_no_block_wants_more_than_a_block_may_have(self) -> None:
        space = Space(TEMPLATE, SPECS[:1])
        for cell in space.sample_cells(np.random.default_rng(5), 200):
            assert TEMPLATE.budget(space.at(cell), spec())["shared_bytes"] <= SHARED_LIMIT_BYTES


class TestSource:
    def test_it_stands_alone(self) -> None:
        assert imported(TEMPLATE.source) == {"cutlass", "collections", "dataclasses", "typing"}

    def test_each_stage_is_one_whole_method(self) -> None:
        found = methods_of_stages(TEMPLATE.source)
        assert {
            "gate",
            "exponentials",
            "invert",
            "contract",
            "forget",
            "want",
            "correct",
            "update",
            "output",
        } <= set(found)
        assert found == {name: [name] for name in found}

    def test_layouts_tell_what_the_plan_knows(self) -> None:
        shown = TEMPLATE.layouts(KdaSm90ChunkedKnobs(), spec())
        assert "prepare     (⌊T/32⌋ + N) × ⌈HV/1⌉ blocks of 128 threads" in shown
        assert "recurrence  N × HV × 2 blocks of 160 threads" in shown
        assert "   27648      512  end" in shown
        assert "  135232  in all" in shown
        assert "lane  4  columns 1, 9  keys 0, 1, 8, 9, …" in shown
        short = TEMPLATE.layouts(replace(KdaSm90ChunkedKnobs(), chunk=16), spec())
        assert "   13312      512  end" in short
        assert "near kw" not in short


@pytest.mark.compile
@pytest.mark.timeout(400)
def test_a_sample_compiles_within_its_budget(build: Build) -> None:
    """Two legal configurations for each of four specializations."""
    units = []
    for each in SPECS:
        space = Space(TEMPLATE, (each,))
        units += [
            TEMPLATE.unit(TEMPLATE.source, space.at(cell), each)
            for cell in space.sample_cells(np.random.default_rng(1), 2)
        ]
    results = build(units)
    for unit, (compiled, resources) in zip(units, results, strict=True):
        same, values = Plan.of(dict(unit.constants)), resources.values
        assert values["threads"] == same.threads
        assert values["shared_bytes"] == same.shared_bytes  # the budget is exact, not an estimate
        assert values["kernels"] == 2
        assert b"__tvm_ffi_kda_forward" in compiled.object
    assert len({code(compiled) for compiled, _ in results}) == len(units)


@pytest.mark.compile
@pytest.mark.timeout(400)
def test_every_configuration_that_is_shipped_compiles(build: Build) -> None:
    """Those that stand beside the peers; the two contracts in turn."""
    shipped = tomllib.loads(OBJECTS.read_text(encoding="utf-8"))
    chosen = [replace(KdaSm90ChunkedKnobs(), **changed) for changed in shipped.values()]
    contracts = [spec(contract) for contract in ("plain", "production")]
    assert all(TEMPLATE.why_not(knobs, each) is None for knobs in chosen for each in contracts)
    units = [
        TEMPLATE.unit(TEMPLATE.source, knobs, contracts[number % 2]) for number, knobs in enumerate(chosen)
    ]
    resources = [found.values for _, found in build(units)]
    assert [found["kernels"] for found in resources] == [2] * len(units)
    assert max(found["spill_bytes"] for found in resources) <= 8  # a value tile of 128 has two words too many


@pytest.mark.compile
@pytest.mark.timeout(400)
def test_every_knob_changes_the_code_and_the_default_does_not_spill(build: Build) -> None:
    roomy = {"chunk": 16, "stages": 3, "loader": "inline", "prepare_blocks": 1}  # any knob may move
    default, facts = replace(KdaSm90ChunkedKnobs(), **roomy), spec()
    others = []
    for field in fields(KdaSm90ChunkedKnobs):
        base = replace(default, chunk=32) if field.name == "key_warps" else default
        value = next(
            value
            for value in choices_of(KdaSm90ChunkedKnobs)[field.name]
            if value != getattr(base, field.name)
            and TEMPLATE.why_not(replace(base, **{field.name: value}), facts) is None
        )
        others.append(replace(base, **{field.name: value}))
    results = build([TEMPLATE.unit(TEMPLATE.source, knobs, facts) for knobs in (default, *others)])
    assert len({code(compiled) for compiled, _ in results}) == len(fields(KdaSm90ChunkedKnobs)) + 1
    assert results[0][1].values["spill_bytes"] == 0


@pytest.mark.compile
@pytest.mark.timeout(200)
def test_a_slot_is_freed_behind_the_next_output(build: Build) -> None:
    """Reads of a record have returned when its slot is freed: the output before it needs them all.

    A slot freed right behind its reads was overwritten too early on an H200 (value tile 128, debug).
    """
    default = KdaSm90ChunkedKnobs()
    for knobs in (
        default,
        replace(default, chunk=16, loader="inline", value_tile=128, state="shared"),
        replace(default, key_warps=2),
        replace(default, solve="prepare", fetch="before"),
    ):
        ((compiled, _),) = build([TEMPLATE.unit(TEMPLATE.source, knobs, spec(), debug=True)])
        ptx = compiled.files[".ptx"].decode()
        assert ptx.count("mbarrier.arrive.shared") == 1  # what announces bytes is mbarrier.arrive.expect_tx
        loop = ptx[: ptx.index("mbarrier.arrive.shared")]
        assert loop.rindex("stmatrix") > loop.rindex("ldmatrix")


@pytest.mark.compile
@pytest.mark.timeout(200)
def test_where_the_state_is_and_when_the_recurrence_starts(build: Build) -> None:
    default = replace(KdaSm90ChunkedKnobs(), chunk=16, recurrence_blocks=2)
    kept, moved, early = (
        each
        for each in build(
            [
                TEMPLATE.unit(TEMPLATE.source, replace(default, **knobs), spec())
                for knobs in ({}, {"state": "shared"}, {"start": "early"})
            ]
        )
    )
    assert moved[1].values["shared_bytes"] == kept[1].values["shared_bytes"] + 4 * TILE * 128 * 4
    assert moved[1].values["spill_bytes"] == kept[1].values["spill_bytes"] == 0
    found = [each.files[".ptx"].decode().count("griddepcontrol") for each, _ in (kept, early)]
    assert found[0] == 0
    assert found[1] == 3  # prepare lets the next grid go; warps that compute and the one that feeds wait


@pytest.mark.compile
def test_a_rewritten_stage_is_other_code_and_a_debug_build_writes_more(build: Build) -> None:
    tanh = (
        "    @cute.jit\n    def gate(self, g, slope, offset, lower_bound):\n"
        "        half = (g * slope + offset) * F32(-0.5 / LOG2E)\n"
        "        return lower_bound * (F32(0.5) + F32(0.5) * cute.math.tanh(half, approx=True))\n"
    )
    knobs = KdaSm90ChunkedKnobs()
    seed, rewritten, debug = (
        compiled
        for compiled, _ in build(
            [
                TEMPLATE.unit(TEMPLATE.source, knobs, spec()),
                TEMPLATE.unit(replace_stage(TEMPLATE.source, "gate", tanh), knobs, spec()),
                TEMPLATE.unit(TEMPLATE.source, knobs, spec(), debug=True),
            ]
        )
    )
    assert rewritten.files[".ptx"].decode().count("tanh.approx") == 2 * SPAN
    stores = [each.files[".ptx"].decode().count("st.global") for each in (seed, debug)]
    assert stores[1] >= stores[0] + 8 + 64  # U and the state of a lane
