"""Simulated devices: values in order, values in any order, or only a clock.

They ship with the package: tests of all decisions run on them, and `predict` estimates with
`ClockDevices` the time and memory of a run.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Mapping
from heapq import heappop, heappush
from typing import Any

from ..errors import Interrupted
from ..plan.machine import DISK, HOST
from ..plan.plan import Footprint, Plan
from ..values import part_of, sizeof
from .events import Copied, Done, Event, Failed, Issued, NoRoom
from .loop import run
from .observe import RunRecord
from .state import DEEP_WINDOW, WINDOW, deep_bytes
from .tape import LaunchTape


class InOrderDevices:
    """Every verb takes effect at once, in this thread; each memory has its own values.

    `nbytes` says how large each step's value is to be taken for; by default, as large as it is.
    """

    def __init__(self, plan: Plan, nbytes: Mapping[int, int] | None = None):
        self.plan, self.nbytes = plan, nbytes
        self.memory_of = plan.machine.memory_of
        self.values: dict[tuple[int, int], Any] = {
            (i, place): s.task({})
            for i, s in enumerate(plan.steps)
            if s.fixed
            for place in sorted(plan.there.get(i) or {self.memory_of(s.place)})
        }  # by step and memory
        self.events: list[Event] = []
        self.traffic: dict[tuple[int, int], int] = defaultdict(int)  # bytes over each link

    def size(self, step: int, value: Any) -> int:
        return sizeof(value) if self.nbytes is None else self.nbytes[step]

    def launch(self, step: int, place: int) -> None:
        s, memory = self.plan.steps[step], self.memory_of(place)
        try:
            value = s.task(s.values(lambda j: self.values[j, memory]))
        except BaseException as error:
            self.events.append(Failed(step, error))
            return
        self.values[step, memory] = value
        if s.again:
            self.values[step, DISK] = value
        nbytes = 0 if step in self.plan.into else self.size(step, value)
        self.events += [Issued(step, nbytes), Done(step)]

    def copy(self, step: int, src: int, dst: int) -> None:
        value = self.values[step, dst] = self.values[step, src]
        self.traffic[src, dst] += self.size(step, value)
        self.events.append(Copied(step, src, dst))

    def free(self, step: int, place: int) -> None:
        del self.values[step, place]

    def wait(self) -> list[Event]:
        assert self.events, "nothing is under way: the state machine is stuck"
        out, self.events = self.events, []
        return out

    def follow(self, tape: LaunchTape) -> bool:
        for place, orders in tape.orders:
            for verb, step, others in orders:
                if verb == "launch":
                    self.launch(step, place)
                elif verb == "fetch":
                    self.copy(step, others[0], place)
                else:
                    self.free(step, place)
                failed = next((e for e in self.events if type(e) is Failed), None)
                if failed is not None:
                    raise failed.error
                self.events.clear()
        return True

    def observe(self, record: RunRecord) -> None:
        pass

    def interrupt(self) -> None:
        self.events.append(Failed(-1, Interrupted()))

    def value(self, step: int) -> Any:
        return next(v for (i, _), v in self.values.items() if i == step)

    def keep(self, step: int) -> dict[int, Any]:
        return {place: value for (i, place), value in self.values.items() if i == step}

    def keep_part(self, step: int, path: tuple[int, ...]) -> tuple[dict[int, Any], int]:
        parts = {place: part_of(value, path) for place, value in self.keep(step).items()}
        return parts, max(map(sizeof, parts.values()))

    def close(self) -> None:
        self.values.clear()


class ShuffledDevices(InOrderDevices):
    """Work lands late and in any order, one event at a time: races without threads.

    With `refuse`, an allocation that does not fit the true sizes is refused, as a GPU would.
    """

    def __init__(
        self,
        plan: Plan,
        rng: random.Random,
        nbytes: Mapping[int, int] | None = None,
        refuse: bool = False,
    ):
        super().__init__(plan, nbytes)
        self.rng, self.refuse = rng, refuse
        self.flying: list[tuple[Callable[..., None], tuple[int, ...]]] = []

    def launch(self, step: int, place: int) -> None:
        memory = self.memory_of(place)
        queued = {
            i
            for i, *places in map(_arguments, self.flying)
            if places[0] != DISK and places[-1] == (place if len(places) == 1 else memory)
            if not (len(places) == 1 and self.plan.steps[i].aside)
        }
        aside = self.plan.steps[step].aside
        for j in self.plan.steps[step].inputs:
            here = (j, memory) in self.values or (j in queued and not aside)
            assert here, f"step {step}: its input {j} is not on {place}"
        self.flying.append((super().launch, (step, place)))

    def copy(self, step: int, src: int, dst: int) -> None:
        assert (step, src) in self.values, f"copy of step {step}, which is not on {src}"
        self.flying.append((super().copy, (step, src, dst)))

    def free(self, step: int, place: int) -> None:
        for _, (i, *places) in self.flying:
            reads = self.plan.steps[i].inputs if len(places) == 1 else (i,)
            used = step in reads and self.memory_of(places[0]) == place
            assert not used, f"step {step} freed while it is read"
        super().free(step, place)

    def wait(self) -> list[Event]:
        if not self.events:
            assert self.flying, "nothing is under way: the state machine is stuck"
            verb, args = self.flying.pop(self.rng.choice(self._possible_arrivals()))
            step, place = args[0], args[-1]
            inputs = self.plan.steps[step].inputs if len(args) == 2 else ()
            if any((j, self.memory_of(place)) not in self.values for j in inputs):
                self.events.append(NoRoom(step, place, 0))
            elif self._is_refused(step, place):
                nbytes = self.plan.steps[step].nbytes if self.nbytes is None else self.nbytes[step]
                self.events.append(NoRoom(step, place, nbytes))
            else:
                verb(*args)
        return [self.events.pop(0)]  # Issued and Done may be far apart too

    def _possible_arrivals(self) -> list[int]:
        """The numbers of the things on their way that may arrive next.

        These are the first on its way to each device, any copy to the host, any to or from the
        disk, and any step that runs aside.
        """
        seen: set[int] = set()
        out = []
        for n, (_, args) in enumerate(self.flying):
            place = args[-1]
            aside = len(args) == 2 and self.plan.steps[args[0]].aside
            if place < 0 or args[1] == DISK or aside:
                out.append(n)
                continue
            if place not in seen:
                out.append(n)
            seen.add(place)
        return out

    def _is_refused(self, step: int, place: int) -> bool:
        return self.refuse and place >= 0 and not self._fits(step, self.memory_of(place))

    def _fits(self, step: int, memory: int) -> bool:
        assert self.nbytes is not None
        machine = self.plan.machine
        held = sum(
            self.nbytes[i]
            for i, p in self.values
            if p == memory and not (machine.shared and self.plan.is_callers(i))
        )
        return held + self.nbytes[step] <= machine.limit(memory)


def _arguments(flying: tuple[Callable[..., None], tuple[int, ...]]) -> tuple[int, ...]:
    return flying[1]


class ClockDevices:
    """Nothing runs: how long would the plan take, and how full would each place get?

    Every device works on one step at a time, every link carries one copy at a time; `issue` is
    what the host spends on each instruction, in seconds.
    """

    def __init__(self, plan: Plan, nbytes: Mapping[int, int] | None = None, issue: float = 5e-6):
        self.plan, self.issue = plan, issue
        self.nbytes = nbytes if nbytes is not None else [s.nbytes for s in plan.steps]
        self.now = 0.0
        self.free_at: dict[Any, float] = defaultdict(float)  # engine -> when it is idle again
        self.exists: dict[tuple[int, int], float] = {}  # (step, place) -> since when
        self.used: dict[int, int] = defaultdict(int)
        self.peak: dict[int, int] = defaultdict(int)
        self.memory_of = plan.machine.memory_of
        for i, s in enumerate(plan.steps):
            if s.fixed:
                for memory in sorted(plan.there.get(i) or {self.memory_of(s.place)}):
                    self.exists[i, memory] = 0.0
                    self._hold(i, memory)
        self.traffic: dict[tuple[int, int], int] = defaultdict(int)
        self.spans: list[tuple[Any, float, float, Any]] = []  # (engine, start, end, key)
        self._queue: list[tuple[float, int, Event]] = []
        self._count = 0

    def launch(self, step: int, place: int) -> None:
        self.now += self.issue
        s = self.plan.steps[step]
        memory = self.memory_of(place)
        begin = max([self.now, *(self.exists[j, memory] for j in s.inputs)])
        engine = ("aside", place) if s.aside else place
        end = self._occupy(engine, begin, s.seconds, s.key)
        self.exists[step, memory] = end
        if s.again:
            self.exists[step, DISK] = end
        self._hold(step, memory)
        nbytes = 0 if step in self.plan.into else self.nbytes[step]
        self._schedule_event(self.now, Issued(step, nbytes))
        self._schedule_event(end, Done(step))

    def copy(self, step: int, src: int, dst: int) -> None:
        n = self.nbytes[step]
        seconds = self.plan.machine.copy_seconds(n, src, dst)
        begin = max(self.now, self.exists[step, src])
        # one disk serves all, and is read and written at once
        link = (DISK, src == DISK) if DISK in (src, dst) else (src, dst)
        end = self._occupy(link, begin, seconds, self.plan.steps[step].key)
        self.exists[step, dst] = end
        self.traffic[src, dst] += n
        self._hold(step, dst)
        self._schedule_event(end, Copied(step, src, dst))

    def free(self, step: int, place: int) -> None:
        del self.exists[step, place]
        self.used[place] -= self._counted_bytes(step, place)

    def wait(self) -> list[Event]:
        time, _, event = heappop(self._queue)
        self.now = max(self.now, time)
        out = [event]
        while self._queue and self._queue[0][0] <= self.now:
            out.append(heappop(self._queue)[2])
        return out

    def follow(self, tape: LaunchTape) -> bool:
        return False  # it says when things happen

    def observe(self, record: RunRecord) -> None:
        pass

    def interrupt(self) -> None:
        self._schedule_event(self.now, Failed(-1, Interrupted()))

    def value(self, step: int) -> Any:
        raise TypeError("a clock has no values")

    def keep(self, step: int) -> dict[int, Any]:
        raise TypeError("a clock has no values")

    def keep_part(self, step: int, path: tuple[int, ...]) -> tuple[dict[int, Any], int]:
        raise TypeError("a clock has no values")

    def close(self) -> None:
        self.exists.clear()

    def _schedule_event(self, time: float, event: Event) -> None:
        self._count += 1
        heappush(self._queue, (time, self._count, event))

    def _hold(self, step: int, place: int) -> None:
        self.used[place] += self._counted_bytes(step, place)
        self.peak[place] = max(self.peak[place], self.used[place])

    def _counted_bytes(self, step: int, place: int) -> int:
        """Bytes that count: not results on the host, nor, in its memory, the graph's values."""
        given = self.plan.machine.shared and self.plan.is_callers(step)
        delivered = place == HOST and step in self.plan.deliver
        delivered = delivered or (place == DISK and self.plan.steps[step].again)
        return 0 if given or delivered else self.nbytes[step]

    def _occupy(self, engine: Any, begin: float, seconds: float, key: Any) -> float:
        start = max(begin, self.free_at[engine])
        self.free_at[engine] = end = start + seconds
        self.spans.append((engine, start, end, key))
        return end


