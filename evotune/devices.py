"""The shipped devices: from a setup to the judge that builds, gates and times its candidates."""

from pathlib import Path
from typing import TYPE_CHECKING

from evotune.errors import DeviceError
from evotune.fitness.device import absent, lacking
from evotune.setup import Setup

if TYPE_CHECKING:
    from evotune.fitness.cuda import CudaEvaluator
    from evotune.fitness.host import HostEvaluator


def host(setup: Setup, cache: Path | None = None) -> "HostEvaluator":
    """This machine's own processor; objects are kept in `cache`, by default the user's.

    Raises StudyError without a compiler, SandboxError without walls.
    """
    from evotune.fitness.host import HostEvaluator, HostSettings, Problem
    from evotune.fitness.sandbox import Sandbox

    config = setup.config
    return HostEvaluator(
        Problem(setup.template, setup.operator, setup.workloads),
        setup.objectives,
        settings=HostSettings(gate=config.gate_limits, timing=config.timing_plan, build=config.build_plan),
        cache=cache,
        sandbox=Sandbox.detect(unsafe=setup.unsafe),
    )


def sm_90a(setup: Setup, cache: Path | None = None) -> "CudaEvaluator":
    """An NVIDIA Hopper GPU; objects are kept in `cache`, by default the user's.

    Raises DeviceError without a free GPU or the packages to use it, StudyError without a compiler.
    """
    reason = absent("sm_90a") or lacking()
    if reason is not None:
        raise DeviceError(reason)
    from evotune.fitness.cuda import CudaEvaluator, CudaSettings
    from evotune.fitness.judge import Problem
    from evotune.fitness.sandbox import Sandbox

    config = setup.config
    return CudaEvaluator(
        Problem(setup.template, setup.operator, setup.workloads),
        setup.objectives,
        settings=CudaSettings(
            gate=config.gate_limits,
            timing=config.timing_plan,
            build=config.build_plan,
            comparing=setup.promotion.share > 0,
        ),
        cache=cache,
        sandbox=Sandbox.detect(unsafe=setup.unsafe),
    )
