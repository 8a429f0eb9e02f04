"""Order the work of a run on GPUs behind its caller's, and the caller's behind the run's.

1. Each stream of a run waits for the caller's current stream of *every* device, and for the
   streams that got earlier results. A task may read any array that it captures, on any device; the
   run does not know of such arrays.
2. The caller's current stream of *every* device waits for the results, wherever they lie.

"Every device" means each device on which this process has a context: the caller can have arrays on
no other.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from cupy.cuda import Device, Event

from .arrays import is_over
from .run_context import RunContext


@cache
def _context_state() -> Any:
    """The driver's function that says whether a device has a context; None without a driver."""
    try:
        return ctypes.CDLL("libcuda.so.1").cuDevicePrimaryCtxGetState
    except (OSError, AttributeError):
        return None


def has_context(device: int) -> bool:
    """Whether this process has a context on a device; makes none."""
    state = _context_state()
    if state is None:  # nobody to ask: it may have one
        return True
    flags, active = ctypes.c_uint(), ctypes.c_int()
    failed = state(device, ctypes.byref(flags), ctypes.byref(active))
    return not failed and bool(active.value)


class CallerOrder:
    """Orders a run's streams and threads behind the caller's, and the caller behind the run.

    It owns the events behind which the run begins, and makes the event behind which it ends.
    """

    def __init__(self, run: RunContext):
        self.run = run
        #: Pairs of device and event that the whole run is behind.
        self.before: list[tuple[int, Event]] = []

    def mark_callers(self) -> None:
        """Record events behind the caller's streams, and behind streams that got results.

        An idle stream needs no event.
        """
        hardware, out = self.run.hardware, self.before
        for device, current in hardware.callers_streams():
            lent = hardware.lent.get(device, {})
            for reader in {**lent, current.ptr: current}.values():
                with hardware.ignore_errors(device):
                    if not reader.done:
                        event = Event(disable_timing=True)
                        event.record(reader)
                        out.append((device, event))

    def order_behind_callers(self) -> None:
        """Order this run's streams behind the work that the caller has queued on any device.

        That work may still write captured arrays, or read the memory of earlier results.
        """
        for _, event in self.before:
            for lane in self.run.lanes:
                for stream in (lane.home, lane.incoming, lane.outgoing):
                    stream.wait_event(event)

    def order_thread_behind_callers(self) -> None:
        """Order this thread's current streams behind the caller's, like the run's streams."""
        hardware = self.run.hardware
        before = [event for _, event in self.before if not is_over(event)]
        if before:
            for device, current in hardware.callers_streams():
                with hardware.ignore_errors(device):
                    for event in before:
                        current.wait_event(event)

    def order_callers_behind(self) -> None:
        """Order the caller behind all queued work of this run, and later runs behind the caller.

        So the caller may write to the graph's arrays and reuse memory, as if the run were over.
        """
        hardware, events = self.run.hardware, []
        for lane in self.run.lanes:
            with Device(lane.device):
                for stream in (lane.home, lane.incoming):
                    event = lane.mark(stream)
                    if not event.done:
                        events.append(event)
        for device, current in hardware.callers_streams() if events else ():
            with hardware.ignore_errors(device):
                for event in events:
                    current.wait_event(event)
                hardware.lend(device, current)
