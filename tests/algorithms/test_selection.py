"""Quantiles are exact, by all of NumPy's methods, over any axes and chunks."""

from __future__ import annotations

import os
import warnings

import dask
import dask.array as da
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gpuscheduler import Scheduler, array
from gpuscheduler.algorithms import splitters
from gpuscheduler.algorithms.selection import CONTINUOUS, DISCRETE
from tests.algorithms.test_sorting import ADVERSARIES, CHUNKS, dask_array, unknown

METHODS = [*CONTINUOUS, *DISCRETE]
usual = settings(max_examples=int(os.environ.get("GPUSCHEDULER_EXAMPLES", "100")), deadline=None)
RNG = np.random.default_rng(5)
REAL = [n for n, x in ADVERSARIES.items() if x.dtype.kind in "iuf" and n != "infinities"]
Q = [0, 0.001, 0.1, 1 / 3, 0.5, 0.75, 0.999, 1]


def numpys(name, *args, **kwargs):
    """NumPy's value without its warnings about NaN."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        return np.asarray(getattr(np, name)(*args, **kwargs))


def close(lazy, expected):
    assert lazy.shape == expected.shape
    assert lazy.dtype == expected.dtype
    got = lazy.compute(scheduler="sync")
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    eps = np.finfo(expected.dtype).eps if expected.dtype.kind == "f" else 0
    np.testing.assert_allclose(got, expected, rtol=4 * float(eps), atol=1e-44)


@pytest.fixture(params=[1, 4], ids="{} runs".format)
def with_runs(request, monkeypatch):
    monkeypatch.setattr(splitters, "SAMPLES", 8)
    with dask.config.set({"gpuscheduler.sort-runs": request.param}):
        yield request.param


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("chunks", ["even", "uneven", "empty"])
def test_adversaries(name, chunks, with_runs):
    x = ADVERSARIES[name].astype("f8") if name == "denormals" else ADVERSARIES[name]
    if x.dtype == np.float16:
        x = x.astype("f4")  # NumPy computes positions in the dtype of the elements
    lazy = dask_array(x, CHUNKS[chunks])
    for each in (lazy, unknown(lazy)):
        close(array.quantile(each, Q), numpys("quantile", x, Q))
        close(array.nanquantile(each, Q), numpys("nanquantile", x, Q))
        close(array.median(each), numpys("median", x))
        close(array.nanmedian(each), numpys("nanmedian", x))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", ["f8", "i4", "u1"])
def test_all_methods_are_numpys(method, dtype, with_runs):
    for n in (1, 2, 5, 20, 101):
        x = RNG.integers(0, 99, n).astype(dtype)
        lazy = da.from_array(x, chunks=3)
        fractions = [0, 0.1, 0.25, 0.5, 0.7, 0.9, 1]
        close(array.quantile(lazy, fractions, method=method),
              numpys("quantile", x, fractions, method=method))  # fmt: skip
        close(array.percentile(lazy, 50, method=method), numpys("percentile", x, 50, method=method))


@usual
@given(st.data())
def test_over_any_axes(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    dtype = data.draw(st.sampled_from(["f8", "i2", "f4"]))
    elements = st.sampled_from([np.nan, 1, -2, 7, 30]) if dtype[0] == "f" else st.integers(-9, 9)
    x = data.draw(hnp.arrays(dtype, shape, elements=elements))
    axes = data.draw(st.sets(st.integers(0, len(shape) - 1), min_size=1))
    axis = data.draw(st.sampled_from([None, tuple(axes), min(axes), min(axes) - len(shape)]))
    q = data.draw(st.sampled_from([0.5, 0.3, [0.1, 0.9], [[0, 0.5], [1, 0.2]]]))
    keep = data.draw(st.booleans())
    method = data.draw(st.sampled_from(["linear", "hazen", "lower", "midpoint"]))
    lazy = da.from_array(x, chunks=data.draw(st.integers(1, 4)))
    with dask.config.set({"gpuscheduler.sort-runs": data.draw(st.integers(1, 3))}):
        for name in ("quantile", "nanquantile"):
            made = getattr(array, name)(lazy, q, axis, method=method, keepdims=keep)
            exact = x.astype("f8") if dtype == "f4" else x
            flat = q if np.ndim(q) < 2 else np.ravel(q)  # which `np.nanquantile` puts elsewhere
            want = numpys(name, exact, flat, axis=axis, method=method, keepdims=keep)
            close(made, want.reshape(np.shape(q) + want.shape[np.ndim(flat) :]).astype(made.dtype))
        for name in ("median", "nanmedian"):
            close(getattr(array, name)(lazy, axis, keepdims=keep),
                  numpys(name, x, axis=axis, keepdims=keep))  # fmt: skip


@usual
@given(st.data())
def test_a_quantile_is_between_its_neighbours(data):
    x = data.draw(hnp.arrays("f8", st.integers(1, 30), elements=st.floats(-1e9, 1e9)))
    q = data.draw(st.floats(0, 1))
    with dask.config.set({"gpuscheduler.sort-runs": 3}):
        lazy = da.from_array(x, chunks=4)
        low, value, high = dask.compute(
            array.quantile(lazy, q, method="lower"), array.quantile(lazy, q),
            array.quantile(lazy, q, method="higher"), scheduler="sync",
        )  # fmt: skip
    assert low <= value <= high
    assert low in x
    assert high in x


def test_float16_and_large_float32_use_exact_positions(with_runs):
    """NumPy's positions in float32 are off where there are many elements; ours are in float64."""
    x = RNG.permutation(20_000_003).astype("f4")[: 2**24 + 3]
    small = RNG.random(3001).astype("f2")
    close(array.quantile(da.from_array(small, chunks=500), 0.5, method="lower"),
          np.sort(small)[1500])  # fmt: skip
    middle = array.quantile(da.from_array(x, chunks=10**6), 0.7, method="lower")
    assert float(middle) == np.sort(x)[int(np.floor((x.size - 1) * 0.7))]


