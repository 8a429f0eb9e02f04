"""Systems of equations, inverses, determinants and LU: LAPACK's residuals for any matrix."""

import dask
import dask.array as da
import numpy as np
import pytest
import scipy.linalg
from hypothesis import given, settings
from hypothesis import strategies as st

import gpuscheduler
from gpuscheduler.algorithms import capacity as capacities
from gpuscheduler.algorithms import lu as lus
from gpuscheduler.algorithms import matrices, square
from tests.support import lapack_ratios as ratios
from tests.support.lapack_ratios import THRESHOLD

DTYPES = ["f4", "f8", "c8", "c16", "i4", "u1", "?"]


def matrix(n, dtype="f8", seed=0):
    rng = np.random.default_rng(seed)
    a = rng.standard_normal((n, n)) * 9
    if np.dtype(dtype).kind == "c":
        a = a + 1j * rng.standard_normal((n, n))
    if np.dtype(dtype).kind == "b":
        return a > 0
    return np.abs(a).astype(dtype) if dtype == "u1" else a.astype(dtype)


def wilkinson(n):
    """Its largest pivot grows to 2 ** (n - 1) with partial pivoting."""
    a = np.eye(n) - np.tril(np.ones((n, n)), -1)
    a[:, -1] = 1
    return a


def small_leading_tile(n=400, size=1e-4):
    """A matrix of usual condition with a diagonal tile in which no pivot is good."""
    a = np.random.default_rng(3).standard_normal((n, n))
    a[: n // 2, : n // 2] *= size
    return a


def zero_leading_tile(n=40):
    a = np.random.default_rng(4).standard_normal((n, n))
    a[: n // 2, : n // 2] = 0
    return a


def graded(n, by):
    return matrix(n) * np.logspace(0, by, n)[:, None]


MATRICES = {
    "random": matrix(37),
    "zero leading tile": zero_leading_tile(),
    "permutation": np.eye(12)[::-1],
    "Wilkinson's growth": wilkinson(24),
    "graded rows up": graded(20, 150),
    "graded rows down": graded(20, -150),
    "graded columns": graded(20, 150).T,
    "small entries": matrix(20) * 1e-200,
    "large entries": matrix(20) * 1e200,
    "one huge row": np.vstack([matrix(19)[:1].repeat(1, 0) * 0 + 1e12, matrix(20)[1:, :19]])[
        :19, :19
    ],
    "Hilbert's": scipy.linalg.hilbert(9),
    "1 x 1": np.array([[-3.0]]),
}


def schedulers():
    yield "sync"
    yield "threads"
    yield "cpu:1"
    yield "cpu:4"


@pytest.fixture(params=list(schedulers()), scope="module")
def run(request):
    """A function that computes, by one of the schedulers."""
    if ":" not in request.param:
        yield lambda *x: dask.compute(*x, scheduler=request.param)
        return
    with gpuscheduler.Scheduler(request.param, check=True, memory_limit="1 GiB"):
        yield dask.compute


@pytest.mark.parametrize("block_size", [None, 1, 5, 16, 100])
@pytest.mark.parametrize("name", MATRICES)
def test_solve_inv_and_lu_have_lapacks_residuals(name, block_size):
    a = MATRICES[name]
    n = len(a)
    b = a @ np.ones((n, 3)) + np.eye(n, 3) * np.abs(a).max()
    for chunks in (7, n, (n, 3)):
        x = da.from_array(a, chunks=chunks)
        found = dask.compute(
            square.solve(x, da.from_array(b, chunks=(4, 2)), block_size=block_size),
            square.solve(x, b[:, 0], block_size=block_size),
            square.inv(x, block_size=block_size),
            *square.lu_factor(x, block_size=block_size),
            scheduler="sync",
        )
        many, one, inverse, lu, pivots = found
        assert ratios.lu(a, lu, pivots) < THRESHOLD
        assert ratios.solve(a, many, b) < THRESHOLD
        assert ratios.solve(a, one, b[:, 0]) < THRESHOLD
        if np.linalg.cond(a) < 1e14 or name.startswith(("small", "large")):
            assert ratios.inverse(a, inverse) < THRESHOLD


def test_pivots_are_those_of_lapack():
    for a in (matrix(41), zero_leading_tile(), small_leading_tile(60)):
        want, pivots = scipy.linalg.lu_factor(a)
        for block_size in (None, 7, 20):
            lu, piv = square.lu_factor(da.from_array(a, chunks=10), block_size=block_size)
            assert lu.chunks == da.core.normalize_chunks(10, a.shape)
            assert piv.dtype == np.int32
            lu, piv = dask.compute(lu, piv, scheduler="sync")
            np.testing.assert_array_equal(piv, pivots)
            np.testing.assert_allclose(lu, want, rtol=1e-9, atol=1e-10 * np.abs(want).max())


def test_small_leading_tile_where_dask_is_wrong():
    """`dask.array.linalg.solve` finds pivots in tiles only: it is right by luck."""
    a = small_leading_tile(size=1e-12)
    b = a @ np.ones(len(a))
    x = da.from_array(a, chunks=200)
    dasks = da.linalg.solve(x, da.from_array(b, chunks=200)).compute(scheduler="sync")
    assert ratios.solve(a, dasks, b) > THRESHOLD
    for block_size in (None, 50, 200):
        ours = square.solve(x, b, block_size=block_size).compute(scheduler="sync")
        assert ratios.solve(a, ours, b) < THRESHOLD
        np.testing.assert_allclose(ours, 1, rtol=1e-8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [None, 4])
def test_every_dtype_on_every_scheduler(run, dtype, block_size):
    a, b = matrix(23, dtype, 5), matrix(23, dtype, 6)
    x, y = da.from_array(a, chunks=(5, 9)), da.from_array(b, chunks=(23, 6))
    options = {"block_size": block_size}
    made = [
        square.solve(x, y, **options), square.inv(x, **options), *square.slogdet(x, **options),
        square.det(x, **options), *square.lu_factor(x, **options),
    ]  # fmt: skip
    want = [
        np.linalg.solve(a, b), np.linalg.inv(a), *np.linalg.slogdet(a), np.linalg.det(a),
        np.linalg.inv(a), np.zeros(23, np.int32),
    ]  # fmt: skip
    for lazy, value in zip(made, want, strict=True):
        assert (lazy.dtype, lazy.shape) == (value.dtype, value.shape)
    got = run(*made)
    for value, array in zip(got, made, strict=True):
        assert (value.dtype, value.shape) == (array.dtype, array.shape)
    assert made[0].chunks == (x.chunks[1], y.chunks[1])
    assert made[1].chunks == x.chunks
    assert ratios.solve(a, got[0], b) < THRESHOLD
    assert ratios.inverse(a, got[1]) < THRESHOLD
    assert ratios.lu(np.asarray(a, got[5].dtype), got[5], got[6]) < THRESHOLD
    rtol = 2e-4 if dtype in ("f4", "c8") else 1e-10
    for value, right in zip(got[2:5], want[2:5], strict=True):
        np.testing.assert_allclose(value, right, rtol=rtol)


def test_mixed_dtypes_are_numpys():
    for left, right in (("f4", "c8"), ("f4", "f8"), ("i4", "f4"), ("f8", "c8")):
        a, b = matrix(9, left), matrix(9, right, 1)
        want = np.linalg.solve(a, b)
        for block_size in (None, 4):
            got = square.solve(da.from_array(a, chunks=4), b, block_size=block_size)
            assert got.dtype == want.dtype
            got = got.compute(scheduler="sync")
            assert got.dtype == want.dtype
            np.testing.assert_allclose(got, want, rtol=2e-3)


@pytest.mark.parametrize("block_size", [None, 3])
def test_singular_matrices_raise_inside_the_task(run, block_size):
    a = matrix(12)
    a[:, 7] = 0
    for wrong in (a, np.zeros((12, 12)), np.ones((12, 12))):
        x = da.from_array(wrong, chunks=5)
        for lazy in (
            square.solve(x, np.ones(12), block_size=block_size),
            square.inv(x, block_size=block_size),
        ):
            with pytest.raises(np.linalg.LinAlgError, match="[Ss]ingular"):
                run(lazy)
        sign, logarithm = run(*square.slogdet(x, block_size=block_size))
        assert (sign, logarithm) == (0, -np.inf)
        assert run(square.det(x, block_size=block_size)) == (0,)


@pytest.mark.parametrize("block_size", [None, 3])
def test_singular_matrices_have_factors(block_size):
    a = matrix(12)
    a[:, 7] = 0
    lu, pivots = square.lu_factor(da.from_array(a, chunks=4), block_size=block_size)
    lu, pivots = dask.compute(lu, pivots, scheduler="sync")
    assert ratios.lu(a, lu, pivots) < THRESHOLD
    assert lu[7, 7] == 0
    with pytest.raises(np.linalg.LinAlgError, match="Singular"):
        square.lu_solve((lu, pivots), np.ones(12)).compute(scheduler="sync")


def test_nan_is_not_an_error_as_in_numpy():
    a = matrix(12)
    a[5, 5] = np.nan
    for block_size in (None, 4):
        x = square.solve(da.from_array(a, chunks=5), np.ones(12), block_size=block_size)
        assert np.isnan(x.compute(scheduler="sync")).any()


@pytest.mark.parametrize("block_size", [None, 2])
def test_empty_and_single(block_size):
    for n, k in ((0, 0), (0, 2), (3, 0), (1, 1)):
        a = np.eye(n) * 2
        b = np.ones((n, k))
        x, y = da.from_array(a, chunks=-1), da.from_array(b, chunks=-1)
        got = square.solve(x, y, block_size=block_size)
        assert got.compute(scheduler="sync").tolist() == np.linalg.solve(a, b).tolist()
        assert square.inv(x, block_size=block_size).compute(scheduler="sync").tolist() == (
            np.linalg.inv(a).tolist()
        )
        determinant = square.det(x, block_size=block_size).compute(scheduler="sync")
        assert float(determinant) == pytest.approx(2.0**n)
    lu, piv = square.lu_factor(da.zeros((0, 3)))
    assert (lu.compute().shape, piv.compute().shape) == ((0, 3), (0,))


def test_rectangular_lu():
    for shape in ((9, 4), (4, 9)):
        a = np.random.default_rng(1).standard_normal(shape)
        lu, piv = dask.compute(*square.lu_factor(da.from_array(a, chunks=3)), scheduler="sync")
        assert ratios.lu(a, lu, piv) < THRESHOLD


def test_orders_of_memory_and_read_only_blocks(run):
    a = matrix(20)
    for array in (np.asfortranarray(a), a[::-1][::-1], a.T.copy().T):
        array = array.view()
        array.flags.writeable = False
        x = da.from_array(array, chunks=-1)
        for block_size in (None, 6):
            got = run(square.solve(x, a, block_size=block_size), *square.lu_factor(x, block_size=6))
            np.testing.assert_allclose(got[0], np.eye(20), atol=1e-11)
            assert ratios.lu(a, *got[1:]) < THRESHOLD
        np.testing.assert_array_equal(array, a)


def test_arguments_are_not_changed():
    a, b = matrix(8), matrix(8, seed=1)
    before = a.copy(), b.copy()
    x, y = (da.from_array(v, chunks=-1, asarray=True, inline_array=True) for v in (a, b))
    dask.compute(square.solve(x, y), square.inv(x), square.lu_factor(x), scheduler="sync")
    np.testing.assert_array_equal(a, before[0])
    np.testing.assert_array_equal(b, before[1])


@pytest.mark.parametrize("trans", [0, 1, 2])
def test_lu_solve(trans):
    a = matrix(15, "c16")
    b = matrix(15, "c16", 1)[:, :4]
    factors = square.lu_factor(da.from_array(a, chunks=4))
    turned = [a, a.T, a.conj().T][trans]
    x = square.lu_solve(factors, da.from_array(b, chunks=3), trans)
    assert x.chunks == (factors[0].chunks[1], (3, 1))
    np.testing.assert_allclose(turned @ x.compute(scheduler="sync"), b, atol=1e-11)
    x = square.lu_solve(factors, b[:, 0], trans).compute(scheduler="sync")
    np.testing.assert_allclose(turned @ x, b[:, 0], atol=1e-11)


def test_refinement_and_positive_matrices():
    a = matrix(30)
    positive = a @ a.T + np.eye(30)
    b = matrix(30, seed=2)[:, :3]
    for right in (b, b[:, 0]):
        for matrix_, options in ((a, {}), (positive, {"assume_a": "pos"})):
            for refine in (False, True):
                for block_size in (None, 8):
                    x = square.solve(
                        da.from_array(matrix_, chunks=11),
                        da.from_array(right, chunks=9),
                        refine=refine,
                        block_size=block_size,
                        **options,
                    ).compute(scheduler="sync")
                    assert x.shape == right.shape
                    assert ratios.solve(matrix_, x, right) < THRESHOLD


def test_stacks(run):
    rng = np.random.default_rng(0)
    a = rng.standard_normal((5, 3, 4, 4))
    x = da.from_array(a, chunks=(2, 1, 3, 2))
    for b in (rng.standard_normal((5, 3, 4, 2)), rng.standard_normal((3, 4, 2)), np.ones(4)):
        got = square.solve(x, da.from_array(b, chunks=2))
        want = np.linalg.solve(a, b)
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        np.testing.assert_allclose(run(got)[0], want, rtol=1e-9)
    matrix_ = da.from_array(a[0, 0], chunks=3)
    b = rng.standard_normal((5, 4, 2))
    np.testing.assert_allclose(
        run(square.solve(matrix_, b))[0], np.linalg.solve(a[0, 0], b), rtol=1e-9
    )
    got = run(square.inv(x), square.det(x), *square.slogdet(x))
    want = (np.linalg.inv(a), np.linalg.det(a), *np.linalg.slogdet(a))
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-8, atol=1e-9)
    assert square.inv(da.zeros((0, 3, 3))).compute().shape == (0, 3, 3)
    with pytest.raises(np.linalg.LinAlgError, match="Singular"):
        run(square.inv(da.zeros((2, 3, 3), chunks=1)))


def test_bad_arguments_are_refused_with_the_remedy():
    x = da.ones((4, 4), chunks=2)
    with pytest.raises(np.linalg.LinAlgError, match="must be square, not 4 x 3"):
        square.inv(x[:, :3])
    with pytest.raises(np.linalg.LinAlgError, match="1-dimensional"):
        square.det(x[0])
    with pytest.raises(ValueError, match="b of shape"):
        square.solve(x, np.ones(3))
    with pytest.raises(ValueError, match="b of shape"):
        square.solve(x, np.float64(3))
    with pytest.raises(TypeError, match="astype"):
        square.solve(x.astype("f2"), np.ones(4))
    with pytest.raises(TypeError, match="astype"):
        square.inv(x.astype(object))
    with pytest.raises(ValueError, match="block_size"):
        square.inv(x, block_size=0)
    with pytest.raises(ValueError, match="assume_a"):
        square.solve(x, np.ones(4), assume_a="sym")
    with pytest.raises(ValueError, match="compute_chunk_sizes"):
        square.inv(x[x[:, 0] > 0])
    with pytest.raises(NotImplementedError, match="stack"):
        square.solve(da.ones((2, 3, 3)), np.ones((2, 3, 1)), refine=True)
    with pytest.raises(ValueError, match="trans"):
        square.lu_solve((x, x[0]), x, trans=3)


def test_too_large_for_one_call_goes_by_columns(monkeypatch):
    room = capacities.Capacity(1, 2000)
    monkeypatch.setattr(matrices, "capacity", lambda *_: room)
    a = matrix(30)
    x = da.from_array(a, chunks=10)
    lu, piv = square.lu_factor(x)
    assert any("update" in str(k) for k in dict(square.solve(x, np.ones(30), block_size=9).dask))
    monkeypatch.setattr(lus, "column_width", lambda n, size, of="": 7)
    monkeypatch.setattr(square, "column_width", lambda n, size, of="": 7)
    assert any("update" in str(k) for k in dict(square.solve(x, np.ones(30)).dask))
    x_ = square.solve(x, np.ones(30)).compute(scheduler="sync")
    assert ratios.solve(a, x_, np.ones(30)) < THRESHOLD
    with pytest.raises(NotImplementedError, match="not square"):
        square.lu_factor(da.ones((90, 30)))
    with pytest.raises(NotImplementedError, match="2,000"):
        square.lu_solve((lu, piv), np.ones(30))


def test_several_devices_share_a_large_matrix_where_a_call_uses_one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    large, small = da.ones((2000, 2000), chunks=500), da.ones((100, 100), chunks=50)

    def is_blocked(x):
        return any("update" in str(k) for k in dict(square.solve(x, x[0]).dask))

    with gpuscheduler.Scheduler("cpu:2"):
        assert is_blocked(large)
        assert not is_blocked(small)
    with gpuscheduler.Scheduler("cpu:1"):
        assert not is_blocked(large)


def test_capacity_is_that_of_the_scheduler(monkeypatch):
    for name in capacities.THREADS:
        monkeypatch.delenv(name, raising=False)
    with gpuscheduler.Scheduler("cpu:3", memory_limit="1 MiB"):
        assert capacities.capacity() == capacities.Capacity(1, 3 * 2**20)
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        assert capacities.capacity() == capacities.Capacity(3, 3 * 2**20)
    with dask.config.set(scheduler=None):
        outside = capacities.capacity()
    assert outside.devices == 1
    assert outside.nbytes > 2**28


def test_bits_do_not_depend_on_devices_or_chunks():
    a, b = matrix(40), matrix(40, seed=1)
    found = []
    for devices in ("cpu:1", "cpu:3"):
        with gpuscheduler.Scheduler(devices, check=True):
            for chunks in (40, 13, (7, 40)):
                x = da.from_array(a, chunks=chunks)
                for block_size in (None, 8):
                    y = square.solve(x, b, block_size=block_size)
                    found.append((block_size, y.compute().tobytes()))
    assert len(set(found)) == 2  # one for each block_size


def test_memory_is_bounded_by_the_limit(tmp_path):
    """Block columns are spilled: the matrix takes more than the limit."""
    n = 600
    a = matrix(n)
    limit = 2_500_000  # bytes; the matrix has 2.9 million
    with gpuscheduler.Scheduler(
        "cpu:1", memory_limit=limit, spill_directory=str(tmp_path), check=True
    ):
        x = square.solve(da.from_array(a, chunks=100), np.ones(n), block_size=50).compute()
    assert ratios.solve(a, x, np.ones(n)) < THRESHOLD


def test_a_second_call_plans_nothing(planned):
    with gpuscheduler.Scheduler("cpu:2"):
        for seed in range(3):
            x = da.from_array(matrix(24, seed=seed), chunks=8)
            square.solve(x, np.ones(24), block_size=8).compute()
    assert len(planned) == 1


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_any_small_matrix(data):
    n = data.draw(st.integers(1, 9))
    numbers = st.integers(-3, 3)
    a = np.array(data.draw(st.lists(numbers, min_size=n * n, max_size=n * n)), "f8").reshape(n, n)
    x = da.from_array(a, chunks=data.draw(st.integers(1, n)))
    block_size = data.draw(st.none() | st.integers(1, n))
    lu, pivots = dask.compute(*square.lu_factor(x, block_size=block_size), scheduler="sync")
    assert ratios.lu(a, lu, pivots) < THRESHOLD
    determinant = square.det(x, block_size=block_size).compute(scheduler="sync")
    np.testing.assert_allclose(determinant, np.linalg.det(a), rtol=1e-9, atol=1e-9)
    singular = bool((np.diagonal(lu) == 0).any())
    try:
        got = square.solve(x, a.sum(axis=1), block_size=block_size).compute(scheduler="sync")
    except np.linalg.LinAlgError:
        assert singular
    else:
        assert not singular
        assert ratios.solve(a, got, a.sum(axis=1)) < THRESHOLD
