"""Index lists as a few slices, where they are regular.

Examples are `x[::3]`, one month of each year, or a descending list, written as numbers. A kernel
reads slices in place, and the shape of their result is known before the run. Other lists go to the
tasks as arrays beside their blocks; GPU kernels then read only the listed elements.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from dask._task_spec import DataNode, Task, TaskRef
from dask.array.chunk import getitem
from dask.array.dispatch import concatenate_lookup

from ..dask_private import concatenate_arrays, execute_subgraph, take_block
from .tiles import Tile

#: Slices of one list, at most: to copy so many parts is as fast as to look up each number ...
MOST_SLICES = 16
#: ... and in a kernel each is a case of its own.
FEW_SLICES = 3


def slices_of(indices: Any, most: int = MOST_SLICES) -> tuple[slice, ...] | None:
    """Return the slices that give these indices in order; None for more than `most` slices.

    >>> slices_of([4, 5, 6, 7, 30, 20, 10, 0, 2])
    (slice(4, 8, 1), slice(30, None, -10), slice(2, 3, 1))
    >>> slices_of(np.random.default_rng(0).permutation(100)) is None
    True
    """
    indices = np.asarray(indices, np.int64)
    steps = np.diff(indices)
    changes = np.flatnonzero(steps[1:] != steps[:-1]) + 1
    out: list[slice] = []
    begin = 0
    while begin < len(indices):
        if len(out) == most:
            return None
        first, last, step = int(indices[begin]), begin, 1
        if begin < len(steps) and steps[begin]:
            later = changes[np.searchsorted(changes, begin, side="right") :]
            step, last = int(steps[begin]), int(later[0]) if len(later) else len(steps)
        stop = int(indices[last]) + (1 if step > 0 else -1)
        out.append(slice(first, None if stop < 0 else stop, step))
        begin = last + 1
    return tuple(out)


def take_slices(x: Any, axis: int, slices: Iterable[slice]) -> Any:
    """Copy parts of an array along an axis, one after the other.

    It is a copy, as for any index list: the reader may write into it, and the array may be freed.
    """
    parts = parts_of(x, axis, slices)
    return join_arrays(parts, axis) if len(parts) > 1 else parts[0].copy()


def parts_of(x: Any, axis: int, slices: Iterable[slice]) -> list[Any]:
    """Return views of parts of an array along an axis.

    Raises IndexError for a part beyond the end, as an index list does: NumPy would cut the slice.
    """
    length = x.shape[axis]
    for s in slices:
        # with a negative step they may end before the first
        last = max(s.start, (-1 if s.stop is None else s.stop) - 1)
        if last >= length:
            raise IndexError(f"index {last} is out of bounds for axis {axis} with size {length}")
    return [x[(slice(None),) * axis + (s,)] for s in slices]


def pick_elements(x: Any, axis: int, indices: Any, length: int) -> Any:
    """Pick elements of an array along an axis by their indices, all less than `length`."""
    if x.shape[axis] < length:  # of these CuPy would take others, from the beginning
        raise IndexError(
            f"elements of {length} are taken along axis {axis} of a block that has "
            f"{x.shape[axis]}: its collection tells of another shape"
        )
    return x[(*(slice(None),) * axis, indices)]


def reorder_arrays(arrays: list[Any], axis: int, indices: Any) -> Any:
    """Join arrays along an axis, and put the elements of the whole into another order."""
    return pick_elements(join_arrays(arrays, axis), axis, indices, len(indices))


def join_arrays(arrays: list[Any], axis: int, slices: tuple[slice, ...] | None = None) -> Any:
    """Join arrays along an axis; with `slices`, join these parts of the whole instead."""
    whole = arrays[0]
    if len(arrays) > 1:
        whole = concatenate_lookup.dispatch(type(whole))(arrays, axis=axis)
    return whole if slices is None else join_arrays(parts_of(whole, axis, slices), axis)


@dataclass(frozen=True)
class _SharedIndexList:
    """An index list of Dask's, which several tasks read."""

    axis: int  # -1 for an order
    slices: tuple[slice, ...] | None
    indices: Any


