"""How fast a study judged, how busy its GPU was, and what never came that far: from the journal alone."""

from collections.abc import Mapping, Sequence
from typing import Any

from evotune.fitness.outcome import Stage
from evotune.history import Entry, History

_OFF_DEVICE = {"build": Stage.BUILD, "inspect": Stage.INSPECT}


def throughput(history: History, legal_share: float | None = None) -> dict[str, Any]:
    """JSON-ready. Rates count from the first result on, when the default kernel and its problems stood.

    Keys:
        per_minute: candidates judged a minute, contests and confirmations in between included; None before
            the second.
        gpu_busy: parts of that time in which the GPU worked, "events" by its own clock and "driver" as the
            driver counts (any kernel on it, one that only waits included); without those that are not known.
        kept_off: parts of all proposals that never came to the device: "illegal" (of uniform draws of knobs,
            `legal_share` being the legal part), "build", "inspect" (budgets and refused objects), "all".
    """
    judged = sorted((e for e in history.judged if e.judged), key=_ended_s)
    seconds = _ended_s(judged[-1]) - _ended_s(judged[0]) if judged else 0.0
    measured = seconds > 0
    return {
        "per_minute": 60 * (len(judged) - 1) / seconds if measured else None,
        "gpu_busy": _busy(judged[1:], seconds) if measured else {},
        "kept_off": _kept_off(judged, legal_share),
    }


def line(found: Mapping[str, Any]) -> str:
    """`throughput` in one line; "" before there is anything to tell."""
    if found["per_minute"] is None:
        return ""
    parts = [f"{found['per_minute']:.0f} candidates judged a minute"]
    busy = found["gpu_busy"]
    clocks = [f"{busy[name]:.0%} by {told}" for name, told in _CLOCKS.items() if name in busy]
    if clocks:
        parts.append(f"GPU busy {', '.join(clocks)}")
    kept = found["kept_off"]
    reasons = [f"{told} {kept[name]:.0%}" for name, told in _REASONS.items() if kept.get(name)]
    if reasons:
        parts.append(f"kept off the device {kept['all']:.0%} of proposals ({', '.join(reasons)})")
    return "; ".join(parts)


_CLOCKS = {"events": "its own events", "driver": "the driver"}
_REASONS = {"illegal": "illegal", "build": "not built", "inspect": "over budget or refused"}


def _ended_s(entry: Entry) -> float:
    return entry.judged.elapsed_s if entry.judged else 0.0


def _busy(judged: Sequence[Entry], seconds: float) -> dict[str, float]:
    found = {}
    for name in _CLOCKS:
        used = [e.judged.seconds.get(f"all_{name}") for e in judged if e.judged]
        known = [value for value in used if value is not None]
        if known:
            found[name] = min(sum(known) / seconds, 1.0)
    return found


def _kept_off(judged: Sequence[Entry], legal_share: float | None) -> dict[str, float]:
    """Parts of proposals, legal and not, of which the judged candidates are the legal ones."""
    legal = 1.0 if legal_share is None else legal_share
    count = max(len(judged), 1)
    found = {
        name: legal * sum(e.failed is not None and e.failed.stage is stage for e in judged) / count
        for name, stage in _OFF_DEVICE.items()
    }
    if legal_share is not None:
        found["illegal"] = 1 - legal_share
    return {**found, "all": sum(found.values())}
