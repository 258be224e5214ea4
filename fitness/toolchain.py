"""The seam between the build pool and a compiler: a `Toolchain` turns a `Unit` into one object file.

A toolchain never runs in the open: it names what its sandbox cell must show (`read_only`), writes its inputs
into the scratch directory, and gives a command that runs there. Everything the command leaves behind was
written by something hostile until inspected.
"""

import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from evotune.fitness.outcome import Failed, Resources
from evotune.fitness.sandbox import Limits, Sandbox
from evotune.search_space.template import Language, Unit


@dataclass(frozen=True)
class Compiled:
    """What one sandboxed compile left behind.

    Attributes:
        object: bytes of the object file as the compiler wrote them.
        files: companions by suffix, such as {".su": …} for gcc's stack usage or {".cubin": …}.
        log: everything the compiler printed, the head and tail of a flood.
    """

    object: bytes
    files: Mapping[str, bytes]
    log: str


@dataclass(frozen=True)
class CompileError:
    """The compiler's refusal: `failed` for the record, `log` the untrimmed text kept beside it.

    `repeatable` is false for a limit hit that a less busy machine might not hit (wall time); such a result is
    not cached.
    """

    failed: Failed
    log: str
    repeatable: bool = True


class Toolchain(Protocol):
    """One compiler with one set of flags for one target. Used from several threads at once."""

    @property
    def id(self) -> str:
        """Everything outside the unit that decides the object's bytes: compiler and version, flags,
        architecture. Part of the cache key, and recorded with the artifact."""
        ...

    @property
    def target(self) -> str:
        """ "host" or "sm_90a"."""
        ...

    @property
    def language(self) -> Language: ...

    def compile(self, unit: Unit, scratch: Path, sandbox: Sandbox, limits: Limits) -> Compiled | CompileError:
        """Compile inside `sandbox`, with `scratch` (an empty directory) as the only writable place.

        Raises SandboxError or OSError for trouble that is not the unit's; the builder makes `Retry` of both.
        """
        ...

    def inspect(self, unit: Unit, compiled: Compiled) -> Resources | Failed:
        """What the object needs, or `Failed(REFUSED, Stage.INSPECT, …)` for what no honest kernel has."""
        ...

    def close(self) -> None:
        """End long-living helpers, such as a compiler kept warm."""
        ...


def arguments(constants: Sequence[tuple[str, int | float | str]]) -> list[str]:
    """`-DNAME=VALUE` for a C compiler."""
    return [f"-D{name}={value}" for name, value in constants]


def read_output(path: Path, limit_bytes: int) -> bytes | None:
    """A file that something hostile left in a scratch directory; None unless plain and of bounded size.

    Links are not followed and a FIFO is not waited for.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        return None
    with os.fdopen(fd, "rb") as stream:
        data = stream.read(limit_bytes + 1)
    return data if len(data) <= limit_bytes else None
