"""LU with partial pivoting over whole columns, and what is solved by it.

The matrix is in block columns. Column `k` is factored by one task, from row `k * width` on, and
each column to its right is updated by another (right-looking). The pivots are those of LAPACK.
Block columns are dealt to the devices in turn, so all have work until the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from dask._task_spec import List, Task, TaskRef
from dask.array.core import Array
from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph

from . import lapack
from .blocks import array_module, module_name
from .cyclic import Cyclic
from .lapack import Panel
from .matrices import (
    array_of,
    as_arrays,
    as_stack,
    call_on_whole,
    empty_meta,
    fits,
    in_one_call,
    inexact_dtype,
    pick_value,
)

PINNED = {"device": Cyclic()}


class Columns(NamedTuple):
    """A factored matrix in block columns."""

    graph: HighLevelGraph
    panels: tuple[Any, ...]  # the key of the `Panel` of each block column
    width: int
    of: Array  # the matrix, in its own chunks
    dtype: np.dtype[Any]


def column_width(n: int, block_size: int | None, module: str = "cupy") -> int:
    """Columns of a block: as asked for, or wide enough for matrix products to count.

    >>> column_width(4000, None), column_width(20000, None), column_width(9, 100)
    (512, 1024, 9)
    >>> column_width(4000, None, "numpy")
    256
    """
    if block_size is not None and (not isinstance(block_size, int) or block_size < 1):
        raise ValueError(f"block_size={block_size!r}: must be an integer of 1 or more (columns)")
    usual = 512 if n < 8192 else 1024 if n < 32768 else 2048
    if module == "numpy":
        usual //= 2
    return max(1, min(n, block_size or usual))


def starts(n: int, width: int) -> range:
    """First rows, and columns, of the block columns."""
    return range(0, n, width)


def factor_columns(a: Array, dtype: Any, width: int, strict: bool) -> Columns:
    """Factor a square matrix of at least one row in block columns."""
    dtype, n = np.dtype(dtype), a.shape[0]
    columns = a.astype(dtype).rechunk((n, width))
    name = f"lu-{tokenize(columns.name, strict)}"
    tasks: dict[Any, Any] = {}
    latest: list[Any] = [(columns.name, 0, j) for j in range(columns.numblocks[1])]
    panels = []
    for k, start in enumerate(starts(n, width)):
        panels.append((f"{name}-panel", k, k))
        tasks[panels[-1]] = Task(panels[-1], lapack.panel, TaskRef(latest[k]), start, strict)
        for j in range(k + 1, len(latest)):
            key = (f"{name}-update", k, j)
            tasks[key] = Task(key, lapack.update, TaskRef(latest[j]), TaskRef(panels[-1]), start)
            latest[j] = key
    return Columns(_layer(name, tasks, [columns]), tuple(panels), width, a, dtype)


def _layer(name: str, tasks: dict[Any, Any], dependencies: Sequence[Any]) -> HighLevelGraph:
    """One layer, whose columns are dealt to the devices."""
    graph = HighLevelGraph.from_collections(name, tasks, dependencies=dependencies)
    graph.layers[name].annotations = {**(graph.layers[name].annotations or {}), **PINNED}
    return graph


class _LayersBefore(NamedTuple):
    """Layers that an array of Dask's is going to depend on."""

    dask: HighLevelGraph
    name: str

    def __dask_graph__(self) -> HighLevelGraph:
        return self.dask

    def __dask_layers__(self) -> tuple[str, ...]:
        return (self.name,)


def _layers_before(columns: Columns) -> _LayersBefore:
    return _LayersBefore(columns.graph, columns.panels[0][0].removesuffix("-panel"))


def solve_columns(columns: Columns, right: Array) -> Array:
    """Solve for right sides of shape `(n, k)`, in block columns; the result has one row of them."""
    n, width = len(right), columns.width
    right = right.astype(columns.dtype).rechunk((n, -1 if right.shape[1] <= width else width))
    name = f"lu-solve-{tokenize(columns.panels, right.name)}"
    tasks: dict[Any, Any] = {}
    last = len(columns.panels) - 1
    for j in range(right.numblocks[1]):
        latest: Any = (right.name, 0, j)
        for k, start in enumerate(starts(n, width)):
            key = (f"{name}-forward", k, j)
            panel = TaskRef(columns.panels[k])
            tasks[key] = Task(key, lapack.update, TaskRef(latest), panel, start)
            latest = key
        for k, start in reversed(list(enumerate(starts(n, width)))):
            key = (name, 0, j) if k == 0 else (f"{name}-back", last - k, j)
            panel = TaskRef(columns.panels[k])
            tasks[key] = Task(key, lapack.substitute, TaskRef(latest), panel, start)
            latest = key
    graph = _layer(name, tasks, [right, _layers_before(columns)])
    return Array(graph, name, chunks=right.chunks, meta=empty_meta(columns.of, 2, columns.dtype))


