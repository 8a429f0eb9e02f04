"""Run steps that read and write files, and send arrays of the host to devices.

Threads beside the workers do all of this: they may wait for the disk, and for pinned memory.
"""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np
from cupy.cuda import Device, Event, Stream, runtime

from ...errors import Interrupted, PlanError
from ...frontend.files import target_name
from ...plan.machine import DISK, HOST
from ...plan.plan import Step
from ...runtime.events import Done, Failed, Issued, NoRoom
from ...runtime.events import Event as StateEvent
from ...runtime.gather import WIDEST
from ...runtime.host_memory import PassageLane
from ...values import deep_leaves, map_deep_leaves
from . import arrays, staging, transfers
from .arrays import (
    PinnedCopy,
    device_bytes,
    is_pinned,
    is_plain_host_array,
    is_refusal,
    requested_bytes,
    to_host_array,
)
from .caller_order import CallerOrder
from .host_steps import NextOrders
from .lane import DeviceLane, HeldValue
from .pinned import StagingPieces, pieces
from .run_context import RunContext
from .transfers import Transfers

#: Threads for each device that read and write files and pin host arrays: at least.
FEWEST_FILES = 4
#: Threads for each device that read and write files and pin host arrays: at most.
FILES = 12
#: The part of the processors that the file threads of all devices may take.
PART_OF_CPUS = 3 / 4


