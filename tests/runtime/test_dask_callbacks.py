"""Dask's callbacks: what each gets to see, and what a run with them costs."""

from __future__ import annotations

import io
import logging
import threading

import dask.array as da
import numpy as np
import pytest
from dask import delayed
from dask.callbacks import Callback
from dask.diagnostics import Profiler, ProgressBar, ResourceProfiler

import gpuscheduler
from gpuscheduler import Scheduler
from gpuscheduler.runtime.dask_callbacks import DaskCallbacks, TaskView, is_progress_bar
from gpuscheduler.runtime.under_way import runs_under_way

PATIENCE = 60


@pytest.fixture
def scheduler():
    with Scheduler("cpu:2", fuse_least=0) as s:
        yield s


class Screen(io.StringIO):
    """Notes what a progress bar draws, and lets a task wait until it has drawn something."""

    def __init__(self):
        super().__init__()
        self.parts = []
        self.drawn = threading.Condition()

    def write(self, text):
        if "%" in text:
            with self.drawn:
                self.parts.append(int(text.split("|")[1].split("%")[0]))
                self.drawn.notify_all()
        return super().write(text)

    def wait_beyond(self, percent):
        with self.drawn:
            assert self.drawn.wait_for(lambda: max(self.parts, default=0) > percent, PATIENCE)


def chain(screen):
    """Tasks in a row, every fifth of which waits until the bar has moved on."""
    end = delayed(int)(0)
    for n in range(20):
        if n % 5 == 4:
            limit = 4 * n - 16
            end = delayed(lambda e, limit=limit: screen.wait_beyond(limit) or e + 1)(end)
        else:
            end = delayed(lambda e: e + 1)(end)
    return end


def test_a_progress_bar_moves_while_a_run_goes_on(scheduler):
    screen = Screen()
    with ProgressBar(out=screen, dt=0.001):
        assert chain(screen).compute(optimize_graph=False) == 20
    between = {p for p in screen.parts if 0 < p < 100}
    assert len(between) >= 3
    assert screen.parts[-1] == 100
    assert screen.parts == sorted(screen.parts)


@pytest.mark.parametrize(
    "callback",
    [
        lambda: ProgressBar(out=io.StringIO()),
        lambda: ResourceProfiler(dt=10),
        Callback,
        lambda: Callback(start=lambda dsk: None, finish=lambda *args: None),
    ],
    ids=["ProgressBar", "ResourceProfiler", "nothing", "start and finish"],
)
def test_a_run_that_is_only_looked_at_is_the_same_run(scheduler, planned, callback):
    """Its plan comes from the cache, and its steps are those of a run without callbacks."""
    x = (da.arange(64, chunks=8).reshape(8, 8) + 1).sum()
    assert int(x.compute()) == 2080
    (plan,) = scheduler._plans.plans()
    with callback():
        assert int(x.compute()) == 2080
    assert len(planned) == 1
    assert scheduler._plans.plans() == [plan]


