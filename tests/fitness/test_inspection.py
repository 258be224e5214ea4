"""Objects a hostile or careless source compiles to; every one must be named and refused, honest ones not."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evotune.fitness.elf import Elf, ElfError
from evotune.fitness.inspection import allowed_symbol, inspect_object, inspect_shared
from evotune.fitness.outcome import Failed, Failure, Resources, Stage

SHOWN = '__attribute__((visibility("default")))'
HONEST = f"""
#include <math.h>
#include <string.h>
static const float table[4] = {{1, 2, 3, 4}};
static const char *const names[2] = {{"a", "b"}};
{SHOWN} void kernel(float *x, long n) {{
    for (long i = 0; i < n; i++) x[i] = expf(x[i]) * table[i & 3] + names[i & 1][0];
    memset(x, 0, 4);
}}
{SHOWN} long kernel_workspace(long n) {{ return n; }}
"""

Build = Callable[..., bytes]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    folder = tmp_path_factory.mktemp("objects")

    def compile_text(text: str, *flags: str) -> bytes:
        (folder / "k.c").write_text(text)
        command = ["cc", "-std=gnu11", "-O2", "-w", "-fPIC", "-fvisibility=hidden", "-fno-stack-protector"]
        subprocess.run([*command, *flags, "-c", "k.c", "-o", "k.o"], cwd=folder, check=True)
        return (folder / "k.o").read_bytes()

    return compile_text


@pytest.fixture(scope="module")
def honest(build: Build) -> bytes:
    return build(HONEST)


def test_honest_object_has_resources(build: Build) -> None:
    found = inspect_object(build(HONEST), "kernel")
    assert isinstance(found, Resources)
    assert found.values["code_bytes"] > 20
    assert found.values["rodata_bytes"] >= 16 + 16


HOSTILE = {
    "constructor": (".init_array", '__attribute__((constructor)) static void early(void) { __asm__(""); }'),
    "destructor": (".fini_array", '__attribute__((destructor)) static void late(void) { __asm__(""); }'),
    "init section": (".init (", '__asm__(".section .init,\\"ax\\"\\nnop\\n.text");'),
    "preinit": (".preinit_array", '__asm__(".section .preinit_array,\\"aw\\"\\n.quad 0\\n.text");'),
    "ctors": (".ctors", '__asm__(".section .ctors,\\"aw\\"\\n.quad 0\\n.text");'),
    "ifunc": (
        "IFUNC",
        'static void *pick(void) { return 0; } void other(void) __attribute__((ifunc("pick")));',
    ),
    "thread-local": (".tbss", "__thread int kept; int *where(void) { return &kept; }"),
    "global state": ("writable data in .data", "int calls = 1; int *where(void) { return &calls; }"),
    "static state": ("writable data in .bss", "int next(void) { static int calls; return calls++; }"),
    "common data": ("common data", '__attribute__((visibility("default"), common)) int shared;'),
    "executable stack": (
        "executable stack",
        '__asm__(".section .note.GNU-stack,\\"x\\",@progbits\\n.text");',
    ),
    "writable code": (
        ".text.w is executable",
        '__asm__(".section .text.w,\\"awx\\",@progbits\\nnop\\n.text");',
    ),
    "code in data": (
        ".data.rel.ro.x is executable",
        '__asm__(".section .data.rel.ro.x,\\"ax\\",@progbits\\nnop\\n.text");',
    ),
    "foreign call": ("calls puts", 'int puts(const char *); void say(void) { puts("x"); }'),
    "system call wrapper": ("calls syscall", "long syscall(long, ...); void now(void) { syscall(1); }"),
    "dlopen": ("calls dlopen", 'void *dlopen(const char *, int); void now(void) { dlopen("x", 1); }'),
    "foreign call by a vector name": (
        "calls _ZGVdN8v_system",
        'void v(void) __asm__("_ZGVdN8v_system"); void now(void) { v(); }',
    ),
    "extra export": ("exports write", f"{SHOWN} void write(void) {{}}"),
    "weak export": ("exports malloc", f"{SHOWN} __attribute__((weak)) void malloc(void) {{}}"),
    "absolute symbol": ("spot is absolute", '__asm__(".globl spot\\nspot = 0x1234");'),
    "linker instruction": (
        ".gnu.warning",
        '__asm__(".section .gnu.warning.x,\\"\\"\\n.ascii \\"a\\"\\n.text");',
    ),
    "interpreter": (".interp", '__asm__(".section .interp,\\"a\\"\\n.asciz \\"/tmp/x\\"\\n.text");'),
    "link-time code": (".gnu.lto", '__asm__(".section .gnu.lto_x,\\"\\"\\n.ascii \\"a\\"\\n.text");'),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_no_honest_kernel_needs_is_refused(build: Build, name: str) -> None:
    reason, text = HOSTILE[name]
    found = inspect_object(build(HONEST + text), "kernel")
    assert isinstance(found, Failed), name
    assert (found.failure, found.stage) == (Failure.REFUSED, Stage.INSPECT)
    assert reason in found.detail


def test_missing_and_misplaced_entries_are_refused(build: Build) -> None:
    for text in (
        f"{SHOWN} void kernel(void) {{}}",
        f"{SHOWN} void kernel(void) {{}} long kernel_workspace(long n) {{ return n; }}",
        f"{SHOWN} const int kernel = 1; {SHOWN} long kernel_workspace(long n) {{ return n; }}",
        f'{SHOWN} const char kernel[] = "\\xc3"; {SHOWN} long kernel_workspace(long n) {{ return n; }}',
        f"void kernel(void); {SHOWN} long kernel_workspace(long n) {{ kernel(); return n; }}",
    ):
        assert isinstance(inspect_object(build(text), "kernel"), Failed), text


def test_code_that_is_not_position_independent_is_refused(build: Build) -> None:
    text = f'{SHOWN} const char *kernel(long i) {{ return "abc" + i; }}'
    text += f"{SHOWN} long kernel_workspace(long n) {{ return n; }}"
    found = inspect_object(build(text, "-fno-pic", "-mcmodel=medium", "-fno-pie"), "kernel")
    assert isinstance(found, Failed)
    assert "relocation" in found.detail


def test_silence_about_the_stack_is_refused(build: Build, tmp_path: Path) -> None:
    (tmp_path / "k.o").write_bytes(build(HONEST))
    subprocess.run(["objcopy", "-R", ".note.GNU-stack", "k.o"], cwd=tmp_path, check=True)
    found = inspect_object((tmp_path / "k.o").read_bytes(), "kernel")
    assert isinstance(found, Failed)
    assert "stack" in found.detail


@pytest.mark.parametrize(
    "name", ["expf", "exp2f", "memcpy", "_ZGVeN16v_expf", "_ZGVdN8vv_powf", "_ZGVnN4v_logf"]
)
def test_mathematics_may_be_called(name: str) -> None:
    assert allowed_symbol(name)


@pytest.mark.parametrize(
    "name", ["system", "printf", "_ZGVdN8v_system", "__tls_get_addr", "getenv", "exp_", "mmap"]
)
def test_anything_else_may_not(name: str) -> None:
    assert not allowed_symbol(name)


def test_what_is_not_an_object_is_refused(build: Build) -> None:
    honest = build(HONEST)
    program = Path("/bin/true").read_bytes()
    for data in (b"", b"\x7fELF", b"#!/bin/sh\n", honest[:64], honest[: len(honest) // 2], program):
        assert isinstance(inspect_object(data, "kernel"), Failed)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_damaged_objects_never_break_the_reader(honest: bytes, data: st.DataObject) -> None:
    image = bytearray(honest)
    headers = len(image) - 64 * 16
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(
            st.one_of(
                st.integers(0, 63),
                st.integers(max(0, headers), len(image) - 1),
                st.integers(0, len(image) - 1),
            )
        )
        image[at] = data.draw(st.integers(0, 255))
    assert isinstance(inspect_object(bytes(image), "kernel"), Failed | Resources)
    try:
        parsed = Elf(bytes(image))
        parsed.dynamic(), parsed.segments  # noqa: B018
    except ElfError:
        pass


def shared(build: Build, folder: Path, *flags: str) -> bytes:
    """Linked without the care that `evotune.fitness.link` takes."""
    (folder / "k.o").write_bytes(build(HONEST))
    subprocess.run(
        ["cc", "-shared", *flags, "k.o", "-o", "k.so"], cwd=folder, check=True, capture_output=True
    )
    return (folder / "k.so").read_bytes()


BARE = ("-nostartfiles", "-nostdlib")


def test_carefully_linked_object_may_be_loaded(build: Build, tmp_path: Path) -> None:
    assert inspect_shared(shared(build, tmp_path, *BARE, "-Wl,--as-needed", "-lm"), "kernel") is None


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("-lm",), "DT_INIT"),
        ((*BARE, "-Wl,--no-as-needed", "-lm", "-lc"), "libc.so.6"),
        ((*BARE, "-lm", "-Wl,-rpath,/tmp"), "DT_R"),
        ((*BARE, "-lm", "-Wl,-z,execstack"), "executable"),
        ((*BARE, "-lm", "-Wl,-init,kernel"), "DT_INIT"),
        ((*BARE, "-lm", "-Wl,--omagic"), "executable"),
        ((*BARE, "-lm", "-Wl,--audit,/tmp/x.so"), "DT_AUDIT"),
    ],
)
def test_careless_link_is_refused(build: Build, tmp_path: Path, flags: tuple[str, ...], reason: str) -> None:
    problem = inspect_shared(shared(build, tmp_path, *flags), "kernel")
    assert problem is not None
    assert reason in problem
