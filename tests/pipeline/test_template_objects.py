"""Objects of other libraries in tasks: what is planned once, and what depends on them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import dask.array as da
import numpy as np
import pytest
from dask._task_spec import Task, TaskRef
from dask.delayed import delayed
from dask.highlevelgraph import HighLevelGraph

from gpuscheduler import Scheduler
from gpuscheduler.frontend.compiled_task import Chain
from gpuscheduler.frontend.task import kernels_of
from gpuscheduler.pipeline import template

xr = pytest.importorskip("xarray")
pd = pytest.importorskip("pandas")


class Scale:
    """An object of the user's, which may change."""

    def __init__(self, factor):
        self.factor = factor

    def __call__(self, block):
        return block * self.factor

    def multiply(self, block):
        return block * self.factor

    def add(self, block, more):
        return block * self.factor + more

    def sort(self, block):
        return multiply_sorted(block, self)

    def choose(self, block):
        return block * 2 if self.factor > 2 else block - 1


def multiply(block, scale):
    return block * scale.factor


def multiply_sorted(block, scale):
    return np.sort(block, axis=1) * float(np.linalg.norm([scale.factor]))


def multiply_named(block, first, scale):
    return scale(block) * first


def choose(block, scale):
    """One of two kernels, as the object says."""
    return block * 2 if scale.factor > 2 else block - 1


def of_first(block, scales):
    return block * scales[0].factor


def of_named(block, scales):
    return block * scales["first"].factor


def around(f, scale):
    def inner(block):
        return f(block, scale)

    return inner


def by_default(scale):
    def inner(block, scale=scale):
        return block * scale.factor

    return inner


#: How an object comes into a task: a collection, of an array and the object.
WAYS = {
    "argument": lambda x, o: x.map_blocks(multiply, o, dtype="f8"),
    "named argument": lambda x, o: x.map_blocks(multiply, scale=o, dtype="f8"),
    "sorted": lambda x, o: x.map_blocks(multiply_sorted, o, dtype="f8"),
    "sorted, named": lambda x, o: x.map_blocks(multiply_sorted, scale=o, dtype="f8"),
    "chosen": lambda x, o: x.map_blocks(choose, o, dtype="f8"),
    "partial": lambda x, o: x.map_blocks(partial(multiply, scale=o), dtype="f8"),
    "sorted by a partial": lambda x, o: x.map_blocks(partial(multiply_sorted, scale=o), dtype="f8"),
    "called by a partial": lambda x, o: x.map_blocks(partial(o), dtype="f8"),
    "partial of a partial": lambda x, o: x.map_blocks(
        partial(partial(multiply_named, first=1), scale=partial(o)), dtype="f8"
    ),
    "method in a partial": lambda x, o: x.map_blocks(partial(o.add, more=1), dtype="f8"),
    "method that sorts, in a partial": lambda x, o: x.map_blocks(partial(o.sort), dtype="f8"),
    "method": lambda x, o: x.map_blocks(o.multiply, dtype="f8"),
    "method that sorts": lambda x, o: x.map_blocks(o.sort, dtype="f8"),
    "method that chooses": lambda x, o: x.map_blocks(o.choose, dtype="f8"),
    "called": lambda x, o: x.map_blocks(o, dtype="f8"),
    "closure": lambda x, o: x.map_blocks(around(multiply, o), dtype="f8"),
    "closure that sorts": lambda x, o: x.map_blocks(around(multiply_sorted, o), dtype="f8"),
    "default": lambda x, o: x.map_blocks(by_default(o), dtype="f8"),
    "in a tuple": lambda x, o: x.map_blocks(of_first, (o, 1), dtype="f8"),
    "in a list": lambda x, o: x.map_blocks(of_first, [o], dtype="f8"),
    "in a dictionary": lambda x, o: x.map_blocks(of_named, {"first": o}, dtype="f8"),
    "twice": lambda x, o: x.map_blocks(multiply_sorted, o, dtype="f8").map_blocks(
        multiply, o, dtype="f8"
    ),
    "twice, reduced": lambda x, o: (
        x.map_blocks(multiply, o, dtype="f8") + x.map_blocks(multiply_sorted, o, dtype="f8")
    ).sum(axis=0),
    "vectorized": lambda x, o: x.map_blocks(
        np.vectorize(lambda v: v * o.factor, otypes=["f8"]), dtype="f8"
    ),
    "delayed": lambda x, o: da.from_delayed(
        delayed(multiply_sorted)(x, o), shape=x.shape, dtype="f8", meta=np.empty((0, 0))
    ),
    "value of a key": lambda x, o: x + of_factor(delayed(o)),
    "value of a key, in a tuple": lambda x, o: x + of_factor(delayed((o, 1), traverse=False)),
    "value of a key, in a list": lambda x, o: x + of_factor(delayed([(o, 1)], traverse=False)),
    "value of a key, in a dictionary": lambda x, o: (
        x + of_factor(delayed({"first": o}, traverse=False))
    ),
    "values of two keys": lambda x, o: of_factor(delayed(o)) + of_factor(delayed(Scale(3.0))),
    "axis": lambda x, o: da.apply_along_axis(
        multiply_sorted_row, 1, x, dtype="f8", shape=(x.shape[1],), scale=o
    ),
}


