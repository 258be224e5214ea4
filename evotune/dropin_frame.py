"""Calls of a TVM FFI function on tensors whose shapes, types and device are known before the call.

The Python layer of TVM FFI takes torch tensors of the shapes that a function declares, and to look at a
tensor in another shape costs torch 0.5 to 1 us, for each. A `Frame` is the arguments of a call written down
once in the C ABI (`tvm/ffi/c_api.h`: TVMFFIAny; `dlpack.h`: DLTensor), of which a call changes the addresses.
"""

import ctypes
from array import array
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate, count
from operator import mul
from struct import pack, unpack
from typing import Any

import torch

_ABI = "0.1."  # of the TVM FFI whose structures these are
_NONE, _INT, _FLOAT, _TENSOR = 0, 1, 3, 7  # TVMFFITypeIndex
_ANY_WORDS, _DESCRIPTOR_WORDS = 2, 6  # of 8 bytes
_CODES = {  # DLDataType: code and bits
    torch.int32: (0, 32),
    torch.uint8: (1, 8),
    torch.float32: (2, 32),
    torch.bfloat16: (4, 16),
}
_DEVICES = {"cpu": 1, "cuda": 2}
_OBJECT_BYTES = 24  # TVMFFIObject, what an error's kind and message lie behind (TVMFFIErrorCell)

Described = tuple[Sequence[int], torch.dtype]
"""Shape and type of a compact tensor."""


class _Text(ctypes.Structure):
    """TVMFFIByteArray."""

    _fields_ = (("data", ctypes.c_void_p), ("size", ctypes.c_size_t))


class Frame:
    """The arguments of one function, for the calls of one thread: nobody else may fill them in between, nor a
    handler of signals in that thread."""

    def __init__(
        self,
        function: Callable[..., object],
        library: ctypes.CDLL,
        tensors: Sequence[Described | None],
        integers: Sequence[int],
        floats: int,
        device: torch.device,
    ) -> None:
        """`function` takes `tensors`, None for an absent one, then `integers`, then so many floats."""
        self._function = function  # keeps what its handle stands for
        self._handle = function.__chandle__()  # type: ignore[attr-defined]
        self._device = _DEVICES[device.type], device.index or 0
        self._call = library.TVMFFIFunctionCall
        self._set_stream = library.TVMFFIEnvSetStream
        self._move_error = library.TVMFFIErrorMoveFromRaised
        self._release = library.TVMFFIObjectDecRef
        self._before, self._result = ctypes.c_void_p(), (ctypes.c_uint64 * _ANY_WORDS)()
        self._before_at, self._result_at = map(ctypes.addressof, (self._before, self._result))
        self._count = len(tensors) + len(integers) + floats
        described = [tensor for tensor in tensors if tensor is not None]
        first = _ANY_WORDS * self._count
        extents = first + _DESCRIPTOR_WORDS * len(described)
        size = extents + 2 * sum(len(shape) for shape, _ in described)
        self._words = array("Q", bytes(8 * size))
        self._begin, _ = self._words.buffer_info()
        self._addresses = memoryview(self._words)[first:extents:_DESCRIPTOR_WORDS]
        self._floats_at = _ANY_WORDS * (self._count - floats)
        self._floats: tuple[float, ...] = ()
        values = [*self._arguments(tensors, integers, floats), *self._descriptors(described, extents)]
        memoryview(self._words)[:] = array("Q", values)

    def _arguments(
        self, tensors: Sequence[Described | None], integers: Sequence[int], floats: int
    ) -> list[int]:
        """A TVMFFIAny each: its type, and a number or where a descriptor lies. A call brings the floats."""
        places = count(self._begin + 8 * _ANY_WORDS * self._count, 8 * _DESCRIPTOR_WORDS)
        values: list[int] = []
        for tensor in tensors:
            values += (_NONE, 0) if tensor is None else (_TENSOR, next(places))
        for integer in integers:
            values += (_INT, integer)
        return values + [_NONE, 0] * floats

    def _descriptors(self, described: Sequence[Described], extents: int) -> list[int]:
        """A DLTensor for each: address, device, rank and type, where shape and strides lie, offset. Behind
        them, from word `extents` on, those shapes and strides."""
        kind, number = self._device
        values: list[int] = []
        for shape, dtype in described:
            rank, (code, bits) = len(shape), _CODES[dtype]
            at = self._begin + 8 * extents
            typed = rank | (code | bits << 8 | 1 << 16) << 32
            values += (0, kind | number << 32, typed, at, at + 8 * rank, 0)
            extents += 2 * rank
        for shape, _ in described:
            values += (*shape, *reversed([*accumulate(reversed(shape[1:]), mul, initial=1)]))
        return values

    def call(self, addresses: Sequence[int], floats: tuple[float, ...], stream: int) -> bool:
        """Call the function on tensors at these addresses, on a stream.

        False when it refused its arguments, before it launched anything; why is for its Python layer to say.
        Raises RuntimeError for whatever else went wrong.
        """
        self._addresses[:] = array("Q", addresses)
        if floats != self._floats:
            for i, value in enumerate(floats):
                at = self._floats_at + _ANY_WORDS * i
                self._words[at : at + _ANY_WORDS] = array("Q", (_FLOAT, *unpack("Q", pack("d", value))))
            self._floats = floats
        kind, number = self._device
        self._set_stream(kind, number, stream, self._before_at)
        try:
            failed = self._call(self._handle, self._begin, self._count, self._result_at)
        finally:
            if (self._before.value or 0) != stream:
                self._set_stream(kind, number, self._before, None)
        return not failed or self._refusal()

    def _refusal(self) -> bool:
        """False for a TypeError or a ValueError. Raises RuntimeError for another one, as `call` does."""
        error = ctypes.c_void_p()
        self._move_error(ctypes.byref(error))
        cell = (_Text * 2).from_address((error.value or 0) + _OBJECT_BYTES)
        kind, message = (ctypes.string_at(text.data, text.size).decode(errors="replace") for text in cell)
        self._release(error)
        if kind not in ("TypeError", "ValueError"):
            raise RuntimeError(f"{kind}: {message}")
        return False


@cache
def frame_library() -> ctypes.CDLL | None:
    """TVM FFI's library, which frames call; None where it is not the one they are made for."""
    try:
        import tvm_ffi
        from tvm_ffi.libinfo import find_libtvm_ffi

        library = ctypes.CDLL(find_libtvm_ffi())
    except (ImportError, OSError, RuntimeError):
        return None
    if not tvm_ffi.__version__.startswith(_ABI):
        return None
    signatures: dict[str, tuple[Any, ...]] = {
        "TVMFFIFunctionCall": (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p),
        "TVMFFIEnvSetStream": (ctypes.c_int32, ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p),
        "TVMFFIErrorMoveFromRaised": (ctypes.c_void_p,),
        "TVMFFIObjectDecRef": (ctypes.c_void_p,),
    }
    for name, arguments in signatures.items():
        function = getattr(library, name, None)
        if function is None:
            return None
        function.argtypes = arguments
    return library
