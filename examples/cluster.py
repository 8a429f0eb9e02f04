"""A Dask cluster on this machine: two worker processes, each with two devices of its own.

With `--gpus 4` each of them has two GPUs instead; with `--gpus 1` there is one worker. With the
address of a cluster, `localhost:8786`, its workers take part.
"""

import argparse
import time
from contextlib import nullcontext

import dask.array as da
from distributed import Client, LocalCluster, wait

import gpuscheduler


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address", nargs="?", help="of a cluster that runs already")
    parser.add_argument("--size", type=int, default=2000)
    parser.add_argument("--gpus", type=int, default=0, help="share so many among the workers")
    options = parser.parse_args()
    devices: str | dict[int, str] = "cpu:2"
    workers = 1 if options.gpus == 1 else 2
    if options.gpus:
        ids = [range(options.gpus)[n::workers] for n in range(workers)]
        devices = {n: f"cuda:{','.join(map(str, mine))}" for n, mine in enumerate(ids)}
    if options.address:
        start = nullcontext(options.address)
    else:
        start = LocalCluster(n_workers=workers, threads_per_worker=2, dashboard_address=":0")
    with (
        start as cluster,
        Client(cluster) as client,
        gpuscheduler.attach(client, devices=devices) as attached,
    ):
        print(attached)
        x = da.random.random((options.size, options.size), chunks=options.size // 8).persist()
        wait(x)
        y = (x + x.T).sum()
        print(attached.plan(y))
        begin = time.perf_counter()
        value = float(y.compute())
        print(f"mean of x + x.T: {value / x.size:.4f}, in {time.perf_counter() - begin:.3f} s")


if __name__ == "__main__":  # worker processes import this file
    main()
