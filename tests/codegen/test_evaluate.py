"""Kernels evaluated in blocks say what NumPy says of whole arrays.

The reference reads every element of every leaf by its number; what is outside an array is read as
something else, which a `where` must then not choose.
"""

from __future__ import annotations

import math
import subprocess
import sys
import warnings
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuscheduler.codegen.cpu import evaluate, node_calls, philox
from gpuscheduler.ir import expr, regions
from gpuscheduler.ir.expr import (
    Expr,
    Kernel,
    Reduction,
    View,
    constant,
    index,
    nodes,
    replace_leaves,
    source,
)

TINY = 256  # bytes of a block: arrays of a few hundred elements have many


def op(name, *args, dtype=None):
    """A node of the dtype that NumPy gives."""
    if dtype is None:
        dtype = node_calls._ufunc(name).resolve_dtypes((*[a.dtype for a in args], None))[-1]
    return Expr(name, args, dtype)


def cast(x, dtype):
    return Expr("cast", (x,), dtype)


def where(c, a, b):
    return Expr("where", (c, a, b), a.dtype)


def reduced(r, dtype, j=0):
    return Expr("reduced", (), dtype, (r, j))


def reduce(name, arg, shape, axes, *dtypes):
    """A kernel of one reduction whose results are the outputs."""
    dtypes = tuple(np.dtype(d) for d in dtypes)
    outputs = tuple(reduced(0, d, j) for j, d in enumerate(dtypes))
    return Kernel(shape, outputs, (Reduction(name, arg, dtypes),), axes)


# ---- the reference


def whole(root, shape, arrays, results=()):
    """An expression over a whole iteration space."""
    values = {}
    for node in nodes((root,)):
        args = [values[id(a)] for a in node.args]
        if node.op in ("input", "index"):
            view = node.data[1] if node.op == "input" else node.data
            at = np.full(shape, view.offset, np.int64)
            for k, s in enumerate(view.strides):
                at += s * np.arange(shape[k]).reshape((-1,) + (1,) * (len(shape) - 1 - k))
            if node.op == "input":
                flat = arrays[node.data[0]].reshape(-1)
                value = flat[np.clip(at, 0, flat.size - 1)] if flat.size else np.zeros(shape)
            else:
                value = at
        elif node.op == "constant":
            value = np.broadcast_to(node.value, shape)
        elif node.op == "reduced":
            value = results[node.data]
        elif node.op == "cast":
            value = args[0].astype(node.dtype)
        elif node.op == "where":
            value = np.where(*args)
        elif node.op in ("real", "imag"):
            value = getattr(args[0], node.op)
        elif node.op == "complex":
            value = (args[0] + args[1] * 1j).astype(node.dtype)
        elif node.op in expr.RANDOM:
            value = philox.values(node.op, node.data, args[0], node.dtype)
        else:
            value = node_calls._ufunc(node.op)(*args)
        values[id(node)] = np.asarray(value)
    return np.broadcast_to(values[id(root)], shape)


NUMPY = {"min": np.min, "max": np.max, "fmin": np.fmin.reduce, "fmax": np.fmax.reduce,
         "any": np.any, "all": np.all}  # fmt: skip


def reference(kernel, arrays):
    results = {}
    for r, reduction in enumerate(kernel.reductions):
        value, axes = whole(reduction.arg, kernel.shape, arrays), tuple(sorted(kernel.axes))
        if reduction.op in ("sum", "prod"):
            found = [getattr(np, reduction.op)(value, axis=axes, dtype=reduction.dtypes[0])]
        elif reduction.op.startswith("arg"):
            lines = np.moveaxis(value, axes, range(-len(axes), 0)).reshape(*kernel.output_shape, -1)
            at = getattr(np, reduction.op)(lines, -1)
            found = [at, np.take_along_axis(lines, at[..., None], -1)[..., 0]]
        elif reduction.op == "moment":
            n = math.prod(kernel.shape[k] for k in axes)
            found = [np.mean(value, axis=axes), np.var(value, axis=axes) * n]
        else:
            found = [NUMPY[reduction.op](value, axis=axes)]
        for j, (f, d) in enumerate(zip(found, reduction.dtypes, strict=True)):
            results[r, j] = np.asarray(f).astype(d)
    return [whole(o, kernel.output_shape, arrays, results) for o in kernel.outputs]


