"""Distinct values, searches and set operations are NumPy's, for any chunks and runs."""

from __future__ import annotations

import os

import dask
import dask.array as da
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gpuscheduler import Scheduler, array
from gpuscheduler.algorithms import splitters
from tests.algorithms.test_sorting import ADVERSARIES, CHUNKS, dask_array, unknown

usual = settings(max_examples=int(os.environ.get("GPUSCHEDULER_EXAMPLES", "100")), deadline=None)
RNG = np.random.default_rng(11)
NAMES = [n for n in ADVERSARIES if n not in ("float16", "complex nan")]


def same(lazy, expected):
    got = lazy.compute(scheduler="sync")
    assert lazy.dtype == got.dtype == expected.dtype
    np.testing.assert_array_equal(got, expected)


@pytest.fixture(params=[1, 4], ids="{} runs".format)
def with_runs(request, monkeypatch):
    monkeypatch.setattr(splitters, "SAMPLES", 8)
    with dask.config.set({"gpuscheduler.sort-runs": request.param}):
        yield request.param


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("chunks", ["even", "uneven", "empty"])
def test_unique_of_adversaries(name, chunks, with_runs):
    x = ADVERSARIES[name]
    lazy = dask_array(x, CHUNKS[chunks])
    for equal_nan in (True, False):
        if name == "not a time" and not equal_nan:
            continue  # NumPy takes NaT for one value all the same
        values, index, inverse, counts = np.unique(x, True, True, True, equal_nan=equal_nan)
        for each in (lazy, unknown(lazy)):
            made = array.unique(each, True, True, True, equal_nan=equal_nan)
            same(made[0], values)
            same(made[1], index)
            same(made[3], counts)
            found = made[2].compute(scheduler="sync")
            np.testing.assert_array_equal(values[found], x)
            if equal_nan:
                np.testing.assert_array_equal(found, inverse)
    same(array.unique(lazy), np.unique(x))


@usual
@given(st.data())
def test_unique_of_any_array(data):
    shape = tuple(data.draw(st.lists(st.integers(0, 5), max_size=3)))
    dtype = data.draw(st.sampled_from(["i1", "f4", "f8", "u8", "?", "U2", "c8"]))
    elements = hnp.from_dtype(np.dtype(dtype), allow_nan=dtype != "c8")
    few = st.sampled_from(data.draw(st.lists(elements, min_size=1, max_size=4)))
    x = data.draw(hnp.arrays(dtype, shape, elements=few))
    lazy = da.from_array(x, chunks=data.draw(st.integers(1, 4)))
    with dask.config.set({"gpuscheduler.sort-runs": data.draw(st.integers(1, 4))}):
        made = array.unique(lazy, True, True, True)
    got = dask.compute(*made, scheduler="sync")
    for a, b in zip(got, np.unique(x, True, True, True), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(got[0][got[2]], x)


def test_functions_of_the_array_api_take_each_nan_for_one(with_runs):
    x = np.array([3.0, np.nan, 1, np.nan, 3, 1, 1])
    lazy = da.from_array(x, chunks=2)
    everything, mine = np.unique_all(lazy), np.unique_all(x)
    assert everything._fields == mine._fields
    same(everything.values, mine.values)
    same(everything.counts, mine.counts)
    same(everything.indices, mine.indices)
    np.testing.assert_array_equal(mine.values[everything.inverse_indices.compute()], x)
    same(np.unique_values(lazy), np.sort(np.unique_values(x)))
    same(np.unique_counts(lazy).counts, mine.counts)
    assert np.unique_inverse(lazy).inverse_indices.shape == x.shape


@usual
@given(st.data())
def test_searchsorted_of_any_chunks(data):
    dtypes = st.sampled_from(["i2", "f8", "f4", "u1"])
    a = np.sort(data.draw(hnp.arrays(data.draw(dtypes), st.integers(0, 12))))
    shape = tuple(data.draw(st.lists(st.integers(0, 4), max_size=2)))
    v = data.draw(hnp.arrays(data.draw(dtypes), shape))
    side = data.draw(st.sampled_from(["left", "right"]))
    lazy = da.from_array(a, chunks=data.draw(st.integers(1, 5)))
    whole = data.draw(st.booleans())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "gpuscheduler.algorithms.distinct.most_line_bytes", lambda *_: 1e9 if whole else -1
        )
        found = array.searchsorted(lazy, da.from_array(v, chunks=3), side)
    assert found.shape == v.shape
    same(found, np.asarray(np.searchsorted(a, v, side)))


