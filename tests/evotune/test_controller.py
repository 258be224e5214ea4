"""Decisions: a pure function of what was recorded."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from evotune.bandit import Bandit
from evotune.controller import Plan, Propose, Repair, Settings, decide
from evotune.fitness.objectives import Column
from evotune.fitness.outcome import Failed, Failure, Outcome, Passed, Retry, Stage, Value
from evotune.history import History, fold
from evotune.pareto import best_per_column, front
from evotune.records import Asked, BranchAdded, Judged, Record, Refusal, StudyBegun

COLUMNS = (Column("speedup:a", "x", True), Column("speedup:b", "x", True), Column("error", "of bound", False))
BEGUN = StudyBegun({"study": {"name": "n", "trials": 50}}, "/", COLUMNS, {})
SEED = BranchAdded(-1, "b00", "seed", None, "seed", "")
SETTINGS = Settings(
    seed=1, batch=4, warmup=2, operators=("rules", "llm"), every=6, stagnation=0, max_branches=3, trials=50
)
WRONG = Failed(Failure.WRONG, Stage.EDGES, "")


def passed(a: float, b: float = 1.0, error: float = 0.5) -> Passed:
    numbers = (a, b, error)
    values = tuple(Value(c.name, v, c.unit, c.maximize) for c, v in zip(COLUMNS, numbers, strict=True))
    return Passed("screen", error, (), 0.0, values, {})


class Story:
    """Records written in the order of a study."""

    def __init__(self) -> None:
        self.records: list[Record] = [BEGUN, SEED]
        self.step = 0
        self.index = 0

    def judged(self, branch: str, *outcomes: Outcome) -> "Story":
        """One step with a candidate for each outcome."""
        for outcome in outcomes:
            self.records.append(Asked(self.step, self.index, self.index, branch, {"k": self.index}, "tune"))
            self.records.append(Judged(self.step, self.index, self.index, outcome, {}, {}, 0.0))
            self.index += 1
        self.step += 1
        return self

    def branch(self, name: str, parent: str = "b00", **fields: Any) -> "Story":
        fields = {"operator": "rules", **fields}
        self.records.append(BranchAdded(self.step - 1, name, name, parent, "rules", "", **fields))
        return self

    def refused(self, operator: str, repairs: str | None = None) -> "Story":
        self.records.append(Refusal(self.step - 1, operator, "exhausted", "", repairs))
        return self

    @property
    def history(self) -> History:
        return fold(self.records)

    def plan(self, legal_count: int | None = None, **changes: Any) -> Plan:
        return decide(replace(SETTINGS, **changes), self.history, legal_count)


def branches(plan: Plan) -> list[str]:
    return [slot.branch for slot in plan.slots]


def test_the_first_step_is_the_baseline_alone() -> None:
    plan = Story().plan()
    assert [(slot.index, slot.branch, slot.purpose) for slot in plan.slots] == [(0, "b00", "baseline")]
    assert plan.mutation is None


def test_then_batches_of_the_seed_branch_with_running_numbers() -> None:
    plan = Story().judged("b00", passed(1)).plan()
    assert branches(plan) == ["b00"] * 4
    assert [slot.index for slot in plan.slots] == [1, 2, 3, 4]


def test_a_decision_is_repeatable() -> None:
    story = Story().judged("b00", passed(1)).branch("b01").judged("b01", passed(2))
    story.judged("b00", passed(1), passed(3)).judged("b01", passed(1), WRONG)
    assert story.plan() == story.plan()
    assert branches(story.plan(batch=32)) != branches(story.plan(batch=32, seed=2))


def test_the_budget_is_kept() -> None:
    story = Story().judged("b00", passed(1)).judged("b00", *[passed(1)] * 4)
    assert len(story.plan(trials=7).slots) == 2
    assert story.plan(trials=5) == Plan(2, ())


def test_when_all_is_tried_there_is_nothing_left() -> None:
    story = Story().judged("b00", passed(1), passed(1))
    assert len(story.plan(legal_count=4).slots) == 2
    assert story.plan(legal_count=2).slots == ()


def test_retries_come_first_and_cost_no_budget() -> None:
    story = Story().judged("b00", passed(1)).judged("b00", Retry("disk"), passed(1))
    plan = story.plan(trials=3)
    assert [(slot.index, slot.purpose, slot.start) for slot in plan.slots] == [(1, "retry", {"k": 1})]
    assert story.history.retries == {1: 1}


def test_a_mutator_is_asked_every_n_candidates_in_turn() -> None:
    story = Story().judged("b00", *[passed(1)] * 5)
    assert story.plan().mutation is None
    story.judged("b00", passed(1))
    assert story.plan().mutation == Propose(("rules", "llm"))
    story.judged("b00", passed(1)).branch("b01").judged("b01", passed(1), *[passed(1)] * 3)
    assert story.plan().mutation is None  # five since then, counting the step it was asked in
    story.judged("b00", passed(1))
    assert story.plan().mutation == Propose(("llm", "rules"))


def test_a_refusal_counts_as_asked() -> None:
    story = Story().judged("b00", *[passed(1)] * 6).judged("b00", passed(1)).refused("rules").refused("llm")
    assert story.plan().mutation is None
    story.judged("b00", *[passed(1)] * 5)
    assert story.plan().mutation == Propose(("llm", "rules"))


def test_stagnation_calls_for_a_proposal() -> None:
    story = Story().judged("b00", passed(1), passed(2), passed(2.01), passed(1), passed(1))
    assert story.plan(every=0, stagnation=4).mutation is None  # three since the 2
    story.judged("b00", passed(1))
    assert story.plan(every=0, stagnation=4).mutation is not None
    story.judged("b00", passed(1, b=1.5))  # progress in the other group
    assert story.plan(every=0, stagnation=4).mutation is None


def test_without_operators_nobody_is_asked() -> None:
    assert Story().judged("b00", *[passed(1)] * 20).plan(operators=()).mutation is None


def test_a_new_branch_starts_from_its_parents_best_or_its_own_wish() -> None:
    story = Story().judged("b00", passed(1), passed(3), passed(2)).branch("b01")
    first = story.plan().slots[0]
    assert (first.branch, first.purpose, first.start) == ("b01", "first", {"k": 1})
    wish = Story().judged("b00", passed(1)).branch("b01", start={"k": 9})
    assert wish.plan().slots[0].start == {"k": 9}


def test_a_branch_lives_once_its_first_candidate_passed_and_is_warmed_up() -> None:
    story = Story().judged("b00", *[passed(1)] * 3).branch("b01").judged("b01", WRONG)
    assert [b.id for b in story.history.living()] == ["b00"]
    story.branch("b02", repairs="b01").judged("b02", passed(1))
    assert [b.id for b in story.history.living()] == ["b00", "b02"]
    assert branches(story.plan(every=0))[0] == "b02"


def test_one_repair_turn() -> None:
    story = Story().judged("b00", passed(1)).branch("b01").judged("b01", WRONG)
    plan = story.plan()
    assert isinstance(plan.mutation, Repair)
    assert plan.mutation.branch.id == "b01"
    given = Story().judged("b00", passed(1)).branch("b01").judged("b01", WRONG).branch("b02", repairs="b01")
    given.judged("b02", WRONG)
    assert given.plan().mutation is None  # a repair is not repaired
    assert story.refused("rules", repairs="b01").plan().mutation is None


def test_the_worst_branches_rest_but_newcomers_never() -> None:
    story = Story().judged("b00", *[passed(1)] * 4)
    for name, speed in (("b01", 5.0), ("b02", 2.0), ("b03", 9.0), ("b04", 0.5)):
        story.branch(name).judged(name, *[passed(speed, speed)] * (2 if name != "b04" else 1))
    handed_out = set(branches(story.plan(batch=64, every=0)))
    assert handed_out >= {"b04", "b03", "b01"}  # b04 is in warm-up
    assert "b00" not in handed_out


def test_the_bandit_prefers_the_best_yet_tries_the_others() -> None:
    story = Story().judged("b00", *[passed(1 + 0.02 * i, 1 + 0.02 * i) for i in range(20)])
    story.branch("b01").judged("b01", *[passed(1.01 + 0.02 * i, 1.01 + 0.02 * i) for i in range(20)])
    bandit = Bandit(story.history, ["b00", "b01"], warmup=2)
    counts = np.unique([bandit.choose(np.random.default_rng(i)) for i in range(200)], return_counts=True)
    share = dict(zip(*counts, strict=True))
    assert share["b01"] > 1.5 * share["b00"] > 15
    assert bandit.order() == ["b01", "b00"]


def test_a_specialist_of_one_group_gets_its_share() -> None:
    story = Story().judged("b00", *[passed(5, 5)] * 30)
    story.branch("b01").judged("b01", *[passed(1, 9)] * 30)
    bandit = Bandit(story.history, ["b00", "b01"], warmup=2)
    chosen = [bandit.choose(np.random.default_rng(i)) for i in range(200)]
    assert 0.15 < chosen.count("b01") / 200 < 0.85


def test_the_front_and_the_best() -> None:
    story = Story().judged(
        "b00", passed(1, 3), passed(3, 1), passed(1, 1), WRONG, passed(3, 1), passed(2, 2, 0.1)
    )
    history = story.history
    assert [entry.asked.index for entry in front(COLUMNS, history.judged)] == [0, 1, 5]
    best = best_per_column(COLUMNS, history.judged)
    assert {name: entry.asked.index for name, entry in best.items()} == {
        "speedup:a": 1,
        "speedup:b": 0,
        "error": 5,
    }
    assert front(COLUMNS, []) == []
    assert best_per_column(COLUMNS, [e for e in history.entries if e.failed]) == {}


def test_relatives_are_living_ancestors() -> None:
    story = Story().judged("b00", passed(1)).branch("b01").judged("b01", passed(1))
    story.branch("b02", parent="b01").judged("b02", WRONG)
    story.branch("b03", parent="b02", other_parent="b00").judged("b03", passed(1))
    assert story.history.relatives("b03") == ("b00", "b01")
    assert story.history.relatives("b00") == ()


@pytest.mark.parametrize("before", [1, 2])
def test_history_before_a_step(before: int) -> None:
    story = Story().judged("b00", passed(1)).judged("b00", passed(2)).branch("b01").judged("b01", passed(1))
    history = fold(story.records, before_step=before)
    assert (history.steps, len(history.entries)) == (before, before)
    assert len(history.branches) == before  # b01 came in step 1
