"""The judge's own link of a host object into something that can be loaded.

The candidate's build has no say here: no startup files, no library but libm (and libmvec if used), no search
paths, every symbol bound at load, relocated data read-only afterwards. The result is checked again, because a
linker takes instructions from the objects it reads.
"""

import os
import tempfile
from hashlib import sha256
from pathlib import Path

from evotune.errors import SandboxError
from evotune.fitness.host_toolchain import HostToolchain
from evotune.fitness.inspection import inspect_shared, refused
from evotune.fitness.outcome import Artifact, Failed
from evotune.fitness.sandbox import Limits, Sandbox
from evotune.fitness.toolchain import read_output

_LIMITS = Limits(wall_s=30.0)
_OBJECT, _SHARED = "kernel.o", "kernel.so"


class Linker:
    """Links objects of a host toolchain. Safe to use from several threads."""

    def __init__(self, toolchain: HostToolchain, sandbox: Sandbox) -> None:
        self._toolchain = toolchain
        self._sandbox = sandbox

    def link(self, artifact: Artifact) -> Path | Failed:
        """The shared object beside `artifact.object_path`, linked now unless an intact one is there.

        Raises SandboxError when the linker itself failed for want of time or room, and OSError.
        """
        output = artifact.object_path.with_suffix(".so")
        seal = output.with_suffix(".so.sha256")
        source = artifact.object_path.read_bytes()
        if _intact(output, seal, source, self.identity):
            return output
        linked = self.link_bytes(source, artifact.entry)
        if isinstance(linked, Failed):
            return linked
        _write(output, linked)
        _write(seal, _seal(source, linked, self.identity))
        return output

    @property
    def identity(self) -> str:
        """Everything beside the object that a link's bytes depend on. Raises SandboxError."""
        return self._toolchain.id

    def link_bytes(self, source: bytes, entry: str) -> bytes | Failed:
        """A checked shared object from a relocatable one that passed `inspect_object`."""
        with self._sandbox.scratch() as scratch:
            (scratch / _OBJECT).write_bytes(source)
            done = self._toolchain.link([_OBJECT], _SHARED, scratch, _LIMITS)
            if done.stopped or done.signal is not None:
                raise SandboxError(f"the linker did not end by itself: {done.stopped or done.signal}")
            data = read_output(scratch / _SHARED, _LIMITS.file_bytes) if done.ok else None
        if data is None:
            return refused(
                f"it does not link: {(done.stderr.text.strip().splitlines() or ['no message'])[-1]}"
            )
        problem = inspect_shared(data, entry)
        return data if problem is None else refused(f"after the link: {problem}")


def _seal(source: bytes, linked: bytes, linker: str) -> bytes:
    return " ".join(sha256(data).hexdigest() for data in (source, linked, linker.encode())).encode() + b"\n"


def _intact(output: Path, seal: Path, source: bytes, linker: str) -> bool:
    try:
        return seal.read_bytes() == _seal(source, output.read_bytes(), linker)
    except FileNotFoundError:
        return False


def _write(path: Path, data: bytes) -> None:
    fd, temporary = tempfile.mkstemp(prefix=".new-", dir=path.parent)
    with os.fdopen(fd, "wb") as stream:
        stream.write(data)
    os.replace(temporary, path)
