"""Devices and memory of the scheduler in use, as far as Dask's configuration names it."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from dask import config

#: Variables that say how many threads one call of LAPACK uses on the host.
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class Capacity(NamedTuple):
    """What the blocks of one library may use."""

    devices: int  # that one library call leaves idle but one: a call on the host may use all cores
    nbytes: int  # that values may take in the memory of one device

    def fits_in_device(self, nbytes: int) -> bool:
        """Whether that much, and as much again to work in, fits one device.

        >>> Capacity(1, 100).fits_in_device(50), Capacity(1, 100).fits_in_device(51)
        (True, False)
        """
        return 2 * nbytes <= self.nbytes


def capacity(module: str = "numpy") -> Capacity:
    """Return what the entered `Scheduler` has for "numpy" or "cupy" blocks; else one host.

    >>> import gpuscheduler
    >>> with gpuscheduler.Scheduler("cpu:2", memory_limit="1 GiB"):
    ...     capacity().nbytes
    2147483648
    """
    owner, machine = scheduler_in_use()
    if machine is None:
        return Capacity(1, _host_memory())
    threads = getattr(owner, "host_threads", 0)
    if module == "numpy" and (machine.shared or threads):  # or of a Scheduler on GPUs
        alone = threads or len(machine.memory)
        nbytes = machine.limit(0) if machine.shared else min(machine.host_memory, _host_memory())
        return Capacity(alone if _uses_one_thread() else 1, nbytes)
    return Capacity(len(machine.memory), min(machine.memory))


def scheduler_in_use() -> tuple[Any, Any]:
    """The entered `Scheduler` and its machine; the machine is None without one.

    >>> scheduler_in_use()
    (None, None)
    """
    owner = getattr(config.get("scheduler", None), "__self__", None)
    return owner, getattr(getattr(owner, "hardware", None), "machine", None)


def _uses_one_thread() -> bool:
    """Whether LAPACK was told to use one thread, so that several calls do not share cores."""
    return any(os.environ.get(name) == "1" for name in THREADS)


def _host_memory() -> int:
    """Bytes of the host's memory."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # where the system does not say
        return 2**63 - 1
