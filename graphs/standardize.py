"""Standard scores of each column: `(x - x.mean(axis=0)) / x.std(axis=0)`, in float32.

A reduction whose result every block needs again, so that x is read twice unless it stays near the
processor. Dask finds the deviation from the moments of the chunks (T. F. Chan, G. H. Golub,
R. J. LeVeque: "Updating formulae and a pairwise algorithm for computing sample variances", 1982).
"""

from __future__ import annotations

from typing import Any

import dask.array as da

from . import _blocks

SEED = 2

SMALL = (400, 250)
FULL = (4 * 2**16, 2**15)  # 8 GiB for each of four GPUs
RTOL = 1e-4
ATOL = 1e-5  # scores near zero are differences


def inputs(
    size: tuple[int, int], chunks: _blocks.Chunks = None, xp: str = "numpy"
) -> tuple[da.Array]:
    """Standard normal numbers, float32 of shape `size`, in chunks of whole rows."""
    grid = _blocks.grid(size, "f4", chunks, (0,))
    return (_blocks.normal(size, grid, "f4", SEED, xp),)


def apply(x: da.Array) -> da.Array:
    """The scores, of the shape of x."""
    return (x - x.mean(axis=0)) / x.std(axis=0)


def build(size: tuple[int, int], chunks: _blocks.Chunks = None, xp: str = "numpy") -> da.Array:
    """The scores of an array of shape `size` (rows, columns)."""
    return apply(*inputs(size, chunks, xp))


def reference(size: tuple[int, int], window: _blocks.Window | None = None) -> Any:
    """The scores, or their part at `window`, from moments in float64; reads those columns whole."""
    rows, columns = window or _blocks.whole(size)
    x = _blocks.normal_block((slice(0, size[0]), columns), size, "f4", SEED).astype("f8")
    return ((x[rows] - x.mean(axis=0)) / x.std(axis=0)).astype("f4")


def bytes_moved(size: tuple[int, int]) -> int:
    """x read once, the scores written. (An x larger than the caches is in truth read twice.)"""
    return 2 * 4 * size[0] * size[1]


def flops(size: tuple[int, int]) -> int:
    """Six per element: the sum; difference, square, sum for the variance; difference, quotient."""
    return 6 * size[0] * size[1]
