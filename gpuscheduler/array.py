"""Functions of arrays that `dask.array` lacks, or has in a form that is less exact.

Names, signatures and values are NumPy's; results are lazy dask arrays on any Dask scheduler.
"""

from .algorithms.distinct import (
    intersect1d,
    isin,
    searchsorted,
    setdiff1d,
    setxor1d,
    union1d,
    unique,
    unique_all,
    unique_counts,
    unique_inverse,
    unique_values,
)
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
    "argpartition", "argsort", "cross", "inner", "intersect1d", "isin", "kron", "lexsort",
    "matrix_transpose", "median", "nanmedian", "nanpercentile", "nanquantile", "partition",
    "percentile", "quantile", "searchsorted", "setdiff1d", "setxor1d", "sort", "sort_complex",
    "take_along_axis", "union1d", "unique", "unique_all", "unique_counts", "unique_inverse",
    "unique_values",
]  # fmt: skip
