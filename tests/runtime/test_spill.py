"""Values in files: what comes back, who may see it, and what is left behind (nothing)."""

from __future__ import annotations

import errno
import gc
import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from time import sleep

import dask
import dask.array as da
import numpy as np
import pytest
from dask import config, delayed
from hypothesis import given
from hypothesis.extra import numpy as hnp

from gpuscheduler import Scheduler
from gpuscheduler.errors import NotSpillable, SpillError
from gpuscheduler.plan.machine import DISK
from gpuscheduler.runtime.host_memory import PassageLane, SpillPassage
from gpuscheduler.runtime.spill import CODECS, PREFIX, Codec, SpillStore, remove_abandoned
from tests.support.strategies import thorough


@pytest.fixture
def store(tmp_path):
    s = SpillStore(str(tmp_path))
    yield s
    s.close()
    assert not list(tmp_path.iterdir())


def back(store, value):
    file = store.write(value, "k")
    out = store.read(file, "k")
    store.remove(file)
    return out


def same(a, b):
    assert type(a) is type(b)
    if isinstance(a, np.ndarray):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        np.testing.assert_array_equal(a, b)
        assert a.flags.f_contiguous == b.flags.f_contiguous or not a.flags.c_contiguous
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for k in a:
            same(a[k], b[k])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            same(x, y)
    else:
        assert a == b


RECORD = np.dtype([("a", "i4"), ("b", "f8", (2,))])
VALUES = {
    "0-d": np.array(3.5),
    "empty": np.empty((0, 3)),
    "fortran": np.asfortranarray(np.arange(12.0).reshape(3, 4)),
    "strided": np.arange(24).reshape(4, 6)[::2, ::3],
    "objects": np.array([1, "two", None], dtype=object),
    "records": np.ones(3, RECORD),
    "dates": np.array(["2026-11-21"], dtype="M8[D]"),
    "masked": np.ma.masked_less(np.arange(5.0), 2),
    "many": {"total": np.ones(4), "n": (np.ones(2), [3, "x"])},
    "none": None,
}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_comes_back_as_it_was(store, name):
    same(VALUES[name], back(store, VALUES[name]))


@thorough
@given(hnp.arrays(hnp.scalar_dtypes(), hnp.array_shapes(min_dims=0)))
def test_any_array_comes_back(value):
    """Its bytes in this machine's order, that is: NumPy turns dates round when it pickles them."""
    store = SpillStore()
    got = back(store, value)
    assert got.shape == value.shape
    assert got.dtype.newbyteorder("=") == value.dtype.newbyteorder("=")
    assert got.astype(value.dtype).tobytes() == value.tobytes()
    store.close()


def has(codec):
    try:
        return Codec.from_name(codec) is not None
    except ValueError:
        return False


HERE = [pytest.param(c, marks=pytest.mark.skipif(not has(c), reason="not here")) for c in CODECS]


@pytest.mark.parametrize("codec", HERE)
@pytest.mark.parametrize("name", VALUES)
def test_a_value_comes_back_from_a_compressed_file(tmp_path, name, codec):
    store = SpillStore(str(tmp_path), compression=codec)
    same(VALUES[name], back(store, VALUES[name]))
    assert store.nbytes == 0
    store.close()


@pytest.mark.parametrize("codec", HERE)
def test_compressed_files_are_smaller_and_counted_as_they_are(tmp_path, codec):
    """20 MiB of ones, in pieces of 4 MiB."""
    store = SpillStore(str(tmp_path), compression=codec)
    value = np.ones(20 * 2**17)
    file = store.write(value, "k")
    assert os.path.getsize(file.path) == file.nbytes == store.nbytes < 2**18
    same(value, store.read(file, "k"))
    store.close()


@pytest.mark.parametrize("codec", HERE)
@pytest.mark.parametrize("damage", ["short", "changed"])
def test_a_compressed_file_that_is_damaged_is_a_clear_error(tmp_path, damage, codec):
    store = SpillStore(str(tmp_path), compression=codec)
    file = store.write(np.arange(1000), "k")
    content = bytearray(Path(file.path).read_bytes())
    half = len(content) // 2
    content = content[:half] if damage == "short" else content[:half] + b"x" * half
    Path(file.path).write_bytes(content)
    with pytest.raises(SpillError, match="'k' was written to .* cannot be read any more"):
        store.read(file, "k")
    store.close()


