"""Index lists as a few slices: of `x[::3]`, of a month of each year, of a list in descending order,
whatever wrote them as numbers. A kernel reads slices in place, and what they give is known before
it is there. Of other lists tasks are given the numbers themselves, as arrays beside their blocks,
with which kernels of GPUs read just these elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from dask._task_spec import DataNode, Task, TaskRef
from dask._task_spec import _execute_subgraph as execute_subgraph
from dask.array._shuffle import _getitem as take_block
from dask.array._shuffle import concatenate_arrays
from dask.array.dispatch import concatenate_lookup
from dask.array.slicing import setitem

#: Slices of one list, at most: to copy so many parts is as fast as to look up each number ...
MOST_SLICES = 16
#: ... and in a kernel each is a case of its own.
FEW_SLICES = 3


def slices_of(numbers: Any, most: int = MOST_SLICES) -> tuple[slice, ...] | None:
    """The slices that give these numbers one after the other, or None where there are more than
    `most`.

    >>> slices_of([4, 5, 6, 7, 30, 20, 10, 0, 2])
    (slice(4, 8, 1), slice(30, None, -10), slice(2, 3, 1))
    >>> slices_of(np.random.default_rng(0).permutation(100)) is None
    True
    """
    numbers = np.asarray(numbers, np.int64)
    steps = np.diff(numbers)
    changes = np.flatnonzero(steps[1:] != steps[:-1]) + 1
    out: list[slice] = []
    begin = 0
    while begin < len(numbers):
        if len(out) == most:
            return None
        first, last, step = int(numbers[begin]), begin, 1
        if begin < len(steps) and steps[begin]:
            later = changes[np.searchsorted(changes, begin, side="right") :]
            step, last = int(steps[begin]), int(later[0]) if len(later) else len(steps)
        stop = int(numbers[last]) + (1 if step > 0 else -1)
        out.append(slice(first, None if stop < 0 else stop, step))
        begin = last + 1
    return tuple(out)


def taken(x: Any, axis: int, slices: Iterable[slice]) -> Any:
    """Parts of an array along an axis, one after the other. A copy, as of any list: the reader may
    write into it, and the array may go."""
    parts = parts_of(x, axis, slices)
    return joined(parts, axis) if len(parts) > 1 else parts[0].copy()


def parts_of(x: Any, axis: int, slices: Iterable[slice]) -> list[Any]:
    """Views of parts; an error where a list would be one, where a slice would be shorter."""
    length = x.shape[axis]
    for s in slices:
        # with a negative step they may end before the first
        last = max(s.start, (-1 if s.stop is None else s.stop) - 1)
        if last >= length:
            raise IndexError(f"index {last} is out of bounds for axis {axis} with size {length}")
    return [x[(slice(None),) * axis + (s,)] for s in slices]


def picked(x: Any, axis: int, numbers: Any, length: int) -> Any:
    """Elements of an array along an axis, by their numbers, all of which are less than `length`."""
    if x.shape[axis] < length:  # of these CuPy would take others, from the beginning
        raise IndexError(
            f"elements of {length} are taken along axis {axis} of a block that has "
            f"{x.shape[axis]}: its collection tells of another shape"
        )
    return x[(*(slice(None),) * axis, numbers)]


def reordered(arrays: list[Any], axis: int, numbers: Any) -> Any:
    """All elements along an axis of arrays that lie one after the other, in another order."""
    return picked(joined(arrays, axis), axis, numbers, len(numbers))


def joined(arrays: list[Any], axis: int, slices: tuple[slice, ...] | None = None) -> Any:
    """Arrays one after the other; parts of the whole in another order."""
    whole = arrays[0]
    if len(arrays) > 1:
        whole = concatenate_lookup.dispatch(type(whole))(arrays, axis=axis)
    return whole if slices is None else joined(parts_of(whole, axis, slices), axis)


def set_elements(x: Any, v: Any, indices: list[Any]) -> Any:
    """Dask's `setitem`, also with indices that are no arrays of NumPy's.

    Indices of elements that are in other blocks come as the length of the block. Dask takes these
    out of NumPy's arrays only (dask/dask#11730), and CuPy wraps them round, to the first element.
    """
    inside: list[Any] = list(indices)
    for axis, (index, length) in enumerate(zip(indices, x.shape, strict=False)):
        kind = getattr(getattr(index, "dtype", None), "kind", "")
        if kind in ("i", "u") and getattr(index, "ndim", 0) == 1 and type(index) is not np.ndarray:
            inside[axis] = index[index < length]
    return setitem(x, v, inside)


@dataclass(frozen=True)
class _List:
    """What a list of Dask's is for the tasks that read it."""

    axis: int  # -1 for an order
    slices: tuple[slice, ...] | None
    numbers: Any


