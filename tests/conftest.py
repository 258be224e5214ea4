"""Markers and flags of the whole suite, and what its modules share."""

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# As the command line does (see evotune/cli.py), before any test loads numpy.
for _variable in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")

# A shell's background job ignores interrupts, and so would every command that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the full form of the slow corpora")


def has_gpu() -> bool:
    return shutil.which("nvidia-smi") is not None and Path("/dev/nvidiactl").exists()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if "gpu" in item.keywords and not has_gpu():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if "slow" in item.keywords and not config.getoption("--full"):
            item.add_marker(pytest.mark.skip(reason="full form: run with --full"))


_SOLVED: dict[object, Any] = {}


@pytest.fixture(scope="module")
def solved_once() -> Iterator[None]:
    """KDA's gate cases solved once for all modules that use this: a full gate's take 4 s at K = V = 64.

    A judge still draws a fresh variant for every call; only the solution behind it is an earlier judge's.
    """
    from evotune.reference_kda.operator import KdaOperator

    solve = KdaOperator.solve

    def once(self: KdaOperator, workload: Any, seed: int) -> Any:
        if workload not in _SOLVED:
            _SOLVED[workload] = solve(self, workload, seed)
        return _SOLVED[workload]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KdaOperator, "solve", once)
        yield
