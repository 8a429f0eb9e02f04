"""What a GPU's runtime does, on the host: memory, streams, events and copies.

Work is done at once, in the order of the calls; what a GPU would have been free to do in another
order is found by its clocks. Each stream counts its work, and knows how much of each other stream's
lies before its own (Lamport, 1978; Fidge and Mattern, 1988): by events, and by what the host has
waited for. An access to memory that is not behind the last one of another kind is a race. Copies to
pinned memory arrive when the host has waited for them, and not before: until then there is noise.
"""

import bisect
import ctypes
import itertools
import os
import random
import sys
import threading
import traceback
import weakref
from time import perf_counter
from typing import NamedTuple

import numpy as np

DEVICES = int(os.environ.get("FAKE_CUDA_DEVICES", "4"))
MEMORY = int(os.environ.get("FAKE_CUDA_MEMORY", str(2**30)))
PEERS = os.environ.get("FAKE_CUDA_PEERS", "1") != "0"
PROCESSORS = 2
FIRST = 4096  # what a pointer to a stream begins with
STACKS = "FAKE_CUDA_STACKS" in os.environ  # a race then shows who wrote before: takes long

lock = threading.RLock()
chance = random.Random(0)
races: list[str] = []  # what tests look at, for a thread may swallow what is raised in it
completed: dict[int, int] = {}  # stream -> how much of its work the host knows to be over
streams: "weakref.WeakValueDictionary[int, Stream]" = weakref.WeakValueDictionary()
handles: "weakref.WeakValueDictionary[int, Stream]" = weakref.WeakValueDictionary()
#: Handles of streams that nobody has any more, whether their work is over or not.
free_handles: list[int] = []
events: "weakref.WeakValueDictionary[int, Event]" = weakref.WeakValueDictionary()
left: dict[int, "Stream"] = {}  # which nobody has any more, with work that may be under way
numbers = itertools.count()


class Race(AssertionError):
    """Two accesses to memory that may take place in either order."""


def race(words):
    races.append(words + "\n" + "".join(traceback.format_stack(limit=14)[:-2]))
    raise Race(words)


# ---- threads: the current device, and each device's current stream


class _Here(threading.local):
    def __init__(self):
        self.device = 0
        self.streams = {}
        self.entered = []  # as CuPy has it: of each thread; `use` does not count


here = _Here()


def current_stream(device=None):
    device = here.device if device is None else device
    return here.streams.get(device) or null(device)


#: Devices on which a kernel has failed.
broken: set[int] = set()


#: Whether this process was forked from one that uses CUDA, which then works in the parent only.
forked = False


def _note_fork():
    global forked
    forked = True


os.register_at_fork(after_in_child=_note_fork)


def alive(device):
    if forked:
        from .cuda.runtime import CUDARuntimeError

        raise CUDARuntimeError("cudaErrorInitializationError: initialization error")
    if device in broken:
        from .cuda.runtime import CUDARuntimeError

        raise CUDARuntimeError("cudaErrorIllegalAddress: an illegal memory access was encountered")


class Timed:
    """Its clock says what lies before it."""

    @property
    def done(self):
        alive(self.device_id)
        with lock:
            return over(self.clock)

    def synchronize(self):
        alive(self.device_id)
        with lock:
            finish(self.clock)


class Stream(Timed):
    """In order; `non_blocking` or not, it waits for the null stream only where it is told to."""

    __module__ = "cupy.cuda.stream"  # as in CuPy: functions that use one are not traced

    def __init__(self, null=False, non_blocking=False, ptds=False, priority=None, ptr=None):
        with lock:
            self.device_id = here.device
            self.number = next(numbers)
            if ptr is None:  # CUDA gives a handle again before the work of its last stream is over
                ptr = free_handles.pop() if free_handles else FIRST + 16 * self.number
            self.ptr = ptr
            streams[self.number] = handles[ptr] = self
            self.clock = {self.number: 0}
            self.pending = []  # (count, address, bytes, keep): to pinned memory
            self.sources = []  # (count, address, bytes): from pinned memory

    def __del__(self):
        if lock is None:  # the process ends
            return
        with lock:
            if completed.get(self.number, 0) < self.clock[self.number]:
                left[self.number] = self
            if self.ptr >= FIRST:
                free_handles.append(self.ptr)

    def __eq__(self, other):
        return isinstance(other, Stream) and self.number == other.number

    def __hash__(self):
        return hash(self.number)

    def work(self):
        alive(self.device_id)
        self.clock[self.number] += 1
        return self.clock[self.number]

    def use(self):
        if self.device_id != here.device:
            raise RuntimeError(
                f"a stream of device {self.device_id} cannot be used on device {here.device}"
            )
        here.streams[self.device_id] = self
        return self

    def __enter__(self):
        self.use()
        here.entered.append(self)
        return self

    def __exit__(self, *_):
        here.entered.pop()  # current is what was entered before, not what was used meanwhile
        entered = [s for s in here.entered if s.device_id == self.device_id]
        before = entered[-1] if entered else None
        if before is None:
            here.streams.pop(self.device_id, None)
        else:
            here.streams[self.device_id] = before

    def record(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event):
        with lock:
            merge(self.clock, event.clock)


