"""QR, SVD, least squares and norms of dask arrays: NumPy's values on every scheduler."""

from __future__ import annotations

from functools import partial

import dask
import dask.array as da
import numpy as np
import pytest

import gpuscheduler
from gpuscheduler import linalg
from gpuscheduler.algorithms import tall_graph, tall_kernel
from gpuscheduler.algorithms.tall_kernel import unit_roundoff
from gpuscheduler.pipeline import compile
from tests.support.matrices import check_qr, tall_matrix

from .test_tall_kernel import adversaries

SCHEDULERS = ["sync", "threads", "cpu:1", "cpu:4"]


@pytest.fixture(autouse=True)
def large(monkeypatch):
    """Matrices of several blocks are not put into one."""
    monkeypatch.setattr(tall_graph, "SMALL", 0)


@pytest.fixture(params=SCHEDULERS)
def scheduler(request):
    if request.param.startswith("cpu"):
        with gpuscheduler.Scheduler(request.param):
            yield
    else:
        with dask.config.set(scheduler=request.param):
            yield


@pytest.fixture
def cpu():
    with gpuscheduler.Scheduler("cpu:2"):
        yield


def blocks(x, rows=300, columns=-1):
    return da.from_array(x, chunks=(rows, columns))


def check_svd(x, u, s, vh):
    n, unit = min(x.shape), unit_roundoff(x.dtype)
    assert (u.dtype, s.dtype, vh.dtype) == (x.dtype, x.real.dtype, x.dtype)
    assert (np.diff(s) <= 0).all()
    assert (s >= 0).all()
    most = 30 * n * n**0.5 * unit
    for q in (u, vh.conj().T):
        assert np.linalg.norm(q.conj().T @ q - np.eye(n), 2) <= most
    size = np.linalg.norm(x, 2)
    assert np.linalg.norm(x - (u * s) @ vh, 2) <= most * size
    want = np.linalg.svd(x.astype(np.result_type(x.dtype, "f8")), compute_uv=False)
    assert abs(s - want).max() <= most * size


@pytest.mark.parametrize("dtype", ["f4", "f8", "c8", "c16"])
@pytest.mark.parametrize("condition", [10, 1e10])
def test_qr_and_svd_keep_the_promise_on_every_scheduler(scheduler, condition, dtype):
    x = tall_matrix(1500, 40, condition, dtype)
    q, r, u, s, vh = dask.compute(*linalg.qr(blocks(x)), *linalg.svd(blocks(x)))
    check_qr(x, q, r, promise=1)
    check_svd(x, u, s, vh)


@pytest.mark.parametrize("name", adversaries())
@pytest.mark.filterwarnings("error")
def test_qr_keeps_the_promise_for_adversaries(cpu, name):
    x = adversaries()[name]
    q, r = dask.compute(*linalg.qr(blocks(x)))
    check_qr(x if x.dtype.kind == "f" else x.astype(float), q, r, promise=1)


@pytest.mark.parametrize(
    ("condition", "last"),
    [(10, "orthonormal"), (1e4, "first order"), (1e10, "first order"), (1e13, "near"),
     (1e17, "householder")],
)  # fmt: skip
def test_every_branch_is_taken_in_a_graph(cpu, condition, last):
    x = tall_matrix(3000, 60, condition)
    tall_kernel.branches.clear()
    check_qr(x, *dask.compute(*linalg.qr(blocks(x, 700))), promise=1)
    assert tall_kernel.branches[-1] == last


def test_no_fallback_task_works_where_it_is_not_needed(cpu):
    tall_kernel.branches.clear()
    dask.compute(*linalg.qr(blocks(tall_matrix(3000, 60, 1e10))))
    assert "householder" not in tall_kernel.branches


def test_breakdown_after_a_step_goes_on_from_its_q(cpu):
    """Householder QR has the Q of the last good step, and its R is multiplied with the factor."""
    x = tall_matrix(2000, 60, 1e17)
    found = tall_graph.factorize(blocks(x))
    tall_kernel.branches.clear()
    _, stack = dask.get(dict(found.q().dask), [found.factor.key, found.stack.key])
    assert "failed: factor" in tall_kernel.branches
    assert sorted(stack) == ["q", "r"]
    check_qr(x, *dask.compute(found.q(), found.r()), promise=1)


