"""A study directory taken in hand: begun, or taken up again after an orderly end, a crash or a kill."""

import importlib.metadata
import os
import platform
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from optuna.storages import BaseStorage

from evotune import __version__, notes
from evotune.config import changes, parse
from evotune.errors import StudyError
from evotune.history import History, fold
from evotune.journal import FILE, Journal, Lock, read, writing
from evotune.records import Asked, BranchAdded, Judged, Record, SessionBegun, StudyBegun
from evotune.search_space.branch import SEED_BRANCH
from evotune.setup import Setup, from_header
from evotune.trials import JOURNAL_FILE, TrialBook, discard, mend, quiet, storage_at

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
    """Make the study directory and its first records. Raises StudyError; then nothing new is left behind."""
    directory = setup.directory
    quiet()
    with writing(directory), _new_directory(directory), _locked(directory) as lock:
        if (directory / FILE).exists() and _began(read(directory).records):
            raise StudyError(
                f"{directory} already holds a study; `python -m evotune resume {directory}` continues it, "
                "or give another --directory"
            )
        if not setup.storage_url:
            mend(directory)
        storage = storage_at(directory, setup.storage_url)
        name = setup.config.study.name
        if not setup.storage_url:
            discard(storage, name)  # begun by a process that was killed; a dry run's record stays
        journal = Journal(directory)
        records = first_records(setup)
        try:
            for record in records:
                journal.append(record)
            book = TrialBook.create(storage, name, setup.space, setup.columns, directory)
        except StudyError:
            (directory / FILE).unlink()
            raise
    return _session(Opened(setup, lock, journal, records, book))


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
    with writing(directory), _locked(directory) as lock:
        reading = read(directory)
        asked = [record for record in reading.records if isinstance(record, Asked)]
        if not setup.storage_url:
            if asked and not (directory / JOURNAL_FILE).exists():
                raise StudyError(f"{directory / JOURNAL_FILE} is gone; restore it, or begin again elsewhere")
            mend(directory)
        book = _book(setup, storage_at(directory, setup.storage_url), directory, bool(asked))
        notes_ = (reading.note,) if reading.note else ()
        opened = Opened(setup, lock, Journal(directory, reading), list(reading.records), book, notes_)
        _reconcile(opened, asked)
    return _session(opened)


def first_records(setup: Setup) -> list[Record]:
    """How every journal begins: the study and its seed branch."""
    versions = {"evotune": __version__, "python": platform.python_version()}
    for name in _VERSIONED:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return [
        StudyBegun(setup.config.as_json(), str(setup.base.resolve()), setup.columns, versions),
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


def _book(setup: Setup, storage: BaseStorage, directory: Path, begun: bool) -> TrialBook:
    """The Optuna study again; made now if the run died before its first ask."""
    name = setup.config.study.name
    try:
        return TrialBook.load(storage, name, setup.space, setup.columns, directory)
    except StudyError:
        if begun:
            raise
    return TrialBook.create(storage, name, setup.space, setup.columns, directory)


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


@contextmanager
def _locked(directory: Path) -> Iterator[Lock]:
    """A lock that is kept when the body ends well and given back when it fails."""
    lock = Lock(directory)
    try:
        yield lock
    except BaseException:
        lock.release()
        raise


@contextmanager
def _new_directory(directory: Path) -> Iterator[None]:
    """Make the directory, and unmake it when it was not there before and the body fails."""
    existed = directory.exists()
    directory.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        if not existed:
            shutil.rmtree(directory, ignore_errors=True)
        raise
