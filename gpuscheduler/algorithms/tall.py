"""QR, SVD, least squares and norms of matrices, by way of a tall matrix's QR.

The shorter side of a matrix should be one chunk; else it is rechunked. Results are lazy dask
arrays. Stacks of matrices are factored each by itself, by the library of their blocks.
"""

from __future__ import annotations

import math
from operator import getitem
from typing import Any, NamedTuple

import dask.array as da
import numpy as np
from dask._task_spec import Task, TaskRef
from dask.array.core import Array
from dask.base import tokenize

from . import tall_tasks
from .matrices import as_stack, call_on_stacks, inexact_dtype, real_part
from .tall_graph import SVDResult, add_layer, factorize, graph_value, tolerance
from .tall_kernel import adjoint, quiet, tall_qr


class QRResult(NamedTuple):
    """Q and R of a matrix, as lazy arrays."""

    Q: Array
    R: Array


class LstsqResult(NamedTuple):
    """The solution of a least-squares problem, as lazy arrays, in NumPy's order."""

    x: Array
    residuals: Array
    rank: Array
    s: Array


def qr(a: Any, mode: str = "reduced") -> Any:
    """Return Q and R of a matrix: a = Q R.

    Parameters
    ----------
    a : dask array of shape (m, n)
        Real or complex; integers are computed in float64. With m >= n the columns should be one
        chunk, with m < n the rows; else `a` is rechunked.
    mode : "reduced" or "r"
        "r" returns R alone.

    Returns
    -------
    QRResult
        Q of shape (m, k) and R of shape (k, n), k = min(m, n). R has no negative diagonal element
        where m >= n.

    Raises
    ------
    ValueError
        If `a` is no matrix, a side is of unknown length where it is needed, or for other modes.

    Notes
    -----
    For any finite matrix with m >= n, ‖I - QᴴQ‖ and ‖a - QR‖ / ‖a‖ are at most 30·n·√n·u.

    >>> import dask.array as da
    >>> x = da.random.default_rng(0).standard_normal((4000, 40), chunks=(1000, 40))
    >>> q, r = qr(x)
    >>> bool(abs(q.T @ q - da.eye(40)).max() < 1e-14), bool(abs(q @ r - x).max() < 1e-13)
    (True, True)
    """
    if mode not in ("reduced", "r"):
        raise ValueError(f"qr: mode={mode!r}: use 'reduced' or 'r'")
    if np.ndim(a) > 2:
        k = min(a.shape[-2:])
        out = _apply_to_each(
            tall_tasks.qr_of_stack, a, "(m,n)->(m,k),(k,n)", (False, False), {"k": k}
        )
        return out[1] if mode == "r" else QRResult(*out)
    a = _matrix(a, "qr")
    if _is_wide(a):
        q, r = _wide_qr(a)
        return r if mode == "r" else QRResult(q, r)
    found = factorize(a)
    return found.r() if mode == "r" else QRResult(found.q(), found.r())


def svd(a: Any, full_matrices: bool = False, compute_uv: bool = True) -> Any:
    """Return the singular value decomposition of a matrix: a = U @ diag(S) @ Vh.

    Parameters
    ----------
    a : dask array of shape (m, n)
        As for `qr`.
    full_matrices : False
        The reduced matrices, of k = min(m, n) columns and rows. Full ones are refused.
    compute_uv : bool
        Whether U and Vh are wanted too; else S is returned alone.

    Returns
    -------
    SVDResult
        U of shape (m, k), S of shape (k,) from the largest on, Vh of shape (k, n).

    Raises
    ------
    ValueError
        As for `qr`, and for ``full_matrices=True`` where m and n differ.
    numpy.linalg.LinAlgError
        When computed, where `a` has NaN or infinity.

    >>> import dask.array as da
    >>> u, s, vh = svd(da.diag(da.array([3.0, 5.0])))
    >>> s.compute()
    array([5., 3.])
    """
    if not compute_uv:
        return svdvals(a)
    if np.ndim(a) > 2 and not full_matrices:
        k, signature = min(a.shape[-2:]), "(m,n)->(m,k),(k),(k,n)"
        real = False, True, False
        return SVDResult(*_apply_to_each(tall_tasks.svd_of_stack, a, signature, real, {"k": k}))
    a = _matrix(a, "svd")
    if full_matrices and a.shape[0] != a.shape[1]:
        raise ValueError(
            f"svd: full_matrices=True makes a square matrix of the longer side of {a.shape}: use "
            "full_matrices=False"
        )
    if _is_wide(a):
        u, s, vh = factorize(adjoint(a)).svd()
        return SVDResult(adjoint(vh), s, adjoint(u))
    return factorize(a).svd()


