"""Singular values by random projection."""

from __future__ import annotations

import dask
import dask.array as da
import numpy as np
import pytest

import gpuscheduler
from gpuscheduler import linalg
from tests.support.matrices import tall_matrix


@pytest.mark.parametrize("dtype", ["f4", "f8", "c16"])
@pytest.mark.parametrize("chunks", [(100, 40), (300, 90), (60, 20)])
def test_a_matrix_of_low_rank_is_found_exactly(dtype, chunks):
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((300, 6)) @ rng.standard_normal((6, 90))).astype(dtype)
    with gpuscheduler.Scheduler("cpu:2"):
        u, s, vh = dask.compute(*linalg.svd_randomized(da.from_array(x, chunks=chunks), 6, seed=1))
    assert (u.shape, s.shape, vh.shape) == ((300, 6), (6,), (6, 90))
    assert (u.dtype, s.dtype, vh.dtype) == (x.dtype, x.real.dtype, x.dtype)
    exact = 2e-4 if dtype == "f4" else 1e-11
    np.testing.assert_allclose((u * s) @ vh, x, atol=exact)
    np.testing.assert_allclose(s, np.linalg.svd(x, compute_uv=False)[:6], rtol=1e-5)
    np.testing.assert_allclose(u.conj().T @ u, np.eye(6), atol=exact)


def test_the_error_is_that_of_the_bound():
    """Halko, Martinsson and Tropp, theorem 10.5: the mean over draws, and some room for it."""
    x = tall_matrix(400, 100, 1e3)
    values = np.linalg.svd(x, compute_uv=False)
    least = np.sqrt((values[8:] ** 2).sum())
    errors = {}
    for power in (0, 2):
        errors[power] = []
        for seed in range(8):
            lazy = linalg.svd_randomized(
                da.from_array(x, chunks=(100, 50)), 8, n_oversamples=9, n_power_iter=power,
                seed=seed,
            )  # fmt: skip
            u, s, vh = dask.compute(*lazy, scheduler="sync")
            errors[power].append(np.linalg.norm(x - (u * s) @ vh))
    assert np.mean(errors[0]) <= 1.25 * np.sqrt(1 + 8 / 8) * least
    assert least * (1 - 1e-12) <= np.mean(errors[2]) <= 1.02 * least


def test_small_integers_and_seeds():
    x = np.random.default_rng(2).integers(0, 256, (300, 80), dtype="u1")
    d = da.from_array(x, chunks=(100, 80))
    with gpuscheduler.Scheduler("cpu:2"):
        first, again, other = dask.compute(
            *[linalg.svd_randomized(d, 3, n_power_iter=3, seed=n).S for n in (5, 5, 6)]
        )
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    np.testing.assert_allclose(first[0], np.linalg.svd(x.astype(float))[1][0], rtol=1e-9)


def test_what_cannot_be_done_is_refused():
    x = da.ones((30, 20), chunks=10)
    with pytest.raises(ValueError, match="from 1 to 20"):
        linalg.svd_randomized(x, 21)
    with pytest.raises(ValueError, match="n_power_iter=-1"):
        linalg.svd_randomized(x, 2, n_power_iter=-1)
    with pytest.raises(ValueError, match="3 axes"):
        linalg.svd_randomized(da.ones((2, 3, 4)), 1)
