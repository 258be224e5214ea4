"""How the knobs of a Hopper template bear on speed: a factorial sweep on a GPU, and its tables.

    python experiments/bench_h200.py sweep OUT.csv              needs a GPU of compute capability 9.0
    python experiments/bench_h200.py tables SWEEP.csv FOLDER    anywhere; pictures where there is Chromium
    python experiments/bench_h200.py journal STUDY OUT.jsonl    a study's journal, small enough to be kept

The sweep judges and times, through the study's own judge, every combination of a few knobs whose others keep
their default, in random order and each beside the default kernel; so a cell of a table differs from its
neighbour by the knobs named alone, which cannot be said of what a search happened to visit.
Relative performance is a ratio to the fastest configuration of the sweep on the same workload.
"""

import argparse
import csv
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from evotune import config, setup
from evotune.fitness.outcome import Failed, Outcome, Passed
from evotune.journal import read
from evotune.records import to_json
from evotune.search_space.branch import Candidate
from evotune.search_space.templates.kda_sm90_chunked_plan import Plan

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

STUDY = Path(__file__).parent / "kda_h200" / "study.toml"
_COPIES = (("bulk", "warp"), ("bulk", "inline"), ("cp.async", "inline"))
DESIGNS: Mapping[tuple[str, str], Mapping[str, Sequence[Any]]] = {
    ("chunk", "threads"): {
        "chunk": (16, 32),
        "value_tile": (16, 32, 64, 128),
        "key_warps": (1, 2),
        "copies": _COPIES[:2],
    },
    ("stages", "copies"): {"chunk": (16, 32), "stages": (3, 4, 6, 8), "copies": _COPIES},
}
"""A table's two sides → what is varied for it; the rest keeps its default. Threads follow from the knobs.
"copies" sets copy and loader together: cp.async is always issued inline."""

_LEFT_OUT = ("source", "log", "base", "pid")
_BATCH = 32
_SAMPLES = 24  # the study takes more of what is close to the best; here nothing is
_RESOURCES = ("registers", "spill_bytes", "shared_bytes")


@dataclass(frozen=True)
class Cell:
    """One configuration of the sweep: all knobs, and what a table may show of them by name."""

    knobs: Any
    shown: Mapping[str, str]


def _study() -> setup.Setup:
    return setup.resolve(config.load(STUDY, {"timing.samples": _SAMPLES}), STUDY.parent)


def cells(study: setup.Setup) -> dict[Any, Cell]:
    """All legal combinations of all designs by knobs."""
    found = {}
    for design in DESIGNS.values():
        for values in product(*design.values()):
            chosen = dict(zip(design, values, strict=True))
            chosen["copy"], chosen["loader"] = chosen.pop("copies")
            knobs = replace(study.space.default(), **chosen)
            if all(study.template.why_not(knobs, spec) is None for spec in study.specializations):
                found[knobs] = Cell(knobs, _shown_of(study, knobs))
    return found


def _shown_of(study: setup.Setup, knobs: Any) -> dict[str, str]:
    varied = dict.fromkeys(name for design in DESIGNS.values() for name in design if name != "copies")
    shown = {name: str(getattr(knobs, name)) for name in varied}
    return shown | {"copies": f"{knobs.copy}, {knobs.loader}", "threads": str(_threads(study, knobs))}


def _threads(study: setup.Setup, knobs: Any) -> int:
    """Of a block of the recurrence."""
    unit = study.template.unit(study.template.source, knobs, study.specializations[0])
    return Plan.of(dict(unit.constants)).recurrence_threads


def sweep(out: Path, seed: int) -> None:
    """Judge and time every cell; a row each, written as they come."""
    study = _study()
    order = list(cells(study).values())
    np.random.default_rng(seed).shuffle(order)  # type: ignore[arg-type]  # a list is shuffled in place
    workloads = [workload.name for workload in study.workloads]
    began = time.monotonic()
    with out.open("w", newline="") as file, closing(setup.evaluator(study)) as evaluator:
        writer = csv.writer(file)
        names = list(order[0].shown)
        clocks = [f"{clock}:{w}" for clock in ("time_us", "default_us") for w in workloads]
        writer.writerow([*names, "verdict", *_RESOURCES, *clocks])
        branch = evaluator.problem.seed  # type: ignore[attr-defined]  # the device's judge, not a replay
        for first in range(0, len(order), _BATCH):
            batch = order[first : first + _BATCH]
            futures = [evaluator.submit(Candidate(branch, cell.knobs)) for cell in batch]
            for cell, future in zip(batch, futures, strict=True):
                outcome = future.result().outcome
                writer.writerow([*cell.shown.values(), *_row(outcome, workloads)])
            file.flush()
            done = min(first + _BATCH, len(order))
            print(f"{done} of {len(order)} in {time.monotonic() - began:.0f} s", file=sys.stderr)


