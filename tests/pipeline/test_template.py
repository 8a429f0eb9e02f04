"""A collection that is like an earlier one is not planned again: same results, and never another's.

`planned` (conftest.py) grows with each plan that is made, on a scheduler of CPU devices.
"""

from __future__ import annotations

import gc
import operator
import weakref
from functools import partial
from typing import NamedTuple

import dask
import dask.array as da
import numpy as np
import pytest
from dask._expr import FinalizeCompute
from dask.base import collections_to_expr
from dask.core import flatten
from dask.highlevelgraph import HighLevelGraph
from dask.utils import apply
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gpuscheduler
from gpuscheduler import Scheduler
from gpuscheduler.fusion.horizontal import TupleItemKey
from gpuscheduler.pipeline import compile, fingerprint
from gpuscheduler.pipeline.cache import STEP
from gpuscheduler.pipeline.fingerprint import FingerprintReader


@pytest.fixture
def scheduler():
    with Scheduler(devices="cpu:2", check=True) as s:
        yield s


def likeness(*collections):
    expr = FinalizeCompute(collections_to_expr(collections)).optimize()
    wanted = tuple(flatten(expr.__dask_keys__()))
    return FingerprintReader().likeness(expr, wanted, lambda value: None)


def words(*collections):
    found = likeness(*collections)
    return None if found is None else found.words


def table(seed=0, shape=(8, 6), chunks=(4, 3), dtype="f8"):
    values = np.random.default_rng(seed).integers(-9, 10, shape).astype(dtype)
    return da.from_array(values, chunks=chunks), values


# ---- rounds of an iteration


def test_a_descent_is_planned_once(scheduler, planned):
    x, a = table(shape=(64, 8), chunks=(16, 8))
    y, b = table(1, shape=(64,), chunks=16)
    x, y = dask.persist(x, y)
    planned.clear()
    w, v = np.zeros(8), np.zeros(8)
    for _ in range(6):
        w = w - 0.01 * (((x @ w - y)[:, None] * x).sum(0) / 64).compute()
        v = v - 0.01 * ((a @ v - b)[:, None] * a).sum(0) / 64
        np.testing.assert_allclose(w, v, rtol=1e-12)
    assert len(planned) == 1


@pytest.mark.parametrize("keep", ["persist", "compute"])
def test_steps_of_a_recurrence_are_planned_once(scheduler, planned, keep):
    x, a = table()
    x = x.persist()
    z, want = x, a
    counts = []
    for _ in range(6):
        z, want = z * 0.5 + x.T.T, want * 0.5 + a
        z = z.persist() if keep == "persist" else da.from_array(z.compute(), chunks=(4, 3))
        np.testing.assert_array_equal(z.compute(scheduler="sync"), want)
        counts.append(len(planned))
    assert counts[2:] == [counts[2]] * 4


def test_what_is_persisted_has_its_own_names(scheduler, planned):
    for seed in range(3):
        x = table(seed)[0]
        y = (x + 1).persist()
        assert set(flatten(y.__dask_keys__())) == set(y.dask)
        for key in flatten(y.__dask_keys__()):
            assert y.dask[key].key == key
            assert repr(key) in repr(y.dask[key].func)
        np.testing.assert_array_equal(y.compute(), x.compute(scheduler="sync") + 1)
    assert len(planned) <= 3


@pytest.mark.parametrize("name", ["heat_stencil", "tall_skinny_svd", "standardize", "matmul",
                                  "transpose_sum", "hillshade", "logistic_step", "haversine_mesh",
                                  "gauss_sum", "black_scholes", "random_slice_sum"])  # fmt: skip
def test_a_workload_that_is_built_again_is_known(scheduler, planned, name):
    graph = __import__(f"gpuscheduler.graphs.{name}", fromlist=["build"])
    results = [graph.build(graph.SMALL).compute() for _ in range(3)]
    assert len(planned) == 1
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


def windows(x):
    return da.lib.stride_tricks.sliding_window_view(x, 3, axis=1)


