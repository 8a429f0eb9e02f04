"""Words for layers with a task for each block, column by column.

Such tasks differ in few places: indices, bounds, seeds. The values in one place of all tasks are a
column, which gets its words at once. That takes a tenth of the time of words for one task after the
other. Words of numbers are bytes, which are quickly hashed and compared.

The words of a column begin with its type, or the name of a form. They have the number of values, or
the lengths of values that are sequences. So columns with equal words have equal values, in the same
order.
"""

from __future__ import annotations

import marshal
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any, Protocol

import numpy as np
from dask._task_spec import Alias, DataNode, List, Task, TaskRef
from dask.utils import apply

from ..frontend.chunk import Chunk, ChunkTask
from .comparable import (
    ANYBODYS,
    WATCHED,
    Lists,
    NotComparable,
    ObjectSlot,
    all_harmless,
    is_random_source,
    is_task_data,
    is_trusted,
)

Key = Any
Column = Sequence[Any]
_NONE = type(None)
_FIRST = itemgetter(0)
_FUNCTION, _ARGUMENTS, _NAMED = attrgetter("func"), attrgetter("args"), attrgetter("kwargs")
_FLAGS, _KEY = attrgetter("data_producer", "block_fusion"), attrgetter("key")
_BOUNDS = [attrgetter(name) for name in ("start", "stop", "step")]
#: A format of `marshal` without references, and how an integer of 32 bits begins there; four bytes
#: follow. (Seen in Python 3.10 to 3.13.)
_MARSHAL, _INTEGER = 2, marshal.dumps(0, 2)[:1]


class OneByOne(Protocol):
    """What `ColumnWords` needs of a layer's reader: words for single values, and its state."""

    lists: Lists
    plain: set[str]
    data: list[Key]
    inside: list[Any]
    replaceable: bool

    def __call__(self, v: Any) -> Any: ...

    def name_number(self, name: Any) -> int: ...

    def key_words(self, key: Key) -> Any: ...

    def item_words(self, key: Key, item: Any) -> Any: ...

    def legacy_words(self, item: Any) -> Any: ...

    def task_words(self, task: Task) -> Any: ...

    def string_words(self, strings: Sequence[str]) -> None: ...

    def count(self, n: int) -> None: ...

    def watch(self, it: Any) -> None: ...

    def decide_lists(self) -> int: ...

    def function_words(self, function: Any) -> tuple[Any, int | None]: ...


