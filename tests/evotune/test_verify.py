"""`verify` on honest, broken and hostile directories."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from evotune import bundle, manifest
from evotune.errors import StudyError
from evotune.search_space.template import Unit
from evotune.search_space.templates.kda_host import TEMPLATE
from evotune.verify import Finding, Verification
from evotune.verify import verify as verify_alone
from evotune.workbench import Workbench
from tests.evotune import exports
from tests.search_space.host_kernel import spec

pytestmark = pytest.mark.usefixtures("solved_once")
PLAIN = spec(64, 64)
WRONG = TEMPLATE.source.replace("acc[j][n] += row * q[k + j];", "acc[j][n] += row * q[k + j] * 1.01f;")


def verify(
    directory: Path, *, rebuild: bool = False, say: Callable[[Finding], None] = lambda finding: None
) -> Verification:
    return verify_alone(directory, rebuild=rebuild, say=say, opening=exports.opened)


@pytest.fixture(scope="module")
def bench() -> Workbench:
    return exports.bench()


@pytest.fixture(scope="module")
def build(bench: Workbench) -> Callable[[Unit], tuple[bytes, bytes]]:
    def built(unit: Unit) -> tuple[bytes, bytes]:
        object_ = bench.compile(unit)
        assert isinstance(object_, bytes), object_
        library = bench.link(object_, unit.entry)
        assert isinstance(library, bytes), library
        return object_, library

    return built


@pytest.fixture(scope="module")
def honest(
    bench: Workbench, build: Callable[[Unit], tuple[bytes, bytes]], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("honest")
    kernel = exports.kernel("good", (PLAIN,), folder, build=build, toolchain=bench.toolchain.id)
    index = exports.index([kernel], [exports.workload("w", PLAIN, "good")])
    bundle.write(folder / "pareto", index, [kernel])
    return folder / "pareto"


@pytest.fixture
def copy(honest: Path, tmp_path: Path) -> Path:
    shutil.copytree(honest, tmp_path / "pareto")
    return tmp_path / "pareto"


def problems(directory: Path) -> dict[str, str]:
    return {finding.name: finding.problem for finding in verify(directory).findings if finding.problem}


def test_an_honest_export_holds_and_rebuilds(honest: Path) -> None:
    told: list[Finding] = []
    found = verify(honest, rebuild=True, say=told.append)
    kernel = found.findings[-1]
    assert found.held
    assert list(found.findings) == told
    assert [f.name for f in found.findings] == ["kda.py", "__init__.py", "__pycache__", "good"]
    assert kernel.rebuilt is True
    assert kernel.worst_error is not None
    assert 0 < kernel.worst_error <= 1


def test_a_wrong_kernel_is_named_beside_a_right_one(
    bench: Workbench, build: Callable[[Unit], tuple[bytes, bytes]], tmp_path: Path
) -> None:
    assert TEMPLATE.source != WRONG
    kernels = [
        exports.kernel("bad", (PLAIN,), tmp_path, source=WRONG, build=build),
        exports.kernel("good", (PLAIN,), tmp_path, build=build),
    ]
    bundle.write(tmp_path / "out", exports.index(kernels, [exports.workload("w", PLAIN, "good")]), kernels)
    found = problems(tmp_path / "out")
    assert list(found) == ["bad"]
    assert found["bad"].startswith("wrong at ")


@pytest.mark.parametrize("name", ["kernel.c", f"{PLAIN.label}.o", f"{PLAIN.label}.so", "manifest.json"])
def test_a_changed_file_fails_its_hash(copy: Path, name: str) -> None:
    path = copy / "kernels" / "good" / name
    path.write_bytes(path.read_bytes() + b" ")
    assert "sha256" in problems(copy)["good"]


def test_a_swapped_library_is_found_with_fitting_hashes(copy: Path) -> None:
    """The library is what a user loads: it must be what our linker makes of the object that was judged."""
    library = copy / "kernels" / "good" / f"{PLAIN.label}.so"
    data = bytearray(library.read_bytes())
    data[-1] ^= 1
    library.write_bytes(bytes(data))
    exports.reseal(copy)
    assert "is not what linking" in problems(copy)["good"]


def test_a_swapped_object_is_judged_not_believed(
    copy: Path, build: Callable[[Unit], tuple[bytes, bytes]]
) -> None:
    object_, library = build(TEMPLATE.unit(WRONG, TEMPLATE.default(PLAIN), PLAIN))
    own = copy / "kernels" / "good"
    (own / f"{PLAIN.label}.o").write_bytes(object_)
    (own / f"{PLAIN.label}.so").write_bytes(library)
    exports.reseal(copy)
    assert problems(copy)["good"].startswith("wrong at ")


def wrong_one(copy: Path, build: Callable[[Unit], tuple[bytes, bytes]], **changes: object) -> dict[str, Any]:
    """An entry for a wrong kernel of the good one's specialization, its files beside the good ones."""
    own = copy / "kernels" / "good"
    object_, library = build(TEMPLATE.unit(WRONG, TEMPLATE.default(PLAIN), PLAIN))
    (own / "evil.o").write_bytes(object_)
    (own / "evil.so").write_bytes(library)
    (entry,) = json.loads((own / "manifest.json").read_text())["objects"]
    files = {
        part: entry[part] | {"name": f"evil{end}"} for part, end in (("object", ".o"), ("library", ".so"))
    }
    return dict(entry) | files | changes


