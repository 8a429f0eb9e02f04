"""NumPy's arrays in tasks of code that was written for NumPy: tables, weights, edges."""

from __future__ import annotations

import threading
import time
import warnings

import cupy
import dask.array as da
import numpy as np
import pytest

from gpuscheduler import Scheduler
from gpuscheduler.fusion.task import KernelTask

A = np.random.default_rng(0).random((8, 12))
K = np.random.default_rng(1).integers(0, 9, (8, 12))
TABLE, POINT = np.linspace(0, 1, 9), np.array(1.0)
WEIGHTS = np.array([1.0, 4, 6, 4, 1])


def windows(x, axis):
    return da.lib.stride_tricks.sliding_window_view(x, 5, axis=axis)


EVERY = {
    "average": (
        lambda x, k: da.average(x, axis=0, weights=np.arange(8)),
        lambda: np.average(A, axis=0, weights=np.arange(8)),
    ),
    "digitize": (lambda x, k: da.digitize(x, TABLE), lambda: np.digitize(A, TABLE)),
    "histogram": (
        lambda x, k: da.histogram(x, TABLE, weights=x)[0],
        lambda: np.histogram(A, TABLE, weights=A)[0],
    ),
    "histogram2d": (
        lambda x, k: da.histogram2d(x.ravel(), x.ravel() ** 2, bins=(TABLE, TABLE))[0],
        lambda: np.histogram2d(A.ravel(), A.ravel() ** 2, bins=(TABLE, TABLE))[0],
    ),
    "histogramdd": (
        lambda x, k: da.histogramdd(x.rechunk((4, 12))[:, :3], (4, 3, 5), ((0, 1),) * 3)[0],
        lambda: np.histogramdd(A[:, :3], (4, 3, 5), ((0, 1),) * 3)[0],
    ),
    "interp": (
        lambda x, k: x.map_blocks(np.interp, TABLE, TABLE**2, dtype="f8"),
        lambda: np.interp(A, TABLE, TABLE**2),
    ),
    "isin": (lambda x, k: da.isin(k, [1, 3, 7]), lambda: np.isin(K, [1, 3, 7])),
    "look-up": (
        lambda x, k: k.map_blocks(lambda i, table: table[i], TABLE, dtype="f8"),
        lambda: TABLE[K],
    ),
    "look-up of its own": (
        lambda x, k: k.map_blocks(lambda i: TABLE[i], dtype="f8"),
        lambda: TABLE[K],
    ),
    "weights of windows": (
        lambda x, k: (windows(x, 1) * WEIGHTS).sum(axis=-1),
        lambda: sum(A[:, i : 8 + i] * w for i, w in enumerate(WEIGHTS)),
    ),
    "weights of windows as a product": (
        lambda x, k: windows(x, 0) @ WEIGHTS,
        lambda: sum(A[i : 4 + i] * w for i, w in enumerate(WEIGHTS)),
    ),
}


#: What CuPy has not.
OURS = {"histogram2d", "histogramdd"}


@pytest.mark.parametrize(
    ("name", "fuse"), [(n, f) for n in EVERY for f in (True, False) if f or n not in OURS]
)
def test_arrays_of_numpy_among_those_of_cupy(name, fuse):
    build, want = EVERY[name]
    with Scheduler(devices="cuda:0,0", fuse=fuse, fuse_least=0):
        x, k = (da.from_array(v, chunks=(4, 6)).map_blocks(cupy.asarray).persist() for v in (A, K))
        for _ in range(4):
            np.testing.assert_allclose(cupy.asnumpy(build(x, k).compute()), want(), rtol=1e-12)


def blocks(a=A):
    return da.from_array(a, chunks=(4, 6)).map_blocks(cupy.asarray)


def gathered(x):
    return cupy.asnumpy(x.compute())


@pytest.fixture
def scheduler():
    with Scheduler(devices="cuda:0") as scheduler:
        yield scheduler


def test_what_a_function_has_around_it_or_is_given(scheduler):
    table, one = TABLE.copy(), np.array(1.0)

    def own(i):
        return table[i] * one * POINT

    k = blocks(K)
    for f in (lambda i: own(i), own):
        np.testing.assert_array_equal(gathered(k.map_blocks(f, dtype="f8")), table[K])
    y = k.map_blocks(lambda i, tables: tables["a"][0][i], {"a": [table]}, dtype="f8")
    np.testing.assert_array_equal(gathered(y), table[K])
    table[:] = table**2  # tasks read what is there when they run
    np.testing.assert_array_equal(gathered(k.map_blocks(own, dtype="f8")), table[K])
    np.testing.assert_array_equal(gathered(y), table[K])


