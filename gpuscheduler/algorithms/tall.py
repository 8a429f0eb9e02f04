"""QR, SVD and least squares of matrices whose shorter side is one chunk, as graphs of blocks.

Each step is a Gram matrix of every block, their sum over a fixed tree, one small factorization, and
one pass over the blocks (`tall_kernel`). Tasks decide by the factor that they read whether there is
anything left to do, so the graph depends on shapes and chunks only. Where Cholesky factors break
down, the last tasks do Householder TSQR:

- J. Demmel, L. Grigori, M. Hoemmen, J. Langou: "Communication-optimal parallel and sequential QR
  and LU factorizations", SIAM J. Sci. Comput. 34 (2012).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import dask.array as da
import numpy as np
from dask._task_spec import List, Task, TaskRef
from dask.array.core import Array
from dask.array.utils import meta_from_array
from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph

from .blocks import array_module
from .tall_kernel import (
    Factor,
    adjoint,
    apply_factor,
    end_factor,
    householder_qr,
    make_gram,
    next_factor,
    quiet,
    solve_rows,
    start_factor,
    tall_qr,
    unit_roundoff,
)

#: Values that one task adds up.
ARITY = 8
#: Matrices of at most this many bytes are factored by one task.
SMALL = 2**24


class QRResult(NamedTuple):
    """Q and R of a matrix, as lazy arrays."""

    Q: Array
    R: Array


class SVDResult(NamedTuple):
    """A singular value decomposition, as lazy arrays."""

    U: Array
    S: Array
    Vh: Array


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
    a = _matrix(a, "qr")
    if _is_wide(a):
        q, r = _wide_qr(a)
        return r if mode == "r" else QRResult(q, r)
    found = _factorize(a)
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
    a = _matrix(a, "svd")
    if full_matrices and a.shape[0] != a.shape[1]:
        raise ValueError(
            f"svd: full_matrices=True makes a square matrix of the longer side of {a.shape}: use "
            "full_matrices=False"
        )
    if not compute_uv:
        return svdvals(a)
    if _is_wide(a):
        u, s, vh = _factorize(_adjoint_array(a)).svd()
        return SVDResult(_adjoint_array(vh), s, _adjoint_array(u))
    return _factorize(a).svd()


def svdvals(x: Any) -> Array:
    """Return the singular values of a matrix, from the largest on.

    `x` is a dask array of shape (m, n), as for `qr`. The result has min(m, n) elements.

    >>> import dask.array as da
    >>> svdvals(da.ones((500, 40), chunks=(100, 40))).compute()[:1].round(6)
    array([141.421356])
    """
    a = _matrix(x, "svdvals")
    return _factorize(_adjoint_array(a) if _is_wide(a) else a).svdvals()


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
        found = _factorize(_adjoint_array(a))
        x = found.solve_wide(right, rcond, sides)
        residuals = da.empty((0,), dtype=x.real.dtype)
    else:
        found = _factorize(a)
        x = found.solve(right.rechunk({0: found.a.chunks[0], 1: -1}), rcond, sides)
        miss = abs(right - found.a @ x)
        residuals = (miss * miss).sum(axis=0) if sides[0] != sides[1] else da.empty(0, dtype=float)
    s = found.svdvals()
    rank = (s > _tolerance(s.dtype, rcond, sides) * s.max()).sum() if s.size else s.sum()
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
    a = _matrix(a, "pinv")
    cutoff = rcond if rtol is None else rtol
    if _is_wide(a):
        return _adjoint_array(_factorize(_adjoint_array(a)).pinv(cutoff, a.shape))
    return _factorize(a).pinv(cutoff, a.shape)


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
        return (a != 0).any().astype(int)
    a = _matrix(a, "matrix_rank")
    s = svdvals(a)
    if tol is None:
        tol = _tolerance(s.dtype, rtol, a.shape) * s.max() if s.size else 0
    return (s > tol).sum()


def cond(x: Any, p: Any = None) -> Array:
    """Return the condition number of a matrix in the 2-norm, as an array of no axes.

    `x` is a dask array of shape (m, n), as for `qr`. With `p` None or 2 it is the quotient of the
    largest and the smallest singular value; with -2, its inverse.

    >>> import dask.array as da
    >>> float(cond(da.diag(da.array([8.0, 2.0]))))
    4.0
    """
    if p not in (None, 2, -2):
        raise NotImplementedError(
            f"cond: p={p!r} needs the inverse: use p=2, or norm(x, p) * norm(inv(x), p)"
        )
    s = svdvals(_matrix(x, "cond"))
    if not s.size:
        raise np.linalg.LinAlgError("cond: the matrix is empty")
    above, below = (s[-1], s[0]) if p == -2 else (s[0], s[-1])
    return da.map_blocks(_divide, above, below, dtype=s.dtype, meta=above._meta)


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
    pair = isinstance(axes, tuple) and len(axes) == 2 and x.ndim == 2
    if not (pair and ord in (2, -2, "nuc")):
        return da.linalg.norm(x, ord=ord, axis=axis, keepdims=keepdims)
    s = svdvals(x)
    out = s.sum() if ord == "nuc" else s[0] if ord == 2 else s[-1]
    return out[None, None] if keepdims else out


# ---- graphs


class _Value(NamedTuple):
    """A key of a graph: a value that is no block of an array."""

    graph: HighLevelGraph
    layer: str
    key: Any

    @property
    def dask(self) -> HighLevelGraph:
        return self.graph

    def __dask_layers__(self) -> tuple[str, ...]:
        return (self.layer,)

    def __dask_graph__(self) -> HighLevelGraph:
        return self.graph


def _add_layer(name: str, tasks: Mapping[Any, Task], *needs: Any) -> HighLevelGraph:
    return HighLevelGraph.from_collections(name, tasks, dependencies=list(needs))


def _value(name: str, function: Callable[..., Any], arguments: list[Any], *needs: Any) -> _Value:
    """One task that is no block of an array."""
    return _Value(_add_layer(name, {name: Task(name, function, *arguments)}, *needs), name, name)


def _add_up(name: str, keys: list[Any], of: Any) -> _Value:
    """The sum of values by a tree whose shape depends on their number only."""
    tasks: dict[Any, Task] = {}
    level = 0
    while len(keys) > 1 or not level:
        above = []
        for n in range(0, len(keys), ARITY):
            key = (name, level, n // ARITY)
            tasks[key] = Task(key, add_known, List(*[TaskRef(k) for k in keys[n : n + ARITY]]))
            above.append(key)
        keys, level = above, level + 1
    return _Value(_add_layer(name, tasks, of), name, keys[0])


class _Factored:
    """The QR factorization of a matrix `a` of blocks of rows.

    `blocks` is the last Q that is stored; `factor` says how its blocks become Q, and `stack` has
    what Householder TSQR makes where the Cholesky factors broke down.
    """

    def __init__(self, a: Array, token: str, blocks: Array, factor: _Value, stack: _Value):
        self.a, self.token, self.blocks, self.factor, self.stack = a, token, blocks, factor, stack
        self.n = int(a.shape[1])

    def _small(
        self, what: str, function: Callable[..., Any], arguments: list[Any], *needs: Any,
        shape: tuple[int, ...], dtype: Any = None,
    ) -> Array:  # fmt: skip
        """An array of one block that one task makes."""
        name = f"{what}-{self.token}"
        key = (name, *[0] * len(shape))
        graph = _add_layer(name, {key: Task(key, function, *arguments)}, *needs)
        dtype = np.dtype(dtype or self.a.dtype)
        like = self.a._meta if dtype.kind == "c" else self.a._meta.real
        meta = meta_from_array(like, len(shape), dtype=dtype)
        return Array(graph, name, tuple([(n,) for n in shape]), meta=meta)

    def _by_block(
        self, what: str, function: Callable[..., Any], arguments: list[Any], *needs: Any,
        rows: bool = True,
    ) -> Array:  # fmt: skip
        """An array of a block for each block of rows: (m, n), or (n, m) without `rows`."""
        name, heights = f"{what}-{self.token}", self.a.chunks[0]
        tasks: dict[Any, Task] = {}
        for i in range(len(heights)):
            key = (name, i, 0) if rows else (name, 0, i)
            block = TaskRef((self.blocks.name, i, 0))
            more = [TaskRef((v.name, i, 0)) if isinstance(v, Array) else v for v in arguments]
            tasks[key] = Task(
                key, function, block, TaskRef(self.factor.key), TaskRef(self.stack.key), i, *more
            )
        arrays = [v for v in arguments if isinstance(v, Array)]
        graph = _add_layer(name, tasks, self.blocks, self.factor, self.stack, *arrays, *needs)
        chunks = (heights, (self.n,)) if rows else ((self.n,), heights)
        return Array(graph, name, chunks, meta=self.a._meta)

    def q(self) -> Array:
        return self._by_block("qr-q", end_q, [])

    def r(self) -> Array:
        read = [TaskRef(self.factor.key), TaskRef(self.stack.key), self.a.dtype.str]
        return self._small("qr-r", end_r, read, self.factor, self.stack, shape=(self.n, self.n))

    def _svd(self) -> _Value:
        name = f"svd-of-r-{self.token}"
        read = [TaskRef(self.factor.key), TaskRef(self.stack.key)]
        return _value(name, svd_of_r, read, self.factor, self.stack)

    def svd(self) -> SVDResult:
        parts, n = self._svd(), self.n
        u = self._by_block("svd-u", end_u, [TaskRef(parts.key)], parts)
        vh = [TaskRef(parts.key), 2, self.a.dtype.str]
        vh = self._small("svd-vh", take_part, vh, parts, shape=(n, n))
        return SVDResult(u, self.svdvals(), vh)

    def svdvals(self) -> Array:
        parts, real = self._svd(), self.a.real.dtype
        read = [TaskRef(parts.key), 1, real.str]
        return self._small("svd-s", take_part, read, parts, shape=(self.n,), dtype=real)

    def pinv(self, rcond: float | None, sides: tuple[int, ...]) -> Array:
        parts = self._svd()
        cutoff = _tolerance(self.a.dtype, rcond, sides)
        name = f"pinv-{tokenize(cutoff)}"
        return self._by_block(name, end_pinv, [TaskRef(parts.key), cutoff], parts, rows=False)

    def solve(self, b: Array, rcond: float | None, sides: tuple[int, ...]) -> Array:
        """The solutions x of a x = b for a tall matrix; `b` has its chunks."""
        parts, cutoff = self._svd(), _tolerance(self.a.dtype, rcond, sides)
        token = tokenize(b, cutoff)
        projected = self._by_block(f"lstsq-qtb-{token}", project_rows, [b])
        keys = [(projected.name, i, 0) for i in range(projected.numblocks[0])]
        total = _add_up(f"lstsq-sum-{token}-{self.token}", keys, projected)
        read = [TaskRef(parts.key), TaskRef(total.key), cutoff, self.a.dtype.str]
        shape = (self.n, int(b.shape[1]))
        return self._small(f"lstsq-{token}", solve_by_svd, read, parts, total, shape=shape)

    def solve_wide(self, b: Array, rcond: float | None, sides: tuple[int, ...]) -> Array:
        """The shortest solutions x of aᴴ x = b, for the adjoint of the tall matrix `a`."""
        parts, cutoff = self._svd(), _tolerance(self.a.dtype, rcond, sides)
        b = b.rechunk((-1, -1))
        name = f"lstsq-inner-{tokenize(b, cutoff)}"
        read = [TaskRef(parts.key), TaskRef((b.name, 0, 0)), cutoff]
        inner = _value(f"{name}-{self.token}", solve_adjoint, read, parts, b)
        out = self._by_block(f"lstsq-{name}", end_product, [TaskRef(inner.key)], inner)
        heights = self.a.chunks[0]
        return Array(out.dask, out.name, (heights, (int(b.shape[1]),)), meta=self.a._meta)


def _factorize(a: Array) -> _Factored:
    """QR of a matrix of at least as many rows as columns."""
    a = _in_rows(a)
    token, n = tokenize("gpuscheduler-qr", a), int(a.shape[1])
    count, unit = a.numblocks[0], unit_roundoff(a.dtype)

    def blocks_of(what: str, of: Array, factor: _Value) -> Array:
        name = f"{what}-{token}"
        tasks = {}
        for i in range(count):
            key = (name, i, 0)
            tasks[key] = Task(key, apply_factor, TaskRef((of.name, i, 0)), TaskRef(factor.key))
        return Array(_add_layer(name, tasks, of, factor), name, a.chunks, meta=a._meta)

    def grams_of(what: str, of: Array, factor: _Value | None) -> _Value:
        name = f"{what}-{token}"
        more = [] if factor is None else [TaskRef(factor.key)]
        function = make_gram if factor is None else make_next_gram
        keys = [(name, i, 0) for i in range(count)]
        tasks = {k: Task(k, function, TaskRef((of.name, *k[1:])), *more) for k in keys}
        graph = _add_layer(name, tasks, *([of] if factor is None else [of, factor]))
        dtype = np.result_type(a.dtype, np.float64)
        grams = Array(
            graph, name, ((n,) * count, (n,)), meta=meta_from_array(a._meta, 2, dtype=dtype)
        )
        return _add_up(f"{what}-sum-{token}", keys, grams)

    def factor_of(what: str, function: Callable[..., Any], total: _Value, more: Any) -> _Value:
        read = [TaskRef(total.key), TaskRef(more.key) if isinstance(more, _Value) else more]
        needs = [total, more] if isinstance(more, _Value) else [total]
        return _value(f"{what}-{token}", function, read, *needs)

    if count == 1:
        pair = _value(f"qr-{token}", tall_qr, [TaskRef((a.name, 0, 0))], a)
        name = f"qr-q0-{token}"
        part = Task((name, 0, 0), take_item, TaskRef(pair.key), 0)
        blocks = Array(_add_layer(name, {(name, 0, 0): part}, pair), name, a.chunks, meta=a._meta)
        factor = _value(f"qr-factor-{token}", keep_factor, [TaskRef(pair.key), unit], pair)
        return _Factored(a, token, blocks, factor, _value(f"qr-stack-{token}", make_none, []))
    first = factor_of("qr-factor1", start_factor, grams_of("qr-gram1", a, None), unit)
    q1 = blocks_of("qr-q1", a, first)
    second = factor_of("qr-factor2", next_factor, grams_of("qr-gram2", q1, first), first)
    q2 = blocks_of("qr-q2", q1, second)
    third = factor_of("qr-factor3", end_factor, grams_of("qr-gram3", q2, second), second)
    name = f"qr-fallback-{token}"
    keys = [(name, i) for i in range(count)]
    tasks = {k: Task(k, fallback_r, TaskRef((q2.name, k[1], 0)), TaskRef(third.key)) for k in keys}
    below = _Value(_add_layer(name, tasks, q2, third), name, None)
    read = [TaskRef(third.key), List(*map(TaskRef, keys))]
    stack = _value(f"qr-stack-{token}", stack_r, read, third, below)
    return _Factored(a, token, q2, third, stack)


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
    return q, da.concatenate([r, _adjoint_array(q) @ a[:, merged[0] :]], axis=1)


def _one_block_qr(a: Array) -> tuple[Array, Array]:
    """QR of a matrix of one block."""
    m, n = (int(side) for side in a.shape)
    k, token = min(m, n), tokenize("gpuscheduler-qr", a)
    pair = _value(f"qr-{token}", tall_qr, [TaskRef((a.name, 0, 0))], a)
    out = []
    for part, shape in enumerate([(m, k), (k, n)]):
        name = f"qr-{'qr'[part]}-{token}"
        task = Task((name, 0, 0), take_item, TaskRef(pair.key), part)
        graph = _add_layer(name, {(name, 0, 0): task}, pair)
        out.append(Array(graph, name, tuple([(n,) for n in shape]), meta=a._meta))
    return out[0], out[1]


def _matrix(a: Any, what: str) -> Array:
    a = da.asarray(a)
    if a.ndim != 2:
        raise ValueError(f"{what}: the array has {a.ndim} axes: it must be a matrix, of 2 axes")
    if a.dtype.kind not in "fc":
        if a.dtype.kind not in "biu":
            raise TypeError(f"{what}: dtype {a.dtype} is no number: convert it with .astype(float)")
        a = a.astype(float)
    elif a.dtype.char not in "fdFD":
        if a.dtype.itemsize > 2:
            raise TypeError(f"{what}: dtype {a.dtype} is not supported: use .astype('f8') or 'c16'")
        a = a.astype(np.float32)
    unknown = [math.isnan(side) for side in a.shape]
    if unknown[1] or (unknown[0] and a.numblocks[1] > 1):
        raise ValueError(
            f"{what}: the array of shape {a.shape} has unknown chunk sizes: call "
            "x.compute_chunk_sizes() first"
        )
    return a


def _is_wide(a: Array) -> bool:
    """Whether a matrix has more columns than rows; one of unknown length counts as tall."""
    return bool(a.shape[0] < a.shape[1])


def _is_same_length(a: float, b: float) -> bool:
    return a == b or math.isnan(a) or math.isnan(b)


def _in_rows(a: Array) -> Array:
    """The matrix in blocks of whole rows, one block where it is small."""
    if math.isnan(a.shape[0]):
        return a
    m, n = (int(side) for side in a.shape)
    if a.nbytes <= SMALL:
        return a.rechunk((-1, -1))
    if a.numblocks[1] == 1:
        return a
    rows = max(1, n, max(a.chunks[0]) * max(a.chunks[1]) // max(1, n))
    return a.rechunk({0: min(m, rows), 1: -1})


def _adjoint_array(a: Array) -> Array:
    return a.conj().T if a.dtype.kind == "c" else a.T


def _tolerance(dtype: Any, rcond: float | None, sides: tuple[float, ...]) -> float:
    """What part of the largest singular value counts as zero."""
    if rcond is not None:
        return float(rcond)
    known = [side for side in sides if not math.isnan(side)]
    return float(np.finfo(dtype).eps) * max(known)


# ---- tasks


def make_next_gram(x: Any, factor: Factor) -> Any:
    """Return the Gram matrix of a block; None where the factorization is over."""
    return None if factor["done"] or factor["how"] == "failed" else make_gram(x)


def add_known(values: list[Any]) -> Any:
    """Add arrays up in their order, without those that are None; None where there is none."""
    known = [v for v in values if v is not None]
    if len(known) < 2:
        return known[0] if known else None
    total = known[0] + known[1]
    for value in known[2:]:
        total += value
    return total


def make_none() -> None:
    """Return None: what nobody needs."""


def take_item(values: Any, part: int) -> Any:
    """Return one of several values."""
    return values[part]


def keep_factor(pair: tuple[Any, Any], unit: float) -> Factor:
    """Return the factor that says that a block's Q is what it should be."""
    _check_rows(pair[1])
    return {"how": "keep", "factor": None, "r": pair[1], "done": True, "unit": unit}