#: Of whose tasks Dask says something with lists, dictionaries, arrays or functions made anew.
LISTS = {
    "apply_along_axis": lambda x: da.apply_along_axis(np.sum, 1, x.rechunk((4, 6))),
    "argmax": lambda x: x.argmax(axis=0),
    "argwhere": lambda x: da.argwhere(x > 0),
    "coarsen": lambda x: da.coarsen(np.mean, x, {0: 2, 1: 3}),
    "compress": lambda x: da.compress(np.arange(8) % 3 == 0, x, axis=0),
    "corrcoef": da.corrcoef,
    "cumsum": lambda x: x.cumsum(axis=0),
    "delete": lambda x: da.delete(x, [1, 5], axis=0),
    "gradient": lambda x: da.gradient(x, axis=1),
    "histogram": lambda x: da.histogram(x, 5, (-9, 9), weights=x)[0],
    "histogram of edges": lambda x: da.histogram(x, [-9, -1, 0, 9])[0],
    "histogramdd": lambda x: da.histogramdd(x.rechunk((4, 6))[:, :2], 3, [(-9, 9)] * 2)[0],
    "list": lambda x: x[[5, 1, 1, 7]],
    "map_overlap": lambda x: x.map_overlap(lambda b: b * 2, depth=1, boundary="reflect"),
    "mask": lambda x: x[np.arange(8) % 2 == 0],
    "median": lambda x: da.median(x, axis=1),
    "nanargmin": lambda x: da.nanargmin(x, axis=1),
    "percentile": lambda x: da.percentile(x.ravel(), [10, 50]),
    "quantile": lambda x: da.quantile(x, 0.3, axis=[1]),
    "tril": da.tril,
    "vindex": lambda x: x.vindex[[0, 3, 3], [5, 0, 1]],
    "windows": lambda x: windows(x).argmax(axis=-1),
}


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("name", LISTS)
def test_functions_of_dask_that_are_told_by_lists(planned, name, fuse):
    with Scheduler(devices="cpu:2", check=True, fuse=fuse, fuse_least=0):
        for seed in range(3):
            x = table(seed)[0]
            got = LISTS[name](x).compute()
            want = LISTS[name](x).compute(scheduler="sync")
            assert got.dtype == want.dtype
            np.testing.assert_allclose(got, want, rtol=1e-12)
    # one plan may take more than one reading, where layers are left apart
    assert len({*map(tuple, planned)}) == 1


@pytest.mark.parametrize("fuse", [True, False])
def test_lists_that_somebody_changes(fuse):
    """Those of a plan are what its tasks have; those of a new collection may say the same."""
    x, a = table()
    edges, axis, taken = np.array([-9.0, 0, 9]), [1], np.array([0, 1])

    def every(edges, axis, taken):
        yield da.histogram(x, edges)[0], lambda: np.histogram(a, edges)[0]
        yield da.quantile(x, 0.5, axis=axis), lambda: np.quantile(a, 0.5, axis=tuple(axis))
        yield x[taken], lambda: a[taken]
        meta = {"dtype": "f8", "meta": np.empty((0, 0))}
        yield x.map_blocks(np.digitize, edges, **meta), lambda: np.digitize(a, edges)
        yield (
            x.map_blocks(np.clip, a_min=edges[0], a_max=edges[1], **meta),
            lambda: np.clip(a, edges[0], edges[1]),
        )

    with Scheduler(devices="cpu:2", fuse=fuse, fuse_least=0):
        for n in range(3):
            for of in ((edges, axis, taken), (edges.copy(), [*axis], taken.copy())):
                for y, want in every(*of):
                    np.testing.assert_array_equal(y.compute(), want())
            edges[1], taken[n % 2] = n - 3, n + 2
            axis[0] = n % 2


@pytest.mark.parametrize("fuse", [True, False])
def test_lists_in_layers_that_were_read_before(fuse):
    """What is like another's plan is no more once its own list says something else."""
    x, a = table()
    of, first = np.array([-9.0, 0, 9]), da.histogram(x, np.array([-9.0, 0, 9]))[0]
    axis, quantile = [1], da.quantile(x, 0.5, axis=[1])
    second, other = da.histogram(x, of)[0], da.quantile(x, 0.5, axis=axis)
    with Scheduler(devices="cpu:2", fuse=fuse, fuse_least=0):
        for y in (first, second, quantile, other):
            (y + 1).compute()
        of[1], axis[0] = 0.5, 0
        np.testing.assert_array_equal((second + 1).compute(), np.histogram(a, of)[0] + 1)
        want = (other + 1).compute(scheduler="sync")
        np.testing.assert_array_equal((other + 1).compute(), want)


