"""The sum of a matrix and its transpose, `(x + x.T).sum()`, in float32.

Block (i, j) meets block (j, i), so with the blocks spread over devices nearly half the matrix has
to cross a link: it measures the links, and whether copies hide behind work. `x + x.T`
is the example of Dask's documentation of arrays; transposition as a test of links is one of the
Parallel Research Kernels (R. F. Van der Wijngaart, T. G. Mattson, HPEC 2014).
"""

from __future__ import annotations

from typing import Any

import dask.array as da
import numpy as np

from . import _blocks

SEED = 3

SMALL = 400
FULL = 65536
RTOL = 1e-5  # a tree of float32 sums
ATOL = 0.0


def inputs(size: int, chunks: _blocks.Chunks = None, xp: str = "numpy") -> tuple[da.Array]:
    """Uniform numbers in [0, 1), float32, (size, size) in square blocks."""
    grid = _blocks.grid((size, size), "f4", chunks, (0, 1))
    return (_blocks.uniform((size, size), grid, "f4", SEED, xp),)


def apply(x: da.Array) -> da.Array:
    """The sum, a float32 of no dimension."""
    return (x + x.T).sum()


def build(size: int, chunks: _blocks.Chunks = None, xp: str = "numpy") -> da.Array:
    """The sum for a matrix of `size` rows and columns."""
    return apply(*inputs(size, chunks, xp))


def reference(size: int) -> Any:
    """The sum, added up in float64, a few rows and columns at a time."""
    shape = (size, size)
    total = 0.0
    for part in _blocks.slabs(size, 4 * size):
        rows = _blocks.uniform_block((part, slice(0, size)), shape, "f4", SEED)
        columns = _blocks.uniform_block((slice(0, size), part), shape, "f4", SEED)
        total += (rows + columns.T).sum(dtype="f8")
    return np.float32(total)


def bytes_moved(size: int) -> int:
    """x read once (two blocks that meet can serve both places), the sum written."""
    return 4 * size**2 + 4


def flops(size: int) -> int:
    """Two additions per element."""
    return 2 * size**2
