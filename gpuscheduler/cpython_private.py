"""Private names of CPython and its standard library, in one place.

They were seen in Python 3.10 to 3.14. `tests/test_private_names.py` looks each up, and says what is
lost without it.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import warnings
from collections.abc import Sequence
from contextlib import suppress
from time import sleep
from types import FrameType
from typing import Any

#: Each private name, and what no longer works without it.
LOST = {
    "sys._getframe": "the user's lines in errors and recordings",
    "threading.RLock()._is_owned": "locks of a forked child",
    "threading.RLock()._at_fork_reinit": "locks of a forked child",
    "threading.Lock()._at_fork_reinit": "locks of a forked child",
    "ctypes.pythonapi.PyThreadState_SetAsyncExc": "cancelled stages stop at once",
    "multiprocessing.pool.Pool._repopulate_pool": "broken pools of processes are noticed",
    "concurrent.futures.ThreadPoolExecutor(1)._max_workers": "the size of a caller's pool",
    "concurrent.futures.ThreadPoolExecutor(1)._threads": "broken pools of threads are noticed",
}


def frame_of_caller(depth: int = 1) -> FrameType:
    """Return the frame `depth` calls above the function that calls this."""
    return sys._getframe(depth + 1)


def open_lock(lock: Any) -> None:
    """Open a lock in a forked child, unless the thread holds it that goes on there."""
    if not getattr(lock, "_is_owned", bool)():
        lock._at_fork_reinit()


def warning_filters() -> Sequence[Any]:
    """Return the filters of warnings in force; from Python 3.14 a context may have its own."""
    return getattr(warnings, "_get_filters", lambda: warnings.filters)()


def raise_in_thread(thread: int, error: type[BaseException]) -> None:
    """Have a thread raise an error at its next instruction."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))


def discard_error(error: type[BaseException]) -> None:
    """Discard an error that is to be raised in this thread, and may have been raised before.

    It is raised once more, and caught. CPython takes it back as well, but 3.11 then waits for it
    for ever: the next tracer or debugger of the process hangs.
    """
    with suppress(error):
        raise_in_thread(threading.get_ident(), error)
        while True:  # it comes at once
            sleep(0)


def pool_processes(pool: Any) -> list[Any]:
    """Return the processes of a pool of multiprocessing."""
    return list(pool._pool)


def pool_recycles(pool: Any) -> bool:
    """Return whether a pool of multiprocessing replaces processes that have done their share."""
    return pool._maxtasksperchild is not None


def pool_is_open(pool: Any) -> bool:
    """Return whether a pool of multiprocessing still hands results over."""
    return bool(pool._result_handler.is_alive())


def executor_size(executor: Any) -> Any:
    """Return the workers of an executor at most; None where it does not say."""
    return getattr(executor, "_max_workers", None)


def executor_threads(executor: Any) -> list[Any]:
    """Return the threads of an executor; of one with processes, the thread that manages them."""
    manager = getattr(executor, "_executor_manager_thread", None)
    return list(getattr(executor, "_threads", None) or ([manager] if manager else []))