def check(kernel, arrays, block_bytes=TINY, rtol=0.0):
    with np.errstate(all="ignore"):
        found = evaluate.evaluate(kernel, arrays, block_bytes)
        expected = reference(kernel, arrays)
    assert len(found) == len(expected)
    for f, e, o in zip(found, expected, kernel.outputs, strict=True):
        assert (f.shape, f.dtype) == (kernel.output_shape, o.dtype)
        assert f.flags.c_contiguous
        assert f.flags.writeable
        if rtol:
            np.testing.assert_allclose(f, e, rtol=rtol, atol=rtol)
        else:
            np.testing.assert_array_equal(f, e)
            if f.dtype.kind == "f" and not zeros_tie(kernel):
                np.testing.assert_array_equal(np.signbit(f), np.signbit(e))
    if len(found) == 1:
        within(kernel, arrays, block_bytes, found[0])
    return found


def within(kernel, arrays, block_bytes, expected):
    """A part of a larger array is as good a place for the output."""
    whole = np.empty(tuple(n + 3 for n in kernel.output_shape), expected.dtype)
    whole.view(np.uint8 if whole.ndim else expected.dtype)[...] = 77
    part = (*(slice(1, n + 1) for n in kernel.output_shape), ...)
    with np.errstate(all="ignore"):
        (found,) = evaluate.evaluate(kernel, arrays, block_bytes, out=whole[part])
    np.testing.assert_array_equal(found, expected)
    before = np.full_like(whole, 0)
    before.view(np.uint8 if whole.ndim else expected.dtype)[...] = 77
    before[part] = found
    assert whole.tobytes() == before.tobytes()


def zeros_tie(kernel):
    """Which of 0 and -0 is the smaller NumPy itself decides by the length of an array."""
    choose = {"maximum", "minimum", "fmax", "fmin", "max", "min"}
    trees = [*kernel.outputs, *(r.arg for r in kernel.reductions)]
    return not choose.isdisjoint([n.op for n in nodes(trees)] + [r.op for r in kernel.reductions])


def some(shape, dtype="f8", seed=0):
    rng = np.random.default_rng(seed)
    dtype = np.dtype(dtype)
    if dtype.kind == "b":
        return rng.random(shape) < 0.5
    if dtype.kind in "iu":
        return rng.integers(0, 100, shape).astype(dtype)
    values = rng.normal(size=shape)
    if dtype.kind == "c":
        values = values + 1j * rng.normal(size=shape)
    return values.astype(dtype)


# ---- elementwise


@pytest.mark.parametrize("shape", [(), (1,), (7,), (1000,), (30, 40), (3, 1, 50), (0,), (4, 0, 3)])
def test_a_chain_over_any_shape(shape):
    x = source(0, shape, "f4")
    y = op("exp", op("multiply", op("add", x, constant(2, "f4")), x))
    check(Kernel(shape, (y, op("negative", y), x)), [some(shape, "f4")])


def test_broadcasting_transposes_and_negative_steps():
    shape = (17, 23)
    a, b, c = some(shape), some((23, 17), seed=1), some(23, seed=2)
    x = source(0, shape, "f8")
    turned = Expr("input", (), "f8", (1, View(0, (1, 17))))
    row = Expr("input", (), "f8", (2, View(22, (0, -1))))
    column = Expr("input", (), "f8", (0, View(3, (23, 0))))
    tree = op("add", op("multiply", x, turned), op("subtract", op("sqrt", row), column))
    (found,) = check(Kernel(shape, (tree,)), [a, b, np.abs(c)])
    np.testing.assert_array_equal(found, a * b.T + (np.sqrt(np.abs(c)[::-1]) - a[:, 3:4]))


def test_the_same_node_may_be_several_outputs_and_an_argument():
    x = source(0, (500,), "f4")
    y = op("sqrt", x)
    z = op("add", y, y)
    found = check(Kernel((500,), (y, z, y, x, constant(3, "i8"))), [np.abs(some(500, "f4"))])
    found[0][...] = -1
    assert (found[2] >= 0).all()


def test_types_are_those_of_the_nodes():
    x, n = source(0, (300,), "f4"), source(1, (300,), "i2")
    trees = (
        cast(op("add", cast(x, "f8"), cast(n, "f8")), "f2"),
        op("floor_divide", n, constant(7, "i2")),
        op("multiply", n, constant(30_000, "i2")),  # wraps
        op("less", x, constant(0, "f4")),
        where(op("greater", x, constant(0, "f4")), n, constant(-1, "i2")),
        op("ldexp", x, cast(n, "i4")),
    )
    check(Kernel((300,), trees), [some(300, "f4"), some(300, "i2")])


