"""Functions of NumPy that join, split, pad and view arrays."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.lib.array_utils import normalize_axis_index

from ...ir.expr import Expr, Shape, View
from ..array import (
    MOST_PARTS,
    TracedArray,
    as_traced,
    broadcast,
    expand,
    implements,
    look,
    reshape_array,
    store_array,
)
from ..context import cast_to, change_views, check_dtype, constant, current, no_out, node_of, refuse
from ..elementwise import apply, choose_elements
from ..indexing import axis_index
from ..reduce import axes_of

# ------------------------------------------------------------------------------------------------
# Parts put together.


def concatenate(
    parts: Sequence[Any], axis: Any = 0, out: Any = None, *, dtype: Any = None,
    casting: Any = "same_kind",
) -> TracedArray:  # fmt: skip
    no_out(out)
    arrays = [as_traced(p) for p in parts]
    if axis is None:
        arrays, axis = [a.ravel() for a in arrays], 0
    if not arrays:
        raise ValueError("need at least one array to concatenate")
    axis = normalize_axis_index(axis, arrays[0].ndim)
    if len(arrays) > MOST_PARTS:
        raise refuse(f"it concatenates {len(arrays)} arrays")
    dtype = check_dtype(dtype or np.result_type(*[a.dtype for a in arrays]))
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
            whole = cast_to(change_views(a._expr, _shift_views(axis, start, length)), dtype)
            if not pieces or pieces[-1][1] is not whole:
                pieces.append((start, whole))
        start += length
    if not pieces:
        return TracedArray(constant(0, dtype), tuple(shape))
    return TracedArray(_choice(pieces, axis_index(tuple(shape), axis)), tuple(shape))


def _shift_views(axis: int, start: int, length: int) -> Callable[[View], View]:
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


def _stack(arrays: Sequence[Any], axis: int = 0, out: Any = None, **kwargs: Any) -> TracedArray:
    arrays = [as_traced(a) for a in arrays]
    if len({a.shape for a in arrays}) > 1:
        raise ValueError("all input arrays must have the same shape")
    return concatenate([expand(a, axis) for a in arrays], axis, out, **kwargs)


def _at_least(ndim: int, *arrays: Any) -> Any:
    """`numpy.atleast_1d` and its like."""
    like = {1: np.atleast_1d, 2: np.atleast_2d, 3: np.atleast_3d}[ndim]
    parts = [as_traced(a) for a in arrays]
    out = tuple(p if p.ndim >= ndim else look(p, like) for p in parts)
    return out[0] if len(out) == 1 else out


def _stack_function(ndim: int, axis: int, arrays: Sequence[Any], **kwargs: Any) -> TracedArray:
    """`numpy.hstack` and its like."""
    parts = [_at_least(ndim, a) for a in arrays]
    if axis == 1 and parts[0].ndim == 1:
        axis = 0
    return concatenate(parts, axis, **kwargs)


def _put_together(parts: Sequence[Any], *args: Any, **kwargs: Any) -> TracedArray:
    """`numpy.concatenate`, of what may itself be parts that were put together."""
    return _write_if_wanted(concatenate([_in_parts(p) for p in parts], *args, **kwargs))


def _write_if_wanted(x: TracedArray) -> TracedArray:
    """Parts that are put together, as an array that a kernel writes, if such are wanted."""
    context = current.get()
    if not context.whole or x._expr.op != "where":
        return x
    kept = store_array(x)
    context.parts[id(kept._expr)] = x._expr
    return kept


def _in_parts(x: Any) -> TracedArray:
    x = as_traced(x)
    before = current.get().parts.get(id(x._expr))
    return x if before is None else TracedArray(before, x.shape)


def _block(parts: Any) -> TracedArray:
    def depth(p: Any) -> int:
        return 1 + max(depth(q) for q in p) if isinstance(p, list) else 0

    def deepest_ndim(p: Any) -> int:
        return max(deepest_ndim(q) for q in p) if isinstance(p, list) else as_traced(p).ndim

    levels = depth(parts)
    ndim = max(levels, deepest_ndim(parts))

    def join(p: Any, level: int) -> TracedArray:
        if not isinstance(p, list):
            a = _in_parts(p)
            return a.reshape((1,) * (ndim - a.ndim) + a.shape)
        return concatenate([join(q, level + 1) for q in p], ndim - levels + level)

    return _write_if_wanted(join(parts, 0))


def _roll(x: TracedArray, shift: Any, axis: Any = None) -> TracedArray:
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
            x = concatenate(ends, a)
    return x.copy()


def _repeat(x: Any, repeats: Any, axis: Any = None) -> TracedArray:
    """`numpy.repeat`, of each element as often."""
    x = as_traced(x)
    if isinstance(repeats, TracedArray) or np.ndim(repeats):
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


def _split(x: TracedArray, parts: Any, axis: int = 0) -> list[TracedArray]:
    length = x.shape[axis]
    if isinstance(parts, int | np.integer):
        each, extra = divmod(length, int(parts))
        sizes = extra * [each + 1] + (int(parts) - extra) * [each]
        ends = [0, *itertools.accumulate(sizes)]
    else:
        ends = [0, *[operator.index(p) for p in parts], length]
    before = (slice(None),) * normalize_axis_index(axis, x.ndim)
    return [x[(*before, slice(a, b))] for a, b in itertools.pairwise(ends)]


def _even_split(x: TracedArray, parts: Any, axis: int = 0) -> list[TracedArray]:
    if isinstance(parts, int | np.integer) and x.shape[axis] % parts:
        raise ValueError("array split does not result in an equal division")
    return _split(x, parts, axis)


def _pad(x: Any, width: Any, mode: Any = "constant", **kwargs: Any) -> Any:
    x = as_traced(x)
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
                part = TracedArray(constant(value, x.dtype), tuple(shape))
            else:
                part = _border(x, axis, n, mode, bool(side))
            ends.append((side, part))
        parts = [p for s, p in ends if s == 0] + [x] + [p for s, p in ends if s == 1]
        x = concatenate(parts, axis) if len(parts) > 1 else x
    return x if np.any(widths) else TracedArray(x._expr, x.shape)  # a copy, whatever it pads


def _border(x: TracedArray, axis: int, n: int, mode: str, behind: bool) -> TracedArray:
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

    def view(x: Any, *args: Any, **kwargs: Any) -> TracedArray:
        x = as_traced(x)
        out = look(x, lambda a: function(a, *args, **kwargs))
        return x if x._scalar and not out.shape else out

    implements(name)(view)


for _name in _VIEWS.split():
    _as_view(_name)
for _name, _function in {
    "concatenate": _put_together, "concat": _put_together, "stack": _stack, "block": _block,
    "vstack": functools.partial(_stack_function, 2, 0),
    "row_stack": functools.partial(_stack_function, 2, 0),
    "hstack": functools.partial(_stack_function, 1, 1),
    "dstack": functools.partial(_stack_function, 3, 2),
    "atleast_1d": functools.partial(_at_least, 1), "atleast_2d": functools.partial(_at_least, 2),
    "atleast_3d": functools.partial(_at_least, 3), "roll": _roll, "array_split": _split,
    "split": _even_split, "pad": _pad, "repeat": _repeat,
}.items():  # fmt: skip
    implements(_name)(_function)


@implements("broadcast_to")
def _broadcast_to(array: Any, shape: Any, subok: bool = False) -> TracedArray:
    shape = (shape,) if isinstance(shape, int | np.integer) else tuple(shape)
    x = as_traced(array)
    return TracedArray(broadcast(x, shape)._expr, shape, of=x)


@implements("broadcast_arrays")
def _broadcast_arrays(*args: Any, subok: bool = False) -> tuple[TracedArray, ...]:
    arrays = [as_traced(a) for a in args]
    shape = np.broadcast_shapes(*[a.shape for a in arrays])
    return tuple(broadcast(a, shape) for a in arrays)


@implements("meshgrid")
def _meshgrid(*xi: Any, copy: bool = True, sparse: bool = False, indexing: str = "xy") -> Any:
    arrays = [as_traced(x) for x in xi]
    n = len(arrays)
    out = [a.reshape((1,) * k + (-1,) + (1,) * (n - 1 - k)) for k, a in enumerate(arrays)]
    if indexing == "xy" and n > 1:
        out = [a.swapaxes(0, 1) for a in out]
    return tuple(out) if sparse else _broadcast_arrays(*out)


@implements("reshape")
def _reshape_function(
    a: Any, /, shape: Any = None, order: str = "C", *, newshape: Any = None, copy: Any = None
) -> TracedArray:
    return reshape_array(as_traced(a), newshape if shape is None else shape, order)


@implements("ravel")
def _ravel(a: Any, order: str = "C") -> TracedArray:
    return as_traced(a).ravel(order)


@implements("copy")
def _copy(a: Any, order: str = "K", subok: bool = False) -> TracedArray:
    return as_traced(a).copy()


@implements("astype")
def _astype(x: Any, dtype: Any, /, *, copy: bool = True, device: Any = None) -> TracedArray:
    return as_traced(x).astype(dtype, copy=copy)


@implements("squeeze")
def _squeeze(a: Any, axis: Any = None) -> TracedArray:
    return as_traced(a).squeeze(axis)


@implements("flip")
def _flip(m: Any, axis: Any = None) -> TracedArray:
    x = as_traced(m)
    axes = axes_of(x, axis)
    return x[tuple([slice(None, None, -1 if k in axes else None) for k in range(x.ndim)])]


def _like_function(value: Any) -> Callable[..., TracedArray]:
    def full_like(
        a: Any, *args: Any, dtype: Any = None, order: str = "K", subok: bool = True,
        shape: Any = None, device: Any = None,
    ) -> TracedArray:  # fmt: skip
        a = as_traced(a)
        if dtype is None and args:
            dtype = args[0]
        if dtype is not None and np.dtype(dtype).fields is not None:
            raise TypeError("structured arrays cannot be traced")  # Dask has another way then
        return _full(a, value, dtype, shape)

    return full_like


def _full(a: TracedArray, value: Any, dtype: Any, shape: Any) -> TracedArray:
    shape = a.shape if shape is None else shape
    shape = (shape,) if isinstance(shape, int | np.integer) else tuple(shape)
    fill = as_traced(
        value, None if isinstance(value, TracedArray) else a.dtype if dtype is None else dtype
    )
    fill = fill.astype(a.dtype if dtype is None else dtype)
    return TracedArray(broadcast(fill, shape)._expr, shape)


for _name, _value in {"ones_like": 1, "zeros_like": 0, "empty_like": 0}.items():
    implements(_name)(_like_function(_value))


@implements("full_like")
def _full_like(
    a: Any, fill_value: Any, dtype: Any = None, order: str = "K", subok: bool = True,
    shape: Any = None, *, device: Any = None,
) -> TracedArray:  # fmt: skip
    return _full(as_traced(a), fill_value, dtype, shape)


@implements("trace")
def _trace(a: Any, offset: int = 0, axis1: int = 0, axis2: int = 1, dtype: Any = None,
           out: Any = None) -> Any:  # fmt: skip
    no_out(out)
    return as_traced(a).trace(offset, axis1, axis2, dtype)


def _lower_triangle(shape: Shape, k: int) -> TracedArray:
    """Where column <= row + k, over the last two axes."""
    if not isinstance(k, int | np.integer):
        raise refuse(f"it makes a triangle from diagonal {k!r}")
    row, column = (axis_index(shape, len(shape) - n) for n in (2, 1))
    if k:
        row = apply(np.add, row, k)
    return TracedArray(apply(np.greater_equal, row, column), shape)


@implements("tril")
def _tril(m: Any, k: int = 0) -> TracedArray:
    x = as_traced(m)
    if x.ndim < 2:
        raise refuse("it makes a triangle of a vector")
    return choose_elements(_lower_triangle(x.shape, k), x, x.dtype.type(0))


@implements("triu")
def _triu(m: Any, k: int = 0) -> TracedArray:
    x = as_traced(m)
    if x.ndim < 2:
        raise refuse("it makes a triangle of a vector")
    return choose_elements(_lower_triangle(x.shape, k - 1), x.dtype.type(0), x)


@implements("shape")
def _shape(a: Any) -> Shape:
    return as_traced(a).shape


@implements("ndim")
def _ndim(a: Any) -> int:
    return as_traced(a).ndim


@implements("size")
def _size(a: Any, axis: Any = None) -> int:
    x = as_traced(a)
    return x.size if axis is None else math.prod(x.shape[k] for k in axes_of(x, axis))
