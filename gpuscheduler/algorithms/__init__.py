"""Algorithms that `dask.array` lacks, as plain graphs for any Dask scheduler.

blocks     Keys, chunks and array modules of the blocks of an array.
capacity   Devices and memory of the scheduler in use.
cholesky   Cholesky factorization, and solving by it.
cyclic     A rule that deals blocks to devices in turn.
lapack     Factorizations of one matrix by the library of its type.
lu         LU with partial pivoting over whole columns, and solving by it.
matrices   Arguments and results of functions of matrices.
products   Products and rearrangements: inner, cross, kron, take_along_axis.
register   Register our functions with Dask, for `np.sort(x)` of a dask array.
square     Systems of equations, inverses and determinants.
"""
