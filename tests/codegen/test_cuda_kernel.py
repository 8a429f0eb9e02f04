"""The CUDA text of kernels, tested without a GPU.

What the text says, that it compiles, and that it computes what NumPy does when the host runs it as
C++.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import re
import shutil
import subprocess
import sysconfig
import time
from dataclasses import replace
from pathlib import Path

import dask.array as da
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuscheduler import Scheduler
from gpuscheduler.codegen.cpu import evaluate
from gpuscheduler.codegen.cuda import device_library
from gpuscheduler.codegen.cuda.kernel import ONLY, generate, why_not_generated
from gpuscheduler.codegen.cuda.loop_space import LoopAxis, collapse_axes
from gpuscheduler.codegen.cuda.nodes import NodeTree, simplify_cases
from gpuscheduler.errors import NotGenerated
from gpuscheduler.fusion.task import KernelTask
from gpuscheduler.ir.expr import (
    PLACEHOLDER,
    SCANS,
    Expr,
    Kernel,
    Out,
    Program,
    Reduction,
    View,
    constant,
    index,
    source,
)
from gpuscheduler.ir.hoist import split_kernels
from gpuscheduler.ir.regions import simplify_in_box
from gpuscheduler.ir.split_scans import split_scan
from gpuscheduler.tracing.abstract import AbstractArray
from gpuscheduler.tracing.numba_cuda import DECIDES_DEVICE_CODE
from gpuscheduler.tracing.trace import trace_function
from gpuscheduler.values import leaves
from graphs import black_scholes
from tests.support import kernels as k
from tests.support.cuda_on_host import COMPILER, Host, aligned

host_only = pytest.mark.skipif(COMPILER is None, reason="there is no g++")


@pytest.fixture(scope="module")
def host(libraries):
    return Host(libraries)


def of_loop(op, types, made, first=0):
    args = [Expr("input", (), t, (first + n, View(0, (1,)))) for n, t in enumerate(types)]
    return Expr(op, tuple(args), made)


# ---- operations


def reading(loop):
    """Why there is no CUDA reading of a function's loop, if so."""
    try:
        generate(Kernel((8,), (of_loop(*loop),)))
    except NotGenerated as error:
        return str(error)
    return None


def test_every_loop_of_numpy_has_a_reading_but_those_known():
    missing = {loop[:2]: why for loop in k.loops() if (why := reading(loop))}
    assert missing.pop(("nextafter", "ee")) == "nextafter of float16, float16"
    assert not missing


GROUPS = {
    key: list(found)
    for key, found in itertools.groupby(
        sorted((loop for loop in k.loops() if not reading(loop)), key=lambda x: x[1]),
        key=lambda x: x[1],
    )
}


def operands(op, types):
    """Arguments that are odd, and defined."""
    if op in ("power",) and types[0] in "bhilq":
        n = k.values(types[1], seed=1)
        return [k.values(types[0], seed=2), np.abs(n % 7)]
    if op == "ldexp":
        return [k.values(types[0]), (k.values(types[1], seed=1) % 40 - 20).astype(types[1])]
    if op in ("i0", "i1", "j0", "j1", "y0", "y1"):  # of infinity, SciPy's are NaN
        return [np.nan_to_num(k.values(types[0]), posinf=3, neginf=-3)]
    return [k.values(t, seed=n) for n, t in enumerate(types)]


# NumPy's own is not C's there, or the last digits are not those that NumPy has
LOOSE = {"F": 2e-5, "D": 1e-13, "e": 2e-3, "f": 2e-6, "d": 1e-14}


@host_only
@pytest.mark.parametrize("types", sorted(GROUPS))
def test_operations_compute_what_numpy_does(host, types):
    loops = [x for x in GROUPS[types] if x[0] not in ("erfinv", "erfcinv", "ndtri")]
    arrays, outputs = [], []
    for op, own, made in loops:
        outputs.append(of_loop(op, own, made, len(arrays)))
        arrays += [aligned(a) for a in operands(op, own)]
    for chunk in range(0, len(loops), 60):
        kernel = Kernel((256,), tuple(outputs[chunk : chunk + 60]))
        got = host.run([kernel], [arrays])[0]
        with np.errstate(all="ignore"):
            want = evaluate.evaluate(kernel, arrays)
        for loop, a, b in zip(loops[chunk:], got, want, strict=False):
            if a.dtype.kind in "iub":
                np.testing.assert_array_equal(a, b, err_msg=str(loop))
            else:
                rtol = LOOSE[a.dtype.char]
                np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol / 10, err_msg=str(loop))


@host_only
@pytest.mark.parametrize(("op", "types", "made"), k.complex_operations())
def test_special_values_of_complex_operations_are_numpys(host, op, types, made):
    """Signed zeros, infinities and NaN in either part."""
    arrays = [aligned(a) for a in k.complex_operands(op, types)]
    kernel = Kernel(arrays[0].shape, (of_loop(op, types, made),))
    (got,) = host.run([kernel], [arrays])[0]
    with np.errstate(all="ignore"):
        (want,) = evaluate.evaluate(kernel, arrays)
    assert got.dtype == want.dtype
    wrong = k.wrong_of_complex(arrays, got, want, 1e-4 if types[0] == "F" else 1e-11)
    assert not wrong, wrong


@host_only
@pytest.mark.parametrize("n", [4 * 5000, 4 * 5000 + 3])
def test_quotients_and_roots_are_rounded_as_ieee_754_has_it(host, n):
    kernel = k.quotients_and_roots(n)
    assert "if (rare) {\n" in generate(kernel).source
    arrays = [aligned(a) for a in k.any_floats(n, seed=n)]
    wrong, away = k.wrong_of_quotients_and_roots(arrays, host.run([kernel], [arrays])[0])
    assert wrong == [0] * 5
    assert away < 1


@host_only
def test_quotients_of_numbers_that_are_drawn_by_the_vector(host):
    """The numbers, in pairs, are there before the stages."""
    at = k.call("add", index(View(4, (64, 1))), constant(6, "i8"))
    normal, uniform = (Expr(op, (at,), "f4", 7) for op in ("normal", "uniform"))
    once = k.call("divide", normal, k.call("sqrt", uniform))
    kernel = k.reduced(once, (32, 64), (1,), "sum", "max")
    assert "if (rare) {\n" in generate(kernel).source
    got, want = host.run([kernel], [[]])[0], evaluate.evaluate(kernel, [])
    k.same(got, want, kernel)
    kernel = Kernel((32, 64), (once, k.call("log", once)))
    with np.errstate(all="ignore"):
        k.same(host.run([kernel], [[]])[0], evaluate.evaluate(kernel, []), kernel)


@pytest.mark.parametrize(("op", "dtype", "staged"), [
    ("divide", "f4", True), ("sqrt", "f4", True), ("reciprocal", "f4", True), ("log", "f4", True),
    ("divide", "f8", False), ("sqrt", "f2", False), ("exp", "f4", False),
])  # fmt: skip
def test_two_quotients_or_roots_are_computed_in_stages(op, dtype, staged):
    x = source(0, (1024,), dtype)
    one = k.call(op, *[x] * (2 if op == "divide" else 1))
    two = k.call(op, one, x) if op == "divide" else k.call(op, one)
    assert "if (rare) {\n" not in generate(Kernel((1024,), (one,))).source
    assert ("if (rare) {\n" in generate(Kernel((1024,), (two,))).source) == staged


# ---- ways of going through memory

