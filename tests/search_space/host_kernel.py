"""Host KDA kernels compiled and called in this process, without the judge between."""

import ctypes
import os
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from evotune.reference_kda.case import KdaCase, Question
from evotune.reference_kda.namespace import DTYPES
from evotune.search_space.template import Specialization, Unit
from evotune.search_space.templates.kda_host import TEMPLATE, KdaHostKnobs

FLAGS = ("-O3", "-march=native", "-fPIC", "-Wall", "-Werror", "-Wno-unused-function")
POINTERS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens")


def spec(K: int = 128, V: int = 128, contract: str = "plain", dtype: str = "float32") -> Specialization:
    return Specialization("kda", dtype, (("K", K), ("V", V), ("contract", contract)))


def compile_unit(unit: Unit, folder: Path, compiler: Sequence[str] = ("gcc",)) -> Path:
    """The unit's object file; compiler warnings are errors. Compiled once per unit and folder.

    The source is the standard input: an object names its source file, and equal code shall be equal bytes.
    """
    stem = folder / sha256(f"{unit.digest}{compiler}".encode()).hexdigest()[:16]
    path = stem.with_suffix(".o")
    if not path.exists():
        defines = [f"-D{name}={value}" for name, value in unit.constants]
        command = [*compiler, *FLAGS, *defines, "-x", "c", "-c", "-", "-o", str(path)]
        done = subprocess.run(command, input=unit.text, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[:4000]
    return path


def compile_all(units: Sequence[Unit], folder: Path) -> list[Path]:
    """Their object files, compiled on all processors."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(lambda unit: compile_unit(unit, folder), units))


@dataclass(frozen=True)
class Answer:
    """Outputs by name, and the workspace the kernel was given."""

    outputs: Mapping[str, npt.NDArray[Any]]
    workspace: npt.NDArray[np.uint8]


class Kernel:
    """A loaded kernel. Outputs and workspace start as NaN bit patterns."""

    def __init__(self, unit: Unit, folder: Path, compiler: Sequence[str] = ("gcc",)) -> None:
        object_path = compile_unit(unit, folder, compiler)
        library = object_path.with_suffix(".so")
        if not library.exists():
            command = [*compiler, "-shared", str(object_path), "-o", str(library), "-lm"]
            subprocess.run(command, check=True, capture_output=True)
        loaded = ctypes.CDLL(str(library))
        self._entry, self._workspace = loaded.kda_forward, loaded.kda_forward_workspace
        self._entry.restype = None
        self._entry.argtypes = [ctypes.c_void_p] * 12 + [ctypes.c_int64] * 4 + [ctypes.c_float] * 2
        self._workspace.restype = ctypes.c_int64
        self._workspace.argtypes = [ctypes.c_int64] * 4

    def workspace_bytes(self, sizes: Mapping[str, int]) -> int:
        return int(self._workspace(*(sizes[name] for name in ("N", "T", "H", "HV"))))

    def __call__(self, question: Question) -> Answer:
        inputs = [question.inputs[name] for name in POINTERS]
        outputs = {
            name: None if wanted is None else _poisoned(wanted[0], DTYPES[wanted[1]])
            for name, wanted in question.outputs.items()
        }
        workspace = _poisoned((self.workspace_bytes(question.sizes),), np.dtype(np.uint8))
        held = [_aligned_copy(x) for x in inputs]
        pointers = [*held, outputs["o"], outputs["final_state"], workspace]
        self._entry(
            *(None if x is None else x.ctypes.data for x in pointers),
            *(question.sizes[name] for name in ("N", "T", "H", "HV")),
            *(question.scalars[name] for name in ("scale", "lower_bound")),
        )
        return Answer({n: x for n, x in outputs.items() if x is not None}, workspace)


def kernel(
    knobs: KdaHostKnobs, case: KdaCase, folder: Path, source: str = "", *, debug: bool = False
) -> Kernel:
    """The template (or `source`, another branch of it) with these knobs, for the case's specialization."""
    w = case.workload
    facts = spec(w.K, w.V, w.contract, w.dtype)
    assert TEMPLATE.why_not(knobs, facts) is None
    return Kernel(TEMPLATE.unit(source or TEMPLATE.source, knobs, facts, debug=debug), folder)


def _poisoned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """64-byte aligned, every byte 0xff: NaN in each floating type."""
    size = int(np.prod(shape)) * dtype.itemsize
    room = np.full(size + 64, 0xFF, np.uint8)
    start = -room.ctypes.data % 64
    return room[start : start + size].view(dtype).reshape(shape)


def _aligned_copy(array: npt.NDArray[Any] | None) -> npt.NDArray[Any] | None:
    if array is None:
        return None
    copy = _poisoned(array.shape, array.dtype)
    copy[...] = array
    return copy
