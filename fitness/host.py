"""The host target's judge: kernels that run on this machine's own processor."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from evotune.fitness.build import Builder, BuildPlan, default_cache_directory
from evotune.fitness.cache import Cache
from evotune.fitness.gate import GateLimits, Session
from evotune.fitness.host_toolchain import Compiler, HostToolchain
from evotune.fitness.judge import CompiledEvaluator, Confirmation, Problem, Round
from evotune.fitness.link import Linker
from evotune.fitness.objectives import Objective
from evotune.fitness.operator import Level, Parameter
from evotune.fitness.outcome import Artifact, Failed
from evotune.fitness.runner import Loadable, Runner, timing_cpu
from evotune.fitness.sandbox import Sandbox
from evotune.fitness.timing import Timed, Timer, TimingPlan
from evotune.search_space.template import Specialization

__all__ = ["Confirmation", "HostEvaluator", "HostSettings", "Problem"]


@dataclass(frozen=True)
class HostSettings:
    """All that a study may set about building and judging on the host. `level` is the gate before timing."""

    level: Level = "screen"
    gate: GateLimits = field(default_factory=GateLimits)
    timing: TimingPlan = field(default_factory=TimingPlan)
    build: BuildPlan = field(default_factory=BuildPlan)


class HostEvaluator(CompiledEvaluator[Runner]):
    """See `CompiledEvaluator`. Builds pause while something is timed: they share the processor."""

    def __init__(
        self,
        problem: Problem,
        objectives: Sequence[Objective],
        *,
        settings: HostSettings | None = None,
        cache: Path | None = None,
        sandbox: Sandbox | None = None,
    ) -> None:
        """`cache` is where objects are kept (by default the user's cache directory).

        Raises StudyError without a working compiler or a cache that can be written, SandboxError without
        walls.
        """
        self._settings = settings or HostSettings()
        self._sandbox = sandbox or Sandbox.detect()
        build = self._settings.build
        toolchain = HostToolchain(self._sandbox, Compiler.find(build.compiler or None))
        linker = Linker(toolchain, self._sandbox)
        store = Cache(cache or default_cache_directory(), build.cache_mib << 20)
        super().__init__(
            problem,
            objectives,
            level=self._settings.level,
            limits=self._settings.gate,
            timing=self._settings.timing,
            builder=Builder(toolchain, self._sandbox, store, build, linker),
            linker=linker,
        )

    def _signature(self, spec: Specialization) -> Sequence[Parameter]:
        return self.problem.operator.signature(spec)

    def _start_process(self, loadables: Sequence[Loadable], artifacts: Sequence[Artifact]) -> Runner:
        return Runner(
            loadables, self._sandbox, arena_bytes=self._settings.gate.arena_mib << 20, cpu=timing_cpu()
        )

    def _timed(self, session: Session[Runner], baseline: Session[Runner], turn: Round) -> Timed | Failed:
        timer = Timer(
            self.problem.operator,
            turn.gate.cases,
            turn.targets,
            turn.plan,
            self._builder.quiet,
            self._racing,
            turn.waits,
            turn.moving,
        )
        return timer.time(session, baseline, turn.bars)
