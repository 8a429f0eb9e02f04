"""Memory of GPUs that runs out: to pinned memory, to files, and back."""

import gc
import os
import queue
import threading
import time
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")

import dask
import dask.array as da

import gpuscheduler
from gpuscheduler.devices.cuda import lane as cuda_lane
from gpuscheduler.devices.cuda import pinned as cuda_pinned
from gpuscheduler.devices.cuda import transfers
from gpuscheduler.errors import (
    OutOfMemory,
    SpillError,
)
from gpuscheduler.plan.machine import DISK, HOST
from tests.runtime.test_predict import REDUCTIONS, grown

from .test_executor import DEVICES, cupy_array, host, used_bytes

pytestmark = pytest.mark.gpu
SIDE = 256


@pytest.fixture
def x():
    return np.random.default_rng(0).random((SIDE, SIDE))


def tight(scheduler, host_memory):
    """Let no more than so many bytes be spilled to the host."""
    hardware = scheduler.hardware
    hardware.machine = replace(hardware.machine, host_memory=host_memory)


def limited(devices, memory_limit, host_memory, directory):
    return gpuscheduler.Scheduler(
        devices=devices,
        memory_limit=memory_limit,
        host_memory=host_memory,
        spill_directory=str(directory),
        check=True,
    )


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_no_step_makes_more_than_is_known(name, fuse, monkeypatch):
    source = np.random.default_rng(0).random((40, 40))
    for chunks in [(10, 20), (2, 40), (40, 2)]:
        x = da.from_array(source, chunks=chunks).to_backend("cupy")
        with gpuscheduler.Scheduler("cuda:0,0", fuse=fuse, fuse_least=0):
            assert not grown(monkeypatch, lambda x=x: dask.compute(REDUCTIONS[name](x)))


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("host_blocks", [0, 2, 100])
def test_more_than_fits(devices, host_blocks, x, tmp_path):
    """Sixteen blocks, all needed twice, where five fit, and few or none on the host."""
    before = used_bytes()
    block = x.nbytes // 16
    with limited(devices, 5 * block, host_blocks * block, tmp_path) as s:
        a = cupy_array(x, SIDE // 4)
        b = a - a.mean()
        total = (b @ b.T).sum()
        centred = x - x.mean()
        np.testing.assert_allclose(float(total.compute()), (centred @ centred.T).sum(), atol=1e-9)
        if len(s.hardware.machine.devices) == 1:
            spilled = s.last.spilled
            assert spilled[DISK] > 0 if host_blocks < 3 else spilled[HOST] > 0
            assert all(p <= 5 * block for place, p in s.last.peak.items() if place >= 0)
            assert s.last.peak[HOST] <= host_blocks * block
            # beside that, what is on its way to the GPUs until it is there
            assert s.hardware.inside.peak <= (host_blocks + 2 * 5) * block
        result = (b + b.T).to_backend("numpy").compute()
        np.testing.assert_allclose(result, centred + centred.T, atol=1e-12)
    del a, b, total, result
    assert not list(tmp_path.iterdir())
    assert used_bytes() == before


@pytest.mark.parametrize("host_blocks", [0, 16])
@pytest.mark.parametrize("devices", DEVICES)
def test_what_passes_on_its_way_to_files_is_within_the_limit(devices, host_blocks, tmp_path):
    """64 blocks run in the memory of four, with that of 16 on the host.

    Three quarters of the host's are for values, and three blocks may pass. Where there is nothing
    for either, one passes each way, with a few bytes that say what it is.
    """
    block, side = 2**17, 128
    x = np.random.default_rng(0).random((side, 64 * side))
    with limited(devices, 4 * block, host_blocks * block, tmp_path) as s:
        a = cupy_array(x, side)
        b = da.exp(a)  # which takes too long to be done twice
        result = (b - b.mean()).to_backend("numpy").compute()
        np.testing.assert_allclose(result, np.exp(x) - np.exp(x).mean(), atol=1e-12)
        assert s.last.spilled[DISK] > 8 * block
        passed = s.hardware.passage.peak
        assert block <= passed <= max(2.1, host_blocks / 4 + 0.1) * block
        assert s.last.peak[HOST] + passed <= max(2.1, host_blocks + 0.1) * block
        assert s.hardware.passage.used == 0
    assert not list(tmp_path.iterdir())


class Target:
    """An array of the host that blocks are stored in; knows how many are on their way at most."""

    def __init__(self, x, passage):
        self.x, self.passage, self.used = np.zeros_like(x), passage, []

    def __setitem__(self, index, block):
        self.used.append(self.passage.used)
        self.x[index] = block


@pytest.mark.parametrize(("host_memory", "most"), [(0, 1), (2**22, 24)])
def test_what_is_stored_waits_for_its_room(host_memory, most, x):
    """Without memory one block passes at a time, whatever the number of threads.

    With 4 MiB, as many pass as fit in 3/16 of it.
    """
    block = x.nbytes // 16
    with gpuscheduler.Scheduler(devices="cuda:0", host_memory=host_memory, check=True) as s:
        target = Target(x, s.hardware.passage)
        da.store(cupy_array(x, SIDE // 4) + 1, target, lock=False)
        np.testing.assert_array_equal(target.x, x + 1)
        assert len(target.used) == 16
        assert block <= s.hardware.passage.peak <= most * block
        assert s.hardware.passage.used == 0


def test_pieces_are_within_their_part_of_the_memory(monkeypatch):
    """... but for two of 1 MiB, that arrays can go to a device through the least memory."""
    monkeypatch.setattr(cuda_pinned, "PIECE_BYTES", 2**24)
    pinned = cuda_pinned.PinnedBlocks()
    for limit, found in (
        (0, (2**20, 2)),
        (2**21, (2**20, 2)),
        (2**24, (2**23, 2)),
        (2**26, (2**24, 4)),
        (2**30, (2**24, 8)),
    ):
        pieces = cuda_pinned.StagingPieces(pinned, limit, 8)
        assert (pieces.nbytes, pieces.most) == found


def test_who_waits_for_the_only_piece_hears_that_it_could_not_be_made():
    """Two threads want one: the first is refused the memory for it while the second waits."""
    waits = threading.Event()

    class Free(queue.Queue):
        def get(self, *args, **kwargs):
            waits.set()
            return super().get(*args, **kwargs)

    class Short:
        refusals = 1

        def array(self, shape, dtype):
            if self.refusals:
                self.refusals -= 1
                assert waits.wait(60)
                raise MemoryError("there is no pinned memory")
            return np.empty(shape, dtype)

    pieces = cuda_pinned.StagingPieces(Short(), 0, 2)
    pieces.most, pieces._free = 1, Free()

    def take(out):
        try:
            out.append(pieces.take().shape)
        except MemoryError as error:
            out.append(error)

    first, second = [], []
    threads = [threading.Thread(target=take, args=[first], daemon=True)]
    threads[0].start()
    while not pieces.made:  # the first has begun
        threads[0].join(0.001)
    threads.append(threading.Thread(target=take, args=[second], daemon=True))
    threads[1].start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "it waits for ever"
    assert isinstance(first[0], MemoryError)
    assert second == [(pieces.nbytes,)]


def test_pinned_memory_that_waits_for_reuse_goes_before_there_is_too_much():
    pinned = cuda_pinned.PinnedBlocks(inside=True, limit=2**16)
    first = pinned.array((2**15,), np.uint8)
    del first
    assert (pinned.used, pinned.idle) == (0, 2**15)
    second, third = (pinned.array((n,), np.uint8) for n in (2**15, 2**14))
    del second
    assert (pinned.used, pinned.idle) == (2**14, 2**15)
    fourth = pinned.array((2**15 + 2**12,), np.uint8)
    assert (pinned.used, pinned.idle) == (2**15 + 2**14 + 2**12, 0)
    assert pinned.peak <= 2**16
    del third, fourth


@pytest.mark.parametrize("how", ["evicted", "asked for"])
def test_what_leaves_waits_for_nothing_that_was_queued_behind_it(how, monkeypatch):
    """Its copy begins when it is there, whatever kernels its device is to run after that."""
    sent, behind, now = [], [], [False]
    send, mark = transfers.Transfers.queue_to_host, cuda_lane.DeviceLane.mark

    def sends(self, lane, i, *rest):
        sent.append(i)
        now[0] = True
        try:
            send(self, lane, i, *rest)
        finally:
            now[0] = False

    def marks(lane, stream, block=False):
        if now[0] and stream is lane.home:
            behind.append(sent[-1])
        return mark(lane, stream, block)

    monkeypatch.setattr(transfers.Transfers, "queue_to_host", sends)
    monkeypatch.setattr(cuda_lane.DeviceLane, "mark", marks)
    x = np.arange(2.0**20, dtype="f4").reshape(1024, 1024)
    limit = None if how == "asked for" else 2 * 2**20
    with gpuscheduler.Scheduler("cuda:0", memory_limit=limit, check=True) as s:
        y, want = cupy_array(x, 256).map_blocks(cupy.sort) * 2, x * 2  # in blocks of 256 KiB
        if how == "evicted":
            y, want = y.persist().sum(axis=1), want.sum(axis=1)
            assert s.last.spilled[HOST] > 0
        np.testing.assert_allclose(host(y.to_backend("numpy").compute()), want)
    assert sent
    assert not behind


@pytest.mark.parametrize("devices", DEVICES[:3])
def test_results_wait_on_the_disk(devices, x, tmp_path):
    block = x.nbytes // 16
    with gpuscheduler.Scheduler(
        devices=devices, memory_limit=3 * block, spill_directory=str(tmp_path), check=True
    ) as s:
        tight(s, 0)
        lazy = cupy_array(x, SIDE // 4)
        keys = [k for row in lazy.__dask_keys__() for k in row]
        found = gpuscheduler.get(dict(lazy.__dask_graph__()), keys)
        assert len(found) == 16
        for n, value in enumerate(found):
            i, j = divmod(n, 4)
            q = SIDE // 4
            np.testing.assert_array_equal(host(value), x[i * q : i * q + q, j * q : j * q + q])


def test_a_task_that_is_refused_memory_runs_again(x):
    """What a library allocates on its way is not foreseen: room is made, and it runs once more."""
    times = Counter()

    def greedy(block, block_info=None):
        where = block_info[0]["chunk-location"]
        times[where] += 1
        if times[where] < 2:
            cupy.empty(2**46, np.uint8)
        return block + 1

    with gpuscheduler.Scheduler(devices="cuda:0", check=True):
        a = cupy_array(x, SIDE // 4)
        b = a.map_blocks(greedy, meta=cupy.empty((0, 0)))
        result = (b + a.mean()).to_backend("numpy").compute()
    np.testing.assert_allclose(result, x + 1 + x.mean())
    assert set(times.values()) == {2}


class LibraryError(RuntimeError):
    """Of cuBLAS, of cuFFT, of Numba's driver."""


RUNTIME = 2 if not hasattr(cupy, "_device") else "cudaErrorMemoryAllocation: out of memory"


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        cupy.cuda.runtime.CUDARuntimeError(RUNTIME),
        LibraryError("CUBLAS_STATUS_ALLOC_FAILED"),
        LibraryError("CUSOLVER_STATUS_ALLOC_FAILED"),
        LibraryError("CUFFT_ALLOC_FAILED"),
        LibraryError("[2] Call to cuMemAlloc results in CUDA_ERROR_OUT_OF_MEMORY"),
    ],
    ids=repr,
)
def test_whoever_refuses_memory_the_task_runs_again(error, x):
    times = Counter()

    def greedy(block, block_info=None):
        where = block_info[0]["chunk-location"]
        times[where] += 1
        if times[where] < 3:
            raise error
        return block + 1

    with gpuscheduler.Scheduler(devices="cuda:0", check=True):
        b = cupy_array(x, SIDE // 4).map_blocks(greedy, meta=cupy.empty((0, 0)))
        np.testing.assert_allclose(b.to_backend("numpy").compute(), x + 1)
    assert set(times.values()) == {3}


def test_memory_that_a_task_never_gets_is_an_error_that_says_so(x):
    def greedy(block):
        raise LibraryError("CUFFT_ALLOC_FAILED")

    with gpuscheduler.Scheduler(devices="cuda:0", check=True):
        a = cupy_array(x, SIDE // 4)
        with pytest.raises(OutOfMemory, match="device 0 refused .* use smaller chunks"):
            a.map_blocks(greedy, meta=cupy.empty((0, 0))).compute()
        np.testing.assert_allclose(host((a + 1).compute()), x + 1)


@pytest.mark.parametrize("times", [1, 10**9])
@pytest.mark.parametrize("first", [0, 3])
def test_pinned_memory_that_the_host_refuses(first, times, x, tmp_path, monkeypatch):
    """Once, when blocks that wait for reuse are in the way: these go. Then nobody hears of it."""
    real, calls = cupy.cuda.PinnedMemory, [0]

    def refusing(size, flags):
        calls[0] += 1
        if first < calls[0] <= first + times:
            raise cupy.cuda.runtime.CUDARuntimeError(RUNTIME)
        return real(size, flags)

    block = x.nbytes // 16
    options = {"memory_limit": 5 * block, "spill_directory": str(tmp_path), "check": True}
    with gpuscheduler.Scheduler("cuda:0", **options) as s:
        a = cupy_array(x, SIDE // 4)
        b = a - a.mean()
        total, want = (b @ b.T).sum(), x - x.mean()
        with monkeypatch.context() as patch:
            patch.setattr(cupy.cuda, "PinnedMemory", refusing)
            if times == 1:
                np.testing.assert_allclose(float(total.compute()), (want @ want.T).sum(), atol=1e-9)
            else:
                with pytest.raises(OutOfMemory, match="page-locked memory left.* raise memory_lim"):
                    total.compute()
            assert calls[0] > first
        np.testing.assert_allclose(float(total.compute()), (want @ want.T).sum(), atol=1e-9)
        assert s.last.spilled[HOST] > 0
    assert not list(tmp_path.iterdir())


def test_a_spill_directory_that_cannot_be_written(x, tmp_path):
    missing = tmp_path / "file"
    missing.write_text("in the way")
    block = x.nbytes // 16
    with gpuscheduler.Scheduler(
        devices="cuda:0", memory_limit=5 * block, spill_directory=str(missing)
    ) as s:
        tight(s, 0)
        a = cupy_array(x, SIDE // 4)
        with pytest.raises(SpillError, match="spill"):
            ((a - a.mean()) @ a.T).compute()
        assert float(da.ones(8, chunks=4).sum().compute()) == 8


def test_what_stays_inside_is_pinned_in_slabs(monkeypatch):
    """Of pages that threads have touched; more at a time the more there are. A slab is given back
    when the last array in it is gone."""
    monkeypatch.setattr(cuda_pinned, "LEAST_REGISTERED", 2**16)
    live, runtime = {}, cupy.cuda.runtime

    def register(pointer, nbytes, flags):
        hostRegister(pointer, nbytes, flags)
        live[pointer] = nbytes

    def unregister(pointer):
        hostUnregister(pointer)
        del live[pointer]

    hostRegister, hostUnregister = runtime.hostRegister, runtime.hostUnregister
    monkeypatch.setattr(runtime, "hostRegister", register)
    monkeypatch.setattr(runtime, "hostUnregister", unregister)
    pinned = cuda_pinned.PinnedBlocks(inside=True)
    arrays = []
    for n, blocks in enumerate([1, 2, 4, 4, 8, 8, 8, 8]):
        arrays.append(pinned.array((100, 200), "i4"))
        arrays[-1][...] = n
        assert sum(live.values()) == 2**17 * blocks
    assert [len(set(a.ravel().tolist())) for a in arrays] == [1] * 8
    addresses = {a.ctypes.data for a in arrays}
    assert len(addresses) == 8
    part = arrays.pop()[5:7]
    arrays.clear()
    again = [pinned.array((100, 200), "i4") for _ in range(7)]
    assert {a.ctypes.data for a in again} < addresses
    assert (part == 7).all()
    assert len(live) == 4
    pinned.clear()
    del again
    gc.collect()
    assert len(live) == 1
    del part
    gc.collect()
    assert not live


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.filterwarnings("ignore:This process")
def test_evicted_blocks_and_a_forked_child(monkeypatch):
    """The child has none of the slabs, and goes; results are its as ever."""
    monkeypatch.setattr(cuda_pinned, "LEAST_REGISTERED", 2**14)
    a = np.random.default_rng(8).random((400, 400))
    with gpuscheduler.Scheduler("cuda:0,0", memory_limit=5 * 80_000, check=True) as s:
        p = cupy_array(a, 100).persist()
        result = (p + p.T).to_backend("numpy").compute()
        assert s._persisted.nbytes()[HOST] > 0
        assert s.hardware.inside.made
        child = os.fork()
        if not child:
            good = False
            try:
                good = bool((result == a + a.T).all())
            finally:
                os._exit(0 if good else 1)
        assert os.waitpid(child, 0)[1] == 0
        np.testing.assert_array_equal((p + 1).to_backend("numpy").compute(), a + 1)


@pytest.mark.parametrize("host_blocks", [0, 100])
def test_parts_of_what_was_made_together_are_kept_where_it_is(host_blocks, tmp_path):
    """Three blocks of b are made by one step.

    Their value leaves for the host, or the disk, before the end. The blocks must not come back
    beside all that the GPU holds by then.
    """
    numbers = np.random.default_rng(0).random((200, 40))
    block = numbers.nbytes // 5
    with limited("cuda:0", 9 * block + 1, host_blocks * block, tmp_path) as s:
        a = da.from_array(numbers, chunks=(40, 40)).to_backend("cupy").persist()
        b = (da.exp(-(a**2)) + a.sum(axis=0)).persist()
        away = DISK if host_blocks == 0 else HOST
        assert s.last.spilled[away] > block  # else this tests nothing
        held = s._persisted.nbytes()
        assert held[0] <= 9 * block
        assert held[away] > block
        assert sum(held.values()) == 10 * block
        want = np.exp(-(numbers**2)) + numbers.sum(axis=0)
        np.testing.assert_allclose(b.compute().get(), want)
        assert s.last.peak[0] <= 9 * block + 1
        first = b.blocks[0].compute()  # a part alone
        np.testing.assert_allclose(first.get(), want[:40])
        del a, b, first
        end = time.monotonic() + 20
        while (
            s._persisted.chunks() and time.monotonic() < end
        ):  # threads may be at the last run yet
            gc.collect()
            time.sleep(0.01)
        assert not s._persisted.chunks()
        assert not s.hardware.store.nbytes
