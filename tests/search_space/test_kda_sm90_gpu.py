"""Both Hopper templates on a GPU: every family of `kda_families`, over a covering sample of their knobs.

Objects come from the CuTe-DSL or from a folder (see `kda_objects`); what was found can be kept (`kda_table`).
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from evotune.fitness import cute_toolchain
from evotune.reference_kda.case import KdaCase
from evotune.search_space.template import Specialization
from tests.search_space.kda_families import Case, cases, cases_of_float32
from tests.search_space.kda_objects import (
    CHUNKED,
    CONTRACTS,
    DIMS,
    MAIN,
    PLANTED,
    TOKEN,
    Configuration,
    Kernel,
    compile_into,
    control,
    everything,
    folder_given,
    load,
    sample,
    sanitized,
    spec_of,
)
from tests.search_space.kda_table import Entry, Finding, Table, path_wanted

if TYPE_CHECKING:  # torch is imported where a GPU is
    from tests.search_space.kda_uses import Use

# torch's warnings are not ours.
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1500), pytest.mark.filterwarnings("default")]

SPECS = [
    spec_of(dims, c, dtype) for dtype in ("bfloat16", "float32") for dims in DIMS.values() for c in CONTRACTS
]
MAINS = [spec_of(MAIN, contract) for contract in CONTRACTS]
SHOWN = 12  # failures in a test's message
GIB = 1 << 30
TOOLS = ("memcheck", "initcheck", "synccheck", "racecheck")


class Lab:
    """Loaded kernels, solved cases, and what was found."""

    def __init__(self, folder: Path) -> None:
        self.table = Table()
        self.folder = folder
        self._lost = ""
        self._loaded: dict[Configuration, Kernel] = {}
        workers = max(1, len(os.sched_getaffinity(0)) - 1)
        # Not forked: CUDA is in this process.
        self._pool = ProcessPoolExecutor(workers, get_context("spawn"))
        self._solved: dict[tuple[Specialization, Case], Future[KdaCase]] = {}

    def begin(self, specs: Iterable[Specialization]) -> None:
        """Solve all cases of some specializations, the dearest first."""
        every = [(spec, case) for spec in specs for case in listed(spec)]
        for key in sorted(every, key=lambda item: -item[1].cost):
            self._solved[key] = self._pool.submit(Case.solve, key[1])

    def solved(self, spec: Specialization, case: Case) -> KdaCase:
        """Once: answers are large."""
        return self._solved.pop((spec, case)).result()

    def kernel(self, configuration: Configuration) -> Kernel:
        if configuration not in self._loaded:
            self._loaded[configuration] = load(configuration, self.folder)
        return self._loaded[configuration]

    def kernels(self, spec: Specialization, *templates: str) -> list[Kernel]:
        """All of the sample that were compiled for these facts; skips the test when there is none."""
        chosen = [c for t in templates or (CHUNKED, TOKEN) for c in sample(t) if c.spec == spec]
        if not chosen:
            pytest.skip("no configuration of the sample has these facts")
        return [self.kernel(configuration) for configuration in chosen]

    def put(self, use: "Use", kernels: Iterable[Kernel]) -> None:
        """Ask each kernel and note what it gave.

        A fault or a hang costs this process its device: it is noted, and what comes later names it.
        """
        from tests.search_space.kda_calls import Hang

        for kernel in kernels:
            if self._lost:
                pytest.fail(f"the device was lost: {self._lost}")
            try:
                said = use.ask(kernel)
            except (Hang, RuntimeError) as error:
                said = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
                if isinstance(error, Hang) or "cuda" in said.lower():
                    self._lost = f"{kernel.label}, {use.name}: {said}"
            found = Finding(said) if isinstance(said, str) else said
            entry = Entry(use.family, use.name, kernel.label, found, use.calls, use.hard, use.reports)
            self.table.entries.append(entry)

    def note(self, planted: str, configuration: Configuration, failure: str) -> None:
        entry = Entry("13 planted races", planted, configuration.label, Finding(failure))
        self.table.entries.append(entry)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


@pytest.fixture(scope="module")
def _lab(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    folder = folder_given()
    if folder is None:
        lack = cute_toolchain.missing()
        if lack is not None:
            pytest.skip(lack)
        folder = tmp_path_factory.mktemp("objects")
        compile_into(folder, everything())
    found = Lab(folder)
    found.begin(_specs_to_solve(request.session.items))  # while the GPU is busy with other tests
    yield found
    found.close()
    path = path_wanted()
    if path is not None:
        found.table.write(path)
    print("\n" + found.table.families())  # noqa: T201


def _specs_to_solve(items: Iterable[pytest.Item]) -> set[Specialization]:
    """Of the tests that are about to run and have kernels to judge."""
    name = test_answers_are_within_their_bounds.__name__
    tests = [i for i in items if isinstance(i, pytest.Function) and i.originalname == name]
    asked = {test.callspec.params["spec"] for test in tests}
    return asked & {c.spec for t in (CHUNKED, TOKEN) for c in sample(t)}


@pytest.fixture
def lab(_lab: Lab) -> Iterator[Lab]:
    """Fails the test, at its end, for what it noted."""
    since = len(_lab.table.entries)
    yield _lab
    new = _lab.table.entries[since:]
    failed = [e for e in new if e.found.failure]
    shown = [f"{e.configuration} | {e.family}: {e.case} | {e.found.failure}" for e in failed[:SHOWN]]
    assert not failed, f"{len(failed)} of {len(new)} failed:\n" + "\n".join(shown)


def listed(spec: Specialization) -> tuple[Case, ...]:
    """The cases of a specialization; long ones where K = V = 128."""
    return cases_of_float32(spec) if spec.dtype == "float32" else cases(spec, main=spec in MAINS)


def label(spec: Specialization) -> str:
    return spec.label


@pytest.mark.parametrize("spec", SPECS, ids=label)
def test_answers_to_related_calls_agree(lab: Lab, spec: Specialization) -> None:
    from tests.search_space.kda_uses import Uses

    kernels = lab.kernels(spec)
    for use in Uses(spec, "cuda").all():
        lab.put(use, kernels)


def _need(gib: int) -> None:
    import torch

    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < gib * GIB:
        pytest.skip(f"needs {gib} GiB of GPU memory")


@pytest.mark.parametrize("spec", MAINS, ids=label)
def test_more_chains_than_a_grid_has_rows(lab: Lab, spec: Specialization) -> None:
    """70,000 sequences of two value heads: 140,000 chains, and states of more than 2³¹ elements."""
    from tests.search_space.kda_uses import Use, Uses

    _need(40)
    ask = partial(Uses(spec, "cuda").tiled, count=70_000)
    lab.put(Use("9 index width", "70,000 sequences", ask, ("fla#1077", "fla#1080")), lab.kernels(spec))


@pytest.mark.parametrize("spec", MAINS, ids=label)
def test_more_elements_than_32_bits_count(lab: Lab, spec: Specialization) -> None:
    """262,160 tokens of 64 heads: 2³¹ + 131,072 elements in every tensor, and a state carried all the way."""
    from tests.search_space.kda_width import Wide

    _need(100)
    lab.put(Wide(spec).use, lab.kernels(spec))


@pytest.mark.parametrize("spec", SPECS, ids=label)
def test_answers_are_within_their_bounds(lab: Lab, spec: Specialization) -> None:
    from tests.search_space.kda_uses import Judged

    kernels = lab.kernels(spec)
    for case in listed(spec):
        lab.put(Judged(case, lab.solved(spec, case), "cuda").use, kernels)


@pytest.mark.parametrize("spec", MAINS, ids=label)
def test_the_truth_on_the_gpu_is_that_of_the_processor(spec: Specialization) -> None:
    """What `Wide` is judged by, on a problem that both can solve."""
    from tests.search_space.kda_width import disagreement

    assert disagreement(spec, "cuda") < 1e-10


@pytest.mark.parametrize("template", [CHUNKED, TOKEN])
def test_gate_types_in_turn(lab: Lab, template: str) -> None:
    """bfloat16 raw gates and float32 log decays alternately in one process."""
    from tests.search_space.kda_uses import Use, Uses

    asked = [(lab.kernels(spec, template)[0], Uses(spec, "cuda")) for spec in MAINS]
    for kernel, uses in asked * 3:
        use = Use("3 gates", "gate types in turn", uses.as_before, ("cuLA#16", "cudnn-frontend#1130"), 1)
        lab.put(use, [kernel])


@pytest.mark.parametrize("spec", [s for s in SPECS if s["contract"] == "plain"], ids=label)
def test_a_gate_of_minus_infinity_starts_anew(lab: Lab, spec: Specialization) -> None:
    """The token template takes any gate ≤ 0: where exp(g) = 0, nothing is left of the past."""
    from tests.search_space.kda_uses import Use, Uses

    use = Use(
        "3 gates",
        "a gate of −∞, of −2,661",
        Uses(spec, "cuda").forgotten,
        ("sglang#27488", "executorch#21417"),
        4,
    )
    lab.put(use, lab.kernels(spec, TOKEN))


def _wider(x: Any) -> Any:
    import torch

    return torch.cat([x, x], -1)[..., : x.shape[-1]]


def _other(g: Any) -> Any:
    import torch

    return g.float() if g.dtype == torch.bfloat16 else g.bfloat16()


def _shifted(x: Any) -> Any:
    import torch

    return torch.zeros(x.numel() + 1, dtype=x.dtype, device=x.device)[1:].view(x.shape)


WRONG: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "q is a slice of wider heads (cudnn-frontend#1056)": ("q", _wider),
    "the state is a slice of wider heads": ("initial_state", _wider),
    "v has its heads first": ("v", lambda v: v.transpose(0, 1).contiguous().transpose(0, 1)),
    "g has one gate for a head (fla#639)": ("g", lambda g: g[..., 0].contiguous()),
    "g is of the other contract's type (cudnn-frontend#1130)": ("g", _other),
    "q is float16": ("q", lambda q: q.half()),
    "cu_seqlens is int64": ("cu_seqlens", lambda cu: cu.long()),
    "k has another K": ("k", lambda k: k[..., :32].contiguous()),
    "v is shorter than q": ("v", lambda v: v[:-1]),
    "o is in the processor's memory": ("o", lambda o: o.cpu()),
    "v begins within 16 bytes": ("v", _shifted),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("template", [CHUNKED, TOKEN])
def test_a_wrong_argument_is_refused(lab: Lab, template: str, wrong: str) -> None:
    """By the call, with an error that names the argument, and before anything is launched."""
    from tests.search_space.kda_uses import NAMES, Use, Uses

    name, change = WRONG[wrong]

    def refused(kernel: Kernel) -> str:
        arguments = Uses(kernel.configuration.spec, "cuda").placed((40, 7))
        outputs = arguments.outputs(kernel)
        bound = arguments.bind(outputs)
        place = NAMES.index(name)
        bound[place] = change(bound[place])
        try:
            kernel.function(*bound)
        except (TypeError, ValueError) as error:
            named = f"#{place} " in f"{error} "
            untouched = (outputs["o"].view(-1).view(outputs.flat.dtype) == 255).all()
            return "" if named and untouched else f"after a write, or without the name: {error}"
        return "was taken"

    for spec in MAINS:
        lab.put(Use("12 refusals", wrong, refused, calls=1), lab.kernels(spec, template)[:1])


Processes = Mapping[str, "subprocess.Popen[str]"]


def _started(commands: Mapping[str, Sequence[str]]) -> Iterator[Processes]:
    """All at once, in this checkout; killed in the end."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
    }
    begun = {
        name: subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )
        for name, command in commands.items()
    }
    yield begun
    for process in begun.values():
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def raced(_lab: Lab) -> Iterator[Processes]:
    """`kda_planted` for each planted race: it may cost its process the device."""
    script = [sys.executable, "-m", "tests.search_space.kda_planted", str(_lab.folder)]
    yield from _started({planted: [*script, planted] for planted in PLANTED})


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_race_is_found(lab: Lab, raced: Processes, planted: str) -> None:
    """By what is asked of every configuration: a wrong answer, not the same twice, a fault, a hang."""
    try:
        said, _ = raced[planted].communicate(timeout=90)
    except subprocess.TimeoutExpired:
        raced[planted].kill()
        said = f"{raced[planted].communicate()[0]}did not end"
    print(said)  # noqa: T201
    _, healthy, found = said.partition("the healthy one is right\n")
    assert healthy, said
    lab.note(planted, control(planted)[1], "" if found.strip() else "was not found")


