"""Results that are one array of a GPU: later runs write their parts where they belong."""

from time import sleep

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")

import dask  # noqa: E402
import dask.array as da  # noqa: E402

import gpuscheduler  # noqa: E402
from gpuscheduler import replay  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.fixture
def whole(monkeypatch):
    """The arrays that runs have put together; of any size."""
    made = []
    run = replay.Replay.run

    def watched(*args):
        out, array = run(*args)
        made.append(array)
        return out, array

    monkeypatch.setattr(replay, "LEAST_WHOLE", 0)
    monkeypatch.setattr(replay.Replay, "run", watched)
    return made


CASES = {
    "rows": ((96, 60), (24, 60)), "columns": ((60, 96), (60, 24)), "blocks": ((96, 80), (32, 40)),
    "uneven": ((97, 83), (40, 30)), "line": ((1001,), (250,)), "cube": ((12, 20, 16), (5, 10, 16)),
    "one wide": ((1, 640), (1, 64)), "odd rows": ((64, 33), (16, 11)),
}  # fmt: skip
FORMS = {
    "elements": (lambda x: x * 2 + 1, lambda x: x * 2 + 1),
    "turned": (lambda x: (x + 1).T, lambda x: (x + 1).T),
    "scan": (lambda x: da.cumsum(x, axis=0) + 1, lambda x: np.cumsum(x, axis=0) + 1),
    "last axis": (lambda x: da.cumsum(x, axis=x.ndim - 1), lambda x: np.cumsum(x, axis=-1)),
    "neighbours": (
        lambda x: x.map_overlap(lambda b: b + np.roll(b, 1, 0), depth=1, boundary="periodic"),
        lambda x: x + np.roll(x, 1, 0),
    ),
}


@pytest.mark.parametrize("form", list(FORMS))
@pytest.mark.parametrize("case", list(CASES))
def test_what_is_put_together_is_what_numpy_says(whole, case, form):
    (shape, chunks), (ours, theirs) = CASES[case], FORMS[form]
    x = np.random.default_rng(0).random(shape).astype("f4" if form == "elements" else "f8")
    want = theirs(x)
    with gpuscheduler.Scheduler("cuda:0"):
        y = ours(da.from_array(cupy.asarray(x), chunks=chunks).persist())
        results = [y.compute() for _ in range(4)]
        for _ in range(50):  # a run that begins while another one is not over is made otherwise
            if form != "elements" or any(a is results[-2] for a in whole):
                break
            sleep(0.01)
            results = [*results[1:], y.compute()]
        kept = [r.copy() for r in results]
        results[-1] += 1  # nobody else has it
        again = y.compute()
    for got in (*results[:-1], *kept, again):
        assert type(got) is cupy.ndarray
        assert got.dtype == want.dtype
        assert got.flags.c_contiguous
        np.testing.assert_allclose(cupy.asnumpy(got), want, rtol=1e-6)
    assert form != "elements" or any(a is results[-2] for a in whole)


def test_what_others_want_too_is_an_array_of_its_own(whole):
    x = np.random.default_rng(0).random((64, 64))
    with gpuscheduler.Scheduler("cuda:0"):
        y = da.from_array(cupy.asarray(x), chunks=32).persist() + 1
        for _ in range(4):
            a, b, total = dask.compute(y, y.blocks[0, 0], y.sum())
            np.testing.assert_allclose(cupy.asnumpy(a), x + 1)
            b += 1
            np.testing.assert_allclose(cupy.asnumpy(a), x + 1)
            np.testing.assert_allclose(float(total), (x + 1).sum())
    assert not any(a is not None and a.shape == x.shape for a in whole)


TWICE = {
    "one after the other": lambda m, y: m.concatenate([y, y]),
    "some": lambda m, y: m.concatenate([y[:16], y[32:], y[:16]]),
    "square": lambda m, y: m.block([[y, y], [y, y]]),
    "beside": lambda m, y: m.concatenate([y, y], axis=1),
}


@pytest.mark.parametrize("form", list(TWICE))
def test_blocks_that_belong_in_several_places(whole, form):
    x = np.random.default_rng(0).random((64, 64))
    with gpuscheduler.Scheduler("cuda:0"):
        y = da.from_array(cupy.asarray(x), chunks=(16, 64)).persist() + 1
        twice = TWICE[form](da, y)
        for _ in range(50):
            got = twice.compute()
            np.testing.assert_allclose(cupy.asnumpy(got), TWICE[form](np, x + 1))
            if any(a is got for a in whole):
                break
            sleep(0.01)
    assert any(a is got for a in whole)


def test_parts_that_others_read_are_copied(whole):
    """The first block of a scan is read for the next one's."""
    x = np.random.default_rng(0).random((64, 64))
    with gpuscheduler.Scheduler("cuda:0"):
        y = da.cumsum(da.from_array(cupy.asarray(x), chunks=16).persist(), axis=1)
        for _ in range(50):
            got = y.compute()
            np.testing.assert_allclose(cupy.asnumpy(got), np.cumsum(x, axis=1))
            if any(a is got for a in whole):
                break
            sleep(0.01)
        assert any(a is got for a in whole)


@pytest.mark.parametrize(
    "devices", ["cuda:0,0", pytest.param("cuda:0,1", marks=pytest.mark.gpus(2))]
)
def test_several_places_copy(whole, devices):
    x = np.random.default_rng(0).random((64, 64))
    with gpuscheduler.Scheduler(devices):
        y = da.from_array(cupy.asarray(x), chunks=16).persist() + 1
        for _ in range(4):
            np.testing.assert_allclose(cupy.asnumpy(y.compute()), x + 1)


@pytest.mark.gpus(2)
def test_on_another_device_than_the_callers(whole):
    x = np.random.default_rng(0).random((64, 64))
    with gpuscheduler.Scheduler("cuda:1"):
        y = da.from_array(x, chunks=32).map_blocks(cupy.asarray).persist() + 1
        for n in (0, 0, 0, 1, 1):
            with cupy.cuda.Device(n):
                got = y.compute()
                assert got.device.id == n
                np.testing.assert_allclose(cupy.asnumpy(got), x + 1)


def test_the_same_blocks_in_another_order(whole):
    """Plans that are alike do the same, and put it together in other ways."""
    x = np.random.default_rng(0).random((64, 64))
    parts = np.split(x + 1, 4)
    with gpuscheduler.Scheduler("cuda:0"):
        y = da.from_array(cupy.asarray(x), chunks=(16, 64)).persist() + 1
        for n in range(50):
            for order, axis in (([0, 1, 2, 3], 0), ([3, 1, 0, 2], 0), ([1, 0, 3, 2], 1)):
                got = da.concatenate([y.blocks[k] for k in order], axis=axis).compute()
                want = np.concatenate([parts[k] for k in order], axis)
                np.testing.assert_allclose(cupy.asnumpy(got), want)
            if n > 3 and any(a is not None for a in whole):
                break
    assert any(a is not None for a in whole)


def test_persisted_blocks_are_arrays_of_their_own(whole):
    x = np.random.default_rng(0).random((64, 64))
    with gpuscheduler.Scheduler("cuda:0"):
        y = da.from_array(cupy.asarray(x), chunks=32).persist() + 1
        for _ in range(4):
            y.compute()
        whole.clear()
        for _ in range(4):
            p = y.persist()
            np.testing.assert_allclose(cupy.asnumpy(p.compute()), x + 1)
    assert all(a is None for a in whole)
