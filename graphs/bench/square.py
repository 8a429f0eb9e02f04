"""Time functions of square matrices beside one library call.

`python -m graphs.bench square [N] [--cpu] [--only NAME]`. On a GPU: solve, inv, slogdet and
cholesky of an N x N matrix of float64 (20000), in blocks that are on the device, beside CuPy's one
call and, where it is installed, JAX's. With `--cpu` (2000): beside one call of NumPy's and beside
Dask's threads. Values are checked first, small and large, by LAPACK's residuals. Then each is run
in turns, and the medians are printed with their ratios. Exits with 1 where a bar is missed.
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("JAX_ENABLE_X64", "1")

import argparse
from functools import partial
from typing import Any

import dask
import dask.array as da
import numpy as np

import gpuscheduler
from gpuscheduler import linalg

from .turns import Function, in_turns

#: Ours may take so many times as long as CuPy's one call; Cholesky of 20000: 110 ms.
BARS = {"solve": 1.15, "inv": 1.15, "cholesky": 1.1, "slogdet": 1.15}
#: Ours may take so many times as long as NumPy's one call, on CPU devices.
CPU_BAR = 1.3
RUNS = 5


def residual(name: str, a: Any, x: Any, b: Any, xp: Any) -> float:
    """LAPACK's ratio of a result; 30 is its threshold."""
    n, u = len(a), np.finfo(a.dtype).eps / 2

    def norm(m: Any) -> float:
        return float(abs(m).sum(axis=0).max())

    if name == "solve":
        return norm(b - a @ x) / (norm(a) * norm(x) * u)
    if name == "inv":
        return norm(xp.eye(n) - a @ x) / (norm(a) * norm(x) * u * n)
    if name == "cholesky":
        return norm(a - x @ x.conj().T) / (norm(a) * u * n)
    sign, logarithm = xp.linalg.slogdet(a)
    return float(abs(x[0] - sign) + abs(x[1] - logarithm) / abs(logarithm)) / (u * n)


def lazy_results(a: Any, spd: Any, b: Any, **options: Any) -> dict[str, Any]:
    """Ours, not computed yet, and the matrix that each is of."""
    return {
        "solve": (linalg.solve(a, b, **options), a),
        "inv": (linalg.inv(a, **options), a),
        "slogdet": (linalg.slogdet(a, **options), a),
        "cholesky": (linalg.cholesky(spd, **options), spd),
    }


def matrices(xp: Any, n: int) -> tuple[Any, Any, Any]:
    """A matrix, a positive definite one, and right sides."""
    made = xp.random.PCG64(0) if xp is np else xp.random.XORWOW(0)
    rng = xp.random.Generator(made)
    a = rng.standard_normal((n, n))
    spd = a @ a.T
    spd += xp.eye(n) * n
    return a, spd, rng.standard_normal((n, 1))


def in_blocks(x: Any, chunk: int) -> Any:
    return da.from_array(x, chunks=(chunk, min(chunk, x.shape[1])), asarray=False).persist()


def check(xp: Any, n: int, chunk: int, **options: Any) -> None:
    host = matrices(xp, n)
    a, spd, b = host
    lazy = lazy_results(*[in_blocks(x, chunk) for x in host], **options)
    for name, (array, of) in lazy.items():
        x = dask.compute(array)[0]
        ratio = residual(name, spd if name == "cholesky" else a, x, b, xp)
        assert ratio < 30, f"{name} of {n} is wrong: ratio {ratio}"
        del x, array, of


def show(name: str, n: int, times: dict[str, float], bar: float) -> bool:
    ours = times.pop("ours")
    first = next(iter(times))
    met = ours <= bar * times[first]
    others = "  ".join(f"{k} {v * 1e3:9.2f} ms (ours {ours / v:5.2f} x)" for k, v in times.items())
    print(f"{name:10} {n:6}  ours {ours * 1e3:9.2f} ms  {others}  bar {bar}: "
          f"{'met' if met else 'MISSED'}", flush=True)  # fmt: skip
    return met