def test_complex_numbers_and_their_parts():
    z = source(0, (300,), "c8")
    real, imag = Expr("real", (z,), "f4"), Expr("imag", (z,), "f4")
    back = Expr("complex", (op("multiply", imag, imag), real), "c8")
    check(Kernel((300,), (back, op("multiply", z, back), op("absolute", z), real)),
          [some(300, "c8")])  # fmt: skip


def test_an_index_is_the_number_of_its_view():
    grid = op("add", index(View(5, (0, 1))), op("multiply", index(View(0, (10, 0))),
                                               constant(100, "i8")))  # fmt: skip
    (found,) = check(Kernel((20, 30), (grid,)), [])
    assert found[3, 4] == 5 + 4 + 3000


def test_nan_infinities_and_negative_zero():
    x = source(0, (8,), "f8")
    values = np.array([np.nan, np.inf, -np.inf, -0.0, 0.0, 1e308, -1e308, 5e-324])
    trees = [op("multiply", x, constant(-0.0, "f8")), op("maximum", x, constant(0, "f8")),
             op("divide", constant(1, "f8"), x), op("isnan", x), op("sign", x)]  # fmt: skip
    check(Kernel((8,), tuple(trees)), [values])


def test_strides_of_the_arrays_own_memory():
    """The expression was made for an array that is every third column, backwards."""
    base = some((20, 30))
    a = base[::-1, ::3]
    x = Expr("input", (), "f8", (0, View(0, (-30, 3))))
    (found,) = evaluate.evaluate(Kernel(a.shape, (op("negative", x),)), [a], TINY)
    np.testing.assert_array_equal(found, -a)


def test_arrays_that_may_not_be_written():
    a = some(100)
    a.flags.writeable = False
    (found,) = check(Kernel((100,), (source(0, (100,), "f8"),)), [a])
    found[0] = 1


def test_an_array_of_another_type_is_refused():
    with pytest.raises(TypeError, match="array 0 is int64, the kernel reads float64"):
        evaluate.evaluate(Kernel((5,), (source(0, (5,), "f8"),)), [np.arange(5)])


def test_constants_may_be_given_in_each_call():
    """A draw's position, and numbers elsewhere."""
    place, bound = constant(1 << 40, "i8"), constant(7.25, "f8")
    at = op("add", index(View(1, (50, 1))), place)
    x = Expr("normal", (at,), "f8", 5)
    tree = op("minimum", op("add", x, cast(place, "f8")), bound)
    # ... and below a choice that is no box
    outside = Expr("input", (), "f8", (0, View(0, (50, 1))))
    i, j = index(View(0, (1, 0))), index(View(0, (0, 1)))
    corner = op("less", op("add", i, j), constant(20, "i8"))
    chosen = where(corner, op("add", outside, x), op("multiply", x, bound))
    made = Kernel((40, 50), (tree, x, chosen), (), ())
    small = [some(20 * 50)]
    summed = reduce("max", tree, (40, 50), (1,), "f8")
    for kernel in (made, summed):
        for position, most in ((0, 1.0), (1234, 1235.5), (-3, 0.0)):
            words = {place: constant(position, "i8"), bound: constant(most, "f8")}
            found = evaluate.evaluate(kernel, small, TINY, words)

            def settled(root, words=words):
                return replace_leaves([root], lambda leaf: words.get(leaf, leaf))[0]

            plain = Kernel(
                kernel.shape,
                tuple(settled(o) for o in kernel.outputs),
                tuple(replace(r, arg=settled(r.arg)) for r in kernel.reductions),
                kernel.axes,
            )
            for f, e in zip(found, evaluate.evaluate(plain, small, TINY), strict=True):
                np.testing.assert_array_equal(f, e)


def test_special_functions_are_scipys():
    special = pytest.importorskip("scipy.special")
    x = source(0, (300,), "f4")
    a = some(300, "f4")
    (found,) = check(Kernel((300,), (op("erf", x),)), [a])
    np.testing.assert_array_equal(found, special.erf(a))


def test_what_numpy_does_not_have_is_told():
    x = source(0, (5,), "f4")
    assert node_calls.why_unsupported(op("exp", x)) is None
    assert "no function nonsense of float32" in node_calls.why_unsupported(
        op("nonsense", x, dtype="f4")
    )
    assert "invert of float32" in node_calls.why_unsupported(op("invert", x, dtype="f4"))
    assert "that gives float64" in node_calls.why_unsupported(op("exp", x, dtype="f8"))
    assert "matmul" in node_calls.why_unsupported(op("matmul", x, x, dtype="f4"))
    assert node_calls.why_unsupported(Expr("normal", (index(View(0, (1,))),), "f4", 7)) is None