class FileSteps:
    """Runs the steps of a run that read and write files, and sends arrays of the host to devices.

    It owns the room in pinned memory for values on their way from files. Each job runs in a thread
    beside the workers, which may wait for the disk and for pinned memory. Copies to a device are
    queued on its in stream; a value is held with the event behind its copy. Pinned arrays that a
    copy reads in place are read when the step is reported.
    """

    def __init__(self, run: RunContext, transfers: Transfers, callers: CallerOrder):
        self.run, self.transfers, self.callers = run, transfers, callers
        #: Pinned memory for values on their way from files.
        self.back = PassageLane(run.hardware.passage)

    def write_file(self, copy: tuple[int, int]) -> None:
        """Write a value of the host to the spill store."""
        run = self.run
        step, src = copy
        held = run.held[HOST].get(step)
        if held is not None and not run.stopped:
            run.events.put([self.transfers.write_to_store(step, src, held.value)])

    def read_file(self, copy: tuple[int, int]) -> None:
        """Read a value from a file into pinned memory, and have its device fetch it."""
        run = self.run
        step, dst = copy
        if run.stopped:
            return
        try:
            s = run.plan.steps[step]
            if s.again:  # as it comes, and pinned
                room = self.back.room(2 * s.nbytes, run.raise_if_stopped)
                value = self.read_pinned(s)
            else:
                file = run.files.of[step]
                room = self.back.room(sum(file.sizes), run.raise_if_stopped)
                value = run.hardware.store.read(
                    file, s.key, lambda nbytes: run.hardware.inside.array((nbytes,), np.uint8)
                )
            self.transfers.read[step, dst] = HeldValue(value, room=room)
            run.events.put([NextOrders(dst, ("fetch", step, DISK))])  # type: ignore[list-item]
        except BaseException as error:
            run.events.put([Failed(step, error)])

    def run_aside(self, launch: tuple[int, int]) -> None:
        """Run a step that reads or writes a file, in a thread beside the workers.

        It gets arrays of the host. Its value goes to the device at once, or to pinned memory, from
        where copies are fast.
        """
        run = self.run
        i, place = launch
        if run.stopped:
            return
        lane, step = run.lanes[place], run.plan.steps[i]
        try:
            Device(lane.device).use()
            self.callers.order_thread_behind_callers()
            there = sum([device_bytes(run.held[place][j].value) for j in step.inputs])
            home = self.transfers.out.room(there, run.raise_if_stopped)
            # not both: a thread with room never waits for other room, so no two block each other
            come = self.back.room(
                step.nbytes if step.sent and not there else 0, run.raise_if_stopped
            )
            self._refuse_store_to_copy(step, place)
            value = step.task(step.values(lambda j: self._bring_home(lane, run.held[place][j])))
            del home
            if any(isinstance(v, cupy.ndarray) for v in deep_leaves(value)):  # of a source
                value = self._collect_from_source(lane, value)
            if step.sent:
                sent = self._send(lane, i, value)
                del value, come
                run.events.put(sent)
                return
            value = map_deep_leaves(self._pin, value)
            run.held[place][i] = HeldValue(value)
            run.events.put([Issued(i, device_bytes(value)), Done(i)])
        except BaseException as error:
            if is_refusal(error):
                run.events.put([NoRoom(i, place, max(1, step.nbytes))])
            else:
                run.events.put([Failed(i, error)])

    def _collect_from_source(self, lane: DeviceLane, value: Any) -> Any:
        """A source's arrays of the device, made; memory of a stream of its own is copied."""
        stream = cupy.cuda.get_current_stream()
        stream.synchronize()
        if not stream.ptr:
            return value
        value = lane.collect_value(value)
        lane.home.synchronize()  # lanes of other devices may read the copy at once
        Stream.null.use()
        return value

    def _refuse_store_to_copy(self, step: Step, place: int) -> None:
        """Raise `PlanError` where a step would store to a copy of a GPU's array.

        Steps that write files get copies on the host; what they write to these would be lost.
        """
        name = target_name(step.task)
        if name not in step.names:
            return
        value = step.values(lambda j: self.run.held[place][j].value)[name]
        if device_bytes(value):
            raise PlanError(
                f"{step.key!r} stores to an array that another task makes on a GPU: compute the "
                "array first, and store to the result"
            )

    def _bring_home(self, lane: DeviceLane, held: HeldValue) -> Any:
        """Copy a value to the host, and wait for it."""
        if not device_bytes(held.value):
            return held.value
        stream = lane.outgoing
        if held.ready is not None:
            stream.wait_event(held.ready)
        made: list[Any] = []
        try:
            with stream:
                pinned = self.run.hardware.pinned
                made.append(value := arrays.make_contiguous(held.value))
                out = map_deep_leaves(
                    lambda v: transfers.copy_to_pinned(v, stream, pinned, made), value
                )
            lane.mark(stream, block=True).synchronize()
        except BaseException:
            lane.outlive(stream, made)
            raise
        return map_deep_leaves(to_host_array, out)

    def _send(self, lane: DeviceLane, i: int, value: Any) -> list[StateEvent]:
        """Copy arrays of the host to a device, on its in stream. Returns the events to report."""
        run = self.run
        direct: list[Any] = []  # pinned arrays that the copies read in place
        try:
            with lane.incoming:
                value = map_deep_leaves(lambda v: self.send_array(lane, v, direct), value)
        except BaseException as error:
            lane.outlive(lane.incoming, direct)
            if not is_refusal(error):
                raise
            cupy.get_default_memory_pool().free_all_blocks()
            return [NoRoom(i, lane.place, requested_bytes(error, run.plan.steps[i].nbytes))]
        done = lane.mark(lane.incoming, block=bool(direct))
        pinned, step = run.plan.history.pinned, run.plan.steps[i]
        if direct:
            pinned.add(step.kind)
        else:
            pinned.discard(step.kind)
        if direct or run.exact:
            done.synchronize()
        run.held[lane.place][i] = HeldValue(value, done, arrived=True, unseen=True)
        return [Issued(i, device_bytes(value)), Done(i)]

    def send_array(self, lane: DeviceLane, v: Any, direct: list[Any]) -> Any:
        """Copy an array of the host to a device; other values are returned as they are."""
        run = self.run
        if not is_plain_host_array(v):
            return v
        # functions of NumPy's arrays are to see a masked array, or one of another class, as such
        if run.plan.resident and type(v) not in (np.ndarray, np.memmap):
            return v
        if v.flags.f_contiguous and not v.flags.c_contiguous:  # which it stays, as in CuPy's own
            return self.send_array(lane, v.T, direct).T
        out, stream = cupy.empty(v.shape, v.dtype), lane.incoming
        kind = runtime.memcpyHostToDevice
        if not v.nbytes:
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
        at, some = out.data.ptr, run.hardware.pieces[lane.device]
        if staging.can_stage(v):
            self._send_staged(lane, v, at, some)
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
            if run.stopped:
                raise Interrupted
        return out

    def _send_staged(self, lane: DeviceLane, v: Any, to: int, some: StagingPieces) -> None:
        """Send an array of the host by compiled code, without the interpreter."""
        events = [Event(block=True, disable_timing=True) for _ in range(staging.PARTS)]
        ring, last = some.take(), None
        try:
            handles, stream = [e.ptr for e in events], lane.incoming
            said = staging.send(to, v, ring, handles, stream.ptr, self.run.raise_if_stopped)
        finally:
            try:
                last = lane.mark(lane.incoming, block=True)
            finally:
                some.give(ring, last)
        if said:
            raise cupy.cuda.driver.CUDADriverError(said)

    def _pin_in_order(self, v: Any) -> Any:
        """Copy an array of the host to pinned memory, with its memory order."""
        if not is_plain_host_array(v):
            return v
        if v.flags.f_contiguous and not v.flags.c_contiguous:
            return PinnedCopy(self._pin(v.T).reshape(-1).reshape(v.shape), "F")
        return PinnedCopy(self._pin(v), "C")

    def _pin(self, v: Any) -> Any:
        """Copy an array of NumPy's to pinned memory; other values are returned as they are."""
        if type(v) is not np.ndarray or v.dtype.hasobject:
            return v
        out = self.run.hardware.pinned.array(v.shape, v.dtype)
        out[...] = v
        return out

    def read_pinned(self, step: Step) -> Any:
        """The value that a step reads from its source, in pinned memory."""
        pin = self._pin_in_order if step.sent else self._pin
        return map_deep_leaves(pin, step.read())
