"""Sparse blocks in the memory of GPUs: counted, copied to peers, spilled, brought back."""

import gc
import pickle

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")
scipy_sparse = pytest.importorskip("scipy.sparse")
cupy_sparse = pytest.importorskip("cupyx.scipy.sparse")

import dask
import dask.array as da
from dask.utils import typename

import gpuscheduler
from gpuscheduler.cluster.transport import Bundle, put_back
from gpuscheduler.devices.cuda import hardware as cuda_hardware
from gpuscheduler.devices.cuda.arrays import array_bytes, device_bytes, is_on_host, make_contiguous
from gpuscheduler.devices.cuda.copies import copy_to_device
from gpuscheduler.plan.machine import DISK, HOST
from gpuscheduler.sparse_parts import arrays_of, is_sparse_type, library_of
from gpuscheduler.values import deep_leaves, map_deep_leaves, sizeof

from .test_executor import DEVICES, used_bytes

pytestmark = pytest.mark.gpu

FORMS = [f"{form}_{kind}" for form in ("csr", "csc", "coo", "dia") for kind in ("array", "matrix")]
SIDE, COLUMNS = 400, 300


def host_matrix(n=SIDE, seed=0):
    return scipy_sparse.random_array((n, COLUMNS), density=0.4, format="csr", rng=seed)


def on_gpu(name, m=None):
    form = name[:3]
    if form == "dia":
        m = scipy_sparse.dia_array((np.arange(600.0).reshape(2, 300), [0, -3]), shape=(300, 300))
    m = host_matrix() if m is None else m
    return getattr(cupy_sparse, name)(getattr(scipy_sparse, name)(m.asformat(form)))


def bytes_of(m):
    return sum(a.nbytes for a in arrays_of(m))


def make_block(block, name="csr_matrix"):
    """A block of CuPy's as a sparse matrix there."""
    return getattr(cupy_sparse, name)(block)


def sparse_array(x, chunks, name="csr_matrix"):
    meta = make_block(cupy.zeros((0, 0)), "csr_matrix")
    dense = da.from_array(x, chunks=chunks).to_backend("cupy")
    return dense.map_blocks(make_block, name=None, dtype="f8", meta=meta)


def times_vector(block, v):
    return block.dot(v)[:, None]


@pytest.mark.parametrize("name", FORMS)
def test_bytes_are_those_of_the_arrays(name):
    m = on_gpu(name)
    assert library_of(type(m)) == "cupyx.scipy.sparse"
    assert device_bytes(m) == array_bytes(m) == sizeof(m) == bytes_of(m) > 0
    assert device_bytes((m, 1)) == bytes_of(m)
    assert not is_on_host(m)
    assert is_on_host(host_matrix())
    assert is_sparse_type(typename(type(m)))
    assert bytes_of(make_contiguous(m)) == bytes_of(m)


@pytest.mark.parametrize("name", FORMS)
def test_a_matrix_goes_to_the_host_and_back(name):
    m = on_gpu(name)
    home = map_deep_leaves(cupy.asnumpy, m)
    assert type(home) is getattr(scipy_sparse, name)
    np.testing.assert_array_equal(home.toarray(), m.toarray().get())
    back = map_deep_leaves(cupy.asarray, home)
    assert type(back) is type(m)
    v = cupy.asarray(np.arange(COLUMNS, dtype="f8"))
    np.testing.assert_allclose((back @ v).get(), home @ np.arange(COLUMNS))
    if name[:3] != "dia":
        np.testing.assert_allclose((back + back).toarray().get(), 2 * home.toarray())


def test_flags_and_wide_indices_travel_along():
    m = on_gpu("csr_array", host_matrix())
    m.indices, m.indptr = m.indices.astype("i8"), m.indptr.astype("i8")
    m.has_canonical_format = True
    home = map_deep_leaves(cupy.asnumpy, m)
    assert home.indices.dtype == home.indptr.dtype == np.int64
    assert vars(home)["_has_canonical_format"] is True
    back = map_deep_leaves(cupy.asarray, home)
    assert back.indices.dtype == np.int64
    assert vars(back)["_has_canonical_format"] is True


@pytest.mark.parametrize("dtype", ["i4", "i8", "u1"])
def test_what_cupy_has_no_matrix_of_stays_on_the_host(dtype):
    m = host_matrix().astype(dtype)
    assert map_deep_leaves(cupy.asarray, m) is m
    bsr = scipy_sparse.bsr_array(np.eye(4))
    assert map_deep_leaves(cupy.asarray, bsr) is bsr
    cube = scipy_sparse.coo_array(np.ones((2, 3, 4)))
    assert map_deep_leaves(cupy.asarray, cube) is cube


@pytest.mark.parametrize("name", FORMS)
def test_a_parcel_becomes_a_matrix_of_whoever_opens_it(name):
    m = on_gpu(name)
    there = pickle.loads(pickle.dumps(Bundle({"a": (m, 3)})))
    home, three = put_back(there.values["a"], lambda a: a)
    assert three == 3
    assert type(home) is getattr(scipy_sparse, name)
    np.testing.assert_array_equal(home.toarray(), m.toarray().get())
    other, _ = put_back(there.values["a"], cupy.asarray)
    assert type(other) is type(m)
    np.testing.assert_array_equal(other.toarray().get(), home.toarray())


