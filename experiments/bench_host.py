"""The bars of the host target, measured.

    python experiments/bench_host.py sweep OUT.csv              1,000 random legal configurations, timed
    python experiments/bench_host.py compare STUDY_DIR SWEEP.csv  a study's best against the sweep's best
    python experiments/bench_host.py search SWEEP.csv           the sampler against random search, replayed
    python experiments/bench_host.py objects                    different objects of 1,000 configurations
    python experiments/bench_host.py overheads                  start-up, decisions, builds, the screen gate

Run it on a quiet machine, with evotune installed or PYTHONPATH=. from a checkout. Ratios come from kernels
timed in one process, interleaved with the default kernel;
absolute times are this machine's own.
"""

import argparse
import csv
import dataclasses
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

# As the command line does, before numpy loads: see evotune/cli.py.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np

from evotune import config, devices, setup
from evotune.fitness.evaluation import Evaluation
from evotune.fitness.host import Confirmation, HostEvaluator
from evotune.fitness.host_toolchain import HostToolchain
from evotune.fitness.outcome import Failed, Failure, Outcome, Passed, Stage, Value
from evotune.fitness.racing import NO_BARS, Bars
from evotune.fitness.sandbox import Limits, Sandbox
from evotune.fitness.toolchain import Compiled
from evotune.history import fold
from evotune.journal import read
from evotune.pareto import best_per_column
from evotune.records import Judged
from evotune.replay import run_in_memory
from evotune.search_space.branch import Candidate
from evotune.search_space.space import Space
from evotune.search_space.template import Specialization

QUICKSTART = Path(__file__).parent / "quickstart.toml"
SPEED = "speedup:"


def quickstart(**search: Any) -> setup.Setup:
    found = config.load(QUICKSTART, {f"search.{key}": value for key, value in search.items()})
    return setup.resolve(found, QUICKSTART.parent)


def seed_candidate(problem: HostEvaluator, knobs: Any) -> Candidate:
    return Candidate(problem.problem.seed, knobs)


def different_cells(space: Space, count: int, seed: int) -> list[tuple[int, ...]]:
    """The default's cell and random legal ones, no two alike."""
    rng = np.random.default_rng(seed)
    cells = [space.cell(space.default())]
    while len(cells) < count:
        cells = list(dict.fromkeys([*cells, *space.sample_cells(rng, count - len(cells))]))
    return cells


def objects(count: int, seed: int) -> None:
    """Compile different legal configurations and count the different objects; tell those that are alike."""
    study = quickstart()
    (spec,) = study.specializations
    sandbox = Sandbox.detect()
    toolchain = HostToolchain(sandbox)

    def compiled(cell: tuple[int, ...]) -> bytes:
        unit = study.template.unit(study.template.source, study.space.at(cell), spec)
        with sandbox.scratch() as scratch:
            found = toolchain.compile(unit, scratch, sandbox, Limits())
        if not isinstance(found, Compiled):
            sys.exit(f"{study.space.at(cell)} does not compile: {found.failed.detail}")
        return found.object

    alike = defaultdict(list)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        cells = different_cells(study.space, count, seed)
        for cell, code in zip(cells, pool.map(compiled, cells), strict=True):
            alike[code].append(study.space.encode(study.space.at(cell)))
    print(f"{len(alike)} different objects of {count} different configurations")
    for first, *others in alike.values():
        for other in others:
            print({name: (value, other[name]) for name, value in first.items() if value != other[name]})


def sweep(out: Path, count: int, seed: int) -> None:
    """Time `count` different random legal configurations, the default first."""
    study = quickstart()
    cells = different_cells(study.space, count + 1, seed)
    columns = [column.name for column in study.columns]
    with out.open("w", newline="") as file, closing(devices.host(study)) as evaluator:
        writer = csv.writer(file)
        writer.writerow([*study.space.names, *columns, "failure"])
        for first in range(0, len(cells), 8):
            knobs = [study.space.at(cell) for cell in cells[first : first + 8]]
            futures = [evaluator.submit(seed_candidate(evaluator, k)) for k in knobs]
            for k, future in zip(knobs, futures, strict=True):
                writer.writerow([*study.space.encode(k).values(), *_row(future.result().outcome, columns)])
            file.flush()
            print(f"\r{min(first + 8, len(cells))} of {len(cells)}", end="", file=sys.stderr)


