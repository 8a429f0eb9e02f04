"""Progress displays: what they read of a run, and where it is shown."""

from __future__ import annotations

import io
import logging
import re
import sys
import threading
import time
from types import ModuleType, SimpleNamespace

import dask.array as da
import pytest
from dask import delayed
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import gpuscheduler
from gpuscheduler import Scheduler
from gpuscheduler.diagnostics import progress
from gpuscheduler.diagnostics.progress import (
    LogScreen,
    NotebookScreen,
    ProgressDisplay,
    ProgressRow,
    RunMeter,
    TerminalScreen,
    format_duration,
)
from gpuscheduler.frontend.lowering import from_dask
from gpuscheduler.plan.build import make_plan
from gpuscheduler.plan.machine import Machine
from gpuscheduler.runtime.events import Done, Issued
from gpuscheduler.runtime.observe import Recorder
from gpuscheduler.runtime.state import State
from gpuscheduler.runtime.under_way import runs_under_way

PATIENCE = 60


@pytest.fixture(autouse=True)
def _no_runs_of_other_tests():
    """Tests of recorders begin runs that they never end."""
    runs_under_way.forget()


class Notes:
    """A screen that keeps what it is shown."""

    def __init__(self):
        self.rows, self.lines = [], []
        self.changed = threading.Condition()

    def show(self, rows):
        with self.changed:
            self.rows += rows
            self.changed.notify_all()

    def finish(self, lines):
        with self.changed:
            self.lines += lines
            self.changed.notify_all()

    def until(self, condition):
        with self.changed:
            assert self.changed.wait_for(condition, PATIENCE)


def begin_run(plan, how="steps"):
    """A run that has begun, and the time: a list of nanoseconds."""
    now = [0]
    run = Recorder(lambda: now[0]).begin()
    runs_under_way.end(run)  # of no interest to the displays of other tests
    run.enter(plan, how)
    return now, run


def plan_of(count=6):
    tasks = {("a", n): (abs, n) for n in range(count)}
    tasks |= {("b", n): (abs, ("a", n)) for n in range(count)}
    return make_plan(from_dask(tasks, [("b", n) for n in range(count)]), Machine.uniform(2))


@given(st.integers(0, 12), st.floats(0.1, 100))
def test_a_meter_reads_what_the_state_says(done, elapsed):
    plan = plan_of()
    now, run = begin_run(plan)
    state = State(plan)
    run.loop_begins(state)
    state.start()
    meter = RunMeter(run)
    now[0] = int(elapsed * 1e9)
    assert meter.read().remaining is None
    order = sorted(range(12), key=lambda i: plan.steps[i].key[0])
    for i in order[:done]:
        state.handle(Issued(i, 8), Done(i))
    row = meter.read()
    assert (row.done, row.total) == (done, 12)
    assert row.part == pytest.approx(done / 12)  # they are alike
    if 0 < done < 12:
        assert row.remaining == pytest.approx(elapsed * (12 - done) / done)
    left = {layer.name: layer.left for layer in row.layers}
    assert left == {k: n for k, n in {"a": max(0, 6 - done), "b": min(6, 12 - done)}.items() if n}


def test_the_time_left_comes_from_predicted_seconds_and_not_from_counts():
    plan = plan_of()
    for i, step in enumerate(plan.steps):
        object.__setattr__(step, "seconds", 9.0 if i == 0 else 1.0)
    now, run = begin_run(plan)
    state = State(plan)
    run.loop_begins(state)
    state.start()
    state.handle(Issued(0, 8), Done(0))
    now[0] = 18 * 10**9
    row = RunMeter(run).read()
    assert row.part == pytest.approx(9 / 20)
    assert row.remaining == pytest.approx(22.0)


def test_a_run_on_a_tape_is_done_as_a_whole():
    now, run = begin_run(plan_of(), "replay")
    now[0] = 3 * 10**9
    row = RunMeter(run).read()
    assert (row.done, row.total, row.part, row.remaining) == (0, 12, 0.0, None)
    assert str(row) == f"run {run.number}: 0 of 12 steps"
    run.recorder.end(run)
    assert RunMeter(run).read().part == 1.0


def test_a_run_that_is_not_planned_yet_has_no_steps():
    run = Recorder(lambda: 5).begin()
    row = RunMeter(run).read()
    assert str(row) == f"run {run.number}: planning"
    run.recorder.end(run)


def waits_for(condition):
    def task(value):
        end = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < end
            time.sleep(0.001)
        return value

    return task


