"""What functions of NumPy, SciPy, Dask and Python do to arrays without values.

creation     Functions that create arrays, on traced arrays.
lookup       Indexing with computed positions, on traced arrays.
medians      Medians and quantiles of few elements, by sorting networks.
reductions   NumPy's reductions and scans, on traced arrays.
shapes       Functions of NumPy that join, split, pad and view arrays.
statistics   NumPy's statistics and other composed functions, on traced arrays.
dask_chunks  Dask's own chunk functions, on traced arrays.
masked       Reductions of what a mask selects, on traced arrays.
products     Products of arrays: `matmul`, `dot`, `tensordot`, `einsum` and others.
python_math  `math`, `cmath`, `complex`, `min` and `max`, on traced arrays.
library      Sorts, quantiles, FFTs and filters that libraries of GPUs have, too.
search       Searches in sorted tables: `searchsorted`, `digitize`, `interp`, `isin`, `bincount`.
"""
