"""The parent's side of a judged kernel: a disposable sandboxed process, and calls into it.

Frames over two pipes, little endian. Request: sequence u64, operation u16, object u16, count u32, then
`count` 8-byte words. Reply: sequence u64, status i64, value i64; nothing else may follow it. Buffers travel
in the shared arena. The runner's own standard streams lead nowhere.

What the runner says is data about a hostile process. A death, a silence, a reply out of order, too long, or
with a time longer than the parent waited, is a `Fault`: the caller turns it into `Failed` and starts
another runner. Both clocks are CLOCK_MONOTONIC, so an honest runner's time lies inside the parent's; how
far a runner may understate is `timing.py`'s business, which knows the baseline's overhead.
"""

import fcntl
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from evotune.errors import SandboxError
from evotune.fitness import _runner_child as child
from evotune.fitness.arena import Arena, Placement
from evotune.fitness.operator import Parameter
from evotune.fitness.outcome import Failure
from evotune.fitness.sandbox import Cell, Child, Limits, Sandbox, python_paths
from evotune.fitness.seccomp import judge_filter, supported

_NOT_OURS = "gave an answer that the runner's own code does not give"
_KINDS = {"input": "p", "output": "p", "workspace": "p", "size": "i", "scalar": "f"}
_START_TIMEOUT_S = 20.0
_SCRIPT = Path(child.__file__).resolve()


class Fault(Exception):
    """The runner misbehaved. Never leaves the package: whoever judges turns it into `Failed`."""

    def __init__(self, failure: Failure, detail: str) -> None:
        super().__init__(detail)
        self.failure = failure
        self.detail = detail


@dataclass(frozen=True)
class Loadable:
    """A linked object and how to call it. `kinds` has one letter per argument, see `kinds`."""

    path: Path
    entry: str
    kinds: str


@dataclass(frozen=True)
class Call:
    """One answered call: nanoseconds by the runner's clock, and as the parent waited."""

    inside_ns: int
    outside_ns: int


def kinds(signature: Sequence[Parameter]) -> str:
    """p for a pointer, i for an int64, f for a float."""
    return "".join(_KINDS[parameter.role] for parameter in signature)


def timing_cpu() -> int | None:
    """The CPU that runners are pinned to, the last one allowed; None where there is only one to share."""
    allowed = sorted(os.sched_getaffinity(0))
    return allowed[-1] if len(allowed) > 1 else None