def fallback_r(x: Any, factor: Factor) -> Any:
    """Return the Householder R of a block where Cholesky factors broke down; else None."""
    return householder_qr(x)[1] if factor["how"] == "failed" else None


@quiet
def stack_r(factor: Factor, parts: list[Any]) -> Any:
    """Return the last step of TSQR where Cholesky factors broke down; else None.

    That is a dict of R and of a small Q for each block.
    """
    if factor["how"] != "failed":
        return None
    xp = array_module(parts[0])
    ends = np.cumsum([len(p) for p in parts])
    q, r = householder_qr(xp.concatenate(parts))
    _check_rows(r)
    before = factor["r"]
    if before is not None:
        r = xp.triu(r.astype(before.dtype) @ before)
    return {"q": [q[e - len(p) : e] for e, p in zip(ends, parts, strict=True)], "r": r}


def _check_rows(r: Any) -> None:
    if len(r) < r.shape[1]:
        raise ValueError(
            f"a matrix of unknown length has {len(r)} rows and {r.shape[1]} columns, and must not "
            "have fewer rows: call x.compute_chunk_sizes() first"
        )


@quiet
def end_q(x: Any, factor: Factor, stack: Any, i: int) -> Any:
    """Return block i of Q."""
    return householder_qr(x)[0] @ stack["q"][i] if stack is not None else apply_factor(x, factor)


