"""Planted bugs: each is caught, by the rung named beside it. The operator is the tests' RMSNorm."""

from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from evotune.errors import StudyError
from evotune.fitness.gate import CaseBook, Gate, GateLimits, GateReport, Session
from evotune.fitness.operator import Array, Case
from evotune.fitness.outcome import Failed, Failure, Stage
from evotune.fitness.runner import Runner
from tests.fitness.compiled import SPEC, WORKLOAD, Bench
from tests.rmsnorm import RMS_OPERATOR, SOURCE, RmsDiscrepancy, RmsOperator, RmsWorkload

_HEAD = "float *factors = workspace;"
_ROW = "scale_row(x + r * D, weight, y + r * D, factors[r]);"


def head(statements: str) -> str:
    """The good source with statements after the workspace is taken."""
    return SOURCE.replace(_HEAD, f"{_HEAD} {statements}")


def row(statement: str) -> str:
    """The good source with another last step for each row."""
    return SOURCE.replace(_ROW, statement)


def with_static(declaration: str, statements: str) -> str:
    return head(statements).replace(
        "EXPORT int64_t rmsnorm_workspace", f"{declaration}\nEXPORT int64_t rmsnorm_workspace", 1
    )


def off_by(amount: str) -> str:
    """The good source with every factor larger by a relative amount; up to 2e-6 is inside the bound."""
    return SOURCE.replace("1.0f / sqrtf", f"(1 + {amount}) / sqrtf")


BUGS = {
    "wrong eps": (SOURCE.replace("/ D + eps", "/ D + 2e-6f"), Stage.REGIMES, Failure.WRONG),
    "eps ignored": (SOURCE.replace("/ D + eps", "/ D"), Stage.REGIMES, Failure.WRONG),
    "weight ignored": (SOURCE.replace("factor * weight[d]", "factor"), Stage.SMOKE, Failure.WRONG),
    "identity": (SOURCE.replace("x[d] * factor * weight[d]", "x[d]"), Stage.SMOKE, Failure.WRONG),
    "zeros": (SOURCE.replace("x[d] * factor * weight[d]", "0"), Stage.SMOKE, Failure.WRONG),
    "NaN": (SOURCE.replace("x[d] * factor * weight[d]", '__builtin_nanf("")'), Stage.SMOKE, Failure.WRONG),
    "nothing written": (row(""), Stage.SMOKE, Failure.WRONG),
    "last row missing": (row(f"if (r < rows - 1 || rows == 1) {_ROW}"), Stage.EDGES, Failure.WRONG),
    "first row's factor": (row(_ROW.replace("factors[r]", "factors[0]")), Stage.EDGES, Failure.WRONG),
    "overflow in half the range": (
        head("for (int64_t i = 0; i < rows * D; i++) if (x[i] > 1e3f) factors = 0;"),
        Stage.REGIMES,
        Failure.FAULT,
    ),
    "rows leak by an ulp": (
        row(_ROW.replace("factors[r]", "factors[r] * (x[0] > 0 ? 1 : 1 - 1e-6f)")),
        Stage.LAWS,
        Failure.WRONG,
    ),
    "writes past the end": (head("y[rows * D] = 1;"), Stage.INTEGRITY, Failure.WRONG),
    "writes before the start": (head("y[-3] = 1;"), Stage.INTEGRITY, Failure.WRONG),
    "writes past the workspace": (head("factors[rows] = 1;"), Stage.INTEGRITY, Failure.WRONG),
    "reads past the end": (
        head("volatile float beyond = x[rows * D + 16]; (void)beyond;"),
        Stage.INTEGRITY,
        Failure.FAULT,
    ),
    "reads before the start": (
        head("volatile float before = weight[-1]; (void)before;"),
        Stage.INTEGRITY,
        Failure.FAULT,
    ),
    "modifies an input": (
        SOURCE.replace(_ROW, f"{_ROW} ((float *)x)[r * D] = 0;"),
        Stage.INTEGRITY,
        Failure.WRONG,
    ),
    "changes after a while": (
        off_by("(calls > 10) * 1e-6f")
        .replace("EXPORT int64_t rmsnorm_workspace", "static int calls;\nEXPORT int64_t rmsnorm_workspace", 1)
        .replace(_HEAD, f"{_HEAD} calls++;"),
        Stage.INTEGRITY,
        Failure.UNSTABLE,
    ),
    "reads the clock": (
        off_by("(rows == 6 ? 0 : __builtin_ia32_rdtsc() % 65536 * 3e-11f)"),
        Stage.INTEGRITY,
        Failure.UNSTABLE,
    ),
    "uninitialised workspace": (
        off_by("(was % 64 == 63) * 1e-6f").replace(  # as the first call's poison, and no other
            _HEAD, f"{_HEAD} unsigned was = rows ? *(unsigned *)workspace : 0;"
        ),
        Stage.INTEGRITY,
        Failure.UNSTABLE,
    ),
    "replays outputs of the same size": (
        with_static(
            "static float kept[1 << 16]; static int64_t kept_rows;",
            "int64_t total = rows == kept_rows ? rows * D : 0; kept_rows = rows;"
            "for (int64_t i = 0; i < total; i++) y[i] = kept[i]; if (total) return;",
        ).replace(_ROW, f"{_ROW} for (int64_t d = 0; d < D; d++) kept[r * D + d] = y[r * D + d];"),
        Stage.SMOKE,
        Failure.WRONG,
    ),
    "null pointer": (head("factors = 0;"), Stage.SMOKE, Failure.FAULT),
    "trap on an odd size": (head("if (rows == 17) __builtin_trap();"), Stage.EDGES, Failure.FAULT),
    "endless loop": (head("for (volatile int on = rows == 2; on;) {}"), Stage.EDGES, Failure.TIMEOUT),
    "greedy workspace": (
        SOURCE.replace("return rows *", "return (1LL << 40) + rows *"),
        Stage.SMOKE,
        Failure.OVER_BUDGET,
    ),
    "negative workspace": (
        SOURCE.replace("return rows *", "return -rows *"),
        Stage.SMOKE,
        Failure.OVER_BUDGET,
    ),
}


