"""How many tasks of a run on a cluster are done, as Dask's callbacks look at it.

Workers report how much of a stage is done; `attach` hands the reports to the `RunProgress` of each
run that somebody watches. Dask's `ProgressBar` is such a watcher.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from .answer import Key


class RunProgress:
    """How many tasks of a run are done, in the form of the state of Dask's schedulers."""

    def __init__(self, tasks: Mapping[Key, int]):
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

    def _count(self) -> None:
        every = sum(self.tasks.values())
        finished = int(sum(n * self.done[s] for s, n in self.tasks.items()))
        self.state["finished"], self.state["ready"] = range(finished), range(every - finished)

    @contextmanager
    def shown_to(
        self, callbacks: Sequence[Any], dsk: Mapping[Key, Any], first: Key | None
    ) -> Iterator[None]:
        """Tell Dask's callbacks that a run begins, and in the end whether it failed.

        `ProgressBar` begins to look when a task begins: callbacks are told of the `first` one.
        """
        begun = []
        failed = True
        try:
            for callback in callbacks:
                if callback[0]:
                    callback[0](dsk)
                begun.append(callback)
            for _, start_state, *_ in callbacks:
                if start_state:
                    start_state(dsk, self.state)
            for _, _, pretask, *_ in callbacks:
                if pretask and first is not None:
                    pretask(first, dsk, self.state)
            yield
            self.update(1.0)
            failed = False
        finally:
            for *_, end in begun:
                if end:
                    end(dsk, self.state, failed)
