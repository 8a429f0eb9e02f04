"""How many sorted runs an array has, which blocks go into each, and where lines are cut."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from dask import config
from dask.utils import parse_bytes

from .capacity import scheduler_in_use

#: Runs where no Scheduler is entered and Dask's configuration says nothing.
RUNS = 8
#: Arrays of at most so many bytes are sorted by one task.
SMALL = 64 * 2**20
#: The whole of a run, its sorted copy, and what the library takes for itself.
COPIES = 3


class SortDevices(NamedTuple):
    """The devices that compute the blocks of one library."""

    devices: int
    nbytes: int  # that values may take on one device


def machine_in_use(module: str) -> SortDevices | None:
    """Return the devices of the entered Scheduler for "numpy" or "cupy" blocks, None without one.

    >>> machine_in_use("numpy") is None
    True
    """
    owner, machine = scheduler_in_use()
    if machine is None:
        return None
    threads = getattr(owner, "host_threads", 0)
    if module == "numpy" and threads:  # of a Scheduler on GPUs
        return SortDevices(threads, max(1, machine.host_memory // threads))
    return SortDevices(len(machine.memory), min(machine.memory))


def count_runs(
    nbytes: float, blocks: int, machine: SortDevices | None, *, is_merge_cheap: bool = False
) -> int:
    """Choose how many runs to sort and merge; results do not depend on it.

    One run where an array is small, or one of at most two devices has room for it: two sorts of
    halves and a merge, which is a second sort, take as long. Else a run for each device, or several
    if memory is short. Two devices have two runs where a merge is much cheaper than a sort.

    >>> count_runs(8e9, 100, None)
    8
    >>> one = SortDevices(1, 100 * 10**9)
    >>> count_runs(4e9, 16, one), count_runs(64e9, 64, one)
    (1, 2)
    """
    asked = config.get("gpuscheduler.sort-runs", None)
    if asked is not None:
        runs = int(asked)
    elif nbytes <= SMALL:
        runs = 1
    elif machine is None:
        runs = RUNS
    else:
        needed = 1 if math.isnan(nbytes) else max(1, math.ceil(COPIES * nbytes / machine.nbytes))
        runs = needed
        few = 1 if is_merge_cheap else 2
        if needed > 1 or machine.devices > few or math.isnan(nbytes):
            runs = machine.devices * math.ceil(needed / machine.devices)
    return max(1, min(runs, blocks))


def is_out_of_core(nbytes: float, machine: SortDevices | None) -> bool:
    """Whether the copies of an array do not fit the devices together."""
    return machine is not None and COPIES * nbytes > machine.devices * machine.nbytes


def group_blocks(lengths: Sequence[float], groups: int) -> list[list[int]]:
    """Group neighbouring blocks into at most so many groups of about equal length.

    Blocks of unknown length (NaN) count alike.

    >>> group_blocks([4, 4, 0, 8, 1], 2)
    [[0, 1, 2], [3, 4]]
    """
    sizes = np.array([1.0 if math.isnan(n) else n for n in lengths])
    total = float(sizes.sum())
    if not total:
        sizes, total = np.ones(len(sizes)), float(len(sizes))
    middles = np.cumsum(sizes) - sizes / 2
    numbers = np.minimum(groups - 1, (middles * groups / total).astype(int)).tolist()
    out: dict[int, list[int]] = {}
    for block, number in enumerate(numbers):
        out.setdefault(number, []).append(block)
    return list(out.values())


def most_line_bytes(largest: float, machine: SortDevices | None) -> float:
    """Bytes that a block of whole lines may have: an eighth of a device, if that is known."""
    if machine is not None:
        return max(largest, machine.nbytes / 8)
    return max(largest, 4.0 * parse_bytes(config.get("array.chunk-size", "128MiB")))