@pytest.fixture(scope="module")
def gate() -> Gate:
    return Gate(RMS_OPERATOR)


def judge(bench: Bench, gate: Gate, source: str) -> GateReport:
    with bench.session(source) as session:
        return gate.judge(session, [SPEC], "screen")


@pytest.mark.parametrize("level", ["screen", "full"])
def test_the_good_kernel_passes(bench: Bench, gate: Gate, level: str) -> None:
    with bench.session(SOURCE) as session:
        report = gate.judge(session, [SPEC], "full" if level == "full" else "screen")
    assert report.failed is None
    assert 0 < report.worst_error <= 1
    assert {result.stage for result in report.results} == set(Stage) - {
        Stage.BUILD,
        Stage.INSPECT,
        Stage.TIME,
    }


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_caught_by_its_rung(bench: Bench, gate: Gate, name: str) -> None:
    source, stage, failure = BUGS[name]
    assert source != SOURCE
    failed = judge(bench, gate, source).failed
    assert failed is not None
    assert (failed.stage, failed.failure) == (stage, failure), failed.detail
    assert failed.detail
    assert failed.case


def test_calls_are_repeated_as_often_as_a_device_asks(
    bench: Bench, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    def calls(repeats: int) -> int:
        monkeypatch.setattr(Runner, "repeats", repeats)
        made: list[int] = []
        real = Session.call
        with monkeypatch.context() as patch, bench.session(SOURCE) as session:
            patch.setattr(Session, "call", lambda *given: made.append(0) or real(*given))
            assert gate.judge(session, [SPEC], "screen").failed is None
        return len(made)

    assert calls(5) == calls(0) + 5


def test_what_was_not_written_is_said(bench: Bench, gate: Gate) -> None:
    failed = judge(bench, gate, BUGS["last row missing"][0]).failed
    assert failed is not None
    assert "64 of 128 elements of y were never written" in failed.detail


def test_it_stops_at_the_first_failure_unless_asked_to_explain(bench: Bench, gate: Gate) -> None:
    source = head("if (rows == 17) __builtin_trap(); y[rows * D] = 1;")
    with bench.session(source) as session:
        short = gate.judge(session, [SPEC], "screen")
    with bench.session(source) as session:
        explained = gate.judge(session, [SPEC], "screen", explain=True)
    assert len(short.results) < len(explained.results)
    assert short.failed == explained.failed
    assert [result.failure for result in explained.failures(Stage.EDGES)] == [Failure.FAULT]
    assert explained.failures(Stage.INTEGRITY)
    assert not explained.failures(Stage.REGIMES)


@dataclass(frozen=True)
class Suspicious(RmsOperator):
    """Tries timed shapes with huge values too."""

    def hostile(self, workload: RmsWorkload) -> RmsWorkload:
        return replace(workload, fill="huge")


def test_a_timed_shape_meets_hostile_values_at_level_full(bench: Bench) -> None:
    timed = RmsWorkload(77, 64)
    gate = Gate(Suspicious(), [timed, RmsWorkload(77, 128)])
    assert [e.workload.rows for e in gate.entries(SPEC, "full")].count(77) == 1
    assert 77 not in [e.workload.rows for e in gate.entries(SPEC, "screen")]
    source = head("for (int64_t i = 0; rows == 77 && i < rows * D; i++) if (x[i] > 1e3f) rows = 0;")
    with bench.session(source) as session:
        assert gate.judge(session, [SPEC], "screen").failed is None
        failed = gate.judge(session, [SPEC], "full").failed
    assert failed is not None
    assert (failed.stage, failed.failure, failed.case) == (Stage.REGIMES, Failure.WRONG, "77x64 huge")


def test_every_use_of_a_case_is_fresh_and_solved_once() -> None:
    solved = []

    @dataclass(frozen=True)
    class Counting(RmsOperator):
        def solve(self, workload, seed):  # type: ignore[no-untyped-def]
            solved.append(seed)
            return super().solve(workload, seed)

    book, rng = CaseBook(Counting()), np.random.default_rng(1)
    first, second = book.fresh(WORKLOAD, rng), book.fresh(WORKLOAD, rng)
    assert len(solved) == 1
    x, other = first.inputs["x"], second.inputs["x"]
    assert x is not None
    assert other is not None
    assert not np.array_equal(x, other)


def test_a_ratio_that_is_not_a_number_fails(bench: Bench) -> None:
    @dataclass(frozen=True)
    class Blind:
        name: str = "blind"

        def check(
            self, call: Callable[[Case], Mapping[str, Array]], rng: np.random.Generator
        ) -> RmsDiscrepancy:
            return RmsDiscrepancy(float("nan"), "cannot tell")

    @dataclass(frozen=True)
    class Odd(RmsOperator):
        def laws(self, spec, level):  # type: ignore[no-untyped-def]
            return [Blind()]

    failed = judge(bench, Gate(Odd()), SOURCE).failed
    assert failed == Failed(Failure.WRONG, Stage.LAWS, "cannot tell", case="blind")


def test_a_timeout_is_the_limits(bench: Bench, gate: Gate) -> None:
    limits = GateLimits(call_timeout_s=0.1)
    with bench.session(BUGS["endless loop"][0], limits) as session:
        failed = gate.judge(session, [SPEC], "screen").failed
    assert failed is not None
    assert failed.detail == "no answer within 0.1 s"
    assert replace(failed, detail="") == Failed(Failure.TIMEOUT, Stage.EDGES, "", case="2 rows")


def test_a_solver_that_dies_is_explained() -> None:
    """As those of a script without a guard do."""

    class Elsewhere(Executor):
        def submit(self, function: Any, /, *arguments: Any, **named: Any) -> Any:
            future: Future[Any] = Future()
            future.set_exception(BrokenProcessPool("terminated abruptly"))
            return future

    book = CaseBook(RMS_OPERATOR)
    book.begin(WORKLOAD, Elsewhere())
    with pytest.raises(StudyError, match='under `if __name__ == "__main__":`'):
        book.solved(WORKLOAD)
