"""Sandboxes of each level for tests. Where bubblewrap does not work, CI fails and a laptop skips."""

import os
import sys
from pathlib import Path

import pytest

from evotune.fitness import cell, landlock
from evotune.fitness.sandbox import Cell, Completed, Level, Limits, Sandbox, python_paths


def bubblewrap() -> Sandbox:
    found = Sandbox.detect(unsafe=True)
    if found.level is not Level.BUBBLEWRAP:
        explain = pytest.fail if os.environ.get("CI") else pytest.skip
        explain(f"bubblewrap does not work here: {found.describe().detail}")
    return found


def without_namespaces(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Make this a machine on which bwrap says what it says where user namespaces are off."""
    refusing = folder / "bwrap"
    refusing.write_text("#!/bin/sh\necho 'bwrap: Creating new namespace failed' >&2\nexit 1\n")
    refusing.chmod(0o755)
    monkeypatch.setattr(cell, "find_bwrap", lambda: str(refusing))


def landlocked(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Sandbox:
    if landlock.abi() == 0:
        pytest.skip("this kernel has no Landlock")
    without_namespaces(monkeypatch, folder)
    found = Sandbox.detect()
    assert found.level is Level.LANDLOCK
    return found


def run_python(walls: Sandbox, scratch: Path, source: str, limits: Limits | None = None) -> Completed:
    place = Cell(scratch=scratch, read_only=python_paths(), limits=limits or Limits(wall_s=20))
    return walls.run([sys.executable, "-I", "-S", "-c", source], place)