def end_r(factor: Factor, stack: Any, dtype: str) -> Any:
    """Return R."""
    return (factor["r"] if stack is None else stack["r"]).astype(dtype)


def svd_of_r(factor: Factor, stack: Any) -> tuple[Any, Any, Any]:
    """Return U, the singular values and Vᴴ of R."""
    r = factor["r"] if stack is None else stack["r"]
    xp = array_module(r)
    if not bool(xp.isfinite(r).all()):
        raise np.linalg.LinAlgError("SVD did not converge: the matrix has NaN or infinity")
    u, s, vh = xp.linalg.svd(r, full_matrices=False)
    return u, s, vh


def take_part(parts: tuple[Any, Any, Any], part: int, dtype: str) -> Any:
    """Return one of the matrices of an SVD."""
    return parts[part].astype(dtype)


@quiet
def end_product(x: Any, factor: Factor, stack: Any, i: int, matrix: Any) -> Any:
    """Return block i of Q @ matrix, in one pass where the factor is an inverse."""
    matrix = matrix.astype(x.dtype)
    if stack is not None:
        return householder_qr(x)[0] @ (stack["q"][i] @ matrix)
    if factor["how"] == "inverse":
        return x @ (factor["factor"] @ matrix).astype(x.dtype)
    if factor["how"] == "solve":
        x = solve_rows(x, factor["factor"].astype(x.dtype))
    return x @ matrix


