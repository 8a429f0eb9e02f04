"""Results of many small blocks for the host: put together on a device, and brought then."""

from __future__ import annotations

import math

import cupy
import dask
import dask.array as da
import numpy as np
import pytest
from dask.core import flatten
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuscheduler import OutOfMemory, Scheduler
from gpuscheduler.devices.cuda import result_rooms
from gpuscheduler.devices.cuda.block_joiner import BlockJoiner
from gpuscheduler.devices.cuda.executor import CudaDevices
from gpuscheduler.devices.cuda.hardware import CudaHardware
from gpuscheduler.devices.cuda.kernel_code import CompileFailed, KernelCode
from gpuscheduler.devices.cuda.kernels import Kernels
from gpuscheduler.plan import build as plan_build

pytestmark = pytest.mark.gpu

A = np.random.default_rng(0).random((64, 96))


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(result_rooms, "LEAST_WHOLE", 0)


@pytest.fixture
def brought(monkeypatch):
    """The arrays that were brought to the host."""
    out, found = [], CudaHardware.bring

    def bring(self, blocks, boxes=(), made=None):
        out.append(blocks)
        return found(self, blocks, boxes, made)

    monkeypatch.setattr(CudaHardware, "bring", bring)
    return out


def blocks(chunks=(8, 12), a=A):
    return da.from_array(a, chunks=chunks).map_blocks(cupy.asarray).persist()


def home(x):
    return x.to_backend("numpy")


FORMS = {
    "elements": (lambda x: x * 2 + 1, lambda a: a * 2 + 1),
    "turned": (lambda x: (x + 1).T, lambda a: (a + 1).T),
    "scan": (lambda x: da.cumsum(x, axis=0), lambda a: np.cumsum(a, axis=0)),
    "halves": (lambda x: (x + 1)[::2, 1:], lambda a: (a + 1)[::2, 1:]),
    "uneven": (lambda x: (x + 1).rechunk((7, 13)), lambda a: a + 1),
    "other types": (lambda x: x > 0.5, lambda a: a > 0.5),
}


@pytest.mark.parametrize("form", list(FORMS))
def test_one_array_comes_home(brought, form):
    build, want = FORMS[form]
    with Scheduler(devices="cuda:0") as scheduler:
        y = home(build(blocks()))
        for _ in range(4):
            got = y.compute()
            assert type(got) is np.ndarray
            np.testing.assert_allclose(got, want(A), rtol=1e-12)
            assert not scheduler.plan(y).deliver
        assert len(brought) == 4
        assert {type(b) for blocks in brought for b in flatten(blocks)} == {cupy.ndarray}
        got[...] = 0  # it is the caller's own
        np.testing.assert_allclose(y.compute(), want(A), rtol=1e-12)


@pytest.mark.gpus(2)
@pytest.mark.parametrize("form", ["elements", "turned"])
def test_on_another_gpu_than_the_callers(brought, form):
    build, want = FORMS[form]
    with Scheduler(devices="cuda:1"):
        y = home(build(blocks()))
        for _ in range(3):
            np.testing.assert_array_equal(y.compute(), want(A))
    assert len(brought) == 3
    assert cupy.cuda.runtime.getDevice() == 0


@pytest.fixture(
    params=["cuda:0,0", pytest.param("cuda:0,1", marks=pytest.mark.gpus(2)),
            pytest.param("cuda:0,1,2,3", marks=pytest.mark.gpus(4))]
)  # fmt: skip
def several(request):
    with Scheduler(devices=request.param) as scheduler:
        yield scheduler


@pytest.mark.parametrize("form", list(FORMS))
def test_each_device_puts_its_own_together(brought, several, form):
    build, want = FORMS[form]
    y = home(build(blocks()))
    for _ in range(4):
        got = y.compute()
        assert type(got) is np.ndarray
        np.testing.assert_allclose(got, want(A), rtol=1e-12)
    assert len(brought) == 4
    got[...] = 0
    np.testing.assert_allclose(y.compute(), want(A), rtol=1e-12)
    if form == "elements":
        assert {b.device.id for b in flatten(brought[0])} == set(several.hardware.ids)


