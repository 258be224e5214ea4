"""A strict reader of little-endian ELF64: sections, symbols, relocations, segments, the dynamic table.

Written for hostile input: every offset is checked against the file, nothing is followed twice, and the only
exception is `ElfError`. Layouts: ELF-64 Object File Format 1.5, and elf(5).
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

REL, DYN = 1, 3  # e_type
X86_64, AARCH64 = 62, 183  # e_machine
NULL, PROGBITS, SYMTAB, STRTAB, RELA, NOTE, NOBITS, DYNAMIC, DYNSYM = 0, 1, 2, 3, 4, 7, 8, 6, 11
WRITE, ALLOC, EXECUTE, THREAD = 1, 2, 4, 0x400  # sh_flags
UNDEFINED = 0  # st_shndx
LOCAL, GLOBAL, WEAK = 0, 1, 2
NOTYPE, OBJECT, FUNCTION, SECTION, FILE, INDIRECT = 0, 1, 2, 3, 4, 10  # the last: STT_GNU_IFUNC
DEFAULT, PROTECTED = 0, 3  # visibility

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_RELA = struct.Struct("<QQq")
_DYNAMIC = struct.Struct("<qQ")
_MAX_NAME = 4096  # the DSL writes argument types into the names of kernels


class ElfError(ValueError):
    """Not a well-formed ELF64 file."""


@dataclass(frozen=True)
class Section:
    """One section header; `name` resolved."""

    index: int
    name: str
    type: int
    flags: int
    offset: int
    size: int
    link: int
    info: int


@dataclass(frozen=True)
class Symbol:
    """One symbol; `section` is its st_shndx."""

    name: str
    binding: int
    type: int
    visibility: int
    section: int
    value: int
    size: int


@dataclass(frozen=True)
class Relocation:
    """One RELA entry; `target` is the index of the section it patches."""

    target: int
    offset: int
    type: int


@dataclass(frozen=True)
class Segment:
    """One program header."""

    type: int
    flags: int


class Elf:
    """A parsed file. Raises ElfError on construction or on first use of a malformed part."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        fields = self._unpack(_HEADER, 0)
        self.type, self.machine = fields[1], fields[2]
        if data[:7] != b"\x7fELF\x02\x01\x01":
            raise ElfError("not a little-endian ELF64 file")
        self._segments_at, self._sections_at = fields[5], fields[6]
        self._segment_size, self._segment_count = fields[9], fields[10]
        self._section_size, self._section_count, self._names_index = fields[11:]

    def _unpack(self, layout: struct.Struct, offset: int) -> tuple[int, ...]:
        if offset < 0 or offset + layout.size > len(self.data):
            raise ElfError(f"a header at byte {offset} lies outside the file")
        return layout.unpack_from(self.data, offset)

    def _name(self, table: Section, offset: int) -> str:
        start, end = table.offset + offset, table.offset + table.size
        stop = self.data.find(b"\0", start, min(end, start + _MAX_NAME))
        if table.type != STRTAB or stop < 0:
            raise ElfError("a name lies outside its string table or is too long")
        try:
            return self.data[start:stop].decode("ascii")
        except UnicodeDecodeError:
            raise ElfError("a name is not ASCII") from None

    @cached_property
    def sections(self) -> tuple[Section, ...]:
        if self._section_count and self._section_size != _SECTION.size:
            raise ElfError("section headers of an unknown size")
        raw = [
            self._unpack(_SECTION, self._sections_at + index * _SECTION.size)
            for index in range(self._section_count)
        ]
        unnamed = [
            Section(index, "", fields[1], fields[2], fields[4], fields[5], fields[6], fields[7])
            for index, fields in enumerate(raw)
        ]
        for section in unnamed:
            if section.type not in (NULL, NOBITS) and section.offset + section.size > len(self.data):
                raise ElfError("a section lies outside the file")
        if self._names_index >= len(unnamed):
            raise ElfError("no section names")
        names = unnamed[self._names_index]
        return tuple(
            Section(s.index, self._name(names, fields[0]), s.type, s.flags, s.offset, s.size, s.link, s.info)
            for s, fields in zip(unnamed, raw, strict=True)
        )

    def content(self, section: Section) -> bytes:
        """The bytes of a section; empty for one that takes no room in the file."""
        if section.type in (NULL, NOBITS):
            return b""
        return self.data[section.offset : section.offset + section.size]

    def _entries(self, section: Section, layout: struct.Struct) -> Iterator[tuple[int, ...]]:
        if section.size % layout.size:
            raise ElfError(f"section {section.name} is cut off")
        return layout.iter_unpack(self.content(section))

    def symbols(self, kind: int = SYMTAB) -> tuple[Symbol, ...]:
        """Of all tables of a kind (SYMTAB or DYNSYM), null symbols left out."""
        found = []
        for section in self.sections:
            if section.type != kind:
                continue
            if section.link >= len(self.sections):
                raise ElfError("a symbol table without names")
            names = self.sections[section.link]
            entries = list(self._entries(section, _SYMBOL))
            for name, info, other, index, value, size in entries[1:]:
                text = self._name(names, name)
                found.append(Symbol(text, info >> 4, info & 15, other & 3, index, value, size))
        return tuple(found)

    def relocations(self) -> tuple[Relocation, ...]:
        return tuple(
            Relocation(section.info, offset, info & 0xFFFFFFFF)
            for section in self.sections
            if section.type == RELA
            for offset, info, _ in self._entries(section, _RELA)
        )

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        if self._segment_count and self._segment_size != _SEGMENT.size:
            raise ElfError("program headers of an unknown size")
        found = []
        for index in range(self._segment_count):
            kind, flags, *_ = self._unpack(_SEGMENT, self._segments_at + index * _SEGMENT.size)
            found.append(Segment(kind, flags))
        return tuple(found)

    def dynamic(self) -> tuple[tuple[int, int], ...]:
        """(tag, value) pairs up to the terminating one."""
        found = []
        for section in self.sections:
            if section.type == DYNAMIC:
                for tag, value in self._entries(section, _DYNAMIC):
                    if tag == 0:
                        break
                    found.append((tag, value))
        return tuple(found)

    def dynamic_name(self, offset: int) -> str:
        """A string of the dynamic string table, such as the name of a needed library."""
        for section in self.sections:
            if section.type == DYNAMIC and section.link < len(self.sections):
                return self._name(self.sections[section.link], offset)
        raise ElfError("no dynamic string table")
