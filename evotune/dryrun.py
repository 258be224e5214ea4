"""`run --dry-run`: sample legal configurations of a study, build and inspect them, with no device.

Nothing is run, so nothing is known of speed or correctness, and nothing here pretends to: the Optuna study
"<name>-dry-run" that the dashboard shows has resources as its objectives, the largest over a configuration's
specializations. A study of its own, because a sampler must not learn speed from registers, and because Optuna
fixes a study's objectives when it is made.
"""

import itertools
import json
import os
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from evotune.errors import StudyError
from evotune.fitness.cute_toolchain import CuteToolchain, ptx_digest
from evotune.fitness.host_toolchain import Compiler, HostToolchain
from evotune.fitness.outcome import Failed, Resources, Stage
from evotune.fitness.sandbox import Limits, Sandbox
from evotune.fitness.toolchain import Compiled, Toolchain
from evotune.journal import writing
from evotune.plugins import nearest
from evotune.search_space.branch import SEED_BRANCH
from evotune.search_space.space import Space
from evotune.search_space.template import Constant, Specialization, Unit, digest
from evotune.setup import Setup
from evotune.trials import quiet, storage_at

if TYPE_CHECKING:
    from optuna.storages import BaseStorage
    from rich.table import Table

# The objectives of the Optuna study by target, and whether more is better.
_OBJECTIVES: Mapping[str, Mapping[str, bool]] = {
    "sm_90a": {"registers": False, "shared_bytes": False, "blocks_per_sm": True},
    "host": {"code_bytes": False, "stack_bytes": False},
}
# Functions (sandbox, name of the C compiler or "") -> Toolchain.
TOOLCHAINS: Mapping[str, Callable[[Sandbox, str], Toolchain]] = {
    "host": lambda sandbox, compiler: HostToolchain(sandbox, Compiler.find(compiler or None)),
    "sm_90a": lambda sandbox, compiler: CuteToolchain(),
}
BUILD_LIMITS = Limits(wall_s=60.0)
FILE = "dry-run.json"
_MOST = 40
_SHOWN = ("registers", "spill_bytes", "shared_bytes", "blocks_per_sm", "stack_bytes", "code_bytes")
_MARK = "evotune dry run"
_CELLS = 2000  # drawn to estimate which part of the grid is legal: ± 2 % at two standard errors


@dataclass(frozen=True)
class Inspected:
    """One configuration built for one specialization.

    Attributes:
        number: of the configuration, 0 for the template's default.
        predicted: the template's budget, before any compiler ran.
        resources: read from the object; empty when it was not built or refused.
        failure, stage, detail, log: why there are no resources; empty strings otherwise.
        twin: an earlier configuration with the same code for the same specialization, or None.
    """

    number: int
    knobs: Mapping[str, Constant]
    specialization: str
    predicted: Mapping[str, int]
    resources: Mapping[str, int]
    build_s: float
    failure: str = ""
    stage: str = ""
    detail: str = ""
    log: str = ""
    twin: int | None = None


@dataclass(frozen=True)
class Legality:
    """What part of the grid of all knob values is legal.

    Attributes:
        share: legal part of `drawn` cells, drawn uniformly.
        reasons: (reason, cells) of the others, numbers masked, most frequent first.
    """

    grid: int
    drawn: int
    share: float
    reasons: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class DryRun:
    """All of one dry run."""

    study: str
    template: str
    target: str
    toolchain: str
    legality: Legality
    rows: tuple[Inspected, ...]

    @property
    def failures(self) -> tuple[Inspected, ...]:
        return tuple(row for row in self.rows if row.failure)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def command(setup: Setup, *, as_json: bool) -> None:
    """`run --dry-run`: a line that counts while it builds, then the table and a summary, or JSON.

    Builds as many configurations as the study has trials, at most 40. Raises as `run` does.
    """
    from rich.console import Console

    console = Console(stderr=as_json)
    count = min(setup.config.study.trials, _MOST)
    with console.status(f"building {count} configurations") as line:
        built = itertools.count(1)
        total = count * len(setup.space.specs)
        found = run(setup, count, on_row=lambda row: line.update(f"{next(built)} of {total} objects"))
    if as_json:
        sys.stdout.write(json.dumps(found.as_json(), indent=1) + "\n")
        return
    console.print(table(found))
    console.print(summary(found), highlight=False)
    console.print(f"recorded as study {found.study}-dry-run and in {setup.directory / FILE}", highlight=False)


