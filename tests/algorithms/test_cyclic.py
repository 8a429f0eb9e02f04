"""Blocks that are dealt to the devices in turn."""

import dask
import dask.array as da
import numpy as np
import pytest

import gpuscheduler
from gpuscheduler import Cyclic, PlanError
from gpuscheduler.algorithms import square
from gpuscheduler.pipeline.gpu_libraries import Libraries


def places(scheduler, x):
    """The device of each block of an array."""
    return {s.key[1:]: s.place for s in scheduler.plan(x).steps if s.key[0] == x.name}


@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_blocks_along_an_axis_are_dealt_in_turn(devices, axis):
    with gpuscheduler.Scheduler(f"cpu:{devices}", fuse=False) as scheduler:
        x = da.ones((8, 20), chunks=(2, 4))
        with dask.annotate(device=Cyclic(axis=axis)):
            y = x.map_blocks(np.sort)
        found = places(scheduler, y)
        assert found == {key: key[axis] % devices for key in found}
        assert len(found) == 20
        np.testing.assert_array_equal(y.compute(), np.ones((8, 20)))


def test_any_object_with_the_method_is_a_rule():
    class Last:
        def device_of(self, key, devices):
            return devices - 1 if key[-1] else None

    with gpuscheduler.Scheduler("cpu:3", fuse=False) as scheduler:
        with dask.annotate(device=Last()):
            y = da.ones((6,), chunks=2).map_blocks(np.sort)
        found = places(scheduler, y)
        assert found[(1,)] == found[(2,)] == 2


def test_a_device_that_is_not_there_is_refused():
    class Wrong:
        def device_of(self, key, devices):
            return devices

    with gpuscheduler.Scheduler("cpu:2", fuse=False), dask.annotate(device=Wrong()):
        y = da.ones(4, chunks=2).map_blocks(np.sort)
        with pytest.raises(PlanError, match=r"device=2, but the devices are 0 to 1"):
            y.compute()


def test_keys_without_the_axis_go_where_they_like():
    assert Cyclic(1).device_of(("x", 3), 2) is None
    assert Cyclic().device_of("x", 2) is None
    assert Cyclic().device_of(("x", "a"), 2) is None


def test_factorizations_give_each_device_its_columns():
    with gpuscheduler.Scheduler("cpu:3") as scheduler:
        x = square.solve(da.ones((24, 24), chunks=24), np.ones(24), block_size=4)
        keys = [(s.key, s.place) for s in scheduler.plan(x).steps if type(s.key) is tuple]
    updates = [(key, place) for key, place in keys if key[0].endswith("-update")]
    assert len(updates) == 15
    assert all(place == key[-1] % 3 for key, place in updates)


def test_a_rule_names_no_gpu():
    """Unlike a number: host arrays with a rule stay on the host."""
    for pin, found in ((1, "device="), (Cyclic(), None)):
        with dask.annotate(device=pin):
            x = da.ones(4, chunks=2)
        assert Libraries().look((x + 1).dask).gpu_library == found


def test_second_plan_is_the_first(planned):
    with gpuscheduler.Scheduler("cpu:2"):
        for n in range(3):
            with dask.annotate(device=Cyclic()):
                x = da.from_array(np.arange(9.0) + n, chunks=3).map_blocks(np.sort)
            assert x.compute()[0] == n
    assert len(planned) == 1
