"""How far is every point of a mesh from one point?

The question that this project began with: latitudes 29 to 31, longitudes 99 to 101, a million
points, and the distance of each to (30, 101). Nothing of the mesh is ever stored or sent: each
device makes the coordinates that it needs.

    python examples/haversine.py haversine.png
    python examples/haversine.py --points 1e10     # the mean of ten thousand million distances
    python examples/haversine.py --variants        # beside what people write with Numba; on a GPU
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


def variants(n):
    """Three ways to compute the same field with Numba's CUDA target, and this package's, timed.

    Each leaves an array on the GPU; the time is that of a call that is not the first, in ms.
    """
    import cupy
    import numpy as np
    from numba import cuda, float64, vectorize

    on_gpu = cuda.jit(device=True)(distance)
    (south, north), (west, east) = LATITUDES, LONGITUDES

    @vectorize([float64(float64, float64)], target="cuda")
    def ufunc(lat, lon):
        return on_gpu(lat, lon)

    @cuda.jit
    def kernel(out, dlat, dlon):
        j, i = cuda.grid(2)
        if i < out.shape[0] and j < out.shape[1]:
            out[i, j] = on_gpu(south + i * dlat, west + j * dlon)

    def on_full_meshes():
        lat, lon = np.linspace(south, north, n), np.linspace(west, east, n)
        return ufunc(*(cuda.to_device(a.copy()) for a in np.meshgrid(lat, lon, indexing="ij")))

    def on_axes():
        lat, lon = cupy.linspace(south, north, n), cupy.linspace(west, east, n)
        return ufunc(*(cupy.ascontiguousarray(a) for a in cupy.broadcast_arrays(lat[:, None], lon)))

    def grid_made_in_the_kernel():
        out = cuda.device_array((n, n))
        blocks = -(-n // 32), -(-n // 8)
        kernel[blocks, (32, 8)](out, (north - south) / (n - 1), (east - west) / (n - 1))
        return out

    field = distances(n)
    ways = {
        "ufunc on full meshes, made on the CPU and sent": on_full_meshes,
        "ufunc on axes broadcast on the GPU": on_axes,
        "a kernel that makes its grid": grid_made_in_the_kernel,
        "gpuscheduler.mesh(...).compute()": field.compute,
    }
    expected = None
    for name, way in ways.items():
        times = []
        for _ in range(20):
            began = time.perf_counter()
            out = way()
            cuda.synchronize()
            times.append(time.perf_counter() - began)
        got = cupy.asnumpy(cupy.asarray(out))
        expected = got if expected is None else expected
        np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-6)
        print(f"{name:48s} {min(times[1:]) * 1e3:8.3f} ms (the first time {times[0]:.2f} s)")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Distances from every point of a mesh to one.")
    parser.add_argument("file", nargs="?", help="draw the field into this PNG")
    parser.add_argument("--points", type=float, default=1e6, help="of the mesh (1e6)")
    parser.add_argument("--variants", action="store_true", help="time three of Numba's, too")
    options = parser.parse_args()
    n = round(math.sqrt(options.points))
    with gpuscheduler.Scheduler() as scheduler:
        print(scheduler)
        if options.variants:
            variants(n)
            raise SystemExit
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
