"""Check what is shipped: a source distribution to test, a wheel that works alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from email import message_from_bytes
from pathlib import Path
from typing import NamedTuple

import pytest

import gpuscheduler

ROOT = Path(__file__).parents[1]
FOLDERS = "gpuscheduler", "graphs", "tests", "examples", "docs"
FILES = [
    *("pyproject.toml", "MANIFEST.in", "Makefile", "README.md", "CHANGELOG.md", "LICENSE"),
    *(".gitignore", ".ci/run"),
]
#: Of tracked files in folders.
SUFFIXES = {".py", ".cuh", ".csv", ".ini", ".md", ".png", ".txt", ".typed", ".yaml"}
#: Bytes of a tracked file.
LARGEST = 10**6
LEFT = shutil.ignore_patterns("__pycache__", "*.egg-info", ".*_cache", ".hypothesis")


class Shipped(NamedTuple):
    tree: set[str]  # files of the source tree
    source: set[str]  # files of the source distribution
    wheel: Path


@pytest.fixture(scope="module")
def shipped(tmp_path_factory):
    """The source tree, and what is built of it: the wheel from the source distribution."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("out")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, tree / folder, ignore=LEFT)
    (tree / ".ci").mkdir()
    for file in FILES:
        shutil.copy(ROOT / file, tree / file)
    before = {str(p.relative_to(tree)) for p in tree.rglob("*") if p.is_file()}
    build("sdist", tree, out)
    with tarfile.open(next(out.glob("*.tar.gz"))) as source:
        inside = {name.partition("/")[2] for name in source.getnames()}
        unpacked = tmp_path_factory.mktemp("unpacked")
        source.extractall(unpacked, filter="data")
    build("wheel", next(unpacked.iterdir()), out)
    return Shipped(before, inside, next(out.glob("*.whl")))


def build(kind, tree, out):
    """Build a distribution without the network, by the setuptools of this environment."""
    code = "import sys; from setuptools import build_meta as b; b.build_KIND(sys.argv[1])"
    command = [sys.executable, "-W", "ignore", "-c", code.replace("KIND", kind), str(out)]
    subprocess.run(command, cwd=tree, capture_output=True, check=True)


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="is no checkout")
def test_the_repository_has_sources_and_no_output_of_tools():
    command = ["git", "ls-files", "-z"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    tracked = [Path(name) for name in done.stdout.split("\0") if name]
    of_git = {".gitignore", ".git-blame-ignore-revs"}
    assert {p.parts[0] for p in tracked} <= {*FOLDERS, *FILES, ".ci", *of_git}
    inside = [p for p in tracked if len(p.parts) > 1 and p != Path(".ci/run")]
    assert not [p for p in inside if p.suffix not in SUFFIXES]
    large = [p for p in tracked if (ROOT / p).exists() and (ROOT / p).stat().st_size > LARGEST]
    assert not large


def test_source_distribution_has_all_that_its_tests_read(shipped):
    assert shipped.tree <= shipped.source, sorted(shipped.tree - shipped.source)


def test_wheel_has_the_package_its_data_and_the_workloads(shipped):
    tree, wheel = shipped.tree, set(zipfile.ZipFile(shipped.wheel).namelist())
    assert {f for f in tree if f.startswith("gpuscheduler/")} <= wheel
    workloads = {f for f in tree if f.startswith("graphs/") and f.endswith(".py")}
    assert {f"gpuscheduler/{f}" for f in workloads} <= wheel
    assert not [f for f in wheel if f.startswith(("tests/", "examples/", "graphs/", "docs/"))]


def test_metadata_of_the_wheel_says_who_and_what(shipped):
    with zipfile.ZipFile(shipped.wheel) as wheel:
        (name,) = [n for n in wheel.namelist() if n.endswith(".dist-info/METADATA")]
        metadata = message_from_bytes(wheel.read(name))
    assert metadata["Version"] == gpuscheduler.__version__
    assert metadata["License-Expression"] == "BSD-3-Clause"
    assert metadata["Author"] == "gpuscheduler developers"
    assert {"cuda12", "cuda13", "plot", "docs", "test"} <= set(metadata.get_all("Provides-Extra"))


def test_wheel_in_an_empty_environment_runs_a_workload(shipped, tmp_path):
    """Its dependencies are those of this environment; the package itself comes from the wheel."""
    empty = tmp_path / "empty"
    venv.create(empty)
    python = empty / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index"]
    subprocess.run([*pip, shipped.wheel], capture_output=True, check=True, cwd=tmp_path)
    (packages,) = empty.glob("lib/python*/site-packages")
    # a .pth file in these folders, as editable installs have one, is not read from here
    folders = [path for path in sys.path if Path(path).name.endswith("-packages")]
    (packages / "dependencies.pth").write_text("\n".join(folders))
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    env["DASK_GPUSCHEDULER__DEVICES"] = "cpu:2"
    where = [python, "-c", "import gpuscheduler; print(gpuscheduler.__file__)"]
    run = [empty / "bin" / "gpuscheduler", "run", "gauss_sum", "--size", "100,100"]
    for command, expected in ((where, str(empty)), (run, "equals NumPy")):
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=tmp_path, env=env, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert expected in done.stdout, done.stdout
