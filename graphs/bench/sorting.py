"""Time sorts and what is like them on one GPU: `python -m graphs.bench sorting`.

Options: `[ROWS] [--only NAME]`.

Each row checks values first, at a smaller size, against CuPy. Then it prints milliseconds of ours
(16 blocks that are on the device, the best of five after one more), of one call of CuPy on one
array, and the bar of the design. The same functions of JAX follow, where that is installed: last,
for it keeps the memory that it has taken. ROWS is the number of elements of the large arrays, 1e9
by default. No workload. Takes about a minute.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import cupy
import dask
import dask.array as da
import numpy as np

import gpuscheduler
from gpuscheduler import array

from .timing import best, free_memory

BLOCKS = 16
CHECKED = 10**6


def made(n: int, dtype: str, distinct: int | None = None) -> Any:
    """Random numbers on the device: of all magnitudes, or of so many distinct values."""
    rng = (np if n <= CHECKED else cupy).random.default_rng(1)
    if distinct:
        return cupy.asarray(rng.integers(0, distinct, n).astype(dtype))
    return cupy.asarray(rng.standard_normal(n, dtype=np.dtype(dtype).type))


def blocked(x: Any) -> Any:
    """The same elements as a dask array of blocks on the device."""
    size = -(-len(x) // BLOCKS)
    parts = [x[i : i + size].copy() for i in range(0, len(x), size)]
    name = f"given-{time.perf_counter_ns()}"
    blocks = {(name, i): p for i, p in enumerate(parts)}
    lengths = tuple(len(p) for p in parts)
    return da.Array(blocks, name, (lengths,), meta=x[:0]).persist()


def same(a: Any, b: Any) -> bool:
    pairs = zip(a, b, strict=True)
    return all(bool(cupy.allclose(cupy.asarray(u), cupy.asarray(v), 1e-12, 0)) for u, v in pairs)


def listed(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def percentiles(x: Any) -> Any:
    return array.percentile(x, [5, 50, 95])


def lines(x: Any) -> Any:
    return array.sort(x.reshape(-1, 1000), axis=1).ravel()


def counted(x: Any) -> Any:
    return array.unique(x, return_counts=True)


def integers(n: int) -> Any:
    """A tenth as many distinct values as elements, about."""
    return made(n, "i4", n // 10)


def rows(
    n: int,
) -> list[tuple[str, Any, Callable[[Any], Any], Callable[[Any], Any], str | None, float]]:
    """Name, how to make the input, ours, CuPy's, JAX's function, and the bar in milliseconds."""
    return [
        (f"sort {n:.0e} f4", lambda k: made(k or n, "f4"), array.sort, cupy.sort, "sort", 30),
        (f"sort {n:.0e} f8", lambda k: made(k or n, "f8"), array.sort, cupy.sort, "sort", 74),
        (f"argsort {n:.0e} f4", lambda k: made(k or n, "f4"), array.argsort, cupy.argsort,
         "argsort", 55),
        (f"sort lines of 1000, {n / 10:.0e} f4", lambda k: made(k or n // 10, "f4"), lines,
         lambda x: cupy.sort(x.reshape(-1, 1000), axis=1).ravel(), None, 30),
        (f"median {n / 10:.0e} f4", lambda k: made(k or n // 10, "f4"), array.median, cupy.median,
         "median", 8),
        (f"percentile of 3 {n / 10:.0e} f8", lambda k: made(k or n // 10, "f8"), percentiles,
         lambda x: cupy.percentile(x, cupy.asarray([5, 50, 95])), None, 16),
        (f"unique, counts {n / 10:.0e} i4", lambda k: integers(k or n // 10), counted,
         lambda x: cupy.unique(x, return_counts=True), None, 15),
    ]  # fmt: skip


def time_jax(n: int) -> None:
    """Print milliseconds of the functions of JAX, if it is installed."""
    try:
        import jax
        import jax.numpy as jnp
    except ImportError:
        print("JAX is not installed")
        return
    jax.config.update("jax_enable_x64", True)
    for name, make, _, _, function, _ in rows(n):
        if not function:
            continue
        try:
            f, x = jax.jit(getattr(jnp, function)), jax.dlpack.from_dlpack(make(0))
            print(f"JAX {name}: {1e3 * best(partial(_waited, f, x)):.1f} ms", flush=True)
        except Exception as error:
            print(f"JAX {name}: {type(error).__name__}: {str(error)[:70]}", flush=True)


def _waited(f: Any, x: Any) -> Any:
    return f(x).block_until_ready()


def measure(row: Any, scale: float) -> bool:
    """Check one row, time it and print it; whether its values are right and its bar is met."""
    name, make, ours, cupys, _, bar = row
    small = make(CHECKED)
    got = [v.compute() for v in listed(ours(blocked(small)))]
    if not same(got, listed(cupys(small))):
        print(f"| {name} | WRONG VALUES |", flush=True)
        return False
    x = make(0)
    with_blocks = blocked(x)
    mine = 1e3 * best(lambda: dask.persist(*listed(ours(with_blocks))))
    with_blocks = None
    free_memory()
    peer = 1e3 * best(lambda: cupys(x))
    free_memory()
    met = mine <= bar * scale
    cells = [name, f"{mine:.1f}", f"{peer:.1f}", f"{mine / peer:.2f}", f"{bar * scale:.0f}"]
    print("|", " | ".join([*cells, "yes" if met else "NO"]), "|", flush=True)
    return met


def main(arguments: list[str] | None = None) -> int:
    """Print the table; 1 where a value is wrong or a bar is not met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="?", type=float, default=1e9)
    parser.add_argument("--only", default="")
    said = parser.parse_args(arguments)
    print("| workload | ours ms | CuPy ms | ratio | bar | met |")
    print("|---|---|---|---|---|---|")
    met = []
    for row in rows(int(said.rows)):
        if said.only in row[0]:
            with gpuscheduler.Scheduler("cuda:0"):
                met.append(measure(row, said.rows / 1e9))
            free_memory()
    if said.rows > CHECKED:
        time_jax(int(said.rows))
    return int(not all(met))


if __name__ == "__main__":
    sys.exit(main())
