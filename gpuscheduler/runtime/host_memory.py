"""Memory of this process, and how unused memory goes back to the system.

`malloc` keeps freed memory in arenas, one for each few threads. A thread cannot use what the arena
of another one keeps, so a process may take twice the bytes of its values. `MemoryTrimmer` gives
such memory back. `SpillPassage` limits the bytes on their way to and from files. Knows no value and
no plan.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from typing import TypeVar

from ..forks import new_rlock

T = TypeVar("T")

#: The process's memory is read each time that values of this part of the limit were made or freed,
PACE = 1 / 64
#: ... and of at least this many bytes.
LEAST = 2**20
#: Seconds at most between calls of `meanwhile` while a value waits in `PassageLane.room`.
PATIENCE = 0.1
TRIM_THRESHOLD = -1  # M_TRIM_THRESHOLD of malloc.h


def resident_bytes() -> int:
    """Bytes of the host's memory that this process has now; 0 where the system does not say.

    >>> resident_bytes() >= 0
    True
    """
    try:
        with open("/proc/self/statm", "rb", buffering=0) as f:
            return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def most_resident() -> int:
    """The most memory that this process has had, in bytes; 0 where the system does not say.

    >>> most_resident() == 0 or most_resident() >= resident_bytes() // 2
    True
    """
    try:
        with open("/proc/self/status", "rb") as f:
            return next(1024 * int(line.split()[1]) for line in f if line.startswith(b"VmHWM"))
    except (OSError, ValueError, StopIteration):
        return 0


def _malloc() -> Callable[[], object]:
    try:
        library = ctypes.CDLL(None)
        trim, option = library.malloc_trim, library.mallopt
    except (AttributeError, OSError, TypeError):  # another C library
        return lambda: None

    def give_back() -> None:
        option(TRIM_THRESHOLD, LEAST)  # else each arena keeps up to 64 MiB at its end
        trim(0)  # what is free before that

    return give_back


give_back = _malloc()


class MemoryTrimmer:
    """Makes the process give memory back that it does not use, above a limit.

    The limit is on top of the memory that the process had when this was made. Memory that cannot be
    given back does not cause another attempt; growth since the last one does.

    >>> taken = iter([100, 150, 205, 190, 206, 206, 206, 207, 206])
    >>> trimmer = MemoryTrimmer(100, lambda: next(taken), lambda: print("given back"), least=1)
    >>> trimmer.let_go(1)  # 150 are within 200
    >>> trimmer.let_go(2)  # 205 are not
    given back
    >>> trimmer.let_go(1)  # 206 are not, and they are needed
    given back
    >>> trimmer.let_go(1)
    >>> trimmer.take(1)  # it would be 207
    given back
    """

    def __init__(
        self,
        limit: int,
        taken: Callable[[], int] = resident_bytes,
        give_back: Callable[[], object] = give_back,
        least: int = LEAST,
        most: Callable[[], int] = most_resident,
    ):
        self.taken, self.give_back, self.most = taken, give_back, most
        self.shed: Callable[[], object] = lambda: None  # lets go of what can be had again
        #: By how much the process grew for tasks, beside what they made: by name and bytes of that.
        self.grown: dict[tuple[str, int], list[int]] = {}
        self.pace = max(least, int(PACE * limit))
        self.limit = self.full = taken() + limit  # bytes of the process from which it gives back
        self.turned = 0  # bytes since it was asked last

    def let_go(self, nbytes: int) -> None:
        """Note that so many more bytes of values are no longer used."""
        self._count(nbytes, 0)

    def take(self, nbytes: int) -> None:
        """Note that so many bytes are about to be allocated: caches may be freed for them."""
        self._count(nbytes, nbytes)

    def _count(self, nbytes: int, more: int) -> None:
        self.turned += nbytes
        if self.turned < self.pace:
            return
        self.turned = 0
        taken = self.taken() + more
        if taken > self.full:
            self.shed()
            self.give_back()
            self.full = self.taken() + more + self.pace
        # or it would follow what grows slowly
        self.full = max(self.limit, min(self.full, taken + self.pace))

    def measure_growth(self, call: Callable[[], T]) -> tuple[T, int | None, bool]:
        """Call a function, and measure by how many bytes the process grew meanwhile.

        Returns the value, the bytes, and whether the process became larger than ever before. Only
        then the bytes are exact; otherwise they are an upper bound. They are None where the system
        does not tell.
        """
        self.give_back()  # otherwise the call would use memory that malloc keeps
        before, most = self.taken(), self.most()
        value = call()
        now = self.most()
        return value, now - before if now else None, now > most


class SpillPassage:
    """Limits the host memory that values take on their way to files and back, in bytes.

    Each run has two `PassageLane`s, one in each direction. One value may always pass in each lane,
    however large it is, so that no value waits for one behind it. More values may pass while all of
    them together are within the limit.
    """

    def __init__(self, limit: int):
        self.limit = limit
        self.used = self.peak = 0
        # collecting garbage may let go of a room while the lock is held: it can be taken twice
        self.changed = threading.Condition(new_rlock())


class PassageLane:
    """What one run has in a passage in one direction.

    >>> lane = PassageLane(SpillPassage(100))
    >>> first, second = lane.room(200), lane.room(0)
    >>> lane.passage.used
    200
    >>> del first
    >>> lane.passage.used
    0
    """

    def __init__(self, passage: SpillPassage):
        self.passage = passage
        self.held = 0

    def room(self, nbytes: int, meanwhile: Callable[[], object] = lambda: None) -> PassageRoom:
        """Wait for room for a value; the room is taken as long as the result is referenced.

        `meanwhile` is called at least every `PATIENCE` seconds while this waits. It may raise.
        """
        passage = self.passage
        with passage.changed:
            while nbytes and self.held and passage.used + nbytes > passage.limit:
                meanwhile()
                passage.changed.wait(PATIENCE)
            self.held += nbytes
            passage.used += nbytes
            passage.peak = max(passage.peak, passage.used)
        return PassageRoom(self, nbytes)


class PassageRoom:
    """Bytes of a lane, which are given back when this object is garbage-collected."""

    def __init__(self, lane: PassageLane, nbytes: int):
        self.lane, self.nbytes = lane, nbytes

    def __del__(self) -> None:
        passage = self.lane.passage
        with passage.changed:
            self.lane.held -= self.nbytes
            passage.used -= self.nbytes
            passage.changed.notify_all()


def available_memory() -> int:
    """Bytes of host memory that can be had without swapping; half of all where Linux won't say.

    >>> available_memory() > 2**20
    True
    """
    try:
        with open("/proc/meminfo", encoding="ascii") as f:
            facts = dict(line.split(":", 1) for line in f)
        return int(facts["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        try:
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
        except (ValueError, OSError, AttributeError):
            return 2**32
