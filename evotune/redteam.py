"""`python -m evotune redteam`: tries to fool the judge of a target, and reports what came of it.

For a target whose device is not on this machine, what a build and an inspection decide is judged; the rest
is built.
"""

import csv
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from evotune.fitness.build import default_cache_directory
from evotune.fitness.outcome import RUNGS, Failed, Stage
from evotune.fitness.redteam import CORPORA, Kind
from evotune.fitness.redteam.corpus import Findings, Row, bench, run
from evotune.fitness.redteam.coverage import DOORS, Known, coverage

STAYS = {
    Stage.SMOKE: "in milliseconds, and it names the mistake in the smallest problem that shows it",
    Stage.EDGES: "lengths, packs and heads that the other rungs do not have",
    Stage.REGIMES: "values at which honest-looking arithmetic fails",
    Stage.LAWS: "relations between calls, in shapes nobody wrote down",
    Stage.INTEGRITY: "what no comparison of values sees: inputs, guards, repetition",
}
"""What each rung is for, beside the kernels that it alone stops."""


def judge(*, target: str = "host", full: bool, unsafe: bool, say: Callable[[str], None]) -> Findings:
    """A target's whole corpus; one line per entry goes to `say` as it is judged.

    Raises SandboxError; StudyError where the target's compiler is not installed; DeviceError when its GPU is
    taken.
    """

    def tell(row: Row) -> None:
        say(f"{row.verdict:9} {row.entry.kind:8} {row.entry.name:56} {row.where}")

    opened = bench(default_cache_directory(), target, unsafe=unsafe)
    return run(CORPORA[target], opened, full=full, say=tell)


def lines(found: Findings) -> list[str]:
    """The three figures, what stopped what, and everything that should not have happened."""
    wrong, honest = found.of(Kind.MUTANT, Kind.CHEAT), found.of(Kind.VARIANT)
    stopped = ", ".join(f"{stage} {count}" for stage, count in found.catches().items() if count)
    harmless = sum(row.verdict == "no gain" for row in wrong)
    return [
        f"accepted exploits   {len(found.accepted)} of {len(wrong)}"
        f" ({len(found.of(Kind.MUTANT))} mutants, {len(found.of(Kind.CHEAT))} cheats)",
        f"false rejections    {len(found.rejected)} of {len(honest)} honest variants"
        f" ({found.false_rejections:.1%})",
        f"stopped first by    {stopped}; {harmless} tricks passed and gained nothing",
        f"stopped elsewhere   {len(found.elsewhere)} of {len(wrong)}: not by the stage that is due",
        *_not_run(found),
        f"time                {found.seconds:.0f} s",
        *(_mishap(row) for row in found.rows if row.verdict not in _AS_DUE),
    ]


_AS_DUE = ("caught", "passed", "no gain", "not run")


def _not_run(found: Findings) -> list[str]:
    """What could not be decided on this machine, and why; nothing where all could."""
    if not found.not_run:
        return []
    kinds = [row.entry.kind for row in found.not_run]
    counted = ", ".join(f"{kinds.count(kind)} {kind}s" for kind in Kind if kind in kinds)
    return [
        f"not run here        {len(found.not_run)} of {len(found.rows)} ({counted}): {found.lacking};"
        " all were built, inspected and linked"
    ]


def _mishap(row: Row) -> str:
    detail = f", {row.outcome.detail}" if isinstance(row.outcome, Failed) else ""
    paid = f", {row.paid:.1f} times as fast as its honest twin" if row.paid else ""
    due = f"; due at {row.due}" if row.verdict == "elsewhere" else ""
    return f"{row.verdict}: {row.entry.name} ({row.where}{detail}{paid}{due})"


def matrix(found: Findings) -> list[str]:
    """Wrong kernel by rung: how many cases of each rung fail when the gate goes on after a failure."""
    rows = [row for row in found.of(Kind.MUTANT, Kind.CHEAT) if row.rungs is not None]
    table = [f"{'':42}" + "".join(f"{stage:>10}" for stage in RUNGS)]
    for row in rows:
        counts = [(row.rungs or {}).get(stage, 0) for stage in RUNGS]
        table.append(f"{row.entry.name:42}" + "".join(f"{count or '·':>10}" for count in counts))
    alone = found.alone()
    return [*table, "", *(_only(stage, alone[stage], found) for stage in RUNGS)]


def _only(stage: Stage, names: Sequence[str], found: Findings) -> str:
    seen = f"alone sees {len(names)}: {', '.join(names)}" if names else "alone sees none"
    return f"{stage:10} {seen}; stops {found.catches()[stage]} first. It stays for: {STAYS[stage]}"


def table(found: Findings) -> str:
    """Everything as CSV, one entry a line."""
    text = io.StringIO()
    records = [record(row) for row in found.rows]
    writer = csv.DictWriter(text, list(records[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({**r, "evolve": " ".join(map(str, r["evolve"]))} for r in records)
    return text.getvalue()


def record(row: Row) -> dict[str, Any]:
    outcome = row.outcome
    failed = outcome if isinstance(outcome, Failed) else None
    return {
        "name": row.entry.name,
        "kind": str(row.entry.kind),
        "verdict": row.verdict,
        "due": row.due,
        "stage": str(failed.stage) if failed else "",
        "failure": str(failed.failure) if failed else "",
        "case": failed.case if failed else "",
        "detail": failed.detail if failed else "",
        "paid": row.paid,
        **{str(stage): (row.rungs or {}).get(stage) for stage in RUNGS},
        "seconds": round(sum(row.seconds.values()), 3),
        "why": row.entry.why,
        "evolve": list(row.entry.evolve),
    }


def as_json(found: Findings) -> dict[str, Any]:
    return {
        "held": found.held,
        "not_run": [row.entry.name for row in found.not_run],
        "lacking": found.lacking,
        "accepted": [row.entry.name for row in found.accepted],
        "elsewhere": [row.entry.name for row in found.elsewhere],
        "false_rejections": found.false_rejections,
        "rejected": [row.entry.name for row in found.rejected],
        "stopped_by": {str(stage): count for stage, count in found.catches().items()},
        "alone": {str(stage): names for stage, names in found.alone().items()},
        "seconds": found.seconds,
        "entries": [record(row) for row in found.rows],
    }


def known() -> tuple[Known, ...]:
    """The catalogue of known tricks with what stands for each, of all targets."""
    return coverage([entry for corpus in CORPORA.values() for entry in corpus])


def coverage_lines() -> list[str]:
    return [*(_standing(k) for k in known()), "", "Open by design:", *(f"- {door}" for door in DOORS)]


def _standing(k: Known) -> str:
    entries = ", ".join(k.by)
    said = f"{k.why}; a part of it: {entries}" if k.why and entries else k.why or entries
    return f"{k.number:2} {k.standing:14} {k.title}: {said}"


def write_table(found: Findings, path: Path) -> None:
    """Raises OSError."""
    path.write_text(table(found), encoding="utf-8")
