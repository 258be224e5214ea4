"""python -m evotune: the commands. Each is thin; what it does lies in a module that is imported when it runs.

Exit codes: 0 done, 2 a mistake in what was given (one line on stderr says which), 1 other trouble, 128 + n
ended by signal n (the study can be resumed).
"""

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from evotune.errors import DeviceError, EvotuneError, StudyError

if TYPE_CHECKING:
    from evotune.history import History
    from evotune.live import LiveLine
    from evotune.setup import Setup
    from evotune.study import Opened, Stop

app = typer.Typer(
    help="Automatic design of kernels that can be trusted.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

StudyFile = Annotated[Path, typer.Argument(metavar="STUDY.TOML", help="The study file.")]
StudyPath = Annotated[
    Path | None,
    typer.Argument(metavar="[STUDY]", help="Study directory or study file; by default the latest one here."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON to stdout.")]
Trials = Annotated[int | None, typer.Option(min=1, help="Candidates in all, instead of the file's.")]
TimeLimit = Annotated[
    float | None, typer.Option("--time-limit", min=0, help="Seconds in all, instead of the file's.")
]
Directory = Annotated[Path | None, typer.Option(help="Where the study lies, instead of the file's.")]
Unsafe = Annotated[
    bool, typer.Option("--unsafe-no-sandbox", help="Judge without a sandbox where none can be raised.")
]


@app.command()
def run(
    study: StudyFile,
    directory: Directory = None,
    trials: Trials = None,
    time_limit: TimeLimit = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Sample, build and inspect; no device needed.")
    ] = False,
    as_json: AsJson = False,
    unsafe: Unsafe = False,
) -> None:
    """Begin a study and run it to its end."""
    from evotune.study import begin

    setup = _setup(study, directory, trials, time_limit, unsafe)
    if dry_run:
        from evotune.dryrun import command

        command(setup, as_json=as_json)
        return
    _run(setup, lambda: begin(setup), as_json)


@app.command()
def resume(
    study: StudyPath = None,
    trials: Trials = None,
    time_limit: TimeLimit = None,
    as_json: AsJson = False,
    unsafe: Unsafe = False,
) -> None:
    """Continue a study that was interrupted, or give it more trials or time."""
    from evotune import study as loop
    from evotune.setup import from_header

    directory = _directory(study)
    if study is not None and study.is_file():
        setup = replace(_setup(study, directory, trials, time_limit, unsafe), directory=directory)
    else:
        begun = _history(directory).begun
        tables = dict(begun.config)
        changed = {"trials": trials, "time_limit_s": time_limit}
        tables["study"] = tables["study"] | {
            key: value for key, value in changed.items() if value is not None
        }
        setup = replace(from_header(tables, begun.base, directory), unsafe=unsafe)
    _run(setup, lambda: loop.resume(directory, setup), as_json)


@app.command()
def status(study: StudyPath = None, as_json: AsJson = False) -> None:
    """Branches, best per objective, front, failure classes, spend."""
    from evotune import report

    state = report.status(_history(_directory(study)))
    if as_json:
        print(json.dumps(state, indent=2))
    else:
        _console().print(report.status_view(state))


@app.command()
def show(
    number: Annotated[int, typer.Argument(metavar="N", help="Number of the candidate.")],
    study: StudyPath = None,
    layouts: Annotated[
        bool, typer.Option("--layouts", help="Print memory layouts and thread mapping.")
    ] = False,
    source: Annotated[bool, typer.Option("--source", help="Print the branch's source.")] = False,
    as_json: AsJson = False,
) -> None:
    """One candidate: knobs, verdict, times, difference to its parent."""
    from evotune import report

    directory = _directory(study)
    history = _history(directory)
    entry = report.find(history, number)
    if layouts:
        from evotune.setup import from_header

        setup = from_header(history.begun.config, history.begun.base, directory)
        knobs = setup.space.decode(entry.asked.knobs)
        told = {spec.label: setup.template.layouts(knobs, spec) for spec in setup.specializations}
        print(json.dumps(told, indent=2) if as_json else "\n\n".join(f"{k}\n{v}" for k, v in told.items()))
        return
    described = report.show(history, entry)
    if source and not as_json:
        print(described["source"], end="")
    elif as_json:
        print(json.dumps(described, indent=2))
    else:
        _console().print(report.show_view(described, history, entry))


def main() -> None:
    """The console script. One line for what went wrong, never a traceback for a mistake of the user's."""
    try:
        app()
    except StudyError as error:
        _fail(str(error), 2)
    except DeviceError as error:
        _fail(f"{error}; `run --dry-run` samples, builds and inspects without a device", 2)
    except EvotuneError as error:
        _fail(str(error), 1)
    except BrokenPipeError:
        # The reader went away. Give the interpreter's last flush somewhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)


def _fail(message: str, code: int) -> None:
    print(f"evotune: {message}", file=sys.stderr)
    sys.exit(code)


def _console() -> Any:
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=160)


def _setup(
    study: Path, directory: Path | None, trials: int | None, time_limit: float | None, unsafe: bool
) -> "Setup":
    from evotune.config import load
    from evotune.setup import resolve

    overrides = {
        "study.directory": str(directory.absolute()) if directory else None,
        "study.trials": trials,
        "study.time_limit_s": time_limit,
    }
    return replace(resolve(load(study, overrides), study.absolute().parent), unsafe=unsafe)


def _run(setup: "Setup", opening: Any, as_json: bool) -> None:
    """Open a study, run it, say how it ended."""
    from evotune import report
    from evotune.live import LiveLine
    from evotune.setup import evaluator, mutators
    from evotune.study import End, Stop, StudyRun

    judge = evaluator(setup)
    stop = Stop()
    try:
        operators = mutators(setup)
        opened: Opened = opening()
        try:
            with (
                LiveLine(setup.config.study.trials, setup.config.study.time_limit_s) as line,
                _signals(stop, line),
            ):
                for note in opened.notes:
                    line.say(note)
                loop = StudyRun(opened, judge, operators, observers=[line], stop=stop)
                end = loop.run()
        finally:
            opened.close()
    finally:
        judge.close()
    state = report.status(loop.history)
    if as_json:
        print(json.dumps(state | {"end": end.value, "directory": str(setup.directory)}, indent=2))
    else:
        _console().print(report.status_view(state))
        print(f"Ended because {end.value}. The study lies in {_shown(setup.directory)}")
    if end is End.STOPPED:
        print(f"Continue with: python -m evotune resume {_shown(setup.directory)}", file=sys.stderr)
        raise typer.Exit(128 + stop.signal)


@contextmanager
def _signals(stop: "Stop", line: "LiveLine") -> Iterator[None]:
    """The first SIGINT or SIGTERM asks the loop to stop after what is in flight; the second stops now."""

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.requested:
            raise KeyboardInterrupt
        stop.signal = number
        line.say("Finishing what is in flight; once more stops now.")

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except KeyboardInterrupt:
        raise SystemExit(128 + stop.signal) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _history(directory: Path) -> "History":
    from evotune.history import fold
    from evotune.journal import read

    return fold(read(directory).records)


def _directory(study: Path | None) -> Path:
    """The study directory that an argument means: itself, the one of a study file, or the latest one here."""
    if study is None:
        found = sorted(Path().glob("*.study")) + sorted(Path().glob("experiments/*.study"))
        if not found:
            raise StudyError("no *.study directory here or in experiments/; name the study")
        return max(found, key=lambda path: path.stat().st_mtime)
    if not study.is_file():
        if not study.is_dir():
            raise StudyError(f"there is no {study}")
        return study
    from evotune.config import load
    from evotune.setup import directory_of

    return directory_of(load(study), study.absolute().parent)


def _shown(directory: Path) -> str:
    """Relative where that is shorter."""
    here = os.path.relpath(directory)
    return here if len(here) < len(str(directory)) else str(directory)
