"""The registry of persisted chunks: where each is, and which run may move it.

A chunk belongs to the collections whose graphs hold it, and goes with the last of them. Until then
its value is on a device, on the host, or in a file: runs that need the room send it away, and those
that read it bring it back. Decides nothing and moves nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from weakref import ref

from ..forks import new_rlock
from ..frontend.chunk import Chunk, PlacesVersion, bytes_in, sum_by_place


class _RunToken:
    """Identifies a run that has borrowed chunks; the loan ends when the token is collected.

    Only the run's own frame holds it, so the loan ends however the run ends.
    """

    __slots__ = ("__weakref__",)


class PersistedChunks:
    """All chunks of one scheduler that somebody still holds."""

    def __init__(self) -> None:
        self._chunks: dict[int, ref[Chunk]] = {}  # by id, in the order of their making
        #: The `PlacesVersion` that was counted last, the bytes in each place, and those by chunk.
        self._held: tuple[int, dict[int, int], dict[int, tuple[int, tuple[int, ...]]]] = 0, {}, {}
        #: The chunks that each run under way may move.
        self._loans: list[tuple[ref[_RunToken], list[Chunk]]] = []
        self._lock = new_rlock()  # collecting garbage may come back here

    def add(self, chunk: Chunk) -> None:
        known = id(chunk)
        with self._lock:
            self._chunks[known] = ref(chunk, lambda _: self._forget(known))
            self._count(known, chunk.nbytes, tuple(chunk.places))

    def _forget(self, known: int) -> None:
        """Note that the last reference to a chunk is gone.

        This may run in any thread and while any lock is held, so it waits for no lock.
        """
        self._chunks.pop(known, None)
        if not self._lock.acquire(blocking=False):
            PlacesVersion.new_number()
            return
        try:
            self._count(known, 0, ())
        finally:
            self._lock.release()

    def _count(self, known: int, nbytes: int, places: tuple[int, ...]) -> None:
        """Update the counted bytes of a chunk, if nothing else has changed since."""
        (when, held, counted), latest = self._held, PlacesVersion.latest
        now = PlacesVersion.new_number()
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

    def chunks(self) -> list[Chunk]:
        refs = list(self._chunks.values())  # one step, for chunks may go at any time
        return [c for r in refs if (c := r()) is not None]

    def select_kept(self, chunks: Iterable[Chunk]) -> list[Chunk]:
        """Return the chunks among these that the registry has."""
        return [c for c in chunks if id(c) in self._chunks]

    @contextmanager
    def lend(self, some: list[Chunk] | None = None) -> Iterator[list[Chunk]]:
        """Yield chunks that only this run may move, out of all or of `some`.

        >>> persisted = PersistedChunks()
        >>> persisted.add(chunk := Chunk("x", 0, 8, {0: "value"}, None))
        >>> with persisted.lend() as mine, persisted.lend() as others:
        ...     print(mine, others)
        [<Chunk 'x', 8 bytes>] []
        """
        if not self._chunks:
            yield []
            return
        run = _RunToken()
        with self._lock:
            mine = self.chunks() if some is None else some
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

    def bytes_of_others(
        self, some: Iterable[Chunk], theirs: Mapping[int, int] | None = None
    ) -> dict[int, int]:
        """Return the bytes in each place of all chunks except `some`, replicas included.

        `theirs` are the bytes of `some` by place, where the caller knows them.

        >>> chunks = [Chunk(k, 0, 8, {0: "value"}, None) for k in "xy"]
        >>> persisted = PersistedChunks()
        >>> for chunk in chunks:
        ...     persisted.add(chunk)
        >>> persisted.bytes_of_others([chunks[0]])
        {0: 8}
        """
        if theirs is None:
            theirs = bytes_in([c for c in {*some} if id(c) in self._chunks])
        with self._lock:
            out = dict(self._bytes_of_all())
        for place, nbytes in theirs.items():
            out[place] = out.get(place, 0) - nbytes
        return {place: nbytes for place, nbytes in out.items() if nbytes > 0}

    def _bytes_of_all(self) -> dict[int, int]:
        """Bytes of all of them in each place, with replicas."""
        when, held, _ = self._held
        latest = PlacesVersion.latest
        if when != latest:
            counted = {id(c): (c.nbytes, tuple(c.places)) for c in self.chunks()}
            held = sum_by_place(counted.values())
            self._held = latest, held, counted
        return held

    def nbytes(self) -> dict[int, int]:
        """Bytes on each device, on the host and on the disk.

        A chunk in several places counts in the fastest.
        """
        out: dict[int, int] = {}
        for chunk in self.chunks():
            place = max(chunk.places, default=chunk.place)
            place = chunk.place if place >= 0 else place
            out[place] = out.get(place, 0) + chunk.nbytes
        return out
