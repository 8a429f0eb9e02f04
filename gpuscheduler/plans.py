"""Plans of collections that were computed before: planned once, run again at once.

A collection is recognised by the very layers that it is made of. They are watched weakly: when one
is gone the plan goes, too, and with it every array that its tasks hold. So it does when a global
that a user's function read while the plan was made is another one now.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from typing import Any

from dask import config
from dask._expr import HLGExpr, _HLGExprSequence
from dask._task_spec import Task
from dask.array.core import finalize
from dask.core import flatten
from dask.highlevelgraph import HighLevelGraph

from .graph import Graph, key_lists
from .plan import Plan

Key = Any

#: Settings that change what a collection becomes.
SETTINGS = ("optimization.fuse.active", "optimization.annotations.fuse")


class Signature:
    """What makes two computations the same: the same layers, and the same keys wanted of them."""

    def __init__(self, words: tuple[Any, ...], layers: list[Any]):
        self.words, self.layers = words, layers


def signature(dsk: Any, wanted: tuple[Key, ...]) -> Signature | None:
    """The signature of an expression as `compute()` and `persist()` make them; None for others.

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
    if not isinstance(dsk, (_HLGExprSequence, HLGExpr)):
        return None
    operands = dsk.operands if isinstance(dsk, _HLGExprSequence) else [dsk]
    names: dict[Key, Any] = {}
    words: list[Any] = [config.get(s, None) for s in SETTINGS]
    layers = []
    for op in operands:
        hlg = getattr(op, "hlg", None)
        if not isinstance(hlg, HighLevelGraph):
            return None
        words.append(id(op.low_level_optimizer))
        ends = set(flatten(op.__dask_keys__()))
        for name, layer in hlg.layers.items():
            if name in ends:
                task = layer.get(name)
                if isinstance(task, Task) and task.func is finalize and len(task.args) == 1:
                    blocks = key_lists(task.args[0])
                    if blocks is not None:
                        names[name] = _hashable(blocks)
                        continue
            words.append((name, id(layer)))
            layers.append(layer)
    words.append(tuple(names.get(k, k) for k in wanted))
    return Signature(tuple(words), layers)


def _hashable(keys: Any) -> Any:
    return tuple(map(_hashable, keys)) if isinstance(keys, list) else keys


class Plans:
    """The latest plans, up to `limit` steps in all."""

    def __init__(self, limit: int = 200_000):
        self.limit = limit
        self.steps = 0
        self._plans: OrderedDict[Any, tuple[Graph, Plan, list[Any]]] = OrderedDict()
        self._lock = threading.RLock()  # a layer may go, and call back, while the lock is held

    def __len__(self) -> int:
        return len(self._plans)

    def find(self, known: Signature, *place: Any) -> tuple[Graph, Plan] | None:
        """The plan for the same computation in the same place."""
        key = (known.words, place)
        with self._lock:
            found = self._plans.get(key)
            if found is None:
                return None
            graph, plan, watched = found
            gone = any(w() is not layer for w, layer in zip(watched, known.layers, strict=True))
            if gone or any(where.get(name) is not value for where, name, value in graph.globals):
                self._drop(key)
                return None
            self._plans.move_to_end(key)
            return graph, plan

    def keep(self, known: Signature, *where: Any, graph: Graph, plan: Plan) -> None:
        key = (known.words, where)
        plans = weakref.ref(self)

        def gone(_: Any) -> None:
            if (alive := plans()) is not None:
                alive._drop(key)

        try:
            watched = [weakref.ref(layer, gone) for layer in known.layers]
        except TypeError:  # a layer of somebody else's making that cannot be watched
            return
        with self._lock:
            self._drop(key)
            if len(plan.steps) > self.limit:
                return
            self._plans[key] = graph, plan, watched
            self.steps += len(plan.steps)
            while self.steps > self.limit:
                self._drop(next(iter(self._plans)))

    def clear(self) -> None:
        with self._lock:
            self._plans.clear()
            self.steps = 0

    def _drop(self, key: Any) -> None:
        with self._lock:
            found = self._plans.pop(key, None)
            if found is not None:
                self.steps -= len(found[1].steps)
