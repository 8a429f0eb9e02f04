"""Time usual expressions beside Dask's threads: `python -m graphs.bench usual [MIB]`.

Some four hundred expressions of NumPy's blocks, of dask.array and xarray, are computed by Dask's
threads and by a Scheduler in turns (ABAB), each time as a new collection. Printed is, worst first,
what ours takes beside theirs: the ratio of the best times, the median of the ratios of pairs, and
the ratio of the processors' times, which says something on a machine that others use, too.
Rows above LIMIT are measured once more, and the better ratio counts. Values are compared, too.

On a machine with GPUs: `python -m graphs.bench usual --scheduler cuda --numpy auto --worst 15
--seconds 180 --limit 1.053 --ahead 8`. Programs of xarray come first, the others by lot; those left
when the time is over are counted. The last columns say what part of the bytes GPUs touch, and why.

MIB is the size of a large array; PATTERN is searched for in `group: expression`. Exits with 1 where
a row stays above LIMIT or has other values. xarray, zarr and h5py are used where they are there.
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")  # one device is one thread

import argparse
import csv
import random
import re
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from datetime import date
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import dask
import numpy as np

import gpuscheduler
from gpuscheduler.devices.cpu import cpu_count

from .coverage import Coverage
from .expressions import arrays, expressions

#: Ours may take so many times as long as Dask's threads.
LIMIT = 1.2
#: Pairs of runs of each expression, at least and at most, and the seconds after which it is enough.
FEWEST, MOST, ENOUGH = 3, 15, 0.3
#: Seconds below which times say nothing: what differs by less is not slower.
NOISE = 1e-3
#: Groups whose values are drawn, so that only what is known of the distribution is compared.
DRAWN = ("random",)
#: Columns of the file of rows: those of graphs/results.csv.
COLUMNS = ["date", "machine", "commit", "command", "workload", "gpus", "metric", "value", "note"]


class Row(NamedTuple):
    name: str
    theirs: float  # seconds of the best run
    ours: float
    pairs: float  # median of the ratios of pairs
    cpu: float  # ratio of the processor's time, which others on the machine hardly change
    same: bool  # whether the values are the same
    limit: float = LIMIT
    on_gpus: int = 0  # bytes that GPUs touched in the last run, of those in all
    touched: int = 0
    reason: str = ""  # why it ran where it did

    @property
    def group(self) -> str:
        return self.name.split(":")[0]

    @property
    def ratio(self) -> float:
        return self.ours / self.theirs

    @property
    def is_slow(self) -> bool:
        return self.least > self.limit and self.ours - self.theirs > NOISE

    @property
    def least(self) -> float:
        return min(self.ratio, self.pairs)

    @property
    def where(self) -> str:
        """The part of the bytes that GPUs touched."""
        return f"GPU {self.on_gpus / max(1, self.touched):.0%} of bytes"

    def result(self) -> tuple[str, str, str]:
        """Its metric, value and note for the file of rows."""
        times = f"{self.theirs * 1e3:.2f} and {self.ours * 1e3:.2f} ms; {self.where}"
        return "threads / ours", f"{1 / self.ratio:.2f}", times

    def __str__(self) -> str:
        marks = " SLOW" * self.is_slow + " OTHER VALUES" * (not self.same)
        where = f" | {self.where}: {self.reason[:60]}" if self.reason else ""
        return (
            f"{self.theirs * 1e3:9.1f} {self.ours * 1e3:9.1f} {self.ratio:5.2f} {self.pairs:6.2f} "
            f"{self.cpu:5.2f}  {self.name}{marks}{where}"
        )


# ---- measuring


def computed(make: Callable[[], Any], get: Any) -> tuple[Any, float, float]:
    """The value of a new collection, and the seconds that it takes, and takes of processors.

    Where `make` gives a partial, that computes by itself, as often as it likes.
    """
    with warnings.catch_warnings(), dask.config.set(scheduler=get):
        warnings.simplefilter("ignore")
        made = make()
        begin, cpu = time.perf_counter(), time.process_time()
        value = made() if isinstance(made, partial) else dask.compute(made, scheduler=get)[0]
        return value, time.perf_counter() - begin, time.process_time() - cpu


def same(name: str, theirs: Any, ours: Any) -> bool:
    """Whether two values are alike; of drawn ones whether their types, shapes and means are."""
    if isinstance(theirs, list):
        pairs = zip(theirs, ours, strict=True)
        return len(theirs) == len(ours) and all(same(name, a, b) for a, b in pairs)
    if not isinstance(theirs, np.ndarray | np.generic):
        return type(theirs) is type(ours)
    a, b = np.asarray(theirs), np.asarray(ours)
    if name.split(":")[0] in DRAWN:
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        middle, spread = float(a.mean()), float(a.std()) + 1e-3
        return abs(float(b.mean()) - middle) < 0.1 * spread + 0.01 * abs(middle)
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if np.ma.isMaskedArray(theirs):
        a, b = np.ma.filled(theirs, 0), np.ma.filled(ours, 0)
    if a.dtype.kind in "mM":  # times that are missing are not equal
        a, b = a.view("i8"), b.view("i8")
    if a.dtype.kind not in "fc":
        return bool((a == b).all())
    close = 2e-3 if a.dtype.itemsize // (1 + (a.dtype.kind == "c")) < 8 else 1e-8
    least = close * 1e-2
    if name.startswith("programs:"):  # differences of temperatures in kelvin
        least *= max(1.0, float(np.nanmax(abs(a), initial=0)))
    return bool(np.allclose(a, b, close, least, equal_nan=True))


def measure(
    name: str,
    make: Callable[[], Any],
    gets: tuple[Any, Any],
    coverage: Coverage,
    limit: float = LIMIT,
    end: float = np.inf,
) -> Row:
    """Both schedulers in turns, after one run of each; fewer pairs where the end is over."""
    threads, ours = gets
    expected, found = computed(make, threads)[0], computed(make, ours)[0]
    alike = same(name, expected, found)
    del expected, found
    times: list[tuple[float, ...]] = []
    begin = time.perf_counter()
    while len(times) < FEWEST or (len(times) < MOST and time.perf_counter() - begin < ENOUGH):
        if len(times) >= FEWEST - 1 and time.perf_counter() > end:
            break
        theirs = computed(make, threads)[1:]
        coverage.clear()
        times.append((*theirs, *computed(make, ours)[1:]))
    coverage.add_runs()
    a, a_cpu, b, b_cpu = zip(*times, strict=True)
    pairs = median([y / x for x, y in zip(a, b, strict=True)])
    return Row(
        name, min(a), min(b), pairs, min(b_cpu) / min(a_cpu), alike, limit,
        coverage.on_gpus, coverage.touched, coverage.reason,
    )  # fmt: skip


def quantiles_text(speeds: list[float]) -> str:
    """How many times as fast as Dask's threads rows are, by quantiles."""
    points = (0, 5, 25, 50, 75, 95, 100)
    values = np.percentile(speeds, points)
    return ", ".join(f"{q}%: {v:.2f}x" for q, v in zip(points, values, strict=True))