_null: dict[int, Stream] = {}


def null(device=None):
    device = here.device if device is None else device
    with lock:
        if device not in _null:
            before, here.device = here.device, device
            _null[device] = Stream(ptr=0)
            here.device = before
        return _null[device]


class Event(Timed):
    __module__ = "cupy.cuda.stream"

    def __init__(self, block=False, disable_timing=False, interprocess=False):
        self.clock = {}
        self.timed, self.when = not disable_timing, None
        self.device_id = here.device
        self.ptr = FIRST + id(self)
        events[self.ptr] = self

    def record(self, stream=None):
        stream = stream or current_stream()
        alive(stream.device_id)
        if stream.device_id != self.device_id:
            raise RuntimeError("an event of one device was recorded on a stream of another")
        with lock:
            stream.clock = {
                n: count
                for n, count in stream.clock.items()
                if n == stream.number or completed.get(n, 0) < count
            }
            self.clock = dict(stream.clock)
            self.when = perf_counter()


def elapsed(start, end):
    """Milliseconds, as CUDA gives them: a float32, for timed events of one device that are over."""
    if not (start.timed and end.timed) or start.when is None or end.when is None:
        raise RuntimeError("cudaErrorInvalidResourceHandle: an event without time")
    if start.device_id != end.device_id:
        raise RuntimeError("cudaErrorInvalidResourceHandle: events of two devices")
    alive(end.device_id)
    with lock:
        for clock in (start.clock, end.clock):
            if any(completed.get(n, 0) < c for n, c in clock.items()):
                raise RuntimeError("cudaErrorNotReady: an event that is not over")
    return float(np.float32((end.when - start.when) * 1e3))


def of_number(number):
    """A stream; None where nobody has it any more and all of its work is over."""
    return streams.get(number) or left.get(number)


def every_stream():
    return [*streams.values(), *left.values()]


def merge(into, clock):
    for number, count in clock.items():
        if into.get(number, 0) < count:
            into[number] = count


def over(clock):
    """Whether all that lies before is over; what nobody has waited for may be, or may not."""
    if all(completed.get(n, 0) >= c for n, c in clock.items()):
        return True
    if chance.random() < 0.3:
        finish(clock)
        return True
    return False


def finish(clock):
    for number, count in clock.items():
        if completed.get(number, 0) >= count:
            continue
        completed[number] = count
        if (stream := of_number(number)) is None:
            continue
        # taken out first: what is let go of meanwhile may come here again
        pending, stream.pending = stream.pending, [p for p in stream.pending if p[0] > count]
        sources, stream.sources = stream.sources, [s for s in stream.sources if s[0] > count]
        for copy in pending:
            _arrive(copy, count)
        for source in sources:
            _unchanged(source, count)
        if stream.clock[number] <= count:
            left.pop(number, None)


def _arrive(pending, count):
    at, rows, content, _ = pending
    if at <= count:
        rows.write(content)


def _unchanged(source, count):
    at, rows, content, _ = source
    if at <= count and rows.read() != content:
        race("pinned memory was written while a copy from it was under way")


def before(access, stream):
    number, count = access
    return (
        number == stream.number
        or stream.clock.get(number, 0) >= count
        or completed.get(number, 0) >= count
    )


# ---- memory


