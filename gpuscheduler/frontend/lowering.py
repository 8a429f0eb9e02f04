"""Lower a Dask graph or expression to a `Graph` for the planner.

A `Graph` holds tasks, their inputs, their pins and the known sizes of their results. This file
optimises, culls, checks and orders; it places and runs nothing.

Array collections arrive with high-level layers that are not optimised yet. This file runs Dask's
own layer passes itself: `device=` annotations and fusion survive, and each layer is visited once.
Everything else (dicts, legacy tuples, delayed, bags, dataframes, expression arrays) comes through
Dask's own optimiser and the same low-level path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import copy
from functools import partial
from typing import Any

from dask import config
from dask._task_spec import Alias, DataNode, GraphNode, TaskRef, convert_legacy_graph
from dask.array.optimization import optimize as optimize_array
from dask.base import compute
from dask.blockwise import Blockwise, fuse_roots, optimize_blockwise
from dask.core import flatten
from dask.highlevelgraph import HighLevelGraph

from ..dask_private import (
    HLGExpr,
    HLGExprSequence,
    HLGFinalizeCompute,
    optimized_graph,
    sort_layers,
)
from ..errors import PlanError
from .block_ids import coarsen_block_ids
from .builder import GraphBuilder, GraphOrCache, holds_chunks
from .compiled_task import SubgraphCompiler
from .files import uses_files
from .graph import (
    APART,
    NOTHING,
    PIN,
    Callback,
    Compile,
    Graph,
    Key,
    LoweredCollection,
    is_pin_rule,
    read_pin,
)
from .index_lists import push_down_indexing, replace_index_lists
from .shapes import block_shape
from .task import OwnTask

Rewrite = Callable[[HighLevelGraph], HighLevelGraph]


def keep_layers(hlg: HighLevelGraph) -> HighLevelGraph:
    """Return the layers as they are."""
    return hlg


def from_dask(
    dsk: Any,
    keys: Any,
    cache: Mapping[Key, Any] | None = None,
    started: Callback | None = None,
    home: Callable[[Any], int | None] | None = None,
    front: int | None = None,
    held: Callable[[Key, Any], Any] | None = None,
    compiled: bool = True,
    send: bool = False,
    apart: Mapping[str, str] = NOTHING,
    resident: bool = False,
    keep: bool = False,
    rewrite: Rewrite = keep_layers,
) -> Graph:
    """The graph of `keys`, ordered.

    Parameters
    ----------
    dsk, keys
        Anything that Dask hands to a scheduler, and the wanted keys, perhaps in nested lists.
    cache
        Values for keys that `dsk` lacks.
    started
        Gets the dictionary before it is read and may change it: Dask's `start` callback.
    home
        Returns the device that holds a value of the graph; None for one that all devices can read.
    front
        The device for results that are one block.
    held
        Called with each reference to a value that exists elsewhere; returns what to put there.
    compiled
        Whether to compile tasks that Dask has fused. Otherwise they can be sent to other processes,
        where `compile_tasks` compiles them.
    send
        Whether arrays of the host are sent to devices by their own steps, ahead of their readers.
    apart
        Words by layer: layers with different words, or only one of which has a word, do not fuse.
    resident
        Whether GPUs compute NumPy's arrays: `send` then sends all arrays of the host.
    keep
        Whether `send` also sends outputs, for GPUs to keep them.
    rewrite
        May replace layers of arrays before they are fused. Not called where `started` is given.

    >>> g = from_dask({"a": 1, "b": (sum, ["a", "a"]), "c": (max, "b", 7)}, "c")
    >>> list(g.tasks), g.needs["c"], g.constants["b"]
    (['b', 'c'], ('b',), {'a': 1})
    """
    lowered = lower(dsk, keys, apart, rewrite if started is None else keep_layers)
    if started is not None:
        lowered.dsk = convert_legacy_graph(lowered.dsk, GraphOrCache(lowered.dsk, cache or {}))
        started(lowered.dsk)
    else:
        push_down_indexing(lowered.dsk, lowered.pins)  # callbacks see tasks as they are
        replace_index_lists(lowered.dsk, partial(block_shape, lowered.layers), send)
    if held is not None:
        _put_values(held, lowered.dsk)
    builder = GraphBuilder(lowered, keys, cache or {}, home, started is None, front)
    builder.gpus, builder.apart = send, apart
    builder.send = send and started is None  # callbacks expect to see tasks as they are
    builder.resident, builder.keep = resident, keep
    if not compiled:
        builder.compiler = _as_it_is
    return builder.graph()


def _put_values(held: Callable[[Key, Any], Any], dsk: dict[Key, Any]) -> None:
    """Replace references by values: futures, and aliases of keys that the graph does not have."""
    for key, task in dsk.items():
        future = isinstance(task, TaskRef) or getattr(task, "__dask_future__", False)
        if future or (type(task) is Alias and (task.target == key or task.target not in dsk)):
            value = held(key, task)
            if value is not None:
                dsk[key] = DataNode(key, value)


class _ReceivedGraph(BaseException):
    """Ends a computation before it begins."""


def received_by_scheduler(
    *collections: Any, by: Callable[..., Any] = compute, **options: Any
) -> Any:
    """The graph and keys that Dask hands to a scheduler; nothing is computed.

    `by` is the function that makes Dask call the scheduler.

    >>> import dask
    >>> received_by_scheduler(dask.delayed(len)("abc", dask_key_name="x"))[1]
    ['x']
    """

    def get(dsk: Any, keys: Any, **_: Any) -> None:
        raise _ReceivedGraph(dsk, keys)

    try:
        by(*collections, scheduler=get, **options)
    except _ReceivedGraph as got:
        return got.args
    raise PlanError("there is nothing to compute: none of these is a Dask collection")


def compile_tasks(graph: Graph) -> None:
    """Compile the fused tasks that `from_dask` left as they are. Changes the graph."""
    compiler: Compile = SubgraphCompiler()
    for key, task in graph.tasks.items():
        if isinstance(task, OwnTask):
            graph.replace(key, task.with_parts(*map(compiler, task.parts)))
        else:
            graph.replace(key, compiler(task))


def _as_it_is(task: GraphNode) -> Callable[[dict[Key, Any]], Any]:
    return task


# ---- from collections to one dictionary


def lower(
    dsk: Any, keys: Any, apart: Mapping[str, str] = NOTHING, rewrite: Rewrite = keep_layers
) -> LoweredCollection:
    """Optimise and materialise, keeping annotations and chunk sizes.

    Layers with different words in `apart`, or of which one has none, are not fused. `rewrite` may
    replace layers of arrays before.
    """
    if isinstance(dsk, HighLevelGraph):
        out = _from_layers(dsk)
    elif isinstance(dsk, Mapping):
        out = LoweredCollection(dict(dsk))
    elif isinstance(dsk, (HLGExprSequence, HLGExpr)):
        out = _from_hlg_expr(dsk, apart, rewrite)
    else:
        out = LoweredCollection(dict(dsk.__dask_graph__()))
        if hasattr(dsk, "__dask_annotations__"):
            pins = dsk.__dask_annotations__().get(PIN, {})
            out.pins = {k: read_pin(p, k) for k, p in pins.items()}
    return out


def _from_hlg_expr(expr: Any, apart: Mapping[str, str], rewrite: Rewrite) -> LoweredCollection:
    operands = expr.operands if isinstance(expr, HLGExprSequence) else [expr]
    out = LoweredCollection({})
    fusable = []
    for op in operands:
        optimizer = op.low_level_optimizer
        if optimizer is optimize_array:
            output_keys = list(flatten(op.__dask_keys__()))
            hlg = coarsen_block_ids(set_apart(spread_pins(rewrite(op.hlg)), apart))
            named = dict(hlg.layers)
            hlg = fuse_roots(optimize_blockwise(hlg, keys=output_keys), keys=output_keys)
            part = _from_layers(hlg.cull(set(output_keys)))
            # a fused layer has the name of its last array, whose own layer knew the chunks
            part.layers = {**part.layers, **named}
            fusable.append(config.get("optimization.fuse.active") is not False)
        else:
            part = _from_layers(optimized_graph(op))
            fusable.append(False)
        if isinstance(op, HLGFinalizeCompute):
            # made by compute() itself, under whatever annotations are active there
            for key in flatten(op.__dask_keys__()):
                part.pins.pop(key, None)
        out.dsk.update(part.dsk)
        out.pins.update(part.pins)
        out.layers.update(part.layers)
    out.fusable = bool(fusable) and all(fusable)
    return out


def _from_layers(hlg: HighLevelGraph) -> LoweredCollection:
    out = LoweredCollection({}, layers=dict(hlg.layers))
    for layer in hlg.layers.values():
        out.dsk.update(layer)
        if layer.annotations and PIN in layer.annotations:
            pin = layer.annotations[PIN]
            out.pins.update({k: read_pin(pin, k) for k in layer})
    return out


def lower_for_callbacks(dsk: Any) -> dict[Key, Any]:
    """The tasks by key that Dask's callbacks see of a collection."""
    tasks = lower(dsk, ()).dsk
    return dict(convert_legacy_graph(tasks, GraphOrCache(tasks, {})))


