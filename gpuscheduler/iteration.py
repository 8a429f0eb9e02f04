"""Repeat a step of an iteration by one graph, which Dask builds once.

Dask takes some 10 ms to build the graph of a step of ten operations; a GPU may compute it in one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import count
from typing import Any

import dask
import numpy as np
from dask._task_spec import DataNode, GraphNode
from dask.array.core import Array
from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer

from .frontend.chunk import ChunkTask


class Iteration:
    """Some rounds of a step, to be computed again and again from the arrays that it gives.

    The graph of all rounds is built once, and planned once. A call puts other arrays into it,
    computes it, and keeps the results on the devices, as `persist` does.

    Parameters
    ----------
    step : callable
        Takes as many dask arrays as there are in the state, and returns as many: of the same
        shapes, chunks and dtypes. It is called once for each round, when the graph is built. What
        else it reads, such as a persisted matrix, stays the same for all calls.
    *state : dask arrays
        What the first call may start from; their chunks are known.
    rounds : int
        How many steps one call computes.

    Raises
    ------
    ValueError
        If the step gives other shapes, chunks or dtypes than it takes, or a call gets such.
    TypeError
        If the state or what the step gives is not of dask arrays.

    Examples
    --------
    >>> import dask, dask.array as da, gpuscheduler
    >>> def halve(x, total):
    ...     return x / 2, total + x.sum()
    >>> with gpuscheduler.Scheduler("cpu:2"):
    ...     state = dask.persist(da.ones(1000, chunks=250), da.zeros((), chunks=()))
    ...     run = gpuscheduler.Iteration(halve, *state, rounds=10)
    ...     for _ in range(3):
    ...         state = run(*state)
    ...     float(state[1].compute())
    1999.9999981373549
    """

    def __init__(self, step: Callable[..., Any], *state: Any, rounds: int = 1):
        if not isinstance(rounds, int) or rounds < 1:
            raise ValueError(f"rounds={rounds!r}: use a whole number from 1 on")
        for n, array in enumerate(state):
            _check_array(f"argument {n} of the state", array)
        name = f"iteration-{tokenize(object())}"
        self._inputs = [
            Array({}, f"{name}-{n}", a.chunks, meta=a._meta) for n, a in enumerate(state)
        ]
        made: tuple[Any, ...] = tuple(self._inputs)
        for _ in range(rounds):
            given = step(*made)
            made = tuple(given) if isinstance(given, (tuple, list)) else (given,)
            if len(made) != len(state):
                raise ValueError(
                    f"the step takes {len(state)} arrays and gives {len(made)}: it has to give as "
                    "many as it takes"
                )
            for n, (array, like) in enumerate(zip(made, self._inputs, strict=True)):
                _check_array(f"result {n} of the step", array)
                _check_alike(f"result {n} of the step", array, like)
        self._outputs = made
        self.rounds = rounds
        graph = HighLevelGraph.merge(*[a.dask for a in made])
        self._layers, self._needs = dict(graph.layers), dict(graph.dependencies)
        self._calls = count()

    def __repr__(self) -> str:
        n = len(self._inputs)
        return f"<Iteration of {self.rounds} rounds over {n} array{'s'[: n != 1]}>"

    def __call__(self, *state: Any) -> tuple[Array, ...]:
        """Compute all rounds from other arrays. Returns persisted arrays, with names of their own.

        Blocks that are not persisted yet are computed first.
        """
        if len(state) != len(self._inputs):
            raise ValueError(
                f"{len(state)} arrays were given, and the state has {len(self._inputs)}"
            )
        for n, (array, like) in enumerate(zip(state, self._inputs, strict=True)):
            _check_array(f"argument {n}", array)
            _check_alike(f"argument {n}", array, like)
        layers, needs = dict(self._layers), dict(self._needs)
        for array, like in zip(_persist_state(state), self._inputs, strict=True):
            layers[like.name], needs[like.name] = _renamed_layer(array, like.name), set()
        graph = HighLevelGraph(layers, needs)
        lazy = [Array(graph, a.name, a.chunks, meta=a._meta) for a in self._outputs]
        number, out = next(self._calls), []
        for array in dask.persist(*lazy):
            name = f"{array.name}-{number}"
            layer = {name: _renamed_layer(array, name)}
            made = HighLevelGraph(layer, {name: set()})
            out.append(Array(made, name, array.chunks, meta=array._meta))
        return tuple(out)


def _check_array(what: str, array: Any) -> None:
    if not isinstance(array, Array):
        raise TypeError(
            f"{what} is a {type(array).__name__}, and must be a dask array: use da.asarray, and "
            "have the step return the arrays of the next round"
        )
    if any(math.isnan(c) for lengths in array.chunks for c in lengths):
        raise ValueError(f"{what} has unknown chunks: use x.compute_chunk_sizes() first")


def _check_alike(what: str, array: Array, like: Array) -> None:
    if (array.chunks, array.dtype) != (like.chunks, like.dtype):
        raise ValueError(
            f"{what} has chunks {array.chunks} and dtype {array.dtype}, and the state has "
            f"{like.chunks} and {like.dtype}: use rechunk and astype"
        )


def _is_persisted(array: Array) -> bool:
    return len(array.dask.layers) == 1 and all(
        type(item) is ChunkTask or not isinstance(item, (GraphNode, tuple))
        for item in array.dask.layers[array.name].values()
    )


def _persist_state(state: tuple[Any, ...]) -> list[Array]:
    unpersisted = [n for n, array in enumerate(state) if not _is_persisted(array)]
    out = list(state)
    persisted = dask.persist(*[state[n] for n in unpersisted])
    for n, array in zip(unpersisted, persisted, strict=True):
        out[n] = array
    return out


def _renamed_layer(array: Array, name: str) -> MaterializedLayer:
    """The blocks of a persisted array, under another name."""
    blocks: dict[Any, Any] = {}
    for old, item in array.dask.layers[array.name].items():
        key = (name, *old[1:])
        if type(item) is ChunkTask:
            blocks[key] = ChunkTask(key, item.func)
        elif isinstance(item, GraphNode) and not isinstance(item, DataNode):
            raise NotImplementedError(
                f"{array!r} is held by a cluster, where Iteration does not work: use persist"
            )
        else:
            value = item.value if isinstance(item, DataNode) else item
            # a number would be a constant of the plan, an array is data
            blocks[key] = np.asarray(value) if isinstance(value, np.generic) else value
    return MaterializedLayer(blocks)