class ColumnWords:
    """Makes words for the tasks of one layer; `words` makes those of single values."""

    def __init__(self, words: OneByOne):
        self.words = words

    def words_of(self, mapping: Mapping[Key, Any]) -> Any:
        """Words for all keys and all tasks, in their order."""
        keys = list(mapping)
        return self._keys(keys), self._items(keys, list(mapping.values()))

    def _items(self, keys: Column, items: Column) -> Any:
        if len(every := set(map(type, items))) == 1:
            (kind,) = every
            return kind, self._items_of(kind, keys, items)
        kinds, out = list(map(type, items)), []
        numbers = {kind: n for n, kind in enumerate(dict.fromkeys(kinds))}
        for kind in numbers:
            rows = [n for n, k in enumerate(kinds) if k is kind]
            some = [keys[n] for n in rows], [items[n] for n in rows]
            out.append(self._items_of(kind, *some))
        return tuple(numbers), integers([numbers[k] for k in kinds]), tuple(out)

    def _items_of(self, kind: type, keys: Column, items: Column) -> Any:
        """Words for items of one type."""
        words = self.words
        if kind is tuple:
            return self._tuples(items)
        if kind is Task and Chunk not in set(map(type, map(_FUNCTION, items))):
            return self._tasks(items)
        if kind is Alias:
            return self.column_words(items)
        if (kind is ChunkTask and all(type(t.func) is Chunk for t in items)) or (
            kind is not Chunk and is_task_data(items[0])
        ):
            words.data += keys
            return Chunk, len(items)
        return tuple([words.item_words(k, v) for k, v in zip(keys, items, strict=True)])

    def _keys(self, keys: Column) -> Any:
        if set(map(type, keys)) != {tuple} or not all(keys):
            return tuple([self.words.key_words(k) for k in keys])
        return self._tuple_keys(keys, list(map(_FIRST, keys)))

    def _tuple_keys(self, keys: Column, firsts: Column) -> Any:
        """Words for tuples that begin with the names of layers."""
        names = [firsts[0]] if len(set(firsts)) == 1 else list(dict.fromkeys(firsts))
        numbers = {name: self.words.name_number(name) for name in names}
        if len(numbers) == 1:
            who: Any = (numbers[firsts[0]], len(keys))
        else:
            who = integers([numbers[name] for name in firsts])
        lengths = _lengths(keys)
        if type(lengths) is tuple:
            index = [self._index(c) for c in _columns_of(keys, lengths[0])]
        else:
            index = [self._index(list(chain.from_iterable([k[1:] for k in keys])))]
        return "keys", who, lengths, tuple(index)

    def _index(self, flat: list[Any]) -> Any:
        """Words for the indices in keys, behind their names."""
        if (numbers := short_integers(flat)) is not None:
            return int, numbers
        if set(map(type, flat)) <= {int}:
            return integers(flat)
        for n in flat:
            if type(n) is str:
                self.words.plain.add(n)
            elif not isinstance(n, (int, float, np.integer)):
                raise NotComparable
        return tuple(flat)

    # ---- tasks as tuples, in which lists are of keys and of tasks

    def _legacy(self, column: Column) -> Any:
        return self._legacy_of(set(map(type, column)), column)

    def _legacy_of(self, kinds: set[type], column: Column) -> Any:
        """Words for values of these types."""
        if kinds == {tuple}:
            return self._tuples(column)
        if kinds == {list}:
            inner = list(chain.from_iterable(column))
            kinds = set(map(type, inner))
            if not kinds <= {list, tuple} and not self.words.decide_lists():
                raise NotComparable
            return list, _lengths(column), self._legacy_of(kinds, inner)
        if len(kinds) > 1:
            return _by_type(column, self._legacy)
        return self.column_words(column)

    def _tuples(self, column: Column) -> Any:
        if all(column):
            heads = list(map(_FIRST, column))
            same, head = set(map(id, heads)) == {id(heads[0])}, heads[0]
            if type(head) is str and (same or set(map(type, heads)) == {str}):
                return TaskRef, self._tuple_keys(column, heads)
            if same and callable(head):
                return "calls", self._calls(column)
        heads = [v[0] if v else None for v in column]
        kinds = [0 if type(h) is str else 1 if callable(h) else 2 for h in heads]
        if set(kinds) == {1}:
            return "calls", self._calls(column)
        if set(kinds) == {2}:
            return "plain", self.column_words(column)
        out = []
        for kind, tell in enumerate((self._keys, self._calls, self.column_words)):
            some = [v for v, k in zip(column, kinds, strict=True) if k == kind]
            out.append(tell(some) if some else None)
        return "tuples", integers(kinds), tuple(out)

    def _calls(self, column: Column) -> Any:
        def tell(some: Column) -> Any:
            function = some[0][0]
            if function is apply:  # what it applies may be another function in each task
                return apply, tuple(map(self.words.legacy_words, some))
            return self._call_words(function, _columns_of(some, len(some[0])), self._legacy)

        functions = list(map(id, map(_FIRST, column)))
        return _by_group(column, (functions, list(map(len, column))), tell)

    # ---- tasks as objects

    def _tasks(self, column: Column) -> Any:
        functions = list(map(id, map(_FUNCTION, column)))
        lengths = list(map(len, map(_ARGUMENTS, column)))
        names = list(map(tuple, map(_NAMED, column)))
        flags = list(map(_FLAGS, column))
        facts: Any = set(flags)
        facts = (*facts, len(flags)) if len(facts) == 1 else tuple(flags)

        def tell(some: Column) -> Any:
            first = some[0]
            if first.func is apply:
                return apply, tuple(map(self.words.task_words, some))
            names = tuple(first.kwargs)
            columns = list(zip(*map(_ARGUMENTS, some), strict=True))
            columns += [tuple([t.kwargs[name] for t in some]) for name in names]
            return names, self._call_words(first.func, columns, self.column_words)

        return Task, facts, _by_group(column, (functions, lengths, names), tell)

    def _call_words(
        self, function: Any, columns: Sequence[Column], tell: Callable[[Column], Any]
    ) -> Any:
        """Words for calls of one function, from the columns of their arguments."""
        words, before = self.words, self.words.lists
        said, lists = words.function_words(function)

        def decide() -> int:
            trusted = is_trusted(function) and all(map(all_harmless, columns))
            return WATCHED if trusted else ANYBODYS

        words.lists = decide if lists is None else lists
        out = said, tuple([tell(c) for c in columns])
        words.lists = before
        return out

    def column_words(self, column: Column) -> Any:
        """Words for the values in one place of many tasks, or in one list."""
        kinds = set(map(type, column))
        if len(kinds) > 1:
            return _by_type(column, self.column_words)
        if not kinds:
            return ()
        (kind,) = kinds
        words, n = self.words, len(column)
        words.count(n)
        if kind is int:
            return kind, integers(column)
        if kind is bool:
            return kind, bytes(column)
        if kind is _NONE:
            return kind, n
        if kind is str:
            words.string_words(column)
            return kind, tuple(column)
        if kind is tuple or (kind is list and words.decide_lists()):
            if kind is list:
                for v in column:
                    words.watch(v)
            lengths, inner = _lengths(column), list(chain.from_iterable(column))
            if type(lengths) is tuple and len(set(map(type, inner))) > 1:  # indices, mostly
                each = zip(*column, strict=True)
                return kind, lengths, "columns", tuple(map(self.column_words, each))
            return kind, lengths, self.column_words(inner)
        if kind is TaskRef or kind is Alias:
            keys = map(_KEY, column) if kind is TaskRef else [v.target for v in column]
            return kind, self._keys(list(keys))
        if kind is slice:
            return kind, tuple([self.column_words(list(map(bound, column))) for bound in _BOUNDS])
        if kind is float or kind is complex:
            return kind, tuple(map(repr, column))
        if kind is Task:
            return self._tasks(column)
        if kind is DataNode:
            return kind, self.column_words([v.value for v in column])
        if kind is List:
            args = list(map(_ARGUMENTS, column))
            return kind, _lengths(args), self.column_words(list(chain.from_iterable(args)))
        if words.replaceable and is_random_source(column[0]):
            words.inside += column
            return ObjectSlot, kind, n
        if len(set(map(id, column))) == 1:
            return "same", n, words(column[0])
        return "each", tuple(map(words, column))


