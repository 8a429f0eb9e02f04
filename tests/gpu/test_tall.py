"""QR, SVD and least squares of tall matrices on GPUs: the promise, the branches, Dask's own."""

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")

import dask
import dask.array as da

import gpuscheduler
from gpuscheduler import linalg
from gpuscheduler.algorithms import tall_graph, tall_kernel
from gpuscheduler.algorithms.tall_kernel import tall_qr, unit_roundoff
from tests.support.matrices import check_qr, tall_matrix

pytestmark = pytest.mark.gpu
DEVICES = ["cuda:0", "cuda:0,0"]


@pytest.fixture(autouse=True)
def large(monkeypatch):
    """Matrices of several blocks are not put into one."""
    monkeypatch.setattr(tall_graph, "SMALL", 0)


@pytest.fixture(params=DEVICES)
def scheduler(request):
    with gpuscheduler.Scheduler(request.param) as entered:
        yield entered


def host(x):
    return x.get() if isinstance(x, cupy.ndarray) else x


def on_gpu(x, rows=700):
    return da.from_array(x, chunks=(rows, -1)).to_backend("cupy").persist()


def check(x, q, r, signs=True):
    check_qr(x, host(q), host(r), signs=signs)


def adversaries():
    x = tall_matrix(1400, 40, 10)
    equal, zero, huge = x.copy(), x.copy(), x.copy()
    equal[:, 5] = equal[:, 7]
    zero[:, 5] = 0
    huge[3] *= 1e12
    return {
        "equal columns": equal,
        "a zero column": zero,
        "all zero": x * 0,
        "one huge row": huge,
        "large": x * 1e200,
        "small": x * 1e-200,
        "columns graded": x * np.logspace(150, -150, 40),
        "columns graded within squares": x * np.logspace(60, -60, 40),
        "rows graded": x * np.logspace(150, -150, 1400)[:, None],
        "Vandermonde": np.vander(np.linspace(0, 1, 1400), 40),
        "single, large": (x * 1e37).astype("f4"),
        "single, equal": equal.astype("f4"),
    }


@pytest.mark.parametrize("dtype", ["f4", "f8", "c8", "c16"])
@pytest.mark.parametrize("condition", [10, 1e4, 1e10, 1e17])
def test_a_block_keeps_the_promise(condition, dtype):
    x = tall_matrix(2000, 64, condition, dtype)
    q, r = tall_qr(cupy.asarray(x))
    assert isinstance(q, cupy.ndarray)
    check(x, q, r)


@pytest.mark.parametrize("name", adversaries())
def test_a_block_keeps_the_promise_for_adversaries(name):
    x = adversaries()[name]
    check(x, *tall_qr(cupy.asarray(x)))


@pytest.mark.parametrize("dtype", ["f4", "f8", "c8", "c16"])
@pytest.mark.parametrize("bad", [False, True])
def test_a_block_is_substituted_in_pieces(dtype, bad, monkeypatch):
    monkeypatch.setattr(tall_kernel, "TOGETHER", 32)
    x = tall_matrix(2000, 200, 1e6, dtype)
    if bad:
        x[:, 21] = x[:, 20] + 1e-4 * x[:, 21]
    tall_kernel.branches.clear()
    check(x, *tall_qr(cupy.asarray(x)))
    assert ("solve by the library" if bad else "solve") in tall_kernel.branches


@pytest.mark.parametrize("dtype", ["f4", "f8", "c8", "c16"])
@pytest.mark.parametrize("condition", [10, 1e10])
def test_halves_of_triangles_are_skipped(condition, dtype, monkeypatch):
    monkeypatch.setattr(tall_kernel, "SKIPPED", 16)
    x = tall_matrix(2000, 70, condition, dtype)
    double = x.astype(np.result_type(dtype, "f8"))
    for order in "CF":
        gram = host(tall_kernel.make_gram(cupy.asarray(x, order=order)))
        np.testing.assert_allclose(gram, double.conj().T @ double, atol=1e-12)
        check(x, *tall_qr(cupy.asarray(x, order=order)))
    assert not tall_kernel.make_gram(cupy.asarray(x[:0])).any()


@pytest.mark.parametrize("order", "CF")
def test_however_a_block_is_stored(order):
    x = tall_matrix(1000, 40, 1e10)
    check(x, *tall_qr(cupy.asarray(x, order=order)))
    strided = cupy.asarray(np.repeat(x, 2, 1))[:, ::2]
    check(x, *tall_qr(strided))


@pytest.mark.parametrize("dtype", ["f4", "f8", "c8", "c16"])
@pytest.mark.parametrize("condition", [10, 1e10, 1e17])
def test_qr_and_svd_keep_the_promise(scheduler, condition, dtype):
    x = tall_matrix(2100, 40, condition, dtype)
    d = on_gpu(x)
    q, r, u, s, vh = dask.compute(*linalg.qr(d), *linalg.svd(d))
    assert all(isinstance(a, cupy.ndarray) for a in (q, r, u, s, vh))
    check(x, q, r)
    u, s, vh = map(host, (u, s, vh))
    double = np.result_type(x.dtype, "f8")
    most = 30 * 40**1.5 * unit_roundoff(dtype)
    assert np.linalg.norm(u.conj().T.astype(double) @ u - np.eye(40), 2) <= most
    assert np.linalg.norm(x - (u * s) @ vh, 2) <= most
    want = np.linalg.svd(x.astype(double), compute_uv=False)
    assert abs(s - want).max() <= most


