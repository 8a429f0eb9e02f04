"""Instructions that `State` gives and events that it is told."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass


@dataclass(slots=True)
class Launch:
    step: int
    place: int


@dataclass(slots=True)
class Copy:
    step: int
    src: int
    dst: int


@dataclass(slots=True)
class Free:
    step: int
    place: int


@dataclass(slots=True)
class Issued:
    """The step is queued on its device, and its value has `nbytes`: readers may follow.

    While it was made it took `extra` bytes beside that; None where nobody has looked.
    """

    step: int
    nbytes: int
    extra: int | None = 0


@dataclass(slots=True)
class Done:
    """The step no longer needs its inputs."""

    step: int


@dataclass(slots=True)
class Copied:
    step: int
    src: int
    dst: int


@dataclass(slots=True)
class NoRoom:
    """The allocator refused: a launch of `step`, or a copy of it into `place`, needs `nbytes`.

    A launch is also refused, with 0 bytes, where one that it reads was refused before it. A copy
    to the disk is refused where the value cannot be written: it stays where it is.
    """

    step: int
    place: int
    nbytes: int
    said: str = ""  # by the error, where a task raised it


@dataclass(slots=True)
class Failed:
    """A task raised, or a device did. The run ends: `State` never sees this one."""

    step: int
    error: BaseException


NOWHERE: Set[int] = frozenset()

Instruction = Launch | Copy | Free
Event = Issued | Done | Copied | NoRoom | Failed
