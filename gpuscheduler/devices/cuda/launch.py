"""What a launch needs: pointers, workspace, and kernels ready to be queued."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import cupy
import numpy as np

from ...codegen.cuda.kernel import KernelSource
from ...fusion.task import fill_result
from ...ir.expr import Kernel, Out, Program, source
from ...plan.batching import Batch

#: Programs of which the launches are kept prepared.
MOST_PROGRAMS = 4096


@dataclass(slots=True)
class PreparedKernel:
    """One kernel on one device, with all that is the same at each of its launches."""

    function: Any
    generated: KernelSource
    most: int  # items that it takes: 1, or `generated.most`
    void: Any  # dtype of the one argument
    outputs: tuple[tuple[int, tuple[int, ...], Any], ...]  # slot, shape and dtype
    sizes: tuple[int, ...]  # bytes of each
    positions: tuple[tuple[int, int], ...]  # slots that hold a placeholder, and which
    given: int  # the program's own arrays; those with higher numbers its kernels make


class PreparedProgram(NamedTuple):
    """A program as it runs on a device: with what is computed once in kernels of its own."""

    program: Program
    kernels: list[PreparedKernel]
    small: tuple[int, ...]  # bytes of each array that it makes, where these are several small ones


class Workspace:
    """Memory that the kernels of one stream use one after the other."""

    def __init__(self) -> None:
        self.scratch: Any = None
        self.counters: Any = None

    def scratch_at(self, nbytes: int) -> int:
        if self.scratch is None or self.scratch.nbytes < nbytes:
            self.scratch = cupy.empty(max(nbytes, 2**20), np.uint8)
        return int(self.scratch.data.ptr)

    def counters_at(self, count: int) -> int:
        """Counters that are zero: each kernel leaves them so."""
        if self.counters is None or self.counters.size < count:
            self.counters = cupy.zeros(max(count, 2**14), np.uint32)
        return int(self.counters.data.ptr)


#: Whether all arrays of a kernel begin at multiples of 16 bytes, and whether those it makes do.
Aligned = tuple[bool, bool]
ALIGNED: Aligned = (True, True)


class SmallArrayRoom:
    """Memory for small arrays that are made together: one copy takes them all elsewhere."""

    __slots__ = ("memory",)

    def __init__(self, sizes: Sequence[int], count: int = 1):
        self.memory: Any = cupy.cuda.alloc(sum([round_up(n * count) for n in sizes]))

    def array(self, shape: tuple[int, ...], dtype: Any, nbytes: int) -> Any:
        out = cupy.ndarray(shape, dtype, self.memory)
        self.memory = self.memory + round_up(nbytes)
        return out


def round_up(nbytes: int) -> int:
    return -(-nbytes // 256) * 256


@lru_cache(MOST_PROGRAMS)
def copy_program(shape: tuple[int, ...], strides: tuple[int, ...], unit: int) -> Program:
    """What copies a C-contiguous array of words of so many bytes to where it has these strides."""
    steps = tuple([n // unit for n in strides])
    kernel = Kernel(shape, (source(0, shape, f"u{unit}"),), strides=steps)
    return Program(1, (kernel,), Out(1, shape))


def batch_value(program: Program, made: list[Any]) -> Any:
    """The values of alike tasks from the outputs of their kernels: lists, or arrays."""
    before = [None] * program.inputs  # no result of a program is one of its inputs
    result = program.result
    if isinstance(result, Out):
        every = made[result.array - len(before)]
        return tuple(every) if isinstance(every, list) else every
    return tuple(
        [fill_result(program, [*before, *items], False) for items in zip(*made, strict=True)]
    )


def argument_rows(kernel: PreparedKernel, positions: Sequence[tuple[int, ...]]) -> Any:
    """The arguments of a kernel for several items, without inputs and outputs.

    It has room for as many items as a launch takes.
    """
    count, most = len(positions), kernel.most
    slots = np.zeros((-(-count // most) * most, kernel.generated.slots.size), np.uint64)
    slots[:count] = kernel.generated.slots
    for slot, n in kernel.positions:
        slots[:count, slot] = [p[n] for p in positions]
    return slots


def begin_arguments(
    kernel: PreparedKernel, pointers: list[list[int]], positions: list[tuple[int, ...]]
) -> Any:
    """The arguments of a kernel for several items, without what is new at each launch."""
    slots = argument_rows(kernel, positions)
    for slot, n, offset in kernel.generated.inputs:
        if n < kernel.given:
            slots[: len(pointers), slot] = [p[n] + offset for p in pointers]
    return slots


def queue(kernel: PreparedKernel, slots: Any, begun: Any, count: int, work: Workspace) -> None:
    """Launch a kernel for `count` items; `begun` remembers the arguments for later launches."""
    made, most, function, void = kernel.generated, kernel.most, kernel.function, kernel.void
    items = min(count, most)
    if made.scratch is not None:
        slot, nbytes = made.scratch
        nbytes = round_up(nbytes)
        _spread(slots, begun, slot, work.scratch_at(nbytes * items), nbytes, most)
    if made.counters is not None:
        slot, n = made.counters
        _spread(slots, begun, slot, work.counters_at(n * items), 4 * n, most)
    for start in range(0, count, most):
        argument = slots[start : start + most].reshape(-1).view(void)[0]
        grid = made.blocks, min(most, count - start), 1
        function(grid, (made.threads, 1, 1), (argument,))


def _spread(slots: Any, begun: Any, slot: int, begin: int, nbytes: int, most: int) -> None:
    """Give the items of each launch memory of their own, from `begin` on."""
    if slots[0, slot] != begin:
        places = [begin + i % most * nbytes for i in range(len(slots))]
        slots[:, slot] = begun[:, slot] = places


def batch_pointers(
    batch: Batch, values: dict[Any, Any], device: int
) -> tuple[list[list[int]] | None, bool]:
    """The addresses of each member's arrays, and whether all are aligned.

    None where some arrays differ from the plan's.
    """
    out = []
    aligned = True
    for fused in batch.members:
        arrays = fused.arrays(values)
        if arrays is None or not all_on_device(arrays, device):
            return None, False
        pointers = [a.data.ptr for a in arrays]
        aligned = aligned and not any(p % 16 for p in pointers)
        out.append(pointers)
    return out, aligned


def all_on_device(arrays: list[Any], device: int) -> bool:
    return all(type(a) is cupy.ndarray and a.data.device_id == device for a in arrays)
