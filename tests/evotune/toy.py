"""A study without a device: an analytic landscape over a toy template, as plug-ins for a study file.

    template = "tests.evotune.toy:TEMPLATE"     device = "tests.evotune.toy:device"
    operators = ["tests.evotune.toy:mutator"]

How the device behaves is in the source: `int speed = 3;` sets a factor, `#error` fails to build, `int wrong;`
gives wrong results. The environment variable TOY_DELAY_S makes a candidate take that long.
"""

import io
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from evotune.cli import main
from evotune.config import load
from evotune.errors import DeviceError, DeviceLost, ProposalError, StudyError
from evotune.fitness.evaluation import Comparison, Evaluation, Fallen, Purpose
from evotune.fitness.objectives import Evidence, values
from evotune.fitness.operator import Case, GateCase, Law, Level, Parameter
from evotune.fitness.outcome import Failed, Failure, Measurement, Outcome, Passed, Resources, Retry, Stage
from evotune.fitness.racing import NO_BARS, Bars
from evotune.fitness.timing import Timed
from evotune.history import fold
from evotune.mutators.mutator import Proposal, Request
from evotune.opening import begin, resume
from evotune.records import Confirmation, Contest, Record
from evotune.search_space.branch import Candidate, replace_stage, stages
from evotune.search_space.space import knob
from evotune.search_space.template import Constant, Language, Specialization, Unit, digest
from evotune.setup import Setup, mutators, resolve
from evotune.study import Stop, StudyRun

ROOT = Path(__file__).resolve().parents[2]
SOURCE = """// frame
// EVOLVE-BEGIN body
int speed = 1;
// EVOLVE-END body
"""


@dataclass(frozen=True)
class ToyKnobs:
    tile: int = knob(8, choices=(4, 8, 16, 32, 64), doc="value tile")
    unroll: int = knob(1, choices=(1, 2, 4, 8), doc="key unroll")
    place: str = knob("stack", choices=("stack", "heap", "static"), doc="state placement")
    depth: int = knob(0, choices=(0, 1, 2, 3, 4, 5), doc="prefetch depth")


@dataclass(frozen=True)
class ToyTemplate:
    name: str = "toy"
    operator: str = "tests.evotune.toy:OPERATOR"
    target: str = "host"
    language: Language = "c"
    knobs: type[Any] = ToyKnobs
    source: str = SOURCE
    nothing_legal: bool = False
    only_tile: int = 0

    def default(self, spec: Specialization) -> ToyKnobs:
        return ToyKnobs()

    def why_not(self, knobs: Any, spec: Specialization) -> str | None:
        if self.nothing_legal:
            return "the toy allows nothing"
        if self.only_tile and (knobs.tile, knobs.unroll) != (self.only_tile, 1):
            return f"the tile must be {self.only_tile}, not unrolled"
        if knobs.tile * knobs.unroll > 128:
            return f"{knobs.tile * knobs.unroll} registers exceed 128"
        return None

    def budget(self, knobs: Any, spec: Specialization) -> Mapping[str, int]:
        return {"registers": knobs.tile * knobs.unroll}

    def unit(self, source: str, knobs: Any, spec: Specialization, *, debug: bool = False) -> Unit:
        constants = tuple(sorted((name.upper(), value) for name, value in vars(knobs).items()))
        return Unit("c", source, "toy", constants, debug)

    def layouts(self, knobs: Any, spec: Specialization) -> str:
        return f"tile of {knobs.tile} floats in {knobs.place}"


@dataclass(frozen=True)
class ToyWorkload:
    name: str
    group: str
    size: int
    dtype: str = "float32"

    @property
    def constants(self) -> Mapping[str, Constant]:
        return {}


class ToyOperator:
    name = "toy"
    entry = "toy"

    def workload(self, table: Mapping[str, Any]) -> ToyWorkload:
        unknown = table.keys() - {"name", "group", "size"}
        if unknown:
            raise StudyError(f"unknown key {min(unknown)}; there are: name, group, size")
        return ToyWorkload(table["name"], table["group"], table["size"])

    def signature(self, spec: Specialization) -> Sequence[Parameter]:
        return ()

    def gate_cases(self, spec: Specialization, level: Level) -> Iterator[GateCase]:
        return iter(())

    def laws(self, spec: Specialization, level: Level) -> Sequence[Law]:
        return ()

    def solve(self, workload: Any, seed: int) -> Case:
        raise AssertionError("the toy device solves nothing")

    def empty(self, spec: Specialization) -> Case:
        raise AssertionError("the toy device solves nothing")

    def work(self, workload: Any) -> tuple[float, str]:
        return float(workload.size), "elements"

    def naive_time_us(self, case: Case) -> float:
        return 1.0

    def floor_us(self, workload: Any, bytes_per_us: float) -> float:
        return 0.0


