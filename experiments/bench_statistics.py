"""What the promotion rules do with noise: simulated studies in which the truth is known.

    python experiments/bench_statistics.py [STUDIES] [--out FILE]

A study screens 300 candidates in eight pairs of calls each, lets the best meet the champion whenever a third
of them is judged, and publishes from blocks that chose nothing: through `evotune.promotion` and
`evotune.fitness.sequential` as a real study does. Only the clock is simulated. STUDIES (500) for each kind of
noise; the tables are printed as Markdown and written to FILE (experiments/results/statistics.md).

Three questions: how often an equal challenger is promoted and how far published values are off, how often a
kernel that is really faster is found, and what racing saves and gets wrong.
"""

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from numpy.typing import NDArray

import evotune  # noqa: F401  (finds the packages in a checkout)
from evotune.fitness.outcome import Measurement, Passed
from evotune.fitness.racing import NO_BARS, Bars, Racing
from evotune.fitness.sequential import BLOCK_PAIRS, Estimate, Race, estimate
from evotune.fitness.timing import TimingPlan, candidate_first
from evotune.history import Entry, History
from evotune.promotion import BASELINE, Match, PromotionPlan, bars, log_ratio, log_ratios, matches, titles
from evotune.records import Asked, Confirmation, Contest, Judged, StudyBegun

Series = NDArray[np.float64]
CANDIDATES, PAIRS = 300, 8
ROUNDS, CONTESTS = 3, 4
"""Contests are held after each third of the candidates, so many each time: a study's share of time allows
some four in all, so that this is a harder test."""

GAINS = (0.01, 0.02, 0.05, 0.10)
BATCH = 8
PLAN = PromotionPlan()
GROUP, WORKLOAD = "group", "workload"
RACE_ERROR, RACE_MARGIN = TimingPlan().race_error, Race(1.0).margin
_TIME_US = 1000.0
_CONFIDENT = 1.959964


@dataclass(frozen=True)
class Noise:
    """Log-time that a call takes beyond its kernel's.

    Attributes:
        draw: of (rng, studies, calls), gives [studies, calls].
        place: standard deviation of what a kernel's place in memory adds to all its calls of a block.
    """

    name: str
    draw: Callable[[np.random.Generator, int, int], Series]
    place: float = 0.0


def normal(sigma: float, rng: np.random.Generator, studies: int, calls: int) -> Series:
    return sigma * rng.standard_normal((studies, calls))


def student(sigma: float, freedom: float, rng: np.random.Generator, studies: int, calls: int) -> Series:
    return sigma * rng.standard_t(freedom, (studies, calls))


def outliers(rng: np.random.Generator, studies: int, calls: int) -> Series:
    """One call in twenty takes twice as long."""
    return normal(0.015, rng, studies, calls) + math.log(2) * (rng.random((studies, calls)) < 0.05)


def drift(rng: np.random.Generator, studies: int, calls: int) -> Series:
    """A third slower at the end than at the beginning."""
    return student(0.01, 3, rng, studies, calls) + np.linspace(0, 0.3, calls)


def ramps(rng: np.random.Generator, studies: int, calls: int) -> Series:
    """A processor that heats up by half a percent a call and is cooled every 40 calls: much of a block's
    length."""
    phase = (np.arange(calls) + rng.integers(40, size=(studies, 1))) % 40
    return student(0.01, 3, rng, studies, calls) + 0.005 * phase


def walk(rng: np.random.Generator, studies: int, calls: int) -> Series:
    return student(0.01, 3, rng, studies, calls) + np.cumsum(normal(0.004, rng, studies, calls), axis=1)


def memory(rng: np.random.Generator, studies: int, calls: int) -> Series:
    """First-order autoregression, 0.95 from call to call, stationary at 4 %."""
    steps = normal(0.04 * math.sqrt(1 - 0.95**2), rng, studies, calls).T
    steps[0] = 0.04 * rng.standard_normal(studies)
    for before, now in zip(steps, steps[1:], strict=False):
        now += 0.95 * before
    return student(0.01, 3, rng, studies, calls) + steps.T


def everything(rng: np.random.Generator, studies: int, calls: int) -> Series:
    return memory(rng, studies, calls) + ramps(rng, studies, calls) + outliers(rng, studies, calls)


