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
from typing import TYPE_CHECKING, Any

from cupy.cuda import Device, runtime

from ...errors import Interrupted
from ...plan.machine import DISK, HOST
from ...plan.plan import Plan
from ...runtime.events import Event as StateEvent
from ...runtime.events import Failed
from ...runtime.gather import ResultAssembly
from ...runtime.observe import RunRecord
from ...runtime.protocol import StepListener
from ...runtime.tape import LaunchTape, Order, by_turns
from ...runtime.threads import Team
from . import marks, pickling
from .caller_order import CallerOrder
from .file_steps import FEWEST_FILES, FileSteps
from .given_values import GivenValues
from .host_steps import HostSteps, NextOrders
from .lane_orders import LaneOrders
from .run_context import RunContext
from .run_values import RunValues
from .step_values import StepValues
from .tape_run import TapeRun
from .transfers import Transfers

if TYPE_CHECKING:
    from .hardware import CudaHardware

pickling.teach()
#: Seconds that a run may wait for its workers to be idle before it launches kernels itself. They
#: may still release the values of an earlier run: 512 values take more than 1 ms.
A_MOMENT = 0.02


class CudaDevices:
    """The GPUs of one run: collects the loop's orders, and has its parts carry them out.

    It owns the orders that are not sent yet, and the parts of the run. The loop's verbs only
    collect; `wait` sends each worker all of its orders, in the order of the verbs.
    """

    def __init__(
        self,
        plan: Plan,
        team: Team,
        assembly: ResultAssembly,
        hardware: CudaHardware,
        told: StepListener,
        tape: LaunchTape | None = None,
    ):
        self.run = run = RunContext.create(plan, team, assembly, hardware, told)
        self.callers = CallerOrder(run)
        self.given = GivenValues(run)
        self.transfers = Transfers(run)
        self.host_steps = HostSteps(run, self.callers)
        self.file_steps = FileSteps(run, self.transfers, self.callers)
        self.steps = StepValues(run, self.host_steps)
        self.values = RunValues(run, self.file_steps)
        self._orders: list[list[Order]] = [[] for _ in run.lanes]
        replay = None if tape is None else team.replays.get(tape)
        #: Whether this run repeats the last one in the same memory. Then it looks at its chunks
        #: only when all is queued, while devices work.
        self.takes_chunks_late = replay is not None and replay.is_current(self.given.state())
        if not self.takes_chunks_late:
            self.given.take_chunks()
        away = self.given.take_values() if len(run.chunks) < len(plan.fixed_steps) else ()
        light = (
            plan.tried
            and not run.exact
            and plan.launches_only
            and not plan.history.hosted
            and team.wait_until_idle(A_MOMENT)  # from what an earlier run has left behind
        )
        ahead = light and told is StepListener.NOTHING
        self.lane_orders = LaneOrders(
            run, self.steps, self.transfers, self.host_steps, light, ahead
        )
        if not plan.tried:
            rooms = self.steps.rooms
            placed = rooms.tasks if rooms is not None else {}
            tasks = [placed.get(i, s.task) for i, s in enumerate(plan.steps)]
            hardware.kernels.code.compile_ahead(tasks, run.lanes[0].device)
        team.begin()
        if hardware.ranges is not None:
            run.probe = marks.RunProbe(run, None, hardware.ranges)
        self.callers.mark_callers()
        self.callers.order_behind_callers()
        for i in away:
            self.given.bring_value(i)

    # ---- verbs, in the loop's thread

    def launch(self, step: int, place: int) -> None:
        run = self.run
        s = run.plan.steps[step]
        if s.aside:
            # those that only launch copies take the interpreter from each other
            most = FEWEST_FILES if s.kind in run.plan.history.pinned else None
            run.team.send_to_any(self.file_steps.run_aside, (step, place), place, most)
        else:
            self._orders[place].append(("launch", step, place))

    def copy(self, step: int, src: int, dst: int) -> None:
        if dst == HOST:
            self._orders[src].append(("to_host", step, src))
        elif dst == DISK and src == HOST:
            self.run.team.send_aside("writes", self.file_steps.write_file, (step, HOST))
        elif dst == DISK:
            self._orders[src].append(("to_disk", step, src))
        elif src == DISK:
            self.run.team.send_aside("reads", self.file_steps.read_file, (step, dst))
        else:
            self._orders[dst].append(("fetch", step, src))

    def free(self, step: int, place: int) -> None:
        run = self.run
        if step in run.chunks:
            run.chunks[step].note_departure(place)
        if place == HOST:
            self.transfers.leave_host(step, run.held[HOST].pop(step))
        elif place == DISK:
            run.files.forget(step)
        else:
            self._orders[place].append(("free", step, place))

    def follow(self, tape: LaunchTape) -> bool:
        if not self.lane_orders.ahead:
            return False
        self.run.followed = True
        try:
            return TapeRun(self.run, self.steps, self.transfers, self.given).queue_tape(tape)
        finally:
            if self.takes_chunks_late:
                self.given.take_chunks()

    def observe(self, record: RunRecord) -> None:
        marks.observe_run(self.run, record)

    def wait(self) -> list[StateEvent]:
        run, host_steps = self.run, self.host_steps
        while True:
            if self.lane_orders.light:
                todo, self._orders = self._orders, [[] for _ in run.lanes]
                self.lane_orders.launch_and_poll(todo)
            else:
                self._send_orders()
            out = run.events.wait(run.team)
            if self.transfers.read or host_steps.given or host_steps.made:
                out = [e for e in out if not self._redirect(e)]
            if out:
                return out

    def _send_orders(self) -> None:
        run = self.run
        for place, todo in enumerate(self._orders):
            if todo:
                self._orders[place] = []
                todo = by_turns(run.plan, place, todo)
                run.team.send(place, self.lane_orders.carry_out, [place, todo])

    def _redirect(self, event: StateEvent | NextOrders) -> bool:
        """Give the order that a thread beside the loop asks for; False for other events.

        Such orders fetch a value that was read from a file, compute a step on the host, or take
        back a value that the host has made. Only the loop's thread gives orders.
        """
        if type(event) is not NextOrders:
            return False
        verb, step, _ = event.order
        if verb == "away":
            run, job = self.run, self.host_steps.run_on_host
            threads = run.hardware.host_threads
            run.team.send_to_any(job, (step, event.place), event.place, threads, "host")
        else:
            self._orders[event.place].append(event.order)
        return True

    def interrupt(self) -> None:
        self.run.tell([Failed(-1, Interrupted())])

    def value(self, step: int) -> Any:
        """A step's value; the caller's current stream waits until it is made."""
        return self.values.value(step)

    def keep(self, step: int) -> dict[int, Any]:
        return self.values.keep(step)

    def keep_part(self, step: int, path: tuple[int, ...]) -> tuple[dict[int, Any], int]:
        return self.values.keep_part(step, path)

    def close(self) -> None:
        run = self.run
        run.files.end()  # first: a chunk hears of each file that is kept
        run.stopped = True
        try:
            if self.lane_orders.ahead:
                self.callers.order_callers_behind()
        finally:
            self._release_all()
            self.host_steps.end()
            run.events.close()
            self.steps.result = run.assembly.made = None  # an error may hold this run for long

    def _release_all(self) -> None:
        run, lane_orders = self.run, self.lane_orders
        for chunk in run.chunks.values():
            chunk.end_run()
        for place, lane in enumerate(run.lanes):
            if lane_orders.light:
                with suppress(runtime.CUDARuntimeError), Device(lane.device):
                    lane_orders.clear(place)
            else:
                run.team.send_last(place, lane_orders.clear, place)
        on_host, run.held[HOST] = run.held[HOST], {}
        for step, held in on_host.items():
            self.transfers.leave_host(step, held)
        for step in run.chunks:
            run.files.of.pop(step, None)
        for step in list(run.files.of):
            run.files.forget(step)
