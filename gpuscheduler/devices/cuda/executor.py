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

import ctypes
import warnings
from concurrent.futures import Future
from contextlib import suppress
from contextvars import Context
from functools import cache
from queue import SimpleQueue
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Any

import cupy
import numpy as np
from cupy.cuda import Device, Event, Stream, runtime
from dask.utils import key_split

from ...errors import Interrupted, NotSpillable, OutOfMemory, PlanError
from ...frontend.chunk import Chunk, moves, worth_keeping
from ...frontend.files import block_read, target_name
from ...fusion.task import CompressTask, KernelTask, OptionalTask
from ...plan.batching import Batch
from ...plan.machine import DISK, HOST
from ...plan.matmul import MatmulSumTask
from ...plan.plan import Plan, Step, no_room
from ...runtime.events import Copied, Done, Failed, Issued, NoRoom
from ...runtime.events import Event as StateEvent
from ...runtime.gather import WIDEST, ResultAssembly
from ...runtime.host_memory import PassageLane
from ...runtime.loop import explain_error
from ...runtime.protocol import StepListener
from ...runtime.spill import RunFiles
from ...runtime.tape import LaunchTape, Order, by_turns, interleave_orders
from ...runtime.threads import Team, wait_for_events
from ...values import leaves, map_leaves
from . import arrays, copies, pickling, staging
from .arrays import (
    HOST_TYPES,
    PinnedCopy,
    Refused,
    array_bytes,
    as_one_array,
    device_bytes,
    is_contiguous_array,
    is_on_host,
    is_over,
    is_pinned,
    is_plain_host_array,
    is_refusal,
    memory_order,
    requested_bytes,
    to_current_device,
    to_host_array,
)
from .copies import copy_block, copy_to_address
from .gpudirect import FileBlock, in_dataset, in_file
from .host_steps import NextOrders, compute_on_host
from .lane import TOGETHER, AllocationMeter, DeviceLane, HeldValue
from .numpy_fallback import SAID, OwnCode, is_cupy_refusal, move_task, says_so, send_value
from .pinned import PinnedBlocks, StagingPieces, pieces
from .recorder import ReplayRecorder
from .result_rooms import ResultRoom

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
KERNELS = {KernelTask, Batch}
#: Seconds that a run may wait for the workers before it launches kernels itself. They may still let
#: go of what the run before has held: of 512 values that takes more than 1 ms.
A_MOMENT = 0.02
#: Seconds for which the caller's thread asks whether kernels are done: a thread that sleeps takes
#: long to wake, and one that asks does not see Ctrl-C.
SPIN = 0.02
#: Bytes that devices may have fetched in a run that ends before its kernels.
CROSSED = 2**26
#: Threads for each device that read and write files beside it, and copy arrays of the host to
#: pinned memory: at least, and at most; and the part of the processors that is for those of all.
FEWEST_FILES, FILES, PART_OF_CPUS = 4, 12, 3 / 4


# ---- devices on which the caller may have arrays


@cache
def _context_state() -> Any:
    """The driver's function that says whether a device has a context; None without a driver."""
    try:
        return ctypes.CDLL("libcuda.so.1").cuDevicePrimaryCtxGetState
    except (OSError, AttributeError):
        return None


def has_context(device: int) -> bool:
    """Whether this process has a context on a device. Makes none, as using the device would."""
    state = _context_state()
    if state is None:  # nobody to ask: it may have one
        return True
    flags, active = ctypes.c_uint(), ctypes.c_int()
    failed = state(device, ctypes.byref(flags), ctypes.byref(active))
    return not failed and bool(active.value)


def _is_elsewhere(value: Any, device: int) -> bool:
    """Whether any array of a value is in the memory of another GPU than this."""
    if type(value) is cupy.ndarray:
        return bool(value.data.device_id != device)
    if isinstance(value, HOST_TYPES):
        return False
    return any(isinstance(v, cupy.ndarray) and v.device.id != device for v in leaves(value))


# ---- one run