def svdvals(x: Any) -> Array:
    """Return the singular values of a matrix, from the largest on.

    `x` is a dask array of shape (m, n), as for `qr`. The result has min(m, n) elements.

    >>> import dask.array as da
    >>> svdvals(da.ones((500, 40), chunks=(100, 40))).compute()[:1].round(6)
    array([141.421356])
    """
    if np.ndim(x) > 2:
        k = min(x.shape[-2:])
        out: Array = _apply_to_each(tall_tasks.svdvals_of_stack, x, "(m,n)->(k)", (True,), {"k": k})
        return out
    a = _matrix(x, "svdvals")
    return factorize(adjoint(a) if _is_wide(a) else a).svdvals()


def lstsq(a: Any, b: Any, rcond: float | None = None) -> LstsqResult:
    """Return the x of least length that minimizes ‖b - a x‖.

    Parameters
    ----------
    a : dask array of shape (m, n)
        As for `qr`.
    b : dask array of shape (m,) or (m, k)
        One or several right sides.
    rcond : float, optional
        Singular values of `a` up to this part of the largest count as zero. Default: the machine
        epsilon times max(m, n), as in NumPy.

    Returns
    -------
    LstsqResult
        x of shape (n,) or (n, k); the sums of squared residuals, of shape (1,) or (k,); the rank;
        the singular values. Other than NumPy's, residuals are there where `a` has not full rank;
        with m <= n they are empty.

    Raises
    ------
    ValueError
        As for `qr`, and if `b` has other rows than `a`.
    numpy.linalg.LinAlgError
        When computed, where `a` has NaN or infinity.

    >>> import dask.array as da
    >>> t = da.arange(1000, chunks=250) / 1000
    >>> x, *_ = lstsq(da.stack([t, t * 0 + 1], axis=1).rechunk({1: -1}), 3 * t - 1)
    >>> x.compute().round(12)
    array([ 3., -1.])
    """
    a, b = _matrix(a, "lstsq"), da.asarray(b)
    if b.ndim not in (1, 2) or not _is_same_length(b.shape[0], a.shape[0]):
        raise ValueError(
            f"lstsq: b has shape {b.shape} and a {a.shape}: b needs shape (m,) or (m, k), with the "
            "m rows of a"
        )
    right = b[:, None] if b.ndim == 1 else b
    right = right.astype(np.result_type(a.dtype, right.dtype, np.float32))
    a = a.astype(right.dtype)
    sides = a.shape
    if _is_wide(a):
        found = factorize(adjoint(a))
        x = found.solve_wide(right, rcond, sides)
        residuals = da.empty((0,), dtype=x.real.dtype)
    else:
        found = factorize(a)
        x = found.solve(right.rechunk({0: found.a.chunks[0], 1: -1}), rcond, sides)
        miss = abs(right - found.a @ x)
        residuals = (miss * miss).sum(axis=0) if sides[0] != sides[1] else da.empty(0, dtype=float)
    s = found.svdvals()
    rank = (s > tolerance(s.dtype, rcond, sides) * s.max()).sum() if s.size else s.sum()
    return LstsqResult(x[:, 0] if b.ndim == 1 else x, residuals, rank, s)


def pinv(a: Any, rcond: float | None = None, *, rtol: float | None = None) -> Array:
    """Return the Moore-Penrose inverse of a matrix.

    Parameters
    ----------
    a : dask array of shape (m, n)
        As for `qr`.
    rcond, rtol : float, optional
        Singular values up to this part of the largest count as zero. Default: the machine epsilon
        times max(m, n) for `rtol`, as in the array API.

    Returns
    -------
    dask array of shape (n, m)

    >>> import dask.array as da
    >>> x = da.random.default_rng(0).standard_normal((2000, 40), chunks=(500, 40))
    >>> bool(abs(pinv(x) @ x - da.eye(40)).max() < 1e-14)
    True
    """
    if rcond is not None and rtol is not None:
        raise ValueError("pinv: give rcond or rtol, not both")
    cutoff = rcond if rtol is None else rtol
    if np.ndim(a) > 2:
        out: Array = _apply_to_each(
            tall_tasks.pinv_of_stack, a, "(m,n)->(n,m)", (False,), rcond=cutoff
        )
        return out
    a = _matrix(a, "pinv")
    if _is_wide(a):
        return adjoint(factorize(adjoint(a)).pinv(cutoff, a.shape))
    return factorize(a).pinv(cutoff, a.shape)


