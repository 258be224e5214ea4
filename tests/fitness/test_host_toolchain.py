"""The host compiler inside its walls, on hostile and on ordinary source."""

import ctypes
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from evotune.errors import StudyError
from evotune.fitness.host_toolchain import Compiler, HostToolchain, deepest_frame, first_error, trim
from evotune.fitness.inspection import inspect_shared
from evotune.fitness.link import Linker
from evotune.fitness.outcome import Artifact, Failed, Failure, Resources, Stage
from evotune.fitness.sandbox import Limits, Sandbox
from evotune.fitness.toolchain import Compiled, CompileError, read_output
from evotune.search_space.template import Constant, Unit
from tests.fitness.walls import bubblewrap

SHOWN = '__attribute__((visibility("default")))'
ENTRY = f"""
#include <math.h>
{SHOWN} void kernel(float *x, long n) {{
    float part[SIZE];
    for (int i = 0; i < SIZE; i++) part[i] = expf(x[i]);
    for (int i = 0; i < SIZE; i++) x[i] = part[SIZE - 1 - i] * n;
}}
{SHOWN} long kernel_workspace(long n) {{ return n * SIZE; }}
"""


def unit(text: str, constants: Sequence[tuple[str, Constant]] = (("SIZE", 8),)) -> Unit:
    return Unit("c", text, "kernel", tuple(constants))


@pytest.fixture(scope="module")
def walls() -> Sandbox:
    return bubblewrap()


@pytest.fixture(scope="module")
def toolchain(walls: Sandbox) -> HostToolchain:
    return HostToolchain(walls)


def compiled(toolchain: HostToolchain, walls: Sandbox, text: str, limits: Limits | None = None) -> object:
    with walls.scratch() as scratch:
        return toolchain.compile(unit(text), scratch, walls, limits or Limits())


def refusal(
    toolchain: HostToolchain, walls: Sandbox, text: str, limits: Limits | None = None
) -> CompileError:
    found = compiled(toolchain, walls, text, limits)
    assert isinstance(found, CompileError)
    return found


def test_id_names_compiler_flags_and_cpu(toolchain: HostToolchain) -> None:
    for part in (toolchain.version, "-O3 -march=native", "x86_64" if "x86_64" in toolchain.id else "aarch64"):
        assert part in toolchain.id
    assert "-ffast-math" not in toolchain.id


def test_object_is_compiled_inspected_linked_and_runs(
    toolchain: HostToolchain, walls: Sandbox, tmp_path: Path
) -> None:
    made = compiled(toolchain, walls, ENTRY)
    assert isinstance(made, Compiled)
    resources = toolchain.inspect(unit(ENTRY), made)
    assert isinstance(resources, Resources)
    assert resources.values["code_bytes"] > 0
    assert "stack_bytes" in resources.values
    (tmp_path / "kernel.o").write_bytes(made.object)
    artifact = Artifact("d", tmp_path / "kernel.o", "kernel", "host", toolchain.id, resources, 0.1)
    linker = Linker(toolchain, walls)
    path = linker.link(artifact)
    assert isinstance(path, Path)
    assert inspect_shared(path.read_bytes(), "kernel") is None
    library = ctypes.CDLL(str(path))
    values = (ctypes.c_float * 8)(*[0.0] * 8)
    library.kernel(values, ctypes.c_long(3))
    assert list(values) == [3.0] * 8
    assert library.kernel_workspace(ctypes.c_long(2)) == 16