CASES = {
    "all": ((9000,), (0,)), "all, odd": ((9001,), (0,)), "rows": ((40, 64), (1,)),
    "rows, short": ((300, 3), (1,)), "rows, few": ((3, 20_000), (1,)), "columns": ((200, 64), (0,)),
    "columns, one block": ((6, 4096), (0,)), "columns, few": ((9000, 3), (0,)),
    "between": ((5, 70, 32), (1,)), "around": ((30, 6, 40), (0, 2)), "outer": ((6, 30, 40), (0, 1)),
    "empty": ((0, 4), (0,)), "no results": ((4, 0), (0,)), "one": ((1, 1), (0, 1)),
}  # fmt: skip
OPS = {
    "f4": ("sum", "moment", "argmax", "min"), "f8": ("prod", "moment", "argmin", "fmax"),
    "i4": ("min", "max", "argmax", "any"), "?": ("any", "argmax"),
    "c8": ("sum", "moment", "all", "max", "fmin", "argmax"), "c16": ("argmin", "sum"),
    "f2": ("sum", "max", "argmin"), "u8": ("sum", "prod", "fmin"),
}  # fmt: skip


SPACES = [(5000,), (4999,), (40, 64), (1,), (0,), (3, 0, 2)]


@host_only
@pytest.mark.parametrize(  # all of them on a GPU
    ("edges", "dtype"),
    [*itertools.product(k.EDGES, ["f4"]), ("growing", "f8"), ("tiny", "f8"), ("even", "i8")],
)
def test_histograms_count_as_numpy_does(host, edges, dtype):
    bounds = k.EDGES[edges].astype(dtype)
    for shape in SPACES if edges in ("even", "growing") else SPACES[:1]:
        kernel = k.histogram(shape, dtype, bounds)
        x = aligned(k.on_edges(x_size(shape), bounds, dtype).reshape(shape))
        (want,) = evaluate.evaluate(kernel, [x])
        np.testing.assert_array_equal(want, np.histogram(x, bounds)[0])
        for processors in (1, 3):
            (got,) = host.run([kernel], [[x]], processors=processors)[0]
            np.testing.assert_array_equal(got, want)


@host_only
def test_histograms_of_several_blocks_in_one_launch_and_of_turned_ones(host):
    shape, edges = (96, 70), k.EDGES["even"].astype("f4")
    arrays = [aligned(k.on_edges(96 * 70, edges, "f4", n).reshape(shape)) for n in range(3)]
    kernels = [k.histogram(shape, "f4", edges)] * 3
    for x, (got,) in zip(arrays, host.run(kernels, [[a] for a in arrays]), strict=True):
        np.testing.assert_array_equal(got, np.histogram(x, edges)[0])
    lying = k.histogram(shape[::-1], "f4", edges, (1, 70))
    (got,) = host.run([lying], [arrays[:1]])[0]
    np.testing.assert_array_equal(got, np.histogram(arrays[0], edges)[0])


@host_only
def test_one_bin_of_arrays_that_lie_across_each_other(host):
    """Nothing is kept then: such sums go in tiles, and histograms do not."""
    shape, edges = (96, 70), k.EDGES["one bin"].astype("f4")
    x, y = (aligned(k.on_edges(96 * 70, edges, "f4", n).reshape(shape)) for n in (1, 2))
    plain = k.histogram(shape, "f4", edges)
    (counts,) = plain.reductions
    across = Expr("input", (), "f4", (1, View(0, (0, 1, 96))))
    both = Expr("add", (*counts.arg.args, across), "f4")
    counts = replace(counts, arg=Expr("bin", (both,), np.int64, counts.arg.data))
    (got,) = host.run([replace(plain, reductions=(counts,))], [[x, y]])[0]
    turned = y.ravel().reshape(70, 96).T
    with np.errstate(invalid="ignore"):  # infinities of both signs
        np.testing.assert_array_equal(got, np.histogram(x + turned, edges)[0])


@host_only
@pytest.mark.parametrize(
    ("edges", "kind"),
    [*itertools.product(k.WEIGHED, ["f4"]), ("growing", "f8"), ("even", "i2"), ("many", "f2")],
)
def test_weights_of_bins_add_up(host, edges, kind):
    bounds = k.WEIGHED[edges].astype("f4")
    for shape in SPACES if edges in ("even", "growing") else SPACES[:1]:
        kernel = k.weighed(shape, "f4", bounds, kind)
        x = k.on_edges(x_size(shape), bounds, "f4")
        w = k.filled([np.dtype(kind)], [x.size], 1)[0]
        w = np.nan_to_num(w, posinf=3, neginf=-3) if kind[0] == "f" else w
        want, size = k.sums_in_bins(x, bounds, w)
        arrays = [aligned(a.reshape(shape)) for a in (x, w)]
        (cpu,) = evaluate.evaluate(kernel, arrays)
        found = [host.run([kernel], [arrays], processors=n)[0][0] for n in (1, 3, 3)]
        for got in (cpu, *found):
            assert np.all(np.abs(got - want) <= 1e-14 * size), shape
        assert found[1].tobytes() == found[2].tobytes()


@host_only
def test_weights_that_are_no_numbers_stay_in_their_bins(host):
    x = np.repeat(np.arange(5, dtype="f4"), 50)
    w = np.ones(250, "f4")
    w[[60, 110, 160]] = np.nan, np.inf, -np.inf
    w[[210, 211]] = np.inf, -np.inf
    kernel = k.weighed((250,), "f4", np.arange(6.0), "f4")
    want = np.array([50, np.nan, np.inf, -np.inf, np.nan])
    np.testing.assert_array_equal(evaluate.evaluate(kernel, [x, w])[0], want)
    (got,) = host.run([kernel], [[aligned(x), aligned(w)]])[0]
    np.testing.assert_array_equal(got, want)


@host_only
def test_weights_of_several_blocks_in_one_launch_and_of_turned_ones(host):
    shape, edges = (96, 70), k.EDGES["even"].astype("f4")
    arrays = [
        [aligned(a.reshape(shape)) for a in (k.on_edges(96 * 70, edges, "f4", n), w)]
        for n, w in enumerate(np.random.default_rng(3).integers(-9, 9, (3, 96 * 70)).astype("f4"))
    ]
    kernels = [k.weighed(shape, "f4", edges, "f4")] * 3
    for (x, w), (got,) in zip(arrays, host.run(kernels, arrays), strict=True):
        np.testing.assert_array_equal(got, np.histogram(x, edges, weights=w)[0])
    lying = k.weighed(shape[::-1], "f4", edges, "f4", (1, 70))
    x, w = arrays[0][0], aligned(arrays[0][1].T)
    (got,) = host.run([lying], [[x, w]])[0]
    np.testing.assert_array_equal(got, np.histogram(x.T, edges, weights=w)[0])


@host_only
@pytest.mark.parametrize("dtype", ["u1", "f2", "f4", "f8"])
@pytest.mark.parametrize("shape", [(1,), (31,), (1024,), (1025,), (4999,), (5000,), (40, 65)])
def test_what_a_mask_selects_is_counted_and_picked_out(host, shape, dtype):
    x, y = (aligned(np.random.default_rng(n).integers(0, 99, shape).astype(dtype)) for n in (1, 2))
    a, b = (source(n, shape, dtype) for n in (0, 1))
    for least in (0, 50, 90, 99):
        bound = constant(least, dtype)
        mask = Expr("greater_equal", (a, bound), "?")
        for columns in ((a,), (b, a), (Expr("cast", (b,), "f8"),)):
            for processors in (1, 3):
                kernels = [Kernel(shape, (mask, *v), picks=True) for v in ((), columns)]
                counting, writing = (generate(v, processors=processors) for v in kernels)
                assert counting.units == writing.units
                counts = np.zeros(counting.units, np.uint32)
                host.picked(counting, [x, y], [counts])
                ends = np.cumsum(counts, dtype=np.int64)
                assert ends[-1] == (x >= least).sum()
                out = np.full((ends[-1] + 1, len(columns)), 77, columns[0].dtype)
                places = [out[0:, k:] for k in range(len(columns))]
                host.picked(writing, [x, y], [ends, *places])
                want = [{id(a): x, id(b): y}.get(id(c), y)[x >= least] for c in columns]
                np.testing.assert_array_equal(out[:-1], np.stack(want, -1))
                assert (out[-1] == 77).all()


