"""Times of the workloads on one and more GPUs."""

from __future__ import annotations

import importlib
from typing import Any

import dask.array as da

import gpuscheduler

from .sizes import CHUNKS, GENERATED, SIZES
from .timing import COUNTS, best, devices


def time_workload(
    name: str, size: Any, n: int, repeat: int = 9, **options: Any
) -> tuple[float, Any]:
    """Seconds of a workload on `n` GPUs, its inputs persisted before; and its value, if small."""
    graph = importlib.import_module(f"graphs.{name}")
    chunks = CHUNKS.get(name) if size == SIZES[name](n) else None
    with gpuscheduler.Scheduler(devices=devices(n), **options):
        arrays = graph.inputs(size, chunks, "cupy")
        arrays = [a.persist() if isinstance(a, da.Array) else a for a in arrays]
        result = graph.apply(*arrays)
        small = result.nbytes < 2**20
        seconds = best(result.compute if small else result.persist, repeat)
        return seconds, result.compute() if small else None


def time_generated(name: str, size: int, n: int, repeat: int = 5) -> tuple[float, Any]:
    """Seconds of a workload that makes its own data, on `n` GPUs; and its value."""
    graph = importlib.import_module(f"graphs.{name}")
    with gpuscheduler.Scheduler(devices=devices(n)):
        result = getattr(graph, "build_sum", graph.build)(size, None, "cupy")
        return best(result.compute, repeat), result.compute()


def graphs() -> None:
    """The workloads on inputs that are on the GPUs already; sizes grow with the GPUs."""
    names = [*SIZES]
    names.insert(names.index("black_scholes") + 1, "black_scholes, fast_math")
    for title in names:
        name, _, fast = title.partition(", ")
        graph = importlib.import_module(f"graphs.{name}")
        row = []
        for n in COUNTS:
            seconds, _ = time_workload(name, SIZES[name](n), n, fast_math=bool(fast))
            row.append((seconds, graph.bytes_moved(SIZES[name](n)) / seconds / 1e12))
        times = " ".join(f"{s * 1e3:8.2f} ms ({t:5.2f} TB/s)" for s, t in row)
        scaling = row[-1][1] / row[0][1]
        print(f"{title:24s} on {COUNTS} GPUs: {times}  x{scaling:.2f}")


def generated() -> None:
    """The workloads that make their own data."""
    for name, size in GENERATED.items():
        for n in COUNTS[-1:]:
            seconds, _ = time_generated(name, size, n)
            print(f"{name} {size}: {seconds * 1e3:.1f} ms on {n} GPUs")
