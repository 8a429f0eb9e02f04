"""What only several GPUs can show, in one call: `python -m graphs.bench several`.

Options: `[--only PART,...] [--out FOLDER] [--repeat 50] [--small]`. Parts, values first:

races     arrays that the caller has just made on one GPU, read by tasks on the others; values that
          lie on another GPU than their task's. Each is computed `--repeat` times. Needs two GPUs.
jax       the table beside JAX on 1, 2, 4 (and 8) GPUs, in turns of processes on the same machine
library   sort, argsort, tall QR, Cholesky and solve on 1, 2, 4 GPUs, values checked
numpy     programs of NumPy's arrays on 1, 2, 4 GPUs beside Dask's threads on all cores
sweep     sweeps over arrays of the host, pinned and pageable, beside the links' rates
cluster   two workers with half of the GPUs each, beside one process; dask-cuda where it is there
page      a report and a timeline of a run on all GPUs, with device times, in FOLDER

A part that fails is printed, and the others run; then the exit code is 1. About eight minutes on
four H200. `--small` takes sizes for the stand-in of the tests.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cupy
import dask
import dask.array as da
import numpy as np

import gpuscheduler
from gpuscheduler import array, linalg

from .sizes import GENERATED, SIZES, SMALL_GENERATED, SMALL_SIZES
from .timing import COUNTS, GPUS, best, devices, free_memory
from .workloads import time_generated, time_workload

JAX_WORKLOADS = (
    "gauss_sum", "standardize", "black_scholes", "heat_stencil", "transpose_sum", "matmul",
)  # fmt: skip
#: Relative difference of one number from JAX's, where both have the same data.
TOLERANCE = 1e-5


class Holder:
    """An object of the user's that has an array."""

    def __init__(self, array: Any):
        self.array = array


def last_of(k: Any, n: int) -> float:
    """The least of the last four elements, and n."""
    return float((k[-4:] + n).min())


#: How a task comes to an array that the caller has.
CAPTURES: dict[str, Callable[[Any, int], Any]] = {
    "in a list": lambda k, n: dask.delayed(lambda v, n: last_of(v[0], n))([k], n),
    "in a dictionary": lambda k, n: dask.delayed(lambda v, n: last_of(v["k"], n))({"k": k}, n),
    "in a partial": lambda k, n: dask.delayed(functools.partial(last_of, k))(n),
    "in an attribute": lambda k, n: dask.delayed(lambda h, n: last_of(h.array, n))(Holder(k), n),
    "in a closure": lambda k, n: dask.delayed(lambda n: last_of(k, n))(n),
    "as an argument": lambda k, n: dask.delayed(last_of)(k, n),
    "in a block function": lambda k, n: da.ones(4, chunks=4).map_blocks(
        lambda b: b * last_of(k, n), dtype="f8"
    )[0],
}


def races(asked: Any) -> None:
    """Values of arrays that are being made on another GPU, and of those that lie there."""
    if GPUS < 2:
        print("races: needs two GPUs")
        return
    length, passes = (16, 3) if asked.small else (1 << 26, 200)  # 512 MiB: takes milliseconds
    wrong_in_all = 0
    with gpuscheduler.Scheduler("cuda"):
        for name, capture in CAPTURES.items():
            wrong = 0
            for turn in range(asked.repeat):
                with cupy.cuda.Device(turn % GPUS):
                    k = cupy.zeros(length)
                    for _ in range(passes):
                        k += 1
                    k *= 1.0 / passes
                    got = dask.compute(*[capture(k, n) for n in range(2 * GPUS)])
                    wrong += not np.allclose([float(v) for v in got], 1 + np.arange(2 * GPUS))
            wrong_in_all += wrong
            print(f"an array of the caller's {name}: {wrong} of {asked.repeat} wrong", flush=True)
    for name, make in programs_on_another_gpu().items():
        wrong = 0
        for turn in range(asked.repeat):
            with cupy.cuda.Device(turn % GPUS), gpuscheduler.Scheduler("cuda"):
                every = make()
                got = dask.compute(*every)
                want = dask.compute(*every, scheduler="sync")
                wrong += not all(
                    np.allclose(cupy.asnumpy(a), cupy.asnumpy(b))
                    for a, b in zip(got, want, strict=True)
                )
        wrong_in_all += wrong
        print(f"{name}: {wrong} of {asked.repeat} wrong", flush=True)
    if wrong_in_all:
        raise AssertionError(f"{wrong_in_all} results are wrong")


