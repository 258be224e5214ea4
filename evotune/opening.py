"""A study directory taken in hand: begun, or taken up again after an orderly end, a crash or a kill."""

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import optuna
from optuna.exceptions import StorageInternalError
from optuna.storages import BaseStorage
from sqlalchemy.exc import SQLAlchemyError

from evotune import notes
from evotune.config import changes, parse
from evotune.errors import StudyError
from evotune.history import History, fold
from evotune.journal import FILE, Journal, Lock, read, writing
from evotune.records import Asked, BranchAdded, Judged, Record, SessionBegun, StudyBegun
from evotune.search_space.branch import SEED_BRANCH
from evotune.setup import Setup, from_header
from evotune.trials import JOURNAL_FILE, TrialBook, discard, mend, quiet, reason, storage_at
from evotune.versions import installed

_VERSIONED = ("numpy", "optuna", "nvidia-cutlass-dsl")


@dataclass(frozen=True)
class Opened:
    """A study directory in our hands: locked, its journal open, its storage checked."""

    setup: Setup
    lock: Lock
    journal: Journal
    records: list[Record]
    book: TrialBook
    notes: tuple[str, ...] = ()

    def append(self, record: Record) -> None:
        self.journal.append(record)
        self.records.append(record)

    def close(self) -> None:
        self.journal.close()
        self.lock.release()


def begin(setup: Setup) -> Opened:
    """Make the study directory and its first records. Raises StudyError; then, and when it is interrupted,
    nothing that keeps the same command from beginning it again is left behind."""
    directory, name = setup.directory, setup.config.study.name
    quiet()
    with writing(directory), _answering(), ExitStack() as undo:
        directory.parent.mkdir(parents=True, exist_ok=True)
        # Only who made the directory may remove it: another process may make it at the same time.
        with suppress(FileExistsError):
            directory.mkdir()
            undo.callback(shutil.rmtree, directory, ignore_errors=True)
        lock = Lock(directory)
        undo.callback(lock.release)
        if (directory / FILE).exists() and _began(read(directory).records):
            raise StudyError(
                f"{directory} already holds a study; `python -m evotune resume {directory}` continues it, "
                "or give another --directory"
            )
        storage = _storage(setup, directory)
        if not setup.storage_url:
            discard(storage, name)  # begun by a process that was killed; a dry run's record stays
        journal = Journal(directory)
        undo.callback((directory / FILE).unlink, missing_ok=True)
        undo.callback(journal.close)
        records = first_records(setup)
        for record in records:
            journal.append(record)
        book = _create(setup, storage, directory)
        undo.callback(_forget, storage, name)
        opened = _session(Opened(setup, lock, journal, records, book))
        undo.pop_all()
    return opened


def resume(directory: Path, setup: Setup | None = None) -> Opened:
    """Take a study up again, after an orderly end or a crash.

    `setup` is what the study file says now; None for what it said then. Raises StudyError when there is no
    study, another process has it, or the study file or the storage changed.
    """
    quiet()
    reading = read(directory)
    if not _began(reading.records):
        raise StudyError(f"the study in {directory} never began; `python -m evotune run` begins it")
    history = fold(reading.records)
    if setup is None:
        setup = from_header(history.begun.config, history.begun.base, directory)
    # Parsed, so that a key which a later version added has its default on both sides.
    then = parse(history.begun.config, str(directory))
    changed = changes(then.as_json(), setup.config.as_json())
    if changed:
        raise StudyError(
            f"the study file changed since the study began: {'; '.join(changed)}; only trials, time_limit_s, "
            "directory, max_cost_usd and cache_mib may change. Undo it, or begin again in another directory"
        )
    with writing(directory), _answering(), ExitStack() as undo:
        lock = Lock(directory)
        undo.callback(lock.release)
        reading = read(directory)
        asked = [record for record in reading.records if isinstance(record, Asked)]
        if asked and not setup.storage_url and not (directory / JOURNAL_FILE).exists():
            raise StudyError(f"{directory / JOURNAL_FILE} is gone; restore it, or begin again elsewhere")
        book = _book(setup, _storage(setup, directory), directory, bool(asked))
        notes_ = (reading.note,) if reading.note else ()
        journal = Journal(directory, reading)
        undo.callback(journal.close)
        opened = Opened(setup, lock, journal, list(reading.records), book, notes_)
        _reconcile(opened, asked)
        _session(opened)
        undo.pop_all()
    return opened


