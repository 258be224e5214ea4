"""`calibrate`: how small a gain this machine can tell from noise, measured by the judge on equal kernels.

The template's default meets itself in the blocks that promotions are decided by, one workload group after the
other. Whatever differs is noise, so that a group's *resolution* can be read off: a challenger that is faster
by g wins a block unless noise exceeds g against it, and `sequential.wins_needed` says how many blocks must be
won to be found with power 80 % within the blocks that a test has. Noise is symmetric by the coin of each
block, so that g is the quantile 2 w - 1 of its magnitude, w being that share of wins. The order statistic
taken for it is at least that quantile with confidence 90 %: a claim that is refused for nothing costs less
than one that should have been refused.

What is measured lies in the user's cache, one small JSON file for each device, default kernel and set of
workloads; a study reads it there.
"""

import json
import math
import os
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from hashlib import sha256
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from pydantic import TypeAdapter, ValidationError

from evotune.errors import SandboxError, StudyError
from evotune.fitness.build import default_cache_directory
from evotune.fitness.device import described
from evotune.fitness.evaluation import Comparison, Evaluator
from evotune.fitness.host_toolchain import cpu
from evotune.fitness.lease import Gpu
from evotune.fitness.outcome import Retry
from evotune.fitness.sequential import spending, wins_needed
from evotune.fitness.timing import Timed
from evotune.promotion import PromotionPlan, log_ratio, robust_sigma
from evotune.search_space.branch import Candidate, seed
from evotune.setup import Setup

if TYPE_CHECKING:
    from rich.table import Table

BLOCKS = 48
POWER, CONFIDENCE = 0.8, 0.9
NTH_TEST = 5
"""The resolution is that of a study's fifth test, when none before it found anything."""

_FORMAT = 2
_TRIES = 3


@dataclass(frozen=True)
class Noise:
    """Blocks of the default kernel against itself on one workload group, in order.

    Attributes:
        log_ratios: of each block.
        times_us: geometric mean of the block's calls over the group's workloads.
        ended_s: when the block was over, since the first began.
        host_call_us: what a call costs the host when there is nothing to do.
    """

    log_ratios: tuple[float, ...]
    times_us: tuple[float, ...]
    ended_s: tuple[float, ...]
    host_call_us: float

    @property
    def sigma(self) -> float:
        """Standard deviation of a block's log-ratio, robustly."""
        return robust_sigma(self.log_ratios)

    @property
    def outlier_fraction(self) -> float:
        """Part of the blocks beyond three of that; 0.3 % for a normal law."""
        reach = 3 * self.sigma
        return sum(abs(x) > reach for x in self.log_ratios) / len(self.log_ratios)

    @property
    def lag1_autocorrelation(self) -> float:
        """Of one block's log-ratio with the next one's; what is left of drift in ratios."""
        return autocorrelation(self.log_ratios)

    @property
    def time_lag1_autocorrelation(self) -> float:
        """The same of the blocks' times."""
        return autocorrelation([math.log(t) for t in self.times_us])

    @property
    def drift(self) -> float:
        """Part by which a call became slower in a minute: the median slope over pairs of blocks (Theil and
        Sen)."""
        pairs = combinations(zip(self.ended_s, self.times_us, strict=True), 2)
        slopes = [math.log(u / t) / (b - a) for (a, t), (b, u) in pairs if b > a]
        return 60 * median(slopes) if slopes else 0.0

    @property
    def time_us(self) -> float:
        return median(self.times_us)

    @property
    def block_s(self) -> float:
        """Seconds from one block's end to the next one's."""
        return median(b - a for a, b in zip((0.0, *self.ended_s), self.ended_s, strict=False))

    def resolution(self, wins: float) -> float:
        """Least log-ratio with which a challenger wins a share `wins` of blocks; infinite with too few blocks
        to say."""
        ordered = sorted(map(abs, self.log_ratios))
        rank = upper_rank(len(ordered), 2 * wins - 1, CONFIDENCE)
        return ordered[rank] if rank is not None else math.inf


def _gain(log_ratio: float) -> float | None:
    """1.25 times as fast is 0.25; None without a bound."""
    return math.expm1(log_ratio) if math.isfinite(log_ratio) else None


