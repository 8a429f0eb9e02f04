"""The file that Perfetto reads."""

from __future__ import annotations

import gzip
import json

import dask.array as da
import pytest

from gpuscheduler import Scheduler
from gpuscheduler.diagnostics.trace_json import Trace, trace_events
from gpuscheduler.plan.machine import DISK, HOST
from gpuscheduler.runtime.observe import CopyRow, MemorySample, Row


def row(label, begin, end, place=0, step=0):
    return Row(1, step, label, label, "", place, begin, begin, end, 8, "host")


def threads(path):
    """The steps of a file by process and thread, in the order of time."""
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    names = {(e["name"], e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M"}
    out = {}
    for e in sorted((e for e in events if e["ph"] == "X"), key=lambda e: e["ts"]):
        process = names["process_name", e["pid"], 0]
        out.setdefault((process, names["thread_name", e["pid"], e["tid"]]), []).append(e)
    return out


def test_steps_that_overlap_on_a_device_get_a_thread_of_their_own():
    rows = [row("a", 1000, 2000), row("read", 0, 3000)]
    events = trace_events({"here": Trace(rows)})
    named = [e["args"]["name"] for e in events if e["ph"] == "M"]
    assert named == ["here", "device 0", "device 0, too"]


def test_a_copy_has_an_arrow_from_the_step_that_made_its_value():
    copy = CopyRow(1, 7, "a", 0, 1, 2000, 4000, 8000, "device")
    spill = CopyRow(1, 7, "a", 1, HOST, 4000, 5000, 8000, "host")
    events = trace_events({"here": Trace([row("a", 0, 1000, step=7)], [copy, spill])})
    slices = [e for e in events if e["ph"] == "X"]
    assert [e["name"] for e in slices] == [
        "a", "a: device 0 → device 1", "a: device 1 → host",
    ]  # fmt: skip
    assert slices[1]["args"]["GB/s"] == 4.0
    start, finish = [e for e in events if e["ph"] in "sf" and e["id"] == 10_000_001]
    assert start["tid"] == slices[0]["tid"]
    assert slices[0]["ts"] <= start["ts"] <= slices[0]["ts"] + slices[0]["dur"]
    assert finish["tid"] == slices[1]["tid"]
    named = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert named[slices[1]["tid"]] == "device 1, copies in"
    assert named[slices[2]["tid"]] == "device 1, copies out"


def test_memory_is_a_counter_where_it_changes():
    used = [{0: 8, HOST: 0, DISK: 0}, {0: 8, HOST: 0, DISK: 0}, {0: 16, HOST: 0, DISK: 0}]
    memory = [MemorySample(1, 1000 * n, u) for n, u in enumerate(used)]
    events = trace_events({"here": Trace(memory=memory, limits={0: 100})})
    counters = [e for e in events if e["ph"] == "C" and e["name"] == "memory of device 0"]
    assert [(e["ts"], e["args"]) for e in counters] == [
        (0.0, {"bytes": 8, "limit": 100}), (2.0, {"bytes": 16, "limit": 100}),
    ]  # fmt: skip


def test_a_scheduler_writes_what_its_devices_did(tmp_path):
    path = tmp_path / "run.json"
    with Scheduler("cpu:2", timeline=True, fuse=False) as scheduler:
        da.ones((40, 10), chunks=10).sum().compute()
        scheduler.timeline(path)
        scheduler.timeline(tmp_path / "run.json.gz")
        rows = scheduler.rows()
    found = threads(path)
    devices = [name for _, name in found]
    assert {name.removesuffix(", too") for name in devices} == {"device 0", "device 1"}
    assert sum(map(len, found.values())) == len(rows) >= 5
    assert "sum (tree)" in {e["name"] for steps in found.values() for e in steps}
    for steps in found.values():
        for a, b in zip(steps, steps[1:], strict=False):
            assert a["ts"] + a["dur"] <= b["ts"] + 1e-6
    with gzip.open(tmp_path / "run.json.gz", "rt", encoding="utf-8") as file:
        assert json.load(file) == json.loads(path.read_text(encoding="utf-8"))


def test_nothing_is_kept_of_steps_unless_that_is_asked_for(tmp_path):
    with Scheduler("cpu:1") as scheduler:
        da.ones(10, chunks=5).sum().compute()
        with pytest.raises(RuntimeError, match="timeline=True"):
            scheduler.timeline(tmp_path / "run.json")
        assert not scheduler.recorder.rows()
        assert len(scheduler.recorder.runs) == 1