def total(values: Any, n: int = 0) -> float:
    """The sum of an array, and n."""
    return float(cupy.asnumpy(values).sum()) + n


def programs_on_another_gpu() -> dict[str, Callable[[], list[Any]]]:
    """Programs in which values lie on another GPU than their task's own."""

    def persisted() -> list[Any]:
        x = (da.from_array(numbers(), chunks=8, asarray=False) + 1).persist()
        return [dask.delayed(total, pure=False)(x)]

    def numbers() -> Any:
        return cupy.arange(256.0).reshape(16, 16)

    def from_array() -> list[Any]:
        x = da.from_array(numbers(), chunks=8, asarray=False).sum()
        return [dask.delayed(total, pure=False)(x, n) for n in range(3)]

    def inlined() -> list[Any]:
        x = da.from_array(numbers(), chunks=(5, 7), asarray=False, inline_array=True)
        return [x + x.T]

    def returned() -> list[Any]:
        table = cupy.arange(8.0)
        x = da.ones(32, chunks=8)
        x = x.map_blocks(lambda b: table[: b.shape[0]], dtype="f8", meta=cupy.empty(0))
        return [x + x[::-1]]

    def selected() -> list[Any]:
        index = cupy.asarray([3, 1, 2])
        x = da.from_array(numbers(), chunks=8, asarray=False)
        return [x.map_blocks(lambda b: b[index], chunks=((3, 3), (8, 8)), dtype="f8")]

    return {
        "delayed functions of a persisted array": persisted,
        "delayed functions of `from_array`": from_array,
        "blocks of an inlined array": inlined,
        "parts of the caller's table as values": returned,
        "an index array of the caller's": selected,
    }


def beside_jax(asked: Any) -> None:
    """The table of the workloads on 1, 2, 4 GPUs, ours and JAX's, and how they scale."""
    sizes = SMALL_SIZES if asked.small else SIZES
    generated = SMALL_GENERATED if asked.small else GENERATED
    peers = jax_times(asked)
    wrong = []
    print("workload             GPUs      ours       JAX   JAX/ours   ours, of one GPU's rate")
    for name in (*JAX_WORKLOADS, *generated):
        rate = 0.0
        for n in COUNTS:
            if name in generated:
                size = generated[name]
                seconds, value = time_generated(name, size, n)
                work = 1.0
            else:
                size = sizes[name](n)
                seconds, value = time_workload(name, size, n)
                work = importlib.import_module(f"graphs.{name}").flops(size)
            rate = rate or work / seconds
            row = peers.get((name, n), {})
            ms = row.get("ms")
            theirs = f"{ms:9.2f} {ms / seconds / 1e3:9.2f}" if ms else f"{'–':>9} {'–':>9}"
            print(f"{name:20s} {n:4d} {seconds * 1e3:9.2f} {theirs}   "
                  f"x{work / seconds / rate:.2f}", flush=True)  # fmt: skip
            if "value" in row and abs(float(value) / row["value"] - 1) > tolerance(name, size):
                wrong.append(f"{name} on {n} GPUs: {float(value)}, by JAX {row['value']}")
            if "error" in row:
                print(f"  JAX: {row['error']}")
            free_memory()
    if wrong:
        raise AssertionError("; ".join(wrong))


def tolerance(name: str, size: Any) -> float:
    """How far one number may be from JAX's, which sums other random numbers: six deviations."""
    return TOLERANCE if name == "haversine_mesh" else 6 / float(np.prod(size)) ** 0.5


def jax_times(asked: Any) -> dict[tuple[str, int], dict[str, Any]]:
    """What the process of JAX prints, by workload and GPUs; empty where JAX is not installed."""
    command = [sys.executable, "-m", "graphs.bench.jax_peers", *map(str, COUNTS)]
    command += ["--small"] * asked.small
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    print("JAX:", rows[0] if rows else "none")
    return {(r["workload"], r["gpus"]): r for r in rows if "workload" in r}


