"""Cholesky factors: LAPACK's residuals, and an error for any other matrix."""

import dask
import dask.array as da
import numpy as np
import pytest
import scipy.linalg
from hypothesis import given, settings
from hypothesis import strategies as st

import gpuscheduler
from gpuscheduler.algorithms import capacity as capacities
from gpuscheduler.algorithms import cholesky as choleskys
from gpuscheduler.algorithms import matrices
from tests.support import lapack_ratios as ratios
from tests.support.lapack_ratios import THRESHOLD


def positive(n, dtype="f8", seed=0):
    rng = np.random.default_rng(seed)
    a = rng.standard_normal((n, n))
    if np.dtype(dtype).kind == "c":
        a = a + 1j * rng.standard_normal((n, n))
    a = a @ a.conj().T + np.eye(n)
    return np.round(a * 9 + 99 * np.eye(n)).astype(dtype) if dtype[0] in "iu" else a.astype(dtype)


MATRICES = {
    "random": positive(37),
    "Hilbert's": scipy.linalg.hilbert(8),
    "graded": positive(20) * np.outer(np.logspace(0, 120, 20), np.logspace(0, 120, 20)),
    "small entries": positive(20) * 1e-200,
    "large entries": positive(20) * 1e200,
    "1 x 1": np.array([[4.0]]),
    "diagonal": np.diag(np.arange(1.0, 12)),
}


@pytest.mark.parametrize("block_size", [None, 1, 5, 16, 100])
@pytest.mark.parametrize("name", MATRICES)
def test_factors_have_lapacks_residual(name, block_size):
    a = MATRICES[name]
    for chunks in (7, len(a), (3, len(a))):
        x = da.from_array(a, chunks=chunks)
        lower = choleskys.cholesky(x, block_size=block_size)
        assert lower.chunks == x.chunks
        got = lower.compute(scheduler="sync")
        assert ratios.cholesky(a, got) < THRESHOLD
        np.testing.assert_array_equal(got, np.tril(got))
        upper = choleskys.cholesky(x, upper=True, block_size=block_size).compute(scheduler="sync")
        np.testing.assert_array_equal(upper, np.triu(upper))
        assert ratios.cholesky(a, upper.conj().T) < THRESHOLD


@pytest.mark.parametrize("scheduler", ["sync", "threads", "cpu:1", "cpu:4"])
@pytest.mark.parametrize("dtype", ["f4", "f8", "c8", "c16", "i4"])
@pytest.mark.parametrize("block_size", [None, 6])
def test_every_dtype_on_every_scheduler(scheduler, dtype, block_size):
    a = positive(23, dtype)
    lazy = choleskys.cholesky(da.from_array(a, chunks=(5, 9)), block_size=block_size)
    want = np.linalg.cholesky(a)
    if ":" in scheduler:
        with gpuscheduler.Scheduler(scheduler, check=True):
            got = lazy.compute()
    else:
        got = lazy.compute(scheduler=scheduler)
    assert got.dtype == lazy.dtype == want.dtype
    assert ratios.cholesky(np.asarray(a, want.dtype), got) < THRESHOLD


@pytest.mark.parametrize("block_size", [None, 4])
@pytest.mark.parametrize("dtype", ["f8", "c16"])
def test_only_the_lower_triangle_is_read(block_size, dtype):
    a = positive(11, dtype)
    noise = np.triu(np.full((11, 11), np.nan), 1)
    got = choleskys.cholesky(da.from_array(a + noise, chunks=4), block_size=block_size)
    want = np.linalg.cholesky(a)
    np.testing.assert_allclose(got.compute(scheduler="sync"), want, rtol=1e-9, atol=1e-12)
    got = choleskys.cholesky(
        da.from_array(a + noise.T, chunks=4), upper=True, block_size=block_size
    )
    np.testing.assert_allclose(got.compute(scheduler="sync"), want.conj().T, atol=1e-9)


def indefinite():
    at_the_end = positive(20)
    at_the_end[-1, -1] = -1
    nan, zero = positive(20), positive(20)
    nan[13, 13] = np.nan
    zero[:, 5] = zero[5] = 0
    return {"end": at_the_end, "NaN": nan, "zero row": zero, "zero": np.zeros((20, 20)),
            "negative": -positive(20), "saddle": np.eye(20)[::-1]}  # fmt: skip


