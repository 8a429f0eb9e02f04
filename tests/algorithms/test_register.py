"""Our functions are registered with Dask, whichever is imported first, and nothing is patched."""

from __future__ import annotations

import inspect
import subprocess
import sys
from importlib import import_module
from operator import attrgetter

import dask.array as da
import numpy as np
import pytest
from dask.array import core

import gpuscheduler
from gpuscheduler.algorithms import register

NAMES = list(register.FUNCTIONS)


def run(code: str, **env: str) -> str:
    import os

    out = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True, text=True, check=False, env=os.environ | env,
    )  # fmt: skip
    assert out.returncode == 0, out.stderr
    return out.stdout.strip()


@pytest.mark.parametrize("name", NAMES)
def test_each_row_names_a_function_that_is_exported(name):
    module = import_module(f"gpuscheduler.algorithms.{register.FUNCTIONS[name]}")
    function = getattr(module, name.rpartition(".")[2])
    assert function.__doc__
    public = "gpuscheduler.linalg" if name.startswith("linalg.") else "gpuscheduler.array"
    assert getattr(import_module(public), function.__name__) is function


@pytest.mark.parametrize("name", NAMES)
def test_dask_lacks_the_function(name):
    """Else Dask's own would be called: then the row does nothing, and should go."""
    try:
        attrgetter(name)(np)
    except AttributeError:
        pytest.skip("this NumPy lacks it, too")
    assert not hasattr(da, name.rpartition(".")[2]) or name.startswith("linalg.")


def test_public_module_exports_what_it_says():
    names = gpuscheduler.array.__all__
    assert sorted(names) == sorted(set(names))
    assert all(callable(getattr(gpuscheduler.array, name)) for name in names)


def test_numpy_function_is_lazy_on_a_dask_array():
    x = da.arange(6, chunks=4).reshape(2, 3)
    lazy = np.matrix_transpose(x)
    assert isinstance(lazy, da.Array)
    np.testing.assert_array_equal(lazy, np.matrix_transpose(x.compute()))


def test_another_packages_registration_stays(monkeypatch):
    register.unregister()
    try:
        monkeypatch.setitem(core._HANDLED_FUNCTIONS, np.kron, theirs := object())
        register.register()
        assert core._HANDLED_FUNCTIONS[np.kron] is theirs
    finally:
        monkeypatch.undo()
        register.register()


def test_unregister_takes_back_what_was_registered():
    register.unregister()
    try:
        assert np.inner not in core._HANDLED_FUNCTIONS
    finally:
        register.register()
    assert np.inner in core._HANDLED_FUNCTIONS


ORDERS = {
    "dask first": "import dask.array as da, gpuscheduler",
    "ours first": "import gpuscheduler, dask.array as da",
    "ours alone": "import gpuscheduler; gpuscheduler.Scheduler; import dask.array as da",
}
LAZY = """
import numpy as np
x = np.inner(da.arange(4, chunks=2), da.arange(4, chunks=2))
print(type(x).__module__, int(x))
"""


@pytest.mark.parametrize("order", ORDERS)
def test_functions_are_registered_in_any_order_of_imports(order):
    assert run(ORDERS[order] + LAZY) == "dask.array.core 14"


def test_importing_the_package_imports_no_arrays():
    assert run("import sys, gpuscheduler; print('dask.array' in sys.modules)") == "False"


def test_hook_leaves_no_trace():
    code = """
import sys, gpuscheduler, inspect
before = len(sys.meta_path)
import dask.array.core as core
loaders = core.__loader__, core.__spec__.loader
print(before - len(sys.meta_path), *[type(loader).__name__ for loader in loaders])
print(inspect.getsource(core.implements)[:14])
"""
    names = "1 SourceFileLoader SourceFileLoader\ndef implements"
    assert run(code) == names


def test_registration_can_be_switched_off():
    code = """
import gpuscheduler, dask.array.core as core, numpy as np
print(np.inner in core._HANDLED_FUNCTIONS)
"""
    assert run(code, DASK_GPUSCHEDULER__REGISTER_FUNCTIONS="false") == "False"
    assert run(code) == "True"


def test_importing_changes_no_function_of_dask():
    code = """
import dask.array as da
def functions():
    modules = (da, da.linalg, da.fft, da.routines, da.core, da.reductions, da.Array)
    return {(m.__name__, k): v for m in modules for k, v in vars(m).items() if callable(v)}
before = functions()
import gpuscheduler, gpuscheduler.array
after = functions()
print(before == after)
"""
    assert run(code) == "True"


def test_dask_still_has_what_we_reach_into():
    assert list(inspect.signature(core.implements).parameters) == ["numpy_functions"]
    assert isinstance(core._HANDLED_FUNCTIONS, dict)