def test_an_array_that_is_read_and_told_by_its_values(scheduler):
    """Another of the same values may be told in the next round, and others be read."""
    for n in range(3):
        x, a = table(n)
        edges = np.array([-9.0, 0, 9])
        b = edges if n == 0 else edges + n
        y = da.Array({(f"edges {n}", 0): b}, f"edges {n}", ((3,),), dtype="f8")
        z = da.histogram(x, edges)[0].astype("f8") + y[:2]
        np.testing.assert_array_equal(z.compute(), np.histogram(a, edges)[0] + b[:2])


def test_a_mesh_of_a_function_that_is_made_again(scheduler, planned):
    axes = [gpuscheduler.axis(0, 1, 40)] * 2
    for power in (2, 3, 2):
        z = gpuscheduler.mesh(lambda x, y, p=power: x**p + y, axes, chunks=20)
        x = np.linspace(0, 1, 40)
        np.testing.assert_allclose(z.compute(), x[:, None] ** power + x)
    assert len(planned) == 2


# ---- what makes two different


def test_constants_count(scheduler):
    x, a = table()
    for factor in (1, 2, True, 1.0, 2.0, np.float32(2), -0.0, 0.0, 2j):
        got = (x * factor).compute()
        assert got.dtype == (a * factor).dtype
        np.testing.assert_array_equal(got, a * factor)
        np.testing.assert_array_equal(np.signbit(got.real), np.signbit((a * factor).real))


def test_alike_and_not():
    x, y = table()[0], table(1)[0]
    z = table(2, chunks=(2, 6))[0]
    assert words(x + y) == words(y + x)
    assert words(x + y) != words(x + x)  # one array twice
    assert words(x + 1) != words(y - 1)
    assert words(x + 1) != words(z + 1)
    assert words(x[1:]) != words(y[2:])
    assert words(x.sum(0)) != words(y.sum(1))
    assert words(x.T) != words(y)
    assert words(x, y) != words(y)
    assert words(x.astype("f4")) != words(y.astype("f8"))
    assert words(table(3, dtype="f4")[0] + 1) != words(x + 1)
    c, f = (
        da.Array({("x", 0, 0): np.ones((8, 6), order=o)}, "x", ((8,), (6,)), "f8") for o in "CF"
    )
    assert words(c + 1) != words(f + 1)
    with dask.annotate(device=1):
        pinned = x + 1
    assert words(pinned) != words(y + 1)
    with dask.config.set({"optimization.fuse.active": False}):
        apart = words(x + 1)
    assert apart != words(y + 1)


def test_where_data_is_counts(planned):
    with Scheduler(devices="cpu:2") as s:
        for device in (0, 1, 0, 1):
            with dask.annotate(device=device):
                x = da.ones(8, chunks=8) + device
            x = x.persist()
            y = x + 1
            assert y.compute().tolist() == [2 + device] * 8
            steps = s._plans.plans()[-1].steps
            assert {step.place for step in steps if step.fixed} == {device}
    assert len(planned) == 4


class Scaled:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, block):
        return block * self.factor


class Records:
    """A source, or what is written to."""

    def __getitem__(self, index):
        return 2.0


def test_what_may_change_is_like_nothing():
    """Two graphs may say the same, and mean what is in an object that only one of them has."""
    x = table()[0]
    for argument in (np.array([1, "a"], "O"), [1, 2], {"a": 1}, {1}, bytearray(b"x"), Records()):
        y = x.map_blocks(lambda b, _: b, argument, dtype="f8", meta=x._meta)
        assert words(y) is None, argument
    inside = [1]
    assert words(x.map_blocks(lambda b: b * inside[0], dtype="f8")) is None
    written = np.zeros((8, 6))
    for lock in (True, False):
        stored = da.store(x, written, compute=False, lock=lock)
        assert words(stored) is None


def test_strings_that_are_names_are_not_taken_for_strings():
    def name_of(block, name):
        return block + len(name)

    for name in ("short", "a longer one"):
        x = da.from_array(np.ones(4), chunks=2, name=name)
        assert words(x.map_blocks(name_of, x.name, dtype="f8")) is None
        assert words(x.map_blocks(name_of, "short" * 9, dtype="f8")) is not None
    assert words(x.map_blocks(name_of, "a", dtype="f8")) != words(
        x.map_blocks(name_of, "b", dtype="f8")
    )