@pytest.mark.parametrize("scheduler", ["threads", "cpu:1", "cpu:4"])
def test_each_scheduler_gives_the_same(scheduler, with_runs):
    x = RNG.random((60, 50))
    x[RNG.random(x.shape) < 0.01] = np.nan
    lazy = da.from_array(x, chunks=(17, 20))
    made = [array.nanpercentile(lazy, [5, 50]), array.nanmedian(lazy, 0),
            array.median(lazy, (0, 1)), array.partition(lazy, 7, axis=0)[7]]  # fmt: skip
    if scheduler == "threads":
        got = dask.compute(*made, scheduler=scheduler)
    else:
        with Scheduler(scheduler, check=True):
            got = dask.compute(*made)
    expected = [np.nanpercentile(x, [5, 50]), np.nanmedian(x, 0), np.nan, np.sort(x, 0)[7]]
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-15)


def test_nothing_but_nan_and_nothing_at_all_give_nan(with_runs):
    for x in (np.full(5, np.nan), np.zeros(0), np.full((3, 4), np.nan)):
        lazy = da.from_array(x, chunks=2) if x.size else dask_array(x, (0, 0))
        for name in ("median", "nanmedian"):
            assert np.isnan(getattr(array, name)(lazy).compute(scheduler="sync"))
    x = np.array([[np.nan, np.nan], [1, np.nan]])
    np.testing.assert_array_equal(array.nanmedian(da.from_array(x, chunks=1), 1), [np.nan, 1])


@usual
@given(st.data())
def test_partition_puts_the_kth_in_their_place(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=2)))
    dtype = data.draw(st.sampled_from(["i2", "f8", "f2"]))
    x = data.draw(hnp.arrays(dtype, shape, elements=st.integers(-3, 3)))
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    n = shape[axis]
    kth = data.draw(st.lists(st.integers(-n, n - 1), min_size=1, max_size=3))
    lazy = da.from_array(x, chunks=data.draw(st.integers(1, 3)))
    with dask.config.set({"gpuscheduler.sort-runs": data.draw(st.integers(1, 3))}):
        parts, order = np.partition(lazy, kth, axis=axis), np.argpartition(lazy, kth, axis=axis)
    assert parts.chunks == order.chunks == lazy.chunks
    parts, order = dask.compute(parts, order, scheduler="sync")
    for got in (parts, np.take_along_axis(x, order, axis)):
        np.testing.assert_array_equal(np.sort(got, axis=axis), np.sort(x, axis=axis))
        lines, sorted_lines = np.moveaxis(got, axis, -1), np.moveaxis(np.sort(x, axis), axis, -1)
        for k in kth:
            np.testing.assert_array_equal(lines[..., k], sorted_lines[..., k])
            assert (lines[..., : k % n] <= lines[..., [k]]).all()
            assert (lines[..., k % n :] >= lines[..., [k]]).all()


def test_wrong_arguments_are_named():
    x = da.ones(5, chunks=2)
    with pytest.raises(ValueError, match=r"quantile: q=1.5: use values from 0 to 1$"):
        array.quantile(x, 1.5)
    with pytest.raises(ValueError, match=r"percentile: q=\[50.0, 110.0\]: .* from 0 to 100"):
        array.percentile(x, [50, 110])
    with pytest.raises(ValueError, match="method='middle': use one of 'interpolated"):
        array.quantile(x, 0.5, method="middle")
    with pytest.raises(TypeError, match="median: dtype complex128"):
        array.median(x + 1j)
    with pytest.raises(np.exceptions.AxisError):
        array.median(x, 1)
    with pytest.raises(ValueError, match="kth=5 is out of bounds for 5"):
        np.partition(x, 5)
    with pytest.raises(TypeError, match="use integers"):
        np.partition(x, 0.5)
    with pytest.raises(ValueError, match="use 'introselect'"):
        np.partition(x, 1, kind="quicksort")


def test_a_median_of_another_array_is_not_planned_again(planned):
    with Scheduler("cpu:2"), dask.config.set({"gpuscheduler.sort-runs": 3}):
        for seed in (1, 2, 3):
            x = np.random.default_rng(seed).random(1000)
            assert array.median(da.from_array(x, chunks=100)).compute() == np.median(x)
    assert len(planned) == 1
