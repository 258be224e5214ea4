"""An exported directory appears whole or not at all, and shows what models wrote as text."""

import csv
import errno
import json
import os
from html.parser import HTMLParser
from pathlib import Path

import pytest

from evotune import bundle, manifest
from evotune.errors import StudyError
from tests.evotune import exports
from tests.search_space.host_kernel import spec

PLAIN = spec(64, 64)
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>"


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> bundle.Exported:
    timings = (exports.timing("short", "long", 12.0), exports.timing("packs", "ragged", 30.0))
    return exports.kernel("k1", (PLAIN,), tmp_path_factory.mktemp("k"), note=HOSTILE, timings=timings)


def index(kernel: bundle.Exported, left_out: tuple[manifest.LeftOut, ...] = ()) -> manifest.Index:
    return exports.index([kernel], [exports.workload(n, PLAIN, "k1") for n in ("short", "packs")], left_out)


def test_layout_and_hashes(kernel: bundle.Exported, tmp_path: Path) -> None:
    out = tmp_path / "pareto"
    bundle.write(out, index(kernel), [kernel])
    files = {str(p.relative_to(out)) for p in out.rglob("*") if p.is_file()}
    assert files == {
        *("__init__.py", "__pycache__", "kda.py", "manifest.json", "pareto.csv", "pareto.html"),
        *(f"kernels/k1/{n}" for n in ("manifest.json", "kernel.c", f"{PLAIN.label}.o", f"{PLAIN.label}.so")),
    }
    with manifest.Folder.open(out) as folder:
        found = manifest.read_index(folder)
        with folder.folder("kernels") as kernels, kernels.folder("k1") as own:
            read = manifest.read_kernel(own, "k1", found.kernels["k1"])
            assert read == kernel.manifest
            assert [own.checked(entry) for entry in read.files()] == [
                kernel.contents[entry.name] for entry in read.files()
            ]


def test_an_existing_directory_is_kept(kernel: bundle.Exported, tmp_path: Path) -> None:
    out = tmp_path / "pareto"
    bundle.write(out, index(kernel), [kernel])
    with pytest.raises(StudyError, match="--force"):
        bundle.write(out, index(kernel), [kernel])
    (out / "stale").touch()
    bundle.write(out, index(kernel), [kernel], force=True)
    assert not (out / "stale").exists()
    assert os.listdir(tmp_path) == ["pareto"]


def test_force_replaces_nothing_but_an_export(kernel: bundle.Exported, tmp_path: Path) -> None:
    precious = tmp_path / "home" / "thesis.tex"
    precious.parent.mkdir()
    precious.touch()
    with pytest.raises(StudyError, match="is not an export"):
        bundle.write(precious.parent, index(kernel), [kernel], force=True)
    with pytest.raises(StudyError, match="not a directory"):
        bundle.write(precious, index(kernel), [kernel], force=True)
    with pytest.raises(StudyError, match="no such directory"):
        bundle.write(tmp_path / "no" / "pareto", index(kernel), [kernel])
    assert precious.exists()


