"""The whole pipeline on this machine: build, inspect, link, gate, time, for RMSNorm and then for KDA."""

import os
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from evotune.errors import SandboxError, StudyError
from evotune.fitness.evaluation import Comparison, Evaluation, Fallen, Purpose
from evotune.fitness.gate import CaseBook, Gate, GateLimits, GateReport
from evotune.fitness.host import Confirmation, HostEvaluator, HostSettings, Problem
from evotune.fitness.judge import _Fell
from evotune.fitness.objectives import OBJECTIVES
from evotune.fitness.operator import Level
from evotune.fitness.outcome import Failed, Failure, Passed, Retry, Stage
from evotune.fitness.sandbox import Sandbox
from evotune.fitness.timing import BaselineFault, Timed, TimingPlan
from evotune.promotion import log_ratio
from evotune.reference_kda.operator import KdaOperator
from evotune.reference_kda.workload import Workload
from evotune.search_space.branch import Branch, Candidate
from evotune.search_space.templates.kda_host import TEMPLATE as KDA_TEMPLATE
from tests.rmsnorm import RMS_OPERATOR, RMS_TEMPLATE, SOURCE, RmsKnobs, RmsWorkload

pytestmark = pytest.mark.usefixtures("solved_once")
WORKLOADS = (RmsWorkload(200, 64), RmsWorkload(100, 64, group="few"), RmsWorkload(50, 128, group="few"))
PROBLEM = Problem(RMS_TEMPLATE, RMS_OPERATOR, WORKLOADS)
SETTINGS = HostSettings(gate=GateLimits(call_timeout_s=0.5), timing=TimingPlan(samples=4))
KDA_WORKLOAD = Workload("short", "short", lengths=(48, 1, 0, 33))
KDA_PROBLEM = Problem(KDA_TEMPLATE, KdaOperator(), (KDA_WORKLOAD,))


def evaluator_of(problem: Problem, cache: Path, settings: HostSettings = SETTINGS) -> HostEvaluator:
    return HostEvaluator(problem, list(OBJECTIVES.values()), settings=settings, cache=cache)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def rms(cache: Path) -> Iterator[HostEvaluator]:
    evaluator = evaluator_of(PROBLEM, cache)
    yield evaluator
    evaluator.close()


@pytest.fixture(scope="module")
def kda(cache: Path) -> Iterator[HostEvaluator]:
    evaluator = evaluator_of(KDA_PROBLEM, cache)
    yield evaluator
    evaluator.close()


def rms_candidate(source: str = SOURCE, unroll: int = 1) -> Candidate:
    return Candidate(Branch("b01", source, "b00", "rules", "changed"), RmsKnobs(unroll))


def kda_candidate(source: str) -> Candidate:
    knobs = KDA_TEMPLATE.default(KDA_PROBLEM.specializations[0])
    return Candidate(Branch("b01", source, "b00", "rules", "changed"), knobs)


def failed(evaluation: Evaluation) -> Failed:
    assert isinstance(evaluation.outcome, Failed), evaluation.outcome
    return evaluation.outcome


def test_a_good_candidate_passes_with_one_value_per_column(rms: HostEvaluator) -> None:
    evaluation = rms.submit(rms_candidate(unroll=4)).result()
    outcome = evaluation.outcome
    assert isinstance(outcome, Passed), outcome
    names = ["speedup:rows", "speedup:few", "error", "complexity", "host_call"]
    assert [value.name for value in outcome.values] == names
    assert [m.workload for m in outcome.measurements] == [w.name for w in WORKLOADS]
    assert all(len(m.samples_us) == SETTINGS.timing.samples for m in outcome.measurements)
    assert set(evaluation.artifacts) == {"float32-D64", "float32-D128"} == set(outcome.resources)
    assert all(resources.values["code_bytes"] > 0 for resources in outcome.resources.values())
    assert set(evaluation.seconds) == {"build", "gate", "time"}


