"""Square matrices on GPUs: LAPACK's residuals, and errors that CuPy does not look for."""

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")

import dask
import dask.array as da

import gpuscheduler
from gpuscheduler import linalg
from gpuscheduler.algorithms import lapack
from tests.support import lapack_ratios as ratios
from tests.support.lapack_ratios import THRESHOLD
from tests.support.matrices import square_matrix

pytestmark = pytest.mark.gpu

DEVICES = ["cuda:0", "cuda:0,0", "cuda"]
SIZES = [None, 7]


def host(a):
    assert isinstance(a, cupy.ndarray)
    return a.get()


def on_gpu(a, chunks=9):
    return da.from_array(a, chunks=chunks).to_backend("cupy")


def positive(n, dtype="f8"):
    a = square_matrix(n, "c16" if np.dtype(dtype).kind == "c" else "f8")
    a = a @ a.conj().T + np.eye(n)
    return np.round(a * 9).astype(dtype) if dtype[0] == "i" else a.astype(dtype)


def hard():
    zero = square_matrix(30)
    zero[:15, :15] = 0
    small = square_matrix(30)
    small[:15, :15] *= 1e-12
    growth = np.eye(24) - np.tril(np.ones((24, 24)), -1)
    growth[:, -1] = 1
    return {"zero leading tile": zero, "small leading tile": small, "Wilkinson's growth": growth,
            "permutation": np.eye(12)[::-1].copy(), "1 x 1": np.array([[3.0]])}  # fmt: skip


@pytest.fixture(scope="module", params=DEVICES)
def scheduler(request):
    with gpuscheduler.Scheduler(request.param, check=True) as s:
        yield s


@pytest.mark.parametrize("block_size", SIZES)
@pytest.mark.parametrize("dtype", ["f4", "f8", "c8", "c16", "i4"])
def test_every_dtype(scheduler, dtype, block_size):
    a, b = square_matrix(31, dtype), square_matrix(31, dtype, 1)[:, :12]
    options = {"block_size": block_size}
    x, y = on_gpu(a), on_gpu(b, (5, 8))
    lazy = [
        linalg.solve(x, y, **options), linalg.solve(x, y[:, 0], **options),
        linalg.inv(x, **options), *linalg.lu_factor(x, **options),
        *linalg.slogdet(x, **options), linalg.det(x, **options),
        linalg.lu_solve(linalg.lu_factor(x, **options), y),
        linalg.cholesky(on_gpu(positive(31, dtype)), **options),
    ]  # fmt: skip
    many, one, inverse, lu, pivots, sign, logarithm, det, by_lu, lower = map(
        host, dask.compute(*lazy)
    )
    for array, got in zip(lazy, (many, one, inverse, lu, pivots, sign, logarithm), strict=False):
        assert (array.dtype, array.shape) == (got.dtype, got.shape)
    wide = a.astype(np.result_type(dtype, "f4") if dtype != "i4" else "f8")
    assert ratios.solve(wide, many, b) < THRESHOLD
    assert ratios.solve(wide, by_lu, b) < THRESHOLD
    assert ratios.solve(wide, one, b[:, 0]) < THRESHOLD
    assert ratios.inverse(wide, inverse) < THRESHOLD
    assert ratios.lu(wide, lu, pivots) < THRESHOLD
    assert ratios.cholesky(positive(31, dtype), lower) < THRESHOLD
    rtol = 1e-3 if dtype in ("f4", "c8") else 1e-9
    np.testing.assert_allclose([sign, logarithm], np.linalg.slogdet(wide), rtol=rtol)
    np.testing.assert_allclose(det, np.linalg.det(wide), rtol=rtol)


@pytest.mark.parametrize("block_size", SIZES)
@pytest.mark.parametrize("name", hard())
def test_hard_matrices(scheduler, name, block_size):
    a = hard()[name]
    b = a @ np.ones((len(a), 2))
    x = on_gpu(a)
    many, inverse, lu, pivots = map(
        host,
        dask.compute(
            linalg.solve(x, on_gpu(b), block_size=block_size),
            linalg.inv(x, block_size=block_size),
            *linalg.lu_factor(x, block_size=block_size),
        ),
    )
    assert ratios.solve(a, many, b) < THRESHOLD
    assert ratios.inverse(a, inverse) < THRESHOLD
    assert ratios.lu(a, lu, pivots) < THRESHOLD