def test_a_run_with_compressed_files_gives_the_same(tmp_path):
    x = blocks()
    y = (x - x.mean(axis=0)).sum(axis=1)
    with Scheduler("cpu:2", fuse=False):
        expected = y.compute()
    options = {"fuse": False, "spill_directory": str(tmp_path), "spill_compression": "zlib"}
    with Scheduler("cpu:2", memory_limit=200_000, **options) as s:
        np.testing.assert_allclose(y.compute(), expected)
        assert s.last.spilled[DISK] > s.hardware.store.peak > 0
    with pytest.raises(ValueError, match="spill_compression='zip': use None or one of"):
        Scheduler("cpu:1", spill_compression="zip")


def test_an_array_that_comes_back_can_be_written_to_if_it_could_be_before(store):
    fixed = np.arange(4)
    fixed.flags.writeable = False
    assert back(store, np.arange(4)).flags.writeable
    assert not back(store, fixed).flags.writeable


def test_no_byte_of_an_array_is_copied_on_the_way(store):
    """32 MiB go out in less than one more, and come in in 32 MiB and less than one more."""
    value = np.ones(2**22)
    tracemalloc.start()
    try:
        file = store.write(value, "k")
        assert tracemalloc.get_traced_memory()[1] < 2**20
        got = store.read(file, "k")
        assert tracemalloc.get_traced_memory()[1] < value.nbytes + 2**20
    finally:
        tracemalloc.stop()
    same(value, got)


def test_what_cannot_be_pickled_leaves_no_file(store, tmp_path):
    with pytest.raises(NotSpillable, match="'k' cannot be pickled"):
        store.write(threading.Lock(), "k")
    assert not list(tmp_path.iterdir())


# ---- folders


def test_nobody_else_may_look(store, tmp_path):
    file = store.write(np.ones(3), "k")
    (folder,) = tmp_path.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert Path(file.path).parent == folder
    assert os.path.getsize(file.path) == file.nbytes == store.nbytes
    store.remove(file)
    assert not os.path.exists(file.path)
    assert (store.nbytes, store.peak) == (0, file.nbytes)


def test_there_is_no_folder_before_the_first_value(tmp_path):
    SpillStore(str(tmp_path)).close()
    assert not list(tmp_path.iterdir())


def test_a_store_that_is_forgotten_or_left_at_exit_leaves_nothing(tmp_path):
    SpillStore(str(tmp_path)).write(1, "k")
    assert not list(tmp_path.iterdir())
    code = "from gpuscheduler.runtime.spill import SpillStore; "
    code += f"s = SpillStore({str(tmp_path)!r}); s.write(1, 'k')"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
    assert not list(tmp_path.iterdir())


KILLED = """
import sys, os, time
from gpuscheduler.runtime.spill import SpillStore
store = SpillStore(sys.argv[1])
store.write(b"x" * 1000, "k")
print("written", flush=True)
time.sleep(600)
"""
#: Computes for ever in too little memory, and tells when the first file is written.
SPILLING = """
import sys
import dask.array as da
from gpuscheduler import Scheduler
from gpuscheduler.runtime import spill
def written(f, view, real=spill._write_all, told=[]):
    real(f, view)
    if not told:
        told.append(print("written", flush=True))
spill._write_all = written
x = da.random.default_rng(0).random((1600, 100), chunks=100)
with Scheduler("cpu:2", memory_limit=200_000, fuse=False, spill_directory=sys.argv[1]):
    while True:
        (x - x.mean(axis=0)).sum().compute()
"""