def log_determinant(columns: Columns) -> list[Array]:
    """Sign and logarithm of the determinant, as arrays without axes."""
    name = f"lu-slogdet-{tokenize(columns.panels)}"
    panels = List(*map(TaskRef, columns.panels))
    tasks: dict[Any, Any] = {name: Task(name, _log_determinant, panels, columns.width)}
    before: list[Any] = [_layers_before(columns)]
    graph = HighLevelGraph.from_collections(name, tasks, dependencies=before)
    kinds = [columns.dtype, np.empty(0, columns.dtype).real.dtype]
    return [pick_value(graph, name, n, (), kind, columns.of) for n, kind in enumerate(kinds)]


def _log_determinant(panels: Sequence[Panel], width: int) -> tuple[Any, Any]:
    first = panels[0].column
    xp, n = array_module(first), len(first)
    sign, logarithm = xp.ones((), first.dtype), xp.zeros((), first.real.dtype)
    for panel, start in zip(panels, starts(n, width), strict=True):
        column = panel.column[start : start + panel.column.shape[1]]
        signs, logs = _of_diagonal(column.diagonal(), panel.pivots, start, bool(panel.info))
        sign, logarithm = sign * signs, logarithm + logs
    return xp.asarray(sign), xp.asarray(logarithm)


def _of_diagonal(diagonal: Any, pivots: Any, start: int, singular: bool) -> tuple[Any, Any]:
    """Sign and logarithm of the product of a diagonal, with a sign for each exchange of rows."""
    xp, real = array_module(diagonal), diagonal.real.dtype
    if singular:
        return xp.zeros((), diagonal.dtype), xp.full((), -np.inf, real)
    size = xp.abs(diagonal)
    exchanged = (pivots != xp.arange(start, start + len(pivots))).sum() % 2
    sign = (diagonal / size).prod() * (1 - 2 * exchanged).astype(diagonal.dtype)
    return sign.astype(diagonal.dtype), xp.log(size).sum()


# ---- functions


def lu_factor(a: Any, *, block_size: int | None = None) -> tuple[Array, Array]:
    """Return L and U in one array, and the pivots, as `scipy.linalg.lu_factor` does.

    Pivots are sought in whole columns. Row `i` was exchanged with row `piv[i]`.

    Parameters
    ----------
    a
        Array of shape `(m, n)`: real or complex numbers of 32 or 64 bits each, integers, booleans.
    block_size
        Columns that one task factors; `a` must be square then. By default one library call is
        made where the matrix fits twice into half of the memory of the only device, or is small.

    Returns
    -------
    lu, piv
        `lu` of shape `(m, n)` has U on and above the diagonal and L below, without its unit
        diagonal, in the chunks of `a`. `piv` of shape `(min(m, n),)` has int32. A singular matrix
        is factored too: its U has a zero on the diagonal, or NaN on GPUs.

    Raises
    ------
    NotImplementedError
        If the matrix is not square and too large for one library call.

    Notes
    -----
    The method is right-looking block LU; see Golub and Van Loan, Matrix Computations, 3.4.

    Examples
    --------
    >>> import dask.array as da
    >>> lu, piv = lu_factor(da.from_array(np.array([[1.0, 2.0], [4.0, 2.0]]), chunks=1))
    >>> lu.compute().tolist(), piv.compute().tolist()
    ([[4.0, 2.0], [0.25, 1.5]], [1, 1])
    """
    a = as_stack("lu_factor", a, square=False)
    if a.ndim > 2:
        raise NotImplementedError("lu_factor: of stacks of matrices; call it for each matrix")
    dtype, (m, n) = inexact_dtype("lu_factor", a.dtype), a.shape
    if block_size is None or not a.size or m != n:
        if in_one_call(a, m * n * dtype.itemsize) or not a.size:
            outputs = [((m, n), dtype), ((min(m, n),), np.int32)]
            lu, pivots = call_on_whole(_factor_whole, [a], dtype, outputs, order="F")
            return lu.rechunk(a.chunks), pivots
        if m != n:
            raise NotImplementedError(
                f"lu_factor: a matrix that is not square, {m} x {n}, is factored by one call only, "
                "for which it is too large; gpuscheduler.linalg.qr factors tall matrices"
            )
    width = column_width(n, block_size, module_name(a))
    columns = factor_columns(a, dtype, width, strict=False)
    name = f"lu-factor-{tokenize(columns.panels)}"
    tasks: dict[Any, Any] = {}
    orders = {}
    for j, panel in enumerate(columns.panels):
        orders[j] = (f"{name}-pivots", j)
        tasks[orders[j]] = Task(orders[j], _pivots_of, TaskRef(panel))
    for j, panel in enumerate(columns.panels):
        later = List(*[TaskRef(orders[k]) for k in range(j + 1, len(orders))])
        tasks[name, 0, j] = Task((name, 0, j), _exchange_later, TaskRef(panel), later)
    graph = _layer(name, tasks, [_layers_before(columns)])
    widths = tuple(min(width, n - start) for start in starts(n, width))
    lu = Array(graph, name, chunks=((n,), widths), meta=empty_meta(a, 2, dtype)).rechunk(a.chunks)
    piv = f"{name}-piv"
    keys = {(piv, j): Task((piv, j), _only_pivots, TaskRef(orders[j])) for j in orders}
    pivots = array_of(
        piv, keys, (widths,), empty_meta(a, 1, np.int32), [_LayersBefore(graph, name)]
    )
    return lu, pivots


