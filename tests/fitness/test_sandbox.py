"""Each wall is tried in earnest, on both levels."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from evotune.errors import SandboxError
from evotune.fitness import cell as walls_module
from evotune.fitness import landlock
from evotune.fitness.sandbox import Cell, Level, Limits, Sandbox, python_paths
from tests.fitness.walls import bubblewrap, landlocked, run_python, without_namespaces


@pytest.fixture(params=["bubblewrap", "landlock"])
def walls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Sandbox:
    return bubblewrap() if request.param == "bubblewrap" else landlocked(monkeypatch, tmp_path)


@pytest.fixture
def scratch(walls: Sandbox) -> Iterator[Path]:
    with walls.scratch() as path:
        yield path


def processes_with(marker: str) -> list[str]:
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            command = Path(f"/proc/{name}/cmdline").read_bytes()
        except OSError:
            continue
        if marker.encode() in command:
            found.append(name)
    return found


def test_command_runs_in_scratch_and_its_files_stay(walls: Sandbox, scratch: Path) -> None:
    (scratch / "given").write_text("in")
    done = walls.run(["sh", "-c", "cat given > made; echo out; echo err >&2; exit 3"], Cell(scratch=scratch))
    assert (done.returncode, done.signal, done.stopped) == (3, None, "")
    assert (done.stdout.text, done.stderr.text) == ("out\n", "err\n")
    assert (scratch / "made").read_text() == "in"


def test_signal_is_told_from_status(walls: Sandbox, scratch: Path) -> None:
    done = walls.run(["sh", "-c", "kill -SEGV $$"], Cell(scratch=scratch))
    assert (done.returncode, done.signal) == (None, 11)


def test_files_outside_cannot_be_read(walls: Sandbox, scratch: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("opensesame")
    for path in (
        secret,
        Path(__file__),
        Path("/etc/passwd"),
        Path.home() / ".bashrc",
        Path("/proc/1/environ"),
    ):
        done = walls.run(["cat", str(path)], Cell(scratch=scratch))
        assert done.returncode == 1, path
        assert done.stdout.size == 0


def test_nothing_outside_scratch_can_be_written(walls: Sandbox, scratch: Path, tmp_path: Path) -> None:
    targets = [tmp_path / "x", Path("/usr/x"), Path("/etc/x"), Path("/x"), Path.home() / "x", Path(__file__)]
    for path in targets:
        done = walls.run(["sh", "-c", f"echo evil >> {path}"], Cell(scratch=scratch))
        assert not done.ok, path
    assert not any(path.exists() for path in targets[:-1])
    assert "evil >>" in Path(__file__).read_text()
    assert not Path(__file__).read_text().endswith("evil\n")


def test_no_socket_and_no_way_to_a_listening_one(walls: Sandbox, scratch: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        source = f"import socket; socket.create_connection(('127.0.0.1', {port}), 2)"
        done = run_python(walls, scratch, source)
        server.settimeout(0.1)
        with pytest.raises(TimeoutError):
            server.accept()
    assert done.returncode == 1
    for family in ("AF_INET", "AF_INET6", "AF_UNIX", "AF_NETLINK"):
        done = run_python(walls, scratch, f"import socket; socket.socket(socket.{family})")
        assert "PermissionError" in done.stderr.text, family


def test_environment_is_not_inherited(walls: Sandbox, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-planted")
    done = walls.run(["env"], Cell(scratch=scratch, environment={"GIVEN": "yes"}))
    names = {line.partition("=")[0] for line in done.stdout.text.splitlines()}
    assert names - {"PWD"} == {"PATH", "LC_ALL", "TMPDIR", "GIVEN"}
    assert "sk-planted" not in done.stdout.text


def test_only_passed_descriptors_are_open(walls: Sandbox, scratch: Path) -> None:
    read_end, write_end = os.pipe()
    source = (
        "import os\nopen_fds = []\n"
        "for n in range(200):\n"
        "    try: os.fstat(n); open_fds.append(n)\n"
        "    except OSError: pass\n"
        "print(open_fds)"
    )
    with os.fdopen(read_end), os.fdopen(write_end, "w"):
        cell = Cell(scratch=scratch, read_only=python_paths(), pass_fds=(write_end,))
        done = walls.run([sys.executable, "-I", "-S", "-c", source], cell)
    assert done.stdout.text == f"[0, 1, 2, {write_end}]\n"


def test_fork_bomb_is_bounded(walls: Sandbox, scratch: Path) -> None:
    bomb = "n=0; while sleep 3 & do n=$((n+1)); echo $n; [ $n -gt 300 ] && break; done"
    done = walls.run(["sh", "-c", bomb], Cell(scratch=scratch, limits=Limits(wall_s=5, processes=32)))
    assert "fork" in done.stderr.text
    assert int(done.stdout.text.split()[-1]) <= 300


def test_process_that_left_its_session_does_not_survive(walls: Sandbox, scratch: Path) -> None:
    marker = f"{os.getpid()}.31415"
    escape = f"(setsid sleep {marker} || sleep {marker}) & (setsid sh -c 'sleep {marker} & :' || :) & "
    done = walls.run(
        ["sh", "-c", f"{escape} sleep {marker}"], Cell(scratch=scratch, limits=Limits(wall_s=0.5))
    )
    assert done.stopped == "wall time"
    assert processes_with(marker) == []
    done = walls.run(["sh", "-c", f"{escape} sleep 0.2"], Cell(scratch=scratch, limits=Limits(wall_s=20)))
    assert done.seconds < 10
    deadline = time.monotonic() + 2
    while processes_with(marker) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert processes_with(marker) == []


def test_hang_ends_at_the_wall_time(walls: Sandbox, scratch: Path) -> None:
    done = walls.run(["sleep", "1000"], Cell(scratch=scratch, limits=Limits(wall_s=0.3)))
    assert done.stopped == "wall time"
    assert 0.3 <= done.seconds < 3


def test_hang_with_closed_streams_ends_at_the_wall_time(walls: Sandbox, scratch: Path) -> None:
    done = walls.run(
        ["sh", "-c", "exec >&- 2>&-; sleep 1000"], Cell(scratch=scratch, limits=Limits(wall_s=0.3))
    )
    assert done.stopped == "wall time"


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_flood_is_cut_and_killed(walls: Sandbox, scratch: Path, stream: str) -> None:
    limits = Limits(wall_s=20, output_bytes=4096, flood_bytes=1 << 20)
    flood = "echo first; exec yes" if stream == "stdout" else "exec >&2; echo first; exec yes"
    done = walls.run(["sh", "-c", flood], Cell(scratch=scratch, limits=limits))
    assert done.stopped == "output"
    assert done.seconds < 10
    output = done.stdout if stream == "stdout" else done.stderr
    assert len(output.head) + len(output.tail) == 4096
    assert output.size < 2 << 20
    assert output.head.startswith(b"first\n")
    assert output.truncated
    assert "bytes left out" in output.text


def test_output_keeps_head_and_tail(walls: Sandbox, scratch: Path) -> None:
    done = walls.run(["seq", "100000"], Cell(scratch=scratch, limits=Limits(output_bytes=100)))
    assert done.ok
    assert done.stdout.head.startswith(b"1\n2\n3\n")
    assert done.stdout.tail.endswith(b"99999\n100000\n")
    assert (len(done.stdout.head), len(done.stdout.tail), done.stdout.size) == (50, 50, 588895)


def test_memory_is_limited(walls: Sandbox, scratch: Path) -> None:
    limits = Limits(wall_s=20, memory_bytes=256 << 20)
    done = run_python(walls, scratch, "x = bytearray(1 << 30)", limits)
    assert "MemoryError" in done.stderr.text


def test_one_file_is_limited(walls: Sandbox, scratch: Path) -> None:
    limits = Limits(wall_s=20, file_bytes=1 << 20)
    done = walls.run(["sh", "-c", "head -c 9000000 /dev/zero > big"], Cell(scratch=scratch, limits=limits))
    assert not done.ok
    assert (scratch / "big").stat().st_size == 1 << 20


def test_many_files_are_limited(walls: Sandbox, scratch: Path) -> None:
    limits = Limits(wall_s=20, scratch_bytes=8 << 20)
    fill = "mkdir d; i=0; while :; do head -c 1000000 /dev/zero > d/$i; i=$((i+1)); sleep 0.02; done"
    done = walls.run(["sh", "-c", fill], Cell(scratch=scratch, limits=limits))
    assert done.stopped == "scratch size"


def test_namespaces_and_tracing_are_refused(walls: Sandbox, scratch: Path) -> None:
    for command in (
        ["unshare", "-Ur", "true"],
        ["unshare", "-m", "true"],
        ["mount", "-t", "tmpfs", "x", "/mnt"],
    ):
        assert not walls.run(command, Cell(scratch=scratch)).ok, command
    trace = "import ctypes; raise SystemExit(ctypes.CDLL(None).ptrace(0, 0, 0, 0) == -1)"
    assert run_python(walls, scratch, trace).returncode == 1


def test_command_that_does_not_exist_is_its_own_failure(walls: Sandbox, scratch: Path) -> None:
    done = walls.run(["no-such-program"], Cell(scratch=scratch))
    assert done.returncode not in (0, None)


def test_scratch_is_removed_even_when_closed_off(walls: Sandbox) -> None:
    with walls.scratch() as path:
        walls.run(["sh", "-c", "mkdir -p a/b; touch a/b/c; chmod 0 a/b a"], Cell(scratch=path))
    assert not path.exists()


def test_child_answers_over_pipes_until_killed(walls: Sandbox, scratch: Path) -> None:
    cell = Cell(scratch=scratch)
    with walls.popen(["cat"], cell, stdin=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        for message in (b"one\n", b"two\n"):
            child.stdin.write(message)
            assert child.stdout.read(4) == message
        assert not child.poll()
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(0.05)
        child.kill()
        assert child.wait() == (None, 9)


def test_child_that_ends_by_itself_tells_how(walls: Sandbox, scratch: Path) -> None:
    with walls.popen(["sh", "-c", "exit 5"], Cell(scratch=scratch)) as child:
        assert child.wait(20) == (5, None)


def test_walls_that_cannot_be_raised_are_an_error() -> None:
    walls = bubblewrap()
    with pytest.raises(SandboxError, match="nonexistent"):
        walls.run(["true"], Cell(read_only=(Path("/nonexistent"),)))


def test_private_tmp_is_sized() -> None:
    walls = bubblewrap()
    limits = Limits(wall_s=20, temporary_bytes=1 << 20)
    done = walls.run(["sh", "-c", "head -c 9000000 /dev/zero > /tmp/big"], Cell(limits=limits))
    assert "No space left" in done.stderr.text


def test_other_processes_are_invisible() -> None:
    done = bubblewrap().run(["sh", "-c", "ls /proc | grep -c '^[0-9]'"], Cell())
    assert int(done.stdout.text) <= 6


def test_bubblewrap_level_needs_no_mend() -> None:
    description = bubblewrap().describe()
    assert description.level is Level.BUBBLEWRAP
    assert description.mend == ""


def test_landlock_level_says_what_is_weaker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    description = landlocked(monkeypatch, tmp_path).describe()
    assert "Creating new namespace failed" in description.detail
    assert len(description.weaker) >= 3
    assert "bubblewrap" in description.mend


def test_machine_without_walls_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    without_namespaces(monkeypatch, tmp_path)
    monkeypatch.setattr(landlock, "abi", lambda: 0)
    with pytest.raises(
        SandboxError, match=r"Creating new namespace failed.*no Landlock.*apt install bubblewrap"
    ):
        Sandbox.detect()
    accepted = Sandbox.detect(unsafe=True)
    assert accepted.level is Level.NONE
    assert "whatever the user can" in accepted.describe().weaker[0]
    with accepted.scratch() as scratch:
        assert accepted.run(["touch", "x"], Cell(scratch=scratch)).ok


def test_machine_without_bwrap_is_told_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walls_module, "find_bwrap", lambda: None)
    monkeypatch.setattr(landlock, "abi", lambda: 0)
    with pytest.raises(SandboxError, match="bwrap is not installed"):
        Sandbox.detect()


def test_a_hidden_file_is_empty_inside() -> None:
    found = next(
        path for path in Path("/usr/lib").rglob("*.so.*") if path.is_file() and not path.is_symlink()
    )
    command = ["cat", str(found)]
    assert bubblewrap().run(command, Cell()).stdout.text
    assert not bubblewrap().run(command, Cell(hidden=(found,))).stdout.text
