"""What the tests of both Hopper templates share: specializations, compiles, and what a source must be."""

import ast
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from evotune.fitness.cute_toolchain import CuteToolchain, ptx_digest
from evotune.fitness.outcome import Resources
from evotune.fitness.sandbox import Limits, Sandbox
from evotune.fitness.toolchain import Compiled
from evotune.search_space.branch import stages
from evotune.search_space.template import Specialization, Unit

Build = Callable[[Sequence[Unit]], list[tuple[Compiled, Resources]]]


def spec(contract: str = "production", K: int = 128, V: int = 128, dtype: str = "bfloat16") -> Specialization:
    return Specialization("kda", dtype, (("K", K), ("V", V), ("contract", contract)))


@contextmanager
def building() -> Iterator[Build]:
    """Compiles several units on all processors, each once; fails the test when one does not compile."""
    toolchain, sandbox, limits = CuteToolchain(), Sandbox.detect(), Limits(wall_s=90)
    built: dict[str, tuple[Compiled, Resources]] = {}

    def one(unit: Unit) -> tuple[Compiled, Resources]:
        if unit.digest not in built:
            built[unit.digest] = compiled_now(unit)
        return built[unit.digest]

    def compiled_now(unit: Unit) -> tuple[Compiled, Resources]:
        with sandbox.scratch() as scratch:
            compiled = toolchain.compile(unit, scratch, sandbox, limits)
        assert isinstance(compiled, Compiled), f"{unit.constants}: {compiled}"
        resources = toolchain.inspect(unit, compiled)
        assert isinstance(resources, Resources), f"{unit.constants}: {resources}"
        return compiled, resources

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        yield lambda units: list(pool.map(one, units))
    toolchain.close()


def code(compiled: Compiled) -> str:
    """What two objects of the same machine code have in common."""
    return ptx_digest(compiled.files[".ptx"].decode())


def imported(source: str) -> set[str]:
    """Top-level packages that a source imports."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").split(".")[0])
    return found


def methods_of_stages(source: str) -> dict[str, list[str | None]]:
    """By stage, the names that its text defines in a class."""
    found: dict[str, list[str | None]] = {}
    for name, body in stages(source).items():
        (kernel,) = ast.parse("class Kernel:\n" + body).body
        assert isinstance(kernel, ast.ClassDef)
        found[name] = [getattr(node, "name", None) for node in kernel.body]
    return found
