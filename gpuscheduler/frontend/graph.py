"""The types of a graph: tasks, what they read, and what is known of them."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

import numpy as np
from dask._task_spec import DataNode, NestedContainer, Task, TaskRef
from dask.array.optimization import GETTERS
from dask.core import flatten
from dask.highlevelgraph import Layer

from ..sparse_parts import is_sparse_type
from .captured import Variable, all_unchanged, content
from .chunk import Chunk
from .compiled_task import Chain, literal
from .task import sequence_of

Key = Any
Callback = Callable[[dict[Key, Any]], None]
Compile = Callable[[Any], Callable[[dict[Key, Any]], Any]]

NOTHING: Mapping[str, str] = MappingProxyType({})
PIN = "device"  # dask.annotate(device=k)
APART = "gpuscheduler-apart"  # on layers that Dask must not fuse with others
SLICERS = (*GETTERS, operator.getitem)


@dataclass(frozen=True, slots=True)
class RulePin:
    """The pin of a task whose device a rule says, once it is known how many there are."""

    rule: Any  # has `device_of(key, devices)`, which gives a device or None
    key: Key

    def device(self, devices: int) -> Any:
        return self.rule.device_of(self.key, devices)


def is_pin_rule(pin: Any) -> bool:
    """Whether what `dask.annotate(device=...)` got is a rule, such as `Cyclic`."""
    return callable(getattr(pin, "device_of", None))


def pinned_device(pin: Any, devices: int) -> Any:
    """The device that a pin means among this many; None for none.

    >>> pinned_device(1, 2)
    1
    """
    return pin.device(devices) if type(pin) is RulePin else pin


@dataclass(frozen=True, slots=True)
class GatherTask:
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
class BlockInfo:
    """What a collection says of one of its blocks."""

    shape: tuple[int, ...]
    dtype: Any
    kind: str | None = None  # the type of its arrays, "numpy.ndarray" or "cupy.ndarray"

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * int(self.dtype.itemsize)

    @property
    def is_sparse(self) -> bool:
        """Whether `nbytes` says nothing, as its zeros are not stored."""
        return is_sparse_type(self.kind)


#: What is known of a value: of an array, of several, or nothing.
Value = BlockInfo | tuple[BlockInfo, ...] | None


@dataclass(frozen=True, slots=True)
class RandomDraw:
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
    gathers: dict[Key, GatherTask] = field(default_factory=dict)
    blocks: dict[Key, BlockInfo] = field(default_factory=dict)  # where the collection tells
    #: By layer, bytes of the largest value in its first task, of those that Dask has fused there.
    within: dict[str, int] = field(default_factory=dict)
    draws: dict[Key, RandomDraw] = field(
        default_factory=dict
    )  # by the key of the random task itself
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
        """Whether a global, array, list or dictionary that the tasks have read has changed."""
        if any(where.get(name) is not value for where, name, value in self.globals):
            return True
        if not all_unchanged(self.around):
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
        state["blocks"] = {k: BlockInfo(*b) for k, b in state["blocks"].items()}
        state["draws"] = {k: RandomDraw(*d) for k, d in state["draws"].items()}
        for name, value in state.items():
            setattr(self, name, value)


def _row(task: Any) -> tuple[Any, ...]:
    """A task as a tuple: its key, function and arguments, and which of these are references."""
    if type(task) is Task:
        args = task.args
        refs = tuple([n for n, a in enumerate(args) if isinstance(a, TaskRef)])
        plain = tuple([a.key if isinstance(a, TaskRef) else _name_futures(a) for a in args])
        return task.key, task.func, plain, refs, task.kwargs, task.data_producer
    if len(sequence := sequence_of(task)) > 1:
        return tuple([(k, _row(t)) for k, t in sequence]), None
    return (task,)


def _name_futures(argument: Any) -> Any:
    """The same argument with names in place of futures, which would take their client along."""
    if not isinstance(argument, NestedContainer):
        return argument
    if all(
        type(a) is TaskRef or not isinstance(a, (TaskRef, NestedContainer)) for a in argument.args
    ):
        return argument
    out = copy(argument)
    out.args = tuple(
        [TaskRef(a.key) if isinstance(a, TaskRef) else _name_futures(a) for a in out.args]
    )
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
class LoweredCollection:
    """A collection as one dictionary, with what its layers knew."""

    dsk: dict[Key, Any]
    pins: dict[Key, Any] = field(default_factory=dict)
    layers: dict[str, Layer] = field(default_factory=dict)  # by the name of the keys they make
    wholes: list[Mapping[Key, Any]] = field(default_factory=list)  # before blocks were culled
    fusable: bool = False  # linear chains may become one step


def wanted_keys(keys: Any) -> tuple[Key, ...]:
    """The keys in a key, or in nested lists of keys.

    >>> wanted_keys(["a", [("b", 0)]]), wanted_keys(("b", 0))
    (('a', ('b', 0)), (('b', 0),))
    """
    return tuple(flatten(keys)) if isinstance(keys, list) else (keys,)


def layer_of(key: Key) -> str:
    """The name of the layer that a task is of, also of one that Dask has fused with others.

    >>> layer_of(("add-1", 0, 2)), layer_of("add-1_.0_.1"), layer_of("add-1")
    ('add-1', 'add-1', 'add-1')
    """
    name = key[0] if isinstance(key, tuple) else key
    return str(name).split("_.")[0]


def is_plain(dtype: np.dtype[Any]) -> bool:
    """Whether devices have arrays of this dtype."""
    return dtype.kind in "biufc" and dtype.isnative


def is_chunk(task: Any) -> bool:
    return isinstance(task, Task) and type(task.func) is Chunk
