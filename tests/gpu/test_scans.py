"""What accumulates along an axis: Dask's cumulative functions, and NumPy's in users' functions."""

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")

import dask
import dask.array as da

import gpuscheduler
from gpuscheduler.frontend.task import members_of

pytestmark = pytest.mark.gpu

FUNCTIONS = {
    "cumsum": (da.cumsum, np.cumsum), "cumprod": (da.cumprod, np.cumprod),
    "nancumsum": (da.nancumsum, np.nancumsum), "nancumprod": (da.nancumprod, np.nancumprod),
}  # fmt: skip
SHAPES = {
    "rows": ((130, 217), (50, 100)),
    "line": ((100_003,), (20_000,)), "short": ((3, 5), (2, 2)), "one": ((1, 1), (1, 1)),
    "large": ((600, 200), (200, 100)), "cube": ((20, 30, 40), (7, 30, 16)),
}  # fmt: skip


def kernels_of(scheduler, collection):
    """The kernels of a plan."""
    tasks = [s.task for s in scheduler.plan(collection).steps]
    programs = [getattr(t, "program", None) for x in tasks for t in (members_of(x) or [x])]
    return [k for p in programs if p for k in p.kernels]


def numbers(shape, dtype="f8", seed=0):
    x = np.random.default_rng(seed).normal(1, 0.01, shape)
    return x.astype(dtype)


def on_devices(scheduler, x, chunks):
    """An array of CuPy blocks; where it does not fit, they come from the host."""
    if scheduler.options.memory_limit is None:
        return da.from_array(cupy.asarray(x), chunks=chunks)
    return da.from_array(x, chunks=chunks).map_blocks(cupy.asarray)


@pytest.fixture(scope="module")
def scheduler(request):
    """All devices, and too little memory for an array."""
    which = {"all": "auto", "little": "cuda:0,0"}[request.param]
    limit = {"little": "500 kB"}.get(request.param)
    with gpuscheduler.Scheduler(which, memory_limit=limit) as s:
        yield s


MANY = [("all", "cumsum", shape, "sequential") for shape in SHAPES]
MANY += [("all", name, "rows", "sequential") for name in FUNCTIONS if name != "cumsum"]
MANY += [("all", "cumsum", "rows", "blelloch"), ("little", "cumsum", "large", "sequential")]


@pytest.mark.parametrize(("scheduler", "name", "shape", "method"), MANY, indirect=["scheduler"])
def test_cumulative_functions_give_what_numpy_gives(scheduler, name, shape, method):
    (whole, chunks), (ours, theirs) = SHAPES[shape], FUNCTIONS[name]
    for dtype in ("f4", "i4") if shape == "rows" else ("f8",):
        x = numbers(whole, dtype)
        if name.startswith("nan") and dtype != "i4":
            x[np.random.default_rng(1).random(whole) < 0.1] = np.nan
        for axis in range(len(whole)):
            d = on_devices(scheduler, x, chunks)
            got = ours(-d, axis=axis, method=method)
            if whole != (1, 1):
                assert any(k.is_scan for k in kernels_of(scheduler, got))
            got = got.compute()
            want = theirs(-x, axis=axis)
            assert got.dtype == want.dtype
            np.testing.assert_allclose(
                cupy.asnumpy(got), want, rtol=2e-4 if dtype == "f4" else 1e-9
            )


@pytest.mark.parametrize("persisted", [True, False])
@pytest.mark.parametrize("axis", [0, 1])
def test_each_block_is_read_twice_and_written_once(axis, persisted):
    """One kernel computes the total of a block, another one its part of the result.

    So it is with blocks that are parts of one array.
    """
    with gpuscheduler.Scheduler("cuda:0") as s:
        x = da.from_array(cupy.asarray(numbers((400, 400))), chunks=100)
        x = x.persist() if persisted else x
        y = da.cumsum(x * 2, axis=axis)
        kernels = kernels_of(s, y)
        scans = [k for k in kernels if k.is_scan]
        sums = [r for k in kernels if not k.is_scan for r in k.reductions]
        assert len(scans) == 16
        assert len(sums) == 8  # not of the first block, which is there, and not of the last
        got = cupy.asnumpy(y.compute())
        np.testing.assert_allclose(got, np.cumsum(cupy.asnumpy(x.compute()) * 2, axis))


