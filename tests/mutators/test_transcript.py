"""The conversation on disk: what it keeps, what a crash leaves, what it never holds; replay from it."""

import json
from pathlib import Path

import pytest

from evotune.errors import ProposalError, StudyError
from evotune.mutators.client import Answer, CallError, LlmSettings, Message, Question, redact
from evotune.mutators.metered import MeteredClient
from evotune.mutators.transcript import FILE, ReplayClient, Transcript

KEY = 'sk-planted/"0123456789"+abc=='
SETTINGS = LlmSettings(model="m", api_base="http://x", max_cost_usd=1.0, tries=3)


def question(text: str = "hello", seed: int = 1) -> Question:
    return Question((Message("user", text),), seed)


class Scripted:
    """A service that gives prepared answers; a call costs at most `worst`."""

    def __init__(self, *answers: Answer, worst: float = 0.1) -> None:
        self.answers = list(answers)
        self.worst = worst
        self.asked = 0

    def ask(self, question: Question) -> Answer:
        self.asked += 1
        return self.answers.pop(0)

    def worst_cost_usd(self, question: Question) -> float:
        return self.worst


def metered(folder: Path, service: Scripted, waits: list[float] | None = None) -> MeteredClient:
    sleep = (waits if waits is not None else []).append
    return MeteredClient(service, Transcript(folder / FILE, (KEY,)), SETTINGS, sleep)


BUSY = Answer("", error=CallError.RATE_LIMIT, detail="busy")


def test_an_answer_is_written_with_everything_about_it(tmp_path: Path) -> None:
    answer = metered(tmp_path, Scripted(Answer("hi", 10, 5, cost_usd=0.02, seconds=1.5))).ask(question())
    reserved, record = [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()]
    assert reserved == {"call": 1, "reserved_usd": 0.1}
    assert record["call"] == 1
    assert record["question"] == question().digest
    assert record["messages"] == [{"role": "user", "content": "hello"}]
    assert record["model"] == "m"
    assert record["answer"]["text"] == "hi"
    assert (record["answer"]["cost_usd"], record["answer"]["seconds"]) == (0.02, 1.5)
    assert answer.reference == "llm.jsonl:2"


def test_a_question_that_was_answered_is_not_paid_for_again(tmp_path: Path) -> None:
    first = metered(tmp_path, Scripted(Answer("hi", cost_usd=0.02))).ask(question())
    silent = Scripted()
    assert metered(tmp_path, silent).ask(question()) == first
    assert silent.asked == 0


def test_equal_words_of_another_proposal_are_another_question(tmp_path: Path) -> None:
    service = Scripted(Answer("one"), Answer("two"))
    client = metered(tmp_path, service)
    assert client.ask(question(seed=1)).text == "one"
    assert client.ask(question(seed=2)).text == "two"


def test_a_busy_service_is_asked_again_with_growing_pauses(tmp_path: Path) -> None:
    waits: list[float] = []
    answer = metered(tmp_path, Scripted(BUSY, BUSY, Answer("at last")), waits).ask(question())
    assert answer.text == "at last"
    assert 1.0 <= waits[0] <= 1.5
    assert 2.0 <= waits[1] <= 3.0


def test_tries_are_bounded_and_the_last_trouble_comes_back(tmp_path: Path) -> None:
    service = Scripted(BUSY, BUSY, BUSY, Answer("never seen"))
    assert metered(tmp_path, service).ask(question()).error is CallError.RATE_LIMIT
    assert service.asked == SETTINGS.tries


def test_the_pause_a_service_asks_for_is_kept_but_not_a_long_one(tmp_path: Path) -> None:
    waits: list[float] = []
    polite = Answer("", error=CallError.RATE_LIMIT, retry_after_s=7.0)
    metered(tmp_path, Scripted(polite, Answer("hi")), waits).ask(question())
    assert waits == [7.0]
    rude = Answer("", error=CallError.RATE_LIMIT, retry_after_s=3600.0)
    service = Scripted(rude, Answer("hi"))
    assert metered(tmp_path, service, waits).ask(question("other")).error is CallError.RATE_LIMIT
    assert (service.asked, waits) == (1, [7.0])


@pytest.mark.parametrize("error", [CallError.AUTHENTICATION, CallError.BAD_REQUEST, CallError.REFUSAL])
def test_what_will_not_pass_is_not_asked_again(tmp_path: Path, error: CallError) -> None:
    service = Scripted(Answer("", error=error), Answer("hi"))
    assert metered(tmp_path, service).ask(question()).error is error
    assert service.asked == 1


def test_the_cap_stops_a_call_before_it_is_made(tmp_path: Path) -> None:
    service = Scripted(*[Answer("hi", cost_usd=0.3)] * 9, worst=0.35)
    client = metered(tmp_path, service)
    for n in range(3):
        client.ask(question(str(n)))
    with pytest.raises(ProposalError, match=r"could cost \$0.3500; \$0.9000 of max_cost_usd = 1") as raised:
        client.ask(question("once more"))
    assert raised.value.kind == "budget"
    assert service.asked == 3


def test_the_cap_counts_earlier_runs(tmp_path: Path) -> None:
    metered(tmp_path, Scripted(Answer("hi", cost_usd=0.95))).ask(question())
    later = Scripted(Answer("hi"))
    with pytest.raises(ProposalError, match="max_cost_usd"):
        metered(tmp_path, later).ask(question("other"))
    assert later.asked == 0


