"""The link of a GPU kernel's object: what the result may need and must show."""

import shutil
import subprocess
from pathlib import Path

import pytest

from evotune.fitness import cuda_link
from evotune.fitness.cuda_link import RUNTIME, CudaLinker, why_not_loaded
from evotune.fitness.outcome import Artifact, Failed, Resources
from evotune.fitness.sandbox import Sandbox

GOOD = "int TVMFFIEnvGetStream(int); int __tvm_ffi_kda_forward(int x) { return TVMFFIEnvGetStream(x); }"


@pytest.fixture(scope="module")
def linker(tmp_path_factory: pytest.TempPathFactory) -> CudaLinker:
    """Against a stand-in for the DSL's runtime library."""
    folder = tmp_path_factory.mktemp("runtime")
    folder.chmod(0o755)
    (folder / "runtime.c").write_text("int cuda_dialect_init_library_once(void) { return 0; }")
    path = folder / RUNTIME
    _cc("-shared", "-fPIC", f"-Wl,-soname,{RUNTIME}", str(folder / "runtime.c"), "-o", str(path))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_link, "runtime_library", lambda: path)
        return CudaLinker(Sandbox.detect())


def _cc(*arguments: str) -> None:
    subprocess.run(["cc", *arguments], check=True, capture_output=True)


def compiled(source: str, folder: Path, *flags: str) -> bytes:
    (folder / "kernel.c").write_text(source)
    _cc("-c", "-O1", "-fPIC", *flags, str(folder / "kernel.c"), "-o", str(folder / "kernel.o"))
    return (folder / "kernel.o").read_bytes()


def test_the_library_needs_the_runtime_by_name_alone(linker: CudaLinker, tmp_path: Path) -> None:
    linked = linker.link_bytes(compiled(GOOD, tmp_path), "kda_forward")
    assert isinstance(linked, bytes)
    assert why_not_loaded(linked, "kda_forward") is None
    assert shutil.which("readelf") is not None
    (tmp_path / "kernel.so").write_bytes(linked)
    said = subprocess.run(
        ["readelf", "-dW", str(tmp_path / "kernel.so")], check=True, capture_output=True, text=True
    ).stdout
    needed = [line for line in said.splitlines() if "(NEEDED)" in line]
    assert len(needed) == 1
    assert RUNTIME in needed[0]
    assert "RUNPATH" not in said
    assert "BIND_NOW" in said


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("int other(void) { return 0; }", "it does not export kda_forward"),
        (GOOD + "__attribute__((constructor)) void early(void) {}", "dynamic tag DT_INIT_ARRAY"),
        (GOOD + "__thread int kept = 3; int *where(void) { return &kept; }", "program header of type 7"),
    ],
    ids=["another entry", "constructor", "thread-local data"],
)
def test_what_must_not_be_loaded(linker: CudaLinker, tmp_path: Path, source: str, told: str) -> None:
    found = linker.link_bytes(compiled(source, tmp_path), "kda_forward")
    assert isinstance(found, Failed), "it was linked and let through"
    assert told in found.detail


def test_another_library_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kernel.c").write_text(GOOD + "double sin(double); double f(double x) { return sin(x); }")
    _cc("-shared", "-fPIC", str(tmp_path / "kernel.c"), "-lm", "-nostartfiles", "-o", str(tmp_path / "k.so"))
    told = why_not_loaded((tmp_path / "k.so").read_bytes(), "kda_forward")
    assert told is not None
    assert told.startswith("it needs the library lib")
    assert why_not_loaded(b"no library", "kda_forward") is not None


def test_another_linker_links_anew(
    linker: CudaLinker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library that another linker left beside the object is not taken for this one's."""
    place = tmp_path / "entry"
    place.mkdir()
    (place / "kernel.o").write_bytes(compiled(GOOD, tmp_path))
    artifact = Artifact("d" * 64, place / "kernel.o", "kda_forward", "sm_90a", "dsl", Resources({}), 0.0)
    first = linker.link(artifact)
    assert isinstance(first, Path)
    with monkeypatch.context() as patch:
        patch.setattr(CudaLinker, "link_bytes", lambda *_: pytest.fail("linked again"))
        assert linker.link(artifact) == first
    linked: list[bytes] = []
    with monkeypatch.context() as patch:
        patch.setitem(vars(linker), "version", "GNU ld 9.99")
        patch.setattr(CudaLinker, "link_bytes", lambda *_: linked.append(b"new") or b"new")
        assert linker.link(artifact) == first
    assert linked
    assert first.read_bytes() == b"new"
