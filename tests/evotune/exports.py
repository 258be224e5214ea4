"""Exported directories made by hand, with real kernels of the host template but without the judge."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from functools import cache
from hashlib import sha256
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from evotune import bundle, manifest
from evotune.fitness.operator import Operator
from evotune.reference_kda.operator import KDA
from evotune.reference_kda.problem import LOWER_BOUND
from evotune.search_space.branch import Branch, Candidate
from evotune.search_space.template import Specialization, Unit
from evotune.search_space.templates.kda_host import TEMPLATE, KdaHostKnobs
from evotune.targets import Target
from evotune.workbench import Bench, Workbench
from tests.search_space.host_kernel import Kernel, compile_unit

Build = Callable[[Unit], tuple[bytes, bytes]]
GPU = manifest.Gpu(name="Test GPU", compute_capability="9.0", driver="1.2", cuda="13.0")
# More than a kernel of the host's asks for; a GPU's kernel cannot be asked.
WORKSPACE = (
    manifest.WorkspaceTerm(bytes=1 << 16, sizes=()),
    manifest.WorkspaceTerm(bytes=1 << 12, sizes=("T", "HV")),
    manifest.WorkspaceTerm(bytes=1 << 16, sizes=("N", "HV")),
)
INTERVAL = manifest.Interval(low=1.8, median=2.0, high=2.3, confidence=0.96)


@cache
def bench() -> Workbench:
    """One judge for all tests: solving the gate's cases takes seconds."""
    return Workbench.open(KDA)


def opened(target: Target, operator: Operator) -> Bench:
    """For `verify`."""
    assert (target.name, operator.name) == ("host", "kda")
    return bench()


def timing(workload: str, group: str, time_us: float = 10.0) -> manifest.Timing:
    block = manifest.Block(samples_us=(time_us,), baseline_samples_us=(2 * time_us,), naive_us=9 * time_us)
    return manifest.Timing(
        workload=workload,
        group=group,
        time_us=time_us,
        speedup=INTERVAL,
        naive_ratio=INTERVAL,
        blocks=(block,),
    )


def spec_entry(spec: Specialization) -> manifest.SpecializationEntry:
    return manifest.SpecializationEntry(
        operator=spec.operator,
        dtype=spec.dtype,
        constants=dict(spec.constants),  # type: ignore[arg-type]
    )


def kernel(
    id: str,
    specs: Sequence[Specialization],
    folder: Path,
    *,
    knobs: KdaHostKnobs | None = None,
    note: str = "the template as shipped",
    timings: tuple[manifest.Timing, ...] = (),
    source: str = TEMPLATE.source,
    build: Build | None = None,
    toolchain: str = "gcc, by hand",
    target: str = "host",
) -> bundle.Exported:
    """`source` with `knobs` compiled for `specs`, by gcc alone unless there is a `build`.

    One for another `target` is the host's all the same, in a manifest as that target's have.
    """
    gpu = target != "host"
    contents = {"kernel.c": source.encode()}
    objects = []
    knobs = knobs or KdaHostKnobs()
    for spec in specs:
        unit = TEMPLATE.unit(source, knobs, spec)
        object_, library = build(unit) if build else compiled(unit, folder)
        contents |= {f"{spec.label}.o": object_, f"{spec.label}.so": library}
        objects.append(
            manifest.ObjectEntry(
                label=spec.label,
                specialization=spec_entry(spec),
                constants=dict(unit.constants),
                object=manifest.FileEntry.of(f"{spec.label}.o", object_),
                library=manifest.FileEntry.of(f"{spec.label}.so", library),
                reproducible=True,
                resources={"code_bytes": len(object_)},
                scalars={"lower_bound": LOWER_BOUND},
                workspace=WORKSPACE if gpu else None,
            )
        )
    branch = Branch("b00", source, None, "seed", note)
    return bundle.Exported(
        manifest.KernelManifest(
            id=id,
            number=7,
            candidate=Candidate(branch, knobs).digest,
            template="kda_host",
            target=target,
            language="cute" if gpu else "c",
            entry="kda_forward",
            branch="b00",
            parents=(),
            origin="seed",
            note=note,
            lineage=(manifest.Ancestor(branch="b00", origin="seed", note=note),),
            knobs=dataclasses.asdict(knobs),
            front=True,
            fastest_on=(),
            source=manifest.FileEntry.of("kernel.c", contents["kernel.c"]),
            objects=tuple(objects),
            toolchain=toolchain,
            versions={"evotune": "0"},
            cpu=manifest.this_cpu(),
            gpu=GPU if gpu else None,
            evidence=manifest.Evidence(
                level="full", gate_seeds=1, worst_error=0.4, host_call_us=1.0, timings=timings
            ),
            licence="Apache-2.0",
        ),
        contents,
    )


def compiled(unit: Unit, folder: Path) -> tuple[bytes, bytes]:
    """Object and library."""
    path = compile_unit(unit, folder)
    Kernel(unit, folder)
    return path.read_bytes(), path.with_suffix(".so").read_bytes()


def workload(
    name: str, spec: Specialization, kernel: str, *, N: int = 1, T: int = 64, H: int = 1, HV: int = 1
) -> manifest.WorkloadEntry:
    return manifest.WorkloadEntry(
        name=name,
        group=name,
        label=spec.label,
        dtype=spec.dtype,  # type: ignore[arg-type]
        constants=dict(spec.constants),
        sizes={"N": N, "T": T, "H": H, "HV": HV},
        scalars={"scale": 1.0, "lower_bound": LOWER_BOUND},
        kernel=kernel,
    )


def index(
    kernels: Sequence[bundle.Exported],
    workloads: Sequence[manifest.WorkloadEntry],
    left_out: tuple[manifest.LeftOut, ...] = (),
    study: str = "by hand",
) -> manifest.Index:
    return manifest.Index(
        evotune="0",
        created="2026-01-01T00:00:00",
        study=study,
        operator="kda",
        template="kda_host",
        target=kernels[0].manifest.target if kernels else "host",
        cpu=manifest.this_cpu(),
        gpu=kernels[0].manifest.gpu if kernels else None,
        kernels={k.manifest.id: sha256(manifest.to_json(k.manifest)).hexdigest() for k in kernels},
        workloads=tuple(workloads),
        left_out=left_out,
    )


def reseal(directory: Path, kernel: str = "good", **changes: object) -> None:
    """Change a kernel's manifest as an attacker would, with every hash made to fit."""
    own = directory / "kernels" / kernel
    data = json.loads((own / "manifest.json").read_text()) | changes
    entries = [data["source"]]
    for built in data["objects"]:
        entries += [built["object"], built["library"]]
    for entry in entries:
        if "/" not in entry["name"] and (own / entry["name"]).is_file():
            content = (own / entry["name"]).read_bytes()
            entry |= {"sha256": sha256(content).hexdigest(), "size_bytes": len(content)}
    (own / "manifest.json").write_text(json.dumps(data))
    index = json.loads((directory / "manifest.json").read_text())
    index["kernels"][kernel] = sha256((own / "manifest.json").read_bytes()).hexdigest()
    (directory / "manifest.json").write_text(json.dumps(index))


def load_dropin(pareto: Path) -> Any:
    """The exported `kda.py` as a module of its own, not shared with another export."""
    found = spec_from_file_location(f"exported_{abs(hash(pareto))}", pareto / "kda.py")
    assert found is not None
    assert found.loader is not None
    module: ModuleType = module_from_spec(found)
    found.loader.exec_module(module)
    return module
