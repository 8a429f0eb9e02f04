"""NumPy's reductions and scans, on traced arrays.

This file decides dtypes, shapes and the results of empty arrays. `reduce` makes the reductions, and
`masked` those of what a mask selects.
"""

from __future__ import annotations

import functools
import math
import operator
from typing import Any

import numpy as np
from numpy.lib.array_utils import normalize_axis_index

from ...ir.expr import DType, Shape
from ...ir.split_scans import parts
from ..array import ACCUMULATED, METHODS, TracedArray, as_traced, broadcast, implements
from ..context import cast_to, check_dtype, current, no_out, nothing, refuse
from ..elementwise import choose_elements, trace_ufunc
from ..reduce import axes_of, reduce, reduced_shape, scan


@functools.cache
def _sum_dtype(dtype: DType, ufunc: Any) -> DType:
    return ufunc.reduce(np.zeros(0, dtype)).dtype  # type: ignore[no-any-return]


def _add_up(
    op: str,
    ufunc: Any,
    x: TracedArray,
    axis: Any,
    dtype: Any,
    keepdims: Any,
    initial: Any,
    where: Any,
) -> TracedArray:
    none = dtype is None or dtype is nothing  # not `==`: a float64 equals None
    dtype = check_dtype(_sum_dtype(x.dtype, ufunc) if none else dtype)
    value = TracedArray(cast_to(x._expr, dtype), x.shape)
    neutral = 0 if op == "sum" else 1
    if where is not True and where is not nothing:
        value = choose_elements(where, value, dtype.type(neutral))
    (out,) = reduce(op, value, axes_of(x, axis), (dtype,), keepdims)
    if initial is not nothing and initial != neutral:
        out = trace_ufunc(ufunc, ufunc.__name__, (as_traced(initial, dtype), out))
    return out


def sum_of(
    x: Any, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: Any = False,
    initial: Any = nothing, where: Any = True,
) -> TracedArray:  # fmt: skip
    no_out(out)
    return _add_up("sum", np.add, as_traced(x), axis, dtype, keepdims, initial, where)


def prod_of(
    x: Any, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: Any = False,
    initial: Any = nothing, where: Any = True,
) -> TracedArray:  # fmt: skip
    no_out(out)
    return _add_up("prod", np.multiply, as_traced(x), axis, dtype, keepdims, initial, where)


def not_empty(x: TracedArray, axes: Shape, what: str) -> None:
    if 0 in [x.shape[k] for k in axes]:
        raise ValueError(f"zero-size array to {what} which has no identity")


def extreme_of(
    op: str, x: Any, axis: Any = None, out: Any = None, keepdims: Any = False,
    initial: Any = nothing, where: Any = True,
) -> TracedArray:  # fmt: skip
    no_out(out)
    x, axes = as_traced(x), axes_of(x, axis)
    ufunc = {"min": np.minimum, "max": np.maximum, "fmin": np.fmin, "fmax": np.fmax}[op]
    if op in ("fmin", "fmax") and x.dtype.kind not in "fc":
        op = op[1:]
    if initial is nothing:
        not_empty(x, axes, f"reduction operation {ufunc.__name__}")
    if where is not True and where is not nothing:
        if initial is nothing:
            raise ValueError("a reduction with a mask needs an initial value")
        x = choose_elements(where, x, as_traced(initial, x.dtype).astype(x.dtype))
    if initial is not nothing and 0 in [x.shape[k] for k in axes]:
        return broadcast(as_traced(initial, x.dtype), reduced_shape(x, axes, keepdims))
    (value,) = reduce(op, x, axes, (x.dtype,), keepdims)
    if initial is not nothing:
        value = trace_ufunc(ufunc, ufunc.__name__, (as_traced(initial, x.dtype), value))
    return value


def truth_of(
    op: str, x: Any, axis: Any = None, out: Any = None, keepdims: Any = False, *,
    where: Any = True,
) -> TracedArray:  # fmt: skip
    no_out(out)
    x = as_traced(x)
    value = TracedArray(cast_to(x._expr, bool), x.shape)
    if where is not True and where is not nothing:
        value = choose_elements(where, value, np.bool_(op == "all"))
    return reduce(op, value, axes_of(x, axis), (bool,), keepdims)[0]


def _arg(
    op: str, x: Any, axis: Any = None, out: Any = None, *, keepdims: Any = False
) -> TracedArray:
    no_out(out)
    x, axes = as_traced(x), axes_of(x, None if axis is None else operator.index(axis))
    if 0 in [x.shape[k] for k in axes]:
        raise ValueError(f"attempt to get {op} of an empty sequence")
    return reduce(op, x, axes, (np.intp, x.dtype), keepdims)[0]


def count_of(x: TracedArray, axes: Shape) -> np.intp:
    return np.intp(math.prod(x.shape[k] for k in axes))


def divide_by_count(total: TracedArray, count: Any) -> Any:
    """A sum by a count, in the type of the sum: computed in float64, as NumPy does."""
    return np.true_divide(total, count).astype(total.dtype)


def mean_of(
    x: Any, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: Any = False, *,
    where: Any = True,
) -> Any:  # fmt: skip
    no_out(out)
    x = as_traced(x)
    axes, half = axes_of(x, axis), False
    if dtype is None or dtype is nothing:
        half = x.dtype == np.float16
        dtype = {"b": np.float64, "i": np.float64, "u": np.float64}.get(x.dtype.kind, x.dtype)
        dtype = np.float32 if half else dtype
    count: Any = count_of(x, axes)
    total = sum_of(x, axes, dtype, keepdims=keepdims, where=where)
    if where is not True and where is not nothing:
        count = sum_of(broadcast(as_traced(where), x.shape), axes, np.intp, keepdims=keepdims)
    mean = divide_by_count(total, count)
    return mean.astype(np.float16) if half else mean


