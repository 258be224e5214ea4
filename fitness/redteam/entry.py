"""One kernel of a corpus: what it is, how it is made, and what has to become of it.

For the host a kernel is C source: the corpus's own (`frame.c` round `token_loop.c` or `chunk_form.c`) or the
host template, after some small edits. For Hopper it is one of the two templates' source after such edits. An
edit that no longer fits its source is an error, never skipped.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any, Literal

from evotune.fitness.outcome import Failure, Stage
from evotune.search_space.branch import Branch, Candidate
from evotune.search_space.template import Specialization, Template
from evotune.search_space.templates import kda_host, kda_sm90, kda_sm90_chunked

Base = Literal["token_loop", "chunk_form", "template", "sm90", "sm90_chunked"]
_HOPPER: Mapping[Base, Template] = {"sm90": kda_sm90.TEMPLATE, "sm90_chunked": kda_sm90_chunked.TEMPLATE}

BEFORE = frozenset({Stage.BUILD, Stage.INSPECT})
"""What needs no device: a build in its sandbox, then the inspection of the object and of its link."""
BUILD, INSPECT, SMOKE, EDGES, REGIMES, LAWS, INTEGRITY, TIME = (frozenset({stage}) for stage in Stage)


HOPPER_IO: Mapping[str, Any] = MappingProxyType({"dtype": "bfloat16", "contract": "production"})
"""What kernels for Hopper are tried on unless they say otherwise."""
FINAL_STATE = "        self.final_state(mFinal, first, rS, sS, tx)\n"
"""Where the token template writes its final state: what several entries edit."""


class Kind(StrEnum):
    """A mutant is wrong by mistake, a cheat on purpose, a variant is honest and different."""

    MUTANT = "mutant"
    CHEAT = "cheat"
    VARIANT = "variant"


@dataclass(frozen=True)
class Edit:
    """Text that occurs once in a source, and what takes its place."""

    old: str
    new: str

    def apply(self, source: str) -> str:
        """Raises ValueError unless `old` occurs exactly once."""
        count = source.count(self.old)
        if count != 1:
            raise ValueError(f"{self.old!r} occurs {count} times in the source it edits")
        return source.replace(self.old, self.new)


@dataclass(frozen=True)
class Entry:
    """One kernel.

    Attributes:
        why: what it does, in a line.
        caught: the stage that must stop it first: a rung of the gate, or build, inspect, time. Empty for
            variants.
        luck: why it may be one of several stages, where it may; "" for all others.
        failures: what it may fail as; empty: whatever.
        evolve: numbers of the catalogue of known cheats (see `coverage`) that it stands for.
        knobs: of the template, where `base` is one.
        may_pass: a trick that is honest where it does not work: it counts as accepted only if it pays.
        told: what the failure must say, so that a trick is not caught for a slip of its own; "" for anything.
    """

    name: str
    kind: Kind
    why: str
    base: Base = "token_loop"
    edits: tuple[Edit, ...] = ()
    caught: frozenset[Stage] = frozenset()
    failures: frozenset[Failure] = frozenset()
    evolve: tuple[int, ...] = ()
    knobs: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    dtype: str = "float32"
    contract: str = "plain"
    may_pass: bool = False
    told: str = ""
    luck: str = ""

    @property
    def template(self) -> Template:
        return _HOPPER.get(self.base, kda_host.TEMPLATE)

    @property
    def target(self) -> str:
        return self.template.target

    @property
    def needs_device(self) -> bool:
        """Whether more than a build and an inspection decides what becomes of it."""
        return not self.caught or not self.caught <= BEFORE

    @property
    def source(self) -> str:
        """Raises ValueError when an edit does not fit."""
        source = base_source(self.base)
        for edit in self.edits:
            source = edit.apply(source)
        return source

    def candidate(self, spec: Specialization) -> Candidate:
        knobs = replace(self.template.default(spec), **self.knobs)
        refusal = self.template.why_not(knobs, spec)
        if refusal is not None:
            raise ValueError(f"{self.name}: {refusal}")
        return Candidate(Branch(self.name, self.source, None, "redteam", self.why), knobs)


@cache
def base_source(base: Base) -> str:
    if base == "template" or base in _HOPPER:
        return _HOPPER.get(base, kda_host.TEMPLATE).source
    here = files("evotune.fitness.redteam")
    frame, core = (here.joinpath(f"{name}.c").read_text(encoding="utf-8") for name in ("frame", base))
    return Edit("/* CORE */\n", core).apply(frame)


def edits(*pairs: tuple[str, str]) -> tuple[Edit, ...]:
    return tuple(Edit(*pair) for pair in pairs)
