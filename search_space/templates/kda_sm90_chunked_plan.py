"""Every number of the chunked Hopper KDA kernels that follows from their knobs: layouts, memory, legality.

Pure arithmetic, no DSL: legality uses it on a machine without a compiler, and the kernels' text carries a
copy of it (see `kda_sm90_chunked`), so that both speak of the same kernels. Where a method takes a row, a
column or a lane, it may be an integer of the DSL.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

WARP = 32
CHUNK = 16  # tokens whose decays share one anchor: 16 at −5 a token reach e^80, which fp32 and bf16 hold
TILE = 16  # rows of a warp's matrix product, and columns of Sᵀ that it works on at once
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
    wants in shared memory: five matrices of bf16 (`KW` k e^G, `QG` scale q e^G, `KG` k e^{G_C − G}, each
    [CHUNK, K]; `X` (I + L)⁻¹ Diag(beta) and `M` tril(QG (k e^−G)ᵀ), each [CHUNK, CHUNK]) and `END` e^{G_C}
    in fp32 [K].
    """

    K: int
    V: int
    production: bool
    io_bytes: int
    value_tile: int
    stages: int
    copy: str
    loader: str
    partials: int
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
            value_tile=number["VALUE_TILE"],
            stages=number["STAGES"],
            copy=str(constants["COPY"]),
            loader=str(constants["LOADER"]),
            partials=number["PARTIALS"],
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
    def panels(self) -> int:
        """Blocks of 64 channels."""
        return self.K // PANEL

    @property
    def record_offsets(self) -> dict[str, int]:
        """First byte of each part."""
        wide, square = self.panels * CHUNK * 128, CHUNK * CHUNK * 2
        parts = {"kw": wide, "qg": wide, "kg": wide, "x": square, "m": square, "end": self.K * 4}
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

    def panel_byte(self, row: Any, column: Any) -> Any:
        """Byte of an element of a [CHUNK, K] part: panels of 64 channels, 16-byte pieces swizzled by row."""
        inner = column % PANEL * 2
        return column // PANEL * (CHUNK * 128) + row * 128 + (inner ^ (row % 8 * 16))

    def square_byte(self, row: Any, column: Any) -> Any:
        """Byte of an element of a [16, 16] part or patch of bf16: the halves of rows 4–7, 12–15 swapped."""
        return row * 32 + ((column * 2) ^ (row // 4 % 2 * 16))

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
    def unit_threads(self) -> int:
        """Of one chunk and head: two neighbouring channels each."""
        return self.K // 2

    @property
    def unit_warps(self) -> int:
        return self.unit_threads // WARP

    @property
    def prepare_threads(self) -> int:
        return self.units * self.unit_threads

    @property
    def unit_arrays(self) -> dict[str, int]:
        """Bytes in shared memory of one unit, in order: the record first."""
        return {
            "record": self.stage_bytes,
            "raised k": self.panels * CHUNK * 128,
            "lower": CHUNK * CHUNK * 4,
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
        """Estimate: q, k, g of two channels as they came, the raised keys, addressing."""
        raw = CHUNK * 2 * (2 * self.io_bytes + self.gate_bytes) // 4
        return raw + CHUNK * 2 + 16

    # Recurrence

    @property
    def warps(self) -> int:
        """That compute; each has 16 columns of S."""
        return self.value_tile // TILE

    @property
    def recurrence_threads(self) -> int:
        return WARP * (self.warps + (1 if self.loader == "warp" else 0))

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
        """Bytes of each array of the recurrence, in order; a patch is a warp's 16 tokens × 16 values."""
        patch = CHUNK * TILE * 2
        return {
            "records": self.stages * self.stage_bytes,
            "values": self.stages * self.warps * patch,
            "outputs": self.warps * patch,
            "state": self.warps * TILE * self.K * 4 if self.state == "shared" else 0,
            "barriers": 2 * self.stages * 8,
        }

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
        held = self.K // 2 if self.state == "registers" else 0
        return held + self.K // 4 + 8 * (2 * self.partials + 1) + 34

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

        A sequence of l tokens from token t has ⌈l / 16⌉ ≤ ⌊(t mod 16 + l) / 16⌋ + 1 chunks, what lies between
        its first slot and the next one's; N of the places at most stay empty.
        """
        return T // CHUNK + N

    def first_slot(self, n: Any, begin: Any) -> Any:
        """Of sequence n, whose first token is `begin`."""
        return begin // CHUNK + n

    def workspace(self, N: Any, T: Any, HV: Any) -> dict[str, Any]:
        """First byte of each part: records [slots, HV], order [N] int32, and of a debug build u and state.

        u [slots, HV, CHUNK, V] and state [slots, HV, V, K] after each chunk are fp32; `end` closes the list.
        """
        records = self.slots(N, T) * HV
        placed = {"records": T * 0, "order": records * self.record_bytes}
        placed["u"] = placed["order"] + (N * 4 + ALIGNMENT_BYTES - 1) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        placed["state"] = placed["u"] + (records * (CHUNK * self.V * 4) if self.debug else T * 0)
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
        if self.copy == "cp.async" and self.loader == "warp":
            return "cp.async is issued by the threads that compute: loader must be inline"
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
