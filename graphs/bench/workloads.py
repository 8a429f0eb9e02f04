"""Times of the workloads on one and more GPUs."""

from __future__ import annotations

import importlib

import dask.array as da

import gpuscheduler

from .timing import COUNTS, best, devices


def graphs() -> None:
    """The workloads on inputs that are on the GPUs already; sizes grow with the GPUs."""
    cases = {
        "gauss_sum": lambda n: (n * 2**16, 2**15),
        "standardize": lambda n: (n * 2**16, 2**15),
        "black_scholes": lambda n: n * 2**29,
        "black_scholes, fast_math": lambda n: n * 2**29,
        "logistic_step": lambda n: (n * 2**23, 256),
        "heat_stencil": lambda n: (int(32768 * n**0.5) // 64 * 64, 8),
        "transpose_sum": lambda n: 65536 if n > 1 else 32768,
        "matmul": lambda n: 32768,
        "tall_skinny_svd": lambda n: (n * 2**23, 128),
    }
    chunks = {"gauss_sum": 8192, "standardize": 8192, "transpose_sum": 4096}
    for name, size in cases.items():
        module, _, fast = name.partition(", ")
        graph = importlib.import_module(f"graphs.{module}")
        row = []
        for n in COUNTS:
            with gpuscheduler.Scheduler(devices=devices(n), fast_math=bool(fast)):
                arrays = graph.inputs(size(n), chunks.get(name), "cupy")
                arrays = [a.persist() if isinstance(a, da.Array) else a for a in arrays]
                result = graph.apply(*arrays)
                small = result.nbytes < 2**20
                seconds = best(result.compute if small else result.persist, 9)
                moved = graph.bytes_moved(size(n)) / seconds / 1e12
                row.append((seconds, moved))
                del arrays, result
        times = " ".join(f"{s * 1e3:8.2f} ms ({t:5.2f} TB/s)" for s, t in row)
        scaling = row[-1][1] / row[0][1]
        print(f"{name:24s} on {COUNTS} GPUs: {times}  x{scaling:.2f}")


def generated() -> None:
    """The workloads that make their own data."""
    for name, size in {"haversine_mesh": 100_000, "random_slice_sum": 500_000}.items():
        graph = importlib.import_module(f"graphs.{name}")
        build = getattr(graph, "build_sum", graph.build)
        for n in COUNTS[-1:]:
            with gpuscheduler.Scheduler(devices=devices(n)):
                result = build(size, None, "cupy")
                seconds = best(result.compute, 5)
                print(f"{name} {size}: {seconds * 1e3:.1f} ms on {n} GPUs")
