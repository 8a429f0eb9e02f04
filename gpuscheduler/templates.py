"""Plans without names and data: a collection that differs in nothing but these from one that was
planned before is not planned again.

So is each round of an iteration: its arrays have new names, and the same functions do the same to
new blocks. What graphs say is compared layer by layer, as Dask wrote them: a Blockwise layer is one
task, however many blocks it has. What may not mean the same in two graphs (a mutable argument, an
object of a user's class) makes a graph unlike all others.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from types import BuiltinFunctionType, CellType, FunctionType, ModuleType
from typing import Any
from weakref import ref

import numpy as np
from dask import config
from dask._expr import HLGExpr, _HLGExprSequence
from dask._task_spec import Alias, DataNode, GraphNode, NestedContainer, Task, TaskRef
from dask.blockwise import Blockwise
from dask.core import flatten
from dask.highlevelgraph import HighLevelGraph, Layer, MaterializedLayer
from dask.layers import ArrayBlockIdDep, ArrayChunkShapeDep, ArrayOverlapLayer, ArraySliceDep

from .batches import Batch
from .expr import Expr
from .fuse import Fused
from .graph import Graph
from .grid import Tiles
from .persisted import Chunk
from .plan import Plan, Step
from .siblings import Together
from .subgraph import Call, Chain

Key = Any
Home = Callable[[Any], int | None]
Variable = tuple[CellType, Any]  # and what it was when it was read

#: Settings that change what a collection becomes.
SETTINGS = ("optimization.fuse.active", "optimization.annotations.fuse")
#: What is said of a layer's blocks by the chunks of an array alone.
OF_CHUNKS = (ArrayBlockIdDep, ArrayChunkShapeDep, ArraySliceDep, Tiles)
#: Layers of one graph, and tasks of one layer, beyond which reading what they say takes long.
MOST_LAYERS, MOST_TASKS = 2_000, 20_000
#: Whose callable objects do not change once they are made: kernels and compiled functions.
COMPILERS = ("cupy", "numba")
#: Under whose names Dask has functions that were given some arguments, and functions in a row.
TOOLS = ("toolz", "tlz", "cytoolz")

_ATOMS = (bytes, type(Ellipsis), Expr)
_BOUNDS = (int, type(None))


class _Unlike(Exception):
    """A graph says something that may mean another thing in another graph."""


class Words:
    """Words to look up by; there may be many of them, which takes time to hash."""

    __slots__ = ("hash", "words")

    def __init__(self, words: Any):
        self.words, self.hash = words, hash(words)

    def __hash__(self) -> int:
        return self.hash

    def __eq__(self, other: object) -> bool:
        return type(other) is Words and self.words == other.words


@dataclass(frozen=True, slots=True)
class Likeness:
    """What makes two computations alike, and in what they may differ."""

    words: Words  # equal for those that are alike
    names: tuple[str, ...]  # of their layers, in one order
    data: tuple[Any, ...]  # values that are in them, in one order
    around: tuple[Variable, ...]  # variables around their functions


@dataclass(frozen=True, slots=True)
class _Said:
    """What one layer says: with the numbers of its strings, which may be names, and no data."""

    words: Any
    makes: tuple[str, ...]  # the names of its keys
    strings: tuple[str, ...]
    data: tuple[Key, ...]
    around: tuple[Variable, ...]


class Reader:
    """Reads graphs, and remembers their layers as long as these live."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[ref[Layer], _Said | None]] = {}

    def likeness(self, dsk: Any, wanted: tuple[Key, ...], home: Home) -> Likeness | None:
        """What an expression of Dask's is like, computed for these keys; `home` says where its data
        is. None where it is like nothing else.

        >>> import dask.array as da
        >>> from dask._expr import FinalizeCompute
        >>> from dask.base import collections_to_expr
        >>> def words(x):
        ...     expr = FinalizeCompute(collections_to_expr([x])).optimize()
        ...     wanted = tuple(flatten(expr.__dask_keys__()))
        ...     return Reader().likeness(expr, wanted, lambda value: None).words
        >>> x, y = (da.from_array(np.full(4, n), chunks=2) for n in (1, 2))
        >>> words(x + 1) == words(y + 1), words(x + 1) == words(y + 2)
        (True, False)
        """
        if not isinstance(dsk, (_HLGExprSequence, HLGExpr)):
            return None
        try:
            return self._likeness(dsk, wanted, home)
        except (_Unlike, TypeError):  # ... or something cannot be hashed
            return None

    def _likeness(self, dsk: Any, wanted: tuple[Key, ...], home: Home) -> Likeness:
        layers: dict[str, Layer] = {}
        every: list[tuple[Any, list[Key]]] = []
        for op in dsk.operands if isinstance(dsk, _HLGExprSequence) else [dsk]:
            hlg = getattr(op, "hlg", None)
            if not isinstance(hlg, HighLevelGraph):
                raise _Unlike
            if any(layers.get(n, layer) is not layer for n, layer in hlg.layers.items()):
                raise _Unlike  # two layers of one name
            layers.update(hlg.layers)
            kind = type(op), op.low_level_optimizer, len(hlg.layers)
            every.append((kind, list(flatten(op.__dask_keys__()))))
        if len(layers) > MOST_LAYERS:
            raise _Unlike
        said = {name: self._read(layer) for name, layer in layers.items()}
        maker = {made: name for name, s in said.items() for made in s.makes}
        numbers: dict[str, int] = {}
        order: dict[str, _Said] = {}
        stack = [_name(k) for _, ends in reversed(every) for k in reversed(ends)]
        while stack:
            string = stack.pop()
            name = maker.get(string)
            if name is None or string in numbers:
                continue
            numbers[string] = len(numbers)
            if name not in order:
                order[name] = said[name]
                stack += said[name].strings[::-1]
        data = [_value(layers[name][k]) for name, s in order.items() for k in s.data]
        around = [v for s in order.values() for v in s.around]

        def numbered(keys: Collection[Key]) -> tuple[Any, ...]:
            if any(_name(k) not in numbers for k in keys):
                raise _Unlike
            return tuple([(numbers[_name(k)], _index(k)) for k in keys])

        settings = tuple([config.get(s, None) for s in SETTINGS])
        ends = tuple([(kind, numbered(keys)) for kind, keys in every])
        text = tuple(
            [(s.words, tuple([numbers.get(n, n) for n in s.strings])) for s in order.values()]
        )
        words = Words((settings, ends, numbered(wanted), text, _facts(data, home)))
        return Likeness(words, tuple(numbers), tuple(data), tuple(around))

    def _read(self, layer: Layer) -> _Said:
        known = id(layer)
        found = self._known.get(known)
        said = found[1] if found is not None and found[0]() is layer else None
        if found is None or found[0]() is not layer or (said and not same(said.around)):
            try:
                said = _Words().of(layer)
            except (_Unlike, RecursionError):
                said = None
            every = self._known
            found = every[known] = ref(layer, lambda _: every.pop(known, None)), said
        if found[1] is None:
            raise _Unlike
        return found[1]


