"""The runner process: calls, and everything a hostile object may do instead of answering."""

import ctypes
import os
import secrets
import time
from pathlib import Path

import pytest

from evotune.errors import SandboxError
from evotune.fitness import _runner_child as child
from evotune.fitness.outcome import Failure
from evotune.fitness.runner import Fault, Loadable, Runner, kinds
from evotune.fitness.sandbox import Sandbox
from tests.fitness.compiled import ARENA_BYTES, SIGNATURE, WORKLOAD, Bench
from tests.rmsnorm import RMS_OPERATOR, SOURCE, RmsWorkload

CASE = RMS_OPERATOR.solve(RmsWorkload(rows=5), 1)
_HEAD = "float *factors = workspace;"
# Inline assembly: an object that called libc for this would not pass the link step.
_SYSCALL = """
static long raw(long number, long a, long b, long c) {
    long result;
    __asm__ volatile("syscall" : "=a"(result) : "a"(number), "D"(a), "S"(b), "d"(c) : "rcx", "r11", "memory");
    return result;
}
"""


def hostile(statements: str) -> str:
    """The good source with statements at the top of the entry."""
    return SOURCE.replace("// EVOLVE-BEGIN sum", _SYSCALL + "// EVOLVE-BEGIN sum").replace(
        _HEAD, f"{statements} {_HEAD}"
    )


def fault_of(bench: Bench, source: str, timeout_s: float = 5.0, calls: int = 1) -> Fault:
    with bench.runner(source) as runner:
        placement = runner.arena.place(SIGNATURE, CASE, workspace_bytes=64)
        for _ in range(calls - 1):
            runner.call(0, placement, timeout_s)
            time.sleep(0.1)  # until the runner's own answer, to a call that was answered for it, is there
        with pytest.raises(Fault) as caught:
            runner.call(0, placement, timeout_s)
        assert not runner.alive
    return caught.value


def test_a_call_computes_and_its_time_lies_inside_ours(bench: Bench) -> None:
    with bench.runner(SOURCE) as runner:
        placement = runner.arena.place(SIGNATURE, CASE, workspace_bytes=64)
        call = runner.call(0, placement, 5.0)
        assert 0 < call.inside_ns <= call.outside_ns
        assert CASE.worst(runner.arena.outputs(placement)).ratio <= 1
        assert runner.workspace_bytes(0, [5], 5.0) == 20


def test_several_objects_share_one_runner(bench: Bench) -> None:
    doubled = SOURCE.replace("x[d] * factor", "2 * x[d] * factor")
    runner = bench.starter(SOURCE, doubled)()
    placement = runner.arena.place(SIGNATURE, CASE, workspace_bytes=64)
    runner.call(0, placement, 5.0)
    once = runner.arena.outputs(placement)["y"]
    runner.call(1, placement, 5.0)
    assert (runner.arena.outputs(placement)["y"] == 2 * once).all()
    runner.close()


@pytest.mark.parametrize(
    ("statements", "detail"),
    [
        ("*(volatile int *)0 = 1;", "SIGSEGV"),
        ("__builtin_trap();", "SIGILL"),
        ("volatile int64_t none = 0; rows /= none;", "SIGFPE"),
        ("raw(57, 0, 0, 0);", "SIGSYS"),  # fork
        ("raw(41, 2, 1, 0);", "SIGSYS"),  # socket
        ('raw(2, (long)"/etc/passwd", 0, 0);', "SIGSYS"),  # open
        ("raw(62, 1, 9, 0);", "SIGSYS"),  # kill
        ("raw(35, (long)(long[2]){10, 0}, 0, 0);", "SIGSYS"),  # nanosleep
        ("raw(77, 3, 0, 0);", "SIGSYS"),  # ftruncate
        ("raw(231, 3, 0, 0);", "exit status 3"),
    ],
)
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="system call numbers of x86_64")
def test_a_death_is_a_fault_with_its_name(bench: Bench, statements: str, detail: str) -> None:
    fault = fault_of(bench, hostile(statements))
    assert fault.failure is Failure.FAULT
    assert detail in fault.detail


def test_a_hang_is_a_timeout_and_the_process_is_gone(bench: Bench) -> None:
    fault = fault_of(bench, hostile("for (volatile int on = 1; on;) {}"), timeout_s=0.2)
    assert fault.failure is Failure.TIMEOUT


_REPLIES = "int fd = 3; while (fd < 1024) {{ raw(1, fd, (long)forged, {size}); fd++; }}"


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="system call numbers of x86_64")
@pytest.mark.parametrize(
    ("forged", "size", "calls"),
    [
        ("{77, 0, 1}", 24, 1),  # a wrong sequence number
        ("{2, 0, 1}", 24, 2),  # the right one, before the work was done: the true answer comes too late
        ("{2, 0, 1, 9}", 32, 2),  # more than an answer
        ("{2, 5, 1}", 24, 1),  # an unknown status
        ("{2, 0, 1LL << 60}", 24, 1),  # longer than we waited
        ("{2, 0, -1}", 24, 1),
    ],
)
def test_a_forged_answer_is_recognized(
    bench: Bench, forged: str, size: int, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even by a kernel that has guessed the request's number, which is random: here it is 2."""
    monkeypatch.setattr(secrets, "randbits", lambda bits: 0)
    statements = f"static const long long forged[] = {forged}; " + _REPLIES.format(size=size)
    assert fault_of(bench, hostile(statements), calls=calls).failure is Failure.FORGED


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="system call numbers of x86_64")
def test_closing_the_pipe_is_no_answer(bench: Bench) -> None:
    statements = "for (int fd = 3; fd < 1024; fd++) raw(3, fd, 0, 0); for (volatile int on = 1; on;) {}"
    fault = fault_of(bench, hostile(statements), timeout_s=2.0)
    # bubblewrap's own process keeps the pipe open, so from outside it may look like silence.
    assert fault.failure in (Failure.FORGED, Failure.TIMEOUT)


