"""A model's change to the host template's KDA kernel, in a study with the real compiler, gate and timing.

The transcript was written for this test (`kda_answers/`): the first answer calls a function that does not
exist, the second mends it. The change is structural: the output is read from the decayed state before the
token's update is stored, and u (k . q) is added to it.
"""

import json
import os
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from evotune.export import Job, export
from evotune.fitness.outcome import Failure
from evotune.mutators.transcript import FILE, Transcript
from evotune.opening import begin
from evotune.pareto import ranked
from evotune.search_space.branch import frame, stages
from evotune.setup import evaluator, mutators
from evotune.study import StudyRun
from tests.evotune.toy import setup_of

pytestmark = pytest.mark.usefixtures("solved_once")
ANSWERS = Path(__file__).parent / "kda_answers"
# The clock's slack is wide because machines that run tests are busy; hostile clocks have tests of their own.
STUDY = """
[study]
name = "kda"
template = "kda_host"
seed = 3
trials = 24

[search]
batch = 4
warmup = 3

[mutation]
operators = ["llm"]
every = 2

[mutation.llm]
replay = "said.jsonl"

[timing]
clock_slack_us = 1e6

[[workload]]
name = "one head"
length = 96
K = 64
V = 64
"""


KEY = "sk-planted-0123456789-abcdefgh"


@dataclass
class Watch:
    """Looks at the environment of every process that descends from this one, about 50 times a second.

    `names` are the programs seen; `leaks` those that had the key.
    """

    names: set[str] = field(default_factory=set)
    leaks: set[str] = field(default_factory=set)
    done: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        while not self.done.wait(0.02):
            for process in descendants(os.getpid()):
                self.look(process)

    def look(self, process: Path) -> None:
        try:
            name, environment = (process / "comm").read_text().strip(), (process / "environ").read_bytes()
        except OSError:
            return  # it ended meanwhile
        self.names.add(name)
        if KEY.encode() in environment:
            self.leaks.add(name)


def descendants(pid: int) -> Iterator[Path]:
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    queue = list(parents.get(pid, []))
    while queue:
        child = queue.pop()
        queue += parents.get(child, [])
        yield Path(f"/proc/{child}")


@pytest.fixture(scope="module")
def watch() -> Iterator[Watch]:
    """The key of a service lies in this process's environment, and everything below it is looked at."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("EVOTUNE_TEST_KEY", KEY)
        watching = Watch()
        thread = threading.Thread(target=watching.run)
        thread.start()
        yield watching
        watching.done.set()
        thread.join()


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory, watch: Watch) -> StudyRun:
    folder = tmp_path_factory.mktemp("kda")
    answers = [path.read_text() for path in sorted(ANSWERS.glob("*.md"))]
    (folder / "said.jsonl").write_text("".join(json.dumps({"answer": text}) + "\n" for text in answers))
    (folder / "kda.toml").write_text(STUDY)
    setup = setup_of(folder / "kda.toml")
    with closing(evaluator(setup)) as judge, closing(begin(setup)) as opened:
        run = StudyRun(opened, judge, mutators(setup))
        run.run()
    return run


def test_the_first_candidate_fails_to_compile(loop: StudyRun) -> None:
    seed, broken = loop.history.branches[:2]
    assert (broken.origin, broken.parent) == ("llm", seed.id)
    (entry,) = loop.history.of(broken.id)
    assert entry.failed
    assert entry.failed.failure is Failure.BUILD_ERROR
    assert "dot" in entry.failed.log


def test_the_model_is_shown_the_compilers_words(loop: StudyRun) -> None:
    conversation = (loop.setup.directory / FILE).read_text()
    second = json.loads(conversation.splitlines()[1])["messages"][-1]["content"]
    assert "implicit declaration of function 'dot'" in second
    assert "float kq = dot(k_row, q);" in second
    assert len(Transcript(loop.setup.directory / FILE).exchanges) == 2


def test_the_repair_enters_and_is_tuned(loop: StudyRun) -> None:
    seed, broken, mended = loop.history.branches[:3]
    assert mended.repairs == broken.id
    assert frame(mended.source) == frame(seed.source)
    changed = {name for name, body in stages(mended.source).items() if body != stages(seed.source)[name]}
    assert changed == {"update"}
    assert loop.history.lives(mended.id)
    passed = [entry for entry in loop.history.of(mended.id) if entry.passed]
    assert len({json.dumps(dict(entry.asked.knobs)) for entry in passed}) >= 2


def test_what_was_repaired_and_tuned_can_be_exported(loop: StudyRun, tmp_path: Path) -> None:
    """Its best candidate is built again, passes the full gate and is written with its lineage."""
    mended = loop.history.branches[2]
    best = ranked(loop.history, loop.history.of(mended.id))[0]
    history = replace(loop.history, entries=(best,), contests=(), confirmations=())
    done = export(Job(loop.setup, history, tmp_path / "pareto"))
    assert done.left_out == ()
    (kernel,) = done.exported
    assert kernel.manifest.id == f"{mended.id}-{best.asked.index:04d}"
    written = "".join(path.read_text() for path in (tmp_path / "pareto").rglob("*.c"))
    assert stages(mended.source)["update"] in written


def test_no_process_below_ours_has_the_key(loop: StudyRun, watch: Watch) -> None:
    assert any("cc1" in name or "gcc" in name for name in watch.names)  # compilers were looked at
    assert any("python" in name for name in watch.names)  # and runners
    assert watch.leaks == set()
