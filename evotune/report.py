"""What `status` and `show` tell, as JSON and as tables for a terminal."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from evotune.errors import StudyError
from evotune.history import Entry, History, primary
from evotune.mutators.transcript import FILE, Transcript
from evotune.notes import champion, diff, headline
from evotune.pareto import best_per_column, front
from evotune.promotion import Title, spent, standing, titles
from evotune.records import to_json, verdict
from evotune.throughput import line, throughput


def spent_usd(history: History, directory: Path) -> float:
    """Of all operators. An LLM's is in its transcript, where refused and unusable answers count too."""
    others = sum(branch.cost_usd for branch in history.branches if branch.operator != "llm")
    return others + Transcript(directory / FILE).spent_usd


def status(history: History, cost_usd: float, legal_share: float | None = None) -> dict[str, Any]:
    """State of a study: branches, best per objective, champions, front, failure classes, spend. JSON-ready.

    `legal_share` is the legal part of the knobs' grid, see `Space.legal_share`.
    """
    judged, sound = history.judged, standing(history)
    study = history.begun.config["study"]
    best = best_per_column(history.columns, sound)
    return {
        "name": study["name"],
        "trials": {"asked": len(history.entries), "judged": len(judged), "wanted": study["trials"]},
        "elapsed_s": round(history.elapsed_s, 1),
        "cost_usd": cost_usd,
        "passed": sum(entry.passed is not None for entry in judged),
        "failures": dict(history.failures().most_common()),
        "refusals": [
            {"operator": refusal.operator, "problem": refusal.problem, "detail": refusal.detail}
            for refusal in history.refusals
        ],
        "best": {
            column.name: {**candidate(history, best[column.name]), "unit": column.unit}
            for column in history.columns
            if column.name in best
        },
        "champions": [_champion(history, title) for title in titles(history)],
        "seconds": _seconds(history),
        "throughput": throughput(history, legal_share),
        "front": [candidate(history, entry) for entry in front(history.columns, sound)],
        "branches": [_branch(history, branch.id) for branch in history.branches],
    }


def candidate(history: History, entry: Entry) -> dict[str, Any]:
    """A passed candidate in short."""
    values = {value.name: value.value for value in entry.passed.values} if entry.passed else {}
    asked = entry.asked
    return {"candidate": asked.index, "branch": asked.branch, "knobs": dict(asked.knobs), "values": values}


def _champion(history: History, title: Title) -> dict[str, Any]:
    """`resolved` is None before there is a value, `resolution` (a log-ratio) where it was not measured."""
    won, published = title.won, title.published
    return {
        "group": title.group,
        "champion": title.champion,
        "branch": history.entries[title.champion].asked.branch,
        "told": champion(history, title),
        "contests": len(title.contests),
        "blocks": len(won.blocks) if won else 0,
        "evidence": won.evidence if won else None,
        "level": won.level if won else None,
        "speedup": asdict(published) if published else None,
        "resolution": title.confirmation.resolution if title.confirmation else None,
        "resolved": title.resolved,
    }


def _seconds(history: History) -> dict[str, float]:
    """Of timing candidates, what races left out of it, and what promotions and confirmations took."""
    judged = [entry.judged for entry in history.judged if entry.judged]
    return {
        "timing": round(sum(judgement.seconds.get("time", 0.0) for judgement in judged), 3),
        "saved_by_races": round(sum(judgement.saved_s for judgement in judged), 3),
        "promotion": round(spent(history), 3),
    }


def _branch(history: History, branch: str) -> dict[str, Any]:
    added, mine = history.added(branch), history.of(branch)
    best = best_per_column(history.columns, [e for e in standing(history) if e.asked.branch == branch])
    columns = {column.name: column for column in history.columns}
    return {
        "id": branch,
        "parent": added.parent,
        "origin": added.origin,
        "note": added.note,
        "lives": history.lives(branch),
        "candidates": len(mine),
        "passed": sum(entry.passed is not None for entry in mine),
        "best": {name: candidate(history, best[name])["values"][name] for name in columns if name in best},
    }


def find(history: History, number: int) -> Entry:
    """A candidate by its number. Raises StudyError."""
    if not 0 <= number < len(history.entries):
        count = len(history.entries)
        known = f"candidates 0 to {count - 1} are there" if count else "no candidate was asked for yet"
        raise StudyError(f"no candidate {number}; {known}")
    return history.entries[number]


def show(history: History, entry: Entry) -> dict[str, Any]:
    """All that is known of a candidate. JSON-ready."""
    asked = entry.asked
    added = history.added(asked.branch)
    result = to_json(entry.judged) if entry.judged else None
    return {
        "candidate": asked.index,
        "trial": asked.trial,
        "step": asked.step,
        "purpose": asked.purpose,
        "branch": {name: getattr(added, name) for name in ("id", "parent", "origin", "note")},
        "knobs": dict(asked.knobs),
        "verdict": verdict(entry.judged.outcome) if entry.judged else "in flight",
        "result": result,
        "diff": diff(history, asked.branch),
        "source": added.source,
    }


