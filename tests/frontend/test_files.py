"""Arrays that are in files: read while devices work, written while they work, in little memory."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import contextmanager

import dask
import dask.array as da
import numpy as np
import pytest

from gpuscheduler import OutOfMemory, Scheduler
from gpuscheduler.plan.machine import DISK
from gpuscheduler.values import sizeof
from tests.support.strategies import graph_of

zarr = pytest.importorskip("zarr")
h5py = pytest.importorskip("h5py")

SIDE = 100
BLOCK = SIDE * SIDE * 8


class Source:
    """An array in a file that tells who reads it; `hold` blocks readers until it is set."""

    def __init__(self, array, fail_at=None):
        self.array, self.shape, self.dtype, self.ndim = array, array.shape, array.dtype, array.ndim
        self.fail_at = fail_at
        self.threads, self.reads = set(), []

    def __getitem__(self, index):
        if index == (slice(0, 0),) * self.ndim:
            return np.empty((0,) * self.ndim)  # Dask looks what it gives
        self.threads.add(threading.current_thread().name)
        self.reads.append(index)
        if self.fail_at is not None and len(self.reads) == self.fail_at:
            raise OSError("the file ends here")
        return np.array(self.array[index])


def numbers(n=16):
    return np.random.default_rng(0).random((n * SIDE, SIDE))


@contextmanager
def little(tmp_path, blocks=8, **options):
    options = {"check": True, "spill_directory": str(tmp_path / "spill"), **options}
    (tmp_path / "spill").mkdir(exist_ok=True)
    limit = blocks * BLOCK // 2
    with Scheduler("cpu:2", memory_limit=limit, **options) as s:
        yield s
        assert s.last is None or s.last.peak[0] <= blocks * BLOCK
    assert not list((tmp_path / "spill").iterdir())


# ---- what becomes of the graph


def test_reading_and_writing_are_steps_of_their_own():
    """And what is between them is one kernel, or one task."""
    x = da.from_array(Source(numbers()), chunks=SIDE)
    graph = graph_of(da.store((x * 2 + 1) / 3, np.empty(x.shape), lock=False, compute=False))
    assert len(graph.aside_keys) == 32
    assert len(graph.tasks) == 48
    assert not graph.again_keys
    graph = graph_of((x * 2).sum())
    assert len(graph.aside_keys) == len(graph.again_keys) == 16


def test_what_is_in_memory_is_not_in_a_file(tmp_path):
    m = np.lib.format.open_memmap(tmp_path / "x.npy", mode="w+", shape=(40, 40))
    for source, n in ((np.ones((40, 40)), 0), (m, 4)):
        x = da.from_array(source, chunks=20)
        assert len(graph_of(x + x.T).aside_keys) == n


def test_what_is_written_may_not_be_read_again_unless_it_is_surely_something_else(tmp_path):
    a, b = (zarr.create_array(tmp_path / name, shape=(4, 4), dtype="f8") for name in "ab")
    with h5py.File(tmp_path / "x.h5", "w") as f:
        c, d = (f.create_dataset(name, (4, 4), dtype="f8") for name in "cd")
        n = np.empty((4, 4))
        for source, target, may in (
            (a, b, True),
            (a, zarr.open(tmp_path / "a"), False),
            (c, d, True),
            (c, f["c"], False),
            (a, d, True),
            (c, n, True),
            (Source(n), a, False),
            (Source(n), n, False),
        ):
            x = da.from_array(source, chunks=2)
            graph = graph_of(da.store(x + 1, target, lock=False, compute=False))
            assert len(graph.again_keys) == 4 * may, (source, target)


def test_a_slice_of_a_block_reads_only_the_slice(tmp_path):
    source = Source(numbers())
    x = da.from_array(source, chunks=SIDE)
    with little(tmp_path):
        np.testing.assert_array_equal(x[5:7, :3].compute(), source.array[5:7, :3])
    assert source.reads == [(slice(5, 7, None), slice(0, 3, None))]


def test_sizes_of_what_is_in_a_file(tmp_path):
    z = zarr.create_array(tmp_path / "z", shape=(1000, 1000), dtype="f8")
    m = np.lib.format.open_memmap(tmp_path / "x.npy", mode="w+", shape=(1000, 1000))
    with h5py.File(tmp_path / "x.h5", "w") as f:
        h = f.create_dataset("x", (1000, 1000), dtype="f8")
        assert max(sizeof(z), sizeof(m), sizeof(m[:10]), sizeof(h)) == 0
    assert sizeof(m + 1) == 8_000_000


# ---- who does it, and when


def test_files_are_read_and_written_in_threads_of_their_own(tmp_path):
    source, target = Source(numbers()), {}
    x = da.from_array(source, chunks=SIDE)

    class Target:
        def __setitem__(self, index, block):
            target[threading.current_thread().name] = block

    with little(tmp_path):
        da.store(x + 1, Target(), lock=False)
    names = source.threads | set(target)
    assert names <= {"gpuscheduler-files-0", "gpuscheduler-files-1"}


def test_a_device_works_while_the_next_block_is_read(tmp_path):
    """The work on the first block ends only when the second has been read."""
    read = threading.Event()
    source = Source(numbers(4))
    whole = source.array

    class Second(Source):
        def __getitem__(self, index):
            out = super().__getitem__(index)
            if len(self.reads) >= 2:
                read.set()
            return out

    source = Second(whole)

    def work(block):
        assert read.wait(60)
        return block + 1

    x = da.from_array(source, chunks=SIDE).map_blocks(work, meta=np.empty((0, 0)))
    with Scheduler("cpu:1", memory_limit=8 * BLOCK):
        np.testing.assert_array_equal(x.compute(), whole + 1)


def test_a_device_works_while_the_last_block_is_written(tmp_path):
    """Writing the first block ends only when the second has been worked on."""
    worked = threading.Event()
    done = []

    def work(block):
        done.append(1)
        if len(done) >= 2:
            worked.set()
        return block + 1

    class Target:
        def __init__(self):
            self.array = np.empty((4 * SIDE, SIDE))

        def __setitem__(self, index, block):
            assert worked.wait(60)
            self.array[index] = block

    target, whole = Target(), numbers(4)
    x = da.from_array(whole, chunks=SIDE).map_blocks(work, meta=np.empty((0, 0)))
    with Scheduler("cpu:1", memory_limit=8 * BLOCK):
        da.store(x, target, lock=False)
    np.testing.assert_array_equal(target.array, whole + 1)


def test_a_lock_is_held_while_a_block_is_read(tmp_path):
    lock = threading.Lock()

    class Locked(Source):
        def __getitem__(self, index):
            assert lock.locked()
            return super().__getitem__(index)

    source = Locked(numbers())
    x = da.from_array(source, chunks=SIDE, lock=lock)
    with little(tmp_path):
        np.testing.assert_allclose(x.sum().compute(), source.array.sum())
    assert not lock.locked()


# ---- in little memory


def test_what_was_read_is_read_again_rather_than_written_elsewhere(tmp_path):
    source = Source(numbers())
    x = da.from_array(source, chunks=SIDE)
    want = (source.array - source.array.mean(axis=0)).max(axis=1)
    with little(tmp_path, blocks=6) as s:
        np.testing.assert_allclose((x - x.mean(axis=0)).max(axis=1).compute(), want)
        assert s.last.spilled[DISK] < BLOCK
    assert len(source.reads) > 16


def test_what_is_written_while_it_is_read_is_read_once(tmp_path):
    """A block that has been overwritten must not be read again: it would be another one."""
    array = numbers()
    want = array + array.mean(axis=0)
    source = Source(array)
    x = da.from_array(source, chunks=SIDE)
    y = x + x.mean(axis=0)
    with little(tmp_path, blocks=6):
        da.store(y, array, lock=False)
    np.testing.assert_allclose(array, want)
    assert len(source.reads) == 16


@pytest.mark.parametrize("kind", ["zarr", "hdf5", "memmap", "store"])
def test_an_array_of_several_times_the_memory(tmp_path, kind):
    whole = numbers(32)
    shape, chunks = whole.shape, (SIDE, SIDE)
    with little(tmp_path) as s:
        if kind == "zarr":
            da.from_array(whole, chunks=chunks).to_zarr(str(tmp_path / "in"))
            x = da.from_zarr(str(tmp_path / "in"))
            (x * 2 + 1).to_zarr(str(tmp_path / "out"))
            got = zarr.open(str(tmp_path / "out"))[:]
        elif kind == "hdf5":
            with h5py.File(tmp_path / "x.h5", "w") as f:
                f["in"] = whole
                out = f.create_dataset("out", shape, chunks=chunks, dtype="f8")
                da.store(da.from_array(f["in"], chunks=chunks) * 2 + 1, out, lock=True)
                got = out[:]
        else:
            m = np.lib.format.open_memmap(tmp_path / "in.npy", mode="w+", shape=shape)
            m[:] = whole
            out = np.lib.format.open_memmap(tmp_path / "out.npy", mode="w+", shape=shape)
            x = da.from_array(m, chunks=chunks)
            if kind == "store":
                kept = (x * 2 + 1).store(out, lock=False, return_stored=True)
                got = kept.compute()
                del kept
            else:
                da.store(x * 2 + 1, out, lock=False)
                got = np.array(out)
        assert s.last.peak[0] <= 8 * BLOCK
    np.testing.assert_allclose(got, whole * 2 + 1)


def test_half_a_gigabyte_in_64_mib(tmp_path):
    """Copy 512 MiB through Zarr and back in a limit of 64 MiB.

    It runs in its own process, so that its memory can be measured. What is beside that are zarr's
    own buffers.
    """
    code = f"""
