"""Bytecode for Pythons that may not write it."""

import subprocess
import sys
from pathlib import Path

import pytest

from evotune.fitness.bytecode import stored


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package that was installed without bytecode, in an environment that stores none."""
    folder = tmp_path / "site" / "evotune_large"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("from evotune_large import inner\n")
    (folder / "inner.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(str(folder.parent))
    monkeypatch.setenv("PYTHONPATH", str(folder.parent))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    return "evotune_large"


def test_it_is_stored_once_and_read(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = stored((package,), tmp_path / "cache")
    assert prefix is not None
    kept = sorted(path.name.partition(".")[0] for path in prefix.rglob("*evotune_large/*.pyc"))
    assert kept == ["__init__", "inner"]
    command = [sys.executable, "-v", "-X", f"pycache_prefix={prefix}", "-c", f"import {package}"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert f"matches {tmp_path}/site/evotune_large/inner.py" in said
    monkeypatch.setattr("subprocess.run", lambda *_, **__: pytest.fail("imported again"))
    assert stored((package,), tmp_path / "cache") == prefix


def test_nothing_is_stored_where_an_installer_did_or_cannot_be(package: str, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert stored((package,), blocked) is None
    source = tmp_path / "site" / package / "__init__.py"
    beside = source.parent / "__pycache__" / f"__init__.{sys.implementation.cache_tag}.pyc"
    beside.parent.mkdir()
    beside.write_bytes(b"")
    assert stored((package,), tmp_path / "cache") is None
    assert not (tmp_path / "cache").exists()
