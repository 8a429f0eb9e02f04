"""Plans without names and data: a collection that differs in nothing but these from one that was
planned before is not planned again.

So is each round of an iteration: its arrays have new names, and the same functions do the same to
new blocks. What graphs say is compared layer by layer, as Dask wrote them: a Blockwise layer is one
task, however many blocks it has. What may not mean the same in two graphs (a mutable argument, an
object of a user's class) makes a graph unlike all others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import WRAPPER_ASSIGNMENTS, partial
from operator import getitem, is_not
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any
from weakref import ref

import numpy as np
from dask import config
from dask._expr import HLGExpr, _HLGExprSequence
from dask._task_spec import Alias, DataNode, GraphNode, NestedContainer, Task, TaskRef
from dask.array.core import load_store_chunk
from dask.array.optimization import optimize as optimize_array
from dask.blockwise import Blockwise
from dask.core import flatten
from dask.highlevelgraph import HighLevelGraph, Layer, MaterializedLayer
from dask.layers import (
    ArrayBlockIdDep,
    ArrayChunkShapeDep,
    ArrayOverlapLayer,
    ArraySliceDep,
    ArrayValuesDep,
)  # fmt: skip
from dask.utils import Dispatch, apply, methodcaller

from .batches import Batch
from .expr import Expr
from .fuse import Fused, OrNone, Picked
from .graph import FRESH, Graph, Variable, content, is_chunk, made_of, same, unchanged
from .grid import Tiles
from .persisted import Chunk
from .plan import Plan, Step
from .reading import Cells, variables_written
from .rebuilt import TASKS, attributes_of, has_name, swapped
from .siblings import Together
from .subgraph import COMPILED

Key = Any
Home = Callable[[Any], int | None]

#: Settings that change what a collection becomes.
SETTINGS = ("optimization.fuse.active", "optimization.annotations.fuse")
#: What is said of a layer's blocks by the chunks of an array alone.
OF_CHUNKS = (ArrayBlockIdDep, ArrayChunkShapeDep, ArraySliceDep, Tiles)
#: Layers of one graph beyond which reading what they say takes long, and tasks of one layer, for
#: which there is about room in `MOST_WORDS`. (To read takes 16 microseconds a task, on two shared
#: CPU cores: 1.6 s for an array of 100,000 blocks; to plan it takes 300 and more. A sum of 60,000
#: blocks like one before it took 10 s there, and planned anew 28.)
MOST_LAYERS, MOST_TASKS = 2_000, 200_000
#: Words of one layer, and length of one string, and bytes of one array that is told by its values.
MOST_WORDS, LONGEST, LARGEST = 1_000_000, 1_000, 65_536
#: Whose functions change no list, dictionary or array that they are handed beside their blocks.
TRUSTED = ("cupy", "cupyx", "dask", "numpy", "scipy", __name__.partition(".")[0])
#: Whose callable objects do not change once they are made: kernels and compiled functions.
COMPILERS = ("cupy", "numba")
#: How the names begin under which Dask has the numbers of what it takes from arrays.
LISTS = ("shuffle-taker-", "shuffle-sorter-")
#: What `functools.wraps` writes to a function, which does not read it.
WRAPPED = {*WRAPPER_ASSIGNMENTS, "__wrapped__"}
#: Under whose names Dask has functions that were given some arguments, and functions in a row.
TOOLS = ("toolz", "tlz", "cytoolz")

#: Tasks that send an array to a device.
SENDERS = (unchanged, np.ascontiguousarray)
_ATOMS = (type(Ellipsis), Expr)
_BOUNDS = (int, type(None))
#: What a list or a dictionary in a task may be: anybody's, who may change it; read by functions
#: that do not, so that it only has to be watched; or seen by nobody but such functions.
_ANYBODYS, _WATCHED, _FRESH = range(3)


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
    around: tuple[Variable, ...]  # their functions, and the variables around these
    size: int  # of the words


@dataclass(frozen=True, slots=True)
class _Said:
    """What one layer says: with numbers for names, and no data."""

    words: Any
    makes: tuple[str, ...]  # the names of its keys
    names: tuple[str, ...]  # where keys may stand
    plain: frozenset[str]  # strings elsewhere
    data: tuple[Key, ...]
    inside: tuple[Any, ...]  # arrays in its task
    around: tuple[Variable, ...]
    size: int  # of the words


class Reader:
    """Reads graphs, and remembers their layers as long as these live."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[ref[Layer], _Said | None, Items]] = {}

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
        except Exception:  # it may also be of a class that does not let itself be looked at
            return None

    def _likeness(self, dsk: Any, wanted: tuple[Key, ...], home: Home) -> Likeness:
        layers: dict[str, Layer] = {}
        every: list[tuple[Any, list[Key]]] = []
        for op in dsk.operands if isinstance(dsk, _HLGExprSequence) else [dsk]:
            hlg = getattr(op, "hlg", None)
            if not isinstance(hlg, HighLevelGraph) or len(hlg.layers) > MOST_LAYERS:
                raise _Unlike
            if op.low_level_optimizer is not optimize_array:
                raise _Unlike  # whose optimisation may put data into its tasks
            if any(layers.get(n, layer) is not layer for n, layer in hlg.layers.items()):
                raise _Unlike  # two layers of one name
            layers.update(hlg.layers)
            kind = type(op), len(hlg.layers)
            every.append((kind, list(flatten(op.__dask_keys__()))))
        said = {name: self._read(layer) for name, layer in layers.items()}
        maker = {made: name for name, s in said.items() for made in s.makes}
        if any(not s.plain.isdisjoint(maker) for s in said.values()):
            raise _Unlike  # whether it is a name there, or a string
        numbers: dict[str, int] = {}
        order: dict[str, _Said] = {}
        stack = [_name_of(k) for _, ends in reversed(every) for k in reversed(ends)]
        while stack:
            string = stack.pop()
            name = maker.get(string)
            if name is None or string in numbers:
                continue
            numbers[string] = len(numbers)
            if name not in order:
                order[name] = said[name]
                stack += said[name].names[::-1]
        data = [_value(layers[name][k]) for name, s in order.items() for k in s.data]
        data += [array for s in order.values() for array in s.inside]
        around = [v for s in order.values() for v in s.around]
        held = {id(v) for v in data}
        if any(type(v) is np.ndarray and id(v) in held for v, _ in around):
            raise _Unlike  # an array that is told by its values, and is data elsewhere

        def numbered(keys: Collection[Key]) -> tuple[Any, ...]:
            if any(_name_of(k) not in numbers for k in keys):
                raise _Unlike
            return tuple([(numbers[_name_of(k)], _index_of(k)) for k in keys])

        settings = tuple([config.get(s, None) for s in SETTINGS])
        ends = tuple([(kind, numbered(keys)) for kind, keys in every])
        text = tuple(
            [(s.words, tuple([numbers.get(n, n) for n in s.names])) for s in order.values()]
        )
        words = Words((settings, ends, numbered(wanted), text, _facts(data, home)))
        size = sum([s.size for s in order.values()])
        return Likeness(words, tuple(numbers), tuple(data), tuple(around), size)

    def _read(self, layer: Layer) -> _Said:
        every, known = self._known, id(layer)
        watched, said, items = every.get(known, (None, None, None))
        if (
            watched is None
            or watched() is not layer
            or (said and not same(said.around))
            or not has_items(layer, items)
        ):
            try:
                said = _Words().of(layer)
            except Exception:  # as above
                said = None
            gone = ref(layer, lambda _: every.pop(known, None))
            every[known] = gone, said, items_of(layer)
        if said is None:
            raise _Unlike
        return said


