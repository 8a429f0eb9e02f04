"""What tasks take while they run, from one plan to another and from one process to the next."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial

import dask
import dask.array as da
import numpy as np
import pytest

import gpuscheduler
from gpuscheduler.devices import cpu
from gpuscheduler.plan import working_memory
from gpuscheduler.plan.working_memory import LEAST, WorkingMemory
from gpuscheduler.runtime import simulated

ON_DISK = working_memory.known_working_memory, working_memory.keep

SIDE = 400  # of blocks of 1.22 MiB


def spread(block, k=1):
    print(end="")  # no kernel
    return (np.sort(block, axis=0) + k) * np.sort(block, axis=1)


def other(block):
    print(end="")
    return np.sort(block)


def table(seed=0, side=SIDE):
    values = np.random.default_rng(seed).random((2 * side, side))
    return da.from_array(values, chunks=side)


def made_of(x, function=spread):
    return x.map_blocks(function, dtype=float, meta=np.empty((0, 0)))


def of(x, scheduler, function=spread):
    """The plan of a computation, and the kind of its steps."""
    plan = scheduler.plan(made_of(x, function))
    (kind,) = {s.kind for s in plan.steps if not s.fixed and s.nbytes}
    return plan, kind


@pytest.fixture
def scheduler():
    with gpuscheduler.Scheduler("cpu:2") as s:
        yield s


def test_what_one_plan_has_seen_another_foresees(scheduler):
    """x -> spread, and y -> spread: other arrays, blocks as large, and the same function."""
    seen = WorkingMemory("cpu")
    plan, kind = of(table(), scheduler)
    seen.foresee(plan)
    assert plan.task_memory_by_kind == {}
    peak = plan.predicted.peak
    plan.history.extra[kind] = 5_000_000
    seen.learn(plan)
    later, other_kind = of(table(1), scheduler)
    seen.foresee(later)
    assert later.task_memory_by_kind == {other_kind: 5_000_000}
    assert later.task_memory == 2 * 5_000_000  # on both devices, whose memory is one
    later = later.with_facts(predicted=simulated.predict(later))
    assert later.predicted.peak[0] > peak[0]
    later.history.extra[other_kind] = 4_000_000  # what it has seen itself, it knows
    assert later.task_memory_by_kind == {other_kind: 4_000_000}


@pytest.mark.parametrize(
    ("x", "function"),
    [(table(side=SIDE + 1), spread), (table(), other), (table(), partial(other))],
)
def test_other_tasks_and_other_sizes_are_not_foreseen(scheduler, x, function):
    seen = WorkingMemory("cpu")
    plan, kind = of(table(), scheduler)
    plan.history.extra[kind] = 5_000_000
    seen.learn(plan)
    later, _ = of(x, scheduler, function)
    seen.foresee(later)
    assert later.task_memory_by_kind == {}


def test_a_function_that_another_wraps_and_one_that_dask_has_fused(scheduler):
    seen = WorkingMemory("cpu")
    for make in (lambda x: made_of(x, partial(spread, k=2)), lambda x: made_of(x)[:-1].T):
        plans = [scheduler.plan(make(table(n))) for n in range(2)]
        for step in plans[0].steps:
            if not step.fixed:
                plans[0].history.extra[step.kind] = 7_000_000
        seen.learn(plans[0])
        seen.foresee(plans[1])
        assert set(plans[1].task_memory_by_kind.values()) == {7_000_000}


def test_small_tasks_and_those_that_take_nothing_are_not_kept(scheduler):
    seen = WorkingMemory("cpu")
    side = int((LEAST / 8 / 3) ** 0.5)
    for x, took in ((table(side=side), 1000), (table(), 0)):
        plan, kind = of(x, scheduler)
        plan.history.extra[kind] = took
        seen.learn(plan)
        assert working_memory.known_working_memory("cpu") == {}


def test_only_the_latest_are_kept(scheduler, monkeypatch):
    monkeypatch.setattr(working_memory, "MOST", 3)
    seen = WorkingMemory("cpu")
    for n in range(5):
        plan, kind = of(table(side=SIDE + n), scheduler)
        plan.history.extra[kind] = 1_000_000 + n
        seen.learn(plan)
    assert list(working_memory.known_working_memory("cpu").values()) == [
        1_000_002,
        1_000_003,
        1_000_004,
    ]


def test_what_a_run_has_seen_is_foreseen_by_another_scheduler(monkeypatch):
    """Where memory is short, CPU devices measure working memory; here they find what we want."""
    measured = []

    def measure(self, i, trimmer):
        measured.append(i)
        return self._compute_value(i), 3_000_000

    monkeypatch.setattr(cpu.CpuDevices, "_measure_step", measure)
    monkeypatch.setattr(cpu, "LEAST_MEASURED", 0)  # however little memory there is
    for n in range(2):
        with gpuscheduler.Scheduler("cpu:1", memory_limit="7 MB") as s:
            y = made_of(table(n))
            plan = s.plan(y)
            assert set(plan.task_memory_by_kind.values()) == ({3_000_000} if n else set())
            np.testing.assert_allclose(y.compute(), y.compute(scheduler="sync"))
    assert measured


PROGRAM = """
import sys, numpy as np, dask.array as da, gpuscheduler
from gpuscheduler.plan.working_memory import WorkingMemory
def spread(block):
    print(end="")
    return np.sort(block)
