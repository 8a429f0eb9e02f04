"""Neighbours: edges and shifts, whose vectors read what lies anyhow; windows; medians of these."""

import functools

import dask.array as da
import numpy as np
import pytest

from gpuscheduler import Scheduler
from gpuscheduler.codegen.cuda import tuning, window_schedule, window_tiles
from gpuscheduler.fusion.task import KernelTask
from gpuscheduler.ir import limits, loop_tiling
from tests.fusion.test_fuser import smooth

cupy = pytest.importorskip("cupy")


def neighbours(b):
    return b[:-2, 1:-1] + b[2:, 1:-1] + b[1:-1, :-2] + b[1:-1, 2:] - 4 * b[1:-1, 1:-1]


def around(x, function):
    return da.map_overlap(
        function, x, depth=1, boundary="periodic", trim=False, dtype=x.dtype, meta=x._meta
    )


def smoothed(x):
    def mean(b):
        rows = np.roll(b, 1, 0) + np.roll(b, -1, 0)
        return (b + rows + np.roll(b, 1, 1) + np.roll(b, -1, 1)) / 5

    return da.map_overlap(mean, x, depth=1, boundary="reflect", dtype=x.dtype, meta=x._meta)


PROGRAMS = {
    "neighbours": lambda x: around(x, neighbours),
    "two steps": lambda x: around(around(x, neighbours), neighbours),
    "trimmed": smoothed,
    "rows": lambda x: x[1:] - x[:-1],
    "columns": lambda x: x[:, 1:] > x[:, :-1],
    "backwards": lambda x: x[::-1, ::-1] * 2 + 1,
    "moving": lambda x: (x[:, 2:] + x[:, 1:-1] + x[:, :-2]) / 3,
    "norm": lambda x: (around(x, neighbours) ** 2).sum(),
    "spread": lambda x: around(x, neighbours).std(),
    "furthest": lambda x: around(x, neighbours).argmax(),
    "mean of differences": lambda x: (x[1:, 1:] - x[:-1, :-1]).mean(),
    "sums of columns": lambda x: around(x, neighbours).sum(axis=0),
    "sums of rows": lambda x: around(x, neighbours).sum(axis=1),
    "spread of columns": lambda x: around(x, neighbours).std(axis=0),
    "furthest of rows": lambda x: around(x, neighbours).argmax(axis=1),
}


def six(b):
    inner = b[1:-1, 1:-1, 1:-1]
    ends = b[:-2, 1:-1, 1:-1] - b[2:, 1:-1, 1:-1] + b[1:-1, :-2, 1:-1] * 2 - b[1:-1, 2:, 1:-1]
    return ends + b[1:-1, 1:-1, :-2] - b[1:-1, 1:-1, 2:] * 3 + inner


SOLID = {
    "blocks": lambda x: around(x, six),
    "norm": lambda x: (around(x, six) ** 2).sum(),
    "along the first": lambda x: around(x, six).sum(axis=0),
    "along the second": lambda x: around(x, six).max(axis=1),
    "along the last": lambda x: around(x, six).mean(axis=2),
    "planes": lambda x: around(x, six).std(axis=(1, 2)),
    "lines": lambda x: around(x, six).sum(axis=(0, 1)),
    "slopes over time": lambda x: sum(g**2 for g in da.gradient(x, axis=(1, 2))).mean(axis=0),
    "slopes over areas": lambda x: sum(g**2 for g in da.gradient(x, axis=(1, 2))).mean((1, 2)),
}


@pytest.fixture(params=["vectors", "as chosen"])
def chosen(request, monkeypatch):
    if request.param == "vectors":
        monkeypatch.setattr(tuning, "LOOSE_LEAST", 1)
        monkeypatch.setattr(tuning, "MANY_STEPS", 1024)
        monkeypatch.setattr(limits, "CLOSE", 2**10)
        for file in (
            "plan.batching",
            *(f"devices.cuda.{f}" for f in ("kernels", "recorder", "replay")),
        ):
            monkeypatch.setattr(f"gpuscheduler.{file}.SMALL", 2**10)
        monkeypatch.setattr("gpuscheduler.devices.cuda.result_rooms.LEAST_WHOLE", 0)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("dtype", ["f4", "f8", "u1"])
@pytest.mark.parametrize("chunks", [64, 77])
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("devices", ["cuda:0", "cuda:0,0"])
def test_values(devices, program, chunks, dtype, chosen):
    """As blocks, in one array, and when the run is repeated by heart."""
    values = np.random.default_rng(0).integers(0, 99, (3 * chunks, 3 * chunks)).astype(dtype)
    if dtype == "u1" and program in ("trimmed", "moving", "spread"):
        values = values // 8  # what overflows is another test's
    check(PROGRAMS[program], da.from_array(values, chunks=chunks), devices)


