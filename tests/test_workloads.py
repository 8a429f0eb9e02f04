"""The reference workloads give what NumPy gives, in any chunks, and stay lazy at full size."""

from __future__ import annotations

import importlib
import math
import sys
import time
import tracemalloc
import types
from pathlib import Path

import dask.array as da
import numpy as np
import pytest
from dask.array.dispatch import concatenate_lookup, numel_lookup
from dask.array.reductions import numel

NAMES = [
    "black_scholes",
    "gauss_sum",
    "haversine_mesh",
    "heat_stencil",
    "hillshade",
    "logistic_step",
    "matmul",
    "random_slice_sum",
    "standardize",
    "tall_skinny_svd",
    "transpose_sum",
]
WITH_INPUTS = [n for n in NAMES if n not in ("haversine_mesh", "random_slice_sum")]
WITH_WINDOW = [
    "black_scholes",
    "haversine_mesh",
    "heat_stencil",
    "hillshade",
    "matmul",
    "standardize",
]
INPUT_BYTES = {  # at full size
    "black_scholes": 3 * 2**33,
    "gauss_sum": 4 * 2**33,
    "heat_stencil": 2**34,
    "hillshade": 2**34,
    "logistic_step": 2**35 + 2**27 + 2**10,
    "matmul": 2**32,
    "standardize": 4 * 2**33,
    "tall_skinny_svd": 4 * 2**33,
    "transpose_sum": 2**34,
}


def graph(name):
    return importlib.import_module(f"graphs.{name}")


def compute(array):
    return array.compute(scheduler="sync")


def input_arrays(module, size, **options):
    return [x for x in module.inputs(size, **options) if isinstance(x, da.Array)]


def largest_chunk(array):
    return math.prod(max(c) for c in array.chunks) * array.dtype.itemsize


def doubled(size):
    return tuple(2 * n for n in size) if isinstance(size, tuple) else 2 * size


def uneven(size):
    """A ninth of the first axis and a bit: not the default, and the last chunk is smaller."""
    return (size[0] if isinstance(size, tuple) else size) // 9 + 1


@pytest.fixture(params=NAMES)
def module(request):
    return graph(request.param)


def test_every_file_is_a_workload_under_test():
    folder = Path(importlib.import_module("graphs").__file__).parent
    files = folder.glob("[!_]*.py")
    assert sorted(f.stem for f in files) == NAMES


# --- the answers


def test_agrees_with_numpy(module):
    lazy = module.build(module.SMALL)
    result, expected = compute(lazy), module.reference(module.SMALL)
    assert result.dtype == lazy.dtype == expected.dtype
    assert result.shape == lazy.shape == expected.shape
    np.testing.assert_allclose(result, expected, rtol=module.RTOL, atol=module.ATOL)


@pytest.mark.parametrize("chunks", [uneven, lambda size: "auto"], ids=["uneven", "auto"])
def test_chunks_do_not_change_the_answer(module, chunks):
    result = compute(module.build(module.SMALL, chunks=chunks(module.SMALL)))
    expected = module.reference(module.SMALL)
    np.testing.assert_allclose(result, expected, rtol=module.RTOL, atol=module.ATOL)


@pytest.mark.parametrize("name", WITH_INPUTS)
def test_inputs_are_the_same_bits_in_any_chunks(name):
    """float32 logarithms and cosines may round differently in a vector's tail: not so the rest."""
    module = graph(name)
    ours = input_arrays(module, module.SMALL)
    theirs = input_arrays(module, module.SMALL, chunks=uneven(module.SMALL))
    assert any(a.chunks != b.chunks for a, b in zip(ours, theirs, strict=True))
    for a, b in zip(ours, theirs, strict=True):
        if name in ("gauss_sum", "logistic_step", "standardize", "tall_skinny_svd"):
            np.testing.assert_allclose(compute(a), compute(b), rtol=1e-5, atol=1e-6)
        else:
            np.testing.assert_array_equal(compute(a), compute(b))


@pytest.mark.parametrize("name", WITH_WINDOW)
def test_a_window_of_the_reference_is_that_part_of_it(name):
    module = graph(name)
    everything = module.reference(module.SMALL)
    for edge in (slice(0, 7), slice(31, 54), slice(90, 120)):  # 120: the smallest ends there
        window = (edge, slice(3, 90))[: everything.ndim]
        part = module.reference(module.SMALL, window)
        np.testing.assert_allclose(part, everything[window], rtol=1e-6, atol=module.ATOL)


