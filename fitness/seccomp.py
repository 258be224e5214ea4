"""Seccomp filters as classic-BPF bytes, for x86_64 and aarch64; see seccomp(2).

Two filters: `build_filter` names what a compiler never needs and lets the rest through; `judge_filter` names
the few calls of a process that serves requests over a pipe, and kills it for any other. Both check the
architecture first and refuse the x32 numbering, which would otherwise rename every call.

A filter is `bytes`, so that a parent can hand it to a script that cannot import evotune. That script installs
it with the recipe of `install` (ctypes and two prctl calls).
"""

import errno
import platform
import struct
from collections.abc import Iterable
from dataclasses import dataclass

from evotune.fitness.landlock import install_filter as install

__all__ = ["build_filter", "install", "judge_filter", "supported"]

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NR_OFFSET, _ARCH_OFFSET, _ARGS_OFFSET = 0, 4, 16
_KILL_PROCESS, _ERRNO, _ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
_PROT_EXEC = 4
_MADV_DONTNEED, _MADV_FREE = 4, 8
_CLONE_NEW = 0x7E020000  # every CLONE_NEW* flag clone(2) takes
_X32_BIT = 0x40000000

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# name: (x86_64, aarch64); None where the architecture lacks the call.
_NUMBERS: dict[str, tuple[int | None, int | None]] = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "bpf": (321, 280),
    "brk": (12, 214),
    "chroot": (161, 51),
    "clock_adjtime": (305, 266),
    "clock_gettime": (228, 113),
    "clock_settime": (227, 112),
    "clone": (56, 220),
    "clone3": (435, 435),
    "close": (3, 57),
    "delete_module": (176, 106),
    "exit": (60, 93),
    "exit_group": (231, 94),
    "fanotify_init": (300, 262),
    "finit_module": (313, 273),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "futex": (202, 98),
    "getcpu": (309, 168),
    "getpid": (39, 172),
    "getrandom": (318, 278),
    "gettid": (186, 178),
    "gettimeofday": (96, 169),
    "init_module": (175, 105),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "ioperm": (173, None),
    "iopl": (172, None),
    "kcmp": (312, 272),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "lseek": (8, 62),
    "madvise": (28, 233),
    "memfd_secret": (447, 447),
    "mmap": (9, 222),
    "modify_ldt": (154, None),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "mprotect": (10, 226),
    "mremap": (25, 216),
    "munmap": (11, 215),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "personality": (135, 92),
    "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41),
    "poll": (7, None),
    "ppoll": (271, 73),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "quotactl": (179, 60),
    "read": (0, 63),
    "readv": (19, 65),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "restart_syscall": (219, 128),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "sched_yield": (24, 124),
    "setns": (308, 268),
    "setpgid": (109, 154),
    "setsid": (112, 157),
    "settimeofday": (164, 170),
    "socket": (41, 198),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
    "write": (1, 64),
    "writev": (20, 66),
}

_NEVER_BUILDING = (
    *("socket", "ptrace", "process_vm_readv", "process_vm_writev", "kcmp", "pidfd_getfd"),
    *("unshare", "setns", "mount", "umount2", "pivot_root", "chroot", "open_tree", "move_mount", "fsopen"),
    *("fsconfig", "fsmount", "fspick", "mount_setattr", "name_to_handle_at", "open_by_handle_at"),
    *("keyctl", "add_key", "request_key", "bpf", "perf_event_open", "userfaultfd", "fanotify_init"),
    *("io_uring_setup", "io_uring_enter", "io_uring_register", "memfd_secret", "personality", "modify_ldt"),
    *("init_module", "finit_module", "delete_module", "kexec_load", "reboot", "swapon", "swapoff", "acct"),
    *("quotactl", "syslog", "iopl", "ioperm", "settimeofday", "clock_settime", "clock_adjtime"),
)
# setsid and setpgid are closed only where no pid namespace ends a process that left its group.
_KEEPS_ITS_GROUP = ("setsid", "setpgid")
_SERVING = (
    *("read", "write", "readv", "writev", "lseek", "close", "poll", "ppoll", "exit", "exit_group"),
    *("futex", "sched_yield", "restart_syscall", "rt_sigreturn", "rt_sigprocmask", "getrandom"),
    *("clock_gettime", "gettimeofday", "getcpu", "getpid", "gettid", "brk", "munmap", "mremap"),
)


