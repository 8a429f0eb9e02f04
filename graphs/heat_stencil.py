"""Heat spreading on a torus: time steps of a five-point stencil, by `da.map_overlap`, in float32.

One explicit step ("forward time, centred space"; R. J. LeVeque, "Finite Difference Methods for
Ordinary and Partial Differential Equations", chapter 9) is

    u'[i, j] = u[i, j] + r (u[i-1, j] + u[i+1, j] + u[i, j-1] + u[i, j+1] - 4 u[i, j])

with r = κ Δt / h² = 0.2, stable up to 0.25. Both directions wrap around, so the sum of u stays as
it is. In each step a block needs one row or column of each neighbour: many small transfers.
"""

from __future__ import annotations

from typing import Any

import dask.array as da
import numpy as np

from . import _blocks

R = 0.2
SEED = 10

SMALL = (120, 3)
FULL = (65536, 8)  # 4 GiB for each of four GPUs
RTOL = 1e-5
ATOL = 1e-6


def inputs(
    size: tuple[int, int], chunks: _blocks.Chunks = None, xp: str = "numpy"
) -> tuple[da.Array, int]:
    """Temperatures in [0, 1), float32, (n, n) in square blocks; and the number of steps."""
    n, steps = size
    grid = _blocks.grid((n, n), "f4", chunks, (0, 1))
    return _blocks.uniform((n, n), grid, "f4", SEED, xp), steps


def apply(u: da.Array, steps: int) -> da.Array:
    """The temperatures after `steps` steps."""
    for _ in range(steps):
        u = da.map_overlap(
            step, u, depth=1, boundary="periodic", trim=False, dtype=u.dtype, meta=u._meta
        )
    return u


def build(size: tuple[int, int], chunks: _blocks.Chunks = None, xp: str = "numpy") -> da.Array:
    """The temperatures of `size[0]` x `size[0]` cells after `size[1]` steps."""
    return apply(*inputs(size, chunks, xp))


def step(u: Any) -> Any:
    """One step for the interior of u, which is what it returns."""
    out = u[:-2, 1:-1] + u[2:, 1:-1]
    out += u[1:-1, :-2]
    out += u[1:-1, 2:]
    out *= R
    out += (1 - 4 * R) * u[1:-1, 1:-1]
    return out


def reference(size: tuple[int, int], window: _blocks.Window | None = None) -> Any:
    """The temperatures, or their part at `window`, in float64, from the part that can reach it."""
    n, steps = size
    rows, columns = window or _blocks.whole((n, n))
    u: Any = np.block(
        [
            [_blocks.uniform_block((r, c), (n, n), "f4", SEED) for c in _around(columns, steps, n)]
            for r in _around(rows, steps, n)
        ]
    ).astype("f8")
    for _ in range(steps):
        beside = u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:]
        u = u[1:-1, 1:-1] + R * (beside - 4 * u[1:-1, 1:-1])
    return u.astype("f4")


def bytes_moved(size: tuple[int, int]) -> int:
    """In each step, temperatures read once and written once."""
    n, steps = size
    return 2 * 4 * n**2 * steps


def flops(size: tuple[int, int]) -> int:
    """Six per cell and step: four additions, two multiplications."""
    n, steps = size
    return 6 * n**2 * steps


def _around(window: slice, margin: int, n: int) -> list[slice]:
    """`window` widened by `margin` at both ends, as slices of an axis of n that wraps around."""
    pieces = []
    start, stop = window.start - margin, window.stop + margin
    while start < stop:
        low = start % n
        length = min(stop - start, n - low)
        pieces.append(slice(low, low + length))
        start += length
    return pieces
