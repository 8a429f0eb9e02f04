"""Devices that need each other's edges wait less, take no more memory for it, and give the same
values."""

import dask
import dask.array as da
import numpy as np
import pytest
from hypothesis import given

from gpuscheduler.frontend.lowering import from_dask, received_by_scheduler
from gpuscheduler.ir.regions import bytes_touched
from gpuscheduler.options import Options
from gpuscheduler.pipeline import compile, reorder
from gpuscheduler.pipeline.compile import plan_graph
from gpuscheduler.pipeline.reorder import by_rank, ranks
from gpuscheduler.plan.machine import Machine
from gpuscheduler.runtime.loop import run
from gpuscheduler.runtime.simulated import ClockDevices, InOrderDevices
from graphs import gauss_sum, heat_stencil, matmul, standardize
from tests.support.strategies import cases, thorough

MEMORY = 120 * 2**30


def planned(x, devices, memory=MEMORY, by=dask.persist, **options):
    dsk, keys = received_by_scheduler(x, by=by)  # persisted: nothing goes to the host
    machine = Machine.uniform(devices, memory=memory)
    return plan_graph(from_dask(dsk, keys), machine, None, "cuda", Options(**options))


def clock(plan):
    devices = ClockDevices(plan)
    run(plan, devices, None)
    return devices


@pytest.fixture
def as_planned(monkeypatch):
    """Plans in the order that they had before."""

    def plan(*arguments, **options):
        with monkeypatch.context() as m:
            m.setattr(compile, "reorder_steps", lambda graph, plan, home: (graph, plan))
            return planned(*arguments, **options)

    return plan


@pytest.mark.parametrize("devices", [2, 3, 4])
def test_heat_spreads_over_several_devices_without_waiting(devices, as_planned):
    """Each step takes an edge of each neighbour: by Dask's order a quarter of the time is lost."""
    side = int(32768 * devices**0.5) // 64 * 64
    x = heat_stencil.build((side, 8))
    _, before = as_planned(x, devices)
    _, after = planned(x, devices)
    busy = max(sum(s.seconds for s in after.steps if s.place == d) for d in range(devices))
    assert clock(before).now > 1.15 * busy
    assert clock(after).now < 1.05 * busy
    room = max(*clock(before).peak.values(), MEMORY * reorder.ROOM)
    assert max(clock(after).peak.values()) <= room
    assert {s.key: s.place for s in after.steps} == {s.key: s.place for s in before.steps}


def test_what_takes_more_memory_stays_as_it_was(as_planned, monkeypatch):
    x = heat_stencil.build((46336, 8))
    _, before = as_planned(x, 2, memory=20 * 2**30)
    monkeypatch.setattr(reorder, "ROOM", 0)
    _, after = planned(x, 2, memory=20 * 2**30)
    assert max(clock(after).peak.values()) <= max(clock(before).peak.values())


@pytest.mark.parametrize("graph", [gauss_sum, standardize, matmul])
def test_devices_that_do_not_wait_keep_their_order(graph, as_planned):
    size = 16384 if graph is matmul else (2**16, 2**15)
    x = graph.build(size, 8192)
    _, before = as_planned(x, 2)
    assert [s.key for s in planned(x, 2)[1].steps] == [s.key for s in before.steps]


@thorough
@given(cases(exact=True))
def test_any_plan_may_run_by_rank(case):
    """Each step comes behind what it reads, which has a higher rank."""
    plan = case.plan
    for n, step in enumerate(plan.steps):
        step.seconds = 1e-3 * (1 + n % 3)
    rank, at = ranks(plan), {i: n for n, i in enumerate(by_rank(plan))}
    assert sorted(at) == list(range(len(plan.steps)))
    for i, step in enumerate(plan.steps):
        assert all(at[j] < at[i] for j in step.inputs)
        assert all(rank[j] > rank[i] for j in step.inputs)


def spread(x, rounds):
    for _ in range(rounds):
        x = da.map_overlap(
            heat_stencil.step, x, depth=1, boundary="periodic", trim=False, dtype=x.dtype
        )
    return x


def test_values_are_the_same(as_planned, monkeypatch):
    """Whatever is saved, and whatever memory it takes: so small a graph is not worth it."""
    monkeypatch.setattr(reorder, "SAVED", -9)
    monkeypatch.setattr(reorder, "ROOM", 1)
    x = da.from_array(np.random.default_rng(0).random((48, 48)), chunks=12)
    y = spread(x, 4)
    want = y.compute(scheduler="sync")
    _, before = as_planned(y, 2, by=dask.compute, fuse_least=0)
    _, plan = planned(y, 2, by=dask.compute, fuse_least=0)
    assert [s.key for s in plan.steps] != [s.key for s in before.steps]
    devices = InOrderDevices(plan)
    run(plan, devices, None)
    found = {s.key: devices.value(i) for i, s in enumerate(plan.steps) if i in plan.outputs}
    blocks = [[found[y.name, i, j] for j in range(4)] for i in range(4)]
    np.testing.assert_allclose(np.block(blocks), want, rtol=1e-15)


def test_a_stencil_is_said_to_read_its_blocks_once():
    """It reads each element up to five times, and nine blocks."""
    x = heat_stencil.build((16384, 1))
    _, plan = planned(x, 1)
    kernels = [k for s in plan.steps for k in getattr(getattr(s.task, "program", 0), "kernels", ())]
    assert kernels
    for kernel in kernels:
        made = sum(kernel.output_bytes)
        assert 2 * made <= bytes_touched(kernel) < 2.01 * made
