"""Shaded relief of real terrain at any resolution, by `da.map_overlap`, in float32.

The terrain is the Jacksboro fault, Tennessee: 344 x 403 elevations of the Shuttle Radar Topography
Mission, about 90 m apart, which matplotlib carries as the sample jacksboro_fault_dem.npz. It is
interpolated (bilinearly) to the size asked for, block by block: a block takes the few elevations
that it covers to its device, and makes its own part there. So no grid is ever on the host, however
large.

The shade is the cosine between the surface's normal and the direction of the light (B. K. P. Horn,
"Hill shading and the reflectance map", Proc. IEEE 69, 1981), cut off at zero, with slopes from
central differences; the light comes from the north-west, half way up. Rows run from north to south.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import dask.array as da
import numpy as np

from . import _blocks

AZIMUTH = 315.0  # degrees clockwise from north
ALTITUDE = 45.0  # degrees above the horizon
METRES = 111_200.0  # per degree of latitude, as in matplotlib's example for this file

SMALL = (300, 350)
FULL = (65536, 65536)  # 4 GiB for each of four GPUs
RTOL = 0.0
ATOL = 1e-3  # elevations of 1000 m are rounded to 0.06 mm, and slopes are their differences


def inputs(
    size: tuple[int, int], chunks: _blocks.Chunks = None, xp: str = "numpy"
) -> tuple[da.Array]:
    """Elevations in metres, float32 of shape `size`, in square blocks."""
    grid = _blocks.grid(size, "f4", chunks, (0, 1))
    return (_blocks.from_blocks(elevation_block, grid, "f4", xp, shape=size),)


def apply(z: da.Array) -> da.Array:
    """The shade, 0 (dark) to 1 (facing the light), of the shape of z."""
    height, width = spacing(z.shape)
    return da.map_overlap(
        shade,
        z,
        depth=1,
        boundary="nearest",
        trim=False,
        dtype=z.dtype,
        meta=z._meta,
        height=height,
        width=width,
    )


def build(size: tuple[int, int], chunks: _blocks.Chunks = None, xp: str = "numpy") -> da.Array:
    """The shaded relief with `size` (rows, columns) points, at least two of each."""
    return apply(*inputs(size, chunks, xp))


def shade(z: Any, height: float, width: float) -> Any:
    """The shade of the interior of z, whose rows are `height` and columns `width` metres apart."""
    east, north, up = light()
    slope_east = z[1:-1, 2:] - z[1:-1, :-2]
    slope_east *= 0.5 / width
    slope_north = z[:-2, 1:-1] - z[2:, 1:-1]
    slope_north *= 0.5 / height
    cosine = up - east * slope_east
    cosine -= north * slope_north
    slope_east *= slope_east
    slope_north *= slope_north
    slope_east += slope_north
    slope_east += 1
    cosine /= np.sqrt(slope_east)
    return np.maximum(cosine, 0, out=cosine)


def light() -> tuple[float, float, float]:
    """The unit vector towards the light: east, north, up."""
    azimuth, altitude = math.radians(AZIMUTH), math.radians(ALTITUDE)
    level = math.cos(altitude)
    return level * math.sin(azimuth), level * math.cos(azimuth), math.sin(altitude)


def spacing(size: tuple[int, int]) -> tuple[float, float]:
    """Metres between rows and between columns."""
    z, dy, dx = terrain()
    return dy * (z.shape[0] - 1) / (size[0] - 1), dx * (z.shape[1] - 1) / (size[1] - 1)


@functools.cache
def terrain() -> tuple[Any, float, float]:
    """The sample's elevations (float32), and metres between its rows and between its columns."""
    import matplotlib  # not its part: two threads that import a part first block each other

    sample: Any = matplotlib.cbook.get_sample_data("jacksboro_fault_dem.npz")
    with sample:
        dy = METRES * float(sample["dy"])
        dx = METRES * float(sample["dx"]) * math.cos(math.radians(float(sample["ymin"])))
        return sample["elevation"].astype("f4"), dy, dx


def elevation_block(where: _blocks.Window, shape: tuple[int, int], xp: str = "numpy") -> Any:
    """The part at `where` of the terrain interpolated to `shape`."""
    lib = _blocks.array_module(xp)
    z = terrain()[0]
    (row, down), (column, right) = (
        _position(where[axis], shape[axis], z.shape[axis]) for axis in (0, 1)
    )
    row0, column0 = row[0], column[0]
    small = lib.asarray(z[row0 : row[-1] + 2, column0 : column[-1] + 2])  # what the block covers
    row, column = lib.asarray(row - row0), lib.asarray(column - column0)
    down, right = lib.asarray(down), lib.asarray(right)
    strip = small[row] + down[:, None] * (small[row + 1] - small[row])
    out = (strip[:, 1:] - strip[:, :-1])[:, column]
    out *= right
    out += strip[:, :-1][:, column]
    return out


def reference(size: tuple[int, int], window: _blocks.Window | None = None) -> Any:
    """The shade, or its part at `window`, in float64 by NumPy's interpolation and gradient."""
    z, _, _ = terrain()
    rows, columns = window or _blocks.whole(size)
    i, j = (
        np.clip(np.arange(s.start - 1, s.stop + 1), 0, n - 1)
        for s, n in zip((rows, columns), size, strict=True)
    )
    y, x = (at * ((m - 1) / (n - 1)) for at, m, n in zip((i, j), z.shape, size, strict=True))
    top = np.minimum(y.astype(int), z.shape[0] - 2)
    strip = z[top] + (y - top)[:, None] * (z[top + 1].astype("f8") - z[top])
    fine = np.stack([np.interp(x, np.arange(z.shape[1]), line) for line in strip])
    down, east = np.gradient(fine, *spacing(size))
    normal = np.stack([-east, down, np.ones_like(east)])[:, 1:-1, 1:-1]
    cosine = np.tensordot(light(), normal / np.linalg.norm(normal, axis=0), axes=1)
    return np.clip(cosine, 0, 1).astype("f4")


def bytes_moved(size: tuple[int, int]) -> int:
    """Elevations read once, the shade written."""
    return 2 * 4 * size[0] * size[1]


def flops(size: tuple[int, int]) -> int:
    """Fifteen per point: four for the slopes, four for the product, seven for its normalisation."""
    return 15 * size[0] * size[1]


def _position(where: slice, n: int, m: int) -> tuple[Any, Any]:
    """Where points of an axis of n lie on one of m: the point before, and how far past it."""
    at = np.arange(where.start, where.stop) * ((m - 1) / (n - 1))
    before = np.minimum(at.astype(np.intp), m - 2)
    return before, (at - before).astype("f4")
