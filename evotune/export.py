"""From a finished study to `pareto/`: the chosen kernels rebuilt, judged again, timed again, written whole.

Chosen are the kernels of the front, best ranked first up to a limit, and for every workload the fastest. Each
is built from source with an empty cache, passes the full gate and is timed in blocks against the default
kernel and the numpy form, in a process and on inputs of its own that no choice was made with. A GPU's kernel
then runs some gate cases under compute-sanitizer, where that is installed. What fails any of this is left out
and named. A published ratio is the median over blocks of the block's ratio of medians,
with an order-statistic interval: exact for any distribution when blocks are independent.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from statistics import median
from typing import Any

from evotune import __version__, bundle
from evotune.bundle import Exported
from evotune.errors import SandboxError, StudyError
from evotune.fitness.build import default_cache_directory
from evotune.fitness.cache import Cache
from evotune.fitness.judge import CompiledEvaluator, Confirmation
from evotune.fitness.operator import Workload, specialization
from evotune.fitness.outcome import Artifact, Failed, Measurement, Retry
from evotune.fitness.sequential import order_interval
from evotune.history import Entry, History
from evotune.manifest import (
    Ancestor,
    Block,
    Cpu,
    Evidence,
    FileEntry,
    Gpu,
    Index,
    Interval,
    KernelManifest,
    LeftOut,
    ObjectEntry,
    SanitizerEntry,
    SpecializationEntry,
    Timing,
    WorkloadEntry,
    this_cpu,
    to_json,
)
from evotune.pareto import front, ranked
from evotune.plugins import TARGETS, load
from evotune.promotion import disqualified, standing, titles
from evotune.resemblance import resemblances
from evotune.search_space.branch import Candidate
from evotune.search_space.template import Specialization
from evotune.setup import Setup
from evotune.targets import Target
from evotune.verify import fixed_scalars

BLOCKS = 7  # the fewest whose extremes cover the median with 98 %; 6 give 97 %, 5 give 94 %
FRONT_LIMIT = 12
_TRIES = 3


@dataclass(frozen=True)
class Chosen:
    """A candidate to export: on the front or not, and the workloads it was measured fastest on."""

    entry: Entry
    front: bool
    fastest_on: tuple[str, ...]

    @property
    def number(self) -> int:
        return self.entry.asked.index

    @property
    def id(self) -> str:
        return f"{self.entry.asked.branch}-{self.number:04d}"


@dataclass(frozen=True)
class Exporting:
    """What came of an export. `front_size` counts the whole front, exported or not."""

    out: Path
    exported: tuple[Exported, ...]
    left_out: tuple[LeftOut, ...]
    front_size: int

    def as_json(self) -> dict[str, Any]:
        return {
            "out": str(self.out),
            "exported": [kernel.manifest.id for kernel in self.exported],
            "left_out": {kernel.id: kernel.reason for kernel in self.left_out},
            "front_size": self.front_size,
        }


@dataclass(frozen=True)
class Job:
    """An export to make.

    Attributes:
        limit: kernels of the front at most.
        force: replace an earlier export.
        say: told a line for each kernel.
    """

    setup: Setup
    history: History
    out: Path
    limit: int = FRONT_LIMIT
    blocks: int = BLOCKS
    force: bool = False
    say: Callable[[str], None] = lambda line: None


def export(job: Job) -> Exporting:
    """Write `job.out`, unless nothing passed in the study.

    Raises StudyError when there is nothing to export, the study's kernels cannot be judged again, or `out`
    cannot be written; DeviceError without the target's device; SandboxError when nothing can be judged here.
    Then nothing is left behind.
    """
    target = target_of(job.setup)
    bundle.refuse_existing(job.out, job.force)
    chosen = choose(job.history, job.limit)
    with (
        tempfile.TemporaryDirectory(prefix="evotune-export-") as folder,
        closing(target.evaluator(job.setup, Path(folder))) as evaluator,
    ):
        place = _Place(job, target, evaluator, this_cpu(), target.gpu(evaluator), target.versions())
        held, left_out = place.judge_all(chosen)
        index = place.index(held, left_out)
    bundle.write(job.out, index, held, force=job.force)
    return Exporting(
        job.out, tuple(held), tuple(left_out), len(front(job.history.columns, standing(job.history)))
    )


def target_of(setup: Setup) -> Target:
    """Whose judge is asked again. Raises StudyError for a study that another device judged: its choices say
    nothing of ours, and its device may be none."""
    name, device = setup.template.target, setup.config.study.device
    if name not in TARGETS:
        raise StudyError(f"kernels for target {name} are not exported; there are: {', '.join(TARGETS)}")
    if device not in ("", name):
        raise StudyError(f"the study was judged by device {device}; export judges for target {name} alone")
    target: Target = load(name, TARGETS, "target")
    return target


def choose(history: History, limit: int) -> list[Chosen]:
    """The front, best ranked first, and whatever else is fastest on some workload: the champion of its group,
    where one won its title, else the best screened. Who was found wrong after screening is passed over.
    Raises StudyError."""
    passed = standing(history)
    if not passed:
        failed = history.failures()
        if later := len(disqualified(history)):
            failed["found wrong after screening"] = later
        failures = ", ".join(f"{n} {name}" for name, n in failed.most_common()) or "none judged"
        raise StudyError(f"no candidate passed the gate ({failures}), so there is nothing to export")
    best = {e.asked.index: e for e in ranked(history, front(history.columns, passed))[:limit]}
    fastest: dict[int, list[str]] = {}
    for workload, entry in (_fastest(passed) | _champions(history)).items():
        fastest.setdefault(entry.asked.index, []).append(workload)
    entries = best | {entry.asked.index: entry for entry in passed if entry.asked.index in fastest}
    return [Chosen(entry, i in best, tuple(fastest.get(i, ()))) for i, entry in entries.items()]


def _champions(history: History) -> dict[str, Entry]:
    """By workload, where a promotion test found one."""
    return {
        m.workload: history.entries[title.champion]
        for title in titles(history)
        if title.won is not None
        for m in _measurements(history.entries[title.champion])
        if m.group == title.group
    }


def _measurements(entry: Entry) -> Sequence[Measurement]:
    return entry.passed.measurements if entry.passed else ()


def _fastest(passed: Sequence[Entry]) -> dict[str, Entry]:
    """By workload, by the ratio to the default timed in the same block: times of two hours do not compare."""
    best: dict[str, tuple[float, Entry]] = {}
    for entry in passed:
        for m in _measurements(entry):
            if m.workload not in best or m.speedup > best[m.workload][0]:
                best[m.workload] = (m.speedup, entry)
    return {workload: entry for workload, (_, entry) in best.items()}


def median_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Order-statistic interval of the median; see `order_interval` for its coverage.

    Fewer than six values cannot reach 95 %; their extremes are given with the coverage they have.
    """
    ordered = sorted(values)
    low, high, coverage = order_interval(len(values), confidence)
    return Interval(low=ordered[low], median=median(ordered), high=ordered[high], confidence=coverage)


