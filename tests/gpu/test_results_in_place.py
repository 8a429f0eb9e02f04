"""Results that are one array of a GPU: kernels write their parts where they belong."""

import gc
from time import sleep

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")

import dask
import dask.array as da

import gpuscheduler
from gpuscheduler.devices.cuda import (
    replay,
    result_rooms,
)

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

    monkeypatch.setattr(result_rooms, "LEAST_WHOLE", 0)
    monkeypatch.setattr(replay.Replay, "run", watched)
    return made


@pytest.fixture
def begun(monkeypatch):
    """The arrays that runs had for results before they made these; of any size."""
    made = []
    whole = result_rooms.ResultRoom.whole_array

    def watched(rooms, memory):
        made.append(whole(rooms, memory))
        return made[-1]

    monkeypatch.setattr(result_rooms, "LEAST_WHOLE", 0)
    monkeypatch.setattr(result_rooms.ResultRoom, "whole_array", watched)
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


@pytest.mark.parametrize("form", list(FORMS))
@pytest.mark.parametrize("case", list(CASES))
def test_the_first_run_puts_it_together(begun, case, form):
    (shape, chunks), (ours, theirs) = CASES[case], FORMS[form]
    x = np.random.default_rng(0).random(shape).astype("f4" if form == "elements" else "f8")
    with gpuscheduler.Scheduler("cuda:0"):
        y = ours(da.from_array(cupy.asarray(x), chunks=chunks).persist())
        for _ in range(2):
            begun.clear()
            got = y.compute()
            np.testing.assert_allclose(cupy.asnumpy(got), theirs(x), rtol=1e-6)
            assert form != "elements" or any(a is got for a in begun)


def test_a_result_that_takes_most_of_the_memory(begun):
    """Nothing is there twice, and chunks that it is made of leave for it."""
    x = np.random.default_rng(0).random((1024, 64))
    with gpuscheduler.Scheduler("cuda:0", memory_limit=int(1.4 * x.nbytes)) as s:
        y = da.from_array(cupy.asarray(x), chunks=(64, 64)).map_blocks(cupy.copy).persist()
        for n in range(4):
            begun.clear()
            got = (y * 2 + n).compute()
            np.testing.assert_allclose(cupy.asnumpy(got), x * 2 + n)
            assert any(a is got for a in begun)
            assert s.last.peak[0] <= 1.4 * x.nbytes
            assert s.last.spilled[-1] <= 1.1 * x.nbytes


TASKS = {
    "rows": (((96, 60), (24, 60)), lambda m, x: x.map_blocks(m.sort)),
    "squares": (((96, 80), (32, 40)), lambda m, x: x.map_blocks(m.sort)),
    "turned": (((96, 80), (32, 40)), lambda m, x: x.map_blocks(lambda b: m.sort(b)[::-1])),
    "itself": (((96, 80), (32, 40)), lambda m, x: x.map_blocks(lambda b: _opaque(b))),
    "with kernels": (
        ((96, 80), (32, 40)),
        lambda m, x: da.concatenate([x.map_blocks(m.sort), x + 1], axis=1),
    ),
    "with blocks that are there": (
        ((96, 80), (32, 40)), lambda m, x: da.concatenate([x.map_blocks(m.sort), x]),
    ),
    "twice": (
        ((96, 80), (32, 40)), lambda m, x: (lambda y: da.concatenate([y, y]))(x.map_blocks(m.sort)),
    ),
    "another type": (
        ((96, 80), (32, 40)), lambda m, x: x.map_blocks(lambda b: m.sort(b).astype("f4")),
    ),
    "not the type that was said": (
        ((96, 80), (32, 40)),
        lambda m, x: x.map_blocks(
            lambda b: m.sort(b).astype("f4"), dtype="f8", meta=m.empty((0, 0))
        ),
    ),
    "several types": (
        ((96, 80), (32, 40)),
        lambda m, x: x.map_blocks(
            lambda b, block_info: m.sort(b).astype(
                "f4" if block_info[0]["chunk-location"][0] else "f8"
            ),
            meta=m.empty((0, 0)),
        ),
    ),
    "a product": (((96, 96), (32, 32)), lambda m, x: x @ x.T),
}  # fmt: skip


