"""Blocks on GPUs that go to another process, and stages that are given such blocks."""

import multiprocessing
import pickle
import time
from concurrent.futures import ProcessPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")

import dask.array as da

import gpuscheduler
from gpuscheduler.cluster import cuda_ipc
from gpuscheduler.cluster.transport import Bundle, off_device, put_back
from gpuscheduler.cluster.wire import LentArray, LostArray, OffDevice, Unreachable
from gpuscheduler.cluster.worker_plugin import SharedSample, WorkerNode
from gpuscheduler.cluster.worker_plugin import _sample as node_sample
from gpuscheduler.frontend.lowering import from_dask
from gpuscheduler.values import leaves
from tests.support.strategies import received_by_scheduler

pytestmark = pytest.mark.gpu


def on(device, array):
    with cupy.cuda.Device(device):
        return cupy.asarray(array)


def arrived(cargo):
    buffers = []
    text = pickle.dumps(cargo, protocol=5, buffer_callback=buffers.append)
    sent = [bytearray(b.raw()) for b in buffers if b.raw().nbytes]
    assert len(sent) <= 2  # one for what is small, one for what was on devices
    return pickle.loads(text, buffers=[bytearray(b.raw()) for b in buffers])


@pytest.mark.gpus(2)
def test_blocks_of_two_devices_cross_in_one_buffer_and_go_back_to_two():
    x = np.random.default_rng(0).random((6, 50, 70))
    values = {("x", i): on(i % 2, x[i]) for i in range(6)}
    values["mean"] = {"total": on(1, x[0].sum(axis=0)), "n": np.arange(3)}
    values["odd"] = on(0, x[1]).T[3:9]
    values["empty"] = on(0, np.empty((0, 3), "f4"))
    got = arrived(Bundle(values)).values
    assert type(got["x", 0]) is OffDevice
    np.testing.assert_array_equal(got["odd"].array, x[1].T[3:9])
    assert got["empty"].array.shape == (0, 3)
    with gpuscheduler.Scheduler("cuda:0,1") as s:
        for place in (0, 1):
            arrays = [leaf.array for v in got.values() for leaf in off_device(v)]
            back = iter(s.hardware.copy_in(arrays, place))
            again = {k: put_back(v, lambda _, back=back: next(back)) for k, v in got.items()}
            for leaf in leaves(list(again.values())):
                assert type(leaf) is np.ndarray or leaf.device.id == place
            for i in range(6):
                np.testing.assert_array_equal(again["x", i].get(), x[i])
            np.testing.assert_array_equal(again["mean"]["total"].get(), x[0].sum(axis=0))


@pytest.mark.parametrize("devices", ["cuda:0", "cuda:0,0"])
def test_a_stage_reads_blocks_that_are_on_its_devices(devices):
    x = np.random.default_rng(1).random((4, 30, 30))
    given = {("x", i, 0): on(0, x[i]) for i in range(4)}
    dsk = {("y", i, 0): (np.add, ("x", i, 0), ("x", (i + 1) % 4, 0)) for i in range(4)}
    keys, names = list(dsk), dict.fromkeys(given, 0)
    with gpuscheduler.Scheduler(devices) as s:
        for _ in range(2):  # the second time it is planned already

            def graph():
                out = from_dask(dsk, keys, cache=names, compiled=False)
                for key in keys:  # what `cut` leaves of them: names of what it is given
                    i = key[1]
                    reads = ("x", i, 0), ("x", (i + 1) % 4, 0)
                    out.rewire(key, reads, reads, {})
                return out

            values = s.run_graph(graph, given, known="this stage")
            for i in range(4):
                np.testing.assert_array_equal(values["y", i, 0].get(), x[i] + x[(i + 1) % 4])
            given = {k: on(0, v.get()) for k, v in given.items()}


def test_a_whole_computation_cut_in_two_and_carried_over():
    """Two schedulers stand for two workers; what goes from one to the other is pickled."""
    from gpuscheduler.cluster.stages import CALLER, cut
    from gpuscheduler.plan.machine import Machine

    a = np.random.default_rng(2).random((80, 80))
    with gpuscheduler.Scheduler("cuda:0"), gpuscheduler.Scheduler("cuda:0") as other:
        x = da.from_array(a, chunks=20).map_blocks(cupy.asarray, meta=cupy.empty((0, 0)))
        y = ((x + x.T) @ x).to_backend("numpy")
        graph = from_dask(*received_by_scheduler(y), compiled=False)
        plan = cut(graph, Machine.uniform(2, peer=1e9))
        assert len(plan.stages) > 2
        made = {}
        for stage in plan.stages:
            found = {}
            for n in plan.parcels_of(stage):
                parcel = plan.parcels[n]
                cargo = made[parcel.source].take(parcel.keys)
                far = plan.worker_of(parcel.source) != stage.worker
                found |= (arrived(cargo) if far else cargo).values
            reads = [k for keys in stage.reads.values() for k in keys]
            off = [leaf.array for k in reads for leaf in off_device(found[k])]
            back = iter(other.hardware.copy_in(off, 0))
            given = {k: put_back(found[k], lambda _, back=back: next(back)) for k in reads}
            portion = plan.portion(stage)
            made[stage.number] = Bundle(other.run_graph(lambda p=portion: p, given))
        blocks = {}
        for (source, worker), n in plan.readers.items():
            if worker == CALLER:
                blocks |= made[source].take(plan.parcels[n].keys).values
        (gather,) = graph.gathers.values()
        rows = [[blocks[graph.alias.get(k, k)] for k in row] for row in gather.blocks]
        host = [[b.get() if isinstance(b, cupy.ndarray) else b for b in row] for row in rows]
        np.testing.assert_allclose(np.block(host), (a + a.T) @ a)