@dataclass(frozen=True)
class _Place:
    """Where an export happens: the judge, and what the manifests say of it."""

    job: Job
    target: Target
    evaluator: CompiledEvaluator[Any]
    cpu: Cpu
    gpu: Gpu | None
    versions: Mapping[str, str]

    def judge_all(self, chosen: Sequence[Chosen]) -> tuple[list[Exported], list[LeftOut]]:
        held: list[Exported] = []
        left_out: list[LeftOut] = []
        for number, kernel in enumerate(chosen, start=1):
            judged = self._judge(kernel)
            if isinstance(judged, str):
                left_out.append(LeftOut(id=kernel.id, number=kernel.number, reason=judged))
                self.job.say(f"{number}/{len(chosen)} {kernel.id} left out: {judged}")
                continue
            held.append(judged)
            evidence = judged.manifest.evidence
            shown = ", ".join(f"{t.workload} {t.speedup.median:.2f}×" for t in evidence.timings)
            watched = evidence.sanitizer.line if evidence.sanitizer else ""
            told = "; ".join(filter(None, (shown, judged.manifest.likeness, watched)))
            self.job.say(f"{number}/{len(chosen)} {kernel.id}: {told}")
        return held, left_out

    def _judge(self, kernel: Chosen) -> Exported | str:
        """The kernel as exported, or why it is left out."""
        verdict = self._confirm(kernel)
        if isinstance(verdict, Failed):
            return verdict.told
        watched = self.target.sanitized(self.evaluator, self._candidate(kernel))
        if isinstance(watched, Failed):
            return watched.told
        if watched is not None and watched.complaint:
            return watched.complaint
        return self._exported(kernel, verdict, watched)

    def _confirm(self, kernel: Chosen) -> Confirmation | Failed:
        """Trouble that is not the kernel's is tried again; when it stays, nobody can be exported here."""
        reasons = []
        for _ in range(_TRIES):
            verdict = self.evaluator.confirm(self._candidate(kernel), self.job.blocks)
            if not isinstance(verdict, Retry):
                return verdict
            reasons.append(verdict.reason)
        raise SandboxError(f"{kernel.id} could not be judged: {reasons[-1]}")

    def _candidate(self, kernel: Chosen) -> Candidate:
        return self.job.history.candidate(kernel.entry, self.job.setup.space)

    def _exported(self, kernel: Chosen, verdict: Confirmation, watched: SanitizerEntry | None) -> Exported:
        """Manifest and files of a kernel that held."""
        setup, candidate, target = self.job.setup, self._candidate(kernel), self.target
        contents = {target.source: candidate.branch.source.encode()}
        objects = []
        for spec, artifact in verdict.artifacts.items():
            entry, files = self._object(kernel, candidate, spec, artifact)
            objects.append(entry)
            contents |= files
        branch = self.job.history.added(kernel.entry.asked.branch)
        manifest = KernelManifest(
            id=kernel.id,
            number=kernel.number,
            candidate=candidate.digest,
            template=setup.template.name,
            target=target.name,
            language=target.language,
            entry=setup.operator.entry,
            branch=branch.id,
            parents=tuple(p for p in (branch.parent, branch.other_parent) if p is not None),
            origin=branch.origin,
            note=branch.note,
            lineage=tuple(_lineage(self.job.history, branch.id)),
            knobs=asdict(candidate.knobs),
            front=kernel.front,
            fastest_on=kernel.fastest_on,
            source=FileEntry.of(target.source, contents[target.source]),
            objects=tuple(objects),
            toolchain=next(iter(verdict.artifacts.values())).toolchain,
            versions=dict(self.versions),
            cpu=self.cpu,
            gpu=self.gpu,
            evidence=_evidence(verdict, watched),
            licence=target.licence(branch.origin),
            resembles=resemblances(candidate.branch.source, setup.template.source),
        )
        return Exported(manifest, contents)

    def _object(
        self, kernel: Chosen, candidate: Candidate, spec: Specialization, artifact: Artifact
    ) -> tuple[ObjectEntry, dict[str, bytes]]:
        """One specialization's entry, and its files by name."""
        setup = self.job.setup
        library = self.evaluator.library(artifact)
        files = {f"{spec.label}.o": artifact.object_path.read_bytes(), f"{spec.label}.so": library}
        object_entry, library_entry = (FileEntry.of(name, data) for name, data in files.items())
        constants = setup.template.unit(candidate.branch.source, candidate.knobs, spec).constants
        entry = ObjectEntry(
            label=spec.label,
            specialization=_specialization_entry(spec),
            constants=dict(constants),
            object=object_entry,
            library=library_entry,
            reproducible=_reproducible(kernel, spec, files[object_entry.name]),
            resources=dict(artifact.resources.values),
            scalars=fixed_scalars(setup.operator, spec),
            workspace=self.target.workspace(setup, candidate.knobs, spec),
        )
        return entry, files

    def index(self, held: Sequence[Exported], left_out: Sequence[LeftOut]) -> Index:
        setup = self.job.setup
        manifests = [kernel.manifest for kernel in held]
        workloads = [_workload(setup, w, manifests) for w in setup.workloads] if manifests else []
        return Index(
            evotune=__version__,
            created=datetime.now().astimezone().isoformat(timespec="seconds"),
            study=setup.config.study.name,
            operator=setup.operator.name,
            template=setup.template.name,
            target=self.target.name,
            cpu=self.cpu,
            gpu=self.gpu,
            kernels={m.id: sha256(to_json(m)).hexdigest() for m in manifests},
            workloads=tuple(workloads),
            left_out=tuple(left_out),
        )


