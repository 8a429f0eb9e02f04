"""Reductions of windows that slide along an axis, several results of which a thread makes at a
time."""

from __future__ import annotations

import math
import re

import dask.array as da
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import sliding_window_view

from gpuscheduler import Scheduler
from gpuscheduler.codegen.cpu import evaluate
from gpuscheduler.codegen.cuda import tuning
from gpuscheduler.codegen.cuda.arguments import ArgumentSlots
from gpuscheduler.codegen.cuda.kernel import generate
from gpuscheduler.codegen.cuda.loop_order import make_schedule
from gpuscheduler.codegen.cuda.window_tiles import ColumnTile
from gpuscheduler.fusion.legality import has_windows_over_edges
from gpuscheduler.fusion.task import KernelTask
from gpuscheduler.ir import limits
from gpuscheduler.ir.expr import Expr, View, constant, index
from tests.support import kernels as k
from tests.support.cuda_on_host import COMPILER, Host, aligned
from tests.tracing.test_lookups import agree

host_only = pytest.mark.skipif(COMPILER is None, reason="there is no g++")


@pytest.fixture(scope="module")
def host(libraries):
    return Host(libraries)


BIG = (128, 512, 1024)
#: Points of a kernel that the host runs in a second or two.
MOST_POINTS = 2**22


def boxes(op, lengths, dtype="f4", shape=BIG, across=()):
    x, whole = k.windows(shape, lengths, dtype, across)
    return k.reduced(x, whole, tuple(range(len(shape), len(whole))), op)


def of(op, length, dtype="f4", axis=0, **options):
    return boxes(op, {axis: length}, dtype, **options)


def places(length):
    """Positions in windows, too, not only values."""
    x, whole = k.windows(BIG, {0: length})
    place = index(View(0, (0, 0, 0, 1)))
    return k.reduced(k.call("add", x, Expr("cast", (place,), "f4")), whole, (3,), "sum")


def found(kernel_, processors=132):
    return make_schedule(kernel_, True, processors, True)


@pytest.mark.parametrize(
    ("kernel_", "some", "width"),
    [
        (of("sum", 4), 4, 4),
        (of("max", 31), 16, 2),
        (of("sum", 12), 8, 2),
        (of("moment", 31), 16, 2),
        (of("sum", 31, "f8"), 16, 2),
        (of("sum", 31, "c16"), 16, 1),
        (of("sum", 31, axis=1), 16, 2),
        (of("sum", 31, shape=(128, 64, 64)), 4, 1),  # too few for more
        (of("sum", 5, across=(1,)), 0, None),  # of a few results
        (of("sum", 31, shape=(40, 64, 64)), 0, None),
        (of("sum", 3), 0, None),  # short
        (of("argmax", 31), 0, None),  # where the first one is
        (places(31), 0, None),  # the same element is another value in each window
    ],
)
def test_which_windows_slide(kernel_, some, width):
    made = found(kernel_)
    assert made.pane is None
    assert (made.sliding, made.width if some else None) == (some, width)


