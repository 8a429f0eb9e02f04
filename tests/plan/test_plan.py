"""Every step in order, with what it should cost: data that a test can compare."""

from __future__ import annotations

from dataclasses import replace

import dask.array as da
import numpy as np
import pytest
from dask._task_spec import DataNode, Task, TaskRef
from dask.array.dispatch import to_numpy_dispatch
from dask.core import flatten
from hypothesis import given
from hypothesis import strategies as st

import gpuscheduler
from gpuscheduler.errors import OutOfMemory
from gpuscheduler.frontend.lowering import from_dask
from gpuscheduler.frontend.tiles import boxes_alike
from gpuscheduler.plan.build import make_plan
from gpuscheduler.plan.machine import Machine
from gpuscheduler.runtime import tape
from tests.support.strategies import (
    alter,
    cases,
    dags,
    graph_of,
    mix,
    plan_of,
    received_by_scheduler,
    thorough,
)


def blocks():
    return da.ones((40, 40), chunks=10) + 1  # 16 blocks of 800 bytes


def test_sizes_are_what_the_collection_says_or_that_of_the_largest_input():
    """x (known) - f (unknown): as large as x is the guess; a root of unknown size is nothing."""
    x = blocks()
    dsk = dict(x.__dask_graph__()) | {"r": Task("r", mix, 0)}
    plan = make_plan(graph_of(x), Machine.uniform(2))
    assert {(s.nbytes, s.known) for s in plan.steps} == {(800, True)}
    plan = make_plan(from_dask(dsk, ["r", x.__dask_keys__()]), Machine.uniform(2))
    assert {(s.nbytes, s.known) for s in plan.steps} == {(0, False)}


def test_a_step_that_can_never_fit_is_refused_before_anything_runs():
    """The error names the key, both numbers and what to do about it."""
    with pytest.raises(OutOfMemory) as error:
        make_plan(graph_of(blocks()), Machine.uniform(2, memory=799))
    for fact in ("800 bytes", "799 bytes", "device", "smaller chunks", "memory_limit"):
        assert fact in str(error.value)
    make_plan(graph_of(blocks()), Machine.uniform(2, memory=800))


class OnDevice:
    """800 bytes that live on device 1."""

    nbytes = 800


def test_a_value_that_lives_on_a_device_is_fixed_there_and_its_size_is_known():
    """It is a step, so that it can be copied and counted; it is not one to run."""
    dsk = {
        "v": DataNode("v", OnDevice()),
        "a": Task("a", id, TaskRef("v")),
        "w": DataNode("w", 7),
        "b": Task("b", mix, 1, TaskRef("w")),
    }

    def home(value):
        return 1 if isinstance(value, OnDevice) else None

    graph = from_dask(dsk, ["a", "b"], home=home)
    plan = make_plan(graph, Machine.uniform(2), home)
    v, a, b = (plan.steps[plan.index[k]] for k in "vab")
    assert [s.fixed for s in (v, a, b)] == [True, False, False]
    assert (v.place, v.nbytes, v.known, v.inputs) == (1, 800, True, ())
    assert v.task({}) is dsk["v"].value
    assert a.place == 1
    assert "w" not in plan.index  # on the host: the task has it as it is


def test_sizes_are_learned_where_they_were_guessed():
    plan = plan_of(("a", "", 0), ("b", "a", 0), memory=(99,), guessed="b")
    guesses = [s.nbytes for s in plan.steps]
    learned = plan.with_sizes([5, 6])
    assert [(s.nbytes, s.known) for s in learned.steps] == [(5, True), (6, False)]
    assert learned.tried
    assert [s.nbytes for s in plan.steps] == guesses
    assert not plan.tried
    assert learned.with_sizes([5, 6]) is learned
    assert learned.with_sizes([5, None, 99]) is learned  # chunks beside it are behind
    assert learned.with_sizes([5, 0], but={1}) is learned  # written elsewhere


def test_a_plan_is_frozen():
    plan = plan_of(("a", "", 0), ("b", "a", 0), memory=(99,))
    for name in ("steps", "tried", "machine", "reasons", "anything"):
        with pytest.raises(AttributeError):
            setattr(plan, name, None)


