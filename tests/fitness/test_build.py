"""The pool and its cache, with a toolchain that does what each test needs."""

import errno
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from evotune.errors import SandboxError
from evotune.fitness.build import Builder, BuildPlan
from evotune.fitness.cache import Cache
from evotune.fitness.outcome import Artifact, Failed, Failure, Resources, Retry, Stage
from evotune.fitness.sandbox import Limits, Sandbox
from evotune.fitness.toolchain import Compiled, CompileError, Toolchain
from evotune.search_space.template import Language, Unit

Answer = Callable[[Unit], Compiled | CompileError]


class Scripted:
    """A toolchain that answers what it is told and counts how often it is asked."""

    target = "host"
    language: Language = "c"

    def __init__(self, answer: Answer, id: str = "scripted 1") -> None:
        self.id = id
        self.asked = 0
        self._answer = answer
        self.closed = False

    def compile(self, unit: Unit, scratch: Path, sandbox: Sandbox, limits: Limits) -> Compiled | CompileError:
        assert list(scratch.iterdir()) == []
        self.asked += 1
        return self._answer(unit)

    def inspect(self, unit: Unit, compiled: Compiled) -> Resources | Failed:
        if b"evil" in compiled.object:
            return Failed(Failure.REFUSED, Stage.INSPECT, "evil")
        return Resources({"code_bytes": len(compiled.object)})

    def close(self) -> None:
        self.closed = True


class NoSandbox(Sandbox):
    """Gives scratch directories and runs nothing."""

    def __init__(self) -> None:
        pass


def unit(text: str = "source", **constants: int) -> Unit:
    return Unit("c", text, "kernel", tuple(sorted(constants.items())))


def object_of(unit: Unit) -> Compiled:
    return Compiled(unit.text.encode() + str(unit.constants).encode(), {".su": b"f\t8\tstatic"}, "all well")


def error_of(failure: Failure, repeatable: bool = True) -> Answer:
    failed = Failed(failure, Stage.BUILD, "kernel.c:1: no", log="trimmed")
    return lambda unit: CompileError(failed, "the whole text", repeatable)


@contextmanager
def builder(tmp_path: Path, toolchain: Toolchain, plan: BuildPlan | None = None) -> Iterator[Builder]:
    with Builder(toolchain, NoSandbox(), Cache(tmp_path / "cache"), plan) as made:
        yield made


def test_artifact_names_its_object_and_comes_from_the_cache_afterwards(tmp_path: Path) -> None:
    toolchain = Scripted(object_of)
    with builder(tmp_path, toolchain) as pool:
        first = pool.build(unit()).result()
        assert isinstance(first, Artifact)
        assert first.object_path.read_bytes() == object_of(unit()).object
        assert first.digest == pool.name(unit())
        assert first.resources == Resources({"code_bytes": len(object_of(unit()).object)})
        assert pool.build(unit()).result() == first
        log = pool.log(unit())
        assert log is not None
        assert log.read_text() == "all well"
    with builder(tmp_path, toolchain) as again:
        assert again.build(unit()).result() == first
    assert toolchain.asked == 1
    assert toolchain.closed


def test_source_constants_and_toolchain_each_name_another_object(tmp_path: Path) -> None:
    names = set()
    for toolchain in (Scripted(object_of), Scripted(object_of, "scripted 2")):
        with builder(tmp_path, toolchain) as pool:
            for u in (
                unit(),
                unit("other"),
                unit(K=64),
                unit(K=128),
                Unit("c", "source", "k", (), debug=True),
            ):
                artifact = pool.build(u).result()
                assert isinstance(artifact, Artifact)
                names.add(artifact.digest)
            assert toolchain.asked == 5
    assert len(names) == 10


@pytest.mark.parametrize("name", ["kernel.o", "entry.json", "kernel.su", "build.log"])
@pytest.mark.parametrize("damage", ["changed", "emptied", "removed"])
def test_damaged_entry_is_built_again(tmp_path: Path, name: str, damage: str) -> None:
    toolchain = Scripted(object_of)
    with builder(tmp_path, toolchain) as pool:
        first = pool.build(unit()).result()
        assert isinstance(first, Artifact)
        victim = first.object_path.parent / name
        data = victim.read_bytes()
        if damage == "removed":
            victim.unlink()
        else:
            victim.write_bytes(data[:-2] + b"??" if damage == "changed" else b"")
        second = pool.build(unit()).result()
        assert isinstance(second, Artifact)
        assert second.object_path.read_bytes() == object_of(unit()).object
    assert toolchain.asked == 2


