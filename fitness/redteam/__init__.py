"""A corpus of wrong, cheating and honest KDA kernels for the host, and what the judge makes of each.

`CORPUS` holds the entries; `corpus.run` puts them through the real pipeline; `coverage` says which of the
known ways to fool an evaluator of kernels they stand for.
"""

from evotune.fitness.redteam.cheats import CHEATS
from evotune.fitness.redteam.entry import Entry, Kind
from evotune.fitness.redteam.mutants import MUTANTS
from evotune.fitness.redteam.variants import VARIANTS

__all__ = ["CHEATS", "CORPUS", "MUTANTS", "VARIANTS", "Entry", "Kind"]

CORPUS: tuple[Entry, ...] = (*MUTANTS, *CHEATS, *VARIANTS)
