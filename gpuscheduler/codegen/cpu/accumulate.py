"""Accumulators of reductions and scans, evaluated with NumPy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...ir.expr import DType, Expr, Kernel, Reduction, View, nodes, substitute, view_of, with_view
from . import llvm_code, llvm_reduce

Array = np.ndarray[Any, Any]


ALL_POINTS = slice(None)


# ---- reductions

State = tuple[Any, ...]  # what is known of some of the points that are reduced to one


def broadcast_view(view: View, axes: Sequence[int], count: int) -> View:
    """Return a view over `count` axes, of which it has `axes`; it is constant along the others."""
    strides = [0] * count
    for k, s in zip(axes, view.strides, strict=True):
        strides[k] = s
    return View(view.offset, tuple(strides))


def reorder_view(view: View, order: Sequence[int]) -> View:
    return View(view.offset, tuple([view.strides[k] for k in order]))


def reorder_axes(exprs: Sequence[Expr], order: Sequence[int]) -> list[Expr]:
    """Return expressions over the same axes in another order."""
    leaves = [(n, v) for n in nodes(exprs) if (v := view_of(n)) is not None]
    return substitute(exprs, {id(n): with_view(n, reorder_view(v, order)) for n, v in leaves})


def drop_first_axis(leaf: Expr) -> Expr:
    """Return a leaf without its first axis, along which it is constant."""
    view = view_of(leaf)
    return leaf if view is None else with_view(leaf, View(view.offset, view.strides[1:]))


class PairwiseMerger:
    """Merge partial results in pairs, like a binary counter.

    Rounding errors stay small for any number of parts, and the order is always the same.
    """

    def __init__(self, op: str):
        self.op = op
        self.stack: list[tuple[int, State]] = []

    def add(self, state: State) -> None:
        rank = 0
        while self.stack and self.stack[-1][0] == rank:
            state = merge_states(self.op, self.stack.pop()[1], state)
            rank += 1
        self.stack.append((rank, state))

    def total(self) -> State:
        state = self.stack.pop()[1]
        while self.stack:
            state = merge_states(self.op, self.stack.pop()[1], state)
        return state


_WIDE = {"f2": "f8", "f4": "f8", "c8": "c16"}


def _wide_dtype(dtype: DType) -> DType:
    """Return the dtype in which values of this dtype are added up."""
    return np.dtype(_WIDE.get(dtype.str[1:], dtype))


def _types(reduction: Reduction) -> tuple[DType, ...]:
    """Return the dtypes of a reduction's state."""
    op, arg, dtype = reduction.op, reduction.arg.dtype, reduction.dtypes[0]
    if op in ("sum", "prod"):
        return (_wide_dtype(dtype),)
    if op in ("any", "all"):
        return (np.dtype(bool),)
    if op in ("argmin", "argmax"):
        return np.dtype(np.int64), arg
    if op == "moment":
        total = _wide_dtype(np.result_type(arg, np.float16))
        real = np.empty(0, total).real.dtype
        return np.dtype(np.float64), total, real
    return (arg,)


def accumulation_dtype(reduction: Reduction) -> DType:
    """Return the dtype to which a reduction's values are converted first."""
    return reduction.arg.dtype if reduction.op in llvm_code.EXTREMES else _types(reduction)[0]


def allocate_state(reduction: Reduction, shape: tuple[int, ...]) -> State:
    return tuple([np.empty(shape, t) for t in _types(reduction)])


def identity_state(reduction: Reduction, kernel: Kernel) -> State:
    """Return the state of a reduction of no points."""
    op = reduction.op
    start = {"sum": 0, "prod": 1, "any": False, "all": True, "moment": 0}.get(op)
    if start is None and 0 in [kernel.shape[k] for k in kernel.axes]:
        if op.startswith("arg"):
            raise ValueError(f"attempt to get {op} of an empty sequence")
        name = _REDUCE[op].__name__
        raise ValueError(f"zero-size array to reduction operation {name} which has no identity")
    return tuple([np.full(kernel.output_shape, start or 0, t) for t in _types(reduction)])


_REDUCE: dict[str, np.ufunc] = {op: getattr(np, name) for op, name in llvm_reduce.PAIRWISE.items()}


def reduce_block(
    reduction: Reduction, value: Array, axes: tuple[int, ...], first: int, strides: tuple[int, ...]
) -> State:
    """Return the state of one block."""
    op = reduction.op
    if op in ("argmin", "argmax"):
        return _find_extreme(op, value, axes, first, strides)
    if op == "moment":
        _, total, real = _types(reduction)
        if reduction.dtypes[1].itemsize == real.itemsize:  # to be as exact as its own numbers
            value = value.astype(total, copy=False)
        return _moment(value, axes, total, real)
    function = _REDUCE[op]
    if op in ("sum", "prod"):
        wide = _wide_dtype(reduction.dtypes[0])
        return (
            _accurate_sum(value, axes, wide) if op == "sum" else function.reduce(value, axes, wide),
        )
    found = function.reduce(value, axis=axes)
    return (found.copy() if not axes else found,)


