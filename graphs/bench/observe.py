"""What recording costs: `python -m graphs.bench observe [--steps N] [--repeat N]`.

Each level in turn, the best of several runs, as a ratio to a run that records nothing. On CPUs it
is the processor's time, on GPUs the host's:

- the loop with simulated devices, where every step is done at once;
- a scheduler of CPU devices, with small steps of NumPy;
- on GPUs, a computation that is replayed from its launch tape.

Each result is compared before it is timed, and the recorded steps are counted.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Mapping
from functools import partial
from time import perf_counter, perf_counter_ns, process_time
from typing import Any

import dask.array as da
from dask import config
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


def best_in_turns(
    repeat: int, tries: Mapping[str, Callable[[], float]], warm: bool = True
) -> dict[str, float]:
    """The least seconds of each, run in turns so that all see the same machine."""
    if warm:
        for one in tries.values():
            one()
    best = dict.fromkeys(tries, float("inf"))
    for _ in range(repeat):
        for name, one in tries.items():
            gc.collect()  # what the one before has left
            best[name] = min(best[name], one())
    return best


def loop_times(steps: int, repeat: int) -> dict[str, float]:
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

    return best_in_turns(
        repeat, {"nothing": partial(timed, None)} | {n: partial(timed, n) for n in LEVELS[:2]}
    )


def scheduler_times(
    devices: str,
    build: Callable[[], Any],
    repeat: int,
    synchronize: Callable[[], None],
    clock: Callable[[], float],
) -> dict[str, float]:
    """Seconds of one computation that was planned before, by level."""
    schedulers = {level: Scheduler(devices, observe=level) for level in LEVELS}
    x = build()
    try:
        values = {}
        for level, scheduler in schedulers.items():
            for _ in range(4):  # the first run plans, and a tape may come after it
                values[level] = float(x.compute(scheduler=scheduler))
            records = list(scheduler.recorder.runs)
            rows = sum([row.run == records[-1].number for row in scheduler.recorder.rows()])
            assert rows == (0 if level == "counters" else records[-1].steps), (level, rows)
            assert records[-1].how == list(schedulers["counters"].recorder.runs)[-1].how
        assert len(set(values.values())) == 1, values

        def timed(scheduler: Scheduler) -> float:
            synchronize()
            begin = clock()
            x.compute(scheduler=scheduler)
            seconds = clock() - begin
            synchronize()
            return seconds

        return best_in_turns(
            repeat, {n: partial(timed, s) for n, s in schedulers.items()}, warm=False
        )
    finally:
        for scheduler in schedulers.values():
            scheduler.close()


def print_table(title: str, times: dict[str, float], steps: int) -> None:
    """Print seconds, time per step, and the ratio to the first row."""
    table = Table("recorded", "time", "per step", "ratio", title=title)
    first = next(iter(times.values()))
    for name, seconds in times.items():
        per_step = f"{seconds / steps * 1e6:.2f} µs"
        table.add_row(name, f"{seconds * 1e3:.2f} ms", per_step, f"{seconds / first:.3f}")
    Console().print(table)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m graphs.bench observe", description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--launches", type=int, default=512, help="of the replay on GPUs")
    said = parser.parse_args()
    print_table(
        f"{said.steps:,} instant steps on 4 simulated devices",
        loop_times(said.steps, said.repeat), said.steps,
    )  # fmt: skip

    def small() -> Any:
        x = da.ones((2000, 100), chunks=(1, 100))
        return (x + 1).sum(split_every=8)

    times = scheduler_times("cpu:2", small, said.repeat, lambda: None, process_time)
    print_table("2,000 blocks of 100 numbers on 2 CPU devices", times, 2000)
    if not cuda_devices():
        return
    import cupy

    side = max(1, int(said.launch_count**0.5))

    def replayed() -> Any:
        with config.set({"array.backend": "cupy"}):
            x = da.ones((side * 64, side * 64), chunks=64)
        return (x * 2 + 1).sum(split_every=4)

    def synchronize() -> None:
        cupy.cuda.Device().synchronize()

    times = scheduler_times("cuda:0", replayed, said.repeat, synchronize, perf_counter)
    print_table(f"a replay, {side * side} blocks on one GPU", times, side * side)


if __name__ == "__main__":
    main()