def _by_group(column: Column, facts: Sequence[Column], tell: Callable[[Column], Any]) -> Any:
    """Words for values in groups; the values of a group have all facts in common."""
    if all(len(set(fact)) == 1 for fact in facts):
        return len(column), tell(column)
    rows = list(zip(*facts, strict=True))
    numbers = {row: n for n, row in enumerate(dict.fromkeys(rows))}
    groups: list[list[Any]] = [[] for _ in numbers]
    order = [numbers[row] for row in rows]
    for v, n in zip(column, order, strict=True):
        groups[n].append(v)
    return integers(order), tuple(map(tell, groups))


def _by_type(column: Column, tell: Callable[[Column], Any]) -> Any:
    kinds = list(map(type, column))
    return "types", tuple(dict.fromkeys(kinds)), _by_group(column, (kinds,), tell)


def _columns_of(rows: Column, length: int) -> list[list[Any]]:
    """Return the columns of tuples of equal length, without the first column."""
    return [list(map(itemgetter(n), rows)) for n in range(1, length)]


def _lengths(column: Column) -> Any:
    """Words for the lengths of sequences, and their number."""
    every = set(map(len, column))
    return (every.pop(), len(column)) if len(every) == 1 else integers(map(len, column))


def integers(values: Iterable[int]) -> Any:
    """Words for Python integers, and their number.

    >>> integers([1, 2]) == integers([1, 2, 0]), integers([2**70])
    (False, (1180591620717411303424,))
    """
    values = list(values)
    try:
        return array("q", values).tobytes()
    except OverflowError:
        return tuple(values)


def short_integers(column: list[Any] | tuple[Any, ...]) -> bytes | None:
    """Return bytes for Python integers of 32 bits; None where any other value is among them.

    This takes a third of the time of a test of each type. Where every fifth byte says "an integer
    of four bytes", each integer begins where the one before it ends.

    >>> short_integers([1, 2]) == short_integers([1, 3]), short_integers([1, True])
    (False, None)
    """
    try:
        out = marshal.dumps(column, _MARSHAL)
    except ValueError:  # of other classes than Python's own
        return None
    return out if out[5::5] == _INTEGER * len(column) else None


def seed_words(seed: np.random.SeedSequence) -> Any:
    """Words for a seed sequence, with its whole pool: NumPy shortens the text of long ones.

    >>> seed_words(np.random.SeedSequence(1)) == seed_words(np.random.SeedSequence(2))
    False
    """
    entropy, key, pool = seed.entropy, seed.spawn_key, seed.pool.tobytes()
    if type(entropy) is int and type(key) is tuple and set(map(type, key)) <= {int}:
        return entropy, key, seed.n_children_spawned, seed.pool_size, pool
    return repr(seed), pool
