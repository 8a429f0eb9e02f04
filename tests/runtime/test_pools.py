"""Pools that callers hand over: each kind gives Dask's values, and none is waited for for ever."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from concurrent.futures import (
    BrokenExecutor,
    Executor,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
)
from multiprocessing.pool import Pool, ThreadPool

import dask
import dask.array as da
import dask.bag as db
import numpy as np
import pytest
from dask.callbacks import Callback
from dask.local import SynchronousExecutor

from gpuscheduler import Scheduler
from gpuscheduler.runtime.pools import CallersPool

PATIENCE = 120


def outcome(call):
    """What a call gives or raises; the test fails, and does not hang, where it does neither."""
    out = []

    def attempt():
        try:
            out.append(call())
        except BaseException as error:
            out.append(error)

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert out, "neither a value nor an error"
    return out[0]


class Around(Executor):
    """An executor of a class that nobody knows."""

    def __init__(self, pool):
        self.pool, self._max_workers = pool, pool._max_workers

    def submit(self, fn, /, *args, **kwargs):
        return self.pool.submit(fn, *args, **kwargs)


class Uncounted(Around):
    """... and that does not say how many workers it has."""

    def __init__(self, pool):
        self.pool = pool


class Unlike(Around):
    """... and that is no key of a dictionary."""

    __hash__ = None


SPAWN = multiprocessing.get_context("spawn")
THREADS = {
    "ThreadPoolExecutor": lambda: ThreadPoolExecutor(2),
    "ThreadPool": lambda: ThreadPool(2),
    "SynchronousExecutor": SynchronousExecutor,
    "unknown": lambda: Around(ThreadPoolExecutor(2)),
    "uncounted": lambda: Uncounted(ThreadPoolExecutor(2)),
    "unhashable": lambda: Unlike(ThreadPoolExecutor(2)),
}
PROCESSES = {
    "ProcessPoolExecutor": lambda: ProcessPoolExecutor(1, SPAWN),
    "Pool": lambda: Pool(1, context=SPAWN),
    "unknown, of processes": lambda: Around(ProcessPoolExecutor(1, SPAWN)),
}
KINDS = THREADS | PROCESSES


def shut(pool):
    if isinstance(pool, Pool):
        pool.terminate()
    elif isinstance(pool, Around):
        pool.pool.shutdown()
    else:
        pool.shutdown()


@pytest.fixture(scope="module", params=KINDS)
def pool(request):
    made = KINDS[request.param]()
    yield made
    shut(made)


def local(n):
    """Something that `pickle` refuses, and Dask's processes take."""
    return lambda x: x + n


COLLECTIONS = {
    "array": lambda: (da.arange(100, chunks=30) * 2).sum(),
    "bag": lambda: db.range(10, npartitions=4).map(local(1)).sum(),
    "delayed": lambda: dask.delayed(local(3))(dask.delayed(abs)(-4)),
    "blocks": lambda: da.ones((40, 40), chunks=20).map_blocks(local(2)),
}


@pytest.mark.parametrize("collection", COLLECTIONS)
@pytest.mark.parametrize("how", ["keyword", "configuration"])
def test_every_kind_of_pool_gives_the_values_of_dask(pool, collection, how):
    x = COLLECTIONS[collection]()
    want = x.compute(scheduler="sync")
    with Scheduler("cpu:2") as s, dask.config.set(pool=pool if how == "configuration" else None):
        options = {"pool": pool} if how == "keyword" else {}
        np.testing.assert_array_equal(outcome(lambda: x.compute(**options)), want)
        persisted = outcome(lambda: x.persist(**options))
        np.testing.assert_array_equal(persisted.compute(scheduler="sync"), want)
        assert not s._turns.running


def test_tasks_run_where_the_pool_is(pool, request):
    with Scheduler("cpu:2"):
        pid = outcome(lambda: dask.delayed(os.getpid)().compute(pool=pool))
    kind = request.node.callspec.params["pool"]
    assert (pid == os.getpid()) == (kind in THREADS)


def test_a_tasks_error_comes_out_of_every_pool_as_its_own(pool):
    with Scheduler("cpu:2"):
        error = outcome(lambda: dask.delayed(int)("five").compute(pool=pool))
    assert isinstance(error, ValueError)
    assert "five" in str(error)


def test_callbacks_and_a_cache_see_what_runs_on_every_pool(pool):
    seen, cache = [], {}
    x = da.arange(100, chunks=30).map_blocks(local(1))
    with Scheduler("cpu:2"), Callback(pretask=lambda key, *_: seen.append(key)):
        got = outcome(lambda: x.compute(pool=pool, cache=cache))
    np.testing.assert_array_equal(got, np.arange(100) + 1)
    assert seen
    assert cache


@pytest.mark.parametrize("of_one", [lambda: ThreadPoolExecutor(1), lambda: ThreadPool(1)])
def test_a_computation_in_a_task_does_not_wait_for_its_own_thread(of_one):
    def inner(x):
        return int((da.ones(10, chunks=5) * x).sum().compute())

    pool = of_one()
    with Scheduler("cpu:2"), dask.config.set(pool=pool):
        assert outcome(lambda: dask.delayed(inner)(3).compute()) == 30
        assert outcome(lambda: dask.delayed(lambda: inner(2) + inner(1))().compute()) == 30
    shut(pool)