def test_warnings_are_those_of_numpy():
    x = source(0, (4,), "f8")
    with pytest.warns(RuntimeWarning, match="divide by zero"):
        evaluate.evaluate(Kernel((4,), (op("log", x),)), [np.zeros(4)])
    with np.errstate(all="raise"), pytest.raises(FloatingPointError):
        evaluate.evaluate(Kernel((4,), (op("log", x),)), [np.zeros(4)])


# ---- where


def joined(lengths, axis, shape, first=0, dtype="f8"):
    """What concatenation is: parts whose views reach outside their arrays elsewhere."""
    strides = tuple(int(k == axis) for k in range(len(shape)))
    place = index(View(0, strides))
    tree, start = None, sum(lengths)
    for n in reversed(range(len(lengths))):
        start -= lengths[n]
        part_shape = (*shape[:axis], lengths[n], *shape[axis + 1 :])
        view = View.contiguous(part_shape)
        view = View(-start * view.strides[axis], view.strides)
        part = Expr("input", (), dtype, (first + n, view))
        end = constant(start + lengths[n], "i8")
        tree = part if tree is None else where(op("less", place, end), part, tree)
    return tree


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_concatenation_never_reads_outside(axis):
    lengths = [3, 1, 6, 2]
    shape = tuple(12 if k == axis else 5 + k for k in range(3))
    parts = [
        some(tuple(n if k == axis else 5 + k for k in range(3)), seed=n) for n in lengths
    ]  # fmt: skip
    tree = op("multiply", joined(lengths, axis, shape), constant(2, "f8"))
    (found,) = check(Kernel(shape, (tree, tree)), parts)[:1]
    np.testing.assert_array_equal(found, 2 * np.concatenate(parts, axis))
    for axes in ((0,), (1,), (2,), (0, 2), (0, 1, 2)):
        check(reduce("sum", tree, shape, axes, "f8"), parts, rtol=1e-12)
        check(reduce("argmax", tree, shape, axes, "i8", "f8"), parts)
        check(reduce("moment", tree, shape, axes, "f8", "f8"), parts, rtol=1e-12)


@pytest.mark.parametrize("name", ["isfinite", "isinf", "isnan", "signbit"])
def test_tests_of_numbers_that_are_written_with_steps(name):
    """NumPy 2.4's own loops write elsewhere, on some CPUs."""
    x, parts = some((48, 3)), [some((48, 1), seed=1), some((48, 2), seed=2)]
    x[::2] = np.nan
    wanted = getattr(np, name)(x)
    parts.append(x)
    tested = op(name, Expr("input", (), "f8", (2, View.contiguous(x.shape))))
    kernel = Kernel(x.shape, (tested, joined([1, 2], 1, x.shape)))
    for fill in (False, True):
        evaluate.evaluate(kernel, parts)[0][...] = fill  # memory that is used again
        got, whole = evaluate.evaluate(kernel, parts)
        np.testing.assert_array_equal(got, wanted)
        np.testing.assert_array_equal(whole, np.concatenate(parts[:2], 1))
    assert got.flags.c_contiguous


@pytest.mark.parametrize("dtype", ["f4", "f8", "i4", "i8"])
@pytest.mark.parametrize("step", [2, 3, 4, 8])
def test_negatives_that_are_written_with_steps(dtype, step):
    """Those of NumPy 2.4 are others' where four bytes of sixteen are read, on some CPUs."""
    x = np.arange(50 * step).astype(dtype)
    leaf = Expr("input", (), dtype, (0, View(1, (step,))))
    whole = np.zeros((40, 3), dtype)
    evaluate.evaluate(Kernel((40,), (op("negative", leaf),)), [x], out=whole[:, 1])
    np.testing.assert_array_equal(whole[:, 1], -x[1 : 40 * step + 1 : step].copy())
    assert not whole[:, ::2].any()


def test_many_parts_are_as_many_regions():
    parts = [some(3, seed=n) for n in range(64)]
    (found,) = evaluate.evaluate(Kernel((192,), (joined([3] * 64, 0, (192,)),)), parts)
    np.testing.assert_array_equal(found, np.concatenate(parts))


