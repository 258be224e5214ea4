"""The results of a study as a table."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from evotune.history import Entry, History, load
from evotune.journal import FILE
from evotune.notes import headline
from evotune.pareto import front
from evotune.promotion import standing, titles
from evotune.records import verdict

if TYPE_CHECKING:
    import pandas as pd


def results(path: str | Path) -> "pd.DataFrame":
    """One row per judged candidate, in the order of their index, which is also the frame's index.

    Columns: trial, branch, origin, verdict ("passed" or the failure's class), stage, detail, front (whether
    on the Pareto front of those not found wrong since), champion (workload groups whose title it holds, ""
    for none), one per objective (NaN unless passed), "time_us:<workload>", "knob:<name>",
    "resource:<specialization>:<name>", "seconds:<phase>".

    Args:
        path: a study directory or its journal.

    Raises:
        StudyError: there is no study, or its journal is damaged.
    """
    import pandas as pd

    directory = Path(path)
    history = load(directory.parent if directory.name == FILE else directory)
    best = {entry.asked.index for entry in front(history.columns, standing(history))}
    held = _held(history)
    rows = [
        _row(history, entry, entry.asked.index in best, held.get(entry.asked.index, ""))
        for entry in history.judged
    ]
    index = pd.Index([entry.asked.index for entry in history.judged], name="candidate", dtype="int64")
    return pd.DataFrame(rows, index=index)


def _held(history: History) -> dict[int, str]:
    """Titles won, by candidate."""
    groups: dict[int, list[str]] = {}
    for title in titles(history):
        if title.won is not None:
            groups.setdefault(title.champion, []).append(title.group)
    return {index: ", ".join(names) for index, names in groups.items()}


def _row(history: History, entry: Entry, on_front: bool, held: str) -> dict[str, Any]:
    asked, judged = entry.asked, entry.judged
    if judged is None:
        raise ValueError(f"candidate {asked.index} was not judged")
    failed, passed = entry.failed, entry.passed
    row: dict[str, Any] = {
        "trial": judged.trial,
        "branch": asked.branch,
        "origin": history.added(asked.branch).origin,
        "verdict": verdict(judged.outcome),
        "stage": failed.stage.value if failed else "",
        "detail": headline(failed) if failed else "",
        "front": on_front,
        "champion": held,
    }
    row |= {column.name: float("nan") for column in history.columns}
    if passed:
        row |= {value.name: value.value for value in passed.values}
        row |= {f"time_us:{m.workload}": m.time_us for m in passed.measurements}
    row |= {f"knob:{name}": value for name, value in asked.knobs.items()}
    outcome = passed or failed
    for label, found in outcome.resources.items() if outcome else ():
        row |= {f"resource:{label}:{name}": value for name, value in found.values.items()}
    row |= {f"seconds:{phase}": value for phase, value in judged.seconds.items()}
    return row