def test_a_wrong_factor_is_noticed(module):
    """The tolerances are tight enough to tell the answer from one that is a percent off."""
    wrong = 1.01 * compute(module.build(module.SMALL))
    expected = module.reference(module.SMALL)
    assert not np.allclose(wrong, expected, rtol=module.RTOL, atol=module.ATOL)


def test_the_haversine_field_is_the_one_that_was_asked_about():
    """Point (30, 101): nearest at the right edge, half way up; a corner worked out by hand."""
    haversine = graph("haversine_mesh")
    row, column = np.unravel_index(haversine.reference(1000).argmin(), (1000, 1000))
    assert (int(row), int(column)) in ((499, 999), (500, 999))
    a = math.sin(math.radians(0.5)) ** 2
    a += math.cos(math.radians(29)) * math.cos(math.radians(30)) * math.sin(math.radians(1)) ** 2
    assert math.isclose(haversine.reference(2)[0, 0], math.atan2(a, 1 - a), rel_tol=1e-6)
    total = compute(haversine.build_sum(100))
    assert math.isclose(total, haversine.reference(100).sum(), rel_tol=1e-12)


def test_heat_is_neither_made_nor_lost():
    heat = graph("heat_stencil")
    (start,) = input_arrays(heat, heat.SMALL)
    before, after = (compute(x).sum(dtype="f8") for x in (start, heat.build(heat.SMALL)))
    assert math.isclose(before, after, rel_tol=1e-6)


def test_flat_ground_has_the_shade_of_the_lights_height_and_a_slope_towards_it_is_bright():
    hillshade = graph("hillshade")
    flat = hillshade.shade(np.zeros((3, 3), "f4"), 1.0, 1.0)
    assert math.isclose(flat.item(), math.sin(math.radians(45)), rel_tol=1e-6)
    south, east = np.mgrid[:3, :3].astype("f4")
    facing = hillshade.shade((south + east) / np.float32(math.sqrt(2)), 1.0, 1.0)
    assert math.isclose(facing.item(), 1.0, rel_tol=1e-6)


def test_terrain_at_its_own_resolution_is_the_sample():
    hillshade = graph("hillshade")
    z, _, _ = hillshade.terrain()
    np.testing.assert_array_equal(compute(hillshade.inputs(z.shape)[0]), z)


def test_the_shade_agrees_with_matplotlib():
    """All but the contrast, which LightSource stretches to 0..1."""
    from matplotlib.colors import LightSource

    hillshade = graph("hillshade")
    light = LightSource(hillshade.AZIMUTH, hillshade.ALTITUDE)
    np.testing.assert_allclose(light.direction, hillshade.light(), atol=1e-12)
    z = compute(hillshade.inputs((100, 120))[0])
    dy, dx = hillshade.spacing(z.shape)
    theirs = light.hillshade(z, dx=dx, dy=dy)[1:-1, 1:-1]
    ours = compute(hillshade.build(z.shape))[1:-1, 1:-1]
    assert np.corrcoef(theirs.ravel(), ours.ravel())[0, 1] > 0.999


def test_a_gradient_step_lowers_the_loss():
    logistic = graph("logistic_step")
    x, y, w = (compute(a).astype("f8") for a in logistic.inputs(logistic.SMALL))

    def loss(w):
        return np.mean(np.logaddexp(0, x @ w) - y * (x @ w))

    assert loss(logistic.reference(logistic.SMALL)) < loss(w) - 1e-3


# --- random numbers


def test_splitmix_is_the_published_one():
    """Seed 0 gives these three first outputs in the authors' program, splitmix64.c."""
    random = importlib.import_module("graphs._blocks")
    assert [random._mix(i * random.GAMMA & random.MASK) for i in range(3)] == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
    ]


@pytest.mark.parametrize("shape", [(1000,), (50, 20), (10, 10, 10)])
def test_a_block_hashes_the_row_major_index(shape):
    random = importlib.import_module("graphs._blocks")
    key = random._mix(5)
    expected = [random._mix(key + i * random.GAMMA & random.MASK) >> 11 for i in range(1000)]
    whole = tuple(slice(0, n) for n in shape)
    block = random.uniform_block(whole, shape, "f8", 5)
    np.testing.assert_array_equal(block.ravel(), np.array(expected) * 2.0**-53)


