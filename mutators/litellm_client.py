"""One call over HTTP through litellm: prices, the call itself, what its errors mean.

litellm is imported when a call or a price is needed: it takes 3 to 7 s and 200 MB. Its own retries and budget
are not used. Tried with 1.110.2 against a fault-injecting server: `num_retries` hides a 401 behind a missing
package, `max_budget` does not stop calls, a refused connection and a garbage body are both reported as status
500, and an answer cut off by `max_tokens` with empty content counts as success.
"""

import importlib.metadata
import logging
import os
import queue
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from evotune.errors import StudyError
from evotune.mutators.client import Answer, CallError, LlmSettings, Question, api_key, redact

# Published with stolen tokens; they read environment variables at import.
_MALICIOUS = ("1.82.7", "1.82.8")
_MALICIOUS_LINE = "1.107."
# Room for the few tokens that a chat template puts around each message.
_TOKENS_PER_MESSAGE = 16
# Grace beyond the client's own timeout, which restarts with every byte that a slow server sends.
_GRACE_S = 1.0


@dataclass(frozen=True)
class Price:
    """US dollars per token."""

    input: float
    output: float

    def of(self, input_tokens: int, output_tokens: int) -> float:
        return input_tokens * self.input + output_tokens * self.output


def refuse_malicious(version: str) -> None:
    """Raises StudyError for a release of litellm that is known to steal credentials."""
    if version in _MALICIOUS or version.startswith(_MALICIOUS_LINE):
        raise StudyError(
            f"litellm {version} was published by attackers and steals credentials; uninstall it, change "
            "every key that was on this machine, then install 'litellm>=1.110.2,<1.111'"
        )


class LiteLlmClient:
    """Asks a service once per question; no retry, no cap, no record.

    Raises StudyError when it is made: no key, a malicious litellm, a price that nobody knows.
    """

    def __init__(self, settings: LlmSettings) -> None:
        self.settings = settings
        self._key = api_key(settings)
        self.price = _price(settings)

    @property
    def secrets(self) -> tuple[str, ...]:
        return (self._key,) if self._key else ()

    def worst_cost_usd(self, question: Question) -> float:
        """No call costs more: a tokenizer gives at most one token per byte, and the answer is bounded."""
        prompt = sum(len(m.content.encode()) + _TOKENS_PER_MESSAGE for m in question.messages)
        return self.price.of(prompt, self.settings.max_tokens)

    def ask(self, question: Question) -> Answer:
        begun = time.monotonic()
        answer = self._within(lambda: self._call(question))
        if answer.error and answer.error.may_be_billed and not answer.output_tokens:
            answer = replace(answer, cost_usd=self.worst_cost_usd(question))
        return replace(
            answer,
            text=redact(answer.text, self.secrets),
            detail=redact(answer.detail, self.secrets),
            seconds=time.monotonic() - begun,
        )

    def _within(self, call: Callable[[], Answer]) -> Answer:
        """The call's answer, or TIMEOUT: each byte of a slow server resets the HTTP client's own timer."""
        box: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        threading.Thread(target=lambda: box.put(call()), daemon=True, name="llm-call").start()
        try:
            return box.get(timeout=self.settings.timeout_s + _GRACE_S)
        except queue.Empty:
            return Answer(
                "", error=CallError.TIMEOUT, detail=f"no answer within {self.settings.timeout_s:g} s"
            )

    def _call(self, question: Question) -> Answer:
        settings, litellm = self.settings, _litellm()
        options: dict[str, Any] = {}
        if settings.api_base:
            options["api_base"] = settings.api_base
        if settings.temperature is not None:
            options["temperature"] = settings.temperature
        try:
            with _quiet():
                response = litellm.completion(
                    model=settings.model,
                    messages=[{"role": m.role, "content": m.content} for m in question.messages],
                    api_key=self._key or "none",
                    timeout=settings.timeout_s,
                    max_tokens=settings.max_tokens,
                    max_retries=0,
                    num_retries=0,
                    drop_params=True,
                    **options,
                )
                return self._answer(question, response)
        # litellm raises what its many providers' clients raise, down to bare Exception.
        except Exception as error:  # noqa: BLE001
            return failure(error, settings)

    def _answer(self, question: Question, response: Any) -> Answer:
        usage = response.usage
        spent = (int(usage.prompt_tokens or 0), int(usage.completion_tokens or 0))
        cost = self.price.of(*spent) if spent[0] else self.worst_cost_usd(question)
        error, detail, text = _complete(response)
        return Answer(text, *spent, cost_usd=cost, error=error, detail=detail)


