"""Edits a model proposes, from text to text.

An answer holds one or more blocks; anything around them is prose and ignored, and so are code fences:

    <<<<<<< SEARCH update
    lines of the stage as they are now
    =======
    the lines that take their place
    >>>>>>> REPLACE

The stage's name after SEARCH is optional and settles which stage is meant. An empty search part with a name
replaces the whole stage; an empty replacement deletes. Edits apply in order, whole lines each, and only
inside evolvable stages: the frame is equal before and after.

The search lines must occur exactly once. Where they do not occur at all, lines that differ only in white
space are taken, provided that there is one such place and its indentation differs by one constant amount.
"""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from evotune.errors import PatchError
from evotune.search_space.branch import frame, replace_stage, stages

# An honest rewrite of a whole template is below 60 kB; matching stays below 0.1 s up to here.
MAX_ANSWER_CHARS = 200_000
_OPEN = re.compile(r"^[ \t]*<{5,9}[ \t]*SEARCH\b[ \t:]*(?P<stage>\w*)[ \t]*$")
_DIVIDER = re.compile(r"^[ \t]*={5,9}[ \t]*$")
_CLOSE = re.compile(r"^[ \t]*>{5,9}[ \t]*REPLACE[ \t]*$")
_FENCE = re.compile(r"^[ \t]*(```|~~~)")
_MARKER = "EVOLVE-"


@dataclass(frozen=True)
class Edit:
    """Lines to find and lines to put there. `stage` "" leaves open which stage is meant."""

    search: tuple[str, ...]
    replacement: tuple[str, ...]
    stage: str = ""


@dataclass(frozen=True)
class _Place:
    """Lines begin .. end - 1 of a stage's body; a replacement lacks `indent` blanks, negative if too many."""

    stage: str
    begin: int
    end: int
    indent: int = 0


def parse(answer: str) -> tuple[Edit, ...]:
    """The edits of an answer, in order. Raises PatchError when there is none or one of them is incomplete."""
    if len(answer) > MAX_ANSWER_CHARS:
        raise PatchError(f"the answer has {len(answer)} characters, more than {MAX_ANSWER_CHARS}")
    lines = iter(answer.replace("\r\n", "\n").split("\n"))
    edits: list[Edit] = []
    for line in lines:
        opened = _OPEN.match(line)
        if opened:
            number = len(edits) + 1
            search = _until(_DIVIDER, lines, number, "a line of = signs")
            replacement = _until(_CLOSE, lines, number, "a line '>>>>>>> REPLACE'")
            edits.append(Edit(_unfenced(search), _unfenced(replacement), opened["stage"]))
    if not edits:
        raise PatchError("the answer has no edit: no line '<<<<<<< SEARCH' was found")
    return tuple(edits)


def summary(answer: str) -> str:
    """What the model says about its answer: the first line of prose before the first edit, "" without one.

    Printable, one line, at most 160 characters; still a stranger's words, to be escaped where it is shown.
    """
    for line in answer.replace("\r\n", "\n").split("\n"):
        if _OPEN.match(line):
            return ""
        words = re.sub(r"^[\s#>*-]*(NOTE:)?\s*", "", line)
        if words and not _FENCE.match(line) and not words.startswith("KNOBS:"):
            printable = "".join(c if c.isprintable() else " " for c in words)
            return _tight(printable)[:160]
    return ""


def knob_line(answer: str) -> dict[str, str]:
    """Knobs by name from a line "KNOBS: algorithm=recurrent, chunk=16" outside the edits; {} without one.

    Raises PatchError for a part that is not name=value.
    """
    found: dict[str, str] = {}
    prose = re.sub(r"(?ms)^[ \t]*<{5,9}[ \t]*SEARCH\b.*?^[ \t]*>{5,9}[ \t]*REPLACE[ \t]*$", "", answer)
    for line in re.findall(r"(?m)^[ \t*`]*KNOBS:(.*)$", prose):
        for part in re.split(r"[\s,;`*]+", line):
            name, equals, value = part.partition("=")
            if part and not (name and equals and value):
                raise PatchError(f"the line KNOBS: has {part!r}, which is not name=value")
            if part:
                found[name] = value
    return found


def apply(source: str, edits: Sequence[Edit]) -> str:
    """The source with the edits made in order.

    Raises PatchError for text that is absent, ambiguous or in the frame, for a marker in a replacement, for
    an unknown stage, and when nothing changes in the end.
    """
    edited = source
    for number, edit in enumerate(edits, 1):
        if any(_MARKER in line for line in edit.replacement):
            raise PatchError(f"edit {number}: a replacement may not contain EVOLVE markers")
        edited = _apply_one(edited, edit, number)
    if edited == source:
        raise PatchError("the edits change nothing")
    if frame(edited) != frame(source) or list(stages(edited)) != list(stages(source)):
        raise PatchError("the edits change text outside the evolvable stages")
    return edited


def _until(end: re.Pattern[str], lines: Iterator[str], number: int, wanted: str) -> list[str]:
    """Lines up to one that matches `end`; any other marker on the way means that half an edit is missing."""
    found: list[str] = []
    for line in lines:
        if end.match(line):
            return found
        if _OPEN.match(line) or _DIVIDER.match(line) or _CLOSE.match(line):
            break
        found.append(line)
    raise PatchError(f"edit {number} is incomplete: {wanted} is missing")


