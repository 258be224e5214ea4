"""Commands: exit codes, one-line errors, JSON, closed pipes, a fast --help."""

import inspect
import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from evotune.cli import app
from evotune.errors import SandboxError, StudyError
from evotune.fitness import cell
from evotune.fitness.cell import Landlock, Open
from evotune.fitness.sandbox import Level, Sandbox
from evotune.history import fold
from evotune.journal import read
from tests.evotune.toy import ROOT, STUDY, call, environment, study_file


def bash(command: str) -> subprocess.CompletedProcess[str]:
    """A command line in a shell of its own, where pipes are real."""
    return subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, cwd=ROOT, env=environment()
    )


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished study's directory."""
    path = study_file(tmp_path_factory.mktemp("done"))
    run = call("run", path, "--json")
    assert run.returncode == 0, run.stderr
    state = json.loads(run.stdout)
    assert state["trials"] == {"asked": 40, "judged": 40, "wanted": 40}
    assert state["end"] == "all trials are done"
    return path.parent / "toy.study"


def test_help_loads_nothing_heavy() -> None:
    heavy = ("numpy", "optuna", "pandas", "torch", "cutlass", "litellm", "plotly")
    code = (
        "import sys; from evotune.cli import app; from typer.main import get_command; get_command(app);"
        f"print([m for m in {heavy} if m in sys.modules])"
    )
    out = bash(f"{sys.executable} -c {shlex.quote(code)}")
    assert out.stdout.strip() == "[]", out.stderr
    shown = call("--help")
    assert shown.returncode == 0
    for command in ("run", "resume", "status", "show"):
        assert command in shown.stdout


def test_run_tells_progress_on_stderr_and_results_on_stdout(tmp_path: Path) -> None:
    run = call("run", study_file(tmp_path), "--trials", "6", "--directory", tmp_path / "elsewhere")
    assert run.returncode == 0
    assert "best long" in run.stderr
    assert "/min" in run.stderr
    assert "Front (" in run.stdout
    assert "6 of 6 candidates judged" in run.stdout
    assert (tmp_path / "elsewhere" / "journal.jsonl").exists()


def test_status_as_json_has_what_the_tables_have(done: Path) -> None:
    state = json.loads(call("status", done, "--json").stdout)
    assert state["passed"] + sum(state["failures"].values()) == 40
    lives = {branch["id"]: branch["lives"] for branch in state["branches"]}
    assert lives["b00"]
    assert not all(lives.values())
    best = state["best"]["speedup:long"]
    assert best["values"]["speedup:long"] == max(m["values"]["speedup:long"] for m in state["front"])
    assert state["cost_usd"] > 0
    text = call("status", done.parent / "toy.toml").stdout
    for piece in ("Best per objective", "Branches", "dead", "Front (", "body: int speed = 2;"):
        assert piece in text


def test_show_one_candidate(done: Path) -> None:
    state = json.loads(call("status", done, "--json").stdout)
    dead = next(branch["id"] for branch in state["branches"] if not branch["lives"])
    number = fold(read(done).records).of(dead)[0].asked.index
    told = json.loads(call("show", str(number), done, "--json").stdout)
    assert told["branch"]["id"] == dead
    assert told["verdict"] == "build_error"
    assert "+#error" in told["diff"]
    text = call("show", str(number), done).stdout
    assert "build_error at build" in text
    assert "+#error" in text
    assert "body.c:3: error" in text


