"""What a model is told, from a request to messages. Pure functions; the words are in `prompts/*.md`.

A failure's numbers are told only where the case is public (the compiler, the object check, the smoke rung):
of the later rungs the model learns the name, or it would fit the hidden cases instead of mending the kernel.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from importlib.resources import files
from string import Template as Text
from typing import Any

from evotune.fitness.outcome import Failed, Passed, Stage
from evotune.mutators.client import Message
from evotune.mutators.mutator import Proposal, Request, Standing
from evotune.mutators.speed import group_speedups, speedups
from evotune.search_space.branch import stages
from evotune.search_space.space import Space

_PUBLIC = (Stage.BUILD, Stage.INSPECT, Stage.SMOKE)
_FENCES = {"c": "c", "cute": "python"}
_MOST_LOG_CHARS = 2000
_MOST_REASONS = 8
_MOST_FAILURES = 4
_MOST_BRANCHES = 20


def task(request: Request, parent: Standing) -> tuple[Message, ...]:
    """Asks for a structural change of a branch."""
    speeds = group_speedups(parent)
    slowest = min(speeds, key=lambda group: speeds[group]) if speeds else ""
    text = _fill(
        "task",
        **_kernel(request, parent.branch.source),
        branch=parent.branch.id,
        knobs=_lines(_knobs(request)),
        illegal=_lines(_illegal(request, parent)),
        speeds=_lines(_speeds(parent)),
        failures=_recent(parent.failures),
        tried=_lines(_tried(request)),
        aim=f"group {slowest}" if slowest else "it",
        start=_settings(best_knobs(request, parent)),
    )
    return (Message("system", _read("system")), Message("user", text))


def repair(request: Request, proposal: Proposal, failed: Failed) -> tuple[Message, ...]:
    """Asks to mend a proposal whose first candidate failed."""
    text = _fill(
        "repair",
        **_kernel(request, proposal.source),
        note=printable(proposal.note, 160),
        failures=failure(failed),
    )
    return (Message("system", _read("system")), Message("user", text))


def again(messages: Sequence[Message], answer: str, reason: str) -> tuple[Message, ...]:
    """The conversation so far, the answer, and why its edits could not be used."""
    return (*messages, Message("assistant", answer), Message("user", _fill("again", reason=reason)))


def best_knobs(request: Request, standing: Standing) -> Any:
    """The branch's best knobs so far; the default before anything passed."""
    return (
        standing.best[0][0] if standing.best else Space(request.template, request.specializations).default()
    )


def failure(failed: Failed) -> str:
    """A failure in words: everything where the case is public, else its class and the gate's names."""
    head = f"It failed at {failed.stage} ({failed.failure})"
    if failed.stage not in _PUBLIC:
        return f"{head}, case: {printable(failed.case, 80) or 'not named'}."
    log = failed.log.strip()[-_MOST_LOG_CHARS:].replace("```", "'''")
    told = f"{head}: {printable(failed.detail, 300)}"
    return f"{told}\n\n```\n{log}\n```" if log else told


def printable(text: str, limit: int) -> str:
    """One line without control characters."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())[:limit]


def _kernel(request: Request, source: str) -> dict[str, str]:
    language = request.template.language
    return {
        "mathematics": _about(request.template.operator),
        "specializations": ", ".join(spec.label for spec in request.specializations),
        "language": _read(language).strip(),
        "fence": _FENCES[language],
        "source": source.rstrip("\n"),
        "stages": ", ".join(stages(source)),
    }


def _about(operator: str) -> str:
    page = files("evotune.mutators").joinpath("prompts", f"{operator}.md")
    return (
        page.read_text(encoding="utf-8").strip()
        if page.is_file()
        else f"The operator {operator}; see the source."
    )


def _knobs(request: Request) -> Iterator[str]:
    for field in dataclasses.fields(request.template.knobs):
        values = ", ".join(str(value) for value in field.metadata["choices"])
        yield f"{field.name} in {{{values}}}: {field.metadata['doc']}"


def _illegal(request: Request, parent: Standing) -> Iterator[str]:
    """Reasons met one knob away from the branch's best setting: the walls it stands at."""
    space = Space(request.template, request.specializations)
    base = best_knobs(request, parent)
    reasons: dict[str, None] = {}
    for name, values in zip(space.names, space.choices, strict=True):
        for value in values:
            reason = space.why_not(dataclasses.replace(base, **{name: value}))
            if reason:
                reasons.setdefault(f"{name} = {value}: {reason}")
    return iter(list(reasons)[:_MOST_REASONS])


def _speeds(parent: Standing) -> Iterator[str]:
    for knobs, passed in parent.best[:3]:
        groups = ", ".join(f"{group} {speedup:.2f}x" for group, speedup in sorted(speedups(passed).items()))
        error = f"error {passed.worst_error:.2f} of its bound"
        yield f"{groups} with {_settings(knobs)}; {_resources(passed)}{error}"


def _settings(knobs: Any) -> str:
    return ", ".join(f"{field.name}={getattr(knobs, field.name)}" for field in dataclasses.fields(knobs))


def _resources(passed: Passed) -> str:
    worst: dict[str, int] = {}
    for resources in passed.resources.values():
        for name, value in resources.values.items():
            worst[name] = max(worst.get(name, value), value)
    return "".join(f"{name} {value}; " for name, value in sorted(worst.items()))


def _recent(failures: Sequence[tuple[Any, Failed]]) -> str:
    if not failures:
        return "None of its candidates failed lately."
    parts = [f"With {_settings(knobs)}: {failure(failed)}" for knobs, failed in failures[:_MOST_FAILURES]]
    return "Candidates of it that failed lately:\n\n" + "\n\n".join(parts)


def _tried(request: Request) -> Iterator[str]:
    """Every living branch in one line; notes may be a model's words and are quoted."""
    for standing in request.standings[:_MOST_BRANCHES]:
        branch, speeds = standing.branch, group_speedups(standing)
        fast = ", ".join(f"{group} {speed:.2f}x" for group, speed in sorted(speeds.items())) or "no pass yet"
        yield f'{branch.id} (from {branch.parent or "nothing"}): "{printable(branch.note, 120)}"; {fast}'


def _lines(items: Iterable[str]) -> str:
    return "\n".join(f"- {item}" for item in items) or "- none"


def _fill(page: str, **values: str) -> str:
    return Text(_read(page)).substitute(values)


@cache
def _read(page: str) -> str:
    return files("evotune.mutators").joinpath("prompts", f"{page}.md").read_text(encoding="utf-8")
