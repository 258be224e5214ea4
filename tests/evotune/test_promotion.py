"""Champions: who may challenge, when, at which level, and that a study of equals crowns nobody."""

import math
import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
from optuna_dashboard._note import get_note_from_system_attrs

from evotune import calibrate, journal, notes, promotion, tables
from evotune.errors import DeviceLost, SandboxError, StudyError
from evotune.fitness.evaluation import Fallen
from evotune.fitness.objectives import Column
from evotune.fitness.outcome import Failed, Failure, Measurement, Passed, Retry, Stage, Value
from evotune.fitness.racing import log_speedup
from evotune.fitness.sequential import level, spending
from evotune.history import Entry, History, fold, value_of
from evotune.journal import FILE, Journal, read
from evotune.live import LiveLine
from evotune.plots import progress_figure
from evotune.promotion import (
    BASELINE,
    Defence,
    Match,
    PromotionPlan,
    bars,
    log_ratio,
    matches,
    reserve_s,
    spent,
    titles,
    turn,
)
from evotune.records import (
    Asked,
    BranchAdded,
    Confirmation,
    Contest,
    Judged,
    Record,
    StudyBegun,
    to_json,
)
from evotune.replay import replay
from evotune.report import progress, status
from evotune.trials import storage_at
from tests.evotune.toy import ToyDevice, call, found, meetings, run_study, setup_of, study_file

PLAN = PromotionPlan()
WRONG = Failed(Failure.WRONG, Stage.LAWS, "o, head 0", case="splitting")
FORGED = Failed(Failure.FORGED, Stage.TIME, "its clock leaves out 9000 us")


def measured(group: str, speedups: Sequence[float]) -> Measurement:
    """One workload whose pairs have these ratios."""
    return Measurement(f"{group} 1", group, tuple(1 / s for s in speedups), (1.0,) * len(speedups))


def history(
    candidates: Sequence[Sequence[Measurement]], *held: Contest | Confirmation, seconds: float = 1.0
) -> History:
    """A study whose candidates, the default first, were measured so and took so long; `held` at its end."""
    records = records_of(candidates, seconds)
    ends_s = np.cumsum([seconds * len(candidates), *(record.seconds for record in held)])[1:]
    records += [replace(record, elapsed_s=float(end_s)) for record, end_s in zip(held, ends_s, strict=True)]
    return fold(records)


def records_of(candidates: Sequence[Sequence[Measurement]], seconds: float = 1.0) -> list[Record]:
    records: list[Record] = [
        StudyBegun({}, "", (Column("speedup:long", "x", maximize=True),), {}),
        BranchAdded(-1, "b00", "source", None, "seed", ""),
    ]
    for i, measurements in enumerate(candidates):
        values = [Value(f"speedup:{m.group}", m.speedup, "x", True) for m in measurements]
        passed = Passed("screen", 0.5, tuple(measurements), 1.0, tuple(values), {})
        records.append(Asked(i, i, i, "b00", {}, "tune"))
        records.append(Judged(i, i, i, passed, {"time": seconds}, {}, seconds * (i + 1)))
    return records


def steady(*speedups: float) -> list[list[Measurement]]:
    """Candidates of one group without noise, the default in front."""
    return [[measured("long", [s] * 8)] for s in (1.0, *speedups)]


def contest(
    challenger: int,
    champion: int,
    promoted: bool = False,
    *,
    group: str = "long",
    failed: Failed | None = None,
    fallen: str = "",
    seconds: float = 1.0,
) -> Contest:
    blocks = () if failed or fallen else ((measured(group, [1.0, 1.0]),),)
    return Contest(
        9, group, challenger, champion, 0.025, 40.0, promoted, blocks, failed, fallen, seconds, 10.0
    )


def confirmation(champion: int, *speedups: float, failed: Failed | None = None) -> Confirmation:
    blocks = tuple((measured("long", [s, s]),) for s in speedups)
    return Confirmation(9, "long", champion, blocks, failed, 1.0, 10.0)