def _row(outcome: Outcome, columns: Sequence[str]) -> list[str]:
    if isinstance(outcome, Passed):
        values = {value.name: value.value for value in outcome.values}
        return [*(f"{values[name]:.5g}" for name in columns), ""]
    reason = outcome.failure.value if isinstance(outcome, Failed) else "retry"
    return [*([""] * len(columns)), reason]


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A sweep as a device: outcomes by configuration, and a template in which nothing else is legal."""

    study: setup.Setup
    outcomes: Mapping[tuple[int, ...], Outcome]

    @classmethod
    def read(cls, path: Path) -> "Recorded":
        study = quickstart(batch=1)
        outcomes: dict[tuple[int, ...], Outcome] = {}
        for row in csv.DictReader(path.open(newline="")):
            outcomes[_cell(study.space, row)] = _outcome(study, row)
        template = _Restricted(study.template, study.space, frozenset(outcomes))
        space = Space(template, study.specializations)
        return cls(dataclasses.replace(study, template=template, space=space), outcomes)

    def submit(self, candidate: Candidate, bars: Bars = NO_BARS) -> Future[Evaluation]:
        future: Future[Evaluation] = Future()
        future.set_result(Evaluation(self.outcomes[self.study.space.cell(candidate.knobs)]))
        return future

    def close(self) -> None:
        """Nothing runs."""

    def best(self, columns: Sequence[str]) -> dict[str, float]:
        passed = [outcome for outcome in self.outcomes.values() if isinstance(outcome, Passed)]
        return {name: max(_value(p, name) for p in passed) for name in columns}


class _Restricted:
    """A template of which only the recorded configurations are legal."""

    def __init__(self, template: Any, space: Space, recorded: frozenset[tuple[int, ...]]) -> None:
        self._template, self._space, self._recorded = template, space, recorded

    def __getattr__(self, name: str) -> Any:
        return getattr(self._template, name)

    def why_not(self, knobs: Any, spec: Specialization) -> str | None:
        return None if self._space.cell(knobs) in self._recorded else "not in the recorded sweep"


def _cell(space: Space, row: Mapping[str, str]) -> tuple[int, ...]:
    return tuple(
        [str(value) for value in values].index(row[name])
        for name, values in zip(space.names, space.choices, strict=True)
    )


def _outcome(study: setup.Setup, row: Mapping[str, str]) -> Outcome:
    if row["failure"]:
        return Failed(Failure(row["failure"]), Stage.BUILD, "as recorded")
    values = tuple(Value(c.name, float(row[c.name]), c.unit, c.maximize) for c in study.columns)
    return Passed("screen", float(row["error"]), (), float(row["host_call"]), values, {})


def _value(passed: Passed, name: str) -> float:
    return next(value.value for value in passed.values if value.name == name)


def search(path: Path, evaluations: int, seeds: int) -> None:
    """Best found per workload group as a part of the sweep's best, geometric mean over groups, per seed."""
    recorded = Recorded.read(path)
    goals = [column.name for column in recorded.study.columns if column.name.startswith(SPEED)]
    top = recorded.best(goals)
    found: dict[str, list[float]] = {"pool": [], "tpe": [], "random": []}
    for sampler, scores in found.items():
        for seed in range(seeds):
            tables = recorded.study.config.as_json()
            tables["study"] |= {"trials": evaluations, "seed": seed, "time_limit_s": None}
            tables["search"] |= {"sampler": sampler, "batch": 1}
            tables["mutation"] |= {"operators": []}
            study = dataclasses.replace(recorded.study, config=config.parse(tables, str(path)))
            records = run_in_memory(study, recorded, {})
            passed = [r.outcome for r in records if isinstance(r, Judged) and isinstance(r.outcome, Passed)]
            parts = [max(_value(p, goal) for p in passed) / top[goal] for goal in goals]
            scores.append(statistics.geometric_mean(parts))
    print(
        f"best found after {evaluations} evaluations, part of the best of {len(recorded.outcomes)} recorded"
    )
    for sampler, scores in found.items():
        low, high = bootstrap(scores)
        print(f"  {sampler:7} {statistics.mean(scores):.3f}  [{low:.3f}, {high:.3f}]  {seeds} seeds")
    for sampler in ("pool", "tpe"):
        gaps = [a - b for a, b in zip(found[sampler], found["random"], strict=True)]
        low, high = bootstrap(gaps)
        print(f"  {sampler} - random {statistics.mean(gaps):+.3f}  [{low:+.3f}, {high:+.3f}]")


