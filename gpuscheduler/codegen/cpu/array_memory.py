"""Arrays as memory: every element in the order of its address, and where views lie in it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...ir.expr import View
from ...ir.regions import Box
from .accumulate import Array


class BufferMemory(NamedTuple):
    flat: Array  # every element from the lowest address to the highest
    first: int  # which of them is element [0, …, 0]


def memory_extent(array: Array) -> tuple[int, int]:
    if array.flags.c_contiguous:
        return 0, array.size - 1
    if not array.size:
        return 0, -1
    ends = [s // array.itemsize * (n - 1) for n, s in zip(array.shape, array.strides, strict=True)]
    return sum(e for e in ends if e < 0), sum(e for e in ends if e > 0)


def buffer_memory(array: Array) -> BufferMemory:
    if array.flags.c_contiguous:
        return BufferMemory(array.reshape(-1), 0)
    low, high = memory_extent(array)
    corner = array[tuple(slice(-1, None) if s < 0 else slice(0, 1) for s in array.strides)]
    shape, strides = (high - low + 1,), (array.itemsize,)
    return BufferMemory(np.lib.stride_tricks.as_strided(corner, shape, strides), -low)


def view_bounds(view: View, box: Box) -> tuple[int, int]:
    """Return the least and greatest element number of a view in a box that is not empty."""
    low = high = view.offset
    for stride, (start, stop) in zip(view.strides, box, strict=True):
        a, b = stride * start, stride * (stop - 1)
        low, high = low + min(a, b), high + max(a, b)
    return low, high