class Memory:
    """A piece of a device's memory, or of the host's that is pinned (device -1)."""

    def __init__(self, nbytes, device, stream=None):
        self.raw = np.empty(nbytes + 512, np.uint8)
        self.ptr = self.raw.ctypes.data + (-self.raw.ctypes.data) % 512
        self.size, self.device, self.stream = nbytes, device, stream
        self.by = ""
        self.written = None  # by which stream, as its how many-th work
        self.reads = {}
        self.ranges = []  # of pinned memory: (low, high, writes, stream, count)
        register(self)

    def read(self, stream):
        with lock:
            count = stream.work()
            if self.written is not None and not before(self.written, stream):
                self._race("read", "written", self.written, stream)
            self.reads[stream.number] = count

    def write(self, stream):
        with lock:
            count = stream.work()
            if self.written is not None and not before(self.written, stream):
                self._race("written", "written", self.written, stream)
            for access in self.reads.items():
                if not before(access, stream):
                    self._race("written", "read", access, stream)
            self.written, self.reads = (stream.number, count), {}
            if STACKS:
                self.by = "".join(traceback.format_stack(limit=14)[:-1])

    def touch(self, rows, writes, stream):
        """Pinned memory: parts of it are written by several devices at once."""
        count = stream.clock[stream.number]
        kept = []
        for other in self.ranges:
            if before(other[2:], stream):
                if other[0] != rows:  # not hidden by this one
                    kept.append(other)
                continue
            if (writes or other[1]) and rows.meets(other[0]):
                self._race("used", "used", other[2:], stream)
            kept.append(other)
        self.ranges = [r for r in kept if completed.get(r[2], 0) < r[3]]
        self.ranges.append((rows, writes, stream.number, count))

    def _race(self, now, then, access, stream):
        where = "pinned memory" if self.device < 0 else f"memory of device {self.device}"
        race(
            f"{self.size} bytes of {where} are {now} on stream {stream.number} of device "
            f"{stream.device_id}, and were {then} on stream {access[0]} of device "
            f"{of_number(access[0]).device_id} with nothing in between\n{self.by}"
        )


