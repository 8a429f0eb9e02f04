"""Machine code for CPU devices gives what NumPy gives."""

import math
import os
import threading
import warnings
from contextlib import nullcontext

import dask
import dask.array as da
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuscheduler import Scheduler
from gpuscheduler.codegen.cpu import (
    evaluate,
    llvm_code,
    llvm_jit,
    llvm_reduce,
    llvm_text,
    node_calls,
    tuning,
)
from gpuscheduler.ir import random, regions
from gpuscheduler.ir.expr import Expr, Kernel, Reduction, View, constant, index, nodes, source
from tests.codegen import test_evaluate as test_blocks

pytestmark = pytest.mark.skipif(llvm_text.compile_target() is None, reason="there is no LLVM")

FLOATS = [0.0, -0.0, 1.5, -2.5, 3.0, np.inf, -np.inf, np.nan, 1e-310, 7e30, -0.5, 2.0, 0.25]
INTS = [0, 1, 2, 3, 5, 100, 127, -1, -2, -128]
UFUNCS = [
    "add", "subtract", "multiply", "true_divide", "negative", "positive", "square", "absolute",
    "sqrt", "floor", "ceil", "trunc", "rint", "reciprocal", "maximum", "minimum", "fmax", "fmin",
    "equal", "not_equal", "less", "less_equal", "greater", "greater_equal", "logical_and",
    "logical_or", "logical_xor", "logical_not", "bitwise_and", "bitwise_or", "bitwise_xor",
    "invert", "isnan", "isfinite", "isinf", "signbit", "fabs", "sign",
    "left_shift", "right_shift",
]  # fmt: skip
LIBRARY = [n for n in llvm_text._LIBRARY if n != "float_power"]


@pytest.fixture
def always(monkeypatch):
    """However small a region is, and however few cores there are."""
    evaluate._plan.cache_clear()
    evaluate._known.clear()
    monkeypatch.setattr(tuning, "LEAST_POINTS", 0)
    monkeypatch.setattr(tuning, "MANY", 0)
    yield
    evaluate._plan.cache_clear()
    evaluate._known.clear()


def values(dtype, n=70):
    some = [v % 200 if np.dtype(dtype).kind in "bu" else v for v in INTS]
    given = FLOATS if np.dtype(dtype).kind == "f" else some
    return np.resize(np.array(given).astype(dtype), n)


def code_of(kernel):
    plan = evaluate._plan(kernel, None, tuning.BLOCK_BYTES, ())
    if kernel.reductions:
        return plan.codes[0] if len(plan.codes) == 1 else None
    return plan.outputs[0].code


#: What is the same for all whole numbers.
NUMBERS = ["isnan", "isinf", "isfinite"]


@pytest.mark.parametrize("dtype", ["f8", "f4", "i1", "u2", "i4", "i8", "u8", "?"])
@pytest.mark.parametrize("op", UFUNCS + LIBRARY)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_operations(always, op, dtype):
    """The same bits; of the C library's functions, but for the last ones."""
    function = getattr(np, op)
    a, b = values(dtype), values(dtype)[::-1].copy()
    arrays = [a, b][: function.nin]
    try:
        made = function.resolve_dtypes((*[x.dtype for x in arrays], None))
    except TypeError:
        pytest.skip("NumPy has no such function")
    if any(t != a.dtype for t in made[:-1]):
        pytest.skip("NumPy converts first")
    if op == "power":
        b = abs(b) if np.dtype(dtype).kind == "f" else b % 3
        arrays = [a, b]
    x = [source(n, a.shape, dtype) for n in range(function.nin)]
    kernel = Kernel(a.shape, (Expr(op, tuple(x), made[-1]),))
    (found,) = evaluate.evaluate(kernel, arrays)
    want = function(*arrays)
    assert found.dtype == want.dtype
    if op in LIBRARY:
        np.testing.assert_allclose(found, want, rtol=2e-6 if dtype == "f4" else 4e-15)
    elif op in ("maximum", "minimum", "fmax", "fmin"):  # 0 and -0 are equal
        np.testing.assert_array_equal(found, want)
    else:
        odd = want != want
        np.testing.assert_array_equal(found, want)
        assert found[~odd].tobytes() == want[~odd].tobytes()
    known = {
        "f": UFUNCS + LIBRARY,
        "b": [*llvm_text._BOOL, "invert", "equal", "logical_not", *NUMBERS],
        "i": [*llvm_text._INT, *llvm_text._SHIFT, "sign", *llvm_text._COMPARE,
              *llvm_text._CHOICES, "negative", "positive",
              "square", "absolute", "invert", "logical_and", "logical_or", "logical_xor",
              "logical_not", *NUMBERS],
    }  # fmt: skip
    expected = op in known[np.dtype(dtype).kind.replace("u", "i")]
    assert (code_of(kernel) is not None) == expected


