"""What no GPU will do runs on the host's threads, whatever the number of GPUs."""

import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")

import dask
import dask.array as da
import dask.bag
from dask import delayed

import gpuscheduler
from gpuscheduler.devices.cpu import CpuHardware, cpu_count
from gpuscheduler.plan.machine import HOST

pytestmark = pytest.mark.gpu

A = np.random.default_rng(0).standard_normal((256, 320))
MANY = 7  # more threads than there are GPUs


@pytest.fixture
def many(monkeypatch):
    monkeypatch.setattr("gpuscheduler.devices.cpu.cpu_count", lambda: MANY)


@pytest.fixture
def scheduler(many):
    with gpuscheduler.Scheduler("cuda:0", memory_limit="1 GiB", host_memory="1 GiB") as s:
        yield s


def thread(*_):
    return threading.current_thread().name


def threads(blocks=64, **kwargs):
    """The names of those that run so many delayed functions."""
    return set(dask.compute(*[delayed(thread, pure=False)() for _ in range(blocks)], **kwargs))


def numpy_blocks():
    return da.from_array(A, chunks=(32, 320))


def uses_cupy(block):
    return cupy.asnumpy(cupy.exp(cupy.asarray(block)))


def helper(block):
    return uses_cupy(block)


def imports(block):
    import cupy as xp

    return xp.asnumpy(xp.asarray(block))


class Model:
    def __init__(self, weights):
        self.weights = weights

    def __call__(self, block):
        return block * float(self.weights.sum())


def closure():
    xp = cupy
    return lambda block: xp.asnumpy(xp.asarray(block))


HOSTS = {
    "kernels": lambda x: (x + 1).sum(),
    "a matrix": lambda x: x.T @ x,
    "sorted": lambda x: x.map_blocks(np.sort),
    "a function": lambda x: x.map_blocks(lambda b: b[::-1] * 2),
    "ranks": lambda x: x.map_blocks(partial(np.argsort, axis=1)),
    "a mask": lambda x: x[x > 1],
    "moments": lambda x: da.concatenate([x.mean(axis=0), x.std(axis=0)]),
    "objects": lambda x: x.astype(object).sum(),
    "factors": lambda x: da.linalg.svd(x.T[:, :8].rechunk((64, 8)))[1],
    "drawn": lambda x: x * np.random.default_rng(3).random(320),
}


@pytest.mark.parametrize("name", HOSTS)
def test_numpy_blocks_are_computed_by_host_threads(scheduler, name):
    x = HOSTS[name](numpy_blocks())
    got, wanted = x.compute(), x.compute(scheduler="threads")
    assert scheduler.last.where == f"{MANY} host threads"
    assert type(got) is type(wanted)
    assert np.asarray(got).dtype == np.asarray(wanted).dtype
    np.testing.assert_allclose(np.asarray(got, float), np.asarray(wanted, float), rtol=1e-12)


def test_all_cores_take_part(scheduler):
    """However many of them there are: each waits until all others have begun."""
    barrier = threading.Barrier(MANY, timeout=60)

    def together(block):
        barrier.wait()
        return np.full((1, 1), 1)

    x = da.from_array(np.ones((MANY, 4)), chunks=(1, 4))
    x = x.map_blocks(together, dtype=int, chunks=(1, 1), meta=np.empty((0, 0), int))
    assert x.sum().compute() == MANY


@pytest.mark.parametrize("ids", ["cuda:0", "cuda:0,0"])
def test_bags_and_delayed_functions_run_there(many, ids):
    with gpuscheduler.Scheduler(ids) as s:
        assert {name.rpartition("-")[0] for name in threads()} == {"gpuscheduler-cpu"}
        bag = dask.bag.from_sequence("mississippi", npartitions=4)
        assert dict(bag.frequencies().compute()) == {"m": 1, "i": 4, "s": 4, "p": 2}
        assert s.last.where == f"{MANY} host threads"


DEVICES = {
    "an array of CuPy's": lambda x: x + cupy.ones(320),
    "sent": lambda x: x.to_backend("cupy"),
    "sent by a function": lambda x: x.map_blocks(cupy.asarray),
    "its global": lambda x: x.map_blocks(uses_cupy),
    "a function's global": lambda x: x.map_blocks(helper),
    "imported": lambda x: x.map_blocks(imports),
    "a closure": lambda x: x.map_blocks(closure()),
    "an argument": lambda x: x.map_blocks(lambda b, xp=None: b + 1, xp=cupy, dtype=float),
    "an object": lambda x: x.map_blocks(Model(cupy.ones(3)), dtype=float),
    "created": lambda x: da.ones((256, 320), chunks=(32, 320)),
    "one of two": lambda x: [x.sum(), da.from_array(cupy.ones(4), chunks=2).sum()],
}


