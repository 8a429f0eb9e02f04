"""Test the oldest and the newest Python, Dask and NumPy that are declared, and write a table.

`make versions` runs it. Each row is a virtual environment under build/versions, of the interpreters
that are found here (on PATH, or pyenv's); those that are not are named in the table as not tested.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "docs" / "versions.md"
PYTHONS = ["3.10", "3.11", "3.12", "3.13", "3.14"]
NEWEST = "newest"
TOOLS = [
    *("hypothesis", "matplotlib", "pytest", "pytest-mock", "pytest-timeout", "pytest-xdist"),
    "scipy",
]
#: What reaches into Dask and NumPy: graphs, traces of their functions, persisted blocks, clusters.
TESTS = [
    *(
        "test_scheduler.py",
        "frontend/test_graph.py",
        "tracing/test_medians.py",
        "runtime/test_persisted.py",
    ),
    *("pipeline/test_cache.py", "tracing/test_trace.py", "cluster/test_attach.py"),
    *("algorithms/test_register.py", "algorithms/test_sorting.py", "diagnostics/test_progress.py"),
]
#: What stands below the table.
NOTES = """
Before NumPy 2.4, NumPy rounds quantiles of float32 in another way, and its quantile at an infinite
element is NaN. The tests allow for both; our kernels give what NumPy 2.4 gives.
Dask before 2026.1.1 computes what is persisted and hands out values: nothing is kept on devices.
"""


def declared(name: str) -> str:
    """The oldest version of a dependency, or of Python, in pyproject.toml.

    >>> declared("numpy")
    '2.1'
    """
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(rf'{name}(?:\[\w+\])?"? ?=? ?"?>=([\d.]+)', text)
    assert found is not None, name
    return found[1]


def rows() -> list[tuple[str, str, str]]:
    """Python, Dask and NumPy of each environment: the oldest of all, then each Python."""
    dask, numpy = declared("dask"), declared("numpy")
    return [
        (PYTHONS[0], dask, numpy),
        (PYTHONS[1], dask, NEWEST),
        (PYTHONS[1], NEWEST, numpy),
        *((python, NEWEST, NEWEST) for python in PYTHONS),
    ]


def interpreters() -> dict[str, str]:
    """By version, the Pythons of this machine."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    out = {}
    for version in PYTHONS:
        found = sorted(pyenv.glob(f"{version}.*/bin/python"))
        path = str(found[-1]) if found else shutil.which(f"python{version}")
        if path:
            out[version] = path
    return out


def pinned(name: str, version: str) -> str:
    """What pip is asked for: the first release of a version, or the newest of all.

    >>> pinned("numpy", "2.1"), pinned("dask[array]", "2026.1.1"), pinned("numpy", "newest")
    ('numpy==2.1.*', 'dask[array]==2026.1.1', 'numpy')
    """
    if version == NEWEST:
        return name
    return f"{name}=={version}" if version.count(".") > 1 else f"{name}=={version}.*"


def environment(python: str, dask: str, numpy: str, interpreter: str) -> Path:
    """A virtual environment with these versions, and this package as it is here."""
    folder = ROOT / "build" / "versions" / f"python{python}-dask{dask}-numpy{numpy}"
    program = folder / "bin" / "python"
    if not program.exists():
        subprocess.run([interpreter, "-m", "venv", str(folder)], check=True)
    wanted = [pinned("dask[array]", dask), pinned("distributed", dask), pinned("numpy", numpy)]
    command = [str(program), "-m", "pip", "install", "--quiet", "--upgrade", "-e", str(ROOT)]
    subprocess.run([*command, *wanted, *TOOLS], check=True)
    return program


def versions_of(program: Path) -> list[str]:
    code = (
        "import sys; from importlib.metadata import version as v;"
        "print(sys.version.split()[0], v('dask'), v('numpy'), v('numba'))"
    )
    out = subprocess.run([str(program), "-c", code], capture_output=True, text=True, check=True)
    return out.stdout.split()


def tested(program: Path, tests: list[str], timeout: float) -> str:
    """What pytest says at its end."""
    command = [str(program), "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=line"]
    files = [str(Path("tests") / name) for name in tests]
    out = subprocess.run(
        [*command, *files], cwd=ROOT, capture_output=True, text=True, check=False, timeout=timeout
    ).stdout
    print(out[-3000:], flush=True)
    last = (out.splitlines() or ["nothing was said"])[-1].strip("= ")
    return re.sub(r" in [\d.]+s.*", "", last)


def table(tests: list[str], timeout: float) -> Iterator[tuple[str, ...]]:
    found = interpreters()
    for python, dask, numpy in rows():
        print(f"== Python {python}, Dask {dask}, NumPy {numpy}", flush=True)
        if python not in found:
            yield python, dask, numpy, "", "not tested: not on the machine that wrote this"
            continue
        try:
            program = environment(python, dask, numpy, found[python])
        except subprocess.CalledProcessError:
            yield python, dask, numpy, "", "not tested: pip finds no such versions"
            continue
        yield (*versions_of(program), tested(program, tests, timeout))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tests", nargs="*", default=TESTS, help="files in tests/")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds for each row")
    given = parser.parse_args()
    lines = list(table(given.tests, given.timeout))
    header = ["Python", "Dask", "NumPy", "Numba", "result"]
    text = [header, ["---"] * len(header), *lines]
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text(
        "# Versions\n\n"
        f"Declared: Python {declared('requires-python')}, Dask {declared('dask')} and NumPy "
        f"{declared('numpy')}, or newer.\n`make versions` tests the oldest and the newest of each "
        "that it can get, and writes this table. It runs\n"
        f"{', '.join(given.tests)}.\n\n"
        + "".join(f"| {' | '.join(row)} |\n" for row in text)
        + NOTES,
        encoding="utf-8",
    )
    return any("failed" in row[-1] or "error" in row[-1] for row in lines)


if __name__ == "__main__":
    sys.exit(main())