def _factor_whole(a: Any) -> tuple[Any, Any]:
    xp = array_module(a)
    if xp is np:
        lu, pivots, _ = lapack.factor(np.array(a, order="F"))
        return lu, pivots
    lu, pivots, _ = lapack.factor(a)
    return lapack.to_rows(lu), xp.asarray(pivots)


def _pivots_of(panel: Panel) -> tuple[Any, Any]:
    return panel.pivots, panel.order


def _only_pivots(pivots: tuple[Any, Any]) -> Any:
    return pivots[0]


def _exchange_later(panel: Panel, later: Sequence[tuple[Any, Any]]) -> Any:
    """A factored column with the exchanges that columns to its right asked for."""
    column = panel.column
    order = None
    for _, then in later:
        order = then if order is None else order[then]
    return column if order is None else lapack.take_rows(column, order)


def lu_solve(lu_and_piv: tuple[Any, Any], b: Any, trans: int = 0) -> Array:
    """Solve `a @ x = b` by factors that `lu_factor` has made.

    Parameters
    ----------
    lu_and_piv
        What `lu_factor(a)` gives for a matrix `(n, n)`.
    b
        Right sides, of shape `(n,)` or `(n, k)`.
    trans
        0 solves with `a`, 1 with its transpose, 2 with its conjugate transpose.

    Notes
    -----
    Runs on one device. `numpy.linalg.LinAlgError` is raised where U has an exactly zero pivot.

    Examples
    --------
    >>> import dask.array as da
    >>> factors = lu_factor(da.from_array(np.array([[1.0, 2.0], [4.0, 2.0]]), chunks=1))
    >>> lu_solve(factors, np.array([3.0, 6.0])).compute().tolist()
    [1.0, 1.0]
    """
    if trans not in (0, 1, 2):
        raise ValueError(f"lu_solve: trans={trans!r}: must be 0, 1 or 2")
    lu, piv, b = as_arrays("lu_solve", *lu_and_piv, b)
    lu = as_stack("lu_solve", lu)
    n = len(lu)
    if lu.ndim != 2 or b.ndim not in (1, 2) or len(b) != n or piv.shape != (n,):
        raise ValueError(
            f"lu_solve: factors of shape {lu.shape} and {piv.shape} do not go with b of {b.shape}"
        )
    dtype = inexact_dtype("lu_solve", lu.dtype, b.dtype)
    nbytes = (lu.size + b.size) * dtype.itemsize
    fits(lu, nbytes, of="lu_solve", hint="gpuscheduler.linalg.solve works in block columns.")
    (x,) = call_on_whole(
        _solve_factored, [lu, b, piv], dtype, [(b.shape, dtype)], order="F", trans=trans
    )
    return x.rechunk((lu.chunks[1], *b.chunks[1:]))


def _solve_factored(lu: Any, b: Any, piv: Any, trans: int) -> Any:
    """Solve with LU factors and pivots on one device, as `scipy.linalg.lu_solve`.

    Raises LinAlgError where a pivot is exactly zero.
    """
    xp = array_module(lu)
    if not b.size:
        return b
    if (xp.diagonal(lu) == 0).any():
        raise np.linalg.LinAlgError(lapack.SINGULAR)
    piv = piv.real.astype(np.int32)  # it came in the dtype of the matrices, which holds it exactly
    if xp is np:
        from scipy.linalg import lu_solve as solve
    else:
        from cupyx.scipy.linalg import lu_solve as solve
    return solve((lu, piv), b, trans=trans, check_finite=False)
