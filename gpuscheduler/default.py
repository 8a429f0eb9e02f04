"""The scheduler in use: the innermost entered one, or this process's default."""

from __future__ import annotations

import atexit

from . import scheduler
from .devices.choose import cuda_devices
from .forks import new_rlock
from .scheduler import Scheduler

_default: Scheduler | None = None
_lock = new_rlock()


def current() -> Scheduler:
    """The innermost entered `Scheduler`, or this process's default, made at first use."""
    global _default
    if scheduler.active:
        return scheduler.active[-1]
    with _lock:
        if _default is not None and _default.hardware.trouble:  # the other devices go on
            _default.close()
        if _default is None or _default._closed:
            _default = Scheduler()
        return _default


def kind_in_use() -> str:
    """The kind of devices that `current` runs on, or would: "cpu" or "cuda"."""
    if scheduler.active:
        return scheduler.active[-1].hardware.kind
    return "cuda" if cuda_devices() else "cpu"


@atexit.register
def _close_default() -> None:
    if _default is not None:
        _default.close()
