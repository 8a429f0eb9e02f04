"""Layers of Dask's `tsqr`: found by their names, and replaced where blocks are tall and CuPy's."""

from __future__ import annotations

import dask
import dask.array as da
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuscheduler.algorithms import tall_kernel
from gpuscheduler.frontend.graph import CUPY, NUMPY
from gpuscheduler.frontend.lowering import keep_layers
from gpuscheduler.options import Options
from gpuscheduler.pipeline.tall_layers import TallRewriter, choose_rewriting
from tests.support.matrices import check_qr, tall_matrix
from tests.support.strategies import EXAMPLES

factor_tall_layers = TallRewriter((NUMPY,))


def compute(*arrays):
    """Compute arrays by Dask's own scheduler, with their layers replaced."""
    out = []
    for array in arrays:
        hlg = factor_tall_layers(array.dask)
        assert hlg is not array.dask
        keys = array.__dask_keys__()
        out.append(da.Array(hlg, array.name, array.chunks, meta=array._meta))
        assert out[-1].__dask_keys__() == keys
    return dask.compute(*out, scheduler="sync")


# Dask's svd of complex numbers says so while it is built
@pytest.mark.filterwarnings("ignore::numpy.exceptions.ComplexWarning")
@settings(deadline=None, max_examples=EXAMPLES)
@given(
    heights=st.lists(st.sampled_from([1, 20, 33, 90, 200, 400]), min_size=2, max_size=8),
    dtype=st.sampled_from(["f4", "f8", "c8", "c16"]),
    condition=st.sampled_from([10, 1e10, 1e17]),
)
def test_results_keep_the_promise_for_any_blocks(heights, dtype, condition):
    n = 33
    heights = (*heights, max(0, 4 * n - sum(heights)) or 1)
    x = tall_matrix(sum(heights), n, condition, dtype)
    d = da.from_array(x, chunks=(heights, -1))
    q, r, s = compute(*da.linalg.qr(d), da.linalg.svd(d)[1])
    check_qr(x, q, r)
    most = 30 * n**1.5 * tall_kernel.unit_roundoff(dtype)
    want = np.linalg.svd(x.astype(np.result_type(dtype, "f8")), compute_uv=False)
    assert abs(s - want).max() <= most


@pytest.mark.parametrize("blocks", [2, 5, 40])
def test_there_is_one_factorization_for_all_blocks(blocks):
    """Dask stacks factors at once, or level by level: of 40 blocks there are two levels."""
    x = tall_matrix(4000, 40, 10)
    d = da.from_array(x, chunks=(4000 // blocks, -1))
    tall_kernel.branches.clear()
    u, s, vh = compute(*da.linalg.svd(d))
    assert list(tall_kernel.branches) == ["plain", "orthonormal"]
    np.testing.assert_allclose((u * s) @ vh, x, atol=1e-13)


def test_factors_of_factors_are_replaced_as_well():
    x = tall_matrix(600, 40, 10)
    q, _ = da.linalg.qr(da.from_array(x, chunks=(200, -1)))
    before, again, r = compute(q, *da.linalg.qr(q * 2))
    check_qr(before * 2, again, r)
    np.testing.assert_allclose(r, 2 * np.eye(40), atol=1e-13)


def test_svd_of_a_wide_matrix_is_that_of_its_transpose():
    x = tall_matrix(600, 40, 10).T
    tall_kernel.branches.clear()
    u, s, vh = compute(*da.linalg.svd(da.from_array(x, chunks=(-1, 200))))
    assert tall_kernel.branches
    np.testing.assert_allclose((u * s) @ vh, x, atol=1e-13)


def _unknown_lengths():
    x = da.from_array(tall_matrix(600, 40, 10), chunks=(200, -1))
    return x[da.arange(600, chunks=200) >= 0]


@pytest.mark.parametrize(
    "matrix",
    [
        lambda: da.ones((300, 20), chunks=(100, 20)),
        lambda: da.ones((300, 100), chunks=(100, 100)),
        lambda: da.ones((600, 40), chunks=(600, 40)),
        lambda: da.ones((600, 40), chunks=(200, 40), dtype="i4"),
        _unknown_lengths,
    ],
    ids=["narrow", "not tall", "one block", "integers", "unknown lengths"],
)
def test_other_matrices_stay_as_they_are(matrix):
    for array in (*da.linalg.qr(matrix()), *da.linalg.svd(matrix())):
        assert factor_tall_layers(array.dask) is array.dask


def test_annotated_layers_stay_as_they_are():
    x = da.ones((600, 40), chunks=(200, 40))
    with dask.annotate(device=1):
        q, r = da.linalg.qr(x)
    assert all(factor_tall_layers(a.dask) is a.dask for a in (q, r))


def test_blocks_of_other_libraries_stay_as_they_are():
    q, r = da.linalg.qr(da.ones((600, 40), chunks=(200, 40)))
    assert all(TallRewriter((CUPY,))(a.dask) is a.dask for a in (q, r))


def test_layers_are_replaced_on_gpus_only():
    assert choose_rewriting("cuda", Options()) == TallRewriter((CUPY,))
    assert choose_rewriting("cpu", Options()) is keep_layers
    assert choose_rewriting("cuda", Options(tall_qr="householder"), resident=True) is keep_layers


def test_signs_of_numpys_q_change_only_where_gpus_are_asked_for():
    auto = choose_rewriting("cuda", Options(numpy="auto"), resident=True)
    asked = choose_rewriting("cuda", Options(numpy="gpu"), resident=True)
    x = da.ones((600, 40), chunks=(200, 40))
    q, (u, _, _) = da.linalg.qr(x)[0], da.linalg.svd(x)
    assert auto(q.dask) is q.dask
    assert all(f(a.dask) is not a.dask for f, a in ((auto, u), (asked, u), (asked, q)))