#: What is in a layer that somebody may have made of a dictionary, and may write to.
Items = tuple[Any, ...] | None


def items_of(layer: Any) -> Items:
    """None of others, and of those that `persist` makes."""
    if type(layer) is not MaterializedLayer:
        return None
    values = layer.mapping.values()
    return None if is_chunk(next(iter(values), None)) else tuple(values)


def has_items(layer: Any, items: Items) -> bool:
    """Whether these are what is in it still."""
    if items is None:
        return True
    return len(items) == len(layer.mapping) and not any(map(is_not, layer.mapping.values(), items))


def _name_of(key: Key) -> str:
    name = key[0] if type(key) is tuple and key else key
    if type(name) is not str:
        raise _Unlike
    return name


def _index_of(key: Key) -> Any:
    return key[1:] if type(key) is tuple else None


# ---- what layers say


class _Words:
    """Words for what one layer says, equal for what means the same. Each is a tuple that begins
    with a type, or a type. A name has a number where a key may stand, and nowhere else."""

    def __init__(self) -> None:
        self.names: dict[str, int] = {}
        self.plain: set[str] = set()  # strings that are none
        self.data: list[Key] = []
        self.inside: list[Any] = []
        self.one = False  # whether arrays here can be data: it is one task for all blocks
        self.around: list[Variable] = []
        self.functions: dict[int, tuple[Any, bool]] = {}  # words, and whether it is `FRESH`
        self.lists = _ANYBODYS  # what the lists and dictionaries that come are
        self.watched: set[int] = set()  # ids of these, and of arrays
        self.left = MOST_WORDS

    def of(self, layer: Layer) -> _Said:
        facts = self._each(layer.annotations), self._each(layer.collection_annotations)
        if type(layer) is Blockwise:
            if layer.output_blocks is not None:
                raise _Unlike
            makes, self.one = [layer.output], True
            words: Any = (
                self._name(layer.output), self(layer.output_indices), self(layer.task),
                tuple([self._argument(a, i) for a, i in layer.indices]), layer.concatenate,
                tuple([(self._name(k), self(v)) for k, v in layer.numblocks.items()]),
                self._each(layer.new_axes),
                tuple([(self._name(k), self._blocks(v)) for k, v in layer.io_deps.items()]),
            )  # fmt: skip
        elif type(layer) is MaterializedLayer and len(layer) <= MOST_TASKS:
            makes = list(dict.fromkeys([_name_of(k) for k in layer]))
            words = tuple([(self._key(k), self._item(k, v)) for k, v in layer.items()])
        elif type(layer) is ArrayOverlapLayer:
            makes = [f"overlap-{layer.token}"]
            words = (
                self._name(makes[0]), self._name(layer.name), self(layer.chunks),
                self(layer.numblocks), tuple([(k, self(v)) for k, v in layer.axes.items()]),
            )  # fmt: skip
        else:
            raise _Unlike
        return _Said(
            (type(layer), facts, words), tuple(makes), tuple(self.names), frozenset(self.plain),
            tuple(self.data), tuple(self.inside), tuple(self.around),
            MOST_WORDS - self.left + len(self.data),
        )  # fmt: skip

    def _each(self, facts: Mapping[str, Any] | None) -> Any:
        """Of what Dask says of a layer, which no function gets."""
        self.lists = _FRESH
        words = tuple([(k, self(v)) for k, v in (facts or {}).items()])
        self.lists = _ANYBODYS
        return words

    def _blocks(self, of: Any) -> Any:
        if type(of) is ArrayValuesDep and type(of.values) is dict:
            values = tuple([(self(k), self(v)) for k, v in of.values.items()])
            return type(of), self(of.chunks), values
        if type(of) not in OF_CHUNKS:
            raise _Unlike
        return type(of), self(of.chunks)

    def _argument(self, argument: Any, index: Any) -> Any:
        """An argument of a Blockwise layer: the name of an array, with the axes of its blocks."""
        return (self(argument) if index is None else self._name(argument)), self(index)

    def _item(self, key: Key, item: Any) -> Any:
        if _is_data(_value(item)):
            self.data.append(key)
            return Chunk
        if type(item) is DataNode and _name_of(key).startswith(LISTS):
            self.lists = _WATCHED
            words, self.lists = self(item), _ANYBODYS
            return words
        return self(item) if isinstance(item, GraphNode) else self._legacy(item)

    def _legacy(self, item: Any) -> Any:
        """A task as a tuple, or what is in one: lists in it are of keys and of tasks."""
        if type(item) is tuple and item and callable(item[0]):
            before, words = self.lists, self._calls(item[0], item[1:])
            out = tuple, words, *[self._legacy(a) for a in item[1:]]
            self.lists = before
            return out
        if type(item) is tuple and item and type(item[0]) is str:
            return TaskRef, self._key(item)
        if type(item) is list:  # Dask makes another of it
            if not self.lists and not all(type(x) in (list, tuple) for x in item):
                raise _Unlike
            return (list, *[self._legacy(x) for x in item])
        return self(item)

    def _name(self, name: Any) -> int:
        if type(name) is not str:
            raise _Unlike
        return self.names.setdefault(name, len(self.names))

    def _key(self, key: Key) -> Any:
        if type(key) is str:
            return self._name(key)
        if type(key) is not tuple or not key:
            raise _Unlike
        name, index = key[0], key[1:]
        for n in index:
            if type(n) is str:
                self.plain.add(n)
            elif not isinstance(n, (int, float, np.integer)):
                raise _Unlike
        return self._name(name), index

    def __call__(self, v: Any) -> Any:
        kind = type(v)
        self.left -= 1
        if self.left < 0:
            raise _Unlike
        if kind is int or kind is bool or v is None:
            return kind, v
        if kind is str or kind is bytes:
            if len(v) > LONGEST:
                raise _Unlike
            if kind is str:
                self.plain.add(v)
            return kind, v
        if kind is tuple:
            return (kind, *[self(x) for x in v])
        if kind is list and self.lists:
            self._watch(v)
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
        if kind is dict and self.lists:
            self._watch(v)
            return (kind, *[(self(k), self(x)) for k, x in v.items()])
        return self._object(v, kind)

    def _task(self, task: Task) -> Any:
        before, words = self.lists, self._calls(task.func, (*task.args, *task.kwargs.values()))
        args = [self(a) for a in task.args]
        args += [(k, self(a)) for k, a in task.kwargs.items()]
        self.lists = before
        return Task, words, task.data_producer, task.block_fusion, tuple(args)

    def _calls(self, function: Any, args: Sequence[Any]) -> Any:
        """Words for a function; what comes next are its arguments."""
        words, fresh = self._called(function)
        if function is apply and args:
            function, args = args[0], args[1:]
        watched = _WATCHED if _trusted(function) and all(map(_harmless, args)) else _ANYBODYS
        self.lists = _FRESH if fresh else watched
        return words

    def _watch(self, it: Any) -> None:
        if self.lists is _WATCHED and id(it) not in self.watched:  # the layer keeps it alive
            self.watched.add(id(it))
            self.around.append((it, made_of(it)))

    def _called(self, function: Any) -> tuple[Any, bool]:
        found = self.functions.get(id(function))  # the task keeps it alive
        if found is None:
            if function is load_store_chunk:
                raise _Unlike  # what it writes to may be what others read
            fresh, before = any(function is f for f in FRESH), len(self.inside)
            words = self._object(function, type(function))
            # its arrays are among the data once: which function is called again counts, too
            again = (_Slot, len(self.functions)) if len(self.inside) > before else words
            self.functions[id(function)] = again, fresh
            return words, fresh
        return found

    def _object(self, v: Any, kind: type) -> Any:
        before, lists = (self.lists, self.one), self.lists
        self.lists = _ANYBODYS  # what is in it may be anybody's
        words = self._parts(v, kind, lists)
        self.lists, self.one = before
        return words

    def _parts(self, v: Any, kind: type, lists: int) -> Any:
        if self.one and kind is not Chunk and _is_data(v):
            self.inside.append(v)
            return _Slot
        if kind is not Chunk and _is_data(v) and not v.size:  # it says of which kind others are
            return kind, v.dtype, v.shape
        if lists and kind is np.ndarray and v.nbytes <= LARGEST and not v.dtype.hasobject:
            self.lists = _WATCHED  # its values count, and somebody may write to it
            self._watch(v)
            self.left -= v.nbytes // 8
            return kind, v.dtype, v.shape, v.strides, v.tobytes()
        if isinstance(v, np.void):  # a record, which is a part of its array
            raise _Unlike
        if isinstance(v, np.generic):
            return kind, v.dtype, v.tobytes()
        if isinstance(v, np.dtype):
            return v, _char(v)
        if isinstance(v, type):
            return v
        if kind is np.random.SeedSequence:  # NumPy shortens what it says of long ones
            return kind, repr(v), v.pool.tobytes()
        if kind is FunctionType and not has_name(v):
            return self._function(v)
        if kind is BuiltinFunctionType and isinstance(v.__self__, (ModuleType, type(None))):
            return kind, Same(v)
        if isinstance(v, (np.ufunc, ModuleType)) or has_name(v):
            return kind, Same(v)
        root = kind.__module__.partition(".")[0]
        if root in COMPILERS and callable(v):
            return kind, Same(v)
        if kind is Dispatch:
            return kind, Same(v)
        if kind is methodcaller:
            return kind, v.method
        curried = root in TOOLS and kind.__name__ == "curry"
        if kind is partial or curried:
            self.one = self.one and not curried  # nobody puts others in there
            if kind is partial and vars(v):
                raise _Unlike  # which others may ask for
            self.around.append((v, made_of(v)))
            words = self._calls(v.func, (*v.args, *v.keywords.values()))
            named = {**v.keywords}
            if _trusted(v.func) and _is_data(like := named.get("like")):
                named["like"] = type(like)  # all that NumPy and Dask take from it
            return kind, words, self(v.args), *[(k, self(x)) for k, x in named.items()]
        self.one = False  # nobody puts others in there
        if root in TOOLS and kind.__name__ == "Compose":
            return kind, self(v.first), self(tuple(v.funcs))
        if root == __name__.partition(".")[0]:
            if is_dataclass(v) and kind.__dataclass_params__.frozen:  # type: ignore[attr-defined]
                return (kind, *[self(getattr(v, f.name)) for f in fields(v)])
            if hasattr(v, "__dask_tokenize__"):
                return (kind, *[self(x) for x in vars(v).values()])
        raise _Unlike

    def _function(self, f: FunctionType) -> Any:
        """A function that may be made again and again is what it says."""
        if vars(f).keys() - WRAPPED or variables_written(f.__code__):
            raise _Unlike  # whose variables they are counts
        try:
            around = [(cell, made_of(cell)) for cell in f.__closure__ or ()]
        except ValueError:  # not bound yet
            raise _Unlike from None
        self.around += [(f, made_of(f)), *around]
        inside = tuple([v for _, (v,) in around])
        given = f.__defaults__ or (), tuple((f.__kwdefaults__ or {}).items())
        others = tuple(f.__annotations__.items()), vars(f).get("__wrapped__")
        about = f.__name__, f.__qualname__, f.__doc__, self(others)  # what may be asked of it
        return FunctionType, f.__code__, Same(f.__globals__), self(inside), self(given), about


