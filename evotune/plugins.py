"""Names that study.toml may use, and how each is found.

Every registry maps a short name to "package.module:NAME"; a study may give such an address itself, so code
elsewhere plugs in without touching this file. Nothing is imported before it is asked for.
"""

import difflib
from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any

from evotune.errors import StudyError

TEMPLATES: Mapping[str, str] = {
    "kda_host": "evotune.search_space.templates.kda_host:TEMPLATE",
    "kda_sm90": "evotune.search_space.templates.kda_sm90:TEMPLATE",
    "kda_sm90_chunked": "evotune.search_space.templates.kda_sm90_chunked:TEMPLATE",
}
OPERATORS: Mapping[str, str] = {"kda": "evotune.reference_kda.operator:KDA"}
# Functions (Setup) -> Mutator.
MUTATORS: Mapping[str, str] = {
    "rules": "evotune.proposers:rules",
    "crossover": "evotune.proposers:crossover",
    "llm": "evotune.proposers:llm",
}
# Functions (Setup) -> Evaluator, by a template's target.
DEVICES: Mapping[str, str] = {"host": "evotune.devices:host", "sm_90a": "evotune.devices:sm_90a"}
# How kernels of a target are exported and verified; only these are, see `evotune.targets`.
TARGETS: Mapping[str, str] = {"host": "evotune.targets:HOST", "sm_90a": "evotune.targets:SM_90A"}
SAMPLERS = ("pool", "tpe", "random")


def nearest(word: str, known: Iterable[str]) -> str:
    """ "did you mean tile?" where something known is near, else what there is."""
    names = list(known)
    near = difflib.get_close_matches(word, names, n=1)
    return f"did you mean {near[0]}?" if near else f"there are: {', '.join(names) or 'none'}"


def load(name: str, registry: Mapping[str, str], what: str) -> Any:
    """What a name stands for. Raises StudyError with the nearest known name or the failing import."""
    address = registry.get(name, name)
    module, colon, attribute = address.partition(":")
    if not colon:
        raise StudyError(f'no {what} named {name}; {nearest(name, registry)} (or "package.module:NAME")')
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise StudyError(f"{what} {name} cannot be loaded: {error}") from error
