"""From records of a study to a directory: one real export, and the choices and troubles on fakes."""

import csv
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evotune import devices
from evotune import export as exporting
from evotune.config import parse
from evotune.errors import SandboxError, StudyError
from evotune.export import Job, choose, export, median_interval
from evotune.fitness.objectives import Evidence, values
from evotune.fitness.outcome import Failed, Failure, Measurement, Passed, Retry, Stage
from evotune.history import Entry, History
from evotune.records import Asked, BranchAdded, Contest, Judged, StudyBegun
from evotune.reference_kda.case import solve
from evotune.search_space.templates.kda_host import TEMPLATE, KdaHostKnobs
from evotune.setup import Setup, resolve
from evotune.verify import verify
from tests.evotune import exports

pytestmark = pytest.mark.usefixtures("solved_once")
TABLES: dict[str, Any] = {
    "study": {"name": "<b>small", "template": "kda_host"},
    "timing": {"samples": 3, "empty_calls": 4},
    "workload": [
        {"name": "one", "group": "long", "length": 33, "K": 64, "V": 64},
        {"name": "packs", "group": "ragged", "lengths": [3, 20, 0, 9], "heads": 2, "K": 64, "V": 64},
    ],
}
# Right in every case that a screen would see first, wrong by 1 % wherever a query is used.
WRONG = TEMPLATE.source.replace("acc[j][n] += row * q[k + j];", "acc[j][n] += row * q[k + j] * 1.01f;")
NOTE = "scale <script>alert(1)</script> folded"


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    return resolve(parse(TABLES, "test"), tmp_path)


def passed(setup: Setup, times_us: Sequence[float], error: float = 0.5) -> Passed:
    """With these times on the workloads against 100 µs of the default."""
    measurements = tuple(
        Measurement(w.name, w.group, (t,) * 3, (100.0,) * 3)
        for w, t in zip(setup.workloads, times_us, strict=True)
    )
    evidence = Evidence(measurements, error, 1.0, setup.template.source, "c")
    return Passed("screen", error, measurements, 1.0, values(setup.objectives, evidence), {})


def history(setup: Setup, *candidates: tuple[str, KdaHostKnobs, Passed | Failed]) -> History:
    """Branches b00 (the seed) and b01 (wrong), and these candidates."""
    begun = StudyBegun(setup.config.as_json(), str(setup.base), setup.columns, {})
    branches = (
        BranchAdded(-1, "b00", TEMPLATE.source, None, "seed", "the template as shipped"),
        BranchAdded(0, "b01", WRONG, "b00", "llm", NOTE),
    )
    entries = []
    for i, (branch, knobs, outcome) in enumerate(candidates):
        asked = Asked(0, i, i, branch, dataclasses.asdict(knobs), "tune")
        entries.append(Entry(asked, Judged(0, i, i, outcome, {}, {}, 1.0)))
    return History(begun, branches, tuple(entries), ())


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> exporting.Exporting:
    folder = tmp_path_factory.mktemp("export")
    setup = resolve(parse(TABLES, "test"), folder)
    past = history(
        setup,
        ("b00", KdaHostKnobs(), passed(setup, (100, 100))),
        ("b00", KdaHostKnobs(algorithm="chunked"), passed(setup, (50, 90))),
        ("b01", KdaHostKnobs(key_unroll=4), passed(setup, (60, 40))),
    )
    return export(Job(setup, past, folder / "pareto", blocks=6))