def test_blocks_of_several_types(brought, several):
    """Whatever the collection says of that. Dask converts none that it takes for NumPy's."""

    def made(block, block_id=None):
        return block.astype("f4") if block_id[0] % 2 else block

    x = blocks().map_blocks(made, dtype="f8", meta=cupy.empty((0, 0)))
    for y, want in ((x, A), (x + 1, A + 1)):
        for _ in range(3):
            got = home(y).compute()
            assert type(got) is np.ndarray
            np.testing.assert_allclose(got, want, rtol=1e-6)


def test_blocks_of_other_shapes_than_the_collection_says(several):
    x = blocks()
    y = x.map_blocks(lambda b: b[:4], dtype="f8")
    want = np.concatenate([A[n : n + 4] for n in range(0, 64, 8)])
    for _ in range(3):
        got = home(y).compute()
        assert type(got) is np.ndarray
        np.testing.assert_array_equal(got, want)


BOXES = {
    "an axis": ((40,), (1,)),
    "partly a row": ((5, 4, 6), (1, 1, 2)),
    "many axes": ((4, 3, 4, 5), (2, 1, 2, 5)),
    "a scalar's": ((), ()),
}


@pytest.mark.parametrize("name", list(BOXES))
def test_boxes_of_any_shape(brought, several, monkeypatch, name):
    """Also where there are as many boxes as blocks, which are of whatever device."""
    shape, chunks = BOXES[name]
    monkeypatch.setattr(plan_build, "MANY_BLOCKS", 1)
    monkeypatch.setattr(plan_build, "MANY_IN_BOX", 0)
    a = np.random.default_rng(1).random(shape)
    x = blocks(chunks, a)
    for device in (None, 0, len(several.hardware.ids) - 1):
        with dask.annotate(**({} if device is None else {"device": device})):
            part = x + 1
        y = home(da.concatenate([x * 2, part]) if shape else part)
        want = np.concatenate([a * 2, a + 1]) if shape else a + 1
        np.testing.assert_array_equal(y.compute(optimize_graph=False), want)
        np.testing.assert_array_equal(y.compute(), want)
    assert brought or not shape


@pytest.mark.gpus(2)
def test_another_device_has_no_room_for_its_own(brought, monkeypatch):
    """What is on its way to the host by then has arrived before the blocks come one by one."""
    with Scheduler(devices="cuda:0,1"):
        y = home(blocks() + 1)
        y.compute()
        brought.clear()
        found = BlockJoiner.join

        def join(self, blocks, made=None):
            if cupy.cuda.runtime.getDevice() == 1:
                raise OutOfMemory("no room")
            return found(self, blocks, made)

        monkeypatch.setattr(BlockJoiner, "join", join)
        np.testing.assert_array_equal(y.compute(), A + 1)
        assert len(brought) == 1 + 64


def test_an_array_that_says_it_is_numpys_is_what_its_blocks_are(brought):
    with Scheduler(devices="cuda:0"):
        y = da.map_blocks(lambda b: b + 1.0, blocks(), dtype="f8", meta=np.empty((0, 0)))
        for _ in range(3):
            got = y.compute()
            assert type(got) is cupy.ndarray
            np.testing.assert_array_equal(got.get(), A + 1)
    assert not brought


def test_several_results_of_which_some_are(brought):
    with Scheduler(devices="cuda:0"):
        x = blocks()
        for _ in range(3):
            few = home(x.rechunk((32, 48)) + 1)
            a, b, c, d = dask.compute(home(x + 1), home(x * 2), x - 1, few)
            for got, want in ((a, A + 1), (b, A * 2), (d, A + 1)):
                assert type(got) is np.ndarray
                np.testing.assert_array_equal(got, want)
            np.testing.assert_array_equal(cupy.asnumpy(c), A - 1)
    assert len(brought) == 6