def supported() -> bool:
    """Whether this machine's system calls are known here."""
    return platform.machine() in _AUDIT_ARCH


@dataclass(frozen=True)
class _Numbers:
    """Call numbers of one architecture."""

    machine: str

    def of(self, names: Iterable[str]) -> list[int]:
        column = list(_AUDIT_ARCH).index(self.machine)
        return [number for name in names if (number := _NUMBERS[name][column]) is not None]


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _prologue(machine: str, foreign: int) -> bytes:
    """Load the call's number; `foreign` is returned for another architecture or numbering."""
    program = _instruction(_LOAD, _ARCH_OFFSET)
    program += _instruction(_EQUAL, _AUDIT_ARCH[machine], 1, 0) + _instruction(_RETURN, foreign)
    program += _instruction(_LOAD, _NR_OFFSET)
    if machine == "x86_64":
        program += _instruction(_AT_LEAST, _X32_BIT, 0, 1) + _instruction(_RETURN, foreign)
    return program


def _decide(number: int, action: int) -> bytes:
    return _instruction(_EQUAL, number, 0, 1) + _instruction(_RETURN, action)


def _decide_by_bits(number: int, argument: int, bits: int, if_set: int, if_clear: int) -> bytes:
    """Return one of two actions by the low 32 bits of an argument (little endian on both machines)."""
    body = _instruction(_LOAD, _ARGS_OFFSET + 8 * argument)
    body += (
        _instruction(_ANY_BIT, bits, 0, 1) + _instruction(_RETURN, if_set) + _instruction(_RETURN, if_clear)
    )
    return _instruction(_EQUAL, number, 0, len(body) // 8) + body


def _decide_by_value(number: int, argument: int, values: Iterable[int], otherwise: int) -> bytes:
    """Allow a call where the low 32 bits of an argument are one of the values."""
    body = _instruction(_LOAD, _ARGS_OFFSET + 8 * argument)
    for value in values:
        body += _decide(value, _ALLOW)
    body += _instruction(_RETURN, otherwise)
    return _instruction(_EQUAL, number, 0, len(body) // 8) + body


def build_filter(machine: str | None = None, *, keep_group: bool = False, sockets: bool = False) -> bytes:
    """For compilers: forbidden calls answer EPERM, so a program that tries one degrades instead of dying.

    `clone3` answers ENOSYS because its flags lie behind a pointer a filter cannot read; libc then falls back
    to `clone`, whose namespace flags are refused. `keep_group` also refuses to leave the process group.
    `sockets` lets them be made, for programs that do not work without: in a network namespace of its own a
    process reaches nobody with them.
    """
    numbers = _Numbers(machine or platform.machine())
    denied = _ERRNO | errno.EPERM
    program = _prologue(numbers.machine, denied)
    never = _NEVER_BUILDING + (_KEEPS_ITS_GROUP if keep_group else ())
    for number in numbers.of(name for name in never if not (sockets and name == "socket")):
        program += _decide(number, denied)
    for number in numbers.of(["clone3"]):
        program += _decide(number, _ERRNO | errno.ENOSYS)
    for number in numbers.of(["clone"]):
        program += _decide_by_bits(number, 0, _CLONE_NEW, denied, _ALLOW)
    return program + _instruction(_RETURN, _ALLOW)


def judge_filter(machine: str | None = None) -> bytes:
    """For the process that calls a candidate, put on once its object is loaded: pipes, memory, time, exit.

    Memory may be mapped or re-protected but never executable, and given back, as malloc does, but not made
    huge, kept from a fork or taken out of the arena. Anything else kills the whole process (SIGSYS): opening
    a file, starting a thread, sending a signal.
    """
    numbers = _Numbers(machine or platform.machine())
    program = _prologue(numbers.machine, _KILL_PROCESS)
    for number in numbers.of(_SERVING):
        program += _decide(number, _ALLOW)
    for number in numbers.of(["mmap", "mprotect"]):
        program += _decide_by_bits(number, 2, _PROT_EXEC, _KILL_PROCESS, _ALLOW)
    for number in numbers.of(["madvise"]):
        program += _decide_by_value(number, 2, (_MADV_DONTNEED, _MADV_FREE), _KILL_PROCESS)
    return program + _instruction(_RETURN, _KILL_PROCESS)