def test_a_point_of_the_host_in_a_kernel(scheduler, monkeypatch):
    """The kernel reads it, and nobody asks CuPy."""

    def no_kernel(self, values):
        raise AssertionError(self)

    monkeypatch.setattr(KernelTask, "__call__", no_kernel)
    for q in (0.3, np.array(0.7), [0.1, 1]):
        y = da.quantile(blocks().rechunk((8, 4)).persist(), q, axis=0)
        for _ in range(3):
            np.testing.assert_allclose(gathered(y), np.quantile(A, q, axis=0), rtol=1e-12)


@pytest.mark.parametrize("dtype", ["i2", "f4", "c16", "?"])
@pytest.mark.parametrize("fuse", [True, False])
def test_arrays_in_any_order_and_seen_many_times(fuse, dtype):
    with Scheduler(devices="cuda:0", fuse=fuse, fuse_least=0):
        for b in (
            np.broadcast_to(np.arange(8)[:, None], (8, 12)),
            np.broadcast_to(np.arange(12), (8, 12)),
            np.arange(96).reshape(12, 8).T,
            np.arange(384).reshape(16, 24)[::-2, ::2],
        ):
            b = b.astype(dtype, order="K", subok=False) if b.strides[1] else b.astype(dtype)
            many = da.from_array(b, chunks=(4, 6), asarray=False)
            np.testing.assert_allclose(gathered(blocks() * many), A * b)
            row = np.broadcast_to(b[0, :6], (4, 6))
            y = blocks().map_blocks(lambda v, row: np.add(v, row), row, dtype="c16")
            np.testing.assert_allclose(gathered(y), A + np.tile(b[0, :6], 2))


def test_a_function_that_writes_to_what_nobody_would_see(scheduler):
    """It is not called again where it keeps numbers outside, and its writes are not lost."""
    sums, calls = np.zeros(4), []

    def keeps(block):
        calls.append(1)
        sums[:] = block[0, :4]
        return block

    def counts(block):
        nonlocal sums
        sums = sums + block[0, :4]
        return block

    def given(block, out):
        np.add.at(out, np.zeros(1, int), np.ones(1))
        out[:] = out + block[0, :4]
        return block

    for f, more in ((keeps, ()), (counts, ()), (given, (sums,))):
        with pytest.raises(TypeError, match="NumPy array|numpy.ndarray"):
            blocks().map_blocks(f, *more, dtype="f8").compute()
    # one that only might: it writes to an array of its own

    def own(block, table):
        out = block * 0
        out[:, 0] = table[:4]
        return out

    y = blocks().map_blocks(own, TABLE, dtype="f8")
    np.testing.assert_array_equal(gathered(y)[:, 6], np.tile(TABLE[:4], 2))


def test_what_fails_for_other_reasons_says_those(scheduler):
    def fails(block, table):
        block[:, :4] * table[:4]
        raise TypeError("of its own")

    with pytest.raises(TypeError, match="of its own|numpy.ndarray"):
        blocks().map_blocks(fails, TABLE, dtype="f8").compute()
    with pytest.raises(TypeError, match="operand type"):
        blocks().map_blocks(lambda b: b + object(), dtype="f8").compute()
    x = da.from_array(A, chunks=(4, 6))  # all of it is the host's
    with pytest.raises(TypeError, match="of its own"):
        x.map_blocks(fails, TABLE, dtype="f8").compute()
    np.testing.assert_array_equal(
        x.map_blocks(np.interp, TABLE, TABLE).compute(), np.interp(A, TABLE, TABLE)
    )


def test_memory_that_is_refused_while_arrays_are_brought():
    """The task is tried again as any other is."""
    tried = []

    def asks(block, table):
        out = np.interp(block, table, table)
        tried.append(1)
        if len(tried) == 1:
            raise cupy.cuda.memory.OutOfMemoryError(1, 1, 1)
        return out

    with Scheduler(devices="cuda:0"):
        y = blocks().map_blocks(asks, TABLE, dtype="f8")
        np.testing.assert_allclose(gathered(y), np.interp(A, TABLE, TABLE))
        assert len(tried) == 5


def test_two_devices_that_find_it_out_at_once():
    """One of which has heard of it from the other when it fails."""
    together, calls = threading.Barrier(2), []

    def meets(block, table):
        calls.append(1)
        n = len(calls)
        if n <= 2:
            together.wait(20)
            time.sleep(0.1 * (n - 1))
        return np.interp(block, table, table)

    with Scheduler(devices="cuda:0,0"):
        y = blocks().map_blocks(meets, TABLE, dtype="f8", meta=cupy.empty((0, 0)))
        np.testing.assert_allclose(gathered(y), np.interp(A, TABLE, TABLE))


