"""Functions of arrays that `dask.array` lacks, or has in a form that is less exact.

Names, signatures and values are NumPy's; results are lazy dask arrays on any Dask scheduler.
"""

from .algorithms.products import cross, inner, kron, matrix_transpose, take_along_axis
from .algorithms.selection import (
    argpartition,
    median,
    nanmedian,
    nanpercentile,
    nanquantile,
    partition,
    percentile,
    quantile,
)
from .algorithms.sorting import argsort, lexsort, sort, sort_complex

__all__ = [
    "argpartition", "argsort", "cross", "inner", "kron", "lexsort", "matrix_transpose", "median",
    "nanmedian", "nanpercentile", "nanquantile", "partition", "percentile", "quantile", "sort",
    "sort_complex", "take_along_axis",
]  # fmt: skip
