"""What the gate costs, and whom it turns away by mistake: random honest host kernels at level full.

    python experiments/bench_gate.py --configurations 200
    python experiments/bench_gate.py --cost

With evotune installed, or PYTHONPATH=. from a checkout.

A configuration is a random legal cell of the host template, half of them after one to three of the rules that
ship have replaced stages. Every `FRESH` of them the gate's cases are solved anew. A kernel that fails is
printed with all that it failed at: it is honest until looked at, so each line wants an explanation.
`--cost` times one judgement of the default kernel at K = V = 128, cold and warm, and the gate's share of an
evaluation.
"""

import argparse
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from evotune.fitness.gate import GateReport
from evotune.fitness.host import HostEvaluator, HostSettings
from evotune.fitness.judge import Problem
from evotune.fitness.objectives import OBJECTIVES
from evotune.fitness.outcome import Passed
from evotune.mutators.rules import rules_for
from evotune.reference_kda.operator import KDA
from evotune.reference_kda.workload import Workload
from evotune.search_space.branch import Branch, Candidate, replace_stage
from evotune.search_space.space import Space
from evotune.search_space.templates.kda_host import TEMPLATE

FRESH = 10
KINDS = tuple((dtype, contract) for dtype in ("float32", "bfloat16") for contract in ("plain", "production"))
DIMS = ((64, 64), (128, 128), (96, 64))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--configurations", type=int, default=0)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--cost", action="store_true")
    given = parser.parse_args()
    if given.configurations:
        refused(given.configurations, given.seed)
    if given.cost:
        cost()


def problem(dtype: str, contract: str, K: int, V: int) -> Problem:
    lengths = (300, 57)
    table = Workload("timed", "timed", lengths, 1, 2, K, V, dtype, contract, initial_state=True)
    return Problem(TEMPLATE, KDA, (table,))


def honest(posed: Problem, rng: Random, number: int) -> Candidate:
    """A random legal configuration; every second one of a branch with rules applied."""
    source, applied = TEMPLATE.source, []
    if number % 2:
        for rule in rng.sample(rules_for(TEMPLATE.name), rng.randint(1, 3)):
            source = replace_stage(source, rule.stage, rule.body)
            applied.append(f"{rule.stage}/{rule.name}")
    space = Space(TEMPLATE, posed.specializations)
    (cell,) = space.sample_cells(np.random.default_rng(rng.getrandbits(32)), 1)
    return Candidate(Branch("b00", source, None, "rules", ", ".join(applied)), space.at(cell))


def refused(count: int, seed: int | None) -> None:
    rng, wrong, judged = Random(seed), 0, 0
    for candidate, posed, report in judgements(count, rng):
        judged += 1
        if isinstance(report, GateReport) and report.failed is None:
            continue
        wrong += 1
        print(posed.specializations[0].label, candidate.knobs, candidate.branch.note or "seed")
        failures = [r for r in report.results if r.failure] if isinstance(report, GateReport) else [report]
        for failure in failures:
            print("   ", failure)
    print(
        f"refused {wrong} of {judged} honest configurations" + (f" ({wrong / judged:.1%})" if judged else "")
    )


def judgements(count: int, rng: Random) -> Iterator[tuple[Candidate, Problem, Any]]:
    with tempfile.TemporaryDirectory() as cache:
        for first in range(0, count, FRESH):
            round_ = first // FRESH
            posed = problem(*KINDS[round_ % len(KINDS)], *DIMS[round_ // len(KINDS) % len(DIMS)])
            settings = HostSettings(level="full")
            with closing(
                HostEvaluator(posed, list(OBJECTIVES.values()), settings=settings, cache=Path(cache))
            ) as judge:
                for number in range(first, min(first + FRESH, count)):
                    candidate = honest(posed, rng, number)
                    yield candidate, posed, judge.explain(candidate, "full")


def cost() -> None:
    """Seconds of one full judgement of the default kernel, and shares of whole evaluations."""
    posed = problem("float32", "plain", 128, 128)
    default = Candidate(posed.seed, TEMPLATE.default(posed.specializations[0]))
    with tempfile.TemporaryDirectory() as cache:
        for level in ("full", "screen"):
            settings = HostSettings(level=level)
            with closing(
                HostEvaluator(posed, list(OBJECTIVES.values()), settings=settings, cache=Path(cache))
            ) as judge:
                for state in ("cold", "warm", "warm"):
                    start = time.perf_counter()
                    judge.explain(default, level)
                    print(f"{level} gate, {state}: {time.perf_counter() - start:.2f} s")
                shares = []
                for seed in range(8):
                    evaluation = judge.submit(honest(posed, Random(seed), 0)).result()
                    if isinstance(evaluation.outcome, Passed):
                        shares.append(evaluation.seconds)
            print(f"{level}: {told(shares)}")


def told(shares: Sequence[Mapping[str, float]]) -> str:
    """Of the seconds of evaluations by phase."""
    if not shares:
        return "none of the kernels passed, so that the gate's share of an evaluation is not known"
    gate = sum(s["gate"] for s in shares)
    whole = sum(sum(s.values()) for s in shares)
    parts = ", ".join(f"{name} {sum(s[name] for s in shares) / len(shares):.2f} s" for name in shares[0])
    return f"the gate takes {gate / whole:.0%} of an evaluation ({parts})"


if __name__ == "__main__":
    main()