def _opaque(block):
    """The same array, by what nobody can follow."""
    return vars().get("block") if hasattr(block, "shape") else None


@pytest.mark.parametrize("devices", ["cuda:0", "cuda:0,0"])
@pytest.mark.parametrize("form", list(TASKS))
def test_what_is_no_kernel_is_put_where_it_belongs(begun, form, devices):
    ((shape, chunks), make) = TASKS[form]
    x = np.random.default_rng(0).random(shape)
    want = make(np, da.from_array(x, chunks=chunks)).compute(scheduler="sync")
    with gpuscheduler.Scheduler(devices) as s:
        source = da.from_array(cupy.asarray(x), chunks=chunks).map_blocks(cupy.copy).persist()
        y = make(cupy, source)
        for n in range(4):
            foreseen = s.plan(y).predicted.peak[0]
            begun.clear()
            got = y.compute()
            unsaid = form in ("not the type that was said", "with blocks that are there")
            unknown = unsaid and not n
            assert unknown or s.last.peak[0] <= foreseen
            assert got.dtype == want.dtype
            np.testing.assert_allclose(cupy.asnumpy(got), want)
            assert form == "several types" or unknown or any(a is got for a in begun)
            got += 1  # nobody else has it
            np.testing.assert_array_equal(cupy.asnumpy(source.compute()), x)


def test_what_is_no_kernel_takes_its_memory_once(begun):
    x = np.random.default_rng(0).random((1024, 64))
    with gpuscheduler.Scheduler("cuda:0", memory_limit=int(1.6 * x.nbytes)) as s:
        y = da.ones((1024, 64), chunks=(64, 64)).map_blocks(cupy.sort)
        for _ in range(3):
            assert (cupy.asnumpy(y.compute()) == 1).all()
            assert s.last.peak[0] <= 1.6 * x.nbytes
            assert not s.last.spilled[-1]


def test_no_more_is_foreseen_than_is_taken(begun):
    x = np.random.default_rng(0).random((1024, 64))
    with gpuscheduler.Scheduler("cuda:0") as s:
        y = da.from_array(cupy.asarray(x), chunks=(64, 64)).map_blocks(cupy.copy).persist()
        for z, most in ((y * 2, 2), (da.cumsum(y * 2, axis=0), 3)):
            foreseen = s.plan(z).predicted.peak[0]
            for _ in range(4):
                z.compute()
                assert s.last.peak[0] <= foreseen <= most * x.nbytes


def test_a_callback_gets_blocks_of_its_own(begun):
    x = np.random.default_rng(0).random((64, 64))
    seen = []

    def posttask(key, value, dsk, state, worker):
        seen.append(value)

    with gpuscheduler.Scheduler("cuda:0"), dask.callbacks.Callback(posttask=posttask):
        y = da.from_array(cupy.asarray(x), chunks=32).persist() + 1
        got = y.compute()
        got += 1
    blocks = [v for v in seen if isinstance(v, cupy.ndarray) and v.shape == (32, 32)]
    assert blocks
    assert not begun
    total = sum(float(v.sum()) for v in blocks[-4:])
    np.testing.assert_allclose(total, (x + 1).sum())


