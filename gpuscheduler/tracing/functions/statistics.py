"""NumPy's statistics and other composed functions, on traced arrays.

NumPy computes them in a few steps, and so does this file. Ufuncs are in `elementwise`.
"""

from __future__ import annotations

import builtins
import functools
import math
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from numpy.lib.array_utils import normalize_axis_index, normalize_axis_tuple

from ...ir.bins import Bins, comparison_dtype
from ...ir.expr import DType, View
from ..array import TracedArray, as_traced, broadcast, implements, reshape_array, scalar_if_point
from ..compressed import CompressedArray, have_same_selection, nan_elsewhere
from ..context import cast_to, change_views, no_out, node_of, nothing, refuse
from ..elementwise import choose_elements, clip_array, complex_of, round_array
from ..reduce import axes_of, reduce
from .creation import fill_array
from .reductions import (
    accumulate_axis,
    accumulate_ufunc,
    divide_by_count,
    mean_of,
    prod_of,
    sum_of,
    var_of,
)
from .shapes import concatenate


@implements("histogram")
def _histogram(
    a: Any, bins: Any = 10, range: Any = None, density: Any = None, weights: Any = None
) -> tuple[TracedArray, np.ndarray[Any, Any]]:
    if density:
        raise refuse("it makes a histogram of densities")
    x = nan_elsewhere(a) if isinstance(a, CompressedArray) else as_traced(a)
    if weights is not None and isinstance(a, CompressedArray):
        if not isinstance(weights, CompressedArray) or not have_same_selection(a, weights):
            raise refuse("a mask selects the values of its histogram, and not so the weights")
        weights = weights._values
    if any(isinstance(v, TracedArray) for v in (bins, range)) or isinstance(bins, str):
        raise refuse("the bins of its histogram depend on values")
    if range is None and np.ndim(bins) == 0:
        raise refuse("its histogram has no range")
    if x.dtype.kind not in "iuf":
        raise refuse(f"it makes a histogram of {x.dtype}")
    edges = np.histogram_bin_edges(np.empty(0, x.dtype), bins, range)
    x = x if x.ndim else x.reshape(1)
    where = _bin(x, edges)
    if weights is None:
        return count_numbers(where, len(edges) - 1), edges
    weights = as_traced(weights)
    kind, itemsize = weights.dtype.kind, weights.dtype.itemsize
    exact = kind in "iu" and max(x.size, 1) << 8 * itemsize <= 2**53
    if not (exact or (kind == "f" and itemsize <= 8)):
        raise refuse(f"it weighs {x.size:,} values of a histogram by {weights.dtype}")
    found = weigh_numbers(where, len(edges) - 1, weights)
    if exact:
        found = found.astype(np.int64)  # from where it wraps around
    return found.astype(weights.dtype), edges


@implements("histogramdd")
def _histogramdd(
    sample: Any, bins: Any = 10, range: Any = None, density: Any = None, weights: Any = None
) -> tuple[TracedArray, list[np.ndarray[Any, Any]]]:
    if density:
        raise refuse("it makes a histogram of densities")
    if isinstance(sample, TracedArray):
        rows = sample if sample.ndim == 2 else sample.reshape(-1, 1)
        sample = [rows[:, k] for k in builtins.range(rows.shape[1])]
    columns, one = [as_traced(x) for x in sample], isinstance(bins, (int, np.integer))
    sizes = [bins] * len(columns) if one else [*bins]
    if any(isinstance(v, TracedArray) for v in (*sizes, *(range or ()))):
        raise refuse("the bins of its histogram depend on values")
    if range is None and any(np.ndim(n) == 0 for n in sizes):
        raise refuse("its histogram has no range")
    dtype = np.result_type(*[x.dtype for x in columns])
    if dtype.kind not in "iuf" or any(x.ndim != 1 for x in columns):
        raise refuse(f"it makes a histogram of {dtype}")
    edges = np.histogramdd(np.empty((0, len(columns))), bins, range)[1]
    shape = tuple([len(e) - 1 for e in edges])
    size = math.prod(shape)
    where: Any = 0
    outside = []
    for x, e in zip(columns, edges, strict=True):
        found = _bin(TracedArray(cast_to(x._expr, dtype), x.shape), e)
        outside.append(found == len(e) - 1)
        where = where * (len(e) - 1) + found
    where = choose_elements(functools.reduce(np.logical_or, outside), np.int64(size), where)
    if weights is None:
        found = count_numbers(where, size).astype(np.float64)
    else:
        found = weigh_numbers(where, size, weights)
    return reshape_array(found, shape), list(edges)


