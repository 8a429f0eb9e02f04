"""Fourier transforms along chunked axes: NumPy's values, and the fewest rechunks."""

import math
from itertools import product

import dask.array as da
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gpuscheduler
from gpuscheduler import fft as ours
from gpuscheduler.algorithms import fourier
from gpuscheduler.algorithms.capacity import Capacity
from gpuscheduler.algorithms.fourier import Transform, plan_transforms

OF_ONE = ["fft", "ifft", "rfft", "irfft", "hfft", "ihfft"]
OF_SEVERAL = ["fftn", "ifftn", "rfftn", "irfftn", "fft2", "ifft2", "rfft2", "irfft2"]


def numbers(shape, dtype="f8", seed=0):
    rng = np.random.default_rng(seed)
    a = rng.standard_normal(shape) * 9
    if np.dtype(dtype).kind == "c":
        a = a + 1j * rng.standard_normal(shape)
    return a.astype(dtype)


def takes_reals(name):
    return name.startswith(("rfft", "ihfft"))


def check(got, want, scheduler="sync"):
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    value = got.compute(scheduler=scheduler) if scheduler else got.compute()
    assert (value.shape, value.dtype) == (want.shape, want.dtype)
    tolerance = 1e-3 if want.dtype.itemsize <= 8 and want.dtype != "f8" else 1e-9
    np.testing.assert_allclose(value, want, atol=tolerance * (1 + np.abs(want).max(initial=0)))


@pytest.mark.parametrize("name", OF_ONE)
@pytest.mark.parametrize("dtype", ["f4", "f8", "c8", "c16", "i4", "u1", "?"])
def test_one_axis(name, dtype):
    if takes_reals(name) and dtype[0] == "c":
        with pytest.raises(TypeError, match="takes real numbers"):
            getattr(ours, name)(da.ones(4, dtype=dtype))
        return
    a = numbers((6, 7), dtype)
    for chunks, axis, n, norm in product(
        [2, -1, (6, 3), (2, 7)], [0, -1], [None, 4, 9], [None, "ortho", "forward"]
    ):
        options = {"axis": axis, "n": n, "norm": norm}
        want = getattr(np.fft, name)(a, **options)
        check(getattr(ours, name)(da.from_array(a, chunks=chunks), **options), want)


@pytest.mark.parametrize("name", OF_SEVERAL)
@pytest.mark.parametrize("chunks", [2, -1, (2, 5, 6), (4, 2, 6), (4, 5, 2), (4, 2, 3), (1, 1, 6)])
def test_several_axes(name, chunks):
    a = numbers((4, 5, 6), "f8" if takes_reals(name) else "c16")
    x = da.from_array(a, chunks=chunks)
    for axes in ((0, 1, 2), (1, 0), (-1,), (2, 0), (0, 2, 1)):
        for s in (None, [3] * len(axes), [7, 8, 4][: len(axes)]):
            for norm in (None, "ortho"):
                want = getattr(np.fft, name)(a, s=s, axes=axes, norm=norm)
                check(getattr(ours, name)(x, s=s, axes=axes, norm=norm), want)
    check(getattr(ours, name)(x), getattr(np.fft, name)(a))


@pytest.mark.parametrize("scheduler", ["threads", "cpu:1", "cpu:4"])
def test_every_scheduler(scheduler):
    a = numbers((16, 12, 10), "f4")
    x = da.from_array(a, chunks=(4, 5, 3))
    lazy = [ours.fftn(x), ours.rfftn(x, axes=(0, 1)), ours.fft(x, axis=1)]
    want = [np.fft.fftn(a), np.fft.rfftn(a, axes=(0, 1)), np.fft.fft(a, axis=1)]
    if ":" not in scheduler:
        for got, right in zip(lazy, want, strict=True):
            check(got, right, scheduler)
        return
    with gpuscheduler.Scheduler(scheduler, check=True):
        for got, right in zip(lazy, want, strict=True):
            check(got, right, None)