def test_plans_made_of_a_plan_keep_what_is_known_of_its_structure():
    plan = plan_of(("a", "", 0), ("b", "a", 0), memory=(99, 99))
    readers = plan.readers
    assert plan.with_facts(where="here").readers is readers
    other = plan.with_steps([replace(s, seconds=1.0) for s in plan.steps], tried=True)
    assert (other.readers, other.crossings) == (plan.readers, plan.crossings)
    assert other.history is plan.history
    assert (other.tried, plan.tried) == (True, False)


def test_a_guess_refuses_nothing():
    dsk = {"a": Task("a", bytes, 10**6), "b": Task("b", len, TaskRef("a"))}
    make_plan(from_dask(dsk, "b"), Machine.uniform(1, memory=1))


def test_an_input_read_twice_is_one_input_under_two_names():
    """b reads a, and an alias of a: one value to bring over, two names to give it."""
    dsk = {"a": (mix, 1), "alias": "a", "b": (mix, 2, "a", "alias")}
    plan = make_plan(from_dask(dsk, "b"), Machine.uniform(1))
    step = plan.steps[plan.index["b"]]
    assert step.inputs == (0,)
    assert step.names == ("a", "alias")
    assert step.values(lambda i: f"value of {i}") == {"a": "value of 0", "alias": "value of 0"}


def test_a_step_is_given_the_constants_of_the_graph():
    plan = make_plan(from_dask({"c": 5, "a": (mix, 1), "b": (mix, "c", "a")}, "b"), MACHINE)
    assert plan.steps[plan.index["b"]].values(lambda i: i) == {"a": 0, "c": 5}


MACHINE = Machine.uniform(2)


def test_results_that_are_gathered_on_the_host_are_delivered():
    """A NumPy array of several blocks; not a number, which is one block and stays where it is."""
    x = blocks()
    assert len(make_plan(graph_of(x), MACHINE).deliver) == 16
    assert not make_plan(graph_of(x.sum()), MACHINE).deliver


def test_each_value_crosses_to_each_device_once():
    """a on 0 is read twice on 1 and once on 2; b on 1 is read there only."""
    steps = ("a", "", 0, 7), ("b", "a", 1), ("c", "ab", 1), ("d", "a", 2), ("e", "cd", 2)
    plan = plan_of(*steps, memory=(99, 99, 99))
    assert plan.traffic() == {(0, 1): 7, (0, 2): 7, (1, 2): 8}
    assert plan.traffic([1, 1, 20, 1, 1]) == {(0, 1): 1, (0, 2): 1, (1, 2): 20}


def test_a_plan_prints_what_runs_where_and_what_moves():
    text = str(plan_of(("a", "", 0, 7000), ("b", "a", 1), memory=(9999, 9999)))
    assert text == (
        "2 steps on 2 devices\n"
        "  device 0: 1 steps, 0.001 s\n"
        "  device 1: 1 steps, 0.001 s\n"
        "  0 -> 1: 7,000 bytes"
    )


@thorough
@given(dags(), st.integers(1, 8))
def test_any_plan_reads_only_what_came_before(drawn, devices):
    dsk, keys = drawn
    plan = make_plan(from_dask(dsk, keys), Machine.uniform(devices))
    for i, step in enumerate(plan.steps):
        assert all(j < i for j in step.inputs)
        assert 0 <= step.place < devices
        assert plan.index[step.key] == i
        assert {dsk[k].key for k in step.names} == set(dsk[step.key].dependencies)
    assert {plan.steps[i].key for i in plan.outputs} == set(keys)


@thorough
@given(cases())
def test_readers_are_the_inverse_of_inputs(case):
    pairs = {(j, i) for i, s in enumerate(case.plan.steps) for j in s.inputs}
    assert {(j, i) for j, rs in enumerate(case.plan.readers) for i in rs} == pairs
    assert all(rs == sorted(set(rs)) for rs in case.plan.readers)


