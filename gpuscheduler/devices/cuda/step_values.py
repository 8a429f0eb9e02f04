"""Compute the value of one step on its device, and put it into the result."""

from __future__ import annotations

from typing import Any

import cupy

from ...frontend.task import OwnTask, host_only, kernels_only
from ...plan.plan import Step
from ...sparse_parts import arrays_of, library_of, rebuild
from ...values import map_deep_leaves
from . import arrays, copies, task_launch
from .arrays import is_refusal, requested_bytes
from .copies import copy_block
from .host_steps import HostSteps
from .lane import AllocationMeter, DeviceLane
from .numpy_fallback import SAID
from .result_rooms import ResultRoom
from .run_context import RunContext, is_elsewhere


def _own_sparse(value: Any) -> Any:
    """A sparse matrix as an object of the task's own, which shares its arrays.

    CuPy puts other arrays into a matrix whose indices it sorts, while other devices copy it.
    """
    return value if library_of(type(value)) is None else rebuild(value, arrays_of(value))


class StepValues:
    """Computes the values of a run's steps, each on its device, and puts them into the result.

    It owns the memory of a result that kernels write in place, and the bytes that steps had
    allocated. Work is queued on the home stream of the lane, by whichever thread launches there;
    after each task that stream is current again, behind any other that the task has chosen.
    """

    def __init__(self, run: RunContext, host_steps: HostSteps):
        self.run, self.host_steps = run, host_steps
        #: Where kernels write the result; None where each step makes an array of its own.
        self.rooms: ResultRoom | None = run.assembly.rooms
        #: The memory of the result.
        self.result: Any = None
        #: By step: the most bytes that it had allocated at once.
        self.took: dict[int, int] = {}

    def read_inputs(self, lane: DeviceLane, step: Step) -> dict[Any, Any]:
        """The values that a step's task is called with, by key."""
        run = self.run
        held, task = run.held[lane.place], step.task
        # a batch that has run knows where its arrays are; the host does not
        alone = run.alone and step.kind not in run.plan.history.hosted
        by_heart = alone and isinstance(task, OwnTask) and task.knows_inputs()
        reads = (step.names or step.constants) and not by_heart
        values = step.values(lambda j: _own_sparse(held[j].value)) if reads else {}
        for name in step.constants:
            # the graph's own arrays may be on a GPU that is not among these
            values[name] = map_deep_leaves(
                lambda v: copies.copy_to_device(v, lane.device, lane.home), values[name]
            )
        return values

    def runs_on_host(self, step: Step) -> bool:
        """Whether a step is computed by a thread of the host."""
        return host_only(step.task) or step.kind in self.run.plan.history.hosted

    def attempt(self, lane: DeviceLane, i: int) -> tuple[Any, int]:
        """Compute a step: (value, 0), or (None, bytes that were refused).

        A failed attempt's allocations go with its frames when this returns. Allocations are metered
        for kinds of steps that have not run yet, and for kinds that return parts of arrays.
        """
        run = self.run
        history, step = run.plan.history, run.plan.steps[i]
        try:
            values, into = self.read_inputs(lane, step), self.result_part(i)
            if kernels_only(step.task) or (
                step.kind in history.extra and step.kind not in history.parts
            ):
                return self.call(lane, i, values, into), 0
            with AllocationMeter() as allocated:
                value = allocated.copy_partial_arrays(self.call(lane, i, values, into), lane.device)
            if allocated.partial:
                history.parts.add(step.kind)
            self.took[i] = allocated.most
            return value, 0
        except Exception as error:
            if not is_refusal(error):
                raise
            return None, requested_bytes(error, 1)

    def call(self, lane: DeviceLane, i: int, values: dict[Any, Any], into: Any) -> Any:
        """Compute a step's task with its inputs, on its device or on the host."""
        run = self.run
        history, step = run.plan.history, run.plan.steps[i]
        task = step.task if into is None else self.rooms.tasks[i]  # type: ignore[union-attr]
        mixed, home = step.kind in history.mixed, self.runs_on_host(step)  # others may add to these
        try:
            if home:
                value = self.host_steps.take_host_value(lane, i, task, values)
            elif mixed:
                value = self.host_steps.compute_with_copies(lane, task, values, into)
            else:
                value = task_launch.compute(run, lane, task, values, into)
        except SAID as error:
            if is_refusal(error) or host_only(task):
                raise
            if home:  # another block of its kind was refused, this one may not be
                value = task_launch.compute(run, lane, task, values, into)
            else:
                value = self.host_steps.recompute_refused(
                    lane, step, task, values, into, error, mixed
                )
        finally:
            chose_stream = lane.make_current()
        if chose_stream:
            value = lane.copy_to_home(value)
        if not kernels_only(task) or self._is_broken(task):
            value = self._bring_here(lane, value)
        return arrays.make_contiguous(value) if run.plan.crossings[i] else value

    def _is_broken(self, task: Any) -> bool:
        """Whether the kernels of a task of nothing else do not work."""
        return self.run.hardware.kernels.is_broken(task.kernels[0].program)

    def _bring_here(self, lane: DeviceLane, value: Any) -> Any:
        """A task's value with its arrays copied to this device.

        A task may return a part of a captured array, which may lie on another device.
        """
        if not is_elsewhere(value, lane.device):
            return value
        here = map_deep_leaves(lambda v: copies.copy_to_device(v, lane.device, lane.home), value)
        lane.later.append(([lane.mark(lane.home)], value))  # its memory is another stream's
        return here

    def result_part(self, i: int) -> Any:
        """The part of the result that a step's kernel writes; None where it makes an own array.

        Allocates the memory of the result when the first of its steps runs.
        """
        assembly, rooms = self.run.assembly, self.rooms
        if rooms is None or i not in rooms.parts:
            return None
        if self.result is None:
            self.result = rooms.memory()
        if i not in rooms.tasks:
            return None
        if assembly.made is None:
            assembly.made = rooms.whole_array(self.result)
        return rooms.part(i, self.result)

    def is_in_result(self, i: int, value: Any) -> bool:
        """Whether a step's value lies in the memory of the result."""
        return i in self.run.plan.into and self.result is not None and (
            type(value) is cupy.ndarray and value.data.mem is self.result.mem
        )  # fmt: skip

    def put_into_result(self, lane: DeviceLane, i: int, value: Any) -> Any:
        """Copy a value to its place in the result, if it has one. Returns the value to hold."""
        assembly, rooms = self.run.assembly, self.rooms
        if rooms is None or i not in rooms.parts or type(value) is not cupy.ndarray:
            return value
        if value.data.mem is self.result.mem:
            return value
        if rooms.dtype is None:
            self.rooms = rooms = rooms.with_dtype(value.dtype)
            if rooms is None:  # nothing is in its memory
                self.result = None
                return value
        if value.dtype != rooms.dtype or value.shape != rooms.parts[i][1]:
            return value
        if assembly.made is None:
            assembly.made = rooms.whole_array(self.result)
        part = rooms.part(i, self.result)
        if value.flags.c_contiguous:
            copy_block(value, part, lane.home)
        else:
            part[...] = value
        return part
