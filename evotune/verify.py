"""Judges an exported directory again, as if an enemy had written it.

Order: names and sizes, hashes, the drop-in's text, then for every object inspection, a link of our own that
must give the shipped library byte for byte, and the full gate in the sandbox on cases solved now. The shipped
library is never loaded; nothing is unpickled or imported from the directory.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evotune.bundle import BYTECODE, DROPINS, REPORTS
from evotune.errors import StudyError
from evotune.fitness.gate import GateReport
from evotune.fitness.operator import Operator
from evotune.fitness.outcome import Failed
from evotune.manifest import (
    KERNELS,
    MANIFEST,
    Folder,
    Index,
    KernelManifest,
    ObjectEntry,
    read_index,
    read_kernel,
    this_cpu,
)
from evotune.plugins import OPERATORS, load
from evotune.search_space.template import Specialization, Unit
from evotune.workbench import Workbench


@dataclass(frozen=True)
class Finding:
    """What became of one kernel, or of the drop-in.

    Attributes:
        problem: why it failed; "" when it held.
        worst_error: largest error over bound in the gate; None when it did not get that far.
        rebuilt: whether a rebuild from source gives the same object; None when not asked for.
    """

    name: str
    problem: str = ""
    worst_error: float | None = None
    rebuilt: bool | None = None

    @property
    def line(self) -> str:
        """For a person who waits."""
        if self.problem:
            return f"{self.name}: FAILED: {self.problem}"
        if self.worst_error is None:
            return f"{self.name}: ours"
        more = {None: "", True: "; rebuilds to the same object", False: "; rebuilds to another object"}
        return f"{self.name}: full gate, {self.worst_error:.2f} of the bound{more[self.rebuilt]}"


@dataclass(frozen=True)
class Verification:
    """Everything that was found."""

    directory: str
    findings: tuple[Finding, ...]

    @property
    def held(self) -> bool:
        return all(not finding.problem for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        return {
            "directory": self.directory,
            "held": self.held,
            "findings": [vars(finding) for finding in self.findings],
        }


class _Broken(Exception):
    """Carries why a kernel did not hold."""


def verify(
    directory: Path,
    *,
    rebuild: bool = False,
    say: Callable[[Finding], None] = lambda finding: None,
    opening: Callable[[Operator], Workbench] = Workbench.open,
) -> Verification:
    """Judge all of it. `say` is called with each finding as it is made, `opening` once for the judge.

    Raises StudyError when the directory has no readable index or no kernel, SandboxError when nothing can be
    judged on this machine.
    """
    with Folder.open(directory) as folder:
        index = read_index(folder)
        if index.operator not in OPERATORS:
            raise StudyError(f"{directory}: made for operator {index.operator}, which is not known here")
        if not index.kernels:
            raise StudyError(f"{directory}: the index names no kernel, so there is nothing to verify")
        bench = opening(load(index.operator, OPERATORS, "operator"))
        findings = []
        for finding in _findings(folder, index, bench, rebuild):
            say(finding)
            findings.append(finding)
    return Verification(str(directory), tuple(findings))


def _findings(folder: Folder, index: Index, bench: Workbench, rebuild: bool) -> Iterator[Finding]:
    texts = DROPINS[index.operator].texts()
    for name in texts:
        yield Finding(name, _dropin_problem(folder, index, name))
    for workload in index.workloads:
        if workload.kernel not in index.kernels:
            yield Finding(MANIFEST, f"workload {workload.name!r} goes to a kernel that is not there")
    for name in folder.names():
        if name not in {*texts, *REPORTS, MANIFEST, KERNELS}:
            problem = "has no place in an export; Python may load it in place of the drop-in: remove it"
            yield Finding(name, problem)
    with ExitStack() as stack:
        try:
            kernels = stack.enter_context(folder.folder(KERNELS))
        except StudyError as error:
            yield Finding(KERNELS, str(error))
            return
        for name in kernels.names():
            if name not in index.kernels:
                yield Finding(name, "the index does not name it")
        for id, expected in index.kernels.items():
            try:
                yield _judge(kernels, id, expected, bench, rebuild)
            except (_Broken, StudyError) as error:
                yield Finding(id, str(error))


def _dropin_problem(folder: Folder, index: Index, name: str) -> str:
    """The text that a user of the directory imports must be ours, whatever the index says of it."""
    ours = DROPINS[index.operator].texts()[name]
    if name == BYTECODE and name not in folder.names():
        return ""
    try:
        found = folder.read(name, len(ours))
    except StudyError as error:
        if name == BYTECODE:
            return "holds what Python may load in place of the drop-in: remove it, nothing is lost"
        return str(error)
    if found == ours:
        return ""
    return f"is not the drop-in of this evotune (exported by version {index.evotune}): export again"


def _judge(kernels: Folder, id: str, expected: str, bench: Workbench, rebuild: bool) -> Finding:
    """Raises _Broken, StudyError."""
    with kernels.folder(id) as folder:
        manifest = read_kernel(folder, id, expected)
        contents = {entry.name: folder.checked(entry) for entry in manifest.files()}
        strangers = set(folder.names()) - {MANIFEST, *contents}
    if strangers:
        raise _Broken(f"the manifest does not name {min(strangers)}")
    _check_processor(manifest)
    libraries = {}
    for built in manifest.objects:
        libraries[_specialization(built)] = _linked(built, contents, manifest, bench)
    report = _gate(libraries, manifest, bench)
    if (failed := report.failed) is not None:
        raise _Broken(told(failed))
    rebuilt = None
    if rebuild:
        rebuilt = all(_rebuilds(built, contents, manifest, bench) for built in manifest.objects)
        if not rebuilt and manifest.toolchain == bench.toolchain.id:
            raise _Broken("its source, built here with the same toolchain, gives another object")
    return Finding(id, worst_error=report.worst_error, rebuilt=rebuilt)


def _check_processor(manifest: KernelManifest) -> None:
    here = this_cpu()
    missing = sorted(set(manifest.cpu.flags) - set(here.flags))
    if manifest.cpu.machine != here.machine or missing:
        raise _Broken(
            f"built for {manifest.cpu.model} ({manifest.cpu.machine}), this is {here.model} ({here.machine})"
            f"{'; missing here: ' + ' '.join(missing[:8]) if missing else ''}: export again on this machine"
        )


def _specialization(built: ObjectEntry) -> Specialization:
    facts = built.specialization
    spec = Specialization(facts.operator, facts.dtype, tuple(sorted(facts.constants.items())))
    if spec.label != built.label:
        raise _Broken(f"object {built.label} says it is for {spec.label}")
    return spec


def _linked(
    built: ObjectEntry, contents: dict[str, bytes], manifest: KernelManifest, bench: Workbench
) -> bytes:
    linked = bench.link(contents[built.object.name], manifest.entry)
    if isinstance(linked, Failed):
        raise _Broken(f"{built.object.name}: {told(linked)}")
    if linked != contents[built.library.name]:
        raise _Broken(
            f"{built.library.name} is not what linking {built.object.name} gives "
            f"(exported with {manifest.toolchain.split(';')[0]}, here {bench.toolchain.version})"
        )
    return linked


def _gate(libraries: dict[Specialization, bytes], manifest: KernelManifest, bench: Workbench) -> GateReport:
    if manifest.entry != bench.operator.entry:
        raise _Broken(f"exports {manifest.entry}, the operator's entry is {bench.operator.entry}")
    try:
        with bench.session(libraries, manifest.entry) as session:
            return bench.gate.judge(session, tuple(libraries), "full")
    except (KeyError, TypeError, ValueError) as error:
        # The operator cannot make sense of what the manifest calls a specialization.
        raise _Broken(f"its specializations are not understood: {error!r}") from error


def _rebuilds(
    built: ObjectEntry, contents: dict[str, bytes], manifest: KernelManifest, bench: Workbench
) -> bool:
    text = contents[manifest.source.name].decode(errors="replace")
    unit = Unit("c", text, manifest.entry, tuple(sorted(built.constants.items())))
    return bench.compile(unit) == contents[built.object.name]


def told(failed: Failed) -> str:
    """ "wrong at edges (odd T): o, head 0, chunk 1 …" """
    case = f" ({failed.case})" if failed.case else ""
    return f"{failed.failure.value} at {failed.stage.value}{case}: {failed.detail}"