class Rows(NamedTuple):
    """Bytes that are `pitch` apart."""

    start: int
    width: int
    count: int
    pitch: int

    def meets(self, other):
        if self.start >= other.end or other.start >= self.end:
            return False
        if self.pitch != other.pitch or not self.pitch:
            return any(
                other.has(self.start + n * self.pitch, self.width) for n in range(self.count)
            )
        ahead = (other.start - self.start) % self.pitch
        return ahead < self.width or self.pitch - ahead < other.width

    def has(self, start, width):
        """Any of these bytes."""
        pitch = self.pitch or self.width
        first = max(0, (start - self.width - self.start) // pitch + 1)
        return first < self.count and self.start + first * pitch < start + width

    @property
    def end(self):
        return self.start + (self.count - 1) * self.pitch + self.width

    def read(self):
        starts = range(self.start, self.end, self.pitch or self.width)
        return [ctypes.string_at(at, self.width) for at in starts]

    def write(self, content):
        for n, row in enumerate(content):
            ctypes.memmove(self.start + n * self.pitch, row, self.width)


_starts: list[int] = []
_found: dict[int, Memory] = {}


def register(memory):
    with lock:
        bisect.insort(_starts, memory.ptr)
        _found[memory.ptr] = memory


def unregister(memory):
    with lock:
        _starts.remove(memory.ptr)
        del _found[memory.ptr]


def memory_at(address):
    """The piece of memory that has an address; None for what is pageable."""
    with lock:
        n = bisect.bisect_right(_starts, address) - 1
        found = _found[_starts[n]] if n >= 0 else None
        return found if found is not None and address < found.ptr + max(found.size, 1) else None


#: Of each thread, by name: what is told of memory that is taken from pools, and given back.
hooks = threading.local()


class Pooled:
    """Memory in use, the first `size` bytes of it; it goes back to the stream that it was allocated
    on."""

    def __init__(self, memory, pool, size, fresh=False):
        self.memory, self.pool, self.size = memory, pool, size
        for hook in vars(hooks).values():
            if fresh:
                hook.alloc_postprocess(device_id=0, mem_size=size, mem_ptr=memory.ptr)
            hook.malloc_postprocess(
                device_id=0, size=size, mem_size=size, mem_ptr=memory.ptr, pmem_id=id(self)
            )

    def __del__(self):
        self.pool.back(self.memory, self.size)
        for hook in vars(hooks).values():
            hook.free_postprocess(
                device_id=0, mem_size=self.size, mem_ptr=self.memory.ptr, pmem_id=id(self)
            )


class OutOfMemoryError(MemoryError):
    def __init__(self, size, total, limit=0):
        said = f", limit set to: {limit:,} bytes" if limit else ""
        text = f"Out of memory allocating {size:,} bytes (allocated so far: {total:,} bytes{said})."
        super().__init__(text)


class Pool:
    """Of one device: what was let go of is used again on the same stream, the latest first.

    As in CuPy, the same stream is one with the same handle.
    """

    def __init__(self, device):
        self.device = device
        self.free = {}
        self.used = self.held = 0
        self.limit = 0

    def allocate(self, nbytes):
        size = max(512, -(-nbytes // 512) * 512)
        with lock:
            stream = current_stream(self.device)
            kept = self.free.setdefault(stream.ptr, [])
            fitting = [m for m in kept if size <= m.size <= 2 * size]
            if fitting:
                kept.remove(fitting[-1])
                self.used += size  # CuPy leaves the rest to others
                return Pooled(fitting[-1], self, size)
            most = min(self.limit or MEMORY, MEMORY)
            if self.held + size > most:
                self.free_all_blocks()
            if self.held + size > most:
                raise OutOfMemoryError(size, self.held, most)
            self.held += size
            self.used += size
            return Pooled(Memory(size, self.device, stream.ptr), self, size, fresh=True)

    def back(self, memory, size):
        with lock:
            self.used -= size
            self.free.setdefault(memory.stream, []).append(memory)

    def free_all_blocks(self):
        with lock:
            for handle, kept in self.free.items():
                for memory in kept:
                    # giving memory back to the driver waits for the device
                    users = [of_number(n) for n in (*memory.reads, *(memory.written or ())[:1])]
                    owners = [s for s in every_stream() if s.ptr == handle]
                    for stream in (*owners, *users):
                        if stream is not None:
                            finish(stream.clock)
                    self.held -= memory.size
                    unregister(memory)
                kept.clear()


pools = [Pool(d) for d in range(DEVICES)]


class Registered(Memory):
    """Memory of the host's that CUDA was told of."""

    def __init__(self, pointer, nbytes):
        self.raw, self.ptr, self.size, self.device, self.stream = None, pointer, nbytes, -1, None
        self.by, self.written, self.reads, self.ranges = "", None, {}, []
        register(self)

    def leave(self):
        with lock:
            _let_go(self)
            unregister(self)


def _let_go(memory):
    for stream in every_stream():
        for at, rows, *_ in stream.pending:
            if rows.start < memory.ptr + memory.size and memory.ptr < rows.end:
                races.append(f"pinned memory went while copy {at} to it was under way")


class PinnedMemory:
    def __init__(self, size, flags=0):
        self.memory = Memory(size, -1)
        self.ptr, self.size = self.memory.ptr, size

    def __del__(self):
        if sys is None or sys.is_finalizing():  # with streams that are gone
            return
        with lock:
            _let_go(self.memory)
            unregister(self.memory)


class _Part(np.ndarray):
    """Of pinned memory, which lives as long as this does."""


def pinned_buffer(memory, offset):
    start = memory.memory.ptr - memory.memory.raw.ctypes.data + offset
    part = memory.memory.raw[start : start + memory.size - offset].view(_Part)
    part.owner = memory
    # not an array, which NumPy would put in place of its views' own base
    return memoryview(part)


# ---- copies


def copy(to, source, width, stream, count=1, pitch=0, source_pitch=0):
    """What `memcpy2DAsync` does, with addresses as it has them."""
    if not width or not count:
        return
    source, to = Rows(source, width, count, source_pitch), Rows(to, width, count, pitch)
    with lock:
        a, b = memory_at(source.start), memory_at(to.start)
        if a is not None and a.device >= 0:
            a.read(stream)
        if b is not None and b.device >= 0:
            b.write(stream)
        at = stream.work()
        if a is not None and a.device < 0:
            a.touch(source, False, stream)
            for other in every_stream():  # what is ordered before is there by now
                for pending in list(other.pending):
                    if source.meets(pending[1]):
                        if not before((other.number, pending[0]), stream):
                            race("pinned memory is read before a copy to it is sure to be there")
                        other.pending.remove(pending)
                        pending[1].write(pending[2])
        content = source.read()
        if a is not None and a.device < 0:
            stream.sources.append((at, source, content, a))
        if b is not None and b.device < 0:
            b.touch(to, True, stream)
            to.write([b"\xa5" * width] * count)
            stream.pending.append((at, to, content, b))
        else:
            to.write(content)
            if b is None or a is None:  # pageable memory: the host waits
                finish(stream.clock)
