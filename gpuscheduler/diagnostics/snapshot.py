"""Snapshots: what a scheduler does now, for other processes to read.

The live page, `gpuscheduler top` and Prometheus read them. One thread per process writes them,
twice a second, and only while somebody has asked within the latest seconds. They have names, sizes,
times and lines of source; no values.
"""

from __future__ import annotations

import json
import os
import threading
from collections import Counter, deque
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from time import time
from typing import Any
from weakref import ref

from ..forks import new_lock
from ..plan.machine import DISK, ENDLESS, HOST
from ..runtime.observe import Level, Note, Recorder, RunRecord
from .lanes import BINS, WINDOW, LaneReader
from .log import logger
from .progress import RunMeter
from .snapshot_file import (
    EVERY,
    HEADER,
    SIZE,
    VERSION,
    SnapshotError,
    SnapshotFile,
    make_folder,
    remove_stale,
)

#: Points of the history of memory.
HISTORY = 300
#: Notes, layers and runs of a snapshot, at most.
NOTES, LAYERS, RUNS = 50, 20, 16


@dataclass(frozen=True)
class SchedulerFacts:
    """What snapshots and metrics see of a `Scheduler`, which they do not keep alive."""

    scheduler: ref[Any]
    #: Its number in this process.
    number: int
    #: Where its runs are recorded.
    recorder: Recorder

    @classmethod
    def from_scheduler(cls, scheduler: Any) -> SchedulerFacts:
        """The facts of a scheduler."""
        return cls(ref(scheduler), scheduler.number, scheduler.recorder)

    def device_facts(self) -> dict[str, Any]:
        """Its kind, machine, names of devices, persisted bytes by place, and sensors."""
        scheduler = self.scheduler()
        if scheduler is None or scheduler._closed:
            raise RuntimeError("the scheduler is closed")
        hardware = scheduler.hardware
        nvml = getattr(hardware, "nvml", None)
        return {
            "kind": hardware.kind, "machine": hardware.machine, "names": hardware.names,
            "persisted": scheduler._summary().persisted_bytes,
            "sensors": [] if nvml is None else [s._asdict() for s in nvml.sensors()],
        }  # fmt: skip


# ---- what is in a snapshot


class SnapshotTaker:
    """Takes the snapshots of one scheduler, one after the other."""

    def __init__(self, observed: SchedulerFacts, program: str):
        self.observed, self.program = observed, program
        self.lanes = LaneReader(observed.recorder)
        self.history: deque[tuple[float, dict[int, int]]] = deque(maxlen=HISTORY)
        self._moved: dict[str, int] = {}
        self._meters: dict[int, RunMeter] = {}  # of the runs under way
        self._when = 0

    def take(self) -> dict[str, Any]:
        """What the scheduler does now, as JSON can hold it."""
        recorder = self.observed.recorder
        now = recorder.clock()
        self.lanes.read()
        facts = self.observed.device_facts()
        running = list(recorder.running.copy().values())
        used, limits = _bytes_in_use(facts, running)
        for place, peak in self.lanes.peaks.items():
            used["most"][place] = max(used["most"].get(place, 0), peak)
        when = (now + recorder.epoch) / 1e9
        self.history.append((round(when, 2), dict(used["most"])))
        for then, earlier in self.history:
            if when - then <= WINDOW:
                for place, nbytes in earlier.items():
                    used["peak"][place] = max(used["peak"].get(place, 0), nbytes)
        moved = _moved_bytes(recorder, running)
        seconds = (now - self._when) / 1e9 if self._when else 0.0
        rates = {k: (n - self._moved.get(k, 0)) / seconds for k, n in moved.items() if seconds}
        self._moved, self._when = moved, now
        self._meters = {r.number: self._meters.get(r.number) or RunMeter(r) for r in running}
        left: Counter[str] = Counter()
        for meter in self._meters.values():
            left.update({layer.name: layer.left for layer in meter.layers()})
        return {
            "version": VERSION, "pid": os.getpid(), "program": self.program,
            "scheduler": self.observed.number, "time": when,
            "kind": facts["kind"],
            "devices": _devices(facts, used, limits, self.lanes.busy_parts(now)),
            "memories": {str(p): {"used": used["values"].get(p, 0), "limit": limits.get(p)}
                         for p in (*limits, HOST, DISK)},
            "runs": [_run(r) for r in running[:RUNS]], "more_runs": max(0, len(running) - RUNS),
            "last": _run(recorder.runs[-1]) if recorder.runs else None,
            "totals": [[*map(str, k), v] for k, v in recorder.totals.items()],
            "links": [[*map(int, k.split(",")), n, rates.get(k, 0.0)] for k, n in moved.items()],
            "layers": [
                {"label": t.label, "line": t.line, "seconds": round(t.seconds, 4),
                 "steps": t.steps, "left": left[t.label]} for t in self.lanes.totals(LAYERS)
            ],
            "lanes": {"window": WINDOW, "bins": BINS, "bars": {
                str(p): [[b.first, b.bins, b.label, b.busy] for b in bars]
                for p, bars in self.lanes.bars(now).items()
            }},
            "memory": {
                "times": [t for t, _ in self.history],
                "places": {str(p): [h.get(p, 0) for _, h in self.history]
                           for p in sorted({p for _, h in self.history for p in h}, reverse=True)},
            },
            "notes": [_note(n, recorder) for n in list(recorder.notes)[-NOTES:]],
        }  # fmt: skip

    def encode(self) -> bytes:
        """A snapshot as bytes that fit the file: what is long and old is left out first."""
        found = self.take()
        for cut in (None, "notes", "lanes", "memory"):
            if cut == "lanes":
                found["lanes"]["bars"] = {}
            elif cut is not None:
                found[cut] = type(found[cut])()
            text = json.dumps(found, separators=(",", ":")).encode()
            if len(text) <= SIZE - HEADER.size:
                return text
        raise ValueError("a snapshot is too long")


