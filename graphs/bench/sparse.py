"""Time conjugate gradients on sparse blocks beside hand-written loops of CuPy.

`python -m graphs.bench sparse [N] [--rounds R] [--devices cuda:0] [--cpu]`. The matrix is that of
Poisson's equation on an N × N grid (4096), in CSR blocks that are on the devices. Values are
checked first, on a small grid against SciPy. Then 100 rounds are run in turns: ours, planned
before, a loop as one writes it with `cupyx`, and one with kernels for its updates. Medians of five
runs are printed, with the ratio to the bar. `--cpu` has SciPy in the place of CuPy. Exits with 1
where the bar is missed.
"""

from __future__ import annotations

import argparse
import sys
import time
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import dask
import dask.array as da
import numpy as np
import scipy.sparse  # type: ignore[import-untyped]

import gpuscheduler

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
_example = import_module("conjugate_gradients")
Poisson, conjugate_gradients = _example.Poisson, _example.conjugate_gradients

#: Ours may take so many times as long as the loop as one writes it.
BAR = 1.2
RUNS = 5
#: Rounds of one call of an Iteration.
PER_CALL = 25


def loop(a: Any, b: Any, rounds: int) -> tuple[Any, Any]:
    """Conjugate gradients as one writes them with NumPy or CuPy."""
    x, r, p = b * 0, b.copy(), b.copy()
    rr = r @ r
    for _ in range(rounds):
        q = a @ p
        alpha = rr / (p @ q)
        x += alpha * p
        r -= alpha * q
        before, rr = rr, r @ r
        p = r + (rr / before) * p
    return x, rr**0.5


def loop_of_kernels(cupy: Any, a: Any, b: Any, rounds: int) -> tuple[Any, Any]:
    """The same with one kernel for each update, on CuPy."""
    update = cupy.ElementwiseKernel(
        "float64 p, float64 q, raw float64 rr, raw float64 pq", "float64 x, float64 r",
        "double alpha = rr[0] / pq[0]; x += alpha * p; r -= alpha * q", "cg_update",
    )  # fmt: skip
    turn = cupy.ElementwiseKernel(
        "float64 r, raw float64 rr, raw float64 before", "float64 p",
        "p = r + rr[0] / before[0] * p", "cg_turn",
    )  # fmt: skip
    x, r, p = b * 0, b.copy(), b.copy()
    rr = (r @ r).reshape(1)
    for _ in range(rounds):
        q = a @ p
        update(p, q, rr, (p @ q).reshape(1), x, r)
        before, rr = rr, (r @ r).reshape(1)
        turn(r, rr, before, p)
    return x, rr[0] ** 0.5


def check(devices: str, module: Any, backend: str) -> None:
    """Compare with SciPy's matrix and a loop of NumPy's, on a small grid."""
    n, rounds = 48, 40
    whole = Poisson(n, 1).parts[0].compute(scheduler="sync").matrix
    expected, left = loop(scipy.sparse.csr_array(whole), np.ones(n * n), rounds)
    for blocks in (1, 3):
        with gpuscheduler.Scheduler(devices):
            a = Poisson(n, blocks, module)
            a.persist()
            b = da.ones(n * n, chunks=a.chunks).to_backend(backend).persist()
            x, norm = dask.compute(*conjugate_gradients(a, b, rounds))
        x = x.get() if hasattr(x, "get") else x
        np.testing.assert_allclose(x, expected, rtol=1e-8, atol=1e-10)
        np.testing.assert_allclose(float(norm), float(left), rtol=1e-5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("n", type=int, nargs="?", default=0)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--devices", default="")
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    n = options.n or (256 if options.cpu else 4096)
    devices = options.devices or ("cpu:1" if options.cpu else "cuda:0")
    xp: Any = np
    module, backend = scipy.sparse, "numpy"
    if not options.cpu:
        xp, backend = import_module("cupy"), "cupy"
        module = import_module("cupyx.scipy.sparse")

    def wait(values: Any) -> Any:
        if not options.cpu:
            xp.cuda.Device().synchronize()
        return values

    check(devices, module, backend)
    print(f"values agree with SciPy's; now {options.rounds} rounds on {n} x {n}, {devices}")
    with gpuscheduler.Scheduler(devices) as scheduler:
        a = Poisson(n, len(scheduler.hardware.machine.memory), module)
        a.persist()
        b = da.ones(n * n, chunks=a.chunks).to_backend(backend).persist()
        begin = time.perf_counter()
        lazy = conjugate_gradients(a, b, options.rounds)
        built = time.perf_counter() - begin
        begin = time.perf_counter()
        wait(dask.compute(*lazy))
        first = time.perf_counter() - begin
        whole = (
            a.parts[0].compute() if len(a.parts) == 1 else Poisson(n, 1, module).parts[0].compute()
        )
        ones = xp.ones(n * n)
        begin = time.perf_counter()
        start = _example.first_state(b)
        run_some = gpuscheduler.Iteration(_example.step_of(a), *start, rounds=PER_CALL)
        built_some = time.perf_counter() - begin

        def repeat(calls: int) -> Any:
            state = start
            for _ in range(calls):
                state = run_some(*state)
            return dask.compute(state[0], da.sqrt(state[3]))

        ways = {
            "ours": lambda: dask.compute(*lazy),
            "by Iteration": lambda: repeat(options.rounds // PER_CALL),
            "loop": lambda: loop(whole, ones, options.rounds),
        }
        if not options.cpu:
            ways["loop of kernels"] = lambda: loop_of_kernels(xp, whole, ones, options.rounds)
        ways["products only"] = lambda: [whole @ ones for _ in range(options.rounds)][-1]
        peak: Any = None
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        found: dict[str, Any] = {}
        for run in range(RUNS + 1):
            for name, way in ways.items():
                wait(None)
                begin = time.perf_counter()
                found[name] = wait(way())
                if run:
                    seconds[name].append(time.perf_counter() - begin)
                    if name == "ours" and scheduler.last is not None:
                        peak = scheduler.last.peak
        error = abs(found["ours"][0] - found["loop"][0]).max() / abs(found["loop"][0]).max()
        print(f"largest difference of the solutions: {float(error):.1e}")
    assert float(error) < 1e-6
    times = {name: median(values) for name, values in seconds.items()}
    for name, value in times.items():
        print(f"{name:16} {1e3 * value:9.1f} ms {1e6 * value / options.rounds:9.1f} us a round")
    print(f"graph built in {built:.2f} s, first run {first:.2f} s; peak memory {peak}")
    print(f"graph of {PER_CALL} rounds built in {built_some:.2f} s")
    ratio = times["ours"] / times["loop"]
    print(f"ours / loop: {ratio:.2f} (bar {BAR}), ours / loop of kernels: "
          f"{times['ours'] / times.get('loop of kernels', times['loop']):.2f}")  # fmt: skip
    sys.exit(ratio > BAR)


if __name__ == "__main__":
    main()
