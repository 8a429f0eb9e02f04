"""NumPy's functions of arrays without values, by their names: parts put together, views, products
with vectors, and what NumPy computes of arrays in a few steps. Ufuncs are in `arrays`.
"""

from __future__ import annotations

import builtins
import functools
import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
from numpy.lib.array_utils import normalize_axis_index, normalize_axis_tuple

from .arrays import (
    MOST_PARTS,
    Selected,
    Traced,
    alike,
    apply,
    axes_of,
    axis_index,
    broadcast,
    clipped,
    complex_of,
    either,
    expand,
    implements,
    look,
    nan_elsewhere,
    reduce,
    reshaped,
    rounded,
    scalar_if_point,
    stored,
    traced,
)
from .bins import Bins, compared
from .creation import filled
from .expr import DType, Expr, View
from .following import (
    Product,
    Seen,
    Shape,
    cast_to,
    checked,
    constant,
    current,
    made_in,
    no_out,
    node_of,
    nothing,
    refuse,
    reviewed,
)
from .reductions import accumulated, cumulated, divided, mean_of, prod_of, sum_of, var_of

# ------------------------------------------------------------------------------------------------
# Parts put together.


def _concatenate(
    parts: Sequence[Any], axis: Any = 0, out: Any = None, *, dtype: Any = None,
    casting: Any = "same_kind",
) -> Traced:  # fmt: skip
    no_out(out)
    arrays = [traced(p) for p in parts]
    if axis is None:
        arrays, axis = [a.ravel() for a in arrays], 0
    if not arrays:
        raise ValueError("need at least one array to concatenate")
    axis = normalize_axis_index(axis, arrays[0].ndim)
    if len(arrays) > MOST_PARTS:
        raise refuse(f"it concatenates {len(arrays)} arrays")
    dtype = checked(dtype or np.result_type(*[a.dtype for a in arrays]))
    for a in arrays:
        if not np.can_cast(a.dtype, dtype, casting):
            raise TypeError(f"Cannot cast array data from {a.dtype} to {dtype}")
    rest = {a.shape[:axis] + a.shape[axis + 1 :] for a in arrays}
    if len(rest) > 1:
        raise ValueError(
            "all the input array dimensions except for the concatenation axis must match"
        )
    shape = list(arrays[0].shape)
    shape[axis] = sum(a.shape[axis] for a in arrays)
    pieces: list[tuple[int, Expr]] = []  # where each begins, and its values over the whole
    start = 0
    for a in arrays:
        length = a.shape[axis]
        if length:
            whole = cast_to(reviewed(a._expr, _shifted(axis, start, length)), dtype)
            if not pieces or pieces[-1][1] is not whole:
                pieces.append((start, whole))
        start += length
    if not pieces:
        return Traced(constant(0, dtype), tuple(shape))
    return Traced(_choice(pieces, axis_index(tuple(shape), axis)), tuple(shape))


def _shifted(axis: int, start: int, length: int) -> Callable[[View], View]:
    """Views of a part over the whole: right where the part is, beyond its array elsewhere."""

    def change(view: View) -> View:
        strides = list(view.strides)
        if length == 1:
            strides[axis] = 0
        return View(view.offset - start * strides[axis], tuple(strides))

    return change


def _choice(pieces: list[tuple[int, Expr]], at: Expr) -> Expr:
    """The piece that a position falls into, by halving."""
    if len(pieces) == 1:
        return pieces[0][1]
    half = len(pieces) // 2
    left, right = _choice(pieces[:half], at), _choice(pieces[half:], at)
    return node_of("where", (apply(np.less, at, pieces[half][0]), left, right), left.dtype)


def _stack(arrays: Sequence[Any], axis: int = 0, out: Any = None, **kwargs: Any) -> Traced:
    arrays = [traced(a) for a in arrays]
    if len({a.shape for a in arrays}) > 1:
        raise ValueError("all input arrays must have the same shape")
    return _concatenate([expand(a, axis) for a in arrays], axis, out, **kwargs)


def _at_least(ndim: int, *arrays: Any) -> Any:
    """`numpy.atleast_1d` and its like."""
    like = {1: np.atleast_1d, 2: np.atleast_2d, 3: np.atleast_3d}[ndim]
    parts = [traced(a) for a in arrays]
    out = tuple(p if p.ndim >= ndim else look(p, like) for p in parts)
    return out[0] if len(out) == 1 else out


def _stacked(ndim: int, axis: int, arrays: Sequence[Any], **kwargs: Any) -> Traced:
    """`numpy.hstack` and its like."""
    parts = [_at_least(ndim, a) for a in arrays]
    if axis == 1 and parts[0].ndim == 1:
        axis = 0
    return _concatenate(parts, axis, **kwargs)


def _put_together(parts: Sequence[Any], *args: Any, **kwargs: Any) -> Traced:
    """`numpy.concatenate`, of what may itself be parts that were put together."""
    return _whole(_concatenate([_in_parts(p) for p in parts], *args, **kwargs))


def _whole(x: Traced) -> Traced:
    """Parts that are put together, as an array that a kernel writes, if such are wanted."""
    following = current.get()
    if not following.whole or x._expr.op != "where":
        return x
    kept = stored(x)
    following.parts[id(kept._expr)] = x._expr
    return kept


def _in_parts(x: Any) -> Traced:
    x = traced(x)
    before = current.get().parts.get(id(x._expr))
    return x if before is None else Traced(before, x.shape)


