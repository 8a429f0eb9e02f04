"""What is looked up in tables is what NumPy gives."""

from __future__ import annotations

import functools
import inspect

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuscheduler.codegen.cpu import evaluate
from gpuscheduler.fusion import task
from gpuscheduler.tracing.context import CapturedArrays, NotTraceable, ViewTrace
from gpuscheduler.tracing.trace import trace_function
from tests.support import kernels as k
from tests.tracing.test_trace import abstract, assert_same, directly

usual = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


def followed(function, *values, constants=(), every=False):
    """The value that the program of a function computes, planned as for GPUs.

    The values of `constants` are known, unless `every` one is an input.
    """
    arrays = []
    given = [abstract(v, arrays) for v in values]
    beside = CapturedArrays(dense=True, every=every)

    call = function
    if constants:
        names = list(inspect.signature(function).parameters)[len(values) :]
        call = functools.partial(function, **dict(zip(names, constants, strict=False)))
    try:
        program = trace_function(call, given, True, beside)
    except ViewTrace as view:
        program = view.program
    with np.errstate(all="ignore"):
        return task.compute_program(program, evaluate.evaluate, [*arrays, *beside.arrays])


def agree(function, *values, constants=(), known=True):
    """With constants that are known, with such that are not, and with all as arguments."""
    want = directly(function, *values, *constants)
    if known:
        assert_same(followed(function, *values, constants=constants), want)
    if constants:
        assert_same(followed(function, *values, constants=constants, every=True), want)
        assert_same(followed(function, *values, *constants), want)


def refused(function, *values, constants=(), every=False):
    with pytest.raises(NotTraceable) as caught:
        followed(function, *values, constants=constants, every=every)
    return str(caught.value)


X = np.arange(60.0).reshape(5, 4, 3)
I = np.array([[3, 0], [-1, 2], [-4, 1]])  # noqa: E741
J = np.array([2, 0], "u1")

INDICES = {
    "first": lambda i, j, x: x[j],
    "rows": lambda i, j, x: x[i],
    "ellipsis": lambda i, j, x: x[..., j],
    "middle": lambda i, j, x: x[:, i],
    "slices": lambda i, j, x: x[1:4, i, ::-1],
    "two": lambda i, j, x: x[i, i],
    "two, others between": lambda i, j, x: x[i, :, j],
    "a number beside": lambda i, j, x: x[1, i],
    "a number before": lambda i, j, x: x[:, 1, j],
    "a number away": lambda i, j, x: x[1, :, j],
    "a new axis": lambda i, j, x: x[:, None, i],
    "a new axis between": lambda i, j, x: x[:, i, None, j],
    "all": lambda i, j, x: x[i, i, j],
    "nothing between": lambda i, j, x: x[:, None, i, ..., j],
    "of a view": lambda i, j, x: x.transpose(2, 1, 0)[j],
    "of what is computed": lambda i, j, x: np.exp(-x)[i] + 1,
    "of an index": lambda i, j, x: i[j] * 2,
    "of a reduction": lambda i, j, x: x.sum(axis=0)[i],
    "twice": lambda i, j, x: x[:, i][j],
    "by what is computed": lambda i, j, x: x[(i + 1) % 4],
    "at the largest": lambda i, j, x: x[0, 0][x[1, 2].argmax()],
    "a list": lambda i, j, x: x[[0, 3, 1, 4, 0, -1]],
    "a list of one step": lambda i, j, x: x[:, [0, -2]] * 2,
    "an array": lambda i, j, x: x[:, np.array([[0, -2], [1, 1], [3, 0]])],
    "take": lambda i, j, x: np.take(x, i, axis=1),
    "take of all": lambda i, j, x: np.take(x, i),
    "take, a list": lambda i, j, x: np.take(x, [2, 0, 1, 1, 0], axis=2),
    "take, wrap": lambda i, j, x: np.take(x, i * 3, axis=0, mode="wrap"),
    "take, clip": lambda i, j, x: np.take(x, i * 3, axis=0, mode="clip"),
    "take along": lambda i, j, x: np.take_along_axis(x[0], i.T, 0),
    "take along, broadcast": lambda i, j, x: np.take_along_axis(x, i[:1, :, None], 1),
    "take along all": lambda i, j, x: np.take_along_axis(x, i[0], None),
    "sorted by another": lambda i, j, x: np.take_along_axis(x, x.argmax(axis=1, keepdims=True), 1),
    "empty": lambda i, j, x: x[:, i[:0]],
}  # fmt: skip


@pytest.mark.parametrize("name", INDICES)
def test_indices(name):
    agree(INDICES[name], I, J, X)


@pytest.mark.parametrize("name", INDICES)
def test_indices_that_are_constants(name):
    agree(INDICES[name], I, J, constants=(X,), known=False)  # of NumPy's it is NumPy's index


def look(x, *arrays, entries):
    index = [
        arrays[e] if isinstance(e, int) else e[0] if isinstance(e, tuple) else e for e in entries
    ]
    return x[tuple(index)]