def test_build_error_is_remembered_with_its_whole_log(tmp_path: Path) -> None:
    toolchain = Scripted(error_of(Failure.BUILD_ERROR))
    with builder(tmp_path, toolchain) as pool:
        results = [pool.build(unit()).result() for _ in range(2)]
        log = pool.log(unit())
    assert results[0] == results[1]
    assert isinstance(results[0], Failed)
    assert (results[0].detail, results[0].log) == ("kernel.c:1: no", "trimmed")
    assert log is not None
    assert log.read_text() == "the whole text"
    assert toolchain.asked == 1


def test_timeout_is_not_remembered(tmp_path: Path) -> None:
    toolchain = Scripted(error_of(Failure.TIMEOUT, repeatable=False))
    with builder(tmp_path, toolchain) as pool:
        for _ in range(2):
            failed = pool.build(unit()).result()
            assert isinstance(failed, Failed)
            assert failed.failure is Failure.TIMEOUT
    assert toolchain.asked == 2


def test_refused_object_never_becomes_an_artifact(tmp_path: Path) -> None:
    toolchain = Scripted(object_of)
    with builder(tmp_path, toolchain) as pool:
        for _ in range(2):
            failed = pool.build(unit("evil")).result()
            assert isinstance(failed, Failed)
            assert failed.failure is Failure.REFUSED
    assert toolchain.asked == 1
    assert list((tmp_path / "cache").rglob("*.o")) == []


@pytest.mark.parametrize(
    "trouble", [OSError(errno.ENOSPC, "No space left on device"), SandboxError("bwrap fell")]
)
def test_trouble_that_is_not_the_candidate_s_is_a_retry(tmp_path: Path, trouble: Exception) -> None:
    def answer(unit: Unit) -> Compiled:
        raise trouble

    with builder(tmp_path, Scripted(answer)) as pool:
        result = pool.build(unit()).result()
    assert isinstance(result, Retry)
    assert "No space" in result.reason or "bwrap fell" in result.reason


def test_full_disk_turns_a_failure_into_a_retry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = 1 << 20

    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage)
    with builder(tmp_path, Scripted(error_of(Failure.BUILD_ERROR))) as pool:
        result = pool.build(unit()).result()
    assert isinstance(result, Retry)
    assert "MiB left" in result.reason


def test_cache_that_cannot_be_written_is_a_retry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with builder(tmp_path, Scripted(object_of)) as pool:
        monkeypatch.setattr("os.rename", full)
        assert isinstance(pool.build(unit()).result(), Retry)
        monkeypatch.undo()
        assert isinstance(pool.build(unit()).result(), Artifact)
    assert list((tmp_path / "cache").glob(".new-*")) == []


def test_budget_is_a_limit_of_the_study_not_of_the_cache(tmp_path: Path) -> None:
    toolchain = Scripted(object_of)
    with builder(tmp_path, toolchain, BuildPlan(budget={"code_bytes": 4})) as strict:
        failed = strict.build(unit(), "float32-K8").result()
    assert isinstance(failed, Failed)
    assert (failed.failure, failed.stage) == (Failure.OVER_BUDGET, Stage.INSPECT)
    assert "code_bytes is 8, the study allows 4" in failed.detail
    assert failed.resources["float32-K8"].values == {"code_bytes": 8}
    with builder(tmp_path, toolchain, BuildPlan(budget={"code_bytes": 8})) as lenient:
        assert isinstance(lenient.build(unit()).result(), Artifact)
    assert toolchain.asked == 1


def test_quiet_waits_for_running_builds_and_holds_back_new_ones(tmp_path: Path) -> None:
    started, finish = threading.Event(), threading.Event()
    ended: list[str] = []

    def answer(unit: Unit) -> Compiled:
        started.set()
        assert finish.wait(20)
        ended.append(unit.text)
        return object_of(unit)

    with builder(tmp_path, Scripted(answer), BuildPlan(workers=2)) as pool:
        first = pool.build(unit("first"))
        assert started.wait(20)
        threading.Timer(0.1, finish.set).start()
        with pool.quiet():
            assert ended == ["first"]
            second = pool.build(unit("second"))
            time.sleep(0.1)
            assert not second.done()
            assert ended == ["first"]
        assert isinstance(second.result(20), Artifact)
        assert isinstance(first.result(20), Artifact)


def test_two_builders_may_store_the_same_build(tmp_path: Path) -> None:
    barrier = threading.Barrier(2)

    def answer(unit: Unit) -> Compiled:
        barrier.wait(20)
        return object_of(unit)

    with builder(tmp_path, Scripted(answer)) as one, builder(tmp_path, Scripted(answer)) as two:
        results = [pool.build(unit()) for pool in (one, two)]
        paths = {r.object_path for f in results if isinstance(r := f.result(20), Artifact)}
    assert len(paths) == 1