def test_a_choice_that_is_no_box_reads_only_the_chosen_points():
    """Below the diagonal, of an array that has nothing else."""
    n = 30
    packed = some(n * (n + 1) // 2)
    i, j = index(View(0, (1, 0))), index(View(0, (0, 1)))
    # row i of an upper triangle read backwards in i: only for j <= i is it inside
    x = Expr("input", (), "f8", (0, View(0, (n, 1))))
    tree = where(op("less_equal", op("add", i, j), constant(14, "i8")), x, constant(0, "f8"))
    (found,) = check(Kernel((n, n), (tree,)), [packed])
    assert found[14, 0] == packed[14 * n]
    check(Kernel((n, n), (op("exp", op("negative", tree)),)), [packed])
    check(reduce("sum", tree, (n, n), (0,), "f8"), [packed], rtol=1e-12)


def test_conditions_that_depend_on_data_guard_as_well():
    a, flags = some(10), np.arange(40) < 10
    c, x = source(1, (40,), "?"), source(0, (10,), "f8")
    inner = where(op("logical_not", c), constant(1, "f8"), op("sqrt", op("absolute", x)))
    check(Kernel((40,), (where(c, inner, constant(-1, "f8")),)), [a, flags])


def test_padding_in_the_middle_of_a_box():
    a = some((4, 6))
    i, j = index(View(0, (1, 0))), index(View(0, (0, 1)))

    def within(k, low, high):
        return op("logical_and", op("greater_equal", k, constant(low, "i8")),
                  op("less", k, constant(high, "i8")))  # fmt: skip

    x = Expr("input", (), "f8", (0, View(-2 * 6 - 3, (6, 1))))
    tree = where(op("logical_and", within(i, 2, 6), within(j, 3, 9)), x, constant(7, "f8"))
    (found,) = check(Kernel((9, 11), (tree,)), [a])
    np.testing.assert_array_equal(found, np.pad(a, ((2, 3), (3, 2)), constant_values=7))


def test_reading_outside_is_refused():
    x = Expr("input", (), "f8", (0, View(1, (1,))))
    with pytest.raises(IndexError, match="outside"):
        evaluate.evaluate(Kernel((5,), (x,)), [some(5)])
    guarded = where(op("less", index(View(0, (1,))), constant(5, "i8")), x, constant(0, "f8"))
    with pytest.raises(IndexError, match="outside"):
        evaluate.evaluate(Kernel((6,), (guarded,)), [some(5)])
    uneven = where(op("equal", op("remainder", index(View(0, (1,))), constant(2, "i8")),
                      constant(0, "i8")), x, constant(0, "f8"))  # fmt: skip
    with pytest.raises(IndexError, match="outside"):
        evaluate.evaluate(Kernel((8,), (uneven,)), [some(5)])


COMPARISONS = ["less", "less_equal", "greater", "greater_equal", "equal", "not_equal"]


@pytest.mark.parametrize("name", COMPARISONS)
@pytest.mark.parametrize("stride", [1, 2, 3, -1, -3])
def test_boxes_are_cut_where_a_comparison_turns(name, stride):
    for start, k in product(range(-4, 8), range(-3, 4)):
        node = op(name, index(View(start, (stride,))), constant(k, "i8"))
        stack = [((0, 9),)]
        while stack:
            box = stack.pop()
            truth = regions.truth_in(node, box)
            if truth is None:
                axis, places = regions.cut_for(node, box)
                assert axis == 0
                stack += [((a, b),) for a, b in zip(places, places[1:], strict=False)]
            else:
                i = np.arange(*box[0])
                np.testing.assert_array_equal(getattr(np, name)(start + stride * i, k), truth)


# ---- reductions


@pytest.mark.parametrize("axes", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2), (0, 1, 2), ()])
@pytest.mark.parametrize("shape", [(7, 11, 13), (1, 200, 3), (40, 1, 40), (2, 3, 130)])
def test_reductions_over_any_axes(shape, axes):
    x = source(0, shape, "f8")
    tree = op("multiply", x, x)
    a = [some(shape)]
    check(reduce("sum", tree, shape, axes, "f8"), a, rtol=1e-13)
    check(reduce("prod", x, shape, axes, "f8"), a, rtol=1e-11)
    check(reduce("max", x, shape, axes, "f8"), a)
    if axes:
        check(reduce("argmin", x, shape, axes, "i8", "f8"), a)
        check(reduce("moment", x, shape, axes, "f8", "f8"), a, rtol=1e-12)


