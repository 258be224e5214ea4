"""KDA as evotune's machinery knows an operator: signature, gate, laws, cases, yardsticks."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from statistics import median
from typing import Any, Literal, Protocol

import numpy as np

from evotune.reference_kda.case import KdaCase, Question, case_of, solve
from evotune.reference_kda.chunked import Form, chunked
from evotune.reference_kda.gate_cases import KdaGateCase, gate_cases, hostile
from evotune.reference_kda.laws import KdaLaw, laws_of
from evotune.reference_kda.namespace import DTYPES
from evotune.reference_kda.problem import activate
from evotune.reference_kda.smaller import Asked, smaller
from evotune.reference_kda.spread import KdaSpread, pool_of
from evotune.reference_kda.workload import Workload, draw_inputs, parse_workload

Level = Literal["screen", "full"]
Role = Literal["input", "output", "workspace", "size", "scalar"]


class Spec(Protocol):
    """The facts an object is compiled for: io dtype, and constants K, V, contract by name."""

    @property
    def dtype(self) -> str: ...
    @property
    def label(self) -> str: ...
    def __getitem__(self, name: str) -> int | float | str: ...


@dataclass(frozen=True)
class KdaParameter:
    """One argument of the entry; see `evotune.fitness.operator.Parameter` and `DeviceParameter`."""

    name: str
    role: Role
    ctype: str
    absent: tuple[int | str, ...] | None = None


class KdaOperator:
    """Kimi Delta Attention, forward. Stateless but for laws and the empty case, kept per specialization."""

    name = "kda"
    entry = "kda_forward"

    def signature(self, spec: Spec) -> tuple[KdaParameter, ...]:
        """Arguments in call order; gates and beta are raw, in the io dtype, under the production contract."""
        io = spec.dtype
        gate = io if spec["contract"] == "production" else "float32"
        pointers: tuple[tuple[str, Role, str], ...] = (
            ("q", "input", io),
            ("k", "input", io),
            ("v", "input", io),
            ("g", "input", gate),
            ("beta", "input", gate),
            ("A_log", "input", "float32"),
            ("dt_bias", "input", "float32"),
            ("initial_state", "input", "float32"),
            ("cu_seqlens", "input", "int64"),
            ("o", "output", io),
            ("final_state", "output", "float32"),
            ("workspace", "workspace", "uint8"),
        )
        sizes = tuple(KdaParameter(name, "size", "int64") for name in ("N", "T", "H", "HV"))
        scalars = tuple(KdaParameter(name, "scalar", "float32") for name in ("scale", "lower_bound"))
        return (*(KdaParameter(*pointer) for pointer in pointers), *sizes, *scalars)

    def device_signature(self, spec: Spec) -> tuple[KdaParameter, ...]:
        """The same arguments as tensors on a GPU: cu_seqlens is int32, absent states have no sequences."""
        state = (0, "HV", *(_integer(spec, name) for name in ("V", "K")))
        changes: dict[str, dict[str, Any]] = {
            "cu_seqlens": {"ctype": "int32"},
            "initial_state": {"absent": state},
            "final_state": {"absent": state},
        }
        return tuple(replace(p, **changes.get(p.name, {})) for p in self.signature(spec))

    def workload(self, table: Mapping[str, Any]) -> Workload:
        """From a `[[workload]]` table of study.toml. Raises StudyError that names the key and the mend."""
        return parse_workload(table)

    def gate_cases(self, spec: Spec, level: Level) -> Iterator[KdaGateCase]:
        return gate_cases(_base(spec), level)

    def hostile(self, workload: Workload) -> Workload:
        return hostile(workload)

    def laws(self, spec: Spec, level: Level) -> tuple[KdaLaw, ...]:
        return _laws(_base(spec), level)

    def smaller(self, workload: Workload) -> Asked:
        return smaller(workload)

    def table(self, workload: Workload) -> dict[str, Any]:
        return workload.table

    def solve(self, workload: Workload, seed: int) -> KdaCase:
        return solve(workload, seed)

    def question(self, workload: Workload) -> Question:
        return Question(workload.name, workload, {})

    def pool(self, workload: Workload) -> Workload:
        return pool_of(workload)

    def spread(self, workload: Workload, pool: KdaCase, rng: np.random.Generator) -> KdaSpread:
        return KdaSpread.draw(workload, pool, rng)

    def empty(self, spec: Spec) -> KdaCase:
        """No sequence, no token."""
        return _empty(_base(spec))

    def work(self, workload: Workload) -> tuple[float, str]:
        return float(sum(workload.lengths) * workload.value_heads), "token-heads"

    def naive_time_us(self, case: KdaCase) -> float:
        """Median of three runs of the float32 numpy chunk form, C = 64, activation included."""
        w, times = case.workload, []
        for _ in range(3):
            start = time.perf_counter()
            chunked(activate(case.inputs, w.contract, w.scale, np.float32), Form(chunk=64, block=16))
            times.append(time.perf_counter() - start)
        return median(times) * 1e6

    def floor_us(self, workload: Workload, bytes_per_us: float) -> float:
        """Every argument read once and every output written once."""
        w = workload
        io = DTYPES[w.dtype].itemsize
        gate = io if w.contract == "production" else 4
        tokens = sum(w.lengths)
        rows = tokens * (2 * w.heads * w.K * io + w.value_heads * (2 * w.V * io + (w.K + 1) * gate))
        state = len(w.lengths) * w.value_heads * w.V * w.K * 4
        return float(rows + state * (w.initial_state + w.final_state)) / bytes_per_us


@cache
def _laws(base: Workload, level: Level) -> tuple[KdaLaw, ...]:
    return laws_of(base, level)


@cache
def _empty(base: Workload) -> KdaCase:
    return case_of(base, draw_inputs(base, 0), 0)


def _base(spec: Spec) -> Workload:
    """An empty workload with the specialization's facts."""
    K, V = _integer(spec, "K"), _integer(spec, "V")
    return Workload(
        name=spec.label,
        group="gate",
        lengths=(),
        K=K,
        V=V,
        dtype=spec.dtype,
        contract=str(spec["contract"]),
    )


def _integer(spec: Spec, name: str) -> int:
    value = spec[name]
    if not isinstance(value, int):
        raise TypeError(f"{name} = {value!r} of {spec.label} must be an integer")
    return value


KDA = KdaOperator()
