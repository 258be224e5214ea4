"""The loop on a device without a device: order of records, outcomes, interruption, replay."""

import json
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.artifacts import get_all_artifact_meta
from optuna.trial import TrialState
from optuna_dashboard._note import get_note_from_system_attrs

import evotune
from evotune.config import StudyConfig
from evotune.errors import DeviceLost, SandboxError, StudyError
from evotune.fitness.outcome import Failed, Failure, Outcome, Retry, Stage
from evotune.history import Entry, History, fold
from evotune.journal import FILE, read
from evotune.mutators.mutator import Proposal, Request
from evotune.opening import begin, resume
from evotune.promotion import Turn, titles
from evotune.records import Asked, BranchAdded, Confirmation, Contest, Judged, Refusal
from evotune.replay import ReplayEvaluator, replay, run_in_memory
from evotune.report import status
from evotune.setup import Setup
from evotune.study import End, Stop, StudyRun
from evotune.trials import JOURNAL_FILE, storage_at
from tests.evotune.toy import (
    ToyDevice,
    ToyMutator,
    found,
    meetings,
    mutators,
    run_study,
    setup_of,
    study_file,
)

WRONG = Failed(Failure.WRONG, Stage.EDGES, "o, head 0", case="odd T", log="a line\n" * 3)


def optuna_study(directory: Path) -> optuna.Study:
    return optuna.load_study(study_name="toy", storage=storage_at(directory, ""))


AHEAD = ("[search]", "[search]\nahead = true")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> StudyRun:
    """An uninterrupted study of 40 candidates."""
    return run_study(setup_of(study_file(tmp_path_factory.mktemp("whole"))))


def test_a_study_runs_to_its_end_and_finds_something(whole: StudyRun) -> None:
    history = whole.history
    assert [entry.asked.index for entry in history.entries] == list(range(40))
    assert all(entry.judged for entry in history.entries)
    best = max(
        v.value for e in history.entries if e.passed for v in e.passed.values if v.name == "speedup:long"
    )
    assert best > 10
    keys = [(e.asked.branch, json.dumps(dict(e.asked.knobs))) for e in history.entries]
    assert len(set(keys)) == 40


def test_optuna_has_the_same_and_only_passed_trials_are_best(whole: StudyRun) -> None:
    study = optuna_study(whole.setup.directory)
    assert study.metric_names == ["speedup:long", "speedup:short", "error", "complexity", "host_call"]
    for entry in whole.history.entries:
        trial = study.trials[entry.asked.trial]
        assert trial.params == {f"{entry.asked.branch}.{k}": v for k, v in entry.asked.knobs.items()}
        if entry.passed:
            assert trial.state == TrialState.COMPLETE
            assert trial.values == [value.value for value in entry.passed.values]
            assert trial.constraints == {"gate": 0.0}
        else:
            assert entry.failed is not None
            assert trial.state == TrialState.PRUNED
            assert trial.constraints == {"gate": entry.failed.stage.left_to_pass}
    assert {t.number for t in study.best_trials} <= {e.asked.trial for e in whole.history.entries if e.passed}


def test_every_trial_has_its_note_and_its_source(whole: StudyRun) -> None:
    study = optuna_study(whole.setup.directory)
    attrs = study._storage.get_study_system_attrs(study._study_id)
    for entry in whole.history.entries:
        trial = study.trials[entry.asked.trial]
        note = get_note_from_system_attrs(attrs, trial._trial_id)["body"]
        assert f"Candidate {entry.asked.index}: " in note
        assert ("```diff" in note) == (entry.asked.branch != "b00")
        names = {meta.filename for meta in get_all_artifact_meta(trial, storage=study._storage)}
        log = {"build.log"} if entry.failed and entry.failed.log else set()
        assert names == {f"{entry.asked.branch}-{entry.asked.index:05}.c"} | log


def test_branches_enter_by_passing_and_are_repaired_once(whole: StudyRun) -> None:
    history = whole.history
    by_note = {branch.note: branch for branch in history.branches}
    broken = by_note["body: #error\nint speed = 3;"]
    assert not history.lives(broken.id)
    mended = next(branch for branch in history.branches if branch.repairs == broken.id)
    assert history.lives(mended.id)
    assert len(history.of(mended.id)) > 1
    wrong = by_note["body: int wrong; int speed = 9;"]
    assert not history.lives(wrong.id)
    assert len(history.of(wrong.id)) == 1
    assert sum(branch.cost_usd for branch in history.branches) == pytest.approx(
        0.01 * (len(history.branches) - 1)
    )


