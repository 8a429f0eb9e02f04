"""The engine on real GPUs: values, order, memory, links. Logical devices stand in for several."""

import gc
import importlib
import pickle
import subprocess
import sys
import threading
import time
from contextlib import nullcontext, suppress
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")

import dask
import dask.array as da
from dask.array import dispatch
from dask.utils import Dispatch

import gpuscheduler
from gpuscheduler import disk_cache
from gpuscheduler.devices.choose import cuda_devices
from gpuscheduler.devices.cuda import arrays as cuda_arrays
from gpuscheduler.devices.cuda import (
    executor,
    hardware,
    kernel_code,
    kernels,
    lane_orders,
)
from gpuscheduler.devices.cuda import lane as cuda_lane
from gpuscheduler.errors import (
    DeviceLost,
    PlanError,
)
from gpuscheduler.fusion.task import KernelTask
from gpuscheduler.plan import machine

pytestmark = pytest.mark.gpu

GRAPHS = [
    "haversine_mesh",
    "gauss_sum",
    "standardize",
    "transpose_sum",
    "matmul",
    "tall_skinny_svd",
    "random_slice_sum",
    "black_scholes",
    "heat_stencil",
    "hillshade",
    "logistic_step",
]
#: Of arrays that take a while; the host, where it stands in for GPUs, takes longer.
STAND_IN = hasattr(cupy, "_device")
SIDE, HALF = (128, 512) if STAND_IN else (4096, 2048)
PATIENCE = 20  # seconds
DEVICES = ["cuda:0", "cuda:0,0", "cuda:0,0,0,0"]
if cuda_devices() > 1:
    DEVICES += ["cuda", "cuda:1,0"]
if cuda_devices() > 3:
    DEVICES += ["cuda:0,1,0,1"]
if STAND_IN:  # the host takes long
    DEVICES = ["cuda:0", "cuda:0,0", "cuda", "cuda:0,1,0,1"]


def come_back_elsewhere(scheduler, chunk):
    """Put a persisted chunk at another address of its device, as if it had been away.

    Its old memory is overwritten. Its new place is given.
    """
    held = chunk.places[chunk.place]
    with cupy.cuda.Device(scheduler.hardware.ids[chunk.place]):
        moved = cuda_lane.HeldValue(held.value.copy())
        cupy.cuda.runtime.deviceSynchronize()
    held.value.fill(np.nan)
    chunk.note_departure(chunk.place)
    chunk.note_arrival(chunk.place, moved)
    return moved


def host(value):
    return value.get() if isinstance(value, cupy.ndarray) else np.asarray(value)


def cupy_array(x, chunks):
    return da.from_array(x, chunks=chunks).map_blocks(cupy.asarray)


@pytest.fixture(params=DEVICES)
def scheduler(request):
    with gpuscheduler.Scheduler(devices=request.param, check=True) as s:
        yield s


@pytest.fixture
def x():
    return np.random.default_rng(0).random((400, 300))


def used_bytes():
    gc.collect()
    total = 0
    for d in range(cuda_devices()):
        with cupy.cuda.Device(d):
            cupy.cuda.runtime.deviceSynchronize()
            total += cupy.get_default_memory_pool().used_bytes()
    return total


@pytest.mark.parametrize("name", GRAPHS)
def test_graphs_equal_numpy(scheduler, name):
    graph = importlib.import_module(f"graphs.{name}")
    result = graph.build(graph.SMALL, xp="cupy").compute()
    assert isinstance(result, cupy.ndarray)
    np.testing.assert_allclose(
        host(result), graph.reference(graph.SMALL), rtol=graph.RTOL, atol=graph.ATOL
    )


def test_fast_mathematics_is_nearly_right():
    x = cupy_array(np.linspace(0.5, 4, 2**16, dtype="f4"), 2**14)
    lazy = da.exp(-x) / (1 + da.sqrt(x)) - da.log(x) * da.sin(x)
    got = []
    for fast in (True, False):
        with gpuscheduler.Scheduler(devices="cuda:0", fast_math=fast):
            got.append(host(lazy.compute()))
    np.testing.assert_allclose(*got, rtol=1e-5, atol=1e-5)
    if not STAND_IN:  # the stand-in has one kind of mathematics
        assert (got[0] != got[1]).any()


@pytest.mark.parametrize("name", [g for g in GRAPHS if g != "random_slice_sum"])
def test_one_and_many_devices_agree_to_the_bit(name):
    graph = importlib.import_module(f"graphs.{name}")
    results = []
    for devices in ["cuda:0", "cuda:0,0", "cuda:0,0,0,0", "cuda"]:
        with gpuscheduler.Scheduler(devices=devices):
            results.append(host(graph.build(graph.SMALL, xp="cupy").compute()))
    for r in results[1:]:
        np.testing.assert_array_equal(r, results[0])


def test_cupy_in_cupy_out_on_the_callers_device(scheduler, x):
    result = (cupy_array(x, 50) + 1).compute()
    assert isinstance(result, cupy.ndarray)
    assert result.device.id == cupy.cuda.runtime.getDevice()
    np.testing.assert_array_equal(host(result), x + 1)
    total = cupy_array(x, 50).sum().compute()
    assert total.device.id == cupy.cuda.runtime.getDevice()


PRODUCTS = {
    "matrix and vector": lambda x, v, w: x @ v,
    "vector and matrix": lambda x, v, w: w @ x,
    "transposed": lambda x, v, w: x.T @ (w + 1),
    "a step": lambda x, v, w: v - x.T @ (1 / (1 + da.exp(-(x @ v) / 30000)) - w),
    "dot of vectors": lambda x, v, w: da.dot(w, w),
    "vdot": lambda x, v, w: da.vdot(w, w),
    "tensordot": lambda x, v, w: da.tensordot(x, v, ([1], [0])),
    "einsum": lambda x, v, w: da.einsum("ij,ij,j->i", x, x, v),
}