@pytest.mark.parametrize("name", adversaries())
def test_qr_keeps_the_promise_for_adversaries(name):
    x = adversaries()[name]
    with gpuscheduler.Scheduler("cuda:0,0"):
        check(x, *dask.compute(*linalg.qr(on_gpu(x))))


@pytest.mark.parametrize(
    ("condition", "last"),
    [(10, "orthonormal"), (1e4, "first order"), (1e10, "first order"), (1e13, "near"),
     (1e17, "householder")],
)  # fmt: skip
def test_every_branch_is_taken(condition, last):
    tall_kernel.branches.clear()
    with gpuscheduler.Scheduler("cuda:0,0"):
        x = tall_matrix(3000, 60, condition)
        check(x, *dask.compute(*linalg.qr(on_gpu(x))))
    assert tall_kernel.branches[-1] == last


@pytest.mark.parametrize("shape", [(1500, 40), (40, 1500)])
@pytest.mark.parametrize("rank", [40, 25])
def test_least_squares_and_inverses_are_numpys(scheduler, shape, rank):
    rng = np.random.default_rng(3)
    x = rng.standard_normal((shape[0], rank)) @ rng.standard_normal((rank, shape[1]))
    b = rng.standard_normal((shape[0], 3))
    d = da.from_array(x, chunks=(400, 400)).to_backend("cupy")
    e = da.from_array(b, chunks=(300, 2)).to_backend("cupy")
    found = [host(a) for a in dask.compute(*linalg.lstsq(d, e), linalg.pinv(d))]
    want = np.linalg.lstsq(x, b, rcond=None)
    assert int(found[2]) == want[2] == rank
    np.testing.assert_allclose(found[3], want[3], atol=1e-11)
    np.testing.assert_allclose(found[0], want[0], atol=1e-10)
    np.testing.assert_allclose(found[4], np.linalg.pinv(x), atol=1e-10)
    assert int(linalg.matrix_rank(d).compute()) == rank
    if rank == 40:
        np.testing.assert_allclose(host(linalg.cond(d).compute()), np.linalg.cond(x), rtol=1e-9)


def test_nan_is_an_error_of_the_singular_values():
    x = tall_matrix(1400, 40, 10)
    x[5, 5] = np.nan
    with gpuscheduler.Scheduler("cuda:0"), pytest.raises(np.linalg.LinAlgError, match="NaN"):
        linalg.svdvals(on_gpu(x)).compute()


def test_numpy_blocks_are_factored_on_gpus(scheduler):
    x = tall_matrix(2100, 40, 1e10)
    d = da.from_array(x, chunks=(700, -1))
    q, r = dask.compute(*linalg.qr(d))
    assert isinstance(q, np.ndarray)
    check(x, q, r)


# ---- Dask's own functions


@pytest.mark.parametrize("condition", [10, 1e10, 1e17])
def test_dasks_qr_and_svd_use_the_block_function(scheduler, condition):
    x = tall_matrix(3000, 40, condition)
    d = on_gpu(x, 1000) * 1.0  # Dask fuses this with its QR
    tall_kernel.branches.clear()
    q, r = dask.compute(*da.linalg.qr(d))
    assert "plain" in tall_kernel.branches or "shift" in tall_kernel.branches
    check(x, q, r, signs=False)
    u, s, vh = (host(a) for a in dask.compute(*da.linalg.svd(d)))
    np.testing.assert_allclose((u * s) @ vh, x, atol=1e-13)
    want = np.linalg.svd(x, compute_uv=False)
    assert abs(s - want).max() <= 1e-13


@pytest.mark.parametrize("rows", [1000, 170, 45])
@pytest.mark.parametrize("dtype", ["f4", "f8", "c8", "c16"])
def test_dasks_qr_factors_all_blocks_at_once(scheduler, dtype, rows):
    """Of 1000 rows a block, Dask stacks all factors; of fewer, level by level."""
    x = tall_matrix(3000, 40, 10, dtype)
    d = on_gpu(x, rows) * 1
    tall_kernel.branches.clear()
    q, r = dask.compute(*da.linalg.qr(d))
    assert tall_kernel.branches.count("plain") == 1
    assert all(isinstance(a, cupy.ndarray) for a in (q, r))
    check(x, q, r)


@pytest.mark.parametrize("name", adversaries())
def test_dasks_qr_keeps_the_promise_for_adversaries(name):
    x = adversaries()[name]
    with gpuscheduler.Scheduler("cuda:0,0"):
        check(x, *dask.compute(*da.linalg.qr(on_gpu(x))))


