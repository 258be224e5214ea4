"""Export and verify for a GPU on a machine without one.

A real object of the DSL is exported with a judgement that was made up, and verified as far as it goes without
the GPU. And the whole way with the processor in the GPU's place: judged, exported, verified with the gate.
"""

import ctypes
import json
import shutil
import subprocess
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evotune import bundle, devices
from evotune.config import parse
from evotune.cuda_workbench import CudaWorkbench
from evotune.errors import DeviceError, StudyError
from evotune.export import Exporting, Job, export
from evotune.fitness import cute_toolchain, device
from evotune.fitness.build import Builder, BuildPlan
from evotune.fitness.cache import Cache
from evotune.fitness.cuda_link import RUNTIME, CudaLinker
from evotune.fitness.cuda_runner import CudaCell
from evotune.fitness.cute_toolchain import CuteToolchain
from evotune.fitness.device import Described
from evotune.fitness.elf import Elf
from evotune.fitness.gate import GateReport
from evotune.fitness.inspection import inspect_object, inspect_shared
from evotune.fitness.judge import Confirmation
from evotune.fitness.lease import Gpu
from evotune.fitness.link import Linker
from evotune.fitness.objectives import Evidence, values
from evotune.fitness.operator import specialization
from evotune.fitness.outcome import Artifact, Measurement, Passed
from evotune.fitness.sandbox import Sandbox
from evotune.fitness.timing import Timed
from evotune.history import Entry, History
from evotune.records import Asked, BranchAdded, Judged, StudyBegun
from evotune.reference_kda.operator import KDA
from evotune.search_space.branch import Candidate
from evotune.search_space.template import Unit
from evotune.search_space.templates import kda_host
from evotune.search_space.templates.kda_host import KdaHostKnobs
from evotune.setup import Setup, resolve
from evotune.verify import Verification, verify
from tests.evotune import exports
from tests.evotune.toy import call
from tests.fitness import fake_gpu
from tests.search_space import host_kernel

TABLES: dict[str, Any] = {
    "study": {"name": "hopper", "template": "kda_sm90_chunked"},
    "workload": [
        {
            "name": "large",
            "group": "many",
            "lengths": [8192] * 4,
            "heads": 64,
            "dtype": "bfloat16",
            "contract": "production",
        }
    ],
}
H200 = Described("NVIDIA H200", "9.0", "580.1", "13.0")


def judged(setup: Setup) -> History:
    """The default of the seed, passed."""
    measurements = tuple(Measurement(w.name, w.group, (50.0,) * 3, (100.0,) * 3) for w in setup.workloads)
    language = setup.template.language
    evidence = Evidence(measurements, 0.5, 1.0, setup.template.source, language)
    passed = Passed("screen", 0.5, measurements, 1.0, values(setup.objectives, evidence), {})
    begun = StudyBegun(setup.config.as_json(), str(setup.base), setup.columns, {})
    seed = BranchAdded(-1, "b00", setup.template.source, None, "seed", "the template as shipped")
    knobs = setup.space.encode(setup.template.default(setup.specializations[0]))
    asked = Asked(0, 0, 0, "b00", knobs, "tune")
    return History(begun, (seed,), (Entry(asked, Judged(0, 0, 0, passed, {}, {}, 1.0)),), ())


class MadeUp:
    """Builds for real, and says that all is well."""

    gpu = Gpu("NVIDIA H200", "GPU-0", 0)

    def __init__(self, setup: Setup, cache: Path | None = None) -> None:
        assert cache is not None
        self.setup = setup
        sandbox = Sandbox.detect()
        self.linker = CudaLinker(sandbox)
        plan = BuildPlan(workers=1)
        self.builder = Builder(CuteToolchain(), sandbox, Cache(cache), plan, self.linker)

    def confirm(self, candidate: Candidate, blocks: int) -> Confirmation:
        template, operator = self.setup.template, self.setup.operator
        artifacts = {}
        for workload in self.setup.workloads:
            spec = specialization(operator, workload)
            unit = template.unit(candidate.branch.source, candidate.knobs, spec)
            found = self.builder.build(unit, spec.label).result()
            assert isinstance(found, Artifact), found
            artifacts[spec] = found
        measured = tuple(Measurement(w.name, w.group, (51.0,) * 3, (99.0,) * 3) for w in self.setup.workloads)
        timed = Timed(measured, 0.4, 12.0)
        naive = {w.name: 1e6 for w in self.setup.workloads}
        return Confirmation(artifacts, GateReport("full", ()), (timed,) * blocks, (naive,) * blocks)

    def library(self, artifact: Any) -> bytes:
        path: Any = self.linker.link(artifact)
        data: bytes = path.read_bytes()
        return data

    def close(self) -> None:
        self.builder.close()


