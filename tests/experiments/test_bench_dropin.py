"""The experiment on the drop-in's cost, whose way to the kernel's own function leads through the drop-in."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from evotune import bundle
from tests.evotune import exports
from tests.search_space.host_kernel import spec

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))

import bench_dropin  # noqa: E402

SPECS = (spec(64, 96), spec(64, 96, "production", "bfloat16"))


@pytest.fixture(scope="module")
def pareto(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    kernel = exports.kernel("k", SPECS, folder, target="sm_90a")
    workloads = [exports.workload(s.label, s, "k") for s in SPECS]
    bundle.write(folder / "pareto", exports.index([kernel], workloads), [kernel])
    return folder / "pareto"


Calls = list[tuple[Any, ...]]


@pytest.fixture
def calls() -> Calls:
    """Arguments of every call of a kernel."""
    return []


@pytest.fixture
def kda(pareto: Path, calls: Calls, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The real text, its kernels' functions in the place of which `calls` grows."""
    module = exports.load_dropin(pareto)
    monkeypatch.setattr(bench_dropin, "DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(module, "_current_device", lambda: -1)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(module, "_DEVICE", "cpu")
    monkeypatch.setattr(module, "_check_gpu", lambda judged_on, device: None)
    monkeypatch.setattr(module, "_check_versions", lambda kernel: None)
    monkeypatch.setattr(module, "_stream", lambda index: 1)
    monkeypatch.setattr(module, "_function", lambda path, entry: lambda *a: calls.append(a))
    return module


@pytest.mark.parametrize("number", range(len(SPECS)))
def test_the_function_gets_what_a_call_gives_it(kda: Any, calls: Calls, number: int) -> None:
    given = bench_dropin.arguments(kda.available()[number], [40, 24], 2, 4)
    function = bench_dropin.function_of(kda, given)
    calls.clear()
    kda.kda_forward(**given)
    function()
    through, direct = calls  # both end in the kernel: the plan is as it was
    assert len(through) == len(direct) == 18
    for i, (a, b) in enumerate(zip(through, direct, strict=True)):
        if i in (9, 10):  # o and the final state are a call's own
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
        elif isinstance(a, torch.Tensor):
            assert (a.data_ptr(), a.shape, a.stride()) == (b.data_ptr(), b.shape, b.stride())
        else:
            assert a == b


@pytest.mark.parametrize("number", range(len(SPECS)))
def test_every_form_of_call_is_one_that_the_dropin_takes(
    kda: Any, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(bench_dropin, "CALLS", 2)
    monkeypatch.setattr(bench_dropin, "ROUNDS", 1)
    rows = list(bench_dropin.small(kda.available()[number], kda))
    assert len(rows) == 8
    assert all(row["host_us"] >= row["least_us"] > 0 for row in rows)
    assert ["over_us" in row for row in rows] == [False] + [True] * 7
