"""Launch tapes: the launches and copies of a run, recorded once and replayed without decisions.

A run asks `State` what to do next, because memory may be short and because values may be needed
that are not there yet. Where all values fit and each device works in order, the answers are the
same each time. Replaying them takes a fraction of the host's time, which is what a run of small
steps on several devices waits for.

A value that another device has copied stays until the end of the run: a replay does not wait to
hear that the copy is done.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..errors import OutOfMemory
from ..plan.plan import Footprint, Plan
from .events import Copied, Copy, Done, Event, Issued, Launch
from .state import State

#: "fetch", "launch" or "free"; a step; the source of a fetch, else the device itself.
Order = tuple[str, int, int]


@dataclass(frozen=True, eq=False, repr=False)
class LaunchTape:
    """The recorded launches and copies of a run, which one thread replays.

    Each entry of `orders` is a device and its orders. A launch lists the fetched values that it is
    the first to wait for.

    A tape does not refer to its plan, which would keep the plan's arrays alive.
    """

    orders: list[tuple[int, list[tuple[str, int, tuple[int, ...]]]]]
    #: Peak bytes on each device, with the persisted chunks that the run reads.
    peak: dict[int, int]
    #: Peak bytes on each device without the values of `unread`.
    peak_without_unread: dict[int, int]
    #: Steps whose values are outputs that no step reads.
    unread: tuple[int, ...]
    #: Bytes of each step's value.
    nbytes: list[int]
    #: What the simulated run took. Its seconds are 0.
    simulated: Footprint

    def __repr__(self) -> str:
        return f"<Tape of orders for {len(self.nbytes):,} steps>"

    def footprint(
        self, seconds: float, others: dict[int, int], peak: dict[int, int] | None = None
    ) -> Footprint:
        """The footprint of a replay, with `others`: bytes of other runs on each device.

        `peak` replaces the tape's own peaks, by device.
        """
        most = {**self.simulated.peak, **self.peak, **(peak or {})}
        most = {p: n + others.get(p, 0) for p, n in most.items()}
        return replace(self.simulated, seconds=seconds, peak=most)


def record_tape(plan: Plan) -> LaunchTape | None:
    """Record a simulated run in which each launch and copy completes at once, in order.

    None where the devices' memory does not suffice, where a value has to be copied to or from the
    host, and where a step reads or writes a file.

    >>> from gpuscheduler.frontend.lowering import from_dask
    >>> from gpuscheduler.plan.machine import Machine
    >>> from gpuscheduler.plan.build import make_plan
    >>> tasks = {"a": (int,), "b": (int,), "c": (max, "a", "b")}
    >>> graph = from_dask(tasks, "c")
    >>> graph.pin({"a": 0, "b": 1, "c": 0})
    >>> tape = record_tape(make_plan(graph, Machine.uniform(2)))
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
    copied: set[int] = set()  # steps whose values another device fetches
    unread = [i for i in plan.outputs if not plan.readers[i] and not plan.steps[i].fixed]
    unread_set = set(unread)
    peak_without_unread = dict.fromkeys(plan.machine.devices, 0)
    unread_bytes = dict.fromkeys(plan.machine.devices, 0)
    #: Bytes that a replay frees at the end, and `state` counts as freed earlier.
    extra = dict.fromkeys(plan.machine.devices, 0)
    try:
        instructions = state.start()
        while True:
            todo: list[list[Order]] = [[] for _ in plan.machine.devices]
            events: list[Event] = []
            for instruction in instructions:
                step = plan.steps[instruction.step]
                if isinstance(instruction, Copy):
                    if instruction.src < 0 or instruction.dst < 0:
                        return None
                    todo[instruction.dst].append(("fetch", instruction.step, instruction.src))
                    events.append(Copied(instruction.step, instruction.src, instruction.dst))
                    extra[instruction.dst] += step.nbytes
                    if instruction.step not in copied and not step.fixed:
                        extra[step.place] += step.nbytes
                    copied.add(instruction.step)
                elif isinstance(instruction, Launch):
                    if step.aside:
                        return None
                    todo[instruction.place].append(("launch", instruction.step, instruction.place))
                    events += [Issued(instruction.step, step.nbytes), Done(instruction.step)]
                    if instruction.step in unread_set:
                        unread_bytes[instruction.place] += step.nbytes
                elif instruction.place == step.place:
                    todo[instruction.place].append(("free", instruction.step, instruction.place))
            rounds += interleave_orders(plan, todo)
            for d in plan.machine.devices:
                used = state.used[d] - unread_bytes[d]
                peak_without_unread[d] = max(peak_without_unread[d], used)
            if state.is_finished:
                break
            instructions = state.handle(*events)
    except OutOfMemory:
        return None
    peak = {d: state.peak[d] + n for d, n in extra.items()}
    if any(n > plan.machine.memory[d] for d, n in peak.items()):
        return None
    return LaunchTape(
        _add_waits(plan, rounds, copied),
        peak,
        {d: n + extra[d] for d, n in peak_without_unread.items()},
        tuple(unread),
        state.nbytes,
        state.footprint(0.0),
    )


def _add_waits(
    plan: Plan, rounds: list[tuple[int, list[Order]]], copied: set[int]
) -> list[tuple[int, list[tuple[str, int, tuple[int, ...]]]]]:
    """Give each launch the fetches that it is the first to wait for.

    Orders to free a value that another device fetches are left out.
    """
    out: list[tuple[int, list[tuple[str, int, tuple[int, ...]]]]] = []
    fetched: list[set[int]] = [set() for _ in plan.machine.devices]
    for place, orders in rounds:
        mine: list[tuple[str, int, tuple[int, ...]]] = []
        for verb, step, other in orders:
            if verb == "fetch":
                fetched[place].add(step)
                mine.append((verb, step, (other,)))
            elif verb == "launch":
                waits = [j for j in plan.steps[step].inputs if j in fetched[place]]
                fetched[place].difference_update(waits)
                mine.append((verb, step, tuple(waits)))
            elif step not in copied:
                mine.append((verb, step, ()))
        if mine:
            out.append((place, mine))
    return out


def interleave_orders(plan: Plan, todo: list[list[Order]]) -> Iterator[tuple[int, list[Order]]]:
    """Interleave the orders to several devices, so that each soon has work.

    Each device gets one order, then two, then four.
    """
    turns = [_group_by_turn(plan, place, mine) for place, mine in enumerate(todo)]
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
    turns = _group_by_turn(plan, place, todo)
    return [order for turn in sorted(turns) for order in turns[turn]]


def _group_by_turn(plan: Plan, place: int, todo: list[Order]) -> dict[int, list[Order]]:
    """Group the orders to one device by turn: copies from the next device come first.

    Copies from the device after it are the second turn, and so on, as in a ring: if all devices
    copied from the same one first, they would share its bandwidth. A device sends in the order in
    which copies from it are queued.

    A launch has the latest turn of the values that it reads, so one that needs no copy waits for
    none.
    """
    if len({other for verb, _, other in todo if verb == "fetch"}) < 2:
        return {0: todo} if todo else {}
    devices = len(plan.machine.devices)
    turn: dict[int, int] = {}  # of each value that is copied to this device or computed on it
    for verb, step, other in todo:
        if verb == "fetch":
            turn[step] = (other - place) % devices if other >= 0 else 0
        elif verb == "launch":
            turn[step] = max([turn.get(j, 0) for j in plan.steps[step].inputs], default=0)
        else:  # a free may make room for the orders that follow it
            return {0: todo}
    out: dict[int, list[Order]] = {}
    for order in todo:
        out.setdefault(turn[order[1]], []).append(order)
    return out
