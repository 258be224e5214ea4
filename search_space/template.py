"""What a template is: source with evolvable stages, typed knobs, one statement of legality.

A template is blind to devices and to the mathematics. It turns (branch source, knobs, specialization) into a
`Unit`, the text and constants that a toolchain compiles.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Literal, Protocol

Constant = int | float | str
Language = Literal["c", "cute"]


def digest(*parts: str | bytes) -> str:
    """SHA-256 of the parts, each preceded by its length, so that ("ab", "c") differs from ("a", "bc")."""
    h = sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        h.update(len(data).to_bytes(8, "big"))
        h.update(data)
    return h.hexdigest()


@dataclass(frozen=True)
class Specialization:
    """The facts of a problem that an object is compiled for: one object per specialization.

    Attributes:
        operator: name of the operator, such as "kda".
        dtype: io dtype, "float32" or "bfloat16".
        constants: sorted (name, value) pairs; for KDA: K, V (head dims) and contract ("plain", "production").
    """

    operator: str
    dtype: str
    constants: tuple[tuple[str, Constant], ...]

    def __getitem__(self, name: str) -> Constant:
        return dict(self.constants)[name]

    def integer(self, name: str) -> int:
        """The constant as an int; raises TypeError when it is not one."""
        value = self[name]
        if not isinstance(value, int):
            raise TypeError(f"constant {name} of {self.operator} is {value!r}, not an integer")
        return value

    @property
    def label(self) -> str:
        """Short and unique within an operator, fit for a file name: "float32-K128-V128-plain"."""
        parts = [f"{name}{value}" if isinstance(value, int) else str(value) for name, value in self.constants]
        return "-".join([self.dtype, *sorted(parts)])


@dataclass(frozen=True)
class Unit:
    """What a toolchain compiles; `digest` names the result together with target and toolchain.

    Attributes:
        language: "c" (constants become `-DNAME=VALUE`) or "cute" (constants go to the module's `build`).
        text: the whole source.
        entry: the function the object exports. A C object also exports `<entry>_workspace`.
        constants: sorted (NAME, value) pairs, knobs and specialization together.
        debug: also write named intermediates.
    """

    language: Language
    text: str
    entry: str
    constants: tuple[tuple[str, Constant], ...]
    debug: bool = False

    @property
    def digest(self) -> str:
        constants = [f"{name}={value!r}" for name, value in self.constants]
        return digest(self.language, self.text, self.entry, str(self.debug), *constants)


class Template(Protocol):
    """One parameterised kernel. `knobs` is a frozen dataclass whose fields are made by `space.knob`."""

    @property
    def name(self) -> str: ...

    @property
    def operator(self) -> str:
        """Name of the operator it computes, such as "kda"."""
        ...

    @property
    def target(self) -> str:
        """The target it compiles for: "host" or "sm_90a"."""
        ...

    @property
    def language(self) -> Language: ...

    @property
    def knobs(self) -> type[Any]: ...

    @property
    def source(self) -> str:
        """Source of the seed branch, stages between EVOLVE markers (see `branch`)."""
        ...

    def default(self, spec: Specialization) -> Any:
        """What a competent first version would choose."""
        ...

    def why_not(self, knobs: Any, spec: Specialization) -> str | None:
        """The reason these knobs are illegal for this specialization, or None. The only statement of it."""
        ...

    def budget(self, knobs: Any, spec: Specialization) -> Mapping[str, int]:
        """Predicted resources (bytes, registers, threads), computed without a compiler."""
        ...

    def unit(self, source: str, knobs: Any, spec: Specialization, *, debug: bool = False) -> Unit: ...

    def layouts(self, knobs: Any, spec: Specialization) -> str:
        """Readable memory layouts and thread mapping, for `show N --layouts`."""
        ...
