"""Products and rearrangements give NumPy's values for any chunks."""

from __future__ import annotations

import os

import dask.array as da
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuscheduler.array import cross, inner, kron, matrix_transpose, take_along_axis

usual = settings(max_examples=int(os.environ.get("GPUSCHEDULER_EXAMPLES", "100")), deadline=None)
RNG = np.random.default_rng(3)


def same(lazy, expected):
    got = lazy.compute(scheduler="sync")
    assert lazy.shape == expected.shape
    assert lazy.dtype == got.dtype == expected.dtype
    np.testing.assert_allclose(got, expected, rtol=1e-12)


def dask(x, chunks=2):
    return da.from_array(x, chunks=chunks)


@pytest.mark.parametrize(
    ("a", "b"), [((3,), (3,)), ((2, 3), (3,)), ((4, 3), (5, 3)), ((), (2, 3)), ((2, 4, 3), (3, 3))]
)
def test_inner(a, b):
    a, b = RNG.random(a), RNG.random(b)
    same(inner(dask(a), dask(b)), np.inner(a, b))


@pytest.mark.parametrize(
    ("a", "b"), [((3,), (4,)), ((2, 3), (3, 2)), ((4,), (5, 3)), ((2, 2, 3), (3, 2)), ((), (3,))]
)
def test_kron(a, b):
    a, b = RNG.random(a), RNG.random(b)
    same(kron(dask(a), dask(b)), np.kron(a, b))


@pytest.mark.parametrize("na", [2, 3])
@pytest.mark.parametrize("nb", [2, 3])
@pytest.mark.filterwarnings("ignore:Arrays of 2-dimensional vectors:DeprecationWarning")
def test_cross(na, nb):
    a, b = RNG.integers(0, 9, (5, na)), RNG.integers(0, 9, (5, nb))
    if (na, nb) != (3, 3) and np.lib.NumpyVersion(np.__version__) >= "2.5.0":
        pytest.skip("NumPy takes only three")
    same(cross(dask(a), dask(b)), np.cross(a, b))


def test_cross_along_other_axes():
    a, b = RNG.random((3, 4, 5)), RNG.random((4, 3, 5))
    same(cross(dask(a), dask(b), axisa=0, axisb=1, axisc=0), np.cross(a, b, 0, 1, 0))


def test_matrix_transpose():
    x = RNG.random((2, 3, 4))
    same(matrix_transpose(dask(x)), np.matrix_transpose(x))
    with pytest.raises(ValueError, match="x has 1 axes"):
        matrix_transpose(da.ones(3))


@usual
@given(st.data())
def test_take_along_axis(data):
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    x = np.arange(np.prod(shape)).reshape(shape)
    shape[axis] = data.draw(st.integers(0, 6))
    index = np.array(
        data.draw(
            st.lists(
                st.integers(-x.shape[axis], x.shape[axis] - 1),
                min_size=int(np.prod(shape)),
                max_size=int(np.prod(shape)),
            )
        ),
        dtype=int,
    ).reshape(shape)
    same(
        take_along_axis(dask(x), da.from_array(index, chunks=3), axis),
        np.take_along_axis(x, index, axis),
    )


def test_take_along_axis_broadcasts_and_refuses():
    x = RNG.random((4, 5))
    index = np.array([[3, 1]])
    same(take_along_axis(dask(x), dask(index), 1), np.take_along_axis(x, index, 1))
    flat = np.array([7, 2])
    same(take_along_axis(dask(x), dask(flat), None), np.take_along_axis(x, flat, None))
    with pytest.raises(IndexError, match="use integers"):
        take_along_axis(dask(x), dask(x), 1)
    with pytest.raises(IndexError, match="out of bounds"):
        take_along_axis(dask(x), dask(index + 9), 1).compute(scheduler="sync")


@pytest.mark.parametrize("devices", ["cpu:1", "cpu:4"])
def test_our_devices_give_the_same(devices):
    from gpuscheduler import Scheduler

    a, b = RNG.random((6, 3)), RNG.random((4, 3))
    with Scheduler(devices):
        np.testing.assert_allclose(np.inner(dask(a), dask(b)).compute(), np.inner(a, b))
        np.testing.assert_allclose(kron(dask(a), dask(b)).compute(), np.kron(a, b))
