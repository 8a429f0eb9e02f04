"""Systems of equations, inverses and determinants of square matrices."""

from __future__ import annotations

from typing import Any, NamedTuple

import dask.array as da
import numpy as np
from dask._task_spec import Task
from dask.array.core import Array
from dask.base import tokenize

from . import lapack
from .blocks import array_module, module_name
from .cholesky import cho_solve, factor_lower
from .lu import column_width, factor_columns, log_determinant, lu_factor, lu_solve, solve_columns
from .matrices import (
    array_of,
    as_arrays,
    as_stack,
    call_on_stacks,
    call_on_whole,
    empty_meta,
    in_one_call,
    inexact_dtype,
    real_part,
)


class SlogdetResult(NamedTuple):
    """Sign and logarithm of a determinant."""

    sign: Array
    logabsdet: Array


def solve(
    a: Any,
    b: Any,
    *,
    assume_a: str = "gen",
    refine: bool = False,
    block_size: int | None = None,
) -> Array:
    """Solve `a @ x = b` by LU with partial pivoting, as `numpy.linalg.solve` does.

    Parameters
    ----------
    a
        Array of shape `(..., n, n)`: real or complex numbers of 32 or 64 bits each, integers or
        booleans.
    b
        Array of shape `(n,)` or `(..., n, k)`.
    assume_a
        `"gen"`, or `"pos"` for a symmetric or Hermitian positive definite matrix, of which only the
        lower triangle is read.
    refine
        Do one step of iterative refinement: solve for the residual, and add the result; only for
        one matrix.
    block_size
        Columns that one task factors. By default one library call is made where the matrix fits
        twice into the memory of the only device, or is small.

    Returns
    -------
    x
        Array of the shape of `b`, in the chunks of the columns of `a` and those of `b`.

    Raises
    ------
    numpy.linalg.LinAlgError
        When computed, if the matrix is exactly singular, or not positive definite; here, if it is
        not square.

    Notes
    -----
    The backward error is LAPACK's: ‖b − ax‖ ≤ c·n·u·‖a‖‖x‖ with a small c, except for matrices
    with large pivot growth. `dask.array.linalg.solve` finds pivots in diagonal tiles only.

    Examples
    --------
    >>> import dask.array as da
    >>> a = da.from_array(np.array([[0.0, 2.0], [1.0, 1.0]]), chunks=1)
    >>> solve(a, np.array([2.0, 2.0])).compute().tolist()
    [1.0, 1.0]
    """
    if assume_a not in ("gen", "pos"):
        raise ValueError(f"solve: assume_a={assume_a!r}: must be 'gen' or 'pos'")
    a = as_stack("solve", a)
    (b,) = as_arrays("solve", b)
    if b.ndim == 0 or b.shape[-1 if b.ndim == 1 else -2] != a.shape[-1]:
        raise ValueError(
            f"solve: b of shape {b.shape} must have as many rows as a of shape {a.shape}: "
            f"use b of shape ({a.shape[-1]},) or (..., {a.shape[-1]}, k)"
        )
    if a.ndim == 2 and b.ndim <= 2:
        return _solve_matrix(a, b, assume_a, refine, block_size)
    if refine or assume_a != "gen" or block_size is not None:
        raise NotImplementedError(
            f"solve: a of shape {a.shape} and b of shape {b.shape} are not one matrix each: leave "
            "out refine, assume_a and block_size, or solve for each matrix of the stack by itself"
        )
    dtype = inexact_dtype("solve", a.dtype, b.dtype)
    vector = b.ndim == 1
    b = b[:, None] if vector else b
    x = call_on_stacks(
        _solve_stack, "(n,n),(n,k)->(n,k)", a.astype(dtype), b.astype(dtype), dtypes=[dtype]
    )
    return x[..., 0] if vector else x


def _solve_stack(a: Any, b: Any) -> Any:
    xp = array_module(a)
    if xp is not np:  # CuPy's does not broadcast
        loop = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        a = xp.broadcast_to(a, (*loop, *a.shape[-2:]))
        b = xp.broadcast_to(b, (*loop, *b.shape[-2:]))
    return lapack.call(np.linalg.solve, lapack.SINGULAR, a, b)


def _solve_matrix(a: Array, b: Array, assume_a: str, refine: bool, block_size: int | None) -> Array:
    dtype, n = inexact_dtype("solve", a.dtype, b.dtype), len(a)
    if assume_a == "pos":
        factor = factor_lower(a.astype(dtype), block_size)
        x = cho_solve((factor, True), b)
        return x + cho_solve((factor, True), b - a @ x) if refine else x
    chunks = (a.chunks[1], *b.chunks[1:])
    nbytes = (a.size + b.size) * dtype.itemsize
    if not a.size or not b.size or (block_size is None and in_one_call(a, nbytes)):
        if refine and b.size:
            factors = lu_factor(a.astype(dtype))
            x = lu_solve(factors, b)
            return x + lu_solve(factors, b - a @ x)
        (x,) = call_on_whole(_solve_whole, [a, b], dtype, [(b.shape, dtype)])
        return x.rechunk(chunks)
    columns = factor_columns(a, dtype, column_width(n, block_size, module_name(a)), strict=True)
    x = _solve_by(columns, b)
    if refine:
        x = x + _solve_by(columns, b - a @ x)
    return x.rechunk(chunks)


