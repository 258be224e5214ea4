"""The GPU's judge with the processor in the GPU's place: whole evaluations, one process per candidate."""

import json
import platform
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import pytest

from evotune.errors import DeviceLost, SandboxError, StudyError
from evotune.fitness import _cuda_child as child
from evotune.fitness import cuda_runner
from evotune.fitness.build import BuildPlan
from evotune.fitness.cuda import SANITIZERS, CudaEvaluator, CudaSettings, Sanitized, complaint
from evotune.fitness.cuda_runner import CudaCell, CudaProcess
from evotune.fitness.cuda_timing import Bands, has_work
from evotune.fitness.evaluation import Evaluation
from evotune.fitness.gate import GateLimits, GateReport
from evotune.fitness.host_toolchain import HostToolchain
from evotune.fitness.judge import CompiledEvaluator, Confirmation, Problem, _Stop
from evotune.fitness.lease import Gpu, Lease
from evotune.fitness.link import Linker
from evotune.fitness.objectives import OBJECTIVES
from evotune.fitness.operator import Case
from evotune.fitness.outcome import Failed, Failure, Passed, Retry, Stage
from evotune.fitness.runner import Fault
from evotune.fitness.sandbox import Sandbox
from evotune.fitness.timing import TimingPlan
from evotune.fitness.toolchain import Toolchain
from evotune.reference_kda.operator import KdaOperator
from evotune.reference_kda.workload import Workload
from evotune.search_space.branch import Branch, Candidate
from evotune.search_space.template import Specialization
from evotune.search_space.templates.kda_host import TEMPLATE, KdaHost
from tests.fitness import fake_gpu

WORKLOADS = (
    Workload("four heads", "few", lengths=(48, 1, 0, 33), heads=4, value_heads=4, K=64, V=64),
    Workload(
        "grouped",
        "few",
        lengths=(40,),
        heads=2,
        value_heads=4,
        K=64,
        V=64,
        initial_state=True,
        final_state=False,
    ),
)
PLAN = TimingPlan(samples=4, shortest_timeout_s=1.0, empty_calls=8)
# A shared processor's clock says nothing about calls of 10 us.
BANDS = Bands(us=1e6, hidden_us=1e6)
SETTINGS = CudaSettings(gate=GateLimits(call_timeout_s=1.0, arena_mib=64), timing=PLAN, spares=2, bands=BANDS)


class WorkspaceTemplate(KdaHost):
    """A host template that says, as a GPU's does, what workspace its objects need."""

    def workspace_bytes(self, knobs: Any, spec: Specialization, sizes: Mapping[str, int]) -> int:
        return (1 << 16) + 4096 * sizes["T"]


class FakeEvaluator(CudaEvaluator):
    folder: Path

    def _tools(self, sandbox: Sandbox) -> tuple[Toolchain, Linker]:
        toolchain = HostToolchain(sandbox)
        return toolchain, Linker(toolchain, sandbox)

    def _leased(self) -> Lease:
        return Lease(Gpu("processor", "none", 0), self.folder)

    def _judge_cell(self, sandbox: Sandbox) -> CudaCell:
        script = Path(fake_gpu.__file__).resolve()
        packages = ("torch", "numpy", "typing_extensions")
        arena_bytes = self._settings.gate.arena_mib << 20
        return CudaCell(sandbox, arena_bytes, script, (), script, packages=packages)


@pytest.fixture(scope="module")
def evaluator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeEvaluator]:
    FakeEvaluator.folder = tmp_path_factory.mktemp("lease")
    problem = Problem(WorkspaceTemplate(), KdaOperator(), WORKLOADS)
    cache = tmp_path_factory.mktemp("cache")
    found = FakeEvaluator(problem, list(OBJECTIVES.values()), settings=SETTINGS, cache=cache)
    yield found
    found.close()


