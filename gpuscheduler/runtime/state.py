"""Decide what to do next: events in, instructions out.

Events in, instructions out; no device, no thread and no clock.

A step is *waiting* for its inputs, then *ready*, then *reserved* (its room is set aside and its
inputs are on their way), then *launched*, then *issued* (queued: readers elsewhere may follow),
then *done*. A value is a set of places. Values never change, so a copy is a replica and coherence
is a set.

A device obeys in order, so a reader is launched right behind what it reads on the same device, and
behind the copies that it needs: neither waits for the way to the host and back, and a device works
through its part of the plan in the plan's own order, which is what keeps its memory small.

Some steps are in no queue: those that read a file or write one. They run aside, when all that they
read is there, and what reads them waits until they are issued.

What does not fit for now leaves: from a device to the host, from there to the disk, that first
which is needed last. Where all devices share the host's memory there is only the disk to go to.
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
#: ... and how many when all that they make and fetch is small beside the device's memory: enough
#: to hide the way to the device and back.
DEEP_WINDOW = 64
#: What "small beside the memory" is.
SHARE = 1 / 20
#: ... and at most so many bytes where the devices are threads: their values should still be in the
#: processor's caches, and their memory be given to the next ones, when they are read.
DEEP_BYTES = 2**24
#: What part of a memory may be full when more is read ahead: what was read needs room for work.
AHEAD = 3 / 4
#: What part of a device's memory all that is under way may make and fetch where values have to
#: leave for it: what is under way cannot leave, and the less it is, the better the choice.
TIGHT = 1 / 4
#: Refusals that a step may have because of others before it is given the device to itself.
PATIENCE = 100


def deep_bytes(machine: Machine, device: int) -> int:
    """What steps that are under way on a device may make and fetch, beyond the first few."""
    share = int(SHARE * machine.memory[device])
    return min(share, DEEP_BYTES) if machine.shared else share


class State:
    """Everything known about a run. `check=True` validates the invariants after each event.

    >>> from gpuscheduler.frontend.lowering import from_dask
    >>> from gpuscheduler.plan.machine import Machine
    >>> from gpuscheduler.plan.build import make_plan
    >>> graph = from_dask({"a": (int,), "b": (abs, "a")}, "b")
    >>> state = State(make_plan(graph, Machine.uniform(1)))
    >>> state.start()
    [Launch(step=0, place=0), Launch(step=1, place=0)]
    >>> state.handle(Issued(0, nbytes=8), Done(0))
    []
    >>> state.handle(Issued(1, nbytes=8), Done(1)), state.finished
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
        self.plan, self.check = plan, check
        self.window, self.deep_window = window, max(window, deep_window)
        self.ahead = ahead  # devices run in order: readers may be launched behind what they read
        self.place = [s.place for s in steps]
        self.aside = bytearray(s.aside for s in steps)  # whether it is in no device's queue
        self.again = bytearray(s.again for s in steps)  # whether it can be read again
        machine = plan.machine
        self.shared = machine.shared
        self.memory = [machine.memory_of(d) for d in devices]  # where each device has its values
        places = (DISK, HOST, *machine.memories)
        self.limit = {p: machine.limit(p) for p in places}
        self.kind = [s.kind for s in steps]
        self.readers = plan.readers
        self.missing = [len(s.inputs) for s in steps]  # inputs that a launch would not find yet
        self.unread = [len(r) for r in plan.readers]  # readers that are not done yet
        self.given = {i for i, s in enumerate(steps) if s.fixed}  # there before the run
        self.fixed = self.given.difference(plan.there)  # ... and it may not move them
        self.nbytes = [s.nbytes for s in steps]
        if self.shared:  # the caller's own values take none of the memory
            for i in self.fixed:
                self.nbytes[i] = 0
        self.rooted = {m: plan.others.get(m, 0) for m in machine.memories}  # bytes of what stays
        for i in self.fixed:
            self.rooted[self.memory[self.place[i]]] += self.nbytes[i]
        self.guess = bytearray(not s.known for s in steps)  # whether nbytes is only a guess
        self.where: list[Set[int]] = [NOWHERE] * n  # places that hold the value
        self.pins = {p: [0] * n for p in places}  # uses under way, per place
        self.used = {p: plan.others.get(p, 0) for p in places}  # bytes held, reserved or coming
        self.unmade = dict(plan.whole)  # ... but nobody has asked for these yet
        self.peak = {p: n - self.unmade.get(p, 0) for p, n in self.used.items()}
        self.spilled = {HOST: 0, DISK: 0}  # bytes sent there because they had to leave
        self.moved: dict[tuple[int, int], int] = {}  # bytes of copies, by (src, dst)
        self.resident: dict[int, set[int]] = {p: set() for p in places}
        #: Where something had to leave: heaps of what may be next to, see `_idle`.
        self.order: dict[int, list[tuple[float, float, int]]] = {}
        self.stays: set[int] = set()  # steps whose values cannot be written to the disk
        self.coming: dict[tuple[int, int], int] = {}  # copies under way: (step, dst) -> src
        self.awaited: dict[tuple[int, int], list[int]] = {}  # ... and the steps that wait for them
        self.absent: dict[int, int] = {}  # reserved step -> inputs still on their way
        self.ready: dict[int, list[int]] = {d: [] for d in devices}  # heaps, by order in the plan
        self.waits = bytearray(n)  # whether a step is in its device's heap
        self.busy = dict.fromkeys(devices, 0)  # steps reserved or launched, not done
        self.flight = dict.fromkeys(devices, 0)  # ... the bytes that those make and fetch
        self.bytes = [0] * n  # ... by step
        self.share = {d: deep_bytes(plan.machine, d) for d in devices}
        self.tight = {d: int(TIGHT * plan.machine.memory[d]) for d in devices}
        self.refused: dict[tuple[int, bool], int] = {}  # (step, itself) -> how often: it or others
        self.alone: dict[int, list[int]] = {}  # memory -> steps that get it to themselves, in turn
        self.seen: dict[int, int] = {}  # kind of step -> bytes of the largest value it has made
        self.extra = plan.takes  # kind -> bytes at most that it takes while it runs
        #: Whether steps get room for that, or for what it may be.
        self.short = (machine.arrays > 0 or any(self.extra.values())) and plan.short
        self.work: dict[int, dict[int, int]] = {}  # ... by step under way, by device
        self.bare = False  # whether the next step begins without room for that
        self.keep = self.given.union(plan.outputs)
        self.cursor = [0] * n  # readers[i][:cursor[i]] are done
        self.next: dict[int, dict[int, float]] = {p: {} for p in places}  # the last `_next_use`
        self.launched = bytearray(n)
        self.issued = bytearray(n)
        self.done = bytearray(n)
        self.left = n
        self.touched: set[int] = set(devices)  # devices on which something may now be possible
        self.thirsty: set[int] = set()  # devices whose next step waits for room

    @property
    def finished(self) -> bool:
        return self.left == 0 and not self.coming

    @property
    def quiet(self) -> bool:
        """Nothing is under way, so nothing will ever happen by itself."""
        return not self.coming and not any(self.busy.values())

    def start(self) -> list[Instruction]:
        for i in sorted(self.given):
            self._exists(i)
        for i, n in enumerate(self.missing):
            if not n and i not in self.given:
                self._is_ready(i)
        return self.handle()

    def _exists(self, i: int) -> None:
        """A value of the graph, on its device before the run begins; a chunk, wherever it is."""
        self.launched[i] = self.issued[i] = self.done[i] = 1
        self.left -= 1
        self.where[i] = self.plan.there.get(i) or {self.memory[self.place[i]]}
        for place in sorted(self.where[i]):
            self.resident[place].add(i)
            self._use(place, self._counted(i, place))
        for r in self.readers[i]:
            self.missing[r] -= 1

    def handle(self, *events: Event) -> list[Instruction]:
        out: list[Instruction] = []
        for event in events:
            kind = type(event)
            if kind is Issued:
                self._issued(event)  # type: ignore[arg-type]
            elif kind is Done:
                self._done(event.step, out)
            elif kind is Copied:
                self._copied(event, out)  # type: ignore[arg-type]
            elif kind is runtime_events.NoRoom:
                self._no_room(event, out)  # type: ignore[arg-type]
            else:
                raise TypeError(f"not an event for State: {event!r}")
        self._advance(out)
        if self.left and self.quiet:
            self._force(out)
        if self.check:
            self.validate()
        return out

    # ---- events

    def _issued(self, event: Issued) -> None:
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
            self.moved[HOST, place] = self.moved.get((HOST, place), 0) + nbytes
        if self.again[i]:  # it is where it was read, too
            self.where[i] = {memory, DISK}
            self.resident[DISK].add(i)
        if self.order:
            self._in_order(i)
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
                self._found(r)

    def _found(self, r: int) -> None:
        """One more input of r is where a launch would find it, or can be copied from there."""
        self.missing[r] -= 1
        # one that was launched already will come back: an input of it was refused, so it will be
        if not self.missing[r] and not self.launched[r]:
            self._is_ready(r)

    def _is_ready(self, i: int) -> None:
        if not self.waits[i]:  # it may be in the heap still, from before an input was refused
            self.waits[i] = 1
            heappush(self.ready[self.place[i]], i)
        self.touched.add(self.place[i])

    def _launch(self, i: int, out: list[Instruction]) -> None:
        d = self.place[i]
        self.launched[i] = 1
        out.append(Launch(i, d))
        if self.unmade and i in self.plan.into:
            self.unmade.clear()
            self._use(self.memory[d], 0)
        if self.ahead and not self.aside[i]:
            for r in self.readers[i]:
                if self.place[r] == d and not self.aside[r]:
                    self._found(r)

    def _done(self, i: int, out: list[Instruction]) -> None:
        place = self.place[i]
        self.left -= 1
        self.busy[place] -= 1
        self.flight[place] -= self.bytes[i]
        if self.work:
            self._stops_working(i, place)
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
                    self._in_order(j)
                continue
            pins[j] -= 1
            if not pins[j]:
                self._drop(j, out)
        self._unpin(i, memory, out)
        if i in self.plan.deliver and HOST not in self.where[i] and (i, HOST) not in self.coming:
            self._send(i, memory, HOST, out)

    def _copied(self, event: Copied, out: list[Instruction]) -> None:
        i, src, dst = event.step, event.src, event.dst
        del self.coming[i, dst]
        self.where[i] = self.where[i] | {dst}
        self.resident[dst].add(i)
        if self.order:
            self._in_order(i)
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

    def _no_room(self, event: NoRoom, out: list[Instruction]) -> None:
        """An estimate was wrong. Learn the true size; the steps it held up are ready again."""
        i, place = event.step, event.place
        if place >= 0:
            self.touched.add(place)
        self.touched |= self.thirsty
        if (i, place) in self.coming:
            src = self.coming.pop((i, place))
            self._use(place, -self._counted(i, place))
            if place == DISK:
                self.stays.add(i)
            self._unpin(i, src, out)
            for r in self.awaited.pop((i, place), ()):
                self._unreserve(r, out)
                self._insist(r, 0)
            return
        self._recall(i, out)
        self._unreserve(i, out)
        # else the guess may be too large as well, or it was the result, which is counted
        if max(self.nbytes[i], 1) <= event.nbytes < self._least_of_others(i):
            self.nbytes[i] = event.nbytes
            self.guess[i] = False
        self._insist(i, event.nbytes, event.said)

    def _least_of_others(self, i: int) -> float:
        """From so many bytes on, what a step asks for is not its own."""
        return self.plan.whole[self.memory[self.place[i]]] if i in self.plan.into else inf

    def _insist(self, i: int, nbytes: int, said: str = "") -> None:
        """What is refused again although it should fit gets the device to itself; then it fails."""
        patience = 1 if nbytes else PATIENCE
        refused = self.refused[i, nbytes > 0] = self.refused.get((i, nbytes > 0), 0) + 1
        if refused <= patience:
            return
        step = self.plan.steps[i]
        memory = self.memory[step.place]
        limit = self.limit[memory]
        held = sum(self.nbytes[j] for j in self._immovable(memory).union(step.inputs))
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
        """A launch was refused: steps queued behind it that read it will be refused, too."""
        self.launched[i] = 0
        if not self.ahead or self.aside[i]:
            return
        for r in self.readers[i]:
            if self.place[r] == self.place[i] and not self.aside[r]:
                self.missing[r] += 1  # it leaves the heap when it comes to the top
                if r in self.absent:  # reserved, and not in the queue: nobody would refuse it
                    self._unreserve(r, out)

    def _unreserve(self, i: int, out: list[Instruction]) -> None:
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
            self._stops_working(i, d)
        self.pins[memory][i] -= 1
        if not self.missing[i]:
            self._is_ready(i)
        for j in self.plan.steps[i].inputs:
            self._unpin(j, memory, out)

    # ---- memory

    def _use(self, place: int, nbytes: int) -> None:
        self.used[place] = used = self.used[place] + nbytes
        if self.unmade:
            used -= self.unmade.get(place, 0)
        if used > self.peak[place]:
            self.peak[place] = used

    def _unpin(self, i: int, place: int, out: list[Instruction]) -> None:
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
        """Nobody needs the value any more: let go of it wherever it is not in use."""
        places = self.where[i]
        for p in sorted(places) if len(places) > 1 else tuple(places):
            if not self.pins[p][i]:
                self._free(i, p, out)

    def _free(self, i: int, place: int, out: list[Instruction]) -> None:
        where = self.where[i]
        if place not in where:
            return
        self.where[i] = where - {place} if len(where) > 1 else NOWHERE
        self.resident[place].discard(i)
        if place < 0:
            self.used[place] -= self._counted(i, place)
        else:
            self.used[place] -= self.nbytes[i]
            self.touched.add(place)
        if self.thirsty:
            self.touched |= self.thirsty
        out.append(Free(i, place))

    def _send(self, i: int, src: int, dst: int, out: list[Instruction]) -> None:
        self.pins[src][i] += 1
        self.coming[i, dst] = src
        self._use(dst, self._counted(i, dst))
        self.moved[src, dst] = self.moved.get((src, dst), 0) + self.nbytes[i]
        out.append(Copy(i, src, dst))

    def _counted(self, i: int, place: int) -> int:
        """Bytes of i that count in a place: results that go to the host are the caller's, and so
        are the files from which values are read."""
        if place == DISK and self.again[i]:
            return 0
        return 0 if place == HOST and i in self.plan.deliver else self.nbytes[i]

    def _next_use(self, i: int, memory: int) -> float:
        """The next step that reads i here: exact, since the plan says what comes next."""
        known = self.next[memory].get(i)
        if known is not None and (known == inf or not self.done[int(known)]):
            return known
        self.next[memory][i] = known = self._found_next(i, memory)
        return known

    def _found_next(self, i: int, memory: int) -> float:
        """The same, looked up anew: it changes only when that step is done."""
        readers, c = self.readers[i], self.cursor[i]
        while c < len(readers) and self.done[readers[c]]:
            c += 1
        self.cursor[i] = c
        if memory == HOST or self.shared:  # for any device
            return readers[c] if c < len(readers) else inf
        return next((r for r in readers[c:] if self.place[r] == memory and not self.done[r]), inf)

    def _make_room(self, memory: int, need: int, out: list[Instruction], after: float = -1) -> None:
        """Evict what is needed latest, and behind `after`, until `need` more bytes would fit."""
        room = self.limit[memory] - self.used[memory] + self._leaving(memory)
        if room >= need:
            return
        for i in self._idle(memory):
            if self._next_use(i, memory) <= after:
                return
            room += self._evict(i, memory, out)
            if room >= need:
                return

    def _leaving(self, memory: int) -> int:
        """Bytes that will be free when the copies down that are under way have come."""
        pins = self.pins[memory]
        return sum(
            self.nbytes[i]
            for (i, dst), src in self.coming.items()
            if dst < 0 and src == memory and pins[i] == 1
        )

    def _idle(self, memory: int) -> Iterator[int]:
        """What nothing under way needs in a memory; first what the host holds for nothing, then
        what is needed last.

        It comes from a heap. What is needed later now than an entry says, or is in more places, has
        a newer entry; one that says too much is put right here.
        """
        there, pins = self.resident[memory], self.pins[memory]
        heap = self.order.get(memory)
        if heap is None:
            heap = self.order[memory] = self._ordered(memory)
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

    def _ordered(self, memory: int) -> list[tuple[float, float, int]]:
        heap = [self._rank(i, memory) for i in self.resident[memory] if self._may_leave(i, memory)]
        heapify(heap)
        return heap

    def _rank(self, i: int, memory: int) -> tuple[float, float, int]:
        """The least leaves first."""
        use, places = self._next_use(i, memory), len(self.where[i])
        if memory == HOST:  # what is on its device, too, can go without a copy
            return -places, -use, -i
        return -use, -places, -i

    def _may_leave(self, i: int, memory: int) -> bool:
        """Whether there is any use in that, and it is not the graph's own value."""
        own = i in self.fixed and self.memory[self.place[i]] == memory
        return not own and self._counted(i, memory) > 0

    def _in_order(self, i: int) -> None:
        """A step is in more places now, or its next use is another one."""
        for memory, heap in self.order.items():
            if len(heap) > 4 * len(self.resident[memory]) + 64:  # most of it is out of date
                heap[:] = self._ordered(memory)
            elif memory in self.where[i] and self._may_leave(i, memory):
                heappush(heap, self._rank(i, memory))

    def _evict(self, i: int, memory: int, out: list[Instruction]) -> int:
        """Let i leave a memory. The bytes that this frees, now or soon."""
        where = self.where[i]
        if len(where) > 1 and not (self.shared and DISK not in where):  # a result is no replica
            self._free(i, memory, out)
            return self.nbytes[i]
        if memory == HOST or self.shared:
            refuge = DISK if i not in self.stays else None
        else:
            refuge = self._refuge(i, out)
        if refuge is None:
            return 0
        if refuge != HOST or self._short(i) <= 0:  # else there will be room for it
            self._send(i, memory, refuge, out)
            self.spilled[refuge] += self.nbytes[i]
        return self.nbytes[i]

    def _short(self, i: int) -> int:
        """Bytes that are missing on the host to take in i."""
        return self.used[HOST] + self.nbytes[i] - self.limit[HOST]

    def _refuge(self, i: int, out: list[Instruction]) -> int | None:
        """Where a value leaves a device for: the disk, if it is needed after all that would have to
        leave the host for it. Lets those leave; None where neither can take it in."""
        short = self._short(i) - self._leaving(HOST)
        if short <= 0:
            return HOST
        bound = i in self.stays
        mine = self._next_use(i, HOST)
        leave = []
        for j in self._idle(HOST):
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

    def _immovable(self, memory: int) -> set[int]:
        """What will not leave a memory: the graph's own values, and those no disk can hold."""
        there = self.resident[memory]
        home = {i for i in self.fixed & there if self.memory[self.place[i]] == memory}
        return home | {i for i in self.stays & there if self.shared or self._short(i) > 0}

    # ---- steps

    def _advance(self, out: list[Instruction]) -> None:
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
                        self._is_ready(i)
                        self.thirsty.add(d)
                        break
                # what this device just freed or sent away concerns no other one
                self.touched.discard(d)

    def _may_go_on(self, d: int, out: list[Instruction]) -> bool:
        """Whether d may take its next step: not beside one that has d's memory to itself.

        That one starts here, when all others have ended.
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
                self._is_ready(i)
                self.thirsty.add(d)
        return False

    def _next(self, d: int) -> int:
        """The step that d takes next, of those that are ready."""
        turns = self.alone.get(self.memory[d])
        return turns[0] if turns and turns[0] in self.ready[d] else self.ready[d][0]

    def _fits_deep(self, i: int, d: int) -> bool:
        """Whether one more step may be under way than the window says."""
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

    def _queued(self, j: int, d: int) -> bool:
        """Whether step j is in device d's queue, ahead of whatever is launched there next."""
        return bool(self.launched[j]) and self.place[j] == d and not self.issued[j]

    def _reserve(self, i: int, d: int, out: list[Instruction]) -> bool:
        """Set aside room for a step's value and its absent inputs: all of it, or none."""
        inputs, where, coming = self.plan.steps[i].inputs, self.where, self.coming
        memory = self.memory[d]
        pins = self.pins[memory]
        need = self.nbytes[i]
        late = [j for j in inputs if memory not in where[j] and not self._queued(j, d)]
        absent = [j for j in late if (j, memory) not in coming] if late else late
        for j in absent:
            need += self.nbytes[j]
        for j in inputs:
            pins[j] += 1  # or making room could take them away
        extra, limit = 0, self.limit[memory]
        if self.short and not self.bare:
            extra = self._extra(i)
            limit -= self._working(d, extra)
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
        if not late or (ahead and all(coming[j, memory] != DISK for j in late)):
            self._launch(i, out)
        else:
            self.absent[i] = len(late)
            for j in late:
                self.awaited.setdefault((j, memory), []).append(i)
        return True

    def _extra(self, i: int) -> int:
        """Bytes that a step takes while it runs, beside what it reads and makes: no more than it
        could ever have."""
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

    def _working(self, d: int, extra: int) -> int:
        """Bytes that steps take while they run, with one more on d: a device runs one at a time."""
        here = self.work.get(d)
        most = max(here.values()) if here else 0
        there = [w for e, w in self.work.items() if e != d] if self.shared else ()
        return max(extra, most) + sum([max(w.values()) for w in there])

    def _stops_working(self, i: int, d: int) -> None:
        here = self.work.get(d)
        if here is not None and here.pop(i, None) is not None and not here:
            del self.work[d]

    def _is_early(self, i: int) -> bool:
        """Whether a step that runs aside only reads a file, while there is something else to do."""
        return not self.plan.steps[i].inputs and not self.quiet

    def _force(self, out: list[Instruction]) -> None:
        """Nothing is under way and nothing fits: believe no guess, or give up."""
        for d in self.plan.machine.devices:
            if not self.ready[d]:
                continue
            i = self._next(d)
            if self.guess[i]:
                memory = self.memory[d]
                inputs = self.plan.steps[i].inputs
                fetch = sum(self.nbytes[j] for j in inputs if memory not in self.where[j])
                room = self.limit[memory] - self.used[memory] - fetch
                # all else is idle, for nothing is under way
                stays = self._immovable(memory).union(inputs)
                room += sum(self.nbytes[j] for j in self.resident[memory] - stays)
                if room >= 0:
                    self.nbytes[i] = min(self.nbytes[i], room)
        self.touched.update(self.plan.machine.devices)
        self._advance(out)
        if not self.quiet:
            return
        self.bare = True
        self.touched.update(self.plan.machine.devices)
        self._advance(out)
        self.bare = False
        if not self.quiet:
            return
        for d in self.plan.machine.devices:
            if self.ready[d]:
                i = self._next(d)
                step = self.plan.steps[i]
                need = self.nbytes[i] + sum(self.nbytes[j] for j in step.inputs)
                others = self._immovable(self.memory[d]).difference(step.inputs)
                held = sum(self.nbytes[j] for j in others)
                held += self.plan.others.get(self.memory[d], 0)
                raise self._out_of_memory(does_not_fit(step.key, need, d, self.plan.machine, held))
        raise AssertionError("steps are left, but none is ready and nothing is under way")

    def _out_of_memory(self, text: str) -> OutOfMemory:
        for place, nbytes in self.plan.whole.items():
            text += "; " + no_room(nbytes, f"device {place}")
        error = OutOfMemory(text)
        error.plan = id(self.plan)
        return error

    def footprint(self, seconds: float) -> Footprint:
        """What the run took."""
        return Footprint(seconds, dict(self.peak), dict(self.moved), dict(self.spilled))

    # ---- invariants

    def validate(self) -> None:
        for place, held in self.resident.items():
            assert all(place in self.where[i] for i in held)
            total = sum(self._counted(i, place) for i in held)
            coming = sum(self._counted(i, place) for i, dst in self.coming if dst == place)
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
            assert list(self._idle(memory)) == idle, f"what leaves place {memory} is out of order"
        self.order = kept  # not what looking has put right
        assert all(n >= 0 for pins in self.pins.values() for n in pins)
        assert all(b >= 0 for b in self.busy.values())
        assert all(b >= 0 for b in self.flight.values())

    def validate_end(self) -> None:
        """After the run: nothing is held but the outputs, and every byte is accounted for."""
        for place, used in self.used.items():
            held = sum(self._counted(i, place) for i in self.resident[place])
            held += self.plan.others.get(place, 0)
            assert used == held, f"place {place}: {used} bytes counted, {held} held"
        kept = {i for held in self.resident.values() for i in held}
        assert kept == self.keep, "what is left is not what was asked for"
