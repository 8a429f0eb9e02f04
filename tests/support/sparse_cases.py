"""Operations on a sparse array that NumPy does on the dense one, for CPU and GPU devices."""

import dask.array as da
import numpy as np
import scipy.sparse

RANDOM = np.random.default_rng(0)
M, N = 40, 30
V, W = RANDOM.random(N), RANDOM.random(M)
COLUMNS, ROWS = RANDOM.random((N, 5)), RANDOM.random((6, M))
WEIGHTS = RANDOM.random((M, N))
MASK = np.arange(M) % 3 == 0


def matrix(density=0.2, seed=0):
    return scipy.sparse.random_array((M, N), density=density, format="csr", rng=seed) * 2 - (
        scipy.sparse.random_array((M, N), density=density, format="csr", rng=seed + 1)
    )


#: By name, a function of a dask array and of `of`, which makes a dense dask array of another
#: operand; the dense arrays are NumPy's for the expected value.
OPERATIONS = {
    "@ vector": lambda s, of: s @ of(V, 7),
    "vector @": lambda s, of: of(W, 11) @ s,
    "@ matrix": lambda s, of: s @ of(COLUMNS, (7, 2)),
    "matrix @": lambda s, of: of(ROWS, (3, 9)) @ s,
    "V.T @ s.T": lambda s, of: of(COLUMNS, (7, 2)).T @ s.T,
    "s @ s.T": lambda s, of: s @ s.T,
    "s.T @ s": lambda s, of: s.T @ s,
    "s @ s.T @ s @ v": lambda s, of: s @ s.T @ (s @ of(V, 7)),
    "dot": lambda s, of: s.dot(of(V, 5)),
    "dot from the left": lambda s, of: np.dot(of(ROWS, (3, 9)), s),
    "tensordot": lambda s, of: np.tensordot(s, of(COLUMNS, (7, 2)), axes=((1,), (0,))),
    "tensordot of both": lambda s, of: np.tensordot(s, s, axes=((1,), (1,))),
    "sum": lambda s, of: s.sum(),
    "sum of columns": lambda s, of: s.sum(axis=0),
    "sum of rows, kept": lambda s, of: s.sum(axis=1, keepdims=True),
    "mean": lambda s, of: s.mean(),
    "mean of columns": lambda s, of: s.mean(axis=0),
    "mean of rows": lambda s, of: s.mean(axis=1),
    "var": lambda s, of: s.var(),
    "var of columns": lambda s, of: s.var(axis=0),
    "std of rows": lambda s, of: s.std(axis=1),
    "max": lambda s, of: s.max(),
    "max of columns": lambda s, of: s.max(axis=0),
    "min of rows": lambda s, of: s.min(axis=1),
    "norm": lambda s, of: np.linalg.norm(s),
    "norm 1": lambda s, of: np.linalg.norm(s, 1),
    "norm inf": lambda s, of: np.linalg.norm(s, np.inf),
    "norm of rows": lambda s, of: np.linalg.norm(s, axis=1),
    "any": lambda s, of: s.any(axis=0),
    "concatenate": lambda s, of: np.concatenate([s, s * 2]),
    "concatenate columns": lambda s, of: np.concatenate([s, s], axis=1),
    "slice": lambda s, of: s[3:20, 5:],
    "every third row": lambda s, of: s[::3],
    "backwards": lambda s, of: s[::-1],
    "a row": lambda s, of: s[7],
    "a column": lambda s, of: s[:, 4],
    "an element": lambda s, of: s[3, 4],
    "no rows": lambda s, of: s[:0],
    "a list of rows": lambda s, of: s[[5, 1, 30, 1]],
    "a list of columns": lambda s, of: s[:, [5, 1, 20, 1]],
    "a mask of rows": lambda s, of: s[MASK],
    "+": lambda s, of: s + s,
    "-": lambda s, of: s - s * 0.5,
    "* sparse": lambda s, of: s * (s * 2),
    "* number": lambda s, of: 2 * s / 3,
    "* row": lambda s, of: s * of(V, 8)[None, :],
    "* dense": lambda s, of: s * of(WEIGHTS, 9),
    "dense *": lambda s, of: of(WEIGHTS, 9) * s,
    "/ dense": lambda s, of: s / of(WEIGHTS + 1, 9),
    "+ dense": lambda s, of: s + of(WEIGHTS, 8),
    "dense -": lambda s, of: of(WEIGHTS, 8) - s,
    "- mean": lambda s, of: s - s.mean(axis=0),
    "abs": lambda s, of: abs(s),
    "T": lambda s, of: s.T,
    "astype": lambda s, of: s.astype("f4"),
    "sqrt of abs": lambda s, of: np.sqrt(abs(s)),
    "sin": lambda s, of: np.sin(s),
    "**": lambda s, of: s**2,
    ">": lambda s, of: s > 0.5,
    "!= 0": lambda s, of: (s != 0).sum(axis=0),
    "maximum": lambda s, of: np.maximum(s, s * 2),
    "maximum with 0": lambda s, of: np.maximum(s, 0),
}


def dask_of(x, chunks):
    return da.from_array(x, chunks=chunks)


def as_dense(value):
    """A result on the host, dense."""
    value = getattr(value, "matrix", value)
    value = value.get() if hasattr(value, "get") else value
    return value.toarray() if scipy.sparse.issparse(value) else np.asarray(value)
