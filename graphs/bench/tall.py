"""Time QR and SVD of tall matrices, and products of small integers, beside CuPy by hand.

`python -m graphs.bench tall [ROWS COLUMNS] [--cpu] [--only NAME]`. On a GPU (1000000 x 1000 of
float64, 100 and 16 blocks on the device): `linalg.qr` at conditions 10 and 1e10, `linalg.svd`,
Dask's own `svd` with and without our block function, and uint8 1000000 x 20000 @ 20 columns. Beside
them: CholeskyQR by hand in CuPy, CuPy's one call, and JAX's where it is installed. With `--cpu`
(200000 x 100): beside Dask's threads. Values are checked first: orthogonality and residual, in
parts of n·√n·u. Exits with 1 where a bar is missed. About 60 s on one H200.
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
from gpuscheduler.codegen.cuda import skinny as cuda_text
from gpuscheduler.plan.skinny import multiply_skinny

from .turns import Function, in_turns, seconds

#: Milliseconds on one H200, for 1000000 x 1000 and for uint8 1000000 x 20000 @ 20.
BARS = {"qr, condition 10": 180, "qr, condition 1e10": 270, "Dask's svd": 350, "skinny": 25}
#: Ours is to be so many times as fast as Dask's threads, on CPU devices.
CPU_BAR = 1.5
RUNS = 3


def mixed(n: int, condition: float, xp: Any) -> Any:
    """A matrix of n x n with this condition, to be multiplied from the left."""
    rng = np.random.default_rng(1)
    v, _ = np.linalg.qr(rng.standard_normal((n, n)))
    return xp.asarray(np.logspace(0, -np.log10(condition), n)[:, None] * v)


def in_blocks(xp: Any, m: int, n: int, blocks: int, condition: float) -> Any:
    """A persisted dask array of m x n with about this condition."""
    rng = xp.random.default_rng(0) if xp is np else xp.random.Generator(xp.random.XORWOW(0))
    end = mixed(n, condition, xp)
    rows = -(-m // blocks)
    parts = [
        da.from_array(
            rng.standard_normal((min(rows, m - i), n)) @ end, chunks=(-1, -1), asarray=False
        )
        for i in range(0, m, rows)
    ]
    return da.concatenate(parts).persist()


def check(what: str, x: Any, q: Any, r: Any) -> None:
    """Orthogonality and residual of persisted arrays, in parts of n·√n·u."""
    n = x.shape[1]
    unit = n**1.5 * 2.0**-53
    gram, miss, size = dask.compute(q.T @ q, abs(x - q @ r).max(), abs(x).max())
    gram = gram if isinstance(gram, np.ndarray) else gram.get()
    off = float(abs(gram - np.eye(n)).max())
    miss = float(miss) / float(size)
    print(f"{what}: orthogonality {off / unit:.1e}, residual {miss / unit:.1e} of n·√n·u")
    assert off <= 30 * unit, f"{what} is not orthogonal"
    assert miss <= 30 * unit, f"{what} is not the matrix"


def show(name: str, times: dict[str, float], bar: float | None, least: float | None = None) -> bool:
    ours = times.pop("ours")
    others = "  ".join(f"{k} {v * 1e3:8.1f} ms ({v / ours:5.2f} x)" for k, v in times.items())
    met = bar is None or ours * 1e3 <= bar
    if least is not None:
        met = all(v / ours >= least for k, v in times.items() if k == "dask")
    said = "" if bar is None and least is None else f"  bar {bar or least}: "
    said += ("met" if met else "MISSED") if said else ""
    print(f"{name:32} ours {ours * 1e3:8.1f} ms  {others}{said}", flush=True)
    return met


def by_hand(x: Any, steps: int) -> Any:
    """CholeskyQR in CuPy on one array, so many times; no test, no shift."""
    import cupy
    from cupyx.scipy.linalg import solve_triangular

    r: Any = None
    eye = cupy.eye(x.shape[1])
    for _ in range(steps):
        gram = x.T @ x
        if steps > 2 and r is None:
            gram += 1e-12 * cupy.trace(gram) * eye
        upper = cupy.linalg.cholesky(gram).T
        x = x @ solve_triangular(upper, eye)
        r = upper if r is None else upper @ r
    return x, r


def jax_function(name: str, x: Any) -> dict[str, Function]:
    try:
        import jax
        import jax.numpy as jnp

        given = jax.dlpack.from_dlpack(x)
        options = {"full_matrices": False} if name == "svd" else {}
        made = jax.jit(partial(getattr(jnp.linalg, name), **options))
    except Exception as error:  # not installed, another CUDA, no room
        print(f"JAX has no column for {name}: {str(error)[:120]}")
        return {}
    return {"jax": lambda: jax.block_until_ready(made(given))}


def on_gpu(m: int, n: int, only: str) -> bool:
    import cupy

    def wait() -> None:
        cupy.cuda.runtime.deviceSynchronize()

    def drop() -> None:
        cupy.get_default_memory_pool().free_all_blocks()

    full, met = (m, n) == (1_000_000, 1000), True

    def bar(name: str) -> float | None:
        return BARS[name] if full else None

    with gpuscheduler.Scheduler("cuda:0"):
        for name, condition, steps in (("condition 10", 10, 2), ("condition 1e10", 1e10, 3)):
            if only not in "qr, " + name:
                continue
            for blocks in (16, 100):
                x = in_blocks(cupy, m, n, blocks, condition)
                lazy = linalg.qr(x)
                check(f"linalg.qr, {name}, {blocks} blocks", x, *dask.persist(*lazy))
                functions: dict[str, Function] = {"ours": partial(dask.persist, *lazy)}
                if blocks == 16:
                    whole = x.compute()
                    functions["by hand"] = partial(by_hand, whole, steps)
                    if condition == 10:
                        functions["cupy"] = partial(cupy.linalg.qr, whole)
                        functions |= jax_function("qr", whole)
                    del whole
                times = in_turns(functions, wait, RUNS)
                met &= show(f"qr, {name}, {blocks} blocks", times, bar(f"qr, {name}"))
                del x, lazy, functions
                drop()
    if only in "svd":
        x = in_blocks(cupy, m, n, 100, 10)
        lazy = da.linalg.svd(x)
        functions = {}
        with gpuscheduler.Scheduler("cuda:0"):
            u, s, vh = dask.persist(*lazy)
            check("Dask's svd", x, u, s[:, None] * vh)
            del u, s, vh
            times = in_turns({"ours": partial(dask.persist, *lazy)}, wait, RUNS)
            ours = in_turns({"ours": partial(dask.persist, *linalg.svd(x))}, wait, RUNS)
            times["linalg.svd"] = ours["ours"]
        with gpuscheduler.Scheduler("cuda:0", tall_qr="householder"):
            times["householder"] = seconds(partial(dask.persist, *lazy), wait)
        met &= show("Dask's svd, 100 blocks", times, bar("Dask's svd"))
        del x, lazy
        drop()
        with gpuscheduler.Scheduler("cuda:0"):
            x = in_blocks(cupy, m // 10, n, 10, 10)
            functions = {"ours": partial(dask.persist, *linalg.svd(x))}
            functions |= jax_function("svd", x.compute())
            show(f"linalg.svd of {m // 10} rows", in_turns(functions, wait, RUNS), None)
            del x, functions
            drop()
    if only in "skinny":
        met &= skinny(cupy, m, 20 * n, 20, wait, bar("skinny"))
    return met


def skinny(cupy: Any, m: int, n: int, k: int, wait: Any, bar: float | None) -> bool:
    """uint8 m x n @ n x k and its transpose, in 16 blocks of rows."""
    rng = cupy.random.Generator(cupy.random.XORWOW(0))
    rows = m // 16
    noise = cupy.arange(rows * n, dtype=np.uint32) * np.uint32(2654435761) >> np.uint32(24)
    parts = [noise.astype(np.uint8).reshape(rows, n) + np.uint8(i) for i in range(16)]
    del noise
    x = da.concatenate([da.from_array(p, chunks=(-1, -1), asarray=False) for p in parts]).persist()
    w = da.from_array(rng.standard_normal((n, k)), chunks=-1, asarray=False).persist()
    y = da.from_array(rng.standard_normal((len(x), k)), chunks=(rows, -1), asarray=False).persist()
    met = True
    with gpuscheduler.Scheduler("cuda:0"):
        for name, lazy in (("x @ w", x @ w), ("x.T @ y", x.T @ y)):
            few = slice(0, min(200, rows, n))
            got = dask.compute(lazy[few])[0]
            if name == "x @ w":
                want = parts[0][few].astype("f8") @ w.compute()
            else:
                want = sum(
                    p[:, few].T.astype("f8") @ y[i * rows : (i + 1) * rows].compute()
                    for i, p in enumerate(parts)
                )
            miss = float(abs(got - want).max() / abs(want).max())
            assert miss < 1e-12, f"{name} is wrong: {miss}"
            times = in_turns({"ours": partial(dask.persist, lazy)}, wait, RUNS)
            whole = w.compute()
            if name == "x @ w":
                hand = partial(lambda v: [p.astype("f8") @ v for p in parts], whole)
                times["converted"] = in_turns({"ours": hand}, wait, RUNS)["ours"]
            met &= show(f"uint8 {name}, {k} columns", times, bar if name == "x @ w" else None)
    w, y = w.compute(), y.blocks[0].compute()
    for depth in (1, 2, 4):  # which instruction of the tensor cores is the fastest
        before = cuda_text.DEPTHS
        cuda_text.DEPTHS = dict.fromkeys(before, depth)
        for name, left, right in (("x @ w", parts[0], w), ("x.T @ y", parts[0].T, y)):
            took = in_turns({"ours": partial(multiply_skinny, left, right)}, wait, RUNS)["ours"]
            print(f"  one block of {name}, fragments of depth {depth}: {took * 1e3:.2f} ms")
        cuda_text.DEPTHS = before
    return met


def on_cpu(m: int, n: int, only: str) -> bool:
    met = True
    devices = f"cpu:{os.cpu_count()}"
    for condition in (10.0, 1e10):
        x = in_blocks(np, m, n, 8, condition)
        names = {
            "qr": (linalg.qr(x), da.linalg.qr(x)),
            "svd": (linalg.svd(x), da.linalg.svd(x)),
        }
        for name, (lazy, theirs) in names.items():
            if only not in name:
                continue
            with gpuscheduler.Scheduler(devices):
                if name == "qr":
                    check(f"linalg.qr, condition {condition:g}", x, *dask.persist(*lazy))
                functions: dict[str, Function] = {
                    "ours": partial(dask.persist, *lazy),
                    "dask": partial(dask.persist, *theirs, scheduler="threads"),
                }
                times = in_turns(functions, lambda: None, RUNS)
            met &= show(f"{name}, condition {condition:g}", times, None, CPU_BAR)
    return met


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("rows", type=int, nargs="?")
    parser.add_argument("columns", type=int, nargs="?")
    parser.add_argument("--cpu", action="store_true", help="CPU devices")
    parser.add_argument("--only", default="", help="a part of names: qr, svd, skinny")
    given = parser.parse_args()
    default = (200_000, 100) if given.cpu else (1_000_000, 1000)
    m, n = given.rows or default[0], given.columns or default[1]
    met = (on_cpu if given.cpu else on_gpu)(m, n, given.only)
    sys.exit(not met)


if __name__ == "__main__":
    main()
