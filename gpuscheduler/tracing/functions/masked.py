"""Reductions of what a mask selects, on traced arrays.

The kernel goes over all points and counts those at which the mask holds. Element-wise operations
are in `compressed`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from dask.array import reductions as dask_reductions
from dask.array.dispatch import numel_lookup

from ...ir.expr import DType, Shape
from ..array import TracedArray, as_traced, broadcast, reshape_array, scalar_if_point
from ..compressed import OVER_POINTS, CompressedArray, with_values
from ..context import constant, no_out, nothing, refuse
from ..elementwise import choose_elements
from ..registry import KNOWN
from .reductions import divide_by_count, extreme_of, mean_of, prod_of, sum_of, truth_of
from .statistics import squares_of, without_nan


def _with_where(function: Any, change: Any = None) -> Callable[..., Any]:
    """A reduction that takes `where=`, of what `change` makes of the values."""

    def reduce_where(x: TracedArray, mask: TracedArray, axes: Shape, **given: Any) -> Any:
        return function(change(x) if change else x, axes, where=mask, **given)

    return reduce_where


def _count_where(x: TracedArray, mask: TracedArray, axes: Shape) -> Any:
    return sum_of(np.logical_and(x, mask), axes, np.intp)


def _extreme_where(
    op: str, x: TracedArray, mask: TracedArray, axes: Shape, initial: Any = nothing
) -> Any:
    if initial is nothing:
        raise refuse(f"the {op} of what a mask selects is an error where that is nothing")
    return extreme_of(op, x, axes, initial=initial, where=mask)


def _norm_where(x: TracedArray, mask: TracedArray, axes: Shape, ord: Any = None) -> Any:
    if ord not in (None, 2) or len(axes) > mask.ndim:
        raise refuse("a norm of what a mask selects")
    x = x if x.dtype.kind in "fc" else x.astype(np.float64)
    square = np.square(x.real) + np.square(x.imag) if x.dtype.kind == "c" else np.square(x)
    return np.sqrt(sum_of(square, axes, where=mask))


def _nanmean_where(x: TracedArray, mask: TracedArray, axes: Shape, dtype: Any = None) -> Any:
    if x.dtype.kind not in "fc":
        return mean_of(x, axes, dtype, where=mask)
    if dtype is not None and np.dtype(dtype).kind not in "fc":
        raise TypeError("If a is inexact, then dtype must be inexact")
    count = sum_of(np.logical_and(~np.isnan(x), mask), axes, np.intp)
    return divide_by_count(sum_of(without_nan(x, 0), axes, dtype, where=mask), count)


def _var_where(
    x: TracedArray, mask: TracedArray, axes: Shape, dtype: Any = None, ddof: Any = 0,
    correction: Any = nothing, nan: bool = False, **others: Any,
) -> Any:  # fmt: skip
    no_out(None, {"dtype": dtype, **others})
    ddof, half = correction if correction is not nothing else ddof, x.dtype == np.float16
    if x.dtype.kind not in "fc":
        x, nan = x.astype(np.float64), False
    x = x.astype(np.float32) if half else x
    there: Any = np.logical_and(mask, ~np.isnan(x)) if nan else broadcast(mask, x.shape)
    total, count = squares_of(x, there, axes, None, False)
    degrees = reshape_array(count, total.shape) - ddof
    if not nan:
        degrees = np.maximum(degrees, 0)
    variance = divide_by_count(total, degrees)
    if nan:
        variance = choose_elements(degrees <= 0, total.dtype.type(np.nan), variance)
    variance = variance.astype(np.float16) if half else variance
    return scalar_if_point(variance)


def _std_where(*args: Any, **kwargs: Any) -> Any:
    return np.sqrt(_var_where(*args, **kwargs))


OVER_POINTS.update({
    "sum": _with_where(sum_of), "prod": _with_where(prod_of), "mean": _with_where(mean_of),
    "average": _with_where(mean_of), "count_nonzero": _count_where, "norm": _norm_where,
    "any": _with_where(functools.partial(truth_of, "any")),
    "all": _with_where(functools.partial(truth_of, "all")),
    "min": functools.partial(_extreme_where, "min"),
    "max": functools.partial(_extreme_where, "max"),
    "nansum": _with_where(sum_of, functools.partial(without_nan, value=0)),
    "nanprod": _with_where(prod_of, functools.partial(without_nan, value=1)),
    "nanmean": _nanmean_where, "var": _var_where, "std": _std_where,
    "nanvar": functools.partial(_var_where, nan=True),
    "nanstd": functools.partial(_std_where, nan=True),
})  # fmt: skip


def _chunk_extreme(op: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Dask's `chunk_min` or `chunk_max`, which of nothing make nothing."""

    def chunk_extreme(x: Any, axis: Any = None, keepdims: Any = None) -> Any:
        if not isinstance(x, CompressedArray):
            return function(x, axis=axis, keepdims=keepdims)
        if x.ndim > 1 or not keepdims or x.dtype.kind == "c":
            return x._refuse_unknown_length()
        worst = _furthest_value(x.dtype, op == "min")
        value = extreme_of(op, choose_elements(x._mask, x._values, as_traced(worst)))
        return CompressedArray(value.reshape(1), truth_of("any", x._mask).reshape(1), 0)

    return chunk_extreme


def _furthest_value(dtype: DType, up: bool) -> Any:
    """The greatest or the least value of a type."""
    if dtype.kind == "b":
        return np.bool_(up)
    if dtype.kind == "f":
        return dtype.type(np.inf if up else -np.inf)
    return dtype.type(np.iinfo(dtype).max if up else np.iinfo(dtype).min)


for _op, _function in (("min", dask_reductions.chunk_min), ("max", dask_reductions.chunk_max)):
    KNOWN[_function] = _chunk_extreme(_op, _function)


@numel_lookup.register(CompressedArray)  # type: ignore[untyped-decorator]
def _numel_selected(x: CompressedArray, **kwargs: Any) -> Any:
    """The number of elements that a reduction over `axis` adds up.

    This is the number of selected points times the lengths of the other axes.
    """
    axis, dtype = kwargs.get("axis"), kwargs.get("dtype", np.float64)
    ones = with_values(x, TracedArray(constant(1, dtype), x._values.shape))
    axis = tuple(axis) if isinstance(axis, list) else axis
    return np.sum(ones, axis=axis, dtype=dtype, keepdims=kwargs.get("keepdims", False))
