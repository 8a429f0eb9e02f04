"""Blocks that differ from what their collection says still have Dask's values.

A task may make a tuple, a dictionary, several arrays and numbers, or an array of another shape or
dtype.
"""

from __future__ import annotations

import operator
import os
from typing import NamedTuple

import dask
import dask.array as da
import numpy as np
import pytest
from dask.array.core import Array
from dask.highlevelgraph import HighLevelGraph
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuscheduler import Scheduler
from gpuscheduler.pipeline import compile

#: `GPUSCHEDULER_EXAMPLES=3000 pytest tests/fusion/test_block_structures.py` looks harder.
EXAMPLES = int(os.environ.get("GPUSCHEDULER_EXAMPLES", "60"))

#: How arrays of values become collections: GPUs have their own way.
from_values = da.from_array


@pytest.fixture(scope="module", params=["everything", "usual"])
def scheduler(request):
    """A scheduler that makes every traceable task a kernel, or the default one."""
    if request.param == "usual":
        with Scheduler("cpu:2", check=True) as s:
            yield s
        return
    before = dict(compile.FUSE_FEWEST)
    compile.FUSE_FEWEST["cpu"] = 1
    with Scheduler("cpu:2", fuse_least=0, check=True) as s:
        yield s
    compile.FUSE_FEWEST.update(before)


class Pair(NamedTuple):
    first: object
    second: object


# Functions of a block whose value is no array. Those that print are not traced: what they make is
# known when it is there, and until then it is taken for what the collection says.


def both(b):
    return b + 1, b * 2


def rows_and_sum(b):
    return b * 2, (b + 1).sum(axis=-1)


def named(b):
    return {"first": b * 3, "second": b - 1}


def listed(b):
    return [b * 2 + 1, b]


def paired(b):
    return Pair(b * 2, b + 3)


def with_size(b):
    return b + 1, b.shape[0]


def nested(b):
    return (b * 2, {"x": b + 1}), b


def constants(b):
    return np.zeros(b.shape), np.ones(b.shape)


def alike(b):
    return b * 0, b * 0


def twins(b):
    c = b + 1
    return c, c


def untraced(function):
    def call(b):
        print(end="")
        return function(b)

    return call


SEVERAL = [both, rows_and_sum, listed, paired, with_size, nested, constants, alike, twins]
SEVERAL += [*map(untraced, SEVERAL), np.modf, np.frexp]
NAMED = [named, untraced(named)]
#: What gives an array, and not the one that the collection tells of.
OTHER = [
    lambda b: b[:1] * 2, lambda b: b.astype("f4") + 1, lambda b: b[None] + 1, lambda b: b.sum(),
    untraced(lambda b: b[:1]), untraced(lambda b: np.repeat(b, 2, 0)), untraced(lambda b: b > 1),
    untraced(lambda b: (b > 1).astype("i4")), untraced(lambda b: b[None]),
    untraced(lambda b: b.T.copy().T),
]  # fmt: skip


def first_of(b):
    return b[0]


def first_or_twice(b):
    return b[0] if isinstance(b, (tuple, list)) else b * 2


def ones_as_long(b):
    return np.ones(len(b)) + 1


def size_of(b):
    return np.asarray(b[1]) + 1


def second_by_attribute(b):
    return getattr(b, "second", 3) * np.ones(2)


PARTS = [
    first_of, first_or_twice, ones_as_long, size_of, second_by_attribute, lambda b: b[1] * 2 + 1,
    lambda b: b[-1], lambda b: b[0] * b[1] + 1, lambda b: (b[1], b[0]),
]  # fmt: skip


def task_of_each(function, x, *others):
    """A collection with one task for each block of x.

    It says of its blocks what x says of its own, as Dask's frexp makes its parts.
    """
    name = f"part-{function!r}-{dask.base.tokenize(function, x, others)}"
    keys = dask.core.flatten(x.__dask_keys__())
    dsk = {(name, *key[1:]): (function, key, *others) for key in keys}
    graph = HighLevelGraph.from_collections(name, dsk, dependencies=[x])
    return Array(graph, name, x.chunks, meta=x._meta)


def mapped(function, *xs):
    return da.map_blocks(function, *xs, dtype=xs[0].dtype, meta=xs[0]._meta)


@st.composite
def arrays(draw):
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=2)))
    cut = draw(st.sampled_from([-1, 3]))
    kind = draw(st.sampled_from(["values", "zeros", "full", "ones", "values"]))
    if kind == "values":
        values = np.random.default_rng(draw(st.integers(0, 9))).normal(size=shape) * 3
        return from_values(values, chunks=cut)
    if kind == "full":
        return da.full(shape, 2.5, chunks=cut)
    return getattr(da, kind)(shape, chunks=cut)


def divided(draw, pool):
    made = mapped(draw(st.sampled_from(SEVERAL)), draw(st.sampled_from(pool)))
    return [made, task_of_each(operator.getitem, made, 0), task_of_each(operator.getitem, made, 1)]


def labelled(draw, pool):
    made = mapped(draw(st.sampled_from(NAMED)), draw(st.sampled_from(pool)))
    return [task_of_each(operator.getitem, made, label) for label in ("first", "second")]


def misjudged(draw, pool):
    return [mapped(draw(st.sampled_from(OTHER)), draw(st.sampled_from(pool)))]


def part(draw, pool):
    make = draw(st.sampled_from([mapped, task_of_each]))
    return [make(draw(st.sampled_from(PARTS)), draw(st.sampled_from(pool)))]


def computed(draw, pool):
    f = draw(st.sampled_from([lambda b: b * 2 + 1, np.sqrt, np.negative, lambda b: (b + 1) * b]))
    return [mapped(f, draw(st.sampled_from(pool)))]