def _specialization_entry(spec: Specialization) -> SpecializationEntry:
    facts = {"operator": spec.operator, "dtype": spec.dtype, "constants": dict(spec.constants)}
    return SpecializationEntry.model_validate(facts)


def _reproducible(kernel: Chosen, spec: Specialization, object_: bytes) -> bool | None:
    """Whether the object that the study judged has these very bytes; None when it is no longer kept."""
    digest = kernel.entry.judged.artifacts.get(spec.label) if kernel.entry.judged else None
    if digest is None:
        return None
    with closing(Cache(default_cache_directory())) as cache:
        entry = cache.get(digest)
    if entry is None or not isinstance(entry.result, Artifact):
        return None
    return entry.result.object_path.read_bytes() == object_


def _lineage(history: History, branch: str) -> Iterator[Ancestor]:
    """From the seed down to the branch, first parents only."""
    added = history.added(branch)
    if added.parent is not None:
        yield from _lineage(history, added.parent)
    yield Ancestor(branch=added.id, origin=added.origin, note=added.note)


def _evidence(verdict: Confirmation, watched: SanitizerEntry | None) -> Evidence:
    timings = []
    for i, first in enumerate(verdict.blocks[0].measurements):
        measured = [block.measurements[i] for block in verdict.blocks]
        naive = [times[first.workload] for times in verdict.naive_us]
        timings.append(
            Timing(
                workload=first.workload,
                group=first.group,
                time_us=median(m.time_us for m in measured),
                speedup=median_interval([m.speedup for m in measured]),
                naive_ratio=median_interval([n / m.time_us for n, m in zip(naive, measured, strict=True)]),
                blocks=tuple(
                    Block(samples_us=m.samples_us, baseline_samples_us=m.baseline_samples_us, naive_us=n)
                    for n, m in zip(naive, measured, strict=True)
                ),
            )
        )
    errors = (verdict.report.worst_error, *(block.worst_error for block in verdict.blocks))
    return Evidence(
        level="full",
        gate_seeds=1,
        worst_error=max(errors),
        host_call_us=median(block.host_call_us for block in verdict.blocks),
        timings=tuple(timings),
        sanitizer=watched,
    )


def _workload(setup: Setup, workload: Workload, kernels: Sequence[KernelManifest]) -> WorkloadEntry:
    """With the kernel that was fastest on it at export: among few, so that the best is hardly flattered."""
    times: Mapping[str, float] = {
        k.id: t.time_us for k in kernels for t in k.evidence.timings if t.workload == workload.name
    }
    spec = specialization(setup.operator, workload)
    question = setup.operator.question(workload)
    facts = {
        "name": workload.name,
        "group": workload.group,
        "label": spec.label,
        "dtype": spec.dtype,
        "constants": dict(spec.constants),
        "sizes": dict(question.sizes),
        "scalars": dict(question.scalars),
        "kernel": min(times, key=lambda id: times[id]),
    }
    return WorkloadEntry.model_validate(facts)
