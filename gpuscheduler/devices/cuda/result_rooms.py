"""Result rooms: the memory of a whole result, into which steps write their blocks."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import cupy

from ...frontend.task import members_of
from ...fusion.task import KernelTask
from ...ir.expr import View, is_contiguous
from ...plan.plan import Plan
from ...runtime.gather import ResultAssembly
from .kernels import Kernels

#: Bytes that are copied sooner at once than in parts, whatever lies between these.
CLOSE = 2**16


def one_copy_pays(size: int, nbytes: int) -> bool:
    """Whether so many bytes are copied sooner all at once, with what lies between them."""
    return size <= max(CLOSE, 2 * nbytes)


#: Bytes of a result from which its parts are written to where they belong.
LEAST_WHOLE = 2**24


class ResultRoom(NamedTuple):
    """The memory of a result into which the steps of one place write their parts.

    `parts` has the offset in elements and the shape, by step.
    """

    place: int
    shape: tuple[int, ...]
    nbytes: int
    dtype: Any  # None where no kernel says it: of the first part that there is
    parts: dict[int, tuple[int, tuple[int, ...]]]
    tasks: dict[
        int, KernelTask
    ]  # those that write it there themselves, with the strides of the whole

    @property
    def strides(self) -> tuple[int, ...]:
        """In bytes."""
        return tuple([n * self.dtype.itemsize for n in View.contiguous(self.shape).strides])

    def offset_of(self, i: int) -> int:
        """Bytes in front of a part."""
        return self.parts[i][0] * int(self.dtype.itemsize)

    def memory(self) -> Any:
        """Memory for the result, on the current device and stream."""
        return cupy.cuda.alloc(self.nbytes)

    def whole_array(self, memory: Any) -> Any:
        return cupy.ndarray(self.shape, self.dtype, memory)

    def part(self, i: int, memory: Any) -> Any:
        return cupy.ndarray(self.parts[i][1], self.dtype, memory + self.offset_of(i), self.strides)

    def with_dtype(self, dtype: Any) -> ResultRoom | None:
        """The same, where its parts turn out to be of this type; None where they cannot be."""
        fits = math.prod(self.shape) * dtype.itemsize == self.nbytes
        return self._replace(dtype=dtype) if fits else None


def rooms_of(
    plan: Plan, assembly: ResultAssembly, place: int | None, kernels: Kernels
) -> ResultRoom | None:
    """The parts of a result that steps of a place make for nothing else; None without any."""
    whole = assembly.whole_result()
    if whole is None or place is None or len(whole.parts) < 2:
        return None
    strides = View.contiguous(whole.shape).strides
    parts, tasks, types = {}, {}, set[Any]()
    for i, slots in whole.parts.items():
        step, task, part = plan.steps[i], plan.steps[i].task, slots[-1]
        if plan.readers[i] or step.place != place or step.fixed or step.aside or i in plan.lent:
            continue
        if members_of(task):  # several blocks
            continue
        shape = tuple([s.stop - s.start for s in part])
        parts[i] = sum([s.start * n for s, n in zip(part, strides, strict=True)]), shape
        if not isinstance(task, KernelTask) or task.array is None or task.array[0] != shape:
            continue
        types.add(task.array[1])
        (kernel,), program = task.program.kernels, task.program
        if not is_contiguous(View(0, strides), shape):
            if kernel.output_shape != kernel.shape or shape != kernel.shape:
                continue
            program = kernels.with_strides(program, strides)
        tasks[i] = task.with_program(program)
    if len(types) > 1 or not parts:
        return None
    if types:
        (dtype,) = types
        nbytes = math.prod(whole.shape) * dtype.itemsize
    else:
        dtype = None
        nbytes = sum([plan.steps[i].nbytes * len(slots) for i, slots in whole.parts.items()])
    if nbytes < LEAST_WHOLE:
        return None
    return ResultRoom(place, whole.shape, nbytes, dtype, parts, tasks)