def _solve_by(columns: Any, b: Array) -> Array:
    return solve_columns(columns, b) if b.ndim == 2 else solve_columns(columns, b[:, None])[:, 0]


def _solve_whole(a: Any, b: Any) -> Any:
    if b.ndim == 1:
        return lapack.solve(a, b[:, None])[:, 0]
    return lapack.solve(a, b)


def inv(a: Any, *, block_size: int | None = None) -> Array:
    """Return the inverse of matrices, by LU with partial pivoting.

    Parameters
    ----------
    a
        Array of shape `(..., n, n)`: real or complex numbers of 32 or 64 bits each, integers or
        booleans.
    block_size
        Columns that one task factors. By default one library call is made where the matrix fits
        twice into the memory of the only device, or is small.

    Returns
    -------
    inverse
        Array of the shape and chunks of `a`; of stacks, in chunks of whole matrices.

    Raises
    ------
    numpy.linalg.LinAlgError
        When computed, if a matrix is exactly singular; here, if it is not square.

    Examples
    --------
    >>> import dask.array as da
    >>> inv(da.from_array(np.array([[0.0, 2.0], [1.0, 0.0]]), chunks=1)).compute().tolist()
    [[0.0, 1.0], [0.5, 0.0]]
    """
    a = as_stack("inv", a)
    dtype, n = inexact_dtype("inv", a.dtype), a.shape[-1]
    if a.ndim > 2:
        return call_on_stacks(_invert_stack, "(n,n)->(n,n)", a.astype(dtype), dtypes=[dtype])
    if not a.size or (block_size is None and in_one_call(a, 2 * a.size * dtype.itemsize)):
        (inverse,) = call_on_whole(lapack.invert, [a], dtype, [(a.shape, dtype)])
        return inverse.rechunk(a.chunks)
    width = column_width(n, block_size, module_name(a))
    columns = factor_columns(a, dtype, width, strict=True)
    return solve_columns(columns, _identity(a, dtype, width)).rechunk(a.chunks)


def _invert_stack(a: Any) -> Any:
    return lapack.call(np.linalg.inv, lapack.SINGULAR, a)


def _identity(a: Array, dtype: Any, width: int) -> Array:
    """The identity in block columns, in the library of a matrix."""
    n, meta = len(a), empty_meta(a, 2, dtype)
    name = f"identity-{tokenize(n, dtype, width, type(meta))}"
    widths = tuple(min(width, n - start) for start in range(0, n, width))
    tasks = {
        (name, 0, j): Task((name, 0, j), _identity_columns, meta, n, j * width, w)
        for j, w in enumerate(widths)
    }
    return array_of(name, tasks, ((n,), widths), meta, [])


def _identity_columns(meta: Any, n: int, start: int, width: int) -> Any:
    return array_module(meta).eye(n, width, -start, dtype=meta.dtype)


def slogdet(a: Any, *, block_size: int | None = None) -> SlogdetResult:
    """Return sign and logarithm of the absolute value of determinants.

    Parameters
    ----------
    a
        Array of shape `(..., n, n)`: real or complex numbers of 32 or 64 bits each, integers or
        booleans.
    block_size
        Columns that one task factors, as of `solve`.

    Returns
    -------
    sign, logabsdet
        Arrays of shape `(...)`. A singular matrix has sign 0 and logarithm −inf.

    Examples
    --------
    >>> import dask.array as da
    >>> sign, logarithm = slogdet(da.eye(4, chunks=2) * -2)
    >>> float(sign.compute()), round(float(logarithm.compute()), 4)
    (1.0, 2.7726)
    """
    a = as_stack("slogdet", a)
    dtype, n = inexact_dtype("slogdet", a.dtype), a.shape[-1]
    kinds = [dtype, real_part(dtype)]
    if a.ndim > 2:
        return SlogdetResult(
            *call_on_stacks(_slogdet, "(n,n)->(),()", a.astype(dtype), dtypes=kinds)
        )
    if not a.size or (block_size is None and in_one_call(a, a.size * dtype.itemsize)):
        return SlogdetResult(*call_on_whole(_slogdet, [a], dtype, [((), k) for k in kinds]))
    columns = factor_columns(a, dtype, column_width(n, block_size, module_name(a)), strict=False)
    return SlogdetResult(*log_determinant(columns))


def _slogdet(a: Any) -> tuple[Any, Any]:
    xp = array_module(a)
    sign, logarithm = xp.linalg.slogdet(a)
    return xp.asarray(sign), xp.asarray(logarithm)


def det(a: Any, *, block_size: int | None = None) -> Array:
    """Return determinants of matrices; they overflow where `slogdet` does not.

    Parameters
    ----------
    a
        Array of shape `(..., n, n)`: real or complex numbers of 32 or 64 bits each, integers or
        booleans.
    block_size
        Columns that one task factors, as of `solve`.

    Returns
    -------
    determinant
        Array of shape `(...)`.

    Examples
    --------
    >>> import dask.array as da
    >>> round(float(det(da.eye(4, chunks=2) * -2).compute()), 9)
    16.0
    """
    sign, logarithm = slogdet(a, block_size=block_size)
    with np.errstate(all="ignore"):
        return sign * da.exp(logarithm).astype(sign.dtype)