# ---- on the host


def shuffled(x):
    return np.random.default_rng(0).permuted(x, axis=0)


def on_host(block, *others):
    """What CuPy does not do: NumPy makes an array of its own of it."""
    return shuffled(block) + sum(shuffled(o).sum() for o in others)


SHUFFLED = np.block([[shuffled(A[i : i + 4, j : j + 6]) for j in (0, 6)] for i in (0, 4)])


def refused():
    return pytest.warns(RuntimeWarning, match="runs on the host.*Implicit conversion")


@pytest.mark.parametrize("devices", ["cuda:0", "cuda:0,0"])
def test_what_cupy_refuses_runs_on_the_host(devices):
    tried = []

    def f(block):
        tried.append(type(block))
        return on_host(block)

    with Scheduler(devices=devices):
        y = blocks().persist().map_blocks(f, dtype="f8", meta=cupy.empty((0, 0)), name="on_host")
        with refused():
            got = y.compute()
        assert type(got) is cupy.ndarray
        np.testing.assert_array_equal(cupy.asnumpy(got), SHUFFLED)
        assert tried.count(cupy.ndarray) <= 2  # each device finds it out at most once
        assert tried.count(np.ndarray) == 4
        tried.clear()
        z = y.sum(axis=0)  # which goes on on the device
        with refused():
            np.testing.assert_allclose(gathered(z), SHUFFLED.sum(axis=0))
        np.testing.assert_allclose(gathered(z), SHUFFLED.sum(axis=0))
        tried.clear()
        np.testing.assert_array_equal(gathered(y), SHUFFLED)  # known, and no warning
        assert tried == [np.ndarray] * 4


OF = {"sent": lambda x: x, "there": lambda x: x.persist(), "one": lambda x: x.blocks[0, 0]}


@pytest.mark.parametrize("which", list(OF))
def test_a_method_of_numpys_arrays(scheduler, which):
    """Also where the task sends the block itself, and has no other array on the device."""
    y = OF[which](blocks()).map_blocks(np.ndarray.copy, dtype="f8", meta=cupy.empty((0, 0)))
    for known in (False, True):
        with (
            warnings.catch_warnings() if known else pytest.warns(RuntimeWarning, match="on the ho")
        ):
            np.testing.assert_array_equal(gathered(y), A[: len(y), : y.shape[1]])


def test_what_a_task_has_around_it_comes_along(scheduler):
    around, given = cupy.arange(3.0), {"a": [cupy.ones(2)]}

    def f(block, d, table):
        return {"value": on_host(block, around, d["a"][0]), "of": table[:2], "when": [WHEN, 1]}

    y = blocks().map_blocks(f, given, TABLE, dtype="f8", meta=cupy.empty((0, 0)), name="on_host")
    z = y.map_blocks(lambda d: d["value"] + d["of"][1], dtype="f8", meta=cupy.empty((0, 0)))
    with refused():
        np.testing.assert_allclose(gathered(z), SHUFFLED + 5 + TABLE[1])
    with refused():
        found = y.blocks[0, 0].compute()
    assert type(found["value"]) is type(found["of"]) is cupy.ndarray
    assert found["when"] == [WHEN, 1]  # of a type that devices do not have


WHEN = np.datetime64("2026-11-27")


def test_operations_that_a_kernel_stood_for(scheduler, monkeypatch):
    """Of which CuPy refuses one, where the kernel does not fit after all."""
    monkeypatch.setattr(KernelTask, "arrays", lambda self, values, copy=False: None)
    y = blocks().persist().map_blocks(lambda b: np.asarray(b) + TABLE[:6], dtype="f8")
    assert [type(s.task) for s in scheduler.plan(y).steps].count(KernelTask) == 4
    with refused():
        np.testing.assert_array_equal(gathered(y), A + np.tile(TABLE[:6], 2))
    np.testing.assert_array_equal(gathered(y), A + np.tile(TABLE[:6], 2))


def test_a_function_that_shares_variables_with_one_inside(scheduler):
    def f(block):
        axis = 0
        axis, out = axis + 0, [np.random.default_rng(0).permuted(b, axis=axis) for b in [block]]
        return out[0]

    x = blocks().persist()
    with refused():
        np.testing.assert_array_equal(gathered(x.map_blocks(f, meta=x._meta)), SHUFFLED)


