"""What may be compared of a graph: trust in functions, values that are data, and words.

*Words* are nested tuples of types, numbers and strings. Those of two tasks are equal only if the
tasks do the same. `fingerprint` makes fingerprints of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache, partial
from itertools import chain
from operator import getitem, is_not
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
from dask._task_spec import Alias, DataNode, GraphNode, NestedContainer, Task, TaskRef
from dask.highlevelgraph import MaterializedLayer
from dask.utils import Dispatch, apply

from ..frontend.captured import DRAWING, FRESH, made_of
from ..frontend.chunk import Chunk, ChunkTask
from ..frontend.files import is_in_file
from ..frontend.graph import is_chunk
from ..frontend.rebuild import has_name
from ..sparse_parts import arrays_of, library_of
from ..values import FILES, sizeof

#: Says on which device a value is, if any.
Home = Callable[[Any], int | None]

OWN = __name__.partition(".")[0]
#: Whose functions change no list, dictionary or array that they are handed beside their blocks.
TRUSTED = ("cupy", "cupyx", "dask", "flox", "numpy", "scipy", "xarray", OWN)
#: Whose callable objects do not change once they are made: kernels and compiled functions.
COMPILERS = ("cupy", "numba")
#: What is known of a list or dictionary in a task. ANYBODYS: any code may change it. WATCHED: the
#: task's functions do not change it, but others may hold it, so its content is compared before each
#: use. UNSHARED: only functions that do not change it ever see it. DRAWN_FROM: the same, for
#: functions that draw random numbers, whose arrays are data, too.
ANYBODYS, WATCHED, UNSHARED, DRAWN_FROM = range(4)
#: One of these four, or a function that returns one.
Lists = int | Callable[[], int]
#: Bytes of an array whose values are a part of the words, at most.
LARGEST = 65_536
#: Packages whose objects are never opaque (`is_opaque`): they have words, or cannot be compared.
FAMILIAR = frozenset({
    "_thread", "builtins", "cupy", "cupyx", "dask", "distributed", "numba", "numpy", "scipy", OWN,
})  # fmt: skip
#: Attributes of objects that hold data, are written to, or change as they are read.
OF_DATA = ("__array__", "__getitem__", "__next__", "__setitem__", "shape")


#: Types of values in which there is no function.
_PLAIN = frozenset({
    Alias, TaskRef, bool, bytes, complex, float, int, slice, str, type, type(None),
})  # fmt: skip


class NotComparable(Exception):
    """A part of a graph has no words: equal ones could mean different things elsewhere."""


def is_task_data(value: Any) -> bool:
    """Whether a value is data for tasks: a persisted chunk, or an array of NumPy or CuPy."""
    kind = type(value)
    if kind is Chunk or kind is np.ndarray:
        return True
    return kind.__name__ == "ndarray" and kind.__module__.partition(".")[0] == "cupy"


def is_file_array(value: Any) -> bool:
    """Whether a plan depends on the type, shape and dtype only: an array that is read in blocks.

    Examples are memory maps, arrays of Zarr and of HDF5 files, and xarray's lazy arrays.

    >>> is_file_array(np.ones(3)), is_file_array(3)
    (False, False)
    """
    if isinstance(value, np.memmap):
        return True
    kind = type(value)
    if not is_in_file(value) or _root(kind.__module__) in FAMILIAR:
        return False
    if hasattr(kind, "__array_ufunc__"):  # it computes, and is in memory
        return False
    shape, dtype = value.shape, getattr(value, "dtype", None)
    return type(shape) is tuple and isinstance(dtype, np.dtype) and hasattr(kind, "__getitem__")


def is_librarys_file(value: Any) -> bool:
    """Whether a value is a file array of a library, which cannot hold a collection.

    One of a user's class could: a fingerprint that kept it would keep its own layer for ever.
    """
    known = isinstance(value, np.memmap) or _root(type(value).__module__) in (*FILES, "xarray")
    return known and is_file_array(value)


def is_data(value: Any) -> bool:
    """Whether an item of a layer is data: an array, in memory or in a file, or a sparse block."""
    return is_task_data(value) or library_of(type(value)) is not None or is_file_array(value)


def is_singleton(v: Any, kind: type, root: str) -> bool:
    """Whether an object exists only once: a function of a module, a module, a constant.

    `root` is the package of its type.
    """
    if kind is BuiltinFunctionType and isinstance(v.__self__, (ModuleType, type(None))):
        return True
    if isinstance(v, (np.ufunc, ModuleType, Enum)) or kind is Dispatch or has_name(v):
        return True
    return root in COMPILERS and callable(v)


def is_opaque(value: Any) -> bool:
    """Whether a plan depends on the type only: another library's object, or a method of one.

    Examples are the methods in the last tasks of xarray's collections, and arguments of flox's
    functions.
    """
    owner = type(value.__self__) if type(value) is MethodType else type(value)
    if owner is np.vectorize or is_random_source(value):
        return True
    if _root(owner.__module__) in FAMILIAR or issubclass(owner, type):
        return False
    return type(value) is MethodType or not any(hasattr(owner, name) for name in OF_DATA)


def is_random_source(value: Any) -> bool:
    """Whether NumPy draws random numbers from it: a seed, a state, or a generator.

    >>> is_random_source(np.random.SeedSequence(1)), is_random_source(1)
    (True, False)
    """
    return _root(type(value).__module__) == "numpy" and isinstance(value, _sources())


@cache
def _sources() -> tuple[type, ...]:
    some = np.random
    return some.SeedSequence, some.BitGenerator, some.Generator, some.RandomState


def is_identified_by_token(value: Any) -> bool:
    """Whether Dask's token identifies an object, which nobody changes once it is in a task.

    Examples are small indices of pandas, and flox's descriptions of groups and reductions.
    """
    root = _root(type(value).__module__)
    if root == "pandas":
        import pandas  # type: ignore[import-untyped]

        return isinstance(value, pandas.Index) and value.nbytes <= LARGEST
    return root == "flox" and not callable(value)


def lists_of(function: Any) -> int | None:
    """Return what lists are to a function of Dask's, UNSHARED or DRAWN_FROM; None for others."""
    if any(function is f for f in DRAWING):
        return DRAWN_FROM
    return UNSHARED if any(function is f for f in FRESH) else None