@dataclass(frozen=True)
class Calibration:
    """What `calibrate` found.

    Attributes:
        subject: what it is true of: device, template, digest of the default kernel, workloads.
        created: local time in ISO form.
        groups: the noise of each, by name; what gain can be told from it is a study's plan's business.
    """

    subject: Mapping[str, Any]
    created: str
    groups: Mapping[str, Noise]

    def resolution(self, group: str, plan: PromotionPlan) -> float:
        """Smallest gain, as a log-ratio, that a promotion test of this plan finds with power 80 %."""
        return self.groups[group].resolution(_wins(plan))

    def as_json(self, plan: PromotionPlan) -> dict[str, Any]:
        """JSON-ready, with what tests of this plan resolve: null where there were too few blocks for any."""
        told = {
            name: {
                "resolution": _gain(self.resolution(name, plan)),
                "sigma": noise.sigma,
                "outlier_fraction": noise.outlier_fraction,
                "lag1_autocorrelation": noise.lag1_autocorrelation,
                "time_lag1_autocorrelation": noise.time_lag1_autocorrelation,
                "drift_per_minute": noise.drift,
                "time_us": noise.time_us,
                "block_s": noise.block_s,
                "host_call_us": noise.host_call_us,
            }
            for name, noise in self.groups.items()
        }
        tests = {"alpha": plan.alpha, "most_blocks": plan.most_blocks}
        return {"subject": dict(self.subject), "created": self.created, "tests": tests, "groups": told}


@cache
def _wins(plan: PromotionPlan) -> float:
    """Share of blocks that a challenger must win to be found with power 80 %."""
    return wins_needed(spending(plan.alpha, NTH_TEST), POWER, plan.most_blocks)


def calibrate(
    setup: Setup, evaluator: Evaluator, *, blocks: int = BLOCKS, say: Callable[[str], None]
) -> Calibration:
    """Measure every workload group of a study and keep what was found for the study to read.

    Raises StudyError when the default kernel fails or the result cannot be kept, SandboxError when nothing
    can be judged here.
    """
    groups = {}
    for group in _workloads(setup):
        say(f"{group}: {blocks} blocks of the default kernel against itself")
        groups[group] = _measure(default(setup), evaluator, group, blocks)
    created = datetime.now().astimezone().isoformat(timespec="seconds")
    found = Calibration(subject(setup, evaluator), created, groups)
    _keep(found, path_of(setup, evaluator))
    return found


def load(setup: Setup, evaluator: Evaluator) -> Calibration | None:
    """What is known of the device of a study's judge; None when it was never calibrated. Raises DeviceError
    where the device does not answer."""
    path = path_of(setup, evaluator)
    try:
        text = path.read_bytes()
        stored = _ADAPTER.validate_json(text)
    except (OSError, ValidationError):
        return None
    return stored.calibration if stored.format == _FORMAT else None


def path_of(setup: Setup, evaluator: Evaluator) -> Path:
    """Where the calibration for a study is kept."""
    name = sha256(json.dumps(subject(setup, evaluator), sort_keys=True).encode()).hexdigest()[:16]
    return default_cache_directory() / "calibration" / f"{name}.json"


def default(setup: Setup) -> Candidate:
    """The template's own source with its default knobs."""
    return Candidate(seed(setup.template.source), setup.space.default())


def subject(setup: Setup, evaluator: Evaluator) -> dict[str, Any]:
    """What a calibration is true of. Raises DeviceError where the device does not answer."""
    return {
        "device": _device(evaluator),
        "template": setup.template.name,
        "default": default(setup).digest,
        "workloads": [dict(table) for table in setup.config.workload],
    }


def table(found: Calibration, plan: PromotionPlan) -> "Table":
    """For a person whose study promotes by this plan."""
    from rich.table import Table

    view = Table(
        *("group", "a call", "nothing", "a block", "noise", "beyond 3σ", "autocorrelation"),
        *("drift a minute", "resolution"),
        caption=_caption(plan),
        caption_justify="left",
    )
    for name, noise in found.groups.items():
        resolution = found.resolution(name, plan)
        view.add_row(
            name,
            f"{noise.time_us:.4g} µs",
            f"{noise.host_call_us:.3g} µs",
            f"{noise.block_s:.2g} s",
            f"{noise.sigma:.2%}",
            f"{noise.outlier_fraction:.0%}",
            f"{noise.lag1_autocorrelation:+.2f} (times {noise.time_lag1_autocorrelation:+.2f})",
            f"{noise.drift:+.1%}",
            f"{math.expm1(resolution):.1%}" if math.isfinite(resolution) else "too few blocks",
        )
    return view