def first_records(setup: Setup) -> list[Record]:
    """How every journal begins: the study and its seed branch."""
    return [
        StudyBegun(setup.config.as_json(), str(setup.base.resolve()), setup.columns, installed(_VERSIONED)),
        BranchAdded(-1, SEED_BRANCH, setup.template.source, None, "seed", "the template as shipped"),
    ]


Furnish = Callable[[Setup, History, Asked, Judged], tuple[str, Mapping[str, str]]]


def furnish(setup: Setup, history: History, asked: Asked, judged: Judged) -> tuple[str, Mapping[str, str]]:
    """Note and files of a trial."""
    knobs = setup.space.decode(asked.knobs)
    branch = history.added(asked.branch).branch
    spec = setup.specializations[0]
    files = notes.source_file(setup.template, branch, asked, spec, knobs) | notes.log_file(judged.outcome)
    return notes.note(history, asked, judged), files


def _began(records: Sequence[Record]) -> bool:
    """Whether all of `first_records` were written before a process died."""
    return any(isinstance(record, BranchAdded) for record in records)


def _storage(setup: Setup, directory: Path) -> BaseStorage:
    if not setup.storage_url:
        mend(directory)
    return storage_at(directory, setup.storage_url)


def _book(setup: Setup, storage: BaseStorage, directory: Path, asked: bool) -> TrialBook:
    """The Optuna study again; made now if the run died before its first ask."""
    name = setup.config.study.name
    try:
        return TrialBook.load(storage, name, setup.space, setup.columns, directory)
    except StudyError:
        if asked:
            raise
    if not setup.storage_url:
        discard(storage, name)  # made in part by a process that was killed
    return _create(setup, storage, directory)


def _create(setup: Setup, storage: BaseStorage, directory: Path) -> TrialBook:
    """The Optuna study, or nothing of it: a database keeps what a half-done beginning leaves in it."""
    name = setup.config.study.name
    known = name in optuna.get_all_study_names(storage)
    try:
        return TrialBook.create(storage, name, setup.space, setup.columns, directory)
    except StudyError:
        raise  # it is somebody else's
    except BaseException:
        if not known:
            _forget(storage, name)
        raise


def _forget(storage: BaseStorage, name: str) -> None:
    """Delete a study, unless the storage fails: what brought us here is to be told, not that."""
    with suppress(SQLAlchemyError, StorageInternalError, OSError):
        discard(storage, name)


@contextmanager
def _answering() -> Iterator[None]:
    """Trouble with a database becomes a StudyError."""
    try:
        yield
    except (SQLAlchemyError, StorageInternalError) as error:
        raise StudyError(f"[study] storage failed: {reason(error)}") from error


def _reconcile(opened: Opened, asked: Sequence[Asked]) -> None:
    """Tell Optuna what it missed."""
    judged = [record for record in opened.records if isinstance(record, Judged)]
    untold = opened.book.reconcile(asked, judged)
    by_trial = {ask.trial: ask for ask in asked}
    history = fold(opened.records)
    for result in untold:
        ask = by_trial[result.trial]
        opened.book.finish(ask, result, *furnish(opened.setup, history, ask, result))
    if history.contests:
        opened.book.publish(notes.championship(history))


def _session(opened: Opened) -> Opened:
    opened.append(SessionBegun(datetime.now().astimezone().isoformat(timespec="seconds"), os.getpid()))
    return opened
