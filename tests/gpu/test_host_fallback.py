"""What CuPy refuses is computed by several threads of the host, while devices go on."""

from __future__ import annotations

import threading
import time
import warnings
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace

import cupy
import dask
import dask.array as da
import numpy as np
import pytest

from gpuscheduler import Scheduler
from gpuscheduler.devices.cuda import (
    host_steps,
    lane_orders,
    numpy_fallback,
    result_rooms,
    task_launch,
)
from gpuscheduler.fusion.task import KernelTask
from gpuscheduler.plan.batching import Batch
from gpuscheduler.runtime import events

A = np.random.default_rng(0).random((24, 24))

pytestmark = pytest.mark.filterwarnings("ignore:.*runs on the host:RuntimeWarning")


def blocks(chunks=(4, 6)):
    return da.from_array(A, chunks=chunks).map_blocks(cupy.asarray).persist()


def mapped(f, *xs, **kwargs):
    return da.map_blocks(
        f, *xs, dtype="f8", meta=cupy.empty((0, 0)), name=kwargs.pop("name", None), **kwargs
    )


def refused(block):
    """A copy that NumPy makes, of nothing but its own arrays."""
    return np.random.default_rng(0).permuted(block[..., None], axis=-1)[..., 0]


@pytest.mark.parametrize("devices", ["cuda:0", "cuda:0,0"])
def test_blocks_beside_each_other(devices):
    lock, now, most = threading.Lock(), [0], [0]

    def slow(block):
        block = refused(block)
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(0.02)
        with lock:
            now[0] -= 1
        return block * 2

    with Scheduler(devices=devices) as scheduler:
        scheduler.hardware.host_threads = 3
        y = mapped(slow, blocks())
        assert "no kernel: 24 of slow" in str(scheduler.plan(y))
        for _ in range(2):
            most[0] = 0
            np.testing.assert_array_equal(cupy.asnumpy(y.compute()), A * 2)
            assert 1 < most[0] <= 3 * len(devices.split(","))


@pytest.fixture
def refusals(monkeypatch):
    out, found = [], events.NoRoom
    monkeypatch.setattr(lane_orders, "NoRoom", lambda *args: out.append(args) or found(*args))
    return out


def test_what_reads_them_waits_and_what_does_not_goes_on(refusals):
    """One device, in whose queue the steps that follow already are."""
    begun, other = threading.Event(), threading.Event()

    def waits(block):
        block = refused(block)
        if begun.is_set():  # the first of its kind is called by the device's thread
            assert other.wait(30)
        begun.set()
        return block

    def goes_on(block):
        if begun.is_set():
            other.set()
        return block - cupy.float64(1)

    with Scheduler(devices="cuda:0"):
        x = blocks((12, 24))
        y = mapped(lambda b: (b * 3).cumsum(axis=0), mapped(waits, x))
        z = mapped(goes_on, x)
        for _ in range(2):
            got = da.concatenate([y, z]).compute()
            want = np.concatenate([(A[:12] * 3).cumsum(0), (A[12:] * 3).cumsum(0), A - 1])
            np.testing.assert_allclose(cupy.asnumpy(got), want)
    assert not refusals


class Steps:
    """Arrays made of each other by steps of which the host does some."""

    def __init__(self, rng):
        self.rng = rng
        self.arrays = [(blocks(), A)]

    def grow(self):
        rng = self.rng
        x, a = self.arrays[rng.integers(len(self.arrays))]
        y, b = self.arrays[rng.integers(len(self.arrays))]
        n = int(rng.integers(6))
        if n == 0:
            self.add(mapped(lambda v: refused(v) * 0.5, x), a * 0.5)
        elif n == 1:
            self.add(mapped(lambda v, w: refused(v) - refused(w).T.T, x, y), a - b)
        elif n == 2:
            self.add(x * y + 1, a * b + 1)
        elif n == 3:
            self.add(x.T.rechunk((4, 6)), a.T)
        elif n == 4:
            z = y.sum(keepdims=True)
            self.add(mapped(lambda v, w: refused(v) * float(w.sum()), x, z), a * b.sum())
        else:
            self.add(mapped(lambda v: v.T.copy().T + cupy.sqrt(abs(v)), x), a + np.sqrt(abs(a)))

    def add(self, x, a):
        scale = max(1.0, abs(a).max())
        self.arrays.append((x / scale, a / scale))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("options", [{}, {"memory_limit": 60_000}, {"check": True}])
