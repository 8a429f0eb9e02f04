"""Inputs of workloads: chunk grids, arrays made by position, and random numbers by index.

Random inputs depend on the seed and the element's index alone: not on chunks or library. Element i
is made from the i-th output of SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number
generators", OOPSLA 2014), which needs no state: it is a hash of `seed + i * gamma`. Integers are
the same everywhere, so `uniform` is too, bit for bit; `normal` (Box and Muller, 1958) is as equal
as the logarithms and cosines of two libraries are.
"""

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


GAMMA = 0x9E3779B97F4A7C15
MIX1 = 0xBF58476D1CE4E5B9
MIX2 = 0x94D049BB133111EB
MASK = 2**64 - 1
SLAB = 2**22  # elements hashed at a time: bounds the temporaries


def uniform(
    shape: tuple[int, ...], chunks: Grid, dtype: Any, seed: int, xp: str = "numpy"
) -> da.Array:
    """Numbers in [0, 1): multiples of 2**-24 in float32, of 2**-53 in float64."""
    return from_blocks(uniform_block, chunks, dtype, xp, shape=shape, kind=dtype, seed=seed)


def normal(
    shape: tuple[int, ...], chunks: Grid, dtype: Any, seed: int, xp: str = "numpy"
) -> da.Array:
    """Numbers with mean 0 and variance 1."""
    return from_blocks(normal_block, chunks, dtype, xp, shape=shape, kind=dtype, seed=seed)


def uniform_block(
    where: Window, shape: tuple[int, ...], kind: Any, seed: int, xp: str = "numpy"
) -> Any:
    """The part at `where` of `uniform(shape, ...)`.

    >>> uniform_block((slice(3, 5),), (10,), "f8", seed=0)
    array([0.65641371, 0.78792847])
    """
    bits = 24 if np.dtype(kind) == np.float32 else 53
    out = _empty(where, kind, xp)
    for rows in _slabs(out):
        z = _hash(where, rows, shape, seed, xp)
        z >>= np.uint64(64 - bits)
        part = out[rows]
        part[...] = z
        part *= 2.0**-bits
    return out


def normal_block(
    where: Window, shape: tuple[int, ...], kind: Any, seed: int, xp: str = "numpy"
) -> Any:
    """The part at `where` of `normal(shape, ...)`."""
    out = _empty(where, kind, xp)
    for rows in _slabs(out):
        z = _hash(where, rows, shape, seed, xp)
        angle = (z & np.uint64(2**32 - 1)).astype(kind)
        angle *= math.tau * 2.0**-32
        z >>= np.uint64(32)
        z += np.uint64(1)  # in (0, 1], which has a logarithm
        radius = z.astype(kind)
        del z
        radius *= 2.0**-32
        np.log(radius, out=radius)
        radius *= -2.0
        np.sqrt(radius, out=radius)
        np.cos(angle, out=angle)
        np.multiply(radius, angle, out=out[rows])
    return out


def _empty(where: Window, kind: Any, xp: str) -> Any:
    return array_module(xp).empty(tuple(s.stop - s.start for s in where), kind)


def _slabs(out: Any) -> Any:
    rows = out.shape[0]
    step = max(1, SLAB * rows // max(1, out.size))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def _hash(where: Window, rows: slice, shape: tuple[int, ...], seed: int, xp: str) -> Any:
    """SplitMix64 of each element's index in the row-major order of `shape`, as uint64."""
    lib = array_module(xp)
    first = slice(where[0].start + rows.start, where[0].start + rows.stop)
    z: Any = None
    for axis, s in enumerate((first, *where[1:])):
        stride = math.prod(shape[axis + 1 :]) * GAMMA & MASK
        term = lib.arange(s.start, s.stop, dtype=np.uint64)
        term *= np.uint64(stride)
        if axis == 0:
            term += np.uint64(_mix(seed) + GAMMA & MASK)
        z = term if z is None else z[..., None] + term
    for shift, factor in ((30, MIX1), (27, MIX2)):
        z ^= z >> np.uint64(shift)
        z *= np.uint64(factor)
    z ^= z >> np.uint64(31)
    return z


def _mix(z: int) -> int:
    """SplitMix64's mixing function of a Python int: spreads small seeds over all 64 bits."""
    z = (z + GAMMA) & MASK
    z = (z ^ z >> 30) * MIX1 & MASK
    z = (z ^ z >> 27) * MIX2 & MASK
    return z ^ z >> 31