def _block(parts: Any) -> Traced:
    def depth(p: Any) -> int:
        return 1 + max(depth(q) for q in p) if isinstance(p, list) else 0

    def most(p: Any) -> int:
        return max(most(q) for q in p) if isinstance(p, list) else traced(p).ndim

    levels = depth(parts)
    ndim = max(levels, most(parts))

    def join(p: Any, level: int) -> Traced:
        if not isinstance(p, list):
            a = _in_parts(p)
            return a.reshape((1,) * (ndim - a.ndim) + a.shape)
        return _concatenate([join(q, level + 1) for q in p], ndim - levels + level)

    return _whole(join(parts, 0))


def _roll(x: Traced, shift: Any, axis: Any = None) -> Traced:
    if axis is None:
        return _roll(x.ravel(), shift, 0).reshape(x.shape)
    shifts, axes = np.broadcast_arrays(shift, axis)
    if shifts.ndim > 1:
        raise refuse("it rolls by an array of several axes")
    for s, a in zip(shifts.ravel().tolist(), axes.ravel().tolist(), strict=True):
        a = normalize_axis_index(a, x.ndim)
        s = s % x.shape[a] if x.shape[a] else 0
        if s:
            all_before = (slice(None),) * a
            ends = x[(*all_before, slice(-s, None))], x[(*all_before, slice(None, -s))]
            x = _concatenate(ends, a)
    return x.copy()


def _repeat(x: Any, repeats: Any, axis: Any = None) -> Traced:
    """`numpy.repeat`, of each element as often."""
    x = traced(x)
    if isinstance(repeats, Traced) or np.ndim(repeats):
        raise refuse("it repeats elements as often as an array says")
    times = operator.index(repeats)
    if axis is None:
        x, axis = x.reshape(-1), 0
    axis = normalize_axis_index(operator.index(axis), x.ndim)
    if times < 0:
        raise ValueError("repeats may not contain negative values.")
    shape, before = list(x.shape), x.shape[: axis + 1]
    shape[axis] *= times
    spread = broadcast(expand(x, axis + 1), (*before, times, *x.shape[axis + 1 :]))
    return spread.reshape(shape).copy()


def _split(x: Traced, parts: Any, axis: int = 0) -> list[Traced]:
    length = x.shape[axis]
    if isinstance(parts, int | np.integer):
        each, extra = divmod(length, int(parts))
        sizes = extra * [each + 1] + (int(parts) - extra) * [each]
        ends = [0, *itertools.accumulate(sizes)]
    else:
        ends = [0, *[operator.index(p) for p in parts], length]
    before = (slice(None),) * normalize_axis_index(axis, x.ndim)
    return [x[(*before, slice(a, b))] for a, b in itertools.pairwise(ends)]


def _even_split(x: Traced, parts: Any, axis: int = 0) -> list[Traced]:
    if isinstance(parts, int | np.integer) and x.shape[axis] % parts:
        raise ValueError("array split does not result in an equal division")
    return _split(x, parts, axis)


def _pad(x: Any, width: Any, mode: Any = "constant", **kwargs: Any) -> Any:
    x = traced(x)
    values = kwargs.pop("constant_values", 0)
    if kwargs or mode not in ("constant", "edge", "wrap", "reflect", "symmetric"):
        raise refuse(f"it pads with mode {mode!r}")
    width = np.asarray(width)
    if width.dtype.kind not in "iu" or (width < 0).any():
        raise refuse(f"it pads an axis by {width}")
    widths = np.broadcast_to(width, (x.ndim, 2)).tolist()
    fills = np.broadcast_to(np.asarray(values), (x.ndim, 2))
    for axis, (before, after) in enumerate(widths):
        ends = []
        for side, n in enumerate((before, after)):
            if n == 0:
                continue
            shape = list(x.shape)
            shape[axis] = n
            if mode == "constant":
                value = fills[axis, side].item()  # one that the type cannot hold is an error
                part = Traced(constant(value, x.dtype), tuple(shape))
            else:
                part = _border(x, axis, n, mode, bool(side))
            ends.append((side, part))
        parts = [p for s, p in ends if s == 0] + [x] + [p for s, p in ends if s == 1]
        x = _concatenate(parts, axis) if len(parts) > 1 else x
    return x if np.any(widths) else Traced(x._expr, x.shape)  # a copy, whatever it pads


def _border(x: Traced, axis: int, n: int, mode: str, behind: bool) -> Traced:
    """What `numpy.pad` puts before an axis, or behind it."""
    length, all_before = x.shape[axis], (slice(None),) * axis
    if mode == "edge":
        shape = list(x.shape)
        shape[axis] = n
        end = x[(*all_before, slice(length - 1, length) if behind else slice(0, 1))]
        return broadcast(end, tuple(shape))
    skip = int(mode == "reflect")
    if n > length - skip:
        raise refuse("it pads an axis by more than its length")
    if mode == "wrap":
        return x[(*all_before, slice(0, n) if behind else slice(length - n, length))]
    points = range(length - n - skip, length - skip) if behind else range(skip, n + skip)
    piece = x[(*all_before, slice(points.start, points.stop))]
    return piece[(*all_before, slice(None, None, -1))]


# ------------------------------------------------------------------------------------------------
# NumPy's functions.

