"""The sum of a Gaussian of normal random numbers: `exp(-0.5 * ((x - 0.1) / 2)**2).sum()`.

The plainest elementwise chain with a reduction, all in float32: one sweep over memory is all that
is needed, and an evaluation operation by operation takes six or more. The function is the normal
density without its factor, the usual example of expression compilers such as numexpr.
"""

from __future__ import annotations

from typing import Any

import dask.array as da
import numpy as np

from . import _blocks

MEAN = np.float32(0.1)
DEVIATION = np.float32(2.0)
SEED = 1

SMALL = (400, 250)
FULL = (4 * 2**16, 2**15)  # 8 GiB for each of four GPUs
RTOL = 1e-5  # a tree of float32 sums
ATOL = 0.0


def inputs(
    size: tuple[int, int], chunks: _blocks.Chunks = None, xp: str = "numpy"
) -> tuple[da.Array]:
    """Standard normal numbers, float32 of shape `size`, in chunks of whole rows."""
    grid = _blocks.grid(size, "f4", chunks, (0,))
    return (_blocks.normal(size, grid, "f4", SEED, xp),)


def apply(x: da.Array) -> da.Array:
    """The sum, a float32 of no dimension."""
    return da.exp(np.float32(-0.5) * ((x - MEAN) / DEVIATION) ** 2).sum()


def build(size: tuple[int, int], chunks: _blocks.Chunks = None, xp: str = "numpy") -> da.Array:
    """The sum over an array of shape `size` (rows, columns)."""
    return apply(*inputs(size, chunks, xp))


def reference(size: tuple[int, int]) -> Any:
    """The sum, added up in float64, a few rows at a time: at full size this takes minutes."""
    total = 0.0
    for rows in _blocks.slabs(size[0], 4 * size[1]):
        x = _blocks.normal_block((rows, slice(0, size[1])), size, "f4", SEED)
        total += np.exp(-0.5 * ((x.astype("f8") - MEAN) / DEVIATION) ** 2).sum()
    return np.float32(total)


def bytes_moved(size: tuple[int, int]) -> int:
    """x read once, the sum written."""
    return 4 * size[0] * size[1] + 4


def flops(size: tuple[int, int]) -> int:
    """Six per element: difference, quotient, square, product, exponential, sum."""
    return 6 * size[0] * size[1]
