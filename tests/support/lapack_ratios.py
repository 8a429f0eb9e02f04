"""Residuals of matrix functions in the units of LAPACK's tests: up to 30 is right.

u is the unit roundoff, norms are 1-norms, and arithmetic on the way is in twice the precision where
there is one. From LAPACK's Working Note 41.
"""

import numpy as np

THRESHOLD = 30


def unit(*arrays):
    return np.finfo(np.result_type(*arrays)).eps / 2


def norm(a):
    """The 1-norm of a matrix or vector."""
    a = np.asarray(a)
    return float(np.abs(a).sum(axis=0).max()) if a.size else 0.0


def wide(a):
    return np.asarray(a).astype("c16" if np.asarray(a).dtype.kind == "c" else "f8")


def ratio(residual, *scale):
    below = float(np.prod([float(s) for s in scale]))
    size = norm(residual)
    return size / below if below else (0.0 if size == 0 else np.inf)


def solve(a, x, b):
    u = unit(x)
    a, x, b = map(wide, (a, x, b))
    if x.ndim == 1:
        x, b = x[:, None], b[:, None]
    columns = zip(x.T, b.T, strict=True)
    return max([ratio(right - a @ y, norm(a), norm(y), u) for y, right in columns] + [0.0])


def inverse(a, inv):
    u = unit(inv)
    a, inv = map(wide, (a, inv))
    return ratio(np.eye(len(a)) - a @ inv, len(a), norm(a), norm(inv), u)


def lu(a, lu, pivots):
    m, n = a.shape
    u = unit(lu)
    a, lu = map(wide, (a, lu))
    k = min(m, n)
    lower = np.tril(lu[:, :k], -1) + np.eye(m, k)
    upper = np.triu(lu[:k])
    order = np.arange(m)
    for i, p in enumerate(pivots):
        order[[i, p]] = order[[p, i]]
    return ratio(a[order] - lower @ upper, n, norm(a), u)


def cholesky(a, lower):
    u = unit(lower)
    a, lower = map(wide, (a, lower))
    return ratio(a - lower @ lower.conj().T, len(a), norm(a), u)


def eigh(a, w, v):
    u = unit(v)
    a, w, v = map(wide, (a, w, v))
    n = len(a)
    left = ratio(a @ v - v * w, n, norm(a), u)
    return max(left, ratio(np.eye(n) - v.conj().T @ v, n, u))


def eig(a, w, v):
    u = unit(v)
    a, w, v = map(wide, (a, w, v))
    return ratio(a @ v - v * w, len(a), norm(a), norm(v), u)
