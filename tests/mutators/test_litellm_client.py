"""litellm against a server that misbehaves, over real HTTP on loopback."""

import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from evotune.errors import StudyError
from evotune.mutators.client import Answer, CallError, LlmSettings, Message, Question
from evotune.mutators.litellm_client import LiteLlmClient, refuse_malicious
from tests.mutators.fake_service import Reply, serve

KEY = "sk-planted/0123456789+abc=="
QUESTION = Question((Message("system", "be brief"), Message("user", "hello")), seed=1)


@pytest.fixture(autouse=True)
def planted_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVOTUNE_TEST_KEY", KEY)


def settings(url: str) -> LlmSettings:
    return LlmSettings(
        model="openai/m",
        api_base=url,
        api_key_env="EVOTUNE_TEST_KEY",
        input_usd_per_mtok=2.0,
        output_usd_per_mtok=10.0,
        timeout_s=20.0,
        max_tokens=500,
    )


def ask(reply: Reply, timeout_s: float = 20.0) -> Answer:
    with serve(reply) as service:
        return LiteLlmClient(replace(settings(service.url), timeout_s=timeout_s)).ask(QUESTION)


def test_a_good_answer_has_text_usage_and_cost() -> None:
    with serve(Reply("hello back", tokens=(1000, 100))) as service:
        answer = LiteLlmClient(settings(service.url)).ask(QUESTION)
    assert (answer.text, answer.error) == ("hello back", None)
    assert (answer.input_tokens, answer.output_tokens) == (1000, 100)
    assert answer.cost_usd == pytest.approx(1000 * 2e-6 + 100 * 10e-6)
    assert service.requests[0]["max_tokens"] == 500
    assert [m["content"] for m in service.requests[0]["messages"]] == ["be brief", "hello"]
    assert service.headers[0]["authorization"] == f"Bearer {KEY}"


TROUBLE = {
    "401": (Reply(status=401), CallError.AUTHENTICATION),
    "403": (Reply(status=403), CallError.AUTHENTICATION),
    "400": (Reply(status=400), CallError.BAD_REQUEST),
    "404": (Reply(status=404), CallError.BAD_REQUEST),
    "422": (Reply(status=422), CallError.BAD_REQUEST),
    "429": (Reply(status=429), CallError.RATE_LIMIT),
    "500": (Reply(status=500), CallError.SERVER),
    "503": (Reply(status=503), CallError.SERVER),
    "529": (Reply(status=529), CallError.SERVER),
    "garbage": (Reply(raw=b"<html>proxy login</html>"), CallError.GARBAGE),
    "half a body": (Reply("x" * 1000, cut=True), CallError.GARBAGE),
    "no choice": (Reply(choices=False), CallError.GARBAGE),
    "refusal": (Reply(None, refusal="I cannot help with that"), CallError.REFUSAL),
    "filtered": (Reply("", finish="content_filter"), CallError.REFUSAL),
    "cut off": (Reply("half an ans", finish="length"), CallError.TRUNCATED),
    "cut off before a word": (Reply(None, finish="length"), CallError.TRUNCATED),
    "empty": (Reply(" \n"), CallError.EMPTY),
    "null": (Reply(None), CallError.EMPTY),
}


@pytest.mark.parametrize("name", TROUBLE)
def test_trouble_is_classified_once_and_in_one_line_without_the_key(name: str) -> None:
    reply, expected = TROUBLE[name]
    with serve(reply) as service:
        answer = LiteLlmClient(settings(service.url)).ask(QUESTION)
    assert answer.error is expected
    assert answer.detail
    assert "\n" not in answer.detail
    assert KEY not in repr(answer)
    assert len(service.requests) == 1  # the client never asks again by itself


def test_a_hang_ends_at_the_timeout_and_may_have_been_billed() -> None:
    answer = ask(Reply("late", hang_s=30.0), timeout_s=0.5)
    assert answer.error is CallError.TIMEOUT
    assert answer.seconds < 5.0
    assert answer.cost_usd > 0


