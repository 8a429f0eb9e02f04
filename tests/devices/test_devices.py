"""One contract for everything that can stand behind `run.Devices`.

`FACTORIES` has one function per kind of device: `make(plan)` is a context manager that gives the
devices of one run. tests/gpu adds its own and runs the same tests.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import dask
import numpy as np
import pytest
from dask._task_spec import Task, TaskRef
from hypothesis import given

from gpuscheduler import Scheduler
from gpuscheduler.devices.cpu import CpuDevices, cpu_team
from gpuscheduler.plan.machine import HOST
from gpuscheduler.runtime.events import Copied, Done, Failed, Issued, NoRoom
from gpuscheduler.runtime.loop import run
from gpuscheduler.runtime.simulated import InOrderDevices, ShuffledDevices
from tests.support.strategies import LateDevices, alter, cases, plan_of, thorough

PLENTY = (2**40, 2**40)


@contextlib.contextmanager
def in_order(plan):
    yield InOrderDevices(plan)


@contextlib.contextmanager
def shuffled(plan):
    yield ShuffledDevices(plan, random.Random(0))


@contextlib.contextmanager
def late(plan):
    yield LateDevices(plan, random.Random(0), [8] * len(plan.steps))


@contextlib.contextmanager
def cpu(plan):
    team = cpu_team(len(plan.machine.devices))
    try:
        yield CpuDevices(plan, team)
    finally:
        team.stop()
        team.join(10)


FACTORIES = {"in_order": in_order, "shuffled": shuffled, "late": late, "cpu": cpu}


@pytest.fixture(params=FACTORIES)
def make(request):
    return FACTORIES[request.param]


class Value:
    """Something that a weak reference can watch."""


def plan_with(*steps, **options):
    """`plan_of` whose tasks are given: `(name, "inputs", place, function)`."""
    plan = plan_of(*[step[:3] for step in steps], memory=PLENTY, **options)
    for step, (name, reads, _, function) in zip(plan.steps, steps, strict=True):
        step.task = Task(name, function, *(TaskRef(r) for r in reads))
    return plan


def events_until(devices, *wanted):
    """All events up to the last of the wanted kinds-with-steps, e.g. `(Done, 0)`."""
    seen = []
    missing = set(wanted)
    while missing:
        new = devices.wait()
        assert new, "wait() gives at least one event"
        seen += new
        missing -= {(type(e), e.step) for e in new}
    return seen


# ---- the verbs


def test_a_launch_is_issued_and_then_done(make):
    plan = plan_with(("a", "", 0, lambda: np.ones(4)))
    with make(plan) as devices:
        devices.launch(0, 0)
        events = events_until(devices, (Done, 0))
        assert [type(e) for e in events] == [Issued, Done]
        assert events[0].nbytes in (32, 8)  # as large as it is, or as the fake was told
        assert devices.value(0).tolist() == [1, 1, 1, 1]
        devices.close()


def test_launches_on_one_place_run_in_order(make):
    """b is launched right behind a, which it reads, and c behind b: none has to be waited for."""
    ran = []

    def step(name):
        def function(*values):
            ran.append(name)
            return [name, *values]

        return function

    plan = plan_with(("a", "", 0, step("a")), ("b", "a", 0, step("b")), ("c", "ab", 0, step("c")))
    with make(plan) as devices:
        for i in range(3):
            devices.launch(i, 0)
        events = events_until(devices, (Done, 0), (Done, 1), (Done, 2))
        assert ran == ["a", "b", "c"]
        assert [e.step for e in events if type(e) is Issued] == [0, 1, 2]
        assert [e.step for e in events if type(e) is Done] == [0, 1, 2]
        assert devices.value(2) == ["c", ["a"], ["b", ["a"]]]
        devices.close()


def test_a_copy_makes_a_value_readable_elsewhere(make):
    plan = plan_with(("a", "", 0, lambda: 5), ("b", "a", 1, lambda a: a + 1))
    with make(plan) as devices:
        devices.launch(0, 0)
        events_until(devices, (Done, 0))
        devices.copy(0, 0, 1)
        assert events_until(devices, (Copied, 0)) == [Copied(0, 0, 1)]
        devices.free(0, 0)  # the copy is a value of its own
        devices.launch(1, 1)
        events_until(devices, (Done, 1))
        assert devices.value(1) == 6
        devices.close()


def test_a_launch_may_follow_the_copies_that_it_needs(make):
    """Copies to a place and launches on it take effect in order: c need not wait for a or b."""
    plan = plan_with(
        ("a", "", 0, lambda: 5),
        ("b", "", 0, lambda: 7),
        ("c", "ab", 1, lambda a, b: a * b),
        ("d", "c", 1, lambda c: c + 1),
    )
    with make(plan) as devices:
        devices.launch(0, 0)
        devices.launch(1, 0)
        events_until(devices, (Issued, 0), (Issued, 1))
        devices.copy(0, 0, 1)
        devices.copy(1, 0, 1)
        devices.launch(2, 1)
        devices.launch(3, 1)
        events_until(devices, (Copied, 0), (Copied, 1), (Done, 2), (Done, 3))
        assert devices.value(3) == 36
        devices.close()


def test_values_of_the_graph_are_there_from_the_start(make):
    """Read at home at once, and elsewhere after a copy; nobody launches them."""
    plan = plan_with(
        ("v", "", 0, lambda: 5),
        ("a", "v", 0, lambda v: v + 1),
        ("b", "v", 1, lambda v: v + 2),
        wanted="vab",
        fixed="v",
    )
    with make(plan) as devices:
        devices.launch(1, 0)
        devices.copy(0, 0, 1)
        devices.launch(2, 1)
        events_until(devices, (Done, 1), (Copied, 0), (Done, 2))
        devices.free(0, 1)
        assert [devices.value(i) for i in range(3)] == [5, 6, 7]
        devices.close()


def test_a_run_of_values_of_the_graph(make):
    """w is only read, and v is wanted, too: both are there afterwards, as the caller has them."""
    plan = plan_with(
        ("v", "", 0, lambda: 5),
        ("w", "", 1, lambda: 7),
        ("c", "vw", 1, lambda v, w: v * w),
        wanted="vc",
        fixed="vw",
    )
    with make(plan) as devices:
        run(plan, devices, check=True).validate_end()
        assert (devices.value(0), devices.value(1), devices.value(2)) == (5, 7, 35)
        devices.close()


def test_a_value_goes_to_the_host_and_comes_back(make):
    plan = plan_with(("a", "", 0, lambda: 5), ("b", "a", 0, lambda a: a + 1))
    with make(plan) as devices:
        devices.launch(0, 0)
        events_until(devices, (Done, 0))
        for src, dst in ((0, HOST), (HOST, 0)):
            devices.copy(0, src, dst)
            assert events_until(devices, (Copied, 0)) == [Copied(0, src, dst)]
            devices.free(0, src)
        devices.launch(1, 0)
        events_until(devices, (Done, 1))
        assert devices.value(1) == 6
        devices.close()


def test_a_value_lives_until_it_is_freed_everywhere(make):
    plan = plan_with(("a", "", 0, Value), ("b", "a", 1, id))
    with make(plan) as devices:
        devices.launch(0, 0)
        events_until(devices, (Done, 0))
        value = weakref.ref(devices.value(0))
        devices.copy(0, 0, 1)
        events_until(devices, (Copied, 0))
        devices.free(0, 0)
        assert value() is not None
        devices.free(0, 1)
        _soon(lambda: value() is None)
        devices.close()


def test_close_lets_go_of_every_value(make):
    plan = plan_with(("a", "", 0, Value), ("b", "", 1, Value), wanted="ab")
    with make(plan) as devices:
        devices.launch(0, 0)
        devices.launch(1, 1)
        events_until(devices, (Done, 0), (Done, 1))
        values = [weakref.ref(devices.value(i)) for i in (0, 1)]
        devices.close()
        _soon(lambda: [v() for v in values] == [None, None])


@pytest.mark.parametrize("error", [ValueError("no"), KeyError("k"), SystemExit(3)], ids=repr)
def test_a_failing_task_is_an_event_with_the_users_own_exception(make, error):
    def fail():
        raise error

    plan = plan_with(("a", "", 0, fail))
    with make(plan) as devices:
        devices.launch(0, 0)
        (event,) = events_until(devices, (Failed, 0))
        assert event.error is error
        devices.close()


def test_run_raises_it_with_a_note_that_says_where(make):
    def fail(a):
        raise ValueError("no")

    plan = plan_with(("a", "", 0, lambda: 1), ("b", "a", 1, fail))
    with make(plan) as devices:
        with pytest.raises(ValueError, match="^no") as error:
            run(plan, devices, check=True)
        (note,) = error.value.__notes__
        assert note.startswith("while running 'b' on device 1: ")
        devices.close()


def test_a_wide_graph_over_both_devices(make):
    """Ten values on each device, and one step that reads all twenty."""
    names = "abcdefghijklmnopqrst"
    leaves = [(k, "", n % 2, lambda n=n: n) for n, k in enumerate(names)]
    plan = plan_with(*leaves, ("z", names, 1, lambda *values: sum(values)))
    with make(plan) as devices:
        run(plan, devices, check=True).validate_end()
        assert devices.value(20) == sum(range(20))
        devices.close()


@thorough
@given(cases(persisted=False))
def test_any_graph_on_threads(case):
    """The one implementation here with real races, as often as time allows."""
    with cpu(case.plan) as devices:
        alter(case.plan, deliver=frozenset())
        case.ahead = True
        alter(
            case.plan,
            machine=plan_of(("a", "", 0), memory=(2**60,) * len(case.plan.machine.memory)).machine,
        )
        case.run(devices).validate_end()
        got = [devices.value(case.plan.index[k]) for k in case.keys]
        assert got == list(dask.get(case.dsk, case.keys))
        devices.close()


@pytest.mark.parametrize("fake", [ShuffledDevices, LateDevices])
def test_what_is_launched_behind_a_refused_copy_is_refused_too(fake):
    """a fills all of 1, so b, on its way there, is refused.

    c and d, behind it, with 0 bytes, are refused as well.
    """
    steps = ("a", "", 1, 8), ("b", "", 0, 8), ("c", "b", 1, 0), ("d", "c", 1, 0)
    plan = plan_of(*steps, memory=(8, 8))
    devices = fake(plan, random.Random(0), [8, 8, 0, 0], refuse=True)
    devices.launch(0, 1)
    devices.launch(1, 0)
    events_until(devices, (Done, 0), (Done, 1))
    devices.copy(1, 0, 1)
    devices.launch(2, 1)
    devices.launch(3, 1)
    events = [devices.wait()[0] for _ in range(3)]
    assert events == [NoRoom(1, 1, 8), NoRoom(2, 1, 0), NoRoom(3, 1, 0)]


# ---- the scheduler's own threads


def gpuscheduler_threads():
    return [t for t in threading.enumerate() if t.name.startswith("gpuscheduler")]


def _soon(condition, seconds=5.0):
    """Wait for another thread to come to its next line; an error if it does not."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never happened"
        gc.collect()
        time.sleep(0.001)


