"""The CuTe-DSL kept warm: imports the DSL once, then forks for every compile.

Runs as a script inside a sandbox, `python -I _cute_zygote.py ALONE OPTIONS`, with standard library and DSL.
ALONE is "1" where the process namespace is this sandbox's own, so that whatever a candidate left running can
be killed. stdin and stdout carry frames: 8 bytes of length, big endian, then JSON.

    out  {"ready": version}                                          once
    in   {"text", "entry", "constants": {}, "wall_s", "flood_bytes"} a job
    out  {"status", "detail", "log", "reusable", and when built
          "files": {suffix: base64}, "launches": [{"shared_bytes", "threads"}]}

status: "built", "error" (an exception in the candidate or the DSL; `log` ends with its traceback), "died" (a
signal or an exit without a result), "timeout". Not reusable: something of the job may be left.

A candidate's code runs only in the fork. Compiles never share a process: two at once in threads abort the
whole process (nvidia-cutlass-dsl 4.8.1, "MLIR requires a Location").
"""

import base64
import contextlib
import ctypes
import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
import selectors
import shutil
import signal
import struct
import sys
import time
import traceback
from typing import Any

Json = dict[str, Any]

_PR_SET_DUMPABLE = 4
IMPORTED = (
    "cutlass.cute.runtime",
    "cutlass.cute.nvgpu",
    # Imported on first use otherwise, in every fork again: 1.2 s where torch is installed.
    "cutlass.cutlass_dsl.tvm_ffi_provider",
    "cutlass.cute._tvm_ffi_args_spec_converter",
)
_WRITABLE = (".", "/tmp", "/dev/shm")
_LOG_BYTES = 128 << 10  # kept of the head of what a job prints, and as much of its tail
_RESULT_BYTES = 96 << 20
_CHUNK = 1 << 16
_NICE = 10  # a compile can wait; the judge's processes, with the GPU waiting for them, cannot


def main(alone: bool, options: str) -> None:
    requests, answers = os.dup(0), os.dup(1)
    os.nice(_NICE)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(2, 1)  # what an import prints must not reach the protocol
    for module in IMPORTED:
        importlib.import_module(module)

    # A fork of the candidate's has our uid: without this it could trace us and forge later answers.
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    send(answers, {"ready": importlib.metadata.version("nvidia-cutlass-dsl")})
    while (job := receive(requests)) is not None:
        answer = run(job, options, (requests, answers))
        if alone:
            _kill_the_rest()
        send(answers, {**answer, "reusable": alone and _swept()})


def send(fd: int, message: object) -> None:
    data = json.dumps(message).encode()
    view = memoryview(struct.pack(">Q", len(data)) + data)
    while view:
        view = view[os.write(fd, view) :]


def receive(fd: int) -> Json | None:
    """The next frame, or None at the end."""
    header = _exactly(fd, 8)
    if header is None:
        return None
    data = _exactly(fd, struct.unpack(">Q", header)[0])
    return None if data is None else json.loads(data)


def _exactly(fd: int, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        chunk = os.read(fd, min(_CHUNK, size - len(data)))
        if not chunk:
            return None
        data += chunk
    return bytes(data)


def run(job: Json, options: str, private: tuple[int, ...]) -> Json:
    """Fork, compile there, and say how it went."""
    os.mkdir("job")
    log_read, log_write = os.pipe()
    result_read, result_write = os.pipe()
    child = os.fork()
    if child == 0:
        for fd in (*private, log_read, result_read):
            os.close(fd)
        _child(job, options, log_write, result_write)
    os.close(log_write)
    os.close(result_write)
    deadline = time.monotonic() + job["wall_s"]
    log, result, stopped = _collect(child, log_read, result_read, deadline, job["flood_bytes"])
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    os.close(log_read)
    os.close(result_read)
    return _answer(result, status, stopped, log)


def _answer(result: bytes, status: int, stopped: str, log: str) -> Json:
    """What a job's end means."""
    if stopped == "timeout":
        return {"status": "timeout", "detail": "", "log": log}
    try:
        answer = json.loads(result)
    except ValueError:
        answer = None
    # The candidate may have written it.
    if not isinstance(answer, dict) or answer.get("status") not in ("built", "error"):
        if stopped:
            detail = stopped
        elif os.WIFSIGNALED(status):
            detail = f"signal {os.WTERMSIG(status)} ({signal.Signals(os.WTERMSIG(status)).name})"
        else:
            detail = f"exit status {os.waitstatus_to_exitcode(status)}"
        return {"status": "died", "detail": detail, "log": log}
    return {**answer, "detail": str(answer.get("detail", ""))[:1000], "log": log}


def _collect(
    child: int, log_fd: int, result_fd: int, deadline: float, flood_bytes: int
) -> tuple[str, bytes, str]:
    """(log, result, why stopped) until the result is complete, the child has ended or it goes too far."""
    head, tail, result, size = bytearray(), bytearray(), bytearray(), 0
    with selectors.DefaultSelector() as selector:
        selector.register(log_fd, selectors.EVENT_READ)
        selector.register(result_fd, selectors.EVENT_READ)
        stopped = ""
        while result_fd in selector.get_map():
            left = deadline - time.monotonic()
            if left <= 0:
                stopped = "timeout"
                break
            if size > flood_bytes:
                stopped = f"printed more than {flood_bytes} bytes"
                break
            ready = selector.select(min(left, 0.05))
            for key, _ in ready:
                data = os.read(key.fd, _CHUNK)
                if not data:
                    selector.unregister(key.fd)
                elif key.fd == result_fd:
                    result += data
                    if len(result) > _RESULT_BYTES:
                        return "", b"", f"its result has more than {_RESULT_BYTES} bytes"
                else:
                    size += len(data)
                    room = _LOG_BYTES - len(head)
                    head += data[:room]
                    tail = (tail + data[room:])[-_LOG_BYTES:]
            # A grandchild may hold the pipes open after the child has ended.
            if not ready and os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                break
    # At most a pipe's worth is still there: the child wrote its log before its result.
    os.set_blocking(log_fd, False)
    with contextlib.suppress(BlockingIOError):
        rest = os.read(log_fd, _CHUNK)
        size += len(rest)
        tail = (tail + rest)[-_LOG_BYTES:]
    gap = size - len(head) - len(tail)
    middle = f"\n… {gap} bytes left out …\n".encode() if gap else b""
    return (bytes(head) + middle + bytes(tail)).decode(errors="replace"), bytes(result), stopped


def _swept() -> bool:
    """Remove all that a job could have written; whether nothing is left."""
    for place in _WRITABLE:
        for name in os.listdir(place):
            path = os.path.join(place, name)
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path, ignore_errors=True)
            else:
                os.unlink(path)
    return not any(os.listdir(place) for place in _WRITABLE)


