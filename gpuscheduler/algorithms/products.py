"""Products and rearrangements that Dask lacks, each in a few of Dask's own functions."""

from __future__ import annotations

from functools import partial
from typing import Any

import dask.array as da
import numpy as np

from .blocks import array_module


def inner(a: Any, b: Any, /) -> Any:
    """Sum products over the last axes, as `numpy.inner`.

    >>> int(inner(da.arange(3, chunks=2), da.ones(3, chunks=2, dtype=int)).compute())
    3
    """
    a, b = da.asanyarray(a), da.asanyarray(b)
    if a.ndim == 0 or b.ndim == 0:
        return a * b
    return da.tensordot(a, b, axes=((a.ndim - 1,), (b.ndim - 1,)))  # it takes no -1 right


def matrix_transpose(x: Any, /) -> Any:
    """Swap the last two axes, as `numpy.matrix_transpose`.

    >>> matrix_transpose(da.ones((2, 3, 4), chunks=2)).shape
    (2, 4, 3)

    Raises
    ------
    ValueError
        if `x` has fewer than two axes.
    """
    x = da.asanyarray(x)
    if x.ndim < 2:
        raise ValueError(f"matrix_transpose: x has {x.ndim} axes, use an array of at least 2")
    return da.swapaxes(x, -1, -2)


def kron(a: Any, b: Any) -> Any:
    """Multiply each element of `a` by the whole of `b`, as `numpy.kron`.

    >>> kron(da.arange(2, chunks=1), da.ones(2, chunks=2, dtype=int)).compute()
    array([0, 0, 1, 1])
    """
    a, b = da.asanyarray(a), da.asanyarray(b)
    n = max(a.ndim, b.ndim)
    a = a[(None,) * (n - a.ndim)]
    b = b[(None,) * (n - b.ndim)]
    shape = tuple(i * j for i, j in zip(a.shape, b.shape, strict=True))
    wide = a[tuple(part for _ in range(n) for part in (slice(None), None))]
    tall = b[tuple(part for _ in range(n) for part in (None, slice(None)))]
    return (wide * tall).reshape(shape)


def cross(
    a: Any, b: Any, axisa: int = -1, axisb: int = -1, axisc: int = -1, axis: int | None = None
) -> Any:
    """Return the cross product of vectors, as `numpy.cross`.

    >>> cross(da.asarray([1, 0, 0]), da.asarray([0, 1, 0])).compute()
    array([0, 0, 1])

    Raises
    ------
    ValueError
        if an axis of the vectors is not 2 or 3 long.
    """
    if axis is not None:
        axisa = axisb = axisc = axis
    a = da.moveaxis(da.asanyarray(a), axisa, -1)
    b = da.moveaxis(da.asanyarray(b), axisb, -1)
    if a.shape[-1] not in (2, 3) or b.shape[-1] not in (2, 3):
        raise ValueError(f"cross: vectors are {a.shape[-1]} and {b.shape[-1]} long, use 2 or 3")
    flat = a.shape[-1] == b.shape[-1] == 2
    a0, a1, b0, b1 = a[..., 0], a[..., 1], b[..., 0], b[..., 1]
    z = a0 * b1 - a1 * b0
    if flat:
        return z
    if a.shape[-1] == 2:
        x, y = a1 * b[..., 2], -(a0 * b[..., 2])
    elif b.shape[-1] == 2:
        x, y = -(a[..., 2] * b1), a[..., 2] * b0
    else:
        x, y = a1 * b[..., 2] - a[..., 2] * b1, a[..., 2] * b0 - a0 * b[..., 2]
    return da.moveaxis(da.stack([x, y, z], axis=-1), -1, axisc)


def take_along_axis(arr: Any, indices: Any, axis: int | None = -1) -> Any:
    """Take elements by index within each line, as `numpy.take_along_axis`.

    Lines of `arr` along `axis` are brought into one chunk.

    >>> x = da.asarray([[3, 1, 2]])
    >>> take_along_axis(x, da.asarray([[1, 2, 0]]), axis=1).compute()
    array([[1, 2, 3]])

    Raises
    ------
    IndexError
        if `indices` are no integers, or (inside the task) out of bounds.
    ValueError
        if both have not as many axes.
    """
    arr, indices = da.asanyarray(arr), da.asanyarray(indices)
    if axis is None:
        arr, axis = arr.ravel(), 0
        if indices.ndim != 1:
            raise ValueError("take_along_axis: with axis=None, indices must have one axis")
    if indices.dtype.kind not in "iu":
        raise IndexError(f"take_along_axis: indices are {indices.dtype}, use integers")
    if arr.ndim != indices.ndim:
        raise ValueError(
            f"take_along_axis: arr has {arr.ndim} axes and indices {indices.ndim}, use as many"
        )
    axis = int(np.lib.array_utils.normalize_axis_index(axis, arr.ndim))
    shape = np.broadcast_shapes(*(x[:axis] + x[axis + 1 :] for x in (arr.shape, indices.shape)))
    shape = tuple(int(n) for n in shape)
    arr = da.broadcast_to(arr, (*shape[:axis], arr.shape[axis], *shape[axis:]))
    indices = da.broadcast_to(indices, (*shape[:axis], indices.shape[axis], *shape[axis:]))
    arr = arr.rechunk({axis: -1})
    others = {i: c for i, c in enumerate(arr.chunks) if i != axis}
    indices = indices.rechunk(others)
    axes = tuple(range(arr.ndim))
    of_arr = tuple(arr.ndim if i == axis else i for i in axes)
    return da.blockwise(
        partial(_take, axis=axis), axes, arr, of_arr, indices, axes,
        concatenate=True, dtype=arr.dtype, meta=arr._meta,
    )  # fmt: skip


def _take(block: Any, indices: Any, *, axis: int) -> Any:
    n = block.shape[axis]
    if indices.size and not (-n <= int(indices.min()) and int(indices.max()) < n):
        raise IndexError(f"take_along_axis: an index is out of bounds for axis {axis} of {n}")
    xp = array_module(block)
    return xp.take_along_axis(block, xp.where(indices < 0, indices + n, indices), axis=axis)
