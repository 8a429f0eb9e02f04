"""Launch the kernels of tasks, each with one argument, on the current device and stream."""

from __future__ import annotations

import itertools
import logging
import math
import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import cupy
import numpy as np

from ...errors import NotGenerated
from ...forks import new_rlock
from ...fusion.task import CompressTask, KernelTask, compute_program
from ...ir.expr import Program
from ...plan.batching import SMALL, Batch
from .kernel_code import CompileFailed, KernelCode
from .launch import (
    MOST_PROGRAMS,
    PreparedKernel,
    SmallArrayRoom,
    Workspace,
    all_on_device,
    argument_rows,
    batch_pointers,
    batch_value,
    begin_arguments,
    copy_program,
    queue,
)
from .numpy_fallback import SAID, call_unfused, move_for_kernel, move_values, own_failure


class Kernels:
    """Launches the kernels of a scheduler's tasks.

    It owns the code of the kernels, and remembers the programs for which none was to be had. It
    allocates what kernels write, and queues all on the current stream, in the order of the calls.
    With `fast_math` kernels are faster, and less exact than NumPy.
    """

    def __init__(self, fast_math: bool = False) -> None:
        self.code = KernelCode(fast_math)
        self._strided: dict[tuple[int, tuple[int, ...]], tuple[Program, Program]] = {}
        self._broken: dict[int, Program] = {}
        self._lock = new_rlock()

    def run(
        self,
        fused: KernelTask,
        values: dict[Any, Any],
        device: int,
        work: Workspace,
        into: Any = None,
    ) -> Any:
        """Compute a fused task on the current device and stream.

        With `into`, the task's only array is written there, with the strides of `into`. Raises
        `LaunchFailed` for failures here, and not for those in operations of a task.
        """
        try:
            value = self._run(fused, values, device, work, into)
        except SAID as error:
            raise own_failure(error) from error
        return value() if type(value) is partial else value

    def _run(
        self,
        fused: KernelTask,
        values: dict[Any, Any],
        device: int,
        work: Workspace,
        into: Any = None,
    ) -> Any:
        """The value of a fused task; a `partial` that gives it where that takes no kernel."""
        program = fused.program
        if self.is_broken(program):
            return call_unfused(fused, fused.original, values)
        arrays = fused.arrays(values, cupy.ndarray)
        if arrays is None or not all_on_device(arrays, device):
            there = move_for_kernel(fused, values)
            if there is None:
                return call_unfused(fused, fused, values)
            return self._run(fused, there, device, work, into)
        if not arrays and not fused.makes_on_device:
            return call_unfused(fused, fused, values)
        pointers = [a.data.ptr for a in arrays]
        writes = into is None or not into.data.ptr % 16
        aligned = writes and not any(p % 16 for p in pointers)
        try:
            ready = self.code.get_prepared(program, device, (aligned, writes), single=True)
        except (CompileFailed, NotGenerated) as error:
            self._give_up(fused, error)
            return call_unfused(fused, fused.original, values)
        steps = iter(ready.kernels)
        room = SmallArrayRoom(ready.small) if ready.small else None

        def evaluate(_: Any, every: list[Any]) -> list[Any]:
            kernel = next(steps)
            target = into if kernel is ready.kernels[-1] else None
            return self._launch(kernel, pointers, fused.positions, work, room, target)

        return compute_program(ready.program, evaluate, arrays, scalars=False)

    def pick(self, task: CompressTask, values: dict[Any, Any], device: int, work: Workspace) -> Any:
        """Select elements by a mask, on the current device and stream.

        Waits until the number of elements is known. Raises `LaunchFailed` as `run` does.
        """
        try:
            value = self._pick(task, values, device, work)
        except SAID as error:
            raise own_failure(error) from error
        return value() if type(value) is partial else value

    def _pick(
        self, task: CompressTask, values: dict[Any, Any], device: int, work: Workspace
    ) -> Any:
        fused = task.fused
        program = fused.program
        if self.is_broken(program):
            return call_unfused(fused, task, values)
        arrays = fused.arrays(values, cupy.ndarray)
        if arrays is None or not all_on_device(arrays, device):
            there = move_for_kernel(fused, values)
            if there is None:
                return call_unfused(fused, task, values)
            return self._pick(task, there, device, work)
        pointers = [a.data.ptr for a in arrays]
        aligned = not any(p % 16 for p in pointers)
        try:
            counting, writing = self.code.get_prepared(
                program, device, (aligned, True), single=True
            ).kernels
        except (CompileFailed, NotGenerated) as error:
            self._give_up(fused, error)
            return call_unfused(fused, task, values)
        counts = cupy.empty(counting.generated.units, np.uint32)
        self._start(counting, pointers, fused.positions, [counts.data.ptr], work)
        ends = cupy.cumsum(counts, dtype=np.int64)
        dtype, itemsize = writing.outputs[1][2], writing.outputs[1][2].itemsize
        out = cupy.empty((int(ends[-1]), *task.columns), dtype)
        if out.size:
            first = out.data.ptr
            columns = [first + n * itemsize for n in range(len(writing.outputs) - 1)]
            self._start(writing, pointers, fused.positions, [ends.data.ptr, *columns], work)
        return out

    def _start(
        self,
        kernel: PreparedKernel,
        pointers: list[int],
        positions: tuple[int, ...],
        outs: list[int],
        work: Workspace,
    ) -> None:
        """Launch a kernel for a single item that reads and writes there."""
        made = kernel.generated
        slots = made.slots.copy()
        for slot, n, offset in made.inputs:
            slots[slot] = pointers[n] + offset
        for slot, pointer in zip(made.outputs, outs, strict=True):
            slots[slot] = pointer
        for slot, n in kernel.positions:
            slots[slot] = positions[n]
        if made.scratch is not None:
            slots[made.scratch[0]] = work.scratch_at(made.scratch[1])
        if made.counters is not None:
            slots[made.counters[0]] = work.counters_at(made.counters[1])
        kernel.function((made.blocks, 1, 1), (made.threads, 1, 1), (slots.view(kernel.void)[0],))

    def run_batch(
        self,
        batch: Batch,
        values: dict[Any, Any],
        device: int,
        work: Workspace,
        remember: bool = True,
    ) -> Any:
        """Compute alike tasks with one launch for each kernel of their program.

        Returns a tuple of values, or an array of them. Without `remember`, the arrays differ from
        those of the plan's other runs. Raises `LaunchFailed` as `run` does.
        """
        try:
            value = self._run_batch(batch, values, device, work, remember)
        except SAID as error:
            raise own_failure(error) from error
        return value() if type(value) is partial else value

    def _run_batch(
        self, batch: Batch, values: dict[Any, Any], device: int, work: Workspace, remember: bool
    ) -> Any:
        first = batch.members[0]
        known = batch.ready.get((device, id(self))) if remember else None
        if known is not None:
            ready, inputs, begun = known
        else:
            inputs, aligned = batch_pointers(batch, values, device)
            if (
                inputs is None
                or self.is_broken(first.program)
                or (not first.names and not first.makes_on_device)
            ):
                values = values if first.is_resident else move_values(values) or values
                return partial(self._run_each, batch, values, device, work)
            try:
                ready = self.code.get_prepared(first.program, device, (aligned, True), single=False)
            except (CompileFailed, NotGenerated) as error:
                self._give_up(first, error)
                return partial(self._run_each, batch, values, device, work)
            positions = [f.positions for f in batch.members]
            begun = [begin_arguments(kernel, inputs, positions) for kernel in ready.kernels]
            if batch.fixed and remember:
                batch.ready[device, id(self)] = ready, inputs, begun
        pointers = [list(p) for p in inputs]
        room = SmallArrayRoom(ready.small, len(pointers)) if ready.small else None
        made = [
            self._launch_all(kernel, slots, pointers, work, room)
            for kernel, slots in zip(ready.kernels, begun, strict=True)
        ]
        return batch_value(ready.program, [out for outputs in made for out in outputs])

    def _run_each(
        self, batch: Batch, values: dict[Any, Any], device: int, work: Workspace
    ) -> tuple[Any, ...]:
        return tuple([self.run(f, values, device, work) for f in batch.members])

    def _launch_all(
        self,
        kernel: PreparedKernel,
        begun: Any,
        pointers: list[list[int]],
        work: Workspace,
        room: SmallArrayRoom | None,
    ) -> list[Any]:
        """Launch a kernel for several items; each output is a list or an array of all.

        `begun` holds the arguments that are known before.
        """
        made, count = kernel.generated, len(pointers)
        slots = begun.copy()
        for slot, n, offset in made.inputs:
            if n >= kernel.given:  # the results of kernels before this one
                slots[:count, slot] = [p[n] + offset for p in pointers]
        outputs: list[Any] = []
        for (slot, shape, dtype), nbytes in zip(kernel.outputs, kernel.sizes, strict=True):
            out: Any
            if nbytes > SMALL:  # each is let go of by itself
                out = [cupy.ndarray(shape, dtype) for _ in range(count)]
                places = [a.data.ptr for a in out]
            else:
                every = count, *shape
                size = count * nbytes
                out = cupy.ndarray(every, dtype) if room is None else room.array(every, dtype, size)
                begin = out.data.ptr
                places = [begin + i * nbytes for i in range(count)]
            for p, place in zip(pointers, places, strict=True):
                p.append(place)
            slots[:count, slot] = places
            outputs.append(out)
        queue(kernel, slots, begun, count, work)
        return outputs

    def _launch(
        self,
        kernel: PreparedKernel,
        pointers: list[int],
        positions: tuple[int, ...],
        work: Workspace,
        room: SmallArrayRoom | None,
        into: Any,
    ) -> list[Any]:
        outputs = []
        for (slot, shape, dtype), nbytes in zip(kernel.outputs, kernel.sizes, strict=True):
            if into is not None and slot == kernel.outputs[-1][0]:
                out = into
            elif room is not None:
                out = room.array(shape, dtype, nbytes)
            else:
                out = cupy.ndarray(shape, dtype)
            outputs.append(out)
        places = [out.data.ptr for out in outputs]
        self._start(kernel, pointers, positions, places, work)
        pointers += places
        return outputs

    def copy(
        self,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        itemsize: int,
        pairs: list[tuple[int, int]],
        device: int,
    ) -> bool:
        """Copy C-contiguous arrays of one shape to places with these strides, in bytes.

        `pairs` are the addresses of targets and sources. Returns False where no kernel does it.
        """
        row = shape[-1] * itemsize
        unit = math.gcd(8, row, *strides[:-1], *itertools.chain(*pairs))
        program = copy_program((*shape[:-1], row // unit), (*strides[:-1], unit), unit)
        writes = not any(place % 16 for _, place in pairs)
        aligned = writes and not any(place % 16 for place, _ in pairs)
        try:
            (kernel,) = self.code.get_prepared(
                program, device, (aligned, writes), single=False
            ).kernels
        except (CompileFailed, NotGenerated):
            return False
        slots = argument_rows(kernel, [()] * len(pairs))
        for slot, _, offset in kernel.generated.inputs:
            slots[: len(pairs), slot] = [pair[0] + offset for pair in pairs]
        slots[: len(pairs), kernel.outputs[0][0]] = [pair[1] for pair in pairs]
        queue(kernel, slots, slots, len(pairs), Workspace())
        return True

    # ---- once per program and device

    def with_strides(self, program: Program, strides: tuple[int, ...]) -> Program:
        """The same program, of one kernel, which writes with these strides."""
        found = self._strided.get((id(program), strides))
        if found is None:
            if len(self._strided) >= MOST_PROGRAMS:
                self._strided.clear()
            kernels = (replace(program.kernels[0], strides=strides),)
            found = program, replace(program, kernels=kernels)
            self._strided[id(program), strides] = found
        return found[1]

    def is_broken(self, program: Program) -> bool:
        """Whether it has no kernels that could be had."""
        return id(program) in self._broken

    def _give_up(self, fused: KernelTask, error: Exception) -> None:
        with self._lock:
            if id(fused.program) in self._broken:
                return
            self._broken[id(fused.program)] = fused.program
        said = f"{fused.key!r} is computed operation by operation, as its kernel was not to be had"
        logging.getLogger("gpuscheduler.kernels").warning("%s: %s", said, error)
        warnings.warn(f"{said}: {error}", RuntimeWarning, stacklevel=2)
