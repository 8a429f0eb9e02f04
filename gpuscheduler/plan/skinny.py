"""Multiply small integers with few columns of floating-point numbers, on the current device.

The kernels and when they are worth it are in `codegen.cuda.skinny`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from ..codegen.cuda.skinny import (
    FACTORS,
    FEWEST,
    INTEGERS,
    MOST_COLUMNS,
    make_geometry,
    make_source,
)

#: Bytes of converted integers at one time, where no kernel can multiply them.
CONVERTED = 2**28


def is_skinny(left: Any, right: Any) -> bool:
    """Whether two matrices are integers and few columns, or few rows and integers.

    >>> is_skinny(np.ones((2048, 512), "u1"), np.ones((512, 20)))
    True
    >>> is_skinny(np.ones((2048, 512), "u1"), np.ones((512, 200)))
    False
    """
    if right.dtype.char in INTEGERS:
        left, right = right.T, left.T
    known = left.dtype.char in INTEGERS and right.dtype.char in FACTORS
    return known and 0 < right.shape[1] <= MOST_COLUMNS


def multiply_skinny(left: Any, right: Any) -> Any:
    """Return left @ right in double precision, for CuPy's matrices that `is_skinny` accepts."""
    if right.dtype.char in INTEGERS:
        return multiply_skinny(right.T, left.T).T
    size = left.itemsize
    turned = left.strides[1] != size
    stored = left.T if turned else left
    pitch = stored.strides[0]
    regular = stored.strides[1] == size and pitch % size == 0 and pitch >= stored.shape[1] * size
    if left.size < FEWEST or not regular:
        return _convert_and_multiply(left, right)
    return _launch(left, right, stored, turned)


def _launch(left: Any, right: Any, stored: Any, turned: bool) -> Any:
    import cupy

    device = cupy.cuda.runtime.getDevice()
    processors, capability = _properties(device)
    if capability < 80:
        return _convert_and_multiply(left, right)
    pitch, size, columns = stored.strides[0], stored.itemsize, right.shape[1]
    even = stored.data.ptr % 16 == 0 and pitch % 16 == 0
    length, inner = left.shape
    kernel, threads, blocks, share = make_geometry(turned, length, inner, processors)
    source = make_source(kernel, left.dtype, right.dtype.char, columns, even, capability)
    function = _function(device, source, kernel)
    out = cupy.empty((blocks[1], length, columns))
    down, along = (n // right.itemsize for n in right.strides)
    function(
        blocks, (threads,),
        (
            stored, np.int64(pitch // size), right, np.int64(down), np.int64(along), out,
            np.int64(length), np.int64(inner), np.int32(columns), np.int64(share),
        ),
    )  # fmt: skip
    return out[0] if blocks[1] == 1 else out.sum(axis=0)


def _convert_and_multiply(left: Any, right: Any) -> Any:
    """The product by the library, with some rows of the integers converted at a time."""
    import cupy

    rows = max(1, CONVERTED // (8 * max(1, left.shape[1])))
    right = right.astype(np.float64)
    parts = [left[n : n + rows].astype(np.float64) @ right for n in range(0, len(left), rows)]
    return parts[0] if len(parts) == 1 else cupy.concatenate(parts)


@lru_cache
def _properties(device: int) -> tuple[int, int]:
    """The multiprocessors of a device, and its compute capability: 90 for 9.0."""
    import cupy

    found = cupy.cuda.Device(device)
    return int(found.attributes["MultiProcessorCount"]), int(found.compute_capability)


@lru_cache(maxsize=64)
def _function(device: int, source: str, kernel: str) -> Any:
    """A kernel, compiled and loaded on the current device."""
    import cupy

    return cupy.RawModule(code=source, options=("-std=c++17",)).get_function(kernel)