def end_u(x: Any, factor: Factor, stack: Any, i: int, parts: tuple[Any, Any, Any]) -> Any:
    """Return block i of U."""
    return end_product(x, factor, stack, i, parts[0])


def end_pinv(
    x: Any, factor: Factor, stack: Any, i: int, parts: tuple[Any, Any, Any], cutoff: float
) -> Any:
    """Return block i of the pseudoinverse."""
    u, s, vh = parts
    return adjoint(end_product(x, factor, stack, i, u * _invert_values(s, cutoff) @ vh))


@quiet
def project_rows(x: Any, factor: Factor, stack: Any, i: int, b: Any) -> Any:
    """Return what block i adds to Qᴴ b."""
    return adjoint(end_q(x, factor, stack, i)) @ b


def solve_by_svd(parts: tuple[Any, Any, Any], b: Any, cutoff: float, dtype: str) -> Any:
    """Return the shortest x that minimizes ‖b - R x‖, by the SVD of R."""
    u, s, vh = parts
    return (adjoint(vh) @ (_invert_values(s, cutoff)[:, None] * (adjoint(u) @ b))).astype(dtype)


def solve_adjoint(parts: tuple[Any, Any, Any], b: Any, cutoff: float) -> Any:
    """Return y such that Q y is the shortest x that minimizes ‖b - (Q R)ᴴ x‖."""
    u, s, vh = parts
    return u @ (_invert_values(s, cutoff)[:, None] * (vh @ b))


def _invert_values(s: Any, cutoff: float) -> Any:
    """Inverses of singular values, and 0 for those up to `cutoff` times the largest."""
    xp = array_module(s)
    if not s.size:
        return s
    known = s > cutoff * s[0]
    return xp.where(known, 1 / xp.where(known, s, 1), 0)


@quiet
def _divide(a: Any, b: Any) -> Any:
    return a / b
