"""`init`: a study file to start from."""

from contextlib import AbstractContextManager
from importlib.resources import as_file, files
from pathlib import Path

from evotune.errors import StudyError

FILE = "study.toml"


def template() -> AbstractContextManager[Path]:
    """The study file that `init` writes, to be read."""
    return as_file(files("evotune").joinpath("study_template.toml"))


def init(directory: Path) -> Path:
    """Write a commented study file that runs as it is; the directory is made. Raises StudyError."""
    path = directory / FILE
    with template() as shipped:
        text = shipped.read_bytes()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if path.exists():
            raise StudyError(f"{path} exists and is kept; name another directory")
        with path.open("xb") as file:
            file.write(text)
    except OSError as error:
        raise StudyError(f"cannot write {path}: {error.strerror}") from error
    return path