def test_a_display_follows_a_run_and_leaves_a_line():
    notes = Notes()
    part = delayed(waits_for(lambda: len(notes.rows) > 2), name="early")(1)
    # not for the first to be done: both may be in one batch of a thread, which reports at its end
    end = delayed(waits_for(lambda: len(notes.rows) > 5), name="late")(part)
    with ProgressDisplay(after=0.0, every=0.001, screen=notes), Scheduler("cpu:2"):
        assert end.compute() == 1
        notes.until(lambda: notes.lines)
    counts = [row.done for row in notes.rows]
    assert counts == sorted(counts)
    assert 0 in counts
    assert re.fullmatch(r"run \d+: \d+ steps in .*", notes.lines[0])


def test_a_run_that_fails_is_said_to_have_failed():
    notes = Notes()

    def fail(value):
        waits_for(lambda: notes.rows)(value)
        raise KeyError("mine")

    with ProgressDisplay(after=0.0, every=0.001, screen=notes), Scheduler("cpu:2"):
        with pytest.raises(KeyError, match="mine"):
            delayed(fail)(1).compute()
        notes.until(lambda: notes.lines)
    assert " failed after " in notes.lines[0]


def test_short_runs_are_not_shown():
    notes = Notes()
    with ProgressDisplay(after=1000.0, every=0.001, screen=notes), Scheduler("cpu:2"):
        for _ in range(5):
            da.ones(10, chunks=5).sum().compute()
    assert (notes.rows, notes.lines) == ([], [])


def test_a_scheduler_shows_its_own_runs_until_it_is_closed(monkeypatch):
    notes = Notes()
    monkeypatch.setattr(progress, "find_screen", lambda: notes)
    monkeypatch.setattr(progress, "AFTER", 0.0)
    before = set(threading.enumerate())
    with Scheduler("cpu:2") as other, Scheduler("cpu:2", progress=True) as mine:
        mine._progress.after, mine._progress.every = 0.0, 0.001
        with other:
            da.ones(10, chunks=5).sum().compute()
        assert notes.rows == []
        with mine:
            task = delayed(waits_for(lambda: notes.rows))(1)
            task.compute()
            notes.until(lambda: notes.lines)
    assert len(runs_under_way.woken) == 0
    assert {t for t in threading.enumerate() if t.name == "gpuscheduler-progress"} <= before


def test_nothing_is_left_of_a_display_that_has_ended():
    with gpuscheduler.progress() as display:
        assert display._thread.is_alive()
        thread = display._thread
        with display:  # again: no second thread
            assert display._thread is thread
    assert not thread.is_alive()
    assert runs_under_way.woken == ()
    display.stop()


# ---- screens


ROW = ProgressRow(3, 1204, 2389, 0.5, 12.0, 75.0, (progress.LayerLeft("normalise<1>", 400, 800),))


def test_a_terminal_shows_bars_and_layers():
    file = io.StringIO()
    screen = TerminalScreen(Console(file=file, force_terminal=True, width=100))
    screen.show([ROW])
    text = file.getvalue()
    for part in ("run 3", "50%", "1,204 of 2,389 steps", "1:15 left", "normalise<1>", "400 of 800"):
        assert part in text
    screen.finish(["run 3: 2,389 steps in 24.0 s"])
    assert file.getvalue().rstrip().endswith("run 3: 2,389 steps in 24.0 s")
    assert screen.live is None


def test_a_notebook_shows_html_in_one_place(monkeypatch):
    shown, updates = [], []
    handle = SimpleNamespace(update=lambda data, raw: updates.append(data["text/html"]))

    def display(data, raw, display_id):
        shown.append(data["text/html"])
        return handle

    module = ModuleType("IPython.display")
    module.display = display
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    screen = progress.find_screen()
    assert isinstance(screen, NotebookScreen)
    screen.show([ROW])
    screen.show([ROW._replace(part=0.75)])
    screen.finish(["run 3: 2,389 steps in 24.0 s"])
    assert len(shown) == 1
    assert "value='0.500'" in shown[0]
    assert "normalise&lt;1&gt;" in shown[0]
    assert "value='0.750'" in updates[0]
    assert updates[-1] == "run 3: 2,389 steps in 24.0 s"


def test_the_log_gets_a_line_now_and_then(caplog):
    now = [0.0]
    screen = LogScreen(every=30.0, clock=lambda: now[0])
    with caplog.at_level(logging.INFO, "gpuscheduler.run"):
        for second in range(0, 61, 10):
            now[0] = float(second)
            screen.show([ROW])
        screen.finish(["run 3: done"])
    assert [r.getMessage() for r in caplog.records] == [str(ROW), str(ROW), "run 3: done"]


def test_without_a_screen_it_is_the_log(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert isinstance(progress.find_screen(), LogScreen)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0.0 s"), (9.94, "9.9 s"), (59.6, "1:00"), (3599.7, "1:00:00"), (86400, "24:00:00")],
)
def test_durations_are_short(seconds, text):
    assert format_duration(seconds) == text
