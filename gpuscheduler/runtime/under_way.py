"""The runs under way in this process, for displays of their progress.

A display reads. A run never waits for one, and calls none of its code but `woken`, as it begins.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Protocol


class RunUnderWay(Protocol):
    """What a display reads of a run: a `RunRecord`, or a run on a cluster."""

    number: int
    error: str  # what ended it; "" where nothing did

    @property
    def recorder(self) -> Any:
        """That of the scheduler that runs it; None on a cluster."""

    @property
    def seconds(self) -> float:
        """Since it began."""

    @property
    def steps(self) -> int:
        """How many steps it has to run; 0 before it is planned."""

    @property
    def steps_left(self) -> int:
        """How many of them are not done."""

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""


class RunsUnderWay:
    """The runs of a process, of all its schedulers.

    >>> RunsUnderWay().runs()
    []
    """

    def __init__(self) -> None:
        self._runs: dict[int, RunUnderWay] = {}
        #: Get each run that begins, in the caller's thread; they return at once.
        self.woken: tuple[Callable[[Any], None], ...] = ()

    def begin(self, run: RunUnderWay) -> None:
        """Enter a run, and wake whoever shows runs."""
        self._runs[id(run)] = run
        for wake in self.woken:
            wake(run)

    def end(self, run: RunUnderWay) -> None:
        """Take a run out."""
        self._runs.pop(id(run), None)

    def runs(self, recorder: Any = None) -> list[Any]:
        """The runs under way, oldest first; with `recorder`, those of one scheduler."""
        runs = list(self._runs.copy().values())  # other threads begin and end runs
        return [r for r in runs if recorder is None or r.recorder is recorder]

    def forget(self) -> None:
        """Forget the parent's runs and displays, in a forked child."""
        self._runs, self.woken = {}, ()


#: The runs of this process.
runs_under_way = RunsUnderWay()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=runs_under_way.forget)
