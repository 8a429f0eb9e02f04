"""Where a block lies in its array, for chunk functions that make blocks of nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
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

    def numbers(self, axis: int, xp: Any = np) -> Any:
        """Of its elements along an axis, counted from the array's first: int64, 1-D."""
        first = self.start[axis]
        return xp.arange(first, first + self.shape[axis], dtype=np.int64)


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