def check(program, x, devices, close=1e-5, plan=False):
    """The value is Dask's own, also when the run is repeated by heart, and persisted."""
    want = program(x).compute(scheduler="sync")
    with Scheduler(devices, fuse_least=0, check=True) as s:
        y = program(x.to_backend("cupy").persist())
        planned = s.plan(y) if plan else None
        found = [cupy.asnumpy(y.compute()) for _ in range(3)]
        found.append(cupy.asnumpy(y.persist().compute()))
    for value in found:
        assert value.dtype == want.dtype
        np.testing.assert_allclose(value, want, rtol=close if x.dtype == "f4" else 1e-12)
    return planned


@pytest.mark.sampled(6)
@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("chunks", [(16, 24, 32), (13, 18, 27)])
@pytest.mark.parametrize("program", SOLID)
def test_three_axes(program, chunks, dtype, chosen):
    """Edges along three axes, and sums along some of them."""
    values = np.random.default_rng(0).integers(0, 99, [2 * n for n in chunks]).astype(dtype)
    check(SOLID[program], da.from_array(values, chunks=chunks), "cuda:0,0", 2e-5)


WALKED = {
    "second differences": lambda x: da.map_overlap(
        lambda b: np.roll(b, 1, 0) + np.roll(b, -1, 0) - 2 * b,
        x,
        depth={0: 1},
        boundary="reflect",
        dtype=x.dtype,
        meta=x._meta,
    ),
    "moving maxima": lambda x: da.map_overlap(
        lambda b: functools.reduce(np.maximum, [np.roll(b, n, 0) for n in range(-2, 3)]),
        x,
        depth={0: 2},
        boundary="nearest",
        dtype=x.dtype,
        meta=x._meta,
    ),
}


@pytest.mark.parametrize("chunks", [(16, 24, 32), (13, 18, 27)])
@pytest.mark.parametrize("program", WALKED)
@pytest.mark.parametrize("devices", ["cuda:0", "cuda:0,0"])
def test_neighbours_along_a_slow_axis(devices, program, chunks, chosen, monkeypatch):
    """In columns, as if planes were larger than the cache."""
    turned = []
    columns = loop_tiling.columns
    monkeypatch.setattr(loop_tiling, "columns", lambda k: turned.append(columns(k)) or turned[-1])
    for name, value in (("FAR", 1), ("TILE", 16), ("LEAST", 2)):
        monkeypatch.setattr(loop_tiling, name, value)
    values = np.random.default_rng(0).integers(0, 99, [2 * n for n in chunks]).astype("f4")
    check(WALKED[program], da.from_array(values, chunks=chunks), devices, 2e-5)
    assert any(k.strides for k in turned)


def windows(x, length=5, axis=0, split=True):
    view = da.lib.stride_tricks.sliding_window_view
    return view(x, length, axis=axis, automatic_rechunk=split)


SLIDING = {
    "means": lambda x: windows(x).mean(-1),
    "maxima": lambda x: windows(x, 12).max(-1),
    "long sums": lambda x: windows(x, 17).sum(-1),
    "deviations": lambda x: windows(x, 9).std(-1),
    "of the middle axis": lambda x: windows(x, 6, 1).min(-1),
    "of squares": lambda x: (windows(x, 7) ** 2).sum(-1),
    "departures": lambda x: x[2:-2] - windows(x).mean(-1),
    "of what there is": lambda x: da.nanmean(windows(da.where(x > 50, np.nan, x)), axis=-1),
    "seldom all": lambda x: (windows(x, 4) > 20).all(-1),
}
PANES = {
    "along rows": lambda x: windows(x, 11, 2).mean(-1),
    "maxima along rows": lambda x: windows(x, 3, 2).max(-1),
    "deviations along rows": lambda x: windows(x, 8, 2).std(-1),
}
BOXES = {
    "boxes": lambda x: windows(x, (4, 3), (1, 2)).mean((-2, -1)),
    "boxes across": lambda x: windows(x, (3, 5), (0, 2)).sum((-2, -1)),
    "departures from boxes": lambda x: (
        x[:, 2:-2, 2:-2] - windows(x, (5, 5), (1, 2), False).mean((-2, -1))
    ),
    "long boxes": lambda x: windows(x, (9, 12), (1, 2), False).max((-2, -1)),
    "deviations in boxes": lambda x: windows(x, (9, 4), (1, 2), False).std((-2, -1)),
    "deviations in long boxes": lambda x: windows(x, (3, 10), (0, 2), False).var((-2, -1)),
    "cubes": lambda x: windows(x, (3, 4, 2), (0, 1, 2), False).mean((-3, -2, -1)),
    "deviations in cubes": lambda x: windows(x, (3, 3, 3), (0, 1, 2), False).std((-3, -2, -1)),
    "boxes over time": lambda x: windows(x, (3, 10), (1, 2), False).sum((0, -2, -1)),
    "of complex numbers": lambda x: windows(x + 2j * x, (9, 3), (1, 2), False).mean((-2, -1)),
    "of those, deviations": lambda x: windows(x + 1j, (9, 9), (1, 2), False).std((-2, -1)),
    "boxes of what there is": lambda x: da.nanmax(
        windows(da.where(x > 50, np.nan, x), (2, 3), (1, 2), False), axis=(-2, -1)
    ),
}


