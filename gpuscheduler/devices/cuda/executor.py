"""Run plans on GPUs: a worker thread and long-lived streams for each device.

A worker thread and long-lived streams for each, events between them, no host wait between two steps
of a graph. It imports CuPy, as `launch`, `replay` and `ipc` do beside it.

Each device has a *home* stream (all kernels, and what they allocate), an *in* stream (copies from
other devices and from the host, and what they are written to) and an *out* stream (copies to the
host). Memory goes back to the stream that it was allocated on, and is reused there in order. What a
task launches on CUDA's default stream, as Numba does and other libraries, is in order with its home
stream, by CUDA's own rule for streams that are not made `non_blocking`.

The order of a run's work and its caller's, on all devices and streams (`_follow_caller`,
`_go_before_caller` and `taken` see to it):

1. Each stream of a run is behind all that the caller has queued on her current stream of *any*
   device, and behind the streams that were given earlier results. A task may read any array that
   it has around it, on whichever device that lies: the run does not know of these.
2. The caller's current stream of *every* device is behind what she is given, wherever that lies.
3. A value lies on the device of its step. What a task or the graph has on another device is copied
   there when it comes in (`_brought_here`): nothing later has to ask.

"Any device" is any on which this process has a context: the caller can have arrays on those alone.

`Issued`, and `Copied` between devices, are reported when the work is queued: readers are queued
behind it. `Done`, and `Copied` to the host, are reported when it has happened, by a thread that
waits for it: so what is counted as held is held, and what is let go is no longer read.

A plan that has been run, and has nothing but our own kernels, needs no worker: the caller's thread
launches them all. Where nobody wants to hear of its steps, it is over when all is queued, as calls
of CuPy are: who uses a result does so behind it.
"""

from __future__ import annotations

from contextlib import suppress
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Any

from cupy.cuda import Device, runtime

from ...errors import Interrupted, OutOfMemory
from ...frontend.chunk import worth_keeping
from ...fusion.task import KernelTask
from ...plan.batching import Batch
from ...plan.machine import DISK, HOST
from ...plan.matmul import MatmulSumTask
from ...plan.plan import Plan, no_room
from ...runtime.events import Done, Failed, Issued, NoRoom
from ...runtime.events import Event as StateEvent
from ...runtime.gather import ResultAssembly
from ...runtime.protocol import StepListener
from ...runtime.tape import LaunchTape, Order, by_turns, interleave_orders
from ...runtime.threads import Team, wait_for_events
from ...values import map_leaves
from . import (
    caller_order,
    file_steps,
    given_values,
    host_steps,
    pickling,
    step_values,
    tape_run,
    transfers,
)
from .arrays import (
    Refused,
    array_bytes,
    device_bytes,
    is_on_host,
    to_current_device,
    to_host_array,
)
from .gpu_run import FEWEST_FILES, GpuRun
from .host_steps import NextOrders
from .lane import TOGETHER, DeviceLane, HeldValue

if TYPE_CHECKING:
    from .hardware import CudaHardware

pickling.teach()
#: A worker with more to do reports at least this often, in seconds: each report wakes the loop, and
#: takes the interpreter from the threads that launch.
REPORT_EVERY = 0.002
#: Bytes of a value from which on it is known when it is made: it may have to leave its device, and
#: should not wait for what is queued behind it.
MAY_LEAVE = 2**18
#: Tasks that are launched in little time; those of which a tape can tell.
LAUNCHES = {KernelTask, Batch, MatmulSumTask}
#: Seconds that a run may wait for the workers before it launches kernels itself. They may still let
#: go of what the run before has held: of 512 values that takes more than 1 ms.
A_MOMENT = 0.02
#: Seconds for which the caller's thread asks whether kernels are done: a thread that sleeps takes
#: long to wake, and one that asks does not see Ctrl-C.
SPIN = 0.02
#: Bytes that devices may have fetched in a run that ends before its kernels.
CROSSED = 2**26