class Owner:
    """Stands for CUDA's part: arrays of "another process", by the handles that it gave out."""

    def __init__(self, monkeypatch):
        self.arrays = {}
        monkeypatch.setattr(cuda_ipc, "lend_array", self.lent)
        monkeypatch.setattr(cuda_ipc, "fetch_arrays", self.fetched)

    def lent(self, array):
        if not array.flags.c_contiguous:
            return None
        handle = str(len(self.arrays)).encode()
        self.arrays[handle] = array
        return LentArray(handle, 7, array.shape, array.dtype)

    def fetched(self, things):
        assert all(t.start == 7 for t in things)
        return [self.arrays[t.handle].copy().reshape(t.shape) for t in things]


def test_large_blocks_stay_where_they_are_for_one_that_is_near(monkeypatch):
    owner = Owner(monkeypatch)
    x = np.random.default_rng(0).random((200, 100))
    large, small, turned = on(0, x), on(0, x[:3]), on(0, x).T
    values = {"large": {"a": large, "n": 5}, "small": small, "turned": turned}
    cargo = Bundle(values)
    assert type(arrived(cargo.take(["large"])).values["large"]["a"]) is OffDevice
    assert not owner.arrays
    got = arrived(cargo.take(values, near=True)).values
    assert len(owner.arrays) == 1
    assert type(got["large"]["a"]) is cupy.ndarray
    assert got["large"]["a"].data.ptr != large.data.ptr
    np.testing.assert_array_equal(got["large"]["a"].get(), x)
    np.testing.assert_array_equal(got["small"].array, x[:3])
    np.testing.assert_array_equal(got["turned"].array, x.T)
    assert got["large"]["n"] == 5


def test_what_cannot_be_fetched_says_so_where_it_is_read(monkeypatch):
    Owner(monkeypatch)
    monkeypatch.setattr(cuda_ipc, "fetch_arrays", lambda things: 1 / 0)
    got = arrived(Bundle({"x": on(0, np.ones((200, 100)))}, near=True)).values
    assert got["x"] == LostArray("ZeroDivisionError: division by zero")
    node = WorkerNode("name", {})
    with pytest.raises(Unreachable, match=r"'x' .* could not be copied .* \(ZeroDivisionError"):
        node._bring_values(got)


@pytest.mark.real
def test_samples_are_read_by_other_processes_only():
    with gpuscheduler.Scheduler("cuda:0") as s:
        sample, array = node_sample(s.hardware)
        assert sample.pattern == array.tobytes()
        assert not sample.is_read()  # CUDA opens no memory of the same process
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, context) as other:
            assert other.submit(SharedSample.is_read, sample).result()
            wrong = SharedSample(sample.machine, b"x" * 4096, sample.thing)
            assert not other.submit(SharedSample.is_read, wrong).result()


def test_memory_of_other_processes_is_closed_when_it_is_not_read_any_more(monkeypatch):
    closed = []
    x = np.arange(1000.0)
    there = on(0, x)
    cupy.cuda.Device(0).synchronize()
    monkeypatch.setattr(cuda_ipc, "KEPT", 0.2)
    monkeypatch.setattr(cuda_ipc, "devices", [0])
    runtime = SimpleNamespace(
        ipcOpenMemHandle=lambda handle: there.data.ptr - 40,
        ipcCloseMemHandle=closed.append,
        memcpyAsync=cupy.cuda.runtime.memcpyAsync,
        memcpyDefault=cupy.cuda.runtime.memcpyDefault,
        CUDARuntimeError=cupy.cuda.runtime.CUDARuntimeError,
    )
    monkeypatch.setattr(cuda_ipc, "runtime", runtime)
    thing = LentArray(b"handle", 40, x.shape, x.dtype)
    for _ in range(3):
        for copy in cuda_ipc.fetch_arrays([thing, thing]):
            np.testing.assert_array_equal(copy.get(), x)
    assert not closed
    assert len(cuda_ipc._opened) == 1  # it is opened once
    end = time.monotonic() + 20
    while not closed and time.monotonic() < end:
        time.sleep(0.01)
    assert closed == [there.data.ptr - 40]
    assert not cuda_ipc._opened
    cuda_ipc.fetch_arrays([thing])
    cuda_ipc.close()
    assert len(closed) == 2
    assert cuda_ipc._later is None
