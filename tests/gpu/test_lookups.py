"""What is looked up in tables of NumPy's is looked up by kernels, whatever the tables hold."""

from __future__ import annotations

import cupy
import dask.array as da
import numpy as np
import pytest

from gpuscheduler import Scheduler

A = np.random.default_rng(0).random((64, 48)).astype("f4")
A[3, 5], A[40, 40] = np.nan, np.inf
K = np.random.default_rng(1).integers(0, 200, (64, 48)).astype("i4")
TABLE = np.sort(np.random.default_rng(2).random(100))
WEIGHTS = np.array([1.0, 4, 6, 4, 1])


def windows(x, axis):
    return da.lib.stride_tricks.sliding_window_view(x, 5, axis=axis)


def persisted(*arrays):
    return [da.from_array(a, chunks=(16, 24)).map_blocks(cupy.asarray).persist() for a in arrays]


def inner(b, t):
    return np.interp(b, t, t * t)


EVERY = {
    "isin": (lambda x, k, t: da.isin(k, [3, 7, 150]), lambda t: np.isin(K, [3, 7, 150])),
    "isin many": (
        lambda x, k, t: da.isin(k, (t * 200).astype("i8")),
        lambda t: np.isin(K, (t * 200).astype("i8")),
    ),
    "isin many, not": (
        lambda x, k, t: da.isin(k, (t * 200).astype("i8"), invert=True),
        lambda t: np.isin(K, (t * 200).astype("i8"), invert=True),
    ),
    "interp": (
        lambda x, k, t: x.map_blocks(np.interp, t, t * t, dtype="f8"),
        lambda t: np.interp(A, t, t * t),
    ),
    "interp, computed": (
        lambda x, k, t: x.map_blocks(inner, t, dtype="f8"),
        lambda t: np.interp(A, t, t * t),
    ),
    "interp, evenly": (
        lambda x, k, t: x.map_blocks(np.interp, np.linspace(0, 1, 100), t, dtype="f8") + 1,
        lambda t: np.interp(A, np.linspace(0, 1, 100), t) + 1,
    ),
    "look-up": (
        lambda x, k, t: k.map_blocks(lambda i, t: t[i], np.r_[t, t], dtype="f8"),
        lambda t: np.r_[t, t][K],
    ),
    "colours": (
        lambda x, k, t: k.map_blocks(
            lambda i, t: t[i], np.c_[t, -t, t * t].repeat(2, 0), dtype="f8",
            chunks=(*k.chunks, (3,)), new_axis=2,
        ),
        lambda t: np.c_[t, -t, t * t].repeat(2, 0)[K],
    ),
    "take": (
        lambda x, k, t: k.map_blocks(lambda i, t: np.take(t, i), np.r_[t, t], dtype="f8"),
        lambda t: np.take(np.r_[t, t], K),
    ),
    "search": (
        lambda x, k, t: x.map_blocks(lambda b, t: np.searchsorted(t, b), t, dtype="i8"),
        lambda t: np.searchsorted(t, A),
    ),
    "digitize": (lambda x, k, t: da.digitize(x, t), lambda t: np.digitize(A, t)),
    "digitize, downwards": (
        lambda x, k, t: da.digitize(x, t[::-1], right=True),
        lambda t: np.digitize(A, t[::-1], right=True),
    ),
    "histogram of bins": (
        lambda x, k, t: da.bincount(da.digitize(x, t).ravel(), minlength=101),
        lambda t: np.bincount(np.digitize(A, t).ravel(), minlength=101),
    ),
    "histogram of weights": (
        lambda x, k, t: da.histogram(x, t, weights=x * 2)[0],
        lambda t: np.histogram(A, t, weights=A * np.float64(2))[0],
    ),
    "histogram of two, of weights": (
        lambda x, k, t: da.histogramdd(
            (x.ravel(), k.ravel()), (t, 5), ((0, 1), (0, 99)), weights=x.ravel()
        )[0],
        lambda t: np.histogramdd(
            (A.ravel(), K.ravel()), (t, 5), ((0, 1), (0, 99)), weights=A.ravel()
        )[0],
    ),
    "count of weights": (
        lambda x, k, t: da.bincount((k % 50).astype("u1").ravel(), x.ravel(), minlength=256),
        lambda t: np.bincount((K % 50).ravel(), A.ravel(), 256),
    ),
    "choose": (
        lambda x, k, t: da.choose(k % 3, [x, x + 1, x * 2]),
        lambda t: np.choose(K % 3, [A, A + 1, A * 2]),
    ),
    "weights": (
        lambda x, k, t: (windows(k, 1) * t[:5]).sum(axis=-1),
        lambda t: sum(K[:, i : 44 + i] * t[i] for i in range(5)),
    ),
    "a row": (
        lambda x, k, t: k * da.from_array(t[:48], chunks=16),
        lambda t: K * t[:48],
    ),
    "along rows": (
        lambda x, k, t: x.rechunk((16, 48)).map_blocks(
            lambda b: np.take_along_axis(b, b.argmin(axis=1, keepdims=True), 1),
            chunks=(16, 1), dtype="f4",
        ),
        lambda t: np.take_along_axis(A, A.argmin(axis=1, keepdims=True), 1),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("devices", ["cuda:0", "cuda:0,0"])
def test_tables(name, devices):
    build, want = EVERY[name]
    with Scheduler(devices=devices, fuse_least=0) as s:
        x, k = (
            da.from_array(v, chunks=(16, 24)).map_blocks(cupy.asarray).persist() for v in (A, K)
        )
        for table in (TABLE, TABLE, TABLE**2, np.sqrt(TABLE)):  # built anew, with other numbers
            y = build(x, k, table)
            got = y.compute()
            np.testing.assert_allclose(cupy.asnumpy(got), want(table), rtol=1e-6)
        text = str(s.plan(y))
        assert "no kernel" not in text or name == "histogram of bins", text


def test_a_table_that_is_written_to():
    """Its values are those of the time when it is computed."""
    table = TABLE.copy()
    with Scheduler(devices="cuda:0", fuse_least=0):
        x, k = (
            da.from_array(v, chunks=(16, 24)).map_blocks(cupy.asarray).persist() for v in (A, K)
        )
        every = [
            (x.map_blocks(np.interp, table, table, dtype="f8"), lambda: np.interp(A, table, table)),
            (k.map_blocks(lambda i, t: t[i % 100], table, dtype="f8"), lambda: table[K % 100]),
        ]
        for _ in range(3):
            for y, want in every:
                np.testing.assert_allclose(cupy.asnumpy(y.compute()), want(), rtol=1e-6)
            table *= 0.5


def test_a_table_is_sent_once():
    table = np.arange(200.0)
    with Scheduler(devices="cuda:0", fuse_least=0) as s:
        (k,) = persisted(K)
        y = k.map_blocks(lambda i, t: t[i], table, dtype="f8").sum()
        for _ in range(3):
            assert float(y.compute()) == table[K].sum()
        assert "no kernel" not in str(s.plan(y))


def test_an_index_beyond_the_end():
    """As CuPy reads it."""
    with Scheduler(devices="cuda:0", fuse_least=0):
        (k,) = persisted(K)
        y = k.map_blocks(lambda i, t: t[i], TABLE, dtype="f8")
        np.testing.assert_array_equal(cupy.asnumpy(y.compute()), TABLE[K % 100])
        y = k.map_blocks(lambda i, t: t[-i], TABLE, dtype="f8")
        np.testing.assert_array_equal(cupy.asnumpy(y.compute()), TABLE[-K % 100])