def print_summary(rows: list[Row], worst: int) -> None:
    """The worst rows, quantiles of all, and the part of the bytes that GPUs touch, by group."""
    print(f"{'threads':>9s} {'ours ms':>9s}  best  pairs   cpu")
    print(*rows[:worst], sep="\n")
    print(f"times as fast as threads: {quantiles_text([1 / r.ratio for r in rows])}")
    groups = dict.fromkeys(sorted({r.group for r in rows}))
    for group in (*groups, ""):
        some = [r for r in rows if group in ("", r.group)]
        on_gpus, touched = sum(r.on_gpus for r in some), sum(r.touched for r in some)
        used, slow = sum(r.on_gpus > 0 for r in some), sum(r.is_slow for r in some)
        print(
            f"{group or 'all':12} {len(some):4} rows, {slow:3} slow, median "
            f"{median([1 / r.ratio for r in some]):5.2f}x; GPUs touch "
            f"{on_gpus / max(1, touched):4.0%} of {touched / 2**30:7.2f} GiB, in {used} rows"
        )


def compile_ahead(
    todo: list[tuple[str, Callable[[], Any]]], get: Any, threads: int, end: float
) -> None:
    """Compute each expression once, several at a time, as compiling takes most of the first run."""

    def compute(row: tuple[str, Callable[[], Any]]) -> None:
        name, make = row
        if time.perf_counter() > end or name.startswith("files:"):  # these write where others do
            return
        with suppress(Exception):  # the row is to say it
            made = make()
            made() if isinstance(made, partial) else dask.compute(made)

    with dask.config.set(scheduler=get), ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(compute, todo):
            pass


