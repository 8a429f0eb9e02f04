"""Sparse matrices of the stand-in: SciPy computes, the arrays are in the memory of devices."""

from ._matrices import (  # noqa: F401
    bmat,
    coo_array,
    coo_matrix,
    csc_array,
    csc_matrix,
    csr_array,
    csr_matrix,
    dia_array,
    dia_matrix,
    eye,
    hstack,
    issparse,
    random,
    sparray,
    spmatrix,
    vstack,
)
