"""Pinned host memory, reused in blocks, slabs and pieces."""

from __future__ import annotations

import math
import mmap
import os
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

import cupy
import numpy as np
from cupy.cuda import Event, runtime

from ...errors import OutOfMemory
from ...forks import new_lock, new_rlock
from ...runtime.host_memory import available_memory
from . import staging
from .arrays import is_refusal

#: Bytes of a piece of pinned memory through which an array of the host goes to a device, and how
#: many of these each device has for each of its threads, at most; and at least.
PIECE_BYTES = staging.PART_BYTES * staging.PARTS
PIECES = 2
LEAST_PIECE_BYTES, LEAST_PIECES = 2**20, 2
#: Seconds after which one that waits for a piece looks whether it can make one itself.
LOOK_AGAIN = 0.1
#: Bytes from which pinned memory is made of pages that so many threads touch; and at once, at most.
LEAST_REGISTERED, SLAB_BYTES = 2**22, 2**28
#: Bytes from which an array that is brought to the host is in pinned memory.
LEAST_PINNED = 2**16
PORTABLE = 1  # cudaHostRegisterPortable, for which CuPy has no name
TOUCHING = min(8, os.cpu_count() or 1)


# ---- pinned host memory


class PinnedBlocks:
    """Page-locked host memory, kept for reuse: locking a page costs more than filling it.

    What stays `inside` is never the caller's, and can be made faster, see `_PinnedSlab`. What waits
    for
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
                block = self._allocate(size)
            except BaseException:
                with self._lock:
                    self.used -= size
                raise
        # views of it keep this array, and not, as those of `block[:nbytes]`, what it is a view of
        raw = np.frombuffer(memoryview(block), np.uint8, nbytes)
        weakref.finalize(raw, self._take_back, size, block).atexit = False
        return raw.view(dtype).reshape(shape)

    def _allocate(self, size: int) -> Any:
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
        """A block of a new slab, whose other blocks become free.

        The slab has about as many blocks as there were before. None where the system has no such
        memory.
        """
        with self._lock:
            room = max(0, self.limit - self.used - self.idle) // size  # beside the block itself
            count = max(1, min(self.made.get(size, 0), SLAB_BYTES // size, 1 + room))
            others = (count - 1) * size
            self.used += others
        try:
            blocks = _PinnedSlab(count * size).blocks(count)
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

    def _take_back(self, size: int, block: Any) -> None:
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


def copy_to_numpy(array: Any, pinned: PinnedBlocks) -> Any:
    """Copy an array of the current device to the host, on the current stream, and wait for it.

    It has the same order in memory. Large ones are in pinned memory.
    """
    if array.flags.f_contiguous and not array.flags.c_contiguous:
        return copy_to_numpy(array.T, pinned).T
    if array.nbytes < LEAST_PINNED:
        return array.get()
    return array.get(out=pinned.array(array.shape, array.dtype))


_PINNED: weakref.WeakSet[PinnedBlocks] = weakref.WeakSet()


def _pinned_block(size: int) -> Any:
    memory = cupy.cuda.PinnedMemory(size, runtime.hostAllocPortable)
    pointer = cupy.cuda.PinnedMemoryPointer(memory, 0)
    return np.frombuffer(pointer, dtype=np.uint8, count=size)


class _PinnedSlab:
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


class StagingPieces:
    """Pinned memory in pieces of one size, which are reused in turn.

    A copy from one piece may be under way when the next is filled. All pieces together take `limit`
    bytes, or the least possible; there are at most `most` of them.
    """

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
    """Split an array into contiguous parts of at most `most` bytes, in C order.

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
