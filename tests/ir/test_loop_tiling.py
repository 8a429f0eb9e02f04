"""Kernels in the order in which they reuse what they read compute the same."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from gpuscheduler.codegen.cpu import evaluate
from gpuscheduler.ir import loop_tiling
from gpuscheduler.ir.expr import Expr, Kernel, View, constant, index
from gpuscheduler.ir.loop_tiling import columns
from tests.support import kernels as k
from tests.support.cuda_on_host import COMPILER, Host, aligned

host_only = pytest.mark.skipif(COMPILER is None, reason="there is no g++")
MIB = 2**20


@pytest.fixture(scope="module")
def host(libraries):
    return Host(libraries)


def read(number, offset, strides, dtype="f4"):
    return Expr("input", (), np.dtype(dtype), (number, View(offset, tuple(strides))))


def added(terms):
    return functools.reduce(lambda x, y: k.call("add", x, y), terms)


def window(shape, axis, width):
    """The sum of so many neighbours along an axis, of an array that is so much longer."""
    whole = [n + (width - 1) * (a == axis) for a, n in enumerate(shape)]
    strides = View.contiguous(tuple(whole)).strides
    return Kernel(shape, (added([read(0, n * strides[axis], strides) for n in range(width)]),))


#: Sums of planes, plus an array that has as many elements.
MEANS = k.reduced(read(0, 0, (1024, 32, 1)), (512, 32, 32), (1, 2), "sum")
MEANS = MEANS.with_roots([*MEANS.roots[:-1], k.call("add", MEANS.outputs[0], read(1, 0, (1,)))])
#: Rows, too, whose neighbours would be in other tiles; of the same array, and of another.
CROSS, ROWS = (
    Kernel((64, 1024, 1024), (added([*window((64, 1024, 1024), 0, 3).outputs, *rows]),))
    for rows in (
        [read(0, 1024, (MIB, 1024, 1))],
        [read(1, n, (MIB + 1024, 1024, 1)) for n in (0, 1024)],
    )
)
#: Of an array, added: no element is read twice.
HALVES = Kernel((32, MIB), (added([read(0, n * 32 * MIB, (MIB, 1)) for n in (0, 1)]),))
#: Neighbours along the only axis.
LINE = Kernel((2**24,), (added([read(0, n * 2**23, (1,)) for n in (0, 1)]),))


@pytest.mark.parametrize(
    ("kernel", "shape"),
    [
        (window((64, 1024, 1024), 0, 3), (64, 64, 16, 1024)),
        (window((64, 2048, 2**16), 0, 2), (2048, 4, 64, 2**14)),
        (window((3, 64, 2**21), 1, 3), (3, 128, 64, 2**14)),
        (window((64, 1024, 1024), 0, 1), None),  # no neighbours
        (window((64, 1024, 1024), 1, 3), None),  # near ones
        (window((64, 512, 512), 0, 3), None),  # that the cache still has
        (window((64, 1, 2**21 + 17), 0, 3), None),  # a prime number: of no tiles
        (k.reduced(window((64, 1024, 1024), 0, 3).outputs[0], (64, 1024, 1024), (1,), "sum"), None),
        (HALVES, None),
        (CROSS, None),
        (ROWS, None),
        (MEANS, None),
        (LINE, None),
    ],
)  # fmt: skip
def test_what_is_computed_in_columns(kernel, shape):
    found = columns(kernel)
    assert found.shape == (shape or kernel.shape)
    assert (found is kernel) == (shape is None)
    if shape:
        assert found.output_bytes == kernel.output_bytes
        assert columns(found) is found


@st.composite
def neighbours(draw):
    """A kernel that reads one array at several places along an axis, and another one anywhere.

    It may choose by position.
    """
    shape = tuple(draw(st.lists(st.integers(2, 12), min_size=2, max_size=4)))
    strides = View.contiguous(shape).strides
    dtype = np.dtype(draw(st.sampled_from(["f4", "f8", "u1", "c8"])))
    axis = draw(st.integers(0, len(shape) - 2))
    far = st.integers(0, shape[axis] - 1)
    places = draw(st.lists(far, min_size=2, max_size=4, unique=True))
    total, *terms = [read(0, strides[axis] * n + 1, strides, dtype) for n in places]
    kept = total
    for term in (*terms, read(1, draw(st.integers(0, 99)), strides, dtype)):
        if draw(st.booleans()):
            place = index(View(0, tuple([draw(st.integers(0, 9)) for _ in shape])))
            before = k.call("less", place, constant(draw(st.integers(0, 60)), "i8"), dtype="?")
            total = k.call("where", before, total, term, dtype=dtype)
        else:
            total = added([total, term])
    arrays = [k.values(dtype, 116 + 2 * math.prod(shape), seed=n) for n in (0, 1)]
    return Kernel(shape, (total, kept)), arrays


@host_only
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(neighbours(), st.integers(1, 40), st.integers(0, 1), st.booleans())
def test_any_neighbours_are_what_they_were(host, case, tile, shift, one):
    kernel, arrays = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop_tiling, "FAR", 1)
        patch.setattr(loop_tiling, "LEAST", 1)
        patch.setattr(loop_tiling, "TILE", tile)
        turned = columns(kernel)
    assume(turned is not kernel)
    arrays = [aligned(a, shift * a.itemsize) for a in arrays]
    with np.errstate(all="ignore"):
        want = evaluate.evaluate(kernel, arrays)
    got = host.run([turned], [arrays], one=one, aligned=not shift, processors=1)[0]
    k.same([g.reshape(kernel.shape) for g in got], want, kernel)
