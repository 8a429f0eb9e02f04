"""Runs at the same time: together they stay within the memory, and each comes to its end."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import dask
import dask.array as da
import numpy as np
import pytest
from dask import delayed
from hypothesis import given
from hypothesis import strategies as st

from gpuscheduler import Scheduler
from gpuscheduler.runtime.admission import SMALL, Admission, AdmittedRun
from gpuscheduler.runtime.simulated import predict
from gpuscheduler.runtime.state import State
from tests.support.strategies import alter, cases, thorough

WAIT = 20  # seconds, of which none passes where all is well


def started(*functions):
    threads = [threading.Thread(target=f) for f in functions]
    for t in threads:
        t.start()
    return threads


def joined(threads):
    for t in threads:
        t.join(WAIT)
        assert not t.is_alive()


class Together:
    """Runs in threads of their own: what those that are under way may take, at its highest."""

    def __init__(self, limit, **options):
        self.turns, self.most, self.order = Admission({0: limit}, **options), 0, []

    def run(self, name, need, until=lambda: None, begun=lambda: None):
        with self.turns.turn(lambda: {0: need}):
            self.order.append(name)
            self.most = max(self.most, sum(t.need[0] for t in self.turns.running))
            begun()
            until()

    def waited_for(self, n):
        end = time.monotonic() + WAIT
        while len(self.turns.waiting) < n:
            assert time.monotonic() < end


def test_a_run_waits_until_the_one_before_it_leaves_room():
    """60 of 100 are taken: 30 more begin at once, and 50 when the 60 are free again."""
    both, begun, end = Together(100), threading.Event(), threading.Event()
    first = started(lambda: both.run("60", 60, lambda: end.wait(WAIT), begun.set))
    assert begun.wait(WAIT)
    joined(started(lambda: both.run("30", 30)))
    late = started(lambda: both.run("50", 50))
    both.waited_for(1)
    assert both.order == ["60", "30"]
    end.set()
    joined(first + late)
    assert both.order == ["60", "30", "50"]
    assert both.most == 90


def test_what_is_small_goes_before_those_that_wait_and_others_do_not():
    both, begun, end = Together(100), threading.Event(), threading.Event()
    first = started(lambda: both.run("whole", 100, lambda: end.wait(WAIT), begun.set))
    assert begun.wait(WAIT)
    late = started(lambda: both.run("second", 60))
    both.waited_for(1)
    joined(started(lambda: both.run("small", int(100 * SMALL))))
    late += started(lambda: both.run("third", 6))
    both.waited_for(2)
    end.set()
    joined(first + late)
    assert both.order == ["whole", "small", "second", "third"]
    assert both.most <= 100 * (1 + SMALL)


def test_runs_that_wait_for_each_other_go_on_after_a_while():
    """A task of the first waits for what the second does, which nobody can know."""
    both, begun, done = Together(100, patience=0.05), threading.Event(), threading.Event()
    first = started(lambda: both.run("one", 100, lambda: done.wait(WAIT), begun.set))
    assert begun.wait(WAIT)
    joined(started(lambda: both.run("two", 100, done.set)) + first)
    assert both.order == ["one", "two"]


@thorough
@given(st.lists(st.integers(0, 120), min_size=1, max_size=6), st.randoms())
def test_runs_of_any_size_stay_together_within_the_limit(needs, rng):
    """Decided without a thread: of those that wait, any may ask, and any that runs ends."""
    turns = Admission({0: 100})
    turns.waiting = [AdmittedRun(lambda n=n: {0: n}) for n in needs]
    for _ in range(1000):
        if not turns.waiting and not turns.running:
            break
        able = [t for t in turns.waiting if turns.may_begin(t) or not turns.running]
        if able and (not turns.running or rng.random() < 0.5):
            one = rng.choice(able)
            if not turns.running:
                one = turns.waiting[0]
            turns.may_begin(one)
            turns.waiting.remove(one)
            turns.running.append(one)
            assert sum(min(100, t.need[0]) for t in turns.running) <= 100 * (1 + SMALL)
        elif turns.running:
            turns.running.remove(rng.choice(turns.running))
    assert not turns.waiting
    assert not turns.running


@thorough
@given(cases(exact=True))
def test_no_run_makes_more_than_everything(case):
    most = case.plan.bytes_by_memory()
    state = case.run(case.devices())
    assert all(state.peak[m] <= n for m, n in most.items())


@thorough
@given(cases(exact=True), cases(exact=True), st.randoms())
def test_plans_that_may_run_together_take_no_more_than_the_limit(one, two, rng):
    """The steps of two runs alternate at random, in a memory with room for what is foreseen of
    both.

    At any time they hold no more than the limit together.
    """
    states, moving = [], []
    for case in (one, two):
        alter(case.plan, machine=replace(case.plan.machine, host_memory=2**40))
    foreseen = [predict(c.plan, c.window, c.deep_window, c.ahead).peak for c in (one, two)]
    memories = [m for m in foreseen[0] if m >= 0 and m in foreseen[1]]
    limit = {m: foreseen[0][m] + foreseen[1][m] for m in memories}
    for case in (one, two):
        devices = case.devices()
        state = State(case.plan, case.window, case.deep_window, case.ahead)
        states.append(state)
        moving.append((state, devices, state.start()))
    while moving:
        n = rng.randrange(len(moving))
        state, devices, instructions = moving[n]
        for i in instructions:
            verb = type(i).__name__.lower()
            getattr(devices, verb)(*[getattr(i, f) for f in i.__slots__])
        assert all(sum(s.used[m] for s in states) <= limit[m] for m in memories)
        if state.is_finished:
            del moving[n]
        else:
            moving[n] = state, devices, state.handle(*devices.wait())


# ---- a scheduler


def big(seed):
    return da.random.default_rng(seed).random((1000, 1000), chunks=250)


def test_two_threads_share_the_limit():
    """Each keeps 8 MB of 12: one after the other, and both are right."""
    with Scheduler("cpu:2", memory_limit=6_000_000, fuse=False) as s:
        most, out = [], {}

        def watched(state_of=s._turns):
            most.append(sum(min(12_000_000, t.need[0]) for t in state_of.running))

        def compute(seed):
            x = big(seed)
            y = (x - x.mean()).map_blocks(lambda b: (watched(), b)[1], meta=np.empty((0, 0)))
            out[seed] = float((y + y.T).sum().compute(scheduler=s.get))

        joined(started(*[lambda n=n: compute(n) for n in range(4)]))
        assert not s._turns.running
        assert not s._turns.waiting
    assert max(most) <= 12_000_000 * (1 + SMALL)
    assert all(abs(v) < 1e-6 for v in out.values())
    assert len(out) == 4


def test_a_run_inside_a_task_does_not_wait_for_the_run_around_it():
    """The task, and what it computes, may each take the whole memory."""
    with Scheduler("cpu:2", memory_limit=5_000_000, fuse=False) as s:
        s._turns.patience = 10 * WAIT

        def inner(block):
            x = big(1)
            return block + float((x - x.mean()).sum().compute())

        x = big(0)
        y = (x - x.mean()).map_blocks(inner, meta=np.empty((0, 0)))
        assert abs(float(y.sum().compute())) < 1e-3


def test_a_failed_run_gives_its_turn_back():
    with Scheduler("cpu:1", memory_limit=10_000) as s:
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                delayed(lambda: 1 / 0)().compute()
        assert not s._turns.running
        assert dask.compute(delayed(int)(3)) == (3,)
