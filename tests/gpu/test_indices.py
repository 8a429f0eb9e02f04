"""Elements that arrays of indices set and take, where blocks, indices and values are NumPy's or
CuPy's. CuPy wraps indices round where NumPy looks whether there are so many elements.
"""

from __future__ import annotations

import os
import warnings

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")

import dask.array as da
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import gpuscheduler

pytestmark = pytest.mark.gpu
#: `GPUSCHEDULER_EXAMPLES=3000 pytest tests/gpu/test_indices.py` looks harder.
EXAMPLES = int(os.environ.get("GPUSCHEDULER_EXAMPLES", "40"))


@pytest.fixture(scope="module")
def scheduler():
    with gpuscheduler.Scheduler("cuda:0,0", check=True) as s:
        yield s


def either_kind(values, chunks, cupys):
    x = da.from_array(values, chunks=chunks)
    return x.to_backend("cupy") if cupys else x


@st.composite
def assignments(draw):
    """An array, its chunks, an axis and numbers along it, other slices, and what is assigned."""
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=2)))
    axis = draw(st.integers(0, len(shape) - 1))
    length = shape[axis]
    numbers = draw(st.lists(st.integers(-length, length - 1), min_size=1, max_size=6, unique=True))
    numbers = list({n % length: n for n in numbers}.values())  # each element once: order is open
    index = [draw(st.sampled_from([slice(None), slice(1, None), slice(None, None, 2)]))
             for _ in shape]  # fmt: skip
    index[axis] = np.array(numbers)
    whole = np.arange(float(np.prod(shape))).reshape(shape)
    assume(whole[tuple(index)].size)  # Dask's own schedulers refuse to set nothing, too
    value = -1.0 - np.arange(whole[tuple(index)].size).reshape(whole[tuple(index)].shape)
    return whole, axis, index, draw(st.sampled_from([-1.0, value])), draw(st.integers(1, 4))


@pytest.mark.timeout(600)
@settings(max_examples=EXAMPLES, deadline=None, database=None,
          suppress_health_check=list(HealthCheck))  # fmt: skip
@given(assigned=assignments(), chunks=st.integers(1, 10), kinds=st.tuples(*[st.booleans()] * 3))
def test_elements_are_set_by_arrays_of_indices_of_either_library(
    scheduler, assigned, chunks, kinds
):
    """Dask marks what is in other blocks by indices that are too large."""
    whole, axis, index, value, piece = assigned
    want = whole.copy()
    want[tuple(index)] = value
    of_cupy, indices_of_cupy, value_of_cupy = kinds
    value_of_cupy = value_of_cupy and of_cupy  # Dask refuses it in blocks of NumPy's
    x = either_kind(whole, chunks, of_cupy)
    index = [*index]
    index[axis] = either_kind(index[axis], piece, indices_of_cupy)
    if isinstance(value, np.ndarray):
        value = either_kind(value, piece, value_of_cupy)
    x[tuple(index)] = value
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = cupy.asnumpy(x.compute(scheduler=scheduler.get))
    np.testing.assert_array_equal(got, want)


def test_indices_that_a_backend_made_set_those_elements_alone():
    want = np.zeros(50)
    want[3:5] = 1
    with gpuscheduler.Scheduler("cuda:0,0"):
        z = da.zeros(50, chunks=10)
        z[da.arange(3, 5, chunks=2)] = 1
        got = z.to_backend("numpy").compute()
    np.testing.assert_array_equal(got, want)


def test_a_block_shorter_than_its_collection_says_has_no_elements_behind_it(scheduler):
    x = da.from_array(np.arange(400.0), chunks=200).to_backend("cupy")
    short = x.map_blocks(lambda b: b[:5], dtype=x.dtype, meta=x._meta)
    numbers = np.random.default_rng(0).permutation(400)
    with pytest.raises(IndexError, match="200 .* has 5"):
        short[numbers].compute(scheduler=scheduler.get)