@pytest.fixture
def scheduler():
    before = set(gpuscheduler_threads())
    s = Scheduler(devices="cpu:2", check=True)
    yield s
    s.close()
    assert set(gpuscheduler_threads()) <= before, "threads are left behind"


def test_close_joins_every_thread(scheduler):
    before = threading.active_count()
    assert scheduler.get({"a": (sum, [1, 2])}, "a") == 3
    assert threading.active_count() > before
    scheduler.close()
    assert threading.active_count() == before
    with pytest.raises(RuntimeError, match="closed"):
        scheduler.get({"a": 1}, "a")


def test_a_run_leaves_no_value_behind(scheduler):
    """Neither the devices nor the threads, which wait for the next run, hold on to anything."""
    made = []

    def make():
        value = Value()
        made.append(weakref.ref(value))
        return value

    dsk = {"a": Task("a", make), "b": Task("b", lambda a: make(), TaskRef("a"))}
    out = scheduler.get(dsk, "b")
    assert made[1]() is out
    del out
    _soon(lambda: [r() for r in made] == [None, None])


def test_sixteen_threads_compute_at_once(scheduler):
    """Each run has its own devices; none waits for another or sees its values."""

    def one(n):
        dsk = {i: Task(i, lambda i=i: i * n) for i in range(20)}
        dsk["sum"] = Task("sum", lambda *v: sum(v), *(TaskRef(i) for i in range(20)))
        return scheduler.get(dsk, "sum")

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(one, range(16))) == [190 * n for n in range(16)]


