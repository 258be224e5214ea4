"""A sandbox and a compiler for the judge's tests, found once."""

import pytest

from evotune.fitness.sandbox import Sandbox
from tests.fitness.compiled import Bench


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(Sandbox.detect(), tmp_path_factory.mktemp("objects"))