@pytest.mark.parametrize("dtype", ["?", "i1", "u4", "i8", "f2", "f4", "f8", "g", "c8", "c16"])
def test_reductions_of_any_type(dtype):
    shape = (40, 50)
    a = some(shape, dtype)
    x = source(0, shape, dtype)
    rtol = {"f2": 1e-2, "f4": 1e-5, "c8": 1e-5}.get(dtype, 1e-12)
    for axes in ((0,), (1,), (0, 1)):
        gives = np.sum(a[:1, :1]).dtype
        check(reduce("sum", x, shape, axes, gives), [a], rtol=rtol)
        for name in ("min", "max", "fmin", "fmax"):
            check(reduce(name, x, shape, axes, a.dtype), [a])
        for name in ("any", "all"):
            check(reduce(name, x, shape, axes, "?"), [a])
        check(reduce("argmax", x, shape, axes, "i8", a.dtype), [a])
        if a.dtype.kind in "fc":
            check(reduce("moment", x, shape, axes, a.dtype, a.real.dtype), [a], rtol=rtol)


def test_integers_wrap():
    x = source(0, (1000,), "i4")
    a = np.full(1000, 2**31 - 1, "i4")
    (found,) = check(reduce("sum", x, (1000,), (0,), "i4"), [a])
    assert found == np.sum(a, dtype="i4")
    check(reduce("prod", x, (1000,), (0,), "i8"), [a])


def test_nan_in_reductions():
    a = some((30, 40))
    a[3, 7] = a[20, 7] = a[5, 5] = np.nan
    a[9] = np.nan
    shape, x = a.shape, source(0, (30, 40), "f8")
    for axes in ((0,), (1,), (0, 1)):
        for name in ("min", "max", "fmin", "fmax", "sum"):
            check(reduce(name, x, shape, axes, "f8"), [a], rtol=1e-13)
        for name in ("argmin", "argmax"):
            check(reduce(name, x, shape, axes, "i8", "f8"), [a])


def test_the_first_of_equals_is_the_extreme():
    a = np.zeros((20, 30))
    a[7, 3] = a[7, 20] = a[12, 0] = 1
    x = source(0, a.shape, "f8")
    (at, value) = check(reduce("argmax", x, a.shape, (0, 1), "i8", "f8"), [a])
    assert (at, value) == (7 * 30 + 3, 1)
    # the second axis first: C order of the reduced axes, not of memory
    turned = Expr("input", (), "f8", (0, View(0, (1, 30))))
    (at, _) = check(reduce("argmax", turned, (30, 20), (0, 1), "i8", "f8"), [a])
    assert at == 12


def test_infinities_in_sums_and_moments():
    a = some(1000)
    a[3] = a[900] = np.inf
    x = source(0, (1000,), "f8")
    check(reduce("sum", x, (1000,), (0,), "f8"), [a])
    check(reduce("moment", x, (1000,), (0,), "f8", "f8"), [a])
    a[7] = -np.inf
    check(reduce("sum", x, (1000,), (0,), "f8"), [a])


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0)])
@pytest.mark.parametrize("axes", [(0,), (1,), (0, 1)])
def test_reductions_of_nothing(shape, axes):
    x, a = source(0, shape, "f8"), np.empty(shape)
    for name, dtype in [("sum", "f8"), ("prod", "f8"), ("any", "?"), ("all", "?")]:
        check(reduce(name, x, shape, axes, dtype), [a])
    if 0 not in [shape[k] for k in axes]:
        check(reduce("min", x, shape, axes, "f8"), [a])
    else:
        with pytest.raises(ValueError, match="no identity"):
            evaluate.evaluate(reduce("min", x, shape, axes, "f8"), [a])
        with pytest.raises(ValueError, match="of an empty sequence"):
            evaluate.evaluate(reduce("argmin", x, shape, axes, "i8", "f8"), [a])


def test_outputs_are_expressions_of_results():
    """softmax's denominators, and a mean, in one pass."""
    shape = (20, 30)
    a, b = some(shape), some(20, seed=1)
    x, row = source(0, shape, "f8"), source(1, (20,), "f8")
    f8 = (np.dtype("f8"),)
    total, mean = reduced(0, "f8"), op("divide", reduced(1, "f8"), constant(30, "f8"))
    kernel = Kernel(
        shape,
        (op("log", total), op("add", mean, row), total),
        (Reduction("sum", op("exp", x), f8), Reduction("sum", x, f8)),
        (1,),
    )
    check(kernel, [a, b], rtol=1e-12)


def test_a_reduction_of_what_does_not_vary():
    for tree in (constant(3, "f8"), Expr("input", (), "f8", (0, View(2, (0, 0)))),
                 op("exp", Expr("input", (), "f8", (0, View(0, (0, 1)))))):  # fmt: skip
        check(reduce("sum", tree, (50, 60), (0,), "f8"), [some(60)], rtol=1e-12)
        check(reduce("argmin", tree, (50, 60), (0, 1), "i8", "f8"), [some(60)])