def champion(state: History, group: str = "long") -> int:
    return next(title.champion for title in titles(state) if title.group == group)


def challengers(state: History) -> list[int]:
    return [match.challenger for match in matches(state, PLAN)]


def test_a_block_is_the_mean_log_ratio_of_the_fastest_calls_over_workloads() -> None:
    block = (
        Measurement("a", "long", (5.0, 1.0, 900.0), (7.0, 8.0, 4.0)),
        Measurement("b", "long", (3.0, 3.0), (3.0, 30.0)),
    )
    assert log_ratio(block) == pytest.approx(math.log(4) / 2)


def test_the_default_is_champion_until_somebody_wins() -> None:
    state = history(steady(1.1, 1.3, 1.2))
    assert champion(state) == BASELINE
    hope = pytest.approx(math.log(1.3))
    assert matches(state, PLAN) == [Match("long", 2, BASELINE, spending(0.05, 1), hope)]
    state = history(steady(1.1, 1.3, 1.2), contest(2, BASELINE, promoted=True))
    assert champion(state) == 2
    assert challengers(state) == []


def test_a_challenger_is_ahead_or_within_the_noise() -> None:
    """Pairs scatter by 4 %, so that a value of eight has an error of 1.25 * 1.48 * 0.04 / sqrt(8) = 2.6 %."""

    def noisy(speedup: float) -> list[Measurement]:
        return [measured("long", [speedup * (1 + d) for d in (-0.04, 0.04) * 4])]

    state = history([noisy(1.0), noisy(1.5), noisy(1.42), noisy(1.3)], contest(1, 0, promoted=True))
    assert challengers(state) == [2]
    assert matches(state, replace(PLAN, within=1.0)) == []
    assert [m.challenger for m in matches(state, replace(PLAN, within=6.0))] == [2]


def test_nobody_meets_a_standing_champion_twice() -> None:
    lost = contest(1, BASELINE)
    state = history(steady(1.3, 1.2), lost)
    assert challengers(state) == [2]
    state = history(steady(1.3, 1.2), lost, contest(2, BASELINE, promoted=True))
    assert challengers(state) == []  # 1 was no faster than what 2 beat
    groups = [[measured("long", [s]), measured("short", [s])] for s in (1.0, 1.3)]
    assert [m.group for m in matches(history(groups, lost), PLAN)] == ["short"]


def test_who_fails_is_out_everywhere_and_hands_the_title_back() -> None:
    groups = [[measured("long", [s]), measured("short", [s])] for s in (1.0, 1.2, 1.3)]
    state = history(groups, contest(2, BASELINE, failed=WRONG))
    assert [(m.group, m.challenger) for m in matches(state, PLAN)] == [("long", 1), ("short", 1)]
    crowned = (contest(1, BASELINE, promoted=True), contest(2, 1, promoted=True))
    assert champion(history(groups, *crowned)) == 2
    assert champion(history(groups, *crowned, confirmation(2, failed=WRONG))) == 1
    fallen = history(steady(1.2, 1.3, 1.4), *crowned, contest(3, 2, fallen="it fails while it is timed"))
    assert champion(fallen) == 1
    assert challengers(fallen) == [3]


