"""Join the blocks of a result to one array, on a device or on the host."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from operator import mul
from typing import Any

import cupy
import numpy as np
from cupy.cuda import Stream, runtime
from dask.array.core import finalize
from dask.core import flatten

from ...errors import OutOfMemory
from ...ir.expr import View
from ...plan.plan import no_room
from ...runtime.gather import each_block
from ...sparse_parts import library_of
from ...values import map_deep_leaves
from . import copies as cuda_copies
from .arrays import Refused
from .copies import (
    MANY_ALIKE,
    block_grid,
    blocks_in_box,
    bring_contiguous,
    byte_offset,
    copy_block,
    copy_to_address,
    count_blocks,
    order_behind,
)
from .kernels import Kernels
from .pinned import PinnedBlocks


class BlockJoiner:
    """Joins blocks that runs have made to one array.

    It owns nothing: the array is the caller's. Copies are queued on the caller's current stream,
    behind the caller's streams of the blocks' devices. `order_reuse` orders later users of the
    blocks' memory behind a stream that reads them. `bring` waits until the array is on the host.
    """

    def __init__(
        self, kernels: Kernels, pinned: PinnedBlocks, order_reuse: Callable[[Stream], None]
    ):
        self._kernels, self._pinned, self._order_reuse = kernels, pinned, order_reuse

    def join(self, blocks: Any, made: Any = None) -> Any:
        """Join CuPy blocks to one array on the caller's current device; each is copied once.

        The array is `made` where some blocks already lie in it.
        """
        flat = list(flatten(blocks)) if isinstance(blocks, list) else [blocks]
        if not all(type(b) is cupy.ndarray and b.dtype == flat[0].dtype for b in flat):
            return finalize(each_block(self._bring_sparse, blocks))
        parts = block_grid(blocks, flat[0].ndim)
        if parts is None:
            return finalize(blocks)
        shape, slots = parts
        dtype = flat[0].dtype
        here = runtime.getDevice()
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        left = list(zip(flat, slots, strict=True))
        like = shape, dtype, here
        try:
            if made is not None and (made.shape, made.dtype, made.device.id) == like:
                out = made
                begin, strides = out.data.ptr, out.strides
                left = [
                    (block, where) for block, where in left
                    if block.data.ptr != begin + byte_offset(where, strides)
                ]  # fmt: skip
            else:
                out = cupy.empty(shape, dtype)
        except Refused as error:
            raise OutOfMemory(no_room(nbytes, f"GPU {here}")) from error
        stream = cupy.cuda.get_current_stream()
        others = {block.device.id for block, _ in left} - {here}
        for device in others:
            # blocks are ordered behind their making on the caller's stream of their own device
            order_behind(stream, device)
        for block, where in self._copy_alike(left, out, here):
            part = out[where]
            if not block.flags.c_contiguous or block.device.id != here:
                block = bring_contiguous(block, here, stream)
            copy_block(block, part, stream)
        if left:
            self._order_reuse(stream)
        return out

    def _bring_sparse(self, block: Any) -> Any:
        """A sparse matrix on the caller's current device; other blocks as they are."""
        if library_of(type(block)) is None:
            return block
        device, stream = runtime.getDevice(), cupy.cuda.get_current_stream()
        return map_deep_leaves(lambda v: cuda_copies.copy_to_device(v, device, stream), block)

    def _copy_alike(self, blocks: list[Any], out: Any, here: int) -> list[Any]:
        """Copy many blocks of one shape by one launch. Returns the pairs still to be copied."""
        if len(blocks) < MANY_ALIKE:
            return blocks
        alike: dict[tuple[int, ...], list[Any]] = defaultdict(list)
        left: list[Any] = []
        for pair in blocks:
            block = pair[0]
            usual = block.size and block.ndim and block.flags.c_contiguous
            (alike[block.shape] if usual and block.device.id == here else left).append(pair)
        begin, strides, itemsize = out.data.ptr, out.strides, out.dtype.itemsize
        for shape, group in alike.items():
            pairs = [
                (block.data.ptr, begin + byte_offset(where, strides)) for block, where in group
            ]
            if len(group) < MANY_ALIKE or not self._kernels.copy(
                shape, strides, itemsize, pairs, here
            ):
                left += group
        return left

    def bring(self, blocks: Any, boxes: Sequence[tuple[slice, ...]] = (), made: Any = None) -> Any:
        """Copy blocks to one array in the host's pinned memory, and wait for it.

        Boxes of blocks are joined on their devices before (see `join`).
        """
        flat = list(flatten([blocks]))
        if not isinstance(flat[0], cupy.ndarray):
            return self.join(blocks) if isinstance(blocks, list) else blocks
        first = flat[0].device
        if len(boxes) < 2 or all(b.device == first for b in flat):
            with first:
                array = self.join(blocks, made) if isinstance(blocks, list) else blocks
                return array.get(out=self._pinned.array(array.shape, array.dtype))
        parts = block_grid(blocks, flat[0].ndim)
        if parts is None or any(b.dtype != flat[0].dtype for b in flat):
            return finalize(each_block(self.bring, blocks))
        shape, slots = parts
        steps = View.contiguous(count_blocks(blocks)).strides
        out = self._pinned.array(shape, flat[0].dtype)
        held, devices = [], {}
        try:
            for box in boxes:
                inside = blocks_in_box(blocks, box)
                corners = [s.start for s in box], [s.stop - 1 for s in box]
                ends = [slots[sum(map(mul, corner, steps))] for corner in corners]
                part = out[tuple(slice(a.start, b.stop) for a, b in zip(*ends, strict=True))]
                device = next(iter(flatten([inside]))).device
                with device:
                    stream = cupy.cuda.get_current_stream()
                    devices[device.id] = device, stream
                    held.append(array := self.join(inside))
                    copy_to_address(
                        part, part.ctypes.data, array, runtime.memcpyDeviceToHost, stream
                    )
        finally:  # also of what is on its way where another has no room
            for device, stream in devices.values():
                with device:
                    stream.synchronize()
        return out
