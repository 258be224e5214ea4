"""A pool that turns units into artifacts: cached, sandboxed, paused while the host is being timed."""

import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from evotune.errors import SandboxError
from evotune.fitness.cache import Cache, Parts
from evotune.fitness.link import Linker
from evotune.fitness.outcome import Artifact, Failed, Failure, Resources, Retry, Stage
from evotune.fitness.sandbox import Limits, Sandbox
from evotune.fitness.toolchain import Compiled, CompileError, Toolchain
from evotune.search_space.template import Unit, digest

Built = Artifact | Failed | Retry

# Below this much free disk a failed build is not the candidate's fault.
_ROOM_BYTES = 32 << 20
# Raised when a check becomes stricter: results stored before it must not be taken from the cache.
_CACHE_FORMAT = "2"


@dataclass(frozen=True)
class BuildPlan:
    """How builds are done.

    Attributes:
        workers: builds at once.
        limits: of one build.
        budget: largest allowed value of a resource by name, such as {"code_bytes": 1 << 20}.
        compiler: of the host target: a program in PATH, a path or "zig"; "" for the first there is.
        cache_mib: what built objects may take on disk; the longest unused go when a study starts.
    """

    workers: int = 2
    compiler: str = ""
    cache_mib: int = 1024
    limits: Limits = field(default_factory=Limits)
    budget: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))


def default_cache_directory() -> Path:
    """Where objects are kept unless the study says otherwise, such as ~/.cache/evotune."""
    from platformdirs import user_cache_path

    return user_cache_path("evotune", appauthor=False)


class _Traffic:
    """Counts running builds and holds new ones back."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running = 0
        self._quiet = 0

    @contextmanager
    def build(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: self._quiet == 0)
            self._running += 1
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    @contextmanager
    def quiet(self) -> Iterator[None]:
        with self._changed:
            self._quiet += 1
            self._changed.wait_for(lambda: self._running == 0)
        try:
            yield
        finally:
            with self._changed:
                self._quiet -= 1
                self._changed.notify_all()


class Builder:
    """Builds units with one toolchain. Usable as a context manager."""

    def __init__(
        self,
        toolchain: Toolchain,
        sandbox: Sandbox,
        cache: Cache,
        plan: BuildPlan | None = None,
        linker: Linker | None = None,
    ) -> None:
        """With a `linker`, objects are linked by the workers too, so that the judge finds them ready."""
        self.toolchain = toolchain
        self.plan = plan or BuildPlan()
        self._sandbox = sandbox
        self._cache = cache
        self._linker = linker
        self._traffic = _Traffic()
        self._pool = ThreadPoolExecutor(self.plan.workers, thread_name_prefix="build")

    def build(self, unit: Unit, label: str = "") -> "Future[Built]":
        """Queue a unit. `label` (of its specialization) names the resources in a `Failed`.

        The future raises only for a bug of ours.
        """
        return self._pool.submit(self._build, unit, label)

    def name(self, unit: Unit) -> str:
        """The digest an artifact of this unit has: unit, target and toolchain together."""
        return digest(_CACHE_FORMAT, unit.digest, self.toolchain.target, self.toolchain.id)

    def log(self, unit: Unit) -> Path | None:
        """Where the compiler's whole output is kept; None for what is not in the cache."""
        entry = self._cache.get(self.name(unit))
        return entry.log if entry else None

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Wait for running builds to end and start none inside: for timing on the same machine."""
        with self._traffic.quiet():
            yield

    def close(self) -> None:
        """Finish what runs, drop what is queued."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self.toolchain.close()
        self._cache.close()

    def __enter__(self) -> "Builder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _build(self, unit: Unit, label: str) -> Built:
        try:
            with self._traffic.build():
                entry = self._cache.get(self.name(unit))
                result = self._linked(entry.result if entry else self._build_now(unit))
        except (SandboxError, OSError) as error:
            return Retry(f"build: {error}")
        return self._within_budget(result, label) if isinstance(result, Artifact) else result

    def _build_now(self, unit: Unit) -> Built:
        started = time.monotonic()
        with self._sandbox.scratch() as scratch:
            compiled = self.toolchain.compile(unit, scratch, self._sandbox, self.plan.limits)
            free = shutil.disk_usage(scratch).free
        if isinstance(compiled, CompileError):
            if free < _ROOM_BYTES:
                return Retry(f"build: {free >> 20} MiB left on the disk")
            return self._keep_failure(unit, compiled)
        resources = self.toolchain.inspect(unit, compiled)
        if isinstance(resources, Failed):
            return self._keep_failure(unit, CompileError(resources, compiled.log))
        return self._keep(unit, compiled, resources, time.monotonic() - started)

    def _keep_failure(self, unit: Unit, error: CompileError) -> Failed:
        if error.repeatable:
            self._cache.put(self.name(unit), Parts.of_failure(error.failed, error.log))
        return error.failed

    def _keep(self, unit: Unit, compiled: Compiled, resources: Resources, build_s: float) -> Built:
        name = self.name(unit)
        artifact = Artifact(
            name, Path(), unit.entry, self.toolchain.target, self.toolchain.id, resources, build_s
        )
        parts = Parts.of_artifact(artifact, compiled.object, dict(compiled.files), compiled.log)
        return self._cache.put(name, parts).result

    def _linked(self, result: Built) -> Built:
        if self._linker is not None and isinstance(result, Artifact):
            linked = self._linker.link(result)
            return linked if isinstance(linked, Failed) else result
        return result

    def _within_budget(self, artifact: Artifact, label: str) -> Artifact | Failed:
        for name, largest in self.plan.budget.items():
            value = artifact.resources.values.get(name, 0)
            if value > largest:
                detail = f"{name} is {value}, the study allows {largest}"
                failed = Failed(Failure.OVER_BUDGET, Stage.INSPECT, detail)
                return replace(failed, resources={label: artifact.resources})
        return artifact
