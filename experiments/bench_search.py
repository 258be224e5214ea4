"""How good and how dear the samplers are, on recorded spaces, with no device.

    python experiments/bench_search.py FOLDER [SEEDS]

FOLDER holds measured kernel spaces (*.json.gz: "params" with the values of each knob, "rows" with value
indices and a time in ms, or the class of a failure). For every space and sampler: the share of the optimum's
speed that the best of 60 candidates reaches, asked for in batches of 4, mean over seeds; then the mean over
spaces with a 95 % bootstrap interval of the difference to random; then milliseconds a proposal takes at 1,000
trials of 10 branches.
"""

import gzip
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import make_dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import optuna
from optuna.trial import TrialState

import evotune  # noqa: F401  (finds the packages in a checkout)
from evotune.search_space.sampler import SAMPLERS, Focus, parameters
from evotune.search_space.space import Cell, Space, knob
from evotune.search_space.template import Specialization
from evotune.search_space.templates.kda_host import TEMPLATE

BUDGET, BATCH = 60, 4
SPEC = Specialization("recorded", "float32", ())


class Recorded:
    """A template whose legal configurations are those that were measured."""

    name = "recorded"

    def __init__(self, widths: list[int], table: Mapping[Cell, float | None]) -> None:
        fields = [(f"k{i}", int, knob(0, choices=tuple(range(w)), doc="")) for i, w in enumerate(widths)]
        self.knobs: Any = make_dataclass("Knobs", fields, frozen=True)
        self._table = table

    def why_not(self, knobs: Any, spec: Specialization) -> str | None:
        return None if tuple(vars(knobs).values()) in self._table else "not measured"


def load(path: Path) -> dict[Cell, float | None]:
    """Milliseconds by cell, None where the configuration failed; knobs with one value are dropped."""
    data = json.loads(gzip.decompress(path.read_bytes()))
    kept = [i for i, values in enumerate(data["params"].values()) if len(values) > 1]
    return {
        tuple(row[0][i] for i in kept): row[1] if isinstance(row[1], int | float) else None
        for row in data["rows"]
    }


def search(space: Space, table: Mapping[Cell, float | None], sampler_name: str, seed: int) -> float:
    """Best time in ms after `BUDGET` candidates."""
    sampler = SAMPLERS[sampler_name](space, seed, None)
    study = optuna.create_study(sampler=sampler)
    best = np.inf
    for start in range(0, BUDGET, BATCH):
        asked = []
        for index in range(start, start + BATCH):
            sampler.focus(Focus("b00", index))
            asked.append(study.ask(parameters(space, "b00")))
        for trial in asked:
            took = table[tuple(trial.params[f"b00.{name}"] for name in space.names)]
            if took is None:
                trial.set_constraint("gate", 8.0)
                study.tell(trial, state=TrialState.PRUNED)
            else:
                best = min(best, took)
                study.tell(trial, took)
    return best


def cost_ms(sampler_name: str) -> float:
    """Median CPU time of a proposal for the host template at 1,000 trials of 10 branches, 5 objectives."""
    spec = Specialization("kda", "float32", (("K", 128), ("V", 128), ("contract", "plain")))
    space = Space(TEMPLATE, [spec])
    rng = np.random.default_rng(0)
    sampler = SAMPLERS[sampler_name](space, 0, None)
    study = optuna.create_study(directions=["maximize"] * 5, sampler=sampler)
    for number in range(1000):
        branch = f"b{number % 10:02}"
        params = {f"{branch}.{k}": v for k, v in space.encode(space.sample(rng)).items()}
        study.add_trial(
            optuna.trial.create_trial(
                params=params, distributions=parameters(space, branch), values=rng.random(5).tolist()
            )
        )
    took = []
    for index in range(16):
        sampler.focus(Focus("b07", 1000 + index, relatives=("b03", "b00")))
        begun = time.process_time()
        study.ask(parameters(space, "b07"))
        took.append(time.process_time() - begun)
    return 1e3 * float(np.median(took))


def main(folder: Path, seeds: int) -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    shares: dict[str, list[list[float]]] = {name: [] for name in SAMPLERS}
    print(f"share of the optimum's speed at {BUDGET} candidates, mean of {seeds} seeds")
    for path in sorted(folder.glob("*.json.gz")):
        table = load(path)
        widths = [max(axis) + 1 for axis in zip(*table, strict=True)]
        optimum = min(ms for ms in table.values() if ms is not None)
        space = Space(Recorded(widths, table), [SPEC])  # type: ignore[arg-type]
        for name, found in shares.items():
            found.append([optimum / search(space, table, name, seed) for seed in range(seeds)])
        row = "  ".join(f"{name} {np.mean(found[-1]):.3f}" for name, found in shares.items())
        print(f"{path.name.removesuffix('.json.gz'):36} {row}", flush=True)
    rng = np.random.default_rng(0)
    baseline = np.array(shares["random"])
    for name, found in shares.items():
        difference = (np.array(found) - baseline).mean(axis=1)
        drawn = rng.choice(difference, size=(4000, len(difference))).mean(axis=1)
        low, high = np.quantile(drawn, [0.025, 0.975])
        gain = f"{difference.mean():+.3f} [{low:+.3f}, {high:+.3f}]"
        print(f"{name}: mean {np.mean(found):.3f}, to random {gain}, {cost_ms(name):.1f} ms a proposal")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 10)