@pytest.fixture(autouse=True)
def wide_band(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evotune.fitness.cuda.CANARY_BAND", 100.0)


def candidate(*edits: tuple[str, str]) -> Candidate:
    source = TEMPLATE.source
    for old, new in edits:
        assert old in source
        source = source.replace(old, new)
    spec = Specialization("kda", "float32", (("K", 64), ("V", 64), ("contract", "plain")))
    return Candidate(Branch("b01", source, "b00", "rules", "changed"), TEMPLATE.default(spec))


def failed(evaluation: Evaluation) -> Failed:
    assert isinstance(evaluation.outcome, Failed), evaluation.outcome
    return evaluation.outcome


def test_a_good_candidate_passes_gate_and_timing(evaluator: FakeEvaluator) -> None:
    evaluation = evaluator.submit(candidate()).result()
    outcome = evaluation.outcome
    assert isinstance(outcome, Passed), outcome
    assert [m.workload for m in outcome.measurements] == ["four heads", "grouped"]
    assert all(len(m.samples_us) == len(m.baseline_samples_us) == 4 for m in outcome.measurements)
    assert 0 < outcome.worst_error <= 1
    assert outcome.host_call_us > 0
    seconds = evaluation.seconds
    assert set(seconds) - {"all_driver"} == {"build", "gate", "time", "gpu", "gpu_busy", "all_events"}
    assert 0 < seconds["gpu_busy"] <= min(seconds["gpu"], seconds["all_events"])


EARLY = {Stage.SMOKE, Stage.EDGES, Stage.REGIMES}
MARK = "float scale, float lower_bound) {\n    float *room"


@pytest.mark.parametrize(
    ("statement", "failure", "stages"),
    [
        ("scale *= 1.01f;", Failure.WRONG, EARLY),
        ('for (;;) __asm__ volatile("");', Failure.TIMEOUT, {Stage.SMOKE}),
        ("*(volatile int *)8 = 1;", Failure.FAULT, {Stage.SMOKE}),
        (
            "if (T) ((io_t *)q)[0] = 0;",
            Failure.WRONG,
            {Stage.SMOKE, Stage.EDGES, Stage.REGIMES, Stage.INTEGRITY},
        ),
        ("if (T) o[T * HV * V] = 0;", Failure.WRONG, {Stage.INTEGRITY}),
    ],
    ids=["wrong scale", "hang", "fault", "changes an input", "writes past the end"],
)
def test_planted_bugs_are_caught(
    evaluator: FakeEvaluator, statement: str, failure: Failure, stages: set[Stage]
) -> None:
    bad = candidate((MARK, MARK.replace("{\n", "{\n    " + statement + "\n", 1)))
    judged = evaluator.submit(bad), evaluator.submit(candidate())
    found = failed(judged[0].result())
    assert (found.failure, found.stage in stages) == (failure, True), found
    assert isinstance(judged[1].result().outcome, Passed)  # in a process of its own


def test_lanes_do_not_mix(evaluator: FakeEvaluator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several candidates at once: each future has its own candidate's result, no two processes have kernels
    on the GPU at a time, timed bursts of two candidates do not interleave, the baseline is laid out once."""
    asked: list[tuple[int, int, float, float]] = []
    answered = CudaProcess._answered

    def watched(process: CudaProcess, operation: int, data: bytes, timeout_s: float) -> int:
        begun_s = time.monotonic()
        try:
            return answered(process, operation, data, timeout_s)
        finally:
            asked.append((operation, id(process), begun_s, time.monotonic()))

    assert isinstance(evaluator.submit(candidate()).result().outcome, Passed)  # the baseline stands
    monkeypatch.setattr(CudaProcess, "_answered", watched)
    bad = candidate((MARK, MARK.replace("{\n", "{\n    scale *= 1.01f;\n", 1)))
    futures = [evaluator.submit(each) for each in (candidate(), bad, candidate())]
    outcomes = [future.result().outcome for future in futures]
    assert [type(outcome) for outcome in outcomes] == [Passed, Failed, Passed]

    turns = sorted(((begun, ended) for op, _, begun, ended in asked if op in cuda_runner._IN_TURN))
    assert all(ended <= begun for (_, ended), (begun, _) in pairwise(turns))
    assert evaluator._baseline is not None
    theirs = id(evaluator._baseline.runner)
    assert not [op for op, process, *_ in asked if process == theirs and op in (child.PREPARE, child.ARM)]
    timed = [process for op, process, *_ in asked if op == child.SAMPLE and process != theirs]
    assert len([key for key, _ in groupby(timed)]) == 2


def test_a_timeout_on_a_loaded_machine_is_no_verdict(
    evaluator: FakeEvaluator, monkeypatch: pytest.MonkeyPatch
) -> None:
    hang = candidate((MARK, MARK.replace("{\n", '{\n    if (T == 82) for (;;) __asm__ volatile("");\n', 1)))
    assert failed(evaluator.submit(hang).result()).failure is Failure.TIMEOUT
    monkeypatch.setattr("evotune.fitness.cuda.LATE", 0.0)
    outcome = evaluator.submit(hang).result().outcome
    assert isinstance(outcome, Retry)
    assert "while the default kernel's answer took" in outcome.reason


_OUT_OF_MEMORY = Failed(Failure.FAULT, Stage.SMOKE, "RuntimeError: CUDA error: out of memory")


def test_trouble_of_the_device_is_believed_when_others_meet_it(
    evaluator: FakeEvaluator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A candidate's own word alone fails it, else it would be tried again on every resume."""

    def saying(*_: object) -> None:
        raise _Stop(_OUT_OF_MEMORY)

    def failing(*_: object) -> float:
        raise Fault(Failure.FAULT, "uncorrectable ECC error")

    assert isinstance(evaluator.submit(candidate()).result().outcome, Passed)  # the baseline stands
    monkeypatch.setattr(evaluator, "_judge_built", saying)
    found = failed(evaluator.submit(candidate()).result())
    assert (found.failure, found.detail) == (Failure.FAULT, _OUT_OF_MEMORY.detail)
    monkeypatch.setattr(CudaProcess, "copy_bytes_per_us", failing)
    outcome = evaluator.submit(candidate()).result().outcome
    assert isinstance(outcome, Retry)
    assert "uncorrectable ECC error" in outcome.reason


def test_what_never_ran_on_the_device_is_not_asked_of_it(
    evaluator: FakeEvaluator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked() -> None:
        raise AssertionError

    monkeypatch.setattr(evaluator, "_canary_now", asked)
    for unasked in (
        Failed(Failure.TIMEOUT, Stage.BUILD, "took more than 60 s"),
        Failed(Failure.REFUSED, Stage.INSPECT, "calls nvlink_no_device"),
        Failed(Failure.FAULT, Stage.SMOKE, "RuntimeError: CUDA error: an illegal memory access"),
        Failed(Failure.WRONG, Stage.SMOKE, "out of memory"),
    ):
        assert evaluator._blamed(unasked) is unasked
    with pytest.raises(AssertionError):
        evaluator._blamed(_OUT_OF_MEMORY)


@pytest.mark.parametrize(
    ("said", "raised"), [("uncorrectable ECC error", SandboxError), ("o is not a number", StudyError)]
)
def test_the_baselines_word_on_the_device_is_believed(
    evaluator: FakeEvaluator, monkeypatch: pytest.MonkeyPatch, said: str, raised: type[Exception]
) -> None:
    def failing(*_: object) -> None:
        raise StudyError(f"the template's default kernel fails: {said}")

    monkeypatch.setattr(CompiledEvaluator, "_time", failing)
    with pytest.raises(raised, match=said):
        evaluator._time(None, None)  # type: ignore[arg-type]  # nothing is asked of them


def test_a_sanitizer_watches_calls_that_have_work(evaluator: FakeEvaluator) -> None:
    class Noting:
        def __init__(self) -> None:
            self.cases: list[tuple[int, Case]] = []

        def call(self, index: int, case: Case) -> None:
            self.cases.append((index, case))

    noting = Noting()
    evaluator._some_calls(noting)  # type: ignore[arg-type]
    assert all(has_work(case) for _, case in noting.cases)
    rungs = {entry.rung for entry in evaluator._operator.gate_cases(evaluator._specs[0], "screen")}
    assert [index for index, _ in noting.cases].count(0) == len(rungs)


def test_only_large_problems_are_wrong(evaluator: FakeEvaluator) -> None:
    """What the gate's small cases do not show is seen in the timed calls' own outputs."""
    bad = candidate((MARK, MARK.replace("{\n", "{\n    if (T == 82 && HV == 4) scale *= 1.5f;\n", 1)))
    found = failed(evaluator.submit(bad).result())
    assert (found.failure, found.stage, found.case) == (Failure.WRONG, Stage.TIME, "four heads")


# Memory of its own at a fixed address, where a GPU's kernel would write beyond its buffers: four answers,
# each known again by where it goes.
_ANSWERS = """    if (T == 82 && HV == 4) {
        long kept = 0x123450000000, size = 16 << 20, made;
        register long flags __asm__("r10") = 0x100022, fd __asm__("r8") = -1, from __asm__("r9") = 0;
        __asm__ volatile("syscall" : "=a"(made)
                         : "a"(9), "D"(kept), "S"(size), "d"(3), "r"(flags), "r"(fd), "r"(from)
                         : "rcx", "r11", "memory");
        int64_t *busy = (int64_t *)kept;
        for (int i = 1; !*busy && i < 5; i++) {
            char *slot = (char *)kept + ((int64_t)i << 20);
            size_t values = T * HV * V * sizeof *o, states = N * HV * V * K * sizeof(float);
            if (*(void **)slot == (void *)o) {
                memcpy(o, slot + 64, values), memcpy(final_state, slot + 64 + values, states);
                return;
            }
            if (*(void **)slot) continue;
            *busy = 1;
            kda_forward(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, o, final_state,
                        workspace, N, T, H, HV, scale, lower_bound);
            *busy = 0, *(void **)slot = (void *)o;
            memcpy(slot + 64, o, values), memcpy(slot + 64 + values, final_state, states);
            return;
        }
    }
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="its system call is x86-64's")
def test_answers_kept_from_call_to_call_are_wrong_where_values_were_replaced(
    evaluator: FakeEvaluator,
) -> None:
    bad = candidate((MARK, MARK.replace("{\n", "{\n" + _ANSWERS, 1)))
    found = failed(evaluator.submit(bad).result())
    assert (found.failure, found.stage, found.case) == (Failure.WRONG, Stage.TIME, "four heads")


def test_hostile_values_at_a_timed_shape_stop_a_promotion(evaluator: FakeEvaluator) -> None:
    """The study's own values there have no strong gate, so that screening finds nothing wrong."""
    statement = "if (T == 82) for (int64_t i = 0; i < T * HV * K; i++) if (g[i] < -4.0f) scale = 0.0f;"
    bad = candidate((MARK, MARK.replace("{\n", "{\n    " + statement + "\n", 1)))
    assert isinstance(evaluator.submit(bad).result().outcome, Passed)
    asked = [
        evaluator.confirm(bad, blocks=1),
        evaluator.compare(bad, candidate(), lambda _: True, group="few", purpose="promotion"),
    ]
    for found in asked:
        assert isinstance(found, Failed)
        assert (found.failure, found.stage, found.case) == (Failure.WRONG, Stage.TIME, "four heads")


def test_verify_explain_and_confirm(evaluator: FakeEvaluator) -> None:
    report = evaluator.explain(candidate(), "screen")
    assert isinstance(report, GateReport)
    assert report.failed is None
    lease = FakeEvaluator.folder / "evotune-none.lease"
    lease.write_text("long silent")
    confirmed = evaluator.confirm(candidate(), blocks=1)
    assert isinstance(confirmed, Confirmation), confirmed
    assert json.loads(lease.read_text())["until"] > time.time()
    assert set(confirmed.naive_us[0]) == {"four heads", "grouped"}
    verified = evaluator.verify(confirmed.artifacts, "screen")
    assert isinstance(verified, GateReport)
    assert verified.failed is None


def test_a_device_that_slows_down_is_lost(evaluator: FakeEvaluator, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(evaluator.submit(candidate()).result().outcome, Passed)
    monkeypatch.setattr("evotune.fitness.cuda.CANARY_BAND", -1.0)
    evaluator._cell.usage.fault()
    with pytest.raises(DeviceLost, match="not what it was"):
        evaluator.submit(candidate()).result()
    monkeypatch.setattr("evotune.fitness.cuda.CANARY_BAND", 100.0)
    evaluator._doubted = False
    assert isinstance(evaluator.submit(candidate()).result().outcome, Passed)


def test_a_study_says_what_built_objects_may_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Opened(Exception):
        pass

    def opening(directory: Path, limit_bytes: int | None = None) -> None:
        raise Opened(directory, limit_bytes)

    monkeypatch.setattr("evotune.fitness.cuda.Cache", opening)
    monkeypatch.setattr(FakeEvaluator, "folder", tmp_path, raising=False)
    problem = Problem(WorkspaceTemplate(), KdaOperator(), WORKLOADS)
    settings = replace(SETTINGS, build=BuildPlan(cache_mib=7))
    with pytest.raises(Opened) as told:
        FakeEvaluator(problem, list(OBJECTIVES.values()), settings=settings, cache=tmp_path)
    assert told.value.args == (tmp_path, 7 << 20)
    Lease(Gpu("processor", "none", 0), tmp_path).close()  # the GPU is not held by an evaluator that is none


class Failing:
    """A GPU whose memory's errors the driver counts; None while it does not say."""

    used_s = None
    memory_errors: int | None = 3

    def close(self) -> None:
        """Nothing to end."""


def test_an_error_of_the_gpus_memory_is_nobodys_fault(
    evaluator: FakeEvaluator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither of who was judged meanwhile, right or wrong, in a lane or beside them; who comes later is."""
    gpu = Failing()
    monkeypatch.setattr(evaluator, "_utilization", gpu)
    bad = candidate((MARK, MARK.replace("{\n", "{\n    scale *= 1.01f;\n", 1)))
    call = CudaProcess.call

    def judged(counts: Iterator[int | None]) -> tuple[Any, Any, Any]:
        def struck(process: CudaProcess, *rest: Any) -> Any:
            gpu.memory_errors = next(counts, gpu.memory_errors)
            return call(process, *rest)

        with monkeypatch.context() as patch:
            patch.setattr(CudaProcess, "call", struck)
            both = [evaluator.submit(each) for each in (candidate(), bad)]
            outcomes = [each.result().outcome for each in both]
            gpu.memory_errors = next(counts, gpu.memory_errors)
        return outcomes[0], outcomes[1], evaluator.explain(bad)

    assert isinstance(evaluator.submit(candidate()).result().outcome, Passed)
    baseline, faults = evaluator._baseline, evaluator._cell.usage.faults
    struck_all = judged(iter(range(4, 4000)))
    assert all(isinstance(each, Retry) and "ECC" in each.reason for each in struck_all[:2])
    assert evaluator._cell.usage.faults > faults
    quiet = judged(iter([None, None, gpu.memory_errors]))  # the driver does not answer for a while
    assert isinstance(quiet[0], Passed)
    assert isinstance(quiet[1], Failed)
    assert evaluator._baseline is baseline

    def asked() -> int:
        gpu.memory_errors = (gpu.memory_errors or 0) + 1
        return 1

    assert isinstance(evaluator._ask(asked), Retry)
    assert evaluator._ask(lambda: 1) == 1


def test_no_sanitizer_is_said(evaluator: FakeEvaluator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evotune.fitness.cuda._compute_sanitizer", lambda: None)
    found = evaluator.sanitize(candidate())
    assert not isinstance(found, Failed)
    assert not found.clean
    assert "not installed" in found.absent


CLEAN = 'echo "========= ERROR SUMMARY: 0 errors" > report.txt'


def sanitized(evaluator: FakeEvaluator, folder: Path, script: str) -> Sanitized:
    """The judge under a checker, played by a shell script: $2 is the tool's name, a report is written, and
    the rest of the command line goes on."""
    tool = folder / "checker"
    tool.write_text(f'#!/bin/sh\n{script}\nshift 4\nexec "$@"\n')
    tool.chmod(0o755)
    folder.chmod(0o755)
    shown = evaluator._cell
    evaluator._cell = replace(shown, sandbox=_Showing(shown.sandbox, tool))  # type: ignore[arg-type]
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("evotune.fitness.cuda._compute_sanitizer", lambda: tool)
            found = evaluator.sanitize(candidate())
    finally:
        evaluator._cell = shown
    assert isinstance(found, Sanitized)
    return found


def test_buffers_apart_give_the_same_answers(evaluator: FakeEvaluator, tmp_path: Path) -> None:
    found = sanitized(evaluator, tmp_path, CLEAN)
    assert found.clean
    assert found.found == dict.fromkeys(SANITIZERS, "")


def test_trouble_after_a_complaint_does_not_hide_it(evaluator: FakeEvaluator, tmp_path: Path) -> None:
    race = 'echo "========= Race reported"; echo "========= RACECHECK SUMMARY: 1 hazard displayed"'
    script = f"case $2 in memcheck) {CLEAN};; racecheck) ({race}) > report.txt;; *) exit 1;; esac"
    found = sanitized(evaluator, tmp_path, script)
    assert not found.clean
    assert (found.found, found.absent) == ({"memcheck": "", "racecheck": "Race reported"}, "")


@pytest.mark.parametrize(
    ("script", "why"), [("true", "memcheck wrote no report"), ("exit 1", "did not start")]
)
def test_trouble_of_a_tool_is_not_the_candidates(
    evaluator: FakeEvaluator, tmp_path: Path, script: str, why: str
) -> None:
    found = sanitized(evaluator, tmp_path, script)
    assert not found.clean
    assert found.found == {}
    assert why in found.absent


class _Showing:
    """A sandbox that also shows one file."""

    def __init__(self, sandbox: Sandbox, path: Path) -> None:
        self._sandbox, self._path = sandbox, path
        self.scratch = sandbox.scratch

    def popen(self, command: Any, cell: Any, **streams: Any) -> Any:
        return self._sandbox.popen(command, replace(cell, read_only=(*cell.read_only, self._path)), **streams)


def test_what_a_sanitizer_says() -> None:
    clean = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
    race = "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"
    bad = (
        "========= COMPUTE-SANITIZER\n========= Invalid __global__ write of size 4 bytes\n"
        "=========     at kernel\n========= ERROR SUMMARY: 1 error\n"
    )
    assert complaint(clean) == complaint(race) == ""
    assert complaint(bad) == "Invalid __global__ write of size 4 bytes"
    assert complaint("") == "ended without a summary"
    warned = "========= Warning: Race reported\n========= RACECHECK SUMMARY: 1 hazard (0 errors, 1 warning)"
    assert complaint(warned) == "Warning: Race reported"
    assert len(complaint(bad.replace("Invalid", "Invalid" * 1000))) == 400
