"""`doctor` names each lack with its mend and shows no secret."""

import json
import os
import shutil
from pathlib import Path

import pytest

from evotune import doctor
from evotune.doctor import State
from evotune.errors import SandboxError, StudyError
from evotune.fitness.host_toolchain import Compiler
from evotune.fitness.sandbox import Sandbox


def test_this_machine_can_run_a_study(tmp_path: Path) -> None:
    found = list(doctor.checks(tmp_path))
    assert doctor.healthy(found)
    by_name = {check.name: check for check in found}
    assert {"sandbox", "compiler", "disk, studies", "processor", "GPU", "CuTe-DSL", "LLM key"} <= set(by_name)
    assert by_name["sandbox"].found.startswith("bubblewrap")
    assert any(character.isdigit() for character in by_name["compiler"].found)
    assert all(check.mend for check in found if check.state is not State.OK)
    assert json.loads(json.dumps([check.as_json() for check in found]))[0]["state"] == "ok"
    assert doctor.table(found).row_count == len(found)


def test_no_sandbox_is_a_lack(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def none(*, unsafe: bool = False) -> Sandbox:
        raise SandboxError("no sandbox holds on this machine (bwrap is not installed)")

    monkeypatch.setattr(Sandbox, "detect", none)
    found = list(doctor.checks(tmp_path))
    assert not doctor.healthy(found)
    assert found[0].state is State.LACKING
    assert "bubblewrap" in found[0].mend
    assert "there is no sandbox" in found[1].found


def test_no_compiler_is_a_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str | None = None) -> Compiler:
        raise StudyError("no C compiler was found")

    monkeypatch.setattr(Compiler, "find", none)
    check = doctor.compiler_check(Sandbox.detect())
    assert check.state is State.LACKING
    assert "evotune[zig]" in check.mend


def test_a_compiler_that_does_not_compile_is_a_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Path("/bin/false")
    monkeypatch.setattr(Compiler, "find", lambda name=None: Compiler.at(broken))
    check = doctor.compiler_check(Sandbox.detect())
    assert check.state is State.LACKING
    assert "does not compile a trivial function" in check.found


def test_a_full_disk_is_a_lack(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    usage = type(shutil.disk_usage(tmp_path))(100 << 20, 97 << 20, 3 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage)
    found = list(doctor.disk_checks(tmp_path / "not" / "yet"))
    assert {check.state for check in found} == {State.LACKING}
    assert found[0].found.startswith("3 MiB free")


def test_one_core_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    assert doctor.processor_check().state is State.WEAK


def test_a_key_is_named_and_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.endswith("_API_KEY")]:
        monkeypatch.delenv(name)
    assert doctor.key_check().state is State.OPTIONAL
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-secret-value")
    monkeypatch.setenv("EMPTY_API_KEY", "")
    check = doctor.key_check()
    assert check.found == "set: ANTHROPIC_API_KEY"
    assert "secret" not in json.dumps(check.as_json())


def test_packages_that_are_absent_are_optional() -> None:
    check = doctor._package("DSL", "no-such-distribution", "no_such_module", "pip install it")
    assert (check.state, check.mend) == (State.OPTIONAL, "pip install it")
