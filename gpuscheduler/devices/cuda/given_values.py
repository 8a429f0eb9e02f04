"""Take the values that the graph brings along: chunks of earlier runs, and arrays of the user."""

from __future__ import annotations

from cupy.cuda import Device, Event

from ...errors import OutOfMemory
from ...frontend.chunk import Chunk
from ...plan.machine import DISK
from ...plan.plan import Plan
from ...values import map_deep_leaves
from . import copies
from .arrays import Refused, array_bytes
from .lane import HeldValue
from .run_context import RunContext, is_elsewhere


class GivenValues:
    """Takes the values that the graph brings along into a run.

    It owns nothing: what it takes is held in the run, with the events behind which it is ready.
    Call it in the run's thread, before anything is launched that reads these values.
    """

    def __init__(self, run: RunContext):
        self.run = run

    def state(self) -> tuple[int, Plan] | None:
        """A mark that stays the same until a given chunk moves; None where not all are chunks."""
        run = self.run
        plan = run.plan
        return (run.when, plan) if len(run.chunks) == len(plan.fixed_steps) else None

    def take_values(self) -> list[int]:
        """Hold the graph's own values. Returns the steps whose values lie on another device.

        Such a value may lie on a GPU that the scheduler does not use, or on several.
        """
        run = self.run
        away = []
        for i in run.plan.fixed_steps:
            if i in run.chunks:
                continue
            step = run.plan.steps[i]
            value = step.task({})
            if step.sent:
                value = run.hardware.device_copy(value, step.place)
            value = value() if type(value) is Chunk else value
            run.held[step.place][i] = HeldValue(value)
            if is_elsewhere(value, run.lanes[step.place].device):
                away.append(i)
                run.alone = False  # copies are at other addresses in the next run
        return away

    def bring_value(self, i: int) -> None:
        """Copy the arrays of a graph's value that lie elsewhere to its step's device."""
        run = self.run
        step = run.plan.steps[i]
        lane, held = run.lanes[step.place], run.held[step.place][i]
        value = held.value
        try:
            with Device(lane.device), lane.incoming:
                moved = map_deep_leaves(
                    lambda v: copies.copy_to_device(v, lane.device, lane.incoming), value
                )
                ready = lane.mark(lane.incoming)
        except Refused as error:
            raise OutOfMemory(
                f"{step.key!r} lies on another GPU, and GPU {lane.device}, which reads it, has no "
                f"room for a copy of {array_bytes(value):,} bytes: use smaller chunks, or put it "
                "on a GPU that the scheduler uses"
            ) from error
        lane.later.append(([ready], value))
        run.held[step.place][i] = HeldValue(moved, ready, arrived=True, unseen=True)

    def take_chunks(self) -> None:
        """Hold the chunks of earlier runs, with the events that are still pending."""
        run = self.run
        known: dict[int, tuple[Event, bool]] = {}  # many chunks share one event

        def is_event_over(event: Event) -> bool:
            found = known.get(id(event))
            if found is None:
                found = known[id(event)] = event, event.done
            return found[1]

        for step, chunk in run.chunks.items():
            for place, held in chunk.places.items():
                if place == DISK:
                    run.files.of[step] = held
                    continue
                if held.ready is not None and is_event_over(held.ready):
                    held.ready = None
                held.unseen = held.ready is not None
                if held.reads:
                    held.reads = [e for e in held.reads if not is_event_over(e)]
                run.held[place][step] = held