class CudaDevices(GpuRun):
    """The GPUs of one run. Verbs only collect; `wait` sends each worker all it has got."""

    def __init__(
        self,
        plan: Plan,
        team: Team,
        gathering: ResultAssembly,
        hardware: CudaHardware,
        told: StepListener,
        tape: LaunchTape | None = None,
    ):
        super().__init__(plan, team, gathering, hardware, told)
        self._todo: list[list[Order]] = [[] for _ in self.lanes]
        self.unlaunched = plan.launches  # counted by one thread: `light`
        replay = None if tape is None else team.replays.get(tape)
        #: Whether this run does what the last one did, in the very same memory: for that no chunk
        #: has to be looked at. It is when all is queued, while devices work.
        self.late = replay is not None and replay.stands(self.given_state())
        if not self.late:
            given_values.take_chunks(self)
        away = given_values.take_values(self) if len(self.chunks) < len(plan.fixed) else ()
        #: Kernels that are compiled are launched by the caller's thread: that takes it less time
        #: than to wake others, which could only do it one after the other.
        self.light = (
            plan.tried
            and not self.exact
            and plan.types <= LAUNCHES
            and not plan.hosted
            and team.rests(A_MOMENT)  # from what an earlier run has left behind
        )
        #: Such a run may end when all is queued, and its results are made behind its back.
        self.ahead = self.light and told is StepListener.NOTHING
        if not plan.tried:
            placed = self.rooms.tasks if self.rooms is not None else {}
            tasks = [placed.get(i, s.task) for i, s in enumerate(plan.steps)]
            hardware.kernels.compile_ahead(tasks, self.lanes[0].device)
        self.unmarked: dict[int, list[int]] = {}  # launched by such a run, and not waited for yet
        #: On each place the steps that the host computes now and those that read them, and of
        #: these in their order those that have been launched: in its worker only.
        self.away: list[set[int]] = [set() for _ in self.lanes]
        self.behind: list[list[int]] = [[] for _ in self.lanes]
        team.begin()
        self.before = caller_order.mark_callers(self)
        caller_order.order_behind_callers(self)
        for i in away:
            given_values.bring_value(self, i)

    # ---- verbs, in the loop's thread

    def launch(self, step: int, place: int) -> None:
        s = self.plan.steps[step]
        if s.aside:
            # those that only launch copies take the interpreter from each other
            most = FEWEST_FILES if s.kind in self.plan.pinned else None
            self.team.send_to_any(file_steps.run_aside, (self, step, place), place, most)
        else:
            self._todo[place].append(("launch", step, place))

    def copy(self, step: int, src: int, dst: int) -> None:
        if dst == HOST:
            self._todo[src].append(("to_host", step, src))
        elif dst == DISK and src == HOST:
            self.team.send_aside("writes", file_steps.write_file, (self, step, HOST))
        elif dst == DISK:
            self._todo[src].append(("to_disk", step, src))
        elif src == DISK:
            self.team.send_aside("reads", file_steps.read_file, (self, step, dst))
        else:
            self._todo[dst].append(("fetch", step, src))

    def free(self, step: int, place: int) -> None:
        if step in self.chunks:
            self.chunks[step].left(place)
        if place == HOST:
            transfers.leave_host(self, step, self.held[HOST].pop(step))
        elif place == DISK:
            self.files.forget(step)
        else:
            self._todo[place].append(("free", step, place))

    def follow(self, tape: LaunchTape) -> bool:
        if not self.ahead:
            return False
        self.followed = True
        try:
            return tape_run.queue_tape(self, tape)
        finally:
            if self.late:
                given_values.take_chunks(self)

    def wait(self) -> list[StateEvent]:
        while True:
            if self.light:
                self._obey_here()
            else:
                for place, todo in enumerate(self._todo):
                    if todo:
                        self._todo[place] = []
                        todo = by_turns(self.plan, place, todo)
                        self.team.send(place, self._obey, [place, todo])
            out = wait_for_events(self.events, self.team)
            if self.read or self.given or self.by_host:
                out = [e for e in out if not self._goes_on(e)]
            if out:
                return out

    def interrupt(self) -> None:
        self.events.put([Failed(-1, Interrupted())])

    def value(self, step: int) -> Any:
        """The value, ordered behind its making on the caller's current stream of its device."""
        home = self.plan.steps[step].place
        if step not in self.plan.deliver and (here := self.held[home].get(step)) is not None:
            return self.hardware._behind(here, self.lanes[home].device)
        places = [home, *range(len(self.lanes)), HOST]
        if step in self.plan.deliver:
            places.insert(0, HOST)  # its device has been told to let go of it, and may not have yet
        for place in places:
            held = self.held[place].get(step)
            if held is None:
                continue
            if place == HOST:
                if step in self.plan.deliver:
                    return map_leaves(to_host_array, held.value)
                return self._brought_back(step, held.value)
            return self.hardware._behind(held, self.lanes[place].device)
        if step in self.files.of:
            value = self.hardware.store.read(self.files.of[step], self.plan.steps[step].key)
            return self._brought_back(step, value)
        s = self.plan.steps[step]
        if not s.again:
            raise KeyError(step)
        if not s.sent:
            return s.read()
        with Device(self.lanes[s.place].device):
            return map_leaves(to_current_device, file_steps.read_pinned(self, s))

    def _brought_back(self, i: int, value: Any) -> Any:
        """A result that had to leave its device, on that again."""
        step = self.plan.steps[i]
        device = self.lanes[step.place].device
        try:
            with Device(device):
                return map_leaves(to_current_device, value)
        except Refused as error:
            what = f"{step.key!r} is a result"
            raise OutOfMemory(no_room(step.nbytes, f"GPU {device}", what)) from error

    def keep_part(self, step: int, path: tuple[int, ...]) -> tuple[dict[int, Any], int]:
        home = self.plan.steps[step].place
        if (here := self._only(step)) is not None:
            part = here.part(path)
            return {home: part}, array_bytes(part.value)
        held = self._places(step)
        if not held and step in self.files.of:
            file, value = self.files.part(step, path, self.plan.steps[step].key)
            return {DISK: file}, array_bytes(value)
        whole = worth_keeping(home, held) or {home: HeldValue(self.value(step))}
        parts = {p: h.part(path) for p, h in whole.items()}
        return parts, max(array_bytes(h.value) for h in parts.values())

    def _only(self, step: int) -> HeldValue | None:
        """What its own device has of a value, where neither the host nor a file has any."""
        if step in self.held[HOST] or step in self.files.of:
            return None
        return self.held[self.plan.steps[step].place].get(step)

    def _places(self, step: int) -> dict[int, HeldValue]:
        """What there is of a value; a worker may be letting go of replicas still."""
        return {p: found for p, h in self.held.items() if (found := h.get(step)) is not None}

    def keep(self, step: int) -> dict[int, Any]:
        home = self.plan.steps[step].place
        if (here := self._only(step)) is not None:
            return {home: here}
        places: dict[int, Any] = dict(self._places(step))
        if step in self.files.of:
            places[DISK] = self.files.of.pop(step)
        return worth_keeping(home, places) or {home: HeldValue(self.value(step))}

    def close(self) -> None:
        self.files.end()  # first: a chunk hears of each file that is kept
        self.stopped = True
        try:
            if self.ahead:
                caller_order.order_callers_behind(self)
        finally:
            self._let_all_go()
            self.given.clear()
            self.by_host.clear()
            self.result = self.gathering.made = None  # an error may hold this run for long

    def _let_all_go(self) -> None:
        for chunk in self.chunks.values():
            chunk.settled()
        for place, lane in enumerate(self.lanes):
            if self.light:
                with suppress(runtime.CUDARuntimeError), Device(lane.device):
                    self._clear(place)
            else:
                self.team.send_last(place, self._clear, place)
        on_host, self.held[HOST] = self.held[HOST], {}
        for step, held in on_host.items():
            transfers.leave_host(self, step, held)
        for step in self.chunks:
            self.files.of.pop(step, None)
        for step in list(self.files.of):
            self.files.forget(step)

    def _goes_on(self, event: StateEvent | NextOrders) -> bool:
        """Send what was read from a file on to its device, what CuPy has refused to the host, and
        what that has made back: only this thread gives orders."""
        if type(event) is not NextOrders:
            return False
        verb, step, _ = event.order
        if verb == "away":
            job = host_steps.run_on_host, (self, step, event.place)
            self.team.send_to_any(*job, event.place, self.hardware.host_threads, "host")
        else:
            self._todo[event.place].append(event.order)
        return True

    # ---- in the workers

    def _obey(self, order: list[Any]) -> None:
        try:
            self._obey_all(*order)
        except BaseException as error:  # of the device itself, between two steps
            self.events.put([Failed(order[1][0][1], error)])

    def _obey_here(self) -> None:
        """In the caller's thread, which looks itself for what is done; what takes longer, the
        workers wait for."""
        todo, self._todo = self._todo, [[] for _ in self.lanes]
        for place, orders in interleave_orders(self.plan, todo):
            lane = self.lanes[place]
            with Device(lane.device), lane.home:
                self.team.contexts[place].run(self._obey, [place, orders])
        if self._all_queued():
            self._call_it_done()
        if not self.events.empty():
            return
        for place, (first, *_) in list(self.unmarked.items()):
            lane = self.lanes[place]
            try:
                with Device(lane.device):
                    self._wait_for(lane, [])
            except BaseException as error:
                self.tell([Failed(first, error)])
                return
        end = perf_counter() + SPIN
        # when all is launched, nothing can begin because something else is done
        while self.events.empty() or (not self.unlaunched and any(k.queued for k in self.lanes)):
            for lane in self.lanes:
                lane.settle(wait=False)
            if perf_counter() > end:
                for place, lane in enumerate(self.lanes):
                    if lane.queued:
                        self.team.wake(place)
                return
            sleep(0)

    def _all_queued(self) -> bool:
        """Whether the run can end without its kernels: not where much would be kept until they have
        run, as what other devices read."""
        return self.ahead and not self.unlaunched and self.fetched <= CROSSED

    def _let_go(self, lane: DeviceLane, i: int) -> None:
        held = self.held[lane.place].pop(i)
        if not self._all_queued():
            lane.let_go(held)
        elif i in self.chunks:  # whose memory may be another stream's
            held.reads.append(lane.mark(lane.home))
            lane.let_go(held)
        else:
            lane.abandon(held)

    def _call_it_done(self) -> None:
        for steps in self.unmarked.values():
            self.tell([Done(i) for i in steps])
        self.unmarked.clear()
        for lane in self.lanes:
            if lane.settling.acquire(blocking=False):
                try:
                    while lane.queued and lane.queued[0][1] is self:
                        self.tell([Done(i) for i in lane.queued.popleft()[2]])
                finally:
                    lane.settling.release()

    def _obey_all(self, place: int, todo: list[Order]) -> None:
        lane = self.lanes[place]
        events: list[StateEvent] = []
        steps: list[int] = []  # that will be waited for together
        waiting = 0.0  # seconds that they should take
        report = perf_counter() + REPORT_EVERY
        lane.sweep()
        lane.make_current()
        for verb, step, other in todo:
            if self.stopped:
                break
            try:
                if verb in ("launch", "back"):
                    for one in (step,) if verb == "launch" else self._back(lane, step):
                        step = one  # of which a failure tells
                        waiting += self.plan.steps[step].seconds
                        if self._launch(lane, step, events, steps):
                            self.events.put(events)  # others may wait for it
                            events = []
                elif verb == "fetch":
                    events.append(transfers.fetch(self, lane, step, other))
                elif verb == "free":
                    self._let_go(lane, step)
                elif verb == "to_disk":
                    transfers.send_to_host(self, lane, step, DISK)
                else:
                    transfers.send_to_host(self, lane, step)
            except BaseException as error:
                events.append(Failed(step, error))
                break
            if waiting > TOGETHER or len(steps) >= lane.together:
                self._wait_for(lane, steps)
                steps, waiting = [], 0.0
            if perf_counter() > report:
                self._report(lane, events, steps)
                events, steps, waiting = [], [], 0.0
                report = perf_counter() + REPORT_EVERY
        self._report(lane, events, steps)
        del events  # or a failure and its traceback would hold each other

    def _report(self, lane: DeviceLane, events: list[StateEvent], steps: list[int]) -> None:
        """Say what is queued now, and what is done when the device is."""
        if events:
            self.events.put(events)
        if steps and self.ahead:  # nobody may have to wait for them
            self.unmarked.setdefault(lane.place, []).extend(steps)
        elif steps:
            self._wait_for(lane, steps)
        while not self.light and lane.settle(wait=False):
            pass

    def _wait_for(self, lane: DeviceLane, steps: list[int]) -> None:
        """Have these, and all that the lane was given before, waited for together."""
        steps = [*self.unmarked.pop(lane.place, ()), *steps]
        lane.queued.append((lane.mark(lane.home, block=True), self, steps))

    def _back(self, lane: DeviceLane, i: int) -> list[int]:
        """What to launch when a step is back from the host: it, and all that wait for any step, in
        the order of the plan (what was refused was launched again, behind its readers). Those that
        have to go on waiting are put back."""
        behind, self.behind[lane.place] = sorted(self.behind[lane.place]), []
        self.away[lane.place].difference_update(behind, (i,))
        return [i, *behind]

    def _launch(self, lane: DeviceLane, i: int, events: list[StateEvent], steps: list[int]) -> bool:
        """Queue a step; whether others wait to hear of it."""
        held, step = self.held[lane.place], self.plan.steps[i]
        away = self.away[lane.place]
        if away and not away.isdisjoint(step.inputs):
            away.add(i)
            self.behind[lane.place].append(i)
            return False
        for j in step.inputs:
            read = held.get(j)
            if read is None:  # it was refused before
                events.append(NoRoom(i, lane.place, 0))
                return False
            if read.unseen:
                lane.home.wait_event(read.ready)
                read.unseen = False
        if step.kind in self.plan.hosted and i not in self.by_host and not self.light:
            away.add(i)
            self.given[i] = (
                step_values.read_inputs(self, lane, step),
                lane.mark(lane.home, block=True),
            )
            events.append(NextOrders(lane.place, ("away", i, lane.place)))  # type: ignore[arg-type]
            return True
        value, refused = step_values.attempt(self, lane, i)
        if refused:
            lane.release_memory()
            value, refused = step_values.attempt(self, lane, i)
        if refused:
            events.append(NoRoom(i, lane.place, max(refused, step.nbytes)))
            return False
        value = step_values.put_into_result(self, lane, i, value)
        nbytes = device_bytes(value)
        other = self.crossing[i] or (i in self.wanted and nbytes) or nbytes >= MAY_LEAVE
        ready = lane.mark(lane.home) if other else None
        empty = not (nbytes or step.constants) and is_on_host(value)
        empty = empty and all(held[j].empty for j in step.inputs)
        held[i] = HeldValue(value, ready, empty=empty)
        self.unlaunched -= 1
        more = max(0, self.took.pop(i, 0) - nbytes) if self.took else 0
        if i in self.plan.lent or step_values.is_in_result(self, i, value):
            nbytes = 0
        events.append(Issued(i, nbytes, more))
        if empty and not self.exact:
            events.append(Done(i))
            return bool(self.crossing[i])
        if self.exact:
            lane.home.synchronize()
            events.append(Done(i))
            return True
        steps.append(i)
        return bool(self.crossing[i])

    def _clear(self, place: int) -> None:
        try:
            self._drop_all(place)
        except runtime.CUDARuntimeError:  # the device is lost: nothing uses anything there
            self.held[place].clear()
            self.lanes[place].later.clear()
            self.lanes[place].queued.clear()

    def _drop_all(self, place: int) -> None:
        lane, held = self.lanes[place], self.held[place]
        done = lane.mark(lane.home) if held else None
        late = [done] if done is not None and not done.done else []
        # what comes next is behind this run, but not what another thread runs now
        last = self.ahead and not self.hardware.others(self.team)
        arrived = False
        for i, h in held.items():
            if late and self.plan.steps[i].aside:  # pinned memory, of which tasks make copies
                lane.later.append((late, h.value))
            if h.ready is None and not h.reads and i not in self.chunks and not self.ahead:
                continue  # of which nobody but this lane knew
            chunk = self.chunks.get(i)
            if chunk is not None and chunk.places.get(place) is h:
                # it stays, and may be read here still when it goes
                if h.reads or late:
                    h.reads = [e for e in h.reads if not e.done] + late
                if h.reads and not last:
                    lane.later.append((h.reads, h.value))
            elif self.ahead and not last and self.plan.steps[i].fixed:
                lane.later.append(([done, *h.reads], h.value))
            else:
                if h.arrived and not arrived:
                    lane.incoming.wait_event(done)
                    arrived = True
                if self.followed:  # much may have been read elsewhere
                    lane.go_behind(h)
                else:
                    lane.let_go(h)
        held.clear()
        lane.sweep()
