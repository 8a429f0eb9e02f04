"""Blocks of one element."""

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")

import dask.array as da

import gpuscheduler

pytestmark = pytest.mark.gpu

X = np.array([0.5, 1.5, 2.5, 1.7, -1.0])

SMALL = {
    "histogram": lambda x: da.histogram(x * 2, bins=[0, 1, 2, 3, 4, 9])[0],
    "centred": lambda x: da.histogram(x * 2 - x.mean(), bins=[-2, 0, 2, 4])[0],
    "product": lambda x: (x * 2).dot(x),
    "flipped": lambda x: x.sum().map_blocks(lambda b: np.flip(b * 2), meta=x._meta.sum()),
    "sum": lambda x: (x * 2 + 1).sum(),
    "moments": lambda x: (x * 2 + 1).var(),
    "argmin": lambda x: (x * 2 + 1).argmin(),
}


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("chunks", [1, 4, 5])
def test_blocks_of_one_element(name, chunks):
    want = SMALL[name](da.from_array(X, chunks=chunks)).compute(scheduler="sync")
    with gpuscheduler.Scheduler("cuda:0,0"):
        x = da.from_array(cupy.asarray(X), chunks=chunks)
        for _ in range(2):
            got = cupy.asnumpy(SMALL[name](x).compute())
            np.testing.assert_allclose(got, want, rtol=1e-14)
