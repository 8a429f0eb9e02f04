"""Functions on grids: coordinates are made in the kernels, on every device the same."""

import cmath
import math

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")

import dask.array as da
from dask import config

import gpuscheduler
from gpuscheduler import axis, geomaxis, mesh
from gpuscheduler.codegen.cpu import evaluate
from gpuscheduler.ir import hoist

from .test_executor import DEVICES, host

pytestmark = pytest.mark.gpu
ROWS, COLUMNS = 60, 50


def distance(x, y):
    return math.sqrt(x * x + y * y)


def separable(x, y, scale):
    return scale * math.exp(-x * x) * math.cos(y) + math.sin(x) * y


def escape(x, y, most):
    c, z, n = complex(x, y), 0j, 0
    while n < most and z.real * z.real + z.imag * z.imag < 4.0:
        z, n = z * z + c, n + 1
    return n


def zeta(x, y):
    total = 0j
    for n in range(1, 30):
        total += cmath.exp(-complex(x, y) * math.log(n))
    return total


def polar(x, y):
    return math.hypot(x, y), math.atan2(y, x)


def at_each_point(f, args, *axes):
    every = np.meshgrid(*axes, indexing="ij")
    found = [f(*point, *args) for point in zip(*(a.ravel().tolist() for a in every), strict=True)]
    return np.array(found).reshape(*every[0].shape, *np.shape(found[0]))


@pytest.fixture(params=DEVICES)
def scheduler(request, monkeypatch):
    monkeypatch.setattr(hoist, "LEAST_POINTS", 1)  # rows and columns in kernels of their own
    with gpuscheduler.Scheduler(devices=request.param, check=True) as s:
        yield s


