"""The product of a square matrix with itself, `x @ x`, in float32.

The one workload here that arithmetic bounds, not memory. Dask multiplies block by block: for b
blocks a side it makes b³ products of blocks and adds them up, each output block from b products
(the classical blocked algorithm, G. H. Golub and C. F. Van Loan, "Matrix Computations", 1.3).
All entries are positive, so nothing cancels, and an answer made in TF32 (errors of 1e-4 and more)
is told apart from one in true float32.
"""

from __future__ import annotations

from typing import Any

import dask.array as da

from . import _blocks

SEED = 4

SMALL = 256
FULL = 32768
RTOL = 1e-5
ATOL = 0.0


def inputs(size: int, chunks: _blocks.Chunks = None, xp: str = "numpy") -> tuple[da.Array]:
    """Uniform numbers in [0, 1), float32, (size, size) in square blocks."""
    grid = _blocks.grid((size, size), "f4", chunks, (0, 1))
    return (_blocks.once(_blocks.uniform((size, size), grid, "f4", SEED, xp)),)


def apply(x: da.Array) -> da.Array:
    """The product, of the shape of x."""
    return x @ x


def build(size: int, chunks: _blocks.Chunks = None, xp: str = "numpy") -> da.Array:
    """The product for a matrix of `size` rows and columns."""
    return apply(*inputs(size, chunks, xp))


def reference(size: int, window: _blocks.Window | None = None) -> Any:
    """The product, or its part at `window`, added up in float64."""
    shape = (size, size)
    rows, columns = window or _blocks.whole(shape)
    left = _blocks.uniform_block((rows, slice(0, size)), shape, "f4", SEED)
    right = _blocks.uniform_block((slice(0, size), columns), shape, "f4", SEED)
    return (left.astype("f8") @ right.astype("f8")).astype("f4")


def bytes_moved(size: int) -> int:
    """x read once, the product written."""
    return 2 * 4 * size**2


def flops(size: int) -> int:
    """A multiplication and an addition for each of size³ pairs."""
    return 2 * size**3