_VIEWS = (
    "transpose matrix_transpose permute_dims moveaxis swapaxes rollaxis expand_dims "
    "fliplr flipud rot90 diagonal lib.stride_tricks.sliding_window_view linalg.diagonal "
    "linalg.matrix_transpose"
)


def _as_view(name: str) -> None:
    function: Any = np
    for word in name.split("."):
        function = getattr(function, word, None)

    def view(x: Any, *args: Any, **kwargs: Any) -> Traced:
        x = traced(x)
        out = look(x, lambda a: function(a, *args, **kwargs))
        return x if x._scalar and not out.shape else out

    implements(name)(view)


for _name in _VIEWS.split():
    _as_view(_name)
for _name, _function in {
    "concatenate": _put_together, "concat": _put_together, "stack": _stack, "block": _block,
    "vstack": functools.partial(_stacked, 2, 0), "row_stack": functools.partial(_stacked, 2, 0),
    "hstack": functools.partial(_stacked, 1, 1), "dstack": functools.partial(_stacked, 3, 2),
    "atleast_1d": functools.partial(_at_least, 1), "atleast_2d": functools.partial(_at_least, 2),
    "atleast_3d": functools.partial(_at_least, 3), "roll": _roll, "array_split": _split,
    "split": _even_split, "pad": _pad, "repeat": _repeat,
}.items():  # fmt: skip
    implements(_name)(_function)


@implements("histogram")
def _histogram(
    a: Any, bins: Any = 10, range: Any = None, density: Any = None, weights: Any = None
) -> tuple[Traced, np.ndarray[Any, Any]]:
    if density:
        raise refuse("it makes a histogram of densities")
    x = nan_elsewhere(a) if isinstance(a, Selected) else traced(a)
    if weights is not None and isinstance(a, Selected):
        if not isinstance(weights, Selected) or not alike(a, weights):
            raise refuse("a mask selects the values of its histogram, and not so the weights")
        weights = weights._values
    if any(isinstance(v, Traced) for v in (bins, range)) or isinstance(bins, str):
        raise refuse("the bins of its histogram depend on values")
    if range is None and np.ndim(bins) == 0:
        raise refuse("its histogram has no range")
    if x.dtype.kind not in "iuf":
        raise refuse(f"it makes a histogram of {x.dtype}")
    edges = np.histogram_bin_edges(np.empty(0, x.dtype), bins, range)
    x = x if x.ndim else x.reshape(1)
    where = _bin(x, edges)
    if weights is None:
        return counted(where, len(edges) - 1), edges
    weights = traced(weights)
    kind, itemsize = weights.dtype.kind, weights.dtype.itemsize
    exact = kind in "iu" and max(x.size, 1) << 8 * itemsize <= 2**53
    if not (exact or (kind == "f" and itemsize <= 8)):
        raise refuse(f"it weighs {x.size:,} values of a histogram by {weights.dtype}")
    found = weighed(where, len(edges) - 1, weights)
    if exact:
        found = found.astype(np.int64)  # from where it wraps around
    return found.astype(weights.dtype), edges


@implements("histogramdd")
def _histogramdd(
    sample: Any, bins: Any = 10, range: Any = None, density: Any = None, weights: Any = None
) -> tuple[Traced, list[np.ndarray[Any, Any]]]:
    if density:
        raise refuse("it makes a histogram of densities")
    if isinstance(sample, Traced):
        rows = sample if sample.ndim == 2 else sample.reshape(-1, 1)
        sample = [rows[:, k] for k in builtins.range(rows.shape[1])]
    columns, one = [traced(x) for x in sample], isinstance(bins, (int, np.integer))
    sizes = [bins] * len(columns) if one else [*bins]
    if any(isinstance(v, Traced) for v in (*sizes, *(range or ()))):
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
        found = _bin(Traced(cast_to(x._expr, dtype), x.shape), e)
        outside.append(found == len(e) - 1)
        where = where * (len(e) - 1) + found
    where = either(functools.reduce(np.logical_or, outside), np.int64(size), where)
    if weights is None:
        found = counted(where, size).astype(np.float64)
    else:
        found = weighed(where, size, weights)
    return reshaped(found, shape), list(edges)


def counted(bins: Traced, count: int) -> Traced:
    """How often each number below `count` occurs."""
    (found,) = reduce("histogram", *_for_each(bins, count), (np.intp,))
    return found


def weighed(bins: Traced, count: int, weights: Any) -> Traced:
    """What the weights of each number below `count` add up to, as float64."""
    weights = traced(weights)
    if weights.shape != bins.shape:  # NumPy says so
        raise refuse(f"it weighs {bins.shape} values by {weights.shape} weights")
    if weights.dtype.kind not in "biuf":
        raise refuse(f"it weighs by {weights.dtype}")
    parts = bins.astype(np.float64), weights.astype(np.float64)
    both = complex_of(*parts, np.dtype(np.complex128))
    (found,) = reduce("histogram", *_for_each(both, count), (np.float64,))
    return found


def _for_each(values: Traced, count: int) -> tuple[Traced, tuple[int, ...]]:
    """The same values along a first axis, for the bins, and the other axes: a kernel finds the bin
    of each value once all the same."""
    if count < 1:
        raise refuse("its histogram has no bins")
    expr = reviewed(values._expr, lambda view: View(view.offset, (0, *view.strides)))
    spread = Traced(expr, (count, *values.shape))
    return spread, tuple(builtins.range(1, spread.ndim))