@pytest.mark.parametrize("nothing", [5, "threads", object()])
def test_what_is_no_pool_is_refused_in_words(nothing):
    with Scheduler("cpu:2"), pytest.raises(TypeError, match="is no pool"):
        da.ones(4).sum().compute(pool=nothing)


# ---- pools that fail


class Failing(Executor):
    """Runs what it is given at once, and fails from the `n`-th on, in one of several ways."""

    def __init__(self, how, n):
        self.how, self.left, self._max_workers = how, n, 2

    def submit(self, fn, /, *args, **kwargs):
        future, self.left = Future(), self.left - 1
        if self.left >= 0:
            future.set_result(fn(*args, **kwargs))
        elif self.how == "refuses":
            raise RuntimeError("the pool refuses")
        elif self.how == "raises":
            future.set_exception(RuntimeError("the pool refuses"))
        elif self.how == "cancels":
            future.cancel()
            future.set_running_or_notify_cancel()
        return future


@pytest.mark.parametrize("n", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("how", ["refuses", "raises", "cancels"])
def test_a_pool_that_fails_ends_in_an_error(how, n):
    x = da.ones(40, chunks=10).map_blocks(local(1)).sum()
    with Scheduler("cpu:2", fuse=False) as s:
        error = outcome(lambda: x.compute(pool=Failing(how, n)))
        assert isinstance(error, BaseException), error
        assert "refuses" in str(error) or "cancel" in str(error) or how == "cancels"
        assert not s._turns.running
        assert x.compute() == 80


def test_threads_that_are_told_to_cancel_end_in_an_error():
    """The first task shuts the pool, which has one thread: what waits behind it is cancelled."""
    pool = ThreadPoolExecutor(1)

    def shutting(block):
        pool.shutdown(wait=False, cancel_futures=True)
        return block

    x = da.ones(40, chunks=10).map_blocks(shutting, dtype=float, meta=np.ones(0)).sum()
    with Scheduler("cpu:2"):
        error = outcome(lambda: x.compute(pool=pool))
    assert isinstance(error, RuntimeError)


@pytest.mark.parametrize("make", [lambda: ThreadPool(2), lambda: Pool(2, context=SPAWN)])
def test_a_pool_of_multiprocessing_that_is_terminated_ends_in_an_error(make):
    """Such a pool tells nobody that it will never run what it was given."""
    pool = make()
    held = threading.Event()

    def waits():
        held.wait(PATIENCE)

    here = isinstance(pool, ThreadPool)
    tasks = [dask.delayed(waits if here else signal.pause)() for _ in range(4)]
    ended, out = threading.Event(), []

    def attempt():
        try:
            dask.compute(*tasks, pool=pool, scheduler=s.get)
        except BaseException as error:
            out.append(error)
        ended.set()

    with Scheduler("cpu:2") as s:
        threading.Thread(target=attempt, daemon=True).start()
        while not pool._cache:  # until it was given something
            assert not ended.wait(0.01)
        stopping = threading.Thread(target=pool.terminate, daemon=True)
        stopping.start()
        if here:
            pool._result_handler.join(PATIENCE)
        assert ended.wait(PATIENCE), "neither a value nor an error"
        held.set()
        stopping.join(PATIENCE)
    assert isinstance(out[0], BrokenExecutor), out


def test_a_pool_that_is_terminated_between_two_tasks_ends_in_the_same_error():
    pool, held = ThreadPool(1), threading.Event()
    of_caller = CallersPool(pool)
    of_caller.submit(held.wait, PATIENCE)
    stopping = threading.Thread(target=pool.terminate, daemon=True)
    stopping.start()
    pool._result_handler.join(PATIENCE)
    with pytest.raises(BrokenExecutor, match="does nothing any more: it was terminated"):
        of_caller.submit(abs, 1)
    held.set()
    stopping.join(PATIENCE)
    with ThreadPool(1) as closed:
        closed.close()
        with pytest.raises(ValueError, match="not running"):  # it was never given anything
            CallersPool(closed).submit(abs, 1)


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("kind", PROCESSES)
@pytest.mark.parametrize("end", [killed, lambda: os._exit(0)])
def test_a_process_that_dies_ends_in_an_error(kind, end):
    pool = PROCESSES[kind]()
    with Scheduler("cpu:2"):
        error = outcome(lambda: dask.delayed(end)().compute(pool=pool))
    assert isinstance(error, BrokenExecutor)
    shut(pool)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # of Python 3.12, with threads
@pytest.mark.parametrize("make", [lambda: ThreadPoolExecutor(2), lambda: ThreadPool(2)])
def test_a_pool_of_the_parents_ends_in_an_error_in_a_forked_child(make):
    """None of its threads is in the child."""
    pool = make()
    pool.submit(abs, 1).result() if hasattr(pool, "submit") else pool.apply(abs, (1,))
    x = da.ones(4, chunks=2).sum()
    with Scheduler("cpu:2"):
        child = os.fork()
        if not child:
            code = 1
            try:
                out = outcome(lambda: x.compute(pool=pool, scheduler="gpu"))
                code = 0 if isinstance(out, BrokenExecutor) or out == 4 else 2
            finally:
                os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    shut(pool)
