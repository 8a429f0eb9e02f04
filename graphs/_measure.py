"""Measure the engine on the GPUs of this machine: `python graphs/_measure.py [PART ...]`.

Parts: limits, tasks, copies, overlap, graphs, host. Each prints a short table; what is timed has
run once before. Figures in RESULTS.md come from here. Not a workload.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from operator import add
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import cupy
import dask
import dask.array as da
import dask.threaded
import numpy as np
from dask._task_spec import Task, TaskRef

import gpuscheduler

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
        "logistic_step": lambda n: (n * 2**23, 256),
        "heat_stencil": lambda n: (int(32768 * n**0.5) // 64 * 64, 8),
        "transpose_sum": lambda n: 65536 if n > 1 else 32768,
        "matmul": lambda n: 32768,
        "tall_skinny_svd": lambda n: (n * 2**23, 128),
    }
    for name, size in cases.items():
        graph = importlib.import_module(f"graphs.{name}")
        row = []
        for n in COUNTS:
            with gpuscheduler.Scheduler(devices=devices(n)):
                arrays = graph.inputs(size(n), None, "cupy")
                arrays = [a.persist() if isinstance(a, da.Array) else a for a in arrays]
                result = graph.apply(*arrays)
                seconds = best(result.persist, 3)
                moved = graph.bytes_moved(size(n)) / seconds / 1e12
                row.append((seconds, moved))
                del arrays, result
        times = " ".join(f"{s * 1e3:8.2f} ms ({t:5.2f} TB/s)" for s, t in row)
        scaling = row[-1][1] / row[0][1]
        print(f"{name:16s} on {COUNTS} GPUs: {times}  x{scaling:.2f}")


def generated() -> None:
    """The workloads that make their own data."""
    for name, size in {"haversine_mesh": 100_000, "random_slice_sum": 500_000}.items():
        graph = importlib.import_module(f"graphs.{name}")
        build = getattr(graph, "build_sum", graph.build)
        for n in COUNTS[-1:]:
            with gpuscheduler.Scheduler(devices=devices(n)):
                result = build(size, None, "cupy")
                seconds = best(result.compute, 2)
                print(f"{name} {size}: {seconds * 1e3:.1f} ms on {n} GPUs")


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


if __name__ == "__main__":
    parts = [limits, tasks, copies, overlap, host, graphs, generated]
    for part in parts:
        if len(sys.argv) == 1 or part.__name__ in sys.argv[1:]:
            try:
                part()
            except Exception as error:  # one part must not cost the others their figures
                print(f"{part.__name__} FAILED: {error!r}"[:600])
            everywhere(lambda d: cupy.get_default_memory_pool().free_all_blocks())
