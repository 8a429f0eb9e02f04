"""Algorithms that `dask.array` lacks, as plain graphs for any Dask scheduler.

blocks            Keys, chunks and array modules of the blocks of an array.
capacity          Devices and memory of the scheduler in use.
cholesky          Cholesky factorization, and solving by it.
contractions      Products of several matrices, powers, and names of the array API standard.
cyclic            A rule that deals blocks to devices in turn.
distinct          unique, searchsorted, isin, set operations.
eigen             Eigenvalues and eigenvectors.
fourier           Fourier transforms along any axes of chunked arrays.
lapack            Factorizations of one matrix by the library of its type.
local_sort        Sort the arrays of one task, stably and fast, on NumPy and CuPy.
lu                LU with partial pivoting over whole columns, and solving by it.
matrices          Arguments and results of functions of matrices.
ordered_keys      Values of any dtype as unsigned integers of the same order.
products          Products and rearrangements: inner, cross, kron, take_along_axis.
randomized    The largest singular values and vectors of a matrix by random projection.
register          Register our functions with Dask, for `np.sort(x)` of a dask array.
runs              How many sorted runs an array has, and which blocks go into each.
selection         Exact percentiles, quantiles, medians; partitions.
sorting           sort, argsort, lexsort.
sparse            Arrays of sparse blocks: from matrices and dense arrays, and back.
sparse_block      One sparse matrix that answers NumPy's functions, as a block.
sparse_dispatch   What Dask looks up by the type of a chunk, for sparse blocks.
sparse_matrices   What blocks ask of matrices of SciPy and CuPy.
splitters         Where to cut sorted runs for parts of exact lengths.
square            Systems of equations, inverses and determinants.
tall              QR, SVD, least squares and norms of matrices, by way of a tall matrix's QR.
tall_graph        The graph of the QR factorization of a tall matrix, and what follows from it.
tall_kernel       QR of a tall block by Cholesky factors of Gram matrices, with a fallback.
tall_tasks        Tasks of the graphs of `tall_graph`: what they do to a block, or to small factors.
"""