def _row(outcome: Outcome, workloads: Sequence[str]) -> list[str]:
    """Verdict, resources of the study's first object, its times and the default's in the same blocks."""
    if not isinstance(outcome, Passed):
        verdict = outcome.failure.value if isinstance(outcome, Failed) else "retry"
        return [verdict, *([""] * (len(_RESOURCES) + 2 * len(workloads)))]
    resources = next(iter(outcome.resources.values())).values
    found = {m.workload: m for m in outcome.measurements}
    return [
        "passed",
        *(str(resources.get(name, "")) for name in _RESOURCES),
        *(f"{found[w].time_us:.6g}" for w in workloads),
        *(f"{found[w].baseline_time_us:.6g}" for w in workloads),
    ]


def tables(sweep_csv: Path, folder: Path) -> None:
    """Write tables.md, and a heat map for each design, where Chromium is there to draw it."""
    import pandas as pd

    rows = pd.read_csv(sweep_csv)
    rows = rows[rows["verdict"] == "passed"]
    speeds = _relative(rows)
    rows = pd.concat([rows, speeds], axis=1)
    folder.mkdir(parents=True, exist_ok=True)
    parts = [f"{len(rows)} configurations; 1.00 is the fastest of them on that workload.\n"]
    for (down, across), design in DESIGNS.items():
        mine = rows[_in_design(rows, design)]
        parts += [_pair(mine, down, across, workload) for workload in speeds.columns]
        draw(_heat(mine, down, across, list(speeds.columns)), folder / f"{down}_{across}.png")
    parts.append(_resources(rows, list(speeds.columns)))
    (folder / "tables.md").write_text("\n".join(parts))


def _relative(rows: "pd.DataFrame") -> "pd.DataFrame":
    """A column for each workload: the least time over a configuration's, each over the default's beside it.

    A sweep recorded before the default's times were written is compared as it is: it ran for a minute.
    """
    import pandas as pd

    names = [name.removeprefix("time_us:") for name in rows.columns if name.startswith("time_us:")]
    times = pd.DataFrame({w: rows[f"time_us:{w}"] / rows.get(f"default_us:{w}", 1.0) for w in names})
    return times.min() / times


def _in_design(rows: "pd.DataFrame", design: Mapping[str, Sequence[Any]]) -> "pd.Series[bool]":
    """Rows in which whatever this design does not vary is the default's."""
    study = _study()
    default = _shown_of(study, study.space.default())
    fixed = list({name for other in DESIGNS.values() for name in other} - set(design))
    return (rows[fixed].astype(str) == [default[name] for name in fixed]).all(axis=1)


def _pivot(rows: "pd.DataFrame", down: str, across: str, workload: str) -> "pd.DataFrame":
    """The best over the factors not named: what tuning the rest would leave."""
    return rows.pivot_table(index=down, columns=across, values=workload, aggfunc="max")


def _pair(rows: "pd.DataFrame", down: str, across: str, workload: str) -> str:
    table = _pivot(rows, down, across, workload)
    head = [f"{down} \\ {across}", *(str(name) for name in table.columns)]
    body = [
        [str(label), *(_shown(v) for v in line)]
        for label, line in zip(table.index, table.to_numpy(), strict=True)
    ]
    return f"### {workload}: {down} × {across}\n\n{markdown(head, body)}\n"


def _shown(value: float) -> str:
    return "" if np.isnan(value) else f"{value:.2f}"


