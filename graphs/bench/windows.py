"""Windows and filters beside CuPy and JAX."""

from __future__ import annotations

import subprocess
import sys

import cupy
import dask.array as da
import numpy as np
from cupyx.scipy import ndimage

import gpuscheduler

from .timing import best

JAX_WINDOWS = """
import time, jax, jax.numpy as jnp
from jax import lax
x = jax.random.uniform(jax.random.key(0), (2**15, 2**15), dtype=jnp.float32)
def best(f):
    f(x).block_until_ready()
    times = []
    for _ in range(4):
        begin = time.perf_counter()
        f(x).block_until_ready()
        times.append(time.perf_counter() - begin)
    return min(times) * 1e3
windows = [((k, k), f"{k}x{k}") for k in (3, 5, 7, 9, 15)]
windows += [((k, 1), f"{k} down") for k in (7, 31)] + [((1, k), f"{k} along") for k in (7, 31)]
for size, title in windows:
    count = size[0] * size[1]
    def mean(x): return lax.reduce_window(x, 0.0, lax.add, size, (1, 1), "valid") / count
    def most(x): return lax.reduce_window(x, -jnp.inf, lax.max, size, (1, 1), "valid")
    print(f"mean {title}: {best(jax.jit(mean)):.2f}", flush=True)
    print(f"max {title}: {best(jax.jit(most)):.2f}", flush=True)
"""


def windows() -> None:
    """Measure reductions over sliding windows of 4 GiB on one GPU.

    Beside them run JAX, where it is installed, a copy of 4 GiB, and a filter of CuPy's on the whole
    array. JAX runs first, in a process of its own: it leaves no memory to others.
    """
    jax = subprocess.run([sys.executable, "-c", JAX_WINDOWS], capture_output=True, text=True)
    peer = dict(line.split(": ") for line in jax.stdout.splitlines())
    if jax.returncode:
        print("without JAX:", jax.stderr.strip().splitlines()[-1][:200])
    side = 2**15
    a, b = cupy.ones((side, side), "f4"), cupy.empty((side, side), "f4")
    print(f"device copy {best(lambda: cupy.copyto(b, a)) * 1e3:.2f} ms")
    del a, b
    cases: dict[str, tuple[tuple[int, ...], tuple[int, ...], str]] = {
        f"{name} {k}x{k}": ((k, k), (0, 1), name)
        for name in ("mean", "max", "std")
        for k in (3, 5, 7, 9, 15)
    }
    cases |= {
        f"{name} {k} {way}": ((k,), (axis,), name)
        for name in ("mean", "max", "std")
        for k in (7, 31)
        for axis, way in enumerate(("down", "along"))
    }
    with gpuscheduler.Scheduler(devices="cuda:0"):
        x = da.random.default_rng(1).random((side, side), dtype="f4", chunks=2**13).persist()
        edge = cupy.asnumpy(x[8100:8300, 8100:8300].compute())
        for title, (lengths, axes, name) in cases.items():
            over = tuple(range(2, 2 + len(axes)))
            slid = da.lib.stride_tricks.sliding_window_view(
                x, lengths, axis=axes, automatic_rechunk=False
            )
            y = getattr(slid, name)(axis=over)
            view = np.lib.stride_tricks.sliding_window_view(edge, lengths, axis=axes)
            want = getattr(view.astype("f8"), name)(axis=over)
            n, m = want.shape
            found = y[8100 : 8100 + n, 8100 : 8100 + m].compute()
            np.testing.assert_allclose(cupy.asnumpy(found), want, rtol=2e-5)
            seconds = best(y.persist, 4)
            print(f"{title:14s} {seconds * 1e3:6.2f} ms; JAX {peer.get(title, '-')}")
            del y, slid
        y = da.median(
            da.lib.stride_tricks.sliding_window_view(x, (3, 3), automatic_rechunk=False),
            axis=(-2, -1),
        )
        print(f"{'median 3x3':14s} {best(y.persist, 4) * 1e3:6.2f} ms")
        del x, y
    cupy.get_default_memory_pool().free_all_blocks()
    a, b = cupy.random.random((side, side), dtype="f4"), cupy.empty((side, side), "f4")
    for title, f in {
        "mean 5x5": lambda: ndimage.uniform_filter(a, 5, output=b),
        "max 5x5": lambda: ndimage.maximum_filter(a, 5, output=b),
        "median 3x3": lambda: ndimage.median_filter(a, 3, output=b),
    }.items():
        print(f"{title:14s} {best(f, 2) * 1e3:6.2f} ms by cupyx.scipy.ndimage")
