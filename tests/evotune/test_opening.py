"""A study directory taken in hand: what fails half-way leaves nothing behind, and nothing open."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.exceptions import StorageInternalError

from evotune import opening
from evotune.errors import StudyError
from evotune.journal import FILE, Lock
from evotune.opening import begin, resume
from evotune.records import SessionBegun
from evotune.setup import Setup
from evotune.trials import JOURNAL_FILE, TrialBook
from tests.evotune.toy import found, run_study, setup_of, study_file

Fail = Callable[..., Any]


def raising(error: BaseException, after: Fail | None = None) -> Fail:
    def fail(*args: Any, **kwargs: Any) -> Any:
        if after is not None:
            after(*args, **kwargs)
        raise error

    return fail


def open_in(directory: Path) -> list[str]:
    """What this process holds open there."""
    own = Path("/proc/self/fd")
    targets = [os.readlink(own / name) for name in os.listdir(own) if (own / name).is_symlink()]
    return [target for target in targets if target.startswith(f"{directory}/")]


@pytest.fixture(params=["journal", "database"])
def setup(request: pytest.FixtureRequest, tmp_path: Path) -> Setup:
    url = f"sqlite:///{tmp_path / 'all.db'}" if request.param == "database" else ""
    return setup_of(study_file(tmp_path), trials=2, storage=url)


FAILURES = {
    "interrupted": (KeyboardInterrupt(), KeyboardInterrupt, None),
    "storage": (StorageInternalError("the database\nwent away"), StudyError, "storage failed: the database$"),
    "disk": (OSError(errno.ENOSPC, "No space left on device"), StudyError, "No space left"),
}


@pytest.mark.parametrize("place", ["before", "inside", "after", "session"])
@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("existed", [False, True], ids=["new", "existing"])
def test_a_beginning_that_fails_can_be_made_again(
    setup: Setup, place: str, failure: str, existed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    error, told, message = FAILURES[failure]
    directory = setup.directory
    if existed:
        directory.mkdir()
        (directory / "mine.txt").write_text("of the user")
    with monkeypatch.context() as patched:
        match place:
            case "before":
                patched.setattr(optuna, "create_study", raising(error))
            case "inside":
                patched.setattr(optuna, "create_study", raising(error, optuna.create_study))
            case "after":
                patched.setattr(optuna.Study, "set_metric_names", raising(error))
            case "session":
                patched.setattr(opening, "_session", raising(error))
        with pytest.raises(told, match=message):
            begin(setup)
    assert open_in(directory) == []
    assert directory.exists() == existed
    if existed:
        assert not (directory / FILE).exists()
        assert (directory / "mine.txt").read_text() == "of the user"
    assert len(found(run_study(setup).opened.records)) == 2


def test_somebody_elses_study_in_the_database_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"sqlite:///{tmp_path / 'all.db'}"
    setup = setup_of(study_file(tmp_path), trials=2, storage=url)
    theirs = optuna.create_study(storage=url, study_name="toy")
    theirs.tell(theirs.ask(), 1.0)
    with pytest.raises(StudyError, match="already has a study named toy"):
        begin(setup)
    monkeypatch.setattr(optuna, "create_study", raising(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        begin(setup)
    assert len(optuna.load_study(storage=url, study_name="toy").trials) == 1


def test_a_directory_that_another_process_made_meanwhile_is_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = setup_of(study_file(tmp_path), trials=2)
    make, held = Path.mkdir, []

    def made_by_both(path: Path, *args: Any, **kwargs: Any) -> None:
        if path == setup.directory and not held:
            make(path)
            held.append(Lock(path))
        make(path, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", made_by_both)
    with pytest.raises(StudyError, match="is in use by process"):
        begin(setup)
    assert (setup.directory / "lock").exists()
    held[0].release()


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("place", ["load", "reconcile", "append"])
def test_a_resumption_that_fails_can_be_made_again(
    setup: Setup, failure: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    error, told, message = FAILURES[failure]
    run_study(setup)
    before = (setup.directory / FILE).read_bytes()
    with monkeypatch.context() as patched:
        if place == "append":
            patched.setattr(opening, "_session", raising(error))
        else:
            patched.setattr(TrialBook, place, raising(error))
        with pytest.raises(told, match=message):
            resume(setup.directory)
    assert open_in(setup.directory) == []
    assert (setup.directory / FILE).read_bytes() == before
    opened = resume(setup.directory)
    opened.close()
    assert isinstance(opened.records[-1], SessionBegun)


def test_killed_while_the_optuna_study_is_made_it_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill unwinds nothing: the journal and half an Optuna study stay."""
    setup = setup_of(study_file(tmp_path), trials=2)
    begin(setup).close()
    (setup.directory / JOURNAL_FILE).unlink()
    storage = opening.storage_at(setup.directory, "")
    optuna.create_study(storage=storage, study_name="toy", directions=["maximize"] * 5)
    assert len(found(run_study(setup, resumed=True).opened.records)) == 2
