"""What makes two computations alike: words of their tasks and data.

In words (see `comparable`) layers have numbers in place of names. Data is not in the words, but is
listed beside them: a template is filled with other data of the same facts (`data_facts`). `around`
has the functions, lists and variables that were read: a layer is read again when one has changed.
`NotComparable` ends the reading: then a computation has no fingerprint and is planned each time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import WRAPPER_ASSIGNMENTS, cached_property, partial
from operator import itemgetter
from types import FunctionType, MethodType
from typing import Any
from weakref import ref

import numpy as np
from dask import config
from dask._task_spec import Alias, DataNode, GraphNode, List, NestedContainer, Task, TaskRef
from dask.array.core import load_store_chunk
from dask.array.optimization import optimize as optimize_array
from dask.base import tokenize
from dask.blockwise import Blockwise
from dask.core import flatten
from dask.highlevelgraph import Layer, MaterializedLayer
from dask.layers import (
    ArrayBlockIdDep,
    ArrayChunkShapeDep,
    ArrayOverlapLayer,
    ArraySliceDep,
    ArrayValuesDep,
)
from dask.utils import apply, methodcaller

from ..dask_private import HLGExpr, HLGExprSequence, layers_of
from ..frontend.captured import Variable, all_unchanged, made_of
from ..frontend.chunk import Chunk
from ..frontend.rebuild import has_name
from ..frontend.tiles import Tiles
from ..ir.expr import Expr
from ..tracing.bytecode import variables_written
from .columns import ColumnWords, seed_words, short_integers
from .comparable import (
    ANYBODYS,
    DRAWN_FROM,
    LARGEST,
    UNSHARED,
    WATCHED,
    ArraySlot,
    HashedWords,
    Home,
    Items,
    Lists,
    NotComparable,
    ObjectSlot,
    SameObject,
    data_facts,
    find_value,
    find_values,
    has_items,
    is_data,
    is_harmless,
    is_identified_by_token,
    is_librarys_file,
    is_opaque,
    is_singleton,
    is_task_data,
    is_trusted,
    items_of,
    layout,
    lists_of,
    type_char,
)

Key = Any

#: Settings that change what a collection becomes.
SETTINGS = ("optimization.fuse.active", "optimization.annotations.fuse")
#: What is said of a layer's blocks by the chunks of an array alone.
OF_CHUNKS = (ArrayBlockIdDep, ArrayChunkShapeDep, ArraySliceDep, Tiles)
#: Layers of one graph beyond which reading what they say takes long, and tasks of one layer, for
#: which there is about room in `MOST_WORDS`. On two shared CPU cores, to read a task takes 16
#: microseconds, and to plan it 300 and more.
MOST_LAYERS, MOST_TASKS = 2_000, 200_000
#: Words of one layer, and length of one string.
MOST_WORDS, LONGEST = 1_000_000, 1_000
#: Tasks from which on a layer is told column by column.
FEWEST_ROWS = 8
#: How the names begin under which Dask has the numbers of what it takes from arrays.
LISTS = ("shuffle-taker-", "shuffle-sorter-")
#: What `functools.wraps` writes to a function, which does not read it.
WRAPPED = {*WRAPPER_ASSIGNMENTS, "__wrapped__"}
#: Under whose names Dask has functions that were given some arguments, and functions in a row.
TOOLS = ("toolz", "tlz", "cytoolz")
_ATOMS = (type(Ellipsis), Expr)
_BOUNDS = (int, type(None))


@dataclass(frozen=True)
class Fingerprint:
    """What makes two computations alike, and in what they may differ."""

    structure: HashedWords  # equal for those that do the same to their data
    names: tuple[str, ...]  # of their layers, in one order
    data: tuple[Any, ...]  # values that are in them, in one order
    around: tuple[Variable, ...]  # their functions, and the variables around these
    size: int  # of the words
    holders: tuple[Layer, ...]  # the layers that have the data
    home: Home  # says where data is
    inside: int  # how many of the data, the last ones, are arrays and objects in tasks

    @cached_property
    def words(self) -> HashedWords | None:
        """Equal for computations that are alike: the structure, and what their data is like.

        None for data that is like nothing else.
        """
        try:
            return HashedWords((self.structure, data_facts(self.data, self.home)))
        except Exception:  # it may also be of a class that does not let itself be looked at
            return None

    def layouts(self) -> tuple[Any, ...] | None:
        """Layouts of the arrays in tasks, which somebody may change in place.

        No collection says what these are, as it does of its blocks. None for an array that is like
        nothing else.
        """
        try:
            return tuple(map(layout, self.data[len(self.data) - self.inside :]))
        except NotComparable:
            return None


@dataclass(frozen=True, slots=True)
class _LayerFingerprint:
    """The words of one layer, and its data beside them."""

    words: HashedWords
    makes: tuple[str, ...]  # the names of its keys
    names: tuple[str, ...]  # where keys may stand
    plain: frozenset[str]  # strings elsewhere
    data: tuple[Key, ...]
    inside: tuple[Any, ...]  # arrays in its task, and objects that say nothing
    around: tuple[Variable, ...]
    size: int  # of the words


class FingerprintReader:
    """Reads graphs, and remembers their layers as long as these live."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[ref[Layer], _LayerFingerprint | None, Items]] = {}

    def likeness(self, dsk: Any, wanted: tuple[Key, ...], home: Home) -> Fingerprint | None:
        """The fingerprint of a Dask expression for these keys; None where it can have none.

        `home` gives the device of data.

        >>> import dask.array as da
        >>> from dask._expr import FinalizeCompute
        >>> from dask.base import collections_to_expr
        >>> def words(x):
        ...     expr = FinalizeCompute(collections_to_expr([x])).optimize()
        ...     wanted = tuple(flatten(expr.__dask_keys__()))
        ...     return FingerprintReader().likeness(expr, wanted, lambda value: None).words
        >>> x, y = (da.from_array(np.full(4, n), chunks=2) for n in (1, 2))
        >>> words(x + 1) == words(y + 1), words(x + 1) == words(y + 2)
        (True, False)
        """
        if not isinstance(dsk, (HLGExprSequence, HLGExpr)):
            return None
        try:
            return self._compute_fingerprint(dsk, wanted, home)
        except Exception:  # it may also be of a class that does not let itself be looked at
            return None

    def _compute_fingerprint(self, dsk: Any, wanted: tuple[Key, ...], home: Home) -> Fingerprint:
        layers: dict[str, Layer] = {}
        every: list[tuple[Any, list[Key]]] = []
        for op in dsk.operands if isinstance(dsk, HLGExprSequence) else [dsk]:
            hlg = layers_of(op)
            if hlg is None or len(hlg.layers) > MOST_LAYERS:
                raise NotComparable
            if op.low_level_optimizer is not optimize_array:
                raise NotComparable  # whose optimisation may put data into its tasks
            if any(layers.get(n, layer) is not layer for n, layer in hlg.layers.items()):
                raise NotComparable  # two layers of one name
            layers.update(hlg.layers)
            kind = type(op), len(hlg.layers)
            every.append((kind, list(flatten(op.__dask_keys__()))))
        said = {name: self._read_layer(layer) for name, layer in layers.items()}
        maker = {made: name for name, s in said.items() for made in s.makes}
        if any(not s.plain.isdisjoint(maker) for s in said.values()):
            raise NotComparable  # whether it is a name there, or a string
        numbers: dict[str, int] = {}
        order: dict[str, _LayerFingerprint] = {}
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
        data: list[Any] = []
        for name, s in order.items():
            data += _data_of(layers[name], s.data)
        inside = [array for s in order.values() for array in s.inside]
        data += inside
        around = [v for s in order.values() for v in s.around]
        told = {id(v) for v, _ in around if type(v) is np.ndarray}
        if told and not told.isdisjoint(map(id, data)):
            raise NotComparable  # an array that is told by its values, and is data elsewhere

        def number_keys(keys: Collection[Key]) -> tuple[Any, ...]:
            if any(_name_of(k) not in numbers for k in keys):
                raise NotComparable
            return tuple([(numbers[_name_of(k)], _index_of(k)) for k in keys])

        settings = tuple([config.get(s, None) for s in SETTINGS])
        ends = tuple([(kind, number_keys(keys)) for kind, keys in every])
        text = tuple(
            [(s.words, tuple([numbers.get(n, n) for n in s.names])) for s in order.values()]
        )
        structure = HashedWords((settings, ends, number_keys(wanted), text))
        size = sum([s.size for s in order.values()])
        holders = tuple([layers[name] for name, s in order.items() if s.data or s.inside])
        return Fingerprint(
            structure, tuple(numbers), tuple(data), tuple(around), size, holders, home,
            len(inside),
        )  # fmt: skip

    def _read_layer(self, layer: Layer) -> _LayerFingerprint:
        every, known = self._known, id(layer)
        watched, said, items = every.get(known, (None, None, None))
        if (
            watched is None
            or watched() is not layer
            or (said and not all_unchanged(said.around))
            or not has_items(layer, items)
        ):
            try:
                said = _LayerWords().fingerprint(layer)
            except Exception:  # as above
                said = None
            gone = ref(layer, lambda _: every.pop(known, None))
            every[known] = gone, said, items_of(layer)
        if said is None:
            raise NotComparable
        return said