def find_factor(it):
    """The factor of the first object that is in containers."""
    while not isinstance(it, Scale):
        it = it["first"] if isinstance(it, dict) else it[0]
    return it.factor


def of_factor(value):
    """An array of no axes: a factor, which a task finds in the value of another key."""
    return da.from_delayed(delayed(find_factor)(value), (), dtype="f8")


def multiply_sorted_row(row, scale):
    return multiply_sorted(row[None], scale)[0]


def check_way(way, send=lambda x: x, fetch=np.asarray):
    """Objects that differ, that change, and that are others of the same value."""
    before = []
    for n, factor in enumerate([2.0, 3.0, 3.0, 1.0]):
        a = np.random.default_rng(n).random((8, 6))
        scale = Scale(factor)
        x = da.from_array(a, chunks=(4, 6))
        y = WAYS[way](send(x), scale)
        want = WAYS[way](x, scale)
        for changed in (factor, factor + 4):
            scale.factor = changed
            for made, due in [(y, want), *before]:
                expected = due.compute(scheduler="sync")
                np.testing.assert_allclose(fetch(made.compute()), expected, rtol=1e-12)
        before = [(y, want)]


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_objects_that_change(way, fuse):
    with Scheduler(devices="cpu:2", fuse=fuse, fuse_least=0):
        check_way(way)


class Odd(Scale):
    """An object that says odd things of itself, as symbols, proxies and lists do."""

    def __eq__(self, other):
        return np.array([True, True])

    __hash__ = None

    def __bool__(self):
        raise ValueError("neither true nor false")


class Alike(Scale):
    """An object that is equal to everything, and empty."""

    def __eq__(self, other):
        return True

    __hash__ = None

    def __len__(self):
        return 0


@pytest.mark.parametrize("kind", [Odd, Alike])
@pytest.mark.parametrize("way", WAYS)
def test_objects_that_say_odd_things_of_themselves(way, kind, monkeypatch):
    """They are neither compared, counted nor asked whether they are true."""
    if kind is Odd and way == "called":
        pytest.skip("Dask compares what it calls with functions of its own")
    monkeypatch.setitem(globals(), "Scale", kind)
    with Scheduler(devices="cpu:2", fuse_least=0):
        check_way(way)


def test_what_is_called_as_it_is_written_is_planned_once():
    with Scheduler(devices="cpu:2", fuse_least=0) as s:
        for way in ("sorted", "sorted by a partial", "method that sorts"):
            for factor in (2.0, 3.0):
                a = np.random.default_rng(int(factor)).random((8, 6))
                y = WAYS[way](da.from_array(a, chunks=(4, 6)), Scale(factor))
                np.testing.assert_allclose(y.compute(), np.sort(a, axis=1) * factor, rtol=1e-12)
            assert ways_of_planning(s)[-2:] == ["new", "template"], way


def ways_of_planning(scheduler):
    return [run.planned for run in scheduler.recorder.runs]


def labelled(seed, name="t"):
    """A labelled array in blocks, with coordinates of its own."""
    a = np.random.default_rng(seed).random((24, 5))
    times = pd.date_range(f"20{seed:02}-01-01", periods=24, freq="MS")
    coords = {"time": times, "x": np.arange(5) + seed}
    return xr.DataArray(
        a, dims=("time", "x"), coords=coords, name=f"{name}{seed}", attrs={"n": seed}
    )


