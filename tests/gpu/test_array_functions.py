"""Sorting, selection and sets of CuPy blocks, as NumPy gives them."""

import dask
import numpy as np
import pytest

cupy = pytest.importorskip("cupy")

import dask.array as da

import gpuscheduler
from gpuscheduler.algorithms import splitters
from gpuscheduler.array import (
    argsort,
    isin,
    lexsort,
    median,
    nanquantile,
    quantile,
    searchsorted,
    sort,
    unique,
)
from graphs.bench import sorting
from tests.algorithms.test_sorting import ADVERSARIES, CHUNKS, N, descending_indices

from .test_executor import DEVICES, host

pytestmark = pytest.mark.gpu

#: Dtypes that CuPy has.
NAMES = [n for n, x in ADVERSARIES.items() if x.dtype.kind in "biufc" and x.dtype.isnative]
NAMES.remove("long double")


@pytest.fixture(scope="module", params=DEVICES)
def scheduler(request):
    with gpuscheduler.Scheduler(request.param, check=True) as s:
        yield s


def on_gpu(x, chunks):
    """An array of CuPy's with empty blocks, too."""
    name = f"given-{dask.base.tokenize(x, chunks)}"
    parts = np.split(x, np.cumsum(chunks)[:-1])
    blocks = {(name, i): cupy.asarray(p) for i, p in enumerate(parts)}
    return da.Array(blocks, name, (chunks,), meta=cupy.empty(0, x.dtype))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("runs", [1, 3])
def test_sort_and_argsort_of_adversaries(scheduler, name, chunks, runs, monkeypatch):
    monkeypatch.setattr(splitters, "SAMPLES", 16)
    monkeypatch.setattr(splitters, "FEW", 50)
    x = ADVERSARIES[name]
    lazy = on_gpu(x, CHUNKS[chunks])
    falling = descending_indices(x)
    with dask.config.set({"gpuscheduler.sort-runs": runs}):
        made = [np.sort(lazy), np.argsort(lazy), argsort(lazy, descending=True)]
        if name != "complex nan":
            made.append(sort(lazy, descending=True))
    got = [host(v) for v in dask.compute(*made)]
    assert all(type(m._meta) is cupy.ndarray for m in made)
    np.testing.assert_array_equal(got[0], np.sort(x))
    np.testing.assert_array_equal(got[1], np.argsort(x, kind="stable"))
    if name != "complex nan":
        np.testing.assert_array_equal(got[2], falling)
        np.testing.assert_array_equal(got[3], x[falling])


def test_unknown_chunks_keep_their_lengths(scheduler):
    x = ADVERSARIES["some nan"]
    lazy = on_gpu(x, CHUNKS["uneven"])
    for runs in (1, 3):
        with dask.config.set({"gpuscheduler.sort-runs": runs}):
            picked = lazy[lazy < 0.5]
            got = dask.compute(sort(picked), argsort(picked))
        kept = x[x < 0.5]
        np.testing.assert_array_equal(host(got[0]), np.sort(kept))
        np.testing.assert_array_equal(host(got[1]), np.argsort(kept, kind="stable"))


@pytest.mark.parametrize("axis", [0, 1, None])
@pytest.mark.parametrize("descending", [False, True])
def test_sort_along_any_axis(scheduler, axis, descending):
    x = np.random.default_rng(1).integers(0, 40, (60, 50)).astype("f4")
    x[3, ::3] = np.nan
    lazy = da.from_array(cupy.asarray(x), chunks=(25, 20))
    flat = x.ravel() if axis is None else x
    along = 0 if axis is None else axis
    order = np.apply_along_axis(descending_indices, along, flat) if descending else (
        np.argsort(flat, axis=along, kind="stable")
    )  # fmt: skip
    made = [sort(lazy, axis, descending=descending), argsort(lazy, axis, descending=descending)]
    got = [host(v) for v in dask.compute(*made)]
    np.testing.assert_array_equal(got[0], np.take_along_axis(flat, order, along))
    np.testing.assert_array_equal(got[1], order)


def test_lexsort(scheduler):
    keys = [ADVERSARIES[n] for n in ("float32", "saw-tooth", "int8")]
    for runs in (1, 4):
        with dask.config.set({"gpuscheduler.sort-runs": runs}):
            order = lexsort([on_gpu(k, CHUNKS["uneven"]) for k in keys])
        np.testing.assert_array_equal(host(order.compute()), np.lexsort(keys))


