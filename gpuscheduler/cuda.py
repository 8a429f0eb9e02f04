"""GPUs: a worker thread and long-lived streams for each, events between them, no host wait between
two steps of a graph. It imports CuPy, as `launch`, `replay` and `ipc` do beside it.

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
import math
import mmap
import os
import re
import threading
import warnings
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import Context
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate, product
from operator import mul
from queue import Empty, SimpleQueue
from time import perf_counter, sleep
from typing import Any

import cupy
import numpy as np
from cupy.cuda import Device, Event, Stream, runtime
from dask.array.core import finalize
from dask.core import flatten
from dask.utils import key_split

from . import backend, pickled, staging
from .batches import Batch
from .cpu import CpuDevices, available_memory
from .cuda_math import ROWS_COPIED
from .direct import Direct, Located, in_dataset, in_file
from .expr import View
from .forks import new_lock, new_rlock
from .fuse import Fused, OrNone, Picked
from .gather import WIDEST, Gathering, boxes, each_block
from .graph import PlanError, block_read, is_plain, target_name
from .launch import Kernels, Workspace
from .machine import DISK, HOST, Machine
from .mixed import SAID, OwnCode, at_home, moved, refused, says_so, sent
from .persisted import Chunk, Key, Places, moves, worth_keeping
from .plan import OutOfMemory, Plan, Step, no_room
from .pools import CallersPool
from .products import Products
from .replay import Recorder, Rooms, one_copy_pays, rooms_of
from .resident import Passage, Room, Way
from .run import DeviceLost, Interrupted, Lease, Told, explained
from .sizes import leaves, map_leaves, part_of
from .spill import Files, NotSpillable, Store
from .state import Copied, Done, Failed, Issued, NoRoom
from .state import Event as StateEvent
from .tape import Order, Tape, by_turns, interleaved
from .workers import Borrowed, Team, Teams, Worker, awaited

pickled.teach()
Refused = cupy.cuda.memory.OutOfMemoryError
#: What the runtime, the driver (Numba's errors, too) and CUDA's libraries say without memory.
NO_MEMORY = re.compile(
    "cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY|CU[A-Z]+_(STATUS_)?ALLOC(ATION)?_FAILED"
)

#: Steps are waited for in groups that should take about so many seconds: small beside what is under
#: way, so that there is always more, and large beside what it costs to wait.
TOGETHER = 2e-4
#: ... and how many steps at most: fewer, where these turn out to take longer than was foreseen.
MOST_TOGETHER = 64
#: A worker with more to do reports at least this often, in seconds: each report wakes the loop, and
#: takes the interpreter from the threads that launch.
REPORT_EVERY = 0.002
#: What has nothing on a device.
HOST_TYPES = (int, float, complex, str, bytes, np.generic, np.ndarray)
#: Bytes of a value from which on it is known when it is made: it may have to leave its device, and
#: should not wait for what is queued behind it.
MAY_LEAVE = 2**18
#: Tasks that are launched in little time; those of which a tape can tell.
LAUNCHES = {Fused, Batch, Products}
KERNELS = {Fused, Batch}
#: Seconds that a run may wait for the workers before it launches kernels itself. They may still let
#: go of what the run before has held: of 512 values that takes more than 1 ms.
A_MOMENT = 0.02
#: Seconds for which the caller's thread asks whether kernels are done: a thread that sleeps takes
#: long to wake, and one that asks does not see Ctrl-C.
SPIN = 0.02
#: Bytes that devices may have fetched in a run that ends before its kernels.
CROSSED = 2**26
#: Bytes of a row and of all from which a kernel copies rows inside one GPU, and its threads and
#: lines of blocks.
LONG_ROW, MANY_ROWS, ROW_THREADS, ROW_LINES = 2**11, 2**20, 256, 8192
#: Blocks of one shape from which on one launch copies them into an array.
MANY_ALIKE = 8
#: Bytes beside its own that a part of a larger array may keep without being copied for it.
REST = 2**12
#: Threads for each device that read and write files beside it, and copy arrays of the host to
#: pinned memory: at least, and at most; and the part of the processors that is for those of all.
FEWEST_FILES, FILES, PART_OF_CPUS = 4, 12, 3 / 4
#: Bytes of a piece of pinned memory through which an array of the host goes to a device, and how
#: many of these each device has for each of its threads, at most; and at least.
PIECE_BYTES = staging.PART_BYTES * staging.PARTS
PIECES = 2
LEAST_PIECE_BYTES, LEAST_PIECES = 2**20, 2
#: Seconds after which one that waits for a piece looks whether it can make one itself.
LOOK_AGAIN = 0.1
#: The part of the host's memory, and the bytes for each device, that are for what is on its way to
#: files and from there, at most; pieces may take this part of that.
PASSING, PASSING_BYTES = 1 / 4, 2**32
PART_OF_PIECES = 1 / 4
#: Bytes from which pinned memory is made of pages that so many threads touch; and at once, at most.
LEAST_REGISTERED, SLAB_BYTES = 2**22, 2**28
PORTABLE = 1  # cudaHostRegisterPortable, for which CuPy has no name
TOUCHING = min(8, os.cpu_count() or 1)
#: Bytes of the buffers with which links are tried and measured.
TRIAL_BYTES = 2**20
MEASURED_BYTES = 2**28


# ---- values


def is_refusal(error: BaseException) -> bool:
    """Whether an error says that there is no memory, whoever has asked for it; not so that of a
    computation in a task, which has done what it could.

    >>> is_refusal(MemoryError()), is_refusal(RuntimeError("CUBLAS_STATUS_ALLOC_FAILED"))
    (True, True)
    >>> is_refusal(OutOfMemory()), is_refusal(RuntimeError("CUBLAS_STATUS_INTERNAL_ERROR"))
    (False, False)
    """
    if isinstance(error, MemoryError):
        return not isinstance(error, OutOfMemory)
    return isinstance(error, Exception) and NO_MEMORY.search(str(error)) is not None


def device_bytes(value: Any) -> int:
    """Bytes of device memory in a value; what lives on the host takes none.

    >>> device_bytes((np.ones(5), None))
    0
    """
    if isinstance(value, cupy.ndarray):
        return int(value.nbytes)
    if type(value) is dict or isinstance(value, (tuple, list)):
        return sum(int(v.nbytes) for v in leaves(value) if isinstance(v, cupy.ndarray))
    return 0


def _array_bytes(value: Any) -> int:
    """Bytes of arrays that are on a device, or have left it."""
    if type(value) is cupy.ndarray:
        return int(value.nbytes)
    arrays = [v.array if isinstance(v, _OnHost) else v for v in leaves(value)]
    return sum([int(v.nbytes) for v in arrays if isinstance(v, (cupy.ndarray, np.ndarray))])


def _on_the_host(value: Any) -> bool:
    """Whether all of a value is surely on the host; None may be what a task returns that has
    written to a device.

    >>> _on_the_host(1.5), _on_the_host((np.ones(5), "a")), _on_the_host(None)
    (True, True, False)
    """
    if type(value) in (dict, tuple, list):
        return all(map(_on_the_host, leaves(value)))
    return isinstance(value, HOST_TYPES) and not getattr(value, "dtype", np.dtype(int)).hasobject


def _solid(value: Any) -> Any:
    """The same value with arrays that one copy can move: contiguous, in either order."""
    if _is_solid(value):
        return value
    return map_leaves(lambda v: v if _is_solid(v) else cupy.ascontiguousarray(v), value)


def _is_solid(value: Any) -> bool:
    return all(
        v.flags.c_contiguous or v.flags.f_contiguous
        for v in leaves(value)
        if isinstance(v, cupy.ndarray)
    )


def _order(array: Any) -> str:
    return "C" if array.flags.c_contiguous else "F"


def _one_memory(value: tuple[Any, ...]) -> tuple[Any, Callable[[Any], Any]] | None:
    """Where arrays lie close together in one piece of memory: that, as an array, and a function
    that gives the same arrays in a copy of it."""
    every = list(leaves(value))
    if len(every) < 2 or not all(isinstance(v, cupy.ndarray) and v.nbytes for v in every):
        return None
    memory = every[0].data.mem
    if any(v.data.mem is not memory or not v.flags.c_contiguous for v in every):
        return None
    begin = min([v.data.ptr for v in every])
    size = max([v.data.ptr + v.nbytes for v in every]) - begin
    if not one_copy_pays(size, sum([v.nbytes for v in every])):
        return None

    def parts(copy: Any) -> Any:
        return map_leaves(
            lambda v: cupy.ndarray(v.shape, v.dtype, copy.data + (v.data.ptr - begin)), value
        )

    first = min(every, key=lambda v: v.data.ptr)
    return cupy.ndarray((size,), np.uint8, first.data), parts


@dataclass(slots=True, eq=False)
class _Held:
    """A value on one place, with the events that say when it may be read and when let go."""

    value: Any
    ready: Event | None = None  # recorded behind what makes it; None: nothing to wait for
    arrived: bool = False  # allocated on the in stream
    unseen: bool = False  # the home stream has not waited for `ready` yet
    empty: bool = False  # it was made without anything on the device: nothing has to be waited for
    reads: list[Event] = field(default_factory=list)  # other streams' uses of it
    room: Room | None = None  # of what has been read from a file

    def part(self, path: tuple[int, ...]) -> _Held:
        """A part of the value, with the same events."""
        value = part_of(self.value, path)
        return _Held(
            value, self.ready, self.arrived, self.unseen, self.empty, self.reads, self.room
        )


@dataclass(slots=True, eq=False)
class _Lane:
    """One worker's streams, and what it may not let go of yet."""

    place: int
    device: int
    home: Stream
    incoming: Stream
    outgoing: Stream
    watch: Worker  # waits for copies to the host
    queued: deque[tuple[Event, CudaDevices, list[int]]] = field(default_factory=deque)
    together: int = MOST_TOGETHER  # steps that are waited for together, at most
    settling: Any = field(default_factory=threading.Lock)  # one thread at a time looks at `queued`
    later: deque[tuple[list[Event], Any]] = field(default_factory=deque)
    work: Workspace = field(default_factory=Workspace)  # of the home stream's kernels
    cublas: int = 0  # a handle of cuBLAS's

    @classmethod
    def on(cls, place: int, device: int) -> _Lane:
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

    def close(self) -> None:
        """In the worker, at its end: nothing is under way when the streams go."""
        with suppress(runtime.CUDARuntimeError):  # of a device that is lost
            for stream in (self.home, self.incoming, self.outgoing):
                stream.synchronize()
            self.sweep(wait=True)
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
        """Report steps that are done by now; whether there was anything to report.

        A worker with nothing else to do waits here for the oldest. What is sent to it meanwhile
        waits as well, and loses nothing: the device has work until the wait is over. While it
        waits, the thread of a run that launches by itself goes away with nothing.
        """
        if not self.queued or not self.settling.acquire(blocking=wait):
            return False
        try:
            if not self.queued or not (wait or _over(self.queued[0][0])):
                return False
            event, devices, steps = self.queued.popleft()
            done: list[StateEvent] = [Done(i) for i in steps]
            try:
                begin = perf_counter()
                event.synchronize()
                self.learn(len(steps), perf_counter() - begin)
                while self.queued and self.queued[0][1] is devices and _over(self.queued[0][0]):
                    done += [Done(i) for i in self.queued.popleft()[2]]
            except BaseException as error:
                done = [Failed(steps[0], error)]
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

    def let_go(self, held: _Held) -> None:
        """Drop a value whose readers here are done; copies of it may be under way still."""
        pending = [e for e in held.reads if not e.done]
        if pending:
            self.later.append((pending, held.value))

    def abandon(self, held: _Held) -> None:
        """Drop a value that anything queued on this device may still read."""
        if held.arrived:
            self.incoming.wait_event(self.mark(self.home))
        self.let_go(held)

    def outlive(self, stream: Stream, *values: Any) -> None:
        """Drop what copies on a stream may read or write still: where one failed, others of the
        same value may be under way."""
        with suppress(runtime.CUDARuntimeError):  # of a device that is lost
            self.later.append(([self.mark(stream)], values))

    def go_behind(self, held: _Held) -> None:
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