@pytest.mark.parametrize("shape", [(3_000_000,), (3000, 1000), (1_000_000, 3)])
@pytest.mark.parametrize("axis", [None, 0])
def test_float32_sums_are_at_least_as_accurate_as_pairwise_ones(shape, axis):
    a = np.random.default_rng(0).random(shape, dtype="f4")
    axes = tuple(range(a.ndim)) if axis is None else (axis,)
    (found,) = evaluate.evaluate(reduce("sum", source(0, shape, "f4"), shape, axes, "f4"), [a])
    exact = a.sum(axes, dtype="f8")
    assert (np.abs(found - exact) <= 1.5e-7 * exact).all()


def test_moments_are_as_good_where_the_mean_is_far_off():
    a = (1e6 + np.random.default_rng(0).random(1_000_000)).astype("f4")
    kernel = reduce("moment", source(0, a.shape, "f4"), a.shape, (0,), "f4", "f8")
    mean, m2 = evaluate.evaluate(kernel, [a])
    wide = a.astype("f8")
    np.testing.assert_allclose(mean, wide.mean(), rtol=1e-7)
    np.testing.assert_allclose(m2, wide.var() * a.size, rtol=1e-5)


def test_every_run_has_the_same_bits():
    a = np.random.default_rng(0).normal(size=(1000, 1001)).astype("f4")
    x = source(0, a.shape, "f4")
    for axes in ((0,), (1,), (0, 1)):
        kernel = reduce("sum", op("exp", x), a.shape, axes, "f4")
        assert len({evaluate.evaluate(kernel, [a.copy()])[0].tobytes() for _ in range(3)}) == 1


# ---- properties


@st.composite
def views(draw, shape, size):
    """A view of `size` elements, all of them inside."""
    strides, low, high = [], 0, 0
    for n in shape:
        most = 0 if n <= 1 else (size - 1 - (high - low)) // (n - 1)
        s = draw(st.integers(-most, most)) if most > 0 else 0
        strides.append(s)
        low, high = low + min(0, s * (n - 1)), high + max(0, s * (n - 1))
    return View(draw(st.integers(-low, size - 1 - high)), tuple(strides))


@st.composite
def places(draw, shape):
    strides = tuple(draw(st.integers(-2, 2)) for _ in shape)
    return index(View(draw(st.integers(-5, 5)), strides))


@st.composite
def trees(draw, shape, arrays, depth=4):
    """A float64 expression, guarded parts included."""
    kind = draw(st.integers(0, 9 if depth else 2))
    below = trees(shape, arrays, depth - 1)
    if kind in (0, 1):
        n = draw(st.integers(0, len(arrays) - 1))
        return Expr("input", (), "f8", (n, draw(views(shape, arrays[n].size))))
    if kind == 2:
        place = draw(places(shape))
        return draw(st.sampled_from([constant(draw(st.integers(-3, 3)), "f8"), cast(place, "f8")]))
    if kind == 3:
        return op(draw(st.sampled_from(["negative", "square", "absolute", "sin"])), draw(below))
    if kind < 7:
        name = draw(st.sampled_from(["add", "subtract", "multiply", "maximum", "fmin"]))
        return op(name, draw(below), draw(below))
    if kind == 7:
        return where(op("less", draw(below), draw(below)), draw(below), draw(below))
    bound = constant(draw(st.integers(-3, 9)), "i8")
    condition = op(draw(st.sampled_from(COMPARISONS)), draw(places(shape)), bound)
    if draw(st.booleans()):
        condition = op("logical_not", condition)
    return where(condition, draw(below), draw(below))


@st.composite
def kernels(draw):
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=0, max_size=4)))
    arrays = [some(draw(st.integers(1, 60)), seed=k) for k in range(draw(st.integers(1, 3)))]
    axes = tuple(k for k in range(len(shape)) if draw(st.booleans()))
    if not axes or draw(st.booleans()):
        outputs = draw(st.lists(trees(shape, arrays), min_size=1, max_size=3))
        return Kernel(shape, tuple(outputs)), arrays
    found = []
    for _ in range(draw(st.integers(1, 2))):
        name = draw(st.sampled_from(["sum", "min", "fmax", "argmin", "argmax", "moment", "any"]))
        types = {"argmin": "i8 f8", "argmax": "i8 f8", "moment": "f8 f8", "any": "?"}
        dtypes = tuple(np.dtype(t) for t in types.get(name, "f8").split())
        found.append(Reduction(name, draw(trees(shape, arrays)), dtypes))
    outputs = [reduced(r, d, j) for r, x in enumerate(found) for j, d in enumerate(x.dtypes)]
    return Kernel(shape, tuple(outputs), tuple(found), axes), arrays


