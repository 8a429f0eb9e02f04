"""Time collections that are built anew beside building alone and the same collection again.

`python -m graphs.bench anew [--devices cuda:0] [--blocks 8,1000,10000] [--side 8] [--rounds 5]
[--only NAME,...] [--cpu-time] [--new-data]`

Each workload is built as Dask builds it and computed, in three ways that take turns: `build` builds
it and drops it, `again` computes what was built before, `anew` builds one more and computes it.
Inputs that a workload takes are persisted before, in blocks of `side` rows. Values are checked
first: against the reference of the workload, and anew against again. Printed are the least of the
rounds in milliseconds, and anew over the sum of build and again. `--cpu-time` counts the processor
time of the process, for shared machines. With `--new-data`, each anew persists inputs of its own
first, which is not timed. Exits with 1 where a ratio is above the bar.
"""

from __future__ import annotations

import argparse
import importlib
import math
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import dask
import dask.array as da
import numpy as np

import gpuscheduler

#: Anew may take so many times as long as building and computing again.
BAR = 1.25
#: Bytes of a result above which it is persisted instead of computed.
LARGE = 2**20
#: Tolerances of values beside their references.
RTOL, ATOL = 1e-4, 1e-3


@dataclass(eq=False, repr=False)
class Case:
    """A workload for about some number of blocks."""

    name: str
    #: Makes the inputs, as lazy arrays and numbers.
    inputs: Callable[[], tuple[Any, ...]]
    #: Builds the collection from persisted inputs.
    apply: Callable[..., Any]
    #: What the result is, in NumPy; None where there is no short way to it.
    reference: Callable[[], Any] | None
    #: Whether two collections have the same values: random numbers are other ones each time.
    same: bool = True


def workloads(blocks: int, side: int, xp: str) -> Iterator[Case]:
    """The workloads of `graphs/` and meshes, with about so many blocks each."""
    k, cube = math.isqrt(blocks - 1) + 1, max(1, round(blocks ** (1 / 3)))
    sizes: dict[str, tuple[Any, Any]] = {
        "gauss_sum": ((blocks * side, 8), side),
        "standardize": ((blocks * side, 8), side),
        "black_scholes": (blocks * side * side, side * side),
        "logistic_step": ((blocks * side, 8), side),
        "heat_stencil": ((k * side, 2), side),
        "hillshade": ((k * side, k * side), side),
        "transpose_sum": (k * side, side),
        "matmul": (cube * side, side),
        "tall_skinny_svd": ((blocks * max(side, 16), 8), max(side, 16)),
    }
    for name, (size, chunks) in sizes.items():
        graph = importlib.import_module(f"graphs.{name}")
        inputs = partial(graph.inputs, size, chunks, xp)
        yield Case(name, inputs, graph.apply, partial(graph.reference, size))
    n = k * side
    field = importlib.import_module("graphs.haversine_mesh")
    yield Case("haversine_mesh", tuple, partial(field.build_sum, n, side, xp),
               lambda: field.reference(n).sum())  # fmt: skip
    yield Case("mesh() alone", tuple, partial(field.build, n, side, xp), None)
    random = importlib.import_module("graphs.random_slice_sum")
    yield Case("random_slice_sum", tuple, partial(random.build, n, side, xp), None, same=False)
    gauss = importlib.import_module("graphs.gauss_sum")
    rows = partial(gauss.inputs, (blocks * side, 8), side, xp)
    yield Case("mean of columns", rows, lambda x: x.mean(axis=0), None)
    yield Case("x + 1", rows, lambda x: x + 1, None)
    yield Case("persist of slices", rows, lambda x: x[::2] * 2, None)
    yield from _expression_arrays(blocks, side, xp)


def _expression_arrays(blocks: int, side: int, xp: str) -> Iterator[Case]:
    """Arrays of the package dask-array, where it is installed."""
    try:
        library = importlib.import_module("dask_array")
    except ImportError:
        return
    numbers = importlib.import_module(xp).ones((blocks * side, 8))

    def rows() -> tuple[Any]:
        return (library.from_array(numbers, chunks=(side, 8)),)

    yield Case("dask_array: gauss_sum", rows,
               lambda x: library.exp(-0.5 * ((x - 0.1) / 2) ** 2).sum(), None)  # fmt: skip
    yield Case("dask_array: mean", rows, lambda x: (x + 1).mean(axis=0), None)


