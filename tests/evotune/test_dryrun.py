"""The dry run: what it samples, what it reads, what it puts into the dashboard's storage."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState
from rich.console import Console

from evotune import dryrun
from evotune.config import parse
from evotune.dryrun import DryRun, Inspected
from evotune.errors import StudyError
from evotune.fitness import cute_toolchain, device
from evotune.fitness.outcome import Failed, Failure, Resources, Stage
from evotune.fitness.sandbox import Limits, Sandbox
from evotune.fitness.toolchain import Compiled, CompileError
from evotune.opening import begin
from evotune.search_space.space import Space
from evotune.search_space.template import Language, Specialization, Unit
from evotune.search_space.templates.kda_sm90 import TEMPLATE, KdaSm90Knobs
from evotune.setup import Setup, resolve
from evotune.trials import storage_at

WORKLOAD = {"name": "w", "lengths": [64], "dtype": "bfloat16"}


class FakeToolchain:
    """Refuses 8 warps, ignores `exp`, and reports resources that follow from the constants."""

    id = "fake 1"
    target = "sm_90a"
    language: Language = "cute"
    closed = 0

    def compile(self, unit: Unit, scratch: Path, sandbox: Sandbox, limits: Limits) -> Compiled | CompileError:
        assert not list(scratch.iterdir())
        constants = dict(unit.constants)
        if constants["WARPS"] == 8:
            failed = Failed(Failure.BUILD_ERROR, Stage.BUILD, "no such warps", log="line 1\nline 2")
            return CompileError(failed, "full text")
        text = repr([pair for pair in unit.constants if pair[0] != "EXP"])
        return Compiled(text.encode(), {}, "")

    def inspect(self, unit: Unit, compiled: Compiled) -> Resources | Failed:
        constants = dict(unit.constants)
        assert isinstance(constants["VALUE_TILE"], int)
        more = 7 if constants["PRODUCTION"] else 0
        registers = constants["VALUE_TILE"] + more
        return Resources({"registers": registers, "shared_bytes": 1024, "blocks_per_sm": 9 - more})

    def close(self) -> None:
        FakeToolchain.closed += 1


def setup_of(tmp_path: Path, **study: Any) -> Setup:
    tables: Mapping[str, Any] = {
        "study": {"name": "toy", "template": "kda_sm90", "seed": 5, **study},
        "workload": [
            {**WORKLOAD, "name": f"{contract}", "contract": contract} for contract in ("plain", "production")
        ],
    }
    return resolve(parse(tables, "study.toml"), tmp_path)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(dryrun, "toolchain_for", lambda *_: FakeToolchain())
    FakeToolchain.closed = 0
    yield
    assert FakeToolchain.closed == 1


def study_in(setup: Setup) -> optuna.Study:
    storage = storage_at(setup.directory, setup.storage_url)
    return optuna.load_study(study_name="toy-dry-run", storage=storage)


class TestSampling:
    def space(self) -> Space:
        facts = (("K", 128), ("V", 128), ("contract", "plain"))
        return Space(TEMPLATE, (Specialization("kda", "bfloat16", facts),))

    def test_the_default_comes_first_and_nothing_twice(self) -> None:
        space = self.space()
        found = dryrun.configurations(space, 50, 3)
        assert found[0] == KdaSm90Knobs()
        assert len(set(found)) == 50
        assert all(space.why_not(knobs) is None for knobs in found)

    def test_it_follows_from_the_seed(self) -> None:
        space = self.space()
        assert dryrun.configurations(space, 20, 3) == dryrun.configurations(space, 20, 3)
        assert dryrun.configurations(space, 20, 3) != dryrun.configurations(space, 20, 4)

    def test_legality_agrees_with_the_whole_grid(self) -> None:
        space = self.space()
        told = dryrun.legality(space, 0)
        true = sum(1 for _ in space.legal()) / space.size
        assert told.share == pytest.approx(true, abs=0.03)
        assert sum(cells for _, cells in told.reasons) == round(told.drawn * (1 - told.share))
        assert any("# threads do not divide" in reason for reason, _ in told.reasons)


class TestRun:
    def test_rows_are_in_order_and_one_for_each_specialization(self, tmp_path: Path, fake: None) -> None:
        seen: list[Inspected] = []
        found = dryrun.run(setup_of(tmp_path), 12, on_row=seen.append)
        assert list(found.rows) == seen
        assert [row.number for row in seen] == [n for n in range(12) for _ in range(2)]
        assert {row.specialization for row in seen} == {
            "bfloat16-K128-V128-plain",
            "bfloat16-K128-V128-production",
        }
        failed = {row.number for row in found.failures}
        assert failed == {row.number for row in seen if row.knobs["warps"] == 8}
        assert 0 < len(failed) < 12
        assert all((row.failure, row.stage) == ("build_error", "build") for row in found.failures)
        assert all(not row.resources for row in found.failures)

    def test_equal_code_is_told(self, tmp_path: Path) -> None:
        space = setup_of(tmp_path).space
        some = dryrun.configurations(space, 10, 5)
        swapped = {"approximate": "exact", "exact": "approximate"}
        chosen = [*some, *(replace(knobs, exp=swapped[knobs.exp]) for knobs in some)]
        rows = list(dryrun.inspect_all(space, chosen, FakeToolchain(), Sandbox.detect(), Limits()))
        twins = [row for row in rows if row.twin is not None]
        assert {row.number for row in twins} >= {
            row.number for row in rows if row.number >= 10 and not row.failure
        }
        for row in twins:
            other = next(o for o in rows if (o.number, o.specialization) == (row.twin, row.specialization))
            assert {**row.knobs, "exp": ""} == {**other.knobs, "exp": ""}
            assert row.twin is not None
            assert row.twin < row.number

    def test_the_storage_has_resources_as_objectives_and_no_speed(self, tmp_path: Path, fake: None) -> None:
        setup = setup_of(tmp_path)
        found = dryrun.run(setup, 12)
        study = study_in(setup)
        assert study.metric_names == ["registers", "shared_bytes", "blocks_per_sm"]
        assert len(study.trials) == 12
        failed = {row.number for row in found.failures}
        for number, trial in enumerate(study.trials):
            tile = trial.params["b00.value_tile"]
            if number in failed:
                assert trial.state is TrialState.PRUNED
                assert trial.user_attrs["verdict"] == "build_error"
                assert trial.constraints["gate"] == 8
            else:
                assert trial.state is TrialState.COMPLETE
                assert trial.values == [tile + 7, 1024, 2]  # the larger need of the two contracts
        assert json.loads((setup.directory / dryrun.FILE).read_text())["rows"][0]["number"] == 0

    def test_a_second_dry_run_takes_the_place_of_the_first(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(dryrun, "toolchain_for", lambda *_: FakeToolchain())
        setup = setup_of(tmp_path)
        dryrun.run(setup, 6)
        dryrun.run(setup, 4)
        assert len(study_in(setup).trials) == 4

    def test_a_study_begun_in_its_directory_leaves_it_there(self, tmp_path: Path, fake: None) -> None:
        setup = setup_of(tmp_path)
        dryrun.run(setup, 3)
        opened = begin(setup)
        opened.close()
        names = optuna.get_all_study_names(storage_at(setup.directory, ""))
        assert sorted(names) == ["toy", "toy-dry-run"]
        assert len(study_in(setup).trials) == 3

    def test_somebody_elses_study_is_left_alone(self, tmp_path: Path, fake: None) -> None:
        setup = setup_of(tmp_path)
        setup.directory.mkdir()
        optuna.create_study(study_name="toy-dry-run", storage=storage_at(setup.directory, ""))
        with pytest.raises(StudyError, match="toy-dry-run that is no dry run"):
            dryrun.run(setup, 2)

    @pytest.mark.parametrize("place", ["/proc/toy.study", "file"])
    def test_a_directory_that_cannot_be_written_is_one_line_before_the_costly_part(
        self, place: str, tmp_path: Path
    ) -> None:
        (tmp_path / "file").touch()
        setup = setup_of(tmp_path, directory=str(tmp_path / place))
        with pytest.raises(StudyError, match=f"^cannot write in {tmp_path / place}: "):
            dryrun.run(setup, 2)

    @pytest.mark.parametrize("as_json", [False, True])
    def test_the_command_prints_a_table_or_json(
        self, as_json: bool, tmp_path: Path, fake: None, capsys: pytest.CaptureFixture[str]
    ) -> None:
        dryrun.command(setup_of(tmp_path, trials=3), as_json=as_json)
        printed = capsys.readouterr().out
        if as_json:
            assert [row["number"] for row in json.loads(printed)["rows"]] == [0, 0, 1, 1, 2, 2]
        else:
            assert "toy: dry run of kda_sm90 for sm_90a" in printed
            assert "of 6 objects built" in printed
            assert "toy-dry-run" in printed

    def test_a_target_without_a_toolchain_is_one_line(self) -> None:
        with pytest.raises(StudyError, match="no toolchain for target sm_90; did you mean sm_90a"):
            dryrun.toolchain_for("sm_90", Sandbox.detect(), "")


class TestShowing:
    def run(self) -> DryRun:
        built = Inspected(0, {"tile": 8, "warps": 4}, "plain", {"registers": 90}, {"registers": 80}, 0.5)
        failed = replace(
            built,
            number=1,
            knobs={"tile": 16, "warps": 4},
            resources={},
            failure="build_error",
            detail="boom",
        )
        twin = replace(built, number=2, knobs={"tile": 8, "warps": 2}, twin=0)
        legality = dryrun.Legality(100, 50, 0.5, (("# is odd", 20), ("# is even", 5)))
        return DryRun("toy", "kda", "sm_90a", "fake", legality, (built, failed, twin))

    def test_the_table_names_what_differs_from_the_default(self) -> None:
        printed = StringIO()
        Console(width=160, file=printed).print(dryrun.table(self.run()))
        assert "tile=8 warps=4" in printed.getvalue().splitlines()[-1]  # the default's, under the table
        lines = [line for line in printed.getvalue().splitlines() if "│" in line]
        assert "default" in lines[0]
        assert "80" in lines[0]
        assert "tile=16" in lines[1]
        assert "warps" not in lines[1]
        assert "build_error: boom" in lines[1]
        assert "same code as 0" in lines[2]

    def test_the_summary_counts(self) -> None:
        text = dryrun.summary(self.run())
        assert "50% of 50 cells drawn from a grid of 100 are legal; most of the others: # is odd" in text
        assert "2 of 3 objects built, 1 with the code of an earlier one, 0 spill" in text

    def test_a_note_has_predicted_beside_built(self) -> None:
        assert "| registers | 80 | 90 |" in dryrun.note([self.run().rows[0]])
        assert "build_error" in dryrun.note([self.run().rows[1]])


class TestDevice:
    def test_the_host_is_always_there(self) -> None:
        assert device.absent("host") is None

    def test_a_missing_gpu_is_one_line(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Path, "exists", lambda self: False)
        why = device.absent("sm_90a")
        assert why is not None
        assert "no NVIDIA GPU" in why
        assert "9.0" in why
        assert "\n" not in why

    @pytest.mark.parametrize(
        ("found", "expected"),
        [
            (["9.0"], None),
            (["8.0", "9.0"], None),
            (["8.0"], "needs a GPU of compute capability 9.0; visible here: 8.0"),
            ([], "visible here: none"),
            ("libcuda.so.1: cannot open", "driver does not answer: libcuda.so.1"),
        ],
    )
    def test_the_capability_decides(
        self, found: list[str] | str, expected: str | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Path, "exists", lambda self: True)
        monkeypatch.setattr(device, "_capabilities", lambda: found)
        why = device.absent("sm_90a")
        assert why is None if expected is None else expected in (why or "")


@pytest.mark.compile
def test_the_hopper_study_builds_with_no_device(tmp_path: Path) -> None:
    """The shipped study file, three configurations, the real compiler."""
    from evotune.config import load

    lack = cute_toolchain.missing()
    if lack is not None:
        pytest.skip(lack)
    file = Path(__file__).parents[2] / "experiments" / "kda_h200" / "study.toml"
    setup = resolve(load(file), tmp_path)
    found = dryrun.run(setup, 3)
    assert not found.failures
    for row in found.rows:
        assert row.resources["shared_bytes"] == row.predicted["shared_bytes"]
        assert row.resources["threads"] == row.predicted["threads"]
    study = optuna.load_study(study_name="kda_h200-dry-run", storage=storage_at(setup.directory, ""))
    assert [trial.state for trial in study.trials] == [TrialState.COMPLETE] * 3


def test_a_host_study_is_inspected_too(tmp_path: Path) -> None:
    tables = {
        "study": {"name": "toy", "template": "kda_host"},
        "workload": [{"name": "w", "length": 64}],
    }
    found = dryrun.run(resolve(parse(tables, "study.toml"), tmp_path), 4)
    assert not found.failures
    assert all(row.resources["code_bytes"] > 0 for row in found.rows)