def library(asked: Any) -> None:
    """Functions of the library on 1, 2, 4 GPUs; the same data in all."""
    rows = 1 if asked.small else 1000
    for name, (make, apply, check) in library_rows(rows).items():
        times = []
        for n in COUNTS:
            with gpuscheduler.Scheduler(devices(n)):
                x = make().persist()
                result = apply(x)
                check(x, dask.persist(*result))
                times.append(best(functools.partial(dask.persist, *result), 5))
                del x, result
            free_memory()
        row = "  ".join(f"{n}: {t * 1e3:8.1f} ms (x{times[0] / t:.2f})"
                        for n, t in zip(COUNTS, times, strict=True))  # fmt: skip
        print(f"{name:34s} {row}", flush=True)


def library_rows(k: int) -> dict[str, tuple[Any, Any, Any]]:
    """By name: how to make the input, the function, and what checks its values."""

    def normal(shape: tuple[int, ...], chunks: Any, dtype: str = "f8") -> Any:
        with dask.config.set({"array.backend": "cupy"}):
            rng = da.random.default_rng(1)
            return rng.standard_normal(shape, chunks=chunks, dtype=dtype)

    def is_sorted(x: Any, result: Any) -> None:
        (y,) = result
        assert bool((y[1:] >= y[:-1]).all().compute())
        assert_close(y.sum(dtype="f8"), x.sum(dtype="f8"), 0, 1e-12 * len(x))  # but for rounding

    def orders(x: Any, result: Any) -> None:
        places, values = result[0].compute(), x.compute()
        seen = cupy.zeros(len(values), bool)
        seen[places] = True
        assert bool(seen.all())  # each place once
        ordered = values[places]
        assert bool((ordered[1:] >= ordered[:-1]).all())

    def is_factored(x: Any, result: Any) -> None:
        q, r = result
        unit = x.shape[1] ** 1.5 * 2.0**-53
        gram = q.T @ q - da.eye(x.shape[1], chunks=-1).map_blocks(cupy.asarray)
        assert float(abs(gram).max().compute()) <= 30 * unit
        miss, size = dask.compute(abs(x - q @ r).max(), abs(x).max())
        assert float(miss) / float(size) <= 30 * unit

    def is_cholesky(x: Any, result: Any) -> None:
        (low,) = result
        v = np.linspace(1, 2, x.shape[0])
        v = da.from_array(cupy.asarray(v), chunks=x.chunks[0], asarray=False)
        assert_close(abs(low @ (low.T @ v) - x @ v).max(), 0, 0, float(abs(x @ v).max()) * 1e-12)

    def solves(x: Any, result: Any) -> None:
        (y,) = result
        b = abs(x).sum(axis=1)
        assert_close(abs(x @ y - b).max(), 0, 0, float(b.max()) * 1e-9)

    def positive(n: int) -> Any:
        a = normal((n, n), n // 5)
        return a @ a.T + n * da.eye(n, chunks=n // 5).map_blocks(cupy.asarray)

    many, side = 10**6 * k, 20 * k
    chunks = many // 16
    return {
        f"sort {many:.0e} f4": (
            lambda: normal((many,), chunks, "f4"), lambda x: (array.sort(x),), is_sorted
        ),
        f"argsort {many:.0e} f4": (
            lambda: normal((many,), chunks, "f4"), lambda x: (array.argsort(x),), orders
        ),
        f"qr {1000 * k} x {max(20, k)} f8": (
            lambda: normal((1000 * k, max(20, k)), (1000 * k // 16 + 1, -1)),
            lambda x: tuple(linalg.qr(x)), is_factored,
        ),
        f"cholesky {side}² f8": (
            lambda: positive(side), lambda x: (linalg.cholesky(x),), is_cholesky
        ),
        f"solve {side}² f8": (
            lambda: normal((side, side), side // 5),
            lambda x: (linalg.solve(x, abs(x).sum(axis=1)),), solves,
        ),
    }  # fmt: skip


def assert_close(got: Any, want: Any, relative: float, absolute: float) -> None:
    """Raise AssertionError where two numbers differ by more."""
    a, b = (float(v) for v in dask.compute(got, want))
    assert abs(a - b) <= absolute + relative * abs(b), (a, b)


def run_tool(*words: str) -> int:
    """Run another tool in a process of its own, and show what it prints; its exit code."""
    print("$ python -m graphs.bench", *words, flush=True)
    return subprocess.run([sys.executable, "-m", "graphs.bench", *words], check=False).returncode


def require_success(*codes: int) -> None:
    """Raise RuntimeError where a tool has not ended with 0."""
    if any(codes):
        raise RuntimeError(f"tools have ended with {codes}")


def numpy_programs(asked: Any) -> None:
    """Programs of NumPy's arrays, in processes of their own, which end with 1 for wrong values."""
    size = ["--gib", "0.001", "--small-gib", "0.001"] if asked.small else ["--gib", "8"]
    require_success(
        *[run_tool("numpy_arrays", "--devices", devices(n), "--seconds", "60", *size)
          for n in COUNTS]
    )  # fmt: skip


def sweep(asked: Any) -> None:
    """Copies and sweeps that exceed the memory of the GPUs."""
    if asked.small:
        print("sweep: not at small sizes")
        return
    require_success(run_tool("limits", "sweep"))


def cluster(asked: Any) -> None:
    """Two workers with half of the GPUs each, one process with all, and dask-cuda."""
    matrix = ["--matrix", "256"] if asked.small else []
    ours = run_tool("cluster", "gpus", "--repeat", "1", *matrix)
    run_tool("cluster", "dask-cuda", "--repeat", "1", *matrix)  # a peer, which may not be there
    require_success(ours)


def page(asked: Any) -> None:
    """A report and a timeline of some work of every kind, with device times."""
    folder = Path(asked.out)
    folder.mkdir(parents=True, exist_ok=True)
    n = 256 if asked.small else 32768
    with gpuscheduler.Scheduler("cuda") as s, dask.config.set({"array.backend": "cupy"}):
        x = da.random.default_rng(1).random((n, n), chunks=n // 8, dtype="f4").persist()

        def work() -> None:
            (x + x.T).sum().compute()
            dask.persist(x @ x)

        work()  # what runs first compiles
        with gpuscheduler.report(str(folder / "run.html"), level="device"):
            work()
        with s.record("device") as recording:
            work()
        recording.timeline(str(folder / "run.json"))
    print("written:", *sorted(str(p) for p in folder.iterdir()))


PARTS: dict[str, Callable[[Any], None]] = {
    "races": races, "jax": beside_jax, "library": library, "numpy": numpy_programs,
    "sweep": sweep, "cluster": cluster, "page": page,
}  # fmt: skip


def chosen(only: str) -> Iterator[str]:
    """The parts that are asked for, in their order."""
    names = set(filter(None, only.split(",")))
    if names - set(PARTS):
        sys.exit(f"no such part: {', '.join(sorted(names - set(PARTS)))}; there are {[*PARTS]}")
    yield from (n for n in PARTS if not names or n in names)


def main() -> int:
    """Run the parts; 1 where one has failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", default="")
    parser.add_argument("--out", default=os.environ.get("OUT", "several_gpus"))
    parser.add_argument("--repeat", type=int, default=50)
    parser.add_argument("--small", action="store_true", help="sizes for the stand-in")
    asked = parser.parse_args()
    # of the arrays that lie on another GPU on purpose
    warnings.filterwarnings("ignore", "The device where the array resides")
    failed = []
    print(f"{GPUS} GPUs, {os.cpu_count()} cores")
    for name in chosen(asked.only):
        begin = time.perf_counter()
        print(f"==== {name}", flush=True)
        try:
            PARTS[name](asked)
        except Exception:
            traceback.print_exc()
            failed.append(name)
        free_memory()
        print(f"---- {name}: {time.perf_counter() - begin:.0f} s", flush=True)
    print("failed:", ", ".join(failed) or "nothing")
    return 1 if failed else 0
