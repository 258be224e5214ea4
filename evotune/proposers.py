"""The shipped mutation operators, made for a setup. Each is imported when a study asks for it."""

from evotune.mutators.mutator import Mutator
from evotune.setup import Setup


def rules(setup: Setup) -> Mutator:
    """Known alternatives for single stages of a template. No key, no cost."""
    from evotune.mutators.rules import Rules

    return Rules()


def crossover(setup: Setup) -> Mutator:
    """Stages of two branches put together. No key, no cost."""
    from evotune.mutators.crossover import Crossover

    return Crossover()


def llm(setup: Setup) -> Mutator:
    """A language model. Raises StudyError: no key, an unknown price, a transcript that cannot be read."""
    from evotune.mutators.llm import from_settings

    return from_settings(setup.config.llm_settings, setup.directory, setup.base)
