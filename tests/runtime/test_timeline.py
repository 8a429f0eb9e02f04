"""When steps ran, as rows, and as the file that Perfetto reads."""

from __future__ import annotations

import json
from types import SimpleNamespace

import dask.array as da
import pytest

from gpuscheduler import Scheduler
from gpuscheduler.runtime.timeline import TimelineRecorder, TimelineRow, trace_events


def recorded(steps, happened):
    """The rows of what happened, an event a second."""
    rows, seconds = [], iter(range(100))
    recorder = TimelineRecorder(
        SimpleNamespace(steps=steps), rows, clock=lambda: float(next(seconds))
    )
    for what, step in happened:
        getattr(recorder, what)(step)
    return rows


def step(key, place=0, aside=False):
    return SimpleNamespace(key=key, place=place, aside=aside)


def test_a_step_begins_when_the_one_before_it_on_its_device_is_done():
    """a and b wait on device 0, c is alone on device 1."""
    happened = [("launched", 0), ("launched", 1), ("launched", 2)]
    happened += [("done", 0), ("done", 2), ("done", 1)]
    assert recorded([step("a"), step("b"), step("c", 1)], happened) == [
        TimelineRow("a", 0, 0.0, 3.0),
        TimelineRow("c", 1, 2.0, 4.0),
        TimelineRow("b", 0, 3.0, 5.0),
    ]


def test_what_reads_files_goes_on_beside_its_device():
    happened = [("launched", 0), ("launched", 1), ("done", 1), ("done", 0)]
    rows = recorded([step("read", aside=True), step("a")], happened)
    assert rows == [TimelineRow("a", 0, 1.0, 2.0), TimelineRow("read", 0, 0.0, 3.0)]
    named = [e["args"]["name"] for e in trace_events({"here": rows}) if e["ph"] == "M"]
    assert named == ["here", "device 0", "device 0, too"]


def threads(path):
    """The steps of a file by process and thread, in the order of time."""
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    names = {(e["name"], e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M"}
    out = {}
    for e in sorted((e for e in events if e["ph"] == "X"), key=lambda e: e["ts"]):
        process = names["process_name", e["pid"], 0]
        out.setdefault((process, names["thread_name", e["pid"], e["tid"]]), []).append(e)
    return out


def test_a_scheduler_writes_what_its_devices_did(tmp_path):
    path = tmp_path / "run.json"
    with Scheduler("cpu:2", timeline=True, fuse=False) as scheduler:
        da.ones((40, 10), chunks=10).sum().compute()
        scheduler.timeline(path)
        rows = scheduler.rows()
    found = threads(path)
    assert list(found) == [("gpuscheduler", f"device {d}") for d in (0, 1)]
    assert sum(map(len, found.values())) == len(rows) >= 5
    assert "sum" in {e["name"] for steps in found.values() for e in steps}
    for steps in found.values():
        for a, b in zip(steps, steps[1:], strict=False):
            assert a["ts"] + a["dur"] <= b["ts"] + 1e-6


def test_nothing_is_kept_unless_that_is_asked_for(tmp_path):
    with Scheduler("cpu:1") as scheduler:
        da.ones(10, chunks=5).sum().compute()
        with pytest.raises(RuntimeError, match="timeline=True"):
            scheduler.timeline(tmp_path / "run.json")
        assert not scheduler._rows