def is_trusted(f: Any) -> bool:
    """Whether a function changes no list or dictionary that it gets, and keeps none."""
    if type(f) is partial or type(f).__name__ == "curry":
        return is_trusted(f.func) and all(map(is_harmless, (*f.args, *f.keywords.values())))
    if type(f).__name__ == "Compose":
        return is_trusted(f.first) and all(map(is_trusted, f.funcs))
    if isinstance(f, np.ufunc) or type(f) is Dispatch or f is getitem:
        return True
    if type(f) is FunctionType and not has_name(f):  # made around others
        around = [v for c in f.__closure__ or () for v in made_of(c)]
        space = f.__globals__.get("__name__")
        return _root(space) in TRUSTED and all(map(is_harmless, around))
    return has_name(f) and _root(f.__module__) in TRUSTED and f is not apply


def is_harmless(v: Any) -> bool:
    """Whether nothing in an argument is a function that could change lists."""
    if type(v) in (list, tuple) or isinstance(v, NestedContainer):
        return all(map(is_harmless, v.args if isinstance(v, NestedContainer) else v))
    if type(v) is dict:
        return all(map(is_harmless, v.values()))
    if type(v) is Task:
        return is_trusted(v.func) and all(map(is_harmless, (*v.args, *v.kwargs.values())))
    return not callable(v) or isinstance(v, (GraphNode, TaskRef, type)) or is_trusted(v)


def all_harmless(column: Sequence[Any]) -> bool:
    """Whether `is_harmless` of all values, found by their types."""
    every = set(map(type, column))
    inner: list[Any]
    for kind in every - _PLAIN:
        some: Sequence[Any] = column if len(every) == 1 else [v for v in column if type(v) is kind]
        if kind in (tuple, list):
            inner = list(chain.from_iterable(some))
        elif issubclass(kind, NestedContainer):
            inner = list(chain.from_iterable([v.args for v in some]))
        else:
            if not all(map(is_harmless, {id(v): v for v in some}.values())):
                return False
            continue
        if not all_harmless(inner):
            return False
    return True


