"""Random inputs that depend on the seed and the element's index alone: not on chunks or library.

Element i is made from the i-th output of SplitMix64 (Steele, Lea, Flood: "Fast splittable
pseudorandom number generators", OOPSLA 2014), which needs no state: it is a hash of
`seed + i * gamma`. Integers are the same everywhere, so `uniform` is too, bit for bit; `normal`
(Box and Muller, 1958) is as equal as the logarithms and cosines of two libraries are.
"""

from __future__ import annotations

import math
from typing import Any

import dask.array as da
import numpy as np

from . import _roots

GAMMA = 0x9E3779B97F4A7C15
MIX1 = 0xBF58476D1CE4E5B9
MIX2 = 0x94D049BB133111EB
MASK = 2**64 - 1
SLAB = 2**22  # elements hashed at a time: bounds the temporaries


def uniform(
    shape: tuple[int, ...], chunks: _roots.Grid, dtype: Any, seed: int, xp: str = "numpy"
) -> da.Array:
    """Numbers in [0, 1): multiples of 2**-24 in float32, of 2**-53 in float64."""
    return _roots.from_blocks(uniform_block, chunks, dtype, xp, shape=shape, kind=dtype, seed=seed)


def normal(
    shape: tuple[int, ...], chunks: _roots.Grid, dtype: Any, seed: int, xp: str = "numpy"
) -> da.Array:
    """Numbers with mean 0 and variance 1."""
    return _roots.from_blocks(normal_block, chunks, dtype, xp, shape=shape, kind=dtype, seed=seed)


def uniform_block(
    where: _roots.Window, shape: tuple[int, ...], kind: Any, seed: int, xp: str = "numpy"
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
    where: _roots.Window, shape: tuple[int, ...], kind: Any, seed: int, xp: str = "numpy"
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


def _empty(where: _roots.Window, kind: Any, xp: str) -> Any:
    return _roots.array_module(xp).empty(tuple(s.stop - s.start for s in where), kind)


def _slabs(out: Any) -> Any:
    rows = out.shape[0]
    step = max(1, SLAB * rows // max(1, out.size))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def _hash(where: _roots.Window, rows: slice, shape: tuple[int, ...], seed: int, xp: str) -> Any:
    """SplitMix64 of each element's index in the row-major order of `shape`, as uint64."""
    lib = _roots.array_module(xp)
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
