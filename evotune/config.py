"""study.toml → `StudyConfig`: read once, checked whole, frozen. Nobody downstream sees a missing value.

Every key is documented in `experiments/reference.toml`, which a test loads. The tables [build], [gate],
[timing] and [promotion] have the fields of the dataclasses that the judge and the loop work with.
"""

import dataclasses
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from evotune.errors import StudyError
from evotune.fitness.build import BuildPlan
from evotune.fitness.gate import GateLimits
from evotune.fitness.timing import TimingPlan
from evotune.mutators.client import LlmSettings
from evotune.plugins import SAMPLERS, nearest
from evotune.promotion import PromotionPlan

# What may differ when a study is resumed: how far it goes and where it lies, never what it measures.
MAY_CHANGE = frozenset(
    {"study.trials", "study.time_limit_s", "study.directory", "mutation.llm.max_cost_usd", "build.cache_mib"}
)
_T = TypeVar("_T")
_RULES = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class _Table(BaseModel):
    model_config = _RULES


def _table_of(limits: type[Any], above: float | None = None) -> type[BaseModel]:
    """A table with the fields, types and defaults of a frozen dataclass; dataclasses inside become tables.

    Numbers must be greater than `above`, or within the bounds (ge, gt, le, lt) of their field's metadata.
    """
    hints = get_type_hints(limits)
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(limits):
        kind = hints[field.name]
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            table = _table_of(kind, above)
            fields[field.name] = (table, Field(default_factory=table))
        elif get_origin(kind) is Mapping:
            fields[field.name] = (dict[*get_args(kind)], Field(default_factory=dict))  # type: ignore[misc]
        else:
            bounds = field.metadata or ({"gt": above} if kind in (int, float) else {})
            fields[field.name] = (kind, Field(default=field.default, **bounds))
    model: type[BaseModel] = create_model(limits.__name__, __config__=_RULES, **fields)
    return model


def _fill(limits: type[_T], table: BaseModel) -> _T:
    """The dataclass that a table made by `_table_of` stands for."""
    values = {}
    for name, value in table:
        inner = get_type_hints(limits)[name]
        values[name] = _fill(inner, value) if isinstance(value, BaseModel) else value
    return limits(**values)


class StudyTable(_Table):
    """[study]"""

    name: str = Field(pattern=r"^[^/\x00-\x1f\x7f]+$")
    template: str
    device: str = ""
    seed: int = Field(default=0, ge=0)
    trials: int = Field(default=200, gt=0)
    time_limit_s: float | None = Field(default=None, gt=0)
    directory: str = ""
    storage: str = ""


class SearchTable(_Table):
    """[search]"""

    sampler: str = "pool"
    batch: int = Field(default=8, gt=0, le=1024)
    ahead: bool = False
    warmup: int = Field(default=6, gt=0)


class MutationTable(_Table):
    """[mutation]"""

    operators: list[str] = Field(default_factory=list)
    every: int = Field(default=30, ge=0)
    stagnation: int = Field(default=40, ge=0)
    max_branches: int = Field(default=8, gt=0)
    llm: _table_of(LlmSettings) | None = None  # type: ignore[valid-type]


class ObjectivesTable(_Table):
    """[objectives]"""

    names: list[str] = Field(default=["speedup", "error", "complexity", "host_call"], min_length=1)


_BUILD, _GATE, _TIMING = (_table_of(limits, above=0) for limits in (BuildPlan, GateLimits, TimingPlan))
_PROMOTION = _table_of(PromotionPlan, above=0)