def _bin(x: Traced, edges: np.ndarray[Any, Any]) -> Traced:
    """Which bin each value is in; their count for what is in none."""
    kind = compared(x.dtype, edges.dtype)
    if kind is None:
        raise refuse(f"it makes a histogram of {x.dtype} with edges of {edges.dtype}")
    return _in_bins(x, Bins.of(edges.astype(kind)))


def _in_bins(x: Traced, bins: Bins) -> Traced:
    expr = node_of("bin", (cast_to(x._expr, bins.edges.dtype),), np.int64, bins)
    return Traced(expr, x.shape)


def evenly_binned(x: Traced, edges: np.ndarray[Any, Any]) -> Traced | None:
    """Which bin each value is in, of edges that lie evenly; None of others."""
    if compared(x.dtype, edges.dtype) != edges.dtype:
        return None
    bins = Bins.of(edges)
    return _in_bins(x, bins) if bins.even else None


@implements("std")
def _std(*args: Any, **kwargs: Any) -> Any:
    return np.sqrt(var_of(*args, **kwargs))


@implements("where")
def _where_function(condition: Any, *choices: Any) -> Traced:
    if len(choices) != 2:
        raise refuse("numpy.where with one argument asks for positions")
    return either(condition, *choices)


@implements("clip")
def _clip_function(
    a: Any, a_min: Any = None, a_max: Any = None, out: Any = None, *, min: Any = None,
    max: Any = None, **kwargs: Any,
) -> Any:  # fmt: skip
    no_out(out, kwargs)
    return clipped(traced(a), a_min, a_max, min=min, max=max)


@implements("round", "around")
def _round_function(a: Any, decimals: int = 0, out: Any = None) -> Any:
    no_out(out)
    return rounded(traced(a), decimals)


@implements("ptp")
def _ptp(a: Any, axis: Any = None, out: Any = None, keepdims: Any = False) -> Any:
    no_out(out)
    x = traced(a)
    return np.subtract(x.max(axis, keepdims=keepdims), x.min(axis, keepdims=keepdims))


@implements("count_nonzero")
def _count_nonzero(a: Any, axis: Any = None, *, keepdims: Any = False) -> Traced:
    return sum_of(traced(a).astype(bool), axis, np.intp, keepdims=keepdims)


@implements("average")
def _average(
    a: Any, axis: Any = None, weights: Any = None, returned: bool = False, *, keepdims: Any = False
) -> Any:
    if weights is not None or returned:
        raise refuse("it computes a weighted average, which is an error where weights add to 0")
    x = traced(a)
    if not axes_of(x, axis) and not x.size:
        raise refuse("it computes an average along no axis, which is an error")
    return mean_of(x, axis, keepdims=keepdims)


def without_nan(x: Traced, value: Any) -> Traced:
    if x.dtype.kind not in "fc":
        return x
    return either(np.isnan(x), traced(x.dtype.type(value)), x)


@implements("nansum")
def _nansum(a: Any, *args: Any, **kwargs: Any) -> Traced:
    return sum_of(without_nan(traced(a), 0), *args, **kwargs)


@implements("nanprod")
def _nanprod(a: Any, *args: Any, **kwargs: Any) -> Traced:
    return prod_of(without_nan(traced(a), 1), *args, **kwargs)


@implements("nancumsum")
def _nancumsum(a: Any, *args: Any, **kwargs: Any) -> Traced:
    return cumulated(np.add, without_nan(traced(a), 0), *args, **kwargs)


@implements("nancumprod")
def _nancumprod(a: Any, *args: Any, **kwargs: Any) -> Traced:
    return cumulated(np.multiply, without_nan(traced(a), 1), *args, **kwargs)


@implements("cumulative_sum")
def _cumulative_sum(
    x: Any, /, *, axis: Any = None, dtype: Any = None, out: Any = None,
    include_initial: bool = False, ufunc: Any = np.add,
) -> Traced:  # fmt: skip
    x = traced(x)
    if axis is None and x.ndim != 1:
        raise ValueError("axis must be specified for an array of more than one dimension")
    axis = 0 if axis is None else normalize_axis_index(axis, x.ndim)
    found = accumulated(ufunc, x, axis, dtype, out)
    if not include_initial:
        return found
    shape = (*x.shape[:axis], 1, *x.shape[axis + 1 :])
    return _concatenate([filled(shape, ufunc.identity, found.dtype), found], axis)


implements("cumulative_prod")(functools.partial(_cumulative_sum, ufunc=np.multiply))


@implements("nanmean")
def _nanmean(
    a: Any, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: Any = False, *,
    where: Any = True,
) -> Any:  # fmt: skip
    no_out(out, None if where in (True, nothing) else {"where": where})
    x = traced(a)
    if x.dtype.kind not in "fc":
        return mean_of(x, axis, dtype, keepdims=keepdims)
    count = sum_of(~np.isnan(x), axis, np.intp, keepdims=keepdims)
    return divided(sum_of(without_nan(x, 0), axis, dtype, keepdims=keepdims), count)


