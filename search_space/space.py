"""Knobs and the legal configurations they span.

A template's knobs are a frozen dataclass whose fields are made by `knob`. `Space` walks the grid of their
choices; what is legal only the template says (`Template.why_not`), for every specialization at once, because
one set of knobs serves all workloads of a study.

Inside this package a configuration is often a `Cell`: the index of each knob's value among its choices.
"""

import dataclasses
import difflib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from evotune.errors import LegalityError, StudyError
from evotune.search_space.template import Constant, Specialization, Template

Cell = tuple[int, ...]

# Grids up to this size are listed once, so that sampling is exact however rare legal cells are; at 1–3 µs a
# call of why_not this costs at most half a second. Larger grids are sampled by rejection.
_LISTED_GRID = 100_000
_REJECTION_TRIES = 200_000
_SHARE_DRAWS = 4096


def knob(default: Constant, *, choices: Sequence[Constant], doc: str) -> Any:
    """A field of a knob dataclass.

    Args:
        default: the value a competent first version would take; one of `choices`.
        choices: the values in their natural order, small to large where there is one: samplers step along it.
        doc: one line for people and for the LLM.
    """
    if len(set(choices)) != len(choices):
        raise ValueError(f"choices repeat a value: {list(choices)}")
    if default not in choices:
        raise ValueError(f"default {default!r} is not among the choices {list(choices)}")
    return dataclasses.field(default=default, metadata={"choices": tuple(choices), "doc": doc})


def choices_of(knobs: type[Any]) -> dict[str, tuple[Constant, ...]]:
    """Ordered choices by knob name, in field order. Raises TypeError for a field not made by `knob`."""
    found: dict[str, tuple[Constant, ...]] = {}
    for field in dataclasses.fields(knobs):
        if "choices" not in field.metadata:
            raise TypeError(f"{knobs.__name__}.{field.name} was not made by knob()")
        found[field.name] = field.metadata["choices"]
    return found


