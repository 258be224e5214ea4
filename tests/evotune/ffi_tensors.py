"""What a function of TVM FFI is given, as torch's tensors."""

import ctypes
import math
from typing import Any

import torch

_TYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "int32": torch.int32,
    "uint8": torch.uint8,
}


def taken(x: Any) -> Any:
    """An argument of a function of TVM FFI; a tensor as torch's, on the same memory."""
    import tvm_ffi

    if not isinstance(x, tvm_ffi.Tensor):
        return x
    dtype, count = _TYPES[str(x.dtype)], math.prod(x.shape)
    if not count:
        return torch.empty(tuple(x.shape), dtype=dtype)
    room = (ctypes.c_char * (count * dtype.itemsize)).from_address(x.data_ptr())
    return torch.frombuffer(room, dtype=dtype).as_strided(tuple(x.shape), tuple(x.strides))