@pytest.mark.parametrize(
    ("kernel_", "some", "across", "rows"),
    [
        (of("sum", 31, shape=(2**24,)), 16, 256, 1),
        (of("sum", 31, axis=2), 16, 64, 4),
        (of("max", 5, axis=2), 4, 256, 1),
        (of("moment", 31, shape=(2**24,)), 8, 256, 1),
        (of("sum", 31, axis=2, shape=(40, 20, 60)), 2, 16, 16),
        (of("sum", 5, axis=2, across=(1,)), None, 0, 0),
        (of("sum", 9000, shape=(2**24,)), None, 0, 0),  # more than there is room for
        (of("sum", 5, axis=2, shape=(2, 4, 1000)), None, 0, 0),  # few
        (boxes("sum", {0: 5, 2: 300}), 8, 32, 8),  # longer than boxes are wide
    ],
)
def test_which_windows_lie_in_panes(kernel_, some, across, rows):
    pane = found(kernel_).pane
    assert not isinstance(pane, ColumnTile)
    assert (None if pane is None else pane.some) == some
    if pane is not None:
        assert (pane.columns // some, pane.rows) == (across, rows)


@pytest.mark.parametrize(
    ("kernel_", "tall", "some", "wide"),
    [
        (boxes("sum", {1: 5, 2: 5}), 8, 8, 128),
        (boxes("max", {0: 3, 2: 3}, shape=(8192, 2, 8192)), 12, 8, 256),
        (boxes("sum", {0: 31, 2: 9}, shape=(8192, 1, 8192)), 8, 8, 256),
        (boxes("moment", {1: 15, 2: 15}), 4, 4, 128),
        (boxes("sum", {0: 3, 1: 3, 2: 3}), 12, 8, 128),
        (boxes("sum", {1: 3, 2: 3}, across=(0,)), 12, 8, 128),
        (boxes("max", {1: 5, 2: 5}, "c16"), 4, 8, 128),
    ],
)
def test_which_windows_are_boxes(kernel_, tall, some, wide):
    box = found(kernel_).pane
    mine = (box.tall, box.some, box.wide) if isinstance(box, ColumnTile) else (0, 0, 0)
    assert mine == (tall, some, wide)


def test_one_of_several_arrays_is_one_load():
    """Where it is known from the index which."""
    x, whole = k.windows(BIG, {0: 31})
    parts = [Expr("input", (), "f4", (n, x.data[1])) for n in range(3)]
    here = index(View(0, (1, 0, 0, 1)))
    before = [k.call("less", here, constant(n, "i8"), dtype="?") for n in (40, 90)]
    x = parts[0]
    for condition, part in zip(before, parts[1:], strict=True):
        x = k.call("where", condition, x, part, dtype="f4")
    source = generate(k.reduced(x, whole, (3,), "sum")).source
    assert len(re.findall(r"x\d+\[u\] = \*\(const", source)) == 3  # shared, head and tail


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("length", "axis"), [(5, 0), (31, 0), (7, 1), ((5, 5), (0, 1)), ((3, 4), (0, 1))]
)
@pytest.mark.parametrize("of", ["mean", "max", "std"])
def test_windows_on_cpus(length, axis, of, fused):
    """Those that lie over the edges of blocks are never chosen one by one: NumPy is faster."""
    values = np.random.default_rng(5).random((240, 260)).astype("f4")
    x = da.from_array(values, chunks=(80, 130)) * 2
    view = da.lib.stride_tricks.sliding_window_view(x, length, axis=axis, automatic_rechunk=fused)
    y = getattr(da, of)(view, axis=tuple(range(2, view.ndim)))
    with Scheduler("cpu:2", fuse_least=0) as s:
        tasks = [step.task for step in s.plan(y).steps]
        value = y.compute()
    for task in tasks:
        for kernel_ in task.program.kernels if isinstance(task, KernelTask) else ():
            assert not has_windows_over_edges(kernel_)
    np.testing.assert_allclose(value, y.compute(scheduler="sync"), rtol=1e-4)


OPS = ["sum", "prod", "min", "max", "fmin", "fmax", "any", "all", "moment"]


