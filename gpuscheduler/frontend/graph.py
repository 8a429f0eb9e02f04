"""The types of a graph: tasks, what they read, and what is known of them."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from copy import copy
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any

import numpy as np
from dask._task_spec import NestedContainer, Task, TaskRef
from dask.array.optimization import GETTERS
from dask.core import flatten
from dask.highlevelgraph import Layer

from ..sparse_parts import is_sparse_type
from ..values import FunctionSet
from .captured import Variable, all_unchanged, content
from .chunk import Chunk
from .compiled_task import Chain, literal
from .task import sequence_of
from .task_node import NO_CONSTANTS, FactView, FlagView, TaskNode

Key = Any
Callback = Callable[[dict[Key, Any]], None]
Compile = Callable[[Any], Callable[[dict[Key, Any]], Any]]

NOTHING: Mapping[str, str] = MappingProxyType({})
PIN = "device"  # dask.annotate(device=k)
#: Types of the arrays that tasks make. NumPy's may be computed on a GPU: code of the user's that is
#: called gets them as NumPy's all the same.
NUMPY, CUPY, RESIDENT = "numpy.ndarray", "cupy.ndarray", "numpy.ndarray on a GPU"
APART = "gpuscheduler-apart"  # on layers that Dask must not fuse with others
#: Dask's functions that read a part of an array, from a file maybe; and all that take parts.
READERS = FunctionSet(*GETTERS)
SLICERS = FunctionSet(*GETTERS, operator.getitem)


@dataclass(frozen=True, slots=True)
class RulePin:
    """The pin of a task whose device a rule says, once it is known how many there are."""

    rule: Any  # has `device_of(key, devices)`, which gives a device or None
    key: Key

    def device(self, devices: int) -> Any:
        found = self.rule.device_of(self.key, devices)
        return int(found) if isinstance(found, np.integer) else found


def is_pin_rule(pin: Any) -> bool:
    """Whether what `dask.annotate(device=...)` got is a rule, such as `Cyclic`."""
    return callable(getattr(pin, "device_of", None))


def read_pin(pin: Any, key: Key) -> Any:
    """The pin of a task that `dask.annotate(device=pin)` means.

    NumPy's integers are numbers, too. What can be no pin is told when the task is placed; until
    then a text stands for what passes could not compare.

    >>> read_pin(np.int64(1), "a"), read_pin(lambda key: 0, "a"), read_pin([1], "a")
    (1, 0, '[1]')
    """
    if is_pin_rule(pin):
        return RulePin(pin, key)
    if callable(pin):
        pin = pin(key)
    if isinstance(pin, np.integer):
        return int(pin)
    try:
        hash(pin)
    except TypeError:
        return repr(pin)
    return pin


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
    kind: str | None = None  # the type of its arrays: NUMPY, CUPY or RESIDENT

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * int(self.dtype.itemsize)

    @property
    def is_sparse(self) -> bool:
        """Whether `nbytes` says nothing, as its zeros are not stored."""
        return is_sparse_type(self.kind)


#: What is known of a value: of an array, of several, or nothing.
Value = BlockInfo | tuple[BlockInfo, ...] | None


@dataclass(slots=True, repr=False)
class Graph:
    """Tasks in execution order, each after everything that it reads.

    All that is known of a task stands in its `TaskNode`. Tasks are changed by `add`, `replace`,
    `rewire`, `note`, `drop`, `merge` and `reorder`, and by nothing else. `tasks`, `needs` and the
    other properties show one fact for all tasks.

    >>> graph = Graph({}, ("b",), ("b",))
    >>> for key, task, needs in (("a", len, ()), ("b", sum, ("a",))):
    ...     _ = graph.add(key, task, needs, size=8)
    >>> graph.needs["b"], dict(graph.sizes)
    (('a',), {'a': 8, 'b': 8})
    >>> graph.rewire("b", (), ())
    >>> _ = graph.drop("a")
    >>> dict(graph.sizes)
    {'b': 8}
    """

    nodes: dict[Key, TaskNode]
    wanted: tuple[Key, ...]  # the keys that the caller asked for
    outputs: tuple[Key, ...]  # tasks and values that they come from
    data: dict[Key, Any] = field(default_factory=dict)  # outputs that are values of the graph
    alias: dict[Key, Key] = field(default_factory=dict)
    gathers: dict[Key, GatherTask] = field(default_factory=dict)
    #: Bytes of values that are inside tasks, as parts of a chain, or that are given to the graph.
    inner_sizes: dict[Key, int] = field(default_factory=dict)
    #: What collections say of such values.
    inner_blocks: dict[Key, BlockInfo] = field(default_factory=dict)
    #: By layer, bytes of the largest value in its first task, of those that Dask has fused there.
    within: dict[str, int] = field(default_factory=dict)
    #: Outputs that are made with others, in one task: that task, and where in its value they are.
    parts: dict[Key, tuple[Key, tuple[int, ...]]] = field(default_factory=dict)
    globals: list[Any] = field(default_factory=list)  # what its functions read elsewhere
    #: Its functions and the variables around them, beside those, and what they were.
    around: tuple[Variable, ...] = ()
    beside: set[Key] = field(default_factory=set)  # names of captured arrays
    #: Arrays in its tasks whose values decide what these do, and what they were.
    values: dict[int, tuple[Any, tuple[bytes, ...]]] = field(default_factory=dict)  # by their ids
    #: Lists and dictionaries in its tasks, what they said, and what that knows by its identity.
    containers: dict[int, tuple[Any, Any, list[Any]]] = field(default_factory=dict)  # by their ids
    gpus: bool = False  # whether it is for GPUs
    #: Whether its arrays are NumPy's, and its kernels compute them on GPUs.
    resident: bool = False
    keep: bool = False  # ... which also keep the outputs
    #: Of such a graph: where NumPy has scalars in outputs of kernels (see `fusion.residency`).
    forms: dict[Key, Any] = field(default_factory=dict)
    #: What the caller calls a wanted key, where the graph was made for others like it.
    called: dict[Key, Key] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<Graph of {len(self.nodes):,} tasks for {len(self.wanted):,} keys>"

    # ---- one fact of all tasks

    @property
    def tasks(self) -> Mapping[Key, Any]:
        return FactView(self.nodes, "task")

    @property
    def needs(self) -> Mapping[Key, tuple[Key, ...]]:
        return FactView(self.nodes, "needs")

    @property
    def names(self) -> Mapping[Key, tuple[Key, ...]]:
        return FactView(self.nodes, "names")

    @property
    def constants(self) -> Mapping[Key, Mapping[Key, Any]]:
        return FactView(self.nodes, "constants")

    @property
    def picks(self) -> Mapping[Key, tuple[tuple[int, ...], ...]]:
        return FactView(self.nodes, "picks")

    @property
    def pins(self) -> Mapping[Key, Any]:
        return FactView(self.nodes, "pin")

    @property
    def sizes(self) -> Mapping[Key, int]:
        """Bytes of values, those inside tasks among them."""
        return FactView(self.nodes, "size", self.inner_sizes)

    @property
    def blocks(self) -> Mapping[Key, BlockInfo]:
        """What collections say of values, those inside tasks among them."""
        return FactView(self.nodes, "block", self.inner_blocks)

    @property
    def reasons(self) -> Mapping[Key, str]:
        return FactView(self.nodes, "why")

    @property
    def operations(self) -> Mapping[Key, int]:
        return FactView(self.nodes, "operations")

    @property
    def products(self) -> Mapping[Key, Any]:
        return FactView(self.nodes, "product")

    @property
    def aside_keys(self) -> Set[Key]:
        return FlagView(self.nodes, "aside")

    @property
    def again_keys(self) -> Set[Key]:
        return FlagView(self.nodes, "again")

    @property
    def sent_keys(self) -> Set[Key]:
        return FlagView(self.nodes, "sent")

    @property
    def store_keys(self) -> Set[Key]:
        return FlagView(self.nodes, "stores")

    @property
    def written_keys(self) -> Set[Key]:
        return FlagView(self.nodes, "written")

    @property
    def lent_keys(self) -> Set[Key]:
        return FlagView(self.nodes, "lent")

    # ---- changes

    def add(
        self,
        key: Key,
        task: Any,
        needs: tuple[Key, ...] = (),
        names: tuple[Key, ...] | None = None,
        constants: Mapping[Key, Any] = NO_CONSTANTS,
        **facts: Any,
    ) -> TaskNode:
        """Add a task behind all others, and return its node. `names` are its `needs` by default."""
        if key in self.nodes:
            raise ValueError(f"the graph has a task {key!r} already")
        node = self.nodes[key] = TaskNode(task, needs, names, constants)
        if key in self.inner_sizes:
            node.size = self.inner_sizes.pop(key)
        if key in self.inner_blocks:
            node.block = self.inner_blocks.pop(key)
        if facts:
            self.note(key, **facts)
        return node

    def put_in_front(self, tasks: Mapping[Key, Any]) -> None:
        """Add tasks that read nothing before all others."""
        behind = list(self.nodes)
        for key, task in tasks.items():
            self.add(key, task)
        self.reorder([*tasks, *behind])

    def replace(self, key: Key, task: Any) -> None:
        """Put another task in the place of one: it reads the same, and makes the same value."""
        self.nodes[key].task = task

    def rewire(
        self,
        key: Key,
        names: tuple[Key, ...],
        needs: tuple[Key, ...],
        constants: Mapping[Key, Any] | None = None,
    ) -> None:
        """Let a task read other values, as a whole; with `constants`, other constants, too."""
        node = self.nodes[key]
        node.names, node.needs = names, needs
        node.__dict__.pop("picks", None)
        if constants is not None:
            self.set_constants(key, constants)

    def set_constants(self, key: Key, constants: Mapping[Key, Any]) -> None:
        """Let a task read other values of the graph as they are, by name."""
        node = self.nodes[key]
        if constants:
            node.constants = constants
        else:
            node.__dict__.pop("constants", None)

    def note(self, key: Key, **facts: Any) -> None:
        """Write down facts about a task, by their names in `TaskNode`. None takes one back."""
        node = self.nodes[key]
        for name, value in facts.items():
            if name not in FACTS:
                raise TypeError(f"a task has no fact {name!r}")
            if value is None:
                node.__dict__.pop(name, None)
            else:
                setattr(node, name, value)

    def drop(self, key: Key) -> TaskNode:
        """Take a task out, with all that is known of it, and return its node."""
        return self.nodes.pop(key)

    def merge(self, groups: Mapping[Key, tuple[Sequence[Key], Any]]) -> None:
        """Put one task in the place of several; its value is the tuple of theirs.

        `groups` has the members and the task of each new key, which stands where the first of its
        members was in the order of the graph. Readers pick their item of the tuple. Where members
        read different tasks, a `reorder` has to follow.
        """
        nodes = self.nodes
        where = {k: (holder, n) for holder, (keys, _) in groups.items() for n, k in enumerate(keys)}
        made = {holder: self._join(keys, task) for holder, (keys, task) in groups.items()}
        self.nodes = {}
        for key, node in nodes.items():
            if key not in where:
                self.nodes[key] = node
            elif (holder := where[key][0]) not in self.nodes:
                self.nodes[holder] = made[holder]
        for node in self.nodes.values():
            if any(d in where for d in node.needs):
                picks = node.picks or ((),) * len(node.needs)
                node.picks = tuple([
                    (where[d][1], *pick) if d in where else pick
                    for d, pick in zip(node.needs, picks, strict=True)
                ])  # fmt: skip
                node.needs = tuple([where[d][0] if d in where else d for d in node.needs])
        self.parts.update({k: (where[k][0], (where[k][1],)) for k in self.outputs if k in where})

    def _join(self, keys: Sequence[Key], task: Any) -> TaskNode:
        """The node of a task that reads what several read."""
        members = [self.nodes[k] for k in keys]
        sources: dict[Key, tuple[Key, tuple[int, ...]]] = {}
        constants: dict[Key, Any] = {}
        for node in members:
            picks = node.picks or ((),) * len(node.names)
            sources.update(zip(node.names, zip(node.needs, picks, strict=True), strict=True))
            constants.update(node.constants)
        needs = tuple([need for need, _ in sources.values()])
        out = TaskNode(task, needs, tuple(sources), constants)
        if any(pick for _, pick in sources.values()):
            out.picks = tuple([pick for _, pick in sources.values()])
        if members[0].pin is not None:
            out.pin = members[0].pin
        out.size = sum([node.size or 0 for node in members])
        return out

    def reorder(self, order: Iterable[Key]) -> None:
        """Put the tasks into another order, which has all of them."""
        nodes = {k: self.nodes[k] for k in order}
        if len(nodes) != len(self.nodes):
            raise ValueError("the order leaves out some tasks")
        self.nodes = nodes

    def pin(self, places: Mapping[Key, int]) -> None:
        """Every task stays where it was placed."""
        for key, node in self.nodes.items():
            if not node.is_data:
                node.pin = places[key]

    def copy(self) -> Graph:
        """Return a graph whose tasks may be changed without changing this one's."""
        return replace(
            self, nodes={k: node.copy() for k, node in self.nodes.items()},
            inner_sizes={**self.inner_sizes}, inner_blocks={**self.inner_blocks},
            parts={**self.parts},
        )  # fmt: skip

    def has_changed(self) -> bool:
        """Whether a global, array, list or dictionary that the tasks have read has changed."""
        if any(where.get(name) is not value for where, name, value in self.globals):
            return True
        if not all_unchanged(self.around):
            return True
        if any(content(array) != before for array, before in self.values.values()):
            return True
        return any(literal(v, []) != words for v, words, _ in self.containers.values())

    def validate(self) -> None:
        """Raise AssertionError where the graph says something of a task that it does not have.

        Or where a task comes before one that it reads.
        """
        seen: set[Key] = set()
        for key, node in self.nodes.items():
            assert len(node.names) == len(node.needs), (key, node.names, node.needs)
            assert len(set(node.names)) == len(node.names), (key, node.names)
            assert len(node.picks) in (0, len(node.needs)), (key, node.picks)
            missing = [d for d in node.needs if d not in seen]
            assert not missing, f"{key!r} reads {missing!r}, which no task before it makes"
            both = set(node.names) & node.constants.keys()
            assert not both, f"{key!r} reads {both!r} as a value of a task and as a constant"
            assert not node.sent or node.is_data or node.aside, f"{key!r} is sent, but not aside"
            assert node.lent <= node.written, f"{key!r} lends what it does not write"
            seen.add(key)
        known = self.nodes.keys() | self.parts.keys() | self.data.keys()
        assert not [k for k in self.outputs if k not in known], "an output has no task"
        gone = [h for h, _ in self.parts.values() if h not in self.nodes]
        assert not gone, f"outputs are parts of {gone!r}, which are gone"
        assert not self.parts.keys() & self.nodes.keys(), "a part is a task as well"
        assert not self.inner_sizes.keys() & self.nodes.keys(), "the size of a task stands twice"
        assert not self.inner_blocks.keys() & self.nodes.keys(), "the block of a task stands twice"
        for gather in self.gathers.values():
            blocks = [self.alias.get(b, b) for b in flatten(gather.blocks)]
            gone = [b for b in blocks if b not in known]
            assert not gone, f"{gather.key!r} gathers {gone!r}, which are gone"

    def __getstate__(self) -> dict[str, Any]:
        """Plain tuples in place of objects, which pickle in a fraction of the time."""
        state = {f.name: getattr(self, f.name) for f in fields(self)}
        state["nodes"] = [
            (k, _row(n.task), n.needs, n.names, _plain_facts(n)) for k, n in self.nodes.items()
        ]
        state["inner_blocks"] = {k: _block_row(b) for k, b in self.inner_blocks.items()}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        state["nodes"] = {
            k: _node(_task(row), needs, names, facts)
            for k, row, needs, names, facts in state["nodes"]
        }
        state["inner_blocks"] = {k: BlockInfo(*b) for k, b in state["inner_blocks"].items()}
        for name, value in state.items():
            setattr(self, name, value)


