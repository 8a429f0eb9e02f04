"""Collections built anew on the same data get the same steps, and never those of other data."""

import gc
import warnings
import weakref

import dask.array as da
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuscheduler import Scheduler
from tests.pipeline.test_template import done, recipes


@pytest.fixture
def scheduler():
    with Scheduler(devices="cpu:2", fuse_least=0) as s:
        yield s


def source(seed=0, name=None):
    """A persisted array; those with a name have the same names, whatever data they have."""
    values = np.random.default_rng(seed).random((6, 6))
    return (da.from_array(values, chunks=3, name=name) + 0).persist(), values


def plan_of(scheduler, collection):
    value = collection.compute()
    return scheduler._plans.entries()[-1].plan, value


def test_the_same_data_gets_the_same_plan(scheduler, planned):
    x, a = source()
    planned.clear()
    plans = []
    for _ in range(5):
        plan, value = plan_of(scheduler, (x.T * 2 + 1).sum(axis=0))
        np.testing.assert_allclose(value, (a.T * 2 + 1).sum(axis=0))
        plans.append(plan)
    assert len(planned) == 1
    assert plans[2] is plans[3] is plans[4]


def test_what_is_persisted_anew_has_its_own_blocks(scheduler):
    x, a = source()
    for _ in range(4):
        y = (x + 1).persist()
        z = (x + 1).persist()
        np.testing.assert_array_equal(y, a + 1)
        np.testing.assert_array_equal(z, a + 1)
        assert not np.shares_memory(y.blocks[0, 0].compute(), z.blocks[0, 0].compute())


@pytest.mark.parametrize("moved", [1, 2, 3])
def test_blocks_that_change_places_in_their_layer(moved):
    """Whoever has a layer may write to it, and put a block in once more."""
    with Scheduler(devices="cpu:1", fuse_least=0):  # all blocks are in the same place
        x, a = source()
        for _ in range(3):
            np.testing.assert_array_equal((x.T + 1).compute(), a.T + 1)
        (layer,) = x.dask.layers.values()
        for key in list(layer.mapping)[:moved]:
            layer.mapping[key] = layer.mapping.pop(key)
        for _ in range(3):
            np.testing.assert_array_equal((x.T + 1).compute(), a.T + 1)
        first, second, *_ = layer.mapping
        layer.mapping[first], layer.mapping[second] = layer.mapping[second], layer.mapping[first]
        found = (x.T + 1).compute()
        np.testing.assert_array_equal(found, x.compute(scheduler="sync").T + 1)
        assert not np.array_equal(found, a.T + 1)


def test_data_goes_with_its_collection(scheduler):
    x, _ = source()
    for _ in range(4):
        (x + 1).sum().compute()
    assert len(scheduler._plans._filled) == 1
    chunks = [weakref.ref(t.func) for layer in x.dask.layers.values() for t in layer.values()]
    assert len(chunks) == 4
    del x
    gc.collect()
    assert len(scheduler._plans._filled) == 0
    assert all(chunk() is None for chunk in chunks)


def test_captured_arrays_go_with_their_collection(scheduler):
    x, a = source()
    seen = []
    for n in range(4):
        w = np.full(3, float(n))
        seen.append(weakref.ref(w))
        y = x.map_blocks(lambda b, w: b * w, w=w, dtype="f8")
        np.testing.assert_allclose(y.compute(), a * n)
        del w, y
        gc.collect()
        assert all(w() is None for w in seen)


def test_data_goes_at_once_where_other_collections_stay(scheduler):
    """The garbage collector knows nothing of the memory of GPUs, and may not come for long."""
    (x, _), (y, _) = source(0), source(1)
    for _ in range(4):
        (x + y).sum().compute()
    assert len(scheduler._plans._filled) == 1
    chunks = [weakref.ref(t.func) for layer in x.dask.layers.values() for t in layer.values()]
    gc.collect()
    gc.disable()
    try:
        del x
        assert all(chunk() is None for chunk in chunks)
        assert len(scheduler._plans._filled) == 0
    finally:
        gc.enable()
    assert y.compute().shape == (6, 6)


@pytest.mark.parametrize("named", [True, False])
def test_other_data_of_the_same_kind_is_read(scheduler, planned, named):
    names = ("a", "b") if named else (None, None)
    kept = []
    for n in range(6):
        (x, a), (y, b) = (source(2 * n + i, name) for i, name in enumerate(names))
        planned.clear()
        for u, v, c, d in ((x, y, a, b), (y, x, b, a), (x, x, a, a)):
            for _ in range(2):
                z = (u - v * 2).sum(axis=1)
                np.testing.assert_allclose(z.compute(), (c - d * 2).sum(axis=1))
        kept.append((x, y))
        assert len(planned) == (0 if n else 2)


