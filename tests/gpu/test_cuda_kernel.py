"""Generated kernels on a GPU: the values of NumPy's reading, and the same bits on every run."""

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")

from cupy.cuda.function import Module
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuscheduler.codegen.cpu import evaluate
from gpuscheduler.codegen.cuda.kernel import generate
from gpuscheduler.devices.cuda.kernel_code import compile_kernel
from gpuscheduler.ir.expr import Expr, Kernel, View, constant, index, source
from tests.codegen.test_cuda_kernel import (
    CASES,
    GROUPS,
    LOOSE,
    OPS,
    SPACES,
    of_loop,
    operands,
    wave_sum,
    x_size,
)
from tests.support import kernels as k
from tests.tracing.test_numba_cuda import ORDINARY, numbers, wanted
from tests.tracing.test_numba_cuda import of as called

pytestmark = [pytest.mark.gpu, pytest.mark.real]
#: CUDA's functions are right but for the last places; these have more of them than others.
PLACES = {"F": 1e-4, "D": 1e-11, "e": 3e-3, "f": 2e-5, "d": 1e-12}
loaded = {}


def function(made, one):
    if made.source not in loaded:
        module = Module()
        arch = f"sm_{cupy.cuda.Device().compute_capability}"
        module.load(compile_kernel(made.source, arch, made.calls))
        loaded[made.source] = module
    return loaded[made.source].get_function(made.name + ("_one" if one else ""))


def run(kernels, arrays, one=False, **options):
    """The outputs of kernels of one structure, launched together. A structure goes to a kernel by
    value as a NumPy scalar of a void type of its size."""
    made = [generate(kernel, **options) for kernel in kernels]
    (_,) = {m.source for m in made}
    first = made[0]
    items = np.zeros((1 if one else first.most, len(first.slots)), np.uint64)
    outs, work, counters = [], [], []
    for kernel, m, row, own in zip(kernels, made, items, arrays, strict=False):
        row[:] = m.slots
        for slot, n, offset in m.inputs:
            row[slot] = (own[n].data.ptr + offset) % 2**64
        outs.append([cupy.empty(kernel.output_shape, o.dtype) for o in kernel.outputs])
        for slot, out in zip(m.outputs, outs[-1], strict=True):
            row[slot] = out.data.ptr
        if m.scratch is not None:
            work.append(cupy.full(m.scratch[1], 0xEE, np.uint8))
            row[m.scratch[0]] = work[-1].data.ptr
        if m.counters is not None:
            counters.append(cupy.zeros(m.counters[1], np.uint32))
            row[m.counters[0]] = counters[-1].data.ptr
    argument = items.reshape(-1).view(np.dtype((np.void, items.nbytes)))[0]
    blocks_ = max(m.blocks for m in made)
    function(first, one)((blocks_, len(kernels), 1), (first.threads, 1, 1), (argument,))
    got = [[out.get() for out in own] for own in outs]
    assert not any(c.any() for c in counters)
    return got


def on_gpu(array, shift=0):
    """A copy that begins `shift` bytes behind a multiple of 16."""
    room = cupy.empty(array.nbytes + shift + 16, np.uint8)
    out = room[shift : shift + array.nbytes].view(array.dtype).reshape(array.shape)
    out.set(array)
    return out


def check(kernel, arrays, shift=0, **options):
    with np.errstate(all="ignore"):
        want = evaluate.evaluate(kernel, arrays)
    moved = [on_gpu(a, shift * a.itemsize) for a in arrays]
    got = run([kernel], [moved], one=True, aligned=not shift, **options)[0]
    k.same(got, want, kernel)
    return got