def test_more_weighed_bins_than_there_is_room_for():
    many = k.weighed((64,), "f8", np.arange(6000.0), "f4")
    said = "a histogram of weights of 5,999 bins, more than 5,120"
    with pytest.raises(NotGenerated, match=said):
        generate(many)
    assert why_not_generated(many) == said


def test_edges_of_linspace_are_arguments_others_are_text():
    one, other = (k.histogram((64,), "f4", np.linspace(0, n, n + 1)) for n in (4, 9))
    assert generate(one).source == generate(other).source
    apart = k.histogram((64,), "f4", k.EDGES["growing"])
    assert "edges_" in generate(apart).source
    assert "edges_" not in generate(one).source
    many = k.histogram((64,), "f8", np.arange(20_000.0))
    with pytest.raises(NotGenerated, match="a histogram of 19,999 bins, more than 10,240"):
        generate(many)
    assert why_not_generated(many) == "a histogram of 19,999 bins, more than 10,240"


@host_only
@pytest.mark.parametrize("dtype", ["c8", "c16", "f2", "f4", "i4"])  # all of OPS on a GPU
@pytest.mark.parametrize("case", list(CASES))
def test_reductions(host, case, dtype):
    shape, axes = CASES[case]
    ops = [op for op in OPS[dtype] if 0 not in shape or op in ("sum", "prod", "any", "all")]
    x = source(0, shape, dtype)
    kernel = k.reduced(x, shape, axes, *ops)
    for seed in (0, 3)[: 1 if dtype == "c8" else 2]:  # ordinary and odd values
        arrays = [aligned(a) for a in k.filled([np.dtype(dtype)], [x_size(shape)], seed)]
        with np.errstate(all="ignore"):
            want = evaluate.evaluate(kernel, arrays)
        for processors in (1, 3):
            k.same(host.run([kernel], [arrays], processors=processors)[0], want, kernel)


def x_size(shape):
    return int(np.prod(shape))


@host_only
@pytest.mark.parametrize("case", ["all, odd", "rows, few", "columns", "around", "between"])
def test_large_arrays_are_counted_in_64_bits(host, case, monkeypatch):
    monkeypatch.setattr("gpuscheduler.codegen.cuda.tuning.SMALL", 0)
    shape, axes = CASES[case]
    x = k.call("subtract", source(0, shape, "f4"), k.turned(1, shape, "f4"))
    line = Expr("input", (), "f4", (2, View(0, (*[0] * (len(shape) - 1), 1))))
    arrays = [aligned(a) for a in k.filled([np.dtype("f4")] * 3, [x_size(shape)] * 3, 0)]
    body = k.call("add", x, line)
    for kernel in (Kernel(shape, (body,)), k.reduced(body, shape, axes, "sum", "argmax")):
        made = generate(kernel)
        assert "unsigned long long j" in made.source or "long long tq1" in made.source
        assert "divide(" not in made.source
        got = host.run([kernel], [arrays], processors=2)[0]
        k.same(got, evaluate.evaluate(kernel, arrays), kernel)


@host_only
@pytest.mark.parametrize("shape", [(40, 70), (64, 64), (33, 3, 40)])
def test_a_transposed_array_is_turned_around_in_tiles(host, shape):
    x, y = source(0, shape, "f4"), k.turned(1, shape, "f4")
    both = k.call("subtract", x, y)
    arrays = [aligned(a) for a in k.filled([np.dtype("f4")] * 2, [x_size(shape)] * 2, 0)]
    everywhere = tuple(range(len(shape)))
    for kernel in (Kernel(shape, (both,)), k.reduced(both, shape, everywhere, "sum", "argmin")):
        assert re.search(r"turn\d", generate(kernel).source)
        want = evaluate.evaluate(kernel, arrays)
        for processors in (1, 2):
            k.same(host.run([kernel], [arrays], processors=processors)[0], want, kernel)
    # of which all are transposed, there is nothing to turn around in a sum
    assert not re.search(r"turn\d", generate(k.reduced(y, shape, everywhere, "sum")).source)


@host_only
@pytest.mark.parametrize("shape", [(50, 96), (33, 5, 80), (70, 97)])
def test_what_all_rows_read_stays_in_the_cache(host, shape, monkeypatch):
    """Of so many columns at a time that it has room there, where equal parts of them share all."""
    monkeypatch.setattr("gpuscheduler.codegen.cuda.tuning.KEPT_BYTES", 200)
    monkeypatch.setattr("gpuscheduler.codegen.cuda.tuning.LEAST_COLUMNS", 8)
    columns = Expr("input", (), "f8", (0, View(0, (*[0] * (len(shape) - 1), 1))))
    rows = Expr("input", (), "f8", (1, View(0, (1, *[0] * (len(shape) - 1)))))
    body = k.call("add", k.call("multiply", columns, rows), source(2, shape, "f8"))
    everywhere = tuple(range(len(shape)))
    kernel = k.reduced(body, shape, everywhere, "sum", "argmin", "argmax", "moment")
    parts = re.search(r"const int r2 ", generate(kernel).source)
    assert (parts is None) is (shape[-1] == 97)
    sizes = [shape[-1], shape[0], x_size(shape)]
    arrays = [aligned(a) for a in k.filled([np.dtype("f8")] * 3, sizes, 0)]
    for where in (arrays, [np.zeros_like(a) for a in arrays]):  # of equals the first one
        want = evaluate.evaluate(kernel, where)
        for processors in (1, 3):
            got = host.run([kernel], [[aligned(a) for a in where]], processors=processors)[0]
            k.same(got, want, kernel)


@host_only
def test_a_launch_carries_blocks_of_several_shapes(host):
    def of(rows, columns, value):
        shape = rows, columns
        line = Expr("input", (), "f4", (1, View(0, (0, 1))))
        body = k.call(
            "multiply", k.call("add", source(0, shape, "f4"), line), constant(value, "f4")
        )
        return Kernel(shape, (body,)), k.reduced(body, shape, (0,), "sum", "moment")

    sizes = [(64, 128, 1.5), (64, 36, 2), (7, 128, -1), (1001, 8, 0.1)]
    rng = np.random.default_rng(0)
    arrays = [[aligned(rng.random((r, c), np.float32)), aligned(rng.random(c, np.float32))]
              for r, c, _ in sizes]  # fmt: skip
    for which in (0, 1):
        kernels = [of(*size)[which] for size in sizes]
        for kernel, own, got in zip(
            kernels, arrays, host.run(kernels, arrays, processors=2), strict=True
        ):
            k.same(got, evaluate.evaluate(kernel, own), kernel)


@host_only
def test_parts_are_put_together_in_the_same_order_on_every_run(host):
    x = [aligned(np.random.default_rng(0).normal(size=30_000))]
    kernel = k.reduced(source(0, (30_000,), "f8"), (30_000,), (0,), "sum", "moment")
    first, again = (host.run([kernel], [x], processors=5)[0] for _ in range(2))
    assert [a.tobytes() for a in first] == [a.tobytes() for a in again]


