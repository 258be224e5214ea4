"""Known alternatives for single stages: mutation with no key, no model and no device.

The alternatives of a template are data beside this module, `rules_<template>.c`, in a form a person reads:

    // RULE <stage> <name> [knob=value ...]
    // one line on what is different
    the whole function

Knobs named in the head say where the stage is compiled at all: `algorithm=chunked` makes no difference to a
recurrent kernel.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from random import Random
from typing import Any

from evotune.errors import ProposalError
from evotune.fitness.outcome import Failed
from evotune.mutators.mutator import Proposal, Request, Standing
from evotune.search_space.branch import replace_stage, stages
from evotune.search_space.template import Constant, digest

_RULE = re.compile(
    r"^// RULE (?P<stage>\w+) (?P<name>\w+)(?P<when>(?: \w+=\w+)*)\n"
    r"// (?P<note>.+)\n"
    r"(?P<body>(?:(?!// RULE ).*\n)+)",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Rule:
    """One other way to write a stage.

    Attributes:
        when: values of knobs under which the stage is compiled; empty for always.
        body: the stage's whole text.
    """

    stage: str
    name: str
    note: str
    when: Mapping[str, Constant]
    body: str


@cache
def rules_for(template: str) -> tuple[Rule, ...]:
    """The rules that ship for a template, by its name. Raises ProposalError where there are none."""
    path = files("evotune.mutators").joinpath(f"rules_{template}.c")
    if not path.is_file():
        raise ProposalError(f"rules: there are none for template {template}")
    return tuple(parse(path.read_text(encoding="utf-8")))


def parse(text: str) -> Iterator[Rule]:
    """Rules in file order."""
    for match in _RULE.finditer(text):
        when: dict[str, Constant] = {}
        for condition in match["when"].split():
            knob, value = condition.split("=")
            when[knob] = int(value) if value.isdigit() else value
        yield Rule(match["stage"], match["name"], match["note"], when, match["body"].rstrip("\n") + "\n")


@dataclass(frozen=True)
class _Child:
    """A branch with a rule applied. `weight` is how promising it is."""

    parent: Standing
    rule: Rule
    source: str
    start: Any | None
    weight: float


class Rules:
    """Applies one untried rule to one living branch, rather to a good one."""

    name = "rules"

    def propose(self, request: Request) -> Proposal:
        children = list(_children(request))
        if not children:
            raise ProposalError(
                f"rules: every rule for {request.template.name} was tried on every living branch"
            )
        rng = Random(request.seed)
        chosen = rng.choices(children, [child.weight for child in children])[0]
        return Proposal(
            source=chosen.source,
            parent=chosen.parent.branch.id,
            origin=self.name,
            note=f"{chosen.rule.stage}: {chosen.rule.note}",
            start=chosen.start,
            extra={"rule": f"{chosen.rule.stage}/{chosen.rule.name}"},
        )

    def repair(self, request: Request, proposal: Proposal, failed: Failed) -> Proposal | None:
        """None: a rule that fails has no second form."""
        return None


def _children(request: Request) -> Iterator[_Child]:
    """Every untried (branch, rule), the better branch the likelier: weight 1, 1/2, 1/4 … by rank. A rule for
    a stage that the branch's best knobs leave out weighs a tenth, and starts from knobs that compile it."""
    for rank, standing in enumerate(request.standings):
        present = stages(standing.branch.source)
        for rule in rules_for(request.template.name):
            if present.get(rule.stage, rule.body) == rule.body:
                continue
            source = replace_stage(standing.branch.source, rule.stage, rule.body)
            if digest(source) in request.tried:
                continue
            start = _start(request, standing, rule)
            idle = start is not None
            yield _Child(standing, rule, source, start, 0.5**rank * (0.1 if idle else 1.0))


def _start(request: Request, standing: Standing, rule: Rule) -> Any | None:
    """None where the branch's best knobs (the default, before there are any) compile the stage; else those
    knobs changed so that they do, or the default changed so, whichever is legal."""
    defaults = [request.template.default(spec) for spec in request.specializations]
    best = standing.best[0][0] if standing.best else defaults[0]
    if all(getattr(best, knob) == value for knob, value in rule.when.items()):
        return None
    for knobs in (best, *defaults):
        changed = dataclasses.replace(knobs, **rule.when)
        if all(request.template.why_not(changed, spec) is None for spec in request.specializations):
            return changed
    return None
