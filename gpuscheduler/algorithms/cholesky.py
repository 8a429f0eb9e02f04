"""Cholesky factorization, in block columns that are dealt to the devices in turn.

Column `j` begins at row `j * width`. One task factors it, and one updates each column to its right
(right-looking). Contiguous runs of columns would leave most of the work to the last device.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from dask._task_spec import Task, TaskRef
from dask.array.core import Array
from dask.base import tokenize

from . import lapack
from .blocks import array_module, module_name
from .lu import _layer, column_width, starts
from .matrices import (
    as_arrays,
    as_stack,
    call_on_stacks,
    call_on_whole,
    empty_meta,
    fits,
    in_one_call,
    inexact_dtype,
)


def cholesky(a: Any, *, upper: bool = False, block_size: int | None = None) -> Array:
    """Return the lower triangle L of `a = L @ L.conj().T`, as `numpy.linalg.cholesky` does.

    Parameters
    ----------
    a
        Array of shape `(..., n, n)`, symmetric or Hermitian and positive definite: real or complex
        numbers of 32 or 64 bits each, integers or booleans. Only the lower triangle is read, or
        only the upper one.
    upper
        Return the upper triangle U of `a = U.conj().T @ U`.
    block_size
        Columns that one task factors. By default one library call is made where the matrix fits
        twice into the memory of the only device, or is small.

    Returns
    -------
    factor
        Array of the shape and chunks of `a`; of stacks, in chunks of whole matrices.

    Raises
    ------
    numpy.linalg.LinAlgError
        When computed, if a matrix is not positive definite, or has NaN; here, if it is not square.

    Notes
    -----
    ‖a − L·Lᴴ‖ ≤ c·n·u·‖a‖ with a small c, whatever the matrix.

    Examples
    --------
    >>> import dask.array as da
    >>> cholesky(da.from_array(np.array([[4.0, 9.0], [2.0, 5.0]]), chunks=1)).compute().tolist()
    [[2.0, 0.0], [1.0, 2.0]]
    """
    a = as_stack("cholesky", a)
    dtype = inexact_dtype("cholesky", a.dtype)
    if upper:
        return _adjoint(cholesky(_adjoint(a), block_size=block_size))
    if a.ndim > 2:
        return call_on_stacks(_factor_stack, "(n,n)->(n,n)", a.astype(dtype), dtypes=[dtype])
    return factor_lower(a.astype(dtype), block_size)


def _adjoint(a: Array) -> Array:
    turned = a.swapaxes(-1, -2)
    return turned.conj() if a.dtype.kind == "c" else turned


def _factor_stack(a: Any) -> Any:
    factor = lapack.call(np.linalg.cholesky, lapack.INDEFINITE, a)
    return _check_factor(factor)


def _factor_whole(a: Any) -> Any:
    return _check_factor(lapack.factor_lower(a))


def _check_factor(factor: Any) -> Any:
    """A factor, if its diagonal is finite: not every library fails for NaN."""
    xp = array_module(factor)
    if not xp.isfinite(xp.diagonal(factor, axis1=-2, axis2=-1)).all():
        raise np.linalg.LinAlgError(lapack.INDEFINITE)
    return factor


def factor_lower(a: Array, block_size: int | None = None) -> Array:
    """The factor of one matrix of a type that LAPACK has."""
    n, dtype = len(a), a.dtype
    if not n or (block_size is None and in_one_call(a, a.size * dtype.itemsize)):
        (factor,) = call_on_whole(_factor_whole, [a], dtype, [(a.shape, dtype)])
        return factor.rechunk(a.chunks)
    width = column_width(n, block_size, module_name(a))
    columns = a.rechunk((n, width))
    name = f"cholesky-{tokenize(columns.name)}"
    tasks: dict[Any, Any] = {}
    latest: list[Any] = []
    first = starts(n, width)
    for j, start in enumerate(first):
        key = (f"{name}-start", j, j)
        tasks[key] = Task(key, _rows_from, TaskRef((columns.name, 0, j)), start)
        latest.append(key)
    for k, start in enumerate(first):
        panel = (f"{name}-panel", k, k)
        tasks[panel] = Task(panel, factor_panel, TaskRef(latest[k]), start)
        key = (name, 0, k)
        tasks[key] = Task(key, _below_zeros, TaskRef(panel), start)
        for j in range(k + 1, len(first)):
            key = (f"{name}-update", k, j)
            below = first[j] - start
            tasks[key] = Task(key, update_column, TaskRef(latest[j]), TaskRef(panel), below)
            latest[j] = key
    graph = _layer(name, tasks, [columns])
    return Array(graph, name, chunks=columns.chunks, meta=empty_meta(a, 2, dtype)).rechunk(a.chunks)


def _rows_from(column: Any, start: int) -> Any:
    return column[start:]


def factor_panel(column: Any, start: int) -> Any:
    """Factor a block column that begins at its diagonal, at row `start` of the matrix.

    >>> factor_panel(np.array([[4.0], [2.0]]), 0).tolist()
    [[2.0], [1.0]]
    """
    width = column.shape[1]
    try:
        corner = _check_factor(lapack.factor_lower(_copy_on_gpu(column[:width])))
    except np.linalg.LinAlgError as error:
        raise np.linalg.LinAlgError(
            f"{lapack.INDEFINITE}: see columns {start} to {start + width - 1}"
        ) from error
    if len(column) == width:
        return corner
    out = array_module(column).empty(column.shape, column.dtype)
    out[:width] = corner
    # of L21 @ corner^H = A21 the adjoint is solved
    out[width:] = lapack.solve_triangle(corner, column[width:].conj().T, lower=True).conj().T
    return out


def _copy_on_gpu(block: Any) -> Any:
    """A copy where it may be overwritten."""
    return block if array_module(block) is np else block.copy()


def update_column(column: Any, panel: Any, below: int) -> Any:
    """Take the products with a panel from a column that begins `below` rows further down."""
    rows = panel[below:]
    return column - rows @ rows[: column.shape[1]].conj().T


def _below_zeros(panel: Any, start: int) -> Any:
    """A column of the factor, with the zeros above it."""
    xp = array_module(panel)
    out = xp.zeros((start + len(panel), panel.shape[1]), panel.dtype)
    out[start:] = panel
    return out


def cho_factor(a: Any, *, lower: bool = True, block_size: int | None = None) -> tuple[Array, bool]:
    """Return a Cholesky factor and whether it is the lower one, for `cho_solve`.

    The other triangle has zeros, where that of `scipy.linalg.cho_factor` has anything.

    >>> import dask.array as da
    >>> factor, lower = cho_factor(da.eye(2, chunks=1) * 4)
    >>> factor.compute().tolist(), lower
    ([[2.0, 0.0], [0.0, 2.0]], True)
    """
    return cholesky(a, upper=not lower, block_size=block_size), lower


def cho_solve(c_and_lower: tuple[Any, bool], b: Any) -> Array:
    """Solve `a @ x = b` by the factor that `cho_factor` or `cholesky` made of a matrix.

    `b` has shape `(n,)` or `(n, k)`. A factor that does not fit one device is solved with in block
    columns.

    >>> import dask.array as da
    >>> cho_solve(cho_factor(da.eye(2, chunks=1) * 4), np.array([4.0, 8.0])).compute().tolist()
    [1.0, 2.0]
    """
    factor, lower = c_and_lower
    factor = as_stack("cho_solve", factor)
    (b,) = as_arrays("cho_solve", b)
    if factor.ndim != 2 or b.ndim not in (1, 2) or len(b) != len(factor):
        raise ValueError(
            f"cho_solve: the factor has shape {factor.shape} and b {b.shape}; they must be (n, n) "
            "and (n,) or (n, k)"
        )
    dtype = inexact_dtype("cho_solve", factor.dtype, b.dtype)
    if not lower:
        factor = _adjoint(factor)
    if fits(factor, (factor.size + b.size) * dtype.itemsize) or not b.size:
        (x,) = call_on_whole(_solve_factored, [factor, b], dtype, [(b.shape, dtype)])
        return x.rechunk((factor.chunks[1], *b.chunks[1:]))
    return solve_lower_columns(factor, b, column_width(len(factor), None, module_name(factor)))


def _solve_factored(factor: Any, b: Any) -> Any:
    """Solve with a lower Cholesky factor on one device."""
    right = b if b.ndim == 2 else b[:, None]
    y = lapack.solve_triangle(factor, right, lower=True)
    x = lapack.solve_triangle(factor.conj().T, y, lower=False)
    return x if b.ndim == 2 else x[:, 0]


def solve_lower_columns(factor: Array, b: Array, width: int) -> Array:
    """Solve by a lower factor in block columns, each of which one task reads."""
    n, vector = len(factor), b.ndim == 1
    dtype = inexact_dtype("cho_solve", factor.dtype, b.dtype)
    right = (b[:, None] if vector else b).astype(dtype)
    right = right.rechunk((n, -1 if right.shape[1] <= width else width))
    columns = factor.astype(dtype).rechunk((n, width))
    name = f"cho-solve-{tokenize(columns.name, right.name)}"
    tasks: dict[Any, Any] = {}
    first = list(enumerate(starts(n, width)))
    for j in range(right.numblocks[1]):
        latest: Any = (right.name, 0, j)
        for step, function, order in (
            ("forward", _forward, first),
            ("back", _solve_adjoint_row, first[::-1]),
        ):
            for k, start in order:
                last = step == "back" and k == 0
                key = (name, 0, j) if last else (f"{name}-{step}", k, j)
                column = TaskRef((columns.name, 0, k))
                tasks[key] = Task(key, function, TaskRef(latest), column, start)
                latest = key
    graph = _layer(name, tasks, [right, columns])
    x = Array(graph, name, chunks=right.chunks, meta=empty_meta(factor, 2, dtype))
    x = x.rechunk((factor.chunks[1], right.chunks[1]))
    return x[:, 0] if vector else x.rechunk({1: b.chunks[1]})


def _forward(right: Any, column: Any, start: int) -> Any:
    """Solve the rows of a column of L, and take them from those below."""
    stop = start + column.shape[1]
    x = array_module(right).array(right, order="F")
    x[start:stop] = lapack.solve_triangle(column[start:stop], x[start:stop], lower=True)
    if stop < len(x):
        x[stop:] -= column[stop:] @ x[start:stop]
    return x


def _solve_adjoint_row(right: Any, column: Any, start: int) -> Any:
    """Solve the rows of a row of the adjoint of L, which reads the rows below."""
    stop = start + column.shape[1]
    x = array_module(right).array(right, order="F")
    if stop < len(x):
        x[start:stop] -= column[stop:].conj().T @ x[stop:]
    corner = column[start:stop].conj().T
    x[start:stop] = lapack.solve_triangle(corner, x[start:stop], lower=False)
    return x
