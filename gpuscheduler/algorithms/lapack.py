"""Factorizations of one matrix by the library of its type: LAPACK, cuBLAS and cuSOLVER.

Every failure is `numpy.linalg.LinAlgError`. CuPy does not look for failures by default, because
looking waits for the device; these functions look, once for each call.

From CuPy's private parts: none. `cupyx.lapack.gesv` and `cupy.cuda.cusolver` are not in CuPy's
reference; they were seen in CuPy 13 and 14.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .blocks import array_module

SINGULAR = "Singular matrix"
INDEFINITE = "Matrix is not positive definite"
#: How the names of cuSOLVER's functions begin, by dtype.
LETTERS = {"f": "s", "d": "d", "F": "c", "D": "z"}
NOT_CONVERGED = "Eigenvalues did not converge"
#: Rows of a matrix whose transposes are written together.
STRIP = 1024


class Panel(NamedTuple):
    """Block columns of a matrix, factored."""

    column: Any  # all rows: U on and above the diagonal, L below it without its unit diagonal
    order: Any  # where each row comes from, as int64 in the memory of the column
    pivots: Any  # the row with which each was exchanged, of the whole matrix, as int32
    info: int  # 0, or the first exactly zero pivot, counted from 1


def _call_cupy(message: str, function: Callable[..., Any], *arrays: Any, **options: Any) -> Any:
    """Look for failures of a function of CuPy's, and report them in NumPy's words.

    No context manager: from Python 3.12 on, a generator that raises another error than it caught
    keeps the frames of both, and their arrays, until Python looks for garbage.
    """
    import cupyx

    try:
        with cupyx.errstate(linalg="raise"):
            return function(*arrays, **options)
    except np.linalg.LinAlgError as error:
        raise np.linalg.LinAlgError(message) from error


def call(function: Callable[..., Any], message: str, *arrays: Any, **options: Any) -> Any:
    """Call a function of `numpy.linalg`, or CuPy's of the same name, on arrays of either.

    >>> call(np.linalg.inv, SINGULAR, np.diag([1.0, 2.0])).tolist()
    [[1.0, 0.0], [0.0, 0.5]]
    """
    xp = array_module(arrays[0])
    if xp is np:
        return function(*arrays, **options)
    return _call_cupy(message, getattr(xp.linalg, function.__name__), *arrays, **options)


def solve(a: Any, b: Any) -> Any:
    """Solve `a @ x = b` for matrices `(n, n)` and `(n, k)`. May overwrite arrays of CuPy.

    >>> solve(np.diag([1.0, 2.0]), np.array([[1.0], [1.0]])).tolist()
    [[1.0], [0.5]]
    """
    if array_module(a) is np:
        return np.linalg.solve(a, b)
    if not b.size:
        return b
    from cupyx import lapack

    if not (a.flags.c_contiguous or a.flags.f_contiguous):
        a = a.copy(order="C")
    b = b.copy(order="F") if not b.flags.f_contiguous else b
    _call_cupy(SINGULAR, lapack.gesv, a, b)
    return b


def invert(a: Any) -> Any:
    """The inverse of a matrix. May overwrite arrays of CuPy."""
    xp = array_module(a)
    if xp is np or not a.size:
        return np.linalg.inv(a) if xp is np else a
    # in rows: the transpose of the inverse is the inverse of the transpose, and nothing is turned
    a = a if a.flags.c_contiguous else a.copy(order="C")
    return solve(a.T, xp.eye(len(a), dtype=a.dtype).T).T


def factor(a: Any) -> tuple[Any, Any, int]:
    """Return L and U in one array, the pivots of 0 as int32, and the first zero pivot.

    `a` has shape `(m, n)` and is overwritten where it is in Fortran's order. Pivots are on the
    host. The number is 0, or counts from 1 (`getrf`).

    >>> lu, pivots, info = factor(np.array([[1.0, 2.0], [4.0, 2.0]]))
    >>> lu.tolist(), pivots.tolist(), info
    ([[4.0, 2.0], [0.25, 1.5]], [1, 1], 0)
    """
    xp = array_module(a)
    if not a.size:
        return a, np.arange(min(a.shape), dtype=np.int32), 0
    if xp is np:
        from scipy.linalg import get_lapack_funcs

        (getrf,) = get_lapack_funcs(("getrf",), (a,))
        lu, pivots, info = getrf(a, overwrite_a=True)
        return lu, pivots.astype(np.int32, copy=False), int(info)
    return _factor_on_gpu(xp, a)


def _factor_on_gpu(cupy: Any, a: Any) -> tuple[Any, Any, int]:
    from cupy.cuda import cusolver, device

    a = a if a.flags.f_contiguous else a.copy(order="F")
    letter = LETTERS[a.dtype.char]
    size = getattr(cusolver, f"{letter}getrf_bufferSize")
    getrf = getattr(cusolver, f"{letter}getrf")
    handle, (m, n) = device.get_cusolver_handle(), a.shape
    # the last of these is `devInfo`: both come to the host in one copy
    found = cupy.empty(min(m, n) + 1, np.int32)
    work = cupy.empty(size(handle, m, n, a.data.ptr, m), a.dtype)
    getrf(handle, m, n, a.data.ptr, m, work.data.ptr, found.data.ptr, found[-1:].data.ptr)
    found = found.get()
    return a, found[:-1] - 1, int(found[-1])


def factor_lower(a: Any) -> Any:
    """The lower Cholesky factor of a matrix, of which the lower triangle is read.

    May overwrite arrays of CuPy. Its own function asks cuSOLVER for the upper triangle of the
    transpose, which took 101 ms for 20000 x 20000 float64 on an H200, and JAX 67 for the lower one.
    What is the lower triangle along columns is the upper one along rows, so the lower one is turned
    there and back. With CuPy's copies between these orders it all took 167 ms.

    >>> factor_lower(np.array([[4.0, 9.0], [2.0, 5.0]])).tolist()
    [[2.0, 0.0], [1.0, 2.0]]
    """
    xp = array_module(a)
    if xp is np or not a.size:
        return np.linalg.cholesky(a) if xp is np else a
    from cupy.cuda import cublas, cusolver, device

    a = a if a.flags.c_contiguous else a.copy(order="C")
    letter, n = LETTERS[a.dtype.char], len(a)
    strips = [slice(start, min(start + STRIP, n)) for start in range(0, n, STRIP)]
    for strip in strips:
        write_turned(a[strip, : strip.start], a[: strip.start, strip])
        write_turned(a[strip, strip].copy(), a[strip, strip])
    handle, lower = device.get_cusolver_handle(), cublas.CUBLAS_FILL_MODE_LOWER
    size = getattr(cusolver, f"{letter}potrf_bufferSize")(handle, lower, n, a.data.ptr, n)
    work, found = xp.empty(size, a.dtype), xp.empty(1, np.int32)
    potrf = getattr(cusolver, f"{letter}potrf")
    potrf(handle, lower, n, a.data.ptr, n, work.data.ptr, size, found.data.ptr)
    info = int(found.get()[0])
    if info:
        raise np.linalg.LinAlgError(f"{INDEFINITE}: its leading minor of order {info} is not")
    for strip in strips:
        write_turned(a[: strip.start, strip], a[strip, : strip.start])
        a[: strip.start, strip] = 0
        write_turned(xp.triu(a[strip, strip]), a[strip, strip])
    return a


def to_rows(a: Any) -> Any:
    """A matrix of CuPy's in the order of C, from Fortran's."""
    if a.flags.c_contiguous:
        return a
    out = array_module(a).empty(a.shape, a.dtype)
    write_turned(a.T, out)
    return out


def can_be_turned(a: Any, dtype: Any) -> bool:
    """Whether `write_turned` takes a matrix for one of a dtype."""
    down, along = a.strides
    return bool(
        a.dtype == dtype
        and a.dtype.char in LETTERS
        and along == a.itemsize
        and down >= a.shape[1] * along
        and down % a.itemsize == 0
    )


def write_turned(a: Any, out: Any) -> None:
    """Write the transpose of a matrix of CuPy's to another one; both have rows without gaps."""
    if not a.size:
        return
    from cupy.cuda import cublas, get_cublas_handle

    one, zero = np.ones((), a.dtype), np.zeros((), a.dtype)
    source, target = (m.strides[0] // m.itemsize for m in (a, out))
    geam = getattr(cublas, f"{LETTERS[a.dtype.char]}geam")
    turn, (rows, columns) = cublas.CUBLAS_OP_T, out.shape
    geam(
        get_cublas_handle(), turn, turn, columns, rows, one.ctypes.data, a.data.ptr, source,
        zero.ctypes.data, a.data.ptr, source, out.data.ptr, target,
    )  # fmt: skip


def solve_triangle(a: Any, b: Any, lower: bool, unit: bool = False) -> Any:
    """Solve `a @ x = b` with a triangle of `a`; the other triangle is not read.

    >>> solve_triangle(np.array([[2.0, 9.0], [1.0, 1.0]]), np.array([[2.0], [3.0]]), True).tolist()
    [[1.0], [2.0]]
    """
    if not b.size:
        return b
    if array_module(a) is np:
        from scipy.linalg.blas import get_blas_funcs

        (trsm,) = get_blas_funcs(("trsm",), (a, b))
        return trsm(1.0, a, b, lower=lower, diag=unit)
    from cupyx.scipy.linalg import solve_triangular

    return solve_triangular(a, b, lower=lower, unit_diagonal=unit)


def row_order(pivots: Any, rows: int, first: int = 0) -> Any:
    """Where each of `rows` rows comes from after exchanges from row `first` on.

    >>> row_order([2, 2], 4, 1).tolist()
    [0, 2, 1, 3]
    """
    order = list(range(rows))
    for i, p in enumerate(pivots):
        order[first + i], order[p] = order[p], order[first + i]
    return np.array(order, np.int64)


def take_rows(a: Any, order: Any) -> Any:
    """Rows of a matrix in another order, as a new array in Fortran's order."""
    return array_module(a).take(a.T, order, axis=1).T


def panel(column: Any, start: int, strict: bool = True) -> Panel:
    """Factor the columns of a matrix from row `start` on; the rows above stay.

    Raises `numpy.linalg.LinAlgError` on an exactly zero pivot, if it is to be `strict`.
    """
    xp = array_module(column)
    width = min(column.shape[1], len(column) - start)
    lu, pivots, info = factor(xp.array(column[start:], order="F"))
    if info and strict:
        raise np.linalg.LinAlgError(f"{SINGULAR}: pivot {start + info} is exactly zero")
    if start:
        whole = xp.empty(column.shape, column.dtype, order="F")
        whole[:start], whole[start:] = column[:start], lu
    else:
        whole = lu
    pivots = pivots[:width] + np.int32(start)
    order = row_order(pivots.tolist(), len(column), start)
    return Panel(whole, xp.asarray(order), xp.asarray(pivots), info and start + info)


def update(column: Any, by: Panel, start: int) -> Any:
    """Apply a panel that was factored from row `start` on to other columns of the matrix."""
    moved, factored = take_rows(column, by.order), by.column
    stop = start + factored.shape[1]
    top = solve_triangle(factored[start:stop], moved[start:stop], lower=True, unit=True)
    moved[start:stop] = top
    if stop < len(moved):
        moved[stop:] -= factored[stop:] @ top
    return moved


def substitute(right: Any, by: Panel, start: int) -> Any:
    """Solve rows from `start` on of `U @ x = right` by a panel, and take them from those above."""
    factored = by.column
    stop = min(start + factored.shape[1], len(factored))
    x = array_module(right).array(right, order="F")
    x[start:stop] = solve_triangle(factored[start:stop], x[start:stop], lower=False)
    if start:
        x[:start] -= factored[:start] @ x[start:stop]
    return x