@pytest.mark.parametrize("dtype", ["f4", "f8", "c8", "i4"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_with_vectors_are_kernels(name, dtype, monkeypatch):
    """No task of theirs is left to CuPy."""

    def unexpected(*args, **kwargs):
        raise AssertionError("a product that is no kernel of ours")

    for lookup in vars(dispatch).values():  # the first use of each of Dask's tables fills them all
        if isinstance(lookup, Dispatch):
            with suppress(TypeError):
                lookup.dispatch(cupy.ndarray)
    for function in ("matmul", "dot", "tensordot", "vdot", "einsum"):
        monkeypatch.setattr(cupy, function, unexpected)
    rng = np.random.default_rng(3)
    arrays = [(10 * rng.random(s)).astype(dtype) for s in ((400, 300), (300,), (400,))]
    if dtype == "c8":
        arrays = [a + 1j * a[::-1] for a in arrays]
    lazy = PRODUCTS[name](*[da.from_array(a, chunks=70) for a in arrays])
    want = lazy.compute(scheduler="sync")
    with gpuscheduler.Scheduler(devices="cuda:0,0"):
        given = [cupy_array(a, 70).persist() for a in arrays]
        got = PRODUCTS[name](*given).compute()
    assert got.dtype == want.dtype
    np.testing.assert_allclose(host(got), want, rtol=1e-4 if dtype in ("f4", "c8") else 1e-12)


@pytest.mark.parametrize("chunks", [50, (400, 100), (100, 300), (37, 41)])
def test_results_to_the_host_are_one_pinned_array(scheduler, x, chunks):
    lazy = cupy_array(x, chunks)
    result = (lazy * 2).to_backend("numpy").compute()
    assert type(result) is np.ndarray
    np.testing.assert_array_equal(result, x * 2)
    kind = cupy.cuda.runtime.pointerGetAttributes(result.ctypes.data).type
    assert kind == cupy.cuda.runtime.memoryTypeHost  # page-locked
    both = dask.compute((lazy * 2).to_backend("numpy"), lazy.sum())
    np.testing.assert_array_equal(both[0], x * 2)
    np.testing.assert_allclose(host(both[1]), x.sum())


def test_chunks_of_unknown_shape_come_as_what_they_are(scheduler, x):
    """Dask takes what a mask selects for NumPy's, and gives CuPy's."""
    lazy = cupy_array(x.ravel(), 5000)
    picked, want = lazy[lazy > 0.5], x.ravel()[x.ravel() > 0.5]
    assert type(picked._meta) is np.ndarray
    for kind, y in ((cupy.ndarray, picked), (np.ndarray, picked.map_blocks(cupy.asnumpy))):
        result = y.compute()
        assert type(result) is type(y.compute(scheduler="sync")) is kind
        np.testing.assert_array_equal(host(result), want)


def test_a_block_that_is_gathered_and_wanted_itself(scheduler, x):
    lazy = (cupy_array(x, 100) + 1).to_backend("numpy")
    whole, block = dask.compute(lazy, lazy.to_delayed()[0, 1])
    np.testing.assert_array_equal(whole, x + 1)
    assert type(block) is np.ndarray
    np.testing.assert_array_equal(block, x[:100, 100:200] + 1)


def test_fewer_devices_for_one_call(scheduler, x):
    p = cupy_array(x, 50).persist()
    np.testing.assert_array_equal(host((p + 1).compute(num_workers=1)), x + 1)
    np.testing.assert_allclose(host(p.sum().compute(num_workers=1)), x.sum())


def test_a_task_that_changes_device_or_stream_for_good(scheduler):
    last = cuda_devices() - 1

    def rude(block):
        cupy.cuda.Device(last).use()
        cupy.cuda.Stream(non_blocking=True).use()
        return block

    def where(block):
        return cupy.full_like(block, cupy.cuda.runtime.getDevice())

    a = da.ones((64, 64), chunks=16)
    b = a.map_blocks(rude, meta=a._meta).rechunk(32).map_blocks(where, meta=a._meta)
    assert set(np.unique(host(b.compute()))) <= set(scheduler.hardware.ids)


@pytest.mark.gpus(2)
def test_other_devices_read_the_graphs_arrays_behind_who_writes_them():
    a, other = cupy.zeros((256, 256), "f4"), cupy.zeros(2**22)
    late = 1 if hasattr(cupy, "_device") else 300  # the stand-in finds races by itself
    with gpuscheduler.Scheduler(devices="cuda:0,1"):
        x = da.Array({("a", 0, 0): a}, "a", ((256,), (256,)), meta=a[:0, :0])
        with dask.annotate(device=1):
            y = x * 2
        for turn in range(5):
            for _ in range(late):
                other.fill(turn)
            a.fill(turn)
            got = y.persist()
            a.fill(-1)
            assert got.dask[got.__dask_keys__()[0][0]].func.place == 1
            np.testing.assert_array_equal(host(got.compute()), np.full(a.shape, 2 * turn, "f4"))


@pytest.mark.gpus(3)
@pytest.mark.parametrize("light", [True, False])
def test_devices_fetch_from_different_ones_at_a_time(monkeypatch, light):
    """The next device's blocks come first, then those of the one behind it. The sums do not wait
    for blocks of other devices where they read none."""
    monkeypatch.setattr(executor, "A_MOMENT", 10 if light else -1)
    devices = min(4, cuda_devices())
    with gpuscheduler.Scheduler("cuda:" + ",".join(map(str, range(devices))), check=True):
        values = np.arange(4.0 * (devices * 64) ** 2).reshape((devices * 128,) * 2)
        x = cupy_array(values, (64, 64)).persist()
        lazy = (x + x.T).sum()
        real, copies = cupy.cuda.runtime.memcpyPeerAsync, []
        for turn in range(3):
            if turn:
                monkeypatch.setattr(
                    cupy.cuda.runtime, "memcpyPeerAsync",
                    lambda to, d, src, e, n, s: (n > 4096 and copies.append((d, e)))
                    or real(to, d, src, e, n, s),
                )  # fmt: skip
            assert float(lazy.compute()) == 2 * values.sum()
        assert {d for d, _ in copies} == set(range(devices))
        for d in range(devices):
            turns = [(e - d) % devices for to, e in copies if to == d]
            once = turns[: len(turns) // 2]
            assert turns == 2 * once
            assert once == sorted(once)
            assert set(once) == set(range(1, devices))


@pytest.mark.parametrize("boundary", ["periodic", "nearest", "reflect", 0])
def test_blocks_with_edges_of_their_neighbours_are_kernels(scheduler, monkeypatch, boundary):
    def stencil(u):
        return u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:] - 4 * u[1:-1, 1:-1]

    def never(self, values, out=None):
        raise AssertionError(f"{self!r} is computed operation by operation")

    monkeypatch.setattr(KernelTask, "__call__", never)
    values = np.random.default_rng(0).normal(size=(96, 120))
    u = cupy_array(values, (24, 30)).persist()
    for _ in range(3):
        u = da.map_overlap(stencil, u, depth=1, boundary=boundary, trim=False, dtype="f8",
                           meta=u._meta)  # fmt: skip
    got = host(u.compute())
    mode = {"periodic": "wrap", "nearest": "edge", "reflect": "symmetric"}.get(boundary)
    for _ in range(3):
        wide = np.pad(values, 1, mode) if mode else np.pad(values, 1)
        values = stencil(wide)
    np.testing.assert_allclose(got, values, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("shape", [(7, 8, 9), (5, 6, 7, 8), (3, 1, 9, 5), (4, 6, 5, 1)])
@pytest.mark.parametrize("dtype", ["u1", "f4", "c16"])
def test_results_of_blocks_along_all_axes(shape, dtype):
    """Planes of rows are copied at once, to the host and within a GPU."""
    want = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    with gpuscheduler.Scheduler(devices="cuda:0"):
        x = da.from_array(want, chunks=tuple(-(-n // 2) for n in shape)).map_blocks(cupy.asarray)
        x = x.persist()
        for axis in range(len(shape)):
            some = tuple([slice(None, None, -1 if k == axis else None) for k in range(len(shape))])
            np.testing.assert_array_equal(cupy.asnumpy(x[some].compute()), want[some])
            np.testing.assert_array_equal(x[some].map_blocks(cupy.asnumpy).compute(), want[some])
            np.testing.assert_array_equal(x[some].to_backend("numpy").compute(), want[some])


@pytest.mark.real
def test_rows_more_than_two_gigabytes_apart(scheduler):
    x = da.ones((2, 2**29 + 64), chunks=(2, 2**28), dtype="u1").map_blocks(
        lambda b: b, chunks=((2,), (2**28, 2**28, 64))
    )
    y = da.concatenate([x] * 5, axis=1)  # rows of 2.5 GB
    result = y.to_backend("numpy").compute()
    assert result.shape == y.shape
    assert result[:, ::1_000_003].all()
    assert result[1, -1] == 1


def test_three_dimensions_and_odd_strides(scheduler):
    x = np.random.default_rng(1).random((20, 30, 40))
    lazy = cupy_array(x, (7, 11, 13))
    np.testing.assert_array_equal(lazy.T.to_backend("numpy").compute(), x.T)
    np.testing.assert_array_equal(host(lazy.T.compute()), x.T)
    np.testing.assert_array_equal(host(lazy[::2, ::-1, 3:20:5].compute()), x[::2, ::-1, 3:20:5])
    moved = lazy.transpose(2, 0, 1).rechunk((40, 5, 30))
    np.testing.assert_array_equal(host(moved.compute()), x.transpose(2, 0, 1))


def test_numpy_chunks_stay_numpy(scheduler, x):
    with dask.config.set({"array.backend": "numpy"}):
        lazy = da.from_array(x, chunks=50) + da.ones(x.shape, chunks=50)
    result = lazy.compute()
    assert type(result) is np.ndarray
    np.testing.assert_array_equal(result, x + 1)


def test_transposes_many_times(scheduler):
    """Every block crosses.

    A race between streams shows as a wrong value sooner or later, and on the stand-in at once.
    """
    x = np.random.default_rng(2).random((512, 512))
    a = cupy_array(x, 32)
    want = x + x.T
    for _ in range(3 if STAND_IN else 10):
        np.testing.assert_array_equal((a + a.T).to_backend("numpy").compute(), want)


def test_copies_through_the_host_give_the_same(x):
    from gpuscheduler.devices.cuda.hardware import CudaHardware

    with gpuscheduler.Scheduler(devices="cuda:0,0") as s:
        s._hardware = CudaHardware([0, 0], staged={(0, 1), (1, 0)})
        a = cupy_array(x[:300], 30)
        for _ in range(5):
            result = (a + a.T).to_backend("numpy").compute()
            np.testing.assert_array_equal(result, x[:300] + x[:300].T)


@pytest.mark.parametrize("devices", DEVICES)
def test_values_are_evicted_and_come_back(devices):
    """Sixteen blocks, 2 MiB each, that are all needed twice, where six fit."""
    x = np.random.default_rng(3).random((HALF, HALF))
    with gpuscheduler.Scheduler(devices=devices, memory_limit=3 * x.nbytes // 8, check=True):
        a = cupy_array(x, HALF // 4)
        b = a - a.mean()
        result = (b + b.T).to_backend("numpy").compute()
    mean = x.mean()
    np.testing.assert_allclose(result, (x - mean) + (x - mean).T, rtol=1e-12, atol=1e-12)


def test_containers_cross_and_are_evicted(scheduler, x):
    a = cupy_array(x, 50)
    np.testing.assert_allclose(host(a.var().compute()), x.var())
    np.testing.assert_array_equal(host(a.argmax(axis=0).compute()), x.argmax(axis=0))


def test_ordered_behind_the_callers_stream(scheduler):
    """The array of the graph is still being made when compute() is called."""
    for _ in range(5):
        a = cupy.ones((SIDE, SIDE))
        for _ in range(20):
            a = a @ cupy.eye(SIDE) + 1
        lazy = da.from_array(a, chunks=SIDE // 4, asarray=False)
        assert float((lazy - 21).sum().compute()) == 0


def test_results_are_ordered_before_the_callers_stream(scheduler):
    a = da.ones((SIDE, SIDE), chunks=SIDE // 4)
    b = a @ a
    for _ in range(3):
        result = b.compute()
        assert bool((result == SIDE).all())
        del result


def test_persisted_blocks_stay_and_work_follows(scheduler, x):
    p = cupy_array(x, 50).persist()
    devices = {
        v.device.id for v in dask.compute(*p.to_delayed().ravel()) if isinstance(v, cupy.ndarray)
    }
    assert devices <= set(range(cuda_devices()))
    np.testing.assert_array_equal((p + 1).to_backend("numpy").compute(), x + 1)


def test_blocks_that_one_launch_makes_are_persisted_one_by_one(scheduler):
    rows, columns = gpuscheduler.axis(0, 8, 9), gpuscheduler.axis(0, 70, 8)
    p = gpuscheduler.mesh(lambda y, x: 100 * y + x, (rows, columns), chunks=4).persist()
    assert {type(task).__name__ for task in dict(p.dask).values()} == {"ChunkTask"}
    with gpuscheduler.Scheduler(devices="cuda:0"):  # whose streams wait for those that made them
        assert float((p + 1).sum().compute()) == 72 * (400 + 35 + 1)
    expected = 100.0 * np.arange(9)[:, None] + 10 * np.arange(8)
    np.testing.assert_array_equal(host(p.compute()), expected)


def test_persisted_blocks_leave_and_come_back(tmp_path, x):
    """Twelve blocks of 80 kB share room for six.

    They go to pinned memory, to files where that is full, and back. Prepared launches notice that
    their arrays have moved.
    """
    before = used_bytes()
    options = {"memory_limit": 3 * 80_000, "check": True, "spill_directory": str(tmp_path)}
    for host_memory in (2**30, 200_000):
        with gpuscheduler.Scheduler(devices="cuda:0,0", **options) as s:
            s.hardware.machine = replace(s.hardware.machine, host_memory=host_memory)
            p = cupy_array(x, 100).persist()
            for _ in range(3):
                np.testing.assert_array_equal((p + 1).to_backend("numpy").compute(), x + 1)
                np.testing.assert_allclose(host(p.sum().compute()), x.sum())
                assert max(n for d, n in s.last.peak.items() if d >= 0) <= 3 * 80_000
            assert ("on the host" in repr(s)) or ("on disk" in repr(s))
            q = (p * 2).persist()
            np.testing.assert_allclose(host((p + q).sum().compute()), 3 * x.sum())
            np.testing.assert_array_equal(host(p.blocks[0, 0].compute()), x[:100, :100])
            data = pickle.dumps(p)
            del p, q
            end = time.monotonic() + PATIENCE
            while s._persisted.chunks() and time.monotonic() < end:
                time.sleep(0.001)  # the devices' threads let go of what the last run read
            assert s._persisted.chunks() == []
        np.testing.assert_array_equal(host(pickle.loads(data).compute(scheduler="sync")), x)
        assert not list(tmp_path.iterdir())
    assert used_bytes() == before


def test_rounds_of_an_iteration(scheduler, planned):
    """Each round has new arrays, on the plan of the first round.

    This includes launches of many blocks, which keep the addresses of their arrays.
    """
    a, b = np.random.default_rng(2).random((2, 512, 64)).astype("f4")
    x, y = cupy_array(a, (16, 64)).persist(), cupy_array(b, (16, 64)).persist()
    start, v, w = len(planned), np.zeros(64, "f4"), cupy.zeros(64, "f4")
    for _ in range(5):
        z = (x * np.float32(0.5) + y).persist()
        a = a * np.float32(0.5) + b
        w = ((z @ w)[:, None] * y + z).sum(axis=0).compute()
        total = float((z - y).sum().compute())
        assert total == pytest.approx((a - b).sum(dtype="f8"), rel=1e-4)
        v = ((a @ v)[:, None] * b + a).sum(0)
        np.testing.assert_allclose(host(w), v, rtol=2e-4)
        v = host(w)
        gc.collect()
        x = z
    assert len(planned) - start == 3


@pytest.mark.filterwarnings("ignore:Increasing number of chunks")
def test_persisted_blocks_that_only_another_device_has(x):
    """Blocks that leave their own device while another has a copy stay there, at the end, too."""
    a = np.random.default_rng(5).random((256, 256)).astype("f4")
    elsewhere = 0
    for _ in range(12):  # which copies come sooner is not the same each time
        with gpuscheduler.Scheduler("cuda:0,0", memory_limit=180 * 1024, check=True) as s:
            p = cupy_array(a, 16).persist()
            product = (p @ p).persist()
            elsewhere += sum(
                c.place not in c.places and max(c.places) >= 0 for c in s._persisted.chunks()
            )
            np.testing.assert_allclose(host(product.to_backend("numpy").compute()), a @ a, 1e-4)
            np.testing.assert_array_equal(host(p.to_backend("numpy").compute()), a)
            for block, start in ((p.blocks[0, 0], (0, 0)), (p.blocks[15, 15], (240, 240))):
                expected = a[start[0] : start[0] + 16, start[1] : start[1] + 16]
                np.testing.assert_array_equal(host(block.compute(scheduler="sync")), expected)
        if elsewhere:
            break
    assert elsewhere


def test_persisted_blocks_outlive_their_scheduler(x):
    with gpuscheduler.Scheduler(devices="cuda:0,0"):
        p = cupy_array(x, 100).persist()
    np.testing.assert_array_equal(host(p.compute(scheduler="sync")), x)
    with gpuscheduler.Scheduler(devices="cuda:0"):
        np.testing.assert_array_equal(host((p + 1).compute()), x + 1)


def test_files_are_read_and_written_beside_the_device(scheduler, tmp_path, x):
    """Zarr to CuPy and back, without a word about pinned memory."""
    zarr = pytest.importorskip("zarr")
    z = zarr.create_array(tmp_path / "in", shape=x.shape, chunks=(100, 100), dtype="f8")
    z[:] = x
    out = zarr.create_array(tmp_path / "out", shape=x.shape, chunks=(100, 100), dtype="f8")
    y = da.from_zarr(z).map_blocks(cupy.asarray) * 2 + 1
    da.store(y, out, lock=False)
    np.testing.assert_array_equal(out[:], x * 2 + 1)
    np.testing.assert_allclose(host(y.sum().compute()), (x * 2 + 1).sum())


def test_arrays_of_gpus_are_stored_to_where_they_are(scheduler, x):
    """On the first device and on the last, in a region, in turns, and on top of what was read."""
    ids = scheduler.hardware.ids
    for n, device in enumerate([ids[-1], ids[0], ids[-1]]):
        with cupy.cuda.Device(device):
            target, part = cupy.zeros(x.shape), cupy.zeros((500, 400))
            y = cupy_array(x, (90, 70)) * 2 + n
            da.store(y, target, lock=bool(n))
            doubled = target * 2  # on the caller's stream, at once
            da.store([y, y + 1], [part, target], regions=[np.s_[50:450, 100:], None])
            np.testing.assert_array_equal(doubled.get(), (x * 2 + n) * 2)
            np.testing.assert_array_equal(part[50:450, 100:].get(), x * 2 + n)
            assert not part[:50].any()
            again = da.from_array(target, chunks=(90, 70), name=False) * 2
            again.store(target)
            np.testing.assert_array_equal(target.get(), (x * 2 + n + 1) * 2)


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("side", [300, 400])  # below what Dask leaves in its tasks, and above it
def test_what_was_stored_on_a_gpu_is_the_callers_and_takes_no_room(devices, side):
    x = np.random.default_rng(0).random((400, side))
    y = da.from_array(x, chunks=100)
    limit = x.nbytes + 6 * y[:100, :100].nbytes
    with gpuscheduler.Scheduler(devices, limit, check=True) as s:
        target = cupy.zeros(x.shape)
        stored = da.store(y.map_blocks(cupy.asarray) + 1, target, return_stored=True)
        assert "persisted" not in repr(s)
        target += 1
        for _ in range(2):
            np.testing.assert_array_equal(host((stored * 2).compute()), (x + 2) * 2)
        assert s.last.spilled[machine.HOST] <= x.nbytes  # of the result
        again = {"compute": False, "return_stored": True, "load_stored": True}
        held = da.store(y.map_blocks(cupy.asarray), target, **again)
        np.testing.assert_array_equal(host(held.compute()), x)
        np.testing.assert_array_equal(target.get(), x)
        target.fill(0)
        np.testing.assert_array_equal(host(held[3:200, 5:].compute()), x[3:200, 5:])
        np.testing.assert_array_equal(target[3:200, 5:].get(), x[3:200, 5:])
        kept = held.persist()
        assert "persisted" not in repr(s)
        target += 1
        np.testing.assert_array_equal(host((kept * 2).compute()), (x + 1) * 2)


def test_an_array_of_a_gpu_by_another_name_is_stored_to(scheduler, x):
    """In a graph of the caller's own, and where Dask fuses storing with what is stored."""
    y = cupy_array(x, 100)
    with cupy.cuda.Device(scheduler.hardware.ids[-1]):
        target = cupy.zeros(x.shape)
        da.store(y, dask.delayed(target))
        np.testing.assert_array_equal(target.get(), x)
        lazy = da.store(y * 2, target, compute=False).to_delayed().ravel().tolist()
        dask.compute(*lazy)
        np.testing.assert_array_equal(target.get(), x * 2)
        again = {"compute": False, "return_stored": True, "load_stored": True}
        (block, *_) = da.store(y * 3, target, **again).to_delayed().ravel().tolist()
        got = dask.delayed(lambda b: b + 1)(block[:5]).compute()
        np.testing.assert_array_equal(got.get(), x[:5, :100] * 3 + 1)
        np.testing.assert_array_equal(target[:100, :100].get(), x[:100, :100] * 3)


def test_what_may_leave_its_gpu_is_not_stored_to(scheduler, x):
    y = cupy_array(x, 100)
    kept = dask.delayed(cupy.zeros)(x.shape).persist()
    with pytest.raises(PlanError, match=r"store-map.* to a persisted array.*compute\(\) it"):
        da.store(y, kept)
    with pytest.raises(PlanError, match=r"store-map.*that another task makes on a GPU: compute"):
        da.store(y, dask.delayed(cupy.zeros)(x.shape, pure=False))
    target = kept.compute()
    da.store(y, target)
    np.testing.assert_array_equal(target.get(), x)


def test_what_is_made_of_what_was_stored_is_counted(x):
    """Where Dask has fused the storing with what follows."""
    again = {"compute": False, "return_stored": True, "load_stored": True}
    for y, target in (
        (da.from_array(x, chunks=100), np.zeros(x.shape)),
        (cupy_array(x, 100), cupy.zeros(x.shape)),
    ):
        stored = da.store(y, target, **again) + 1
        (made,) = dask.optimize(stored.map_blocks(cupy.asarray) * 2)
        with gpuscheduler.Scheduler("cuda:0", 6 * 80_000, fuse=False, check=True) as s:
            kept = made.persist()
            nbytes = s._persisted.nbytes()
            assert sum(nbytes.values()) == x.nbytes
            assert nbytes[machine.HOST]
            np.testing.assert_array_equal(host(kept.to_backend("numpy").compute()), (x + 1) * 2)
        np.testing.assert_array_equal(host(target), x)


@pytest.mark.gpus(2)
def test_one_task_does_not_store_to_two_gpus(x):
    with cupy.cuda.Device(1):
        there = cupy.zeros(x.shape)
    here = cupy.zeros(x.shape)
    again = {"compute": False, "return_stored": True, "load_stored": True}
    twice = da.store(da.store(cupy_array(x, 100), here, **again), there, **again)
    with gpuscheduler.Scheduler("cuda:0,1"):
        with pytest.raises(PlanError, match=r"store-map.*on several GPUs"):
            dask.optimize(twice)[0].compute()
        twice.compute()
    np.testing.assert_array_equal(here.get(), x)
    with cupy.cuda.Device(1):
        np.testing.assert_array_equal(there.get(), x)


def test_a_run_that_writes_to_an_array_does_not_begin_again():
    """It finds less room beside persisted chunks than it seemed to have."""
    size, n = [10], 100
    ones = da.from_array(np.ones((7 * n, n)), chunks=n).map_blocks(cupy.asarray)
    with gpuscheduler.Scheduler("cuda:0", 10**6, fuse=False):
        target = cupy.zeros((n, n))
        stored = da.store(ones[:n], target, return_stored=True)
        keep = ones.persist()
        ((twice,),) = da.store(stored * 2, target, compute=False).to_delayed().tolist()
        make = dask.delayed(lambda _, i: cupy.zeros(size[0]), pure=False)
        total = dask.delayed(len, pure=False)([make(twice, i) for i in range(20)])
        total.compute()
        assert set(target.get().ravel().tolist()) == {2.0}
        size[0] = 5000
        total.compute()
        assert set(target.get().ravel().tolist()) == {4.0}
        del keep


@pytest.mark.gpus(2)
def test_an_array_of_another_gpu_is_not_stored_to(x):
    with cupy.cuda.Device(1):
        target = cupy.zeros(x.shape)
    y = cupy_array(x, 100)
    with (
        gpuscheduler.Scheduler("cuda:0"),
        pytest.raises(PlanError, match=r"store-map.*on GPU 1, which is none.*: store to an array"),
    ):
        da.store(y, target)
    with gpuscheduler.Scheduler("cuda:0,1"):
        with pytest.raises(PlanError, match="the first num_workers"):
            da.store(y, target, num_workers=1)
        da.store(y, target)
    with cupy.cuda.Device(1):
        np.testing.assert_array_equal(target.get(), x)


def test_annotations_pin(scheduler):
    last = len(scheduler.hardware.machine.devices) - 1

    def where(block):
        return cupy.full_like(block, cupy.cuda.runtime.getDevice())

    with dask.annotate(device=last):
        a = da.ones((8, 8), chunks=4).map_blocks(where)
    assert (host(a.compute()) == scheduler.hardware.ids[last]).all()


def test_tasks_run_on_the_devices_own_stream(scheduler):
    seen = set()

    def look(block):
        stream = cupy.cuda.get_current_stream()
        seen.add((threading.current_thread().name, stream.ptr))
        assert stream.ptr not in (0, 1, 2)
        made = stream.record()
        with cupy.cuda.Stream(non_blocking=True) as other:
            other.wait_event(made)  # the block may be in the making
            out = block + 1
            other.synchronize()
        assert cupy.cuda.get_current_stream() == stream
        return out

    a = da.ones((64, 64), chunks=16).map_blocks(look, meta=cupy.empty((0, 0)))
    assert (host(a.compute()) == 2).all()
    assert len({name for name, _ in seen}) == len(seen)


@pytest.mark.real
def test_user_kernels_as_tasks(scheduler, x):
    square = cupy.ElementwiseKernel("T x", "T y", "y = x * x", "square")
    total = cupy.ReductionKernel("T x", "T y", "x", "a + b", "y = a", "0", "total")
    raw = cupy.RawKernel(
        r"""extern "C" __global__ void twice(const double* x, double* y, long long n) {
            long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
            if (i < n) y[i] = 2 * x[i];
        }""",
        "twice",
    )

    @cupy.fuse
    def fused(a):
        return a * 3 + 1

    def twice(block):
        block = cupy.ascontiguousarray(block)
        out = cupy.empty_like(block)
        raw((-(-block.size // 128),), (128,), (block, out, block.size))
        return out

    a = cupy_array(x, 50)
    np.testing.assert_array_equal(host(a.map_blocks(square).compute()), x * x)
    np.testing.assert_array_equal(host(a.map_blocks(twice).compute()), 2 * x)
    np.testing.assert_allclose(host(a.map_blocks(fused).compute()), x * 3 + 1)
    sums = a.map_blocks(
        lambda b: total(b, axis=1, keepdims=True), chunks=(a.chunks[0], (1,) * a.numblocks[1])
    )
    np.testing.assert_allclose(host(sums.sum(axis=1).compute()), x.sum(axis=1))


@pytest.mark.real
@pytest.mark.parametrize("whose", ["CuPy's", "mine"])
def test_kernels_that_have_run_are_named_and_sent(whose, scheduler, x):
    """Dask copies a function to name what it gives; the copy takes nothing along when it goes."""
    mine = cupy.ElementwiseKernel("T x", "T y", "y = -x", "mine")
    function = mine if whose == "mine" else cupy.negative
    on_gpu = cupy.asarray(x)
    for _ in range(3):
        np.testing.assert_array_equal(function(on_gpu).get(), -x)
        a = cupy_array(x, 50).map_blocks(function)
        np.testing.assert_array_equal(host((a * 1).compute()), -x)
        copied = pickle.loads(pickle.dumps(function))
        np.testing.assert_array_equal(copied(on_gpu).get(), -x)
        del copied
        gc.collect()


def test_an_exception_names_key_and_device(scheduler):
    def broken(block):
        raise ZeroDivisionError("mine")

    a = da.ones((8, 8), chunks=4).map_blocks(broken, meta=cupy.empty((0, 0)))
    with pytest.raises(ZeroDivisionError, match="mine") as caught:
        a.compute()
    assert any("device" in note and "broken" in note for note in caught.value.__notes__)
    assert int(da.ones(8, chunks=4).sum().compute()) == 8


def test_out_of_memory_in_a_task_is_an_error_and_the_next_compute_works(scheduler):
    def huge(block):
        return cupy.empty(2**46, dtype=np.uint8)

    a = da.ones(8, chunks=4).map_blocks(huge, dtype=np.uint8, meta=cupy.empty((0,), np.uint8))
    with pytest.raises(gpuscheduler.OutOfMemory, match="memory limit"):
        a.sum().compute()
    assert int(da.ones(8, chunks=4).sum().compute()) == 8


@pytest.mark.parametrize(
    ("form", "devices", "room"),
    [
        ("kernels", "cuda:0", 100), ("kernels", "cuda:0,0", 100), ("kernels", "cuda:0,0", 150),
        ("tasks", "cuda:0", 130), ("tasks", "cuda:0,0", 150),
    ],
)  # fmt: skip
def test_a_cupy_result_too_large_for_one_gpu_says_what_to_do(form, devices, room):
    pool = cupy.get_default_memory_pool()
    gc.collect()  # or what earlier tests have left is room, once it goes
    pool.free_all_blocks()
    with gpuscheduler.Scheduler(devices=devices):
        lazy = da.ones((64, 2**18), chunks=(8, -1)) + 1  # 128 MiB
        if form == "tasks":
            lazy = lazy.map_blocks(cupy.sort)
        pool.set_limit(size=pool.total_bytes() + room * 2**20)
        try:
            for _ in range(3):
                with pytest.raises(gpuscheduler.OutOfMemory, match=r"\d bytes.*to_backend"):
                    lazy.compute()
        finally:
            pool.set_limit(size=0)
        assert bool((lazy.compute() == 2).all())


def test_what_has_gaps_and_must_leave_says_so_where_there_is_no_room_to_close_them(monkeypatch):
    tried = []

    def refused(value):
        tried.append(value)
        raise cupy.cuda.memory.OutOfMemoryError(8, 0, 0)

    with gpuscheduler.Scheduler(devices="cuda:0", memory_limit=2**20) as s:
        x = da.ones((64, 2**15), chunks=(1, -1)) + 1  # 16 MiB
        lazy = x.map_blocks(lambda b: cupy.sort(b)[:, ::-1])
        with monkeypatch.context() as patch:
            patch.setattr(cuda_arrays, "make_contiguous", refused)
            with pytest.raises(gpuscheduler.OutOfMemory, match=r"262,144 bytes.*ascontiguous"):
                lazy.persist()
        assert len(tried) == 2
        assert (cupy.asnumpy(lazy.compute()) == 2).all()
        assert s.last.spilled[-1]


def test_a_result_of_which_memory_has_room_for_no_second_copy():
    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    size = 32 * 2**20
    try:
        pool.set_limit(size=pool.total_bytes() + size + size // 2 + 2**23)
        with gpuscheduler.Scheduler(devices="cuda:0", memory_limit=size + size // 2) as s:
            x = (da.ones((1024, 4096), chunks=(64, -1)) + 1).persist()
            for n in range(3):
                got = cupy.asnumpy((x * 2 + n).compute())
                assert (got == 4 + n).all()
                assert s.last.peak[0] <= size + size // 2
    finally:
        pool.set_limit(size=0)


def test_a_thread_that_dies_is_an_error_and_the_next_run_has_another():
    with gpuscheduler.Scheduler(devices="cuda:0") as s:
        lazy = da.ones(8, chunks=4).map_blocks(cupy.sort).sum()  # no kernel of ours
        assert int(lazy.compute()) == 8
        ((team,),) = [teams.idle for teams in s.hardware._teams.values()]
        team.workers[0].stop()
        team.workers[0].thread.join(10)
        with pytest.raises(DeviceLost, match="thread gpuscheduler-cuda-0 has ended"):
            lazy.compute()
        assert int(lazy.compute()) == 8


def test_compiled_kernels_are_launched_by_the_callers_thread(scheduler, monkeypatch):
    """From the second time on; its device and its stream are then what they were."""
    monkeypatch.setattr(executor, "A_MOMENT", 10)
    who = []
    for name in ("run", "run_batch"):
        plain = getattr(kernels.Kernels, name)

        def seen(*args, plain=plain):
            who.append(threading.current_thread())
            return plain(*args)

        monkeypatch.setattr(kernels.Kernels, name, seen)
    lazy = ((da.arange(96, chunks=8, dtype="f8") + 1) ** 2).sum()
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    with streams[0]:
        for turn in range(4):
            who.clear()
            assert float(lazy.compute()) == 96 * 97 * 193 / 6
            mine = {t is threading.current_thread() for t in who}
            assert mine == {turn > 0}
            assert cupy.cuda.get_current_stream() == streams[0]
    assert cupy.cuda.get_current_stream() == cupy.cuda.Stream.null
    assert cupy.cuda.runtime.getDevice() == 0


def test_kernels_of_a_plan_are_compiled_several_at_a_time_and_once(monkeypatch):
    """None of them in the middle of the run, nor again for other blocks and other numbers."""
    real, compiled, launched = kernel_code.compile_kernel, [], []
    first_two, meet = iter(range(2)), threading.Barrier(2)

    def compile_one(source, *options):
        if next(first_two, None) is not None:
            meet.wait(30)  # two of them at a time
        compiled.append(source)
        return real(source, *options)

    function = kernel_code.KernelCode._function

    def load(*args):
        launched.append(len(compiled))
        return function(*args)

    monkeypatch.setattr(disk_cache, "read", lambda words: None)
    monkeypatch.setattr(kernel_code, "compile_kernel", compile_one)
    monkeypatch.setattr(kernel_code.KernelCode, "_function", load)

    def both(x, n):
        return (da.exp(x + n) * 2).sum(), da.cumsum(x - n, axis=0).max(axis=1)

    with gpuscheduler.Scheduler(devices="cuda:0") as s:
        for n in (1, 3):
            x = da.random.default_rng(n).random((32, 32), chunks=16)
            dask.compute(*both(x, n))
            if n == 1:
                first = len(compiled)
        assert s.hardware.kernels.code.compiled == len(compiled) == first > 2
        assert set(launched) == {first}


def test_what_comes_behind_a_run_that_has_not_ended_on_its_device(scheduler):
    """The caller's stream comes behind the run.

    The graph's arrays may be written to, and their memory used again, as if the run were over.
    """
    a = cupy.zeros((SIDE, SIDE), "f4")
    part = SIDE // 4
    dsk = {("a", n, 0): a[n * part : (n + 1) * part] for n in range(4)}
    twice = da.Array(dsk, "a", ((part,) * 4, (SIDE,)), meta=a[:0, :0]) * 2
    lazy = twice.sum()
    stream = cupy.cuda.Stream(non_blocking=True)
    for turn in range(5):
        a.fill(turn)
        total = lazy.compute()
        a.fill(-1)
        with stream:
            stream.wait_event(cupy.cuda.Stream.null.record())
            again = lazy.compute()
        assert float(total) == 2 * turn * SIDE**2
        cupy.cuda.Stream.null.wait_event(stream.record())
        assert float(again) == -2 * SIDE**2
        a.fill(turn)
        kept = twice.persist()
        a.fill(-1)
        assert float(kept.sum().compute()) == 2 * turn * SIDE**2
    for turn in range(5):
        b = cupy.full((SIDE, SIDE), turn, "f4")
        p = da.from_array(b, chunks=SIDE // 4, asarray=False).persist()
        totals = [(p + p.T).sum() for _ in range(2)]
        for total in totals:
            total.compute()
        result = totals[-1].compute()
        del b, p, totals
        cupy.full((SIDE, SIDE), -1, "f4")
        assert float(result) == 2 * turn * SIDE**2


def test_chunks_outlive_a_run_that_has_not_ended_beside_another(scheduler, monkeypatch):
    """The other one is not behind it, and might get their memory."""
    monkeypatch.setattr(executor, "A_MOMENT", 10)
    go, begun = threading.Event(), threading.Event()

    def slow(block):
        if block.size:
            begun.set()
            go.wait(PATIENCE)
        return block

    kept = []
    drop_all = lane_orders.LaneOrders._drop_all

    def watched(orders, place):
        held, lane = orders.run.held[place], orders.run.lanes[place]
        chunks = {id(h.value) for i, h in held.items() if orders.run.plan.steps[i].fixed}
        before = len(lane.later)
        drop_all(orders, place)
        if orders.ahead and chunks:
            kept.append(chunks <= {id(value) for _, value in list(lane.later)[before:]})

    p = da.ones((64, 64), chunks=16).map_blocks(cupy.asarray).persist()
    total = (p * 2).sum()
    total.compute()
    monkeypatch.setattr(lane_orders.LaneOrders, "_drop_all", watched)
    monkeypatch.setattr(cupy.cuda.Event, "done", property(lambda event: False), raising=False)
    assert float(total.compute()) == 2 * 64 * 64
    assert kept
    assert not any(kept)
    kept.clear()
    blocked = da.ones(4, chunks=2).map_blocks(cupy.asarray).map_blocks(slow, dtype="f8")
    thread = threading.Thread(target=blocked.compute)
    thread.start()
    assert begun.wait(PATIENCE)
    assert float(total.compute()) == 2 * 64 * 64
    go.set()
    thread.join(PATIENCE)
    assert kept
    assert all(kept)


def test_a_chunk_whose_making_is_seen_to_be_over_by_another_run(scheduler):
    """That run forgets the event; this one had looked whether there is one."""

    class Held:
        value = cupy.arange(3)
        events = [cupy.cuda.Event(), None]

        @property
        def ready(self):
            return self.events.pop(0)

    Held.events[0].record()
    assert scheduler.hardware.caller_value("x", 0, {0: Held()}) is Held.value


@pytest.mark.real
def test_a_run_may_end_when_all_is_queued(monkeypatch):
    """As CuPy's own functions do, recorded or not, but not where callbacks look at its steps."""
    monkeypatch.setattr(executor, "A_MOMENT", 10)

    def under_way():
        busy = not cupy.cuda.Stream.null.done
        cupy.cuda.Stream.null.synchronize()
        return busy

    ends = gpuscheduler.axis(0, 1, 200_000)
    for options in ({}, {"timeline": True}):
        with gpuscheduler.Scheduler(devices="cuda:0", **options):
            z = gpuscheduler.mesh(lambda y, x: np.sin(y + x), (ends, ends)).sum()
            first = float(z.compute())
            seen = []
            for _ in range(3):
                cupy.cuda.Stream.null.synchronize()
                value = z.compute()
                seen.append(under_way())
                assert float(value) == first
            assert any(seen)  # other processes may hold up this one
            z.to_backend("numpy").compute()
            with dask.callbacks.Callback(posttask=lambda *args: None):
                z.compute()
            assert not under_way()


def test_two_threads_that_look_for_what_is_done_find_each_step_once():
    class Over:
        @property
        def done(self):
            time.sleep(1e-4)  # another thread may come in between
            return True

        def synchronize(self):
            pass

    told, failed = [], []
    lane = cuda_lane.DeviceLane.create(0, 0)
    devices = [SimpleNamespace(tell=told.extend) for _ in range(2)]

    def look(wait):
        try:
            while len(told) < 100:
                lane.settle(wait)
                time.sleep(1e-5)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=look, args=(wait,)) for wait in (True, False, False)]
    for t in threads:
        t.start()
    for i in range(100):
        lane.queued.append((Over(), devices[i % 2], [i]))
        time.sleep(1e-4)
    for t in threads:
        t.join(20)
    lane.close()
    assert not failed
    assert sorted(e.step for e in told) == list(range(100))


def test_steps_that_take_longer_than_foreseen_are_waited_for_one_by_one():
    """What is known of a task is what it reads and makes, not how much it does."""
    lane = cuda_lane.DeviceLane.create(0, 0)
    try:
        assert lane.together == cuda_lane.MOST_TOGETHER
        for seconds, steps, then in (
            (1.0, 8, 4), (1.0, 4, 2), (1.0, 1, 1), (1.5 * cuda_lane.TOGETHER, 1, 1), (0.0, 1, 2),
            (0.0, 1, 2), (0.0, 2, 4), (0.0, 64, 8), (1.5 * cuda_lane.TOGETHER, 64, 8),
        ):  # fmt: skip
            lane.learn(steps, seconds)
            assert lane.together == then
    finally:
        lane.close()


@pytest.mark.parametrize("wait", [True, False])
def test_a_device_that_fails_says_so_however_it_is_asked(wait):
    class Broken:
        @property
        def done(self):
            raise cupy.cuda.runtime.CUDARuntimeError(700)

        synchronize = done.fget

    told = []
    lane = cuda_lane.DeviceLane.create(0, 0)
    try:
        devices = SimpleNamespace(tell=told.extend)
        lane.queued.append((Broken(), devices, [3, 4]))
        assert lane.settle(wait)
        assert not lane.settle(wait)
    finally:
        lane.close()
    ((failed, error),) = [(e.step, e.error) for e in told]
    assert failed == 3
    assert "700" in str(error) or "IllegalAddress" in str(error)


FAILING = """
import warnings
import cupy, dask, dask.array as da, numpy as np, pytest
import gpuscheduler
from gpuscheduler.devices.cuda import hardware
from gpuscheduler.errors import DeviceLost

bad = cupy.RawKernel('extern "C" __global__ void bad(float* x) { x[1ull << 44] = 1; }', "bad")

def broken(block):
    if block.size:
        bad((1,), (1,), (block,))
    return block

count = cupy.cuda.runtime.getDeviceCount()
last = count - 1
ones = da.ones((64, 64), chunks=16, dtype="f4").map_blocks(cupy.asarray)
with gpuscheduler.Scheduler("cuda") as s:
    kept = (ones + 1).persist()
    with dask.annotate(device=last):
        wrong = ones.map_blocks(broken, dtype="f4")
    total = wrong.sum()
    for turn in range(2):
        with pytest.raises(DeviceLost, match=f"cuda:{last} answers? no longer: cudaError") as error:
            total.compute()
        print(error.value)
    assert f"cuda:{last} answer" in repr(s)
with pytest.raises(DeviceLost):
    gpuscheduler.Scheduler(f"cuda:{last}")
lost = hardware.LOST.keys()  # with some drivers all that the process has used
with pytest.warns(RuntimeWarning, match="left out"), gpuscheduler.Scheduler("auto") as s:
    assert s.hardware.kind == ("cpu" if len(lost) == count else "cuda")
    assert float(da.ones((64, 64), chunks=16, dtype="f4").sum().compute()) == 64 * 64
if len(lost) == count:
    with pytest.warns(RuntimeWarning, match="left out"), pytest.raises(DeviceLost, match="'cpu'"):
        gpuscheduler.Scheduler("cuda")
with gpuscheduler.Scheduler("cpu:2"):
    assert float(da.ones(64, chunks=16).sum().compute()) == 64
print("went on")
"""


@pytest.mark.real
def test_a_device_whose_kernel_has_failed_is_lost():
    """In a process of its own, which goes on without it, and ends."""
    done = subprocess.run(
        [sys.executable, "-c", FAILING], capture_output=True, text=True, timeout=120
    )
    assert "went on" in done.stdout, done.stdout + done.stderr
    assert "To go on, use Scheduler(devices=" in done.stdout
    assert "gpuscheduler" not in done.stderr, done.stderr  # CuPy tells of modules that stay


@pytest.mark.skipif(not hasattr(cupy, "_device"), reason="a real GPU would be lost to other tests")
@pytest.mark.gpus(2)
@pytest.mark.parametrize("how", ["compute", "persist", "callback", "at once"])
def test_the_other_devices_go_on(how, x, capfd, monkeypatch):
    """Also where kernels fail behind a run that has ended."""
    monkeypatch.setattr(executor, "A_MOMENT", 10)
    fake = cupy._device

    def broken(block):
        if block.size and block.device.id == 1:
            fake.broken.add(1)
        return block

    threads = threading.active_count()
    try:
        with gpuscheduler.Scheduler("cuda") as s:
            a = cupy_array(x, 50)
            kept = (a + 1).persist()
            lazy = a.map_blocks(broken, dtype=x.dtype).sum()
            if how == "at once":
                lazy = (kept * 2).sum()
                lazy.compute(), lazy.compute()
                fake.broken.add(1)
            callback = dask.callbacks.Callback(pretask=lambda *args: None)
            call = lazy.persist if how == "persist" else lazy.compute
            for _ in range(2):
                answer = pytest.raises(DeviceLost, match="cuda:1 answers no longer: cudaErrorIll")
                with callback if how == "callback" else nullcontext(), answer:
                    call()
            assert "cuda:1 answers no longer" in repr(s)
        del kept, lazy
        with pytest.raises(DeviceLost, match="use Scheduler.devices='cuda:0"):
            gpuscheduler.Scheduler("cuda:0,1")
        with pytest.warns(RuntimeWarning, match="cuda:1 answers no longer: left out"):
            s = gpuscheduler.Scheduler("cuda")
        with s:
            assert 1 not in s.hardware.ids
            np.testing.assert_array_equal((a + 1).to_backend("numpy").compute(), x + 1)
    finally:
        fake.broken.clear()
        hardware.LOST.clear()
    end = time.monotonic() + PATIENCE
    while threading.active_count() > threads and time.monotonic() < end:
        gc.collect()
        time.sleep(0.01)
    assert threading.active_count() <= threads
    assert "Traceback" not in capfd.readouterr().err


def test_nested_and_from_many_threads(scheduler):
    def inner(block):
        return block + float(da.ones(16, chunks=4).sum().compute())

    a = da.zeros((8, 8), chunks=2).map_blocks(inner, meta=cupy.empty((0, 0)))
    assert (host(a.compute()) == 16).all()
    results = []

    def work():
        results.append(float(da.ones((64, 64), chunks=16).sum().compute()))

    threads = [threading.Thread(target=work) for _ in range(8)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert results == [4096.0] * 8


@pytest.mark.parametrize("devices", DEVICES)
def test_nothing_is_leaked(devices, x):
    before, threads = used_bytes(), threading.active_count()
    with gpuscheduler.Scheduler(devices=devices):
        a = cupy_array(x, 50)
        result = (a + a[::-1]).to_backend("numpy").compute()
        with pytest.raises(ZeroDivisionError):
            (a + a.map_blocks(lambda b: 1 // 0, meta=cupy.empty((0, 0)))).compute()
        del a, result
    assert used_bytes() == before
    assert threading.active_count() == threads


def test_callbacks_see_each_task_when_it_is_done(scheduler):
    from dask.diagnostics import Profiler

    a = da.ones((1024, 1024), chunks=256)
    with Profiler() as prof:
        float((a @ a).sum().compute())
    assert all(r.end_time > r.start_time for r in prof.results)
    assert len(prof.results) > 16


@pytest.mark.real
def test_links_are_measured(scheduler):
    links = scheduler.hardware.links()
    n = len(scheduler.hardware.machine.devices)
    assert len(links.gbs) == n
    assert all(h2d > 1 and d2h > 1 for h2d, d2h in links.host)


def test_an_array_on_a_gpu_that_is_not_used_is_fetched():
    if cuda_devices() < 2:
        pytest.skip("needs 2 CUDA devices")
    with cupy.cuda.Device(0):
        there = cupy.arange(1000.0)
        cupy.cuda.runtime.deviceSynchronize()
    with gpuscheduler.Scheduler(devices="cuda:1"):
        lazy = da.from_array(there, chunks=100, asarray=False)
        assert float((lazy + 1).sum().compute()) == 1000 * 999 / 2 + 1000


@pytest.mark.real
@pytest.mark.parametrize("dtype", ["f4", "u1", "c16"])
def test_large_blocks_beside_each_other_are_copied_to_their_places(dtype):
    """By a kernel, where rows begin at multiples of 16 bytes, and by CUDA where they do not."""
    x = cupy.arange(3072 * 3000).reshape(3072, 3000).astype(dtype)
    with gpuscheduler.Scheduler("cuda:0"):
        for chunks in (1024, (1024, 1000), (1024, 999), (3072, 16), (1000, 3000), (1500, 1500)):
            got = (da.from_array(x, chunks=chunks) + cupy.ones((), dtype)).compute()
            assert type(got) is cupy.ndarray
            assert bool((got == x + cupy.ones((), dtype)).all())
        cube = x[:, :2048].reshape(96, 32, 2048)
        got = (da.from_array(cube, chunks=(48, 16, 1024)) + cupy.ones((), dtype)).compute()
        assert bool((got == cube + cupy.ones((), dtype)).all())
