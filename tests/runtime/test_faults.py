"""Whatever fails, wherever: a clear error or none, nothing left behind, and the next run works."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext

import dask
import dask.array as da
import numpy as np
import pytest
from dask._task_spec import Task, TaskRef

from gpuscheduler import OutOfMemory, Scheduler
from gpuscheduler.devices.cpu import CpuDevices, cpu_team
from gpuscheduler.errors import DeviceLost
from gpuscheduler.frontend.lowering import from_dask
from gpuscheduler.plan.build import make_plan
from gpuscheduler.plan.machine import Machine
from gpuscheduler.runtime.events import Failed
from gpuscheduler.runtime.loop import run
from gpuscheduler.runtime.spill import SpillStore

#: Seven values of 8 kB, most of them read late, in room for four and a half.
SMALL = {
    "a": Task("a", np.full, 1000, 1.0),
    "b": Task("b", np.full, 1000, 2.0),
    "c": Task("c", np.full, 1000, 3.0),
    "d": Task("d", np.full, 1000, 4.0),
    "e": Task("e", np.add, TaskRef("a"), TaskRef("b")),
    "f": Task("f", np.add, TaskRef("c"), TaskRef("d")),
    "g": Task("g", np.add, TaskRef("e"), TaskRef("f")),
    "h": Task("h", np.add, TaskRef("g"), TaskRef("a")),
    "i": Task("i", np.add, TaskRef("h"), TaskRef("d")),
}
ANSWER = 15.0
ROOM = 36_000


class Fault(RuntimeError):
    pass


class Faulty:
    """Devices of which one verb fails at its n-th call: at once, or as an event."""

    def __init__(self, devices, verb, n, event):
        self.devices, self.verb, self.left, self.event = devices, verb, n, event
        self.failed = None
        self.events = []

    def __getattr__(self, name):
        verb = getattr(self.devices, name)
        if name != self.verb:
            return verb

        def call(*args):
            self.left -= 1
            if self.left != -1:
                return verb(*args)
            self.failed = args
            if not self.event:
                raise Fault(name)
            self.events.append(Failed(args[0], Fault(name)))

        return call

    def wait(self):
        if self.verb == "wait":
            self.left -= 1
            if self.left == -1:
                self.failed = ()
                raise Fault("wait")
        out, self.events = self.events, []
        return out or self.devices.wait()


@contextmanager
def nothing_left(tmp_path):
    """A team and a store; afterwards no thread, no file, and no byte of them is left."""
    before = set(threading.enumerate())
    team, store = cpu_team(2), SpillStore(str(tmp_path))
    try:
        yield team, store
        assert store.nbytes == 0
    finally:
        team.stop()
        team.join(10)
        store.close()
    assert set(threading.enumerate()) == before
    assert not list(tmp_path.iterdir())


def small_plan():
    machine = Machine.uniform(2, memory=ROOM // 2, shared=True)
    plan = make_plan(from_dask(SMALL, ["i"]), machine)
    for step in plan.steps:
        step.nbytes, step.known = 8000, True
    return plan


def computed(team, store, verb=None, n=0, event=False):
    """One run; the devices with the fault that was to happen, and whatever came of it."""
    plan = small_plan()
    team.begin()
    devices = Faulty(CpuDevices(plan, team, None, store), verb, n, event)
    try:
        run(plan, devices, check=True).validate_end()
        assert devices.value(plan.index["i"])[0] == ANSWER
    except Fault as error:
        return plan, devices, error
    finally:
        devices.close()
    return plan, devices, None


@pytest.mark.parametrize(
    ("verb", "event"),
    [
        ("launch", 0),
        ("launch", 1),
        ("copy", 0),
        ("copy", 1),
        ("free", 0),
        ("wait", 0),
        ("value", 0),
    ],
)
def test_a_verb_that_fails_at_any_position(tmp_path, verb, event):
    """The n-th call of the verb fails, for every n.

    The error names the step, and the next run on the same threads and files is good.
    """
    for n in range(100):
        with nothing_left(tmp_path) as (team, store):
            plan, devices, error = computed(team, store, verb, n, event)
            if devices.failed is None:
                assert n > 0 or verb == "value"
                return
            assert isinstance(error, Fault)
            if devices.failed and verb != "value":
                step = plan.steps[devices.failed[0]]
                (note,) = error.__notes__
                assert note.startswith(f"while running {step.key!r} on device {step.place}")
            _, _, error = computed(team, store)
            assert error is None
    raise AssertionError("it fails for ever")


def failing(key, error, times):
    """The small graph, one task of which raises at first."""
    task, left = SMALL[key], [times]

    def function(*args):
        if left[0]:
            left[0] -= 1
            raise error
        return task.func(*args)

    return SMALL | {key: Task(key, function, *task.args)}


@pytest.mark.parametrize("key", SMALL)
@pytest.mark.parametrize("times", [1, 2])
def test_a_task_that_finds_no_memory_runs_again(tmp_path, key, times):
    """The second time it has the memory of all devices to itself."""
    options = {"memory_limit": ROOM, "check": True, "spill_directory": str(tmp_path)}
    with Scheduler("cpu:2", **options) as s:
        assert s.get(failing(key, MemoryError(), times), "i")[0] == ANSWER
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("key", SMALL)
def test_a_task_that_never_finds_memory_is_an_error_that_says_so(key):
    with Scheduler("cpu:2", memory_limit=ROOM, check=True) as s:
        with pytest.raises(OutOfMemory, match=f"'{key}': device . refused .* limit of") as error:
            s.get(failing(key, MemoryError(), 10**9), "i")
        assert "smaller chunks" in str(error.value)
        assert s.get(SMALL, "i")[0] == ANSWER


def test_an_array_that_no_machine_can_hold_is_an_error_with_its_size():
    with Scheduler("cpu:2") as s, pytest.raises(OutOfMemory, match="9,007,199,254,740,992 bytes"):
        s.get({"x": Task("x", np.empty, 2**50)}, "x")


def test_out_of_memory_in_a_computation_inside_a_task_comes_out_as_it_is():
    ran = []

    def inner():
        ran.append(1)
        raise OutOfMemory("inner")

    with Scheduler("cpu:2") as s, pytest.raises(OutOfMemory, match="^inner"):
        s.get({"x": Task("x", inner)}, "x")
    assert ran == [1]


def test_a_thread_that_dies_is_an_error_and_the_next_run_has_another():
    """The thread is told to end while its inbox has work: nobody would ever answer."""
    with Scheduler("cpu:1") as s:
        assert s.get({"x": Task("x", abs, -1)}, "x") == 1
        (team,) = s.hardware._teams[1].idle
        team.workers[0].stop()
        team.workers[0].thread.join(10)
        with pytest.raises(DeviceLost, match="thread gpuscheduler-cpu-0 has ended"):
            s.get({"x": Task("x", abs, -1)}, "x")
        assert s.get({"x": Task("x", abs, -1)}, "x") == 1


def test_a_thread_that_writes_files_and_dies_is_an_error_too(tmp_path):
    with nothing_left(tmp_path) as (team, store):
        team.send_aside("writes", lambda _: None, None)
        team.aside["writes"].stop()
        team.aside["writes"].thread.join(10)
        with pytest.raises(DeviceLost, match="thread gpuscheduler-writes has ended"):
            computed(team, store)


@pytest.mark.parametrize("job", ["_run", "_write", "_read_file", "_deliver"])
@pytest.mark.parametrize("pool", [False, True])
def test_a_job_that_raises_ends_the_run(tmp_path, monkeypatch, job, pool):
    """A bug of ours, in a thread that nobody looks at: the run hears of it, and does not wait."""

    def buggy(self, argument):
        raise Fault(job)

    x = da.from_array(np.random.default_rng(0).random((800, 100)), chunks=100) * 2
    lazy = x - x.mean(axis=0)
    want = lazy.compute(scheduler="sync")
    limit = 2**30 if job == "_deliver" else 300_000
    with ThreadPoolExecutor(2) if pool else nullcontext() as threads:
        options = {"memory_limit": limit, "spill_directory": str(tmp_path), "fuse": False}
        with Scheduler("cpu:1", **options) as s:
            with monkeypatch.context() as patch:
                patch.setattr(CpuDevices, job, buggy)
                with pytest.raises(Fault, match=job) as error:
                    lazy.compute(pool=threads)
            assert error.value.__notes__ == [
                "in a thread of gpuscheduler, outside of any task: a bug"
            ]
            np.testing.assert_array_equal(lazy.compute(pool=threads), want)
            assert s.hardware.store.nbytes == 0
    assert not list(tmp_path.iterdir())


def test_what_a_job_raises_when_its_run_is_over_is_printed(tmp_path, capfd):
    """Nobody is there to hear of it, least of all the next run of these threads."""

    def buggy(_):
        raise Fault("late")

    with nothing_left(tmp_path) as (team, store):
        team.begin()
        team.send_last(0, buggy, None)
        assert computed(team, store)[2] is None
    assert "Fault: late" in capfd.readouterr().err


def test_the_small_graph_needs_the_disk(tmp_path):
    """Or these tests would show nothing."""
    assert dask.get(SMALL, "i")[0] == ANSWER
    with nothing_left(tmp_path) as (team, store):
        assert computed(team, store)[2] is None
        assert store.peak > 0
