"""Fourier transforms along chunked axes on GPUs."""

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")

import dask.array as da

import gpuscheduler
from gpuscheduler import fft

pytestmark = pytest.mark.gpu


def on_gpu(a, chunks):
    return da.from_array(a, chunks=chunks).to_backend("cupy")


def numbers(shape, dtype="f8"):
    rng = np.random.default_rng(0)
    a = rng.standard_normal(shape)
    if np.dtype(dtype).kind == "c":
        a = a + 1j * rng.standard_normal(shape)
    return a.astype(dtype)


@pytest.fixture(scope="module", params=["cuda:0", "cuda:0,0"])
def scheduler(request):
    with gpuscheduler.Scheduler(request.param, check=True) as s:
        yield s


def check(got, want):
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    value = got.compute()
    assert isinstance(value, cupy.ndarray)
    assert (value.shape, value.dtype) == (want.shape, want.dtype)
    rtol = 1e-4 if want.dtype in ("f4", "c8") else 1e-10
    np.testing.assert_allclose(value.get(), want, atol=rtol * np.abs(want).max())


@pytest.mark.parametrize("dtype", ["f4", "f8", "c8", "c16", "i4"])
@pytest.mark.parametrize("name", ["fft", "ifft", "rfft", "irfft", "hfft", "ihfft"])
def test_one_axis(scheduler, name, dtype):
    a = numbers((8, 9), dtype)
    if name in ("rfft", "ihfft") and dtype[0] == "c":
        return
    for options in ({}, {"axis": 0, "n": 6}, {"n": 12, "norm": "ortho"}):
        check(getattr(fft, name)(on_gpu(a, 3), **options), getattr(np.fft, name)(a, **options))


@pytest.mark.parametrize("name", ["fftn", "ifftn", "rfftn", "irfftn", "fft2", "irfft2"])
@pytest.mark.parametrize("chunks", [4, (2, 8, 10), (8, 8, 5)])
def test_several_axes(scheduler, name, chunks):
    a = numbers((8, 8, 10), "f8" if name[0] == "r" else "c16")
    check(getattr(fft, name)(on_gpu(a, chunks)), getattr(np.fft, name)(a))
    options = {"axes": (2, 0), "s": (7, 9)}
    check(getattr(fft, name)(on_gpu(a, chunks), **options), getattr(np.fft, name)(a, **options))


def test_back_again(scheduler):
    a = numbers((64, 48), "f4")
    x = on_gpu(a, 16)
    check(fft.irfftn(fft.rfftn(x), s=a.shape, axes=(0, 1)), a)
    check(fft.fftshift(x), np.fft.fftshift(a))
