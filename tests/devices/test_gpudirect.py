"""Files that GPUs read without the host; here a KvikIO that is not there reads them to the host."""

from __future__ import annotations

import os
import sys
import types

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuscheduler import Scheduler
from gpuscheduler.devices.cuda import gpudirect
from gpuscheduler.devices.cuda.gpudirect import DirectFiles, in_dataset, in_file, runs

h5py = pytest.importorskip("h5py")


class Future:
    def __init__(self, n):
        self.n = n

    def get(self):
        return self.n


class CuFile:
    """As KvikIO's: reads bytes from a place in a file into an array."""

    opened: list = []

    def __init__(self, path, flags):
        self.handle, self.closed = os.open(path, os.O_RDONLY), False
        CuFile.opened.append(self)

    def fileno(self):
        return self.handle

    def pread(self, out, size, file_offset):
        got = np.frombuffer(os.pread(self.fileno(), size, file_offset), "u1")
        out[: len(got)] = got
        return Future(len(got))

    def close(self):
        os.close(self.handle)
        self.closed = True


@pytest.fixture
def kvikio(monkeypatch):
    module, defaults = types.ModuleType("kvikio"), types.ModuleType("kvikio.defaults")
    module.CuFile = CuFile
    defaults.is_compat_mode_preferred = lambda: False
    monkeypatch.setitem(sys.modules, "kvikio", module)
    monkeypatch.setitem(sys.modules, "kvikio.defaults", defaults)
    monkeypatch.setattr(gpudirect, "LEAST", 1)
    monkeypatch.setattr(CuFile, "opened", [])
    yield module
    for file in CuFile.opened:
        if not file.closed:
            file.close()


def mapped(path, shape=(40, 30), mode="r", offset=0):
    a = np.random.default_rng(0).random(shape)
    np.concatenate([np.zeros(offset, "u1"), a.reshape(-1).view("u1")]).tofile(path)
    return a, np.memmap(path, "f8", mode, offset, shape)


def test_blocks_are_read_from_where_they_lie_in_the_file(kvikio, tmp_path):
    a, m = mapped(tmp_path / "x", offset=24)
    files = DirectFiles()
    for block in (np.s_[:], np.s_[3:7], np.s_[5:9, 10:20], np.s_[2], np.s_[:, 29:]):
        for view in (m[block], np.asarray(m)[block]):
            out = np.full(view.shape, np.nan)
            assert files.read(in_file(view), out)
            np.testing.assert_array_equal(out, a[block])
    (file,) = CuFile.opened  # once for all
    files.close()
    assert file.closed


def test_few_files_are_kept_open(kvikio, tmp_path, monkeypatch):
    monkeypatch.setattr(gpudirect, "MOST_FILES", 2)
    files = DirectFiles()
    for n in (0, 1, 2, 3, 0):
        a, m = mapped(tmp_path / str(n), shape=(4, 4))
        out = np.zeros((4, 4))
        assert files.read(in_file(m), out)
        np.testing.assert_array_equal(out, a)
    assert len(files._files) == 2


def test_npy_files_have_a_header(kvikio, tmp_path):
    np.save(tmp_path / "x.npy", np.arange(12.0).reshape(3, 4))
    m = np.load(tmp_path / "x.npy", mmap_mode="r")
    out = np.zeros((2, 4))
    assert DirectFiles().read(in_file(m[1:]), out)
    np.testing.assert_array_equal(out, np.arange(4.0, 12).reshape(2, 4))


def test_what_is_in_no_file_or_may_differ_from_it_is_not(kvikio, tmp_path):
    a, m = mapped(tmp_path / "x")
    out = np.zeros((40, 30))
    files = DirectFiles()
    assert not files.read(in_file(a), out)
    assert not files.read(in_file(m + 0), out)  # a memory map by its type only
    for mode in ("r+", "c"):  # memory may have what the file has not
        assert not files.read(in_file(mapped(tmp_path / mode, mode=mode)[1]), out)
    assert not files.read(in_file(m[::2, ::2]), out[:20, :15].copy())
    assert not files.read(in_file(m.T), np.zeros((30, 40)))
    assert not CuFile.opened


def test_a_file_that_was_replaced_is_not_read(kvikio, tmp_path):
    a, m = mapped(tmp_path / "x")
    os.rename(tmp_path / "x", tmp_path / "y")
    mapped(tmp_path / "x", shape=(50, 30))
    out = np.zeros(m.shape)
    assert not DirectFiles().read(in_file(m), out)
    np.testing.assert_array_equal(m, a)


def test_a_file_that_was_removed_is_read_from_its_map(kvikio, tmp_path):
    _, m = mapped(tmp_path / "x")
    found = in_file(m)
    os.unlink(tmp_path / "x")
    files = DirectFiles()
    assert not files.read(found, np.zeros(m.shape))
    assert files