class _Allocated(cupy.cuda.MemoryHook):
    """What a thread allocates on devices while this is entered: bytes, at most, at once."""

    name = "gpuscheduler"

    def __init__(self) -> None:
        self.most = self.now = 0
        self.sizes: dict[int, int] = {}  # of what was allocated meanwhile: nothing else counts
        self.partial = False  # whether `apart` has found such arrays

    def malloc_postprocess(self, *, mem_size: int, pmem_id: int, **_: Any) -> None:
        if pmem_id:  # else there was no memory
            self.sizes[pmem_id] = mem_size
            self.now += mem_size
            self.most = max(self.most, self.now)

    def free_postprocess(self, *, pmem_id: int, **_: Any) -> None:
        self.now -= self.sizes.pop(pmem_id, 0)

    def apart(self, value: Any, device: int) -> Any:
        """The same value, with arrays of their own for those that are no more than a half of what
        was allocated for them on a device: the rest would stay as long as they do, and nobody
        counts it. So it is with CuPy's R of a tall matrix. Dask does that with parts of NumPy's
        arrays.
        """
        if self.now < REST:
            return value
        taken: dict[int, int] = {}
        for v in leaves(value):
            if isinstance(v, cupy.ndarray) and v.data.device_id == device:
                taken[id(v.data.mem)] = taken.get(id(v.data.mem), 0) + v.nbytes
        large = {m for m, n in taken.items() if self.sizes.get(m, 0) - n >= max(n, REST)}
        if not large:
            return value
        self.partial = True

        def own(v: Any) -> Any:
            part = isinstance(v, cupy.ndarray) and id(v.data.mem) in large
            return v.copy("K") if part else v

        try:
            return map_leaves(own, value)
        except Refused:  # there is no room for both
            return value


# ---- pinned host memory