@host_only
@pytest.mark.parametrize("op", ["bits", "uniform", "normal"])
@pytest.mark.parametrize("step", [1, 2, 3])
@pytest.mark.parametrize("start", [0, 1, 2**33])
def test_random_numbers_are_those_of_their_positions(host, op, step, start):
    for dtype in ["u8"] if op == "bits" else ["f4", "f8"]:
        for shape in [(1001,), (40, 64)]:
            strides = tuple(s * step for s in View.contiguous(shape).strides)
            at = k.call("add", index(View(start % 2, strides)), constant(start - start % 2, "i8"))
            drawn = Expr(op, (at,), dtype, 2**63 + 12345)
            kernels = [Kernel(shape, (drawn,))]
            if op == "normal":
                kernels.append(k.reduced(drawn, shape, tuple(range(len(shape))), "sum", "max"))
            for kernel in kernels:
                got = host.run([kernel], [[]], processors=2)[0]
                k.same(got, evaluate.evaluate(kernel, []), kernel)


# ---- structure


def test_the_text_depends_on_the_structure_alone():
    def gauss(n, m, value, first=0):
        x = Expr("input", (), "f4", (first, View(4 * n, (2 * m, 1))))
        body = k.call("exp", k.call("multiply", x, constant(value, "f4")))
        draws = k.call("normal", index(View(0, (2 * m, 2))), dtype="f4")
        draws.data = n
        return Kernel((n, m), (k.call("add", body, draws),))

    a, b = generate(gauss(64, 128, 0.371)), generate(gauss(1000, 64, -2, 5), processors=7)
    assert a.source == b.source
    assert a.name == b.name
    assert "0.371" not in a.source
    assert (a.slots != b.slots).any()
    assert [n for _, n, _ in b.inputs] == [5]
    assert [offset for _, _, offset in b.inputs] == [16000]
    assert a.name.startswith("fused_multiply_exp_normal_add_")
    assert generate(gauss(64, 128, 0.371), aligned=False).source != a.source


def test_axes_that_lie_evenly_are_one():
    assert collapse_axes([LoopAxis(3, (20, 0)), LoopAxis(5, (4, 0)), LoopAxis(4, (1, 0))]) == [
        LoopAxis(60, (1, 0))
    ]
    assert collapse_axes([LoopAxis(3, (20, 4)), LoopAxis(5, (4, 1))]) == [
        LoopAxis(3, (20, 4)),
        LoopAxis(5, (4, 1)),
    ]
    assert collapse_axes([LoopAxis(1, (9,)), LoopAxis(1, (7,))]) == []
    assert collapse_axes([LoopAxis(2, (-3,)), LoopAxis(3, (-1,))]) == [LoopAxis(6, (-1,))]


def test_what_has_no_reading_says_so():
    x = source(0, (8,), "f8")
    with pytest.raises(NotGenerated, match="frobnicate of float64"):
        generate(Kernel((8,), (k.call("frobnicate", x),)))
    with pytest.raises(NotGenerated, match="datetime64"):
        generate(Kernel((8,), (source(0, (8,), "M8[s]"),)))
    terms = [Expr("input", (), "f8", (n, View(0, (1,)))) for n in range(600)]
    with pytest.raises(NotGenerated, match="arguments"):
        generate(Kernel((8,), tuple(terms)))


# ---- a block among its neighbours


def parts(lengths, make, *shape):
    """A block and the edges of its neighbours; `lengths` are those of the parts along each axis."""
    if len(shape) == len(lengths):
        return make(shape)
    return [parts(lengths, make, *shape, n) for n in lengths[len(shape)]]


def among(function, lengths, dtype="f4", then=lambda x: x):
    """The kernel of functions of a block with the edges of its neighbours around it."""
    abstract = parts(lengths, lambda shape: AbstractArray(shape, np.dtype(dtype)))
    (kernel,) = trace_function(lambda x: then(function(np.block(x))), [abstract]).kernels
    return kernel


def stencil(u):
    return u[:-2, 1:-1] + u[2:, 1:-1] + 2 * u[1:-1, :-2] - u[1:-1, 2:] * u[1:-1, 1:-1]


def rows_beside(u):
    return u[:-2] * 2 + u[2:] - u[1:-1]


NEIGHBOURS = {
    "both axes": (stencil, [(1, 30, 1), (1, 45, 1)]),
    "rows": (rows_beside, [(1, 40, 1), (64,)]),
    "rows, thick": (lambda u: u[6:] - u[:-6], [(3, 40, 3), (64,)]),
    "at a corner": (lambda u: u[1:, 1:] - u[:-1, :-1], [(31, 1), (64, 1)]),
    "no rows before": (rows_beside, [(0, 40, 2), (8,)]),
    "three axes": (lambda u: u[:-2, 1:-1, 1:-1] + u[2:, 1:-1, 2:], [(1, 8, 1)] * 3),
    "one axis": (lambda u: u[:-2] + u[2:], [(1, 5000, 1)]),
}
OVER = {
    "no sum": lambda x: x,
    "sum": lambda x: x.sum(),
    "std of all": lambda x: x.std(),
    "argmax of all": lambda x: x.argmax(),
    "std": lambda x: x.std(axis=0),
    "argmin": lambda x: x.argmin(axis=-1),
    "argmax of columns": lambda x: x.argmax(axis=0),
    "max of rows": lambda x: x.max(axis=-1),
    "sum of all but one": lambda x: x.sum(axis=tuple(range(1, x.ndim)) or None),
    "mean of all but the last": lambda x: x.mean(axis=tuple(range(x.ndim - 1)) or None),
    "sum in the middle": lambda x: x.sum(axis=x.ndim // 2),
}


@host_only
@pytest.mark.parametrize("vectors", [False, True])
@pytest.mark.parametrize("over", list(OVER))
@pytest.mark.parametrize("case", list(NEIGHBOURS))
def test_a_block_among_its_neighbours(host, case, over, vectors, monkeypatch):
    """Away from the edges a kernel knows which block it reads, and asks no more."""
    if vectors:
        for name, value in WAYS["vectors are read one by one"].items():
            monkeypatch.setattr(f"gpuscheduler.{name}", value)
    function, lengths = NEIGHBOURS[case]
    kernel = among(function, lengths, "f8", OVER[over])
    rng = np.random.default_rng(0)
    given = parts(lengths, lambda shape: rng.normal(size=shape))
    arrays, want = list(leaves(given)), OVER[over](function(np.block(given)))
    made = generate(kernel, processors=2)
    assert re.search(r"\bpc\d", made.source)
    arrays = [aligned(a) for a in arrays]
    got = host.run([kernel], [arrays], processors=2)[0]
    k.same(got, evaluate.evaluate(kernel, arrays), kernel)
    np.testing.assert_allclose(got[0], want, rtol=1e-12)
    again = host.run([kernel], [arrays], one=True, aligned=False, processors=1)[0]
    k.same(again, got, kernel)


@st.composite
def surrounded(draw):
    """A sum over the surroundings of each point of a block among its neighbours, perhaps reduced
    again.

    Given are the lengths of blocks along each axis, the function, and the type.
    """
    edges = st.integers(0, 3)
    inner = st.sampled_from([8, 16, 24, 40]) | st.integers(8, 40)
    axes = st.tuples(edges, inner, edges)
    lengths = tuple(draw(st.lists(axes, min_size=2, max_size=3)))
    corner = st.tuples(*[st.integers(0, a + b) for a, _, b in lengths])
    corners = tuple(draw(st.lists(corner, min_size=1, max_size=6, unique=True)))
    axes = tuple(sorted(draw(st.sets(st.sampled_from(range(len(lengths))), min_size=1))))
    op = draw(st.sampled_from(["sum", "max", "std", "mean", "argmin", "copy"]))
    dtype = draw(st.sampled_from(["f4", "f8", "i4", "u1"]))

    def function(u):
        total = 0
        for corner in corners:
            ends = zip(corner, lengths, strict=True)
            total = total + u[tuple([slice(o, o + n[1]) for o, n in ends])] * 2
        if op == "copy":
            return total
        return getattr(total, op)(axis=axes[0] if op == "argmin" else axes)

    return lengths, function, dtype


@host_only
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=surrounded())
def test_any_block_among_its_neighbours(host, case):
    """Also reduced along any axes: results beyond the core, and what is reduced beyond it."""
    lengths, function, dtype = case
    rng = np.random.default_rng(0)
    given_ = parts(
        [[n for n in axis if n] for axis in lengths],
        lambda shape: rng.integers(0, 30, shape).astype(dtype),
    )
    arrays = [aligned(a) for a in leaves(given_)]
    with pytest.MonkeyPatch.context() as patch:
        way = WAYS["vectors are read one by one"] | {"codegen.cuda.tuning.MANY_STEPS": 0}
        for name, value in way.items():
            patch.setattr(f"gpuscheduler.{name}", value)
        kernel = among(function, [[n for n in axis if n] for axis in lengths], dtype)
        want = evaluate.evaluate(kernel, arrays)
        for processors in (1, 132):
            got = host.run([kernel], [arrays], processors=processors)[0]
            k.same(got, want, kernel)
        again = host.run([kernel], [arrays], one=True, aligned=False, processors=1)[0]
    k.same(again, want, kernel)
    found, asked = np.squeeze(got[0]), function(np.block(given_))
    np.testing.assert_allclose(found, np.squeeze(asked), rtol=1e-4 if dtype == "f4" else 1e-12)