def test_what_the_host_refuses_too_is_the_first_error(scheduler):
    def fails(block):
        on_host(block)
        raise ValueError("of its own")

    with pytest.raises(TypeError, match="Implicit conversion"):
        blocks().map_blocks(fails, dtype="f8", meta=cupy.empty((0, 0))).compute()
    tried = []

    def wrong(block):
        tried.append(1)
        raise TypeError("of its own")

    x = blocks()[:4, :6].persist()
    with pytest.raises(TypeError, match="of its own"):
        x.map_blocks(wrong, dtype="f8", meta=cupy.empty((0, 0))).compute()
    assert len(tried) == 1  # CuPy has nothing to do with it


def test_what_may_have_written_before_it_failed_is_not_called_again(scheduler):
    counted = np.zeros(1)

    def counts(block):
        counted[0] += 1
        return on_host(block)

    x = blocks()[:4, :6].persist()
    with pytest.raises(TypeError, match="Implicit conversion"):
        x.map_blocks(counts, dtype="f8", meta=cupy.empty((0, 0))).compute()
    assert counted == 1


TOTAL = np.zeros(1)


def totals(block):
    TOTAL[0] += float(block.sum())


def test_nor_where_a_helper_of_it_may_have(scheduler):
    def f(block):
        totals(block)
        return on_host(block)

    x = blocks()[:4, :6].persist()
    with pytest.raises(TypeError, match="Implicit conversion"):
        x.map_blocks(f, dtype="f8", meta=cupy.empty((0, 0))).compute()
    np.testing.assert_allclose(TOTAL, A[:4, :6].sum())


def test_an_array_of_its_own_may_be_written_to(scheduler):
    """Beside one of NumPy's that it only reads."""

    def f(block, table):
        out = np.zeros(block.shape)
        out[:] = on_host(block)
        return out + table[:6] + TABLE[:6]

    y = blocks().persist().map_blocks(f, TABLE, dtype="f8", meta=cupy.empty((0, 0)))
    with refused():
        np.testing.assert_allclose(gathered(y), SHUFFLED + 2 * np.tile(TABLE[:6], 2))


def test_the_warning_may_be_an_error(scheduler):
    y = blocks().persist().map_blocks(on_host, dtype="f8", meta=cupy.empty((0, 0)))
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            with pytest.raises(RuntimeWarning, match="runs on the host"):
                y.compute()


def adds_one(b):
    b += 1


class AddsOne:
    def __call__(self, block):
        block += 1
        return on_host(block)


def helped(block):
    adds_one(block)
    return on_host(block)


@pytest.mark.parametrize("f", [helped, AddsOne(), AddsOne().__call__])
def test_a_block_that_was_written_to_before_is_not_written_to_twice(scheduler, f):
    """Wherever that is written: a wrong value would be all that is seen of it."""
    y = blocks().persist().map_blocks(f, dtype="f8", meta=cupy.empty((0, 0)))
    with pytest.raises(TypeError, match="Implicit conversion"):
        y.compute()


def test_an_array_of_the_host_that_is_sent_is_not_written_to(scheduler):
    def f(block, one):
        block += 1
        return on_host(block) * shuffled(one)

    x = da.from_array(A, chunks=(8, 12)).map_blocks(lambda b: b * 1.0, dtype="f8").persist()
    y = x.map_blocks(cupy.asarray).map_blocks(f, cupy.ones(1), dtype="f8", meta=cupy.empty((0, 0)))
    with refused():
        np.testing.assert_allclose(gathered(y), shuffled(A + 1))
    for _ in range(2):
        np.testing.assert_allclose(gathered(y), shuffled(A + 1))
        np.testing.assert_array_equal(x.compute(), A)


def test_blocks_of_a_kind_of_which_some_are_refused(scheduler):
    def either(block):
        if float(block[0, 0]) == A[4, 6]:
            return shuffled(block)
        return cupy.asarray(block.get())

    y = blocks().persist().map_blocks(either, dtype="f8", meta=cupy.empty((0, 0)))
    with refused():
        first = gathered(y)
    for _ in range(2):
        np.testing.assert_array_equal(gathered(y), first)


def test_memory_that_is_refused_on_the_host(scheduler):
    tried = []

    def asks(block):
        out = shuffled(block)
        tried.append(1)
        if len(tried) == 1:
            raise cupy.cuda.memory.OutOfMemoryError(1, 1, 1)
        return out

    y = blocks().persist().map_blocks(asks, dtype="f8", meta=cupy.empty((0, 0)))
    with refused():
        np.testing.assert_array_equal(gathered(y), SHUFFLED)