def test_a_server_that_drips_bytes_cannot_hold_us() -> None:
    answer = ask(Reply("drip", drip=True), timeout_s=0.5)
    assert answer.error is CallError.TIMEOUT
    assert answer.seconds < 5.0


def test_a_refused_connection_costs_nothing() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # bound and not listening: the port answers with a reset
        url = f"http://127.0.0.1:{held.getsockname()[1]}/v1"
        answer = LiteLlmClient(settings(url)).ask(QUESTION)
    assert answer.error is CallError.CONNECTION
    assert url in answer.detail
    assert answer.cost_usd == 0


@pytest.mark.parametrize(("header", "expected"), [("7", 7.0), ("", None), ("soon", None)])
def test_a_busy_service_may_say_how_long(header: str, expected: float | None) -> None:
    assert ask(Reply(status=429, headers={"retry-after": header})).retry_after_s == expected


def test_a_huge_answer_is_kept_and_paid_for() -> None:
    answer = ask(Reply("x" * 5_000_000, tokens=(10, 1_000_000)))
    assert len(answer.text) == 5_000_000
    assert answer.cost_usd == pytest.approx(10.0, rel=1e-3)


def test_a_service_that_echoes_the_key_does_not_get_it_into_the_text() -> None:
    answer = ask(Reply(f"Authorization: Bearer {KEY}"))
    assert answer.text == "Authorization: Bearer [redacted]"


def test_an_answer_without_usage_costs_the_worst() -> None:
    with serve(Reply("hello", tokens=None)) as service:
        client = LiteLlmClient(settings(service.url))
        answer = client.ask(QUESTION)
    assert answer.cost_usd == client.worst_cost_usd(QUESTION)


def test_the_worst_cost_bounds_the_prompt_by_its_bytes() -> None:
    client = LiteLlmClient(settings("http://127.0.0.1:1/v1"))
    prompt_bytes = len(b"be brief") + len(b"hello")
    expected = (prompt_bytes + 2 * 16) * 2e-6 + 500 * 10e-6
    assert client.worst_cost_usd(QUESTION) == pytest.approx(expected)


def test_a_known_model_has_its_price_from_the_table() -> None:
    known = LlmSettings(model="anthropic/claude-sonnet-4-5", api_key_env="EVOTUNE_TEST_KEY")
    assert LiteLlmClient(known).price.output > LiteLlmClient(known).price.input > 0


def test_an_unknown_price_is_an_error_that_names_the_mend() -> None:
    unknown = LlmSettings(model="openai/m", api_base="http://127.0.0.1:1/v1")
    with pytest.raises(StudyError, match="price of openai/m is unknown.*input_usd_per_mtok"):
        LiteLlmClient(unknown)


def test_a_missing_key_is_an_error_that_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EVOTUNE_TEST_KEY")
    with pytest.raises(StudyError, match="EVOTUNE_TEST_KEY is not set"):
        LiteLlmClient(settings("http://127.0.0.1:1/v1"))


def test_a_server_without_a_key_gets_a_placeholder() -> None:
    with serve(Reply("hello")) as service:
        answer = LiteLlmClient(replace(settings(service.url), api_key_env="")).ask(QUESTION)
    assert answer.text == "hello"
    assert service.headers[0]["authorization"] == "Bearer none"


@pytest.mark.parametrize("version", ["1.82.7", "1.82.8", "1.107.0", "1.107.3"])
def test_releases_that_steal_credentials_are_refused(version: str) -> None:
    with pytest.raises(StudyError, match="change every"):
        refuse_malicious(version)


@pytest.mark.parametrize("version", ["1.82.6", "1.106.2", "1.110.2", "1.1070.0"])
def test_other_releases_are_not(version: str) -> None:
    refuse_malicious(version)


def test_a_dotenv_file_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """litellm would load .env files of the working directory into this process at import."""
    (tmp_path / ".env").write_text("EVOTUNE_FROM_DOTENV=1\n")
    program = (
        "import os, evotune; from evotune.mutators.litellm_client import _litellm; _litellm(); "
        "print('EVOTUNE_FROM_DOTENV' in os.environ)"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={"PYTHONPATH": str(root), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "False"
    assert not done.stderr.strip()
