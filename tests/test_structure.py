"""The shape of the package: who may import whom, what it shows, and names that say nothing."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import gpuscheduler
from tests import mutants

PACKAGE = Path(gpuscheduler.__file__).parent

#: Each module imports only from those before it.
ORDER = [
    "forks",
    "pickled",
    "machine",
    "sizes",
    "persisted",
    "grid",
    "takes",
    "subgraph",
    "rebuilt",
    "factors",
    "block_numbers",
    "graph",
    "expr",
    "parts",
    "philox_loops",
    "philox",
    "regions",
    "scans",
    "bin_loops",
    "bins",
    "shelf",
    "host_code",
    "blocks",
    "cuda_math",
    "panes",
    "tree",
    "layout",
    "statements",
    "elementwise",
    "reducing",
    "sliding",
    "kernel",
    "reading",
    "following",
    "arrays",
    "creation",
    "reductions",
    "numpy_functions",
    "lookups",
    "masks",
    "medians",
    "chunk_functions",
    "python_numbers",
    "assembly",
    "trace",
    "garbage",
    "scalar",
    "device_code",
    "fuse",
    "hoist",
    "reuse",
    "siblings",
    "place",
    "plan",
    "taken",
    "cut",
    "products",
    "batches",
    "templates",
    "libraries",
    "plans",
    "gather",
    "staging_loops",
    "staging",
    "state",
    "tape",
    "turns",
    "pools",
    "run",
    "timeline",
    "settings",
    "pretend",
    "order",
    "workers",
    "spill",
    "direct",
    "resident",
    "cpu",
    "backend",
    "mixed",
    "launch",
    "replay",
    "cuda",
    "callbacks",
    "options",
    "scheduler",
    "mesh",
    "cargo",
    "ipc",
    "node",
    "attach",
    "simulate",
    "commands",
    "cli",
    "__init__",
    "__main__",
]
FORBIDDEN = {"utils", "util", "helpers", "helper", "common", "core", "manager", "misc", "base"}
#: Pure: they decide, and are tested with numbers. No thread, no clock, no device.
PURE = ["machine", "subgraph", "graph", "expr", "cuda_math", "panes", "kernel", "fuse", "siblings"]
PURE += ["tree", "layout", "statements", "elementwise", "reducing", "sliding"]
PURE += ["place", "plan", "cut", "state"]
IMPURE_IMPORTS = {"threading", "time", "queue", "concurrent", "multiprocessing", "asyncio", "cupy"}

MODULES = sorted(p.stem for p in PACKAGE.glob("*.py"))


def imports(module, inside_functions):
    """Names of modules that a file imports: `.x` for the package's own, with their lines."""
    tree = ast.parse((PACKAGE / f"{module}.py").read_text(encoding="utf-8"))
    stack = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.Import):
            yield from ((a.name, node.lineno) for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level == 0:
                yield node.module, node.lineno
            elif node.module:
                yield f".{node.module}", node.lineno
            else:
                yield from ((f".{a.name}", node.lineno) for a in node.names)
        deferred = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        typing = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        if inside_functions or not (deferred or typing):
            stack += ast.iter_child_nodes(node)


def own_imports(module):
    """The package's modules that a module imports when it is imported itself."""
    for name, line in imports(module, inside_functions=False):
        if name.startswith((".", "gpuscheduler.")):
            yield name.removeprefix("gpuscheduler").split(".")[1], line


def test_every_module_has_its_place_in_the_order():
    assert set(MODULES) <= set(ORDER), "add the new module to ORDER, above those that import it"


@pytest.mark.parametrize("module", MODULES)
def test_modules_import_only_from_those_above(module):
    above = ORDER[: ORDER.index(module)]
    for name, line in own_imports(module):
        if (PACKAGE / f"{name}.py").exists():  # else it is a name of the package, as __version__
            assert name in above, f"{module}.py:{line} imports {name}, which is below it"


def test_the_order_test_can_fail():
    """`scheduler` imports `state`: the other way round is against the order."""
    assert "state" in {name for name, _ in own_imports("scheduler")}
    assert ORDER.index("state") < ORDER.index("scheduler")


@pytest.mark.parametrize("module", MODULES)
def test_only_cuda_imports_cupy_at_import_time(module):
    names = {name.split(".")[0] for name, _ in imports(module, inside_functions=False)}
    assert module in ("mixed", "launch", "replay", "cuda", "ipc") or "cupy" not in names


@pytest.mark.parametrize("module", [m for m in PURE if m in MODULES])
def test_decisions_know_no_thread_no_clock_and_no_device(module):
    names = {name.split(".")[0] for name, _ in imports(module, inside_functions=True)}
    assert not names & IMPURE_IMPORTS


def test_importing_the_package_imports_no_gpu_library():
    """None that Dask does not: `dask.array` takes CuPy in where it is installed."""
    code = """
import sys
import dask.array
before = set(sys.modules)
import gpuscheduler
print({"cupy", "numba", "distributed"} & (set(sys.modules) - before))
"""
    command = [sys.executable, "-c", code]
    out = subprocess.run(command, capture_output=True, text=True, cwd=PACKAGE.parent, check=True)
    assert out.stdout.strip() == "set()"


def test_names_say_something():
    assert not FORBIDDEN & set(MODULES)
    folders = {p.name for p in PACKAGE.iterdir() if p.is_dir()}
    assert not FORBIDDEN & folders


@pytest.mark.parametrize("module", MODULES)
def test_every_module_says_what_it_does(module):
    text = ast.get_docstring(ast.parse((PACKAGE / f"{module}.py").read_text(encoding="utf-8")))
    assert text
    assert text.splitlines()[0].endswith((".", ":", "?")) or "." in text


def test_all_is_what_is_exported():
    """Submodules aside, every public name is in `__all__`, and every name in it is there."""
    submodules = {m.name for m in pkgutil.iter_modules([str(PACKAGE)])}
    public = {
        name
        for name, value in vars(gpuscheduler).items()
        if not name.startswith("_") and getattr(value, "__module__", "").startswith("gpuscheduler")
    }
    exported = set(gpuscheduler.__all__)
    looked_up_by_dask = {"arange", "random"}  # `backend` puts them there for Dask's random
    assert public - submodules - looked_up_by_dask <= exported
    assert all(hasattr(gpuscheduler, name) for name in exported)
    assert len(exported) == len(gpuscheduler.__all__)
    assert sorted(gpuscheduler.__all__, key=str.lower) == sorted(exported, key=str.lower)


@pytest.mark.parametrize("first", ["mesh", "attach", "simulate", "scheduler", "commands"])
def test_public_names_are_functions_whichever_module_is_imported_first(first):
    """`mesh`, `attach` and `simulate` are modules and functions: the package has the functions."""
    code = f"""
import gpuscheduler.{first}, gpuscheduler
for name in gpuscheduler.__all__:
    assert callable(getattr(gpuscheduler, name)), name
import gpuscheduler.simulate, gpuscheduler.mesh
from gpuscheduler import *
assert callable(mesh) and callable(gpuscheduler.mesh) and callable(simulate)
assert set(gpuscheduler.__all__) <= set(dir(gpuscheduler))
"""
    subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, check=True)


def test_importing_the_package_imports_no_arrays():
    code = """
import sys, gpuscheduler
print({"numpy", "dask.array", "rich", "click"} & set(sys.modules))
"""
    command = [sys.executable, "-c", code]
    out = subprocess.run(command, capture_output=True, text=True, cwd=PACKAGE.parent, check=True)
    assert out.stdout.strip() == "set()"


def test_what_is_exported_tells_how_it_is_used():
    for name in gpuscheduler.__all__:
        assert (getattr(gpuscheduler, name).__doc__ or "").strip(), name


def test_importing_registers_the_scheduler_with_dask():
    import dask.base

    importlib.import_module("gpuscheduler")
    assert dask.base.named_schedulers["gpu"] is gpuscheduler.get


def test_the_list_of_mutants_follows_the_code():
    """Who breaks the code to see whether tests notice finds what to break."""
    for name in (*mutants.MUTANTS, *mutants.FUSION):
        file = mutants.STATE if name in mutants.MUTANTS else mutants.FUSION[name][0]
        mutants.broken((mutants.ROOT / file).read_text(encoding="utf-8"), name)