NOISES = (
    Noise("normal, 2 %", partial(normal, 0.02)),
    Noise("Student t, 3 degrees, 1.5 %", partial(student, 0.015, 3)),
    Noise("Student t, 2 degrees, 1.5 %", partial(student, 0.015, 2)),
    Noise("5 % of calls twice as long", outliers),
    Noise("linear drift by a third", drift),
    Noise("heating up, cooled every 40 calls", ramps),
    Noise("random walk", walk),
    Noise("autoregression 0.95", memory),
    Noise("Student t, and a place worth 2 %", partial(student, 0.01, 3), place=0.02),
    Noise("all of these", everything, place=0.02),
)
POWER_NOISES = (NOISES[0], NOISES[1], NOISES[3], NOISES[8])


class Clock:
    """Deals the noise of one study's calls in order."""

    def __init__(self, noise: Series, place: float, rng: np.random.Generator) -> None:
        self._noise, self._place, self._rng, self._next = noise, place, rng, 0

    def measure(self, pairs: int, mine: float, theirs: float = 0.0) -> Measurement:
        """Pairs of calls of kernels with these log speed-ups, ordered as the judge orders them."""
        slots = self._noise[self._next : self._next + 2 * pairs].reshape(pairs, 2)
        self._next += 2 * pairs
        first = np.array(candidate_first(pairs, self._rng))
        places = self._place * self._rng.standard_normal(2)
        mine_us, theirs_us = (
            _TIME_US * np.exp(np.where(second, slots[:, 1], slots[:, 0]) + place - speed)
            for second, place, speed in zip((~first, first), places, (mine, theirs), strict=True)
        )
        return Measurement(WORKLOAD, GROUP, tuple(mine_us.tolist()), tuple(theirs_us.tolist()))


def _entry(index: int, measurement: Measurement) -> Entry:
    passed = Passed("screen", 0.5, (measurement,), 1.0, (), {})
    asked = Asked(0, index, index, "b00", {}, "tune")
    return Entry(asked, Judged(0, index, index, passed, {}, {}, 0.0))


BEGUN = StudyBegun({}, "", (), {})


@dataclass(frozen=True)
class Study:
    """What one simulated study did.

    Attributes:
        champion: log speed-up that its champion truly has.
        false: how many challengers that are no faster than the champion of the day were promoted.
        tests, blocks: that were held and that they took.
        naive: log of the best screening value.
        leader: log speed-up that the candidate with that value truly has.
        published_leader, published_champion: from data that chose neither; the champion's is None while it is
            the default.
    """

    champion: float
    false: int
    tests: int
    blocks: int
    naive: float
    leader: float
    published_leader: Estimate
    published_champion: Estimate | None