def _name(key: Key) -> str:
    name = key[0] if type(key) is tuple and key else key
    if type(name) is not str:
        raise _Unlike
    return name


def _index(key: Key) -> Any:
    return key[1:] if type(key) is tuple else None


# ---- what layers say


class _Words:
    """Words for what one layer says, equal for what means the same. Each is a tuple that begins
    with a type, or a type."""

    def __init__(self) -> None:
        self.strings: dict[str, int] = {}
        self.data: list[Key] = []
        self.around: list[Variable] = []
        self.functions: dict[int, tuple[Any, bool]] = {}  # words, and whether it is of Dask
        self.fresh = False  # whether nobody changes the lists and dictionaries that come

    def of(self, layer: Layer) -> _Said:
        facts = self._each(layer.annotations), self._each(layer.collection_annotations)
        if type(layer) is Blockwise:
            if layer.output_blocks is not None:
                raise _Unlike
            makes = [layer.output]
            words: Any = (
                self(layer.output), self(layer.output_indices), self(layer.task),
                self(layer.indices), self._each(layer.numblocks), self._each(layer.new_axes),
                layer.concatenate,
                tuple([(self(k), self._blocks(v)) for k, v in layer.io_deps.items()]),
            )  # fmt: skip
        elif type(layer) is MaterializedLayer and len(layer) <= MOST_TASKS:
            makes = list(dict.fromkeys([_name(k) for k in layer]))
            words = tuple([(self._key(k), self._item(k, v)) for k, v in layer.items()])
        elif type(layer) is ArrayOverlapLayer:
            makes = [f"overlap-{layer.token}"]
            words = (
                self(makes[0]), self(layer.name), self(layer.chunks), self(layer.numblocks),
                self._each(layer.axes),
            )  # fmt: skip
        else:
            raise _Unlike
        said = type(layer), facts, words
        return _Said(said, tuple(makes), tuple(self.strings), tuple(self.data), tuple(self.around))

    def _each(self, facts: Mapping[str, Any] | None) -> Any:
        self.fresh = True
        words = tuple([(self(k), self(v)) for k, v in (facts or {}).items()])
        self.fresh = False
        return words

    def _blocks(self, of: Any) -> Any:
        if type(of) not in OF_CHUNKS:
            raise _Unlike
        return type(of), self(of.chunks)

    def _item(self, key: Key, item: Any) -> Any:
        if _is_data(_value(item)):
            self.data.append(key)
            return Chunk
        self.fresh = not isinstance(item, GraphNode)  # lists are part of a legacy task
        words = self(item)
        self.fresh = False
        return words

    def __call__(self, v: Any) -> Any:
        kind = type(v)
        if kind is int or kind is bool or v is None:
            return kind, v
        if kind is str:
            return str, self.strings.setdefault(v, len(self.strings))
        if kind is tuple or (kind is list and self.fresh):
            return (kind, *[self(x) for x in v])
        if kind is TaskRef or kind is Alias:
            return kind, self._key(v.key if kind is TaskRef else v.target)
        if kind is slice:
            start, stop, step = v.start, v.stop, v.step
            if all(type(n) in _BOUNDS for n in (start, stop, step)):
                return kind, start, stop, step
            return kind, self(start), self(stop), self(step)
        if kind in _ATOMS:
            return kind, v
        if kind is float or kind is complex:
            return kind, repr(v)
        if kind is Task:
            return self._task(v)
        if kind is DataNode:
            return kind, self(v.value)
        if isinstance(v, NestedContainer):
            return (kind, *[self(a) for a in v.args])
        if kind is dict and self.fresh:
            return (kind, *[(self(k), self(x)) for k, x in v.items()])
        return self._object(v, kind)

    def _key(self, key: Key) -> Any:
        """As `self` has it, at once for blocks of arrays."""
        if type(key) is tuple and len(key) > 1:
            name, index = key[0], key[1:]
            if type(name) is str and all(type(n) is int for n in index):
                return self.strings.setdefault(name, len(self.strings)), index
        return self(key)

    def _task(self, task: Task) -> Any:
        before, function = self.fresh, task.func
        known = self.functions.get(id(function))
        if known is None:  # the task keeps it alive
            of_dask = str(getattr(function, "__module__", "")).startswith("dask.")
            known = self.functions[id(function)] = self(function), of_dask
        words, self.fresh = known
        args = [self(a) for a in task.args]
        args += [(k, self(a)) for k, a in task.kwargs.items()]
        self.fresh = before
        return Task, words, task.data_producer, task.block_fusion, tuple(args)

    def _object(self, v: Any, kind: type) -> Any:
        if isinstance(v, np.generic) and not v.dtype.hasobject:
            return kind, v.dtype.str, v.tobytes()
        if isinstance(v, (type, np.dtype)):
            return v
        if kind is np.random.SeedSequence:
            return kind, repr(v)
        if kind is FunctionType and not _has_name(v):
            return self._function(v)
        if kind is BuiltinFunctionType and isinstance(v.__self__, (ModuleType, type(None))):
            return kind, _Same(v)
        if isinstance(v, (np.ufunc, ModuleType)) or _has_name(v):
            return kind, _Same(v)
        root = kind.__module__.partition(".")[0]
        if root in COMPILERS and callable(v):
            return kind, _Same(v)
        if kind is partial or (
            root in TOOLS and kind.__name__ in ("curry", "Compose")
        ):  # nothing changes what these were given
            names = [n for n in ("func", "args", "keywords", "first", "funcs") if hasattr(v, n)]
            before, self.fresh = self.fresh, True
            inner = [self(getattr(v, n)) for n in names]
            self.fresh = before
            return kind, *names, *inner
        if is_dataclass(v) and kind.__dataclass_params__.frozen:  # type: ignore[attr-defined]
            return (kind, *[self(getattr(v, f.name)) for f in fields(v)])
        if root == __name__.partition(".")[0] and hasattr(v, "__dask_tokenize__"):
            return (kind, *[self(x) for x in vars(v).values()])
        raise _Unlike

    def _function(self, f: FunctionType) -> Any:
        """A function that may be made again and again is what it says."""
        if vars(f):
            raise _Unlike
        try:
            around = [(cell, cell.cell_contents) for cell in f.__closure__ or ()]
        except ValueError:  # not bound yet
            raise _Unlike from None
        self.around += around
        inside = tuple([v for _, v in around])
        given = f.__defaults__ or (), tuple((f.__kwdefaults__ or {}).items())
        return FunctionType, f.__code__, _Same(f.__globals__), self(inside), self(given)