def test_a_replay_finds_the_same_candidates(whole: StudyRun) -> None:
    again = replay(whole.setup.directory)
    assert found(again) == found(whole.opened.records)
    assert meetings(again) == meetings(whole.opened.records) != []
    kinds = (BranchAdded, Refusal)
    assert [r for r in again if isinstance(r, kinds)] == [
        r for r in whole.opened.records if isinstance(r, kinds)
    ]


def test_a_replay_that_departs_says_so(whole: StudyRun, tmp_path: Path) -> None:
    setup = setup_of(study_file(tmp_path), trials=8)
    run_study(setup)
    records = read(setup.directory).records
    other = setup_of(study_file(tmp_path, ("seed = 7", "seed = 8")), trials=8)
    with pytest.raises(StudyError, match="the journal has no result for b00 with ToyKnobs"):
        run_in_memory(other, ReplayEvaluator.of(records, setup.space), mutators(setup))


class Recorder:
    """Looks at journal and storage at the moment a result arrives."""

    def __init__(self) -> None:
        self.entries: list[int] = []
        self.due: list[Turn] = []
        self.meetings: list[Contest | Confirmation] = []
        self.ended: End | None = None

    def judged(self, history: History, entry: Entry) -> None:
        self.entries.append(entry.asked.index)

    def meets(self, history: History, due: Turn) -> None:
        self.due.append(due)

    def met(self, history: History, record: Contest | Confirmation) -> None:
        self.meetings.append(record)

    def finished(self, run: StudyRun, end: End) -> None:
        self.ended = end


def test_a_result_is_recorded_before_optuna_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = setup_of(study_file(tmp_path), trials=6)
    opened = begin(setup)
    seen: list[bool] = []
    tell = optuna.Study.tell

    def spy(study: optuna.Study, trial: Any, *args: Any, **kwargs: Any) -> Any:
        last = read(setup.directory).records[-1]
        number = trial if isinstance(trial, int) else trial.number
        seen.append(isinstance(last, Judged) and last.trial == number)
        return tell(study, trial, *args, **kwargs)

    monkeypatch.setattr(optuna.Study, "tell", spy)
    device, watcher = ToyDevice(setup), Recorder()
    end = StudyRun(opened, device, mutators(setup), observers=[watcher]).run()
    device.close()
    opened.close()
    assert seen == [True] * 6
    assert (watcher.entries, watcher.ended, end) == (list(range(6)), End.TRIALS, End.TRIALS)
    assert len(watcher.due) == len(watcher.meetings) > 0


def test_candidates_race_against_the_best_known_when_they_were_asked_for(tmp_path: Path) -> None:
    setup = setup_of(study_file(tmp_path), trials=14)
    device = ToyDevice(setup)
    loop = run_study(setup, device)
    assert device.bars[0] == {}
    for entry, bars in zip(loop.history.entries[1:], device.bars[1:], strict=True):
        before = fold(loop.opened.records, before_step=entry.asked.step)
        for workload, bar in bars.items():
            known = [m for e in before.judged if e.passed for m in e.passed.measurements]
            assert bar == max(m.speedup for m in known if m.workload == workload)
        assert bars.keys() == {"long", "short"}
    assert [e.judged.saved_s for e in loop.history.judged if e.judged] == [0.25] * 14
    assert status(loop.history, 0.0)["seconds"]["saved_by_races"] == 14 * 0.25


def test_beside_the_default_candidates_race_against_its_speed(tmp_path: Path) -> None:
    setup = setup_of(study_file(tmp_path, AHEAD), trials=14)
    device = ToyDevice(setup)
    loop = run_study(setup, device)
    beside = [bars for e, bars in zip(loop.history.entries, device.bars, strict=True) if e.asked.step == 1]
    assert device.bars[0] == {}
    assert beside == [{"long": 1.0, "short": 1.0}] * len(beside) != []


