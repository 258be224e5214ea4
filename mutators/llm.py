"""A language model proposes structural changes as edits confined to evolvable stages.

Every proposal has one second turn: for edits that do not apply, at once; else for the error of the first
candidate, in `repair`. What the model writes is data: compiled in the sandbox and judged like any source.
"""

import dataclasses
from pathlib import Path
from random import Random
from typing import Any

from evotune.errors import PatchError, ProposalError
from evotune.fitness.outcome import Failed
from evotune.mutators import patch, prompt
from evotune.mutators.client import Answer, Client, LlmSettings, Message, Question
from evotune.mutators.litellm_client import LiteLlmClient
from evotune.mutators.metered import MeteredClient
from evotune.mutators.mutator import Proposal, Request, Standing
from evotune.mutators.transcript import FILE, ReplayClient, Transcript
from evotune.search_space.space import Space
from evotune.search_space.template import digest

# `Proposal.extra["turns"]`: how often the model was asked for it.
_MOST_TURNS = 2


class LlmMutator:
    """Asks a `Client`. Deterministic in the request, given the client's answers."""

    name = "llm"

    def __init__(self, client: Client) -> None:
        self._client = client

    def propose(self, request: Request) -> Proposal:
        """Raises ProposalError; its `kind` is a `CallError`, "budget", "exhausted", "bad_edit" or "repeated".

        Raises StudyError when a person must act.
        """
        parent = _parent(request, Random(request.seed))
        draft = Proposal(parent.branch.source, parent.branch.id, self.name, "", extra={"turns": "0"})
        return self._turn(request, prompt.task(request, parent), draft)

    def repair(self, request: Request, proposal: Proposal, failed: Failed) -> Proposal | None:
        """None when the second turn is already used. Raises what `propose` raises."""
        if int(proposal.extra.get("turns", _MOST_TURNS)) >= _MOST_TURNS:
            return None
        draft = dataclasses.replace(proposal, cost_usd=0.0)
        return self._turn(request, prompt.repair(request, proposal, failed), draft)

    def _turn(self, request: Request, messages: tuple[Message, ...], draft: Proposal) -> Proposal:
        """The draft with an answer's edits; asks once more when they cannot be used and a turn is left."""
        answer = self._ask(Question(messages, request.seed))
        turns = int(draft.extra["turns"]) + 1
        draft = dataclasses.replace(
            draft,
            note=patch.summary(answer.text) or "a change without a word",
            cost_usd=draft.cost_usd + answer.cost_usd,
            reference=answer.reference,
            extra={"turns": str(turns)},
        )
        try:
            edited = _edited(request, draft.source, answer)
            return dataclasses.replace(draft, source=edited, start=_start(request, draft, answer))
        except (PatchError, ProposalError) as error:
            if turns >= _MOST_TURNS or len(answer.text) > patch.MAX_ANSWER_CHARS:  # not worth sending back
                raise _refused(error) from error
            return self._turn(request, prompt.again(messages, answer.text, str(error)), draft)

    def _ask(self, question: Question) -> Answer:
        answer = self._client.ask(question)
        if answer.error is not None:
            raise ProposalError(f"llm: {answer.detail or answer.error}", answer.error)
        return answer


def from_settings(settings: LlmSettings, folder: Path, base: Path) -> LlmMutator:
    """The mutator of a study that lies in `folder`; a replay path is relative to `base`.

    Raises StudyError: no key, an unknown price, a malicious litellm, a transcript that cannot be read.
    """
    if settings.replay:
        return LlmMutator(ReplayClient(base / settings.replay, Transcript(folder / FILE)))
    service = LiteLlmClient(settings)
    transcript = Transcript(folder / FILE, service.secrets)
    return LlmMutator(MeteredClient(service, transcript, settings))


def _parent(request: Request, rng: Random) -> Standing:
    """The best branch half of the time, the second a quarter, and so on."""
    weights = [0.5**rank for rank in range(len(request.standings))]
    return rng.choices(list(request.standings), weights)[0]


def _edited(request: Request, source: str, answer: Answer) -> str:
    """The source with the answer's edits. Raises PatchError, or ProposalError when it is not new."""
    edited = patch.apply(source, patch.parse(answer.text))
    if digest(edited) in request.tried:
        raise ProposalError("this very source was tried before; change something else", "repeated")
    return edited


def _start(request: Request, draft: Proposal, answer: Answer) -> Any | None:
    """The knobs to try first, when the answer names some. Raises PatchError when they cannot be."""
    named = patch.knob_line(answer.text)
    if not named:
        return draft.start
    space = Space(request.template, request.specializations)
    parent = next((s for s in request.standings if s.branch.id == draft.parent), request.standings[0])
    choices = dict(zip(space.names, space.choices, strict=True))
    values = space.encode(prompt.best_knobs(request, parent))
    for name, text in named.items():
        value = next((v for v in choices.get(name, ()) if str(v) == text), None)
        if value is None:
            raise PatchError(f"the line KNOBS: there is no knob {name} with a choice {text}")
        values[name] = value
    knobs = space.decode(values)
    reason = space.why_not(knobs)
    if reason is not None:
        raise PatchError(f"the line KNOBS: with the branch's other settings this is illegal: {reason}")
    return knobs


def _refused(error: PatchError | ProposalError) -> ProposalError:
    kind = error.kind if isinstance(error, ProposalError) else "bad_edit"
    return ProposalError(f"llm: {error}", kind)
