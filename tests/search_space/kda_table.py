"""What the tests on a GPU found, one line for each family, for a file that is kept.

    EVOTUNE_KDA_TABLE=families.md python -m pytest -m gpu

writes that table, and beside it `families.csv` with a line for every case.
"""

import csv
import os
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

TABLE_VARIABLE = "EVOTUNE_KDA_TABLE"
Key = TypeVar("Key")


@dataclass(frozen=True)
class Finding:
    """What a question brought to light.

    Attributes:
        failure: "" when there is nothing to say.
        ratio: worst error over its derived bound; 0 where answers were compared with each other.
        relative: |error| / |truth| of o and of the final state, the larger; None where it says nothing.
    """

    failure: str = ""
    ratio: float = 0.0
    relative: float | None = None


@dataclass(frozen=True)
class Entry:
    """One question put to one configuration, and how many answers were looked at."""

    family: str
    case: str
    configuration: str
    found: Finding
    calls: int = 1
    hard: bool = False
    reports: tuple[str, ...] = ()


@dataclass
class Table:
    entries: list[Entry] = field(default_factory=list)

    def write(self, path: Path) -> None:
        """The table of families at `path`, that of cases beside it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.families(), encoding="utf-8")
        with path.with_suffix(".csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(
                [
                    "family",
                    "case",
                    "reports",
                    "configurations",
                    "calls",
                    "worst_over_bound",
                    "relative",
                    "failures",
                    "first_failure",
                ]
            )
            for (family, case), entries in _grouped(self.entries, lambda e: (e.family, e.case)):
                failed = [e for e in entries if e.found.failure]
                writer.writerow(
                    [
                        family,
                        case,
                        " ".join(entries[0].reports),
                        len({e.configuration for e in entries}),
                        sum(e.calls for e in entries),
                        f"{max(e.found.ratio for e in entries):.3f}",
                        _largest(e.found.relative for e in entries),
                        len(failed),
                        f"{failed[0].configuration}: {failed[0].found.failure}" if failed else "",
                    ]
                )

    def families(self) -> str:
        """Markdown."""
        heads = ("family", "cases", "configurations", "answers", "worst error / bound")
        heads += ("relative error, random", "adversarial", "failures")
        lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
        for family, entries in _grouped(self.entries, lambda e: e.family):
            cells = [
                family,
                len({e.case for e in entries}),
                len({e.configuration for e in entries}),
                sum(e.calls for e in entries),
                f"{max(e.found.ratio for e in entries):.2f}"
                if any(e.found.ratio for e in entries)
                else "equal bits",
                _largest(e.found.relative for e in entries if not e.hard),
                _largest(e.found.relative for e in entries if e.hard),
                sum(bool(e.found.failure) for e in entries),
            ]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
        return "\n".join(lines) + "\n"


def _grouped(entries: Iterable[Entry], key: Callable[[Entry], Key]) -> list[tuple[Key, list[Entry]]]:
    groups: dict[Key, list[Entry]] = defaultdict(list)
    for entry in entries:
        groups[key(entry)].append(entry)
    return sorted(groups.items(), key=lambda item: _natural(item[0]))


def _natural(key: object) -> tuple[int, str]:
    """Families begin with their number."""
    text = key[0] if isinstance(key, tuple) else key
    number, _, _ = str(text).partition(" ")
    return (int(number) if number.isdigit() else 99, str(key))


def _largest(values: Iterable[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{max(known):.4f}" if known else ""


def path_wanted() -> Path | None:
    name = os.environ.get(TABLE_VARIABLE)
    return Path(name) if name else None
