"""NumPy's arrays on GPUs and the host at once give the results of Dask's threads.

This holds wherever groups of tasks run. Called functions see what Dask's threads would give.
"""

import random
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")

import dask
import dask.array as da
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gpuscheduler
from gpuscheduler.fusion.task import KernelTask
from gpuscheduler.pipeline import choice, sides
from tests.gpu.test_numpy_arrays import NUMPY, PROGRAMS, A, blocks, called, programs, same
from tests.support.strategies import EXAMPLES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::gpuscheduler.errors.GpuUnused"),
]


class Coins:
    """Divides groups by lot, from a seed."""

    def __init__(self):
        self.seed, self.found = 0, []

    def __call__(self, division):
        draw = random.Random(self.seed)
        self.found = [
            host is None or (gpu is not None and draw.random() < 0.5)
            for gpu, host in zip(division.gpu, division.host, strict=True)
        ]
        return self.found


@pytest.fixture
def coins(monkeypatch):
    """Every division is taken; `coins.seed` says which one."""
    coins = Coins()
    monkeypatch.setattr(sides, "divide", coins)
    monkeypatch.setattr(sides, "BETTER", float("inf"))
    monkeypatch.setattr(choice, "LEAST_BYTES", 0)
    monkeypatch.setattr(choice, "LEAST_BLOCK", 0)
    monkeypatch.setattr(choice, "_choose_side", lambda *_: (choice.GPU, "by lot"))
    return coins


@pytest.fixture
def auto(coins):
    with gpuscheduler.Scheduler("cuda:0,0", check=True) as s, dask.config.set(NUMPY):
        s.coins = coins
        yield s


@pytest.mark.parametrize("name", PROGRAMS)
def test_any_division_gives_the_results_of_dasks_threads(auto, name):
    c = PROGRAMS[name](blocks())
    wanted = c.compute(scheduler="threads")
    for seed in range(2):
        auto.coins.seed = seed
        auto._planner.clear()
        same(c.compute(), wanted)
        same(c.compute(), wanted)  # by the plan that is kept
        assert not auto.last.where


