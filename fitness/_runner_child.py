"""The disposable process that loads a candidate's objects and calls them.

Runs as a script of its own inside the sandbox, `python -I -S _runner_child.py SPEC`, and so imports the
standard library only. SPEC is JSON: {"arena": fd, "arena_bytes": n, "requests": fd, "replies": fd, "births":
fd, "cpu": n or null, "seccomp": hex or "", "objects": [[fd, entry, kinds], …]}; `kinds` has one letter per
argument: p pointer, i int64, f float.

It knows no truth and decides nothing: it maps the shared arena, loads, and forks a server, which shuts itself
in with seccomp and answers one fixed-size reply per request until the pipe closes or a successor is asked
for. Everything a server says is checked by the parent (`evotune.fitness.runner`, which documents the frames).
"""

import ctypes
import gc
import json
import mmap
import os
import signal
import struct
import sys
from collections.abc import Callable
from time import perf_counter_ns

REQUEST = struct.Struct("<QHHI")  # sequence, operation, object, number of 8-byte words that follow
REPLY = struct.Struct("<Qqq")  # sequence, status, value
CALL, WORKSPACE, FENCE, OPEN, TOUCH, RENEW = range(1, 7)
OK, CANNOT_LOAD, NO_SYMBOL, CONTROL_CHANGED = range(4)
RENEWED = 64  # exit status of a server that makes room for its successor
NULL = (1 << 64) - 1

_PAGE = 4096
_PROT_NONE, _PROT_READ_WRITE = 0, 3
_STACK_BYTES, _STACK_SLACK = 256 << 10, 512
_STACK_POINTER = {"x86_64": 160, "aarch64": 432}  # in glibc's ucontext_t
_TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float}


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def filter_installer(program: bytes) -> Callable[[], None]:
    """Puts on the seccomp filter of `evotune.fitness.seccomp.judge_filter`, for good; an empty one is none.

    All but the two calls is made ready here, once for every server: a third of what a server costs otherwise.
    What it gives raises OSError.
    """
    if not program:
        return lambda: None
    libc = ctypes.CDLL(None, use_errno=True)
    prctl, filters = libc.prctl, ctypes.byref(_Program(len(program) // 8, program))

    def install() -> None:
        if prctl(38, 1, 0, 0, 0) or prctl(22, 2, filters):
            raise OSError(ctypes.get_errno(), "seccomp")

    return install


class _Object:
    """A loaded candidate: its entry with argument types, and its workspace query."""

    def __init__(self, fd: int, entry: str, kinds: str) -> None:
        library = ctypes.CDLL(f"/proc/self/fd/{fd}")
        os.close(fd)
        self.kinds = kinds
        self.entry = getattr(library, entry)
        self.entry.restype = None
        self.entry.argtypes = [_TYPES[kind] for kind in kinds]
        self.workspace = getattr(library, f"{entry}_workspace")
        self.workspace.restype = ctypes.c_int64
        self.workspace.argtypes = [ctypes.c_int64] * kinds.count("i")

    def arguments(self, base: int, words: bytes) -> list[object]:
        """ctypes values made before the clock starts; a pointer is an offset into the arena, or NULL."""
        values: list[object] = []
        for i, kind in enumerate(self.kinds):
            if kind == "f":
                values.append(ctypes.c_float(struct.unpack_from("<d", words, 8 * i)[0]))
                continue
            word = struct.unpack_from("<Q" if kind == "p" else "<q", words, 8 * i)[0]
            if kind == "i":
                values.append(ctypes.c_int64(word))
            else:
                values.append(ctypes.c_void_p(None if word == NULL else base + word))
        return values


class ControlChanged(Exception):
    """A call left the processor's rounding, its treatment of denormals or a flag other than it was."""


class _Flags:
    """Reads x86-64's flags that outlive an instruction: direction, nested task, alignment check.

    By three instructions of its own, in a page that nobody can write to any more; always 0 where the system
    gives no such page.
    """

    code, mask = b"\x9c\x58\xc3", 0x44400  # pushfq; pop rax; ret

    def __init__(self) -> None:
        self.read: Callable[[], int] = int
        try:
            # Private: what one server's kernel writes into a shared page, the next one's would find there.
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            self.page = mmap.mmap(-1, _PAGE, flags, mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        except OSError:
            return
        self.page[: len(self.code)] = self.code
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.page))
        protect = ctypes.CDLL(None).mprotect
        protect(ctypes.c_void_p(address), ctypes.c_size_t(_PAGE), mmap.PROT_READ | mmap.PROT_EXEC)
        self.read = ctypes.CFUNCTYPE(ctypes.c_uint64)(address)

    def __call__(self) -> int:
        return self.read() & self.mask


def control_reader() -> Callable[[], tuple[int, ...]]:
    """Reads what a call must leave as it was: the floating-point control bits, without their status, from
    glibc's fenv_t, and on x86-64 some of the flags; () where unknown."""
    fegetenv = ctypes.CDLL("libm.so.6").fegetenv
    environment = ctypes.create_string_buffer(64)

    def aarch64() -> tuple[int, ...]:
        fegetenv(environment)
        return struct.unpack_from("<I", environment)

    if os.uname().machine != "x86_64":
        return {"aarch64": aarch64}.get(os.uname().machine, tuple)
    flags = _Flags()

    def x86_64() -> tuple[int, ...]:
        now = flags()  # first: a string instruction of anybody's own would go the wrong way
        fegetenv(environment)
        x87, mxcsr = struct.unpack_from("<H26xI", environment)
        return x87, mxcsr & 0xFFC0, now

    return x86_64


class _Stack:
    """What lies below the stack pointer: bytes of earlier calls, or zeros, unless somebody writes there."""

    def __init__(self) -> None:
        self.getcontext = ctypes.CDLL(None).getcontext
        self.context = ctypes.create_string_buffer(8192)
        self.at = _STACK_POINTER.get(os.uname().machine)

    def poison(self) -> None:
        """Fill it with NaN, so that no kernel is right by what it finds there. memset's frame is as deep."""
        if self.at is None:
            return
        self.getcontext(self.context)
        pointer = struct.unpack_from("<Q", self.context, self.at)[0]
        ctypes.memset(pointer - _STACK_BYTES, 0xFF, _STACK_BYTES - _STACK_SLACK)


class _Server:
    """Answers requests about the loaded objects."""

    def __init__(self, arena: mmap.mmap, objects: list[_Object]) -> None:
        self.arena = arena
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(arena))
        self.objects = objects
        self.stack = _Stack()
        self.control = control_reader()
        self.mprotect = ctypes.CDLL(None).mprotect
        self.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    def call(self, index: int, words: bytes) -> int:
        """Nanoseconds of `repeat` calls. Raises ControlChanged."""
        control = self.control()
        duration_ns = self.timed(index, words)
        if self.control() != control:
            raise ControlChanged
        return duration_ns

    def timed(self, index: int, words: bytes) -> int:
        """The clock is read directly round the calls."""
        target = self.objects[index]
        repeat = struct.unpack_from("<Q", words)[0]
        arguments = target.arguments(self.base, words[8:])
        entry = target.entry
        self.stack.poison()
        if repeat == 1:
            start = perf_counter_ns()
            entry(*arguments)
            return perf_counter_ns() - start
        rounds = range(repeat)
        start = perf_counter_ns()
        for _ in rounds:
            entry(*arguments)
        return perf_counter_ns() - start

    def workspace(self, index: int, words: bytes) -> int:
        sizes = struct.unpack(f"<{len(words) // 8}q", words)
        return int(self.objects[index].workspace(*sizes))

    def protect(self, words: bytes, protection: int) -> int:
        for start, length in struct.iter_unpack("<QQ", words):
            if self.mprotect(self.base + start, length, protection):
                os._exit(70)
        return 0

    def touch(self, words: bytes) -> int:
        """Read one byte of each page, so that no timed call pays for mapping it."""
        for start, length in struct.iter_unpack("<QQ", words):
            self.arena[start : start + length : _PAGE]
        return 0

    def answer(self, operation: int, index: int, words: bytes) -> int:
        if operation == CALL:
            return self.call(index, words)
        if operation == WORKSPACE:
            return self.workspace(index, words)
        if operation == TOUCH:
            return self.touch(words)
        return self.protect(words, _PROT_NONE if operation == FENCE else _PROT_READ_WRITE)