@pytest.mark.gpus(2)
@pytest.mark.parametrize("name", FORMS)
def test_a_copy_on_another_gpu(name):
    with cupy.cuda.Device(0):
        m = on_gpu(name)
    with cupy.cuda.Device(1):
        here = map_deep_leaves(lambda v: copy_to_device(v, 1, cupy.cuda.get_current_stream()), m)
        assert {a.device.id for a in deep_leaves(here)} == {1}
        np.testing.assert_array_equal(here.toarray().get(), m.get().toarray())


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("name", ["csr_matrix", "csc_array", "coo_matrix"])
@pytest.mark.parametrize("host_blocks", [0, 2, 100])
def test_sparse_blocks_that_do_not_fit_are_spilled(name, devices, host_blocks, tmp_path):
    """Sixteen blocks, all needed twice, where four fit."""
    x = host_matrix(16 * 64).toarray()
    biggest = max(bytes_of(on_gpu(name, scipy_sparse.csr_array(b))) for b in np.split(x, 16))
    dense = x.nbytes // 16
    before = used_bytes()
    with gpuscheduler.Scheduler(
        devices=devices,
        memory_limit=2 * dense + 4 * biggest,
        host_memory=4 * host_blocks * biggest // 3,
        spill_directory=str(tmp_path),
        check=True,
    ) as s:
        a = sparse_array(x, (64, COLUMNS), name)
        v = np.arange(COLUMNS, dtype="f8")
        w = da.from_array(v, chunks=-1).to_backend("cupy")
        first = da.map_blocks(times_vector, a, w[None, :].rechunk(-1)[0], chunks=((64,) * 16, (1,)),
                              dtype="f8", meta=cupy.zeros((0, 0)))  # fmt: skip
        total = first.sum()
        again = (first * total).to_backend("numpy").compute()
        np.testing.assert_allclose(again[:, 0], (x @ v) * (x @ v).sum(), rtol=1e-9)
        peak = {p: n for p, n in s.last.peak.items() if p >= 0}
        assert all(n <= 2 * dense + 4 * biggest for n in peak.values())
    del a, first, total, w
    gc.collect()
    assert used_bytes() == before
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("host_blocks", [0, 100])
def test_persisted_sparse_blocks_are_counted_and_leave(devices, host_blocks, tmp_path):
    x = host_matrix(16 * 64).toarray()
    sizes = [bytes_of(on_gpu("csr_matrix", scipy_sparse.csr_array(b))) for b in np.split(x, 16)]
    limit = 3 * x.nbytes // 16 + 2 * max(sizes)
    with gpuscheduler.Scheduler(
        devices=devices,
        memory_limit=limit,
        host_memory=2 * host_blocks * max(sizes),
        spill_directory=str(tmp_path),
        check=True,
    ) as s:
        (a,) = dask.persist(sparse_array(x, (64, COLUMNS)))
        everything = s.last.peak
        assert all(n <= limit for p, n in everything.items() if p >= 0)
        if devices == "cuda:0":
            assert s.last.spilled[HOST if host_blocks else DISK] > sum(sizes) // 3
        doubled = da.map_blocks(lambda b: (b + b).toarray(), a, dtype="f8", meta=cupy.zeros((0, 0)))
        np.testing.assert_array_equal(doubled.to_backend("numpy").compute(), 2 * x)
        result = a.compute()
        assert type(result) is cupy_sparse.csr_matrix
        np.testing.assert_array_equal(result.get().toarray(), x)
        del a, doubled, result


@pytest.mark.gpus(2)
def test_blocks_of_several_gpus_become_one_matrix():
    x = host_matrix().toarray()
    with gpuscheduler.Scheduler("cuda:0,1", check=True):
        result = sparse_array(x, (100, COLUMNS)).compute()
        assert type(result) is cupy_sparse.csr_matrix
        np.testing.assert_array_equal(result.get().toarray(), x)


def only_scipy(block):
    """A function that knows SciPy's matrices only."""
    if not scipy_sparse.issparse(block):
        raise TypeError("Unsupported type: cupyx")
    return block.multiply(3).tocsr()


@pytest.mark.parametrize("devices", DEVICES)
def test_what_only_scipy_can_do_runs_on_the_host_and_comes_back(devices):
    x = host_matrix().toarray()
    with gpuscheduler.Scheduler(devices, check=True):
        a = sparse_array(x, (100, COLUMNS)).persist()
        with pytest.warns(RuntimeWarning, match="runs on the host"):
            result = a.map_blocks(only_scipy, dtype="f8", meta=a._meta).compute()
        assert type(result) is cupy_sparse.csr_matrix
        np.testing.assert_array_equal(result.get().toarray(), 3 * x)


@pytest.mark.filterwarnings("ignore:.*runs on the host")  # SciPy decides whether it is asked
def test_a_captured_matrix_of_the_host_meets_blocks_of_a_gpu():
    x = host_matrix().toarray()
    m = scipy_sparse.csr_matrix(x)
    with gpuscheduler.Scheduler("cuda:0", check=True):
        v = da.from_array(np.arange(COLUMNS, dtype="f8"), chunks=-1).to_backend("cupy")
        out = v.map_blocks(lambda b, matrix: matrix @ b, m, chunks=(SIDE,), meta=v._meta)
        result = out.compute()
        np.testing.assert_allclose(cupy.asnumpy(result), x @ np.arange(COLUMNS))


def test_the_home_of_a_matrix_is_the_device_of_its_arrays():
    with gpuscheduler.Scheduler("cuda:0") as s:
        assert isinstance(s.hardware, cuda_hardware.CudaHardware)
        assert s.hardware.home(on_gpu("csr_array", host_matrix())) == 0
        assert s.hardware.home(host_matrix()) is None