def same(around: Iterable[Variable]) -> bool:
    """Whether variables around functions are what they were."""
    try:
        return all(cell.cell_contents is value for cell, value in around)
    except ValueError:  # one is no more
        return False


def _has_name(v: Any) -> bool:
    """Whether it is a function of a module, under its own name."""
    name, module = getattr(v, "__qualname__", None), getattr(v, "__module__", None)
    return callable(v) and vars(sys.modules.get(str(module), sys)).get(str(name)) is v


class _Same:
    """Equal for the very same object, which it keeps alive."""

    __slots__ = ("it",)

    def __init__(self, it: Any):
        self.it = it

    def __eq__(self, other: object) -> bool:
        return type(other) is _Same and self.it is other.it

    def __hash__(self) -> int:
        return id(self.it)


# ---- their data


def _value(item: Any) -> Any:
    """The value that an item of a layer is, where it is one."""
    if isinstance(item, Task) and type(item.func) is Chunk:
        return item.func
    return item.value if type(item) is DataNode else item


def _is_data(value: Any) -> bool:
    """Whether it is a value that tasks are handed, whatever is in it."""
    kind = type(value)
    if kind is Chunk or kind is np.ndarray:
        return True
    return kind.__name__ == "ndarray" and kind.__module__.partition(".")[0] == "cupy"