@implements("nanvar")
def _nanvar(
    a: Any, axis: Any = None, dtype: Any = None, out: Any = None, ddof: Any = 0,
    keepdims: Any = False, *, where: Any = True, mean: Any = nothing, correction: Any = nothing,
) -> Any:  # fmt: skip
    no_out(out, {"mean": mean} | ({} if where in (True, nothing) else {"where": where}))
    x, ddof = traced(a), correction if correction is not nothing else ddof
    if x.dtype.kind not in "fc":
        return var_of(x, axis, dtype, ddof=ddof, keepdims=keepdims)
    total, count = squares_of(x, cast(Traced, ~np.isnan(x)), axis, dtype, keepdims)
    degrees = reshaped(count, total.shape) - ddof
    variance = either(degrees <= 0, total.dtype.type(np.nan), divided(total, degrees))
    return scalar_if_point(variance)


def squares_of(
    x: Traced, there: Traced, axis: Any, dtype: Any, keepdims: Any
) -> tuple[Traced, Traced]:  # fmt: skip
    """The sum of squared deviations of those that are there from their mean, and how many these
    are."""
    count = sum_of(there, axis, np.intp, keepdims=True)
    mean = divided(sum_of(x, axis, dtype, keepdims=True, where=there), count)
    away = either(there, np.subtract(x, mean).astype(x.dtype), x.dtype.type(0))
    squares = np.square(away.real) + np.square(away.imag) if x.dtype.kind == "c" else away * away
    return sum_of(squares, axis, dtype, keepdims=keepdims), count


@implements("nanstd")
def _nanstd(*args: Any, **kwargs: Any) -> Any:
    return np.sqrt(_nanvar(*args, **kwargs))


@implements("nanargmin", "nanargmax")
def _nanarg(*args: Any, **kwargs: Any) -> Traced:
    raise refuse("numpy.nanargmin is an error where all values are NaN")


@implements("linalg.norm")
def _norm(x: Any, ord: Any = None, axis: Any = None, keepdims: bool = False) -> Any:
    x = traced(x)
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


@implements("broadcast_to")
def _broadcast_to(array: Any, shape: Any, subok: bool = False) -> Traced:
    shape = (shape,) if isinstance(shape, int | np.integer) else tuple(shape)
    x = traced(array)
    return Traced(broadcast(x, shape)._expr, shape, of=x)


@implements("broadcast_arrays")
def _broadcast_arrays(*args: Any, subok: bool = False) -> tuple[Traced, ...]:
    arrays = [traced(a) for a in args]
    shape = np.broadcast_shapes(*[a.shape for a in arrays])
    return tuple(broadcast(a, shape) for a in arrays)


@implements("meshgrid")
def _meshgrid(*xi: Any, copy: bool = True, sparse: bool = False, indexing: str = "xy") -> Any:
    arrays = [traced(x) for x in xi]
    n = len(arrays)
    out = [a.reshape((1,) * k + (-1,) + (1,) * (n - 1 - k)) for k, a in enumerate(arrays)]
    if indexing == "xy" and n > 1:
        out = [a.swapaxes(0, 1) for a in out]
    return tuple(out) if sparse else _broadcast_arrays(*out)


@implements("reshape")
def _reshape_function(
    a: Any, /, shape: Any = None, order: str = "C", *, newshape: Any = None, copy: Any = None
) -> Traced:
    return reshaped(traced(a), newshape if shape is None else shape, order)


@implements("ravel")
def _ravel(a: Any, order: str = "C") -> Traced:
    return traced(a).ravel(order)


@implements("copy")
def _copy(a: Any, order: str = "K", subok: bool = False) -> Traced:
    return traced(a).copy()


@implements("astype")
def _astype(x: Any, dtype: Any, /, *, copy: bool = True, device: Any = None) -> Traced:
    return traced(x).astype(dtype, copy=copy)


@implements("squeeze")
def _squeeze(a: Any, axis: Any = None) -> Traced:
    return traced(a).squeeze(axis)


@implements("flip")
def _flip(m: Any, axis: Any = None) -> Traced:
    x = traced(m)
    axes = axes_of(x, axis)
    return x[tuple([slice(None, None, -1 if k in axes else None) for k in range(x.ndim)])]


def _like(value: Any) -> Callable[..., Traced]:
    def like(
        a: Any, *args: Any, dtype: Any = None, order: str = "K", subok: bool = True,
        shape: Any = None, device: Any = None,
    ) -> Traced:  # fmt: skip
        a = traced(a)
        if dtype is None and args:
            dtype = args[0]
        if dtype is not None and np.dtype(dtype).fields is not None:
            raise TypeError("structured arrays cannot be traced")  # Dask has another way then
        return _full(a, value, dtype, shape)

    return like


def _full(a: Traced, value: Any, dtype: Any, shape: Any) -> Traced:
    shape = a.shape if shape is None else shape
    shape = (shape,) if isinstance(shape, int | np.integer) else tuple(shape)
    fill = traced(value, None if isinstance(value, Traced) else a.dtype if dtype is None else dtype)
    fill = fill.astype(a.dtype if dtype is None else dtype)
    return Traced(broadcast(fill, shape)._expr, shape)


for _name, _value in {"ones_like": 1, "zeros_like": 0, "empty_like": 0}.items():
    implements(_name)(_like(_value))


@implements("full_like")
def _full_like(
    a: Any, fill_value: Any, dtype: Any = None, order: str = "K", subok: bool = True,
    shape: Any = None, *, device: Any = None,
) -> Traced:  # fmt: skip
    return _full(traced(a), fill_value, dtype, shape)


