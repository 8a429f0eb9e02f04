"""Assemble a result: each device writes its blocks into one host array.

Dask would concatenate them in one task, on one device, after the last block. Here the array is
allocated when the first block arrives, and each block is copied to its slice by its own device.
Blocks that do not fit the plan (other shapes, other types than plain arrays) are left to Dask.

`ResultAssembly.whole_result` gives the place of each block in a result on devices: steps can write
their blocks there (`devices/cuda/result_rooms.py`). It does the same for a result for the host that
one device puts together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import accumulate, product
from typing import Any, NamedTuple

import numpy as np
from dask.array.core import finalize
from dask.core import flatten

from ..errors import OutOfMemory
from ..forks import new_lock
from ..frontend.graph import GatherTask
from ..plan.plan import Plan

Slices = tuple[slice, ...]

#: CUDA copies rows that are less than so many bytes apart; what is wider goes row by row.
WIDEST = 2**31


class ResultTarget:
    """One result array. `empty(shape, dtype)` allocates it, once, when its dtype is known."""

    def __init__(self, gather: GatherTask, empty: Callable[..., Any] = np.empty):
        assert gather.chunks is not None
        self.shape = tuple(sum(c) for c in gather.chunks)
        self.empty = empty
        self.array: Any = None
        self.of_devices = False  # whether a block was an array of a device
        self.written: set[Any] = set()  # keys of the blocks that are in the array
        self._lock = new_lock()

    def room(self, slices: Slices, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return the part of the array for a block; None where shape or dtype differ."""
        if shape != tuple(s.stop - s.start for s in slices):
            return None
        with self._lock:
            if self.array is None:
                self.array = self.empty(self.shape, dtype)
        return self.array[slices] if self.array.dtype == dtype else None

    def write(self, key: Any, slices: Slices, block: Any) -> bool:
        """Copy a NumPy block to its place; False where it does not belong there."""
        if type(block) is not np.ndarray:
            return False
        part = self.room(slices, block.shape, block.dtype)
        if part is None:
            return False
        if _address(part) != _address(block) or part.strides != block.strides:
            part[...] = block
        self.written.add(key)
        return True


def _address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


class DeviceResult(NamedTuple):
    """A result that is one array of devices': its shape, and the parts that each step makes."""

    shape: tuple[int, ...]
    parts: dict[int, list[Slices]]