MEDIANS = {
    "of five": lambda x: da.median(windows(x), axis=-1),
    "of boxes": lambda x: da.median(windows(x, (3, 3), (1, 2)), axis=(-2, -1)),
    "of an even number": lambda x: da.median(windows(x, 4, 2), axis=-1),
    "of what there is": lambda x: da.nanmedian(windows(da.where(x > 40, np.nan, x)), axis=-1),
    "over time": lambda x: da.median(x, axis=0),
    "quantile over time": lambda x: da.quantile(x, 0.3, axis=0),
    "quantiles": lambda x: da.quantile(windows(x), [0.1, 0.5, 1], axis=-1),
    "quantiles of what there is": lambda x: da.nanquantile(
        windows(da.where(x > 40, np.nan, x)), np.array([0, 0.7]), axis=-1
    ),
    "percentile": lambda x: windows(x).map_blocks(
        np.percentile, 90, axis=-1, drop_axis=-1, dtype="f8" if x.dtype.kind == "i" else x.dtype
    ),
}


@pytest.mark.filterwarnings("ignore:All-NaN:RuntimeWarning")
@pytest.mark.parametrize("dtype", ["f4", "f8", "i4"])
@pytest.mark.parametrize("program", MEDIANS)
@pytest.mark.sampled(2)
def test_medians(program, dtype):
    """In registers: nothing is sorted by a library."""
    chunks = (13, 18, 27)
    values = np.random.default_rng(0).integers(0, 99, [2 * n for n in chunks]).astype(dtype)
    x = da.from_array(values, chunks=chunks)
    planned = check(MEDIANS[program], x, "cuda:0,0", plan=True)
    assert not planned.why


@pytest.mark.sampled(4)
@pytest.mark.parametrize("chunks", [(16, 24, 32), (13, 18, 27)])
@pytest.mark.parametrize("program", [*SLIDING, *PANES, *BOXES])
@pytest.mark.parametrize("devices", ["cuda:0", "cuda:0,0"])
def test_windows_that_slide(devices, program, chunks, monkeypatch):
    """Several results of each thread, also where there are few, with edges and without."""
    found = []
    owner, place = (
        (window_schedule, "find_sliding_axes") if program in SLIDING else (window_tiles, "pane")
    )
    if program in BOXES:
        place = "box"
    chooses = getattr(owner, place)
    monkeypatch.setattr(tuning, "LEAST_IN_PANES", 1)
    monkeypatch.setattr(window_schedule, "most_results", lambda schedule: 64)
    monkeypatch.setattr(window_tiles, "too_few", lambda tiles, processors: False)

    def choose(*args):
        made = chooses(*args)
        found.append(made.sliding_axes if program in SLIDING else made)
        return made

    monkeypatch.setattr(owner, place, choose)
    values = np.random.default_rng(0).integers(0, 99, [2 * n for n in chunks]).astype("f4")
    x = da.from_array(values, chunks=chunks)
    check((SLIDING | PANES | BOXES)[program], x, devices, 2e-5)
    assert any(found)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("boundary", ["reflect", "periodic", "none"])
@pytest.mark.parametrize("devices", ["cuda:0", "cuda:0,0"])
def test_very_many_places(devices, boundary, chosen):
    """What reads too many of its neighbours' has them put together first."""

    def smoothed(x):
        return da.map_overlap(smooth, x, depth=4, boundary=boundary, dtype="f4", meta=x._meta)

    values = np.random.default_rng(0).random((200, 300)).astype("f4")
    planned = check(smoothed, da.from_array(values, chunks=100), devices, plan=True)
    assert not planned.why
    fused = [step.task for step in planned.steps if isinstance(step.task, KernelTask)]
    assert any(len(task.program.kernels) > 1 for task in fused)
