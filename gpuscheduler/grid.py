"""Where a block lies in its array, and the coordinates there: for chunk functions that make blocks
of nothing else."""

from __future__ import annotations

import math
import operator
from collections.abc import Container, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import accumulate
from typing import Any

import numpy as np
from dask._task_spec import DataNode, Task, TaskRef
from dask.array._shuffle import _getitem as take_block
from dask.array.chunk import getitem
from dask.blockwise import BlockwiseDep

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tile:
    """A box of an array's elements.

    >>> Tile((4, 0), (2, 3)).numbers(0)
    array([4, 5])
    """

    start: Shape
    shape: Shape

    def numbers(self, axis: int, xp: str = "numpy") -> Any:
        """Of its elements along an axis, counted from the array's first: int64, 1-D, an array of
        the library `xp`."""
        first = self.start[axis]
        return import_module(xp).arange(first, first + self.shape[axis], dtype=np.int64)


class Tiles(BlockwiseDep):
    """For `dask.blockwise`: the tile of each block.

    >>> Tiles(((2, 2), (3,)))[1, 0]
    Tile(start=(2, 0), shape=(2, 3))
    """

    produces_tasks = False

    def __init__(self, chunks: Sequence[Shape]):
        self.chunks = tuple(chunks)
        self.starts = tuple((0, *accumulate(c)) for c in self.chunks)
        self.numblocks = tuple(len(c) for c in self.chunks)

    def __getitem__(self, block: Shape) -> Tile:
        start = tuple([s[n] for s, n in zip(self.starts, block, strict=True)])
        return Tile(start, tuple([c[n] for c, n in zip(self.chunks, block, strict=True)]))

    def __dask_tokenize__(self) -> Any:
        return type(self).__name__, self.chunks


def picked_first(dsk: dict[Any, Any], pins: Container[Any] = ()) -> None:
    """Where elements are taken out of tiles by their numbers (an index list, a mask), make tiles of
    those alone, at coordinates that are given. Changes the graph; the tiles themselves are left in
    it for others that read them. What is in `pins` is made where it is to be, as it is.

    What makes tiles says how, by its method `picked`; see `mesh.MeshTile`.
    """
    takes = [t for t in dsk.values() if type(t) is Task and t.func is take_block]
    for take in takes:
        source, taker = take.args
        index = dsk.get(getattr(taker, "key", None))
        tile: Any = dsk.get(getattr(source, "key", None))
        if type(index) is not DataNode or type(tile) is not Task:
            continue
        # None stands for an axis of the result that the tile has not
        name, wanted = f"{source.key[0]}-{taker.key}", index.value[1]
        own = [i for i in wanted if i is not None]
        axes = [k for k, i in enumerate(own) if not isinstance(i, slice) or i != slice(None)]
        if len(axes) != 1 or np.ndim(own[axes[0]]) != 1:
            continue
        (axis,) = axes
        numbers = np.asarray(own[axis], np.int64)
        parts: Any = None  # of the tile, from which elements are taken
        if tile.func in (getitem, operator.getitem):
            source, parts = tile.args
            if type(source) is not TaskRef or not all(isinstance(i, (slice, int)) for i in parts):
                continue
            tile = dsk.get(source.key)
            axis = [k for k, i in enumerate(parts) if isinstance(i, slice)][axis]
        place = tile.args[0] if hasattr(getattr(tile, "func", None), "picked") else None
        if type(place) is not DataNode or source.key in pins:
            continue
        where: Tile = place.value
        if parts is not None:
            there = range(where.shape[axis])[parts[axis]]
            numbers = there.start + there.step * numbers
            parts = (*parts[:axis], slice(None), *parts[axis + 1 :])
        found = tile.func.picked(axis, where.start[axis] + numbers)
        if found is None:
            continue
        function, n, coordinates = found
        at = f"coordinates-{name}", source.key[1 + axis]
        arrays = list(tile.args[1:])
        if coordinates is None:
            dsk[at] = Task(at, operator.getitem, arrays[n], DataNode(None, numbers))
            arrays[n] = TaskRef(at)
        else:
            dsk[at] = DataNode(at, coordinates)
            arrays.insert(n, TaskRef(at))
        shape = (*where.shape[:axis], len(numbers), *where.shape[axis + 1 :])
        words = DataNode(None, Tile(where.start, shape)), *arrays
        steps = [] if parts is None else [parts]
        if len(own) < len(wanted):
            steps.append(tuple([None if i is None else slice(None) for i in wanted]))
        if not steps:
            dsk[take.key] = Task(take.key, function, *words)
            continue
        made = f"picked-{name}", *source.key[1:]
        dsk[made] = Task(made, function, *words)
        for n, step in enumerate(steps):
            last = n == len(steps) - 1
            key: Any = take.key if last else (f"part-{n}-{name}", *source.key[1:])
            dsk[key] = Task(key, operator.getitem, TaskRef(made), step)
            made = key