PROGRAMS = {
    "arithmetic": lambda t: t * 2 + 1,
    "mean": lambda t: t.mean("time"),
    "anomalies": lambda t: t - t.mean("time"),
    "selected": lambda t: t.isel(time=slice(3, 20, 2)),
    "sorted": lambda t: t.sortby("x", ascending=False) + t,
    "coarsened": lambda t: t.coarsen(time=4).max(),
    "rolling": lambda t: t.rolling(time=3).mean(),
    "dataset": lambda t: xr.Dataset({"a": t, "b": t.max("x")}),
    "groups": lambda t: t.groupby("time.month").mean(),
    "quantile": lambda t: (t.chunk({"time": -1}) if t.chunks else t).quantile(0.3, "time"),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_labelled_arrays_are_planned_once(program):
    """Results have the labels, names and attributes of their own."""
    with Scheduler(devices="cpu:2", fuse_least=0) as s:
        for seed in range(3):
            t = labelled(seed)
            got = PROGRAMS[program](t.chunk({"time": 12})).compute()
            xr.testing.assert_allclose(got, PROGRAMS[program](t))
            xr.testing.assert_identical(got.isnull(), PROGRAMS[program](t).isnull())
        # coordinates may be wanted as they are: there is no template of such a graph
        assert ways_of_planning(s) == ["new", *["new" if program == "dataset" else "template"] * 2]


def test_labels_that_differ_are_other_tasks():
    """Groups are told by their labels."""
    with Scheduler(devices="cpu:2", fuse_least=0):
        for months in (24, 18, 24):
            for labels in ("time.month", "time.year", "time.season"):
                t = labelled(1).isel(time=slice(0, months))
                got = t.chunk({"time": 12}).groupby(labels).mean().compute()
                xr.testing.assert_allclose(got, t.groupby(labels).mean())


def multiply_first(block, numbers):
    return block * numbers[0]


def sort_and_multiply(block, numbers):
    return np.sort(block, axis=1) * float(np.linalg.norm(numbers))


def with_numbers(x, function, numbers):
    """A collection with a task for each block, which has the array."""
    layer = {
        ("y", *where): Task(("y", *where), function, TaskRef((x.name, *where)), numbers)
        for where in np.ndindex(x.numblocks)
    }
    graph = HighLevelGraph.from_collections("y", layer, [x])
    return da.Array(graph, "y", x.chunks, dtype="f8")


NUMBERS = {
    "in a kernel": lambda x, n: with_numbers(x, multiply_first, n),
    "as it is written": lambda x, n: with_numbers(x, sort_and_multiply, n),
    "indices": lambda x, n: x.vindex[n.astype(int).tolist(), [0, 3]],
    "points": lambda x, n: x.vindex[n.astype(int), np.array([0, 3])],
}


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("way", NUMBERS)
def test_small_arrays_that_are_told_by_their_values(way, fuse):
    """Of equal values, changed in place, and of the values that another had before."""
    with Scheduler(devices="cpu:2", fuse=fuse, fuse_least=0) as s:
        made, numbers = [], []
        for n, values in enumerate([(2, 5), (2, 5), (3, 5), (2, 5), (2, 5)]):
            a = np.random.default_rng(n).random((8, 6))
            numbers.append(np.array(values, dtype="f8"))
            x = da.from_array(a, chunks=(4, 6), name=f"x{n}")
            made.append(NUMBERS[way](x, numbers[-1]))
            for y in made:
                np.testing.assert_allclose(y.compute(), y.compute(scheduler="sync"), rtol=1e-12)
            if n == 2:
                numbers[0][:] = 1, 4
                for y in made:
                    np.testing.assert_allclose(y.compute(), y.compute(scheduler="sync"), rtol=1e-12)
        if way in ("indices", "points"):
            assert ways_of_planning(s)[-1] == "template"


def test_kernels_that_stand_for_functions_with_objects_get_no_template():
    """No such function is traced today; if one were, its kernel would be that object's own."""
    scale = Scale(2.0)
    x = da.from_array(np.ones((8, 6)), chunks=(4, 6)) * 2 + 1
    with Scheduler(devices="cpu:1", fuse_least=0) as s:
        (step, *_) = [step for step in s.plan(x).steps if kernels_of(step.task)]
    taken = template._DataTaker(
        SimpleNamespace(beside=()), SimpleNamespace(data=(scale,), around=())
    )
    called = Task("y", multiply, TaskRef("x"), scale)
    kernel = step.task.with_originals(lambda _: called)
    for task in (kernel, Chain([("x", step.task), ("y", kernel)])):
        assert taken.empty_step(0, replace(step, task=task, constants={})) is None
    for task in (called, Chain([("x", step.task), ("y", called)])):
        found = taken.empty_step(0, replace(step, task=task, constants={}))
        assert found is not None
        assert found.task is not task
