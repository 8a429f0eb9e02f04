"""Decide what to do next: events in, instructions out.

`State` knows no device, no thread and no clock.

A step goes through these states:

waiting    for its inputs
ready      in the heap of its device
reserved   its room is set aside, and its inputs are on their way
launched   handed to its device
issued     queued on its device: readers on other devices may follow
done       it no longer needs its inputs

Values never change. So the state of a value is the set of places that hold a replica of it.

A device obeys in order. So a reader is launched right behind the steps and copies that it reads on
the same device, without waiting for the way to the host and back. A device follows the plan's
order, which keeps its memory small.

Steps that read or write a file are in no queue. They run aside, when all their inputs are there,
and their readers wait until they are issued.

When a memory is full, values leave it: from a device to the host, from the host to the disk. The
value that is needed last leaves first. Devices that share the host's memory have only the disk.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from heapq import heapify, heappop, heappush
from math import inf

from ..errors import OutOfMemory
from ..plan.machine import DISK, HOST, Machine
from ..plan.plan import SHORT, Footprint, Plan, does_not_fit, no_room
from . import events as runtime_events
from .events import NOWHERE, Copied, Copy, Done, Event, Free, Instruction, Issued, Launch, NoRoom

#: Steps that may be under way on one device: few, so that values are used soon after they are made.
WINDOW = 4
#: Steps that may be under way on one device when all that they make and fetch is small beside its
#: memory: enough to hide the way to the device and back.
DEEP_WINDOW = 64
#: The part of a device's memory that counts as small for `DEEP_WINDOW`.
SHARE = 1 / 20
#: Bytes that count as small at most where devices are threads: values should still be in the
#: processor's caches when they are read, and later values reuse their memory.
DEEP_BYTES = 2**24
#: The part of a memory that files read ahead may fill: the rest is room to work on their values.
AHEAD = 3 / 4
#: The part of a device's memory that steps under way may make and fetch where values have to leave
#: for them: values in use cannot leave, and fewer of them leave a better choice.
TIGHT = 1 / 4
#: Refusals because of other steps after which a step gets the device to itself.
PATIENCE = 100


def deep_bytes(machine: Machine, device: int) -> int:
    """Bytes that steps under way on a device may make and fetch, beyond the first few."""
    share = int(SHARE * machine.memory[device])
    return min(share, DEEP_BYTES) if machine.shared else share


class State:
    """The state of a run: events change it, and it answers with instructions.

    `check=True` validates the invariants after each event.

    >>> from gpuscheduler.frontend.lowering import from_dask
    >>> from gpuscheduler.plan.machine import Machine
    >>> from gpuscheduler.plan.build import make_plan
    >>> graph = from_dask({"a": (int,), "b": (abs, "a")}, "b")
    >>> state = State(make_plan(graph, Machine.uniform(1)))
    >>> state.start()
    [Launch(step=0, place=0), Launch(step=1, place=0)]
    >>> state.handle(Issued(0, nbytes=8), Done(0))
    []
    >>> state.handle(Issued(1, nbytes=8), Done(1)), state.is_finished
    ([Free(step=0, place=0)], True)
    """

    def __init__(
        self,
        plan: Plan,
        window: int = WINDOW,
        deep_window: int = DEEP_WINDOW,
        ahead: bool = True,
        check: bool = False,
    ):
        steps, n = plan.steps, len(plan.steps)
        devices = plan.machine.devices
        machine = plan.machine
        places = (DISK, HOST, *machine.memories)

        # ---- what does not change during the run
        self.plan, self.check = plan, check
        #: Steps that may be under way on one device, of any size, and in all.
        self.window, self.deep_window = window, max(window, deep_window)
        #: Whether devices run in order: then readers may be launched behind what they read.
        self.ahead = ahead
        #: The device of each step.
        self.place = [s.place for s in steps]
        #: Whether a step runs aside: it is in no device's queue.
        self.aside = bytearray(s.aside for s in steps)
        #: Whether a step's value can be read again from its file.
        self.again = bytearray(s.again for s in steps)
        #: Whether all devices share the host's memory.
        self.shared = machine.shared
        #: The memory in which each device has its values.
        self.memory = [machine.memory_of(d) for d in devices]
        #: Bytes that each place may hold.
        self.limit = {p: machine.limit(p) for p in places}
        #: The kind of each step; steps of one kind need alike memory.
        self.kind = [s.kind for s in steps]
        #: The steps that read each step's value, in the plan's order.
        self.readers = plan.readers
        #: Steps whose values exist before the run.
        self.given = {i for i, s in enumerate(steps) if s.fixed}
        #: Given steps whose values the run may not move: all but persisted chunks.
        self.fixed = self.given.difference(plan.there)
        #: Steps whose values outlive the run.
        self.keep = self.given.union(plan.outputs)
        #: Bytes that steps under way beyond the first few may make and fetch, by device.
        self.share = {d: deep_bytes(plan.machine, d) for d in devices}
        #: Bytes that all steps under way may make and fetch when values must leave, by device.
        self.tight = {d: int(TIGHT * plan.machine.memory[d]) for d in devices}

        # ---- values and where they are
        #: Bytes of each step's value: an estimate until it is issued.
        self.nbytes = [s.nbytes for s in steps]
        if self.shared:  # the caller's own values take none of the memory
            for i in self.fixed:
                self.nbytes[i] = 0
        #: Bytes in each memory that never leave it during the run.
        self.rooted = {m: plan.others.get(m, 0) for m in machine.memories}
        for i in self.fixed:
            self.rooted[self.memory[self.place[i]]] += self.nbytes[i]
        #: Whether `nbytes` of a step is only a guess.
        self.guess = bytearray(not s.known for s in steps)
        #: The places that hold each step's value.
        self.where: list[Set[int]] = [NOWHERE] * n
        #: The steps whose values each place holds: `where`, the other way round.
        self.resident: dict[int, set[int]] = {p: set() for p in places}
        #: How many uses of each step's value are under way, by place.
        self.pins = {p: [0] * n for p in places}
        #: Bytes held, reserved or coming, by place.
        self.used = {p: plan.others.get(p, 0) for p in places}
        #: Bytes in `used` of a result's array that nobody has allocated yet, by place.
        self.unmade = dict(plan.whole)
        #: The most that `used` without `unmade` has been, by place.
        self.peak = {p: n - self.unmade.get(p, 0) for p, n in self.used.items()}
        #: Bytes of values that had to leave, by the place that took them.
        self.spilled = {HOST: 0, DISK: 0}
        #: Bytes of copies so far, by (src, dst).
        self.traffic: dict[tuple[int, int], int] = {}
        #: The order of leaving, as heaps, of places that were full once; see `_evictable_values`.
        self.order: dict[int, list[tuple[float, float, int]]] = {}
        #: Steps whose values cannot be written to the disk.
        self.stays: set[int] = set()
        #: Copies under way: (step, dst) -> src.
        self.coming: dict[tuple[int, int], int] = {}
        #: The reserved steps that wait for each copy: (step, dst) -> steps.
        self.awaited: dict[tuple[int, int], list[int]] = {}
        #: How many inputs of each reserved step are still on their way.
        self.absent: dict[int, int] = {}
        #: How many readers of each step's value, from the first on, are known to be done.
        self.cursor = [0] * n
        #: The last known `_next_use` of values, by memory.
        self.next: dict[int, dict[int, float]] = {p: {} for p in places}

        # ---- steps
        #: How many inputs of each step a launch would not find yet.
        self.missing = [len(s.inputs) for s in steps]
        #: How many readers of each step's value are not done yet.
        self.unread = [len(r) for r in plan.readers]
        #: Heaps of the ready steps of each device, by order in the plan.
        self.ready: dict[int, list[int]] = {d: [] for d in devices}
        #: Whether a step is in its device's heap `ready`.
        self.waits = bytearray(n)
        #: How many steps of each device are reserved or launched, and not done.
        self.busy = dict.fromkeys(devices, 0)
        #: Bytes that the steps in `busy` make and fetch, by device.
        self.flight = dict.fromkeys(devices, 0)
        #: The part of each step in `flight`.
        self.bytes = [0] * n
        #: Whether each step is launched; a refused launch takes that back.
        self.launched = bytearray(n)
        #: Whether each step is queued on its device.
        self.issued = bytearray(n)
        #: Whether each step no longer needs its inputs.
        self.done = bytearray(n)
        #: How many steps are not done.
        self.left = n
        #: Devices on which something may now be possible.
        self.touched: set[int] = set(devices)
        #: Devices whose next step waits for room.
        self.thirsty: set[int] = set()

        # ---- refusals and working memory
        #: How often steps were refused memory: for what they asked (True), or for others (False).
        self.refused: dict[tuple[int, bool], int] = {}
        #: The steps that get a memory to themselves, in turn, by memory.
        self.alone: dict[int, list[int]] = {}
        #: Bytes of the largest value that each kind of step has made.
        self.seen: dict[int, int] = {}
        #: Bytes of working memory that each kind of step takes at most, as far as known.
        self.extra = plan.task_memory_by_kind
        #: Whether steps get room for their working memory, known or guessed.
        self.short = (machine.arrays > 0 or any(self.extra.values())) and plan.may_be_short
        #: Bytes of working memory of the steps under way: device -> step -> bytes.
        self.work: dict[int, dict[int, int]] = {}
        #: Whether the next step begins without room for its working memory.
        self.bare = False

    @property
    def is_finished(self) -> bool:
        """Whether all steps are done and no copy is under way."""
        return self.left == 0 and not self.coming

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is under way, so that no event will come."""
        return not self.coming and not any(self.busy.values())

    def start(self) -> list[Instruction]:
        """The first instructions of the run."""
        for i in sorted(self.given):
            self._enter_given(i)
        for i, n in enumerate(self.missing):
            if not n and i not in self.given:
                self._make_ready(i)
        return self.handle()

    def _enter_given(self, i: int) -> None:
        """Enter a value that exists before the run: on its device, or wherever a chunk is."""
        self.launched[i] = self.issued[i] = self.done[i] = 1
        self.left -= 1
        self.where[i] = self.plan.there.get(i) or {self.memory[self.place[i]]}
        for place in sorted(self.where[i]):
            self.resident[place].add(i)
            self._use(place, self._counted_bytes(i, place))
        for r in self.readers[i]:
            self.missing[r] -= 1

    def handle(self, *events: Event) -> list[Instruction]:
        """Note events of the devices; returns the instructions that follow."""
        out: list[Instruction] = []
        for event in events:
            kind = type(event)
            if kind is Issued:
                self._handle_issued(event)  # type: ignore[arg-type]
            elif kind is Done:
                self._handle_done(event.step, out)
            elif kind is Copied:
                self._handle_copied(event, out)  # type: ignore[arg-type]
            elif kind is runtime_events.NoRoom:
                self._handle_no_room(event, out)  # type: ignore[arg-type]
            else:
                raise TypeError(f"not an event for State: {event!r}")
        self._advance(out)
        if self.left and self.is_quiet:
            self._force(out)
        if self.check:
            self.validate()
        return out

    # ---- events

    def _handle_issued(self, event: Issued) -> None:
        """Note that a step is queued, with the true size of its value: readers may follow."""
        i, nbytes = event.step, event.nbytes
        place = self.place[i]
        memory = self.memory[place]
        extra = nbytes - self.nbytes[i]
        if extra:
            self.nbytes[i] = nbytes
            self._use(memory, extra)
            if self.used[memory] > SHORT * self.limit[memory]:  # whatever was known before
                self.short = True
        self.guess[i] = False
        self.issued[i] = 1
        self.where[i] = {memory}
        self.resident[memory].add(i)
        if self.aside[i] and self.plan.steps[i].sent:
            self.traffic[HOST, place] = self.traffic.get((HOST, place), 0) + nbytes
        if self.again[i]:  # it is where it was read, too
            self.where[i] = {memory, DISK}
            self.resident[DISK].add(i)
        if self.order:
            self._update_order(i)
        kind = self.kind[i]
        if nbytes > self.seen.get(kind, -1):
            self.seen[kind] = nbytes
        if event.extra is not None and event.extra > self.extra.get(kind, -1):
            if not self.short and event.extra > max(self.extra.values(), default=0):
                self.short = self.plan.is_short(self.plan.at_once * event.extra)
            self.extra[kind] = event.extra
        where, aside = self.place, self.aside
        ahead = self.ahead and not aside[i]
        for r in self.readers[i]:
            if not ahead or where[r] != place or aside[r]:
                self._input_arrives(r)

    def _input_arrives(self, r: int) -> None:
        """Note that one more input of r can be read or copied."""
        self.missing[r] -= 1
        # one that was launched already will come back: an input of it was refused, so it will be
        if not self.missing[r] and not self.launched[r]:
            self._make_ready(r)

    def _make_ready(self, i: int) -> None:
        """Put a step into the heap of its device."""
        if not self.waits[i]:  # it may be in the heap still, from before an input was refused
            self.waits[i] = 1
            heappush(self.ready[self.place[i]], i)
        self.touched.add(self.place[i])

    def _launch(self, i: int, out: list[Instruction]) -> None:
        """Launch a step; readers in the same queue may follow at once."""
        d = self.place[i]
        self.launched[i] = 1
        out.append(Launch(i, d))
        if self.unmade and i in self.plan.into:
            self.unmade.clear()
            self._use(self.memory[d], 0)
        if self.ahead and not self.aside[i]:
            for r in self.readers[i]:
                if self.place[r] == d and not self.aside[r]:
                    self._input_arrives(r)

    def _handle_done(self, i: int, out: list[Instruction]) -> None:
        """Note that a step no longer needs its inputs; free those that nobody needs any more."""
        place = self.place[i]
        self.left -= 1
        self.busy[place] -= 1
        self.flight[place] -= self.bytes[i]
        if self.work:
            self._forget_working_memory(i, place)
        self.done[i] = 1
        self.touched.add(place)
        memory = self.memory[place]
        if self.alone:
            self.touched.update(self.busy)
            turns = self.alone.get(memory, [])
            if i in turns:
                turns.remove(i)
        unread, pins, keep = self.unread, self.pins[memory], self.keep
        for j in self.plan.steps[i].inputs:
            left = unread[j] = unread[j] - 1
            if left or j in keep:
                self._unpin(j, memory, out)
                if self.order:
                    self._update_order(j)
                continue
            pins[j] -= 1
            if not pins[j]:
                self._drop(j, out)
        self._unpin(i, memory, out)
        if i in self.plan.deliver and HOST not in self.where[i] and (i, HOST) not in self.coming:
            self._send(i, memory, HOST, out)

    def _handle_copied(self, event: Copied, out: list[Instruction]) -> None:
        """Note that a copy has come; launch the steps that waited for this one only."""
        i, src, dst = event.step, event.src, event.dst
        del self.coming[i, dst]
        self.where[i] = self.where[i] | {dst}
        self.resident[dst].add(i)
        if self.order:
            self._update_order(i)
        self.touched.update(p for p in (src, dst) if p >= 0)
        self.touched |= self.thirsty
        for r in self.awaited.pop((i, dst), ()):
            self.absent[r] -= 1
            if not self.absent[r]:
                del self.absent[r]
                self._launch(r, out)
        self._unpin(i, src, out)
        # a copy down makes room; a result that is still read stays as long as there is some
        still_read = dst == HOST and i in self.plan.deliver and self.unread[i]
        down = dst < 0 and dst < src
        if down and src in self.where[i] and not self.pins[src][i] and not still_read:
            self._free(i, src, out)
        if not self.pins[dst][i] and not self.unread[i] and i not in self.keep:
            self._free(i, dst, out)

    def _handle_no_room(self, event: NoRoom, out: list[Instruction]) -> None:
        """Learn the true size from a refusal of memory, make its steps ready again."""
        i, place = event.step, event.place
        if place >= 0:
            self.touched.add(place)
        self.touched |= self.thirsty
        if (i, place) in self.coming:
            src = self.coming.pop((i, place))
            self._use(place, -self._counted_bytes(i, place))
            if place == DISK:
                self.stays.add(i)
            self._unpin(i, src, out)
            for r in self.awaited.pop((i, place), ()):
                self._unreserve(r, out)
                self._give_turn_alone(r, 0)
            return
        self._recall(i, out)
        self._unreserve(i, out)
        # else the guess may be too large as well, or it was the result, which is counted
        if max(self.nbytes[i], 1) <= event.nbytes < self._least_of_others(i):
            self.nbytes[i] = event.nbytes
            self.guess[i] = False
        self._give_turn_alone(i, event.nbytes, event.said)

    def _least_of_others(self, i: int) -> float:
        """The bytes from which on a refused request is for a whole result, not for one step."""
        return self.plan.whole[self.memory[self.place[i]]] if i in self.plan.into else inf

    def _give_turn_alone(self, i: int, nbytes: int, said: str = "") -> None:
        """Give a step that is refused too often its device alone; later raise `OutOfMemory`."""
        patience = 1 if nbytes else PATIENCE
        refused = self.refused[i, nbytes > 0] = self.refused.get((i, nbytes > 0), 0) + 1
        if refused <= patience:
            return
        step = self.plan.steps[i]
        memory = self.memory[step.place]
        limit = self.limit[memory]
        held = sum(self.nbytes[j] for j in self._immovable_steps(memory).union(step.inputs))
        held += self.plan.others.get(memory, 0)
        if refused > 2 * patience:
            need = self.nbytes[i] + sum(self.nbytes[j] for j in step.inputs)
            raise self._out_of_memory(
                f"{step.key!r}: device {step.place} refused {nbytes or need:,} bytes although "
                f"nothing else ran there, beside {held:,} bytes that were held, under a limit of "
                f"{limit:,} bytes: something else holds the device's memory; free it, use smaller "
                f"chunks, or lower memory_limit{f' ({said})' if said else ''}"
            )
        whole = limit - held
        self.nbytes[i] = max(self.nbytes[i], whole)
        self.guess[i] = False
        self.alone.setdefault(memory, []).append(i)

    def _recall(self, i: int, out: list[Instruction]) -> None:
        """Take a refused launch back: steps queued behind it that read it are refused, too."""
        self.launched[i] = 0
        if not self.ahead or self.aside[i]:
            return
        for r in self.readers[i]:
            if self.place[r] == self.place[i] and not self.aside[r]:
                self.missing[r] += 1  # it leaves the heap when it comes to the top
                if r in self.absent:  # reserved, and not in the queue: nobody would refuse it
                    self._unreserve(r, out)

    def _unreserve(self, i: int, out: list[Instruction]) -> None:
        """Give back what was set aside for a step; it is ready again if its inputs are there."""
        d = self.place[i]
        memory = self.memory[d]
        if self.absent.pop(i, None) is not None:
            for waiting in self.awaited.values():
                if i in waiting:
                    waiting.remove(i)
        self._use(memory, -self.nbytes[i])
        self.busy[d] -= 1
        self.flight[d] -= self.bytes[i]
        if self.work:
            self._forget_working_memory(i, d)
        self.pins[memory][i] -= 1
        if not self.missing[i]:
            self._make_ready(i)
        for j in self.plan.steps[i].inputs:
            self._unpin(j, memory, out)

    # ---- memory

    def _use(self, place: int, nbytes: int) -> None:
        """Count bytes of a place as used, and note the peak."""
        self.used[place] = used = self.used[place] + nbytes
        if self.unmade:
            used -= self.unmade.get(place, 0)
        if used > self.peak[place]:
            self.peak[place] = used

    def _unpin(self, i: int, place: int, out: list[Instruction]) -> None:
        """End one use of a value; free it where nobody needs it any more."""
        pins = self.pins[place]
        pins[i] -= 1
        if pins[i] or self.unread[i]:
            return
        if i in self.keep:
            if HOST in self.where[i] and i in self.plan.deliver and place >= 0:
                self._free(i, place, out)
            return
        self._drop(i, out)

    def _drop(self, i: int, out: list[Instruction]) -> None:
        """Free a value that nobody needs any more, wherever it is not in use."""
        places = self.where[i]
        for p in sorted(places) if len(places) > 1 else tuple(places):
            if not self.pins[p][i]:
                self._free(i, p, out)

    def _free(self, i: int, place: int, out: list[Instruction]) -> None:
        """Free a value in one place, if that holds it."""
        where = self.where[i]
        if place not in where:
            return
        self.where[i] = where - {place} if len(where) > 1 else NOWHERE
        self.resident[place].discard(i)
        if place < 0:
            self.used[place] -= self._counted_bytes(i, place)
        else:
            self.used[place] -= self.nbytes[i]
            self.touched.add(place)
        if self.thirsty:
            self.touched |= self.thirsty
        out.append(Free(i, place))

    def _send(self, i: int, src: int, dst: int, out: list[Instruction]) -> None:
        """Start a copy, and count its room."""
        self.pins[src][i] += 1
        self.coming[i, dst] = src
        self._use(dst, self._counted_bytes(i, dst))
        self.traffic[src, dst] = self.traffic.get((src, dst), 0) + self.nbytes[i]
        out.append(Copy(i, src, dst))

    def _counted_bytes(self, i: int, place: int) -> int:
        """Bytes of i that count in a place.

        Results on the host, and files from which values can be read again, are the caller's and
        count nothing.
        """
        if place == DISK and self.again[i]:
            return 0
        return 0 if place == HOST and i in self.plan.deliver else self.nbytes[i]

    def _next_use(self, i: int, memory: int) -> float:
        """The next step that reads i in a memory, by the plan's order; infinity for none."""
        known = self.next[memory].get(i)
        if known is not None and (known == inf or not self.done[int(known)]):
            return known
        self.next[memory][i] = known = self._find_next_use(i, memory)
        return known

    def _find_next_use(self, i: int, memory: int) -> float:
        """Look the next use up anew: it changes only when its step is done."""
        readers, c = self.readers[i], self.cursor[i]
        while c < len(readers) and self.done[readers[c]]:
            c += 1
        self.cursor[i] = c
        if memory == HOST or self.shared:  # for any device
            return readers[c] if c < len(readers) else inf
        return next((r for r in readers[c:] if self.place[r] == memory and not self.done[r]), inf)

    def _make_room(self, memory: int, need: int, out: list[Instruction], after: float = -1) -> None:
        """Evict what is needed latest, and behind `after`, until `need` more bytes would fit."""
        room = self.limit[memory] - self.used[memory] + self._bytes_leaving(memory)
        if room >= need:
            return
        for i in self._evictable_values(memory):
            if self._next_use(i, memory) <= after:
                return
            room += self._evict(i, memory, out)
            if room >= need:
                return

    def _bytes_leaving(self, memory: int) -> int:
        """Bytes that will be free when the copies down that are under way have come."""
        pins = self.pins[memory]
        return sum(
            self.nbytes[i]
            for (i, dst), src in self.coming.items()
            if dst < 0 and src == memory and pins[i] == 1
        )

    def _evictable_values(self, memory: int) -> Iterator[int]:
        """Yield the values in a memory that nothing under way needs, in the order of leaving.

        Replicas on the host come first, then values by their next use, the last use first. They
        come from a heap. A value that is needed later now, or is in more places, has a newer entry;
        an entry that is out of date the other way is mended here.
        """
        there, pins = self.resident[memory], self.pins[memory]
        heap = self.order.get(memory)
        if heap is None:
            heap = self.order[memory] = self._make_heap(memory)
        found: dict[int, tuple[float, float, int]] = {}
        try:
            while heap:
                entry = heappop(heap)
                i = -entry[2]
                if i not in there or i in found:
                    continue
                now = self._rank(i, memory)
                if now > entry:
                    heappush(heap, now)
                elif now == entry:
                    found[i] = entry
                    if not pins[i]:
                        yield i
        finally:
            for i, entry in found.items():
                if i in there:
                    heappush(heap, entry)

    def _make_heap(self, memory: int) -> list[tuple[float, float, int]]:
        """A new heap of the values in a memory, for `_evictable_values`."""
        heap = [self._rank(i, memory) for i in self.resident[memory] if self._may_leave(i, memory)]
        heapify(heap)
        return heap

    def _rank(self, i: int, memory: int) -> tuple[float, float, int]:
        """The rank of a value in the order of leaving: the least leaves first."""
        use, places = self._next_use(i, memory), len(self.where[i])
        if memory == HOST:  # what is on its device, too, can go without a copy
            return -places, -use, -i
        return -use, -places, -i

    def _may_leave(self, i: int, memory: int) -> bool:
        """Whether a value can leave a memory, and frees bytes there."""
        own = i in self.fixed and self.memory[self.place[i]] == memory
        return not own and self._counted_bytes(i, memory) > 0

    def _update_order(self, i: int) -> None:
        """Note in the heaps that a value is in more places, or has another next use."""
        for memory, heap in self.order.items():
            if len(heap) > 4 * len(self.resident[memory]) + 64:  # most of it is out of date
                heap[:] = self._make_heap(memory)
            elif memory in self.where[i] and self._may_leave(i, memory):
                heappush(heap, self._rank(i, memory))

    def _evict(self, i: int, memory: int, out: list[Instruction]) -> int:
        """Let i leave a memory; returns the bytes that this frees, now or soon."""
        where = self.where[i]
        if len(where) > 1 and not (self.shared and DISK not in where):  # a result is no replica
            self._free(i, memory, out)
            return self.nbytes[i]
        if memory == HOST or self.shared:
            refuge = DISK if i not in self.stays else None
        else:
            refuge = self._find_refuge(i, out)
        if refuge is None:
            return 0
        if refuge != HOST or self._host_deficit(i) <= 0:  # else there will be room for it
            self._send(i, memory, refuge, out)
            self.spilled[refuge] += self.nbytes[i]
        return self.nbytes[i]

    def _host_deficit(self, i: int) -> int:
        """Bytes that are missing on the host to take in i."""
        return self.used[HOST] + self.nbytes[i] - self.limit[HOST]

    def _find_refuge(self, i: int, out: list[Instruction]) -> int | None:
        """The place to which a value leaves a device, HOST or DISK; None where neither has room.

        For HOST, evicts values from the host that are needed after this one. Where this one is
        needed last, the answer is DISK.
        """
        short = self._host_deficit(i) - self._bytes_leaving(HOST)
        if short <= 0:
            return HOST
        bound = i in self.stays
        mine = self._next_use(i, HOST)
        leave = []
        for j in self._evictable_values(HOST):
            if short <= 0:
                break
            if len(self.where[j]) == 1:
                if j in self.stays:
                    continue
                if not bound and self._next_use(j, HOST) <= mine:
                    break
            leave.append(j)
            short -= self.nbytes[j]
        if short > 0:
            return None if bound else DISK
        for j in leave:
            self._evict(j, HOST, out)
        return HOST

    def _immovable_steps(self, memory: int) -> set[int]:
        """Steps whose values cannot leave a memory: the graph's own, and those no disk can hold."""
        there = self.resident[memory]
        home = {i for i in self.fixed & there if self.memory[self.place[i]] == memory}
        return home | {i for i in self.stays & there if self.shared or self._host_deficit(i) > 0}

    # ---- steps

    def _advance(self, out: list[Instruction]) -> None:
        """Reserve and launch all steps that have room now, device by device."""
        while self.touched:
            touched = sorted(self.touched)
            self.touched.clear()
            for d in touched:
                ready, busy = self.ready[d], self.busy
                self.thirsty.discard(d)
                while ready:
                    if self.alone and not self._may_go_on(d, out):
                        break
                    i = ready[0]
                    if self.missing[i]:  # an input of it was refused since
                        self.waits[heappop(ready)] = 0
                        continue
                    if busy[d] >= self.window and not self._fits_deep(i, d):
                        break
                    self.waits[heappop(ready)] = 0
                    if not self._reserve(i, d, out):
                        self._make_ready(i)
                        self.thirsty.add(d)
                        break
                # what this device just freed or sent away concerns no other one
                self.touched.discard(d)

    def _may_go_on(self, d: int, out: list[Instruction]) -> bool:
        """Whether d may take its next step: not beside a step that has d's memory to itself.

        Such a step starts here, when all others have ended.
        """
        memory = self.memory[d]
        turns = self.alone.get(memory)
        if not turns:
            return True
        i = turns[0]
        under_way = self.launched[i] or i in self.absent
        if not under_way and (self.missing[i] or not self.waits[i]):
            return True  # an input of it was refused: that comes first
        idle = not any(n for e, n in self.busy.items() if self.memory[e] == memory)
        if self.waits[i] and self.place[i] == d and idle:
            self.ready[d].remove(i)
            heapify(self.ready[d])
            self.waits[i] = 0
            if not self._reserve(i, d, out):
                self._make_ready(i)
                self.thirsty.add(d)
        return False

    def _next_ready_step(self, d: int) -> int:
        """The ready step that d takes next."""
        turns = self.alone.get(self.memory[d])
        return turns[0] if turns and turns[0] in self.ready[d] else self.ready[d][0]

    def _fits_deep(self, i: int, d: int) -> bool:
        """Whether i may be under way beyond `window`, because it is small."""
        if self.busy[d] >= self.deep_window:
            return False
        seen = self.seen.get(self.kind[i])
        if self.guess[i] and seen is None:
            return False  # its first value may be of any size
        fetched, memory = 0, self.memory[d]
        for j in self.plan.steps[i].inputs:
            if self.place[j] != d and memory not in self.where[j]:
                fetched += self.nbytes[j]
        return self.flight[d] + max(self.nbytes[i], seen or 0) + fetched <= self.share[d]

    def _is_queued(self, j: int, d: int) -> bool:
        """Whether step j is in device d's queue, ahead of whatever is launched there next."""
        return bool(self.launched[j]) and self.place[j] == d and not self.issued[j]

    def _reserve(self, i: int, d: int, out: list[Instruction]) -> bool:
        """Set aside room for a step's value and its absent inputs; False where there is none.

        Evicts other values where that helps. Then launches the step, or fetches its inputs first.
        """
        inputs, where, coming = self.plan.steps[i].inputs, self.where, self.coming
        memory = self.memory[d]
        pins = self.pins[memory]
        need = self.nbytes[i]
        missing = [j for j in inputs if memory not in where[j] and not self._is_queued(j, d)]
        absent = [j for j in missing if (j, memory) not in coming] if missing else missing
        for j in absent:
            need += self.nbytes[j]
        for j in inputs:
            pins[j] += 1  # or making room could take them away
        extra, limit = 0, self.limit[memory]
        if self.short and not self.bare:
            extra = self._working_memory(i)
            limit -= self._working_memory_with(d, extra)
        full = self.used[memory] + need > limit
        early = self.aside[i] and self._is_early(i)
        if early and self.busy[d] and self.used[memory] + need > int(AHEAD * limit):
            limit = -1  # there is other work: it can wait until there is room
        elif full and self.busy[d] and self.flight[d] + need > self.tight[d]:
            limit = -1  # so can what would crowd out more than it must
        elif full:
            # and it sends nothing away that is needed before it
            after = self._next_use(i, memory) if early else -1
            self._make_room(memory, need + self.limit[memory] - limit, out, after)
        if self.used[memory] + need > limit:
            for j in inputs:
                pins[j] -= 1
            return False
        self.bare = False
        if extra:
            self.work.setdefault(d, {})[i] = extra
        self._use(memory, self.nbytes[i])
        self.busy[d] += 1
        self.bytes[i] = max(need, self.seen.get(self.kind[i], 0))
        self.flight[d] += self.bytes[i]
        pins[i] += 1
        for j in absent:
            # from where it was made; else from any device that holds it, the host, or the disk;
            # where devices read the host's memory, what is not in it is on the disk
            src = max(where[j])
            if self.shared:
                src = DISK
            elif self.place[j] in where[j]:
                src = self.place[j]
            self._send(j, src, memory, out)
        # copies into a device are in its queue, but not those from the disk
        ahead = self.ahead and not self.aside[i]
        if not missing or (ahead and all(coming[j, memory] != DISK for j in missing)):
            self._launch(i, out)
        else:
            self.absent[i] = len(missing)
            for j in missing:
                self.awaited.setdefault((j, memory), []).append(i)
        return True

    def _working_memory(self, i: int) -> int:
        """Bytes of working memory of a step, known or guessed; at most what its device has."""
        known = self.extra.get(self.kind[i])
        if known == 0 or self.aside[i]:
            return 0
        nbytes, inputs = self.nbytes, self.plan.steps[i].inputs
        if known is None:
            known = self.plan.machine.arrays * max(nbytes[i], *[nbytes[j] for j in inputs], 0)
        memory = self.memory[self.place[i]]
        room = self.limit[memory] - self.rooted[memory] - nbytes[i]
        for j in inputs:
            if j not in self.fixed or self.memory[self.place[j]] != memory:
                room -= nbytes[j]
        return known if known <= room else max(room, 0)

    def _working_memory_with(self, d: int, extra: int) -> int:
        """Bytes of working memory in d's memory, with one more step of `extra` bytes on d.

        A device runs one step at a time, so its largest step counts.
        """
        here = self.work.get(d)
        most = max(here.values()) if here else 0
        there = [w for e, w in self.work.items() if e != d] if self.shared else ()
        return max(extra, most) + sum([max(w.values()) for w in there])

    def _forget_working_memory(self, i: int, d: int) -> None:
        """Forget the working memory of a step."""
        here = self.work.get(d)
        if here is not None and here.pop(i, None) is not None and not here:
            del self.work[d]

    def _is_early(self, i: int) -> bool:
        """Whether a step that runs aside only reads a file, while there is something else to do."""
        return not self.plan.steps[i].inputs and not self.is_quiet

    def _force(self, out: list[Instruction]) -> None:
        """Start a step although nothing fits and nothing is under way, or raise `OutOfMemory`.

        First guesses of sizes are lowered to what fits; then a step starts without room for its
        working memory.
        """
        for d in self.plan.machine.devices:
            if not self.ready[d]:
                continue
            i = self._next_ready_step(d)
            if self.guess[i]:
                memory = self.memory[d]
                inputs = self.plan.steps[i].inputs
                fetch = sum(self.nbytes[j] for j in inputs if memory not in self.where[j])
                room = self.limit[memory] - self.used[memory] - fetch
                # all else is idle, for nothing is under way
                stays = self._immovable_steps(memory).union(inputs)
                room += sum(self.nbytes[j] for j in self.resident[memory] - stays)
                if room >= 0:
                    self.nbytes[i] = min(self.nbytes[i], room)
        self.touched.update(self.plan.machine.devices)
        self._advance(out)
        if not self.is_quiet:
            return
        self.bare = True
        self.touched.update(self.plan.machine.devices)
        self._advance(out)
        self.bare = False
        if not self.is_quiet:
            return
        for d in self.plan.machine.devices:
            if self.ready[d]:
                i = self._next_ready_step(d)
                step = self.plan.steps[i]
                need = self.nbytes[i] + sum(self.nbytes[j] for j in step.inputs)
                others = self._immovable_steps(self.memory[d]).difference(step.inputs)
                held = sum(self.nbytes[j] for j in others)
                held += self.plan.others.get(self.memory[d], 0)
                plan = self.plan
                words = does_not_fit(step, need, d, plan.machine, held, plan.renamed)
                raise self._out_of_memory(words)
        raise AssertionError("steps are left, but none is ready and nothing is under way")

    def _out_of_memory(self, text: str) -> OutOfMemory:
        for place, nbytes in self.plan.whole.items():
            text += "; " + no_room(nbytes, f"device {place}")
        error = OutOfMemory(text)
        error.plan = id(self.plan)
        return error

    def footprint(self, seconds: float) -> Footprint:
        """The time, memory and traffic of the run."""
        return Footprint(seconds, dict(self.peak), dict(self.traffic), dict(self.spilled))

    # ---- invariants

    def validate(self) -> None:
        """Assert the invariants that hold after each event."""
        for place, held in self.resident.items():
            assert all(place in self.where[i] for i in held)
            total = sum(self._counted_bytes(i, place) for i in held)
            coming = sum(self._counted_bytes(i, place) for i, dst in self.coming if dst == place)
            assert self.used[place] >= total + coming, f"place {place}: more is held than counted"
        for place in (HOST, DISK):  # what goes there has its true size
            assert self.used[place] <= self.limit[place], f"place {place}: above its limit"
        for i, places in enumerate(self.where):
            if places and not self.unread[i] and i not in self.keep:
                assert any(self.pins[p][i] for p in places), f"step {i} was not freed"
            if self.done[i] and (i in self.keep or self.unread[i]):
                assert places, f"step {i} is needed and gone"
        kept = {memory: list(heap) for memory, heap in self.order.items()}
        for memory in self.order:
            there, pins = self.resident[memory], self.pins[memory]
            idle = [i for i in there if not pins[i] and self._may_leave(i, memory)]
            idle.sort(key=lambda i: self._rank(i, memory))
            assert list(self._evictable_values(memory)) == idle, (
                f"what leaves place {memory} is out of order"
            )
        self.order = kept  # not what looking has put right
        assert all(n >= 0 for pins in self.pins.values() for n in pins)
        assert all(b >= 0 for b in self.busy.values())
        assert all(b >= 0 for b in self.flight.values())

    def validate_end(self) -> None:
        """Assert that only outputs are held after the run, and every byte is accounted for."""
        for place, used in self.used.items():
            held = sum(self._counted_bytes(i, place) for i in self.resident[place])
            held += self.plan.others.get(place, 0)
            assert used == held, f"place {place}: {used} bytes counted, {held} held"
        kept = {i for held in self.resident.values() for i in held}
        assert kept == self.keep, "what is left is not what was asked for"
