"""Measure the engine on the GPUs of this machine: `python graphs/_measure.py [PART ...]`.

Parts: limits, tasks, copies, overlap, host, sweep, quarter, kernels, fusion, graphs, rounds,
generated, meshes, windows. Each prints a short table; what is timed has run once before. Figures in
RESULTS.md come from here. No workload.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from operator import add
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import cupy
import cupyx
import dask
import dask.array as da
import dask.threaded
import numpy as np
from cupyx.scipy import ndimage
from dask._task_spec import Task, TaskRef
from dask.array.reductions import moment_chunk

import gpuscheduler
from gpuscheduler.devices.cuda.kernels import Kernels
from gpuscheduler.devices.cuda.launch import Workspace
from gpuscheduler.fusion.task import KernelTask
from gpuscheduler.pipeline.cache import PlanCache
from gpuscheduler.tracing import abstract, registry, trace
from graphs import _roots

GPUS = cupy.cuda.runtime.getDeviceCount()
COUNTS = [n for n in (1, 2, 4, 8) if n <= GPUS]


def everywhere(f: Callable[[int], Any]) -> list[Any]:
    out = []
    for d in range(GPUS):
        with cupy.cuda.Device(d):
            out.append(f(d))
    return out


def synchronize() -> None:
    everywhere(lambda d: cupy.cuda.runtime.deviceSynchronize())


def best(f: Callable[[], Any], repeat: int = 5) -> float:
    """Seconds of the fastest of `repeat` runs, the devices' work included, after one more run."""
    f()
    synchronize()
    times = []
    for _ in range(repeat):
        begin = time.perf_counter()
        f()
        synchronize()
        times.append(time.perf_counter() - begin)
    return min(times)


def devices(n: int) -> str:
    return "cuda:" + ",".join(map(str, range(n)))


def limits() -> None:
    """What this machine can do: copies in a GPU's own memory, and over each link."""
    nbytes = 2**32
    buffers = everywhere(lambda d: (cupy.ones(nbytes, "u1"), cupy.empty(nbytes, "u1")))

    def copy() -> None:
        for d, (a, b) in enumerate(buffers):
            with cupy.cuda.Device(d):
                cupy.cuda.runtime.memcpyAsync(b.data.ptr, a.data.ptr, nbytes, 3, 0)

    seconds = best(copy)
    print(f"device copy: {2 * nbytes * GPUS / seconds / 1e12:.2f} TB/s over {GPUS} GPUs")
    buffers.clear()
    everywhere(lambda d: cupy.get_default_memory_pool().free_all_blocks())
    with gpuscheduler.Scheduler(devices="cuda") as s:
        links = s.hardware.links()  # type: ignore[attr-defined]
    for row in links.gbs:
        print("peer GB/s:", " ".join(f"{g:6.0f}" for g in row))
    print("host GB/s (to, from):", links.host, "staged:", links.staged)


def tasks(n: int = 100_000) -> None:
    """No-op tasks: microseconds each, planning included."""
    shapes: dict[str, tuple[dict[Any, Any], Any]] = {
        "embarrassing": ({("a", i): Task(("a", i), add, 1, 2) for i in range(n)}, None),
        "chain": (
            {("a", i): Task(("a", i), add, TaskRef(("a", i - 1)) if i else 1, 2) for i in range(n)},
            ("a", n - 1),
        ),
        "tree": (
            {
                ("a", i): Task(("a", i), add, TaskRef(("a", 2 * i + 1)), TaskRef(("a", 2 * i + 2)))
                if 2 * i + 2 < n
                else Task(("a", i), add, 1, 1)
                for i in range(n)
            },
            ("a", 0),
        ),
    }
    for name, (dsk, key) in shapes.items():
        wanted = list(dsk) if key is None else key
        row = []
        for count in COUNTS:
            with gpuscheduler.Scheduler(devices=devices(count)) as s:
                s.get(dsk, wanted)
                begin = time.perf_counter()
                s.get(dsk, wanted)
                row.append((time.perf_counter() - begin) / n * 1e6)
        begin = time.perf_counter()
        dask.threaded.get(dsk, wanted)
        threaded = (time.perf_counter() - begin) / n * 1e6
        figures = " ".join(f"{us:5.1f}" for us in row)
        print(f"tasks {name:13s} us each on {COUNTS} GPUs: {figures}; dask.threaded {threaded:.1f}")