@pytest.mark.parametrize("name", DEVICES)
def test_one_task_of_a_gpu_library_keeps_all_of_a_graph_on_the_gpus(scheduler, name):
    lazy = DEVICES[name](numpy_blocks())
    dask.compute(lazy)
    assert scheduler.last.where == ""


def test_a_pin_to_a_device_keeps_a_graph_on_the_gpus(scheduler):
    with dask.annotate(device=0):
        name = delayed(thread)()
    assert name.compute() == "gpuscheduler-cuda-0"


def test_a_function_that_gets_another_module_is_another_function(scheduler, monkeypatch):
    """Its layer is the same one: what was read of it is read again."""
    x = numpy_blocks().map_blocks(changes, dtype=float)
    np.testing.assert_allclose(x.compute(), A + 1)
    assert scheduler.last.where
    monkeypatch.setitem(globals(), "xp", cupy)
    np.testing.assert_allclose(cupy.asnumpy(x.compute()), A + 1)
    assert not scheduler.last.where


xp = np


def changes(block):
    return xp.asarray(block) + 1


def test_persisted_numpy_blocks_stay_on_the_host(scheduler):
    x = (numpy_blocks() * 2).persist()
    assert scheduler.last.where
    assert "on the host" in repr(scheduler)
    assert type(x.compute()) is np.ndarray
    np.testing.assert_allclose(x.sum().compute(), 2 * A.sum())
    assert scheduler.last.where
    # and with what is the GPU's
    y = numpy_blocks().map_blocks(cupy.asarray)
    both = (x.map_blocks(cupy.asarray) + y).sum().compute()
    np.testing.assert_allclose(float(both), 3 * A.sum())
    assert not scheduler.last.where
    np.testing.assert_allclose(x.sum().compute(scheduler="threads"), 2 * A.sum())


def test_what_is_persisted_on_a_gpu_is_read_there(scheduler):
    x = numpy_blocks().to_backend("cupy").persist()
    assert type(x.sum().compute()) is not np.float64
    assert not scheduler.last.where


def test_persisted_blocks_survive_the_scheduler(many):
    with gpuscheduler.Scheduler("cuda:0") as s:
        x = (numpy_blocks() * 2).persist()
        assert s.last.where
    np.testing.assert_allclose(x.compute(scheduler="threads"), 2 * A)


def test_workers_asked_for_are_threads_of_the_host(scheduler):
    assert threads(num_workers=1) == {"gpuscheduler-cpu-0"}
    with ThreadPoolExecutor(2, thread_name_prefix="mine") as pool:
        assert all(name.startswith("mine") for name in threads(pool=pool))


def test_closing_ends_the_threads_of_both(many):
    with gpuscheduler.Scheduler("cuda:0") as s:
        threads()
        da.from_array(cupy.ones(4), chunks=2).sum().compute()
        every = {t for t in threading.enumerate() if t.name.startswith("gpuscheduler-c")}
        assert {t.name.split("-")[1] for t in every} == {"cpu", "cuda"}
    for t in every & {*threading.enumerate()}:
        t.join(10)
        assert not t.is_alive()
    with pytest.raises(RuntimeError, match="make a new Scheduler"):
        s.get({"a": (len, "ab")}, "a")


def test_without_memory_of_the_host_each_gpus_thread_computes(many):
    with gpuscheduler.Scheduler("cuda:0", host_memory=0) as s:
        assert s.host_threads == 0
        assert threads(4) == {"gpuscheduler-cuda-0"}


def test_both_draw_from_one_memory_of_the_host(scheduler):
    """What one side has persisted there is not the other's."""
    limit = scheduler.hardware.machine.host_memory
    x = (numpy_blocks() * 2).persist()
    assert scheduler._others_chunks() == {HOST: A.nbytes}
    assert scheduler._turns.limit[HOST] == limit
    assert scheduler._executor.held_bytes()[HOST] == A.nbytes
    assert scheduler._host._turns is scheduler._turns
    del x
    assert scheduler._others_chunks() == {}