class StudyConfig(_Table):
    """A whole study.toml. `workload` tables are the operator's to read."""

    study: StudyTable
    search: SearchTable = SearchTable()
    mutation: MutationTable = MutationTable()
    objectives: ObjectivesTable = ObjectivesTable()
    workload: list[dict[str, Any]] = Field(min_length=1)
    build: _BUILD = Field(default_factory=_BUILD)  # type: ignore[valid-type]
    gate: _GATE = Field(default_factory=_GATE)  # type: ignore[valid-type]
    timing: _TIMING = Field(default_factory=_TIMING)  # type: ignore[valid-type]
    promotion: _PROMOTION = Field(default_factory=_PROMOTION)  # type: ignore[valid-type]

    @property
    def build_plan(self) -> BuildPlan:
        return _fill(BuildPlan, self.build)

    @property
    def gate_limits(self) -> GateLimits:
        return _fill(GateLimits, self.gate)

    @property
    def llm_settings(self) -> LlmSettings:
        """Raises StudyError when there is no [mutation.llm] or its keys do not fit together."""
        if self.mutation.llm is None:
            raise StudyError("[mutation] operators has llm, so [mutation.llm] is needed")
        return _fill(LlmSettings, self.mutation.llm)

    @property
    def timing_plan(self) -> TimingPlan:
        return _fill(TimingPlan, self.timing)

    @property
    def promotion_plan(self) -> PromotionPlan:
        return _fill(PromotionPlan, self.promotion)

    def as_json(self) -> dict[str, Any]:
        """Every key with its value, defaults included; `parse` takes it back."""
        return self.model_dump(mode="json")


def load(path: Path, overrides: Mapping[str, Any] | None = None) -> StudyConfig:
    """Read a study file. `overrides` by dotted key ("study.trials") win over the file; None leaves it.

    Raises StudyError, one line for every fault.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise StudyError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise StudyError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise StudyError(f"{path} is not TOML: {error}") from error
    if not tables:
        raise StudyError(f"{path} is empty; `python -m evotune init` writes a commented study file")
    for dotted, value in (overrides or {}).items():
        if value is not None:
            table, key = dotted.split(".")
            section = tables.setdefault(table, {})
            if isinstance(section, dict):
                section[key] = value
    return parse(tables, str(path))


def parse(tables: Mapping[str, Any], where: str) -> StudyConfig:
    """Check tables as tomllib gives them. Raises StudyError, one line for every fault, naming `where`."""
    try:
        config = StudyConfig.model_validate(tables)
    except ValidationError as error:
        raise StudyError("\n".join(f"{where}: {line}" for line in _faults(error))) from error
    if config.search.sampler not in SAMPLERS:
        near = nearest(config.search.sampler, SAMPLERS)
        raise StudyError(f"{where}: [search] no sampler named {config.search.sampler}; {near}")
    operators = config.mutation.operators
    if "llm" in operators or config.mutation.llm is not None:
        try:
            _ = config.llm_settings
        except StudyError as error:
            raise StudyError(f"{where}: {error}") from error
    if operators and not config.mutation.every and not config.mutation.stagnation:
        raise StudyError(f"{where}: [mutation] every and stagnation are both 0, so no operator is ever asked")
    return config


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """What a resumed study may not change: "search.batch 4 → 8" for each key that differs."""
    old, new = dict(_flat(before)), dict(_flat(after))
    keys = [key for key in {**old, **new} if key not in MAY_CHANGE and old.get(key) != new.get(key)]
    return [f"{key} {old.get(key)!r} → {new.get(key)!r}" for key in keys]


def _flat(tables: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tables.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _faults(error: ValidationError) -> Iterator[str]:
    for fault in error.errors(include_url=False):
        *tables, key = fault["loc"]
        place = ".".join(str(part) for part in tables if not isinstance(part, int))
        head = f"[{place}] " if place else ""
        if fault["type"] == "extra_forbidden":
            yield f"{head}unknown key {key}; {nearest(str(key), _keys(tables))}"
        elif fault["type"] == "missing":
            is_table = not tables
            yield f"{head}the {'table' if is_table else 'key'} {key} is missing"
        else:
            told = fault["msg"].removeprefix("Input ")
            yield f"{head}{key} {told}, but is {fault['input']!r}"


def _keys(tables: list[int | str]) -> list[str]:
    """Keys that the table at a path may have."""
    model: type[BaseModel] = StudyConfig
    for part in tables:
        annotation = model.model_fields[str(part)].annotation
        options = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
        model = next(o for o in options if isinstance(o, type) and issubclass(o, BaseModel))
    return list(model.model_fields)
