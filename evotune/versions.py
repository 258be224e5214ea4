"""What a result may depend on besides this machine: the versions of what is installed."""

import importlib.metadata
import platform
from collections.abc import Iterable
from contextlib import suppress

from evotune import __version__


def installed(distributions: Iterable[str]) -> dict[str, str]:
    """Versions of evotune, Python and those of the distributions that are here."""
    found = {"evotune": __version__, "python": platform.python_version()}
    for name in distributions:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
