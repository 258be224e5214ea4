"""The study's Optuna side: trials are created, furnished with notes and artifacts, and told.

Optuna holds what the dashboard shows and the sampler reads; the journal holds what is true. A candidate that
fails is told PRUNED with the constraint "gate" (stages left to pass): samplers learn from it and it stays out
of every front. Trouble that is not the candidate's is told FAIL, which samplers forget.
"""

import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import optuna
from optuna.artifacts import FileSystemArtifactStore, get_all_artifact_meta, upload_artifact
from optuna.exceptions import DuplicatedStudyError, ExperimentalWarning, StorageInternalError
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState
from optuna_dashboard import save_note
from sqlalchemy.exc import SQLAlchemyError

from evotune.errors import StudyError
from evotune.fitness.objectives import Column
from evotune.fitness.outcome import Failed, Passed, Stage
from evotune.history import primary, value_of
from evotune.records import Asked, Judged, Knobs, verdict
from evotune.search_space.sampler import SAMPLERS, Focus, parameters
from evotune.search_space.space import Space

JOURNAL_FILE = "optuna.journal"
ARTIFACTS = "artifacts"
_FINISHED = (TrialState.COMPLETE, TrialState.PRUNED)


def storage_at(directory: Path, url: str) -> BaseStorage:
    """The study's storage: a journal file in its directory, or a database. Raises StudyError."""
    try:
        if url:
            return RDBStorage(url)
        return JournalStorage(JournalFileBackend(str(directory / JOURNAL_FILE)))
    except (SQLAlchemyError, StorageInternalError, ImportError) as error:
        raise StudyError(f"[study] storage cannot be opened: {reason(error)}") from error


