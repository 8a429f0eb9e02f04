"""The distance term of the haversine formula from one point to every node of a mesh.

The mesh is n x n over latitudes 29 to 31 and longitudes 99 to 101 degrees, the point is
(30, 101): with n = 1000 the question this project began with. The haversine formula (R. W. Sinnott,
"Virtues of the haversine", Sky and Telescope 68, 1984) is

    a = sin²(Δlat / 2) + cos(lat1) cos(lat2) sin²(Δlon / 2)
    distance = 2 R atan2(√a, √(1 - a))

The question computed `arctan2(a, 1 - a)`, without the square roots and the factor 2 R, and so do
our peers' benchmarks; this does as well, so that figures can be compared. Its constants are theirs
too: 0.01745329 is π / 180 and 0.008726645 is π / 360.

Coordinates are made where they are used: nothing is read, n² float64 are written.
"""

from __future__ import annotations

import math
from typing import Any

import dask.array as da
import numpy as np

from gpuscheduler import axis, mesh

from . import _blocks

LATITUDES = (29.0, 31.0)
LONGITUDES = (99.0, 101.0)
AXES = {"latitude": LATITUDES, "longitude": LONGITUDES}  # of the field, for drawings
POINT = (30.0, 101.0)  # latitude, longitude
RADIAN = 0.01745329
HALF = 0.008726645

SMALL = 250
FULL = 100_000
RTOL = 1e-10
ATOL = 1e-17  # the formula cancels near the point: 30 - lat loses its last digits


def field(lat: Any, lon: Any) -> Any:
    """At one point, all in degrees."""
    scale = math.cos(RADIAN * lat) * math.cos(RADIAN * POINT[0])
    a = math.sin(HALF * (POINT[0] - lat)) ** 2 + scale * math.sin(HALF * (POINT[1] - lon)) ** 2
    return math.atan2(a, 1 - a)


def build(size: int, chunks: _blocks.Chunks = None, xp: str = "numpy") -> da.Array:
    """The field, (size, size) float64: rows are latitudes, columns are longitudes."""
    axes = axis(*LATITUDES, size), axis(*LONGITUDES, size)
    return mesh(field, axes, chunks=_blocks.grid((size, size), "f8", chunks, (0, 1)), backend=xp)


def build_sum(size: int, chunks: _blocks.Chunks = None, xp: str = "numpy") -> da.Array:
    """The field's sum, for which nothing needs to be written: the peers' `mesh_sum`."""
    return build(size, chunks, xp).sum()


def reference(size: int, window: _blocks.Window | None = None) -> Any:
    """The field, or its part at `window`, by NumPy."""
    rows, columns = window or _blocks.whole((size, size))
    lat1 = np.linspace(*LATITUDES, size)[rows, None]
    lon1 = np.linspace(*LONGITUDES, size)[None, columns]
    lat2, lon2 = POINT
    a = np.sin(HALF * (lat2 - lat1)) ** 2
    a = a + np.cos(RADIAN * lat1) * np.cos(RADIAN * lat2) * np.sin(HALF * (lon2 - lon1)) ** 2
    return np.arctan2(a, 1 - a)


def bytes_moved(size: int) -> int:
    """The field written once."""
    return 8 * size**2


def flops(size: int) -> int:
    """Per node: the two terms' product and sum, 1 - a, arctan2; the rest is once per row or column.

    A row takes nine operations: two for the coordinate, difference, scaling, sin and square;
    scaling, cos and a product. A column takes the first six of them.
    """
    return 4 * size**2 + 15 * size