@st.composite
def cases(draw):
    dtype = np.dtype(draw(st.sampled_from(["f4", "f8", "u1", "i4", "c8", "f2"])))
    rank = draw(st.integers(1, 4))
    shape = [draw(st.sampled_from([1, 2, 3, 5, 8])) for _ in range(rank)]
    shape[-1] = draw(st.sampled_from([8, 64, 33, 300]))
    along = draw(st.permutations(range(rank)))[: draw(st.integers(1, 3))]
    lengths = {a: draw(st.integers(2, 5)) for a in along} | {along[0]: draw(st.integers(2, 40))}
    for a, n in lengths.items():
        shape[a] = max(shape[a], n - 1 + draw(st.sampled_from([1, 3, 4, 5, 16, 17, 40])))
    others = [a for a in range(rank - 1) if a not in lengths]
    across = [a for a in others if draw(st.integers(0, 2)) == 0]
    x, whole = k.windows(tuple(shape), lengths, dtype, across)
    assume(math.prod(whole) <= MOST_POINTS)
    view, axes = x.data[1], tuple(range(rank, len(whole)))
    arrays = [k.values(dtype, math.prod(shape) + 20, seed=7 + n) for n in range(3)]
    if draw(st.booleans()):  # two arrays one behind the other
        steps = [0] * len(whole)
        steps[along[0]] = steps[rank] = 1
        here = index(View(0, tuple(steps)))
        before = k.call("less", here, constant(draw(st.integers(0, 60)), "i8"), dtype="?")
        x = k.call("where", before, x, Expr("input", (), dtype, (1, view)), dtype=dtype)
        if draw(st.booleans()):
            before = k.call("less", constant(draw(st.integers(0, 9)), "i8"), here, dtype="?")
            x = k.call("where", before, x, Expr("input", (), dtype, (2, view)), dtype=dtype)
    if draw(st.booleans()) and dtype.kind == "f":  # a row of numbers for all
        last = [int(a == rank - 1) for a in range(rank)]
        last += [int(a == rank - 1) for a in (*lengths, *across)]
        x = k.call("subtract", x, Expr("input", (), dtype, (2, View(0, tuple(last)))), dtype=dtype)
    some = [op for op in OPS if dtype.kind != "c" or op in ("sum", "moment", "any")]
    ops = draw(st.lists(st.sampled_from(some), min_size=1, max_size=2, unique=True))
    out = k.reduced(x, whole, axes, *ops)
    if draw(st.booleans()) and dtype.kind == "f":  # what else there is of each result
        kept = Expr("input", (), dtype, (1, View.contiguous(tuple(shape))))
        outputs = [k.call("subtract", kept, Expr("cast", (o,), dtype)) for o in out.outputs]
        out = out.with_roots([*out.roots[: len(ops)], *outputs])
    return out, arrays


@host_only
@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases(), st.integers(0, 1), st.booleans(), st.sampled_from([32, 2**8]))
def test_any_windows(host, case, shift, one, tile):
    kernel_, arrays = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "SLIDING_TILE", tile)
        patch.setattr(tuning, "SLIDING_THREADS", 16)
        patch.setattr(tuning, "LEAST_IN_PANES", 1)
        arrays = [aligned(a, shift * a.itemsize) for a in arrays]
        with np.errstate(all="ignore"):
            want = evaluate.evaluate(kernel_, arrays)
        got = host.run([kernel_], [arrays], one=one, aligned=not shift, processors=1)[0]
    k.same(got, want, kernel_)