def bootstrap(values: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """Percentile interval of the mean."""
    rng = np.random.default_rng(0)
    means = rng.choice(np.asarray(values), size=(10_000, len(values))).mean(axis=1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def compare(directory: Path, path: Path, blocks: int) -> None:
    """Re-time the study's best and the sweep's best of each group with data that chose neither."""
    history = fold(read(directory).records)
    study = setup.from_header(history.begun.config, history.begun.base, directory)
    recorded = Recorded.read(path)
    best = best_per_column(history.columns, history.entries)
    goals = [column.name for column in study.columns if column.name.startswith(SPEED)]
    print(f"{len(history.judged)} candidates judged in {history.elapsed_s:.0f} s")
    with closing(devices.host(study)) as evaluator:
        for goal in goals:
            group = goal.removeprefix(SPEED)
            entry = best[goal]
            ours = Candidate(history.added(entry.asked.branch).branch, study.space.decode(entry.asked.knobs))
            cell = max(
                (cell for cell, outcome in recorded.outcomes.items() if isinstance(outcome, Passed)),
                key=lambda cell: _value(recorded.outcomes[cell], goal),  # type: ignore[arg-type]
            )
            theirs = seed_candidate(evaluator, study.space.at(cell))
            speeds = {"study": [], "sweep": []}  # type: dict[str, list[float]]
            numpy_ratio: list[float] = []
            for _ in range(blocks):
                for name, candidate in (("study", ours), ("sweep", theirs)):
                    confirmed = evaluator.confirm(candidate, 1)
                    if not isinstance(confirmed, Confirmation):
                        sys.exit(f"{name}'s best of {group} is not confirmed: {confirmed}")
                    for m in confirmed.blocks[0].measurements:
                        if m.group == group:
                            speeds[name].append(m.speedup)
                            if name == "study":
                                numpy_ratio.append(confirmed.naive_us[0][m.workload] / m.time_us)
            ratio = statistics.median(speeds["study"]) / statistics.median(speeds["sweep"])
            print(
                f"{group:8} candidate {entry.asked.index} ({entry.asked.branch}): "
                f"{statistics.median(speeds['study']):.2f} x default, "
                f"{statistics.median(numpy_ratio):.1f} x numpy, "
                f"{ratio:.2f} of the sweep's best ({statistics.median(speeds['sweep']):.2f} x default)"
            )


def overheads() -> None:
    times = []
    for _ in range(7):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "evotune", "--help"], check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - start)
    print(f"python -m evotune --help                {statistics.median(times):.3f} s (median of 7)")
    study = quickstart()
    rng = np.random.default_rng(3)
    builds, gates, timings = [], [], []
    with tempfile.TemporaryDirectory() as cache, closing(devices.host(study, Path(cache))) as evaluator:
        evaluator.submit(seed_candidate(evaluator, study.space.default())).result()
        while len(gates) < 20:
            found = evaluator.submit(seed_candidate(evaluator, study.space.sample(rng))).result()
            if isinstance(found.outcome, Passed):
                builds.append(found.seconds["build"])
                gates.append(found.seconds["gate"])
                timings.append(found.seconds["time"])
    for name, values in (("build, nothing cached", builds), ("screen gate", gates), ("timing", timings)):
        print(f"{name:39} {statistics.median(values):.3f} s (median), {max(values):.3f} s (slowest of 20)")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("sweep")
    command.add_argument("out", type=Path)
    command.add_argument("--count", type=int, default=1000)
    command.add_argument("--seed", type=int, default=1)
    command = commands.add_parser("compare")
    command.add_argument("study", type=Path)
    command.add_argument("sweep", type=Path)
    command.add_argument("--blocks", type=int, default=5)
    command = commands.add_parser("search")
    command.add_argument("sweep", type=Path)
    command.add_argument("--evaluations", type=int, default=60)
    command.add_argument("--seeds", type=int, default=10)
    command = commands.add_parser("objects")
    command.add_argument("--count", type=int, default=1000)
    command.add_argument("--seed", type=int, default=1)
    commands.add_parser("overheads")
    given = parser.parse_args()
    match given.command:
        case "sweep":
            sweep(given.out, given.count, given.seed)
        case "compare":
            compare(given.study, given.sweep, given.blocks)
        case "search":
            search(given.sweep, given.evaluations, given.seeds)
        case "objects":
            objects(given.count, given.seed)
        case "overheads":
            overheads()


if __name__ == "__main__":
    main()
