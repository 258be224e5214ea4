"""What races save, and what they cost: see evotune/fitness/racing.py.

    python experiments/bench_racing.py replay STUDY_DIR   the races of a study that was timed in full
                                                          ([timing] race_error = 0), on its own samples
    python experiments/bench_racing.py search SWEEP.csv   searches over a recorded sweep with noise added,
                                                          with races and without: pairs timed, best found

Both are computed from records: run them on any machine.
"""

import argparse
import dataclasses
import math
import statistics
from concurrent.futures import Future
from pathlib import Path

import numpy as np
from bench_host import SPEED, Recorded, bootstrap

from evotune import config
from evotune.fitness.evaluation import Evaluation
from evotune.fitness.outcome import Measurement, Passed
from evotune.fitness.racing import NO_BARS, Bars, Racing
from evotune.history import fold
from evotune.journal import read
from evotune.promotion import bars
from evotune.records import Asked, Judged
from evotune.replay import run_in_memory
from evotune.search_space.branch import Candidate

WITHIN = 0.95  # of the bar: what a race may stop with its stated error only


def replay(directory: Path, error: float) -> None:
    """Run the races of a finished study on its own samples, with the bars of each step."""
    records = read(directory).records
    racing, timed, planned, near, stopped_near = Racing(error), 0, 0, 0, 0
    stopped: set[int] = set()
    history = fold(records)
    for step in range(history.steps):
        known = bars(fold(records, before_step=step))
        for entry in history.judged:
            if entry.asked.step != step or entry.passed is None:
                continue
            for m in entry.passed.measurements:
                done = _race(racing, m, known)
                timed, planned = timed + done, planned + len(m.samples_us)
                is_near = m.workload in known and m.speedup >= WITHIN * known[m.workload]
                near += is_near
                stopped_near += is_near and done < len(m.samples_us)
                if done < len(m.samples_us):
                    stopped.add(entry.asked.index)
    best = {
        group: max((e for e in history.judged if e.passed), key=lambda e: _speedup(e.passed, group))
        for group in dict.fromkeys(m.group for m in history.judged[0].passed.measurements)
    }
    left = 1 - timed / planned
    print(f"{len(history.judged)} candidates, {timed} of {planned} pairs timed: {left:.0%} left out")
    print(f"{stopped_near} of {near} measurements within 5 % of their bar stopped (stated: {error:.0%})")
    for group, entry in best.items():
        told = "stopped early somewhere" if entry.asked.index in stopped else "timed in full"
        print(f"best of {group}: candidate {entry.asked.index}, {told}")


def _race(racing: Racing, measured: Measurement, known: Bars) -> int:
    """Pairs until the race ends."""
    heat = racing.heat(measured.workload, len(measured.samples_us), known)
    heat.start()
    for theirs_us, mine_us in zip(measured.baseline_samples_us, measured.samples_us, strict=True):
        if heat.pair(theirs_us, mine_us):
            break
    heat.learn()
    return len(heat.log_speedups)


def _speedup(passed: Passed | None, group: str) -> float:
    assert passed is not None
    return statistics.geometric_mean(m.speedup for m in passed.measurements if m.group == group)