def _kill_the_rest() -> None:
    """Everything in this process namespace but its first process and this one."""
    try:
        os.kill(-1, signal.SIGKILL)
    except ProcessLookupError:
        return
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _child(job: Json, options: str, log_fd: int, result_fd: int) -> None:
    """Never returns."""
    os.dup2(log_fd, 1)
    os.dup2(log_fd, 2)
    os.close(log_fd)
    os.chdir("job")
    try:
        answer = _compile(job, options)
    except BaseException as error:  # noqa: BLE001  the candidate may raise anything, SystemExit too
        answer = {"status": "error", "detail": _one_line(error)}
        traceback.print_exc()
        sys.stderr.flush()
    try:
        data = json.dumps(answer).encode()
        view = memoryview(data)
        while view:
            view = view[os.write(result_fd, view) :]
    finally:
        os._exit(0)


def _one_line(error: BaseException) -> str:
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _compile(job: Json, options: str) -> Json:
    import cutlass.cute as cute

    with open("kernel.py", "w", encoding="utf-8") as file:
        file.write(job["text"])
    # A real file: the DSL reads the source of what it compiles.
    spec = importlib.util.spec_from_file_location("kernel", "kernel.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["kernel"] = module
    spec.loader.exec_module(module)
    function, arguments = module.build(job["constants"])
    compiled = cute.compile(function, *arguments, options=f"{options} --dump-dir=.")
    compiled.export_to_c("kernel.o", function_name=job["entry"])
    with open("kernel.o", "rb") as file:
        files = {".o": file.read(), ".ptx": compiled.__ptx__.encode(), ".cubin": compiled.__cubin__}
    return {
        "status": "built",
        "detail": "",
        "files": {suffix: base64.b64encode(data).decode() for suffix, data in files.items()},
        "launches": launches(str(compiled.ir_module)),
    }


def launches(ir: str) -> list[dict[str, int]]:
    """Static launch facts of each kernel, read from the lowered host code: the cubin does not hold them.

    The host function fills cudaLaunchConfig_t (field 1 block, field 2 dynamic shared bytes) from constants.
    """
    found = []
    config = r"llvm\.getelementptr %\w+\[0, {field}\] .*<\(array<3 x i32>, array<3 x i32>, i64,"
    for function in re.split(r"\n  llvm\.func ", ir):
        constants = dict(re.findall(r"(%\w+) = llvm\.mlir\.constant\((-?\d+) : i\d+\)", function))

        def stored(field: str, function: str = function, constants: dict[str, str] = constants) -> list[int]:
            pattern = r"(%\w+) = " + config.format(field=field)
            values = []
            for pointer in re.findall(pattern, function):
                store = re.search(rf"llvm\.store (%\w+), {pointer} : ", function)
                if store and store[1] in constants:
                    values.append(int(constants[store[1]]))
            return values

        shared, x = stored("2"), stored("1, 0")
        found += [{"shared_bytes": s, "threads": t} for s, t in zip(shared, x, strict=False)]
    return found


if __name__ == "__main__":
    main(sys.argv[1] == "1", sys.argv[2])
