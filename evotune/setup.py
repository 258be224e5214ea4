"""From a checked study file to the parts that work together."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evotune.config import StudyConfig, parse
from evotune.controller import Settings
from evotune.errors import StudyError
from evotune.fitness.evaluation import Evaluator
from evotune.fitness.objectives import Column, Objective, columns, objective
from evotune.fitness.operator import Operator, Workload, specialization
from evotune.mutators.mutator import Mutator
from evotune.plugins import DEVICES, MUTATORS, OPERATORS, TEMPLATES, load
from evotune.promotion import PromotionPlan
from evotune.search_space.space import Space
from evotune.search_space.template import Specialization, Template


@dataclass(frozen=True)
class Setup:
    """A study that could run.

    Attributes:
        base: directory of the study file.
        directory: where the study lies.
        workloads: in the order of the file; names are unique.
        columns: Optuna's directions in order.
        unsafe: judge without a sandbox where none can be raised; a matter of the machine, not of the study.
    """

    config: StudyConfig
    base: Path
    directory: Path
    template: Template
    operator: Operator
    workloads: tuple[Workload, ...]
    objectives: tuple[Objective, ...]
    columns: tuple[Column, ...]
    space: Space
    unsafe: bool = False

    @property
    def specializations(self) -> tuple[Specialization, ...]:
        return tuple(dict.fromkeys(specialization(self.operator, w) for w in self.workloads))

    @property
    def settings(self) -> Settings:
        study, search, mutation = self.config.study, self.config.search, self.config.mutation
        return Settings(
            seed=study.seed,
            batch=search.batch,
            warmup=search.warmup,
            operators=tuple(mutation.operators),
            every=mutation.every,
            stagnation=mutation.stagnation,
            max_branches=mutation.max_branches,
            trials=study.trials,
        )

    @property
    def promotion(self) -> PromotionPlan:
        return self.config.promotion_plan

    @property
    def storage_url(self) -> str:
        """Optuna storage other than the study's own journal file; "" for that."""
        return self.config.study.storage


def resolve(config: StudyConfig, base: Path) -> Setup:
    """Find what the names stand for and check that the parts fit.

    Raises StudyError (LegalityError when no configuration is legal); nothing is written.
    """
    template: Template = load(config.study.template, TEMPLATES, "template")
    operator: Operator = load(template.operator, OPERATORS, "operator")
    workloads = tuple(_workload(operator, i, table) for i, table in enumerate(config.workload, start=1))
    _refuse_twins(workloads)
    for name in config.mutation.operators:
        load(name, MUTATORS, "mutation operator")
    objectives = tuple(objective(name) for name in config.objectives.names)
    groups = tuple(dict.fromkeys(workload.group for workload in workloads))
    specs = tuple(dict.fromkeys(specialization(operator, w) for w in workloads))
    space = Space(template, specs)
    space.default()
    return Setup(
        config=config,
        base=base,
        directory=directory_of(config, base),
        template=template,
        operator=operator,
        workloads=workloads,
        objectives=objectives,
        columns=columns(objectives, groups),
        space=space,
    )


def directory_of(config: StudyConfig, base: Path) -> Path:
    """[study] directory, from the study file's own; by default "<name>.study" beside the file."""
    return base / (config.study.directory or f"{config.study.name}.study")


def from_header(tables: Mapping[str, Any], base: str, directory: Path) -> Setup:
    """The setup of a study that lies in a directory, from the first record of its journal."""
    config = parse(tables, str(directory))
    found = resolve(config, Path(base))
    return Setup(**{**vars(found), "directory": directory})


def evaluator(setup: Setup) -> Evaluator:
    """The device's judge, ready. Raises DeviceError when the device is not on this machine."""
    make: Callable[[Setup], Evaluator] = load(
        setup.config.study.device or setup.template.target, DEVICES, "device"
    )
    return make(setup)


def mutators(setup: Setup) -> dict[str, Mutator]:
    """The operators of [mutation] by the name they have there."""
    makers: Sequence[tuple[str, Callable[[Setup], Mutator]]] = [
        (name, load(name, MUTATORS, "mutation operator")) for name in setup.config.mutation.operators
    ]
    return {name: make(setup) for name, make in makers}


def _workload(operator: Operator, number: int, table: Mapping[str, Any]) -> Workload:
    try:
        return operator.workload(table)
    except StudyError as error:
        raise StudyError(f"[[workload]] number {number}: {error}") from error


def _refuse_twins(workloads: Sequence[Workload]) -> None:
    names = [workload.name for workload in workloads]
    twin = next((name for i, name in enumerate(names) if name in names[:i]), None)
    if twin is not None:
        raise StudyError(f"two workloads are named {twin}; a name must be unique")