def test_trouble_that_is_not_the_candidates_is_tried_again(tmp_path: Path) -> None:
    setup = setup_of(study_file(tmp_path), trials=12)
    loop = run_study(setup, ToyDevice(setup, {2: Retry("the disk was full"), 6: Retry("again")}))
    history = loop.history
    assert all(entry.judged for entry in history.entries)
    assert len(history.entries) == 12
    assert sum(history.retries.values()) == 2
    states = [trial.state for trial in optuna_study(setup.directory).trials]
    assert states.count(TrialState.FAIL) == 2
    assert len(states) == 14
    purposes = [r.purpose for r in loop.opened.records if isinstance(r, Asked)]
    assert purposes.count("retry") == 2
    assert found(replay(setup.directory)) == found(loop.opened.records)


def test_trouble_that_stays_ends_the_run(tmp_path: Path) -> None:
    setup = setup_of(study_file(tmp_path))
    troubles: Mapping[int, Outcome] = {n: Retry("no namespaces") for n in range(1, 200)}
    with pytest.raises(SandboxError, match=r"met trouble 3 times .*no namespaces.*evotune doctor"):
        run_study(setup, ToyDevice(setup, troubles))


def test_a_lost_device_ends_the_run_and_nothing_is_charged(tmp_path: Path) -> None:
    setup = setup_of(study_file(tmp_path), trials=16)
    with pytest.raises(DeviceLost, match="gone"):
        run_study(setup, ToyDevice(setup, {n: DeviceLost("gone") for n in range(6, 99)}))
    loop = run_study(setup, resumed=True)
    assert len(loop.history.entries) == 16
    assert all(entry.judged and not isinstance(entry.judged.outcome, Retry) for entry in loop.history.entries)


@pytest.mark.parametrize("trouble", [StudyError, SandboxError, DeviceLost])
def test_what_ends_the_run_leaves_the_rest_of_its_step_recorded_and_told(
    tmp_path: Path, trouble: type[Exception]
) -> None:
    """The third candidate of the second step: four of them were asked for, and three have a result."""
    setup = setup_of(study_file(tmp_path), trials=9)
    with pytest.raises(trouble, match="the default kernel fails"):
        run_study(setup, ToyDevice(setup, {3: trouble("the default kernel fails")}))
    history = fold(read(setup.directory).records)
    assert [entry.asked.index for entry in history.entries if entry.judged is None] == [3]
    assert len(history.judged) == 4
    states = [trial.state for trial in optuna_study(setup.directory).trials]
    assert TrialState.RUNNING not in states
    assert states.count(TrialState.FAIL) == 1
    assert len(run_study(setup, resumed=True).history.judged) == 9


class Stray:
    """Crosses a branch with one that nobody knows."""

    name = "stray"

    def propose(self, request: Request) -> Proposal:
        return replace(ToyMutator().propose(request), other_parent="b77")

    def repair(self, request: Request, proposal: Proposal, failed: Failed) -> None:
        return None


def test_a_second_parent_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    setup = setup_of(study_file(tmp_path), trials=14)
    opened, device = begin(setup), ToyDevice(setup)
    loop = StudyRun(opened, device, dict.fromkeys(setup.config.mutation.operators, Stray()))
    loop.run()
    device.close()
    opened.close()
    assert [branch.id for branch in loop.history.branches] == ["b00"]
    assert {refusal.problem for refusal in loop.history.refusals} == {"unknown_parent"}
    assert "parent b77 is unknown" in loop.history.refusals[0].detail


def test_a_journal_that_names_an_unknown_branch_is_an_error_that_says_so(whole: StudyRun) -> None:
    history = whole.history
    stray = replace(history.branches[1], other_parent="b77")
    with pytest.raises(StudyError, match="names a branch b77 that was never added"):
        replace(history, branches=(history.branches[0], stray)).relatives(stray.id)


@pytest.mark.parametrize("more", [(), (AHEAD,)], ids=["", "asked ahead"])
def test_a_broken_baseline_ends_the_study_in_one_line(
    tmp_path: Path, more: tuple[tuple[str, str], ...]
) -> None:
    setup = setup_of(study_file(tmp_path, ("toy:TEMPLATE", "toy:BROKEN_TEMPLATE"), *more))
    message = r"the default of template toy does not pass.*wrong at edges, odd T"
    with pytest.raises(StudyError, match=message):
        run_study(setup)
    with pytest.raises(StudyError, match=message):
        run_study(setup, resumed=True)


