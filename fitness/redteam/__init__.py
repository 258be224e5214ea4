"""Corpora of wrong, cheating and honest KDA kernels, and what the judge makes of each.

`CORPORA` holds the entries by target; `corpus.run` puts them through the real pipeline; `coverage` says which
of the known ways to fool an evaluator of kernels they stand for.
"""

from collections.abc import Mapping

from evotune.fitness.redteam import cute_cheats, cute_mutants
from evotune.fitness.redteam.cheats import CHEATS
from evotune.fitness.redteam.entry import Entry, Kind
from evotune.fitness.redteam.mutants import MUTANTS
from evotune.fitness.redteam.variants import VARIANTS

__all__ = ["CORPORA", "CORPUS", "CUTE_CORPUS", "Entry", "Kind"]

CORPUS: tuple[Entry, ...] = (*MUTANTS, *CHEATS, *VARIANTS)
CUTE_CORPUS: tuple[Entry, ...] = tuple(
    sorted((*cute_mutants.MUTANTS, *cute_cheats.CHEATS, *cute_mutants.VARIANTS), key=lambda entry: entry.base)
)
"""By template, since a GPU has one owner at a time."""
CORPORA: Mapping[str, tuple[Entry, ...]] = {"host": CORPUS, "sm_90a": CUTE_CORPUS}