@pytest.mark.parametrize(
    ("chunks", "why"),
    [((32, 24), "few"), ((8, 12), "large"), ((8, 12), "much"), ((8, 12), "scattered")],
)
def test_other_results_come_block_by_block(brought, monkeypatch, chunks, why):
    if why == "large":
        monkeypatch.setattr(plan_build, "SMALL_BLOCK", 8 * 12 * 8 - 1)
    elif why == "much":
        monkeypatch.setattr(plan_build, "MOST_TOGETHER", A.nbytes - 1)
    elif why == "scattered":
        monkeypatch.setattr(plan_build, "MANY_IN_BOX", 65)
    with Scheduler(devices="cuda:0") as scheduler:
        y = home(blocks(chunks) + 1)
        assert len(scheduler.plan(y).deliver) == y.npartitions
        np.testing.assert_array_equal(y.compute(), A + 1)
    assert not brought


def test_no_room_for_it_on_a_device(brought, monkeypatch):
    """Then the blocks come one by one."""
    with Scheduler(devices="cuda:0"):
        y = home(blocks() + 1)
        want = y.compute()
        brought.clear()

        def join(self, blocks, made=None):
            raise OutOfMemory("no room")

        monkeypatch.setattr(BlockJoiner, "join", join)
        np.testing.assert_array_equal(y.compute(), want)
        assert len(brought) == 1 + 64  # the first of all of them, in vain


@pytest.mark.parametrize("each", [1, 2])
def test_blocks_that_turn_out_to_be_numpys(monkeypatch, each):
    """Some of them, or all."""
    found, seen = CudaDevices.value, []

    def value(self, step):
        block = found(self, step)
        seen.append(block)
        cupy.cuda.Device().synchronize()
        return block.get() if len(seen) % each == 0 else block

    with Scheduler(devices="cuda:0"):
        y = home(blocks() + 1)
        monkeypatch.setattr(CudaDevices, "value", value)
        np.testing.assert_array_equal(y.compute(), A + 1)
        assert len(seen) == 64


def test_a_callback_sees_every_block(brought):
    seen = []
    with Scheduler(devices="cuda:0"):
        y = home(blocks() + 1)
        with dask.callbacks.Callback(posttask=lambda key, value, *_: seen.append(type(value))):
            np.testing.assert_array_equal(y.compute(), A + 1)
    assert seen.count(cupy.ndarray) >= 64


def test_little_memory_and_chunks_that_are_away(brought, tmp_path):
    nbytes = A.nbytes
    with Scheduler(devices="cuda:0", memory_limit=nbytes * 17, spill_directory=str(tmp_path)):
        kept = [blocks(a=A + n) for n in range(40)]
        for n, x in enumerate(kept[::7]):
            np.testing.assert_allclose(home(x * 2).compute(), (A + 7 * n) * 2)
    assert len(brought) == 6


# ---- blocks of one shape


@pytest.fixture
def launched(monkeypatch):
    """How many blocks each launch has copied."""
    out, found = [], Kernels.copy

    def copy(self, shape, strides, itemsize, pairs, device):
        done = found(self, shape, strides, itemsize, pairs, device)
        out.append(len(pairs) if done else 0)
        return done

    monkeypatch.setattr(Kernels, "copy", copy)
    return out


def cut(a, sizes, make, axis=0):
    """Nested lists of the blocks of an array, cut into lengths along each axis."""
    if axis == a.ndim:
        return make(a)
    ends = np.cumsum(sizes[axis])
    parts = np.split(a, ends[:-1], axis)
    return [cut(part, sizes, make, axis + 1) for part in parts]


