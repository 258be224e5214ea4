"""The cache's bound: the longest unused go, and never while somebody else has it open."""

import os
import time
from pathlib import Path

import pytest

from evotune.errors import StudyError
from evotune.fitness.cache import Cache, Parts
from evotune.fitness.outcome import Artifact, Resources
from evotune.search_space.template import digest

NAMES = [digest(str(number)) for number in range(4)]
KIB = 1024


def artifact(name: str) -> Artifact:
    return Artifact(name, Path(), "kernel", "host", "cc 1", Resources({"code_bytes": 8}), 0.1)


def filled(directory: Path) -> None:
    """Four entries of some 100 KiB, the first the longest unused."""
    cache = Cache(directory)
    for age, name in enumerate(reversed(NAMES)):
        cache.put(name, Parts.of_artifact(artifact(name), bytes(100 * KIB), {}, "log"))
        then = time.time() - 1000 * (age + 1)
        os.utime(directory / name[:2] / name, (then, then))


def kept(directory: Path) -> list[str]:
    return [name for name in NAMES if (directory / name[:2] / name).exists()]


def test_the_longest_unused_go_first(tmp_path: Path) -> None:
    filled(tmp_path)
    cache = Cache(tmp_path, 250 * KIB)
    assert kept(tmp_path) == NAMES[2:]
    assert cache.get(NAMES[0]) is None
    assert cache.get(NAMES[3]) is not None


def test_a_use_makes_an_entry_young(tmp_path: Path) -> None:
    filled(tmp_path)
    assert Cache(tmp_path).get(NAMES[0]) is not None
    Cache(tmp_path, 250 * KIB)
    assert kept(tmp_path) == [NAMES[0], NAMES[3]]


def test_what_fits_stays(tmp_path: Path) -> None:
    filled(tmp_path)
    Cache(tmp_path, 1000 * KIB)
    assert kept(tmp_path) == NAMES


def test_nothing_goes_while_another_has_it_open(tmp_path: Path) -> None:
    filled(tmp_path)
    other = Cache(tmp_path, 1000 * KIB)
    Cache(tmp_path, 1)
    assert kept(tmp_path) == NAMES
    other.close()
    Cache(tmp_path, 1)
    assert kept(tmp_path) == []


def test_what_a_killed_process_left_goes(tmp_path: Path) -> None:
    filled(tmp_path)
    (tmp_path / ".new-abc").mkdir()
    Cache(tmp_path, 1000 * KIB)
    assert not (tmp_path / ".new-abc").exists()


@pytest.mark.parametrize("place", ["file/cache", "file"])
def test_a_place_that_cannot_be_written_is_one_line_with_the_mend(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StudyError, match="built objects cannot be kept in .*XDG_CACHE_HOME"):
        Cache(tmp_path / place)