class LateClock(ClockDevices):
    """Like its base, but one device is ahead of all others.

    The others go on only when that one has nothing to do.

    Without `first` none is ahead, and what is queued ends only when nothing else can happen.
    """

    def __init__(self, plan: Plan, first: int | None = None):
        super().__init__(plan)
        self.first = first

    def wait(self) -> list[Event]:
        return [heappop(self._queue)[2]]

    def _schedule_event(self, time: float, event: Event) -> None:
        """By who is ahead instead of by time."""
        if self.first is None:
            last = type(event) is not Issued
        else:
            last = self.plan.steps[event.step].place != self.first
        super()._schedule_event(float(last), event)


def predict(
    plan: Plan, window: int = WINDOW, deep_window: int = DEEP_WINDOW, ahead: bool = True
) -> Footprint:
    """Predict the footprint of a run of the plan; raises `OutOfMemory` where it cannot work.

    Time and traffic are the clock's. Memory is the most that any of several orders takes in which
    work may end, and one window more, for there are more orders than these, and what a task on each
    device is known to take while it runs; spilling, too, is the most of them.
    """
    clock = ClockDevices(plan)
    states = [run(plan, clock, None, window, deep_window, ahead)]
    for first in (None, *plan.machine.devices):
        states.append(run(plan, LateClock(plan, first), None, window, deep_window, ahead))
    slack = _in_windows(plan, window, deep_window)
    most, largest = plan.bytes_by_memory(), _largest_working_memory(plan)
    peak = {}
    for place in states[0].peak:
        peak[place] = max(s.peak[place] for s in states)
        if place >= 0:
            values = max(peak[place], min(peak[place] + slack[place], most[place]))
            more = min(values + plan.task_memory, plan.machine.limit(place))
            peak[place] = max(peak[place], more, largest[place])
    spilled = {p: max(s.spilled[p] for s in states) for p in states[0].spilled}
    return Footprint(clock.now, peak, states[0].traffic, spilled)


