"""Alike tasks of one device as one step: planned as for GPUs, run on CPU devices."""

import dask
import dask.array as da
import numpy as np
import pytest

import gpuscheduler
from gpuscheduler.frontend.lowering import from_dask
from gpuscheduler.fusion.task import KernelTask
from gpuscheduler.options import Options
from gpuscheduler.pipeline.compile import plan_graph
from gpuscheduler.plan.batching import MOST, SHARE, Batch
from gpuscheduler.plan.build import make_plan
from gpuscheduler.plan.machine import Machine
from tests.support.strategies import received_by_scheduler

X = np.random.default_rng(0).normal(size=(80, 96)).astype("f4")


def blocks(columns=96):
    return da.from_array(X[:, :columns], chunks=16).map_blocks(np.array).persist()


def steps(scheduler, kind):
    (found,) = scheduler._plans.plans()
    return [s for s in found.steps if type(s.task) is kind]


def test_blocks_that_are_there_are_summed_by_a_few_launches(like_gpus):
    x = blocks()
    y = (x * 2).sum()
    for _ in range(2):  # the second run has its plan, and what was prepared
        assert y.compute() == pytest.approx((X * 2).sum(), rel=1e-5)
    batches = steps(like_gpus, Batch)
    assert all(2 <= len(s.task.members) <= MOST for s in batches)
    assert sum(len(s.task.members) for s in batches) >= 30  # each block is in one
    assert len(batches) + len(steps(like_gpus, KernelTask)) < 30 / 2


@pytest.mark.parametrize(
    "f",
    [
        lambda x: np.exp(x) * 2,
        lambda x: (x - x.mean(axis=0)) / x.std(axis=0),
        lambda x: x.argmax(axis=1),
        lambda x: x + 1 + (x + 1).sum(),
    ],
    ids=["map", "standardize", "argmax", "shared"],
)
def test_wanted_blocks_are_parts_of_what_a_batch_makes(like_gpus, f):
    x = blocks()
    y = f(x)
    want = f(da.from_array(X, chunks=16)).compute(scheduler="sync")
    for _ in range(2):
        (got,) = dask.persist(y)
        np.testing.assert_allclose(got.compute(scheduler="sync"), want, rtol=1e-4, atol=1e-5)


def test_only_what_stays_where_it_is_is_prepared_once(like_gpus):
    """A copy from another device is a new array at each run."""
    x = blocks(80)
    y = x + x.T
    (got,) = dask.persist(y)
    np.testing.assert_array_equal(got.compute(scheduler="sync"), X[:, :80] + X[:, :80].T)
    found = list(like_gpus._plans.plans())[-1]
    for step in found.steps:
        if type(step.task) is Batch and step.task.fixed:
            assert {found.steps[i].place for i in step.inputs} == {step.place}


def test_what_only_fits_fused_is_not_refused():
    """The planner asks where tasks would run before they disappear into their readers.

    That must not ask for room that only the unfused tasks would need.
    """
    ones = da.ones((1000, 1000), chunks=(500, 1000))
    slices = ones[::2] * 2
    x = slices.sum() + slices.max()
    machine = Machine.uniform(2, memory=2**20)
    with pytest.raises(gpuscheduler.OutOfMemory):
        make_plan(from_dask(*received_by_scheduler(x)), machine)
    _, plan = plan_graph(from_dask(*received_by_scheduler(x)), machine, None, "cuda", Options())
    assert max(s.nbytes for s in plan.steps) < 1000


def test_what_a_batch_reads_fits_beside_what_it_makes():
    """Inputs that tasks have made stay until the whole batch has run."""
    x = da.from_array(X, chunks=16).map_blocks(np.sort)  # no kernels: 1 KiB each
    y = (x - x.mean()).sum(axis=0)
    for memory in (30 * 2**10, 2**30):
        _, plan = plan_graph(
            from_dask(*received_by_scheduler(y)),
            Machine.uniform(1, memory),
            None,
            "cuda",
            Options(fuse_least=0),
        )
        read = [
            sum(plan.steps[i].nbytes for i in s.inputs if not plan.steps[i].fixed)
            for s in plan.steps
            if type(s.task) is Batch
        ]
        assert all(n <= memory // SHARE for n in read)
    assert max(read) >= 8 * 2**10  # where there is room, they are put together
