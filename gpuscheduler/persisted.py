"""Chunks of persisted collections: where each of them is, and which run may move it.

A chunk belongs to the collections whose graphs hold it, and goes with the last of them. Until then
its value is on a device, on the host, or in a file: runs that need the room send it away, and those
that read it bring it back. Decides nothing and moves nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any, Protocol
from weakref import ref

from dask._task_spec import Task

from .forks import new_rlock

Key = Any
Places = Mapping[int, Any]  # place -> what the hardware keeps there


class _Changes:
    """Of any chunk's places, or of which chunks there are: `latest` is another one after each, and
    `moves` after each of the places."""

    numbers = count(1)
    latest = moves = 0

    @classmethod
    def one(cls) -> int:
        cls.latest = latest = next(cls.numbers)
        return latest

    @classmethod
    def move(cls) -> None:
        cls.moves = cls.one()


def moves() -> int:
    """Another number after each change of where any chunk is."""
    return _Changes.moves


def worth_keeping(home: int, places: Places) -> dict[int, Any]:
    """The places in which a value stays when a run is over: its own device, the host and the disk;
    another device only where nothing else has it.

    >>> worth_keeping(0, {0: "x", 1: "x", -1: "x"}), worth_keeping(0, {1: "x", 2: "x"})
    ({0: 'x', -1: 'x'}, {1: 'x'})
    """
    out = {p: held for p, held in places.items() if p == home or p < 0}
    if not out and places:
        other = min(places)
        out = {other: places[other]}
    return out


def bytes_in(chunks: Iterable[Chunk]) -> dict[int, int]:
    """What chunks have in each place, with replicas."""
    return _added_up((c.nbytes, c.places) for c in chunks)


def _added_up(parts: Iterable[tuple[int, Iterable[int]]]) -> dict[int, int]:
    out: dict[int, int] = {}
    for nbytes, places in parts:
        for place in places:
            out[place] = out.get(place, 0) + nbytes
    return out


class Keeper(Protocol):
    """The hardware that a chunk is on."""

    def shown(self, places: Places) -> Any:
        """The value, where it is in a device's memory; None where it is not."""

    def taken(self, key: Key, place: int, places: Places) -> Any:
        """The value where the caller can use it."""

    def forget(self, places: Places) -> None:
        """Nobody will ask for the value any more."""


class Chunk:
    """A value and its places. Called, it gives the value: any Dask scheduler can run it as a task.

    >>> class Memory:
    ...     def taken(self, key, place, places):
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
        "moved",
        "nbytes",
        "place",
        "places",
        "step",
    )

    def __init__(self, key: Key, place: int, nbytes: int, places: Places, keeper: Keeper):
        self.key, self.place, self.nbytes = key, place, nbytes
        self.places: Places = places  # never changed: a new one takes its place
        self.keeper = keeper
        self.moved = 0  # how often it came back to its device, at another address
        self.step: Any = None  # what stands for it in the plans of runs that do not read it
        self._lock = new_rlock()

    def __call__(self) -> Any:
        while True:
            places = self.places
            try:
                return self.keeper.taken(self.key, self.place, places)
            except OSError:
                if self.places is places:
                    raise
                # a run has just brought it back and removed the file

    def shown(self) -> Any:
        """The value if it is in a device's memory, else None. Moves nothing."""
        return self.keeper.shown(self.places)

    def came(self, place: int, held: Any) -> None:
        with self._lock:
            self.places = {**self.places, place: held}
            self.moved += place == self.place
        _Changes.move()

    def left(self, place: int) -> None:
        with self._lock:
            self.places = {p: held for p, held in self.places.items() if p != place}
        _Changes.move()

    def settled(self) -> None:
        """At the end of a run: let go of replicas that only it had a use for."""
        if len(self.places) > 1:
            with self._lock:
                self.places = worth_keeping(self.place, self.places)
            _Changes.move()

    def __reduce__(self) -> tuple[Any, ...]:
        return Given, (self(),)

    def __dask_tokenize__(self) -> Any:
        return type(self).__name__, self.key

    def __repr__(self) -> str:
        return f"<Chunk {self.key!r}, {self.nbytes:,} bytes>"

    def __del__(self) -> None:
        with suppress(Exception):  # at the end of the process its parts go in any order
            self.keeper.forget(self.places)


class Kept(Task):
    """The task of a persisted chunk. `result` gives its value, as that of Dask's futures does."""

    __slots__ = ()

    def result(self) -> Any:
        return self.func()