def test_a_read_only_directory_is_refused_before_the_costly_part(tmp_path: Path) -> None:
    """/proc, since root may write everywhere else."""
    with pytest.raises(StudyError, match="/proc: cannot be written to"):
        bundle.refuse_existing(Path("/proc/pareto"), force=False)
    bundle.refuse_existing(tmp_path / "pareto", force=False)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("trouble", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("existing", [False, True])
def test_nothing_half_written_is_left(
    kernel: bundle.Exported,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    trouble: BaseException,
    existing: bool,
) -> None:
    """The third file meets a full disk or Ctrl-C."""
    out = tmp_path / "pareto"
    if existing:
        bundle.write(out, index(kernel), [kernel])
    before = (out / "manifest.json").read_bytes() if existing else b""
    syncs: list[int] = []

    def fsync(fd: int) -> None:
        syncs.append(fd)
        if len(syncs) == 3:
            raise trouble

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(StudyError if isinstance(trouble, OSError) else KeyboardInterrupt):
        bundle.write(out, index(kernel), [kernel], force=True)
    assert os.listdir(tmp_path) == (["pareto"] if existing else [])
    if existing:
        assert (out / "manifest.json").read_bytes() == before
        with manifest.Folder.open(out) as folder:
            assert manifest.read_index(folder).kernels


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.attributes += attrs


def test_what_a_model_wrote_is_text(kernel: bundle.Exported, tmp_path: Path) -> None:
    left = manifest.LeftOut(id="k2", number=3, reason=HOSTILE)
    bundle.write(tmp_path / "pareto", index(kernel, (left,)), [kernel])
    page = (tmp_path / "pareto" / "pareto.html").read_text()
    tags = Tags()
    tags.feed(page)
    assert page.count("&lt;script&gt;") >= 2
    assert not tags.names & {"script", "img", "iframe", "link", "object"}
    assert not [name for name, _ in tags.attributes if name.startswith("on")]
    assert ("http-equiv", "Content-Security-Policy") in tags.attributes
    assert "default-src 'none'" in page
    assert "http://" not in page
    assert "https://" not in page


def test_csv_has_a_row_for_each_workload_and_each_kernel_left_out(
    kernel: bundle.Exported, tmp_path: Path
) -> None:
    left = manifest.LeftOut(id="k2", number=3, reason="=HYPERLINK() wrong at edges")
    bundle.write(tmp_path / "pareto", index(kernel, (left,)), [kernel])
    with (tmp_path / "pareto" / "pareto.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(r["kernel"], r["status"], r["workload"]) for r in rows] == [
        ("k1", "exported", "short"),
        ("k1", "exported", "packs"),
        ("k2", "left out", ""),
    ]
    assert rows[2]["reason"] == "'=HYPERLINK() wrong at edges"
    assert float(rows[0]["time_us"]) == 12.0
    assert (rows[0]["speedup_low"], rows[0]["speedup_high"]) == ("1.8", "2.3")
    assert json.loads(rows[0]["knobs"]) == kernel.manifest.knobs


def test_an_empty_front_is_still_reported(tmp_path: Path) -> None:
    left = manifest.LeftOut(id="k2", number=3, reason="wrong at laws")
    bundle.write(tmp_path / "pareto", exports.index([], [], (left,)), [])
    assert "wrong at laws" in (tmp_path / "pareto" / "pareto.html").read_text()
    assert not (tmp_path / "pareto" / "kda.py").exists()


class TestFolder:
    def test_reads_nothing_but_plain_files_inside(self, tmp_path: Path) -> None:
        (tmp_path / "inside").mkdir()
        (tmp_path / "secret").write_text("x")
        inside = tmp_path / "inside"
        (inside / "link").symlink_to("../secret")
        (inside / "folder").symlink_to("..")
        os.mkfifo(inside / "pipe")
        (inside / "big").write_bytes(b"x" * 101)
        (inside / "good").write_bytes(b"x" * 100)
        with manifest.Folder.open(inside) as folder:
            assert len(folder.read("good", 100)) == 100
            for name in ("link", "pipe", "big", "absent", "folder"):
                with pytest.raises(StudyError):
                    folder.read(name, 100)
            for name in ("../secret", "/etc/passwd", "..", ".", "", ".hidden", "a/b", "a\0b", "a\n"):
                with pytest.raises(StudyError, match="not a plain file name"):
                    folder.read(name, 100)
            with pytest.raises(StudyError, match="not a directory of its own"), folder.folder("folder"):
                pass

    @pytest.mark.parametrize(
        "text",
        [
            "{",
            "[" * 100_000,
            "null",
            '{"format": "evotune-pareto/2"}',
            json.dumps({"format": "evotune-pareto/1", "surprise": 1}),
        ],
    )
    def test_refuses_what_is_no_index(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "manifest.json").write_text(text)
        with manifest.Folder.open(tmp_path) as folder, pytest.raises(StudyError, match="manifest.json: "):
            manifest.read_index(folder)

    def test_refuses_names_that_leave_the_directory(self, kernel: bundle.Exported) -> None:
        text = manifest.to_json(kernel.manifest).decode()
        for name in ("../kernel.c", "/etc/passwd", "a/b.c", ".."):
            hostile = text.replace('"name": "kernel.c"', f'"name": "{name}"')
            assert hostile != text
            with pytest.raises(StudyError, match="source.name"):
                manifest.parse(manifest.KernelManifest, hostile.encode(), "m")