def test_an_error_of_kvikios_is_told_and_not_met_again(kvikio, tmp_path, monkeypatch):
    _, m = mapped(tmp_path / "x")
    files = DirectFiles()

    def refuse(*_):
        raise OSError("no such device")

    with monkeypatch.context() as change:
        change.setattr(CuFile, "pread", refuse)
        with pytest.warns(RuntimeWarning, match=r"x is read through the host.*no such device"):
            assert not files.read(in_file(m), np.zeros(m.shape))
        assert not files.read(in_file(m), np.zeros(m.shape))
    a, other = mapped(tmp_path / "y")
    out = np.zeros(a.shape)
    assert files.read(in_file(other), out)  # it may be that one file
    np.testing.assert_array_equal(out, a)


def test_a_file_that_has_become_shorter_is_told(kvikio, tmp_path):
    _, m = mapped(tmp_path / "x")
    os.truncate(tmp_path / "x", 100)
    with pytest.warns(RuntimeWarning, match="shorter"):
        assert not DirectFiles().read(in_file(m), np.zeros(m.shape))


def test_small_pieces_are_left_to_the_host(kvikio, tmp_path, monkeypatch):
    monkeypatch.setattr(gpudirect, "LEAST", 100)
    _, m = mapped(tmp_path / "x")
    files = DirectFiles()
    assert files.read(in_file(m[:, :13]), np.zeros((40, 13)))
    assert not files.read(in_file(m[:, :12]), np.zeros((40, 12)))


def test_without_direct_storage_it_is_not_used_unless_asked_for(kvikio, monkeypatch):
    sys.modules["kvikio.defaults"].is_compat_mode_preferred = lambda: True
    assert not DirectFiles()
    assert DirectFiles(True)
    assert not DirectFiles(False)


def test_without_kvikio(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "kvikio", None)
    files = DirectFiles()
    assert not files
    assert not files.read(in_file(mapped(tmp_path / "x")[1]), np.zeros((40, 30)))
    with pytest.raises(ImportError, match="pip install kvikio"):
        DirectFiles(True)


def test_other_words_are_refused():
    with pytest.raises(ValueError, match="direct_storage='yes': use 'auto', True or False"):
        Scheduler("cpu:1", direct_storage="yes")


def test_what_is_no_memory_map_has_no_file(tmp_path):
    assert in_file(np.zeros(3)) is None
    _, m = mapped(tmp_path / "x", offset=8)
    path, inode, start, *_ = in_file(m[2:])
    assert (path, inode, start) == (str(tmp_path / "x"), os.stat(path).st_ino, 8 + 2 * 240)


def dataset(path, mode="r", **options):
    a = np.random.default_rng(0).integers(0, 99, (40, 30)).astype(options.pop("dtype", "f8"))
    with h5py.File(path, "w") as f:
        f.create_dataset("x", data=a, **options)
    return a, h5py.File(path, mode)


@pytest.mark.parametrize("dtype", ["f8", "i2", "c8"])
def test_datasets_without_chunks_lie_in_their_file_as_in_memory(kvikio, tmp_path, dtype):
    a, f = dataset(tmp_path / "x.h5", dtype=dtype)
    files = DirectFiles()
    with f:
        for index in (np.s_[:, :], np.s_[3:7, :], np.s_[5:9, 10:20], np.s_[2, 3:], np.s_[4, 5]):
            found = in_dataset(f["x"], index)
            out = np.zeros(a[index].shape, dtype)
            assert files.read(found, out)
            np.testing.assert_array_equal(out, a[index])
            np.testing.assert_array_equal(found.source[found.index], a[index])
        assert not files.read(in_dataset(f["x"], np.s_[::2, ::-1]), out)
        assert in_dataset(f["x"], (None, slice(3))) is None
        assert in_dataset(f["x"], ([1, 2], slice(3))) is None
        assert in_dataset(f["x"], 3) is None
    files.close()


@pytest.mark.parametrize(
    "options", [{"chunks": (4, 4)}, {"compression": "gzip"}, {"dtype": ">f8"}, {"mode": "r+"}]
)
def test_other_datasets_are_read_by_h5py(tmp_path, options):
    with dataset(tmp_path / "x.h5", **options)[1] as f:
        assert in_dataset(f["x"], np.s_[:, :]) is None
    assert in_dataset(np.zeros(3), np.s_[:]) is None


@given(st.data())
def test_runs_are_the_array_in_its_order(data):
    shape = tuple(data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=4)))
    a = np.arange(np.prod(shape, dtype=int), dtype="i4").reshape(shape)
    index = tuple(
        slice(*sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n))))) for n in shape
    )
    part = a[index]
    got = b"".join(
        (a.reshape(-1)[(part.ctypes.data - a.ctypes.data + at) // 4 :][: n // 4]).tobytes()
        for at, n in runs(part)
        if part.size
    )
    assert got == (part.tobytes() if part.size else b"")