@usual
@given(st.data())
def test_any_index(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    x = np.arange(np.prod(shape), dtype="f4").reshape(shape)
    over = data.draw(st.sampled_from([(), (3,), (2, 1), (2, 3), (1,)]))
    entries, arrays = [], []
    for n in shape:
        kind = data.draw(st.sampled_from(["array", "slice", "number", "array", "new"]))
        if kind == "new":
            entries.append(None)
            kind = "array"
        if kind == "array":
            own = over[data.draw(st.integers(0, len(over))) :]
            numbers = data.draw(st.lists(st.integers(-n, n - 1), min_size=12, max_size=12))
            dtype = data.draw(st.sampled_from(["i8", "i4", "i1"]))
            arrays.append(np.array(numbers, dtype)[: int(np.prod(own))].reshape(own))
            entries.append(len(arrays) - 1)
        elif kind == "slice":
            step = data.draw(st.sampled_from([1, -1, 2]))
            entries.append(slice(data.draw(st.sampled_from([None, 0, 1, -1])), None, step))
        else:
            entries.append((data.draw(st.integers(-n, n - 1)),))
    if data.draw(st.booleans()):
        entries.insert(data.draw(st.integers(0, len(entries))), ...)

    if not arrays:
        return
    many = functools.partial(look, entries=entries)
    assert_same(followed(many, x, *arrays), directly(many, x, *arrays))


def test_beyond_the_end():
    """As CuPy: from the other end. NumPy says so where it is known before."""
    x, i = np.arange(5.0), np.array([5, -6, 12])
    np.testing.assert_array_equal(followed(lambda x, i: x[i], x, i), x[i % 5])
    assert "out of bounds" in refused(lambda x, i: x[i], x, constants=(i,))
    assert "out of bounds" in refused(lambda x: x[[1, 5]], x)
    assert "too many" in refused(lambda x, i: x[0, i], x, i)


def test_what_is_no_index():
    x, i = np.arange(5.0), np.array([5, -6, 12])
    assert "float64" in refused(lambda x: x[x], x)
    assert "through an index" not in refused(lambda x, i: x.__setitem__(i, 0), x, i)
    assert "as fast" in str(pytest.raises(NotTraceable, trace_function, lambda x, i: x[i], [
        abstract(x, []), abstract(i, [])
    ]).value)  # fmt: skip


# ---- tables in order

TYPES = ["f4", "f8", "i4", "u1", "i8", "f2"]


@st.composite
def tables(draw, nan=True):
    dtype = np.dtype(draw(st.sampled_from(TYPES)))
    size = draw(st.sampled_from([1, 2, 3, 5, 31, 33, 64, 100]))
    if draw(st.booleans()) and dtype.kind == "f":
        return np.linspace(-1, 3, size).astype(dtype)
    x = k.values(dtype, 900, seed=draw(st.integers(0, 99)))[:size]
    if not nan:
        x = np.nan_to_num(x)
    return np.sort(x)


@usual
@given(tables(), tables(), st.sampled_from(["left", "right"]))
def test_any_search(table, x, side):
    agree(lambda x, t: np.searchsorted(t, x, side), x, constants=(table,))
    agree(lambda x, t: np.searchsorted(t, x, side), table[::-1], constants=(table,))


@usual
@given(tables(), tables(), st.booleans(), st.booleans())
def test_any_bins(table, x, right, descends):
    table = np.ascontiguousarray(table[::-1]) if descends else table
    if table.dtype.kind == "f" and np.isnan(table).any():
        return
    agree(lambda x, t: np.digitize(x, t, right), x, constants=(table,))


@usual
@given(tables(nan=False), tables(), st.data())
def test_any_interpolation(points, x, data):
    points = np.unique(points)
    values = k.values(np.dtype("f8"), 900, seed=data.draw(st.integers(0, 99)))[: points.size]
    if data.draw(st.booleans()):
        values = np.nan_to_num(values)
    left, right = data.draw(st.sampled_from([(None, None), (-5, None), (np.nan, 3.5)]))
    where = np.concatenate([x.astype("f8"), points, points[:-1] / 2 + points[1:] / 2])
    agree(lambda x, p, v: np.interp(x, p, v, left, right), where, constants=(points, values))
    agree(lambda x, p, v: np.interp(x, p, v, left, right), x, constants=(points, values))


@usual
@given(tables(), tables(), st.booleans())
def test_any_set(tests, x, invert):
    if {tests.dtype.kind, x.dtype.kind} == {"i", "u"} and 8 in (tests.itemsize, x.itemsize):
        return
    want = directly(lambda x, t: np.isin(x, t, invert=invert), x, tests)
    call = lambda x, t: np.isin(x, t, invert=invert)  # noqa: E731
    assert_same(followed(call, x, constants=(tests,)), want)
    if tests.size <= 64:
        assert_same(followed(call, x, tests), want)
    else:
        assert "not known" in refused(call, x, tests)


@pytest.mark.parametrize("mode", ["raise", "wrap", "clip"])
def test_choices(mode):
    i = np.array([[0, 2, 1], [2, 2, 0]], "i4")
    x = np.arange(6.0, dtype="f4").reshape(2, 3)
    for f in (lambda i: i % 3, lambda i: i & 1, lambda i: (i > 0) + 1, lambda i: i.clip(0, 2)):
        agree(lambda i, x, f=f: np.choose(f(i), [x, x + 1, 5], mode=mode), i, x)
    if mode == "raise":
        assert "may be out of bounds" in refused(lambda i, x: np.choose(i, [x, x + 1]), i, x)
    else:
        agree(lambda i, x: np.choose(i - 2, [x, x + 1], mode=mode), i, x)


def test_tables_that_are_not():
    x = np.arange(4.0)
    assert "shape" in refused(lambda x: np.searchsorted(np.ones((2, 2)), x), x)
    assert "sorter=" in refused(lambda x: np.searchsorted(x, x, sorter=[0, 1, 2, 3]), x)
    assert "monotonic" in refused(lambda x: np.digitize(x, np.array([1.0, 3, 2])), x)
    assert "period=" in refused(lambda x: np.interp(x, [0, 1], [0, 1], period=1), x)
    agree(lambda x: np.interp(x, [0, 1, 5], [0, 1, 2]), x)
    agree(lambda x: np.searchsorted([0, 1, 5], x), x)
    agree(lambda x: np.searchsorted(x, 2.0), x)
