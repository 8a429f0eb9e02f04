"""Library functions and mixed programs of NumPy's arrays, on GPUs and the host at once.

`python -m graphs.bench mixed [--gib 1] [--devices cuda:0] [--seconds 110] [--only NAME,...]`

Columns: Dask's threads, as many as the machine has cores; `Scheduler(numpy="host")`, `"auto"` and
`"gpu"`. Results are compared with those of Dask's threads first: type, dtype and numbers. Printed
are the best milliseconds, and how many times as fast as Dask's threads each is. Then, for `"auto"`,
what was foreseen on either side, what was taken, and where each group of tasks runs; then the bars
that are missed. Figures in RESULTS.md come from here. No workload.
"""

from __future__ import annotations

import argparse
import multiprocessing.pool
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import dask
import dask.array as da
import dask.threaded
import numpy as np
from dask import config

import gpuscheduler
from gpuscheduler.devices import cpu

from .host import random_tiles
from .numpy_arrays import LEAST_RUNS, measure, print_verdicts

Program = Callable[[Any, Any], Any]

COLUMNS = ("threads", "host", "auto", "gpu")
#: Lines of groups that are shown of each program.
MOST_LINES = 6


def unknown(block: np.ndarray) -> np.ndarray:
    """Of one pass over memory, and nothing that a kernel or a library of GPUs does."""
    return np.lib.stride_tricks.as_strided(block, block.shape, block.strides).copy()


def slow(block: np.ndarray) -> np.ndarray:
    """The same after NumPy has taken its time: about 25 ns for each number."""
    np.linalg.norm(np.sort(block.astype("f8"), axis=0))
    return unknown(block)


def chain(x: Any) -> Any:
    return da.exp(-0.5 * ((x - 0.1) / 2) ** 2) * 2 + 1


def gaussian(x: Any) -> Any:
    from scipy import ndimage

    return x.map_overlap(ndimage.gaussian_filter, depth=8, sigma=2.0, boundary="reflect").sum()


def median_filter(x: Any) -> Any:
    from scipy import ndimage

    return x.map_blocks(ndimage.median_filter, 3).sum()


#: By name: a program of rows and tiles, and its bar, in times as fast as Dask's threads.
PROGRAMS: dict[str, tuple[Program, float]] = {
    "matmul": (lambda rows, tiles: _square(tiles) @ _square(tiles), 8),
    "rfft of rows": (lambda rows, tiles: da.fft.rfft(rows, axis=1).sum(), 5),
    "rfft and back": (lambda rows, tiles: _filtered(rows).std(), 5),
    "sort of rows": (lambda rows, tiles: rows.map_blocks(np.sort, axis=1).sum(), 3),
    "percentile of rows": (
        lambda rows, tiles: rows.map_blocks(np.percentile, 30, axis=1, drop_axis=1, dtype="f4"), 2,
    ),
    "gaussian_filter": (lambda rows, tiles: gaussian(tiles), 2),
    "median_filter": (lambda rows, tiles: median_filter(tiles), 5),
    "kernels-unknown-kernels": (
        lambda rows, tiles: chain(chain(tiles).map_blocks(unknown, dtype="f4")).sum(), 1,
    ),
    "kernels-slow-kernels": (
        lambda rows, tiles: chain(chain(tiles).map_blocks(slow, dtype="f4")).sum(), 1,
    ),
    "unknown only": (lambda rows, tiles: tiles.map_blocks(unknown, dtype="f4").sum(), 0.95),
    "both at once": (
        lambda rows, tiles: da.concatenate([
            chain(tiles).std(axis=0), tiles.map_blocks(unknown, dtype="f4").max(axis=0),
            rows.map_blocks(np.sort, axis=1).mean(axis=0),
        ]), 1,
    ),
}  # fmt: skip


def _square(tiles: Any) -> Any:
    side = min(8192, min(tiles.shape))
    return tiles[:side, :side]


def _filtered(rows: Any) -> Any:
    spectrum = da.fft.rfft(rows, axis=1)
    return da.fft.irfft(spectrum * 0.5, axis=1)


def table(arguments: list[str] | None = None) -> list[str]:
    """Print the table. Returns what is wrong with results, in words."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--gib", type=float, default=1.0, help="of the array")
    parser.add_argument("--devices", default="cuda:0")
    parser.add_argument("--seconds", type=float, default=110.0, help="about so long in all")
    parser.add_argument("--only", default="", help="names of rows, with commas between them")
    asked = parser.parse_args(arguments)
    only = [n for n in asked.only.split(",") if n]
    warnings.simplefilter("ignore", gpuscheduler.GpuUnused)
    threads = cpu.cpu_count()
    print(f"{threads} threads, {asked.devices}; {asked.gib:g} GiB; milliseconds, best of some")
    print(f"{'':26}" + "".join(f"{n:>12}" for n in COLUMNS))
    begin = time.perf_counter()
    wrong: list[str] = []
    slow_ones: list[str] = []
    said: list[str] = []
    with ExitStack() as stack:
        pool = multiprocessing.pool.ThreadPool(threads)
        stack.callback(pool.terminate)
        made = {m: gpuscheduler.Scheduler(asked.devices, numpy=m) for m in COLUMNS[1:]}
        for scheduler in made.values():
            stack.callback(scheduler.close)
        gets: dict[str, Any] = {"threads": partial(dask.threaded.get, pool=pool)}
        gets.update({m: s.get for m, s in made.items()})
        stack.enter_context(config.set({"array.backend": "numpy"}))
        numbers = random_tiles(asked.gib)
        side = numbers.shape[0]
        rows = da.from_array(numbers, chunks=(max(1, side // 64), side))
        tiles = da.from_array(numbers, chunks=max(64, side // 8))
        del numbers
        todo = [n for n in PROGRAMS if not only or n in only]
        for n, name in enumerate(todo):
            program, bar = PROGRAMS[name]
            left = begin + asked.seconds - time.perf_counter()
            end = time.perf_counter() + left / (len(todo) - n)
            c = program(rows, tiles)
            calls: dict[str, Callable[[], Any]] = {
                column: partial(lambda c, get: dask.compute(c, scheduler=get)[0], c, get)
                for column, get in gets.items()
            }
            best, new = measure(name, calls, end, LEAST_RUNS)
            wrong += new
            base = best.get("threads", np.nan)
            print(f"{name:26}" + "".join(f"{1e3 * best.get(k, np.nan):12.2f}" for k in COLUMNS))
            print(f"{'':26}" + "".join(f"{base / best.get(k, np.nan):11.1f}x" for k in COLUMNS))
            sys.stdout.flush()
            lines = str(made["auto"].plan(c)).splitlines()
            told = [
                line for line in lines[1:] if line.lstrip().startswith(("numpy=", "GPU", "host"))
            ]
            said += [f"{name}:", *[f"  {line.strip()[:150]}" for line in told[:MOST_LINES]]]
            both = min(best.get("auto", np.inf), best.get("gpu", np.inf))
            if not base / both >= bar:
                slow_ones.append(f"{name}: {base / both:.2f}x, the bar is {bar}x")
            if not base / best.get("auto", np.inf) >= 0.95:
                slow_ones.append(f"{name}: auto is {base / best['auto']:.2f}x, the bar is 0.95x")
    return print_verdicts(said, wrong, slow_ones, begin)


def main() -> None:
    """Print the table; exits with an error where a result is wrong."""
    sys.exit(bool(table()))
