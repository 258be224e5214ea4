"""The conversation on disk, one JSON line per event, synced before anything relies on it.

A call leaves two lines: one before it is made, with the most it can cost, and one with all that was said.
When the process dies between the two, the reserved sum counts as spent. An answer on disk is never paid for
again: a resumed study that asks the same question gets it from here. The service's key is in no line.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from evotune.errors import ProposalError, StudyError
from evotune.mutators.client import Answer, CallError, Question, redact

FILE = "llm.jsonl"


@dataclass(frozen=True)
class Exchange:
    """A recorded call: who was asked what, and the answer. `line` is its place in the file, from 1.

    `replayed` is the line of the transcript that answered, 0 for a service. `question` is the digest.
    """

    line: int
    question: str
    answer: Answer
    replayed: int = 0


class Transcript:
    """Appends to the study's transcript and knows what is in it. The file appears with the first line.

    Raises StudyError when the file holds a line that it did not write; a last line cut short by a crash is
    cut off.
    """

    def __init__(self, path: Path, secrets: Sequence[str] = ()) -> None:
        self.path = path
        self._secrets = secrets
        self._reserved: dict[int, float] = {}
        self._exchanges: list[Exchange] = []
        self._size = 0  # bytes of whole lines
        self._lines = 0
        for event in _events(path):
            self._note(event)
            self._lines = event["line"]
        if path.exists():
            self._size = path.read_bytes().rfind(b"\n") + 1

    @property
    def spent_usd(self) -> float:
        """Everything spent or possibly spent by this study so far."""
        return sum(e.answer.cost_usd for e in self._exchanges) + sum(self._reserved.values())

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        return tuple(self._exchanges)

    def answer_to(self, question: Question) -> Answer | None:
        """What a model said to this very question before, if it was asked."""
        wanted = question.digest
        for exchange in self._exchanges:
            error = exchange.answer.error
            if exchange.question == wanted and (error is None or error.said):
                return exchange.answer
        return None

    def reserve(self, usd: float) -> int:
        """Note that a call that can cost so much is about to be made; returns its number, the line."""
        call = self._lines + 1
        self._append({"call": call, "reserved_usd": usd})
        return call

    def record(
        self, question: Question, answer: Answer, *, model: str, call: int = 0, replayed: int = 0
    ) -> Answer:
        """Note an answer; returns it with its place in the transcript as reference."""
        line = self._lines + 1
        fields = asdict(answer) | {"reference": f"{self.path.name}:{line}"}
        messages = [asdict(message) for message in question.messages]
        self._append(
            {"call": call, "question": question.digest, "seed": question.seed, "model": model}
            | {"replayed": replayed, "messages": messages, "answer": fields}
        )
        return self._exchanges[-1].answer

    def _append(self, event: Mapping[str, Any]) -> None:
        text = redact(json.dumps(event, ensure_ascii=False), self._secrets)
        data = text.encode(errors="backslashreplace") + b"\n"
        with self.path.open("r+b" if self.path.exists() else "wb") as file:
            file.truncate(self._size)
            file.seek(self._size)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        self._size += len(data)
        self._lines += 1
        self._note({"line": self._lines, **json.loads(data)})

    def _note(self, event: Mapping[str, Any]) -> None:
        if "reserved_usd" in event:
            self._reserved[event["call"]] = event["reserved_usd"]
        else:
            self._reserved.pop(event.get("call", 0), None)
            self._exchanges.append(_exchange(event))


class ReplayClient:
    """Answers from another transcript, or one written by hand: each answer once.

    The answer to the very same question comes first, else the next that was not used. Costs nothing, needs no
    key. A line written by hand needs no more than {"answer": "..."}.

    Raises ProposalError of kind "exhausted" when all answers are used.
    """

    def __init__(self, source: Path, own: Transcript) -> None:
        if not source.is_file():
            raise StudyError(f"[mutation.llm] replay: there is no file {source}")
        self._own = own
        self._source = _without_retries([_exchange(e) for e in _events(source) if "reserved_usd" not in e])
        self._used = {exchange.replayed for exchange in own.exchanges}

    def ask(self, question: Question) -> Answer:
        known = self._own.answer_to(question)
        if known is not None:
            return known
        left = [exchange for exchange in self._source if exchange.line not in self._used]
        wanted = question.digest
        chosen = next((e for e in left if e.question == wanted), left[0] if left else None)
        if chosen is None:
            raise ProposalError("the transcript has no more answers", "exhausted")
        self._used.add(chosen.line)
        said = chosen.answer
        answer = Answer(
            said.text, said.input_tokens, said.output_tokens, error=said.error, detail=said.detail
        )
        return self._own.record(question, answer, model="replay", replayed=chosen.line)


def _without_retries(exchanges: Sequence[Exchange]) -> list[Exchange]:
    """Without the failures after which the same question was asked again at once."""
    return [
        e
        for e, after in zip_longest(exchanges, exchanges[1:])
        if not (e.question and e.answer.error and after and after.question == e.question)
    ]


def _events(path: Path) -> Iterator[dict[str, Any]]:
    """Events with their line numbers; a last line without its newline was cut short and is left out."""
    if not path.exists():
        return
    lines = path.read_bytes().split(b"\n")[:-1]
    for number, line in enumerate(lines, 1):
        try:
            event = json.loads(line)
        except ValueError as error:
            raise StudyError(f"{path}:{number} is not a line of a transcript: {error}") from error
        if not isinstance(event, dict) or not ("answer" in event or "reserved_usd" in event):
            raise StudyError(f"{path}:{number} is not a line of a transcript: no answer in it")
        yield {**event, "line": number}


def _exchange(event: Mapping[str, Any]) -> Exchange:
    said = event["answer"]
    fields = {"text": said} if isinstance(said, str) else dict(said)
    try:
        if fields.get("error") is not None:
            fields["error"] = CallError(fields["error"])
        answer = Answer(**fields)
    except (TypeError, ValueError) as error:
        raise StudyError(f"transcript line {event['line']}: {error}") from error
    return Exchange(event["line"], event.get("question", ""), answer, event.get("replayed", 0))