class Noisy:
    """A sweep as a device whose pairs scatter, with heavy tails (Student's t with 3 degrees of freedom)."""

    def __init__(self, recorded: Recorded, error: float, noise: float, samples: int, seed: int) -> None:
        self.recorded = recorded
        self.racing = Racing(error)
        self.noise, self.samples = noise, samples
        self.rng = np.random.default_rng(seed)
        self.timed = 0

    def submit(self, candidate: Candidate, bars: Bars = NO_BARS) -> Future[Evaluation]:
        future: Future[Evaluation] = Future()
        outcome = self.recorded.outcomes[self.recorded.study.space.cell(candidate.knobs)]
        if isinstance(outcome, Passed):
            outcome = self._scattered(outcome, bars)
        future.set_result(Evaluation(outcome))
        return future

    def _scattered(self, true: Passed, bars: Bars) -> Passed:
        values, measurements = [], []
        for value in true.values:
            if value.name.startswith(SPEED):
                measurements.append(self._measure(value.name.removeprefix(SPEED), value.value, bars))
                value = dataclasses.replace(value, value=measurements[-1].speedup)
            values.append(value)
        return dataclasses.replace(true, values=tuple(values), measurements=tuple(measurements))

    def _measure(self, group: str, speedup: float, bars: Bars) -> Measurement:
        heat = self.racing.heat(group, self.samples, bars)
        heat.start()
        mine, theirs = [], []
        for log in self.noise * self.rng.standard_t(3, size=self.samples):
            mine.append(100.0 * math.exp(log) / speedup)
            theirs.append(100.0)
            if heat.pair(theirs[-1], mine[-1]):
                break
        heat.learn()
        self.timed += len(mine)
        return Measurement(group, group, tuple(mine), tuple(theirs))

    def close(self) -> None:
        """Nothing runs."""


def search(path: Path, evaluations: int, seeds: int, noise: float, error: float) -> None:
    """The true value of what screening holds best, as a part of the sweep's best, mean over groups."""
    recorded = Recorded.read(path)
    goals = [column.name for column in recorded.study.columns if column.name.startswith(SPEED)]
    top = recorded.best(goals)
    found: dict[float, list[float]] = {0.0: [], error: []}
    pairs: dict[float, list[int]] = {0.0: [], error: []}
    for race_error, scores in found.items():
        for seed in range(seeds):
            tables = recorded.study.config.as_json()
            tables["study"] |= {"trials": evaluations, "seed": seed, "time_limit_s": None}
            tables["mutation"] |= {"operators": []}
            tables["promotion"] |= {"share": 0.0}
            study = dataclasses.replace(recorded.study, config=config.parse(tables, str(path)))
            device = Noisy(recorded, race_error, noise, study.config.timing_plan.samples, seed)
            records = run_in_memory(study, device, {})  # type: ignore[arg-type]  # compares nothing
            asked = {r.index: r for r in records if isinstance(r, Asked)}
            passed = {
                r.index: r.outcome for r in records if isinstance(r, Judged) and isinstance(r.outcome, Passed)
            }
            parts = []
            for goal in goals:
                index = max(passed, key=lambda i: _value(passed[i], goal))
                cell = study.space.cell(study.space.decode(asked[index].knobs))
                parts.append(_value(recorded.outcomes[cell], goal) / top[goal])
            scores.append(statistics.geometric_mean(parts))
            pairs[race_error].append(device.timed)
    print(f"part of the sweep's best found by {evaluations} evaluations; pairs scatter by {noise:.1%}")
    for race_error, scores in found.items():
        name = f"races, error {race_error:g}" if race_error else "all pairs"
        timed = statistics.mean(pairs[race_error])
        print(f"  {name:18} {_told(scores)}  {timed:.0f} pairs, {seeds} seeds")
    gaps = [a - b for a, b in zip(found[error], found[0.0], strict=True)]
    left = 1 - sum(pairs[error]) / sum(pairs[0.0])
    print(f"  difference         {_told(gaps)}  {left:.0%} left out")


def _told(values: list[float]) -> str:
    low, high = bootstrap(values)
    return f"{statistics.mean(values):.3f}  [{low:.3f}, {high:.3f}]"


def _value(passed: Passed, name: str) -> float:
    return next(value.value for value in passed.values if value.name == name)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("replay")
    command.add_argument("study", type=Path)
    command.add_argument("--error", type=float, default=0.05)
    command = commands.add_parser("search")
    command.add_argument("sweep", type=Path)
    command.add_argument("--evaluations", type=int, default=160)
    command.add_argument("--seeds", type=int, default=10)
    command.add_argument("--noise", type=float, default=0.02)
    command.add_argument("--error", type=float, default=0.05)
    given = parser.parse_args()
    if given.command == "replay":
        replay(given.study, given.error)
    else:
        search(given.sweep, given.evaluations, given.seeds, given.noise, given.error)


if __name__ == "__main__":
    main()