@pytest.mark.parametrize("given", ["f8", "f4", "i1", "u1", "i4", "u4", "i8", "?"])
@pytest.mark.parametrize("wanted", ["f8", "f4", "i1", "u2", "i4", "u8", "?"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_casts(always, given, wanted):
    a = values(given)
    kernel = Kernel(a.shape, (Expr("cast", (source(0, a.shape, given),), wanted),))
    whole = wanted[0] in "iu" and given[0] == "f"
    if whole:
        a = np.nan_to_num(a) % 100
    (found,) = evaluate.evaluate(kernel, [a])
    np.testing.assert_array_equal(found, a.astype(wanted))
    assert (code_of(kernel) is None) == whole


REDUCTIONS = [*llvm_reduce.PAIRWISE, *llvm_code.EXTREMES, "moment"]
#: What they make of doubles, where it is not doubles.
MADE = {"any": "?", "all": "?", "moment": "f8 f8", "argmin": "i8 f8", "argmax": "i8 f8"}


@pytest.mark.parametrize("length", [1, 31, 33, 1023, 1025, 2500])
@pytest.mark.parametrize("dtype", ["f8", "f4", "i4", "u1", "?"])
@pytest.mark.parametrize("op", REDUCTIONS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_reductions(always, op, dtype, length, monkeypatch):
    whole = np.dtype(dtype).kind in "iub"
    a = (np.random.default_rng(0).normal(size=(7, length)) * 10 + 50).astype(dtype)
    if op == "prod" and not whole:
        a = 1 + a / 1e4
    types = {"sum": "i8" if whole else dtype, "prod": "i8" if whole else dtype, "any": "?",
             "all": "?", "moment": "f8 f8", "argmin": f"i8 {dtype}",
             "argmax": f"i8 {dtype}"}.get(op, dtype)  # fmt: skip
    reduction = Reduction(op, source(0, a.shape, dtype), tuple(map(np.dtype, types.split())))
    outputs = [Expr("reduced", (), d, (0, j)) for j, d in enumerate(reduction.dtypes)]
    for odd in [None, *([np.nan, np.inf] if np.dtype(dtype).kind == "f" else [])]:
        if odd is not None:
            a[3, length // 2] = odd
        for axes in ((0,), (1,), (0, 1)):
            kernel = Kernel(a.shape, tuple(outputs), (reduction,), axes)
            if dtype == "?" and op.startswith("f"):
                assert code_of(kernel) is None
            else:
                assert code_of(kernel) is not None
            tight = 2e-6 if dtype == "f4" else 1e-13
            test_blocks.check(kernel, [a], 1 << 20, rtol=tight)


def test_sums_are_exact_where_numpys_are_not(always):
    rng = np.random.default_rng(0)
    a = rng.normal(size=(3, 300_001)) * 1e8 + rng.normal(size=(3, 300_001))
    x = source(0, a.shape, "f8")
    for axes in ((1,), (0, 1), (0,)):
        reduction = Reduction("sum", x, (np.dtype("f8"),))
        kernel = Kernel(a.shape, (Expr("reduced", (), "f8", (0, 0)),), (reduction,), axes)
        (found,) = evaluate.evaluate(kernel, [a])
        lines = np.moveaxis(a, axes, range(-len(axes), 0)).reshape(*kernel.output_shape, -1)
        for at in np.ndindex(*kernel.output_shape[:1] if axes != (0,) else (5,)):
            exact = math.fsum(lines[at])
            assert abs(found[at] - exact) <= abs(lines[at].sum() - exact) + np.spacing(abs(exact))


def test_of_infinite_sums(always):
    x = source(0, (5000,), "f8")
    kernel = Kernel((5000,), (Expr("reduced", (), "f8", (0, 0)),),
                    (Reduction("sum", x, (np.dtype("f8"),)),), (0,))  # fmt: skip
    for odd in ([np.inf], [-np.inf], [np.nan], [np.inf, -np.inf]):
        a = np.ones(5000)
        a[10 : 10 + len(odd)], a[4000 : 4000 + len(odd)] = odd, odd
        with np.errstate(invalid="ignore"):
            np.testing.assert_array_equal(evaluate.evaluate(kernel, [a])[0], a.sum())


@settings(deadline=None, max_examples=150, suppress_health_check=list(HealthCheck))
@given(made=test_blocks.kernels())
def test_any_kernel(always, made):
    kernel, arrays = made
    evaluate._plan.cache_clear()
    test_blocks.check(kernel, arrays, 1 << 20, rtol=1e-9)


@settings(deadline=None, max_examples=40, suppress_health_check=list(HealthCheck))
@given(shape=st.lists(st.integers(1, 9), min_size=1, max_size=4), data=st.data())
def test_any_rows(always, shape, data):
    """Expressions of rows, which are what there is code for, in one and more passes."""
    a = test_blocks.some((*shape, 40))
    axes = data.draw(st.sets(st.integers(0, len(shape))))
    x = source(0, a.shape, "f8")
    row = Expr("input", (), "f8", (1, View(3, (*[0] * len(shape), 1))))
    column = Expr("input", (), "f8", (2, View.contiguous((*shape, 0))))
    place = Expr("cast", (index(View(-3, (*range(len(shape)), 2))),), "f8")
    tree = Expr("add", (Expr("multiply", (x, row), "f8"), Expr("subtract", (column, place), "f8")),
                "f8")  # fmt: skip
    arrays = [a, test_blocks.some((50,)), test_blocks.some((math.prod(shape),))]
    view = View.contiguous(tuple(shape))
    column = Expr("input", (), "f8", (2, View(0, (*view.strides, 0))))
    tree = Expr("add", (tree.args[0], Expr("subtract", (column, place), "f8")), "f8")
    if axes:
        r = [Reduction(o, tree, (np.dtype("f8"),)) for o in ("sum", "max")]
        outputs = [Expr("reduced", (), "f8", (n, 0)) for n in range(2)]
        kernel = Kernel(a.shape, tuple(outputs), tuple(r), tuple(sorted(axes)))
    else:
        kernel = Kernel(a.shape, (tree, Expr("less", (tree, x), "?")))
    evaluate._plan.cache_clear()
    assert code_of(kernel) is not None
    test_blocks.check(kernel, arrays, 1 << 20, rtol=1e-12)


@pytest.mark.parametrize("axes", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("join", [0, 1])
@pytest.mark.parametrize("op", REDUCTIONS)
def test_reductions_of_parts_side_by_side(always, op, join, axes):
    """Code for each part; its states are put together where parts come to lie on each other."""
    shape = (15, 6) if join == 0 else (5, 18)
    parts = [test_blocks.some((5, 6), seed=n) + n for n in range(3)]
    masks = [part > 1 for part in parts]
    tree = test_blocks.joined([5 + join] * 3, join, shape)
    chosen = test_blocks.joined([5 + join] * 3, join, shape, 3, "?")
    tree = Expr("where", (chosen, tree, constant(0, "f8")), "f8")
    types = MADE.get(op, "f8").split()
    reduction = Reduction(op, tree, tuple(map(np.dtype, types)))
    outputs = [Expr("reduced", (), d, (0, j)) for j, d in enumerate(reduction.dtypes)]
    kernel = Kernel(shape, tuple(outputs), (reduction,), axes)
    test_blocks.check(kernel, [*parts, *masks], 1 << 20, rtol=1e-12)
    (facts,) = evaluate._known.values()
    (plan,) = facts.plans.values()
    assert len(plan.codes) == 3
    assert None not in plan.codes
    assert not any(n.op == node_calls.GUARDED for r in plan.regions for n in nodes(r.exprs))


@pytest.mark.parametrize("axes", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)])
@pytest.mark.parametrize("dtype", ["f8", "f4", "i2", "u1", "?"])
@pytest.mark.parametrize("op", ["argmin", "argmax"])
def test_where_extremes_are(always, op, dtype, axes):
    """The first of many that are equal, also of what is read backwards; no number before all."""
    rng = np.random.default_rng(0)
    for shape in ((9, 11, 40), (3, 70, 2), (4, 3, 1100)):
        a = rng.integers(0, 3, shape).astype(dtype)
        b = a[::-1, :, ::-1].copy()
        n, m, w = shape
        views = View(0, (m * w, w, 1)), View((n - 1) * m * w + w - 1, (-m * w, w, -1))
        for odd in (False, *([True] if np.dtype(dtype).kind == "f" else [])):
            if odd:
                where = rng.random(shape) < 0.05
                a[where], b[where[::-1, :, ::-1]] = np.nan, np.nan
            for array, view in zip((a, b), views, strict=True):
                x = Expr("input", (), dtype, (0, view))
                reduction = Reduction(op, x, (np.dtype("i8"), np.dtype(dtype)))
                outputs = tuple(
                    [Expr("reduced", (), d, (0, j)) for j, d in enumerate(reduction.dtypes)]
                )
                kernel = Kernel(shape, outputs, (reduction,), axes)
                assert w == 2 or code_of(kernel) is not None
                at, value = evaluate.evaluate(kernel, [array])
                lines = np.moveaxis(a, axes, range(-len(axes), 0)).reshape(*kernel.output_shape, -1)
                want = getattr(np, op)(lines, -1)
                np.testing.assert_array_equal(at, want)
                np.testing.assert_array_equal(
                    value, np.take_along_axis(lines, want[..., None], -1)[..., 0]
                )


@pytest.mark.parametrize("step", [-1, 2, -3, 7])
@pytest.mark.parametrize("axes", [(), (0,), (1,), (0, 1)])
@pytest.mark.parametrize("dtype", ["f8", "u1"])
def test_elements_that_are_apart(always, axes, step, dtype):
    """Steps, reversed rows, and columns as rows where these are near each other."""
    a = test_blocks.some((40, 40)).astype(dtype)
    n = 1 + 39 // abs(step)
    first = 0 if step > 0 else 39
    rows = Expr("input", (), dtype, (0, View(40 * 3 + first, (40, step))))
    columns = Expr("input", (), dtype, (0, View(40 * first + 5, (1, 40 * step))))
    rows, columns = (Expr("cast", (x,), "f8") if dtype != "f8" else x for x in (rows, columns))
    tree = Expr("subtract", (rows, columns), "f8")
    want = a[3:33, ::step].astype("f8") - a.T[5:35, ::step]
    if axes:
        kernel = Kernel((30, n), (Expr("reduced", (), "f8", (0, 0)),),
                        (Reduction("sum", tree, (np.dtype("f8"),)),), axes)  # fmt: skip
        want = want.sum(axis=axes)
    else:
        kernel = Kernel((30, n), (tree,))
    near = 40 * abs(step) * a.itemsize <= tuning.APART
    if near or not axes:  # short rows are taken as columns
        assert (code_of(kernel) is not None) == near
    (got,) = evaluate.evaluate(kernel, [a])
    np.testing.assert_allclose(got, want, atol=1e-12)


@pytest.mark.parametrize("length", [1, 2, 16, 17, 33])
@pytest.mark.parametrize("op", REDUCTIONS)
def test_short_rows(always, op, length):
    """Many results beside each other; each is a sum of few, or of more."""
    a = np.abs(test_blocks.some((5, 40, length))) + 0.5
    types = MADE.get(op, "f8").split()
    reduction = Reduction(op, source(0, a.shape, "f8"), tuple(map(np.dtype, types)))
    outputs = [Expr("reduced", (), d, (0, j)) for j, d in enumerate(reduction.dtypes)]
    for axes in ((2,), (0, 2), (1, 2), (0, 1, 2)):
        kernel = Kernel(a.shape, tuple(outputs), (reduction,), axes)
        assert code_of(kernel) is not None
        test_blocks.check(kernel, [a], 1 << 20, rtol=1e-12)


@pytest.mark.parametrize("length", [3, 16])
def test_windows_across_two_parts(always, monkeypatch, length):
    """The part that a point belongs to changes along two axes at once.

    Each place of the short axis is looked at by itself. No point of the other part is read, or
    chosen one by one.
    """
    monkeypatch.setattr(regions, "PLACE_POINTS", 0)
    one, two = test_blocks.some((50, 4), seed=1), test_blocks.some((20, 4), seed=2)
    place = index(View(0, (1, 0, 1)))
    parts = [
        Expr("input", (), "f8", (0, View(0, (4, 1, 4)))),
        Expr("input", (), "f8", (1, View(-200, (4, 1, 4)))),
    ]
    here = Expr("less", (place, constant(50, "i8")), "?")
    tree = Expr("where", (here, *parts), "f8")
    kernel = Kernel((50, 4, length), (Expr("reduced", (), "f8", (0, 0)),),
                    (Reduction("sum", tree, (np.dtype("f8"),)),), (2,))  # fmt: skip
    (got,) = evaluate.evaluate(kernel, [one, two])
    both = np.concatenate([one, two])
    want = np.lib.stride_tricks.sliding_window_view(both, length, axis=0)[:50].sum(axis=2)
    np.testing.assert_allclose(got, want, atol=1e-12)
    (facts,) = evaluate._known.values()
    (plan,) = facts.plans.values()
    assert not any(n.op == node_calls.GUARDED for r in plan.regions for n in nodes(r.exprs))


def test_constants_are_no_part_of_it(always):
    """Nor are those that each call gives: one function for all."""
    a = values("f8")[:5]
    before = len(llvm_jit._functions)
    for c in (2.0, 3.0, np.nan):
        word = constant(17, "i8")
        place = Expr("cast", (Expr("add", (index(View(0, (1,))), word), "i8"),), "f8")
        times = Expr("multiply", (source(0, (5,), "f8"), constant(c, "f8")), "f8")
        tree = Expr("add", (times, place), "f8")
        for start in (0, 100):
            (found,) = evaluate.evaluate(
                Kernel((5,), (tree,)), [a], words={word: constant(start, "i8")}
            )
            with np.errstate(invalid="ignore"):
                np.testing.assert_array_equal(found, a * c + start + np.arange(5))
    assert len(llvm_jit._functions) == before + 1


def test_the_next_process_finds_it(always, monkeypatch, tmp_path):
    with dask.config.set({"gpuscheduler.cache-directory": str(tmp_path)}):
        a = values("f8")
        x = source(0, a.shape, "f8")
        for compiles in (True, False):
            monkeypatch.setattr(llvm_jit, "_functions", {})
            monkeypatch.setattr(llvm_code, "_written", {})
            evaluate._plan.cache_clear()
            if not compiles:
                monkeypatch.setattr(llvm_jit, "_object", None)
            kernel = Kernel(a.shape, (Expr("add", (x, Expr("sqrt", (x,), "f8")), "f8"),))
            with np.errstate(invalid="ignore"):
                found = evaluate.evaluate(kernel, [a])[0]
                np.testing.assert_array_equal(found, a + np.sqrt(a))
            assert code_of(kernel) is not None
        assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("broken", ["compile_target", "_object"])
def test_without_a_compiler_it_is_numpys(always, broken, monkeypatch, tmp_path):
    def fails(*_):
        if broken == "_object":
            raise RuntimeError("no")

    monkeypatch.setattr(llvm_jit, broken, fails)
    monkeypatch.setattr(llvm_jit, "_functions", {})
    monkeypatch.setattr(llvm_code, "_written", {})
    with dask.config.set({"gpuscheduler.cache-directory": str(tmp_path)}):
        a = np.arange(70.0)
        x = source(0, a.shape, "f8")
        kernel = Kernel(a.shape, (Expr("add", (x, Expr("square", (x,), "f8")), "f8"),))
        warned = pytest.warns(RuntimeWarning, match="LLVM did not compile it: no")
        with warned if broken == "_object" else nullcontext():
            assert code_of(kernel) is None
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # once is enough
            found = evaluate.evaluate(kernel, [a])[0]
        np.testing.assert_array_equal(found, a + a * a)


def test_many_threads_at_once(always):
    a = np.random.default_rng(0).normal(size=(40, 3000))
    x = source(0, a.shape, "f8")
    tree = Expr("multiply", (Expr("add", (x, constant(1, "f8")), "f8"), x), "f8")
    kernel = Kernel(a.shape, (Expr("reduced", (), "f8", (0, 0)),),
                    (Reduction("sum", tree, (np.dtype("f8"),)),), (1,))  # fmt: skip
    found = []
    threads = [threading.Thread(target=lambda: found.append(evaluate.evaluate(kernel, [a])[0]))
               for _ in range(8)]  # fmt: skip
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert len(found) == 8
    assert len({f.tobytes() for f in found}) == 1
    np.testing.assert_allclose(found[0], ((a + 1) * a).sum(1))


def test_of_arrays():
    """As it is used: by chunks that are large enough; the same bits on any number of devices."""
    a = np.random.default_rng(0).normal(size=(1024, 1024))
    x = da.from_array(a, chunks=(512, 512))
    every = {
        "map": (x + 1) * x - x / 3, "sum": ((x + 1) * 3).sum(), "rows": (x * x + 1).sum(axis=1),
        "columns": (x * x - 1).max(axis=0), "var": (x * 2).var(), "std": (x + 5).std(axis=1),
        "where": da.where(x > 0.5, x * 2, -x).mean(), "transposed": ((x + x.T) * 2).sum(),
        "types": ((x * 100).astype("f4") + (x > 0)).sum(axis=0),
    }  # fmt: skip
    bits = set()
    for devices in ("cpu:1", "cpu:2", "cpu:5"):
        with Scheduler(devices):
            found = dask.compute(every)[0]
        bits.add(tuple(np.asarray(v).tobytes() for v in found.values()))
    assert len(bits) == 1
    want = dask.compute(every, scheduler="sync")[0]
    for name, value in want.items():
        loose = {"rtol": 0, "atol": 0.01} if name == "types" else {"rtol": 1e-12}
        np.testing.assert_allclose(found[name], value, **loose)


@pytest.mark.parametrize("axes", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize(("far", "scale"), [(0, 1), (1e8, 1), (1e12, 1), (1e8, 1e-3), (0, 1e150)])
def test_variances_far_from_zero(always, far, scale, axes):
    """As exact as the numbers are, and as NumPy's two passes."""
    a = np.random.default_rng(0).normal(size=(3000, 50)) * scale + far
    x = source(0, a.shape, "f8")
    kernel = Kernel(a.shape, (test_blocks.reduced(0, "f8"), test_blocks.reduced(0, "f8", 1)),
                    (Reduction("moment", x, (np.dtype("f8"),) * 2),), axes)  # fmt: skip
    mean, squares = evaluate.evaluate(kernel, [a])
    exact = (a - far).astype(np.longdouble)
    count = math.prod(a.shape[k] for k in axes)
    whole = a.astype(np.longdouble).mean(axes)
    np.testing.assert_allclose(mean, whole.astype("f8"), rtol=0, atol=5e-16 * abs(a).max())
    want = exact.var(axes) * count
    assert (abs(squares - want) <= 1e-13 * want).all()


def test_what_is_all_the_same_does_not_vary(always):
    a = np.full((25, 40), -15.112639)
    x = source(0, a.shape, "f8")
    for axes in ((0,), (1,), (0, 1)):
        kernel = Kernel(a.shape, (test_blocks.reduced(0, "f8", 1),),
                        (Reduction("moment", x, (np.dtype("f8"),) * 2),), axes)  # fmt: skip
        assert not evaluate.evaluate(kernel, [a])[0].any()


def test_a_compilation_that_fails_late_leaves_a_compiler(always, monkeypatch, tmp_path):
    """An engine that is not used takes its machine with it, and no other's."""
    llvm = llvm_text.compile_target()[0]
    a = np.arange(70.0)
    x = source(0, a.shape, "f8")
    monkeypatch.setattr(llvm_jit, "_functions", {})
    monkeypatch.setattr(llvm_code, "_written", {})
    real = llvm.create_mcjit_compiler

    class Broken:
        def __init__(self, *args):
            self.engine = real(*args)

        def add_object_file(self, _):
            raise RuntimeError("no")

    with dask.config.set({"gpuscheduler.cache-directory": str(tmp_path)}):
        for n, broken in enumerate([True, False, True, False]):
            tree = x
            for _ in range(n + 1):
                tree = Expr("add", (tree, x), "f8")
            with monkeypatch.context() as patch:
                if broken:
                    patch.setattr(llvm, "create_mcjit_compiler", Broken)
                kernel = Kernel(a.shape, (tree,))
                with pytest.warns(RuntimeWarning) if broken else nullcontext():
                    (found,) = evaluate.evaluate(kernel, [a])
                np.testing.assert_array_equal(found, a * (n + 2))
            assert (code_of(kernel) is None) == broken


def test_what_it_is_to_write_to(always):
    """Arrays of other types, and the input itself, are NumPy's business."""
    b = np.arange(5001.0)
    ahead = Expr("input", (), "f8", (0, View(1, (1,))))
    here = Expr("input", (), "f8", (0, View(0, (1,))))
    kernel = Kernel((5000,), (Expr("add", (ahead, here), "f8"),))
    want = b[1:] + b[:-1]
    out = np.zeros(5000, "f4")
    evaluate.evaluate(kernel, [b], out=out)
    np.testing.assert_array_equal(out, want)
    evaluate.evaluate(kernel, [b], out=b[1:])
    np.testing.assert_array_equal(b[1:], want)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_fork_waits_for_nobody(always):
    a = np.arange(70.0)
    x = source(0, a.shape, "f8")
    tree = Expr("multiply", (Expr("multiply", (x, x), "f8"), Expr("sqrt", (x,), "f8")), "f8")
    with llvm_jit._lock:
        child = os.fork()
        if not child:
            try:
                found = evaluate.evaluate(Kernel(a.shape, (tree,)), [a])[0]
                os._exit(not np.array_equal(found, a * a * np.sqrt(a)))
            finally:
                os._exit(2)
        assert os.waitpid(child, 0)[1] == 0


# ---- what is made of random numbers


DRAWS = [
    ("integers", 1, 7), ("integers", 0, 2**40 + 7), ("integers", -5, 3), ("normal", 10.0, 3.0),
    ("uniform", -1.0, 1.0),
]  # fmt: skip


@st.composite
def kernels_of_draws(draw):
    """A kernel that draws numbers anywhere, adds an array, and may reduce along some axes."""
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    shape = (*shape[:-1], draw(st.sampled_from([1, 2, 3, 40, 200])))
    strides = draw(st.permutations(View.contiguous(shape).strides))
    if draw(st.booleans()):
        strides = [3 * s for s in strides]
    view = View(draw(st.integers(0, 5)), tuple(strides))
    name, *args = draw(st.sampled_from(DRAWS))
    base = draw(st.sampled_from([None, 1000]))
    values = random.draw(name, shape, view, 7, tuple(args), base=base)
    whole = View.contiguous(shape)
    shift = draw(st.sampled_from([None, 0, 2]))
    if shift is not None:
        array = Expr("input", (), values.dtype, (0, View(-shift * whole.strides[0], whole.strides)))
        values = Expr("add", (values, array), values.dtype)
    if shift:  # two regions: in one of them nothing is drawn
        row = index(View(0, (1, *[0] * (len(shape) - 1))))
        before = Expr("less", (row, constant(shift, "i8")), "?")
        values = Expr("where", (before, constant(1, values.dtype), values), values.dtype)
    words = {} if base is None else {constant(base, np.int64): constant(base + 3, np.int64)}
    axes = draw(st.sets(st.integers(0, len(shape) - 1)))
    if not axes:
        return Kernel(shape, (values,)), words
    op = draw(st.sampled_from(["sum", "max", "argmin", "moment"]))
    dtypes = {"argmin": (np.dtype("i8"), values.dtype), "moment": (np.dtype("f8"),) * 2}
    reduction = Reduction(op, values, dtypes.get(op, (values.dtype,)))
    outputs = [Expr("reduced", (), t, (0, n)) for n, t in enumerate(reduction.dtypes)]
    return Kernel(shape, tuple(outputs), (reduction,), tuple(sorted(axes))), words


def evaluated_in_blocks(kernel, words, drawn_bytes):
    """What it gives with blocks of so many bytes; with None, what NumPy makes of draws."""
    evaluate._plan.cache_clear()
    evaluate._known.clear()
    arrays = [np.arange(math.prod(kernel.shape)) * 3 % 101]
    inner = [r.arg for r in kernel.reductions] or kernel.outputs
    arrays = [a.astype(inner[0].dtype).reshape(kernel.shape) for a in arrays]
    with pytest.MonkeyPatch.context() as patch:
        if drawn_bytes is None:
            patch.setattr(tuning, "LEAST_POINTS", 2**60)
        else:
            patch.setattr(tuning, "DRAWN_BYTES", drawn_bytes)
        return evaluate.evaluate(kernel, arrays, words=words)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kernels_of_draws(), st.sampled_from([64, 1000, 2**20]))
def test_machine_code_of_draws_gives_what_numpy_makes_of_them(always, case, drawn_bytes):
    kernel, words = case
    found = evaluated_in_blocks(kernel, words, drawn_bytes)
    expected = evaluated_in_blocks(kernel, words, None)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        if kernel.reductions and a.dtype.kind == "f":
            np.testing.assert_allclose(a, b, 1e-12, 1e-12)
        else:
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("args", [("integers", 1, 7), ("integers", 0, 1000), ("normal", 10.0, 3.0)])
@pytest.mark.parametrize("reduces", [False, True])
def test_what_is_made_of_draws_is_machine_code(always, args, reduces):
    """Where NumPy has a call for each operation of a draw, integers took twice as long."""
    name, *rest = args
    values = random.draw(name, (1000, 3), View(0, (3, 1)), 7, tuple(rest))
    kernel = Kernel((1000, 3), (values,))
    if reduces:
        reduction = Reduction("sum", values, (values.dtype,))
        kernel = Kernel((1000, 3), (Expr("reduced", (), values.dtype, (0, 0)),), (reduction,), (1,))
    plan = evaluate._plan(kernel, None, tuning.BLOCK_BYTES, ())
    if reduces:
        assert plan.regions[0].drawn_numbers.has_reducing_code(plan)
    else:
        assert plan.outputs[0].drawn_numbers.has_writing_code