def _accurate_sum(value: Array, axes: tuple[int, ...], wide: DType) -> Any:
    """Return a sum along any axes, as accurate as NumPy's along contiguous axes.

    Adding up in the values' own type is three times faster. It is done for short runs of values.
    """
    if _wide_dtype(value.dtype) != wide or value.dtype.itemsize == 2 or len(axes) == 0:
        return np.add.reduce(value, axes, wide)
    last = value.ndim - 1
    if last in axes and value.shape[last] >= 16 and value.flags.c_contiguous:
        # NumPy adds in pairs here
        return np.add.reduce(np.add.reduce(value, last), axes[:-1], wide)
    if len(axes) == 1 and axes[0] != last and value.shape[last] >= 64:
        (k,), few = axes, 32
        many = value.shape[k] // few
        head = value[(*[ALL_POINTS] * k, slice(0, many * few))]
        shape = (*value.shape[:k], many, few, *value.shape[k + 1 :])
        found = np.add.reduce(np.add.reduce(head.reshape(shape), k + 1), k, wide)
        if many * few < value.shape[k]:
            found += np.add.reduce(value[(*[ALL_POINTS] * k, slice(many * few, None))], k, wide)
        return found
    return np.add.reduce(value, axes, wide)


def _find_extreme(
    op: str, value: Array, axes: tuple[int, ...], first: int, strides: tuple[int, ...]
) -> State:
    """Return the positions of the extremes among the reduced points, and the extremes."""
    kept = [k for k in range(value.ndim) if k not in axes]
    shape = tuple([value.shape[k] for k in kept])
    over = tuple([value.shape[k] for k in axes])
    lines = value.transpose(*kept, *axes).reshape(*shape, -1)
    at = (np.argmin if op == "argmin" else np.argmax)(lines, axis=-1)
    found = np.take_along_axis(lines, np.expand_dims(at, -1), -1)[..., 0]
    position: Any = np.full(shape, first, np.int64)
    if not axes:  # they were all of length one
        return position, found
    for k, coordinate in zip(axes, np.unravel_index(at, over), strict=True):
        position += strides[k] * coordinate
    return position, found


def _moment(value: Array, axes: tuple[int, ...], total: DType, real: DType) -> State:
    """Return count, sum, and squared deviations from the mean.

    Deviations are taken from the mean rounded to the values' own type. The error of the rounded
    mean is subtracted at the end.
    """
    if value.dtype.kind not in "fc" or value.dtype.itemsize == 2:
        value = value.astype(np.float32 if value.dtype.itemsize == 2 else total)
    n = math.prod([value.shape[k] for k in axes])
    shape = tuple([value.shape[k] for k in range(value.ndim) if k not in axes])
    added = np.asarray(_accurate_sum(value, axes, total))
    mean = np.expand_dims((added / n).astype(value.dtype), axes)
    off = value - mean
    rest = np.asarray(_accurate_sum(off, axes, total))
    if value.dtype.kind == "c":
        squares = off.real * off.real
        squares += off.imag * off.imag
    else:
        squares = np.multiply(off, off, out=off)
    m2 = _accurate_sum(squares, axes, real) - (rest.real * rest.real + rest.imag * rest.imag) / n
    return np.full(shape, n, np.float64), added, m2


def merge_states(op: str, a: State, b: State) -> State:
    """Return the state of the points of two states."""
    if op in ("argmin", "argmax"):
        return _more_extreme(op, a, b)
    if op == "moment":
        return _chan(a, b)
    return (_REDUCE[op](a[0], b[0]),)


def _more_extreme(op: str, a: State, b: State) -> State:
    with np.errstate(invalid="ignore"):
        beats = np.less if op == "argmin" else np.greater
        (i, x), (j, y) = a, b
        x_odd, y_odd = x != x, y != y
        earlier = j < i
        better = np.where(x_odd | y_odd, y_odd & (~x_odd | earlier),
                          beats(y, x) | ((x == y) & earlier))  # fmt: skip
    return np.where(better, j, i), np.where(better, y, x)


def _chan(a: State, b: State) -> State:
    """Merge two moments, by Chan, Golub and LeVeque (1979)."""
    with np.errstate(invalid="ignore"):
        (n, s, m), (k, t, o) = a, b
        apart = t / k - s / n
        far = apart.real * apart.real + apart.imag * apart.imag
        return n + k, s + t, m + o + far * (n * k / (n + k))


def finish_state(reduction: Reduction, state: State) -> list[Array]:
    """Return the results of a state, in the dtypes of the reduction."""
    if reduction.op == "moment":
        n, total, m2 = state
        with np.errstate(invalid="ignore", divide="ignore"):
            state = total / n, m2
    return [
        np.asarray(s).astype(d, copy=False) for s, d in zip(state, reduction.dtypes, strict=True)
    ]