def test_no_room_for_all_of_it(begun, monkeypatch):
    x = np.random.default_rng(0).random((64, 64))
    refused = []

    def refuse(rooms):
        refused.append(rooms)
        raise cupy.cuda.memory.OutOfMemoryError(rooms.nbytes, 0, 0)

    with gpuscheduler.Scheduler("cuda:0"):
        y = da.from_array(cupy.asarray(x), chunks=32).persist() + 1
        for _ in range(4):
            with monkeypatch.context() as patch:
                patch.setattr(result_rooms.ResultRoom, "memory", refuse)
                with pytest.raises(gpuscheduler.OutOfMemory, match=r"32,768 bytes.*to_backend"):
                    y.compute()
            assert refused
            np.testing.assert_allclose(cupy.asnumpy(y.compute()), x + 1)


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
def test_the_callers_device_writes_its_own_part(begun, devices):
    x = np.random.default_rng(0).random((64, 64))
    with gpuscheduler.Scheduler(devices):
        y = da.from_array(cupy.asarray(x), chunks=16) * 1
        y = y.persist() + 1
        for _ in range(4):
            begun.clear()
            got = y.compute()
            np.testing.assert_allclose(cupy.asnumpy(got), x + 1)
            assert any(a is got for a in begun)


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


def test_memory_that_is_refused_for_a_while(begun, monkeypatch):
    """It is asked for again when all else has left."""
    x = np.random.default_rng(0).random((64, 64))
    memory, refused = result_rooms.ResultRoom.memory, []

    def refuse(rooms):
        if len(refused) < 2:
            refused.append(rooms)
            raise cupy.cuda.memory.OutOfMemoryError(rooms.nbytes, 0, 0)
        return memory(rooms)

    monkeypatch.setattr(result_rooms.ResultRoom, "memory", refuse)
    with gpuscheduler.Scheduler("cuda:0", memory_limit=int(1.5 * x.nbytes)):
        y = da.from_array(cupy.asarray(x), chunks=16).map_blocks(cupy.copy).persist()
        for z, want in ((y + 1, x + 1), (y.map_blocks(cupy.negative), -x)):
            refused.clear()
            np.testing.assert_allclose(cupy.asnumpy(z.compute()), want)
            assert len(refused) == 2


@pytest.mark.gpus(2)
def test_a_task_that_puts_its_value_on_another_device(begun):
    def ones(block):
        with cupy.cuda.Device(1):
            return _opaque(cupy.ones(block.shape))

    x = cupy.zeros((64, 64))
    with gpuscheduler.Scheduler("cuda:0"):
        y = da.from_array(x, chunks=32).persist().map_blocks(ones, dtype="f8", meta=x[:0, :0])
        for _ in range(3):
            got = y.compute()
            assert got.device.id == 0
            assert (cupy.asnumpy(got) == 1).all()


def test_an_error_does_not_hold_the_result(begun):
    def fail(block, block_info):
        if block_info[0]["chunk-location"] == (1, 1):
            raise ZeroDivisionError
        return block + 1

    x, pool = cupy.zeros((1024, 1024)), cupy.get_default_memory_pool()

    def used():
        for _ in range(3):  # threads let go of what they held
            sleep(0.1)
            gc.collect()  # which takes long in a process of many tests
        return pool.used_bytes()

    with gpuscheduler.Scheduler("cuda:0"):
        y = da.from_array(x, chunks=512).persist().map_blocks(fail, dtype="f8", meta=x[:0, :0])
        before = used()
        with pytest.raises(ZeroDivisionError) as error:
            y.compute()
        assert begun
        begun.clear()
        assert used() < before + x.nbytes // 2
        assert error.value.__traceback__ is not None


@pytest.mark.gpus(2)
def test_others_wait_for_a_run_that_has_its_result_from_the_start(begun):
    """All of it is on one device, whichever has made the parts."""
    x = np.random.default_rng(0).random((64, 64))
    with gpuscheduler.Scheduler("cuda:0,1") as s:
        y = da.from_array(x, chunks=16).map_blocks(cupy.asarray) + 1
        needs = []
        turn = s._turns.turn

        def watched(ask):
            needs.append(ask()[0])
            return turn(ask)

        s._turns.turn = watched
        for _ in range(3):
            y.compute()
        assert needs[-1] >= x.nbytes