def count_numbers(bins: TracedArray, count: int) -> TracedArray:
    """How often each number below `count` occurs."""
    (found,) = reduce("histogram", *_for_each(bins, count), (np.intp,))
    return found


def weigh_numbers(bins: TracedArray, count: int, weights: Any) -> TracedArray:
    """What the weights of each number below `count` add up to, as float64."""
    weights = as_traced(weights)
    if weights.shape != bins.shape:  # NumPy says so
        raise refuse(f"it weighs {bins.shape} values by {weights.shape} weights")
    if weights.dtype.kind not in "biuf":
        raise refuse(f"it weighs by {weights.dtype}")
    parts = bins.astype(np.float64), weights.astype(np.float64)
    both = complex_of(*parts, np.dtype(np.complex128))
    (found,) = reduce("histogram", *_for_each(both, count), (np.float64,))
    return found


def _for_each(values: TracedArray, count: int) -> tuple[TracedArray, tuple[int, ...]]:
    """Repeat values along a new first axis, for the bins.

    A kernel finds the bin of each value once all the same.
    """
    if count < 1:
        raise refuse("its histogram has no bins")
    expr = change_views(values._expr, lambda view: View(view.offset, (0, *view.strides)))
    spread = TracedArray(expr, (count, *values.shape))
    return spread, tuple(builtins.range(1, spread.ndim))


def _bin(x: TracedArray, edges: np.ndarray[Any, Any]) -> TracedArray:
    """Which bin each value is in; their count for what is in none."""
    kind = comparison_dtype(x.dtype, edges.dtype)
    if kind is None:
        raise refuse(f"it makes a histogram of {x.dtype} with edges of {edges.dtype}")
    return _in_bins(x, Bins.from_edges(edges.astype(kind)))


def _in_bins(x: TracedArray, bins: Bins) -> TracedArray:
    expr = node_of("bin", (cast_to(x._expr, bins.edges.dtype),), np.int64, bins)
    return TracedArray(expr, x.shape)


def evenly_binned(x: TracedArray, edges: np.ndarray[Any, Any]) -> TracedArray | None:
    """Which bin each value is in, of edges that lie evenly; None of others."""
    if comparison_dtype(x.dtype, edges.dtype) != edges.dtype:
        return None
    bins = Bins.from_edges(edges)
    return _in_bins(x, bins) if bins.is_even else None


@implements("std")
def _std(*args: Any, **kwargs: Any) -> Any:
    return np.sqrt(var_of(*args, **kwargs))


@implements("where")
def _where_function(condition: Any, *choices: Any) -> TracedArray:
    if len(choices) != 2:
        raise refuse("numpy.where with one argument asks for positions")
    return choose_elements(condition, *choices)


@implements("clip")
def _clip_function(
    a: Any, a_min: Any = None, a_max: Any = None, out: Any = None, *, min: Any = None,
    max: Any = None, **kwargs: Any,
) -> Any:  # fmt: skip
    no_out(out, kwargs)
    return clip_array(as_traced(a), a_min, a_max, min=min, max=max)


@implements("round", "around")
def _round_function(a: Any, decimals: int = 0, out: Any = None) -> Any:
    no_out(out)
    return round_array(as_traced(a), decimals)


