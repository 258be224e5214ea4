"""Memory shared by the parent and one runner: buffers between guard bands, poisoned before each call.

One buffer, in pages of 4 KiB (`GUARD`; the next buffer's guard is this one's upper guard):

    | guard page | slack | buffer, rounded up to 64 bytes | guard page |      flush "end"
    | guard page | buffer, rounded up to 64 bytes | slack | guard page |      flush "start"

Guards and slack hold 32-bit words that read as NaN in float32 and, in both halves, in bfloat16: a write
there is seen by comparing, and a read from there spoils the result. Each gap has a random word of its own,
or a kernel that copies one element too many from one guard to the next would leave no trace. A guard is a
whole page so that the runner can take all rights from it (`Placement.fences`): then a read outside, which
leaves no trace, ends in SIGSEGV. Flush at the end that catches reads 64 bytes past a buffer, flush at the
start reads one byte before it; the gate calls both ways.

Outputs and workspace start as NaN bit patterns, so that what is not written is not mistaken for a result.
"""

import fcntl
import math
import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import ml_dtypes
import numpy as np

from evotune.errors import StudyError
from evotune.fitness.operator import Array, Case, Parameter, Placeable

GUARD = 4096
ALIGN = 64
POISON = 0xFFFFFFFF
_GUARD_WORDS = 61
# Up to here a used page is zeroed in place; taking it from the system again costs five times as much.
_KEPT_BYTES = 16 << 20
NULL = (1 << 64) - 1
# Sealed so that nobody, the runner included, can shrink it and make the parent's next read a SIGBUS.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_DTYPES: dict[str, np.dtype[np.generic]] = {
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "int32": np.dtype(np.int32),
    "int64": np.dtype(np.int64),
    "uint8": np.dtype(np.uint8),
}

Flush = Literal["end", "start"]


def dtype_of(ctype: str) -> np.dtype[np.generic]:
    """Of an element that a signature names."""
    return _DTYPES[ctype]


def nan_words(rng: np.random.Generator, count: int) -> list[int]:
    """Random 32-bit words that are NaN as float32 and, in both halves, as bfloat16; never `POISON`."""
    high, low = rng.integers(1, 63, size=(2, count))
    return [int(word) for word in (0x7FC0 | high) << 16 | 0xFFC0 | low]


def nan_word(rng: np.random.Generator) -> int:
    return nan_words(rng, 1)[0]


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


@dataclass(frozen=True)
class Buffer:
    """Where one argument lies: bytes [start, start + size) of the arena."""

    name: str
    role: str
    start: int
    size: int
    shape: tuple[int, ...]
    ctype: str


@dataclass(frozen=True)
class Placement:
    """A case laid out in an arena.

    Attributes:
        words: the call's arguments, 8 bytes each: offset or all ones for NULL, int64, float64.
        buffers: in argument order, absent ones left out.
        gaps: [begin, end) of guards and slack, in address order.
        fences: [begin, end) of the guard pages alone.
        end: first byte after the last guard.
    """

    words: tuple[bytes, ...]
    buffers: tuple[Buffer, ...]
    gaps: tuple[tuple[int, int], ...]
    fences: tuple[tuple[int, int], ...]
    begin: int
    end: int


@dataclass
class _Layout:
    """Lays buffers one after another from page `cursor` on."""

    cursor: int
    flush: Flush
    gaps: list[tuple[int, int]]
    fences: list[tuple[int, int]]

    def guard(self) -> None:
        self.gaps.append((self.cursor, self.cursor + GUARD))
        self.fences.append((self.cursor, self.cursor + GUARD))
        self.cursor += GUARD

    def buffer(self, size: int) -> int:
        """Offset of a new buffer of `size` bytes, behind a guard."""
        self.guard()
        begin, end = self.cursor, self.cursor + _up(size, GUARD)
        start = begin if self.flush == "start" else end - _up(size, ALIGN)
        self.gaps += [gap for gap in ((begin, start), (start + size, end)) if gap[0] < gap[1]]
        self.cursor = end
        return start


def _extent(
    parameter: Parameter, case: Placeable, workspace_bytes: int
) -> tuple[tuple[int, ...], str] | None:
    """Shape and element type of a pointer argument, or None when the case leaves it out."""
    if parameter.role == "workspace":
        return (workspace_bytes,), "uint8"
    if parameter.role == "output":
        return case.outputs.get(parameter.name)
    array = case.inputs.get(parameter.name)
    return None if array is None else (array.shape, parameter.ctype)


