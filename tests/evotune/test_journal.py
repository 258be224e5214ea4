"""The journal: what a crash, a full disk and a meddler do to it."""

import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest

from evotune.errors import StudyError
from evotune.fitness.objectives import Column
from evotune.fitness.outcome import Failed, Failure, Measurement, Passed, Resources, Retry, Stage, Value
from evotune.journal import FILE, Journal, Lock, read
from evotune.records import (
    Asked,
    BranchAdded,
    Judged,
    Record,
    Refusal,
    SessionBegun,
    StudyBegun,
    from_json,
    to_json,
)

PASSED = Passed(
    "screen",
    0.25,
    (Measurement("w", "g", (1.5, 0.1 + 0.2), (3.0, 1e-9)),),
    0.7,
    (Value("speedup:g", 1 / 3, "x", True),),
    {"float32-K64": Resources({"code_bytes": 12})},
)
FAILED = Failed(Failure.WRONG, Stage.EDGES, "o, head 1, chunk 2", case="odd T", log="x\n\u2028\r`")
RECORDS: list[Record] = [
    StudyBegun({"study": {"name": "n"}}, "/base", (Column("speedup:g", "x", True),), {"evotune": "0.1.0"}),
    SessionBegun("2026-01-01T00:00:00+00:00", 42),
    BranchAdded(-1, "b00", "int x;\r\n", None, "seed", "note"),
    Asked(0, 0, 0, "b00", {"tile": 8, "fast": True, "order": "kv"}, "baseline"),
    Judged(0, 0, 0, PASSED, {"build": 0.125}, {"float32-K64": "ab"}, 1.5),
    Judged(1, 1, 1, FAILED, {}, {}, 2.5),
    Judged(1, 2, 2, Retry("the sandbox did not start"), {}, {}, 3.5),
    Refusal(2, "rules", "exhausted", "no more rules", "b03"),
]


def write(directory: Path, records: list[Record]) -> None:
    journal = Journal(directory)
    for record in records:
        journal.append(record)
    journal.close()


@pytest.mark.parametrize(
    "record", RECORDS, ids=lambda r: f"{r.kind}-{type(getattr(r, 'outcome', r)).__name__}"
)
def test_records_survive_json(record: Record) -> None:
    assert from_json(json.loads(json.dumps(to_json(record)))) == record


def test_bools_stay_bools() -> None:
    asked = from_json(json.loads(json.dumps(to_json(RECORDS[3]))))
    assert isinstance(asked, Asked)
    assert asked.knobs["fast"] is True


def test_written_records_are_read_again_and_appended_to(tmp_path: Path) -> None:
    write(tmp_path, RECORDS[:3])
    journal = Journal(tmp_path, read(tmp_path))
    journal.append(RECORDS[3])
    journal.close()
    reading = read(tmp_path)
    assert list(reading.records) == RECORDS[:4]
    assert reading.note == ""
    assert [json.loads(line)["line"] for line in (tmp_path / FILE).read_text().splitlines()] == [1, 2, 3, 4]


@pytest.mark.parametrize("kept", [1, 20, -1])
def test_a_last_line_cut_short_is_dropped_with_a_note(tmp_path: Path, kept: int) -> None:
    write(tmp_path, RECORDS[:4])
    path = tmp_path / FILE
    whole = path.read_bytes()
    start = whole.rindex(b"\n", 0, -1) + 1
    path.write_bytes(whole[:start] + whole[start:][:kept])
    reading = read(tmp_path)
    assert list(reading.records) == RECORDS[:3]
    assert "line 4 was cut short" in reading.note
    journal = Journal(tmp_path, reading)
    journal.append(RECORDS[3])
    journal.close()
    assert path.read_bytes() == whole


def damaged(lines: list[bytes], what: str) -> list[bytes]:
    match what:
        case "changed":
            return [*lines[:2], lines[2].replace(b"note", b"nota"), *lines[3:]]
        case "truncated":
            return [*lines[:2], lines[2][:30] + b"\n", *lines[3:]]
        case "lost":
            return [*lines[:2], *lines[3:]]
        case "moved":
            return [lines[0], lines[2], lines[1], *lines[3:]]
        case _:
            return [*lines[:2], b"\x00\xff\n", *lines[3:]]


@pytest.mark.parametrize(
    ("what", "line"), [("changed", 3), ("truncated", 3), ("lost", 3), ("moved", 2), ("noise", 3)]
)
def test_damage_in_the_middle_names_the_line_and_the_mend(tmp_path: Path, what: str, line: int) -> None:
    write(tmp_path, RECORDS)
    path = tmp_path / FILE
    path.write_bytes(b"".join(damaged(path.read_bytes().splitlines(keepends=True), what)))
    with pytest.raises(StudyError, match=rf"line {line} is damaged.*restore the file from a copy"):
        read(tmp_path)


def test_a_full_disk_leaves_the_journal_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path)
    journal.append(RECORDS[0])
    before = (tmp_path / FILE).read_bytes()
    real = os.write

    def half(fd: int, data: bytes) -> int:
        if len(data) < 40:
            raise OSError(28, "No space left on device")
        return real(fd, data[: len(data) // 2])

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", half)
        with pytest.raises(StudyError, match=r"cannot write .*journal\.jsonl: No space left"):
            journal.append(RECORDS[1])
    assert (tmp_path / FILE).read_bytes() == before
    journal.append(RECORDS[1])
    journal.close()
    assert list(read(tmp_path).records) == RECORDS[:2]


def test_no_journal_is_no_study(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match="holds no study"):
        read(tmp_path)


def _take(directory: Path, result: Any) -> None:
    try:
        Lock(directory)
        result.put("taken")
    except StudyError as error:
        result.put(str(error))


def test_a_lock_names_its_holder_and_dies_with_it(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    result = spawn.SimpleQueue()

    def other() -> str:
        process = spawn.Process(target=_take, args=(tmp_path, result))
        process.start()
        process.join()
        return str(result.get())

    with Lock(tmp_path):
        assert f"in use by process {os.getpid()}" in other()
    assert other() == "taken"
    with Lock(tmp_path):  # the other process took it and is gone
        pass


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match="cannot write .*lock"):
        Lock(tmp_path / "missing")
