"""Bytecode of large packages for sandboxed Pythons, which may not write it themselves.

Some installers store none (uv, and whatever runs under PYTHONDONTWRITEBYTECODE, as in many images): then each
process compiles all of torch anew, 2.5 s of a core. So a Python outside the sandbox imports the packages once
and leaves their bytecode in the cache, which the others only read.
"""

import importlib.util
import os
import subprocess
import sys
import threading
from pathlib import Path

from evotune.search_space.template import digest

_IMPORT_S = 120.0
_mutex = threading.Lock()


def stored(modules: tuple[str, ...], cache: Path) -> Path | None:
    """Where `-X pycache_prefix` finds the bytecode of these modules and all that they import.

    Stored now if need be. None where it is beside the sources already, or cannot be stored.
    """
    packages = dict.fromkeys(name.partition(".")[0] for name in modules)
    sources = [source for name in packages if (source := _source(name)) is not None]
    if all(_beside(source).exists() for source in sources):
        return None
    # Python looks nowhere else then, so that what imports other modules has a place of its own.
    prefix = cache / "bytecode" / f"{sys.implementation.cache_tag}-{os.getuid()}-{digest(*modules)[:16]}"
    with _mutex:
        if not all(_under(prefix, source).exists() for source in sources):
            environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
            command = [sys.executable, "-X", f"pycache_prefix={prefix}", "-c", f"import {', '.join(modules)}"]
            try:
                prefix.mkdir(parents=True, exist_ok=True)
                subprocess.run(command, env=environment, capture_output=True, timeout=_IMPORT_S, check=False)
            except (OSError, subprocess.TimeoutExpired):
                return None
    return prefix if all(_under(prefix, source).exists() for source in sources) else None


def reading(prefix: Path | None) -> tuple[str, ...]:
    """Arguments of a Python that takes bytecode from there."""
    return () if prefix is None else ("-X", f"pycache_prefix={prefix}")


def _source(name: str) -> Path | None:
    """A package's own file; None where that is no Python source."""
    spec = importlib.util.find_spec(name)
    origin = spec.origin if spec else None
    return Path(origin) if origin and origin.endswith(".py") else None


def _beside(source: Path) -> Path:
    return source.parent / "__pycache__" / _name(source)


def _under(prefix: Path, source: Path) -> Path:
    return prefix / source.parent.relative_to(source.anchor) / _name(source)


def _name(source: Path) -> str:
    return f"{source.stem}.{sys.implementation.cache_tag}.pyc"
