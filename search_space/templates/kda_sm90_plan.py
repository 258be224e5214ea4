"""Every number of the Hopper KDA kernel that follows from its knobs: threads, tiles, shared memory, legality.

Pure arithmetic, no DSL: legality uses it on a machine without a compiler, and the kernel's text carries a
copy of it (see `kda_sm90`), so that both speak of the same kernel.
"""

from collections.abc import Mapping
from dataclasses import dataclass

WARP = 32
SHARED_LIMIT_BYTES = (
    227 * 1024
)  # what one block may have on compute capability 9.0: 228 KB less 1 KB reserved
REGISTER_LIMIT = 255  # per thread, the encoding's limit
REGISTER_FILE = 64 * 1024  # 32-bit registers of one multiprocessor
ADDRESSING_REGISTERS = 40  # pointers, loop counters, pipeline slots: 36 to 44 seen in builds of the default
# State elements that one turn of the loop over tokens walks, 4 instructions each; 256 took 2 to 5 s to build.
UNROLLED_LIMIT = 128
ALIGNMENT_BYTES = 128  # of every shared-memory array


@dataclass(frozen=True)
class Plan:
    """One configuration of the kernel; attributes are the knobs and the facts of the specialization.

    A block owns `value_tile` columns of one head's state [K, V] and walks one sequence token by token. A
    column is shared by `key_split` neighbouring lanes, each with `slice` of its K elements; a thread has
    `columns`.
    """

    K: int
    V: int
    production: bool
    io_bytes: int
    value_tile: int
    warps: int
    key_split: int
    vector: int
    partials: int
    tokens: int
    stages: int
    unroll: int
    state: str
    exp: str
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
            warps=number["WARPS"],
            key_split=number["KEY_SPLIT"],
            vector=number["VECTOR"],
            partials=number["PARTIALS"],
            tokens=number["TOKENS"],
            stages=number["STAGES"],
            unroll=number["UNROLL"],
            state=str(constants["STATE"]),
            exp=str(constants["EXP"]),
            debug=bool(number.get("DEBUG", 0)),
        )

    @property
    def threads(self) -> int:
        return WARP * self.warps

    @property
    def tiles(self) -> int:
        """Blocks that share one head of one sequence."""
        return self.V // self.value_tile

    @property
    def columns(self) -> int:
        """State columns of one thread."""
        return self.value_tile * self.key_split // self.threads

    @property
    def slice(self) -> int:
        """Elements of one column that one thread holds."""
        return self.K // self.key_split

    @property
    def channels(self) -> int:
        """Key channels of one lane while a warp prepares a token."""
        return self.K // WARP

    @property
    def gate_bytes(self) -> int:
        """Of one element of g: raw gates come in the io type, log decays in fp32."""
        return self.io_bytes if self.production else 4

    @property
    def shared_arrays(self) -> dict[str, int]:
        """Bytes of each array in shared memory, in the order of allocation."""
        staged = self.stages * self.tokens
        arrays = {
            "q": staged * self.K * self.io_bytes,
            "k": staged * self.K * self.io_bytes,
            "g": staged * self.K * self.gate_bytes,
            "v": staged * self.value_tile * self.io_bytes,
            "prepared q": self.tokens * self.K * 4,
            "prepared k": self.tokens * self.K * 4,
            "prepared decay": self.tokens * self.K * 4,
            "beta": self.tokens * 4,
        }
        if self.state == "shared":
            arrays["state"] = self.value_tile * self.K * 4
        return arrays

    @property
    def shared_bytes(self) -> int:
        """Of one block: the end of the last array."""
        return max(first + size for first, size in self.shared_placement.values())

    @property
    def shared_placement(self) -> dict[str, tuple[int, int]]:
        """(first byte, bytes) of each array, placed as the kernel's allocator places them."""
        placed, end = {}, 0
        for name, size in self.shared_arrays.items():
            first = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            placed[name] = (first, size)
            end = first + size
        return placed

    @property
    def registers(self) -> int:
        """Estimate for one thread: state, three fragments of the token, partial sums, addressing."""
        held = self.columns if self.state == "registers" else 1
        return held * (self.slice + self.partials) + 3 * self.slice + ADDRESSING_REGISTERS

    def key_of(self, thread: int, group: int) -> int:
        """First of the `vector` neighbouring key elements that a thread holds as its given group."""
        return (group * self.key_split + thread % self.key_split) * self.vector

    def column_of(self, thread: int, c: int) -> int:
        """The c-th column of a thread, counted within the tile."""
        return thread // self.key_split + c * (self.threads // self.key_split)

    def why_not(self) -> str | None:
        """The reason this configuration is illegal, or None."""
        for reason in (self._why_not_tiles(), self._why_not_capacity()):
            if reason:
                return reason
        return None

    def _why_not_tiles(self) -> str | None:
        if self.K % WARP:
            return (
                f"K = {self.K} is not a multiple of {WARP}: a warp prepares a token, a lane K/{WARP} channels"
            )
        if self.V % self.value_tile:
            return f"value_tile {self.value_tile} does not divide V = {self.V}"
        if self.value_tile * self.key_split % self.threads:
            return (
                f"{self.threads} threads do not divide {self.value_tile} columns × {self.key_split} lanes: "
                "a thread needs whole columns"
            )
        if self.K % (self.key_split * self.vector):
            return f"key_split {self.key_split} × vector {self.vector} does not divide K = {self.K}"
        if self.partials > self.slice:
            return f"{self.partials} partial sums for {self.slice} elements"
        if self.tokens % self.warps:
            return (
                f"{self.warps} warps do not divide {self.tokens} staged tokens: a warp prepares whole tokens"
            )
        return None

    def _why_not_capacity(self) -> str | None:
        held = self.columns * self.slice
        if held * self.unroll > UNROLLED_LIMIT:
            return f"{held} state elements per thread × unroll {self.unroll} exceed {UNROLLED_LIMIT}"
        if self.registers > REGISTER_LIMIT:
            return (
                f"about {self.registers} registers per thread exceed {REGISTER_LIMIT}: the state would spill"
            )
        if self.registers * self.threads > REGISTER_FILE:
            return f"about {self.registers} registers × {self.threads} threads exceed {REGISTER_FILE}"
        if self.shared_bytes > SHARED_LIMIT_BYTES:
            return f"{self.shared_bytes} bytes of shared memory exceed {SHARED_LIMIT_BYTES}"
        return None

    def intermediates(self, T: int, HV: int) -> dict[str, tuple[int, tuple[int, ...]]]:
        """What a debug build writes to the workspace, fp32: name → (first element, shape).

        `q` is normalised and scaled, `k` normalised, `decay` is exp(g) after the gate, `beta` after its
        sigmoid, `u` the correction beta (v - S^T k) of the delta rule. T and HV may be integers of the DSL.
        """
        shapes = {
            "q": (T, HV, self.K),
            "k": (T, HV, self.K),
            "decay": (T, HV, self.K),
            "beta": (T, HV),
            "u": (T, HV, self.V),
        }
        placed, first = {}, T * 0
        for name, shape in shapes.items():
            placed[name] = (first, shape)
            size = shape[0] * shape[1]
            first = first + (size * shape[2] if len(shape) == 3 else size)
        return placed
