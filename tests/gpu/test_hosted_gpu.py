"""What CuPy refuses is computed by several threads of the host, while devices go on."""

from __future__ import annotations

import threading
import time
import warnings

import cupy
import dask.array as da
import numpy as np
import pytest

from gpuscheduler import Scheduler, cuda
from gpuscheduler.batches import Batch
from gpuscheduler.fuse import Fused

A = np.random.default_rng(0).random((24, 24))
META = cupy.empty((0, 0))

pytestmark = pytest.mark.filterwarnings("ignore:.*runs on the host:RuntimeWarning")


def blocks(chunks=(4, 6)):
    return da.from_array(A, chunks=chunks).map_blocks(cupy.asarray).persist()


def mapped(f, *xs, **kwargs):
    return da.map_blocks(f, *xs, dtype="f8", meta=META, name=kwargs.pop("name", None), **kwargs)


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
        scheduler.hardware.hosts = 3
        y = mapped(slow, blocks())
        assert "no kernel: 24 of slow" in str(scheduler.plan(y))
        for _ in range(2):
            most[0] = 0
            np.testing.assert_array_equal(cupy.asnumpy(y.compute()), A * 2)
            assert 1 < most[0] <= 3 * len(devices.split(","))


@pytest.fixture
def refusals(monkeypatch):
    out, found = [], cuda.NoRoom
    monkeypatch.setattr(cuda, "NoRoom", lambda *args: out.append(args) or found(*args))
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

    found = cuda.sent
    monkeypatch.setattr(cuda, "sent", sent)
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
            assert {Fused, Batch} & set(kinds)
            np.testing.assert_allclose(cupy.asnumpy(got), what(A), rtol=1e-12)
