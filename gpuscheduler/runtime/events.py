"""The instructions that `State` gives, and the events that it handles.

Steps are numbers in the plan. A place is a device, HOST or DISK.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass


@dataclass(slots=True)
class Launch:
    """Run a step on a device."""

    step: int
    place: int


@dataclass(slots=True)
class Copy:
    """Copy the value of a step from one place to another."""

    step: int
    src: int
    dst: int


@dataclass(slots=True)
class Free:
    """Free the value of a step in one place."""

    step: int
    place: int


@dataclass(slots=True)
class Issued:
    """A step is queued on its device: readers may follow."""

    step: int
    #: Bytes of its value.
    nbytes: int
    #: Bytes of its working memory; None where nobody has measured.
    extra: int | None = 0
    #: When it ran, in ns of `perf_counter_ns`, where the device was asked to say so.
    span: tuple[int, int] | None = None


@dataclass(slots=True)
class Done:
    """A step no longer needs its inputs."""

    step: int


@dataclass(slots=True)
class Copied:
    """A copy of the value of a step has come."""

    step: int
    src: int
    dst: int


@dataclass(slots=True)
class NoRoom:
    """The allocator refused memory for a launch of a step, or for a copy of its value.

    A launch is also refused, with 0 bytes, when a step that it reads was refused before. A copy to
    the disk is refused when the value cannot be written; then the value stays where it is.
    """

    step: int
    #: The device of the launch, or the destination of the copy.
    place: int
    #: Bytes that were asked for.
    nbytes: int
    #: The message of the error, where a task raised one.
    said: str = ""


@dataclass(slots=True)
class Failed:
    """A task or a device raised an error, which ends the run: `State` never gets this event."""

    #: The step, or -1 where the error belongs to no step.
    step: int
    error: BaseException


#: The places of a value that no place holds.
NOWHERE: Set[int] = frozenset()

Instruction = Launch | Copy | Free
Event = Issued | Done | Copied | NoRoom | Failed