#: Arrays that were made here: nobody changes these.
_OURS: WeakValueDictionary[int, Any] = WeakValueDictionary()


def is_ours(array: Any) -> bool:
    """Whether it is a list of `by_slices`, or another array that was made here."""
    return _OURS.get(id(array)) is array


def keep_ours(array: Any) -> None:
    """Nobody changes this array: it was made here."""
    _OURS[id(array)] = array


Shapes = Callable[[Any], "tuple[int, ...] | None"]


def by_slices(dsk: dict[Any, Any], shape_of: Shapes, gpus: bool = False) -> None:
    """Tasks that take elements by their numbers take slices, where these are few. Changes the
    graph; lists that nobody reads any more are left in it. `shape_of` says what is known of a
    block."""
    most = FEW_SLICES if gpus else MOST_SLICES
    lists = {k: found for k, node in dsk.items() if (found := _list_of(node, most)) is not None}
    if not lists:
        return
    for key, task in dsk.items():
        if type(task) is Task and not lists.keys().isdisjoint(task.dependencies):
            change = _fused if task.func is execute_subgraph else _one
            dsk[key] = change(task, lists, shape_of)


def _list_of(node: Any, most: int) -> _List | None:
    """As `dask.array._shuffle` has it: a 1, and an array, or slices with an array among them."""
    value = node.value if type(node) is DataNode else None
    if type(value) is not tuple or len(value) != 2 or type(value[0]) is not int:
        return None
    words = value[1] if type(value[1]) is tuple else (value[1],)
    places = [k for k, w in enumerate(words) if type(w) is not slice or w != slice(None)]
    if len(places) != 1:
        return None
    (axis,) = places
    numbers = words[axis]
    if type(numbers) is not np.ndarray or numbers.dtype.kind not in "iu" or numbers.ndim != 1:
        return None
    order = type(value[1]) is not tuple
    numbers = np.argsort(numbers) if order else numbers
    # they are sent to the devices
    small = np.int32 if numbers.max(initial=0) < 2**31 else np.int64
    own = numbers.astype(small)
    keep_ours(own)
    return _List(-1 if order else axis, slices_of(numbers, most), own)


def _one(task: Task, lists: dict[Any, _List], shape_of: Shapes) -> Task:
    """The same, without the list."""
    found = lists.get(getattr(task.args[1], "key", None)) if len(task.args) > 1 else None
    if found is None or (found.axis < 0) is not (task.func is concatenate_arrays):
        return task
    slices = found.slices
    if task.func is take_block:
        if slices:
            return Task(task.key, taken, task.args[0], found.axis, slices)
        shape = shape_of(getattr(task.args[0], "key", None))
        if shape is None or len(shape) <= found.axis:
            return task
        length, numbers = shape[found.axis], found.numbers
        if numbers.min(initial=0) < 0 or numbers.max(initial=-1) >= length:
            return task  # it will be an error
        return Task(task.key, picked, task.args[0], found.axis, numbers, length)
    if task.func is concatenate_arrays:
        parts, axis = task.args[0], task.args[2]
        if slices is None:
            return Task(task.key, reordered, parts, axis, found.numbers)
        in_order = slices == (slice(0, len(found.numbers), 1),)
        return Task(task.key, joined, parts, axis, None if in_order else slices)
    return task


def _fused(task: Task, lists: dict[Any, _List], shape_of: Shapes) -> Task:
    """The same of a task that Dask has fused."""
    inner, outkey, inkeys, *given = task.args
    known = {
        name: lists[d.key]
        for name, d in zip(inkeys, given, strict=True)
        if type(d) is TaskRef and d.key in lists
    }
    changed = {k: _one(t, known, shape_of) if type(t) is Task else t for k, t in inner.items()}
    if all(changed[k] is t for k, t in inner.items()):
        return task
    left = {d for t in changed.values() for d in t.dependencies}
    pairs = [(k, v) for k, v in zip(inkeys, given, strict=True) if k not in known or k in left]
    names = [k for k, _ in pairs]
    return Task(task.key, execute_subgraph, changed, outkey, names, *[v for _, v in pairs])
