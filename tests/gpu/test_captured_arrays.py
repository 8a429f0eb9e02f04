"""Arrays that users' functions read beside their blocks: each GPU reads a copy of its own."""

import functools
import gc
import weakref
from time import sleep

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")

import dask.array as da
from dask._task_spec import DataNode

import gpuscheduler
from gpuscheduler.devices.choose import cuda_devices
from gpuscheduler.fusion.task import KernelTask
from gpuscheduler.plan.batching import Batch
from tests.fusion.test_captured_arrays import by_own_of, normed, scaled

pytestmark = pytest.mark.gpu

A = np.random.default_rng(0).normal(size=(96, 80))
W, V = np.linspace(1, 2, 80), np.arange(160.0)[::2]
SCALE = None  # on a GPU, while a test runs
ON_HOST = W.copy()
DEVICES = ["cuda:0", "cuda:0,0", *(["cuda:0,1"] if cuda_devices() > 1 else [])]


def x():
    return da.from_array(cupy.asarray(A), chunks=(7, 80))


def on(device, array):
    with cupy.cuda.Device(device):
        out = cupy.asarray(array)
        cupy.cuda.get_current_stream().synchronize()
    return out


def by_global(b):
    return b * SCALE - 1


def sends(b):
    return b * cupy.asarray(ON_HOST) + cupy.array(ON_HOST)[::-1]


FORMS = {
    "argument": (lambda x, w, v: x.map_blocks(scaled, w), A * W),
    "inside a chain": (
        lambda x, w, v: ((x + 1).map_blocks(scaled, w) * 2).sum(1), ((A + 1) * W * 2).sum(1),
    ),
    "keyword": (lambda x, w, v: x.map_blocks(scaled, w, k=v), A * W + V),
    "partial": (lambda x, w, v: x.map_blocks(functools.partial(scaled, w=w, k=v)), A * W + V),
    "global": (lambda x, w, v: x.map_blocks(by_global), A * V - 1),
    "closure": (lambda x, w, v: x.map_blocks(lambda b: b * w - v[::-1]), A * W - V[::-1]),
    "default": (lambda x, w, v: x.map_blocks(lambda b, w=w: b * w + 1), A * W + 1),
    "sent": (lambda x, w, v: x.map_blocks(sends), A * W + W[::-1]),
    "sent argument": (
        lambda x, w, v: x.map_blocks(lambda b, w: b * cupy.asarray(w) + 1, V, dtype="f8"),
        A * V + 1,
    ),
    "made by itself": (
        lambda x, w, v: x.map_blocks(by_own_of(cupy, 80)),
        A * [3, *range(1, 80)] + [5, *range(1, 80)],
    ),
    "reduced": (lambda x, w, v: x.map_blocks(normed, w), A * (W / W.sum()) + 1),
    "sum": (lambda x, w, v: x.map_blocks(scaled, w, k=v).sum(), (A * W + V).sum()),
}  # fmt: skip