def matrix_rank(A: Any, tol: float | None = None, *, rtol: float | None = None) -> Array:
    """Return the number of singular values that are above a tolerance, as an array of no axes.

    Parameters
    ----------
    A : dask array of shape (m, n)
        As for `qr`; a vector has rank 1, or 0 where it is zero.
    tol : float, optional
        The tolerance; default: `rtol` times the largest singular value.
    rtol : float, optional
        Default: the machine epsilon times max(m, n).

    >>> import dask.array as da
    >>> int(matrix_rank(da.ones((500, 40), chunks=(100, 40))))
    1
    """
    if tol is not None and rtol is not None:
        raise ValueError("matrix_rank: give tol or rtol, not both")
    a = da.asarray(A)
    if a.ndim < 2:
        out: Array = (a != 0).any().astype(int)
        return out
    s = svdvals(a)
    if tol is None:
        part = tolerance(s.dtype, rtol, a.shape[-2:])
        tol = part * s[..., :1]
    out = (s > tol).sum(axis=-1)
    return out


def cond(x: Any, p: Any = None) -> Array:
    """Return the condition number of a matrix in the 2-norm, as an array of no axes.

    `x` is a dask array of shape (m, n), as for `qr`. With `p` None or 2 it is the quotient of the
    largest and the smallest singular value; with -2, its inverse. Other norms need the inverse: the
    matrix becomes one block, and its library computes them.

    >>> import dask.array as da
    >>> float(cond(da.diag(da.array([8.0, 2.0]))))
    4.0
    """
    a = da.asarray(x)
    if p not in (None, 2, -2):
        out: Array = _apply_to_each(tall_tasks.cond_of_stack, a, "(m,n)->()", (True,), p=p)
        return out
    if not a.size:
        raise np.linalg.LinAlgError("cond: the matrix is empty")
    s = svdvals(a)
    above, below = (s[..., -1], s[..., 0]) if p == -2 else (s[..., 0], s[..., -1])
    out = da.map_blocks(_divide, above, below, dtype=s.dtype, meta=above._meta)
    return out


def norm(x: Any, ord: Any = None, axis: Any = None, keepdims: bool = False) -> Array:
    """Return the norm of a matrix or vector, of any of NumPy's orders.

    `x`, `ord`, `axis` and `keepdims` are as in `numpy.linalg.norm`. The 2-norm and the nuclear norm
    of a matrix come from its singular values; all others are Dask's.

    >>> import dask.array as da
    >>> x = da.diag(da.array([3.0, -4.0]))
    >>> float(norm(x)), float(norm(x, 2)), float(norm(x, "nuc"))
    (5.0, 4.0, 7.0)
    """
    x = da.asarray(x)
    axes = tuple(range(x.ndim)) if axis is None else axis
    pair = isinstance(axes, tuple) and len(axes) == 2
    if not (pair and ord in (2, -2, "nuc")):
        out: Array = da.linalg.norm(x, ord=ord, axis=axis, keepdims=keepdims)
        return out
    s = svdvals(da.moveaxis(x, axes, (-2, -1)))
    out = s.sum(axis=-1) if ord == "nuc" else s[..., 0] if ord == 2 else s[..., -1]
    return da.expand_dims(out, tuple(n % x.ndim for n in axes)) if keepdims else out


def matrix_norm(x: Any, /, *, keepdims: bool = False, ord: Any = "fro") -> Array:
    """Return the norms of matrices, along the last two axes of `x`, of any order of `norm`.

    >>> import dask.array as da
    >>> matrix_norm(da.ones((3, 2, 2), chunks=1)).compute()
    array([2., 2., 2.])
    """
    return norm(x, ord, (-2, -1), keepdims)


