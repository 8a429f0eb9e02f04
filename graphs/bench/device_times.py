"""Device times on a real GPU: beside events of our own, what they cost, and what NVML and NVTX say.

    python -m graphs.bench device_times

Checks results first. A spinning kernel keeps the GPU busy while a run is queued, so that the events
around the run see the device's time and not the host's.
"""

from __future__ import annotations

import sys
from time import perf_counter
from typing import Any

import cupy
import dask.array as da
import numpy as np

import gpuscheduler
from gpuscheduler.devices.cuda.ranges import find_ranges

SPIN = cupy.RawKernel(
    r"""extern "C" __global__ void spin(long long ticks) {
        long long begin = clock64();
        while (clock64() - begin < ticks) {}
    }""",
    "spin",
)
#: Clock ticks of the spinning kernel: some 10 ms.
TICKS = 20_000_000
#: Elements of the arrays whose steps are timed.
SIZES = (2**14, 2**20, 2**24, 2**26)
#: Sums of a run that follow each other.
LINKS = 6
#: Launches of the replay whose host time is compared.
LAUNCHES = 400
#: Timed runs at each level; the best counts.
TURNS = 25


def beside_events() -> bool:
    """The span of a run by its rows and by events around it, for steps of several sizes."""
    print("elements     steps  rows' sum µs  rows' span µs  events µs  apart µs  apart per step µs")
    good = True
    for elements in SIZES:
        with gpuscheduler.Scheduler("cuda:0", observe="device") as s:
            a = cupy.linspace(0, 1, elements, dtype="f4")
            blocks = 8
            x = da.from_array(a, chunks=elements // blocks).persist()
            z, want = x.sum(), float(a.sum(dtype="f8"))
            for _ in range(LINKS):  # each reads all of x, and the one before it
                z = da.sin(x + z * 1e-9).sum()
                want = float(cupy.sin(a.astype("f8") + want * 1e-9).sum())
            for _ in range(4):
                got = float(z.compute())
            assert abs(got - want) <= 1e-3 * max(1.0, abs(want)), (got, want)
            best = None
            for _ in range(5):
                stream = cupy.cuda.get_current_stream()
                begin, end = cupy.cuda.Event(), cupy.cuda.Event()
                SPIN((1,), (1,), (np.int64(TICKS),))
                begin.record(stream)
                value = z.compute()
                end.record(stream)
                end.synchronize()
                float(value)
                outer = cupy.cuda.get_elapsed_time(begin, end) * 1e3
                run = s.recorder.runs[-1].number
                rows = [r for r in s.recorder.rows() if r.run == run and r.clock == "device"]
                span = (max(r.end for r in rows) - min(r.begin for r in rows)) / 1e3
                busy = sum(r.end - r.begin for r in rows) / 1e3
                if best is None or outer - span < best[0]:
                    best = outer - span, outer, span, busy, len(rows)
            assert best is not None
            apart, outer, span, busy, n = best
            print(f"{elements:<12,} {n:<6} {busy:<13.1f} {span:<14.1f} {outer:<10.1f} "
                  f"{apart:<9.1f} {apart / n:.2f}")  # fmt: skip
            good &= apart / n < 5 and busy <= span + 1
            hardware: Any = s.hardware
            teams = [team for teams in hardware._teams.values() for team in teams.idle]
            anchors = [lane.marks.anchor for team in teams for lane in team.lanes if lane.marks]
            errors = [anchor.error / 1e3 for anchor in anchors]
            print(f"             the host's clock is known to {min(errors):.1f} µs")
    return good


def costs() -> None:
    """Host time of a replay of some hundred launches at each level, in turns."""
    times: dict[str, list[float]] = {"counters": [], "steps": [], "device": []}
    with gpuscheduler.Scheduler("cuda:0") as s:
        x = da.from_array(cupy.ones(1024, "f4"), chunks=1024).persist()
        z = x.sum()
        for _ in range(LAUNCHES // 2):
            z = da.sin(x + z * 1e-9).sum()
        for _ in range(4):
            value = float(z.compute())
        assert abs(value - 1024 * np.sin(1.0)) < 1.0, value
        for _ in range(TURNS):
            for level, found in times.items():
                with s.record(level):
                    cupy.cuda.Device().synchronize()
                    begin = perf_counter()
                    kept = z.persist()
                    found.append(perf_counter() - begin)
                    cupy.cuda.Device().synchronize()
                del kept
        run = s.recorder.runs[-1]
        print(f"{run.how} of {run.steps} steps")
    base = min(times["counters"])
    for level, found in times.items():
        print(f"  {level:<10} {min(found) * 1e3:8.3f} ms  {min(found) / base:5.2f}")


def sensors() -> None:
    """What NVML tells of each GPU, and how long that takes."""
    with gpuscheduler.Scheduler("cuda") as s:
        hardware: Any = s.hardware
        hardware.nvml.sensors()
        begin = perf_counter()
        found = hardware.nvml.sensors()
        took = (perf_counter() - begin) * 1e3 / len(found)
        for device, (sensed, facts) in enumerate(zip(found, hardware.nvml.facts(), strict=True)):
            print(f"NVML {device}: {sensed}\n        {facts}")
        print(f"a look at the sensors of a device takes {took:.2f} ms")


def main() -> None:
    """Print all of it; some 20 s."""
    sensors()
    print(f"NVTX: {find_ranges() or 'no tool is attached'}")
    costs()
    sys.exit(0 if beside_events() else "device times are not those of events")
