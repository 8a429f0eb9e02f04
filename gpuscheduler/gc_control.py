"""Keep Python's garbage collector from scanning large plans.

Planning makes many objects that live until the run is over, and each full collection scans all of
them.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

#: So many frozen objects are the interpreter's own: Python 3.12 freezes 375 as it starts.
STARTUP_FROZEN = 1000


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Planning makes many objects and no garbage: looking for some would take half of its time."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def garbage_spared() -> Iterator[None]:
    """What was put aside meanwhile in this thread comes back at the end."""
    _spared.depth += 1
    try:
        yield
    finally:
        _spared.depth -= 1
        if not _spared.depth:
            _spared.put_back()


class _FrozenGenerations(threading.local):
    """Objects that threads have frozen (`gc.freeze`).

    The collector has one frozen generation for all threads; objects that the user froze stay there.
    """

    threads = 0  # that have put something aside
    lock = threading.Lock()
    depth = 0  # of this thread
    mine = False  # whether this thread has put something aside

    def put_aside(self) -> None:
        if not self.depth:
            return
        with _FrozenGenerations.lock:
            if not self.mine and (
                _FrozenGenerations.threads or gc.get_freeze_count() <= STARTUP_FROZEN
            ):
                _FrozenGenerations.threads += 1
                self.mine = True
            if self.mine:
                gc.freeze()

    def put_back(self) -> None:
        if self.mine:
            with _FrozenGenerations.lock:
                self.mine = False
                _FrozenGenerations.threads -= 1
                if not _FrozenGenerations.threads:
                    gc.unfreeze()


_spared = _FrozenGenerations()


@contextmanager
def of_things_that_stay() -> Iterator[None]:
    """Move the objects that are made meanwhile to the oldest generation, uncollected.

    Use it for objects that stay, such as imported modules. The collector would scan all of them,
    and again at its next collections.
    """
    with without_garbage_collection(), garbage_spared():
        try:
            yield
        finally:
            put_aside()


def put_aside() -> None:
    """Spare all that there is now, until this thread leaves `garbage_spared`."""
    _spared.put_aside()


def _forget_after_fork() -> None:
    """A child process has none of its parent's threads."""
    if _FrozenGenerations.threads:
        gc.unfreeze()
    _FrozenGenerations.lock, _FrozenGenerations.threads, _spared.mine = threading.Lock(), 0, False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)