def test_who_was_found_wrong_is_shown_as_nobodys_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Candidate 2 is the fastest of screening."""

    def shown(state: History) -> tuple[list[int], int, float, str, list[int], list[float]]:
        told = status(state, 0.0)
        monkeypatch.setattr(tables, "load", lambda directory: state)
        frame = tables.results(tmp_path)
        (column,) = state.columns
        (line,) = progress_figure(state).data
        return (
            [c["candidate"] for c in told["front"]],
            told["best"][column.name]["candidate"],
            told["branches"][0]["best"][column.name],
            progress(state),
            list(frame.index[frame["front"]]),
            list(line.y),
        )

    candidates = steady(1.2, 1.5)
    begun = history(candidates).begun
    state = replace(history(candidates), begun=replace(begun, config={"study": {"name": "s", "trials": 3}}))
    assert shown(state) == ([2], 2, 1.5, "long 1.5×", [2], [1.0, 1.2, 1.5, 1.5])
    state = replace(state, contests=(contest(2, BASELINE, failed=WRONG),))
    assert shown(state) == ([1], 1, 1.2, "long 1.2×", [1], [1.0, 1.2, 1.2])


def test_a_step_looks_at_new_measurements_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a study's, each step again, held a loop over 2,000 records for ten seconds."""
    looked: list[float] = []

    def counted(baseline_us: float, mine_us: float) -> float:
        looked.append(mine_us)
        return log_speedup(baseline_us, mine_us)

    monkeypatch.setattr(promotion, "log_speedup", counted)
    rng = np.random.default_rng(11)
    drawn = [[measured("long", list(np.exp(0.01 * rng.standard_normal(8))))] for _ in range(30)]
    before = matches(history(drawn[:29]), PLAN)
    assert len(looked) == 29 * 8
    after = matches(history(drawn), PLAN)
    assert len(looked) == 30 * 8
    assert [match.challenger for match in before] != []
    assert after == matches(fold(records_of(drawn)), PLAN)


def test_levels_are_spent_by_tests_that_saw_evidence() -> None:
    before = [
        contest(1, 0),
        contest(2, 0, promoted=True),
        contest(3, 2, failed=WRONG),
        contest(4, 2, failed=FORGED),
    ]
    state = history(steady(1.1, 1.2, 1.3, 1.4, 1.5), *before)
    (match,) = matches(state, PLAN)
    assert (match.challenger, match.champion) == (5, 2)
    assert match.level == level(0.05, [False, True, False])


ROUNDS = ((1.0, 1.0), (1.3, 1.1), (1.2, 2.0))


def test_the_most_hopeful_group_comes_first() -> None:
    groups = [[measured("long", [s]), measured("short", [r])] for s, r in ROUNDS]
    assert [(m.group, m.challenger) for m in matches(history(groups), PLAN)] == [("short", 2), ("long", 1)]


def test_while_the_search_runs_half_the_share_may_go() -> None:
    """A first contest is reckoned at 15 candidates, a later one at what the last took."""
    assert turn(history(steady(1.3, *[1.0] * 100), seconds=0.1), PLAN, over=False) is None
    many = steady(1.3, 1.4, *[1.0] * 510)
    due = turn(history(many, seconds=0.1), PLAN, over=False)
    assert isinstance(due, Match)
    assert due.challenger == 2
    held = history(many, contest(2, BASELINE, seconds=1.0), seconds=0.1)  # 2 s fit into 51.3 s times 0.05
    assert isinstance(turn(held, PLAN, over=False), Match)
    held = history(many, contest(2, BASELINE, seconds=1.4), seconds=0.1)
    assert turn(held, PLAN, over=False) is None
    assert turn(history(many, seconds=0.1), replace(PLAN, share=0.0), over=False) is None
    assert turn(history(many, seconds=0.1), replace(PLAN, share=0.0), over=True) is None


def test_at_the_end_every_group_is_tested_then_confirmed() -> None:
    groups = [
        [measured("long", [s]), measured("short", [r])] for s, r in ((1.0, 1.0), (1.3, 1.2), (1.25, 1.1))
    ]
    dear = {"seconds": 100.0}
    due = turn(history(groups), PLAN, over=True)
    assert isinstance(due, Match)
    assert due.group == "long"
    won = contest(1, BASELINE, promoted=True, **dear)
    due = turn(history(groups, won), PLAN, over=True)
    assert isinstance(due, Match)
    assert due.group == "short"
    lost = contest(1, BASELINE, group="short", **dear)
    assert turn(history(groups, won, lost), PLAN, over=True) == Defence("long", 1)
    assert turn(history(groups, won, lost, confirmation(1, 1.3)), PLAN, over=True) is None
    due = turn(history(groups, won, lost), PLAN, over=True, limit_s=10_000)  # its share is not used up
    assert isinstance(due, Match)
    assert (due.group, due.challenger) == ("short", 2)


