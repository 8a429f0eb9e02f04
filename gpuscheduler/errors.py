"""Every exception that a user of the package can meet."""

from __future__ import annotations


class PlanError(ValueError):
    """The graph cannot be planned: it reads what is not there, or asks for what cannot be."""


class OutOfMemory(MemoryError):
    """A step does not fit on its device, whatever else is moved away."""

    plan = 0  # whose run it ended, by id: it may have come out of a run inside a task


class DeviceLost(RuntimeError):
    """A device does not answer any more."""


class Interrupted(BaseException):
    """Another thread has ended the run: nobody wants its results any more."""


class NotCompiled(TypeError):
    """A function of numbers cannot be compiled: the message says which, where and why."""


class SpillError(OSError):
    """A file of evicted values could not be made, written or read."""


class NotSpillable(Exception):
    """A value that cannot be pickled: it has to stay in memory."""


class NotGenerated(Exception):
    """This kernel has no CUDA reading: `str(error)` says which operation of which dtypes."""


class SidesDiffer(AssertionError):
    """GPUs and the host have computed different values, with GPUSCHEDULER_COMPARE=1."""


class GpuUnused(UserWarning):
    """Work on NumPy's arrays has used no GPU; the message has the reason."""