def test_sort_spills_what_does_not_fit():
    """16 blocks of a quarter MiB, sorted within one MiB."""
    x = np.random.default_rng(2).random(2**19)
    with gpuscheduler.Scheduler("cuda:0", memory_limit=2**21, check=True):
        lazy = da.map_blocks(cupy.asarray, da.from_array(x, chunks=2**15), meta=cupy.empty(0))
        with dask.config.set({"gpuscheduler.sort-runs": 8}):
            np.testing.assert_array_equal(host(np.sort(lazy).compute()), np.sort(x))


def test_sort_of_one_run_makes_few_tasks(scheduler):
    lazy = on_gpu(ADVERSARIES["random"], (N // 10,) * 10)
    with dask.config.set({"gpuscheduler.sort-runs": 1}):
        assert len(scheduler.plan(np.sort(lazy)).steps) <= 22


def test_the_benchmark_finds_right_values(monkeypatch, capsys):
    """At a size at which times say nothing."""
    monkeypatch.setattr(sorting, "CHECKED", 20_000)
    sorting.main(["20000"])
    table = capsys.readouterr().out
    assert table.count("\n") >= 5
    assert "WRONG" not in table


@pytest.mark.parametrize("runs", [1, 3])
@pytest.mark.parametrize("name", ["random", "float32", "some nan", "zipf", "int8", "float16"])
def test_quantiles(scheduler, name, runs, monkeypatch):
    monkeypatch.setattr(splitters, "SAMPLES", 16)
    x = ADVERSARIES[name]
    lazy = on_gpu(x, CHUNKS["uneven"])
    exact = x.astype("f8")
    with dask.config.set({"gpuscheduler.sort-runs": runs}):
        made = [median(lazy), quantile(lazy, [0.1, 0.7]), nanquantile(lazy, 0.9, method="hazen")]
    got = [host(v) for v in dask.compute(*made)]
    expected = [np.median(x), np.quantile(exact, [0.1, 0.7])]
    expected.append(np.nanquantile(exact, 0.9, method="hazen"))
    eps = 2e-3 if x.dtype == "f2" else 1e-6 if x.dtype == "f4" else 1e-15
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=eps)


def test_quantiles_along_axes(scheduler):
    x = np.random.default_rng(3).random((40, 30))
    x[5, :3] = np.nan
    lazy = da.from_array(cupy.asarray(x), chunks=(15, 20))
    made = [median(lazy, 0), nanquantile(lazy, [0.2, 0.5], 1), np.partition(lazy, 3, axis=0)[3]]
    got = [host(v) for v in dask.compute(*made)]
    expected = [np.where(np.isnan(x).any(0), np.nan, np.median(x, 0)),
                np.nanquantile(x, [0.2, 0.5], 1), np.sort(x, 0)[3]]  # fmt: skip
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-15)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("runs", [1, 3])
@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("float16", "complex nan")])
def test_unique(scheduler, name, runs, monkeypatch):
    monkeypatch.setattr(splitters, "SAMPLES", 16)
    x = ADVERSARIES[name]
    with dask.config.set({"gpuscheduler.sort-runs": runs}):
        made = unique(on_gpu(x, CHUNKS["uneven"]), True, True, True)
    got = [host(v) for v in dask.compute(*made)]
    for a, b in zip(got, np.unique(x, True, True, True), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("runs", [1, 3])
def test_searches_and_sets(scheduler, runs):
    rng = np.random.default_rng(4)
    x, y = rng.integers(0, 90, 1200), rng.integers(0, 120, 70).astype("f4")
    lazy, other = on_gpu(x, (400, 0, 800)), on_gpu(y, (70,))
    with dask.config.set({"gpuscheduler.sort-runs": runs}):
        made = [isin(lazy, other), np.setdiff1d(other, lazy), np.intersect1d(lazy, other),
                np.setxor1d(lazy, other), searchsorted(sort(lazy), other, "right")]  # fmt: skip
    got = [host(v) for v in dask.compute(*made)]
    expected = [np.isin(x, y), np.setdiff1d(y, x), np.intersect1d(x, y), np.setxor1d(x, y),
                np.searchsorted(np.sort(x), y, "right")]  # fmt: skip
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(a, b)
