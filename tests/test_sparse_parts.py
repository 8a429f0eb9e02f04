"""Sparse matrices taken apart and put together: arrays, facts, bytes, spilling, parcels."""

import pickle

import dask
import dask.array as da
import numpy as np
import pytest
import scipy.sparse as scipy_sparse
from hypothesis import given
from hypothesis import strategies as st

import gpuscheduler
from gpuscheduler.cluster.transport import Bundle, put_back
from gpuscheduler.plan.machine import DISK
from gpuscheduler.sparse_parts import (
    ATTRIBUTES,
    SparseParts,
    arrays_of,
    is_sparse_type,
    library_of,
    rebuild,
)
from gpuscheduler.values import deep_leaves, is_container, leaves, map_deep_leaves, sizeof

KINDS = [f"{form}_{kind}" for form in ATTRIBUTES for kind in ("array", "matrix")]


def matrix(kind, n=6, m=8, density=0.3, dtype="f8"):
    form, _, word = kind.partition("_")
    rng = np.random.default_rng(0)
    dense = (rng.random((n, m)) < density) * rng.integers(1, 9, (n, m)).astype(dtype)
    return getattr(scipy_sparse, kind)(scipy_sparse.coo_array(dense).asformat(form))


def same(a, b):
    assert type(a) is type(b)
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    for x, y in zip(arrays_of(a), arrays_of(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_those_of_the_arrays(kind):
    a = matrix(kind)
    found = list(deep_leaves({"a": (a, 1)}))
    assert found[-1] == 1
    assert all(type(v) is np.ndarray for v in found[:-1])
    assert sizeof(a) == sum(v.nbytes for v in found[:-1]) > a.data.nbytes


@pytest.mark.parametrize("kind", ["lil_array", "lil_matrix", "dok_array", "dok_matrix"])
def test_matrices_of_lists_count_their_bytes(kind):
    """They are not taken apart: what they hold are no arrays of numbers."""
    form = kind[:3]
    a = getattr(scipy_sparse, kind)(matrix("csr_array", 300, 400).asformat(form))
    assert library_of(type(a)) is None
    assert list(deep_leaves(a)) == [a]
    assert sizeof(a) >= a.nnz


@pytest.mark.parametrize("kind", KINDS)
def test_map_gives_a_matrix_of_the_new_arrays(kind):
    a = matrix(kind)
    b = map_deep_leaves(np.copy, [a])[0]
    same(a, b)
    assert not any(np.shares_memory(x, y) for x, y in zip(arrays_of(a), arrays_of(b), strict=True))
    np.testing.assert_array_equal((b + b).toarray(), 2 * a.toarray())


@pytest.mark.parametrize("kind", KINDS)
def test_parts_survive_pickling_and_become_the_matrix_again(kind):
    a = matrix(kind)
    arrays = list(arrays_of(a))
    parts = map_deep_leaves(lambda v: ("slot", v.nbytes), a)
    assert type(parts) is SparseParts
    assert is_container(parts)
    there = pickle.loads(pickle.dumps(parts))
    assert [v for v in deep_leaves(there) if v == "slot"] == ["slot"] * len(arrays)
    same(rebuild(there, arrays), a)


def test_facts_travel_along():
    a = scipy_sparse.csr_array((np.ones(3), np.array([2, 0, 1]), np.array([0, 2, 3])), shape=(2, 3))
    assert not a.has_sorted_indices
    b = map_deep_leaves(np.copy, a)
    assert vars(b)["_has_sorted_indices"] is False
    a = matrix("csr_matrix")
    a.sum_duplicates()
    assert vars(map_deep_leaves(np.copy, a))["_has_canonical_format"] is True
    b = scipy_sparse.coo_array((np.ones(2), ([0, 0], [1, 1])), shape=(2, 2))
    c = map_deep_leaves(np.copy, b)
    assert not c.has_canonical_format
    assert c.nnz == 2
    assert c.toarray()[0, 1] == 2


def test_wide_indices_stay_wide():
    """SciPy's constructor would narrow those of matrices."""
    a = matrix("csr_matrix")
    a.indices, a.indptr = a.indices.astype("i8"), a.indptr.astype("i8")
    b = map_deep_leaves(np.copy, a)
    assert b.indices.dtype == b.indptr.dtype == np.int64


def test_coordinates_in_one_and_three_dimensions():
    for shape in ((7,), (3, 4, 5)):
        a = scipy_sparse.coo_array(np.arange(np.prod(shape)).reshape(shape) % 3)
        b = map_deep_leaves(np.copy, a)
        np.testing.assert_array_equal(a.toarray(), b.toarray())


def test_nothing_stored():
    for kind in KINDS:
        a = matrix(kind, density=0)
        same(map_deep_leaves(np.copy, a), a)


def test_subclasses_of_users_stay_whole():
    class Own(scipy_sparse.csr_array):
        pass

    a = Own(matrix("csr_array"))
    assert library_of(Own) is None
    assert map_deep_leaves(lambda v: v, a) is a
    assert sizeof(a) >= sum(v.nbytes for v in (a.data, a.indices, a.indptr)) > 56


def test_tracing_takes_a_matrix_for_one_thing():
    a = matrix("csr_array")
    assert list(leaves((a, 1))) == [a, 1]


def test_names_of_types():
    from dask.utils import typename

    for kind in KINDS:
        assert is_sparse_type(typename(getattr(scipy_sparse, kind)))
    assert is_sparse_type("cupyx.scipy.sparse._csr.csr_matrix")
    assert not any(map(is_sparse_type, ("cupy.ndarray", "numpy.ndarray", "sparsely.Array", None)))


def test_pydata():
    sparse = pytest.importorskip("sparse")
    dense = np.eye(4)[:, :3] * 2
    for make in (sparse.COO.from_numpy, sparse.GCXS.from_numpy):
        a = make(dense)
        assert sizeof(a) == a.nbytes
        b = map_deep_leaves(np.copy, a)
        assert type(b) is type(a)
        np.testing.assert_array_equal(b.todense(), dense)
        np.testing.assert_array_equal((b @ b.T).todense(), dense @ dense.T)
        assert is_sparse_type(f"{type(a).__module__}.{type(a).__name__}")
    filled = sparse.COO.from_numpy(np.full((3, 3), 5), fill_value=5)
    assert map_deep_leaves(np.copy, filled).fill_value == 5
    cached = sparse.COO.from_numpy(dense)
    cached.enable_caching()
    cached.T.reshape(12)
    other = map_deep_leaves(lambda v: v * 1, cached)
    np.testing.assert_array_equal((other.T * 2).todense(), dense.T * 2)


@given(
    kind=st.sampled_from(KINDS),
    n=st.integers(0, 5), m=st.integers(0, 5), dtype=st.sampled_from(["f4", "f8", "c16", "i8", "?"]),
)  # fmt: skip
def test_any_matrix_is_itself_again(kind, n, m, dtype):
    if kind[:3] == "bsr" and not n * m:
        return  # SciPy makes none without elements
    a = matrix(kind, n, m, 0.5, dtype)
    same(map_deep_leaves(np.copy, a), a)
    there = pickle.loads(pickle.dumps(map_deep_leaves(lambda v: 0, a)))
    same(rebuild(there, arrays_of(a)), a)


# ---- in the memory book of CPU devices


def as_sparse(block, kind):
    return getattr(scipy_sparse, kind)(block)


@pytest.mark.parametrize("kind", ["csr_array", "csr_matrix"])
def test_sparse_blocks_count_and_are_spilled(kind, tmp_path):
    """Sixty-four persisted blocks where twenty fit."""
    x = matrix("csr_array", 16 * 64, 300, 0.4).toarray()
    sizes = [sizeof(as_sparse(b, kind)) for b in np.split(x, 64)]
    limit = 10 * x.nbytes // 64
    with gpuscheduler.Scheduler(
        "cpu:2", memory_limit=limit, spill_directory=str(tmp_path), check=True
    ) as s:
        a = da.from_array(x, chunks=(16, 300)).map_blocks(
            as_sparse, kind=kind, dtype="f8", meta=as_sparse(x[:0, :0], kind)
        )
        (a,) = dask.persist(a)
        assert s.last.peak[0] <= 2 * limit
        assert s.last.spilled[DISK] > sum(sizes) // 4
        result = (a * 2).compute()
        np.testing.assert_array_equal(result.toarray(), 2 * x)
        del a, result
    assert not list(tmp_path.iterdir())


def test_a_matrix_whose_zeros_would_not_fit_is_planned():
    """A million by a million, of which Dask says that a block were terabytes."""
    n = 10**6
    a = scipy_sparse.eye_array(n, format="csr") * 3.0
    with gpuscheduler.Scheduler("cpu:2", memory_limit="64 MiB", check=True) as s:
        x = da.from_array(a, chunks=(n // 4, n), asarray=False) * 2
        assert (x.compute() != a * 2).nnz == 0
        assert max(s.last.peak.values()) < 2**26


@pytest.mark.parametrize("kind", KINDS)
def test_parcels_take_the_arrays_apart(kind):
    a = matrix(kind)
    there = pickle.loads(pickle.dumps(Bundle({"a": (a, 5), "b": {"c": [a]}})))
    value, five = put_back(there.values["a"], lambda v: v)
    assert five == 5
    same(value, a)
    same(there.values["b"]["c"][0], a)
