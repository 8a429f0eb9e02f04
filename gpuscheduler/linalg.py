"""Linear algebra that `dask.array.linalg` lacks, or has in a form that is slower or less exact.

Names, signatures and values are NumPy's and SciPy's; results are lazy dask arrays on any Dask
scheduler.
"""

from .algorithms.cholesky import cho_factor, cho_solve, cholesky
from .algorithms.contractions import (
    cross,
    diagonal,
    matmul,
    matrix_power,
    multi_dot,
    outer,
    tensordot,
    tensorinv,
    tensorsolve,
    trace,
    vecdot,
)
from .algorithms.eigen import eig, eigh, eigvals, eigvalsh
from .algorithms.lu import lu_factor, lu_solve
from .algorithms.products import matrix_transpose
from .algorithms.randomized import svd_randomized
from .algorithms.square import det, inv, slogdet, solve
from .algorithms.tall import (
    cond,
    lstsq,
    matrix_norm,
    matrix_rank,
    norm,
    pinv,
    qr,
    svd,
    svdvals,
    vector_norm,
)

__all__ = [
    "cho_factor", "cho_solve", "cholesky", "cond", "cross", "det", "diagonal", "eig", "eigh",
    "eigvals", "eigvalsh", "inv", "lstsq", "lu_factor", "lu_solve", "matmul", "matrix_norm",
    "matrix_power", "matrix_rank", "matrix_transpose", "multi_dot", "norm", "outer", "pinv", "qr",
    "slogdet", "solve", "svd", "svd_randomized", "svdvals", "tensordot", "tensorinv",
    "tensorsolve", "trace", "vecdot", "vector_norm",
]  # fmt: skip
