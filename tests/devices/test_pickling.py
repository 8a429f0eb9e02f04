"""CuPy's kernels in graphs: pickled, named and copied without what devices have of them."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys

import pytest

cupy = pytest.importorskip("cupy")
if not hasattr(cupy, "ufunc") or not hasattr(cupy.negative, "_kernel_memo"):
    pytest.skip("it is no CuPy", allow_module_level=True)

from cupy.cuda.function import Function, Module  # noqa: E402
from dask.base import tokenize  # noqa: E402

from gpuscheduler.devices.cuda import pickling  # noqa: E402


@pytest.fixture(autouse=True)
def _taught():
    pickling.teach()


def elementwise(body="y = x"):
    return cupy.ElementwiseKernel("float64 x", "float64 y", body, "k", options=("-DA=1",))


def reduction(post="y = a"):
    return cupy.ReductionKernel("float64 x", "float64 y", "x", "a + b", post, "0", "r")


def ran(kernel):
    """As one is that a device has loaded."""
    for name in ("_kernel_memo", "_elementwise_kernel_memo"):
        if hasattr(kernel, name):
            getattr(kernel, name)[(0, "d->d")] = Module()
    return kernel


@pytest.mark.parametrize("function", [cupy.negative, cupy.true_divide, cupy.conj])
def test_a_function_of_cupys_is_itself(function):
    before = tokenize(function)
    memo = function._kernel_memo
    memo[(0, "d->d")] = Module()
    try:
        assert pickle.loads(pickle.dumps(function)) is function
        assert copy.deepcopy(function) is function
        assert tokenize(function) == before
    finally:
        del memo[(0, "d->d")]
    assert tokenize(cupy.negative) != tokenize(cupy.positive)


def test_a_special_function_of_cupys_is_itself():
    special = pytest.importorskip("cupyx.scipy.special")
    assert pickle.loads(pickle.dumps(special.erf)) is special.erf


def test_one_that_no_module_has():
    own = cupy._core.create_ufunc("mine", ("d->d",), "out0 = in0 + 1")
    own._kernel_memo[(0, "d->d")] = Module()
    copied = pickle.loads(pickle.dumps(own))
    assert (copied.name, copied.nin, copied._kernel_memo) == ("mine", 1, {})


@pytest.mark.parametrize("make", [elementwise, reduction])
def test_a_kernel_of_a_users(make):
    before, other = tokenize(make()), tokenize(make("y = 2"))
    kernel = ran(make())
    assert tokenize(kernel) == before != other
    copied = pickle.loads(pickle.dumps(kernel))
    assert type(copied) is type(kernel)
    assert not getattr(copied, "_elementwise_kernel_memo", {})
    parts = [n for n in ("name", "in_params", "out_params", "preamble", "kwargs", "options")
             if hasattr(kernel, n)]  # fmt: skip
    assert len(parts) > 3
    for name in parts:
        assert str(getattr(copied, name)) == str(getattr(kernel, name))


def test_what_is_loaded_is_not_pickled():
    for code in (Function.__new__(Function), Module()):
        with pytest.raises(TypeError, match="loaded on a device"):
            pickle.dumps(code)
        with pytest.raises(TypeError, match="loaded on a device"):
            copy.copy(code)


@pytest.mark.parametrize("first", ["cupy", "gpuscheduler"])
def test_whichever_is_imported_first(first):
    program = f"""
import {first}, cupy, gpuscheduler, copyreg
import dask.array as da
if {first!r} == "cupy":
    assert cupy.ufunc in copyreg.dispatch_table
from dask.base import tokenize
tokenize(cupy.negative)
assert cupy.ufunc in copyreg.dispatch_table
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", program], env=env, check=True)
