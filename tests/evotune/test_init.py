"""`init` writes a file that is a study, and never over one."""

import os
from pathlib import Path

import pytest

from evotune.config import load
from evotune.errors import StudyError
from evotune.init import init
from evotune.setup import resolve


def test_the_file_is_a_study(tmp_path: Path) -> None:
    path = init(tmp_path / "new" / "folder")
    setup = resolve(load(path), path.parent)
    assert setup.template.target == "host"
    assert len({workload.group for workload in setup.workloads}) == 3
    assert setup.directory == path.parent / "kda.study"


def test_an_existing_file_is_kept(tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text("mine")
    with pytest.raises(StudyError, match="exists and is kept"):
        init(tmp_path)
    assert (tmp_path / "study.toml").read_text() == "mine"


def test_a_place_that_cannot_be_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StudyError, match=f"cannot write {tmp_path}"):
        init(tmp_path / "file")


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_read_only_directory(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StudyError, match="Permission denied"):
        init(tmp_path)