@pytest.mark.parametrize(
    ("shape", "chunks"),
    [
        ((1000, 40), (100, 7)),
        ((40, 1000), (7, 100)),
        ((40, 1000), (40, 30)),
        ((40, 1000), (40, (40, 960))),
        ((100, 100), (30, 30)),
        ((100, 90), (9, 90)),
        ((64, 40), ((1, 0, 60, 3), 40)),
        ((40, 1), (7, 1)),
        ((1, 40), (1, 7)),
        ((1, 1), (1, 1)),
        ((40, 0), (10, 0)),
        ((0, 40), (0, 40)),
    ],
)
def test_any_shape_and_chunks(cpu, shape, chunks):
    x = np.random.default_rng(0).standard_normal(shape)
    d, k = da.from_array(x, chunks=chunks), min(shape)
    q, r = linalg.qr(d)
    u, s, vh = linalg.svd(d)
    for lazy in (q, r, u, s, vh, linalg.pinv(d)):
        assert lazy.compute().shape == lazy.shape
        assert [sum(c) for c in lazy.chunks] == list(lazy.shape)
    assert (q.shape, r.shape) == ((shape[0], k), (k, shape[1]))
    np.testing.assert_allclose((q @ r).compute(), x, atol=1e-13)
    np.testing.assert_allclose((u * s @ vh).compute(), x, atol=1e-13)
    if k:
        np.testing.assert_allclose(linalg.pinv(d).compute(), np.linalg.pinv(x), atol=1e-11)


def test_one_small_matrix_is_one_task(monkeypatch):
    monkeypatch.undo()
    q, _ = linalg.qr(blocks(tall_matrix(1500, 40, 10)))
    assert sum("factor" in str(k) for k in q.dask) == 1
    assert not any("gram" in str(k) for k in q.dask)


@pytest.mark.parametrize("shape", [(900, 40), (40, 900), (60, 60)])
@pytest.mark.parametrize("rank", [40, 25, 0])
@pytest.mark.parametrize("dtype", ["f8", "c16"])
def test_lstsq_finds_what_numpy_finds(cpu, shape, rank, dtype):
    rng = np.random.default_rng(3)
    x = (rng.standard_normal((shape[0], rank)) @ rng.standard_normal((rank, shape[1]))).astype(
        dtype
    )
    b = rng.standard_normal((shape[0], 3)).astype(dtype)
    found = dask.compute(*linalg.lstsq(da.from_array(x, chunks=(100, 30)), blocks(b, 70, 2)))
    want = np.linalg.lstsq(x, b, rcond=None)
    assert found[2] == want[2]
    np.testing.assert_allclose(found[3], want[3], atol=1e-11)
    np.testing.assert_allclose(found[0], want[0], atol=1e-10)
    if shape[0] > shape[1]:
        miss = b - x @ found[0]
        np.testing.assert_allclose(found[1], (abs(miss) ** 2).sum(0), rtol=1e-12)


def test_lstsq_meets_lapacks_ratio(cpu):
    """‖aᴴ(b - a x)‖ / (max(m, n)‖a‖(‖a‖‖x‖ + ‖b‖)u) at most 30."""
    for condition in (1, 1e4, 1e8, 1e12):
        x = tall_matrix(2000, 40, condition)
        b = np.random.default_rng(4).standard_normal(2000)
        found, residuals, *_ = dask.compute(*linalg.lstsq(blocks(x), blocks(b[:, None])[:, 0]))
        miss = b - x @ found
        norm = partial(np.linalg.norm, ord=1)
        size = 2000 * norm(x) * (norm(x) * norm(found) + norm(b)) * 2.0**-53
        assert norm(x.T @ miss) / size <= 30
        assert residuals.shape == (1,)


