"""Imports run one way: search_space, reference_kda < fitness < mutators < evotune."""

import ast
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAY_IMPORT = {
    "search_space": {"search_space"},
    "reference_kda": {"reference_kda"},
    "fitness": {"fitness", "search_space", "reference_kda"},
    "mutators": {"mutators", "fitness", "search_space", "reference_kda"},
}


def imported_modules(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def violations(package: str, path: Path) -> list[str]:
    found = []
    for name in imported_modules(path):
        top, *rest = name.split(".")
        if top in MAY_IMPORT:
            found.append(f"{path}: bare import of {name}")
        if top == "evotune" and rest and rest[0] not in MAY_IMPORT[package] | {"errors"}:
            found.append(f"{path}: {package} imports {name}")
    return found


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_run_one_way(package: str) -> None:
    found = [v for path in (ROOT / package).rglob("*.py") for v in violations(package, path)]
    assert not found


def test_a_wrong_direction_is_seen(tmp_path: Path) -> None:
    module = tmp_path / "m.py"
    module.write_text("from evotune.mutators import rules\nimport fitness\n")
    assert len(violations("fitness", module)) >= 2


@pytest.mark.parametrize(
    ("text", "home"),
    [("1.4826", "evotune/promotion.py"), ("platform.python_version()", "evotune/versions.py")],
    ids=["robust standard deviation", "versions that a result depends on"],
)
def test_what_several_modules_need_is_in_one(text: str, home: str) -> None:
    modules = [path for top in ("evotune", *MAY_IMPORT) for path in (ROOT / top).rglob("*.py")]
    assert [str(path.relative_to(ROOT)) for path in modules if text in path.read_text()] == [home]


def test_every_package_is_listed_for_the_wheel() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    tops = ("evotune", *MAY_IMPORT)
    folders = {str(p.parent.relative_to(ROOT)) for top in tops for p in (ROOT / top).rglob("__init__.py")}
    listed = {name.removeprefix("evotune.").replace(".", "/") for name in setuptools["packages"]}
    assert listed == folders