@pytest.mark.parametrize(
    ("old", "new", "stage", "failure"),
    [
        ("return sum;", "return sum", Stage.BUILD, Failure.BUILD_ERROR),
        ("return sum;", 'puts("x"); return sum;', Stage.BUILD, Failure.BUILD_ERROR),
        ("return sum;", "extern long write(int); write(1); return sum;", Stage.INSPECT, Failure.REFUSED),
        ("float sum = 0;", "static float sum;", Stage.INSPECT, Failure.REFUSED),
        ("/ D + eps", "/ D", Stage.REGIMES, Failure.WRONG),
        ("factor * weight[d]", "factor", Stage.SMOKE, Failure.WRONG),
        ("return sum;", "__builtin_trap();", Stage.SMOKE, Failure.FAULT),
        ("return sum;", "for (volatile int on = 1; on;) {} return sum;", Stage.SMOKE, Failure.TIMEOUT),
        ("= workspace;", "= workspace; factors[rows] = 1;", Stage.INTEGRITY, Failure.WRONG),
        ("return rows * ", "return (rows << 40) * ", Stage.SMOKE, Failure.OVER_BUDGET),
    ],
)
def test_a_bad_candidate_fails_where_it_should(
    rms: HostEvaluator, old: str, new: str, stage: Stage, failure: Failure
) -> None:
    source = SOURCE.replace(old, new)
    assert source != SOURCE
    outcome = failed(rms.submit(rms_candidate(source)).result())
    assert (outcome.stage, outcome.failure) == (stage, failure), outcome
    assert bool(outcome.resources) == (stage not in (Stage.BUILD, Stage.INSPECT))


def test_results_come_in_the_order_of_submission_and_the_judge_survives_a_crash(rms: HostEvaluator) -> None:
    done: list[int] = []
    futures: list[Future[Evaluation]] = []
    crash = SOURCE.replace("return sum;", "__builtin_trap();")
    for number, source in enumerate([SOURCE, crash, SOURCE, crash, SOURCE]):
        future = rms.submit(rms_candidate(source, unroll=2))
        future.add_done_callback(lambda _, number=number: done.append(number))  # type: ignore[misc]
        futures.append(future)
    kinds = [type(future.result().outcome) for future in futures]
    assert kinds == [Passed, Failed, Passed, Failed, Passed]
    assert done == [0, 1, 2, 3, 4]


def test_confirm_judges_fully_and_times_against_the_default(rms: HostEvaluator) -> None:
    confirmation = rms.confirm(rms_candidate(unroll=4), blocks=2)
    assert isinstance(confirmation, Confirmation)
    assert confirmation.report.level == "full"
    assert confirmation.report.failed is None
    assert len(confirmation.blocks) == len(confirmation.naive_us) == 2
    assert set(confirmation.naive_us[0]) == {w.name for w in WORKLOADS}
    bad = rms.confirm(rms_candidate(SOURCE.replace("/ D + eps", "/ D")))
    assert isinstance(bad, Failed)


def compared(
    evaluator: HostEvaluator, challenger: str, incumbent: str, purpose: Purpose = "promotion", blocks: int = 6
) -> tuple[Comparison | Fallen | Failed | Retry, list[Timed]]:
    """On the group "few", and what was shown on the way."""
    shown: list[Timed] = []

    def enough(timed: Timed) -> bool:
        shown.append(timed)
        return len(shown) == blocks

    mine, theirs = (rms_candidate(source) for source in (challenger, incumbent))
    return evaluator.compare(mine, theirs, enough, group="few", purpose=purpose), shown


SLOW = SOURCE.replace(
    "float *factors = workspace;",
    "float *factors = workspace; for (volatile int i = 0; i < 100000; i++) {}",
)