def _facts(data: list[Any], home: Home) -> tuple[Any, ...]:
    """What a plan takes from data: where it is, what it is like, and what of it is the same."""
    first: dict[int, int] = {}
    out = []
    for n, value in enumerate(data):
        place = home(value)
        if type(value) is Chunk:
            if place is None:  # another scheduler's
                raise _Unlike
            facts = value.nbytes, _layout(value.shown())
        else:
            facts = -1, _layout(value)
        out.append((first.setdefault(id(value), n), place, facts))
    return tuple(out)


def _layout(value: Any) -> Any:
    if value is None:
        return None
    if not _is_data(value) or value.dtype.hasobject:
        raise _Unlike
    return type(value), value.dtype, value.shape, value.strides


# ---- plans


@dataclass(slots=True)
class Template:
    """A plan without data."""

    graph: Graph
    plan: Plan
    names: tuple[str, ...]
    #: For steps that have data, where: `True` for a value of the graph, `False` for the argument of
    #: a task that sends it, the names of constants, and the chunks of a batch.
    holes: dict[int, list[tuple[Any, int]]]
    around: tuple[Variable, ...]

    def holds(self) -> bool:
        """Whether all that it was made of, beside the graph, is what it was."""
        return same(self.around) and not self.graph.changed()

    def filled(self, like: Likeness, wanted: tuple[Key, ...]) -> tuple[Graph, Plan]:
        """The plan of a computation that is like the one it was made of."""
        names = dict(zip(self.names, like.names, strict=True))
        data, holes, steps = like.data, self.holes, []
        for i, s in enumerate(self.plan.steps):
            key, task, constants = _called(s.key, names), s.task, s.constants
            if type(task) is Batch:
                task = Batch(task.key, task.members, task.fixed, _chunks_of(holes.get(i, ()), data))
            elif i in holes:
                constants = dict(constants)
                for where, n in holes[i]:
                    if where is True:
                        task = DataNode(key, data[n])
                    elif where is False:
                        assert isinstance(task, Task)
                        task = Task(key, task.func, data[n])
                    else:
                        constants[where] = data[n]
            steps.append(
                Step(
                    key,
                    task,
                    s.inputs,
                    s.names,
                    s.sources,
                    constants,
                    s.place,
                    s.nbytes,
                    s.known,
                    s.seconds,
                    s.kind,
                    s.fixed,
                    s.picks,
                    s.aside,
                    s.again,
                    s.sent,
                )  # fmt: skip
            )
        plan = replace(self.plan, steps=steps, template=self.plan)
        for fact in ("readers", "crossing", "launches", "types", "fixed"):
            plan.__dict__[fact] = getattr(self.plan, fact)
        graph = self.graph
        called = {t: _called(t, names) for w in graph.wanted if (t := graph.alias.get(w))}
        called.update(zip(graph.wanted, wanted, strict=True))
        return replace(graph, called=called), plan


