"""Any expression of arrays on GPUs has the values that NumPy computes on the host."""

import os
import warnings

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")

import dask
import dask.array as da
from hypothesis import given
from hypothesis import strategies as st

import gpuscheduler
from tests.fusion import test_fusion_properties as properties

pytestmark = pytest.mark.gpu
#: `GPUSCHEDULER_EXAMPLES=3000 pytest tests/gpu/test_fusion.py` looks harder.
EXAMPLES = int(os.environ.get("GPUSCHEDULER_EXAMPLES", "40"))


class Either:
    """An array whose blocks are on the host, or on a GPU."""

    on_gpu = False

    def __init__(self, values):
        self.values, self.shape = values, values.shape
        self.dtype, self.ndim = values.dtype, values.ndim

    def __getitem__(self, index):
        block = self.values[index]
        return cupy.asarray(block) if Either.on_gpu else block


def either(values, chunks):
    meta = cupy.zeros((0,) * values.ndim, values.dtype)
    return da.from_array(Either(values), chunks=chunks, asarray=False, meta=meta)


def on_host(value):
    return value.get() if isinstance(value, cupy.ndarray) else value


@pytest.fixture(scope="module")
def scheduler():
    before = properties.KINDS, properties.from_values
    properties.KINDS, properties.from_values = ["array"], either
    with gpuscheduler.Scheduler("cuda:0,0", check=True) as s:
        yield s
    properties.KINDS, properties.from_values = before


@pytest.mark.timeout(600)
@properties.examples(EXAMPLES, derandomize=True)
@given(data=st.data())
def test_any_expression_on_gpus_equals_numpys_value(scheduler, data):
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        arrays = data.draw(properties.expressions())
        try:
            want = dask.compute(*arrays, scheduler="sync")
        except Exception:  # Dask's own: blocks of nothing, mostly
            return
        Either.on_gpu = True
        try:
            for _ in range(3):  # the third follows addresses
                for x, got, wanted in zip(arrays, dask.compute(*arrays), want, strict=True):
                    moments = properties.of_moments(x)
                    properties.same(on_host(got), on_host(wanted), moments)
        finally:
            Either.on_gpu = False
