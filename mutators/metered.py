"""A client that cannot overspend, waits when the service is busy, and writes everything down."""

import time
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Protocol

from evotune.errors import ProposalError
from evotune.mutators.client import Answer, LlmSettings, Question
from evotune.mutators.transcript import Transcript

# A service that asks for a longer pause is given up on: the study has other things to do.
_LONGEST_WAIT_S = 60.0


class Service(Protocol):
    """One call, no retry. `worst_cost_usd` bounds what the call can cost, known before it is made."""

    def ask(self, question: Question) -> Answer: ...

    def worst_cost_usd(self, question: Question) -> float: ...


class MeteredClient:
    """Asks until there is an answer, at most `settings.tries` times, and never beyond `max_cost_usd`.

    The cap holds over all runs of a study, since what is spent is read from its transcript. A service that
    ignores max_tokens can exceed it once, by that call.
    """

    def __init__(
        self,
        service: Service,
        transcript: Transcript,
        settings: LlmSettings,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._service = service
        self._transcript = transcript
        self._settings = settings
        self._sleep = sleep

    def ask(self, question: Question) -> Answer:
        """Raises ProposalError of kind "budget" when the next call could exceed the cap."""
        known = self._transcript.answer_to(question)
        if known is not None:
            return known
        rng = Random(question.seed)
        answer, cost = self._call(question), 0.0
        for attempt in range(1, self._settings.tries):
            wait = answer.retry_after_s or 2.0 ** (attempt - 1) * rng.uniform(1.0, 1.5)
            if answer.error is None or not answer.error.passing or wait > _LONGEST_WAIT_S:
                break
            self._sleep(wait)
            cost += answer.cost_usd
            answer = self._call(question)
        return replace(answer, cost_usd=cost + answer.cost_usd)

    def _call(self, question: Question) -> Answer:
        worst, spent = self._service.worst_cost_usd(question), self._transcript.spent_usd
        cap = self._settings.max_cost_usd
        if spent + worst > cap:
            raise ProposalError(
                f"the next call could cost ${worst:.4f}; ${spent:.4f} of max_cost_usd = {cap:g} are spent",
                "budget",
            )
        call = self._transcript.reserve(worst)
        answer = self._service.ask(question)
        return self._transcript.record(question, answer, model=self._settings.model, call=call)
