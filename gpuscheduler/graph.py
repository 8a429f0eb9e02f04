"""A Dask graph or expression as the few facts that a planner needs: tasks, what they read, where
they are pinned, how large they are known to be. Optimises, culls, checks and orders; places and
runs nothing.

Array collections arrive with their high-level layers still unoptimised, so this module runs Dask's
own layer passes itself: `device=` annotations survive, fusion is kept, and each layer is looked at
once. Everything else (dicts, legacy tuples, delayed, bags, dataframes, expression arrays) comes
through Dask's own optimiser and the same low-level path.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Set
from copy import copy
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from itertools import accumulate, product
from numbers import Integral
from types import CellType, FunctionType, MappingProxyType
from typing import Any

import numpy as np
from dask import config
from dask._expr import HLGExpr, HLGFinalizeCompute, ProhibitReuse, _HLGExprSequence
from dask._task_spec import (
    Alias,
    DataNode,
    GraphNode,
    NestedContainer,
    Task,
    TaskRef,
    convert_legacy_graph,
    convert_legacy_task,
)
from dask._task_spec import _execute_subgraph as execute_subgraph
from dask.array.core import _concatenate2, concatenate_shaped, finalize, load_store_chunk
from dask.array.dispatch import to_cupy_dispatch, to_numpy_dispatch
from dask.array.optimization import GETTERS, _optimize_slices
from dask.array.optimization import optimize as optimize_array
from dask.array.random import _apply_random, _apply_random_func
from dask.base import compute
from dask.blockwise import Blockwise, fuse_roots, optimize_blockwise
from dask.core import flatten
from dask.highlevelgraph import HighLevelGraph, Layer, MaterializedLayer

from . import factors
from .block_numbers import fewer_places
from .grid import picked_first
from .persisted import Chunk
from .sizes import FILES, sizeof
from .subgraph import Chain, Compiler, literal, references
from .takes import by_slices

Key = Any
Callback = Callable[[dict[Key, Any]], None]
Compile = Callable[[Any], Callable[[dict[Key, Any]], Any]]

#: A cell, a function, a partial, a composition, a list, a dictionary or an array, and what it was
#: made of when it was looked at.
Variable = tuple[Any, tuple[Any, ...]]

NOTHING: Mapping[str, str] = MappingProxyType({})
PIN = "device"  # dask.annotate(device=k)
APART = "gpuscheduler-apart"  # on layers that Dask must not fuse with others
SLICERS = (*GETTERS, operator.getitem)
RANDOM = (_apply_random_func, _apply_random)
#: Dask's own functions that get lists and dictionaries and hand them to nobody who changes them.
FRESH = (*RANDOM, concatenate_shaped, _concatenate2)


def made_of(it: Any) -> tuple[Any, ...]:
    """What a variable around a function is, what a function does, what a partial gives to one, or
    what is in a container: all that somebody may change there.

    >>> def f(block, *, k=2):
    ...     return block * k
    >>> f.__kwdefaults__["k"] = 3
    >>> made_of(f)[2:]
    ('k', 3)
    """
    if type(it) is CellType:
        return (it.cell_contents,)
    if type(it) is FunctionType:
        given = it.__kwdefaults__ or {}
        return (it.__code__, it.__defaults__, *given, *given.values())
    if type(it) is list:
        return tuple(it)
    if type(it) is np.ndarray:
        return content(it)
    if type(it) is dict:
        return (*it, *it.values())
    if hasattr(it, "funcs"):  # toolz has put it together
        return (it.first, *it.funcs)
    return (it.func, *it.args, *it.keywords, *it.keywords.values())


def content(array: Any) -> tuple[bytes, ...]:
    """What an array holds, and as what it shows that: all that somebody may change in place.

    >>> a = np.arange(2)
    >>> before = content(a)
    >>> a.dtype = "f8"
    >>> content(a)[0] == before[0], content(a) == before
    (True, False)
    """
    return array.tobytes(), f"{array.dtype.str} {array.shape} {array.strides}".encode()


def same(around: Iterable[Variable]) -> bool:
    """Whether variables around functions, and these themselves, are what they were."""
    try:
        return all(_are(made_of(it), before) for it, before in around)
    except ValueError:  # a variable is no more
        return False


def _are(now: tuple[Any, ...], before: tuple[Any, ...]) -> bool:
    if len(now) != len(before):
        return False
    return all(map(operator.is_, now, before)) or all(map(_is, now, before))


def _is(a: Any, b: Any) -> bool:
    return a is b or (type(a) is bytes and a == b)


class PlanError(ValueError):
    """The graph cannot be planned: it reads what is not there, or asks for what cannot be."""


@dataclass(frozen=True, slots=True)
class Gather:
    """The `finalize` task of an array: blocks that become one array, outside any device."""

    key: Key
    blocks: Any  # nested lists of keys, as Dask's finalize gets them
    chunks: tuple[tuple[int, ...], ...] | None  # lengths per axis; None where they are not known
    to_host: bool  # the array is NumPy's: by its type, or by a last step `.to_backend("numpy")`
    #: It is by such a step. A type is what Dask has found out with arrays without elements: where
    #: that failed, it says NumPy's, whatever the blocks are.
    converted: bool = False
    #: ... and these boxes of blocks, each of one device, are put together there before, which takes
    #: less time than to bring each block by itself.
    together: tuple[tuple[slice, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Block:
    """What a collection says of one of its blocks."""

    shape: tuple[int, ...]
    dtype: Any
    kind: str | None = None  # the type of its arrays, "numpy.ndarray" or "cupy.ndarray"

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * int(self.dtype.itemsize)


#: What is known of a value: of an array, of several, or nothing.
Value = Block | tuple[Block, ...] | None


@dataclass(frozen=True, slots=True)
class Draw:
    """Where a block of random numbers lies in its array."""

    seed: Any  # of the array's first block, as Dask drew it
    shape: tuple[int, ...]  # of the whole array
    start: tuple[int, ...]  # of the block


@dataclass(slots=True, repr=False)
class Graph:
    """Tasks in execution order, each after everything that it reads."""

    tasks: dict[Key, Callable[[dict[Key, Any]], Any]]
    needs: dict[Key, tuple[Key, ...]]  # tasks that a task reads, by their own keys
    names: dict[Key, tuple[Key, ...]]  # ... and under the keys by which it knows them
    constants: dict[Key, dict[Key, Any]]  # task -> values from the graph that it reads as they are
    wanted: tuple[Key, ...]  # the keys that the caller asked for
    outputs: tuple[Key, ...]  # tasks and values that they come from
    data: dict[Key, Any] = field(default_factory=dict)  # outputs that are values of the graph
    alias: dict[Key, Key] = field(default_factory=dict)
    pins: dict[Key, int] = field(default_factory=dict)
    sizes: dict[Key, int] = field(default_factory=dict)  # bytes, where the collection knows them
    gathers: dict[Key, Gather] = field(default_factory=dict)
    blocks: dict[Key, Block] = field(default_factory=dict)  # where the collection tells
    #: By layer, bytes of the largest value in its first task, of those that Dask has fused there.
    within: dict[str, int] = field(default_factory=dict)
    draws: dict[Key, Draw] = field(default_factory=dict)  # by the key of the random task itself
    #: For what a task reads, where that is one of several values made together: which of them, and
    #: which of its parts where that, too, was made of several.
    picks: dict[Key, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    #: Outputs that are made with others, in one task: that task, and where in its value they are.
    parts: dict[Key, tuple[Key, tuple[int, ...]]] = field(default_factory=dict)
    aside: set[Key] = field(default_factory=set)  # tasks that read a file or write one
    stores: list[Key] = field(default_factory=list)  # tasks that do nothing but store a block
    #: Tasks that store a block and run on their devices, as others do: to arrays there, or where
    #: Dask has fused that with other tasks.
    written: set[Key] = field(default_factory=set)
    lent: set[Key] = field(default_factory=set)  # of these, those that give back such an array
    again: set[Key] = field(default_factory=set)  # ... and those that may read it twice
    #: Of these, those whose arrays go to their device at once. Arrays of the host count as files.
    sent: set[Key] = field(default_factory=set)
    why: dict[Key, str] = field(default_factory=dict)  # why a task is no program
    operations: dict[Key, int] = field(default_factory=dict)  # of those that multiply matrices
    products: dict[Key, Any] = field(default_factory=dict)  # ... of two: a `fuse.MatrixProduct`
    globals: list[Any] = field(default_factory=list)  # what its functions read elsewhere
    #: Its functions and the variables around them, beside those, and what they were.
    around: tuple[Variable, ...] = ()
    beside: set[Key] = field(default_factory=set)  # arrays of these that became inputs
    #: Arrays in its tasks whose values decide what these do, and what they were.
    values: dict[int, tuple[Any, tuple[bytes, ...]]] = field(default_factory=dict)  # by their ids
    #: Lists and dictionaries in its tasks, what they said, and what that knows by its identity.
    containers: dict[int, tuple[Any, Any, list[Any]]] = field(default_factory=dict)  # by their ids
    gpus: bool = False  # whether it is for GPUs
    #: What the caller calls a wanted key, where the graph was made for others like it.
    called: dict[Key, Key] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<Graph of {len(self.tasks):,} tasks for {len(self.wanted):,} keys>"

    def changed(self) -> bool:
        """Whether something that its functions have read elsewhere, or an array in its tasks that
        they have looked into, or a list or a dictionary there, is not what it was."""
        if any(where.get(name) is not value for where, name, value in self.globals):
            return True
        if not same(self.around):
            return True
        if any(content(array) != before for array, before in self.values.values()):
            return True
        return any(literal(v, []) != words for v, words, _ in self.containers.values())

    def pin(self, places: Mapping[Key, int]) -> None:
        """Every task stays where it was placed."""
        tasks = self.tasks.items()
        self.pins.update({k: places[k] for k, task in tasks if not isinstance(task, DataNode)})

    def put_in_front(self, tasks: Mapping[Key, Any]) -> None:
        """Tasks that read nothing, before all others."""
        nothing: dict[Key, tuple[Key, ...]] = dict.fromkeys(tasks, ())
        self.tasks = {**tasks, **self.tasks}
        self.needs, self.names = {**nothing, **self.needs}, {**nothing, **self.names}

    def __getstate__(self) -> dict[str, Any]:
        """Plain tuples in place of objects, which pickle in a fraction of the time."""
        state = {f.name: getattr(self, f.name) for f in fields(self)}
        state["tasks"] = [(k, _row(t)) for k, t in self.tasks.items()]
        state["blocks"] = {k: (b.shape, b.dtype, b.kind) for k, b in self.blocks.items()}
        state["draws"] = {k: (d.seed, d.shape, d.start) for k, d in self.draws.items()}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        state["tasks"] = {k: _task(row) for k, row in state["tasks"]}
        state["blocks"] = {k: Block(*b) for k, b in state["blocks"].items()}
        state["draws"] = {k: Draw(*d) for k, d in state["draws"].items()}
        for name, value in state.items():
            setattr(self, name, value)


def _row(task: Any) -> tuple[Any, ...]:
    """A task as a tuple: its key, function and arguments, and which of these are references."""
    if type(task) is Task:
        args = task.args
        refs = tuple([n for n, a in enumerate(args) if isinstance(a, TaskRef)])
        plain = tuple([a.key if isinstance(a, TaskRef) else _named(a) for a in args])
        return task.key, task.func, plain, refs, task.kwargs, task.data_producer
    if type(task) is Chain:
        return tuple([(k, _row(t)) for k, t in task.tasks]), None
    return (task,)


def _named(argument: Any) -> Any:
    """The same argument with names in place of futures, which would take their client along."""
    if not isinstance(argument, NestedContainer):
        return argument
    if all(
        type(a) is TaskRef or not isinstance(a, (TaskRef, NestedContainer)) for a in argument.args
    ):
        return argument
    out = copy(argument)
    out.args = tuple([TaskRef(a.key) if isinstance(a, TaskRef) else _named(a) for a in out.args])
    return out


def _task(row: tuple[Any, ...]) -> Any:
    if len(row) == 1:
        return row[0]
    if len(row) == 2:
        return Chain([(k, _task(r)) for k, r in row[0]])
    key, function, args, refs, kwargs, produces = row
    if refs:
        given = list(args)
        for n in refs:
            given[n] = TaskRef(given[n])
        args = given
    return Task(key, function, *args, _data_producer=produces, **kwargs)


@dataclass(slots=True)
class Lowered:
    """A collection as one dictionary, with what its layers knew."""

    dsk: dict[Key, Any]
    pins: dict[Key, Any] = field(default_factory=dict)
    layers: dict[str, Layer] = field(default_factory=dict)  # by the name of the keys they make
    wholes: list[Mapping[Key, Any]] = field(default_factory=list)  # before blocks were culled
    fusable: bool = False  # linear chains may become one step


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
) -> Graph:
    """The graph of `keys`, ordered.

    `dsk` is anything that Dask hands to a scheduler; `cache` supplies values for keys it lacks.
    `started` sees the dictionary before it is read and may change it (Dask's `start` callback).
    `home` tells on which device a value in the graph lives; None means every device can read it.
    `front` is the device for results that are one block. `held` is asked, for each reference in
    the graph to a value that exists elsewhere, what stands for that value. Without `compiled` fused
    tasks stay as Dask made them, fit to be sent to other processes: `compile_tasks` compiles them.
    With `send` what tasks begin with, to bring an array of the host to the device, is taken from
    them: it is done beside the device, ahead of them. Layers that have different words in `apart`,
    or only one of which has any, are not fused.

    >>> g = from_dask({"a": 1, "b": (sum, ["a", "a"]), "c": (max, "b", 7)}, "c")
    >>> list(g.tasks), g.needs["c"], g.constants["b"]
    (['b', 'c'], ('b',), {'a': 1})
    """
    lowered = lower(dsk, keys, apart)
    if started is not None:
        lowered.dsk = convert_legacy_graph(lowered.dsk, _Either(lowered.dsk, cache or {}))
        started(lowered.dsk)
    else:
        picked_first(lowered.dsk, lowered.pins)  # callbacks see tasks as they are
        by_slices(lowered.dsk, partial(_shape_of, lowered.layers), send)
    if held is not None:
        _put_in(held, lowered.dsk)
    builder = _Builder(lowered, keys, cache or {}, home, started is None, front)
    builder.gpus, builder.apart = send, apart
    builder.send = send and started is None  # callbacks expect to see tasks as they are
    if not compiled:
        builder.compiler = _as_it_is
    return builder.graph()


def _put_in(held: Callable[[Key, Any], Any], dsk: dict[Key, Any]) -> None:
    """Values in place of references to them: futures, and aliases of what the graph has not."""
    for key, task in dsk.items():
        future = isinstance(task, TaskRef) or getattr(task, "__dask_future__", False)
        if future or (type(task) is Alias and (task.target == key or task.target not in dsk)):
            value = held(key, task)
            if value is not None:
                dsk[key] = DataNode(key, value)


class _Received(BaseException):
    """Ends a computation before it begins."""


def received(*collections: Any, by: Callable[..., Any] = compute, **options: Any) -> Any:
    """What Dask hands to a scheduler, a graph and its keys, when these are computed. Nothing is.

    `by` is Dask's function that asks the scheduler.

    >>> import dask
    >>> received(dask.delayed(len)("abc", dask_key_name="x"))[1]
    ['x']
    """

    def get(dsk: Any, keys: Any, **_: Any) -> None:
        raise _Received(dsk, keys)

    try:
        by(*collections, scheduler=get, **options)
    except _Received as got:
        return got.args
    raise PlanError("there is nothing to compute: none of these is a Dask collection")


def compile_tasks(tasks: dict[Key, Any]) -> None:
    """Compile fused tasks, where `from_dask` did not. Changes the dictionary."""
    compiler: Compile = Compiler()
    for key, task in tasks.items():
        if type(task) is Chain:
            tasks[key] = Chain([(k, compiler(t)) for k, t in task.tasks])
        else:
            tasks[key] = compiler(task)


def _as_it_is(task: GraphNode) -> Callable[[dict[Key, Any]], Any]:
    return task


def wanted_keys(keys: Any) -> tuple[Key, ...]:
    """The keys in a key, or in nested lists of keys.

    >>> wanted_keys(["a", [("b", 0)]]), wanted_keys(("b", 0))
    (('a', ('b', 0)), (('b', 0),))
    """
    return tuple(flatten(keys)) if isinstance(keys, list) else (keys,)


# ---- from collections to one dictionary


def lower(dsk: Any, keys: Any, apart: Mapping[str, str] = NOTHING) -> Lowered:
    """Optimise and materialise, keeping annotations and chunk sizes. Layers that have different
    words in `apart`, or only one of which has any, are not fused."""
    if isinstance(dsk, HighLevelGraph):
        out = _from_layers(dsk)
    elif isinstance(dsk, Mapping):
        out = Lowered(dict(dsk))
    elif isinstance(dsk, (_HLGExprSequence, HLGExpr)):
        out = _from_hlg_expr(dsk, apart)
    else:
        out = Lowered(dict(dsk.__dask_graph__()))
        if hasattr(dsk, "__dask_annotations__"):
            out.pins = dict(dsk.__dask_annotations__().get(PIN, {}))
    return out


def _from_hlg_expr(expr: Any, apart: Mapping[str, str]) -> Lowered:
    operands = expr.operands if isinstance(expr, _HLGExprSequence) else [expr]
    out = Lowered({})
    fusable = []
    for op in operands:
        optimizer = op.low_level_optimizer
        if optimizer is optimize_array:
            output_keys = list(flatten(op.__dask_keys__()))
            hlg = fewer_places(set_apart(spread_pins(op.hlg), apart))
            named = dict(hlg.layers)
            hlg = fuse_roots(optimize_blockwise(hlg, keys=output_keys), keys=output_keys)
            part = _from_layers(hlg.cull(set(output_keys)))
            # a fused layer has the name of its last array, whose own layer knew the chunks
            part.layers = {**part.layers, **named}
            whole = _without_facts(op.hlg)
            if split_draws(whole):
                split_draws(part.dsk)
                part.wholes.append(whole)
            fusable.append(config.get("optimization.fuse.active") is not False)
        else:
            part = _from_layers(op._optimized_dsk)
            if split_draws(part.dsk):
                whole = dict(op.hlg)
                split_draws(whole)
                part.wholes.append(whole)
            fusable.append(False)
        if isinstance(op, HLGFinalizeCompute):
            # made by compute() itself, under whatever annotations are active there
            for key in flatten(op.__dask_keys__()):
                part.pins.pop(key, None)
        out.dsk.update(part.dsk)
        out.pins.update(part.pins)
        out.layers.update(part.layers)
        out.wholes += part.wholes
    out.fusable = bool(fusable) and all(fusable)
    return out


def _from_layers(hlg: HighLevelGraph) -> Lowered:
    out = Lowered({}, layers=dict(hlg.layers))
    for layer in hlg.layers.values():
        out.dsk.update(layer)
        if layer.annotations and PIN in layer.annotations:
            pin = layer.annotations[PIN]
            out.pins.update({k: pin(k) if callable(pin) else pin for k in layer})
    return out


def split_draws(dsk: dict[Key, Any]) -> bool:
    """Take random numbers out of the tasks that Dask fused them into, when an array became the
    argument of a delayed function: they have to be found to be drawn by position. Says whether
    there are any."""
    found = False
    for key, task in list(dsk.items()):
        if type(task) is not Task:
            continue
        if task.func is ProhibitReuse._identity and type(task.args[0]) is Task:
            task = dsk[key] = task.args[0].substitute({}, key=key)
        if task.func is execute_subgraph and not task.kwargs:
            inner, outkey, inkeys, *args = task.args
            given = [a.key if isinstance(a, TaskRef) else None for a in args]
            if any(_draws(t) for t in inner.values()) and given == list(inkeys):
                found = True
                dsk.update(inner)
                if key != outkey:
                    dsk[key] = Alias(key, outkey)
        elif _draws(task):
            found = True
    return found


def _without_facts(hlg: HighLevelGraph) -> dict[Key, Any]:
    """The tasks of layers of which no collection says anything: what was delayed, mostly."""
    out: dict[Key, Any] = {}
    for layer in hlg.layers.values():
        if not layer.collection_annotations and not isinstance(layer, Blockwise):
            out.update(layer)
    return out


def _draws(task: Any) -> bool:
    return type(task) is Task and task.func in RANDOM


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
    order = list(hlg._toposort_layers())
    labels: dict[str, Any] = dict(pinned)
    readers: dict[str, list[str]] = {name: [] for name in hlg.layers}
    for name in order:
        for d in hlg.dependencies[name]:
            readers[d].append(name)

    def agree(neighbours: Iterable[str]) -> Any:
        found = [labels[n] for n in neighbours if n in labels]
        same = bool(found) and all(f is found[0] or f == found[0] for f in found)
        return found[0] if same else None

    for direction, neighbours in ((order, hlg.dependencies), (order[::-1], readers)):
        for name in direction:
            if name not in labels and isinstance(hlg.layers[name], Blockwise):
                pin = agree(sorted(neighbours[name]))
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
        if _holds_chunks(layer) or _uses_files(layer, layers):
            words[name] = name
    if not words:
        return hlg
    for name, word in words.items():
        layers[name] = copy(layers[name])
        layers[name].annotations = {**(layers[name].annotations or {}), APART: word}
    return HighLevelGraph(layers, hlg.dependencies)


def layer_of(key: Key) -> str:
    """The name of the layer that a task is of, also of one that Dask has fused with others.

    >>> layer_of(("add-1", 0, 2)), layer_of("add-1_.0_.1"), layer_of("add-1")
    ('add-1', 'add-1', 'add-1')
    """
    name = key[0] if isinstance(key, tuple) else key
    return str(name).split("_.")[0]


def _holds_chunks(layer: Layer) -> bool:
    return isinstance(layer, MaterializedLayer) and is_chunk(next(iter(layer.values()), None))


def _uses_files(layer: Layer, layers: Mapping[str, Layer]) -> bool:
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
    return _is_in_file(array.value if isinstance(array, DataNode) else array)


def _is_in_file(array: Any) -> bool:
    """Whether indexing it takes its time: it has the shape of an array, and is none in memory."""
    if isinstance(array, np.memmap):
        return True
    if isinstance(array, (np.ndarray, GraphNode)) or not hasattr(array, "shape"):
        return False
    return _library(array) != "cupy"


def _library(array: Any) -> str:
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


def _may_be_one(source: Any, target: Any) -> bool:
    """Whether what is written to a target may change a source."""
    if type(source) is np.ndarray and isinstance(target, np.ndarray):
        return bool(np.may_share_memory(source, target))
    kinds = [_library(a) for a in (source, target)]
    if set(kinds) == {"zarr"}:
        return bool(source.store_path == target.store_path)
    if set(kinds) == {"h5py"}:
        return bool(source == target)
    return not (kinds[0] in FILES and kinds[1] in {"numpy", *FILES} - {kinds[0]})


# ---- from one dictionary to a Graph


class _Builder:
    """Walks the graph from the wanted keys: resolves, converts, gathers, orders, chains."""

    def __init__(
        self,
        lowered: Lowered,
        keys: Any,
        cache: Mapping[Key, Any],
        home: Callable[[Any], int | None] | None,
        skip_aliases: bool = True,
        front: int | None = None,
    ):
        self.front, self.send, self.gpus = front, False, False
        self.apart = NOTHING  # words of layers: those that have different ones do not fuse
        self.skip_aliases = skip_aliases  # callbacks expect to see each of them run
        self.lowered, self.dsk, self.cache, self.home = lowered, lowered.dsk, cache, home
        self.wanted = wanted_keys(keys)
        self.all_keys: Any = _Either(self.dsk, cache) if cache else self.dsk
        self.compiler: Compile = Compiler()
        self.tasks: dict[Key, Any] = {}  # in order of discovery
        self.data: dict[Key, Any] = {}
        self.alias: dict[Key, Key] = {}
        self.gathers: dict[Key, Gather] = {}
        self.reads: dict[Key, tuple[Key, ...]] = {}  # a task's dependencies, as it names them
        self.values: dict[Key, Value] = {}  # what is known of them, of some

    def graph(self) -> Graph:
        outputs = self._discover()
        needs, names, constants = self._edges()
        sources = {k: a for k in needs if (a := self._source(k, constants)) is not None}
        sent: dict[Key, Key] = {}  # steps, and one reader of each
        if self.send:
            sent = self._sent_arrays(needs, names, constants)
            if sources:
                sent |= self._sent_files(sources.keys() - set(outputs), needs, names)
        # one task may be read under two names
        once = {k: tuple(dict.fromkeys(v)) for k, v in needs.items()} if self.alias else needs
        order = depth_first(once, outputs)
        pins = self._pins(order)
        for key, reader in sent.items():
            if reader in pins:
                pins.setdefault(key, pins[reader])
        for k in order:  # what one reads is before it
            self.values[k] = self._value(k)
        values = {k: v for k, v in self.values.items() if v is not None}
        blocks = {k: v for k, v in values.items() if isinstance(v, Block)}
        for key in sent:
            if key in blocks:
                blocks[key] = replace(blocks[key], kind="cupy.ndarray")
            else:
                value = self.tasks[key].args[0]
                blocks[key] = Block(value.shape, value.dtype, "cupy.ndarray")
        sizes = _sizes(values | blocks, self.tasks)
        within = self._within(order)
        draws = self._draws(order)
        stores = [k for k in order if _stores(self.tasks[k])]
        for key in stores:
            if (nbytes := _stored_bytes(self.tasks[key])) is not None:
                sizes[key] = nbytes
        kept, compiler = set(outputs), self.compiler
        for k in self._leave_on_device(needs):
            if k in blocks:  # what Dask converts to NumPy is of its other library
                blocks[k] = replace(blocks[k], kind="cupy.ndarray")
        targets = [self._argument(k, 1, constants) for k in stores]
        fused: dict[int, list[Any]] = {}
        stored = {
            k: [self._given(k, a, constants) for a in found]
            for k in order
            if (found := _targets(self.tasks[k], fused))
        }
        on_gpus = self._where_written(
            {k: [t] for k, t in zip(stores, targets, strict=True)} | stored
        )
        pins.update(on_gpus)
        targets += [t for found in stored.values() for t in found]
        fresh = {id(a): not any(_may_be_one(a, t) for t in targets) for a in sources.values()}
        again = {k for k, a in sources.items() if fresh[id(a)]}
        aside = {*sources, *[k for k in stores if k not in on_gpus], *sent}
        for key in sent:
            if key in kept:  # it has to be somewhere at the end
                again.discard(key)
            elif key not in sources:
                array = self.tasks[key].args[0]
                if not any(_may_be_one(array, t) for t in targets):
                    again.add(key)
        if self.lowered.fusable:
            # what follows runs on the device, and these beside it, or where an array is
            alone = kept.union(sent, on_gpus, stored)
            aside.update(on_gpus)
            files = aside, again
            order = _chain(
                order, self.tasks, needs, names, constants, pins, alone, files, compiler, self.apart
            )
            aside.difference_update(on_gpus)
        return Graph(
            {k: compiler(self.tasks[k]) for k in order},
            {k: needs[k] for k in order},
            {k: names[k] for k in order},
            {k: c for k in order if (c := constants[k])},
            self.wanted,
            outputs,
            {k: v for k, v in self.data.items() if k in kept},
            self.alias,
            pins,
            sizes,
            self.gathers,
            blocks,
            within,
            draws,
            aside=aside,
            stores=stores,
            written={*on_gpus, *stored},
            lent={k for k in on_gpus if _stores_last(self.tasks[k])},
            again=again,
            sent=set(sent),
            gpus=self.gpus,
        )

    def _sent_arrays(
        self, needs: dict[Key, Any], names: dict[Key, Any], constants: dict[Key, dict[Key, Any]]
    ) -> dict[Key, Key]:
        """Put steps in front of tasks that begin with sending an array of the host to the device,
        and take this from them. These steps, and one reader of each."""
        out: dict[Key, Key] = {}
        send = _Sending()
        for key, given in [(k, c) for k, c in constants.items() if c]:
            for name, value in given.items():
                if type(value) not in (np.ndarray, np.memmap) or value.nbytes < LEAST_SENT:
                    continue
                task = send.without(self.tasks[key], name) if is_plain(value.dtype) else None
                if task is None:
                    continue
                if task.func is unchanged:  # it does nothing else
                    self.tasks[key] = Task(key, unchanged, value)
                    constants[key], out[key] = {}, key
                    break
                first = _sent_key(self.alias.get(name, name))
                if first not in needs:
                    self.tasks[first] = Task(first, unchanged, value)
                    needs[first] = names[first] = ()
                    constants[first], out[first] = {}, key
                self.tasks[key] = task
                constants[key] = {d: v for d, v in constants[key].items() if d != name}
                needs[key], names[key] = (*needs[key], first), (*names[key], name)
        return out

    def _sent_files(
        self, sources: Set[Key], needs: Mapping[Key, Any], names: Mapping[Key, Any]
    ) -> dict[Key, Key]:
        """The blocks of files that go to their device at once, as all that read them would send
        them, and one reader of each. Takes it from these."""
        out: dict[Key, Key] = {}
        send = _Sending()
        readers: dict[Key, dict[Key, list[Key]]] = {}  # source -> reader -> its names there
        for key, inputs in needs.items():
            for name, d in zip(names[key], inputs, strict=True):
                if d in sources:
                    readers.setdefault(d, {}).setdefault(key, []).append(name)
        for key, reading in readers.items():
            block = self._value(key)
            if not isinstance(block, Block) or not is_plain(block.dtype):
                continue
            if block.nbytes < LEAST_SENT:
                continue
            if any(len(known_as) > 1 for known_as in reading.values()):
                continue
            tasks = {r: send.without(self.tasks[r], name) for r, (name,) in reading.items()}
            if all(t is not None for t in tasks.values()):
                self.tasks.update(tasks)
                out[key] = next(iter(reading))
        return out

    def _source(self, key: Key, constants: Mapping[Key, dict[Key, Any]]) -> Any:
        """The array in a file of which a task takes a block; None for other tasks."""
        array, _ = block_read(self.tasks[key], constants[key])
        return array if _is_in_file(array) else None

    def _discover(self) -> tuple[Key, ...]:
        """Everything that is wanted, directly or not; the keys to compute for it."""
        outputs: dict[Key, None] = {}
        for key in self.wanted:
            target = self._resolve(key, None)
            gather = self._gather(target)
            if gather is None:
                outputs[target] = None
            else:
                if self.home is not None:
                    gather = replace(gather, blocks=self._brought_back(gather.blocks))
                self.gathers[target] = gather
                outputs.update((self._resolve(b, target), None) for b in flatten(gather.blocks))
        tasks, dsk = self.tasks, self.dsk
        same: dict[int, Key] = {}  # values on devices
        stack = list(reversed(outputs))
        while stack:
            key = stack.pop()
            if key in tasks or key in self.data:
                continue
            task = dsk.get(key)
            if type(task) is not Task or type(task.func) is Chunk:
                task = self._node(key)
                if task is None:
                    continue
                if type(task) is DataNode and key not in outputs:
                    first = same.setdefault(id(task.value), key)
                    if first != key:  # the caller's array under another name
                        self.alias[key] = first
                        continue
            tasks[key] = task
            self.reads[key] = reads = _sorted(task.dependencies)
            for d in reads:
                if d in tasks:
                    continue
                target = d if type(dsk.get(d)) is Task else self._resolve(d, key)
                if target not in tasks and target not in self.data:
                    stack.append(target)
        for key, target in self.alias.items():  # of one that has become an alias since
            self.alias[key] = self.alias.get(target, target)
        return tuple(outputs)

    def _node(self, key: Key) -> GraphNode | None:
        """The task of a key; None (and an entry in `data`) where it is a value."""
        task = self.dsk[key] if key in self.dsk else DataNode(key, self.cache[key])
        if not isinstance(task, GraphNode):
            task = convert_legacy_task(key, task, self.all_keys)
        if is_chunk(task):
            chunk: Chunk = task.func  # type: ignore[union-attr]
            value = chunk if self._is_here(task) else chunk.shown()
            if value is None:  # another scheduler's, and not in memory: the task reads it
                return task
        elif isinstance(task, GraphNode) and not isinstance(task, DataNode):
            return task
        else:
            value = task.value if isinstance(task, DataNode) else task
        if self.home is not None and self.home(value) is not None:
            return DataNode(key, value)
        self.data[key] = value
        return None

    def _is_here(self, task: Any) -> bool:
        return self.home is not None and self.home(task.func) is not None

    def _brought_back(self, blocks: Any) -> Any:
        """Keys of blocks that are gathered. A persisted chunk gets a task that reads it, so that it
        is brought back when its turn comes, and written into the result by its device."""
        if isinstance(blocks, list):
            return [self._brought_back(b) for b in blocks]
        target = self._resolve(blocks, None)
        chunk = self.dsk.get(target)
        if not (is_chunk(chunk) and self._is_here(chunk)):
            return blocks
        name, *index = target
        block = (f"{name}-block", *index)
        self.dsk[block] = Task(block, unchanged, TaskRef(target))
        return block

    def _resolve(self, key: Key, reader: Key) -> Key:
        """Follow aliases to a key with a task or a value."""
        first, seen = key, 0
        while True:
            if key in self.alias:
                key = self.alias[key]
            elif key not in self.dsk:
                if key in self.cache:
                    break
                if reader is None:
                    raise KeyError(key)
                raise PlanError(
                    f"Missing dependency {key!r} of {reader!r}: neither the graph nor cache= has it"
                )
            else:
                task = self.dsk[key]
                if _is_future(task) and task.key not in self.cache:
                    raise PlanError(
                        f"{key!r} is on a Dask cluster, and not in this process: compute it by "
                        "its client, as in x.compute(scheduler=client), or attach(client) again"
                    )
                if not isinstance(task, GraphNode) and _may_be_alias(task):
                    task = convert_legacy_task(key, task, self.all_keys)
                if not isinstance(task, Alias):
                    break
                if not self.skip_aliases and task.target in self.dsk:
                    break
                if task.target == key and key in self.cache:
                    break
                key = task.target
            seen += 1
            if seen > len(self.dsk) + len(self.alias) + 1:
                raise RuntimeError(f"Cycle detected in the graph: {first!r} is an alias of itself")
        if key != first:
            self.alias[first] = key
        return key

    def _gather(self, key: Key) -> Gather | None:
        """Whether a wanted key is only the blocks of an array, put together."""
        task = self.dsk.get(key)
        if not (isinstance(task, Task) and task.func is finalize and len(task.args) == 1):
            return None
        blocks = key_lists(task.args[0])
        if blocks is None:
            return None
        flat = list(flatten(blocks))
        if not all(type(k) is tuple for k in flat):
            return None
        if len(flat) == 1 and not self._is_converted(flat[0]):  # Dask's task makes a copy
            return None
        layer = self.lowered.layers.get(flat[0][0])
        chunks = _known_chunks(layer)
        if chunks is not None and [len(c) for c in chunks] != _numblocks(blocks):
            chunks = None
        facts = (layer.collection_annotations if layer is not None else None) or {}
        # of what a mask selects Dask does not know the type: it says NumPy's
        of_numpy = chunks is not None and facts.get("chunk_type") == "numpy.ndarray"
        return Gather(key, blocks, chunks, of_numpy)

    def _is_converted(self, block: Key) -> bool:
        """Whether a block, of an array with axes, is fetched to the host by its own task."""
        task = self.dsk.get(self._resolve(block, None))
        return len(block) > 1 and isinstance(task, Task) and _without_conversion(task) is not None

    def _leave_on_device(self, needs: Mapping[Key, tuple[Key, ...]]) -> list[Key]:
        """Take `.to_backend("numpy")` off the blocks of a gather: the gather copies them itself.
        Which blocks these are.

        Each device then writes its blocks straight into the result, all at once, where the task
        would have waited for its own copy first.
        """
        read = {d for inputs in needs.values() for d in inputs}
        read.update(self.alias.get(k, k) for k in self.wanted)
        out: list[Key] = []
        for key, gather in self.gathers.items():
            blocks = [self.alias.get(b, b) for b in flatten(gather.blocks)]
            if gather.chunks is None or any(b in read or b not in self.tasks for b in blocks):
                continue
            bare = [_without_conversion(self.tasks[b]) for b in blocks]
            if all(t is not None for t in bare):
                self.tasks.update(zip(blocks, bare, strict=True))
                self.gathers[key] = replace(gather, to_host=True, converted=True)
                out += blocks
        return out

    def _edges(self) -> tuple[dict[Key, Any], dict[Key, Any], dict[Key, Any]]:
        needs: dict[Key, tuple[Key, ...]] = {}
        names: dict[Key, tuple[Key, ...]] = {}
        constants: dict[Key, dict[Key, Any]] = {}
        alias, data, tasks = self.alias, self.data, self.tasks
        for key, reads in self.reads.items():
            if not alias and not data:
                needs[key] = names[key] = reads
                constants[key] = {}
                continue
            targets = [alias.get(d, d) for d in reads]
            pairs = [(d, t) for d, t in zip(reads, targets, strict=True) if t in tasks]
            names[key] = tuple(d for d, _ in pairs)
            needs[key] = tuple(t for _, t in pairs)  # one twice, where it has two names
            constants[key] = {
                d: data[t] for d, t in zip(reads, targets, strict=True) if t not in tasks
            }
        return needs, names, constants

    def _pins(self, order: list[Key]) -> dict[Key, int]:
        pins = self.lowered.pins
        out = {k: pins[k] for k in order if pins.get(k) is not None} if pins else {}
        if self.front is not None:
            for key in self.wanted:
                if getattr(self.tasks.get(key), "func", None) is finalize:
                    out.setdefault(key, self.front)
        return out

    def _where_written(self, stores: Mapping[Key, list[Any]]) -> dict[Key, int]:
        """Of tasks that store to these, those that write to an array of a GPU: which device.

        They run there, as other tasks do: anywhere else they would write to a copy of it.
        """
        out: dict[Key, int] = {}
        if self.home is None or not self.gpus:
            return out
        for key, target in [(k, t) for k, targets in stores.items() for t in targets]:
            if type(target) is Chunk and self.home(target) is not None:
                shown = target.shown()
                if shown is None or _library(shown) == "cupy":
                    raise PlanError(
                        f"{key!r} stores to a persisted array, which may leave its GPU at any "
                        "time: compute() it, and store to the array that this gives"
                    )
            elif _library(target) == "cupy":
                device = self.home(target)
                if device is None:
                    raise PlanError(
                        f"{key!r} stores to an array on GPU {target.device.id}, which is none of "
                        "those that this runs on (the scheduler's, or the first num_workers of "
                        "them): store to an array on one of these, or to one of NumPy's"
                    )
                if out.setdefault(key, device) != device:
                    raise PlanError(
                        f"{key!r} stores to arrays on several GPUs, by tasks that Dask has fused: "
                        "store to one after the other"
                    )
        return out

    def _argument(self, key: Key, n: int, constants: dict[Key, dict[Key, Any]]) -> Any:
        """The n-th argument of a task, if it is a value of the graph, on a device or not."""
        return self._given(key, self.tasks[key].args[n], constants)

    def _given(self, key: Key, argument: Any, constants: dict[Key, dict[Key, Any]]) -> Any:
        if isinstance(argument, (TaskRef, Alias)):
            name = argument.key if isinstance(argument, TaskRef) else argument.target
            given = self.tasks.get(self.alias.get(name, name))
            argument = given if isinstance(given, DataNode) else constants[key].get(name)
        return argument.value if isinstance(argument, DataNode) else argument

    def _value(self, key: Key) -> Value:
        """The blocks in a value, as far as they are known."""
        if not self.lowered.layers:
            return None
        task = self.tasks.get(key)
        if _stored_bytes(task) is not None:
            return None
        if _selects(task):  # Dask says of the result that it has the chunks of the whole
            return None
        if type(key) is tuple:
            block = _collection_block(self.lowered.layers.get(key[0]), key[1:])
            if block is not None:
                return block
        inner: Mapping[Key, Any] = {}
        if isinstance(task, Task) and task.func is execute_subgraph:
            inner, last = task.args[:2]
            task = inner.get(last)
        if not isinstance(task, Task):
            return None
        if task.func in SLICERS and len(task.args) > 1:
            source, index = task.args[:2]
            if not isinstance(source, (TaskRef, Alias)):
                return None
            (name,) = references(source)
            whole = self._read(name, inner, key)
            return _selected(whole, index.value if isinstance(index, DataNode) else index)
        function = factors.name_of(task.func)
        if function not in factors.MAKE or task.kwargs or _computes(task.args):
            return None
        return _made(function, [self._read(name, inner, key) for name in references(task)])

    def _read(self, name: Key, inner: Mapping[Key, Any], key: Key) -> Value:
        """What is known of what a task reads: it, or one of the tasks that Dask fused with it."""
        if name not in inner:
            name = self.alias.get(name, name)
            return self.values[name] if name in self.values else self._value(name)
        if type(name) is str and type(key) is tuple:  # the array, and which of the axes of `key`
            _, *axes = name.split("_.")
            block = [key[1:][int(n)] for n in axes if n.isdigit() and int(n) < len(key) - 1]
            return _collection_block(self.lowered.layers.get(layer_of(name)), tuple(block))
        return None

    def _within(self, order: list[Key]) -> dict[str, int]:
        out: dict[str, int] = {}
        for key in order:
            task = self.tasks[key]
            if not (isinstance(task, Task) and task.func is execute_subgraph):
                continue
            if type(key) is tuple and key[0] not in out:
                inner = task.args[0]
                values = [self._read(name, inner, key) for name in inner]
                out[key[0]] = max([b.nbytes for b in values if isinstance(b, Block)], default=0)
        return out

    def _draws(self, order: list[Key]) -> dict[Key, Draw]:
        """Where each block of random numbers lies. What is drawn there may then depend on that, and
        on the seed of the first block, alone: not on how the array is cut up."""
        out: dict[Key, Draw] = {}
        arrays: dict[str, Any] = {}
        for key in order:
            task = self.tasks[key]
            if type(task) is not Task or task.func not in RANDOM or type(key) is not tuple:
                continue
            name = key[0]
            if name not in arrays:
                arrays[name] = _whole_draw(self.lowered.layers.get(name), name)
            if arrays[name] is None:
                arrays.update(self._whole_draws)
                arrays.setdefault(name, None)
            if arrays[name] is not None:
                seed, shape, starts = arrays[name]
                start = tuple(s[i] for s, i in zip(starts, key[1:], strict=True))
                out[key] = Draw(seed, shape, start)
        return out

    @cached_property
    def _whole_draws(self) -> dict[str, Any]:
        """The same for arrays that came without their layers: what all their blocks say."""
        blocks: dict[str, dict[tuple[int, ...], Any]] = {}
        for whole in self.lowered.wholes or [self.dsk]:
            for key, task in whole.items():
                if _draws(task) and type(key) is tuple:
                    blocks.setdefault(key[0], {})[key[1:]] = task
        return {name: _put_together(found) for name, found in blocks.items()}


class _Either:
    """Membership in the graph or in the cache, for Dask's converter of legacy tasks."""

    def __init__(self, *mappings: Mapping[Key, Any]):
        self.mappings = mappings

    def __contains__(self, key: object) -> bool:
        return any(key in m for m in self.mappings)


def _is_future(task: Any) -> bool:
    """Whether it stands for a value that a cluster holds."""
    if type(task) is Task or type(task) is TaskRef:
        return False
    return isinstance(task, TaskRef) or getattr(task, "__dask_future__", False)


def _may_be_alias(task: Any) -> bool:
    if isinstance(task, (int, float, str)):
        return True
    if type(task) is tuple:
        return not (task and callable(task[0]))
    return bool(getattr(task, "__dask_future__", False))


def _sorted(keys: frozenset[Key]) -> tuple[Key, ...]:
    """Sets have no order; plans do."""
    if len(keys) < 2:
        return tuple(keys)
    try:
        return tuple(sorted(keys))
    except TypeError:
        return tuple(sorted(keys, key=lambda k: (type(k).__name__, str(k))))


def key_lists(node: Any) -> Any:
    """Nested lists of keys from nested `List`s of `TaskRef`s; None where there is anything else."""
    if isinstance(node, TaskRef):
        return node.key
    if isinstance(node, NestedContainer) and node.klass is list:
        items = [key_lists(a) for a in node.args]
        return None if any(i is None for i in items) else items
    return None


def _without_conversion(task: Any) -> Any:
    """The same task before its last step, `to_numpy_dispatch`; None where that is not its last."""
    if not isinstance(task, Task) or task.kwargs:
        return None
    if task.func is to_numpy_dispatch and len(task.args) == 1:
        return Task(task.key, unchanged, task.args[0])
    if task.func is execute_subgraph:
        inner, outkey, inkeys, *args = task.args
        last = inner.get(outkey)
        if isinstance(last, Task) and last.func is to_numpy_dispatch and not last.kwargs:
            (source,) = last.args
            if (name := referred(source)) is not None:
                return Task(task.key, execute_subgraph, inner, name, inkeys, *args)
    return None


def unchanged(value: Any) -> Any:
    return value


#: CuPy's functions that bring an array to the device.
SENDERS = {"array", "asanyarray", "asarray"}
#: Bytes below which an array of the host is sent by the task that reads it.
LEAST_SENT = 2**16


def is_sender(function: Any) -> bool:
    """Whether a function of one array brings it to the device and does nothing else."""
    if function is to_cupy_dispatch:
        return True
    home = getattr(function, "__module__", None) or ""
    return home.partition(".")[0] == "cupy" and getattr(function, "__name__", "") in SENDERS


def is_plain(dtype: np.dtype[Any]) -> bool:
    """Whether devices have arrays of this dtype."""
    return dtype.kind in "biufc" and dtype.isnative


def _sent_key(key: Key) -> Key:
    return (f"{key[0]}-sent", *key[1:]) if type(key) is tuple else f"{key}-sent"


class _Sending:
    """Takes the sending of an input from the front of tasks. Remembers inner graphs, which all
    blocks of a layer share."""

    def __init__(self) -> None:
        self.known: dict[Any, tuple[Any, Any]] = {}

    def without(self, task: Any, name: Key) -> Task | None:
        """The task for an input that is on the device already; None where it does more with it, or
        something else first."""
        if type(task) is not Task or task.kwargs:
            return None
        if is_sender(task.func):
            (only,) = task.args if len(task.args) == 1 else (None,)
            return Task(task.key, unchanged, only) if _refers(only, name) else None
        if task.func is not execute_subgraph:
            return None
        inner, outkey, inkeys, *args = task.args
        places = [n for n, a in enumerate(args) if _refers(a, name)]
        others = (a for n, a in enumerate(args) if n not in places and isinstance(a, GraphNode))
        if not places or any(name in a.dependencies for a in others) or len(args) != len(inkeys):
            return None
        words = id(inner), tuple(places)
        if words not in self.known:
            self.known[words] = inner, _unsent(inner, {inkeys[n] for n in places}, outkey)
        changed = self.known[words][1]
        if changed is None:
            return None
        return Task(task.key, execute_subgraph, changed, outkey, inkeys, *args)


def _refers(argument: Any, name: Key) -> bool:
    return bool(referred(argument) == name)


def referred(argument: Any) -> Key:
    """The key of the task that an argument stands for; None for any other argument."""
    if isinstance(argument, TaskRef):
        return argument.key
    return argument.target if isinstance(argument, Alias) else None


def _unsent(inner: Mapping[Key, Any], inputs: set[Key], outkey: Key) -> dict[Key, Any] | None:
    """An inner graph whose inputs are on the device already; None where it does not send them."""
    out = dict(inner)
    if outkey in inputs or inputs & out.keys():
        return None
    for key, task in inner.items():
        if not isinstance(task, GraphNode):
            return None  # of Dask's older kind
        read = inputs & set(task.dependencies)
        if not read:
            continue
        if type(task) is not Task or task.kwargs or len(task.args) != 1:
            return None
        if not is_sender(task.func) or not _refers(task.args[0], next(iter(read))):
            return None
        out[key] = Task(key, unchanged, task.args[0])
    return out


def _stores(task: Any) -> bool:
    return type(task) is Task and task.func is load_store_chunk


def _stores_last(task: Any) -> bool:
    """Whether a task, or the last of those that are fused in it, stores a block."""
    while type(task) is Task and task.func is execute_subgraph:
        inner, last, *_ = task.args
        task = inner.get(last)
    return _stores(task)


def _targets(task: Any, known: dict[int, list[Any]]) -> list[Any]:
    """What those of the tasks that are fused in a task store to, as arguments of that. What is
    `known` is of their graphs, which blocks that are alike share."""
    if type(task) is not Task or task.func is not execute_subgraph:
        return []
    inner, _, names, *args = task.args
    found = known.get(id(inner))
    if found is None:
        every = [t.args[1] for t in inner.values() if _stores(t)]
        for t in inner.values():
            every += _targets(t, known)
        given = {k: t for k, t in inner.items() if isinstance(t, DataNode)}
        found = known[id(inner)] = [_put(n, given) for n in every]
    given = dict(zip(names, args, strict=True)) if found else {}
    return [_put(n, given) for n in found]


def _put(argument: Any, given: Mapping[Key, Any]) -> Any:
    return given.get(argument.key, argument) if isinstance(argument, TaskRef) else argument


def target_name(task: Any) -> Key | None:
    """Where a task that stores a block reads what it writes to; None for other tasks, and where
    that is in the task."""
    target = task.args[1] if _stores(task) else None
    return target.key if isinstance(target, TaskRef) else None


def array_written(graph: Graph, key: Key) -> Any:
    """The array of CuPy's that one of the graph's `stores` writes to; None where it is another
    thing, or not known yet."""
    reads = zip(graph.names[key], graph.needs[key], strict=True)
    given = {n: t.value for n, k in reads if isinstance(t := graph.tasks.get(k), DataNode)}
    target = _argument(graph.tasks[key], 1, given | graph.constants.get(key, {}))
    return target if _library(target) == "cupy" else None


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


def _sizes(values: Mapping[Key, Any], tasks: Mapping[Key, Any]) -> dict[Key, int]:
    """Bytes of each value, as the collections say."""
    out, times = {}, {}
    for key, value in values.items():
        nbytes = sum([b.nbytes for b in value]) if isinstance(value, tuple) else value.nbytes
        name = key[0] if type(key) is tuple and key else key
        if name not in times:
            times[name] = _between(tasks.get(key))
        if times[name]:
            out[key] = nbytes * times[name]
    return out


def _between(task: Any) -> int:
    """How many times what Dask says of it a task makes.

    >>> from dask.array.chunk import topk
    >>> _between(Task("x", partial(topk, k=-5), 0)), _between(Task("x", abs, 0))
    (5, 1)
    """
    task = _last(task)
    if not isinstance(task, Task):
        return 1
    function: Any = task.func
    if type(function).__name__ == "Compose" and hasattr(function, "funcs"):
        function = function.funcs[-1]  # which is called last
    given = dict(task.kwargs)
    while isinstance(function, partial):
        function, given = function.func, {**function.keywords, **given}
    library, name = factors.name_of(function)
    return BETWEEN[name](given) if library == "dask" and name in BETWEEN else 1


def _last(task: Any) -> Any:
    """The last of the tasks that Dask has fused; any other as it is."""
    if isinstance(task, Task) and task.func is execute_subgraph:
        return task.args[0].get(task.args[1])
    return task


def _stored_bytes(task: Any) -> int | None:
    """Bytes of what a task which stores a block gives back: `None`, unless it reads it again."""
    if not _stores(task):
        return None
    load, given = (
        v.value if isinstance(v, DataNode) else v
        for v in (task.kwargs.get("load_stored"), task.kwargs.get("return_stored"))
    )
    return None if load and given else sizeof(None)


def is_chunk(task: Any) -> bool:
    return isinstance(task, Task) and type(task.func) is Chunk


def _numblocks(blocks: Any) -> list[int]:
    counts = []
    while isinstance(blocks, list):
        counts.append(len(blocks))
        blocks = blocks[0]
    return counts


def _known_chunks(layer: Layer | None) -> tuple[tuple[int, ...], ...] | None:
    facts = layer.collection_annotations if layer is not None else None
    chunks = facts.get("chunks") if facts else None
    if chunks is None or any(math.isnan(c) for axis in chunks for c in axis):
        return None
    return tuple(tuple(int(c) for c in axis) for axis in chunks)


def _whole_draw(layer: Layer | None, name: str) -> Any:
    """Seed of the first block, shape and starts of the blocks of an array of random numbers."""
    chunks = _known_chunks(layer)
    first = None if layer is None or not chunks else layer.get((name, *[0] * len(chunks)))
    if not chunks or not isinstance(first, Task) or first.func not in RANDOM:
        return None
    if len(first.args[3]) != len(chunks):
        return None  # each draw is a vector
    starts = [[0, *accumulate(axis)] for axis in chunks]
    return first.args[2], tuple(sum(axis) for axis in chunks), starts


def _put_together(blocks: Mapping[tuple[int, ...], Any]) -> Any:
    """The same of an array of which there are only the tasks; None where some are missing."""
    counts = [max(axis) + 1 for axis in zip(*blocks, strict=True)]
    first = blocks.get((0,) * len(counts))
    if first is None or len(blocks) != math.prod(counts):
        return None
    if any(len(t.args[3]) != len(counts) for t in blocks.values()):
        return None
    if any(_number(t.args[2]) != n for n, t in _numbered(first.args[2], blocks, counts)):
        return None  # blocks at the end of an axis have been culled
    lengths = [
        [blocks[(0,) * k + (i,) + (0,) * (len(counts) - k - 1)].args[3][k] for i in range(n)]
        for k, n in enumerate(counts)
    ]
    starts = [[0, *accumulate(axis)] for axis in lengths]
    return first.args[2], tuple(sum(axis) for axis in lengths), starts


def _numbered(first: Any, blocks: Mapping[tuple[int, ...], Any], counts: list[int]) -> Any:
    """Blocks, with the number that the seed of each should have."""
    start = _number(first)
    for n, index in enumerate(product(*map(range, counts))):
        yield None if start is None else start + n, blocks[index]


def _number(seed: Any) -> int | None:
    """Which of all seeds that were made for an array this is; None where it does not tell."""
    if isinstance(seed, np.random.SeedSequence):
        return int(seed.spawn_key[-1]) if seed.spawn_key else None
    base = getattr(seed, "base", None)
    if isinstance(base, np.ndarray):
        return (_address(seed) - _address(base)) // max(int(seed.nbytes), 1)
    return None


def _address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


def _collection_block(layer: Layer | None, block: tuple[Any, ...]) -> Block | None:
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
    return Block(shape, np.dtype(facts["dtype"]), facts.get("chunk_type"))


def _shape_of(layers: Mapping[str, Layer], key: Any) -> tuple[int, ...] | None:
    """The shape of a block, by its key, as its collection has it."""
    if type(key) is not tuple:
        return None
    block = _collection_block(layers.get(key[0]), key[1:])
    return None if block is None else block.shape


def _selects(task: Any) -> bool:
    """Whether a task indexes one value with another: how much that leaves, only the run shows."""
    task = _last(task)
    if not isinstance(task, Task) or len(task.args) < 2:
        return False
    function = task.kwargs.get("enforce_dtype_function", task.func)  # as x[mask] comes
    return function in SLICERS and isinstance(task.args[1], (TaskRef, Alias))


def _sliced(shape: tuple[int, ...], index: Any) -> tuple[int, ...] | None:
    """The shape of a slice; None for any index that is not slices and integers.

    >>> _sliced((10, 20), (slice(0, 3), slice(None, None, 2))), _sliced((10, 20), (4,))
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


def _computes(arguments: Iterable[Any]) -> bool:
    """Whether there are tasks among arguments, and not only names of some."""
    return any(
        _computes(a.args) if isinstance(a, NestedContainer) else isinstance(a, Task)
        for a in arguments
    )


def _selected(whole: Value, index: Any) -> Value:
    """What is known of a part of a value."""
    if isinstance(whole, tuple):
        part = isinstance(index, int) and -len(whole) <= index < len(whole)
        return whole[index] if part else None
    shape = None if whole is None else _sliced(whole.shape, index)
    return None if whole is None or shape is None else replace(whole, shape=shape)


def _made(function: tuple[str, str], read: list[Value]) -> Value:
    """What is known of what a function of `factors` makes of these."""
    blocks = [b for b in read if isinstance(b, Block)]
    if len(blocks) < len(read):
        return None
    made = factors.made(function, [factors.Array(b.shape, b.dtype) for b in blocks])
    if made is None or isinstance(made, factors.Array):
        return None if made is None else Block(*made, blocks[0].kind)
    return tuple([Block(*a, blocks[0].kind) for a in made])


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


def depth_first(needs: Mapping[Key, tuple[Key, ...]], outputs: Iterable[Key]) -> list[Key]:
    """An order in which values live briefly: finish what was begun, deepest branch first, and run
    at once whatever is ready and lets go of as much as it makes. `needs` names each input once.

    Linear in the size of the graph; `dask.order.order` takes several times as long, and on the
    workloads of graphs/ holds as much or more (tests/test_graph.py compares them).

    >>> depth_first({"y2": ("x2", "y1"), "y1": ("x1",), "x1": (), "x2": ()}, ["y2"])
    ['x1', 'y1', 'x2', 'y2']
    """
    return _Order(needs, outputs).order


class _Order:
    """A depth-first walk that notices what has become ready on the way."""

    def __init__(self, needs: Mapping[Key, tuple[Key, ...]], outputs: Iterable[Key]):
        self.needs = needs
        self.keep = set(outputs)
        self.readers, self.height = _heights(needs)
        self.missing = {k: len(inputs) for k, inputs in needs.items() if inputs}
        self.unread = {k: len(r) for k, r in self.readers.items()}  # readers still to run
        self.done: set[Key] = set()
        self.order: list[Key] = []
        for output in outputs:
            self._walk(output)

    def _walk(self, output: Key) -> None:
        needs, done, height = self.needs, self.done, self.height
        stack = [output]
        while stack:
            key = stack[-1]
            if key in done or key not in needs:
                stack.pop()
                continue
            todo = [d for d in needs[key] if d not in done]
            if not todo:
                stack.pop()
                self._run(key)
            elif len(todo) == 1:
                stack.append(todo[0])
            else:
                todo.sort(key=height.__getitem__)  # the last is taken first
                tallest = height[todo[-1]]
                level = [d for d in todo if height[d] == tallest]
                stack += [d for d in todo if height[d] != tallest]
                stack += level[::-1]

    def _run(self, key: Key) -> None:
        """Put a task into the order, and behind it the ready ones that free what they read."""
        done, needs, keep, readers = self.done, self.needs, self.keep, self.readers
        missing, unread = self.missing, self.unread
        todo = [key]
        while todo:
            key = todo.pop()
            if key in done:
                continue
            done.add(key)
            self.order.append(key)
            ready = []
            for d in needs[key]:
                left = unread[d] = unread[d] - 1
                if left == 1 and d not in keep:  # one reader left: is it ready?
                    last = next(r for r in readers[d] if r not in done)
                    if not missing[last]:
                        ready.append(last)
            for r in readers.get(key, ()):
                left = missing[r] = missing[r] - 1
                if not left:
                    ready.append(r)
            for r in reversed(ready):
                for d in needs[r]:
                    if unread[d] == 1 and d not in keep:  # it frees what it reads
                        todo.append(r)
                        break


def _heights(
    needs: Mapping[Key, tuple[Key, ...]],
) -> tuple[dict[Key, list[Key]], dict[Key, int]]:
    """The readers of each task, and how many tasks the longest path to it has.

    A cycle is a RuntimeError, as in Dask.
    """
    missing: dict[Key, int] = {}
    readers: dict[Key, list[Key]] = {}
    ready = []
    for key, inputs in needs.items():
        if inputs:
            missing[key] = len(inputs)
            for d in inputs:
                readers.setdefault(d, []).append(key)
        else:
            ready.append(key)
    height = dict.fromkeys(ready, 0)
    for key in ready:
        above = height[key] + 1
        for r in readers.get(key, ()):
            missing[r] -= 1
            if not missing[r]:
                height[r] = above  # its last input is its highest: `ready` is in order of height
                ready.append(r)
    if len(height) != len(needs):
        cycle = sorted(str(k) for k in needs if k not in height)
        raise RuntimeError(f"Cycle detected in the graph, through {', '.join(cycle[:3])}")
    return readers, height


def _chain(
    order: list[Key],
    tasks: dict[Key, Any],
    needs: dict[Key, tuple[Key, ...]],
    names: dict[Key, tuple[Key, ...]],
    constants: dict[Key, dict[Key, Any]],
    pins: dict[Key, int],
    kept: set[Key],
    files: tuple[set[Key], set[Key]],
    compiler: Compile,
    apart: Mapping[str, str],
) -> list[Key]:
    """Make each linear run of tasks one step, as Dask's `fuse_linear` would, without rewriting it.

    A run does not cross from one pin to another, and does not swallow what the caller wants. A run
    is of layers that have the same word in `apart`, or none. What reads a file may only be sliced
    in the same run, and what writes one is a run by itself; a run that reads a file is put into the
    sets in `files`.
    """
    aside, again = files
    readers: dict[Key, int] = {}
    for key in order:
        for d in needs[key]:
            readers[d] = readers.get(d, 0) + 1
    below: dict[Key, Key] = {}  # task -> the one task whose only reader it is
    pin: dict[Key, int | None] = {}  # ... and where the run that ends in it must be
    for key in order:
        own = pins.get(key)
        if len(needs[key]) == 1:
            (d,) = needs[key]
            agree = own is None or pin[d] is None or own == pin[d]
            fits = agree and readers[d] == 1 and d not in kept
            fits = fits and not isinstance(tasks[d], DataNode)  # a value is not a task to run
            fits = fits and key not in aside
            fits = fits and not (apart and apart.get(layer_of(key)) != apart.get(layer_of(d)))
            fits = fits and (d not in aside or getattr(tasks[key], "func", None) in SLICERS)
            if fits and not tasks[key].block_fusion and not tasks[d].block_fusion:
                below[key] = d
                for kind in files:
                    if d in kind:
                        kind.add(key)
                own = pin[d] if own is None else own
        pin[key] = own
    if not below:
        return order
    inner = set(below.values())
    out = []
    for key in order:
        if key in inner:
            continue
        if key in below:
            run = [key]
            while run[-1] in below:
                run.append(below[run[-1]])
            run.reverse()
            _join(run, tasks, needs, names, constants, compiler)
            where = pin[key]
            if where is not None:
                pins[key] = where
        out.append(key)
    return out


def _join(
    run: list[Key],
    tasks: dict[Key, Any],
    needs: dict[Key, tuple[Key, ...]],
    names: dict[Key, tuple[Key, ...]],
    constants: dict[Key, dict[Key, Any]],
    compiler: Compile,
) -> None:
    first, last = run[0], run[-1]
    aliased = any(names[k] != needs[k] for k in run[1:])
    reading = sum(isinstance(tasks[k], Task) and tasks[k].func in GETTERS for k in run)
    if reading > 1 and not aliased:
        # Dask merges repeated slices so that a file is read once, and only where needed
        fused = Task.fuse(*(tasks[k] for k in run), key=last)
        tasks[last] = compiler(_optimize_slices({last: fused})[last])
    else:
        known_as = [*(names[k][0] for k in run[1:]), last]
        tasks[last] = Chain(list(zip(known_as, (compiler(tasks[k]) for k in run), strict=True)))
    merged: dict[Key, Any] = {}
    for k in run:
        merged.update(constants[k])
    constants[last], needs[last], names[last] = merged, needs[first], names[first]