def _trusted(f: Any) -> bool:
    """Whether a function changes no list or dictionary that it gets, and keeps none."""
    if type(f) is partial or type(f).__name__ == "curry":
        return _trusted(f.func) and all(map(_harmless, (*f.args, *f.keywords.values())))
    if type(f).__name__ == "Compose":
        return _trusted(f.first) and all(map(_trusted, f.funcs))
    if isinstance(f, np.ufunc) or type(f) is Dispatch or f is getitem:
        return True
    if type(f) is FunctionType and not has_name(f):  # made around others
        around = [v for c in f.__closure__ or () for v in made_of(c)]
        space = f.__globals__.get("__name__")
        return _root(space) in TRUSTED and all(map(_harmless, around))
    return has_name(f) and _root(f.__module__) in TRUSTED and f is not apply


def _harmless(v: Any) -> bool:
    """Whether nothing in an argument is a function that could change lists."""
    if type(v) in (list, tuple) or isinstance(v, NestedContainer):
        return all(map(_harmless, v.args if isinstance(v, NestedContainer) else v))
    if type(v) is dict:
        return all(map(_harmless, v.values()))
    if type(v) is Task:
        return _trusted(v.func) and all(map(_harmless, (*v.args, *v.kwargs.values())))
    return not callable(v) or isinstance(v, (GraphNode, TaskRef, type)) or _trusted(v)