@contextmanager
def running(code, folder):
    """A process that has written its first file."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(folder)],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # a shell's background jobs ignore it
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    with process:
        try:
            assert process.stdout.readline() == "written\n", process.communicate()
            yield process
        finally:
            process.kill()


def interrupted(process, patience=30):
    """What a process says that is sent Ctrl-C until it ends, and how often that was.

    Python prints and drops one that comes in a finalizer.
    """
    for sent in (1, 2, 3):
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=patience)[1], sent
    raise AssertionError("it does not end")


def test_ctrl_c_while_values_are_written_leaves_nothing(tmp_path):
    with running(SPILLING, tmp_path) as process:
        errors, sent = interrupted(process)
    assert process.returncode == -signal.SIGINT
    assert errors.strip().endswith("KeyboardInterrupt")
    assert sent == 1 or "Exception ignored" in errors
    assert not list(tmp_path.iterdir())


def test_a_killed_computation_is_cleared_away_by_the_next_start(tmp_path):
    """Of a Scheduler that never spills. One that is made while the first one lives leaves it be."""
    with running(SPILLING, tmp_path) as process:
        Scheduler("cpu:1", spill_directory=str(tmp_path)).close()
        (theirs,) = tmp_path.iterdir()
        process.kill()
        process.wait(30)
    assert (theirs / "lock").exists()
    with Scheduler("cpu:1", spill_directory=str(tmp_path)):
        assert not theirs.exists()
        assert da.ones(10, chunks=5).sum().compute() == 10
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("gone", [True, False])
def test_a_folder_whose_removal_was_interrupted_goes_with_the_next_one(tmp_path, gone):
    """Ctrl-C may come at any moment, in the middle of a finalizer, too."""
    store, other = SpillStore(str(tmp_path)), SpillStore(str(tmp_path))
    store.write(np.arange(3), "a")
    other.write(np.arange(3), "b")
    store._end.detach()
    if gone:
        del store
        gc.collect()
    else:
        store.close()
    assert len(list(tmp_path.iterdir())) == 1 + gone
    other.close()
    assert not list(tmp_path.iterdir())


def test_what_a_killed_process_left_goes_when_the_next_one_comes(tmp_path):
    """While it lives its folder is its own: it holds the lock. SIGKILL takes the lock from it."""
    with running(KILLED, tmp_path) as process:
        (theirs,) = tmp_path.iterdir()
        store = SpillStore(str(tmp_path))
        store.write(1, "k")
        assert theirs in tmp_path.iterdir()
        process.send_signal(signal.SIGKILL)
        process.wait(30)
    assert theirs.exists()
    another = SpillStore(str(tmp_path))
    another.write(1, "k")
    assert not theirs.exists()
    assert len(list(tmp_path.iterdir())) == 2  # the two that live
    store.close()
    another.close()
    assert not list(tmp_path.iterdir())


def test_only_abandoned_folders_are_removed(tmp_path):
    """An empty one was left between two lines; one with files and no lock is not ours to judge."""
    (tmp_path / f"{PREFIX}1").mkdir()
    (tmp_path / f"{PREFIX}2").mkdir()
    (tmp_path / f"{PREFIX}2" / "file").touch()
    (tmp_path / "other").mkdir()
    (tmp_path / f"{PREFIX}3").symlink_to(tmp_path / "other")
    remove_abandoned(str(tmp_path))
    left = {p.name for p in tmp_path.iterdir()}
    assert left == {f"{PREFIX}2", f"{PREFIX}3", "other"}


def test_a_child_process_does_not_remove_the_files_of_its_parent(store, tmp_path):
    file = store.write(5, "k")
    child = os.fork() if hasattr(os, "fork") else None
    if child == 0:
        store.close()
        os._exit(0)
    if child:
        os.waitpid(child, 0)
    assert store.read(file, "k") == 5


def test_the_directory_is_the_option_or_dasks_or_the_systems(tmp_path):
    assert SpillStore("here").base == "here"
    with config.set(temporary_directory="there"):
        assert SpillStore().base == "there"
    with config.set(temporary_directory=None):
        assert SpillStore().base == tempfile.gettempdir()
    with config.set({"gpuscheduler.spill-directory": str(tmp_path)}), Scheduler("cpu:1") as s:
        assert s.hardware.store.base == str(tmp_path)


# ---- disks that are full, or not there


class FullFile:
    """A file on a disk that takes 1000 bytes."""

    def __init__(self, path, *args, **kwargs):
        self.file = open(path, *args, **kwargs)  # noqa: SIM115

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.file.close()

    def write(self, view):
        if self.file.tell() >= 1000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self.file.write(view[: 1000 - self.file.tell()])


def test_a_full_disk_is_an_error_that_says_what_to_do_and_leaves_no_file(tmp_path):
    store = SpillStore(str(tmp_path), opened=FullFile)
    with pytest.raises(SpillError) as error:
        store.write(np.ones(1000), ("x", 3))
    text = str(error.value)
    for fact in ("('x', 3)", str(tmp_path), "No space left", "spill_directory", "free space"):
        assert fact in text
    assert error.value.errno == errno.ENOSPC
    (folder,) = tmp_path.iterdir()
    assert [p.name for p in folder.iterdir()] == ["lock"]
    store.close()


def test_a_directory_that_is_not_there_or_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    for name, reason in (("none", "No such file"), ("file", "Not a directory")):
        store = SpillStore(str(tmp_path / name))
        with pytest.raises(SpillError, match=f"'k' .*{name}: {reason}.*spill_directory"):
            store.write(5, "k")
        store.close()


def test_a_file_that_lost_its_end_is_an_error(store):
    file = store.write(np.ones(100), "k")
    os.truncate(file.path, 500)
    with pytest.raises(SpillError, match="'k' .*shorter"):
        store.read(file, "k")


def test_a_file_that_somebody_has_removed_is_an_error_that_says_so(tmp_path):
    """There is memory enough, and nothing wrong with the directory."""
    x = blocks()
    with Scheduler("cpu:1", memory_limit=4 * 80_000, spill_directory=str(tmp_path)):
        kept = x.persist()
        (folder,) = tmp_path.iterdir()
        for file in folder.glob("[0-9]*"):
            file.unlink()
        with pytest.raises(
            SpillError, match="written to .* is gone: .*nothing else clears"
        ) as error:
            kept.sum().compute()
        assert error.value.errno == errno.ENOENT
        assert "memory_limit" not in str(error.value)
        assert int((x > 2).sum().compute()) == 0
        del kept, error
    gc.collect()  # the error holds the run's frames
    assert not list(tmp_path.iterdir())


# ---- what only passes through the host's memory


def test_room_is_for_one_value_each_way_or_for_what_is_within_the_limit():
    """Of 100 bytes: 70 on the way out, 30 on the way back. 1 more waits for some of them to go.
    What is larger than the limit waits for all that goes its way, and for nothing that comes
    back."""
    passage = SpillPassage(100)
    out, back = PassageLane(passage), PassageLane(passage)
    first, other = out.room(70), back.room(30)
    waits, got = threading.Event(), []
    second = threading.Thread(target=lambda: got.append(out.room(1, waits.set)))
    second.start()
    assert waits.wait(10)
    assert passage.used == 100
    assert not got
    del other
    second.join(10)
    assert passage.used == 71

    waits.clear()
    third = threading.Thread(target=lambda: got.append(out.room(300, waits.set)))
    third.start()
    assert waits.wait(10)
    other = back.room(200)  # nothing else comes back
    got.clear()
    assert third.is_alive()
    del first
    third.join(10)
    assert passage.used == passage.peak == 500
    got.clear()
    del other
    assert (passage.used, out.held, back.held) == (0, 0, 0)


def test_one_that_waits_for_room_may_be_told_to_give_up():
    passage = SpillPassage(0)
    way = PassageLane(passage)
    first = way.room(1)

    def over():
        raise KeyError

    with pytest.raises(KeyError):
        way.room(1, over)
    assert passage.used == first.nbytes == 1


def test_many_threads_that_pass_are_never_more_than_the_limit_and_one_value():
    passage = SpillPassage(100)
    ways = [PassageLane(passage), PassageLane(passage)]
    go = threading.Barrier(6)

    def passes(n):
        go.wait()
        for k in range(300):
            room = ways[n % 2].room(10 + (7 * k + n) % 31)
            assert room.nbytes <= ways[n % 2].held
            sleep(0)  # others go on
            del room

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(passes, range(6)))
    assert passage.used == 0
    assert 40 < passage.peak <= 100 + 40


# ---- in a computation


def blocks(n=16, side=100):
    """n blocks of 80 kB that are all read twice, far apart."""
    return da.random.default_rng(0).random((n * side, side), chunks=(side, side))


def test_a_computation_in_little_memory_gives_the_same(tmp_path):
    """matmul and x + x.T of 1.3 MB run in 400 kB. Three blocks of 80 kB must be there at once."""
    x = da.random.default_rng(0).random((400, 400), chunks=100)
    for y in (x @ x.T, x + x.T, x - x.mean(axis=0)):
        with Scheduler("cpu:2", fuse=False):
            expected = y.compute()
        options = {"fuse": False, "check": True, "spill_directory": str(tmp_path)}
        with Scheduler("cpu:2", memory_limit=200_000, **options) as s:
            np.testing.assert_allclose(y.compute(), expected)
            assert s.hardware.store.peak > 0
            assert s.hardware.store.nbytes == 0
            assert s.last.peak[0] <= 400_000
        assert not list(tmp_path.iterdir())


def test_results_that_were_written_to_the_disk_come_back(tmp_path):
    """Sixteen blocks that the caller wants, in the memory of four."""
    x = blocks()
    with Scheduler("cpu:1", memory_limit=4 * 80_000, spill_directory=str(tmp_path)) as s:
        kept = x.persist()
        assert s.last.spilled[DISK] >= 12 * 80_000
        np.testing.assert_array_equal(kept.compute(), x.compute())
        got = dask.compute(*(x + 1).to_delayed().ravel())
        assert s.last.spilled[DISK] > 0
        np.testing.assert_array_equal(np.concatenate(got), x.compute() + 1)
        del kept
        assert s.hardware.store.nbytes == 0


def test_what_cannot_be_pickled_stays_and_the_rest_goes():
    """A lock and its array stay in memory; the arrays beside it leave, and come back."""

    def locked():
        return [threading.Lock(), np.ones(10_000)]

    def add(*arrays):
        return sum(a[1].sum() if isinstance(a, list) else a.sum() for a in arrays)

    parts = [
        delayed(locked, pure=False)() if i % 3 == 0 else delayed(np.ones)(10_000 + i)
        for i in range(9)
    ]
    first = [delayed(add)(p) for p in parts]
    total = delayed(sum)(
        [*first, *[delayed(add)(p, f) for p, f in zip(parts[::-1], first, strict=True)]]
    )
    expected = total.compute(scheduler="sync")
    with Scheduler("cpu:1", memory_limit=500_000, window=1, check=True):
        assert total.compute() == expected


def test_a_full_disk_ends_the_run_and_the_next_one_works(tmp_path):
    x = blocks()
    y = (x - x.mean(axis=0)).sum()
    with Scheduler("cpu:2", fuse=False, memory_limit=200_000, spill_directory=str(tmp_path)) as s:
        s.hardware.store.opened = FullFile
        with pytest.raises(SpillError, match="No space left on device: free space there"):
            y.compute()
        s.hardware.store.opened = open
        assert abs(y.compute()) < 1e-6
        assert s.hardware.store.nbytes == 0
        (folder,) = tmp_path.iterdir()
        assert [p.name for p in folder.iterdir()] == ["lock"]
    assert not list(tmp_path.iterdir())


#: A process that computes in 128 MiB what takes 512, and says by how many MiB it has grown.
GROWN = """
import numpy as np, dask.array as da
from gpuscheduler import Scheduler