def combined(draw, pool):
    x, y = draw(st.sampled_from(pool)), draw(st.sampled_from(pool))
    f = draw(st.sampled_from([operator.add, np.maximum, lambda a, b: a * b + a]))
    return [mapped(f, x, y)] if x.chunks == y.chunks else []


def reduced(draw, pool):
    x = draw(st.sampled_from(pool))
    how = draw(st.sampled_from(["sum", "mean", "max", "histogram", "argmax"]))
    if how == "histogram":
        return [da.histogram(x, bins=np.array([-9, 0, 0.5, 2.5, 9]))[0]]
    axis = draw(st.sampled_from([None, 0])) if x.ndim else None
    return [getattr(x, how)(axis=axis)]


def turned(draw, pool):
    x = draw(st.sampled_from(pool))
    ways = [lambda: x.T, lambda: x[..., ::2], lambda: x * 2 + 1, lambda: -x]
    return [draw(st.sampled_from(ways))()] if x.ndim else []


STEPS = [divided, divided, labelled, misjudged, part, part, computed, computed, combined, reduced,
         turned]  # fmt: skip


@st.composite
def collections(draw, most=6):
    pool = [draw(arrays())]
    for _ in range(draw(st.integers(2, most))):
        pool += draw(st.sampled_from(STEPS))(draw, pool)
    some = draw(st.lists(st.sampled_from(pool[1:] or pool), min_size=1, max_size=3))
    return [pool[-1], *some]


def values(chosen, scheduler):
    """Return each block as it is, since Dask joins no tuples."""
    dsk = HighLevelGraph.merge(*[x.__dask_graph__() for x in chosen])
    keys = [list(dask.core.flatten(x.__dask_keys__())) for x in chosen]
    with np.errstate(all="ignore"):
        return scheduler(dsk, keys)


def same(a, b):
    if isinstance(b, dict):
        assert type(a) is dict
        assert list(a) == list(b)
        a, b = tuple(a.values()), tuple(b.values())
    if isinstance(b, (tuple, list)):
        assert len(a) == len(b)
        for one, two in zip(a, b, strict=True):
            same(one, two)
        return
    assert np.shape(a) == np.shape(b)
    if isinstance(b, (np.ndarray, np.generic)):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-6, equal_nan=True)
    else:
        assert a == b


def outcome(compute):
    """Return the values, or the error that is raised."""
    try:
        return compute(), None
    except Exception as error:
        return None, error


def compare(mine, dasks, host=lambda values: values, lenient=False):
    """Compare outcomes: Dask's values, and an error where Dask has one, if not `lenient`."""
    want, failed = outcome(dasks)
    got, error = outcome(mine)
    if failed is None:
        if error is not None:
            raise error
        same(host(got), host(want))
    elif error is None and not lenient:
        raise AssertionError("Dask's scheduler fails, and this has values") from failed


def check(chosen, scheduler, **more):
    compare(lambda: values(chosen, scheduler.get), lambda: values(chosen, dask.get), **more)
    # as `compute` has it: with Dask's optimisations, and finalize
    compare(
        lambda: dask.compute(*chosen, scheduler=scheduler.get),
        lambda: dask.compute(*chosen, scheduler="sync"),
        **more,
    )


examples = settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large,
                           HealthCheck.function_scoped_fixture],
)  # fmt: skip


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")
@examples
@given(st.data())
def test_blocks_of_any_structure_have_dasks_values(scheduler, data):
    check(data.draw(collections()), scheduler)


def test_histogram_of_one_of_several_results_counts_all_of_it(scheduler):
    for make in da.zeros, da.ones, da.full_like:
        whole = make((60, 51), chunks=-1) if make is not da.full_like else da.zeros((60, 51)) + 2
        first, second = da.modf(whole)
        counts, _ = da.histogram(second, bins=np.array([-1, 0, 0.5, 9]))
        want = dask.compute(first, counts, scheduler="sync")
        same(dask.compute(first, counts, scheduler=scheduler.get), want)


@pytest.mark.parametrize("cut", [-1, 40])
@pytest.mark.parametrize("shape", [(2, 80), (1, 80), (80,), (80, 80)])
def test_arithmetic_on_one_item_of_tuple_blocks(scheduler, shape, cut):
    x = da.from_array(np.random.default_rng(0).random(shape), chunks=cut)
    for y in (da.frexp(x)[0] * 2 + 2) * 3 - 1, ((da.frexp(x)[0] * 2 + 1) * 3).sum():
        same(y.compute(scheduler=scheduler.get), y.compute(scheduler="sync"))


def total_or_swapped(b):
    if isinstance(b, tuple):
        return b[1], b[0]
    total = b.sum(axis=0, keepdims=True)
    return total[total > 1]


def test_optional_element_in_a_pair(scheduler):
    """A kernel for it makes a pair, too: of the element, and whether there is one."""
    x = da.from_array(np.array([2.0, 3.0]), chunks=2)
    y = mapped(total_or_swapped, mapped(untraced(both), x))
    same(values([y], scheduler.get), values([y], dask.get))


def first_and_length(b):
    return b[:1] + 1, b.shape[0]


def test_number_in_a_block_is_the_blocks_own(scheduler):
    x = da.from_array(np.arange(12.0), chunks=6)
    pairs = mapped(first_and_length, mapped(untraced(lambda b: b[:4]), x))  # of 4, not of 6
    y = mapped(lambda t: t[0] * t[1] + 1, pairs)
    same(values([y, pairs], scheduler.get), values([y, pairs], dask.get))


def test_argmax_of_a_number_is_no_array(scheduler):
    y = mapped(lambda b: b.sum(), da.from_array(np.array([1.5]), chunks=-1)).argmax()
    with pytest.raises(ValueError, match="zero-dimensional"):
        values([y], scheduler.get)