def test_work_that_does_not_fit_the_hosts_memory_goes_through_files(many):
    n = 64
    with gpuscheduler.Scheduler("cuda:0", host_memory=4 * n * n * n * 8 // 3, check=True) as s:
        x = da.from_array(np.ones((n * n, n)), chunks=(n, n)).map_blocks(np.copy)
        y = x.persist()
        z = x.map_blocks(np.sort).persist()
        w = (x + 1).map_blocks(np.sort).persist()
        assert int((y + z + w).sum().compute()) == 4 * n**3
        assert s.last.where
        assert s._host.hardware.store.peak > 0


def test_plans_say_where_they_run(scheduler):
    x = numpy_blocks()
    assert f"on {MANY} host threads" in str(scheduler.plan((x + 1).sum()))
    assert f"on {MANY} host threads" in str(scheduler.plan((x + 1).sum()).predicted)
    assert "on 1 devices" in str(scheduler.plan(x.to_backend("cupy").sum()))
    assert f"{MANY} host threads" in repr(scheduler)
    assert f"{MANY} host threads" in scheduler._repr_html_()
    (x + 1).sum().compute()
    assert f"s on {MANY} host threads" in str(scheduler.last)


def test_a_timeline_shows_the_host(many, tmp_path):
    with gpuscheduler.Scheduler("cuda:0", timeline=True) as s:
        (numpy_blocks() + 1).sum().compute()
        assert {row.place for row in s.rows()} == {HOST}
        da.from_array(cupy.ones(4), chunks=2).sum().compute()
        assert {row.place for row in s.rows()} == {HOST, 0}
        s.timeline(tmp_path / "rows.json")
    events = json.loads((tmp_path / "rows.json").read_text())["traceEvents"]
    assert "host" in {e["args"]["name"] for e in events if e["name"] == "thread_name"}


def test_the_cache_of_a_computation_may_hold_arrays_of_gpus(scheduler):
    graph = {"y": (np.sum, "x")}
    assert scheduler.get(graph, "y", cache={"x": np.ones(3)}) == 3
    assert scheduler.last.where
    assert float(scheduler.get(graph, "y", cache={"x": cupy.ones(3)})) == 3
    assert not scheduler.last.where


def test_what_is_drawn_is_the_same_there_and_on_cpu_devices(scheduler):
    with dask.config.set({"array.backend": "numpy"}):
        x = da.random.default_rng(7).random((100, 100), chunks=30)
        y = da.random.default_rng(7).standard_normal((100, 100), chunks=30)
    for lazy in (x, y):
        got = lazy.compute()
        assert scheduler.last.where
        with gpuscheduler.Scheduler("cpu:2") as s:
            np.testing.assert_allclose(got, lazy.compute(scheduler=s.get), rtol=1e-14)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_child_has_threads_of_its_own(scheduler):
    """The parent's are not there: what has no GPU in it needs nothing else of the parent."""
    assert threads(4)
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            lazy = (numpy_blocks() + 1).sum()
            right = np.isclose(lazy.compute(), (A + 1).sum())
            right &= "forked process" in str(scheduler.plan(lazy))
            os.write(write, b"right" if right else b"wrong")
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as said:
        assert said.read() == b"right"
    os.waitpid(child, 0)


def test_a_task_computes_for_itself(scheduler):
    def inner():
        return float((numpy_blocks() + 1).sum().compute())

    assert delayed(inner)().compute() == pytest.approx((A + 1).sum())


def test_errors_say_whose_devices_they_name(scheduler):
    def fails(block):
        raise KeyError("no")

    x = numpy_blocks().map_blocks(fails, dtype=float, meta=np.empty((0, 0)))
    with pytest.raises(KeyError) as caught:
        x.sum().compute()
    assert f"its devices are {MANY} host threads" in str(caught.value.__notes__)


def test_sums_are_numpys_numbers_beside_those_of_a_gpu(scheduler):
    """Of one computation that the GPUs have, the part of NumPy's blocks is NumPy's."""
    mine, theirs = dask.compute(numpy_blocks().sum(), numpy_blocks().to_backend("cupy").sum())
    assert not scheduler.last.where
    assert type(mine) is np.float64
    np.testing.assert_allclose(mine, float(theirs))


def test_hardware_of_the_host_is_made_at_first_use(many):
    with gpuscheduler.Scheduler("cuda:0") as s:
        da.from_array(cupy.ones(4), chunks=2).sum().compute()
        assert s._host is None
        (numpy_blocks() + 1).sum().compute()
        assert type(s._host.hardware) is CpuHardware
        assert len(s._host.hardware.machine.devices) == MANY


def test_cores_are_counted_as_dask_counts_them():
    from dask.system import CPU_COUNT

    assert cpu_count() == CPU_COUNT