#: Arrays that no code changes, since this package made them.
_OURS: WeakValueDictionary[int, Any] = WeakValueDictionary()


def is_ours(array: Any) -> bool:
    """Whether an array was registered by `keep_ours`: no code changes it."""
    return _OURS.get(id(array)) is array


def keep_ours(array: Any) -> None:
    """Register an array that no code changes, since this package made it."""
    _OURS[id(array)] = array


Shapes = Callable[[Any], "tuple[int, ...] | None"]


def replace_index_lists(dsk: dict[Any, Any], shape_of: Shapes, gpus: bool = False) -> None:
    """Replace index lists in tasks by slices, where a few slices are enough.

    Changes the graph; lists that no task reads any more stay in it. `shape_of` returns the known
    shape of a block by its key.
    """
    most = FEW_SLICES if gpus else MOST_SLICES
    lists = {
        k: found for k, node in dsk.items() if (found := _read_index_list(node, most)) is not None
    }
    if not lists:
        return
    for key, task in dsk.items():
        if type(task) is Task and not lists.keys().isdisjoint(task.dependencies):
            change = _rewrite_fused_task if task.func is execute_subgraph else _inline_indices
            dsk[key] = change(task, lists, shape_of)


def _read_index_list(node: Any, most: int) -> _SharedIndexList | None:
    """Return the index list in a task of `dask.array._shuffle`; None for other tasks.

    Dask's value is a pair: a number, and an array or a tuple of slices with one array.
    """
    value = node.value if type(node) is DataNode else None
    if type(value) is not tuple or len(value) != 2 or type(value[0]) is not int:
        return None
    words = value[1] if type(value[1]) is tuple else (value[1],)
    places = [k for k, w in enumerate(words) if type(w) is not slice or w != slice(None)]
    if len(places) != 1:
        return None
    (axis,) = places
    indices = words[axis]
    if type(indices) is not np.ndarray or indices.dtype.kind not in "iu" or indices.ndim != 1:
        return None
    order = type(value[1]) is not tuple
    indices = np.argsort(indices) if order else indices
    # they are sent to the devices
    small = np.int32 if indices.max(initial=0) < 2**31 else np.int64
    own = indices.astype(small)
    keep_ours(own)
    return _SharedIndexList(-1 if order else axis, slices_of(indices, most), own)


def _inline_indices(task: Task, lists: dict[Any, _SharedIndexList], shape_of: Shapes) -> Task:
    """Return a task that holds its indices itself, not the shared index array.

    Other tasks are returned unchanged.
    """
    found = lists.get(getattr(task.args[1], "key", None)) if len(task.args) > 1 else None
    if found is None:
        return task
    orders_parts = found.axis < 0  # the array says in which order parts are concatenated
    if orders_parts is not (task.func is concatenate_arrays):
        return task
    slices = found.slices  # None where the indices are no few slices
    if task.func is take_block:
        if slices:
            return Task(task.key, take_slices, task.args[0], found.axis, slices)
        shape = shape_of(getattr(task.args[0], "key", None))
        if shape is None or len(shape) <= found.axis:
            return task
        length, indices = shape[found.axis], found.indices
        if indices.min(initial=0) < 0 or indices.max(initial=-1) >= length:
            return task  # out of bounds: the original task raises NumPy's IndexError
        return Task(task.key, pick_elements, task.args[0], found.axis, indices, length)
    if task.func is concatenate_arrays:
        parts, axis = task.args[0], task.args[2]
        if slices is None:
            return Task(task.key, reorder_arrays, parts, axis, found.indices)
        in_order = slices == (slice(0, len(found.indices), 1),)
        return Task(task.key, join_arrays, parts, axis, None if in_order else slices)
    return task


