"""Names that tests and workloads import from this repository are there.

pytest skips a file of tests that cannot be imported (`--doctest-ignore-import-errors`).
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted(
    str(file.relative_to(ROOT))
    for part in ("tests", "graphs")
    for file in (ROOT / part).rglob("*.py")
    if "fake_cuda" not in file.parts  # the stand-in for CuPy is no part of a package
)


def file_of(module: str) -> Path | None:
    """The file of a module, or of a package its __init__.py or its folder; None for no module."""
    path = ROOT.joinpath(*module.split("."))
    every = path.with_suffix(".py"), path / "__init__.py", path
    return next((p for p in every if p.exists()), None)


@cache
def names_in(file: Path) -> frozenset[str] | None:
    """Names that a module gives; None for one that finds some only when asked."""
    if file.is_dir():
        return frozenset()
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names.update((a.asname or a.name).partition(".")[0] for a in node.names)
    return None if names & {"__getattr__", "*"} else frozenset(names)


def missing_names(source: str, package: list[str]) -> list[str]:
    """Names that a source imports from this repository, and that are not there."""
    missing = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ImportFrom):
            continue
        near = package[: len(package) + 1 - node.level] if node.level else []
        module = ".".join([*near, *filter(None, [node.module])])
        if module.partition(".")[0] not in ("gpuscheduler", "graphs", "tests"):
            continue
        file = file_of(module)
        known = frozenset() if file is None else names_in(file)
        for alias in node.names if known is not None else ():
            name = alias.name
            if name not in (*known, "*") and file_of(f"{module}.{name}") is None:
                missing.append(f"{module}.{name}")
    return missing


@pytest.mark.parametrize("file", FILES)
def test_imported_names_are_there(file):
    source = (ROOT / file).read_text(encoding="utf-8")
    assert missing_names(source, list(Path(file).parent.parts)) == []


def test_the_test_of_imports_can_fail():
    assert missing_names("from graphs import _roots, _blocks", []) == ["graphs._roots"]
    assert missing_names("from .nowhere import a", ["tests"]) == ["tests.nowhere.a"]
    assert missing_names("from ..support.matrices import matrix", ["tests", "gpu"])
    assert not missing_names("from ..support.matrices import tall_matrix", ["tests", "gpu"])
