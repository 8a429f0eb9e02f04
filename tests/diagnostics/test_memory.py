"""What fills memory: at the peak of a run, and for as long as somebody holds a collection."""

from __future__ import annotations

import itertools

import dask.array as da
import pytest
from hypothesis import given

from gpuscheduler import Scheduler
from gpuscheduler.diagnostics.memory import _find_peaks, profile_memory
from gpuscheduler.runtime.loop import run
from gpuscheduler.runtime.observe import Level, Recorder, decode_memory
from gpuscheduler.runtime.simulated import InOrderDevices
from gpuscheduler.runtime.tape import record_tape
from tests.support.strategies import cases, plan_of, thorough

PLENTY = (10**9, 10**9)


def recorded(plan, devices, **options):
    record = Recorder(itertools.count(1000).__next__, base=Level.STEPS).begin()
    record.enter(plan, "steps")
    run(plan, devices, record=record, **options)
    record.recorder.end(record)
    return record


def plan_with_a_peak():
    """a and b are there when c is made; a goes with it, b only with d."""
    return plan_of(
        ("a", "", 0, 100), ("b", "", 0, 30), ("c", "a", 0, 50), ("d", "bc", 0, 10), memory=PLENTY
    )


def test_the_peak_says_what_was_there_and_until_when():
    plan = plan_with_a_peak()
    sizes = {0: 100, 1: 30, 2: 50, 3: 10}
    record = recorded(plan, InOrderDevices(plan, sizes), window=1, deep_window=1)
    peak = profile_memory([record], by="task").peaks[0]
    assert peak.nbytes == 180
    assert {r.name: r.nbytes for r in peak.rows} == {"a": 100, "b": 30, "c": 50}
    assert peak.rows[0].name == "a"
    text = str(profile_memory([record]))
    assert "peak on device 0" in text
    assert "needed until mix" in text


def test_a_tape_needs_no_sampling():
    """d runs on the other device: there is its value, and a copy of c."""
    plan = plan_of(
        ("a", "", 0, 100), ("c", "a", 0, 50), ("d", "c", 1, 10), memory=PLENTY
    )  # fmt: skip
    record = Recorder(itertools.count(1000).__next__, base=Level.STEPS).begin()
    record.enter(plan, "replay")
    record.tape, record.admitted, record.queued = record_tape(plan), 0, 1000
    record.recorder.end(record)
    profile = profile_memory([record], by="task")
    assert [p.nbytes for p in profile.peaks] == [150, 60]
    assert {r.name for r in profile.peaks[1].rows} == {"c", "d"}


@pytest.mark.parametrize(("by", "names"), [
    ("layer", {"mix"}), ("task", {"a", "b", "c"}), ("line", {"unknown line"}),
    ("device", {"device 0"}),
])  # fmt: skip
def test_rows_may_be_grouped(by, names):
    plan = plan_with_a_peak()
    devices = InOrderDevices(plan, {0: 100, 1: 30, 2: 50, 3: 10})
    record = recorded(plan, devices, window=1, deep_window=1)
    peak = profile_memory([record], by).peaks[0]
    assert {r.name for r in peak.rows} <= names
    assert sum(r.nbytes for r in peak.rows) == peak.nbytes


def test_another_grouping_is_refused():
    plan = plan_with_a_peak()
    record = recorded(plan, InOrderDevices(plan))
    with pytest.raises(ValueError, match="'layer', 'line', 'task', 'device'"):
        profile_memory([record], "colour")
    with pytest.raises(RuntimeError, match="no memory was recorded"):
        profile_memory([])


