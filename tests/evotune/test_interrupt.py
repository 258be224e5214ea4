"""kill -9, Ctrl-C, SIGTERM, full disks: processes, not simulations."""

import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from optuna import load_study
from optuna.trial import TrialState

from evotune.history import fold
from evotune.journal import FILE, read
from evotune.trials import storage_at
from tests.evotune.toy import ROOT, call, environment, found, meetings, run_study, setup_of, study_file

KILLS = 20

# Runs and resumes one study in forked children, each killed by its own hand at its n-th fsync (every write to
# the journal and to Optuna's file is followed by one), half of them inside the write before: the points are
# exact and no time is lost on imports.
DRIVER = """
import os, signal, sys
from pathlib import Path
from evotune.errors import StudyError
from evotune.journal import FILE, read
from tests.evotune.toy import run_study, setup_of

study, points = Path(sys.argv[1]), [int(n) for n in sys.argv[2:]]
setup = setup_of(study)
for point in points:
    child = os.fork()
    if child == 0:
        left, sync, write = [point], os.fsync, os.write
        def dying_sync(fd):
            sync(fd)
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        def torn_write(fd, data):
            if left[0] == 1 and point % 2:
                write(fd, data[: len(data) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return write(fd, data)
        os.fsync, os.write = dying_sync, torn_write
        journal = setup.directory / FILE
        run_study(setup, resumed=journal.exists() and len(read(setup.directory).records) > 1)
        os._exit(0)
    print(os.waitpid(child, 0)[1])
"""


def background(*arguments: str | Path, **more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "evotune", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(**more),
        cwd=ROOT,
    )


def wait_for_results(directory: Path, count: int, kind: str = "result") -> None:
    """Until the journal has so many results, or other records."""
    for _ in range(600):
        path = directory / FILE
        if path.exists() and path.read_text(errors="replace").count(f'"kind":"{kind}"') >= count:
            return
        time.sleep(0.05)
    raise AssertionError("the study made no progress")


def test_killed_at_twenty_points_a_study_finds_what_an_unbroken_one_finds(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    whole = run_study(setup_of(study_file(tmp_path / "whole")))
    rng = random.Random(os.environ.get("EVOTUNE_KILL_SEED", "5"))
    points = [1, 2, 3, 5] + [rng.randint(4, 75) for _ in range(KILLS - 4)]
    (tmp_path / "killed").mkdir()
    path = study_file(tmp_path / "killed")
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    done = subprocess.run(
        [sys.executable, str(script), str(path), *map(str, points)],
        capture_output=True,
        text=True,
        env=environment(),
        cwd=ROOT,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    statuses = [int(line) for line in done.stdout.split()]
    assert statuses.count(signal.SIGKILL) >= 15, (statuses, done.stderr)
    assert set(statuses) <= {0, int(signal.SIGKILL)}, done.stderr
    setup = setup_of(path)
    loop = run_study(setup, resumed=True)
    assert found(loop.opened.records) == found(whole.opened.records)
    assert meetings(loop.opened.records) == meetings(whole.opened.records)
    trials = load_study(study_name="toy", storage=storage_at(setup.directory, "")).trials
    assert sum(trial.state in (TrialState.COMPLETE, TrialState.PRUNED) for trial in trials) == 40
    assert not [trial for trial in trials if trial.state == TrialState.RUNNING]
    lost = sum(trial.state == TrialState.FAIL for trial in trials)
    assert lost <= len(points) * setup.config.search.batch


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_finishes_what_is_in_flight(tmp_path: Path, number: signal.Signals) -> None:
    path = study_file(tmp_path)
    process = background("run", path, TOY_DELAY_S="0.1")
    wait_for_results(tmp_path / "toy.study", 2)
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 128 + number, err
    assert "Finishing what is in flight" in err
    assert "Continue with: python -m evotune resume" in err
    assert "Ended because it was interrupted" in out
    history = fold(read(tmp_path / "toy.study").records)
    assert all(entry.judged for entry in history.entries)
    assert len(history.entries) < 40
    done = call("resume", tmp_path / "toy.study", "--json")
    assert done.returncode == 0, done.stderr
    (tmp_path / "whole").mkdir()
    whole = run_study(setup_of(study_file(tmp_path / "whole")))
    assert found(read(tmp_path / "toy.study").records) == found(whole.opened.records)


def test_the_second_signal_stops_now_and_loses_only_what_is_in_flight(tmp_path: Path) -> None:
    path = study_file(tmp_path)
    process = background("run", path, TOY_DELAY_S="1.0")
    wait_for_results(tmp_path / "toy.study", 5, "ask")  # the default's, and a step that is in flight
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    sent = time.monotonic()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130
    assert time.monotonic() - sent < 3  # four candidates of a second each were in flight
    done = call("resume", path, "--trials", "9")
    assert done.returncode == 0, done.stderr
    history = fold(read(tmp_path / "toy.study").records)
    assert len(history.entries) == 9
    assert all(entry.judged for entry in history.entries)


def test_a_study_in_use_names_the_process(tmp_path: Path) -> None:
    path = study_file(tmp_path)
    process = background("run", path, TOY_DELAY_S="0.2")
    wait_for_results(tmp_path / "toy.study", 1)
    second = call("resume", tmp_path / "toy.study")
    process.kill()
    process.communicate()
    assert second.returncode == 2
    assert f"is in use by process {process.pid}" in second.stderr
    assert len(second.stderr.strip().splitlines()) == 1


def test_a_full_disk_is_one_line_and_nothing_recorded_is_lost(tmp_path: Path) -> None:
    path = study_file(tmp_path)
    limit = 60_000  # bytes a file may have: reached by the journals somewhere in the middle
    process = subprocess.run(
        [sys.executable, "-m", "evotune", "run", str(path)],
        capture_output=True,
        text=True,
        env=environment(PYTHONDONTWRITEBYTECODE="1"),
        cwd=ROOT,
        timeout=100,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    assert process.returncode == 2, process.stderr
    last = process.stderr.strip().splitlines()[-1]
    assert "cannot write" in last
    assert "File too large" in last
    assert "Traceback" not in process.stderr
    before = found(read(tmp_path / "toy.study").records)
    judged = [entry for entry in before if entry[3] is not None]
    assert 3 < len(judged) < 40
    assert call("resume", path).returncode == 0
    after = found(read(tmp_path / "toy.study").records)
    assert len(after) == 40
    assert after[: len(judged)] == judged


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    path = study_file(tmp_path)
    (tmp_path / "file").write_text("in the way")
    for place in (tmp_path / "file" / "toy.study", tmp_path / "file", Path("/proc/toy.study")):
        done = call("run", path, "--directory", place)
        assert done.returncode == 2
        assert "cannot write" in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1, done.stderr
