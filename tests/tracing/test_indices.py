"""NumPy's basic indices, and those with one list, of arrays and in functions that are traced."""

from __future__ import annotations

import dask.array as da
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gpuscheduler import Scheduler, axis, mesh
from gpuscheduler.codegen.cpu import evaluate
from gpuscheduler.fusion import task
from gpuscheduler.tracing.context import CapturedArrays, NotTraceable, ViewTrace, abstract_of
from gpuscheduler.tracing.trace import trace_function
from tests.support.strategies import thorough

SHAPE = (4, 5, 6)
VALUES = np.arange(120.0).reshape(SHAPE)


@st.composite
def lists(draw, length):
    """What takes elements along an axis of this length."""
    numbers = st.integers(-length, length - 1) if length else st.nothing()
    kind = draw(st.integers(0, 3))
    if kind == 0:
        return draw(st.permutations(range(length)))
    if kind == 1:
        return np.array(draw(st.lists(st.booleans(), min_size=length, max_size=length)), bool)
    if kind == 2:
        return np.arange(length)[:: draw(st.sampled_from([1, 2, 3, -1]))]
    return np.array(draw(st.lists(numbers, max_size=6 if length else 0)), np.intp)


@st.composite
def indices(draw, shape):
    """An index with numbers, slices, None, an Ellipsis, and one list or none."""
    index = list(
        draw(
            hnp.basic_indices(shape, allow_newaxis=True, max_dims=len(shape) + 2).map(
                lambda i: i if isinstance(i, tuple) else (i,)
            )
        )
    )
    places = [k for k, i in enumerate(index) if i is not None and i is not ...]
    if places and draw(st.booleans()):
        at = draw(st.sampled_from(places))
        before = sum(i is not None and i is not ... for i in index[:at])
        if ... in index[:at]:
            before += len(shape) - len(places)
        index[at] = draw(lists(shape[before]))
    return tuple(index)


def taken(b, index):
    return b[index] * 2


def written(b, index):
    y = b * 2
    y[index] = 7
    y[index] += 1
    return y


def written_later(b, index):
    y = b * 2
    z = y[index]
    z[...] = 5
    return y, z


LAYOUTS = [
    VALUES, np.asfortranarray(VALUES), VALUES[::-1, :, ::-2], VALUES[:1], VALUES[:0], VALUES[0, 0],
    np.asarray(3.0), np.broadcast_to(VALUES[:, :1], SHAPE), np.arange(64.0).reshape((2,) * 6),
]  # fmt: skip


def assert_same(got, want):
    if isinstance(want, tuple):
        assert len(got) == len(want)
        for g, w in zip(got, want, strict=True):
            assert_same(g, w)
        return
    assert np.shape(got) == np.shape(want)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("products", [False, True])
@pytest.mark.parametrize("function", [taken, written, written_later])
@thorough
@given(st.data())
def test_any_index_in_a_traced_function_is_numpys(function, products, data):
    """Or it says why not."""
    x = data.draw(st.sampled_from(LAYOUTS))
    index = data.draw(indices(x.shape))
    try:
        want = function(x.copy(), index)
    except (TypeError, IndexError) as error:
        want = error
    beside = CapturedArrays()
    try:
        program = trace_function(
            function, [abstract_of(x), index], products=products, beside=beside
        )
    except ViewTrace as error:
        program = error.program
    except NotTraceable:
        return
    assert not isinstance(want, Exception)
    assert_same(task.compute_program(program, evaluate.evaluate, [x, *beside.arrays]), want)


@pytest.mark.parametrize(
    "index",
    [(3, None, slice(2, None, 2), [0, 2, 4], None), (-4, None, [2, 1, 3, 4, 0]),
     (None, [0, 2], ..., -4, None), (slice(0, 0, 1), np.array([2, 2, 3]), None, 1)],
    ids=str,
)  # fmt: skip
def test_a_list_apart_from_a_number_comes_first(index):
    """NumPy's rule: None, a slice or an Ellipsis between them moves their axis to the front."""
    program = trace_function(
        taken, [abstract_of(VALUES), index], products=True, beside=(own := CapturedArrays())
    )
    assert_same(
        task.compute_program(program, evaluate.evaluate, [VALUES, *own.arrays]), VALUES[index] * 2
    )


def test_what_is_written_to_a_copy_of_a_number_stays_there():
    def function(b):
        total = b.sum()
        first, second = total[...], total.reshape(1)
        first[...] = 1
        second[0] = 2
        return total, first, second

    program = trace_function(function, [abstract_of(VALUES)])
    assert_same(task.compute_program(program, evaluate.evaluate, [VALUES]), function(VALUES))


def _axes():
    return [axis(0, n - 1, n) for n in SHAPE]


def _point(a, b, c):
    return a * 30 + b * 6 + c


#: Arrays of the same values.
SOURCES = {
    "given": lambda chunks: da.from_array(VALUES, chunks=chunks),
    "computed": lambda chunks: da.from_array(VALUES - 1, chunks=chunks) + 1,
    "other order": lambda chunks: da.from_array(VALUES.T.copy(), chunks=chunks[::-1]).T,
    "made": lambda chunks: da.arange(120.0, chunks=120).reshape(SHAPE).rechunk(chunks),
    "mesh": lambda chunks: mesh(_point, _axes(), chunks=chunks),
    "mesh of arrays": lambda chunks: mesh(_point, [np.asarray(a) for a in _axes()], chunks=chunks),
}


@pytest.fixture(scope="module", params=[None, 0], ids=["small", "fused"])
def scheduler(request):
    with Scheduler("cpu:2", **({} if request.param is None else {"fuse_least": 0})) as s:
        yield s


@pytest.mark.parametrize("source", SOURCES)
@thorough
@given(st.data())
def test_any_index_of_an_array_is_numpys(scheduler, source, data):
    """Of an index of an index, too; as far as Dask computes it itself."""
    chunks = tuple(data.draw(st.integers(1, n)) for n in SHAPE)
    every, shape = [], SHAPE
    for _ in range(data.draw(st.integers(1, 2))):
        every.append(data.draw(indices(shape)))
        shape = np.empty(shape)[every[-1]].shape
    more = data.draw(st.integers(0, 1))
    try:
        x = SOURCES[source](chunks)
        for index in every:
            x = x[index]
        x = x + more if more else x
        want = x.compute(scheduler="sync")
    except Exception:  # Dask has no such index, or fails at it: there is nothing to compare with
        return
    got = x.compute()
    assert np.shape(got) == np.shape(want)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(
    "index",
    [(slice(None), [3, 1, 0], None), (1, [3, 1, 0], None), (slice(None), None, [3, 1, 0]),
     ([0, 1], None, slice(1, 3)), (None, 2, [4, 0], None, slice(None, None, -2))],
    ids=str,
)  # fmt: skip
def test_a_list_and_none_together(scheduler, source, index):
    x = SOURCES[source]((2, 5, 3))[index]
    np.testing.assert_array_equal(x.compute(), x.compute(scheduler="sync"))
