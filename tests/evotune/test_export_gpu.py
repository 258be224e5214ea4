"""On a GPU: a small study, its export, verified, and `kda_forward` against the float64 recurrence."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.evotune import exports
from tests.evotune.toy import ROOT, environment

torch = pytest.importorskip("torch")

from tests.evotune.kda_tensors import FAST, NAMES, arguments, case, within_bound  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

STUDY = """
[study]
name = "small"
template = "kda_sm90_chunked"
trials = 2
[search]
batch = 2
[[workload]]
name = "ragged"
lengths = [300, 0, 64, 1]
heads = 4
value_heads = 8
dtype = "bfloat16"
contract = "production"
initial_state = true
[[workload]]
name = "one"
lengths = [2048]
heads = 16
dtype = "bfloat16"
contract = "plain"
regime = "weak"
[[workload]]
name = "narrow"
lengths = [512]
heads = 4
K = 64
V = 64
dtype = "bfloat16"
contract = "production"
"""
CONTRACTS = ("plain", "production")


@pytest.fixture(scope="module")
def pareto(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export that was verified. EVOTUNE_TEST_EXPORT names the directory of one to take instead."""
    if given := os.environ.get("EVOTUNE_TEST_EXPORT"):
        return Path(given)
    folder = tmp_path_factory.mktemp("study")
    (folder / "small.toml").write_text(STUDY)
    for command in (
        ("run", str(folder / "small.toml")),
        ("export", str(folder / "small.study"), "--out", str(folder / "pareto"), "--limit", "1"),
        ("verify", str(folder / "pareto"), "--rebuild"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "evotune", *command],
            cwd=ROOT,
            env=environment(PYTHONPATH=f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"),
            capture_output=True,
            text=True,
        )
        print(done.stdout[-2000:], done.stderr[-2000:])  # noqa: T201
        assert done.returncode == 0, done.stderr
    return folder / "pareto"


@pytest.fixture(scope="module")
def kda(pareto: Path) -> Iterator[Any]:
    module = exports.load_dropin(pareto)
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


def solved(contract: str, **changes: Any) -> Any:
    facts = {"K": 128, "V": 128, "dtype": "bfloat16", "initial_state": True}
    return case(contract, **facts | changes)


def given_to(case: Any, B: int = 1) -> dict[str, Any]:
    return arguments(case, B, "cuda")


SHAPES: dict[str, dict[str, Any]] = {
    "grouped heads": {},
    "no states": {"initial_state": False, "final_state": False},
    "packed with empty sequences": {"lengths": (0, 9, 0, 1, 140, 0), "heads": 1, "value_heads": 2},
    "all sequences empty": {"lengths": (0, 0)},
    "no sequence": {"lengths": ()},
    "no token": {"lengths": (0,)},
    "several tiles and one": {"lengths": (1025,), "heads": 1, "value_heads": 1, "regime": "weak"},
    "strong gates": {"lengths": (200,), "heads": 3, "value_heads": 3, "regime": "saturated"},
}


@pytest.mark.parametrize("contract", CONTRACTS)
@pytest.mark.parametrize("name", SHAPES)
def test_it_equals_the_oracle(kda: Any, contract: str, name: str) -> None:
    """With int32 and int64 cu_seqlens, both layouts of the state: the same bits each time."""
    problem = solved(contract, **SHAPES[name])
    given = given_to(problem)
    cu = given.setdefault("cu_seqlens", torch.tensor([0, 37], device="cuda"))
    if len(problem.workload.lengths) == 1:
        cu = given["cu_seqlens"] = torch.tensor([0, *problem.workload.lengths], device="cuda")
    o, state = kda.kda_forward(**given, state_v_first=True)
    assert o.dtype == given["q"].dtype
    assert o.shape == given["v"].shape
    assert within_bound(problem, o, state)
    first = {"initial_state": given["initial_state"].mT.contiguous()} if "initial_state" in given else {}
    again, k_first = kda.kda_forward(**given | first | {"cu_seqlens": cu.int()})
    assert torch.equal(again, o)
    assert torch.equal(k_first, state.mT)


def test_a_narrow_head(kda: Any) -> None:
    problem = solved("production", K=64, V=64, lengths=(33, 100))
    assert within_bound(problem, *kda.kda_forward(**given_to(problem), state_v_first=True))


@pytest.mark.parametrize("contract", CONTRACTS)
def test_a_batch_is_independent_sequences(kda: Any, contract: str) -> None:
    problem = solved(contract, lengths=(20, 20, 20))
    o, state = kda.kda_forward(**given_to(problem, B=3), state_v_first=True)
    assert o.shape[:2] == (3, 20)
    assert within_bound(problem, o, state)


def large(contract: str, T: int = 4096, H: int = 16) -> dict[str, Any]:
    """Random, uniform in nothing that matters; 1.3 GB of workspace would be at 64 heads of 16,384 tokens."""
    x = {n: torch.randn(1, T, H, 128, device="cuda", dtype=torch.bfloat16) for n in ("q", "k", "v", "g")}
    if contract == "production":
        beta = torch.randn(1, T, H, device="cuda", dtype=torch.bfloat16)
        return x | FAST | {"beta": beta, "lower_bound": -5.0, "output_final_state": True}
    k = torch.nn.functional.normalize(x["k"].float(), dim=-1).bfloat16()
    g, beta = -torch.rand(1, T, H, 128, device="cuda"), torch.rand(1, T, H, device="cuda")
    return x | {"k": k, "g": g, "beta": beta, "output_final_state": True}


@pytest.mark.parametrize("contract", CONTRACTS)
def test_two_streams_at_once(kda: Any, contract: str) -> None:
    problems = [large(contract), large(contract, T=3000, H=20)]
    wanted = [kda.kda_forward(**problem) for problem in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    found: list[list[Any]] = [[], []]
    for _ in range(20):
        for stream, problem, kept in zip(streams, problems, found, strict=True):
            with torch.cuda.stream(stream):
                kept.append(kda.kda_forward(**problem))
    torch.cuda.synchronize()
    for (o, state), kept in zip(wanted, found, strict=True):
        assert all(torch.equal(o, a) and torch.equal(state, b) for a, b in kept)


@pytest.mark.parametrize("contract", CONTRACTS)
@pytest.mark.parametrize("dtype", [None, "int32", "int64"])
def test_a_graph_replays_on_what_lies_in_its_inputs(kda: Any, contract: str, dtype: str | None) -> None:
    """Inputs and cu_seqlens are filled anew in place; eager calls on another stream run beside it."""
    first, other = large(contract), large(contract)
    cus = [torch.tensor(c, device="cuda") for c in ([0, 1000, 1000, 4096], [0, 17, 4000, 4096])]
    if dtype is not None:
        first["cu_seqlens"], other["cu_seqlens"] = (cu.to(getattr(torch, dtype)) for cu in cus)
    wanted = [kda.kda_forward(**given) for given in (first, other)]
    static = {n: x.clone() if isinstance(x, torch.Tensor) else x for n, x in first.items()}
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, state = kda.kda_forward(**static)
    side = torch.cuda.Stream()
    for given, (right_o, right_state) in zip((first, other, first), (*wanted, wanted[0]), strict=True):
        for name in (*NAMES, "cu_seqlens"):
            if name in static:
                static[name].copy_(given[name])
        side.wait_stream(torch.cuda.current_stream())
        graph.replay()
        with torch.cuda.stream(side):
            beside = kda.kda_forward(**other)
        torch.cuda.synchronize()
        assert torch.equal(o, right_o)
        assert torch.equal(state, right_state)
        assert torch.equal(beside[0], wanted[1][0])


def test_nothing_waits_for_the_gpu(kda: Any) -> None:
    given = large("production") | {"cu_seqlens": torch.tensor([0, 5, 4096], device="cuda")}
    kda.kda_forward(**given)
    torch.cuda.set_sync_debug_mode("error")
    try:
        kda.kda_forward(**given)
        kda.kda_forward(**{n: x for n, x in given.items() if n != "cu_seqlens"})
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_compiled_function_calls_it(kda: Any) -> None:
    given = large("production")

    def user(**given: Any) -> tuple[Any, Any]:
        o, state = kda.kda_forward(**given)
        return o * 2, state

    with torch.no_grad():
        o, state = torch.compile(user, backend="aot_eager", fullgraph=True)(**given)
        wanted = kda.kda_forward(**given)
    assert torch.equal(o, wanted[0] * 2)
    assert torch.equal(state, wanted[1])


def test_values_are_looked_at_when_asked(kda: Any) -> None:
    given = large("plain")
    kda.kda_forward(**given, check_values=True)
    with pytest.raises(ValueError, match="g spans"):
        kda.kda_forward(**given | {"g": given["g"] - 5}, check_values=True)


def test_strided_inputs_are_refused(kda: Any) -> None:
    given = large("production")
    wide = torch.cat([given["q"], given["q"]], dim=-1)
    with pytest.raises(ValueError, match=r"q is not contiguous .*: pass q.contiguous\(\)"):
        kda.kda_forward(**given | {"q": wide[..., :128]})


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.device_count() < 2, reason="needs two CUDA devices"
)
def test_another_device_than_the_current_one(kda: Any) -> None:
    given = large("production")
    there = {n: x.to("cuda:1") if isinstance(x, torch.Tensor) else x for n, x in given.items()}
    o, _ = kda.kda_forward(**there)
    assert o.device.index == 1
    assert torch.equal(o.to("cuda:0"), kda.kda_forward(**given)[0])
