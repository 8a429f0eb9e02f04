"""Take the values that the graph brings along: chunks of earlier runs, and arrays of the user."""

from __future__ import annotations

from cupy.cuda import Device, Event

from ...errors import OutOfMemory
from ...frontend.chunk import Chunk
from ...plan.machine import DISK
from ...values import map_leaves
from . import copies
from .arrays import (
    Refused,
    array_bytes,
)
from .gpu_run import GpuRun, is_elsewhere
from .lane import HeldValue


def take_values(run: GpuRun) -> list[int]:
    """The graph's own values, and which of them lie on other devices than their steps' own: of
    a GPU that is none of these, of several, or of another scheduler."""
    away = []
    for i in run.plan.fixed:
        if i in run.chunks:
            continue
        step = run.plan.steps[i]
        value = step.task({})
        if step.sent:
            value = run.hardware.kept(value, step.place)
        value = value() if type(value) is Chunk else value
        run.held[step.place][i] = HeldValue(value)
        if is_elsewhere(value, run.lanes[step.place].device):
            away.append(i)
            run.alone = False  # copies are at other addresses in the next run
    return away


def bring_value(run: GpuRun, i: int) -> None:
    """Copy what lies elsewhere of a value of the graph to its step's device."""
    step = run.plan.steps[i]
    lane, held = run.lanes[step.place], run.held[step.place][i]
    value = held.value
    try:
        with Device(lane.device), lane.incoming:
            moved = map_leaves(
                lambda v: copies.copy_to_device(v, lane.device, lane.incoming), value
            )
            ready = lane.mark(lane.incoming)
    except Refused as error:
        what = f"{step.key!r}, which lies on another GPU and is copied to where it is read,"
        raise OutOfMemory(
            f"{what} has {array_bytes(value):,} bytes, for which GPU {lane.device} has no "
            "room: use smaller chunks, or put it on a GPU that the scheduler uses"
        ) from error
    lane.later.append(([ready], value))
    run.held[step.place][i] = HeldValue(moved, ready, arrived=True, unseen=True)


def take_chunks(run: GpuRun) -> None:
    """The chunks, which earlier runs have made, on other streams maybe."""
    known: dict[int, tuple[Event, bool]] = {}  # one stands for many

    def over(event: Event) -> bool:
        found = known.get(id(event))
        if found is None:
            found = known[id(event)] = event, event.done
        return found[1]

    for step, chunk in run.chunks.items():
        for place, held in chunk.places.items():
            if place == DISK:
                run.files.of[step] = held
                continue
            if held.ready is not None and over(held.ready):
                held.ready = None
            held.unseen = held.ready is not None
            if held.reads:
                held.reads = [e for e in held.reads if not over(e)]
            run.held[place][step] = held
