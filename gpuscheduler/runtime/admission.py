"""Admission control: which runs may be under way at the same time.

Runs go together when the memory is large enough for all of them. Other runs wait, in the order of
asking, until those under way end. Two kinds of run never wait: small ones, and a run inside a task
of another run, which waits for it. When nothing happens in the runs under way for `PATIENCE`
seconds, the first waiting run begins. A run's need of memory is computed when a second run comes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from time import monotonic

from ..forks import new_rlock

#: The part of each memory that small runs, which never wait, may take together.
SMALL = 1 / 20
#: Seconds without an event in the runs under way after which the first waiting run begins.
PATIENCE = 10.0

Bytes = Mapping[int, int]  # by memory


class AdmittedRun:
    """A run and the memory that it needs; `beats` counts the events in it."""

    __slots__ = ("_ask", "_need", "beats", "small")

    def __init__(self, ask: Callable[[], Bytes]):
        self._ask = ask
        self._need: Bytes | None = None
        self.beats = 0
        self.small = False  # whether it went before others because it is

    @property
    def need(self) -> Bytes:
        """Bytes that the run may take in each memory at most."""
        if self._need is None:
            self._need = self._ask()
        return self._need

    def end(self) -> None:
        """Hold nothing of the run: contexts that tasks have copied may live on."""
        self._ask, self._need = dict, {}


#: The turns of the runs that the calling code is a task of.
_inside: ContextVar[tuple[AdmittedRun, ...]] = ContextVar("inside", default=())


def fits(limit: Bytes, turns: list[AdmittedRun], part: float = 1.0) -> bool:
    """Whether runs may take no more than a part of the memory together.

    >>> one, two = AdmittedRun(lambda: {0: 60}), AdmittedRun(lambda: {0: 50})
    >>> fits({0: 100}, [one]), fits({0: 100}, [one, two])
    (True, False)
    """
    return all(sum([min(t.need.get(m, 0), n) for t in turns]) <= part * n for m, n in limit.items())


class Admission:
    """The runs of one scheduler, and the limits of its memories.

    `held` gives the bytes of persisted chunks in each, which no run can count on. It is called when
    a run waits.
    """

    def __init__(
        self,
        limit: Bytes,
        held: Callable[[], Bytes] = dict,
        patience: float = PATIENCE,
        now: Callable[[], float] = monotonic,
    ):
        self.limit, self.held, self.patience, self.now = limit, held, patience, now
        self.running: list[AdmittedRun] = []
        self.waiting: list[AdmittedRun] = []
        self._changed = threading.Condition(new_rlock())

    @contextmanager
    def turn(self, ask: Callable[[], Bytes]) -> Iterator[AdmittedRun]:
        """Wait until a run may begin; it ends with the context.

        Tasks of the run inherit the caller's context variables. By these a run inside of another is
        known.
        """
        mine, outer = AdmittedRun(ask), _inside.get()
        token = _inside.set((*outer, mine))
        try:
            with self._changed:
                if self.running and not any(t in outer for t in self.running):
                    self._wait(mine)
                self.running.append(mine)
            yield mine
        finally:  # also where somebody interrupts the wait
            _inside.reset(token)
            with self._changed:
                if mine in self.running:
                    self.running.remove(mine)
                mine.end()
                self._changed.notify_all()

    def _wait(self, mine: AdmittedRun) -> None:
        self.waiting.append(mine)
        try:
            seen, since = self._beats_of_runs(), self.now()
            while not self.may_begin(mine):
                self._changed.wait(self.patience / 10)
                if self._beats_of_runs() != seen:
                    seen, since = self._beats_of_runs(), self.now()
                elif self.now() - since >= self.patience and self.waiting[0] is mine:
                    break  # what is under way may wait for this one
        finally:
            self.waiting.remove(mine)
            self._changed.notify_all()

    def may_begin(self, turn: AdmittedRun) -> bool:
        """Whether a waiting run may begin beside the running ones."""
        if self.waiting[0] is turn:
            held = self.held()
            left = {m: n - held.get(m, 0) for m, n in self.limit.items()}
            if fits(left, [*self.running, turn]):
                return True
        turn.small = fits(self.limit, [*(t for t in self.running if t.small), turn], SMALL)
        return turn.small

    def _beats_of_runs(self) -> tuple[tuple[int, int], ...]:
        return tuple((id(t), t.beats) for t in self.running)
