"""One owner per GPU: a lock file that says who holds it.

The lock is the kernel's (flock), so it ends with its owner whatever becomes of that; the text inside, renewed
while the owner lives, is for whoever finds the GPU taken.
"""

import fcntl
import json
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from evotune.errors import DeviceError

_VALID_S = 120.0
_PROC = Path("/proc/driver/nvidia/gpus")


@dataclass(frozen=True)
class Gpu:
    """One GPU as the driver numbers it: `minor` is that of its device node, /dev/nvidia<minor>."""

    name: str
    uuid: str
    minor: int

    @property
    def nodes(self) -> tuple[Path, ...]:
        """Device nodes that a process needs to use this GPU and no other."""
        shared = [Path("/dev/nvidiactl"), Path("/dev/nvidia-uvm"), Path("/dev/nvidia-uvm-tools")]
        return (Path(f"/dev/nvidia{self.minor}"), *(path for path in shared if path.exists()))


def gpus(proc: Path = _PROC, dev: Path = Path("/dev")) -> tuple[Gpu, ...]:
    """In the order of their bus addresses, those of CUDA_VISIBLE_DEVICES alone where that is set.

    Where the driver tells nothing (some virtual machines), the nodes in /dev alone.
    """
    found = [_described(path / "information") for path in sorted(proc.glob("*"))]
    if not found:
        minors = sorted(int(p.name[6:]) for p in dev.glob("nvidia[0-9]*") if p.name[6:].isdigit())
        found = [Gpu("NVIDIA GPU", f"nvidia{minor}", minor) for minor in minors]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return tuple(found)
    wanted = [item.strip() for item in visible.split(",")]
    return tuple(gpu for i, gpu in enumerate(found) if str(i) in wanted or gpu.uuid in wanted)


def _described(path: Path) -> Gpu:
    facts = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
    return Gpu(facts["Model"].strip(), facts["GPU UUID"].strip(), int(facts["Device Minor"]))


class Lease:
    """Holds one GPU from construction to `close` or the end of this process."""

    def __init__(self, gpu: Gpu, folder: Path | None = None) -> None:
        """Raises DeviceError, which names the owner, when the GPU is taken."""
        self.gpu = gpu
        path = (folder or Path(tempfile.gettempdir())) / f"evotune-{gpu.uuid}.lease"
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            raise DeviceError(f"cannot open {path}: {error.strerror}") from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.pread(self._fd, 4096, 0)
            os.close(self._fd)
            self._fd = -1
            raise DeviceError(f"{gpu.name} ({gpu.uuid}) is taken: {_told(owner)}") from error
        self.renew()

    def renew(self) -> None:
        """Say again that the owner lives; at least once in two minutes."""
        now = time.time()
        text = json.dumps({"pid": os.getpid(), "since": now, "until": now + _VALID_S}).encode()
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, text, 0)

    def close(self) -> None:
        """May be called twice. The file stays: removing it would let two processes lock different ones."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def any_free(folder: Path | None = None) -> Lease:
    """Of the first visible GPU that nobody holds. Raises DeviceError."""
    taken = "no NVIDIA GPU is visible"
    for gpu in gpus():
        try:
            return Lease(gpu, folder)
        except DeviceError as error:
            taken = str(error)
    raise DeviceError(taken)


def _told(owner: bytes) -> str:
    try:
        facts = json.loads(owner)
        pid, late_s = int(facts["pid"]), time.time() - float(facts["until"])
    except (ValueError, KeyError, TypeError):
        return "its owner does not say who it is"
    silent = f", which has not been heard of for {late_s + _VALID_S:.0f} s" if late_s > 0 else ""
    return f"process {pid} judges on it{silent}"
