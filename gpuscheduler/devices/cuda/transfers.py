"""Copy values of a run between devices, to the host and on to the disk.

Copies to a device are queued on its in stream, copies to the host on its out stream. A thread for
each device waits for copies to the host, and reports them when they are over.
"""

from __future__ import annotations

from contextlib import suppress
from contextvars import Context
from typing import Any, NamedTuple

import cupy
import numpy as np
from cupy.cuda import Device, Event, Stream, runtime

from ...errors import NotSpillable, OutOfMemory
from ...plan.machine import DISK, HOST
from ...runtime.events import Copied, Failed, NoRoom
from ...runtime.events import Event as StateEvent
from ...runtime.host_memory import PassageLane
from ...values import map_deep_leaves
from . import arrays
from .arrays import (
    PinnedCopy,
    Refused,
    as_one_array,
    device_bytes,
    is_contiguous_array,
    is_over,
    memory_order,
    requested_bytes,
)
from .copies import copy_to_address
from .lane import DeviceLane, HeldValue
from .pinned import PinnedBlocks
from .run_context import RunContext


class HostCopy(NamedTuple):
    """A copy to the host that is under way."""

    step: int
    place: int  # from where
    done: Event  # recorded behind the copy
    written: bool  # whether it goes straight into the result
    kept: Any  # the value in pinned memory; None where nobody needs it there
    reads: Any  # the device's arrays and the room for files, which live until the copy is over
    dst: int  # HOST or DISK


def copy_to_pinned(v: Any, stream: Stream, pinned: PinnedBlocks, made: list[Any]) -> Any:
    """Queue a copy of a device's array to pinned memory; other values are returned as they are."""
    if not isinstance(v, cupy.ndarray):
        return v
    out = pinned.array(v.shape, v.dtype)
    made.append(out)
    runtime.memcpyAsync(
        out.ctypes.data, v.data.ptr, v.nbytes, runtime.memcpyDeviceToHost, stream.ptr
    )
    return PinnedCopy(out, memory_order(v))


def _release_after_copy(copy: tuple[Event, HeldValue]) -> None:
    """Wait for a copy to a device, and release the host's value that it reads."""
    event, _ = copy
    with suppress(runtime.CUDARuntimeError):  # of which others tell
        event.synchronize()