def test_vectors_are_loaded_where_rows_lie_beside_a_block():
    kernel = among(rows_beside, [(1, 4096, 1), (8192,)])
    assert "Vec<float, 4>" in generate(kernel).source
    kernel = among(rows_beside, [(1, 4096, 1), (8191,)])
    source = generate(kernel).source
    assert "*(const Vec<float, 4>*)" not in source  # but vectors are written
    assert "*(Vec<float, 4>*)(q0" in source


def test_nothing_is_known_of_where_a_block_is_in_its_array():
    """A kernel serves blocks of all places: the end of an axis may be in any of them."""

    def choice(begins):
        at = Expr("add", (index(View(0, (1,))), constant(begins, "i8")), "i8")
        last = Expr("equal", (at, constant(2999, "i8")), "?")
        return Expr("where", (last, source(0, (1,), "f4"), source(1, (1,), "f4")), "f4")

    kept, gone = choice(PLACEHOLDER + 2), choice(1000)
    assert simplify_in_box([kept, gone], ((0, 1000),)) == [kept, gone.args[2]]
    assert simplify_in_box([choice(2000)], ((0, 1000),)) == [choice(2000)]


def test_a_few_points_are_no_interior():
    kernel = among(stencil, [(10, 10, 10), (10, 10, 10)])
    assert not re.search(r"\bpc\d", generate(kernel).source)


# ---- any kernel


def wave_sum(terms, shape):
    """A sum of products of rows and columns: twice as many inputs as terms."""
    body = constant(0, "f8")
    for n in range(terms):
        row = Expr("input", (), "f8", (2 * n, View(0, (1, 0))))
        column = Expr("input", (), "f8", (2 * n + 1, View(0, (0, 1))))
        body = k.call("add", body, k.call("multiply", row, column))
    return k.reduced(body, shape, (0, 1), "sum")


@host_only
def test_more_inputs_than_there_are_registers_are_loaded_one_by_one(host):
    few, many = wave_sum(30, (70, 128)), wave_sum(60, (70, 128))
    assert "Vec<double, 2> x" in generate(few).source
    assert "Vec<double, 2> x" not in generate(many).source
    arrays = [aligned(a) for a in k.filled([np.dtype("f8")] * 120, [70, 128] * 60, 0)]
    for processors in (1, 3):
        got = host.run([many], [arrays], processors=processors)[0]
        k.same(got, evaluate.evaluate(many, arrays), many)


#: What makes small kernels go the ways of large ones.
WAYS = {
    "inputs are loaded late": {
        "codegen.cuda.tuning.LATE_BYTES": 0,
        "codegen.cuda.tuning.KEPT_BYTES": 16,
        "codegen.cuda.tuning.LEAST_COLUMNS": 2,
    },
    "vectors are read one by one": {
        "codegen.cuda.tuning.LOOSE_LEAST": 1,
        "ir.limits.CLOSE": 0,
        "codegen.cuda.tuning.MANY_STEPS": 1024,
    },
}


@host_only
@pytest.mark.parametrize("way", list(WAYS))
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=k.kernels())
def test_any_kernel_computes_the_same_where(host, way, case):
    kernel, arrays = case
    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
        for name, value in WAYS[way].items():
            patch.setattr(f"gpuscheduler.{name}", value)
        want = evaluate.evaluate(kernel, arrays)
        arrays = [aligned(a) for a in arrays]
        for processors in (1, 2):
            got = host.run([kernel], [arrays], processors=processors)[0]
            k.same(got, want, kernel)


def shifted(shape, *offsets, strides=None, dtype="f4"):
    """What an array is at some places around each point, added up."""
    strides = strides or (shape[1] + 8, 1)
    terms = [Expr("input", (), dtype, (0, View(o, strides))) for o in offsets]
    return Kernel(shape, (functools.reduce(lambda a, b: k.call("add", a, b), terms),))


SHIFTED = {
    "beside": shifted((70, 128), 0, 1, 2),
    "odd rows": shifted((70, 131), 0, 1, 140),
    "rows of one vector more": shifted((33, 65), 3, 4),
    "backwards": shifted((40, 96), 5000, 5001, strides=(104, -1)),
    "of doubles": shifted((70, 129), 0, 1, 2, dtype="f8"),
    "of bytes": shifted((70, 131), 1, 4, dtype="u1"),
}


@host_only
@pytest.mark.parametrize("name", list(SHIFTED))
def test_vectors_of_what_lies_anyhow(host, name, monkeypatch):
    """Each element is read once by a thread, however many views have it."""
    monkeypatch.setattr("gpuscheduler.ir.limits.CLOSE", 0)
    kernel = SHIFTED[name]
    made = generate(kernel, processors=2)
    assert re.search(r"\.x\[\d\] = \(p", made.source)  # what is in no vector that was read
    array = aligned(np.random.default_rng(0).integers(0, 99, 20_000).astype(
        kernel.outputs[0].dtype))  # fmt: skip
    got = host.run([kernel], [[array]], processors=2)[0]
    k.same(got, evaluate.evaluate(kernel, [array]), kernel)


def around(u):
    """A weighted sum of twelve places around each point."""
    n, m = u.shape[0] - 2, u.shape[1] - 3
    down = sum((k + 1) * u[k : k + n] for k in range(3))
    return sum((k + 2) * down[:, k : k + m] for k in range(4))


@host_only
@pytest.mark.parametrize("over", list(OVER))
@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("columns", [64, 71])
def test_many_places_of_one_array(host, over, dtype, columns, monkeypatch):
    for name, value in WAYS["vectors are read one by one"].items():
        monkeypatch.setattr(f"gpuscheduler.{name}", value)
    known = [AbstractArray((30, columns + 3), np.dtype(dtype))]
    reduced = OVER[over]
    kernel = trace_function(lambda u: reduced(around(u)), known).kernels[0]
    assert re.search(r"\.x\[\d\] = \(p", generate(kernel).source) or columns % 2
    array = np.random.default_rng(0).integers(0, 30, known[0].shape).astype(dtype)
    want = evaluate.evaluate(kernel, [array])
    for processors in (1, 3):
        k.same(host.run([kernel], [[aligned(array)]], processors=processors)[0], want, kernel)
    moved = [[aligned(array, array.itemsize)]]
    k.same(host.run([kernel], moved, one=True, aligned=False)[0], want, kernel)


