"""Sort the arrays of one task, stably, with NumPy's or CuPy's fastest way.

NaN and NaT come last, also where the largest come first. Equal elements stay in order: this shows
in signed zeros, and in the indices of `argsort`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .blocks import array_module, join
from .ordered_keys import has_ordered_keys, ordered_keys, values_of_keys

#: Elements that a line must have to be sorted by itself, with its own calls.
LONG_LINE = 4096
#: Indices that fit in half of a 64-bit word.
MOST_PACKED = 2**32


def sort_pieces(pieces: Sequence[Any], descending: bool = False) -> Any:
    """Sort the elements of 1-D arrays into one new array.

    >>> sort_pieces([np.array([3.0, np.nan]), np.array([7.0])], descending=True)
    array([ 7.,  3., nan])
    """
    x = join(pieces)
    kind, xp = x.dtype.kind, array_module(x)
    if not x.size:
        return x
    if descending and kind in "cUS" or _is_numpys_half(x):
        return x[argsort_keys(ordered_keys(x, descending))]
    if xp is not np:
        if descending:
            x = xp.ascontiguousarray(x[::-1])
        x.sort()
        if kind == "f":
            x = _move_first_nan(x)
        return _reverse(x) if descending else x
    quick = sorts_quickly(x.dtype) and not (kind == "f" and _has_both_zeros(x))
    if descending and not quick:
        x = x[::-1].copy()
    x.sort(kind=None if quick else "stable")
    if descending:
        x = _reverse(x)
    return x


def argsort_columns(
    columns: Sequence[Any], descending: bool = False, presorted: bool = False
) -> Any:
    """Return the order of the rows of 1-D columns, the first column first.

    `presorted` says that each of a few long parts is in order, which timsort uses.

    >>> argsort_columns([np.array([2, 1, 2]), np.array([9, 9, 8])])
    array([1, 2, 0])
    """
    if len(columns) == 1:
        return argsort(columns[0], descending, presorted)
    return argsort_keys([k for c in columns for k in ordered_keys(c, descending)], presorted)


def argsort(x: Any, descending: bool = False, presorted: bool = False) -> Any:
    """Return the indices that sort a 1-D array.

    >>> argsort(np.array([1.0, np.nan, 2.0, 1.0]), descending=True)
    array([2, 0, 3, 1])
    """
    xp = array_module(x)
    if not has_ordered_keys(x.dtype):
        return _argsort_extended_floats(x, descending)
    if xp is not np:
        if descending or not x.size:
            return argsort_keys(ordered_keys(x, descending))
        order = x.argsort()
        return _move_first_nan_indices(x, order) if x.dtype.kind == "f" else order
    if descending or x.dtype.kind == "f" and x.dtype.itemsize <= 4:
        return argsort_keys(ordered_keys(x, descending), presorted)
    if x.dtype.kind in "USc" or presorted:
        return np.argsort(x, kind="stable")
    return _argsort_key(x)


def argsort_keys(keys: Sequence[Any], presorted: bool = False) -> Any:
    """Return the order of the rows of columns of unsigned integers, the first column first."""
    keys = _pack(keys)
    order = None
    for key in reversed(keys):
        ranked = key if order is None else key[order]
        if array_module(key) is not np:
            step = ranked.argsort()
        elif presorted and len(keys) == 1 and key.dtype.itemsize > 2:
            step = np.argsort(ranked, kind="stable")
        else:
            step = _argsort_key(ranked)
        order = step if order is None else order[step]
    return order


def sort_lines(x: Any, axis: int, descending: bool = False) -> Any:
    """Sort an array along an axis into a new one.

    >>> sort_lines(np.array([[3, 1], [2, 4]]), 0, descending=True)
    array([[3, 4],
           [2, 1]])
    """
    if x.ndim == 1:
        return sort_pieces([x], descending)
    xp, kind = array_module(x), x.dtype.kind
    y = xp.ascontiguousarray(xp.moveaxis(x, axis, -1))
    if y.size and _are_long(y):
        lines = y.reshape(-1, y.shape[-1])
        out = xp.empty_like(lines)
        for n in range(len(lines)):
            out[n] = sort_pieces([lines[n]], descending)
        out = out.reshape(y.shape)
    elif descending or _is_numpys_half(y):
        out = xp.take_along_axis(y, argsort_lines(y, -1, descending), axis=-1)
    elif xp is np:
        quick = sorts_quickly(y.dtype) and not (kind == "f" and _has_both_zeros(y))
        out = np.sort(y, axis=-1, kind=None if quick else "stable")
    else:
        out = _sort_packed(y)
        if out is None:
            out = xp.sort(y, axis=-1)
    return xp.moveaxis(out, -1, axis)


def argsort_lines(x: Any, axis: int, descending: bool = False) -> Any:
    """Return the indices that sort an array along an axis.

    >>> argsort_lines(np.array([[3, 1], [2, 4]]), 1)
    array([[1, 0],
           [0, 1]])
    """
    if x.ndim == 1:
        return argsort(x, descending)
    xp = array_module(x)
    y = xp.ascontiguousarray(xp.moveaxis(x, axis, -1))
    by_keys = has_ordered_keys(y.dtype) and (descending or _is_numpys_half(y))
    keys = ordered_keys(y, descending) if by_keys else ()
    if y.size and (_are_long(y) or (descending and len(keys) != 1)):
        lines = y.reshape(-1, y.shape[-1])
        out = xp.empty(lines.shape, np.intp)
        for n in range(len(lines)):
            out[n] = argsort(lines[n], descending)
        out = out.reshape(y.shape)
    else:
        values = keys[0] if len(keys) == 1 else y
        out = np.argsort(values, axis=-1, kind="stable") if xp is np else values.argsort(axis=-1)
    return xp.moveaxis(out, -1, axis)


def lexsort_lines(columns: Sequence[Any], axis: int) -> Any:
    """Return the order along an axis of keys of equal shapes, the first the most important."""
    xp, first = array_module(columns[0]), columns[0]
    if first.ndim == 1:
        return argsort_columns(columns)
    moved = [xp.ascontiguousarray(xp.moveaxis(c, axis, -1)) for c in columns]
    lines = [c.reshape(-1, c.shape[-1]) for c in moved]
    out = xp.empty(lines[0].shape, np.intp)
    for n in range(len(out)):
        out[n] = argsort_columns([c[n] for c in lines])
    return xp.moveaxis(out.reshape(moved[0].shape), -1, axis)


def _sort_packed(y: Any) -> Any:
    """Sort CuPy's lines as words of line number and key; None where that would lose something.

    CUB sorts words by their digits. It compares short lines, which takes five times as long.
    """
    xp, n = array_module(y), y.shape[-1]
    if y.dtype.itemsize > 4 or not y.size or y.size // n >= MOST_PACKED:
        return None
    if y.dtype.kind == "f" and bool(((y == 0) & xp.signbit(y)).any()):
        return None  # keys have one zero
    (keys,) = ordered_keys(y)
    packed = xp.arange(y.size // n, dtype=np.uint64)[:, None] << np.uint64(32)
    packed = (packed | keys.reshape(-1, n).astype(np.uint64)).ravel()
    packed.sort()
    return values_of_keys(packed.astype(keys.dtype), y.dtype).reshape(y.shape)


def _are_long(y: Any) -> bool:
    """Whether lines along the last axis are long enough for calls of their own."""
    return bool(y.shape[-1] >= (LONG_LINE if array_module(y) is np else LONG_LINE * 256))


def sorts_quickly(dtype: np.dtype[Any]) -> bool:
    """Whether NumPy's default, by vector instructions, is faster than its stable sort."""
    return dtype.kind in "biufMm" and has_ordered_keys(dtype)