class CudaDevices:
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
        self.plan, self.team, self.gathering, self.hardware = plan, team, gathering, hardware
        self.when = moves()  # where chunks were before the run
        #: `Done` means that the device is done, not that the step is queued.
        self.exact = told is StepListener.EACH
        self.lanes: list[DeviceLane] = team.lanes
        self.held: dict[int, dict[int, HeldValue]] = {
            p: {} for p in (HOST, *range(len(self.lanes)))
        }
        self.stopped = False
        self.crossing = plan.crossing
        self.wanted = plan.ends
        self._context = Context()  # of the threads that wait: they run none of the user's code
        self.files = RunFiles(hardware.store)  # of values on the disk
        self.out, self.back = (
            PassageLane(hardware.passage),
            PassageLane(hardware.passage),
        )  # to files, and from
        self.read: dict[
            tuple[int, int], HeldValue
        ] = {}  # from there, for a device, in pinned memory
        self._todo: list[list[Order]] = [[] for _ in self.lanes]
        self.unlaunched = plan.launches  # counted by one thread: `light`
        self._events: SimpleQueue[list[StateEvent]] = SimpleQueue()
        self.chunks = plan.movable
        self.alone = len(self.chunks) == len(plan.chunks)  # and no other run moves others
        replay = None if tape is None else team.replays.get(tape)
        #: Whether this run does what the last one did, in the very same memory: for that no chunk
        #: has to be looked at. It is when all is queued, while devices work.
        self.late = replay is not None and replay.stands(self._given())
        if not self.late:
            self._take_over()
        away = self._take_given() if len(self.chunks) < len(plan.fixed) else ()
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
        self.rooms: ResultRoom | None = gathering.rooms
        self.result: Any = None  # its memory
        if not plan.tried:
            placed = self.rooms.tasks if self.rooms is not None else {}
            tasks = [placed.get(i, s.task) for i, s in enumerate(plan.steps)]
            hardware.kernels.compile_ahead(tasks, self.lanes[0].device)
        self.unmarked: dict[int, list[int]] = {}  # launched by such a run, and not waited for yet
        self.fetched = 0  # bytes
        self.took: dict[int, int] = {}  # by step: bytes that it had at once of what it allocated
        self.followed = False  # whether it does what a tape says
        #: On each place the steps that the host computes now and those that read them, and of
        #: these in their order those that have been launched: in its worker only.
        self.away: list[set[int]] = [set() for _ in self.lanes]
        self.behind: list[list[int]] = [[] for _ in self.lanes]
        self.given: dict[int, tuple[dict[Any, Any], Event]] = {}  # with what the host computes
        self.by_host: dict[int, Future[Any]] = {}  # what it has made
        team.begin()
        #: What all of the run is behind, by device; see `_come_behind_caller`.
        self.before: list[tuple[int, Event]] = self._caught_up()
        self._follow_caller()
        for i in away:
            self._bring_given(i)

    def _take_given(self) -> list[int]:
        """The graph's own values, and which of them lie on other devices than their steps' own: of
        a GPU that is none of these, of several, or of another scheduler."""
        away = []
        for i in self.plan.fixed:
            if i in self.chunks:
                continue
            step = self.plan.steps[i]
            value = step.task({})
            if step.sent:
                value = self.hardware.kept(value, step.place)
            value = value() if type(value) is Chunk else value
            self.held[step.place][i] = HeldValue(value)
            if _is_elsewhere(value, self.lanes[step.place].device):
                away.append(i)
                self.alone = False  # copies are at other addresses in the next run
        return away

    def _bring_given(self, i: int) -> None:
        """Copy what lies elsewhere of a value of the graph to its step's device."""
        step = self.plan.steps[i]
        lane, held = self.lanes[step.place], self.held[step.place][i]
        value = held.value
        try:
            with Device(lane.device), lane.incoming:
                moved = map_leaves(
                    lambda v: copies.copy_to_device(v, lane.device, lane.incoming), value
                )
                ready = lane.mark(lane.incoming)
        except Refused as error:
            what = f"{step.key!r}, which lies on another GPU and is copied to where it is read,"
            raise OutOfMemory(
                f"{what} has {array_bytes(value):,} bytes, for which GPU {lane.device} has no "
                "room: use smaller chunks, or put it on a GPU that the scheduler uses"
            ) from error
        lane.later.append(([ready], value))
        self.held[step.place][i] = HeldValue(moved, ready, arrived=True, unseen=True)

    def _take_over(self) -> None:
        """The chunks, which earlier runs have made, on other streams maybe."""
        known: dict[int, tuple[Event, bool]] = {}  # one stands for many

        def over(event: Event) -> bool:
            found = known.get(id(event))
            if found is None:
                found = known[id(event)] = event, event.done
            return found[1]

        for step, chunk in self.chunks.items():
            for place, held in chunk.places.items():
                if place == DISK:
                    self.files.of[step] = held
                    continue
                if held.ready is not None and over(held.ready):
                    held.ready = None
                held.unseen = held.ready is not None
                if held.reads:
                    held.reads = [e for e in held.reads if not over(e)]
                self.held[place][step] = held

    def _came(self, step: int, place: int, held: Any) -> None:
        """A chunk is in one more place, from where later runs can take it."""
        chunk = self.chunks.get(step)
        if chunk is not None and not self.stopped:
            chunk.came(place, held)

    def _follow_caller(self) -> None:
        """Order this run behind what the caller has queued on any device: arrays that tasks have
        around them may be in the making, and memory of earlier results may be in use."""
        for _, event in self.before:
            for lane in self.lanes:
                for stream in (lane.home, lane.incoming, lane.outgoing):
                    stream.wait_event(event)

    def _come_behind_caller(self) -> None:
        """Order what this thread queues as the run's own streams are: it has other ones."""
        before = [event for _, event in self.before if not is_over(event)]
        if before:
            for device, current in self.hardware.callers():
                with self.hardware.excused(device):
                    for event in before:
                        current.wait_event(event)

    def _go_before_caller(self) -> None:
        """Order the caller behind all that this run has queued, and later runs behind the caller:
        the graph's arrays may be written to, and memory may be used again, as if it were over."""
        events = []
        for lane in self.lanes:
            with Device(lane.device):
                for stream in (lane.home, lane.incoming):
                    event = lane.mark(stream)
                    if not event.done:
                        events.append(event)
        for device, current in self.hardware.callers() if events else ():
            with self.hardware.excused(device):
                for event in events:
                    current.wait_event(event)
                self.hardware.lend(device, current)

    def _caught_up(self) -> list[tuple[int, Event]]:
        """Events behind the caller's stream on each device in use, and behind those that got
        results there; a stream that has nothing to do any more needs none."""
        out = []
        for device, current in self.hardware.callers():
            lent = self.hardware.lent.get(device, {})
            for reader in {**lent, current.ptr: current}.values():
                with self.hardware.excused(device):
                    if not reader.done:
                        event = Event(disable_timing=True)
                        event.record(reader)
                        out.append((device, event))
        return out

    # ---- verbs, in the loop's thread

    def launch(self, step: int, place: int) -> None:
        s = self.plan.steps[step]
        if s.aside:
            # those that only launch copies take the interpreter from each other
            most = FEWEST_FILES if s.kind in self.plan.pinned else None
            self.team.send_to_any(self._aside, (step, place), place, most)
        else:
            self._todo[place].append(("launch", step, place))

    def copy(self, step: int, src: int, dst: int) -> None:
        if dst == HOST:
            self._todo[src].append(("to_host", step, src))
        elif dst == DISK and src == HOST:
            self.team.send_aside("writes", self._write_file, (step, HOST))
        elif dst == DISK:
            self._todo[src].append(("to_disk", step, src))
        elif src == DISK:
            self.team.send_aside("reads", self._read_file, (step, dst))
        else:
            self._todo[dst].append(("fetch", step, src))

    def free(self, step: int, place: int) -> None:
        if step in self.chunks:
            self.chunks[step].left(place)
        if place == HOST:
            self._leave_host(step, self.held[HOST].pop(step))
        elif place == DISK:
            self.files.forget(step)
        else:
            self._todo[place].append(("free", step, place))

    def follow(self, tape: LaunchTape) -> bool:
        if not self.ahead:
            return False
        self.followed = True
        try:
            return self._queued(tape)
        finally:
            if self.late:
                self._take_over()

    def _queued(self, tape: LaunchTape) -> bool:
        for place, lane in enumerate(self.lanes):
            lane.sweep()
            for held in self.held[place].values():
                if held.ready is not None:  # it is still in the making
                    lane.home.wait_event(held.ready)
                    for other in self.lanes:
                        other.incoming.wait_event(held.ready)
                    held.unseen = False
        replays = self.team.replays
        replay = replays.get(tape)
        if replay is None:
            rooms = self.hardware.rooms(self.plan, self.gathering)
            self.rooms = rooms if rooms is not None and rooms.tasks else None
        else:
            self.rooms = replay.rooms
        if self.rooms is not None and not self._has_room(tape, self.rooms):
            return False
        try:
            if replay is not None and replay.fits(self.held, self._given()):
                done, self.gathering.made = replay.run(self.lanes, self.held)
                for place, i, value, ready in done:
                    self.held[place][i] = HeldValue(value, ready)
                return True
        except Exception as error:
            if is_refusal(error):
                return False
            raise
        kernels, staged = self.hardware.kernels, self.hardware.staged
        recorder = None
        if tape not in replays:
            recorder = ReplayRecorder(self.plan, self.lanes, kernels, staged, self.rooms)
        for place, orders in tape.orders:
            lane = self.lanes[place]
            with Device(lane.device), lane.home:
                done = self.team.contexts[place].run(self._follow, lane, orders, recorder)
            if not done:
                return False
        if recorder is not None:
            replays[tape] = recorder.replay()
        return True

    def _has_room(self, tape: LaunchTape, rooms: ResultRoom) -> bool:
        """Whether a tape fits where the result is there from the start."""
        place, gathering = rooms.place, self.gathering
        apart = [i for i in tape.last if i not in rooms.tasks and self.plan.steps[i].place == place]
        need = tape.rest[place] + rooms.nbytes + sum([tape.nbytes[i] for i in apart])
        gathering.need = {place: need}
        return need <= gathering.free(place)

    def _given(self) -> tuple[int, Plan] | None:
        """What is the same while all that the run is given stays where it is; None where that is
        more than chunks."""
        plan = self.plan
        return (self.when, plan) if len(self.chunks) == len(plan.fixed) else None

    def _follow(
        self,
        lane: DeviceLane,
        orders: list[tuple[str, int, tuple[int, ...]]],
        recorder: ReplayRecorder | None,
    ) -> bool:
        """Do so much of a tape; False where memory was refused."""
        held, steps, wanted = self.held[lane.place], self.plan.steps, self.wanted
        if recorder is not None:
            recorder.turn(lane.place)
        for verb, i, others in orders:
            step = steps[i]
            try:
                if verb == "launch":
                    for j in others:
                        lane.home.wait_event(held[j].ready)
                    value = self._called(lane, i, self._read_by(lane, step), self._part(i))
                    seen = self.crossing[i] or (i in wanted and device_bytes(value))
                    held[i] = HeldValue(value, lane.mark(lane.home) if seen else None)
                    if recorder is not None:
                        recorder.launched(i, others, held)
                elif verb == "fetch":
                    if type(self._fetch(lane, i, *others)) is NoRoom:
                        return False
                    if recorder is not None:
                        recorder.fetched(i, others[0], self.held)
                else:
                    del held[i]
                    if recorder is not None:
                        recorder.freed(i)
            except Exception as error:
                if is_refusal(error):
                    return False
                explain_error(error, step)
                raise
        return True

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
            out = wait_for_events(self._events, self.team)
            if self.read or self.given or self.by_host:
                out = [e for e in out if not self._goes_on(e)]
            if out:
                return out

    def interrupt(self) -> None:
        self._events.put([Failed(-1, Interrupted())])

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
            return map_leaves(to_current_device, map_leaves(self._ready_to_go, s.read()))

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
                self._go_before_caller()
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
            self._leave_host(step, held)
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
            job = self._at_home, (step, event.place)
            self.team.send_to_any(*job, event.place, self.hardware.host_threads, "host")
        else:
            self._todo[event.place].append(event.order)
        return True

    def _go_on(self) -> None:
        if self.stopped:
            raise Interrupted

    # ---- in the threads that write and read files

    def _write_file(self, copy: tuple[int, int]) -> None:
        step, src = copy
        held = self.held[HOST].get(step)
        if held is not None and not self.stopped:
            self._events.put([self._written(step, src, held.value)])

    def _written(self, step: int, src: int, value: Any) -> StateEvent:
        """Put a value, whose arrays are in pinned memory, into a file."""
        try:
            key = self.plan.steps[step].key
            self.files.write(step, value, key, lambda file: self._came(step, DISK, file))
        except NotSpillable:
            return NoRoom(step, DISK, self.plan.steps[step].nbytes)
        except BaseException as error:
            return Failed(step, error)
        return Copied(step, src, DISK)

    def _read_file(self, copy: tuple[int, int]) -> None:
        """Read a value into pinned memory, from where its device fetches it."""
        step, dst = copy
        if self.stopped:
            return
        try:
            s = self.plan.steps[step]
            if s.again:  # as it comes, and pinned
                room = self.back.room(2 * s.nbytes, self._go_on)
                value = map_leaves(self._ready_to_go if s.sent else self._pinned, s.read())
            else:
                file = self.files.of[step]
                room = self.back.room(sum(file.sizes), self._go_on)
                value = self.hardware.store.read(
                    file, s.key, lambda nbytes: self.hardware.inside.array((nbytes,), np.uint8)
                )
            self.read[step, dst] = HeldValue(value, room=room)
            self._events.put([NextOrders(dst, ("fetch", step, DISK))])  # type: ignore[list-item]
        except BaseException as error:
            self._events.put([Failed(step, error)])

    def _refuse_to_store_to_a_copy(self, step: Step, place: int) -> None:
        """Arrays of GPUs come home for what runs aside; what that writes to them would be lost."""
        name = target_name(step.task)
        if name not in step.names:
            return
        value = step.values(lambda j: self.held[place][j].value)[name]
        if device_bytes(value):
            raise PlanError(
                f"{step.key!r} stores to an array on a GPU that another task makes: compute that "
                "first, and store to the array that this gives"
            )

    def _aside(self, launch: tuple[int, int]) -> None:
        """Run a step that reads a file or writes one, in a thread that may wait for it. It gets
        arrays of the host, and what it makes goes to pinned memory, from where a copy is fast, or
        to the device at once."""
        i, place = launch
        if self.stopped:
            return
        lane, step = self.lanes[place], self.plan.steps[i]
        try:
            Device(lane.device).use()
            self._come_behind_caller()
            value = None
            if step.sent and self.hardware.direct:
                value = in_dataset(*block_read(step.task, step.constants))
            there = sum([device_bytes(self.held[place][j].value) for j in step.inputs])
            home = self.out.room(there, self._go_on)
            # not both: nobody who has room waits for other room
            come = self.back.room(step.nbytes if step.sent and not there else 0, self._go_on)
            if value is None:
                self._refuse_to_store_to_a_copy(step, place)
                value = step.task(
                    step.values(lambda j: self._brought_home(lane, self.held[place][j]))
                )
            del home
            if any(isinstance(v, cupy.ndarray) for v in leaves(value)):  # a source has such
                cupy.cuda.get_current_stream().synchronize()
            if step.sent:
                sent = self._sent(lane, i, value)
                del value, come
                self._events.put(sent)
                return
            value = map_leaves(self._pinned, value)
            self.held[place][i] = HeldValue(value)
            self._events.put([Issued(i, device_bytes(value)), Done(i)])
        except BaseException as error:
            if is_refusal(error):
                self._events.put([NoRoom(i, place, max(1, step.nbytes))])
            else:
                self._events.put([Failed(i, error)])

    def _brought_home(self, lane: DeviceLane, held: HeldValue) -> Any:
        """A value with arrays of the host, which have arrived."""
        if not device_bytes(held.value):
            return held.value
        stream = lane.outgoing
        if held.ready is not None:
            stream.wait_event(held.ready)
        made: list[Any] = []
        try:
            with stream:
                pinned = self.hardware.pinned
                made.append(value := arrays.make_contiguous(held.value))
                out = map_leaves(lambda v: self._on_host(v, stream, pinned, made), value)
            lane.mark(stream, block=True).synchronize()
        except BaseException:
            lane.outlive(stream, made)
            raise
        return map_leaves(to_host_array, out)

    def _sent(self, lane: DeviceLane, i: int, value: Any) -> list[StateEvent]:
        """Copy arrays of the host to the device, on its in stream, and say so."""
        direct: list[Any] = []  # what the copies read where it is
        try:
            with lane.incoming:
                if type(value) is FileBlock:
                    value = self._read_straight(lane, value, direct)
                else:
                    value = map_leaves(lambda v: self._sent_array(lane, v, direct), value)
        except BaseException as error:
            lane.outlive(lane.incoming, direct)
            if not is_refusal(error):
                raise
            cupy.get_default_memory_pool().free_all_blocks()
            return [NoRoom(i, lane.place, requested_bytes(error, self.plan.steps[i].nbytes))]
        done = lane.mark(lane.incoming, block=bool(direct))
        pinned, step = self.plan.pinned, self.plan.steps[i]
        if direct:
            pinned.add(step.kind)
        else:
            pinned.discard(step.kind)
        if direct or self.exact:
            done.synchronize()
        self.held[lane.place][i] = HeldValue(value, done, arrived=True, unseen=True)
        return [Issued(i, device_bytes(value)), Done(i)]

    def _read_straight(self, lane: DeviceLane, block: FileBlock, direct: list[Any]) -> Any:
        out = cupy.empty(block.view.shape, block.view.dtype)
        if self._straight(lane, block, out):
            return out
        del out
        return self._sent_array(lane, block.source[block.index], direct)

    def _straight(self, lane: DeviceLane, block: FileBlock | None, out: Any) -> bool:
        """Read a block from its file into an array that was made on the in stream."""
        if block is None:
            return False
        # what had this memory may be under way still, and KvikIO knows no stream of ours
        lane.mark(lane.incoming, block=True).synchronize()
        return self.hardware.direct.read(block, out)

    def _sent_array(self, lane: DeviceLane, v: Any, direct: list[Any]) -> Any:
        if not is_plain_host_array(v):
            return v
        if v.flags.f_contiguous and not v.flags.c_contiguous:  # which it stays, as in CuPy's own
            return self._sent_array(lane, v.T, direct).T
        out, stream = cupy.empty(v.shape, v.dtype), lane.incoming
        kind = runtime.memcpyHostToDevice
        if not v.nbytes:
            return out
        if self.hardware.direct.takes(v.nbytes) and self._straight(lane, in_file(v), out):
            return out
        if is_pinned(v):
            if v.flags.c_contiguous:
                direct.append(v)
                runtime.memcpyAsync(out.data.ptr, v.ctypes.data, v.nbytes, kind, stream.ptr)
                return out
            row = v.shape[-1] * v.itemsize
            if v.ndim == 2 and v.strides[1] == v.itemsize and row <= v.strides[0] < WIDEST:
                direct.append(v)
                runtime.memcpy2DAsync(
                    out.data.ptr, row, v.ctypes.data, v.strides[0], row, len(v), kind, stream.ptr
                )
                return out
        at, some = out.data.ptr, self.hardware.pieces[lane.device]
        if staging.sends(v):
            self._staged(lane, v, at, some)
            return out
        for where in pieces(v.shape, v.itemsize, some.nbytes):
            part = v[where]
            piece, event = some.take(), None
            try:
                np.copyto(piece[: part.nbytes].view(v.dtype).reshape(part.shape), part)
                runtime.memcpyAsync(at, piece.ctypes.data, part.nbytes, kind, stream.ptr)
                event = lane.mark(stream, block=True)
            finally:
                some.give(piece, event)
            at += part.nbytes
            if self.stopped:
                raise Interrupted
        return out

    def _staged(self, lane: DeviceLane, v: Any, to: int, some: StagingPieces) -> None:
        """Send an array of the host without the interpreter."""
        events = [Event(block=True, disable_timing=True) for _ in range(staging.PARTS)]
        ring, last = some.take(), None
        try:
            handles, stream = [e.ptr for e in events], lane.incoming
            said = staging.send(to, v, ring, handles, stream.ptr, self._go_on)
        finally:
            try:
                last = lane.mark(lane.incoming, block=True)
            finally:
                some.give(ring, last)
        if said:
            raise cupy.cuda.driver.CUDADriverError(said)

    def _ready_to_go(self, v: Any) -> Any:
        if not is_plain_host_array(v):
            return v
        if v.flags.f_contiguous and not v.flags.c_contiguous:
            return PinnedCopy(self._pinned(v.T).reshape(-1).reshape(v.shape), "F")
        return PinnedCopy(self._pinned(v), "C")

    def _pinned(self, v: Any) -> Any:
        if type(v) is not np.ndarray or v.dtype.hasobject:
            return v
        out = self.hardware.pinned.array(v.shape, v.dtype)
        out[...] = v
        return out

    # ---- in the threads that compute what CuPy has refused

    def _at_home(self, launch: tuple[int, int]) -> None:
        """Have the host compute a step."""
        i, place = launch
        given = self.given.pop(i, None)
        if given is None or self.stopped:
            return
        made: Future[Any] = Future()
        try:
            made.set_result(self._made_at_home(self.lanes[place], i, *given))
        except BaseException as error:
            made.set_exception(error)
        self.by_host[i] = made
        self._events.put([NextOrders(place, ("back", i, place))])  # type: ignore[list-item]
        if self.stopped:  # nobody asks for it any more
            self.by_host.clear()

    def _made_at_home(self, lane: DeviceLane, i: int, values: dict[Any, Any], ready: Event) -> Any:
        """The value of a step, on the device."""

        def bring(v: Any) -> Any:  # not behind what is queued on the home stream by now
            with lane.outgoing:
                return v.get(out=self.hardware.pinned.array(v.shape, v.dtype))

        Device(lane.device).use()
        self._come_behind_caller()
        ready.synchronize()
        with lane.home:  # what the task itself brings to the device is in its order
            value = compute_on_host(self.plan.steps[i].task, values, bring=bring)
            self._come_home(lane)
            return send_value(value)

    # ---- in the workers

    def _obey(self, order: list[Any]) -> None:
        try:
            self._obey_all(*order)
        except BaseException as error:  # of the device itself, between two steps
            self._events.put([Failed(order[1][0][1], error)])

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
        if not self._events.empty():
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
        while self._events.empty() or (not self.unlaunched and any(k.queued for k in self.lanes)):
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
        self._come_home(lane)
        for verb, step, other in todo:
            if self.stopped:
                break
            try:
                if verb in ("launch", "back"):
                    for one in (step,) if verb == "launch" else self._back(lane, step):
                        step = one  # of which a failure tells
                        waiting += self.plan.steps[step].seconds
                        if self._launch(lane, step, events, steps):
                            self._events.put(events)  # others may wait for it
                            events = []
                elif verb == "fetch":
                    events.append(self._fetch(lane, step, other))
                elif verb == "free":
                    self._let_go(lane, step)
                elif verb == "to_disk":
                    self._to_host(lane, step, DISK)
                else:
                    self._to_host(lane, step)
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
            self._events.put(events)
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

    def tell(self, events: list[StateEvent]) -> None:
        self._events.put(events)

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
            self.given[i] = self._read_by(lane, step), lane.mark(lane.home, block=True)
            events.append(NextOrders(lane.place, ("away", i, lane.place)))  # type: ignore[arg-type]
            return True
        value, refused = self._attempt(lane, i)
        if refused:
            self._tidy(lane)
            value, refused = self._attempt(lane, i)
        if refused:
            events.append(NoRoom(i, lane.place, max(refused, step.nbytes)))
            return False
        value = self._put(lane, i, value)
        nbytes = device_bytes(value)
        other = self.crossing[i] or (i in self.wanted and nbytes) or nbytes >= MAY_LEAVE
        ready = lane.mark(lane.home) if other else None
        empty = not (nbytes or step.constants) and is_on_host(value)
        empty = empty and all(held[j].empty for j in step.inputs)
        held[i] = HeldValue(value, ready, empty=empty)
        self.unlaunched -= 1
        more = max(0, self.took.pop(i, 0) - nbytes) if self.took else 0
        if i in self.plan.lent or self._in_result(i, value):
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

    def _read_by(self, lane: DeviceLane, step: Step) -> dict[Any, Any]:
        """What a task is called with."""
        held, task = self.held[lane.place], step.task
        # such a batch knows where its arrays are; the host does not
        alone = self.alone and step.kind not in self.plan.hosted
        by_heart = type(task) is Batch and alone and task.known()
        reads = (step.names or step.constants) and not by_heart
        values = step.values(lambda j: held[j].value) if reads else {}
        for name in step.constants:
            # the graph's own arrays may be on a GPU that is not among these
            values[name] = map_leaves(
                lambda v: copies.copy_to_device(v, lane.device, lane.home), values[name]
            )
        return values

    def _attempt(self, lane: DeviceLane, i: int) -> tuple[Any, int]:
        """The value of a step, and 0; or None, and the bytes that were refused.

        What the attempt had allocated goes with its frames when this returns. Of steps of a kind
        that has not run yet it is seen how much that is, and of those that leave parts of arrays.
        """
        plan, step = self.plan, self.plan.steps[i]
        try:
            values, into = self._read_by(lane, step), self._part(i)
            if type(step.task) in KERNELS or (
                step.kind in plan.extra and step.kind not in plan.parts
            ):
                return self._called(lane, i, values, into), 0
            with AllocationMeter() as allocated:
                value = allocated.apart(self._called(lane, i, values, into), lane.device)
            if allocated.partial:
                plan.parts.add(step.kind)
            self.took[i] = allocated.most
            return value, 0
        except Exception as error:
            if not is_refusal(error):
                raise
            return None, requested_bytes(error, 1)

    def _called(self, lane: DeviceLane, i: int, values: dict[Any, Any], into: Any) -> Any:
        plan, step = self.plan, self.plan.steps[i]
        task = step.task if into is None else self.rooms.tasks[i]  # type: ignore[union-attr]
        mixed, home = step.kind in plan.mixed, step.kind in plan.hosted  # others may add to these
        try:
            if home:
                value = self._from_host(lane, i, task, values)
            elif mixed:
                value = self._without_arrays_of_host(lane, task, values, into)
            else:
                value = self._computed(lane, task, values, into)
        except SAID as error:
            if is_refusal(error):
                raise
            if home:  # another block of its kind was refused, this one may not be
                value = self._computed(lane, task, values, into)
            else:
                value = self._otherwise(lane, step, task, values, into, error, mixed)
        finally:
            self._come_home(lane)
        if type(task) not in KERNELS or self._is_broken(task):
            value = self._brought_here(lane, value)
        return arrays.make_contiguous(value) if self.crossing[i] else value

    def _is_broken(self, task: Any) -> bool:
        """Whether a task, one of `KERNELS`, was computed without its kernels."""
        first = task.members[0] if type(task) is Batch else task
        return self.hardware.kernels.broken(first.program)

    def _brought_here(self, lane: DeviceLane, value: Any) -> Any:
        """A value that a task has made, with copies of what it has left on other devices: a part of
        an array that it has around it, maybe."""
        if not _is_elsewhere(value, lane.device):
            return value
        here = map_leaves(lambda v: copies.copy_to_device(v, lane.device, lane.home), value)
        lane.later.append(([lane.mark(lane.home)], value))  # its memory is another stream's
        return here

    def _otherwise(
        self, lane: DeviceLane, step: Step, task: Any, values: dict[Any, Any], into: Any,
        error: Exception, mixed: bool,
    ) -> Any:  # fmt: skip
        """The value of a task that failed: with copies of NumPy's arrays, or else on the host."""
        if not mixed and says_so(error):
            try:
                value = self._without_arrays_of_host(lane, task, values, into, error)
            except SAID as again:
                if again is not error:
                    raise
            else:
                self.plan.mixed.add(step.kind)
                error.__traceback__ = None  # which holds this run
                return value
        if type(task) is MatmulSumTask or not is_cupy_refusal(error):
            raise error
        value = self._on_the_host(lane, task, values, error)
        (key, *_) = getattr(step.key, "keys", None) or (step.key,)  # of several, the first
        warnings.warn(  # an error where that is asked for: then it is one each time
            f"{key_split(key)!r} runs on the host, to which what it reads is copied, as CuPy "
            f"refused it: {type(error).__name__}: {error}",
            RuntimeWarning,
            stacklevel=2,
        )
        self.plan.hosted.add(step.kind)
        error.__traceback__ = None
        return value

    def _computed(self, lane: DeviceLane, task: Any, values: dict[Any, Any], into: Any) -> Any:
        kernels = self.hardware.kernels
        if type(task) is KernelTask:
            return kernels.run(task, values, lane.device, lane.work, into)
        if type(task) is Batch:
            return kernels.run_batch(task, values, lane.device, lane.work, self.alone)
        if type(task) is MatmulSumTask:
            return task.made(values, lane.multiplier())
        if type(task) is OptionalTask:  # which waits for it
            made = kernels.run(task.fused, values, lane.device, lane.work)
            with OwnCode():
                return task.found(made)
        if type(task) is CompressTask:  # so does this
            return kernels.pick(task, values, lane.device, lane.work)
        return task(values)

    def _without_arrays_of_host(
        self, lane: DeviceLane, task: Any, values: dict[Any, Any], into: Any, error: Any = None
    ) -> Any:
        """The value of a task with arrays of NumPy's among those of CuPy's, by copies of these."""
        self._come_home(lane)
        with OwnCode():
            there = move_task(task, values)
        if there is None:
            if error is not None:
                raise error
            return self._computed(lane, task, values, into)
        try:
            value = self._computed(lane, there.task, there.values, into)
        except Exception as again:
            if error is None or is_refusal(again):
                raise
            raise error from None
        if there.changed():
            raise error or TypeError("it writes to an array of NumPy's, and reads one of CuPy's")
        return value

    def _from_host(self, lane: DeviceLane, i: int, task: Any, values: dict[Any, Any]) -> Any:
        """The value of a task that the host computes, or has computed already."""
        made = self.by_host.pop(i, None)
        return self._on_the_host(lane, task, values) if made is None else made.result()

    def _on_the_host(
        self, lane: DeviceLane, task: Any, values: dict[Any, Any], error: Exception | None = None
    ) -> Any:
        """The value of a task that is computed by the host now, on the device."""
        self._come_home(lane)
        self._come_behind_caller()  # what is copied from other devices is so on their own streams
        value = compute_on_host(task, values, error)
        with OwnCode():
            return send_value(value)

    def _part(self, i: int) -> Any:
        """The part of the result that a kernel writes; None where a step makes an array of its
        own. Asks for the memory of the result where that is one with others."""
        rooms = self.rooms
        if rooms is None or i not in rooms.parts:
            return None
        if self.result is None:
            self.result = rooms.memory()
        if i not in rooms.tasks:
            return None
        if self.gathering.made is None:
            self.gathering.made = rooms.whole(self.result)
        return rooms.part(i, self.result)

    def _in_result(self, i: int, value: Any) -> bool:
        return i in self.plan.into and self.result is not None and (
            type(value) is cupy.ndarray and value.data.mem is self.result.mem
        )  # fmt: skip

    def _put(self, lane: DeviceLane, i: int, value: Any) -> Any:
        """A value, at its place in the result where it has one and is not there yet."""
        rooms = self.rooms
        if rooms is None or i not in rooms.parts or type(value) is not cupy.ndarray:
            return value
        if value.data.mem is self.result.mem:
            return value
        if rooms.dtype is None:
            self.rooms = rooms = rooms.of(value.dtype)
            if rooms is None:  # nothing is in its memory
                self.result = None
                return value
        if value.dtype != rooms.dtype or value.shape != rooms.parts[i][1]:
            return value
        if self.gathering.made is None:
            self.gathering.made = rooms.whole(self.result)
        part = rooms.part(i, self.result)
        if value.flags.c_contiguous:
            copy_block(value, part, lane.home)
        else:
            part[...] = value
        return part

    def _come_home(self, lane: DeviceLane) -> None:
        """To this device and its stream, where a task has chosen others; behind what it has queued
        on another stream of this device."""
        if runtime.getDevice() != lane.device:
            Device(lane.device).use()
        current = cupy.cuda.get_current_stream()
        if current.ptr != lane.home.ptr:
            lane.home.wait_event(lane.mark(current))
            lane.home.use()

    def _tidy(self, lane: DeviceLane) -> None:
        """Make the allocator give all it can: what copies still hold, and what is cached."""
        lane.sweep(wait=True)
        lane.home.synchronize()
        cupy.get_default_memory_pool().free_all_blocks()

    def _fetch(self, lane: DeviceLane, i: int, src: int) -> StateEvent:
        """Copy a value here, from another device or from the host, on the in stream."""
        source = self.read.pop((i, lane.place)) if src == DISK else self.held[src][i]
        stream = lane.incoming
        if source.ready is not None:
            stream.wait_event(source.ready)
        keep: list[Any] = []
        try:
            value, refused = self._received(lane, src, source, keep)
            if refused:
                self._tidy(lane)
                value, refused = self._received(lane, src, source, keep)
        except BaseException:
            lane.outlive(stream, source, keep)
            raise
        if src == DISK:  # nothing but this copy needs what was read
            copy = lane.mark(stream, block=True), source
            lane.watch.send(self._context.copy(), _release_after_copy, copy, self.team.raised)
        if refused:
            lane.later.append(([lane.mark(stream), *source.reads], keep))
            return NoRoom(i, lane.place, max(refused, device_bytes(source.value)))
        done = lane.mark(stream)
        source.reads.append(done)
        if self.stopped:  # after `close` has looked for reads, maybe
            keep.append(source.value)
        if keep:
            lane.later.append(([done], keep))
        here = self.held[lane.place][i] = HeldValue(value, done, arrived=True, unseen=True)
        if not self.followed:
            self.fetched += device_bytes(value)
            self._came(i, lane.place, here)
        return Copied(i, src, lane.place)

    def _received(
        self, lane: DeviceLane, src: int, source: HeldValue, keep: list[Any]
    ) -> tuple[Any, int]:
        """A replica of a value, and 0; or None, and the bytes that were refused."""

        def copy(v: Any) -> Any:
            return self._copied(lane, src, source, v, keep)

        try:
            with lane.incoming:
                value = source.value
                if type(value) is tuple and (found := as_one_array(value)) is not None:
                    whole, parts = found
                    return parts(copy(whole)), 0
                return map_leaves(copy, value), 0
        except Refused as error:
            return None, requested_bytes(error, 1)

    def _copied(
        self, lane: DeviceLane, src: int, source: HeldValue, v: Any, keep: list[Any]
    ) -> Any:
        stream = lane.incoming
        if isinstance(v, PinnedCopy):
            out = cupy.empty(v.array.shape, v.array.dtype, order=v.order)
            runtime.memcpyAsync(
                out.data.ptr, v.array.ctypes.data, v.array.nbytes,
                runtime.memcpyHostToDevice, stream.ptr,
            )  # fmt: skip
            return out
        if not isinstance(v, cupy.ndarray):
            return v
        there = self.lanes[src]
        if not is_contiguous_array(
            v
        ):  # a view in the graph; views that steps make are copied by them
            with Device(there.device), there.outgoing:
                v = cupy.ascontiguousarray(v)
                stream.wait_event(there.mark(there.outgoing))
            keep.append(v)
        out = cupy.empty(v.shape, v.dtype, order=memory_order(v))
        if not v.nbytes:
            return out
        if (src, lane.place) in self.hardware.staged:
            bounce = self.hardware.inside.array((v.nbytes,), np.uint8)
            with Device(there.device):
                if source.ready is not None:
                    there.outgoing.wait_event(source.ready)
                runtime.memcpyAsync(
                    bounce.ctypes.data, v.data.ptr, v.nbytes,
                    runtime.memcpyDeviceToHost, there.outgoing.ptr,
                )  # fmt: skip
                half = there.mark(there.outgoing)
            source.reads.append(half)
            stream.wait_event(half)
            runtime.memcpyAsync(
                out.data.ptr, bounce.ctypes.data, v.nbytes, runtime.memcpyHostToDevice, stream.ptr
            )
            keep.append(bounce)
        elif there.device == lane.device:
            runtime.memcpyAsync(
                out.data.ptr, v.data.ptr, v.nbytes, runtime.memcpyDeviceToDevice, stream.ptr
            )
        else:
            runtime.memcpyPeerAsync(
                out.data.ptr, lane.device, v.data.ptr, there.device, v.nbytes, stream.ptr
            )
        return out

    def _to_host(self, lane: DeviceLane, i: int, dst: int = HOST) -> None:
        """Copy a value to its place in a result, or to pinned memory, and on to the disk."""
        made: list[Any] = []  # what the copies read, and what they write
        try:
            self._send_to_host(lane, i, dst, made)
        except BaseException:
            lane.outlive(lane.outgoing, made, self.gathering)
            raise

    def _send_to_host(self, lane: DeviceLane, i: int, dst: int, made: list[Any]) -> None:
        held = self.held[lane.place][i]
        stream, ready = lane.outgoing, held.ready
        if ready is not None:
            stream.wait_event(ready)
        room = None
        if dst == DISK:
            made.append(room := self.out.room(device_bytes(held.value), self._go_on))
        value = self._solid(lane, i, held.value)
        slots = self.gathering.slots.get(i, []) if dst == HOST else []
        if slots and isinstance(value, cupy.ndarray):
            value = cupy.ascontiguousarray(value)
        made.append(value)
        if value is not held.value or (ready is None and not self.plan.steps[i].fixed):
            stream.wait_event(lane.mark(lane.home))  # else not behind all that is queued by now
        written = bool(slots)
        for target, _, where in slots:
            if isinstance(value, cupy.ndarray):
                target.of_devices = True
                part = target.room(where, value.shape, value.dtype)
                if part is not None:
                    self._write(value, part, stream)
                    continue
            written = False
        alone = not self.plan.readers[i] and i not in self.plan.direct
        whole = not (written and alone)  # others want the value itself, too
        pinned = self.hardware.pinned if i in self.plan.deliver else self.hardware.inside
        kept = None
        if whole:
            kept = map_leaves(lambda v: self._on_host(v, stream, pinned, made), value)
        done = lane.mark(stream, block=True)
        held.reads.append(done)
        copy = (i, lane.place, done, written, kept, (value, room), dst)
        lane.watch.send(self._context.copy(), self._comes, copy, self.team.raised)

    def _solid(self, lane: DeviceLane, i: int, value: Any) -> Any:
        """A value that has to leave, without gaps."""
        try:
            return arrays.make_contiguous(value)
        except Refused:
            self._tidy(lane)
        try:
            return arrays.make_contiguous(value)
        except Refused as error:
            raise OutOfMemory(
                f"{self.plan.steps[i].key!r} cannot leave device {lane.place}: it is an array with "
                f"gaps, or in an order of its own, and there is no room for a copy of "
                f"{device_bytes(value):,} bytes without; end its task with "
                "cupy.ascontiguousarray, or lower memory_limit"
            ) from error

    def _write(self, block: Any, part: Any, stream: Stream) -> None:
        copy_to_address(part, part.ctypes.data, block, runtime.memcpyDeviceToHost, stream)

    def _on_host(self, v: Any, stream: Stream, pinned: PinnedBlocks, made: list[Any]) -> Any:
        if not isinstance(v, cupy.ndarray):
            return v
        out = pinned.array(v.shape, v.dtype)
        made.append(out)
        runtime.memcpyAsync(
            out.ctypes.data, v.data.ptr, v.nbytes, runtime.memcpyDeviceToHost, stream.ptr
        )
        return PinnedCopy(out, memory_order(v))

    def _comes(self, copy: tuple[int, int, Event, bool, Any, Any, int]) -> None:
        """In the thread that waits for copies to the host: until one is over, all that it reads and
        writes is there."""
        try:
            copy[2].synchronize()
        except BaseException as error:
            self._events.put([Failed(copy[0], error)])
            return
        self._arrived(copy)

    def _arrived(self, copy: tuple[int, int, Event, bool, Any, Any, int]) -> None:
        i, place, _, written, kept, _, dst = copy
        try:
            if self.stopped:
                return
            if dst == DISK:
                self._events.put([self._written(i, place, kept)])
                return
            if written:
                for target, key, _where in self.gathering.slots[i]:
                    target.written.add(key)
            elif i in self.gathering.slots and not device_bytes(kept):
                self.gathering.write(i, kept)
            there = self.held[HOST][i] = HeldValue(kept)
            self._came(i, HOST, there)
            self._events.put([Copied(i, place, HOST)])
        except BaseException as error:
            self._events.put([Failed(i, error)])

    def _leave_host(self, step: int, held: HeldValue) -> None:
        pending = [e for e in held.reads if not is_over(e)]
        if pending:  # pinned memory must outlive the copies from it
            lane = self.lanes[self.plan.steps[step].place]
            lane.later.append((pending, held.value))

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


def _release_after_copy(copy: tuple[Event, HeldValue]) -> None:
    """In the thread that waits for copies: what one has read may go when it is over."""
    event, _ = copy
    with suppress(runtime.CUDARuntimeError):  # of which others tell
        event.synchronize()