class Worker:
    """A sandboxed process that shares an arena and answers requests. Dies by `close` or its own fault."""

    def __init__(self, arena_bytes: int) -> None:
        """Raises OSError when the system gives no memory."""
        self.arena = Arena(arena_bytes)
        self._process: Child | None = None
        self._replies = self._requests = -1

    @property
    def alive(self) -> bool:
        return self._process is not None and not self._process.poll()

    def _ask(self, operation: int, index: int, words: bytes, timeout_s: float) -> int:
        sequence = 2 + secrets.randbits(63)  # a kernel that answers for the runner cannot know it
        if _waiting(self._replies):
            self.close()
            raise Fault(Failure.FORGED, _NOT_OURS)
        self._send(sequence, operation, index, words)
        status, value = self._reply(sequence, timeout_s)
        if status != child.OK:
            fault = self._refusal(status, value)
            self.close()
            raise fault
        return value

    def _send(self, sequence: int, operation: int, index: int, words: bytes) -> None:
        with suppress(BrokenPipeError):
            os.write(self._requests, child.REQUEST.pack(sequence, operation, index, len(words) // 8) + words)

    def _refusal(self, status: int, value: int) -> Fault:
        """What a status other than OK means."""
        return Fault(Failure.FORGED, f"answered with status {status}")

    def _reply(self, sequence: int, timeout_s: float) -> tuple[int, int]:
        """(status, value) of the reply expected next; ends the process and raises Fault for anything else."""
        deadline = time.monotonic() + timeout_s
        data = b""
        while len(data) < child.REPLY.size:
            ready, _, _ = select.select([self._replies], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                self.close()
                raise Fault(Failure.TIMEOUT, f"no answer within {timeout_s:g} s")
            piece = os.read(self._replies, child.REPLY.size - len(data))
            if not piece:
                raise self._death()
            data += piece
        answered, status, value = child.REPLY.unpack(data)
        if answered != sequence:
            self.close()
            raise Fault(Failure.FORGED, _NOT_OURS)
        return status, value

    def _death(self) -> Fault:
        """How the process ended; kills it when it only closed the pipe. Raises SandboxError."""
        if self._process is None:
            return Fault(Failure.FAULT, "ended before")
        try:
            code, number = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            self.close()
            return Fault(Failure.FORGED, "closed its reply pipe and went on running")
        self.close()
        if number is None:
            return Fault(Failure.FAULT, f"ended its process with exit status {code}")
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        return Fault(Failure.FAULT, f"{name}: {_MEANING.get(name, 'killed by a signal')}")

    def close(self) -> None:
        """End the process and free the arena. May be called twice."""
        if self._process is not None:
            self._process.kill()
            with suppress(SandboxError):
                self._process.wait()
        for fd in (self._requests, self._replies):
            if fd >= 0:
                os.close(fd)
        self._requests = self._replies = -1
        self.arena.close()


class Runner(Worker):
    """One process with some objects loaded and one arena. Dies with `close`, or by its own fault."""

    repeats = 0  # one thread, nothing to race with

    def __init__(
        self, objects: Sequence[Loadable], sandbox: Sandbox, *, arena_bytes: int, cpu: int | None
    ) -> None:
        """Raises SandboxError when the process does not come up, Fault when an object cannot be loaded.

        The process dies with the thread that makes it (see `sandbox.Child`).
        """
        super().__init__(arena_bytes)
        self._births = -1
        try:
            self._process = self._start(objects, sandbox, cpu)
            self._greet(objects)
        except BaseException:
            self.close()
            raise

    def _start(self, objects: Sequence[Loadable], sandbox: Sandbox, cpu: int | None) -> Child:
        self._replies, reply_end = os.pipe()
        request_end, self._requests = os.pipe()
        self._births, birth_end = os.pipe()
        # Copies in memory: what is loaded is what was read here, and any user the walls choose may read it.
        libraries = [_memory_copy(item.path) for item in objects]
        fds = (self.arena.fd, request_end, reply_end, birth_end, *libraries)
        spec = {
            "arena": self.arena.fd,
            "arena_bytes": self.arena.size,
            "requests": request_end,
            "replies": reply_end,
            "births": birth_end,
            "cpu": cpu,
            "seccomp": judge_filter().hex() if supported() else "",
            "objects": [[fd, item.entry, item.kinds] for fd, item in zip(libraries, objects, strict=True)],
        }
        command = [sys.executable, "-I", "-S", str(_SCRIPT), json.dumps(spec)]
        cell = Cell(read_only=(*python_paths(), _SCRIPT), pass_fds=fds, limits=_limits(self.arena.size))
        try:
            return sandbox.popen(command, cell, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        finally:
            for fd in fds[1:]:
                os.close(fd)

    def _greet(self, objects: Sequence[Loadable]) -> None:
        """Reply 0: the process is up; until then no byte of a candidate was mapped. Reply 1: loaded."""
        try:
            self._reply(0, _START_TIMEOUT_S)
        except Fault as fault:
            raise SandboxError(f"the runner process did not start: {fault.detail}") from fault
        status, index = self._reply(1, _START_TIMEOUT_S)
        if status != child.OK:
            what = (
                "cannot be loaded"
                if status == child.CANNOT_LOAD
                else "lacks its entry or its workspace query"
            )
            name = objects[index].path.name if 0 <= index < len(objects) else "an object"
            raise Fault(Failure.REFUSED, f"{name} {what}")
        self._await_birth()

    def _refusal(self, status: int, value: int) -> Fault:
        if status == child.CONTROL_CHANGED:
            return Fault(Failure.WRONG, "left the processor's rounding, denormal mode or flags changed")
        return super()._refusal(status, value)

    def renew(self) -> None:
        """Go on in a process that has seen nothing: forked from one that loaded the objects and called none.

        The arena is emptied as well. Takes 1 ms, a new runner 40. Raises Fault.
        """
        if _waiting(self._births):
            self.close()
            raise Fault(Failure.FORGED, "ended its process and left it to another")
        self._send(2 + secrets.randbits(63), child.RENEW, 0, b"")
        self._await_birth()
        self.arena.wipe()

    def _await_birth(self) -> None:
        """Wait for the word of a server's maker, which the server cannot give. Raises Fault."""
        ready, _, _ = select.select([self._births], [], [], _START_TIMEOUT_S)
        if not ready:
            self.close()
            raise Fault(Failure.TIMEOUT, f"did not make room within {_START_TIMEOUT_S:g} s")
        if not os.read(self._births, 1):
            raise self._death()

    def close(self) -> None:
        super().close()
        if self._births >= 0:
            os.close(self._births)
            self._births = -1

    def call(self, index: int, placement: Placement, timeout_s: float, *, repeat: int = 1) -> Call:
        """Call object `index` on a placed case, `repeat` times in a row. Raises Fault."""
        words = repeat.to_bytes(8, "little") + b"".join(placement.words)
        start = time.perf_counter_ns()
        inside_ns = self._ask(child.CALL, index, words, timeout_s)
        outside_ns = time.perf_counter_ns() - start
        if not 0 <= inside_ns <= outside_ns:
            self.close()
            raise Fault(
                Failure.FORGED, f"reported {inside_ns} ns for a call that was answered after {outside_ns} ns"
            )
        return Call(inside_ns, outside_ns)

    def workspace_bytes(self, index: int, sizes: Sequence[int], timeout_s: float) -> int:
        """What the object's workspace query answers, unchecked. Raises Fault."""
        words = b"".join(size.to_bytes(8, "little", signed=True) for size in sizes)
        return self._ask(child.WORKSPACE, index, words, timeout_s)

    def fence(self, placement: Placement) -> None:
        """Take all rights to the guard pages from the runner: touching one is SIGSEGV. Raises Fault."""
        self._ask(child.FENCE, 0, _ranges(placement.fences), _START_TIMEOUT_S)

    def unfence(self, placement: Placement) -> None:
        self._ask(child.OPEN, 0, _ranges(placement.fences), _START_TIMEOUT_S)

    def touch(self, placement: Placement) -> None:
        """Map a placement's pages in the runner, so that no timed call pays for it. Raises Fault."""
        self._ask(child.TOUCH, 0, _ranges([(placement.begin, placement.end)]), _START_TIMEOUT_S)


_MEANING = {
    "SIGSEGV": "touched memory it does not own",
    "SIGBUS": "touched memory that is not there",
    "SIGILL": "illegal instruction",
    "SIGFPE": "arithmetic trap, such as an integer division by zero",
    "SIGABRT": "aborted, such as by a heap or stack check",
    "SIGSYS": "a system call that no kernel needs",
    "SIGKILL": "killed, such as for too much memory",
    "SIGXCPU": "used up its CPU time",
}


def _waiting(pipe: int) -> bool:
    """Whether bytes lie in a pipe although nothing was asked."""
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder) > 0


def _memory_copy(path: Path) -> int:
    """A memfd with the contents of a file. Raises OSError."""
    data = path.read_bytes()
    fd = os.memfd_create(path.name, os.MFD_CLOEXEC)
    with open(fd, "wb", closefd=False) as stream:
        stream.write(data)
    return fd


def _limits(arena_bytes: int) -> Limits:
    """Room for Python, the arena and a candidate's own mistakes; the parent bounds each call's time."""
    return Limits(cpu_s=24 * 3600, memory_bytes=arena_bytes + (1 << 30), processes=4, files=32)


def _ranges(spans: Sequence[tuple[int, int]]) -> bytes:
    return b"".join(begin.to_bytes(8, "little") + (end - begin).to_bytes(8, "little") for begin, end in spans)
