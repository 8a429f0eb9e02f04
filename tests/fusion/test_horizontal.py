"""Programs that read the same blocks become one that reads them once."""

from __future__ import annotations

from dataclasses import fields

import dask
import dask.array as da
import numpy as np
import pytest

from gpuscheduler import OutOfMemory, Scheduler
from gpuscheduler.fusion.fuser import FusionPass
from gpuscheduler.fusion.horizontal import TupleItemKey, merge_siblings
from gpuscheduler.fusion.task import KernelTask
from gpuscheduler.pipeline import compile
from gpuscheduler.plan.build import make_plan
from gpuscheduler.plan.machine import Machine
from tests.frontend.test_graph import WORKLOADS, workload
from tests.support.strategies import graph_of


def merged(*collections):
    return merge_siblings(FusionPass(graph_of(*collections)).fuse())


def reading(graph):
    """Kernels that read blocks of the graph's own data, by how many."""
    out = []
    for key, task in graph.tasks.items():
        if isinstance(task, KernelTask) and graph.constants.get(key):
            out += [k for k in task.program.kernels if k.inputs]
    return out


def rows(n=64, chunk=16):
    return da.from_array(np.random.default_rng(0).normal(size=(n, n)), chunks=(chunk, n))


def check(*collections):
    with Scheduler("cpu:2", check=True, fuse_least=0):
        for _ in range(2):
            got = dask.compute(*collections)
    for g, w in zip(got, dask.compute(*collections, scheduler="sync"), strict=True):
        assert (type(g), g.dtype, g.shape) == (type(w), w.dtype, w.shape)
        np.testing.assert_allclose(g, w, rtol=1e-12)


@pytest.fixture(autouse=True)
def _fuse_single_operations(monkeypatch):
    monkeypatch.setitem(compile.FUSE_FEWEST, "cpu", 1)


def test_a_mean_and_a_variance_read_each_block_once():
    """Four blocks: four kernels read x, where Dask has eight tasks that do."""
    x = rows()
    mean, var = x.mean(axis=0), x.var(axis=0)
    graph = merged(mean, var)
    assert len(reading(graph)) == 4
    held = [k for k in graph.tasks if isinstance(k, TupleItemKey)]
    assert len(held) == 4
    assert all(len(k.keys) == 2 for k in held)
    check(mean, var)


def test_trees_of_merged_reductions_merge_too():
    """Steps that combine merged results read the same, so they become one task, too.

    The last steps stay apart, since the caller wants their keys.
    """
    x = rows(64, 4)
    mean, var = x.mean(axis=0, split_every=2), x.var(axis=0, split_every=2)
    graph = merged(mean, var)
    held = [k for k in graph.tasks if isinstance(k, TupleItemKey)]
    assert len(held) == 16 + 8 + 4 + 2
    assert len(graph.tasks) == len(held) + 2
    check(mean, var)


def test_readers_pick_their_item_of_a_merged_task():
    x = rows()
    low, high = x.min(axis=0), x.max(axis=0)
    graph = merged(low, high)
    picks = {p for k in graph.outputs for p in graph.picks[k]}
    assert len(picks) == 2
    check(low, high, x.sum(axis=0), high - low)


def test_equal_reductions_are_computed_once():
    """A sum and a mean share the sum."""
    x = rows()
    graph = merged(x.sum(axis=0), x.mean(axis=0))
    for kernel in reading(graph):
        assert len(kernel.reductions) == 1
    check(x.sum(axis=0), x.mean(axis=0))


def test_histograms_of_the_same_arrays_in_another_order():
    x, y = rows(), rows()[::-1] * 2
    a, b = (da.histogram(z, bins=8, range=(-90, 90))[0] for z in (x - y, y - x))
    check(a, b)


def test_large_results_are_not_merged():
    """Merged values are freed together: two large values would stay for one reader."""
    x = da.from_array(np.ones((1024, 1024)), chunks=(1024, 512))
    a, b = (x * 2 + 1).rechunk(512), (x * 3 + 1).rechunk(512)
    graph = merged(a, b)
    assert not any(isinstance(k, TupleItemKey) for k in graph.tasks)
    check(a, b)


def test_reductions_over_other_axes_are_kernels_apart():
    x = rows()
    a, b = x.sum(axis=0), x.sum(axis=1)
    check(a, b, (x - x.mean(axis=0)).std(axis=1))


