"""Values on their way between workers, as they travel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class BufferSlot:
    """Where an array lies in a buffer."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    start: int  # bytes
    device: bool = False  # it comes from a device's memory

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def read(self, buffer: Any) -> Any:
        return buffer[self.start : self.start + self.nbytes].view(self.dtype).reshape(self.shape)


@dataclass(frozen=True, slots=True)
class LentArray:
    """An array that is where it is, for a process on the same machine to copy."""

    handle: bytes  # of what was allocated
    start: int  # bytes behind its start
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


@dataclass(frozen=True, slots=True)
class LostArray:
    """An array that could not be copied from where it was, and why."""

    why: str


class Unreachable(RuntimeError):
    """A stage was given an array that is on a device which its worker cannot read."""


@dataclass(frozen=True, slots=True)
class BroadcastArray:
    """An array that repeats another along axes without strides."""

    values: Any
    shape: tuple[int, ...]


class OffDevice:
    """An array that was on a device of another process, on the host for now."""

    __slots__ = ("array",)

    def __init__(self, array: Any):
        self.array = array

    @property
    def nbytes(self) -> int:
        return int(self.array.nbytes)