def lay_out(
    signature: Sequence[Parameter],
    case: Placeable,
    *,
    begin: int = 0,
    workspace_bytes: int = 0,
    flush: Flush = "end",
) -> Placement:
    """Where the arguments of a call lie in an arena, from byte `begin` (a multiple of `GUARD`) on."""
    layout = _Layout(begin, flush, [], [])
    words, buffers = [], []
    for parameter in signature:
        if parameter.role == "size":
            words.append(int(case.sizes[parameter.name]).to_bytes(8, "little", signed=True))
        elif parameter.role == "scalar":
            words.append(np.float64(case.scalars[parameter.name]).tobytes())
        elif (extent := _extent(parameter, case, workspace_bytes)) is None:
            words.append(NULL.to_bytes(8, "little"))
        else:
            shape, ctype = extent
            size = math.prod(shape) * _DTYPES[ctype].itemsize
            start = layout.buffer(size)
            words.append(start.to_bytes(8, "little"))
            buffers.append(Buffer(parameter.name, parameter.role, start, size, shape, ctype))
    layout.guard()
    return Placement(
        tuple(words), tuple(buffers), tuple(layout.gaps), tuple(layout.fences), begin, layout.cursor
    )


class Arena:
    """A sealed memfd of `size` bytes, mapped here and in one runner. Pages cost memory once touched."""

    def __init__(self, size: int) -> None:
        """Raises OSError when the system gives no memory."""
        self.size = size
        self.fd = os.memfd_create("evotune-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, size)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
        self._map = mmap.mmap(self.fd, size)
        self._bytes = np.frombuffer(self._map, np.uint8)
        self._words = self._bytes[: size // 4 * 4].view(np.uint32)
        self._guards = _guards()
        self._placed = 0  # whole pages, from the start, that a placement has reached

    def wipe(self) -> None:
        """Zero every byte for everyone who maps it, and draw new words for the guards. Placements end.

        What lies beyond the placements may have been written too, by whoever maps the arena: those pages go
        back to the system, which is quick where there are none.
        """
        kept = min(self._placed, _KEPT_BYTES)
        self._bytes[:kept] = 0
        if kept < self.size:
            self._map.madvise(mmap.MADV_REMOVE, kept, self.size - kept)
        self._placed = kept
        self._guards = _guards()

    def place(
        self,
        signature: Sequence[Parameter],
        case: Case,
        *,
        begin: int = 0,
        workspace_bytes: int = 0,
        flush: Flush = "end",
        poison: int = POISON,
    ) -> Placement:
        """Write guards, inputs and poison for a case from byte `begin` (a multiple of `GUARD`) on.

        Raises StudyError when it does not fit.
        """
        placement = lay_out(signature, case, begin=begin, workspace_bytes=workspace_bytes, flush=flush)
        if placement.end > self.size:
            raise StudyError(
                f"{case.name} needs {placement.end >> 20} MiB of shared memory, the arena has "
                f"{self.size >> 20}: make the workload smaller or raise arena_mib"
            )
        self._placed = max(self._placed, placement.end)
        for number, (start, end) in enumerate(placement.gaps):
            self._map[start:end] = self._guard(number, start, end)
        self.refresh(placement, case, poison)
        return placement

    def refresh(self, placement: Placement, case: Case, poison: int = POISON) -> None:
        """Write the inputs of a case of the same shapes, and poison, into an existing placement."""
        for buffer in placement.buffers:
            if buffer.role == "input":
                self._view(buffer)[:] = _bytes(case.inputs[buffer.name], buffer.ctype)
            else:
                self._fill(buffer.start, buffer.start + buffer.size, poison)

    def breach(self, placement: Placement, case: Case) -> str | None:
        """What the call changed without a right to: an input, or bytes outside every buffer; else None."""
        for buffer in placement.buffers:
            if buffer.role != "input":
                continue
            given = _bytes(case.inputs[buffer.name], buffer.ctype)
            if not np.array_equal(self._view(buffer), given):
                changed = np.flatnonzero(self._view(buffer) != given)
                return f"input {buffer.name} was changed: {changed.size} bytes, the first at {changed[0]}"
        for number, (start, end) in enumerate(placement.gaps):
            wanted = self._guard(number, start, end)
            if self._map[start:end] != wanted:
                changed = np.flatnonzero(self._bytes[start:end] != np.frombuffer(wanted, np.uint8))
                return self._outside(placement, start + int(changed[0]))
        return None

    @staticmethod
    def _outside(placement: Placement, at: int) -> str:
        """Describe a changed byte outside every buffer by the buffer it is nearest to."""

        def distance(buffer: Buffer) -> int:
            return max(buffer.start - at, at - (buffer.start + buffer.size - 1), 0)

        near = min(placement.buffers, key=distance)
        side = "before" if at < near.start else "past the end of"
        return f"wrote outside its buffers: {distance(near)} bytes {side} {near.name}"

    def outputs(self, placement: Placement) -> dict[str, Array]:
        """Copies of the wanted outputs, by name."""
        return {
            buffer.name: self._view(buffer).copy().view(_DTYPES[buffer.ctype]).reshape(buffer.shape)
            for buffer in placement.buffers
            if buffer.role == "output"
        }

    def workspace(self, placement: Placement) -> Array:
        """A copy of the workspace as bytes, 64-byte aligned at its start in the arena; empty without one."""
        found = [self._view(buffer) for buffer in placement.buffers if buffer.role == "workspace"]
        return found[0].copy() if found else np.empty(0, np.uint8)

    def _view(self, buffer: Buffer) -> Array:
        return self._bytes[buffer.start : buffer.start + buffer.size]

    def _fill(self, start: int, end: int, word: int) -> None:
        """The word's bytes repeat by absolute address; `start` and the arena's size are multiples of four."""
        whole = end // 4 * 4
        self._words[start // 4 : whole // 4] = word
        self._map[whole:end] = word.to_bytes(4, "little")[: end - whole]

    def guard_bytes(self, placement: Placement) -> Array:
        """What the gaps of a placement hold, one after the other."""
        gaps = (self._guard(number, *gap) for number, gap in enumerate(placement.gaps))
        return np.frombuffer(b"".join(gaps), np.uint8)

    def _guard(self, number: int, start: int, end: int) -> bytes:
        """What gap `number` of a placement holds. Bytes repeat by address, and no gap crosses a page."""
        return self._guards[number % _GUARD_WORDS][start % GUARD :][: end - start]

    def strayed(self, placement: Placement, found: Array) -> str | None:
        """As `breach`, for the gaps of a placement elsewhere: `found` is what they hold, in one row."""
        changed = np.flatnonzero(found != self.guard_bytes(placement))
        if not changed.size:
            return None
        left = int(changed[0])
        for start, end in placement.gaps:
            if left < end - start:
                break
            left -= end - start
        return self._outside(placement, start + left)

    def write(self, at: int, array: Array) -> int:
        """Copy an array's bytes to `at`; where the next may start, 64-byte aligned. Raises StudyError."""
        data = _flat(array)
        if at + data.size > self.size:
            raise StudyError(f"{at + data.size >> 20} MiB do not fit into {self.size >> 20}: raise arena_mib")
        self._bytes[at : at + data.size] = data
        return _up(at + data.size, ALIGN)

    def read(self, at: int, size: int) -> Array:
        """A copy of bytes [at, at + size)."""
        return self._bytes[at : at + size].copy()

    def close(self) -> None:
        """Unmap and close; the memory is freed once the runner is gone. May be called twice."""
        if self.fd >= 0:
            del self._bytes, self._words
            self._map.close()
            os.close(self.fd)
            self.fd = -1


def _guards() -> list[bytes]:
    """Pages, each full of one word."""
    words = nan_words(np.random.default_rng(), _GUARD_WORDS)
    return [word.to_bytes(4, "little") * (GUARD // 4) for word in words]


def _bytes(array: Array | None, ctype: str) -> Array:
    """The elements as the signature declares them, flat: cu_seqlens is int32 on a GPU. Seldom a copy."""
    if array is None:
        raise ValueError("a placed input is missing from the case")
    return np.ascontiguousarray(array, dtype=_DTYPES[ctype]).reshape(-1).view(np.uint8)


def _flat(array: Array) -> Array:
    """The bytes of an array, without a copy when it is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def unwritten(outputs: Mapping[str, Array], poison: int = POISON) -> str | None:
    """Which output still holds poison and in how many elements; None when all were written."""
    for name, array in outputs.items():
        left = int(_holds(_elements(array), poison).sum())
        if left:
            return f"{left} of {array.size} elements of {name} were never written"
    return None


def changed_bits(
    first: Mapping[str, Array], second: Mapping[str, Array], poisons: tuple[int, int] = (POISON, POISON)
) -> str | None:
    """Where two sets of outputs differ in any bit; None when they are equal.

    `poisons` are the words the buffers of the two calls started with. An element that holds its poison in
    both was written in neither, as rows of no sequence may be: whether it should have been, the truth says.
    """
    for name in first:
        one, two = (_elements(outputs[name]) for outputs in (first, second))
        changed = one != two
        if changed.any():
            changed &= ~(_holds(one, poisons[0]) & _holds(two, poisons[1]))
        differs = np.flatnonzero(changed)
        if differs.size:
            return f"{name} differs between two equal calls, first at element {differs[0]}"
    return None


def _elements(array: Array) -> Array:
    """As unsigned integers of their size, flat: bits are compared 20 times as fast as bytes of bytes."""
    return _flat(array).view(f"<u{array.dtype.itemsize}")


def _holds(elements: Array, word: int) -> Array:
    """Which of them, from a multiple of four bytes on, are as `Arena._fill` left them."""
    repeated = word.to_bytes(4, "little") * max(1, elements.itemsize // 4)
    pattern = np.frombuffer(repeated, elements.dtype)
    held = np.empty(elements.size, bool)
    for i, part in enumerate(pattern):
        held[i :: pattern.size] = elements[i :: pattern.size] == part
    return held