def vector_norm(x: Any, /, *, axis: Any = None, keepdims: bool = False, ord: Any = 2) -> Array:
    """Return the norms of vectors, along an axis or several axes, or of all elements.

    >>> import dask.array as da
    >>> vector_norm(da.array([[3.0, 4.0], [6.0, 8.0]]), axis=1).compute()
    array([ 5., 10.])
    """
    x = da.asarray(x)
    axes = tuple(range(x.ndim)) if axis is None else axis if isinstance(axis, tuple) else (axis,)
    axes = tuple(n % x.ndim for n in axes)
    rest = tuple(n for n in range(x.ndim) if n not in axes)
    flat = da.transpose(x, (*rest, *axes)).reshape((*[x.shape[n] for n in rest], -1))
    out: Array = da.linalg.norm(flat, ord=ord, axis=-1)
    return da.expand_dims(out, axes) if keepdims else out


def _apply_to_each(
    function: Any, x: Any, signature: str, real: tuple[bool, ...], sizes: Any = None, **more: Any
) -> Any:
    """Apply a function to each matrix of a stack; `real` says which of its values always are."""
    x = as_stack(function.__name__, x, square=False)
    x = x.astype(inexact_dtype(function.__name__, x.dtype))
    dtypes = [real_part(x.dtype) if is_real else x.dtype for is_real in real]
    return call_on_stacks(function, signature, x, dtypes=dtypes, sizes=sizes, **more)


def _wide_qr(a: Array) -> tuple[Array, Array]:
    """QR of a matrix with more columns than rows: Q of its first columns, and Qᴴ a."""
    m = int(a.shape[0])
    widths = a.chunks[1]
    first = next(i for i in range(1, len(widths) + 1) if sum(widths[:i]) >= m)
    merged = (sum(widths[:first]), *widths[first:])
    a = a.rechunk({0: -1, 1: merged})
    square = a[:, : merged[0]]
    q, r = _one_block_qr(square)
    if len(merged) == 1:
        return q, r
    return q, da.concatenate([r, adjoint(q) @ a[:, merged[0] :]], axis=1)


def _one_block_qr(a: Array) -> tuple[Array, Array]:
    """QR of a matrix of one block."""
    m, n = (int(side) for side in a.shape)
    k, token = min(m, n), tokenize("gpuscheduler-qr", a)
    pair = graph_value(f"qr-{token}", tall_qr, [TaskRef((a.name, 0, 0))], a)
    out = []
    for part, shape in enumerate([(m, k), (k, n)]):
        name = f"qr-{'qr'[part]}-{token}"
        task = Task((name, 0, 0), getitem, TaskRef(pair.key), part)
        graph = add_layer(name, {(name, 0, 0): task}, pair)
        out.append(Array(graph, name, tuple([(n,) for n in shape]), meta=a._meta))
    return out[0], out[1]


def _matrix(a: Any, what: str) -> Array:
    a = da.asarray(a)
    out: Array = a
    if a.ndim != 2:
        raise ValueError(f"{what}: the array has {a.ndim} axes: it must be a matrix, of 2 axes")
    if a.dtype.kind not in "fc":
        if a.dtype.kind not in "biu":
            raise TypeError(f"{what}: dtype {a.dtype} is no number: convert it with .astype(float)")
        out = a.astype(float)
    elif a.dtype.char not in "fdFD":
        if a.dtype.itemsize > 2:
            raise TypeError(f"{what}: dtype {a.dtype} is not supported: use .astype('f8') or 'c16'")
        out = a.astype(np.float32)
    unknown = [math.isnan(side) for side in a.shape]
    if unknown[1] or (unknown[0] and a.numblocks[1] > 1):
        raise ValueError(
            f"{what}: the array of shape {a.shape} has unknown chunk sizes: call "
            "x.compute_chunk_sizes() first"
        )
    return out


def _is_wide(a: Array) -> bool:
    """Whether a matrix has more columns than rows; one of unknown length counts as tall."""
    return bool(a.shape[0] < a.shape[1])


def _is_same_length(a: float, b: float) -> bool:
    return a == b or math.isnan(a) or math.isnan(b)


@quiet
def _divide(a: Any, b: Any) -> Any:
    return a / b
