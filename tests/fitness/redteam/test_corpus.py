"""The corpus is whole, its kernels are what they say, and the judge stops a telling part of it."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from evotune.fitness.outcome import RUNGS, Failed, Failure, Passed, Retry, Stage
from evotune.fitness.redteam import CHEATS, CORPUS, MUTANTS, VARIANTS, Entry, Kind
from evotune.fitness.redteam.corpus import Bench, Findings, Row, bench, run, workload
from evotune.fitness.redteam.coverage import TITLES, coverage
from evotune.fitness.redteam.entry import Edit, base_source
from evotune.search_space.template import Specialization

# One of each kind of trick, cheap: values, laws' rungs, guards, walls, forged answers, work between calls.
TELLING = (
    *("zeros", "inter-chunk term dropped", "scale assumed", "sequence boundary leaked", "reads past the end"),
    *("right by luck", "output cached by pointer", "constructor", "files included", "network"),
    *("reply forged", "poison detected", "inputs turned after use", "one head of two"),
    *("work put off", "work done ahead", "symmetry remembered elsewhere"),
)
HONEST = ("token by token", "sums backwards", "chunks of 16", "inverse, then product")


def named(*names: str) -> list[Entry]:
    return [entry for entry in CORPUS if entry.name in names]


def spec_of(entry: Entry) -> Specialization:
    table = workload(entry.dtype, entry.contract)
    return Specialization("kda", entry.dtype, tuple(sorted(table.constants.items())))


def test_sizes_and_names() -> None:
    assert len(MUTANTS) >= 30
    assert len(CHEATS) >= 40
    assert len(VARIANTS) >= 30
    assert sum(entry.base != "template" for entry in VARIANTS) >= 12
    assert max(Counter(entry.name for entry in CORPUS).values()) == 1


@pytest.mark.parametrize("entry", CORPUS, ids=lambda entry: entry.name)
def test_an_entry_can_be_made_and_says_what_it_is_for(entry: Entry) -> None:
    candidate = entry.candidate(spec_of(entry))
    assert entry.why
    assert (candidate.branch.source != base_source(entry.base)) == bool(entry.edits)
    assert bool(entry.caught) == (entry.kind is not Kind.VARIANT)
    assert entry.evolve or entry.kind is not Kind.CHEAT


def test_an_edit_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(ValueError, match="occurs 0 times"):
        Edit("absent", "").apply("text")
    with pytest.raises(ValueError, match="occurs 2 times"):
        Edit("t", "").apply("text")


def test_every_known_trick_is_accounted_for() -> None:
    known = coverage(CORPUS)
    assert [k.number for k in known] == list(range(1, 73))
    assert len(TITLES) == 72
    assert all(k.by or k.why for k in known)
    assert {k.standing for k in known} <= {"covered", "elsewhere", "not applicable", "open"}
    assert {n for entry in CORPUS for n in entry.evolve} <= set(range(1, 73))


def test_where_else_a_trick_is_stopped_exists() -> None:
    root = Path(__file__).parents[3]
    for known in coverage(CORPUS):
        for word in known.why.split():
            if word.startswith("tests/"):
                assert (root / word).exists(), (known.number, word)


CHEAT = Entry("c", Kind.CHEAT, "", caught=frozenset({Stage.SMOKE}), failures=frozenset({Failure.WRONG}))
PASSED = Passed("full", 0.5, (), 1.0, (), {})
WRONG = Failed(Failure.WRONG, Stage.SMOKE, "")


def test_verdicts() -> None:
    variant = Entry("v", Kind.VARIANT, "")
    tricky = Entry("t", Kind.CHEAT, "", caught=frozenset({Stage.TIME}), may_pass=True)
    rows = [
        Row(CHEAT, WRONG, rungs={stage: int(stage == Stage.LAWS) for stage in RUNGS}),
        Row(CHEAT, Failed(Failure.FAULT, Stage.SMOKE, "")),
        Row(CHEAT, Failed(Failure.WRONG, Stage.EDGES, "")),
        Row(CHEAT, PASSED),
        Row(tricky, PASSED, 1.0, 1.2),
        Row(tricky, PASSED, 9.0, 9.0),
        Row(tricky, PASSED, 9.0, None),
        Row(variant, PASSED),
        Row(variant, WRONG),
        Row(variant, Retry("disk")),
    ]
    verdicts = ["caught", "elsewhere", "elsewhere", "accepted", "no gain", "accepted", "accepted"]
    assert [row.verdict for row in rows] == [*verdicts, "passed", "rejected", "unknown"]
    found = Findings(tuple(rows), 1.0)
    assert len(found.accepted) == 3
    assert found.false_rejections == pytest.approx(1 / 3)
    assert found.alone()[Stage.LAWS] == ["c"]
    assert found.catches()[Stage.SMOKE] == 3


@pytest.mark.parametrize(
    ("row", "held"),
    [
        (Row(CHEAT, WRONG), True),
        (Row(CHEAT, PASSED), False),
        (Row(Entry("v", Kind.VARIANT, ""), WRONG), False),
        (Row(CHEAT, Retry("disk")), False),
    ],
)
def test_a_corpus_holds_only_without_an_accepted_exploit_a_refused_kernel_or_doubt(
    row: Row, held: bool
) -> None:
    assert Findings((row,), 1.0).held is held


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with bench(tmp_path_factory.mktemp("cache")) as made:
        yield made


def test_the_judge_stops_what_it_should_and_passes_what_it_should(opened: Bench) -> None:
    rows = list(opened.judge(named(*TELLING, *HONEST), full=False))
    assert len(rows) == len(TELLING) + len(HONEST)
    odd = [(r.entry.name, r.verdict, r.where, r.paid) for r in rows if r.verdict in _UNWANTED]
    assert odd == []


_UNWANTED = ("accepted", "rejected", "elsewhere", "unknown")


def test_every_rung_is_asked_where_a_gate_goes_on(opened: Bench) -> None:
    (row,) = opened.judge(named("beta twice"), full=True)
    assert row.rungs is not None
    assert row.rungs[Stage.SMOKE] > 0
    assert row.rungs[Stage.REGIMES] > 0
    (refused,) = opened.judge(named("constructor"), full=True)
    assert refused.rungs is None


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_whole_corpus(tmp_path: Path) -> None:
    found = run(CORPUS, tmp_path, full=True)
    assert [(r.entry.name, r.where, r.paid) for r in found.accepted] == []
    assert [(r.entry.name, r.where) for r in found.rows if r.verdict in ("elsewhere", "unknown")] == []
    assert found.false_rejections <= 0.05
    alone = found.alone()
    assert all(alone[stage] for stage in RUNGS if stage is not Stage.SMOKE), alone