def test_slabs_leave_no_seam(monkeypatch):
    random = importlib.import_module("graphs._blocks")
    where = (slice(3, 40), slice(5, 30))
    one = random.normal_block(where, (50, 50), "f8", 1)
    monkeypatch.setattr(random, "SLAB", 60)
    np.testing.assert_allclose(random.normal_block(where, (50, 50), "f8", 1), one, rtol=1e-12)


@pytest.mark.parametrize("kind", ["f4", "f8"])
def test_random_numbers_are_distributed_as_named(kind):
    """Moments within five standard errors, neighbours and seeds uncorrelated."""
    random = importlib.import_module("graphs._blocks")
    n = 200_000
    where, shape = (slice(2**33, 2**33 + n),), (2**34,)
    u, v = (random.uniform_block(where, shape, kind, seed).astype("f8") for seed in (1, 2))
    z = random.normal_block(where, shape, kind, 1).astype("f8")
    assert 0 <= u.min() < u.max() < 1
    error = 5 / math.sqrt(n)
    assert abs(u.mean() - 0.5) < error * math.sqrt(1 / 12)
    assert abs(u.var() - 1 / 12) < error * math.sqrt(1 / 180)
    assert abs(z.mean()) < error
    assert abs(z.var() - 1) < error * math.sqrt(2)
    assert abs((z**3).mean()) < error * math.sqrt(15)
    assert abs((z**4).mean() - 3) < error * math.sqrt(96)
    for a, b in ((u, v), (u[1:], u[:-1]), (z[1:], z[:-1])):
        assert abs(np.corrcoef(a, b)[0, 1]) < error


# --- the estimates


def test_estimates_grow_with_the_size(module):
    small, large = module.SMALL, doubled(module.SMALL)
    assert (
        0
        < module.bytes_moved(small)
        <= module.bytes_moved(large)
        <= module.bytes_moved(module.FULL)
    )
    assert 1.9 * module.flops(small) < module.flops(large) < module.flops(module.FULL)
    assert isinstance(module.bytes_moved(small), int)
    assert isinstance(module.flops(small), int)


@pytest.mark.parametrize("name", [n for n in WITH_INPUTS if n != "heat_stencil"])
def test_bytes_moved_are_those_of_the_inputs_and_the_result(name):
    module = graph(name)
    arrays = [*input_arrays(module, module.SMALL), module.build(module.SMALL)]
    assert module.bytes_moved(module.SMALL) == sum(a.nbytes for a in arrays)


# --- laziness


def test_small_has_eight_chunks_and_is_quick(module):
    lazy = module.build(module.SMALL)
    assert max(len(layer) for layer in lazy.__dask_graph__().layers.values()) >= 8
    compute(lazy)
    start = time.process_time()
    compute(lazy)
    assert time.process_time() - start < 2  # about 0.1 s where nothing else runs


def test_full_size_builds_lazily(module):
    """Seconds to build, megabytes to hold; the arrays would be gigabytes."""
    tracemalloc.start()
    start = time.process_time()
    lazy = module.build(module.FULL)
    seconds, (_, peak) = time.process_time() - start, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert seconds < 15  # tracing is slow: under 5 without
    assert peak < 2**28
    assert largest_chunk(lazy) <= 2**29


@pytest.mark.parametrize("name", WITH_INPUTS)
def test_full_inputs_have_the_documented_bytes_in_moderate_chunks(name):
    module = graph(name)
    arrays = input_arrays(module, module.FULL)
    assert sum(a.nbytes for a in arrays) == INPUT_BYTES[name]
    assert all(largest_chunk(a) <= 2**29 for a in arrays)
    assert largest_chunk(arrays[0]) >= 2**26


def test_the_random_matrix_has_two_terabytes_in_its_published_chunks():
    module = graph("random_slice_sum")
    layers = module.build(module.FULL).__dask_graph__().layers
    (root,) = (layer for name, layer in layers.items() if name.startswith("normal"))
    assert len(root) == 50 * 50
    assert 8 * module.FULL**2 == 2 * 10**12