def test_a_time_limit_leaves_room_for_the_end() -> None:
    """What is left of the share, and never less than what each group needs: 12 + 6 candidates' time here."""
    state = history(steady(1.3), seconds=0.1)
    assert reserve_s(state, PLAN, 100.0) == pytest.approx(10.0)
    assert reserve_s(state, PLAN, 12.0) == pytest.approx(1.8)
    assert reserve_s(state, PLAN, 3.0) == pytest.approx(1.5)
    held = history(steady(1.3), contest(1, BASELINE, seconds=4.0), seconds=0.1)
    assert reserve_s(held, PLAN, 100.0) == pytest.approx(6.0)
    assert reserve_s(held, PLAN, 12.0) == pytest.approx(0.6)
    assert reserve_s(state, replace(PLAN, share=0.0), 100.0) == 0.0


def test_a_few_that_fail_the_full_gate_are_passed_over_at_the_end() -> None:
    failing = [contest(i, BASELINE, failed=WRONG, seconds=100.0) for i in (5, 4, 3)]
    for known in (1, 2):
        due = turn(history(steady(1.1, 1.2, 1.3, 1.4, 1.5), *failing[:known]), PLAN, over=True)
        assert isinstance(due, Match)
        assert due.challenger == 5 - known
    assert turn(history(steady(1.1, 1.2, 1.3, 1.4, 1.5), *failing), PLAN, over=True) is None


def test_bars_are_what_the_groups_best_reached_on_each_workload() -> None:
    def pair(one: float, two: float) -> list[Measurement]:
        second = replace(measured("long", [two]), workload="long 2")
        return [measured("long", [one]), second, measured("short", [1 / one])]

    state = history([pair(1.0, 1.0), pair(2.0, 0.9), pair(1.2, 1.6)])
    assert bars(state) == {"long 1": 1.2, "long 2": 1.6, "short 1": 1.0}
    assert bars(history([])) == {}
    assert bars(history([]), ["long 1", "short 1"]) == {"long 1": 1.0, "short 1": 1.0}
    assert bars(state, ["long 1", "long 2", "short 1"]) == bars(state)


def test_who_was_found_wrong_sets_no_bar() -> None:
    candidates = steady(10.0, 1.2)
    assert bars(history(candidates)) == {"long 1": 10.0}
    assert bars(history(candidates, contest(1, BASELINE, failed=WRONG))) == {"long 1": 1.2}
    won = contest(1, BASELINE, promoted=True)
    assert bars(history(candidates, won, confirmation(1, failed=WRONG))) == {"long 1": 1.2}


def test_a_step_asked_ahead_is_timed_against_the_same_bars_after_an_interruption() -> None:
    """The contest that follows the step in flight was not held yet when the next one was asked for."""
    records = [*records_of(steady(10.0, 1.2)), replace(contest(1, BASELINE, failed=WRONG), step=2)]
    told = [fold(known, before_step=3, in_flight=2) for known in (records[:-1], records)]
    assert bars(told[0]) == bars(told[1]) == {"long 1": 10.0}
    assert bars(fold(records, before_step=4, in_flight=3)) == {"long 1": 1.2}


def test_the_default_never_challenges() -> None:
    """Not even where only a champion that is out since had beaten it."""
    crowned = contest(1, BASELINE, promoted=True), contest(2, 1, promoted=True)
    state = history(steady(1.02, 0.99), *crowned, confirmation(1, failed=WRONG))
    assert champion(state) == 2
    assert challengers(state) == []


