"""Built objects on disk, named by everything that decides their bytes.

One directory per entry: the object, its companions, the compiler's whole output, and `entry.json` with the
hash of each file and of itself. An entry appears by one rename, so a reader sees all of it or nothing; one
that does not match its hashes is removed and built again.

Its size is bounded when it is opened: whoever has it open holds a shared lock, and entries go, the longest
unused first, only under the exclusive one. So no study loses an object that it still means to load.
"""

import contextlib
import errno
import fcntl
import json
import os
import shutil
import tempfile
import weakref
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from evotune.errors import StudyError
from evotune.fitness.outcome import Artifact, Failed, Failure, Resources, Stage

_ENTRY, _OBJECT, _LOG = "entry.json", "kernel.o", "build.log"
_LOCK, _DRAFT = "lock", ".new-"


@dataclass(frozen=True)
class Entry:
    """What is kept of one build.

    Attributes:
        result: an artifact whose `object_path` lies in the cache, or the failure.
        log: path of the compiler's whole output.
    """

    result: Artifact | Failed
    log: Path


@dataclass(frozen=True)
class Parts:
    """What a build produced, before it has a place: `object` is None for a failure."""

    description: dict[str, Any]
    log: str
    object: bytes | None = None
    files: tuple[tuple[str, bytes], ...] = ()

    @classmethod
    def of_artifact(cls, artifact: Artifact, data: bytes, files: dict[str, bytes], log: str) -> "Parts":
        description = {
            "digest": artifact.digest,
            "entry": artifact.entry,
            "target": artifact.target,
            "toolchain": artifact.toolchain,
            "resources": dict(artifact.resources.values),
            "build_s": artifact.build_s,
        }
        return cls({"artifact": description}, log, data, tuple(sorted(files.items())))

    @classmethod
    def of_failure(cls, failed: Failed, log: str) -> "Parts":
        description = {
            "failure": failed.failure.value,
            "stage": failed.stage.value,
            "detail": failed.detail,
            "log": failed.log,
        }
        return cls({"failed": description}, log)

    def contents(self) -> dict[str, bytes]:
        """File contents by name."""
        named = {_LOG: self.log.encode(errors="replace")}
        if self.object is not None:
            named[_OBJECT] = self.object
            named |= {f"kernel{suffix}": data for suffix, data in self.files}
        return named


class Cache:
    """Safe to share between threads and processes."""

    def __init__(self, directory: Path, limit_bytes: int | None = None) -> None:
        """Make the directory, or bring it below `limit_bytes` unless another study has it open.

        Raises StudyError when it cannot be written.
        """
        self.directory = directory
        try:
            directory.mkdir(parents=True, exist_ok=True)
            lock = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self._unlock = weakref.finalize(self, os.close, lock)
            if limit_bytes is not None:
                self._trim(lock, limit_bytes)
            fcntl.flock(lock, fcntl.LOCK_SH)
        except OSError as error:
            raise StudyError(
                f"built objects cannot be kept in {directory}: {error.strerror}; mend that, or set "
                "XDG_CACHE_HOME to a directory that can be written"
            ) from error

    def close(self) -> None:
        """Let others trim it: nothing that was got here is needed any more."""
        self._unlock()

    def get(self, name: str) -> Entry | None:
        """The entry called `name` (a hex digest), or None when it is missing or damaged."""
        place = self._place(name)
        if not place.exists():
            return None
        try:
            entry = self._read(place)
        except (ValueError, KeyError, TypeError, OSError):
            shutil.rmtree(place, ignore_errors=True)
            return None
        with contextlib.suppress(PermissionError):  # another user made it
            os.utime(place)  # last use, for `_trim`
        return entry

    def put(self, name: str, parts: Parts) -> Entry:
        """Store and return the entry as `get` would. Raises OSError, for instance when the disk is full."""
        place = self._place(name)
        place.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=_DRAFT, dir=self.directory))
        try:
            contents = parts.contents()
            for file_name, data in contents.items():
                (temporary / file_name).write_bytes(data)
            hashes = {file_name: sha256(data).hexdigest() for file_name, data in contents.items()}
            (temporary / _ENTRY).write_text(_sealed({**parts.description, "files": hashes}))
            self._move(temporary, place)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return self._read(place)

    def _trim(self, lock: int, limit_bytes: int) -> None:
        """Remove what killed processes left half-written, then entries until the rest fits."""
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        for draft in self.directory.glob(f"{_DRAFT}*"):
            shutil.rmtree(draft, ignore_errors=True)
        entries = [
            (place.stat().st_mtime, _size_bytes(place), place) for place in self.directory.glob("??/*")
        ]
        excess = sum(size for _, size, _ in entries) - limit_bytes
        for _, size, place in sorted(entries):
            if excess <= 0:
                return
            shutil.rmtree(place, ignore_errors=True)
            excess -= size

    def _place(self, name: str) -> Path:
        return self.directory / name[:2] / name

    @staticmethod
    def _move(temporary: Path, place: Path) -> None:
        try:
            os.rename(temporary, place)
        except OSError as error:
            # Another process stored the same build first: as good as ours.
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise

    @staticmethod
    def _read(place: Path) -> Entry:
        description = _unsealed((place / _ENTRY).read_text())
        for name, expected in description["files"].items():
            if sha256((place / name).read_bytes()).hexdigest() != expected:
                raise ValueError(f"{place / name} was changed")
        if "failed" in description:
            kept = description["failed"]
            failed = Failed(Failure(kept["failure"]), Stage(kept["stage"]), kept["detail"], log=kept["log"])
            return Entry(failed, place / _LOG)
        kept = {**description["artifact"], "object_path": place / _OBJECT}
        kept["resources"] = Resources(kept["resources"])
        return Entry(Artifact(**kept), place / _LOG)


def _size_bytes(place: Path) -> int:
    """What an entry's files take on disk, in whole blocks."""
    return sum(file.stat().st_blocks * 512 for file in place.iterdir())


def _sealed(description: dict[str, Any]) -> str:
    """JSON on one line after a line with its hash."""
    text = json.dumps(description, sort_keys=True)
    return f"{sha256(text.encode()).hexdigest()}\n{text}\n"


def _unsealed(text: str) -> dict[str, Any]:
    expected, _, body = text.partition("\n")
    body = body.removesuffix("\n")
    if sha256(body.encode()).hexdigest() != expected:
        raise ValueError("the entry does not match its hash")
    description: dict[str, Any] = json.loads(body)
    return description