class TestARealExport:
    """Three candidates: two right ones and one whose branch is wrong although the records call it passed."""

    def test_a_kernel_that_fails_again_is_left_out_and_named(self, done: exporting.Exporting) -> None:
        assert [k.manifest.id for k in done.exported] == ["b00-0001"]
        assert [k.id for k in done.left_out] == ["b01-0002"]
        assert done.left_out[0].reason.startswith("wrong at ")
        with (done.out / "pareto.csv").open() as file:
            rows = list(csv.DictReader(file))
        assert [(r["kernel"], r["status"]) for r in rows if r["status"] == "left out"] == [
            ("b01-0002", "left out")
        ]
        assert "b01-0002" in (done.out / "pareto.html").read_text()
        assert not (done.out / "kernels" / "b01-0002").exists()

    def test_the_evidence_is_raw_and_fresh(self, done: exporting.Exporting) -> None:
        evidence = done.exported[0].manifest.evidence
        assert 0 < evidence.worst_error <= 1
        assert [t.workload for t in evidence.timings] == ["one", "packs"]
        for timing in evidence.timings:
            assert len(timing.blocks) == 6
            assert all(len(b.samples_us) == len(b.baseline_samples_us) == 3 for b in timing.blocks)
            ratios = [np.median(b.baseline_samples_us) / np.median(b.samples_us) for b in timing.blocks]
            assert timing.speedup.low == pytest.approx(min(ratios))
            assert timing.speedup.high == pytest.approx(max(ratios))
            assert timing.speedup.confidence == pytest.approx(1 - 2 / 2**6)
            assert timing.naive_ratio.low > 1

    def test_it_verifies(self, done: exporting.Exporting) -> None:
        assert verify(done.out, opening=exports.opened).held

    def test_the_dropin_computes_kda(self, done: exporting.Exporting) -> None:
        setup = resolve(parse(TABLES, "test"), done.out.parent)
        case: Any = solve(setup.workloads[1], 11)  # type: ignore[arg-type]
        x = case.inputs
        o, state = exports.load_dropin(done.out).kda_forward(
            *(x[name][None] for name in ("q", "k", "v", "g", "beta")),
            cu_seqlens=x["cu_seqlens"],
            output_final_state=True,
            state_v_first=True,
        )
        assert case.worst({"o": o[0], "final_state": state}).ratio <= 1

    def test_nothing_else_is_left_beside_it(self, done: exporting.Exporting) -> None:
        assert os.listdir(done.out.parent) == ["pareto"]

    def test_text_of_the_study_stays_text(self, done: exporting.Exporting) -> None:
        page = (done.out / "pareto.html").read_text()
        assert "&lt;b&gt;small" in page
        assert "<b>small" not in page


def test_the_front_is_limited_and_the_fastest_are_always_there(setup: Setup) -> None:
    past = history(
        setup,
        ("b00", KdaHostKnobs(), passed(setup, (10, 90))),
        ("b00", KdaHostKnobs(lanes=4), passed(setup, (50, 50))),
        ("b00", KdaHostKnobs(lanes=16), passed(setup, (90, 10))),
        ("b00", KdaHostKnobs(chunk=32), passed(setup, (95, 95), error=0.9)),
        ("b00", KdaHostKnobs(chunk=8), Failed(Failure.WRONG, Stage.EDGES, "o")),
    )
    everything = choose(past, 12)
    assert sorted(k.number for k in everything) == [0, 1, 2]
    none = {k.number: k for k in choose(past, 0)}
    assert none.keys() == {0, 2}
    assert none[0].fastest_on == ("one",)
    assert none[2].fastest_on == ("packs",)
    assert none[0].id == "b00-0000"
    assert not none[0].front


def test_a_champion_is_fastest_on_its_group(setup: Setup) -> None:
    """Screening says candidate 2, the promotion test said 1; nobody was tested on the other group."""
    speeds = ((100, 100), (60, 45), (50, 40))
    past = history(
        setup, *(("b00", KdaHostKnobs(key_unroll=2**i), passed(setup, s)) for i, s in enumerate(speeds))
    )
    won = Contest(0, "long", 1, 0, 0.05, 40.0, True, (), None, "", 1.0, 1.0)
    past = dataclasses.replace(past, contests=(won,))
    fastest = {workload: kernel.number for kernel in choose(past, 0) for workload in kernel.fastest_on}
    assert fastest == {"one": 1, "packs": 2}


WRONG_LATER = Failed(Failure.WRONG, Stage.EDGES, "o")
LOST = Contest(0, "long", 1, 0, 0.05, 0.0, False, (), WRONG_LATER, "", 1.0, 1.0)