#: The names of what `Graph.note` writes down.
FACTS = frozenset(TaskNode.__annotations__) - {"task", "needs", "names", "constants", "picks"}


def _plain_facts(node: TaskNode) -> dict[str, Any]:
    facts = node.facts()
    if node.block is not None:
        facts["block"] = _block_row(node.block)
    return facts


def _block_row(block: BlockInfo) -> tuple[Any, ...]:
    return block.shape, block.dtype, block.kind


def _node(
    task: Any, needs: tuple[Key, ...], names: tuple[Key, ...], facts: dict[str, Any]
) -> TaskNode:
    out = TaskNode(task, needs, names)
    if "block" in facts:
        facts["block"] = BlockInfo(*facts["block"])
    out.__dict__.update(facts)
    return out


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
    """Whether devices have arrays of this dtype.

    >>> [is_plain(np.dtype(t)) for t in ("f8", ">f8", "O", np.longdouble)]
    [True, False, False, False]
    """
    return dtype.kind in "biufc" and dtype.isnative and dtype.char not in "gG"


def is_on_gpus(kind: str | None) -> bool:
    """Whether arrays of this kind are made on GPUs.

    >>> is_on_gpus(CUPY), is_on_gpus(RESIDENT), is_on_gpus(NUMPY)
    (True, True, False)
    """
    return kind in (CUPY, RESIDENT)


def is_chunk(task: Any) -> bool:
    return isinstance(task, Task) and type(task.func) is Chunk