def run(setup: Setup, count: int, *, on_row: Callable[[Inspected], None] = lambda row: None) -> DryRun:
    """A study's dry run, recorded in the study's storage and as `dry-run.json` in its directory.

    `on_row` is called for every row as it comes. Raises SandboxError, and StudyError: no toolchain for the
    target, a directory that cannot be written, a storage that cannot be opened.
    """
    with writing(setup.directory):
        setup.directory.mkdir(parents=True, exist_ok=True)
    sandbox = Sandbox.detect(unsafe=setup.unsafe)
    toolchain = toolchain_for(setup.template.target, sandbox, setup.config.build_plan.compiler)
    seed, space = setup.config.study.seed, setup.space
    rows = []
    try:
        chosen = configurations(space, count, seed)
        for row in inspect_all(space, chosen, toolchain, sandbox, BUILD_LIMITS):
            rows.append(row)
            on_row(row)
    finally:
        toolchain.close()
    found = DryRun(
        study=setup.config.study.name,
        template=setup.template.name,
        target=setup.template.target,
        toolchain=toolchain.id,
        legality=legality(space, seed),
        rows=tuple(rows),
    )
    quiet()
    with writing(setup.directory):
        record(found, space, storage_at(setup.directory, setup.storage_url))
        text = json.dumps(found.as_json(), indent=1)
        (setup.directory / FILE).write_text(text + "\n", encoding="utf-8")
    return found


def toolchain_for(target: str, sandbox: Sandbox, compiler: str) -> Toolchain:
    """The compiler of a target. Raises StudyError when there is none or it is not installed."""
    if target not in TOOLCHAINS:
        raise StudyError(f"no toolchain for target {target}; {nearest(target, TOOLCHAINS)}")
    return TOOLCHAINS[target](sandbox, compiler)


def legality(space: Space, seed: int) -> Legality:
    """Deterministic in the seed."""
    rng = np.random.default_rng([seed, 0])
    widths = [len(values) for values in space.choices]
    cells = [tuple(cell) for cell in rng.integers(widths, size=(_CELLS, len(widths))).tolist()]
    reasons = Counter(re.sub(r"\d+", "#", why) for cell in cells if (why := space.why_not(space.at(cell))))
    share = 1 - reasons.total() / len(cells)
    return Legality(space.size, len(cells), share, tuple(reasons.most_common()))


def configurations(space: Space, count: int, seed: int) -> list[Any]:
    """The default and then distinct legal knobs, uniformly; fewer than `count` when there are no more."""
    rng = np.random.default_rng([seed, 1])
    found = {space.cell(space.default()): None}
    while len(found) < count and len(found) != space.legal_count():
        before = len(found)
        for cell in space.sample_cells(rng, 4 * count):
            if len(found) < count:
                found[cell] = None
        if len(found) == before:
            break
    return [space.at(cell) for cell in list(found)[:count]]


def inspect_all(
    space: Space,
    knobs: Sequence[Any],
    toolchain: Toolchain,
    sandbox: Sandbox,
    limits: Limits,
    *,
    workers: int = 0,
) -> Iterator[Inspected]:
    """Build every configuration for every specialization, on all processors; rows come in order."""
    first: dict[tuple[str, str], int] = {}
    with ThreadPoolExecutor(workers or len(os.sched_getaffinity(0))) as pool:
        jobs: list[tuple[int, Any, Specialization, Future[_Built]]] = []
        for number, chosen in enumerate(knobs):
            for spec in space.specs:
                unit = space.template.unit(space.template.source, chosen, spec)
                jobs.append((number, chosen, spec, pool.submit(_build, unit, toolchain, sandbox, limits)))
        try:
            for number, chosen, spec, job in jobs:
                built = job.result()
                key = (spec.label, built.code)
                twin = first.setdefault(key, number) if built.code else number
                failed = built.failed
                yield Inspected(
                    number=number,
                    knobs=space.encode(chosen),
                    specialization=spec.label,
                    predicted=dict(space.template.budget(chosen, spec)),
                    resources=dict(built.resources.values),
                    build_s=built.seconds,
                    failure=failed.failure.value if failed else "",
                    stage=failed.stage.value if failed else "",
                    detail=failed.detail if failed else "",
                    log=failed.log if failed else "",
                    twin=twin if twin != number else None,
                )
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


@dataclass(frozen=True)
class _Built:
    """`code` names what was generated, whatever it was generated from; "" when there is none."""

    resources: Resources
    failed: Failed | None
    code: str
    seconds: float


def _build(unit: Unit, toolchain: Toolchain, sandbox: Sandbox, limits: Limits) -> _Built:
    started = time.monotonic()
    with sandbox.scratch() as scratch:
        compiled = toolchain.compile(unit, scratch, sandbox, limits)
    if not isinstance(compiled, Compiled):
        return _Built(Resources(), compiled.failed, "", time.monotonic() - started)
    found = toolchain.inspect(unit, compiled)
    seconds = time.monotonic() - started
    if isinstance(found, Failed):
        return _Built(Resources(), found, "", seconds)
    ptx = compiled.files.get(".ptx")
    return _Built(found, None, digest(compiled.object) if ptx is None else ptx_digest(ptx.decode()), seconds)