def _root(module: Any) -> str:
    return str(module).partition(".")[0]


class Same:
    """Equal for the very same object, which it keeps alive."""

    __slots__ = ("it",)

    def __init__(self, it: Any):
        self.it = it

    def __eq__(self, other: object) -> bool:
        return type(other) is Same and self.it is other.it

    def __hash__(self) -> int:
        return id(self.it)


# ---- their data


def _value(item: Any) -> Any:
    """The value that an item of a layer is, where it is one."""
    if is_chunk(item):
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
        place, shown, moves = home(value), value, type(value) is Chunk
        if moves:
            if place is None:  # another scheduler's
                raise _Unlike
            shown = value.shown()
        facts = moves, value.nbytes, _layout(shown)
        out.append((first.setdefault(id(value), n), place, facts))
    return tuple(out)


def _layout(value: Any) -> Any:
    if value is None:
        return None
    if not _is_data(value) or value.dtype.hasobject:
        raise _Unlike
    return type(value), value.dtype, _char(value.dtype), value.shape, value.strides


def _char(dtype: np.dtype[Any]) -> str:
    """What one type may have and another not that is equal to it."""
    if dtype.metadata:
        raise _Unlike
    return dtype.char


# ---- plans


@dataclass(frozen=True, slots=True)
class _Slot:
    """Stands for an array in a task."""

    number: int  # among all data


