"""Locks that a forked child finds open.

The threads that held these locks are not in the child. The file uses `_at_fork_reinit` of Python's
locks, as `concurrent.futures` and `logging` do (seen in Python 3.9 to 3.14), and `_is_owned` of
reentrant locks.
"""

from __future__ import annotations

import os
import threading
from typing import Any
from weakref import ref

from .cpython_private import open_lock

_every: dict[int, ref[Any]] = {}


def new_lock() -> threading.Lock:
    """A lock that one thread takes once.

    >>> with new_lock() as taken:
    ...     taken
    True
    """
    return _renew_lock(threading.Lock())  # type: ignore[no-any-return]


def new_rlock() -> Any:
    """A lock that its thread may take again, as where collecting garbage comes back to it."""
    return _renew_lock(threading.RLock())


def _renew_lock(lock: Any) -> Any:
    known = id(lock)
    _every[known] = ref(lock, lambda _: _every.pop(known, None))
    return lock


def _renew_after_fork() -> None:
    """Open all but those of the thread that forked, which goes on in the child."""
    for watched in list(_every.values()):
        lock = watched()
        if lock is not None:
            open_lock(lock)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_after_fork)