def record(run: DryRun, space: Space, storage: "BaseStorage") -> None:
    """Put the rows into the Optuna study "<name>-dry-run", in place of an earlier dry run's.

    Raises StudyError when the storage has a study of that name that no dry run made.
    """
    import optuna
    from optuna.trial import TrialState
    from optuna_dashboard import save_note

    from evotune.search_space.sampler import parameters

    name = f"{run.study}-dry-run"
    _remove_earlier(name, storage)
    objectives = _OBJECTIVES[run.target]
    study = optuna.create_study(
        storage=storage,
        study_name=name,
        directions=["maximize" if more else "minimize" for more in objectives.values()],
    )
    study.set_user_attr(_MARK, run.toolchain)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        study.set_metric_names(list(objectives))
    for rows in _by_configuration(run.rows):
        values = {f"{SEED_BRANCH}.{knob}": value for knob, value in rows[0].knobs.items()}
        study.enqueue_trial(values)
        trial = study.ask(parameters(space, SEED_BRANCH))
        save_note(trial, note(rows))
        failed = next((row for row in rows if row.failure), None)
        if failed is None:
            worst = {key: _worst(rows, key, more) for key, more in objectives.items()}
            study.tell(trial, [float(value) for value in worst.values()])
        else:
            trial.set_user_attr("verdict", failed.failure)
            trial.set_user_attr("stage", failed.stage)
            trial.set_constraint("gate", float(Stage(failed.stage).left_to_pass))
            study.tell(trial, state=TrialState.PRUNED)


def _remove_earlier(name: str, storage: "BaseStorage") -> None:
    import optuna

    if name not in optuna.get_all_study_names(storage):
        return
    if _MARK not in optuna.load_study(study_name=name, storage=storage).user_attrs:
        raise StudyError(f"the storage has a study named {name} that is no dry run; rename yours")
    optuna.delete_study(study_name=name, storage=storage)


def _by_configuration(rows: Sequence[Inspected]) -> list[list[Inspected]]:
    groups: dict[int, list[Inspected]] = {}
    for row in rows:
        groups.setdefault(row.number, []).append(row)
    return list(groups.values())


def _worst(rows: Sequence[Inspected], key: str, more: bool) -> int:
    found = [row.resources[key] for row in rows]
    return min(found) if more else max(found)


def note(rows: Sequence[Inspected]) -> str:
    """A configuration's page in the dashboard: Markdown."""
    lines = [f"Built and inspected, not run. Configuration {rows[0].number}.", ""]
    lines += [f"- `{knob}` = {value}" for knob, value in rows[0].knobs.items()]
    for row in rows:
        lines += ["", f"**{row.specialization}**, built in {row.build_s:.2f} s", ""]
        if row.failure:
            lines += [f"{row.failure} at {row.stage}: {row.detail}", "", "```text", row.log, "```"]
            continue
        lines += ["| resource | built | predicted |", "|---|---|---|"]
        lines += [
            f"| {key} | {value} | {row.predicted.get(key, '')} |" for key, value in row.resources.items()
        ]
        if row.twin is not None:
            lines += ["", f"The same code as configuration {row.twin}."]
    return "\n".join(lines)


def table(run: DryRun) -> "Table":
    """Rows for a terminal: knobs that differ from the default's, and what was read from the object."""
    from rich.table import Table

    default = run.rows[0].knobs if run.rows else {}
    present = {key for row in run.rows for key in row.resources}
    columns = [key for key in _SHOWN if key in present]
    several = len({row.specialization for row in run.rows}) > 1
    made = Table(title=f"{run.study}: dry run of {run.template} for {run.target}", caption=_knobs(default))
    made.add_column("#", justify="right")
    made.add_column("knobs, where not the default's", overflow="fold")
    if several:
        made.add_column("object", overflow="fold")
    for key in columns:
        made.add_column(key.replace("_", " "), justify="right")
    made.add_column("verdict")
    for row in run.rows:
        differing = {knob: value for knob, value in row.knobs.items() if default[knob] != value}
        made.add_row(
            str(row.number),
            _knobs(differing) or "default",
            *([row.specialization] if several else []),
            *(str(row.resources.get(key, "")) for key in columns),
            _verdict(row),
        )
    return made


def _knobs(knobs: Mapping[str, Constant]) -> str:
    return " ".join(f"{knob}={value}" for knob, value in knobs.items())


def _verdict(row: Inspected) -> str:
    if row.failure:
        return f"{row.failure}: {row.detail}"
    return "built" if row.twin is None else f"same code as {row.twin}"


def summary(run: DryRun) -> str:
    """Two or three lines: legality, failures, spills, time."""
    legal = run.legality
    lines = [f"{legal.share:.0%} of {legal.drawn} cells drawn from a grid of {legal.grid} are legal"]
    if legal.reasons:
        lines[0] += f"; most of the others: {legal.reasons[0][0]}"
    built = [row for row in run.rows if not row.failure]
    twins = sum(row.twin is not None for row in built)
    spilling = sum(row.resources.get("spill_bytes", 0) > 0 for row in built)
    seconds = sum(row.build_s for row in run.rows)
    lines.append(
        f"{len(built)} of {len(run.rows)} objects built, {twins} with the code of an earlier one, "
        f"{spilling} spill; {seconds:.1f} s of building"
    )
    return "\n".join(lines)
