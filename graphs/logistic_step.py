"""One gradient step of logistic regression, in float32.

    w' = w - rate · Xᵀ (σ(X w) - y) / n,    σ(t) = 1 / (1 + exp(-t))

The gradient of the mean log-likelihood (D. R. Cox, "The regression analysis of binary sequences",
1958; T. Hastie, R. Tibshirani, J. Friedman: "The Elements of Statistical Learning", 4.4.1). X is
tall: one sweep over its blocks of rows can serve both products, and only d numbers leave a block.

The data are two classes of equal spread, the case that logistic regression describes exactly:
y is 0 or 1 with equal chance, and x is normal around -SHIFT or +SHIFT accordingly.
"""

from __future__ import annotations

from typing import Any

import dask.array as da
import numpy as np

from . import _blocks

RATE = 0.5
SHIFT = 0.125
SEED = 11

SMALL = (4000, 25)
FULL = (2**25, 256)  # 8 GiB for each of four GPUs
RTOL = 1e-5
ATOL = 1e-6


def inputs(
    size: tuple[int, int], chunks: _blocks.Chunks = None, xp: str = "numpy"
) -> tuple[da.Array, da.Array, da.Array]:
    """X (n, d) in chunks of whole rows, y (n,) in chunks to match, w (d,) in one; float32."""
    n, d = size
    grid = _blocks.grid(size, "f4", chunks, (0,))
    y = _blocks.from_blocks(_labels, grid[:1], "f4", xp, n=n)
    x = _blocks.normal(size, grid, "f4", SEED, xp) + SHIFT * (2 * y - 1)[:, None]
    w = _blocks.normal((d,), ((d,),), "f4", SEED + 2, xp) / d
    return x, y, w


def apply(x: da.Array, y: da.Array, w: da.Array) -> da.Array:
    """The weights after the step."""
    probability = 1 / (1 + da.exp(-(x @ w)))
    return w - x.T @ (probability - y) * (RATE / x.shape[0])


def build(size: tuple[int, int], chunks: _blocks.Chunks = None, xp: str = "numpy") -> da.Array:
    """The weights after one step, for `size` (observations n, features d)."""
    return apply(*inputs(size, chunks, xp))


def reference(size: tuple[int, int]) -> Any:
    """The weights after the step, added up in float64, a few observations at a time."""
    n, d = size
    w = _blocks.normal_block((slice(0, d),), (d,), "f4", SEED + 2).astype("f8") / d
    gradient = np.zeros(d)
    for rows in _blocks.slabs(n, 8 * d):
        y = _labels((rows,), n).astype("f8")
        x = _blocks.normal_block((rows, slice(0, d)), size, "f4", SEED).astype("f8")
        x += SHIFT * (2 * y - 1)[:, None]
        gradient += x.T @ (1 / (1 + np.exp(-x @ w)) - y)
    return (w - RATE / n * gradient).astype("f4")


def bytes_moved(size: tuple[int, int]) -> int:
    """X and y read once; w read, and written anew."""
    n, d = size
    return 4 * (n * d + n + 2 * d)


def flops(size: tuple[int, int]) -> int:
    """Two products with X, 2 n d each, five per observation for σ and y, two per weight."""
    n, d = size
    return 4 * n * d + 5 * n + 2 * d


def _labels(where: _blocks.Window, n: int, xp: str = "numpy") -> Any:
    """The classes, 0 or 1: the same everywhere, since they come from integers."""
    return (_blocks.uniform_block(where, (n,), "f4", SEED + 1, xp) >= 0.5).astype("f4")
