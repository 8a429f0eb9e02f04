"""NumPy's arrays on a machine with GPUs: every way to compute them, in one table.

`python -m graphs.bench numpy_arrays [--gib 4] [--small-gib 1] [--threads N] [--devices cuda:0]
[--seconds 120] [--only NAME,...]`

Columns: Dask's threads; `Scheduler(numpy="host")`, `"auto"` and `"gpu"`; the same program with
`to_backend("cupy")` by hand, whose result goes to the host; and behind `x.persist()` under
`"auto"`, a new collection each time, and the same again. Functions of the array library have the
first four columns. All results are compared with those of
Dask's threads first: type, dtype, and numbers. Printed are the best milliseconds and, below, how
many times as fast as Dask's threads each is; then what `"auto"` has chosen, and the bars that are
missed. Figures in RESULTS.md come from here. No workload.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import multiprocessing.pool
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import dask
import dask.array as da
import dask.threaded
import numpy as np
from dask import config

import gpuscheduler
from gpuscheduler import array, linalg
from gpuscheduler.devices import cpu
from graphs import heat_stencil

from .host import TILE, random_tiles, sort_rows, standardize

Program = Callable[[Any], Any]

#: By column, how it is called in the table.
NAMES = {
    "threads": "threads",
    "host": "host",
    "auto": "auto",
    "gpu": "gpu",
    "hand": "by hand",
    "kept": "persisted",
    "again": "again",
}
#: Bars, in times as fast as Dask's threads: of the better of "auto" and "gpu", of persisted data,
#: and of the same collection of it again.
SWEPT: dict[str, tuple[Program, float, float, float]] = {
    "gauss_sum": (lambda x: da.exp(-0.5 * ((x - 0.1) / 2) ** 2).sum(), 5, 40, 100),
    "(x + 1).sum": (lambda x: (x + 1).sum(), 1.2, 10, 15),
    "std of columns": (lambda x: x.std(axis=0), 5, 40, 50),
    "(x + x.T).max": (lambda x: (x + x.T).max(axis=1), 10, 40, 80),
    "standardize": (standardize, 5, 40, 50),
    "stencil": (lambda x: heat_stencil.apply(x, 1).sum(), 5, 40, 40),
    "x + 1 to host": (lambda x: x[: x.shape[0] // 2] + 1, 2, 5, 5),
}
CALLED: dict[str, Program] = {
    "rfft of rows": lambda x: da.fft.rfft(x, axis=1).sum(),
    "sort of rows": lambda x: x.map_blocks(sort_rows).sum(),
    "matmul": lambda x: x @ x,
}
#: Of a tall matrix, a square one whose symmetric part is positive, and a line of numbers.
LIBRARY: dict[str, Callable[[Any, Any, Any], Any]] = {
    "Dask's svd": lambda t, a, v: abs(da.linalg.svd(t)[0]).sum(axis=0),
    "lstsq": lambda t, a, v: 1 + linalg.lstsq(t, t[:, :1])[0],
    "solve": lambda t, a, v: 1 + linalg.solve(a, a[:, 0]),
    "cholesky": lambda t, a, v: linalg.cholesky(a + a.T),
    "sort": lambda t, a, v: array.sort(v),
    "median": lambda t, a, v: array.median(v, axis=0),
    "unique": lambda t, a, v: array.unique((v * 1e4).astype("i4")),
}
#: Those that factor block by block: with as many threads of BLAS for each of the host's threads,
#: Dask's svd took six times as long on two cores.
BY_BLOCK = ("Dask's svd", "lstsq")
#: Columns of the tall matrix, and its blocks.
COLUMNS, BLOCKS = 500, 16
#: "gpu" may take so many times as long as the program by hand.
BY_HAND = 1.1
#: Runs of a column that takes this many times as long as Dask's threads are not repeated.
HOPELESS = 3
LEAST_RUNS, MOST_RUNS = 2, 7


def to_host(value: Any) -> Any:
    return value.get() if type(value).__module__.partition(".")[0] == "cupy" else value


def by_hand(program: Program, x: da.Array, get: Any) -> Callable[[], Any]:
    """The program as people write it for GPUs, with the result on the host."""
    c = program(x.to_backend("cupy"))
    if c.ndim:
        c = c.map_blocks(to_host, dtype=c.dtype, meta=np.empty((0,) * c.ndim, c.dtype))
    return lambda: to_host(dask.compute(c, scheduler=get)[0])


def ways(
    program: Program, x: da.Array, gets: dict[str, Any], kept: da.Array | None, hand: bool = True
) -> dict[str, Callable[[], Any]]:
    """How to run a program in each column."""
    c = program(x)

    def computed(c: Any, get: Any) -> Callable[[], Any]:
        return lambda: dask.compute(c, scheduler=get)[0]

    out = {name: computed(c, gets[name]) for name in ("threads", "host", "auto", "gpu")}
    if hand:
        out["hand"] = by_hand(program, x, gets["gpu"])
    if kept is not None:
        out["kept"] = lambda: dask.compute(program(kept), scheduler=gets["auto"])[0]
        out["again"] = computed(program(kept), gets["auto"])
    return out


def library_arrays(gib: float) -> tuple[da.Array, da.Array, da.Array]:
    """A tall matrix and a line of numbers of this size, and a square matrix of half of it."""
    rng, count = np.random.default_rng(0), int(gib * 2**27)
    rows = max(BLOCKS, count // COLUMNS // BLOCKS * BLOCKS)
    tall = rng.standard_normal((rows, min(COLUMNS, max(32, rows // 8))))
    side = int((count / 2) ** 0.5)
    square = rng.standard_normal((side, side))
    square.flat[:: side + 1] += 4 * side**0.5
    line = rng.standard_normal(count)
    return (
        da.from_array(tall, chunks=(-(-rows // BLOCKS), -1)),
        da.from_array(square, chunks=-(-side // 4)),
        da.from_array(line, chunks=-(-count // BLOCKS)),
    )


def measure_library(
    name: str, gib: float, gets: dict[str, Any], auto: Any, end: float
) -> tuple[dict[str, float], list[str], str]:
    """The best seconds of each column, what is wrong, and what "auto" chose."""
    c = LIBRARY[name](*library_arrays(gib))
    columns = ("threads", "host", "auto", "gpu")
    calls: dict[str, Callable[[], Any]] = {m: partial(first_value, c, gets[m]) for m in columns}
    with ExitStack() as s:
        if name in BY_BLOCK:
            with suppress(ImportError):
                s.enter_context(importlib.import_module("threadpoolctl").threadpool_limits(1))
        best, wrong = measure(name, calls, end, LEAST_RUNS)
    return best, wrong, f"{name}: {plan_of(auto, c)}"


def first_value(c: Any, get: Any) -> Any:
    """Compute one collection by a scheduler's function."""
    return dask.compute(c, scheduler=get)[0]


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    begin = time.perf_counter()
    value = call()
    return value, time.perf_counter() - begin


