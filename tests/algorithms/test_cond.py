"""Condition numbers in other norms than the 2-norm: NumPy's, of singular matrices, too."""

import dask.array as da
import numpy as np
import pytest

from gpuscheduler import linalg

STACK = np.stack([np.eye(3), np.zeros((3, 3)), np.diag([1.0, 2, 4]), np.ones((3, 3))])
MATRICES = {
    "random": np.random.default_rng(0).standard_normal((7, 7)),
    "complex": np.random.default_rng(0).standard_normal((5, 5, 2)).view("c16")[..., 0],
    "identity": np.eye(4),
    "zero": np.zeros((3, 3)),
    "singular": np.array([[1.0, 2], [2, 4]]),
    "stack": STACK,
    "stack of stacks": STACK.reshape(2, 2, 3, 3),
}


@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize("p", [1, -1, np.inf, -np.inf, "fro"])
def test_other_norms(name, p):
    a = MATRICES[name]
    got = linalg.cond(da.from_array(a, chunks=2), p)
    want = np.linalg.cond(a, p)
    assert (got.shape, got.dtype) == (np.shape(want), want.dtype)
    np.testing.assert_allclose(got.compute(scheduler="sync"), want, rtol=1e-9)


def test_nan_stays_and_nothing_is_refused():
    a = np.array([[np.nan, 1], [1, 1]])
    assert np.isnan(linalg.cond(da.from_array(a, chunks=1), 1).compute(scheduler="sync"))
    with pytest.raises(np.linalg.LinAlgError, match="empty"):
        linalg.cond(da.zeros((0, 0)), 1).compute(scheduler="sync")
