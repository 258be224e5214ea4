"""Fail when the wheel lacks a file of a package, or brings one that is not under `evotune/`."""

import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SUFFIXES = {".py", ".c", ".json", ".md", ".toml", ".typed"}

names = {name for name in zipfile.ZipFile(sys.argv[1]).namelist() if ".dist-info/" not in name}
expected = {
    ("" if top == "evotune" else "evotune/") + str(path.relative_to(ROOT))
    for top in ("evotune", "search_space", "mutators", "fitness", "reference_kda")
    for path in (ROOT / top).rglob("*")
    if path.suffix in SUFFIXES and "__pycache__" not in path.parts
}
missing, extra = sorted(expected - names), sorted(names - expected)
print(f"{len(names)} files in the wheel")
if missing or extra:
    sys.exit(f"missing: {missing}\nnot expected: {extra}")