def test_some_steps_of_many(seed, options, refusals):
    rng = np.random.default_rng(seed)
    with Scheduler(devices=["cuda:0", "cuda:0,0"][seed % 2], **options):
        steps = Steps(rng)
        for _ in range(10):
            steps.grow()
        chosen = steps.arrays[-3:]
        for _ in range(3):
            got = da.compute(*[x for x, _ in chosen])
            for g, (_, a) in zip(got, chosen, strict=True):
                np.testing.assert_allclose(cupy.asnumpy(g), a, rtol=1e-12, atol=1e-12)
    assert not refusals or "memory_limit" in options


def test_a_step_that_is_launched_behind_its_readers(monkeypatch):
    """J and K are computed by the host, a reads J, and b reads a and K. J is refused while K is
    away, so that it and a are launched anew, behind b."""
    again, late, tried, calls, is_second = threading.Event(), threading.Event(), [], [], []

    def first(x):
        x = refused(x)
        calls.append(1)
        if is_second and len(calls) == 2:
            again.set()  # the first refusal is over
        if is_second and len(calls) == 3:
            assert late.wait(30)
            time.sleep(0.2)
        return x + 1

    def second(x):
        x = refused(x)
        if is_second:
            assert again.wait(30)
            time.sleep(0.2)
            late.set()
        return x * 2

    def sent(value):
        if is_second and value[0, 0] == A[0, 0] + 1 and len(tried) < 2:
            tried.append(1)
            raise cupy.cuda.memory.OutOfMemoryError(10, 10, 10)
        return found(value)

    found = numpy_fallback.send_value
    monkeypatch.setattr(host_steps, "send_value", sent)
    with Scheduler(devices="cuda:0", fuse=False):
        x = dask.delayed(cupy.asarray)(A).persist()
        j, k = dask.delayed(first)(x), dask.delayed(second)(x)
        a = dask.delayed(lambda v: v * 3)(j)
        b = dask.delayed(lambda v, w: v - w)(a, k)
        for _ in range(2):
            calls.clear()
            got, *_ = dask.compute(b, a, j, k)
            np.testing.assert_allclose(cupy.asnumpy(got), (A + 1) * 3 - A * 2)
            is_second.append(1)
    assert len(tried) == 2


@pytest.mark.parametrize("devices", ["cuda:0", "cuda:0,0", "cuda:0,1"])
@pytest.mark.parametrize("how", ["joined", "crossing", "alone"])
@pytest.mark.parametrize("stream", [False, True])
def test_what_a_task_brings_to_the_device_itself(monkeypatch, devices, how, stream):
    if "1" in devices and cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("it takes two devices")
    a = np.random.default_rng(0).random((240, 240))

    def sends(block):
        block = np.repeat(refused(block), 2, axis=1)
        if stream:
            cupy.cuda.Stream(non_blocking=True).use()
        return cupy.asarray(block)[:, ::2]

    monkeypatch.setattr(result_rooms, "LEAST_WHOLE", 1)
    with Scheduler(devices=devices):
        x = da.from_array(a, chunks=(20, 40)).map_blocks(cupy.asarray).persist()
        y, want = mapped(sends, x), a
        if how == "crossing":
            y, want = mapped(lambda v, w: v + w, y, y[:, ::-1].rechunk(y.chunks)), a + a[:, ::-1]
        elif how == "alone":
            y, want = mapped(lambda b: b * 2, y), a * 2
        for _ in range(4):
            np.testing.assert_array_equal(cupy.asnumpy(y.compute()), want)