def test_show_layouts_and_source(done: Path) -> None:
    assert "tile of 8 floats in stack" in call("show", "0", done, "--layouts").stdout
    assert json.loads(call("show", "0", done, "--layouts", "--json").stdout) == {
        "float32": "tile of 8 floats in stack"
    }
    assert "EVOLVE-BEGIN body" in call("show", "0", done, "--source").stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("show", "40"), "no candidate 40; candidates 0 to 39 are there"),
        (("show", "-1"), "no candidate -1"),
    ],
)
def test_a_number_that_does_not_exist(done: Path, arguments: tuple[str, ...], message: str) -> None:
    shown = call(arguments[0], "--", arguments[1], done)
    assert shown.returncode == 2
    assert message in shown.stderr


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("trials", "trails", "unknown key trails; did you mean trials?"),
        ("seed = 7", "seed 7", "is not TOML"),
        ("toy:device", "toy:missing_device", "there is no toy device here; `run --dry-run` samples"),
        ("toy:TEMPLATE", "toy:EMPTY_TEMPLATE", "no configuration of toy is legal"),
        ("toy:TEMPLATE", "toy:BROKEN_TEMPLATE", "the default of template toy does not pass"),
        ("toy:device", "toy:nobody", "device tests.evotune.toy:nobody cannot be loaded"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in STUDY
    run = call("run", study_file(tmp_path, (old, new)))
    assert run.returncode == 2
    lines = [line for line in run.stderr.strip().splitlines() if "/min" not in line]
    assert len(lines) == 1, run.stderr
    assert lines[0].startswith("evotune: ")
    assert message in lines[0]
    if "BROKEN" not in new:
        assert not (tmp_path / "toy.study").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--trials", "0"), "[study] trials should be greater than 0, but is 0"),
        (("--time-limit", "0"), "[study] time_limit_s should be greater than 0, but is 0.0"),
        (("--time-limit", "nan"), "[study] time_limit_s should be"),
    ],
)
def test_no_budget_is_one_line(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    for done in (
        call("run", study_file(tmp_path), *arguments),
        call("run", study_file(tmp_path), "--dry-run", *arguments),
    ):
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert message in done.stderr
    assert not (tmp_path / "toy.study").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("runn a.toml", "no such command 'runn'. Did you mean 'run'? (see `python -m evotune --help`)"),
        ("--bad", "no such option: --bad (see `python -m evotune --help`)"),
        ("run --bad", "no such option: --bad (see `python -m evotune run --help`)"),
        (
            "run a.toml --trials",
            "option '--trials' requires an argument (see `python -m evotune run --help`)",
        ),
        ("run a b c", "got unexpected extra argument(s) (b c) (see `python -m evotune run --help`)"),
        ("show", "missing argument 'N' (see `python -m evotune show --help`)"),
        ("export --limit -3", "invalid value for '--limit': "),
    ],
)
def test_a_mistake_in_the_command_line_is_one_line_too(arguments: str, message: str) -> None:
    told = call(*arguments.split())
    assert (told.returncode, told.stdout, told.stderr.count("\n")) == (2, "", 1)
    assert told.stderr.startswith(f"evotune: {message}")


def test_no_command_at_all_is_help() -> None:
    told = call()
    assert told.returncode == 2
    assert "Commands" in told.stdout


def test_resuming_without_a_budget_is_one_line(done: Path) -> None:
    resumed = call("resume", done, "--trials", "0")
    assert (resumed.returncode, resumed.stderr.count("\n")) == (2, 1)
    assert "trials should be greater than 0" in resumed.stderr


@pytest.mark.parametrize("command", ["status {} --json", "status {}", "show 0 {} --source"])
def test_a_full_disk_under_the_output_is_one_line(done: Path, command: str) -> None:
    out = bash(f"{sys.executable} -m evotune {command.format(done)} > /dev/full")
    assert (out.returncode, out.stderr) == (1, "evotune: output: No space left on device\n")


def test_a_lost_device_is_one_line(tmp_path: Path) -> None:
    run = call("run", study_file(tmp_path, ("toy:device", "toy:losing_device")))
    assert run.returncode == 1
    assert "evotune: the toy device is gone" in run.stderr
    assert "Traceback" not in run.stderr


def test_there_is_nothing_to_show(tmp_path: Path) -> None:
    empty = call("status", tmp_path)
    assert (empty.returncode, "holds no study" in empty.stderr) == (2, True)
    missing = call("status", tmp_path / "no")
    assert (missing.returncode, "there is no" in missing.stderr) == (2, True)
    resumed = call("resume", tmp_path)
    assert (resumed.returncode, "holds no study" in resumed.stderr) == (2, True)


@pytest.mark.parametrize("command", ["status", "resume", "export", "dashboard"])
def test_a_study_killed_before_its_first_record_is_told(tmp_path: Path, command: str) -> None:
    (tmp_path / "journal.jsonl").touch()
    (tmp_path / "optuna.journal").touch()
    told = call(command, tmp_path)
    assert (told.returncode, told.stderr.count("\n")) == (2, 1)
    assert f"the study in {tmp_path} never began; `python -m evotune run` begins it" in told.stderr


def test_a_closed_pipe_is_no_traceback(done: Path) -> None:
    out = bash(f"{sys.executable} -m evotune status {done} --json | true; echo ${{PIPESTATUS[0]}}")
    assert "Traceback" not in out.stderr
    assert "Exception" not in out.stderr
    assert out.stdout.strip() in {"0", "1"}


def test_a_run_outlives_the_reader_of_its_progress(tmp_path: Path) -> None:
    path = study_file(tmp_path)
    out = bash(f"{sys.executable} -m evotune run {path} 2>&1 >/dev/null | head -c 1")
    state = json.loads(call("status", tmp_path / "toy.study", "--json").stdout)
    assert state["trials"]["judged"] == 40, out


