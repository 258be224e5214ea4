"""The LLM mutator: the contract on a replay, turns, trouble over real HTTP, the cap and the key."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from evotune.errors import ProposalError, StudyError
from evotune.mutators.client import LlmSettings
from evotune.mutators.llm import LlmMutator, from_settings
from evotune.mutators.mutator import Mutator, Request
from evotune.mutators.transcript import FILE, ReplayClient, Transcript
from evotune.search_space.branch import stages
from tests.mutators.contract import MutatorContract
from tests.mutators.fake_service import Reply, serve
from tests.mutators.toys import SEED, ToyKnobs, failed, request, standing

KEY = "sk-planted-0123456789-abcdefgh"
GOOD = """Scale without the temporary.

<<<<<<< SEARCH scale
    float y = x;
    return y * 2.0f;
=======
    return x + x;
>>>>>>> REPLACE
"""
MENDED = """\
<<<<<<< SEARCH scale
    return x + x;
=======
    return 2.0f * x;
>>>>>>> REPLACE
"""
HALF = GOOD[: GOOD.index(">>>>>>>")]
ABSENT = GOOD.replace("float y = x;", "double y = x;")
ASKED = request(5, standing(SEED, long=1.0))


def transcript(path: Path, *answers: str | dict[str, str]) -> Path:
    path.write_text("".join(json.dumps({"answer": answer}) + "\n" for answer in answers))
    return path


def replaying(folder: Path, *answers: str | dict[str, str]) -> LlmMutator:
    return LlmMutator(ReplayClient(transcript(folder / "said.jsonl", *answers), Transcript(folder / FILE)))


class TestContract(MutatorContract):
    @pytest.fixture
    def make(self, tmp_path: Path) -> Callable[[], Mutator]:
        answers = [f"<<<<<<< SEARCH scale\n=======\n// scale {n}\n>>>>>>> REPLACE\n" for n in range(4)]

        def build() -> Mutator:
            folder = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
            folder.mkdir()
            return replaying(folder, *answers)

        return build

    @pytest.fixture
    def asked(self) -> Request:
        return ASKED


def test_a_proposal_says_what_it_is(tmp_path: Path) -> None:
    proposal = replaying(tmp_path, GOOD).propose(ASKED)
    assert stages(proposal.source)["scale"] == "static inline float scale(float x) {\n    return x + x;\n}\n"
    assert (proposal.parent, proposal.origin, proposal.note) == ("b00", "llm", "Scale without the temporary.")
    assert proposal.extra == {"turns": "1"}
    assert proposal.reference == "llm.jsonl:1"


def test_edits_that_do_not_apply_get_one_second_turn(tmp_path: Path) -> None:
    mutator = replaying(tmp_path, ABSENT, GOOD)
    proposal = mutator.propose(ASKED)
    assert "return x + x;" in proposal.source
    _, second = [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()]
    said = [message["content"] for message in second["messages"]]
    assert said[-2] == ABSENT
    assert "which reads 'float y = x;', not 'double y = x;'" in said[-1]
    assert mutator.repair(ASKED, proposal, failed()) is None  # the second turn is used


def test_an_answer_may_say_which_knobs_to_try_first(tmp_path: Path) -> None:
    best = standing(SEED, ToyKnobs(unroll=2), long=1.0)
    proposal = replaying(tmp_path, "KNOBS: mode=fused\n" + GOOD).propose(request(5, best))
    assert proposal.start == ToyKnobs(unroll=2, mode="fused")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("mode=fast", "no knob mode with a choice fast"),
        ("tile=2", "no knob tile"),
        ("mode=fused", "illegal: fused needs unroll 1 or 2"),
    ],
)
def test_knobs_that_cannot_be_are_told_to_the_model(tmp_path: Path, line: str, words: str) -> None:
    best = standing(SEED, ToyKnobs(unroll=4), long=1.0)
    proposal = replaying(tmp_path, f"KNOBS: {line}\n{GOOD}", GOOD).propose(request(5, best))
    assert proposal.start is None
    assert words in (tmp_path / FILE).read_text()


def test_a_repair_edits_the_failed_source_and_shows_the_error(tmp_path: Path) -> None:
    mutator = replaying(tmp_path, GOOD, MENDED)
    proposal = mutator.propose(ASKED)
    repaired = mutator.repair(ASKED, proposal, failed(log="line 3: expected ';'"))
    assert repaired is not None
    assert "return 2.0f * x;" in repaired.source
    assert repaired.extra == {"turns": "2"}
    last = json.loads((tmp_path / FILE).read_text().splitlines()[-1])
    assert "line 3: expected ';'" in last["messages"][-1]["content"]
    assert "return x + x;" in last["messages"][-1]["content"]


def test_a_proposal_read_back_from_a_journal_can_be_repaired(tmp_path: Path) -> None:
    proposal = replaying(tmp_path, GOOD).propose(ASKED)
    later = replaying(tmp_path, "unused", MENDED)
    assert (
        later.repair(ASKED, dataclasses.replace(proposal, extra=dict(proposal.extra)), failed()) is not None
    )


TROUBLE = {
    "nonsense twice": (["What a nice kernel!", "Indeed."], "bad_edit", "no edit"),
    "half an edit twice": ([HALF, HALF], "bad_edit", "incomplete"),
    "frame": ([GOOD.replace("SEARCH scale", "SEARCH frame")] * 2, "bad_edit", "no stage named frame"),
    "refusal": ([{"text": "", "error": "refusal", "detail": "the model refused: no"}], "refusal", "refused"),
    "cut off": (
        [{"text": HALF, "error": "truncated", "detail": "cut off at max_tokens"}],
        "truncated",
        "max_t",
    ),
    "empty": ([{"text": "", "error": "empty", "detail": "the answer is empty"}], "empty", "empty"),
    "no answers": ([], "exhausted", "no more answers"),
}


@pytest.mark.parametrize("name", TROUBLE)
def test_answers_that_cannot_be_used_have_a_class(tmp_path: Path, name: str) -> None:
    answers, kind, words = TROUBLE[name]
    with pytest.raises(ProposalError, match=words) as raised:
        replaying(tmp_path, *answers).propose(ASKED)
    assert raised.value.kind == kind


def test_a_source_that_was_tried_is_said_so_and_then_given_up(tmp_path: Path) -> None:
    first = replaying(tmp_path, GOOD).propose(ASKED)
    (tmp_path / FILE).unlink()
    tried = frozenset({dataclasses.replace(SEED, source=first.source).digest})
    with pytest.raises(ProposalError, match="tried before") as raised:
        replaying(tmp_path, GOOD, GOOD).propose(request(5, standing(SEED), tried=tried))
    assert raised.value.kind == "repeated"
    assert (
        "tried before"
        in json.loads((tmp_path / FILE).read_text().splitlines()[-1])["messages"][-1]["content"]
    )


class TestOverHttp:
    @pytest.fixture(autouse=True)
    def planted_key(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("EVOTUNE_TEST_KEY", KEY)

    def settings(self, url: str, cap: float = 1.0) -> LlmSettings:
        return LlmSettings(
            model="openai/m",
            api_base=url,
            api_key_env="EVOTUNE_TEST_KEY",
            max_cost_usd=cap,
            input_usd_per_mtok=1.0,
            output_usd_per_mtok=10.0,
            timeout_s=20.0,
            max_tokens=1000,
            tries=2,
        )

    def test_a_busy_service_is_waited_for(self, tmp_path: Path) -> None:
        with serve(Reply(status=429, headers={"retry-after": "0.1"}), Reply(GOOD)) as service:
            proposal = from_settings(self.settings(service.url), tmp_path, tmp_path).propose(ASKED)
        assert "return x + x;" in proposal.source
        assert proposal.cost_usd == pytest.approx(1000e-6 + 100 * 10e-6)

    @pytest.mark.parametrize(
        ("reply", "kind"),
        [
            (Reply(status=401), "authentication"),
            (Reply(status=400), "bad_request"),
            (Reply(None, refusal="no"), "refusal"),
            (Reply(None, finish="length"), "truncated"),
            (Reply("What a nice kernel!"), "bad_edit"),
            (Reply(HALF), "bad_edit"),
            (Reply("<<<<<<< SEARCH\n" * 100_000), "bad_edit"),
            (Reply(f"Use {KEY}!\n{GOOD}".replace("x + x", f'"{KEY}"')), "Proposal("),
        ],
    )
    def test_the_key_is_found_nowhere(
        self, tmp_path: Path, reply: Reply, kind: str, capfd: pytest.CaptureFixture[str]
    ) -> None:
        with serve(reply) as service:
            mutator = from_settings(self.settings(service.url), tmp_path, tmp_path)
            told = outcome(mutator)
        written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
        printed = capfd.readouterr()
        assert service.headers[0]["authorization"] == f"Bearer {KEY}"
        assert written
        assert told.startswith(kind)
        assert KEY not in told
        assert KEY.encode() not in written
        assert KEY not in printed.out + printed.err

    def test_the_cap_ends_it_before_the_money_does(self, tmp_path: Path) -> None:
        replies = [Reply(GOOD.replace("x + x", f"x * {n}.5f"), tokens=(3000, 1000)) for n in range(20)]
        with serve(*replies) as service:
            mutator = from_settings(self.settings(service.url, cap=0.1), tmp_path, tmp_path)
            for seed in range(7):  # 0.013 a call, up to 0.02 reserved for it
                mutator.propose(request(seed, standing(SEED, long=1.0)))
            with pytest.raises(ProposalError, match="max_cost_usd = 0.1") as raised:
                mutator.propose(request(7, standing(SEED, long=1.0)))
        assert raised.value.kind == "budget"
        assert len(service.requests) == 7
        assert Transcript(tmp_path / FILE).spent_usd <= 0.1

    def test_what_was_recorded_replays_without_key_and_service(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with serve(Reply(ABSENT), Reply(GOOD)) as service:
            first = from_settings(self.settings(service.url), tmp_path, tmp_path).propose(ASKED)
        monkeypatch.delenv("EVOTUNE_TEST_KEY")
        (tmp_path / "again").mkdir()
        again = from_settings(LlmSettings(replay=FILE), tmp_path / "again", tmp_path).propose(ASKED)
        assert again.source == first.source
        assert again.cost_usd == 0

    def test_settings_that_cannot_work_are_refused_before_anything_runs(self, tmp_path: Path) -> None:
        unknown = dataclasses.replace(
            self.settings("http://127.0.0.1:1/v1"), input_usd_per_mtok=None, output_usd_per_mtok=None
        )
        with pytest.raises(StudyError, match="price"):
            from_settings(unknown, tmp_path, tmp_path)
        assert not list(tmp_path.iterdir())


def outcome(mutator: LlmMutator) -> str:
    """Everything that a proposal or its refusal tells."""
    try:
        return repr(mutator.propose(ASKED))
    except ProposalError as error:
        return f"{error.kind} {error!r} {error.__cause__!r}"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "model is missing"),
        ({"model": "openai/m"}, "api_key_env is missing"),
        ({"model": "m", "api_key_env": "K", "max_cost_usd": 0.0}, "max_cost_usd must be above 0"),
        ({"model": "m", "api_key_env": "K", "input_usd_per_mtok": 1.0}, "go together"),
        (
            {"model": "m", "api_key_env": "K", "input_usd_per_mtok": -1.0, "output_usd_per_mtok": 1.0},
            "negative",
        ),
        ({"model": "m", "api_key_env": "K", "timeout_s": 0.0}, "timeout_s"),
        ({"model": "m", "api_key_env": "K", "max_tokens": 0}, "max_tokens"),
        ({"model": "m", "api_key_env": "K", "tries": 0}, "tries"),
    ],
)
def test_settings_are_checked(fields: dict[str, str], words: str) -> None:
    with pytest.raises(StudyError, match=words):
        LlmSettings(**fields)  # type: ignore[arg-type]
