"""Eigenvalues, powers and tensor equations on GPUs."""

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")

import dask
import dask.array as da

import gpuscheduler
from gpuscheduler import linalg
from tests.support import lapack_ratios as ratios
from tests.support.lapack_ratios import THRESHOLD
from tests.support.matrices import square_matrix

pytestmark = pytest.mark.gpu


def host(a):
    assert isinstance(a, cupy.ndarray)
    return a.get()


def on_gpu(a, chunks=6):
    return da.from_array(a, chunks=chunks).to_backend("cupy")


@pytest.fixture(scope="module", params=["cuda:0", "cuda:0,0"])
def scheduler(request):
    with gpuscheduler.Scheduler(request.param, check=True) as s:
        yield s


@pytest.mark.parametrize("dtype", ["f4", "f8", "c8", "c16", "i4"])
def test_every_dtype(scheduler, dtype):
    a = square_matrix(20, dtype)
    a = (a + a.conj().T).astype(dtype)
    x = on_gpu(a)
    lazy = (*linalg.eigh(x), linalg.eigvalsh(x, UPLO="U"), *linalg.eig(x), linalg.eigvals(x))
    got = [host(v) for v in dask.compute(*lazy)]
    for value, array in zip(got, lazy, strict=True):
        assert (value.dtype, value.shape) == (array.dtype, array.shape)
    wide = np.asarray(a, lazy[1].dtype)
    assert ratios.eigh(wide, *got[:2]) < THRESHOLD
    assert ratios.eig(wide, *got[3:5]) < THRESHOLD
    rtol = 1e-3 if dtype in ("f4", "c8") else 1e-9
    np.testing.assert_allclose(got[2], got[0], atol=rtol * np.abs(got[0]).max())
    np.testing.assert_allclose(np.sort(got[5].real), got[0], atol=rtol * np.abs(got[0]).max())


def test_matrices_without_symmetry(scheduler):
    for a in (square_matrix(20), np.array([[0.0, -1], [1, 0]]), square_matrix(7, "c16")):
        w, v = map(host, dask.compute(*linalg.eig(on_gpu(a))))
        assert ratios.eig(a, w, v) < THRESHOLD


def test_stacks(scheduler):
    a = np.stack([square_matrix(4, seed=s) for s in range(6)])
    a = a + a.swapaxes(-1, -2)
    x = on_gpu(a, (2, 3, 4))
    w, v, alone = map(host, dask.compute(*linalg.eigh(x), linalg.eigvalsh(x)))
    for n in range(6):
        assert ratios.eigh(a[n], w[n], v[n]) < THRESHOLD
    np.testing.assert_allclose(alone, w, atol=1e-10)


def test_what_is_not_finite_raises(scheduler):
    a = square_matrix(9)
    a[5, 2] = np.nan
    for lazy in (linalg.eigh(on_gpu(a))[0], linalg.eigvals(on_gpu(a))):
        with pytest.raises(np.linalg.LinAlgError, match="infs or NaNs"):
            lazy.compute()


def test_powers_chains_and_tensors(scheduler):
    a = square_matrix(12) / 4
    x = on_gpu(a)
    wants = [
        (linalg.matrix_power(x, 5), np.linalg.matrix_power(a, 5)),
        (linalg.matrix_power(x, 0), np.eye(12)),
        (linalg.matrix_power(x, -2), np.linalg.matrix_power(a, -2)),
        (linalg.multi_dot([x, x[:, :3], x[:3]]), np.linalg.multi_dot([a, a[:, :3], a[:3]])),
        (linalg.tensorinv(x.reshape(3, 4, 12)), np.linalg.tensorinv(a.reshape(3, 4, 12))),
        (linalg.trace(x), np.trace(a)),
        (linalg.vecdot(x, x), np.linalg.vecdot(a, a)),
    ]
    for got, want in wants:
        np.testing.assert_allclose(host(got.compute()), want, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("p", [1, np.inf, "fro"])
def test_condition_numbers_of_singular_matrices_are_infinite(scheduler, p):
    for a in (square_matrix(9), np.zeros((3, 3)), np.stack([np.eye(3), np.zeros((3, 3))])):
        got = linalg.cond(on_gpu(a), p).compute()
        np.testing.assert_allclose(host(got), np.linalg.cond(a, p), rtol=1e-8)