import resource, numpy as np, dask.array as da, zarr
from gpuscheduler import Scheduler
side = 1024
store = {str(tmp_path)!r}
z = zarr.create_array(store + "/in", shape=(64 * side, side), chunks=(side, side), dtype="f8",
                      compressors=None)
for i in range(64):
    z[i * side : (i + 1) * side] = np.full((side, side), float(i))
def most():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
before = most()
with Scheduler("cpu:2", memory_limit="32 MiB") as s:
    x = da.from_zarr(z)
    total = float((x * 2 + 1).sum().compute())
    assert total == side * side * (64 * 63 + 64), total
    (x + x[::-1]).to_zarr(store + "/out")
    assert s.last.peak[0] <= 2**26, s.last
    more = most() - before
assert (zarr.open(store + "/out")[::side, 0] == 63).all()
assert more < 64 + 32, f"{{more}} MiB more than before"
print("same")
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    out = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=110
    )
    assert out.stdout.strip() == "same", out.stderr


# ---- faults


def test_a_source_that_fails_half_way_is_an_error_and_the_next_run_works(tmp_path):
    whole = numbers()
    with little(tmp_path) as s:
        x = da.from_array(Source(whole, fail_at=7), chunks=SIDE)
        with pytest.raises(OSError, match="the file ends here") as error:
            x.sum().compute()
        assert any("while running ('array-" in n for n in getattr(error.value, "__notes__", []))
        np.testing.assert_allclose(x.sum().compute(), whole.sum())
        assert s.hardware.store.nbytes == 0