@settings(deadline=None, max_examples=300, suppress_health_check=list(HealthCheck))
@given(kernels(), st.sampled_from([16, 64, 256, 1 << 20]))
def test_any_kernel_is_what_numpy_makes_of_it(made, block_bytes):
    kernel, arrays = made
    exact = not any(r.op in ("sum", "moment") for r in kernel.reductions)
    check(kernel, arrays, block_bytes, rtol=0 if exact else 1e-9)


@settings(deadline=None, max_examples=200, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_guarded_kernel_reads_only_inside(data):
    """Views go anywhere, but are chosen only where they are inside."""
    shape = tuple(data.draw(st.lists(st.integers(1, 8), min_size=1, max_size=3)))
    a = some(data.draw(st.integers(1, 40)))
    step = st.integers(-4, 4)
    view = View(data.draw(st.integers(-20, 50)), tuple(data.draw(step) for _ in shape))
    at = index(view)
    inside = op("logical_and", op("greater_equal", at, constant(0, "i8")),
                op("less", at, constant(a.size, "i8")))  # fmt: skip
    x = Expr("input", (), "f8", (0, view))
    tree = op("add", where(inside, op("negative", x), constant(5, "f8")), constant(1, "f8"))
    if data.draw(st.booleans()):
        check(Kernel(shape, (tree,)), [a], 64)
    else:
        axes = tuple(k for k in range(len(shape)) if data.draw(st.booleans())) or (0,)
        check(reduce("argmax", tree, shape, axes, "i8", "f8"), [a], 64)


def test_no_warning_for_points_that_are_not_chosen():
    a = np.array([4.0, 9.0])
    x = Expr("input", (), "f8", (0, View(-1, (1,))))
    shifted = where(op("greater", index(View(0, (1,))), constant(0, "i8")),
                    op("log", x), constant(0, "f8"))  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (found,) = evaluate.evaluate(Kernel((3,), (shifted,)), [a])
    np.testing.assert_array_equal(found, [0, np.log(4), np.log(9)])


@pytest.mark.parametrize("dtype", ["f4", "f8", "i2", "u8"])
def test_clips_are_numpys_own(dtype, monkeypatch):
    """It is several times as fast as to choose."""
    x = np.arange(12, dtype=dtype) - np.array(5, dtype)
    if x.dtype.kind == "f":
        x[:4] = [np.nan, -0.0, np.inf, -np.inf]
    every = []
    monkeypatch.setattr(np, "where", lambda *a: pytest.fail("it chooses"))
    for low, high in ((0, 3), (3, 0), (2, 2)):
        leaf = source(0, x.shape, dtype)
        for bound, beyond in ((low, "less"), (high, "greater")):
            over = Expr(beyond, (leaf, constant(bound, dtype)), bool)
            leaf = Expr("where", (over, constant(bound, dtype), leaf), dtype)
        every.append((leaf, np.clip(x, np.array(low, dtype), np.array(high, dtype))))
    outs = evaluate.evaluate(Kernel(x.shape, tuple(e for e, _ in every)), [x])
    for out, (_, want) in zip(outs, every, strict=True):
        np.testing.assert_array_equal(out, want)
        np.testing.assert_array_equal(np.signbit(out), np.signbit(want))


def test_a_choice_that_is_no_clip_stays_one():
    x = np.linspace(-2, 2, 9)
    leaf, zero, one = source(0, x.shape, "f8"), constant(0, "f8"), constant(1, "f8")
    low = Expr("where", (Expr("less", (leaf, zero), bool), one, leaf), "f8")
    both = Expr("where", (Expr("greater", (low, one), bool), one, low), "f8")
    (got,) = evaluate.evaluate(Kernel(x.shape, (both,)), [x])
    want = np.where(x < 0, 1, x)
    np.testing.assert_array_equal(got, np.where(want > 1, 1, want))


def test_a_first_call_registers_no_types_with_numba():
    """Another thread may look a type up meanwhile, and walks through what is registered."""
    code = (
        "from gpuscheduler.codegen.cpu import philox_loops\n"
        "from numba.core.typing.typeof import typeof_impl\n"
        "from gpuscheduler.codegen.cpu.njit import njit\n"
        "before = set(typeof_impl.registry)\n"
        "assert njit()(lambda x: x + 1)(1.0) == 2\n"
        "print(set(typeof_impl.registry) - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
