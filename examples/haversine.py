"""How far is every point of a mesh from one point?

The question that this project began with: latitudes 29 to 31, longitudes 99 to 101, a million
points, and the distance of each to (30, 101). Nothing of the mesh is ever stored or sent: each
device makes the coordinates that it needs.

    python examples/haversine.py haversine.png
    python examples/haversine.py --points 1e10     # the mean of ten thousand million distances
"""

import argparse
import math
import time

import gpuscheduler

LATITUDES, LONGITUDES = (29, 31), (99, 101)
POINT = (30, 101)
RADIUS = 6371.0  # of the Earth, in km


def distance(lat, lon):
    """Kilometres from a point to POINT, by the haversine formula."""
    lat1, lon1 = math.radians(lat), math.radians(lon)
    lat2, lon2 = math.radians(POINT[0]), math.radians(POINT[1])
    a = (
        math.sin((lat2 - lat1) / 2) ** 2
        + math.cos(lat1) * math.cos(lat2) * math.sin((lon2 - lon1) / 2) ** 2
    )
    return 2 * RADIUS * math.asin(math.sqrt(a))


def distances(n):
    """The distance of each of n x n points; rows are latitudes. Lazy."""
    axes = gpuscheduler.axis(*LATITUDES, n), gpuscheduler.axis(*LONGITUDES, n)
    return gpuscheduler.mesh(distance, axes)


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
    parser = argparse.ArgumentParser(description="Distances from every point of a mesh to one.")
    parser.add_argument("file", nargs="?", help="draw the field into this PNG")
    parser.add_argument("--points", type=float, default=1e6, help="of the mesh (1e6)")
    options = parser.parse_args()
    n = round(math.sqrt(options.points))
    with gpuscheduler.Scheduler() as scheduler:
        print(scheduler)
        field = distances(n)
        began = time.perf_counter()
        farthest, mean = float(field.max().compute()), float(field.mean().compute())
        seconds = time.perf_counter() - began
        print(f"of {field.size:,} points the farthest is {farthest:.1f} km away")
        print(f"their mean distance is {mean:.4f} km")
        rate = 2 * field.size / seconds
        print(f"two passes in {seconds:.3g} s, the compiler included: {rate:.3g} points/s")
        if options.file:
            step = max(1, n // 1000)  # a slice computes only what it reads
            draw(field[::step, ::step].to_backend("numpy").compute(), options.file)