@implements("ptp")
def _ptp(a: Any, axis: Any = None, out: Any = None, keepdims: Any = False) -> Any:
    no_out(out)
    x = as_traced(a)
    return np.subtract(x.max(axis, keepdims=keepdims), x.min(axis, keepdims=keepdims))


@implements("count_nonzero")
def _count_nonzero(a: Any, axis: Any = None, *, keepdims: Any = False) -> TracedArray:
    return sum_of(as_traced(a).astype(bool), axis, np.intp, keepdims=keepdims)


@implements("average")
def _average(
    a: Any, axis: Any = None, weights: Any = None, returned: bool = False, *, keepdims: Any = False
) -> Any:
    if weights is not None or returned:
        raise refuse("it computes a weighted average, which is an error where weights add to 0")
    x = as_traced(a)
    if not axes_of(x, axis) and not x.size:
        raise refuse("it computes an average along no axis, which is an error")
    return mean_of(x, axis, keepdims=keepdims)


def without_nan(x: TracedArray, value: Any) -> TracedArray:
    if x.dtype.kind not in "fc":
        return x
    return choose_elements(np.isnan(x), as_traced(x.dtype.type(value)), x)


@implements("nansum")
def _nansum(a: Any, *args: Any, **kwargs: Any) -> TracedArray:
    return sum_of(without_nan(as_traced(a), 0), *args, **kwargs)


@implements("nanprod")
def _nanprod(a: Any, *args: Any, **kwargs: Any) -> TracedArray:
    return prod_of(without_nan(as_traced(a), 1), *args, **kwargs)


@implements("nancumsum")
def _nancumsum(a: Any, *args: Any, **kwargs: Any) -> TracedArray:
    return accumulate_axis(np.add, without_nan(as_traced(a), 0), *args, **kwargs)


@implements("nancumprod")
def _nancumprod(a: Any, *args: Any, **kwargs: Any) -> TracedArray:
    return accumulate_axis(np.multiply, without_nan(as_traced(a), 1), *args, **kwargs)


@implements("cumulative_sum")
def _cumulative_sum(
    x: Any, /, *, axis: Any = None, dtype: Any = None, out: Any = None,
    include_initial: bool = False, ufunc: Any = np.add,
) -> TracedArray:  # fmt: skip
    x = as_traced(x)
    if axis is None and x.ndim != 1:
        raise ValueError("axis must be specified for an array of more than one dimension")
    axis = 0 if axis is None else normalize_axis_index(axis, x.ndim)
    found = accumulate_ufunc(ufunc, x, axis, dtype, out)
    if not include_initial:
        return found
    shape = (*x.shape[:axis], 1, *x.shape[axis + 1 :])
    return concatenate([fill_array(shape, ufunc.identity, found.dtype), found], axis)


implements("cumulative_prod")(functools.partial(_cumulative_sum, ufunc=np.multiply))


@implements("nanmean")
def _nanmean(
    a: Any, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: Any = False, *,
    where: Any = True,
) -> Any:  # fmt: skip
    no_out(out, None if where in (True, nothing) else {"where": where})
    x = as_traced(a)
    if x.dtype.kind not in "fc":
        return mean_of(x, axis, dtype, keepdims=keepdims)
    count = sum_of(~np.isnan(x), axis, np.intp, keepdims=keepdims)
    return divide_by_count(sum_of(without_nan(x, 0), axis, dtype, keepdims=keepdims), count)


@implements("nanvar")
def _nanvar(
    a: Any, axis: Any = None, dtype: Any = None, out: Any = None, ddof: Any = 0,
    keepdims: Any = False, *, where: Any = True, mean: Any = nothing, correction: Any = nothing,
) -> Any:  # fmt: skip
    no_out(out, {"mean": mean} | ({} if where in (True, nothing) else {"where": where}))
    x, ddof = as_traced(a), correction if correction is not nothing else ddof
    if x.dtype.kind not in "fc":
        return var_of(x, axis, dtype, ddof=ddof, keepdims=keepdims)
    total, count = squares_of(x, cast(TracedArray, ~np.isnan(x)), axis, dtype, keepdims)
    degrees = reshape_array(count, total.shape) - ddof
    variance = choose_elements(
        degrees <= 0, total.dtype.type(np.nan), divide_by_count(total, degrees)
    )
    return scalar_if_point(variance)


