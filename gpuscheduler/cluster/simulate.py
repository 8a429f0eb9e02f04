"""Predict time, traffic and memory of a computation on a cluster that does not exist.

How long it would take, what would cross the network, how full the devices would get. Nothing is
computed and nothing is sent.

The cut is the one that `attach` would make, and each stage is planned and run, against the clock,
as its worker would: see `pretend.ClockDevices`. Workers run one stage at a time. A parcel takes the
network of its sender and of its reader for itself, at the given rate, and the cluster's scheduler
spends the given time on each task, one after the other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import Any

from dask._task_spec import Task
from dask.utils import format_bytes

from ..frontend.lowering import compile_tasks, from_dask, received_by_scheduler
from ..gc_control import without_garbage_collection
from ..options import Options
from ..pipeline.compile import plan_graph
from ..plan.machine import Machine
from ..plan.plan import Plan
from ..runtime.loop import run
from ..runtime.simulated import ClockDevices
from .stages import Stage, StageGraph, cut

Key = Any

#: Bytes per second into a worker, and out of it: 400 Gbit/s.
NETWORK = 50e9
#: What the cluster's scheduler spends on a task, and how long the way to a worker and back takes.
TASK_SECONDS = 1e-3
WAY_SECONDS = 5e-3
#: Bytes of memory of an H200.
H200 = 141 * 10**9


@dataclass(frozen=True, repr=False)
class Simulation:
    """What a computation would take on a cluster."""

    cut: StageGraph
    devices: int  # of each worker
    seconds: float  # until the last stage is done, planning on the client not included
    steps: int  # that the workers run
    traffic: dict[tuple[int, int], int]  # bytes from worker to worker
    peak: tuple[int, ...]  # bytes on the fullest device of each worker
    busy: tuple[float, ...]  # seconds that each worker runs stages

    @property
    def tasks(self) -> int:
        """Tasks that the cluster's scheduler sees."""
        return self.cut.tasks

    def __repr__(self) -> str:
        return f"<Simulation: {self}>"

    def __str__(self) -> str:
        moved = sum(self.traffic.values())
        most = max(self.traffic.values(), default=0)
        return (
            f"{self.steps:,} steps on {self.cut.workers} workers of {self.devices}: "
            f"{self.seconds:.3g} s, of which stages run for {max(self.busy):.3g} s on the busiest "
            f"worker; {self.tasks:,} tasks of the cluster, {len(self.cut.stages):,} of them "
            f"stages; {format_bytes(moved)} between workers, at most {format_bytes(most)} over "
            f"one of {len(self.traffic):,} links; peak memory {format_bytes(max(self.peak))} on a "
            "device"
        )


def simulate(
    *collections: Any,
    workers: int = 2,
    devices: int = 8,
    memory: int = int(0.9 * H200),
    network: float = NETWORK,
    task_seconds: float = TASK_SECONDS,
    **options: Any,
) -> Simulation:
    """Run the plan of these collections on `workers` pretended workers of `devices` GPUs each.

    Parameters
    ----------
    memory
        bytes that values may take on each device.
    network
        bytes per second into each worker, and as many out of it.
    task_seconds
        what the cluster's scheduler spends on each task.
    options
        as for `Scheduler`.

    Raises
    ------
    OutOfMemory
        where a step could never fit its device.

    >>> import dask.array as da
    >>> print(simulate(da.ones((4096, 4096), chunks=512).sum(), workers=4).tasks)
    5
    """
    if workers < 1 or devices < 1:
        raise ValueError(f"{workers} workers of {devices} devices: there must be at least one")
    dsk, keys = received_by_scheduler(*collections)
    node = Machine.uniform(devices, memory=memory)
    cluster = Machine.uniform(
        workers, memory=memory * devices, peer=network, bandwidth=node.bandwidth * devices
    )
    with without_garbage_collection():
        graph = from_dask(dsk, keys, compiled=False)
        return _SimulatedCluster(
            cut(graph, cluster), node, network, task_seconds, Options(**options)
        ).run()


