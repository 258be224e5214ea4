"""Judges an exported directory again, as if an enemy had written it.

Order: names and sizes, hashes, the drop-in's text, then for every object inspection, a link of our own, and
the full gate in the sandbox on cases solved now. The shipped library is judged: where our linker is the one
that made it, it must be our link byte for byte (see `Bench.adopt`). Nothing is unpickled or imported from the
directory.

A machine without the target's device checks all but the gate and builds from source instead, where the
compiler is there; what it could not do is said, and held against nobody (`Verification.undone`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evotune.bundle import BYTECODE, REPORTS, dropin
from evotune.errors import StudyError
from evotune.fitness.operator import Operator
from evotune.manifest import (
    KERNELS,
    MANIFEST,
    Folder,
    Index,
    KernelManifest,
    ObjectEntry,
    WorkloadEntry,
    read_index,
    read_kernel,
)
from evotune.plugins import OPERATORS, TARGETS, load
from evotune.search_space.template import Specialization, Unit
from evotune.targets import Target
from evotune.workbench import Bench

_LINKED = {None: "", True: "", False: "linked by another linker than this machine's, judged as shipped"}
_REBUILT = {None: "", True: "rebuilds to the same objects", False: "rebuilds to other objects"}


@dataclass(frozen=True)
class Finding:
    """What became of one kernel, or of the drop-in.

    Attributes:
        problem: why it failed; "" when it held.
        worst_error: largest error over bound in the gate; None when it did not get that far.
        relinked: whether our link of the objects gives the shipped libraries; None when nothing was linked.
        rebuilt: whether a rebuild from source gives the same objects; None when nothing was built.
        sanitizer: what the manifest says of compute-sanitizer, which is not run again; "" off a GPU.
        likeness: what the manifest says of a public kernel that it resembles; "" for none.
    """

    name: str
    problem: str = ""
    worst_error: float | None = None
    relinked: bool | None = None
    rebuilt: bool | None = None
    sanitizer: str = ""
    likeness: str = ""
    kernel: bool = False

    @property
    def line(self) -> str:
        """For a person who waits."""
        if self.problem:
            return f"{self.name}: FAILED: {self.problem}"
        if not self.kernel:
            return f"{self.name}: ours"
        judged = self._gate_word, _LINKED[self.relinked], _REBUILT[self.rebuilt]
        return f"{self.name}: " + "; ".join(filter(None, (*judged, self.sanitizer, self.likeness)))

    @property
    def _gate_word(self) -> str:
        if self.worst_error is None:
            return "hashes and inspections hold, not run"
        return f"full gate, {self.worst_error:.2f} of the bound"


@dataclass(frozen=True)
class Verification:
    """Everything that was found. `undone` says in one line what this machine could not look at, and why."""

    directory: str
    findings: tuple[Finding, ...]
    undone: str = ""

    @property
    def held(self) -> bool:
        """Nothing that was looked at failed."""
        return all(not finding.problem for finding in self.findings)

    @property
    def verdict(self) -> str:
        """For a person, after the directory's name."""
        if not self.held:
            return "does not hold"
        return f"holds as far as this machine can tell: {self.undone}" if self.undone else "holds"

    def as_json(self) -> dict[str, Any]:
        return {
            "directory": self.directory,
            "held": self.held,
            "undone": self.undone,
            "findings": [vars(finding) for finding in self.findings],
        }


Objects = Mapping[Specialization, ObjectEntry]


class _Broken(Exception):
    """Carries why a kernel did not hold."""


def verify(
    directory: Path,
    *,
    rebuild: bool = False,
    unsafe: bool = False,
    say: Callable[[Finding], None] = lambda finding: None,
    opening: Callable[[Target, Operator], Bench] | None = None,
) -> Verification:
    """Judge all of it. `say` is called with each finding as it is made, `opening` once for the judge.

    Raises StudyError when the directory has no readable index or no kernel, SandboxError when nothing can be
    judged on this machine.
    """
    with Folder.open(directory) as folder:
        index = read_index(folder)
        operator, target = _known(directory, index)
        bench = opening(target, operator) if opening else target.bench(operator, unsafe)
        try:
            findings = []
            for finding in _Judge(folder, index, bench, target, rebuild).findings():
                say(finding)
                findings.append(finding)
            return Verification(str(directory), tuple(findings), _undone(bench, rebuild))
        finally:
            bench.close()


