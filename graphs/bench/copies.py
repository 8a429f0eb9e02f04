"""Copies between GPUs, host and files, beside what the links can do."""

from __future__ import annotations

import importlib
import json
import os
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cupy
import cupyx
import dask
import dask.array as da
import dask.threaded
import numpy as np

import gpuscheduler
from graphs import _blocks

from .timing import GPUS, best, everywhere, synchronize


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
            print_profile(name, json.loads(path.read_text())["traceEvents"])
        everywhere(lambda d: cupy.get_default_memory_pool().free_all_blocks())


def print_profile(name: str, events: list[Any]) -> None:
    """Print how long kernels and copies of a trace took on each GPU, and beside each other."""
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
    """Spans of time without overlaps."""
    out: list[tuple[float, float]] = []
    for a, b in sorted(spans):
        if out and a <= out[-1][1]:
            out[-1] = (out[-1][0], max(b, out[-1][1]))
        else:
            out.append((a, b))
    return out


def length(spans: list[tuple[float, float]]) -> float:
    """The sum of the lengths of spans."""
    return sum(b - a for a, b in spans)


def host_results() -> None:
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


def measure_pinned_copies(nbytes: int = 2**30) -> tuple[float, float]:
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
    limit, _ = measure_pinned_copies()
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
                x = _blocks.views(a, (mib * 2**20 // (4 * lines), -1))
                total = (x.to_backend("cupy") * 2 + 1).sum()
                assert abs(float(total.compute()) / (3.0 * x.size) - 1) < 1e-5
                seconds = best(total.compute, 2)
                rate = x.nbytes / seconds
                print(f"{x.nbytes / 2**30:.0f} GiB {kind}, blocks of {mib} MiB: {seconds:.3f} s, "
                      f"{rate / 1e9:.0f} GB/s, {rate / limit:.0%}; {s.last}")  # fmt: skip
            del x, total
        del a


def quarter() -> None:
    """Measure products under a limit of a quarter of what they take.

    Beside them it moves those bytes over each link alone, and between the host and all GPUs at
    once.
    """
    with gpuscheduler.Scheduler(devices="cuda") as s:
        links = s.hardware.links()  # type: ignore[attr-defined]
    rates = dict(zip(("to", "from"), measure_pinned_copies(), strict=True))
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
            for (a, b), moved in s.last.traffic.items():
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