class Space:
    """The grid of a template's knobs and its legal part for a set of specializations.

    Attributes:
        names: knob names in field order.
        choices: for each knob its values in natural order.
        size: cells of the whole grid, legal or not.
    """

    def __init__(self, template: Template, specs: Sequence[Specialization]) -> None:
        if not specs:
            raise ValueError("a space needs at least one specialization")
        grid = choices_of(template.knobs)
        self.template = template
        self.specs = tuple(specs)
        self.names = tuple(grid)
        self.choices = tuple(grid.values())
        self.size = math.prod(len(values) for values in self.choices)
        self._known: dict[Cell, bool] = {}
        self._listed: list[Cell] | None = None
        self._rank = [{value: i for i, value in enumerate(values)} for values in self.choices]
        self._span = np.array([max(len(values) - 1, 1) for values in self.choices], dtype=np.float64)

    def why_not(self, knobs: Any) -> str | None:
        """The first specialization's reason against these knobs, or None when all allow them."""
        for spec in self.specs:
            reason = self.template.why_not(knobs, spec)
            if reason is not None:
                return reason
        return None

    def is_legal(self, cell: Cell) -> bool:
        known = self._known.get(cell)
        if known is None:
            known = self._known[cell] = self.why_not(self.at(cell)) is None
        return known

    def at(self, cell: Cell) -> Any:
        """The template's knobs at a cell."""
        values = (options[i] for options, i in zip(self.choices, cell, strict=True))
        return self.template.knobs(**dict(zip(self.names, values, strict=True)))

    def cell(self, knobs: Any) -> Cell:
        """Inverse of `at`. Raises StudyError for a value that is not among the choices."""
        return self._cell({name: getattr(knobs, name) for name in self.names})

    def default(self) -> Any:
        """The template's first default that is legal for all specializations; else the first legal cell."""
        for spec in self.specs:
            knobs = self.template.default(spec)
            if self.why_not(knobs) is None:
                return knobs
        return next(self.legal(1))

    def legal(self, limit: int | None = None) -> Iterator[Any]:
        """Legal knobs in grid order, the last knob fastest. Raises LegalityError when there is none."""
        cells = itertools.product(*(range(len(values)) for values in self.choices))
        found = 0
        for cell in cells:
            if limit is not None and found == limit:
                return
            if self.is_legal(cell):
                found += 1
                yield self.at(cell)
        if not found:
            raise self._nothing_legal()

    def sample(self, rng: np.random.Generator) -> Any:
        """Legal knobs, uniformly. Raises LegalityError when none is legal, or none met in 200,000 draws."""
        return self.at(self.sample_cells(rng, 1)[0])

    def sample_cells(self, rng: np.random.Generator, count: int) -> list[Cell]:
        """`count` legal cells, drawn independently and uniformly; repeats are possible."""
        if self.size <= _LISTED_GRID:
            listed = self._list()
            return [listed[i] for i in rng.integers(len(listed), size=count)]
        found: list[Cell] = []
        widths = [len(values) for values in self.choices]
        for _ in range(0, _REJECTION_TRIES, 256):
            block = rng.integers(widths, size=(256, len(widths))).tolist()
            legal = (cell for cell in map(tuple, block) if self.is_legal(cell))
            found.extend(itertools.islice(legal, count - len(found)))
            if len(found) == count:
                return found
        if not found:
            raise self._nothing_legal()
        return [found[i] for i in rng.integers(len(found), size=count)]

    def neighbours(self, knobs: Any) -> list[Any]:
        """Legal knobs that differ in one knob, by any amount, in a fixed order."""
        return [self.at(cell) for cell in self.neighbour_cells(self.cell(knobs))]

    def neighbour_cells(self, cell: Cell) -> list[Cell]:
        found = []
        for axis, options in enumerate(self.choices):
            for i in range(len(options)):
                other = (*cell[:axis], i, *cell[axis + 1 :])
                if i != cell[axis] and self.is_legal(other):
                    found.append(other)
        return found

    def legal_count(self) -> int | None:
        """How many configurations are legal; None for a grid too large to list."""
        return len(self._list()) if self.size <= _LISTED_GRID else None

    def legal_share(self) -> float:
        """Part of the grid that is legal: exact where it is listed, else of 4,096 draws, always the same."""
        if self.size <= _LISTED_GRID:
            return len(self._list()) / self.size
        widths = [len(values) for values in self.choices]
        drawn = np.random.default_rng(0).integers(widths, size=(_SHARE_DRAWS, len(widths))).tolist()
        return sum(self.why_not(self.at(tuple(cell))) is None for cell in drawn) / _SHARE_DRAWS

    def to_vector(self, knobs: Any) -> npt.NDArray[np.float64]:
        """Ordinal coordinates in [0, 1], one per knob; for models that want numbers."""
        return np.array(self.cell(knobs), dtype=np.float64) / self._span

    def encode(self, knobs: Any) -> dict[str, Constant]:
        """JSON-ready values by name."""
        return {name: getattr(knobs, name) for name in self.names}

    def decode(self, values: Mapping[str, Any]) -> Any:
        """Knobs from `encode`'s form; legality is not asked.

        Raises StudyError for an unknown or missing knob or a value that is not among the choices.
        """
        unknown = next((name for name in values if name not in self.names), None)
        if unknown is not None:
            near = difflib.get_close_matches(unknown, self.names, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(self.names)}"
            raise StudyError(f"{self.template.name} has no knob {unknown}; {hint}")
        missing = [name for name in self.names if name not in values]
        if missing:
            raise StudyError(f"{self.template.name}: no value for knob {missing[0]}")
        return self.at(self._cell(values))

    def _cell(self, values: Mapping[str, Any]) -> Cell:
        cell = []
        for name, ranks, options in zip(self.names, self._rank, self.choices, strict=True):
            value = values[name]
            i = ranks.get(value) if isinstance(value, int | float | str) else None
            if i is None or type(options[i]) is not type(value):
                raise StudyError(
                    f"knob {name} cannot be {value!r}; choices are {', '.join(map(repr, options))}"
                )
            cell.append(i)
        return tuple(cell)

    def _list(self) -> list[Cell]:
        if self._listed is None:
            cells = itertools.product(*(range(len(values)) for values in self.choices))
            self._listed = [cell for cell in cells if self.is_legal(cell)]
        if not self._listed:
            raise self._nothing_legal()
        return self._listed

    def _nothing_legal(self) -> LegalityError:
        first = self.at((0,) * len(self.names))
        labels = ", ".join(spec.label for spec in self.specs)
        return LegalityError(
            f"no configuration of {self.template.name} is legal for {labels}; "
            f"the first of {self.size} fails because: {self.why_not(first)}"
        )
