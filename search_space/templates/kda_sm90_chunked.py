"""Kimi Delta Attention for Hopper in chunks: the knobs, their legality, and the text the CuTe-DSL compiles.

Two kernels, `kda_sm90_chunked_kernel.py`; what follows from the knobs is `kda_sm90_chunked_plan.py`. A branch
is one text that needs nothing but the DSL, so the seed's source is the kernels' with its one import of ours
replaced by the plan.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from evotune.search_space.space import knob
from evotune.search_space.template import Language, Specialization, Unit
from evotune.search_space.templates.kda_sm90_chunked_plan import SPAN, TILE, Plan
from evotune.search_space.templates.sm90 import constants, standalone

_PLAN_IMPORT = (
    "from evotune.search_space.templates.kda_sm90_chunked_plan "
    "import (\n    ALIGNMENT_BYTES,\n    SPAN,\n    SQUARE_BYTES,\n    TILE,\n    WARP,\n    Plan,\n)\n"
)


@dataclass(frozen=True)
class KdaSm90ChunkedKnobs:
    """One configuration; `Plan` says what follows from it."""

    chunk: int = knob(32, choices=(16, 32), doc="tokens in one step of the recurrence")
    value_tile: int = knob(
        64, choices=(16, 32, 64, 128), doc="columns of V in one block of the recurrence, 16 to a warp"
    )
    key_warps: int = knob(1, choices=(1, 2), doc="warps that share 16 columns, each with its part of K")
    stages: int = knob(4, choices=(3, 4, 6, 8), doc="slots of the recurrence's ring; one is on its way out")
    copy: str = knob(
        "bulk", choices=("bulk", "cp.async"), doc="how records come: one bulk copy, or 16 bytes a thread"
    )
    loader: str = knob(
        "warp", choices=("warp", "inline"), doc="who issues bulk copies: a warp of its own or a computing one"
    )
    fetch: str = knob(
        "behind",
        choices=("behind", "before"),
        doc="copies for later chunks are issued behind a chunk's products with the state, or before them",
    )
    partials: int = knob(1, choices=(1, 2), doc="independent sums in a product over K")
    solve: str = knob(
        "recurrence",
        choices=("recurrence", "prepare"),
        doc="who applies X to keys: U = X (V − KW S) in the chain, or W = −X KW before and U = X V + W S",
    )
    inverse: str = knob(
        "columns", choices=("columns", "halves"), doc="of I + L: by columns, or 8 × 8 blocks and their merge"
    )
    exp: str = knob("two", choices=("two", "reciprocal"), doc="e^−G: an exponential of its own, or 1 / e^G")
    units: int = knob(1, choices=(1, 2, 4), doc="value heads that one block of prepare takes")
    prepare_blocks: int = knob(
        4, choices=(1, 2, 4, 5, 6, 8), doc="blocks of prepare that registers must leave room for on an SM"
    )
    recurrence_blocks: int = knob(
        1, choices=(1, 2, 3, 4), doc="blocks of the recurrence that registers must leave room for on an SM"
    )
    order: str = knob(
        "given", choices=("given", "longest"), doc="which sequence's blocks start first in a ragged pack"
    )
    state: str = knob(
        "registers",
        choices=("registers", "shared"),
        doc="where the recurrence keeps S in fp32",
    )
    start: str = knob(
        "after",
        choices=("after", "early"),
        doc="the recurrence's blocks: once prepare is done, or as it ends",
    )
    sweep: str = knob(
        "forward",
        choices=("forward", "backward"),
        doc="prepare goes through the chunks; what it ends with is in L2",
    )


class KdaSm90ChunkedTemplate:
    """The `Template` for target sm_90a."""

    name = "kda_sm90_chunked"
    operator = "kda"
    target = "sm_90a"
    language: Language = "cute"
    knobs: type[Any] = KdaSm90ChunkedKnobs

    @cached_property
    def source(self) -> str:
        return standalone("kda_sm90_chunked", _PLAN_IMPORT)

    def default(self, spec: Specialization) -> KdaSm90ChunkedKnobs:
        return KdaSm90ChunkedKnobs()

    def why_not(self, knobs: KdaSm90ChunkedKnobs, spec: Specialization) -> str | None:
        return self._plan(knobs, spec).why_not()

    def budget(self, knobs: KdaSm90ChunkedKnobs, spec: Specialization) -> Mapping[str, int]:
        """Of the larger kernel: threads, bytes of shared memory (exact), registers per thread (estimate)."""
        plan = self._plan(knobs, spec)
        return {"threads": plan.threads, "shared_bytes": plan.shared_bytes, "registers": plan.registers}

    def workspace_bytes(
        self,
        knobs: KdaSm90ChunkedKnobs,
        spec: Specialization,
        sizes: Mapping[str, int],
        *,
        debug: bool = False,
    ) -> int:
        """What the caller must hand over for a call's sizes N, T and HV, aligned to 128 bytes: a multiple of
        that."""
        plan = self._plan(knobs, spec, debug=debug)
        return int(plan.workspace(sizes["N"], sizes["T"], sizes["HV"])["end"])

    def unit(
        self, source: str, knobs: KdaSm90ChunkedKnobs, spec: Specialization, *, debug: bool = False
    ) -> Unit:
        return Unit(
            language=self.language,
            text=source,
            entry="kda_forward",
            constants=constants(knobs, spec),
            debug=debug,
        )

    def layouts(self, knobs: KdaSm90ChunkedKnobs, spec: Specialization) -> str:
        plan = self._plan(knobs, spec)
        return "\n\n".join([_grids(plan), _record(plan), _shared_memory(plan), _ownership(plan)])

    def _plan(self, knobs: KdaSm90ChunkedKnobs, spec: Specialization, *, debug: bool = False) -> Plan:
        # Not through `Plan.of`: legality is asked for every cell that a sampler draws.
        return Plan(
            K=spec.integer("K"),
            V=spec.integer("V"),
            production=spec["contract"] == "production",
            io_bytes=2 if spec.dtype == "bfloat16" else 4,
            debug=debug,
            **vars(knobs),
        )


TEMPLATE = KdaSm90ChunkedTemplate()


def _grids(plan: Plan) -> str:
    feeder = " and 1 that feeds" if plan.loader == "warp" else ""
    spans = f" as {plan.spans} spans of {SPAN}" if plan.spans > 1 else ""
    sharing = f", {plan.key_warps} warps to a strip of {TILE} columns" if plan.key_warps > 1 else ""
    return (
        f"prepare     (⌊T/{plan.chunk}⌋ + N) × ⌈HV/{plan.units}⌉ blocks of {plan.prepare_threads} threads: "
        f"{plan.units} value heads of one chunk{spans}, {plan.unit_threads} threads each\n"
        f"recurrence  N × HV × {plan.tiles} blocks of {plan.recurrence_threads} threads: "
        f"{plan.warps} warps that compute{feeder}{sharing}; "
        f"{TILE} columns of S to a warp, K = {plan.keys} elements each"
    )


def _record(plan: Plan) -> str:
    ends = [*list(plan.record_offsets.values())[1:], plan.record_bytes]
    rows = [
        f"{first:8d}  {end - first:7d}  {name}"
        for (name, first), end in zip(plan.record_offsets.items(), ends, strict=True)
    ]
    notes = ["kw, qg, kg: panels of 64 channels, 16-byte piece p of row r at p xor r mod 8"]
    if plan.spans > 1:
        notes.append(f"x, m: blocks of {SPAN} × {SPAN} on and below the diagonal, row by row of blocks")
    return "\n".join(["record: first byte, bytes, part", *rows, *notes])


def _shared_memory(plan: Plan) -> str:
    lines = ["shared memory of the recurrence: first byte, bytes, array"]
    lines += _placed(plan.shared_offsets, plan.shared_arrays)
    lines.append(f"{plan.recurrence_shared_bytes:8d}  in all")
    lines.append(f"shared memory of one unit of prepare ({plan.units} in a block)")
    lines += _placed(plan.unit_offsets, plan.unit_arrays)
    lines.append(f"{plan.unit_bytes:8d}  in all")
    return "\n".join(lines)


def _placed(offsets: Mapping[str, int], sizes: Mapping[str, int]) -> list[str]:
    return [f"{offsets[name]:8d}  {size:7d}  {name}" for name, size in sizes.items() if size]


def _ownership(plan: Plan) -> str:
    """Which elements of S the first lanes of a warp hold."""
    rows = []
    for lane in (0, 1, 4, 31):
        held = sorted({plan.product_row(lane, e) for e in range(4)})
        keys = [plan.product_column(lane, e, j) for j in (0, 1) for e in (0, 1)]
        rows.append(
            f"lane {lane:2d}  columns {', '.join(map(str, held))}  keys {', '.join(map(str, keys))}, …"
        )
    place = "accumulators" if plan.state == "registers" else "shared memory"
    return "\n".join([f"state in {place}: {plan.keys // 2} elements of a thread", *rows])