def _known(directory: Path, index: Index) -> tuple[Operator, Target]:
    """Only what ships: an address in a manifest is not imported. Raises StudyError."""
    if index.operator not in OPERATORS:
        raise StudyError(f"{directory}: made for operator {index.operator}, which is not known here")
    if index.target not in TARGETS:
        raise StudyError(f"{directory}: made for target {index.target}, which is not known here")
    if not index.kernels:
        raise StudyError(f"{directory}: the index names no kernel, so there is nothing to verify")
    return load(index.operator, OPERATORS, "operator"), load(index.target, TARGETS, "target")


def _undone(bench: Bench, rebuild: bool) -> str:
    unable = bench.unable
    build = unable.compile if rebuild or unable.run else ""
    parts = {"no kernel was run": unable.run, "no library was linked": unable.link, "none was built": build}
    return "; ".join(f"{what}: {why}" for what, why in parts.items() if why)


@dataclass(frozen=True)
class _Judge:
    folder: Folder
    index: Index
    bench: Bench
    target: Target
    rebuild: bool

    def findings(self) -> Iterator[Finding]:
        index = self.index
        texts = dropin(index).texts()
        for name, ours in texts.items():
            yield Finding(name, self._dropin_problem(name, ours))
        for workload in index.workloads:
            if problem := self._dispatch_problem(workload):
                yield Finding(MANIFEST, f"workload {workload.name!r} {problem}")
        for name in self.folder.names():
            if name not in {*texts, *REPORTS, MANIFEST, KERNELS}:
                problem = "has no place in an export; Python may load it in place of the drop-in: remove it"
                yield Finding(name, problem)
        with ExitStack() as stack:
            try:
                kernels = stack.enter_context(self.folder.folder(KERNELS))
            except StudyError as error:
                yield Finding(KERNELS, str(error))
                return
            for name in kernels.names():
                if name not in index.kernels:
                    yield Finding(name, "the index does not name it")
            for id, expected in index.kernels.items():
                try:
                    yield self._kernel(kernels, id, expected)
                except (_Broken, StudyError) as error:
                    yield Finding(id, str(error))

    def _dispatch_problem(self, workload: WorkloadEntry) -> str:
        """The drop-in finds a workload by its dtype and constants, and loads the object of its label."""
        if workload.kernel not in self.index.kernels:
            return "goes to a kernel that is not there"
        constants = tuple(sorted(workload.constants.items()))
        own = Specialization(self.index.operator, workload.dtype, constants).label
        return "" if own == workload.label else f"is of {own} and goes to objects of {workload.label}"

    def _dropin_problem(self, name: str, ours: bytes) -> str:
        """The text that a user of the directory imports must be ours, whatever the index says of it."""
        if name == BYTECODE and name not in self.folder.names():
            return ""
        try:
            found = self.folder.read(name, len(ours))
        except StudyError as error:
            if name == BYTECODE:
                return "holds what Python may load in place of the drop-in: remove it, nothing is lost"
            return str(error)
        if found == ours:
            return ""
        return f"is not the drop-in of this evotune (exported by version {self.index.evotune}): export again"

    def _kernel(self, kernels: Folder, id: str, expected: str) -> Finding:
        """Raises _Broken, StudyError."""
        with kernels.folder(id) as folder:
            manifest = read_kernel(folder, id, expected)
            contents = {entry.name: folder.checked(entry) for entry in manifest.files()}
            strangers = set(folder.names()) - {MANIFEST, *contents}
        if strangers:
            raise _Broken(f"the manifest does not name {min(strangers)}")
        if manifest.target != self.index.target or manifest.language != self.target.language:
            says = f"{manifest.target} in {manifest.language}"
            raise _Broken(f"is for {says}, the index says {self.index.target}")
        if problem := self.bench.misplaced(manifest):
            raise _Broken(problem)
        if (watched := manifest.evidence.sanitizer) and watched.complaint:
            raise _Broken(f"its own manifest says: {watched.complaint}")
        objects = {_specialization(built): built for built in manifest.objects}
        if len(objects) < len(manifest.objects):
            raise _Broken("two of its objects are for the same specialization")
        labels = {built.label for built in manifest.objects}
        for workload in self.index.workloads:
            if workload.kernel == id and workload.label not in labels:
                raise _Broken(f"has no object {workload.label}, which workload {workload.name!r} goes to")
        self._refuse_other_scalars(id, objects)
        same = [self._adopted(built, contents, manifest) for built in objects.values()]
        error = None if self.bench.unable.run else self._gate(objects, contents, manifest)
        rebuilt = self._rebuilds(objects, contents, manifest)
        return Finding(
            id,
            worst_error=error,
            relinked=_all(same),
            rebuilt=rebuilt,
            sanitizer=_sanitizer(manifest),
            likeness=manifest.likeness,
            kernel=True,
        )

    def _refuse_other_scalars(self, id: str, objects: Objects) -> None:
        """The drop-in takes calls with the values that the index and the manifest agree on. Raises _Broken
        unless these are what the gate judges with."""
        for spec, built in objects.items():
            try:
                ours = fixed_scalars(self.bench.operator, spec)
            except (KeyError, TypeError, ValueError) as error:
                raise _Broken(f"its specializations are not understood: {error!r}") from error
            if built.scalars != ours:
                raise _Broken(f"object {built.label} says {_told(built.scalars)}, the gate has {_told(ours)}")
            for workload in self.index.workloads:
                if (workload.kernel, workload.label) == (id, built.label):
                    theirs = {name: workload.scalars[name] for name in ours if name in workload.scalars}
                    if theirs != ours:
                        says = f"workload {workload.name!r} of the index says {_told(theirs)}"
                        raise _Broken(f"{says}, the gate has {_told(ours)}")

    def _adopted(
        self, built: ObjectEntry, contents: dict[str, bytes], manifest: KernelManifest
    ) -> bool | None:
        object_, library = contents[built.object.name], contents[built.library.name]
        adoption = self.bench.adopt(object_, library, manifest)
        if adoption.problem:
            raise _Broken(f"{built.library.name}: {adoption.problem}")
        return adoption.same

    def _gate(self, objects: Objects, contents: dict[str, bytes], manifest: KernelManifest) -> float:
        """The worst error over its bound. Raises _Broken."""
        bench = self.bench
        if manifest.entry != bench.operator.entry:
            raise _Broken(f"exports {manifest.entry}, the operator's entry is {bench.operator.entry}")
        libraries = {spec: contents[built.library.name] for spec, built in objects.items()}
        workspaces = {spec: built.workspace_bytes for spec, built in objects.items()}
        try:
            with bench.session(libraries, manifest.entry, workspaces) as session:
                report = bench.gate.judge(session, tuple(libraries), "full")
        except (KeyError, TypeError, ValueError) as error:
            # The operator cannot make sense of what the manifest calls a specialization or a size.
            raise _Broken(f"its specializations are not understood: {error!r}") from error
        if (failed := report.failed) is not None:
            raise _Broken(failed.told)
        return report.worst_error

    def _rebuilds(
        self, objects: Objects, contents: dict[str, bytes], manifest: KernelManifest
    ) -> bool | None:
        """Whether the source gives the objects: where asked for, or where nothing else speaks for them."""
        bench = self.bench
        if bench.unable.compile or not (self.rebuild or bench.unable.run):
            return None
        text = contents[manifest.source.name].decode(errors="replace")
        for built in objects.values():
            unit = Unit(manifest.language, text, manifest.entry, tuple(sorted(built.constants.items())))
            if bench.compile(unit) != contents[built.object.name]:
                if manifest.toolchain == bench.toolchain_id:
                    raise _Broken("its source, built here with the same toolchain, gives another object")
                return False
        return True


def fixed_scalars(operator: Operator, spec: Specialization) -> dict[str, float]:
    """Scalar parameters of the entry to which every case of the full gate gives one and the same value."""
    found: dict[str, set[float]] = {}
    for case in operator.gate_cases(spec, "full"):
        for name, value in operator.question(case.workload).scalars.items():
            found.setdefault(name, set()).add(value)
    return {name: min(values) for name, values in found.items() if len(values) == 1}


def _told(scalars: Mapping[str, float]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in scalars.items()) or "nothing"


def _sanitizer(manifest: KernelManifest) -> str:
    """What it says of compute-sanitizer; on a GPU, that it says nothing."""
    if manifest.evidence.sanitizer is not None:
        return manifest.evidence.sanitizer.line
    return "its manifest says nothing of compute-sanitizer" if manifest.gpu else ""


def _all(same: Sequence[bool | None]) -> bool | None:
    return None if None in same else all(same)


def _specialization(built: ObjectEntry) -> Specialization:
    facts = built.specialization
    spec = Specialization(facts.operator, facts.dtype, tuple(sorted(facts.constants.items())))
    if spec.label != built.label:
        raise _Broken(f"object {built.label} says it is for {spec.label}")
    return spec