def test_dasks_qr_falls_back_to_householder():
    x = tall_matrix(3000, 60, 1e17)
    tall_kernel.branches.clear()
    with gpuscheduler.Scheduler("cuda:0,0"):
        check(x, *dask.compute(*da.linalg.qr(on_gpu(x, 600))))
    assert tall_kernel.branches[-1] == "householder"


def test_dasks_svd_of_new_data_takes_the_plan_of_the_last(scheduler):
    planned = []
    for seed in range(3):
        x = tall_matrix(2000, 40, 1e4, seed=seed)
        u, s, vh = map(host, dask.compute(*da.linalg.svd(on_gpu(x, 500) + 1)))
        planned.append(scheduler.recorder.runs[-1].planned)
        np.testing.assert_allclose((u * s) @ vh, x + 1, atol=1e-12)
        np.testing.assert_allclose(s, np.linalg.svd(x + 1, compute_uv=False), atol=1e-12)
    assert planned == ["new", "template", "template"]


def test_dasks_svd_is_persisted_and_computed_in_parts(scheduler):
    x = tall_matrix(2000, 40, 1e4)
    lazy = da.linalg.svd(on_gpu(x, 300))
    u, s, vh = dask.persist(*lazy)
    want = np.linalg.svd(x, compute_uv=False)
    for values in (s, lazy[1]):
        np.testing.assert_allclose(host(values.compute()), want, atol=1e-13)
    left = (u * s[None]) @ vh - on_gpu(x, 300)
    assert float(abs(left).max().compute()) <= 1e-13


def test_householder_is_the_library():
    x = tall_matrix(3000, 40, 10)
    with gpuscheduler.Scheduler("cuda:0", tall_qr="householder"):
        tall_kernel.branches.clear()
        q, r = dask.compute(*da.linalg.qr(on_gpu(x, 1000)))
        assert not tall_kernel.branches
    check(x, q, r, signs=False)


def test_blocks_that_are_not_tall_stay_with_the_library():
    x = tall_matrix(300, 20, 10)
    with gpuscheduler.Scheduler("cuda:0"):
        tall_kernel.branches.clear()
        q, r = dask.compute(*da.linalg.qr(on_gpu(x, 100)))
        assert not tall_kernel.branches
    check(x, q, r, signs=False)


def test_an_empty_block_is_dasks():
    x = tall_matrix(1000, 40, 10)
    d = on_gpu(x, 500)
    with gpuscheduler.Scheduler("cuda:0"):
        picked = d[da.arange(1000, chunks=500) >= 500]
        q, r = dask.compute(*da.linalg.qr(picked))
        check(x[500:], q, r, signs=False)


def test_numpys_qr_is_taken_over_with_its_modes(scheduler):
    x = tall_matrix(2000, 40, 10)
    d = on_gpu(x, 1000)
    meta = cupy.empty((0, 0))
    r = d.map_blocks(np.linalg.qr, mode="r", chunks=((40, 40), 40), meta=meta)
    got = host(r.compute())
    want = np.concatenate([np.linalg.qr(x[:1000], "r"), np.linalg.qr(x[1000:], "r")])
    np.testing.assert_allclose(abs(got), abs(want), atol=1e-12)


# ---- precision of products


@pytest.mark.parametrize("dtype", ["f4", "c8"])
def test_products_in_tf32_keep_ten_bits(dtype):
    rng = np.random.default_rng(5)
    x, y = (rng.standard_normal((300, 300)).astype(dtype) for _ in range(2))
    if dtype == "c8":
        x, y = x + 1j * y, y - 1j * x
    errors = {}
    for precision in ("strict", "tf32"):
        with gpuscheduler.Scheduler("cuda:0", matmul_precision=precision):
            a, b = (da.from_array(v, chunks=100).to_backend("cupy").persist() for v in (x, y))
            got = host((a @ b).compute())
        exact = x.astype("c16") @ y.astype("c16")
        errors[precision] = (abs(got - exact) / (abs(x) @ abs(y))).max()
    assert errors["strict"] < 1e-6
    assert 1e-5 < errors["tf32"] < 2 * 2.0**-10


def test_tf32_leaves_factors_and_doubles_alone():
    x = tall_matrix(2100, 40, 10, "f4")
    with gpuscheduler.Scheduler("cuda:0", matmul_precision="tf32"):
        check(x, *dask.compute(*linalg.qr(on_gpu(x))))
        y = np.random.default_rng(6).standard_normal((200, 200))
        d = da.from_array(y, chunks=100).to_backend("cupy")
        np.testing.assert_allclose(host((d @ d).compute()), y @ y, rtol=1e-10, atol=1e-12)


def test_products_are_strict_again_after_tf32():
    x = np.random.default_rng(7).standard_normal((200, 200)).astype("f4")
    for precision in ("tf32", "strict"):
        with gpuscheduler.Scheduler("cuda:0", matmul_precision=precision):
            d = da.from_array(x, chunks=100).to_backend("cupy").persist()
            got = host((d @ d).compute())
    np.testing.assert_allclose(got, x.astype("f8") @ x, atol=1e-4)
