"""The peers bench without a GPU: its truth, its turns over processes that pretend to time, its tables."""

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from evotune.reference_kda import activate, recurrence

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))

import _peers_child as child  # noqa: E402
import bench_peers  # noqa: E402

SMALL = child.Case("small", (5, 0, 18), 4, None)

FAKE = """
import json, sys
name, given = sys.argv[1], json.loads(sys.argv[2])
log = open(given["log"], "a")
if name == "truth":
    print("{}", flush=True)
elif given.get("absent"):
    print(json.dumps({"absent": "not installed"}), flush=True)
else:
    print(json.dumps({"contracts": ["production"], "versions": {}}), flush=True)
for line in sys.stdin:
    r = json.loads(line)
    log.write(f"{name} {r['do']} {r.get('variant', '')}".strip() + "\\n")
    log.flush()
    if r["do"] == "solve":
        answer = {"inputs": {f"{g} {c}": 7 for g in r["regimes"] for c in r["contracts"]}}
    elif r["do"] == "compare":
        answer = {"o": 0.5 if "bad" in r["path"] else 0.004, "state": 0.003, "worst_head": 0.005}
    elif r["do"] == "prepare":
        if given.get("dies"):
            sys.exit(3)
        names = given.get("variants", ["only"])
        variants = {n: {"path": n, "finite": n != "unwritten", "first_s": 0} for n in names}
        answer = {"inputs": given.get("inputs", 7), "sets": 2, "variants": variants}
    elif r["do"] == "select":
        answer = {"us": {n: {"slow": 9.0, "fast": 5.0}[n] for n in r["variants"]}}
    elif r["do"] == "arm":
        answer = {"graph": None}
    elif r["do"] == "sample":
        answer = {"graph_us": [given.get("us", 10.0)] * r["count"], "plain_us": [given.get("us", 10.0) + 1]}
    elif r["do"] == "host":
        answer = {"host_us": 20.0}
    else:
        answer = {"path": "timed", "finite": True}
    print(json.dumps(answer), flush=True)
"""


def measured(
    tmp_path: Path, rounds: int = 3, **given: Mapping[str, Any]
) -> tuple[bench_peers.Bench, list[str]]:
    """A run over pretended implementations; and what each process was asked, in order."""
    fake, log = tmp_path / "fake.py", tmp_path / "log"
    prelude = f'import sys; sys.argv[2] = sys.argv[2][:-1] + \', "log": "{log}"}}\'\n'
    fake.write_text(prelude + FAKE)
    plan = bench_peers.Plan(
        given=given,
        cases=[bench_peers.CASES["2x4096xH32"]],
        regimes=["strong"],
        contracts=["production"],
        rounds=rounds,
        timeout_s=20,
        child=fake,
    )
    return bench_peers.bench(plan, tmp_path / "peers.json"), log.read_text().splitlines()


def test_implementations_take_turns(tmp_path: Path) -> None:
    run, log = measured(tmp_path, flashkda={"us": 30.0}, evotune={"us": 10.0}, cudnn_cuda={"us": 20.0})
    turns = [line.split()[0] for line in log if line.endswith("sample")]
    names = ["flashkda", "evotune", "cudnn_cuda"]
    assert turns == [*names, *names[1:], names[0], names[2], *names[:2]]
    assert {r["impl"]: (r["us"], len(r["graph_samples_us"])) for r in run.records} == {
        "flashkda": (30.0, 9),
        "evotune": (10.0, 9),
        "cudnn_cuda": (20.0, 9),
    }
    results = bench_peers.Results(run.records)
    assert results.ratios("production", "evotune", ["strong"]) == [3.0]
    assert results.lead("production", "strong", "2x4096xH32") == 2.0
    saved = json.loads((tmp_path / "peers.json").read_text())
    assert len(saved["records"]) == 3
    assert "| evotune | 3.00 (1) | 3.00 (1) |" in (tmp_path / "peers.md").read_text()
    assert len((tmp_path / "peers.csv").read_text().splitlines()) == 4


def test_the_fastest_right_variant_is_timed_and_all_are_reported(tmp_path: Path) -> None:
    run, log = measured(tmp_path, evotune={"variants": ["bad", "slow", "unwritten", "fast"]})
    (record,) = run.records
    assert record["label"] == "fast"
    assert "evotune arm fast" in log
    assert {name: found.get("select_us") for name, found in record["variants"].items()} == {
        "bad": None,
        "slow": 9.0,
        "unwritten": None,
        "fast": 5.0,
    }


def test_what_fails_is_named_and_the_others_go_on(tmp_path: Path) -> None:
    run, log = measured(
        tmp_path,
        flashkda={"absent": True},
        fla={"dies": True},
        cudnn_cuda={"inputs": 8},
        cudnn_dsl={"variants": ["bad"]},
        evotune={},
    )
    assert run.absent == {"flashkda": "not installed"}
    errors = {r["impl"]: r.get("error", "") for r in run.records}
    assert errors["fla"] == "died, exit status 3"
    assert errors["cudnn_cuda"] == "drew other inputs than the truth"
    assert errors["cudnn_dsl"].startswith("wrong: bad o 0.5")
    assert errors["evotune"] == ""
    assert {line.split()[0] for line in log if "sample" in line} == {"evotune"}
    assert "fla, production, strong, 2x4096xH32: died" in bench_peers.Results(run.records).markdown()


