"""Blocks that go from their file to a GPU: by KvikIO where it is installed, else by something that
does what KvikIO does."""

import importlib.util
import os
import sys
import types

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")
h5py = pytest.importorskip("h5py")

import dask.array as da

import gpuscheduler
from gpuscheduler.devices.cuda import gpudirect
from gpuscheduler.frontend import transfers

pytestmark = pytest.mark.gpu

SHAPE = 512, 640


class Reader:
    """Reads on streams of its own, as KvikIO does."""

    def __init__(self, path, flags):
        self.handle = os.open(path, os.O_RDONLY)

    def fileno(self):
        return self.handle

    def pread(self, out, size, offset):
        got = np.frombuffer(os.pread(self.handle, size, offset), "u1")
        stream, runtime = cupy.cuda.Stream(non_blocking=True), cupy.cuda.runtime
        kind = runtime.memcpyHostToDevice
        runtime.memcpyAsync(out.data.ptr, got.ctypes.data, len(got), kind, stream.ptr)
        stream.synchronize()
        return types.SimpleNamespace(get=lambda: len(got))

    def close(self):
        os.close(self.handle)


@pytest.fixture(params=["KvikIO", "alike"])
def reads(request, monkeypatch):
    """Whether each block went straight to a GPU."""
    count = []
    if request.param == "KvikIO":
        if hasattr(cupy, "_device") or importlib.util.find_spec("kvikio") is None:
            pytest.skip("KvikIO is not installed")
    else:
        module = types.ModuleType("kvikio")
        module.CuFile = Reader
        monkeypatch.setitem(sys.modules, "kvikio", module)
    monkeypatch.setattr(gpudirect, "LEAST", 1)
    monkeypatch.setattr(transfers, "LEAST_SENT", 1)
    read = gpudirect.DirectFiles.read

    def counted(self, found, out):
        done = read(self, found, out)
        count.append(done)
        return done

    monkeypatch.setattr(gpudirect.DirectFiles, "read", counted)
    return count


class Wrapped:
    """A memory map without the method `copy`, which Dask would call."""

    def __init__(self, m):
        self.m, self.shape, self.ndim, self.dtype = m, m.shape, m.ndim, m.dtype

    def __getitem__(self, index):
        return self.m[index]


def array_in(tmp_path, kind, a, chunks):
    """`a` in a file, as an array of Dask's that goes to GPUs; and what has to be closed."""
    if kind == "h5py":
        with h5py.File(tmp_path / "x.h5", "w") as f:
            f["x"] = a
        file = h5py.File(tmp_path / "x.h5", "r")
        return da.from_array(file["x"], chunks=chunks).map_blocks(cupy.asarray), file
    np.save(tmp_path / "x.npy", a)
    m = np.load(tmp_path / "x.npy", mmap_mode="r")
    if kind == "wrapped":
        return da.from_array(Wrapped(m), chunks=chunks).map_blocks(cupy.asarray), m
    grid = da.core.normalize_chunks(chunks, a.shape)
    slices = da.core.slices_from_chunks(grid)
    keys = da.core.product(["mapped"], *(range(len(c)) for c in grid))
    x = da.Array({k: m[s] for k, s in zip(keys, slices, strict=True)}, "mapped", grid, meta=a)
    return x.map_blocks(cupy.asarray), m


@pytest.mark.parametrize("kind", ["h5py", "memmap", "wrapped"])
@pytest.mark.parametrize("chunks", [(64, 640), (128, 160)])
@pytest.mark.parametrize("devices", ["cuda:0", "cuda:0,0"])
def test_blocks_of_a_file(reads, tmp_path, kind, chunks, devices):
    a = np.random.default_rng(0).random(SHAPE)
    x, file = array_in(tmp_path, kind, a, chunks)
    with gpuscheduler.Scheduler(devices=devices, direct_storage=True, check=True):
        for _ in range(2):
            got = (x * 2 + 1).sum(axis=0).compute()
            np.testing.assert_allclose(got.get(), (a * 2 + 1).sum(axis=0))
    assert len(reads) == 2 * x.npartitions
    assert all(reads)
    if kind == "h5py":
        file.close()


@pytest.mark.parametrize("kind", ["h5py", "memmap", "wrapped"])
def test_memory_that_was_in_use_is_not_written_too_soon(reads, tmp_path, kind):
    """Blocks that come again and again into the same memory, which kernels still read."""
    a = np.arange(2**20, dtype="f8").reshape(64, -1)
    x, file = array_in(tmp_path, kind, a, (4, -1))
    limit = 3 * a.nbytes // 16
    with gpuscheduler.Scheduler(devices="cuda:0", memory_limit=limit, direct_storage=True):
        for _ in range(3):
            assert float((x + 1).sum().compute()) == a.sum() + a.size
    assert all(reads)
    if kind == "h5py":
        file.close()


def test_what_kvikio_cannot_read_comes_the_other_way(reads, tmp_path, monkeypatch):
    a = np.random.default_rng(0).random(SHAPE)
    x, file = array_in(tmp_path, "h5py", a, 160)

    def refuse(*_):
        raise OSError("no such device")

    monkeypatch.setattr(gpudirect.DirectFiles, "_file", refuse)
    with (
        gpuscheduler.Scheduler(devices="cuda:0", direct_storage=True),
        pytest.warns(RuntimeWarning, match="read through the host's memory"),
    ):
        got = x.sum(axis=0).compute()
    np.testing.assert_allclose(got.get(), a.sum(axis=0))
    file.close()


def test_never_is_never(reads, tmp_path):
    x, file = array_in(tmp_path, "h5py", np.ones(SHAPE), 160)
    with gpuscheduler.Scheduler(devices="cuda:0", direct_storage=False):
        assert float(x.sum().compute()) == x.size
    assert not reads
    file.close()
