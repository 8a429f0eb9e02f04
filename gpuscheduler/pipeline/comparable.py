"""What may be compared of a graph: trust in functions, and values that are data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from operator import getitem
from types import FunctionType
from typing import Any

import numpy as np
from dask._task_spec import Alias, DataNode, GraphNode, NestedContainer, Task, TaskRef
from dask.utils import Dispatch, apply

from ..frontend.captured import made_of
from ..frontend.chunk import Chunk, ChunkTask
from ..frontend.graph import is_chunk
from ..frontend.rebuild import has_name
from ..sparse_parts import arrays_of, library_of
from ..values import sizeof

#: Says on which device a value is, if any.
Home = Callable[[Any], int | None]

#: Whose functions change no list, dictionary or array that they are handed beside their blocks.
TRUSTED = ("cupy", "cupyx", "dask", "numpy", "scipy", __name__.partition(".")[0])
#: What a list or a dictionary in a task may be: anybody's, who may change it; read by functions
#: that do not, so that it only has to be watched; or seen by nobody but such functions.
ANYBODYS, WATCHED, UNSHARED = range(3)
#: One of these, or what finds it out.
Lists = int | Callable[[], int]


#: Types of values in which there is no function.
_PLAIN = frozenset({
    Alias, TaskRef, bool, bytes, complex, float, int, slice, str, type, type(None),
})  # fmt: skip


class NotComparable(Exception):
    """A graph says something that may mean another thing in another graph."""


def is_task_data(value: Any) -> bool:
    """Whether it is a value that tasks are handed, whatever is in it."""
    kind = type(value)
    if kind is Chunk or kind is np.ndarray:
        return True
    return kind.__name__ == "ndarray" and kind.__module__.partition(".")[0] == "cupy"


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


class SameObject:
    """Equal for the very same object, which it keeps alive."""

    __slots__ = ("it",)

    def __init__(self, it: Any):
        self.it = it

    def __eq__(self, other: object) -> bool:
        return type(other) is SameObject and self.it is other.it

    def __hash__(self) -> int:
        return id(self.it)


# ---- data


def find_value(item: Any) -> Any:
    """The value that an item of a layer is, where it is one."""
    if is_chunk(item):
        return item.func
    return item.value if type(item) is DataNode else item


def find_values(items: Sequence[Any]) -> list[Any]:
    """The values of these items, most often all persisted chunks."""
    if set(map(type, items)) == {ChunkTask}:
        functions = [task.func for task in items]
        if set(map(type, functions)) == {Chunk}:
            return functions
    return list(map(find_value, items))


def data_facts(data: Sequence[Any], home: Home) -> tuple[Any, ...]:
    """What a plan takes from data: where it is, what it is like, and what of it is the same."""
    first: dict[int, int] = {}
    out = []
    for n, value in enumerate(data):
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
    if not is_task_data(value) or value.dtype.hasobject:
        raise NotComparable
    return type(value), value.dtype, type_char(value.dtype), value.shape, value.strides


def type_char(dtype: np.dtype[Any]) -> str:
    """What one type may have and another not that is equal to it."""
    if dtype.metadata:
        raise NotComparable
    return dtype.char
