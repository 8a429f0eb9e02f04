"""Times of tasks that do nothing, and of rounds that build new collections."""

from __future__ import annotations

import time
from operator import add
from typing import Any

import cupy
import dask
import dask.array as da
import dask.threaded
import numpy as np
from dask._task_spec import Task, TaskRef

import gpuscheduler
from gpuscheduler.pipeline.cache import PlanCache

from .timing import COUNTS, GPUS, best, devices, synchronize


def tasks(n: int = 100_000) -> None:
    """No-op tasks: microseconds each, planning included."""
    shapes: dict[str, tuple[dict[Any, Any], Any]] = {
        "embarrassing": ({("a", i): Task(("a", i), add, 1, 2) for i in range(n)}, None),
        "chain": (
            {("a", i): Task(("a", i), add, TaskRef(("a", i - 1)) if i else 1, 2) for i in range(n)},
            ("a", n - 1),
        ),
        "tree": (
            {
                ("a", i): Task(("a", i), add, TaskRef(("a", 2 * i + 1)), TaskRef(("a", 2 * i + 2)))
                if 2 * i + 2 < n
                else Task(("a", i), add, 1, 1)
                for i in range(n)
            },
            ("a", 0),
        ),
    }
    for name, (dsk, key) in shapes.items():
        wanted = list(dsk) if key is None else key
        row = []
        for count in COUNTS:
            with gpuscheduler.Scheduler(devices=devices(count)) as s:
                s.get(dsk, wanted)
                begin = time.perf_counter()
                s.get(dsk, wanted)
                row.append((time.perf_counter() - begin) / n * 1e6)
        begin = time.perf_counter()
        dask.threaded.get(dsk, wanted)
        threaded = (time.perf_counter() - begin) / n * 1e6
        figures = " ".join(f"{us:5.1f}" for us in row)
        print(f"tasks {name:13s} us each on {COUNTS} GPUs: {figures}; dask.threaded {threaded:.1f}")


def rounds() -> None:
    """Measure a round of an iteration: new collections, which Dask builds and the scheduler sees
    for the first time.

    Beside it run the same collection again, and planning each round anew.
    """
    known = PlanCache.likeness
    for rows in (2**17, 2**15):  # blocks of 128 and of 32 MiB
        with gpuscheduler.Scheduler(devices="cuda"):
            shape, chunks = (GPUS * 2**23, 256), (rows, 256)
            x = da.random.default_rng(1).random(shape, dtype="f4", chunks=chunks).persist()
            y = da.random.default_rng(2).random(shape[0], dtype="f4", chunks=rows).persist()

            def gradient(w: Any, x: Any = x, y: Any = y) -> Any:
                return (((1 / (1 + da.exp(-(x @ w))) - y)[:, None] * x).sum(axis=0)) / len(x)

            def descend(w: Any, gradient: Any = gradient) -> Any:
                return w - gradient(w).compute()

            def recur(u: Any, x: Any = x) -> Any:
                return (u * np.float32(0.5) + x).persist()

            w = cupy.zeros(256, "f4")
            again = gradient(w).compute, (x * np.float32(0.5) + x).persist
            for name, f, first, same in (
                ("gradient", descend, w, again[0]),
                ("u/2 + x", recur, x, again[1]),
            ):
                bound = best(same)
                row = []
                for likeness in (known, lambda *_: None):
                    PlanCache.likeness = likeness  # type: ignore[method-assign,assignment]
                    seconds, state = [], first
                    for _ in range(8):
                        begin = time.perf_counter()
                        state = f(state)
                        synchronize()
                        seconds.append(time.perf_counter() - begin)
                    row.append(sorted(seconds[2:])[3])
                PlanCache.likeness = known  # type: ignore[method-assign]
                print(f"{name} of {x.npartitions} blocks: {row[0] * 1e3:.1f} ms a round, "
                      f"{bound * 1e3:.1f} the same again, {row[1] * 1e3:.1f} where each round "
                      "is planned")  # fmt: skip
                del state
            del x, y, again, gradient, descend, recur, first, same, f
