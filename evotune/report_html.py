"""`pareto.html`: one file, no network, no script. What a model or a user wrote is only ever escaped text."""

import math
from collections.abc import Iterable, Sequence
from html import escape

from evotune.manifest import Index, KernelManifest, Timing

# Nothing may be fetched and no script may run, even if an escape were forgotten.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
_STYLE = """
body{font:15px/1.45 system-ui,sans-serif;max-width:76rem;margin:2rem auto;padding:0 1rem;color:#1c2530}
h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2rem}table{border-collapse:collapse;font-size:.9rem}
td,th{padding:.25rem .6rem;border-bottom:1px solid #d7dde4;text-align:left;vertical-align:top}
td.n{text-align:right;font-variant-numeric:tabular-nums}th{background:#f2f5f8}
.tick{font-size:11px;fill:#5b6875}.bar{stroke:#2463a8;stroke-width:2}.dot{fill:#2463a8}
.muted{color:#5b6875}.out{color:#9c2b2b}svg{width:100%;height:auto;max-width:60rem}
code,pre{font:13px/1.4 ui-monospace,monospace}
pre{background:#f6f8fa;padding:.8rem;overflow:auto;max-height:30rem}
"""
_REBUILDS = {True: "the judged object", False: "another object", None: "(judged object gone)"}
_WIDTH, _LEFT, _RIGHT, _ROW = 900, 210, 60, 22


def page(index: Index, kernels: Sequence[KernelManifest], sources: Sequence[str]) -> str:
    """The report; `sources` in the order of `kernels`."""
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name=viewport content="width=device-width">',
        f"<title>{escape(index.study)}: Pareto front</title><style>{_STYLE}</style>",
        f"<h1>{escape(index.study)}: {len(kernels)} verified kernels</h1>",
        f"<p class=muted>{escape(index.created)} · {escape((index.gpu or index.cpu).label)} · "
        f"evotune {escape(index.evotune)}. "
        "Every kernel was rebuilt from source, passed the full gate with fresh seeds, and was timed again on "
        "inputs no choice was made with. Bars are intervals of the median over blocks.</p>",
        _left_out(index),
        *(_workload(name, kernels) for name in dict.fromkeys(w.name for w in index.workloads)),
        _kernels(kernels),
        *(_source(kernel, source) for kernel, source in zip(kernels, sources, strict=True)),
    ]
    return "\n".join(part for part in parts if part) + "\n"


def _left_out(index: Index) -> str:
    if not index.left_out:
        return ""
    rows = (
        f"<tr><td>{escape(k.id)}<td class=n>{k.number}<td class=out>{escape(k.reason)}"
        for k in index.left_out
    )
    return _table("Left out: chosen, but did not hold", ("kernel", "candidate", "why"), rows)


def _workload(name: str, kernels: Sequence[KernelManifest]) -> str:
    timed = [(k, t) for k in kernels for t in k.evidence.timings if t.workload == name]
    timed.sort(key=lambda pair: pair[1].time_us)
    if not timed:
        return ""
    rows = (
        f"<tr><td>{escape(k.id)}<td class=n>{t.time_us:,.1f}<td class=n>{_ratio(t.speedup)}"
        f"<td class=n>{_ratio(t.naive_ratio)}"
        for k, t in timed
    )
    head = ("kernel", "time, µs", "× the default", "× numpy")
    title = f"{name} ({timed[0][1].group})"
    return _table(title, head, rows) + _whiskers([(k.id, t) for k, t in timed])


def _ratio(interval: object) -> str:
    low, mid, high = (getattr(interval, name) for name in ("low", "median", "high"))
    return f"{mid:.2f} <span class=muted>[{low:.2f}, {high:.2f}]</span>"


def _whiskers(rows: Sequence[tuple[str, Timing]]) -> str:
    """Speed over the default, one line a kernel, on a logarithmic axis."""
    low = min(1.0, *(t.speedup.low for _, t in rows))
    high = max(1.0, *(t.speedup.high for _, t in rows)) * 1.02
    span = math.log(high / low) or 1.0

    def x(value: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * math.log(value / low) / span

    height = _ROW * len(rows) + 34
    marks = [
        f'<line x1="{x(t):.1f}" x2="{x(t):.1f}" y1="4" y2="{height - 24}" stroke="#d7dde4"/>'
        f'<text x="{x(t):.1f}" y="{height - 8}" class=tick text-anchor="middle">{t:g}×</text>'
        for t in _ticks(low, high)
    ]
    for i, (name, timing) in enumerate(rows):
        y = _ROW * i + 16
        s = timing.speedup
        marks.append(
            f'<text x="{_LEFT - 8}" y="{y + 4}" font-size="12" text-anchor="end">{escape(name)}</text>'
            f'<line x1="{x(s.low):.1f}" x2="{x(s.high):.1f}" y1="{y}" y2="{y}" class=bar />'
            f'<circle cx="{x(s.median):.1f}" cy="{y}" r="4" class=dot />'
        )
    box = f'<svg viewBox="0 0 {_WIDTH} {height}" role=img aria-label="speed over the default">'
    return f"{box}{''.join(marks)}</svg>"


def _ticks(low: float, high: float) -> list[float]:
    candidates = [0.25, 0.5, 0.7, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64]
    return [t for t in candidates if low <= t <= high]


def _kernels(kernels: Sequence[KernelManifest]) -> str:
    rows = (
        f"<tr><td>{escape(k.id)}<td class=n>{k.number}<td>{'yes' if k.front else ''}"
        f"<td>{escape(', '.join(k.fastest_on))}<td>{escape(' → '.join(a.branch for a in k.lineage))}"
        f"<td>{escape(k.note)} <span class=muted>({escape(k.origin)})</span>"
        f"<td>{_REBUILDS[_reproducible(k)]}<td class=n>{k.evidence.worst_error:.3f}"
        f"<td class=n>{k.evidence.host_call_us:.2f}"
        f"<td><code>{escape(' '.join(f'{n}={v}' for n, v in k.knobs.items()))}</code>"
        for k in kernels
    )
    head = ("kernel", "candidate", "front", "fastest on", "lineage", "what is different", "rebuilds to")
    return _table("Kernels", (*head, "worst error / bound", "host call, µs", "knobs"), rows)


def _reproducible(kernel: KernelManifest) -> bool | None:
    """Of all its objects: False when one differs, None when one cannot be told."""
    states = {built.reproducible for built in kernel.objects}
    return False if False in states else None if None in states else True


def _source(kernel: KernelManifest, source: str) -> str:
    name = escape(kernel.source.name)
    return f"<details><summary>{escape(kernel.id)}: {name}</summary><pre>{escape(source)}</pre></details>"


def _table(title: str, head: Sequence[str], rows: Iterable[str]) -> str:
    cells = "".join(f"<th>{escape(text)}" for text in head)
    return f"<h2>{escape(title)}</h2><table><tr>{cells}{''.join(rows)}</table>"
