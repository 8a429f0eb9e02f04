"""Functions that ask what a block is are told what it will be, of NumPy's and of CuPy's."""

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")

import dask.array as da

import gpuscheduler

pytestmark = pytest.mark.gpu

A = np.random.default_rng(0).standard_normal((256, 320))


def either(ask):
    return lambda b: b * 2 + 1 if ask(b) else b * 3 - 1


def module_of(b):
    return cupy if isinstance(b, cupy.ndarray) else np


def fetched(b):
    try:
        b.get()
    except AttributeError:
        return b * 3 - 1
    return b * 2 + 1


ASKED = {
    "NumPy's": either(lambda b: isinstance(b, np.ndarray)),
    "CuPy's": either(lambda b: isinstance(b, cupy.ndarray)),
    "module": lambda b: module_of(b).exp(b) * 2,
    "get": either(lambda b: hasattr(b, "get")),
    "got": fetched,
    "interface": either(lambda b: hasattr(b, "__cuda_array_interface__")),
    "sum of CuPy's": either(lambda b: isinstance(b.sum(), cupy.ndarray)),
    "number": either(lambda b: isinstance(b.sum(), float)),
    "scalar": either(lambda b: np.isscalar(b.sum())),
    "type": either(lambda b: type(b) is cupy.ndarray),
    "list": either(lambda b: isinstance(b, list)),
}


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("library", ["cupy", "numpy"])
def test_what_a_block_is(asked, library):
    f, xp = ASKED[asked], {"cupy": cupy, "numpy": np}[library]
    x = da.from_array(A, chunks=(128, 320)).to_backend(library)
    y = x.map_blocks(f, dtype="f8", meta=xp.empty((0, 0)))
    expected = [cupy.asnumpy(f(xp.asarray(part))) for part in (A[:128], A[128:])]
    with gpuscheduler.Scheduler("cuda:0,0"):
        for _ in range(2):
            np.testing.assert_allclose(cupy.asnumpy(y.compute()), np.concatenate(expected))
