"""What masks select, reduced by kernels."""

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")

import dask.array as da
from hypothesis import given, settings
from hypothesis import strategies as st

import gpuscheduler
from gpuscheduler.frontend.task import kernels_of, members_of
from gpuscheduler.fusion.task import CompressTask, OptionalTask
from tests.tracing.test_masked import EXAMPLES, EXTREME, PICKED, REDUCED, arrays_of

from .test_executor import DEVICES, host

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=DEVICES)
def scheduler(request):
    with gpuscheduler.Scheduler(request.param, check=True, fuse_least=0) as s:
        yield s


def collections(chunks, dtype):
    given = arrays_of(dtype)
    each = zip(given, (chunks, chunks, 11), strict=True)
    return given, [da.from_array(cupy.asarray(a), chunks=c).persist() for a, c in each]


def tasks_of(plan):
    return [t for s in plan.steps for t in (members_of(s.task) or [s.task])]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("chunks", "dtype"), [((6, 30), "f4"), ((7, 11), "i4")])
@pytest.mark.parametrize("name", [*REDUCED, *EXTREME])
def test_dask_gives_what_numpy_gives(scheduler, name, chunks, dtype):
    expression = (REDUCED | EXTREME)[name]
    given, arrays = collections(chunks, dtype)
    want = expression(np, *given)
    z = expression(da, *arrays)
    for _ in range(3):  # the third time by heart
        got = z.compute()
        assert got.shape == np.shape(want)
        assert got.dtype == np.asarray(want).dtype
        np.testing.assert_allclose(host(got), want, rtol=1e-5)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("chunks", "dtype"), [((6, 30), "f4"), ((7, 11), "i2")])
@pytest.mark.parametrize("name", PICKED)
def test_what_a_mask_selects_is_picked_out(scheduler, monkeypatch, name, chunks, dtype):
    given, arrays = collections(chunks, dtype)
    want = PICKED[name](np, *given)
    if name != "and reduced":

        def refuse(*args):
            raise AssertionError("operation by operation")

        monkeypatch.setattr(CompressTask, "__call__", refuse)
    z = PICKED[name](da, *arrays)
    for _ in range(3):
        got = z.compute()
        assert type(got) is cupy.ndarray
        assert got.shape == want.shape
        assert got.dtype == want.dtype
        np.testing.assert_allclose(host(got), want, rtol=1e-6)
    assert [t for t in tasks_of(scheduler.plan(z)) if isinstance(t, CompressTask)]
    others = [a[::-1] for a in arrays[:2]]  # a collection that is only like it
    np.testing.assert_allclose(
        host(PICKED[name](da, *others, arrays[2]).compute()),
        PICKED[name](np, given[0][::-1], given[1][::-1], given[2]), rtol=1e-6,
    )  # fmt: skip


LARGE = [pytest.param(n, marks=pytest.mark.real) for n in (300_000, 3_000_001)]


@pytest.mark.parametrize("size", [1, 31, 1023, 1024, 1025, 30_000, *LARGE])
@pytest.mark.parametrize("dtype", ["u1", "f2", "f4", "f8", "c16"])
def test_large_arrays_and_odd_ends(size, dtype):
    x = np.random.default_rng(size).integers(0, 100, size).astype(dtype)
    with gpuscheduler.Scheduler("cuda:0", fuse_least=0) as s:
        for least in (50, 99, 0, 100):
            y = da.from_array(cupy.asarray(x), chunks=-1)
            z = y[y.real >= least]
            assert [t for t in tasks_of(s.plan(z)) if isinstance(t, CompressTask)]
            np.testing.assert_array_equal(host(z.compute()), x[x.real >= least])
            odd = cupy.asarray(np.r_[x, x])[1:]  # which begins at no multiple of 16 bytes
            z = da.from_array(odd, chunks=-1).map_blocks(lambda b, least=least: b[b.real < least])
            want = np.r_[x, x][1:]
            np.testing.assert_array_equal(host(z.compute()), want[want.real < least])