x = da.from_array(np.random.default_rng(int(sys.argv[1])).random((800, 400)), chunks=400)
with gpuscheduler.Scheduler("cpu:2") as s:
    plan = s.plan(x.map_blocks(spread, dtype=float, meta=np.empty((0, 0))))
    seen = WorkingMemory("cpu")
    seen.foresee(plan)
    print(list(plan.task_memory_by_kind.values()))
    plan.history.extra.update({step.kind: 9_000_000 for step in plan.steps if not step.fixed})
    seen.learn(plan)
"""


def test_the_next_process_knows(tmp_path):
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    env.pop("DASK_GPUSCHEDULER__CACHE_DIRECTORY", None)
    said = [
        subprocess.run(
            [sys.executable, "-c", PROGRAM, str(n)], env=env, capture_output=True, text=True,
            check=True,
        ).stdout
        for n in range(2)
    ]  # fmt: skip
    assert said == ["[]\n", "[9000000]\n"]


def test_what_cannot_be_read_or_kept_is_no_error(tmp_path, monkeypatch, scheduler):
    for name, function in zip(("known_working_memory", "keep"), ON_DISK, strict=True):
        monkeypatch.setattr(working_memory, name, function)
    blocked = tmp_path / "file"
    blocked.write_text("")
    with dask.config.set({"gpuscheduler.cache-directory": str(blocked)}):
        seen = WorkingMemory("cpu")
        plan, kind = of(table(), scheduler)
        seen.foresee(plan)
        plan.history.extra[kind] = 5_000_000
        seen.learn(plan)
        later, _ = of(table(1), scheduler)
        seen.foresee(later)
        assert later.task_memory  # of this process
        assert working_memory.known_working_memory("cpu") == {}


def test_a_function_may_declare_its_working_memory():
    """It counts before anything was seen; what was seen counts more."""
    import numpy as np
    from dask._task_spec import DataNode, List, Task, TaskRef

    import gpuscheduler
    from gpuscheduler.algorithms.blocks import declare_working_memory

    asked = []

    def estimate(*nbytes):
        asked.append(nbytes)
        return 7 * sum(nbytes)

    @declare_working_memory(estimate)
    def join(parts, scale, more):
        return np.concatenate([*parts, more]) * scale

    graph = {
        "a": DataNode("a", np.ones(100)),
        "b": Task("b", np.ones, 30),
        "c": Task("c", np.zeros, 5),
        "d": Task("d", join, List(TaskRef("b"), TaskRef("a")), 2, TaskRef("c")),
    }
    with gpuscheduler.Scheduler("cpu:1", fuse=False) as scheduler:
        assert len(scheduler.get(graph, "d")) == 135
        (sizes,) = set(asked)
        assert len(sizes) == 3
        assert sizes[1] == 800
