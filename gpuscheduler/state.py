"""What to do next. Events in, instructions out; no device, no thread and no clock.

A step is *waiting* for its inputs, then *ready*, then *reserved* (its room is set aside and its
inputs are on their way), then *launched*, then *issued* (queued: readers elsewhere may follow),
then *done*. A value is a set of places. Values never change, so a copy is a replica and coherence
is a set.

A device obeys in order, so a reader is launched right behind what it reads on the same device, and
behind the copies that it needs: neither waits for the way to the host and back, and a device works
through its part of the plan in the plan's own order, which is what keeps its memory small.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

from .machine import HOST
from .plan import OutOfMemory, Plan, does_not_fit

#: Steps that may be under way on one device: few, so that values are used soon after they are made.
WINDOW = 4
#: ... and how many when all that they make and fetch is small beside the device's memory: enough
#: to hide the way to the device and back.
DEEP_WINDOW = 64
#: What "small beside the memory" is.
SHARE = 1 / 20
#: Refusals that a step may have because of others before it is given the device to itself.
PATIENCE = 100


@dataclass(slots=True)
class Launch:
    step: int
    place: int


@dataclass(slots=True)
class Copy:
    step: int
    src: int
    dst: int


@dataclass(slots=True)
class Free:
    step: int
    place: int


@dataclass(slots=True)
class Issued:
    """The step is queued on its device, and its value has `nbytes`: readers may follow."""

    step: int
    nbytes: int


@dataclass(slots=True)
class Done:
    """The step no longer needs its inputs."""

    step: int


@dataclass(slots=True)
class Copied:
    step: int
    src: int
    dst: int


@dataclass(slots=True)
class NoRoom:
    """The allocator refused: a launch of `step`, or a copy of it into `place`, needs `nbytes`.

    A launch is also refused, with 0 bytes, where one that it reads was refused before it.
    """

    step: int
    place: int
    nbytes: int


@dataclass(slots=True)
class Failed:
    """A task raised, or a device did. The run ends: `State` never sees this one."""

    step: int
    error: BaseException


NOWHERE: Set[int] = frozenset()

Instruction = Launch | Copy | Free
Event = Issued | Done | Copied | NoRoom | Failed


class State:
    """Everything known about a run. `check=True` validates the invariants after each event.

    >>> from gpuscheduler.graph import from_dask
    >>> from gpuscheduler.machine import Machine
    >>> from gpuscheduler.plan import make_plan
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
        self.kind = [s.kind for s in steps]
        self.readers = plan.readers
        self.missing = [len(s.inputs) for s in steps]  # inputs that a launch would not find yet
        self.unread = [len(r) for r in plan.readers]  # readers that are not done yet
        self.nbytes = [s.nbytes for s in steps]
        self.guess = bytearray(not s.known for s in steps)  # whether nbytes is only a guess
        self.where: list[Set[int]] = [NOWHERE] * n  # places that hold the value
        self.pins = {p: [0] * n for p in (HOST, *devices)}  # uses under way, per place
        self.used = dict.fromkeys((HOST, *devices), 0)  # bytes held, reserved or coming
        self.peak = dict.fromkeys((HOST, *devices), 0)
        self.resident: dict[int, set[int]] = {p: set() for p in (HOST, *devices)}
        self.coming: dict[tuple[int, int], int] = {}  # copies under way: (step, dst) -> src
        self.awaited: dict[tuple[int, int], list[int]] = {}  # ... and the steps that wait for them
        self.absent: dict[int, int] = {}  # reserved step -> inputs still on their way
        self.ready: dict[int, list[int]] = {d: [] for d in devices}  # heaps, by order in the plan
        self.waits = bytearray(n)  # whether a step is in its device's heap
        self.busy = dict.fromkeys(devices, 0)  # steps reserved or launched, not done
        self.flight = dict.fromkeys(devices, 0)  # ... the bytes that those make and fetch
        self.bytes = [0] * n  # ... by step
        self.share = {d: int(SHARE * plan.machine.memory[d]) for d in devices}
        self.refused: dict[tuple[int, bool], int] = {}  # (step, itself) -> how often: it or others
        self.seen: dict[int, int] = {}  # kind of step -> bytes of the largest value it has made
        self.fixed = {i for i, s in enumerate(steps) if s.fixed}
        self.keep = self.fixed.union(plan.outputs)
        self.cursor = [0] * n  # readers[i][:cursor[i]] are done
        self.launched = bytearray(n)
        self.issued = bytearray(n)
        self.done = bytearray(n)
        self.left = n
        self.touched: set[int] = set(devices)  # devices on which something may now be possible

    @property
    def finished(self) -> bool:
        return self.left == 0 and not self.coming

    @property
    def quiet(self) -> bool:
        """Nothing is under way, so nothing will ever happen by itself."""
        return not self.coming and not any(self.busy.values())

    def start(self) -> list[Instruction]:
        for i in sorted(self.fixed):
            self._exists(i)
        for i, n in enumerate(self.missing):
            if not n and i not in self.fixed:
                self._is_ready(i)
        return self.handle()

    def _exists(self, i: int) -> None:
        """A value of the graph, on its device before the run begins."""
        place = self.place[i]
        self.launched[i] = self.issued[i] = self.done[i] = 1
        self.left -= 1
        self.where[i] = {place}
        self.resident[place].add(i)
        self._use(place, self.nbytes[i])
        for r in self.readers[i]:
            self.missing[r] -= 1

    def handle(self, *events: Event) -> list[Instruction]:
        out: list[Instruction] = []
        for event in events:
            kind = type(event)
            if kind is Issued:
                self._issued(event.step, event.nbytes)  # type: ignore[union-attr]
            elif kind is Done:
                self._done(event.step, out)
            elif kind is Copied:
                self._copied(event, out)  # type: ignore[arg-type]
            elif kind is NoRoom:
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

    def _issued(self, i: int, nbytes: int) -> None:
        place = self.place[i]
        extra = nbytes - self.nbytes[i]
        if extra:
            self.nbytes[i] = nbytes
            self._use(place, extra)
        self.guess[i] = False
        self.issued[i] = 1
        self.where[i] = {place}
        self.resident[place].add(i)
        kind = self.kind[i]
        if nbytes > self.seen.get(kind, -1):
            self.seen[kind] = nbytes
        where = self.place
        for r in self.readers[i]:
            if not self.ahead or where[r] != place:
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
        if self.ahead:
            for r in self.readers[i]:
                if self.place[r] == d:
                    self._found(r)

    def _done(self, i: int, out: list[Instruction]) -> None:
        place = self.place[i]
        self.left -= 1
        self.busy[place] -= 1
        self.flight[place] -= self.bytes[i]
        self.done[i] = 1
        self.touched.add(place)
        unread, pins, keep = self.unread, self.pins[place], self.keep
        for j in self.plan.steps[i].inputs:
            left = unread[j] = unread[j] - 1
            if left or j in keep:
                self._unpin(j, place, out)
                continue
            pins[j] -= 1
            if not pins[j]:
                self._drop(j, out)
        self._unpin(i, place, out)
        if i in self.plan.deliver and HOST not in self.where[i] and (i, HOST) not in self.coming:
            self._send(i, place, HOST, out)

    def _copied(self, event: Copied, out: list[Instruction]) -> None:
        i, src, dst = event.step, event.src, event.dst
        del self.coming[i, dst]
        self.where[i] = self.where[i] | {dst}
        self.resident[dst].add(i)
        self.touched.update({src, dst} - {HOST})
        for r in self.awaited.pop((i, dst), ()):
            self.absent[r] -= 1
            if not self.absent[r]:
                del self.absent[r]
                self._launch(r, out)
        self._unpin(i, src, out)
        # a copy to the host makes room; a result that is still read stays as long as there is some
        still_read = i in self.plan.deliver and self.unread[i]
        if dst == HOST and src in self.where[i] and not self.pins[src][i] and not still_read:
            self._free(i, src, out)
        if not self.pins[dst][i] and not self.unread[i] and i not in self.keep:
            self._free(i, dst, out)

    def _no_room(self, event: NoRoom, out: list[Instruction]) -> None:
        """An estimate was wrong. Learn the true size; the steps it held up are ready again."""
        i, place = event.step, event.place
        if place != HOST:
            self.touched.add(place)
        if (i, place) in self.coming:
            src = self.coming.pop((i, place))
            self._use(place, -self.nbytes[i])
            self._unpin(i, src, out)
            for r in self.awaited.pop((i, place), ()):
                self._unreserve(r, out)
                self._insist(r, 0)
            return
        self._recall(i)
        self._unreserve(i, out)
        if event.nbytes:
            self.nbytes[i] = max(self.nbytes[i], event.nbytes)
            self.guess[i] = False
        self._insist(i, event.nbytes)

    def _insist(self, i: int, nbytes: int) -> None:
        """What is refused again although it should fit gets the device to itself; then it fails."""
        patience = 1 if nbytes else PATIENCE
        refused = self.refused[i, nbytes > 0] = self.refused.get((i, nbytes > 0), 0) + 1
        if refused <= patience:
            return
        step = self.plan.steps[i]
        limit = self.plan.machine.memory[step.place]
        if refused > 2 * patience:
            need = self.nbytes[i] + sum(self.nbytes[j] for j in step.inputs)
            raise OutOfMemory(
                f"{step.key!r}: device {step.place} refused {nbytes or need:,} bytes although "
                f"nothing else ran there, under a limit of {limit:,} bytes: something else holds "
                "the device's memory; free it, use smaller chunks, or lower memory_limit"
            )
        others = self.fixed.intersection(self.resident[step.place]).difference(step.inputs)
        whole = limit - sum(self.nbytes[j] for j in (*step.inputs, *others))
        self.nbytes[i] = max(self.nbytes[i], whole)
        self.guess[i] = False

    def _recall(self, i: int) -> None:
        """A launch was refused: steps queued behind it that read it will be refused, too."""
        self.launched[i] = 0
        if not self.ahead:
            return
        for r in self.readers[i]:
            if self.place[r] == self.place[i]:
                self.missing[r] += 1  # it leaves the heap when it comes to the top

    def _unreserve(self, i: int, out: list[Instruction]) -> None:
        d = self.place[i]
        if self.absent.pop(i, None) is not None:
            for waiting in self.awaited.values():
                if i in waiting:
                    waiting.remove(i)
        self._use(d, -self.nbytes[i])
        self.busy[d] -= 1
        self.flight[d] -= self.bytes[i]
        self.pins[d][i] -= 1
        if not self.missing[i]:
            self._is_ready(i)
        for j in self.plan.steps[i].inputs:
            self._unpin(j, d, out)

    # ---- memory

    def _use(self, place: int, nbytes: int) -> None:
        self.used[place] = used = self.used[place] + nbytes
        if used > self.peak[place]:
            self.peak[place] = used

    def _unpin(self, i: int, place: int, out: list[Instruction]) -> None:
        pins = self.pins[place]
        pins[i] -= 1
        if pins[i] or self.unread[i]:
            return
        if i in self.keep:
            if HOST in self.where[i] and i in self.plan.deliver and place != HOST:
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
        self.used[place] -= self.nbytes[i]
        if place != HOST:
            self.touched.add(place)
        out.append(Free(i, place))

    def _send(self, i: int, src: int, dst: int, out: list[Instruction]) -> None:
        self.pins[src][i] += 1
        self.coming[i, dst] = src
        self._use(dst, self.nbytes[i])
        out.append(Copy(i, src, dst))

    def _next_use(self, i: int, place: int) -> float:
        """The next step that reads i here: exact, since the plan says what comes next."""
        readers, c = self.readers[i], self.cursor[i]
        while c < len(readers) and self.done[readers[c]]:
            c += 1
        self.cursor[i] = c
        return next((r for r in readers[c:] if self.place[r] == place and not self.done[r]), inf)

    def _make_room(self, place: int, need: int, out: list[Instruction]) -> None:
        """Evict what is needed latest, until `need` more bytes would fit."""
        room = self.plan.machine.memory[place] - self.used[place]
        room += sum(
            self.nbytes[i]
            for (i, dst), src in self.coming.items()
            if dst == HOST and src == place and self.pins[place][i] == 1
        )
        if room >= need:
            return
        pins = self.pins[place]
        idle = [i for i in self.resident[place] if not pins[i] and self.nbytes[i]]
        if self.fixed:
            idle = [i for i in idle if i not in self.fixed or self.place[i] != place]
        idle.sort(key=lambda i: (self._next_use(i, place), i), reverse=True)
        for i in idle:
            if room >= need:
                return
            room += self.nbytes[i]
            if len(self.where[i]) > 1:
                self._free(i, place, out)
            else:
                self._send(i, place, HOST, out)

    # ---- steps

    def _advance(self, out: list[Instruction]) -> None:
        while self.touched:
            touched = sorted(self.touched)
            self.touched.clear()
            for d in touched:
                ready, busy = self.ready[d], self.busy
                while ready:
                    i = ready[0]
                    if self.missing[i]:  # an input of it was refused since
                        self.waits[heappop(ready)] = 0
                        continue
                    if busy[d] >= self.window and not self._fits_deep(i, d):
                        break
                    self.waits[heappop(ready)] = 0
                    if not self._reserve(i, d, out):
                        self._is_ready(i)
                        break
                # what this device just freed or sent away concerns no other one
                self.touched.discard(d)

    def _fits_deep(self, i: int, d: int) -> bool:
        """Whether one more step may be under way than the window says."""
        if self.busy[d] >= self.deep_window:
            return False
        seen = self.seen.get(self.kind[i])
        if self.guess[i] and seen is None:
            return False  # its first value may be of any size
        fetched = 0
        for j in self.plan.steps[i].inputs:
            if self.place[j] != d and d not in self.where[j]:
                fetched += self.nbytes[j]
        return self.flight[d] + max(self.nbytes[i], seen or 0) + fetched <= self.share[d]

    def _queued(self, j: int, d: int) -> bool:
        """Whether step j is in device d's queue, ahead of whatever is launched there next."""
        return bool(self.launched[j]) and self.place[j] == d and not self.issued[j]

    def _reserve(self, i: int, d: int, out: list[Instruction]) -> bool:
        """Set aside room for a step's value and its absent inputs: all of it, or none."""
        inputs, where, coming = self.plan.steps[i].inputs, self.where, self.coming
        pins = self.pins[d]
        need = self.nbytes[i]
        late = [j for j in inputs if d not in where[j] and not self._queued(j, d)]
        absent = [j for j in late if (j, d) not in coming] if late else late
        for j in absent:
            need += self.nbytes[j]
        for j in inputs:
            pins[j] += 1  # or making room could take them away
        limit = self.plan.machine.memory[d]
        if self.used[d] + need > limit:
            self._make_room(d, need, out)
            if self.used[d] + need > limit:
                for j in inputs:
                    pins[j] -= 1
                return False
        self._use(d, self.nbytes[i])
        self.busy[d] += 1
        self.bytes[i] = max(need, self.seen.get(self.kind[i], 0))
        self.flight[d] += self.bytes[i]
        pins[i] += 1
        for j in absent:
            # from where it was made; else from any device that holds it, else from the host
            src = self.place[j] if self.place[j] in where[j] else max(where[j])
            self._send(j, src, d, out)
        if self.ahead or not late:
            self._launch(i, out)  # copies into a device are in its queue, too
        else:
            self.absent[i] = len(late)
            for j in late:
                self.awaited.setdefault((j, d), []).append(i)
        return True

    def _force(self, out: list[Instruction]) -> None:
        """Nothing is under way and nothing fits: believe no guess, or give up."""
        for d in self.plan.machine.devices:
            if not self.ready[d]:
                continue
            i = self.ready[d][0]
            if self.guess[i]:
                inputs = self.plan.steps[i].inputs
                fetch = sum(self.nbytes[j] for j in inputs if d not in self.where[j])
                room = self.plan.machine.memory[d] - self.used[d] - fetch
                for j in self.resident[d]:  # all idle: nothing is under way
                    stays = j in inputs or (j in self.fixed and self.place[j] == d)
                    room += 0 if stays else self.nbytes[j]
                if room >= 0:
                    self.nbytes[i] = min(self.nbytes[i], room)
        self.touched.update(self.plan.machine.devices)
        self._advance(out)
        if not self.quiet:
            return
        for d in self.plan.machine.devices:
            if self.ready[d]:
                i = self.ready[d][0]
                step = self.plan.steps[i]
                need = self.nbytes[i] + sum(self.nbytes[j] for j in step.inputs)
                limit = self.plan.machine.memory[d]
                raise OutOfMemory(does_not_fit(step.key, need, d, limit))
        raise AssertionError("steps are left, but none is ready and nothing is under way")

    # ---- invariants

    def validate(self) -> None:
        for place, held in self.resident.items():
            assert all(place in self.where[i] for i in held)
            total = sum(self.nbytes[i] for i in held)
            coming = sum(self.nbytes[i] for i, dst in self.coming if dst == place)
            assert self.used[place] >= total + coming, f"place {place}: more is held than counted"
        for i, places in enumerate(self.where):
            if places and not self.unread[i] and i not in self.keep:
                assert any(self.pins[p][i] for p in places), f"step {i} was not freed"
            if self.done[i] and (i in self.keep or self.unread[i]):
                assert places, f"step {i} is needed and gone"
        assert all(n >= 0 for pins in self.pins.values() for n in pins)
        assert all(b >= 0 for b in self.busy.values())
        assert all(b >= 0 for b in self.flight.values())

    def validate_end(self) -> None:
        """After the run: nothing is held but the outputs, and every byte is accounted for."""
        for place, used in self.used.items():
            held = sum(self.nbytes[i] for i in self.resident[place])
            assert used == held, f"place {place}: {used} bytes counted, {held} held"
        kept = {i for held in self.resident.values() for i in held}
        assert kept == self.keep, "what is left is not what was asked for"
