"""The factorial sweep without a GPU: which cells it visits, and what its tables say of recorded rows."""

import csv
import json
import sys
from pathlib import Path
from statistics import median

import pytest

from tests.evotune.toy import run_study, setup_of, study_file

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))

import bench_h200  # noqa: E402


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """Every cell, its time a known function of its factors, on a machine that slows down by half midway."""
    study = bench_h200._study()
    cells = list(bench_h200.cells(study).values())
    out = tmp_path / "sweep.csv"
    with out.open("w", newline="") as file:
        writer = csv.writer(file)
        names = list(cells[0].shown)
        writer.writerow([*names, "verdict", *bench_h200._RESOURCES, "time_us:one", "default_us:one"])
        for number, cell in enumerate(cells):
            slow = 1.5 if number % 2 else 1.0
            true_us = 200.0 - 2 * cell.knobs.chunk + cell.knobs.stages
            writer.writerow(
                [*cell.shown.values(), "passed", 100 + number, 0, 1000, true_us * slow, 300.0 * slow]
            )
        writer.writerow([*cells[0].shown.values(), "wrong", *([""] * 5)])
    return out


def test_cells_are_legal_and_differ_only_in_what_a_design_varies() -> None:
    study = bench_h200._study()
    default = vars(study.space.default())
    varied = {name for design in bench_h200.DESIGNS.values() for name in design} | {"copy", "loader"}
    for knobs, cell in bench_h200.cells(study).items():
        assert all(study.template.why_not(knobs, spec) is None for spec in study.specializations)
        assert {name for name, value in vars(knobs).items() if value != default[name]} <= varied
        assert cell.shown["chunk"] == str(knobs.chunk)


def test_tables_divide_the_machines_drift_out(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_h200, "draw", lambda figure, out: None)
    bench_h200.tables(recorded, tmp_path / "tables")
    text = (tmp_path / "tables" / "tables.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith(("| 16 |", "| 32 |"))]
    # Of 16 and 32 tokens at the default's 4 slots (16 only with threads that 32 has too): 172 and 140 us.
    best_us = 200.0 - 2 * 32 + 3
    shown = {float(cell) for row in rows for cell in row.split("|")[2:-1] if cell.strip()}
    assert shown == {round(best_us / 172.0, 2), round(best_us / 140.0, 2)}


def test_a_kept_journal_tells_times_without_samples(tmp_path: Path) -> None:
    study = tmp_path / "toy.study"
    setup = setup_of(study_file(tmp_path), trials=6, directory=study.name)
    loop = run_study(setup)
    out = tmp_path / "journal.jsonl"
    bench_h200.keep_journal(study, out)
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(records) == len(loop.opened.records)
    results = [record for record in records if record["kind"] == "result"]
    for entry, kept in zip(loop.history.judged, results, strict=True):
        assert entry.passed is not None
        assert entry.judged is not None
        told = kept["outcome"]["measurements"]
        assert [m["samples"] for m in told] == [len(m.samples_us) for m in entry.passed.measurements]
        for m, found in zip(entry.passed.measurements, told, strict=True):
            assert found["median_us"] == pytest.approx(median(m.samples_us), rel=1e-5)
        assert kept["elapsed_s"] == pytest.approx(entry.judged.elapsed_s, rel=1e-5)
    text = out.read_text()
    assert "samples_us" not in text
    assert '"source"' not in text