def failure(error: Exception, settings: LlmSettings) -> Answer:
    """What an exception of litellm means, as one line that names no secret."""
    status = int(getattr(error, "status_code", None) or 0)
    kind = _kind(error, status)
    words = " ".join(str(error).split())[:300]
    if kind is CallError.AUTHENTICATION:  # services quote part of the key they refuse
        words = f"the service refused the key in {settings.api_key_env or 'no variable'} (status {status})"
    elif kind is CallError.CONNECTION:
        words = f"nothing answers at {settings.api_base or settings.model}"
    elif kind is CallError.TIMEOUT:
        words = f"no answer within {settings.timeout_s:g} s"
    return Answer("", error=kind, detail=words, retry_after_s=_retry_after(error))


def _kind(error: Exception, status: int) -> CallError:
    causes = [type(cause).__name__ for cause in _chain(error)]
    if "ConnectError" in causes:
        return CallError.CONNECTION
    if any("Timeout" in name for name in causes) or status == 408:
        return CallError.TIMEOUT
    if status in (401, 403):
        return CallError.AUTHENTICATION
    if status == 429:
        return CallError.RATE_LIMIT
    if 400 <= status < 500:
        return CallError.BAD_REQUEST
    # litellm's own status 500 for a body it could not read, or that ended early: there was no response with
    # that status.
    answered = getattr(error, "litellm_response_headers", None) is not None
    return CallError.SERVER if status >= 500 and answered else CallError.GARBAGE


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__


def _retry_after(error: Exception) -> float | None:
    headers = getattr(error, "litellm_response_headers", None) or {}
    value = str(headers.get("retry-after", ""))
    return float(value) if value.replace(".", "", 1).isdigit() else None


def _complete(response: Any) -> tuple[CallError | None, str, str]:
    """(error, detail, text) of a response: whether it is a whole answer."""
    if not response.choices:
        return CallError.GARBAGE, "the service answered without a choice", ""
    choice = response.choices[0]
    text = choice.message.content or ""
    refusal = getattr(choice.message, "refusal", None)
    if refusal or choice.finish_reason == "content_filter":
        return (
            CallError.REFUSAL,
            f"the model refused: {' '.join(str(refusal or 'filtered').split())[:200]}",
            text,
        )
    if choice.finish_reason == "length":
        return CallError.TRUNCATED, "the answer was cut off at max_tokens", text
    if not text.strip():
        return CallError.EMPTY, "the answer is empty", ""
    return None, "", text


def _price(settings: LlmSettings) -> Price:
    """From the settings, else from litellm's table. Raises StudyError when neither knows."""
    refuse_malicious(_installed())
    if settings.input_usd_per_mtok is not None and settings.output_usd_per_mtok is not None:
        return Price(settings.input_usd_per_mtok / 1e6, settings.output_usd_per_mtok / 1e6)
    litellm = _litellm()
    try:
        with _quiet():
            info = litellm.get_model_info(settings.model)
    # get_model_info raises bare Exception for a model it does not know.
    except Exception:  # noqa: BLE001
        info = {}
    prices = [info.get(key) for key in ("input_cost_per_token", "output_cost_per_token")]
    if None in prices:
        raise StudyError(
            f"[mutation.llm] the price of {settings.model} is unknown, so max_cost_usd could not be kept; "
            "give input_usd_per_mtok and output_usd_per_mtok (0 for a model of your own)"
        )
    return Price(float(prices[0]), float(prices[1]))


def _installed() -> str:
    try:
        return importlib.metadata.version("litellm")
    except importlib.metadata.PackageNotFoundError as error:
        raise StudyError("litellm is not installed: pip install 'litellm>=1.110.2,<1.111'") from error


def _litellm() -> Any:
    """litellm, kept from the network (price map), from .env files (which it would load) and from chatter."""
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    os.environ["LITELLM_MODE"] = "PRODUCTION"
    with _quiet():
        import litellm
    litellm.suppress_debug_info = True
    litellm.telemetry = False
    for name in ("LiteLLM", "LiteLLM Router", "LiteLLM Proxy"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    return litellm


@contextmanager
def _quiet() -> Iterator[None]:
    """pydantic warns about litellm's own types on the first call (1.110.2): nothing a user could mend."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"pydantic\b", category=UserWarning)
        warnings.filterwarnings("ignore", module=r"litellm\b")
        yield
