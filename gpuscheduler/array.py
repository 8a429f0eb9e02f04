"""Functions of arrays that `dask.array` lacks, or has in a form that is less exact.

Names, signatures and values are NumPy's; results are lazy dask arrays on any Dask scheduler.
"""

from .algorithms.products import cross, inner, kron, matrix_transpose, take_along_axis

__all__ = ["cross", "inner", "kron", "matrix_transpose", "take_along_axis"]