@pytest.mark.parametrize(("more", "times"), [((), 2), ((AHEAD,), 1)], ids=["", "asked ahead"])
def test_a_default_that_is_slower_than_itself_is_the_machines_trouble(
    tmp_path: Path, more: tuple[tuple[str, str], ...], times: int
) -> None:
    setup = setup_of(study_file(tmp_path, *more), trials=6)
    noise = Failed(Failure.FORGED, Stage.TIME, "its clock leaves out 845 us of a call")
    loop = run_study(setup, ToyDevice(setup, dict.fromkeys(range(times), noise)))
    assert loop.history.retries == {0: times}
    assert all(entry.passed for entry in loop.history.entries)
    other = setup_of(study_file(tmp_path), directory="other.study")
    with pytest.raises(SandboxError, match="the default kernel cannot be timed against itself"):
        run_study(other, ToyDevice(other, dict.fromkeys(range(9), noise)))


def test_when_every_candidate_fails_the_study_still_ends(tmp_path: Path) -> None:
    setup = setup_of(study_file(tmp_path), trials=30)
    loop = run_study(setup, ToyDevice(setup, dict.fromkeys(range(1, 30), WRONG)))
    assert loop.history.failures() == {"wrong": 29}
    assert len(optuna_study(setup.directory).best_trials) == 1


def test_a_small_space_is_exhausted(tmp_path: Path) -> None:
    setup = setup_of(study_file(tmp_path, ("toy:TEMPLATE", "toy:SMALL_TEMPLATE")), trials=400)
    loop = run_study(setup)
    history = loop.history
    assert len(history.of("b00")) == 3 * 6
    assert len(history.entries) < 400


def test_the_time_limit_counts_all_sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOY_DELAY_S", "0.05")
    setup = setup_of(study_file(tmp_path), time_limit_s=0.5)
    first = run_study(setup)
    judged = len(first.history.entries)
    assert 2 <= judged < 40
    assert len(run_study(setup, resumed=True).history.entries) == judged
    assert first.history.elapsed_s >= 0.25  # promotions are reserved half of the limit at most


def test_stopping_finishes_the_step_and_resuming_changes_nothing(whole: StudyRun, tmp_path: Path) -> None:
    setup = setup_of(study_file(tmp_path))
    for after in (0.0, 0.1, 0.3):
        stop = Stop()
        threading.Timer(after, lambda stop=stop: setattr(stop, "signal", 2)).start()
        loop = run_study(setup, resumed=(setup.directory / FILE).exists(), stop=stop)
        assert all(entry.judged for entry in loop.history.entries)
        time.sleep(0.01)
    loop = run_study(setup, resumed=True)
    assert found(loop.opened.records) == found(whole.opened.records)


def cut_short(setup: Setup, lines: int) -> None:
    """Begin a study that dies once its journal has so many records."""
    opened = begin(setup)
    device = ToyDevice(setup)
    real = opened.journal.append

    class Cut(Exception):
        pass

    def cut(record: Any) -> None:
        if len(opened.records) == lines:
            raise Cut
        real(record)

    opened.journal.append = cut  # type: ignore[method-assign]
    with pytest.raises(Cut):
        StudyRun(opened, device, mutators(setup)).run()
    device.close()
    opened.close()


@pytest.mark.parametrize("lines", [4, 6, 9, 23, 40, 41, 42, 43, 57, 86, 88])
def test_a_journal_cut_anywhere_is_taken_up_exactly(whole: StudyRun, tmp_path: Path, lines: int) -> None:
    """Optuna saw more or less than the journal has; RUNNING trials are left behind."""
    setup = setup_of(study_file(tmp_path))
    cut_short(setup, lines)
    left_running = sum(t.state == TrialState.RUNNING for t in optuna_study(setup.directory).trials)
    loop = run_study(setup, resumed=True)
    assert found(loop.opened.records) == found(whole.opened.records)
    assert meetings(loop.opened.records) == meetings(whole.opened.records)
    after = optuna_study(setup.directory).trials
    assert not [trial for trial in after if trial.state == TrialState.RUNNING]
    assert sum(t.state != TrialState.FAIL for t in after) == 40
    assert sum(t.state == TrialState.FAIL for t in after) <= left_running


@pytest.fixture(scope="module")
def ahead(tmp_path_factory: pytest.TempPathFactory) -> StudyRun:
    """An uninterrupted study whose steps are asked for before the results of the step before."""
    return run_study(setup_of(study_file(tmp_path_factory.mktemp("ahead"), AHEAD)))