def status_view(state: Mapping[str, Any]) -> RenderableType:
    """`status` for people."""
    trials = state["trials"]
    failed = ", ".join(f"{name} {count}" for name, count in state["failures"].items()) or "none"
    head = Text(
        f"{state['name']}: {trials['judged']} of {trials['wanted']} candidates judged in "
        f"{state['elapsed_s']:.0f} s, {state['passed']} passed; failed: {failed}; "
        f"spent ${state['cost_usd']:.2f}"
    )
    parts: list[RenderableType] = [head, _best_table(state["best"]), _branches_table(state["branches"])]
    parts += [_champions_table(state["champions"]), Text(_seconds_line(state))]
    rate = line(state["throughput"])
    parts += [Text(rate[0].upper() + rate[1:])] if rate else []
    if state["front"]:
        parts.append(_front_table(state["front"]))
    else:
        parts.append(Text("The front is empty: no candidate has passed."))
    parts += [Text(f"{r['operator']}: {r['problem']}: {r['detail']}") for r in state["refusals"][-3:]]
    return Group(*parts)


def show_view(told: Mapping[str, Any], history: History, entry: Entry) -> RenderableType:
    """`show` for people."""
    branch = told["branch"]
    lines = Table.grid(padding=(0, 2))
    for name, value in (
        ("candidate", f"{told['candidate']} (trial {told['trial']}, step {told['step']}, {told['purpose']})"),
        (
            "branch",
            f"{branch['id']}, parent {branch['parent'] or 'none'}, {branch['origin']}: {branch['note']}",
        ),
        ("knobs", ", ".join(f"{knob}={setting}" for knob, setting in told["knobs"].items())),
        ("verdict", headline(entry.judged.outcome) if entry.judged else "in flight"),
    ):
        lines.add_row(Text(name, style="bold"), Text(value))
    parts: list[RenderableType] = [lines]
    if entry.passed:
        parts.append(_times_table(entry))
    if entry.failed and entry.failed.log:
        parts.append(Panel(Text(entry.failed.log), title="log"))
    if told["diff"]:
        parts.append(Syntax(told["diff"], "diff", theme="ansi_dark", word_wrap=True))
    return Group(*parts)


def _best_table(best: Mapping[str, Any]) -> Table:
    table = Table(
        "objective", "best", "unit", "candidate", "branch", title="Best per objective", title_justify="left"
    )
    for name, found in best.items():
        row = (name, f"{found['values'][name]:.4g}", found["unit"], str(found["candidate"]), found["branch"])
        table.add_row(*map(Text, row))
    return table


def _branches_table(branches: list[Mapping[str, Any]]) -> Table:
    table = Table(
        "branch",
        "parent",
        "origin",
        "state",
        "passed",
        "best",
        "note",
        title="Branches",
        title_justify="left",
    )
    for b in branches:
        speeds = ", ".join(
            f"{name.partition(':')[2]} {value:.3g}×" for name, value in b["best"].items() if ":" in name
        )
        state = "lives" if b["lives"] else "dead" if b["candidates"] else "waits"
        row = (
            b["id"],
            b["parent"] or "",
            b["origin"],
            state,
            f"{b['passed']}/{b['candidates']}",
            speeds,
            b["note"],
        )
        table.add_row(*map(Text, row))
    return table


def _champions_table(champions: list[Mapping[str, Any]]) -> Table:
    table = Table("group", "champion", "evidence", "level", "blocks", title="Champions", title_justify="left")
    for c in champions:
        tested = c["evidence"] is not None
        row = (
            c["group"],
            c["told"],
            f"{c['evidence']:.3g}" if tested else "",
            f"{c['level']:.2g}" if tested else "",
            str(c["blocks"]) if tested else "",
        )
        table.add_row(*map(Text, row))
    return table


def _seconds_line(state: Mapping[str, Any]) -> str:
    seconds = state["seconds"]
    saved, timing = seconds["saved_by_races"], seconds["timing"]
    share = saved / (saved + timing) if saved + timing else 0.0
    return (
        f"Races saved {saved:.1f} s of timing ({share:.0%}); "
        f"promotions and confirmations took {seconds['promotion']:.1f} s"
    )


def _front_table(members: list[Mapping[str, Any]]) -> Table:
    names = list(members[0]["values"])
    table = Table("candidate", "branch", *names, title=f"Front ({len(members)})", title_justify="left")
    ordered = sorted(members, key=lambda member: -member["values"][names[0]])
    for member in ordered:
        row = (str(member["candidate"]), member["branch"], *(f"{member['values'][n]:.4g}" for n in names))
        table.add_row(*map(Text, row))
    return table


def _times_table(entry: Entry) -> Table:
    table = Table("workload", "group", "pairs", "median µs", "default µs", "speedup")
    for m in entry.passed.measurements if entry.passed else ():
        times = (f"{m.time_us:.1f}", f"{m.baseline_time_us:.1f}", f"{m.speedup:.3f}×")
        table.add_row(*map(Text, (m.workload, m.group, str(len(m.samples_us)), *times)))
    return table


def progress(history: History) -> str:
    """The best so far in one phrase: "long 3.1×, short 2.4×"."""
    best = best_per_column(history.columns, standing(history))
    parts = []
    for i in primary(history.columns):
        name = history.columns[i].name
        if name in best:
            value = candidate(history, best[name])["values"][name]
            parts.append(f"{name.partition(':')[2] or name} {value:.3g}×")
    return ", ".join(parts) or "nothing passed yet"