def test_a_corner_of_the_full_inputs_is_made_without_the_rest():
    """A hundred elements out of 2**32 take kilobytes."""
    random = importlib.import_module("graphs._blocks")
    hillshade = graph("hillshade")
    hillshade.terrain()  # read once
    shape = hillshade.FULL
    where = tuple(slice(n - 10, n) for n in shape)
    tracemalloc.start()
    random.uniform_block(where, shape, "f4", seed=1)
    random.normal_block(where, shape, "f8", seed=1)
    hillshade.elevation_block(where, shape)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**17


def test_the_temporaries_of_random_numbers_are_bounded(monkeypatch):
    """A block of 8 MB, made 10,000 elements at a time."""
    random = importlib.import_module("graphs._blocks")
    monkeypatch.setattr(random, "SLAB", 10_000)
    shape = (1000, 1000)
    tracemalloc.start()
    random.normal_block((slice(0, 1000), slice(0, 1000)), shape, "f8", seed=1)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1.1 * 8 * 1000**2


@pytest.mark.parametrize("name", WITH_INPUTS)
def test_each_block_of_the_inputs_is_made_once(name, monkeypatch):
    """Also after Dask has optimised: it may fuse a root into its reader, but not into several."""
    module = graph(name)
    random = importlib.import_module("graphs._blocks")
    made = []
    if name == "hillshade":
        owner, makers = module, ("elevation_block",)
    else:
        owner, makers = random, ("uniform_block", "normal_block")
    for maker in makers:
        original = getattr(owner, maker)

        def counted(where, *args, original=original, **kwargs):
            made.append(str((where, sorted(kwargs.items()))))
            return original(where, *args, **kwargs)

        monkeypatch.setattr(owner, maker, counted)
    compute(module.build(module.SMALL))
    assert made
    assert len(made) == len(set(made))


# --- chunks stay in their library


class Device(np.lib.mixins.NDArrayOperatorsMixin):
    """An array that, like CuPy's, takes part in NumPy's protocols and refuses to become NumPy's."""

    __array_priority__ = 100

    def __init__(self, array):
        self.array = np.asarray(array)

    def __array__(self, *args, **kwargs):
        raise TypeError("implicit conversion to a NumPy array")

    def __array_ufunc__(self, ufunc, method, *inputs, **kwargs):
        return lift(getattr(ufunc, method)(*map(lower, inputs), **lower(kwargs)))

    def __array_function__(self, function, types, args, kwargs):
        return lift(function(*lower(args), **lower(kwargs)))

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        value = getattr(self.array, name)
        if callable(value):
            return lambda *args, **kwargs: lift(value(*lower(args), **lower(kwargs)))
        return lift(value)

    def __getitem__(self, index):
        return lift(self.array[lower(index)])

    def __setitem__(self, index, value):
        self.array[lower(index)] = lower(value)

    def __len__(self):
        return len(self.array)


def lower(value):
    if isinstance(value, Device):
        return value.array
    if isinstance(value, np.ndarray) and value.ndim:
        raise TypeError("a NumPy array among device arrays")
    if isinstance(value, dict):
        return {k: lower(v) for k, v in value.items()}
    return type(value)(map(lower, value)) if type(value) in (list, tuple) else value


def lift(value):
    if isinstance(value, list | tuple) and any(isinstance(v, np.ndarray) for v in value):
        return tuple(map(lift, value))
    return Device(value) if isinstance(value, np.ndarray | np.generic) else value


@pytest.fixture
def devicepy(monkeypatch):
    """A library "devicepy" with the few functions that the chunk functions take by name."""
    library = types.ModuleType("devicepy")
    for name in ("arange", "empty", "asarray"):
        make = getattr(np, name)
        monkeypatch.setattr(
            library, name, lambda *a, make=make, **k: Device(make(*a, **k)), raising=False
        )
    monkeypatch.setitem(sys.modules, "devicepy", library)
    concatenate_lookup.register(Device, np.concatenate)
    numel_lookup.register(Device, lambda x, **kwargs: Device(numel(x.array, **kwargs)))
    return library


@pytest.mark.parametrize("name", [n for n in NAMES if n != "random_slice_sum"])
def test_no_chunk_is_ever_made_by_another_library(name, devicepy):
    module = graph(name)
    lazy = module.build(module.SMALL, xp="devicepy")
    assert isinstance(lazy._meta, Device)
    result = compute(lazy)
    assert isinstance(result, Device)
    expected = module.reference(module.SMALL)
    np.testing.assert_allclose(result.array, expected, rtol=module.RTOL, atol=module.ATOL)