def test_a_step_asked_ahead_waits_for_no_result(ahead: StudyRun, whole: StudyRun) -> None:
    records = ahead.opened.records
    first_result = {r.step: i for i, r in reversed(list(enumerate(records))) if isinstance(r, Judged)}
    last_ask = {r.step: i for i, r in enumerate(records) if isinstance(r, Asked)}
    early = [step for step in first_result if last_ask.get(step + 1, len(records)) < first_result[step]]
    assert len(early) >= len(first_result) - 2  # not where the trials end
    assert 0 in early, "builds wait for the default kernel's verdict"
    assert len(ahead.history.judged) == len(whole.history.judged) == 40
    assert len(ahead.history.branches) > 1


def test_a_study_asked_ahead_replays(ahead: StudyRun) -> None:
    again = replay(ahead.setup.directory)
    assert found(again) == found(ahead.opened.records)
    assert meetings(again) == meetings(ahead.opened.records)


@pytest.mark.parametrize("lines", [8, 23, 40, 57, 74])
def test_a_journal_of_steps_asked_ahead_cut_anywhere_is_taken_up_exactly(
    ahead: StudyRun, tmp_path: Path, lines: int
) -> None:
    setup = setup_of(study_file(tmp_path, AHEAD))
    cut_short(setup, lines)
    loop = run_study(setup, resumed=True)
    assert found(loop.opened.records) == found(ahead.opened.records)


def test_stopping_a_study_asked_ahead_changes_nothing(ahead: StudyRun, tmp_path: Path) -> None:
    """What is asked for after it has no look at results that were not there in the study that went on."""
    setup = setup_of(study_file(tmp_path, AHEAD))
    for after in (0.1, 0.3, 0.5):
        stop = Stop()
        threading.Timer(after, lambda stop=stop: setattr(stop, "signal", 2)).start()
        loop = run_study(setup, resumed=(setup.directory / FILE).exists(), stop=stop)
        assert all(entry.judged for entry in loop.history.entries)
    loop = run_study(setup, resumed=True)
    assert found(loop.opened.records) == found(ahead.opened.records)
    assert found(replay(setup.directory)) == found(ahead.opened.records)


def test_a_result_without_its_tell_is_told_at_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = setup_of(study_file(tmp_path), trials=9)

    class Killed(BaseException):
        pass

    def die(*args: Any, **kwargs: Any) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr("evotune.trials.TrialBook.finish", die)
        with pytest.raises(Killed):
            run_study(setup)
    assert optuna_study(setup.directory).trials[0].state == TrialState.RUNNING
    resume(setup.directory, setup).close()
    study = optuna_study(setup.directory)
    assert study.trials[0].state == TrialState.COMPLETE
    assert study.trials[0].values[0] == 1.0
    assert len(run_study(setup, resumed=True).history.entries) == 9


def test_what_a_kill_leaves_in_optunas_file_is_mended(tmp_path: Path) -> None:
    setup = setup_of(study_file(tmp_path), trials=5)
    run_study(setup)
    path = setup.directory / JOURNAL_FILE
    with path.open("ab") as file:
        file.write(b'{"op_code":4,"wor')
    (setup.directory / f"{JOURNAL_FILE}.lock").symlink_to(path)
    start = time.monotonic()
    grown = setup_of(study_file(tmp_path), trials=9)
    assert len(run_study(grown, resumed=True).history.entries) == 9
    assert time.monotonic() - start < 20  # Optuna waits 30 s for a stale lock


def test_more_trials_continue_a_finished_study_and_still_replay(tmp_path: Path) -> None:
    setup = setup_of(study_file(tmp_path), trials=11)
    run_study(setup)
    grown = setup_of(study_file(tmp_path), trials=21)
    loop = run_study(grown, resumed=True)
    assert len(loop.history.entries) == 21
    assert found(replay(setup.directory)) == found(loop.opened.records)