def test_lists_in_partials_and_closures_are_like_nothing():
    x, given = table()[0], [1]
    for f in (partial(lambda b, given: b, given=given), lambda b: b * given[0]):
        for options in ({}, {"enforce_ndim": True}):
            assert words(x.map_blocks(f, dtype="f8", meta=x._meta, **options)) is None
    assert words(x.map_blocks(max, given=given, enforce_ndim=True, dtype="f8")) is None
    assert words(x.map_blocks(max, "x" * 5000, dtype="f8")) is None


def test_lists_that_functions_of_others_get_are_like_nothing():
    """They may write to them, and so may what they call."""
    x, kept = table()[0].rechunk((4, 6)), []

    def keeps(row, out):
        out.append(row.sum())
        return row.sum()

    inside = [keeps, partial(keeps), lambda row, out: keeps(row, out)]
    for f in inside:
        assert words(da.apply_along_axis(f, 1, x, dtype="f8", shape=(), out=kept)) is None
    assert words(x.map_blocks(partial(keeps, out=kept), dtype="f8")) is None
    assert words(da.apply_along_axis(np.sum, 1, x)) is not None
    legacy = {("y", n, 0): (apply, keeps, [("x", n, 0), kept]) for n in range(2)}
    graph = HighLevelGraph.from_collections("y", legacy, [x])
    assert words(da.Array(graph, "y", ((4, 4), (6,)), dtype="f8")) is None


def test_bags_and_delayed_tasks_are_planned_each_time(scheduler, planned):
    """Their optimisation puts data into tasks."""
    db = pytest.importorskip("dask.bag")
    for n in range(2):
        x = (da.ones(4, chunks=2) + n).persist()
        planned.clear()
        bag = db.from_delayed(list(x.to_delayed())).map(float).sum()
        assert bag.compute() == 4 * (n + 1)
        assert len(planned) == 1
    assert words(dask.delayed(sum)([1, 2])) is None


def test_records_count_by_their_fields(scheduler):
    x = da.ones(4, chunks=2)
    for names in (("a", "b"), ("b", "a")):
        record = np.array([(1, 2)], [(n, "i4") for n in names])[0]
        got = x.map_blocks(lambda b, r: b * r["a"], record, dtype="f8", meta=x._meta).compute()
        assert got.tolist() == [record["a"]] * 4


def test_what_little_is_wanted_of_is_not_read_again(scheduler, monkeypatch):
    x = da.from_array(np.zeros((200, 200)), chunks=4)
    reads = []
    real = FingerprintReader.likeness
    monkeypatch.setattr(FingerprintReader, "likeness", lambda *a: reads.append(a) or real(*a))
    for n in range(5):
        assert x.blocks[n, 0].compute().shape == (4, 4)
    assert len(reads) == 1
    assert scheduler._plans._templates.size == 0


def test_a_variable_around_a_function_counts(planned):
    x, a = table()
    with Scheduler(devices="cpu:2", fuse=False):
        for _ in range(2):
            for k in range(3):  # one variable for all three functions
                got = x.map_blocks(lambda b: np.asarray(b) * k, dtype="f8").compute()  # noqa: B023
                np.testing.assert_array_equal(got, a * k)


@pytest.mark.parametrize("fuse", [True, False])
def test_a_function_made_again_reads_its_own_variable(fuse):
    """The variable of the first function has changed when the second, which says the same, runs."""
    x, a = table()

    def made(k):
        def change(n):
            nonlocal k
            k = n

        return (lambda b: b * k + 1), change

    with Scheduler(devices="cpu:2", fuse=fuse, fuse_least=0):
        first, change = made(5)
        y = x.map_blocks(first, dtype="f8")
        np.testing.assert_array_equal(y.compute(), a * 5 + 1)
        change(7)
        second, _ = made(5)
        z = x.map_blocks(second, dtype="f8")
        np.testing.assert_array_equal(z.compute(), a * 5 + 1)
        np.testing.assert_array_equal(y.compute(), a * 7 + 1)
        np.testing.assert_array_equal((y - 0).compute(), a * 7 + 1)


def changed_variable():
    def made():
        k = 2

        def change():
            nonlocal k
            k = 5

        return (lambda b: b * k + 1), change

    return made()


def changed_code():
    def f(b):
        return b * 2 + 1

    def change():
        f.__code__ = (lambda b: b * 5 + 1).__code__  # as IPython's autoreload does it

    return f, change


def changed_default():
    def f(b, k=2):
        return b * k + 1

    def change():
        f.__defaults__ = (5,)

    return f, change