def _is_numpys_half(x: Any) -> bool:
    """Whether it is float16 of NumPy (2.4), which sorts signed zeros beside NaN wrongly."""
    return array_module(x) is np and x.dtype.kind == "f" and x.dtype.itemsize == 2


def _has_both_zeros(x: Any) -> bool:
    zeros = x[x == 0]
    return bool(zeros.size) and 0 < int(np.count_nonzero(np.signbit(zeros))) < zeros.size


def is_nan(x: Any) -> Any:
    """Whether elements are NaN or NaT."""
    xp = array_module(x)
    return xp.isnat(x) if x.dtype.kind in "Mm" else xp.isnan(x)


def count_nan_at_end(x: Any) -> int:
    """How many NaN and NaT a sorted array has: they are last.

    >>> count_nan_at_end(np.array([1.0, np.nan, np.nan]))
    2
    """
    if x.dtype.kind not in "fMm" or not x.size or not bool(is_nan(x[-1])):
        return 0
    return int(is_nan(x).sum())


def _reverse(x: Any) -> Any:
    """Reverse a sorted array and keep NaN and NaT last."""
    xp, n = array_module(x), count_nan_at_end(x)
    if not n:
        return xp.ascontiguousarray(x[::-1])
    return xp.concatenate([x[: x.size - n][::-1], x[x.size - n :]])