def test_a_progress_bar_calls_nothing_per_task(scheduler):
    """`note_launch` and `note_done` are for callbacks that hear of each task."""
    heard = []

    class Loud(DaskCallbacks):
        def note_launch(self, step):
            heard.append(step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gpuscheduler.pipeline.request.DaskCallbacks", Loud)
        with ProgressBar(out=io.StringIO()):
            da.arange(20, chunks=2).sum().compute()
        assert heard == []
        with Callback(pretask=lambda *args: None):
            da.arange(20, chunks=2).sum().compute()
    assert len(heard) > 10


def test_a_start_callback_that_writes_changes_what_is_computed(scheduler):
    tasks = {"a": 1, "b": (abs, -7), "c": (sum, ["a", "b"])}

    def change(dsk):
        dsk["b"] = 3

    with Callback(start=change):
        assert gpuscheduler.get(tasks, "c") == 4
    assert gpuscheduler.get(tasks, "c") == 8

    def remove(dsk):
        dsk["c"] = dsk.pop("b")

    with Callback(start=remove):
        assert gpuscheduler.get(tasks, "c") == 7


def test_a_start_callback_that_reads_sees_the_tasks(scheduler):
    seen = []
    x = da.arange(20, chunks=5) + 1
    with Callback(start=lambda dsk: seen.append((len(dsk), set(dsk)))):
        x.sum().compute()
    ((count, keys),) = seen
    assert count == len(keys) >= 5
    assert all(isinstance(k, (str, tuple)) for k in keys)


def test_a_start_state_callback_sees_counts_that_move(scheduler):
    seen = {}

    class Look(Callback):
        def _start_state(self, dsk, state):
            seen["state"], seen["before"] = state, {k: len(state[k]) for k in state}
            seen["keys"] = set(state["ready"])
            seen["needs"] = dict(state["dependencies"])

        def _finish(self, dsk, state, failed):
            assert state is seen["state"]

    x = da.arange(20, chunks=5) + 1
    with Look():
        x.sum().compute()
    state, before = seen["state"], seen["before"]
    n = before["ready"]
    assert before["finished"] == 0
    assert n == len(seen["keys"]) > 0
    assert (len(state["finished"]), len(state["ready"])) == (n, 0)
    assert set(state["finished"]) == seen["keys"]
    assert next(iter(seen["keys"])) in state["finished"]
    assert seen["keys"] <= set(seen["needs"])
    with pytest.raises(KeyError, match="nothing like it"):
        state["nothing like it"]


def test_a_callback_with_a_pretask_sees_each_task_and_waits_for_none(scheduler, caplog):
    seen = []
    y = ((da.arange(64, chunks=8) + 1).rechunk(16) * 2).sum()
    with caplog.at_level(logging.INFO, "gpuscheduler"):
        with Callback(pretask=lambda key, dsk, state: seen.append(key)):
            y.compute()
        assert not caplog.records
        with Profiler() as profile:
            y.compute()
    assert len(seen) == len(set(seen)) > 10
    assert len(profile.results) == len(seen)
    assert len({r.key for r in profile.results} - set(seen)) == 1  # compute() names its result anew
    (record,) = caplog.records
    assert record.name == "gpuscheduler.run"
    assert "Profiler" in record.getMessage()


def test_a_subclass_that_hears_of_tasks_is_no_progress_bar(scheduler):
    seen = []

    class Noisy(ProgressBar):
        def _pretask(self, key, dsk, state):
            seen.append(key)
            super()._pretask(key, dsk, state)

    class Exact(ProgressBar):
        def _posttask(self, key, value, *_):
            seen.append(value)

    assert is_progress_bar(ProgressBar(out=None)._callback)
    with Noisy(out=io.StringIO()):
        da.arange(6, chunks=2).sum().compute()
    assert len(seen) >= 3
    seen.clear()
    with Exact(out=io.StringIO()):
        da.arange(6, chunks=2).sum().compute()
    assert any(np.array_equal(v, 15) for v in seen)


def test_callbacks_hear_of_a_run_that_fails(scheduler):
    ends, others = [], runs_under_way.runs()  # of other tests, which have not ended theirs

    def fail(block):
        raise KeyError("mine")

    bar = ProgressBar(out=io.StringIO())
    with (
        bar,
        Callback(finish=lambda dsk, state, failed: ends.append(failed)),
        pytest.raises(KeyError, match="mine"),
    ):
        da.ones(4, chunks=2).map_blocks(fail, dtype=float).compute()
    assert ends == [True]
    assert not bar._timer.is_alive()
    assert runs_under_way.runs() == others


def test_a_view_of_tasks_is_made_when_somebody_looks():
    made = []
    view = TaskView(lambda: made.append(1) or {"a": 1, "b": 2})
    assert made == []
    assert dict(view) == {"a": 1, "b": 2}
    assert made == [1]
    assert not view.is_changed
    del view["a"]
    assert view.is_changed
    assert list(view) == ["b"]
