"""Bins of histograms on CPU devices, beside NumPy's."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuscheduler.codegen.cpu import histogram
from gpuscheduler.ir.bins import LEAST_CELLS, Bins

INF = np.inf
EDGES = {
    "even": np.linspace(-4, 4, 51),
    "at random": np.sort(np.random.default_rng(1).standard_normal(1000)),
    "logarithmic": np.geomspace(1e-3, 4, 100),
    "of all sizes": np.geomspace(1e-300, 1e300, 200),
    "almost as far apart as there is": np.array([-1.7e308, -1.0, 1.0, 1.7e308]),
    "nearly one": 1 + np.arange(40) * 2.0**-52,
    "nearly none": np.arange(9) * 5e-324,
    "infinite": np.array([-INF, -1, 0, 1, INF]),
    "nothing but infinite": np.array([-INF, INF]),
    "equal": np.array([0.0, 1, 1, 1, 2, 2]),
    "all equal": np.array([1.0, 1, 1]),
    "many in one cell": np.sort(np.r_[np.arange(300) * 1e-9, 1.0]),
    "two": np.array([-0.5, 0.5]),
    "one": np.array([0.5]),
    "more than cells": np.sort(np.random.default_rng(2).random(LEAST_CELLS + 9)),
    "whole": np.unique(np.geomspace(1, 1000, 60).astype(np.int64)),
    "whole and even": np.arange(0, 1001, 10),
    "whole and wide": np.array([-(2**63), -1, 0, 2**53, 2**53 + 1, 2**63 - 1]),
}


def numbers(edges):
    """Some at the edges, some next to them, some between and some beyond."""
    rng = np.random.default_rng(3)
    near = [edges, edges]
    if edges.dtype.kind == "f":
        near += [np.nextafter(edges, -INF), np.nextafter(edges, INF), [np.nan, -0.0, INF, -INF]]
        sizes = 10.0 ** rng.integers(-300, 300, 3000)
        near += [rng.standard_normal(3000), rng.random(3000) * sizes]
    else:
        near += [rng.integers(-10, 1100, 3000), rng.integers(-(2**63), 2**63 - 1, 3000)]
    with np.errstate(over="ignore"):
        values = np.concatenate(near).astype(edges.dtype)
    return rng.permutation(values)


def expected(x, edges):
    """The bin of each value by the definition; as many as there are for none."""
    bins = len(edges) - 1
    found = np.minimum(np.searchsorted(edges, x, "right"), max(bins, 1)) - 1
    inside = (x >= edges[0]) & (x <= edges[-1])
    return np.where(inside & (bins > 0), found, bins)


@pytest.mark.parametrize("name", EDGES)
def test_bins_are_numpys(name):
    edges = EDGES[name]
    for kind in ("f4", "f8") if edges.dtype.kind == "f" else ("i8",):
        with np.errstate(over="ignore"):
            those = edges.astype(kind)
        x, bins = numbers(those), Bins.from_edges(those)
        where = expected(x, those)
        np.testing.assert_array_equal(histogram.find(bins, x), where)
        counts = np.full(len(bins), 5)
        histogram.count(bins, x, counts)
        np.testing.assert_array_equal(counts - 5, np.bincount(where, minlength=len(bins) + 1)[:-1])
        if len(bins) and np.isfinite(those).all():
            inside = x[(x >= those[0]) & (x <= those[-1])]
            np.testing.assert_array_equal(counts - 5, np.histogram(inside, those)[0])
        weights = np.arange(x.size, dtype="f8")
        sums = np.zeros(len(bins))
        histogram.weigh(bins, x, weights, sums)
        np.testing.assert_array_equal(sums, np.bincount(where, weights, len(bins) + 1)[:-1])


@given(
    st.lists(st.floats(width=64, allow_nan=False), min_size=2, max_size=40),
    st.lists(st.floats(width=64), max_size=40),
)
def test_any_bins_of_any_numbers_are_those_by_the_definition(edges, x):
    edges = np.sort(np.array(edges))
    x = np.concatenate([x, edges])
    np.testing.assert_array_equal(histogram.find(Bins.from_edges(edges), x), expected(x, edges))