def test_a_call_that_was_cut_short_by_a_crash_counts_with_its_worst_cost(tmp_path: Path) -> None:
    class Crash(Scripted):
        def ask(self, question: Question) -> Answer:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        metered(tmp_path, Crash(worst=0.6)).ask(question())
    assert Transcript(tmp_path / FILE).spent_usd == pytest.approx(0.6)
    with pytest.raises(ProposalError, match="max_cost_usd"):
        metered(tmp_path, Scripted(Answer("hi"), worst=0.6)).ask(question())


def test_failed_tries_are_paid_for_too(tmp_path: Path) -> None:
    late = Answer("", error=CallError.TIMEOUT, cost_usd=0.1)
    answer = metered(tmp_path, Scripted(late, Answer("hi", cost_usd=0.02))).ask(question())
    assert answer.cost_usd == pytest.approx(0.12)
    assert Transcript(tmp_path / FILE).spent_usd == pytest.approx(0.12)


@pytest.mark.parametrize("cut", [1, 20, 100])
def test_a_torn_last_line_is_cut_off_and_written_over(tmp_path: Path, cut: int) -> None:
    path = tmp_path / FILE
    metered(tmp_path, Scripted(Answer("hi", cost_usd=0.02))).ask(question())
    path.write_bytes(path.read_bytes()[:-cut])
    assert Transcript(path).spent_usd == pytest.approx(0.1)  # the reservation stands in for the lost record
    metered(tmp_path, Scripted(Answer("again", cost_usd=0.02))).ask(question())
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["call"] for line in lines] == [1, 2, 2]


@pytest.mark.parametrize(
    "line",
    ["nonsense", "[]", "{}", '{"answer": {"colour": 1}}', '{"answer": {"text": "", "error": "odd"}}'],
)
def test_a_line_that_is_no_transcript_is_an_error_with_its_number(tmp_path: Path, line: str) -> None:
    (tmp_path / FILE).write_text('{"answer": "hi"}\n' + line + "\n")
    with pytest.raises(StudyError, match="2"):
        Transcript(tmp_path / FILE)


def test_the_key_is_in_no_line_whoever_said_it(tmp_path: Path) -> None:
    said = Answer(f"your key is {KEY}", error=CallError.EMPTY, detail=f"key {KEY} is bad")
    metered(tmp_path, Scripted(said)).ask(question(f"my key is {KEY}"))
    text = (tmp_path / FILE).read_text()
    assert "sk-planted" not in text
    assert text.count("[redacted]") == 3


@pytest.mark.parametrize("form", [KEY, json.dumps(KEY), "sk-planted%2F%220123456789%22%2Babc%3D%3D"])
def test_redaction_knows_the_forms_a_key_takes(form: str) -> None:
    assert "planted" not in redact(f"before {form} after", (KEY,))


def test_a_placeholder_is_not_redacted() -> None:
    assert redact("nothing happened", ("no", "")) == "nothing happened"


def test_text_that_is_not_unicode_survives(tmp_path: Path) -> None:
    metered(tmp_path, Scripted(Answer("lone \ud800 surrogate"))).ask(question())
    assert Transcript(tmp_path / FILE).answer_to(question()) is not None


class TestReplay:
    def recorded(self, folder: Path) -> Path:
        service = Scripted(BUSY, Answer("one", 10, 5, cost_usd=0.02), Answer("two"))
        client = metered(folder, service)
        client.ask(question("first"))
        client.ask(question("second"))
        return (folder / FILE).rename(folder / "recorded.jsonl")

    def test_the_same_questions_get_the_same_answers_in_any_order(self, tmp_path: Path) -> None:
        client = ReplayClient(self.recorded(tmp_path), Transcript(tmp_path / FILE))
        assert client.ask(question("second")).text == "two"
        first = client.ask(question("first"))
        assert (first.text, first.cost_usd, first.input_tokens) == ("one", 0.0, 10)

    def test_other_questions_get_the_answers_in_order_and_then_none(self, tmp_path: Path) -> None:
        client = ReplayClient(self.recorded(tmp_path), Transcript(tmp_path / FILE))
        assert [client.ask(question(f"new {n}")).text for n in range(2)] == ["one", "two"]
        with pytest.raises(ProposalError, match="no more answers"):
            client.ask(question("new 3"))

    def test_a_resumed_replay_goes_on_where_it_stopped(self, tmp_path: Path) -> None:
        source = self.recorded(tmp_path)
        ReplayClient(source, Transcript(tmp_path / FILE)).ask(question("new"))
        resumed = ReplayClient(source, Transcript(tmp_path / FILE))
        assert resumed.ask(question("new")).text == "one"
        assert resumed.ask(question("newer")).text == "two"

    def test_a_transcript_by_hand_needs_only_answers(self, tmp_path: Path) -> None:
        source = tmp_path / "hand.jsonl"
        source.write_text('{"answer": "one"}\n{"answer": {"text": "", "error": "refusal"}}\n')
        client = ReplayClient(source, Transcript(tmp_path / FILE))
        assert client.ask(question()).text == "one"
        assert client.ask(question("other")).error is CallError.REFUSAL

    def test_a_missing_file_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(StudyError, match="nowhere"):
            ReplayClient(tmp_path / "nowhere", Transcript(tmp_path / FILE))
