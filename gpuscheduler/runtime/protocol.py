"""The interfaces of devices and hardware that the run loop and the scheduler need.

`Devices` live for one run and carry out its instructions. `Hardware` lives as long as a scheduler
and makes them. `threads`, `simulated` and the room `devices` implement these interfaces.
"""

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
from .observe import RunRecord
from .pools import CallersPool
from .tape import LaunchTape


class StepListener(Enum):
    """Which events of a run devices must report."""

    #: None: device arrays may still be in the making when the run ends, as CuPy's own are.
    NOTHING = 0
    #: That all steps are done: only then the run ends.
    DONE = 1
    #: That each step is done, before its readers begin.
    EACH = 2


class Devices(Protocol):
    """The devices of one run. Methods return at once; `wait` returns the events that follow."""

    def launch(self, step: int, place: int) -> None:
        """Run a step whose inputs are all on `place`.

        The events are `Issued` and `Done`, or `Failed`. Launches on one place, and copies to it,
        take effect in order. Where memory is refused, the event is `NoRoom`, and nothing is left of
        the step; later launches that read it are refused, too (`NoRoom` of 0 bytes). Fixed steps
        are never launched: their values exist.
        """

    def copy(self, step: int, src: int, dst: int) -> None:
        """Copy a value to `dst`.

        The event is `Copied`, or `NoRoom` where memory is refused or the value cannot be written to
        the disk. A memory that devices share has the number of the first of them. Copies from the
        disk come in no order.
        """

    def free(self, step: int, place: int) -> None:
        """Free a value in one place, once nothing queued there needs it. There is no event."""

    def follow(self, tape: LaunchTape) -> bool:
        """Replay a launch tape instead of single instructions, without events.

        Returns False where that is not possible: then these devices cannot be used any more.
        """

    def observe(self, record: RunRecord) -> None:
        """Say when steps run, as far as the devices have clocks.

        Called at most once, before anything runs. They set `Issued.span` or add to `record.marks`.
        """

    def wait(self) -> list[Event]:
        """Block until there is an event; returns all that there are."""

    def interrupt(self) -> None:
        """Make `wait` return `Failed(-1, Interrupted)` at once; any thread may call this."""

    def value(self, step: int) -> Any:
        """The value of an output, where the caller can use it."""

    def keep(self, step: int) -> dict[int, Any]:
        """Hand over an output without a copy: its replicas by place."""

    def keep_part(self, step: int, path: tuple[int, ...]) -> tuple[dict[int, Any], int]:
        """Hand over a part of an output: its replicas by place, and the bytes of the part."""

    def close(self) -> None:
        """Free everything that this run holds, and abandon steps that are still running.

        Persisted chunks that existed before the run stay where they are now.
        """


@dataclass
class Lease:
    """The part of a machine's hardware that one run has to itself."""

    #: The devices that the run may use, and their memory.
    machine: Machine
    #: Makes the run's devices; with a tape, these will replay it.
    devices: Callable[[Plan, ResultAssembly, StepListener, LaunchTape | None], Devices]
    #: Threads of a borrowed pool, which runs as many steps at once, in any order; None without one.
    threads: int | None = None


class Hardware(ChunkKeeper, Protocol):
    """The devices of a scheduler between runs: threads, streams, measured links."""

    #: "cpu" or "cuda".
    kind: str
    #: The name of each device, for people.
    names: tuple[str, ...]
    #: The devices, their memory and their links, for the planner.
    machine: Machine

    @property
    def trouble(self) -> str:
        """Names the lost devices, for people; "" where there are none."""

    def can_replay(self, plan: Plan) -> bool:
        """Whether its devices can replay a launch tape of this plan."""

    def home(self, value: Any) -> int | None:
        """The device that holds a value of the graph; None where every device can read it."""

    def settings(self) -> dict[str, Any]:
        """Dask's configuration while this hardware is the default."""

    def callers_device(self) -> int | None:
        """The device on which the calling thread expects small results; None for any."""

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """A host array for results, made so that devices write it fast."""

    def rooms(self, plan: Plan, assembly: ResultAssembly) -> Any:
        """The parts of a result that steps can write directly into it; None where there are none.

        See `devices/cuda/result_rooms.py`.
        """

    def join(self, blocks: Any) -> Any:
        """One array from nested lists of blocks, wherever they live."""

    @property
    def bring(self) -> Callable[..., Any] | None:
        """Like `join`, with the array on the host; None where `join` gives one there."""

    @property
    def send(self) -> Callable[[Any], Any] | None:
        """Copies a host array to the caller's device; None where there is no such device."""

    def to_numpy(self, value: Any) -> Any:
        """Copy an array of a device to the host, and wait for it; keep any other value."""

    def synchronize(self) -> None:
        """Wait for everything that runs have queued."""

    def recognize_loss(self, error: BaseException) -> DeviceLost | None:
        """The `DeviceLost` for an error of a device that no longer answers; None for other errors.

        No later run gets such a device.
        """

    def lease(
        self, num_workers: int | None, pool: CallersPool | None
    ) -> AbstractContextManager[Lease]:
        """Lend devices to one run: `num_workers` threads, or those of the caller's own pool."""

    def when_short(self, shed: Callable[[], object]) -> None:
        """Register a function that frees caches; it is called when the host's memory is short."""

    def when_compiled(self, note: Callable[..., None]) -> None:
        """Register a function that hears of each kernel that is compiled for these devices."""

    def close(self) -> None:
        """Join every thread and free all memory."""


class StepWatcher:
    """Hears of the steps of a run while it goes on. This one does nothing; see `DaskCallbacks`."""

    def note_launch(self, step: int) -> None:
        """A step is handed to its device."""

    def note_done(self, step: int) -> None:
        """A step is done."""
