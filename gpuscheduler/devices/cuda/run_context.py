"""What the parts of one run on GPUs share: its plan, lanes, held values and events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cupy

from ...errors import Interrupted
from ...frontend.chunk import Chunk, count_moves
from ...plan.machine import HOST
from ...plan.plan import Plan
from ...runtime.events import Event as StateEvent
from ...runtime.gather import ResultAssembly
from ...runtime.observe import RunRecord
from ...runtime.protocol import StepListener
from ...runtime.spill import RunFiles
from ...runtime.threads import EventQueue, Team
from ...values import deep_leaves
from .arrays import HOST_TYPES
from .lane import DeviceLane, HeldValue

if TYPE_CHECKING:
    from .hardware import CudaHardware


@dataclass(eq=False, slots=True)
class RunContext:
    """One run on GPUs, as its parts see it. It owns what the run holds, and the loop's events.

    Each part (`Transfers`, `FileSteps`, ...) has its own state beside this. `held` of a device
    changes only in the thread that launches there; any thread may report `events`.
    """

    plan: Plan
    team: Team
    assembly: ResultAssembly
    hardware: CudaHardware
    #: `Done` means that the device is done, not that the step is queued.
    exact: bool
    #: The team's device lanes, by place.
    lanes: list[DeviceLane]
    #: Values by place and step.
    held: dict[int, dict[int, HeldValue]]
    #: Values on the disk.
    files: RunFiles
    #: The graph's chunks that runs may move, by step.
    chunks: dict[int, Chunk]
    #: The count of moved chunks before the run.
    when: int
    #: What the loop is told.
    events: EventQueue
    #: Whether no other run moves the graph's arrays: they are where they were in the last run.
    alone: bool
    #: Whether the run follows a launch tape.
    followed: bool = False
    #: Whether the run has been closed: threads beside it stop at the next step.
    stopped: bool = False
    #: Where the run is recorded, where somebody wants the times of its steps.
    record: RunRecord | None = None
    #: `RunProbe`, which measures launches and copies or shows them to a profiler.
    probe: Any = None

    @classmethod
    def create(
        cls,
        plan: Plan,
        team: Team,
        assembly: ResultAssembly,
        hardware: CudaHardware,
        told: StepListener,
    ) -> RunContext:
        """The context of a new run, which holds nothing yet."""
        when = count_moves()  # first: chunks may move meanwhile
        held: dict[int, dict[int, HeldValue]] = {p: {} for p in (HOST, *range(len(team.lanes)))}
        chunks = plan.movable_chunks
        return cls(
            plan=plan,
            team=team,
            assembly=assembly,
            hardware=hardware,
            exact=told is StepListener.EACH,
            lanes=team.lanes,
            held=held,
            files=RunFiles(hardware.store),
            chunks=chunks,
            when=when,
            events=EventQueue(),
            alone=len(chunks) == len(plan.chunks),
        )

    def tell(self, events: list[StateEvent]) -> None:
        """Report events to the loop."""
        self.events.put(events)

    def raise_if_stopped(self) -> None:
        """Raise `Interrupted` when the run has been closed."""
        if self.stopped:
            raise Interrupted

    def note_arrival(self, step: int, place: int, held: Any) -> None:
        """Note a chunk's new place, from which later runs can take it."""
        chunk = self.chunks.get(step)
        if chunk is not None and not self.stopped:
            chunk.note_arrival(place, held)


def is_elsewhere(value: Any, device: int) -> bool:
    """Whether any array of a value is in the memory of another GPU than this."""
    if type(value) is cupy.ndarray:
        return bool(value.data.device_id != device)
    if isinstance(value, HOST_TYPES):
        return False
    return any(isinstance(v, cupy.ndarray) and v.device.id != device for v in deep_leaves(value))