def test_what_is_published_comes_from_confirmation_alone() -> None:
    state = history(
        steady(1.9), contest(1, BASELINE, promoted=True), confirmation(1, 1.2, 1.3, 1.1, 1.25, 1.35, 1.15)
    )
    (title,) = titles(state)
    assert title.published is not None
    assert (title.published.low, title.published.high) == pytest.approx((1.1, 1.35))
    assert title.published.median == pytest.approx(math.sqrt(1.2 * 1.25))
    assert title.resolved


@pytest.mark.parametrize(
    ("speedups", "resolution", "told"),
    [
        ((1.02, 1.03, 1.04, 1.03, 1.02, 1.05), None, "at 97%"),
        ((1.02, 1.03, 1.04, 1.03, 1.02, 1.05), math.log(1.02), "at 97%"),
        (
            (1.02, 1.03, 1.04, 1.03, 1.02, 1.05),
            math.log(1.05),
            "not resolved, this machine tells gains from 5.0%",
        ),
        ((0.99, 1.03, 1.04, 1.03, 1.02, 1.05), None, "not resolved"),
    ],
)
def test_a_gain_that_the_machine_cannot_tell_is_not_resolved(
    speedups: tuple[float, ...], resolution: float | None, told: str
) -> None:
    found = replace(confirmation(1, *speedups), resolution=resolution)
    state = history(steady(1.9), contest(1, BASELINE, promoted=True), found)
    (title,) = titles(state)
    assert title.resolved is ("not" not in told)
    assert notes.champion(state, title).endswith(told)


def test_studies_of_equals_promote_in_one_of_twenty_at_most() -> None:
    """200 studies of 30 equal candidates: screening's noise has heavy tails, and every test is held that the
    policy asks for. Without a level that shrinks from test to test 40 % of them crown somebody."""
    rng = np.random.default_rng(11)
    crowned = 0
    for _ in range(200):
        screens = np.exp(0.02 * rng.standard_t(3, size=(30, 8)))
        candidates = [[measured("long", screen)] for screen in screens]
        held: list[Contest] = []
        while len(held) < 15 and (due := matches(history(candidates, *held), PLAN)):
            test = due[0].test(PLAN)
            while not test.over:
                test.update(float(0.01 * rng.standard_t(3)))
            held.append(contest(due[0].challenger, due[0].champion, test.rejected))
            if test.rejected:
                crowned += 1
                break
    assert crowned <= 200 * PLAN.alpha


def speedup(entry: Entry, name: str) -> float:
    assert entry.passed is not None
    return value_of(entry.passed, name)


def test_a_study_crowns_the_fastest_and_says_so(tmp_path: Path) -> None:
    setup = setup_of(study_file(tmp_path))
    loop = run_study(setup)
    state = loop.history
    for title in titles(state):
        name = f"speedup:{title.group}"
        passed = [entry for entry in state.judged if entry.passed]
        best = max(passed, key=lambda entry: speedup(entry, name))
        assert title.champion == best.asked.index
        assert title.published is not None
        true = speedup(best, name)
        assert title.published.low < title.published.median < title.published.high
        assert title.published.median == pytest.approx(true, rel=0.01)
    study = optuna.load_study(study_name="toy", storage=storage_at(setup.directory, ""))
    attrs = study._storage.get_study_system_attrs(study._study_id)
    note = get_note_from_system_attrs(attrs, None)["body"]
    assert "# Champions" in note
    assert "promoted" in note
    told = {c["group"]: c for c in status(state, 0.0)["champions"]}
    assert told.keys() == {"long", "short"}
    assert told["long"]["resolved"] is True
    plain = call("status", setup.directory).stdout
    assert "Champions" in plain
    assert "of timing" in plain


