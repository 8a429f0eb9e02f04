"""Where graphs begin: chunk grids, and arrays whose blocks a function makes from their position."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import dask.array as da
import numpy as np
from dask.layers import ArraySliceDep

Chunks = int | str | tuple[Any, ...] | None
Window = tuple[slice, ...]
Grid = tuple[tuple[int, ...], ...]

LARGEST = 256 * 2**20  # bytes of a default chunk
FEWEST = 16  # default chunks, so that small sizes still have a graph


def array_module(xp: str) -> Any:
    """The array module called `xp`, "numpy" or "cupy"."""
    return importlib.import_module(xp)


def grid(shape: tuple[int, ...], dtype: Any, chunks: Chunks, axes: tuple[int, ...]) -> Grid:
    """The chunks of an array that may be divided along `axes`.

    None gives even blocks, 16 or more of them, of 256 MiB at most.

    >>> grid((1000, 3), "f4", None, (0,))[0][:2]
    (63, 63)
    """
    itemsize = np.dtype(dtype).itemsize
    if chunks is None:
        blocks = max(FEWEST, math.ceil(math.prod(shape) * itemsize / LARGEST))
        pieces = math.ceil(round(blocks ** (1 / len(axes)), 6))
        chunks = tuple(
            math.ceil(length / pieces) if axis in axes else length
            for axis, length in enumerate(shape)
        )
    elif isinstance(chunks, int | str):
        chunks = tuple(chunks if axis in axes else -1 for axis in range(len(shape)))
    normal: Grid = da.core.normalize_chunks(chunks, shape, dtype=np.dtype(dtype))
    return normal


def from_blocks(
    block: Callable[..., Any], chunks: Grid, dtype: Any, xp: str, **options: Any
) -> da.Array:
    """The lazy array whose block at `where` (a tuple of slices) is `block(where, xp=xp, ...)`.

    It stays one Blockwise layer, and no block is made before it runs.
    """
    axes = tuple(range(len(chunks)))
    return da.blockwise(
        block,
        axes,
        ArraySliceDep(chunks),
        axes,
        align_arrays=False,
        dtype=np.dtype(dtype),
        meta=array_module(xp).empty((0,) * len(chunks), dtype),
        xp=xp,
        **options,
    )


def views(a: Any, chunks: Chunks) -> da.Array:
    """The lazy array whose blocks are views of `a`, which `da.from_array` would copy first."""
    normal = da.core.normalize_chunks(chunks, a.shape, dtype=a.dtype)
    keys = product(["views"], *(range(len(axis)) for axis in normal))
    parts = da.core.slices_from_chunks(normal)
    dsk = {key: a[part] for key, part in zip(keys, parts, strict=True)}
    return da.Array(dsk, "views", normal, meta=a)


def once(x: da.Array) -> da.Array:
    """x with its tasks listed one by one.

    Dask fuses a Blockwise layer into its only reader. Where that reader takes each block many
    times, as a product of matrices does, each block would be made as many times.
    """
    return da.Array(dict(x.__dask_graph__()), x.name, x.chunks, meta=x._meta)


def whole(shape: tuple[int, ...]) -> Window:
    """The window that is everything."""
    return tuple(slice(0, length) for length in shape)


def slabs(rows: int, nbytes: int) -> Iterator[slice]:
    """Slices that cover `rows` rows of `nbytes` bytes each, a few MiB at a time."""
    step = max(1, 2**23 // max(1, nbytes))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))
