"""Threads of CPU devices with nothing to do take what waits for others."""

from __future__ import annotations

import threading

import dask
import dask.array as da
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuscheduler import Scheduler
from tests.support.strategies import thorough


@pytest.fixture
def always_long(monkeypatch):
    monkeypatch.setattr("gpuscheduler.devices.cpu.LONG", -1.0)


def test_idle_threads_take_what_waits_behind_a_slow_step(always_long):
    """The first block is done when all others are: those behind it in its queue, too."""
    others = threading.Semaphore(0)

    def slow(block, block_info=None):
        if block_info[0]["chunk-location"] == (0,):
            assert all(others.acquire(timeout=60) for _ in range(7))
        else:
            others.release()
        return block + 1

    x = da.from_array(np.arange(8), chunks=1).map_blocks(slow, dtype=int)
    with Scheduler("cpu:2") as s:
        np.testing.assert_array_equal(x.compute(scheduler=s.get), np.arange(8) + 1)


def test_pinned_steps_are_taken_by_nobody(always_long):
    def name(n):
        return threading.current_thread().name[-1]

    with dask.annotate(device=1):
        every = [dask.delayed(name, pure=False)(n) for n in range(30)]
    with Scheduler("cpu:3") as s:
        assert {*dask.compute(*every, scheduler=s.get)} == {"1"}


@given(st.data())
@thorough
def test_whoever_runs_a_step_values_are_the_same(data):
    """Of any graph, where some steps are refused memory the first time, and steps are long."""
    n = data.draw(st.integers(1, 40))
    reads = [
        data.draw(st.lists(st.integers(0, i - 1), max_size=3, unique=True)) if i else []
        for i in range(n)
    ]
    refused = data.draw(st.sets(st.integers(0, n - 1), max_size=4))
    left = dict.fromkeys(refused)

    def add(i, *values):
        if left.pop(i, i) is None:
            raise MemoryError
        return sum(values) + i

    dsk = {f"t{i}": (add, i, *[f"t{j}" for j in reads[i]]) for i in range(n)}
    wanted = [0] * n
    for i in range(n):
        wanted[i] = i + sum(wanted[j] for j in reads[i])
    window = data.draw(st.sampled_from([1, 4, 64]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gpuscheduler.devices.cpu.LONG", -1.0)
        with Scheduler("cpu:3", window=window, check=True) as s:
            assert list(s.get(dsk, [f"t{i}" for i in range(n)])) == wanted
