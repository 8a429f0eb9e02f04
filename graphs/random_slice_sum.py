"""Two terabytes of random numbers, every other one summed: `(x + 1)[::2, ::2].sum()`.

    x = da.random.normal(10, 1, size=(500_000, 500_000), chunks=(10_000, 10_000))
    (x + 1)[::2, ::2].sum()

The example of Matthew Rocklin's "GPU Dask Arrays, first steps" (https://matthewrocklin.com/blog/
work/2019/01/03/dask-array-gpus-first-steps, 2019). x has 2 TB at full size and is never held: each
block is made, used and dropped. The numbers are those of `gpuscheduler.random`, which depend on the
seed and the position alone; the answer is known as an expectation with its spread.
"""

from __future__ import annotations

from typing import Any

import dask.array as da
import numpy as np

from gpuscheduler.random import Philox, default_rng

from . import _blocks

MEAN, DEVIATION = 10, 1
SEED = 6
CHUNK = 10_000  # a side of a block, at full size

SMALL = 500
FULL = 500_000
RTOL = 6 * DEVIATION / ((MEAN + 1) * (SMALL // 2))  # six standard errors, at SMALL
ATOL = 0.0


def build(size: int, chunks: _blocks.Chunks = None, xp: str = "numpy") -> da.Array:
    """The sum for `size` rows and columns; by default in blocks of 10,000 a side, as published."""
    if chunks is None and size > 4 * CHUNK:
        chunks = CHUNK
    shape = (size, size)
    grid = _blocks.grid(shape, "f8", chunks, (0, 1))
    random = default_rng(Philox(SEED, library=xp))
    x = random.normal(MEAN, DEVIATION, size=shape, chunks=grid)
    return (x + 1)[::2, ::2].sum()


def reference(size: int) -> Any:
    """The expected sum; `rtol(size)` says how far a run may be from it."""
    return np.float64((MEAN + 1) * _kept(size))


def rtol(size: int) -> float:
    """Six standard errors of the sum, relative: a run in 500 million is further away.

    >>> rtol(FULL) < 3e-6
    True
    """
    return 6 * DEVIATION / ((MEAN + 1) * float(np.sqrt(_kept(size))))


def bytes_moved(size: int) -> int:
    """The sum written: nothing is read, and the numbers can live and die in registers."""
    return 8


def flops(size: int) -> int:
    """One for each random number, two additions for each that is kept."""
    return size**2 + 2 * _kept(size)


def _kept(size: int) -> int:
    """How many elements `[::2, ::2]` keeps."""
    return (-(-size // 2)) ** 2
