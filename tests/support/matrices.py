"""Matrices for tests of linear algebra, and the promise of tall QR."""

import numpy as np

from gpuscheduler.algorithms.tall_kernel import unit_roundoff

#: The factor of the promise: 30·n·√n·u.
PROMISE = 30


def tall_matrix(m, n, condition, dtype="f8", seed=0):
    """A matrix with singular values from 1 to 1 / condition."""
    rng = np.random.default_rng(seed)

    def draw(rows, columns):
        x = rng.standard_normal((rows, columns))
        return x + 1j * rng.standard_normal((rows, columns)) if np.dtype(dtype).kind == "c" else x

    u, _ = np.linalg.qr(draw(m, n))
    v, _ = np.linalg.qr(draw(n, n))
    return ((u * np.logspace(0, -np.log10(condition), n)) @ v).astype(dtype)


def check_qr(x, q, r, promise=PROMISE, signs=True):
    """The promise, and that R is triangular, with `signs` without a negative diagonal element."""
    n, unit = x.shape[1], unit_roundoff(x.dtype)
    assert q.dtype == r.dtype == x.dtype
    assert (r.diagonal().real >= 0).all() or not signs
    assert not np.tril(r, -1).any()
    double = np.result_type(x.dtype, "f8")
    x, q, r = (a.astype(double) for a in (x, q, r))
    most = promise * n * n**0.5 * unit
    assert np.linalg.norm(q.conj().T @ q - np.eye(n), 2) <= most
    scale = abs(x).max() or 1.0
    x, r = x / scale, r / scale
    assert np.linalg.norm(x - q @ r, 2) <= most * np.linalg.norm(x, 2)


def square_matrix(n, dtype="f8", seed=0):
    """Normal numbers; integers are of up to about 30."""
    rng = np.random.default_rng(seed)
    a = rng.standard_normal((n, n)) * (9 if np.dtype(dtype).kind in "iu" else 1)
    if np.dtype(dtype).kind == "c":
        a = a + 1j * rng.standard_normal((n, n))
    return a.astype(dtype)
