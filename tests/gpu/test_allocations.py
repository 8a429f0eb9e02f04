"""What steps on GPUs allocate, by the user's line."""

from __future__ import annotations

import inspect

import pytest

cupy = pytest.importorskip("cupy")

import dask
import dask.array as da
from dask import delayed

from gpuscheduler import Scheduler
from gpuscheduler.devices.cuda.allocations import LineMeter

pytestmark = pytest.mark.gpu
SIDE = 128
BLOCK = SIDE * SIDE * 8


def centre(b):
    mean = b.mean()
    apart = b - mean
    return (apart**2) + apart


def line_in(function, text):
    """Where a line of a function is: "tests/gpu/test_allocations.py:26"."""
    lines, first = inspect.getsourcelines(function)
    (number,) = [first + n for n, line in enumerate(lines) if text in line]
    return f":{number}"


def blocks(n=4):
    x = da.from_array(cupy.ones((n * SIDE, SIDE)), chunks=SIDE)
    return x.map_blocks(centre)


@pytest.fixture
def scheduler():
    with Scheduler("cuda:0", fuse=False) as s:
        yield s


def test_each_line_says_what_it_had_at_once_and_in_total(scheduler):
    with scheduler.record("memory") as recording:
        kept = blocks().persist()
    rows = {r.line.rpartition(":")[2]: r for r in recording.memory().allocations if r.source}
    apart = rows[line_in(centre, "apart = ")[1:]]
    value = rows[line_in(centre, "return")[1:]]
    assert (apart.most, apart.total, apart.count) == (BLOCK, 4 * BLOCK, 4)
    assert apart.source == "apart = b - mean"
    assert (value.most, value.total, value.count) == (2 * BLOCK, 8 * BLOCK, 8)
    assert apart.name == value.name
    assert "centre" in apart.name
    assert sum(r.acquired for r in recording.memory().allocations) > 0
    del kept


def test_the_peak_counts_what_a_step_takes_for_itself(scheduler):
    """When the last block is made, four are there, with `apart` and its square."""
    with scheduler.record("memory") as recording:
        kept = blocks().persist()
    (peak,) = recording.memory("line").peaks
    working = {r.source: r.nbytes for r in peak.rows if r.what == "working memory"}
    assert peak.nbytes == 4 * BLOCK
    assert working["apart = b - mean"] == BLOCK
    assert working["return (apart**2) + apart"] == BLOCK
    text = str(recording.memory("line"))
    assert "apart = b - mean" in text
    assert "at once" in text
    del kept


@pytest.mark.parametrize("by", ["layer", "line", "task", "device"])
def test_sums_are_the_same_however_rows_are_grouped(scheduler, by):
    with scheduler.record("memory") as recording:
        blocks().sum().compute()
    rows, sums = recording.memory(by).allocations, recording.runs()[0].allocations
    assert sum(r.total for r in rows) == sum(u.total for a in sums for u in a.uses) > 0
    names = {r.name for r in rows}
    if by == "task":
        assert len([n for n in names if "centre" in n or "sum" in n]) >= 4
    assert names == {"device 0"} or by != "device"


def test_nothing_is_metered_below_that_level(scheduler):
    with scheduler.record("device") as recording:
        blocks().sum().compute()
    assert not any(r.allocations for r in recording.runs())
    assert recording.memory().allocations == ()


def test_a_meter_ends_where_the_computation_begins():
    """The caller's own line does not allocate what a library does."""
    meter = LineMeter()
    meter.call(cupy.zeros, 1000)
    assert [use.site for use in meter.log.sum_up(0, 0).uses] == [None]


def test_a_step_may_compute_another_graph(scheduler):
    def outer(n):
        return float(dask.compute(blocks(n).sum(), scheduler=scheduler)[0])

    with scheduler.record("memory") as recording:
        assert delayed(outer)(2).compute(scheduler=scheduler) == 0.0  # apart from the mean
    assert len(recording.runs()) == 2
    assert any(r.source == "apart = b - mean" for r in recording.memory().allocations)


def test_refused_memory_leaves_a_true_record(scheduler):
    """What a function allocates before there is no memory is freed with it."""

    def greedy(b):
        small = b + 1
        if not greedy.tried:
            greedy.tried = True
            raise cupy.cuda.memory.OutOfMemoryError(2**20, 2**20)
        return small * 2

    greedy.tried = False
    x = da.from_array(cupy.ones((SIDE, SIDE)), chunks=SIDE).map_blocks(greedy, dtype=float)
    with scheduler.record("memory") as recording:
        assert float(x.sum().compute()) == SIDE * SIDE * 4
    assert all(u.working >= 0 for a in recording.runs()[0].allocations for u in a.uses)
