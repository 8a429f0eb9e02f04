"""Fused kernels beside the bandwidth of memory, and beside CuPy."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import cupy
import dask
import dask.array as da
import dask.threaded
import numpy as np
from dask.array.reductions import moment_chunk

import gpuscheduler
from gpuscheduler.devices.cuda.kernels import Kernels
from gpuscheduler.devices.cuda.launch import Workspace
from gpuscheduler.fusion.task import KernelTask
from gpuscheduler.tracing import abstract, registry, trace

from .timing import GPUS, best, everywhere, on_device, synchronize


def kernels() -> None:
    """Fused kernels by themselves, blocks of 256 MiB on one GPU, beside the bandwidth of a copy."""
    nbytes = 2**32
    buffers = [cupy.ones(nbytes, "u1"), cupy.empty(nbytes, "u1")]

    def copy() -> None:
        source, target = (b.data.ptr for b in buffers)
        cupy.cuda.runtime.memcpyAsync(target, source, nbytes, 3, 0)

    limit = 2 * nbytes / on_device(copy)
    buffers.clear()
    known, work = Kernels(), Workspace()

    def gauss(x: Any) -> Any:
        return np.exp(-0.5 * ((x - 0.1) / 2) ** 2)

    moment = partial(registry.KNOWN[moment_chunk], dtype="f8", keepdims=True)
    cases: dict[str, Callable[..., Any]] = {
        "map": gauss,
        "gauss sum": lambda x: gauss(x).sum(keepdims=True),
        "sum": lambda x: x.sum(keepdims=True),
        "column sums": lambda x: x.sum(0, keepdims=True),
        "row sums": lambda x: x.sum(1, keepdims=True),
        "mean and variance of columns": partial(moment, axis=(0,)),
        "mean and variance of rows": partial(moment, axis=(1,)),
        "x + y.T": lambda x, y: x + y.T,
        "(x + y.T).sum": lambda x, y: (x + y.T).sum(keepdims=True),
        "argmax of rows": lambda x: x.argmax(1),
    }
    for dtype in (np.dtype("f4"), np.dtype("f8")):
        shape = (2**26 // 8192 * 4 // dtype.itemsize, 8192)
        for name, f in cases.items():
            inputs = [shape, shape[::-1]][: 2 if "y.T" in name else 1]
            foreseen = tuple(abstract.AbstractArray(s, dtype) for s in inputs)
            program = trace.trace_function(f, foreseen)
            arrays = [
                {n: cupy.random.default_rng(i).standard_normal(s, dtype="f8").astype(dtype)
                 for n, s in enumerate(inputs)}
                for i in range(12)
            ]  # fmt: skip
            names = tuple(range(len(inputs)))
            task = KernelTask(name, program, names, foreseen, (), None, dict)
            seconds = on_device(lambda: [known.run(task, v, 0, work) for v in arrays])  # noqa: B023
            rate = 12 * sum(k.bytes_moved() for k in program.kernels) / seconds
            print(f"{name:28s} {dtype}: {rate / 1e12:5.2f} TB/s, {rate / limit:4.0%} of a copy")
            arrays.clear()


def fusion() -> None:
    """Fused kernels beside the bandwidth of a copy, measured in this very run, on every GPU."""
    nbytes = 2**33
    buffers = everywhere(lambda d: (cupy.ones(nbytes // 2, "u1"), cupy.empty(nbytes // 2, "u1")))

    def copy() -> None:
        for d, (a, b) in enumerate(buffers):
            with cupy.cuda.Device(d):
                cupy.cuda.runtime.memcpyAsync(b.data.ptr, a.data.ptr, nbytes // 2, 3, 0)

    limit = GPUS * nbytes / best(copy)
    buffers.clear()
    everywhere(lambda d: cupy.get_default_memory_pool().free_all_blocks())
    print(f"device copy: {limit / 1e12:.2f} TB/s over {GPUS} GPUs; 8 GiB of input on each")

    def gauss(x: Any) -> Any:
        return da.exp(-0.5 * ((x - 0.1) / 2) ** 2)

    cases: dict[str, tuple[Callable[[Any], Any], float]] = {
        "map": (gauss, 2),
        "sum": (lambda x: gauss(x).sum(), 1),
        "column sums": (lambda x: x.sum(axis=0), 1),
        "row sums": (lambda x: x.sum(axis=1), 1),
        "mean and variance": (lambda x: (x.mean(axis=0), x.var(axis=0)), 1),
        "x + x.T": (lambda x: x + x.T, 3) if GPUS == 1 else (lambda x: x + 1, 2),
    }
    for dtype in ("f4", "f8"):
        columns = 2**15
        rows = GPUS * nbytes // columns // np.dtype(dtype).itemsize
        with gpuscheduler.Scheduler(devices="cuda"):
            for name, (f, sweeps) in cases.items():
                shape = (columns, columns) if name == "x + x.T" else (rows, columns)
                x = da.random.default_rng(1).random(shape, dtype=dtype, chunks=2**13).persist()
                result = f(x)
                begin = time.perf_counter()
                dask.persist(result)
                synchronize()
                first = time.perf_counter() - begin
                seconds = best(lambda result=result: dask.persist(result), 4)  # type: ignore[misc]
                rate = sweeps * x.nbytes / seconds
                print(
                    f"{name:18s} {dtype}: {seconds * 1e3:7.2f} ms, {rate / 1e12:6.2f} TB/s, "
                    f"{rate / limit:4.0%} of a copy; the first time {first:.2f} s"
                )
                del x, result