def test_the_live_line_says_who_meets_whom(capsys: pytest.CaptureFixture[str]) -> None:
    class Status:
        told = ""

        def update(self, text: str) -> None:
            self.told = text

    line, shown = LiveLine(40, None), Status()
    line._status = shown  # type: ignore[assignment]
    state = history(steady(1.3, 1.1))
    (match,) = matches(state, PLAN)
    line.meets(state, match)
    assert "no champions yet · 1 branch" in shown.told
    assert shown.told.endswith("long: #1 meets #0")
    won = contest(1, BASELINE, promoted=True)
    crowned = history(steady(1.3, 1.1), won)
    line.met(crowned, won)
    assert "champions long #1" in shown.told
    line.meets(crowned, Defence("long", 1))
    assert shown.told.endswith("long: #1 is confirmed")
    assert "long: candidate 1 (b00), not confirmed yet" in capsys.readouterr().err


def test_a_replay_holds_the_same_contests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of them between steps, when a first one is reckoned at little."""
    monkeypatch.setattr(promotion, "_SOLVING", 0)
    share = ("[mutation]", "[promotion]\nshare = 1.0\nconfirmation_blocks = 8\n\n[mutation]")
    setup = setup_of(study_file(tmp_path, share), trials=24)
    loop = run_study(setup, ToyDevice(setup, noise=1.0))
    held = loop.history.contests
    assert len({contest.step for contest in held}) > 1
    assert any(not contest.promoted for contest in held)
    again = replay(setup.directory)
    assert found(again) == found(loop.opened.records)
    assert meetings(again) == meetings(loop.opened.records)


def test_a_replay_notices_another_decision(tmp_path: Path) -> None:
    """Of a journal whose test went on for longer than this test would."""
    setup = setup_of(study_file(tmp_path), trials=12)
    loop = run_study(setup)
    path = setup.directory / FILE
    records = [
        replace(r, blocks=r.blocks[:-1]) if isinstance(r, Contest) and r.promoted else r
        for r in loop.opened.records
    ]
    path.unlink()
    other = Journal(setup.directory)
    for record in records:
        other.append(record)
    other.close()
    with pytest.raises(StudyError, match="is not decided after the blocks that were recorded"):
        replay(setup.directory)


def test_trouble_in_a_contest_is_tried_again_and_stays_out_of_the_record(tmp_path: Path) -> None:
    setup = setup_of(study_file(tmp_path), trials=12)
    device = ToyDevice(setup, fates={0: Retry("the disk was full"), 2: Fallen("it fails while it is timed")})
    loop = run_study(setup, device)
    assert len(loop.history.contests) + len(loop.history.confirmations) == len(device.compared) - 2
    assert all(c.failed is None and not c.fallen for c in loop.history.contests)
    other = setup_of(study_file(tmp_path), trials=12, directory="other.study")
    with pytest.raises(
        SandboxError, match=r"the promotion of candidate \d+ met trouble 3 times .*no room.*doctor"
    ):
        run_study(other, ToyDevice(other, fates=dict.fromkeys(range(9), Retry("no room"))))


def test_a_challenger_that_fails_the_full_gate_is_out_and_the_next_is_asked(tmp_path: Path) -> None:
    setup = setup_of(study_file(tmp_path), trials=12)
    loop = run_study(setup, ToyDevice(setup, fates={0: WRONG}))
    first, second, *_ = loop.history.contests
    assert first.failed == WRONG
    assert first.challenger != second.challenger
    assert first.challenger not in {title.champion for title in titles(loop.history)}
    assert second.level == spending(0.05, 1)
    assert meetings(replay(setup.directory)) == meetings(loop.opened.records)


def test_what_calibrate_measured_is_in_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Measured:
        def resolution(self, group: str, plan: PromotionPlan) -> float:
            return {"long": 9.9, "short": math.inf}[group]

    monkeypatch.setattr(calibrate, "load", lambda setup, evaluator: Measured())
    setup = setup_of(study_file(tmp_path), trials=12)
    state = run_study(setup).history
    told = {c["group"]: c for c in status(state, 0.0)["champions"]}
    assert (told["long"]["resolution"], told["long"]["resolved"]) == (9.9, False)
    assert (told["short"]["resolution"], told["short"]["resolved"]) == (None, True)
    assert "not resolved" in call("status", setup.directory).stdout


def test_a_lost_device_ends_the_run_and_the_contest_is_held_at_resume(tmp_path: Path) -> None:
    setup = setup_of(study_file(tmp_path), trials=12)
    with pytest.raises(DeviceLost):
        run_study(setup, ToyDevice(setup, fates={1: DeviceLost("gone")}))
    assert len(fold(read(setup.directory).records).contests) == 1
    loop = run_study(setup, resumed=True)
    (tmp_path / "whole").mkdir()
    whole = run_study(setup_of(study_file(tmp_path / "whole"), trials=12))
    assert meetings(loop.opened.records) == meetings(whole.opened.records)


@pytest.mark.parametrize("block", [1, 4, 9])
def test_killed_inside_a_contest_it_is_held_again(tmp_path: Path, block: int) -> None:
    setup = setup_of(study_file(tmp_path), trials=12)
    child = os.fork()
    if child == 0:
        left, real = [block], ToyDevice._block

        def dying(self, *given):  # type: ignore[no-untyped-def]
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(self, *given)

        ToyDevice._block = dying  # type: ignore[method-assign]
        run_study(setup)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    before = fold(read(setup.directory).records)
    assert len(before.judged) == 12
    loop = run_study(setup, resumed=True)
    (tmp_path / "whole").mkdir()
    whole = run_study(setup_of(study_file(tmp_path / "whole"), trials=12))
    assert meetings(loop.opened.records) == meetings(whole.opened.records)
    assert all(title.published for title in titles(loop.history) if title.champion != BASELINE)


def test_a_study_with_more_trials_keeps_its_champions_and_crowns_anew(tmp_path: Path) -> None:
    # The whole of the running time: how long forty candidates take here must not decide.
    share = ("[mutation]", "[promotion]\nshare = 1.0\nconfirmation_blocks = 8\n\n[mutation]")
    setup = setup_of(study_file(tmp_path, share), trials=12)
    first = run_study(setup).history
    loop = run_study(setup_of(study_file(tmp_path, share), trials=40), resumed=True)
    assert loop.history.contests[: len(first.contests)] == first.contests
    assert len(loop.history.contests) > len(first.contests)
    levels = [c.level for c in loop.history.contests]
    outcomes = [c.promoted for c in loop.history.contests]
    assert levels == [level(0.05, outcomes[:k]) for k in range(len(outcomes))]
    assert meetings(replay(setup.directory)) == meetings(loop.opened.records)


def older(record: Record) -> dict[str, Any]:
    """As a version without promotions and races wrote it."""
    data = to_json(record)
    data.pop("saved_s", None)
    if isinstance(record, StudyBegun):
        data["config"].pop("promotion")
        data["config"]["timing"].pop("race_error")
    return data


def test_a_journal_from_before_promotions_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = setup_of(study_file(tmp_path), trials=8)
    run_study(setup)
    records = [r for r in read(setup.directory).records if not isinstance(r, Contest | Confirmation)]
    (setup.directory / FILE).unlink()
    with monkeypatch.context() as patched:
        patched.setattr(journal, "to_json", older)
        old = Journal(setup.directory)
        for record in records:
            old.append(record)
        old.close()
    assert "promotion" not in (setup.directory / FILE).read_text()
    assert fold(read(setup.directory).records).contests == ()
    loop = run_study(setup_of(study_file(tmp_path), trials=12), resumed=True)
    assert len(loop.history.judged) == 12
    assert loop.history.contests


def test_promotions_take_a_share_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOY_DELAY_S", "0.02")
    setup = setup_of(study_file(tmp_path), time_limit_s=1.5)
    state = run_study(setup).history
    assert spent(state) < 0.5
    assert state.contests
