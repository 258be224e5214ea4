"""Writes an exported directory, whole or not at all.

pareto/__init__.py, kda.py      the drop-in, importable without evotune
pareto/__pycache__              an empty file: Python can neither keep nor find bytecode there, which it
                                would load unchecked in place of the text that `verify` compared
pareto/manifest.json            index, see `manifest`
pareto/pareto.csv, pareto.html
pareto/kernels/<id>/            manifest.json, source, object and library per specialization
"""

import csv
import io
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from evotune.errors import StudyError
from evotune.manifest import KERNELS, MANIFEST, Folder, Index, KernelManifest, read_index, to_json
from evotune.report_html import page


@dataclass(frozen=True)
class Dropin:
    """The importable part of an export: `module`.py, and the function in it.

    Its text is our file `source`, the target's own, with the text of each of `shared` in place of the one
    statement that imports from it.
    """

    shared: tuple[str, ...]
    source: str
    module: str
    function: str

    def texts(self) -> dict[str, bytes]:
        """File contents by name."""
        package = (
            f'"""Verified kernels exported by evotune; `{self.module}.py` says how to call them."""\n\n'
            f"from .{self.module} import available, {self.function}\n\n"
            f'__all__ = ["available", "{self.function}"]\n'
        )
        return {f"{self.module}.py": self._whole().encode(), "__init__.py": package.encode(), BYTECODE: b""}

    def _whole(self) -> str:
        """Raises ValueError unless `source` imports from each of `shared` exactly once."""
        here = files("evotune")
        text = here.joinpath(self.source).read_text(encoding="utf-8")
        for shared in self.shared:
            name = shared.removesuffix(".py")
            head, tail = re.split(rf"^from evotune\.{name} import \([^)]*\)\n", text, flags=re.MULTILINE)
            text = f"{head}\n{here.joinpath(shared).read_text(encoding='utf-8')}\n{tail}"
        return text


BYTECODE = "__pycache__"
# By operator and target.
DROPINS = {
    ("kda", "host"): Dropin(("dropin_kda.py",), "dropin_kda_host.py", "kda", "kda_forward"),
    ("kda", "sm_90a"): Dropin(
        ("dropin_frame.py", "dropin_kda.py"), "dropin_kda_sm90a.py", "kda", "kda_forward"
    ),
}
REPORTS = ("pareto.csv", "pareto.html")
_COLUMNS = (
    *("kernel", "candidate", "status", "reason", "branch", "origin", "front", "workload", "group", "time_us"),
    *("speedup", "speedup_low", "speedup_high", "naive_ratio", "naive_low", "naive_high"),
    *("worst_error", "host_call_us", "knobs"),
)


@dataclass(frozen=True)
class Exported:
    """A kernel that held: its manifest and the bytes of every file the manifest names."""

    manifest: KernelManifest
    contents: Mapping[str, bytes]


def write(out: Path, index: Index, kernels: Sequence[Exported], *, force: bool = False) -> None:
    """Make `out`. Raises StudyError when it exists (unless `force` and it is an earlier export), or when the
    disk refuses; then nothing is left behind."""
    refuse_existing(out, force)
    contents = dict(_contents(index, kernels))
    with _becoming(out) as folder:
        for name, data in contents.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())


def refuse_existing(out: Path, force: bool) -> None:
    """Raises StudyError where `write` would; call it before the costly part."""
    if not out.parent.is_dir():
        raise StudyError(f"{out.parent}: no such directory")
    try:
        os.rmdir(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    except OSError as error:
        raise StudyError(f"{out.parent}: cannot be written to: {error.strerror}") from error
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise StudyError(f"{out}: exists and is not a directory")
    if not out.exists():
        return
    if not force:
        raise StudyError(f"{out}: exists; give another --out, or --force to replace an earlier export")
    try:
        with Folder.open(out) as folder:
            read_index(folder)
    except StudyError:
        raise StudyError(f"{out}: is not an export of evotune; --force replaces nothing else") from None


@contextmanager
def _becoming(out: Path) -> Iterator[Path]:
    """A hidden directory beside `out` that takes its place when the body ends well, else is removed."""
    draft = out.parent / f".{out.name}.partial-{os.getpid()}"
    retired = out.parent / f".{out.name}.replaced-{os.getpid()}"
    try:
        draft.mkdir()
        yield draft
        if out.exists():
            out.rename(retired)
        try:
            draft.rename(out)
        except BaseException:
            if retired.exists():
                retired.rename(out)
            raise
    except OSError as error:
        raise StudyError(f"{out}: cannot be written: {error.strerror}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        if out.exists():
            shutil.rmtree(retired, ignore_errors=True)


def _contents(index: Index, kernels: Sequence[Exported]) -> Iterator[tuple[str, bytes]]:
    """Relative path and bytes of every file."""
    for kernel in kernels:
        folder = f"{KERNELS}/{kernel.manifest.id}"
        yield f"{folder}/{MANIFEST}", to_json(kernel.manifest)
        for entry in kernel.manifest.files():
            yield f"{folder}/{entry.name}", kernel.contents[entry.name]
    manifests = [kernel.manifest for kernel in kernels]
    sources = [k.contents[k.manifest.source.name].decode() for k in kernels]
    yield MANIFEST, to_json(index)
    yield "pareto.csv", _csv(index, manifests).encode()
    yield "pareto.html", page(index, manifests, sources).encode()
    if (index.operator, index.target) in DROPINS and kernels:
        yield from dropin(index).texts().items()


def dropin(index: Index) -> Dropin:
    """Raises KeyError for an operator and target that have none."""
    return DROPINS[index.operator, index.target]


def _csv(index: Index, kernels: Iterable[KernelManifest]) -> str:
    text = io.StringIO()
    table = csv.DictWriter(text, _COLUMNS, lineterminator="\n")
    table.writeheader()
    for kernel in kernels:
        table.writerows({name: _cell(value) for name, value in row.items()} for row in _rows(kernel))
    for left in index.left_out:
        row = {"kernel": left.id, "candidate": left.number, "status": "left out", "reason": left.reason}
        table.writerow({name: _cell(value) for name, value in row.items()})
    return text.getvalue()


def _rows(kernel: KernelManifest) -> Iterator[dict[str, object]]:
    common = {
        "kernel": kernel.id,
        "candidate": kernel.number,
        "status": "exported",
        "branch": kernel.branch,
        "origin": kernel.origin,
        "front": kernel.front,
        "worst_error": kernel.evidence.worst_error,
        "host_call_us": kernel.evidence.host_call_us,
        "knobs": json.dumps(kernel.knobs),
    }
    for timing in kernel.evidence.timings:
        speedup, naive = timing.speedup, timing.naive_ratio
        yield {
            **common,
            "workload": timing.workload,
            "group": timing.group,
            "time_us": timing.time_us,
            "speedup": speedup.median,
            "speedup_low": speedup.low,
            "speedup_high": speedup.high,
            "naive_ratio": naive.median,
            "naive_low": naive.low,
            "naive_high": naive.high,
        }


def _cell(value: object) -> object:
    """Text that a spreadsheet would run as a formula is given a quote in front."""
    return f"'{value}" if isinstance(value, str) and value[:1] in "=+-@\t\r" and value else value