@pytest.mark.parametrize("types", sorted(GROUPS))
def test_operations_compute_what_numpy_does(types):
    arrays, outputs = [], []
    for op, own, made in GROUPS[types]:
        outputs.append(of_loop(op, own, made, len(arrays)))
        arrays += [np.ascontiguousarray(a) for a in operands(op, own)]
    wrong = []
    for start in range(0, len(outputs), 40):
        kernel = Kernel((256,), tuple(outputs[start : start + 40]))
        got = run([kernel], [[on_gpu(a) for a in arrays]], one=True)[0]
        with np.errstate(all="ignore"):
            want = evaluate.evaluate(kernel, arrays)
        for loop, a, b in zip(GROUPS[types][start:], got, want, strict=False):
            try:
                if a.dtype.kind in "iub":
                    np.testing.assert_array_equal(a, b)
                else:
                    rtol = max(PLACES[a.dtype.char], LOOSE[a.dtype.char])
                    np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol)
            except AssertionError as error:
                wrong.append(f"{loop}: {error}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("types", ["f", "ff", "d", "dd", "F", "FF", "D", "DD"])
def test_functions_give_the_same_numbers_where_they_are_called(types, monkeypatch):
    arrays, outputs = [], []
    for op, own, made in GROUPS[types]:
        outputs.append(of_loop(op, own, made, len(arrays)))
        arrays += [np.ascontiguousarray(a) for a in operands(op, own)]
    given, calls = [on_gpu(a) for a in arrays], 0
    for start in range(0, len(outputs), 20):
        kernel = Kernel((256,), tuple(outputs[start : start + 20]))
        found = []
        for most in (10**9, 0):
            monkeypatch.setattr("gpuscheduler.codegen.cuda.tuning.MOST_INSTRUCTIONS", most)
            found.append(run([kernel], [given], one=True)[0])
        calls += generate(kernel).source.count("__device__ CALLED")
        for loop, *both in zip(GROUPS[types][start:], *found, strict=False):
            np.testing.assert_array_equal(*both, err_msg=str(loop))
    assert calls >= 2


@pytest.mark.parametrize("n", [2**22, 2**22 + 3])
def test_quotients_and_roots_are_rounded_as_ieee_754_has_it(n):
    arrays = k.any_floats(n, seed=n)
    (got,) = run([k.quotients_and_roots(n)], [[cupy.asarray(a) for a in arrays]], one=True)
    wrong, away = k.wrong_of_quotients_and_roots(arrays, [cupy.asnumpy(g) for g in got])
    assert wrong == [0] * 5
    assert away < 1


@pytest.mark.parametrize("op", ["min", "max"])
@pytest.mark.parametrize("dtype", ["i1", "i2", "i4", "i8", "u4", "f4"])
def test_signs_of_what_is_compared(dtype, op):
    """The compiler loses some of int32."""
    rng = np.random.default_rng(0)
    for kernel in k.extremes_of_negated(np.dtype(dtype), op):
        for low, high in ((0, 9), (-100, 100)):
            if dtype[0] != "u" or low == 0:
                check(kernel, [rng.integers(low, high, (6, 512)).astype(dtype) for _ in range(3)])


@pytest.mark.parametrize("_", range(6))  # side by side: each kernel is compiled
@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=k.kernels(), processors=st.sampled_from([1, 7, 132]), shift=st.booleans())
def test_any_kernel_computes_what_numpy_does(_, case, processors, shift):
    kernel, arrays = case
    check(kernel, arrays, int(shift), processors=processors)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(k.kernels(), st.sampled_from([1, 132]))
def test_any_kernel_computes_the_same_where_inputs_are_loaded_late(case, processors):
    kernel, arrays = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gpuscheduler.codegen.cuda.tuning.LATE_BYTES", 0)
        patch.setattr("gpuscheduler.codegen.cuda.tuning.KEPT_BYTES", 16)
        patch.setattr("gpuscheduler.codegen.cuda.tuning.LEAST_COLUMNS", 2)
        check(kernel, arrays, processors=processors)


@pytest.mark.parametrize("columns", [4096, 1500, 1999])
@pytest.mark.parametrize("terms", [30, 60])
def test_very_many_rows_and_columns(terms, columns):
    """Which stay in the cache, and for which there may be no registers."""
    kernel = wave_sum(terms, (300, columns))
    arrays = k.filled([np.dtype("f8")] * (2 * terms), [300, columns] * terms, 0)
    for processors in (1, 132):
        check(kernel, arrays, processors=processors)


@pytest.mark.parametrize("dtype", ["f4", "f8", "i8"])
@pytest.mark.parametrize("edges", list(k.EDGES))
def test_histograms(edges, dtype):
    """Large ones, too: many blocks, whose counts the last one adds up."""
    bounds = k.EDGES[edges].astype(dtype)
    for shape in (*SPACES, (3_000_001,), (2000, 1500)):
        x = k.on_edges(x_size(shape), bounds, dtype).reshape(shape)
        for processors in (1, 132):
            (got,) = check(k.histogram(shape, dtype, bounds), [x], processors=processors)
            np.testing.assert_array_equal(got, np.histogram(x, bounds)[0])


@pytest.mark.parametrize("kind", ["f4", "f8", "i2"])
@pytest.mark.parametrize("edges", list(k.WEIGHED))
def test_histograms_of_weights(edges, kind):
    bounds = k.WEIGHED[edges].astype("f4")
    for shape in (*SPACES, (3_000_001,), (2000, 1500)):
        x = k.on_edges(x_size(shape), bounds, "f4")
        w = np.random.default_rng(1).integers(-900, 900, x.size).astype(kind)
        want, _ = k.sums_in_bins(x, bounds, w)
        if kind != "i2":  # in which order they are added up makes a difference
            w = (w * np.float64(1e-3) ** (w % 5)).astype(kind)
            want, size = k.sums_in_bins(x, bounds, w)
        arrays = [cupy.asarray(a.reshape(shape)) for a in (x, w)]
        for processors in (1, 132):
            kernel = k.weighed(shape, "f4", bounds, kind)
            found = [run([kernel], [arrays], processors=processors)[0][0] for _ in range(3)]
            for got in found:
                assert got.tobytes() == found[0].tobytes()
            if kind == "i2":
                np.testing.assert_array_equal(found[0], want)
            else:
                assert np.all(np.abs(found[0] - want) <= 1e-14 * size)