@thorough
@given(cases(persisted=False))
def test_values_at_the_peak_are_at_most_what_the_run_counted(case):
    """Reserved room counts in the run before there is a value in it."""
    plan = case.plan
    record = Recorder(itertools.count(1000).__next__, base=Level.STEPS).begin()
    record.enter(plan, "steps")
    devices = case.devices()
    state = run(plan, devices, None, case.window, case.deep_window, case.ahead, record=record)
    record.recorder.end(record)
    for memory, found in _find_peaks(record).items():
        assert found.values <= state.peak[memory]
    for peak in profile_memory([record], "task").peaks:
        assert sum(r.nbytes for r in peak.rows if r.what == "values") == peak.nbytes
    assert all(used >= 0 for s in decode_memory(record) for used in s.used.values())


def test_working_memory_that_was_seen_is_part_of_the_peak():
    plan = plan_with_a_peak()
    plan.history.extra[plan.steps[2].kind] = 5000
    record = recorded(
        plan, InOrderDevices(plan, {0: 100, 1: 30, 2: 50, 3: 10}), window=1, deep_window=1
    )
    (row,) = [r for r in profile_memory([record]).peaks[0].rows if r.what == "working memory"]
    assert row.nbytes == 5000


def test_a_recording_has_a_profile_with_lines():
    with Scheduler("cpu:2", fuse=False) as scheduler, scheduler.record("steps") as recording:
        x = da.ones((400, 400), chunks=200) + 1
        (x + x.T).sum().compute()
    profile = recording.memory("line")
    (peak,) = profile.peaks
    assert peak.name == "the host, for all devices"
    assert peak.nbytes >= 200 * 200 * 8
    assert any("test_memory.py:" in r.name for r in peak.rows)
    assert profile.to_dict()["peaks"][0]["nbytes"] == peak.nbytes
    assert "<pre>" in profile._repr_html_()


# ---- what is persisted


def test_held_says_what_is_persisted_where_and_since_when():
    with Scheduler("cpu:2") as scheduler:
        assert str(scheduler.held()) == "nothing is persisted"
        x = (da.ones((100, 100), chunks=50) + 1).persist()
        (row,) = scheduler.held().rows
        assert (row.name, row.blocks, row.nbytes) == ("add", 4, 80_000)
        assert row.layer == x.name
        assert "test_memory.py:" in row.line
        assert row.run == scheduler.recorder.runs[-1].number
        assert row.age >= 0
        assert "made in run" in str(scheduler.held())
        del x
        assert scheduler.held().nbytes == 0


def test_rounds_of_an_iteration_are_told_apart():
    """The second round's plan is the first one's template."""
    with Scheduler("cpu:2") as scheduler:
        x = da.ones((100, 100), chunks=50)
        rounds = []
        for _ in range(3):
            x = (x * 0.5 + 1).persist()
            rounds.append(x)
        rows = scheduler.held().rows
        assert {r.layer for r in rows} == {r.name for r in rounds}
        assert len({r.run for r in rows}) == 3
        assert "3 collections persisted at" in str(scheduler.held())


HELD_HERE = []


class Holder:
    pass


def test_held_names_the_variables_that_hold_a_collection():
    with Scheduler("cpu:1") as scheduler:
        mine = (da.ones(100, chunks=50) + 1).persist()
        holder = Holder()
        holder.field = (da.ones(100, chunks=50) + 2).persist()
        HELD_HERE.append((da.ones(100, chunks=50) + 3).persist())
        try:
            rows = {r.layer: " ".join(r.holders) for r in scheduler.held(who=True).rows}
            assert "`mine` in test_held_names_the_variables" in rows[mine.name]
            assert "`holder`" in rows[holder.field.name]
            assert "`HELD_HERE` in " in rows[HELD_HERE[0].name]
        finally:
            HELD_HERE.clear()


def test_the_memory_of_who_persisted_what_is_bounded(monkeypatch):
    from gpuscheduler.runtime import observe

    monkeypatch.setattr(observe, "MOST_NOTES", 10)
    recorder = Recorder(itertools.count(1).__next__)
    record = recorder.begin()
    for n in range(50):
        recorder.note_persisted(record, [f"x-{n}"])
    assert list(recorder.persisted) == [f"x-{n}" for n in range(40, 50)]
