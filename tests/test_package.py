"""What is shipped: a source distribution that its own tests can run from, a wheel with its data."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = "gpuscheduler", "graphs", "tests", "examples", "docs"
FILES = [
    *("pyproject.toml", "MANIFEST.in", "Makefile", "README.md", "CHANGELOG.md", "LICENSE"),
    *(".gitignore", ".ci/run"),
]
LEFT = shutil.ignore_patterns("__pycache__", "*.egg-info", ".*_cache", ".hypothesis")


@pytest.fixture(scope="module")
def shipped(tmp_path_factory):
    """The source tree, and what is built of it: names in the distribution, and in the wheel."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("out")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, tree / folder, ignore=LEFT)
    (tree / ".ci").mkdir()
    for file in FILES:
        shutil.copy(ROOT / file, tree / file)
    before = {str(p.relative_to(tree)) for p in tree.rglob("*") if p.is_file()}
    code = (
        "import sys; from setuptools import build_meta as b; out = sys.argv[1];"
        "b.build_sdist(out); b.build_wheel(out)"
    )
    command = [sys.executable, "-W", "ignore", "-c", code, str(out)]
    subprocess.run(command, cwd=tree, capture_output=True, check=True)
    with tarfile.open(next(out.glob("*.tar.gz"))) as source:
        inside = {name.partition("/")[2] for name in source.getnames()}
    with zipfile.ZipFile(next(out.glob("*.whl"))) as wheel:
        return before, inside, set(wheel.namelist())


def test_source_distribution_has_all_that_its_tests_read(shipped):
    tree, source, _ = shipped
    assert tree <= source, sorted(tree - source)


def test_wheel_has_the_package_its_data_and_the_workloads(shipped):
    tree, _, wheel = shipped
    assert {f for f in tree if f.startswith("gpuscheduler/")} <= wheel
    workloads = {f for f in tree if f.startswith("graphs/") and f.endswith(".py")}
    assert {f"gpuscheduler/{f}" for f in workloads} <= wheel
    assert not [f for f in wheel if f.startswith(("tests/", "examples/", "graphs/"))]