def as_numpy(value: Any) -> Any:
    """A value of the host, of NumPy or of CuPy."""
    if isinstance(value, tuple):
        return tuple(map(as_numpy, value))
    return value.get() if hasattr(value, "get") else np.asarray(value)


def is_large(collection: Any) -> bool:
    """Whether the result should stay in its chunks."""
    return bool(getattr(collection, "nbytes", 0) >= LARGE)


def run(collection: Any) -> Any:
    """Compute a collection or several; persist a large one."""
    if isinstance(collection, tuple):
        return dask.compute(*collection)
    return collection.persist() if is_large(collection) else collection.compute()


def _persisted(arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple([a.persist() if isinstance(a, da.Array) else a for a in arrays])


def synchronize(kind: str) -> None:
    """Wait for GPUs, where these are the devices."""
    if kind == "cuda":
        from .timing import synchronize as wait_for_gpus

        wait_for_gpus()


def check(case: Case, first: Any, second: Any) -> None:
    """Compare values of two collections, and with the reference where there is one."""
    a, b = as_numpy(first), as_numpy(second)
    if case.same:
        np.testing.assert_allclose(b, a, rtol=1e-6, err_msg=case.name)
    if case.reference is not None:
        expected = case.reference()
        np.testing.assert_allclose(a, expected, RTOL, ATOL, err_msg=case.name)


def _build_and_drop(case: Case, given: tuple[Any, ...]) -> None:
    case.apply(*given)


def _build_and_run(case: Case, given: tuple[Any, ...]) -> Any:
    return run(case.apply(*given))


def measure(
    case: Case, rounds: int, clock: Callable[[], float], new_data: bool, kind: str
) -> list[float]:
    """Seconds of build, again and anew: the least of the rounds."""
    arrays = _persisted(case.inputs())
    kept = case.apply(*arrays)
    value, other = run(kept), run(case.apply(*arrays))
    if not isinstance(kept, tuple) and is_large(kept):
        value, other = value.compute(), other.compute()
    check(case, value, other)
    del value, other
    run(kept)
    least = [math.inf] * 3

    def note(n: int, work: Callable[[], Any]) -> None:
        synchronize(kind)
        begin = clock()
        out = work()
        synchronize(kind)
        least[n] = min(least[n], clock() - begin)
        del out

    for _ in range(rounds):
        note(0, partial(_build_and_drop, case, arrays))
        note(1, lambda: run(kept))
        given = _persisted(case.inputs()) if new_data else arrays
        note(2, partial(_build_and_run, case, given))
    return least


def main() -> int:
    """Print a row for each workload and number of blocks."""
    parser = argparse.ArgumentParser(prog="python -m graphs.bench anew", description=__doc__)
    parser.add_argument("--devices", default="auto")
    parser.add_argument("--blocks", default="8,1000,10000")
    parser.add_argument("--side", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="")
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--new-data", action="store_true")
    args = parser.parse_args()
    clock = time.process_time if args.cpu_time else time.perf_counter
    warnings.simplefilter("ignore", da.PerformanceWarning)  # of matrices in many blocks
    worst = 0.0
    print(f"{'workload':24s} {'blocks':>6s} {'build':>8s} {'again':>8s} {'anew':>8s} ratio")
    for blocks in map(int, args.blocks.split(",")):
        with gpuscheduler.Scheduler(devices=args.devices) as scheduler:
            kind = scheduler.hardware.kind
            xp = "cupy" if kind == "cuda" else "numpy"
            for case in workloads(blocks, args.side, xp):
                if args.only and case.name not in args.only.split(","):
                    continue
                try:
                    build, again, anew = measure(case, args.rounds, clock, args.new_data, kind)
                except NotImplementedError as error:
                    print(f"{case.name:24s} {blocks:6d} not possible: {error}")
                    continue
                ratio = anew / (build + again)
                worst = max(worst, ratio)
                print(
                    f"{case.name:24s} {blocks:6d} {build * 1e3:8.2f} {again * 1e3:8.2f} "
                    f"{anew * 1e3:8.2f} {ratio:5.2f}",
                    flush=True,
                )
    return int(worst > BAR)
