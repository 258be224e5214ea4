"""Frames on the processor: what a function of TVM FFI finds in the arguments that a frame wrote."""

import ctypes
import gc
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch")
tvm_ffi = pytest.importorskip("tvm_ffi")

from evotune.dropin_frame import Described, Frame, frame_library  # noqa: E402
from tests.evotune.ffi_tensors import taken  # noqa: E402


def framed(
    function: Callable[..., None],
    tensors: Sequence[Described | None] = (),
    integers: Sequence[int] = (),
    floats: int = 0,
) -> Frame:
    library = frame_library()
    assert library is not None
    called = tvm_ffi.convert(lambda *arguments: function(*map(taken, arguments)))
    return Frame(called, library, tensors, integers, floats, torch.device("cpu"))


def addresses(*tensors: Any) -> list[int]:
    return [x.data_ptr() for x in tensors]


def test_a_function_finds_every_argument() -> None:
    given = [
        torch.randn(3, 4, 5),
        torch.randn(2, 3).bfloat16(),
        torch.arange(4, dtype=torch.int32),
        torch.arange(7, dtype=torch.uint8),
        torch.empty(0, 4, 2),
    ]
    described: list[Described | None] = [(x.shape, x.dtype) for x in given]
    described[0] = (12, 5), torch.float32  # memory in another shape, with no view of it
    described.insert(2, None)
    found: list[Any] = []
    frame = framed(lambda *arguments: found.extend(arguments), described, (3, 2**40), 2)
    assert frame.call(addresses(*given), (0.25, -5.0), 0)
    assert found.pop(2) is None
    assert torch.equal(found[0], given[0].view(12, 5))
    for x, y in zip(found[1:5], given[1:], strict=True):
        assert x.dtype == y.dtype
        assert torch.equal(x, y)
    assert found[5:] == [3, 2**40, 0.25, -5.0]


def test_a_call_has_its_own_addresses_and_numbers() -> None:
    found: list[Any] = []
    frame = framed(lambda x, scale: found.append((x.clone(), scale)), [((2,), torch.float32)], floats=1)
    first, second = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    for x, scale in ((first, 0.5), (second, 0.5), (first, 2.0)):
        assert frame.call(addresses(x), (scale,), 0)
    assert [(x.tolist(), scale) for x, scale in found] == [
        ([1.0, 2.0], 0.5),
        ([3.0, 4.0], 0.5),
        ([1.0, 2.0], 2.0),
    ]


def test_memory_is_written_where_it_lies() -> None:
    x = torch.zeros(4, 2)
    assert framed(lambda x: x.fill_(7.0), [((8,), torch.float32)]).call(addresses(x), (), 0)
    assert torch.equal(x, torch.full((4, 2), 7.0))


def test_a_refusal_leaves_nothing_behind() -> None:
    class Word(str):
        __slots__ = ("__weakref__",)

    reasons: list[Any] = []

    def refuse(x: Any) -> None:
        word = Word("misaligned")
        reasons.append(weakref.ref(word))
        raise ValueError(word)

    x = torch.zeros(2)
    frame = framed(refuse, [((2,), torch.float32)])
    assert not frame.call(addresses(x), (), 0)
    assert not frame.call(addresses(x), (), 0)
    taking = framed(lambda x: None, [((2,), torch.float32)])
    assert taking.call(addresses(x), (), 0)
    gc.collect()
    assert [reason() for reason in reasons] == [None, None]


def test_what_is_no_refusal_is_raised() -> None:
    """A second launch that fails must not be made again: the first one is under way."""
    calls: list[int] = []

    def fail() -> None:
        calls.append(1)
        raise RuntimeError("CUDA Error: out of memory")

    frame = framed(fail)
    with pytest.raises(RuntimeError, match="RuntimeError: CUDA Error: out of memory"):
        frame.call((), (), 0)
    assert len(calls) == 1
    assert framed(lambda: None).call((), (), 0)


def test_the_stream_is_the_calls_own() -> None:
    library = frame_library()
    assert library is not None
    ask = library.TVMFFIEnvGetStream
    ask.argtypes, ask.restype = (ctypes.c_int32, ctypes.c_int32), ctypes.c_void_p
    cpu, found = (1, 0), []
    frame = framed(lambda: found.append(ask(*cpu) or 0))
    assert frame.call((), (), 0x50)
    assert frame.call((), (), 0)
    library.TVMFFIEnvSetStream(*cpu, 0x70, None)
    try:
        assert frame.call((), (), 0x50)
        assert found == [0x50, 0, 0x50]
        assert ask(*cpu) == 0x70
    finally:
        library.TVMFFIEnvSetStream(*cpu, None, None)
    assert (ask(*cpu) or 0) == 0


def test_another_abi_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tvm_ffi, "__version__", "0.2.0")
    assert frame_library.__wrapped__() is None


def test_threads_have_frames_of_their_own() -> None:
    """As the drop-in keeps them: what one fills in, another does not see."""
    wrong: list[float] = []

    def work(value: float) -> None:
        x = torch.full((64,), value)
        frame = framed(
            lambda x, scale: wrong.extend(v for v in (*x.tolist(), scale) if v != value),
            [((64,), torch.float32)],
            floats=1,
        )
        for _ in range(200):
            assert frame.call(addresses(x), (value,), 0)

    threads = [threading.Thread(target=work, args=(float(i),)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
