"""Nothing that a task has made waits for the garbage collector, also where the task fails."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from contextlib import suppress

import dask
import dask.array as da
import numpy as np
import pytest

from gpuscheduler import Scheduler, linalg


@pytest.fixture
def no_collection():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def alive(refs):
    """How many are there still, once threads have had time to end their calls."""
    end = time.monotonic() + 30
    while True:
        found = sum([ref() is not None for ref in refs])
        if not found or time.monotonic() > end:
            return found
        time.sleep(0.01)


@pytest.mark.parametrize("devices", ["cpu:1", "cpu:3"])
@pytest.mark.parametrize("many", [1, 6])
@pytest.mark.usefixtures("no_collection")
def test_a_failed_task_leaves_nothing(devices, many):
    refs = []

    def fail(block):
        made = block * 2
        refs.extend([weakref.ref(block), weakref.ref(made)])
        raise ValueError(made.shape)

    x = da.from_array(np.ones((6 * many, 4)), chunks=(6, 4))
    with Scheduler(devices):
        for _ in range(2):
            y = (x + 1).map_blocks(fail, dtype=float, meta=np.empty((0, 0)))
            with suppress(ValueError):  # `pytest.raises` would keep the error
                (y * 2).sum().compute()
            assert refs
            assert not alive(refs)


class Blocks:
    """Blocks of a function, or an array that is read: one fails at once, others after the run."""

    shape, dtype, ndim = (6, 4), np.dtype(float), 2

    def __init__(self):
        self.begun, self.over, self.refs = threading.Event(), threading.Event(), []

    def fail(self, is_first, block):
        self.refs.append(weakref.ref(block))
        if is_first:
            assert self.begun.wait(60)
        else:
            self.begun.set()
            assert self.over.wait(60)
        raise ValueError("first" if is_first else "late")

    def compute_block(self, block, block_id=None):
        return self.fail(block_id == (0, 0), block * 2)

    def __getitem__(self, where):
        return self.fail(where[0].start == 0, np.ones(4))


@pytest.mark.parametrize("how", ["function", "array"])
@pytest.mark.usefixtures("no_collection")
def test_what_fails_after_the_run_leaves_nothing(how):
    blocks = Blocks()
    with Scheduler("cpu:3"):
        if how == "array":
            x = da.from_array(blocks, chunks=(2, 4), asarray=False, meta=np.empty((0, 0)))
        else:
            x = da.ones((6, 4), chunks=(2, 4))
            x = x.map_blocks(blocks.compute_block, dtype=float, meta=np.empty((0, 0)))
        with suppress(ValueError):
            (x + 1).sum().compute()
        blocks.over.set()
        assert len(blocks.refs) > 1
        assert not alive(blocks.refs)


@pytest.mark.usefixtures("no_collection")
def test_a_failed_task_of_threads_of_the_host_leaves_nothing():
    refs = []

    @dask.delayed
    def fail(block):
        refs.append(weakref.ref(block))
        raise KeyError("x")

    with Scheduler("cpu:2"):
        with suppress(KeyError):
            dask.compute([fail(da.ones(5, chunks=5)) for _ in range(3)])
        assert refs
        assert not alive(refs)


@pytest.mark.usefixtures("no_collection")
def test_substitution_by_halves_leaves_nothing(monkeypatch):
    """For tall matrices that need more than one step, by functions that call themselves."""
    from gpuscheduler.algorithms import tall_kernel

    refs = []
    multiply = tall_kernel._multiply_columns

    def seen(target, *args, **options):
        refs.append(weakref.ref(target))
        return multiply(target, *args, **options)

    monkeypatch.setattr(tall_kernel, "_multiply_columns", seen)
    numbers = np.random.default_rng(0).standard_normal((4000, 300))
    numbers[:, 1] = numbers[:, 0] * (1 + 1e-7) + 1e-7 * numbers[:, 1]
    with Scheduler("cpu:1"):
        r = linalg.qr(da.from_array(numbers, chunks=(1000, 300)))[1].compute()
    assert np.isfinite(r).all()
    assert refs
    assert not alive(refs)
