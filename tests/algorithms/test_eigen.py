"""Eigenvalues and eigenvectors: LAPACK's residuals; refused where they do not fit one device."""

import dask
import dask.array as da
import numpy as np
import pytest

import gpuscheduler
from gpuscheduler.algorithms import eigen, matrices
from gpuscheduler.algorithms.capacity import Capacity
from tests.support import lapack_ratios as ratios
from tests.support.lapack_ratios import THRESHOLD


def matrix(n, dtype="f8", seed=0):
    rng = np.random.default_rng(seed)
    a = rng.standard_normal((n, n)) * 9
    if np.dtype(dtype).kind == "c":
        a = a + 1j * rng.standard_normal((n, n))
    return a.astype(dtype)


def symmetric(n, dtype="f8", seed=0):
    a = matrix(n, dtype, seed)
    return (a + a.conj().T).astype(dtype)


def wilkinson(n=21):
    """Pairs of eigenvalues that agree to many digits."""
    return np.diag(np.abs(np.arange(n) - n // 2.0)) + np.eye(n, k=1) + np.eye(n, k=-1)


SYMMETRIC = {
    "random": symmetric(30),
    "Wilkinson's": wilkinson(),
    "zero": np.zeros((7, 7)),
    "identity": np.eye(6),
    "rank one": np.ones((9, 9)),
    "graded": symmetric(20) * np.outer(np.logspace(0, -50, 20), np.logspace(0, -50, 20)),
    "small entries": symmetric(20) * 1e-180,
    "large entries": symmetric(20) * 1e150,
    "1 x 1": np.array([[-2.0]]),
    "indefinite": np.eye(8)[::-1],
}
GENERAL = {
    "random": matrix(20),
    "rotation": np.array([[0.0, -1], [1, 0]]),
    "defective": np.eye(6) + np.eye(6, k=1),
    "companion": np.eye(8, k=-1) + np.eye(8, k=7),
    "1 x 1": np.array([[3.0]]),
    "graded rows": matrix(12) * np.logspace(0, -20, 12)[:, None],
}


@pytest.mark.parametrize("name", SYMMETRIC)
@pytest.mark.parametrize("uplo", ["L", "U"])
def test_symmetric_matrices(name, uplo):
    a = SYMMETRIC[name]
    noise = np.full(a.shape, np.nan)
    other = np.triu(noise, 1) if uplo == "L" else np.tril(noise, -1)
    for chunks in (5, len(a)):
        x = da.from_array(a + other, chunks=chunks)
        w, v = eigen.eigh(x, UPLO=uplo)
        assert (w.chunks, v.chunks) == (x.chunks[1:], x.chunks)
        alone = eigen.eigvalsh(x, UPLO=uplo)
        w, v, alone = dask.compute(w, v, alone, scheduler="sync")
        assert ratios.eigh(a, w, v) < THRESHOLD
        assert (np.diff(w) >= 0).all()
        limit = THRESHOLD * len(a) * np.finfo(float).eps * ratios.norm(a)
        np.testing.assert_allclose(alone, w, rtol=0, atol=limit)


@pytest.mark.parametrize("name", GENERAL)
def test_general_matrices(name):
    a = GENERAL[name]
    x = da.from_array(a, chunks=3)
    w, v = eigen.eig(x)
    assert (w.chunks, v.chunks) == (x.chunks[1:], x.chunks)
    w, v, alone = dask.compute(w, v, eigen.eigvals(x), scheduler="sync")
    assert ratios.eig(a, w, v) < THRESHOLD
    if name != "defective":  # its eigenvalues move by the root of the rounding
        np.testing.assert_allclose(np.sort_complex(alone), np.sort_complex(w), atol=1e-9)


@pytest.mark.parametrize("scheduler", ["sync", "threads", "cpu:1", "cpu:4"])
@pytest.mark.parametrize("dtype", ["f4", "f8", "c8", "c16", "i4", "?"])
def test_every_dtype_on_every_scheduler(scheduler, dtype):
    a = symmetric(14, dtype) if dtype != "?" else symmetric(14) > 0
    x = da.from_array(a, chunks=(4, 9))
    lazy = (*eigen.eigh(x), eigen.eigvalsh(x), *eigen.eig(x), eigen.eigvals(x))
    if ":" in scheduler:
        with gpuscheduler.Scheduler(scheduler, check=True):
            got = dask.compute(*lazy)
    else:
        got = dask.compute(*lazy, scheduler=scheduler)
    for value, array in zip(got, lazy, strict=True):
        assert (value.dtype, value.shape) == (array.dtype, array.shape)
    want = np.linalg.eigh(a)
    assert [v.dtype for v in got[:2]] == [v.dtype for v in want]
    assert {v.dtype for v in got[3:]} == {np.result_type(want[1].dtype, "c8")}
    wide = np.asarray(a, want[1].dtype)
    assert ratios.eigh(wide, *got[:2]) < THRESHOLD
    assert ratios.eig(wide, *got[3:5]) < THRESHOLD


def test_stacks_are_on_all_devices():
    a = np.stack([symmetric(4, seed=s) for s in range(6)])
    x = da.from_array(a, chunks=(2, 3, 4))
    with gpuscheduler.Scheduler("cpu:3") as scheduler:
        w, v = dask.compute(*eigen.eigh(x))
        places = {s.place for s in scheduler.plan(eigen.eigh(x)[1]).steps}
    assert places == {0, 1, 2}
    for n in range(6):
        assert ratios.eigh(a[n], w[n], v[n]) < THRESHOLD
    np.testing.assert_allclose(eigen.eigvalsh(x).compute(), w, atol=1e-12)
    w, v = dask.compute(*eigen.eig(x.reshape(2, 3, 4, 4)))
    assert (w.shape, v.shape) == ((2, 3, 4), (2, 3, 4, 4))
    np.testing.assert_allclose(a.reshape(2, 3, 4, 4) @ v, v * w[..., None, :], atol=1e-11)
    np.testing.assert_allclose(
        np.sort_complex(eigen.eigvals(x).compute()), np.sort_complex(w.reshape(6, 4)), atol=1e-11
    )


def test_empty():
    for function in (eigen.eigh, eigen.eig):
        w, v = dask.compute(*function(da.zeros((0, 0))))
        assert (w.shape, v.shape) == ((0,), (0, 0))
        w, v = dask.compute(*function(da.zeros((0, 3, 3))))
        assert (w.shape, v.shape) == ((0, 3), (0, 3, 3))


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_what_is_not_finite_raises_in_the_task(wrong):
    a = symmetric(6)
    a[4, 1] = wrong
    x = da.from_array(a, chunks=4)
    for lazy in (eigen.eigh(x)[0], eigen.eigvalsh(x), eigen.eig(x)[1], eigen.eigvals(x)):
        with pytest.raises(np.linalg.LinAlgError, match="infs or NaNs"):
            lazy.compute(scheduler="sync")
    assert np.isfinite(eigen.eigvalsh(x, UPLO="U").compute(scheduler="sync")).all()


@pytest.mark.parametrize("name", ["eigh", "eigvalsh", "eig", "eigvals"])
def test_refused_above_the_memory_of_one_device(name, monkeypatch):
    function, x = getattr(eigen, name), da.ones((100, 100), chunks=10)
    needed = 2 * eigen.SIZES[name] * 100 * 100 * 8
    monkeypatch.setattr(matrices, "capacity", lambda *_: Capacity(4, needed))
    function(x)
    function(da.ones((50, 100, 100)))  # each matrix of a stack is small
    monkeypatch.setattr(matrices, "capacity", lambda *_: Capacity(4, needed - 1))
    with pytest.raises(NotImplementedError, match=f"{name}: .*{needed:,} bytes.*lobpcg"):
        function(x)


def test_the_limit_is_that_of_the_scheduler():
    with (
        gpuscheduler.Scheduler("cpu:1", memory_limit="1 MiB"),
        pytest.raises(NotImplementedError, match="1,048,576"),
    ):
        eigen.eigh(da.ones((1000, 1000), chunks=100))


def test_bad_arguments_are_refused():
    x = da.ones((4, 4), chunks=2)
    with pytest.raises(ValueError, match="UPLO"):
        eigen.eigh(x, UPLO="A")
    with pytest.raises(np.linalg.LinAlgError, match="square"):
        eigen.eig(x[:3])
    with pytest.raises(TypeError, match="astype"):
        eigen.eigvals(x.astype("f2"))


def test_numpys_functions_are_lazy():
    x = da.from_array(symmetric(9), chunks=4)
    for name in ("eigvalsh", "eigvals"):
        lazy = getattr(np.linalg, name)(x)
        assert isinstance(lazy, da.Array)
        want = getattr(np.linalg, name)(symmetric(9))
        np.testing.assert_allclose(np.sort_complex(lazy.compute()), np.sort_complex(want))
    w, v = np.linalg.eigh(x, UPLO="U")
    assert ratios.eigh(symmetric(9), *dask.compute(w, v)) < THRESHOLD
    assert np.linalg.eigh(x).eigenvalues.shape == (9,)
