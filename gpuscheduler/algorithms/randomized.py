"""The largest singular values and vectors of a matrix by random projection.

N. Halko, P. G. Martinsson, J. A. Tropp: "Finding structure with randomness: probabilistic
algorithms for constructing approximate matrix decompositions", SIAM Review 53 (2011), algorithms
4.4 and 5.1.
"""

from __future__ import annotations

from typing import Any

import dask.array as da
import numpy as np
from dask import config

from .blocks import array_module
from .matrices import as_stack, inexact_dtype
from .tall import qr, svd
from .tall_graph import SVDResult
from .tall_kernel import adjoint


def svd_randomized(
    a: Any, k: int, n_oversamples: int = 10, n_power_iter: int = 0, *, seed: Any = None
) -> SVDResult:
    """Return about the k largest singular values of a matrix, and their vectors.

    Parameters
    ----------
    a : dask array of shape (m, n)
        In chunks of any shape. Small integers are not converted on GPUs.
    k : int
        How many singular values; at most min(m, n).
    n_oversamples : int
        Random directions beyond k: more are more exact.
    n_power_iter : int
        Passes with `a` and its adjoint that make the result more exact, where singular values
        decrease slowly. Each reads `a` twice; without any it is read twice in all.
    seed : optional
        As for `dask.array.random.default_rng`.

    Returns
    -------
    SVDResult
        U of shape (m, k), S of shape (k,), Vh of shape (k, n). The expected error of the
        approximation in the Frobenius norm is at most sqrt(1 + k / (n_oversamples - 1)) times the
        least possible one.

    Raises
    ------
    ValueError
        If k or a number of the others is too small or too large, or `a` has unknown chunks.

    >>> import dask.array as da
    >>> x = da.ones((600, 400), chunks=200)
    >>> svd_randomized(x, 1, seed=0).S.compute().round(6)
    array([489.897949])
    """
    a = as_stack("svd_randomized", a, square=False)
    if a.ndim != 2:
        raise ValueError(f"svd_randomized: the array has {a.ndim} axes: it must be a matrix")
    m, n = a.shape
    if not 1 <= k <= min(m, n):
        raise ValueError(f"svd_randomized: k={k!r}: use a whole number from 1 to {min(m, n)}")
    for name, value in (("n_oversamples", n_oversamples), ("n_power_iter", n_power_iter)):
        if value < 0:
            raise ValueError(f"svd_randomized: {name}={value!r}: use a whole number from 0")
    width = min(k + n_oversamples, m, n)
    dtype = inexact_dtype("svd_randomized", a.dtype)
    real = np.empty(0, dtype).real.dtype
    if a.dtype.kind in "iu" and a.dtype.itemsize > 2:
        a = a.astype(dtype)
    with config.set({"array.backend": array_module(a._meta).__name__}):
        rng = da.random.default_rng(seed)
        directions = rng.standard_normal((n, width), chunks=(a.chunks[1], width)).astype(real)
    q = qr(a @ directions).Q
    for _ in range(n_power_iter):
        other = qr(adjoint(adjoint(q) @ a)).Q  # in order: the factors stay orthonormal
        q = qr(a @ other).Q
    u, s, vh = svd(adjoint(q) @ a)
    return SVDResult((q @ u)[:, :k], s[:k], vh[:k])
