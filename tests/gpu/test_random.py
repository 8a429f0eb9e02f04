"""Random numbers on GPUs: those of the collection, whatever computes it."""

import runpy
from pathlib import Path

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")

import dask
import dask.array as da

import gpuscheduler
from gpuscheduler.fusion.task import KernelTask
from gpuscheduler.plan.batching import Batch
from gpuscheduler.random import Philox, default_rng

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::gpuscheduler.errors.GpuUnused"),
]

TABLES = runpy.run_path(str(Path(__file__).parents[1] / "test_random.py"))
CLOSED, BY_BLOCK, METHODS = (TABLES[name] for name in ("CLOSED", "BY_BLOCK", "METHODS"))
#: Methods whose numbers have the same bits on GPUs and on the host: they call no function of libm.
EXACT = {"random", "uniform", "triangular", "integers"}
#: CuPy's generator has nothing for these.
HOST_ONLY = {"multivariate_hypergeometric"}


@pytest.fixture(params=["cuda:0", "cuda:0,0"])
def gpus(request):
    with gpuscheduler.Scheduler(request.param, numpy="gpu", check=True) as s:
        yield s


def draw(method, library="numpy", chunks=(16, 13), **kwargs):
    rng = default_rng(Philox(5, library))
    return getattr(rng, method)(*METHODS[method], size=(61, 40), chunks=chunks, **kwargs)


def check(method, found, want):
    """The same bits, or those of another libm."""
    assert (found.shape, found.dtype) == (want.shape, want.dtype)
    if method in EXACT or method in BY_BLOCK:
        np.testing.assert_array_equal(found, want)
    elif method == "geometric":  # a logarithm, rounded up
        assert (found != want).mean() < 1e-3
    else:
        rtol = 1e-5 if found.dtype == np.float32 else 1e-13
        np.testing.assert_allclose(found, want, rtol=rtol, atol=rtol)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("method", METHODS)
def test_numpys_blocks_are_the_same_on_gpus(gpus, method):
    x = draw(method)
    want = x.compute(scheduler="sync")
    found = x.compute()
    assert type(found) is np.ndarray
    check(method, found, want)
    np.testing.assert_array_equal(draw(method, chunks=(16, 13)).compute(), found)
    if method in CLOSED:
        np.testing.assert_array_equal(draw(method, chunks=(61, 9)).compute(), found)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("method", sorted(METHODS.keys() - HOST_ONLY))
@pytest.mark.parametrize("dtype", ["f8", "f4"])
def test_cupys_blocks_are_the_same_on_every_scheduler(method, dtype):
    """Bit by bit, also in the kernel of a reader."""
    kwargs = {} if method in INTEGRAL else {"dtype": dtype}
    x = draw(method, "cupy", **kwargs)
    assert type(x._meta) is cupy.ndarray
    want = x.compute(scheduler="sync")
    assert type(want) is cupy.ndarray
    assert want.dtype == x.dtype
    for scheduler in ("threads", "sync"):
        np.testing.assert_array_equal(x.compute(scheduler=scheduler).get(), want.get())
    for devices in ("cuda:0", "cuda:0,0"):
        with gpuscheduler.Scheduler(devices, check=True):
            np.testing.assert_array_equal(x.compute().get(), want.get())
            np.testing.assert_array_equal((x + 0).compute().get(), (want + 0).get())
    if method in CLOSED:
        check(method, want.get(), draw(method, **kwargs).compute(scheduler="sync"))


INTEGRAL = {
    "binomial", "geometric", "hypergeometric", "integers", "logseries", "multinomial",
    "negative_binomial", "poisson", "zipf",
}  # fmt: skip


def test_large_blocks():
    for method in ("random", "standard_normal", "integers"):
        rng = default_rng(Philox(1, "cupy"))
        x = getattr(rng, method)(*CLOSED[method], size=(1001, 1001), chunks=(500, 1001))
        want = x.compute(scheduler="sync").get()
        with gpuscheduler.Scheduler("cuda:0"):
            np.testing.assert_array_equal(x.compute().get(), want)
            part = x[7:900:3, ::-2]
            np.testing.assert_array_equal(part.compute().get(), want[7:900:3, ::-2])
        np.testing.assert_array_equal(part.compute(scheduler="sync").get(), want[7:900:3, ::-2])


def test_dasks_generators_draw_dasks_numbers_on_gpus(gpus):
    """On the host; what reads them is a kernel all the same."""
    with dask.config.set({"array.backend": "numpy"}):
        made = [
            da.random.default_rng(3).normal(1, 2, size=(61, 40), chunks=16),
            da.random.RandomState(3).normal(1, 2, size=(61, 40), chunks=16),
            da.random.normal(1, 2, size=(61, 40), chunks=16),
            da.random.default_rng(3).poisson(4, size=(61, 40), chunks=16),
        ]
    for x in made:
        want = x.compute(scheduler="sync")
        found = x.compute()
        assert type(found) is np.ndarray
        np.testing.assert_array_equal(found, want)
        y = (x * 2 + 1).sum(axis=0)
        np.testing.assert_allclose(y.compute(), (want * 2 + 1).sum(axis=0))
        tasks = [step.task for step in gpus.plan(y).steps]
        assert any(isinstance(t, (KernelTask, Batch)) for t in tasks)


def test_dasks_module_draws_by_position_while_the_backend_is_cupy():
    def made(chunks):
        return [
            da.random.default_rng(7).normal(3, 2, size=(41, 30), chunks=chunks),
            da.random.RandomState(7).normal(3, 2, size=(41, 30), chunks=chunks),
            da.random.RandomState(7).randint(0, 90, size=(41, 30), chunks=chunks),
        ]

    with gpuscheduler.Scheduler("cuda:0,0") as s:
        first = made((10, 7))
        found = [x.compute() for x in first]
        for x, other in zip(found, made(41), strict=True):
            assert type(x) is cupy.ndarray
            np.testing.assert_array_equal(x.get(), other.compute().get())
        assert all(isinstance(t.task, (KernelTask, Batch)) for t in s.plan(first[0] + 1).steps)
        da.random.seed(4)
        x = da.random.random((20, 20), chunks=7)
        want = x.compute().get()
        da.random.seed(4)
        np.testing.assert_array_equal(da.random.random((20, 20), chunks=9).compute().get(), want)
        key = default_rng(Philox(7, "cupy")).normal(3, 2, size=(41, 30), chunks=8)
        np.testing.assert_array_equal(key.compute().get(), found[0].get())
    for x, want in zip(first, found, strict=True):
        np.testing.assert_array_equal(x.compute(scheduler="threads").get(), want.get())
    np.testing.assert_array_equal(x.compute(scheduler="sync").get(), found[-1].get())


@pytest.mark.real
def test_cupys_generators_draw_cupys_numbers():
    """Those that the user has named."""
    rng = da.random.Generator(cupy.random.XORWOW(3))
    state = da.random.RandomState(3, RandomState=cupy.random.RandomState)
    for x in (rng.random((64, 64), chunks=16), state.normal(size=(64, 64), chunks=16)):
        want = x.compute(scheduler="sync").get()
        for devices in ("cuda:0", "cuda:0,0"):
            with gpuscheduler.Scheduler(devices):
                np.testing.assert_array_equal(x.compute().get(), want)
    with gpuscheduler.Scheduler("cuda:0"):
        ours = da.random.RandomState(3).normal(size=(64, 64), chunks=16).compute().get()
    assert not np.isin(ours, want).any()
