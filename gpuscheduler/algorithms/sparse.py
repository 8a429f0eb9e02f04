"""Dask arrays of sparse blocks: made from dense arrays and matrices, and back again."""

from __future__ import annotations

import math
from importlib import import_module
from itertools import accumulate, product
from typing import Any

import dask.array as da
from dask import config
from dask._task_spec import DataNode
from dask.array.core import Array, concatenate_lookup, normalize_chunks
from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph
from dask.utils import parse_bytes

from ..sparse_parts import CUPYX, library_of
from .sparse_block import SparseBlock, as_block
from .sparse_dispatch import register_blocks
from .sparse_matrices import sparse_module

#: Formats that blocks may have. Anything but products of "dia" makes CSR of them.
FORMATS = "csr", "csc", "coo", "dia"


register_blocks()


def asarray(x: Any, format: str = "csr", chunks: Any = "auto") -> Array:
    """Return a dask array of sparse blocks, on which Dask's own functions work.

    Parameters
    ----------
    x : dask array or matrix, of shape (m, n)
        A dask array of dense blocks, or of blocks that are sparse matrices of `scipy.sparse`,
        `cupyx.scipy.sparse` or pydata's `sparse`; or one such matrix, or an array.
    format : {"csr", "csc", "coo", "dia"}
        How each block is stored. "csr" serves every operation, "dia" products of banded matrices.
        On GPUs only a matrix that is in DIA form already stays so.
    chunks
        How a matrix is cut, as in `dask.array.from_array`. "auto" cuts rows only, to blocks that
        store as much as Dask's `array.chunk-size`. A dask array keeps its chunks.

    Returns
    -------
    dask array
        With the shape and dtype of `x`. Duplicates are summed and indices sorted. Products,
        sums, means, norms, slices, index lists, rechunking and element-wise operations that keep
        zeros zero work. What would store every zero is refused, when it is computed.

    Raises
    ------
    ValueError
        If `x` has not two dimensions, or the format is unknown.

    Notes
    -----
    On this package's scheduler `compute` gives one matrix of SciPy or CuPy. Other schedulers of
    Dask give a `SparseBlock`, which has it as `matrix`; see `unwrap`.

    Examples
    --------
    >>> import numpy as np, scipy.sparse
    >>> import gpuscheduler
    >>> from gpuscheduler import sparse
    >>> s = sparse.asarray(scipy.sparse.eye_array(4, format="csr") * 2, chunks=(2, 4))
    >>> with gpuscheduler.Scheduler("cpu:2"):
    ...     print((s @ np.arange(4)).compute(), type((s + s.T).compute()).__name__)
    [0. 2. 4. 6.] csr_array
    """
    if format not in FORMATS:
        raise ValueError(f"format={format!r}: use one of {', '.join(FORMATS)}")
    if getattr(x, "ndim", None) != 2:
        raise ValueError(
            f"sparse.asarray: x has {getattr(x, 'ndim', 'no')} dimensions, and sparse blocks have 2"
        )
    if isinstance(x, Array):
        if type(x._meta) is SparseBlock and x._meta.matrix.format == format:
            return x
        made = (
            as_block(x._meta, format)
            if _is_matrix(x._meta)
            else _empty_block(x._meta, x.dtype, format)
        )
        return da.map_blocks(as_block, x, form=format, dtype=x.dtype, meta=made)
    return _cut_matrix(x, format, chunks)


def _is_matrix(meta: Any) -> bool:
    return library_of(type(meta)) is not None or hasattr(meta, "tocsr")


def _empty_block(like: Any, dtype: Any, form: str) -> SparseBlock:
    """A block without elements: on GPUs where `like` is CuPy's."""
    module = sparse_module(like)
    kind = getattr(module, "csr_array", module.csr_matrix)
    return as_block(kind((0, 0), dtype=dtype), form)


