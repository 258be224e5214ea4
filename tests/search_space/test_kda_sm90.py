"""The Hopper template: legality without a compiler, and every sampled configuration through the real one."""

import re
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from evotune.fitness.toolchain import Compiled
from evotune.search_space.branch import frame, replace_stage
from evotune.search_space.space import Space, choices_of
from evotune.search_space.templates.kda_sm90 import TEMPLATE, KdaSm90Knobs
from evotune.search_space.templates.kda_sm90_plan import SHARED_LIMIT_BYTES, Plan
from tests.search_space.sm90 import Build, code, imported, methods_of_stages, spec

SPECS = (
    spec(),
    spec("plain"),
    spec(K=64, V=64),
    spec("plain", K=64, V=128),
    spec(K=96, V=96),
    spec("plain", K=128, V=64),
    spec(dtype="float32"),
    spec("plain", dtype="float32"),
)


class TestLegality:
    def test_the_default_is_legal_for_all(self) -> None:
        assert [TEMPLATE.why_not(TEMPLATE.default(each), each) for each in SPECS] == [None] * len(SPECS)

    def test_the_space_is_large_and_not_all_legal(self) -> None:
        space = Space(TEMPLATE, (spec(), spec("plain")))
        widths = [len(values) for values in space.choices]
        cells = np.random.default_rng(2).integers(widths, size=(2000, len(widths))).tolist()
        share = sum(space.is_legal(tuple(cell)) for cell in cells) / len(cells)
        assert 0.2 < share < 0.7
        assert share * space.size > 20_000

    def test_the_kernel_reads_the_same_plan_from_its_constants(self) -> None:
        space = Space(TEMPLATE, SPECS[:1])
        for cell in space.sample_cells(np.random.default_rng(4), 20):
            for each in SPECS:
                knobs = space.at(cell)
                plan = Plan.of(dict(TEMPLATE.unit("", knobs, each).constants))
                assert TEMPLATE.why_not(knobs, each) == plan.why_not()
                assert TEMPLATE.budget(knobs, each)["shared_bytes"] == plan.shared_bytes

    @pytest.mark.parametrize(
        ("knobs", "where", "reason"),
        [
            ({"value_tile": 64}, {"V": 96}, "value_tile 64 does not divide V = 96"),
            ({"value_tile": 16, "key_split": 1}, {}, "128 threads do not divide 16 columns × 1 lanes"),
            ({"key_split": 32}, {"K": 64}, "key_split 32 × vector 4 does not divide K = 64"),
            (
                {"warps": 8, "key_split": 8, "tokens": 8, "vector": 1},
                {"K": 40},
                "K = 40 is not a multiple of 32",
            ),
            ({"warps": 1, "key_split": 1}, {}, "exceed 255: the state would spill"),
            (
                {"unroll": 2, "state": "shared", "value_tile": 128},
                {},
                "128 state elements per thread × unroll 2 exceed 128",
            ),
            (
                {"state": "shared", "stages": 4, "tokens": 32, "value_tile": 128, "warps": 8},
                {},
                f"bytes of shared memory exceed {SHARED_LIMIT_BYTES}",
            ),
            ({"key_split": 32, "vector": 1, "partials": 4}, {"K": 64}, "4 partial sums for 2 elements"),
        ],
    )
    def test_a_refusal_names_the_reason(
        self, knobs: dict[str, Any], where: dict[str, int], reason: str
    ) -> None:
        why = TEMPLATE.why_not(replace(KdaSm90Knobs(), **knobs), spec("plain", **where))
        assert why is not None
        assert reason in why

    def test_every_thread_holds_its_own_part_of_the_state(self) -> None:
        space = Space(TEMPLATE, (spec(),))
        for cell in space.sample_cells(np.random.default_rng(3), 50):
            plan = Plan.of(dict(TEMPLATE.unit("", space.at(cell), spec()).constants))
            held = [
                (plan.column_of(thread, c), plan.key_of(thread, group) + j)
                for thread in range(plan.threads)
                for c in range(plan.columns)
                for group in range(plan.slice // plan.vector)
                for j in range(plan.vector)
            ]
            assert sorted(held) == [(v, k) for v in range(plan.value_tile) for k in range(plan.K)]

    def test_intermediates_tile_the_workspace(self) -> None:
        placed = TEMPLATE.intermediates(KdaSm90Knobs(), spec(V=64), 5, 3)
        end = 0
        for first, shape in placed.values():
            assert first == end
            end += int(np.prod(shape))
        assert end == 5 * 3 * (3 * 128 + 1 + 64)


class TestSource:
    def test_it_stands_alone(self) -> None:
        assert imported(TEMPLATE.source) == {"cutlass", "collections", "dataclasses"}
        assert "from __future__" not in TEMPLATE.source

    def test_each_stage_is_one_whole_method(self) -> None:
        found = methods_of_stages(TEMPLATE.source)
        assert {"normalise", "gate", "decay", "correction", "update", "output"} <= set(found)
        assert found == {name: [name] for name in found}

    def test_layouts_tell_what_the_plan_knows(self) -> None:
        shown = TEMPLATE.layouts(KdaSm90Knobs(), spec())
        assert "grid   (4 × N, HV)" in shown
        assert "(2,16,128):(2048,128,1) bf16" in shown
        assert re.search(r"^ *51264 +in all$", shown, re.MULTILINE)
        assert "thread   8  columns 1, 17  keys 0–3, 32–35" in shown


@pytest.mark.compile
@pytest.mark.timeout(400)
def test_every_configuration_of_a_sample_of_40_compiles(build: Build) -> None:
    """Five legal configurations for each of eight specializations: contracts, head dims, io types."""
    units = []
    for each in SPECS:
        space = Space(TEMPLATE, (each,))
        units += [
            TEMPLATE.unit(TEMPLATE.source, space.at(cell), each)
            for cell in space.sample_cells(np.random.default_rng(1), 5)
        ]
    assert len(units) == 40
    results = build(units)
    for unit, (compiled, resources) in zip(units, results, strict=True):
        plan, values = Plan.of(dict(unit.constants)), resources.values
        assert values["threads"] == plan.threads
        assert values["shared_bytes"] == plan.shared_bytes  # the budget is exact, not an estimate
        assert 16 <= values["registers"] <= 255
        assert values["blocks_per_sm"] >= 1
        assert b"__tvm_ffi_kda_forward" in compiled.object
    assert len({code(compiled) for compiled, _ in results}) == 40


@pytest.mark.compile
def test_the_default_does_not_spill(build: Build) -> None:
    each = [spec(), spec("plain")]
    for _, resources in build([TEMPLATE.unit(TEMPLATE.source, KdaSm90Knobs(), one) for one in each]):
        assert resources.values["spill_bytes"] == 0


@pytest.mark.compile
@pytest.mark.timeout(300)
def test_every_knob_changes_the_code(build: Build) -> None:
    default, facts = KdaSm90Knobs(), spec()
    others = []
    for field in fields(KdaSm90Knobs):
        value = next(
            value
            for value in choices_of(KdaSm90Knobs)[field.name]
            if value != getattr(default, field.name)
            and TEMPLATE.why_not(replace(default, **{field.name: value}), facts) is None
        )
        others.append(replace(default, **{field.name: value}))
    results = build([TEMPLATE.unit(TEMPLATE.source, knobs, facts) for knobs in (default, *others)])
    assert len({code(compiled) for compiled, _ in results}) == len(fields(KdaSm90Knobs)) + 1


@pytest.mark.compile
def test_a_rewritten_stage_compiles_and_a_renamed_one_changes_nothing(build: Build) -> None:
    """What a mutator does: another gate is other code, other words for the same gate are not."""
    tanh = (
        "    @cute.jit\n    def sigmoid(self, x):\n"
        "        return F32(0.5) + F32(0.5) * cute.math.tanh(x * F32(0.5), approx=True)\n"
    )
    words = (
        "    @cute.jit\n    def sigmoid(self, value):\n"
        "        # Other words.\n"
        "        grown = self.exp2(value * F32(-LOG2E))\n"
        "        return cute.arch.rcp_approx(F32(1.0) + grown)\n"
    )
    sources = [TEMPLATE.source, *(replace_stage(TEMPLATE.source, "sigmoid", body) for body in (tanh, words))]
    assert len({frame(source) for source in sources}) == 1
    seed, rewritten, renamed = (
        code(compiled)
        for compiled, _ in build([TEMPLATE.unit(source, KdaSm90Knobs(), spec()) for source in sources])
    )
    assert rewritten != seed
    assert renamed == seed


@pytest.mark.compile
def test_a_debug_build_writes_more(build: Build) -> None:
    plain, debug = build(
        [TEMPLATE.unit(TEMPLATE.source, KdaSm90Knobs(), spec(), debug=debug) for debug in (False, True)]
    )

    def stores(compiled: Compiled) -> int:
        return compiled.files[".ptx"].decode().count("st.global")

    assert stores(debug[0]) >= stores(plain[0]) + 5  # q, k, decay, beta, u
