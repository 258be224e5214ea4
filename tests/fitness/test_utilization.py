"""A GPU's use as the driver tells it, from a driver that is played."""

import ctypes
import time
from typing import Any

import pytest

from evotune.fitness.utilization import Utilization


class Nvml:
    """Knows one GPU; `rate` is its use in percent, None when it does not say."""

    def __init__(self, rate: int | None) -> None:
        self.rate = rate
        self.asked = 0
        self.open = False

    def nvmlInit_v2(self) -> int:  # noqa: N802 - NVML's name, as those below
        self.open = True
        return 0

    def nvmlShutdown(self) -> int:  # noqa: N802
        assert self.open
        self.open = False
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, device: object) -> int:  # noqa: N802
        return 0 if uuid == b"GPU-1" else 6

    def nvmlDeviceGetTotalEccErrors(self, device: object, kind: int, since: int, count: Any) -> int:  # noqa: N802
        assert self.open
        assert (kind, since) == (1, 0)
        if self.rate is None:
            return 3
        count._obj.value = 7
        return 0

    def nvmlDeviceGetUtilizationRates(self, device: object, rates: Any) -> int:  # noqa: N802
        assert self.open
        self.asked += 1
        if self.rate is None:
            return 3
        rates._obj.gpu = self.rate
        return 0


def played(monkeypatch: pytest.MonkeyPatch, rate: int | None, uuid: str) -> tuple[Nvml, Utilization]:
    nvml = Nvml(rate)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: nvml)
    monkeypatch.setattr("evotune.fitness.utilization._EVERY_S", 0.01)
    return nvml, Utilization(uuid)


def asked(nvml: Nvml, times: int) -> None:
    deadline_s = time.monotonic() + 10
    while nvml.asked < times:
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def test_use_is_summed_until_close(monkeypatch: pytest.MonkeyPatch) -> None:
    start_s = time.monotonic()
    nvml, utilization = played(monkeypatch, 50, "GPU-1")
    asked(nvml, 3)
    utilization.close()
    assert utilization.used_s is not None
    assert 0 < utilization.used_s <= 0.5 * (time.monotonic() - start_s)
    assert not nvml.open
    utilization.close()


def test_none_until_the_driver_says(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml, utilization = played(monkeypatch, None, "GPU-1")
    asked(nvml, 2)
    assert utilization.used_s is None
    nvml.rate = 0
    asked(nvml, nvml.asked + 2)
    assert utilization.used_s == 0.0
    utilization.close()


def test_none_for_a_gpu_that_the_driver_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml, utilization = played(monkeypatch, 50, "nvidia0")
    assert utilization.used_s is None
    assert not nvml.open
    utilization.close()
    assert nvml.asked == 0


def test_none_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", absent)
    utilization = Utilization("GPU-1")
    assert utilization.used_s is None
    utilization.close()


@pytest.mark.parametrize(
    ("rate", "uuid", "errors"), [(50, "GPU-1", 7), (None, "GPU-1", None), (50, "GPU-2", None)]
)
def test_errors_of_memory_are_what_the_driver_counts(
    monkeypatch: pytest.MonkeyPatch, rate: int | None, uuid: str, errors: int | None
) -> None:
    _, utilization = played(monkeypatch, rate, uuid)
    assert utilization.memory_errors == errors
    utilization.close()
    assert utilization.memory_errors is None