def _root(module: Any) -> str:
    return str(module).partition(".")[0]


class HashedWords:
    """Words as a dictionary key: their hash is computed once, since there may be many."""

    __slots__ = ("hash", "words")

    def __init__(self, words: Any):
        self.words, self.hash = words, hash(words)

    def __hash__(self) -> int:
        return self.hash

    def __eq__(self, other: object) -> bool:
        if type(other) is not HashedWords or self.hash != other.hash:
            return False
        return self.words is other.words or bool(self.words == other.words)


class SameObject:
    """Equal for the very same object, which it keeps alive."""

    __slots__ = ("it",)

    def __init__(self, it: Any):
        self.it = it

    def __eq__(self, other: object) -> bool:
        return type(other) is SameObject and self.it is other.it

    def __hash__(self) -> int:
        return id(self.it)


@dataclass(frozen=True, slots=True)
class ArraySlot:
    """The place of an array or an object in a task of a template."""

    number: int  # among all data

    def __call__(self, *_: Any) -> Any:
        """Raise an error: a partial takes nothing as its function that cannot be called."""
        raise TypeError("a slot was called before it was filled")


class ObjectSlot:
    """Stands, among words, for an opaque object (`is_opaque`)."""


# ---- layers


#: The tasks of a layer that was made of a dictionary, to which its owner may write.
Items = tuple[Any, ...] | None


def items_of(layer: Any) -> Items:
    """Return the tasks of a layer that its owner may write to; None for other layers."""
    if type(layer) is not MaterializedLayer:
        return None
    values = layer.mapping.values()
    return None if is_chunk(next(iter(values), None)) else tuple(values)


def has_items(layer: Any, items: Items) -> bool:
    """Whether a layer still has exactly these tasks."""
    if items is None:
        return True
    return len(items) == len(layer.mapping) and not any(map(is_not, layer.mapping.values(), items))


# ---- data


def find_value(item: Any) -> Any:
    """Return the value in an item of a layer; tasks are returned as they are."""
    if is_chunk(item):
        return item.func
    return item.value if type(item) is DataNode else item


def find_values(items: Sequence[Any]) -> list[Any]:
    """Return `find_value` of each item; fast where all are persisted chunks."""
    if set(map(type, items)) == {ChunkTask}:
        functions = [task.func for task in items]
        if set(map(type, functions)) == {Chunk}:
            return functions
    return list(map(find_value, items))


def data_facts(data: Sequence[Any], home: Home) -> tuple[Any, ...]:
    """Return what a plan depends on in data: devices, layouts, bytes, and repeated objects."""
    first: dict[int, int] = {}
    out: list[tuple[Any, ...]] = []
    for n, value in enumerate(data):
        if not is_task_data(value) and library_of(type(value)) is None:
            out.append((first.setdefault(id(value), n), None, layout(value)))
            continue
        place, shown, moves = home(value), value, type(value) is Chunk
        if moves:
            if place is None:  # another scheduler's
                raise NotComparable
            shown = value.value_on_device()
        resident = moves and value.resident
        facts = moves, resident, value.nbytes if moves else sizeof(value), layout(shown)
        out.append((first.setdefault(id(value), n), place, facts))
    return tuple(out)


def layout(value: Any) -> Any:
    if value is None:
        return None
    if library_of(type(value)) is not None:
        return type(value), tuple(value.shape), tuple(map(layout, arrays_of(value)))
    if is_file_array(value):
        dtype, strides = value.dtype, getattr(value, "strides", None)
        if dtype.hasobject:
            raise NotComparable
        return type(value), dtype, type_char(dtype), value.shape, strides
    if is_opaque(value):
        return type(value)
    if not is_task_data(value) or value.dtype.hasobject:
        raise NotComparable
    return type(value), value.dtype, type_char(value.dtype), value.shape, value.strides


def type_char(dtype: np.dtype[Any]) -> str:
    """Return a dtype's character: dtypes that compare equal, such as "l" and "q", differ in it."""
    if dtype.metadata:
        raise NotComparable
    return dtype.char