def squares_of(
    x: TracedArray, there: TracedArray, axis: Any, dtype: Any, keepdims: Any
) -> tuple[TracedArray, TracedArray]:  # fmt: skip
    """The sum of squared deviations from the mean, and the number of elements counted."""
    count = sum_of(there, axis, np.intp, keepdims=True)
    mean = divide_by_count(sum_of(x, axis, dtype, keepdims=True, where=there), count)
    away = choose_elements(there, np.subtract(x, mean).astype(x.dtype), x.dtype.type(0))
    squares = np.square(away.real) + np.square(away.imag) if x.dtype.kind == "c" else away * away
    return sum_of(squares, axis, dtype, keepdims=keepdims), count


@implements("nanstd")
def _nanstd(*args: Any, **kwargs: Any) -> Any:
    return np.sqrt(_nanvar(*args, **kwargs))


@implements("nanargmin", "nanargmax")
def _nanarg(*args: Any, **kwargs: Any) -> TracedArray:
    raise refuse("numpy.nanargmin is an error where all values are NaN")


@implements("linalg.norm")
def _norm(x: Any, ord: Any = None, axis: Any = None, keepdims: bool = False) -> Any:
    x = as_traced(x)
    if x.dtype.kind not in "fc":
        x = x.astype(np.float64)
    if ord is not None and axis is None and x.ndim not in (1, 2):
        raise ValueError("Improper number of dimensions to norm.")
    axes = axes_of(x, axis)

    def root() -> Any:
        squares = np.square(x.real) + np.square(x.imag) if x.dtype.kind == "c" else np.square(x)
        return np.sqrt(squares.sum(axes, keepdims=keepdims))

    if ord is None and (axis is None or len(axes) in (1, 2)):
        return root()
    if len(axes) == 2:
        pair = tuple(normalize_axis_tuple(axis if axis is not None else (0, 1), x.ndim))
        if ord in ("fro", "f"):
            return root()
        if ord in (1, -1, math.inf, -math.inf):
            first = pair[0] if abs(ord) == 1 else pair[1]
            (second,) = set(pair) - {first}
            sums = np.abs(x).sum(first, keepdims=True)
            worst = sums.max(second, keepdims=True) if ord > 0 else sums.min(second, keepdims=True)
            return worst if keepdims else scalar_if_point(worst.squeeze(pair))
        raise refuse(f"the matrix norm {ord!r} needs singular values")
    if len(axes) != 1 or isinstance(ord, str):
        raise ValueError("Improper number of dimensions to norm.")
    if ord == math.inf:
        return np.abs(x).max(axes, keepdims=keepdims)
    if ord == -math.inf:
        return np.abs(x).min(axes, keepdims=keepdims)
    if ord == 0:
        return (x != 0).astype(x.real.dtype).sum(axes, keepdims=keepdims)
    if ord == 1:
        return np.abs(x).sum(axes, keepdims=keepdims)
    if ord == 2:
        return root()
    powers = np.power(np.abs(x), ord).sum(axes, keepdims=keepdims)
    return np.power(powers, np.reciprocal(ord, dtype=powers.dtype))


