"""Study-level figures for the dashboard: front, progress, lineage. From a history to plotly, nothing else.

A figure travels inside the study's attributes, so it carries no theme and only what it shows. Notes are a
model's words; plotly reads a few HTML tags in text, so they are escaped.
"""

from collections.abc import Mapping, Sequence
from html import escape

import plotly.graph_objects as go

from evotune.fitness.objectives import Column
from evotune.history import Entry, History, primary, value_of
from evotune.pareto import front
from evotune.promotion import standing
from evotune.records import BranchAdded

_COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5", "#9c6b4e")
_DEAD = "#b0b0b0"
_MOST_NEWCOMERS = 12  # annotations that stay readable on the progress plot


def figures(history: History) -> dict[str, go.Figure]:
    """Figures by id, which is a valid HTML id."""
    return {
        "front": front_figure(history),
        "progress": progress_figure(history),
        "lineage": lineage_figure(history),
    }


def front_figure(history: History) -> go.Figure:
    """Every passed candidate over two columns, those on the front ringed."""
    x, y = _axes(history)
    passed = [entry for entry in history.judged if entry.passed]
    figure = _figure(
        "Candidates that passed; ringed: the Pareto front over all objectives", _label(x), _label(y)
    )
    for branch in history.branches:
        mine = [entry for entry in passed if entry.asked.branch == branch.id]
        if mine:
            figure.add_trace(
                _points(mine, x, y, branch.id, {"color": _colour(history, branch.id), "size": 8})
            )
    ring = {"color": "rgba(0,0,0,0)", "size": 13, "line": {"color": "#000000", "width": 1.5}}
    figure.add_trace(_points(front(history.columns, standing(history)), x, y, "front", ring))
    return figure


def progress_figure(history: History) -> go.Figure:
    """The best so far in each primary column over candidates; vertical lines where a structure entered."""
    figure = _figure(
        "Best so far, and the branches that entered", "candidate", "speedup over the default kernel"
    )
    for number, column in enumerate(history.columns[i] for i in primary(history.columns)):
        xs, ys = _running_best(history, column)
        line = {"shape": "hv", "color": _COLOURS[number % len(_COLOURS)]}
        figure.add_trace(go.Scatter(x=xs, y=ys, mode="lines", name=column.name, line=line))
    for branch in [b for b in history.living() if b.parent is not None][:_MOST_NEWCOMERS]:
        begins = history.of(branch.id)[0].asked.index
        figure.add_vline(
            x=begins, line={"width": 1, "dash": "dot", "color": "#808080"}, annotation_text=branch.id
        )
    return figure


def lineage_figure(history: History) -> go.Figure:
    """Branches as a tree, generations downwards; dashed: a second parent; grey: never passed."""
    places = _places(history.branches)
    figure = _figure("Lineage of branches, with the best speedup of each", "", "generation")
    for name, dash in (("parent", "solid"), ("second parent", "dash")):
        xs, ys = _edges(history.branches, places, second=name != "parent")
        line = {"color": "#808080", "width": 1, "dash": dash}
        figure.add_trace(go.Scatter(x=xs, y=ys, mode="lines", name=name, line=line, hoverinfo="skip"))
    alive = [history.lives(branch.id) for branch in history.branches]
    figure.add_trace(
        go.Scatter(
            x=[places[b.id][0] for b in history.branches],
            y=[places[b.id][1] for b in history.branches],
            mode="markers+text",
            name="branch",
            text=[_best_text(history, branch) for branch in history.branches],
            textposition="bottom center",
            hovertext=[_story(history, branch) for branch in history.branches],
            hoverinfo="text",
            marker={
                "size": 16,
                "color": [
                    _colour(history, b.id) if lives else _DEAD
                    for b, lives in zip(history.branches, alive, strict=True)
                ],
            },
        )
    )
    figure.update_yaxes(autorange="reversed", dtick=1, zeroline=False)
    figure.update_xaxes(showticklabels=False, zeroline=False, showgrid=False)
    return figure


def _axes(history: History) -> tuple[Column, Column]:
    """The first two primary columns; with one of them, it and the first other column."""
    order = primary(history.columns)
    order += [i for i in range(len(history.columns)) if i not in order]
    return history.columns[order[0]], history.columns[order[min(1, len(order) - 1)]]


