"""xarray's objects that are computed: new ones get the plan of like ones, and their own labels."""

import gc
import weakref

import numpy as np
import pytest

pytest.importorskip("cupy")
xr = pytest.importorskip("xarray")

import dask

import gpuscheduler
from gpuscheduler.pipeline.cache import PlanCache
from tests.support import xarray_programs as programs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::gpuscheduler.errors.GpuUnused"),
]
DEVICES = ("cpu:2", "host"), ("cuda:0", "gpu"), ("cuda:0,0", "gpu"), ("cuda:0", "host")


@pytest.fixture
def found(monkeypatch):
    """How the plan of each new computation was found: as a template's, or not."""
    found, find_like = [], PlanCache.find_like

    def find(*args):
        entry = find_like(*args)
        found.append("new" if entry is None else "template")
        return entry

    monkeypatch.setattr(PlanCache, "find_like", find)
    return found


@pytest.fixture(params=DEVICES, ids=" ".join)
def scheduler(request):
    devices, numpy = request.param
    with (
        gpuscheduler.Scheduler(devices, numpy=numpy) as s,
        dask.config.set({"array.backend": "numpy"}),
    ):
        yield s


def field(n):
    """Temperatures whose values, coordinates and attributes depend on a number."""
    t = programs.temperatures() + np.float32(n)
    t = t.assign_coords(lat=t.lat + n, lon=t.lon * (n + 1), run=n)
    return t.assign_attrs(number=n).chunk(programs.CHUNKS)


def compare(collections, scheduler):
    got = dask.compute(*collections, scheduler=scheduler.get)
    wanted = dask.compute(*collections, scheduler="sync")
    for one, other in zip(got, wanted, strict=True):
        xr.testing.assert_allclose(one, other, rtol=1e-5)  # coordinates, too
        assert one.attrs == other.attrs
        assert type(one.to_numpy() if isinstance(one, xr.DataArray) else one.u.values) is np.ndarray


PROGRAMS = {
    "mean": lambda t: [(t * 2 + 1).mean("time")],
    "sum": lambda t: [t * 2 + 1],
    "slices": lambda t: [t.isel(time=[3, 1], lat=slice(None, None, -1))],
    "dataset": lambda t: [t.to_dataset(name="u").assign(v=t.max("lon"), w=("lat", t.lat.values))],
    "several": lambda t: [t.mean("time"), field(t.run.item() + 10).mean("time"), t + 1],
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_new_objects_get_a_like_plan_and_their_own_labels(scheduler, found, name):
    for n in range(3):
        compare(PROGRAMS[name](field(n)), scheduler)
    assert found == ["new", "template", "template"]


def test_the_same_object_again_has_its_labels(scheduler):
    a, b = field(1) + 1, field(2) + 1
    for made in (a, b, a, a, b):
        compare([made], scheduler)


def test_objects_of_other_names_and_kinds_keep_theirs(scheduler):
    for name in ("a", "b", "a"):
        t = field(1).rename(name) + 1
        compare([t], scheduler)
        (got,) = dask.compute(t, scheduler=scheduler.get)
        assert got.name == name
        compare([t.to_dataset(name="u")], scheduler)
        compare([t.to_dataset(name="u").u], scheduler)


def test_a_template_keeps_no_object(scheduler):
    """Coordinates that the first object had are freed with it."""
    numbers = np.arange(float(programs.LAT))
    watched = weakref.ref(numbers)
    t = field(1).assign_coords(number=("lat", numbers))
    compare([t + 1], scheduler)
    compare([field(2).assign_coords(number=("lat", numbers * 2)) + 1], scheduler)
    del t, numbers
    gc.collect()
    assert watched() is None