@implements("trace")
def _trace(a: Any, offset: int = 0, axis1: int = 0, axis2: int = 1, dtype: Any = None,
           out: Any = None) -> Any:  # fmt: skip
    no_out(out)
    return traced(a).trace(offset, axis1, axis2, dtype)


def _below(shape: Shape, k: int) -> Traced:
    """Where column <= row + k, over the last two axes."""
    if not isinstance(k, int | np.integer):
        raise refuse(f"it makes a triangle from diagonal {k!r}")
    row, column = (axis_index(shape, len(shape) - n) for n in (2, 1))
    if k:
        row = apply(np.add, row, k)
    return Traced(apply(np.greater_equal, row, column), shape)


@implements("tril")
def _tril(m: Any, k: int = 0) -> Traced:
    x = traced(m)
    if x.ndim < 2:
        raise refuse("it makes a triangle of a vector")
    return either(_below(x.shape, k), x, x.dtype.type(0))


@implements("triu")
def _triu(m: Any, k: int = 0) -> Traced:
    x = traced(m)
    if x.ndim < 2:
        raise refuse("it makes a triangle of a vector")
    return either(_below(x.shape, k - 1), x.dtype.type(0), x)


@implements("diff")
def _diff(
    a: Any, n: int = 1, axis: int = -1, prepend: Any = nothing, append: Any = nothing
) -> Traced:
    if n < 0:
        raise refuse("it takes differences of an order below zero")
    x = traced(a)
    axis = normalize_axis_index(axis, x.ndim)
    before = (slice(None),) * axis

    def end(v: Any) -> list[Traced]:
        if v is nothing or v is None:
            return []
        v = traced(v)
        return [v if v.ndim else broadcast(v, x.shape[:axis] + (1,) + x.shape[axis + 1 :])]

    parts = [*end(prepend), x, *end(append)]
    x = _concatenate(parts, axis) if len(parts) > 1 else x
    for _ in range(n):
        pair = x[(*before, slice(1, None))], x[(*before, slice(None, -1))]
        step: Any = np.not_equal if x.dtype == bool else np.subtract
        x = step(*pair)
    return x


@implements("gradient")
def _gradient(f: Any, *spacing: Any, axis: Any = None, edge_order: int = 1) -> Any:
    x = traced(f)
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

        def at(a: Any, b: Any, k: int = k) -> Traced:
            return x[(*(slice(None),) * k, slice(a, b))]

        middle = (at(2, None) - at(None, -2)) / (2.0 * h)
        first, last = (at(1, 2) - at(0, 1)) / h, (at(-1, None) - at(-2, -1)) / h
        out.append(_concatenate([first, middle, last], k).astype(x.dtype))  # whatever h is
    return out[0] if len(axes) == 1 else tuple(out)


@implements("fix")
def _fix(x: Any, out: Any = None) -> Any:
    no_out(out)
    return np.trunc(traced(x))


@implements("real")
def _real(val: Any) -> Traced:
    return traced(val).real


@implements("imag")
def _imag(val: Any) -> Traced:
    return traced(val).imag


@implements("angle")
def _angle(z: Any, deg: bool = False) -> Any:
    z = traced(z)
    imag = z.imag if z.dtype.kind == "c" else 0
    a = np.arctan2(imag, z.real)
    return a * (180 / math.pi) if deg else a


@implements("sinc")
def _sinc(x: Any) -> Any:
    x = np.pi * traced(x)
    small = np.finfo(x.dtype).eps if x.dtype.kind == "f" else 1e-20
    y = either(x != 0, x, x.dtype.type(small))
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
    x = traced(x)
    if not copy:
        raise refuse("it writes into an array that it is given (copy=False)")
    if x.dtype.kind not in "fc":
        return scalar_if_point(x)
    if x.dtype.kind == "c":
        parts = [_nan_to_num(p, True, nan, posinf, neginf) for p in (x.real, x.imag)]
        return complex_of(parts[0], parts[1], x.dtype)
    limits, kind = np.finfo(x.dtype), x.dtype.type
    high = kind(limits.max if posinf is None else posinf)
    low = kind(limits.min if neginf is None else neginf)
    finite = either(_isposinf(x), high, either(_isneginf(x), low, x))
    return scalar_if_point(either(np.isnan(x), kind(nan), finite))


@implements("isclose")
def _isclose(
    a: Any, b: Any, rtol: Any = 1e-05, atol: Any = 1e-08, equal_nan: bool = False
) -> Traced:
    x = a if type(a) in (int, float, complex) else traced(a)
    y = float(b) if isinstance(b, int) else b
    if not isinstance(y, float | complex):
        y = traced(y)
        y = y.astype(np.result_type(y.dtype, 1.0))
    result = np.less_equal(abs(x - y), atol + rtol * abs(y)) & np.isfinite(y) | (x == y)
    if equal_nan:
        result = result | (np.isnan(x) & np.isnan(y))
    return result  # type: ignore[no-any-return]


@implements("select")
def _select(conditions: Sequence[Any], choices: Sequence[Any], default: Any = 0) -> Traced:
    if len(conditions) != len(choices) or not conditions:
        raise ValueError("list of cases must be same length as list of conditions")
    every = [*choices, default]
    dtype = np.result_type(*[v.dtype if isinstance(v, Traced) else v for v in every])
    out: Any = traced(default, dtype).astype(dtype)
    for condition, choice in zip(reversed(conditions), reversed(choices), strict=True):
        if traced(condition).dtype != bool:
            raise TypeError("invalid entry in condlist: should be boolean ndarray")
        out = either(condition, traced(choice, dtype).astype(dtype), out)
    return out  # type: ignore[no-any-return]


