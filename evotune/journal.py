"""The append-only journal of a study: one JSON object a line, synced to disk before anything depends on it.

    {"line": 3, "sha256": "<16 hex digits>", "record": {…}}

The hash covers the record and the hash of the line before, so that a changed, lost or moved line shows. A
last line cut short is what a killed process or a full disk leaves: it is dropped, and nothing is lost that
anything depended on. Damage anywhere else is an error that names the line.
"""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from evotune.errors import StudyError
from evotune.records import Record, from_json, to_json

FILE = "journal.jsonl"
_START = "0" * 16


@dataclass(frozen=True)
class Reading:
    """A journal as it lies on disk.

    Attributes:
        records: in order.
        whole_bytes: length of the file without a last line that was cut short.
        last_hash: of the last whole line.
        note: what was dropped, "" for nothing.
    """

    records: tuple[Record, ...]
    whole_bytes: int
    last_hash: str
    note: str


def read(directory: Path) -> Reading:
    """All records of a study. Raises StudyError when there is no journal or a line is damaged."""
    path = directory / FILE
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise StudyError(f"{directory} holds no study: {FILE} is not there") from error
    except OSError as error:
        raise StudyError(f"cannot read {path}: {error.strerror}") from error
    lines = data.splitlines(keepends=True)
    records: list[Record] = []
    last_hash, whole = _START, 0
    for number, line in enumerate(lines, start=1):
        try:
            record, last_hash = _decode(line, number, last_hash)
        except ValueError as error:
            if number == len(lines):
                note = f"{path} line {number} was cut short and is dropped"
                return Reading(tuple(records), whole, last_hash, note)
            raise StudyError(
                f"{path} line {number} is damaged ({error}); restore the file from a copy, "
                "or begin again in another directory"
            ) from error
        records.append(record)
        whole += len(line)
    return Reading(tuple(records), whole, last_hash, "")


@contextmanager
def writing(directory: Path, mend: str = "") -> Iterator[None]:
    """Disk trouble with any file in the directory becomes a StudyError that ends with `mend`."""
    try:
        yield
    except OSError as error:
        raise StudyError(f"cannot write in {directory}: {error.strerror or error}{mend}") from error


class Journal:
    """The journal open for writing. One process at a time: see `Lock`."""

    def __init__(self, directory: Path, reading: Reading | None = None) -> None:
        """Open at the end of `reading`, cutting a broken last line off; a new journal without it."""
        self._path = directory / FILE
        self._line = len(reading.records) if reading else 0
        self._hash = reading.last_hash if reading else _START
        try:
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self._size = reading.whole_bytes if reading else 0
            os.ftruncate(self._file, self._size)
            os.lseek(self._file, self._size, os.SEEK_SET)
        except OSError as error:
            raise StudyError(f"cannot write {self._path}: {error.strerror}") from error

    def append(self, record: Record) -> None:
        """Write and sync one record. Raises StudyError when the disk refuses; the file then is as before."""
        text, hash_ = _encode(record, self._line + 1, self._hash)
        data = text.encode()
        try:
            written = 0
            while written < len(data):
                written += os.write(self._file, data[written:])
            os.fsync(self._file)
        except OSError as error:
            os.ftruncate(self._file, self._size)
            os.lseek(self._file, self._size, os.SEEK_SET)
            raise StudyError(f"cannot write {self._path}: {error.strerror}") from error
        self._line, self._hash, self._size = self._line + 1, hash_, self._size + len(data)

    def close(self) -> None:
        os.close(self._file)


def _encode(record: Record, line: int, before: str) -> tuple[str, str]:
    body = _canonical(to_json(record))
    hash_ = _hash(body, before)
    return f'{{"line":{line},"sha256":"{hash_}","record":{body}}}\n', hash_


def _decode(line: bytes, number: int, before: str) -> tuple[Record, str]:
    """Raises ValueError that says what is wrong with the line."""
    if not line.endswith(b"\n"):
        raise ValueError("it does not end")
    data = json.loads(line)
    if not isinstance(data, dict) or data.keys() != {"line", "sha256", "record"}:
        raise ValueError("it is not a journal line")
    hash_ = _hash(_canonical(data["record"]), before)
    if (data["line"], data["sha256"]) != (number, hash_):
        raise ValueError("its hash does not fit")
    return from_json(data["record"]), hash_


def _canonical(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _hash(body: str, before: str) -> str:
    return sha256(f"{before}\n{body}".encode()).hexdigest()[:16]


class Lock:
    """A study directory is written by one process at a time. The kernel frees the lock when the process ends,
    however it ends; the file keeps the process id for the message to others."""

    def __init__(self, directory: Path) -> None:
        """Take the lock. Raises StudyError when another process has it or the directory cannot be written."""
        self._path = directory / "lock"
        try:
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise StudyError(f"cannot write {self._path}: {error.strerror}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            pid = os.read(self._file, 32).decode(errors="replace").strip()
            os.close(self._file)
            raise StudyError(
                f"study directory {directory} is in use by process {pid}; wait for it or stop it"
            ) from error
        try:
            os.ftruncate(self._file, 0)
            os.write(self._file, f"{os.getpid()}\n".encode())
        except OSError as error:
            os.close(self._file)
            raise StudyError(f"cannot write {self._path}: {error.strerror}") from error

    def release(self) -> None:
        os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