def test_blocks_that_the_gather_converts_are_made_on_the_device():
    """`.to_backend("numpy")` says what the result is to be, not where it is computed."""
    x = da.from_array(np.ones((8, 8)), chunks=4)
    ones = da.ones((8, 8), chunks=4)
    y = (ones * 2 + x).map_blocks(to_numpy_dispatch, meta=np.empty((0, 0)))
    graph = from_dask(*received_by_scheduler(y))
    (gather,) = graph.gathers.values()
    assert gather.to_host
    assert {graph.blocks[b].kind for b in flatten(gather.blocks)} == {"cupy.ndarray"}


def test_large_values_of_the_callers_are_no_reason_to_look_at_what_tasks_take():
    """x is in the caller's own memory. What a and b make may be: half of the limit, together with
    two as large as the larger one for the one device."""
    steps = ("x", "", 0, 10**6), ("a", "x", 0, 1000), ("b", "a", 0, 500)
    made = 1000 + 500 + 2 * 1000
    for limit, short in ((2 * made, False), (2 * made - 1, True)):
        plan = plan_of(*steps, memory=(limit,), fixed="x")
        alter(plan, machine=Machine.uniform(1, memory=limit, shared=True, arrays=2))
        assert plan.may_be_short == short


def test_what_kinds_of_steps_took_is_kept_with_the_plan():
    """The most of all runs, and of all plans that are like it."""
    plan = plan_of(("a", "", 0), ("b", "a", 0), memory=(64, 64), kinds="xy")
    like = replace(plan)
    assert (plan.task_memory, plan.may_be_short, like.may_be_short) == (0, False, False)
    assert plan.history.learn({ord("x"): 30, ord("y"): 2})
    assert plan.history.learn({ord("x"): 20, ord("y"): 4})
    assert not plan.history.learn({ord("x"): 30})
    assert like.history.extra == plan.history.extra == {ord("x"): 30, ord("y"): 4}
    assert plan.task_memory == plan.working_memory == 30
    plan = plan.with_facts()
    assert plan.may_be_short  # beside 16 bytes of values, of 64 in the one memory
    alter(plan, machine=replace(plan.machine, shared=True, arrays=2))
    assert (plan.task_memory, plan.working_memory) == (
        60,
        60,
    )  # on each of two devices; two of 8 are less


@given(st.data())
def test_boxes_of_what_is_alike(data):
    """Each element is in one box, and those in a box are equal. Where places are given in order, as
    they are to blocks, there are few."""
    shape = data.draw(st.lists(st.integers(1, 5), max_size=4))
    count = int(np.prod(shape))
    values = data.draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))
    for each in (values, sorted(values)):
        array = np.array(each).reshape(shape)
        boxes = boxes_alike(array)
        seen = np.zeros(shape, int)
        for box in boxes:
            seen[box] += 1
            assert np.ptp(array[box]) == 0
        np.testing.assert_array_equal(seen, 1)
    assert len(boxes) <= 3 * max(1, 2 * len(shape) - 1)


@pytest.mark.filterwarnings("ignore:Increasing number of chunks")
@pytest.mark.parametrize("blocks", [1, 2, 30])
def test_repr_of_what_holds_a_graph_is_one_short_line(blocks):
    """However many tasks there are: notebooks and debuggers print it."""
    x = da.random.random((10 * blocks, 10 * blocks), chunks=10)
    y = (x @ x + x.T).sum()
    with gpuscheduler.Scheduler("cpu:2") as s:
        y.compute()
        plan = s.plan(y)
        simulation = gpuscheduler.simulate(y, workers=2, devices=2)
        graph = from_dask(*received_by_scheduler(y))
        cut = simulation.cut
        known = [plan, plan.predicted, plan.machine, *s._plans.entries(), s, s.last, s.options]
        held = [graph, simulation, cut, *cut.stages, *cut.parcels, tape.record_tape(plan)]
    for shown in (*known, *held):
        assert len(repr(shown)) < 600, type(shown)
        assert "\n" not in repr(shown)
    steps = len(plan.steps)
    assert repr(plan).startswith(f"<Plan of {steps:,} step{'s'[: steps != 1]} on 2 devices, ")
    assert repr(graph) == f"<Graph of {len(graph.tasks):,} tasks for 1 keys>"