def summarize_devices(observed: SchedulerFacts) -> dict[str, Any]:
    """The devices of a scheduler and how much is left of its runs: what a heartbeat can carry.

    A device is busy where a step is under way on it at this moment.
    """
    facts, recorder = observed.device_facts(), observed.recorder
    running = list(recorder.running.copy().values())
    used, limits = _bytes_in_use(facts, running)
    busy = {
        device: 1.0
        for record in running
        if record.state is not None
        for device, count in dict(record.state.busy).items()
        if count
    }
    ended = sum(n for key, n in list(recorder.totals.items()) if key[0] == "runs")
    return {
        "devices": [d | {"momentary": True} for d in _devices(facts, used, limits, busy)],
        "runs": len(running),
        "left": sum(record.steps_left for record in running), "ended": ended,
    }  # fmt: skip


def _bytes_in_use(
    facts: dict[str, Any], running: list[RunRecord]
) -> tuple[dict[str, dict[int, int]], dict[int, int]]:
    """Bytes by memory: of values now and at most, working memory, persisted; and the limits."""
    machine, persisted = facts["machine"], facts["persisted"]
    limits = {m: machine.limit(m) for m in machine.memories}
    if machine.host_memory < ENDLESS:
        limits[HOST] = machine.host_memory
    values = {machine.memory_of(p) if p >= 0 else p: 0 for p in (*machine.devices, HOST, DISK)}
    kept: dict[int, int] = dict.fromkeys(values, 0)
    for place, nbytes in persisted.items():
        memory = machine.memory_of(place) if place in machine.devices else place
        kept[memory] = kept.get(memory, 0) + nbytes
    working: dict[int, int] = dict.fromkeys(values, 0)
    more: dict[int, int] = dict.fromkeys(values, 0)  # beside what is persisted
    peak: dict[int, int] = dict.fromkeys(values, 0)
    for record in running:
        if record.is_host:
            continue
        state, tape = record.state, record.tape
        if state is not None:
            for place, nbytes in dict(state.used).items():
                more[place] = more.get(place, 0) + max(0, nbytes - kept.get(place, 0))
            for place, nbytes in dict(state.peak).items():
                peak[place] = max(peak.get(place, 0), nbytes)
            for device, steps in dict(state.work).items():
                memory = machine.memory_of(device)
                working[memory] = working.get(memory, 0) + sum(dict(steps).values())
        elif tape is not None:
            for place, nbytes in tape.peak.items():
                more[place] = more.get(place, 0) + nbytes
    values = {place: kept.get(place, 0) + more.get(place, 0) for place in {*values, *more}}
    peak = {place: max(n, values.get(place, 0)) for place, n in peak.items()}
    found = {"values": values, "most": dict(values), "peak": peak, "working": working}
    return found | {"persisted": kept}, limits


def _devices(
    facts: dict[str, Any],
    used: dict[str, dict[int, int]],
    limits: dict[int, int],
    busy: dict[int, float],
) -> list[dict[str, Any]]:
    machine, out = facts["machine"], []
    for device in machine.devices:
        memory = machine.memory_of(device)
        sensors = facts["sensors"][device] if facts["sensors"] else {}
        out.append({
            "device": device, "name": facts["names"][device], "memory": memory,
            "busy": round(busy.get(device, 0.0), 3), "limit": limits[memory],
            **{k: used[k].get(memory, 0) for k in ("values", "peak", "working", "persisted")},
            "sensors": sensors,
        })  # fmt: skip
    return out