def is_kernel(step):
    return step.sent or isinstance(step.task, (KernelTask, Batch, DataNode))


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore:The device where the array resides")  # CuPy's, to Dask's trial
@pytest.mark.parametrize("limit", [None, 120_000])
@pytest.mark.parametrize("where", [0, pytest.param(1, marks=pytest.mark.gpus(2))])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("devices", DEVICES)
def test_they_are_read_by_kernels(devices, form, where, limit, monkeypatch):
    """Also of a GPU that the scheduler has not, and where there is little room."""
    monkeypatch.setitem(globals(), "SCALE", on(where, V))
    make, want = FORMS[form]
    with gpuscheduler.Scheduler(devices=devices, memory_limit=limit) as s:
        y = make(x(), on(where, W), on(where, V.copy()))
        assert all(map(is_kernel, s.plan(y).steps))
        for _ in range(3):
            np.testing.assert_allclose(cupy.asnumpy(y.compute()), want, rtol=1e-12)
        z = x().persist()
        y = make(z, on(where, W), on(where, V.copy()))
        for _ in range(3):
            np.testing.assert_allclose(cupy.asnumpy(y.compute()), want, rtol=1e-12)


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("form", ["argument", "global", "closure", "sent"])
def test_they_are_read_when_a_task_runs(devices, form, monkeypatch):
    """What the caller's stream writes to one in between is seen, in a plan that is known, too."""
    make, _ = FORMS[form]
    w, v, host = on(0, np.ones(80)), on(0, np.zeros(80)), np.ones(80)
    monkeypatch.setitem(globals(), "SCALE", v)
    monkeypatch.setitem(globals(), "ON_HOST", host)
    with gpuscheduler.Scheduler(devices=devices):
        z = x().persist()
        for y in (make(x(), w, v), make(z, w, v)):
            for k in range(4):
                big = cupy.zeros(2_000_000)
                for _ in range(20):  # so that the caller's stream has something to do before
                    big += k
                w[:], v[:], host[:] = big[:80] + 1, big[:80] + k, k
                wk, vk = np.full(80, 20.0 * k + 1), np.full(80, 21.0 * k)
                want = {
                    "argument": A * wk, "global": A * vk - 1, "closure": A * wk - vk,
                    "sent": A * k + k,
                }[form]  # fmt: skip
                np.testing.assert_allclose(cupy.asnumpy(y.compute()), want, rtol=1e-12)
                w[:], v[:] = 1, 0


def test_numpys_with_cupys_blocks():
    """CuPy refuses them; a kernel reads what was sent."""
    with gpuscheduler.Scheduler(devices="cuda:0,0") as s:
        y = x().map_blocks(scaled, W, dtype="f8", meta=cupy.empty((0, 0)))
        assert all(map(is_kernel, s.plan(y).steps))
        np.testing.assert_allclose(cupy.asnumpy(y.compute()), A * W)


def test_on_the_host_they_stay_there():
    with gpuscheduler.Scheduler(devices="cuda:0,0") as s:
        y = da.from_array(A, chunks=(7, 80)).map_blocks(scaled, W)
        assert not any(t.sent and t.key[0] == "beside" for t in s.plan(y).steps)
        np.testing.assert_allclose(y.compute(), A * W)


def test_nothing_stays():
    with gpuscheduler.Scheduler(devices="cuda:0,0"):
        pool = cupy.get_default_memory_pool()
        z = x().persist()
        gc.collect()
        before = pool.used_bytes()
        for _ in range(3):
            w = on(0, np.ones(80))
            float(z.map_blocks(scaled, w).sum().compute())
            float(z.map_blocks(sends).sum().compute())
            del w
        gc.collect()
        assert pool.used_bytes() <= before + 512


@pytest.mark.usefixtures("only_new_garbage")
@pytest.mark.parametrize("persisted", [False, True])
@pytest.mark.parametrize("form", ["argument", "partial", "closure", "sum", "on host"])
@pytest.mark.parametrize("devices", DEVICES)
def test_those_of_each_round(devices, form, persisted, planned):
    """A collection with others in their place is not planned again, and none stay."""

    def make(z, w, v):
        if form == "on host":
            return z.map_blocks(lambda b: b * cupy.asarray(w) - cupy.asarray(v)[::-1], dtype="f8")
        return FORMS[form][0](z, w, v)

    want = {
        "argument": lambda w, v: A * w,
        "partial": lambda w, v: A * w + v,
        "sum": lambda w, v: (A * w + v).sum(),
    }.get(form, lambda w, v: A * w - v[::-1])
    with gpuscheduler.Scheduler(devices=devices) as s:
        z = x().persist() if persisted else x()
        planned.clear()
        for k in range(6):
            host = np.arange(80.0) + k, np.arange(80.0) * k
            w, v = [a.copy() if form == "on host" else on(0, a) for a in host]
            gone = weakref.ref(w)
            y = make(z, w, v)
            for _ in range(2):
                got = cupy.asnumpy(y.compute())
                np.testing.assert_allclose(got, want(*host), rtol=1e-12)
            assert all(map(is_kernel, s.plan(y).steps))
            del w, v, y
            for _ in range(200):  # threads let go of what they held
                gc.collect()
                if gone() is None:
                    break
                sleep(0.01)
            assert gone() is None
    assert len(planned) == 1
