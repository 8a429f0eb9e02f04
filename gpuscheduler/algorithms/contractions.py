"""Products of several matrices, powers, and NumPy's names from the array API standard."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import dask.array as da
import numpy as np
from dask.array.core import Array

from .matrices import as_arrays, empty_meta
from .products import cross as cross_of_any
from .square import inv, solve


def matrix_power(a: Any, n: int) -> Array:
    """Return powers of square matrices by repeated squaring, as `numpy.linalg.matrix_power` does.

    Parameters
    ----------
    a
        Array of shape `(..., m, m)`.
    n
        A whole number; a negative one makes powers of the inverse.

    Returns
    -------
    power
        Array of the shape of `a`, of about `2 * log2(n)` products at most.

    Raises
    ------
    TypeError
        If `n` is not a whole number.
    numpy.linalg.LinAlgError
        If a matrix is not square; when computed, if `n` is negative and a matrix is singular.

    Examples
    --------
    >>> matrix_power(da.from_array(np.array([[1, 1], [1, 0]]), chunks=1), 10).compute().tolist()
    [[89, 55], [55, 34]]
    """
    (a,) = as_arrays("matrix_power", a)
    if a.ndim < 2 or a.shape[-1] != a.shape[-2]:
        raise np.linalg.LinAlgError(
            f"matrix_power: the last two axes must have one length, not {a.shape}"
        )
    try:
        n = operator.index(n)
    except TypeError as error:
        raise TypeError(f"matrix_power: exponent must be an integer, not {n!r}") from error
    if n == 0:
        rows = da.arange(a.shape[-1], chunks=a.chunks[-1], like=empty_meta(a, 1, int))
        ones = (rows[:, None] == rows[None, :]).astype(a.dtype)
        return da.broadcast_to(ones, a.shape, chunks=(*a.chunks[:-1], a.chunks[-1]))
    if n < 0:
        a, n = inv(a), -n
    a = a.rechunk({a.ndim - 2: a.chunks[-1]})
    result: Any = None
    square = a
    while n:
        if n & 1:
            result = square if result is None else matmul(result, square)
        n >>= 1
        if n:
            square = matmul(square, square)
    return result


def multi_dot(arrays: Sequence[Any]) -> Array:
    """Return the product of several matrices in the order of fewest multiplications.

    Parameters
    ----------
    arrays
        At least two arrays of shape `(m, n)`; the first and the last may have shape `(n,)`.

    Returns
    -------
    product
        Array of two axes, less one for each vector.

    Raises
    ------
    ValueError
        If there are fewer than two arrays, or shapes do not go together.
    numpy.linalg.LinAlgError
        If an array has other than two axes.

    Notes
    -----
    The order is found by dynamic programming; see Cormen, Introduction to Algorithms, 15.2.

    Examples
    --------
    >>> a, b, c = da.ones((2, 9)), da.ones((9, 9)), da.ones(9)
    >>> multi_dot([a, b, c]).compute().tolist()
    [81.0, 81.0]
    """
    if len(arrays) < 2:
        raise ValueError("multi_dot: expecting at least two arrays")
    made = as_arrays("multi_dot", *arrays)
    first, last = made[0].ndim == 1, made[-1].ndim == 1
    if first:
        made[0] = made[0][None, :]
    if last:
        made[-1] = made[-1][:, None]
    for n, x in enumerate(made):
        if x.ndim != 2:
            raise np.linalg.LinAlgError(
                f"multi_dot: array {n} has {x.ndim} axes; it must have two, or one at an end"
            )
    sides = [x.shape[0] for x in made] + [made[-1].shape[1]]
    for n, (left, right) in enumerate(zip(made, made[1:], strict=False)):
        if left.shape[1] != right.shape[0]:
            raise ValueError(
                f"multi_dot: shapes {left.shape} and {right.shape} of arrays {n} and {n + 1} "
                "do not go together"
            )
    product = _multiply(made, chain_order(sides), 0, len(made) - 1)
    if first:
        product = product[0]
    return product[..., 0] if last else product


def chain_order(sides: Sequence[int]) -> dict[tuple[int, int], int]:
    """Where to split each run of matrices; matrix `i` is `sides[i]` by `sides[i + 1]`.

    >>> chain_order([10, 100, 5, 50])[0, 2]
    1
    """
    count = len(sides) - 1
    cost = {(i, i): 0 for i in range(count)}
    split: dict[tuple[int, int], int] = {}
    for length in range(1, count):
        for i in range(count - length):
            j = i + length
            costs = [
                cost[i, k] + cost[k + 1, j] + sides[i] * sides[k + 1] * sides[j + 1]
                for k in range(i, j)
            ]
            cost[i, j] = min(costs)
            split[i, j] = i + costs.index(cost[i, j])
    return split


def _multiply(arrays: Sequence[Array], split: dict[tuple[int, int], int], i: int, j: int) -> Any:
    if i == j:
        return arrays[i]
    k = split[i, j]
    return matmul(_multiply(arrays, split, i, k), _multiply(arrays, split, k + 1, j))


def tensorsolve(a: Any, b: Any, axes: Sequence[int] | None = None) -> Array:
    """Solve `tensordot(a, x, x.ndim) = b`, as `numpy.linalg.tensorsolve` does.

    Parameters
    ----------
    a
        Array of shape `b.shape + Q`, where the products of both parts are equal.
    b
        Right side, of any shape.
    axes
        Axes of `a` that are moved to its end first.

    Returns
    -------
    x
        Array of shape `Q`.

    Examples
    --------
    >>> a = da.eye(6, chunks=3).reshape(2, 3, 6)
    >>> tensorsolve(a, da.ones((2, 3))).compute().tolist()
    [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    """
    a, b = as_arrays("tensorsolve", a, b)
    if axes is not None:
        rest = [n for n in range(a.ndim) if n not in {int(k) % a.ndim for k in axes}]
        a = a.transpose([*rest, *(int(k) % a.ndim for k in axes)])
    if a.shape[: b.ndim] != b.shape:
        raise np.linalg.LinAlgError(
            f"tensorsolve: the first axes of a, {a.shape}, must be those of b, {b.shape}"
        )
    shape = a.shape[b.ndim :]
    many = int(np.prod(shape, dtype=int))
    if many != b.size:
        raise np.linalg.LinAlgError(
            "tensorsolve: the axes of a must make a square matrix: "
            f"prod({shape}) is {many}, and b has {b.size} elements"
        )
    return solve(a.reshape(b.size, many), b.reshape(b.size)).reshape(shape)


def tensorinv(a: Any, ind: int = 2) -> Array:
    """Return the inverse of an array for `tensordot` over `ind` axes.

    >>> tensorinv(da.eye(4, chunks=2).reshape(2, 2, 4) * 2).compute().shape
    (4, 2, 2)
    """
    (a,) = as_arrays("tensorinv", a)
    if ind <= 0:
        raise ValueError(f"tensorinv: ind={ind!r}: must be a positive number of axes")
    rows = int(np.prod(a.shape[:ind], dtype=int))
    if rows * rows != a.size:
        raise np.linalg.LinAlgError(
            f"tensorinv: the first {ind} axes of {a.shape} must make a square matrix with the rest"
        )
    return inv(a.reshape(rows, rows)).reshape(a.shape[ind:] + a.shape[:ind])


# ---- names of the array API standard, which take matrices from the last axes


def vecdot(x1: Any, x2: Any, /, *, axis: int = -1) -> Array:
    """Return sums of products along an axis; the first array is conjugated.

    >>> vecdot(da.ones((2, 3)), da.ones(3)).compute().tolist()
    [3.0, 3.0]
    """
    x1, x2 = as_arrays("vecdot", x1, x2)
    lengths = {x.shape[axis] for x in (x1, x2) if -x.ndim <= axis < x.ndim}
    if len(lengths) != 1 or 0 in (x1.ndim, x2.ndim):
        raise ValueError(
            f"vecdot: axis {axis} of shapes {x1.shape} and {x2.shape} must have one length"
        )
    left = da.moveaxis(x1, axis, -1)
    right = da.moveaxis(x2, axis, -1)
    left = left.conj() if left.dtype.kind == "c" else left
    dtype = np.result_type(x1.dtype, x2.dtype)
    product = left & right if dtype.kind == "b" else left.astype(dtype) * right.astype(dtype)
    return product.any(axis=-1) if dtype.kind == "b" else product.sum(axis=-1, dtype=dtype)


def matmul(x1: Any, x2: Any, /) -> Array:
    """Return the product of matrices, in NumPy's dtype also of small integers."""
    x1, x2 = as_arrays("matmul", x1, x2)
    return da.matmul(x1, x2).astype(np.result_type(x1.dtype, x2.dtype))


def outer(x1: Any, x2: Any, /) -> Array:
    """Return the products of all pairs of elements of two vectors."""
    x1, x2 = as_arrays("outer", x1, x2)
    if x1.ndim != 1 or x2.ndim != 1:
        raise ValueError(
            f"outer: arrays must have one axis, not shapes {x1.shape} and {x2.shape}; "
            "dask.array.outer flattens them"
        )
    return da.outer(x1, x2)


def trace(x: Any, /, *, offset: int = 0, dtype: Any = None) -> Array:
    """Return sums along the diagonals of matrices.

    >>> trace(da.ones((2, 3, 3))).compute().tolist()
    [3.0, 3.0]
    """
    return diagonal(x, offset=offset).sum(axis=-1, dtype=dtype)


def diagonal(x: Any, /, *, offset: int = 0) -> Array:
    """Return the diagonals of matrices."""
    (x,) = as_arrays("diagonal", x)
    return da.diagonal(x, offset=offset, axis1=-2, axis2=-1)


def tensordot(x1: Any, x2: Any, /, *, axes: Any = 2) -> Array:
    """Return sums of products over several axes, in NumPy's dtype also of small integers."""
    x1, x2 = as_arrays("tensordot", x1, x2)
    return da.tensordot(x1, x2, axes=axes).astype(np.result_type(x1.dtype, x2.dtype))


def cross(x1: Any, x2: Any, /, *, axis: int = -1) -> Array:
    """Return the cross products of vectors of three elements."""
    x1, x2 = as_arrays("cross", x1, x2)
    if x1.shape[axis] != 3 or x2.shape[axis] != 3:
        raise ValueError(
            f"cross: axis {axis} must have three elements, in shapes {x1.shape} and {x2.shape}"
        )
    return cross_of_any(x1, x2, axis=axis)
