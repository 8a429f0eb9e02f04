"""What a mask selects, reduced in one pass: nobody finds out how many that is."""

from __future__ import annotations

import os
import warnings

import dask
import dask.array as da
import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

import gpuscheduler
from gpuscheduler.codegen.cpu import evaluate
from gpuscheduler.fusion.task import KernelTask, OptionalTask, compute_program
from gpuscheduler.tracing.abstract import AbstractArray
from gpuscheduler.tracing.context import NotTraceable
from gpuscheduler.tracing.trace import trace_function

EXAMPLES = int(os.environ.get("GPUSCHEDULER_EXAMPLES", "75"))
FEW = settings(max_examples=EXAMPLES, deadline=None)
RNG = np.random.default_rng(5)
SOURCE = RNG.normal(size=(24, 30))
OTHER = RNG.random((24, 30))

#: Of two arrays like `SOURCE`, and of one of its rows' length: expressions that a GPU computes with
#: kernels alone, and NumPy with the same words.
REDUCED = {
    "sum": lambda xp, x, y, r: x[x > 0.3].sum(),
    "mean": lambda xp, x, y, r: x[(x > 0.3) & (y < 0.7)].mean(),
    "deviation": lambda xp, x, y, r: x[x > 0.3].std(),
    "variance of few": lambda xp, x, y, r: x[y > 0.9].var(ddof=1),
    "product": lambda xp, x, y, r: x[abs(x) > 2].prod(),
    "any": lambda xp, x, y, r: (x[y > 0.5] > 2).any(),
    "all": lambda xp, x, y, r: (x[y > 0.5] > -2).all(),
    "count": lambda xp, x, y, r: (x[y > 0.5] > 1).sum(),
    "of another": lambda xp, x, y, r: xp.sqrt(y[x > 1]).sum(),
    "a chain": lambda xp, x, y, r: (xp.exp(x[x > 1]) * 2 - 1).clip(0, 5).mean(),
    "two": lambda xp, x, y, r: (x[y > 0.5] * y[y > 0.5]).sum() / y[y > 0.5].sum(),
    "nothing": lambda xp, x, y, r: x[x > 1e9].sum() + x[x > 1e9].prod(),
    "rows": lambda xp, x, y, r: x[y[:, 0] > 0.5].mean(axis=0),
    "columns": lambda xp, x, y, r: x[:, r > 0].sum(axis=1),
    "columns by rows": lambda xp, x, y, r: (x[:, r > 0] * y[:, :1]).sum(),
    "one line": lambda xp, x, y, r: r[r > 0.2].mean(),
}
#: Those that end in a reduction that nothing cannot have.
EXTREME = {
    "largest": lambda xp, x, y, r: x[x < 0.3].max(),
    "least": lambda xp, x, y, r: (y[x < 0.3] * 2).min(),
    "largest of a line": lambda xp, x, y, r: r[r < 0.2].max(),
    "all but none": lambda xp, x, y, r: x[x == x[3, 4]].max(),
}
#: What a mask selects itself, and not what becomes of it.
PICKED = {
    "elements": lambda xp, x, y, r: x[x > 0.3],
    "of another": lambda xp, x, y, r: y[x > 0.3],
    "changed": lambda xp, x, y, r: xp.sqrt(abs(x * 2)[(x > 0) & (y < 0.5)]) + 1,
    "none": lambda xp, x, y, r: x[x > 1e9],
    "every one": lambda xp, x, y, r: x[x > -1e9],
    "a line": lambda xp, x, y, r: r[r > 0.2],
    "numbers": lambda xp, x, y, r: xp.flatnonzero(x > 1),
    "places": lambda xp, x, y, r: xp.argwhere(x > 1),
    "columns of places": lambda xp, x, y, r: xp.nonzero(x > 1)[1],
    "rows": lambda xp, x, y, r: x[:, :3][y[:, 0] > 0.5],
    "turned": lambda xp, x, y, r: x.T[y.T > 0.5],
    "extracted": lambda xp, x, y, r: xp.extract(y > 0.5, x),
    "compressed": lambda xp, x, y, r: xp.compress(y[:, 0] > 0.5, x[:, :2], axis=0),
    "twice": lambda xp, x, y, r: xp.concatenate([x[x > 0], x[x > 0] * 2]),
    "and reduced": lambda xp, x, y, r: xp.concatenate([x[x > 0], x[x > 0].sum()[None]]),
}