@pytest.mark.parametrize("block_size", SIZES)
def test_failures_are_seen(scheduler, block_size):
    singular = square_matrix(20)
    singular[:, 13] = 0
    x = on_gpu(singular)
    right = on_gpu(np.ones((20, 1)))
    for lazy in (linalg.solve(x, right, block_size=block_size),
                 linalg.inv(x, block_size=block_size)):  # fmt: skip
        with pytest.raises(np.linalg.LinAlgError, match="[Ss]ingular"):
            lazy.compute()
    sign, logarithm = dask.compute(*linalg.slogdet(x, block_size=block_size))
    assert (float(sign), float(logarithm)) == (0, -np.inf)
    indefinite, nan = positive(20), positive(20)
    indefinite[-1, -1] = -1
    nan[13, 13] = np.nan
    for wrong in (indefinite, nan, -positive(20), np.zeros((20, 20))):
        with pytest.raises(np.linalg.LinAlgError, match="not positive definite"):
            linalg.cholesky(on_gpu(wrong), block_size=block_size).compute()
    # and the scheduler goes on
    assert float(linalg.det(on_gpu(np.eye(3))).compute()) == 1


def test_stacks(scheduler):
    a = np.stack([square_matrix(4, seed=s) for s in range(6)]).reshape(2, 3, 4, 4)
    b = np.ones((4, 2))
    x = on_gpu(a, (1, 2, 3, 2))
    got = dask.compute(
        linalg.solve(x, on_gpu(b)), linalg.inv(x), linalg.det(x),
        linalg.cholesky(x @ x.swapaxes(-1, -2)),
    )  # fmt: skip
    want = np.linalg.solve(a, b), np.linalg.inv(a), np.linalg.det(a)
    want += (np.linalg.cholesky(a @ a.swapaxes(-1, -2)),)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(host(g), w, rtol=1e-7, atol=1e-7)
    singular = np.stack([np.eye(3), np.zeros((3, 3))])
    for lazy in (linalg.inv(on_gpu(singular)), linalg.solve(on_gpu(singular), on_gpu(np.ones(3)))):
        with pytest.raises(np.linalg.LinAlgError, match="Singular"):
            lazy.compute()


def test_positive_systems_and_refinement(scheduler):
    a, b = positive(30), square_matrix(30, seed=3)[:, :4]
    for options in ({"assume_a": "pos"}, {"refine": True}, {"refine": True, "block_size": 8}):
        x = linalg.solve(on_gpu(a), on_gpu(b), **options)
        assert ratios.solve(a, host(x.compute()), b) < THRESHOLD


def test_persisted_blocks_stay_as_they_were(scheduler):
    """cuSOLVER works in place; what it gets must be a copy."""
    a = positive(20)
    for chunks in (20, 9):
        x = on_gpu(a, chunks).persist()
        for block_size in SIZES:
            dask.compute(
                linalg.solve(x, x[:, 0], block_size=block_size),
                linalg.inv(x, block_size=block_size),
                linalg.slogdet(x, block_size=block_size),
                linalg.lu_factor(x, block_size=block_size),
                linalg.cholesky(x, block_size=block_size),
            )
        np.testing.assert_array_equal(host(x.compute()), a)


@pytest.mark.parametrize("dtype", ["f8", "c16"])
@pytest.mark.parametrize("strip", [lapack.STRIP, 6])
def test_only_the_lower_triangle_is_read(scheduler, monkeypatch, dtype, strip):
    monkeypatch.setattr(lapack, "STRIP", strip)
    a = positive(20, dtype)
    noise = np.triu(np.full((20, 20), np.nan), 1)
    for chunks in (20, 9):
        for block_size in SIZES:
            lower = host(
                linalg.cholesky(on_gpu(a + noise, chunks), block_size=block_size).compute()
            )
            assert ratios.cholesky(a, lower) < THRESHOLD
            np.testing.assert_array_equal(lower, np.tril(lower))


def test_the_error_names_the_leading_minor(scheduler):
    a = positive(20)
    a[15, 15] = -1
    with pytest.raises(np.linalg.LinAlgError, match="leading minor of order 16"):
        linalg.cholesky(on_gpu(a)).compute()


def test_empty(scheduler):
    x = da.zeros((0, 0), chunks=-1).to_backend("cupy")
    assert host(linalg.inv(x).compute()).shape == (0, 0)
    assert host(linalg.cholesky(x).compute()).shape == (0, 0)
    assert host(linalg.solve(x, da.zeros((0, 2)).to_backend("cupy")).compute()).shape == (0, 2)
    assert float(linalg.det(x).compute()) == 1


def test_bits_do_not_depend_on_devices():
    a = positive(40)
    for function in (linalg.inv, linalg.cholesky):
        found = set()
        for devices in DEVICES:
            with gpuscheduler.Scheduler(devices):
                found.add(host(function(on_gpu(a), block_size=9).compute()).tobytes())
        assert len(found) == 1
