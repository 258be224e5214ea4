"""What the gate's experiment says of its numbers, also where there are none."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))

import bench_gate  # noqa: E402


def test_the_gates_share_is_over_whole_evaluations() -> None:
    shares = [{"compile": 1.0, "gate": 2.0, "time": 1.0}, {"compile": 1.0, "gate": 4.0, "time": 3.0}]
    line = "the gate takes 50% of an evaluation (compile 1.00 s, gate 3.00 s, time 2.00 s)"
    assert bench_gate.told(shares) == line


def test_where_none_passed_it_says_so() -> None:
    assert bench_gate.told([]).startswith("none of the kernels passed")


def test_where_none_was_judged_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_gate, "judgements", lambda count, rng: iter(()))
    bench_gate.refused(3, 0)
    assert capsys.readouterr().out == "refused 0 of 0 honest configurations\n"