def _called(key: Key, names: Mapping[str, str]) -> Key:
    if type(key) is tuple and key and key[0] in names:
        return (names[key[0]], *key[1:])
    if type(key) is Together:
        return Together(tuple([_called(k, names) for k in key.keys]))
    return names.get(key, key) if type(key) is str else key


def _chunks_of(holes: Iterable[tuple[Any, int]], data: tuple[Any, ...]) -> tuple[Chunk, ...]:
    return tuple([data[n] for where, n in holes if where is Chunk])


def template(graph: Graph, plan: Plan, like: Likeness) -> Template | None:
    """What is left of a plan without its data; None where that cannot be told apart."""
    if graph.data:
        return None
    number: dict[int, int] = {}
    for n, value in enumerate(like.data):
        number.setdefault(id(value), n)
    steps, holes = [], {}
    for i, step in enumerate(plan.steps):
        task = step.task
        found: list[tuple[Any, int]] = []
        if type(task) is DataNode:
            if id(task.value) not in number:
                return None
            found.append((True, number[id(task.value)]))
            task = DataNode(step.key, None)
        elif (
            step.sent and type(task) is Task and len(task.args) == 1 and id(task.args[0]) in number
        ):
            found.append((False, number[id(task.args[0])]))
            task = Task(step.key, task.func, None)
        elif type(task) is Batch:
            if any(id(c) not in number for c in task.chunks):
                return None
            found += [(Chunk, number[id(c)]) for c in task.chunks]
            task = Batch(task.key, task.members, task.fixed)
        if _holds(task, number):
            return None
        constants = dict(step.constants)
        for name, value in step.constants.items():
            if _is_data(value):
                if id(value) not in number:
                    return None
                found.append((name, number[id(value)]))
                constants[name] = None
        if found:
            holes[i] = found
            step = replace(step, task=task, constants=constants)
        steps.append(step)
    rest: dict[str, Any] = dict.fromkeys(("tasks", "needs", "names", "constants", "blocks"), {})
    bare = replace(plan, steps=steps, predicted=None)
    return Template(replace(graph, **rest), bare, like.names, holes, like.around)


def _holds(task: Any, number: Mapping[int, int]) -> bool:
    """Whether a task has data among its arguments."""
    if type(task) is Chain:
        return any(_holds(t, number) for _, t in task.tasks)
    if type(task) is Fused:
        return _holds(task.original, number)
    if type(task) is Batch:
        return any(_holds(t, number) for t in task.members)
    if type(task) is Call:
        return any(id(a) in number or _holds(a, number) for a in task.args)
    if isinstance(task, DataNode):
        return id(task.value) in number
    if isinstance(task, NestedContainer):
        return any(id(a) in number or _holds(a, number) for a in task.args)
    if isinstance(task, Task):
        every = [*task.args, *task.kwargs.values()]
        return any(id(a) in number or _holds(a, number) for a in every)
    return False
