"""Dask's own chunk functions, on traced arrays.

These are moments in one pass, positions of extremes, getters, and elements taken by index.
"""

from __future__ import annotations

import builtins
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from dask.array import chunk as dask_chunk
from dask.array import reductions as dask_reductions
from dask.array.dispatch import numel_lookup
from dask.array.optimization import GETTERS
from dask.array.slicing import setitem
from dask.core import flatten

from ...dask_private import (
    block_histogramdd_multiarg,
    block_histogramdd_rect,
    nanquantile_functions,
)
from ...frontend import compiled_task, index_lists
from ...ir.expr import View
from ..array import TracedArray, as_traced, expand, reshape_array, scalar_if_point
from ..context import constant, current, node_of, refuse
from ..elementwise import choose_elements
from ..reduce import SHORT, axes_of, reduce, reduced_shape
from ..registry import KNOWN, instead_of
from .reductions import count_of, extreme_of, moment_of, not_empty, sum_of
from .statistics import without_nan


@numel_lookup.register(TracedArray)  # type: ignore[untyped-decorator]
def _numel(x: TracedArray, **kwargs: Any) -> Any:
    """How many elements a reduction over `axis` adds up, as an array of the reduced shape."""
    axis, dtype = kwargs.get("axis"), kwargs.get("dtype", np.float64)
    keepdims = kwargs.get("keepdims", False)
    if axis is None and not keepdims:
        return np.prod(x.shape, dtype=dtype)
    axes = axes_of(x, tuple(axis) if isinstance(axis, list) else axis)
    count = math.prod(x.shape[k] for k in axes)
    return TracedArray(constant(count, dtype), reduced_shape(x, axes, keepdims))


@instead_of(dask_reductions.moment_chunk)
def _moment_chunk(
    A: Any, order: int = 2, sum: Any = dask_chunk.sum, numel: Any = dask_reductions.numel,
    dtype: Any = "f8", computing_meta: bool = False, implicit_complex_dtype: bool = False,
    axis: Any = None, keepdims: Any = False, **kwargs: Any,
) -> Any:  # fmt: skip
    """Mean and squared deviations in one pass over the chunk, where Dask takes two."""
    dtype = np.dtype(dtype)
    two = not (isinstance(A, TracedArray) and A.dtype.kind != "c" and dtype.kind == "f" and A.size)
    if two or computing_meta or order != 2 or kwargs or sum is not dask_chunk.sum:
        return dask_reductions.moment_chunk(
            A, order=order, sum=sum, numel=numel, dtype=dtype, computing_meta=computing_meta,
            implicit_complex_dtype=implicit_complex_dtype, axis=axis, keepdims=keepdims, **kwargs,
        )  # fmt: skip
    axes = axes_of(A, axis)
    mean, squares = moment_of(A, axes, dtype, keepdims)
    count = TracedArray(constant(count_of(A, axes), np.int64), mean.shape)
    return {
        "total": np.multiply(mean, count_of(A, axes)).astype(dtype),
        "n": count,
        "M": expand(squares.astype(dtype), -1),
    }