@dataclass(frozen=True, slots=True)
class _Filled:
    """A task with arrays where it has slots: they are put there when it is called."""

    task: Callable[[dict[Key, Any]], Any]
    data: Sequence[Any]

    def __call__(self, values: dict[Key, Any]) -> Any:
        return _filled(self.task, self.data, {})(values)


@dataclass(slots=True, repr=False)
class Template:
    """A plan without data. What is missing in a step has its number among all data."""

    graph: Graph
    plan: Plan
    names: tuple[str, ...]
    own: dict[int, list[int]]  # in the tasks of steps
    constants: dict[int, dict[Key, int]]  # among what steps read as it is
    slots: set[int]  # steps whose tasks have some
    values: dict[int, tuple[bytes, ...]]  # of arrays in tasks, where these decide what tasks do
    around: tuple[Variable, ...]

    def __repr__(self) -> str:
        return f"<Template of {self.plan!r}>"

    def holds(self) -> bool:
        """Whether all that it was made of, beside the graph, is what it was."""
        return same(self.around) and not self.graph.changed()

    def fits(self, like: Likeness) -> bool:
        """Whether the arrays of such a computation have the values that the plan was made for."""
        return all(content(like.data[n]) == before for n, before in self.values.items())

    def filled(self, like: Likeness, wanted: tuple[Key, ...]) -> tuple[Graph, Plan]:
        """The plan of a computation that is like the one it was made of."""
        names = dict(zip(self.names, like.names, strict=True))
        data, steps = like.data, []
        known: dict[int, Any] = {}
        for i, s in enumerate(self.plan.steps):
            key, constants = _renamed(s.key, names), s.constants
            own = [data[n] for n in self.own.get(i, ())]
            task: Any = s.task
            if i in self.slots:
                task = _with_arrays(task, data, known)
            if type(task) is Batch:  # it remembers where its arrays were
                task = Batch(task.key, task.members, task.fixed, tuple(own))
            elif own:
                task = DataNode(key, *own) if type(task) is DataNode else Task(key, task.func, *own)
            if i in self.constants:
                missing = self.constants[i]
                constants = {**constants, **{k: data[n] for k, n in missing.items()}}
            steps.append(Step(
                key, task, s.inputs, s.names, s.sources, constants, s.place, s.nbytes, s.known,
                s.seconds, s.kind, s.fixed, s.picks, s.aside, s.again, s.sent,
            ))  # fmt: skip
        plan = replace(self.plan, steps=steps, template=self.plan)
        for fact in ("readers", "crossing", "launches", "types", "fixed"):
            plan.__dict__[fact] = getattr(self.plan, fact)
        graph = self.graph
        called = {t: _renamed(t, names) for w in graph.wanted if (t := graph.alias.get(w))}
        called.update(zip(graph.wanted, wanted, strict=True))
        values = {id(data[n]): (data[n], before) for n, before in self.values.items()}
        values.update(graph.values)
        around = like.around + self.around
        return replace(graph, called=called, around=around, values=values), plan


