"""How many tasks of a run on a cluster are done, as Dask's callbacks look at it.

Workers report how much of a stage is done; `attach` hands the reports to the `RunProgress` of each
run that somebody watches: Dask's `ProgressBar`, or a display of `diagnostics.progress`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from time import monotonic
from typing import Any

from ..diagnostics.log import logger
from ..runtime.dask_callbacks import begin_progress_bars, is_progress_bar
from ..runtime.under_way import runs_under_way
from .answer import Key

_numbers = count(1)


class RunProgress:
    """How many tasks of a run are done, in the form of the state of Dask's schedulers."""

    def __init__(self, tasks: Mapping[Key, int]):
        self.number, self.began = next(_numbers), monotonic()
        self.recorder, self.error, self.is_over = None, "", False
        #: The number of tasks of each stage.
        self.tasks = tasks
        #: The part of each stage that is done, from 0 to 1.
        self.done = dict.fromkeys(tasks, 0.0)
        empty = "dependencies", "dependents", "cache", "waiting_data"
        none = "waiting", "running", "released", "finished", "ready"
        #: What callbacks look at: its "finished" and "ready" have the right lengths.
        self.state: dict[str, Any] = {name: {} for name in empty} | dict.fromkeys(none, ())
        self._count()

    def update(self, done: float, stage: Key | None = None) -> None:
        """Note the part of a stage that is done; of all stages where `stage` is None."""
        if stage is None:
            self.done = dict.fromkeys(self.tasks, done)
        elif stage in self.done:
            self.done[stage] = max(done, self.done[stage])
        self._count()

    @property
    def seconds(self) -> float:
        """Since it began."""
        return monotonic() - self.began

    @property
    def steps(self) -> int:
        """How many tasks the run has."""
        return sum(self.tasks.values())

    @property
    def steps_left(self) -> int:
        """How many of them are not done, as far as workers have reported."""
        return len(self.state["ready"])

    def _count(self) -> None:
        every = self.steps
        finished = int(sum(n * self.done[s] for s, n in self.tasks.items()))
        self.state["finished"], self.state["ready"] = range(finished), range(every - finished)

    @contextmanager
    def shown_to(self, callbacks: Sequence[Any], dsk: Mapping[Key, Any]) -> Iterator[None]:
        """Tell Dask's callbacks that a run begins, and in the end whether it failed.

        Tasks run elsewhere: a `pretask` or `posttask` is not called, which a log line says.
        """
        for callback in callbacks:
            if callback[3] or (callback[2] and not is_progress_bar(callback)):
                logger("cluster").info("on a cluster, callbacks hear of no task: %r", callback)
        begun = []
        failed = True
        runs_under_way.begin(self)
        try:
            for callback in callbacks:
                if callback[0]:
                    callback[0](dsk)
                begun.append(callback)
            for _, start_state, *_ in callbacks:
                if start_state:
                    start_state(dsk, self.state)
            begin_progress_bars(callbacks, dsk, self.state)
            yield
            self.update(1.0)
            failed = False
        finally:
            self.is_over, self.error = True, "it failed" if failed else ""
            runs_under_way.end(self)
            for *_, end in begun:
                if end:
                    end(dsk, self.state, failed)