def read_exactly(fd: int, size: int) -> bytes:
    """Ends the process when the parent has closed the pipe."""
    data = b""
    while len(data) < size:
        piece = os.read(fd, size - len(data))
        if not piece:
            os._exit(0)
        data += piece
    return data


def load(objects: list[tuple[int, str, str]]) -> tuple[int, int, list[_Object]]:
    """(status, index of the object at fault, objects)."""
    loaded = []
    for index, (fd, entry, kinds) in enumerate(objects):
        try:
            loaded.append(_Object(fd, entry, kinds))
        except OSError:
            return CANNOT_LOAD, index, []
        except AttributeError:
            return NO_SYMBOL, index, []
    return OK, 0, loaded


def serve(server: _Server, requests: int, replies: int) -> None:
    """Answer until the parent asks for a successor."""
    while True:
        sequence, operation, index, count = REQUEST.unpack(read_exactly(requests, REQUEST.size))
        words = read_exactly(requests, 8 * count)
        if operation == RENEW:
            os._exit(RENEWED)
        try:
            status, value = OK, server.answer(operation, index, words)
        except ControlChanged:
            status, value = CONTROL_CHANGED, 0
        os.write(replies, REPLY.pack(sequence, status, value))


def die_like(status: int) -> None:
    """End as a server did, so that the parent learns what became of it."""
    if os.WIFSIGNALED(status):
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status))


def main() -> None:
    """Reply 0 says that the process is up, reply 1 that the objects are loaded.

    This process never calls what it loaded. Each server is forked from it, shut in with seccomp before its
    first call, and followed by another one when the parent asks: nothing of one server's calls is left in the
    next. That there is a new one is said over a pipe which no server can write to.
    """
    spec = json.loads(sys.argv[1])
    requests, replies, births = spec["requests"], spec["replies"], spec["births"]
    gc.disable()
    if spec["cpu"] is not None:
        os.sched_setaffinity(0, {spec["cpu"]})
    arena = mmap.mmap(spec["arena"], spec["arena_bytes"])
    os.close(spec["arena"])
    os.write(replies, REPLY.pack(0, OK, 0))
    status, index, objects = load(spec["objects"])
    server = _Server(arena, objects)
    shut_in = filter_installer(bytes.fromhex(spec["seccomp"]))
    os.write(replies, REPLY.pack(1, status, index))
    while True:
        child = os.fork()
        if child == 0:
            os.close(births)
            shut_in()
            serve(server, requests, replies)
        os.write(births, b"!")
        _, status = os.waitpid(child, 0)
        if not os.WIFEXITED(status) or os.WEXITSTATUS(status) != RENEWED:
            die_like(status)


if __name__ == "__main__":
    main()
