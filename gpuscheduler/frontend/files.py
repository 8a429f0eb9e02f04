"""Blocks that are read from files, and arrays that blocks are stored in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from dask._task_spec import Alias, DataNode, GraphNode, Task, TaskRef
from dask.array.core import load_store_chunk
from dask.blockwise import Blockwise
from dask.highlevelgraph import Layer

from ..dask_private import execute_subgraph
from ..values import FILES
from .graph import SLICERS, Graph, Key


def uses_files(layer: Layer, layers: Mapping[str, Layer]) -> bool:
    """Whether a layer takes the blocks of an array out of a file, or puts them into something."""
    if not isinstance(layer, Blockwise):
        return False
    function = getattr(layer.task, "func", None)
    if function is load_store_chunk:
        return True
    if function not in SLICERS or not layer.indices:
        return False
    array: Any = layer.indices[0][0]
    if layer.indices[0][1] is not None:
        return False  # blocks of another array
    if isinstance(array, (TaskRef, Alias)):
        name: Any = array.key if isinstance(array, TaskRef) else array.target
        array = layers[name].get(name) if name in layers else None
    return is_in_file(array.value if isinstance(array, DataNode) else array)


def is_in_file(array: Any) -> bool:
    """Whether indexing it takes its time: it has the shape of an array, and is none in memory."""
    if isinstance(array, np.memmap):
        return True
    if isinstance(array, (np.ndarray, GraphNode)) or not hasattr(array, "shape"):
        return False
    return array_library(array) != "cupy"


def array_library(array: Any) -> str:
    return type(array).__module__.partition(".")[0]


def block_read(task: Any, constants: Mapping[Key, Any]) -> tuple[Any, Any]:
    """The array of which a task takes a block, and the index of that; None twice for others."""
    if type(task) is not Task or task.func not in SLICERS or len(task.args) < 2:
        return None, None
    return _argument(task, 0, constants), _argument(task, 1, constants)


def _argument(task: Any, n: int, constants: Mapping[Key, Any]) -> Any:
    """The n-th argument of a task, if it is a value of the graph."""
    value = task.args[n]
    if isinstance(value, (TaskRef, Alias)):
        value = constants.get(value.key if isinstance(value, TaskRef) else value.target)
    return value.value if isinstance(value, DataNode) else value


def may_be_same_store(source: Any, target: Any) -> bool:
    """Whether what is written to a target may change a source."""
    if type(source) is np.ndarray and isinstance(target, np.ndarray):
        return bool(np.may_share_memory(source, target))
    kinds = [array_library(a) for a in (source, target)]
    if set(kinds) == {"zarr"}:
        return bool(source.store_path == target.store_path)
    if set(kinds) == {"h5py"}:
        return bool(source == target)
    return not (kinds[0] in FILES and kinds[1] in {"numpy", *FILES} - {kinds[0]})


def stores_block(task: Any) -> bool:
    return type(task) is Task and task.func is load_store_chunk


def stores_last(task: Any) -> bool:
    """Whether a task, or the last of those that are fused in it, stores a block."""
    while type(task) is Task and task.func is execute_subgraph:
        inner, last, *_ = task.args
        task = inner.get(last)
    return stores_block(task)


def store_targets(task: Any, known: dict[int, list[Any]]) -> list[Any]:
    """The arrays that the tasks inside a fused task store to, as arguments of the fused task.

    `known` holds the answers for inner graphs, which alike blocks share.
    """
    if type(task) is not Task or task.func is not execute_subgraph:
        return []
    inner, _, names, *args = task.args
    found = known.get(id(inner))
    if found is None:
        every = [t.args[1] for t in inner.values() if stores_block(t)]
        for t in inner.values():
            every += store_targets(t, known)
        given = {k: t for k, t in inner.items() if isinstance(t, DataNode)}
        found = known[id(inner)] = [_put_argument(n, given) for n in every]
    given = dict(zip(names, args, strict=True)) if found else {}
    return [_put_argument(n, given) for n in found]


def _put_argument(argument: Any, given: Mapping[Key, Any]) -> Any:
    return given.get(argument.key, argument) if isinstance(argument, TaskRef) else argument


def target_name(task: Any) -> Key | None:
    """The name of a storing task's target, and its place in the task; None for other tasks."""
    target = task.args[1] if stores_block(task) else None
    return target.key if isinstance(target, TaskRef) else None


def array_written(graph: Graph, key: Key) -> Any:
    """The CuPy array that a storing task writes to; None for other targets, or unknown ones."""
    nodes, node = graph.nodes, graph.nodes[key]
    reads = [(n, nodes[k].task) for n, k in zip(node.names, node.needs, strict=True) if k in nodes]
    given = {n: task.value for n, task in reads if isinstance(task, DataNode)}
    target = _argument(node.task, 1, {**given, **node.constants})
    return target if array_library(target) == "cupy" else None