def jax_functions(a: Any, spd: Any, b: Any) -> dict[str, Function]:
    try:
        import jax
        import jax.numpy as jnp
    except ImportError:
        print("JAX is not installed: no column for it")
        return {}
    try:
        a, spd, b = (jax.dlpack.from_dlpack(x) for x in (a, spd, b))
    except Exception as error:  # another version of CUDA, no room: the other columns count
        print(f"JAX has no column: {error}")
        return {}
    made = {
        "solve": jax.jit(jnp.linalg.solve), "inv": jax.jit(jnp.linalg.inv),
        "slogdet": jax.jit(jnp.linalg.slogdet), "cholesky": jax.jit(jnp.linalg.cholesky),
    }  # fmt: skip
    given = {"solve": (a, b), "inv": (a,), "slogdet": (a,), "cholesky": (spd,)}

    def run(name: str) -> Any:
        return jax.block_until_ready(made[name](*given[name]))

    return {name: partial(run, name) for name in made}


def on_gpu(n: int, only: str) -> bool:
    import cupy

    def wait() -> None:
        cupy.cuda.runtime.deviceSynchronize()

    for devices in ("cuda:0", "cuda:0,0"):
        with gpuscheduler.Scheduler(devices):
            for options in ({}, {"block_size": 256}):
                check(cupy, 1000, 300, **options)
    print("values are right: one device and two logical ones, one call and block columns")
    met = True
    with gpuscheduler.Scheduler("cuda:0"):
        a, spd, b = matrices(cupy, n)
        lazy = lazy_results(*[in_blocks(x, n // 5) for x in (a, spd, b)])
        jax = jax_functions(a, spd, b)
        theirs: dict[str, Function] = {
            "solve": lambda: cupy.linalg.solve(a, b), "inv": lambda: cupy.linalg.inv(a),
            "slogdet": lambda: cupy.linalg.slogdet(a),
            "cholesky": lambda: cupy.linalg.cholesky(spd),
        }  # fmt: skip
        for name, (array, _) in lazy.items():
            if only not in name:
                continue
            x = dask.compute(array)[0]
            ratio = residual(name, spd if name == "cholesky" else a, x, b, cupy)
            assert ratio < 30, f"{name} of {n} is wrong: ratio {ratio}"
            del x
            functions: dict[str, Function] = {
                "ours": partial(dask.compute, array),
                "cupy": theirs[name],
            }
            if name in jax:
                functions["jax"] = jax[name]
            times = in_turns(functions, wait, RUNS, needed=("ours", "cupy"))
            met &= show(name, n, times, BARS[name])
    return met


def on_cpu(n: int, only: str) -> bool:
    met = True
    a, spd, b = matrices(np, n)
    devices = f"cpu:{os.cpu_count()}"
    chunk = n // 4
    x, s, y = (da.from_array(m, chunks=(chunk, min(chunk, m.shape[1]))) for m in (a, spd, b))
    one: dict[str, Function] = {
        "solve": lambda: np.linalg.solve(a, b), "inv": lambda: np.linalg.inv(a),
        "slogdet": lambda: np.linalg.slogdet(a), "cholesky": lambda: np.linalg.cholesky(spd),
    }  # fmt: skip
    dasks: dict[str, Function] = {
        "solve": lambda: da.linalg.solve(x, y).compute(scheduler="threads"),
        "inv": lambda: da.linalg.inv(x).compute(scheduler="threads"),
        "cholesky": lambda: da.linalg.cholesky(s, lower=True).compute(scheduler="threads"),
    }
    with gpuscheduler.Scheduler(devices):
        for options in ({}, {"block_size": 64}):
            check(np, 300, 90, **options)
        print(f"values are right: one call and block columns; {devices}")
        for name, (array, _) in lazy_results(x, s, y).items():
            if only not in name:
                continue
            functions: dict[str, Function] = {
                "numpy": one[name],
                "ours": partial(dask.compute, array),
            }
            if name in dasks:
                functions["dask"] = dasks[name]
            times = in_turns(functions, lambda: None, RUNS, needed=("ours", "numpy"))
            met &= show(name, n, times, CPU_BAR)
    return met


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("n", type=int, nargs="?", default=0)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--only", default="", help="a part of a name")
    asked = parser.parse_args()
    measure = on_cpu if asked.cpu else on_gpu
    if not measure(asked.n or (2000 if asked.cpu else 20000), asked.only):
        sys.exit(1)
