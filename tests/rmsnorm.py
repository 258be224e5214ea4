"""A second operator, small and whole, that proves the seam: fused RMSNorm on the host.

    y[r, d] = x[r, d] · weight[d] / sqrt(mean_d(x[r, :]²) + eps)        x, y [rows, D], weight [D], float32

D is compiled in. Symmetries used for fresh cases: rows may be permuted, columns of x and weight jointly
permuted, a column's sign flipped in x, weights scaled by a power of two; the truth follows exactly.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, Literal

import numpy as np

from evotune.errors import StudyError
from evotune.fitness.operator import Array, Case, GateCase, Level, Role
from evotune.search_space.template import Constant, Language, Specialization, Unit

_UNIT_ROUNDOFF = 2.0**-24
SOURCE = """\
#include <math.h>
#include <stdint.h>
#define EXPORT __attribute__((visibility("default")))

// EVOLVE-BEGIN sum_squares
static inline float sum_squares(const float *x) {
    float part[UNROLL] = {0};
    for (int64_t d = 0; d < D; d += UNROLL)
        for (int u = 0; u < UNROLL; u++)
            part[u] += x[d + u] * x[d + u];
    float sum = 0;
    for (int u = 0; u < UNROLL; u++)
        sum += part[u];
    return sum;
}
// EVOLVE-END sum_squares

// EVOLVE-BEGIN scale_row
static inline void scale_row(const float *x, const float *weight, float *y, float factor) {
    for (int64_t d = 0; d < D; d++)
        y[d] = x[d] * factor * weight[d];
}
// EVOLVE-END scale_row

EXPORT int64_t rmsnorm_workspace(int64_t rows) {
    return rows * (int64_t)sizeof(float);
}

