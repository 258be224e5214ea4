"""What the driver says of a GPU: errors of its memory, and its use as nvidia-smi shows it, a second opinion
beside the judge's own clock.

The driver counts a GPU as used while any kernel is on it, one that only waits for the host included.
"""

import ctypes
import threading
import time

_EVERY_S = 0.1
_UNCORRECTED, _SINCE_LOADED = 1, 0  # nvmlMemoryErrorType_t, nvmlEccCounterType_t


class _Rates(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class Utilization:
    """Asks NVML ten times a second in a thread, where the driver has it and knows the GPU."""

    def __init__(self, uuid: str) -> None:
        self._used_s: float | None = None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        try:
            self._nvml = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            return
        if self._nvml.nvmlInit_v2():
            return
        self._device = ctypes.c_void_p()
        if self._nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(self._device)):
            self._nvml.nvmlShutdown()
            return
        self._thread = threading.Thread(target=self._watch, name="utilization", daemon=True)
        self._thread.start()

    @property
    def used_s(self) -> float | None:
        """Seconds of use since construction; None as long as the driver never said."""
        return self._used_s

    @property
    def memory_errors(self) -> int | None:
        """Errors that ECC could not correct, since the driver was loaded; None where it does not say."""
        if self._thread is None or self._ended.is_set():
            return None
        count = ctypes.c_ulonglong()
        failed = self._nvml.nvmlDeviceGetTotalEccErrors(
            self._device, _UNCORRECTED, _SINCE_LOADED, ctypes.byref(count)
        )
        return None if failed else count.value

    def close(self) -> None:
        """Ask no more. May be called twice."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        rates, before_s = _Rates(), time.monotonic()
        while not self._ended.wait(_EVERY_S):
            failed = self._nvml.nvmlDeviceGetUtilizationRates(self._device, ctypes.byref(rates))
            now_s = time.monotonic()
            if not failed:
                self._used_s = (self._used_s or 0.0) + rates.gpu / 100 * (now_s - before_s)
            before_s = now_s
        self._nvml.nvmlShutdown()