@pytest.mark.parametrize("contract", ["production", "plain"])
@pytest.mark.parametrize("regime", bench_peers.REGIMES)
def test_the_truth_is_the_recurrence_on_the_sampled_heads(tmp_path: Path, contract: str, regime: str) -> None:
    truth = child.Truth("cpu")
    shape = {"name": "small", "lengths": [5, 0, 18], "heads": 4, "batch": None}
    said = truth.solve(shape, ["strong", regime], ["plain", "production"], seed=3)["inputs"]
    drawn = child.draw(SMALL, contract, regime, 3, 0, "cpu")
    assert said[f"{regime} {contract}"] == drawn.checksum()
    inputs = {name: x.double().numpy() for name, x in drawn.tensors().items()}
    problem = activate({**inputs, "cu_seqlens": np.array([0, 5, 5, 23])}, contract, 128**-0.5, np.float64)
    found = recurrence(problem)
    o, state = torch.from_numpy(found.o), torch.from_numpy(np.ascontiguousarray(found.final_state))
    o[:, 3] *= 1.01

    def saved(o: torch.Tensor) -> str:
        path = tmp_path / "outputs.pt"
        torch.save({"o": o[:, SMALL.sampled].clone(), "state": state[:, SMALL.sampled].clone()}, path)
        return str(path)

    errors = truth.compare(saved(o), regime, contract)
    assert errors["worst_head"] == pytest.approx(0.01, rel=1e-6)
    assert 0 < errors["o"] < 0.01
    assert errors["state"] < 1e-12
    o[0, 0, 0] = math.nan
    assert truth.compare(saved(o), regime, contract)["o"] == math.inf


def test_regimes_decay_as_they_say() -> None:
    case = child.Case("decays", (400,), 64, 1)
    decay = {r: child.draw(case, "plain", r, 1, 0, "cpu").g.double() for r in bench_peers.REGIMES}
    assert decay["strong"].mean() == pytest.approx(-3.2, rel=0.05)
    assert decay["weak"].mean() == pytest.approx(-0.013, rel=0.1)
    assert -1e-8 < decay["zero"].min() <= decay["zero"].max() < 0
    memory = (-1 / decay["mixed"].mean((0, 2))).log10()
    assert memory.min() < 1.2
    assert memory.max() > 4.2
    assert memory.mean() == pytest.approx(2.8, abs=0.6)


def test_problems_differ_by_seed_and_number_and_repeat() -> None:
    drawn = [
        child.draw(SMALL, "production", "weak", s, n, "cpu").checksum() for s, n in ((1, 0), (1, 1), (2, 0))
    ]
    assert len(set(drawn)) == 3
    assert child.draw(SMALL, "production", "weak", 1, 0, "cpu").checksum() == drawn[0]


def test_the_floor_is_that_of_the_anchors() -> None:
    """Raw and act columns of the table that these cases come from, ms."""
    for name, raw, act in (("1x8192xH64", 0.158, 0.190), ("var6_8192xH96", 0.252, 0.299)):
        case = bench_peers.CASES[name]
        assert bench_peers.floor_us(case, "production") / 1e3 == pytest.approx(raw, abs=6e-4)
        assert bench_peers.floor_us(case, "plain") / 1e3 == pytest.approx(act, abs=6e-4)


def test_means_are_over_cases_that_both_measured() -> None:
    def record(impl: str, case: str, us: float, **more: Any) -> dict[str, Any]:
        common = {"contract": "production", "regime": "weak", "label": "x", "host_us": 1.0}
        return {**common, "impl": impl, "case": case, "us": us, "o": 0, "state": 0, "worst_head": 0, **more}

    results = bench_peers.Results(
        [
            record("flashkda", "1x8192xH64", 400.0),
            record("evotune", "1x8192xH64", 100.0, graph_us=100.0, plain_us=130.0),
            record("flashkda", "2x4096xH32", 100.0),
            record("evotune", "2x4096xH32", 100.0),
            record("flashkda", "1x65536xH8", 100.0, error="died"),
            record("evotune", "1x65536xH8", 1.0),
        ]
    )
    text = results.markdown()
    assert "| evotune | 2.00 (2) | 2.00 (2) |" in text
    assert "| 1x8192xH64 | 0.158 | 0.400 (no graph) | 0.100 (?) | x | 4.00 |" in text
    assert "| 1x65536xH8 | 0.157 | - | 0.001 (no graph) | x | - |" in text


def test_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--evotune", "objects:a,b", "--impls", "evotune,fla", "--cases", "1x65536xH8", "--minutes", "1"]
    plan = bench_peers.plan_of(bench_peers.parse(given))
    assert plan.given == {"evotune": {"directory": "objects", "labels": ["a", "b"]}, "fla": {}}
    assert [case.name for case in plan.cases] == ["1x65536xH8"]
    assert plan.regimes == list(bench_peers.REGIMES)
    assert "evotune" not in bench_peers.plan_of(bench_peers.parse([])).given
    assert "fla" not in bench_peers.plan_of(bench_peers.parse([])).given
    with pytest.raises(SystemExit):
        bench_peers.parse(["--cases", "1x1"])
    assert "unknown: 1x1" in capsys.readouterr().err
