"""Bytes that our evictions move, beside the fewest that any eviction could.

`python -m graphs.bench eviction` prints the table of RESULTS.md. Nothing is computed: the devices
are simulated.

The devices' memory is a quarter of the working set: of the most bytes on one device when nothing
has to leave. Needs SciPy.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import dask
import dask.array as da
from dask.core import flatten
from scipy.optimize import Bounds, LinearConstraint, milp  # type: ignore[import-untyped]
from scipy.sparse import csr_matrix  # type: ignore[import-untyped]

from gpuscheduler.frontend.chunk import Chunk, ChunkTask
from gpuscheduler.frontend.lowering import from_dask, received_by_scheduler
from gpuscheduler.options import Options
from gpuscheduler.pipeline.compile import plan_graph
from gpuscheduler.plan.machine import ENDLESS, Machine
from gpuscheduler.plan.plan import Plan
from gpuscheduler.runtime.loop import run
from gpuscheduler.runtime.simulated import ClockDevices
from graphs import matmul, transpose_sum

CHUNK = 4096
BLOCKS = (8, 12, 16)  # a side
DEVICES = (1, 2, 4)


class Orderly(ClockDevices):
    """A clock that remembers in which order steps were launched."""

    def __init__(self, plan: Plan):
        super().__init__(plan)
        self.order: list[int] = []

    def launch(self, step: int, place: int) -> None:
        self.order.append(step)
        super().launch(step, place)


class Traffic(NamedTuple):
    """Bytes over all links of one run, and the fewest for its steps in its order."""

    ours: int
    fewest: float

    @property
    def ratio(self) -> float:
        return self.ours / self.fewest if self.fewest else 1.0


def traffic(plan: Plan) -> Traffic:
    """What a run of the plan moves. Computes nothing."""
    clock = Orderly(plan)
    run(plan, clock)
    return Traffic(sum(clock.traffic.values()), fewest(plan, clock.order))


def fewest(plan: Plan, order: Sequence[int]) -> float:
    """Bytes that must cross the links, whatever is evicted, when steps are launched in this order.

    Counted is each byte over each link: to the host, from the host, from device to device. A step
    needs its inputs and its result in its memory at once, and what it misses comes when it is
    launched, from anywhere. Between two uses a value is kept in a memory, or not, and then its next
    use there is a copy. A value that is in no memory between two uses was sent to the host before;
    once is enough, as values never change. The host has room for all of them.

    Were everything on the host at the start, blocks equal and devices one, this would be paging,
    for which to evict what is needed last is best (L. A. Belady, IBM Systems Journal 5, 1966;
    proved by R. L. Mattson and others, ibid. 9, 1970). Values that are made on the device must be
    sent away first, which Belady's rule does not count, and with that or with unequal sizes the
    best choice is hard to find. So this is a linear program in which a part of a value may be
    kept: each eviction is one of its points, so that its optimum is below them all. Where Belady's
    rule is the best the two are equal.

    Steps that wait for a file between their reservation and their launch are not covered, nor a
    device that takes in what another has no room for.
    """
    steps, memory_of = plan.steps, plan.machine.memory_of
    here = [memory_of(s.place) for s in steps]
    turn = {i: t for t, i in enumerate(order)}
    unit = max((s.nbytes for s in steps), default=1) or 1
    program = _Program(plan, order, unit)
    keep = {i for i, s in enumerate(steps) if s.fixed}.union(plan.outputs)
    constant = 0.0
    for v, step in enumerate(steps):
        size = step.nbytes / unit
        rooted = immovable(plan, v)
        uses: list[tuple[int, int | None]] = [
            (turn[r], here[r])
            for r in sorted(plan.readers[v], key=turn.__getitem__)
            if not (rooted and here[r] == here[v])
        ]
        if v in keep:
            uses.append((len(order), None))  # it must be somewhere at the end
        places = plan.there.get(v, {here[v]})
        held: dict[int, int | None] = {p: None for p in sorted(places) if p >= 0 and not rooted}
        saved = rooted or min(places) < 0  # there is always one elsewhere
        if v in plan.deliver and not saved:
            saved = True
            constant += size
        sent = None if saved else program.column(size)
        since = turn.get(v, -1)
        for t, memory in uses:
            kept = {d: program.kept(d, since, t, size, before) for d, before in held.items()}
            if sent is not None:
                program.at_least_one([sent, *kept.values()])
            if memory is not None:
                constant += size
                if memory in kept:
                    program.cost[kept[memory]] -= size
                held = {**kept, memory: None}
            since = t
    return (constant + program.least()) * unit


def immovable(plan: Plan, step: int) -> bool:
    """Whether a value stays where it is, whatever happens."""
    return plan.steps[step].fixed and step not in plan.there


class _Program:
    """A linear program; its variables are columns, from 0 to 1 unless told."""

    def __init__(self, plan: Plan, order: Sequence[int], unit: int):
        self.cost: list[float] = []
        self.upper: list[float] = []
        self.entries: list[tuple[int, int, float]] = []  # row, column, factor
        self.bounds: list[tuple[float, float]] = []  # of each row
        machine = plan.machine
        self.times: dict[int, list[int]] = {m: [] for m in machine.memories}
        self.first: dict[int, int] = {}  # memory -> the row of its first launch
        room = {m: machine.limit(m) for m in machine.memories}
        for i, s in enumerate(plan.steps):
            if immovable(plan, i):
                room[machine.memory_of(s.place)] -= s.nbytes
        free: dict[int, list[float]] = {m: [] for m in machine.memories}
        for t, i in enumerate(order):
            s = plan.steps[i]
            m = machine.memory_of(s.place)
            used = s.nbytes + sum(
                plan.steps[j].nbytes
                for j in s.inputs
                if not (immovable(plan, j) and machine.memory_of(plan.steps[j].place) == m)
            )
            self.times[m].append(t)
            free[m].append((room[m] - used) / unit)
        for m in machine.memories:  # what is kept beside each launch: that of the last, and changes
            self.first[m] = len(self.bounds)
            for n, most in enumerate(free[m]):
                used_here = self.column(0.0, most)
                self.row([(used_here, 1.0), *([(used_here - 1, -1.0)] if n else [])], 0.0, 0.0)

    def column(self, cost: float, upper: float = 1.0) -> int:
        self.cost.append(cost)
        self.upper.append(upper)
        return len(self.cost) - 1

    def row(self, entries: Iterable[tuple[int, float]], low: float, high: float) -> None:
        self.entries += [(len(self.bounds), column, factor) for column, factor in entries]
        self.bounds.append((low, high))

    def at_least_one(self, columns: Iterable[int]) -> None:
        self.row([(c, 1.0) for c in columns], 1.0, float("inf"))

    def kept(self, memory: int, since: int, until: int, size: float, before: int | None) -> int:
        """How much of a value is kept in a memory between two turns: no more than was `before`."""
        out = self.column(0.0)
        if before is not None:
            self.row([(out, 1.0), (before, -1.0)], -float("inf"), 0.0)
        times = self.times[memory]
        begin, end = bisect_right(times, since), bisect_left(times, until)
        if begin < end:
            self.entries.append((self.first[memory] + begin, out, -size))
            if end < len(times):
                self.entries.append((self.first[memory] + end, out, size))
        return out

    def least(self) -> float:
        """The optimum."""
        if not self.bounds:  # nothing stands in the way of anything
            return sum(min(0.0, c) for c in self.cost)
        rows, columns, factors = zip(*self.entries, strict=True)
        shape = len(self.bounds), len(self.cost)
        low, high = zip(*self.bounds, strict=True)
        found = milp(
            self.cost,
            bounds=Bounds(0, self.upper),
            constraints=LinearConstraint(csr_matrix((factors, (rows, columns)), shape), low, high),
        )
        if not found.success:
            raise ValueError(f"the steps cannot run in this order: {found.message}")
        return float(found.fun)


# ---- the table


class Nowhere:
    """What keeps chunks that have no value."""

    def device_value(self, places: Any) -> Any:
        return None

    def caller_value(self, key: Any, place: int, places: Any) -> Any:
        raise TypeError("a clock has no values")

    value_on_host = caller_value

    def forget(self, places: Any) -> None: ...


def planned(x: da.Array, devices: int, memory: int) -> Plan:
    """The plan by which so many GPUs would persist x."""
    dsk, keys = received_by_scheduler(x, by=dask.persist)

    def home(value: Any) -> int | None:
        return value.place if type(value) is Chunk else None

    graph = from_dask(dsk, keys, home=home, front=0)
    machine = Machine.uniform(devices, memory=memory)
    _, plan = plan_graph(graph, machine, home, "cuda", Options())
    return plan.with_chunks(plan.chunks.values())


def persisted(x: da.Array, devices: int, memory: int) -> da.Array:
    """x as it is when it has been persisted: its chunks where that run leaves them."""
    plan = planned(x, devices, memory)
    state = run(plan, ClockDevices(plan))
    chunks = {}
    for key in flatten(x.__dask_keys__()):
        i = plan.index[key]
        step = plan.steps[i]
        places = dict.fromkeys(sorted(state.where[i]))
        chunks[key] = ChunkTask(key, Chunk(key, step.place, step.nbytes, places, Nowhere()))
    return da.Array(chunks, x.name, x.chunks, meta=x._meta)


def working_set(plan: Plan) -> int:
    """The most bytes on one device, where nothing has to leave and one step runs at a time."""
    state = run(plan, ClockDevices(plan), None, window=1, deep_window=1)
    return max(state.peak[d] for d in plan.machine.memories)


def limited(workload: ModuleType, blocks: int, devices: int, made: bool) -> Plan:
    """The plan of a workload, of so many blocks a side, for a quarter of its working set.

    Its input is persisted before, under that limit; or `made` in the same run.
    """
    (x,) = workload.inputs(blocks * CHUNK, CHUNK)

    def on(memory: int) -> Plan:
        begin = x if made else persisted(x, devices, memory)
        return planned(workload.apply(begin), devices, memory)

    return on(working_set(on(ENDLESS)) // 4)


def main() -> None:
    block = 4 * CHUNK**2
    print("workload, input, blocks, devices, limit, ours, fewest, ratio (in blocks of 64 MiB)")
    for workload in (transpose_sum, matmul):
        name = workload.__name__.rpartition(".")[2]
        for made in (False, True):
            for blocks in BLOCKS:
                for devices in DEVICES:
                    if workload is transpose_sum and made and devices == 1:
                        continue  # each block is made where it is read: nothing has to stay
                    plan = limited(workload, blocks, devices, made)
                    found = traffic(plan)
                    words = [name, "made" if made else "persisted", f"{blocks}²", str(devices)]
                    limit = plan.machine.memory[0] / block
                    ours, least = found.ours / block, found.fewest / block
                    words += [f"{limit:.1f}", f"{ours:.0f}", f"{least:.1f}", f"{found.ratio:.2f}"]
                    print("|", " | ".join(words), "|", flush=True)


if __name__ == "__main__":
    main()