def changed_keyword():
    def f(b, *, k=2):
        return b * k + 1

    return f, lambda: f.__kwdefaults__.update(k=5)


def changed_partial():
    f = partial(lambda b, k: b * k + 1, k=2)
    return f, lambda: f.keywords.update(k=5)


def changed_within():
    f, change = changed_code()
    return (lambda b: f(b)), change


CHANGES = [
    changed_variable, changed_code, changed_default, changed_keyword, changed_partial,
    changed_within,
]  # fmt: skip


@pytest.mark.parametrize("make", CHANGES)
@pytest.mark.parametrize("fuse", [True, False])
def test_a_function_that_changes_is_its_own_collections(fuse, make):
    """Alike at first, so that they share a plan; then one after the other says something else."""
    x, a = table()
    every = [make() for _ in range(3)]
    with Scheduler(devices="cpu:2", fuse=fuse, fuse_least=0):
        arrays = [x.map_blocks(f, dtype="f8") for f, _ in every]
        factors = [2] * 3
        for n in (None, 0, 2, 1):
            if n is not None:
                every[n][1]()
                factors[n] = 5
            for y, k in zip(arrays, factors, strict=True):
                np.testing.assert_array_equal(y.compute(), a * k + 1)
                np.testing.assert_array_equal((y - 1).compute(), a * k)


class Named(NamedTuple):
    k: float

    def twice(self):
        return self.k * FACTOR


class Length(float):
    unit = 1.0


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("argument", [True, False])
def test_what_only_seems_not_to_change(monkeypatch, fuse, argument):
    """A record is a part of its array, and methods and attributes of constants may be anything."""
    records = np.ones(3, [("k", "f8")])
    lengths = [Length(1) for _ in records]
    x, a = table()

    def computed(f, constant):
        y = x.map_blocks(*(f, constant) if argument else (lambda b: f(b, constant),), dtype="f8")
        return y, a * f(1.0, constant)

    def every():
        for r, length in zip(records, lengths, strict=True):
            yield computed(lambda b, r: b * r["k"], r)
            yield computed(lambda b, n: b * n.unit, length)
            yield computed(lambda b, n: b * n.twice(), Named(2.0))

    with Scheduler(devices="cpu:2", fuse=fuse, fuse_least=0):
        before = []
        for n in range(3):
            arrays = list(every())
            for (y, want), (old, _) in zip(arrays, before or arrays, strict=True):
                np.testing.assert_array_equal(y.compute(), want)
                np.testing.assert_array_equal(old.compute(), want)
            before = arrays
            records["k"][n] = lengths[n].unit = n + 3
            monkeypatch.setitem(globals(), "FACTOR", n + 4)


@pytest.mark.parametrize("fuse", [True, False])
def test_a_name_of_pythons_that_becomes_a_global(fuse):
    space = {"__name__": "somewhere"}
    exec("def f(b): return abs(b - 1) * 2", space)
    x, a = table()
    with Scheduler(devices="cpu:2", fuse=fuse, fuse_least=0):
        y = x.map_blocks(space["f"], dtype="f8")
        np.testing.assert_array_equal(y.compute(), abs(a - 1) * 2)
        space["abs"] = np.sign
        np.testing.assert_array_equal(y.compute(), np.sign(a - 1) * 2)


FACTOR = 2


@pytest.mark.parametrize("fuse", [True, False])
def test_a_global_counts(monkeypatch, fuse):
    x, a = table()
    with Scheduler(devices="cpu:2", fuse=fuse, fuse_least=0):
        for factor in (2, 3, 2):
            monkeypatch.setitem(globals(), "FACTOR", factor)
            y = x.map_blocks(lambda b: b * FACTOR + 1, dtype="f8")
            np.testing.assert_array_equal(y.compute(), a * factor + 1)


def test_defaults_count(scheduler):
    x, a = table()
    for k in (2, 3):
        got = x.map_blocks(lambda b, n=k, *, m=k: b * n + m, dtype="f8").compute()
        np.testing.assert_array_equal(got, a * k + k)


# ---- data comes and goes


def test_a_template_holds_no_data(scheduler, planned):
    for seed in range(3):
        values = np.random.default_rng(seed).random((8, 6))
        array = weakref.ref(values)
        x = da.Array({("x", 0, 0): values}, "x", ((8,), (6,)), dtype="f8")
        y = (x + 1).persist()
        chunk = weakref.ref(next(iter(y.dask.values())).func)
        assert (y * 2).sum().compute() == pytest.approx(((values + 1) * 2).sum())
        del values, x, y
        gc.collect()
        assert array() is None
        assert chunk() is None
    assert len(planned) == 2
    assert not scheduler._plans


