"""What differs from an earlier collection in names and data alone is not planned again on GPUs."""

from __future__ import annotations

from functools import partial

import cupy
import dask.array as da
import numpy as np
import pytest

from gpuscheduler import Scheduler
from tests.pipeline.test_template import LISTS
from tests.pipeline.test_template_objects import WAYS, check_way

from .test_executor import come_back_elsewhere

#: What CuPy has.
USUAL = [
    "argmax", "argwhere", "coarsen", "compress", "corrcoef", "cumsum", "delete", "gradient",
    "histogram", "list", "map_overlap", "mask", "median", "nanargmin", "tril", "vindex", "windows",
]  # fmt: skip


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("name", USUAL)
def test_functions_of_dask_that_are_told_by_lists(planned, name, fuse):
    arrays = [np.random.default_rng(seed).random((8, 6)) for seed in range(3)]
    x = [da.from_array(a, chunks=(4, 3)) for a in arrays]
    want = [LISTS[name](v).compute(scheduler="sync") for v in x]
    with Scheduler(devices="cuda:0,0", fuse=fuse, fuse_least=0):
        y = [v.map_blocks(cupy.asarray).persist() for v in x]
        planned.clear()
        for v, w in zip(y, want, strict=True):
            np.testing.assert_allclose(cupy.asnumpy(LISTS[name](v).compute()), w, rtol=1e-12)
    assert len({*map(tuple, planned)}) == 1


@pytest.mark.parametrize("kinds", ["array, chunk", "chunk, array", "chunk, array, chunk"])
@pytest.mark.parametrize("options", [{}, {"timeline": True}], ids=["by a tape", "by steps"])
def test_what_a_run_may_move_is_not_like_what_it_may_not(options, kinds):
    """A launch of several blocks knows by heart where arrays are that nobody moves."""
    with Scheduler(devices="cuda:0", **options) as s:
        for seed, kind in enumerate(kinds.split(", ")):
            a = np.random.default_rng(seed).integers(0, 9, (64, 64)).astype("f8")
            x = da.from_array(cupy.asarray(a), chunks=32) + 0
            x = x.persist() if kind == "chunk" else x.persist(scheduler="sync")
            y = x.sum()
            for _ in range(4):
                assert float(y.compute()) == a.sum()
            if kind == "chunk":
                for chunk in s._persisted.chunks():
                    come_back_elsewhere(s, chunk)
                for _ in range(4):
                    assert float(y.compute()) == a.sum()
            del x, y


@pytest.mark.filterwarnings("ignore::gpuscheduler.errors.GpuUnused")
@pytest.mark.parametrize("numpy", ["auto", "gpu"])
@pytest.mark.parametrize("way", WAYS)
def test_objects_that_change(way, numpy):
    with Scheduler(devices="cuda:0,0", fuse_least=0, numpy=numpy):
        check_way(way)


@pytest.mark.filterwarnings("ignore:.*runs on the host:RuntimeWarning")
@pytest.mark.parametrize("way", [way for way in WAYS if way not in ("vectorized", "axis")])
def test_objects_in_tasks_of_cupys_blocks(way):
    with Scheduler(devices="cuda:0,0", fuse_least=0):
        to_gpu = partial(da.map_blocks, cupy.asarray, meta=cupy.empty((0, 0)))
        check_way(way, to_gpu, cupy.asnumpy)
