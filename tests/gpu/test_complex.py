"""Complex operations in kernels on a GPU give NumPy's special values, as far as C's standard
defines them.
"""

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")

import dask.array as da

import gpuscheduler
from gpuscheduler.codegen.cpu import evaluate
from gpuscheduler.ir.expr import Kernel
from tests.codegen.test_cuda_kernel import of_loop
from tests.support import kernels as k

from .test_executor import host

pytestmark = pytest.mark.gpu

#: CUDA's functions are right but for the last places, of which float32 has few.
PLACES = {"F": 1e-3, "D": 1e-10}


def blocks_of(array):
    """An array of CuPy's in several blocks."""
    return da.from_array(cupy.asarray(array), chunks=-(-len(array) // 3), asarray=False)


@pytest.fixture(scope="module")
def scheduler():
    with gpuscheduler.Scheduler("cuda:0", fuse_least=0) as s:
        yield s


@pytest.mark.parametrize(("op", "types", "made"), k.complex_operations())
def test_special_values_of_complex_operations_are_numpys(scheduler, op, types, made):
    """Signed zeros, infinities and NaN in either part."""
    given = k.complex_operands(op, types)
    lazy = getattr(np, op)(*map(blocks_of, given))
    with np.errstate(all="ignore"):
        got = host(lazy.compute())
        want = evaluate.evaluate(Kernel(given[0].shape, (of_loop(op, types, made),)), given)[0]
    assert got.dtype == want.dtype
    wrong = k.wrong_of_complex(given, got, want, PLACES[types[0]])
    assert not wrong, wrong


POWERS = (2, 3, 1.5, 2 + 0j, 3 + 0j, 0.5, 7, 2 + 1j, 0, 1j, -1)


@pytest.mark.parametrize("dtype", ["c8", "c16"])
@pytest.mark.parametrize("power", POWERS)
def test_zero_to_a_power_is_numpys(scheduler, power, dtype):
    z = np.array([0, -0.0, complex(-0.0, -0.0), 1, 2j, 1 + 1j, -1], dtype)
    with np.errstate(all="ignore"):
        got = host((da.power(blocks_of(z), power) * 1).compute())
        want = np.power(z, power)
    np.testing.assert_allclose(got, want, rtol=PLACES[z.dtype.char], atol=1e-6)
