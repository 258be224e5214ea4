"""evotune: automatic design of GPU kernels that can be trusted."""

from pathlib import Path
from typing import TYPE_CHECKING

from evotune import _checkout

if TYPE_CHECKING:
    import pandas as pd

__version__ = "0.1.0"

_checkout.activate()


def results(path: str | Path) -> "pd.DataFrame":
    """The judged candidates of a study directory, one row each; see `evotune.tables.results`."""
    from evotune.tables import results as table  # pandas takes half a second

    return table(path)