class PinnedBlocks:
    """Page-locked host memory, kept for reuse: locking a page costs more than filling it.

    What stays `inside` is never the caller's, and can be made faster, see `_Slab`. What waits for
    reuse goes rather than that there is more than `limit` bytes in all.
    """

    def __init__(self, inside: bool = False, limit: int | None = None) -> None:
        self.free: dict[int, list[Any]] = {}
        self.made: dict[int, int] = {}  # blocks of each size, in slabs
        self.idle = 0  # bytes that wait for reuse
        self.used = 0  # ... and that do not
        self.peak = 0  # of both
        self.limit = available_memory() if limit is None else limit
        self.most = min(available_memory() // 4, self.limit)
        self.inside = inside
        self.shed: Callable[[], object] = lambda: None  # for when the host's memory is short
        # collecting garbage may bring a block back while the lock is held
        self._lock = new_rlock()
        _PINNED.add(self)

    def array(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """An empty NumPy array in pinned memory; the memory comes back when the array is gone."""
        dtype = np.dtype(dtype)
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if not nbytes:
            return np.empty(shape, dtype)
        size = max(4096, -(-nbytes // 2**16) * 2**16 if nbytes > 2**16 else nbytes)
        with self._lock:
            blocks = self.free.get(size)
            block: Any = blocks.pop() if blocks else None
            if block is not None:
                self.idle -= size
            elif self.used + self.idle + size > self.limit:
                self.shrink()
            self.used += size  # before it is there, for others may ask now
            self.peak = max(self.peak, self.used + self.idle)
        if block is None:
            try:
                block = self._new(size)
            except BaseException:
                with self._lock:
                    self.used -= size
                raise
        # views of it keep this array, and not, as those of `block[:nbytes]`, what it is a view of
        raw = np.frombuffer(memoryview(block), np.uint8, nbytes)
        weakref.finalize(raw, self._back, size, block).atexit = False
        return raw.view(dtype).reshape(shape)

    def _new(self, size: int) -> Any:
        block = self._in_slab(size) if self.inside and size >= LEAST_REGISTERED else None
        if block is None:
            try:
                block = _pinned_block(size)
            except runtime.CUDARuntimeError as error:
                if not is_refusal(error):
                    raise
                block = self._last_block(size)
        return block

    def _last_block(self, size: int) -> Any:
        """A block, where the system has refused one: what waits for reuse goes before."""
        for blocks in list(_PINNED):
            blocks.shrink()
            blocks.shed()
        try:
            return _pinned_block(size)
        except runtime.CUDARuntimeError as error:
            raise OutOfMemory(
                f"the host has no {size:,} bytes of page-locked memory left, into which GPUs write "
                "results and what does not fit on them: free memory of the host, use smaller "
                "chunks, raise memory_limit so that less leaves the GPUs, or .persist() what is "
                "large"
            ) from error

    def _in_slab(self, size: int) -> Any:
        """A block of a new slab, whose others are free: about as many as there were before. None
        where the system has no such memory."""
        with self._lock:
            room = max(0, self.limit - self.used - self.idle) // size  # beside the block itself
            count = max(1, min(self.made.get(size, 0), SLAB_BYTES // size, 1 + room))
            others = (count - 1) * size
            self.used += others
        try:
            blocks = _Slab(count * size).blocks(count)
        except (AttributeError, OSError, runtime.CUDARuntimeError):
            self.inside = False  # it would cost time each time
            with self._lock:
                self.used -= others
            return None
        with self._lock:
            self.made[size] = self.made.get(size, 0) + count
            self.free.setdefault(size, []).extend(blocks[1:])
            self.used -= others
            self.idle += others
            self.peak = max(self.peak, self.used + self.idle)
        return blocks[0]

    def _back(self, size: int, block: Any) -> None:
        with self._lock:
            self.used -= size
            if self.idle + size <= self.most:
                self.free.setdefault(size, []).append(block)
                self.idle += size

    def shrink(self) -> None:
        """Let go of what waits for reuse."""
        with self._lock:
            self.free.clear()
            self.made.clear()
            self.idle = 0

    def clear(self) -> None:
        """Keep nothing any more."""
        with self._lock:
            self.shrink()
            self.most = 0


_PINNED: weakref.WeakSet[PinnedBlocks] = weakref.WeakSet()


def _pinned_block(size: int) -> Any:
    memory = cupy.cuda.PinnedMemory(size, runtime.hostAllocPortable)
    pointer = cupy.cuda.PinnedMemoryPointer(memory, 0)
    return np.frombuffer(pointer, dtype=np.uint8, count=size)


class _Slab:
    """Pinned memory of pages that some threads have touched at once, before CUDA is told of them.

    `cudaHostAlloc` touches one small page after the other, which takes several times as long. A
    forked child has none of it: it would be given other pages, or the parent would.
    """

    def __init__(self, nbytes: int):
        self.ptr = 0
        self.pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.pages.madvise(mmap.MADV_DONTFORK)
        with suppress(AttributeError, OSError):  # a kernel without
            self.pages.madvise(mmap.MADV_HUGEPAGE)
        whole = np.frombuffer(self.pages, np.uint8)
        with ThreadPoolExecutor(TOUCHING) as threads:
            list(threads.map(_touch, np.array_split(whole, 4 * TOUCHING)))
        runtime.hostRegister(whole.ctypes.data, nbytes, PORTABLE)
        self.ptr = int(whole.ctypes.data)

    def blocks(self, count: int) -> list[Any]:
        """As many parts of it, each of which keeps it."""
        return list(np.asarray(self).reshape(count, -1))

    @property
    def __array_interface__(self) -> dict[str, Any]:
        shape = (len(self.pages),)
        return {"shape": shape, "typestr": "|u1", "data": (self.ptr, False), "version": 3}

    def __del__(self) -> None:
        if self.ptr:
            with suppress(Exception):  # at the end of the process there may be no CUDA any more
                runtime.hostUnregister(self.ptr)


def _touch(part: Any) -> None:
    part[::4096].fill(0)


class Pieces:
    """Pinned memory in pieces of one size, which go round: what is copied to a device from one may
    be under way still when the next is filled. All take `limit` bytes, or the least that there
    can be; and there are no more than `most`."""

    def __init__(self, pinned: PinnedBlocks, limit: int, most: int):
        self.pinned = pinned
        self.nbytes = min(PIECE_BYTES, max(LEAST_PIECE_BYTES, limit // LEAST_PIECES))
        self.most = min(most, max(LEAST_PIECES, limit // self.nbytes))
        self.made = 0
        self._free: SimpleQueue[tuple[Any, Event | None]] = SimpleQueue()
        self._lock = new_lock()

    def take(self) -> Any:
        """A piece that nothing reads any more: waits for the one that was given back first."""
        while True:
            with self._lock:
                more = self._free.empty() and self.made < self.most
                self.made += more
            if more:
                try:
                    return self.pinned.array((self.nbytes,), np.uint8)
                except BaseException:
                    with self._lock:
                        self.made -= 1
                    raise
            with suppress(Empty):
                # another thread may be about to make the only piece, and be refused the memory
                piece, event = self._free.get(timeout=LOOK_AGAIN)
                if event is not None:
                    event.synchronize()
                return piece

    def give(self, piece: Any, event: Event | None) -> None:
        """Give back a piece that is free behind an event."""
        self._free.put((piece, event))

    def close(self) -> None:
        """Wait for copies from here; what an abandoned run still fills goes with its thread."""
        with suppress(Empty):
            for _ in range(self.made):
                _, event = self._free.get(timeout=1)
                if event is not None:
                    event.synchronize()
        self.made = 0


def pieces(shape: tuple[int, ...], itemsize: int, most: int) -> Iterator[tuple[slice, ...]]:
    """Parts of an array, each of which lies in one piece in C order and has `most` bytes at most,
    in that order.

    >>> list(pieces((3, 4), 8, 70))
    [(slice(0, 2, None),), (slice(2, 3, None),)]
    >>> len(list(pieces((3, 4), 8, 16)))
    6
    """
    axis, nbytes = 0, itemsize * math.prod(shape)  # of the part that is cut along this axis
    while axis < len(shape) and nbytes // shape[axis] > most:
        nbytes //= shape[axis]
        axis += 1
    if axis == len(shape):
        yield tuple(slice(0, 1) for _ in shape)
        return
    step = max(1, most * shape[axis] // nbytes)
    for index in np.ndindex(*shape[:axis]):
        outer = tuple(slice(i, i + 1) for i in index)
        for start in range(0, shape[axis], step):
            yield (*outer, slice(start, min(start + step, shape[axis])))


# ---- devices that do not answer any more

#: Devices on which a kernel has failed, and what CUDA says of each: for the rest of the process.
LOST: dict[int, str] = {}


def devices_left() -> list[int]:
    """All devices that answer."""
    every = range(runtime.getDeviceCount())
    if LOST:
        out = _said(i for i in every if i in LOST)
        warnings.warn(f"{out} no longer: left out", RuntimeWarning, stacklevel=4)
    return [i for i in every if i not in LOST]


def _said(devices: Iterable[int]) -> str:
    """
    >>> _said([1, 2])
    'cuda:1 and cuda:2 answer'
    """
    names = [f"cuda:{i}" for i in devices]
    return f"{' and '.join(names)} answer{'s'[: len(names) == 1]}"


def _loss(devices: Iterable[int]) -> DeviceLost:
    """What to say of these, which are lost."""
    gone = [i for i in dict.fromkeys(devices) if i in LOST]
    others = [str(i) for i in range(runtime.getDeviceCount()) if i not in LOST]
    use = f"cuda:{','.join(others)}" if others else "cpu"
    also = ""
    if others and runtime.getDevice() in LOST:  # where CuPy itself computes
        also = f", behind cupy.cuda.Device({others[0]}).use(),"
    return DeviceLost(
        f"{_said(gone)} no longer: {'; '.join(dict.fromkeys(LOST[i] for i in gone))}. A kernel has "
        "failed there, this one or one before it, and CUDA gives such a device to no process that "
        f"had it: what was there is lost. To go on, use Scheduler(devices={use!r}){also} or start "
        "the process anew"
    )


def _silence(device: int) -> str | None:
    """What CUDA says of a device that does not answer; None where it does."""
    try:
        with Device(device):
            runtime.deviceSynchronize()
    except runtime.CUDARuntimeError as error:
        return str(error)
    return None


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


# ---- what lives longer than a run


@dataclass(frozen=True)
class Links:
    """Measured rates, in GB/s: between devices, and to and from the host."""

    gbs: list[list[float]]
    host: list[tuple[float, float]]
    staged: set[tuple[int, int]]


#: Pinned memory of what goes to other processes.
CROSSING = PinnedBlocks()


def gathered_on_host(arrays: list[Any], starts: list[int], nbytes: int) -> Any:
    """Arrays on any devices as bytes of one pinned host buffer, where each starts: one batch of
    copies, and one wait for each device."""
    buffer = CROSSING.array((nbytes,), np.uint8)
    devices = sorted({a.device.id for a in arrays})
    held = []
    for device in devices:
        with Device(device):
            stream = cupy.cuda.get_current_stream()
            for a, start in zip(arrays, starts, strict=True):
                if a.device.id != device or not a.nbytes:
                    continue
                a = cupy.ascontiguousarray(a)
                held.append(a)
                to, kind = buffer.ctypes.data + start, runtime.memcpyDeviceToHost
                runtime.memcpyAsync(to, a.data.ptr, a.nbytes, kind, stream.ptr)
    for device in devices:
        with Device(device):
            cupy.cuda.get_current_stream().synchronize()
    return buffer


def _root(array: Any) -> Any:
    """The array that owns the memory of this one."""
    while type(array.base) is np.ndarray:
        array = array.base
    return array


class CudaHardware:
    """The GPUs with these ids, one place for each; a repeated id makes several places on one GPU.

    `limit` turns the free bytes of a place into its memory limit. `staged` are pairs of places
    whose copies go through pinned host memory although they could go directly (for tests).
    """

    kind = "cuda"

    def __init__(
        self,
        ids: list[int],
        limit: Callable[[int], int] = lambda free: int(0.9 * free),
        staged: set[tuple[int, int]] | None = None,
        spill_directory: str | None = None,
        direct_storage: bool | str = "auto",
        fast_math: bool = False,
        host_memory: int | None = None,
        spill_compression: str | None = None,
    ):
        count = runtime.getDeviceCount()
        if LOST and not ids:
            raise _loss(LOST)
        if not ids or any(i >= count for i in ids):
            raise RuntimeError(
                f"devices cuda:{','.join(map(str, ids))} were asked for, and this machine has "
                f"{count} CUDA device{'s'[: count != 1]}: use 'cuda', or ids from 0 to {count - 1}"
            )
        if not LOST.keys().isdisjoint(ids):
            raise _loss(ids)
        self.ids = ids
        self.names = tuple(_name(i) for i in ids)
        host = int(0.9 * available_memory()) if host_memory is None else host_memory
        self.pinned = PinnedBlocks()
        self.inside = PinnedBlocks(inside=True, limit=host)
        passing = min(int(PASSING * host), PASSING_BYTES * len(ids))
        share = int(PART_OF_PIECES * passing) // len(set(ids))
        cpus = int(PART_OF_CPUS * (os.cpu_count() or 1))
        self.files = max(FEWEST_FILES, min(FILES, cpus // len(ids)))  # threads for each place
        self.host_threads = max(1, cpus // len(ids))  # that compute what CuPy has refused
        most = PIECES * self.files * max(map(ids.count, ids))
        # for arrays that go to each device
        self.pieces = {i: Pieces(self.inside, share, most) for i in dict.fromkeys(ids)}
        self.passage = Passage(passing - share * len(self.pieces))
        self.store = Store(spill_directory, compression=spill_compression)
        self.direct = Direct(direct_storage)
        self.kernels = Kernels(fast_math)
        self._kept: dict[int, dict[int, Any]] = {}  # by the array's id: its copies on devices
        self.lent: dict[int, dict[int, Stream]] = {}  # device -> streams that read results
        self.staged = (staged or set()) | try_links(ids)
        peer = tuple(
            tuple(20e9 if (a, b) in self.staged else 390e9 for b in range(len(ids)))
            for a in range(len(ids))
        )
        memory = tuple(limit(_free_bytes(i) // ids.count(i)) for i in ids)
        self.machine = Machine(memory, peer, (55e9,) * len(ids), host - passing)
        self._teams: dict[int, Teams] = {}
        self._lock = new_lock()
        self._others = [i for i in range(count) if i not in ids]  # devices of the machine

    def in_use(self) -> list[int]:
        """The devices on which the caller may have arrays: these, and others with a context."""
        out = list(dict.fromkeys(self.ids))
        if self._others:
            out += [i for i in self._others if i not in LOST and has_context(i)]
        return out

    def callers(self) -> Iterator[tuple[int, Stream]]:
        """The caller's current stream of each device in use, while that device is current."""
        before = runtime.getDevice()
        try:
            for device in self.in_use():
                runtime.setDevice(device)
                yield device, cupy.cuda.get_current_stream()
        finally:
            runtime.setDevice(before)

    def excused(self, device: int) -> AbstractContextManager[Any]:
        """Let CUDA's errors pass on a device that is none of these: it may have been lost, and a
        run that does not use it goes on. Who reads something there gets the error."""
        return nullcontext() if device in self.ids else suppress(runtime.CUDARuntimeError)

    def kept(self, array: Any, place: int) -> Any:
        """What a host array that nobody changes is on a device, where it stays as long as that
        lives. It is sent on the caller's stream."""
        copies = self._kept.get(id(array))
        if copies is None:
            copies = self._kept[id(array)] = {}
            weakref.finalize(array, self._kept.pop, id(array), None).atexit = False
        device = self.ids[place]
        if device not in copies:
            with Device(device):
                copies[device] = cupy.asarray(array)
                self.lend(device, cupy.cuda.get_current_stream())  # runs of other threads read it
        return copies[device]

    def home(self, value: Any) -> int | None:
        found = next((v for v in leaves(value) if isinstance(v, cupy.ndarray)), None)
        if found is None:
            return None
        device = found.device.id
        return self.ids.index(device) if device in self.ids else None

    def shown(self, places: Places) -> Any:
        for place, held in places.items():
            if place >= 0:
                return held.value
        return None

    def taken(self, key: Key, place: int, places: Places) -> Any:
        """The value, on the GPU where it belongs, ordered behind its making on the caller's stream
        of each device."""
        device = self.ids[place]
        if place in places:
            ready = places[place].ready  # a run that may move it forgets this at any time
            if ready is not None and not _over(ready):
                for other, current in self.callers():
                    with self.excused(other):
                        current.wait_event(ready)
                        self.lend(other, current)
            return places[place].value
        if HOST in places or DISK in places:
            value = places[HOST].value if HOST in places else self.store.read(places[DISK], key)
            with Device(device):
                return map_leaves(_off_host, value)
        other = max(places)
        value = self._behind(places[other], self.ids[other])
        with Device(device):
            stream = cupy.cuda.get_current_stream()
            moved = map_leaves(lambda v: _moved(v, device, stream), value)
            stream.synchronize()  # until then the value may not go
            return moved

    def _behind(self, held: _Held, device: int) -> Any:
        ready = held.ready  # a run that may move it forgets this at any time
        if ready is not None:
            with Device(device):
                current = cupy.cuda.get_current_stream()
                current.wait_event(ready)
                self.lend(device, current)
        return held.value

    def forget(self, places: Places) -> None:
        if DISK in places:
            self.store.remove(places[DISK])

    def front(self) -> int | None:
        device = runtime.getDevice()
        return self.ids.index(device) if device in self.ids else None

    def settings(self) -> dict[str, Any]:
        backend.register()
        return {"array.backend": "cupy"}

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        if np.dtype(dtype).hasobject:
            return np.empty(shape, dtype)
        return self.pinned.array(shape, dtype)

    def follows(self, plan: Plan) -> bool:
        return plan.types <= KERNELS

    def brought_in(self, arrays: list[Any], place: int) -> list[Any]:
        """Host arrays on the device of a place, in one copy for all that lie in one buffer."""
        buffers: dict[int, list[int]] = {}
        for n, a in enumerate(arrays):
            buffers.setdefault(id(_root(a)), []).append(n)
        out: list[Any] = [None] * len(arrays)
        with Device(self.ids[place]):
            stream = cupy.cuda.get_current_stream()  # on which the memory may have been in use
            for together in buffers.values():
                first = min(arrays[n].ctypes.data for n in together)
                end = max(arrays[n].ctypes.data + arrays[n].nbytes for n in together)
                held = cupy.empty(end - first, np.uint8)
                kind = runtime.memcpyHostToDevice
                runtime.memcpyAsync(held.data.ptr, first, end - first, kind, stream.ptr)
                for n in together:
                    a, at = arrays[n], arrays[n].ctypes.data - first
                    out[n] = held[at : at + a.nbytes].view(a.dtype).reshape(a.shape)
            stream.synchronize()
        return out

    def rooms(self, plan: Plan, gathering: Gathering) -> Rooms | None:
        """The parts of a result that its run can write where they belong in one array."""
        return rooms_of(plan, gathering, self.front(), self.kernels)

    def join(self, blocks: Any, made: Any = None) -> Any:
        """CuPy blocks become one array on the caller's current device, each copied once. That is
        `made`, where some of them lie where they belong already."""
        flat = list(flatten(blocks)) if isinstance(blocks, list) else [blocks]
        if not all(type(b) is cupy.ndarray and b.dtype == flat[0].dtype for b in flat):
            return finalize(blocks)
        parts = _grid(blocks, flat[0].ndim)
        if parts is None:
            return finalize(blocks)
        shape, slots = parts
        dtype = flat[0].dtype
        here = runtime.getDevice()
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        left = list(zip(flat, slots, strict=True))
        like = shape, dtype, here
        try:
            if made is not None and (made.shape, made.dtype, made.device.id) == like:
                out = made
                begin, strides = out.data.ptr, out.strides
                left = [
                    (block, where) for block, where in left
                    if block.data.ptr != begin + _offset(where, strides)
                ]  # fmt: skip
            else:
                out = cupy.empty(shape, dtype)
        except Refused as error:
            raise OutOfMemory(no_room(nbytes, f"GPU {here}")) from error
        stream = cupy.cuda.get_current_stream()
        others = {block.device.id for block, _ in left} - {here}
        for device in others:
            # blocks are ordered behind their making on the caller's stream of their own device
            _come_behind(stream, device)
        for block, where in self._but_alike(left, out, here):
            part = out[where]
            if not block.flags.c_contiguous or block.device.id != here:
                block = _brought(block, here, stream)
            _copy_block(block, part, stream)
        if left:
            self._after(stream)
        return out

    def _but_alike(self, blocks: list[Any], out: Any, here: int) -> list[Any]:
        """The blocks of pairs that are still to be copied to their places in an array: those of one
        shape, if there are many, are copied by one launch."""
        if len(blocks) < MANY_ALIKE:
            return blocks
        alike: dict[tuple[int, ...], list[Any]] = defaultdict(list)
        left: list[Any] = []
        for pair in blocks:
            block = pair[0]
            usual = block.size and block.ndim and block.flags.c_contiguous
            (alike[block.shape] if usual and block.device.id == here else left).append(pair)
        begin, strides, itemsize = out.data.ptr, out.strides, out.dtype.itemsize
        for shape, group in alike.items():
            pairs = [(block.data.ptr, begin + _offset(where, strides)) for block, where in group]
            if len(group) < MANY_ALIKE or not self.kernels.copy(
                shape, strides, itemsize, pairs, here
            ):
                left += group
        return left

    def bring(self, blocks: Any, boxes: Sequence[tuple[slice, ...]] = (), made: Any = None) -> Any:
        """One array of nested lists of blocks, or one block, in pinned memory of the host, when it
        is there. Boxes of blocks are put together on the devices of these before (see `join`)."""
        flat = list(flatten([blocks]))
        if not isinstance(flat[0], cupy.ndarray):
            return self.join(blocks) if isinstance(blocks, list) else blocks
        first = flat[0].device
        if len(boxes) < 2 or all(b.device == first for b in flat):
            with first:
                array = self.join(blocks, made) if isinstance(blocks, list) else blocks
                return array.get(out=self.pinned.array(array.shape, array.dtype))
        parts = _grid(blocks, flat[0].ndim)
        if parts is None or any(b.dtype != flat[0].dtype for b in flat):
            return finalize(each_block(self.bring, blocks))
        shape, slots = parts
        steps = View.contiguous(_numblocks(blocks)).strides
        out = self.pinned.array(shape, flat[0].dtype)
        held, devices = [], {}
        try:
            for box in boxes:
                inside = _inside(blocks, box)
                corners = [s.start for s in box], [s.stop - 1 for s in box]
                ends = [slots[sum(map(mul, corner, steps))] for corner in corners]
                part = out[tuple(slice(a.start, b.stop) for a, b in zip(*ends, strict=True))]
                device = next(iter(flatten([inside]))).device
                with device:
                    stream = cupy.cuda.get_current_stream()
                    devices[device.id] = device, stream
                    held.append(array := self.join(inside))
                    _copy_into(part, part.ctypes.data, array, runtime.memcpyDeviceToHost, stream)
        finally:  # also of what is on its way where another has no room
            for device, stream in devices.values():
                with device:
                    stream.synchronize()
        return out

    def send(self, array: Any) -> Any:
        """An array of the host as one of the caller's device, when it is there: then the memory of
        the first may be reused."""
        device = runtime.getDevice()
        try:
            out = cupy.asarray(array)
        except Refused as error:
            raise OutOfMemory(no_room(array.nbytes, f"GPU {device}")) from error
        cupy.cuda.get_current_stream().synchronize()
        return out

    def _after(self, stream: Stream) -> None:
        """What a run let go of may be reused only when `stream`, which still reads it, is past; so
        may what the caller's streams of other devices brought back. What it writes is a result,
        behind which all of the caller's streams are."""
        event = Event(disable_timing=True)
        event.record(stream)
        for teams in list(self._teams.values()):
            for team in list(teams.leased):
                for lane in team.lanes:
                    lane.home.wait_event(event)
                    lane.incoming.wait_event(event)
        for device, current in self.callers():
            with self.excused(device):
                current.wait_event(event)

    def others(self, team: Team) -> bool:
        """Whether any other team has a run."""
        return any(t is not team for teams in list(self._teams.values()) for t in teams.leased)

    def lend(self, device: int, stream: Stream) -> None:
        """Remember a stream that was given a result: later runs reuse memory behind it."""
        self.lent.setdefault(device, {})[stream.ptr] = stream

    @property
    def trouble(self) -> str:
        gone = [i for i in dict.fromkeys(self.ids) if i in LOST]
        return f"{_said(gone)} no longer" if gone else ""

    def lost(self, error: BaseException) -> DeviceLost | None:
        if type(error).__module__.partition(".")[0] not in ("cupy", "cupy_backends", "numba"):
            return None
        for i in dict.fromkeys(self.ids):
            silence = _silence(i)
            if silence is not None:
                LOST[i] = silence
        return _loss(self.ids) if self.trouble else None

    @contextmanager
    def lease(self, num_workers: int | None, pool: CallersPool | None) -> Iterator[Lease]:
        if self.trouble:
            raise _loss(self.ids)
        n = len(self.ids)
        if pool is not None:
            # the caller's threads: host tasks, and CuPy on the caller's own device
            borrowed = Borrowed(pool)
            yield Lease(
                Machine.uniform(1, memory=self.machine.memory[0]),
                lambda plan, g, *_: CpuDevices(plan, borrowed, g, self.store),
                borrowed.threads,
            )
            return
        if num_workers is not None:
            n = max(1, min(n, num_workers))
        with self._lock:
            teams = self._teams.setdefault(n, Teams(lambda: self._team(n)))
        m = self.machine
        machine = m if n == len(self.ids) else Machine(
            m.memory[:n], tuple(row[:n] for row in m.peer[:n]), m.host[:n], m.host_memory
        )  # fmt: skip
        with teams.lease() as team:
            yield Lease(
                machine, lambda plan, g, told, tape: CudaDevices(plan, team, g, self, told, tape)
            )

    def _team(self, n: int) -> Team:
        lanes = [_Lane.on(place, self.ids[place]) for place in range(n)]

        def setup(lane: _Lane) -> Callable[[], None]:
            def use() -> None:
                Device(lane.device).use()
                # entered for good, not only used: tasks that enter another stream return to it
                lane.home.__enter__()

            return use

        workers = [
            Worker(f"gpuscheduler-cuda-{lane.place}", setup(lane), lane.close, lane.settle)
            for lane in lanes
        ]
        return Team(workers, lanes, self.files)

    def free(self) -> list[int]:
        """Bytes that are free on each place's GPU now."""
        return [_free_bytes(i) for i in self.ids]

    def links(self) -> Links:
        """Measure every link, one at a time, with copies of 256 MiB."""
        n = len(self.ids)
        gbs = [[0.0] * n for _ in range(n)]
        host = []
        for a in range(n):
            for b in range(n):
                if a != b and (a, b) not in self.staged:
                    gbs[a][b] = _peer_rate(self.ids[a], self.ids[b])
            host.append(_host_rates(self.ids[a], self.pinned))
        for a, b in self.staged:
            gbs[a][b] = 1 / (1 / host[a][1] + 1 / host[b][0])
        return Links(gbs, host, self.staged)

    def synchronize(self) -> None:
        for i in sorted(set(self.ids)):
            with Device(i):
                runtime.deviceSynchronize()

    def when_short(self, shed: Callable[[], object]) -> None:
        self.pinned.shed = shed

    def close(self) -> None:
        with self._lock:
            every, self._teams = list(self._teams.values()), {}
        for teams in every:
            teams.close()
        self.store.retire()
        for i, pieces in self.pieces.items():
            if i not in LOST:
                pieces.close()
        self.direct.close()
        self.pinned.clear()
        self.pinned.shed = lambda: None
        self.inside.clear()
        for i in sorted(set(self.ids) - LOST.keys()):
            with Device(i):
                cupy.get_default_memory_pool().free_all_blocks()


def _name(device: int) -> str:
    name = runtime.getDeviceProperties(device)["name"]
    return f"{name.decode() if isinstance(name, bytes) else name} (cuda:{device})"


def _free_bytes(device: int) -> int:
    with Device(device):
        return int(runtime.memGetInfo()[0]) + cupy.get_default_memory_pool().free_bytes()


@cache
def _rows_copier() -> Any:
    """CUDA's own copy of rows inside one GPU reaches 58 % of what this does (measured, H100)."""
    return cupy.RawKernel(ROWS_COPIED, "copy_rows")


def _kernel_copies(kind: int, width: int, rows: int, *places: int) -> bool:
    """Whether our own kernel copies rows, of so many bytes, which lie at and between `places`."""
    many = width >= LONG_ROW and width * rows >= MANY_ROWS
    even = not any(n % 16 for n in (width, *places))
    return kind == runtime.memcpyDeviceToDevice and many and even


def _copy_rows(
    to: int, pitch: int, source: int, width: int, rows: int, kind: int, stream: Stream
) -> None:
    """Rows of `width` bytes: one behind the other in `source`, `pitch` bytes apart in `to`."""
    if rows == 1:
        runtime.memcpyAsync(to, source, width, kind, stream.ptr)
    elif _kernel_copies(kind, width, rows, to, pitch, source):
        words, most = width // 16, ROW_THREADS * 4
        grid = -(-words // most), min(rows, ROW_LINES)
        given = to, np.uint64(pitch), source, np.uint64(words), np.uint64(rows)
        with stream:
            _rows_copier()(grid, (ROW_THREADS,), given)
    else:
        runtime.memcpy2DAsync(to, pitch, source, width, width, rows, kind, stream.ptr)


def _copy_planes(
    to: int, pitch: int, apart: int, source: int, width: int, rows: int, planes: int, kind: int,
    stream: Stream,
) -> None:  # fmt: skip
    """So many times rows as `_copy_rows` copies, `apart` bytes apart in `to`."""
    if planes == 1 or _kernel_copies(kind, width, rows, to, pitch, apart, source):
        for n in range(planes):
            _copy_rows(to + n * apart, pitch, source + n * rows * width, width, rows, kind, stream)
        return
    words = np.zeros(20, np.uint64)  # cudaMemcpy3DParms: arrays, positions, pitched pointers
    words[4:8] = source, width, width, rows
    words[12:16] = to, pitch, width, apart // pitch
    words[16:] = width, rows, planes, kind
    runtime.memcpy3DAsync(words.ctypes.data, stream.ptr)


def _copy_into(part: Any, to: int, block: Any, kind: int, stream: Stream) -> None:
    """A C-contiguous array, to a part of a larger array, which is at `to`."""
    source = block.data.ptr
    for box in boxes(part.shape, part.strides, block.dtype.itemsize):
        there, here, width, rows, pitch, planes, apart = box
        here += source
        _copy_planes(to + there, pitch, apart, here, width, rows, planes, kind, stream)


def _copy_block(block: Any, part: Any, stream: Stream) -> None:
    """A C-contiguous array, to a part of another one on its device."""
    _copy_into(part, part.data.ptr, block, runtime.memcpyDeviceToDevice, stream)


def _offset(where: tuple[slice, ...], strides: tuple[int, ...]) -> int:
    """The bytes in front of a part of an array."""
    return sum([s.start * n for s, n in zip(where, strides, strict=True)])


def _brought(block: Any, device: int, stream: Stream) -> Any:
    """A block as a C-contiguous array on the current device, on `stream`."""
    source, there = block.device.id, None
    if not block.flags.c_contiguous:
        made = Event(disable_timing=True)
        made.record(stream)  # which is behind the block's making; that other one may not be
        with Device(source):
            there = cupy.cuda.get_current_stream()
            there.wait_event(made)
            block = cupy.ascontiguousarray(block)
            event = Event(disable_timing=True)
            event.record(there)
        stream.wait_event(event)
    if source == device:
        return block
    out = cupy.empty(block.shape, block.dtype)
    runtime.memcpyPeerAsync(out.data.ptr, device, block.data.ptr, source, block.nbytes, stream.ptr)
    if there is not None:  # the copy that was made there may go only behind this one
        done = Event(disable_timing=True)
        done.record(stream)
        with Device(source):
            there.wait_event(done)
    return out


def _moved(v: Any, device: int, stream: Stream) -> Any:
    """A CuPy array of another GPU as a copy on the current device, on `stream`, behind what the
    current stream of its own has queued. Anything else as it is."""
    if not isinstance(v, cupy.ndarray) or v.device.id == device:
        return v
    _come_behind(stream, v.device.id)
    return _brought(v, device, stream)


def _is_elsewhere(value: Any, device: int) -> bool:
    """Whether any array of a value is in the memory of another GPU than this."""
    if type(value) is cupy.ndarray:
        return bool(value.data.device_id != device)
    if isinstance(value, HOST_TYPES):
        return False
    return any(isinstance(v, cupy.ndarray) and v.device.id != device for v in leaves(value))


def _come_behind(stream: Stream, device: int) -> None:
    """Order a stream behind what the current stream of a device has queued."""
    with Device(device):
        made = Event(disable_timing=True)
        made.record(cupy.cuda.get_current_stream())
    stream.wait_event(made)


def _grid(blocks: Any, ndim: int) -> tuple[tuple[int, ...], list[tuple[slice, ...]]] | None:
    """The shape of the whole and the slices of each block; None where blocks do not line up."""
    counts, flat = _numblocks(blocks), list(flatten([blocks]))
    if len(counts) != ndim or len(flat) != math.prod(counts):
        return None
    if any(b.ndim != ndim for b in flat):
        return None
    steps = View.contiguous(counts).strides
    lengths = [
        [flat[i * step].shape[axis] for i in range(n)]
        for axis, (n, step) in enumerate(zip(counts, steps, strict=True))
    ]
    if any(b.shape != shape for b, shape in zip(flat, product(*lengths), strict=True)):
        return None
    slices = [
        [slice(end - n, end) for n, end in zip(own, accumulate(own), strict=True)]
        for own in lengths
    ]
    return tuple([sum(own) for own in lengths]), list(product(*slices))


def _numblocks(blocks: Any) -> tuple[int, ...]:
    out = []
    while isinstance(blocks, list):
        out.append(len(blocks))
        blocks = blocks[0]
    return tuple(out)


def _inside(blocks: Any, box: tuple[slice, ...]) -> Any:
    """The nested lists of the blocks in a box."""
    if not box:
        return blocks
    return [_inside(inner, box[1:]) for inner in blocks[box[0]]]


# ---- links


def try_links(ids: list[int]) -> set[tuple[int, int]]:
    """Enable every pair of GPUs both ways and copy a known pattern; the pairs that fail."""
    bad = set()
    answers: dict[tuple[int, int], bool] = {}
    for a, source in enumerate(ids):
        for b, destination in enumerate(ids):
            if source == destination:
                continue
            pair = (source, destination)
            if pair not in answers:
                answers[pair] = _enable(*pair) and _known_answer(*pair)
            if not answers[pair]:
                bad.add((a, b))
    return bad


#: Pairs of GPUs that have been enabled in this process: to do it again is an error of CUDA's.
_ENABLED: set[tuple[int, int]] = set()


def _enable(source: int, destination: int) -> bool:
    for a, b in ((source, destination), (destination, source)):
        if (a, b) in _ENABLED:
            continue
        if not runtime.deviceCanAccessPeer(a, b):
            return False
        with Device(a):
            try:
                runtime.deviceEnablePeerAccess(b)
            except runtime.CUDARuntimeError as error:
                if "AlreadyEnabled" not in str(error):
                    return False
        _ENABLED.add((a, b))
    return True


def _known_answer(source: int, destination: int) -> bool:
    """Whether bytes that go from one GPU to the other arrive as they were."""
    pattern = np.arange(TRIAL_BYTES // 4, dtype=np.uint32) * np.uint32(2654435761)
    try:
        with Device(source):
            there = cupy.asarray(pattern)
            runtime.deviceSynchronize()
        with Device(destination):
            here = cupy.zeros(len(pattern), dtype=np.uint32)
            runtime.deviceSynchronize()
            runtime.memcpyPeer(here.data.ptr, destination, there.data.ptr, source, there.nbytes)
            runtime.deviceSynchronize()
            return bool((here.get() == pattern).all())
    except runtime.CUDARuntimeError:
        return False


def _peer_rate(source: int, destination: int) -> float:
    with Device(source):
        there = cupy.zeros(MEASURED_BYTES, dtype=np.uint8)
        runtime.deviceSynchronize()
    with Device(destination):
        here = cupy.zeros(MEASURED_BYTES, dtype=np.uint8)
        runtime.deviceSynchronize()
        stream = Stream(non_blocking=True)

        def copy() -> None:
            runtime.memcpyPeerAsync(
                here.data.ptr, destination, there.data.ptr, source, MEASURED_BYTES, stream.ptr
            )

        return _rate(copy, stream)


def _host_rates(device: int, pinned: PinnedBlocks) -> tuple[float, float]:
    host = pinned.array((MEASURED_BYTES,), np.uint8)
    with Device(device):
        there = cupy.zeros(MEASURED_BYTES, dtype=np.uint8)
        runtime.deviceSynchronize()
        stream = Stream(non_blocking=True)

        def rate(to: int, source: int, kind: int) -> float:
            def copy() -> None:
                runtime.memcpyAsync(to, source, MEASURED_BYTES, kind, stream.ptr)

            return _rate(copy, stream)

        on_device, pinned_at = there.data.ptr, host.ctypes.data
        return (
            rate(on_device, pinned_at, runtime.memcpyHostToDevice),
            rate(pinned_at, on_device, runtime.memcpyDeviceToHost),
        )


def _rate(copy: Callable[[], None], stream: Stream) -> float:
    """GB/s of a copy of MEASURED_BYTES: the best of three."""
    copy()
    stream.synchronize()
    best = float("inf")
    for _ in range(3):
        begin = perf_counter()
        copy()
        stream.synchronize()
        best = min(best, perf_counter() - begin)
    return MEASURED_BYTES / best / 1e9


# ---- one run


class CudaDevices:
    """The GPUs of one run. Verbs only collect; `wait` sends each worker all it has got."""

    def __init__(
        self,
        plan: Plan,
        team: Team,
        gathering: Gathering,
        hardware: CudaHardware,
        told: Told,
        tape: Tape | None = None,
    ):
        self.plan, self.team, self.gathering, self.hardware = plan, team, gathering, hardware
        self.when = moves()  # where chunks were before the run
        #: `Done` means that the device is done, not that the step is queued.
        self.exact = told is Told.EACH
        self.lanes: list[_Lane] = team.lanes
        self.held: dict[int, dict[int, _Held]] = {p: {} for p in (HOST, *range(len(self.lanes)))}
        self.stopped = False
        self.crossing = plan.crossing
        self.wanted = plan.ends
        self._context = Context()  # of the threads that wait: they run none of the user's code
        self.files = Files(hardware.store)  # of values on the disk
        self.out, self.back = Way(hardware.passage), Way(hardware.passage)  # to files, and from
        self.read: dict[tuple[int, int], _Held] = {}  # from there, for a device, in pinned memory
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
        self.ahead = self.light and told is Told.NOTHING
        self.rooms: Rooms | None = gathering.rooms
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
            self.held[step.place][i] = _Held(value)
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
                moved = map_leaves(lambda v: _moved(v, lane.device, lane.incoming), value)
                ready = lane.mark(lane.incoming)
        except Refused as error:
            what = f"{step.key!r}, which lies on another GPU and is copied to where it is read,"
            raise OutOfMemory(
                f"{what} has {_array_bytes(value):,} bytes, for which GPU {lane.device} has no "
                "room: use smaller chunks, or put it on a GPU that the scheduler uses"
            ) from error
        lane.later.append(([ready], value))
        self.held[step.place][i] = _Held(moved, ready, arrived=True, unseen=True)

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
        before = [event for _, event in self.before if not _over(event)]
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

    def follow(self, tape: Tape) -> bool:
        if not self.ahead:
            return False
        self.followed = True
        try:
            return self._queued(tape)
        finally:
            if self.late:
                self._take_over()

    def _queued(self, tape: Tape) -> bool:
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
                    self.held[place][i] = _Held(value, ready)
                return True
        except Exception as error:
            if is_refusal(error):
                return False
            raise
        kernels, staged = self.hardware.kernels, self.hardware.staged
        recorder = None
        if tape not in replays:
            recorder = Recorder(self.plan, self.lanes, kernels, staged, self.rooms)
        for place, orders in tape.orders:
            lane = self.lanes[place]
            with Device(lane.device), lane.home:
                done = self.team.contexts[place].run(self._follow, lane, orders, recorder)
            if not done:
                return False
        if recorder is not None:
            replays[tape] = recorder.replay()
        return True

    def _has_room(self, tape: Tape, rooms: Rooms) -> bool:
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
        lane: _Lane,
        orders: list[tuple[str, int, tuple[int, ...]]],
        recorder: Recorder | None,
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
                    held[i] = _Held(value, lane.mark(lane.home) if seen else None)
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
                explained(error, step)
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
            out = awaited(self._events, self.team)
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
                    return map_leaves(_host_array, held.value)
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
            return map_leaves(_off_host, map_leaves(self._ready_to_go, s.read()))

    def _brought_back(self, i: int, value: Any) -> Any:
        """A result that had to leave its device, on that again."""
        step = self.plan.steps[i]
        device = self.lanes[step.place].device
        try:
            with Device(device):
                return map_leaves(_off_host, value)
        except Refused as error:
            what = f"{step.key!r} is a result"
            raise OutOfMemory(no_room(step.nbytes, f"GPU {device}", what)) from error

    def keep_part(self, step: int, path: tuple[int, ...]) -> tuple[dict[int, Any], int]:
        home = self.plan.steps[step].place
        if (here := self._only(step)) is not None:
            part = here.part(path)
            return {home: part}, _array_bytes(part.value)
        held = self._places(step)
        if not held and step in self.files.of:
            file, value = self.files.part(step, path, self.plan.steps[step].key)
            return {DISK: file}, _array_bytes(value)
        whole = worth_keeping(home, held) or {home: _Held(self.value(step))}
        parts = {p: h.part(path) for p, h in whole.items()}
        return parts, max(_array_bytes(h.value) for h in parts.values())

    def _only(self, step: int) -> _Held | None:
        """What its own device has of a value, where neither the host nor a file has any."""
        if step in self.held[HOST] or step in self.files.of:
            return None
        return self.held[self.plan.steps[step].place].get(step)

    def _places(self, step: int) -> dict[int, _Held]:
        """What there is of a value; a worker may be letting go of replicas still."""
        return {p: found for p, h in self.held.items() if (found := h.get(step)) is not None}

    def keep(self, step: int) -> dict[int, Any]:
        home = self.plan.steps[step].place
        if (here := self._only(step)) is not None:
            return {home: here}
        places: dict[int, Any] = dict(self._places(step))
        if step in self.files.of:
            places[DISK] = self.files.of.pop(step)
        return worth_keeping(home, places) or {home: _Held(self.value(step))}

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

    def _goes_on(self, event: StateEvent | _Next) -> bool:
        """Send what was read from a file on to its device, what CuPy has refused to the host, and
        what that has made back: only this thread gives orders."""
        if type(event) is not _Next:
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
            self.read[step, dst] = _Held(value, room=room)
            self._events.put([_Next(dst, ("fetch", step, DISK))])  # type: ignore[list-item]
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
            self.held[place][i] = _Held(value)
            self._events.put([Issued(i, device_bytes(value)), Done(i)])
        except BaseException as error:
            if is_refusal(error):
                self._events.put([NoRoom(i, place, max(1, step.nbytes))])
            else:
                self._events.put([Failed(i, error)])

    def _brought_home(self, lane: _Lane, held: _Held) -> Any:
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
                made.append(value := _solid(held.value))
                out = map_leaves(lambda v: self._on_host(v, stream, pinned, made), value)
            lane.mark(stream, block=True).synchronize()
        except BaseException:
            lane.outlive(stream, made)
            raise
        return map_leaves(_host_array, out)

    def _sent(self, lane: _Lane, i: int, value: Any) -> list[StateEvent]:
        """Copy arrays of the host to the device, on its in stream, and say so."""
        direct: list[Any] = []  # what the copies read where it is
        try:
            with lane.incoming:
                if type(value) is Located:
                    value = self._read_straight(lane, value, direct)
                else:
                    value = map_leaves(lambda v: self._sent_array(lane, v, direct), value)
        except BaseException as error:
            lane.outlive(lane.incoming, direct)
            if not is_refusal(error):
                raise
            cupy.get_default_memory_pool().free_all_blocks()
            return [NoRoom(i, lane.place, _asked_for(error, self.plan.steps[i].nbytes))]
        done = lane.mark(lane.incoming, block=bool(direct))
        pinned, step = self.plan.pinned, self.plan.steps[i]
        if direct:
            pinned.add(step.kind)
        else:
            pinned.discard(step.kind)
        if direct or self.exact:
            done.synchronize()
        self.held[lane.place][i] = _Held(value, done, arrived=True, unseen=True)
        return [Issued(i, device_bytes(value)), Done(i)]

    def _read_straight(self, lane: _Lane, block: Located, direct: list[Any]) -> Any:
        out = cupy.empty(block.view.shape, block.view.dtype)
        if self._straight(lane, block, out):
            return out
        del out
        return self._sent_array(lane, block.source[block.index], direct)

    def _straight(self, lane: _Lane, block: Located | None, out: Any) -> bool:
        """Read a block from its file into an array that was made on the in stream."""
        if block is None:
            return False
        # what had this memory may be under way still, and KvikIO knows no stream of ours
        lane.mark(lane.incoming, block=True).synchronize()
        return self.hardware.direct.read(block, out)

    def _sent_array(self, lane: _Lane, v: Any, direct: list[Any]) -> Any:
        if not _is_plain(v):
            return v
        if v.flags.f_contiguous and not v.flags.c_contiguous:  # which it stays, as in CuPy's own
            return self._sent_array(lane, v.T, direct).T
        out, stream = cupy.empty(v.shape, v.dtype), lane.incoming
        kind = runtime.memcpyHostToDevice
        if not v.nbytes:
            return out
        if self.hardware.direct.takes(v.nbytes) and self._straight(lane, in_file(v), out):
            return out
        if _is_pinned(v):
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

    def _staged(self, lane: _Lane, v: Any, to: int, some: Pieces) -> None:
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
        if not _is_plain(v):
            return v
        if v.flags.f_contiguous and not v.flags.c_contiguous:
            return _OnHost(self._pinned(v.T).reshape(-1).reshape(v.shape), "F")
        return _OnHost(self._pinned(v), "C")

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
        self._events.put([_Next(place, ("back", i, place))])  # type: ignore[list-item]
        if self.stopped:  # nobody asks for it any more
            self.by_host.clear()

    def _made_at_home(self, lane: _Lane, i: int, values: dict[Any, Any], ready: Event) -> Any:
        """The value of a step, on the device."""

        def bring(v: Any) -> Any:  # not behind what is queued on the home stream by now
            with lane.outgoing:
                return v.get(out=self.hardware.pinned.array(v.shape, v.dtype))

        Device(lane.device).use()
        self._come_behind_caller()
        ready.synchronize()
        with lane.home:  # what the task itself brings to the device is in its order
            value = _by_host(self.plan.steps[i].task, values, bring=bring)
            self._come_home(lane)
            return sent(value)

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
        for place, orders in interleaved(self.plan, todo):
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

    def _let_go(self, lane: _Lane, i: int) -> None:
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

    def _report(self, lane: _Lane, events: list[StateEvent], steps: list[int]) -> None:
        """Say what is queued now, and what is done when the device is."""
        if events:
            self._events.put(events)
        if steps and self.ahead:  # nobody may have to wait for them
            self.unmarked.setdefault(lane.place, []).extend(steps)
        elif steps:
            self._wait_for(lane, steps)
        while not self.light and lane.settle(wait=False):
            pass

    def _wait_for(self, lane: _Lane, steps: list[int]) -> None:
        """Have these, and all that the lane was given before, waited for together."""
        steps = [*self.unmarked.pop(lane.place, ()), *steps]
        lane.queued.append((lane.mark(lane.home, block=True), self, steps))

    def tell(self, events: list[StateEvent]) -> None:
        self._events.put(events)

    def _back(self, lane: _Lane, i: int) -> list[int]:
        """What to launch when a step is back from the host: it, and all that wait for any step, in
        the order of the plan (what was refused was launched again, behind its readers). Those that
        have to go on waiting are put back."""
        behind, self.behind[lane.place] = sorted(self.behind[lane.place]), []
        self.away[lane.place].difference_update(behind, (i,))
        return [i, *behind]

    def _launch(self, lane: _Lane, i: int, events: list[StateEvent], steps: list[int]) -> bool:
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
            events.append(_Next(lane.place, ("away", i, lane.place)))  # type: ignore[arg-type]
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
        empty = not (nbytes or step.constants) and _on_the_host(value)
        empty = empty and all(held[j].empty for j in step.inputs)
        held[i] = _Held(value, ready, empty=empty)
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

    def _read_by(self, lane: _Lane, step: Step) -> dict[Any, Any]:
        """What a task is called with."""
        held, task = self.held[lane.place], step.task
        # such a batch knows where its arrays are; the host does not
        alone = self.alone and step.kind not in self.plan.hosted
        by_heart = type(task) is Batch and alone and task.known()
        reads = (step.names or step.constants) and not by_heart
        values = step.values(lambda j: held[j].value) if reads else {}
        for name in step.constants:
            # the graph's own arrays may be on a GPU that is not among these
            values[name] = map_leaves(lambda v: _moved(v, lane.device, lane.home), values[name])
        return values

    def _attempt(self, lane: _Lane, i: int) -> tuple[Any, int]:
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
            with _Allocated() as allocated:
                value = allocated.apart(self._called(lane, i, values, into), lane.device)
            if allocated.partial:
                plan.parts.add(step.kind)
            self.took[i] = allocated.most
            return value, 0
        except Exception as error:
            if not is_refusal(error):
                raise
            return None, _asked_for(error, 1)

    def _called(self, lane: _Lane, i: int, values: dict[Any, Any], into: Any) -> Any:
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
        return _solid(value) if self.crossing[i] else value

    def _is_broken(self, task: Any) -> bool:
        """Whether a task, one of `KERNELS`, was computed without its kernels."""
        first = task.members[0] if type(task) is Batch else task
        return self.hardware.kernels.broken(first.program)

    def _brought_here(self, lane: _Lane, value: Any) -> Any:
        """A value that a task has made, with copies of what it has left on other devices: a part of
        an array that it has around it, maybe."""
        if not _is_elsewhere(value, lane.device):
            return value
        here = map_leaves(lambda v: _moved(v, lane.device, lane.home), value)
        lane.later.append(([lane.mark(lane.home)], value))  # its memory is another stream's
        return here

    def _otherwise(
        self, lane: _Lane, step: Step, task: Any, values: dict[Any, Any], into: Any,
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
        if type(task) is Products or not refused(error):
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

    def _computed(self, lane: _Lane, task: Any, values: dict[Any, Any], into: Any) -> Any:
        kernels = self.hardware.kernels
        if type(task) is Fused:
            return kernels.run(task, values, lane.device, lane.work, into)
        if type(task) is Batch:
            return kernels.run_batch(task, values, lane.device, lane.work, self.alone)
        if type(task) is Products:
            return task.made(values, lane.multiplier())
        if type(task) is OrNone:  # which waits for it
            made = kernels.run(task.fused, values, lane.device, lane.work)
            with OwnCode():
                return task.found(made)
        if type(task) is Picked:  # so does this
            return kernels.pick(task, values, lane.device, lane.work)
        return task(values)

    def _without_arrays_of_host(
        self, lane: _Lane, task: Any, values: dict[Any, Any], into: Any, error: Any = None
    ) -> Any:
        """The value of a task with arrays of NumPy's among those of CuPy's, by copies of these."""
        self._come_home(lane)
        with OwnCode():
            there = moved(task, values)
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

    def _from_host(self, lane: _Lane, i: int, task: Any, values: dict[Any, Any]) -> Any:
        """The value of a task that the host computes, or has computed already."""
        made = self.by_host.pop(i, None)
        return self._on_the_host(lane, task, values) if made is None else made.result()

    def _on_the_host(
        self, lane: _Lane, task: Any, values: dict[Any, Any], error: Exception | None = None
    ) -> Any:
        """The value of a task that is computed by the host now, on the device."""
        self._come_home(lane)
        self._come_behind_caller()  # what is copied from other devices is so on their own streams
        value = _by_host(task, values, error)
        with OwnCode():
            return sent(value)

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

    def _put(self, lane: _Lane, i: int, value: Any) -> Any:
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
            _copy_block(value, part, lane.home)
        else:
            part[...] = value
        return part

    def _come_home(self, lane: _Lane) -> None:
        """To this device and its stream, where a task has chosen others; behind what it has queued
        on another stream of this device."""
        if runtime.getDevice() != lane.device:
            Device(lane.device).use()
        current = cupy.cuda.get_current_stream()
        if current.ptr != lane.home.ptr:
            lane.home.wait_event(lane.mark(current))
            lane.home.use()

    def _tidy(self, lane: _Lane) -> None:
        """Make the allocator give all it can: what copies still hold, and what is cached."""
        lane.sweep(wait=True)
        lane.home.synchronize()
        cupy.get_default_memory_pool().free_all_blocks()

    def _fetch(self, lane: _Lane, i: int, src: int) -> StateEvent:
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
            lane.watch.send(self._context.copy(), _outlasted, copy, self.team.raised)
        if refused:
            lane.later.append(([lane.mark(stream), *source.reads], keep))
            return NoRoom(i, lane.place, max(refused, device_bytes(source.value)))
        done = lane.mark(stream)
        source.reads.append(done)
        if self.stopped:  # after `close` has looked for reads, maybe
            keep.append(source.value)
        if keep:
            lane.later.append(([done], keep))
        here = self.held[lane.place][i] = _Held(value, done, arrived=True, unseen=True)
        if not self.followed:
            self.fetched += device_bytes(value)
            self._came(i, lane.place, here)
        return Copied(i, src, lane.place)

    def _received(self, lane: _Lane, src: int, source: _Held, keep: list[Any]) -> tuple[Any, int]:
        """A replica of a value, and 0; or None, and the bytes that were refused."""

        def copy(v: Any) -> Any:
            return self._copied(lane, src, source, v, keep)

        try:
            with lane.incoming:
                value = source.value
                if type(value) is tuple and (found := _one_memory(value)) is not None:
                    whole, parts = found
                    return parts(copy(whole)), 0
                return map_leaves(copy, value), 0
        except Refused as error:
            return None, _asked_for(error, 1)

    def _copied(self, lane: _Lane, src: int, source: _Held, v: Any, keep: list[Any]) -> Any:
        stream = lane.incoming
        if isinstance(v, _OnHost):
            out = cupy.empty(v.array.shape, v.array.dtype, order=v.order)
            runtime.memcpyAsync(
                out.data.ptr, v.array.ctypes.data, v.array.nbytes,
                runtime.memcpyHostToDevice, stream.ptr,
            )  # fmt: skip
            return out
        if not isinstance(v, cupy.ndarray):
            return v
        there = self.lanes[src]
        if not _is_solid(v):  # a view in the graph; views that steps make are copied by them
            with Device(there.device), there.outgoing:
                v = cupy.ascontiguousarray(v)
                stream.wait_event(there.mark(there.outgoing))
            keep.append(v)
        out = cupy.empty(v.shape, v.dtype, order=_order(v))
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

    def _to_host(self, lane: _Lane, i: int, dst: int = HOST) -> None:
        """Copy a value to its place in a result, or to pinned memory, and on to the disk."""
        made: list[Any] = []  # what the copies read, and what they write
        try:
            self._send_to_host(lane, i, dst, made)
        except BaseException:
            lane.outlive(lane.outgoing, made, self.gathering)
            raise

    def _send_to_host(self, lane: _Lane, i: int, dst: int, made: list[Any]) -> None:
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

    def _solid(self, lane: _Lane, i: int, value: Any) -> Any:
        """A value that has to leave, without gaps."""
        try:
            return _solid(value)
        except Refused:
            self._tidy(lane)
        try:
            return _solid(value)
        except Refused as error:
            raise OutOfMemory(
                f"{self.plan.steps[i].key!r} cannot leave device {lane.place}: it is an array with "
                f"gaps, or in an order of its own, and there is no room for a copy of "
                f"{device_bytes(value):,} bytes without; end its task with "
                "cupy.ascontiguousarray, or lower memory_limit"
            ) from error

    def _write(self, block: Any, part: Any, stream: Stream) -> None:
        _copy_into(part, part.ctypes.data, block, runtime.memcpyDeviceToHost, stream)

    def _on_host(self, v: Any, stream: Stream, pinned: PinnedBlocks, made: list[Any]) -> Any:
        if not isinstance(v, cupy.ndarray):
            return v
        out = pinned.array(v.shape, v.dtype)
        made.append(out)
        runtime.memcpyAsync(
            out.ctypes.data, v.data.ptr, v.nbytes, runtime.memcpyDeviceToHost, stream.ptr
        )
        return _OnHost(out, _order(v))

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
            there = self.held[HOST][i] = _Held(kept)
            self._came(i, HOST, there)
            self._events.put([Copied(i, place, HOST)])
        except BaseException as error:
            self._events.put([Failed(i, error)])

    def _leave_host(self, step: int, held: _Held) -> None:
        pending = [e for e in held.reads if not _over(e)]
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


def _outlasted(copy: tuple[Event, _Held]) -> None:
    """In the thread that waits for copies: what one has read may go when it is over."""
    event, _ = copy
    with suppress(runtime.CUDARuntimeError):  # of which others tell
        event.synchronize()


def _is_plain(v: Any) -> bool:
    """Whether a value is an array of the host such as devices have."""
    return isinstance(v, np.ndarray) and is_plain(v.dtype)


def _is_pinned(array: Any) -> bool:
    """Whether an array of the host is in pinned memory."""
    return bool(runtime.pointerGetAttributes(array.ctypes.data).type == runtime.memoryTypeHost)


def _over(event: Event) -> bool:
    """Whether there is nothing to wait for any more; after an error, of which `synchronize` tells,
    there is not."""
    try:
        return bool(event.done)
    except runtime.CUDARuntimeError:
        return True


@dataclass(slots=True)
class _Next:
    """No news for the loop, but what it is to order next."""

    place: int
    order: Order


def _by_host(
    task: Any,
    values: dict[Any, Any],
    error: Exception | None = None,
    bring: Callable[[Any], Any] = cupy.asnumpy,
) -> Any:
    """The value of a task (of a kernel, the operations that it stands for) that is called with
    copies on the host of what it reads. Raises `error`, with which it has failed on the device,
    where that comes to nothing."""
    if type(task) is Batch:
        return tuple([_by_host(member, values, error, bring) for member in task.members])
    if type(task) in (OrNone, Picked):
        task = task.fused
    task = task.original if type(task) is Fused else task
    with OwnCode():
        there = at_home(task, values, error is not None, bring)
    if there is None:
        if error is not None:
            raise error
        return task(values)
    try:
        value = there.task(there.values)
    except Exception as again:
        if error is None or is_refusal(again) or isinstance(again, MemoryError):
            raise
        raise error from None
    if there.changed():
        raise error or TypeError("it writes to an array of CuPy's, and runs on the host")
    return value


@dataclass(slots=True)
class _OnHost:
    """A CuPy array's bytes in pinned memory; `order` is how the device had them."""

    array: Any
    order: str

    def __getitem__(self, n: int) -> _OnHost:
        return _OnHost(np.ascontiguousarray(_host_array(self)[n]), "C")


def _host_array(v: Any) -> Any:
    if not isinstance(v, _OnHost):
        return v
    return v.array.reshape(-1).reshape(v.array.shape, order=v.order)


def _off_host(v: Any) -> Any:
    """On the caller's current device and stream; the pinned memory is free when it returns."""
    if not isinstance(v, _OnHost):
        return v
    out = cupy.asarray(_host_array(v), order=v.order)
    cupy.cuda.get_current_stream().synchronize()
    return out


def _asked_for(error: BaseException, least: int) -> int:
    """Bytes that the allocator was asked for, from CuPy's own words."""
    words = str(error).replace(",", "").split()
    numbers = [int(w) for w in words if w.isdigit()]
    return max([least, *numbers[:1]])
