"""Where a kernel goes wrong: every rung to its end, then the first failure made small and under a lens.

Smaller and smaller problems are tried, until none smaller fails (see `shrink`). The first wrong case is run
again to name the output, sequence, head, chunk and token that depart first and how the error moves from
there; a debug build of the template, run on the same inputs, names the first stage that departs.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from evotune.errors import StudyError
from evotune.fitness.gate import Gate, GateReport
from evotune.fitness.operator import Array, Case
from evotune.fitness.outcome import RUNGS, Failed, Stage
from evotune.fitness.runner import Fault
from evotune.history import Entry, History
from evotune.plugins import load
from evotune.search_space.branch import Candidate
from evotune.search_space.template import Specialization
from evotune.setup import Setup
from evotune.shrink import Shrinker, Smallest
from evotune.workbench import Workbench

# Functions (case, outputs, intermediates by name or None, chunk) -> an object with what
# `evotune.reference_kda.diagnosis.Diagnosis` has: output, trend, growth, stage.
LENSES: Mapping[str, str] = {"kda": "evotune.reference_kda.diagnosis:diagnose"}
# Fresh variants of the wrong case that are tried: some mistakes show in most inputs, not in all.
_TRIES = 8
# Other failures told to a person; --json has all.
_SHOWN = 6


class Region(Protocol):
    """A named float32 intermediate in a debug build's workspace."""

    @property
    def name(self) -> str: ...
    @property
    def offset(self) -> int: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


@runtime_checkable
class Debuggable(Protocol):
    """A template whose debug build leaves intermediates, by chunks of `knobs.chunk`, in the workspace."""

    def debug_regions(
        self, knobs: Any, spec: Specialization, sizes: Mapping[str, int]
    ) -> Sequence[Region]: ...


@dataclass(frozen=True)
class Rung:
    """One rung: how many of its cases failed, and the worst error over bound of those that were compared."""

    stage: Stage
    cases: int
    failed: int
    worst: float


