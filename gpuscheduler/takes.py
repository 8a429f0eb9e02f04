"""Index lists as a few slices: of `x[::3]`, of a month of each year, of a list in descending order,
whatever wrote them as numbers. Slices need no copy and can be part of a kernel, and what they give
is known before it is there. Of other lists tasks are given the numbers themselves, as arrays beside
their blocks, with which kernels of GPUs read just these elements.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import numpy as np
from dask._task_spec import DataNode, Task, TaskRef
from dask._task_spec import _execute_subgraph as execute_subgraph
from dask.array._shuffle import _getitem as take_block
from dask.array._shuffle import concatenate_arrays
from dask.array.dispatch import concatenate_lookup

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
    """Parts of an array along an axis, one after the other."""
    return joined([x[(slice(None),) * axis + (s,)] for s in slices], axis)


def picked(x: Any, axis: int, numbers: Any) -> Any:
    """Elements of an array along an axis, by their numbers."""
    return x[(*(slice(None),) * axis, numbers)]


def reordered(arrays: list[Any], axis: int, numbers: Any) -> Any:
    """Elements along an axis of arrays that lie one after the other."""
    return picked(joined(arrays, axis), axis, numbers)


def joined(arrays: list[Any], axis: int, slices: tuple[slice, ...] | None = None) -> Any:
    """Arrays one after the other; parts of the whole in another order."""
    whole = arrays[0]
    if len(arrays) > 1:
        whole = concatenate_lookup.dispatch(type(whole))(arrays, axis=axis)
    return whole if slices is None else taken(whole, axis, slices)


def by_slices(dsk: dict[Any, Any], gpus: bool = False) -> None:
    """Tasks that take elements by their numbers take slices, where these are few. Changes the
    graph; lists that nobody reads any more are left in it."""
    most = FEW_SLICES if gpus else MOST_SLICES
    lists = {key: node.value[1] for key, node in dsk.items() if _is_list(node)}
    if not lists:
        return
    for key, task in dsk.items():
        if type(task) is Task and not lists.keys().isdisjoint(task.dependencies):
            change = _fused if task.func is execute_subgraph else _one
            dsk[key] = change(task, lists, most)


def _is_list(node: Any) -> bool:
    """As `dask.array._shuffle` has it: a 1, and an array, or slices with an array among them."""
    value = node.value if type(node) is DataNode else None
    if type(value) is not tuple or len(value) != 2 or value[0] != 1:
        return False
    words = value[1] if type(value[1]) is tuple else (value[1],)
    lists = [w for w in words if not isinstance(w, slice)]
    return len(lists) == 1 and type(lists[0]) is np.ndarray and lists[0].dtype.kind in "iu"


def _one(task: Task, lists: dict[Any, Any], most: int) -> Task:
    """The same, without the list if it can be."""
    words = lists.get(getattr(task.args[1], "key", None)) if len(task.args) > 1 else None
    if task.func is take_block and type(words) is tuple:
        (axis,) = [k for k, w in enumerate(words) if not isinstance(w, slice)]
        slices = slices_of(words[axis], most)
        if slices is None:
            return Task(task.key, picked, task.args[0], axis, _small(words[axis]))
        if len(slices) == 1:
            part = (*words[:axis], slices[0], *words[axis + 1 :])
            return Task(task.key, operator.getitem, task.args[0], part)
        return Task(task.key, taken, task.args[0], axis, slices)
    if task.func is concatenate_arrays and type(words) is np.ndarray:
        order = np.argsort(words)
        slices = slices_of(order, most)
        if slices is None:
            return Task(task.key, reordered, task.args[0], task.args[2], _small(order))
        in_order = slices == (slice(0, len(words), 1),)
        return Task(task.key, joined, task.args[0], task.args[2], None if in_order else slices)
    return task


def _small(numbers: Any) -> Any:
    """As int32 where that is enough: they are sent to the devices."""
    return numbers.astype(np.int32 if numbers.max(initial=0) < 2**31 else np.int64)


def _fused(task: Task, lists: dict[Any, Any], most: int) -> Task:
    """The same of a task that Dask has fused."""
    inner, outkey, inkeys, *given = task.args
    known = {
        name: lists[d.key]
        for name, d in zip(inkeys, given, strict=True)
        if type(d) is TaskRef and d.key in lists
    }
    changed = {k: _one(t, known, most) if type(t) is Task else t for k, t in inner.items()}
    if all(changed[k] is t for k, t in inner.items()):
        return task
    left = {d for t in changed.values() for d in t.dependencies}
    pairs = [(k, v) for k, v in zip(inkeys, given, strict=True) if k not in known or k in left]
    names = [k for k, _ in pairs]
    return Task(task.key, execute_subgraph, changed, outkey, names, *[v for _, v in pairs])
