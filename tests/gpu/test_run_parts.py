"""The parts of a run on GPUs, each by itself: no loop asks them."""

from concurrent.futures import Future

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")

import gpuscheduler
from gpuscheduler.devices.cuda import lane_orders
from gpuscheduler.devices.cuda.caller_order import CallerOrder
from gpuscheduler.devices.cuda.file_steps import FileSteps
from gpuscheduler.devices.cuda.host_steps import HostSteps, NextOrders
from gpuscheduler.devices.cuda.lane import HeldValue
from gpuscheduler.devices.cuda.lane_orders import LaneOrders
from gpuscheduler.devices.cuda.run_context import RunContext
from gpuscheduler.devices.cuda.run_values import RunValues
from gpuscheduler.devices.cuda.step_values import StepValues
from gpuscheduler.devices.cuda.transfers import Transfers
from gpuscheduler.errors import Interrupted
from gpuscheduler.frontend.lowering import from_dask
from gpuscheduler.plan.build import make_plan
from gpuscheduler.plan.machine import DISK, HOST
from gpuscheduler.runtime.events import Copied, Done, Issued, NoRoom
from gpuscheduler.runtime.gather import ResultAssembly
from gpuscheduler.runtime.protocol import StepListener

pytestmark = pytest.mark.gpu
PATIENCE = 30


def numbers():
    return cupy.arange(1000.0)


@pytest.fixture
def run():
    """Steps 0 and 1 on place 0, which step 2 on place 1 reads, and step 3 there."""
    tasks = {
        "a": (numbers,),
        "b": (numbers,),
        "c": (lambda x, y: x + y, "a", "b"),
        "d": (cupy.negative, "c"),
    }
    with gpuscheduler.Scheduler("cuda:0,0") as scheduler:
        hardware = scheduler.hardware
        graph = from_dask(tasks, ["c", "d"])
        graph.pin({"a": 0, "b": 0, "c": 1, "d": 1})
        plan = make_plan(graph, hardware.machine)
        assert [step.key for step in plan.steps] == ["a", "b", "c", "d"]
        team = hardware._team(2)
        team.begin()
        yield RunContext.create(plan, team, ResultAssembly(plan, {}), hardware, StepListener.DONE)
        team.stop()
        team.join(PATIENCE)


def hold(run, step, value, place=0):
    """Hold a value as if a step had just been launched."""
    lane = run.lanes[place]
    with cupy.cuda.Device(lane.device), lane.home:
        run.held[place][step] = HeldValue(value(), lane.mark(lane.home))


def test_fetch_is_behind_the_value_and_keeps_it_until_the_copy_is_over(run):
    transfers, lane = Transfers(run), run.lanes[1]
    hold(run, 0, numbers)
    assert transfers.fetch(lane, 0, 0) == Copied(0, 0, 1)
    here, there = run.held[1][0], run.held[0][0]
    assert (here.arrived, here.unseen) == (True, True)
    assert there.reads == [here.ready]
    assert transfers.fetched == 8000
    here.ready.synchronize()
    np.testing.assert_array_equal(here.value.get(), np.arange(1000.0))


def test_copy_to_the_host_is_reported_when_it_is_over(run):
    transfers, lane = Transfers(run), run.lanes[0]
    hold(run, 0, numbers)
    transfers.send_to_host(lane, 0)
    assert run.events.wait(run.team) == [Copied(0, 0, HOST)]
    np.testing.assert_array_equal(run.held[HOST][0].value.array, np.arange(1000.0))
    transfers.send_to_host(lane, 0, DISK)
    assert run.events.wait(run.team) == [Copied(0, 0, DISK)]
    assert 0 in run.files.of
    run.files.forget(0)


def test_nothing_arrives_in_a_run_that_is_closed(run):
    transfers = Transfers(run)
    hold(run, 0, numbers)
    run.stopped = True
    transfers.send_to_host(run.lanes[0], 0)
    run.lanes[0].watch.stop()
    run.lanes[0].watch.thread.join(PATIENCE)
    assert run.events.empty()
    assert not run.held[HOST]
    with pytest.raises(Interrupted):
        run.raise_if_stopped()


def test_value_that_left_comes_back_to_its_device(run):
    transfers, callers = Transfers(run), CallerOrder(run)
    values = RunValues(run, FileSteps(run, transfers, callers))
    hold(run, 2, numbers, place=1)
    there = values.value(2)
    assert there is run.held[1][2].value
    assert values.keep(2) == {1: run.held[1][2]}
    transfers.send_to_host(run.lanes[1], 2)
    run.events.wait(run.team)
    assert values.keep(2).keys() == {1, HOST}
    del run.held[1][2]
    np.testing.assert_array_equal(values.value(2).get(), np.arange(1000.0))
    with pytest.raises(KeyError):
        values.value(3)


def test_readers_of_host_steps_follow_in_the_order_of_the_plan(run):
    """Step 1 is computed on the host: its readers wait, the last launched first here."""
    steps = HostSteps(run, CallerOrder(run))
    assert not steps.waits(0, 2)
    order = steps.hand_over(run.lanes[0], 1, {})
    assert order == NextOrders(0, ("away", 1, 0))
    assert steps.waits(0, 2)  # it reads step 1
    assert steps.waits(0, 3)  # ... and this one reads step 2
    assert not steps.waits(1, 2)  # which is another device's
    assert steps.due_when_back(0, 1) == [1, 2, 3]
    assert not steps.waits(0, 2)
    steps.made[1] = Future()
    steps.end()
    assert not steps.made
    assert not steps.given


def test_orders_report_what_is_queued_and_then_what_is_done(run, monkeypatch):
    monkeypatch.setattr(lane_orders, "REPORT_EVERY", PATIENCE)  # not in the middle of the orders
    transfers = Transfers(run)
    host_steps = HostSteps(run, CallerOrder(run))
    steps = StepValues(run, host_steps)
    orders = LaneOrders(run, steps, transfers, host_steps, light=False, ahead=False)

    def reported(count):
        found = []
        while len(found) < count:
            found += run.events.wait(run.team)
        return [(type(event), event.step) for event in found]

    run.team.send(0, orders.carry_out, [0, [("launch", 0, 0), ("launch", 1, 0)]])
    assert reported(4) == [(Issued, 0), (Issued, 1), (Done, 0), (Done, 1)]
    run.team.send(1, orders.carry_out, [1, [("fetch", 0, 0), ("launch", 2, 1)]])
    assert reported(2) == [(Copied, 0), (NoRoom, 2)]  # one of its inputs is not here
    run.team.send(1, orders.carry_out, [1, [("fetch", 1, 0), ("launch", 2, 1), ("free", 0, 1)]])
    assert reported(3) == [(Copied, 1), (Issued, 2), (Done, 2)]
    assert list(run.held[1]) == [1, 2]
    np.testing.assert_array_equal(run.held[1][2].value.get(), 2 * np.arange(1000.0))
    for place in (0, 1):
        run.team.send_last(place, orders.clear, place)
        assert run.team.wait_until_idle(PATIENCE)
        assert not run.held[place]