def test_rcond_and_tolerances_cut_singular_values(cpu):
    x = tall_matrix(1000, 40, 1e8)
    d, b = blocks(x), blocks(np.ones((1000, 1)))
    assert int(linalg.lstsq(d, b, rcond=1e-4).rank) == np.linalg.lstsq(x, np.ones(1000), 1e-4)[2]
    for name, given in (("rcond", 1e-4), ("rtol", 1e-4)):
        got, want = linalg.pinv(d, **{name: given}), np.linalg.pinv(x, 1e-4)
        np.testing.assert_allclose(got.compute(), want, atol=1e-7)
    assert int(linalg.matrix_rank(d, tol=1e-4)) == np.linalg.matrix_rank(x, tol=1e-4)
    assert int(linalg.matrix_rank(d, rtol=1e-4)) == np.linalg.matrix_rank(x, rtol=1e-4)


@pytest.mark.parametrize("name", ["pinv", "matrix_rank", "cond", "svdvals"])
@pytest.mark.parametrize("shape", [(500, 12), (12, 500), (3, 20, 7), (2, 3, 5, 5)])
def test_functions_are_numpys(cpu, name, shape):
    x = np.random.default_rng(5).standard_normal(shape)
    d = da.from_array(x, chunks=tuple([max(1, n // 2) for n in shape]))
    got, want = getattr(linalg, name)(d), getattr(np.linalg, name)(x)
    assert got.shape == want.shape
    np.testing.assert_allclose(got.compute(), want, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("shape", [(2, 20, 7), (2, 3, 4, 9)])
def test_stacks_are_factored_each_by_itself(cpu, shape):
    x = np.random.default_rng(6).standard_normal(shape)
    d = da.from_array(x, chunks=1)
    q, r = linalg.qr(d)
    u, s, vh = linalg.svd(d)
    np.testing.assert_allclose(q @ r, x, atol=1e-13)
    np.testing.assert_allclose(u * s[..., None, :] @ vh, x, atol=1e-13)


@pytest.mark.parametrize("p", [None, 2, -2, 1, -1, np.inf, -np.inf, "fro"])
def test_cond_of_any_norm(cpu, p):
    x = np.random.default_rng(7).standard_normal((30, 30))
    got = linalg.cond(blocks(x, 10, 10), p).compute()
    np.testing.assert_allclose(got, np.linalg.cond(x, p), rtol=1e-10)


def test_cond_of_a_singular_matrix_is_infinite(cpu):
    assert float(linalg.cond(da.zeros((100, 40), chunks=25))) != 1
    assert float(linalg.cond(da.diag(da.array([1.0, 0.0])))) == np.inf


@pytest.mark.parametrize("ord", [None, "fro", "nuc", 1, -1, 2, -2, np.inf, -np.inf])
@pytest.mark.parametrize("keepdims", [False, True])
def test_norms_of_matrices_are_numpys(cpu, ord, keepdims):
    x = np.random.default_rng(8).standard_normal((120, 40))
    got = linalg.norm(blocks(x, 50, 20), ord, keepdims=keepdims)
    want = np.linalg.norm(x, ord, keepdims=keepdims)
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=1e-12)
    stack = np.random.default_rng(9).standard_normal((4, 6, 5))
    if ord is not None:
        got = linalg.matrix_norm(da.from_array(stack, chunks=2), ord=ord, keepdims=keepdims)
        want = np.linalg.matrix_norm(stack, ord=ord, keepdims=keepdims)
        assert got.shape == want.shape
        np.testing.assert_allclose(got, want, rtol=1e-12)


@pytest.mark.parametrize("ord", [0, 1, 2, 3.5, np.inf, -np.inf])
@pytest.mark.parametrize("axis", [None, 0, -1, (0, 2), (2, 1)])
@pytest.mark.parametrize("keepdims", [False, True])
def test_norms_of_vectors_are_numpys(cpu, ord, axis, keepdims):
    x = np.random.default_rng(10).standard_normal((4, 6, 5))
    got = linalg.vector_norm(da.from_array(x, chunks=2), ord=ord, axis=axis, keepdims=keepdims)
    want = np.linalg.vector_norm(x, ord=ord, axis=axis, keepdims=keepdims)
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=1e-12)


def test_unknown_numbers_of_rows_are_allowed(cpu):
    x = tall_matrix(2000, 40, 1e4)
    d = blocks(x)
    picked = d[d[:, 0] > 0]
    q, r = linalg.qr(picked)
    check_qr(x[x[:, 0] > 0], *dask.compute(q, r), promise=1)
    bad = x.copy()
    bad[:, 3] = 0
    picked = blocks(bad)[blocks(bad)[:, 0] > 0]
    check_qr(bad[bad[:, 0] > 0], *dask.compute(*linalg.qr(picked)), promise=1)
    few = d[d[:, 0] > x[:, 0].max() * 0.99]
    with pytest.raises(ValueError, match="compute_chunk_sizes"):
        dask.compute(*linalg.qr(few))


def test_what_cannot_be_done_is_refused():
    d = da.ones((40, 6), chunks=(10, 3))
    with pytest.raises(ValueError, match="compute_chunk_sizes"):
        linalg.qr(d[d[:, 0] > 0])
    with pytest.raises(ValueError, match="mode='complete'"):
        linalg.qr(d, "complete")
    with pytest.raises(ValueError, match="full_matrices"):
        linalg.svd(d, full_matrices=True)
    with pytest.raises(ValueError, match="1 axes"):
        linalg.qr(da.ones(4))
    with pytest.raises(TypeError, match="no number"):
        linalg.svdvals(da.from_array(np.array([["a"]])))
    with pytest.raises(ValueError, match="b has shape"):
        linalg.lstsq(d, da.ones(3))
    with pytest.raises(ValueError, match="not both"):
        linalg.pinv(d, 1e-3, rtol=1e-3)
    with pytest.raises(ValueError, match="not both"):
        linalg.matrix_rank(d, 1e-3, rtol=1e-3)
    with pytest.raises(np.linalg.LinAlgError, match="empty"):
        linalg.cond(da.ones((0, 0)))


@pytest.mark.filterwarnings("error")
def test_nan_is_an_error_of_the_singular_values(cpu):
    x = tall_matrix(1000, 40, 10)
    x[5, 5] = np.nan
    with pytest.raises(np.linalg.LinAlgError, match="NaN or infinity"):
        linalg.svdvals(blocks(x)).compute()
    q, r = dask.compute(*linalg.qr(blocks(x)))
    assert np.isnan(q).any()
    assert np.isnan(r).any()


def test_bits_do_not_depend_on_the_number_of_devices():
    x = blocks(tall_matrix(2000, 40, 1e8))
    found = []
    for devices in ("cpu:1", "cpu:2", "cpu:5"):
        with gpuscheduler.Scheduler(devices):
            found.append(dask.compute(*linalg.qr(x), linalg.svdvals(x)))
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            np.testing.assert_array_equal(a, b)


def test_a_second_matrix_alike_is_not_planned_again():
    with gpuscheduler.Scheduler("cpu:2") as scheduler:
        made = []
        plan = compile.plan_dask

        def planned(*args):
            made.append(args)
            return plan(*args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compile, "plan_dask", planned)
            for seed in range(3):
                x = tall_matrix(1000, 40, 10.0**seed, seed=seed)
                check_qr(x, *dask.compute(*linalg.qr(blocks(x))), promise=1)
        assert len(made) == 1
        assert scheduler


def test_numpys_functions_are_lazy_on_dask_arrays(cpu):
    x = tall_matrix(500, 12, 10)
    for name in ("svdvals", "pinv", "matrix_rank", "cond", "matrix_norm", "vector_norm"):
        got = getattr(np.linalg, name)(blocks(x))
        assert isinstance(got, da.Array)
        np.testing.assert_allclose(got.compute(), getattr(np.linalg, name)(x), rtol=1e-10)


def test_lengths_of_one_task_are_independent_of_the_others(cpu):
    """A block with fewer rows than columns is fine, also in the fallback."""
    x = tall_matrix(500, 60, 1e17)
    check_qr(x, *dask.compute(*linalg.qr(blocks(x, 37))), promise=1)