@pytest.mark.parametrize("name", indefinite())
@pytest.mark.parametrize("block_size", [None, 6])
def test_matrices_that_are_not_positive_definite_raise(name, block_size):
    lazy = choleskys.cholesky(da.from_array(indefinite()[name], chunks=7), block_size=block_size)
    with pytest.raises(np.linalg.LinAlgError, match="not positive definite"):
        lazy.compute(scheduler="sync")
    with (
        gpuscheduler.Scheduler("cpu:2"),
        pytest.raises(np.linalg.LinAlgError, match="not positive definite"),
    ):
        lazy.compute()


def test_the_error_names_the_columns():
    a = positive(20)
    a[-1, -1] = -1
    lazy = choleskys.cholesky(da.from_array(a, chunks=7), block_size=6)
    with pytest.raises(np.linalg.LinAlgError, match="columns 18 to 19"):
        lazy.compute(scheduler="sync")


def test_stacks_and_empty():
    a = np.stack([positive(4, seed=s) for s in range(6)]).reshape(2, 3, 4, 4)
    x = da.from_array(a, chunks=(1, 2, 3, 2))
    for options in ({}, {"upper": True}):
        want = np.linalg.cholesky(a, **options)
        np.testing.assert_allclose(choleskys.cholesky(x, **options).compute(), want, atol=1e-12)
    assert choleskys.cholesky(da.zeros((0, 0))).compute().shape == (0, 0)
    assert choleskys.cholesky(da.zeros((0, 3, 3))).compute().shape == (0, 3, 3)


@pytest.mark.parametrize("lower", [True, False])
@pytest.mark.parametrize("dtype", ["f8", "c16", "f4"])
def test_cho_solve(lower, dtype, monkeypatch):
    a, b = positive(21, dtype), positive(21, dtype, 1)[:, :5]
    factor = choleskys.cho_factor(da.from_array(a, chunks=8), lower=lower)
    assert factor[1] is lower
    for whole in (True, False):
        if not whole:
            monkeypatch.setattr(matrices, "capacity", lambda *_: capacities.Capacity(1, 9))
            monkeypatch.setattr(choleskys, "column_width", lambda n, size, of="": 4)
        for right in (b, b[:, 0], b[:, :0]):
            x = choleskys.cho_solve(factor, da.from_array(right, chunks=-1))
            assert whole or not right.size or any("forward" in str(k) for k in dict(x.dask))
            got = x.compute(scheduler="sync")
            assert got.shape == right.shape
            assert ratios.solve(a, got, right) < THRESHOLD


def test_orders_of_memory_and_read_only_blocks():
    a = positive(12)
    for array in (np.asfortranarray(a), a.view()):
        array.flags.writeable = False
        for block_size in (None, 5):
            x = choleskys.cholesky(da.from_array(array, chunks=-1), block_size=block_size)
            assert ratios.cholesky(a, x.compute(scheduler="sync")) < THRESHOLD
        array.flags.writeable = True


def test_bits_do_not_depend_on_devices_or_chunks():
    a = positive(40)
    found = set()
    for devices in ("cpu:1", "cpu:3"):
        with gpuscheduler.Scheduler(devices, check=True):
            for chunks in (40, 13, (7, 40)):
                x = choleskys.cholesky(da.from_array(a, chunks=chunks), block_size=8)
                found.add(x.compute().tobytes())
    assert len(found) == 1


def test_bad_arguments_are_refused():
    x = da.eye(4, chunks=2)
    with pytest.raises(np.linalg.LinAlgError, match="square"):
        choleskys.cholesky(x[:3])
    with pytest.raises(TypeError, match="astype"):
        choleskys.cholesky(x.astype("f2"))
    with pytest.raises(ValueError, match="must be"):
        choleskys.cho_solve((x, True), np.ones(3))


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_any_small_matrix(data):
    """A factor, or an error where NumPy has one: of integers, for which both are exact enough."""
    n = data.draw(st.integers(1, 7))
    rows = data.draw(st.lists(st.integers(-2, 2), min_size=n * n, max_size=n * n))
    a = np.array(rows, "f8").reshape(n, n)
    a = a @ a.T + np.eye(n) * data.draw(st.sampled_from([1, 0.5, -0.5]))
    x = da.from_array(a, chunks=data.draw(st.integers(1, n)))
    lazy = choleskys.cholesky(x, block_size=data.draw(st.none() | st.integers(1, n)))
    smallest = np.linalg.eigvalsh(a)[0]
    if smallest > 1e-9:
        got = dask.compute(lazy, scheduler="sync")[0]
        assert ratios.cholesky(a, got) < THRESHOLD
    elif smallest < -1e-9:
        with pytest.raises(np.linalg.LinAlgError):
            lazy.compute(scheduler="sync")