@given(st.data())
@settings(max_examples=max(8, EXAMPLES // 10), deadline=None)
def test_any_selection(data):
    draw = data.draw
    shape = draw(st.lists(st.integers(1, 40), min_size=1, max_size=3), "shape")
    kinds = st.sampled_from(["u1", "i2", "i8", "f2", "f4", "f8", "c8", "?"])
    rng = np.random.default_rng(draw(st.integers(0, 99), "seed"))
    x, y = ((rng.random(shape) * 9).astype(draw(kinds, name)) for name in ("x", "y"))
    chunks = tuple([draw(st.integers(1, n), "chunk") for n in shape])
    by = draw(st.sampled_from(["rows", "everything", "an array"]) if x.ndim > 1 else st.just(""))
    bound = draw(st.integers(0, 9), "bound")
    values = draw(st.sampled_from([
        lambda xp, x, y: x, lambda xp, x, y: y, lambda xp, x, y: x + y,
        lambda xp, x, y: x.T if x.ndim < 3 else x, lambda xp, x, y: x[::-1],
        lambda xp, x, y: xp.where(y, x, x[..., :1]),
    ]), "values")  # fmt: skip

    def select(xp, x, y):
        v = values(xp, x, y)
        if by == "rows":
            return v[..., :3][abs(v[(slice(None), *[0] * (v.ndim - 1))]) >= bound]
        if by == "an array" and v.shape == x.shape:
            return v[(y != bound) & (abs(x) < 7)]
        return v[abs(v) >= bound]

    want = select(np, x, y)
    with gpuscheduler.Scheduler(draw(st.sampled_from(DEVICES), "devices"), fuse_least=0):
        arrays = [da.from_array(cupy.asarray(a), chunks=chunks) for a in (x, y)]
        z = select(da, *arrays)
        for _ in range(2):
            got = z.compute()
            assert got.dtype == want.dtype
            np.testing.assert_array_equal(host(got), want)


@pytest.mark.parametrize("rounds", [2500, 11_000])
def test_more_operations_than_a_kernel_has(rounds):
    def f(b):
        v = b
        for i in range(rounds):
            v = v * b + i
        return v[b > 0.5]

    x = np.random.default_rng(1).random(300)
    with gpuscheduler.Scheduler("cuda:0", fuse_least=0) as s:
        y = da.from_array(cupy.asarray(x), chunks=-1).map_blocks(f, dtype="f8", meta=cupy.empty(0))
        assert not [t for t in tasks_of(s.plan(y)) if isinstance(t, CompressTask)]
        np.testing.assert_allclose(host(y.compute()), f(x))


@pytest.mark.parametrize("broken", ["generate", "compile_kernel"])
def test_where_there_is_no_kernel_it_is_done_operation_by_operation(monkeypatch, broken):
    from gpuscheduler.devices.cuda import kernel_code
    from gpuscheduler.errors import NotGenerated

    def fail(*args, **kwargs):
        raise {"generate": NotGenerated, "compile_kernel": kernel_code.CompileFailed}[broken](
            "none today"
        )

    monkeypatch.setattr(kernel_code, broken, fail)
    x = np.random.default_rng(2).random(3000)
    with gpuscheduler.Scheduler("cuda:0", fuse_least=0):
        y = da.from_array(cupy.asarray(x), chunks=1000)
        z = y[y * 3 - y > 0.5 + y * y]  # of which nobody else has a kernel
        with pytest.warns(RuntimeWarning, match="operation by operation.*none today"):
            got = z.compute()
        np.testing.assert_array_equal(host(got), x[x * 3 - x > 0.5 + x * x])


def test_long_computing_is_done_once():
    """Not in each of two kernels: what other tasks compute is stored."""
    x = da.from_array(cupy.arange(1000.0), chunks=250).persist()
    with gpuscheduler.Scheduler("cuda:0", fuse_least=0) as s:
        y = x
        for _ in range(8):
            y = da.sin(y) + da.exp(-abs(y))
        z = y.rechunk(500)[da.from_array(cupy.arange(1000), chunks=500) % 3 > 0]
        programs = [t.fused.program for t in tasks_of(s.plan(z)) if isinstance(t, CompressTask)]
        assert len(programs) == 2
        assert all(k.operations() <= 2 * 500 for p in programs for k in p.kernels)
        want = y.compute(scheduler="sync").get()[np.arange(1000) % 3 > 0]
        np.testing.assert_allclose(host(z.compute()), want, rtol=1e-9)


@pytest.mark.parametrize("name", REDUCED)
def test_all_of_it_is_kernels(scheduler, name):
    _, arrays = collections((6, 30), "f8")
    tasks = tasks_of(scheduler.plan(REDUCED[name](da, *arrays)))
    assert [t for t in tasks if kernels_of(t)]
    left = [t for t in tasks if not kernels_of(t)]
    assert not [t for t in left if "getitem" in repr(getattr(t, "key", ""))]


def test_only_the_last_step_of_an_extreme_is_none(scheduler):
    x = da.from_array(cupy.arange(40.0), chunks=10).persist()
    tasks = tasks_of(scheduler.plan(x[x > 25].max()))
    assert len([t for t in tasks if type(t) is OptionalTask]) == 4
    assert float(x[x > 25].min().compute()) == 26
    with pytest.raises(ValueError, match="zero-size array to reduction operation"):
        x[x > 99].max().compute()
    assert float(x[x > 25].max().compute()) == 39


def test_a_function_that_writes_to_what_it_selects_is_a_kernel(scheduler):
    def clean(b):
        b = b.copy()
        b[b > 0.9] = cupy.sqrt(b[b > 0.9])
        b[b < 0.1] -= 1
        v = b[b < 0.2]
        v -= v.mean()
        return b + (v**2).sum()

    x = np.random.default_rng(0).random((300, 40))
    y = da.from_array(cupy.asarray(x), chunks=(300, 40)).map_blocks(clean)
    assert [t for t in tasks_of(scheduler.plan(y)) if kernels_of(t)]
    want = np.where(x > 0.9, np.sqrt(x), x)
    want = np.where(want < 0.1, want - 1, want)
    picked = want[want < 0.2]
    np.testing.assert_allclose(host(y.compute()), want + ((picked - picked.mean()) ** 2).sum())


def test_more_than_fits():
    """Blocks that are away while others are reduced."""
    x = np.random.default_rng(0).normal(size=(400, 1000))
    with gpuscheduler.Scheduler("cuda:0,0", memory_limit="1 MB") as s:
        y = da.from_array(x, chunks=(20, 1000)).map_blocks(cupy.asarray)
        assert "cuda" in repr(s)
        for z, want in [
            (y[y > 0.5].mean(), x[x > 0.5].mean()), (y[y > 3].max(), x[x > 3].max()),
            (y[y > 0.5].std(), x[x > 0.5].std()),
        ]:  # fmt: skip
            assert np.isclose(float(z.compute()), want)


def test_blocks_that_are_no_rows_are_read_where_they_are():
    """Dask makes one axis of an array before it selects by a mask; nobody has to, for a sum."""
    x = np.random.default_rng(0).random((64, 60))
    with gpuscheduler.Scheduler("cuda:0", check=True, fuse_least=0) as s:
        y = da.from_array(cupy.asarray(x), chunks=(16, 20)).persist()
        z = (da.sqrt(y[y > 0.5]) + 1).sum()
        (kernel, *_), *_ = (kernels_of(t)[0].program.kernels for t in tasks_of(s.plan(z))[12:])
        assert len(kernel.shape) == 2
        keys = [str(getattr(t, "key", "")) for t in tasks_of(s.plan(z))]
        assert not [key for key in keys if "reshape" in key or "('gt" in key or "split" in key]
        for _ in range(2):
            np.testing.assert_allclose(host(z.compute()), (np.sqrt(x[x > 0.5]) + 1).sum())
        np.testing.assert_allclose(host((y.ravel() * 2)[100:200].compute()), x.ravel()[100:200] * 2)
