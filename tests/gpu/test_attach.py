"""A cluster of two worker processes, each with its own scheduler.

Each has two GPUs if there are as many.
"""

import time

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")

import dask
import dask.array as da
from distributed import Client, LocalCluster, wait

import gpuscheduler

try:
    from cupy import _device as fake
except ImportError:
    fake = None

pytestmark = pytest.mark.gpu


def pairs(count):
    """Two different GPUs for each of two workers, or the same one or two for both."""
    return ["cuda:0,1", "cuda:2,3"] if count > 3 else ["cuda:0,1" if count > 1 else "cuda:0,0"] * 2


@pytest.fixture(scope="module")
def attached():
    # kernels cannot be compiled in processes whose devices are the host
    options = {"fuse": False} if fake else {}
    devices = dict(enumerate(pairs(cupy.cuda.runtime.getDeviceCount())))
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
        gpuscheduler.attach(client, devices, "1 GiB", **options) as attached,
    ):
        yield attached


@pytest.fixture(scope="module")
def a():
    return np.random.default_rng(0).random((400, 400))


def on_gpus(a):
    x = da.from_array(a, chunks=100)
    return x.map_blocks(cupy.asarray, meta=cupy.empty((0, 0)))


def no_races(client):
    if fake:
        races = client.run(lambda: __import__("cupy")._device.races)
        assert not any(races.values()), races


def test_blocks_cross_between_workers_and_results_come_as_what_they_are(attached, a):
    assert repr(attached).endswith("2 workers of 2 cuda devices>")
    x = on_gpus(a)
    y = (x + x.T) @ x
    assert attached.plan(y).traffic()
    host = y.to_backend("numpy").compute()
    assert type(host) is np.ndarray
    np.testing.assert_allclose(host, (a + a.T) @ a)
    device = y.compute()
    assert type(device) is cupy.ndarray
    np.testing.assert_allclose(device.get(), (a + a.T) @ a)
    no_races(attached.client)


def test_persisted_blocks_stay_on_their_gpus_and_let_go_of_them(attached, a):
    client = attached.client

    def used():
        cupy = __import__("cupy")
        total = 0
        for device in range(cupy.cuda.runtime.getDeviceCount()):
            with cupy.cuda.Device(device):
                total += cupy.get_default_memory_pool().used_bytes()
        return total

    def total(x):
        return (x + x.T).sum().to_backend("numpy").compute()

    total(on_gpus(a).persist())  # kernels keep the memory that they work in
    x = on_gpus(a).persist()
    wait(x)
    held = client.run(used)
    assert sum(held.values()) >= a.nbytes
    assert attached.plan(x + 1).traffic() == {}
    np.testing.assert_allclose(float(total(x)), 2 * a.sum())
    del x
    end = time.monotonic() + 60
    while sum(client.run(used).values()) > sum(held.values()) - a.nbytes:
        assert time.monotonic() < end, "the memory did not come back"
        time.sleep(0.05)
    no_races(client)


@pytest.mark.real
@pytest.mark.filterwarnings("ignore:Sending large graph")
def test_large_parcels_are_copied_from_the_other_workers_devices(attached):
    """Workers of one machine read each other's GPUs; without that, values are sent."""
    a = np.random.default_rng(3).random((1600, 1600))
    x = da.from_array(a, chunks=400).map_blocks(cupy.asarray, meta=cupy.empty((0, 0))).persist()
    wait(x)
    y = (x + x.T) @ x
    assert sum(attached.plan(y).traffic().values()) >= 2 * 2**20
    assert len(attached.membership.near) == 2

    def opened():
        return len(__import__("gpuscheduler.cluster.cuda_ipc").cluster.cuda_ipc._opened)

    for _ in range(3):
        np.testing.assert_allclose(y.to_backend("numpy").compute(), (a + a.T) @ a)
    assert all(attached.client.run(opened).values())
    near, attached.membership.near = attached.membership.near, set()
    np.testing.assert_allclose(y.to_backend("numpy").compute(), (a + a.T) @ a)
    attached.membership.near = near


@pytest.mark.parametrize("last", [False, True])
def test_a_worker_stores_to_its_array_on_the_gpu_that_has_it(a, last):
    options = {"fuse": False} if fake else {}
    devices = pairs(cupy.cuda.runtime.getDeviceCount())[0]
    there = int(devices[-1 if last else devices.index(":") + 1])

    def make():
        with cupy.cuda.Device(there):
            return cupy.zeros(a.shape)

    with (
        LocalCluster(1, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as client,
        gpuscheduler.attach(client, devices, "1 GiB", **options),
    ):
        target = dask.delayed(make, pure=False)().persist()
        da.store(on_gpus(a), target)
        got = dask.delayed(lambda t: (t.device.id, t.get()))(target).compute()
    np.testing.assert_array_equal(got[1], a)  # on the GPU of the task that made it
    assert not (fake and fake.races)