def _rewrite_fused_task(task: Task, lists: dict[Any, _SharedIndexList], shape_of: Shapes) -> Task:
    """Do what `_inline_indices` does to the tasks inside a fused task of Dask's."""
    inner, outkey, inkeys, *given = task.args
    known = {
        name: lists[d.key]
        for name, d in zip(inkeys, given, strict=True)
        if type(d) is TaskRef and d.key in lists
    }
    changed = {
        k: _inline_indices(t, known, shape_of) if type(t) is Task else t for k, t in inner.items()
    }
    if all(changed[k] is t for k, t in inner.items()):
        return task
    left = {d for t in changed.values() for d in t.dependencies}
    pairs = [(k, v) for k, v in zip(inkeys, given, strict=True) if k not in known or k in left]
    names = [k for k, _ in pairs]
    return Task(task.key, execute_subgraph, changed, outkey, names, *[v for _, v in pairs])


def push_down_indexing(dsk: dict[Any, Any], pins: Container[Any] = ()) -> None:
    """Push indexing by lists and masks down into tiles of a mesh: only picked elements are made.

    Changes the graph; the whole tiles stay in it for other readers. Tiles whose keys are in `pins`
    are left as they are. The function of a tile decides, by its method `pick_elements`; see
    `mesh.MeshTile`.
    """
    takes = [t for t in dsk.values() if type(t) is Task and t.func is take_block]
    for take in takes:
        source, taker = take.args
        index = dsk.get(getattr(taker, "key", None))
        tile: Any = dsk.get(getattr(source, "key", None))
        if type(index) is not DataNode or type(tile) is not Task:
            continue
        # None stands for an axis of the result that the tile has not
        name, wanted = f"{source.key[0]}-{taker.key}", index.value[1]
        own = [i for i in wanted if i is not None]
        axes = [k for k, i in enumerate(own) if not isinstance(i, slice) or i != slice(None)]
        if len(axes) != 1 or np.ndim(own[axes[0]]) != 1:
            continue
        (axis,) = axes
        indices = np.asarray(own[axis], np.int64)
        parts: Any = None  # of the tile, from which elements are taken
        if tile.func in (getitem, operator.getitem):
            source, parts = tile.args
            if type(source) is not TaskRef or not all(isinstance(i, (slice, int)) for i in parts):
                continue
            tile = dsk.get(source.key)
            axis = [k for k, i in enumerate(parts) if isinstance(i, slice)][axis]
        place = tile.args[0] if hasattr(getattr(tile, "func", None), "pick_elements") else None
        if type(place) is not DataNode or source.key in pins:
            continue
        where: Tile = place.value
        if parts is not None:
            there = range(where.shape[axis])[parts[axis]]
            indices = there.start + there.step * indices
            parts = (*parts[:axis], slice(None), *parts[axis + 1 :])
        found = tile.func.pick_elements(axis, where.start[axis] + indices)
        if found is None:
            continue
        function, n, coordinates = found
        coordinates_key = f"coordinates-{name}", source.key[1 + axis]
        arrays = list(tile.args[1:])
        if coordinates is None:
            dsk[coordinates_key] = Task(
                coordinates_key, operator.getitem, arrays[n], DataNode(None, indices)
            )
            arrays[n] = TaskRef(coordinates_key)
        else:
            dsk[coordinates_key] = DataNode(coordinates_key, coordinates)
            arrays.insert(n, TaskRef(coordinates_key))
        shape = (*where.shape[:axis], len(indices), *where.shape[axis + 1 :])
        words = DataNode(None, Tile(where.start, shape)), *arrays
        steps = [] if parts is None else [parts]
        if len(own) < len(wanted):
            steps.append(tuple([None if i is None else slice(None) for i in wanted]))
        if not steps:
            dsk[take.key] = Task(take.key, function, *words)
            continue
        made = f"picked-{name}", *source.key[1:]
        dsk[made] = Task(made, function, *words)
        for n, step in enumerate(steps):
            last = n == len(steps) - 1
            key: Any = take.key if last else (f"part-{n}-{name}", *source.key[1:])
            dsk[key] = Task(key, operator.getitem, TaskRef(made), step)
            made = key
