"""python -m evotune: the commands. Each is thin; what it does lies in a module that is imported when it runs.

Exit codes: 0 done, 2 a mistake in what was given (one line on stderr says which), 1 other trouble, 128 + n
ended by signal n (the study can be resumed).
"""

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from evotune.errors import DeviceError, DeviceLost, EvotuneError, SandboxError, StudyError

if TYPE_CHECKING:
    from evotune.history import History
    from evotune.live import LiveLine
    from evotune.opening import Opened
    from evotune.setup import Setup
    from evotune.study import Stop

# One BLAS thread, set before numpy loads: the oracle's products are small, and a second thread that spins
# beside the kernels being timed made the numpy form up to 100 times slower on a busy two-core machine.
for _variable in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")

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
Trials = Annotated[int | None, typer.Option(help="Candidates in all, instead of the file's.")]
TimeLimit = Annotated[
    float | None, typer.Option("--time-limit", help="Seconds in all, instead of the file's.")
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
    from evotune.opening import begin

    setup = _setup(study, directory, trials, time_limit, unsafe)
    _tell_walls(unsafe)
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
    from evotune import opening

    directory = _directory(study)
    if study is not None and study.is_file():
        setup = replace(_setup(study, directory, trials, time_limit, unsafe), directory=directory)
    else:
        setup = _recorded(directory, _history(directory), unsafe, trials=trials, time_limit_s=time_limit)
    _tell_walls(unsafe)
    _run(setup, lambda: opening.resume(directory, setup), as_json)


@app.command()
def status(study: StudyPath = None, as_json: AsJson = False) -> None:
    """Branches, best per objective, front, failure classes, spend."""
    from evotune import report

    directory = _directory(study)
    history = _history(directory)
    state = report.status(history, report.spent_usd(history, directory))
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
        setup = _recorded(directory, history)
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


@app.command()
def export(
    study: StudyPath = None,
    out: Annotated[Path, typer.Option(help="The directory to make.")] = Path("pareto"),
    limit: Annotated[int, typer.Option(min=0, help="Kernels of the front at most, best ranked first.")] = 12,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier export.")] = False,
    as_json: AsJson = False,
    unsafe: Unsafe = False,
) -> None:
    """Rebuild, judge and time the best kernels again, and write them as an importable directory."""
    from evotune.export import Job
    from evotune.export import export as make

    directory = _directory(study)
    history = _history(directory)
    setup = _recorded(directory, history, unsafe)
    _tell_walls(unsafe)
    done = make(Job(setup, history, out, limit=limit, force=force, say=_say))
    if as_json:
        print(json.dumps(done.as_json(), indent=2))
    else:
        print(f"{len(done.exported)} kernels are in {_shown(out)}, {len(done.left_out)} were left out")
    raise typer.Exit(0 if done.exported else 1)


@app.command()
def verify(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="An exported directory.")],
    rebuild: Annotated[bool, typer.Option("--rebuild", help="Build from source too, and compare.")] = False,
    as_json: AsJson = False,
    unsafe: Unsafe = False,
) -> None:
    """Judge an exported directory, by whomever made, with the full gate. Exit code 1 when a kernel fails, 3
    when none did and something could not be looked at, such as a kernel whose GPU is not here."""
    from evotune import verify as verification

    def tell(finding: verification.Finding) -> None:
        _say(finding.line)

    _tell_walls(unsafe)
    found = verification.verify(directory, rebuild=rebuild, unsafe=unsafe, say=tell)
    if as_json:
        print(json.dumps(found.as_json(), indent=2))
    else:
        print(f"{_shown(directory)} {found.verdict}")
    raise typer.Exit(1 if not found.held else 3 if found.undone else 0)


@app.command()
def diagnose(
    number: Annotated[int, typer.Argument(metavar="N", help="Number of the candidate.")],
    study: StudyPath = None,
    source: Annotated[
        Path | None, typer.Option(help="Judge this file, with the candidate's knobs, in place of its source.")
    ] = None,
    as_json: AsJson = False,
    unsafe: Unsafe = False,
) -> None:
    """Where a kernel goes wrong: rung, smallest workload, head, token, stage. Exit code 1 when it does."""
    from evotune import report
    from evotune.diagnose import candidate_of
    from evotune.diagnose import diagnose as look

    directory = _directory(study)
    history = _history(directory)
    setup = _recorded(directory, history, unsafe)
    _tell_walls(unsafe)
    found = look(setup, candidate_of(setup, history, report.find(history, number), source))
    print(json.dumps(found.as_json(), indent=2) if as_json else "\n".join(found.lines()))
    raise typer.Exit(0 if found.failed is None else 1)


@app.command()
def init(
    directory: Annotated[Path, typer.Argument(metavar="[DIR]", help="Where the file goes.")] = Path(),
) -> None:
    """Write a commented study file that runs as it is."""
    from evotune.init import init as write

    path = write(directory)
    print(f"Run it with: python -m evotune run {_shown(path)}")


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """What this machine has and lacks, with the mend for each lack. Exit code 1 when a study cannot run."""
    from evotune import doctor as examination

    found = list(examination.checks(Path()))
    if as_json:
        print(json.dumps([check.as_json() for check in found], indent=2))
    else:
        _console().print(examination.table(found))
    raise typer.Exit(0 if examination.healthy(found) else 1)