def test_who_failed_a_contests_gate_makes_room_for_the_honest(
    setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Candidate 1 dominates all in screening, and was found wrong before its contest began."""
    speeds = ((100, 100), (10, 10), (60, 80), (80, 60))
    past = history(
        setup, *(("b00", KdaHostKnobs(key_unroll=2**i), passed(setup, s)) for i, s in enumerate(speeds))
    )
    assert [k.number for k in choose(past, 12)] == [1]
    past = dataclasses.replace(past, contests=(LOST,))
    chosen = choose(past, 12)
    assert {k.number: k.fastest_on for k in chosen} == {2: ("one",), 3: ("packs",)}
    assert all(k.front for k in chosen)
    monkeypatch.setattr(devices, "host", Fake(WRONG_LATER))
    assert export(Job(setup, past, tmp_path / "pareto")).front_size == 2


def test_when_all_were_found_wrong_later_it_says_so(setup: Setup) -> None:
    failed = ("b00", KdaHostKnobs(), WRONG_LATER)
    past = history(setup, failed, ("b00", KdaHostKnobs(lanes=4), passed(setup, (50, 50))))
    past = dataclasses.replace(past, contests=(LOST,))
    with pytest.raises(StudyError, match=r"\(1 wrong, 1 found wrong after screening\)"):
        choose(past, 12)


def test_an_empty_front_says_what_failed(setup: Setup, tmp_path: Path) -> None:
    failed = Failed(Failure.WRONG, Stage.EDGES, "o")
    past = history(setup, ("b00", KdaHostKnobs(), failed), ("b00", KdaHostKnobs(lanes=4), failed))
    with pytest.raises(StudyError, match=r"no candidate passed the gate \(2 wrong\)"):
        export(Job(setup, past, tmp_path / "pareto"))
    assert not (tmp_path / "pareto").exists()


class Fake:
    """An evaluator that gives, or raises, the same every time."""

    def __init__(self, verdict: Any) -> None:
        self.verdict = verdict
        self.asked = 0
        self.closed = False

    def __call__(self, setup: Setup, cache: Path | None = None) -> "Fake":
        return self

    def confirm(self, candidate: Any, blocks: int) -> Any:
        self.asked += 1
        if isinstance(self.verdict, BaseException):
            raise self.verdict
        return self.verdict

    def close(self) -> None:
        self.closed = True


def one(setup: Setup) -> History:
    return history(setup, ("b00", KdaHostKnobs(), passed(setup, (50, 50))))


@pytest.mark.parametrize(
    ("verdict", "error", "asked"),
    [(Retry("the disk is full"), SandboxError, 3), (KeyboardInterrupt(), KeyboardInterrupt, 1)],
)
def test_trouble_leaves_nothing_behind(
    setup: Setup,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    verdict: Any,
    error: type[BaseException],
    asked: int,
) -> None:
    fake = Fake(verdict)
    monkeypatch.setattr(devices, "host", fake)
    with pytest.raises(error):
        export(Job(setup, one(setup), tmp_path / "pareto"))
    assert fake.asked == asked
    assert fake.closed
    assert os.listdir(tmp_path) == []


def test_when_none_holds_the_report_still_names_them(
    setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        devices, "host", Fake(Failed(Failure.FAULT, Stage.SMOKE, "SIGSEGV", case="one token"))
    )
    done = export(Job(setup, one(setup), tmp_path / "pareto"))
    assert done.exported == ()
    assert "fault at smoke (one token): SIGSEGV" in (tmp_path / "pareto" / "pareto.csv").read_text()
    with pytest.raises(StudyError, match="names no kernel"):
        verify(tmp_path / "pareto")


def test_an_existing_directory_is_refused_before_anything_is_judged(
    setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pareto").mkdir()
    fake = Fake(Retry(""))
    monkeypatch.setattr(devices, "host", fake)
    with pytest.raises(StudyError, match="--force"):
        export(Job(setup, one(setup), tmp_path / "pareto"))
    assert fake.asked == 0


class TestMedianInterval:
    @pytest.mark.parametrize(
        ("n", "low", "high", "confidence"),
        [
            (5, 0, 4, 0.9375),
            (6, 0, 5, 0.96875),
            (7, 0, 6, 0.984375),
            (9, 1, 7, 0.9609375),
            (17, 4, 12, 0.951),
        ],
    )
    def test_known_order_statistics(self, n: int, low: int, high: int, confidence: float) -> None:
        found = median_interval([float(x) for x in reversed(range(n))])
        assert (found.low, found.median, found.high) == (low, (n - 1) / 2, high)
        assert found.confidence == pytest.approx(confidence, abs=1e-3)

    def test_it_covers_as_often_as_it_says(self) -> None:
        """A skewed distribution with median log 2; 4000 intervals of 9 values, standard error 0.3 %."""
        rng = np.random.default_rng(3)
        found = [median_interval(list(rng.exponential(size=9))) for _ in range(4000)]
        covered = np.mean([f.low <= np.log(2) <= f.high for f in found])
        assert covered == pytest.approx(found[0].confidence, abs=0.012)

    def test_one_value_claims_nothing(self) -> None:
        assert median_interval([2.0]).confidence == 0.0
