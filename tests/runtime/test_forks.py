"""Children that are forked while schedulers are in use: they begin anew, and wait for nobody."""

from __future__ import annotations

import ast
import gc
import multiprocessing
import os
import pickle
import threading
import traceback
from pathlib import Path

import dask
import dask.array as da
import numpy as np
import pytest

import gpuscheduler
from gpuscheduler import Scheduler, default, forks

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork"),
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),  # of Python 3.12, with threads
]
PATIENCE = 120


def in_a_child(call):
    """What a call gives in a forked child, or the text of what it raises there."""
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(reads)
            with os.fdopen(writes, "wb") as f:
                try:
                    pickle.dump(call(), f)
                except BaseException:
                    pickle.dump(traceback.format_exc(), f)
        finally:
            os._exit(0)
    os.close(writes)
    end = threading.Timer(PATIENCE, os.kill, (child, 9))  # it hangs
    end.start()
    with os.fdopen(reads, "rb") as f:
        data = f.read()
    os.waitpid(child, 0)
    end.cancel()
    end.join()
    assert data, "the child gave nothing, and was ended"
    return pickle.loads(data)


def total(n=1.0):
    return float((da.ones(200_000, chunks=50_000) * n).sum().compute())


def test_children_of_a_pool_compute_where_their_parent_has_entered_a_scheduler():
    with Scheduler("cpu:2"):
        total()
        with multiprocessing.get_context("fork").Pool(2) as pool:
            got = pool.map_async(total, range(4)).get(PATIENCE)
    assert got == [n * 200_000.0 for n in range(4)]


@pytest.mark.parametrize("used", [False, True])
def test_a_child_has_the_schedulers_of_its_parent(used):
    def child():
        s = default.current_scheduler()
        return total(), s is mine, len(s.hardware.machine.devices), s.options.memory_limit

    with Scheduler("cpu:3", memory_limit="1 GiB") as mine:
        if used:
            total()
        assert in_a_child(child) == (200_000.0, True, 3, "1 GiB")
        assert total(2) == 400_000.0


def test_a_childs_child_computes_too():
    with Scheduler("cpu:2"):
        assert in_a_child(lambda: in_a_child(total)) == 200_000.0
        assert in_a_child(lambda: (total(2), in_a_child(total))) == (400_000.0, 200_000.0)


@pytest.mark.parametrize("computes", [False, True])
def test_a_child_leaves_and_closes_what_its_parent_has_entered(computes):
    before = dask.config.get("scheduler", None)
    s = Scheduler("cpu:2")
    s.__enter__()
    total()

    def child():
        if computes:
            total()
        s.__exit__(None, None, None)
        closed = repr(s)
        with pytest.raises(RuntimeError, match="make a new Scheduler"):
            s.get({"a": 1}, "a")
        there = dask.config.get("scheduler", None)
        with dask.config.set(scheduler="sync"):  # the threads of Dask's own stayed in the parent
            return "closed" in closed, there is before, total()

    assert in_a_child(child) == (True, True, 200_000.0)
    assert total() == 200_000.0
    s.__exit__(None, None, None)


def test_a_child_reads_what_its_parent_has_persisted(tmp_path):
    options = {"memory_limit": 300_000, "spill_directory": str(tmp_path)}
    with Scheduler("cpu:1", **options) as s:
        x = (da.random.default_rng(0).random((200, 200), chunks=50)).persist()
        want = x.sum().compute()
        got = in_a_child(lambda: (x.sum().compute(), x.persist().sum().compute()))
        assert got == (want, want)
        assert x.sum().compute() == want
        assert s._persisted.chunks()


def test_a_child_of_a_task_computes():
    """Forked in a thread of the scheduler's, while its run, and another, are under way."""
    begun, over = threading.Event(), threading.Event()

    def waits():
        begun.set()
        assert over.wait(PATIENCE)

    with Scheduler("cpu:2"):
        other = threading.Thread(target=dask.delayed(waits)().compute)
        other.start()
        assert begun.wait(PATIENCE)
        assert dask.delayed(lambda: in_a_child(total))().compute() == 200_000.0
        over.set()
        other.join(PATIENCE)


def test_a_child_waits_for_no_lock_that_a_thread_of_its_parent_held():
    held, over, taken = threading.Event(), threading.Event(), []

    def holds():
        for watched in list(forks._every.values()):
            lock = watched()
            if lock is not None and lock.acquire(blocking=False):
                taken.append(lock)
        held.set()
        over.wait(PATIENCE)
        for lock in taken:
            lock.release()

    def child():
        x.persist()
        s.plan(x.sum())
        return float(x.sum().compute()), total(), float((x + 1).sum().compute())

    with Scheduler("cpu:2") as s:
        total()
        x = (da.ones(200_000, chunks=50_000) * 3).persist()
        gc.collect()
        thread = threading.Thread(target=holds)
        thread.start()
        assert held.wait(PATIENCE)
        try:
            got = in_a_child(child)
        finally:
            over.set()
            thread.join(PATIENCE)
        assert len(taken) > 10
    assert got == (600_000.0, 200_000.0, 800_000.0)


def test_the_thread_that_forks_keeps_its_own_locks():
    lock, other = forks.new_rlock(), forks.new_lock()
    with lock:
        assert in_a_child(lambda: (lock._is_owned(), other.acquire(blocking=False))) == (True, True)
    assert not other.locked()


def test_every_lock_of_the_package_is_one_that_children_find_open():
    """... but those that say what becomes of them in a child where they are made."""
    made = {}
    for path in sorted(Path(gpuscheduler.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node) in (
                *("threading.Lock()", "threading.RLock()", "threading.Condition()"),
                *("Lock()", "RLock()", "Condition()"),
            ):
                made[path.stem] = made.get(path.stem, 0) + 1
    assert made.keys() == {"forks", "gc_control", "llvm_jit"}


def test_numbers_of_a_child_are_its_parents():
    x = da.random.default_rng(5).random(1000, chunks=100)
    with Scheduler("cpu:2"):
        want = x.compute()
        np.testing.assert_array_equal(in_a_child(x.compute), want)