def measure_rows(
    todo: list[tuple[str, Callable[[], Any]]],
    measured: Callable[..., Row],
    end: float,
) -> Iterator[Row]:
    """Each row, worse ones measured twice, until the time `end`; one that fails is one, too."""
    for n, (name, make) in enumerate(todo):
        now = time.perf_counter()
        if now > end:
            return
        mine = now + (end - now) / (len(todo) - n)
        try:
            row = measured(name, make, end=mine)
            if row.is_slow and time.perf_counter() < end:
                row = min(row, measured(name, make, end=mine), key=lambda r: r.least)
        except ImportError as error:
            print(f"without {name}: {error}"[:200])
            continue
        except Exception as error:  # one row must not cost the others their figures
            print(f"{name} FAILED: {error!r}"[:300], flush=True)
            row = Row(name, 1.0, np.inf, np.inf, np.inf, False)
        yield row


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("mib", nargs="?", type=float, default=64, help="size of a large array")
    parser.add_argument("--only", default="", metavar="PATTERN", help="a regular expression")
    parser.add_argument("--scheduler", default="cpu", help="devices, as Scheduler takes them")
    parser.add_argument("--numpy", default="auto", help="as Scheduler takes it")
    parser.add_argument("--limit", type=float, default=LIMIT, help="ours over theirs, at most")
    parser.add_argument("--seconds", type=float, help="about so long in all, in an order by lot")
    parser.add_argument("--ahead", type=int, help="compile so many at once, in half the time")
    parser.add_argument("--worst", type=int, help="print a summary with so many rows")
    parser.add_argument("--csv", help="a file that the rows are written to, as in results.csv")
    parser.add_argument("--commit", default="", help="of the file of rows")
    return parser.parse_args()


def main() -> None:
    options = read_options()
    begin = time.perf_counter()
    end = begin + (np.inf if options.seconds is None else options.seconds)
    rows: list[Row] = []
    warnings.simplefilter("ignore")
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        made = gpuscheduler.Scheduler(options.scheduler, numpy=options.numpy)
        ours = stack.enter_context(closing(made))
        config = {"num_workers": cpu_count(), "array.backend": "numpy"}
        stack.enter_context(dask.config.set(config))
        coverage = stack.enter_context(Coverage())
        hardware = ours.hardware
        names = hardware.names if hardware.kind == "cuda" else []
        writer = None
        if options.csv:
            file = stack.enter_context(open(options.csv, "w", newline=""))
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(COLUMNS)
        machine = ", ".join([*names, f"{cpu_count()} cores"])
        command = " ".join(["python -m graphs.bench usual", *sys.argv[1:]])
        facts = [date.today(), machine, options.commit, command]
        found = expressions(arrays(options.mib), folder)
        todo = [(name, make) for name, make in found if re.search(options.only, name)]
        if options.seconds is not None:
            random.Random(0).shuffle(todo)
            todo.sort(key=lambda row: not row[0].startswith("programs:"))
        if options.ahead:
            compile_ahead(todo, ours.get, options.ahead, begin + (end - begin) / 2)
            print(f"compiled in {time.perf_counter() - begin:.0f} s", flush=True)
        measured = partial(
            measure, gets=("threads", ours.get), coverage=coverage, limit=options.limit
        )
        for row in measure_rows(todo, measured, end):
            rows.append(row)
            if options.worst is None:
                print(row, file=sys.stderr, flush=True)
            if writer is not None:
                writer.writerow([*facts, row.name, len(names), *row.result()])
                file.flush()
    rows.sort(key=lambda r: -r.least)
    if rows:
        print_summary(rows, len(rows) if options.worst is None else options.worst)
    slow, other = [r for r in rows if r.is_slow], [r for r in rows if not r.same]
    print(
        f"{len(rows)} of {len(todo)} expressions, {len(slow)} above {options.limit}, "
        f"{len(other)} with other values, {time.perf_counter() - begin:.0f} s"
    )
    if other:
        print("other values:", *[r.name for r in other], sep="\n  ")
    if slow or other:
        sys.exit(1)


if __name__ == "__main__":
    main()
