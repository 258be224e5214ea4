"""Whether a target's device is on this machine: what `run` asks before it plans to measure."""

import ctypes
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from evotune.errors import DeviceError

_CUDA_SUCCESS = 0


@dataclass(frozen=True)
class Described:
    """A GPU as its driver describes it; `cuda` is the version of CUDA that the driver brings."""

    name: str
    compute_capability: str
    driver: str
    cuda: str


def absent(target: str) -> str | None:
    """One line on why kernels for a target cannot run here, or None when they can.

    Asks the driver, in this process, without making a context: a GPU that is busy still counts as present.
    "sm_90a" needs compute capability 9.0 exactly: code for an arch-specific target runs nowhere else.
    """
    if target == "host":
        return None
    if not target.startswith("sm_"):
        return f"no device for target {target} is known"
    wanted = capability(target)
    if not Path("/dev/nvidiactl").exists():
        return f"this machine has no NVIDIA GPU, and {target} needs one of compute capability {wanted}"
    found = _capabilities()
    if isinstance(found, str):
        return f"the NVIDIA driver does not answer: {found}"
    if wanted not in found:
        names = ", ".join(found) or "none"
        return f"{target} needs a GPU of compute capability {wanted}; visible here: {names}"
    return None


def lacking() -> str | None:
    """One line on the Python package that a judge of GPU kernels lacks here, with the mend; None for none."""
    for module, package in (
        ("torch", "torch"),
        ("tvm_ffi", "apache-tvm-ffi"),
        ("cutlass", "nvidia-cutlass-dsl"),
    ):
        if find_spec(module) is None:
            return f"{package} is not installed, which kernels are judged with: pip install 'evotune[cuda]'"
    return None


def capability(target: str) -> str:
    """ "9.0" for "sm_90a", "10.0" for "sm_100a"."""
    digits = "".join(c for c in target if c.isdigit())
    return f"{digits[:-1]}.{digits[-1]}"


def _capabilities() -> list[str] | str:
    """Of the GPUs that CUDA_VISIBLE_DEVICES shows, or what went wrong."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return str(error)
    status = driver.cuInit(0)
    if status != _CUDA_SUCCESS:
        return f"cuInit says {status}{' (no device is visible)' if status == 100 else ''}"
    count = ctypes.c_int()
    driver.cuDeviceGetCount(ctypes.byref(count))
    found = []
    for device in range(count.value):
        major, minor = ctypes.c_int(), ctypes.c_int()
        driver.cuDeviceGetAttribute(ctypes.byref(major), 75, device)
        driver.cuDeviceGetAttribute(ctypes.byref(minor), 76, device)
        found.append(f"{major.value}.{minor.value}")
    return found


def described(uuid: str) -> Described:
    """The GPU of that UUID; the first one where the UUID is not one of the driver's. Asks NVML, which makes
    no context. Raises DeviceError when it does not answer."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError as error:
        raise DeviceError(f"the NVIDIA driver does not describe its GPU: {error}") from error
    if nvml.nvmlInit_v2():
        raise DeviceError("the NVIDIA driver does not describe its GPU: NVML does not start")
    try:
        device = ctypes.c_void_p()
        if nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(device)):
            nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device))
        major, minor, cuda = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        nvml.nvmlDeviceGetCudaComputeCapability(device, ctypes.byref(major), ctypes.byref(minor))
        nvml.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(cuda))
        name, driver = ctypes.create_string_buffer(96), ctypes.create_string_buffer(80)
        nvml.nvmlDeviceGetName(device, name, len(name))
        nvml.nvmlSystemGetDriverVersion(driver, len(driver))
    finally:
        nvml.nvmlShutdown()
    return Described(
        name=name.value.decode(errors="replace"),
        compute_capability=f"{major.value}.{minor.value}",
        driver=driver.value.decode(errors="replace"),
        cuda=f"{cuda.value // 1000}.{cuda.value % 1000 // 10}",
    )