@pytest.mark.parametrize("purpose", ["promotion", "confirmation"])
def test_a_challenger_meets_an_incumbent_in_blocks(rms: HostEvaluator, purpose: Purpose) -> None:
    found, shown = compared(rms, SOURCE, SLOW, purpose)
    assert isinstance(found, Comparison)
    assert list(found.blocks) == shown
    assert len(shown) == 6
    for block in shown:
        assert [m.workload for m in block.measurements] == [w.name for w in WORKLOADS if w.group == "few"]
        assert all(len(m.samples_us) == len(m.baseline_samples_us) == 4 for m in block.measurements)
    assert sum(log_ratio(block.measurements) > 0 for block in shown) >= 5
    assert 0 < found.worst_error <= 1


def test_a_challenger_must_pass_the_full_gate(rms: HostEvaluator) -> None:
    found, shown = compared(rms, SOURCE.replace("/ D + eps", "/ D"), SOURCE)
    assert isinstance(found, Failed)
    assert shown == []


def test_who_held_in_the_full_gate_once_is_not_asked_again(
    rms: HostEvaluator, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    real = Gate.judge

    def noting(gate: Gate, session: Any, specs: Any, level: Level, **more: Any) -> GateReport:
        asked.append(level)
        return real(gate, session, specs, level, **more)

    monkeypatch.setattr(Gate, "judge", noting)
    other = SOURCE.replace("float sum = 0;", "float sum = 0.0f;")
    compared(rms, other, SOURCE, "promotion", blocks=1)
    compared(rms, other, SOURCE, "confirmation", blocks=1)
    assert asked == ["full"]
    for _ in range(2):
        assert isinstance(compared(rms, SOURCE.replace("/ D + eps", "/ D"), SOURCE)[0], Failed)
    assert asked == ["full"] * 3


def test_a_challenger_that_is_wrong_where_it_is_timed_has_failed(rms: HostEvaluator) -> None:
    found, _ = compared(rms, SOURCE.replace("factors[r]);", "rows == 100 ? 1 : factors[r]);"), SOURCE)
    assert isinstance(found, Failed)
    assert (found.failure, found.stage) == (Failure.WRONG, Stage.TIME)


@pytest.mark.parametrize(
    ("statement", "told"),
    [("__builtin_trap();", "fails while it is timed"), ("oh no", "does not build any more")],
)
def test_an_incumbent_that_fails_is_not_the_challengers_fault(
    rms: HostEvaluator, statement: str, told: str
) -> None:
    found, shown = compared(rms, SOURCE, SOURCE.replace("float *factors", f"{statement} float *factors"))
    assert isinstance(found, Fallen)
    assert told in found.detail
    assert shown == []


@pytest.mark.parametrize(
    ("faults", "falls"), [("f.f.f.", False), ("..ff", True)], ids=["now and then", "twice in a row"]
)
def test_an_incumbent_falls_by_two_faults_in_a_row(
    rms: HostEvaluator, monkeypatch: pytest.MonkeyPatch, faults: str, falls: bool
) -> None:
    script = iter(faults)

    def timing(session: Any, holder: Any, turn: Any) -> Timed:
        if next(script) == "f":
            raise BaselineFault("SIGSEGV")
        return Timed((), 0.0, 1.0)

    monkeypatch.setattr(rms, "_timed", timing)
    blocks: list[Timed] = []

    def enough(timed: Timed) -> bool:
        blocks.append(timed)
        return len(blocks) == 3

    met = rms._blocks(None, None, None, enough)  # type: ignore[arg-type]  # nothing is asked of them
    with pytest.raises(_Fell, match="SIGSEGV") if falls else nullcontext():
        assert len(list(met)) == 3


def test_closing_ends_a_comparison_after_its_block(cache: Path) -> None:
    evaluator = evaluator_of(PROBLEM, cache)
    shown: list[Timed] = []

    def never(timed: Timed) -> bool:
        if not shown:
            Thread(target=evaluator.close).start()
        shown.append(timed)
        return False

    found = evaluator.compare(rms_candidate(), rms_candidate(), never, group="few", purpose="promotion")
    assert found == Retry("the judge was closed")
    assert len(shown) < 50


def test_a_purpose_has_problems_of_its_own(rms: HostEvaluator, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is screened, promoted and confirmed on is solved apart; a block draws it afresh."""
    timed: dict[str, set[int]] = {}
    real = CaseBook.fresh

    def noting(book: CaseBook, workload: Any, rng: Any) -> Any:
        if workload in WORKLOADS:
            timed.setdefault(workload.name, set()).add(id(book))
        return real(book, workload, rng)

    monkeypatch.setattr(CaseBook, "fresh", noting)
    rms.submit(rms_candidate()).result()
    compared(rms, SOURCE, SOURCE, "promotion", blocks=1)
    compared(rms, SOURCE, SOURCE, "confirmation", blocks=1)
    few = [w.name for w in WORKLOADS if w.group == "few"]
    assert [len(timed[name]) for name in few] == [3, 3]


def test_bars_end_a_hopeless_candidates_timing(cache: Path) -> None:
    settings = replace(SETTINGS, timing=TimingPlan(samples=20))
    with closing(evaluator_of(PROBLEM, cache, settings)) as evaluator:
        found = evaluator.submit(rms_candidate(SLOW), {WORKLOADS[0].name: 2.0}).result()
        assert isinstance(found.outcome, Passed)
        assert [len(m.samples_us) == 20 for m in found.outcome.measurements] == [False, True, True]
        assert found.saved_s > 0
        assert [v.name for v in found.outcome.values][0] == "speedup:rows"
        assert found.outcome.values[0].value < 1


def test_explain_goes_on_after_a_failure(rms: HostEvaluator) -> None:
    report = rms.explain(rms_candidate(SOURCE.replace("/ D + eps", "/ D")), "screen")
    assert isinstance(report, GateReport)
    assert report.failed is not None
    assert {result.stage for result in report.results} >= {Stage.REGIMES, Stage.LAWS, Stage.INTEGRITY}


def test_verify_takes_objects_built_elsewhere(rms: HostEvaluator) -> None:
    confirmation = rms.confirm(rms_candidate(), blocks=1)
    assert isinstance(confirmation, Confirmation)
    report = rms.verify(confirmation.artifacts)
    assert isinstance(report, GateReport)
    assert report.failed is None
    specs = PROBLEM.specializations
    swapped = dict(zip(specs, reversed(list(confirmation.artifacts.values())), strict=True))
    wrong = rms.verify(swapped)
    assert isinstance(wrong, GateReport)
    assert wrong.failed is not None


def test_a_default_that_fails_is_the_users_to_mend(cache: Path) -> None:
    broken = replace(RMS_TEMPLATE, source=SOURCE.replace("/ D + eps", "/ D"))
    evaluator = evaluator_of(replace(PROBLEM, template=broken), cache)
    with pytest.raises(StudyError, match="default kernel fails at regimes"):
        evaluator.submit(rms_candidate()).result()
    evaluator.close()


def test_trouble_with_the_sandbox_is_a_retry(rms: HostEvaluator, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise SandboxError("no namespace left")

    monkeypatch.setattr("evotune.fitness.host.Runner", refuse)
    evaluation = rms.submit(rms_candidate()).result()
    assert evaluation.outcome == Retry("no namespace left")
    assert rms.confirm(rms_candidate()) == Retry("no namespace left")


def test_a_baseline_killed_from_outside_is_replaced(rms: HostEvaluator) -> None:
    assert isinstance(rms.submit(rms_candidate()).result().outcome, Passed)
    assert rms._baseline is not None
    rms._baseline.runner.close()
    assert isinstance(rms.submit(rms_candidate()).result().outcome, Passed)


def test_close_leaves_no_process_and_no_descriptor(cache: Path) -> None:
    Sandbox.detect()
    before = set(os.listdir("/proc/self/fd"))
    evaluator = evaluator_of(PROBLEM, cache)
    pending = [evaluator.submit(rms_candidate(unroll=unroll)) for unroll in (1, 2, 4, 8)]
    pending[0].result()
    evaluator.close()
    assert all(future.done() for future in pending)
    assert set(os.listdir("/proc/self/fd")) == before
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    assert "bwrap" not in "".join(Path(f"/proc/{pid}/comm").read_text() for pid in children.split())


def test_the_kda_default_passes_the_screen(kda: HostEvaluator) -> None:
    report = kda.explain(kda_candidate(KDA_TEMPLATE.source), "screen")
    assert isinstance(report, GateReport)
    assert [result for result in report.results if result.failure is not None] == []


@pytest.mark.parametrize("dims", [64, pytest.param(128, marks=pytest.mark.slow)])
def test_the_kda_default_passes_the_full_gate(cache: Path, dims: int) -> None:
    """Solving its cases is most of the time, a quarter of it at 64."""
    problem = replace(KDA_PROBLEM, workloads=(replace(KDA_WORKLOAD, K=dims, V=dims),))
    with closing(evaluator_of(problem, cache)) as evaluator:
        knobs = KDA_TEMPLATE.default(evaluator.problem.specializations[0])
        report = evaluator.explain(Candidate(evaluator.problem.seed, knobs), "full")
    assert isinstance(report, GateReport)
    assert [result for result in report.results if result.failure is not None] == []


def test_the_kda_default_is_as_fast_as_itself(kda: HostEvaluator) -> None:
    outcome = kda.submit(kda_candidate(KDA_TEMPLATE.source)).result().outcome
    assert isinstance(outcome, Passed), outcome
    assert 0.3 < outcome.values[0].value < 3


_DECAY = "store(d + c, exponential(x));"
_RUN = "run_head(&head"
_INITIAL = "load_state(h->initial ? h->initial + column * K : NULL, s)"
# One wrong line each, in the recurrent form that the default knobs choose: text, replacement, rung if sure.
KDA_MUTANTS: dict[str, tuple[str, str, Stage | None]] = {
    "beta forgotten": ("u[n] = (v[n] - total) * beta;", "u[n] = v[n] - total;", Stage.SMOKE),
    "state not yet decayed": ("delta(s, block->kd + i * K", "delta(s, block->k + i * K", Stage.SMOKE),
    "scale forgotten": ("h->key_stride, h->scale, q", "h->key_stride, 1.0f, q", Stage.SMOKE),
    "scale assumed": ("h->key_stride, h->scale, q", "h->key_stride, 0.08838835f, q", None),
    "initial state ignored": (_INITIAL, "load_state(NULL, s)", None),
    "empty sequence's state": (
        "if (h->final) store_state(s",
        "if (h->final && h->length) store_state(s",
        None,
    ),
    "value heads dealt in turn": ("hv / (HV / H)", "hv % H", None),
    "decay off by a thousandth": (_DECAY, "store(d + c, exponential(x * 1.001f));", None),
    "weak memories cut off": (
        _DECAY,
        "vf e = exponential(x); store(d + c, pick(e > 0.02f, e, splat(0.0f)));",
        None,
    ),
    "one value too many": (_RUN, f"o[T * HV * V] = 0; {_RUN}", Stage.INTEGRITY),
    "beta read too far": (_RUN, f"volatile float z = beta[T * HV + 16]; (void)z; {_RUN}", Stage.INTEGRITY),
}


@pytest.mark.parametrize("name", KDA_MUTANTS)
def test_a_wrong_kda_kernel_fails(kda: HostEvaluator, name: str) -> None:
    old, new, rung = KDA_MUTANTS[name]
    assert old in KDA_TEMPLATE.source
    outcome = failed(kda.submit(kda_candidate(KDA_TEMPLATE.source.replace(old, new))).result())
    assert outcome.stage in (Stage.SMOKE, Stage.EDGES, Stage.REGIMES, Stage.LAWS, Stage.INTEGRITY)
    assert rung in (None, outcome.stage), outcome
    assert outcome.failure in (Failure.WRONG, Failure.FAULT)