def taken(name):
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) // 1024 for line in f if line.startswith(name))

def work(blocks):
    x = da.random.default_rng(0).random((512 * blocks, 512 * blocks), chunks=512)
    return ((x - x.mean()) ** 2).sum()

with Scheduler("cpu:2", memory_limit="64 MiB") as s:
    work(2).compute()  # imports, and compiles
    before = taken("VmRSS")
    with open("/proc/self/clear_refs", "w") as f:
        f.write("5")  # the highest mark begins anew
    work(16).compute()
    assert s.last.peak[0] <= 2**27, s.last
    assert s.last.spilled[-2] > 2**28, s.last
    print(taken("VmHWM") - before)
"""


#: The same for the product of a matrix of 169 MiB with itself, on one device.
GROWN_BY_MATMUL = """
from gpuscheduler import Scheduler
from graphs import matmul

def taken(name):
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) / 1024 for line in f if line.startswith(name))

with Scheduler("cpu:1", memory_limit="128 MiB") as s:
    ((matmul.build(1024, 512) + 1) * 2).sum().compute()  # imports, and LLVM, which compiles
    x = matmul.build(6656, SIDE).sum()
    s.plan(x)  # graphs and plans have their size, whatever is in the arrays
    before = taken("VmRSS")
    with open("/proc/self/clear_refs", "w") as f:
        f.write("5")
    x.compute()
    assert s.last.spilled[-2] > 2**26, s.last
    print(taken("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
@pytest.mark.parametrize("side", [512, 1664])
def test_a_process_grows_by_its_limit_whatever_its_tasks_take(tmp_path, side):
    """A block of 1664 x 1664 is 10.6 MiB, and making one takes 42 MiB more.

    It was 159 MiB before there was room for that. One of 512 is 1 MiB: what malloc keeps goes back
    ahead of what is taken, and it was hardly within the limit before.
    """
    code = GROWN_BY_MATMUL.replace("SIDE", str(side))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)}
    env |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    env["XDG_CACHE_HOME"] = str(tmp_path)  # what LLVM takes when it first compiles it takes before
    out = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=env, capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    assert out.returncode == 0, out.stderr
    assert 64 < float(out.stdout) <= 1.05 * 128, out.stdout


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_a_process_grows_by_its_limit_and_a_few_blocks(tmp_path):
    """`malloc` gives back what it keeps for its threads, and a task has two blocks of its own at
    once.

    It was 193 MiB before the scheduler trimmed memory.
    """
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)}
    env["XDG_CACHE_HOME"] = str(tmp_path)
    out = subprocess.run(
        [sys.executable, "-c", GROWN], env=env, capture_output=True, text=True, timeout=110
    )
    assert out.returncode == 0, out.stderr
    assert 64 < int(out.stdout) <= 1.05 * 128 + 2 * 2 * 2, out.stdout
