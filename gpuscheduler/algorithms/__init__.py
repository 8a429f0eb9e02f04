"""Algorithms that `dask.array` lacks, as plain graphs for any Dask scheduler.

blocks     Keys, chunks and array modules of the blocks of an array.
products   Products and rearrangements: inner, cross, kron, take_along_axis.
register   Register our functions with Dask, for `np.sort(x)` of a dask array.
"""
