"""A list of numbers that a few slices give takes slices, and anything else is as Dask has it."""

from __future__ import annotations

import operator
import os

import dask.array as da
import numpy as np
import pytest
from dask._task_spec import DataNode, Task, TaskRef
from dask.array._shuffle import _getitem as take_block
from hypothesis import event, given, settings
from hypothesis import strategies as st

import gpuscheduler
from gpuscheduler.codegen.cpu import evaluate
from gpuscheduler.frontend.index_lists import (  # fmt: skip
    MOST_SLICES,
    join_arrays,
    pick_elements,
    reorder_arrays,
    replace_index_lists,
    slices_of,
    take_slices,
)
from gpuscheduler.fusion.task import compute_program
from gpuscheduler.tracing.abstract import AbstractArray
from gpuscheduler.tracing.trace import trace_function
from tests.support.cuda_on_host import COMPILER, Host, aligned

EXAMPLES = int(os.environ.get("GPUSCHEDULER_EXAMPLES", "60"))
FEW = settings(max_examples=EXAMPLES, deadline=None)
SOURCE = np.random.default_rng(0).random((60, 40))

NUMBERS = st.integers(0, 59)
RUNS = st.builds(
    lambda first, count, step: [n for n in range(first, first + count * step, step or 1)
                                if 0 <= n < 60] or [first],
    NUMBERS, st.integers(1, 30), st.sampled_from([-7, -2, -1, 1, 2, 3, 11]),
)  # fmt: skip
LISTS = st.one_of(
    st.lists(RUNS, min_size=1, max_size=6).map(lambda runs: sum(runs, [])),
    st.lists(NUMBERS, min_size=1, max_size=40),
)