def turned(block):
    """Of another type than the collection says, if it is of the lower half."""
    return block.astype("f4") if float(block[0, 0]) > 5 else block


LOWER = A + np.repeat([0.0, 10.0], 12)[:, None]


def test_batches_of_which_one_is_refused():
    """Those of other programs stay on the device."""
    with Scheduler(devices="cuda:0", fuse_least=0) as scheduler:
        x = da.from_array(LOWER, chunks=(4, 6)).map_blocks(cupy.asarray).persist()
        z = mapped(turned, x).map_blocks(
            lambda b: np.asarray(b) + 1.0, dtype="f8", meta=cupy.empty((0, 0))
        )
        y, z, want = x.sum(), z.sum(), [LOWER.sum(), (LOWER + 1).sum()]
        for _ in range(4):
            got = da.compute(y, z)
            np.testing.assert_allclose([float(g) for g in got], want, rtol=1e-5)
        plan = scheduler.plan(y, z)
        kinds = {s.kind for s in plan.steps if type(s.task) is Batch}
    assert plan.history.hosted & kinds
    assert kinds - plan.history.hosted


@pytest.mark.parametrize("one_fails", [False, True])
def test_little_memory_of_devices_and_none_of_the_host(one_fails):
    """What the host computes holds no room that the device's thread waits for."""
    n, calls, lock = 32, [], threading.Lock()
    a = np.random.default_rng(1).random((10 * n, 10 * n))

    def fails(block):
        block = refused(block)
        with lock:
            calls.append(1)
            last = len(calls) == 50
        time.sleep(0.005)
        if last and one_fails:
            raise KeyError("of its own")
        return block

    limits = {"memory_limit": 24 * n * n * 8, "host_memory": 0}
    with Scheduler(devices="cuda:0", fuse=False, **limits):
        x = mapped(lambda b: b + 0.0, da.from_array(a, chunks=n).map_blocks(cupy.asarray)).persist()
        z = mapped(fails, x)
        w = (z - z.mean()).sum(axis=0)
        if one_fails:
            with pytest.raises(KeyError, match="of its own"):
                w.compute()
        got = cupy.asnumpy(w.compute())
        np.testing.assert_allclose(got, (a - a.mean()).sum(axis=0), atol=1e-9)


def test_nothing_of_a_run_that_has_failed_stays():
    begun, ended = threading.Event(), []

    def stuck(block):
        block = refused(block)
        if "host" in threading.current_thread().name:
            begun.set()
            time.sleep(0.1)
            ended.append(1)
        return block

    def fails(block):
        assert begun.wait(30)
        raise RuntimeError("another fails")

    runs = []
    with Scheduler(devices="cuda:0,0") as scheduler:
        lease = scheduler.hardware.lease

        @contextmanager
        def leased(*args):
            with lease(*args) as found:

                def devices(*given):
                    made = found.devices(*given)
                    runs.append(made)
                    return made

                yield replace(found, devices=devices)

        x = blocks()
        y = da.concatenate([mapped(stuck, x), mapped(fails, x[:4, :6])[:, :1].repeat(24, axis=1)])
        scheduler.hardware.lease = leased
        with pytest.raises(RuntimeError, match="another fails"):
            y.compute()
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline and (runs[-1].run.team.is_busy or not ended):
            time.sleep(0.01)
        assert not runs[-1].host_steps.made
        assert not runs[-1].host_steps.given


def test_an_error_on_the_host_is_of_its_key():
    def fails(block):
        block = refused(block)
        if block[0, 0] == A[8, 6]:
            raise KeyError("no such block")
        return block

    with Scheduler(devices="cuda:0"):
        y = mapped(fails, blocks(), name="fails")
        for _ in range(3):
            with pytest.raises(KeyError, match="no such block") as caught:
                y.compute()
        assert "('fails', 2, 1)" in "".join(caught.value.__notes__)
        np.testing.assert_array_equal(cupy.asnumpy(mapped(refused, blocks()).compute()), A)