def test_a_target_that_fails_is_an_error(tmp_path):
    class Full:
        def __setitem__(self, index, block):
            raise OSError("no space")

    with little(tmp_path):
        x = da.from_array(Source(numbers()), chunks=SIDE)
        with pytest.raises(OSError, match="no space"):
            da.store(x + 1, Full(), lock=False)
        x.sum().compute()


def test_a_source_without_memory_is_tried_again(tmp_path):
    class Short(Source):
        def __getitem__(self, index):
            out = super().__getitem__(index)
            if len(self.reads) == 3:
                raise MemoryError
            return out

    source = Short(numbers())
    with little(tmp_path):
        x = da.from_array(source, chunks=SIDE)
        np.testing.assert_allclose(x.sum().compute(), source.array.sum())


def test_blocks_that_are_too_large_are_refused_before_anything_is_read(tmp_path):
    source = Source(numbers(16))
    with little(tmp_path, blocks=4), pytest.raises(OutOfMemory, match="array-.*320,000 bytes"):
        da.from_array(source, chunks=(8 * SIDE, SIDE)).sum().compute()
    assert source.reads == []


def test_other_schedulers_and_a_pool_of_threads(tmp_path):
    from concurrent.futures import ThreadPoolExecutor

    whole = numbers()
    x = da.from_array(Source(whole), chunks=SIDE)
    with ThreadPoolExecutor(2) as pool, little(tmp_path):
        np.testing.assert_allclose(x.sum().compute(pool=pool), whole.sum())
        np.testing.assert_allclose(x.sum().compute(num_workers=1), whole.sum())
    (given,) = dask.optimize(x.sum())
    np.testing.assert_allclose(given.compute(scheduler="sync"), whole.sum())
