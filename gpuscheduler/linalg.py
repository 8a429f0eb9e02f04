"""Linear algebra that `dask.array.linalg` lacks, or has in a form that is slower or less exact.

Names, signatures and values are NumPy's and SciPy's; results are lazy dask arrays on any Dask
scheduler.
"""

from .algorithms.cholesky import cho_factor, cho_solve, cholesky
from .algorithms.lu import lu_factor, lu_solve
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
    "cho_factor", "cho_solve", "cholesky", "cond", "det", "inv", "lstsq", "lu_factor", "lu_solve",
    "matrix_norm", "matrix_rank", "norm", "pinv", "qr", "slogdet", "solve", "svd", "svdvals",
    "vector_norm",
]  # fmt: skip