def test_an_empty_front_is_said(tmp_path: Path) -> None:
    call("run", study_file(tmp_path, ("toy:TEMPLATE", "toy:BROKEN_TEMPLATE")))
    told = call("status", tmp_path / "toy.study")
    assert told.returncode == 0
    assert "The front is empty: no candidate has passed." in told.stdout


WALLED = ("run", "resume", "export", "verify", "diagnose", "calibrate", "redteam")


def walls(monkeypatch: pytest.MonkeyPatch, found: Sandbox) -> None:
    """Make this a machine where `found` is detected; the judge of redteam takes minutes and is left out."""

    def judge(**how: object) -> None:
        raise StudyError("not judged")

    monkeypatch.setattr(Sandbox, "detect", lambda *, unsafe=False: found)
    monkeypatch.setattr("evotune.redteam.judge", judge)


def line_of(command: str, done: Path) -> tuple[str | Path, ...]:
    where: dict[str, tuple[str | Path, ...]] = {
        "run": (done.parent / "toy.toml", "--trials", "2", "--directory", done.parent / "few.study"),
        "resume": (done,),
        "export": (done, "--out", done.parent / "pareto"),
        "verify": (done.parent / "no export",),
        "diagnose": ("0", done),
        "calibrate": (done.parent / "toy.toml",),
        "redteam": (),
    }
    return command, *where[command]


@pytest.fixture
def again(done: Path, tmp_path: Path) -> Path:
    shutil.copy(done.parent / "toy.toml", tmp_path)
    shutil.copytree(done, tmp_path / done.name)
    return tmp_path / done.name


def test_every_command_that_asks_for_walls_is_tried_here() -> None:
    asking = {
        made.callback.__name__
        for made in app.registered_commands
        if made.callback and "unsafe" in inspect.signature(made.callback).parameters
    }
    assert asking == set(WALLED)


@pytest.mark.parametrize("command", WALLED)
def test_weak_walls_are_told_once(command: str, again: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    walls(
        monkeypatch,
        Sandbox(Level.LANDLOCK, Landlock(sys.executable), "Landlock ABI 4: bwrap is not installed"),
    )
    told = call(*line_of(command, again))
    lines = [line for line in told.stderr.splitlines() if "weaker than bubblewrap" in line]
    assert len(lines) == 1, told.stderr
    for piece in ("bwrap is not installed", "names and sizes of files outside", "apt install bubblewrap"):
        assert piece in lines[0]
    assert "bubblewrap" not in told.stdout


@pytest.mark.parametrize("command", WALLED)
def test_no_walls_are_told_once(command: str, again: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    walls(monkeypatch, Sandbox(Level.NONE, Open(), "this kernel has no Landlock"))
    told = call(*line_of(command, again), "--unsafe-no-sandbox")
    lines = [line for line in told.stderr.splitlines() if "there is no sandbox" in line]
    assert len(lines) == 1, told.stderr
    assert "generated code can read, write and send whatever the user can" in lines[0]
    assert "apt install bubblewrap" in lines[0]


@pytest.mark.parametrize("command", WALLED)
def test_behind_the_best_walls_nothing_is_told(
    command: str, again: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways = cell.bubblewrap_ways("/usr/bin/bwrap")
    walls(monkeypatch, Sandbox(Level.BUBBLEWRAP, next(iter(ways)), "/usr/bin/bwrap"))
    told = call(*line_of(command, again))
    assert "sandbox" not in told.stderr
    assert "bubblewrap" not in told.stderr


def test_json_stays_clean_behind_weak_walls(again: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    walls(monkeypatch, Sandbox(Level.NONE, Open(), "this kernel has no Landlock"))
    told = call(*line_of("run", again), "--json", "--unsafe-no-sandbox")
    assert json.loads(told.stdout)["trials"]["judged"] == 2
    assert "there is no sandbox" in told.stderr


def test_where_no_walls_hold_the_command_says_so_itself(again: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plug-in's device may need none: the study runs."""

    def refuse(*, unsafe: bool = False) -> Sandbox:
        raise SandboxError("no sandbox holds on this machine")

    monkeypatch.setattr(Sandbox, "detect", refuse)
    assert call(*line_of("run", again)).returncode == 0
    monkeypatch.setattr("evotune.redteam.judge", lambda **how: refuse())
    refused = call("redteam")
    assert (refused.returncode, refused.stderr) == (1, "evotune: no sandbox holds on this machine\n")