def test_results_that_lie_directly_behind_each_other_are_written_one_by_one():
    """Those of a launch of several: the second would not begin at a multiple of a vector."""
    assert "Vec<" not in generate(shifted((70, 131), 0, 1)).source
    assert "Vec<" in generate(shifted((72, 131), 0, 1)).source
    assert "Vec<" in generate(shifted((700, 131), 0, 1)).source


@host_only
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(k.kernels())
def test_any_kernel_computes_what_numpy_does(host, case):
    kernel, arrays = case
    with np.errstate(all="ignore"):
        want = evaluate.evaluate(kernel, arrays)
    arrays = [aligned(a) for a in arrays]
    got = host.run([kernel], [arrays], processors=1)[0]
    k.same(got, want, kernel)
    moved = [aligned(a, a.itemsize) for a in arrays]
    again = host.run([kernel], [moved], one=True, aligned=False, processors=2)[0]
    k.same(again, want, kernel)


# ---- machine code

OPTIONS = ("-std=c++17", "--fmad=false", "-default-device")


def nvrtc():
    return pytest.importorskip("cupy").cuda.nvrtc


def compiled(source, arch="sm_90", both=False):
    """Machine code, of a compiler that needs no GPU: of the entry for one item, or of both."""
    compiler = nvrtc()
    program = compiler.createProgram(source, "kernel.cu", (), ())
    try:
        only = () if both else (ONLY[True],)
        compiler.compileProgram(program, (f"-arch={arch}", *OPTIONS, *only))
        return bytes(compiler.getCUBIN(program)) + b"\0"
    except compiler.NVRTCError:
        pytest.fail(compiler.getProgramLog(program)[:2000])
    finally:
        compiler.destroyProgram(program)


@pytest.mark.parametrize("types", sorted(GROUPS))
def test_operations_compile(types):
    outputs = [of_loop(*loop) for loop in GROUPS[types]]
    compiled(generate(Kernel((256,), tuple(outputs))).source)


LENGTHY = ["exp F", "power D", "arccos D", "sin f", "gamma d", "log D", "divide D", "y1 f"]


@pytest.mark.parametrize("name", LENGTHY)
def test_long_functions_are_in_a_kernel_once(name):
    """A kernel with ninety of them compiles in as little time as one with a few."""
    op, dtype = name.split()
    x = source(0, (256,), np.dtype(dtype))
    more = [x] if op in ("power", "divide") else []
    terms = [k.call("multiply", x, constant(1 + n / 7, dtype)) for n in range(90)]
    terms = [k.call(op, t, *more, dtype=dtype) for t in terms]
    made = generate(Kernel((256,), (functools.reduce(functools.partial(k.call, "add"), terms),)))
    assert made.source.count("__device__ CALLED") == 1
    assert len(compiled(made.source)) < 65_000  # inlined: 130,000 to 1,100,000


CHAINS = {
    "larger": lambda x, y: k.call("maximum", x, y),
    "differences": lambda x, y: k.call("fabs", k.call("subtract", x, y)),
    "chosen": lambda x, y: k.call("where", k.call("greater", x, y, dtype="?"), x, y, dtype=x.dtype),
    "sums": lambda x, y: k.call("add", x, y),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(n, t) for n in CHAINS for t in ("i2", "i8", "f4", "c8") if n != "differences" or t == "f4"],
)
def test_a_long_chain_compiles_soon(name, dtype):
    """NVRTC works out a constant at each place where the next one uses it.

    With 40 values it never ended.
    """
    values = [Expr("input", (), np.dtype(dtype), (n, View(0, (1,)))) for n in range(22)]
    source = generate(Kernel((256,), (functools.reduce(CHAINS[name], values),))).source
    begun = time.process_time()
    compiled(source)
    assert time.process_time() - begun < 10  # under 1 where it compiles soon


SCANNED = {
    "f4": ("cumsum", "cummax", "cumfmin"), "f8": ("cumprod", "cummin"), "i4": ("cumsum", "cummax"),
    "?": ("cumsum", "cummin"), "c8": ("cumsum",), "c16": ("cumprod",), "u1": ("cumprod",),
    "f2": ("cumsum",),
}  # fmt: skip
#: Shapes, axes and types; lines that are cut into parts are of three kernels.
SCANS_OF = {
    "lines": ((40, 64), 1, "f4 f8 i4 ? c8 c16 u1 f2"), "odd": ((9001,), 0, "f4 i4"),
    "few, long": ((3, 40_000), 1, "f4 f8 c8 i4"), "short": ((300, 3), 1, "f4"),
    "columns": ((200, 64), 0, "f4 f8 i4 ? c8 c16 u1 f2"), "few columns": ((36_000, 2), 0, "f4 u1"),
    "between": ((5, 70, 32), 1, "f4 i4"), "empty": ((0, 4), 0, "f4"),
    "no lines": ((4, 0), 0, "f4"), "one": ((1, 1), 1, "f4"),
}  # fmt: skip


@host_only
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "c8", "c16", "i8", "u2"])
def test_very_many_constants(host, dtype):
    """Some are arguments, so that others need no other kernel; all would be too many of these."""
    x = source(0, (33,), dtype)
    for n in range(600):
        value = 97 * n if dtype[0] in "iu" else (n % 7 - 3) / 8 + n / 1024
        number = constant(value + (0.25j if dtype[0] == "c" else 0), dtype)
        x = Expr("subtract", (number, x), dtype)
    kernel = Kernel((33,), (x,))
    assert len(generate(kernel).slots) < 200
    (values,) = k.filled([np.dtype(dtype)], [33], 1)
    arrays = [aligned(values)]
    with np.errstate(all="ignore"):
        want = evaluate.evaluate(kernel, arrays)
    k.same(host.run([kernel], [arrays], processors=2)[0], want, kernel)


def test_other_constants_need_no_other_kernel():
    def text(*values):
        x = source(0, (33,), "f8")
        for v in values:
            x = Expr("add", (x, constant(v, "f8")), "f8")
        return generate(Kernel((33,), (x,))).source

    assert text(*range(1, 100)) == text(*range(2, 101))
    assert text(*range(1, 600)) != text(*range(2, 601))


@host_only
@pytest.mark.parametrize("case", list(SCANS_OF))
def test_scans(host, case):
    shape, axis, types = SCANS_OF[case]
    for dtype, ops in [(t, SCANNED[t]) for t in k.words(types)]:
        leaf = source(0, shape, dtype)
        leaf = k.small(leaf) if "cumprod" in ops and dtype != "u1" else leaf
        kernel = k.scanned(leaf, shape, axis, *ops)
        x = aligned(k.filled([np.dtype(dtype)], [int(np.prod(shape))], 1)[0].reshape(shape))
        with np.errstate(all="ignore"):
            want = evaluate.evaluate(kernel, [x])
        k.same(host.run([kernel], [[x]], processors=2)[0], want, kernel)
        program = split_kernels(Program(1, (kernel,), Out(1, shape)), split_scan)
        if len(program.kernels) > 1:
            every = [x]
            for part in program.kernels:
                found = host.run([part], [[aligned(a) for a in every]])[0]
                k.same(found, evaluate.evaluate(part, every), part)
                every += found
            k.same([a.reshape(shape) for a in every[-len(want) :]], want, kernel)


@host_only
@pytest.mark.parametrize("shape", [(8, 3), (3, 8), (5, 1), (1, 40)])
@pytest.mark.parametrize("axis", [0, 1])
def test_the_first_factor_is_left_as_it_is(host, shape, axis):
    """NaN times one would be NaN in both parts of a complex number."""
    x = np.ones(shape, "c8")
    x[::2, 0] = np.nan
    x[0, -1] = np.inf
    kernel = k.scanned(source(0, shape, "c8"), shape, axis, "cumprod")
    with np.errstate(all="ignore"):
        want = evaluate.evaluate(kernel, [x])
    k.same(host.run([kernel], [[aligned(x)]], processors=2)[0], want, kernel)


