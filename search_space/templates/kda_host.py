"""Kimi Delta Attention on one CPU thread: C source, knobs, legality, budgets.

The source is `kda_host.c`; its header comment has the mathematics and the meaning of the stages. Knobs become
`-DNAME=VALUE`, textual values as the macros the source defines (`-DALGORITHM=CHUNKED`).
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files

from evotune.search_space.space import knob
from evotune.search_space.template import Constant, Language, Specialization, Unit

VECTOR_REGISTERS = 32  # AVX-512 and AArch64; AVX2 has 16 and spills the upper half of what is legal


@dataclass(frozen=True)
class KdaHostKnobs:
    """What can be tuned without touching the source."""

    algorithm: str = knob(
        "recurrent",
        choices=("recurrent", "chunked"),
        doc="token by token with the state read twice, or a chunk at a time as small matrix products",
    )
    value_tile: int = knob(
        32, choices=(8, 16, 32, 64, 128), doc="value columns that go through all tokens together"
    )
    lanes: int = knob(8, choices=(4, 8, 16), doc="floats in a vector")
    key_unroll: int = knob(
        1, choices=(1, 2, 4, 8), doc="state rows in registers at once: partial sums, or rows updated together"
    )
    row_block: int = knob(
        2, choices=(1, 2, 4, 8), doc="chunked: token rows in registers in the product with the state"
    )
    chunk: int = knob(
        16, choices=(8, 16, 32, 64), doc="tokens prepared together; the chunk of the chunked form"
    )
    pair_block: int = knob(
        8,
        choices=(2, 4, 8, 16),
        doc="chunked: tokens whose pairwise decays are running products, not factored",
    )
    prefetch: int = knob(
        0, choices=(0, 1, 2), doc="blocks of tokens fetched ahead; 0 leaves it to the hardware"
    )
    state: str = knob(
        "tile",
        choices=("tile", "rows"),
        doc="compact tile on the stack, or rows of the whole state in the workspace",
    )
    exp: str = knob(
        "libm_exp", choices=("libm_exp", "libm_exp2", "polynomial"), doc="how decays are computed"
    )
    order: str = knob(
        "tile_outer",
        choices=("tile_outer", "block_outer"),
        doc="outer loop: value tiles (state stays in L1) or blocks of tokens (factors stay in L1)",
    )
    factors: str = knob(
        "per_sequence",
        choices=("per_sequence", "per_block"),
        doc="decays and chunk factors prepared once into the workspace, or again where used",
    )


@dataclass(frozen=True)
class DebugRegion:
    """A named intermediate in a debug build's workspace: float32, C order, `offset` bytes from its start."""

    name: str
    offset: int
    shape: tuple[int, ...]