def _label(column: Column) -> str:
    return f"{column.name} ({'larger' if column.maximize else 'smaller'} is better)"


def _figure(title: str, x: str, y: str) -> go.Figure:
    figure = go.Figure(layout={"template": go.layout.Template()})
    figure.update_layout(title=title, xaxis_title=x, yaxis_title=y, plot_bgcolor="#ffffff")
    figure.update_xaxes(gridcolor="#e4e4e4")
    figure.update_yaxes(gridcolor="#e4e4e4")
    return figure


def _points(
    entries: Sequence[Entry], x: Column, y: Column, name: str, marker: Mapping[str, object]
) -> go.Scatter:
    values = [(value_of(e.passed, x.name), value_of(e.passed, y.name)) for e in entries if e.passed]
    return go.Scatter(
        x=[value for value, _ in values],
        y=[value for _, value in values],
        mode="markers",
        name=name,
        marker=marker,
        text=[f"candidate {e.asked.index}, {e.asked.branch}" for e in entries],
    )


def _running_best(history: History, column: Column) -> tuple[list[int], list[float]]:
    """Candidates at which the best changed, and the last one judged; the best there."""
    xs: list[int] = []
    ys: list[float] = []
    for entry in standing(history):
        if entry.passed:
            value = value_of(entry.passed, column.name)
            if not ys or (value > ys[-1] if column.maximize else value < ys[-1]):
                xs.append(entry.asked.index)
                ys.append(value)
    if ys:
        xs.append(history.judged[-1].asked.index)
        ys.append(ys[-1])
    return xs, ys


def _places(branches: Sequence[BranchAdded]) -> dict[str, tuple[float, int]]:
    """(x, generation) by branch: a leaf takes the next free column, a parent stands over its children."""
    children: dict[str | None, list[str]] = {}
    for branch in branches:
        children.setdefault(branch.parent, []).append(branch.id)
    places: dict[str, tuple[float, int]] = {}
    free = 0.0
    # Children before parents without recursion: a lineage may be hundreds of generations deep.
    stack = [(root, 0, False) for root in reversed(children.get(None, []))]
    while stack:
        branch_id, depth, ready = stack.pop()
        mine = children.get(branch_id, [])
        if mine and not ready:
            stack.append((branch_id, depth, True))
            stack += [(child, depth + 1, False) for child in reversed(mine)]
        elif mine:
            places[branch_id] = (sum(places[child][0] for child in mine) / len(mine), depth)
        else:
            places[branch_id] = (free, depth)
            free += 1.0
    return places


def _edges(
    branches: Sequence[BranchAdded], places: Mapping[str, tuple[float, int]], *, second: bool
) -> tuple[list[float | None], list[float | None]]:
    """One polyline with gaps."""
    xs: list[float | None] = []
    ys: list[float | None] = []
    for branch in branches:
        parent = branch.other_parent if second else branch.parent
        if parent is not None:
            xs += [places[parent][0], places[branch.id][0], None]
            ys += [places[parent][1], places[branch.id][1], None]
    return xs, ys


def _best(history: History, branch: BranchAdded) -> dict[str, float]:
    """The branch's best value in each primary column."""
    passed = [entry.passed for entry in history.of(branch.id) if entry.passed]
    columns = [history.columns[i] for i in primary(history.columns)]
    return {
        c.name: (max if c.maximize else min)(value_of(one, c.name) for one in passed)
        for c in columns
        if passed
    }


def _best_text(history: History, branch: BranchAdded) -> str:
    best = _best(history, branch)
    return f"{branch.id}<br>{max(best.values()):.2f}" if best else branch.id


def _story(history: History, branch: BranchAdded) -> str:
    """What appears under the pointer."""
    values = [f"{escape(name)} {value:.3g}" for name, value in _best(history, branch).items()]
    count = len(history.of(branch.id))
    lines = [
        f"<b>{branch.id}</b> by {escape(branch.origin)}",
        escape(branch.note),
        *values,
        f"{count} candidates",
    ]
    return "<br>".join(lines)


def _colour(history: History, branch: str) -> str:
    order = [added.id for added in history.branches]
    return _COLOURS[order.index(branch) % len(_COLOURS)]
