"""Lets a checkout that was never installed import `evotune.fitness` and its siblings.

The four packages live at the top of the repository and are installed under `evotune.` by the
`package-dir` map in pyproject.toml. In a checkout that map has not been applied, so a meta path finder
answers for exactly those names. In an installed copy the packages lie inside and nothing is added.
"""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

_SIBLINGS = frozenset(f"evotune.{name}" for name in ("search_space", "mutators", "fitness", "reference_kda"))
_PACKAGE = Path(__file__).resolve().parent


class _CheckoutFinder:
    """Finds the four siblings in the folder above the package."""

    @staticmethod
    def find_spec(
        fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _SIBLINGS:
            return None
        return PathFinder.find_spec(fullname, [str(_PACKAGE.parent)], target)


def activate() -> None:
    """Add the finder once, and only in a checkout."""
    if (_PACKAGE / "search_space").is_dir():
        return
    if _CheckoutFinder not in sys.meta_path:
        sys.meta_path.append(_CheckoutFinder)
