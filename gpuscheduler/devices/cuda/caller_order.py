"""Order the work of a run on GPUs behind its caller's, and the caller's behind the run's.

1. Each stream of a run is behind all that the caller has queued on her current stream of *any*
   device, and behind the streams that were given earlier results. A task may read any array that
   it has around it, on whichever device that lies: the run does not know of these.
2. The caller's current stream of *every* device is behind what she is given, wherever that lies.

"Any device" is any on which this process has a context: the caller can have arrays on those alone.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from cupy.cuda import Device, Event

from .arrays import (
    is_over,
)
from .gpu_run import GpuRun


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


def mark_callers(run: GpuRun) -> list[tuple[int, Event]]:
    """Events behind the caller's stream on each device in use, and behind those that got
    results there; a stream that has nothing to do any more needs none."""
    out = []
    for device, current in run.hardware.callers():
        lent = run.hardware.lent.get(device, {})
        for reader in {**lent, current.ptr: current}.values():
            with run.hardware.excused(device):
                if not reader.done:
                    event = Event(disable_timing=True)
                    event.record(reader)
                    out.append((device, event))
    return out


def order_behind_callers(run: GpuRun) -> None:
    """Order this run behind what the caller has queued on any device: arrays that tasks have
    around them may be in the making, and memory of earlier results may be in use."""
    for _, event in run.before:
        for lane in run.lanes:
            for stream in (lane.home, lane.incoming, lane.outgoing):
                stream.wait_event(event)


def order_thread_behind_callers(run: GpuRun) -> None:
    """Order what this thread queues as the run's own streams are: it has other ones."""
    before = [event for _, event in run.before if not is_over(event)]
    if before:
        for device, current in run.hardware.callers():
            with run.hardware.excused(device):
                for event in before:
                    current.wait_event(event)


def order_callers_behind(run: GpuRun) -> None:
    """Order the caller behind all that this run has queued, and later runs behind the caller:
    the graph's arrays may be written to, and memory may be used again, as if it were over."""
    events = []
    for lane in run.lanes:
        with Device(lane.device):
            for stream in (lane.home, lane.incoming):
                event = lane.mark(stream)
                if not event.done:
                    events.append(event)
    for device, current in run.hardware.callers() if events else ():
        with run.hardware.excused(device):
            for event in events:
                current.wait_event(event)
            run.hardware.lend(device, current)
