"""Estimate shapes and sizes of blocks that Dask does not say, from the blocks around them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from numbers import Integral
from typing import Any

import numpy as np
from dask._task_spec import Alias, DataNode, NestedContainer, Task, TaskRef
from dask.highlevelgraph import Layer

from ..dask_private import execute_subgraph
from ..values import sizeof
from . import linalg_shapes
from .files import stores_block
from .graph import SLICERS, BlockInfo, Key, Value

#: What Dask's reductions make between their steps, of which it says that it were one array, or one
#: element of it: how many such that is, given their keywords. 0: nobody knows.
BETWEEN: dict[str, Callable[[dict[str, Any]], int]] = {
    "mean_chunk": lambda _: 2, "mean_combine": lambda _: 2, "arg_chunk": lambda _: 2,
    "arg_combine": lambda _: 2, "_bincount_agg": lambda _: 0,
    "moment_chunk": lambda given: given.get("order", 2) + 1,
    "moment_combine": lambda given: given.get("order", 2) + 1,
    "topk": lambda given: abs(given["k"]), "topk_aggregate": lambda given: abs(given["k"]),
    "argtopk": lambda given: 2 * abs(given["k"]),
    "argtopk_aggregate": lambda given: abs(given["k"]),
}  # fmt: skip


def block_sizes(values: Mapping[Key, Any], tasks: Mapping[Key, Any]) -> dict[Key, int]:
    """Bytes of each value, as the collections say.

    How many a sparse block has, only the run shows.
    """
    out, times = {}, {}
    for key, value in values.items():
        if isinstance(value, BlockInfo) and value.is_sparse:
            continue
        nbytes = sum([b.nbytes for b in value]) if isinstance(value, tuple) else value.nbytes
        name = key[0] if type(key) is tuple and key else key
        if name not in times:
            times[name] = _repeats_between(tasks.get(key))
        if times[name]:
            out[key] = nbytes * times[name]
    return out


def _repeats_between(task: Any) -> int:
    """How many times what Dask says of it a task makes.

    >>> from dask.array.chunk import topk
    >>> _repeats_between(Task("x", partial(topk, k=-5), 0)), _repeats_between(Task("x", abs, 0))
    (5, 1)
    """
    task = _last_task(task)
    if not isinstance(task, Task):
        return 1
    function: Any = task.func
    if type(function).__name__ == "Compose" and hasattr(function, "funcs"):
        function = function.funcs[-1]  # which is called last
    given = dict(task.kwargs)
    while isinstance(function, partial):
        function, given = function.func, {**function.keywords, **given}
    library, name = linalg_shapes.name_of(function)
    return BETWEEN[name](given) if library == "dask" and name in BETWEEN else 1


def _last_task(task: Any) -> Any:
    """The last of the tasks that Dask has fused; any other as it is."""
    if isinstance(task, Task) and task.func is execute_subgraph:
        return task.args[0].get(task.args[1])
    return task


def stored_bytes(task: Any) -> int | None:
    """Bytes of what a task which stores a block gives back: `None`, unless it reads it again."""
    if not stores_block(task):
        return None
    load, given = (
        v.value if isinstance(v, DataNode) else v
        for v in (task.kwargs.get("load_stored"), task.kwargs.get("return_stored"))
    )
    return None if load and given else sizeof(None)


def collection_block(layer: Layer | None, block: tuple[Any, ...]) -> BlockInfo | None:
    """A block that its layer reduces is one line thick."""
    facts = layer.collection_annotations if layer is not None else None
    if not facts or facts.get("dtype") is None:
        return None
    chunks = facts.get("chunks")
    if chunks is None or len(chunks) != len(block):
        return None
    reduced = _reduced_axes(layer)
    try:
        shape = tuple(
            1 if axis in reduced else int(lengths[i])
            for axis, (lengths, i) in enumerate(zip(chunks, block, strict=True))
        )
    except (ValueError, TypeError, IndexError, OverflowError):  # NaN, or not a block index
        return None
    return BlockInfo(shape, np.dtype(facts["dtype"]), facts.get("chunk_type"))


def block_shape(layers: Mapping[str, Layer], key: Any) -> tuple[int, ...] | None:
    """The shape of a block, by its key, as its collection has it."""
    if type(key) is not tuple:
        return None
    block = collection_block(layers.get(key[0]), key[1:])
    return None if block is None else block.shape


def selects_by_value(task: Any) -> bool:
    """Whether a task indexes one value with another: how much that leaves, only the run shows."""
    task = _last_task(task)
    if not isinstance(task, Task) or len(task.args) < 2:
        return False
    function = task.kwargs.get("enforce_dtype_function", task.func)  # as x[mask] comes
    return function in SLICERS and isinstance(task.args[1], (TaskRef, Alias))


def _sliced_shape(shape: tuple[int, ...], index: Any) -> tuple[int, ...] | None:
    """The shape of a slice; None for any index that is not slices and integers.

    >>> _sliced_shape((10, 20), (slice(0, 3), slice(None, None, 2))), _sliced_shape((10, 20), (4,))
    ((3, 10), (20,))
    """
    if isinstance(index, NestedContainer):
        index = tuple(index.args)
    index = index if isinstance(index, tuple) else (index,)
    if len(index) > len(shape):
        return None
    out = []
    for length, i in zip(shape, index, strict=False):
        if isinstance(i, slice):
            out.append(len(range(*i.indices(length))))
        elif not isinstance(i, Integral) or isinstance(i, bool):
            return None
    return (*out, *shape[len(index) :])


def holds_tasks(arguments: Iterable[Any]) -> bool:
    """Whether there are tasks among arguments, and not only names of some."""
    return any(
        holds_tasks(a.args) if isinstance(a, NestedContainer) else isinstance(a, Task)
        for a in arguments
    )


def indexed_value(whole: Value, index: Any) -> Value:
    """What is known of a part of a value."""
    if isinstance(whole, tuple):
        part = isinstance(index, int) and -len(whole) <= index < len(whole)
        return whole[index] if part else None
    shape = None if whole is None else _sliced_shape(whole.shape, index)
    return None if whole is None or shape is None else replace(whole, shape=shape)


def linalg_value(function: tuple[str, str], read: list[Value]) -> Value:
    """What is known of what a function of `factors` makes of these."""
    blocks = [b for b in read if isinstance(b, BlockInfo)]
    if len(blocks) < len(read):
        return None
    made = linalg_shapes.result_shapes(
        function, [linalg_shapes.Array(b.shape, b.dtype) for b in blocks]
    )
    if made is None or isinstance(made, linalg_shapes.Array):
        return None if made is None else BlockInfo(*made, blocks[0].kind)
    return tuple([BlockInfo(*a, blocks[0].kind) for a in made])


def _reduced_axes(layer: Any) -> tuple[int, ...]:
    """Dask annotates the partial results of a reduction with the chunks of what was reduced."""
    task = getattr(layer, "task", None)
    if not isinstance(task, Task) or not task.kwargs.get("keepdims"):
        return ()
    axis = task.kwargs.get("axis", ())
    axis = axis.value if isinstance(axis, DataNode) else axis
    if isinstance(axis, NestedContainer):
        axis = tuple(axis.args)
    return tuple(axis) if isinstance(axis, (tuple, list)) else (axis,)


def known_chunks(layer: Layer | None) -> tuple[tuple[int, ...], ...] | None:
    """The chunks of a layer's array; None where Dask does not know all of them."""
    facts = layer.collection_annotations if layer is not None else None
    chunks = facts.get("chunks") if facts else None
    if chunks is None or any(math.isnan(c) for axis in chunks for c in axis):
        return None
    return tuple(tuple(int(c) for c in axis) for axis in chunks)