def _moved_bytes(recorder: Recorder, running: list[RunRecord]) -> dict[str, int]:
    """Bytes over each link so far, by "src,dst"."""
    out: dict[str, int] = {}
    for key, nbytes in list(recorder.totals.items()):
        if key[0] == "moved":
            out[f"{key[1]},{key[2]}"] = nbytes
    for record in running:
        state = record.state
        for (src, dst), nbytes in dict(state.traffic).items() if state is not None else ():
            name = f"{src},{dst}"
            out[name] = out.get(name, 0) + nbytes
    return out


def _run(record: RunRecord) -> dict[str, Any]:
    return {
        "number": record.number, "how": record.how or "planning", "steps": record.steps,
        "left": record.steps_left, "seconds": round(record.seconds, 3), "where": record.where,
        "waits": bool(record.planned_ns and not record.admitted and not record.is_over),
        "error": record.error,
    }  # fmt: skip


def _note(note: Note, recorder: Recorder) -> dict[str, Any]:
    when = round((note.ns + recorder.epoch) / 1e9, 2)
    return {"time": when, "text": f"{note.kind}: {note.text}"[:200]}


# ---- the thread that writes


class Sampler:
    """The thread of a process that writes snapshots of its schedulers."""

    def __init__(self, every: float = EVERY):
        self.every = every
        self._lock = new_lock()
        self._inbox: SimpleQueue[int | None] = SimpleQueue()
        self._files: dict[int, tuple[SnapshotFile, SnapshotTaker, Any]] = {}
        self._levels: dict[int, int] = {}
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    def add(self, observed: SchedulerFacts, program: str) -> Path:
        """Write snapshots of a scheduler from now on; returns the path of the file."""
        folder = make_folder()
        remove_stale(folder)
        path = folder / f"{os.getpid()}-{observed.number}"
        try:
            file = SnapshotFile(path)
        except OSError as error:
            raise SnapshotError(f"no snapshots of the scheduler: {error}") from error
        with self._lock:
            if self._pid != os.getpid():  # the parent's
                self._files, self._levels, self._thread = {}, {}, None
                self._pid = os.getpid()
            self._files[observed.number] = file, SnapshotTaker(observed, program), observed
            if self._thread is None:
                self._inbox = SimpleQueue()
                self._thread = threading.Thread(
                    target=self._work, args=(self._inbox,),
                    name="gpuscheduler-snapshots", daemon=True,
                )  # fmt: skip
                self._thread.start()
        return path

    def remove(self, number: int) -> None:
        """Write no more snapshots of a scheduler, and remove its file."""
        with self._lock:
            thread = self._drop(number)
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def remove_later(self, number: int) -> None:
        """Have the thread remove a scheduler's file; takes no lock.

        Collecting garbage calls this in any thread, whatever locks it holds: the sampler's too.
        """
        if self._pid == os.getpid():
            self._inbox.put(number)

    def _drop(self, number: int) -> threading.Thread | None:
        """Remove a scheduler's file; returns the thread where it has nothing more to write."""
        if self._pid != os.getpid():
            return None
        found = self._files.pop(number, None)
        if found is not None:
            file, _, observed = found
            self._lower(number, observed)
            file.close()
        thread = self._thread if not self._files else None
        if thread is not None:
            self._thread = None
            self._inbox.put(None)
        return thread

    def _work(self, inbox: SimpleQueue[int | None]) -> None:
        """Write snapshots until the inbox says None; a number in it is a scheduler that is gone."""
        while True:
            try:
                gone = inbox.get(timeout=self.every)
            except Empty:
                with self._lock:
                    self.write_watched()
                continue
            if gone is None:
                return
            with self._lock:
                self._drop(gone)

    def write_watched(self) -> None:
        """Write the snapshots that somebody looks at; of others nothing is recorded."""
        for number, (file, taker, observed) in self._files.items():
            try:
                if not file.is_watched(time()):
                    self._lower(number, observed)
                    continue
                if number not in self._levels:
                    self._levels[number] = observed.recorder.raise_level(Level.STEPS)
                file.write(taker.encode())
            except Exception:  # a page must not harm what it shows
                if number not in _complained:
                    _complained.add(number)
                    logger("dashboard").warning("a snapshot was not written", exc_info=True)

    def _lower(self, number: int, observed: Any) -> None:
        token = self._levels.pop(number, None)
        if token is not None:
            observed.recorder.lower_level(token)


_complained: set[int] = set()
#: The sampler of this process.
sampler = Sampler()