def _data_of(layer: Any, keys: tuple[Key, ...]) -> list[Any]:
    """Return the values of these keys of a layer; fast where they are all of its keys."""
    if not keys:
        return []
    items: Mapping[Key, Any] = layer.mapping
    if tuple(items) == keys:
        return find_values(list(items.values()))
    return find_values([items[k] for k in keys])


def _name_of(key: Key) -> str:
    name = key[0] if type(key) is tuple and key else key
    if type(name) is not str:
        raise NotComparable
    return name


def names_of(keys: Sequence[Key]) -> list[str]:
    """The names of keys, each once."""
    if set(map(type, keys)) == {tuple} and all(keys):
        firsts = list(map(itemgetter(0), keys))
        names = firsts[:1] if len(set(firsts)) == 1 else list(dict.fromkeys(firsts))
        if set(map(type, names)) == {str}:
            return names
    return list(dict.fromkeys(map(_name_of, keys)))


def _index_of(key: Key) -> Any:
    return key[1:] if type(key) is tuple else None


# ---- what layers say


class _LayerWords:
    """Makes the words of one layer.

    Each word is a type, or a tuple that begins with a type. A name has a number where a key may
    stand, and nowhere else.
    """

    def __init__(self) -> None:
        self.names: dict[str, int] = {}
        self.plain: set[str] = set()  # strings that are no names
        self.data: list[Key] = []
        self.inside: list[Any] = []
        self.one = False  # whether arrays here can be data: it is one task for all blocks
        self.replaceable = True  # whether another object can be put where this one is
        self.around: list[Variable] = []
        #: Words of functions, and what lists that they get are; None where that is to be found out.
        self.functions: dict[int, tuple[Any, int | None]] = {}
        self.lists: Lists = ANYBODYS  # what the lists and dictionaries that come are
        self.watched: set[int] = set()  # ids of these, and of arrays
        self.left = MOST_WORDS

    def fingerprint(self, layer: Layer) -> _LayerFingerprint:
        facts = (
            self._fingerprint_facts(layer.annotations),
            self._fingerprint_facts(layer.collection_annotations),
        )
        if type(layer) is Blockwise:
            if layer.output_blocks is not None:
                raise NotComparable
            makes, self.one = [layer.output], True
            words: Any = (
                self.name_number(layer.output), self(layer.output_indices), self(layer.task),
                tuple([self._argument(a, i) for a, i in layer.indices]), layer.concatenate,
                tuple([(self.name_number(k), self(v)) for k, v in layer.numblocks.items()]),
                self._fingerprint_facts(layer.new_axes),
                tuple([(self.name_number(k), self._blocks(v)) for k, v in layer.io_deps.items()]),
            )  # fmt: skip
        elif type(layer) is MaterializedLayer and len(layer) <= MOST_TASKS:
            makes = names_of(list(layer))
            if len(layer) >= FEWEST_ROWS:
                words = ColumnWords(self).words_of(layer.mapping)
            else:
                items = layer.items()
                words = tuple([(self.key_words(k), self.item_words(k, v)) for k, v in items])
        elif type(layer) is ArrayOverlapLayer:
            makes = [f"overlap-{layer.token}"]
            words = (
                self.name_number(makes[0]), self.name_number(layer.name), self(layer.chunks),
                self(layer.numblocks), tuple([(k, self(v)) for k, v in layer.axes.items()]),
            )  # fmt: skip
        else:
            raise NotComparable
        return _LayerFingerprint(
            HashedWords((type(layer), facts, words)), tuple(makes), tuple(self.names),
            frozenset(self.plain), tuple(self.data), tuple(self.inside), tuple(self.around),
            MOST_WORDS - self.left + len(self.data),
        )  # fmt: skip

    def _fingerprint_facts(self, facts: Mapping[str, Any] | None) -> Any:
        """Words for a layer's annotations or axes, which no function gets."""
        self.lists = UNSHARED
        words = tuple([(k, self(v)) for k, v in (facts or {}).items()])
        self.lists = ANYBODYS
        return words

    def _blocks(self, of: Any) -> Any:
        if type(of) is ArrayValuesDep and type(of.values) is dict:
            values = tuple([(self(k), self(v)) for k, v in of.values.items()])
            return type(of), self(of.chunks), values
        if type(of) not in OF_CHUNKS:
            raise NotComparable
        return type(of), self(of.chunks)

    def _argument(self, argument: Any, index: Any) -> Any:
        """An argument of a Blockwise layer: the name of an array, with the axes of its blocks."""
        return (self(argument) if index is None else self.name_number(argument)), self(index)

    def item_words(self, key: Key, item: Any) -> Any:
        value = find_value(item)
        if is_data(value):
            self.data.append(key)
            return Chunk
        if type(item) is DataNode and _name_of(key).startswith(LISTS):
            self.lists = WATCHED
            words, self.lists = self(item), ANYBODYS
            return words
        return self(item) if isinstance(item, GraphNode) else self.legacy_words(item)

    def legacy_words(self, item: Any) -> Any:
        """A task as a tuple, or what is in one: lists in it are of keys and of tasks."""
        if type(item) is tuple and item and callable(item[0]):
            before, words = self.lists, self._calls(item[0], item[1:])
            out = tuple, words, *[self.legacy_words(a) for a in item[1:]]
            self.lists = before
            return out
        if type(item) is tuple and item and type(item[0]) is str:
            return TaskRef, self.key_words(item)
        if type(item) is list:  # Dask makes another of it
            if not all(type(x) in (list, tuple) for x in item) and not self.decide_lists():
                raise NotComparable
            return (list, *[self.legacy_words(x) for x in item])
        return self(item)

    def name_number(self, name: Any) -> int:
        if type(name) is not str:
            raise NotComparable
        return self.names.setdefault(name, len(self.names))

    def key_words(self, key: Key) -> Any:
        if type(key) is str:
            return self.name_number(key)
        if type(key) is not tuple or not key:
            raise NotComparable
        name, index = key[0], key[1:]
        for n in index:
            if type(n) is str:
                self.plain.add(n)
            elif not isinstance(n, (int, float, np.integer)):
                raise NotComparable
        return self.name_number(name), index

    def count(self, n: int) -> None:
        """Take words from those that a layer may have."""
        self.left -= n
        if self.left < 0:
            raise NotComparable

    def string_words(self, strings: Collection[str]) -> None:
        """Note strings that are no names."""
        if max(map(len, strings)) > LONGEST:
            raise NotComparable
        self.plain.update(strings)

    def __call__(self, v: Any) -> Any:
        kind = type(v)
        self.count(1)
        if kind is int or kind is bool or v is None:
            return kind, v
        if kind is str:
            self.string_words((v,))
            return kind, v
        if kind is bytes:
            if len(v) > LONGEST:
                raise NotComparable
            return kind, v
        if kind is tuple:
            if len(v) >= FEWEST_ROWS and (numbers := short_integers(v)) is not None:
                self.count(len(v))  # of chunks, mostly
                return kind, numbers
            return (kind, *[self(x) for x in v])
        if kind is list and self.decide_lists():
            self.watch(v)
            return (kind, *[self(x) for x in v])
        if kind is TaskRef or kind is Alias:
            return kind, self.key_words(v.key if kind is TaskRef else v.target)
        if kind is slice:
            start, stop, step = v.start, v.stop, v.step
            if all(type(n) in _BOUNDS for n in (start, stop, step)):
                return kind, start, stop, step
            return kind, self._fixed_words((start, stop, step))
        if kind in _ATOMS:
            return kind, v
        if kind is float or kind is complex:
            return kind, repr(v)
        if kind is Task:
            return self.task_words(v)
        if kind is DataNode:
            return kind, self(v.value)
        if isinstance(v, NestedContainer):
            if len(v.args) >= FEWEST_ROWS and set(map(type, v.args)) <= {TaskRef, List}:
                return kind, ColumnWords(self).column_words(v.args)  # of a result's blocks, mostly
            return (kind, *[self(a) for a in v.args])
        if kind is dict and self.decide_lists():
            self.watch(v)
            return (kind, *[(self._fixed_words(k), self(x)) for k, x in v.items()])
        return self._object(v, kind)

    def _fixed_words(self, v: Any) -> Any:
        """Words for a part of a task that no template replaces."""
        before, self.replaceable = self.replaceable, False
        words = self(v)
        self.replaceable = before
        return words

    def task_words(self, task: Task) -> Any:
        before, words = self.lists, self._calls(task.func, (*task.args, *task.kwargs.values()))
        args = [self(a) for a in task.args]
        args += [(k, self(a)) for k, a in task.kwargs.items()]
        self.lists = before
        return Task, words, task.data_producer, task.block_fusion, tuple(args)

    def _calls(self, function: Any, args: Sequence[Any]) -> Any:
        """Words for a called function; sets what the lists in its arguments are."""
        words, lists = self.function_words(function)
        if function is apply and args:
            function, args = args[0], args[1:]

        def decide() -> int:
            return WATCHED if is_trusted(function) and all(map(is_harmless, args)) else ANYBODYS

        self.lists = decide if lists is None else lists
        return words

    def decide_lists(self) -> int:
        """Return what lists are here; found out at the first list, since most tasks have none."""
        self.lists = out = self.lists if isinstance(self.lists, int) else self.lists()
        return out

    def watch(self, it: Any) -> None:
        if self.lists is WATCHED and id(it) not in self.watched:  # the layer keeps it alive
            self.watched.add(id(it))
            self.around.append((it, made_of(it)))

    def function_words(self, function: Any) -> tuple[Any, int | None]:
        found = self.functions.get(id(function))  # the task keeps it alive
        if found is None:
            if function is load_store_chunk:
                raise NotComparable  # what it writes to may be what others read
            lists, before = lists_of(function), len(self.inside)
            words = self._object(function, type(function))
            # its arrays are among the data once: which function is called again counts, too
            again = (ArraySlot, len(self.functions)) if len(self.inside) > before else words
            self.functions[id(function)] = again, lists
            return words, lists
        return found

    def _object(self, v: Any, kind: type) -> Any:
        lists = self.decide_lists() if kind is np.ndarray else ANYBODYS
        before = self.lists, self.one, self.replaceable
        self.lists = ANYBODYS  # what is in it may be anybody's
        words = self._parts(v, kind, lists)
        self.lists, self.one, self.replaceable = before
        return words

    def _parts(self, v: Any, kind: type, lists: int) -> Any:
        if self.one and kind is not Chunk and (is_task_data(v) or is_librarys_file(v)):
            self.inside.append(v)
            return ArraySlot
        if kind is not Chunk and is_task_data(v) and not v.size:  # it says of which kind others are
            return kind, v.dtype, v.shape
        if lists == DRAWN_FROM and self.replaceable and kind is np.ndarray:
            self.inside.append(v)
            return ArraySlot
        if lists and kind is np.ndarray and v.nbytes <= LARGEST and not v.dtype.hasobject:
            self.lists = WATCHED  # its values count, and somebody may write to it
            self.watch(v)
            self.left -= v.nbytes // 8
            return kind, v.dtype, v.shape, v.strides, v.tobytes()
        if isinstance(v, np.void):  # a record, which is a part of its array
            raise NotComparable
        if isinstance(v, np.generic):
            return kind, v.dtype, v.tobytes()
        if isinstance(v, np.dtype):
            return v, type_char(v)
        if isinstance(v, type):
            return v
        if kind is np.random.SeedSequence and not self.replaceable:
            return kind, seed_words(v)
        if kind is FunctionType and not has_name(v):
            return self._function(v)
        root = kind.__module__.partition(".")[0]
        if is_singleton(v, kind, root):
            return kind, SameObject(v)
        if kind is methodcaller:
            return kind, v.method
        curried = root in TOOLS and kind.__name__ == "curry"
        if kind is partial or curried:
            self.one = self.one and not curried  # nobody puts others in there
            self.replaceable = self.replaceable and not curried
            if kind is partial and vars(v):
                raise NotComparable  # which others may ask for
            self.around.append((v, made_of(v)))
            words = self._calls(v.func, (*v.args, *v.keywords.values()))
            named = {**v.keywords}
            if is_trusted(v.func) and is_task_data(like := named.get("like")):
                named["like"] = type(like)  # all that NumPy and Dask take from it
            return kind, words, self(v.args), *[(k, self(x)) for k, x in named.items()]
        if kind is MethodType and isinstance(v.__self__, type):
            return kind, SameObject(v.__func__), SameObject(v.__self__)
        if is_identified_by_token(v):
            return kind, tokenize(v)
        if self.replaceable and is_opaque(v) and root not in TOOLS:
            self.inside.append(v)
            return ObjectSlot, SameObject(v.__func__) if kind is MethodType else kind
        self.one = self.replaceable = False  # nobody puts others in there
        if root in TOOLS and kind.__name__ == "Compose":
            return kind, self(v.first), self(tuple(v.funcs))
        if root == __name__.partition(".")[0]:
            if is_dataclass(v) and kind.__dataclass_params__.frozen:  # type: ignore[attr-defined]
                return (kind, *[self(getattr(v, f.name)) for f in fields(v)])
            if hasattr(v, "__dask_tokenize__"):
                return (kind, *[self(x) for x in vars(v).values()])
        raise NotComparable

    def _function(self, f: FunctionType) -> Any:
        """Words for a function that is no name of a module: its code and variables."""
        if vars(f).keys() - WRAPPED or variables_written(f.__code__):
            raise NotComparable  # whose variables they are counts
        try:
            around = [(cell, made_of(cell)) for cell in f.__closure__ or ()]
        except ValueError:  # not bound yet
            raise NotComparable from None
        self.around += [(f, made_of(f)), *around]
        inside = tuple([v for _, (v,) in around])
        given = f.__defaults__ or (), tuple((f.__kwdefaults__ or {}).items())
        annotations = self._fixed_words(tuple(f.__annotations__.items()))
        about = f.__name__, f.__qualname__, f.__doc__, annotations  # what may be asked
        parts = self(inside), self(given), self(vars(f).get("__wrapped__"))
        return FunctionType, f.__code__, SameObject(f.__globals__), *parts, about