def arrays_of(dtype="f8"):
    x = (SOURCE * 3).astype(dtype) if np.dtype(dtype).kind in "iu" else SOURCE.astype(dtype)
    return x, OTHER.astype("f4"), SOURCE[5].copy()


@pytest.fixture(scope="module")
def cpu():
    with gpuscheduler.Scheduler("cpu:2", check=True, fuse_least=0) as scheduler:
        yield scheduler


# ---- through Dask


@pytest.mark.parametrize("chunks", [(6, 30), (7, 11), (24, 30)])
@pytest.mark.parametrize("name", [*REDUCED, *EXTREME, *PICKED])
def test_dask_gives_what_numpy_gives(cpu, name, chunks):
    expression = (PICKED | REDUCED | EXTREME)[name]
    given = arrays_of()
    x, y, r = (da.from_array(a, chunks=c) for a, c in zip(given, (chunks, chunks, 11), strict=True))
    want = expression(np, *given)
    got = expression(da, x, y, r).compute()
    assert np.shape(got) == np.shape(want)
    assert np.asarray(got).dtype == np.asarray(want).dtype
    np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("name", ["sum", "mean", "deviation", "count", "nothing", "one line"])
def test_no_block_finds_out_how_many_it_selects(cpu, name):
    given = arrays_of()
    x, y, r = (da.from_array(a, chunks=c) for a, c in zip(given, (6, 6, 11), strict=True))
    plan = cpu.plan(REDUCED[name](da, x, y, r))
    assert not [s.key for s in plan.steps if "getitem" in str(s.key)]
    assert [s for s in plan.steps if isinstance(s.task, KernelTask)]


def test_an_extreme_of_a_block_is_a_kernel_that_may_find_none(cpu):
    x = da.from_array(np.arange(40.0), chunks=10)
    plan = cpu.plan(x[x > 25].max())
    assert len([s for s in plan.steps if isinstance(s.task, OptionalTask)]) == 4
    assert float(x[x > 25].min().compute()) == 26
    with pytest.raises(ValueError, match="zero-size array to reduction operation"):
        x[x > 99].max().compute()
    assert float(x[x > 25].max().compute()) == 39  # and the next one works
    assert np.isnan(x[x > 99].mean().compute())


@pytest.mark.parametrize("dtype", ["i1", "u2", "i8", "f2", "f4", "?"])
def test_the_furthest_value_of_a_type_is_no_element(cpu, dtype):
    x = np.array([0, 1, 1, 0, 1, 0, 0, 1]).astype(dtype)
    y = da.from_array(x, chunks=2)
    for at in (0, 1):
        assert y[y == at].max().compute() == y[y == at].min().compute() == at
        assert y[y == at].max().compute().dtype == x.dtype
    if np.dtype(dtype).kind == "f":
        z = da.from_array(np.array([np.nan, 1, -np.inf, 2]).astype(dtype), chunks=2)
        assert z[z < 0].max().compute() == -np.inf
        assert np.isnan(z[z != 1].max().compute())


def test_who_wants_the_elements_themselves_gets_them(cpu):
    """Beside readers that do without."""
    x = da.from_array(SOURCE, chunks=(6, 30))
    picked = x[x > 0.5]
    total, every, ordered = dask.compute(picked.sum(), picked, picked.map_blocks(np.sort))
    want = SOURCE[SOURCE > 0.5]
    assert np.isclose(total, want.sum())
    np.testing.assert_array_equal(every, want)
    np.testing.assert_array_equal(np.sort(ordered), np.sort(want))
    both = (picked - picked.mean()) / picked.std()
    np.testing.assert_allclose(both.compute(), (want - want.mean()) / want.std())


def test_a_selection_of_random_numbers_is_of_those_that_others_see(cpu):
    x = da.random.default_rng(3).normal(size=(40, 20), chunks=(10, 20))
    picked = x[x > 0.5]
    whole, total, again = dask.compute(x, picked.sum(), picked.map_blocks(np.sort).sum())
    want = whole[whole > 0.5].sum()
    assert np.isclose(total, want)
    assert np.isclose(again, want)
    assert np.isclose(picked.mean().compute(), whole[whole > 0.5].mean())


