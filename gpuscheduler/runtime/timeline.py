"""Record when and where steps ran, as a file for Perfetto.

Times are those at which a run's loop hears of steps: about half a millisecond late. A step begins
when it is handed to its device, or when the one before it there is done.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, MutableSequence
from os import PathLike
from time import time
from typing import Any, NamedTuple

from dask.utils import key_split

from ..plan.plan import Plan
from .protocol import StepWatcher

#: Rows that a scheduler keeps: the latest.
LATEST = 2**18


class TimelineRow(NamedTuple):
    """A step that has run."""

    key: Any
    place: int  # a device, or `HOST`
    begin: float  # seconds since 1970
    end: float

    def later(self, seconds: float) -> TimelineRow:
        return self._replace(begin=self.begin + seconds, end=self.end + seconds)


class TimelineRecorder(StepWatcher):
    """Makes a row of each step of a run, and passes on what it is told."""

    def __init__(
        self,
        plan: Plan,
        rows: MutableSequence[TimelineRow],
        told: StepWatcher | None = None,
        clock: Callable[[], float] = time,
        place: int | None = None,  # of all of them, where these are no devices of the scheduler's
    ):
        self.place = place
        self.steps, self.rows, self.clock = plan.steps, rows, clock
        self.told = told or StepWatcher()
        self.begun: dict[int, float] = {}
        self.free: dict[int, float] = {}  # when the latest step of each device was done

    def launched(self, step: int) -> None:
        self.begun[step] = self.clock()
        self.told.launched(step)

    def done(self, step: int) -> None:
        s, begin, end = self.steps[step], self.begun[step], self.clock()
        if not s.aside:
            begin = max(begin, self.free.get(s.place, begin))
            self.free[s.place] = end
        self.rows.append(
            TimelineRow(s.key, s.place if self.place is None else self.place, begin, end)
        )
        self.told.done(step)


def write(path: str | PathLike[str], processes: Mapping[str, Iterable[TimelineRow]]) -> None:
    """Write rows, by the name of their process, as JSON for Perfetto."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"traceEvents": trace_events(processes)}, file)


def trace_events(processes: Mapping[str, Iterable[TimelineRow]]) -> list[dict[str, Any]]:
    """A thread for each device, and more where steps ran at the same time.

    >>> for event in trace_events({"here": [TimelineRow(("x", 0), 1, 5.0, 5.5)]}):
    ...     print(event["ph"], event["name"], event["args"], event.get("ts"), event.get("dur"))
    M process_name {'name': 'here'} None None
    M thread_name {'name': 'device 1'} None None
    X x {'key': "('x', 0)"} 0.0 500000.0
    """
    rows = {name: sorted(found, key=lambda r: r.begin) for name, found in processes.items()}
    first = min((found[0].begin for found in rows.values() if found), default=0.0)
    events: list[dict[str, Any]] = []
    for pid, (process, found) in enumerate(rows.items(), 1):
        events.append(_name_event("process", process, pid))
        ends: dict[int, list[float]] = {}  # by device: when the last row of each thread ends
        for key, place, begin, end in found:
            threads = ends.setdefault(place, [])
            n = next((n for n, free in enumerate(threads) if free <= begin), len(threads))
            thread = {"pid": pid, "tid": 1 + place + 1000 * n}
            if n == len(threads):
                name = f"device {place}" if place >= 0 else "the host"
                events.append(_name_event("thread", f"{name}{', too' * (n > 0)}", **thread))
            threads[n : n + 1] = [end]
            times = {"ts": (begin - first) * 1e6, "dur": (end - begin) * 1e6}
            step = {"ph": "X", "name": key_split(key), "args": {"key": str(key)}}
            events.append({**step, **thread, **times})
    return events


def _name_event(what: str, name: str, pid: int, tid: int = 0) -> dict[str, Any]:
    return {"ph": "M", "name": f"{what}_name", "pid": pid, "tid": tid, "args": {"name": name}}