def reason(error: Exception) -> str:
    """The first line of what a storage says; its kind where it says nothing."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def mend(directory: Path) -> None:
    """Undo what a process killed inside a write leaves in Optuna's journal file: half a line, a stale lock.

    Optuna itself refuses a file with half a line once more is written, and waits 30 s for such a lock. Only
    for a caller that holds the study's `Lock`.
    """
    path = directory / JOURNAL_FILE
    if path.exists():
        whole = path.read_bytes().rfind(b"\n") + 1
        with path.open("r+b") as file:
            file.truncate(whole)
    for stale in directory.glob(f"{JOURNAL_FILE}.lock*"):
        stale.unlink(missing_ok=True)


def discard(storage: BaseStorage, name: str) -> None:
    """Delete a study that a killed process began and nothing depends on, where there is one."""
    if name in optuna.get_all_study_names(storage):
        optuna.delete_study(study_name=name, storage=storage)


class TrialBook:
    """One Optuna study: its trials by number.

    The sampler's proposals depend on (seed, candidate index, told trials), see `search_space.sampler`.
    """

    def __init__(self, study: optuna.Study, space: Space, columns: Sequence[Column], directory: Path) -> None:
        self.study = study
        self._space = space
        self._columns = columns
        self._store = FileSystemArtifactStore(str(directory / ARTIFACTS))

    @classmethod
    def create(
        cls, storage: BaseStorage, name: str, space: Space, columns: Sequence[Column], directory: Path
    ) -> "TrialBook":
        """A new study. Raises StudyError when the storage has one of that name."""
        try:
            study = optuna.create_study(
                storage=storage,
                study_name=name,
                directions=["maximize" if column.maximize else "minimize" for column in columns],
            )
        except DuplicatedStudyError as error:
            raise StudyError(f"the storage already has a study named {name}; choose another name") from error
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            study.set_metric_names([column.name for column in columns])
        (directory / ARTIFACTS).mkdir(exist_ok=True)
        return cls(study, space, columns, directory)

    @classmethod
    def load(
        cls, storage: BaseStorage, name: str, space: Space, columns: Sequence[Column], directory: Path
    ) -> "TrialBook":
        """The study again. Raises StudyError when it is gone or has other directions."""
        try:
            study = optuna.load_study(storage=storage, study_name=name)
        except KeyError as error:
            raise StudyError(_changed(f"it has no study named {name}")) from error
        if study.metric_names != [column.name for column in columns]:
            raise StudyError(_changed(f"its objectives are {study.metric_names}"))
        (directory / ARTIFACTS).mkdir(exist_ok=True)
        return cls(study, space, columns, directory)

    def use_sampler(self, name: str, seed: int) -> None:
        """Choose the sampler of later asks."""
        self._sampler = SAMPLERS[name](self._space, seed, primary(self._columns))
        self.study.sampler = self._sampler

    def ask(self, focus: Focus) -> tuple[int, Knobs]:
        """A new trial: its number and its knobs."""
        self._sampler.focus(focus)
        trial = self.study.ask(parameters(self._space, focus.branch))
        prefix = f"{focus.branch}."
        return trial.number, {key.removeprefix(prefix): value for key, value in trial.params.items()}

    def finish(self, asked: Asked, judged: Judged, note: str, files: Mapping[str, str]) -> None:
        """Attach the note and the files (text by name) and tell the outcome. Safe to repeat after a crash: a
        finished trial is left alone."""
        frozen = self.study.get_trials(deepcopy=False)[judged.trial]
        if frozen.state.is_finished():
            return
        trial = optuna.Trial(self.study, frozen._trial_id)
        outcome = judged.outcome
        trial.set_user_attr("branch", asked.branch)
        trial.set_user_attr("candidate", asked.index)
        trial.set_user_attr("verdict", verdict(outcome))
        if isinstance(outcome, Failed):
            trial.set_user_attr("stage", outcome.stage.value)
        if files and not get_all_artifact_meta(trial):
            self._upload(trial, files)
        if note:
            save_note(trial, note)
        if isinstance(outcome, Passed):
            _constrain(trial, frozen, 0.0)
            values = [value_of(outcome, column.name) for column in self._columns]
            self.study.tell(trial, values)
        elif isinstance(outcome, Failed):
            _constrain(trial, frozen, float(Stage(outcome.stage).left_to_pass))
            self.study.tell(trial, state=TrialState.PRUNED)
        else:
            self.study.tell(trial, state=TrialState.FAIL)

    def publish(self, note: str) -> None:
        """The study's own note, in place of the one before: finished trials are immutable, a study is not."""
        save_note(self.study, note)

    def reconcile(self, asked: Sequence[Asked], judged: Sequence[Judged]) -> list[Judged]:
        """Compare with the journal after an interruption; tell FAIL to RUNNING trials without a result.

        Returns the results that Optuna was not told yet. Raises StudyError when the storage holds something
        else than the journal.
        """
        trials = self.study.get_trials(deepcopy=False)
        for ask in asked:
            self._compare(trials, ask)
        known = {result.trial: result for result in judged}
        untold = []
        for trial in trials:
            if trial.state in _FINISHED and trial.number not in known:
                raise StudyError(_changed(f"its trial {trial.number} was finished by somebody else"))
            if trial.state.is_finished():
                continue
            if trial.number in known:
                untold.append(known[trial.number])
            else:
                self.study.tell(trial.number, state=TrialState.FAIL)
        return untold

    def _compare(self, trials: Sequence[FrozenTrial], ask: Asked) -> None:
        if ask.trial >= len(trials):
            raise StudyError(_changed(f"trial {ask.trial} is missing"))
        expected = {f"{ask.branch}.{name}": value for name, value in ask.knobs.items()}
        if trials[ask.trial].params != expected:
            raise StudyError(_changed(f"trial {ask.trial} has other parameters"))

    def _upload(self, trial: optuna.Trial, files: Mapping[str, str]) -> None:
        with tempfile.TemporaryDirectory(prefix="evotune-") as folder:
            for name, text in files.items():
                path = Path(folder) / name
                path.write_text(text, encoding="utf-8")
                upload_artifact(artifact_store=self._store, file_path=str(path), study_or_trial=trial)


def _constrain(trial: optuna.Trial, frozen: FrozenTrial, left_to_pass: float) -> None:
    """0 for a candidate that passed. First write wins in Optuna, so a repeat after a crash is left out."""
    if "gate" not in frozen.constraints:
        trial.set_constraint("gate", left_to_pass)


def _changed(what: str) -> str:
    return (
        f"the storage changed since the study began: {what}; restore it, or begin again in another directory"
    )


def quiet() -> None:
    """No chatter from Optuna; our own live line tells more."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
