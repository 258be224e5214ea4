"""A template of three tiny stages, branches of it and outcomes: what mutators need, with no compiler."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from evotune.fitness.outcome import Failed, Failure, Measurement, Passed, Resources, Stage
from evotune.mutators.mutator import Request, Standing
from evotune.search_space.branch import Branch, replace_stage
from evotune.search_space.space import knob
from evotune.search_space.template import Language, Specialization, Unit

SPEC = Specialization("toy", "float32", (("N", 8),))
SOURCE = """\
#include <stdint.h>
// EVOLVE-BEGIN load
static inline float load(const float *x) {
    return *x;
}
// EVOLVE-END load

// EVOLVE-BEGIN scale
static inline float scale(float x) {
    float y = x;
    return y * 2.0f;
}
// EVOLVE-END scale

// EVOLVE-BEGIN store
static inline void store(float *to, float x) {
    *to = x;
}
// EVOLVE-END store

void toy(const float *x, float *o, int64_t n) {
    for (int64_t i = 0; i < n; i++) store(o + i, scale(load(x + i)));
}
"""


@dataclass(frozen=True)
class ToyKnobs:
    unroll: int = knob(1, choices=(1, 2, 4), doc="iterations at once")
    mode: str = knob("plain", choices=("plain", "fused"), doc="one loop or two")


class Toy:
    """Doubles n floats."""

    name = "toy"
    operator = "toy"
    target = "host"
    language: Language = "c"
    knobs = ToyKnobs
    source = SOURCE

    def default(self, spec: Specialization) -> ToyKnobs:
        return ToyKnobs()

    def why_not(self, knobs: ToyKnobs, spec: Specialization) -> str | None:
        return "fused needs unroll 1 or 2" if knobs.mode == "fused" and knobs.unroll > 2 else None

    def budget(self, knobs: ToyKnobs, spec: Specialization) -> Mapping[str, int]:
        return {"registers": knobs.unroll}

    def unit(self, source: str, knobs: ToyKnobs, spec: Specialization, *, debug: bool = False) -> Unit:
        return Unit("c", source, "toy", (("UNROLL", knobs.unroll),), debug)

    def layouts(self, knobs: ToyKnobs, spec: Specialization) -> str:
        return "flat\n"


TOY = Toy()
SEED = Branch("b00", SOURCE, None, "seed", "seed")


def child(ident: str, **stage_bodies: str) -> Branch:
    source = SOURCE
    for name, body in stage_bodies.items():
        source = replace_stage(source, name, body)
    return Branch(ident, source, "b00", "rules", f"changed {', '.join(stage_bodies)}")


def passed(**speedups: float) -> Passed:
    """A pass with one workload per group, the default kernel at 100 us."""
    measurements = tuple(
        Measurement(f"{group}-1", group, (100.0 / speedup,) * 3, (100.0,) * 3)
        for group, speedup in speedups.items()
    )
    return Passed("screen", 0.25, measurements, 0.5, (), {"float32-N8": Resources({"code_bytes": 512})})


def failed(stage: Stage = Stage.BUILD, detail: str = "expected ';'", log: str = "") -> Failed:
    failure = Failure.BUILD_ERROR if stage is Stage.BUILD else Failure.WRONG
    return Failed(failure, stage, detail, case="" if stage is Stage.BUILD else "odd n", log=log)


def standing(branch: Branch, knobs: Any = None, **speedups: float) -> Standing:
    best = ((knobs or ToyKnobs(), passed(**speedups)),) if speedups else ()
    return Standing(branch, best, (), len(best))


def request(seed: int, *standings: Standing, tried: frozenset[str] = frozenset()) -> Request:
    return Request(TOY, (SPEC,), standings, tried | frozenset(s.branch.digest for s in standings), seed)
