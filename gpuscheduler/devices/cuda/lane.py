"""One device's place in a team: its streams, events and what it holds."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Protocol

import cupy
from cupy.cuda import Device, Event, Stream, runtime

from ...runtime.events import Done, Failed
from ...runtime.events import Event as StateEvent
from ...runtime.host_memory import PassageRoom
from ...runtime.threads import Worker
from ...values import deep_leaves, map_deep_leaves, part_of
from .arrays import REST, Refused, is_over
from .launch import Workspace

#: Steps are waited for in groups that should take about so many seconds: small beside what is under
#: way, so that there is always more, and large beside what it costs to wait.
TOGETHER = 2e-4
#: ... and how many steps at most: fewer, where these turn out to take longer than was foreseen.
MOST_TOGETHER = 64


class EventListener(Protocol):
    """A run that hears of its steps."""

    def tell(self, events: list[StateEvent]) -> None: ...


@dataclass(slots=True, eq=False)
class HeldValue:
    """A value on one place, with the events to wait for before use and release."""

    value: Any
    ready: Event | None = None  # recorded behind what makes it; None: nothing to wait for
    arrived: bool = False  # allocated on the in stream
    unseen: bool = False  # the home stream has not waited for `ready` yet
    empty: bool = False  # it was made without anything on the device: nothing has to be waited for
    reads: list[Event] = field(default_factory=list)  # other streams' uses of it
    room: PassageRoom | None = None  # of what has been read from a file

    def part(self, path: tuple[int, ...]) -> HeldValue:
        """A part of the value, with the same events."""
        value = part_of(self.value, path)
        return HeldValue(
            value, self.ready, self.arrived, self.unseen, self.empty, self.reads, self.room
        )


@dataclass(slots=True, eq=False)
class DeviceLane:
    """One worker's streams, and what it may not let go of yet."""

    place: int
    device: int
    home: Stream
    incoming: Stream
    outgoing: Stream
    watch: Worker  # waits for copies to the host
    queued: deque[tuple[Event, EventListener, list[int]]] = field(default_factory=deque)
    together: int = MOST_TOGETHER  # steps that are waited for together, at most
    settling: Any = field(default_factory=threading.Lock)  # one thread at a time looks at `queued`
    later: deque[tuple[list[Event], Any]] = field(default_factory=deque)
    work: Workspace = field(default_factory=Workspace)  # of the home stream's kernels
    cublas: int = 0  # a handle of cuBLAS's
    marks: Any = None  # `LaneMarks`: timed events, once somebody wants the times of steps

    @classmethod
    def create(cls, place: int, device: int) -> DeviceLane:
        with Device(device):
            home = Stream()  # blocking: in order with what tasks launch on the default stream
            incoming, outgoing = (Stream(non_blocking=True) for _ in range(2))
        watch = Worker(f"gpuscheduler-cuda-{place}-copies")
        return cls(place, device, home, incoming, outgoing, watch)

    def mark(self, stream: Stream, block: bool = False) -> Event:
        """An event behind everything queued on a stream of this device. Call in its worker.

        A thread that waits for one made with `block` sleeps; for others it would spin.
        """
        event = Event(block=block, disable_timing=True)
        event.record(stream)
        return event

    def make_current(self) -> bool:
        """Make the device and its home stream current, behind the current stream's work.

        A task may have chosen another device or stream. Returns whether it chose another stream.
        That one lives until its work is over: CUDA gives the handle of a destroyed stream to the
        next one at once, which then gets, from CuPy's pool, memory that this work still uses.
        """
        if runtime.getDevice() != self.device:
            Device(self.device).use()
        current = cupy.cuda.get_current_stream()
        if current.ptr == self.home.ptr:
            return False
        done = self.mark(current)
        self.home.wait_event(done)
        self.later.append(([done], current))
        self.home.use()
        return True

    def copy_to_home(self, value: Any) -> Any:
        """Copy a value's arrays to memory of the home stream.

        What a task allocates on a stream of its own is used again in the order of that stream, or
        of a later one at the same address: while the home stream may still read it.
        """
        here = map_deep_leaves(lambda v: v.copy() if isinstance(v, cupy.ndarray) else v, value)
        self.later.append(([self.mark(self.home)], value))
        return here

    def collect_value(self, value: Any) -> Any:
        """Make the home stream current behind a task, and the task's value its own.

        Call in the task's thread before any other stream is entered or left there.
        """
        return self.copy_to_home(value) if self.make_current() else value

    def release_memory(self) -> None:
        """Wait for the device, and give back what copies still hold and the pool has cached."""
        self.sweep(wait=True)
        self.home.synchronize()
        cupy.get_default_memory_pool().free_all_blocks()

    def close(self) -> None:
        """In the worker, at its end: nothing is under way when the streams go."""
        with suppress(runtime.CUDARuntimeError):  # of a device that is lost
            for stream in (self.home, self.incoming, self.outgoing):
                stream.synchronize()
            self.sweep(wait=True)
            if self.marks is not None:
                self.marks.read()
        self.later.clear()
        self.work = Workspace()
        if self.cublas:
            with suppress(Exception):
                cupy.cuda.cublas.destroy(self.cublas)
            self.cublas = 0
        self.watch.stop()
        self.watch.thread.join()

    def multiplier(self) -> int:
        """A handle of cuBLAS's for this device; whichever thread has the lane uses it."""
        if not self.cublas:
            self.cublas = cupy.cuda.cublas.create()
        return self.cublas

    def settle(self, wait: bool = True) -> bool:
        """Report steps that are done by now. Returns whether there was anything to report.

        An idle worker waits here for the oldest step. Orders that come meanwhile wait as well,
        which loses nothing: the device has work until the wait is over. A run that launches in the
        caller's thread does not wait here for a worker.
        """
        if not self.queued or not self.settling.acquire(blocking=wait):
            return False
        try:
            if not self.queued or not (wait or is_over(self.queued[0][0])):
                return False
            event, devices, steps = self.queued.popleft()
            done: list[StateEvent] = [Done(i) for i in steps]
            try:
                begin = perf_counter()
                event.synchronize()
                self.learn(len(steps), perf_counter() - begin)
                while self.queued and self.queued[0][1] is devices and is_over(self.queued[0][0]):
                    done += [Done(i) for i in self.queued.popleft()[2]]
            except BaseException as error:
                devices.tell([Failed(steps[0], error)])
            else:
                devices.tell(done)
            return True
        finally:
            self.settling.release()

    def learn(self, steps: int, waited: float) -> None:
        """How many steps to wait for together, from how long it took to wait for so many."""
        if waited > 2 * TOGETHER:
            self.together = max(1, steps // 2)
        elif waited < TOGETHER and steps >= self.together:
            self.together = min(2 * self.together, MOST_TOGETHER)

    def let_go(self, held: HeldValue) -> None:
        """Drop a value whose readers here are done; copies of it may be under way still."""
        pending = [e for e in held.reads if not e.done]
        if pending:
            self.later.append((pending, held.value))

    def abandon(self, held: HeldValue) -> None:
        """Drop a value that anything queued on this device may still read."""
        if held.arrived:
            self.incoming.wait_event(self.mark(self.home))
        self.let_go(held)

    def outlive(self, stream: Stream, *values: Any) -> None:
        """Keep values until the copies queued on a stream are over.

        Where one copy failed, others of the same value may be under way.
        """
        with suppress(runtime.CUDARuntimeError):  # of a device that is lost
            self.later.append(([self.mark(stream)], values))

    def wait_for_reads(self, held: HeldValue) -> None:
        """Drop a value of which no more is read; its memory is used again behind its readers."""
        for event in held.reads:
            if not event.done:
                self.home.wait_event(event)

    def sweep(self, wait: bool = False) -> None:
        """Drop what only had to outlive copies that are over by now."""
        while self.later:
            events, _ = self.later[0]
            if wait:
                for event in events:
                    event.synchronize()
            elif not all(e.done for e in events):
                return
            self.later.popleft()


class AllocationMeter(cupy.cuda.MemoryHook):
    """What a thread allocates on devices while this is entered: bytes, at most, at once."""

    name = "gpuscheduler"

    def __init__(self) -> None:
        self.most = self.now = 0
        self.sizes: dict[int, int] = {}  # of what was allocated meanwhile: nothing else counts
        self.partial = False  # whether `copy_partial_arrays` has found such arrays

    def malloc_postprocess(self, *, mem_size: int, pmem_id: int, **_: Any) -> None:
        if pmem_id:  # else there was no memory
            self.sizes[pmem_id] = mem_size
            self.now += mem_size
            self.most = max(self.most, self.now)

    def free_postprocess(self, *, pmem_id: int, **_: Any) -> None:
        self.now -= self.sizes.pop(pmem_id, 0)

    def copy_partial_arrays(self, value: Any, device: int) -> Any:
        """Copy arrays that use at most half of the memory allocated for them.

        The rest would stay allocated as long as the arrays, and nobody counts it: so it is with
        CuPy's R of a tall matrix. Dask does the same with parts of NumPy's arrays.
        """
        if self.now < REST:
            return value
        taken: dict[int, int] = {}
        for v in deep_leaves(value):
            if isinstance(v, cupy.ndarray) and v.data.device_id == device:
                taken[id(v.data.mem)] = taken.get(id(v.data.mem), 0) + v.nbytes
        large = {m for m, n in taken.items() if self.sizes.get(m, 0) - n >= max(n, REST)}
        if not large:
            return value
        self.partial = True

        def own_copy(v: Any) -> Any:
            part = isinstance(v, cupy.ndarray) and id(v.data.mem) in large
            return v.copy("K") if part else v

        try:
            return map_deep_leaves(own_copy, value)
        except Refused:  # there is no room for both
            return value
