"""Exit codes and output of export, verify, diagnose, init and doctor."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from evotune import bundle
from tests.evotune import exports
from tests.evotune.toy import ROOT, call, environment
from tests.search_space.host_kernel import spec

pytestmark = pytest.mark.usefixtures("solved_once")
STUDY = """
[study]
name = "small"
template = "kda_host"
trials = 4

[search]
batch = 4

[timing]
samples = 3

[[workload]]
name = "one"
length = 33
K = 64
V = 64
"""


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished study of real kernels; its directory."""
    folder = tmp_path_factory.mktemp("cli")
    (folder / "small.toml").write_text(STUDY)
    done = call("run", folder / "small.toml")
    assert done.returncode == 0, done.stderr
    return folder / "small.study"


def test_a_study_is_exported_verified_and_diagnosed(study: Path) -> None:
    out = study.parent / "pareto"
    done = call("export", study, "--out", out, "--limit", "1", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["exported"]
    assert (out / "kda.py").exists()

    again = call("export", study.parent / "small.toml", "--out", out)
    assert (again.returncode, again.stdout) == (2, "")
    assert again.stderr.startswith("evotune: ")
    assert again.stderr.count("\n") == 1

    held = call("verify", out, "--json")
    assert held.returncode == 0, held.stderr
    assert json.loads(held.stdout)["held"] is True

    (out / "kernels" / told["exported"][0] / "kernel.c").write_text("changed")
    broken = call("verify", out)
    assert broken.returncode == 1
    assert "sha256" in broken.stderr

    right = call("diagnose", "0", study, "--json")
    assert right.returncode == 0, right.stderr
    assert json.loads(right.stdout)["held"] is True


@pytest.mark.parametrize(
    ("build", "cache", "message"),
    [
        ('compiler = "no-such-cc"', "cache", "the compiler 'no-such-cc' was not found: install gcc"),
        ('compiler = "false"', "cache", "does not"),
        ("workers = 1", "file", "built objects cannot be kept in"),
    ],
)
def test_what_cannot_build_is_one_line(tmp_path: Path, build: str, cache: str, message: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "small.toml").write_text(f"{STUDY}\n[build]\n{build}\n")
    for more in ((), ("--dry-run",)) if cache == "cache" else ((),):
        command = [sys.executable, "-m", "evotune", "run", str(tmp_path / "small.toml"), *more]
        surroundings = environment(XDG_CACHE_HOME=str(tmp_path / cache))
        done = subprocess.run(command, cwd=ROOT, env=surroundings, capture_output=True, text=True)
        lines = done.stderr.strip().splitlines()
        assert (done.returncode, len(lines)) == (2, 1), done.stderr
        assert message in lines[0]
        assert not (tmp_path / "small.study" / "journal.jsonl").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_an_export_leaves_nothing(study: Path, tmp_path: Path, number: int) -> None:
    (tmp_path / "scratch").mkdir()
    command = [sys.executable, "-m", "evotune", "export", str(study), "--out", str(tmp_path / "pareto")]
    surroundings = environment(TMPDIR=str(tmp_path / "scratch"))
    with subprocess.Popen(command, cwd=ROOT, env=surroundings, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 60
        while not list((tmp_path / "scratch").glob("evotune-export-*/*/*/kernel.o")):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(number)
        _, told = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert "Traceback" not in told
    assert [path.name for path in tmp_path.rglob("*")] == ["scratch"]


def test_verify_of_what_is_no_export_is_exit_2(tmp_path: Path) -> None:
    kernel = exports.kernel("k", (spec(64, 64),), tmp_path)
    bundle.write(tmp_path / "out", exports.index([kernel], []), [kernel])
    (tmp_path / "out" / "manifest.json").write_text("{}")
    for directory in (tmp_path / "out", tmp_path / "none"):
        done = call("verify", directory)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.count("\n") == 1


def test_diagnose_and_export_of_what_is_not_there_are_exit_2(study: Path, tmp_path: Path) -> None:
    assert call("diagnose", "99", study).returncode == 2
    assert call("diagnose", "0", study, "--source", tmp_path / "none.c").returncode == 2
    assert call("export", tmp_path / "none").returncode == 2
    assert call("export", study, "--out", tmp_path / "no" / "such").returncode == 2


def test_init_then_doctor(tmp_path: Path) -> None:
    first, second = call("init", tmp_path), call("init", tmp_path)
    assert (first.returncode, second.returncode) == (0, 2)
    assert "python -m evotune run" in first.stdout
    assert "exists and is kept" in second.stderr
    done = call("doctor", "--json")
    assert done.returncode == 0, done.stdout
    assert {check["name"] for check in json.loads(done.stdout)} >= {"sandbox", "compiler", "GPU"}
    assert "sandbox" in call("doctor").stdout
