"""QR in the tasks of a graph: found wherever Dask has fused it, and replaced for GPUs only."""

from __future__ import annotations

import dask.array as da
import numpy as np
import pytest
from dask._task_spec import DataNode, Task, TaskRef
from dask.array.linalg import _wrapped_qr

from gpuscheduler.algorithms import tall_kernel
from gpuscheduler.frontend.lowering import from_dask
from gpuscheduler.pipeline import block_qr
from gpuscheduler.pipeline.block_qr import factor_block, factor_matrix, use_tall_qr


def graph_of(collection):
    return from_dask(collection.__dask_graph__(), collection.__dask_keys__())


def functions(graph):
    """Every function that the tasks of a graph call, by name."""
    found = set()
    for task in graph.tasks.values():
        parts = [task, *getattr(task, "parts", ())]
        for part in parts:
            found.add(getattr(part, "func", None))
            space = getattr(part, "__globals__", {})
            found |= {v for k, v in space.items() if k != "__builtins__" and callable(v)}
    return found


@pytest.mark.parametrize("before", [lambda x: x, lambda x: x * 2 + 1])
def test_every_qr_of_dasks_is_replaced(before):
    """Dask has it as tasks of their own, or fused with operations before it."""
    x = before(da.ones((400, 8), chunks=(100, 8)))
    graph = graph_of(da.linalg.svd(x)[1])
    originals = {_wrapped_qr, np.linalg.qr}
    assert functions(graph) & originals
    assert use_tall_qr(graph)
    assert not functions(graph) & originals
    assert functions(graph) & {factor_block, factor_matrix}
    assert not use_tall_qr(graph)


def test_graphs_without_qr_stay_as_they_are():
    x = da.ones((400, 8), chunks=(100, 8))
    graph = graph_of((x * 2 + 1).sum(axis=0))
    tasks = dict(graph.tasks)
    assert not use_tall_qr(graph)
    assert all(graph.tasks[k] is t for k, t in tasks.items())


def test_single_tasks_keep_their_arguments():
    x = np.random.default_rng(0).standard_normal((200, 40))
    task = Task("q", np.linalg.qr, TaskRef("x"), mode="r")
    graph = from_dask({"x": DataNode("x", x), "q": task}, ["q"])
    assert use_tall_qr(graph)
    np.testing.assert_array_equal(graph.tasks["q"]({"x": x}), np.linalg.qr(x, "r"))


def test_numpy_blocks_are_factored_as_ever():
    x = np.random.default_rng(0).standard_normal((200, 40))
    tall_kernel.branches.clear()
    for function, original in ((factor_block, _wrapped_qr), (factor_matrix, np.linalg.qr)):
        for got, want in zip(function(x), original(x), strict=True):
            np.testing.assert_array_equal(got, want)
    assert not tall_kernel.branches
    q, r = factor_block(x[:0])
    assert (q.shape, r.shape) == ((0, 0), (0, 40))


def test_what_is_replaced_is_what_dask_calls():
    """A Dask that calls another function would silently be as slow as before."""
    x = da.ones((400, 8), chunks=(100, 8))
    called = functions(graph_of(da.linalg.qr(x)[0]))
    assert {f for f, _ in block_qr.REPLACED} <= called
