"""Launch one task on one device: by its kernels, by cuBLAS, or by calling it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...frontend.task import OwnTask
from ...fusion.library_task import LibraryTask
from ...fusion.portable import PortableTask
from ...fusion.task import CompressTask, KernelTask, OptionalTask
from ...plan.batching import Batch
from ...plan.matmul import MatmulSumTask
from . import library_calls
from .kernels import Kernels
from .lane import DeviceLane
from .numpy_fallback import OwnCode, send_value
from .run_context import RunContext


def compute(run: RunContext, lane: DeviceLane, task: Any, values: dict[Any, Any], into: Any) -> Any:
    """Compute a task's value on a device, by kernels where it has some."""
    if not isinstance(task, OwnTask):
        return task(values)
    return task.launch(DeviceLauncher(run, lane, into), values)


@dataclass(frozen=True, slots=True)
class DeviceLauncher:
    """How one device computes tasks that launch something; a `Launcher`."""

    run_context: RunContext
    lane: DeviceLane
    #: Where a kernel task writes its array; None where it makes one.
    into: Any

    @property
    def _kernels(self) -> Kernels:
        return self.run_context.hardware.kernels

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
        alone = self.run_context.alone
        return self._kernels.run_batch(task, values, self.lane.device, self.lane.work, alone)

    def compress(self, task: CompressTask, values: dict[Any, Any]) -> Any:
        """Compute what a mask selects; waits for the number of elements."""
        return self._kernels.pick(task, values, self.lane.device, self.lane.work)

    def multiply(self, task: MatmulSumTask, values: dict[Any, Any]) -> Any:
        """Compute a sum of products by cuBLAS."""
        return task.multiply(values, self.lane.multiplier())

    def call_library(self, task: LibraryTask, values: dict[Any, Any]) -> Any:
        """Call a function of CuPy's, or NumPy's own where CuPy refuses."""
        return library_calls.call(task, values, self.run_context.hardware.to_numpy)

    def call_portable(self, task: PortableTask, values: dict[Any, Any]) -> Any:
        """Call a task of the array library with arrays of the device."""
        names = task.sent_names
        return task({k: send_value(v) if k in names else v for k, v in values.items()})
