"""Functions of NumPy and SciPy that CuPy has, too: on GPUs they give what NumPy and SciPy give."""

import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")
ndimage = pytest.importorskip("scipy.ndimage")
scipy_fft = pytest.importorskip("scipy.fft")

import dask
import dask.array as da
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gpuscheduler
from gpuscheduler.devices.cuda import library_calls
from gpuscheduler.fusion.library_task import LibraryTask
from gpuscheduler.fusion.residency import HostTask
from gpuscheduler.plan.matmul import MatmulSumTask
from gpuscheduler.tracing.functions import library
from tests.support.strategies import EXAMPLES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::gpuscheduler.errors.GpuUnused"),
]

ROOT = Path(__file__).resolve().parents[2]
RANDOM = np.random.default_rng(0)
A = RANDOM.standard_normal((96, 120)).astype("f4")
THIRD = np.ones((3, 3)) / 9


@pytest.fixture
def gpus(caplog):
    numpys = dask.config.set({"array.backend": "numpy"})
    library_calls._refused.clear()
    with gpuscheduler.Scheduler("cuda:0,0", numpy="gpu", check=True) as s, numpys:
        yield s
    assert not library_calls._refused, caplog.text


@pytest.fixture
def gpu():
    numpys = dask.config.set({"array.backend": "numpy"})
    with gpuscheduler.Scheduler("cuda:0", numpy="gpu", check=True) as s, numpys:
        yield s


def rows(x):
    return x.rechunk((32, -1))


def calls(s, c):
    """The names of the calls in a plan."""
    tasks = [step.task for step in s.plan(c).steps]
    return {t.call.name for t in tasks if isinstance(t, LibraryTask)}


def same(got, wanted, rtol=None):
    assert type(got) is type(wanted)
    assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
    if wanted.dtype.kind not in "fc":
        np.testing.assert_array_equal(got, wanted)
        return
    if rtol is None:
        rtol = 2e-5 if wanted.dtype.char in "fF" else 1e-12
    finite = np.abs(wanted[np.isfinite(wanted)])
    with np.errstate(invalid="ignore"):
        np.testing.assert_allclose(got, wanted, rtol=rtol, atol=rtol * finite.max(initial=1))
    assert got.flags.writeable