def test_numbers_that_are_data_count(scheduler):
    """A 0-d array is data; what became a number of Python's is part of what a graph says."""
    x, a = table()
    for k in (2.0, 3.0):
        for number in (k, np.float64(k), np.array(k), da.from_array(np.array(k))):
            np.testing.assert_array_equal((x * number).compute(), a * k)
        total = (x * k).sum().persist()
        np.testing.assert_array_equal((x / total).compute(), a / (a * k).sum())


def test_an_error_names_the_key_of_this_round(scheduler):
    def check(block):
        if block.max() > 50:
            raise ValueError("too much")
        return block

    for seed in range(2):
        x = table(seed)[0]
        x.map_blocks(check, dtype="f8", meta=x._meta).compute()
    x = da.from_array(np.full((8, 6), 100.0), chunks=(4, 3))
    y = x.map_blocks(check, dtype="f8", meta=x._meta)
    with pytest.raises(ValueError, match="too much") as caught:
        y.compute()
    assert any(y.name in note for note in caught.value.__notes__)


def test_what_is_done_together_has_the_keys_of_this_round(planned, monkeypatch):
    monkeypatch.setitem(compile.FUSE_FEWEST, "cpu", 1)
    with Scheduler("cpu:2", fuse_least=0) as s:
        for seed in range(2):
            x = table(seed)[0]
            mean, var = x.mean(axis=0, split_every=2), x.var(axis=0, split_every=2)
            steps = s.plan(mean, var).steps
            made = [k for step in steps if type(step.key) is TupleItemKey for k in step.key.keys]
            names = {k[0] for k in made}
            assert len(made) == 4 * 2
            assert names <= mean.dask.layers.keys() | var.dask.layers.keys()
    assert len(planned) == 1


def test_rounds_under_a_tight_limit(planned):
    """Chunks are sent away and come back; what a round finds there is not what the last one did."""
    with Scheduler(devices="cpu:2", memory_limit="200 kB", check=True):
        x = da.from_array(np.arange(40_000.0), chunks=5_000).persist()
        z, want = x, np.arange(40_000.0)
        for n in range(5):
            z, want = (z * 0.5 + x).persist(), want * 0.5 + np.arange(40_000.0)
            total = (z - n).sum().compute()
            assert total == pytest.approx((want - n).sum())


def test_sizes_that_one_round_shows_are_known_in_the_next(scheduler, planned):
    for n in range(3):
        x = da.from_array(np.arange(1000.0), chunks=250)
        x = x[x > 499]
        plan = scheduler.plan(x)
        assert plan.tried == (n > 0)
        sizes = [plan.steps[i].nbytes for i in plan.outputs]
        assert (sizes == [0, 0, 2000, 2000]) == (n > 0)
        assert x.compute().size == 500
        del x, plan
        gc.collect()
    assert len(planned) == 1


def test_one_array_twice_is_not_two(scheduler):
    a, b = np.ones(4), np.full(4, 2.0)
    for one, two in ((a, a), (a, b), (b, b), (b, a)):
        x = da.Array({("x", 0): one, ("x", 1): two}, "x", ((4, 4),), dtype="f8") + 1
        assert x.compute().tolist() == [*(one + 1), *(two + 1)]


def test_truth_is_not_a_number(scheduler):
    x = da.from_array(np.array([True, False]), chunks=1)
    for one in (True, 1, 1.0, True, np.True_, np.int8(1)):
        y = x.map_blocks(lambda b, k: b * len(repr(k)), one, dtype="i8", meta=np.empty(0, "i8"))
        assert y.compute().tolist() == [len(repr(one)), 0]
        got, want = (x + one).compute(), np.array([True, False]) + one
        assert (got.dtype, got.tolist()) == (want.dtype, want.tolist())


def test_threads_compute_rounds_at_the_same_time(scheduler):
    from concurrent.futures import ThreadPoolExecutor

    def one(seed):
        x, a = table(seed)
        got = ((x + 1).T @ x).compute(scheduler=scheduler.get)
        np.testing.assert_allclose(got, (a + 1).T @ a)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(64)))