@dataclass(frozen=True)
class Axis:
    """Coordinates along one axis, by a formula. See `mesh.axis` and `mesh.geomaxis`."""

    start: float
    stop: float
    n: int
    endpoint: bool = True
    geometric: bool = False

    def __len__(self) -> int:
        return self.n

    def at(self, numbers: Any) -> Any:
        """The coordinates of elements by their numbers, float64, by `numpy.linspace`'s or
        `numpy.geomspace`'s own operations in their order; `numbers` is int64, of any library.

        >>> Axis(0.0, 1.0, 5).at(np.array([4, 1]))
        array([1.  , 0.25])
        """
        if not self.geometric:
            return self._linear(numbers, self.start, self.stop)
        sign = math.copysign(1.0, self.start)
        ends = (float(np.log10(abs(end))) for end in (self.start, self.stop))
        x = sign * np.power(10.0, self._linear(numbers, *ends))
        return self._ended(numbers, np.where(numbers == 0, self.start, x), self.stop)

    @property
    def parts(self) -> int:
        """Steps from `start` to `stop`."""
        return self.n - 1 if self.endpoint else self.n

    def _linear(self, numbers: Any, start: float, stop: float) -> Any:
        parts = self.parts
        delta = stop - start
        x = numbers.astype(np.float64)
        step = delta / parts if parts > 0 else 1.0
        x = x / parts * delta if parts > 0 and step == 0 else x * step
        return self._ended(numbers, x + start, stop)

    def _ended(self, numbers: Any, x: Any, stop: float) -> Any:
        last = self.endpoint and self.n > 1
        return np.where(numbers == self.n - 1, stop, x) if last else x

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        if copy is False:
            raise ValueError("the coordinates are in no memory yet: they cannot but be made")
        return self.at(np.arange(self.n, dtype=np.int64)).astype(dtype or np.float64)


def boxes_alike(values: Any) -> list[tuple[slice, ...]]:
    """An array as boxes of one value each, few of them: each begins at the first element that is in
    none, and is as long as it can be along the last axis, then along the one before, and so on.

    >>> for rows, columns in boxes_alike(np.array([[0, 0], [0, 1], [1, 1]])):
    ...     print(rows.start, rows.stop, columns.start, columns.stop)
    0 1 0 2
    1 2 0 1
    1 3 1 2
    2 3 0 1
    """
    if values.size and (values == values.flat[0]).all():
        return [tuple([slice(0, n) for n in values.shape])]
    left = np.ones(values.shape, bool)
    out = []
    for first in np.ndindex(values.shape):
        if not left[first]:
            continue
        box = [slice(n, n + 1) for n in first]
        for axis in reversed(range(values.ndim)):
            for n in range(first[axis] + 1, values.shape[axis]):
                more = (*box[:axis], slice(n, n + 1), *box[axis + 1 :])
                if not (left[more] & (values[more] == values[first])).all():
                    break
                box[axis] = slice(first[axis], n + 1)
        left[tuple(box)] = False
        out.append(tuple(box))
    return out