@dataclass(frozen=True)
class Diagnosis:
    """What was found, from the ladder down to a stage.

    Attributes:
        failed: the first failure in the ladder's order; None when everything held.
        log: what the compiler said, when there was no kernel to judge.
        smallest: the smallest problem that was found to fail as the first failure that shows again; None when
            none does, or the operator cannot say what is smaller.
        others: the other cases that failed, as "rung: case: detail".
        where: sentences on the first place that departs and its stage; empty when the lens found none.
        growth: error over bound, chunk by chunk, in the sequence and head that the end of `where` names.
    """

    rungs: tuple[Rung, ...]
    failed: Failed | None
    log: str = ""
    smallest: Smallest | None = None
    others: tuple[str, ...] = ()
    where: tuple[str, ...] = ()
    growth: tuple[float, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Infinite and undefined numbers become null, as JSON has none."""

        def number(x: float) -> float | None:
            return x if np.isfinite(x) else None

        return {
            "held": self.failed is None,
            "failed": None if self.failed is None else self.failed.told,
            "rungs": [
                {"rung": r.stage.value, "cases": r.cases, "failed": r.failed, "worst": number(r.worst)}
                for r in self.rungs
            ],
            "smallest": None if self.smallest is None else self.smallest.as_json(),
            "others": list(self.others),
            "where": list(self.where),
            "growth": [number(ratio) for ratio in self.growth],
            "log": self.log,
        }

    def lines(self) -> Iterator[str]:
        """For a kernel's author."""
        for rung in self.rungs:
            state = f"{rung.failed} of {rung.cases} wrong" if rung.failed else f"all {rung.cases} right"
            compared = f", worst {rung.worst:.3g} of the bound" if rung.worst else ""
            yield f"{rung.stage.value:10} {state}{compared}"
        if self.failed is None:
            yield "It holds: nothing in the full gate departs."
            return
        yield f"First: {self.failed.told}"
        if self.smallest is not None:
            yield self.smallest.text
        yield from self.where
        if self.growth:
            yield f"Error over bound by chunk: {' '.join(f'{ratio:.2g}' for ratio in self.growth)}"
        yield from (f"Also: {other}" for other in self.others[:_SHOWN])
        if len(self.others) > _SHOWN:
            yield f"Also: {len(self.others) - _SHOWN} more"
        if self.log:
            yield self.log


def candidate_of(setup: Setup, history: History, entry: Entry, source: Path | None = None) -> Candidate:
    """A study's candidate, or its knobs on another source. Raises StudyError when that cannot be read."""
    branch = history.added(entry.asked.branch).branch
    if source is not None:
        try:
            text = source.read_text(encoding="utf-8")
        except OSError as error:
            raise StudyError(f"cannot read {source}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise StudyError(f"{source} is not UTF-8 text: {error.reason} at byte {error.start}") from error
        branch = replace(branch, source=text)
    return Candidate(branch, setup.space.decode(entry.asked.knobs))


def diagnose(setup: Setup, candidate: Candidate, bench: Workbench | None = None) -> Diagnosis:
    """Judge a candidate with the full gate to its end and look closer at the first wrong case.

    The gate is the one before a promotion: it knows what the study times. Of the bench its own is not used.
    Raises StudyError when the template is not for the host, SandboxError when nothing can be judged here.
    """
    if setup.template.target != "host":
        raise StudyError(f"diagnose runs kernels here; those for {setup.template.target} cannot be")
    config = setup.config
    bench = bench or Workbench.open(
        setup.operator,
        limits=config.gate_limits,
        compiler=config.build_plan.compiler,
        unsafe=setup.unsafe,
    )
    libraries = _build(setup, candidate, bench, debug=False)
    if isinstance(libraries, Failed):
        return Diagnosis((), libraries, log=libraries.log)
    gate = Gate(setup.operator, setup.workloads)
    with bench.session(libraries, setup.operator.entry) as session:
        report = gate.judge(session, setup.specializations, "full", explain=True)
        smallest = Shrinker(gate, session, setup.specializations).smallest(report)
    found = replace(_summary(report), smallest=smallest)
    wrong = _wrong_cases(gate, setup.specializations, report)
    if not wrong or setup.operator.name not in LENSES:
        return found
    where, growth = _Lens(setup, candidate, bench, gate, libraries).look(wrong)
    return replace(found, where=where, growth=growth)


def _build(
    setup: Setup, candidate: Candidate, bench: Workbench, *, debug: bool
) -> dict[Specialization, bytes] | Failed:
    libraries = {}
    for spec in setup.specializations:
        unit = setup.template.unit(candidate.branch.source, candidate.knobs, spec, debug=debug)
        compiled = bench.compile(unit)
        linked = compiled if isinstance(compiled, Failed) else bench.link(compiled, unit.entry)
        if isinstance(linked, Failed):
            return linked
        libraries[spec] = linked
    return libraries


def _summary(report: GateReport) -> Diagnosis:
    rungs = []
    for stage in RUNGS:
        results = [result for result in report.results if result.stage == stage]
        worst = max((result.ratio for result in results), default=0.0)
        rungs.append(Rung(stage, len(results), len(report.failures(stage)), worst))
    wrong = [result for result in report.results if result.failure is not None]
    others = tuple(f"{r.stage.value}: {r.case}: {r.detail}" for r in wrong[1:])
    return Diagnosis(tuple(rungs), report.failed, others=others)


@dataclass(frozen=True)
class _Wrong:
    """A wrong case that can be run again: its name, the index of its object, its workload."""

    name: str
    index: int
    workload: Any


def _wrong_cases(gate: Gate, specs: Sequence[Specialization], report: GateReport) -> list[_Wrong]:
    """Failed cases against the truth, in the ladder's order: the lens compares with one."""
    by_name: dict[tuple[str, str], _Wrong] = {}
    for i, spec in enumerate(specs):
        for entry in gate.entries(spec, "full"):
            name = entry.name if len(specs) == 1 else f"{entry.name} [{spec.label}]"
            by_name[entry.rung, name] = _Wrong(name, i, entry.workload)
    failed = (r for r in report.results if r.failure is not None)
    found = (by_name.get((result.stage.value, result.case)) for result in failed)
    return [wrong for wrong in found if wrong is not None]


@dataclass(frozen=True)
class _Lens:
    """Runs wrong cases again and says where they depart."""

    setup: Setup
    candidate: Candidate
    bench: Workbench
    gate: Gate
    libraries: Mapping[Specialization, bytes]

    def look(self, wrong: Sequence[_Wrong]) -> tuple[tuple[str, ...], tuple[float, ...]]:
        """Sentences, and the growth of the error.

        The first case is the simplest and names place and stage; the longest shows how the error moves.
        """
        for first in wrong[:_TRIES]:
            seen = self._wrong_call(first)
            if seen is not None:
                break
        else:
            return (), ()
        case, outputs = seen
        given = self._intermediates(first.index, case)
        place = self._depart(case, outputs, given or None)
        where = list(_sentences(place, given))
        longest = max(wrong, key=self._length)
        seen = self._wrong_call(longest)
        if seen is None:
            return tuple(where), tuple(place.growth)
        moving = self._depart(*seen, None)
        where.append(f"In the case {longest.name!r} {moving.text}.")
        return tuple(where), tuple(moving.growth)

    def _depart(self, case: Case, outputs: Mapping[str, Array], given: Mapping[str, Array] | None) -> Any:
        lens = load(self.setup.operator.name, LENSES, "diagnosis")
        return lens(case, outputs, given, getattr(self.candidate.knobs, "chunk", 16))

    def _length(self, wrong: _Wrong) -> float:
        """Mean tokens of the case's sequences: T over N, the sizes that operators with a lens have."""
        sizes = self.gate.cases.fresh(wrong.workload, np.random.default_rng(0)).sizes
        return sizes["T"] / max(sizes["N"], 1)

    def _wrong_call(self, wrong: _Wrong) -> tuple[Case, Mapping[str, Array]] | None:
        """A variant that this kernel answers wrongly; None when it faults, or answers all of some rightly."""
        rng = np.random.default_rng(0)
        with self.bench.session(self.libraries, self.setup.operator.entry) as session:
            for _ in range(_TRIES):
                case = self.gate.cases.fresh(wrong.workload, rng)
                try:
                    outputs = session.call(wrong.index, case).outputs
                except Fault:
                    return None
                if not case.worst(outputs).ratio <= 1:
                    return case, outputs
        return None

    def _intermediates(self, index: int, case: Case) -> dict[str, Array]:
        """What a debug build left on the way, by name; empty when the template or the kernel gives none."""
        template, spec = self.setup.template, self.setup.specializations[index]
        libraries = _build(self.setup, self.candidate, self.bench, debug=True)
        if isinstance(libraries, Failed) or not isinstance(template, Debuggable):
            return {}
        with self.bench.session(libraries, self.setup.operator.entry) as session:
            try:
                placement = session.place(index, case)
                session.runner.call(index, placement, session.limits.call_timeout_s)
            except Fault:
                return {}
            workspace = session.runner.arena.workspace(placement)
        found = {}
        for region in template.debug_regions(self.candidate.knobs, spec, case.sizes):
            end = region.offset + 4 * int(np.prod(region.shape))
            if end > len(workspace):  # a source of another layout, which need not keep the template's
                return {}
            found[region.name] = workspace[region.offset : end].view(np.float32).reshape(region.shape)
        return found


def _sentences(seen: Any, given: Mapping[str, Array]) -> Iterator[str]:
    if seen.output is not None:
        yield f"{seen.output.text}."
    if seen.stage is not None:
        yield f"In a debug build {seen.stage.text}."
    elif given:
        yield f"In a debug build {', '.join(given)} stay right: the mistake comes after them."
