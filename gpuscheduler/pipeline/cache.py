"""The plan cache: collections that were computed before are not planned again.

The cache key of a collection has the ids of its layers, to which the cache holds weak references.
A plan goes with the first of its layers, and so do the arrays that its tasks hold. It also goes
when a global has changed that a user's function read while the plan was made. Its template stays,
for collections that are like it (`template`).
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from gc import get_referents
from operator import is_not
from sys import getsizeof
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from dask import config
from dask._task_spec import GraphNode, Task
from dask.array.core import finalize
from dask.base import collections_to_expr
from dask.core import flatten
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer

from ..dask_private import HLGExpr, HLGExprSequence, layers_of
from ..forks import new_rlock
from ..frontend.builder import key_lists
from ..plan.plan import Plan
from .comparable import Home, SameObject, has_items, items_of
from .fingerprint import (
    SETTINGS,
    Fingerprint,
    FingerprintReader,
)
from .plan_entry import PlanEntry
from .template import FilledTemplate, PlanTemplate, template

Key = Any
T = TypeVar("T")
#: The number of a layer that its owner may write to, and the tasks that were in it.
Written = tuple[int, tuple[Any, ...]]

#: Default limit of plans and templates together, in bytes.
MEMORY = 2**28
#: Bytes of plans and templates that stay while the host's memory is short.
LEAST = 2**24
#: Part of the available memory that plans and templates may take when one is kept.
PART = 1 / 4
#: Bytes that a step of a small plan takes, about, and one word of a template. (By tracemalloc,
#: steps of 4,000 blocks took 2,000 to 3,100 bytes, in sums, means, rechunk and map_blocks.)
STEP, WORD = 3_000, 150
#: Bytes of a step that a template gave, without the parts that it shares with the template.
FILLED_STEP = 600
#: Bytes that a graph has for each step: names, sizes, reasons.
BESIDE = 800
#: The size of a plan with `MANY` steps or more is estimated from `SAMPLE` steps, and from at most
#: `DEEP` objects of each.
MANY, SAMPLE, DEEP = 1_000, 32, 2_000
#: A collection with more words than `CULLED` for each planned task, and more than `SMALL` in all,
#: gets no template: most of its graph is culled, and reading it takes longer than planning.
CULLED, SMALL = 200, 1_000
#: Collections without a template for that reason that are remembered.
REMEMBERED = 1_000


class SingleCollection:
    """The only collection of a computation, whose expression is built when needed.

    A collection whose plan is in the cache needs none.
    """

    __slots__ = ("collection", "optimize_graph")

    def __init__(self, collection: Any, optimize_graph: bool):
        self.collection, self.optimize_graph = collection, optimize_graph

    @classmethod
    def wrap(cls, collection: Any, optimize_graph: bool) -> Any:
        """Wrap a collection with a graph of layers; return the expression of any other."""
        out = cls(collection, optimize_graph)
        made = type(getattr(collection, "dask", None)) is HighLevelGraph
        return out if made and hasattr(collection, "__dask_optimize__") else build_expression(out)

    @property
    def hlg(self) -> HighLevelGraph:
        return self.collection.dask  # type: ignore[no-any-return]

    @property
    def low_level_optimizer(self) -> Any:
        return self.collection.__dask_optimize__ if self.optimize_graph else None


def read_collections(collections: Any, optimize_graph: bool) -> tuple[Any, list[list[Key]]]:
    """Return one expression for these collections, and the flat list of keys of each."""
    if len(collections) == 1 and not hasattr(collections[0], "expr"):  # Dask need not make a graph
        (x,) = collections
        return SingleCollection.wrap(x, optimize_graph), [list(flatten(x.__dask_keys__()))]
    expr = collections_to_expr(collections, optimize_graph).optimize()
    return expr, [list(flatten(keys)) for keys in expr.__dask_keys__()]


def build_expression(dsk: Any) -> Any:
    """Build the expression of a `SingleCollection`; return anything else unchanged."""
    if type(dsk) is not SingleCollection:
        return dsk
    return collections_to_expr(dsk.collection, dsk.optimize_graph)


class PlanKey:
    """The cache key of a computation: its layers, and the keys wanted of them."""

    def __init__(self, words: tuple[Any, ...], layers: list[Any]):
        self.words, self.layers = words, layers


def signature(dsk: Any, wanted: tuple[Key, ...]) -> PlanKey | None:
    """The cache key of an expression of `compute()` or `persist()`; None for others.

    >>> import dask.array as da
    >>> from dask._expr import FinalizeCompute
    >>> from dask.base import collections_to_expr
    >>> x = da.ones(4, chunks=2) + 1
    >>> def expression():
    ...     return FinalizeCompute(collections_to_expr([x])).optimize()
    >>> a, b = expression(), expression()
    >>> a._name == b._name  # every compute() gets names of its own
    False
    >>> words = [signature(e, tuple(flatten(e.__dask_keys__()))).words for e in (a, b)]
    >>> words[0] == words[1]
    True
    """
    if not isinstance(dsk, (SingleCollection, HLGExprSequence, HLGExpr)):
        return None
    operands = dsk.operands if isinstance(dsk, HLGExprSequence) else [dsk]
    names: dict[Key, Any] = {}
    words: list[Any] = [config.get(s, None) for s in SETTINGS]
    layers: list[Any] = []
    for op in operands:
        hlg = layers_of(op)
        if hlg is None:
            return None
        optimizer = op.low_level_optimizer
        if isinstance(optimizer, MethodType):  # another one each time
            return None
        words.append(SameObject(optimizer))
        some = hlg.layers
        for name in wanted if isinstance(op, SingleCollection) else flatten(op.__dask_keys__()):
            if type(name) is not str or name not in some:
                continue
            task = some[name].get(name)
            if isinstance(task, Task) and task.func is finalize and len(task.args) == 1:
                blocks = key_lists(task.args[0])
                if blocks is not None:
                    names[name] = _as_hashable(blocks)
        if names:
            some = {name: layer for name, layer in some.items() if name not in names}
        words += tuple(some), tuple(map(id, some.values()))
        layers += some.values()
    words.append(tuple([names.get(k, k) for k in wanted]) if names else wanted)
    return PlanKey(tuple(words), layers)


def _as_hashable(keys: Any) -> Any:
    return tuple(map(_as_hashable, keys)) if isinstance(keys, list) else keys


class _Kept(NamedTuple):
    """A plan, references to its layers, and the layers that their owners may write to."""

    entry: PlanEntry
    watched: list[Any]
    written: list[Written]


class PlanCache:
    """The latest plans and the latest templates, with equal parts of `limit` bytes.

    Steps that a plan shares with its template are counted in both. Beside them are the latest plans
    that templates gave, with an eighth of `limit` for what these do not share. `available` returns
    the bytes of available memory, of which the cache takes `part` at most.
    """

    def __init__(
        self, limit: int = MEMORY, available: Callable[[], int] | None = None, part: float = PART
    ):
        self.limit, self._available, self._part = limit, available, part
        half, rest = _divide_limit(limit)
        self._plans: _LatestBySize[_Kept] = _LatestBySize(half)
        self._templates: _LatestBySize[PlanTemplate] = _LatestBySize(half)
        #: Plans that templates gave last, by structure.
        self._filled: _LatestBySize[FilledTemplate] = _LatestBySize(rest)
        self._reader = FingerprintReader()
        self._culled: _LatestBySize[bool] = _LatestBySize(
            REMEMBERED
        )  # by the sizes of their layers

    def __len__(self) -> int:
        return len(self._plans)

    @property
    def nbytes(self) -> int:
        """Bytes of all plans and templates, about."""
        return self._plans.size + self._templates.size + self._filled.size

    def shed(self, limit: int | None = None) -> None:
        """Drop the oldest plans and templates until `limit` bytes are left."""
        limit = LEAST if limit is None else limit
        if self.nbytes > limit:
            half, rest = _divide_limit(limit)
            self._filled.shrink(rest)
            self._plans.shrink(half)
            self._templates.shrink(half)

    def _make_room(self, nbytes: int) -> None:
        """Shed until all, with `nbytes` more, take their part of the available memory."""
        if self._available is not None and self.nbytes + nbytes > LEAST:
            left = self._available() + self.nbytes
            self.shed(max(LEAST, int(self._part * left) - nbytes))

    def plans(self) -> list[Plan]:
        """The plans, the latest last."""
        return [kept.entry.plan for kept in self._plans.values()]

    def entries(self) -> list[PlanEntry]:
        """The plans with what runs have learned, the latest last."""
        return [kept.entry for kept in self._plans.values()]

    def find(self, known: PlanKey, *where: Any) -> PlanEntry | None:
        """The plan of the same computation on the same devices, if it is kept."""
        key = (known.words, where)
        found = self._plans.get(key)
        if found is None:
            return None
        gone = any(map(is_not, [w() for w in found.watched], known.layers))
        gone = gone or not all(has_items(known.layers[n], items) for n, items in found.written)
        if gone or found.entry.graph.has_changed():
            self._plans.drop(key)
            return None
        return found.entry

    def keep(self, known: PlanKey, *where: Any, entry: PlanEntry) -> None:
        key = (known.words, where)
        plans = weakref.ref(self._plans)

        def forget_plan(_: Any) -> None:
            if (alive := plans()) is not None:
                alive.drop(key)

        try:
            watched = [weakref.ref(layer, forget_plan) for layer in known.layers]
        except TypeError:  # a layer of somebody else's making that cannot be watched
            return
        every = [(n, items_of(layer)) for n, layer in enumerate(known.layers)]
        written = [(n, items) for n, items in every if items is not None]
        nbytes = entry.nbytes = entry.nbytes or nbytes_of(entry.plan.steps)
        self._make_room(nbytes)
        self._plans.put(key, _Kept(entry, watched, written), nbytes)

    def likeness(self, dsk: Any, wanted: tuple[Key, ...], home: Home) -> Fingerprint | None:
        """The fingerprint of an expression, if it can have one."""
        if self._culled.get(_size(dsk)):
            return None
        return self._reader.likeness(dsk, wanted, home)

    def find_like(
        self, like: Fingerprint, wanted: tuple[Key, ...], *where: Any
    ) -> PlanEntry | None:
        """A plan from the template of a computation with this fingerprint, if it is kept."""
        latest = self._filled.get((like.structure, where))
        if latest is not None and (entry := latest.renew(like, wanted)) is not None:
            return entry
        key = (like.words, where)
        found = None if like.words is None else self._templates.get(key)
        if found is None:
            return None
        if not found.is_valid():
            self._templates.drop(key)
            return None
        try:
            entry = found.fill(like, wanted) if found.fits(like) else None
        except RecursionError:  # functions in functions in functions
            return None
        if entry is not None:
            self._keep_filled(found, like, wanted, where, entry, len(entry.plan.steps))
        return entry

    def _keep_filled(
        self,
        found: PlanTemplate,
        like: Fingerprint,
        wanted: tuple[Key, ...],
        where: tuple[Any, ...],
        entry: PlanEntry | weakref.ref[PlanEntry],
        steps: int,
    ) -> None:
        """Keep a plan that has a template as long as the layers that have its data."""
        key = (like.structure, where)
        every = weakref.ref(self._filled)

        def forget(_: Any) -> None:
            if (alive := every()) is not None and alive.peek(key) is own():
                alive.drop(key)

        try:
            watched = [weakref.ref(layer, forget) for layer in like.holders]
        except TypeError:  # a layer of somebody else's making that cannot be watched
            return
        kept = FilledTemplate(found, like, wanted, entry, watched)
        own = weakref.ref(kept)  # or both would keep each other alive, with the data
        self._filled.put(key, kept, FILLED_STEP * steps)

    def learn_from(self, dsk: Any, like: Fingerprint, *where: Any, entry: PlanEntry) -> None:
        """Keep the template of a plan: the plan without names and data."""
        plan = entry.plan
        tasks = max([p.before for p in plan.passes], default=len(plan.steps))
        if like.size > max(SMALL, CULLED * tasks):
            self._culled.put(_size(dsk), True, 1)
            return
        if like.words is None:
            return
        try:
            found = template(entry, like)
        except RecursionError:  # as above
            return
        if found is not None:
            entry.like = found.entry
            entry.nbytes = found.entry.nbytes = nbytes_of(plan.steps)
            nbytes = entry.nbytes + like.size * WORD
            self._make_room(nbytes)
            self._templates.put((like.words, where), found, nbytes)
            wanted, steps = entry.graph.wanted, len(plan.steps)
            self._keep_filled(found, like, wanted, where, weakref.ref(entry), steps)

    def clear(self) -> None:
        self._plans.clear()
        self._templates.clear()
        self._filled.clear()


def _size(dsk: Any) -> tuple[Any, ...]:
    """The number of tasks of each materialized layer of an expression."""
    operands = dsk.operands if isinstance(dsk, HLGExprSequence) else [dsk]
    return tuple(
        [
            (type(layer), len(layer) if type(layer) is MaterializedLayer else 0)
            for op in operands
            if (graph := layers_of(op)) is not None
            for layer in graph.layers.values()
        ]
    )


def nbytes_of(steps: list[Any]) -> int:
    """Bytes of the steps of a plan, about, without arrays, which others hold.

    >>> nbytes_of([None] * 10)
    30000
    """
    if len(steps) < MANY:
        return STEP * len(steps)
    seen: set[int] = set()
    shared = _sum_sizes(steps[0], seen)  # with what is in every step
    some = steps[1 :: max(1, len(steps) // SAMPLE)]
    each = sum([_sum_sizes(step, seen) for step in some]) / len(some)
    return shared + int((each + BESIDE) * len(steps))


#: What is not looked into: others hold it.
_NOT_OURS = (type, ModuleType, FunctionType, BuiltinFunctionType, CodeType, np.ndarray, np.dtype)


def _sum_sizes(thing: Any, seen: set[int]) -> int:
    """Bytes of an object and of its parts that were not seen before."""
    nbytes, looked, stack = 0, 0, [thing]
    while stack and looked < DEEP:
        it = stack.pop()
        if id(it) in seen or isinstance(it, _NOT_OURS):
            continue
        seen.add(id(it))
        looked += 1
        # that of Dask's tasks counts their class, and all that is in them, once more
        nbytes += object.__sizeof__(it) if isinstance(it, GraphNode) else getsizeof(it)
        stack += get_referents(it)
    return nbytes


def _divide_limit(limit: int) -> tuple[int, int]:
    """Bytes that plans and templates may take each, and those for plans that templates gave."""
    rest = limit // 8
    return (limit - rest) // 2, rest


class _LatestBySize(Generic[T]):
    """A mapping of the latest entries, whose sizes sum to `limit` at most."""

    def __init__(self, limit: int):
        self.limit, self.size = limit, 0
        self._found: OrderedDict[Any, tuple[Any, T, int]] = OrderedDict()
        self._last: tuple[Any, T, int] | None = None  # found, and still there
        self._lock = new_rlock()  # a layer may go, and call back, while the lock is held

    def __len__(self) -> int:
        return len(self._found)

    def values(self) -> list[T]:
        with self._lock:
            return [value for _, value, _ in self._found.values()]

    def get(self, key: Any) -> T | None:
        with self._lock:
            found = self._last  # most often the same again: its key is compared, and not hashed
            if found is None or found[0] != key:
                found = self._found.pop(key, None)
                if found is None:
                    return None
                self._found[found[0]] = found  # under its own key, found without comparing
                self._last = found
            return found[1]

    def peek(self, key: Any) -> T | None:
        """An entry, which does not count as used by that."""
        with self._lock:
            found = self._found.get(key)
            return None if found is None else found[1]

    def put(self, key: Any, value: T, size: int) -> None:
        with self._lock:
            self.drop(key)
            if size > self.limit:
                return
            self._found[key], self._last = (key, value, size), None
            self.size += size
            self.shrink(self.limit)

    def shrink(self, limit: int) -> None:
        """Drop the oldest entries, down to a size."""
        with self._lock:
            while self.size > limit:
                self.drop(next(iter(self._found)))

    def drop(self, key: Any) -> None:
        with self._lock:
            found = self._found.pop(key, None)
            if found is not None:
                self.size -= found[2]
            if found is self._last:
                self._last = None

    def clear(self) -> None:
        with self._lock:
            self._found.clear()
            self._last = None
            self.size = 0
