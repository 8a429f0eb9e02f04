"""Indexing with arrays of integers, on traced arrays.

These are `table[i]`, `take`, `choose` and their like. Only GPUs get them: a kernel reads one
element for each point, and NumPy's own functions are as fast on the host. A kernel cannot raise
NumPy's error for an index beyond an array's end: it wraps around, as CuPy does.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
from numpy.lib.array_utils import normalize_axis_index

from ...frontend import index_lists
from ...ir.expr import ANYWHERE, LEAVES, RANDOM, Expr, View, nodes, view_of, with_view
from ..array import (
    METHODS,
    TracedArray,
    as_traced,
    broadcast,
    implements,
    look,
    read_beside,
    scalar_if_point,
    store_array,
)
from ..context import cast_to, constant, current, no_out, node_of, refuse
from ..elementwise import apply, choose_elements, clip_array
from ..indexing import axis_index
from ..registry import instead_of

#: Bounds of a value that may be any number.
ANY_NUMBER = -math.inf, math.inf


def on_gpus(what: str) -> None:
    if not current.get().products:
        raise refuse(f"{what}: NumPy's own is as fast")


# ------------------------------------------------------------------------------------------------
# Elements at computed indices.


def elements_at(
    x: TracedArray,
    shape: tuple[int, ...],
    fixed_view: Callable[[View], View],
    offset_of: Callable[[View], Expr | None],
    anywhere: bool = False,
) -> TracedArray:
    """An array of this shape, made of elements of `x`.

    Each leaf is read through the view `fixed_view`, at an offset of `offset_of` elements: an int64
    expression over the shape, or None for no offset. With `anywhere`, the offsets are in bounds
    also at points whose results are not used.
    """
    new: dict[int, Expr] = {}
    for old in nodes((x._expr,)):
        args = tuple([new[id(a)] for a in old.args])
        view = view_of(old)
        if view is not None:
            leaf = with_view(old, fixed_view(view))
            found = node_of(leaf.op, (), leaf.dtype, leaf.data)
            offset = offset_of(view)
            if offset is not None and old.op == "index":
                found = apply(np.add, found, offset)
            elif offset is not None:
                found = node_of(
                    "taken", (found, offset), leaf.dtype, ANYWHERE if anywhere else None
                )
        elif old.op == "taken" and args[0].op == "taken":
            base, place = args[0].args
            found = node_of("taken", (base, apply(np.add, place, args[1])), old.dtype)
        elif old.op in RANDOM:
            raise refuse("it indexes random numbers with an array")
        else:
            found = node_of(old.op, args, old.dtype, old.data)
        new[id(old)] = found
    return TracedArray(new[id(x._expr)], shape)


def _times(number: Expr, step: int) -> Expr:
    return number if step == 1 else apply(np.multiply, number, step)


@instead_of(index_lists.pick_elements)
def _pick_elements(x: Any, axis: int, indices: Any, length: int) -> Any:
    """Elements of an array along an axis at given indices, each less than `length`."""
    on_gpus("it indexes with an array")
    x, indices = as_traced(x), as_traced(indices)
    if x.shape[axis] != length:  # a kernel does not check bounds
        raise refuse(f"it indexes an axis of size {x.shape[axis]} as one of size {length}")
    shape = (*x.shape[:axis], indices.size, *x.shape[axis + 1 :])
    if 0 in x.shape or 0 in shape:
        return TracedArray(constant(0, x.dtype), shape)
    line = look(indices, lambda a: a.reshape((-1,) + (1,) * (x.ndim - axis - 1)))
    number = cast_to(broadcast(line, shape)._expr, np.int64)

    def offset_of(view: View) -> Expr | None:
        step = 0 if length == 1 else view.strides[axis]
        return _times(number, step) if step else None

    def fixed_view(view: View) -> View:
        return View(view.offset, (*view.strides[:axis], 0, *view.strides[axis + 1 :]))

    return elements_at(x, shape, fixed_view, offset_of)


@instead_of(index_lists.reorder_arrays)
def _reorder_arrays(arrays: list[Any], axis: int, indices: Any) -> Any:
    return _pick_elements(index_lists.join_arrays(arrays, axis), axis, indices, indices.size)


def _store_if_reused(x: TracedArray, points: int) -> TracedArray:
    """The same array, stored first if its elements would be computed more than once.

    `points` is how many elements are looked up. Random numbers are always stored.
    """
    if x._expr.op in LEAVES:
        return x
    every = nodes((x._expr,))
    if any(n.op in RANDOM for n in every) or points > x.size:
        return store_array(x)
    return x


def _wrap_index(index: TracedArray, length: int) -> TracedArray:
    """The index as int64, modulo a length."""
    if index.dtype.kind == "u" and np.iinfo(index.dtype).max < length:
        return index.astype(np.int64)
    if index.dtype.kind == "i" and index.itemsize <= 4 and length < 2**31:
        small: Any = np.remainder(index.astype(np.int32), np.int32(length))
        return cast(TracedArray, small.astype(np.int64))
    inside: Any = np.remainder(index.astype(np.int64), np.int64(length))
    return cast(TracedArray, inside)


def _indices_in_bounds(index: Any, length: int) -> TracedArray:
    """Indices into an axis, counted from its start; only known ones raise out of bounds."""
    if isinstance(index, TracedArray):
        if index.dtype.kind not in "iu":
            raise refuse(f"it indexes with an array of {index.dtype}")
        return _wrap_index(index, length)
    known = np.asarray(index)
    if known.dtype.kind not in "iu" and known.size:
        raise refuse(f"it indexes with an array of {known.dtype}")
    if ((known < -length) | (known >= length)).any():
        raise IndexError(f"an index is out of bounds for an axis of size {length}")
    return constant_array(np.where(known < 0, known + length, known).astype(np.int64))


def constant_array(values: np.ndarray[Any, Any]) -> TracedArray:
    """An array whose values are known, as an input of the kernel, or as a constant."""
    if values.size == 1 or not values.size:
        return as_traced(values)
    if current.get().beside is None:
        raise refuse("it uses an array that is neither an input nor computed from one")
    return read_beside(np.ascontiguousarray(values), own=True)


def _is_index_array(entry: Any) -> bool:
    """Whether an entry of an index is an array or a list of integers."""
    if isinstance(entry, TracedArray):
        return entry._expr.op != "constant" and entry.dtype != bool
    return isinstance(entry, (list, tuple, np.ndarray)) and np.ndim(entry) > 0


def _index_with_arrays(x: TracedArray, index: Any) -> TracedArray | None:
    """`x[index]` with arrays of integers in the index; None for any other index."""
    given_entries = index if isinstance(index, tuple) else (index,)
    if not any(map(_is_index_array, given_entries)):
        return None
    on_gpus("it indexes with an array")
    entries = tuple(_expand_index(x, given_entries))
    # basic indexing first: a view, along whose axes elements are then looked up
    whole = x[tuple([slice(None) if _is_index_array(e) else e for e in entries])]
    chosen: dict[int, Any] = {}
    places, axis = [], 0  # of arrays, and of integers, which NumPy treats as arrays beside them
    for k, entry in enumerate(entries):
        if _is_index_array(entry):
            chosen[axis] = entry
        if entry is None or isinstance(entry, slice) or axis in chosen:
            axis += 1
        if entry is not None and not isinstance(entry, slice):
            places.append(k)
    # an Ellipsis separates arrays, even if it stands for no axis
    there = [
        k
        for k, e in enumerate(given_entries)
        if e is not None and e is not ... and not isinstance(e, slice)
    ]
    side_by_side = there == list(range(there[0], there[-1] + 1))
    first = sum(e is None or isinstance(e, slice) for e in entries[: places[0]])
    first = first if side_by_side else 0
    if len(chosen) == 1:
        ((along, given),) = chosen.items()
        if (found := _join_slices(whole, along, given)) is not None:
            return look(found, lambda a: np.moveaxis(a, along, first)).copy()
    indices = {k: _indices_in_bounds(entry, whole.shape[k]) for k, entry in chosen.items()}
    anywhere = all(isinstance(entry, TracedArray) for entry in chosen.values())
    out = look_up_elements(whole, indices, first, anywhere)
    return out if any(e is ... for e in given_entries) else scalar_if_point(out)


def _join_slices(x: TracedArray, axis: int, index: Any) -> TracedArray | None:
    """Elements at known indices along an axis, joined from a few slices; None for other indices.

    An index out of bounds raises IndexError, as in NumPy.
    """
    if isinstance(index, TracedArray) or np.ndim(index) != 1 or not x.shape[axis]:
        return None
    known = np.asarray(index)
    if not known.size or known.dtype.kind not in "iu":
        return None
    from_start = np.where(known < 0, known + x.shape[axis], known)
    slices = index_lists.slices_of(from_start, index_lists.FEW_SLICES)
    if slices is None or min(s.start for s in slices) < 0:
        return None
    return index_lists.join_arrays(index_lists.parts_of(x, axis, slices), axis)  # type: ignore[no-any-return]


def _expand_index(x: TracedArray, entries: Sequence[Any]) -> Iterator[Any]:
    """The entries of an index with an entry for each axis: its Ellipsis becomes full slices."""
    count = sum(1 for e in entries if e is not None and e is not ...)
    if count > x.ndim:
        raise IndexError(f"too many indices for an array of {x.ndim} dimensions")
    rest = [slice(None)] * (x.ndim - count)
    open_ended = not any(e is ... for e in entries)
    for entry in (*entries, ...) if open_ended else entries:
        if entry is ...:
            yield from rest
            rest = []
        else:
            yield entry


def look_up_elements(
    x: TracedArray, chosen: Mapping[int, TracedArray], first: int, anywhere: bool = True
) -> TracedArray:
    """Elements of an array at indices along the axes in `chosen`.

    The axes of the indices replace these axes, from axis `first` of the result on. With `anywhere`,
    the indices are in bounds whatever they are computed from.
    """
    over = np.broadcast_shapes(*[n.shape for n in chosen.values()])
    rest = [k for k in range(x.ndim) if k not in chosen]
    kept = [x.shape[k] for k in rest]
    shape = (*kept[:first], *over, *kept[first:])
    if 0 in shape or 0 in x.shape:
        if 0 not in shape:
            raise IndexError(f"an index is out of bounds for an array of shape {x.shape}")
        return TracedArray(constant(0, x.dtype), shape)
    x = _store_if_reused(x, math.prod(shape))
    behind = (1,) * (len(kept) - first)
    indices = {}
    for k, index in chosen.items():
        spread = broadcast(look(index, lambda a: a.reshape(a.shape + behind)), shape)
        indices[k] = cast_to(spread._expr, np.int64)

    def fixed_view(view: View) -> View:
        own = [view.strides[k] for k in rest]
        return View(view.offset, (*own[:first], *(0,) * len(over), *own[first:]))

    def offset_of(view: View) -> Expr | None:
        steps = [
            _times(indices[k], view.strides[k])
            for k in chosen
            if view.strides[k] and x.shape[k] > 1
        ]
        return functools.reduce(functools.partial(apply, np.add), steps) if steps else None

    return elements_at(x, shape, fixed_view, offset_of, anywhere and x._expr.op == "input")


METHODS["index"] = _index_with_arrays


@implements("take")
def _take(
    a: Any, indices: Any, axis: Any = None, out: Any = None, mode: str = "raise"
) -> TracedArray:
    no_out(out)
    x = as_traced(a)
    x, axis = (x.ravel(), 0) if axis is None else (x, normalize_axis_index(axis, x.ndim))
    if isinstance(indices, int | np.integer) and mode == "raise":
        return x[(*(slice(None),) * axis, indices)]
    on_gpus("it takes elements by index")
    length = x.shape[axis]
    if mode == "clip":
        known = indices if isinstance(indices, TracedArray) else constant_array(np.asarray(indices))
        indices = clip_array(known.astype(np.int64), np.int64(0), np.int64(length - 1))
    elif mode == "wrap" and not isinstance(indices, TracedArray):
        indices = np.asarray(indices) % max(length, 1)
    elif mode not in ("raise", "wrap"):
        raise ValueError(f"clipmode must be one of 'clip', 'raise', or 'wrap' (got {mode!r})")
    indices = _indices_in_bounds(indices, length)
    out = look_up_elements(x, {axis: indices}, axis, isinstance(indices, TracedArray))
    return out if out.ndim else scalar_if_point(out)


@implements("take_along_axis")
def _take_along_axis(arr: Any, indices: Any, axis: Any = -1) -> TracedArray:
    on_gpus("it takes elements by index")
    x = as_traced(arr)
    if axis is None:
        x, axis = x.ravel(), 0
    axis = normalize_axis_index(axis, x.ndim)
    if np.ndim(indices) != x.ndim:
        raise ValueError("`indices` and `arr` must have the same number of dimensions")
    indices = _indices_in_bounds(indices, x.shape[axis])
    over = list(
        np.broadcast_shapes(indices.shape, [n if k != axis else 1 for k, n in enumerate(x.shape)])
    )
    chosen = {
        k: indices if k == axis else _positions_along(k, n, x.ndim) for k, n in enumerate(x.shape)
    }
    if any(
        n != m and n != 1 for k, (n, m) in enumerate(zip(x.shape, over, strict=True)) if k != axis
    ):
        raise IndexError("shape mismatch: indexing arrays could not be broadcast together")
    return look_up_elements(x, chosen, 0, isinstance(indices, TracedArray))


def _positions_along(axis: int, length: int, ndim: int) -> TracedArray:
    """The positions along one axis."""
    shape = tuple([length if k == axis else 1 for k in range(ndim)])
    return TracedArray(axis_index(shape, axis), shape)


@implements("choose")
def _choose(a: Any, choices: Any, out: Any = None, mode: str = "raise") -> Any:
    no_out(out)
    if isinstance(choices, TracedArray):
        choices = [choices[k] for k in range(len(choices))]
    dtype = np.result_type(*[c.dtype if isinstance(c, TracedArray) else c for c in choices])
    index, parts = as_traced(a), [as_traced(c) for c in choices]
    if index.dtype.kind not in "iub":
        raise TypeError(f"choose: the index array has dtype {index.dtype}: use an integer dtype")
    last = len(parts) - 1
    if mode == "raise":
        least, most = integer_bounds(index._expr)
        if least < 0 or most > last:
            raise refuse("an index of choose may be out of bounds: pass mode='clip' or mode='wrap'")
    elif mode == "wrap":
        index = _wrap_index(index, last + 1)
    elif mode != "clip":
        raise ValueError(f"clipmode must be one of 'clip', 'raise', or 'wrap' (got {mode!r})")
    made = [p.astype(dtype) for p in parts]
    found = made[last]
    for k in range(last - 1, -1, -1):
        found = choose_elements(
            np.less_equal(index, k) if k == 0 else np.equal(index, k), made[k], found
        )
    return found


def integer_bounds(root: Expr) -> tuple[float, float]:
    """The least and the greatest value that an integer expression can have."""
    known: dict[int, tuple[float, float]] = {}
    for node in nodes((root,)):
        known[id(node)] = _bounds_of(node, known) if node.dtype.kind in "iub" else ANY_NUMBER
    return known[id(root)]


def _bounds_of(node: Expr, known: Mapping[int, tuple[float, float]]) -> tuple[float, float]:
    """The bounds of one node, given the bounds of its arguments."""
    if node.dtype.kind == "b":
        return 0, 1
    if node.op == "constant":
        return int(node.value), int(node.value)
    if node.op == "bin":
        return 0, len(node.data)
    ends = [known[id(a)] for a in node.args]
    info = np.iinfo(node.dtype)
    least, most = int(info.min), int(info.max)
    if node.op == "remainder" and ends[1][0] == ends[1][1] > 0:
        return 0, ends[1][0] - 1
    if node.op == "bitwise_and":
        positive = [e[1] for e in ends if e[0] >= 0]
        return (0, min(positive)) if positive else (least, most)
    if node.op == "cast" and ends[0][0] >= least and ends[0][1] <= most:
        return ends[0]
    if node.op in ("minimum", "maximum"):
        pick = min if node.op == "minimum" else max
        return pick(e[0] for e in ends), pick(e[1] for e in ends)
    if node.op == "where":
        condition, _, other = node.args
        if condition.op in ("less", "greater") and other is condition.args[0]:
            low, high = known[id(condition.args[1])]  # as the bounds of what is clipped
            below = condition.op == "less"
            ends[2] = (
                (max(ends[2][0], low), ends[2][1]) if below else (ends[2][0], min(ends[2][1], high))
            )
        return min(e[0] for e in ends[1:]), max(e[1] for e in ends[1:])
    if node.op in ("add", "subtract"):
        (a, b), (c, d) = ends
        low, high = (a + c, b + d) if node.op == "add" else (a - d, b - c)
        if least <= low and high <= most:
            return low, high
    return least, most