@pytest.mark.parametrize("dtype", sorted(OPS))
@pytest.mark.parametrize("case", list(CASES))
def test_reductions(case, dtype):
    shape, axes = CASES[case]
    ops = [op for op in OPS[dtype] if 0 not in shape or op in ("sum", "prod", "any", "all")]
    kernel = k.reduced(source(0, shape, dtype), shape, axes, *ops)
    for seed in (0, 3)[: 1 if dtype == "c8" else 2]:
        for processors in (1, 132):
            arrays = k.filled([np.dtype(dtype)], [x_size(shape)], seed)
            check(kernel, arrays, processors=processors)


LARGE = [(2000, 5000), (5_000_001,), (3_000_000, 3), (3, 3_000_000), (200, 100, 300), (4096, 4096)]


@pytest.mark.parametrize("shape", LARGE)
def test_large_arrays(shape):
    rng = np.random.default_rng(0)
    x = rng.normal(3, 1, shape).astype("f4")
    leaf, rank = source(0, shape, "f4"), len(shape)
    for axes in {(0,), (rank - 1,), tuple(range(rank)), (0, rank - 1)[:rank]}:
        kernel = k.reduced(leaf, shape, tuple(sorted(set(axes))), "sum", "moment", "max", "argmin")
        first = check(kernel, [x])
        again = check(kernel, [x])
        assert [a.tobytes() for a in first] == [a.tobytes() for a in again]
    body = k.call("add", k.call("multiply", leaf, constant(2, "f4")), leaf)
    check(Kernel(shape, (body, k.call("cast", leaf, dtype="f8"))), [x])


@pytest.mark.parametrize("shape", [(1000, 700), (2048, 2048), (100, 3, 130)])
def test_transposed_arrays(shape):
    rng = np.random.default_rng(0)
    x, y = (rng.random(x_size(shape)).astype("f4") for _ in range(2))
    both = k.call("subtract", source(0, shape, "f4"), k.turned(1, shape, "f4"))
    check(Kernel(shape, (both,)), [x, y])
    check(k.reduced(both, shape, tuple(range(len(shape))), "sum", "argmax"), [x, y])
    check(k.reduced(both, shape, (0,), "sum"), [x, y])


@pytest.mark.parametrize("op", ["bits", "uniform", "normal"])
@pytest.mark.parametrize("step", [1, 2, 3])
@pytest.mark.parametrize("start", [0, 1, 2**33])
def test_random_numbers(op, step, start):
    for dtype in ["u8"] if op == "bits" else ["f4", "f8"]:
        for shape in [(1001,), (40, 256), (33, 7)]:
            strides = tuple(s * step for s in View.contiguous(shape).strides)
            at = k.call("add", index(View(start % 2, strides)), constant(start - start % 2, "i8"))
            drawn = Expr(op, (at,), dtype, 2**63 + 12345)
            check(Kernel(shape, (drawn,)), [])
            if op != "bits":
                check(k.reduced(drawn, shape, tuple(range(len(shape))), "sum", "max"), [])


def test_a_launch_carries_blocks_of_several_shapes():
    rng = np.random.default_rng(0)
    sizes = [(640, 1280, 1.5), (64, 36, 2), (7, 128, -1), (1001, 8, 0.1)] * 3

    def of(rows, columns, value, reduces):
        shape = rows, columns
        line = Expr("input", (), "f4", (1, View(0, (0, 1))))
        body = k.call("add", source(0, shape, "f4"), line)
        body = k.call("multiply", body, constant(value, "f4"))
        return k.reduced(body, shape, (0,), "sum") if reduces else Kernel(shape, (body,))

    arrays = [[rng.random((r, c), np.float32), rng.random(c, np.float32)] for r, c, _ in sizes]
    for reduces in (False, True):
        kernels = [of(*size, reduces) for size in sizes]
        got = run(kernels, [[on_gpu(a) for a in own] for own in arrays])
        for kernel, own, found in zip(kernels, arrays, got, strict=True):
            k.same(found, evaluate.evaluate(kernel, own), kernel)


@pytest.mark.parametrize("name", list(ORDINARY))
def test_python_functions(name):
    pytest.importorskip("numba_cuda")
    f, types, gives = ORDINARY[name]
    n, types = 100_001, types.split()
    arrays = numbers(types, n)
    call = called(f, *[source(i, (n,), t) for i, t in enumerate(types)], dtype=gives)
    (got,) = run([Kernel((n,), (call,))], [[on_gpu(a) for a in arrays]])[0]
    rtol = 2e-4 if np.dtype(gives).char in "fF" else 1e-10
    np.testing.assert_allclose(got, wanted(f, arrays, gives), rtol=rtol)
