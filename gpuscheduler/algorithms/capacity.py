"""Devices and memory of the scheduler in use, as far as Dask's configuration names it."""

from __future__ import annotations

import os
from typing import NamedTuple

from dask import config


class Capacity(NamedTuple):
    """What one computation may use."""

    devices: int  # with a memory of their own: the CPU devices of a host count as one
    nbytes: int  # that values may take in the memory of one device

    def holds(self, nbytes: int) -> bool:
        """Whether that much, and as much again to work in, fits one device.

        >>> Capacity(1, 100).holds(50), Capacity(1, 100).holds(51)
        (True, False)
        """
        return 2 * nbytes <= self.nbytes


def capacity() -> Capacity:
    """Return what the entered `Scheduler` has; one host, where none is entered.

    >>> import gpuscheduler
    >>> with gpuscheduler.Scheduler("cpu:2", memory_limit="1 GiB"):
    ...     capacity()
    Capacity(devices=1, nbytes=2147483648)
    """
    get = config.get("scheduler", None)
    owner = getattr(get, "__self__", None)
    machine = getattr(getattr(owner, "hardware", None), "machine", None)
    if machine is None:
        return Capacity(1, _host_memory())
    memories = machine.memories
    return Capacity(len(memories), min(machine.limit(m) for m in memories))


def _host_memory() -> int:
    """Bytes of the host's memory."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # where the system does not say
        return 2**63 - 1
