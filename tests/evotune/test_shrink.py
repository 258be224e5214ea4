"""A failure becomes a small problem: what is left of it is what the mistake needs, and nothing else."""

import tomllib
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest

from evotune.fitness.gate import CaseResult, Gate, GateReport, Session
from evotune.fitness.outcome import Failed, Failure, Stage
from evotune.fitness.redteam.entry import Edit, base_source
from evotune.reference_kda.operator import KDA
from evotune.reference_kda.workload import parse_workload
from evotune.search_space.template import Specialization
from evotune.search_space.templates.kda_host import TEMPLATE, KdaHostKnobs
from evotune.shrink import Shrinker, Smallest
from evotune.workbench import Workbench
from tests.evotune import exports
from tests.rmsnorm import RMS_TEMPLATE, RmsKnobs, RmsOperator, RmsWorkload

pytestmark = pytest.mark.usefixtures("solved_once")
SPEC = Specialization("kda", "float32", (("K", 64), ("V", 64), ("contract", "plain")))
RMS = Specialization("rmsnorm", "float32", (("D", 64),))
BETA = "float beta = strength(h, t);"
OUT = "h->o[t * h->value_stride + v] = to_io(out);"


@contextmanager
def judged(
    source: str, bench: Workbench, template: Any, knobs: Any, spec: Specialization
) -> Iterator[Session[Any]]:
    unit = template.unit(source, knobs, spec)
    compiled = bench.compile(unit)
    assert not isinstance(compiled, Failed), compiled
    library = bench.link(compiled, unit.entry)
    assert not isinstance(library, Failed), library
    with bench.session({spec: library}, unit.entry) as session:
        yield session


def shrunk(
    old: str,
    new: str,
    case: str,
    *,
    stage: Stage = Stage.EDGES,
    failure: Failure = Failure.WRONG,
    **limits: float,
) -> Smallest | None:
    """The red team's token loop with one mistake, after a gate in which this one case failed."""
    source = Edit(old, new).apply(base_source("token_loop"))
    report = GateReport("full", (CaseResult(stage, case, 2.0, failure, "as the gate saw it"),))
    with judged(source, exports.bench(), TEMPLATE, KdaHostKnobs(), SPEC) as session:
        return Shrinker(Gate(KDA), session, [SPEC], **limits).smallest(report)  # type: ignore[arg-type]


def wrong_beta(when: str) -> tuple[str, str]:
    return BETA, f"{BETA} if ({when}) beta *= 1.01f;"


@pytest.mark.parametrize(
    ("when", "case", "left"),
    [
        ("h->length % 2", "odd length, grouped value heads", {"lengths": (1,)}),
        ("h->length % 2 && h->length > 1", "one long sequence", {"lengths": (3,)}),
        (
            "h->head == h->heads - 1 && h->heads > 2",
            "eight value heads of one",
            {"lengths": (1,), "heads": 1, "value_heads": 3},
        ),
        ("h->head == 3", "three ragged", {"lengths": (1,), "heads": 1, "value_heads": 4}),
        ("h->length > 137", "500 tokens", {"lengths": (138,)}),
        ("h->length > 256", "500 tokens", {"lengths": (257,)}),
        ("h->sequence == 1 && t == 20", "three ragged", {"lengths": (1, 21), "heads": 1}),
        ("h->initial && h->length > 4", "31 tokens", {"lengths": (5,), "initial_state": True}),
    ],
)
def test_what_is_left_is_what_the_mistake_needs(when: str, case: str, left: dict[str, Any]) -> None:
    found = shrunk(*wrong_beta(when), case)
    assert found is not None
    assert found.complete
    simplest = {"heads": 1, "value_heads": 1, "regime": "ones", "initial_state": False, "final_state": False}
    assert {key: found.workload[key] for key in simplest | left} == simplest | left
    assert found.result.ratio > 1


def test_a_wrong_final_state_keeps_it() -> None:
    final = "h->final[v * K + c] = S[v][c];"
    found = shrunk(final, final.replace("S[v][c];", "0.5f * S[v][c];"), "31 tokens")
    assert found is not None
    assert (found.workload["final_state"], found.workload["lengths"]) == (True, (1,))
    assert found.result.detail.startswith("final_state, sequence 0, value head 0")


