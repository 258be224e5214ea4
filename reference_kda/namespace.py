"""What every numerical function here asks of an array library.

Functions take `xp`, numpy (2.0 or later) or torch, and use only what both have under one name and one
positional meaning: `xp.exp`, `xp.exp2`, `xp.where`, `xp.matmul`, `xp.cumsum(x, axis)`, `xp.zeros(…, dtype=,
device=)`, slicing, integer indexing, in-place arithmetic on views. Arrays are typed `Array` because numpy's
and torch's have no common type.
"""

from typing import Any

import ml_dtypes
import numpy as np

DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}

Array = Any
Namespace = Any


def to_bfloat16(x: Array, xp: Namespace) -> Array:
    """Round to bfloat16 (to nearest, ties to even) and return in the dtype of `x`."""
    if xp is np:
        return x.astype(ml_dtypes.bfloat16).astype(x.dtype)
    return x.to(xp.bfloat16).to(x.dtype)


def to_tfloat32(x: Array, xp: Namespace) -> Array:
    """Round a float32 array to tf32's 11 significant bits, as tensor cores do when they load an operand."""
    integer, real = (np.int32, np.float32) if xp is np else (xp.int32, xp.float32)
    bits = x.view(integer)
    return ((bits + 0x1000) & ~0x1FFF).view(real)