class KdaHost:
    """The host template. Legal for K and V that are multiples of 8."""

    name = "kda_host"
    operator = "kda"
    target = "host"
    language: Language = "c"
    knobs = KdaHostKnobs

    @cached_property
    def source(self) -> str:
        return files("evotune.search_space.templates").joinpath("kda_host.c").read_text(encoding="utf-8")

    def default(self, spec: Specialization) -> KdaHostKnobs:
        """Recurrent, 8 lanes, four vectors of value columns; a narrower tile where V asks for it."""
        knobs = KdaHostKnobs()
        narrower = (tile for tile in (32, 16, 8) if spec.integer("V") % tile == 0)
        return dataclasses.replace(knobs, value_tile=next(narrower, knobs.value_tile))

    def why_not(self, knobs: KdaHostKnobs, spec: Specialization) -> str | None:
        keys, values = spec.integer("K"), spec.integer("V")
        vectors = knobs.value_tile // knobs.lanes
        registers = self._accumulators(knobs)
        rules = (
            (keys % 8 != 0 or keys <= 0, f"K = {keys} is not a positive multiple of 8"),
            (values % 8 != 0 or values <= 0, f"V = {values} is not a positive multiple of 8"),
            (values % knobs.value_tile != 0, f"value_tile {knobs.value_tile} does not divide V = {values}"),
            (keys % knobs.lanes != 0, f"{knobs.lanes} lanes do not divide K = {keys}"),
            (vectors < 1, f"value_tile {knobs.value_tile} is narrower than a vector of {knobs.lanes} lanes"),
            (
                registers > VECTOR_REGISTERS,
                f"{registers} accumulators do not fit {VECTOR_REGISTERS} vector registers",
            ),
            (
                knobs.pair_block > knobs.chunk,
                f"pair_block {knobs.pair_block} is larger than the chunk of {knobs.chunk}",
            ),
        )
        return next((reason for broken, reason in rules if broken), None)

    @staticmethod
    def _accumulators(knobs: KdaHostKnobs) -> int:
        """Vector accumulators live in the widest loop of the chosen algorithm."""
        rows = knobs.key_unroll
        if knobs.algorithm == "chunked":
            rows = max(rows, 2 * knobs.row_block)
        return rows * (knobs.value_tile // knobs.lanes)

    def budget(self, knobs: KdaHostKnobs, spec: Specialization) -> Mapping[str, int]:
        """`tile_bytes`: state of one tile; `block_bytes`: prepared factors of one block; `stack_bytes` and
        `workspace_bytes` at least; `registers`: vector accumulators of the widest loop."""
        keys, values = spec.integer("K"), spec.integer("V")
        tile = keys * knobs.value_tile * 4
        block = self._block_floats(knobs, keys) * 4
        state = tile if knobs.order == "tile_outer" else keys * values * 4
        rows, chunked = knobs.state == "rows", knobs.algorithm == "chunked"
        return {
            "tile_bytes": tile,
            "block_bytes": block,
            "registers": self._accumulators(knobs),
            "stack_bytes": (0 if rows else state)
            + (block if knobs.factors == "per_block" else 0)
            + (knobs.chunk * (4 * keys + 2 * knobs.value_tile) * 4 if chunked else 0),
            "workspace_bytes": (keys * values * 4 if rows else 0)
            + (block if knobs.factors == "per_sequence" else 0),
        }

    @staticmethod
    def _block_floats(knobs: KdaHostKnobs, keys: int) -> int:
        """Floats in the C source's `block_t`, which is padded to 64 bytes."""
        chunk = knobs.chunk
        beta = -(-chunk // 16) * 16
        if knobs.algorithm == "chunked":
            floats = 3 * chunk * keys + 2 * chunk * chunk + keys + beta
        else:
            floats = 4 * chunk * keys + beta
        return -(-floats // 16) * 16

    def unit(self, source: str, knobs: KdaHostKnobs, spec: Specialization, *, debug: bool = False) -> Unit:
        constants: dict[str, Constant] = {
            name.upper(): value.upper() if isinstance(value, str) else value
            for name, value in dataclasses.asdict(knobs).items()
        }
        constants |= {
            "K": spec.integer("K"),
            "V": spec.integer("V"),
            "PRODUCTION": int(spec["contract"] == "production"),
            "IO_BF16": int(spec.dtype == "bfloat16"),
            "DEBUG": int(debug),
        }
        return Unit("c", source, "kda_forward", tuple(sorted(constants.items())), debug)

    def debug_regions(
        self, knobs: KdaHostKnobs, spec: Specialization, sizes: Mapping[str, int]
    ) -> tuple[DebugRegion, ...]:
        """What a debug build leaves in the workspace, for sizes N, T, HV of the call.

        decay [T, HV, K], u [T, HV, V], state [T // chunk + N, HV, V, K] after each block: the block of
        sequence n that starts at token t of the pack has index t // chunk + n; unused ones stay as they were.
        """
        keys, values = spec.integer("K"), spec.integer("V")
        n, tokens, heads = sizes["N"], sizes["T"], sizes["HV"]
        shapes = {
            "decay": (tokens, heads, keys),
            "u": (tokens, heads, values),
            "state": (tokens // knobs.chunk + n, heads, values, keys),
        }
        regions, offset = [], 0
        for name, shape in shapes.items():
            regions.append(DebugRegion(name, offset, shape))
            floats = shape[0] * shape[1] * shape[2] * (shape[3] if len(shape) == 4 else 1)
            offset += -(-floats // 16) * 64
        return tuple(regions)

    def layouts(self, knobs: KdaHostKnobs, spec: Specialization) -> str:
        keys, values = spec.integer("K"), spec.integer("V")
        budget = self.budget(knobs, spec)
        tiles, vectors = values // knobs.value_tile, knobs.value_tile // knobs.lanes
        whole = knobs.state == "rows"
        lines = [
            f"state in memory   [N, HV, V={values}, K={keys}] float32, K contiguous",
            f"state of a tile   [K={keys}][{vectors} vectors of {knobs.lanes}], "
            f"row stride {values if whole else knobs.value_tile} floats, {budget['tile_bytes']} B, "
            f"{'workspace' if whole else 'stack'}",
            f"block of tokens   {knobs.chunk} x K={keys}, "
            f"{budget['block_bytes']} B prepared, {knobs.factors}",
            "",
            *self._loop_nest(knobs, tiles),
        ]
        return "\n".join(lines) + "\n"

    @staticmethod
    def _loop_nest(knobs: KdaHostKnobs, tiles: int) -> list[str]:
        tile, block = f"for tile in {tiles}:", f"for block of {knobs.chunk} tokens:"
        first, second = (tile, block) if knobs.order == "tile_outer" else (block, tile)
        nest = ["for sequence, value head:"]
        depth = 1
        if knobs.factors == "per_sequence":
            nest.append(f"    {block} prepare → workspace")
        nest.append("    " * depth + first)
        if knobs.factors == "per_block" and knobs.order == "block_outer":
            nest.append("        prepare → stack")
        nest.append("        " + second)
        if knobs.factors == "per_block" and knobs.order == "tile_outer":
            nest.append("            prepare → stack")
        if knobs.algorithm == "recurrent":
            return [
                *nest,
                "            for token: delta (reads state), update (reads, writes state)",
                f"                for key in steps of {knobs.key_unroll}",
            ]
        return [
            *nest,
            f"            residual: {knobs.row_block} x 2 token rows in registers, over K",
            "            solve, output: triangular over the chunk",
            f"            advance: {knobs.key_unroll} key rows in registers, over the chunk",
        ]


TEMPLATE = KdaHost()