def test_inverses():
    a = numbers((8, 9, 10))
    x = da.from_array(a, chunks=(3, 4, 5))
    for there, back in (("fftn", "ifftn"), ("fft2", "ifft2"), ("fft", "ifft")):
        got = getattr(ours, back)(getattr(ours, there)(x)).compute()
        np.testing.assert_allclose(got, a, atol=1e-12)
    np.testing.assert_allclose(ours.irfftn(ours.rfftn(x)), a, atol=1e-12)
    np.testing.assert_allclose(ours.irfft(ours.rfft(x, axis=1), n=9, axis=1), a, atol=1e-12)
    assert ours.fftshift(x).compute().tolist() == np.fft.fftshift(a).tolist()
    assert ours.rfftfreq(9).compute().tolist() == np.fft.rfftfreq(9).tolist()


def test_axes_named_twice_and_none():
    a = numbers((4, 5), "c16")
    x = da.from_array(a, chunks=2)
    check(ours.fftn(x, axes=(0, 0)), np.fft.fftn(a, axes=(0, 0)))
    check(ours.fftn(x, axes=()), np.fft.fftn(a, axes=()))
    check(ours.fftn(x, s=(-1, 3), axes=(0, 1)), np.fft.fftn(a, s=(-1, 3), axes=(0, 1)))
    with pytest.raises(NotImplementedError, match="twice"):
        ours.irfftn(x, axes=(0, 0))
    with pytest.raises(ValueError, match="at least 1"):
        ours.irfftn(x, axes=())


def steps_of(chunks, axes, function="fft", **options):
    shape = [sum(c) for c in chunks]
    return plan_transforms(
        chunks, [Transform(function, axis, shape[axis], shape[axis]) for axis in axes], **options
    )


def rechunks(steps):
    return sum(step.chunks is not None for step in steps)


def test_axes_in_one_chunk_come_first_and_one_rechunk_is_enough():
    """The slab transposition: rows first, then columns."""
    steps = steps_of(((4,) * 4, (16,)), (0, 1))
    assert [[t.axis for t in step.transforms] for step in steps] == [[1], [0]]
    assert steps[1].chunks == ((16,), (4,) * 4)
    assert rechunks(steps_of(((16,), (16,)), (0, 1))) == 0
    assert rechunks(steps_of(((4,) * 4, (4,) * 4), (0,))) == 1
    assert rechunks(steps_of(((4,) * 4, (4,) * 4), (0, 1))) == 2  # a grid: each axis once
    assert rechunks(steps_of(((4,) * 4, (4,) * 4, (16,)), (0, 1, 2))) == 1  # split along the last
    assert rechunks(steps_of(((8, 8), (16,), (16,)), (0, 1, 2))) == 1


def test_axes_that_get_shorter_are_transformed_before_the_move():
    short, long = Transform("fft", 1, 2, 2), Transform("fft", 0, 16, 16)
    steps = plan_transforms(((4,) * 4, (8,)), [long, short])
    assert steps[0].transforms == (short,)
    assert steps[1].chunks == ((16,), (1, 1))


def test_of_two_axes_in_a_grid_the_one_that_gets_shorter_is_first():
    """The first move has all elements, the second only those that are left."""
    long, short = Transform("fft", 0, 16, 16), Transform("fft", 1, 2, 2)
    steps = plan_transforms(((4,) * 4, (4,) * 4), [long, short])
    assert [step.transforms for step in steps] == [(short,), (long,)]


def test_axes_that_are_done_are_split_before_those_that_are_wanted():
    chunks = ((4, 4), (8,), (8,))
    assert fourier.make_whole(chunks, {0}, {0, 1}) == ((8,), (8,), (4, 4))
    assert fourier.make_whole(chunks, {0}, {0, 2}) == ((8,), (4, 4), (8,))
    assert fourier.make_whole(((4, 4), (8,), (1,)), {0}, {0, 1}) == ((8,), (4, 4), (1,))


