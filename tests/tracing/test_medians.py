"""Medians of a few elements are what NumPy's are."""

from __future__ import annotations

import itertools
import subprocess
import sys
import warnings
from pathlib import Path

import dask.array as da
import numpy as np
import pytest
from dask.array import reductions
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuscheduler import Scheduler
from gpuscheduler.fusion.task import KernelTask
from gpuscheduler.tracing.functions.medians import MOST_SORTED, MOST_WITH_NAN, exchanges
from tests.support import kernels as k
from tests.tracing.test_trace import agree, traced

#: Before NumPy 2.4 a float32 `q`, or float32 values, are interpolated with other rounding, and the
#: quantile at an infinite element is NaN: it multiplied the infinite difference by zero.
ROUNDS_AS_NOW = np.lib.NumpyVersion(np.__version__) >= "2.4.0"


@pytest.mark.parametrize("n", range(1, 13))
def test_exchanges_sort(n):
    """Whatever lies on either side of a threshold (the zero-one principle)."""
    rows = np.array(list(itertools.product([0, 1], repeat=n)))
    for i, j in exchanges(n):
        rows[:, [i, j]] = np.sort(rows[:, [i, j]], axis=1)
    assert (np.diff(rows, axis=1) >= 0).all()


@st.composite
def arrays(draw):
    dtype = np.dtype(draw(st.sampled_from(["f4", "f8", "f2", "i4", "u1", "i8", "?"])))
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    x = k.values(dtype, 900, seed=draw(st.integers(0, 99)))
    return x[draw(st.integers(0, 9)) :][: np.prod(shape)].reshape(shape)


@settings(max_examples=75, deadline=None, suppress_health_check=list(HealthCheck))
@given(arrays(), st.data())
def test_any_median(x, data):
    axes = data.draw(st.lists(st.integers(0, x.ndim - 1), min_size=1, unique=True))
    if np.prod([x.shape[a] for a in axes]) > MOST_SORTED:
        axes = axes[:1]
    axes, keep = tuple(axes), data.draw(st.booleans())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # all NaN; the mean of infinities
        agree(lambda x: np.median(x, axis=axes, keepdims=keep), x)
        if x.dtype.kind != "b" and np.prod([x.shape[a] for a in axes]) <= MOST_WITH_NAN:
            agree(lambda x: np.nanmedian(x, axis=axes, keepdims=keep), x)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(arrays(), st.data())
def test_any_quantile(x, data):
    axis = data.draw(st.integers(-x.ndim, x.ndim - 1))
    if not 1 < x.shape[axis] <= MOST_WITH_NAN or x.dtype.kind == "b":
        return
    q = data.draw(
        st.one_of(
            st.sampled_from([0, 1, 0.5]),
            st.floats(0, 1),
            st.lists(st.floats(0, 1), min_size=1, max_size=3).map(np.array),
            *([st.floats(0, 1, width=32).map(np.float32)] if ROUNDS_AS_NOW else []),
        )
    )
    if not ROUNDS_AS_NOW and x.dtype.kind == "f":
        x = np.where(np.isinf(x), x.dtype.type(3), x)
    if x.ndim == 1 and x.dtype == "f2" and type(q) is np.float32 and np.isnan(x).any():
        return  # the only result that is no number is an element of NumPy's input, of its type
    keep, known = data.draw(st.booleans()), type(q) is not np.ndarray or data.draw(st.booleans())
    for f, most in (
        (np.quantile, 1), (np.nanquantile, 1), (np.percentile, 100), (np.nanpercentile, 100),
    ):  # fmt: skip
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # all NaN; differences of infinities
            if known:
                given = tuple((q * most).tolist()) if type(q) is np.ndarray else q * most
                agree(lambda x, f=f, q=given: f(x, q, axis=axis, keepdims=keep), x)
            else:
                agree(lambda x, q, f=f: f(x, q, axis=axis, keepdims=keep), x, q * most)


def test_the_greatest():
    """Their sum would be infinite."""
    x = np.full((3, 4), np.finfo("f8").max)
    x[0, 0] = np.nan
    agree(lambda x: np.median(x, 0), x)
    assert np.isfinite(traced(lambda x: np.nanmedian(x, 0), x)[1:]).all()


@pytest.mark.parametrize(
    "function",
    [
        lambda x: np.median(x),  # of too many
        lambda x: np.median(x[:0], 0),
        lambda x: np.median(x[:3] * 1j, 0),
        lambda x: np.median(x[:3], 0, out=np.empty(33)),
        lambda x: np.quantile(x, 0.5),
        lambda x: np.quantile(x[:3], 0.5, axis=0, method="lower"),
        lambda x: np.quantile(x[:3], np.linspace(0, 1, 9), axis=0),
        lambda x: np.quantile(x[:3] > 0, 0.5, axis=0),
        lambda x: np.quantile(x[:3], 0.5, axis=0, method="inverted_cdf", weights=np.ones(3)),
        lambda x: np.nanpercentile(x[:3], 0.5, axis=0, out=np.empty(33)),
    ],
)
def test_what_is_not_followed(function):
    with pytest.raises(Exception, match="has no expression|out="):
        traced(function, np.ones((33, 33)))


@pytest.mark.parametrize("devices", ["cpu:1", "cpu:2"])
def test_filters(devices):
    """Of windows, and over time."""
    values = np.random.default_rng(3).random((40, 24, 20)).astype("f4")
    values[3, 4, 5] = np.nan
    x = da.from_array(values, chunks=(10, 12, 20))
    windows = da.lib.stride_tricks.sliding_window_view
    for y in (
        da.median(windows(x, 5, axis=0), axis=-1),
        da.nanmedian(windows(x, (3, 3), axis=(1, 2)), axis=(-2, -1)),
        da.median(x[:30], axis=0),
        da.quantile(x[:12], 0.3, axis=0),
        da.quantile(windows(x, 5, axis=0), [0.1, 0.5, 0.9], axis=-1),
        da.nanquantile(x[:12], [0.25, 1], axis=0),
        da.nanquantile(x[:, :, :12], 0.25, axis=-1),
        x[:10].map_blocks(np.percentile, 90, axis=0, drop_axis=0, dtype="f4"),
    ):
        want = y.compute(scheduler="sync")
        with Scheduler(devices, fuse_least=0) as s:
            steps = s.plan(y).steps
            assert any(isinstance(step.task, KernelTask) for step in steps)
            # of rows without NaN Dask adds up two products, where NumPy goes from one to the other
            exact = not y.name.startswith(("_custom_nanquantile", "_custom_quantile"))
            np.testing.assert_allclose(
                y.compute(), want, rtol=0 if exact and ROUNDS_AS_NOW else 1e-6
            )


def test_dask_without_its_own_nanquantile_is_enough():
    """As it was before 2026.6."""
    code = """
import dask.array as da
from dask.array import reductions
del reductions._custom_nanquantile
import gpuscheduler
with gpuscheduler.Scheduler("cpu:1", fuse_least=0):
    assert int(da.arange(10, chunks=5).sum().compute()) == 45
"""
    if hasattr(reductions, "_custom_nanquantile"):
        subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=True)
