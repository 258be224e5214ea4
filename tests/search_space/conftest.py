"""The CuTe-DSL's compiler processes, started once for the tests of all Hopper templates."""

from collections.abc import Iterator

import pytest

from evotune.fitness import cute_toolchain
from tests.search_space.sm90 import Build, building


@pytest.fixture(scope="session")
def build() -> Iterator[Build]:
    lack = cute_toolchain.missing()
    if lack is not None:
        pytest.skip(lack)
    with building() as built:
        yield built