class Transfers:
    """Copies values of a run between devices, to the host and on to the disk.

    It owns the values that came from files and wait to be fetched, and the room in pinned memory
    for values on their way to files. Copies to a device are queued on its in stream, in the
    thread that launches there, behind the event of what they read. Copies to the host are queued
    on the out stream, and the lane's watching thread reports them when they are over. Values and
    buffers live until the copies that use them are over, also where one of them fails.
    """

    def __init__(self, run: RunContext):
        self.run = run
        #: Values read from files into pinned memory, by step and the place that fetches them.
        self.read: dict[tuple[int, int], HeldValue] = {}
        #: Pinned memory for values on their way to files.
        self.out = PassageLane(run.hardware.passage)
        #: Bytes that devices have fetched.
        self.fetched = 0
        #: The context of threads that wait for copies: they run no code of the user's.
        self._watch_context = Context()

    def fetch(self, lane: DeviceLane, i: int, src: int) -> StateEvent:
        """Copy a value to a device, from another device or from the host, on the in stream."""
        run = self.run
        source = self.read.pop((i, lane.place)) if src == DISK else run.held[src][i]
        stream = lane.incoming
        if source.ready is not None:
            stream.wait_event(source.ready)
        keep: list[Any] = []
        try:
            value, refused = self._receive(lane, src, source, keep)
            if refused:
                lane.release_memory()
                value, refused = self._receive(lane, src, source, keep)
        except BaseException:
            lane.outlive(stream, source, keep)
            raise
        if src == DISK:  # nothing but this copy needs what was read
            copy = lane.mark(stream, block=True), source
            lane.watch.send(self._watch_context.copy(), _release_after_copy, copy, run.team.raised)
        if refused:
            lane.later.append(([lane.mark(stream), *source.reads], keep))
            return NoRoom(i, lane.place, max(refused, device_bytes(source.value)))
        done = lane.mark(stream)
        source.reads.append(done)
        if run.stopped:  # `close` may have looked for reads before
            keep.append(source.value)
        if keep:
            lane.later.append(([done], keep))
        here = run.held[lane.place][i] = HeldValue(value, done, arrived=True, unseen=True)
        if not run.followed:
            self.fetched += device_bytes(value)
            run.note_arrival(i, lane.place, here)
        return Copied(i, src, lane.place)

    def source(self, lane: DeviceLane, i: int, src: int) -> HeldValue | None:
        """What `fetch` would copy; None where that is not there."""
        if src == DISK:
            return self.read.get((i, lane.place))
        return self.run.held[src].get(i)

    def _receive(
        self, lane: DeviceLane, src: int, source: HeldValue, keep: list[Any]
    ) -> tuple[Any, int]:
        """Make a replica of a value: (replica, 0), or (None, bytes that were refused)."""

        def copy(v: Any) -> Any:
            return self.copy_array(lane, src, source, v, keep)

        try:
            with lane.incoming:
                value = source.value
                if type(value) is tuple and (found := as_one_array(value)) is not None:
                    whole, parts = found
                    return parts(copy(whole)), 0
                return map_deep_leaves(copy, value), 0
        except Refused as error:
            return None, requested_bytes(error, 1)

    def copy_array(
        self, lane: DeviceLane, src: int, source: HeldValue, v: Any, keep: list[Any]
    ) -> Any:
        """Copy one array to a device; other values are returned as they are.

        Adds to `keep` the arrays that have to live until the copy is over.
        """
        run = self.run
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
        there = run.lanes[src]
        if not is_contiguous_array(v):  # a view in the graph; steps copy the views that they make
            with Device(there.device), there.outgoing:
                v = cupy.ascontiguousarray(v)
                stream.wait_event(there.mark(there.outgoing))
            keep.append(v)
        out = cupy.empty(v.shape, v.dtype, order=memory_order(v))
        if not v.nbytes:
            return out
        if (src, lane.place) in run.hardware.staged:
            bounce = run.hardware.inside.array((v.nbytes,), np.uint8)
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

    def send_to_host(self, lane: DeviceLane, i: int, dst: int = HOST) -> None:
        """Copy a value to its place in a result, or to pinned memory, and on to the disk."""
        made: list[Any] = []  # arrays that the copies read and write
        try:
            self.queue_to_host(lane, i, dst, made)
        except BaseException:
            lane.outlive(lane.outgoing, made, self.run.assembly)
            raise

    def queue_to_host(self, lane: DeviceLane, i: int, dst: int, made: list[Any]) -> None:
        """Queue the copies of a value to the host on the out stream.

        Adds to `made` the arrays that the copies read and write.
        """
        run = self.run
        held = run.held[lane.place][i]
        stream, ready = lane.outgoing, held.ready
        if ready is not None:
            stream.wait_event(ready)
        room = None
        if dst == DISK:
            made.append(room := self.out.room(device_bytes(held.value), run.raise_if_stopped))
        value = self._make_contiguous(lane, i, held.value)
        slots = run.assembly.slots.get(i, []) if dst == HOST else []
        if slots and isinstance(value, cupy.ndarray):
            value = cupy.ascontiguousarray(value)
        made.append(value)
        if value is not held.value or (ready is None and not run.plan.steps[i].fixed):
            stream.wait_event(lane.mark(lane.home))  # else not behind all that is queued by now
        written = bool(slots)
        for target, _, where in slots:
            if isinstance(value, cupy.ndarray):
                target.of_devices = True
                part = target.room(where, value.shape, value.dtype)
                if part is not None:
                    copy_to_address(
                        part, part.ctypes.data, value, runtime.memcpyDeviceToHost, stream
                    )
                    continue
            written = False
        alone = not run.plan.readers[i] and i not in run.plan.direct
        whole = not (written and alone)  # others want the value itself, too
        pinned = run.hardware.pinned if i in run.plan.deliver else run.hardware.inside
        kept = None
        if whole:
            kept = map_deep_leaves(lambda v: copy_to_pinned(v, stream, pinned, made), value)
        done = lane.mark(stream, block=True)
        held.reads.append(done)
        copy = HostCopy(i, lane.place, done, written, kept, (value, room), dst)
        lane.watch.send(self._watch_context.copy(), self._await_arrival, copy, run.team.raised)

    def _make_contiguous(self, lane: DeviceLane, i: int, value: Any) -> Any:
        """A value without gaps, which copies to the host need."""
        try:
            return arrays.make_contiguous(value)
        except Refused:
            lane.release_memory()
        try:
            return arrays.make_contiguous(value)
        except Refused as error:
            raise OutOfMemory(
                f"{self.run.plan.steps[i].key!r} cannot leave device {lane.place}: its array is "
                "not contiguous, and there is no room for a contiguous copy of "
                f"{device_bytes(value):,} bytes; end its task with cupy.ascontiguousarray, or "
                "lower memory_limit"
            ) from error

    def _await_arrival(self, copy: HostCopy) -> None:
        """Wait for a copy to the host, and report it.

        Runs in the thread that waits for copies, which keeps all that the copy reads and writes.
        """
        try:
            copy.done.synchronize()
        except BaseException as error:
            self.run.events.put([Failed(copy.step, error)])
            return
        self.finish_arrival(copy)

    def finish_arrival(self, copy: HostCopy) -> None:
        """Hold a value that has arrived on the host, or write it to the disk, and report it."""
        run = self.run
        i, place, _, written, kept, _, dst = copy
        try:
            if run.stopped:
                return
            if dst == DISK:
                run.events.put([self.write_to_store(i, place, kept)])
                return
            if written:
                for target, key, _where in run.assembly.slots[i]:
                    target.written.add(key)
            elif i in run.assembly.slots and not device_bytes(kept):
                run.assembly.write(i, kept)
            there = run.held[HOST][i] = HeldValue(kept)
            run.note_arrival(i, HOST, there)
            run.events.put([Copied(i, place, HOST)])
        except BaseException as error:
            run.events.put([Failed(i, error)])

    def write_to_store(self, step: int, src: int, value: Any) -> StateEvent:
        """Write a value to the spill store. Returns the event to report."""
        run = self.run
        try:
            key = run.plan.steps[step].key
            run.files.write(step, value, key, lambda file: run.note_arrival(step, DISK, file))
        except NotSpillable:
            return NoRoom(step, DISK, run.plan.steps[step].nbytes)
        except BaseException as error:
            return Failed(step, error)
        return Copied(step, src, DISK)

    def leave_host(self, step: int, held: HeldValue) -> None:
        """Let a value of the host go when the copies that read it are over."""
        pending = [e for e in held.reads if not is_over(e)]
        if pending:  # pinned memory must outlive the copies from it
            lane = self.run.lanes[self.run.plan.steps[step].place]
            lane.later.append((pending, held.value))
