"""xarray's programs, unchanged, on GPUs: they give what Dask's own scheduler gives.

On the stand-in for CUDA NumPy evaluates the kernels: there are many, and each would be compiled.
"""

import warnings

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")
programs = pytest.importorskip("tests.support.xarray_programs", reason="xarray is not there")

import dask

import gpuscheduler
from gpuscheduler import PlanError
from gpuscheduler.pipeline import choice

from .conftest import fake

xr = programs.xr
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings(
        "ignore::RuntimeWarning", "ignore::FutureWarning",
        "ignore::gpuscheduler.errors.GpuUnused",
    ),
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def evaluated_kernels():
    with pytest.MonkeyPatch.context() as patch:
        if fake:
            from tests.support import interpreted_kernels

            interpreted_kernels.install(patch.setattr)
        yield patch


@pytest.fixture(scope="module")
def scheduler(request):
    devices, numpy = request.param
    with pytest.MonkeyPatch.context() as patch:
        if numpy == "auto":  # each computation goes one way or the other
            from tests.support import interpreted_kernels

            interpreted_kernels.flip_coins(patch.setattr)
        with (
            gpuscheduler.Scheduler(devices, numpy=numpy, check=True) as s,
            dask.config.set({"array.backend": "numpy"}),
        ):
            yield s


WANTED = {}


def wanted(name, t):
    if name not in WANTED:
        with dask.config.set(scheduler="sync"):
            WANTED[name] = programs.run(name, t)
    return WANTED[name]


def compare(name, exact):
    t = programs.temperatures().chunk(programs.CHUNKS)
    programs.assert_same(programs.run(name, t), wanted(name, t), exact)


def on(*modes):
    return pytest.mark.parametrize("scheduler", modes, indirect=True, ids=" ".join)


@on(("cuda:0,0", "gpu"))
@pytest.mark.parametrize("name", programs.PROGRAMS)
def test_programs_on_gpus(scheduler, name):
    compare(name, name in programs.EXACT)


@on(("cuda:0", "gpu"), ("cuda:0,0", "auto"))
@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", programs.PROGRAMS)
def test_programs_in_other_modes(scheduler, name):
    compare(name, name in programs.EXACT)


@on(("cuda:0", "host"))
@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", programs.PROGRAMS)
def test_programs_on_the_host(scheduler, name):
    compare(name, exact=True)  # blocks as small as these are no kernels there


@on(("cuda:0", "gpu-only"))
@pytest.mark.parametrize("name", ["anomalies without flox", "rolling", "std, var"])
def test_programs_of_kernels_alone(scheduler, name):
    compare(name, exact=False)


@on(("cuda:0", "gpu-only"))
def test_what_is_no_kernel_is_named(scheduler, monkeypatch):
    monkeypatch.setattr(choice, "MOST_CALLED", 1000)
    t = programs.temperatures().chunk(programs.CHUNKS)
    with pytest.raises(PlanError, match=r'numpy="gpu-only", and some work is no kernel.*vectorize'):
        programs.run("slopes", t)


@on(("cuda:0,0", "gpu"))
def test_scores_of_a_store(scheduler, tmp_path):
    """The program of the guide: read, persisted, written, plotted."""
    pytest.importorskip("zarr")
    climate = pytest.importorskip("examples.climate")
    t = programs.temperatures()
    t.to_dataset().to_zarr(
        tmp_path / "a", consolidated=False, encoding={"t2m": {"chunks": (24, 2, 6)}}
    )
    read = xr.open_zarr(tmp_path / "a", consolidated=False).t2m
    kept = read.persist()
    z = climate.scores(kept).chunk(time=6)
    z.to_dataset(name="z").to_zarr(tmp_path / "z", consolidated=False)
    want = climate.scores(t)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        written = xr.open_zarr(tmp_path / "z", consolidated=False).z
        for got, expected in ((written, want), (z[-1], want[-1])):
            assert type(got.values) is np.ndarray
            np.testing.assert_allclose(got.values, expected.values, rtol=1e-3, atol=1e-4)
    assert not scheduler.last.where
    assert "cupy" not in repr(kept)
    assert type(z.isel(time=-1).to_dataframe(name="z").z.to_numpy()) is np.ndarray
