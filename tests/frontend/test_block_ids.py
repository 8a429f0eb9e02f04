"""Blocks that are alike are told the same, and every value stays what Dask computes."""

import dask.array as da
import numpy as np
import pytest
from dask.array.overlap import trim_internal
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuscheduler import Scheduler
from gpuscheduler.frontend.block_ids import coarsen_block_ids
from gpuscheduler.fusion.fuser import FusionPass

BOUNDARIES = ("none", "reflect", "periodic", "nearest", 1.5)


def array(shape, chunks):
    return da.from_array(np.random.default_rng(1).random(shape), chunks=chunks)


def around(block):
    return block * 2 + np.roll(block, 1, 0) - np.roll(block, -1, -1)


@st.composite
def overlapping(draw):
    """An array, how far blocks reach into their neighbours, and what is beyond the ends."""
    chunks = tuple([tuple(draw(st.lists(st.integers(3, 6), min_size=1, max_size=5))) for _ in "ab"])
    x = array(tuple(map(sum, chunks)), chunks)
    boundary = {n: draw(st.sampled_from(BOUNDARIES)) for n in range(2)}
    far = st.integers(0, 3)
    depth = {
        n: draw(st.one_of(far, st.tuples(far, far))) if boundary[n] == "none" else draw(far)
        for n in range(2)
    }
    return x, depth, boundary


@settings(max_examples=60, deadline=None)
@given(overlapping())
def test_overlapping_blocks_are_what_dask_makes_them(case):
    x, depth, boundary = case
    y = x.map_overlap(around, depth=depth, boundary=boundary, allow_rechunk=False, dtype=float)
    want = y.compute(scheduler="sync")
    told = da.Array(coarsen_block_ids(y.dask), y.name, y.chunks, y.dtype)
    np.testing.assert_array_equal(told.compute(scheduler="sync"), want)
    with Scheduler("cpu:2") as s:
        np.testing.assert_array_equal(y.compute(scheduler=s.get), want)


def test_two_arrays_of_the_same_blocks_are_trimmed_in_their_own_ways():
    """Dask takes what has one name in two layers for one."""
    x = array((12, 12), 4)
    parts = [
        x.map_overlap(around, depth=depth, boundary=boundary, dtype=float)
        for depth in (1, {0: 1, 1: 0}, {0: 0, 1: 2})
        for boundary in ("none", "reflect", {0: "none", 1: "periodic"})
    ]
    y = sum(p * n for n, p in enumerate(parts, 1))
    with Scheduler("cpu:2") as s:
        np.testing.assert_array_equal(y.compute(scheduler=s.get), y.compute(scheduler="sync"))


def test_an_array_that_is_only_trimmed():
    x = array((20, 12), 4)
    y = trim_internal(x, {0: 1, 1: (0, 2)}, boundary={0: "none", 1: "none"})
    with Scheduler("cpu:2") as s:
        np.testing.assert_array_equal(y.compute(scheduler=s.get), y.compute(scheduler="sync"))


@pytest.mark.parametrize("edge_order", [1, 2])
@pytest.mark.parametrize("spacing", [0.5, "places"])
def test_gradients(edge_order, spacing):
    x = array((23, 28), (5, 7))
    far = [np.cumsum(np.arange(1.0, n + 1)) for n in x.shape] if spacing == "places" else [spacing]
    with Scheduler("cpu:2") as s:
        found = [g.compute(scheduler=s.get) for g in da.gradient(x, *far, edge_order=edge_order)]
    want = np.gradient(x.compute(scheduler="sync"), *far, edge_order=edge_order)
    for a, b in zip(found, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)


def wide(blocks):
    return array((blocks * 200, 400), (200, 200))


PROGRAMS = {
    "none": lambda x: x.map_overlap(around, depth=1, boundary="none", dtype=float),
    "reflect": lambda x: x.map_overlap(around, depth=1, boundary="reflect", dtype=float),
    "one side": lambda x: x.map_overlap(around, depth={0: (2, 0)}, boundary="none", dtype=float),
    "gradient": lambda x: sum(g**2 for g in da.gradient(x)),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_more_blocks_are_no_more_work_to_look_at(program, monkeypatch):
    """They were followed one by one, up to 2,000; those beyond were not fused at all."""
    looked, follow = [], FusionPass._trace

    def counted(self, *arguments):
        looked.append(1)
        return follow(self, *arguments)

    monkeypatch.setattr(FusionPass, "_trace", counted)
    counts = []
    for blocks in (5, 12):
        looked.clear()
        with Scheduler("cpu:2") as s:
            s.plan(PROGRAMS[program](wide(blocks)))
        counts.append(len(looked))
    assert 0 < counts[0] == counts[1]


def test_a_function_of_the_users_is_told_where_its_block_is():
    x = array((12, 12), 4)

    def number(block, block_id=None, block_info=None):
        return block + 100 * block_id[0] + block_info[0]["array-location"][1][0]

    y = x.map_overlap(number, depth=1, boundary="none", dtype=float)
    y += x.map_blocks(number, dtype=float)
    with Scheduler("cpu:2") as s:
        np.testing.assert_array_equal(y.compute(scheduler=s.get), y.compute(scheduler="sync"))