class Given:
    """What a chunk is elsewhere, in another process or as a copy: the value itself."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value

    def __call__(self) -> Any:
        return self.value


class _Run:
    """Stands for a run. It is held by nobody else, so it goes with the run, whatever ends that."""

    __slots__ = ("__weakref__",)


class Persisted:
    """All chunks of one scheduler that somebody still holds."""

    def __init__(self) -> None:
        self._chunks: dict[int, ref[Chunk]] = {}  # by id, in the order of their making
        #: As `beside` has counted it, and when: bytes in each place, and by chunk.
        self._held: tuple[int, dict[int, int], dict[int, tuple[int, tuple[int, ...]]]] = 0, {}, {}
        #: Which runs that go on may move which chunks.
        self._loans: list[tuple[ref[_Run], list[Chunk]]] = []
        self._lock = new_rlock()  # collecting garbage may come back here

    def add(self, chunk: Chunk) -> None:
        known = id(chunk)
        with self._lock:
            self._chunks[known] = ref(chunk, lambda _: self._forget(known))
            self._count(known, chunk.nbytes, tuple(chunk.places))

    def _forget(self, known: int) -> None:
        """In whatever thread, and with whatever locks, the last reference to a chunk went."""
        self._chunks.pop(known, None)
        if not self._lock.acquire(blocking=False):
            _Changes.one()
            return
        try:
            self._count(known, 0, ())
        finally:
            self._lock.release()

    def _count(self, known: int, nbytes: int, places: tuple[int, ...]) -> None:
        """Keep what `beside` has counted, where nothing else has changed since."""
        (when, held, counted), latest = self._held, _Changes.latest
        now = _Changes.one()
        if when != latest or now != latest + 1:
            return
        before, where = counted.pop(known, (0, ()))
        for place in where:
            held[place] -= before
        for place in places:
            held[place] = held.get(place, 0) + nbytes
        if places:
            counted[known] = nbytes, places
        self._held = now, held, counted

    def every(self) -> list[Chunk]:
        refs = list(self._chunks.values())  # one step, for chunks may go at any time
        return [c for r in refs if (c := r()) is not None]

    def known(self, chunks: Iterable[Chunk]) -> list[Chunk]:
        """Those that are among these."""
        return [c for c in chunks if id(c) in self._chunks]

    @contextmanager
    def lent(self, some: list[Chunk] | None = None) -> Iterator[list[Chunk]]:
        """The chunks that a run may move, all or some that are `known`: those that no other run
        may.

        >>> persisted = Persisted()
        >>> persisted.add(chunk := Chunk("x", 0, 8, {0: "value"}, None))
        >>> with persisted.lent() as mine, persisted.lent() as others:
        ...     print(mine, others)
        [<Chunk 'x', 8 bytes>] []
        """
        if not self._chunks:
            yield []
            return
        run = _Run()
        with self._lock:
            mine = self.every() if some is None else some
            self._loans = [loan for loan in self._loans if loan[0]() is not None]
            if self._loans:
                taken = {id(c) for _, chunks in self._loans for c in chunks}
                mine = [c for c in mine if id(c) not in taken]
            loan = ref(run), mine
            self._loans.append(loan)
        try:
            yield mine
        finally:
            with self._lock:
                self._loans = [other for other in self._loans if other is not loan]

    def beside(
        self, some: Iterable[Chunk], theirs: Mapping[int, int] | None = None
    ) -> dict[int, int]:
        """Bytes in each place of all but some of them, with replicas; `theirs`, where that is known
        already.

        >>> chunks = [Chunk(k, 0, 8, {0: "value"}, None) for k in "xy"]
        >>> persisted = Persisted()
        >>> for chunk in chunks:
        ...     persisted.add(chunk)
        >>> persisted.beside([chunks[0]])
        {0: 8}
        """
        if theirs is None:
            theirs = bytes_in([c for c in {*some} if id(c) in self._chunks])
        with self._lock:
            out = dict(self._every())
        for place, nbytes in theirs.items():
            out[place] = out.get(place, 0) - nbytes
        return {place: nbytes for place, nbytes in out.items() if nbytes > 0}

    def _every(self) -> dict[int, int]:
        """Bytes of all of them in each place, with replicas."""
        when, held, _ = self._held
        latest = _Changes.latest
        if when != latest:
            counted = {id(c): (c.nbytes, tuple(c.places)) for c in self.every()}
            held = _added_up(counted.values())
            self._held = latest, held, counted
        return held

    def nbytes(self) -> dict[int, int]:
        """Bytes on each device, on the host and on the disk; what is in several places counts where
        it is fastest."""
        out: dict[int, int] = {}
        for chunk in self.every():
            place = max(chunk.places, default=chunk.place)
            place = chunk.place if place >= 0 else place
            out[place] = out.get(place, 0) + chunk.nbytes
        return out