@implements("diff")
def _diff(
    a: Any, n: int = 1, axis: int = -1, prepend: Any = nothing, append: Any = nothing
) -> TracedArray:
    if n < 0:
        raise refuse("it takes differences of an order below zero")
    x = as_traced(a)
    axis = normalize_axis_index(axis, x.ndim)
    before = (slice(None),) * axis

    def end(v: Any) -> list[TracedArray]:
        if v is nothing or v is None:
            return []
        v = as_traced(v)
        return [v if v.ndim else broadcast(v, x.shape[:axis] + (1,) + x.shape[axis + 1 :])]

    parts = [*end(prepend), x, *end(append)]
    x = concatenate(parts, axis) if len(parts) > 1 else x
    for _ in range(n):
        pair = x[(*before, slice(1, None))], x[(*before, slice(None, -1))]
        step: Any = np.not_equal if x.dtype == bool else np.subtract
        x = step(*pair)
    return x


@implements("gradient")
def _gradient(f: Any, *spacing: Any, axis: Any = None, edge_order: int = 1) -> Any:
    x = as_traced(f)
    axes = axes_of(x, axis) if axis is None else normalize_axis_tuple(axis, x.ndim)
    steps = list(spacing) * (len(axes) if len(spacing) == 1 else 1) or [1.0] * len(axes)
    if len(steps) != len(axes) or edge_order != 1 or any(np.ndim(s) for s in steps):
        raise refuse("it takes a gradient over points that are not evenly spaced")
    if x.dtype.kind in "iu":
        x = x.astype(np.float64)
    out = []
    for k, h in zip(axes, steps, strict=True):
        if x.shape[k] < 2:
            raise ValueError("Shape of array too small to calculate a numerical gradient")

        def slice_axis(a: Any, b: Any, k: int = k) -> TracedArray:
            return x[(*(slice(None),) * k, slice(a, b))]

        middle = (slice_axis(2, None) - slice_axis(None, -2)) / (2.0 * h)
        first, last = (
            (slice_axis(1, 2) - slice_axis(0, 1)) / h,
            (slice_axis(-1, None) - slice_axis(-2, -1)) / h,
        )
        out.append(concatenate([first, middle, last], k).astype(x.dtype))  # whatever h is
    return out[0] if len(axes) == 1 else tuple(out)


@implements("fix")
def _fix(x: Any, out: Any = None) -> Any:
    no_out(out)
    return np.trunc(as_traced(x))


@implements("real")
def _real(val: Any) -> TracedArray:
    return as_traced(val).real


@implements("imag")
def _imag(val: Any) -> TracedArray:
    return as_traced(val).imag


@implements("angle")
def _angle(z: Any, deg: bool = False) -> Any:
    z = as_traced(z)
    imag = z.imag if z.dtype.kind == "c" else 0
    a = np.arctan2(imag, z.real)
    return a * (180 / math.pi) if deg else a


@implements("sinc")
def _sinc(x: Any) -> Any:
    x = np.pi * as_traced(x)
    small = np.finfo(x.dtype).eps if x.dtype.kind == "f" else 1e-20
    y = choose_elements(x != 0, x, x.dtype.type(small))
    return np.sin(y) / y


@implements("isposinf")
def _isposinf(x: Any, out: Any = None) -> Any:
    no_out(out)
    return np.logical_and(np.isinf(x), ~np.signbit(x))


@implements("isneginf")
def _isneginf(x: Any, out: Any = None) -> Any:
    no_out(out)
    return np.logical_and(np.isinf(x), np.signbit(x))


@implements("nan_to_num")
def _nan_to_num(
    x: Any, copy: bool = True, nan: Any = 0.0, posinf: Any = None, neginf: Any = None
) -> Any:
    """Trace `numpy.nan_to_num`."""
    x = as_traced(x)
    if not copy:
        raise refuse("nan_to_num(copy=False) modifies its input in place")
    if x.dtype.kind not in "fc":
        return scalar_if_point(x)
    if x.dtype.kind == "c":
        parts = [_nan_to_num(p, True, nan, posinf, neginf) for p in (x.real, x.imag)]
        return complex_of(parts[0], parts[1], x.dtype)
    limits, kind = np.finfo(x.dtype), x.dtype.type
    high = kind(limits.max if posinf is None else posinf)
    low = kind(limits.min if neginf is None else neginf)
    finite = choose_elements(_isposinf(x), high, choose_elements(_isneginf(x), low, x))
    return scalar_if_point(choose_elements(np.isnan(x), kind(nan), finite))