def test_only_so_many_templates_are_kept(scheduler):
    scheduler._plans._templates.limit = 40 * STEP
    for k in range(20):
        (table()[0] + k).compute()
    assert 0 < scheduler._plans._templates.size <= 40 * STEP


def test_large_graphs_are_not_read(monkeypatch):
    monkeypatch.setattr(fingerprint, "MOST_TASKS", 3)
    assert words(table()[0][1:]) is None
    monkeypatch.setattr(fingerprint, "MOST_TASKS", 4)
    assert words(table()[0][1:]) is not None
    monkeypatch.setattr(fingerprint, "MOST_LAYERS", 1)
    assert words(table()[0] + 1) is None


def test_an_array_of_many_blocks_is_read():
    assert words(da.from_array(np.ones(25_000), chunks=1)) is not None


def test_layers_are_read_once_and_forgotten_when_they_go():
    reader = FingerprintReader()
    x = table()[0]
    for _ in range(2):
        y = x + 1
        expr = FinalizeCompute(collections_to_expr([y])).optimize()
        reader.likeness(expr, tuple(flatten(expr.__dask_keys__())), lambda value: None)
        assert len(reader._known) == 3  # with the layer that makes the result
        del y, expr
        gc.collect()
        assert len(reader._known) == 1


# ---- any graph

UNARY = [
    np.negative,
    np.abs,
    lambda x: x + 1,
    lambda x: x * 2.5,
    lambda x: x[::2],
    lambda x: x[1:],
    lambda x: x.T,
    lambda x: x.sum(axis=0, keepdims=True) + x,
    lambda x: x - x.max(),
    lambda x: x.mean(axis=-1)[..., None] * x,
    np.tril,
    lambda x: np.cumsum(x, axis=0),
    lambda x: x[[*range(x.shape[0])][::-1]],
    lambda x: x[:, np.arange(x.shape[1]) % 2 == 0],
]
BINARY = [operator.add, operator.sub, operator.mul, np.maximum]


@st.composite
def recipes(draw, leaves=3):
    """A list of operations on square arrays: each on earlier values, by their numbers."""
    steps = []
    for n in range(leaves, leaves + draw(st.integers(1, 5))):
        if draw(st.booleans()):
            steps.append((draw(st.integers(4, len(UNARY) - 1)) if draw(st.booleans()) else
                          draw(st.integers(0, 3)), draw(st.integers(0, n - 1)), None))  # fmt: skip
        else:
            pair = draw(st.integers(0, n - 1)), draw(st.integers(0, n - 1))
            steps.append((draw(st.integers(0, len(BINARY) - 1)), *pair))
    return tuple(steps)


def done(recipe, leaves):
    values = list(leaves)
    for which, a, b in recipe:
        x = values[a]
        if b is None:
            got = UNARY[which](x)
        else:
            n = min(min(x.shape), min(values[b].shape))
            got = BINARY[which](x[:n, :n], values[b][:n, :n])
        values.append(got)
    return values[-1]


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(recipes(), recipes(), st.integers(1, 3), st.sampled_from([1, 3, 6]))
def test_what_is_alike_is_computed_alike(first, second, distinct, chunk):
    """Random graphs, each twice with other data: computed with one plan, as NumPy computes them.
    Those whose words are equal, and who have the same data in the same order, are equal."""
    with Scheduler(devices="cpu:2", check=True, fuse_least=0):
        for seed in range(3):
            arrays = [np.random.default_rng(seed * 7 + n).random((6, 6)) for n in range(distinct)]
            arrays += [arrays[0]] * (3 - distinct)
            for recipe in (first, second):
                got = done(recipe, [da.from_array(a, chunks=chunk) for a in arrays])
                want = done(recipe, arrays)
                np.testing.assert_allclose(got.compute(), want, rtol=1e-9, atol=1e-9)
                kept = done(recipe, [da.from_array(a, chunks=chunk).persist() for a in arrays])
                np.testing.assert_allclose(kept.compute(), want, rtol=1e-9, atol=1e-9)
    arrays = [np.random.default_rng(n).random((6, 6)) for n in range(3)]
    leaves = [da.from_array(a, chunks=chunk) for a in arrays]
    found = [likeness(done(r, leaves)) for r in (first, second)]
    if found[0].words == found[1].words and list(map(id, found[0].data)) == list(
        map(id, found[1].data)
    ):
        np.testing.assert_array_equal(*(done(r, arrays) for r in (first, second)))