def test_linking_again_reuses_an_intact_library_and_replaces_a_changed_one(
    toolchain: HostToolchain, walls: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = compiled(toolchain, walls, ENTRY)
    assert isinstance(made, Compiled)
    (tmp_path / "kernel.o").write_bytes(made.object)
    artifact = Artifact("d", tmp_path / "kernel.o", "kernel", "host", toolchain.id, Resources(), 0.1)
    linker = Linker(toolchain, walls)
    path = linker.link(artifact)
    assert isinstance(path, Path)
    first = path.read_bytes()
    path.write_bytes(b"swapped")
    assert linker.link(artifact) == path
    assert path.read_bytes() == first
    monkeypatch.setattr(linker, "link_bytes", lambda *_: pytest.fail("linked a third time"))
    assert linker.link(artifact) == path


def test_foreign_call_does_not_pass_the_link(toolchain: HostToolchain, walls: Sandbox) -> None:
    text = "int system(const char *); " + ENTRY.replace("float part", 'system("id"); float part')
    made = compiled(toolchain, walls, text)
    assert isinstance(made, Compiled)
    linked = Linker(toolchain, walls).link_bytes(made.object, "kernel")
    assert isinstance(linked, Failed)
    assert (linked.failure, linked.stage) == (Failure.REFUSED, Stage.INSPECT)
    assert "system" in linked.detail


def test_reductions_vectorise_only_where_asked(toolchain: HostToolchain, walls: Sandbox) -> None:
    plain = "float kernel(float *x) { float s = 0; for (int i = 0; i < 4096; i++) s += x[i]; return s; }"
    asked = plain.replace("for", "\n#pragma omp simd reduction(+:s)\nfor")
    sizes = []
    for text in (plain, asked):
        made = compiled(toolchain, walls, f"{SHOWN} {text}")
        assert isinstance(made, Compiled)
        sizes.append(made.object)
    assert sizes[0] != sizes[1]


def test_error_says_where_and_is_kept_whole(toolchain: HostToolchain, walls: Sandbox) -> None:
    found = refusal(toolchain, walls, "void f(void) {\n  int x = nothing;\n}\n")
    assert found.failed.failure is Failure.BUILD_ERROR
    assert found.failed.stage is Stage.BUILD
    assert found.failed.detail.startswith("kernel.c:2:")
    assert "nothing" in found.failed.detail
    assert found.repeatable
    assert len(found.log) >= len(found.failed.log)


def test_undeclared_function_is_a_build_error(toolchain: HostToolchain, walls: Sandbox) -> None:
    found = refusal(toolchain, walls, "float f(float x) { return fastexp(x); }")
    assert "fastexp" in found.failed.detail


@pytest.mark.parametrize("path", ["/etc/passwd", "/etc/hostname", __file__, "../../etc/passwd"])
@pytest.mark.parametrize(
    "door", ['#include "{}"', '__asm__(".incbin \\"{}\\"");', '__asm__(".include \\"{}\\"");']
)
def test_source_cannot_pull_in_files(toolchain: HostToolchain, walls: Sandbox, path: str, door: str) -> None:
    found = refusal(toolchain, walls, door.format(path) + "\n" + ENTRY)
    assert found.failed.failure is Failure.BUILD_ERROR
    assert "root:" not in found.log
    assert "No such file" in found.log or "file not found" in found.log or "can't open" in found.log


def test_device_that_never_ends_is_bounded(toolchain: HostToolchain, walls: Sandbox) -> None:
    limits = Limits(wall_s=4, memory_bytes=1 << 30)
    found = refusal(toolchain, walls, '__asm__(".incbin \\"/dev/zero\\"");', limits)
    assert found.failed.failure in (Failure.BUILD_ERROR, Failure.TIMEOUT, Failure.OVER_BUDGET)


MACRO_BOMB = "\n".join(
    ["#define A0 1+1+1+1+1+1+1+1+1+1"]
    + [f"#define A{n} {'+'.join([f'A{n - 1}'] * 10)}" for n in range(1, 10)]
    + ["int f(void) { return A9; }"]
)
BOMBS = {
    "macro expansion": MACRO_BOMB,
    "include of itself, twice a level": "#if __INCLUDE_LEVEL__ < 190\n"
    + '#include "kernel.c"\n' * 2
    + "#endif\n",
    "huge initialised array": "const char big[3000000000ul] = {1};",
    "assembler repeats": '__asm__(".rept 400000000\\n.quad 1\\n.endr");',
}


@pytest.mark.parametrize("name", BOMBS)
def test_compiler_bomb_is_bounded(toolchain: HostToolchain, walls: Sandbox, name: str) -> None:
    limits = Limits(wall_s=3, memory_bytes=512 << 20, file_bytes=16 << 20)
    found = refusal(toolchain, walls, BOMBS[name], limits)
    assert found.failed.failure in (Failure.TIMEOUT, Failure.OVER_BUDGET, Failure.BUILD_ERROR)
    assert found.failed.detail


def test_slow_compile_is_a_timeout_that_is_not_remembered(toolchain: HostToolchain, walls: Sandbox) -> None:
    found = refusal(toolchain, walls, ENTRY, Limits(wall_s=0.001))
    assert found.failed.failure is Failure.TIMEOUT
    assert not found.repeatable


def test_flood_of_messages_is_trimmed(toolchain: HostToolchain, walls: Sandbox) -> None:
    text = "\n".join(f'#warning "{"x" * 100} {n}"' for n in range(3000)) + "\n#error the point\n"
    found = refusal(toolchain, walls, text)
    assert "the point" in found.failed.detail
    assert len(found.failed.log.encode()) <= 2000
    assert found.failed.log.count("\n") < 30


GCC_LOG = """In file included from kernel.c:3:
/usr/include/math.h:27:2: warning: deprecated
   27 | #warning x
kernel.c: In function 'kernel':
kernel.c:12:5: error: unknown type name 'vf'
   12 |     vf x;
      |     ^~
kernel.c:10:3: note: declared here
   10 | int y;
kernel.c:14:9: error: expected ';'
"""


def test_trim_keeps_errors_and_their_source_lines() -> None:
    assert trim(GCC_LOG).splitlines() == [
        "kernel.c:12:5: error: unknown type name 'vf'",
        "   12 |     vf x;",
        "      |     ^~",
        "kernel.c:14:9: error: expected ';'",
    ]
    assert first_error(GCC_LOG) == "kernel.c:12:5: unknown type name 'vf'"


def test_trim_keeps_the_end_of_a_log_without_errors() -> None:
    assert trim("a\n" * 50 + "collect2: fatal\n").splitlines()[-1] == "collect2: fatal"
    assert first_error("") == "the compiler failed silently"


def test_deepest_frame_of_a_listing() -> None:
    assert deepest_frame("k.c:1:2:f\t48\tstatic\nk.c:9:2:g\t16640\tdynamic,bounded\nbroken\n") == 16640
    assert deepest_frame("") == 0


def test_compiler_that_does_not_exist_names_the_mend() -> None:
    with pytest.raises(StudyError, match="'nocc' was not found: install gcc"):
        Compiler.find("nocc")


def test_program_that_is_no_compiler_is_told(walls: Sandbox) -> None:
    with pytest.raises(StudyError, match="does not compile a trivial function"):
        HostToolchain(walls, replace(Compiler.at(Path(shutil.which("false") or "/usr/bin/false"))))


@pytest.mark.parametrize("kind", ["link", "fifo", "directory", "large", "missing"])
def test_output_must_be_a_plain_bounded_file(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "kernel.o"
    if kind == "link":
        path.symlink_to("/etc/passwd")
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "large":
        path.write_bytes(bytes(101))
    assert read_output(path, 100) is None


def test_plain_output_is_read(tmp_path: Path) -> None:
    (tmp_path / "kernel.o").write_bytes(bytes(100))
    assert read_output(tmp_path / "kernel.o", 100) == bytes(100)