@pytest.fixture(scope="module")
def sanitized_run(_lab: Lab) -> Callable[[str, str], list[str]]:
    """The command that runs `kda_sanitized` for a subject under a tool of compute-sanitizer."""
    program = shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path="/usr/local/cuda/bin"
    )
    if program is None:
        pytest.skip("compute-sanitizer is not installed")
    script = [sys.executable, "-m", "tests.search_space.kda_sanitized", str(_lab.folder)]
    return lambda tool, subject: [program, "--tool", tool, "--show-backtrace", "no", *script, subject]


@pytest.fixture(scope="module")
def watched(sanitized_run: Callable[[str, str], list[str]]) -> Iterator[Processes]:
    """Every tool at once; racecheck beside them on the planted races, or its silence would say nothing."""
    commands = {tool: sanitized_run(tool, tool) for tool in TOOLS}
    yield from _started(commands | {planted: sanitized_run("racecheck", planted) for planted in PLANTED})


@pytest.mark.parametrize("tool", TOOLS)
def test_a_sanitizer_finds_nothing(watched: Processes, tool: str) -> None:
    report, _ = watched[tool].communicate(timeout=600)
    assert report.count("== kda_sm90") == len(sanitized(tool)), report[-3000:]
    assert re.search(r"SUMMARY: 0 (errors|hazards)", report), report[:6000]


@pytest.mark.parametrize("planted", PLANTED)
def test_racecheck_finds_a_planted_race(watched: Processes, planted: str) -> None:
    report, _ = watched[planted].communicate(timeout=600)
    assert "Race reported" in report, report[-2000:]