def waves(x, y):
    """Of more than there are arguments for what is computed for each row and column."""
    total = 0j
    for k in range(90):
        total += cmath.exp(complex(-k * x * x / 50, k * y)) / (k + 0.1)
    return total


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("f", "args", "how"),
    [
        (distance, (), "auto"), (separable, (2.0,), "auto"), (escape, (20,), "auto"),
        (zeta, (), "trace"), (zeta, (), "numba"), (waves, (), "trace"),
    ],
)  # fmt: skip
def test_every_point(scheduler, f, args, how):
    if f is escape or how == "numba":
        pytest.importorskip("numba_cuda")
    x, y = np.linspace(-1, 1, ROWS), np.geomspace(0.5, 2, COLUMNS)
    axes = axis(-1, 1, ROWS), geomaxis(0.5, 2, COLUMNS)
    z = mesh(f, axes, args=args, chunks=(40, 50), how=how)
    wanted = at_each_point(f, args, x, y)
    result = z.compute()
    assert isinstance(result, cupy.ndarray)
    assert result.dtype == z.dtype
    np.testing.assert_allclose(host(result), wanted, rtol=1e-12, atol=1e-13)
    np.testing.assert_array_equal(z.to_backend("numpy").compute(), host(result))
    np.testing.assert_array_equal(host(z[::7, 3:].compute()), host(result)[::7, 3:])
    listed = host(z[[3, 57, 7], ::2].compute())
    np.testing.assert_allclose(listed, host(result)[[3, 57, 7], ::2], rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(host(z.sum().compute()), wanted.sum(), rtol=1e-11)


def test_nothing_is_compiled_for_the_cpu(tmp_path, monkeypatch):
    """To know the types that a function gives takes no code of it."""
    passes = pytest.importorskip("numba.core.typed_passes")
    monkeypatch.setattr(passes.NativeLowering, "run_pass", None)
    x, y = np.linspace(-2, 1, 30), np.linspace(-1, 1, 20)
    with (
        config.set({"gpuscheduler.cache-directory": str(tmp_path)}),
        gpuscheduler.Scheduler("cuda:0", check=True),
    ):
        z = mesh(escape, (axis(-2, 1, 30), axis(-1, 1, 20)), args=(25,))
        assert z.dtype == np.dtype("i8")
        np.testing.assert_array_equal(host(z.compute()), at_each_point(escape, (25,), x, y))


def test_several_values(scheduler):
    x, y = np.linspace(-1, 1, ROWS), np.linspace(-2, 2, COLUMNS)
    r, angle = mesh(polar, (axis(-1, 1, ROWS), axis(-2, 2, COLUMNS)), chunks=25)
    wanted = at_each_point(polar, (), x, y)
    both = da.compute(r, angle)
    np.testing.assert_allclose(host(both[0]), wanted[..., 0], rtol=1e-14)
    np.testing.assert_allclose(host(both[1]), wanted[..., 1], rtol=1e-14)


@pytest.mark.parametrize("how", ["numpy", "trace"])
@pytest.mark.parametrize("get", ["gpu", "sync"])
def test_what_is_the_same_everywhere_is_on_the_device_too(scheduler, how, get):
    both = mesh(lambda x, y: (2 * x, 3), (axis(-1, 1, 60), axis(-2, 2, 50)), chunks=25, how=how)
    for z, wanted in zip(both, (np.linspace(-2, 2, 60)[:, None], 3), strict=True):
        result = z.compute(scheduler=get)
        assert isinstance(result, cupy.ndarray)
        assert result.dtype == z.dtype
        np.testing.assert_array_equal(host(result), np.broadcast_to(wanted, (60, 50)))


def test_reductions_and_what_follows(scheduler):
    x, y = np.linspace(-1, 1, ROWS), np.linspace(-2, 2, COLUMNS)
    z = mesh(distance, (axis(-1, 1, ROWS), axis(-2, 2, COLUMNS)), chunks=25)
    wanted = at_each_point(distance, (), x, y)
    assert int((z > 1).sum().compute()) == (wanted > 1).sum()
    np.testing.assert_array_equal(host(z.argmax(axis=1).compute()), wanted.argmax(axis=1))
    np.testing.assert_allclose(host(z.std(axis=0).compute()), wanted.std(axis=0), rtol=1e-12)
    chosen = da.where(z > 1, da.sin(z), 0).mean().compute()
    np.testing.assert_allclose(float(chosen), np.where(wanted > 1, np.sin(wanted), 0).mean())


HISTOGRAMS = {"even": (20, (0, 2)), "apart": (np.geomspace(1e-2, 3, 9), None)}


@pytest.mark.parametrize("name", HISTOGRAMS)
def test_histograms_are_counted_where_tiles_are_computed(scheduler, monkeypatch, name):
    bins, span = HISTOGRAMS[name]
    z = mesh(distance, (axis(0, 1, ROWS), axis(-1, 1, COLUMNS)), chunks=16)
    x = da.from_array(np.asarray(host(z.compute()), "f4"), chunks=(20, 50)).map_blocks(cupy.asarray)
    x = x.persist()

    def refuse(*args, **kwargs):
        raise AssertionError("computed on the host")

    monkeypatch.setattr(evaluate, "evaluate", refuse)
    found = [da.histogram(a, bins, span)[0] for a in (z, x, x.T * 2)]
    for a, counts in zip((z, x, x * 2), found, strict=True):
        for _ in range(3):
            np.testing.assert_array_equal(
                host(counts.compute()), np.histogram(host(a.compute()), bins, span)[0]
            )


@pytest.mark.parametrize("f", [distance, separable])
def test_devices_agree_to_the_bit(f):
    args = (2.0,) if f is separable else ()
    results = []
    for devices in DEVICES:
        with gpuscheduler.Scheduler(devices=devices):
            z = mesh(f, (axis(-1, 1, ROWS), axis(-2, 2, COLUMNS)), args=args, chunks=10)
            results.append([host(v) for v in da.compute(z, z.sum(), z.mean(axis=0))])
    for found in results[1:]:
        for a, b in zip(found, results[0], strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.real
def test_more_points_than_32_bits_count():
    n = 2**17
    with gpuscheduler.Scheduler(devices="cuda:0"):
        z = mesh(lambda x, y: x + y, (axis(0, n - 1, n), axis(0, n - 1, n)))  # 2**34 points
        assert float(z.sum().compute()) == pytest.approx(n * n * (n - 1.0), rel=1e-12)
        far = mesh(lambda x: x, (axis(0, 2**40 - 1, 2**40),))
        np.testing.assert_array_equal(
            host(far[2**39 :: 2**37].compute()), 2.0**39 + 2.0**37 * np.arange(4)
        )