def _renamed(key: Key, names: Mapping[str, str]) -> Key:
    if type(key) is tuple and key and key[0] in names:
        return (names[key[0]], *key[1:])
    if type(key) is Together:
        return Together(tuple([_renamed(k, names) for k in key.keys]))
    return names.get(key, key) if type(key) is str else key


def template(graph: Graph, plan: Plan, like: Likeness) -> Template | None:
    """What is left of a plan without its data; None where that cannot be told apart."""
    if graph.data:
        return None
    number: dict[int, int] = {}
    for n, value in enumerate(like.data):
        number.setdefault(id(value), n)
    steps = []
    every_own: dict[int, list[int]] = {}
    every_constant: dict[int, dict[Key, int]] = {}
    slots, known = set(), dict[int, Any]()
    seen: set[int] = set()
    for i, step in enumerate(plan.steps):
        task: Any = step.task
        own: list[Any] = []
        others = step.key in graph.beside  # it may be an array of a module's
        if type(task) is DataNode and (not others or id(task.value) in number):
            own, task = [task.value], DataNode(step.key, None)
        elif step.sent and type(task) is Task and task.func in SENDERS:
            if not others or id(task.args[0]) in number:
                own, task = [*task.args], Task(step.key, task.func, None)
        else:
            if type(task) is Batch and task.chunks:
                own, task = [*task.chunks], Batch(task.key, task.members, task.fixed)
            emptied = _emptied(task, number, known)
            if emptied is not task:
                slots.add(i)
                task = emptied
        constants = {
            k: v
            for k, v in step.constants.items()
            if _is_data(v) and (k not in graph.beside or id(v) in number)
        }
        if any(id(v) not in number for v in (*own, *constants.values())):
            return None
        if _holds(task, number, seen):
            return None
        if own:
            every_own[i] = [number[id(v)] for v in own]
        if constants:
            every_constant[i] = {k: number[id(v)] for k, v in constants.items()}
        if own or constants or i in slots:
            rest = {k: v for k, v in step.constants.items() if k not in constants}
            step = replace(step, task=task, constants=rest)
        steps.append(step)
    # what functions read in a module stays, whatever data it is in this round
    if any(type(g[0]) is not Cells and _holds(g[2], number, seen) for g in graph.globals):
        return None
    less: dict[str, Any] = dict.fromkeys(("tasks", "needs", "names", "constants", "blocks"), {})

    def stays(value: Any) -> bool:
        """Whether it has no data in it: otherwise tasks have other variables by now."""
        return _emptied(value, number, known) is value

    less["globals"] = [g for g in graph.globals if type(g[0]) is not Cells or stays(g[2])]
    around = [v for v in (*like.around, *graph.around) if stays(v)]
    less["around"] = ()
    less["values"] = {k: v for k, v in graph.values.items() if k not in number}
    less["containers"] = {}  # nobody changes those of what is like something else
    values = {number[k]: before for k, (_, before) in graph.values.items() if k in number}
    return Template(
        replace(graph, **less), replace(plan, steps=steps, predicted=None), like.names, every_own,
        every_constant, slots, values, tuple(around),
    )  # fmt: skip


