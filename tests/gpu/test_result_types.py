"""`compute()` gives an array of the library that the blocks are of, as Dask's own schedulers do.

The number of blocks and Dask's own idea of the collection do not matter.
"""

from __future__ import annotations

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")

import dask
import dask.array as da

import gpuscheduler

from .test_executor import host

pytestmark = pytest.mark.gpu

DTYPE = np.dtype("f8")


@pytest.fixture(scope="module")
def scheduler():
    with gpuscheduler.Scheduler("cuda:0,0", check=True) as s:
        yield s


def library(array):
    return type(array).__module__.partition(".")[0]


def of_numpy(values, chunks):
    return da.from_array(values, chunks=chunks)


def of_cupy(values, chunks):
    return of_numpy(values, chunks).to_backend("cupy")


def fails_on_nothing(b):
    """Dask tries it with a block without elements, and takes its value for NumPy's."""
    return np.sort(b, axis=0) / np.sort(b, axis=0)[-1].max()


def with_list(b, k):
    return np.sort(b, axis=0) + k[0]


def masked_out(b):
    return b if b.shape[0] else b[0]


#: What computes blocks of one library, whose collection tells of the other, or of its own.
PROGRAMS = {
    "fails without elements": lambda x: of_cupy(*x).map_blocks(fails_on_nothing, dtype=DTYPE),
    "list of arrays": lambda x: of_cupy(*x).map_blocks(with_list, k=[cupy.ones(1)], dtype=DTYPE),
    "returns its block": lambda x: of_cupy(*x).map_blocks(masked_out, dtype=DTYPE),
    "and then a kernel": lambda x: of_cupy(*x).map_blocks(masked_out, dtype=DTYPE) * 2 + 1,
    "sent by hand": lambda x: of_numpy(*x).map_blocks(
        cupy.asarray, dtype=DTYPE, meta=np.empty((0, 0))
    ),
    "fetched by hand": lambda x: of_cupy(*x).map_blocks(
        lambda b: b.get(), dtype=DTYPE, meta=np.empty((0, 0))
    ),
    "fetched, and said to be CuPy's": lambda x: of_cupy(*x).map_blocks(
        lambda b: b.get(), dtype=DTYPE, meta=cupy.empty((0, 0))
    ),
    "converted": lambda x: of_cupy(*x).to_backend("numpy"),
    "converted, of a wrong type": lambda x: (
        of_cupy(*x).map_blocks(fails_on_nothing, dtype=DTYPE).map_blocks(cupy.asnumpy, dtype=DTYPE)
    ),
    "of CuPy": lambda x: of_cupy(*x) + 1,
    "of NumPy": lambda x: of_numpy(*x) + 1,
}
CUTS = {"one": -1, "some": (5, 4), "many": (1, 1)}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_results_are_of_the_library_that_their_blocks_are_of(scheduler, name, cut):
    values = np.random.default_rng(0).random((20, 8))
    program = PROGRAMS[name]((values, CUTS[cut]))
    with dask.config.set({"array.backend": "cupy"}):
        want = program.compute(scheduler="sync")
        got = program.compute(scheduler=scheduler.get)
        (kept,) = dask.persist(program, scheduler=scheduler.get)
        again = kept.compute(scheduler=scheduler.get)
    for array in (got, again):
        assert library(array) == library(want)
        np.testing.assert_array_equal(host(array), host(want))


@pytest.mark.filterwarnings("ignore")
def test_blocks_of_other_shapes_than_the_collection_says_are_of_their_library(scheduler):
    x = of_cupy(np.arange(40.0), 5).map_blocks(lambda b: np.sort(b)[: b[3:4].size], dtype=DTYPE)
    want, got = (x.compute(scheduler=s) for s in ("sync", scheduler.get))
    assert library(got) == library(want) == "cupy"
    np.testing.assert_array_equal(host(got), host(want))
