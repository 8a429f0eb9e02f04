"""What tasks on GPUs take for themselves while they run: seen once, then counted."""

import gc
from contextlib import contextmanager, suppress

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")

import dask
import dask.array as da

import gpuscheduler
from gpuscheduler import fft
from gpuscheduler.devices import choose
from gpuscheduler.devices.cuda import (
    lane,
)
from gpuscheduler.plan import working_memory
from gpuscheduler.plan.machine import HOST
from gpuscheduler.runtime.state import State
from tests.runtime.test_garbage import Blocks, alive

from .conftest import fake
from .test_executor import DEVICES, cupy_array

pytestmark = pytest.mark.gpu
SIDE, CHUNK, TALL = 512, 128, 64
PIECE = 512  # bytes


@contextmanager
def most_used():
    """Measure the most bytes of each device's pool that were in use at once, without those before.

    They are in a list when the block ends.
    """
    gc.collect()
    pool, out = cupy.get_default_memory_pool(), []
    before, most = [], []
    for d in range(choose.cuda_devices()):
        with cupy.cuda.Device(d) as device:
            device.synchronize()
            before.append(pool.used_bytes())
    most += before

    def look():
        d = cupy.cuda.runtime.getDevice()
        most[d] = max(most[d], pool.used_bytes())

    with pytest.MonkeyPatch.context() as patch:
        if fake:
            allocate = fake.Pool.allocate

            def seen(self, nbytes):
                out = allocate(self, nbytes)
                look()
                return out

            patch.setattr(fake.Pool, "allocate", seen)
        else:

            def malloc(nbytes):
                out = pool.malloc(nbytes)
                look()
                return out

            cupy.cuda.set_allocator(malloc)
        try:
            yield out
        finally:
            if not fake:
                cupy.cuda.set_allocator(pool.malloc)
    out += [m - b for m, b in zip(most, before, strict=True)]


def on_gpus(hardware, peak):
    """A prediction by places, by the GPUs that these are on."""
    out = [0] * choose.cuda_devices()
    for place, device in enumerate(hardware.ids):
        out[device] += peak[place]
    return out


def numbered(block_id=None):
    row, column = block_id
    return cupy.sort(cupy.full((CHUNK, CHUNK), 100.0 * row + column), axis=1)