def spread_pins(hlg: HighLevelGraph) -> HighLevelGraph:
    """Give unpinned Blockwise layers the pin of the layers they would fuse with.

    Dask fuses two layers only where their annotations are equal, so a pin on one layer of a chain
    would cost the fusion of the whole chain. A layer between two different pins gets neither.
    """
    pinned = {
        name: layer.annotations[PIN]
        for name, layer in hlg.layers.items()
        if layer.annotations and PIN in layer.annotations
    }
    if not pinned:
        return hlg
    order = sort_layers(hlg)
    labels: dict[str, Any] = {
        name: pin if callable(pin) or is_pin_rule(pin) else read_pin(pin, name)
        for name, pin in pinned.items()
    }
    readers: dict[str, list[str]] = {name: [] for name in hlg.layers}
    for name in order:
        for d in hlg.dependencies[name]:
            readers[d].append(name)

    def common_label(neighbours: Iterable[str]) -> Any:
        found = [labels[n] for n in neighbours if n in labels]
        same = bool(found) and all(f is found[0] or f == found[0] for f in found)
        return found[0] if same else None

    for direction, neighbours in ((order, hlg.dependencies), (order[::-1], readers)):
        for name in direction:
            if name not in labels and isinstance(hlg.layers[name], Blockwise):
                pin = common_label(sorted(neighbours[name]))
                if pin is not None:
                    labels[name] = pin
    layers = dict(hlg.layers)
    for name, pin in labels.items():
        if name not in pinned:
            layers[name] = copy(layers[name])
            layers[name].annotations = {**(layers[name].annotations or {}), PIN: pin}
    return HighLevelGraph(layers, hlg.dependencies)


def set_apart(hlg: HighLevelGraph, asked: Mapping[str, str] = NOTHING) -> HighLevelGraph:
    """Keep Dask from fusing some layers with others: layers whose annotations differ it leaves.

    Persisted chunks could not be sent away inside the tasks that read them, and what reads a file
    or writes one could not do it while a device works. Those `asked` for are kept from others that
    are not asked for by the same word.
    """
    layers = dict(hlg.layers)
    words = {name: word for name, word in asked.items() if name in layers}
    for name, layer in layers.items():
        if holds_chunks(layer) or uses_files(layer, layers):
            words[name] = name
    if not words:
        return hlg
    for name, word in words.items():
        layers[name] = copy(layers[name])
        layers[name].annotations = {**(layers[name].annotations or {}), APART: word}
    return HighLevelGraph(layers, hlg.dependencies)