def test_a_selection_is_planned_once_for_blocks_that_are_alike(cpu):
    for value in (1.0, 2.0):
        x = da.from_array(SOURCE * value, chunks=(6, 30)).persist()
        want = (SOURCE * value)[SOURCE * value > 0.3]
        assert np.isclose(x[x > 0.3].sum().compute(), want.sum())
        assert np.isclose(x[x > 0.3].max().compute(), want.max())


# ---- in users' functions


def value(function, *arrays, products=True):
    abstract = [AbstractArray(a.shape, a.dtype) for a in arrays]
    program = trace_function(function, abstract, products)
    with np.errstate(all="ignore"):
        return compute_program(program, lambda k, every: evaluate.evaluate(k, every), arrays)


def same(function, *arrays):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        want = np.asarray(function(*[a.copy() for a in arrays]))
        got = np.asarray(value(function, *arrays))
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    rtol = 2e-2 if want.dtype.char in "eF" or arrays[0].dtype.char in "eF" else 1e-5
    np.testing.assert_allclose(got, want, rtol=rtol, atol=1e-6 * (1 + 100 * (rtol > 1e-4)))


def centred(x):
    v = x[x > 0]
    v -= v.mean()
    return (v**2).sum()


def trimmed(x):
    v = x[x > -1]
    v[v > 1] = 1
    w = v[v < 0.5]
    return np.where(w > 0, w, 0).sum() + np.add.reduce(v)


def roots(x):
    x = x.copy()
    x[x > 0] = np.sqrt(x[x > 0])
    x[x < -1] += 1
    return x


def halves(x):
    x = x * 1
    x[x > 0] *= 0.5
    x[abs(x) < 0.1] = 0
    return x[:, x[0] > 0].sum(axis=1, keepdims=True) + x[:, :1]


def partly(x):
    v, w = x[x > 0], np.zeros_like(x)[x > 0] + 7
    np.add(v, 100, out=v, where=v > 1)
    np.divide(v, v, out=w, where=v > 1)
    return v.sum() + w.sum()


@pytest.mark.parametrize("function", [centred, trimmed, roots, halves, partly])
def test_functions_that_write_to_what_they_select(function):
    same(function, SOURCE)


def test_a_second_name_of_a_selection_sees_what_is_written():
    def f(x):
        v = x[x > 0]
        w, copy = v.ravel(), v.copy()
        v += 1
        return w.sum() - copy.sum()

    same(f, SOURCE)


def written_to_a_part(x):
    v = x[x[:, 0] > 0]
    v[:, 1] += 1
    return v


def written_behind_a_part(x):
    v = x[x[:, 0] > 0]
    w = v[:, 1]
    v += 1
    return w


def test_parts_of_what_is_selected():
    same(lambda x: x[x[:, 0] > 0][:, 2:9:3].sum(axis=0), SOURCE)
    same(lambda x: x[x[:, 0] > 0][:, -1].mean(), SOURCE)
    for function in (written_to_a_part, written_behind_a_part):
        with pytest.raises(NotTraceable, match="writes to a part of what a mask selects"):
            value(function, SOURCE)
    for function in (lambda x: x[x[:, 0] > 0][1:, 0], lambda x: x[:, x[0] > 0][:, 0]):
        with pytest.raises(NotTraceable, match="how many elements a mask selects"):
            value(function, SOURCE)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: x[x > 0], "how many elements it selects"),
        (lambda x: (x[x > 0], x), "among other values"),
        (lambda x: x[x > 0].size * x, "how many elements a mask selects"),
        (lambda x: len(x[x > 0]) * x, "how many elements a mask selects"),
        (lambda x: x[x > 0].max(), "an error where that is nothing"),
        (lambda x: x[x > 0][3], "how many elements a mask selects"),
        (lambda x: x[x > 0] + x[x > 1], "how many elements a mask selects"),
        (lambda x: x[x > 0] + x[0], "how many elements a mask selects"),
        (lambda x: np.sort(x[x > 0]), "sort of what a mask selects"),
        (lambda x: np.cumsum(x[x > 0]), "of what a mask selects"),
        (lambda x: x[x > 0].reshape(-1, 2), "reads .reshape"),
        (lambda x: x[x > 0, 1], "indexes with an array"),
        (lambda x: x[x[0] > 0], "a mask of shape"),
        (lambda x: sum(x[x > 0]), "how many elements a mask selects"),
        (lambda x: np.sum(x[x > 0], where=x > 1), "where="),
        (lambda x: np.linalg.norm(x[x > 0], 1), "norm"),
        (lambda x: x[:, x[0] > 0] @ x[:, x[0] > 0], "matmul"),
        (lambda x: np.sqrt(x[x > 0], where=x[x > 0] > 1), "where="),
        (lambda x: np.add(1, 2, out=x[x > 0]), "out="),
        (lambda x: np.nanmean(x[x > 0], dtype="i8"), "inexact"),
        (lambda x: np.where(x[x > 0] > 1, [1, 2], 0), "a list"),
    ],
)
def test_what_needs_the_elements_says_so(function, reason):
    with pytest.raises((NotTraceable), match=reason):
        value(function, SOURCE)


