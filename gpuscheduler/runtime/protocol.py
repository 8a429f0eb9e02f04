"""What the loop asks of devices and of hardware."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from ..errors import DeviceLost
from ..frontend.chunk import ChunkKeeper
from ..plan.machine import Machine
from ..plan.plan import Plan
from .events import Event
from .gather import ResultAssembly
from .pools import CallersPool
from .tape import LaunchTape


class StepListener(Enum):
    """What somebody wants to hear of the steps of a run."""

    NOTHING = 0  #: arrays on devices may be in the making when it ends, as CuPy's own are
    DONE = 1  #: when they are done: then it ends
    EACH = 2  #: ... and each before its readers begin


class Devices(Protocol):
    """What hardware does. Verbs return at once; what became of them comes out of `wait`."""

    def launch(self, step: int, place: int) -> None:
        """Run a step whose inputs are all on `place`: then `Issued` and `Done`, or `Failed`.

        Launches on one place, and copies to it, take effect in order. Where memory is refused:
        `NoRoom`, and the step has left nothing behind; launches behind it that read it are refused,
        too (`NoRoom` of 0 bytes). Fixed steps are never launched: their values are there.
        """

    def copy(self, step: int, src: int, dst: int) -> None:
        """Put a value on `dst` as well: then `Copied`; `NoRoom` where memory is refused, or where
        the value cannot be written to the disk. Where devices share a memory, that has the number
        of the first of them. What comes from the disk comes in no order."""

    def free(self, step: int, place: int) -> None:
        """Let go of a value on one place, once nothing queued there needs it. No event."""

    def follow(self, tape: LaunchTape) -> bool:
        """Do all that a tape says, instead of what these verbs are for: nothing is reported. False
        where it cannot be done so: then these devices are good for nothing any more."""

    def wait(self) -> list[Event]:
        """At least one event; blocks until there is one."""

    def interrupt(self) -> None:
        """From any thread: `wait` gives a `Failed` of step -1 with `Interrupted`, at once."""

    def value(self, step: int) -> Any:
        """An output of the run, where the caller can use it."""

    def keep(self, step: int) -> dict[int, Any]:
        """An output of the run, handed over as it is: what there is of it, by place."""

    def keep_part(self, step: int, path: tuple[int, ...]) -> tuple[dict[int, Any], int]:
        """The same of a part of its value, wherever that is, and the bytes of the part."""

    def close(self) -> None:
        """Let go of everything that this run holds; what is still running is abandoned. Chunks that
        were there before it stay where they are now."""


@dataclass
class Lease:
    """The part of a machine's hardware that one run has to itself."""

    machine: Machine
    #: ... which will follow a tape, where that is given.
    devices: Callable[[Plan, ResultAssembly, StepListener, LaunchTape | None], Devices]
    threads: int | None = None  # of a borrowed pool, which runs as many steps at once, in any order


class Hardware(ChunkKeeper, Protocol):
    """What lives longer than a run: threads, streams, links that have been tried."""

    kind: str  # "cpu" or "cuda"
    names: tuple[str, ...]  # of each device, for people
    machine: Machine

    @property
    def trouble(self) -> str:
        """Which of its devices are lost, for people; "" where none is."""

    def follows(self, plan: Plan) -> bool:
        """Whether its devices can follow a tape of this plan."""

    def home(self, value: Any) -> int | None:
        """The device that holds a value of the graph; None where every device can read it."""

    def settings(self) -> dict[str, Any]:
        """Dask's configuration while this hardware is the default."""

    def front(self) -> int | None:
        """Where the calling thread expects small results; None where every device will do."""

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """A host array for results, made so that devices write it fast."""

    def rooms(self, plan: Plan, gathering: ResultAssembly) -> Any:
        """Which parts of a result its run can write where they belong in it, as they are made, see
        `replay.Rooms`; None where there are no such."""

    def join(self, blocks: Any) -> Any:
        """One array from nested lists of blocks, wherever they live."""

    @property
    def bring(self) -> Callable[..., Any] | None:
        """What does as `join`, and copies that to the host; None where it is there."""

    @property
    def send(self) -> Callable[[Any], Any] | None:
        """What makes an array of the host one of the caller's device; None where there is none."""

    def synchronize(self) -> None:
        """Wait for all that runs have queued."""

    def lost(self, error: BaseException) -> DeviceLost | None:
        """What to say for an error that came of a device which does not answer any more: no run
        gets that again. None for other errors."""

    def lease(
        self, num_workers: int | None, pool: CallersPool | None
    ) -> AbstractContextManager[Lease]:
        """Threads for one run: so many, or the caller's own, which share this process's memory."""

    def when_short(self, shed: Callable[[], object]) -> None:
        """Call this where the host's memory is found to be short: it lets go of what can be had
        again."""

    def close(self) -> None:
        """Join every thread and give back all memory."""


class StepWatcher:
    """What a run tells about its steps while it goes on. Does nothing; see `Callbacks`."""

    def launched(self, step: int) -> None: ...

    def done(self, step: int) -> None: ...