PROGRAMS = {
    "numpy.sort": lambda x: rows(x).map_blocks(np.sort) + 1,
    "numpy.sort by columns": lambda x: x.map_blocks(np.sort, axis=0),
    "numpy.argsort": lambda x: rows(x).map_blocks(np.argsort, kind="stable", dtype="i8"),
    "numpy.percentile": lambda x: rows(x).map_blocks(np.percentile, 30, axis=1, drop_axis=1),
    "numpy.quantile": lambda x: da.quantile(rows(x), 0.3, axis=1) * 2,
    "numpy.median": lambda x: da.median(x, axis=0),
    "numpy.fft.rfft": lambda x: abs(da.fft.rfft(rows(x), axis=1)),
    "numpy.fft.fft": lambda x: da.fft.fft(x.rechunk((-1, 40)), axis=0).real,
    "numpy.fft.irfft": lambda x: da.fft.irfft(da.fft.rfft(rows(x), axis=1), axis=1),
    "numpy.fft.fft2": lambda x: da.fft.fft2(x.rechunk(-1)),
    "numpy.fft.ifftn": lambda x: da.fft.ifftn(x.rechunk(-1)),
    "numpy.fft.fft of a function": lambda x: rows(x).map_blocks(
        lambda b: np.fft.fft(b, axis=1, norm="ortho"), dtype="c8"
    ),
    "scipy.fft.rfft": lambda x: rows(x).map_blocks(scipy_fft.rfft, dtype="c8", chunks=(32, 61)),
    "scipy.ndimage.gaussian_filter": lambda x: x.map_overlap(
        ndimage.gaussian_filter, depth=8, sigma=2.0, boundary="reflect"
    ).sum(axis=0),
    "scipy.ndimage.uniform_filter": lambda x: x.map_blocks(ndimage.uniform_filter, (3, 5)),
    "scipy.ndimage.convolve": lambda x: x.map_blocks(ndimage.convolve, THIRD),
    "scipy.ndimage.correlate": lambda x: x.map_blocks(ndimage.correlate, np.eye(3), mode="wrap"),
    "scipy.ndimage.convolve1d": lambda x: x.map_blocks(ndimage.convolve1d, np.array([1, 2, 4])),
    "scipy.ndimage.maximum_filter": lambda x: x.map_blocks(ndimage.maximum_filter, size=3),
    "scipy.ndimage.minimum_filter": lambda x: x.map_blocks(ndimage.minimum_filter, size=(2, 3)),
    "scipy.ndimage.median_filter": lambda x: x.map_blocks(ndimage.median_filter, 3),
    "scipy.ndimage.sobel": lambda x: x.map_blocks(ndimage.sobel, axis=0),
    "scipy.ndimage.laplace": lambda x: x.map_blocks(ndimage.laplace, mode="constant", cval=1.0),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_calls_are_made_by_gpus(gpus, name):
    c = PROGRAMS[name](da.from_array(A, chunks=(32, 40)))
    word = name.partition(" ")[0]
    assert word in calls(gpus, c)
    wanted = c.compute(scheduler="threads")
    for _ in range(2):
        same(c.compute(), wanted)
    assert not gpus.last.where
    assert gpus.last.coverage == 1


SCIPY_ALONE = """
import scipy.fft, scipy.ndimage, numpy as np, dask.array as da, gpuscheduler, sys
from tests.gpu.test_library_calls import calls
with gpuscheduler.Scheduler("cuda:0", numpy="gpu") as s:
    x = da.from_array(np.ones((96, 120), "f4"), chunks=(32, 120))
    name = sys.argv[1]
    if name == "rfft":
        y = x.map_blocks(scipy.fft.rfft, dtype="c8", chunks=(32, 61))
    else:
        y = x.map_blocks(scipy.ndimage.uniform_filter, (3, 5))
    print(calls(s, y))
"""


@pytest.mark.parametrize("name", ["rfft", "uniform_filter"])
def test_the_first_function_of_a_process_is_called_by_gpus_too(name):
    """Nothing has been planned before, as in a user's program."""
    done = subprocess.run(
        [sys.executable, "-c", SCIPY_ALONE, name],
        capture_output=True, text=True, timeout=100, check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        cwd=ROOT,
    )  # fmt: skip
    assert name in done.stdout


PRODUCTS = {
    "matmul": lambda x, y: x @ y,
    "a product of the transpose": lambda x, y: x @ x.T,
    "tensordot": lambda x, y: da.tensordot(x, y, axes=1),
    "einsum": lambda x, y: da.einsum("ij,jk->ik", x, y),
    "a sum of products": lambda x, y: (x @ y + 1).sum(axis=0),
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["f4", "c16"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_are_made_by_gpus(gpus, name, dtype):
    b = RANDOM.standard_normal((120, 80)).astype(dtype) * (1 + 1j if dtype[0] == "c" else 1)
    b = b.astype(dtype)
    x, y = da.from_array(A.astype(dtype), chunks=(32, 40)), da.from_array(b, chunks=(40, 40))
    c = PRODUCTS[name](x, y)
    tasks = [step.task for step in gpus.plan(c).steps]
    assert any(isinstance(t, MatmulSumTask) for t in tasks)
    assert not any(isinstance(t, HostTask) for t in tasks)
    same(c.compute(), c.compute(scheduler="threads"), 1e-4 if dtype in ("f4", "c8") else 1e-12)


def test_products_of_what_is_called_have_numpys_arrays_or_are_copied(gpus):
    seen = []

    def told(block):
        seen.append(type(block))
        return block.copy()

    x = da.from_array(A, chunks=(32, 120)).map_blocks(told)
    c = (x @ A.T.copy()).map_blocks(told) + 1
    seen.clear()
    same(c.compute(), A @ A.T + np.float32(1), 1e-4)
    assert set(seen) == {np.ndarray}


UNKNOWN = {
    "a sort of complex": lambda x: rows(x + 1j).map_blocks(np.sort),
    "a sort of halves": lambda x: rows(x.astype("f2")).map_blocks(np.sort),
    "an unusual method": lambda x: rows(x).map_blocks(
        np.percentile, 30, axis=1, method="hazen", drop_axis=1
    ),
    "an fft of integers": lambda x: rows(x.astype(int)).map_blocks(np.fft.fft, dtype="c16"),
    "a filter of integers": lambda x: x.astype(int).map_blocks(ndimage.gaussian_filter, 1.0),
    "a footprint": lambda x: x.map_blocks(ndimage.maximum_filter, footprint=np.eye(3) > 0),
    "a filter larger than a block": lambda x: x.map_blocks(ndimage.gaussian_filter, 30.0),
    "a filter to NaN": lambda x: x.map_blocks(
        ndimage.uniform_filter, 3, mode="constant", cval=np.nan
    ),
    "a filter with an output": lambda x: x.map_blocks(
        lambda b: ndimage.uniform_filter(b, 3, output=np.float64), dtype="f8"
    ),
    "an inverse": lambda x: x[:32, :32].rechunk(-1).map_blocks(np.linalg.inv, dtype="f4"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_other_calls_are_the_hosts(gpu, name):
    c = UNKNOWN[name](da.from_array(A, chunks=(32, 40)))
    assert not calls(gpu, c)
    with np.errstate(all="ignore"):
        same(c.compute(), c.compute(scheduler="threads"))


def test_errors_are_numpys(gpu):
    x = rows(da.from_array(A, chunks=(32, 40)))
    for wrong in (
        lambda: x.map_blocks(np.sort, axis=5, dtype="f4"),
        lambda: x.map_blocks(np.fft.fft, 0, dtype="c8"),
        lambda: x.map_blocks(np.partition, 500, dtype="f4"),
        lambda: x.map_blocks(np.percentile, 101, axis=1, dtype="f4", drop_axis=1),
    ):
        c = wrong()
        with pytest.raises(Exception) as theirs:  # noqa: PT011
            c.compute(scheduler="threads")
        with pytest.raises(theirs.type) as ours:
            c.compute()
        assert str(ours.value).startswith(str(theirs.value))


def test_calls_with_other_orders_of_equal_keys_need_an_option():
    x = rows(da.from_array(A.round(), chunks=(32, 40)))
    order = x.map_blocks(np.argsort, dtype="i8")
    parts = x.map_blocks(np.partition, 50, dtype="f4")
    numpys = dask.config.set({"array.backend": "numpy"})
    for mode, wanted in (("gpu", {"numpy.argsort"}), ("auto", set())):
        with gpuscheduler.Scheduler("cuda:0", numpy=mode) as s, numpys:
            assert calls(s, order) == wanted
    with gpuscheduler.Scheduler("cuda:0", numpy="gpu"), numpys:
        at = order.compute()
        np.testing.assert_array_equal(np.take_along_axis(A.round(), at, 1), np.sort(A.round()))
        got = parts.compute()
        np.testing.assert_array_equal(np.sort(got), np.sort(A.round()))
        assert (got[:, :50] <= got[:, 50:51]).all()
        assert (got[:, 51:] >= got[:, 50:51]).all()


def test_steps_that_dask_has_fused_with_a_call_are_kernels(gpus):
    x = da.from_array(A, chunks=(32, 120))
    c = (da.fft.rfft(x * 2 + 1, axis=1) * 3).map_blocks(np.abs).sum(axis=0)
    kinds = {type(step.task).__name__ for step in gpus.plan(c).steps if not step.sent}
    assert "HostTask" not in kinds
    assert "numpy.fft.rfft" in calls(gpus, c)
    same(c.compute(), c.compute(scheduler="threads"), 1e-4)


def test_weights_that_have_changed_are_read_again(gpu):
    weights = np.ones((3, 3))
    x = da.from_array(A, chunks=(32, 40))
    c = x.map_blocks(lambda b: ndimage.convolve(b, weights))
    for _ in range(3):
        same(c.compute(), c.compute(scheduler="threads"))
        weights *= 2


def test_a_call_that_cupy_refuses_is_made_by_the_host(gpu, monkeypatch, caplog):
    monkeypatch.setattr(library_calls, "_refused", set(range(library_calls.MOST_REFUSED)))

    def refuses(*_, **__):
        raise NotImplementedError("no such kernel")

    monkeypatch.setitem(library_calls.NUMPYS, "sort", refuses)
    c = rows(da.from_array(A, chunks=(32, 40))).map_blocks(np.sort) * 2
    with caplog.at_level(logging.WARNING, "gpuscheduler.run"):
        same(c.compute(), c.compute(scheduler="threads"))
    assert "numpy.sort runs on the host: CuPy's refused: NotImplementedError" in caplog.text
    assert {call.name for call in library_calls._refused} == {"numpy.sort"}


# ---- any call


@st.composite
def arrays(draw, dtypes, least=1):
    shape = draw(st.lists(st.integers(least, 12), min_size=1, max_size=3))
    dtype = np.dtype(draw(st.sampled_from(dtypes)))
    order, special = draw(st.sampled_from("CF")), draw(st.integers(0, 3))
    random = np.random.default_rng(draw(st.integers(0, 99)))
    a = random.integers(-4, 5, shape) * draw(st.sampled_from([1, 0.37]))
    if dtype.kind == "c":
        a = a + 1j * random.integers(-4, 5, shape)
    a = np.abs(a).astype(dtype) if dtype.kind == "u" else a.astype(dtype)
    if dtype.kind in "fc" and not special:
        values = [np.nan, -np.nan, np.inf, -np.inf, -0.0, 0.0]
        for value in values[: draw(st.integers(1, 6))]:
            a.flat[draw(st.integers(0, a.size - 1))] = value
    return np.asarray(a, order=order)


def axis_of(draw, a):
    return draw(st.integers(-a.ndim, a.ndim - 1))


def sort(draw):
    a = draw(arrays(["?", "i1", "u2", "i4", "i8", "u8", "f4", "f8"]))
    axis = draw(st.sampled_from([None, axis_of(draw, a)]))
    return a, np.sort, {"axis": axis}


def argsort(draw):
    a = draw(arrays(["i1", "u4", "i8", "f4", "f8"]))
    return a, np.argsort, {"axis": axis_of(draw, a), "kind": "stable"}


def quantile(draw):
    a = draw(arrays(["f4", "f8"]))
    name = draw(st.sampled_from(["percentile", "quantile", "median"]))
    axes = draw(st.lists(st.integers(0, a.ndim - 1), min_size=1, max_size=a.ndim, unique=True))
    options = {"axis": tuple(axes), "keepdims": draw(st.booleans())}
    if name != "median":
        most = 100 if name == "percentile" else 1.0
        one = st.floats(0, most) | st.sampled_from([0, most, most / 2])
        options["q"] = draw(one | st.lists(one, min_size=1, max_size=3))
    return a, getattr(np, name), options


def fourier(draw):
    name = draw(st.sampled_from([*library._FFTS, *library._BLOCK_FFTS]))
    real = name.strip("2n") in ("rfft", "ihfft")
    a = draw(arrays(["f4", "f8"] if real else ["f4", "f8", "c8", "c16"], least=2))
    module = draw(st.sampled_from([np.fft, scipy_fft]))
    options = {"norm": draw(st.sampled_from([None, "ortho", "forward", "backward"]))}
    if name in library._FFTS:
        options |= {"axis": axis_of(draw, a), "n": draw(st.none() | st.integers(2, 15))}
    else:
        axes = draw(st.lists(st.integers(0, a.ndim - 1), min_size=1, max_size=3, unique=True))
        options["axes"] = tuple(axes)
        if draw(st.booleans()):
            options["s"] = tuple(draw(st.integers(2, 9)) for _ in axes)
    return a, getattr(module, name), options


def filtered(draw):
    name = draw(st.sampled_from(library.FILTERS))
    a = draw(arrays(["f4", "f8"], least=5))
    options = {"mode": draw(st.sampled_from(library.EDGES)), "cval": draw(st.floats(-2, 2))}
    if name == "gaussian_filter":
        options["sigma"] = draw(st.sampled_from([0.3, 0.5]))
        options["order"] = draw(st.integers(0, 2))
    elif "filter" in name:
        options["size"] = draw(st.integers(1, 5))
    elif "1d" in name:
        options |= {"weights": np.arange(draw(st.integers(1, 5))) - 1.5, "axis": axis_of(draw, a)}
    elif name in ("convolve", "correlate"):
        options["weights"] = np.arange(3.0**a.ndim).reshape((3,) * a.ndim)
    elif name != "laplace":
        options["axis"] = axis_of(draw, a)
    return a, getattr(ndimage, name), options


@pytest.mark.parametrize("kind", [sort, argsort, quantile, fourier, filtered])
@settings(
    max_examples=EXAMPLES, deadline=None, database=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
@given(data=st.data())
def test_any_call_gives_what_numpy_and_scipy_give(gpu, kind, data):
    a, function, options = kind(data.draw)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        wanted = np.asarray(function(a, **options))
        x = da.from_array(a, chunks=-1)
        c = x.map_blocks(
            function, drop_axis=list(range(a.ndim)), new_axis=list(range(wanted.ndim)),
            chunks=tuple([(n,) for n in wanted.shape]), dtype=wanted.dtype,
            meta=np.empty((0,) * wanted.ndim, wanted.dtype), **options,
        )  # fmt: skip
        got = c.compute()
    same(np.asarray(got), wanted)