def copies() -> None:
    """Every GPU reads the next one's blocks, through the scheduler: GB/s into each GPU."""
    if GPUS < 2:
        return
    for mib in (1, 4, 16, 64, 256):
        each = max(4, min(256, 8192 // mib))  # blocks per GPU
        rows = each * GPUS

        def owner(key: Any, rows: int = rows) -> int:
            return int(key[1]) * GPUS // rows

        def neighbour(key: Any, rows: int = rows) -> int:
            return (int(key[1]) * GPUS // rows + 1) % GPUS

        with gpuscheduler.Scheduler(devices="cuda"):
            with dask.annotate(device=owner):
                x = da.ones((rows, mib * 2**18), chunks=(1, -1), dtype="f4").persist()
            with dask.annotate(device=neighbour):
                y = x.map_blocks(lambda b: b[:, :1], chunks=(1, 1))
            seconds = best(y.persist)
        gbs = each * mib * 2**20 / seconds / 1e9
        print(f"copies of {mib:3d} MiB: {gbs:5.0f} GB/s into each GPU, {each} each")
        del x, y


def graphs() -> None:
    """The workloads on inputs that are on the GPUs already; sizes grow with the GPUs."""
    cases = {
        "gauss_sum": lambda n: (n * 2**16, 2**15),
        "standardize": lambda n: (n * 2**16, 2**15),
        "black_scholes": lambda n: n * 2**29,
        "black_scholes, fast_math": lambda n: n * 2**29,
        "logistic_step": lambda n: (n * 2**23, 256),
        "heat_stencil": lambda n: (int(32768 * n**0.5) // 64 * 64, 8),
        "transpose_sum": lambda n: 65536 if n > 1 else 32768,
        "matmul": lambda n: 32768,
        "tall_skinny_svd": lambda n: (n * 2**23, 128),
    }
    chunks = {"gauss_sum": 8192, "standardize": 8192, "transpose_sum": 4096}
    for name, size in cases.items():
        module, _, fast = name.partition(", ")
        graph = importlib.import_module(f"graphs.{module}")
        row = []
        for n in COUNTS:
            with gpuscheduler.Scheduler(devices=devices(n), fast_math=bool(fast)):
                arrays = graph.inputs(size(n), chunks.get(name), "cupy")
                arrays = [a.persist() if isinstance(a, da.Array) else a for a in arrays]
                result = graph.apply(*arrays)
                small = result.nbytes < 2**20
                seconds = best(result.compute if small else result.persist, 9)
                moved = graph.bytes_moved(size(n)) / seconds / 1e12
                row.append((seconds, moved))
                del arrays, result
        times = " ".join(f"{s * 1e3:8.2f} ms ({t:5.2f} TB/s)" for s, t in row)
        scaling = row[-1][1] / row[0][1]
        print(f"{name:24s} on {COUNTS} GPUs: {times}  x{scaling:.2f}")


def rounds() -> None:
    """A round of an iteration: new collections, which Dask builds and the scheduler sees for the
    first time; beside the same collection again and again, and beside planning each round anew."""
    known = PlanCache.likeness
    for rows in (2**17, 2**15):  # blocks of 128 and of 32 MiB
        with gpuscheduler.Scheduler(devices="cuda"):
            shape, chunks = (GPUS * 2**23, 256), (rows, 256)
            x = da.random.default_rng(1).random(shape, dtype="f4", chunks=chunks).persist()
            y = da.random.default_rng(2).random(shape[0], dtype="f4", chunks=rows).persist()

            def gradient(w: Any, x: Any = x, y: Any = y) -> Any:
                return (((1 / (1 + da.exp(-(x @ w))) - y)[:, None] * x).sum(axis=0)) / len(x)

            def descend(w: Any, gradient: Any = gradient) -> Any:
                return w - gradient(w).compute()

            def recur(u: Any, x: Any = x) -> Any:
                return (u * np.float32(0.5) + x).persist()

            w = cupy.zeros(256, "f4")
            again = gradient(w).compute, (x * np.float32(0.5) + x).persist
            for name, f, first, same in (
                ("gradient", descend, w, again[0]),
                ("u/2 + x", recur, x, again[1]),
            ):
                bound = best(same)
                row = []
                for likeness in (known, lambda *_: None):
                    PlanCache.likeness = likeness  # type: ignore[method-assign,assignment]
                    seconds, state = [], first
                    for _ in range(8):
                        begin = time.perf_counter()
                        state = f(state)
                        synchronize()
                        seconds.append(time.perf_counter() - begin)
                    row.append(sorted(seconds[2:])[3])
                PlanCache.likeness = known  # type: ignore[method-assign]
                print(f"{name} of {x.npartitions} blocks: {row[0] * 1e3:.1f} ms a round, "
                      f"{bound * 1e3:.1f} the same again, {row[1] * 1e3:.1f} where each round "
                      "is planned")  # fmt: skip
                del state
            del x, y, again, gradient, descend, recur, first, same, f


def generated() -> None:
    """The workloads that make their own data."""
    for name, size in {"haversine_mesh": 100_000, "random_slice_sum": 500_000}.items():
        graph = importlib.import_module(f"graphs.{name}")
        build = getattr(graph, "build_sum", graph.build)
        for n in COUNTS[-1:]:
            with gpuscheduler.Scheduler(devices=devices(n)):
                result = build(size, None, "cupy")
                seconds = best(result.compute, 5)
                print(f"{name} {size}: {seconds * 1e3:.1f} ms on {n} GPUs")


def meshes() -> None:
    """A function at every point: sums of 10**10 distances, the field written, a loop at 10**9."""
    from examples.mandelbrot import CENTRE, escape_time
    from graphs.haversine_mesh import LATITUDES, LONGITUDES, field

    side = 100_000
    expected = None
    for dtype in ("f8", "f4"):
        row = []
        for n in COUNTS:
            with gpuscheduler.Scheduler(devices=devices(n)):
                ends = gpuscheduler.axis(*LATITUDES, side), gpuscheduler.axis(*LONGITUDES, side)
                z = gpuscheduler.mesh(field, ends, dtype=dtype, chunks=side // 8)
                total = z.sum()
                begin = time.perf_counter()
                value = float(total.compute())
                first = time.perf_counter() - begin
                expected = expected or value
                assert abs(value / expected - 1) < 1e-4, (value, expected)
                row.append((best(total.compute), first))
                if n == GPUS and dtype == "f8":
                    written = best(z.persist, 3)
                    share = 8 * side**2 / n / written / 1e12
                    print(f"haversine 10**10 {dtype} written: {written * 1e3:.1f} ms on {n} GPUs, "
                          f"{share:.2f} TB/s on each")  # fmt: skip
        times = " ".join(f"{s * 1e3:.2f} ms (first {f:.2f} s)" for s, f in row)
        print(f"haversine 10**10 {dtype} summed on {COUNTS} GPUs: {times}, "
              f"x{row[0][0] / row[-1][0]:.2f}")  # fmt: skip

    from numba import cuda

    width, most = 31_623, 1000
    y, x, half = CENTRE[1], CENTRE[0], 2 / 2e5
    loop = cuda.jit(device=True)(escape_time)

    @cuda.jit  # type: ignore[untyped-decorator]
    def by_hand(out, y0, dy, x0, dx, most):  # type: ignore[no-untyped-def]
        j, i = cuda.grid(2)  # type: ignore[attr-defined]
        if i < out.shape[0] and j < out.shape[1]:
            out[i, j] = loop(y0 + dy * i, x0 + dx * j, most)

    step = 2 * half / (width - 1)
    out = cupy.empty((width, width))
    grid = (-(-width // 32), -(-width // 8))

    def run() -> None:
        by_hand[grid, (32, 8)](out, y - half, step, x - half, step, most)

    hand = best(run, 3)
    with gpuscheduler.Scheduler(devices="cuda:0"):
        rows, columns = (gpuscheduler.axis(c - half, c + half, width) for c in (y, x))
        z = gpuscheduler.mesh(escape_time, (rows, columns), args=(most,))
        means = float(z.mean().compute()), float(out.mean())  # orbits are chaotic, means are not
        assert abs(means[0] / means[1] - 1) < 1e-3, means
        ours = best(z.persist, 3)
    print(f"Mandelbrot, {width**2:.3g} points, {most} steps at most: {ours * 1e3:.1f} ms, "
          f"@cuda.jit by hand {hand * 1e3:.1f} ms, x{ours / hand:.3f}")  # fmt: skip


def windows() -> None:
    """Reductions over sliding windows of 4 GiB on one GPU, beside the same by JAX, where there is
    one, a copy of 4 GiB, and a filter of CuPy's on the whole array. JAX runs first, in a process of
    its own: it leaves no memory to others."""
    jax = subprocess.run([sys.executable, "-c", JAX_WINDOWS], capture_output=True, text=True)
    peer = dict(line.split(": ") for line in jax.stdout.splitlines())
    if jax.returncode:
        print("without JAX:", jax.stderr.strip().splitlines()[-1][:200])
    side = 2**15
    a, b = cupy.ones((side, side), "f4"), cupy.empty((side, side), "f4")
    print(f"device copy {best(lambda: cupy.copyto(b, a)) * 1e3:.2f} ms")
    del a, b
    cases: dict[str, tuple[tuple[int, ...], tuple[int, ...], str]] = {
        f"{name} {k}x{k}": ((k, k), (0, 1), name)
        for name in ("mean", "max", "std")
        for k in (3, 5, 7, 9, 15)
    }
    cases |= {
        f"{name} {k} {way}": ((k,), (axis,), name)
        for name in ("mean", "max", "std")
        for k in (7, 31)
        for axis, way in enumerate(("down", "along"))
    }
    with gpuscheduler.Scheduler(devices="cuda:0"):
        x = da.random.default_rng(1).random((side, side), dtype="f4", chunks=2**13).persist()
        edge = cupy.asnumpy(x[8100:8300, 8100:8300].compute())
        for title, (lengths, axes, name) in cases.items():
            over = tuple(range(2, 2 + len(axes)))
            slid = da.lib.stride_tricks.sliding_window_view(
                x, lengths, axis=axes, automatic_rechunk=False
            )
            y = getattr(slid, name)(axis=over)
            view = np.lib.stride_tricks.sliding_window_view(edge, lengths, axis=axes)
            want = getattr(view.astype("f8"), name)(axis=over)
            n, m = want.shape
            found = y[8100 : 8100 + n, 8100 : 8100 + m].compute()
            np.testing.assert_allclose(cupy.asnumpy(found), want, rtol=2e-5)
            seconds = best(y.persist, 4)
            print(f"{title:14s} {seconds * 1e3:6.2f} ms; JAX {peer.get(title, '-')}")
            del y, slid
        y = da.median(
            da.lib.stride_tricks.sliding_window_view(x, (3, 3), automatic_rechunk=False),
            axis=(-2, -1),
        )
        print(f"{'median 3x3':14s} {best(y.persist, 4) * 1e3:6.2f} ms")
        del x, y
    cupy.get_default_memory_pool().free_all_blocks()
    a, b = cupy.random.random((side, side), dtype="f4"), cupy.empty((side, side), "f4")
    for title, f in {
        "mean 5x5": lambda: ndimage.uniform_filter(a, 5, output=b),
        "max 5x5": lambda: ndimage.maximum_filter(a, 5, output=b),
        "median 3x3": lambda: ndimage.median_filter(a, 3, output=b),
    }.items():
        print(f"{title:14s} {best(f, 2) * 1e3:6.2f} ms by cupyx.scipy.ndimage")


#: The same windows by `lax.reduce_window`, jitted: a line of milliseconds for each.
JAX_WINDOWS = """
import time, jax, jax.numpy as jnp
from jax import lax
x = jax.random.uniform(jax.random.key(0), (2**15, 2**15), dtype=jnp.float32)
def best(f):
    f(x).block_until_ready()
    times = []
    for _ in range(4):
        begin = time.perf_counter()
        f(x).block_until_ready()
        times.append(time.perf_counter() - begin)
    return min(times) * 1e3
windows = [((k, k), f"{k}x{k}") for k in (3, 5, 7, 9, 15)]
windows += [((k, 1), f"{k} down") for k in (7, 31)] + [((1, k), f"{k} along") for k in (7, 31)]
for size, title in windows:
    count = size[0] * size[1]
    def mean(x): return lax.reduce_window(x, 0.0, lax.add, size, (1, 1), "valid") / count
    def most(x): return lax.reduce_window(x, -jnp.inf, lax.max, size, (1, 1), "valid")
    print(f"mean {title}: {best(jax.jit(mean)):.2f}", flush=True)
    print(f"max {title}: {best(jax.jit(most)):.2f}", flush=True)
"""


def fusion() -> None:
    """Fused kernels beside the bandwidth of a copy, measured in this very run, on every GPU."""
    nbytes = 2**33
    buffers = everywhere(lambda d: (cupy.ones(nbytes // 2, "u1"), cupy.empty(nbytes // 2, "u1")))

    def copy() -> None:
        for d, (a, b) in enumerate(buffers):
            with cupy.cuda.Device(d):
                cupy.cuda.runtime.memcpyAsync(b.data.ptr, a.data.ptr, nbytes // 2, 3, 0)

    limit = GPUS * nbytes / best(copy)
    buffers.clear()
    everywhere(lambda d: cupy.get_default_memory_pool().free_all_blocks())
    print(f"device copy: {limit / 1e12:.2f} TB/s over {GPUS} GPUs; 8 GiB of input on each")

    def gauss(x: Any) -> Any:
        return da.exp(-0.5 * ((x - 0.1) / 2) ** 2)

    cases: dict[str, tuple[Callable[[Any], Any], float]] = {
        "map": (gauss, 2),
        "sum": (lambda x: gauss(x).sum(), 1),
        "column sums": (lambda x: x.sum(axis=0), 1),
        "row sums": (lambda x: x.sum(axis=1), 1),
        "mean and variance": (lambda x: (x.mean(axis=0), x.var(axis=0)), 1),
        "x + x.T": (lambda x: x + x.T, 3) if GPUS == 1 else (lambda x: x + 1, 2),
    }
    for dtype in ("f4", "f8"):
        columns = 2**15
        rows = GPUS * nbytes // columns // np.dtype(dtype).itemsize
        with gpuscheduler.Scheduler(devices="cuda"):
            for name, (f, sweeps) in cases.items():
                shape = (columns, columns) if name == "x + x.T" else (rows, columns)
                x = da.random.default_rng(1).random(shape, dtype=dtype, chunks=2**13).persist()
                result = f(x)
                begin = time.perf_counter()
                dask.persist(result)
                synchronize()
                first = time.perf_counter() - begin
                seconds = best(lambda result=result: dask.persist(result), 4)  # type: ignore[misc]
                rate = sweeps * x.nbytes / seconds
                print(
                    f"{name:18s} {dtype}: {seconds * 1e3:7.2f} ms, {rate / 1e12:6.2f} TB/s, "
                    f"{rate / limit:4.0%} of a copy; the first time {first:.2f} s"
                )
                del x, result


def kernels() -> None:
    """Fused kernels by themselves, blocks of 256 MiB on one GPU, beside the bandwidth of a copy."""
    nbytes = 2**32
    buffers = [cupy.ones(nbytes, "u1"), cupy.empty(nbytes, "u1")]

    def copy() -> None:
        source, target = (b.data.ptr for b in buffers)
        cupy.cuda.runtime.memcpyAsync(target, source, nbytes, 3, 0)

    limit = 2 * nbytes / on_device(copy)
    buffers.clear()
    known, work = Kernels(), Workspace()

    def gauss(x: Any) -> Any:
        return np.exp(-0.5 * ((x - 0.1) / 2) ** 2)

    moment = partial(registry.KNOWN[moment_chunk], dtype="f8", keepdims=True)
    cases: dict[str, Callable[..., Any]] = {
        "map": gauss,
        "gauss sum": lambda x: gauss(x).sum(keepdims=True),
        "sum": lambda x: x.sum(keepdims=True),
        "column sums": lambda x: x.sum(0, keepdims=True),
        "row sums": lambda x: x.sum(1, keepdims=True),
        "mean and variance of columns": partial(moment, axis=(0,)),
        "mean and variance of rows": partial(moment, axis=(1,)),
        "x + y.T": lambda x, y: x + y.T,
        "(x + y.T).sum": lambda x, y: (x + y.T).sum(keepdims=True),
        "argmax of rows": lambda x: x.argmax(1),
    }
    for dtype in (np.dtype("f4"), np.dtype("f8")):
        shape = (2**26 // 8192 * 4 // dtype.itemsize, 8192)
        for name, f in cases.items():
            inputs = [shape, shape[::-1]][: 2 if "y.T" in name else 1]
            foreseen = tuple(abstract.AbstractArray(s, dtype) for s in inputs)
            program = trace.trace_function(f, foreseen)
            arrays = [
                {n: cupy.random.default_rng(i).standard_normal(s, dtype="f8").astype(dtype)
                 for n, s in enumerate(inputs)}
                for i in range(12)
            ]  # fmt: skip
            names = tuple(range(len(inputs)))
            task = KernelTask(name, program, names, foreseen, (), None, dict)
            seconds = on_device(lambda: [known.run(task, v, 0, work) for v in arrays])  # noqa: B023
            rate = 12 * sum(k.bytes_moved() for k in program.kernels) / seconds
            print(f"{name:28s} {dtype}: {rate / 1e12:5.2f} TB/s, {rate / limit:4.0%} of a copy")
            arrays.clear()


def on_device(f: Callable[[], Any], repeat: int = 5) -> float:
    """Seconds between two events around f, the best of several."""
    f()
    times = []
    for _ in range(repeat):
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record()
        f()
        end.record()
        end.synchronize()
        times.append(cupy.cuda.get_elapsed_time(begin, end) / 1e3)
    return min(times)


def overlap() -> None:
    """Peer copies and kernels in one profile: what is hidden behind what, and who waits."""
    from torch.profiler import ProfilerActivity, profile  # type: ignore[import-not-found]

    cases: list[tuple[str, Any, Any]] = [
        ("transpose_sum", 65536, None),
        ("transpose_sum", 32768, 2048),  # blocks of 16 MiB
        ("gauss_sum", (GPUS * 2**16, 2**15), None),
    ]
    for name, size, chunks in cases:
        graph = importlib.import_module(f"graphs.{name}")
        with gpuscheduler.Scheduler(devices="cuda"):
            arrays = [x.persist() for x in graph.inputs(size, chunks, "cupy")]
            result = graph.apply(*arrays)
            best(result.persist, 2)
            with profile(activities=[ProfilerActivity.CUDA]) as prof:
                result.persist()
                synchronize()
            del arrays, result
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            prof.export_chrome_trace(str(path))
            profiled(name, json.loads(path.read_text())["traceEvents"])
        everywhere(lambda d: cupy.get_default_memory_pool().free_all_blocks())


def profiled(name: str, events: list[Any]) -> None:
    spans: dict[tuple[Any, str], list[tuple[float, float]]] = defaultdict(list)
    moved, rates = 0, [0.0]
    for e in events:
        cat = e.get("cat")
        if cat == "kernel" or (cat == "gpu_memcpy" and "PtoP" in e["name"]):
            kind = "kernel" if cat == "kernel" else "copy"
            facts = e["args"]
            spans[facts.get("device", e["pid"]), kind].append((e["ts"], e["ts"] + e["dur"]))
            if kind == "copy":
                moved += facts.get("bytes", 0)
                rates.append(facts.get("bytes", 0) / max(e["dur"], 1e-3) / 1e3)
    total = union([s for some in spans.values() for s in some])
    begin, end = total[0][0], total[-1][1]
    rates.sort()
    print(
        f"{name}: {end - begin:.0f} us on the devices; {moved / 2**30:.2f} GiB between them, "
        f"one copy at {rates[len(rates) // 2]:.0f} GB/s (median), {rates[-1]:.0f} (best)"
    )
    for d in sorted({d for d, _ in spans}, key=str):
        c, k = union(spans[d, "copy"]), union(spans[d, "kernel"])
        both = length(c) + length(k) - length(union(c + k))
        print(
            f"  GPU {d}: kernels {length(k):.0f} us from {k[0][0] - begin:.0f} to "
            f"{k[-1][1] - begin:.0f}, copies {length(c):.0f} us, of which beside kernels "
            f"{both / max(length(c), 1e-9):.0%}"
        )


def union(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    out: list[tuple[float, float]] = []
    for a, b in sorted(spans):
        if out and a <= out[-1][1]:
            out[-1] = (out[-1][0], max(b, out[-1][1]))
        else:
            out.append((a, b))
    return out


def length(spans: list[tuple[float, float]]) -> float:
    return sum(b - a for a, b in spans)


def host() -> None:
    """Results to the host: all GPUs at once into one pinned array, the second time around."""
    with gpuscheduler.Scheduler(devices="cuda"):
        x = da.ones((GPUS * 2**14, 2**15), chunks=(2**11, -1), dtype="f4").persist()
        y = (x + np.float32(1)).to_backend("numpy")

        def f() -> None:
            result = y.compute()
            assert result[-1, -1] == 2

        seconds = best(f, 3)
        gib = x.nbytes / 2**30
        print(f"{gib:.0f} GiB to the host: {x.nbytes / seconds / 1e9:.0f} GB/s from {GPUS} GPUs")


def together(nbytes: int = 2**30) -> tuple[float, float]:
    """Bytes a second of pinned copies to all GPUs at once, and from all of them."""
    pieces = everywhere(lambda d: (cupyx.empty_pinned(nbytes, "u1"), cupy.empty(nbytes, "u1")))
    streams = everywhere(lambda d: cupy.cuda.Stream(non_blocking=True))

    def copy(to_gpus: bool) -> None:
        for d, ((a, b), stream) in enumerate(zip(pieces, streams, strict=True)):
            with cupy.cuda.Device(d):
                pair = (b.data.ptr, a.ctypes.data) if to_gpus else (a.ctypes.data, b.data.ptr)
                kind = 1 if to_gpus else 2
                cupy.cuda.runtime.memcpyAsync(*pair, nbytes, kind, stream.ptr)

    rates = [GPUS * nbytes / best(lambda to=to: copy(to)) for to in (True, False)]  # type: ignore[misc]
    pieces.clear()
    everywhere(lambda d: cupy.get_default_memory_pool().free_all_blocks())
    return rates[0], rates[1]


def sweep() -> None:
    """`(x*2+1).sum()` over an array of the host, beside pinned copies to all GPUs at once."""
    lines = 2**13
    limit, _ = together()
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    threads = os.cpu_count() or 1
    print(f"pinned host to device, {GPUS} GPUs together: {limit / 1e9:.0f} GB/s")
    pairs = list(zip(*(np.split(np.ones(2**32, "u1"), 256) for _ in range(2)), strict=True))
    with ThreadPoolExecutor(threads) as pool:
        seconds = best(lambda: list(pool.map(lambda pair: np.copyto(*pair), pairs)), 3)
    print(f"copies on the host by {threads} threads: {2**32 / seconds / 1e9:.0f} GB/s")
    pairs.clear()
    for kind, share, empty in (("pinned", 16, cupyx.empty_pinned), ("pageable", 8, np.empty)):
        rows = min(memory // share, 2**36) // (4 * lines) // 4096 * 4096
        a = empty((rows, lines), "f4")
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda r, a=a: a[r : r + 4096].fill(1), range(0, rows, 4096)))  # type: ignore[misc]
        for mib in (64, 256):
            with gpuscheduler.Scheduler(devices="cuda") as s:
                x = _roots.views(a, (mib * 2**20 // (4 * lines), -1))
                total = (x.to_backend("cupy") * 2 + 1).sum()
                assert abs(float(total.compute()) / (3.0 * x.size) - 1) < 1e-5
                seconds = best(total.compute, 2)
                rate = x.nbytes / seconds
                print(f"{x.nbytes / 2**30:.0f} GiB {kind}, blocks of {mib} MiB: {seconds:.3f} s, "
                      f"{rate / 1e9:.0f} GB/s, {rate / limit:.0%}; {s.last}")  # fmt: skip
            del x, total
        del a


def quarter() -> None:
    """Products under a limit of a quarter of what they take, beside moving those bytes: over each
    link by itself, and between the host and all GPUs at once."""
    with gpuscheduler.Scheduler(devices="cuda") as s:
        links = s.hardware.links()  # type: ignore[attr-defined]
    rates = dict(zip(("to", "from"), together(), strict=True))
    print("all GPUs at once, GB/s:", {k: round(v / 1e9) for k, v in rates.items()})
    for name, size, chunks in (
        ("transpose_sum", 65536, 4096),
        ("matmul", 32768, 2048),
        ("matmul", 32768, 4096),
    ):
        graph = importlib.import_module(f"graphs.{name}")
        with gpuscheduler.Scheduler(devices="cuda") as s:
            x = graph.inputs(size, chunks, "cupy")[0].persist()
            y = graph.apply(x)
            free = best(y.persist, 2)
            assert s.last is not None
            limit = max(s.last.peak[d] for d in range(GPUS)) // 4
            del x, y
        everywhere(lambda d: cupy.get_default_memory_pool().free_all_blocks())
        with gpuscheduler.Scheduler(devices="cuda", memory_limit=limit) as s:
            x = graph.inputs(size, chunks, "cupy")[0].persist()
            y = graph.apply(x)
            begin = time.perf_counter()
            y.persist()
            synchronize()
            first = time.perf_counter() - begin  # pinned memory for what leaves has to be made
            seconds = best(y.persist, 12)
            assert s.last is not None
            busy: dict[tuple[int, str], float] = defaultdict(float)
            for (a, b), moved in s.last.moved.items():
                if a < 0:
                    busy[b, "in"] += moved / links.host[b][0] / 1e9
                    busy[-1, "in"] += moved / rates["to"]
                elif b < 0:
                    busy[a, "out"] += moved / links.host[a][1] / 1e9
                    busy[-1, "out"] += moved / rates["from"]
                else:
                    busy[b, "from others"] += moved / links.gbs[a][b] / 1e9
            moving = max(busy.values())
            print(f"{name} {size} by {chunks}: {free * 1e3:.0f} ms with all memory; "
                  f"with {limit / 2**30:.2f} GiB on each {seconds * 1e3:.0f} ms, "
                  f"the first time {first * 1e3:.0f}; "
                  f"the busiest link, or all to the host at once, {moving * 1e3:.0f} ms, "
                  f"x{seconds / max(moving, free):.2f} of the longer; {s.last}")  # fmt: skip
            del x, y
        everywhere(lambda d: cupy.get_default_memory_pool().free_all_blocks())


if __name__ == "__main__":
    parts = [limits, tasks, copies, overlap, host, sweep, quarter, kernels, fusion, graphs]
    parts += [rounds, generated, meshes, windows]
    for part in parts:
        if len(sys.argv) == 1 or part.__name__ in sys.argv[1:]:
            try:
                part()
            except Exception as error:  # one part must not cost the others their figures
                print(f"{part.__name__} FAILED: {error!r}"[:600])
            everywhere(lambda d: cupy.get_default_memory_pool().free_all_blocks())