def var_of(
    x: Any, axis: Any = None, dtype: Any = None, out: Any = None, ddof: Any = 0,
    keepdims: Any = False, *, where: Any = True, mean: Any = nothing, correction: Any = nothing,
) -> Any:  # fmt: skip
    no_out(out, {"mean": mean})
    if where is not True and where is not nothing:
        raise refuse("it computes a variance with where=")
    x, ddof = as_traced(x), correction if correction is not nothing else ddof
    axes = axes_of(x, axis)
    if dtype is None or dtype is nothing:
        dtype = np.float64 if x.dtype.kind in "biu" else x.dtype
    dtype = np.dtype(dtype)
    if dtype.kind not in "fc" or (dtype.kind == "f" and x.dtype.kind == "c"):
        raise refuse(f"it computes a variance of {x.dtype} in {dtype}")
    divisor = np.maximum(count_of(x, axes) - ddof, 0)
    if dtype.kind == "c":
        mean = divide_by_count(sum_of(x, axes, dtype, keepdims=True), count_of(x, axes))
        away = np.subtract(x, mean)
        total = sum_of(np.square(away.real) + np.square(away.imag), axes, keepdims=keepdims)
        return divide_by_count(total, divisor)
    _, squares = moment_of(x, axes, dtype, keepdims)
    return np.true_divide(squares, divisor).astype(dtype)


def moment_of(x: TracedArray, axes: Shape, dtype: DType, keepdims: Any) -> list[TracedArray]:
    """Mean, and sum of squared deviations from it, in one pass; half precision in single."""
    wide = np.dtype(np.float32) if dtype == np.float16 else dtype
    return reduce("moment", x.astype(wide), axes, (wide, wide), keepdims)


def _ufunc_reduce(
    ufunc: Any, x: Any, axis: Any = 0, dtype: Any = None, out: Any = None, keepdims: Any = False,
    initial: Any = nothing, where: Any = True,
) -> TracedArray:  # fmt: skip
    name = ufunc.__name__
    if isinstance(out, tuple):
        (out,) = out
    x = as_traced(x)
    if name in ("bitwise_or", "bitwise_and") and x.dtype == bool:
        name = {"bitwise_or": "logical_or", "bitwise_and": "logical_and"}[name]
    if name in ("add", "multiply"):
        function = sum_of if name == "add" else prod_of
        return function(x, axis, dtype, out, keepdims, initial, where)
    if name in ("minimum", "maximum", "fmin", "fmax") and dtype is None:
        op = {"minimum": "min", "maximum": "max"}.get(name, name)
        return extreme_of(op, x, axis, out, keepdims, initial, where)
    if name in ("logical_or", "logical_and") and initial is nothing:
        return truth_of(
            "any" if name == "logical_or" else "all", x, axis, out, keepdims, where=where
        )
    raise refuse(f"numpy.{name}.reduce has no expression")


def accumulate_ufunc(
    ufunc: Any, x: Any, axis: Any = 0, dtype: Any = None, out: Any = None
) -> TracedArray:  # fmt: skip
    """What `ufunc.accumulate` gives, along one axis."""
    no_out(out[0] if isinstance(out, tuple) else out)
    x, name = as_traced(x), ufunc.__name__
    _only_on_gpus(f"{name}.accumulate")
    if dtype is None or dtype is nothing:
        dtype = _accumulated_dtype(x.dtype, ufunc)
    value: TracedArray = x.astype(check_dtype(dtype))
    axis = normalize_axis_index(axis, x.ndim)
    if parts(x.shape, axis) is None:
        raise refuse(f"it accumulates along {x.shape[axis]:,} elements: no cut into equal parts")
    if x.shape[axis] == 1 or not x.size:
        return value
    return scan(ACCUMULATED[name], value, axis, value.dtype)


@functools.cache
def _accumulated_dtype(dtype: DType, ufunc: Any) -> DType:
    return ufunc.accumulate(np.zeros(1, dtype)).dtype  # type: ignore[no-any-return]


def _only_on_gpus(name: str) -> None:
    """NumPy's own scans go through an array once, too."""
    if not current.get().products:
        raise refuse(f"numpy.{name} is not element-wise or a reduction")


def accumulate_axis(
    ufunc: Any, x: Any, axis: Any = None, dtype: Any = None, out: Any = None
) -> TracedArray:  # fmt: skip
    """`cumsum` and its like: along an axis, or of all elements in order."""
    _only_on_gpus(ACCUMULATED[ufunc.__name__])
    x = as_traced(x)
    if axis is None or axis is nothing:
        x, axis = x.reshape(-1), 0
    return accumulate_ufunc(ufunc, x, axis, dtype, out)


for _name, _function in {
    "sum": sum_of, "prod": prod_of, "mean": mean_of, "var": var_of,
    "any": functools.partial(truth_of, "any"), "all": functools.partial(truth_of, "all"),
    "argmin": functools.partial(_arg, "argmin"), "argmax": functools.partial(_arg, "argmax"),
}.items():  # fmt: skip
    implements(_name)(_function)
for _name, _op in {"min": "min", "amin": "min", "max": "max", "amax": "max",
                   "nanmin": "fmin", "nanmax": "fmax"}.items():  # fmt: skip
    implements(_name)(functools.partial(extreme_of, _op))
for _name, _ufunc_of in {"cumsum": np.add, "cumprod": np.multiply}.items():
    implements(_name)(functools.partial(accumulate_axis, _ufunc_of))
METHODS["reduce"], METHODS["accumulate"] = _ufunc_reduce, accumulate_ufunc