def _cut_matrix(x: Any, form: str, chunks: Any) -> Array:
    block = as_block(x)
    if isinstance(chunks, str):
        most = (
            parse_bytes(config.get("array.chunk-size")) if chunks == "auto" else parse_bytes(chunks)
        )
        count = max(1, math.ceil(block.nbytes / most))
        chunks = (max(1, math.ceil(block.shape[0] / count)), -1)
    cuts = normalize_chunks(chunks, block.shape, dtype=block.dtype)
    name = f"sparse-{tokenize(block, form, cuts)}"
    ends = [list(accumulate(c)) for c in cuts]
    graph: dict[Any, Any] = {}
    for i, j in product(*map(range, map(len, cuts))):
        where = tuple(slice(e[n] - c[n], e[n]) for n, e, c in zip((i, j), ends, cuts, strict=True))
        key = (name, i, j)
        graph[key] = DataNode(key, as_block(block[where], form))
    layers = HighLevelGraph.from_collections(name, graph)
    return Array(layers, name, cuts, meta=_empty_block(block.matrix, block.dtype, form))


def unwrap(x: Array, format: str | None = None) -> Array:
    """Return the array with matrices of SciPy or CuPy as blocks.

    `format` is that of the matrices: as they are stored where it is not given. For functions that
    know such matrices, in `map_blocks`, and for results on any scheduler.

    >>> import scipy.sparse
    >>> s = asarray(scipy.sparse.eye_array(4, format="csr"), chunks=2)
    >>> type(unwrap(s, "csc").compute(scheduler="sync")).__name__
    'csc_array'
    """
    _refuse_others("unwrap", x)
    # Dask cuts what says how blocks are, and not every format can be cut
    form = format or x._meta.matrix.format
    made = _unwrap_block(x._meta, form if form in ("csr", "csc") else "csr")
    return da.map_blocks(_unwrap_block, x, form=format, dtype=x.dtype, meta=made)


def todense(x: Array) -> Array:
    """Return the array with dense blocks of NumPy or CuPy, with every zero stored.

    >>> import scipy.sparse
    >>> da.exp(todense(asarray(scipy.sparse.eye_array(2)))).compute()[0, 1].item()
    1.0
    """
    _refuse_others("todense", x)
    return da.map_blocks(_dense_block, x, dtype=x.dtype, meta=x._meta.xp.empty((0, 0), x.dtype))


def matmul(a: Any, b: Any) -> Array:
    """Return `a @ b`, of which one or both have sparse blocks, on any scheduler.

    As `a @ b`. On GPUs Dask's schedulers need this for a dense `a`: Dask asks CuPy, which knows no
    sparse blocks.

    >>> import scipy.sparse
    >>> s = asarray(scipy.sparse.eye_array(4) * 3, chunks=2)
    >>> matmul(da.ones((2, 4), chunks=2), s).compute()[0].tolist()
    [3.0, 3.0, 3.0, 3.0]
    """
    return da.tensordot(da.asanyarray(a), da.asanyarray(b), axes=((-1,), (0,)))


def _refuse_others(name: str, x: Any) -> None:
    if not isinstance(x, Array) or type(x._meta) is not SparseBlock:
        what = (
            f"a dask array of {type(x._meta).__name__}"
            if isinstance(x, Array)
            else type(x).__name__
        )
        raise TypeError(
            f"sparse.{name}: x is {what}, not of sparse blocks: use sparse.asarray first"
        )


def _unwrap_block(block: Any, form: str | None) -> Any:
    if library_of(type(block.matrix)) == CUPYX:
        register_cupyx()
    return block.matrix if form is None else block.matrix.asformat(form)


def _dense_block(block: Any) -> Any:
    return block.toarray()


def register_cupyx() -> None:
    """Have Dask join CuPy's sparse arrays, as it joins its sparse matrices."""
    kind = getattr(import_module(CUPYX), "sparray", None)
    if kind is not None:
        any_type = concatenate_lookup.dispatch(object)
        if concatenate_lookup.dispatch(kind) is any_type:
            concatenate_lookup.register(kind, _join_cupyx)


def _join_cupyx(blocks: Any, axis: int = 0) -> Any:
    module = import_module(CUPYX)
    return (module.hstack if axis else module.vstack)(list(blocks))
