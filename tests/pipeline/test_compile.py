"""The passes by name, and that each leaves a graph in order."""

from __future__ import annotations

import dask.array as da
import numpy as np
import pytest
from dask.base import collections_to_expr

from gpuscheduler import Scheduler
from gpuscheduler.frontend.graph import Graph
from gpuscheduler.frontend.lowering import from_dask, received_by_scheduler
from gpuscheduler.options import Options
from gpuscheduler.pipeline import compile
from gpuscheduler.plan.machine import Machine
from gpuscheduler.plan.plan import Plan

NAMES = [one.__name__ for one in compile.PASSES]


def test_passes_come_in_an_order_that_makes_sense():
    first = ["fuse", "fuse_horizontally", "place", "batch", "check_memory", "reorder"]
    assert [name for name in NAMES if name in first] == first
    assert all(one.__doc__ for one in compile.PASSES)


def plan_checked(*collections, devices=1, kind="cuda", **options) -> tuple[Graph, Plan]:
    """The plan of collections; each pass is followed by the validator."""
    dsk, keys = received_by_scheduler(*collections)
    return compile.plan_dask(
        lambda apart: from_dask(dsk, keys, send=kind == "cuda", apart=apart),
        Machine.uniform(devices),
        None,
        kind,
        Options(check=True, fuse_least=0, **options),
    )


def moments():
    x = da.from_array(np.ones((64, 64), "f4"), chunks=(8, 64))
    return x.mean(axis=0), x.var(axis=0), (x + 1).sum()


def products():
    x = da.ones((64, 64), chunks=16, dtype="f4")
    return (x @ (x + 1), (x.T @ x).sum())


def scans():
    x = da.random.default_rng(1).normal(size=4000, chunks=500)
    return x.cumsum(axis=0) + 1, da.histogram(x, bins=9, range=(-2, 2))[0], x[x > 0].sum()


@pytest.mark.parametrize("make", [moments, products, scans])
@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_every_pass_leaves_a_valid_graph(make, devices, kind):
    graph, plan = plan_checked(*make(), devices=devices, kind=kind)
    assert [report.name for report in plan.passes] == NAMES
    for one, two in zip(plan.passes, plan.passes[1:], strict=False):
        assert two.before == one.after
    assert plan.passes[-1].after == len(graph.nodes) == len(plan.steps)
    index = {s.key: i for i, s in enumerate(plan.steps)}
    assert set(index) == set(graph.nodes)
    assert set(plan.reasons) <= set(graph.nodes)


def test_pass_that_forgets_something_is_found(monkeypatch):
    def forgetful(c):
        key = next(k for k, node in c.graph.nodes.items() if node.needs)
        c.graph.drop(c.graph.nodes[key].needs[0])

    monkeypatch.setattr(compile, "PASSES", (*compile.PASSES[:3], forgetful))
    with pytest.raises(AssertionError, match="no task before it makes"):
        plan_checked(*moments())


def test_passes_say_what_they_merge():
    _, plan = plan_checked(*moments())
    reports = {r.name: r for r in plan.passes}
    assert reports["fuse"].after < reports["fuse"].before
    assert reports["fuse_horizontally"].after < reports["fuse_horizontally"].before
    assert reports["place"].after == reports["place"].before


def test_plan_of_a_scheduler_has_its_passes():
    with Scheduler("cpu:2", check=True) as scheduler:
        plan = scheduler.plan(da.ones(100, chunks=10).sum())
    assert [r.name for r in plan.passes] == NAMES


def test_with_callbacks_tasks_stay_apart():
    """Without `merge`, passes that join tasks do nothing."""
    expr = collections_to_expr([da.ones(100, chunks=10).sum()]).optimize()
    graph = from_dask(expr, list(expr.__dask_keys__()))
    options = Options(check=True, fuse_least=0)
    before = len(graph.nodes)
    graph, plan = compile.plan_graph(graph, Machine.uniform(1), None, "cuda", options, merge=False)
    assert {(r.before, r.after) for r in plan.passes} == {(before, before)}