def check(name: str, column: str, got: Any, wanted: Any) -> list[str]:
    """What is wrong with a result, in words; numbers may differ by rounding."""
    out = []
    if column != "hand" and (type(got) is not type(wanted) or got.dtype != wanted.dtype):
        out.append(f"{name}, {column}: {type(got)} {got.dtype} for {type(wanted)} {wanted.dtype}")
    got, wanted = np.asarray(got), np.asarray(wanted)
    if got.shape != wanted.shape:
        return [*out, f"{name}, {column}: shape {got.shape} for {wanted.shape}"]
    step = max(1, wanted.size // 2**20)
    try:  # of sums of float32, NumPy's and ours are both off by some parts in 100,000
        np.testing.assert_allclose(got.reshape(-1)[::step], wanted.reshape(-1)[::step], rtol=1e-4)
    except AssertionError as error:
        out.append(f"{name}, {column}: {' '.join(str(error).split())[:200]}")
    if column != "hand" and isinstance(got, np.ndarray) and not got.flags.writeable:
        out.append(f"{name}, {column}: not writeable")
    return out


def measure(
    name: str, calls: dict[str, Callable[[], Any]], end: float, most: int = MOST_RUNS
) -> tuple[dict[str, float], list[str]]:
    """The best seconds of each column, and what is wrong; the first run of each is compared."""
    best: dict[str, float] = {}
    wrong: list[str] = []
    first: dict[str, float] = {}
    wanted = None
    for column, call in calls.items():
        try:
            value, first[column] = timed(call)
        except Exception as error:
            wrong.append(f"{name}, {column}: {type(error).__name__}: {str(error)[:300]}")
            traceback.print_exc(limit=-4)
            continue
        if wanted is None:
            wanted = value
        else:
            wrong += check(name, column, value, wanted)
        value = None
    del wanted
    for n in range(most):
        if n >= LEAST_RUNS and time.perf_counter() > end:
            break
        gc.collect()
        for column in list(first)[:: 1 if n % 2 else -1]:
            slow = column in best and best[column] > HOPELESS * best.get("threads", np.inf)
            if slow or (n and column == "threads" and time.perf_counter() > end):
                continue
            best[column] = min(timed(calls[column])[1], best.get(column, np.inf))
    return best, wrong


def show(name: str, best: dict[str, float], note: str = "") -> None:
    base = best.get("threads", np.nan)
    print(f"{name:16}" + "".join(f"{1e3 * best.get(c, np.nan):12.2f}" for c in NAMES) + note)
    print(f"{'':16}" + "".join(f"{base / best.get(c, np.nan):11.1f}x" for c in NAMES))
    sys.stdout.flush()


def print_verdicts(said: list[str], wrong: list[str], slow: list[str], begin: float) -> list[str]:
    """Print what "auto" chose, what is wrong, missed bars and the time; returns `wrong`."""
    print('\nnumpy="auto":', *said, sep="\n  ")
    print("\nwrong:", *(wrong or ["nothing"]), sep="\n  ")
    print("\nbelow the bars:", *(slow or ["nothing"]), sep="\n  ")
    print(f"\n{time.perf_counter() - begin:.0f} s")
    return wrong


def missed(name: str, best: dict[str, float]) -> list[str]:
    """Bars that a row of `SWEPT` does not reach."""
    _, bar, kept, again = SWEPT[name]
    base, out = best.get("threads", np.nan), []
    both = min(best.get("auto", np.inf), best.get("gpu", np.inf))
    for what, seconds, least in (
        ("auto or gpu", both, bar),
        ("persisted", best.get("kept", np.inf), kept),
        ("the same again", best.get("again", np.inf), again),
        ("auto", best.get("auto", np.inf), 1.0),
    ):
        if not base / seconds >= least:
            out.append(f"{name}: {what} is {base / seconds:.2f}x, the bar is {least}x")
    if not best.get("gpu", np.inf) <= BY_HAND * best.get("hand", 0):
        ratio = best.get("gpu", np.nan) / best.get("hand", np.nan)
        out.append(f"{name}: gpu takes {ratio:.2f} of the program by hand, the bar is {BY_HAND}")
    return out


def plan_of(scheduler: Any, c: Any) -> str:
    return str(scheduler.explain(c)).splitlines()[0]


def table(arguments: list[str] | None = None) -> list[str]:
    """Print the table. Returns what is wrong with results, in words."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--gib", type=float, default=4.0, help="of the large arrays")
    parser.add_argument("--small-gib", type=float, default=1.0, help="of those of library calls")
    parser.add_argument("--threads", type=int, default=cpu.cpu_count())
    parser.add_argument("--devices", default="cuda:0")
    parser.add_argument("--seconds", type=float, default=120.0, help="about so long in all")
    parser.add_argument("--only", default="", help="names of rows, with commas between them")
    asked = parser.parse_args(arguments)
    only = [n for n in asked.only.split(",") if n]
    warnings.simplefilter("ignore", gpuscheduler.GpuUnused)
    pool = multiprocessing.pool.ThreadPool(asked.threads)
    print(
        f"{asked.threads} threads, {asked.devices}; {asked.gib:g} and {asked.small_gib:g} GiB; "
        "milliseconds, best of some, and times as fast as Dask's threads"
    )
    print(f"{'':16}" + "".join(f"{n:>12}" for n in NAMES.values()))
    begin = time.perf_counter()
    wrong: list[str] = []
    slow: list[str] = []
    said: list[str] = []
    with ExitStack() as stack:
        stack.callback(pool.terminate)
        made = {
            mode: gpuscheduler.Scheduler(asked.devices, numpy=mode)
            for mode in ("host", "auto", "gpu")
        }
        for scheduler in made.values():
            stack.callback(scheduler.close)
        gets: dict[str, Any] = {m: s.get for m, s in made.items()}
        gets["threads"] = partial(dask.threaded.get, pool=pool)
        stack.enter_context(config.set({"array.backend": "numpy"}))
        rows = [n for n in SWEPT if not only or n in only]
        if rows:
            numbers = random_tiles(asked.gib)
            tile = min(TILE, max(8, numbers.shape[0] // 8))
            x, construction = timed(partial(da.from_array, numbers, chunks=tile))
            del numbers
            (kept,) = dask.persist(x, scheduler=made["auto"].get)
            print(f"da.from_array took {1e3 * construction:.0f} ms; persisted: {made['auto']!r}")
            for n, name in enumerate(rows):
                program = SWEPT[name][0]
                left = begin + 0.75 * asked.seconds - time.perf_counter()
                end = time.perf_counter() + left / (len(rows) - n)
                best, new = measure(name, ways(program, x, gets, kept), end)
                wrong += new
                slow += missed(name, best)
                said.append(f"{name}: {plan_of(made['auto'], program(x))}")
                show(name, best)
            del x, kept
        numbers = random_tiles(asked.small_gib)
        side = numbers.shape[0]
        half = da.from_array(
            np.ascontiguousarray(numbers[: side // 2, : side // 2]), chunks=max(8, side // 8)
        )
        rows_of = da.from_array(numbers, chunks=(max(1, side // 64), side))
        del numbers
        for name, program in CALLED.items():
            if only and name not in only:
                continue
            x = half if name == "matmul" else rows_of
            end = time.perf_counter() + 0.05 * asked.seconds
            best, new = measure(name, ways(program, x, gets, None), end, LEAST_RUNS)
            wrong += new
            if best["threads"] / best["auto"] < 0.95:
                slow.append(f"{name}: auto is {best['threads'] / best['auto']:.2f}x, bar 0.95x")
            said.append(f"{name}: {plan_of(made['auto'], program(x))}")
            show(name, best)
        del rows_of, half
        for name in [n for n in LIBRARY if not only or n in only]:
            end = time.perf_counter() + 0.05 * asked.seconds
            best, new, note = measure_library(name, asked.small_gib, gets, made["auto"], end)
            wrong += new
            if best["threads"] / best["auto"] < 0.95:
                slow.append(f"{name}: auto is {best['threads'] / best['auto']:.2f}x, bar 0.95x")
            said.append(note)
            show(name, best)
        small = np.random.default_rng(0).random((512, 512), np.float32)
        x = da.from_array(small, chunks=128)
        print("1 MiB:")
        for name in SWEPT:
            if only and name not in only:
                continue
            end = time.perf_counter() + 0.01 * asked.seconds
            best, new = measure(name, ways(SWEPT[name][0], x, gets, None), end, 50)
            wrong += new
            if best["threads"] / best["auto"] < 0.95:
                slow.append(
                    f"1 MiB {name}: auto is {best['threads'] / best['auto']:.2f}x, bar 0.95x"
                )
            show(name, best)
    return print_verdicts(said, wrong, slow, begin)


def main() -> None:
    """Print the table; exits with an error where a result is wrong."""
    sys.exit(bool(table()))
