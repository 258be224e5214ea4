"""What the Hopper templates share: a branch's text, and the constants that a unit hands to its `build`."""

from dataclasses import asdict
from importlib.resources import files
from typing import Any

from evotune.search_space.template import Constant, Specialization


def standalone(name: str, plan_import: str) -> str:
    """The text of `<name>_kernel.py` with its one import of ours replaced by the text of `<name>_plan.py`.

    A branch is one text that needs nothing but the DSL. Raises ValueError unless `plan_import` stands in the
    kernel exactly once.
    """
    here = files("evotune.search_space.templates")
    kernel = here.joinpath(f"{name}_kernel.py").read_text(encoding="utf-8")
    plan = here.joinpath(f"{name}_plan.py").read_text(encoding="utf-8")
    head, tail = kernel.split(plan_import)
    return f"{head}\n{plan}\n{tail}"


def constants(knobs: Any, spec: Specialization) -> tuple[tuple[str, Constant], ...]:
    """A unit's constants: knobs and KDA's specialization, names in capitals, sorted."""
    found: dict[str, Constant] = {name.upper(): value for name, value in asdict(knobs).items()}
    found["K"] = spec.integer("K")
    found["V"] = spec.integer("V")
    found["PRODUCTION"] = int(spec["contract"] == "production")
    found["IO_BF16"] = int(spec.dtype == "bfloat16")
    return tuple(sorted(found.items()))
