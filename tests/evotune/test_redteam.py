"""What the command prints, from rows made by hand."""

import csv
import io
import json
from pathlib import Path

from evotune import redteam
from evotune.fitness.outcome import RUNGS, Artifact, Failed, Failure, Passed, Resources, Stage
from evotune.fitness.redteam import CORPUS, Kind
from evotune.fitness.redteam.corpus import Findings, Row

MUTANT = next(e for e in CORPUS if e.kind is Kind.MUTANT)
CHEAT = next(e for e in CORPUS if e.kind is Kind.CHEAT)
VARIANT = next(e for e in CORPUS if e.kind is Kind.VARIANT)
FOUND = Findings(
    (
        Row(
            MUTANT,
            Failed(Failure.WRONG, Stage.LAWS, "off by one", case="a law"),
            rungs={stage: 2 * (stage is Stage.LAWS) for stage in RUNGS},
        ),
        Row(CHEAT, Passed("full", 0.5, (), 1.0, (), {}), 12.0, 23.0),
        Row(VARIANT, Passed("full", 0.5, (), 1.0, (), {})),
    ),
    12.3,
)


def test_the_figures_and_every_mishap_are_printed() -> None:
    text = "\n".join(redteam.lines(FOUND))
    assert "accepted exploits   1 of 2 (1 mutants, 1 cheats)" in text
    assert "false rejections    0 of 1 honest variants (0.0%)" in text
    assert "laws 1;" in text
    assert f"accepted: {CHEAT.name} (passed, 23.0 times as fast as its honest twin)" in text


def test_what_could_not_be_run_here_is_said_with_the_reason() -> None:
    built = Artifact("", Path(), "kda_forward", "sm_90a", "", Resources(), 0.0)
    found = Findings((Row(MUTANT, built), Row(VARIANT, built)), 1.0, "this machine has no NVIDIA GPU")
    text = "\n".join(redteam.lines(found))
    assert "not run here        2 of 2 (1 mutants, 1 variants): this machine has no NVIDIA GPU" in text
    assert "not run" not in "\n".join(redteam.lines(FOUND))
    assert redteam.as_json(found)["not_run"] == [MUTANT.name, VARIANT.name]
    assert found.held


def test_the_matrix_names_what_a_rung_alone_sees() -> None:
    text = "\n".join(redteam.matrix(FOUND))
    assert f"laws       alone sees 1: {MUTANT.name}; stops 1 first" in text
    assert "smoke      alone sees none; stops 0 first. It stays for: in milliseconds" in text


def test_csv_and_json_hold_every_entry() -> None:
    records = list(csv.DictReader(io.StringIO(redteam.table(FOUND))))
    assert [r["name"] for r in records] == [MUTANT.name, CHEAT.name, VARIANT.name]
    assert records[0]["laws"] == "2"
    data = json.loads(json.dumps(redteam.as_json(FOUND)))
    assert data["held"] is False
    assert data["accepted"] == [CHEAT.name]
    assert len(data["entries"]) == 3


def test_who_is_stopped_by_another_rung_than_its_entry_names_is_told() -> None:
    row = Row(MUTANT, Failed(Failure.WRONG, Stage.LAWS, "off by one"))
    found = Findings((row, Row(CHEAT, Failed(Failure.REFUSED, Stage.INSPECT, ""))), 1.0)
    text = "\n".join(redteam.lines(found))
    assert "stopped elsewhere   1 of 2:" in text
    assert f"elsewhere: {MUTANT.name} (laws: wrong, off by one; due at smoke)" in text
    assert CHEAT.name not in text
    assert redteam.as_json(found)["elsewhere"] == [MUTANT.name]
    assert redteam.record(row)["due"] == "smoke"
    assert found.held


def test_coverage_lists_every_number_once() -> None:
    numbered = [line for line in redteam.coverage_lines() if line[:2].strip().isdigit()]
    assert [int(line[:2]) for line in numbered] == list(range(1, 73))