def test_kernel_that_copies_rows_compiles():
    compiled(device_library.ROWS_COPIED)


def test_every_file_of_the_device_library_is_read():
    """And decides about code that Numba keeps on disk."""
    files = set(device_library.LIBRARY.glob("*"))
    # kernels of their own are read by what launches them
    assert {file.stem for file in files} == {*device_library.FILES, "copy", "skinny"}
    assert files <= set(DECIDES_DEVICE_CODE)


@pytest.mark.parametrize("name", device_library.PIECES)
def test_pieces_of_the_device_library_define_their_names(name):
    text = device_library.PIECES[name]
    assert re.search(rf"(struct |constexpr.* |^.*[ *]){name}\b *[({{=]", text, re.MULTILINE), text
    assert "~(" not in text
    assert "Real" not in text or "template<class Real>" in text


@pytest.mark.parametrize("axis", [0, 1])
def test_scans_of_all_types_compile(axis):
    shape = (512, 1024)
    for dtype in k.words("? i1 u2 i4 i8 u8 f2 f4 f8 c8 c16"):
        ops = [op for op in SCANS if dtype[0] != "c" or op in ("cumsum", "cumprod")]
        compiled(generate(k.scanned(source(0, shape, dtype), shape, axis, *ops)).source)


EVERY = ["sum", "prod", "min", "max", "fmin", "fmax", "any", "all", "argmin", "argmax", "moment"]


@pytest.mark.parametrize(
    ("axes", "types"),
    [((1,), "? i1 u2 i4 i8 u8 f2 f4 f8 c8 c16"), ((0,), "u1 f4 c16"), ((0, 1), "f2 f8 c8")],
)
def test_reductions_of_all_types_compile(axes, types):
    shape = (512, 1024)
    for dtype in k.words(types):
        some = [op for op in EVERY if dtype[0] != "c" or op in ("sum", "prod", "all", "moment")]
        for ops in (some[:6], some[6:]):
            compiled(generate(k.reduced(source(0, shape, dtype), shape, axes, *ops)).source)


