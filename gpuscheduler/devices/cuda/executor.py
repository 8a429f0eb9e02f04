"""Run plans on GPUs: a worker thread and long-lived streams for each device.

Events order the streams; the host does not wait between two steps of a graph.

Each device has three streams. The *home* stream runs all kernels. The *in* stream takes copies from
other devices and from the host. The *out* stream takes copies to the host. Memory returns to the
stream that allocated it, and is reused there in order. Numba and other libraries launch on CUDA's
default stream; CUDA orders that stream with the home stream, which is not `non_blocking`.

A value lies on the device of its step. Arrays that a task or the graph holds on another device are
copied when they come in. `caller_order` says how a run is ordered with its caller's streams.

A run reports `Issued`, and `Copied` between devices, when the work is queued: readers are queued
behind it. It reports `Done`, and `Copied` to the host, when the work is over: a thread waits for
the event. So values that count as held are held, and nothing reads values that were let go.

The caller's thread launches a plan that has run before and has only our own kernels. If no callback
listens to its steps, such a run ends when all is queued, as a call of CuPy does.
"""

from __future__ import annotations

from contextlib import suppress
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Any

from cupy.cuda import Device, runtime

from ...errors import Interrupted, OutOfMemory
from ...frontend.chunk import worth_keeping
from ...plan.machine import DISK, HOST
from ...plan.plan import Plan, no_room
from ...runtime.events import Done, Failed, Issued, NoRoom
from ...runtime.events import Event as StateEvent
from ...runtime.gather import ResultAssembly
from ...runtime.observe import RunRecord
from ...runtime.protocol import StepListener
from ...runtime.tape import LaunchTape, Order, by_turns, interleave_orders
from ...runtime.threads import Team, wait_for_events
from ...values import map_deep_leaves
from . import (
    caller_order,
    file_steps,
    given_values,
    host_steps,
    marks,
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
#: Seconds after which a worker with more to do reports. Each report wakes the loop, which takes the
#: interpreter from the threads that launch.
REPORT_EVERY = 0.002
#: Values of at least this many bytes get an event of their own: they may have to leave the device,
#: and their copy should not wait for later kernels.
MAY_LEAVE = 2**18
#: Seconds that a run may wait for its workers to be idle before it launches kernels itself. They
#: may still release the values of an earlier run: 512 values take more than 1 ms.
A_MOMENT = 0.02
#: Seconds for which the caller's thread polls kernels: a sleeping thread takes long to wake, and a
#: polling thread does not see Ctrl-C.
SPIN = 0.02
#: Bytes that devices may have fetched in a run that ends before its kernels do.
CROSSED = 2**26


class CudaDevices(GpuRun):
    """The GPUs of one run.

    The loop's verbs only collect orders; `wait` sends each worker all of its orders.
    """

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
        self._orders: list[list[Order]] = [[] for _ in self.lanes]
        #: Steps that are not launched yet; exact only where one thread launches (`light`).
        self.unlaunched = plan.launch_count
        replay = None if tape is None else team.replays.get(tape)
        #: Whether this run repeats the last one in the same memory. Then it looks at its chunks
        #: only when all is queued, while devices work.
        self.late = replay is not None and replay.is_current(self.given_state())
        if not self.late:
            given_values.take_chunks(self)
        away = given_values.take_values(self) if len(self.chunks) < len(plan.fixed_steps) else ()
        #: Whether the caller's thread launches: for compiled kernels that takes less time than to
        #: wake workers, which launch one after the other.
        self.light = (
            plan.tried
            and not self.exact
            and plan.launches_only
            and not plan.history.hosted
            and team.wait_until_idle(A_MOMENT)  # from what an earlier run has left behind
        )
        #: Whether the run may end when all is queued, before its kernels are over.
        self.ahead = self.light and told is StepListener.NOTHING
        if not plan.tried:
            placed = self.rooms.tasks if self.rooms is not None else {}
            tasks = [placed.get(i, s.task) for i, s in enumerate(plan.steps)]
            hardware.kernels.compile_ahead(tasks, self.lanes[0].device)
        #: By place: steps that such a run has launched, and that no event covers yet.
        self.unmarked: dict[int, list[int]] = {}
        #: By place: steps that the host computes now, and their readers. Only the worker uses it.
        self.away: list[set[int]] = [set() for _ in self.lanes]
        #: By place: readers of such steps that were launched, in that order.
        self.behind: list[list[int]] = [[] for _ in self.lanes]
        team.begin()
        if hardware.ranges is not None:
            self.probe = marks.RunProbe(self, None, hardware.ranges)
        self.before = caller_order.mark_callers(self)
        caller_order.order_behind_callers(self)
        for i in away:
            given_values.bring_value(self, i)

    # ---- verbs, in the loop's thread

    def launch(self, step: int, place: int) -> None:
        s = self.plan.steps[step]
        if s.aside:
            # those that only launch copies take the interpreter from each other
            most = FEWEST_FILES if s.kind in self.plan.history.pinned else None
            self.team.send_to_any(file_steps.run_aside, (self, step, place), place, most)
        else:
            self._orders[place].append(("launch", step, place))

    def copy(self, step: int, src: int, dst: int) -> None:
        if dst == HOST:
            self._orders[src].append(("to_host", step, src))
        elif dst == DISK and src == HOST:
            self.team.send_aside("writes", file_steps.write_file, (self, step, HOST))
        elif dst == DISK:
            self._orders[src].append(("to_disk", step, src))
        elif src == DISK:
            self.team.send_aside("reads", file_steps.read_file, (self, step, dst))
        else:
            self._orders[dst].append(("fetch", step, src))

    def free(self, step: int, place: int) -> None:
        if step in self.chunks:
            self.chunks[step].note_departure(place)
        if place == HOST:
            transfers.leave_host(self, step, self.held[HOST].pop(step))
        elif place == DISK:
            self.files.forget(step)
        else:
            self._orders[place].append(("free", step, place))

    def follow(self, tape: LaunchTape) -> bool:
        if not self.ahead:
            return False
        self.followed = True
        try:
            return tape_run.queue_tape(self, tape)
        finally:
            if self.late:
                given_values.take_chunks(self)

    def observe(self, record: RunRecord) -> None:
        marks.observe_run(self, record)

    def wait(self) -> list[StateEvent]:
        while True:
            if self.light:
                self._launch_and_poll()
            else:
                for place, todo in enumerate(self._orders):
                    if todo:
                        self._orders[place] = []
                        todo = by_turns(self.plan, place, todo)
                        self.team.send(place, self._run_orders, [place, todo])
            out = wait_for_events(self.events, self.team)
            if self.read or self.given or self.by_host:
                out = [e for e in out if not self._redirect(e)]
            if out:
                return out

    def interrupt(self) -> None:
        self.events.put([Failed(-1, Interrupted())])

    def value(self, step: int) -> Any:
        """A step's value; the caller's current stream waits until it is made."""
        home = self.plan.steps[step].place
        if step not in self.plan.deliver and (here := self.held[home].get(step)) is not None:
            return self.hardware.value_behind(here, self.lanes[home].device)
        places = [home, *range(len(self.lanes)), HOST]
        if step in self.plan.deliver:
            places.insert(0, HOST)  # its device has been told to let go of it, and may not have yet
        for place in places:
            held = self.held[place].get(step)
            if held is None:
                continue
            if place == HOST:
                if step in self.plan.deliver:
                    return map_deep_leaves(to_host_array, held.value)
                return self._bring_back(step, held.value)
            return self.hardware.value_behind(held, self.lanes[place].device)
        if step in self.files.of:
            value = self.hardware.store.read(self.files.of[step], self.plan.steps[step].key)
            return self._bring_back(step, value)
        s = self.plan.steps[step]
        if not s.again:
            raise KeyError(step)
        if not s.sent:
            return s.read()
        with Device(self.lanes[s.place].device):
            return map_deep_leaves(to_current_device, file_steps.read_pinned(self, s))

    def _bring_back(self, i: int, value: Any) -> Any:
        """Copy a result that had to leave its device back to that device."""
        step = self.plan.steps[i]
        device = self.lanes[step.place].device
        try:
            with Device(device):
                return map_deep_leaves(to_current_device, value)
        except Refused as error:
            what = f"{step.key!r} is a result"
            raise OutOfMemory(no_room(step.nbytes, f"GPU {device}", what)) from error

    def keep_part(self, step: int, path: tuple[int, ...]) -> tuple[dict[int, Any], int]:
        home = self.plan.steps[step].place
        if (here := self._sole_replica(step)) is not None:
            part = here.part(path)
            return {home: part}, array_bytes(part.value)
        held = self._replicas(step)
        if not held and step in self.files.of:
            file, value = self.files.part(step, path, self.plan.steps[step].key)
            return {DISK: file}, array_bytes(value)
        whole = worth_keeping(home, held) or {home: HeldValue(self.value(step))}
        parts = {p: h.part(path) for p, h in whole.items()}
        return parts, max(array_bytes(h.value) for h in parts.values())

    def _sole_replica(self, step: int) -> HeldValue | None:
        """A value that only its own device holds; None where the host or a file has it too."""
        if step in self.held[HOST] or step in self.files.of:
            return None
        return self.held[self.plan.steps[step].place].get(step)

    def _replicas(self, step: int) -> dict[int, HeldValue]:
        """All replicas of a value, by place; a worker may still release some."""
        return {p: found for p, h in self.held.items() if (found := h.get(step)) is not None}

    def keep(self, step: int) -> dict[int, Any]:
        home = self.plan.steps[step].place
        if (here := self._sole_replica(step)) is not None:
            return {home: here}
        places: dict[int, Any] = dict(self._replicas(step))
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
            self._release_all()
            self.given.clear()
            self.by_host.clear()
            self.result = self.gathering.made = None  # an error may hold this run for long

    def _release_all(self) -> None:
        for chunk in self.chunks.values():
            chunk.end_run()
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

    def _redirect(self, event: StateEvent | NextOrders) -> bool:
        """Give the order that a thread beside the loop asks for; False for other events.

        Such orders fetch a value that was read from a file, compute a step on the host, or take
        back a value that the host has made. Only the loop's thread gives orders.
        """
        if type(event) is not NextOrders:
            return False
        verb, step, _ = event.order
        if verb == "away":
            job = host_steps.run_on_host, (self, step, event.place)
            self.team.send_to_any(*job, event.place, self.hardware.host_threads, "host")
        else:
            self._orders[event.place].append(event.order)
        return True

    # ---- in the workers

    def _run_orders(self, order: list[Any]) -> None:
        try:
            self._run_each_order(*order)
        except BaseException as error:  # of the device itself, between two steps
            self.events.put([Failed(order[1][0][1], error)])

    def _launch_and_poll(self) -> None:
        """Launch in the caller's thread, and poll for finished steps for `SPIN` seconds.

        The workers wait for steps that take longer.
        """
        todo, self._orders = self._orders, [[] for _ in self.lanes]
        for place, orders in interleave_orders(self.plan, todo):
            lane = self.lanes[place]
            with Device(lane.device), lane.home:
                self.team.contexts[place].run(self._run_orders, [place, orders])
        if self._all_queued():
            self._report_all_done()
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
        """Whether the run can end before its kernels do.

        It cannot where devices have fetched many bytes: these would stay until the kernels end.
        """
        return self.ahead and not self.unlaunched and self.fetched <= CROSSED

    def _release(self, lane: DeviceLane, i: int) -> None:
        held = self.held[lane.place].pop(i)
        if not self._all_queued():
            lane.let_go(held)
        elif i in self.chunks:  # whose memory may be another stream's
            held.reads.append(lane.mark(lane.home))
            lane.let_go(held)
        else:
            lane.abandon(held)

    def _report_all_done(self) -> None:
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

    def _run_each_order(self, place: int, todo: list[Order]) -> None:
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
                    for one in (step,) if verb == "launch" else self._due_when_back(lane, step):
                        step = one  # of which a failure tells
                        waiting += self.plan.steps[step].seconds
                        if self._launch(lane, step, events, steps):
                            self.events.put(events)  # others may wait for it
                            events = []
                elif verb == "fetch":
                    fetch = transfers.fetch if self.probe is None else self.probe.fetch
                    events.append(fetch(self, lane, step, other))
                elif verb == "free":
                    self._release(lane, step)
                elif verb == "to_disk":
                    transfers.send_to_host(self, lane, step, DISK)
                else:
                    send = transfers if self.probe is None else self.probe
                    send.send_to_host(self, lane, step)
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
        """Report queued steps now, and have their end reported."""
        if events:
            self.events.put(events)
        if steps and self.ahead:  # nobody may have to wait for them
            self.unmarked.setdefault(lane.place, []).extend(steps)
        elif steps:
            self._wait_for(lane, steps)
        while not self.light and lane.settle(wait=False):
            pass

    def _wait_for(self, lane: DeviceLane, steps: list[int]) -> None:
        """Have one event waited for that covers these and all earlier steps of the lane."""
        steps = [*self.unmarked.pop(lane.place, ()), *steps]
        lane.queued.append((lane.mark(lane.home, block=True), self, steps))

    def _due_when_back(self, lane: DeviceLane, i: int) -> list[int]:
        """The steps to launch when a step is back from the host.

        These are the step, and all steps that wait for any step, in the order of the plan: a
        refused step was launched again, behind its readers. `_launch` puts back the steps that
        have to wait longer.
        """
        behind, self.behind[lane.place] = sorted(self.behind[lane.place]), []
        self.away[lane.place].difference_update(behind, (i,))
        return [i, *behind]

    def _launch(self, lane: DeviceLane, i: int, events: list[StateEvent], steps: list[int]) -> bool:
        """Queue a step. Returns whether other threads wait to hear of it."""
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
        hosted = not self.light and step_values.runs_on_host(self, step)
        if hosted and i not in self.by_host:
            away.add(i)
            self.given[i] = (
                step_values.read_inputs(self, lane, step),
                lane.mark(lane.home, block=True),
            )
            events.append(NextOrders(lane.place, ("away", i, lane.place)))  # type: ignore[arg-type]
            return True
        attempt = step_values.attempt if self.probe is None else self.probe.attempt
        value, refused = attempt(self, lane, i)
        if refused:
            lane.release_memory()
            value, refused = attempt(self, lane, i)
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
        last = self.ahead and not self.hardware.has_other_runs(self.team)
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
                    lane.wait_for_reads(h)
                else:
                    lane.let_go(h)
        held.clear()
        lane.sweep()