def study(speeds: Sequence[float], clock: Clock) -> Study:
    """Screen, promote, publish. `speeds` are the true log speed-ups; the default's is the first."""
    entries = tuple(_entry(i, clock.measure(PAIRS, speed)) for i, speed in enumerate(speeds))
    history = History(BEGUN, (), (), ())
    for part in range(1, ROUNDS + 1):
        history = replace(history, entries=entries[: part * len(entries) // ROUNDS])
        for _ in range(CONTESTS):
            if not (waiting := matches(history, PLAN)):
                break
            held = contest(waiting[0], speeds, clock)
            history = replace(history, contests=(*history.contests, held))
    (title,) = titles(history)
    if title.champion != BASELINE:
        confirmed = Confirmation(
            0, GROUP, title.champion, confirmation(speeds[title.champion], clock), None, 0.0, 0.0
        )
        (title,) = titles(replace(history, confirmations=(confirmed,)))
    screened = [math.log(e.passed.measurements[0].speedup) for e in entries if e.passed]
    leader = max(range(len(entries)), key=lambda i: screened[i])
    return Study(
        champion=speeds[title.champion],
        false=sum(c.promoted and speeds[c.challenger] <= speeds[c.champion] for c in history.contests),
        tests=len(history.contests),
        blocks=sum(len(c.blocks) for c in history.contests),
        naive=screened[leader],
        leader=speeds[leader],
        published_leader=estimate(log_ratios(confirmation(speeds[leader], clock))),
        published_champion=title.published,
    )


def contest(match: Match, speeds: Sequence[float], clock: Clock) -> Contest:
    test, blocks = match.test(PLAN), []
    while not test.over:
        block = (clock.measure(BLOCK_PAIRS, speeds[match.challenger], speeds[match.champion]),)
        blocks.append(block)
        test.update(log_ratio(block))
    return Contest(
        step=0,
        group=GROUP,
        challenger=match.challenger,
        champion=match.champion,
        level=match.level,
        evidence=test.evidence,
        promoted=test.rejected,
        blocks=tuple(blocks),
        failed=None,
        fallen="",
        seconds=0.0,
        elapsed_s=0.0,
    )


def confirmation(speed: float, clock: Clock) -> tuple[tuple[Measurement, ...], ...]:
    return tuple((clock.measure(BLOCK_PAIRS, speed),) for _ in range(PLAN.confirmation_blocks))


def studies(noise: Noise, count: int, gain: float, seed: int) -> Iterator[Study]:
    """Studies in which all candidates equal the default, but one, for a gain other than 0."""
    rng = np.random.default_rng(seed)
    calls = 2 * CANDIDATES * PAIRS + 2 * BLOCK_PAIRS * (
        ROUNDS * CONTESTS * PLAN.most_blocks + 2 * PLAN.confirmation_blocks
    )
    for start in range(0, count, 50):
        for series in noise.draw(rng, min(50, count - start), calls):
            speeds = [0.0] * CANDIDATES
            speeds[int(rng.integers(1, CANDIDATES))] = math.log1p(gain)
            yield study(speeds, Clock(series, noise.place, rng))


@dataclass(frozen=True)
class Rate:
    """A share of trials with its 95 % Wilson interval."""

    hits: int
    trials: int

    @property
    def interval(self) -> tuple[float, float]:
        n, z2 = self.trials, _CONFIDENT**2
        share = self.hits / n
        middle = (share + z2 / (2 * n)) / (1 + z2 / n)
        half = _CONFIDENT / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
        return max(0.0, middle - half), min(1.0, middle + half)

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.hits / self.trials:.1%} ({low:.1%}–{high:.1%})"


@dataclass(frozen=True)
class Bias:
    """Mean of published factors over true ones, less one, with its standard error."""

    mean: float
    error: float

    @classmethod
    def of(cls, found: Sequence[Estimate], truths: Sequence[float]) -> "Bias":
        off = [f.median / math.exp(true) - 1 for f, true in zip(found, truths, strict=True)]
        return cls(mean(off), float(np.std(off)) / math.sqrt(len(off)))

    def __str__(self) -> str:
        return f"{100 * self.mean:+.2f} ± {100 * _CONFIDENT * self.error:.2f} %"


@dataclass(frozen=True)
class AA:
    """Studies of equal candidates with one kind of noise.

    Attributes:
        false: studies that promoted anything.
        naive: mean of the best screening value, as a gain.
        bias: of what is published of the best screened candidate.
        covered: published intervals that hold the truth.
    """

    noise: str
    false: Rate
    naive: float
    bias: Bias
    covered: Rate
    tests: float
    blocks: float


def equal(noise: Noise, count: int, seed: int) -> AA:
    done = list(studies(noise, count, 0.0, seed))
    published = [s.published_leader for s in done]
    return AA(
        noise=noise.name,
        false=Rate(sum(s.false > 0 for s in done), count),
        naive=mean(math.expm1(s.naive) for s in done),
        bias=Bias.of(published, [s.leader for s in done]),
        covered=Rate(sum(p.low <= 1 <= p.high for p in published), count),
        tests=mean(s.tests for s in done),
        blocks=sum(s.blocks for s in done) / sum(s.tests for s in done),
    )


@dataclass(frozen=True)
class Power:
    """Studies with one candidate that is faster by `gain`.

    Attributes:
        found: studies that end with it as champion.
        false: studies that promoted another.
        bias: of what is published of it; None when it was found too rarely to say.
    """

    noise: str
    gain: float
    found: Rate
    false: Rate
    bias: Bias | None


def unequal(noise: Noise, gain: float, count: int, seed: int) -> Power:
    done = list(studies(noise, count, gain, seed))
    found = [(s.published_champion, s.champion) for s in done if s.champion > 0]
    published = [(estimate, truth) for estimate, truth in found if estimate is not None]
    bias = Bias.of(*zip(*published, strict=True)) if len(published) >= 10 else None
    return Power(noise.name, gain, Rate(len(found), count), Rate(sum(s.false > 0 for s in done), count), bias)


@dataclass(frozen=True)
class Raced:
    """Screening with races of candidates whose log speed-ups vary by 0.3.

    Attributes:
        saved: share of pairs that were left out.
        edge: stopped among probes that are as slow as a candidate within the margin of the bar can be.
        bar: stopped among probes that are as fast as the bar.
        best: stopped among candidates that are truly faster than all before them.
    """

    noise: str
    saved: float
    edge: Rate
    bar: Rate
    best: Rate


def races(noise: Noise, count: int, seed: int) -> Raced:
    rng = np.random.default_rng(seed)
    taken = 0
    edge: list[bool] = []
    level: list[bool] = []
    best: list[bool] = []
    for series in noise.draw(rng, count, 6 * CANDIDATES * PAIRS):
        racing, clock = Racing(RACE_ERROR), Clock(series, noise.place, rng)
        speeds = [0.0, *(0.3 * rng.standard_normal(CANDIDATES - 1)).tolist()]
        history, standing = History(BEGUN, (), (), ()), NO_BARS
        for index, speed in enumerate(speeds):
            standing = bars(history) if index % BATCH == 0 else standing
            pairs = heat(clock, racing, standing, speed, learn=True)
            history = replace(history, entries=(*history.entries, _entry(index, pairs)))
            taken += len(pairs.samples_us)
            if index and speed > max(speeds[:index]):
                best.append(len(pairs.samples_us) < PAIRS)
            if standing:
                bar = math.log(standing[WORKLOAD])
                for stopped, speed in ((edge, bar + math.log1p(-RACE_MARGIN)), (level, bar)):
                    stopped.append(len(heat(clock, racing, standing, speed).samples_us) < PAIRS)
    saved = 1 - taken / (count * CANDIDATES * PAIRS)
    return Raced(noise.name, saved, *(Rate(sum(probes), len(probes)) for probes in (edge, level, best)))


def heat(clock: Clock, racing: Racing, standing: Bars, speed: float, *, learn: bool = False) -> Measurement:
    """The pairs of a candidate that a race leaves."""
    full = clock.measure(PAIRS, speed)
    running = racing.heat(WORKLOAD, PAIRS, standing)
    pairs = zip(full.baseline_samples_us, full.samples_us, strict=True)
    n = next((n for n, pair in enumerate(pairs, start=1) if running.pair(*pair)), PAIRS)
    if learn:
        running.learn()
    return replace(full, samples_us=full.samples_us[:n], baseline_samples_us=full.baseline_samples_us[:n])


def report(count: int, workers: int) -> Iterator[str]:
    """The tables, line by line."""
    fewer, fewest = max(1, count // 5), max(1, count // 25)
    with ProcessPoolExecutor(workers) as pool:
        same = [pool.submit(equal, noise, count, 100 + i) for i, noise in enumerate(NOISES)]
        better = [
            pool.submit(unequal, noise, gain, fewer, 200 + 10 * i + j)
            for i, noise in enumerate(POWER_NOISES)
            for j, gain in enumerate(GAINS)
        ]
        raced = [pool.submit(races, noise, fewest, 300 + i) for i, noise in enumerate(NOISES)]
        yield from table(
            f"{count} studies of {CANDIDATES} candidates each, all as fast as the default.",
            "noise of a call | studies with a false promotion | best screening value, mean |"
            " published of that candidate, bias | intervals that cover | tests a study | blocks a test",
            (
                f"{a.noise} | {a.false} | {a.naive:+.1%} | {a.bias} | {a.covered}"
                f" | {a.tests:.1f} | {a.blocks:.1f}"
                for a in (future.result() for future in same)
            ),
        )
        yield from table(
            f"One of the {CANDIDATES} is truly faster; {fewer} studies each.",
            "noise of a call | true gain | champion at the end | false promotion | published, bias",
            (
                f"{p.noise} | {p.gain:.0%} | {p.found} | {p.false} | {p.bias or 'found too rarely'}"
                for p in (future.result() for future in better)
            ),
        )
        yield from table(
            f"Races at {RACE_ERROR:.0%} error, margin {RACE_MARGIN:.0%}; {fewest} studies of {CANDIDATES}"
            " candidates, whose log speed-ups vary by 0.3.",
            "noise of a call | pairs of calls saved | stopped at the edge of the margin |"
            " stopped at the bar | stopped of those faster than all before",
            (
                f"{r.noise} | {r.saved:.0%} | {r.edge} | {r.bar} | {r.best}"
                for r in (future.result() for future in raced)
            ),
        )


def table(title: str, head: str, rows: Iterable[str]) -> Iterator[str]:
    yield from ("", title, "", f"| {head} |", "|---" * (head.count("|") + 1) + "|")
    yield from (f"| {row} |" for row in rows)


def main() -> None:
    here = Path(__file__).resolve().parent
    parser = argparse.ArgumentParser(description="Simulated studies in which the truth is known.")
    parser.add_argument("studies", nargs="?", type=int, default=500)
    parser.add_argument("--out", type=Path, default=here / "results" / "statistics.md")
    asked = parser.parse_args()
    begun = time.monotonic()
    lines = [
        "# What the promotion rules do with noise",
        "",
        f"From `python experiments/{Path(__file__).name} {asked.studies}`. In brackets and after ± stand"
        " 95 % intervals.",
    ]
    for line in report(asked.studies, os.cpu_count() or 1):
        print(line, flush=True)
        lines.append(line)
    asked.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{time.monotonic() - begun:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