@host_only
@pytest.mark.parametrize("axes", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("types", ["f4 f4", "f4 f8", "f8 f8"])
def test_a_sum_of_what_has_a_moment_too(host, axes, types):
    given, wide = k.words(types)
    x = np.random.default_rng(1).random((300, 70)).astype(given) + 5
    leaf = source(0, x.shape, given)
    moment = leaf if given == wide else Expr("cast", (leaf,), wide)
    doubles = (np.dtype(wide),) * 2
    reductions = (
        Reduction("sum", leaf, (np.dtype(given),)), Reduction("moment", moment, doubles),
        Reduction("max", leaf, (np.dtype(given),)),
    )  # fmt: skip
    outputs = tuple(
        Expr("reduced", (), d, (j, n))
        for j, r in enumerate(reductions)
        for n, d in enumerate(r.dtypes)
    )
    kernel = Kernel(x.shape, outputs, reductions, axes)
    assert ("Part2" in generate(kernel).source) == (given == "f8")  # of float32, made from the mean
    ((total, mean, squares, largest),) = host.run([kernel], [[x]])
    exact = x.astype("f8")
    np.testing.assert_allclose(total, exact.sum(axes), rtol=6e-8 if given == "f4" else 1e-14)
    np.testing.assert_allclose(mean, exact.mean(axes), rtol=6e-8 if wide == "f4" else 1e-14)
    expected = exact.var(axes) * x.size / np.asarray(total).size
    np.testing.assert_allclose(squares, expected, rtol=6e-8 if wide == "f4" else 1e-12)
    np.testing.assert_array_equal(largest, x.max(axes))


@host_only
@pytest.mark.parametrize("dtype", ["c8", "c16"])
@pytest.mark.parametrize("odd", [complex(np.nan, 1), complex(1, np.nan), complex(np.inf, 1),
                                 complex(2, -np.inf), complex(-0.0, -0.0)])  # fmt: skip
def test_what_is_not_finite_in_one_part_of_a_complex_mean(host, dtype, odd):
    """NumPy divides a complex sum by a complex number."""
    x = aligned(np.full((3, 40), odd, dtype))
    x[1:, 7:] = 3 - 2j
    kernel = k.reduced(source(0, x.shape, dtype), x.shape, (1,), "moment")
    mean, _ = host.run([kernel], [[x]])[0]
    with np.errstate(all="ignore"):
        want = x.mean(axis=1)
    np.testing.assert_allclose(mean.real, want.real, rtol=1e-6)
    np.testing.assert_allclose(mean.imag, want.imag, rtol=1e-6)


@host_only
def test_a_sum_of_nothing_beside_its_moment_is_zero(host):
    x = np.zeros((0, 5), "f4")
    kernel = k.reduced(source(0, x.shape, "f4"), x.shape, (0,), "sum", "moment")
    np.testing.assert_array_equal(host.run([kernel], [[x]])[0][0], np.zeros(5))


@host_only
def test_a_mesh_is_gone_through_in_patches(tmp_path):
    """Each point once, however many rows and columns; 32 in turn lie in 4 rows and 8 columns."""
    text = "#define __device__\n#define __forceinline__ inline\n" + device_library.pieces("patched")
    text += (
        '\nextern "C" void go(unsigned* out, unsigned n, unsigned rows, unsigned columns) {'
        "for (unsigned j = 0; j < n; ++j) out[j] = patched<unsigned>(j, rows, columns); }"
    )
    source, library = tmp_path / "p.cpp", tmp_path / "p.so"
    source.write_text(text)
    subprocess.run([COMPILER, "-shared", "-fPIC", source, "-o", library], check=True)
    go = ctypes.CDLL(str(library)).go

    def order(planes, rows, columns):
        out = np.empty(planes * rows * columns + 40, np.uint32)
        go(ctypes.c_void_p(out.ctypes.data), out.size, rows, columns)
        assert (out[-40:] >= out.size - 40).all()  # what is no point does not become one
        return out[:-40]

    for planes, rows, columns in itertools.product((1, 3), range(1, 10), range(1, 19)):
        found = order(planes, rows, columns)
        np.testing.assert_array_equal(np.sort(found), np.arange(found.size))
    for patch in order(1, 8, 32).reshape(-1, 32):
        y, x = np.divmod(patch, 32)
        assert (np.ptp(y), np.ptp(x)) == (3, 7)


def test_tiles_have_room_in_shared_memory():
    shape = (64, 64)
    both = source(0, shape, "c16")
    for n in range(1, 6):
        both = k.call("add", both, k.turned(n, shape, "c16"))
    compiled(generate(Kernel(shape, (both,))).source)
    compiled(generate(k.reduced(both, shape, (0, 1), "sum", "moment")).source)


@functools.cache
def programs():
    """Kernels whose speed is promised, and how their loads look."""
    shape = (4096, 8192)
    x, y, z = (source(n, shape, "f4") for n in range(3))
    two, line = constant(2, "f4"), Expr("input", (), "f4", (3, View(0, (0, 1))))
    chain = k.call("add", k.call("multiply", k.call("add", k.call("multiply", x, two), two), y), z)
    gauss = k.call("exp", k.call("multiply", k.call("square", k.call("subtract", x, line)), two))
    both = k.call("add", x, k.turned(0, shape, "f4"))
    draws = Expr("normal", (index(View(0, (16384, 2))),), "f8", 7)
    vector = Expr("input", (), "f4", (1, View(0, (0, 1))))  # along which the matrix does not lie
    product = k.call("multiply", k.turned(0, (256, 65536), "f4"), vector)
    pairs = Expr("normal", (index(View(0, (8192, 1))),), "f8", 7)
    mask = Expr("greater", (x, two), "?")
    places = [index(View(0, strides)) for strides in ((1, 0), (0, 1))]
    return {
        "chain": (Kernel(shape, (chain,)), "LDG.E.128"),
        "gauss": (k.reduced(gauss, shape, (0, 1), "sum"), "LDG.E.128"),
        "rows": (k.reduced(x, shape, (1,), "sum"), "LDG.E.128"),
        "columns": (k.reduced(x, shape, (0,), "sum"), "LDG.E.128"),
        "turned and vector": (k.reduced(product, (256, 65536), (1,), "sum"), "LDG.E.128"),
        "float64": (k.reduced(source(0, shape, "f8"), shape, (0, 1), "moment"), "LDG.E.128"),
        "moments of columns": (
            k.reduced(source(0, (4096, 32768), "f4"), (4096, 32768), (0,), "moment"),
            "LDG.E.128",
        ),
        "bytes": (Kernel(shape, (Expr("cast", (source(0, shape, "u1"),), "f4"),)), "LDG.E.64"),
        "turned": (Kernel(shape, (both,)), "LDG.E"),
        "histogram": (k.histogram(shape, "f4", k.EDGES["even"]), "LDG.E.128"),
        "histogram, other bins": (k.histogram(shape, "f8", k.EDGES["growing"]), "LDG.E.128"),
        "weights": (k.weighed(shape, "f4", k.EDGES["even"], "f4"), "LDG.E.128"),
        "weights of other bins": (k.weighed(shape, "f8", k.EDGES["growing"], "f8"), "LDG.E.128"),
        "counted": (Kernel(shape, (mask,), picks=True), "LDG.E.128"),
        "picked": (Kernel(shape, (mask, chain), picks=True), "LDG.E.128"),
        "places": (Kernel(shape, (mask, *places), picks=True), "LDG.E.128"),
        "turned sum": (k.reduced(both, shape, (0, 1), "sum"), "LDG.E"),
        "neighbours": (among(stencil, [(1, 4096, 1), (1, 8192, 1)]), "STG.E.128"),
        "neighbours, odd": (among(stencil, [(1, 4095, 1), (1, 8191, 1)]), "STG.E.128"),
        "beside": (shifted((4096, 8191), 0, 1), "STG.E.128"),
        "rows beside": (among(rows_beside, [(1, 4096, 1), (8192,)]), "LDG.E.128"),
        "normals": (k.reduced(draws, shape, (0, 1), "sum"), "MUFU"),
        "normal pairs": (Kernel(shape, (pairs,)), "STG.E.128"),
        "prices of options": (prices(), "LDG.E.128"),
        "windows": (in_windows("sum", {0: 31}), "LDG.E.64"),
        "short windows": (in_windows("max", {0: 7}), "LDG.E.128"),
        "windows along rows": (in_windows("sum", {2: 31}), "LDS"),
        "boxes": (in_windows("moment", {1: 5, 2: 5}), "LDS"),
        "deviations in windows": (in_windows("moment", {0: 31}), "LDG.E.64"),
    }


def in_windows(op, lengths):
    x, whole = k.windows((256, 256, 1024), lengths)
    return k.reduced(x, whole, tuple(range(3, len(whole))), op)


def prices():
    """The kernel of graphs/black_scholes."""
    with Scheduler("cpu:1", fuse_least=0) as s:
        arrays = [da.from_array(np.ones(2**20, "f4"), chunks=-1) for _ in range(3)]
        steps = s.plan(black_scholes.apply(*arrays)).steps
        (task,) = [step.task for step in steps if isinstance(step.task, KernelTask)]
        return task.program.kernels[0]


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90", "sm_100", "sm_120"])
def test_kernels_compile_for(arch):
    if f"compute_{arch[3:]}" not in {f"compute_{n}" for n in nvrtc().getSupportedArchs()}:
        pytest.skip(f"this compiler does not know {arch}")
    for kernel, _ in programs().values():
        compiled(generate(kernel).source, arch, both=arch == "sm_90")


def disassembler():
    found = shutil.which("nvdisasm")
    if found is None:
        roots = Path(sysconfig.get_path("purelib")).glob("nvidia/*/bin/nvdisasm")
        found = next((str(p) for p in roots), None)
    return found


@pytest.mark.skipif(disassembler() is None, reason="there is no nvdisasm")
def test_very_many_inputs_spill_nothing(tmp_path):
    made = generate(wave_sum(60, (4000, 4000)))
    (tmp_path / "k.cubin").write_bytes(compiled(made.source))
    text = subprocess.run([disassembler(), tmp_path / "k.cubin"], capture_output=True, text=True,
                          check=True).stdout  # fmt: skip
    assert "LDG.E.64" in text
    assert not re.findall(r"\b(?:LDL|STL)\b", text)


@pytest.mark.skipif(disassembler() is None, reason="there is no nvdisasm")
@pytest.mark.parametrize("name", list(programs()))
def test_machine_code_loads_wide_and_spills_nothing(name, tmp_path):
    kernel, loads = programs()[name]
    made = generate(kernel)
    (tmp_path / "k.cubin").write_bytes(compiled(made.source))
    text = subprocess.run([disassembler(), tmp_path / "k.cubin"], capture_output=True, text=True,
                          check=True).stdout  # fmt: skip
    assert loads in text
    assert not re.findall(r"\b(?:LDL|STL)\b", text)
    assert "LDG.E.U8" not in text


@pytest.mark.skipif(disassembler() is None, reason="there is no nvdisasm")
@pytest.mark.parametrize("op", ["min", "max"])
@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
def test_signs_of_what_is_compared_are_in_the_machine_code(tmp_path, arch, op):
    """Three at a time, as the compiler compares other integers, it loses them."""
    for kernel in k.extremes_of_negated(np.dtype("i4"), op):
        code = compiled(generate(kernel).source, arch)
        (tmp_path / "k.cubin").write_bytes(code)
        text = subprocess.run([disassembler(), tmp_path / "k.cubin"], capture_output=True,
                              text=True, check=True).stdout  # fmt: skip
        assert "VIADDMNMX" in text  # not x, and one
        assert kernel.axes != (1,) or "VIMNMX3" not in text  # all that is compared is negated


def test_what_a_condition_depends_on_is_read_before_it():
    """The inner condition depends on a value that is taken, and so does its choice.

    That value is needed wherever the outer condition holds.
    """
    place = index(View(0, (1,)))
    outer = Expr("less", (source(2, (8,), "f4"), constant(0, "f4")), "?")
    taken = Expr("taken", (Expr("input", (), "f4", (0, View(0, (0,)))), place), "f4")
    other = Expr("taken", (Expr("input", (), "f4", (1, View(0, (0,)))), place), "f4")
    inner = Expr("greater", (taken, constant(0, "f4")), "?")
    chosen = Expr("where", (inner, Expr("add", (taken, other), "f4"), other), "f4")
    tree = NodeTree([Expr("where", (outer, chosen, constant(1, "f4")), "f4")], "v")
    assert len(tree.taken) == 2
    for number in tree.taken:  # of both the same: the inner condition says nothing
        guard = tree.guards[number]
        assert guard is not None
        assert tree.nodes[guard].op == "less"
        assert number not in tree.nodes_below([guard])


def test_cases():
    a, b, not_a = (1, True), (2, True), (1, False)
    of = lambda *cases: {frozenset(c) for c in cases}  # noqa: E731
    assert simplify_cases(of([a], [a, b])) == of([a])
    assert simplify_cases(of([a, b], [not_a, b])) == of([b])
    assert simplify_cases(of([a], [not_a])) == of([])
    assert simplify_cases(of([a, b], [not_a])) == of([a, b], [not_a])
