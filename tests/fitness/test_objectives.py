"""Named objectives: columns before anything ran, values only from evidence."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from evotune.errors import StudyError
from evotune.fitness.objectives import (
    OBJECTIVES,
    Column,
    Evidence,
    columns,
    complexity,
    objective,
    values,
)
from evotune.fitness.outcome import Measurement


def measured(workload: str, group: str, time_us: float, baseline_us: float) -> Measurement:
    return Measurement(workload, group, (time_us,), (baseline_us,))


EVIDENCE = Evidence(
    measurements=[
        measured("a", "long", 1.0, 2.0),
        measured("b", "heads", 4.0, 4.0),
        measured("c", "long", 1.0, 8.0),
    ],
    worst_error=0.25,
    host_call_us=1.5,
    source="// EVOLVE-BEGIN f\nint f(void) { return 1; }\n// EVOLVE-END f\n",
    language="c",
)


def test_columns_and_values_agree() -> None:
    chosen = [objective(name) for name in OBJECTIVES]
    names = [column.name for column in columns(chosen, ["long", "heads"])]
    assert names == ["speedup:long", "speedup:heads", "error", "complexity", "host_call"]
    found = {value.name: value for value in values(chosen, EVIDENCE)}
    assert list(found) == names
    assert found["speedup:long"].value == pytest.approx(4.0)  # geometric mean of 2 and 8
    assert found["speedup:heads"].value == pytest.approx(1.0)
    assert [found[name].maximize for name in names] == [True, True, False, False, False]
    assert found["error"].value == 0.25
    assert (found["host_call"].value, found["host_call"].unit) == (1.5, "us")


def test_complexity_ignores_comments_and_space_and_the_frame() -> None:
    dense = "a+=b;/*x*/c->d(1.5e-3f,'\\'',\"// no\");\n"
    spaced = "  a  += b ; // why\n\n c -> d ( 1.5e-3f , '\\'' , \"// no\" ) ;\n"
    sources = [f"int frame;\n// EVOLVE-BEGIN f\n{body}// EVOLVE-END f\n" for body in (dense, spaced)]
    assert [complexity(source, "c") for source in sources] == [15, 15]


def test_complexity_of_python_stages() -> None:
    text = "# EVOLVE-BEGIN f\ndef f(x):\n    return x + 1  # why\n# EVOLVE-END f\n"
    assert complexity(text, "cute") == 10
    broken = "# EVOLVE-BEGIN f\ndef f(x:\n# EVOLVE-END f\n"
    assert complexity(broken, "cute") > 0


@dataclass(frozen=True)
class Worst:
    def columns(self, groups: Sequence[str]) -> tuple[Column, ...]:
        return (Column("worst", "x", maximize=True),)

    def values(self, evidence: Evidence) -> tuple[float, ...]:
        return (min(m.speedup for m in evidence.measurements),)


@dataclass(frozen=True)
class Infinite(Worst):
    def values(self, evidence: Evidence) -> tuple[float, ...]:
        return (math.inf,)


WORST = Worst()


def test_a_users_own_objective() -> None:
    mine = objective(f"{__name__}:WORST")
    assert [value.value for value in values([mine], EVIDENCE)] == [1.0]


@pytest.mark.parametrize("name", ["sped", "no.such.module:X", "math:nothing", "math:pi"])
def test_an_unknown_objective_is_the_users_mistake(name: str) -> None:
    with pytest.raises(StudyError, match=name):
        objective(name)


def test_a_value_that_is_not_finite_is_refused() -> None:
    with pytest.raises(StudyError, match="worst"):
        values([Infinite()], EVIDENCE)
