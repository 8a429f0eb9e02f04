"""Meshes beside kernels written by hand."""

from __future__ import annotations

import time

import cupy

import gpuscheduler

from .timing import COUNTS, GPUS, best, devices


def meshes() -> None:
    """A function at every point: sums of 10**10 distances, the field written, a loop at 10**9."""
    from examples.mandelbrot import CENTRE, escape_time
    from graphs.haversine_mesh import LATITUDES, LONGITUDES, field

    side = 100_000
    expected = None
    for dtype in ("f8", "f4"):
        row = []
        for n in COUNTS:
            with gpuscheduler.Scheduler(devices=devices(n)):
                ends = gpuscheduler.axis(*LATITUDES, side), gpuscheduler.axis(*LONGITUDES, side)
                z = gpuscheduler.mesh(field, ends, dtype=dtype, chunks=side // 8)
                total = z.sum()
                begin = time.perf_counter()
                value = float(total.compute())
                first = time.perf_counter() - begin
                expected = expected or value
                assert abs(value / expected - 1) < 1e-4, (value, expected)
                row.append((best(total.compute), first))
                if n == GPUS and dtype == "f8":
                    written = best(z.persist, 3)
                    share = 8 * side**2 / n / written / 1e12
                    print(f"haversine 10**10 {dtype} written: {written * 1e3:.1f} ms on {n} GPUs, "
                          f"{share:.2f} TB/s on each")  # fmt: skip
        times = " ".join(f"{s * 1e3:.2f} ms (first {f:.2f} s)" for s, f in row)
        print(f"haversine 10**10 {dtype} summed on {COUNTS} GPUs: {times}, "
              f"x{row[0][0] / row[-1][0]:.2f}")  # fmt: skip

    from numba import cuda

    width, most = 31_623, 1000
    y, x, half = CENTRE[1], CENTRE[0], 2 / 2e5
    loop = cuda.jit(device=True)(escape_time)

    @cuda.jit  # type: ignore[untyped-decorator]
    def by_hand(out, y0, dy, x0, dx, most):  # type: ignore[no-untyped-def]
        j, i = cuda.grid(2)  # type: ignore[attr-defined]
        if i < out.shape[0] and j < out.shape[1]:
            out[i, j] = loop(y0 + dy * i, x0 + dx * j, most)

    step = 2 * half / (width - 1)
    out = cupy.empty((width, width))
    grid = (-(-width // 32), -(-width // 8))

    def run() -> None:
        by_hand[grid, (32, 8)](out, y - half, step, x - half, step, most)

    hand = best(run, 3)
    with gpuscheduler.Scheduler(devices="cuda:0"):
        rows, columns = (gpuscheduler.axis(c - half, c + half, width) for c in (y, x))
        z = gpuscheduler.mesh(escape_time, (rows, columns), args=(most,))
        means = float(z.mean().compute()), float(out.mean())  # orbits are chaotic, means are not
        assert abs(means[0] / means[1] - 1) < 1e-3, means
        ours = best(z.persist, 3)
    print(f"Mandelbrot, {width**2:.3g} points, {most} steps at most: {ours * 1e3:.1f} ms, "
          f"@cuda.jit by hand {hand * 1e3:.1f} ms, x{ours / hand:.3f}")  # fmt: skip
