"""What a study may ask for: named objectives, each with a direction and a unit.

`OBJECTIVES` has the shipped ones; "package.module:NAME" names one of the user's own. Columns are known before
anything ran (a study needs its directions first); values exist only for a candidate that passed.
"""

import io
import math
import re
import tokenize
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol

from evotune.errors import StudyError
from evotune.fitness.outcome import Measurement, Value
from evotune.search_space.branch import stages
from evotune.search_space.template import Language


@dataclass(frozen=True)
class Column:
    """One direction of a study. `name` is "speedup:long" for an objective per group, else its own."""

    name: str
    unit: str
    maximize: bool


@dataclass(frozen=True)
class Evidence:
    """What is known of a candidate that passed.

    Attributes:
        worst_error: largest error over its bound, gate and timed calls together.
        host_call_us: host cost of one call on an empty problem.
        source: the branch's text.
    """

    measurements: Sequence[Measurement]
    worst_error: float
    host_call_us: float
    source: str
    language: Language


class Objective(Protocol):
    """One entry of `objectives` in study.toml."""

    def columns(self, groups: Sequence[str]) -> tuple[Column, ...]:
        """Its directions, for the workload groups of a study."""
        ...

    def values(self, evidence: Evidence) -> tuple[float, ...]:
        """One finite number per column, groups in order of first appearance in the measurements."""
        ...


@dataclass(frozen=True)
class Speedup:
    """Default kernel's time over the candidate's, one column per workload group.

    Within a group the geometric mean over workloads: one mean over everything would drop the specialists
    that a dispatch needs.
    """

    def columns(self, groups: Sequence[str]) -> tuple[Column, ...]:
        return tuple(Column(f"speedup:{group}", "x", maximize=True) for group in groups)

    def values(self, evidence: Evidence) -> tuple[float, ...]:
        logs: dict[str, list[float]] = {}
        for measurement in evidence.measurements:
            logs.setdefault(measurement.group, []).append(math.log(measurement.speedup))
        return tuple(math.exp(sum(group) / len(group)) for group in logs.values())


@dataclass(frozen=True)
class WorstError:
    """Largest error over its derived bound, seen anywhere; at most 1."""

    def columns(self, groups: Sequence[str]) -> tuple[Column, ...]:
        return (Column("error", "of bound", maximize=False),)

    def values(self, evidence: Evidence) -> tuple[float, ...]:
        return (evidence.worst_error,)


@dataclass(frozen=True)
class Complexity:
    """Tokens of the evolvable stages, comments and white space left out."""

    def columns(self, groups: Sequence[str]) -> tuple[Column, ...]:
        return (Column("complexity", "tokens", maximize=False),)

    def values(self, evidence: Evidence) -> tuple[float, ...]:
        return (float(complexity(evidence.source, evidence.language)),)


@dataclass(frozen=True)
class HostCall:
    """What one call costs on the host when there is nothing to do, argument passing included."""

    def columns(self, groups: Sequence[str]) -> tuple[Column, ...]:
        return (Column("host_call", "us", maximize=False),)

    def values(self, evidence: Evidence) -> tuple[float, ...]:
        return (evidence.host_call_us,)


OBJECTIVES: Mapping[str, Objective] = {
    "speedup": Speedup(),
    "error": WorstError(),
    "complexity": Complexity(),
    "host_call": HostCall(),
}


def objective(name: str) -> Objective:
    """A shipped objective by name, or the user's by "package.module:NAME". Raises StudyError."""
    if name in OBJECTIVES:
        return OBJECTIVES[name]
    module, _, attribute = name.partition(":")
    if not attribute:
        raise StudyError(f"no objective named {name!r}; there are: {', '.join(OBJECTIVES)}")
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise StudyError(f"objective {name!r} cannot be imported: {error}") from error
    if not callable(getattr(found, "columns", None)) or not callable(getattr(found, "values", None)):
        raise StudyError(f"objective {name!r} is not an Objective: it needs columns() and values()")
    chosen: Objective = found
    return chosen


def columns(objectives: Sequence[Objective], groups: Sequence[str]) -> tuple[Column, ...]:
    """All directions of a study, in order."""
    return tuple(column for item in objectives for column in item.columns(groups))


def values(objectives: Sequence[Objective], evidence: Evidence) -> tuple[Value, ...]:
    """All values of a candidate, in the order of `columns` for its groups.

    Raises StudyError when an objective gives a number that is not finite or the wrong count of them.
    """
    groups = tuple(dict.fromkeys(measurement.group for measurement in evidence.measurements))
    found = []
    for item in objectives:
        expected, numbers = item.columns(groups), item.values(evidence)
        if len(numbers) != len(expected) or not all(map(math.isfinite, numbers)):
            names = ", ".join(column.name for column in expected)
            raise StudyError(f"objective {names} gave {numbers}: one finite number for each is needed")
        found += [
            Value(column.name, number, column.unit, column.maximize)
            for column, number in zip(expected, numbers, strict=True)
        ]
    return tuple(found)


_C_TOKEN = re.compile(
    r"""
    (?P<skip> //[^\n]* | /\*.*?\*/ | \s+ | \\\n)
    | (?P<token>
        "(?:\\.|[^"\\])*" | '(?:\\.|[^'\\])*'            # string, character
        | \.?\d(?:[eEpP][+-]|[\w.])*                     # preprocessing number
        | [A-Za-z_]\w*
        | <<= | >>= | \.\.\. | -> | \+\+ | -- | << | >> | [<>=!]= | && | \|\| | [-+*/%&|^]= | \#\#
        | .)
    """,
    re.VERBOSE | re.DOTALL,
)
_LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def complexity(source: str, language: Language) -> int:
    """Tokens in the evolvable stages of a source; text that Python cannot tokenize counts by its words."""
    count = _c_tokens if language == "c" else _python_tokens
    return sum(count(body) for body in stages(source).values())


def _c_tokens(text: str) -> int:
    return sum(1 for match in _C_TOKEN.finditer(text) if match["token"])


def _python_tokens(text: str) -> int:
    try:
        found = list(tokenize.generate_tokens(io.StringIO(text).readline))
    except (tokenize.TokenError, SyntaxError):
        return len(text.split())
    return sum(1 for token in found if token.type not in _LAYOUT)
