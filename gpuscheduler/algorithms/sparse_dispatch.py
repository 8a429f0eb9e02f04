"""Register sparse blocks with Dask, which looks up by type what it does with chunks."""

from __future__ import annotations

import math
from importlib import import_module
from typing import Any

import numpy as np
from dask.array.chunk_types import register_chunk_type
from dask.array.dispatch import (
    concatenate_lookup,
    nannumel_lookup,
    numel_lookup,
    take_lookup,
    tensordot_lookup,
    to_cupy_dispatch,
    to_numpy_dispatch,
)
from dask.sizeof import sizeof as dask_sizeof

from ..sparse_parts import CUPY_DTYPES
from ..values import map_deep_leaves
from .sparse_block import (
    SparseBlock,
    concatenate,
    reduce_sum,
    reduced_axes,
    reduced_shape,
    take,
    tensordot,
)


def _count(block: SparseBlock, **given: Any) -> Any:
    """How many elements are reduced, as an array of the block's library."""
    axes = reduced_axes(block, given.get("axis"))
    made = math.prod(block.shape[a] for a in axes)
    shape = reduced_shape(block, axes, given.get("keepdims"))
    return block.xp.full(shape, made, given.get("dtype", np.float64))


def _count_numbers(block: SparseBlock, **given: Any) -> Any:
    """How many elements that are not NaN are reduced."""
    unknown: Any = np.isnan(block)  # type: ignore[call-overload]
    missing = reduce_sum(unknown, given.get("axis"), np.float64, given.get("keepdims"))
    return _count(block, **given) - missing


def to_host(block: SparseBlock, **_: Any) -> SparseBlock:
    """The block on the host."""
    return block.replace_matrix(
        map_deep_leaves(lambda a: a.get() if hasattr(a, "get") else a, block.matrix)
    )


def to_device(block: SparseBlock, **_: Any) -> SparseBlock:
    """The block on CuPy's current device."""
    if block.dtype.char not in CUPY_DTYPES:
        raise TypeError(
            f"CuPy has no sparse matrices of {block.dtype}, only of bool, float32, float64, "
            "complex64 and complex128: use astype"
        )
    cupy = import_module("cupy")
    return block.replace_matrix(map_deep_leaves(cupy.asarray, block.matrix))


def load_block(matrix: Any, unit: int | None) -> SparseBlock:
    """What a pickled block calls: whoever gets one has it registered with Dask."""
    return SparseBlock(matrix, unit)


def register_blocks() -> None:
    """Register `SparseBlock` wherever Dask looks for functions of a chunk's type."""
    register_chunk_type(SparseBlock)
    concatenate_lookup.register(SparseBlock, concatenate)
    take_lookup.register(SparseBlock, take)
    tensordot_lookup.register(SparseBlock, tensordot)
    numel_lookup.register(SparseBlock, _count)
    nannumel_lookup.register(SparseBlock, _count_numbers)
    to_numpy_dispatch.register(SparseBlock, to_host)
    to_cupy_dispatch.register(SparseBlock, to_device)
    dask_sizeof.register(SparseBlock, lambda block: block.nbytes)


register_blocks()  # in a process that only loads blocks, too
