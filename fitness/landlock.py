"""Walls for a machine without user namespaces: Landlock, a seccomp filter and resource limits, then exec.

Runs as a script `python -I -S landlock.py SPEC COMMAND…`, and imports the standard library only.
SPEC is JSON: {"read": [paths], "write": [paths], "uid": int or null, "limits": [[resource, value], …],
"seccomp": hex or ""}.

Landlock is a stack of file-system, TCP and (from ABI 6) signal rules that a process puts on itself and can
never take off (Documentation/userspace-api/landlock.rst in Linux).
"""

import ctypes
import json
import os
import resource
import signal
import sys

_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_SECCOMP_MODE_FILTER = 2
# The same numbers on x86_64 and aarch64.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_RULE_PATH_BENEATH = 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_MAKE_CHAR, _MAKE_SOCK, _MAKE_BLOCK = 1 << 6, 1 << 9, 1 << 11
_TRUNCATE = 1 << 14
_READ = _EXECUTE | _READ_FILE | _READ_DIR
# Rights that exist from a given ABI on, by number of bits.
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}


class _Ruleset(ctypes.Structure):
    _fields_ = [
        ("handled_fs", ctypes.c_uint64),
        ("handled_net", ctypes.c_uint64),
        ("scoped", ctypes.c_uint64),
    ]


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"
    _fields_ = [("allowed", ctypes.c_uint64), ("parent_fd", ctypes.c_int32)]


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def abi() -> int:
    """Version of Landlock in this kernel; 0 where it is missing or switched off."""
    return max(0, int(ctypes.CDLL(None, use_errno=True).syscall(_CREATE_RULESET, None, 0, 1)))


def install_filter(program: bytes) -> None:
    """Put a seccomp filter (see `evotune.fitness.seccomp`) on this thread and all it will start, for good.

    Raises OSError when the kernel refuses it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "PR_SET_NO_NEW_PRIVS")
    filters = _Program(len(program) // 8, program)
    if libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(filters)):
        raise OSError(ctypes.get_errno(), "PR_SET_SECCOMP")


def restrict(read: list[str], write: list[str]) -> None:
    """Leave this process the paths named, no TCP and no signal to the outside. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    version = abi()
    every = (1 << _FILE_RIGHTS.get(version, _FILE_RIGHTS[5])) - 1
    rules = _Ruleset(every, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    ruleset = libc.syscall(_CREATE_RULESET, ctypes.byref(rules), size, 0)
    if ruleset < 0:
        raise OSError(ctypes.get_errno(), "landlock_create_ruleset")
    may_write = every & ~(_MAKE_CHAR | _MAKE_SOCK | _MAKE_BLOCK)
    for path, rights in [(path, _READ) for path in read] + [(path, may_write) for path in write]:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        if not os.path.isdir(path):
            rights &= _EXECUTE | _READ_FILE | _WRITE_FILE | _TRUNCATE
        rule = _PathBeneath(rights & every, fd)
        if libc.syscall(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, ctypes.byref(rule), 0):
            raise OSError(ctypes.get_errno(), "landlock_add_rule", path)
        os.close(fd)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.syscall(_RESTRICT_SELF, ruleset, 0):
        raise OSError(ctypes.get_errno(), "landlock_restrict_self")
    os.close(ruleset)


def main() -> None:
    """Raise the walls in the order that each needs, then become the command."""
    spec = json.loads(sys.argv[1])
    for number, value in spec["limits"]:
        resource.setrlimit(number, (value, value))
    if spec["uid"] is not None:
        os.setgroups([])
        os.setresgid(spec["uid"], spec["uid"], spec["uid"])
        os.setresuid(spec["uid"], spec["uid"], spec["uid"])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    restrict(spec["read"], spec["write"])
    if spec["seccomp"]:
        install_filter(bytes.fromhex(spec["seccomp"]))
    # No import and no traceback from here on: the library may lie where this process can no longer read.
    for place in [""] if "/" in sys.argv[2] else os.environ["PATH"].split(":"):
        try:
            os.execv(os.path.join(place, sys.argv[2]), sys.argv[2:])
        except OSError as error:
            problem = error.strerror
    os.write(2, f"{sys.argv[2]}: {problem}\n".encode())
    os._exit(127)


if __name__ == "__main__":
    main()
