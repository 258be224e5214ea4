"""Questions to a language model and answers from it: settings, messages, the client protocol, error classes.

`litellm_client` implements the protocol over HTTP, `metered` adds cost cap, waiting and transcript, and
`transcript` answers from disk. Nothing here imports litellm.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, Protocol
from urllib.parse import quote

from evotune.errors import StudyError
from evotune.search_space.template import digest

REDACTED = "[redacted]"
# Services give keys of 20 characters and more; shorter ones are the placeholders that local servers take, and
# replacing such a word wherever it occurs would garble the text.
_SHORTEST_SECRET = 8


@dataclass(frozen=True)
class LlmSettings:
    """[mutation.llm] of study.toml.

    Attributes:
        model: as litellm names it: "anthropic/claude-sonnet-4-5", "openai/NAME" with `api_base` for any
            server that speaks OpenAI's protocol; needed unless `replay` is given.
        api_base: address of the service, such as "http://127.0.0.1:8000/v1"; "" for the provider's own.
        api_key_env: name of the environment variable that holds the key, never the key itself; may be ""
            only together with `api_base`, for a server that asks for none.
        max_cost_usd: hard cap over the whole study, all its runs together.
        input_usd_per_mtok: price of a million prompt tokens; needed where litellm does not know the model.
        output_usd_per_mtok: likewise of completion tokens; both are given or none.
        timeout_s: wall time of one call.
        max_tokens: longest answer, reasoning included.
        temperature: None leaves it to the service.
        tries: calls made for one question when the service is busy or failing.
        replay: a transcript that answers instead of a service; needs no key and costs nothing.
    """

    model: str = ""
    api_base: str = ""
    api_key_env: str = ""
    max_cost_usd: float = 1.0
    input_usd_per_mtok: float | None = None
    output_usd_per_mtok: float | None = None
    timeout_s: float = 120.0
    max_tokens: int = 8192
    temperature: float | None = 0.7
    tries: int = 3
    replay: str = ""

    def __post_init__(self) -> None:
        one_price = (self.input_usd_per_mtok is None) != (self.output_usd_per_mtok is None)
        faults = (
            (not self.model and not self.replay, "model is missing"),
            (self.max_cost_usd <= 0, f"max_cost_usd must be above 0, but is {self.max_cost_usd}"),
            (one_price, "input_usd_per_mtok and output_usd_per_mtok go together: give both or none"),
            (
                (self.input_usd_per_mtok or 0) < 0 or (self.output_usd_per_mtok or 0) < 0,
                "a price is negative",
            ),
            (self.timeout_s <= 0, f"timeout_s must be above 0, but is {self.timeout_s}"),
            (self.max_tokens <= 0, f"max_tokens must be above 0, but is {self.max_tokens}"),
            (self.tries <= 0, f"tries must be above 0, but is {self.tries}"),
            (
                not (self.api_key_env or self.api_base or self.replay),
                "api_key_env is missing: the name of the environment variable with the service's key",
            ),
        )
        for broken, fault in faults:
            if broken:
                raise StudyError(f"[mutation.llm] {fault}")


class CallError(StrEnum):
    """Why a question got no usable answer; the `kind` of the ProposalError that follows."""

    AUTHENTICATION = "authentication"
    BAD_REQUEST = "bad_request"
    RATE_LIMIT = "rate_limit"
    SERVER = "server"
    TIMEOUT = "timeout"
    CONNECTION = "connection"  # nothing listens there: the question was never received
    GARBAGE = "garbage"  # not the protocol's JSON, or cut off on the way
    REFUSAL = "refusal"
    TRUNCATED = "truncated"  # max_tokens were used up
    EMPTY = "empty"

    @property
    def passing(self) -> bool:
        """Worth asking again a little later."""
        return self in _PASSING

    @property
    def said(self) -> bool:
        """It is the model's answer, not trouble on the way: asking again would only cost again."""
        return self in (CallError.REFUSAL, CallError.TRUNCATED, CallError.EMPTY)

    @property
    def may_be_billed(self) -> bool:
        """The service may have done the work although no usage came back."""
        return self in (CallError.TIMEOUT, CallError.GARBAGE)


_PASSING = (
    CallError.RATE_LIMIT,
    CallError.SERVER,
    CallError.TIMEOUT,
    CallError.CONNECTION,
    CallError.GARBAGE,
)


@dataclass(frozen=True)
class Message:
    role: Literal["system", "user", "assistant"]
    content: str


@dataclass(frozen=True)
class Question:
    """A conversation that waits for an answer. `seed` tells equal conversations of two proposals apart."""

    messages: tuple[Message, ...]
    seed: int

    @property
    def digest(self) -> str:
        parts = [part for message in self.messages for part in (message.role, message.content)]
        return digest(str(self.seed), *parts)


@dataclass(frozen=True)
class Answer:
    """What came back.

    Attributes:
        text: "" when `error` is set, or what there is of it.
        input_tokens, output_tokens: as the service counted; 0 when it did not say.
        cost_usd: what this call cost at most.
        error: why `text` is not a whole answer; None when it is.
        detail: one line about the error.
        retry_after_s: how long the service asks to wait.
        reference: where the call is recorded; "" for a client that keeps no record.
    """

    text: str
    input_tokens: int = 0
    output_tokens: int = 0
    cost_usd: float = 0.0
    seconds: float = 0.0
    error: CallError | None = None
    detail: str = ""
    retry_after_s: float | None = None
    reference: str = ""


class Client(Protocol):
    """Answers questions. Trouble comes back in `Answer.error`; raises StudyError for what the user must mend
    and ProposalError when no more questions can be asked (budget spent, transcript at its end)."""

    def ask(self, question: Question) -> Answer: ...


def api_key(settings: LlmSettings) -> str:
    """The key from the environment variable the settings name; "" where none is asked for.

    Raises StudyError, which names the variable, when it is not set.
    """
    if not settings.api_key_env:
        return ""
    key = os.environ.get(settings.api_key_env, "").strip()
    if not key:
        raise StudyError(
            f"[mutation.llm] the environment variable {settings.api_key_env} is not set; "
            'put the key there, or take "llm" out of [mutation] operators'
        )
    return key


def redact(text: str, secrets: Sequence[str]) -> str:
    """`text` without any of the secrets, as they are, JSON-escaped or percent-encoded."""
    for secret in secrets:
        if len(secret) >= _SHORTEST_SECRET:
            for form in (secret, json.dumps(secret)[1:-1], quote(secret, safe="")):
                text = text.replace(form, REDACTED)
    return text
