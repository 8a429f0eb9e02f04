"""`dask_backend` on real GPUs: where chunks are, what they hold, how they are spread."""

from __future__ import annotations

import runpy
from pathlib import Path

import dask
import dask.array as da
import numpy as np
import pytest
from scipy import stats

from gpuscheduler.devices.cuda import dask_backend, random_generator

pytestmark = [pytest.mark.gpu, pytest.mark.real]
cupy = pytest.importorskip("cupy")

TABLES = runpy.run_path(str(Path(__file__).parents[1] / "devices" / "test_dask_backend.py"))
CONTINUOUS, DISCRETE, collections, variance_error = (
    TABLES[name] for name in ("CONTINUOUS", "DISCRETE", "collections", "variance_error")
)


@pytest.fixture(autouse=True)
def cupy_backend():
    dask_backend.register()
    with dask.config.set({"array.backend": "cupy"}):
        yield
    dask_backend.unregister()


@pytest.fixture(params=["sync", "threads"])
def scheduler(request):
    with dask.config.set(scheduler=request.param):
        yield request.param


def devices():
    return range(cupy.cuda.runtime.getDeviceCount())


@pytest.mark.parametrize("what", ["linspace", "eye", "indices", "no indices", "fromfunction"])
def test_made_on_the_gpu(what, scheduler):
    check(*collections()[what])


@pytest.mark.parametrize("what", ["tri", "diag", "diag of a collection", "meshgrid", "sparse"])
def test_made_on_the_gpu_of_arrays(what, scheduler):
    check(*collections()[what])


def check(made, expected):
    assert type(made._meta) is cupy.ndarray
    for chunk in made.to_delayed().ravel():
        assert type(chunk.compute()) is cupy.ndarray
    assert made.dtype == expected.dtype
    np.testing.assert_array_equal(cupy.asnumpy(made.compute()), expected)


@pytest.mark.parametrize("num", [0, 1, 2, 10, 1000])
@pytest.mark.parametrize("endpoint", [True, False])
@pytest.mark.parametrize("dtype", [None, "f4", "i8"])
@pytest.mark.parametrize("ends", [(0, 1), (-3.3, 7.1), (5, -5), (2, 2)])
def test_linspace_is_numpys_value_for_value(num, endpoint, dtype, ends):
    x = da.linspace(*ends, num, endpoint, chunks=7, dtype=dtype).compute(scheduler="sync")
    expected = np.linspace(*ends, num, endpoint, dtype=dtype)
    np.testing.assert_array_equal(cupy.asnumpy(x), expected)


@pytest.mark.parametrize("k", [-9, -4, 0, 3, 9])
@pytest.mark.parametrize(("n", "m"), [(6, None), (5, 8), (8, 5)])
def test_eye(n, m, k):
    x = da.eye(n, 3, m, k, dtype="i4").compute(scheduler="sync")
    np.testing.assert_array_equal(cupy.asnumpy(x), np.eye(n, m, k, dtype="i4"))


