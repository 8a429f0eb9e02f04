"""Reductions and scans of traced arrays.

The result of a reduction is a new leaf. A reduction of few elements becomes operations on these
elements, so that it can disappear into the kernel that reads it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.lib.array_utils import normalize_axis_tuple

from ..ir.expr import (
    REDUCTIONS,
    SCANS,
    DType,
    Expr,
    Reduction,
    Shape,
    View,
    canonical_view,
    is_contiguous,
    nodes,
    view_of,
)
from ..ir.limits import LEAST_SLIDING
from ..ir.regions import simplify_in_box
from .abstract import ReductionResult
from .array import FEW, TracedArray, broadcast, look, reshape_array, scalar_if_point
from .context import MADE, cast_to, constant, current, nothing, refuse, with_leaves
from .elementwise import choose_elements, trace_ufunc

SHORT = 16  # elements of a row of arrays side by side, to be reduced one by one

#: What reduces two elements.
ADDED_UP = {
    "sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum,
    "any": np.logical_or, "all": np.logical_and,
}  # fmt: skip


def axes_of(x: TracedArray, axis: Any) -> Shape:
    """The axes of a reduction, sorted: all of them where `axis` is None."""
    if axis is None or axis is nothing:
        return tuple(range(x.ndim))
    return tuple(sorted(normalize_axis_tuple(axis, x.ndim)))


def reduce(
    op: str, x: TracedArray, axes: Shape, dtypes: Sequence[Any], keepdims: Any = False
) -> list[TracedArray]:
    """The results of one reduction of `x` over `axes`, in these dtypes."""
    keep = keepdims is not nothing and bool(keepdims)
    types = tuple(np.dtype(d) for d in dtypes)
    if not axes and op == "prod" and x.dtype.kind == "c":
        raise refuse("it multiplies complex numbers along no axis")  # NumPy's infinities are odd
    if not axes:  # nothing to reduce: each element is its own result
        zero = TracedArray(constant(0, types[0]), x.shape)
        own = {"argmin": (zero, x), "argmax": (zero, x)}.get(op, (x,))
        if op == "moment":
            own = (x, x - x)  # NaN where x is none that has a distance
        return [scalar_if_point(v.astype(t)) for v, t in zip(own, types, strict=True)]
    # elsewhere it would be fewer tasks for many threads
    short = current.get().products and current.get().short
    one = short and x.size and op not in ("prod", "histogram")
    if one and all(x.shape[k] == 1 for k in axes):
        # each row is one element
        element = reshape_array(x, reduced_shape(x, axes, False))
        if op == "sum" and x.dtype.kind in "fc":
            element = np.add(element, x.dtype.type(0))  # a sum is never minus zero
        every = reduce(op, element, (), types)
        shape = reduced_shape(x, axes, keep)
        return [reshape_array(v, shape) for v in every] if keep else every
    if op == "sum" and (total := _count_constant(x, axes, types[0])) is not None:
        return [scalar_if_point(broadcast(total, reduced_shape(x, axes, keep)))]
    if op in ADDED_UP and (
        _is_few(x)
        or (short and _is_short(x, axes) and not _are_windows(x, axes))
        or (short and _are_weighted(x, axes))
    ):
        return [_reduce_elements(op, x, axes, types[0], keep)]
    if op in ("argmin", "argmax") and short and _are_a_few(x, axes):
        return _find_extreme(op, x, axes, types, keep)
    results = []
    for which in range(REDUCTIONS[op]):
        result = ReductionResult(x.shape, axes, Reduction(op, x._expr, types), which)
        leaf = current.get().keep(result, types[which])
        out = TracedArray(leaf, result.shape, not result.shape)
        if keep:
            out = look(out, lambda a: np.expand_dims(a, axes))
        results.append(out)
    return results


def _is_few(x: TracedArray) -> bool:
    """Whether these are a few results side by side, as in each step of a tree."""
    expr = x._expr
    while expr.op == "cast":
        (expr,) = expr.args
    return expr.op == "where" and expr.args[0].op == "less" and 0 < x.size <= FEW


def _count_constant(x: TracedArray, axes: Shape, dtype: DType) -> TracedArray | None:
    """The sum of a whole number that fills an array; None where it may have to be rounded."""
    expr = x._expr
    if expr.op != "constant" or dtype.kind not in "iuf" or not x.size:
        return None
    value = np.frombuffer(expr.data, expr.dtype)[0]
    if not np.isfinite(value) or value != np.trunc(value):
        return None
    total = int(value) * math.prod(x.shape[k] for k in axes)
    most = np.iinfo(dtype).max if dtype.kind in "iu" else 2 ** (np.finfo(dtype).nmant + 1)
    return TracedArray(constant(total, dtype), ()) if 0 <= total <= most else None


def _is_short(x: TracedArray, axes: Shape) -> bool:
    """Whether rows are a few elements of arrays that lie side by side along these axes."""
    expr = x._expr
    while expr.op == "cast":
        (expr,) = expr.args
    beside = expr.op == "where" and expr.args[0].op == "less"
    return beside and 0 < math.prod(x.shape[k] for k in axes) <= SHORT


def _are_windows(x: TracedArray, axes: Shape) -> bool:
    """Whether rows are windows that slide along an axis other than the contiguous one.

    Kernels compute several results of such rows at a time.
    """
    views = [v for n in nodes([x._expr]) if (v := view_of(n)) is not None]
    others = [k for k, n in enumerate(x.shape) if n > 1 and k not in axes]
    return any(
        x.shape[r] >= LEAST_SLIDING
        and all(v.strides[a] == v.strides[r] for v in views)
        and max([abs(v.strides[a]) for v in views], default=0) > 1
        for a in others
        for r in axes
    )


def _are_a_few(x: TracedArray, axes: Shape) -> bool:
    """Whether rows are short windows that slide, or a few arrays side by side."""
    if x.dtype.kind == "c" or not 0 < math.prod(x.shape[k] for k in axes) <= SHORT:
        return False
    return _is_short(x, axes) or any(slides for slides, _ in _sliding_leaves(x, axes))


def _sliding_leaves(x: TracedArray, axes: Shape) -> list[tuple[bool, bool]]:
    """For each leaf, whether it slides along one of these axes, and whether it varies along them.

    A leaf slides where it has the same stride along another axis.
    """
    views = [v for n in nodes([x._expr]) if (v := view_of(n)) is not None]
    others = [k for k, n in enumerate(x.shape) if n > 1 and k not in axes]
    return [
        (
            any(v.strides[r] and v.strides[a] == v.strides[r] for a in others for r in axes),
            any(v.strides[r] for r in axes),
        )
        for v in views
    ]


def _are_weighted(x: TracedArray, axes: Shape) -> bool:
    """Whether rows are windows that slide over an array, combined with leaves that do not slide.

    Kernels share the elements of the windows, and the few products of both.
    """
    if not 0 < math.prod(x.shape[k] for k in axes) <= FEW:
        return False
    leaves = _sliding_leaves(x, axes)
    return any(s for s, _ in leaves) and any(along and not s for s, along in leaves)


def elements(x: TracedArray, axes: Shape) -> list[TracedArray]:
    """The elements along some axes, each as an array in which these axes have length one."""
    out = []
    for place in itertools.product(*[range(x.shape[k]) for k in axes]):
        index: list[Any] = [slice(None)] * x.ndim
        for k, i in zip(axes, place, strict=True):
            index[k] = slice(i, i + 1)
        # with an Ellipsis NumPy gives a view always, of an array without axes, too
        part = look(x, lambda a, index=(*index, ...): a[index])  # type: ignore[misc]
        (expr,) = simplify_in_box([part._expr], tuple([(0, n) for n in part.shape]))
        out.append(TracedArray(with_leaves(expr, lambda leaf: leaf), part.shape))
    return out


def _reduce_elements(op: str, x: TracedArray, axes: Shape, dtype: DType, keep: bool) -> TracedArray:
    """Reduce a few elements by element-wise operations.

    One step of a tree may then disappear into the next. Floating point is added up in double
    precision, as in kernels.
    """
    wide = dtype
    if op in ("sum", "prod") and dtype.kind in "fc":
        wide = np.dtype(np.float64 if dtype.kind == "f" else np.complex128)
    out: TracedArray | None = None
    for part in elements(x, axes):
        part = TracedArray(cast_to(part._expr, wide), part.shape)
        both = ADDED_UP[op]
        out = part if out is None else trace_ufunc(both, both.__name__, (out, part))
    assert out is not None
    out = TracedArray(cast_to(out._expr, dtype), out.shape)
    if keep:
        return out
    return scalar_if_point(
        reshape_array(out, [n for k, n in enumerate(out.shape) if k not in axes])
    )


def _find_extreme(
    op: str, x: TracedArray, axes: Shape, types: Sequence[DType], keep: bool
) -> list[TracedArray]:
    """The position and the value of the first extreme of a few elements.

    A NaN is more extreme than any number.
    """
    further = np.less if op == "argmin" else np.greater
    (best, *rest), real = elements(x, axes), x.dtype.kind == "f"
    at: Any = TracedArray(constant(0, types[0]), best.shape)
    for n, value in enumerate(rest, 1):
        better: Any = further(value, best)
        if real:
            better = np.logical_and(np.logical_or(better, np.isnan(value)), ~np.isnan(best))
        at, best = (
            choose_elements(better, types[0].type(n), at),
            choose_elements(better, value, best),
        )
    shape = reduced_shape(x, axes, keep)
    found = [reshape_array(at, shape), reshape_array(best.astype(types[1]), shape)]
    return found if keep else [scalar_if_point(v) for v in found]


def reduced_shape(x: TracedArray, axes: Shape, keepdims: Any) -> Shape:
    """The shape after a reduction over `axes`."""
    if keepdims is not nothing and keepdims:
        return tuple(1 if k in axes else n for k, n in enumerate(x.shape))
    return tuple(n for k, n in enumerate(x.shape) if k not in axes)


def scan(op: str, x: TracedArray, axis: int, dtype: DType) -> TracedArray:
    """The results of one scan of `x` along an axis."""
    result = ReductionResult(x.shape, (axis,), Reduction(op, x._expr, (dtype,)), 0)
    return TracedArray(current.get().keep(result, dtype), x.shape)


def last_of_scan(x: TracedArray, out: TracedArray) -> Expr | None:
    """The reduction along an axis, where `out` is the last element of a scan `x`.

    None for any other part of a scan, which needs all of it.
    """
    if x._expr.op != "input" or x._expr.data[0] < MADE or not out.size:
        return None
    scan, view = current.get().made[x._expr.data[0] - MADE], x._expr.data[1]
    if not isinstance(scan, ReductionResult) or scan.reduction.op not in SCANS:
        return None
    ((axis,), shape) = scan.axes, scan.over
    if shape != x.shape or not is_contiguous(view, shape):
        return None
    kept = tuple(1 if k == axis else n for k, n in enumerate(shape))
    last = View.contiguous(shape)
    last = View((shape[axis] - 1) * last.strides[axis], last.strides)
    without = tuple(n for k, n in enumerate(shape) if k != axis)
    found = next((s for s in (kept, without) if s == out.shape), None)
    if found is None:
        return None
    strides = last.strides if found is kept else last.strides[:axis] + last.strides[axis + 1 :]
    if canonical_view(out._expr.data[1], found) != canonical_view(
        View(last.offset, strides), found
    ):
        return None
    ((value,), op) = scan.reduction.dtypes, SCANS[scan.reduction.op]
    whole = TracedArray(scan.reduction.arg, shape)
    return reduce(op, whole, scan.axes, (value,), found is kept)[0]._expr
