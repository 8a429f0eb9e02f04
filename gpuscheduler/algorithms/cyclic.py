"""A rule that deals blocks to devices in turn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Cyclic:
    """Deals the blocks along an axis to the devices in turn, for `dask.annotate(device=...)`.

    Where the last blocks have most of the work, as in a factorization, contiguous runs of blocks
    would leave most of it to the last device.

    Parameters
    ----------
    axis
        The axis of the array; the last one by default.

    Examples
    --------
    >>> rule = Cyclic(axis=1)
    >>> [rule.device_of(("x", 0, j), 2) for j in range(4)]
    [0, 1, 0, 1]
    """

    axis: int = -1

    def device_of(self, key: Any, devices: int) -> int | None:
        """The device of a block by its key; None for keys that have no such axis."""
        index = key[1:] if isinstance(key, tuple) else ()
        if not -len(index) <= self.axis < len(index) or not isinstance(index[self.axis], int):
            return None
        return int(index[self.axis]) % devices