#: Of an array of 60 rows and 40 columns, and lists of some of each.
TAKES = {
    "rows": lambda x, rows, columns: x[rows],
    "columns": lambda x, rows, columns: x[:, columns],
    "both": lambda x, rows, columns: x[rows][:, columns],
    "again": lambda x, rows, columns: x[rows][[n % len(rows) for n in columns]],
    "a part": lambda x, rows, columns: x[rows][:, columns][: len(rows) // 2 + 1, ::-1],
    "negative": lambda x, rows, columns: x[[n - 60 for n in rows]],
}


@pytest.fixture(scope="module")
def cpu():
    with gpuscheduler.Scheduler("cpu:2", check=True, fuse_least=0) as scheduler:
        yield scheduler


@FEW
@given(LISTS)
def test_slices_give_the_same_numbers(numbers):
    slices = slices_of(np.array(numbers, "u2"))
    event("None" if slices is None else f"{len(slices)} slices")
    if slices is None:
        assert len(numbers) > MOST_SLICES
        return
    got = [n for s in slices for n in range(60)[s]]
    assert got == numbers
    assert len(slices) <= MOST_SLICES


def test_regular_lists_are_one_slice():
    assert slices_of(range(5, 50, 3)) == (slice(5, 48, 3),)
    assert slices_of([9, 7, 5, 3, 1]) == (slice(9, 0, -2),)
    assert slices_of([4, 2, 0]) == (slice(4, None, -2),)
    assert slices_of([3]) == (slice(3, 4, 1),)
    assert slices_of([]) == ()
    assert slices_of([3, 3, 3]) == (slice(3, 4, 1),) * 3
    assert slices_of([0, 0] * 20) is None


def test_parts_of_parts_one_after_the_other():
    a, b = SOURCE[:20], SOURCE[20:]
    np.testing.assert_array_equal(join_arrays([a, b], 0), SOURCE)
    turned = join_arrays([a, b], 0, (slice(59, None, -1),))
    np.testing.assert_array_equal(turned, SOURCE[::-1])
    part = take_slices(SOURCE, 1, [slice(0, 4, 1), slice(39, 30, -3)])
    np.testing.assert_array_equal(part, SOURCE[:, [0, 1, 2, 3, 39, 36, 33]])


def test_what_only_looks_like_a_list_of_dasks_stays():
    """Values of somebody's own, of the same form."""
    own = Task("own", operator.getitem, TaskRef("pair"), DataNode(None, 1))
    dsk = {"pair": DataNode("pair", (1, np.arange(3))), "own": own}
    replace_index_lists(dsk, lambda key: (100, 100))
    assert dsk["own"] is own


def test_numbers_without_an_order_are_given_to_the_task():
    irregular = np.random.default_rng(0).permutation(100)
    far = Task("far", take_block, TaskRef("x"), TaskRef("list"))
    dsk = {"list": DataNode("list", (1, (slice(None), irregular))), "far": far}
    replace_index_lists(dsk, lambda key: (100, 100))
    assert dsk["far"].dependencies == {"x"}
    x = np.arange(200.0).reshape(2, 100)
    np.testing.assert_array_equal(dsk["far"]({"x": x}), x[:, irregular])


def test_on_gpus_more_than_a_few_slices_are_numbers():
    parts = np.r_[0:5, 10:15, 20:25, 30:35]
    for gpus, function in ((False, take_slices), (True, pick_elements)):
        take = Task("take", take_block, TaskRef("x"), TaskRef("list"))
        dsk = {"list": DataNode("list", (1, (parts, slice(None)))), "take": take}
        replace_index_lists(dsk, lambda key: (100, 100), gpus)
        assert dsk["take"].func is function


def kernels(scheduler, z):
    return [type(s.task).__name__ for s in scheduler.plan(z).steps]


def test_what_takes_slices_is_part_of_a_kernel(cpu):
    """Each block of the result is of one kernel, that reads what it sums up and nothing else."""
    x = da.from_array(SOURCE, chunks=(20, 40)).persist()
    z = (x[np.arange(0, 60, 3)] * 2 + 1).sum(axis=0)
    plan = cpu.plan(z)
    assert not any("shuffle-taker" in str(s) for s in plan.steps)
    assert "KernelTask" in kernels(cpu, z)
    assert not any("not known before" in reason for reason in plan.reasons.values())
    np.testing.assert_allclose(z.compute(), (SOURCE[::3] * 2 + 1).sum(axis=0))


@FEW
@given(LISTS, st.lists(st.integers(0, 39), min_size=1, max_size=30), st.data())
def test_any_list_takes_what_numpy_takes(cpu, rows, columns, data):
    chunks = data.draw(st.sampled_from([(60, 40), (20, 40), (7, 13), (25, 10)]))
    x = da.from_array(SOURCE, chunks=chunks)
    if data.draw(st.booleans()):
        x = x * 2 - 2 * x + x
    take = TAKES[data.draw(st.sampled_from(sorted(TAKES)))]
    behind = data.draw(st.sampled_from(["nothing", "sum", "mean", "chain", "turned"]))
    z, want = take(x, rows, columns), take(SOURCE, rows, columns)
    if behind == "sum":
        z, want = z.sum(axis=0), want.sum(axis=0)
    elif behind == "mean":
        z, want = z.mean(), want.mean()
    elif behind == "chain":
        z, want = da.sqrt(z) * 2 + 1, np.sqrt(want) * 2 + 1
    elif behind == "turned":
        z, want = z.T + 1, want.T + 1
    got = z.compute(scheduler="gpu")
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


def test_numbers_that_are_none_of_a_block_stay_an_error():
    for numbers in ([3, 1, 2, 0, 9, 100], [3, 1, -2, 0, 9, 5]):
        take = Task("take", take_block, TaskRef("x"), TaskRef("list"))
        dsk = {"list": DataNode("list", (1, (np.array(numbers * 9),))), "take": take}
        for shape in ((100,), None, ()):
            replace_index_lists(dsk, lambda key, shape=shape: shape)
            assert dsk["take"] is take
    for slices in ((slice(0, 13, 1),), (slice(12, None, -2),), (slice(0, 3, 1), slice(9, 13, 1))):
        with pytest.raises(IndexError, match="index 12 is out of bounds for axis 0 with size 12"):
            take_slices(np.arange(12), 0, slices)
        assert len(take_slices(np.arange(13), 0, slices))


@pytest.mark.parametrize("numbers", [range(10, 20), [19, 3, 7, 18, 1, 2, 5]])
def test_blocks_that_are_shorter_than_they_should_be_are_an_error(cpu, numbers):
    x = da.from_array(SOURCE, chunks=20).map_blocks(lambda b: b[:15], dtype=float)
    with pytest.raises(IndexError, match="out of bounds"):
        (x[np.array(numbers)] * 2).compute(scheduler="gpu")


def test_what_takes_slices_may_be_written_to(cpu):
    """It is a copy, as what a list takes is."""

    def more(b):
        b += 1
        return b

    x = da.from_array(SOURCE.copy(), chunks=(20, 40)).persist()
    z = x[np.arange(0, 60, 2)].map_blocks(more, dtype=float)
    np.testing.assert_array_equal(z.compute(), SOURCE[::2] + 1)
    np.testing.assert_array_equal(x.compute(), SOURCE)
    assert take_slices(SOURCE, 0, (slice(0, 5, 1),)).base is None


# ---- kernels of lists of lists

A, B = np.random.default_rng(1).random((12, 9)), np.random.default_rng(2).random((7, 9))


@pytest.fixture(scope="module")
def host(libraries):
    return Host(libraries)


@st.composite
def nests(draw):
    """Arrays (two with values, and lists), and what is taken out of them, as a function."""
    lists = []

    def listed(length):
        numbers = draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=14))
        lists.append(np.array(numbers, "i4"))
        return len(lists) + 1, len(numbers)

    def ordered(length):
        lists.append(np.array(draw(st.permutations(range(length))), "i4"))
        return len(lists) + 1, length

    def nest(depth):
        kind = draw(st.sampled_from(["a", "b"] if depth == 0 else
                                    ["pick", "join", "where", "slice", "columns"]))  # fmt: skip
        if kind in "ab":
            return (lambda v: v[kind == "b"]), (12, 9) if kind == "a" else (7, 9)
        f, (rows, columns) = nest(depth - 1)
        if kind == "pick":
            n, count = listed(rows)
            return (lambda v: pick_elements(f(v), 0, v[n], rows)), (count, columns)
        if kind == "columns":
            n, count = listed(columns)
            return (lambda v: pick_elements(f(v), 1, v[n], columns)), (rows, count)
        if kind == "slice":
            return (lambda v: f(v)[::-1][: rows // 2 + 1] + 1), (rows // 2 + 1, columns)
        g, (more, others) = nest(depth - 1)
        narrow = min(columns, others)
        if kind == "where":
            few = min(rows, more)

            def chosen(v):
                x, y = f(v)[:few, :narrow], g(v)[-few:, :narrow]
                return np.where(x > 0.5, x, y)

            return chosen, (few, narrow)
        n, count = ordered(rows + more)
        return (
            lambda v: reorder_arrays([f(v)[:, :narrow], g(v)[:, :narrow]], 0, v[n]), (count, narrow)
        )  # fmt: skip

    f, _ = nest(draw(st.integers(1, 3)))
    end = draw(st.sampled_from([lambda x: x * 2, lambda x: x.sum(axis=0), lambda x: x.max(axis=1)]))
    return (lambda *v: end(f(v))), [A, B, *lists]


@pytest.mark.skipif(COMPILER is None, reason="there is no g++")
@settings(max_examples=max(EXAMPLES // 3, 15), deadline=None)
@given(nests())
def test_kernels_read_what_numpy_takes(host, nest):
    function, arrays = nest
    want = function(*arrays)
    made = trace_function(
        function, [AbstractArray(a.shape, a.dtype) for a in arrays], products=True
    )
    np.testing.assert_allclose(compute_program(made, evaluate.evaluate, arrays), want)

    def on_host(kernel, every):
        every = [aligned(np.ascontiguousarray(a)) for a in every]
        return host.run([kernel], [every], processors=2)[0]

    np.testing.assert_allclose(compute_program(made, on_host, arrays), want)
