"""Reading and writing elements of traced arrays: slices, masks and assignment.

Writing binds the name to a new expression, as long as no other name would see it.
"""

from __future__ import annotations

import operator
from typing import Any, cast

import numpy as np
from numpy.lib.array_utils import normalize_axis_index

from ..ir.expr import Expr, Shape, View
from .array import METHODS, TracedArray, as_traced, broadcast, look, reshape_array
from .compressed import CompressedArray, have_same_selection, mask_over
from .context import apply_view, cast_to, change_views, current, node_of, refuse
from .elementwise import apply, choose_elements
from .reduce import last_of_scan


def read_item(x: TracedArray, index: Any) -> TracedArray:
    """`x[index]`: a view, the elements that a mask selects, or a lookup."""
    if (selected := _select_by_mask(x, index)) is not None:
        return cast(TracedArray, selected)  # it stands for an array, too
    if (found := METHODS["index"](x, index)) is not None:
        return cast(TracedArray, found)
    index = _as_basic_index(index)
    # with an Ellipsis NumPy gives a view always, and never reads
    out = look(x, lambda a: a[index if ... in index else (*index, ...)])
    if (last := last_of_scan(x, out)) is not None:
        out = TracedArray(last, out.shape, of=x)
    if not out.shape and ... not in index:
        return TracedArray(out._expr, (), True)
    if not x._scalar:
        out._part_of = (x, index)
    return out


def write_item(x: TracedArray, index: Any, value: Any) -> None:
    """`x[index] = value`."""
    if isinstance(value, TracedArray) and value._part_of is not None:
        whole, place = value._part_of
        if whole is x and not isinstance(index, TracedArray) and place == _as_basic_index(index):
            return  # written already
    if isinstance(value, CompressedArray):
        _write(x, _assign_selected(x, index, value))
        return
    # as NumPy says: a number of Python's that the type cannot hold is an error
    new = as_traced(value, x.dtype if type(value) in (int, float, complex) else None)
    part = TracedArray(cast_to(new._expr, x.dtype), new.shape)
    if isinstance(index, TracedArray) and index.dtype == bool:
        if part.size != 1 or index.shape != x.shape[: index.ndim]:
            raise refuse("it assigns an array through a mask")
        mask = index.reshape(index.shape + (1,) * (x.ndim - index.ndim))
        part = reshape_array(part, ())
        _write(x, choose_elements(mask, part, x))
        return
    if x._scalar:  # through a mask Dask does it, having asked whether it is a number
        raise refuse("it writes an element of a scalar")
    _write(x, _assign_index(x, _as_basic_index(index), part))


def axis_index(shape: Shape, axis: int) -> Expr:
    """The position along one axis, over `shape`."""
    strides = tuple(int(k == axis) for k in range(len(shape)))
    return node_of("index", (), np.int64, View(0, strides))


def _as_basic_index(index: Any) -> tuple[Any, ...]:
    """An index that gives a view, as a tuple; the numbers in it as ints."""

    def convert_item(i: Any) -> Any:
        if i is None or i is ...:
            return i
        if isinstance(i, slice):
            return slice(*[None if v is None else operator.index(v) for v in _slice_ends(i)])
        if isinstance(i, bool | np.bool_):
            raise refuse("it indexes with True or False")
        if isinstance(i, str):
            raise refuse("it reads a field of records")
        if isinstance(i, TracedArray) and i._expr.op != "constant":
            raise refuse("it indexes with an array")
        if isinstance(i, list | tuple | np.ndarray) and np.ndim(i):
            raise refuse("it indexes with an array")
        return operator.index(i)

    return tuple(convert_item(i) for i in (index if isinstance(index, tuple) else (index,)))


def _slice_ends(s: slice) -> tuple[Any, Any, Any]:
    return s.start, s.stop, s.step


def _write(x: TracedArray, value: TracedArray) -> None:
    """Bind `x`, and the array of which it is a part, to new expressions."""
    whole, place = x._part_of or (None, ())
    others = [r() for r in x._family]
    if any(o is not None and o is not x and o is not whole for o in others):
        raise refuse("it writes into an array of which there are views")
    if value.shape != x.shape:
        value = broadcast(value, x.shape)
    value = TracedArray(cast_to(value._expr, x.dtype), x.shape)
    if whole is not None:
        if whole._part_of is not None:
            raise refuse("it writes into a view of a view")
        whole._expr = _assign_index(whole, place, value)._expr
    x._expr = value._expr


def _write_in_place(x: TracedArray, value: Any) -> Any:
    """`x` after an in-place operation.

    A scalar is replaced, as in NumPy; so is a point of a mesh, which is a number.
    """
    value = as_traced(value)
    if x._scalar or current.get().points:
        return value
    if not np.can_cast(value.dtype, x.dtype, "same_kind"):
        raise TypeError(f"Cannot cast ufunc output from {value.dtype} to {x.dtype}")
    if value.shape != x.shape:
        raise ValueError(f"non-broadcastable output operand with shape {x.shape}")
    _write(x, value)
    return x