def test_real_transforms_are_first_and_to_reals_last():
    real, other = Transform("rfft", 0, 8, 5), Transform("fft", 1, 8, 8)
    steps = plan_transforms(((4, 4), (8,)), [other, real])
    assert [t.function for step in steps for t in step.transforms] == ["rfft", "fft"]
    back, other = Transform("irfft", 1, 8, 8), Transform("ifft", 0, 8, 8)
    steps = plan_transforms(((4, 4), (5,)), [other, back])
    assert [t.function for step in steps for t in step.transforms] == ["ifft", "irfft"]


def test_blocks_stay_within_the_limit():
    chunks = ((4,) * 4, (4,) * 4, (4,) * 4)
    for limit in (math.inf, 300, 70, 64):
        steps = steps_of(chunks, (0, 1, 2), limit=limit)
        sizes = [
            math.prod(max(c) for c in step.chunks) for step in steps if step.chunks is not None
        ]
        assert max(sizes) <= limit
    assert steps_of(((4, 4),), (0,), limit=7) is None


def test_a_line_longer_than_a_device_is_refused_with_its_size(monkeypatch):
    monkeypatch.setattr(fourier, "capacity", lambda *_: Capacity(1, 6400))
    x = da.ones((10, 100), chunks=(10, 50))
    ours.fft(x)
    with pytest.raises(NotImplementedError, match=r"needs 6,464 bytes .* 6,400"):
        ours.fft(da.ones((10, 101), chunks=(10, 50)))
    with pytest.raises(NotImplementedError, match="overlap"):
        ours.fft(da.ones(101, chunks=50))


def test_unknown_chunks():
    x = da.ones((4, 6), chunks=(2, 6))
    x = x[x[:, 0] > 0]
    np.testing.assert_allclose(ours.fft(x).compute(), np.fft.fft(np.ones((4, 6))))
    for function, options in ((ours.fft, {"axis": 0, "n": 4}), (ours.fftn, {"s": (4, 6)})):
        with pytest.raises(ValueError, match="compute_chunk_sizes"):
            function(x, **options)
    with pytest.raises(ValueError, match="not known"):
        ours.fft(x, axis=0)


def test_bad_arguments_are_refused():
    x = da.ones((4, 4), chunks=2)
    with pytest.raises(ValueError, match="norm"):
        ours.fft(x, norm="no")
    with pytest.raises(ValueError, match="data points"):
        ours.fft(x, n=0)
    with pytest.raises(np.exceptions.AxisError):
        ours.fft(x, axis=2)
    with pytest.raises(TypeError, match="Fourier"):
        ours.fft(x.astype("M8[s]"))
    with pytest.raises(ValueError, match="lengths"):
        ours.fftn(x, s=(1, 2, 3), axes=(0, 1))


def test_empty_and_single():
    for shape in ((0, 4), (1, 1), (4, 1)):
        a = np.ones(shape)
        x = da.from_array(a, chunks=-1)
        check(ours.fft(x), np.fft.fft(a))
        check(ours.rfft(x), np.fft.rfft(a))


def test_bits_do_not_depend_on_devices():
    a = numbers((16, 20))
    found = set()
    for devices in ("cpu:1", "cpu:3"):
        with gpuscheduler.Scheduler(devices):
            found.add(ours.fftn(da.from_array(a, chunks=5)).compute().tobytes())
    assert len(found) == 1


def test_second_plan_is_the_first(planned):
    with gpuscheduler.Scheduler("cpu:2"):
        for seed in range(3):
            ours.fftn(da.from_array(numbers((8, 8), seed=seed), chunks=4)).compute()
    assert len(planned) == 1


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_array(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    chunks = tuple(data.draw(st.integers(1, n)) for n in shape)
    axes = data.draw(st.lists(st.integers(0, len(shape) - 1), min_size=1, unique=True))
    name = data.draw(st.sampled_from(OF_SEVERAL[:4]))
    if name == "irfftn" and shape[axes[-1]] == 1:
        return  # no data points, as in NumPy
    a = numbers(shape, "f8" if takes_reals(name) else "c16")
    want = getattr(np.fft, name)(a, axes=axes)
    check(getattr(ours, name)(da.from_array(a, chunks=chunks), axes=axes), want)
