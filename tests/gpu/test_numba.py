"""Numba's kernels in users' functions run on their task's device.

They are in order with all work around them, though they use the default stream. They are late: who
does not wait reads what was there.
"""

import functools

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")
pytest.importorskip("numba_cuda")

import numba
from numba import cuda

import gpuscheduler

from .test_executor import DEVICES, cupy_array, host

pytestmark = [
    pytest.mark.gpu, pytest.mark.real, pytest.mark.filterwarnings("ignore:.*Grid size"),
]  # fmt: skip
N = 1000
GRID = N // 100, 100


@cuda.jit
def doubled(x, out):
    for _ in range(10):
        cuda.nanosleep(1_000_000)
    i = cuda.grid(1)
    if i < x.size:
        out[i] = 2 * x[i]


@functools.cache
def slow():
    text = """extern "C" __global__ void slow(const double* x, double* out, int n) {
      const long long end = clock64() + 20000000;
      while (clock64() < end);
      const int i = blockIdx.x * blockDim.x + threadIdx.x;
      if (i < n) out[i] = x[i] + 1;
    }"""
    return cupy.RawKernel(text, "slow")


def plus_one(x):
    """By a kernel of CuPy's, on our stream."""
    out = cupy.zeros_like(x)
    slow()((GRID[0],), (GRID[1],), (x, out, np.int32(x.size)))
    return out


def at_the_end(x):
    y = plus_one(x)
    out = cupy.zeros_like(y)
    doubled[GRID](y, out)
    return out


def between(x):
    """What the kernel reads is let go while it has not begun, and its memory taken at once."""
    y = plus_one(x)
    out = cupy.zeros_like(y)
    doubled[GRID](y, out)
    del y
    nothing = cupy.zeros_like(x)
    return plus_one(out) - 1 + nothing


def one_behind_the_other(x):
    y = plus_one(x)
    outs = [cupy.zeros_like(y) for _ in "ab"]
    doubled[GRID](y, outs[0])
    doubled[GRID](outs[0], outs[1])
    return outs[1] / 2


def on_our_stream(x):
    y = plus_one(x)
    out = cupy.zeros_like(y)
    doubled[(*GRID, cuda.external_stream(cupy.cuda.get_current_stream().ptr))](y, out)
    return plus_one(out) - 1


def by_numbas_arrays(x):
    """And by way of the host."""
    out = cuda.device_array(x.shape, x.dtype)
    doubled[GRID](plus_one(x), out)
    return cupy.asarray(out.copy_to_host())


@pytest.fixture(params=DEVICES)
def scheduler(request):
    with gpuscheduler.Scheduler(devices=request.param, check=True) as s:
        yield s


def loaded(f, scheduler, shape=N):
    """The same function. Numba loads a kernel when a GPU first runs it, and fails where two threads
    of one GPU do: two devices that are one GPU get it loaded."""
    ids = scheduler.hardware.ids
    for d in set(ids) if len(set(ids)) < len(ids) else ():
        with cupy.cuda.Device(d):
            f(cupy.zeros(shape))
    return f


@pytest.mark.parametrize(
    "f", [at_the_end, between, one_behind_the_other, on_our_stream, by_numbas_arrays]
)
def test_a_kernel_is_in_order_with_what_is_around_it(scheduler, f):
    x, f = np.arange(4.0 * N), loaded(f, scheduler)

    def chunk(block):
        assert cuda.get_current_device().id == cupy.cuda.runtime.getDevice()
        return f(block)

    z = cupy_array(x, N).map_blocks(chunk, dtype=x.dtype, meta=cupy.empty(0))
    wanted = 2 * (x + 1)
    np.testing.assert_array_equal(host(z.compute()), wanted)
    np.testing.assert_array_equal(z.to_backend("numpy").compute(), wanted)  # on another stream
    np.testing.assert_array_equal(
        host((z[::-1] + z).rechunk(1500).compute()), wanted[::-1] + wanted
    )
    assert float(z.sum().compute()) == wanted.sum()


def test_functions_that_numba_makes_ufuncs_of(scheduler):
    """Their results are Numba's arrays: CuPy's are of the same memory."""

    @numba.vectorize(["float64(float64, float64)"], target="cuda")
    def sums(a, b):
        for _ in range(10):
            cuda.nanosleep(1_000_000)
        return a + b

    @numba.guvectorize(["void(float64[:], float64[:])"], "(n)->(n)", target="cuda")
    def running(row, out):
        total = 0.0
        for i in range(row.size):
            cuda.nanosleep(1_000_000)
            total += row[i]
            out[i] = total

    def twice(block):
        y = block + 1
        return cupy.asarray(sums(y, y)) * 3

    def along_rows(block):
        return cupy.asarray(running(block + 1)) * 3

    for f in (twice, along_rows):
        loaded(f, scheduler, (1, 2))
    x = np.arange(400.0).reshape(40, 10)
    lazy = cupy_array(x, (10, 10))
    z = lazy.map_blocks(twice, dtype=x.dtype, meta=cupy.empty((0, 0)))
    np.testing.assert_array_equal(host(z.compute()), (x + 1) * 6)
    z = lazy.map_blocks(along_rows, dtype=x.dtype, meta=cupy.empty((0, 0)))
    np.testing.assert_array_equal(host(z.compute()), 3 * np.cumsum(x + 1, axis=1))