@settings(
    max_examples=EXAMPLES, deadline=None, database=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
@given(programs(), st.integers(0, 10**6))
def test_called_functions_see_what_dasks_threads_give_them(auto, program, seed):
    x, told = program
    auto.coins.seed = seed
    wanted = x.compute(scheduler="threads")
    there = [dict(seen.facts) for seen in told]
    for seen in told:
        seen.facts.clear()
    got = x.compute()
    assert not auto.last.where
    same(got, wanted)
    for seen, facts in zip(told, there, strict=True):
        assert seen.facts == facts


def test_groups_are_on_both_sides(auto):
    auto.coins.seed = 3
    x = blocks()
    c = ((x * 2).map_blocks(called) + x.mean(axis=0)).rechunk((96, 40)).std(axis=0)
    plan = auto.plan(c)
    assert KernelTask in {type(step.task) for step in plan.steps}
    assert moved(plan)


# ---- what is chosen


def large():
    return da.from_array(np.ones((4096, 4096), "f4"), chunks=1024)


def costly(x):
    for _ in range(6):
        x = da.exp(da.sin(da.exp(-(x**2)) + 1))
    return x


@pytest.fixture
def s():
    with gpuscheduler.Scheduler("cuda:0,cpu:16") as s, dask.config.set(NUMPY):
        yield s


def moved(plan):
    return [s.task for s in plan.steps if getattr(s.task, "gpu_task", None) is not None]


def test_a_called_function_no_longer_keeps_kernels_from_gpus(s):
    plan = s.plan((costly(large()).map_blocks(called, dtype="f4") * 2 + 1).std(axis=0))
    text = str(plan)
    assert 'numpy="auto": on 1 GPU: they are faster; functions are called on the host' in text
    assert "host     16 of called: called (it needs the values of an array (tolist))" in text
    assert "GPU      16 of exp: kernel" in text
    assert not any("exp" in str(task.key) for task in moved(plan))


def test_a_cheap_step_beside_a_called_function_stays_on_the_host(s, monkeypatch):
    """Between functions that are called, the ways to a GPU and back take longer."""
    monkeypatch.setattr(choice, "_choose_side", lambda *_: (choice.GPU, "for this test"))
    x = costly(large()).map_blocks(called, dtype="f4")
    for _ in range(6):
        x = (x * 2 + 1).map_blocks(called, dtype="f4")
    c = costly(x)
    names = {task.key[0].rsplit("-", 1)[0] for task in moved(s.plan(c))}
    assert names == {"add"}
    text = str(s.explain(c))
    assert "of add: kernel (" in text
    assert "s on GPUs including copies)" in text


def test_a_division_is_left_where_the_host_is_as_fast(s):
    text = str(s.plan((large() * 2 + 1).map_blocks(called, dtype="f4")))
    assert "on the host: GPUs would save too little; functions are called on" in text


def test_a_value_of_the_host_that_both_sides_read_is_sent_once(auto):
    x = blocks(np.ones((200, 300)), chunks=100).map_blocks(called)
    c = (x + 1).sum(axis=0) + x.map_blocks(called).sum(axis=0)
    found = set()
    for seed in range(4):
        auto.coins.seed = seed
        auto._planner.clear()
        same(c.compute(), c.compute(scheduler="threads"))
        sent = [s.task.key[1:] for s in auto.plan(c).steps if getattr(s.task, "sends", False)]
        assert len(set(sent)) == len(sent)
        found.add(len(sent))
    assert found == {0, 6}


@pytest.mark.parametrize(("devices", "threads"), [("cuda:0,cpu:3", 3), ("cuda:0,0,cpu:1", 1)])
def test_so_many_threads_of_the_host_compute(devices, threads):
    running, most, lock = [0], [0], threading.Lock()

    def told(block):
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        time.sleep(0.02)
        with lock:
            running[0] -= 1
        return block

    x = (blocks() + 1).map_blocks(told)
    for mode in ("gpu", "host"):
        with gpuscheduler.Scheduler(devices, numpy=mode) as s, dask.config.set(NUMPY):
            assert s.host_threads == threads
            most[0] = 0
            same((x * 2).compute(), (A + np.float32(1)) * 2)
            assert 1 <= most[0] <= max(threads, len(s.hardware.machine.devices))


def test_without_threads_of_the_host_a_gpus_thread_computes():
    names = []

    def told(block):
        names.append(threading.current_thread().name)
        return block

    with gpuscheduler.Scheduler("cuda:0,cpu:0", numpy="host") as s, dask.config.set(NUMPY):
        same(blocks().map_blocks(told).compute(), A)
        assert s.host_threads == 0
        assert not s.last.where


def test_values_of_the_host_are_within_its_memory(monkeypatch):
    monkeypatch.setattr(choice, "PART_HOSTED", 0.0)
    with gpuscheduler.Scheduler("cuda:0") as s, dask.config.set(NUMPY):
        text = str(s.plan(costly(large()).map_blocks(called, dtype="f4").std(axis=0)))
        assert "the host has no room for what called functions make beside GPUs" in text


@pytest.mark.parametrize("room", [1.7, 4.0])
def test_a_run_waits_where_the_host_has_no_room_for_its_values(room):
    """Of each run the host makes all blocks; two have room beside one another, or not."""
    begun, waited, together = threading.Event(), threading.Event(), threading.Event()

    def first(block):
        np.lib.stride_tricks.as_strided(block, block.shape, block.strides)  # no kernel does this
        if begun.is_set():  # one block waits: the other threads are for the second run
            return block + 1
        begun.set()
        end = time.monotonic() + 60
        while not (together.is_set() or s._turns.waiting) and time.monotonic() < end:
            time.sleep(1e-3)
        if not together.is_set():
            waited.set()
        return block + 1

    def second(block):
        np.lib.stride_tricks.as_strided(block, block.shape, block.strides)
        together.set()
        return block + 1

    x = blocks()
    limit = int(room * A.nbytes)
    with (
        gpuscheduler.Scheduler("cuda:0", numpy="gpu", host_memory=limit) as s,
        dask.config.set(NUMPY),
    ):
        both = [(x * 2).map_blocks(f, meta=A[:0]) for f in (first, second)]
        wanted = A * np.float32(2) + 1
        with ThreadPoolExecutor(2) as pool:
            one = pool.submit(both[0].compute, scheduler=s.get)
            assert begun.wait(60)
            two = pool.submit(both[1].compute, scheduler=s.get)
            for done in (one, two):
                same(done.result(), wanted)
    assert waited.is_set() == (room < 2)


def test_modes_give_the_same_values():
    c = (costly(blocks()).map_blocks(called) + 1).std(axis=0)
    wanted = c.compute(scheduler="threads")
    for mode in ("auto", "gpu", "host"):
        with (
            gpuscheduler.Scheduler("cuda:0", numpy=mode),
            dask.config.set(NUMPY),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            same(c.compute(), wanted)
    assert A.shape == (96, 120)