def _caption(plan: PromotionPlan) -> str:
    return (
        f"resolution: the smallest gain that test {NTH_TEST} of a study finds with probability {POWER:.0%}"
        f" within {plan.most_blocks} blocks at alpha {plan.alpha:g}, by winning {_wins(plan):.0%} of them; at"
        f" confidence {CONFIDENCE:.0%}.\n"
        "nothing: what a call costs when there is nothing to do. noise: of a block's ratio, robust σ.\n"
        "autocorrelation: from one block to the next, of ratios and of times."
    )


def autocorrelation(values: Sequence[float]) -> float:
    """Of ranks at lag one, about their mean: heavy tails do not drown it. 0 for fewer than three values."""
    ordered, n = sorted(values), len(values)
    ranks = [bisect_left(ordered, v) + bisect_right(ordered, v) - n for v in values]
    spread = sum(r * r for r in ranks)
    if n < 3 or not spread:
        return 0.0
    return sum(a * b for a, b in zip(ranks, ranks[1:], strict=False)) / spread


def upper_rank(n: int, quantile: float, confidence: float) -> int | None:
    """Index of the least of n sorted values that is at or above the quantile with that confidence; None when
    not even the largest is."""
    below = 0.0
    for rank in range(n):
        below += math.comb(n, rank) * quantile**rank * (1 - quantile) ** (n - rank)
        if below >= confidence:
            return rank
    return None


@dataclass(frozen=True)
class _Stored:
    format: int
    calibration: Calibration


_ADAPTER = TypeAdapter(_Stored)


def _keep(found: Calibration, path: Path) -> None:
    """Whole or not at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.{os.getpid()}")
        partial.write_bytes(_ADAPTER.dump_json(_Stored(_FORMAT, found)))
        partial.replace(path)
    except OSError as error:
        raise StudyError(f"cannot keep the calibration in {path}: {error.strerror}") from error


def _workloads(setup: Setup) -> tuple[str, ...]:
    return tuple(dict.fromkeys(workload.group for workload in setup.workloads))


def _measure(kernel: Candidate, evaluator: Evaluator, group: str, blocks: int) -> Noise:
    """Raises StudyError, SandboxError."""
    ends: list[float] = []

    def enough(timed: Timed) -> bool:
        ends.append(time.monotonic())
        return len(ends) > blocks

    for _ in range(_TRIES):
        ends.clear()
        found = evaluator.compare(kernel, kernel, enough, group=group, purpose="promotion")
        if not isinstance(found, Retry):
            break
    if isinstance(found, Retry):
        raise SandboxError(f"the default kernel could not be judged: {found.reason}")
    if not isinstance(found, Comparison):
        raise StudyError(f"the template's default kernel fails: {found.detail}")
    return _noise(found.blocks[1:], ends)


def _noise(blocks: Sequence[Timed], ends: Sequence[float]) -> Noise:
    """Without the first block, which waits for what is made once; `ends` has its end too."""
    return Noise(
        log_ratios=tuple(log_ratio(block.measurements) for block in blocks),
        times_us=tuple(_time_us(block) for block in blocks),
        ended_s=tuple(end - ends[0] for end in ends[1:]),
        host_call_us=median(block.host_call_us for block in blocks),
    )


def _time_us(block: Timed) -> float:
    logs = [math.log(t) for m in block.measurements for t in (*m.samples_us, *m.baseline_samples_us)]
    return math.exp(sum(logs) / len(logs))


@runtime_checkable
class _OnGpu(Protocol):
    """A judge that has one GPU to itself."""

    @property
    def gpu(self) -> Gpu: ...


def _device(evaluator: Evaluator) -> str:
    """What `evaluator` measures on; equal GPUs of one host are not equally noisy. Raises DeviceError."""
    if isinstance(evaluator, _OnGpu):
        uuid = evaluator.gpu.uuid
        gpu = described(uuid)
        return f"{gpu.name} ({uuid}), driver {gpu.driver}"
    return f"{cpu()}, {os.cpu_count()} cores"
