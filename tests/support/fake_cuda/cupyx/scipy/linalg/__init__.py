"""Functions of `scipy.linalg` for the stand-in's arrays."""

import numpy as np
import scipy.linalg as _scipy
from cupy import _called


def solve_triangular(
    a, b, trans=0, lower=False, unit_diagonal=False, overwrite_b=False, check_finite=False
):
    def solve(left, right):
        left = (np.tril if lower else np.triu)(left)  # the other triangle may be anything
        if unit_diagonal:
            left = left - np.diag(np.diagonal(left)) + np.eye(len(left), dtype=left.dtype)
        with np.errstate(all="ignore"):
            try:
                found = _scipy.solve_triangular(
                    left, right, trans=trans, lower=lower, check_finite=False
                )
            except np.linalg.LinAlgError:  # cuBLAS does not look
                found = np.full(right.shape, np.nan)
        return np.array(found, right.dtype, order="F")

    return _called(solve, (a, b), {})


def lu_solve(lu_and_piv, b, trans=0, overwrite_b=False, check_finite=True):
    lu, piv = lu_and_piv
    if lu.dtype.char not in "fdFD":
        raise NotImplementedError("Only float32, float64, complex64 and complex128 are supported.")

    def solve(lu, piv, b):
        found = _scipy.lu_solve((lu, piv), b, trans=trans, check_finite=False)
        return np.array(found, b.dtype, order="F")

    return _called(solve, (lu, piv, b), {})