@pytest.fixture(scope="module")
def hopper(tmp_path_factory: pytest.TempPathFactory) -> Exporting:
    lack = cute_toolchain.missing()
    if lack is not None:
        pytest.skip(lack)
    folder = tmp_path_factory.mktemp("hopper")
    setup = resolve(parse(TABLES, "test"), folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "sm_90a", MadeUp)
        patch.setattr(device, "described", lambda uuid: H200)
        return export(Job(setup, judged(setup), folder / "pareto", blocks=6))


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("devices", "cuda_workbench"):
        monkeypatch.setattr(f"evotune.{module}.absent", lambda target: "this machine has no NVIDIA GPU")


@pytest.fixture
def copy(hopper: Exporting, tmp_path: Path) -> Path:
    shutil.copytree(hopper.out, tmp_path / "pareto")
    return tmp_path / "pareto"


@pytest.mark.compile
class TestARealObject:
    def test_the_manifest_says_what_it_was_judged_on(self, hopper: Exporting) -> None:
        manifest = hopper.exported[0].manifest
        assert (manifest.target, manifest.language, manifest.source.name) == ("sm_90a", "cute", "kernel.py")
        assert manifest.gpu is not None
        assert vars(H200) == manifest.gpu.model_dump()
        assert {"torch", "apache-tvm-ffi", "nvidia-cutlass-dsl", "linker"} <= manifest.versions.keys()
        assert manifest.versions["linker"].startswith("GNU ld")
        built = manifest.objects[0]
        assert built.resources["registers"] > 0
        assert {"spill_bytes", "shared_bytes", "threads"} <= built.resources.keys()
        assert manifest.evidence.host_call_us == 12.0
        page = (hopper.out / "pareto.html").read_text()
        assert "NVIDIA H200, driver 580.1" in page

    def test_the_workspace_is_at_least_what_the_template_asks(self, hopper: Exporting) -> None:
        built = hopper.exported[0].manifest.objects[0]
        setup = resolve(parse(TABLES, "test"), hopper.out.parent)
        needs, spec = setup.template.workspace_bytes, setup.specializations[0]  # type: ignore[attr-defined]
        for N, T, HV in ((1, 1, 1), (4, 4 * 8192, 64), (1000, 1999, 3), (0, 0, 5)):
            sizes = {"N": N, "T": T, "H": 1, "HV": HV}
            assert needs(setup.template.default(spec), spec, sizes) <= built.workspace_bytes(sizes)

    def test_the_runtime_library_is_asked_for_and_not_shipped(self, hopper: Exporting) -> None:
        names = {path.name for path in hopper.out.rglob("*")}
        assert RUNTIME not in names
        library = next(hopper.out.rglob("*.so"))
        parsed = Elf(library.read_bytes())
        assert [parsed.dynamic_name(value) for tag, value in parsed.dynamic() if tag == 1] == [RUNTIME]
        assert b"cutlass_dsl/" not in library.read_bytes()

    def test_without_the_gpu_it_holds_as_far_as_can_be_told(self, hopper: Exporting) -> None:
        found = verify(hopper.out)
        kernel = found.findings[-1]
        assert found.held, found
        assert found.undone == "no kernel was run: this machine has no NVIDIA GPU"
        assert found.verdict == f"holds as far as this machine can tell: {found.undone}"
        assert (kernel.worst_error, kernel.relinked, kernel.rebuilt) == (None, True, True)
        assert kernel.line.endswith("hashes and inspections hold, not run; rebuilds to the same objects")

    def test_the_command_has_an_exit_code_for_that(
        self, hopper: Exporting, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """On a machine without the DSL, too."""
        monkeypatch.setattr("evotune.cuda_workbench.missing", lambda: "the DSL is not installed")
        done = call("verify", hopper.out, "--rebuild")
        assert done.returncode == 3, done.stderr
        assert "holds as far as this machine can tell: no kernel was run: this machine has no" in done.stdout
        assert "none was built: the DSL is not installed" in done.stdout

    def test_a_source_that_gives_another_object_is_found(self, copy: Path) -> None:
        own = copy / "kernels" / "b00-0000"
        text = (own / "kernel.py").read_text()
        (own / "kernel.py").write_text(text.replace("NORM_EPSILON = 1e-6", "NORM_EPSILON = 2e-6"))
        exports.reseal(copy, "b00-0000")
        assert "gives another object" in problem(verify(copy))

    def test_an_object_of_another_language_is_refused(self, copy: Path, tmp_path: Path) -> None:
        exports.reseal(copy, "b00-0000", language="c")
        assert "is for sm_90a in c, the index says sm_90a" in problem(verify(copy))

    def test_a_library_that_calls_what_none_may(self, copy: Path, tmp_path: Path) -> None:
        evil = "int system(const char *); int __tvm_ffi_kda_forward(void) { return system(0); }"
        (tmp_path / "evil.c").write_text(evil)
        library = next((copy / "kernels" / "b00-0000").glob("*.so"))
        flags = ("-shared", "-fPIC", "-nostdlib", "-nostartfiles", "-Wl,--build-id=none")
        subprocess.run(["cc", *flags, str(tmp_path / "evil.c"), "-o", str(library)], check=True)
        exports.reseal(copy, "b00-0000")
        assert "refused at inspect: foreign symbols: system" in problem(verify(copy))

    def test_a_swapped_library_is_found_where_the_linker_is_the_same(self, copy: Path) -> None:
        path = next((copy / "kernels" / "b00-0000").glob("*.so"))
        data = bytearray(path.read_bytes())
        at = section(bytes(data), ".rodata")
        data[at] ^= 1
        path.write_bytes(bytes(data))
        exports.reseal(copy, "b00-0000")
        assert "is not what linking its object gives" in problem(verify(copy))

    def test_another_linker_s_library_is_taken_as_it_is(
        self, copy: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its bytes cannot be compared; it is what the gate judges, where there is a GPU."""
        monkeypatch.setattr("evotune.cuda_workbench.missing", lambda: "the DSL is not installed")
        versions = json.loads((copy / "kernels" / "b00-0000" / "manifest.json").read_text())["versions"]
        path = next((copy / "kernels" / "b00-0000").glob("*.so"))
        path.write_bytes(path.read_bytes() + b"\0")
        exports.reseal(copy, "b00-0000", versions=versions | {"linker": "GNU ld 1.0"})
        found = verify(copy)
        assert found.held
        assert found.findings[-1].relinked is False
        assert "linked by another linker" in found.findings[-1].line

    def test_the_function_looks_at_what_the_dropin_leaves_to_it(self, hopper: Exporting) -> None:
        """On memory that claims to be a GPU's and is never touched: for no sequence nothing is launched."""
        torch = pytest.importorskip("torch")
        module = exports.load_dropin(hopper.out)
        kernel = module.shipped(module.Choice("b00-0000", next(hopper.out.rglob("*.so")).stem))
        function = module._function(kernel.library, kernel.manifest["entry"])
        T, H, HV, K, half = 8, 2, 4, 128, torch.bfloat16
        room = torch.zeros(1 << 16, dtype=torch.uint8)
        good = {
            "q": torch.zeros(T, H, K, dtype=half),
            "k": torch.zeros(T, H, K, dtype=half),
            "v": torch.zeros(T, HV, K, dtype=half),
            "g": torch.zeros(T, HV, K, dtype=half),
            "beta": torch.zeros(T, HV, dtype=half),
            "A_log": torch.zeros(HV),
            "dt_bias": torch.zeros(HV, K),
            "initial_state": torch.zeros(1, HV, K, K),
            "cu_seqlens": torch.zeros(2, dtype=torch.int32),
            "o": torch.zeros(T, HV, K, dtype=half),
            "final_state": torch.zeros(1, HV, K, K),
            "workspace": room[-room.data_ptr() % 128 :],  # as a GPU's allocator aligns
        }

        def call(**changed: Any) -> None:
            tensors = [OnGpu(x) for x in (good | changed).values()]
            function(*tensors, 0, T, H, HV, 1.0, -5.0)

        with suppress(RuntimeError):  # after its own look it asks CUDA for a driver
            call()
        wide = torch.zeros(T * H * K + 1, dtype=half)
        for name, x in (
            ("k", good["k"].float()),
            ("k", good["k"][None]),
            ("k", torch.zeros(T, H + 1, K, dtype=half)),
            ("k", torch.zeros(T + 1, H, K, dtype=half)),
            ("k", torch.zeros(T, H, 64, dtype=half)),
            ("k", torch.zeros(T, H, 2 * K, dtype=half)[..., :K]),
            ("k", wide[1:].view(T, H, K)),
            ("beta", torch.zeros(T, 2 * HV, dtype=half)[:, ::2]),
            ("A_log", torch.zeros(HV + 1)),
            ("dt_bias", torch.zeros(K, HV).mT),
            ("initial_state", good["initial_state"].mT),
            ("initial_state", good["initial_state"].double()),
            ("cu_seqlens", good["cu_seqlens"].long()),
        ):
            with pytest.raises(ValueError, match="Mis"):
                call(**{name: x})


class OnGpu:
    """A tensor that says of itself that it is on CUDA device 0."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)

    def __dlpack__(self, **_: Any) -> Any:
        capsule = self.tensor.__dlpack__()
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        managed: Any = pointer(capsule, b"dltensor")
        ctypes.c_int32.from_address(managed + 8).value = 2  # DLTensor: void *data; DLDevice device; …
        return capsule


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], CudaWorkbench]:
    """Benches whose GPU is the processor; one set of solved cases."""
    host = exports.bench()
    script = Path(fake_gpu.__file__).resolve()
    packages = ("torch", "numpy", "typing_extensions")
    limits = replace(host.limits, arena_mib=128)

    def made() -> CudaWorkbench:
        return CudaWorkbench(
            KDA,
            host.gate,
            host.sandbox,
            limits,
            toolchain=host.toolchain,
            linker=Linker(host.toolchain, host.sandbox),
            linker_id="ld",
            cell=CudaCell(host.sandbox, limits.arena_mib << 20, script, (), script, packages=packages),
            refusal=lambda object_, entry: getattr(inspect_object(object_, entry), "detail", None),
            library_refusal=inspect_shared,
        )

    return made


def built(unit: Unit) -> tuple[bytes, bytes]:
    object_: Any = exports.bench().compile(unit)
    library: Any = exports.bench().link(object_, unit.entry)
    return object_, library


CHUNKED = KdaHostKnobs(algorithm="chunked")
WRONG = kda_host.TEMPLATE.source.replace("row * q[k + j];", "row * q[k + j] * 1.01f;")


@pytest.fixture(scope="module")
def pareto(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("processor")
    spec = host_kernel.spec(64, 64)
    kernels = [
        exports.kernel("good", (spec,), folder, knobs=CHUNKED, build=built, target="sm_90a"),
        exports.kernel("wrong", (spec,), folder, source=WRONG, build=built, target="sm_90a"),
    ]
    bundle.write(folder / "out", exports.index(kernels, [exports.workload("w", spec, "good")]), kernels)
    return folder / "out"


class TestTheProcessorInTheGpusPlace:
    def test_right_and_wrong_are_told_apart(
        self, pareto: Path, processor: Callable[[], CudaWorkbench]
    ) -> None:
        assert kda_host.TEMPLATE.source != WRONG
        found = verify(pareto, rebuild=True, opening=lambda target, operator: processor())
        good, wrong = found.findings[-2:]
        assert found.undone == ""
        assert (good.problem, good.relinked, good.rebuilt) == ("", True, True)
        assert good.worst_error is not None
        assert 0 < good.worst_error <= 1
        assert wrong.problem.startswith("wrong at ")

    def test_a_workspace_that_is_too_small_is_found(
        self, pareto: Path, tmp_path: Path, processor: Callable[[], CudaWorkbench]
    ) -> None:
        """The drop-in hands over what the manifest says, so the gate does too."""
        shutil.copytree(pareto, tmp_path / "out")
        own = tmp_path / "out" / "kernels" / "good" / "manifest.json"
        objects = json.loads(own.read_text())["objects"]
        exports.reseal(tmp_path / "out", objects=[objects[0] | {"workspace": []}])
        found = verify(tmp_path / "out", opening=lambda target, operator: processor())
        problems = {finding.name: finding.problem for finding in found.findings}
        assert problems["good"].split(" at ")[0] in ("wrong", "fault"), problems["good"]

    def test_a_size_that_the_operator_does_not_have(
        self, pareto: Path, tmp_path: Path, processor: Callable[[], CudaWorkbench]
    ) -> None:
        shutil.copytree(pareto, tmp_path / "out")
        own = tmp_path / "out" / "kernels" / "good" / "manifest.json"
        objects = json.loads(own.read_text())["objects"]
        terms = [{"bytes": 1, "sizes": ["ghost"]}]
        exports.reseal(tmp_path / "out", objects=[objects[0] | {"workspace": terms}])
        found = verify(tmp_path / "out", opening=lambda target, operator: processor())
        problems = {finding.name: finding.problem for finding in found.findings}
        assert "not understood: KeyError('ghost')" in problems["good"]


def section(data: bytes, name: str) -> int:
    """Offset of a section's first byte."""
    return next(s.offset for s in Elf(data).sections if s.name == name)


def problem(found: Verification) -> str:
    problems = [finding.problem for finding in found.findings if finding.problem]
    assert len(problems) == 1, found
    return problems[0]


def setup_of(folder: Path, **study: Any) -> Setup:
    return resolve(parse(TABLES | {"study": TABLES["study"] | study}, "test"), folder)


def test_a_study_that_another_device_judged_is_not_exported(tmp_path: Path) -> None:
    setup = setup_of(tmp_path, device="tests.evotune.toy:device")
    with pytest.raises(StudyError, match="was judged by device tests.evotune.toy:device; export judges for"):
        export(Job(setup, judged(setup), tmp_path / "pareto"))


def test_without_the_gpu_nothing_is_exported(tmp_path: Path) -> None:
    setup = setup_of(tmp_path)
    with pytest.raises(DeviceError, match="no NVIDIA GPU"):
        export(Job(setup, judged(setup), tmp_path / "pareto"))
    assert list(tmp_path.iterdir()) == []
