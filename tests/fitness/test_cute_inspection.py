"""What is refused of a GPU's object, without the DSL at hand; `redteam/test_corpus.py` forges real ones."""

import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from evotune.fitness.cute_inspection import why_refused
from evotune.fitness.elf import REL, Elf

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


def device(*sections: tuple[str, int]) -> bytes:
    """An ELF file for a GPU with empty sections of these names and types, and an empty symbol table."""
    names = ["", ".shstrtab", ".strtab", ".symtab", *(name for name, _ in sections)]
    kinds = [0, 3, 3, 2, *(kind for _, kind in sections)]
    table = b"\0".join(name.encode() for name in names) + b"\0"
    at = 64 + len(table)
    headers = b""
    for number, (name, kind) in enumerate(zip(names, kinds, strict=True)):
        offset, size = (64, len(table)) if kind == 3 else (64, 24 if number == 3 else 0)
        link = 2 if number == 3 else 0
        start = 0 if not name else table.index(b"\0" + name.encode() + b"\0") + 1
        headers += struct.pack("<IIQQQQIIQQ", start, kind, 0, 0, offset, size, link, 0, 0, 0)
    head = struct.pack(
        "<16sHHIQQQIHHHHHH", b"\x7fELF\x02\x01\x01", 2, 190, 1, 0, 0, at, 0, 64, 56, 0, 64, len(names), 1
    )
    return head + table + headers


def fatbin(image: bytes, compressed: int = 0) -> bytes:
    entry = struct.pack("<HHIQII", 2, 0x101, 72, len(image), compressed, 0).ljust(72, b"\0") + image
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entry)) + entry


HONEST = """
#define CODE __attribute__((section(".ltext")))
extern int TVMFFIEnvGetStream(void);
__attribute__((section(".lrodata"), used)) static const unsigned char kernels_binary[] = {%s};
CODE int __tvm_ffi_kda_forward(void) { return TVMFFIEnvGetStream(); }
"""


def built(folder: Path, image: bytes, more: str = "", source: str = HONEST) -> bytes:
    """As the DSL lays it out, but for what gcc cannot leave away."""
    text = source % ",".join(map(str, image)) + more
    (folder / "kernel.c").write_text(text)
    flags = ("-c", "-O1", "-fPIC", "-fcf-protection=none", "-fno-ident", "-fno-asynchronous-unwind-tables")
    command = ["cc", *flags, str(folder / "kernel.c"), "-o", str(folder / "kernel.o")]
    subprocess.run(command, check=True, capture_output=True)
    subprocess.run(
        ["objcopy", "-R", ".text", "-R", ".data", "-R", ".bss", str(folder / "kernel.o")], check=True
    )
    return (folder / "kernel.o").read_bytes()


GOOD = device((".text.k", 1), (".nv.constant0.k", 1))


def test_what_the_dsl_lays_out_is_let_pass(tmp_path: Path) -> None:
    data = built(tmp_path, fatbin(GOOD))
    assert Elf(data).type == REL
    assert why_refused(data, "kda_forward") is None


@pytest.mark.parametrize(
    ("image", "more", "told"),
    [
        (fatbin(GOOD), "extern int _cudaMalloc(void); int (*f)(void) = _cudaMalloc;", "symbols: _cudaMalloc"),
        (fatbin(GOOD), "CODE int other(void) { return 0; }", "it exports other"),
        (
            fatbin(GOOD),
            '__attribute__((section(".lbss"))) int __cute_internal_kda_forward_k[9];',
            "writable data",
        ),
        (
            fatbin(GOOD),
            'CODE __attribute__((constructor)) static void early(void) { __asm__(""); }',
            "run code when",
        ),
        (fatbin(GOOD, 5), "", "not one uncompressed image"),
        (fatbin(GOOD)[:-1], "", "not one uncompressed image"),
        (fatbin(b"\x7fELF" + bytes(60)), "", "for no GPU"),
        (bytes(20), "", "cut off"),
        (fatbin(GOOD + fatbin(GOOD)), "", "device code beside"),
        (fatbin(device((".nv.global", 8))), "", "outlive a launch (.nv.global)"),
        (fatbin(device((".nv.constant3", 1))), "", "section .nv.constant3 has no place"),
    ],
)
def test_what_it_does_not_lay_out_is_refused(tmp_path: Path, image: bytes, more: str, told: str) -> None:
    said = why_refused(built(tmp_path, image, more), "kda_forward")
    assert said is not None
    assert told in said


def test_what_is_no_object_is_refused(tmp_path: Path) -> None:
    assert why_refused(b"", "kda_forward") is not None
    assert "not an object" in str(why_refused(b"\x7fELF" + bytes(50), "kda_forward"))
    data = built(tmp_path, fatbin(GOOD))
    assert "does not export other" in str(why_refused(data, "other"))
    assert "0 images" in str(why_refused(data.replace(b"kernels_binary", b"kernels_memory"), "kda_forward"))