def test_a_task_may_compute(scheduler):
    """Four levels deep, on two devices: no run waits for a thread that waits for it."""

    def nested(depth):
        if not depth:
            return 1
        dsk = {(depth, i): Task((depth, i), nested, depth - 1) for i in range(2)}
        return sum(scheduler.get(dsk, list(dsk)))

    assert nested(4) == 16


def test_an_error_does_not_wait_for_a_task_that_never_ends(scheduler):
    """One device is stuck in a task; the error on the other comes out all the same."""
    stuck, begun = threading.Event(), threading.Event()

    def forever():
        begun.set()
        stuck.wait(60)

    def fail():
        begun.wait(60)
        raise ValueError("at once")

    dsk = {("x", 0): Task(("x", 0), forever), ("x", 1): Task(("x", 1), fail)}
    started = time.monotonic()
    try:
        with pytest.raises(ValueError, match="at once"):
            scheduler.get(dsk, list(dsk))
        assert time.monotonic() - started < 30
        # and the next run has threads of its own
        assert scheduler.get({"a": (sum, [1, 2])}, "a") == 3
    finally:
        stuck.set()


def test_closing_does_not_wait_for_a_task_that_never_ends():
    """Its thread, given up with its run, is left to end when the task does."""
    stuck, begun = threading.Event(), threading.Event()

    def forever():
        begun.set()
        stuck.wait(60)

    def fail():
        begun.wait(60)
        raise ValueError("at once")

    scheduler = Scheduler(devices="cpu:2")
    dsk = {("x", 0): Task(("x", 0), forever), ("x", 1): Task(("x", 1), fail)}
    before = set(gpuscheduler_threads())
    try:
        with pytest.raises(ValueError, match="at once"):
            scheduler.get(dsk, list(dsk))
        started = time.monotonic()
        scheduler.close()
        assert time.monotonic() - started < 30
    finally:
        stuck.set()
    _soon(lambda: set(gpuscheduler_threads()) <= before)


def test_ctrl_c_ends_a_run_at_once():
    """A task that sleeps for an hour is abandoned: the process ends with KeyboardInterrupt."""
    code = """
import signal, time, dask, gpuscheduler
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
with gpuscheduler.Scheduler(devices="cpu:2"):
    print("ready", flush=True)
    x = dask.delayed(time.sleep)
    try:
        dask.compute(x(3600), x(0))
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        import os
        os._exit(7)
"""
    command = [sys.executable, "-u", "-c", code]
    root = Path(__file__).parents[2]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, cwd=root, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n"
            time.sleep(0.5)  # into the run: there is nothing to wait for that says so
            os.kill(process.pid, signal.SIGINT)
            assert process.stdout.readline() == "interrupted\n"
            assert process.wait(30) == 7
        finally:
            process.kill()
