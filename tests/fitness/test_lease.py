"""Who owns a GPU, and what a second process is told."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from evotune.errors import DeviceError
from evotune.fitness.lease import Gpu, Lease, any_free, gpus

GPU = Gpu("NVIDIA H200", "GPU-1", 3)
INFORMATION = "Model: \t\t NVIDIA H200\nIRQ:   \t\t 1\nGPU UUID: \t GPU-{0}\nDevice Minor: \t {0}\n"


def test_a_taken_gpu_names_its_owner(tmp_path: Path) -> None:
    hold = (
        "import sys, pathlib; from evotune.fitness.lease import Gpu, Lease\n"
        "lease = Lease(Gpu('NVIDIA H200', 'GPU-1', 3), pathlib.Path(sys.argv[1]))\n"
        "print('held', flush=True); sys.stdin.read()"
    )
    root = str(Path(__file__).resolve().parents[2])
    with subprocess.Popen(
        [sys.executable, "-c", hold, str(tmp_path)],
        cwd=root,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "held\n"
        with pytest.raises(DeviceError, match=f"is taken: process {owner.pid} judges on it"):
            Lease(GPU, tmp_path)
        owner.kill()
        owner.wait()
    Lease(GPU, tmp_path).close()  # the kernel let go of it


def test_a_silent_owner_is_told(tmp_path: Path) -> None:
    held = Lease(GPU, tmp_path)
    path = tmp_path / "evotune-GPU-1.lease"
    facts = json.loads(path.read_text())
    path.write_text(json.dumps({**facts, "until": time.time() - 100}))
    with pytest.raises(DeviceError, match="has not been heard of for 2[12]. s"):
        Lease(GPU, tmp_path)
    held.renew()
    assert json.loads(path.read_text())["until"] > time.time() + 100
    held.close()
    held.close()


def test_a_lease_file_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "evotune-GPU-1.lease").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DeviceError, match="cannot open"):
        Lease(GPU, tmp_path)
    assert not (tmp_path / "elsewhere").exists()


def test_gpus_are_those_the_driver_names_and_the_user_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proc, dev = tmp_path / "proc", tmp_path / "dev"
    dev.mkdir()
    for name in ("nvidia1", "nvidia0", "nvidiactl"):
        (dev / name).touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [gpu.minor for gpu in gpus(proc, dev)] == [0, 1]
    for minor in (5, 7):
        (proc / f"0000:0{minor}:00.0").mkdir(parents=True)
        (proc / f"0000:0{minor}:00.0" / "information").write_text(INFORMATION.format(minor))
    assert [gpu.uuid for gpu in gpus(proc, dev)] == ["GPU-5", "GPU-7"]
    assert gpus(proc, dev)[0].nodes[0] == Path("/dev/nvidia5")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert [gpu.uuid for gpu in gpus(proc, dev)] == ["GPU-7"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-5")
    assert [gpu.uuid for gpu in gpus(proc, dev)] == ["GPU-5"]


def test_no_gpu_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("evotune.fitness.lease.gpus", lambda: ())
    with pytest.raises(DeviceError, match="no NVIDIA GPU is visible"):
        any_free(tmp_path)