def _move_first_nan(x: Any) -> Any:
    """Move NaN from the front to the end: CUB puts those with a sign there."""
    xp = array_module(x)
    if not bool(xp.isnan(x[0])):
        return x
    n = int((xp.isnan(x) & xp.signbit(x)).sum())
    return x if n == x.size else xp.concatenate([x[n:], x[:n]])


def _move_first_nan_indices(x: Any, order: Any) -> Any:
    xp = array_module(x)
    if not bool(xp.isnan(x[order[0]])):
        return order
    nan = xp.isnan(x)
    n = int((nan & xp.signbit(x)).sum())
    here = xp.flatnonzero(nan)
    return xp.concatenate([order[n : n + x.size - here.size], here])


def _argsort_extended_floats(x: Any, descending: bool) -> Any:
    """Argsort floats of more than 64 bits by timsort: they have no ordered keys."""
    if not descending:
        return np.argsort(x, kind="stable")
    order = (x.size - 1 - np.argsort(x[::-1], kind="stable"))[::-1]
    nan = int(np.isnan(x).sum())
    return np.concatenate([order[nan:], order[:nan]])


def _pack(keys: Sequence[Any]) -> list[Any]:
    """Join neighbouring columns whose bits fit in 64."""
    out: list[Any] = []
    for key in keys:
        bits = 8 * key.dtype.itemsize
        if out and 8 * out[-1].dtype.itemsize + bits <= 64:
            total = 8 * out[-1].dtype.itemsize + bits
            wide = np.uint32 if total <= 32 else np.uint64
            out[-1] = (out[-1].astype(wide) << wide(bits)) | key.astype(wide)
        else:
            out.append(key)
    return out


def _argsort_key(key: Any) -> Any:
    """Argsort NumPy's integers or real numbers stably.

    The stable argsort of NumPy takes three to ten times as long.
    """
    size = key.dtype.itemsize
    if size <= 2 or key.size >= MOST_PACKED or key.size < 64:
        return np.argsort(key, kind="stable")
    if size == 4:
        (unsigned,) = ordered_keys(key)
        packed = unsigned.astype(np.uint64) << np.uint64(32)
        packed |= np.arange(key.size, dtype=np.uint64)
        packed.sort()
        packed &= np.uint64(MOST_PACKED - 1)
        return packed.view(np.int64).astype(np.intp, copy=False)
    return _order_ties(key, np.argsort(key))


def _order_ties(key: Any, order: Any) -> Any:
    """Put the indices of equal elements in order."""
    ranked = key[order]
    same = ranked[1:] == ranked[:-1]
    if key.dtype.kind in "fMm":
        nan = is_nan(ranked)
        same |= nan[1:] & nan[:-1]
    if not same.any():
        return order
    tied = np.zeros(key.size, bool)
    tied[1:] |= same
    tied[:-1] |= same
    here = np.flatnonzero(tied)
    group = np.concatenate([[0], np.cumsum(~same)])[here].astype(np.uint64)
    packed = (group << np.uint64(32)) | order[here].astype(np.uint64)
    packed.sort()
    order[here] = (packed & np.uint64(MOST_PACKED - 1)).astype(np.intp)
    return order
