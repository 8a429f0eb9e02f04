"""Launch tapes: the orders of a run that needs no decisions.

Written down once, and followed from then on without a look at what has happened.

A run asks `State` what to do next because memory may be short and because values may be needed that
are not there yet. Where everything fits and devices obey in order, the answers are the same each
time. To follow them takes a fraction of the time, which is the host's, and with small steps on
several devices that is what a run waits for.

What other devices read stays until the end: nobody waits to hear that they have read it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..errors import OutOfMemory
from ..plan.plan import Footprint, Plan
from .events import Copied, Copy, Done, Event, Issued, Launch
from .state import State

Order = tuple[str, int, int]  # a verb, a step, and where else it is or goes


@dataclass(frozen=True, eq=False, repr=False)
class LaunchTape:
    """The launches and copies of a run, written down to be replayed by one thread.

    The orders of one entry go to one device. A launch also has the replicas that it waits for and
    no launch before it has waited for.

    It holds no plan: that has arrays.
    """

    orders: list[tuple[int, list[tuple[str, int, tuple[int, ...]]]]]
    need: dict[int, int]  # bytes on each device at most, with those of the chunks that it reads
    rest: dict[int, int]  # ... and without the `last`, results that nobody reads
    last: tuple[int, ...]
    nbytes: list[int]  # of each step
    took: Footprint  # but seconds

    def __repr__(self) -> str:
        return f"<Tape of orders for {len(self.nbytes):,} steps>"

    def footprint(
        self, seconds: float, others: dict[int, int], need: dict[int, int] | None = None
    ) -> Footprint:
        """The footprint of a replay, beside bytes of others on each device.

        `need` replaces the bytes on devices that the tape itself says.
        """
        peak = {**self.took.peak, **self.need, **(need or {})}
        peak = {p: n + others.get(p, 0) for p, n in peak.items()}
        return replace(self.took, seconds=seconds, peak=peak)


def rehearse(plan: Plan) -> LaunchTape | None:
    """Write down a run in which everything happens at once.

    None where a value has to leave a device, or goes to the host.

    >>> from gpuscheduler.frontend.lowering import from_dask
    >>> from gpuscheduler.plan.machine import Machine
    >>> from gpuscheduler.plan.build import make_plan
    >>> tasks = {"a": (int,), "b": (int,), "c": (max, "a", "b")}
    >>> graph = from_dask(tasks, "c")
    >>> graph.pin({"a": 0, "b": 1, "c": 0})
    >>> tape = rehearse(make_plan(graph, Machine.uniform(2)))
    >>> for place, orders in tape.orders:
    ...     print(place, orders)
    0 [('launch', 0, ())]
    1 [('launch', 1, ())]
    0 [('fetch', 1, (1,))]
    0 [('launch', 2, (1,))]
    0 [('free', 0, ())]
    """
    if plan.deliver or plan.machine.shared:
        return None
    state = State(plan)
    rounds: list[tuple[int, list[Order]]] = []
    crossed: set[int] = set()
    last = [i for i in plan.outputs if not plan.readers[i] and not plan.steps[i].fixed]
    ends, rest = set(last), dict.fromkeys(plan.machine.devices, 0)
    made = dict(rest)  # bytes of these
    late = dict.fromkeys(plan.machine.devices, 0)  # bytes that stay longer than `state` thinks
    try:
        instructions = state.start()
        while True:
            todo: list[list[Order]] = [[] for _ in plan.machine.devices]
            events: list[Event] = []
            for ins in instructions:
                step = plan.steps[ins.step]
                if isinstance(ins, Copy):
                    if ins.src < 0 or ins.dst < 0:
                        return None
                    todo[ins.dst].append(("fetch", ins.step, ins.src))
                    events.append(Copied(ins.step, ins.src, ins.dst))
                    late[ins.dst] += step.nbytes
                    if ins.step not in crossed and not step.fixed:
                        late[step.place] += step.nbytes
                    crossed.add(ins.step)
                elif isinstance(ins, Launch):
                    if step.aside:
                        return None
                    todo[ins.place].append(("launch", ins.step, ins.place))
                    events += [Issued(ins.step, step.nbytes), Done(ins.step)]
                    if ins.step in ends:
                        made[ins.place] += step.nbytes
                elif ins.place == step.place:
                    todo[ins.place].append(("free", ins.step, ins.place))
            rounds += interleave_orders(plan, todo)
            rest = {d: max(n, state.used[d] - made[d]) for d, n in rest.items()}
            if state.is_finished:
                break
            instructions = state.handle(*events)
    except OutOfMemory:
        return None
    need = {d: state.peak[d] + n for d, n in late.items()}
    if any(n > plan.machine.memory[d] for d, n in need.items()):
        return None
    rest = {d: n + late[d] for d, n in rest.items()}
    orders = _with_waits(plan, rounds, crossed)
    return LaunchTape(orders, need, rest, tuple(last), state.nbytes, state.footprint(0.0))


def _with_waits(
    plan: Plan, rounds: list[tuple[int, list[Order]]], crossed: set[int]
) -> list[tuple[int, list[tuple[str, int, tuple[int, ...]]]]]:
    out: list[tuple[int, list[tuple[str, int, tuple[int, ...]]]]] = []
    coming: list[set[int]] = [set() for _ in plan.machine.devices]
    for place, orders in rounds:
        mine: list[tuple[str, int, tuple[int, ...]]] = []
        for verb, step, other in orders:
            if verb == "fetch":
                coming[place].add(step)
                mine.append((verb, step, (other,)))
            elif verb == "launch":
                waits = [j for j in plan.steps[step].inputs if j in coming[place]]
                coming[place].difference_update(waits)
                mine.append((verb, step, tuple(waits)))
            elif step not in crossed:
                mine.append((verb, step, ()))
        if mine:
            out.append((place, mine))
    return out


def interleave_orders(plan: Plan, todo: list[list[Order]]) -> Iterator[tuple[int, list[Order]]]:
    """Mix the orders to several devices, so that each soon has work.

    Each device gets one order, then two, then four.
    """
    turns = [_turns(plan, place, mine) for place, mine in enumerate(todo)]
    for turn in sorted(set().union(*turns)):
        left = [mine.get(turn, []) for mine in turns]
        count = 1
        while any(left):
            for place, mine in enumerate(left):
                if mine:
                    left[place] = mine[count:]
                    yield place, mine[:count]
            count *= 2


def by_turns(plan: Plan, place: int, todo: list[Order]) -> list[Order]:
    """Orders to one device, sorted by turn."""
    turns = _turns(plan, place, todo)
    return [order for turn in sorted(turns) for order in turns[turn]]


def _turns(plan: Plan, place: int, todo: list[Order]) -> dict[int, list[Order]]:
    """Group the orders to one device by turn: copies from the next device come first.

    Then come the copies from the device behind it, and so on. If all devices began with the same
    one, they would share its bandwidth. A device sends in the order in which copies from it are
    queued.

    What a launch reads still comes before it, and what needs no copy does not wait for one.
    """
    if len({other for verb, _, other in todo if verb == "fetch"}) < 2:
        return {0: todo} if todo else {}
    devices = len(plan.machine.devices)
    turn: dict[int, int] = {}  # of each value that is ordered here
    for verb, step, other in todo:
        if verb == "fetch":
            turn[step] = (other - place) % devices if other >= 0 else 0
        elif verb == "launch":
            turn[step] = max([turn.get(j, 0) for j in plan.steps[step].inputs], default=0)
        else:  # it may make room for what follows
            return {0: todo}
    out: dict[int, list[Order]] = {}
    for order in todo:
        out.setdefault(turn[order[1]], []).append(order)
    return out