def test_a_regime_that_is_needed_stays() -> None:
    """Without a state brought in, decay shows at the second token."""
    decay = "d[c] = expf(log_decay(h, t, c));"
    clamped = decay.replace("log_decay(h, t, c)", "fmaxf(log_decay(h, t, c), -4.9f)")
    found = shrunk(decay, clamped, "regime saturated", stage=Stage.REGIMES)
    assert found is not None
    assert (found.workload["regime"], found.workload["lengths"]) == ("saturated", (2,))


def test_the_line_is_a_workload_that_a_study_takes() -> None:
    found = shrunk(*wrong_beta("h->length > 16"), "one long sequence")
    assert found is not None
    assert found.text.count("\n") == 0
    assert found.text.startswith("Smallest workload that fails: { name = ")
    table, _, there = found.text.removeprefix("Smallest workload that fails: ").partition(" }: ")
    parsed = parse_workload(tomllib.loads(f"workload = {table} }}")["workload"])
    assert (parsed.lengths, parsed.dtype, parsed.contract, parsed.K) == ((17,), "float32", "plain", 64)
    assert there.startswith("o, sequence 0, value head 0, chunk ")
    assert "largest error" in there


def test_the_search_is_bounded() -> None:
    found = shrunk(*wrong_beta("h->length > 137"), "500 tokens", tries=5)
    assert found is not None
    assert (found.tries, found.complete) == (5, False)
    assert "(of 5 tried; a smaller one may be)" in found.text
    assert shrunk(*wrong_beta("h->length > 137"), "500 tokens", seconds=-1) is None


def test_a_failure_that_does_not_show_again_is_left() -> None:
    assert shrunk(*wrong_beta("0"), "500 tokens") is None
    assert shrunk(*wrong_beta("1"), "no case of the gate") is None


def test_faults_and_breaches_shrink_as_what_they_are() -> None:
    after = "/* AFTER CALL */"
    fault = shrunk(after, "if (H > 1) *(volatile int *)8 = 1;", "three ragged", failure=Failure.FAULT)
    assert fault is not None
    assert (fault.workload["heads"], fault.workload["lengths"]) == (2, (1,))
    assert fault.result.failure is Failure.FAULT
    outside = "if (T > 20) o[T * HV * V] = o[0];"
    breach = shrunk(after, outside, "31 tokens", stage=Stage.INTEGRITY)
    assert breach is not None
    assert breach.workload["lengths"] == (21,)
    assert "past the end of o" in breach.text
    twice = f"{SPEC.label}, 31 tokens, called twice"
    fenced = shrunk(after, outside, twice, stage=Stage.INTEGRITY, failure=Failure.FAULT)
    assert fenced is not None
    assert fenced.workload["lengths"] == (21,)
    assert "outside its buffers" in fenced.text


def test_calls_that_differ_shrink_to_where_they_do() -> None:
    """The kernel adds what its buffer's address gives."""
    found = shrunk(
        "/* AFTER CALL */",
        "if (T > 20) o[0] += ((uintptr_t)o >> 12) % 64 * 1e-3f;",
        f"{SPEC.label}, 31 tokens, called twice",
        stage=Stage.INTEGRITY,
        failure=Failure.UNSTABLE,
    )
    assert found is not None
    assert found.workload["lengths"] == (21,)


@dataclass(frozen=True)
class ShrinkingRms(RmsOperator):
    """Implements `fitness.operator.Shrinks` too."""

    def smaller(self, workload: RmsWorkload) -> Generator[RmsWorkload, bool, None]:
        while workload.rows > 0 and (yield replace(workload, rows=workload.rows - 1)):
            workload = replace(workload, rows=workload.rows - 1)

    def table(self, workload: RmsWorkload) -> dict[str, Any]:
        return {"rows": workload.rows, "D": workload.D, "fill": workload.fill}


@pytest.mark.parametrize(("operator", "rows"), [(RmsOperator(), None), (ShrinkingRms(), 4)])
def test_an_operator_may_say_what_is_smaller_or_not(operator: RmsOperator, rows: int | None) -> None:
    edit = Edit("scale_row(x + r * D, weight", "scale_row(x + r * D, weight + (r > 2)")
    wrong = CaseResult(Stage.EDGES, "17 rows", 2.0, Failure.WRONG, "")
    bench = Workbench.open(operator)
    with judged(edit.apply(RMS_TEMPLATE.source), bench, RMS_TEMPLATE, RmsKnobs(), RMS) as session:
        found = Shrinker(Gate(operator), session, [RMS]).smallest(GateReport("full", (wrong,)))
    assert (found and found.workload["rows"]) == rows