class _SimulatedCluster:
    def __init__(
        self, plan: StageGraph, node: Machine, network: float, task_seconds: float, options: Options
    ):
        self.plan, self.node, self.network, self.options = plan, node, network, options
        self.task_seconds = task_seconds
        self.dispatched = 0.0  # when the cluster's scheduler is free again
        self.free_at = [0.0] * plan.workers
        self.sends: dict[int, float] = defaultdict(float)  # worker -> when its way out is free
        self.gets: dict[int, float] = defaultdict(float)
        self.arrived: dict[tuple[int, int], float] = {}  # (parcel, worker) -> when it is there
        self.end = 0.0
        self.busy = [0.0] * plan.workers
        self.peak = [0] * plan.workers
        self.steps = 0
        # tasks of the cluster: stages by their numbers, parcels that are taken out as -1 - number,
        # and behind these the ones that are sent ahead
        first = -1 - len(plan.parcels)
        self.ahead = {arrival: first - rank for rank, arrival in enumerate(plan.ahead)}
        self.readers: dict[int, list[int]] = defaultdict(list)
        self.missing: dict[int, int] = {}
        self.latest: dict[int, float] = defaultdict(float)  # when all that a task reads is made
        self.ready: list[tuple[float, int]] = []  # a heap: when a task can be sent, and which
        for n, parcel in enumerate(plan.parcels):
            if not parcel.whole:
                self._add_reads(-1 - n, [parcel.source])
        for (n, _), task in self.ahead.items():
            self._add_reads(task, [self._maker(n)])
        for stage in plan.stages:
            given = plan.parcels_of(stage)
            makers = [self.ahead.get((n, stage.worker), self._maker(n)) for n in given]
            self._add_reads(stage.number, [*makers, *(self._maker(n) for n in stage.after)])

    def _maker(self, n: int) -> int:
        parcel = self.plan.parcels[n]
        return parcel.source if parcel.whole else -1 - n

    def _add_reads(self, task: int, reads: Iterable[int]) -> None:
        every = set(reads)
        self.missing[task] = len(every)
        for other in every:
            self.readers[other].append(task)
        if not every:
            heappush(self.ready, (0.0, task))

    def run(self) -> Simulation:
        while self.ready:
            time, task = heappop(self.ready)
            # the scheduler takes one task after the other, in the order in which they are ready
            self.dispatched = max(self.dispatched, time) + self.task_seconds
            there = self.dispatched + WAY_SECONDS
            if task >= 0:
                end = self._run(self.plan.stages[task], there)
            elif -1 - task < len(self.plan.parcels):
                end = there
            else:
                end = self._arrival(*self.plan.ahead[-1 - task - len(self.plan.parcels)], there)
            self._finish_task(task, end)
        return Simulation(
            self.plan,
            len(self.node.devices),
            self.end,
            self.steps,
            self.plan.traffic(),
            tuple(self.peak),
            tuple(self.busy),
        )

    def _finish_task(self, task: int, time: float) -> None:
        self.end = max(self.end, time)
        for reader in self.readers[task]:
            self.missing[reader] -= 1
            self.latest[reader] = max(time, self.latest[reader])
            if not self.missing[reader]:
                heappush(self.ready, (self.latest[reader], reader))

    def _run(self, stage: Stage, sent: float) -> float:
        """The end of a stage that is on its worker since `sent`."""
        w = stage.worker
        there = [self._arrival(n, w, sent) for n in self.plan.parcels_of(stage)]
        begin = max([sent, self.free_at[w], *there])
        seconds = self._seconds(stage)
        self.free_at[w] = begin + seconds
        self.busy[w] += seconds
        return self.free_at[w]

    def _arrival(self, n: int, worker: int, asked: float) -> float:
        """When a parcel that exists, and is asked for at that time, is on a worker."""
        parcel = self.plan.parcels[n]
        source = self.plan.worker_of(parcel.source)
        if source == worker:
            return asked
        if (n, worker) not in self.arrived:
            begin = max(asked, self.sends[source], self.gets[worker])
            end = begin + sum(self.plan.nbytes[k] for k in parcel.keys) / self.network
            self.sends[source] = self.gets[worker] = self.arrived[n, worker] = end
        return self.arrived[n, worker]

    def _seconds(self, stage: Stage) -> float:
        plan = stage_plan(self.plan, stage, self.node, self.options)
        clock = ClockDevices(plan)
        state = run(plan, clock, None, self.options.window, self.options.deep_window)
        self.steps += len(plan.steps) - sum(s.fixed for s in plan.steps)
        fullest = max(state.peak[d] for d in self.node.devices)
        self.peak[stage.worker] = max(self.peak[stage.worker], fullest)
        return clock.now


def stage_plan(plan: StageGraph, stage: Stage, node: Machine, options: Options) -> Plan:
    """The plan by which a worker with these devices would run a stage, with nothing for values."""
    graph = plan.portion(stage)
    compile_tasks(graph)
    given = [k for keys in stage.reads.values() for k in keys]
    graph.put_in_front({k: Task(k, _placeholder_value) for k in given})
    graph.outputs += tuple(given)  # nothing may swallow them
    _, out = plan_graph(graph, node, None, "cuda", options)
    steps = list(out.steps)
    for key in given:
        i = out.index[key]
        steps[i] = replace(steps[i], nbytes=plan.nbytes[key], seconds=0.0, fixed=True)
    return replace(out, steps=steps)


def _placeholder_value() -> None:
    raise AssertionError("a simulation computes nothing")