@host_only
@pytest.mark.parametrize("ops", [("sum",), ("moment",), ("sum", "max")])
@pytest.mark.parametrize(
    ("shape", "lengths"),
    [((20_000,), {0: 9}), ((60, 700), {1: 30}), ((200, 300), {0: 3, 1: 5}),
     ((120, 300), {0: 20, 1: 4}), ((200, 900), {0: 4, 1: 260})],
)  # fmt: skip
def test_many_panes(host, shape, lengths, ops):
    """Most of which lie where it is known what is chosen."""
    x, whole = k.windows(shape, lengths)
    view, rank = x.data[1], len(shape)
    for n, a in enumerate(lengths):  # other arrays behind some places along each axis
        steps = [0] * len(whole)
        steps[a] = steps[rank + n] = 1
        here = index(View(0, tuple(steps)))
        before = k.call("less", here, constant(shape[a] * 4 // 5, "i8"), dtype="?")
        x = k.call("where", before, x, Expr("input", (), "f4", (n + 1, view)), dtype="f4")
    kernel_ = k.reduced(x, whole, tuple(range(rank, len(whole))), *ops)
    made = found(kernel_, 1)
    assert made.core is not None
    assert not any(n.op == "where" for n in made.core.nodes)
    arrays = [aligned(k.values("f4", math.prod(shape), seed=n)) for n in range(3)]
    with np.errstate(all="ignore"):
        want = evaluate.evaluate(kernel_, arrays)
    k.same(host.run([kernel_], [arrays], processors=1)[0], want, kernel_)


@host_only
@pytest.mark.parametrize(("shape", "lengths"), [((90, 300), {0: 9}), ((90, 300), {0: 3, 1: 7})])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_windows_of_random_numbers(host, shape, lengths, dtype, monkeypatch):
    """Which are drawn where they are wanted, and added to what is read."""
    monkeypatch.setattr(tuning, "SLIDING_THREADS", 16)
    x, whole = k.windows(shape, lengths, dtype)
    drawn = Expr("uniform", (index(x.data[1]),), dtype, 1234)
    axes = tuple(range(len(shape), len(whole)))
    kernel_ = k.reduced(k.call("add", drawn, x), whole, axes, "sum", "moment")
    assert found(kernel_, 1).sliding
    arrays = [aligned(np.random.default_rng(1).random(shape).astype(dtype))]
    want = evaluate.evaluate(kernel_, arrays)
    k.same(host.run([kernel_], [arrays], processors=1)[0], want, kernel_)


@host_only
@pytest.mark.parametrize("lengths", [{0: 3, 1: 5}, {0: 9, 1: 12}])
@pytest.mark.parametrize("dtype", ["f8", "c8"])
def test_deviations_beside_none(host, lengths, dtype):
    """What is no number, or infinite, costs its neighbours no digits, far from zero as they are."""
    rng, shape = np.random.default_rng(3), (100, 300)
    array = (1e6 + rng.random(shape)).astype(dtype)
    array.flat[rng.choice(array.size, 60)] = np.nan
    array.flat[rng.choice(array.size, 60)] = np.inf
    array[0, :200] = np.nan  # the first ones of all columns
    x, whole = k.windows(shape, lengths, dtype)
    kernel_ = k.reduced(x, whole, (2, 3), "moment")
    assert isinstance(found(kernel_, 1).pane, ColumnTile)
    with np.errstate(invalid="ignore"):
        got = host.run([kernel_], [[aligned(array.ravel())]], processors=1)[0]
        windows = np.lib.stride_tricks.sliding_window_view(array, tuple(lengths.values()))
        wide = windows.astype("f8" if dtype == "f8" else "c16")
        want = wide.var(axis=(2, 3)) * math.prod(lengths.values())
    known = np.isfinite(windows).all(axis=(2, 3))
    assert known.sum() > 1000
    np.testing.assert_allclose(got[-1].reshape(want.shape)[known], want[known], rtol=1e-6)


def test_a_slot_has_one_value():
    slots = ArgumentSlots()
    assert slots.slot_of("rows", 3) == slots.slot_of("rows", 3) == 0
    with pytest.raises(AssertionError, match="two values of rows"):
        slots.slot_of("rows", 4)


WEIGHTS = np.array([1.0, 4, 6, 4, 1], "f4") / 16
OVER_WINDOWS = {
    "along rows": lambda x, w: (sliding_window_view(x, 5, 1) * w).sum(-1),
    "down columns": lambda x, w: (sliding_window_view(x, 5, 0) * w).sum(-1),
    "as a product": lambda x, w: sliding_window_view(x, 5, 1) @ w,
    "boxes": lambda x, w: (sliding_window_view(x, (5, 5)) * w).sum((-1, -2)),
    "the greatest": lambda x, w: (sliding_window_view(x, 5, 1) * w).max(-1),
    "compared": lambda x, w: (sliding_window_view(x, 5, 1) > w).any(-1),
    "where": lambda x, w: sliding_window_view(x, 5, 1).argmax(-1),
    "where the least": lambda x, w: sliding_window_view(x, 4, 0).argmin(-1, keepdims=True),
    "where in boxes": lambda x, w: sliding_window_view(x, (3, 3)).reshape(28, 38, 9).argmin(-1),
    "which": lambda x, w: np.stack([x, x[::-1], x * 2]).argmax(0),
}


@pytest.mark.parametrize("name", OVER_WINDOWS)
@pytest.mark.parametrize("dtype", ["f4", "f8", "i4"])
def test_weights_and_places(name, dtype):
    x = np.random.default_rng(0).integers(-9, 9, (30, 40)).astype(dtype)  # of which many are equal
    w = (WEIGHTS * 16).astype(dtype)
    agree(OVER_WINDOWS[name], x, constants=(w,), known=False)
    if dtype != "i4":
        x[3, 4] = x[7, 7] = x[7, 8] = np.nan
        x[9, 9], x[20, 3] = np.inf, -np.inf
        agree(OVER_WINDOWS[name], x, constants=(w,), known=False)