# ---- arrays in tasks


def _emptied(task: Any, number: Mapping[int, int], known: dict[int, Any]) -> Any:
    """The task with slots in place of data; itself where there is none."""

    if type(task) is Batch:
        members = [_emptied(t, number, known) for t in task.members]
        same = not any(map(is_not, members, task.members))
        return task if same else Batch(task.key, members, task.fixed)

    def swap(it: Any) -> Any:
        n = number.get(id(it))
        return it if n is None or not _is_data(it) else _Slot(n)

    return swapped(task, swap, known)


def _filled(task: Any, data: Sequence[Any], known: dict[int, Any]) -> Any:
    return swapped(task, lambda it: data[it.number] if type(it) is _Slot else it, known)


def _with_arrays(task: Any, data: Sequence[Any], known: dict[int, Any]) -> Any:
    """The task with arrays in its slots. What is a program reads them with its other arrays; only
    where it is not computed as one, it needs them in there."""
    if type(task) is Batch:
        return Batch(task.key, [_with_arrays(t, data, known) for t in task.members], task.fixed)
    if type(task) is Fused:
        return Fused(
            task.key, task.program, task.names, task.expects, task.positions, task.kind,
            _Filled(task.original, data),
        )  # fmt: skip
    if type(task) is OrNone:
        return OrNone(_with_arrays(task.fused, data, known))
    if type(task) is Picked:
        return Picked(_with_arrays(task.fused, data, known), task.columns)
    return _filled(task, data, known)


def _holds(task: Any, number: Mapping[int, int], seen: set[int]) -> bool:
    """Whether a task has data in it, in whatever it consists of that was not `seen` before."""
    stack = [task]
    while stack:
        it = stack.pop()
        if id(it) in seen:
            continue
        seen.add(id(it))
        if id(it) in number and _is_data(it):
            return True
        kind = type(it)
        if kind in (tuple, list, set, frozenset):
            stack += it
        elif kind is dict:
            stack += it.values()
        elif kind is partial or kind.__name__ == "curry":
            stack += [it.func, it.args, it.keywords]
        elif kind.__name__ == "Compose":
            stack += [it.first, *it.funcs]
        elif kind is FunctionType:
            stack += Cells.of(it).values()  # without those that are not bound yet
            stack += [it.__defaults__, it.__kwdefaults__]
            if it.__code__.co_filename == COMPILED:
                stack += [v for k, v in it.__globals__.items() if k != "__builtins__"]
        elif isinstance(it, GraphNode) or kind.__name__ in TASKS:
            stack += attributes_of(it).values()
    return False
