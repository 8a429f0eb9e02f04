"""A complex number by its parts is the same number, and numbers lie where they are said to."""

from __future__ import annotations

import math
import os

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from gpuscheduler.codegen.cpu.evaluate import evaluate
from gpuscheduler.ir.complex_parts import RANGES, ComplexPartsRewriter, by_parts
from gpuscheduler.ir.expr import Expr, Kernel, View, constant, nodes

EXAMPLES = int(os.environ.get("GPUSCHEDULER_EXAMPLES", "100"))
FEW = settings(max_examples=EXAMPLES, deadline=None)
ENDS = [(-2.0, 3.0), (0.25, 40.0)]
X, T = (Expr("input", (), "f8", (n, View(0, ()))) for n in range(2))


def made(op, *args, dtype="c16"):
    return Expr(op, args, dtype)


def number(value):
    return constant(value, "c16")


def ops(root):
    return sorted(n.op for n in nodes((root,)) if n.args)


def values(*roots):
    """Over a grid of the two inputs, whose ends are among its points."""
    x, t = np.linspace(*ENDS[0], 41), np.linspace(*ENDS[1], 37)
    views = [View(0, (1, 0)), View(0, (0, 1))]

    def spread(node):
        if node.op == "input":
            return Expr("input", (), node.dtype, (node.data[0], views[node.data[0]]))
        return Expr(node.op, tuple(map(spread, node.args)), node.dtype, node.data)

    with np.errstate(all="ignore"):
        return evaluate(Kernel((41, 37), tuple(map(spread, roots))), [x, t])


def test_a_wave_is_a_product_of_what_depends_on_one_axis():
    z = made("exp", made("complex", X, T))
    new = by_parts(z, ENDS)
    assert ops(new) == ["complex", "cos", "exp", "multiply", "multiply", "sin"]
    np.testing.assert_allclose(*values(new, z), rtol=1e-15)


def test_a_wave_of_size_one_has_no_exponential():
    phase = made("multiply", number(2j), made("cast", T))
    assert ops(by_parts(made("exp", phase), ENDS)) == ["complex", "cos", "multiply", "sin"]
    turned = made("exp", made("complex", constant(0, "f8"), T))
    assert ops(by_parts(turned, ENDS)) == ["complex", "cos", "sin"]


def test_a_real_factor_takes_two_products():
    z = made("multiply", number(0.5), made("complex", X, T))
    new = by_parts(z, ENDS)
    assert ops(new) == ["complex", "multiply", "multiply"]
    np.testing.assert_array_equal(*values(new, z))
    factor = made("multiply", made("complex", X, T), made("cast", T))
    np.testing.assert_array_equal(*values(by_parts(factor, ENDS), factor))


@pytest.mark.parametrize(
    ("z", "ends"),
    [
        (made("exp", made("complex", X, T)), [None, ENDS[1]]),  # may be infinite
        (made("exp", made("complex", X, T)), [ENDS[0], None]),
        (made("exp", made("complex", X, T)), [(0, 1000), ENDS[1]]),  # overflows
        (made("exp", made("complex", X, T)), [(-1000, 0), ENDS[1]]),  # loses digits
        (made("multiply", number(2), made("complex", X, T)), [None, None]),
        (made("multiply", number(math.inf), made("complex", X, T)), ENDS),
        (made("multiply", number(1j), made("complex", X, T)), ENDS),  # four products anyway
        (made("sqrt", made("complex", X, T)), ENDS),
        (made("add", made("cast", X), number(1)), ENDS),  # nothing is less work
    ],
)
def test_what_stays_as_it_is(z, ends):
    assert by_parts(z, ends) == z


def test_numbers_of_single_precision_keep_it():
    x, t = (Expr("input", (), "f4", (n, View(0, ()))) for n in range(2))
    new = by_parts(made("exp", made("complex", x, t, dtype="c8"), dtype="c8"), ENDS)
    assert {n.dtype.char for n in nodes((new,))} == {"f", "F"}
    assert by_parts(made("exp", made("complex", x, t, dtype="c8"), dtype="c8"), [(0, 85), ENDS[1]])
    far = made("exp", made("complex", x, t, dtype="c8"), dtype="c8")
    assert by_parts(far, [(0, 85), ENDS[1]]) == far


# ---- any expression

REAL = st.sampled_from([X, T, *[constant(v, "f8") for v in (0.0, -0.0, 1.0, -2.5, 1e-3)]])
UNARY = [
    "negative", "absolute", "square", "sqrt", "log", "exp", "sin", "cos", "tanh", "reciprocal",
    "arctan", "log1p", "expm1", "sinh", "radians", "degrees",
]  # fmt: skip
BINARY = ["add", "subtract", "multiply", "divide", "minimum", "maximum", "hypot", "arctan2"]
REALS = st.recursive(
    REAL,
    lambda inner: st.one_of(
        st.builds(lambda op, a: Expr(op, (a,), "f8"), st.sampled_from(UNARY), inner),
        st.builds(lambda op, a, b: Expr(op, (a, b), "f8"), st.sampled_from(BINARY), inner, inner),
        st.builds(lambda a: Expr("multiply", (a, a), "f8"), inner),
    ),
    max_leaves=8,
)
COMPLEX = st.recursive(
    st.one_of(
        st.builds(lambda a, b: made("complex", a, b), REALS, REALS),
        st.builds(lambda a: made("cast", a), REALS),
        st.sampled_from([number(v) for v in (0, 1, -2, 1j, 0.5 - 2j, -1j)]),
    ),
    lambda inner: st.one_of(
        st.builds(
            lambda op, a: made(op, a), st.sampled_from(["negative", "conjugate", "exp"]), inner
        ),
        st.builds(
            lambda op, a, b: made(op, a, b),
            st.sampled_from(["add", "subtract", "multiply"]), inner, inner,
        ),
    ),
    max_leaves=8,
)  # fmt: skip


def test_every_function_with_a_range_is_tried():
    assert {*UNARY, *BINARY, "cast", "positive"} == set(RANGES)


@FEW
@given(REALS)
def test_numbers_lie_within_their_ranges(root):
    found = ComplexPartsRewriter(ENDS)
    known = [n for n in nodes((root,)) if found.range_of(n) is not None]
    event(f"known: {len(known) / len(nodes((root,))):.1f}")
    for node, value in zip(known, values(*known) if known else [], strict=True):
        low, high = found.range_of(node)
        assert np.isfinite(value).all()
        assert low <= value.min() <= value.max() <= high, node


@FEW
@given(COMPLEX, st.sampled_from(["whole", "real", "imag", "absolute"]))
def test_any_number_is_what_it_was(z, part):
    if part != "whole":
        z = made(part, z, dtype="f8")
    new = by_parts(z, ENDS)
    event("as it was" if new == z else "by parts")
    got, wanted = values(new, z)
    # how far off the old one may be itself: sums of large numbers may be small
    scale = max(
        [np.abs(v).max() for v in values(*nodes((z,))) if np.isfinite(v).all()], default=1.0
    )
    calm = np.isfinite(wanted) & (np.abs(wanted) > 1e-6 * scale)
    np.testing.assert_array_equal(np.isfinite(got), np.isfinite(wanted))
    if scale < 1e8:
        np.testing.assert_allclose(got[calm], wanted[calm], rtol=1e-7)
