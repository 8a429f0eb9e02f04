"""Copies between arrays on devices, and of results into one array."""

from __future__ import annotations

import math
from functools import cache
from itertools import accumulate, product
from typing import Any

import cupy
import numpy as np
from cupy.cuda import Device, Event, Stream, runtime
from dask.core import flatten

from ...codegen.cuda.device_library import ROWS_COPIED
from ...ir.expr import View
from ...runtime.gather import boxes

#: Bytes of a row and of all from which a kernel copies rows inside one GPU, and its threads and
#: lines of blocks.
LONG_ROW, MANY_ROWS, ROW_THREADS, ROW_LINES = 2**11, 2**20, 256, 8192
#: Blocks of one shape from which on one launch copies them into an array.
MANY_ALIKE = 8


@cache
def _rows_copier() -> Any:
    """CUDA's own copy of rows inside one GPU reaches 58 % of what this does (measured, H100)."""
    return cupy.RawKernel(ROWS_COPIED, "copy_rows")


def _kernel_copies(kind: int, width: int, rows: int, *places: int) -> bool:
    """Whether our own kernel copies rows, of so many bytes, which lie at and between `places`."""
    many = width >= LONG_ROW and width * rows >= MANY_ROWS
    even = not any(n % 16 for n in (width, *places))
    return kind == runtime.memcpyDeviceToDevice and many and even


def _copy_rows(
    to: int, pitch: int, source: int, width: int, rows: int, kind: int, stream: Stream
) -> None:
    """Rows of `width` bytes: one behind the other in `source`, `pitch` bytes apart in `to`."""
    if rows == 1:
        runtime.memcpyAsync(to, source, width, kind, stream.ptr)
    elif _kernel_copies(kind, width, rows, to, pitch, source):
        words, most = width // 16, ROW_THREADS * 4
        grid = -(-words // most), min(rows, ROW_LINES)
        given = to, np.uint64(pitch), source, np.uint64(words), np.uint64(rows)
        with stream:
            _rows_copier()(grid, (ROW_THREADS,), given)
    else:
        runtime.memcpy2DAsync(to, pitch, source, width, width, rows, kind, stream.ptr)


def _copy_planes(
    to: int, pitch: int, apart: int, source: int, width: int, rows: int, planes: int, kind: int,
    stream: Stream,
) -> None:  # fmt: skip
    """So many times rows as `_copy_rows` copies, `apart` bytes apart in `to`."""
    if planes == 1 or _kernel_copies(kind, width, rows, to, pitch, apart, source):
        for n in range(planes):
            _copy_rows(to + n * apart, pitch, source + n * rows * width, width, rows, kind, stream)
        return
    words = np.zeros(20, np.uint64)  # cudaMemcpy3DParms: arrays, positions, pitched pointers
    words[4:8] = source, width, width, rows
    words[12:16] = to, pitch, width, apart // pitch
    words[16:] = width, rows, planes, kind
    runtime.memcpy3DAsync(words.ctypes.data, stream.ptr)


def copy_to_address(part: Any, to: int, block: Any, kind: int, stream: Stream) -> None:
    """A C-contiguous array, to a part of a larger array, which is at `to`."""
    source = block.data.ptr
    for box in boxes(part.shape, part.strides, block.dtype.itemsize):
        there, here, width, rows, pitch, planes, apart = box
        here += source
        _copy_planes(to + there, pitch, apart, here, width, rows, planes, kind, stream)


def copy_block(block: Any, part: Any, stream: Stream) -> None:
    """A C-contiguous array, to a part of another one on its device."""
    copy_to_address(part, part.data.ptr, block, runtime.memcpyDeviceToDevice, stream)


def byte_offset(where: tuple[slice, ...], strides: tuple[int, ...]) -> int:
    """The bytes in front of a part of an array."""
    return sum([s.start * n for s, n in zip(where, strides, strict=True)])


def bring_contiguous(block: Any, device: int, stream: Stream) -> Any:
    """A block as a C-contiguous array on the current device, on `stream`."""
    source, there = block.device.id, None
    if not block.flags.c_contiguous:
        made = Event(disable_timing=True)
        made.record(stream)  # which is behind the block's making; that other one may not be
        with Device(source):
            there = cupy.cuda.get_current_stream()
            there.wait_event(made)
            block = cupy.ascontiguousarray(block)
            event = Event(disable_timing=True)
            event.record(there)
        stream.wait_event(event)
    if source == device:
        return block
    out = cupy.empty(block.shape, block.dtype)
    runtime.memcpyPeerAsync(out.data.ptr, device, block.data.ptr, source, block.nbytes, stream.ptr)
    if there is not None:  # the copy that was made there may go only behind this one
        done = Event(disable_timing=True)
        done.record(stream)
        with Device(source):
            there.wait_event(done)
    return out


def copy_to_device(v: Any, device: int, stream: Stream) -> Any:
    """Copy a CuPy array of another GPU to the current device, on `stream`.

    The copy waits for the current stream of the array's device. Other values are returned as they
    are.
    """
    if not isinstance(v, cupy.ndarray) or v.device.id == device:
        return v
    order_behind(stream, v.device.id)
    return bring_contiguous(v, device, stream)


def order_behind(stream: Stream, device: int) -> None:
    """Order a stream behind what the current stream of a device has queued."""
    with Device(device):
        made = Event(disable_timing=True)
        made.record(cupy.cuda.get_current_stream())
    stream.wait_event(made)


def block_grid(blocks: Any, ndim: int) -> tuple[tuple[int, ...], list[tuple[slice, ...]]] | None:
    """The shape of the whole and the slices of each block; None where blocks do not line up."""
    counts, flat = count_blocks(blocks), list(flatten([blocks]))
    if len(counts) != ndim or len(flat) != math.prod(counts):
        return None
    if any(b.ndim != ndim for b in flat):
        return None
    steps = View.contiguous(counts).strides
    lengths = [
        [flat[i * step].shape[axis] for i in range(n)]
        for axis, (n, step) in enumerate(zip(counts, steps, strict=True))
    ]
    if any(b.shape != shape for b, shape in zip(flat, product(*lengths), strict=True)):
        return None
    slices = [
        [slice(end - n, end) for n, end in zip(own, accumulate(own), strict=True)]
        for own in lengths
    ]
    return tuple([sum(own) for own in lengths]), list(product(*slices))


def count_blocks(blocks: Any) -> tuple[int, ...]:
    out = []
    while isinstance(blocks, list):
        out.append(len(blocks))
        blocks = blocks[0]
    return tuple(out)


def blocks_in_box(blocks: Any, box: tuple[slice, ...]) -> Any:
    """The nested lists of the blocks in a box."""
    if not box:
        return blocks
    return [blocks_in_box(inner, box[1:]) for inner in blocks[box[0]]]
