"""What a compiled kernel may contain, checked before anything of it runs.

An honest kernel is code, constants and calls into libm. Everything else an object can carry runs before the
judge calls it (constructors, IFUNC), outlives a call (writable data, thread-local data), reaches outside
(foreign symbols) or changes the process (executable stack, writable code); each is refused by name. Lists say
what may be there, never what may not.

System-call instructions are not searched for. In a byte stream `0f 05` is also part of displacements and
immediates (1 of 72 honest objects of the host template, gcc 12 and clang 22, has it by such luck), and a
kernel can reach those of libc by counting from the address of memcpy. The wall against them is the judge's
seccomp filter (`seccomp.judge_filter`), which holds whatever the bytes are.
"""

import platform
import re
from dataclasses import dataclass

from evotune.fitness import elf
from evotune.fitness.elf import Elf, ElfError, Section, Symbol
from evotune.fitness.outcome import Failed, Failure, Resources, Stage

_MACHINES = {"x86_64": elf.X86_64, "aarch64": elf.AARCH64}
_SECTION_NAMES = re.compile(
    r"|\.text(\..+)?|\.rodata(\..+)?|\.data|\.bss|\.data\.rel\.ro(\..+)?|\.rela\..+|\.symtab|\.strtab|\.shstrtab"
    r"|\.note\.GNU-stack|\.note\.gnu\.property|\.comment|\.(rela\.)?eh_frame|\.llvm_addrsig"
)
_UNWIND, _ADDRSIG = 0x70000001, 0x6FFF4C03
_SECTION_TYPES = frozenset(
    {elf.NULL, elf.PROGBITS, elf.SYMTAB, elf.STRTAB, elf.RELA, elf.NOTE, elf.NOBITS, _UNWIND, _ADDRSIG}
)
_SYMBOL_TYPES = frozenset({elf.NOTYPE, elf.OBJECT, elf.FUNCTION, elf.SECTION, elf.FILE})
_RESERVED_INDEX = 0xFF00

# Position-independent data and calls; no TLS, IFUNC (IRELATIVE), COPY or absolute 32-bit addresses.
# x86-64 psABI 1.0 table 4.9: NONE 64 PC32 PLT32 GOTPCREL PC64 GOTPC32 GOTPCRELX REX_GOTPCRELX.
# AAELF64: NONE ABS64 PREL64 PREL32, ADR/ADD/LDST page pairs, branches, GOT loads.
_RELOCATIONS = {
    elf.X86_64: frozenset({0, 1, 2, 4, 9, 24, 26, 41, 42}),
    elf.AARCH64: frozenset(
        {0, 257, 260, 261, 275, 277, 278, 279, 280, 282, 283, 284, 285, 286, 299, 311, 312}
    ),
}

_MATH = (
    *("acos", "asin", "atan", "atan2", "cbrt", "ceil", "copysign", "cos", "cosh", "erf"),
    *("erfc", "exp", "exp10", "exp2", "expm1", "fabs", "fdim", "floor", "fma", "fmax"),
    *("fmin", "fmod", "hypot", "ldexp", "log", "log10", "log1p", "log2", "lrint", "lround"),
    *("nearbyint", "pow", "rint", "round", "roundeven", "scalbn", "sin", "sinh", "sqrt", "tan"),
    *("tanh", "trunc"),
)
_SYMBOLS = frozenset(
    [
        "memcpy",
        "memmove",
        "memset",
        "memcmp",
        "_GLOBAL_OFFSET_TABLE_",
        *_MATH,
        *(f"{name}f" for name in _MATH),
    ]
)
# Vector variants in libmvec, by the x86-64 and AArch64 vector function ABIs: _ZGVdN8v_expf.
_VECTOR_SYMBOL = re.compile(r"_ZGV[bcdens][NM](\d+|x)v{1,3}_(?P<scalar>\w+)")

_NEEDED = frozenset({"libm.so.6", "libmvec.so.1"})
_DT_NEEDED, _DT_FLAGS, _DF_TEXTREL = 1, 30, 4
_REFUSED_TAGS = {
    12: "DT_INIT",
    13: "DT_FINI",
    15: "DT_RPATH",
    22: "DT_TEXTREL",
    25: "DT_INIT_ARRAY",
    26: "DT_FINI_ARRAY",
    29: "DT_RUNPATH",
    32: "DT_PREINIT_ARRAY",
    0x6FFFFEFC: "DT_AUDIT",
    0x6FFFFEFB: "DT_DEPAUDIT",
    0x7FFFFFFD: "DT_AUXILIARY",
    0x7FFFFFFF: "DT_FILTER",
}
_PT_INTERP, _PT_TLS, _PT_STACK, _PF_EXECUTE, _PF_WRITE = 3, 7, 0x6474E551, 1, 2


@dataclass(frozen=True)
class _Exports:
    """The two functions a kernel object must define and may show."""

    entry: str

    @property
    def names(self) -> frozenset[str]:
        return frozenset({self.entry, f"{self.entry}_workspace"})


def inspect_object(data: bytes, entry: str) -> Resources | Failed:
    """Check a relocatable object. Resources: `code_bytes`, `rodata_bytes`."""
    try:
        parsed = Elf(data)
        problem = _object_problem(parsed, _Exports(entry))
        sections = parsed.sections
    except ElfError as error:
        problem, sections = str(error), ()
    if problem is not None:
        return refused(problem)
    code = sum(s.size for s in sections if s.flags & elf.EXECUTE)
    constants = sum(
        s.size for s in sections if s.flags & elf.ALLOC and s.name.startswith((".rodata", ".data.rel"))
    )
    return Resources({"code_bytes": code, "rodata_bytes": constants})


