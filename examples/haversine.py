"""How far is every point of a mesh from one point?

The question that this project began with: latitudes 29 to 31, longitudes 99 to 101, a million
points, and the distance of each to (30, 101). Change N for a finer mesh.

    python examples/haversine.py haversine.png
"""

import sys

import dask.array as da
import numpy as np
from dask.diagnostics import ProgressBar

import gpuscheduler

N = 1000
LATITUDES, LONGITUDES = (29, 31), (99, 101)
POINT = (30, 101)
RADIUS = 6371.0  # of the Earth, in km


def distances(n):
    """Kilometres from each of n x n points to POINT; rows are latitudes. Lazy."""
    lat1 = da.radians(da.linspace(*LATITUDES, n, chunks=n // 4))[:, None]
    lon1 = da.radians(da.linspace(*LONGITUDES, n, chunks=n // 4))[None, :]
    lat2, lon2 = np.radians(POINT)
    a = (
        da.sin((lat2 - lat1) / 2) ** 2
        + da.cos(lat1) * np.cos(lat2) * da.sin((lon2 - lon1) / 2) ** 2
    )
    return 2 * RADIUS * da.arctan2(da.sqrt(a), da.sqrt(1 - a))


def draw(field, file):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 6), layout="constrained")
    plot = figure.add_subplot(xlabel="longitude", ylabel="latitude")
    plot.set_title(f"distance to {POINT[0]}° N, {POINT[1]}° E")
    extent = (*LONGITUDES, *LATITUDES)
    image = plot.imshow(field, origin="lower", extent=extent)
    lines = plot.contour(field, levels=8, extent=extent, colors="white", linewidths=0.7)
    plot.clabel(lines, fmt="%d km", fontsize=8)
    figure.colorbar(image, ax=plot, label="km")
    figure.savefig(file)


if __name__ == "__main__":
    with gpuscheduler.Scheduler() as scheduler:
        print(scheduler)
        with ProgressBar():
            field = distances(N).to_backend("numpy").compute()
    print(f"the farthest of {field.size:,} points is {field.max():.1f} km away")
    if sys.argv[1:]:
        draw(field, sys.argv[1])
