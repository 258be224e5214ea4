"""A model in whole studies: its proposal fails, is repaired, enters and is tuned; replay, resume, HTTP."""

import json
from pathlib import Path

import pytest

from evotune.errors import StudyError
from evotune.history import History, fold
from evotune.journal import read
from evotune.mutators import patch
from evotune.mutators.transcript import FILE, Transcript
from evotune.replay import replay
from evotune.report import spent_usd
from evotune.study import StudyRun
from tests.evotune.toy import run_study, setup_of, study_file
from tests.mutators.fake_service import Reply, serve

KEY = "sk-planted-0123456789-abcdefgh"
BROKEN = """Run six at once.
<<<<<<< SEARCH body
int speed = 1;
=======
#error
int speed = 6;
>>>>>>> REPLACE
"""
MENDED = """Without the typo.
<<<<<<< SEARCH body
#error
=======
>>>>>>> REPLACE
"""
SETTINGS = """
[mutation.llm]
{keys}

[[workload]]
name = "long"
"""


def llm_study(folder: Path, **keys: str | float) -> Path:
    lines = "\n".join(f"{key} = {json.dumps(value)}" for key, value in keys.items())
    return study_file(
        folder,
        ('operators = ["tests.evotune.toy:mutator"]', 'operators = ["llm"]'),
        ('\n[[workload]]\nname = "long"\n', SETTINGS.format(keys=lines)),
    )


def said(folder: Path, *answers: str) -> None:
    lines = [json.dumps({"answer": answer}) + "\n" for answer in answers]
    (folder / "said.jsonl").write_text("".join(lines))


def repaired_study(folder: Path) -> StudyRun:
    said(folder, BROKEN, MENDED)
    return run_study(setup_of(llm_study(folder, replay="said.jsonl")))


def check_story(history: History) -> None:
    """The first proposal fails to build, its repair enters, is tuned, and holds the best candidate."""
    seed, broken, mended = history.branches[:3]
    assert (broken.origin, mended.origin) == ("llm", "llm")
    assert (broken.parent, mended.repairs) == (seed.id, broken.id)
    assert "#error" in broken.source
    assert mended.note == "Without the typo."
    assert [entry.failed is not None for entry in history.of(broken.id)] == [True]
    passed = [entry for entry in history.of(mended.id) if entry.passed]
    assert len(passed) > 5
    fastest = max(history.entries, key=lambda e: e.passed.values[0].value if e.passed else 0.0)
    assert fastest.asked.branch == mended.id


def test_a_transcript_alone_drives_a_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EVOTUNE_TEST_KEY", raising=False)
    loop = repaired_study(tmp_path)
    check_story(loop.history)
    problems = {refusal.problem for refusal in loop.history.refusals}
    assert problems == {"exhausted"}  # after its two answers the transcript has no more


def test_the_study_keeps_the_conversation(tmp_path: Path) -> None:
    loop = repaired_study(tmp_path)
    _, broken, mended = loop.history.branches[:3]
    lines = (loop.setup.directory / FILE).read_text().splitlines()
    assert (broken.reference, mended.reference) == ("llm.jsonl:1", "llm.jsonl:2")
    assert json.loads(lines[0])["answer"]["text"] == BROKEN
    assert "body.c:3: error: #error" in json.loads(lines[1])["messages"][-1]["content"]


def test_the_journal_replays_without_the_transcript(tmp_path: Path) -> None:
    loop = repaired_study(tmp_path)
    (tmp_path / "said.jsonl").unlink()
    (loop.setup.directory / FILE).unlink()
    again = fold(replay(loop.setup.directory))
    assert again.branches == loop.history.branches
    assert [e.asked for e in again.entries] == [e.asked for e in loop.history.entries]


def test_a_resumed_study_does_not_ask_again_what_was_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run dies when the answer is on disk and the branch is not yet in the journal."""

    def die(source: str, edits: object) -> str:
        raise KeyboardInterrupt

    said(tmp_path, BROKEN, MENDED)
    setup = setup_of(llm_study(tmp_path, replay="said.jsonl"))
    with monkeypatch.context() as patched:
        patched.setattr(patch, "apply", die)
        with pytest.raises(KeyboardInterrupt):
            run_study(setup)
    assert len(Transcript(setup.directory / FILE).exchanges) == 1
    check_story(run_study(setup, resumed=True).history)
    assert len(Transcript(setup.directory / FILE).exchanges) == 2


def http_study(folder: Path, url: str, cap: float = 1.0) -> Path:
    return llm_study(
        folder,
        model="openai/m",
        api_base=url,
        api_key_env="EVOTUNE_TEST_KEY",
        input_usd_per_mtok=1.0,
        output_usd_per_mtok=10.0,
        max_tokens=1000,
        max_cost_usd=cap,
        tries=1,
    )


def test_a_planted_key_is_found_nowhere_under_the_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVOTUNE_TEST_KEY", KEY)
    echo = BROKEN.replace("#error", f"#error {KEY}")
    mend = MENDED.replace("#error", "#error [redacted]")
    with serve(
        Reply(echo), Reply(mend), Reply(f"no edit but {KEY}"), Reply(status=401), Reply(status=500)
    ) as service:
        loop = run_study(setup_of(http_study(tmp_path, service.url)))
    check_story(loop.history)
    assert {refusal.problem for refusal in loop.history.refusals} >= {"authentication"}
    assert all(headers["authorization"] == f"Bearer {KEY}" for headers in service.headers)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(path.name == FILE for path in files)
    assert [path for path in files if KEY.encode() in path.read_bytes()] == []


def test_the_cap_holds_over_a_resumed_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVOTUNE_TEST_KEY", KEY)
    with serve(Reply("no edit", tokens=(3000, 1000))) as service:
        path = http_study(tmp_path, service.url, cap=0.04)
        first = run_study(setup_of(path, trials=20))
        run_study(setup_of(path, trials=60), resumed=True)
    spent = Transcript(first.setup.directory / FILE).spent_usd
    assert 0 < spent <= 0.04
    assert spent_usd(first.history, first.setup.directory) == spent  # though no branch came of it
    problems = {getattr(record, "problem", "") for record in read(first.setup.directory).records}
    assert "budget" in problems
    assert len(service.requests) == 3  # 0.013 each; a fourth could have cost as much again


def test_a_missing_key_ends_it_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("EVOTUNE_TEST_KEY", raising=False)
    setup = setup_of(http_study(tmp_path, "http://127.0.0.1:9/v1"))
    with pytest.raises(StudyError, match="EVOTUNE_TEST_KEY is not set"):
        run_study(setup)
