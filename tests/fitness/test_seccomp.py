"""Filters are installed in throw-away processes, by the recipe a script that cannot import evotune uses."""

import platform
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from evotune.fitness import landlock, seccomp

PRELUDE = f"""
import ctypes, mmap, os, runpy, sys, threading, time
install = runpy.run_path({landlock.__file__!r})["install_filter"]
libc = ctypes.CDLL(None, use_errno=True)
page = libc.mmap; page.restype = ctypes.c_void_p
page.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + 4 * [ctypes.c_int]
install(bytes.fromhex(sys.argv[1]))
"""

pytestmark = pytest.mark.skipif(not seccomp.supported(), reason="no filter for this processor")


def behind(program: bytes, source: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-I", "-S", "-c", PRELUDE + source, program.hex()]
    return subprocess.run(command, input="ab", capture_output=True, text=True, timeout=30)


def test_judge_may_serve_requests() -> None:
    work = """
for _ in range(2):
    byte = os.read(0, 1)
    start = time.perf_counter_ns()
    data = bytearray(50 << 20); data += bytes(1 << 20); del data
    assert libc.madvise(ctypes.c_void_p(page(None, 4096, 3, 0x22, -1, 0)), 4096, 4) == 0
    assert time.perf_counter_ns() > start
    os.write(1, byte)
os._exit(7)
"""
    done = behind(seccomp.judge_filter(), work)
    assert (done.returncode, done.stdout) == (7, "ab")


@pytest.mark.parametrize(
    "forbidden",
    [
        "os.open('/dev/null', 0)",
        "os.fork()",
        "threading.Thread(target=int).start()",
        "os.kill(os.getpid(), 0)",
        "libc.socket(1, 1, 0)",
        "os.execv('/bin/true', ['true'])",
        "page(None, 4096, 7, 0x22, -1, 0)",
        "libc.mprotect(page(None, 4096, 3, 0x22, -1, 0), 4096, 5)",
        "libc.madvise(page(None, 1 << 21, 3, 0x21, -1, 0), 1 << 21, 14)",  # MADV_HUGEPAGE
        "libc.madvise(page(None, 4096, 3, 0x21, -1, 0), 4096, 9)",  # MADV_REMOVE
        "libc.ptrace(0, 0, 0, 0)",
        "libc.syscall(0x40000000 + 39)",
    ],
)
def test_judge_is_killed_for_anything_else(forbidden: str) -> None:
    if "0x4000" in forbidden and platform.machine() != "x86_64":
        pytest.skip("x32 is an x86_64 numbering")
    done = behind(seccomp.judge_filter(), f"{forbidden}\nos.write(1, b'alive')")
    assert done.returncode == -signal.SIGSYS
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("forbidden", "error"),
    [
        ("libc.socket(2, 1, 0)", "EPERM"),
        ("libc.unshare(0x10000000)", "EPERM"),
        ("libc.ptrace(0, 0, 0, 0)", "EPERM"),
        ("libc.syscall(435, 0, 0)", "ENOSYS"),
    ],
)
def test_build_gets_an_error_for_what_it_never_needs(forbidden: str, error: str) -> None:
    source = f"import errno; assert {forbidden} == -1; print(errno.errorcode[ctypes.get_errno()])"
    done = behind(seccomp.build_filter(), source)
    assert done.stdout.strip() == error, done.stderr


def test_build_may_fork_but_not_into_a_namespace() -> None:
    source = """
if os.fork() == 0: os._exit(0)
print(os.wait()[1], libc.syscall({clone}, 0x10000000 | 17, 0, 0, 0, 0))
""".format(clone={"x86_64": 56, "aarch64": 220}[platform.machine()])
    assert behind(seccomp.build_filter(), source).stdout == "0 -1\n"


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_filters_are_whole_programs_within_the_kernel_s_limit(machine: str) -> None:
    for program in (seccomp.build_filter(machine), seccomp.judge_filter(machine)):
        assert len(program) % 8 == 0
        assert len(program) // 8 <= 4096
    assert seccomp.judge_filter("x86_64") != seccomp.judge_filter("aarch64")


@pytest.mark.parametrize(
    ("column", "header"),
    [(0, "/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), (1, "/usr/include/asm-generic/unistd.h")],
)
def test_call_numbers_are_those_of_the_kernel_headers(column: int, header: str) -> None:
    if not Path(header).exists():
        pytest.skip("no kernel headers")
    text = Path(header).read_text()
    known = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", text))
    wrong = {
        name: numbers
        for name, numbers in seccomp._NUMBERS.items()
        if str(numbers[column]) != known.get(name, "None") and name in known
    }
    assert wrong == {}


def test_a_filter_may_let_sockets_be_made() -> None:
    """The GPU's judge needs it; nothing else of the filter changes."""
    strict, lenient = seccomp.build_filter("x86_64"), seccomp.build_filter("x86_64", sockets=True)
    steps = [strict[i : i + 8] for i in range(0, len(strict), 8)]
    kept = [lenient[i : i + 8] for i in range(0, len(lenient), 8)]
    assert len(steps) - len(kept) == 2
    assert [step for step in kept if step not in steps] == []