@implements("piecewise")
def _piecewise(x: Any, conditions: Any, functions: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
    x = traced(x)
    if not isinstance(conditions, list | tuple) or any(np.shape(c) != x.shape for c in conditions):
        raise refuse("it has no list of conditions of its own shape")
    conditions = [traced(c).astype(bool) for c in conditions]
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
    if isinstance(x, np.poly1d) or isinstance(p, Traced) or np.ndim(p) != 1:
        raise refuse("it evaluates a polynomial whose coefficients are not numbers")
    out: Any = np.zeros_like(traced(x))
    for coefficient in np.asarray(p):
        out = out * x + coefficient
    return out


@implements("outer")
def _outer(a: Any, b: Any, out: Any = None) -> Any:
    no_out(out)
    return np.multiply(traced(a).ravel()[:, None], traced(b).ravel()[None, :])


# ---- products of arrays with vectors


def _contracted(
    operands: Sequence[Traced], labels: Sequence[Sequence[Any]], out: Sequence[Any], dtype: DType
) -> Traced:
    """The sum of products of operands whose axes have these labels, over those that are not `out`.

    Only where one operand has them all: it is read once, and the others beside it. What else there
    is, as the product of two matrices, does more with each element than a kernel here would.
    """
    following = current.get()
    lengths: dict[Any, int] = {}
    for x, names in zip(operands, labels, strict=True):
        if len(set(names)) < len(names):
            raise refuse("it takes a diagonal in a product")
        for name, n in zip(names, x.shape, strict=True):
            if lengths.setdefault(name, n) == 1:
                lengths[name] = n
            elif n not in (1, lengths[name]):
                raise ValueError(f"lengths {lengths[name]} and {n} do not match")
    long = [name for name, n in lengths.items() if n != 1]
    whole = next((n for n in labels if set(long) <= set(n)), None)
    if whole is None or not following.products:
        following.operations += (8 if dtype.kind == "c" else 2) * math.prod(lengths.values())
        made = _of_matrices(operands, labels, out, lengths, dtype) if following.matrices else None
        if made is not None:
            return made
        raise refuse("it multiplies matrices")
    left = iter([name for name in out if name in long])
    order = [next(left) if name in out else name for name in whole if name in long]
    product: Any = None
    for x, names in zip(operands, labels, strict=True):
        has = [name for name in order if name in names and x.shape[names.index(name)] != 1]

        def laid(a: Any, names: Sequence[Any] = names, has: Sequence[Any] = has) -> Any:
            """With its axes where the product has them."""
            axes = [names.index(name) for name in has]
            a = a.transpose([*axes, *(k for k in range(a.ndim) if k not in axes)])
            a = a[(..., *(0,) * (a.ndim - len(axes)))]
            return a[(..., *[slice(None) if name in has else None for name in order])]

        part = look(x, laid).astype(dtype)
        product = part if product is None else product * part
    over = tuple([k for k, name in enumerate(order) if name not in out])
    (total,) = reduce("any" if dtype.kind == "b" else "sum", product, over, (dtype,))
    shape = tuple([slice(None) if name in long else None for name in out])
    return look(total, lambda a: a[shape]) if out else scalar_if_point(total)


def _of_matrices(
    operands: Sequence[Traced],
    labels: Sequence[Sequence[Any]],
    out: Sequence[Any],
    lengths: Mapping[Any, int],
    dtype: DType,
) -> Traced | None:
    """Such a sum where it is the product of two matrices, of a type for which BLAS has one."""
    if len(operands) != 2 or dtype.char not in "fdFD" or 0 in lengths.values():
        return None
    if any(x.dtype != dtype or x._expr.op != "input" or made_in(x._expr) for x in operands):
        return None
    long = [name for name, n in lengths.items() if n != 1]
    inner = [name for name in long if name not in out]
    outer = [name for name in out if name in long]
    if len(inner) != 1 or len(outer) != 2 or len(long) != 3:
        return None
    first = next((k for k, names in enumerate(labels) if outer[0] in names), 0)
    sides = []
    for k, pair in ((first, [outer[0], *inner]), (1 - first, [*inner, outer[1]])):
        x, names = operands[k], list(labels[k])
        if [name for name in names if name in long] not in (pair, pair[::-1]):
            return None
        axes = [names.index(name) for name in pair]
        axes += [n for n in range(x.ndim) if n not in axes]
        matrix = look(x, lambda a, axes=axes: a.transpose(axes)[(..., *(0,) * (a.ndim - 2))])  # type: ignore[misc]
        if matrix.shape != tuple([lengths[name] for name in pair]):
            return None
        number, view = matrix._expr.data
        sides.append(Seen(number, view, matrix.shape, dtype))
    product = Product((lengths[outer[0]], lengths[outer[1]]), *sides)
    total = Traced(current.get().keep(product, dtype), product.shape)
    shape = tuple([slice(None) if name in long else None for name in out])
    return look(total, lambda a: a[shape])


@implements("matmul")
def _matmul(a: Any, b: Any, out: Any = None, **kwargs: Any) -> Traced:
    no_out(out, kwargs)
    a, b = traced(a), traced(b)
    if not a.ndim or not b.ndim:
        raise ValueError("matmul: Input operand does not have enough dimensions")
    batch = list(range(max(a.ndim, b.ndim) - 2))
    rows, columns = ["row"] * (a.ndim > 1), ["column"] * (b.ndim > 1)
    of_a, of_b = batch[len(batch) - max(a.ndim - 2, 0) :], batch[len(batch) - max(b.ndim - 2, 0) :]
    if a.shape[-1] != b.shape[-1 - len(columns)]:
        raise ValueError("matmul: Input operand 1 has a mismatch in its core dimension 0")
    labels = [*of_a, *rows, "inner"], [*of_b, "inner", *columns]
    dtype = np.result_type(a.dtype, b.dtype)
    return _contracted((a, b), labels, [*batch, *rows, *columns], dtype)


@implements("tensordot")
def _tensordot(a: Any, b: Any, axes: Any = 2) -> Traced:
    a, b = traced(a), traced(b)
    if isinstance(axes, int):
        axes = list(range(a.ndim - axes, a.ndim)), list(range(axes))
    one, other = ([k] if isinstance(k, int) else list(k) for k in axes)
    one = [normalize_axis_index(k, a.ndim) for k in one]
    other = [normalize_axis_index(k, b.ndim) for k in other]
    if [a.shape[k] for k in one] != [b.shape[k] for k in other]:
        raise ValueError("shape-mismatch for sum")
    of_a: list[Any] = [("a", k) for k in range(a.ndim)]
    of_b: list[Any] = [("b", k) for k in range(b.ndim)]
    for j, k in zip(one, other, strict=True):
        of_b[k] = of_a[j]
    summed = {of_a[k] for k in one}
    out = [name for name in (*of_a, *of_b) if name not in summed]
    product = _contracted((a, b), (of_a, of_b), out, np.result_type(a.dtype, b.dtype))
    return Traced(product._expr, product.shape)


@implements("dot")
def _dot(a: Any, b: Any, out: Any = None) -> Any:
    no_out(out)
    a, b = traced(a), traced(b)
    if not a.ndim or not b.ndim:
        return np.multiply(a, b)
    return scalar_if_point(_tensordot(a, b, ([a.ndim - 1], [max(b.ndim - 2, 0)])))


@implements("inner")
def _inner(a: Any, b: Any) -> Any:
    a, b = traced(a), traced(b)
    if not a.ndim or not b.ndim:
        return np.multiply(a, b)
    return scalar_if_point(_tensordot(a, b, ([a.ndim - 1], [b.ndim - 1])))


@implements("vdot")
def _vdot(a: Any, b: Any) -> Any:
    a, b = traced(a), traced(b)
    return _dot((np.conj(a) if a.dtype.kind == "c" else a).ravel(), b.ravel())


@implements("einsum")
def _einsum(
    subscripts: Any, *operands: Any, out: Any = None, dtype: Any = None, optimize: Any = False,
    **kwargs: Any,
) -> Traced:  # fmt: skip
    kwargs = {k: v for k, v in kwargs.items() if (k, v) not in _USUAL}
    no_out(out, kwargs)
    if not isinstance(subscripts, str) or "." in subscripts:
        raise refuse("its einsum is not a plain one")
    given, arrow, wanted = subscripts.replace(" ", "").partition("->")
    if not arrow:
        letters = given.replace(",", "")
        wanted = "".join(sorted(n for n in set(letters) if letters.count(n) == 1))
    arrays = [traced(x) for x in operands]
    labels = [list(word) for word in given.split(",")]
    if [len(names) for names in labels] != [x.ndim for x in arrays]:
        raise ValueError("einsum: the subscripts do not fit the operands")
    if not set(wanted) <= set(given):
        raise ValueError("einsum: an output subscript is in no operand")
    result = np.result_type(*[x.dtype for x in arrays]) if dtype is None else np.dtype(dtype)
    if not all(np.can_cast(x.dtype, result) for x in arrays):
        raise TypeError(f"einsum: the operands cannot be cast safely to {result}")
    return _contracted(arrays, labels, list(wanted), result)


#: What einsum is told by those who want nothing special.
_USUAL = (("casting", "safe"), ("order", "K"))


@implements("can_cast")
def _can_cast(from_: Any, to: Any, casting: Any = "safe") -> bool:
    return np.can_cast(getattr(from_, "dtype", from_), getattr(to, "dtype", to), casting)


@implements("result_type")
def result_type(*args: Any) -> DType:
    return np.result_type(*[a.dtype if isinstance(a, Traced) else a for a in args])


@implements("min_scalar_type")
def _min_scalar_type(a: Traced) -> DType:
    return a.dtype


@implements("common_type")
def _common_type(*arrays: Any) -> Any:
    return np.common_type(*[np.zeros(1, a.dtype) for a in arrays])


@implements("iscomplexobj")
def _iscomplexobj(x: Traced) -> bool:
    return x.dtype.kind == "c"


@implements("isrealobj")
def _isrealobj(x: Traced) -> bool:
    return x.dtype.kind != "c"


@implements("shape")
def _shape(a: Any) -> Shape:
    return traced(a).shape


@implements("ndim")
def _ndim(a: Any) -> int:
    return traced(a).ndim


@implements("size")
def _size(a: Any, axis: Any = None) -> int:
    x = traced(a)
    return x.size if axis is None else math.prod(x.shape[k] for k in axes_of(x, axis))