def test_memory_that_is_refused_for_what_the_host_has_made(monkeypatch):
    tried = []

    def sent(value):
        tried.append(threading.current_thread().name)
        if len(tried) in (3, 5, 6):
            raise cupy.cuda.memory.OutOfMemoryError(10, 10, 10)
        return found(value)

    found = numpy_fallback.send_value
    monkeypatch.setattr(host_steps, "send_value", sent)
    with Scheduler(devices="cuda:0"):
        y = mapped(refused, blocks())
        np.testing.assert_array_equal(cupy.asnumpy(y.compute()), A)
    assert sum("host" in name for name in tried) > 16


def test_a_run_that_ends_while_the_host_computes():
    begun = threading.Event()

    def stuck(block):
        block = refused(block)
        if block[0, 0] == A[0, 0]:
            return block
        begun.set()
        time.sleep(0.2)
        return block

    def fails(block):
        assert begun.wait(30)
        raise RuntimeError("another fails")

    with Scheduler(devices="cuda:0,0"):
        x = blocks()
        y = da.concatenate([mapped(stuck, x), mapped(fails, x[:4, :6])[:, :1].repeat(24, axis=1)])
        with pytest.raises(RuntimeError, match="another fails"):
            y.compute()
        np.testing.assert_array_equal(cupy.asnumpy(mapped(refused, x).compute()), A)


def test_arrays_in_another_order_than_a_kernel_foresees():
    """A task that is none leaves a view: it is copied, and read by kernels, not by CuPy."""

    def turned(block):
        if float(block[0, 0]) < 2:  # which nobody follows
            return cupy.ascontiguousarray(block.T).T
        return block

    with Scheduler(devices="cuda:0") as scheduler, warnings.catch_warnings():
        warnings.simplefilter("error")
        y = mapped(turned, blocks())
        for what in (lambda v: v + 1, lambda v: v.sum(axis=0), lambda v: v[:, ::-1] * 2):
            # 0 as an array of NumPy's, beside CuPy's, which CuPy refuses
            z = da.where(y > 0.5, y, mapped(lambda b: np.where(b > 3, np.array(0.0), b), y))
            got = what(z).compute()
            kinds = [type(s.task) for s in scheduler.plan(what(z)).steps]
            assert {KernelTask, Batch} & set(kinds)
            np.testing.assert_allclose(cupy.asnumpy(got), what(A), rtol=1e-12)


def test_a_callback_sees_a_step_once_that_is_refused_and_comes_again(monkeypatch):
    computed, tried, seen = task_launch.compute, Counter(), []

    def refuses(run, lane, task, *args):
        tried[id(task)] += 1
        if len(tried) % 3 == 1 and tried[id(task)] <= 2:  # twice, or it is only tried again
            raise cupy.cuda.memory.OutOfMemoryError(10, 10, 10)
        return computed(run, lane, task, *args)

    monkeypatch.setattr(task_launch, "compute", refuses)
    callback = dask.callbacks.Callback(pretask=lambda key, *_: seen.append(key))
    with Scheduler(devices="cuda:0"), callback:
        y = mapped(lambda b: b + 1, da.from_array(A, chunks=(4, 6)).map_blocks(cupy.asarray))
        np.testing.assert_array_equal(cupy.asnumpy(y.compute()), A + 1)
    assert max(tried.values()) == 3
    assert len(seen) == len(set(seen))


@pytest.mark.gpus(2)
def test_what_is_joined_from_another_device_is_read_before_its_memory_is_used_again():
    with Scheduler(devices="cuda:0,1") as scheduler:
        for n in range(20):
            with cupy.cuda.Device(1):
                parts = [cupy.full((512, 512), n + k, "f4") for k in range(2)]
                cupy.cuda.Device(1).synchronize()
            got = scheduler.hardware.join([[parts[0]], [parts[1]]])
            del parts
            with cupy.cuda.Device(1):
                again = [cupy.full((512, 512), -1, "f4") for k in range(2)]
            np.testing.assert_array_equal(cupy.asnumpy(got)[:, 0], np.repeat([n, n + 1], 512))
            del again
