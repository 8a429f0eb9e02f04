"""What the parts of one run on GPUs share: its plan, lanes, held values and events.

`executor.CudaDevices` is such a run. The functions of `transfers`, `file_steps`, `host_steps`,
`step_values`, `tape_run`, `given_values` and `caller_order` get one as their first argument.
"""

from __future__ import annotations

from concurrent.futures import Future
from contextvars import Context
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import cupy
from cupy.cuda import Event

from ...errors import Interrupted
from ...frontend.chunk import count_moves
from ...frontend.task import OwnTask
from ...fusion.library_task import LibraryTask
from ...fusion.task import CompressTask, KernelTask, OptionalTask
from ...plan.batching import Batch
from ...plan.machine import HOST
from ...plan.matmul import MatmulSumTask
from ...plan.plan import Plan
from ...runtime.events import Event as StateEvent
from ...runtime.gather import ResultAssembly
from ...runtime.host_memory import PassageLane
from ...runtime.observe import RunRecord
from ...runtime.protocol import StepListener
from ...runtime.spill import RunFiles
from ...runtime.threads import Team
from ...values import deep_leaves
from . import library_calls
from .arrays import HOST_TYPES
from .kernels import Kernels
from .lane import DeviceLane, HeldValue
from .numpy_fallback import OwnCode
from .result_rooms import ResultRoom

if TYPE_CHECKING:
    from .hardware import CudaHardware

#: Threads for each device that read and write files and pin host arrays: at least.
FEWEST_FILES = 4
#: Threads for each device that read and write files and pin host arrays: at most.
FILES = 12
#: The part of the processors that the file threads of all devices may take.
PART_OF_CPUS = 3 / 4


def is_elsewhere(value: Any, device: int) -> bool:
    """Whether any array of a value is in the memory of another GPU than this."""
    if type(value) is cupy.ndarray:
        return bool(value.data.device_id != device)
    if isinstance(value, HOST_TYPES):
        return False
    return any(isinstance(v, cupy.ndarray) and v.device.id != device for v in deep_leaves(value))


class GpuRun:
    """The state of one run on GPUs."""

    def __init__(
        self,
        plan: Plan,
        team: Team,
        gathering: ResultAssembly,
        hardware: CudaHardware,
        told: StepListener,
    ):
        self.plan, self.team, self.gathering, self.hardware = plan, team, gathering, hardware
        #: The count of moved chunks before the run.
        self.when = count_moves()
        #: `Done` means that the device is done, not that the step is queued.
        self.exact = told is StepListener.EACH
        #: The team's device lanes, by place.
        self.lanes: list[DeviceLane] = team.lanes
        #: Values by place and step.
        self.held: dict[int, dict[int, HeldValue]] = {
            p: {} for p in (HOST, *range(len(self.lanes)))
        }
        #: Whether the run has been closed: threads beside it stop at the next step.
        self.stopped = False
        #: By step: whether another device or the host reads its value.
        self.crossing = plan.crossings
        #: Steps whose values are results.
        self.wanted = plan.result_steps
        #: The context of threads that wait for copies: they run no code of the user's.
        self.watch_context = Context()
        #: Values on the disk.
        self.files = RunFiles(hardware.store)
        #: Pinned memory for values on their way to files.
        self.out = PassageLane(hardware.passage)
        #: Pinned memory for values on their way from files.
        self.back = PassageLane(hardware.passage)
        #: Values read from files into pinned memory, by step and the place that fetches them.
        self.read: dict[tuple[int, int], HeldValue] = {}
        #: What the loop is told.
        self.events: SimpleQueue[list[StateEvent]] = SimpleQueue()
        #: The graph's chunks that runs may move, by step.
        self.chunks = plan.movable_chunks
        #: Whether no other run count_moves the graph's chunks.
        self.alone = len(self.chunks) == len(plan.chunks)
        #: Where kernels write the result; None where each step makes an array of its own.
        self.rooms: ResultRoom | None = gathering.rooms
        #: The memory of the result.
        self.result: Any = None
        #: Bytes that devices have fetched.
        self.fetched = 0
        #: By step: the most bytes that it had allocated at once.
        self.took: dict[int, int] = {}
        #: Whether the run replays a tape.
        self.followed = False
        #: What the host computes steps with, and the event behind which the arrays are ready.
        self.given: dict[int, tuple[dict[Any, Any], Event]] = {}
        #: What the host has computed, by step.
        self.by_host: dict[int, Future[Any]] = {}
        #: Where the run is recorded, where somebody wants the times of its steps.
        self.record: RunRecord | None = None
        #: `RunProbe`, which measures launches and copies or shows them to a profiler.
        self.probe: Any = None
        #: Events by device that the whole run is behind; see `caller_order`.
        self.before: list[tuple[int, Event]] = []

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

    def given_state(self) -> tuple[int, Plan] | None:
        """A mark that stays the same until a given chunk moves; None where not all are chunks."""
        plan = self.plan
        return (self.when, plan) if len(self.chunks) == len(plan.fixed_steps) else None

    def compute(self, lane: DeviceLane, task: Any, values: dict[Any, Any], into: Any) -> Any:
        """Compute a task's value on a device, by kernels where it has some."""
        if not isinstance(task, OwnTask):
            return task(values)
        return task.launch(DeviceLauncher(self, lane, into), values)


@dataclass(frozen=True, slots=True)
class DeviceLauncher:
    """How one device computes tasks that launch something; a `Launcher`."""

    gpu_run: GpuRun
    lane: DeviceLane
    #: Where a kernel task writes its array; None where it makes one.
    into: Any

    @property
    def _kernels(self) -> Kernels:
        return self.gpu_run.hardware.kernels

    def run(self, task: KernelTask, values: dict[Any, Any]) -> Any:
        """Compute one kernel task."""
        return self._kernels.run(task, values, self.lane.device, self.lane.work, self.into)

    def run_optional(self, task: OptionalTask, values: dict[Any, Any]) -> Any:
        """Compute a value that may be nothing; waits for it."""
        made = self._kernels.run(task.fused, values, self.lane.device, self.lane.work)
        with OwnCode():
            return task.extract_value(made)

    def run_batch(self, task: Batch, values: dict[Any, Any]) -> Any:
        """Compute alike kernel tasks by one launch for each kernel."""
        alone = self.gpu_run.alone
        return self._kernels.run_batch(task, values, self.lane.device, self.lane.work, alone)

    def compress(self, task: CompressTask, values: dict[Any, Any]) -> Any:
        """Compute what a mask selects; waits for the number of elements."""
        return self._kernels.pick(task, values, self.lane.device, self.lane.work)

    def multiply(self, task: MatmulSumTask, values: dict[Any, Any]) -> Any:
        """Compute a sum of products by cuBLAS."""
        return task.multiply(values, self.lane.multiplier())

    def call_library(self, task: LibraryTask, values: dict[Any, Any]) -> Any:
        """Call a function of CuPy's, or NumPy's own where CuPy refuses."""
        return library_calls.call(task, values, self.gpu_run.hardware.to_numpy)
