"""Dask arrays of CuPy's sparse blocks: NumPy's values, and CuPy's matrices as results."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")
cupy_sparse = pytest.importorskip("cupyx.scipy.sparse")

import dask
import dask.array as da
import scipy.sparse

import gpuscheduler
from gpuscheduler import sparse
from gpuscheduler.sparse_parts import library_of
from tests.support.sparse_cases import OPERATIONS, M, as_dense, matrix

from .test_executor import DEVICES, used_bytes

pytestmark = pytest.mark.gpu


def on_gpu(x, chunks):
    return da.from_array(x, chunks=chunks).to_backend("cupy")


def sparse_on_gpu(m, chunks, kind="csr_array"):
    return sparse.asarray(getattr(cupy_sparse, kind)(getattr(scipy.sparse, kind)(m)), chunks=chunks)


@pytest.mark.parametrize("devices", ["cuda:0", DEVICES[-1]])
@pytest.mark.parametrize("name", OPERATIONS)
def test_values_are_numpys(name, devices):
    m, f = matrix(), OPERATIONS[name]
    want = np.asarray(f(m.toarray(), lambda x, chunks: x))
    tolerance = 1e-6 if name == "astype" else 1e-12
    for chunks in ((9, 8), (40, 30)):
        with gpuscheduler.Scheduler(devices, check=True):
            s = sparse_on_gpu(m, chunks)
            result = f(s, on_gpu)
            value = result.compute()
            assert result.dtype == value.dtype == want.dtype
            dense = isinstance(value, cupy.ndarray)
            assert dense or library_of(type(value)) == "cupyx.scipy.sparse"
            np.testing.assert_allclose(as_dense(value), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", ["csr_matrix", "csc_array", "coo_matrix", "coo_array"])
def test_results_are_cupys_own_matrices(kind):
    with gpuscheduler.Scheduler("cuda:0", check=True):
        s = sparse_on_gpu(matrix(), (9, 8), kind)
        value = s.compute()
        assert type(value).__name__ == f"csr_{kind.split('_')[1]}"
        raw = sparse.unwrap(s).compute()
        assert library_of(type(raw)) == "cupyx.scipy.sparse"  # joined by Dask: maybe as COO
        np.testing.assert_array_equal(as_dense(raw), matrix().toarray())
        home = s.to_backend("numpy").compute()
        assert library_of(type(home)) == "scipy.sparse"
        there = sparse.asarray(matrix(), chunks=(9, 8)).to_backend("cupy").compute()
        assert library_of(type(there)) == "cupyx.scipy.sparse"
        np.testing.assert_array_equal(as_dense(there), matrix().toarray())


def test_dense_blocks_of_a_gpu_become_sparse_there():
    with gpuscheduler.Scheduler("cuda:0", check=True):
        s = sparse.asarray(on_gpu(matrix().toarray(), (9, 8)))
        assert library_of(type(s._meta.matrix)) == "cupyx.scipy.sparse"
        value = (s @ s.T).compute()
        assert type(value) is cupy_sparse.csr_array
        np.testing.assert_allclose(as_dense(value), (matrix() @ matrix().T).toarray())


def test_what_cupy_has_no_matrix_of_is_refused_with_the_remedy():
    s = sparse.asarray(matrix().astype("i4"), chunks=(9, 8))
    with gpuscheduler.Scheduler("cuda:0", check=True):
        with pytest.raises(ValueError, match=r"no sparse matrices of int32.*use astype"):
            s.to_backend("cupy")
        refused = np.exp(sparse_on_gpu(matrix(), (9, 8)))
        with pytest.raises(TypeError, match="would store every zero"):
            refused.compute()


@pytest.mark.parametrize("devices", DEVICES)
def test_sparse_arrays_larger_than_the_memory(devices, tmp_path):
    m = scipy.sparse.random_array((3200, 300), density=0.3, format="csr", rng=0)
    before = used_bytes()
    block = sum(a.nbytes for a in (m.data, m.indices)) // 32
    with gpuscheduler.Scheduler(
        devices, memory_limit=12 * block, spill_directory=str(tmp_path), check=True
    ) as scheduler:
        a = sparse.asarray(m, chunks=(100, 300)).to_backend("cupy")
        b = (a * 2).persist()
        v = on_gpu(np.arange(300.0), -1)
        result = (b @ v).to_backend("numpy").compute()
        np.testing.assert_allclose(result, 2 * (m @ np.arange(300.0)))
        if devices == "cuda:0":
            assert sum(n for n in scheduler.last.peak.values()) > 0
        total = b.sum().compute()
        np.testing.assert_allclose(float(total), 2 * m.sum())
        del a, b, v, result, total
    assert used_bytes() == before


@pytest.mark.parametrize("devices", ["cuda:0", DEVICES[-1]])
def test_rounds_of_a_power_iteration(devices):
    m = matrix()
    square = m @ m.T
    with gpuscheduler.Scheduler(devices, check=True):
        a = sparse_on_gpu(square, (9, -1)).persist()
        v = on_gpu(np.ones(M), 9).persist()
        for _ in range(5):
            w = a @ v
            v = (w / da.linalg.norm(w)).persist()
        x = np.ones(M)
        for _ in range(5):
            x = square @ x
            x /= np.linalg.norm(x)
        np.testing.assert_allclose(as_dense(v.compute()), x)


def example():
    path = Path(__file__).parents[2] / "examples" / "conjugate_gradients.py"
    spec = importlib.util.spec_from_file_location("conjugate_gradients", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("devices", "blocks"), [("cuda:0", 1), ("cuda:0,0", 2), ("cuda:0,0", 5)])
def test_conjugate_gradients_move_edges_only(devices, blocks):
    """Twelve rounds of one graph: each moves a line of the grid for each edge between devices."""
    cg, n, rounds = example(), 32, 12
    ones = np.ones(n * n)
    whole = cg.Poisson(n, 1).parts[0].compute(scheduler="sync").matrix
    r = p = ones
    x = ones * 0
    for _ in range(rounds):
        q = whole @ p
        alpha = (r @ r) / (p @ q)
        x, before = x + alpha * p, r @ r
        r = r - alpha * q
        p = r + (r @ r) / before * p
    with gpuscheduler.Scheduler(devices, check=True, fuse_least=0) as s:
        a = cg.Poisson(n, blocks, cupy_sparse)
        a.persist()
        b = da.ones(n * n, chunks=a.chunks).persist()
        lazy = cg.conjugate_gradients(a, b, rounds)
        for _ in range(2):
            solution, left = dask.compute(*lazy)
            np.testing.assert_allclose(solution.get(), x, rtol=1e-9)
            np.testing.assert_allclose(float(left), np.linalg.norm(r), rtol=1e-9)
        moved = {pair: nbytes for pair, nbytes in s.last.traffic.items() if min(pair) >= 0}
        line, numbers = 8 * n, 4 * 8 * blocks
        assert sum(moved.values()) <= 2 * rounds * (line + numbers) + 8 * n * n
        float(cg.largest_eigenvalue(a, b, 5).compute())


@pytest.mark.parametrize(("devices", "blocks"), [("cuda:0", 1), ("cuda:0,0", 3)])
def test_rounds_by_an_iteration(devices, blocks):
    """Three calls of four rounds give what twelve rounds of one graph give."""
    cg, n = example(), 24
    with gpuscheduler.Scheduler(devices, check=True, fuse_least=0):
        a = cg.Poisson(n, blocks, cupy_sparse)
        a.persist()
        b = da.ones(n * n, chunks=a.chunks).persist()
        run = gpuscheduler.Iteration(cg.step_of(a), *cg.first_state(b), rounds=4)
        state = cg.first_state(b)
        for _ in range(3):
            state = run(*state)
        _, left = cg.conjugate_gradients(a, b, 12)
        again = float(da.sqrt(state[3]).compute())
        np.testing.assert_allclose(again, float(left.compute()), rtol=1e-8)
        x = state[0].compute()
        assert isinstance(x, cupy.ndarray)
        whole = cg.Poisson(n, 1).parts[0].compute(scheduler="sync").matrix
        residual = np.linalg.norm(np.ones(n * n) - whole @ x.get())
        np.testing.assert_allclose(residual, float(left.compute()), rtol=1e-6)
