"""A block's position in its array, and the coordinates there.

Chunk functions that make blocks from coordinates alone get a tile.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import accumulate
from typing import Any

import numpy as np
from dask.blockwise import BlockwiseDep

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tile:
    """A box of an array's elements.

    >>> Tile((4, 0), (2, 3)).indices(0)
    array([4, 5])
    """

    start: Shape
    shape: Shape

    def indices(self, axis: int, xp: str = "numpy") -> Any:
        """Return the indices of its elements along an axis of the array.

        The result is int64, 1-D, an array of the library `xp`.
        """
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


@dataclass(frozen=True)
class MeshAxis:
    """Coordinates along one axis, by a formula. See `mesh.axis` and `mesh.geomaxis`."""

    start: float
    stop: float
    n: int
    endpoint: bool = True
    geometric: bool = False

    def __len__(self) -> int:
        return self.n

    def coordinates_of(self, indices: Any) -> Any:
        """The coordinates of elements `indices` (int64), as float64.

        The operations and their order are those of `numpy.linspace` or `numpy.geomspace`.

        >>> MeshAxis(0.0, 1.0, 5).coordinates_of(np.array([4, 1]))
        array([1.  , 0.25])
        """
        if not self.geometric:
            return self._linear_coordinates(indices, self.start, self.stop)
        sign = math.copysign(1.0, self.start)
        ends = (float(np.log10(abs(end))) for end in (self.start, self.stop))
        x = sign * np.power(10.0, self._linear_coordinates(indices, *ends))
        return self._end_exactly(indices, np.where(indices == 0, self.start, x), self.stop)

    @property
    def parts(self) -> int:
        """Steps from `start` to `stop`."""
        return self.n - 1 if self.endpoint else self.n

    def _linear_coordinates(self, indices: Any, start: float, stop: float) -> Any:
        parts = self.parts
        delta = stop - start
        x = indices.astype(np.float64)
        step = delta / parts if parts > 0 else 1.0
        x = x / parts * delta if parts > 0 and step == 0 else x * step
        return self._end_exactly(indices, x + start, stop)

    def _end_exactly(self, indices: Any, x: Any, stop: float) -> Any:
        last = self.endpoint and self.n > 1
        return np.where(indices == self.n - 1, stop, x) if last else x

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        if copy is False:
            raise ValueError(
                "copy=False: an axis computes its coordinates at each read; use copy=None"
            )
        return self.coordinates_of(np.arange(self.n, dtype=np.int64)).astype(dtype or np.float64)


def boxes_alike(values: Any) -> list[tuple[slice, ...]]:
    """Split an array into few boxes of one value each.

    Each box begins at the first element that is in no box. It is as long as possible along the last
    axis, then along the one before, and so on.

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