@app.command()
def calibrate(
    study: Annotated[
        Path | None,
        typer.Argument(metavar="[STUDY.TOML]", help="The study file; by default the one that init writes."),
    ] = None,
    blocks: Annotated[int, typer.Option(min=12, help="Paired blocks for each workload group.")] = 48,
    as_json: AsJson = False,
    unsafe: Unsafe = False,
) -> None:
    """Measure how small a gain this machine can tell from noise, for a study's workloads."""
    from evotune import calibrate as calibration
    from evotune.init import template
    from evotune.setup import evaluator

    with template() if study is None else nullcontext(study) as path:
        setup = _setup(path, None, None, None, unsafe)
    _tell_walls(unsafe)
    with closing(evaluator(setup)) as judge:
        found = calibration.calibrate(setup, judge, blocks=blocks, say=_say)
    if as_json:
        print(json.dumps(found.as_json(setup.promotion), indent=2))
    else:
        _console().print(calibration.table(found, setup.promotion))


@app.command()
def redteam(
    target: Annotated[
        Literal["host", "sm_90a"],
        typer.Option(help="Whose judge is tried. Without the GPU that it needs, as far as that goes."),
    ] = "host",
    full: Annotated[
        bool, typer.Option("--full", help="Ask every rung about every wrong kernel, for the matrix.")
    ] = False,
    coverage: Annotated[
        bool, typer.Option("--coverage", help="Only list the known tricks and what stands for each.")
    ] = False,
    table: Annotated[Path | None, typer.Option("--csv", help="Write one line per kernel here.")] = None,
    as_json: AsJson = False,
    unsafe: Unsafe = False,
) -> None:
    """Try to fool the judge with wrong, cheating and honest kernels. Exit code 1 when it does not hold."""
    from evotune import redteam as attack

    if coverage:
        print("\n".join(attack.coverage_lines()))
        return
    _tell_walls(unsafe)
    found = attack.judge(target=target, full=full, unsafe=unsafe, say=_say)
    if table is not None:
        attack.write_table(found, table)
    if as_json:
        print(json.dumps(attack.as_json(found), indent=2))
    else:
        print("\n".join([*(attack.matrix(found) if full else ()), *attack.lines(found)]))
    raise typer.Exit(0 if found.held else 1)


@app.command()
def dashboard(
    study: StudyPath = None,
    port: Annotated[int, typer.Option(help="Port on loopback; 0 takes a free one.")] = 8080,
) -> None:
    """Look at a study in the browser: trials, notes, artifacts, front, progress, lineage. Ctrl-C ends it."""
    from evotune.config import load
    from evotune.dashboard import serve

    directory = _directory(study)
    if study is not None and study.is_file():
        url = load(study).study.storage
    else:
        url = _history(directory).begun.config["study"]["storage"]
    serve(directory, url, port, lambda address: print(f"The dashboard answers at {address}", flush=True))


def main() -> None:
    """The console script. One line for what went wrong, never a traceback for a mistake of the user's."""
    code: str | int | None
    try:
        with _terminable():
            code = app(standalone_mode=False) or 0
    except SystemExit as ended:
        code = ended.code
    except typer.TyperException as error:
        code = _told(_usage(error), error.exit_code) if error.format_message() else error.exit_code
    except KeyboardInterrupt:
        code = _told("interrupted; nothing half-done is left", 128 + signal.SIGINT)
    except StudyError as error:
        code = _told(error, 2)
    except DeviceLost as error:
        code = _told(f"{error}; what was in flight is asked for again by `python -m evotune resume`", 1)
    except DeviceError as error:
        code = _told(f"{error}; `run --dry-run` samples, builds and inspects without a device", 2)
    except EvotuneError as error:
        code = _told(error, 1)
    except OSError as error:
        code = _told(_trouble(error), 1)
    try:
        sys.stdout.flush()
    except OSError as error:
        # The reader went away or the disk is full. The interpreter's last flush needs somewhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if code == 0 and not isinstance(error, BrokenPipeError):
            code = _told(_trouble(error), 1)
    sys.exit(code)


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM unwinds like an exit, so that temporary files and runners go. `run` has its own way."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _told(message: object, code: int) -> int:
    print(f"evotune: {message}", file=sys.stderr)
    return code


def _usage(error: typer.TyperException) -> str:
    """A mistake in the command line, and where its mend stands."""
    what = error.format_message().rstrip(".")
    command = next((argument for argument in sys.argv[1:] if not argument.startswith("-")), "")
    known = any(made.callback and made.callback.__name__ == command for made in app.registered_commands)
    asking = f"python -m evotune {command} --help" if known else "python -m evotune --help"
    return f"{what[:1].lower()}{what[1:]} (see `{asking}`)"


def _trouble(error: OSError) -> str:
    """Of the machine, met where nothing more can be said about it."""
    return f"{error.filename or 'output'}: {error.strerror or error}"


def _say(line: str) -> None:
    """One line of progress; stdout is for results."""
    print(line, file=sys.stderr, flush=True)


def _tell_walls(unsafe: bool) -> None:
    """What does not hold where the sandbox is weaker than bubblewrap, and the mend; nothing where it is not.

    For each command that builds or judges, before it does. Where no walls hold at all, it says so itself.
    """
    from evotune.fitness.sandbox import Sandbox

    with suppress(SandboxError):
        if warning := Sandbox.detect(unsafe=unsafe).describe().warning:
            _say(f"evotune: {warning}")


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


def _recorded(directory: Path, history: "History", unsafe: bool = False, **changed: Any) -> "Setup":
    """The setup of a study that was begun, with those keys of [study] that `changed` gives a value."""
    from evotune.setup import from_header

    begun = history.begun
    study = begun.config["study"] | {key: value for key, value in changed.items() if value is not None}
    return replace(from_header({**begun.config, "study": study}, begun.base, directory), unsafe=unsafe)


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
    spent_usd = report.spent_usd(loop.history, setup.directory)
    state = report.status(loop.history, spent_usd, legal_share=setup.space.legal_share())
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
    from evotune.history import load

    return load(directory)


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