def time_us(knobs: ToyKnobs, size: int) -> float:
    """Smooth with an interaction; small sizes like small tiles."""
    x = np.log2(knobs.tile)
    want = 3.0 if size < 100 else 5.0
    place = {"stack": 0.0, "heap": 0.6, "static": 0.2}[knobs.place]
    return float(
        10
        * np.exp(0.3 * (x - want) ** 2 + 0.1 * (knobs.depth - x) ** 2 + place)
        / (1 + np.log2(knobs.unroll))
    )


def speed(source: str) -> int:
    return int(re.findall(r"speed = (\d+)", source)[-1])


def outcome(setup: Setup, candidate: Candidate) -> Outcome:
    source, knobs = candidate.branch.source, candidate.knobs
    if "#error" in source:
        return Failed(
            Failure.BUILD_ERROR, Stage.BUILD, "body.c:3: #error", log="body.c:3: error: #error\n" * 3
        )
    if "int wrong" in source or (knobs.place == "static" and knobs.depth == 5):
        return Failed(Failure.WRONG, Stage.EDGES, "o, head 0, chunk 1: 3.1 × the bound", case="odd T")
    measured = []
    for workload in setup.workloads:
        mine, base = (time_us(k, workload.size) for k in (knobs, ToyKnobs()))
        measured.append(Measurement(workload.name, workload.group, (mine / speed(source),) * 3, (base,) * 3))
    error = 0.1 + 0.05 * knobs.depth
    evidence = Evidence(tuple(measured), error, 1.0, source, "c")
    reports = {setup.specializations[0].label: Resources({"code_bytes": 100 * knobs.unroll})}
    return Passed("screen", error, tuple(measured), 1.0, values(setup.objectives, evidence), reports)


class ToyDevice:
    """Judges in one thread, in order.

    `troubles` maps a number of submission to what happens instead, `fates` a number of comparison. `noise` is
    the standard deviation of a compared call's log-time; screening has none. A comparison that is made again
    sees the same times.
    """

    def __init__(
        self,
        setup: Setup,
        troubles: Mapping[int, Outcome | Exception] | None = None,
        fates: Mapping[int, Fallen | Failed | Retry | Exception] | None = None,
        *,
        noise: float = 0.01,
    ) -> None:
        self._setup = setup
        self._troubles = dict(troubles or {})
        self._fates = dict(fates or {})
        self._thread = ThreadPoolExecutor(1)
        self._delay_s = float(os.environ.get("TOY_DELAY_S", "0"))
        self.submitted: list[Candidate] = []
        self.bars: list[Bars] = []
        self.compared: list[tuple[str, str]] = []
        self._noise = noise
        self.closed = threading.Event()

    def submit(self, candidate: Candidate, bars: Bars = NO_BARS) -> Future[Evaluation]:
        self.bars.append(bars)
        trouble = self._troubles.get(len(self.submitted))
        self.submitted.append(candidate)
        return self._thread.submit(self._judge, candidate, trouble)

    def _judge(self, candidate: Candidate, trouble: Outcome | Exception | None) -> Evaluation:
        time.sleep(self._delay_s)
        if isinstance(trouble, Exception):
            raise trouble
        return Evaluation(trouble or outcome(self._setup, candidate), {}, {"build": 0.1, "gate": 0.2}, 0.25)

    def compare(
        self,
        challenger: Candidate,
        incumbent: Candidate,
        enough: Callable[[Timed], bool],
        *,
        group: str,
        purpose: Purpose,
    ) -> Comparison | Fallen | Failed | Retry:
        fate = self._fates.get(len(self.compared))
        self.compared.append((group, purpose))
        if isinstance(fate, Exception):
            raise fate
        if fate is not None:
            return fate
        meeting = f"{challenger.digest}/{incumbent.digest}/{group}/{purpose}"
        rng = np.random.default_rng(list(meeting.encode()))
        blocks: list[Timed] = []
        while not blocks or not enough(blocks[-1]):
            blocks.append(Timed(tuple(self._block(challenger, incumbent, group, rng)), 0.5, 1.0))
        return Comparison(tuple(blocks), 0.5, 0.01)

    def _block(
        self, challenger: Candidate, incumbent: Candidate, group: str, rng: np.random.Generator
    ) -> Iterator[Measurement]:
        for workload in self._setup.workloads:
            if workload.group == group:
                times = []
                for candidate in (challenger, incumbent):
                    true = time_us(candidate.knobs, workload.size) / speed(candidate.branch.source)
                    times.append(tuple(true * np.exp(self._noise * rng.standard_normal(2))))
                yield Measurement(workload.name, group, *times)

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)
        self.closed.set()


