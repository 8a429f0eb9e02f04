"""Dask arrays whose blocks are sparse matrices, of SciPy or CuPy."""

from .algorithms.sparse import asarray, matmul, todense, unwrap
from .algorithms.sparse_block import SparseBlock

__all__ = ["SparseBlock", "asarray", "matmul", "todense", "unwrap"]