class ResultAssembly:
    """All the results of one plan that are gathered, and where each step's value goes."""

    def __init__(
        self,
        plan: Plan,
        alias: dict[Any, Any],
        empty: Callable[..., Any] = np.empty,
        join: Callable[..., Any] = finalize,
        free: Callable[[int], int] = lambda place: 0,
        bring: Callable[..., Any] | None = None,
        send: Callable[[Any], Any] | None = None,
    ):
        self.plan, self.alias, self.join = plan, alias, join
        #: What is like `join`, and brings what that makes to the host: of all blocks with the boxes
        #: that are put together on their devices, or one block.
        self.bring = bring
        self.send = send  # brings an array of the host to the caller's device
        #: Gives the bytes of a place that a run which follows a tape may take.
        self.free = free
        #: Peak bytes of the places for which the tape's own are not true.
        self.tape_peak: dict[int, int] = {}
        #: The `ResultRoom` whose parts steps write themselves, if there is one.
        self.rooms: Any = None
        self.made: Any = None  # the only result, where a device has put it together
        self.targets: dict[Any, ResultTarget] = {}
        self.slots: dict[int, list[tuple[ResultTarget, Any, Slices]]] = {}
        for key, gather in plan.gathers.items():
            if not gather.to_host or gather.chunks is None or (gather.together and bring):
                continue
            target = self.targets[key] = ResultTarget(gather, empty)
            for block, slices in _slots(gather):
                i = plan.index.get(alias.get(block, block))
                if i is not None:
                    self.slots.setdefault(i, []).append((target, block, slices))

    def write(self, step: int, block: Any) -> bool:
        """Write a step's value into its results; False if the value is still needed itself."""
        written = [t.write(key, where, block) for t, key, where in self.slots.get(step, ())]
        return bool(written) and all(written)

    def room(self, step: int, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return the part of a result into which a step may write its value.

        None where no result or several need the value, or where it does not fit.
        """
        slots = self.slots.get(step, ())
        if len(slots) != 1:
            return None
        ((target, _, where),) = slots
        return target.room(where, shape, dtype)

    def whole_result(self) -> DeviceResult | None:
        """The result, where it is the only one, and put together on a device."""
        if len(self.plan.gathers) != 1:
            return None
        (gather,) = self.plan.gathers.values()
        if (gather.to_host and len(gather.together) != 1) or gather.chunks is None:
            return None
        found: dict[int, list[Slices]] = {}
        for block, part in _slots(gather):
            found.setdefault(self.plan.index.get(self.alias.get(block, block), -1), []).append(part)
        if found.keys() != self.plan.result_steps:
            return None
        return DeviceResult(tuple(sum(c) for c in gather.chunks), found)

    def result(self, gather: GatherTask, value: Callable[[Any], Any]) -> Any:
        """Return the finished array; `value` returns the blocks that were not written, by key."""
        target = self.targets.get(gather.key)
        if target is not None:
            array = self._write_missing(gather, target, value)
            if self.send is None or gather.converted or not target.of_devices:
                return array
            # what the blocks are decides, as with one block, and as Dask's schedulers have it
            return self.send(array) if type(array) is np.ndarray else array
        blocks = each_block(value, gather.blocks)  # what comes next is behind these
        made = () if self.made is None else (self.made,)
        # a NumPy array of GPUs' blocks whose lengths were not known is put together there, too
        apart = gather.together or not gather.to_host
        bring = self.bring if apart and gather.converted else None
        if bring is None:
            return self.join(blocks, *made)
        with suppress(OutOfMemory):
            if len({*map(type, flatten([blocks]))}) == 1:
                return bring(blocks, gather.together, *made)
        return finalize(each_block(bring, blocks))

    def _write_missing(
        self, gather: GatherTask, target: ResultTarget, value: Callable[[Any], Any]
    ) -> Any:
        """The array of a target, with those blocks that were not written before."""
        for key, slices in _slots(gather):
            if key not in target.written:
                target.write(key, slices, value(key))
        if len(target.written) == len(set(flatten(gather.blocks))):
            return target.array
        where = dict(_slots(gather))

        def block(key: Any) -> Any:
            return target.array[where[key]] if key in target.written else value(key)

        return self.join(each_block(block, gather.blocks))


def strips(
    shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int
) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield the copies of a C-contiguous block into a strided part of a larger C-ordered array.

    Yields two-dimensional copies: (offset in the part, offset in the block, bytes in a row, rows,
    bytes from row to row in the part).

    >>> list(strips((2, 3), (80, 8), 8))
    [(0, 0, 24, 2, 80)]
    >>> list(strips((2, 10), (80, 8), 8))
    [(0, 0, 160, 1, 160)]
    """
    for to, at, width, rows, pitch, planes, apart in boxes(shape, strides, itemsize):
        for n in range(planes):
            yield to + n * apart, at + n * rows * width, width, rows, pitch


def boxes(
    shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int
) -> Iterator[tuple[int, int, int, int, int, int, int]]:
    """Three-dimensional copies of a block into its part of the array.

    Each is as of `strips`, with the number of planes of such rows, and the bytes from plane to
    plane in the part.

    >>> list(boxes((5, 2, 3), (400, 80, 8), 8))
    [(0, 0, 24, 2, 80, 5, 400)]
    """
    if 0 in shape:
        return
    width, axis = itemsize, len(shape)
    while axis and (strides[axis - 1] == width or shape[axis - 1] == 1):
        axis -= 1
        width *= shape[axis]
    if not axis:
        yield 0, 0, width, 1, width, 1, 0
        return
    rows, pitch, planes, apart = shape[axis - 1], strides[axis - 1], 1, 0
    outer = shape[: axis - 1]
    if pitch >= WIDEST:
        outer, rows = shape[:axis], 1
    elif outer and 0 < pitch <= strides[axis - 2] and not strides[axis - 2] % pitch:
        outer, planes, apart = shape[: axis - 2], shape[axis - 2], strides[axis - 2]
    for n, index in enumerate(product(*map(range, outer))):
        offset = sum(i * s for i, s in zip(index, strides, strict=False))
        yield offset, n * planes * rows * width, width, rows, pitch, planes, apart


def _slots(gather: GatherTask) -> Iterator[tuple[Any, Slices]]:
    assert gather.chunks is not None
    ranges = [
        [slice(b - n, b) for n, b in zip(c, accumulate(c), strict=True)] for c in gather.chunks
    ]
    return zip(flatten(gather.blocks), product(*ranges), strict=True)


def each_block(f: Callable[[Any], Any], blocks: Any) -> Any:
    """Apply a function to each block in nested lists."""
    return [each_block(f, b) for b in blocks] if isinstance(blocks, list) else f(blocks)
