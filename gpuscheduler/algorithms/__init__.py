"""Algorithms that `dask.array` lacks, as plain graphs for any Dask scheduler.

blocks     Keys, chunks and array modules of the blocks of an array.
"""
