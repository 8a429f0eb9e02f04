"""Blocks that are tuples, dictionaries and arrays of other shapes, of CuPy's: as on the host."""

from __future__ import annotations

import pytest

cupy = pytest.importorskip("cupy")

import dask.array as da
from hypothesis import given
from hypothesis import strategies as st

import gpuscheduler
from gpuscheduler.values import map_leaves
from tests.fusion import test_block_structures as structures

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=[0, None])
def scheduler(request):
    before = structures.from_values
    structures.from_values = lambda v, chunks: da.from_array(v, chunks=chunks).to_backend("cupy")
    options = {} if request.param is None else {"fuse_least": request.param}
    with gpuscheduler.Scheduler("cuda:0,0", check=True, **options) as s:
        yield s
    structures.from_values = before


def on_host(values):
    return map_leaves(lambda v: v.get() if isinstance(v, cupy.ndarray) else v, values)


@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")
@structures.examples
@given(st.data())
def test_blocks_of_any_structure_on_gpus_have_dasks_values(scheduler, data):
    """What CuPy refuses Dask fails with, and this may compute on the host."""
    chosen = data.draw(structures.collections())
    structures.check(chosen, scheduler, host=on_host, lenient=True)