def _unfenced(lines: list[str]) -> tuple[str, ...]:
    if len(lines) >= 2 and _FENCE.match(lines[0]) and _FENCE.match(lines[-1]):
        lines = lines[1:-1]
    return tuple(lines)


def _apply_one(source: str, edit: Edit, number: int) -> str:
    bodies = {name: body.removesuffix("\n").split("\n") for name, body in stages(source).items()}
    if edit.stage and edit.stage not in bodies:
        raise PatchError(f"edit {number}: no stage named {edit.stage}; there are: {', '.join(bodies)}")
    if edit.stage:
        bodies = {edit.stage: bodies[edit.stage]}
    place = _find(source, bodies, edit, number)
    body = bodies[place.stage]
    new = [_shifted(line, place.indent, number) for line in edit.replacement]
    lines = [*body[: place.begin], *new, *body[place.end :]]
    return replace_stage(source, place.stage, "".join(line + "\n" for line in lines))


def _find(source: str, bodies: Mapping[str, list[str]], edit: Edit, number: int) -> _Place:
    wanted = _trimmed(edit.search)
    if not wanted:
        if not edit.stage:
            raise PatchError(f"edit {number}: an empty search part needs the name of a stage")
        return _Place(edit.stage, 0, len(bodies[edit.stage]))
    exact = [p for name, body in bodies.items() for p in _exact(name, body, edit.search)]
    places = exact or [p for name, body in bodies.items() for p in _loose(name, body, wanted)]
    if len(places) == 1:
        return places[0]
    if places:
        where = ", ".join(f"stage {p.stage} line {p.begin + 1}" for p in places[:4])
        raise PatchError(
            f"edit {number}: the search text occurs {len(places)} times ({where}); "
            "add lines around it or name the stage after SEARCH"
        )
    if any(True for _ in _loose("", source.split("\n"), wanted)):
        raise PatchError(
            f"edit {number}: {_quoted(wanted[0])} is in the source but not inside {_among(bodies)}"
        )
    raise PatchError(
        f"edit {number}: the search text is not inside {_among(bodies)}; {_nearest(bodies, wanted)}"
    )


def _exact(name: str, body: Sequence[str], search: Sequence[str]) -> Iterator[_Place]:
    size = len(search)
    for begin in range(len(body) - size + 1):
        if tuple(body[begin : begin + size]) == tuple(search):
            yield _Place(name, begin, begin + size)


def _loose(name: str, body: Sequence[str], wanted: Sequence[str]) -> Iterator[_Place]:
    """Windows of `body` equal to `wanted` up to white space, all indented by one constant amount more."""
    tight, wanted_tight = [_tight(line) for line in body], [_tight(line) for line in wanted]
    for begin in range(len(body) - len(wanted) + 1):
        end = begin + len(wanted)
        if tight[begin:end] == wanted_tight:
            pairs = zip(body[begin:end], wanted, strict=True)
            shifts = {_indent(have) - _indent(want) for have, want in pairs if have.strip()}
            if len(shifts) == 1:
                yield _Place(name, begin, end, shifts.pop())


def _nearest(bodies: Mapping[str, list[str]], wanted: Sequence[str]) -> str:
    """One line that says which stage text is most like `wanted` and where the two first differ."""
    text = "\n".join(wanted)[:4000]
    best, best_ratio = ("", 0), -1.0
    for name, body in bodies.items():
        for begin in range(max(len(body) - len(wanted), 0) + 1):
            matcher = difflib.SequenceMatcher(None, "\n".join(body[begin : begin + len(wanted)])[:4000], text)
            if matcher.quick_ratio() > best_ratio:
                best, best_ratio = (name, begin), matcher.quick_ratio()
    name, begin = best
    for i, line in enumerate(wanted):
        have = bodies[name][begin + i] if begin + i < len(bodies[name]) else ""
        if _tight(have) != _tight(line):
            where = f"nearest is stage {name} line {begin + i + 1}"
            return f"{where}, which reads {_quoted(have)}, not {_quoted(line)}"
    return f"nearest is stage {name} line {begin + 1}, indented otherwise"


def _shifted(line: str, indent: int, number: int) -> str:
    if not line.strip():
        return line
    if indent >= 0:
        return " " * indent + line
    if line[:-indent].strip():
        raise PatchError(
            f"edit {number}: the replacement is indented less than the search text: {_quoted(line)}"
        )
    return line[-indent:]


def _trimmed(lines: Sequence[str]) -> list[str]:
    """Without blank lines at either end."""
    solid = [i for i, line in enumerate(lines) if line.strip()]
    return list(lines[solid[0] : solid[-1] + 1]) if solid else []


def _tight(line: str) -> str:
    return " ".join(line.split())


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _quoted(line: str) -> str:
    tight = _tight(line)
    return repr(tight if len(tight) <= 100 else tight[:97] + "...")


def _among(bodies: Mapping[str, list[str]]) -> str:
    names = list(bodies)
    return f"stage {names[0]}" if len(names) == 1 else "any evolvable stage"