class ToyMutator:
    """Proposes bodies from a list, then gives up. One in three is broken and can be repaired."""

    name = "toy"

    def __init__(self, bodies: Sequence[str] | None = None) -> None:
        self._bodies = bodies or (
            "int speed = 2;",
            "#error\nint speed = 3;",
            "int wrong; int speed = 9;",
            "int speed = 4;",
        )
        self.requests: list[Request] = []

    def propose(self, request: Request) -> Proposal:
        self.requests.append(request)
        parent = request.standings[0].branch
        for body in self._bodies:
            proposal = self._proposal(parent.id, parent.source, body)
            if proposal.source not in {s.branch.source for s in request.standings} and self._new(
                request, proposal
            ):
                return proposal
        raise ProposalError("the toy has no more ideas")

    def repair(self, request: Request, proposal: Proposal, failed: Failed) -> Proposal | None:
        if failed.failure is not Failure.BUILD_ERROR:
            return None
        body = stages(proposal.source)["body"].replace("#error\n", "")
        return self._proposal(proposal.parent, proposal.source, body)

    @staticmethod
    def _new(request: Request, proposal: Proposal) -> bool:
        return digest(proposal.source) not in request.tried

    @staticmethod
    def _proposal(parent: str, source: str, body: str) -> Proposal:
        return Proposal(replace_stage(source, "body", body), parent, "toy", f"body: {body}", cost_usd=0.01)


def device(setup: Setup) -> ToyDevice:
    return ToyDevice(setup)


def mutator(setup: Setup) -> ToyMutator:
    return ToyMutator()


def losing_device(setup: Setup) -> ToyDevice:
    return ToyDevice(setup, {5: DeviceLost("the toy device is gone")})


def missing_device(setup: Setup) -> ToyDevice:
    raise DeviceError("there is no toy device here")


TEMPLATE = ToyTemplate()
BROKEN_TEMPLATE = ToyTemplate(source=SOURCE.replace("int speed = 1;", "int wrong; int speed = 1;"))
EMPTY_TEMPLATE = ToyTemplate(nothing_legal=True)
SMALL_TEMPLATE = ToyTemplate(only_tile=8)
OPERATOR = ToyOperator()

STUDY = """
[study]
name = "toy"
template = "tests.evotune.toy:TEMPLATE"
device = "tests.evotune.toy:device"
seed = 7
trials = 40

[search]
batch = 4
warmup = 3

[mutation]
operators = ["tests.evotune.toy:mutator"]
every = 8
stagnation = 12

[[workload]]
name = "long"
group = "long"
size = 1000

[[workload]]
name = "short"
group = "short"
size = 10
"""


def environment(**more: str) -> dict[str, str]:
    """Of a child process that finds both the package and these plug-ins."""
    return {**os.environ, "PYTHONPATH": str(ROOT), **more}


def study_file(folder: Path, *edits: tuple[str, str]) -> Path:
    """A study.toml in a folder, with replacements in `STUDY`; each must apply."""
    text = STUDY
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    path = folder / "toy.toml"
    path.write_text(text)
    return path


def setup_of(path: Path, **overrides: Any) -> Setup:
    dotted = {f"study.{key}": value for key, value in overrides.items()}
    return resolve(load(path, dotted), path.parent)


def run_study(
    setup: Setup, device: ToyDevice | None = None, resumed: bool = False, stop: Stop | None = None
) -> StudyRun:
    """Begin or resume a study and run it to its end."""
    opened = resume(setup.directory, setup) if resumed else begin(setup)
    judge = device or ToyDevice(setup)
    try:
        loop = StudyRun(opened, judge, mutators(setup), stop=stop)
        loop.run()
    finally:
        judge.close()
        opened.close()
    return loop


def found(records: Sequence[Record]) -> list[tuple[int, str, dict[str, Any], Any]]:
    """What a study found: candidate, branch, knobs, outcome; the last ask of each."""
    return [
        (
            entry.asked.index,
            entry.asked.branch,
            dict(entry.asked.knobs),
            entry.judged and entry.judged.outcome,
        )
        for entry in fold(records).entries
    ]


def meetings(records: Sequence[Record]) -> list[Contest | Confirmation]:
    """Contests and confirmations, without what the clock said."""
    held = [record for record in records if isinstance(record, Contest | Confirmation)]
    return [replace(record, seconds=0.0, elapsed_s=0.0) for record in held]


@dataclass(frozen=True)
class Called:
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


def call(*arguments: str | Path) -> Called:
    """A command of the CLI, in this process."""
    out, err = io.StringIO(), io.StringIO()
    before = sys.argv
    sys.argv = ["evotune", *map(str, arguments)]
    try:
        with redirect_stdout(out), redirect_stderr(err):
            main()
    except SystemExit as ended:
        return Called(int(ended.code or 0), out.getvalue(), err.getvalue())
    finally:
        sys.argv = before
    raise AssertionError("main() always exits")
