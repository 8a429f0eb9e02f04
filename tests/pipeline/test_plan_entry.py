"""What runs learn stands beside the plan, in the plan cache's entry."""

from __future__ import annotations

import dask.array as da
import numpy as np
import pytest
from dask._task_spec import DataNode

from gpuscheduler import Scheduler
from gpuscheduler.frontend.graph import Graph
from gpuscheduler.pipeline.plan_entry import PlanEntry
from tests.support.strategies import plan_of


def entry_of(**more):
    plan = plan_of(("a", "", 0), ("b", "a", 0), memory=(64, 64), kinds="xy", guessed="b")
    return PlanEntry(Graph({}, (), ()), plan, **more)


def test_run_puts_a_plan_with_true_sizes_in_its_place():
    entry = entry_of()
    before = entry.plan
    entry.tape, entry.most = "a tape", {0: 1}
    assert not entry.learn([5, 6])
    assert [s.nbytes for s in entry.plan.steps] == [5, 6]
    assert (entry.plan.tried, before.tried) == (True, False)
    assert (entry.tape, entry.most) == (None, None)
    entry.tape, plan = "a tape", entry.plan
    entry.learn([5, 6])
    assert entry.plan is plan
    assert entry.tape == "a tape"


def test_more_working_memory_makes_memory_short():
    entry = entry_of()
    entry.learn([8, 8])
    assert not entry.plan.may_be_short
    entry.tape = "a tape"
    assert entry.learn([8, 8], {ord("x"): 40})
    assert entry.plan.may_be_short
    assert entry.tape is None
    assert not entry.learn([8, 8], {ord("x"): 30})


def test_first_run_learns_for_the_template_too():
    template = entry_of()
    entry = PlanEntry(template.graph, template.plan.with_facts(), like=template)
    assert entry.base is template
    entry.learn([5, 6])
    assert [s.nbytes for s in template.plan.steps] == [5, 6]
    entry.learn([7, 8])
    assert [s.nbytes for s in entry.plan.steps] == [7, 8]
    assert [s.nbytes for s in template.plan.steps] == [5, 6]


def test_plan_without_given_values_learns_sizes_alone():
    kept = entry_of()
    entry = PlanEntry(kept.graph, kept.plan.with_facts(), like=kept, sizes_only=True)
    assert entry.base is entry
    entry.learn([5, 6])
    assert [s.nbytes for s in kept.plan.steps] == [5, 6]
    assert (kept.plan.tried, entry.plan.tried) == (False, True)


def test_scheduler_learns_in_the_entry_and_leaves_a_shown_plan_alone():
    x = da.from_array(np.arange(1000.0), chunks=250)
    y = x[x > 499]
    with Scheduler("cpu:2", check=True, fuse_least=0) as scheduler:
        shown = scheduler.plan(y)
        sizes = [s.nbytes for s in shown.steps]
        for _ in range(3):
            assert y.compute(scheduler=scheduler.get).size == 500
        (entry,) = [e for e in scheduler._plans.entries() if e.plan.tried]
        assert [s.nbytes for s in shown.steps] == sizes
        assert [entry.plan.steps[i].nbytes for i in entry.plan.outputs] == [0, 0, 2000, 2000]
        assert not shown.tried


@pytest.mark.parametrize("n", [1, 3])
def test_plan_beside_chunks_is_made_once_until_they_move(n):
    with Scheduler("cpu:2", memory_limit="1 MiB") as scheduler:
        x = da.ones((100, 10 * n), chunks=(100, 10)).persist()
        y = x.sum()
        y.compute()
        (entry,) = [e for e in scheduler._plans.entries() if e.plan.own_chunks]
        chunks = entry.plan.own_chunks
        assert len(chunks) == n
        y.compute()
        assert entry.plan_with_chunks(chunks, {}) is entry.plan_with_chunks(chunks, {})
        assert entry.plan_with_chunks(chunks, {0: 8}) is not entry.plan_with_chunks(chunks, {})
        assert entry.plan_with_chunks([], {}) is entry.plan
        assert not any(type(s.task) is DataNode and s.nbytes == 0 for s in entry.plan.steps)
