"""The GPU's judge on a GPU: the shipped kernel passes, kernels with planted bugs do not."""

import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evotune.errors import DeviceError
from evotune.fitness import lease
from evotune.fitness.build import BuildPlan
from evotune.fitness.cuda import CudaEvaluator, CudaSettings, Sanitized
from evotune.fitness.evaluation import Evaluation
from evotune.fitness.gate import GateLimits
from evotune.fitness.judge import Confirmation, Problem
from evotune.fitness.objectives import OBJECTIVES
from evotune.fitness.outcome import Failed, Failure, Passed, Stage
from evotune.reference_kda.operator import KdaOperator
from evotune.reference_kda.workload import Workload
from evotune.search_space.branch import Branch, Candidate
from evotune.search_space.template import Specialization
from evotune.search_space.templates.kda_sm90 import TEMPLATE, KdaSm90Template

SMALL = Workload(
    "small",
    "ragged",
    lengths=(300, 0, 64, 1),
    heads=4,
    value_heads=8,
    dtype="bfloat16",
    contract="production",
    initial_state=True,
)
LARGE = replace(
    SMALL, name="large", group="many", lengths=(4096,), heads=32, value_heads=32, final_state=False
)

# (text, what takes its place, the failures it may end in)
BUGS: Mapping[str, tuple[str, str, set[Failure]]] = {
    "wrong scale": ("return self.contract(s, q)", "return self.contract(s, q) * F32(1.01)", {Failure.WRONG}),
    "nan": ("return self.contract(s, q)", 'return self.contract(s, q) * F32(float("nan"))', {Failure.WRONG}),
    "writes past the end": (
        "            (mO.iterator + offset).store(y.to(self.io))\n",
        "            (mO.iterator + offset).store(y.to(self.io))\n"
        "            if t == 0:\n"
        "                (mO.iterator + (I64(T) * HV * self.plan.V + column)).store(y.to(self.io))\n",
        {Failure.WRONG},
    ),
    "changes an input": (
        "        self.final_state(mFinal, first, rS, sS, tx)\n",
        "        if T > 0:\n"
        "            mV.iterator.store(F32(0.125).to(self.io))\n"
        "        self.final_state(mFinal, first, rS, sS, tx)\n",
        {Failure.WRONG},
    ),
    "counts on a clean workspace": (
        "            (mO.iterator + offset).store(y.to(self.io))\n",
        "            (mO.iterator + offset).store((y + self.floats(mWork).load()).to(self.io))\n",
        {Failure.WRONG},
    ),
    "hangs": (
        "            s[j] = s[j] * decay[j]\n",
        "            s[j] = s[j] * decay[j]\n"
        "        x = s[0]\n"
        "        for i in cutlass.range(2000000000, unroll=1):\n"
        "            x = x * F32(0.999) + F32(i)\n"
        "        if x == F32(-1.0):\n"
        "            s[0] = x\n",
        {Failure.TIMEOUT},
    ),
    "launches on another stream": ("                stream=stream,\n", "", {Failure.FORGED, Failure.WRONG}),
}


class WithWorkspace(KdaSm90Template):
    """Gives the kernel 4 KiB that it has no need for, so that a test may misuse them."""

    def workspace_bytes(self, knobs: Any, spec: Specialization, sizes: Mapping[str, int]) -> int:
        return 4096


def candidate(*edits: tuple[str, str], **knobs: Any) -> Candidate:
    source = TEMPLATE.source
    for old, new in edits:
        assert old in source
        source = source.replace(old, new)
    spec = Specialization("kda", "bfloat16", (("K", 128), ("V", 128), ("contract", "production")))
    chosen = replace(TEMPLATE.default(spec), **knobs)
    return Candidate(Branch("b01", source, "b00", "rules", "changed"), chosen)


def failed(evaluation: Evaluation) -> Failed:
    assert isinstance(evaluation.outcome, Failed), evaluation.outcome
    return evaluation.outcome


@pytest.fixture(scope="module")
def evaluator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CudaEvaluator]:
    problem = Problem(WithWorkspace(), KdaOperator(), (SMALL, LARGE))
    settings = CudaSettings(gate=GateLimits(call_timeout_s=1.5), build=BuildPlan(workers=8))
    cache = tmp_path_factory.mktemp("cache")
    found = CudaEvaluator(problem, list(OBJECTIVES.values()), settings=settings, cache=cache)
    yield found
    found.close()


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_the_shipped_kernel_passes(evaluator: CudaEvaluator) -> None:
    evaluation = evaluator.submit(candidate(unroll=2)).result()
    outcome = evaluation.outcome
    assert isinstance(outcome, Passed), outcome
    large = outcome.measurements[1]
    assert large.workload == "large"
    print(outcome.measurements, outcome.host_call_us, outcome.worst_error, evaluation.seconds)  # noqa: T201
    assert 100 < large.time_us < 1e5
    assert 0.3 < large.speedup < 3
    assert 1 < outcome.host_call_us < 1000


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_a_copy_of_the_baseline_is_as_fast(evaluator: CudaEvaluator) -> None:
    outcome = evaluator.submit(candidate()).result().outcome
    assert isinstance(outcome, Passed), outcome
    assert all(abs(m.speedup - 1) < 0.05 for m in outcome.measurements), outcome.measurements


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_caught(evaluator: CudaEvaluator, name: str) -> None:
    old, new, failures = BUGS[name]
    found = failed(evaluator.submit(candidate((old, new))).result())
    print(name, found.failure, found.stage, found.case, found.detail)  # noqa: T201
    assert found.failure in failures, found
    assert found.stage not in (Stage.BUILD, Stage.INSPECT)


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_the_judge_goes_on_after_faults(evaluator: CudaEvaluator) -> None:
    evaluation = evaluator.submit(candidate(stages=3)).result()
    assert isinstance(evaluation.outcome, Passed), evaluation.outcome
    print(evaluation.seconds)  # noqa: T201


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_a_second_owner_is_turned_away(evaluator: CudaEvaluator) -> None:
    with pytest.raises(DeviceError, match="is taken: process"):
        lease.Lease(lease.gpus()[0])


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_sanitizers_and_confirmation(evaluator: CudaEvaluator, tmp_path: Path) -> None:
    found = evaluator.sanitize(candidate())
    print(found)  # noqa: T201
    assert isinstance(found, Sanitized)
    assert found.clean or found.absent
    if not found.absent:
        old, new, _ = BUGS["writes past the end"]
        bad = evaluator.sanitize(candidate((old, new)))
        print(bad)  # noqa: T201
        assert isinstance(bad, Sanitized)
        assert bad.found["memcheck"]
    confirmed = evaluator.confirm(candidate(), blocks=1)
    assert isinstance(confirmed, Confirmation), confirmed
    assert threading.active_count() < 200