def test_searchsorted_takes_a_sorter_numbers_and_unknown_chunks(monkeypatch):
    a = RNG.permutation(20)
    same(array.searchsorted(da.from_array(a, chunks=7), [3, 9], sorter=np.argsort(a)),
         np.searchsorted(a, [3, 9], sorter=np.argsort(a)))  # fmt: skip
    lazy = unknown(da.arange(20, chunks=6))
    assert int(array.searchsorted(lazy, 7)) == 7
    monkeypatch.setattr("gpuscheduler.algorithms.distinct.most_line_bytes", lambda *_: -1)
    assert int(array.searchsorted(lazy, 7, "right")) == 8


PAIRS = st.sampled_from([("i1", "i8"), ("f8", "f8"), ("f4", "f8"), ("i4", "f4"), ("U1", "U2")])


@usual
@given(st.data())
def test_set_operations(data):
    dtypes = data.draw(PAIRS)
    few = st.integers(-3, 3) | st.just(np.nan) if dtypes[1] == "f8" else st.integers(-3, 3)
    if dtypes[1] == "U2":
        few = st.sampled_from(["a", "b", "", "c"])
    shapes = st.lists(st.integers(0, 5), min_size=1, max_size=2).map(tuple)
    whole = st.integers(-3, 3)
    each = [few if d[0] != "i" else whole for d in dtypes]
    a, b = (
        data.draw(hnp.arrays(d, data.draw(shapes), elements=e))
        for d, e in zip(dtypes, each, strict=True)
    )
    x, y = (da.from_array(v, chunks=data.draw(st.integers(1, 4))) for v in (a, b))
    with dask.config.set({"gpuscheduler.sort-runs": data.draw(st.integers(1, 3))}):
        invert = data.draw(st.booleans())
        made = array.isin(x, y, invert=invert)
        assert made.chunks == x.chunks
        same(made, np.isin(a, b, invert=invert))
        same(array.union1d(x, y), np.union1d(a, b))
        same(np.setdiff1d(x, y), np.setdiff1d(a, b))
        same(np.intersect1d(x, y), np.intersect1d(a, b))
        same(np.setxor1d(x, y), np.setxor1d(a, b))
        for got, expected in zip(
            np.intersect1d(x, y, return_indices=True),
            np.intersect1d(a, b, return_indices=True),
            strict=True,
        ):
            same(got, expected)


@pytest.mark.parametrize("scheduler", ["threads", "cpu:1", "cpu:4"])
def test_each_scheduler_gives_the_same(scheduler, with_runs):
    x, y = RNG.integers(0, 90, (40, 30)), RNG.integers(0, 120, 70)
    lazy, other = da.from_array(x, chunks=(13, 11)), da.from_array(y, chunks=20)
    made = [
        *array.unique(lazy, True, True, True),
        array.isin(lazy, other),
        np.setdiff1d(other, lazy),
    ]
    if scheduler == "threads":
        got = dask.compute(*made, scheduler=scheduler)
    else:
        with Scheduler(scheduler, check=True):
            got = dask.compute(*made)
    expected = [*np.unique(x, True, True, True), np.isin(x, y), np.setdiff1d(y, x)]
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def test_few_distinct_values_make_small_parts():
    """What is exchanged are distinct values, not elements."""
    x = da.from_array(RNG.integers(0, 5, 10_000), chunks=1000)
    with dask.config.set({"gpuscheduler.sort-runs": 4}):
        values = array.unique(x)
    graph = dict(values.dask)
    pieces = [k for k in graph if str(k[0]).startswith("unique-piece")]
    got = dask.get(graph, pieces)
    assert sum(p[0].size for p in got) <= 4 * 5


def test_wrong_arguments_are_named():
    x = da.ones((4, 4), chunks=2)
    with pytest.raises(NotImplementedError, match="axis=0: use axis=None"):
        array.unique(x, axis=0)
    with pytest.raises(TypeError, match="unique: dtype object"):
        array.unique(x.astype(object))
    with pytest.raises(ValueError, match="a has 2 axes"):
        array.searchsorted(x, 1)
    with pytest.raises(ValueError, match="side='middle'"):
        array.searchsorted(x[0], 1, "middle")


def test_unique_of_another_array_is_not_planned_again(planned):
    with Scheduler("cpu:2"), dask.config.set({"gpuscheduler.sort-runs": 3}):
        for seed in (1, 2, 3):
            x = np.random.default_rng(seed).integers(0, 50, 1000)
            same_counts = array.unique(da.from_array(x, chunks=100), return_counts=True)[1]
            np.testing.assert_array_equal(same_counts, np.unique(x, return_counts=True)[1])
    assert len(planned) == 1