def _largest_working_memory(plan: Plan) -> dict[int, int]:
    """The most working memory that any one step needs, with its values, by memory.

    This may go beyond the limit: no step is refused for it.
    """
    out: dict[int, int] = dict.fromkeys(plan.machine.memories, 0)
    steps, shared, takes = plan.steps, plan.machine.shared, plan.task_memory_by_kind
    for step in steps:
        extra = 0 if step.fixed else takes.get(step.kind, 0)
        if extra:
            memory = plan.machine.memory_of(step.place)
            reads = [j for j in step.inputs if not (shared and plan.is_callers(j))]
            touched = step.nbytes + sum([steps[j].nbytes for j in reads])
            out[memory] = max(out[memory], touched + extra)
    return out


def _in_windows(plan: Plan, window: int, deep_window: int) -> dict[int, int]:
    """Bytes that the steps under way may make, by memory."""
    machine = plan.machine
    largest = dict.fromkeys(machine.devices, 0)
    for step in plan.steps:
        largest[step.place] = max(largest[step.place], step.nbytes)
    out: dict[int, int] = dict.fromkeys(machine.memories, 0)
    for d, nbytes in largest.items():
        deep = min(deep_window * nbytes, deep_bytes(machine, d))
        out[machine.memory_of(d)] += max(window * nbytes, deep)
    return out
