"""A persisted chunk as Dask sees it, and who keeps its value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import count
from typing import Any, Protocol

from dask._task_spec import Task

from ..forks import new_rlock
from ..values import leaves

Key = Any
Places = Mapping[int, Any]  # place -> what the hardware keeps there


class PlacesVersion:
    """Version of the places of all chunks.

    `latest` changes with the places of any chunk, and with the set of chunks; `moves` with the
    places alone.
    """

    numbers = count(1)
    latest = moves = 0

    @classmethod
    def new_number(cls) -> int:
        cls.latest = latest = next(cls.numbers)
        return latest

    @classmethod
    def move(cls) -> None:
        cls.moves = cls.new_number()


def count_moves() -> int:
    """A number that changes whenever any chunk moves."""
    return PlacesVersion.moves


def worth_keeping(home: int, places: Places) -> dict[int, Any]:
    """The places in which a value stays after a run.

    These are its own device, the host and the disk; another device only where no other place has
    it.

    >>> worth_keeping(0, {0: "x", 1: "x", -1: "x"}), worth_keeping(0, {1: "x", 2: "x"})
    ({0: 'x', -1: 'x'}, {1: 'x'})
    """
    out = {p: held for p, held in places.items() if p == home or p < 0}
    if not out and places:
        other = min(places)
        out = {other: places[other]}
    return out


def bytes_in(chunks: Iterable[Chunk]) -> dict[int, int]:
    """Bytes of chunks in each place, with replicas."""
    return sum_by_place((c.nbytes, c.places) for c in chunks)


def sum_by_place(parts: Iterable[tuple[int, Iterable[int]]]) -> dict[int, int]:
    out: dict[int, int] = {}
    for nbytes, places in parts:
        for place in places:
            out[place] = out.get(place, 0) + nbytes
    return out


class ChunkKeeper(Protocol):
    """The hardware that a chunk is on."""

    def device_value(self, places: Places) -> Any:
        """The value, where it is in a device's memory; None where it is not."""

    def caller_value(self, key: Key, place: int, places: Places) -> Any:
        """The value where the caller can use it."""

    def value_on_host(self, key: Key, place: int, places: Places) -> Any:
        """The value with NumPy's arrays in place of those of devices."""

    def forget(self, places: Places) -> None:
        """Nobody will ask for the value any more."""


class Chunk:
    """A value and its places. Called, it gives the value: any Dask scheduler can run it as a task.

    >>> class Memory:
    ...     def caller_value(self, key, place, places):
    ...         return places[place]
    ...     def forget(self, places):
    ...         print("gone from", sorted(places))
    >>> chunk = Chunk("x", 0, 32, {0: 5}, Memory())
    >>> print(chunk(), chunk)
    5 <Chunk 'x', 32 bytes>
    >>> del chunk
    gone from [0]
    """

    __slots__ = (
        "__weakref__",
        "_lock",
        "keeper",
        "key",
        "nbytes",
        "place",
        "places",
        "resident",
        "return_count",
        "step",
    )

    def __init__(
        self,
        key: Key,
        place: int,
        nbytes: int,
        places: Places,
        keeper: ChunkKeeper,
        resident: bool = False,
    ):
        self.key, self.place, self.nbytes = key, place, nbytes
        self.places: Places = places  # never changed: a new one takes its place
        self.keeper = keeper
        #: Whether the arrays are NumPy's, and GPUs keep them: whoever asks for them gets NumPy's.
        self.resident = resident
        #: How often it came back to its device, at another address.
        self.return_count = 0
        self.step: Any = None  # what stands for it in the plans of runs that do not read it
        self._lock = new_rlock()

    def __call__(self) -> Any:
        while True:
            places = self.places
            try:
                if self.resident:
                    return self.keeper.value_on_host(self.key, self.place, places)
                return self.keeper.caller_value(self.key, self.place, places)
            except OSError:
                if self.places is places:
                    raise
                # a run has just brought it back and removed the file

    def device_value(self) -> Any:
        """The value if it is in a device's memory and may be seen there, else None.

        Moves nothing.
        """
        value = self.value_on_device()
        if not self.resident:
            return value
        there = any(type(v).__module__.partition(".")[0] == "cupy" for v in leaves(value))
        return None if there else value

    def value_on_device(self) -> Any:
        """The value as a device holds it, for planners; None where none does. Moves nothing."""
        return self.keeper.device_value(self.places)

    def note_arrival(self, place: int, held: Any) -> None:
        with self._lock:
            self.places = {**self.places, place: held}
            self.return_count += place == self.place
        PlacesVersion.move()

    def note_departure(self, place: int) -> None:
        with self._lock:
            self.places = {p: held for p, held in self.places.items() if p != place}
        PlacesVersion.move()

    def end_run(self) -> None:
        """At the end of a run: let go of replicas that only it had a use for."""
        if len(self.places) > 1:
            with self._lock:
                self.places = worth_keeping(self.place, self.places)
            PlacesVersion.move()

    def __reduce__(self) -> tuple[Any, ...]:
        return ChunkCopy, (self(),)

    def __dask_tokenize__(self) -> Any:
        return type(self).__name__, self.key

    def __repr__(self) -> str:
        return f"<Chunk {self.key!r}, {self.nbytes:,} bytes>"

    def __del__(self) -> None:
        with suppress(Exception):  # at the end of the process its parts go in any order
            self.keeper.forget(self.places)


class ChunkTask(Task):
    """The task of a persisted chunk. `result` gives its value, as that of Dask's futures does."""

    __slots__ = ()

    def result(self) -> Any:
        return self.func()


class ChunkCopy:
    """What a chunk is elsewhere, in another process or as a copy: the value itself."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value

    def __call__(self) -> Any:
        return self.value
