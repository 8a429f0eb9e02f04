"""The scheduler in use: the innermost entered one, or this process's default."""

from __future__ import annotations

import atexit
from collections.abc import Mapping
from os import PathLike
from typing import Any

from . import scheduler
from .devices.choose import cuda_devices
from .diagnostics.report import Report
from .forks import new_rlock
from .scheduler import Scheduler

_default: Scheduler | None = None
_lock = new_rlock()


def current_scheduler() -> Scheduler:
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
    """Return the kind of devices that `current_scheduler` uses, "cpu" or "cuda"."""
    if scheduler.active:
        return scheduler.active[-1].hardware.kind
    return "cuda" if cuda_devices() else "cpu"


@atexit.register
def _close_default() -> None:
    if _default is not None:
        _default.close()


def report(
    path: str | PathLike[str],
    level: str = "device",
    *,
    scheduler: Scheduler | None = None,
    code: bool = True,
    timeline: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> Report:
    """Write a report of what runs in a `with` block, as one HTML file that loads nothing.

    It answers which layer takes the time, which device waits, and whether memory is short: devices
    and memory over time, copies, layers with their costs, why they are not fused, and advice.

    Parameters
    ----------
    path
        Where the file is written; also a URL that fsspec knows.
    level
        What is recorded, as for `Scheduler.record`.
    scheduler
        Whose runs; default: the innermost entered scheduler.
    code
        Whether the source of the calling function is shown.
    timeline
        Also write a file for Perfetto beside it: ``run.json.gz`` for ``run.html``.
    storage_options
        Options for fsspec.

    The report is written also where the block raises, with the error on top. Where it cannot be
    written, a warning says so.

    >>> import tempfile, os, dask.array as da
    >>> path = os.path.join(tempfile.mkdtemp(), "run.html")
    >>> with Scheduler("cpu:2"), report(path) as recording:
    ...     _ = da.ones(100, chunks=50).sum().compute()
    >>> os.path.getsize(path) < 300_000
    True
    """
    recording = (scheduler or current_scheduler()).record(level)
    return Report(path, recording, code, timeline, storage_options)