@implements("isclose")
def _isclose(
    a: Any, b: Any, rtol: Any = 1e-05, atol: Any = 1e-08, equal_nan: bool = False
) -> TracedArray:
    x = a if type(a) in (int, float, complex) else as_traced(a)
    y = float(b) if isinstance(b, int) else b
    if not isinstance(y, float | complex):
        y = as_traced(y)
        y = y.astype(np.result_type(y.dtype, 1.0))
    result = np.less_equal(abs(x - y), atol + rtol * abs(y)) & np.isfinite(y) | (x == y)
    if equal_nan:
        result = result | (np.isnan(x) & np.isnan(y))
    return result  # type: ignore[no-any-return]


@implements("select")
def _select(conditions: Sequence[Any], choices: Sequence[Any], default: Any = 0) -> TracedArray:
    if len(conditions) != len(choices) or not conditions:
        raise ValueError("list of cases must be same length as list of conditions")
    every = [*choices, default]
    dtype = np.result_type(*[v.dtype if isinstance(v, TracedArray) else v for v in every])
    out: Any = as_traced(default, dtype).astype(dtype)
    for condition, choice in zip(reversed(conditions), reversed(choices), strict=True):
        if as_traced(condition).dtype != bool:
            raise TypeError("invalid entry in condlist: should be boolean ndarray")
        out = choose_elements(condition, as_traced(choice, dtype).astype(dtype), out)
    return out  # type: ignore[no-any-return]


@implements("piecewise")
def _piecewise(x: Any, conditions: Any, functions: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
    x = as_traced(x)
    if not isinstance(conditions, list | tuple) or any(np.shape(c) != x.shape for c in conditions):
        raise refuse("the conditions of its piecewise are no list of arrays of its shape")
    conditions = [as_traced(c).astype(bool) for c in conditions]
    if len(conditions) == len(functions) - 1:  # otherwise
        conditions.append(~functools.reduce(np.logical_or, conditions))
    if len(conditions) != len(functions):
        n = len(conditions)
        raise ValueError(f"with {n} condition(s), either {n} or {n + 1} functions are expected")
    out = np.zeros_like(x)
    for condition, function in zip(conditions, functions, strict=True):
        found = function(x[condition], *args, **kwargs) if callable(function) else function
        out[condition] = found
    return out


@implements("polyval")
def _polyval(p: Any, x: Any) -> Any:
    """Horner's rule, as NumPy has it."""
    if isinstance(x, np.poly1d) or isinstance(p, TracedArray) or np.ndim(p) != 1:
        raise refuse("it evaluates a polynomial whose coefficients are not numbers")
    out: Any = np.zeros_like(as_traced(x))
    for coefficient in np.asarray(p):
        out = out * x + coefficient
    return out


#: What einsum is told by those who want nothing special.
USUAL = (("casting", "safe"), ("order", "K"))


@implements("can_cast")
def _can_cast(from_: Any, to: Any, casting: Any = "safe") -> bool:
    return np.can_cast(getattr(from_, "dtype", from_), getattr(to, "dtype", to), casting)


@implements("result_type")
def result_type(*args: Any) -> DType:
    return np.result_type(*[a.dtype if isinstance(a, TracedArray) else a for a in args])


@implements("min_scalar_type")
def _min_scalar_type(a: TracedArray) -> DType:
    return a.dtype


@implements("common_type")
def _common_type(*arrays: Any) -> Any:
    return np.common_type(*[np.zeros(1, a.dtype) for a in arrays])


@implements("iscomplexobj")
def _iscomplexobj(x: TracedArray) -> bool:
    return x.dtype.kind == "c"


@implements("isrealobj")
def _isrealobj(x: TracedArray) -> bool:
    return x.dtype.kind != "c"
