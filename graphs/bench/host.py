"""NumPy's blocks on a machine's cores: Dask's threads, and Schedulers on GPUs and CPU devices.

`python -m graphs.bench host [--gib 4] [--small-gib 1] [--threads N] [--devices cuda]
[--seconds 180] [--only NAME,...] [--no-causes]`

Each workload runs by all of them in turns, in one process, as often as there is time for; what it
gives is compared first. Printed are the best and the median, and how many times as fast as Dask's
threads each is. Then, for products, transforms and sorts of blocks, where the time goes: each
thread's busy time, what the tasks take of their processors, page faults, switches, and the same
under other rules for who runs what. Figures in RESULTS.md come from here. No workload.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import multiprocessing.pool
import os
import resource
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import dask.bag
import dask.local
import dask.threaded
import numpy as np
from dask import config

import gpuscheduler
from gpuscheduler.devices import cpu
from gpuscheduler.runtime import host_memory
from graphs import heat_stencil

#: Workloads that a library's function takes most of: it is shown where their time goes.
CALLED = ("matmul of 4 blocks", "rfft 16 blocks", "sort 16 blocks", "sort rows")
#: Workloads, and the part of the time that is for each one's table of causes.
CASES, CAUSES = 20, 0.1
#: Runs of each at least, behind the first, and at most.
FEWEST, MOST = 2, 9
TILE = 4096


@dataclass
class Case:
    name: str
    compute: Callable[[Any], Any]  # called with a scheduler's `get`
    bar: float  # times as fast as Dask's threads, at least
    times: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))


def random_tiles(gib: float) -> np.ndarray:
    """Uniform float32 numbers in rows of whole tiles, made by every core."""
    side = max(1, round((gib * 2**30 / 4) ** 0.5 / TILE)) * TILE
    if gib * 2**30 < 4 * TILE**2:
        side = max(64, round((gib * 2**30 / 4) ** 0.5 / 8) * 8)
    out = np.empty((side, side), np.float32)
    rows = np.array_split(np.arange(side), 64)

    def fill(n: int) -> None:
        part = rows[n]
        if len(part):
            np.random.default_rng(n).random(out=out[part[0] : part[-1] + 1], dtype=np.float32)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(fill, range(64)))
    return out


def standardize(x: Any) -> Any:
    return ((x - x.mean(axis=0)) / x.std(axis=0)).max()


def sort_rows(block: np.ndarray) -> np.ndarray:
    return np.sort(block, axis=1)


def one_svd(seed: int) -> Any:
    a = np.random.default_rng(seed).random((256, 256))
    return np.linalg.svd(a, compute_uv=False)[0]


def nothing(n: int) -> int:
    return n


def computed(c: Any) -> Callable[[Any], Any]:
    return lambda get: dask.compute(c, scheduler=get)[0]


def swept(gib: float) -> Iterator[Case]:
    """Kernels, on an array in tiles."""
    numbers = random_tiles(gib)
    x = da.from_array(numbers, chunks=min(TILE, max(8, numbers.shape[0] // 8)))
    del numbers
    every = {
        "gauss_sum": (da.exp(-0.5 * ((x - 0.1) / 2) ** 2).sum(), 1.2),
        "(x + 1).sum": ((x + 1).sum(), 1.2),
        "std of columns": (x.std(axis=0), 1.2),
        "(x + x.T).max": ((x + x.T).max(axis=1), 0.95),
        "standardize": (standardize(x), 1.2),
        "stencil": (heat_stencil.apply(x, 1).sum(), 1.2),
        "x + 1 to host": (x[: x.shape[0] // 2] + 1, 1.2),
    }
    for name, (c, bar) in every.items():
        yield Case(name, computed(c), bar)


def called(gib: float) -> Iterator[Case]:
    """Functions of libraries, on blocks of matrices and on whole rows."""
    numbers = random_tiles(gib)
    side = numbers.shape[0]
    half = np.ascontiguousarray(numbers[: side // 2, : side // 2])
    many, few = (da.from_array(half, chunks=max(8, side // n)) for n in (8, 4))
    rows, wide = (da.from_array(numbers, chunks=(max(1, side // n), side)) for n in (64, 16))
    del numbers
    every = {
        "matmul": many @ many,
        "matmul of 4 blocks": few @ few,
        "rfft rows": da.fft.rfft(rows, axis=1).sum(),
        "rfft 16 blocks": da.fft.rfft(wide, axis=1).sum(),
        "abs of rfft": abs(da.fft.rfft(wide, axis=1)).max(),
        "rfft to host": da.fft.rfft(wide, axis=1),
        "sort rows": rows.map_blocks(sort_rows).sum(),
        "sort 16 blocks": wide.map_blocks(sort_rows).sum(),
        "sort to host": wide.map_blocks(sort_rows),
        "svd": da.linalg.svd(wide[:, :64])[1],
    }
    for name, c in every.items():
        yield Case(name, computed(c), 0.95)


def others() -> Iterator[Case]:
    """What has no arrays, or none that Dask knows of."""
    words = [f"w{(n * 2654435761) % 997}" for n in range(200_000)]
    bag = dask.bag.from_sequence(words, npartitions=32)
    yield Case("bag frequencies", computed(bag.frequencies()), 0.95)
    some = [dask.delayed(one_svd)(n) for n in range(64)]
    yield Case("64 delayed SVDs", lambda get: dask.compute(*some, scheduler=get), 0.95)
    calls = [dask.delayed(nothing)(n) for n in range(10_000)]
    yield Case("10,000 no-ops", lambda get: dask.compute(*calls, scheduler=get), 1.5)


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    gc.collect()
    begin = time.perf_counter()
    value = call()
    return value, time.perf_counter() - begin


def as_numpy(value: Any) -> Any:
    return (
        value.get()
        if hasattr(value, "get") and hasattr(value, "__cuda_array_interface__")
        else value
    )


def check(case: Case, name: str, got: Any, wanted: Any) -> None:
    """Values, types and dtypes are those of Dask's threads."""
    if isinstance(wanted, (list, tuple)) and wanted and isinstance(wanted[0], tuple):
        assert sorted(got) == sorted(wanted), (case.name, name)
        return
    if type(got) is not type(wanted):
        print(f"    {case.name}, {name}: {type(got).__name__} for {type(wanted).__name__}")
    got, wanted = np.asarray(as_numpy(got)), np.asarray(wanted)
    assert got.shape == wanted.shape, (case.name, name, got.shape, wanted.shape)
    if got.dtype != wanted.dtype:
        print(f"    {case.name}, {name}: {got.dtype} for {wanted.dtype}")
    step = max(1, wanted.size // 2**20)
    # of sums of float32, NumPy's and ours are both off by some parts in 100,000
    np.testing.assert_allclose(
        got.reshape(-1)[::step],
        wanted.reshape(-1)[::step],
        rtol=1e-4,
        err_msg=f"{case.name}, {name}",
    )


def compare(case: Case, gets: dict[str, Any], seconds: float) -> None:
    """Run a workload by each in turns, for about so long."""
    end = time.perf_counter() + seconds
    wanted, first = None, {}
    for name, get in gets.items():
        value, first[name] = timed(partial(case.compute, get))
        if wanted is None:
            wanted = value
        else:
            check(case, name, value, wanted)
        value = None
    del wanted
    for n in range(MOST):
        order = list(gets) if n % 2 else list(gets)[::-1]
        if n >= FEWEST and time.perf_counter() + sum(t[-1] for t in case.times.values()) > end:
            break
        for name in order:
            slow = first[name] > 3 * first["threads"] + 0.5 and case.times[name]
            if not slow:
                case.times[name].append(timed(partial(case.compute, gets[name]))[1])
    base = min(case.times["threads"])
    text = f"{case.name:18}"
    for name in gets:
        times = case.times[name]
        best, middle = min(times), sorted(times)[len(times) // 2]
        text += f" | {1e3 * best:8.1f} {1e3 * middle:8.1f}"
        text += "        " if name == "threads" else f"  {base / best:5.2f}x"
    missed = [n for n, t in case.times.items() if base / min(t) < case.bar and n != "threads"]
    print(text + f" | n={len(case.times['threads'])}" + (f"  below {case.bar}" if missed else ""))
    sys.stdout.flush()


# ---- where the time goes


@dataclass
class Seen:
    """What tasks took while a workload ran."""

    #: thread -> (begin, end, seconds of the processor, minor faults, switches by itself, by force)
    tasks: dict[str, list[tuple[float, float, float, int, int, int]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    given_back: int = 0

    def watched(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def watching(*args: Any, **kwargs: Any) -> Any:
            use = resource.getrusage(resource.RUSAGE_THREAD)
            begin, cpu_begin = time.perf_counter(), time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                end, cpu_end = time.perf_counter(), time.thread_time()
                now = resource.getrusage(resource.RUSAGE_THREAD)
                self.tasks[threading.current_thread().name].append(
                    (
                        begin, end, cpu_end - cpu_begin, now.ru_minflt - use.ru_minflt,
                        now.ru_nvcsw - use.ru_nvcsw, now.ru_nivcsw - use.ru_nivcsw,
                    )
                )  # fmt: skip

        return watching

    def forget(self) -> None:
        self.tasks = defaultdict(list)
        self.given_back = 0


@contextmanager
def watching() -> Iterator[Seen]:
    """Each task, of ours and of Dask's threads, is timed in its thread."""
    seen = Seen()
    made, executed, back = (
        cpu.CpuDevices._compute_value,
        dask.local.execute_task,
        host_memory.give_back,
    )

    def counted() -> None:
        seen.given_back += 1
        back()

    trimmers = [o for o in gc.get_objects() if type(o) is host_memory.MemoryTrimmer]
    try:
        cpu.CpuDevices._compute_value = seen.watched(made)  # type: ignore[method-assign]
        dask.local.execute_task = seen.watched(executed)
        for trimmer in trimmers:
            trimmer.give_back = counted
        yield seen
    finally:
        cpu.CpuDevices._compute_value = made  # type: ignore[method-assign]
        dask.local.execute_task = executed
        for trimmer in trimmers:
            trimmer.give_back = back


def told(name: str, wall: float, seen: Seen, used: Any, begin: float) -> None:
    every = [t for tasks in seen.tasks.values() for t in tasks]
    busy = [sum(e - b for b, e, *_ in tasks) for tasks in seen.tasks.values()] or [0.0]
    first = min((t[0] for t in every), default=begin) - begin
    last = begin + wall - max((t[1] for t in every), default=begin)
    long = sorted(e - b for b, e, *_ in every)
    middle = long[len(long) // 2] if long else 0.0
    print(
        f"  {name:26} {1e3 * wall:8.1f} ms: {len(every)} tasks on {len(seen.tasks)} threads "
        f"(most {max(map(len, seen.tasks.values()), default=0)}, "
        f"least {min(map(len, seen.tasks.values()), default=0)}); "
        f"busy {1e3 * sum(busy):.0f} (least {1e3 * min(busy):.0f}, most {1e3 * max(busy):.0f}); "
        f"of that on a processor {1e3 * sum(t[2] for t in every):.0f}; "
        f"task median {1e3 * middle:.2f}, longest {1e3 * (long[-1] if long else 0):.2f}; "
        f"before the first {1e3 * first:.1f}, behind the last {1e3 * last:.1f}; "
        f"in tasks {sum(t[3] for t in every)} faults, {sum(t[4] for t in every)} waits, "
        f"{sum(t[5] for t in every)} pushed off; process {used[0]} faults, {used[1]:.2f} s user, "
        f"{used[2]:.2f} s system; given back {seen.given_back}"
    )


def usage() -> tuple[int, float, float]:
    u = resource.getrusage(resource.RUSAGE_SELF)
    return u.ru_minflt, u.ru_utime, u.ru_stime


def causes(case: Case, gets: dict[str, Any], threads: int, seconds: float) -> None:
    """The same workload under other rules, and where its time goes."""
    print(f"{case.name}: where the time goes, best of some")
    name = f"cpu:{threads}"
    variants: dict[str, Callable[[ExitStack], Any]] = {
        "threads": lambda _: gets["threads"],
        name: lambda _: gets[name],
        f"{name} window=1": lambda s: on(s, name, window=1, deep_window=1),
        f"{name} window=2": lambda s: on(s, name, window=2, deep_window=2),
        f"{name} fuse=False": lambda s: on(s, name, fuse=False),
        f"{name} pool of {threads}": lambda s: pooled(s, name, threads),
        f"{name} memory 1 PiB": lambda s: on(s, name, memory_limit="1 PiB"),
    }
    with suppress(ImportError):
        threadpoolctl = importlib.import_module("threadpoolctl")

        def limited(s: ExitStack, get: Any) -> Any:
            s.enter_context(threadpoolctl.threadpool_limits(1))
            return get

        variants["threads, BLAS 1"] = lambda s: limited(s, gets["threads"])
        variants[f"{name}, BLAS 1"] = lambda s: limited(s, gets[name])
    end = time.perf_counter() + seconds
    for label, variant in variants.items():
        if time.perf_counter() > end:
            print(f"  {label}: no time left")
            continue
        with ExitStack() as stack:
            get = variant(stack)
            case.compute(get)
            runs: list[Any] = []
            with watching() as seen:
                for _ in range(3):
                    seen.forget()
                    gc.collect()
                    before, begin = usage(), time.perf_counter()
                    value = case.compute(get)
                    wall = time.perf_counter() - begin
                    del value
                    used = tuple(b - a for a, b in zip(before, usage(), strict=True))
                    kept = Seen(defaultdict(list, seen.tasks), seen.given_back)
                    runs.append((wall, kept, used, begin))
            told(label, *min(runs, key=lambda run: run[0]))
    sys.stdout.flush()


def on(stack: ExitStack, devices: str, **options: Any) -> Any:
    scheduler = gpuscheduler.Scheduler(devices, **options)
    stack.callback(scheduler.close)
    return scheduler.get


def pooled(stack: ExitStack, devices: str, threads: int) -> Any:
    pool = stack.enter_context(ThreadPoolExecutor(threads))
    get = on(stack, devices)
    return lambda dsk, keys, **kwargs: get(dsk, keys, pool=pool, **kwargs)


def machine() -> str:
    """What decides how threads get on with each other here."""
    out = []
    for name in ("/sys/kernel/mm/transparent_hugepage/enabled", "/sys/fs/cgroup/cpu.max"):
        with suppress(OSError):
            out.append(f"{Path(name).name}: {Path(name).read_text().strip()}")
    with suppress(OSError):
        facts = Path("/proc/cpuinfo").read_text().splitlines()
        out.append(next((f.split(":", 1)[1].strip() for f in facts if "model name" in f), "?"))
        siblings = {f for f in facts if f.startswith("core id")}
        out.append(f"{len(siblings)} core ids")
    nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))
    out.append(f"{nodes} memory nodes, {os.uname().release}")
    with suppress(ImportError):
        every = importlib.import_module("threadpoolctl").threadpool_info()
        out += [f"{i['internal_api']} {i['num_threads']} threads" for i in every]
    return "; ".join(out)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--gib", type=float, default=4.0, help="of the large arrays")
    parser.add_argument("--small-gib", type=float, default=1.0, help="of the others")
    parser.add_argument("--threads", type=int, default=cpu.cpu_count())
    parser.add_argument("--devices", default="cuda", help="of the Scheduler; '' for none")
    parser.add_argument("--seconds", type=float, default=180.0, help="about so long in all")
    parser.add_argument("--only", default="", help="names of workloads, with commas between them")
    parser.add_argument("--no-causes", action="store_true")
    asked = parser.parse_args()
    threads, only = asked.threads, [n for n in asked.only.split(",") if n]
    pool = multiprocessing.pool.ThreadPool(threads)
    names = ["threads"] + [asked.devices] * bool(asked.devices) + [f"cpu:{threads}"]
    print(
        f"{threads} threads, {os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}, "
        f"{host_memory.available_memory() / 2**30:.0f} GiB available; {asked.gib:g} and "
        f"{asked.small_gib:g} GiB; milliseconds: best, median, times as fast as Dask's threads"
    )
    print(machine())
    print(f"{'':18} | " + " | ".join(f"{n:25}" for n in names))
    with ExitStack() as stack:
        stack.callback(pool.terminate)
        gets: dict[str, Any] = {
            "threads": lambda dsk, keys, **kw: dask.threaded.get(dsk, keys, pool=pool, **kw)
        }
        for name in names[1:]:
            gets[name] = on(stack, name)
        stack.enter_context(config.set({"array.backend": "numpy"}))
        each = 0.5 * asked.seconds / CASES
        for case in chain(swept(asked.gib), called(asked.small_gib), others()):
            if only and case.name not in only:
                continue
            compare(case, gets, each)
            if case.name in CALLED and not asked.no_causes:
                causes(case, gets, threads, CAUSES * asked.seconds)


if __name__ == "__main__":
    main()
