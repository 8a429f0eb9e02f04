"""Carry out the orders of a run on its devices: launch steps, copy and free values."""

from __future__ import annotations

from functools import partial
from time import perf_counter, sleep
from typing import Any

from cupy.cuda import Device, runtime

from ...plan.machine import DISK
from ...runtime.events import Done, Failed, Issued, NoRoom
from ...runtime.events import Event as StateEvent
from ...runtime.tape import Order, interleave_orders
from .arrays import device_bytes, is_on_host
from .host_steps import HostSteps
from .lane import TOGETHER, DeviceLane, HeldValue
from .run_context import RunContext
from .step_values import StepValues
from .transfers import Transfers

#: Seconds after which a worker with more to do reports. Each report wakes the loop, which takes the
#: interpreter from the threads that launch.
REPORT_EVERY = 0.002
#: Values of at least this many bytes get an event of their own: they may have to leave the device,
#: and their copy should not wait for later kernels.
MAY_LEAVE = 2**18
#: Seconds for which the caller's thread polls kernels: a sleeping thread takes long to wake, and a
#: polling thread does not see Ctrl-C.
SPIN = 0.02
#: Bytes that devices may have fetched in a run that ends before its kernels do.
CROSSED = 2**26


class LaneOrders:
    """Carries out orders, each lane's in turn, in its worker or in the caller's thread.

    It owns the count of steps that are not launched, and the steps that no event covers yet. A step
    is launched on the home stream behind the events of its inputs. It is `Issued` when it is
    queued, and `Done` when an event recorded behind it is over; one event covers several steps. A
    value is let go of when the copies that read it are over.
    """

    def __init__(
        self,
        run: RunContext,
        steps: StepValues,
        transfers: Transfers,
        host_steps: HostSteps,
        light: bool,
        ahead: bool,
    ):
        self.run, self.steps, self.transfers = run, steps, transfers
        self.host_steps = host_steps
        #: Whether the caller's thread launches: for compiled kernels that takes less time than to
        #: wake workers, which launch one after the other.
        self.light = light
        #: Whether the run may end when all is queued, before its kernels are over.
        self.ahead = ahead
        #: Steps that are not launched yet; exact only where one thread launches (`light`).
        self._unlaunched = run.plan.launch_count
        #: By place: steps that such a run has launched, and that no event covers yet.
        self._unmarked: dict[int, list[int]] = {}

    # ---- in the caller's thread

    def launch_and_poll(self, todo: list[list[Order]]) -> None:
        """Launch in the caller's thread, and poll for finished steps for `SPIN` seconds.

        The workers wait for steps that take longer.
        """
        run = self.run
        lanes, events = run.lanes, run.events
        for place, orders in interleave_orders(run.plan, todo):
            lane = lanes[place]
            with Device(lane.device), lane.home:
                run.team.contexts[place].run(self.carry_out, [place, orders])
        if self._all_queued():
            self._report_all_done()
        if not events.empty():
            return
        for place, (first, *_) in list(self._unmarked.items()):
            lane = lanes[place]
            try:
                with Device(lane.device):
                    self._wait_for(lane, [])
            except BaseException as error:
                run.tell([Failed(first, error)])
                return
        end = perf_counter() + SPIN
        # when all is launched, nothing can begin because something else is done
        while events.empty() or (not self._unlaunched and any(k.queued for k in lanes)):
            for lane in lanes:
                lane.settle(wait=False)
            if perf_counter() > end:
                for place, lane in enumerate(lanes):
                    if lane.queued:
                        run.team.wake(place)
                return
            sleep(0)

    def _all_queued(self) -> bool:
        """Whether the run can end before its kernels do.

        It cannot where devices have fetched many bytes: these would stay until the kernels end.
        """
        return self.ahead and not self._unlaunched and self.transfers.fetched <= CROSSED

    def _report_all_done(self) -> None:
        run = self.run
        for steps in self._unmarked.values():
            run.tell([Done(i) for i in steps])
        self._unmarked.clear()
        for lane in run.lanes:
            if lane.settling.acquire(blocking=False):
                try:
                    while lane.queued and lane.queued[0][1] is run:
                        run.tell([Done(i) for i in lane.queued.popleft()[2]])
                finally:
                    lane.settling.release()

    # ---- in the lane's worker, or in the caller's thread

    def carry_out(self, order: list[Any]) -> None:
        """Carry out orders to one place, and report what becomes of them."""
        try:
            self._carry_out_each(*order)
        except BaseException as error:  # of the device itself, between two steps
            self.run.events.put([Failed(order[1][0][1], error)])

    def _carry_out_each(self, place: int, todo: list[Order]) -> None:
        run, transfers, host_steps = self.run, self.transfers, self.host_steps
        lane, probe = run.lanes[place], run.probe
        fetch, send = transfers.fetch, transfers.send_to_host
        if probe is not None:
            fetch, send = partial(probe.fetch, transfers), partial(probe.send_to_host, transfers)
        events: list[StateEvent] = []
        steps: list[int] = []  # that will be waited for together
        waiting = 0.0  # seconds that they should take
        report = perf_counter() + REPORT_EVERY
        lane.sweep()
        lane.make_current()
        for verb, step, other in todo:
            if run.stopped:
                break
            try:
                if verb in ("launch", "back"):
                    due = (step,) if verb == "launch" else host_steps.due_when_back(place, step)
                    for step in due:  # of which a failure tells
                        waiting += run.plan.steps[step].seconds
                        if self._launch(lane, step, events, steps):
                            run.events.put(events)  # others may wait for it
                            events = []
                elif verb == "fetch":
                    events.append(fetch(lane, step, other))
                elif verb == "free":
                    self._release(lane, step)
                elif verb == "to_disk":
                    transfers.send_to_host(lane, step, DISK)
                else:
                    send(lane, step)
            except BaseException as error:
                # in a list that no frame of its traceback has, or they would hold each other
                events = [*events, Failed(step, error)]
                break
            if waiting > TOGETHER or len(steps) >= lane.together:
                self._wait_for(lane, steps)
                steps, waiting = [], 0.0
            if perf_counter() > report:
                self._report(lane, events, steps)
                events, steps, waiting = [], [], 0.0
                report = perf_counter() + REPORT_EVERY
        self._report(lane, events, steps)
        del events  # this frame is in the traceback, too

    def _report(self, lane: DeviceLane, events: list[StateEvent], steps: list[int]) -> None:
        """Report queued steps now, and have their end reported."""
        if events:
            self.run.events.put(events)
        if steps and self.ahead:  # nobody may have to wait for them
            self._unmarked.setdefault(lane.place, []).extend(steps)
        elif steps:
            self._wait_for(lane, steps)
        while not self.light and lane.settle(wait=False):
            pass

    def _wait_for(self, lane: DeviceLane, steps: list[int]) -> None:
        """Have one event waited for that covers these and all earlier steps of the lane."""
        steps = [*self._unmarked.pop(lane.place, ()), *steps]
        lane.queued.append((lane.mark(lane.home, block=True), self.run, steps))

    def _launch(self, lane: DeviceLane, i: int, events: list[StateEvent], steps: list[int]) -> bool:
        """Queue a step. Returns whether other threads wait to hear of it."""
        run, values = self.run, self.steps
        plan, held, host_steps = run.plan, run.held[lane.place], self.host_steps
        step = plan.steps[i]
        if not self.light and host_steps.waits(lane.place, i):
            return False
        for j in step.inputs:
            read = held.get(j)
            if read is None:  # it was refused before
                events.append(NoRoom(i, lane.place, 0))
                return False
            if read.unseen:
                lane.home.wait_event(read.ready)
                read.unseen = False
        hosted = not self.light and values.runs_on_host(step)
        if hosted and i not in host_steps.made:
            order = host_steps.hand_over(lane, i, values.read_inputs(lane, step))
            events.append(order)  # type: ignore[arg-type]
            return True
        attempt = values.attempt if run.probe is None else partial(run.probe.attempt, values)
        value, refused = attempt(lane, i)
        if refused:
            lane.release_memory()
            value, refused = attempt(lane, i)
        if refused:
            events.append(NoRoom(i, lane.place, max(refused, step.nbytes)))
            return False
        value = values.put_into_result(lane, i, value)
        nbytes = device_bytes(value)
        other = plan.crossings[i] or (i in plan.result_steps and nbytes) or nbytes >= MAY_LEAVE
        ready = lane.mark(lane.home) if other else None
        empty = not (nbytes or step.constants) and is_on_host(value)
        empty = empty and all(held[j].empty for j in step.inputs)
        held[i] = HeldValue(value, ready, empty=empty)
        self._unlaunched -= 1
        more = max(0, values.took.pop(i, 0) - nbytes) if values.took else 0
        if i in plan.lent or values.is_in_result(i, value):
            nbytes = 0
        events.append(Issued(i, nbytes, more))
        if empty and not run.exact:
            events.append(Done(i))
            return bool(plan.crossings[i])
        if run.exact:
            lane.home.synchronize()
            events.append(Done(i))
            return True
        steps.append(i)
        return bool(plan.crossings[i])

    def _release(self, lane: DeviceLane, i: int) -> None:
        run = self.run
        held = run.held[lane.place].pop(i)
        if not self._all_queued():
            lane.let_go(held)
        elif i in run.chunks:  # whose memory may be another stream's
            held.reads.append(lane.mark(lane.home))
            lane.let_go(held)
        else:
            lane.abandon(held)

    # ---- at the end of the run

    def clear(self, place: int) -> None:
        """Drop all that a place holds, behind what reads it."""
        try:
            self._drop_all(place)
        except runtime.CUDARuntimeError:  # the device is lost: nothing uses anything there
            self.run.held[place].clear()
            self.run.lanes[place].later.clear()
            self.run.lanes[place].queued.clear()

    def _drop_all(self, place: int) -> None:
        run = self.run
        lane, held, chunks = run.lanes[place], run.held[place], run.chunks
        done = lane.mark(lane.home) if held else None
        pending = [done] if done is not None and not done.done else []
        # what comes next is behind this run, but not what another thread runs now
        last = self.ahead and not run.hardware.has_other_runs(run.team)
        arrived = False
        for i, h in held.items():
            if pending and run.plan.steps[i].aside:  # pinned memory, of which tasks make copies
                lane.later.append((pending, h.value))
            if h.ready is None and not h.reads and i not in chunks and not self.ahead:
                continue  # of which nobody but this lane knew
            chunk = chunks.get(i)
            if chunk is not None and chunk.places.get(place) is h:
                # it stays, and may be read here still when it goes
                if h.reads or pending:
                    h.reads = [e for e in h.reads if not e.done] + pending
                if h.reads and not last:
                    lane.later.append((h.reads, h.value))
            elif self.ahead and not last and run.plan.steps[i].fixed:
                lane.later.append(([done, *h.reads], h.value))
            else:
                if h.arrived and not arrived:
                    lane.incoming.wait_event(done)
                    arrived = True
                if run.followed:  # much may have been read elsewhere
                    lane.wait_for_reads(h)
                else:
                    lane.let_go(h)
        held.clear()
        lane.sweep()
