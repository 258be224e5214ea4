"""The corpus is whole, its kernels are what they say, and the judge stops a telling part of it."""

import csv
import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

import pytest

from evotune.fitness import cute_toolchain
from evotune.fitness.gate import Session
from evotune.fitness.operator import Array
from evotune.fitness.outcome import RUNGS, Artifact, Failed, Failure, Passed, Resources, Retry, Stage
from evotune.fitness.redteam import CORPORA, CORPUS, CUTE_CORPUS, Entry, Kind
from evotune.fitness.redteam.corpus import Bench, BuildBench, Findings, Row, bench, run, specialization_of
from evotune.fitness.redteam.coverage import TITLES, coverage
from evotune.fitness.redteam.entry import Edit, base_source
from evotune.fitness.sandbox import Sandbox

# One of each kind of trick, cheap: values, laws' rungs, guards, walls, forged answers, work between calls.
TELLING = (
    *("zeros", "inter-chunk term dropped", "scale assumed", "sequence boundary leaked", "reads past the end"),
    *("right by luck", "output cached by pointer", "constructor", "files included", "network"),
    *("reply forged", "poison detected", "inputs turned after use", "one head of two"),
    *("work put off", "work done ahead", "symmetry remembered elsewhere"),
)
EVERY = tuple(entry for corpus in CORPORA.values() for entry in corpus)
HONEST = ("token by token", "sums backwards", "chunks of 16", "inverse, then product")


def named(*names: str) -> list[Entry]:
    return [entry for entry in CORPUS if entry.name in names]


def kind(wanted: Kind, corpus: tuple[Entry, ...] = CORPUS) -> list[Entry]:
    return [entry for entry in corpus if entry.kind is wanted]


def test_sizes_and_names() -> None:
    assert len(kind(Kind.MUTANT)) >= 30
    assert len(kind(Kind.CHEAT)) >= 40
    assert len(kind(Kind.VARIANT)) >= 30
    assert sum(entry.base != "template" for entry in kind(Kind.VARIANT)) >= 12
    assert len(kind(Kind.MUTANT, CUTE_CORPUS)) >= 15
    assert len(kind(Kind.CHEAT, CUTE_CORPUS)) >= 40
    assert sum(not entry.needs_device for entry in CUTE_CORPUS) >= 30
    assert max(Counter(entry.name for entry in EVERY).values()) == 1
    for target, corpus in CORPORA.items():
        assert {entry.target for entry in corpus} == {target}


@pytest.mark.parametrize("entry", EVERY, ids=lambda entry: entry.name)
def test_an_entry_can_be_made_and_says_what_it_is_for(entry: Entry) -> None:
    candidate = entry.candidate(specialization_of(entry))
    assert entry.why
    assert (candidate.branch.source != base_source(entry.base)) == bool(entry.edits)
    assert bool(entry.caught) == (entry.kind is not Kind.VARIANT)
    assert (len(entry.caught) > 1) == bool(entry.luck), "one stage, or a few and the luck that decides"
    assert len(entry.caught) <= 3
    assert entry.evolve or entry.kind is not Kind.CHEAT


def test_an_edit_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(ValueError, match="occurs 0 times"):
        Edit("absent", "").apply("text")
    with pytest.raises(ValueError, match="occurs 2 times"):
        Edit("t", "").apply("text")


def test_every_known_trick_is_accounted_for() -> None:
    known = coverage(EVERY)
    assert [k.number for k in known] == list(range(1, 73))
    assert len(TITLES) == 72
    assert all(k.by or k.why for k in known)
    assert {k.standing for k in known} == {"covered", "elsewhere", "not applicable"}
    assert all(bool(k.why) == (k.standing != "covered") for k in known), "what is said is not hidden by a tag"
    assert {n for entry in EVERY for n in entry.evolve} <= set(range(1, 73))


def test_where_else_a_trick_is_stopped_exists() -> None:
    root = Path(__file__).parents[3]
    for known in coverage(EVERY):
        if known.standing != "elsewhere":
            continue
        named = re.findall(r"(tests/[\w/]+\.py)::(\w+)", known.why)
        assert named, known
        for path, name in named:
            assert f"def {name}(" in (root / path).read_text(encoding="utf-8"), (known.number, path, name)


@pytest.mark.parametrize(("target", "table"), [("host", "host"), ("sm_90a", "h200")])
def test_recorded_runs_stopped_each_kernel_where_its_entry_names(target: str, table: str) -> None:
    path = Path(__file__).parents[3] / "experiments" / "results" / f"redteam_{table}.csv"
    with path.open(encoding="utf-8", newline="") as lines:
        recorded = {row["name"]: row["stage"] for row in csv.DictReader(lines)}
    wrong = {entry.name: entry for entry in CORPORA[target] if entry.kind is not Kind.VARIANT}
    assert set(wrong) <= set(recorded)
    assert {name: recorded[name] for name, e in wrong.items() if recorded[name] not in {"", *e.caught}} == {}


CHEAT = Entry("c", Kind.CHEAT, "", caught=frozenset({Stage.SMOKE}), failures=frozenset({Failure.WRONG}))
PASSED = Passed("full", 0.5, (), 1.0, (), {})
WRONG = Failed(Failure.WRONG, Stage.SMOKE, "")
BUILT = Artifact("", Path(), "kda_forward", "sm_90a", "", Resources(), 0.0)
_EARLY = ("caught", "elsewhere", "accepted", "not run", "not run")