def test_processors_compute_nothing_costly_of_elements_that_nobody_wants():
    for function in (lambda x: np.exp(x[x > 1]).sum(), lambda x: x[x[:, 0] > 0].sum(axis=0)):
        same(function, SOURCE)
        with pytest.raises(NotTraceable):
            value(function, SOURCE, products=False)


WHOLE = {"fiu": ["sum", "prod", "mean", "var", "std", "any", "all"], "c": ["sum", "mean", "var"]}
NUMPYS = [np.sum, np.nansum, np.nanmean, np.nanvar, np.count_nonzero, np.average, np.linalg.norm]


@FEW
@given(st.data())
def test_any_selection_reduces_to_what_numpy_gives(data):
    dtype = np.dtype(data.draw(st.sampled_from(["f4", "f8", "f2", "i2", "i8", "u1", "c16"])))
    shape = tuple(data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    x = (rng.normal(size=shape) * 3).astype("f8")
    x = abs(x).astype(dtype) if dtype.kind == "u" else x.astype(dtype)
    if dtype.kind == "f" and data.draw(st.booleans()):
        x.flat[rng.integers(x.size)] = data.draw(st.sampled_from([np.nan, np.inf, -0.0]))
    before = data.draw(st.integers(0, x.ndim - 1))
    ndim = data.draw(st.integers(1, x.ndim - before))
    level = data.draw(st.sampled_from([-9, 0, 1, 9]))
    part = data.draw(st.sampled_from([slice(None), slice(1, None), slice(None, None, -1)]))
    above = data.draw(st.booleans())

    def selected(a, m):
        index = (part,) * before + (m > level,) + ((...,) if above else ())
        return a[index]

    mask_shape = shape[before : before + ndim]
    mask = rng.normal(size=mask_shape) if data.draw(st.booleans()) else np.zeros(mask_shape)
    left = x.ndim - ndim + 1
    axis = data.draw(st.none() | st.integers(0, left - 1))
    if axis is not None and axis != before:
        axis = (axis, before)
    keep = data.draw(st.booleans())
    kind = next(k for k in WHOLE if dtype.kind in k)
    chain = data.draw(st.sampled_from(["none", "twice", "where", "square"]))
    reduce = data.draw(st.sampled_from(WHOLE[kind] + NUMPYS))
    event(f"{reduce}, {ndim} of {x.ndim} axes")
    if reduce is np.linalg.norm:
        axis, keep, reduce = None, False, reduce if left == 1 else np.sum

    def function(a, m):
        v = selected(a, m)
        if chain == "twice":
            v = v + v
        elif chain == "where":
            v = np.where(v == v, v, 1)
        elif chain == "square":
            v = np.square(v)
        if reduce is np.linalg.norm:
            return reduce(v)
        if isinstance(reduce, str):
            return getattr(v, reduce)(axis=axis, keepdims=keep)
        return reduce(v, axis=axis, keepdims=keep)

    if reduce is np.average and not selected(x, mask).sum(axis=axis).size:
        reduce = np.sum  # NumPy's own is an error
    if dtype.char == "e" or (chain == "square" and dtype.kind in "iu"):
        x = np.clip(x, 0, 3)  # where NumPy's own sums stay exact enough to compare
    same(function, x, mask)