// The factors go through the workspace, so that a test may break how it is used.
EXPORT void rmsnorm(const float *x, const float *weight, float *y, void *workspace, int64_t rows, float eps) {
    float *factors = workspace;
    for (int64_t r = 0; r < rows; r++)
        factors[r] = 1.0f / sqrtf(sum_squares(x + r * D) / D + eps);
    for (int64_t r = 0; r < rows; r++) {
        scale_row(x + r * D, weight, y + r * D, factors[r]);
    }
}
"""


@dataclass(frozen=True)
class RmsKnobs:
    """`unroll`: partial sums kept side by side."""

    unroll: int = 1


@dataclass(frozen=True)
class RmsTemplate:
    """Implements `search_space.template.Template`."""

    name: str = "rmsnorm_host"
    operator: str = "rmsnorm"
    target: str = "host"
    language: Language = "c"
    knobs: type[Any] = RmsKnobs
    source: str = SOURCE

    def default(self, spec: Specialization) -> RmsKnobs:
        return RmsKnobs()

    def why_not(self, knobs: RmsKnobs, spec: Specialization) -> str | None:
        return f"unroll {knobs.unroll} does not divide D" if spec.integer("D") % knobs.unroll else None

    def budget(self, knobs: RmsKnobs, spec: Specialization) -> Mapping[str, int]:
        return {"partial_sums": knobs.unroll}

    def unit(self, source: str, knobs: RmsKnobs, spec: Specialization, *, debug: bool = False) -> Unit:
        constants = (("D", spec.integer("D")), ("UNROLL", knobs.unroll))
        return Unit("c", source, "rmsnorm", constants, debug)

    def layouts(self, knobs: RmsKnobs, spec: Specialization) -> str:
        return f"x, y [rows, {spec.integer('D')}] row-major"


@dataclass(frozen=True)
class RmsParameter:
    name: str
    role: Role
    ctype: str = "float32"


@dataclass(frozen=True)
class RmsDiscrepancy:
    ratio: float
    detail: str


@dataclass(frozen=True)
class RmsWorkload:
    """`fill`: how x is drawn; see `_draw`."""

    rows: int
    D: int = 64
    fill: Literal["normal", "ones", "tiny", "huge"] = "normal"
    group: str = "rows"
    dtype: str = "float32"

    @property
    def name(self) -> str:
        return f"{self.rows}x{self.D} {self.fill}"

    @property
    def constants(self) -> Mapping[str, Constant]:
        return {"D": self.D}


def naive(x: Array, weight: Array, eps: float) -> Array:
    """The numpy form a user would write."""
    result: Array = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + eps) * weight
    return result


@dataclass(frozen=True)
class RmsCase:
    """Implements `fitness.operator.Case`; truth and bound are float64 [rows, D]."""

    workload: RmsWorkload
    inputs: Mapping[str, Array | None]
    truth: Array
    eps: float = 1e-6

    @property
    def name(self) -> str:
        return self.workload.name

    @property
    def outputs(self) -> Mapping[str, tuple[tuple[int, ...], str] | None]:
        return {"y": (self.truth.shape, "float32")}

    @property
    def sizes(self) -> Mapping[str, int]:
        return {"rows": self.workload.rows}

    @property
    def scalars(self) -> Mapping[str, float]:
        return {"eps": self.eps}

    def worst(self, outputs: Mapping[str, Array]) -> RmsDiscrepancy:
        """Error over bound: D products summed in any order cost D roundings of the mean, halved by the root;
        seven more for the mean, eps, root, division, and two products."""
        if not self.truth.size:
            return RmsDiscrepancy(0.0, "")
        bound = (self.workload.D / 2 + 8) * _UNIT_ROUNDOFF * np.abs(self.truth) + 1e-38
        ratio = np.abs(outputs["y"].astype(np.float64) - self.truth) / bound
        ratio = np.where(np.isnan(ratio), np.inf, ratio)
        row, column = np.unravel_index(int(ratio.argmax()), ratio.shape)
        detail = f"y, row {row}, column {column}: {ratio.max():.3g} of the bound"
        return RmsDiscrepancy(float(ratio.max()), detail)

    def fresh(self, rng: np.random.Generator) -> "RmsCase":
        x, weight = self.inputs["x"], self.inputs["weight"]
        assert x is not None
        assert weight is not None
        rows, columns = rng.permutation(x.shape[0]), rng.permutation(x.shape[1])
        signs = rng.choice(np.array([-1, 1], np.float32), x.shape[1])
        scale = np.float32(2.0 ** rng.integers(-2, 3))
        inputs = {
            "x": np.ascontiguousarray((x * signs)[rows][:, columns]),
            "weight": np.ascontiguousarray((weight * scale)[columns]),
        }
        return replace(self, inputs=inputs, truth=(self.truth * signs * scale)[rows][:, columns])


def _draw(workload: RmsWorkload, rng: np.random.Generator) -> dict[str, Array | None]:
    shape = (workload.rows, workload.D)
    scale = {"normal": 1.0, "ones": 1.0, "tiny": 1e-4, "huge": 1e4}[workload.fill]
    x = np.ones(shape) if workload.fill == "ones" else rng.standard_normal(shape) * scale
    return {"x": x.astype(np.float32), "weight": rng.uniform(0.5, 2, workload.D).astype(np.float32)}


@dataclass(frozen=True)
class RowsAreIndependent:
    """Changing the first row changes no bit of the others."""

    case: RmsCase
    name: str = "rows are independent"

    def check(self, call: Callable[[Case], Mapping[str, Array]], rng: np.random.Generator) -> RmsDiscrepancy:
        case = self.case.fresh(rng)
        x = case.inputs["x"]
        assert x is not None
        other = x.copy()
        other[0] = -1.5 * x[0]
        changed = replace(case, inputs={**case.inputs, "x": other})
        same = np.array_equal(call(case)["y"][1:], call(changed)["y"][1:])
        return RmsDiscrepancy(0.0, "") if same else RmsDiscrepancy(np.inf, "a row depends on the first one")


@dataclass(frozen=True)
class RmsOperator:
    """Implements `fitness.operator.Operator`."""

    name: str = "rmsnorm"
    entry: str = "rmsnorm"
    parameters: tuple[RmsParameter, ...] = field(
        default=(
            RmsParameter("x", "input"),
            RmsParameter("weight", "input"),
            RmsParameter("y", "output"),
            RmsParameter("workspace", "workspace", "uint8"),
            RmsParameter("rows", "size", "int64"),
            RmsParameter("eps", "scalar"),
        )
    )

    def signature(self, spec: Specialization) -> Sequence[RmsParameter]:
        return self.parameters

    def workload(self, table: Mapping[str, Any]) -> RmsWorkload:
        try:
            return RmsWorkload(**table)
        except TypeError as error:
            raise StudyError(f"workload: {error}") from error

    def gate_cases(self, spec: Specialization, level: Level) -> Iterator[GateCase]:
        D = spec.integer("D")
        yield GateCase("smoke", "one row of ones", RmsWorkload(1, D, "ones"))
        yield GateCase("smoke", "one row", RmsWorkload(1, D))
        for rows in (0, 2, 17) if level == "screen" else (0, 2, 3, 5, 17, 64, 65, 129):
            yield GateCase("edges", f"{rows} rows", RmsWorkload(rows, D))
        yield GateCase("regimes", "tiny x", RmsWorkload(5, D, "tiny"))
        yield GateCase("regimes", "huge x", RmsWorkload(5, D, "huge"))

    def hostile(self, workload: RmsWorkload) -> RmsWorkload | None:
        """None: rows do not meet, so that a few of them show what many would."""
        return None

    def laws(self, spec: Specialization, level: Level) -> Sequence[RowsAreIndependent]:
        return [RowsAreIndependent(self.solve(RmsWorkload(6, spec.integer("D")), 3))]

    def solve(self, workload: RmsWorkload, seed: int) -> RmsCase:
        inputs = _draw(workload, np.random.default_rng(seed))
        x, weight = inputs["x"], inputs["weight"]
        assert x is not None
        assert weight is not None
        case = RmsCase(workload, inputs, x)
        eps = float(np.float32(case.eps))  # what the kernel is given
        return replace(case, truth=naive(x.astype(np.float64), weight.astype(np.float64), eps))

    def question(self, workload: RmsWorkload) -> RmsCase:
        nothing = np.zeros((0, workload.D))
        return RmsCase(workload, {}, nothing)

    def empty(self, spec: Specialization) -> RmsCase:
        return self.solve(RmsWorkload(0, spec.integer("D")), 0)

    def work(self, workload: RmsWorkload) -> tuple[float, str]:
        return float(workload.rows), "rows"

    def naive_time_us(self, case: RmsCase) -> float:
        x, weight = case.inputs["x"], case.inputs["weight"]
        assert x is not None
        assert weight is not None
        start = perf_counter()
        naive(x, weight, case.eps)
        return (perf_counter() - start) * 1e6

    def floor_us(self, workload: RmsWorkload, bytes_per_us: float) -> float:
        return (2 * workload.rows + 1) * workload.D * 4 / bytes_per_us


RMS_OPERATOR = RmsOperator()
RMS_TEMPLATE = RmsTemplate()
