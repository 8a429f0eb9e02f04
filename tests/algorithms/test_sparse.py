"""Dask arrays of sparse blocks: NumPy's values on every scheduler, and what is refused."""

import pickle

import dask
import dask.array as da
import numpy as np
import pytest
import scipy.sparse
from dask.sizeof import sizeof as dask_sizeof
from hypothesis import given, settings
from hypothesis import strategies as st

import gpuscheduler
from gpuscheduler import sparse
from gpuscheduler.values import sizeof
from tests.support.sparse_cases import OPERATIONS, M, N, as_dense, dask_of, matrix

#: How sparse blocks may be cut.
CHUNKS = [(9, 8), (40, 30), (12, 30)]


def expected(f, dense):
    return f(dense, lambda x, chunks: x)


def check(result, want, tolerance=1e-12):
    want = np.asarray(want)
    got = as_dense(result)
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("scheduler", ["sync", "threads", "ours"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_values_are_numpys(name, scheduler):
    m, f = matrix(), OPERATIONS[name]
    want = expected(f, m.toarray())
    tolerance = 1e-6 if name == "astype" else 1e-12
    for chunks in CHUNKS:
        if scheduler != "ours":
            s = sparse.asarray(m, chunks=chunks)
            result = f(s, dask_of)
            value = result.compute(scheduler=scheduler)
        else:
            with gpuscheduler.Scheduler("cpu:3", check=True, fuse_least=0):
                s = sparse.asarray(m, chunks=chunks)
                result = f(s, dask_of)
                value = result.compute()
            assert not isinstance(value, sparse.SparseBlock)
        assert result.dtype == value.dtype == np.asarray(want).dtype
        if not np.isnan(result.shape).any():
            assert result.shape == value.shape
        check(value, want, tolerance)


@pytest.mark.parametrize(
    "kind", ["csr_array", "csr_matrix", "csc_array", "coo_matrix", "dia_array", "bsr_array"]
)
def test_any_matrix_of_scipy(kind):
    square = scipy.sparse.diags_array([np.arange(8.0), np.ones(7)], offsets=[0, 1])
    m = getattr(scipy.sparse, kind)(square.asformat(kind[:3]))
    with gpuscheduler.Scheduler("cpu:2", check=True):
        s = sparse.asarray(m, chunks=(3, 4))
        check((s @ np.arange(8.0)).compute(), square.toarray() @ np.arange(8.0))
        result = s.compute()
        assert type(result).__name__ == f"csr_{kind.split('_')[1]}"
        check(result, square.toarray())


@pytest.mark.parametrize("form", ["csr", "csc", "coo", "dia"])
def test_blocks_of_each_format(form):
    m = scipy.sparse.diags_array([np.arange(1.0, 9), np.ones(7)], offsets=[0, 1], format="csr")
    s = sparse.asarray(m, format=form, chunks=(4, 8))
    block = s.blocks[0, 0].compute(scheduler="sync")
    assert block.matrix.format == form
    with gpuscheduler.Scheduler("cpu:2", check=True):
        for f in (lambda a: a @ np.arange(8.0), lambda a: np.ones(8) @ a):
            check(f(s).compute(), f(m.toarray()))
        for name in ("sum of columns", "T", "+", "every third row", "max of columns", "abs"):
            check(OPERATIONS[name](s, dask_of).compute(), expected(OPERATIONS[name], m.toarray()))


@pytest.mark.parametrize("kind", ["csr_array", "csc_matrix", "coo_array", "COO", "GCXS"])
def test_raw_sparse_blocks_of_a_dask_array(kind):
    m = matrix()
    if kind in ("COO", "GCXS"):
        make = getattr(pytest.importorskip("sparse"), kind).from_numpy
    else:
        make = getattr(scipy.sparse, kind)
    raw = da.from_array(m.toarray(), chunks=(9, 8)).map_blocks(make, dtype="f8")
    s = sparse.asarray(raw)
    assert s.chunks == raw.chunks
    with gpuscheduler.Scheduler("cpu:2", check=True):
        check((s @ np.arange(N)).compute(), m @ np.arange(N))
        check(s.sum(axis=1).compute(), m.sum(axis=1))
        check((s @ s.T).compute(), (m @ m.T).toarray())


def test_dense_arrays_become_sparse():
    dense = matrix().toarray()
    s = sparse.asarray(da.from_array(dense, chunks=10))
    assert type(s._meta) is sparse.SparseBlock
    assert s.dtype == dense.dtype
    with gpuscheduler.Scheduler("cpu:2", check=True):
        result = s.compute()
        assert type(result) is scipy.sparse.csr_array
        check(result, dense)
        check(sparse.asarray(dense, chunks=(7, -1)).sum().compute(), dense.sum())


# ---- adversaries


def awkward():
    """Matrices with a name, and whether two stored elements are at one place."""
    row, col = np.array([0, 0, 5, 5, 5]), np.array([3, 3, 1, 1, 0])
    duplicates = scipy.sparse.coo_array((np.arange(1.0, 6), (row, col)), shape=(7, 4))
    wide = duplicates.tocsr()
    wide.indices, wide.indptr = wide.indices.astype("i8"), wide.indptr.astype("i8")
    unsorted = scipy.sparse.csr_array(
        (np.arange(1.0, 6), np.array([3, 0, 2, 1, 0]), np.array([0, 3, 3, 5])), shape=(3, 4)
    )
    repeated = scipy.sparse.csr_array(
        (np.arange(1.0, 6), np.array([3, 3, 2, 0, 0]), np.array([0, 3, 3, 5])), shape=(3, 4)
    )
    explicit = scipy.sparse.csr_array(
        (np.array([0.0, 2, 0]), np.array([0, 1, 3]), np.array([0, 2, 3])), shape=(2, 4)
    )
    infinite = scipy.sparse.csr_array(np.array([[0, np.nan, 1], [np.inf, 0, 0], [0, 0, -1]]))
    return {
        "empty rows": scipy.sparse.csr_array(([1.0], ([2], [1])), shape=(6, 3)),
        "nothing stored": scipy.sparse.csr_array((5, 4)),
        "duplicates": duplicates,
        "wide indices": wide,
        "unsorted": unsorted,
        "repeated": repeated,
        "explicit zeros": explicit,
        "not finite": infinite,
        "one element": scipy.sparse.csr_array([[3.0]]),
        "all stored": scipy.sparse.csr_array(np.arange(1.0, 13).reshape(3, 4)),
        "all negative": scipy.sparse.csr_array(-np.arange(1.0, 13).reshape(3, 4)),
        "complex": scipy.sparse.csr_array(np.array([[0, 1j], [2 - 1j, 0]])),
        "integers": scipy.sparse.csr_array(np.array([[0, 2**40], [-1, 0]])),
        "bool": scipy.sparse.csr_array(np.array([[True, False], [True, True]])),
        "one byte": scipy.sparse.csr_array(np.array([[200, 0], [100, 100]], np.uint8)),
    }


@pytest.mark.parametrize("name", awkward())
def test_awkward_matrices(name):
    m = awkward()[name]
    before = [a.copy() for a in vars(m).values() if isinstance(a, np.ndarray)]
    dense = m.toarray()
    x = np.arange(1.0, dense.shape[1] + 1)
    cases = {
        "sum": lambda a: a.sum(),
        "sum0": lambda a: a.sum(axis=0),
        "matvec": lambda a: a @ x,
        "left": lambda a: np.ones(dense.shape[0]) @ a,
        "T": lambda a: a.T @ a,
        "abs": lambda a: abs(a),
        "double": lambda a: a + a,
        "mean": lambda a: a.mean(axis=1),
        "half": lambda a: a[: max(1, dense.shape[0] // 2)],
        "count": lambda a: (a != 0).sum(axis=1),
    }
    if dense.dtype.kind != "c":
        cases |= {"max": lambda a: a.max(axis=0), "max of rows": lambda a: a.max(axis=1)}
        cases |= {"min": lambda a: a.min()}
    if name == "not finite":  # SciPy, too, multiplies what is stored only
        cases = {k: v for k, v in cases.items() if k not in ("T",)}
        x = np.ones(3)
    for chunks in ((2, 2), (-1, -1)):
        for scheduler in ("sync", "ours"):
            s = sparse.asarray(m, chunks=chunks)
            for case, f in cases.items():
                want = np.asarray(f(dense))
                if scheduler == "sync":
                    value = f(s).compute(scheduler="sync")
                else:
                    with gpuscheduler.Scheduler("cpu:2", check=True):
                        value = f(s).compute()
                np.testing.assert_allclose(as_dense(value), want, rtol=1e-12, err_msg=case)
                assert as_dense(value).dtype == want.dtype, case
    after = [a for a in vars(m).values() if isinstance(a, np.ndarray)]
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(a, b)


@settings(deadline=None)
@given(
    rows=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    columns=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    density=st.sampled_from([0, 0.1, 0.5, 1]),
    seed=st.integers(0, 9),
    name=st.sampled_from(
        ["s @ v", "v @ s", "s @ s.T", "sum0", "sum1", "max", "part", "list", "rechunk", "T", "*"]
    ),
)
def test_any_chunks_give_the_same(rows, columns, density, seed, name):
    m, n = sum(rows), sum(columns)
    a = scipy.sparse.random_array((m, n), density=density, format="csr", rng=seed)
    dense, rng = a.toarray(), np.random.default_rng(seed)
    v, w, take = rng.random(n), rng.random(m), rng.integers(0, m, 5)
    f = {
        "s @ v": lambda s: s @ v,
        "v @ s": lambda s: w @ s,
        "s @ s.T": lambda s: s @ s.T,
        "sum0": lambda s: s.sum(axis=0),
        "sum1": lambda s: s.sum(axis=1),
        "max": lambda s: s.max(axis=0),
        "part": lambda s: s[m // 2 :, : n // 2 + 1],
        "list": lambda s: s[take],
        "rechunk": lambda s: s.rechunk((max(1, m // 2), -1)) if isinstance(s, da.Array) else s,
        "T": lambda s: s.T,
        "*": lambda s: s * s,
    }[name]
    s = sparse.asarray(a, chunks=(tuple(rows), tuple(columns)))
    with gpuscheduler.Scheduler("cpu:2", check=True):
        check(f(s).compute(), f(dense))


# ---- what is refused


@pytest.mark.parametrize(
    "f",
    [
        np.exp, np.cos, lambda s: s + 1, lambda s: 1 / s, lambda s: s < 1, lambda s: s**0,
        lambda s: s * np.inf, np.logical_not, lambda s: s <= s, lambda s: s == 0,
    ],
)  # fmt: skip
def test_what_would_store_every_zero_is_refused(f):
    refused = f(sparse.asarray(matrix(), chunks=(9, 8)))
    with pytest.raises(TypeError, match="would store every zero.*todense"):
        refused.compute(scheduler="sync")
    with gpuscheduler.Scheduler("cpu:2", check=True) as s:  # noqa: SIM117
        with pytest.raises(TypeError, match="would store every zero.*todense"):
            refused.compute(scheduler=s.get)


def test_todense_gives_what_was_refused():
    m = matrix()
    s = sparse.asarray(m, chunks=(9, 8))
    dense = sparse.todense(s)
    assert type(dense._meta) is np.ndarray
    np.testing.assert_allclose(da.exp(dense).compute(), np.exp(m.toarray()))


def test_nothing_is_densified_silently():
    block = sparse.SparseBlock(matrix())
    with pytest.raises(TypeError, match="todense"):
        np.asarray(block)
    with pytest.raises(TypeError, match="todense"):
        np.linalg.eigvals(block)
    with pytest.raises(TypeError, match="no out="):
        np.add(block, block, out=np.zeros((M, N)))


def test_errors_name_the_argument_and_the_remedy():
    with pytest.raises(ValueError, match="x has 1 dimensions"):
        sparse.asarray(np.ones(3))
    with pytest.raises(ValueError, match="x has 3 dimensions"):
        sparse.asarray(da.ones((2, 2, 2)))
    with pytest.raises(ValueError, match="format='lil': use one of"):
        sparse.asarray(matrix(), format="lil")
    for f in (sparse.todense, sparse.unwrap):
        with pytest.raises(TypeError, match="use sparse.asarray"):
            f(da.ones((3, 3)))
        with pytest.raises(TypeError, match="use sparse.asarray"):
            f(matrix())
    s = sparse.asarray(matrix(), chunks=(9, 8))
    with pytest.raises(ValueError, match="not align|columns meet|shape"):
        (s @ np.ones(M)).compute(scheduler="sync")
    with pytest.raises(NotImplementedError, match="two axes"):
        s.reshape(-1).compute(scheduler="sync")


# ---- blocks and results


def test_unwrap_gives_matrices_on_any_scheduler():
    m = matrix()
    for form, name in ((None, "csr_array"), ("csc", "csc_array"), ("coo", "coo_array")):
        raw = sparse.unwrap(sparse.asarray(m, chunks=(9, 30)), form)
        assert type(raw._meta).__name__ == name.replace("coo", "csr")
        blocks = dask.compute(*raw.to_delayed().ravel(), scheduler="sync")
        assert {type(b).__name__ for b in blocks} == {name}
        check(raw.compute(scheduler="sync"), m.toarray())


def test_matmul_is_the_same_on_both_sides():
    m = matrix()
    s = sparse.asarray(m, chunks=(9, 8))
    left = np.random.default_rng(1).random((5, M))
    check(sparse.matmul(left, s).compute(scheduler="sync"), left @ m.toarray())
    check(sparse.matmul(s, left.T[:N]).compute(scheduler="sync"), m @ left.T[:N])


def test_a_block_is_pickled_counted_and_hashed():
    block = sparse.SparseBlock(matrix())
    again = pickle.loads(pickle.dumps(block))
    check(again, block.matrix.toarray())
    assert sizeof(block) == dask_sizeof(block) == block.nbytes == sizeof(block.matrix)
    assert dask.base.tokenize(block) == dask.base.tokenize(again)
    assert dask.base.tokenize(block) != dask.base.tokenize(block * 2)


def test_a_part_of_the_memory_is_enough(tmp_path):
    """Persisted blocks are spilled and read back."""
    m = scipy.sparse.random_array((6400, 300), density=0.3, format="csr", rng=0)
    with gpuscheduler.Scheduler("cpu:1", memory_limit=sizeof(m) // 3,
                                spill_directory=str(tmp_path), check=True) as s:  # fmt: skip
        a = sparse.asarray(m, chunks=(100, 300)).persist()
        b = (a * 2).persist()
        assert s.last.spilled[-2] > 0
        check((b @ np.arange(300.0)).compute(), 2 * (m @ np.arange(300.0)))
        del a, b


def test_the_next_round_is_not_planned_again(planned):
    m = matrix()
    with gpuscheduler.Scheduler("cpu:2"):
        a = sparse.asarray(m, chunks=(9, -1)).persist()
        v = da.from_array(np.ones(N), chunks=-1).persist()
        for _ in range(4):
            before = len(planned)
            w = (a @ v).persist()
            v = (a.T @ w).persist()
            v = (v / da.linalg.norm(v)).persist()
        assert len(planned) == before
        x = np.ones(N)
        for _ in range(4):
            x = m.T @ (m @ x)
            x /= np.linalg.norm(x)
        check(v.compute(), x)
