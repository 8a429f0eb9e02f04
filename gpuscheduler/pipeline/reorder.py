"""Reorder steps where devices would wait for each other.

Dask's order goes deep first, so that values are soon read. Devices obey in order, and where each
needs edges of the others' blocks in every round, one that comes to such a block early waits for a
device that is about to make that edge late. There the steps that most of the work still stands
behind come first (the upward rank of HEFT: Topcuoglu, Hariri and Wu 2002, "Performance-effective
and low-complexity task scheduling for heterogeneous computing"): it is done where the clock says
that it saves time, and where memory is enough for what is then made earlier.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

from ..errors import OutOfMemory
from ..frontend.graph import Graph
from ..plan.build import make_plan
from ..plan.plan import Plan
from ..runtime.loop import run
from ..runtime.simulated import ClockDevices

#: What part of its time has to be saved for another order.
SAVED = 1 / 20
#: Steps take what they took before, or no more than this part of their device's memory.
ROOM = 1 / 4
#: Steps of a plan whose order is looked at, at most: it takes up to
#: 100 µs for each.
MOST = 10_000


def reorder_steps(
    graph: Graph, plan: Plan, home: Callable[[Any], int | None] | None
) -> tuple[Graph, Plan]:
    """The graph and its plan, in another order if that is done sooner."""
    steps, machine = plan.steps, plan.machine
    if machine.shared or len(machine.devices) == 1 or not any(plan.crossings):
        return graph, plan
    if len(steps) > MOST or any(s.aside for s in steps):
        return graph, plan  # what reads files is ordered by what fits
    busy = dict.fromkeys(machine.devices, 0.0)
    for s in steps:
        busy[s.place] += 0 if s.fixed else s.seconds
    try:
        before = _clock(plan)
        if max(busy.values()) > (1 - SAVED) * before.now:
            return graph, plan
        order = [steps[i].key for i in by_rank(plan)]
        other = graph.copy()
        other.reorder(order)
        other.pin({s.key: s.place for s in steps})
        changed = make_plan(other, machine, home)
        after = _clock(changed)
    except OutOfMemory:  # it is said when it happens, if it does
        return graph, plan
    room = [max(before.peak[d], int(ROOM * machine.memory[d])) for d in machine.devices]
    if after.now > (1 - SAVED) * before.now or any(after.peak[d] > n for d, n in enumerate(room)):
        return graph, plan
    return other, changed


def _clock(plan: Plan) -> ClockDevices:
    """Devices that have run the plan against the clock."""
    devices = ClockDevices(plan)
    run(plan, devices, None)
    return devices


def _link(plan: Plan, i: int, to: int) -> float:
    """How long a value is on its way to another device."""
    return plan.machine.copy_seconds(plan.steps[i].nbytes, plan.steps[i].place, to)


def ranks(plan: Plan) -> list[float]:
    """How long it takes from the beginning of each step to the end of all that waits for it."""
    steps, out = plan.steps, [0.0] * len(plan.steps)
    for i in range(len(steps) - 1, -1, -1):
        place = steps[i].place
        after = [
            out[r] + (0 if steps[r].place == place else _link(plan, i, steps[r].place))
            for r in plan.readers[i]
        ]
        out[i] = steps[i].seconds + max(after, default=0.0)
    return out


def by_rank(plan: Plan) -> list[int]:
    """Order the steps by rank: a free device takes the highest-ranked step that can begin.

    Of steps of equal rank, the first in the plan comes first.
    """
    steps, readers, rank = plan.steps, plan.readers, ranks(plan)
    missing = [len(s.inputs) for s in steps]
    latest = [0.0] * len(steps)  # when the last of its inputs comes
    ready: dict[int, list[tuple[float, int]]] = {d: [] for d in plan.machine.devices}
    idle = set(plan.machine.devices)
    free: dict[tuple[int, int], float] = defaultdict(float)
    events: list[tuple[float, int, bool]] = []  # a step can begin, or is done
    out: list[int] = []
    for i, n in enumerate(missing):
        if not n:
            heappush(events, (0.0, i, False))
    while events:
        now = events[0][0]
        while events and events[0][0] == now:
            _, i, done = heappop(events)
            d = steps[i].place
            if not done and not steps[i].fixed:
                heappush(ready[d], (-rank[i], i))
                continue
            if done:
                idle.add(d)
            else:  # it is there before the run
                out.append(i)
            come: dict[int, float] = {d: now}
            for r in readers[i]:
                to = steps[r].place
                if to not in come:
                    come[to] = free[d, to] = max(now, free[d, to]) + _link(plan, i, to)
                latest[r] = max(latest[r], come[to])
                missing[r] -= 1
                if not missing[r]:
                    heappush(events, (latest[r], r, False))
        for d in sorted(idle):
            if ready[d]:
                _, i = heappop(ready[d])
                idle.discard(d)
                out.append(i)
                heappush(events, (now + steps[i].seconds, i, True))
    return out
