"""Hand out the values of a run's outputs, from wherever they lie."""

from __future__ import annotations

from typing import Any

from cupy.cuda import Device

from ...errors import OutOfMemory
from ...frontend.chunk import worth_keeping
from ...plan.machine import DISK, HOST
from ...plan.plan import no_room
from ...values import map_deep_leaves
from .arrays import Refused, array_bytes, to_current_device, to_host_array
from .file_steps import FileSteps
from .lane import HeldValue
from .run_context import RunContext


class RunValues:
    """Hands out the outputs of a run, to the caller or to chunks that outlive the run.

    It owns nothing. The caller's current stream of a value's device waits until the value is
    made. Call it in the run's thread, when the steps of the outputs are issued.
    """

    def __init__(self, run: RunContext, file_steps: FileSteps):
        self.run, self.file_steps = run, file_steps

    def value(self, step: int) -> Any:
        """A step's value; the caller's current stream waits until it is made."""
        run = self.run
        plan, hardware = run.plan, run.hardware
        home = plan.steps[step].place
        if step not in plan.deliver and (here := run.held[home].get(step)) is not None:
            return hardware.value_behind(here, run.lanes[home].device)
        places = [home, *range(len(run.lanes)), HOST]
        if step in plan.deliver:
            places.insert(0, HOST)  # its device has been told to let go of it, and may not have yet
        for place in places:
            held = run.held[place].get(step)
            if held is None:
                continue
            if place == HOST:
                if step in plan.deliver:
                    return map_deep_leaves(to_host_array, held.value)
                return self._bring_back(step, held.value)
            return hardware.value_behind(held, run.lanes[place].device)
        if step in run.files.of:
            value = hardware.store.read(run.files.of[step], plan.steps[step].key)
            return self._bring_back(step, value)
        s = plan.steps[step]
        if not s.again:
            raise KeyError(step)
        if not s.sent:
            return s.read()
        with Device(run.lanes[s.place].device):
            return map_deep_leaves(to_current_device, self.file_steps.read_pinned(s))

    def _bring_back(self, i: int, value: Any) -> Any:
        """Copy a result that had to leave its device back to that device."""
        step = self.run.plan.steps[i]
        device = self.run.lanes[step.place].device
        try:
            with Device(device):
                return map_deep_leaves(to_current_device, value)
        except Refused as error:
            what = f"{step.key!r} is a result"
            raise OutOfMemory(no_room(step.nbytes, f"GPU {device}", what)) from error

    def keep_part(self, step: int, path: tuple[int, ...]) -> tuple[dict[int, Any], int]:
        """The replicas of a part of a value, by place, and the bytes of the part."""
        run = self.run
        home = run.plan.steps[step].place
        if (here := self._sole_replica(step)) is not None:
            part = here.part(path)
            return {home: part}, array_bytes(part.value)
        held = self._replicas(step)
        if not held and step in run.files.of:
            file, value = run.files.part(step, path, run.plan.steps[step].key)
            return {DISK: file}, array_bytes(value)
        whole = worth_keeping(home, held) or {home: HeldValue(self.value(step))}
        parts = {p: h.part(path) for p, h in whole.items()}
        return parts, max(array_bytes(h.value) for h in parts.values())

    def keep(self, step: int) -> dict[int, Any]:
        """The replicas of a value, by place; a file is no longer the run's."""
        run = self.run
        home = run.plan.steps[step].place
        if (here := self._sole_replica(step)) is not None:
            return {home: here}
        places: dict[int, Any] = dict(self._replicas(step))
        if step in run.files.of:
            places[DISK] = run.files.of.pop(step)
        return worth_keeping(home, places) or {home: HeldValue(self.value(step))}

    def _sole_replica(self, step: int) -> HeldValue | None:
        """A value that only its own device holds; None where the host or a file has it too."""
        run = self.run
        if step in run.held[HOST] or step in run.files.of:
            return None
        return run.held[run.plan.steps[step].place].get(step)

    def _replicas(self, step: int) -> dict[int, HeldValue]:
        """All replicas of a value, by place; a worker may still release some."""
        return {p: found for p, h in self.run.held.items() if (found := h.get(step)) is not None}