def test_verdicts() -> None:
    variant = Entry("v", Kind.VARIANT, "")
    tricky = Entry("t", Kind.CHEAT, "", caught=frozenset({Stage.TIME}), may_pass=True)
    early = Entry("e", Kind.CHEAT, "", caught=frozenset({Stage.INSPECT}), told="foreign")
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
        Row(early, Failed(Failure.REFUSED, Stage.INSPECT, "foreign symbols")),
        Row(early, Failed(Failure.REFUSED, Stage.INSPECT, "a slip of its own")),
        Row(early, BUILT),
        Row(CHEAT, BUILT),
        Row(variant, BUILT),
    ]
    verdicts = ["caught", "elsewhere", "elsewhere", "accepted", "no gain", "accepted", "accepted"]
    assert [row.verdict for row in rows] == [*verdicts, "passed", "rejected", "unknown", *_EARLY]
    found = Findings(tuple(rows), 1.0)
    assert len(found.accepted) == 4
    assert len(found.elsewhere) == 3
    assert len(found.not_run) == 2
    assert found.false_rejections == pytest.approx(1 / 4)
    assert found.alone()[Stage.LAWS] == ["c"]
    assert found.catches()[Stage.SMOKE] == 3


@pytest.mark.parametrize(
    ("row", "held"),
    [
        (Row(CHEAT, WRONG), True),
        (Row(CHEAT, Failed(Failure.WRONG, Stage.LAWS, "")), True),
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
    with closing(bench(tmp_path_factory.mktemp("cache"))) as made:
        yield made


def test_the_judge_stops_what_it_should_and_passes_what_it_should(opened: Bench) -> None:
    rows = list(opened.judge(named(*TELLING, *HONEST), full=False))
    assert len(rows) == len(TELLING) + len(HONEST)
    assert all(row.outcome.stage in row.entry.caught for row in rows if isinstance(row.outcome, Failed))
    odd = [(r.entry.name, r.verdict, r.where, r.paid) for r in rows if r.verdict in _UNWANTED]
    assert odd == []


_UNWANTED = ("accepted", "rejected", "elsewhere", "unknown")


def test_every_mutant_is_stopped_by_the_rung_that_its_entry_names(opened: Bench) -> None:
    plain = [e for e in kind(Kind.MUTANT) if (e.dtype, e.contract) == ("float32", "plain")]
    assert {stage for e in plain for stage in e.caught} == set(RUNGS) - {Stage.LAWS}
    rows = list(opened.judge(plain, full=False))
    assert [(r.entry.name, r.where, r.due) for r in rows if r.verdict != "caught"] == []


def test_no_two_evaluations_see_the_same_inputs(opened: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the gate and of the timing. Empty problems, which are all alike, are left out."""
    seen: list[set[bytes]] = []
    place_in = Session.place_in

    def noting(self, runner, index, case, **kwargs):  # type: ignore[no-untyped-def]
        if case.sizes["T"] > 0:
            seen[-1].add(_digest(case.inputs))
        return place_in(self, runner, index, case, **kwargs)

    monkeypatch.setattr(Session, "place_in", noting)
    for _ in range(2):
        seen.append(set())
        (row,) = opened.judge(named("sums backwards"), full=False)
        assert row.verdict == "passed", row.where
    first, second = seen
    assert min(len(first), len(second)) > 60
    assert first.isdisjoint(second)


def _digest(inputs: Mapping[str, Array | None]) -> bytes:
    found = hashlib.blake2b()
    for name, values in inputs.items():
        found.update(name.encode() + (b"" if values is None else values.tobytes()))
    return found.digest()


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
    found = run(CORPUS, bench(tmp_path), full=True)
    assert [(r.entry.name, r.where, r.paid) for r in found.accepted] == []
    assert [(r.entry.name, r.where) for r in found.rows if r.verdict in ("elsewhere", "unknown")] == []
    assert found.false_rejections <= 0.05
    alone = found.alone()
    assert all(alone[stage] for stage in RUNGS if stage is not Stage.SMOKE), alone


# One of each kind of door: the sandbox of a build, what an object calls, what it keeps, its device code; and
# a kernel that takes a GPU to be found wrong.
EARLY = (
    *("sm90: reads the compiler's parent while traced", "sm90: memory of its own", "sm90: a second image"),
    *("sm90: memory that outlives a launch", "sm90: zeros", "sm90: as shipped"),
)


@pytest.mark.compile
@pytest.mark.parametrize("name", EARLY)
def test_kernels_for_hopper_are_judged_as_far_as_that_needs_no_gpu(building: Bench, name: str) -> None:
    entry = next(entry for entry in CUTE_CORPUS if entry.name == name)
    (row,) = building.judge([entry], full=False)
    assert row.verdict == ("not run" if entry.needs_device else "caught"), row.outcome


@pytest.fixture(scope="module")
def building(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    lack = cute_toolchain.missing()
    if lack is not None:
        pytest.skip(lack)
    with closing(BuildBench(tmp_path_factory.mktemp("cute"), Sandbox.detect(), "no GPU asked for")) as made:
        yield made


@pytest.mark.compile
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_whole_corpus_for_hopper_without_a_gpu(building: Bench) -> None:
    rows = list(building.judge(CUTE_CORPUS, full=False))
    assert [(r.entry.name, r.where, r.outcome) for r in rows if r.verdict not in ("caught", "not run")] == []


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_whole_corpus_for_hopper_on_a_gpu(tmp_path: Path) -> None:
    found = run(CUTE_CORPUS, bench(tmp_path, "sm_90a"))
    odd = [(r.entry.name, r.verdict, r.where, r.paid) for r in found.rows if r.verdict in _UNWANTED]
    assert odd == []
    assert not found.not_run
