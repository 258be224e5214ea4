"""Every number of the chunked Hopper KDA kernels that follows from their knobs: layouts, memory, legality.

Pure arithmetic, no DSL: legality uses it on a machine without a compiler, and the kernels' text carries a
copy of it (see `kda_sm90_chunked`), so that both speak of the same kernels. Where a method takes a row, a
column or a lane, it may be an integer of the DSL.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

WARP = 32
SPAN = 16  # tokens whose decays share one anchor: 16 at −5 a token reach e^80, which fp32 and bf16 hold
TILE = 16  # rows of a warp's matrix product, and columns of S that it works on at once
SQUARE_BYTES = SPAN * SPAN * 2  # of a block of X or M, and of a patch of SPAN tokens × TILE values
PANEL = 64  # channels in one row of 128 bytes
SHARED_LIMIT_BYTES = (
    227 * 1024
)  # what one block may have on compute capability 9.0: 228 KB less 1 KB reserved
SM_SHARED_BYTES = 228 * 1024  # of one multiprocessor
BLOCK_RESERVED_BYTES = 1024  # of shared memory, in every block
REGISTER_LIMIT = 255  # per thread, the encoding's limit
REGISTER_FILE = 64 * 1024  # 32-bit registers of one multiprocessor
REGISTER_GRAIN = 8  # per thread, in which registers are given out
ALIGNMENT_BYTES = 1024  # of whatever a warpgroup's matrix product reads: its swizzle counts from there


@dataclass(frozen=True)
class Plan:
    """One configuration of both kernels; attributes are the knobs and the facts of the specialization.

    The unit of work between them is the record of one chunk and value head, an image of what the recurrence
    wants in shared memory: five matrices of bf16 (`KW` k e^G or, where prepare solves, −X k e^G, `QG`
    scale q e^G, `KG` k e^{G_C − G}, each [chunk, K]; `X` (I + L)⁻¹ Diag(beta) and `M` tril(QG (k e^−G)ᵀ), of
    which the blocks of SPAN × SPAN on and below the diagonal) and `END` e^{G_C} in fp32 [K].
    """

    K: int
    V: int
    production: bool
    io_bytes: int
    chunk: int
    value_tile: int
    key_warps: int
    stages: int
    copy: str
    loader: str
    fetch: str
    partials: int
    solve: str
    inverse: str
    exp: str
    units: int
    prepare_blocks: int
    recurrence_blocks: int
    order: str
    state: str
    start: str
    sweep: str
    debug: bool = False

    @classmethod
    def of(cls, constants: Mapping[str, int | float | str]) -> "Plan":
        """From a unit's constants, whose names are in capitals."""
        number = {name: value for name, value in constants.items() if isinstance(value, int)}
        return cls(
            K=number["K"],
            V=number["V"],
            production=bool(number["PRODUCTION"]),
            io_bytes=2 if number["IO_BF16"] else 4,
            chunk=number["CHUNK"],
            value_tile=number["VALUE_TILE"],
            key_warps=number["KEY_WARPS"],
            stages=number["STAGES"],
            copy=str(constants["COPY"]),
            loader=str(constants["LOADER"]),
            fetch=str(constants["FETCH"]),
            partials=number["PARTIALS"],
            solve=str(constants["SOLVE"]),
            inverse=str(constants["INVERSE"]),
            exp=str(constants["EXP"]),
            units=number["UNITS"],
            prepare_blocks=number["PREPARE_BLOCKS"],
            recurrence_blocks=number["RECURRENCE_BLOCKS"],
            order=str(constants["ORDER"]),
            state=str(constants["STATE"]),
            start=str(constants["START"]),
            sweep=str(constants["SWEEP"]),
            debug=bool(number.get("DEBUG", 0)),
        )

    # The record

    @property
    def spans(self) -> int:
        """Of a chunk; each has an anchor of its own."""
        return self.chunk // SPAN

    @property
    def panels(self) -> int:
        """Blocks of 64 channels."""
        return self.K // PANEL

    @property
    def record_offsets(self) -> dict[str, int]:
        """First byte of each part."""
        wide, lower = self.panels * self.chunk * 128, self.block_byte(self.spans, 0)
        parts = {"kw": wide, "qg": wide, "kg": wide, "x": lower, "m": lower, "end": self.K * 4}
        placed, first = {}, 0
        for name, size in parts.items():
            placed[name] = first
            first += size
        return placed

    @property
    def record_bytes(self) -> int:
        return self.record_offsets["end"] + self.K * 4

    @property
    def stage_bytes(self) -> int:
        """A record's place in shared memory."""
        return _rounded(self.record_bytes, ALIGNMENT_BYTES)

    def panel_byte(self, row: Any, column: Any, rows: Any = None) -> Any:
        """Byte of an element of a [rows, K] part: panels of 64 channels, 16-byte pieces swizzled by row.

        A part of a record has `chunk` rows, which is what is meant where none are named.
        """
        inner = column % PANEL * 2
        panel = (self.chunk if rows is None else rows) * 128
        return column // PANEL * panel + row * 128 + (inner ^ (row % 8 * 16))

    def square_byte(self, row: Any, column: Any) -> Any:
        """Byte of an element of a [16, 16] block or patch of bf16: the halves of rows 4–7, 12–15 swapped."""
        return row * 32 + ((column * 2) ^ (row // 4 % 2 * 16))

    def block_byte(self, i: Any, j: Any) -> Any:
        """First byte of block (i, j) of X or M, i ≥ j: one row of blocks after another, no zeros."""
        return (i * (i + 1) // 2 + j) * SQUARE_BYTES

    # What lanes hand to ldmatrix: lane 8 i + r the address of row r of the i-th 8 × 8 matrix.

    def left_row(self, lane: Any) -> Any:
        """Row of a left operand [16, k] that a lane points to."""
        return lane % 16

    def left_column(self, lane: Any) -> Any:
        return lane // 16 * 8

    def right_row(self, lane: Any) -> Any:
        """Row n of a right operand stored [16, k], two fragments of 8 columns of the product."""
        return lane // 16 * 8 + lane % 8

    def right_column(self, lane: Any) -> Any:
        return lane // 8 % 2 * 8

    # A lane's elements of a product [16, 8 j]: register e of block j

    def product_row(self, lane: Any, e: int) -> Any:
        return lane // 4 + e // 2 * 8

    def product_column(self, lane: Any, e: int, j: int) -> Any:
        return j * 8 + lane % 4 * 2 + e % 2

    # Prepare

    @property
    def span_threads(self) -> int:
        """Of one span and head: two neighbouring channels each."""
        return self.K // 2

    @property
    def span_warps(self) -> int:
        return self.span_threads // WARP

    @property
    def unit_threads(self) -> int:
        """Of one chunk and head."""
        return self.spans * self.span_threads

    @property
    def unit_warps(self) -> int:
        return self.unit_threads // WARP

    @property
    def prepare_threads(self) -> int:
        return self.units * self.unit_threads

    @property
    def near_rows(self) -> int:
        """Of parts whose anchor is the border of their own span, where that is not the chunk's."""
        return self.chunk - SPAN

    @property
    def unit_arrays(self) -> dict[str, int]:
        """Bytes in shared memory of one unit, in order: the record first."""
        near = self.panels * self.near_rows * 128
        return {
            "record": self.stage_bytes,
            "raised k": self.panels * self.chunk * 128,
            "near kw": near,
            "near qg": near,
            "near kg": near,
            "across": 2 * SQUARE_BYTES if self.spans > 1 else 0,
            "lower": self.spans * SPAN * SPAN * 4,
            "ends": self.spans * self.K * 4 if self.spans > 1 else 0,
            "sums": self.unit_warps * WARP * 4,
            "factors": self.unit_warps * WARP * 4,
        }

    @property
    def unit_offsets(self) -> dict[str, int]:
        placed, first = {}, 0
        for name, size in self.unit_arrays.items():
            placed[name] = first
            first += size
        return placed

    @property
    def unit_bytes(self) -> int:
        return _rounded(sum(self.unit_arrays.values()), ALIGNMENT_BYTES)

    @property
    def prepare_shared_bytes(self) -> int:
        return self.units * self.unit_bytes

    @property
    def prepare_registers(self) -> int:
        """Estimate: q, k, g of two channels of a span as they came, their decays, addressing."""
        raw = SPAN * 2 * (2 * self.io_bytes + self.gate_bytes) // 4
        return raw + SPAN * 2 + 16

    # Recurrence

    @property
    def strips(self) -> int:
        """Of 16 columns of S in one block."""
        return self.value_tile // TILE

    @property
    def warps(self) -> int:
        """That compute: `key_warps` to a strip, each with its share of the keys."""
        return self.strips * self.key_warps

    @property
    def keys(self) -> int:
        """Rows of S that one warp has."""
        return self.K // self.key_warps

    @property
    def own_spans(self) -> int:
        """Of a chunk whose outputs one warp finishes and writes, and whose values it fetches."""
        return self.spans // self.key_warps

    @property
    def recurrence_threads(self) -> int:
        return WARP * (self.warps + (1 if self.loader == "warp" else 0))

    def turned(self, s: Any, share: Any) -> Any:
        """The span that comes s-th for the warp with that share of the keys: its own come first.

        Itself the other way round.
        """
        return s if self.key_warps == 1 else s ^ (share * self.own_spans)

    def told(self, s: int, distance: int) -> int:
        """What comes s-th for a warp comes so-manieth for the one whose share is its own xor `distance`."""
        return s ^ (distance * self.own_spans)

    @property
    def tiles(self) -> int:
        """Blocks that share one head of one sequence."""
        return self.V // self.value_tile

    @property
    def gate_bytes(self) -> int:
        """Of one element of g: raw gates come in the io type, log decays in fp32."""
        return self.io_bytes if self.production else 4

    @property
    def shared_arrays(self) -> dict[str, int]:
        """Bytes of each array of the recurrence, in order."""
        return {
            "records": self.stages * self.stage_bytes,
            "values": self.stages * self.strips * self.spans * SQUARE_BYTES,
            "outputs": self.warps * self.own_spans * SQUARE_BYTES,
            "partial": 2 * self.warps * self.partial_bytes,
            "state": self.warps * TILE * self.keys * 4 if self.state == "shared" else 0,
            "barriers": 2 * self.stages * 8,
        }

    @property
    def partial_bytes(self) -> int:
        """What a warp tells the others of its strip: its sums over keys, of outputs those it does not write.

        There are two such places, for even and odd chunks: none is written again before all have read it.
        """
        return self.partial_output(self.spans) if self.key_warps > 1 else 0

    def partial_sum(self, s: int) -> int:
        """First byte of the s-th span of KW S or U, fp32, among what a warp tells."""
        return s * (SPAN * TILE * 4)

    def partial_output(self, s: int) -> int:
        """First byte of the s-th span of QG S, which is not the warp's own."""
        return self.partial_sum(self.spans + s - self.own_spans)

    @property
    def shared_offsets(self) -> dict[str, int]:
        placed, first = {}, 0
        for name, size in self.shared_arrays.items():
            placed[name] = first
            first += size
        return placed

    @property
    def recurrence_shared_bytes(self) -> int:
        return sum(self.shared_arrays.values())

    @property
    def recurrence_registers(self) -> int:
        """Estimate: the state in fp32 and rounded, accumulators, fragments on their way, addressing."""
        held = self.keys // 2 if self.state == "registers" else 0
        return held + self.keys // 4 + 8 * self.spans * (2 * self.partials + 1) + 34

    # Both

    @property
    def shared_bytes(self) -> int:
        """The larger of the two blocks."""
        return max(self.prepare_shared_bytes, self.recurrence_shared_bytes)

    @property
    def threads(self) -> int:
        return max(self.prepare_threads, self.recurrence_threads)

    @property
    def registers(self) -> int:
        return max(self.prepare_registers, self.recurrence_registers)

    def slots(self, N: Any, T: Any) -> Any:
        """Places for chunks. Sequence n has those from `first_slot` on: no table, and no two meet.

        A sequence of l tokens from token t has ⌈l / C⌉ ≤ ⌊(t mod C + l) / C⌋ + 1 chunks of C tokens, what
        lies between its first slot and the next one's; N of the places at most stay empty.
        """
        return T // self.chunk + N

    def first_slot(self, n: Any, begin: Any) -> Any:
        """Of sequence n, whose first token is `begin`."""
        return begin // self.chunk + n

    def workspace(self, N: Any, T: Any, HV: Any) -> dict[str, Any]:
        """First byte of each part: records [slots, HV], order [N] int32, and of a debug build u and state.

        u [slots, HV, chunk, V] and state [slots, HV, V, K] after each chunk are fp32; `end` closes the list.
        """
        records = self.slots(N, T) * HV
        placed = {"records": T * 0, "order": records * self.record_bytes}
        placed["u"] = placed["order"] + (N * 4 + ALIGNMENT_BYTES - 1) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        placed["state"] = placed["u"] + (records * (self.chunk * self.V * 4) if self.debug else T * 0)
        placed["end"] = placed["state"] + (records * (self.V * self.K * 4) if self.debug else T * 0)
        return placed

    # Legality

    def why_not(self) -> str | None:
        """The reason this configuration is illegal, or None."""
        for reason in (self._why_not_shape(), self._why_not_roles(), self._why_not_capacity()):
            if reason:
                return reason
        return None

    def _why_not_shape(self) -> str | None:
        if self.io_bytes != 2:
            return "the matrix products take bfloat16; for fp32 there is the template kda_sm90"
        if self.K not in (PANEL, 2 * PANEL):
            return f"K = {self.K} is neither {PANEL} nor {2 * PANEL}: a row is one or two panels of 128 bytes"
        if self.V % self.value_tile:
            return f"value_tile {self.value_tile} does not divide V = {self.V}"
        return None

    def _why_not_roles(self) -> str | None:
        if self.key_warps > self.spans:
            return f"key_warps {self.key_warps}: each writes whole spans, and a chunk has {self.spans}"
        if self.copy == "cp.async" and self.loader == "warp":
            return "cp.async is issued by the threads that compute: loader must be inline"
        if self.key_warps > 1 and self.fetch == "before":
            return "fetch must be behind: before the warps of a strip meet, one may still read old values"
        return None

    def _why_not_capacity(self) -> str | None:
        for kernel, shared, registers, threads, blocks in (
            (
                "prepare",
                self.prepare_shared_bytes,
                self.prepare_registers,
                self.prepare_threads,
                self.prepare_blocks,
            ),
            (
                "recurrence",
                self.recurrence_shared_bytes,
                self.recurrence_registers,
                self.recurrence_threads,
                self.recurrence_blocks,
            ),
        ):
            if shared > SHARED_LIMIT_BYTES:
                return f"{kernel}: {shared} bytes of shared memory exceed {SHARED_LIMIT_BYTES}"
            if blocks * (shared + BLOCK_RESERVED_BYTES) > SM_SHARED_BYTES:
                return f"{kernel}: {blocks} blocks × {shared} bytes of shared memory exceed {SM_SHARED_BYTES}"
            if blocks * threads * _rounded(registers, REGISTER_GRAIN) > REGISTER_FILE:
                return (
                    f"{kernel}: {blocks} blocks × {threads} threads × {registers} registers "
                    f"exceed {REGISTER_FILE}"
                )
        return None


def _rounded(size: int, grain: int) -> int:
    return -(-size // grain) * grain
