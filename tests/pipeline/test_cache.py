"""A collection that was computed before is not planned again, and is never mistaken for another.

The scheduler here is a real one, on CPU threads; `planned` (conftest.py) grows with each plan made.
"""

from __future__ import annotations

import gc
import importlib
import tracemalloc
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import permutations
from operator import add
from types import SimpleNamespace

import dask
import dask.array as da
import dask.bag as db
import numpy as np
import pytest
import toolz
from dask._expr import HLGFinalizeCompute
from dask._task_spec import Task
from dask.callbacks import Callback
from dask.core import flatten

import gpuscheduler
from gpuscheduler import Scheduler
from gpuscheduler.pipeline import cache, compile
from gpuscheduler.pipeline.cache import MANY, STEP, PlanCache, PlanKey, signature
from gpuscheduler.pipeline.plan_entry import PlanEntry
from tests.frontend.test_graph import WORKLOADS


@pytest.fixture
def scheduler():
    with Scheduler(devices="cpu:2", check=True) as s:
        yield s


def table(n=8):
    return da.arange(n * n, chunks=n * n // 4).reshape((n, n)) + 1


# ---- the same collection


def test_a_collection_is_planned_once(scheduler, planned):
    x = table().sum(axis=0)
    first, second, third = x.compute(), x.compute(), x.compute()
    assert len(planned) == 1
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(first, third)
    np.testing.assert_array_equal(first, np.arange(64).reshape(8, 8).sum(0) + 8)
    assert len(scheduler._plans) == 1


def test_results_of_one_plan_share_no_memory(scheduler):
    """Who writes into the first result does not write into the second."""
    x = table()
    first = x.compute()
    first[:] = 0
    np.testing.assert_array_equal(x.compute(), np.arange(64).reshape(8, 8) + 1)


def test_a_plan_is_known_from_any_name_of_the_collection(scheduler, planned):
    """The very layers count, not the object that holds them."""
    x = table()
    again = da.Array(x.dask, x.name, x.chunks, meta=x._meta)
    np.testing.assert_array_equal(x.compute(), again.compute())
    assert len(planned) == 1


def test_compute_and_persist_want_different_things(scheduler, planned):
    """One array for the caller, or its blocks: two plans of the same layers."""
    x = table()
    np.testing.assert_array_equal(x.compute(), x.persist().compute())
    np.testing.assert_array_equal(x.compute(), x.persist().compute())
    assert len(planned) == 3  # compute, persist, and the blocks of the first persisted one


def test_the_expression_of_what_is_persisted_is_made_once(scheduler, planned, monkeypatch):
    """None is made of those that are known."""
    made, real = [], cache.collections_to_expr

    def seen(*args):
        made.append(args)
        return real(*args)

    monkeypatch.setattr(cache, "collections_to_expr", seen)
    x, b = table(), db.range(8, npartitions=2)
    for _ in range(3):
        np.testing.assert_array_equal(x.persist().compute(), np.arange(1, 65).reshape(8, 8))
        assert b.persist().compute() == list(range(8))
    assert len(made) == 2
    before = len(planned)
    x.persist(optimize_graph=False)
    assert (len(made), len(planned)) == (3, before + 1)
    with Callback(pretask=lambda *_: None):  # which sees the tasks: it is planned for that
        x.persist()
    assert len(made) == 4


def test_the_graph_of_a_result_is_built_once(scheduler, monkeypatch):
    """It has a task that reads all blocks, and Dask builds it at each look."""
    built, real = [], HLGFinalizeCompute.hlg.fget
    x = da.arange(32, chunks=2).persist()
    first, other = x + 1, x + 2
    for y in (first, other):
        np.testing.assert_array_equal(y.compute(), np.arange(32) + (1 if y is first else 2))

    def seen(expr):
        graph = real(expr)
        built.append(weakref.ref(graph))
        return graph

    monkeypatch.setattr(HLGFinalizeCompute, "hlg", property(seen))
    for n, y in enumerate((first, x + 1, other, x + 2)):  # known, from a template
        np.testing.assert_array_equal(y.compute(), np.arange(32) + (1 if n < 2 else 2))
        assert len(built) == n + 1
    gc.collect()
    assert not any(graph() for graph in built)


def test_what_is_no_graph_of_layers_is_persisted_as_dask_does_it(scheduler):
    class Plain:
        """A collection with the least that Dask asks for."""

        def __init__(self, dsk):
            self.dsk = dsk

        def __dask_graph__(self):
            return self.dsk

        def __dask_keys__(self):
            return [["plain"]]

        def __dask_postpersist__(self):
            return lambda dsk, *_: Plain(dsk), ()

        def __dask_postcompute__(self):
            return lambda results: results[0][0], ()

        __dask_optimize__ = staticmethod(lambda dsk, keys, **_: dsk)

    for _ in range(2):
        kept = scheduler.persist([Plain({"plain": (add, 1, 2)})])[0]
        assert dask.compute(kept, scheduler="sync") == (3,)


def test_several_collections_that_share_layers(scheduler, planned):
    """a and b read x. Together, the other way round, and by themselves: each planned once."""
    x = table()
    a, b = x.sum(), (x * 2).sum(axis=1)
    for _ in range(2):
        for order in permutations([(a, 2080), (b, 2 * np.arange(64).reshape(8, 8).sum(1) + 16)]):
            got = dask.compute(*(c for c, _ in order))
            for value, (_, expected) in zip(got, order, strict=True):
                np.testing.assert_array_equal(value, expected)
        assert a.compute() == 2080
    assert len(planned) == 3


def test_random_numbers_are_the_same_twice(planned):
    """A random array is a value that is not made yet: computed again it is the same."""
    x = da.random.default_rng(7).normal(size=(6, 6), chunks=3)
    y = da.random.RandomState(7).normal(size=(6, 6), chunks=3)
    z = gpuscheduler.random.default_rng(7).normal(size=(6, 6), chunks=3)
    with Scheduler(devices="cpu:2", check=True):
        for a in (x, y, z):
            first, second = a.compute(), a.compute()
            np.testing.assert_array_equal(first, second)
            np.testing.assert_array_equal(first, a.compute(scheduler="sync"))
    assert len(planned) == 3


def test_delayed_and_bags_work_twice(scheduler):
    d = dask.delayed(add)(1, dask.delayed(add)(2, 3))
    b = db.from_sequence(range(10), npartitions=3).map(lambda n: n * n)
    for _ in range(3):
        assert d.compute() == 6
        assert b.sum().compute() == 285
        assert b.compute() == [n * n for n in range(10)]
        assert dask.compute(d, b, table().sum()) == (6, [n * n for n in range(10)], 2080)


def test_a_failing_collection_fails_twice(scheduler, planned):
    """The plan is good, so it is kept; the task's own exception comes out each time, once noted."""

    def fail(block):
        raise ValueError("no")

    x = table().map_blocks(fail, dtype=int, meta=np.empty((0, 0), int))
    for _ in range(2):
        with pytest.raises(ValueError, match="^no") as error:
            x.compute()
        assert len(error.value.__notes__) == 1
    assert len(planned) == 1


def test_true_sizes_are_learned(scheduler):
    """Guesses at first; the second run goes by what the values were, which is no promise."""
    parts = [da.from_delayed(dask.delayed(np.arange)(n), (np.nan,), "i8") for n in (10, 20)]
    x = da.concatenate(parts)
    for _ in range(2):
        assert x.compute().size == 30
        (plan,) = scheduler._plans.plans()
        outputs = [plan.steps[i] for i in plan.outputs]
        assert [(s.nbytes, s.known) for s in outputs] == [(80, False), (160, False)]


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_reference_workloads_compute_twice_and_leave_no_plan(scheduler, planned, name):
    """Whatever layers an array is made of: planned once, the same again, gone with the array."""
    module = importlib.import_module(f"graphs.{name}")
    x = module.build(module.SMALL)
    first, second = x.compute(), x.compute()
    assert len(planned) == 1
    np.testing.assert_array_equal(first, second)
    del x
    gc.collect()
    assert not scheduler._plans


# ---- what makes another plan of it


def test_a_setting_that_changes_the_graph_plans_again(scheduler, planned):
    x = table().sum()
    for active in (None, False, None, False):
        with dask.config.set({"optimization.fuse.active": active}):
            assert x.compute() == 2080
    assert len(planned) == 2


def test_optimisation_switched_off_plans_again(scheduler, planned):
    x = table().sum()
    for optimize in (True, False, True, False):
        assert x.compute(optimize_graph=optimize) == 2080
    assert len(planned) == 2


def test_another_number_of_devices_plans_again(scheduler, planned):
    x = table().sum()
    for n in (2, 3, 2, 3):
        assert x.compute(num_workers=n) == 2080
    assert len(planned) == 2


def test_another_scheduler_has_plans_of_its_own(planned):
    x = table().sum()
    for _ in range(2):
        with Scheduler(devices="cpu:2"):
            assert x.compute() == 2080
    assert len(planned) == 2


def test_a_pin_plans_again(scheduler, planned):
    """Annotations are the layer's, so another pin is another layer, of the same name."""
    x = da.ones(8, chunks=4)
    for device in (0, 1):
        with dask.annotate(device=device):
            y = x + 1
        y = y.sum()
        assert y.compute() == 16
        (plan,) = scheduler._plans.plans()
        assert {s.place for s in plan.steps} == {device}
        del y, plan
        gc.collect()
    assert len(planned) == 2


def test_callbacks_that_see_tasks_or_change_them_plan_anew(scheduler, planned):
    """Such a plan is neither used nor kept."""
    seen = []
    x = table().sum()
    assert x.compute() == 2080
    for _ in range(2):
        with Callback(start=lambda dsk: seen.append(len(dsk))):
            assert x.compute() == 2080
    assert len(planned) == 1
    for _ in range(2):
        with Callback(pretask=lambda key, dsk, state: seen.append(key)):
            assert x.compute() == 2080
    assert len(planned) == 3
    with Callback(start=lambda dsk: dsk.update(dict(dsk))):
        assert x.compute() == 2080
    assert len(planned) == 4
    assert len(seen) > 4
    assert x.compute() == 2080
    assert len(planned) == 4


def test_a_cache_plans_anew(scheduler, planned):
    x = table().sum()
    for _ in range(2):
        with dask.config.set(cache={}):
            assert x.compute() == 2080
    assert len(planned) == 2
    assert not scheduler._plans


def test_a_dictionary_is_planned_each_time(scheduler, planned):
    """The caller may change it between two calls."""
    dsk = {"a": (add, 1, 1)}
    assert scheduler.get(dsk, "a") == 2
    dsk["a"] = (add, 2, 2)
    assert scheduler.get(dsk, "a") == 4
    assert len(planned) == 2


# ---- the same names and other data


def test_persisted_data_of_the_same_name_is_not_mixed_up(scheduler):
    """`persist()` keeps the name: x and its persisted self have equal keys and other layers."""
    calls = []

    def load(block):
        calls.append(1)
        return block

    x = da.ones(8, chunks=4).map_blocks(load, dtype=float, meta=np.empty(0))
    assert x.sum().compute() == 8
    assert len(calls) == 2
    p = x.persist()
    assert p.name == x.name
    assert len(calls) == 4
    assert (p.sum().compute(), p.sum().compute()) == (8, 8)
    assert len(calls) == 4  # from the blocks that are there
    assert x.sum().compute() == 8
    assert len(calls) == 6


def test_two_arrays_of_one_name_are_two_arrays(scheduler):
    """Blocks under keys that are the same, one after the other and both at hand."""
    a, b = (
        da.Array({("x", i): np.full(4, v + i) for i in range(2)}, "x", ((4, 4),), dtype="f8")
        for v in (1.0, 10.0)
    )
    for _ in range(2):
        assert a.compute().tolist() == [1] * 4 + [2] * 4
        assert b.compute().tolist() == [10] * 4 + [11] * 4
        assert (a + 1).compute()[0] == 2
        assert (b + 1).compute()[0] == 11


def test_a_new_array_at_an_old_address_is_not_the_old_one(scheduler):
    """Layers are known by identity; Python gives the identity of one that is gone to the next."""
    for v in range(30):
        x = da.Array({("x", 0): np.full(4, float(v))}, "x", ((4,),), dtype="f8")
        assert x.sum().compute() == 4 * v
        assert (x + 1).compute().tolist() == [v + 1] * 4
        del x
    gc.collect()
    assert not scheduler._plans
    assert scheduler._plans._plans.size == 0


FACTOR = 2


def times_factor(block):
    return block * FACTOR + 1


def test_a_plan_goes_when_a_global_that_it_was_made_of_has_changed(monkeypatch, planned):
    """The function was followed, once: its program holds the number that FACTOR was then. So does
    a variable around a function."""
    inner = 5

    def times_inner(block):
        return block * inner + 1

    x = table()
    y = x.map_blocks(times_factor, dtype=x.dtype, meta=x._meta)
    z = x.map_blocks(times_inner, dtype=x.dtype, meta=x._meta)
    want = np.arange(64).reshape(8, 8) + 1
    monkeypatch.setitem(compile.FUSE_FEWEST, "cpu", 1)
    with Scheduler(devices="cpu:2", fuse_least=0) as s:
        for _ in range(2):
            np.testing.assert_array_equal(y.compute(), want * 2 + 1)
            np.testing.assert_array_equal(z.compute(), want * 5 + 1)
        assert len(planned) == 2
        entry, *_ = s._plans.entries()
        assert [name for _, name, _ in entry.graph.globals] == ["FACTOR"]
        monkeypatch.setitem(globals(), "FACTOR", 3)
        inner = 7
        for _ in range(2):
            np.testing.assert_array_equal(y.compute(), want * 3 + 1)
            np.testing.assert_array_equal(z.compute(), want * 7 + 1)
        assert len(planned) == 4
        assert len(s._plans) == 2


def test_attributes_of_functions_are_what_they_are(monkeypatch):
    """A function that is followed finds copies of others, which have none."""

    def helper(block):
        return block

    def asked(block):
        return helper(block) * getattr(helper, "factor", 2) + hasattr(helper, "more")

    x = table()
    y = x.map_blocks(asked, dtype=x.dtype, meta=x._meta)
    want = np.arange(64).reshape(8, 8) + 1
    monkeypatch.setitem(compile.FUSE_FEWEST, "cpu", 1)
    with Scheduler(devices="cpu:2", fuse_least=0):
        for factor, more in ((2, 0), (3, 0), (4, 1)):
            for _ in range(2):
                np.testing.assert_array_equal(y.compute(), want * factor + more)
            helper.factor = factor + 1
            if factor == 3:
                helper.more = None


def test_what_somebody_puts_into_numpy_is_looked_at_again(monkeypatch):
    x = table()
    y = x.map_blocks(lambda block: block * np.factor, dtype=x.dtype, meta=x._meta)
    monkeypatch.setitem(compile.FUSE_FEWEST, "cpu", 1)
    with Scheduler(devices="cpu:2", fuse_least=0):
        for factor in (2, 3):
            monkeypatch.setattr(np, "factor", factor, raising=False)
            for _ in range(2):
                np.testing.assert_array_equal(y.compute()[0], factor * np.arange(1, 9))


@pytest.mark.parametrize("how", ["compute", "persist"])
def test_an_optimiser_at_the_address_of_an_earlier_one_is_another(scheduler, how):
    """Plans are kept for longer than what somebody has set for a while."""

    def optimiser(number):
        def filled(dsk, keys, **_):
            return {**dict(dsk), **{k: Task(k, np.full, (2, 8), number) for k in flatten(keys)}}

        return filled

    x = table()
    for number in range(6):
        with dask.config.set(array_optimize=optimiser(number)):
            got = getattr(x, how)()
        assert (got.compute(scheduler="sync") if how == "persist" else got).max() == number


# ---- letting go


SCALE = np.array([3.0])


def scaled(block, by=2, *, more=1):
    return abs(block) * by * SCALE + more


@toolz.curry
def curried(by, block):
    return block * SCALE if SCALE[0] > 4 else block * by


FUNCTIONS = (scaled, 2)


def of_a_tuple(block):
    return FUNCTIONS[0](block) * FUNCTIONS[1]


@pytest.mark.parametrize("function", [scaled, curried(2), partial(curried, 3), of_a_tuple])
def test_what_functions_are_made_of_is_looked_at_again(monkeypatch, function):
    """Changed attributes, a global that hides a function of Python's, and changed arrays of a
    curried function are seen.
    """
    x = (table() - 30).map_blocks(function, dtype=float, meta=np.empty((0, 0)))
    monkeypatch.setitem(compile.FUSE_FEWEST, "cpu", 1)
    kept = scaled.__code__
    words = {"more": 5}
    with Scheduler(devices="cpu:2", fuse_least=0) as s:

        def agree():
            np.testing.assert_array_equal(x.compute(scheduler=s.get), x.compute(scheduler="sync"))

        for _ in range(2):
            agree()
        for change in (
            lambda: monkeypatch.setitem(globals(), "SCALE", np.array([5.0])),
            lambda: SCALE.fill(6),
            lambda: monkeypatch.setattr(scaled, "__defaults__", (7,)),
            lambda: monkeypatch.setattr(scaled, "__kwdefaults__", words),
            lambda: words.update(more=8),
            lambda: monkeypatch.setitem(globals(), "abs", np.negative),
            lambda: monkeypatch.setattr(scaled, "__code__", of_other_code.__code__),
        ):
            change()
            agree()
    assert scaled.__code__ is not kept


def of_other_code(block, by=2, *, more=1):
    return block * by * SCALE - more


def test_a_plan_goes_with_its_collection_and_so_do_its_arrays(scheduler):
    """The only thing that holds the data is the collection."""
    block = np.ones(1000)
    array = weakref.ref(block)
    x = da.Array({("x", 0): block}, "x", ((1000,),), dtype="f8") + 1
    del block
    assert x.compute().sum() == 2000
    assert len(scheduler._plans) == 1
    (plan,) = scheduler._plans.plans()
    plan = weakref.ref(plan)
    gc.collect()
    assert array() is not None
    del x
    gc.collect()
    assert (array(), plan()) == (None, None)
    assert not scheduler._plans
    assert scheduler._plans._plans.size == 0


def test_a_plan_stays_while_what_it_is_made_of_does(scheduler, planned, monkeypatch):
    """y is dropped and made again from x: its own layer is new, so it is planned anew."""
    monkeypatch.setattr(PlanCache, "likeness", lambda *_: None)
    x = table()
    for _ in range(2):
        y = x.sum()
        assert y.compute() == 2080
        assert len(scheduler._plans) == 1
        del y
        gc.collect()
        assert not scheduler._plans
    assert len(planned) == 2


def test_closing_drops_all_plans():
    with Scheduler(devices="cpu:2") as s:
        x = table()
        x.compute()
        assert len(s._plans) == 1
    assert not s._plans
    assert s._plans.nbytes == 0


@pytest.fixture
def unlike(monkeypatch):
    """No collection is like another one."""
    monkeypatch.setattr(PlanCache, "likeness", lambda *_: None)


def test_the_oldest_plans_make_room_for_the_newest(scheduler, planned, unlike):
    """Room for 20 steps: two plans of 8. The one that was not used for longest goes."""
    xs = [da.ones(8, chunks=1) + n for n in range(3)]
    scheduler._plans._plans.limit = 20 * STEP
    for n in (0, 1, 0, 2):  # 1 goes
        assert xs[n].compute().tolist() == [n + 1] * 8
    assert len(planned) == 3
    assert len(scheduler._plans) == 2
    assert scheduler._plans._plans.size == 16 * STEP
    xs[0].compute()
    assert len(planned) == 3
    xs[1].compute()  # 2 goes
    assert len(planned) == 4
    xs[0].compute()
    assert len(planned) == 4


def test_a_plan_beyond_the_limit_is_not_kept(scheduler, planned, unlike):
    x = da.ones(40, chunks=1) + 1
    y = da.ones(4, chunks=1) + 1
    scheduler._plans._plans.limit = 20 * STEP
    y.compute()
    for _ in range(2):
        assert x.compute().sum() == 80
    y.compute()
    assert len(planned) == 3  # x twice; it did not drive y out
    assert scheduler._plans._plans.size == 4 * STEP


LARGE = {
    "blocks that are made": lambda: (da.ones(12_000, chunks=10) * 2 + 1).sum(),
    "blocks of the caller's": lambda: (da.from_array(np.ones(12_000), chunks=10) * 2 + 1).sum(),
    "a user's function": lambda: da.ones(12_000, chunks=10).map_blocks(lambda b: b[::-1]).sum(),
    "other chunks": lambda: da.ones(2_400, chunks=4).rechunk(6).max(),
    "tuples": lambda: da.from_array(np.ones((200, 240)), chunks=(4, 10)).var(axis=0),
}


@pytest.mark.parametrize("workload", LARGE)
def test_bytes_of_a_plan_are_about_what_is_free_when_it_goes(workload):
    x, y = LARGE[workload](), LARGE[workload]()
    with Scheduler("cpu:2") as s:
        y.compute()
        s._plans.clear()
        tracemalloc.start()
        try:
            x.compute()
            gc.collect()
            (plan,) = s._plans.plans()
            assert len(plan.steps) >= MANY
            said = s._plans._plans.size
            del plan
            before = tracemalloc.get_traced_memory()[0]
            s._plans.clear()
            gc.collect()
            free = before - tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
    assert 0.5 * free <= said <= 3 * free  # what layers still hold is not free


@pytest.mark.parametrize("limit", [0, 40_000, 200_000, 1_000_000])
def test_plans_and_templates_take_no_more_than_the_option_says(limit):
    kept = 0
    with Scheduler("cpu:2", plan_memory=limit) as s:
        xs = [da.ones(4 + n, chunks=1) * n for n in range(30)]
        for x in xs:
            x.compute()
            assert s._plans.nbytes <= limit
            kept = max(kept, len(s._plans))
    assert (kept > 0) == (limit > 0)


def test_what_plans_may_take_is_an_option_of_dasks_configuration():
    with dask.config.set({"gpuscheduler.plan-memory": "3 MiB"}), Scheduler("cpu:1") as s:
        assert s._plans.limit == 3 * 2**20
    with Scheduler("cpu:1") as s:
        assert s._plans.limit == 2**28
    with pytest.raises(ValueError, match="plan_memory='much'"):
        Scheduler("cpu:1", plan_memory="much")


def test_plans_go_where_the_process_takes_more_than_it_may(scheduler, planned, monkeypatch):
    """What others need is found to be short in the middle of a run."""
    monkeypatch.setattr(cache, "LEAST", 0)
    x = da.ones(8, chunks=1) + 1
    x.compute()
    trimmer = scheduler.hardware.trimmer
    trimmer.let_go(trimmer.pace)
    assert len(scheduler._plans) == 1
    trimmer.limit = trimmer.full = 0
    trimmer.let_go(trimmer.pace)
    assert scheduler._plans.nbytes == 0
    assert x.compute().tolist() == [2] * 8
    assert len(planned) == 2


def test_plans_are_kept_in_a_part_of_the_memory_that_is_there(monkeypatch):
    monkeypatch.setattr(cache, "LEAST", 40 * STEP)
    available = [10**9]
    plans = PlanCache(1000 * STEP, lambda: available[0], part=1 / 4)
    layers = [da.ones(4, chunks=2, name=f"x{n}").dask.layers[f"x{n}"] for n in range(90)]

    def keep(n):
        plan = SimpleNamespace(steps=[None] * 10)
        plans.keep(PlanKey((n,), [layers[n]]), entry=PlanEntry(None, plan))

    for n in range(40):
        keep(n)
    assert len(plans) == 40
    available[0] = 0  # a quarter of what plans take is theirs, but for the least
    keep(40)
    assert plans.nbytes <= 120 * STEP
    assert plans.find(PlanKey((0,), [layers[0]])) is None
    for n in range(41, 90):
        keep(n)
        assert 0 < plans.nbytes <= 120 * STEP


def test_a_layer_that_cannot_be_watched_is_no_error():
    class Slotted:
        __slots__ = ()

    plans = PlanCache()
    plans.keep(PlanKey(("w",), [Slotted()]), 1, entry=PlanEntry(None, None))
    assert plans.find(PlanKey(("w",), [Slotted()]), 1) is None


def test_only_expressions_of_layers_have_a_signature():
    assert signature({"a": 1}, ("a",)) is None
    dask_array = pytest.importorskip("dask_array")
    x = dask_array.ones(4, chunks=2) + 1
    assert signature(x.expr, ()) is None


def test_arrays_of_expressions_work_twice(scheduler):
    dask_array = pytest.importorskip("dask_array")
    x = dask_array.ones((8, 8), chunks=4)
    y = (x + x.T).sum(axis=0)
    for _ in range(2):
        np.testing.assert_array_equal(y.compute(), np.full(8, 16.0))


# ---- threads


def test_many_threads_compute_few_collections(scheduler):
    """One plan may serve several runs at once: a plan is data, and each run has its own state."""
    xs = [(table() * n).sum(axis=0) for n in range(4)]
    expected = [n * (np.arange(64).reshape(8, 8).sum(0) + 8) for n in range(4)]

    def one(i):
        np.testing.assert_array_equal(xs[i % 4].compute(scheduler=scheduler.get), expected[i % 4])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(64)))
    assert len(scheduler._plans) == 4


def test_threads_that_drop_what_others_compute(scheduler):
    """Plans come and go under the feet of others: the sum of steps stays what it is."""

    def one(i):
        x = da.ones(8, chunks=2) + i
        assert x.compute(scheduler=scheduler.get).sum() == 8 * (i + 1)
        assert x.sum().compute(scheduler=scheduler.get) == 8 * (i + 1)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(64)))
    gc.collect()
    assert not scheduler._plans
    assert scheduler._plans._plans.size == 0