LENGTHS = {
    "rows": ([5] * 20, [33]),
    "columns": ([64], [4] * 20),
    "columns of odd lengths": ([31], [3] * 20),
    "squares": ([8] * 5, [16] * 4),
    "at the end less": ([8, 8, 8, 8, 3], [16, 16, 16, 5]),
    "boxes": ([4] * 3, [6] * 4, [2] * 5, [8] * 2),
    "boxes, whole at the end": ([4] * 3, [6] * 4, [5], [8]),
    "of one element": ([1] * 6, [1] * 7),
    "in steps of a few bytes": ([16] * 3, [4] * 4),
    "in rows of a few bytes more": ([16] * 3, [20] * 3),
    "behind a few bytes": ([77] * 3, [2] + [76] * 3),
    "behind one": ([77] * 3, [1] + [76] * 3 + [1]),
}


@pytest.mark.parametrize("dtype", ["?", "i2", "f2", "f4", "f8", "c8", "c16"])
@pytest.mark.parametrize("form", list(LENGTHS))
def test_many_blocks_of_one_shape(launched, form, dtype):
    sizes = LENGTHS[form]
    shape = [sum(n) for n in sizes]
    a = np.random.default_rng(0).integers(0, 2**8, shape).astype(dtype)
    with Scheduler(devices="cuda:0") as scheduler:
        got = scheduler.hardware.join(cut(a, sizes, cupy.asarray))
        np.testing.assert_array_equal(got.get(), a)
        assert launched
        assert min(launched) >= 8


def some_other_way(part, at):
    """A block as it may come: as it is usual, of other strides, or beginning anywhere."""
    if at % 5 == 0:
        return cupy.asarray(np.asfortranarray(part))
    if at % 5 == 1:
        room = cupy.empty(part.size + 1, part.dtype)
        out = room[1:].reshape(part.shape)
        out[...] = cupy.asarray(part)
        return out
    return cupy.asarray(part)


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.gpus(2))])
def test_blocks_that_are_not_all_alike(launched, devices):
    a = np.random.default_rng(0).random((60, 40)).astype("f4")
    seen = iter(range(1000))

    def make(part):
        at = next(seen)
        with cupy.cuda.Device(0 if at % 7 else devices - 1):
            out = some_other_way(part, at)
            cupy.cuda.Device().synchronize()
            return out

    with Scheduler(devices=f"cuda:{','.join(map(str, range(devices)))}") as scheduler:
        got = scheduler.hardware.join(cut(a, ([6] * 10, [8] * 5), make))
        np.testing.assert_array_equal(got.get(), a)
        whole = scheduler.hardware.join(cut(a, ([6] * 10, [8] * 5), make), got)
        np.testing.assert_array_equal(whole.get(), a)
    assert launched


def test_without_a_kernel_blocks_are_copied_one_by_one(monkeypatch):
    def refuse(self, *_, **__):
        raise CompileFailed("no")

    a = np.random.default_rng(0).random((64, 32))
    with Scheduler(devices="cuda:0") as scheduler:
        monkeypatch.setattr(KernelCode, "get_prepared", refuse)
        got = scheduler.hardware.join(cut(a, ([8] * 8, [16] * 2), cupy.asarray))
        np.testing.assert_array_equal(got.get(), a)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_any_blocks(data):
    ndim = data.draw(st.integers(1, 4))
    lengths = st.integers(1, 9)
    sizes = [[data.draw(lengths)] * data.draw(lengths) for _ in range(ndim)]
    for own in sizes:
        if data.draw(st.booleans()):
            own.append(data.draw(lengths))
    a = np.arange(math.prod(map(sum, sizes))).reshape([*map(sum, sizes)])
    a = a.astype(data.draw(st.sampled_from(["u1", "i2", "f4", "f8", "c16"])))
    with Scheduler(devices="cuda:0") as scheduler:
        got = scheduler.hardware.join(cut(a, sizes, cupy.asarray))
        np.testing.assert_array_equal(got.get(), a)