OWN = {
    "cumsum": lambda b: np.cumsum(b, axis=1), "method": lambda b: b.cumsum(axis=0),
    "all of it": lambda b: b.cumsum().reshape(b.shape),
    "maximum": lambda b: np.maximum.accumulate(b, axis=1),
    "minimum": lambda b: np.minimum.accumulate(b), "fmax": lambda b: np.fmax.accumulate(b, axis=1),
    "add": lambda b: np.add.accumulate(b, axis=-1),
    "cumulative_sum": lambda b: np.cumulative_sum(b, axis=1, include_initial=True)[:, :-1],
    "drawdown": lambda b: b - np.maximum.accumulate(np.cumsum(b, axis=1), axis=1),
    "share": lambda b: b.cumsum(axis=1) / b.cumsum(axis=1)[:, -1:],
    "last": lambda b: b + np.cumsum(b, axis=0)[-1], "first": lambda b: b + np.cumsum(b, axis=0)[0],
    "reversed": lambda b: np.cumsum(b[:, ::-1], axis=1)[:, ::-1],
    "of a transpose": lambda b: np.cumsum(b.T, axis=0).T,
    "integral": lambda b: np.cumsum(np.cumsum(b, axis=0), axis=1),
    "two at a time": lambda b: np.cumsum(b, axis=1) * np.cumprod(b, axis=1),
    "paths": lambda b: np.exp(np.cumsum(0.1 * b - 0.1, axis=1)).mean(axis=1, keepdims=True) + b,
    "typed": lambda b: np.cumsum(b > 1, axis=1, dtype="i4"), "bools": lambda b: np.cumsum(b > 1, 0),
    "written": lambda b: _written(np.cumsum(b, axis=1)),
}  # fmt: skip


def _written(y):
    last = y[:, -1:]
    last += 1
    return y


WITH_LITTLE = [("little", name) for name in ("cumsum", "drawdown", "integral")]


@pytest.mark.parametrize(
    ("scheduler", "name"), [*[("all", name) for name in OWN], *WITH_LITTLE], indirect=["scheduler"]
)
def test_functions_of_users_accumulate(scheduler, name):
    if name == "cumulative_sum" and not hasattr(np, "cumulative_sum"):
        pytest.skip("NumPy has it from 2.1 on")
    little = scheduler.options.memory_limit is not None
    rows, function = 60 if little else 20, OWN[name]
    x = numbers((4 * rows, 170))
    d = on_devices(scheduler, x, (rows, 170))
    want = np.concatenate([function(x[n : n + rows]) for n in range(0, 4 * rows, rows)])
    y = d.map_blocks(function, dtype=want.dtype, meta=d._meta.astype(want.dtype))
    if name != "last":
        assert any(k.is_scan for k in kernels_of(scheduler, y))
    got = y.compute()
    assert got.dtype == want.dtype
    np.testing.assert_allclose(cupy.asnumpy(got), want, rtol=1e-10)


def test_new_collections_of_the_same_kind_and_the_same_again():
    with gpuscheduler.Scheduler("cuda:0"):
        for n in range(4):
            x = numbers((300, 200), seed=n)
            d = da.from_array(cupy.asarray(x), chunks=(100, 50)).persist()
            y = da.cumsum(d, axis=1)
            for _ in range(3):
                np.testing.assert_allclose(cupy.asnumpy(y.compute()), np.cumsum(x, axis=1))


def test_bits_are_the_same_on_any_number_of_devices_and_again():
    x = numbers((8, 30_000), "f4")
    found = set()
    for which in ("cuda:0", "auto", "cuda:0,0", "cuda:0"):
        with gpuscheduler.Scheduler(which):
            d = da.from_array(cupy.asarray(x), chunks=(4, 20_000))
            found.add(cupy.asnumpy(da.cumsum(d, axis=1).compute()).tobytes())
    assert len(found) == 1


def test_sums_of_float32_are_as_exact_as_float64_makes_them():
    x = np.full((4, 2**16), 0.1, "f4")
    with gpuscheduler.Scheduler("cuda:0"):
        d = da.from_array(cupy.asarray(x), chunks=(4, 2**15))
        got = cupy.asnumpy(da.cumsum(d, axis=1).compute())
    np.testing.assert_allclose(got, np.cumsum(x, axis=1, dtype="f8"), rtol=3e-7)


def test_without_fusion_cupy_does_it():
    x = numbers((100, 100))
    with gpuscheduler.Scheduler("cuda:0", fuse=False):
        d = da.from_array(x, chunks=50).map_blocks(cupy.asarray)
        got, total = dask.compute(da.cumsum(d, axis=0), d.sum())
    np.testing.assert_allclose(cupy.asnumpy(got), np.cumsum(x, axis=0))
    np.testing.assert_allclose(float(total), x.sum())