def test_an_object_without_the_entry_is_refused(bench: Bench) -> None:
    with pytest.raises(Fault, match="lacks its entry") as caught:
        bench.starter(SOURCE.replace("void rmsnorm(", "void other("))()
    assert caught.value.failure is Failure.REFUSED


def test_a_file_that_is_no_object_is_refused(bench: Bench, tmp_path: Path) -> None:
    path = tmp_path / "x.so"
    path.write_bytes(b"not ELF")
    with pytest.raises(Fault, match="cannot be loaded"):
        Runner([Loadable(path, "f", kinds(SIGNATURE))], bench.sandbox, arena_bytes=ARENA_BYTES, cpu=None)


def test_a_process_that_never_starts_is_not_the_candidates_fault(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evotune.fitness.runner.sys.executable", "/nonexistent/python")
    with pytest.raises(SandboxError):
        bench.starter(SOURCE)()


def test_nothing_is_left_behind(bench: Bench) -> None:
    before = set(os.listdir("/proc/self/fd"))
    runner = bench.starter(SOURCE)()
    was_alive = runner.alive
    runner.close()
    runner.close()
    assert (was_alive, runner.alive) == (True, False)
    assert set(os.listdir("/proc/self/fd")) == before


def test_the_sandbox_is_real(bench: Bench) -> None:
    assert isinstance(bench.sandbox, Sandbox)
    assert bench.sandbox.level != "none"


def test_fences_turn_a_read_outside_into_a_fault(bench: Bench) -> None:
    source = hostile("volatile float beyond = x[rows * D + 16]; (void)beyond;")
    with bench.runner(source) as runner:
        case = RMS_OPERATOR.solve(RmsWorkload(rows=2, D=WORKLOAD.D), 1)
        placement = runner.arena.place(SIGNATURE, case, workspace_bytes=64)
        runner.call(0, placement, 5.0)
        assert runner.arena.breach(placement, case) is None
        runner.fence(placement)
        with pytest.raises(Fault, match="SIGSEGV"):
            runner.call(0, placement, 5.0)


# Maps a page for itself, as the walls allow, and works only where it finds none of its own.
_REMEMBER = """
    register long flags __asm__("r10") = 0x100022; /* private, anonymous, fixed, not over another */
    register long fd __asm__("r8") = -1;
    register long offset __asm__("r9") = 0;
    long at = 9;
    __asm__ volatile("syscall" : "+a"(at) : "D"(0x7e0000000000L), "S"(4096L), "d"(3L), "r"(flags), "r"(fd),
                     "r"(offset) : "rcx", "r11", "memory");
    if (at < 0) return;
"""


def test_a_renewed_process_remembers_nothing(bench: Bench) -> None:
    with bench.runner(hostile(_REMEMBER)) as runner:

        def ratio() -> float:
            placement = runner.arena.place(SIGNATURE, CASE, workspace_bytes=64)
            runner.call(0, placement, 5.0)
            return CASE.worst(runner.arena.outputs(placement)).ratio

        assert ratio() <= 1
        assert ratio() == float("inf")
        runner.renew()
        assert ratio() <= 1


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="reads the flags of x86_64")
def test_code_of_the_server_lies_in_no_memory_that_a_successor_shares() -> None:
    """Code that a server runs lies in a page of its own, or one server's kernel could write for the next."""
    flags = child._Flags()
    assert flags() == 0
    address = ctypes.addressof(ctypes.c_char.from_buffer(flags.page))
    maps = Path("/proc/self/maps").read_text().splitlines()
    (line,) = (line for line in maps if line.startswith(f"{address:x}-"))
    assert line.split()[1] == "r-xp"


def test_an_end_is_not_an_answer(bench: Bench) -> None:
    """Whoever ends like a server that makes room has still not answered."""
    with bench.runner(hostile("raw(231, 64, 0, 0);")) as runner:  # exit_group with the status of a good end
        placement = runner.arena.place(SIGNATURE, CASE, workspace_bytes=64)
        with pytest.raises(Fault, match="no answer") as caught:
            runner.call(0, placement, 0.3)
        assert caught.value.failure is Failure.TIMEOUT


def test_an_emptied_arena_is_zero_for_both_sides(bench: Bench) -> None:
    with bench.runner(SOURCE) as runner:
        placement = runner.arena.place(SIGNATURE, CASE, workspace_bytes=64)
        runner.call(0, placement, 5.0)
        runner.renew()
        assert not runner.arena.outputs(placement)["y"].any()
        assert runner.arena.breach(placement, CASE) is not None
