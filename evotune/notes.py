"""What a person reads about one candidate: the Markdown note of its trial, the files attached to it.

Text written by a model (sources, notes on branches) only ever appears inside code fences it cannot close.
"""

import difflib
import math
import re
from collections.abc import Mapping

from evotune.fitness.outcome import Failed, Outcome, Passed, Resources
from evotune.history import History
from evotune.promotion import Title, titles
from evotune.records import Asked, Contest, Judged, verdict
from evotune.search_space.branch import Branch
from evotune.search_space.template import Specialization, Template

# Optuna keeps a note in pieces of 2,045 characters, one storage write each.
_LONGEST_DIFF = 6000
_SUFFIX = {"c": "c", "cute": "py"}
_COMMENT = {"c": "//", "cute": "#"}


def note(history: History, asked: Asked, judged: Judged) -> str:
    """The trial's note."""
    branch = history.added(asked.branch)
    parts = [
        f"# Candidate {asked.index}: {verdict(judged.outcome)}",
        f"Branch {branch.id} ({branch.origin}), parent {branch.parent or 'none'}. Asked as {asked.purpose}.",
        fence(branch.note, "text"),
        _table("knob", "value", {name: str(value) for name, value in asked.knobs.items()}),
        _outcome(judged.outcome),
        _table("phase", "seconds", {name: f"{s:.3f}" for name, s in _phases(judged).items()}),
    ]
    changed = diff(history, asked.branch)
    if changed:
        parts += [f"## Difference to {branch.parent}", fence(changed[:_LONGEST_DIFF], "diff")]
    return "\n\n".join(part for part in parts if part)


def _phases(judged: Judged) -> Mapping[str, float]:
    saved = {"left out by races": judged.saved_s} if judged.saved_s else {}
    return {**judged.seconds, **saved}


def championship(history: History) -> str:
    """The study's note: champions, the evidence for them, what is published."""
    rows = {title.group: champion(history, title) for title in titles(history)}
    contests = [
        f"- {contest.group}: candidate {contest.challenger} against {contest.champion}, "
        f"{len(contest.blocks)} blocks, evidence {contest.evidence:.3g} "
        f"of {1 / contest.level:.3g}: {'promoted' if contest.promoted else _kept(contest)}"
        for contest in history.contests
    ]
    return "\n".join(["# Champions", "", _table("group", "champion", rows), "", "## Contests", "", *contests])


def champion(history: History, title: Title) -> str:
    """One line: who is champion of a group, and what is published of it."""
    if not title.contests:
        return "the default: no challenger was tested yet"
    if title.won is None:
        return f"the default: none of {len(title.contests)} challengers was shown to be faster"
    asked = history.entries[title.champion].asked
    name = f"candidate {title.champion} ({asked.branch})"
    if title.published is None:
        return f"{name}, not confirmed yet"
    found = title.published
    told = f"{name}, {found.median:.3f}× the default's speed "
    told += f"[{found.low:.3f}, {found.high:.3f}] at {found.coverage:.0%}"
    return told if title.resolved else f"{told}: {_unresolved(title)}"


def _unresolved(title: Title) -> str:
    resolution = title.confirmation.resolution if title.confirmation else None
    if resolution is None:
        return "not resolved"
    return f"not resolved, this machine tells gains from {math.expm1(resolution):.1%}"


def _kept(contest: Contest) -> str:
    if contest.failed is not None:
        return f"out, {contest.failed.failure.value} at {contest.failed.stage.value}"
    if contest.fallen:
        return "the champion is out"
    return "not shown to be faster"


def headline(outcome: Outcome) -> str:
    """One line on what became of a candidate."""
    match outcome:
        case Passed(values=values, level=level):
            shown = ", ".join(f"{v.name} {v.value:.4g} {v.unit}" for v in values)
            return f"passed ({level} gate): {shown}"
        case Failed(failure=failure, stage=stage, detail=detail, case=case):
            where = f"{stage.value}, {case}" if case else stage.value
            return f"{failure.value} at {where}: {detail}"
        case _:
            return f"to be tried again: {outcome.reason}"


def diff(history: History, branch: str) -> str:
    """Unified diff of a branch's source against its parent's; "" for the seed."""
    added = history.added(branch)
    if added.parent is None:
        return ""
    before = history.added(added.parent).source.splitlines()
    after = added.source.splitlines()
    return "\n".join(difflib.unified_diff(before, after, added.parent, branch, lineterm="", n=2))


def source_file(
    template: Template, branch: Branch, asked: Asked, spec: Specialization, knobs: object
) -> dict[str, str]:
    """The candidate's source as it was compiled, constants in the first line, by file name."""
    unit = template.unit(branch.source, knobs, spec)
    constants = " ".join(f"{name}={value}" for name, value in unit.constants)
    name = f"{branch.id}-{asked.index:05}.{_SUFFIX[unit.language]}"
    return {name: f"{_COMMENT[unit.language]} {spec.label}: {constants}\n{unit.text}"}


def log_file(outcome: Outcome) -> dict[str, str]:
    """What a compiler or a crashed worker printed, by file name; nothing where there is nothing."""
    return {"build.log": outcome.log} if isinstance(outcome, Failed) and outcome.log else {}


def fence(text: str, language: str) -> str:
    """A Markdown code block that the text cannot end."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    marks = "`" * max(3, longest + 1)
    return f"{marks}{language}\n{text}\n{marks}"


def _outcome(outcome: Outcome) -> str:
    if isinstance(outcome, Passed):
        times = {m.workload: f"{m.time_us:.1f} µs, {m.speedup:.3f}×" for m in outcome.measurements}
        error = f"Worst error {outcome.worst_error:.3f} of its bound"
        return "\n\n".join(
            [error, _table("workload", "median time, speedup", times), _resources(outcome.resources)]
        )
    if isinstance(outcome, Failed):
        log = fence(outcome.log[:_LONGEST_DIFF], "text") if outcome.log else ""
        return "\n\n".join(
            part for part in (fence(outcome.detail, "text"), log, _resources(outcome.resources)) if part
        )
    return fence(outcome.reason, "text")


def _resources(resources: Mapping[str, Resources]) -> str:
    rows = {
        f"{label} {name}": f"{value:,}"
        for label, read in resources.items()
        for name, value in read.values.items()
    }
    return _table("resource", "value", rows)


def _table(left: str, right: str, rows: Mapping[str, str]) -> str:
    if not rows:
        return ""
    lines = [f"| {left} | {right} |", "|---|---|"]
    return "\n".join(lines + [f"| {_cell(key)} | {_cell(value)} |" for key, value in rows.items()])


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
