"""What this process takes of the host's memory, and how it gives back what nobody uses.

`malloc` keeps what is let go of for the next who asks, in an arena for each few threads, and one
thread has no use for what another's keeps: a process may take twice what its values do. Knows no
value and no plan.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

#: How often it is asked what the process takes: behind this part of the limit that came or went.
PACE = 1 / 64
#: ... and behind so many bytes at least.
LEAST = 2**20
TRIM_THRESHOLD = -1  # M_TRIM_THRESHOLD of malloc.h


def resident() -> int:
    """Bytes of the host's memory that this process has now; 0 where the system does not say.

    >>> resident() >= 0
    True
    """
    try:
        with open("/proc/self/statm", "rb", buffering=0) as f:
            return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
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


class Slack:
    """Has the process give back what it does not use, where it takes more than a limit on top of
    what it took when this was made, or is about to. What it cannot give back is no reason to try
    again, but that it has grown since is.

    >>> taken = iter([100, 150, 205, 190, 206, 206, 206, 207, 206])
    >>> slack = Slack(100, lambda: next(taken), lambda: print("given back"), least=1)
    >>> slack.let_go(1)  # 150 are within 200
    >>> slack.let_go(2)  # 205 are not
    given back
    >>> slack.let_go(1)  # 206 are not, and they are needed
    given back
    >>> slack.let_go(1)
    >>> slack.take(1)  # it would be 207
    given back
    """

    def __init__(
        self,
        limit: int,
        taken: Callable[[], int] = resident,
        give_back: Callable[[], object] = give_back,
        least: int = LEAST,
    ):
        self.taken, self.give_back = taken, give_back
        self.pace = max(least, int(PACE * limit))
        self.limit = self.full = taken() + limit  # bytes of the process from which it gives back
        self.turned = 0  # bytes since it was asked last

    def let_go(self, nbytes: int) -> None:
        """So many more bytes of values are used no more."""
        self._look(nbytes, 0)

    def take(self, nbytes: int) -> None:
        """So many more bytes are about to be taken: what others keep may have to go for them."""
        self._look(nbytes, nbytes)

    def _look(self, nbytes: int, more: int) -> None:
        self.turned += nbytes
        if self.turned < self.pace:
            return
        self.turned = 0
        taken = self.taken() + more
        if taken > self.full:
            self.give_back()
            self.full = self.taken() + more + self.pace
        # or it would follow what grows slowly
        self.full = max(self.limit, min(self.full, taken + self.pace))
