"""`diagnose` names the place and the stage of planted mistakes."""

import json
from pathlib import Path
from typing import Any

import pytest

from evotune.config import parse
from evotune.diagnose import Diagnosis, candidate_of, diagnose
from evotune.errors import StudyError
from evotune.fitness.outcome import Failure, Stage
from evotune.fitness.redteam.entry import Edit, base_source
from evotune.history import Entry, History
from evotune.records import Asked, BranchAdded, StudyBegun
from evotune.search_space.branch import Branch, Candidate, replace_stage, stages
from evotune.search_space.templates.kda_host import TEMPLATE, KdaHostKnobs
from evotune.setup import Setup, resolve
from tests.evotune import exports

pytestmark = pytest.mark.usefixtures("solved_once")
TABLES: dict[str, Any] = {
    "study": {"name": "small", "template": "kda_host"},
    "workload": [{"name": "one", "length": 33, "K": 64, "V": 64}],
}


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    return resolve(parse(TABLES, "test"), tmp_path_factory.mktemp("diagnose"))


def planted(stage: str, old: str, new: str, knobs: KdaHostKnobs | None = None) -> Candidate:
    """The template with one mistake in one stage."""
    body = stages(TEMPLATE.source)[stage]
    assert old in body
    source = replace_stage(TEMPLATE.source, stage, body.replace(old, new))
    return Candidate(Branch("b01", source, "b00", "llm", "planted"), knobs or KdaHostKnobs())


def look(setup: Setup, candidate: Candidate) -> Diagnosis:
    return diagnose(setup, candidate, exports.bench())


@pytest.mark.parametrize(
    ("candidate", "stage"),
    [
        (planted("delta", "(v[n] - total) * beta", "(v[n] - total * 1.02f) * beta"), "u first departs"),
        (
            planted("update", "row * q[k + j]", "row * q[k + j] * 1.01f"),
            "stay right: the mistake comes after",
        ),
        (
            planted("decay_row", "store(d + c, exponential(x))", "store(d + c, exponential(x * 1.01f))"),
            "decay first",
        ),
        (
            planted("advance", "* end[k + j]", "* (end[k + j] * 1.01f)", KdaHostKnobs(algorithm="chunked")),
            "state first departs",
        ),
    ],
    ids=["correction", "output", "decay", "advance"],
)
def test_the_first_wrong_stage_is_named(setup: Setup, candidate: Candidate, stage: str) -> None:
    found = look(setup, candidate)
    assert found.failed is not None
    assert found.failed.failure is Failure.WRONG
    debug = [sentence for sentence in found.where if sentence.startswith("In a debug build")]
    assert len(debug) == 1
    assert stage in debug[0]
    text = "\n".join(found.lines())
    assert "value head 0" in text
    assert "First: wrong at smoke" in text
    assert len(found.growth) > 1
    assert any(ratio > 1 for ratio in found.growth)
    assert json.loads(json.dumps(found.as_json(), allow_nan=False))["held"] is False


def test_a_right_kernel_holds(setup: Setup) -> None:
    found = look(setup, Candidate(Branch("b00", TEMPLATE.source, None, "seed", ""), KdaHostKnobs()))
    assert found.failed is None
    assert [rung.failed for rung in found.rungs] == [0] * 5
    assert all(rung.cases for rung in found.rungs)
    assert list(found.lines())[-1].startswith("It holds")


def test_a_kernel_that_crashes_is_told_by_its_signal(setup: Setup) -> None:
    found = look(setup, planted("delta", "u[n] = ", "*(volatile int *)8 = 1; u[n] = "))
    assert found.failed is not None
    assert (found.failed.failure, found.failed.stage) == (Failure.FAULT, Stage.SMOKE)
    assert "SIGSEGV" in found.failed.detail
    assert found.smallest is not None
    assert found.smallest.workload["lengths"] == (1,)
    assert "SIGSEGV" in found.smallest.text
    assert found.where == ()
    json.dumps(found.as_json(), allow_nan=False)


def test_a_kernel_that_does_not_compile_shows_the_compiler(setup: Setup) -> None:
    found = look(setup, planted("delta", "u[n] = ", "u[n] = nothing + "))
    assert found.failed is not None
    assert found.failed.failure is Failure.BUILD_ERROR
    assert "nothing" in found.log
    assert found.rungs == ()


def by_hand(old: str, new: str) -> Candidate:
    """The red team's token loop with one mistake."""
    source = Edit(old, new).apply(base_source("token_loop"))
    return Candidate(Branch("b01", source, "b00", "llm", "by hand"), KdaHostKnobs())


def test_what_only_hostile_values_at_a_timed_shape_show_is_told(setup: Setup) -> None:
    """No other case of the gate is one sequence of as many tokens as the study's."""
    known = "N == 1 && T == 43"
    timed = resolve(
        parse(TABLES | {"workload": [{**TABLES["workload"][0], "length": 43}]}, "test"), setup.base
    )
    found = look(timed, by_hand(".scale = scale,", f".scale = {known} ? 1.01f * scale : scale,"))
    assert found.failed is not None
    assert (found.failed.stage, found.failed.case) == (Stage.REGIMES, "one, hostile values")
    assert found.others == ()
    assert found.smallest is not None
    assert found.smallest.workload["lengths"] == (43,)
    assert "In the case 'one, hostile values' o first departs" in "\n".join(found.where)


def test_what_breaks_a_law_alone_is_shrunk_under_that_law(setup: Setup) -> None:
    """Every case with a solution that has three sequences and a state has one of these numbers of tokens."""
    unsolved = "N == 3 && initial_state && T != 256 && T != 115"
    found = look(setup, by_hand(".scale = scale,", f".scale = {unsolved} ? 1.01f * scale : scale,"))
    assert found.failed is not None
    assert found.failed.stage is Stage.LAWS
    assert found.smallest is not None
    assert found.smallest.complete
    assert sorted(found.smallest.workload["lengths"])[1:] == [1, 1]
    assert (found.smallest.workload["heads"], found.smallest.workload["value_heads"]) == (1, 1)
    said = next(line for line in found.lines() if line.startswith("Smallest"))
    assert said.startswith("Smallest workload that breaks 'beta = 0 is pure decay': { name = ")
    assert "}: o, token row " in said
    assert "answers differ by" in said
    told = json.loads(json.dumps(found.as_json(), allow_nan=False))["smallest"]
    assert (told["rung"], told["failure"], told["complete"]) == ("laws", "wrong", True)


def test_a_file_takes_the_place_of_the_source(setup: Setup, tmp_path: Path) -> None:
    knobs = {**vars(KdaHostKnobs(lanes=4))}
    begun = StudyBegun(setup.config.as_json(), str(setup.base), setup.columns, {})
    added = BranchAdded(-1, "b00", TEMPLATE.source, None, "seed", "")
    entry = Entry(Asked(0, 0, 0, "b00", knobs, "tune"), None)
    history = History(begun, (added,), (entry,), ())
    assert candidate_of(setup, history, entry).branch.source == TEMPLATE.source
    (tmp_path / "mine.c").write_text("int x;")
    mine = candidate_of(setup, history, entry, tmp_path / "mine.c")
    assert (mine.branch.source, mine.knobs) == ("int x;", KdaHostKnobs(lanes=4))
    with pytest.raises(StudyError, match="cannot read"):
        candidate_of(setup, history, entry, tmp_path / "none.c")