def test_a_second_object_of_a_specialization_cannot_hide_behind_the_first(
    copy: Path, build: Callable[[Unit], tuple[bytes, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drop-in would load the first, and the last be judged."""
    evil = wrong_one(copy, build)
    honest = json.loads((copy / "kernels" / "good" / "manifest.json").read_text())["objects"]
    exports.reseal(copy, objects=[evil, *honest])
    assert f"object '{PLAIN.label}' is there twice" in problems(copy)["good"]
    dropin = exports.load_dropin(copy)
    with pytest.raises(RuntimeError, match=f"good has 2 objects {PLAIN.label}"):
        dropin.shipped(dropin.Choice("good", PLAIN.label))
    # Also were the manifest's own look to miss it.
    monkeypatch.setattr(manifest, "_once", lambda kind, names: None)
    assert problems(copy) == {"good": "two of its objects are for the same specialization"}


@pytest.mark.parametrize("label", [f"{PLAIN.label}-2", "bfloat16-K64-V64-plain"])
def test_an_object_under_another_label_is_found(
    copy: Path, build: Callable[[Unit], tuple[bytes, bytes]], label: str
) -> None:
    evil = wrong_one(copy, build, label=label)
    honest = json.loads((copy / "kernels" / "good" / "manifest.json").read_text())["objects"]
    exports.reseal(copy, objects=[evil, *honest])
    assert problems(copy) == {"good": f"object {label} says it is for {PLAIN.label}"}


@pytest.mark.parametrize(
    ("part", "other"), [("library", "object"), ("object", "source"), ("library", "source")]
)
def test_a_file_in_two_parts_is_found(copy: Path, part: str, other: str) -> None:
    data = json.loads((copy / "kernels" / "good" / "manifest.json").read_text())
    (built,) = data["objects"]
    twice = data["source"] if other == "source" else built[other]
    exports.reseal(copy, objects=[built | {part: twice}])
    assert f"file {twice['name']!r} is there twice" in problems(copy)["good"]


def test_an_object_in_place_of_another_is_found(copy: Path, tmp_path: Path) -> None:
    """Two specializations whose libraries are one file: one of them would run the other's code."""
    other = exports.kernel("other", (spec(64, 96),), tmp_path).manifest.objects[0]
    (honest,) = json.loads((copy / "kernels" / "good" / "manifest.json").read_text())["objects"]
    entry = json.loads(other.model_dump_json()) | {part: honest[part] for part in ("object", "library")}
    exports.reseal(copy, objects=[honest, entry])
    assert "is there twice" in problems(copy)["good"]


def test_a_key_given_twice_is_found(copy: Path) -> None:
    """Readers of JSON differ in which of the two they take."""
    path = copy / "kernels" / "good" / "manifest.json"
    path.write_text(path.read_text().replace('"entry":', '"entry": "other", "entry":', 1))
    text = (copy / "manifest.json").read_text()
    old = json.loads(text)["kernels"]["good"]
    (copy / "manifest.json").write_text(text.replace(old, sha256(path.read_bytes()).hexdigest()))
    assert "key 'entry' is there twice" in problems(copy)["good"]
    (copy / "manifest.json").write_text(text.replace('"good":', f'"good": "{"0" * 64}", "good":', 1))
    with pytest.raises(StudyError, match="key 'good' is there twice"):
        verify(copy)


def test_an_object_with_a_constructor_is_refused_before_it_is_linked(copy: Path, tmp_path: Path) -> None:
    from tests.search_space.host_kernel import compile_unit

    evil = TEMPLATE.source + "\n__attribute__((constructor)) static void evil(void) { __builtin_trap(); }\n"
    path = compile_unit(TEMPLATE.unit(evil, TEMPLATE.default(PLAIN), PLAIN), tmp_path)
    (copy / "kernels" / "good" / f"{PLAIN.label}.o").write_bytes(path.read_bytes())
    exports.reseal(copy)
    assert "refused at inspect" in problems(copy)["good"]


def test_a_rebuild_that_differs_is_found(copy: Path) -> None:
    source = copy / "kernels" / "good" / "kernel.c"
    changed = WRONG.encode()
    source.write_bytes(changed)
    entry = {"name": "kernel.c", "sha256": sha256(changed).hexdigest(), "size_bytes": len(changed)}
    exports.reseal(copy, source=entry)
    found = verify(copy, rebuild=True)
    assert "gives another object" in found.findings[-1].problem


@pytest.mark.parametrize("name", ["../../../secret", "/etc/passwd", ".."])
def test_names_cannot_leave_the_directory(copy: Path, name: str) -> None:
    exports.reseal(copy, source={"name": name, "sha256": "0" * 64, "size_bytes": 1})
    assert "source.name" in problems(copy)["good"]


def test_kernel_ids_cannot_leave_the_directory(copy: Path) -> None:
    index = json.loads((copy / "manifest.json").read_text())
    index["kernels"] = {"../../good": "0" * 64}
    (copy / "manifest.json").write_text(json.dumps(index))
    with pytest.raises(StudyError, match="kernels"):
        verify(copy)


def test_links_are_not_followed(copy: Path, tmp_path: Path) -> None:
    own = copy / "kernels" / "good"
    own.rename(tmp_path / "elsewhere")
    own.symlink_to(tmp_path / "elsewhere")
    assert "not a directory of its own" in problems(copy)["good"]
    own.unlink()
    (tmp_path / "elsewhere").rename(own)
    (own / "kernel.c").rename(tmp_path / "kernel.c")
    (own / "kernel.c").symlink_to(tmp_path / "kernel.c")
    assert "cannot be read as a plain file" in problems(copy)["good"]


def test_a_pipe_does_not_hang_it(copy: Path) -> None:
    path = copy / "kernels" / "good" / "kernel.c"
    path.unlink()
    os.mkfifo(path)
    assert "not a regular file" in problems(copy)["good"]


@pytest.mark.parametrize("name", ["kernels/good/kernel.c", "kernels/good/manifest.json", "kda.py"])
def test_a_directory_where_a_file_should_be(copy: Path, name: str) -> None:
    (copy / name).unlink()
    (copy / name).mkdir()
    assert "not a regular file" in str(problems(copy))


def test_a_huge_manifest_is_not_read(copy: Path) -> None:
    with (copy / "manifest.json").open("r+b") as file:
        file.truncate(manifest.MANIFEST_LIMIT + 1)
    with pytest.raises(StudyError, match="larger than"):
        verify(copy)


@pytest.mark.parametrize("name", ["kda.py", "__init__.py"])
def test_a_changed_dropin_is_found(copy: Path, name: str) -> None:
    with (copy / name).open("a") as file:
        file.write("import os\n")
    assert list(problems(copy)) == [name]


@pytest.mark.parametrize("name", ["kda.cpython-311-x86_64-linux-gnu.so", "__pycache__", "kda"])
def test_what_python_would_load_instead_is_found(copy: Path, name: str) -> None:
    (copy / name).unlink(missing_ok=True)
    (copy / name).mkdir()
    assert "in place of the drop-in" in problems(copy)[name]


@pytest.mark.parametrize("how", ["from pareto import available", "sys.path[0] = 'pareto'; import kda"])
def test_an_import_leaves_nothing_that_python_would_trust(copy: Path, how: str) -> None:
    surroundings = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = [sys.executable, "-W", "error", "-c", f"import sys; {how}"]
    for _ in range(2):
        done = subprocess.run(command, cwd=copy.parent, env=surroundings, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
    assert problems(copy) == {}
    (copy / "__pycache__").unlink()
    assert problems(copy) == {}


def test_files_and_kernels_nobody_names_are_found(copy: Path) -> None:
    (copy / "kernels" / "good" / "extra.so").touch()
    (copy / "kernels" / "other").mkdir()
    found = problems(copy)
    assert found == {
        "good": "the manifest does not name extra.so",
        "other": "the index does not name it",
    }


def test_a_dispatch_to_a_kernel_that_is_not_there_is_found(copy: Path) -> None:
    index = json.loads((copy / "manifest.json").read_text())
    index["workloads"][0]["kernel"] = "ghost"
    (copy / "manifest.json").write_text(json.dumps(index))
    assert problems(copy) == {"manifest.json": "workload 'w' goes to a kernel that is not there"}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            {"constants": {"K": 64, "V": 96, "contract": "plain"}},
            f"is of float32-K64-V96-plain and goes to objects of {PLAIN.label}",
        ),
        ({"label": "float32-K64-V96-plain"}, f"is of {PLAIN.label} and goes to objects of float32-K64-V96"),
        ({"dtype": "bfloat16"}, "is of bfloat16-K64-V64-plain and goes to"),
    ],
)
def test_a_dispatch_to_an_object_for_other_problems_is_found(
    copy: Path, change: dict[str, object], problem: str
) -> None:
    index = json.loads((copy / "manifest.json").read_text())
    index["workloads"][0] |= change
    (copy / "manifest.json").write_text(json.dumps(index))
    assert problem in problems(copy)["manifest.json"]


def test_a_dispatch_to_an_object_that_is_not_there_is_found(copy: Path) -> None:
    index = json.loads((copy / "manifest.json").read_text())
    other = spec(64, 96)
    index["workloads"].append(json.loads(exports.workload("x", other, "good").model_dump_json()))
    (copy / "manifest.json").write_text(json.dumps(index))
    assert problems(copy) == {"good": f"has no object {other.label}, which workload 'x' goes to"}


def test_a_scalar_that_the_gate_does_not_judge_with_is_found(copy: Path) -> None:
    """The drop-in would take calls with it, and the gate says nothing of them."""
    index = json.loads((copy / "manifest.json").read_text())
    index["workloads"][0]["scalars"] |= {"scale": 3.0}  # the gate has several: it is free
    (copy / "manifest.json").write_text(json.dumps(index))
    assert problems(copy) == {}
    index["workloads"][0]["scalars"] |= {"lower_bound": -8.0}
    (copy / "manifest.json").write_text(json.dumps(index))
    told = "says lower_bound = -8.0, the gate has lower_bound = -5.0"
    assert problems(copy) == {"good": f"workload 'w' of the index {told}"}
    objects = json.loads((copy / "kernels" / "good" / "manifest.json").read_text())["objects"]
    exports.reseal(copy, objects=[objects[0] | {"scalars": {"lower_bound": -8.0}}])
    assert problems(copy) == {"good": f"object {PLAIN.label} {told}"}


def test_a_workload_twice_is_found(copy: Path) -> None:
    index = json.loads((copy / "manifest.json").read_text())
    index["workloads"] *= 2
    (copy / "manifest.json").write_text(json.dumps(index))
    with pytest.raises(StudyError, match="workload 'w' is there twice"):
        verify(copy)


def test_another_processor_is_named(copy: Path) -> None:
    cpu = manifest.this_cpu().model_dump()
    exports.reseal(copy, cpu=cpu | {"model": "Other 9000", "flags": [*cpu["flags"], "avx9999"]})
    assert "built for Other 9000" in problems(copy)["good"]
    assert "avx9999" in problems(copy)["good"]


@pytest.mark.parametrize(
    "specialization",
    [
        {"operator": "kda", "dtype": "float32", "constants": {"K": 10**9, "V": 64, "contract": "plain"}},
        {"operator": "kda", "dtype": "float32", "constants": {"K": 64, "V": 96, "contract": "plain"}},
        {"operator": "kda", "dtype": "float32", "constants": {}},
    ],
)
def test_specializations_of_an_enemy(copy: Path, specialization: dict[str, object]) -> None:
    own = copy / "kernels" / "good"
    objects = json.loads((own / "manifest.json").read_text())["objects"]
    exports.reseal(copy, objects=[objects[0] | {"specialization": specialization}])
    assert problems(copy)["good"]


@pytest.mark.parametrize(
    ("resembles", "phrase"),
    [
        ({}, ""),
        ({"fla 0.6 (MIT)": 0.43}, "resembles 'fla 0.6 (MIT)' (43% of its new text)"),
        ({"a": 0.1, "b\x1b[2J": 0.2}, r"resembles 'b\x1b[2J' (20% of its new text) and 1 more"),
    ],
)
def test_whose_kernel_one_resembles_is_said(copy: Path, resembles: dict[str, float], phrase: str) -> None:
    """Whoever ships it wants to know whose licence it may be under."""
    exports.reseal(copy, resembles=resembles)
    (found,) = (finding for finding in verify(copy).findings if finding.name == "good")
    assert found.likeness == phrase
    assert found.line.endswith(phrase)
    assert ("resembles" in found.line) == bool(phrase)


@pytest.mark.parametrize("text", ["", "{}", "[]", "\0", '{"format": 1}'])
def test_an_unusable_directory(copy: Path, text: str) -> None:
    (copy / "manifest.json").write_text(text)
    with pytest.raises(StudyError, match="manifest.json"):
        verify(copy)


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match="No such file"):
        verify(tmp_path / "nothing")


def test_an_operator_of_an_enemy_is_not_imported(copy: Path) -> None:
    index = json.loads((copy / "manifest.json").read_text())
    for operator in ("os", "evil"):
        (copy / "manifest.json").write_text(json.dumps(index | {"operator": operator}))
        with pytest.raises(StudyError, match="not known here"):
            verify(copy)
