"""Built objects on disk, named by everything that decides their bytes.

One directory per entry: the object, its companions, the compiler's whole output, and `entry.json` with the
hash of each file and of itself. An entry appears by one rename, so a reader sees all of it or nothing; one
that does not match its hashes is removed and built again.
"""

import errno
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from evotune.fitness.outcome import Artifact, Failed, Failure, Resources, Stage

_ENTRY, _OBJECT, _LOG = "entry.json", "kernel.o", "build.log"


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

    def __init__(self, directory: Path) -> None:
        """Creates the directory. Raises OSError."""
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory

    def get(self, name: str) -> Entry | None:
        """The entry called `name` (a hex digest), or None when it is missing or damaged."""
        place = self._place(name)
        if not place.exists():
            return None
        try:
            return self._read(place)
        except (ValueError, KeyError, TypeError, OSError):
            shutil.rmtree(place, ignore_errors=True)
            return None

    def put(self, name: str, parts: Parts) -> Entry:
        """Store and return the entry as `get` would. Raises OSError, for instance when the disk is full."""
        place = self._place(name)
        place.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=".new-", dir=self.directory))
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
