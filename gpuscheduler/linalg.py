"""Linear algebra that `dask.array.linalg` lacks, or has in a form that is less exact.

Names, signatures and values are NumPy's and SciPy's; results are lazy dask arrays on any Dask
scheduler.
"""

from .algorithms.cholesky import cho_factor, cho_solve, cholesky
from .algorithms.lu import lu_factor, lu_solve
from .algorithms.square import det, inv, slogdet, solve

__all__ = [
    "cho_factor", "cho_solve", "cholesky", "det", "inv", "lu_factor", "lu_solve", "slogdet",
    "solve",
]  # fmt: skip
