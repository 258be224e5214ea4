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
from evotune.fitness.cuda import SANITIZERS, Sanitized
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
from evotune.fitness.outcome import Artifact, Failed, Failure, Measurement, Passed, Resources, Stage
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
from evotune.verify import Finding, Verification, verify
from evotune.workbench import Unable
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
WATCHED = Sanitized(dict.fromkeys(SANITIZERS, ""))


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

    def sanitize(self, candidate: Candidate) -> Sanitized:
        return WATCHED

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
        assert manifest.evidence.sanitizer is not None
        assert manifest.evidence.sanitizer.found == WATCHED.found
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
        assert kernel.line.endswith(
            "hashes and inspections hold, not run; rebuilds to the same objects; "
            "compute-sanitizer at export: memcheck, racecheck, synccheck found nothing"
        )

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
            ("A_log", torch.zeros(2 * HV)[::2]),
            ("A_log", torch.zeros(1).expand(HV)),
            ("dt_bias", torch.zeros(HV + 1, K)),
            ("dt_bias", torch.zeros(2 * HV * K)[::2].view(HV, K)),
            ("dt_bias", torch.zeros(K, HV).mT),
            ("initial_state", good["initial_state"].mT),
            ("initial_state", good["initial_state"].double()),
            ("cu_seqlens", good["cu_seqlens"].long()),
            ("cu_seqlens", torch.zeros(4, dtype=torch.int32)[::2]),
            ("cu_seqlens", torch.zeros(1, dtype=torch.int32).expand(2)),
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

    @pytest.mark.parametrize(
        ("says", "shown"),
        [
            (None, "says nothing of compute-sanitizer"),
            ({"found": {}, "absent": "not \x1b[2Jhere"}, r"was not run at export: 'not \x1b[2Jhere'"),
            ({"found": {}}, "was not run at export: 'nobody says why'"),
            ({"found": {"memcheck": ""}}, "compute-sanitizer at export: memcheck found nothing"),
        ],
    )
    def test_what_a_manifest_says_of_the_sanitizer_is_shown(
        self,
        pareto: Path,
        tmp_path: Path,
        processor: Callable[[], CudaWorkbench],
        says: dict[str, Any] | None,
        shown: str,
    ) -> None:
        found = saying(pareto, tmp_path, says, processor)
        assert not found.problem
        assert shown in found.line
        assert shown in found.sanitizer

    def test_a_complaint_in_its_own_manifest_fails_a_kernel(
        self, pareto: Path, tmp_path: Path, processor: Callable[[], CudaWorkbench]
    ) -> None:
        found = saying(pareto, tmp_path, {"found": {"memcheck": "", "racecheck": "a \x1bhazard"}}, processor)
        assert found.problem == r"its own manifest says: compute-sanitizer's racecheck found 'a \x1bhazard'"


def saying(
    pareto: Path, folder: Path, says: dict[str, Any] | None, processor: Callable[[], CudaWorkbench]
) -> Finding:
    """Of the good kernel, in whose manifest this stands of the sanitizer; without the gate, to be quick."""
    shutil.copytree(pareto, folder / "out")
    own = folder / "out" / "kernels" / "good" / "manifest.json"
    evidence = json.loads(own.read_text())["evidence"]
    exports.reseal(folder / "out", evidence=evidence | {"sanitizer": says})
    bench = replace(processor(), unable=Unable(run="no GPU"))
    findings = verify(folder / "out", opening=lambda target, operator: bench).findings
    return next(finding for finding in findings if finding.name == "good")


class ByHand:
    """A judge that confirms whatever it is given, and has this to say of it under the sanitizer."""

    gpu = Gpu("NVIDIA H200", "GPU-0", 0)

    def __init__(self, folder: Path, watched: Sanitized | Failed) -> None:
        self.path, self.watched = folder / "object", watched
        self.path.write_bytes(b"object")

    def __call__(self, setup: Setup, cache: Path | None = None) -> "ByHand":
        self.setup = setup
        return self

    def confirm(self, candidate: Candidate, blocks: int) -> Confirmation:
        setup = self.setup
        artifact = Artifact("0" * 64, self.path, "kda_forward", "sm_90a", "by hand", Resources({}), 1.0)
        measured = tuple(Measurement(w.name, w.group, (50.0,) * 3, (100.0,) * 3) for w in setup.workloads)
        timed, naive = Timed(measured, 0.4, 12.0), {w.name: 1e6 for w in setup.workloads}
        artifacts = dict.fromkeys(setup.specializations, artifact)
        return Confirmation(artifacts, GateReport("full", ()), (timed,) * blocks, (naive,) * blocks)

    def sanitize(self, candidate: Candidate) -> Sanitized | Failed:
        return self.watched

    def library(self, artifact: Artifact) -> bytes:
        return b"library"

    def close(self) -> None:
        """Nothing is open."""


def exported(
    folder: Path, monkeypatch: pytest.MonkeyPatch, watched: Sanitized | Failed
) -> tuple[Exporting, str]:
    """With what was said."""
    said: list[str] = []
    monkeypatch.setattr(devices, "sm_90a", ByHand(folder, watched))
    monkeypatch.setattr(device, "described", lambda uuid: H200)
    monkeypatch.setattr(CudaLinker, "version", "GNU ld by hand")
    setup = setup_of(folder)
    done = export(Job(setup, judged(setup), folder / "pareto", blocks=6, say=said.append))
    return done, "\n".join(said)


@pytest.mark.parametrize(
    ("watched", "reason"),
    [
        (
            Sanitized({"memcheck": "", "racecheck": "Race reported"}),
            "compute-sanitizer's racecheck found 'Race reported'",
        ),
        (Failed(Failure.BUILD_ERROR, Stage.BUILD, "no room"), "build_error at build: no room"),
    ],
)
def test_whom_the_sanitizer_complains_of_is_left_out_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, watched: Sanitized | Failed, reason: str
) -> None:
    done, said = exported(tmp_path, monkeypatch, watched)
    assert done.exported == ()
    assert [(k.id, k.reason) for k in done.left_out] == [("b00-0000", reason)]
    assert said == f"1/1 b00-0000 left out: {reason}"
    index = json.loads((done.out / "manifest.json").read_text())
    assert index["left_out"][0]["reason"] == reason


@pytest.mark.parametrize(
    ("watched", "line"),
    [
        (WATCHED, "compute-sanitizer at export: memcheck, racecheck, synccheck found nothing"),
        (Sanitized(absent="not installed"), "compute-sanitizer was not run at export: 'not installed'"),
    ],
)
def test_what_the_sanitizer_said_is_part_of_the_evidence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, watched: Sanitized, line: str
) -> None:
    done, said = exported(tmp_path, monkeypatch, watched)
    manifest = json.loads((done.out / "kernels" / "b00-0000" / "manifest.json").read_text())
    expected = {"found": dict(watched.found), "absent": watched.absent}
    assert manifest["evidence"]["sanitizer"] == expected
    assert said.endswith(f"; {line}")


def test_what_a_kernel_resembles_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alike = {"fla 0.6 (MIT)": 0.43}
    monkeypatch.setattr("evotune.export.resemblances", lambda text, own: alike)
    done, said = exported(tmp_path, monkeypatch, WATCHED)
    manifest = json.loads((done.out / "kernels" / "b00-0000" / "manifest.json").read_text())
    assert manifest["resembles"] == alike
    assert "; resembles 'fla 0.6 (MIT)' (43% of its new text); compute-sanitizer" in said


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
