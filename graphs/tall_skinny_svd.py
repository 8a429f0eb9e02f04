"""The singular values of a tall, skinny matrix, by Dask's `da.linalg.svd`, in float64.

Dask uses the direct TSQR (A. Benson, D. Gleich, J. Demmel: "Direct QR factorizations for
tall-and-skinny matrices in MapReduce architectures", IEEE BigData 2013): a QR factorization of each
block of rows, one of the small R factors on top of each other, and the singular values of the last
R. A wide fan-in of small pieces with a serial end, through a solver library.
"""

from __future__ import annotations

from typing import Any

import dask.array as da
import numpy as np

from . import _blocks

SEED = 5

SMALL = (4000, 20)
FULL = (2**25, 128)  # 8 GiB for each of four GPUs
RTOL = 1e-10
ATOL = 0.0


def inputs(
    size: tuple[int, int], chunks: _blocks.Chunks = None, xp: str = "numpy"
) -> tuple[da.Array]:
    """Standard normal numbers, float64 of shape `size`, in chunks of whole rows."""
    grid = _blocks.grid(size, "f8", chunks, (0,))
    return (_blocks.normal(size, grid, "f8", SEED, xp),)


def apply(x: da.Array) -> da.Array:
    """The singular values, largest first: as many as x has columns."""
    _, s, _ = da.linalg.svd(x)
    return s


def build(size: tuple[int, int], chunks: _blocks.Chunks = None, xp: str = "numpy") -> da.Array:
    """The singular values of a matrix of shape `size` (rows, columns), rows ≥ columns."""
    return apply(*inputs(size, chunks, xp))


def reference(size: tuple[int, int]) -> Any:
    """The singular values by NumPy, of an R factor updated with a few rows at a time."""
    r: Any = np.empty((0, size[1]))
    for rows in _blocks.slabs(size[0], 8 * size[1]):
        x = _blocks.normal_block((rows, slice(0, size[1])), size, "f8", SEED)
        r = np.linalg.qr(np.concatenate([r, x]), mode="r")
    return np.linalg.svd(r, compute_uv=False)


def bytes_moved(size: tuple[int, int]) -> int:
    """x read once, the singular values written."""
    return 8 * size[0] * size[1] + 8 * size[1]


def flops(size: tuple[int, int]) -> int:
    """Return 2 m n² for R of Householder QR, and 4 n³ / 3 for its SVD.

    See Golub and Van Loan, 5.2.
    """
    m, n = size
    return 2 * m * n**2 + 4 * n**3 // 3
