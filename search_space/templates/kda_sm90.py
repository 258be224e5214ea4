"""Kimi Delta Attention for Hopper: the knobs, their legality, and the text that the CuTe-DSL compiles.

The kernel is `kda_sm90_kernel.py`; what follows from the knobs is `kda_sm90_plan.py`. A branch is one text
that needs nothing but the DSL, so the seed's source is the kernel's with its one import of ours replaced by
the plan.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from evotune.search_space.space import knob
from evotune.search_space.template import Language, Specialization, Unit
from evotune.search_space.templates.kda_sm90_plan import WARP, Plan
from evotune.search_space.templates.sm90 import constants, standalone

_PLAN_IMPORT = "from evotune.search_space.templates.kda_sm90_plan import ALIGNMENT_BYTES, WARP, Plan\n"


@dataclass(frozen=True)
class KdaSm90Knobs:
    """One configuration; `Plan` says what follows from it."""

    value_tile: int = knob(
        32, choices=(16, 32, 64, 128), doc="columns of V in one block: fewer make more, smaller blocks"
    )
    warps: int = knob(4, choices=(1, 2, 4, 8), doc="warps of a block")
    key_split: int = knob(
        8, choices=(1, 2, 4, 8, 16, 32), doc="neighbouring lanes that share a column's K elements"
    )
    vector: int = knob(
        4, choices=(1, 2, 4), doc="neighbouring fp32 elements a lane reads from shared memory at once"
    )
    partials: int = knob(2, choices=(1, 2, 4), doc="independent partial sums in a thread's scalar product")
    tokens: int = knob(16, choices=(8, 16, 32), doc="tokens copied and prepared together")
    stages: int = knob(2, choices=(1, 2, 3, 4), doc="slots of the cp.async ring; 1 is not pipelined")
    unroll: int = knob(
        1, choices=(1, 2, 4), doc="tokens in one turn of the loop: one's output overlaps the next one's start"
    )
    state: str = knob(
        "registers", choices=("registers", "shared"), doc="where the fp32 state lives between tokens"
    )
    exp: str = knob(
        "approximate", choices=("approximate", "exact"), doc="exp2: one instruction, or denormals kept"
    )


class KdaSm90Template:
    """The `Template` for target sm_90a."""

    name = "kda_sm90"
    operator = "kda"
    target = "sm_90a"
    language: Language = "cute"
    knobs: type[Any] = KdaSm90Knobs

    @cached_property
    def source(self) -> str:
        return standalone("kda_sm90", _PLAN_IMPORT)

    def default(self, spec: Specialization) -> KdaSm90Knobs:
        return KdaSm90Knobs()

    def why_not(self, knobs: KdaSm90Knobs, spec: Specialization) -> str | None:
        return self._plan(knobs, spec).why_not()

    def budget(self, knobs: KdaSm90Knobs, spec: Specialization) -> Mapping[str, int]:
        """Threads, bytes of shared memory (exact) and registers per thread (estimate)."""
        plan = self._plan(knobs, spec)
        return {
            "threads": plan.threads,
            "shared_bytes": plan.shared_bytes,
            "registers": plan.registers,
        }

    def unit(self, source: str, knobs: KdaSm90Knobs, spec: Specialization, *, debug: bool = False) -> Unit:
        return Unit(
            language=self.language,
            text=source,
            entry="kda_forward",
            constants=constants(knobs, spec),
            debug=debug,
        )

    def layouts(self, knobs: KdaSm90Knobs, spec: Specialization) -> str:
        plan = self._plan(knobs, spec)
        return "\n\n".join([_grid(plan), _shared_memory(plan), _ownership(plan)])

    def intermediates(
        self, knobs: KdaSm90Knobs, spec: Specialization, T: int, HV: int
    ) -> Mapping[str, tuple[int, tuple[int, ...]]]:
        """What a debug build leaves in its workspace: name → (first fp32 element, shape)."""
        return self._plan(knobs, spec).intermediates(T, HV)

    def _plan(self, knobs: KdaSm90Knobs, spec: Specialization) -> Plan:
        # Not through `Plan.of`: legality is asked for every cell that a sampler draws.
        return Plan(
            K=spec.integer("K"),
            V=spec.integer("V"),
            production=spec["contract"] == "production",
            io_bytes=2 if spec.dtype == "bfloat16" else 4,
            **vars(knobs),
        )


TEMPLATE = KdaSm90Template()


def _grid(plan: Plan) -> str:
    return (
        f"grid   ({plan.tiles} × N, HV)   block x = sequence × {plan.tiles} + value tile, y = value head\n"
        f"block  {plan.threads} threads = {plan.warps} warps; {plan.value_tile} columns of S, "
        f"K = {plan.K} elements each"
    )


def _shared_memory(plan: Plan) -> str:
    """Arrays with shape:stride as the DSL prints it."""
    T, K, S = plan.tokens, plan.K, plan.stages
    layouts = {name: f"({S},{T},{K}):({T * K},{K},1) {_io(plan)}" for name in ("q", "k")}
    gate = "fp32" if plan.gate_bytes == 4 else "bf16"
    layouts["g"] = f"({S},{T},{K}):({T * K},{K},1) {gate}"
    tile = plan.value_tile
    layouts["v"] = f"({S},{T},{tile}):({T * tile},{tile},1) {_io(plan)}"
    layouts |= {f"prepared {name}": f"({T},{K}):({K},1) fp32" for name in ("q", "k", "decay")}
    layouts["beta"] = f"({T}):(1) fp32"
    groups, vector, threads = plan.slice // plan.vector, plan.vector, plan.threads
    layouts["state"] = (
        f"({plan.columns},{groups},{threads},{vector})"
        f":({groups * threads * vector},{threads * vector},{vector},1) fp32, (column, group, thread, element)"
    )
    rows = [
        f"{first:8d}  {size:7d}  {name:14s}  {layouts[name]}"
        for name, (first, size) in plan.shared_placement.items()
    ]
    return "\n".join(["shared memory: first byte, bytes, array", *rows, f"{plan.shared_bytes:8d}  in all"])


def _ownership(plan: Plan) -> str:
    """Which elements of S the first threads hold, and the copy's mapping."""
    groups = plan.slice // plan.vector
    rows = []
    for thread in sorted({*range(min(plan.key_split + 1, 5)), plan.key_split, plan.threads - 1}):
        columns = [plan.column_of(thread, c) for c in range(plan.columns)]
        keys = [plan.key_of(thread, group) for group in range(groups)]
        shown = ", ".join(f"{k}–{k + plan.vector - 1}" if plan.vector > 1 else f"{k}" for k in keys[:4])
        more = f", … {groups} groups" if groups > 4 else ""
        rows.append(f"thread {thread:3d}  columns {_brief(columns)}  keys {shown}{more}")
    placed = "registers" if plan.state == "registers" else "shared memory, in registers while updated"
    head = f"state in {placed}: {plan.columns} column(s) × {plan.slice} elements a thread"
    prepare = (
        f"prepare: warp w takes tokens w, w + {plan.warps}, …; lane l channels {plan.channels}l … "
        f"{plan.channels}l + {plan.channels - 1} of {WARP * plan.channels}"
    )
    return "\n".join([head, *rows, prepare])


def _brief(numbers: list[int]) -> str:
    return (
        ", ".join(map(str, numbers)) if len(numbers) <= 4 else f"{numbers[0]}, {numbers[1]}, … {numbers[-1]}"
    )


def _io(plan: Plan) -> str:
    return "bf16" if plan.io_bytes == 2 else "fp32"