def test_a_key_that_came_later_does_not_end_an_older_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its journal was begun without the key."""
    path = study_file(tmp_path)
    whole = StudyConfig.as_json

    def older(config: StudyConfig) -> dict[str, Any]:
        tables = whole(config)
        return tables | {"build": {name: tables["build"][name] for name in ("workers", "limits")}}

    with monkeypatch.context() as patched:
        patched.setattr(StudyConfig, "as_json", older)
        run_study(setup_of(path, trials=8))
    loop = run_study(setup_of(path, trials=12), resumed=True)
    assert len(loop.history.judged) == 12


def test_a_changed_study_file_is_refused(tmp_path: Path) -> None:
    setup = setup_of(study_file(tmp_path), trials=5)
    run_study(setup)
    changed = setup_of(study_file(tmp_path, ("batch = 4", "batch = 8")))
    with pytest.raises(StudyError, match=r"changed since the study began: search\.batch 4 → 8; only trials"):
        resume(setup.directory, changed)
    resume(setup.directory, setup_of(study_file(tmp_path))).close()


def tamper_gone(directory: Path) -> None:
    (directory / JOURNAL_FILE).unlink()


def tamper_empty(directory: Path) -> None:
    (directory / JOURNAL_FILE).write_bytes(b"")


def tamper_shorter(directory: Path) -> None:
    path = directory / JOURNAL_FILE
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[: len(lines) // 3]))


def tamper_more(directory: Path) -> None:
    study = optuna_study(directory)
    study.add_trial(optuna.trial.create_trial(values=[1.0] * 5))


@pytest.mark.parametrize(
    ("tamper", "message"),
    [
        (tamper_gone, "optuna.journal is gone"),
        (tamper_empty, "the storage changed since the study began: it has no study named toy"),
        (tamper_shorter, r"the storage changed since the study began: trial \d (is missing|has other)"),
        (tamper_more, "its trial 5 was finished by somebody else"),
    ],
)
def test_a_changed_storage_is_refused(tmp_path: Path, tamper: Any, message: str) -> None:
    setup = setup_of(study_file(tmp_path), trials=5)
    run_study(setup)
    tamper(setup.directory)
    before = (setup.directory / FILE).read_bytes()
    for _ in range(2):  # the lock is given back
        with pytest.raises(StudyError, match=message):
            resume(setup.directory, setup)
    assert (setup.directory / FILE).read_bytes() == before


def test_a_study_is_not_begun_twice_and_a_bad_storage_leaves_nothing(tmp_path: Path) -> None:
    setup = setup_of(study_file(tmp_path), trials=1)
    run_study(setup)
    with pytest.raises(StudyError, match=r"already holds a study; `python -m evotune resume"):
        begin(setup)
    other = setup_of(study_file(tmp_path), directory="other.study", storage="nonsense://x")
    with pytest.raises(StudyError, match=r"storage cannot be opened"):
        begin(other)
    assert not other.directory.exists()


def test_a_database_serves_as_storage_and_keeps_names_apart(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'all.db'}"
    setup = setup_of(study_file(tmp_path), trials=3, storage=url)
    run_study(setup)
    grown = setup_of(study_file(tmp_path), trials=5, storage=url)
    loop = run_study(grown, resumed=True)
    assert len(optuna.load_study(study_name="toy", storage=url).trials) == 5
    assert len(loop.history.entries) == 5
    other = setup_of(study_file(tmp_path), trials=3, storage=url, directory="other.study")
    with pytest.raises(StudyError, match="already has a study named toy"):
        begin(other)
    assert not other.directory.exists()


def test_results_are_a_table(whole: StudyRun) -> None:
    frame = evotune.results(whole.setup.directory)
    assert len(frame) == 40
    assert frame.index.name == "candidate"
    passed = frame[frame["verdict"] == "passed"]
    assert passed["speedup:long"].notna().all()
    assert frame[frame["verdict"] != "passed"]["speedup:long"].isna().all()
    assert set(frame["knob:tile"]) <= {4, 8, 16, 32, 64}
    assert frame["front"].sum() >= 1
    champions = {title.group: title.champion for title in titles(whole.history)}
    assert all(group in frame.loc[index, "champion"] for group, index in champions.items())
    assert (frame["champion"] != "").sum() == len(set(champions.values()))
    assert frame.equals(evotune.results(str(whole.setup.directory / FILE)))
    assert (frame["time_us:long"] > 0).sum() == len(passed)


def test_results_of_a_study_without_results(tmp_path: Path) -> None:
    setup = setup_of(study_file(tmp_path))
    begin(setup).close()
    assert len(evotune.results(setup.directory)) == 0
    assert fold(read(setup.directory).records).entries == ()
