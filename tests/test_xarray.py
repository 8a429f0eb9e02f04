"""xarray's programs, unchanged, on CPU devices: they give what Dask's own scheduler gives."""

import dask
import numpy as np
import pytest

import gpuscheduler
from gpuscheduler.pipeline import compile as compilation

programs = pytest.importorskip("tests.support.xarray_programs", reason="xarray is not there")
xr = programs.xr

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::FutureWarning")


@pytest.fixture(scope="module")
def fused():
    """Every task that can be a kernel is one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(compilation.FUSE_FEWEST, "cpu", 1)
        with gpuscheduler.Scheduler("cpu:2", fuse_least=0, check=True) as s:
            yield s


@pytest.mark.parametrize("name", programs.PROGRAMS)
def test_programs_give_what_dasks_scheduler_gives(fused, name):
    t = programs.temperatures(gaps=name in ("mean, sum", "std, var", "rolling", "count"))
    t = t.chunk(programs.CHUNKS)
    got = programs.run(name, t)
    with dask.config.set(scheduler="sync"):
        wanted = programs.run(name, t)
    programs.assert_same(got, wanted, name in programs.EXACT)


def test_stores_are_read_and_written(fused, tmp_path):
    pytest.importorskip("zarr")
    t = programs.temperatures().to_dataset()
    packed = {"dtype": "i2", "scale_factor": 0.01, "add_offset": 280.0, "_FillValue": -9999}
    for n, encoding in enumerate([{}, packed]):
        source, target = tmp_path / f"a{n}", tmp_path / f"b{n}"
        t.to_zarr(source, consolidated=False, encoding={"t2m": {"chunks": (24, 2, 6), **encoding}})
        read = xr.open_zarr(source, consolidated=False)
        (read + 1).to_zarr(target, consolidated=False)
        np.testing.assert_allclose(
            xr.open_zarr(target, consolidated=False).t2m, t.t2m + 1, atol=0.01
        )
        with dask.config.set(scheduler="sync"):
            wanted = read.t2m.mean("time").values
        np.testing.assert_allclose(read.t2m.mean("time").values, wanted, rtol=1e-5)
