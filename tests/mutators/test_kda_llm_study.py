"""A model's change to the host template's KDA kernel, in a study with the real compiler, gate and timing.

The transcript was written for this test (`kda_answers/`): the first answer calls a function that does not
exist, the second mends it. The change is structural: the output is read from the decayed state before the
token's update is stored, and u (k . q) is added to it.
"""

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from evotune.fitness.outcome import Failure
from evotune.mutators.transcript import FILE, Transcript
from evotune.search_space.branch import frame, stages

from evotune.setup import evaluator, mutators
from evotune.study import StudyRun, begin
from tests.evotune.toy import setup_of

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


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StudyRun]:
    folder = tmp_path_factory.mktemp("kda")
    answers = [path.read_text() for path in sorted(ANSWERS.glob("*.md"))]
    (folder / "said.jsonl").write_text("".join(json.dumps({"answer": text}) + "\n" for text in answers))
    (folder / "kda.toml").write_text(STUDY)
    setup = setup_of(folder / "kda.toml")
    with closing(evaluator(setup)) as judge, closing(begin(setup)) as opened:
        run = StudyRun(opened, judge, mutators(setup))
        run.run()
        yield run


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