def made():
    """Sixteen blocks, by tasks that are no kernels."""
    chunks = ((CHUNK,) * (SIDE // CHUNK),) * 2
    return da.map_blocks(numbered, chunks=chunks, dtype=float, meta=cupy.empty((0, 0)))


def spread(block):
    """Three more of the block at once, and a fourth."""
    low, high = cupy.sort(block, axis=0), cupy.sort(-block, axis=1)
    return (low + high) * (low - high)


def squeezed(block):
    return spread(block).sum(axis=0, keepdims=True)


def build(name, x):
    if name == "temporaries":
        return x.map_blocks(spread, meta=cupy.empty((0, 0))).sum()
    if name == "results that are small":
        chunks = ((1,) * (SIDE // CHUNK), (CHUNK,) * (SIDE // CHUNK))
        return x.map_blocks(squeezed, chunks=chunks, meta=cupy.empty((0, 0))).sum()
    if name == "read again":
        y = x.map_blocks(spread, meta=cupy.empty((0, 0)))
        return (y - y.mean()).map_blocks(spread, meta=cupy.empty((0, 0))).sum()
    if name == "matmul":
        return (x @ x.T).map_blocks(cupy.sort, meta=cupy.empty((0, 0))).to_backend("numpy")
    tall = x.rechunk((CHUNK, SIDE))[:, :TALL]
    return da.linalg.qr(tall)[1] if name == "qr" else da.linalg.svd(tall)[1]


NAMES = ["temporaries", "results that are small", "read again", "matmul", "qr", "svd"]


@pytest.fixture
def numbers():
    return np.random.default_rng(0).random((SIDE, SIDE))


@pytest.mark.usefixtures("only_new_garbage")
@pytest.mark.parametrize(("devices", "blocks"), [*((d, 1000) for d in DEVICES), ("cuda:0", 9)])
@pytest.mark.parametrize("name", NAMES)
def test_the_pool_holds_no_more_than_was_predicted(name, devices, blocks):
    """Where all fits, and where nine blocks do: from the second time on. What is smaller than a
    piece of the pool takes one."""
    block = 8 * CHUNK**2
    with gpuscheduler.Scheduler(devices, memory_limit=blocks * block, check=True) as s:
        lazy = build(name, made())
        lazy.compute()
        for _ in range(2):
            plan = s.plan(lazy)
            with most_used() as most:
                value = lazy.compute()
            del value
            foreseen = plan.predicted.peak
            pieces = PIECE * len(plan.steps)
            for taken, n in zip(most, on_gpus(s.hardware, foreseen), strict=True):
                assert taken <= n + pieces


def test_what_tasks_take_is_predicted_when_it_has_been_seen(numbers):
    """Each of four blocks at a time, in any of them: more than of the values alone."""
    block = 8 * CHUNK**2
    with gpuscheduler.Scheduler("cuda:0") as s:
        lazy = build("results that are small", cupy_array(numbers, CHUNK))
        before = s.plan(lazy).predicted.peak[0]
        lazy.compute()
        plan = s.plan(lazy)
        assert (
            plan.task_memory == max(plan.history.extra.values()) >= 5 * block - 8
        )  # or what a sort takes, too
        assert plan.predicted.peak[0] == before + plan.task_memory
        again = build("results that are small", cupy_array(numbers + 1, CHUNK))
        assert s.plan(again).task_memory == plan.task_memory  # it is like the first


def test_what_was_seen_is_foreseen_for_other_computations_and_later_schedulers(
    numbers, monkeypatch
):
    """Half as many blocks are another plan, whose first run has room for what each takes."""
    monkeypatch.setattr(working_memory, "LEAST", 0)
    with gpuscheduler.Scheduler("cuda:0") as s:
        lazy = build("temporaries", cupy_array(numbers, CHUNK))
        lazy.compute()
        took = s.plan(lazy).task_memory
        assert took
        half = build("temporaries", cupy_array(numbers[: SIDE // 2], CHUNK))
        assert s.plan(half).task_memory == took
    with gpuscheduler.Scheduler("cuda:0", memory_limit=16 * 8 * CHUNK**2) as s:
        plan = s.plan(half)
        assert plan.task_memory == took
        with most_used() as most:
            value = half.compute()
        assert most[0] <= on_gpus(s.hardware, plan.predicted.peak)[0] + PIECE * len(plan.steps)
        np.testing.assert_allclose(value.get(), half.compute(scheduler="sync").get())


def test_it_is_looked_at_once(numbers, monkeypatch):
    looks = []
    enter = lane.AllocationMeter.__enter__
    monkeypatch.setattr(lane.AllocationMeter, "__enter__", lambda a: looks.append(1) or enter(a))
    with gpuscheduler.Scheduler("cuda:0") as s:
        lazy = build("temporaries", cupy_array(numbers, CHUNK))
        lazy.compute()
        assert len(looks) >= 16
        looks.clear()
        lazy.compute()
        build("temporaries", cupy_array(numbers + 1, CHUNK)).compute()
        assert not looks
        (da.ones((SIDE, SIDE), chunks=CHUNK) + 1).sum().compute()
        assert not looks  # kernels of ours take nothing
        assert s._plans.plans()


def test_steps_wait_for_room_only_where_memory_is_short(monkeypatch):
    asked = []
    extra = State._working_memory
    monkeypatch.setattr(State, "_working_memory", lambda self, i: asked.append(i) or extra(self, i))
    with gpuscheduler.Scheduler("cuda:0"):
        lazy = build("read again", made())
        for _ in range(2):
            lazy.compute()
    assert not asked


def test_values_leave_for_what_a_task_takes():
    """Sixteen blocks are kept, of which twelve fit.

    A task takes four more, and one for its value. From the second block on, this room is there by
    plan.
    """
    block = 8 * CHUNK**2
    lazy = made().map_blocks(spread, meta=cupy.empty((0, 0)))
    with gpuscheduler.Scheduler("cuda:0", memory_limit=12 * block, check=True) as s:
        kept = lazy.persist()
        assert s.last.spilled[HOST] >= 8 * block
        del kept
        gc.collect()
        with most_used() as most:
            kept = lazy.persist()
        assert most[0] <= 12 * block
        want = spread(numbered((1, 2)))
        np.testing.assert_array_equal(kept.blocks[1, 2].compute().get(), want.get())


def at_singular(function):
    return lambda: function(made()[:CHUNK, :CHUNK])


def tall(function):
    return lambda: function(made().rechunk((CHUNK, SIDE))[:, :TALL])


def fails(block):
    raise np.linalg.LinAlgError(str(cupy.sort(block).shape))


#: What calls a library on the device; of the singular matrices that `made` gives, some fail.
LIBRARY = {
    **{name: (lambda name=name: build(name, made())) for name in NAMES},
    "our qr": tall(lambda x: gpuscheduler.linalg.qr(x)[0]),
    "lstsq": tall(lambda x: gpuscheduler.linalg.lstsq(x, x[:, :1])[0]),
    "pinv": tall(gpuscheduler.linalg.pinv),
    "cond": tall(gpuscheduler.linalg.cond),
    "solve": lambda: gpuscheduler.linalg.solve(made(), made()[:, :1]),
    "inv": lambda: gpuscheduler.linalg.inv(made()),
    "det": lambda: gpuscheduler.linalg.det(made()),
    "cholesky": lambda: gpuscheduler.linalg.cholesky(made()),
    "inv of a block": at_singular(gpuscheduler.linalg.inv),
    "cholesky of a block": at_singular(gpuscheduler.linalg.cholesky),
    "eigh": lambda: gpuscheduler.linalg.eigh(made())[0],
    "sort": lambda: gpuscheduler.array.sort(made(), axis=0),
    "median": lambda: gpuscheduler.array.median(made(), axis=0),
    "unique": lambda: gpuscheduler.array.unique(made()),
    "fails": lambda: made().map_blocks(fails, meta=cupy.empty((0, 0))),
    "fft": lambda: fft.fft(made(), axis=0),
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", LIBRARY)
def test_no_memory_of_a_device_waits_for_the_garbage_collector(name):
    """Neither what a function has made nor what one that failed was given."""
    with gpuscheduler.Scheduler("cuda:0"):
        lazy = LIBRARY[name]()
        with suppress(np.linalg.LinAlgError):
            lazy.compute()
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            with suppress(np.linalg.LinAlgError):
                lazy.compute()
            gc.collect()
            found = [v.shape for v in gc.garbage if isinstance(v, cupy.ndarray) and v.size]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
    assert not found


@pytest.mark.parametrize("devices", ["cuda:0", "cuda:0,0"])
def test_arrays_whose_reading_fails_after_the_run_leave_nothing(devices):
    blocks = Blocks()
    gc.collect()
    gc.disable()
    try:
        with gpuscheduler.Scheduler(devices):
            x = da.from_array(blocks, chunks=(2, 4), asarray=False, meta=np.empty((0, 0)))
            with suppress(ValueError):
                (x + 1).sum().compute()
            blocks.over.set()
            assert len(blocks.refs) > 1
            assert not alive(blocks.refs)
    finally:
        gc.enable()


def halves(block):
    """Of what the task has made, the first half and less than that; of what it is given, a row."""
    both = cupy.concatenate([cupy.sort(block), block])
    more = cupy.concatenate([both, both])
    return both[: len(block)], more[: len(block), ::2].T, block[:1]


def test_a_part_of_a_larger_array_does_not_keep_all_of_it():
    """Such a result becomes an array of its own, of the same order, each time that the step runs.

    A part of an input of the task does not.
    """
    block = 8 * CHUNK**2
    whole = numbered((1, 2)) - cupy.arange(CHUNK)
    lazy = dask.delayed(halves)(whole)
    with gpuscheduler.Scheduler("cuda:0") as s:
        for _ in range(2):
            parts = lazy.persist()
            (chunk,) = s._persisted.chunks()
            first, part, row = chunk()
            assert first.data.mem.size == block
            assert part.data.mem.size == block // 2
            assert part.flags.f_contiguous
            assert row.data.mem is whole.data.mem
            for mine, theirs in zip((first, part, row), halves(whole), strict=True):
                np.testing.assert_array_equal(mine.get(), theirs.get())
            del parts, chunk, first, part, row


def test_it_does_so_beside_what_the_task_was_given():
    def found(block):
        both = cupy.sort(cupy.concatenate([block, block]), axis=1)
        return block, both[:9]

    whole = numbered((1, 2))
    with gpuscheduler.Scheduler("cuda:0") as s:
        parts = dask.delayed(found)(whole).persist()
        (chunk,) = s._persisted.chunks()
        assert chunk()[0].data.mem is whole.data.mem
        assert chunk()[1].data.mem.size == 9 * 8 * CHUNK
        del parts


def test_where_there_is_no_room_for_that_it_is_done_the_next_time(monkeypatch):
    def refused(*_):
        raise cupy.cuda.memory.OutOfMemoryError(1, 1)

    lazy = dask.delayed(lambda block: cupy.sort(block, axis=1)[:9])(numbered((1, 2)))
    with gpuscheduler.Scheduler("cuda:0") as s:
        for room in (False, True):
            with monkeypatch.context() as patch:
                if not room:
                    patch.setattr(lane, "map_deep_leaves", refused)
                part = lazy.persist()
                (chunk,) = s._persisted.chunks()
                assert chunk().data.mem.size == 8 * CHUNK * (9 if room else CHUNK)
                del part, chunk


def test_parts_that_are_most_of_an_array_together_stay_parts():
    def split(block):
        return tuple(cupy.split(cupy.sort(block), 4))

    with gpuscheduler.Scheduler("cuda:0") as s:
        parts = dask.delayed(split)(numbered((1, 2))).persist()
        (chunk,) = s._persisted.chunks()
        assert len({id(v.data.mem) for v in chunk()}) == 1
        del parts