def _resources(rows: "pd.DataFrame", workloads: Sequence[str]) -> str:
    """Speed by registers, spills apart: median of each band."""
    bands = [(0, 96), (97, 128), (129, 168), (169, 255)]
    body = []
    for spills in (False, True):
        for low, high in bands:
            mine = rows[rows["registers"].between(low, high) & ((rows["spill_bytes"] > 0) == spills)]
            if len(mine):
                label = [f"{low}–{high}", "yes" if spills else "no", str(len(mine))]
                body.append([*label, *(f"{median(mine[w]):.2f}" for w in workloads)])
    head = ["registers", "spills", "configurations", *workloads]
    ranks = rows[["registers", *workloads]].corr(method="spearman")["registers"]
    last = ["rank correlation with registers", "", str(len(rows)), *(f"{ranks[w]:+.2f}" for w in workloads)]
    return f"### Registers and spills: median relative performance\n\n{markdown(head, [*body, last])}\n"


def markdown(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _heat(rows: "pd.DataFrame", down: str, across: str, workloads: Sequence[str]) -> "go.Figure":
    """A panel for each workload."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    figure = make_subplots(rows=1, cols=len(workloads), subplot_titles=list(workloads), shared_yaxes=True)
    for place, workload in enumerate(workloads, start=1):
        table = _pivot(rows, down, across, workload)
        cells_ = go.Heatmap(
            z=table.to_numpy(),
            x=[str(name) for name in table.columns],
            y=[str(name) for name in table.index],
            coloraxis="coloraxis",
            texttemplate="%{z:.2f}",
        )
        figure.add_trace(cells_, row=1, col=place)
        figure.update_xaxes(title_text=across, type="category", row=1, col=place)
    figure.update_yaxes(title_text=down, type="category", col=1)
    figure.update_layout(
        title=f"Relative performance: {down} × {across}",
        coloraxis={"colorscale": "Viridis", "cmin": 0.3, "cmax": 1.0},
        width=320 * len(workloads),
        height=320,
    )
    return figure


def draw(figure: "go.Figure", out: Path) -> None:
    """The figure as Chromium shows it."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        print(f"{out} needs chromium, which is not installed", file=sys.stderr)
        return
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "figure.html"
        figure.write_html(page, full_html=True, include_plotlyjs=True, config={"displayModeBar": False})
        size = f"--window-size={figure.layout.width + 20},{figure.layout.height + 20}"
        quiet = "--headless --no-sandbox --disable-gpu --hide-scrollbars --virtual-time-budget=3000"
        places = (f"--user-data-dir={folder}/profile", f"--screenshot={out}", page.as_uri())
        command = [browser, *quiet.split(), size, *places]
        subprocess.run(command, check=True, capture_output=True, timeout=120)


def compact(value: Any) -> Any:
    """A record as it is kept: of timed samples how many, their medians and the least, by which contests are
    decided; no sources, and no places on the machine."""
    if isinstance(value, list):
        return [compact(item) for item in value]
    if not isinstance(value, dict):
        return float(f"{value:.6g}") if isinstance(value, float) else value
    kept = {name: compact(item) for name, item in value.items() if name not in _LEFT_OUT}
    mine, theirs = (kept.pop(name, None) for name in ("samples_us", "baseline_samples_us"))
    if mine and theirs:
        kept |= {"samples": len(mine)}
        for name, samples in (("", mine), ("baseline_", theirs)):
            kept |= compact({f"{name}median_us": median(samples), f"{name}least_us": min(samples)})
    return kept


def keep_journal(study: Path, out: Path) -> None:
    """One line a record: asks, verdicts with times and seconds, contests block by block, confirmations."""
    lines = [json.dumps(compact(to_json(record)), sort_keys=True) for record in read(study).records]
    out.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("sweep")
    command.add_argument("out", type=Path)
    command.add_argument("--seed", type=int, default=1)
    command = commands.add_parser("tables")
    command.add_argument("sweep", type=Path)
    command.add_argument("folder", type=Path)
    command = commands.add_parser("journal")
    command.add_argument("study", type=Path)
    command.add_argument("out", type=Path)
    given = parser.parse_args()
    if given.command == "sweep":
        sweep(given.out, given.seed)
    elif given.command == "tables":
        tables(given.sweep, given.folder)
    else:
        keep_journal(given.study, given.out)


if __name__ == "__main__":
    main()
