"""Reductions of windows that slide along an axis, several results of which a thread makes at a
time."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuscheduler import blocks, kernel
from gpuscheduler.expr import Expr, View, constant, index
from tests import kernels as k
from tests.cuda_on_host import COMPILER, Host, aligned

host_only = pytest.mark.skipif(COMPILER is None, reason="there is no g++")


@pytest.fixture(scope="module")
def host(libraries):
    return Host(libraries)


def sliding(kernel_, processors=132):
    """How many results a thread makes at a time, and how many of these side by side."""
    found = kernel._Generator(kernel_, True, processors, True)
    return found.sliding, found.width


BIG = (128, 512, 1024)


def of(op, length, dtype="f4", axis=0, shape=BIG, across=()):
    x, whole = k.windows(shape, axis, length, dtype, across)
    return k.reduced(x, whole, tuple(range(len(shape), len(whole))), op)


def places(length):
    """Positions in windows, instead of values."""
    x, whole = k.windows(BIG, 0, length)
    place = index(View(0, (0, 0, 0, 1)))
    chosen = k.call("where", k.call("less", place, constant(3, "i8"), dtype="?"), x, x, dtype="f4")
    return k.reduced(k.call("add", chosen, Expr("cast", (place,), "f4")), whole, (3,), "sum")


@pytest.mark.parametrize(
    ("kernel_", "found"),
    [
        (of("sum", 4), (4, 4)),
        (of("max", 31), (16, 2)),
        (of("sum", 12), (8, 2)),
        (of("moment", 31), (16, 2)),
        (of("sum", 31, "f8"), (16, 2)),
        (of("sum", 31, "c16"), (16, 1)),
        (of("sum", 31, axis=1), (16, 2)),
        (of("sum", 5, across=(1,)), (0, None)),  # of a few results
        (of("sum", 3), (0, None)),  # short
        (of("sum", 31, axis=2), (0, None)),  # along rows
        (of("argmax", 31), (0, None)),  # where the first one is
        (of("sum", 31, shape=(128, 64, 64)), (4, 1)),  # too few for more
        (of("sum", 31, shape=(40, 64, 64)), (0, None)),
        (places(31), (0, None)),  # the same element is another value in each window
        (k.reduced(of("sum", 31).reductions[0].arg, (98, 512, 1024, 31), (0, 3), "sum"), (0, None)),
    ],
)  # fmt: skip
def test_which_windows_slide(kernel_, found):
    some, width = sliding(kernel_)
    assert (some, width if some else None) == found


OPS = ["sum", "prod", "min", "max", "fmin", "fmax", "any", "all", "moment"]


@st.composite
def cases(draw):
    dtype = np.dtype(draw(st.sampled_from(["f4", "f8", "u1", "i4", "c8", "f2"])))
    rank = draw(st.integers(2, 4))
    axis = draw(st.integers(0, rank - 2))
    shape = [draw(st.sampled_from([1, 2, 3, 5, 8])) for _ in range(rank)]
    shape[-1] = draw(st.sampled_from([8, 64, 33, 300]))
    width = draw(st.integers(4, 40))
    results = draw(st.integers(4, 70))
    shape[axis] = width + results - 1
    across = [a for a in range(rank - 1) if a != axis and draw(st.booleans())]
    x, whole = k.windows(tuple(shape), axis, width, dtype, across)
    sizes = [math.prod(shape), math.prod(shape), shape[-1]]
    arrays = [k.values(dtype, n + 20, seed=7 + n) for n in sizes]
    view = x.data[1]
    if draw(st.booleans()):  # two arrays one behind the other
        steps = [0] * len(whole)
        steps[axis] = steps[rank] = 1
        here = index(View(0, tuple(steps)))
        before = k.call("less", here, constant(draw(st.integers(0, 60)), "i8"), dtype="?")
        other = Expr("input", (), dtype, (1, view))
        x = k.call("where", before, x, other, dtype=dtype)
    if draw(st.booleans()) and dtype.kind != "c" and dtype != np.uint8:
        last = tuple([int(a == rank - 1) for a in range(len(whole))])
        x = k.call("subtract", x, Expr("input", (), dtype, (2, View(0, last))), dtype=dtype)
    some = [op for op in OPS if dtype.kind != "c" or op in ("sum", "moment", "any")]
    ops = draw(st.lists(st.sampled_from(some), min_size=1, max_size=2, unique=True))
    kernel_ = k.reduced(x, whole, tuple(range(rank, len(whole))), *ops)
    return kernel_, arrays


@host_only
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases(), st.integers(0, 1), st.booleans(), st.sampled_from([32, 2**8]))
def test_any_windows(host, case, shift, one, tile):
    kernel_, arrays = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "SLIDING_TILE", tile)
        arrays = [aligned(a, shift * a.itemsize) for a in arrays]
        with np.errstate(all="ignore"):
            want = blocks.evaluate(kernel_, arrays)
        got = host.run([kernel_], [arrays], one=one, aligned=not shift, processors=1)[0]
    k.same(got, want, kernel_)
