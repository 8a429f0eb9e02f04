"""What belongs to a cluster, measured here, or simulated: `python -m graphs.bench cluster tasks`,
`again`, `gpus`, `dask-cuda` or `simulate`. Prints the figures of RESULTS.md.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import dask
import dask.array as da
import numpy as np

import gpuscheduler
from gpuscheduler.cluster.simulate import simulate
from graphs import gauss_sum, haversine_mesh, matmul, transpose_sum


def small_tasks(chunks: int, first: float) -> da.Array:
    """A little more than three tasks for each chunk of sixteen numbers, none of them fused."""
    x = da.from_array(np.arange(chunks * 16.0) + first, chunks=16)
    return x.map_blocks(np.sqrt).map_blocks(np.exp).sum(split_every=16)


def tasks(count: int, repeat: int) -> None:
    """A cluster of two workers with two threads, without and with attach, in turns."""
    from distributed import Client, LocalCluster

    times: dict[str, list[float]] = {"without": [], "with attach": []}

    def timed(name: str, turn: int) -> None:
        x = small_tasks(count // 4, float(turn))  # a new graph each time
        begin = time.perf_counter()
        x.compute(optimize_graph=False)
        times[name].append(time.perf_counter() - begin)

    print(f"{len(small_tasks(count // 4, 0).__dask_graph__()):,} tasks")
    with (
        LocalCluster(n_workers=2, threads_per_worker=2, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        for turn in range(repeat):
            timed("without", turn)
            with gpuscheduler.attach(client, devices="cpu:2"):
                timed("with attach", turn)
    for name, seconds in times.items():
        print(f"{name}: median {median(seconds):.2f} s of {[round(s, 2) for s in seconds]}")
    print(f"ratio {median(times['without']) / median(times['with attach']):.1f}")


def again(repeat: int) -> None:
    """Collections that were computed before: two workers with two CPU devices, and one process."""
    from distributed import Client, LocalCluster

    works = {
        "gauss_sum": gauss_sum.build(gauss_sum.SMALL),
        "mesh_sum": haversine_mesh.build_sum(1000),
    }

    with gpuscheduler.Scheduler("cpu:4"):
        for name, x in works.items():
            timed(f"{name}, one process", x.compute, repeat)
    with (
        LocalCluster(n_workers=2, threads_per_worker=2, dashboard_address=":0") as cluster,
        Client(cluster) as client,
        gpuscheduler.attach(client, devices="cpu:2"),
    ):
        timed("submit and back", lambda: client.submit(abs, 1, pure=False).result(), repeat)
        for name, x in works.items():
            timed(f"{name}, two workers", x.compute, repeat)


def timed(name: str, call: Callable[[], Any], repeat: int) -> None:
    """Print how long a call takes, after two that are not counted."""
    seconds = []
    for turn in range(repeat + 2):
        begin = time.perf_counter()
        call()
        if turn >= 2:
            seconds.append(time.perf_counter() - begin)
    print(f"{name}: median {1e3 * median(seconds):.1f} ms, best {1e3 * min(seconds):.1f} ms")


def on_gpus(where: str, count: int, repeat: int, matrix: int) -> None:
    """Workloads for so many GPUs, by whatever computes now. Matrices are persisted before."""
    side = matrix * 100_000 // 2**16
    works = {
        "gauss_sum": lambda: gauss_sum.inputs((count * matrix, matrix // 2), None, "cupy"),
        "mesh_sum": lambda: (),
        "transpose_sum": lambda: transpose_sum.inputs(matrix, matrix // 16, "cupy"),
    }
    for name, make in works.items():
        arrays = [x.persist() for x in make()]
        if name == "mesh_sum":
            result = haversine_mesh.build_sum(side, None, "cupy")
        else:
            result = {"gauss_sum": gauss_sum, "transpose_sum": transpose_sum}[name].apply(*arrays)
        timed(f"{name}, {where}", result.to_backend("numpy").compute, repeat)
        print(f"  value {float(result.to_backend('numpy').compute()):.9g}", flush=True)
        del arrays, result


def gpus(repeat: int, protocol: str, ipc: bool, matrix: int) -> None:
    """Compare one process that drives every GPU with two workers of half the GPUs each.

    The workers talk by this protocol. With `ipc`, GPUs of one worker read the memory of another's.
    """
    import cupy
    from distributed import Client, LocalCluster

    count = cupy.cuda.runtime.getDeviceCount()
    half = max(1, count // 2)
    ids = [range(half), range(count - half, count)]
    devices: Any = {w: "cuda:" + ",".join(map(str, r)) for w, r in enumerate(ids)}
    with gpuscheduler.Scheduler("cuda"):
        on_gpus(f"one process, {count} GPUs", count, repeat, matrix)
    options = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": ":0"}
    with (
        dask.config.set({"gpuscheduler.ipc": ipc}),
        LocalCluster(protocol=protocol, **options) as cluster,
        Client(cluster) as client,
        gpuscheduler.attach(client, devices),
    ):
        print(f"the scheduler is at {client.scheduler.address}, IPC: {ipc}")
        timed("submit and back", lambda: client.submit(abs, 1, pure=False).result(), repeat)
        on_gpus(f"two workers, {half} each", count, repeat, matrix)


def dask_cuda(repeat: int, protocol: str, matrix: int) -> None:
    """The same by dask-cuda, without attach: a worker for each GPU, with a pool of RMM's."""
    try:
        from dask_cuda import LocalCUDACluster
        from rmm.allocators.cupy import rmm_cupy_allocator
    except ImportError as error:
        raise SystemExit(
            f"dask-cuda is not installed here ({error}): pip install dask-cuda"
        ) from None
    from distributed import Client

    def pooled() -> None:
        __import__("cupy").cuda.set_allocator(rmm_cupy_allocator)

    with (
        LocalCUDACluster(protocol=protocol, rmm_pool_size=0.8, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        client.run(pooled)
        count = len(client.scheduler_info(n_workers=-1)["workers"])
        timed("submit and back", lambda: client.submit(abs, 1, pure=False).result(), repeat)
        on_gpus(f"dask-cuda, {count} workers, {protocol}", count, repeat, matrix)


def simulated(workers: int, devices: int) -> None:
    """Three workloads, of a few blocks for each device."""
    n = workers * devices
    side = 8192 * int(np.ceil(np.sqrt(2 * n)))  # two blocks of 256 MiB or 512 MiB for each device
    work: dict[str, Any] = {
        "transpose_sum": transpose_sum.build(side, 8192),
        "matmul": matmul.build(8192 * max(2, round((4 * n) ** (1 / 3))), 8192),
        "haversine_mesh": haversine_mesh.build_sum(side),
    }
    for name, x in work.items():
        begin = time.perf_counter()
        result = simulate(x, workers=workers, devices=devices)
        print(f"{name}: {result} (simulated in {time.perf_counter() - begin:.1f} s)", flush=True)


def main() -> None:
    """Measure what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["tasks", "again", "gpus", "dask-cuda", "simulate"])
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--workers", type=int, default=128)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--protocol", default="tcp")
    parser.add_argument("--no-ipc", dest="ipc", action="store_false")
    parser.add_argument("--matrix", type=int, default=2**16, help="rows of it, on GPUs")
    options = parser.parse_args()
    if options.what == "tasks":
        tasks(options.count, options.repeat)
    elif options.what == "again":
        again(5 * options.repeat)
    elif options.what == "gpus":
        gpus(3 * options.repeat, options.protocol, options.ipc, options.matrix)
    elif options.what == "dask-cuda":
        dask_cuda(3 * options.repeat, options.protocol, options.matrix)
    else:
        simulated(options.workers, options.devices)


if __name__ == "__main__":
    main()
