"""Branches (a kernel's structure) and candidates (a branch with knobs).

An evolvable stage is a whole function between two marker lines, in the comment syntax of its language:

    // EVOLVE-BEGIN decay          # EVOLVE-BEGIN decay
    static inline … { … }          @cute.jit …
    // EVOLVE-END decay            # EVOLVE-END decay

Everything outside the markers is the frame, equal in all branches of a template.
"""

import re
from dataclasses import dataclass
from typing import Any

from evotune.errors import PatchError
from evotune.search_space.template import digest

_STAGE = re.compile(
    r"^[ \t]*(?://|#)[ ]*EVOLVE-BEGIN[ ]+(?P<name>\w+)[ \t]*\n"
    r"(?P<body>.*?)"
    r"^[ \t]*(?://|#)[ ]*EVOLVE-END[ ]+(?P=name)[ \t]*$",
    re.MULTILINE | re.DOTALL,
)


def stages(source: str) -> dict[str, str]:
    """Bodies of the evolvable stages by name, in source order. Raises PatchError on a repeated name."""
    found: dict[str, str] = {}
    for match in _STAGE.finditer(source):
        if match["name"] in found:
            raise PatchError(f"stage {match['name']} appears twice")
        found[match["name"]] = match["body"]
    return found


def frame(source: str) -> str:
    """The source with every stage body removed: what a mutation may not touch."""
    return _STAGE.sub(lambda match: f"<{match['name']}>", source)


def replace_stage(source: str, name: str, body: str) -> str:
    """The source with one stage's body replaced; markers stay. Raises PatchError for an unknown stage or a
    body that would break the markers."""
    if name not in stages(source):
        raise PatchError(f"no stage named {name}; there are: {', '.join(stages(source)) or 'none'}")
    if "EVOLVE-BEGIN" in body or "EVOLVE-END" in body:
        raise PatchError(f"the new body of stage {name} contains an EVOLVE marker")
    if not body.endswith("\n"):
        body += "\n"

    def swap(match: re.Match[str]) -> str:
        if match["name"] != name:
            return match[0]
        start, end = match.start("body") - match.start(), match.end("body") - match.start()
        return match[0][:start] + body + match[0][end:]

    return _STAGE.sub(swap, source)


@dataclass(frozen=True)
class Branch:
    """One structure of a template.

    Attributes:
        id: "b00" for the seed, then "b01" and so on; prefixes the branch's Optuna parameters.
        source: the whole text.
        parent: id of the branch it was made from; None for the seed.
        origin: who proposed it: "seed", "rules", "crossover", "llm".
        note: one line on what is different.
        other_parent: the second parent of a crossover.
    """

    id: str
    source: str
    parent: str | None
    origin: str
    note: str
    other_parent: str | None = None

    @property
    def digest(self) -> str:
        """Of the source alone: two branches with one digest are the same structure."""
        return digest(self.source)


SEED_BRANCH = "b00"


def seed(source: str) -> Branch:
    """A template's own source as a branch."""
    return Branch(SEED_BRANCH, source, None, "seed", "the template as shipped")


@dataclass(frozen=True)
class Candidate:
    """A branch with knobs: what is built, judged and timed. `knobs` is the template's frozen dataclass."""

    branch: Branch
    knobs: Any

    @property
    def digest(self) -> str:
        return digest(self.branch.digest, repr(self.knobs))