@pytest.mark.parametrize("both", [False, True])
def test_blocks_that_read_each_others_edges_stay_apart(both):
    """With two blocks along each axis all read the same blocks, but each mostly its own.

    A mean and a variance of such blocks still merge.
    """
    x = da.from_array(np.random.default_rng(0).normal(size=(64, 64)), chunks=32)
    y = da.map_overlap(
        lambda b: b[2:, 1:-1] - b[:-2, 1:-1] + b[1:-1, 2:] - b[1:-1, :-2],
        x, depth=1, boundary="periodic", trim=False, dtype=float,
    )  # fmt: skip
    asked = [y.mean(), y.std()] if both else [y.sum()]
    held = [key.keys for key in merged(*asked).tasks if isinstance(key, TupleItemKey)]
    first = [keys for keys in held if len(keys[0]) == 3 and max(keys[0][1:]) < 2]
    assert sorted(map(len, first)) == ([2] * len(first) if both else [])
    assert len(first) >= 4 * both
    check(*asked)


def test_tasks_pinned_to_different_devices_do_not_merge():
    x = rows()
    with dask.annotate(device=0):
        a = x.sum(axis=0)
    with dask.annotate(device=1):
        b = x.max(axis=0)
    graph = merged(a, b)
    assert not any(isinstance(k, TupleItemKey) for k in graph.tasks)
    check(a, b)


def test_merged_tasks_run_one_by_one_for_unexpected_values():
    """For values that are not as expected, the original tasks run one after the other."""
    x = rows()

    def odd(b):
        _ = open  # not followed
        return b.astype("f4")

    y = x.map_blocks(odd, dtype="f8", meta=x._meta).rechunk((16, 32))
    a, b = y.sum(axis=0), y.max(axis=0)
    with Scheduler("cpu:2", fuse_least=0):
        got = dask.compute(a, b)
    for g, w in zip(got, dask.compute(a, b, scheduler="sync"), strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-6)


#: Tasks, and programs among them, of the workloads on four CPU devices.
GOLDEN = {
    "black_scholes": (16, 0),
    "gauss_sum": (31, 15),
    "haversine_mesh": (16, 16),
    "heat_stencil": (496, 0),
    "hillshade": (176, 0),
    "logistic_step": (88, 22),
    "matmul": (96, 16),
    "random_slice_sum": (21, 21),
    "standardize": (53, 37),
    "tall_skinny_svd": (19, 0),
    "transpose_sum": (26, 10),
}


def test_each_workload_has_its_golden_counts():
    assert sorted(GOLDEN) == sorted(WORKLOADS)


@pytest.mark.parametrize("name", sorted(GOLDEN))
def test_golden_counts_of_the_workloads(name):
    graph = merged(workload(name))
    plan = make_plan(graph, Machine.uniform(4))
    programs = sum(isinstance(s.task, KernelTask) for s in plan.steps)
    assert (len(plan.steps), programs) == GOLDEN[name]


def test_merged_tasks_that_do_not_fit_in_memory_run_apart():
    """Three reductions of blocks of 8 rows need memory for 13 rows together, and for 9 apart.

    Each makes one row of a block, and its last step makes one row of four.
    """
    data = np.random.default_rng(0).normal(size=(32, 1000))
    x = da.from_array(data, chunks=(8, 1000)).map_blocks(np.sort)
    wanted = x.sum(axis=0), x.max(axis=0), x.min(axis=0)
    steps = {}
    for rows in (9, 12, 13):
        with Scheduler("cpu:1", memory_limit=rows * 8000 + 100, fuse_least=0, check=True) as s:
            for got, f in zip(dask.compute(*wanted), ("sum", "max", "min"), strict=True):
                np.testing.assert_allclose(got, getattr(np.sort(data), f)(axis=0))
            steps[rows] = len(s.plan(*wanted).steps)
    assert steps[9] == steps[12] > steps[13]
    with pytest.raises(OutOfMemory), Scheduler("cpu:1", memory_limit=8 * 8000, fuse_least=0):
        dask.compute(*wanted)


def test_merge_leaves_its_graph_unchanged():
    x = rows()
    graph = FusionPass(graph_of(x.mean(axis=0), x.var(axis=0))).fuse()
    before = {f.name: str(getattr(graph, f.name)) for f in fields(graph)}
    assert merge_siblings(graph) is not graph
    assert before == {f.name: str(getattr(graph, f.name)) for f in fields(graph)}
