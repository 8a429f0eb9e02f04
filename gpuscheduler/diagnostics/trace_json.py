"""When steps and copies ran, as a file for Perfetto (https://ui.perfetto.dev).

A process is a worker. Its threads are devices and what is copied to each; steps that overlap get
threads of their own, since slices of one thread must nest. Counters are bytes in each memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import Any

from ..plan.machine import place_name
from ..runtime.observe import CopyRow, MemorySample, Row, RunRecord, decode_memory, decode_run
from .text import write_text

#: Arrows from steps to copies of their values, at most.
MOST_FLOWS = 50_000
#: Numbers of threads: those of copies come after those of devices, and overflow after these.
_COPIES, _NEXT = 10_000, 100_000


@dataclass(slots=True)
class Trace:
    """What one process did; times are ns of the clock of its recorder."""

    rows: list[Row] = field(default_factory=list)
    copies: list[CopyRow] = field(default_factory=list)
    memory: list[MemorySample] = field(default_factory=list)
    #: Bytes that each place may hold.
    limits: dict[int, int] = field(default_factory=dict)
    #: ns to add for times since 1970.
    epoch: int = 0

    @property
    def begin(self) -> int | None:
        """When the first of it began, in ns since 1970; None for nothing."""
        begins = [r.begin for r in self.rows] + [c.begin for c in self.copies]
        first = min(begins + [s.ns for s in self.memory], default=None)
        return None if first is None else first + self.epoch

    def shift_clock(self, ns: int) -> Trace:
        """The same of a process whose clock is behind."""
        return replace(self, epoch=self.epoch + ns)


def take_trace(records: Iterable[RunRecord], limits: Mapping[int, int], epoch: int = 0) -> Trace:
    """What these runs did."""
    out = Trace(limits=dict(limits), epoch=epoch)
    for record in records:
        rows, copies = decode_run(record)
        out.rows += rows
        out.copies += copies
        out.memory += decode_memory(record)
    return out


def write_trace(path: str | PathLike[str], processes: Mapping[str, Trace]) -> None:
    """Write traces, by the name of their process; a path that ends in ``.gz`` is compressed."""
    events = trace_events(processes)
    write_text(path, json.dumps({"traceEvents": events}, ensure_ascii=False))


def trace_events(processes: Mapping[str, Trace]) -> list[dict[str, Any]]:
    """The events of the file, in microseconds since the first.

    >>> row = Row(1, 0, ("x", 0), "exp", "wave.py:3", 1, 0, 0, 500, 8, "host")
    >>> for event in trace_events({"here": Trace([row])}):
    ...     print(event["ph"], event["name"], event.get("dur"))
    M process_name None
    M thread_name None
    X exp 0.5
    """
    begins = [trace.begin for trace in processes.values()]
    first = min([begin for begin in begins if begin is not None], default=0)
    events: list[dict[str, Any]] = []
    for pid, (process, trace) in enumerate(processes.items(), 1):
        events.append(_name_event("process", process, pid))
        writer = _ProcessWriter(pid, first - trace.epoch, events)
        made = writer.add_steps(trace.rows)
        writer.add_copies(trace.copies, made)
        writer.add_memory(trace)
    return events


class _ProcessWriter:
    """Adds the events of one process."""

    def __init__(self, pid: int, first: int, events: list[dict[str, Any]]):
        self.pid, self.first, self.events = pid, first, events
        #: By track: when the last slice of each thread ends.
        self.end_times: dict[int, list[int]] = {}
        self.flows = 0

    def add_steps(self, rows: Iterable[Row]) -> dict[tuple[int, int], tuple[dict[str, Any], int]]:
        """Add steps; returns the thread and the end of each, by run and step."""
        made = {}
        for row in sorted(rows, key=lambda r: r.begin):
            thread = self._thread(1 + row.place, row.begin, row.end, place_name(row.place))
            facts = {"key": str(row.key), "line": row.line, "bytes": row.nbytes}
            facts |= {"run": row.run, "clock": row.clock}
            self._slice(row.label, row.begin, row.end, thread, facts)
            made[row.run, row.step] = thread, max(row.begin, row.end - 1)
        return made

    def add_copies(
        self, rows: Iterable[CopyRow], made: Mapping[tuple[int, int], tuple[dict[str, Any], int]]
    ) -> None:
        """Add copies, each with an arrow from the step that made its value."""
        for row in sorted(rows, key=lambda r: r.begin):
            into = row.dst >= 0
            place = row.dst if into else row.src
            name = f"{place_name(place)}, copies {'in' if into else 'out'}"
            track = _COPIES + 2 * place + into
            thread = self._thread(track, row.begin, row.end, name)
            rate = row.nbytes / max(row.end - row.begin, 1)
            facts = {"bytes": row.nbytes, "GB/s": round(rate, 3), "clock": row.clock}
            link = f"{place_name(row.src)} → {place_name(row.dst)}"
            self._slice(f"{row.label}: {link}", row.begin, row.end, thread, facts)
            if (row.run, row.step) in made and self.flows < MOST_FLOWS:
                self.flows += 1
                source, at = made[row.run, row.step]
                flow = {"name": "value", "cat": "value", "id": self.pid * 10**7 + self.flows}
                self.events.append({"ph": "s", "ts": self._microseconds(at), **source, **flow})
                self.events.append(
                    {"ph": "f", "bp": "e", "ts": self._microseconds(row.begin), **thread, **flow}
                )

    def add_memory(self, trace: Trace) -> None:
        """Add bytes in each place over time, where they change."""
        latest: dict[int, int] = {}
        for sample in trace.memory:
            for place, used in sample.used.items():
                if latest.get(place) == used:
                    continue
                latest[place] = used
                args = {"bytes": used}
                if place >= 0 and place in trace.limits:
                    args["limit"] = trace.limits[place]
                name = f"memory of {place_name(place)}"
                counter = {"ph": "C", "name": name, "pid": self.pid, "tid": 0}
                self.events.append({**counter, "ts": self._microseconds(sample.ns), "args": args})

    def _thread(self, track: int, begin: int, end: int, name: str) -> dict[str, Any]:
        """The first thread of a track that is free from `begin` to `end`."""
        threads = self.end_times.setdefault(track, [])
        n = next((n for n, free in enumerate(threads) if free <= begin), len(threads))
        thread = {"pid": self.pid, "tid": track + _NEXT * n}
        if n == len(threads):
            self.events.append(_name_event("thread", f"{name}{', too' * (n > 0)}", **thread))
        threads[n : n + 1] = [end]
        return thread

    def _slice(
        self, name: str, begin: int, end: int, thread: dict[str, Any], facts: dict[str, Any]
    ) -> None:
        times = {"ts": self._microseconds(begin), "dur": (end - begin) / 1e3}
        self.events.append({"ph": "X", "name": name, "args": facts, **thread, **times})

    def _microseconds(self, ns: int) -> float:
        return (ns - self.first) / 1e3


def _name_event(what: str, name: str, pid: int, tid: int = 0) -> dict[str, Any]:
    return {"ph": "M", "name": f"{what}_name", "pid": pid, "tid": tid, "args": {"name": name}}
