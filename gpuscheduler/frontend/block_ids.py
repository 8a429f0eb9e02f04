"""Give blocks that a function treats alike one position, so that they share a kernel.

Fusion compiles one kernel for all blocks with equal arguments. `da.map_overlap` passes each block
its position, so that blocks at the ends are trimmed on one side only: at most three positions
differ along an axis. `da.gradient` passes each block its position, and uses it only where
coordinates are given. Such blocks get the position of another block that is treated alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import partial
from typing import Any

from dask._task_spec import Task, TaskRef
from dask.blockwise import Blockwise, BlockwiseDep, blockwise_token
from dask.highlevelgraph import HighLevelGraph
from dask.layers import ArrayBlockIdDep, ArrayValuesDep

from ..dask_private import (
    CACHED_BY_BLOCKWISE,
    gradient_kernel,
    pass_extra_kwargs,
    trim_overlap,
)


class _AlikeBlock(BlockwiseDep):
    """Gives each block the position of another block that is treated alike.

    `differs_at_ends` says for each axis whether the blocks at its ends differ from the others.
    With `among`, the number of blocks along each axis comes along.
    """

    produces_tasks = False

    def __init__(self, numblocks: Sequence[int], differs_at_ends: Sequence[bool], among: bool):
        self.numblocks, self.among = tuple(numblocks), among
        self.differs_at_ends = tuple(differs_at_ends)

    @property
    def name(self) -> str:
        """Its name in the graph; instances of one name are equal."""
        ends = "".join("01"[e] for e in self.differs_at_ends)
        return f"gpuscheduler-place-{'x'.join(map(str, self.numblocks))}-{ends}-{self.among:d}"

    def __getitem__(self, idx: tuple[int, ...]) -> Any:
        each = [
            _alike_blocks(i, n) if e else (1, 3)
            for i, n, e in zip(idx, self.numblocks, self.differs_at_ends, strict=True)
        ]
        place = tuple([i for i, _ in each])
        return (place, tuple([n for _, n in each])) if self.among else place


def _alike_blocks(i: int, n: int) -> tuple[int, int]:
    """Return a position for block i of n, and a number of blocks: alike blocks get the same.

    Blocks at the two ends differ from the blocks between them; a single block is both ends.

    >>> [_alike_blocks(i, 5) for i in range(5)], _alike_blocks(0, 1)
    ([(0, 3), (1, 3), (1, 3), (1, 3), (2, 3)], (0, 1))
    """
    return (0, 1) if n == 1 else (0, 3) if i == 0 else (2, 3) if i == n - 1 else (1, 3)


def coarsen_block_ids(hlg: HighLevelGraph) -> HighLevelGraph:
    """Return a graph in which blocks that a function treats alike get the same position.

    >>> import dask.array as da
    >>> x = da.ones((50,), chunks=10).map_overlap(lambda b: b + 1, depth=1)
    >>> graph = coarsen_block_ids(x.dask)
    >>> places = {str(task.args[2]) for key, task in graph.items() if "_trim" in str(key)}
    >>> sorted(places)
    ['DataNode(((0,), (3,)))', 'DataNode(((1,), (3,)))', 'DataNode(((2,), (3,)))']
    """
    changed = {
        name: new
        for name, layer in hlg.layers.items()
        if (new := _coarsen_layer(layer)) is not None
    }
    return HighLevelGraph({**hlg.layers, **changed}, hlg.dependencies) if changed else hlg


def _coarsen_layer(layer: Any) -> Blockwise | None:
    """Return a layer with fewer positions; None for layers of other functions."""
    if type(layer) is not Blockwise or layer.task.func is not pass_extra_kwargs:
        return None
    places = [blockwise_token(n) for n in range(len(layer.indices))]
    arguments = [a.key if type(a) is TaskRef else None for a in layer.task.args]
    if arguments != places or len(places) < 3:
        return None
    (function, _), (names, _), (told, axes), *_ = layer.indices
    dep = layer.io_deps.get(told) if isinstance(told, str) else None
    place = _place(function, names, dep, layer.task)
    if place is None:
        return None
    new = copy(layer)
    for cached in CACHED_BY_BLOCKWISE:
        new.__dict__.pop(cached, None)
    new.indices = (*layer.indices[:2], (place.name, axes), *layer.indices[3:])
    new.io_deps = {**{k: v for k, v in layer.io_deps.items() if k != told}, place.name: place}
    numblocks = {k: n for k, n in layer.numblocks.items() if k != told}
    new.numblocks = {**numblocks, place.name: place.numblocks}
    return new


def _place(function: Any, names: Any, dep: Any, task: Task) -> _AlikeBlock | None:
    """Return the positions that a function gets in place of `dep`; None to leave these."""
    if names == ("_overlap_trim_info",) and type(dep) is ArrayValuesDep:
        if not (type(function) is partial and function.func is trim_overlap and not function.args):
            return None
        depth, boundary = function.keywords["axes"], function.keywords["boundary"]
        ends = [
            depth.get(n, 0) != 0 and boundary.get(n, "none") == "none"
            for n in range(len(dep.numblocks))
        ]
        return _AlikeBlock(dep.numblocks, ends, among=True)
    if names != ("block_id",) or type(dep) is not ArrayBlockIdDep:
        return None
    unread = function is gradient_kernel and task.kwargs.get("array_locs", dep) is None
    return _AlikeBlock(dep.numblocks, [False] * len(dep.numblocks), among=False) if unread else None