def refused(problem: str) -> Failed:
    """The verdict for an object no honest kernel needs."""
    return Failed(Failure.REFUSED, Stage.INSPECT, problem)


def inspect_shared(data: bytes, entry: str) -> str | None:
    """Why a linked shared object must not be loaded, or None."""
    try:
        parsed = Elf(data)
        return _shared_problem(parsed, _Exports(entry))
    except ElfError as error:
        return str(error)


def _object_problem(parsed: Elf, exports: _Exports) -> str | None:
    if parsed.type != elf.REL or parsed.machine != _MACHINES.get(platform.machine()):
        return "not a relocatable object for this machine"
    for section in parsed.sections:
        problem = _section_problem(section)
        if problem:
            return problem
    if not any(section.name == ".note.GNU-stack" for section in parsed.sections):
        return "it does not say that the stack needs no execute permission"
    return _symbols_problem(parsed, exports) or _relocations_problem(parsed)


def _section_problem(section: Section) -> str | None:
    name, flags = section.name, section.flags
    if not _SECTION_NAMES.fullmatch(name) or section.type not in _SECTION_TYPES:
        return f"section {name} (type {section.type:#x}) has no place in a kernel"
    if name == ".note.GNU-stack" and flags & elf.EXECUTE:
        return "it asks for an executable stack"
    if flags & elf.THREAD:
        return f"section {name} is thread-local data"
    if flags & elf.EXECUTE and (flags & elf.WRITE or not name.startswith(".text")):
        return f"section {name} is executable and should not be"
    if name.startswith(".text") and not flags & elf.EXECUTE:
        return f"section {name} has unusual flags {flags:#x}"
    if flags & elf.WRITE and section.size and not name.startswith(".data.rel.ro"):
        return f"{section.size} bytes of writable data in {name}: a kernel keeps nothing between calls"
    return None


def _symbols_problem(parsed: Elf, exports: _Exports) -> str | None:
    defined = set()
    for symbol in parsed.symbols():
        problem = _symbol_problem(symbol, parsed, exports)
        if problem:
            return problem
        shown = symbol.binding == elf.GLOBAL and symbol.visibility in (elf.DEFAULT, elf.PROTECTED)
        if symbol.name in exports.names and symbol.section != elf.UNDEFINED and shown:
            defined.add(symbol.name)
    missing = sorted(exports.names - defined)
    return f"it does not export {missing[0]}" if missing else None


def _symbol_problem(symbol: Symbol, parsed: Elf, exports: _Exports) -> str | None:
    name = symbol.name
    if symbol.type not in _SYMBOL_TYPES or symbol.binding not in (elf.LOCAL, elf.GLOBAL, elf.WEAK):
        return f"symbol {name} has type {symbol.type}, binding {symbol.binding} (IFUNC, TLS or common data)"
    if symbol.section >= _RESERVED_INDEX and symbol.type != elf.FILE:
        return f"symbol {name} is absolute or common data"
    if symbol.section == elf.UNDEFINED:
        return (
            None if allowed_symbol(name) else f"it calls {name}, which is neither in libm nor a memory copy"
        )
    if symbol.type != elf.FILE and symbol.section >= len(parsed.sections):
        return f"symbol {name} lies in no section"
    if symbol.binding == elf.LOCAL or symbol.visibility not in (elf.DEFAULT, elf.PROTECTED):
        return None
    if name not in exports.names:
        return f"it exports {name}; only {', '.join(sorted(exports.names))} may be visible"
    if symbol.type != elf.FUNCTION or not parsed.sections[symbol.section].flags & elf.EXECUTE:
        return f"{name} is not a function"
    return None


def allowed_symbol(name: str) -> bool:
    """Whether a kernel may call it: memory copies, libm, and libmvec's vector variants of libm."""
    vector = _VECTOR_SYMBOL.fullmatch(name)
    return name == "" or (vector["scalar"] if vector else name) in _SYMBOLS


def _relocations_problem(parsed: Elf) -> str | None:
    known = _RELOCATIONS[parsed.machine]
    for relocation in parsed.relocations():
        if relocation.target >= len(parsed.sections):
            return "a relocation patches no section"
        target = parsed.sections[relocation.target]
        if relocation.type not in known:
            return f"relocation type {relocation.type} in {target.name} is not position-independent code"
        if relocation.offset >= target.size:
            return f"a relocation patches bytes outside {target.name}"
    return None


def _shared_problem(parsed: Elf, exports: _Exports) -> str | None:
    if parsed.type != elf.DYN or parsed.machine != _MACHINES.get(platform.machine()):
        return "not a shared object for this machine"
    for segment in parsed.segments:
        if segment.type in (_PT_INTERP, _PT_TLS):
            return f"program header of type {segment.type}"
        if segment.flags & _PF_EXECUTE and (segment.flags & _PF_WRITE or segment.type == _PT_STACK):
            return "memory that is writable and executable"
    if not any(segment.type == _PT_STACK for segment in parsed.segments):
        return "no word about the stack's permissions"
    for tag, value in parsed.dynamic():
        if tag in _REFUSED_TAGS or (tag == _DT_FLAGS and value & _DF_TEXTREL):
            return f"dynamic tag {_REFUSED_TAGS.get(tag, 'DF_TEXTREL')}"
        if tag == _DT_NEEDED and parsed.dynamic_name(value) not in _NEEDED:
            return f"it needs the library {parsed.dynamic_name(value)}"
    for symbol in parsed.symbols(elf.DYNSYM):
        shown = symbol.section != elf.UNDEFINED and symbol.name not in exports.names
        if shown or (symbol.section == elf.UNDEFINED and not allowed_symbol(symbol.name)):
            return f"symbol {symbol.name}"
    return None
