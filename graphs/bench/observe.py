"""What recording costs, and whether device times are true: `python -m graphs.bench observe`.

- The loop with simulated devices, where every step is done at once, and a scheduler of CPU devices
  with small steps of NumPy: seconds of the processor, by level.
- On a GPU a computation that is replayed from its launch tape: seconds of the host until all is
  queued, and how many functions of the observers are called.
- On a GPU the span of a run by its rows, beside CUDA events around the run. A spinning kernel keeps
  the GPU busy while the run is queued, so that the events see the device's time and not the host's.
- On a GPU what a function allocates by its lines, and what NVML and NVTX say.

Each level in turn, as a ratio to a run that records nothing: of the least times, and the median
over the turns. Each result is compared before it is timed, and the recorded steps are counted.
Takes less than a minute. Ends with 1 where device times are apart by 5 µs a step or more.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median
from time import perf_counter, perf_counter_ns, process_time
from typing import Any

import dask.array as da
import numpy as np
from rich.console import Console
from rich.table import Table

from gpuscheduler import Scheduler
from gpuscheduler.devices.choose import cuda_devices
from gpuscheduler.frontend.lowering import from_dask
from gpuscheduler.plan.build import make_plan
from gpuscheduler.plan.machine import Machine
from gpuscheduler.runtime.loop import run
from gpuscheduler.runtime.observe import Level, Recorder
from gpuscheduler.runtime.simulated import InOrderDevices

LEVELS = ("counters", "steps", "device")
#: Elements of the arrays whose steps are timed with events.
SIZES = (2**14, 2**20, 2**24, 2**26)
#: Sums of such a run that follow each other.
LINKS = 6
#: Clock ticks of the spinning kernel: some 10 ms.
TICKS = 20_000_000
#: µs a step by which device times may be apart from events.
APART = 5.0
SPIN = """extern "C" __global__ void spin(long long ticks) {
    long long begin = clock64();
    while (clock64() - begin < ticks) {}
}"""


def time_in_turns(repeat: int, tries: Mapping[str, Callable[[], float]]) -> dict[str, list[float]]:
    """Seconds of each, run in turns so that all see the same machine."""
    times: dict[str, list[float]] = {name: [] for name in tries}
    for _ in range(repeat):
        for name, one in tries.items():
            gc.collect()  # what the one before has left
            times[name].append(one())
    return times


def time_loop(steps: int, repeat: int) -> dict[str, list[float]]:
    """Seconds of the loop by level, and without any record."""
    tasks = {("x", i): (int,) for i in range(steps)}
    plan = make_plan(from_dask(tasks, list(tasks)), Machine.uniform(4))

    def timed(level: str | None) -> float:
        record = None
        if level is not None:
            record = Recorder(perf_counter_ns, base=Level.read(level)).begin()
            record.enter(plan, "steps")
        devices = InOrderDevices(plan)
        gc.disable()  # as a run of a scheduler does
        try:
            begin = process_time()
            state = run(plan, devices, record=record)
            seconds = process_time() - begin
        finally:
            gc.enable()
        assert state.is_finished
        if record is not None and level == "steps":
            assert sum(len(turn.events) for turn in record.turns) == 2 * steps
        if record is not None:
            record.recorder.end(record)
        return seconds

    tries = {"nothing": partial(timed, None)} | {n: partial(timed, n) for n in LEVELS[:2]}
    time_in_turns(1, tries)
    return time_in_turns(repeat, tries)


def time_scheduler(
    devices: str,
    build: Callable[[], tuple[Any, float]],
    repeat: int,
    synchronize: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = process_time,
) -> tuple[dict[str, list[float]], dict[str, int], str]:
    """Seconds of a computation that was planned before, and calls of observers, by level.

    Also says how it ran.
    """
    with Scheduler(devices) as scheduler:
        x, want = build()
        calls = {}
        for level in LEVELS:
            with scheduler.record(level) as recording:
                for _ in range(4):  # the first run plans, and a tape may come after it
                    got = float(x.persist().compute())
                    assert abs(got - want) <= 1e-3 * max(1.0, abs(want)), (got, want)
                last = max(recording.runs()[-2:], key=lambda r: r.steps)  # the other one fetches
                rows = sum([row.run == last.number for row in recording.rows()])
                assert rows == (0 if level == "counters" else last.steps), (level, rows)
                calls[level] = count_calls(x.persist)

        def timed(level: str) -> float:
            with scheduler.record(level):
                synchronize()
                begin = clock()
                kept = x.persist()
                seconds = clock() - begin
                synchronize()
            del kept
            return seconds

        times = time_in_turns(repeat, {level: partial(timed, level) for level in LEVELS})
        return times, calls, f"{last.how}, {last.steps:,} steps"


def count_calls(function: Callable[[], Any]) -> int:
    """How many functions of the observers a call enters in this thread: exact, no clock."""
    count = 0

    def profile(frame: Any, event: str, _: Any) -> None:
        nonlocal count
        file = frame.f_code.co_filename
        count += event == "call" and any(
            name in file for name in ("observe.py", "marks.py", "diagnostics")
        )

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def print_times(
    title: str, times: dict[str, list[float]], steps: int, calls: Mapping[str, int] | None = None
) -> None:
    """Print seconds, time per step, ratios to the first row, and calls of observers."""
    more = ["calls"] if calls is not None else []
    table = Table("recorded", "least time", "per step", "ratio", "median ratio", *more, title=title)
    first = next(iter(times.values()))
    for name, seconds in times.items():
        least = min(seconds)
        ratios = [a / b for a, b in zip(seconds, first, strict=True)]
        cells = [name, f"{least * 1e3:.3f} ms", f"{least / steps * 1e6:.2f} µs"]
        cells += [f"{least / min(first):.3f}", f"{median(ratios):.3f}"]
        table.add_row(*cells, *([f"{calls[name]:,}"] if calls is not None else []))
    Console().print(table)


# ---- on a GPU


def time_replay(launches: int, repeat: int) -> None:
    """Print what a replay costs the host at each level."""
    import cupy

    def build() -> tuple[Any, float]:
        x = da.from_array(cupy.ones(1024, "f4"), chunks=1024).persist()
        z = x.sum()
        for _ in range(launches // 2):
            z = da.sin(x + z * 1e-9).sum()
        return z, 1024 * float(np.sin(1.0))

    def synchronize() -> None:
        cupy.cuda.Device().synchronize()

    times, calls, how = time_scheduler("cuda:0", build, repeat, synchronize, perf_counter)
    steps = int(how.split(", ")[1].split()[0].replace(",", ""))
    print_times(f"host time on one GPU: {how}", times, steps, calls)


def compare_with_events() -> bool:
    """Print spans of runs by rows and by events; whether they are apart by less than `APART`."""
    import cupy

    spin, good = cupy.RawKernel(SPIN, "spin"), True
    names = "elements", "steps", "rows' sum", "rows' span", "events", "apart a step", "host clock"
    table = Table(*names, title="device times beside CUDA events, µs")
    for elements in SIZES:
        with Scheduler("cuda:0", observe="device") as s:
            a = cupy.linspace(0, 1, elements, dtype="f4")
            x = da.from_array(a, chunks=elements // 8).persist()
            z, want = x.sum(), float(a.sum(dtype="f8"))
            for _ in range(LINKS):  # each reads all of x, and the one before it
                z = da.sin(x + z * 1e-9).sum()
                want = float(cupy.sin(a.astype("f8") + want * 1e-9).sum())
            for _ in range(4):
                got = float(z.compute())
            assert abs(got - want) <= 1e-3 * max(1.0, abs(want)), (got, want)
            found = []
            for _ in range(5):
                stream = cupy.cuda.get_current_stream()
                begin, end = cupy.cuda.Event(), cupy.cuda.Event()
                spin((1,), (1,), (np.int64(TICKS),))
                begin.record(stream)
                value = z.compute()
                end.record(stream)
                end.synchronize()
                float(value)
                outer = cupy.cuda.get_elapsed_time(begin, end) * 1e3
                rows = [
                    r for r in s.recorder.rows()
                    if r.run == s.recorder.runs[-1].number and r.clock == "device"
                ]  # fmt: skip
                span = (max(r.end for r in rows) - min(r.begin for r in rows)) / 1e3
                busy = sum(r.end - r.begin for r in rows) / 1e3
                found.append(((outer - span) / len(rows), outer, span, busy, len(rows)))
            apart, outer, span, busy, n = min(found)
            hardware: Any = s.hardware
            teams = [team for teams in hardware._teams.values() for team in teams.idle]
            errors = [lane.marks.anchor.error for t in teams for lane in t.lanes if lane.marks]
            cells = f"{busy:.1f}", f"{span:.1f}", f"{outer:.1f}", f"{apart:.2f}"
            table.add_row(f"{elements:,}", str(n), *cells, f"± {min(errors) / 1e3:.1f}")
            good &= apart < APART and busy <= span + 1
    Console().print(table)
    return good


def print_allocations() -> None:
    """Print what a function allocates on the GPU, by its lines, once the sums are checked."""
    import cupy

    def centre(b: Any) -> Any:
        apart = b - b.mean()
        return (apart**2) + apart

    side = 2**10
    with Scheduler("cuda:0", fuse=False) as s, s.record("memory") as recording:
        x = da.from_array(cupy.ones((4 * side, side)), chunks=side).map_blocks(centre)
        kept = x.persist()
        profile = recording.memory("line")
    apart = next(r for r in profile.allocations if r.source.startswith("apart ="))
    assert apart.total >= 4 * side * side * 8, apart
    print(profile)
    del kept


def print_sensors() -> None:
    """Print what NVML tells of each GPU, and whether a profiler takes NVTX ranges."""
    from gpuscheduler.devices.cuda.ranges import find_ranges

    with Scheduler("cuda") as s:
        hardware: Any = s.hardware
        for device, (read, facts) in enumerate(
            zip(hardware.nvml.sensors(), hardware.nvml.facts(), strict=True)
        ):
            print(f"NVML {device}: {read}\n        {facts}")
    print(f"NVTX: {find_ranges() or 'no tool is attached'}")


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m graphs.bench observe", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--launches", type=int, default=400, help="of the replay on GPUs")
    said = parser.parse_args()
    title = f"{said.steps:,} instant steps on 4 simulated devices"
    print_times(title, time_loop(said.steps, min(said.repeat, 9)), said.steps)

    def small() -> tuple[Any, float]:
        x = da.ones((2000, 100), chunks=(1, 100))
        return (x + 1).sum(split_every=8), 400_000.0

    times, calls, how = time_scheduler("cpu:2", small, min(said.repeat, 9))
    print_times(f"2,000 blocks of 100 numbers on 2 CPU devices: {how}", times, 2000, calls)
    if not cuda_devices():
        return 0
    time_replay(said.launches, said.repeat)
    print_allocations()
    print_sensors()
    return 0 if compare_with_events() else 1
