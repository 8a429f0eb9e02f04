"""Which GPU library a computation names is found without writing down its tasks."""

import dask
import dask.array as da
import numpy as np
import pytest
from dask.blockwise import Blockwise

from gpuscheduler.frontend.lowering import received_by_scheduler
from gpuscheduler.pipeline.gpu_libraries import Libraries


def collections():
    x = da.ones((8, 8), chunks=2) + 1
    return {
        "computed": ((x.sum(),), dask.compute),
        "persisted": ((x,), dask.persist),
        "two": ((x + 1, x.T), dask.compute),
        "with a delayed one": ((x + 1, dask.delayed(len)("abc")), dask.compute),
    }


@pytest.mark.parametrize("name", collections())
def test_a_look_writes_no_tasks_of_blockwise_layers_down(name, monkeypatch):
    given, by = collections()[name]
    expr, _ = received_by_scheduler(*given, by=by)

    def fail(layer):
        raise AssertionError(f"{layer} is written down")

    monkeypatch.setattr(Blockwise, "_dict", property(fail))
    assert Libraries().look(expr).gpu_library is None


def test_a_look_finds_a_library_in_any_collection_of_a_computation():
    def uses_cupy(block):
        import cupy

        return cupy.asarray(block)

    x = da.ones(4, chunks=2)
    y = x.map_blocks(uses_cupy, dtype=float, meta=np.empty(0))
    for given in ((y,), (x, y), (dask.delayed(len)("abc"), y), (x, dask.delayed(uses_cupy)(x))):
        for by in (dask.compute, dask.persist):
            expr, _ = received_by_scheduler(*given, by=by)
            assert Libraries().look(expr).gpu_library == "cupy"