def test_chunks_are_made_where_the_task_runs():
    """Built on the first device, computed on each."""
    x = da.linspace(0, 1, 100, chunks=30)
    y = da.eye(10, chunks=4)
    z = da.random.default_rng(3).normal(size=(50, 60), chunks=(20, 30))
    answers = []
    for i in devices():
        with cupy.cuda.Device(i):
            made = [c.compute(scheduler="sync") for c in (x, y, z)]
            assert [m.device.id for m in made] == [i] * 3
            answers.append([cupy.asnumpy(m) for m in made])
    for other in answers[1:]:
        for a, b in zip(answers[0], other, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("method", CONTINUOUS)
@pytest.mark.parametrize("dtype", ["f8", "f4"])
def test_continuous(method, dtype, scheduler):
    args, expected = CONTINUOUS[method]
    x = getattr(da.random.default_rng(7), method)(
        *args, size=(200, 300), chunks=(70, 110), dtype=dtype
    )
    assert type(x._meta) is cupy.ndarray
    values = x.compute()
    assert type(values) is cupy.ndarray
    assert (values.shape, values.dtype, x.dtype) == (x.shape, dtype, dtype)
    assert stats.kstest(cupy.asnumpy(values).ravel(), expected.cdf).pvalue > 0.0005
    np.testing.assert_array_equal(cupy.asnumpy(values), cupy.asnumpy(x.compute()))


@pytest.mark.parametrize("method", DISCRETE)
def test_discrete(method, scheduler):
    args, expected = DISCRETE[method]
    x = getattr(da.random.default_rng(7), method)(*args, size=(200, 300), chunks=(70, 110))
    assert type(x._meta) is cupy.ndarray
    values = x.compute()
    assert type(values) is cupy.ndarray
    assert (values.shape, values.dtype, x.dtype) == (x.shape, np.int64, np.int64)
    host = cupy.asnumpy(values)
    assert abs(host.mean() - expected.mean()) < 5 * expected.std() / np.sqrt(host.size)
    assert host.var() == pytest.approx(expected.var(), rel=variance_error(expected, host.size))


def test_large_chunks_use_every_state_more_than_once():
    """Ten times as many elements as states; no two equal ones in a row of states."""
    x = cupy.asnumpy(
        da.random.default_rng(0).random(10 * random_generator.LANES, chunks=-1).compute()
    )
    assert len(np.unique(x)) > 0.9995 * x.size  # CuPy's doubles have 32 random bits
    assert stats.kstest(x, "uniform").pvalue > 0.001
    assert abs(np.corrcoef(x[1:], x[:-1])[0, 1]) < 0.005


def test_chunks_have_seeds_of_63_bits():
    seed = np.random.SeedSequence(3)
    source = random_generator._source(cupy, seed, 1000)
    assert (
        source.bit_generator._seed
        == random_generator._WideSeed.from_sequence(seed).generate_state(1)[0]
    )
    assert source.bit_generator._seed > 2**32

    # the upper half is not lost on the way to the device
    class Low(random_generator._WideSeed):
        def generate_state(self, n_words, dtype=np.uint32):
            return super().generate_state(n_words, dtype) & np.uint64(2**32 - 1)

    truncated = cupy.random.Generator(cupy.random.Philox4x3210(Low.from_sequence(seed), size=1024))
    a, b = source.random(1000), truncated.random(1000)
    assert not (a == b).any()


def test_multinomial(scheduler):
    x = da.random.default_rng(0).multinomial(20, [0.5, 0.0, 0.3, 0.2], size=5000, chunks=2000)
    assert type(x._meta) is cupy.ndarray
    values = cupy.asnumpy(x.compute())
    assert values.shape == x.shape == (5000, 4)
    assert (values.sum(axis=-1) == 20).all()
    np.testing.assert_allclose(values.mean(axis=0), [10, 0, 6, 4], atol=0.2)


def test_parameters_may_be_arrays(scheduler):
    rng = da.random.default_rng(0)
    expected = [[0, 100, 200, 300, 400, 500]] * 2
    for loc in da.arange(6, chunks=3) * 100.0, np.arange(6) * 100.0:
        x = rng.normal(loc, 1e-9, size=(2, 6), chunks=(1, 3))
        assert type(x._meta) is cupy.ndarray
        assert x.compute().round().get().tolist() == expected
    x = rng.binomial(da.arange(6, chunks=3), 1, size=6, chunks=3)
    assert x.compute().get().tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("dtype", ["i1", "u1", "i4", "u4", "i8", "u8"])
def test_integers(dtype):
    low = 0 if dtype[0] == "u" else -3
    x = da.random.default_rng(0).integers(low, 9, size=10_000, chunks=3000, dtype=dtype)
    values = x.compute(scheduler="sync").get()
    assert values.dtype == x.dtype == dtype
    np.testing.assert_array_equal(np.unique(values), np.arange(low, 9))


@pytest.mark.parametrize("bits", [30, 31, 32, 33, 40, 63])
def test_wide_integers(bits):
    """CuPy #9745: some ranges were left partly unwritten."""
    low = -(2 ** (bits - 1))
    x = da.random.default_rng(0).integers(low, low + 2**bits, size=10_000, chunks=-1)
    values = x.compute(scheduler="sync").get() / 2.0**bits
    assert stats.kstest(values, stats.uniform(-0.5, 1).cdf).pvalue > 0.0005


def test_what_stays_on_the_host_says_so():
    rng = da.random.default_rng(0)
    assert sorted(rng.permutation(5).compute().get()) == [0, 1, 2, 3, 4]
    with pytest.raises(NotImplementedError, match="Generator.choice"):
        rng.choice(5, 3)
    host = da.random.default_rng(np.random.PCG64(0)).choice(5, 3)  # the remedy
    assert type(host.to_backend("cupy").compute()) is cupy.ndarray


@pytest.mark.parametrize(
    "method", sorted((CONTINUOUS.keys() | DISCRETE.keys()) - {"random", "integers"})
)
def test_random_state(method, scheduler):
    args, expected = (CONTINUOUS | DISCRETE)[method]

    def draw(seed):
        return getattr(da.random.RandomState(seed), method)(*args, size=(200, 300), chunks=(70, 99))

    x = draw(7)
    assert type(x._meta) is cupy.ndarray
    values = cupy.asnumpy(x.compute())
    np.testing.assert_array_equal(values, cupy.asnumpy(draw(7).compute()))
    assert (values != cupy.asnumpy(draw(8).compute())).any()
    assert np.median(values) == pytest.approx(expected.median(), abs=0.05 * expected.ppf(0.9))


def test_module_functions():
    for x in da.random.random((5, 6), chunks=3), da.random.normal(3, 1, (5, 6), chunks=3):
        assert type(x._meta) is type(x.compute(scheduler="sync")) is cupy.ndarray


def test_processes():
    x = da.random.default_rng(5).normal(size=(4, 3), chunks=2)
    np.testing.assert_array_equal(
        cupy.asnumpy(x.compute(scheduler="processes", num_workers=1)),
        cupy.asnumpy(x.compute(scheduler="sync")),
    )