def _assign_index(x: TracedArray, index: tuple[Any, ...], value: TracedArray) -> TracedArray:
    """`x` after `x[index] = value`: value where the index points, shifted to where it belongs."""
    # the index, with one entry for each axis of x
    given = [i for i in index if i is not None and i is not ...]
    if any(i is None for i in index):
        raise refuse("it assigns through an index with None")
    here = index.index(...) if ... in index else len(index)
    rest = [slice(None)] * (x.ndim - len(given))
    entries = [*index[:here], *rest, *index[here + 1 :]]
    if len(entries) != x.ndim:
        raise IndexError(f"too many indices for an array of {x.ndim} dimensions")
    _, target = apply_view(
        View(0, (0,) * x.ndim),
        x.shape,
        lambda a: a[(*index, ...)[: len(index) + (... not in index)]],
    )
    while value.ndim > len(target) and value.shape[0] == 1:
        value = value[0]
    value = broadcast(value, target)
    condition: Expr | None = None
    moves: list[tuple[int, int] | None] = []  # (start, step) of each axis; None: an int

    def add_condition(more: Expr) -> None:
        nonlocal condition
        condition = more if condition is None else apply(np.logical_and, condition, more)

    for axis, (entry, length) in enumerate(zip(entries, x.shape, strict=True)):
        i = axis_index(x.shape, axis)
        if not isinstance(entry, slice):
            at = normalize_axis_index(entry, length)
            if length > 1:
                add_condition(apply(np.equal, i, at))
            moves.append(None)
            continue
        points = range(length)[entry]
        moves.append((points.start, points.step))
        if len(points) == length:
            continue
        if not points:
            return x.copy()
        low, high = min(points[0], points[-1]), max(points[0], points[-1])
        if low > 0:
            add_condition(apply(np.greater_equal, i, low))
        if high < length - 1:
            add_condition(apply(np.less_equal, i, high))
        if abs(points.step) > 1:
            offset = apply(np.subtract, i, low) if low else i
            add_condition(apply(np.equal, apply(np.remainder, offset, abs(points.step)), 0))

    def change(view: View) -> View:
        offset, strides, own = view.offset, [], iter(view.strides)
        for move in moves:
            if move is None:
                strides.append(0)
                continue
            stride, (start, step) = next(own), move
            if stride % step:
                raise refuse("it assigns to every n-th element")
            strides.append(stride // step)
            offset -= stride // step * start
        return View(offset, tuple(strides))

    placed = TracedArray(change_views(value._expr, change), x.shape)
    if condition is None:
        return placed
    return choose_elements(TracedArray(condition, x.shape), placed, x)


def _select_by_mask(x: TracedArray, index: Any) -> CompressedArray | None:
    """What an index selects in which there is a mask, beside slices; None of any other index."""
    entries = index if isinstance(index, tuple) else (index,)
    masks = [i for i in entries if isinstance(i, TracedArray) and i.dtype == bool and i.shape]
    if not masks:
        return None
    others = [i for i in entries if i is not masks[0]]
    if len(others) < len(entries) - 1 or not all(i is ... or type(i) is slice for i in others):
        raise refuse("it indexes with an array")
    (mask,) = masks
    if mask.ndim == x.ndim == 1 and len(entries) == 1 and mask.shape == x.shape:
        whole, where = (
            _array_of_rows(x),
            _array_of_rows(mask),
        )  # which have to be copied to have one axis
        if whole is not None and where is not None and whole.shape == where.shape:
            return CompressedArray(whole.copy(), where.copy(), 0)
    here = [i is mask for i in entries].index(True)
    every = (slice(None),) * mask.ndim
    basic = (*entries[:here], *every, *entries[here + 1 :])
    axis = here
    if ... in entries[:here]:
        axis += x.ndim - len(basic)  # the Ellipsis is one entry, for that many axes and one
    seen = x[basic]
    if seen.shape[axis : axis + mask.ndim] != mask.shape:
        raise IndexError(f"a mask of shape {mask.shape} for an array of shape {x.shape}")
    if mask.ndim < x.ndim and not current.get().products:
        raise refuse("it selects along an axis by a mask: NumPy reads only what is selected")
    return CompressedArray(seen.copy(), mask.copy(), axis)


def _array_of_rows(x: TracedArray) -> TracedArray | None:
    """The array whose elements these are one after the other, if there is one."""
    return x._rows[0] if x._rows is not None and x._rows[1] is x._expr else None


def _assign_selected(x: TracedArray, index: Any, value: CompressedArray) -> TracedArray:
    """`x` after `x[mask] = value`, where that is of the same elements."""
    before = _select_by_mask(x, index) if isinstance(index, TracedArray) else None
    if before is None or not have_same_selection(before, value) or value._values.shape != x.shape:
        raise refuse("it assigns an array through a mask")
    return choose_elements(mask_over(value), value._values.astype(x.dtype), x)


METHODS["__getitem__"], METHODS["__setitem__"] = read_item, write_item
METHODS["write_in_place"] = _write_in_place