HOW = {
    "argument": lambda x, w, f: x.map_blocks(f, w, dtype="f8", name="same"),
    "keyword": lambda x, w, f: x.map_blocks(f, w=w, dtype="f8", name="same"),
    "variable": lambda x, w, f: x.map_blocks(lambda b: f(b, w), dtype="f8", name="same"),
}


@pytest.mark.parametrize("how", HOW)
def test_an_array_in_a_task_that_shows_itself_otherwise(scheduler, how):
    x, a = source()
    w = np.arange(3.0)
    kept = []  # with their layers the plans stay
    for n in range(6):
        if n == 3:
            with warnings.catch_warnings():  # some of NumPy's versions advise against it
                warnings.simplefilter("ignore")
                w.shape = (3, 1)
        kept.append(HOW[how](x, w, lambda b, w: b * w))
        expected = np.tile(w, (2, 1) if w.ndim == 2 else 2) * a
        np.testing.assert_allclose(kept[-1].compute(), expected)


def test_an_array_in_a_task_that_becomes_like_no_other(scheduler):
    """Arrays with metadata are not compared: each computation gets a plan of its own."""
    x, a = source()
    w = np.arange(3.0)
    kept = []
    for n in range(6):
        if n == 3:
            with warnings.catch_warnings():  # as above
                warnings.simplefilter("ignore")
                w.dtype = np.dtype("f8", metadata={"unit": "m"})
        kept.append(HOW["argument"](x, w, lambda b, w: b * w))
        np.testing.assert_allclose(kept[-1].compute(), a * np.tile(w, 2))


@pytest.mark.parametrize("how", HOW)
def test_an_array_whose_values_decide(scheduler, how):
    x, a = source()
    w = np.array([2, 0, 1])
    kept = []
    for n in range(8):
        if n in (3, 6):
            w[:] = w[::-1].copy()
        kept.append(HOW[how](x, w, lambda b, w: b[:, w] * 2))
        np.testing.assert_allclose(kept[-1].compute(), a[:, [*w, *(w + 3)]] * 2)
        kept.append(HOW[how](x, w, lambda b, w: b * float(w[0]) + w.max()))
        np.testing.assert_allclose(kept[-1].compute(), a * w[0] + 2)


@pytest.mark.parametrize("again", [True, False])
def test_a_function_that_changes_between(scheduler, again):
    x, a = source()
    kept = []
    for n in range(6):
        k = float(n // 2)

        def scaled(b, k=k):
            return b * k

        kept.append(x.map_blocks(scaled, dtype="f8"))
        np.testing.assert_allclose(kept[-1].compute(), a * k)
        scaled.__defaults__ = (k + 7,)
        if again:
            np.testing.assert_allclose(kept[-1].compute(), a * (k + 7))


@pytest.mark.parametrize("which", range(4))
def test_each_has_the_functions_around_it(scheduler, which):
    """A plan that was taken over goes when its own collection's functions change."""
    x, a = source()

    def times(cell):
        def f(b):
            return b * cell

        return f

    kept = []
    for _ in range(4):
        function = times(3.0)
        kept.append((function, x.map_blocks(function, dtype="f8")))
        np.testing.assert_allclose(kept[-1][1].compute(), a * 3)
    for n in range(2):
        kept[which][0].__closure__[0].cell_contents = float(n)
        for m, (_, z) in enumerate(kept):
            np.testing.assert_allclose(z.compute(), a * (n if m == which else 3.0))


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(recipes(), min_size=1, max_size=2),
    st.lists(
        st.tuples(st.integers(0, 1), st.tuples(*[st.integers(0, 2)] * 3), st.integers(0, 2)),
        min_size=3, max_size=10,
    ),
)  # fmt: skip
def test_any_collections_on_any_data(some, rounds):
    """Random graphs on the same arrays in any order: each is what NumPy makes of it."""
    with Scheduler(devices="cpu:2", check=True, fuse_least=0):
        pairs = [source(n, str(n)) for n in range(3)]
        kept = []
        for which, data, way in rounds:
            recipe = some[which % len(some)]
            got = done(recipe, [pairs[n][0] for n in data])
            want = done(recipe, [pairs[n][1] for n in data])
            np.testing.assert_allclose(got.compute(), want, rtol=1e-9, atol=1e-9)
            if way == 1:
                kept.append(got)
            elif way == 2:  # other data under the same name, for the same recipe
                pairs[data[0]] = source(len(kept) + 10 * which, str(data[0]))