def _few_moments(
    pairs: Any, order: int, sum: Any, axis: Any, others: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Merge a few moments of blocks that are one element thick and have known counts.

    The result has an expression for each element, in double precision. Returns None for other
    moments. Then short rows are not reduced by expressions either (`short`): what Dask computes
    next reads the sums for each of its elements, and would compute them again each time.
    """
    few = None
    if others.keys() <= {"keepdims"}:
        few = _beside_each_other(list(flatten([pairs])), order, sum, axis)
    if few is None:
        current.get().short = False
    return few


def _beside_each_other(
    every: list[Any], order: int, sum: Any, axis: Any
) -> dict[str, Any] | None:  # fmt: skip
    if order != 2 or sum is not np.sum or not current.get().products or len(every) > SHORT:
        return None
    totals, counts, squares = ([p[name] for p in every] for name in ("total", "n", "M"))
    arrays = [a for a in (*totals, *counts) if isinstance(a, TracedArray)]
    if len(arrays) < 2 * len(every) or any(a.shape != arrays[0].shape for a in arrays):
        return None
    first = arrays[0]
    thick = any(first.shape[k] != 1 for k in axes_of(first, axis)) or not first.size
    if thick or first.dtype.kind != "f" or any(n._expr.op != "constant" for n in counts):
        return None
    numbers = [int(n._expr.value) for n in counts]
    n = np.int64(builtins.sum(numbers))
    wide = [t.astype(np.float64) for t in totals]
    total = functools.reduce(np.add, wide)
    mean, away = np.true_divide(total, n), []
    for t, k, m in zip(wide, numbers, squares, strict=True):
        square = np.square(np.subtract(t if k == 1 else np.true_divide(t, np.int64(k)), mean))
        own = m[..., 0].astype(np.float64)
        away += [own, square if k == 1 else np.multiply(square, np.float64(k))]
    return {"total": total, "n": n, "M": functools.reduce(np.add, away)}


@instead_of(dask_reductions.moment_combine)
def _moment_combine(
    pairs: Any, order: int = 2, ddof: Any = 0, dtype: Any = "f8", sum: Any = np.sum,
    axis: Any = None, **kwargs: Any,
) -> Any:  # fmt: skip
    few = _few_moments(pairs, order, sum, axis, kwargs)
    if few is None:
        return dask_reductions.moment_combine(pairs, order, ddof, dtype, sum, axis, **kwargs)
    first = next(flatten([pairs]))
    total = few["total"].astype(first["total"].dtype)
    count = TracedArray(constant(few["n"], np.int64), total.shape)
    return {"total": total, "n": count, "M": expand(few["M"].astype(first["M"].dtype), -1)}


@instead_of(dask_reductions.moment_agg)
def _moment_agg(
    pairs: Any, order: int = 2, ddof: Any = 0, dtype: Any = "f8", sum: Any = np.sum,
    axis: Any = None, **kwargs: Any,
) -> Any:  # fmt: skip
    """`dask.array.reductions.moment_agg`; variances of few blocks take fewer operations."""
    few = _few_moments(pairs, order, sum, axis, kwargs)
    if few is None:
        return dask_reductions.moment_agg(pairs, order, ddof, dtype, sum, axis, **kwargs)
    squares, left = few["M"], few["n"] - ddof
    shape = reduced_shape(squares, axes_of(squares, axis), kwargs.get("keepdims", False))
    variance = np.true_divide(squares, np.float64(left if left >= 0 else np.nan))
    return scalar_if_point(reshape_array(variance.astype(dtype), shape))


@instead_of(dask_reductions._nanargmin)
def _nanargmin(x: Any, axis: Any, **kwargs: Any) -> TracedArray:
    return dask_chunk.argmin(without_nan(as_traced(x), np.inf), axis, **kwargs)  # type: ignore[no-any-return]


@instead_of(dask_reductions._nanargmax)
def _nanargmax(x: Any, axis: Any, **kwargs: Any) -> TracedArray:
    return dask_chunk.argmax(without_nan(as_traced(x), -np.inf), axis, **kwargs)  # type: ignore[no-any-return]


#: Dask's argument functions: the reduction, and what a NaN counts as.
_ARGS: dict[Any, tuple[str, float | None]] = {
    dask_chunk.argmin: ("argmin", None), dask_chunk.argmax: ("argmax", None),
    dask_reductions._nanargmin: ("argmin", np.inf), _nanargmin: ("argmin", np.inf),
    dask_reductions._nanargmax: ("argmax", -np.inf), _nanargmax: ("argmax", -np.inf),
}  # fmt: skip


def _first_best(argfunc: Any, x: TracedArray, axis: int | None) -> tuple[TracedArray, TracedArray]:
    """Where the extreme value is along an axis (or at all), and the value; axes kept."""
    op, nan = _ARGS[argfunc]
    whole = x if nan is None else without_nan(x, nan)
    axes = axes_of(x, axis)
    at, value = reduce(op, whole, axes, (np.int64, x.dtype), True)
    if nan is not None:  # the value is NaN where all are
        value = extreme_of("fmin" if op == "argmin" else "fmax", x, axes, keepdims=True)
    return at, value


@instead_of(dask_reductions.arg_chunk)
def _arg_chunk(func: Any, argfunc: Any, x: Any, axis: Any, offset_info: Any) -> Any:
    along = None if len(axis) == x.ndim or x.ndim == 1 else axis[0]
    not_empty(x, axes_of(x, along), "reduction operation " + _ARGS[argfunc][0])
    at, value = _first_best(argfunc, x, along)
    if x.ndim and along is None:
        offset, total = offset_info
        place: Any = 0
        for k, n in enumerate(x.shape):
            inner = math.prod(x.shape[k + 1 :])
            here = at // inner if inner > 1 else at
            here = here % n if k else here
            place = place + (here + _single_number(offset[k])) * math.prod(total[k + 1 :])
        at = place
    elif x.ndim:
        at = at + _single_number(offset_info)
    return {"vals": value, "arg": at}


def _single_number(number: Any) -> Any:
    """A number that is given as such, or as the only one of an array."""
    return reshape_array(number, ()) if isinstance(number, TracedArray) else int(number)


def _arg_merge(
    data: Any, axis: Any, argfunc: Any, keepdims: bool
) -> tuple[TracedArray, TracedArray]:
    values, places = data["vals"], data["arg"]
    along = None if len(axis) == values.ndim or values.ndim == 1 else axis[0]
    at, value = _first_best(argfunc, values, along)
    position = View.contiguous(values.shape)
    if along is not None:
        position = View(0, tuple(int(k == along) for k in range(values.ndim)))
    index = TracedArray(node_of("index", (), np.int64, position), values.shape)
    # the one place that belongs to the best value, among zeros
    chosen = choose_elements(index == at, places, places.dtype.type(0))
    place = sum_of(chosen, along, places.dtype, keepdims=keepdims)
    return place, value if keepdims else reshape_array(value, place.shape)


@instead_of(dask_reductions.arg_combine)
def _arg_combine(argfunc: Any, data: Any, axis: Any = None, **kwargs: Any) -> Any:
    place, value = _arg_merge(data, axis, argfunc, True)
    return {"vals": value, "arg": place}


@instead_of(dask_reductions.arg_agg)
def _arg_agg(
    argfunc: Any, data: Any, axis: Any = None, keepdims: bool = False, **kwargs: Any
) -> Any:
    return _arg_merge(data, axis, argfunc, keepdims)[0]


@instead_of(dask_reductions.nanarg_agg)
def _nanarg_agg(*args: Any, **kwargs: Any) -> Any:
    raise refuse("numpy.nanargmin is an error where all values are NaN")


def _getter_function(getter: Callable[..., Any]) -> Callable[..., Any]:
    def get(a: Any, b: Any, asarray: bool = True, lock: Any = None) -> Any:
        if lock:
            raise refuse("it takes a lock")
        return getter(a, b, asarray=asarray)

    return get


for _getter in GETTERS:
    if "asarray" in _getter.__code__.co_varnames:
        KNOWN[_getter] = _getter_function(_getter)


@instead_of(block_histogramdd_multiarg)
def _block_histogram(*args: Any) -> Any:
    *sample, bins, range, weights = args
    return np.histogramdd(tuple(sample), bins, range, weights=weights)[0][np.newaxis]


@instead_of(block_histogramdd_rect)
def _block_histogram_of_rows(sample: Any, bins: Any, range: Any, weights: Any) -> Any:
    return np.histogramdd(sample, bins, range, weights=weights)[0][np.newaxis]


def _nanquantile(a: Any, q: Any, axis: Any = None, **kwargs: Any) -> Any:
    return np.nanquantile(a, q, axis, **kwargs)


for _of_dask in nanquantile_functions():
    instead_of(_of_dask)(_nanquantile)


@instead_of(compiled_task.set_elements)
def _set_elements(x: Any, v: Any, indices: list[Any]) -> Any:
    if any(isinstance(i, TracedArray) and i.dtype.kind in "iu" and i.ndim for i in indices):
        raise refuse("it sets elements by an array of their numbers")
    return setitem(x, v, indices)


@instead_of(index_lists.take_slices)
def _take_slices(x: Any, axis: int, slices: Iterable[slice]) -> Any:
    """A view: what makes it copies it, and readers that are kernels write into nothing."""
    return index_lists.join_arrays(index_lists.parts_of(as_traced(x), axis, slices), axis)
