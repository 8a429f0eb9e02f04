"""Times of work on every GPU, by the host clock and by events."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import cupy

GPUS = cupy.cuda.runtime.getDeviceCount()
COUNTS = [n for n in (1, 2, 4, 8) if n <= GPUS]


def everywhere(f: Callable[[int], Any]) -> list[Any]:
    out = []
    for d in range(GPUS):
        with cupy.cuda.Device(d):
            out.append(f(d))
    return out


def synchronize() -> None:
    everywhere(lambda d: cupy.cuda.runtime.deviceSynchronize())


def best(f: Callable[[], Any], repeat: int = 5) -> float:
    """Seconds of the fastest of `repeat` runs, the devices' work included, after one more run."""
    f()
    synchronize()
    times = []
    for _ in range(repeat):
        begin = time.perf_counter()
        f()
        synchronize()
        times.append(time.perf_counter() - begin)
    return min(times)


def devices(n: int) -> str:
    return "cuda:" + ",".join(map(str, range(n)))


def on_device(f: Callable[[], Any], repeat: int = 5) -> float:
    """Seconds between two events around f, the best of several."""
    f()
    times = []
    for _ in range(repeat):
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record()
        f()
        end.record()
        end.synchronize()
        times.append(cupy.cuda.get_elapsed_time(begin, end) / 1e3)
    return min(times)


def free_memory() -> None:
    """Give back what CuPy's pool has cached on every GPU."""
    everywhere(lambda d: cupy.get_default_memory_pool().free_all_blocks())
