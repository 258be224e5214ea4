"""A judge process whose GPU is the processor: `_cuda_child` with host objects called on torch's CPU tensors.

Runs as a script in the sandbox, like `_cuda_child.py` itself. Everything but CUDA is the real thing: frames,
mirror, guards, gathers, digests. A C entry takes int64 cu_seqlens and NULL for what is absent, so both are
made of what a GPU's entry takes.
"""

import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from time import perf_counter_ns, sleep
from types import ModuleType
from typing import Any


def _judge_child() -> ModuleType:
    """The real child's script, which is no package's module where this runs."""
    path = Path(__file__).resolve().parents[2] / "fitness" / "_cuda_child.py"
    spec = spec_from_file_location("_cuda_child", path)
    assert spec is not None
    assert spec.loader is not None
    found = module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


class Processor:
    """Stands in for `_cuda_child.Cuda`."""

    name = "cpu"

    def __init__(self) -> None:
        import torch

        self.torch = torch

    def open(self) -> dict[str, Any]:
        sleep(0.01)
        return {"device": "processor", "l2_bytes": 1 << 20, "memory_bytes": 1 << 30}

    def function(self, path: str, entry: str) -> Callable[..., object]:
        library = ctypes.CDLL(path)
        found = getattr(library, entry)
        found.restype = None

        def call(*arguments: Any) -> None:
            kept = [self._as_c(argument) for argument in arguments]
            found(*(value for value, _ in kept))

        return call

    def _as_c(self, argument: Any) -> tuple[Any, Any]:
        """(ctypes value, what must live as long as it)."""
        if isinstance(argument, self.torch.Tensor):
            if argument.dim() == 4 and not argument.numel():
                return ctypes.c_void_p(None), None
            if argument.dtype == self.torch.int32:
                argument = argument.long()
            return ctypes.c_void_p(argument.data_ptr()), argument
        if isinstance(argument, float):
            return ctypes.c_float(argument), None
        return (ctypes.c_void_p(None) if argument is None else ctypes.c_int64(argument)), None

    def on_stream(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def synchronize(self) -> None:
        """Nothing runs beside the caller."""

    def chill(self) -> None:
        """Caches stay as they are."""

    def sleep(self, us: float) -> None:
        """Nothing waits for a host."""

    def mark(self) -> int:
        return perf_counter_ns()

    def between_us(self, start: int, stop: int) -> float:
        return (stop - start) / 1e3

    def capture(self, work: Callable[[], object]) -> tuple[Callable[[], object], int]:
        return work, 1


if __name__ == "__main__":
    _judge_child().serve(lambda spec: Processor())
