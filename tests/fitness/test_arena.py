"""Layout, guards and poison of the shared arena, without any process."""

import time
from collections.abc import Iterator
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from evotune.errors import StudyError
from evotune.fitness.arena import ALIGN, GUARD, POISON, Arena, Flush, changed_bits, nan_word, unwritten
from tests.fitness.compiled import SIGNATURE
from tests.rmsnorm import RMS_OPERATOR, RmsWorkload

CASE = RMS_OPERATOR.solve(RmsWorkload(rows=3, D=20), 1)


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(1 << 20)
    yield arena
    arena.close()


@pytest.mark.parametrize("flush", ["end", "start"])
def test_buffers_are_aligned_apart_and_inside_guards(arena: Arena, flush: Flush) -> None:
    placement = arena.place(SIGNATURE, CASE, begin=3 * GUARD, workspace_bytes=12, flush=flush)
    assert [buffer.name for buffer in placement.buffers] == ["x", "weight", "y", "workspace"]
    covered = sorted([*placement.gaps, *((b.start, b.start + b.size) for b in placement.buffers)])
    assert covered[0][0] == placement.begin == 3 * GUARD
    assert covered[-1][1] == placement.end
    assert all(left[1] == right[0] for left, right in zip(covered, covered[1:], strict=False))
    for buffer in placement.buffers:
        assert buffer.start % ALIGN == 0
        fence_above = min(begin for begin, _ in placement.fences if begin >= buffer.start + buffer.size)
        fence_below = max(end for _, end in placement.fences if end <= buffer.start)
        assert (
            buffer.start == fence_below
            if flush == "start"
            else fence_above - buffer.start - buffer.size < ALIGN
        )


@pytest.mark.parametrize("side", ["before", "past the end of"])
def test_one_byte_outside_a_buffer_is_seen(arena: Arena, side: str) -> None:
    placement = arena.place(SIGNATURE, CASE, workspace_bytes=12)
    y = placement.buffers[2]
    assert arena.breach(placement, CASE) is None
    at = y.start - 1 if side == "before" else y.start + y.size
    arena._bytes[at] ^= 1
    assert arena.breach(placement, CASE) == f"wrote outside its buffers: 1 bytes {side} y"


def test_a_changed_input_is_seen(arena: Arena) -> None:
    placement = arena.place(SIGNATURE, CASE, workspace_bytes=12)
    arena._bytes[placement.buffers[0].start + 5] ^= 0x80
    assert arena.breach(placement, CASE) == "input x was changed: 1 bytes, the first at 5"


def test_outputs_start_as_nan_and_poison_is_counted(arena: Arena) -> None:
    placement = arena.place(SIGNATURE, CASE, workspace_bytes=12)
    assert np.isnan(arena.outputs(placement)["y"]).all()
    assert unwritten(arena.outputs(placement)) == "60 of 60 elements of y were never written"
    y = placement.buffers[2]
    arena._bytes[y.start : y.start + y.size - 4] = 0
    assert unwritten(arena.outputs(placement)) == "1 of 60 elements of y were never written"


def test_no_two_neighbouring_gaps_hold_the_same_word(arena: Arena) -> None:
    """Else copying a guard onto the next one would leave no trace."""
    placement = arena.place(SIGNATURE, CASE, workspace_bytes=12)
    words = [arena._bytes[start : start + 4].tobytes() for start, _ in placement.fences]
    assert len(set(words)) > 1


def test_the_guard_word_is_nan_in_both_types() -> None:
    for word in [POISON, *(nan_word(np.random.default_rng(seed)) for seed in range(100))]:
        assert np.isnan(np.array([word], np.uint32).view(np.float32)).all()
        halves = np.array([word], np.uint32).view(np.uint16).astype(np.uint32) << 16
        assert np.isnan(halves.view(np.float32)).all()


@pytest.mark.parametrize("kept", [0, GUARD, 16 << 20])
def test_a_wiped_arena_is_zero_beyond_its_placements_too(
    arena: Arena, monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    monkeypatch.setattr("evotune.fitness.arena._KEPT_BYTES", kept)
    for _ in range(2):
        placement = arena.place(SIGNATURE, CASE, begin=GUARD, workspace_bytes=12)
        arena._bytes[[0, placement.end, arena.size - 1]] = 7
        arena.wipe()
        assert not arena._bytes.any()
        assert arena.breach(placement, CASE) is not None


def test_an_absent_argument_is_null(arena: Arena) -> None:
    case = replace(CASE, inputs={**CASE.inputs, "weight": None})
    placement = arena.place(SIGNATURE, case, workspace_bytes=12)
    assert placement.words[1] == b"\xff" * 8
    assert [buffer.name for buffer in placement.buffers] == ["x", "y", "workspace"]


def test_an_empty_buffer_has_an_address_between_guards(arena: Arena) -> None:
    placement = arena.place(SIGNATURE, RMS_OPERATOR.solve(RmsWorkload(rows=0, D=20), 1), workspace_bytes=0)
    x = placement.buffers[0]
    assert x.size == 0
    assert any(begin == x.start for begin, _ in placement.fences)


def test_a_case_that_does_not_fit_says_so(arena: Arena) -> None:
    with pytest.raises(StudyError, match="MiB of shared memory"):
        arena.place(SIGNATURE, CASE, workspace_bytes=2 << 20)


def test_changed_bits_sees_a_sign_of_zero() -> None:
    first = {"y": np.zeros(4, np.float32)}
    assert changed_bits(first, {"y": first["y"].copy()}) is None
    assert changed_bits(first, {"y": np.array([0, 0, -0.0, 0], np.float32)}) is not None


def test_large_outputs_are_compared_at_the_speed_of_memory() -> None:
    """A hundred states of four heads are 26 MB; compared byte by byte, one of 17 further calls took 2.1 s."""
    first = {"final_state": np.ones((100, 4, 128, 128), np.float32)}
    second = {name: array.copy() for name, array in first.items()}
    begun = time.thread_time()
    assert changed_bits(first, second) is None
    assert unwritten(first) is None
    assert time.thread_time() - begun < 0.5


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_changed_bits_lets_what_neither_call_wrote_keep_its_poison(dtype: type) -> None:
    """Rows of no sequence: unwritten in both calls is equal; written in one of them is not."""
    word = nan_word(np.random.default_rng(1))
    once, again = (np.full(4, w, np.uint32).view(dtype).copy() for w in (POISON, word))
    assert changed_bits({"y": once}, {"y": again}) is not None
    assert changed_bits({"y": once}, {"y": again}, (POISON, word)) is None
    assert changed_bits({"y": once}, {"y": again}, (word, POISON)) is not None
    once[2] = 1
    assert changed_bits({"y": once}, {"y": again}, (POISON, word)) == (
        "y differs between two equal calls, first at element 2"
    )
